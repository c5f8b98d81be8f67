"""Every error of pgqueue, and the one place where the database's errors become them.

Each class carries `http_status`, `problem_type` and `exit_code`, so that the REST layer and commands need no tables of
their own.
"""

import re
from datetime import timedelta
from typing import ClassVar, Final

import psycopg


class PgqueueError(Exception):
    """Root of all errors. `retry_after` is in seconds; `column` names the offending column if known."""

    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    problem_type: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "Internal error"
    default_retry_after: ClassVar[float | None] = None

    def __init__(
        self,
        message: str = "",
        *,
        hint: str | None = None,
        column: str | None = None,
        sqlstate: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message or self.title)
        self.hint = hint
        self.column = column
        self.sqlstate = sqlstate
        self.retry_after = self.default_retry_after if retry_after is None else retry_after


class ConfigError(PgqueueError):
    """A setting, an argument or a declaration is wrong; nothing was done."""

    exit_code = 2
    problem_type = "configuration-error"
    title = "Wrong configuration"


class UnknownTask(PgqueueError):
    exit_code = 2
    http_status = 422
    problem_type = "unknown-task"
    title = "No task of this name"


class InvalidJob(PgqueueError):
    exit_code = 2
    http_status = 422
    problem_type = "invalid-job"
    title = "The job or setting is not valid"


class InvalidPayload(InvalidJob):
    """The payload cannot be stored, or does not fit the task's parameters."""

    problem_type = "invalid-payload"
    title = "The payload is not valid"


class InvalidResult(PgqueueError):
    """A task returned what cannot be stored as JSON."""

    http_status = 422
    problem_type = "invalid-result"
    title = "The result is not storable"


class JobNotFound(PgqueueError):
    exit_code = 3
    http_status = 404
    problem_type = "job-not-found"
    title = "No such job"


class WrongState(PgqueueError):
    """The verb is not possible in the present state of a job, a key or a schedule."""

    exit_code = 4
    http_status = 409
    problem_type = "wrong-state"
    title = "The present state forbids this"


class DuplicateJob(PgqueueError):
    exit_code = 4
    http_status = 409
    problem_type = "duplicate-job"
    title = "The idempotency key is taken"


class QueueFull(PgqueueError):
    http_status = 503
    problem_type = "queue-full"
    title = "The queue is full"
    default_retry_after = 1.0


class RateLimitedError(PgqueueError):
    http_status = 429
    problem_type = "rate-limited"
    title = "Too many requests"
    default_retry_after = 1.0


class AccessDenied(PgqueueError):
    http_status = 403
    problem_type = "access-denied"
    title = "The database role may not do this"


class KeyRefused(PgqueueError):
    """The API key of a request is not in force."""

    http_status = 401
    problem_type = "unauthenticated"
    title = "A key is needed"


class LeaseLost(PgqueueError):
    """This attempt no longer owns its job: the lease expired and the job was taken away."""

    http_status = 409
    problem_type = "lease-lost"
    title = "The lease was lost"


class NotFinished(PgqueueError):
    """The job did not end within the time waited."""

    exit_code = 6
    http_status = 409
    problem_type = "not-finished"
    title = "The job has not ended"


class JobFailed(PgqueueError):
    """The job ended as a dead letter; the message is its last error."""

    http_status = 409
    problem_type = "job-failed"
    title = "The job failed"


class JobCancelled(JobFailed):
    problem_type = "job-cancelled"
    title = "The job was cancelled"


class DatabaseError(PgqueueError):
    """The database refused a call for a reason that is a fault of ours or of the server."""

    problem_type = "database-error"
    title = "Database error"


class DatabaseUnavailable(DatabaseError):
    exit_code = 7
    http_status = 503
    problem_type = "database-unavailable"
    title = "The database cannot be reached"
    default_retry_after = 1.0


class DatabaseReadOnly(DatabaseUnavailable):
    """The database takes no writes, as a standby that was not promoted does."""

    title = "The database takes no writes"


class DatabaseConflict(DatabaseUnavailable):
    """A deadlock or serialization failure: nothing was changed, the same call may be made again."""

    exit_code = 4
    problem_type = "database-conflict"
    title = "Concurrent change"


class SchemaOutdated(DatabaseError):
    exit_code = 5
    http_status = 503
    problem_type = "schema-outdated"
    title = "The schema pgqueue is missing or old"


class TaskSignal(PgqueueError):
    """What a task raises to say how its attempt ends."""

    problem_type = "task-signal"
    title = "Raised outside a task"

    def __init__(self, reason: str) -> None:
        super().__init__(reason or f"{type(self).__name__} without a reason")


class Retry(TaskSignal):
    """Fail this attempt and try again, after `in_` if given, else after the policy's backoff.

    `Retry(30)` is `Retry(in_=30)`, as with Snooze and RateLimited.
    """

    def __init__(
        self, reason: str | float | timedelta = "the task asked for a retry", *, in_: float | timedelta | None = None
    ) -> None:
        if not isinstance(reason, str):
            in_ = reason if in_ is None else in_
            reason = "the task asked for a retry"
        super().__init__(reason)
        self.in_ = as_seconds("in_", in_)


class Snooze(TaskSignal):
    """Put the job back for `for_` (seconds or timedelta); no attempt is charged."""

    def __init__(self, for_: float | timedelta, reason: str = "the task asked to be run later") -> None:
        super().__init__(reason)
        self.for_ = as_delay("for_", for_)


class Cancel(TaskSignal):
    """End the job as cancelled; never retried."""

    def __init__(self, reason: str = "the task cancelled its job") -> None:
        super().__init__(reason)


class DeadLetter(TaskSignal):
    """End the job as a dead letter at once, whatever retries are left."""

    def __init__(self, reason: str = "the task gave its job up") -> None:
        super().__init__(reason)


class RateLimited(TaskSignal):
    """Pause this job type until `retry_after` has passed; no attempt is charged."""

    http_status = 429
    problem_type = "rate-limited"

    def __init__(self, retry_after: float | timedelta, reason: str = "rate limited") -> None:
        super().__init__(reason)
        self.retry_after: float = as_delay("retry_after", retry_after)


LONGEST_DELAY = 100 * 365 * 86400.0


def as_seconds(name: str, value: float | timedelta | None) -> float | None:
    """Seconds of a delay given as number or timedelta, or None for None.

    Raises InvalidJob unless it is a number from 0 to a hundred years.
    """
    if value is None:
        return None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidJob(f"{name} is {value!r}; it must be seconds or a timedelta")
    else:
        seconds = float(value) if abs(value) <= LONGEST_DELAY else LONGEST_DELAY * 2
    if not 0 <= seconds <= LONGEST_DELAY:
        raise InvalidJob(f"{name} is {value!r}; it must be from 0 seconds to 100 years")
    return seconds


def as_delay(name: str, value: float | timedelta | None) -> float:
    """As as_seconds, of a delay that must be given."""
    seconds = as_seconds(name, value)
    if seconds is None:
        raise InvalidJob(f"{name} is None; it must be seconds or a timedelta")
    return seconds


_BY_SQLSTATE: dict[str, type[PgqueueError]] = {
    "PQ401": KeyRefused,
    "PQ404": JobNotFound,
    "PQ409": WrongState,
    "PQ422": InvalidJob,
    "PQ429": RateLimitedError,
    "PQ503": QueueFull,
    "23505": DuplicateJob,
    "23514": InvalidJob,
    "23502": InvalidJob,
    "25006": DatabaseReadOnly,
    "26000": DatabaseUnavailable,
    "3F000": SchemaOutdated,
    "40001": DatabaseConflict,
    "40P01": DatabaseConflict,
    "55P03": DatabaseConflict,
    "42501": AccessDenied,
    "42P01": SchemaOutdated,
    "42P05": DatabaseUnavailable,
    "42703": SchemaOutdated,
    "42883": SchemaOutdated,
    "57014": DatabaseUnavailable,
}
_BY_CLASS: dict[str, type[PgqueueError]] = {
    "08": DatabaseUnavailable,
    "22": InvalidJob,
    "28": DatabaseUnavailable,
    "3D": DatabaseUnavailable,
    "53": DatabaseUnavailable,
    "54": InvalidJob,
    "57": DatabaseUnavailable,
    "58": DatabaseUnavailable,
}
_HINTS: dict[type[PgqueueError], str] = {
    SchemaOutdated: "run: pgqueue migrate",
    AccessDenied: "grant the database role pgqueue_producer (to enqueue), pgqueue_reader (to look), pgqueue_operator "
    "(to operate) or pgqueue_worker (to run jobs); migrations are for the owner of the schema",
}
_NOT_KEPT: Final = (
    "a pooler in transaction mode must keep prepared statements (PgBouncer 1.21: max_prepared_statements above 0); "
    "else set PGQUEUE_PREPARE=off, or connect directly"
)
_HINTS_BY_SQLSTATE: Final = dict.fromkeys(("08P01", "26000", "42P05"), _NOT_KEPT)
_RULE: Final = re.compile(r"([a-z0-9_]+) (?:must|is) ")


# What psycopg raises for a connection that cannot be made or is gone.
_CONNECTION_ERRORS = (psycopg.OperationalError, psycopg.InterfaceError)


def error_class(sqlstate: str | None) -> type[PgqueueError]:
    """The class for a SQLSTATE; None (the connection never got that far) is DatabaseUnavailable."""
    if sqlstate is None:
        return DatabaseUnavailable
    return _BY_SQLSTATE.get(sqlstate) or _BY_CLASS.get(sqlstate[:2]) or DatabaseError


def from_db(exc: Exception) -> PgqueueError:
    """The error of pgqueue for one of a database driver (psycopg, asyncpg, or either inside SQLAlchemy)."""
    original = getattr(exc, "orig", None)
    if isinstance(original, Exception):
        exc = getattr(original, "__cause__", None) or original
    sqlstate = getattr(exc, "sqlstate", None)
    if sqlstate is None and isinstance(exc, (psycopg.DataError, UnicodeError)):
        return InvalidJob(f"the value cannot be stored in PostgreSQL: {exc}")
    if sqlstate is None and isinstance(exc, psycopg.Error) and not isinstance(exc, _CONNECTION_ERRORS):
        return DatabaseError(str(exc))
    diagnostics = exc.diag if isinstance(exc, psycopg.Error) else exc
    kind = error_class(sqlstate)
    if sqlstate == "23514" and not getattr(diagnostics, "constraint_name", None):
        # A partition was attached between the routing of a row and its check.
        kind = DatabaseConflict
    elif sqlstate == "XX000" and getattr(diagnostics, "source_file", None) == "mcxt.c":
        # A value that needs more memory than the server ever allocates for one.
        kind = InvalidJob
    message = getattr(diagnostics, "message_primary", None) or getattr(exc, "message", None) or str(exc)
    column = getattr(diagnostics, "column_name", None)
    rule = getattr(diagnostics, "constraint_name", None)
    if rule and f'"{rule}"' in message and (named := _RULE.match(rule)):
        # The schema names its constraints by what they ask for.
        message, column = rule, column or named[1]
    detail = getattr(diagnostics, "message_detail", None) or getattr(exc, "detail", None)
    said = getattr(diagnostics, "message_hint", None) or getattr(exc, "hint", None)
    hint = said or _HINTS_BY_SQLSTATE.get(sqlstate or "") or _HINTS.get(kind)
    parts = [message.strip() or kind.title]
    wait = re.fullmatch(r"retry after ([0-9.]+) s", detail or "")
    if detail and kind not in (DatabaseError, DatabaseConflict, InvalidJob):
        parts.append(detail)
    if hint:
        parts.append(_continued(hint))
    retry_after = float(wait[1]) if wait else None
    return kind("; ".join(parts), hint=hint, column=column, sqlstate=sqlstate, retry_after=retry_after)


def _continued(sentence: str) -> str:
    """Return a sentence as the end of another: without its full stop, and small unless it begins with a name."""
    small = sentence[:1].lower() + sentence[1:] if sentence[1:2].islower() or sentence[1:2] == " " else sentence
    return small.removesuffix(".")
