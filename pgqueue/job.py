"""Jobs as values: what a task is given, what a client reads, and how their JSON is written and read."""

import json
import re
from collections.abc import Awaitable, Callable, Generator
from datetime import UTC, datetime, timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, cast
from uuid import UUID

import msgspec
import psycopg

from pgqueue import log
from pgqueue.errors import ConfigError, InvalidJob, InvalidPayload

PRIORITIES: Final = ("critical", "high", "normal", "low")
FINAL_STATUSES: Final = frozenset({"completed", "dead_letter", "cancelled"})


def priority_number(priority: int | str) -> int:
    """Return the number of a priority given as number or name; raise InvalidJob for any other."""
    if isinstance(priority, str) and priority.lower() in PRIORITIES:
        return PRIORITIES.index(priority.lower())
    if isinstance(priority, int) and not isinstance(priority, bool) and 0 <= priority < len(PRIORITIES):
        return priority
    raise InvalidJob(
        f"priority is {priority!r}; it must be 0 to 3 or one of {', '.join(PRIORITIES)}", column="priority"
    )


# JSON ---------------------------------------------------------------------------------------------------------------


class NotJson(ValueError):
    """A value that PostgreSQL cannot store as JSON; the message says where it sits and what is wrong."""


_encoder: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _writer() -> Callable[[object], str]:
    """Return what writes a value as JSON text: `encode`, which makes the same writer in C anew for each value."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _encoder.encode
    # Without markers of what it is within: a circle is refused as nested too deep.
    written = make(None, _encoder.default, json.encoder.encode_basestring, None, ":", ",", False, False, False)
    return lambda value: "".join(written(value, 0))


_write_json: Final = _writer()
#: Of a jsonb value, and far below what a message to the server may have.
MOST_JSON_BYTES: Final = 268_435_455
_nul: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def encode_json(value: object, name: str = "value") -> bytes:
    """Return a value as JSON that PostgreSQL stores unchanged.

    The rule for payloads, results and progress alike: None, bool, int, finite float, str, and lists, tuples and dicts
    of them. Raises NotJson for anything else: NaN and infinities, dates, Decimal, bytes, sets, other objects, text
    with NUL or lone surrogates, values within themselves or nested too deep. `name` is what the message calls it.
    """
    try:
        text = _write_json(value)
        encoded = text.encode()
    except Exception as exc:
        # Containers of the user's own may raise anything, and do so again.
        try:
            fault = _fault(value, name)
        except Exception:
            fault = None
        raise NotJson(fault or f"{name} is not JSON: {exc}") from None
    if len(encoded) > MOST_JSON_BYTES:
        raise NotJson(f"{name} has {len(encoded)} bytes of JSON, of which PostgreSQL stores {MOST_JSON_BYTES} at most")
    if "\\u0000" in text and _nul.search(text):
        raise NotJson(_fault(value, name) or f"{name} has a NUL character")
    return encoded


_read_json: Final = msgspec.json.Decoder().decode


def decode_json(encoded: bytes | str | msgspec.Raw) -> Any:
    """Return the value of JSON as PostgreSQL stores it; raise ValueError for what Python cannot hold."""
    try:
        return _read_json(encoded)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ValueError(f"JSON that Python cannot hold: {exc}") from None


def _fault(value: object, path: str, depth: int = 0) -> str | None:
    """Return what makes a value unfit for JSON, None if nothing is seen."""
    if depth > 200:
        return f"{path[:200]}… is nested too deep or contains itself"
    match value:
        case None | bool() | int():
            return None
        case float():
            finite = value - value == 0
            return None if finite else f"{path} is {value!r}; JSON has only finite numbers"
        case str():
            if "\0" in value:
                return f"{path} has a NUL character; PostgreSQL cannot store it"
            if any("\ud800" <= character <= "\udfff" for character in value):
                return f"{path} has a lone surrogate; that is no text"
            return None
        case list() | tuple():
            faults = (_fault(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value))
            return next((fault for fault in faults if fault), None)
        case dict():
            for key, item in value.items():
                if key is not None and not isinstance(key, (str, int, float)):
                    return f"{path} has the key {_short(key)}; JSON keys are text"
                fault = _fault(key, f"a key of {path}", depth + 1) or _fault(item, f"{path}[{key!r}]", depth + 1)
                if fault:
                    return fault
            return None
        case _:
            return f"{path} is {_short(value)} of type {type(value).__name__}; JSON has no such type"


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        return "a value"
    return text if len(text) <= 80 else text[:79] + "…"


# What clients read ----------------------------------------------------------------------------------------------------


class EnqueuedJob(NamedTuple):
    """What an enqueue answers.

    duplicate  the idempotency key was known, and this is the job that has it, whatever was asked for now
    status     the job's; None: the key's job has been deleted, and the key is known until its time is over
    """

    job_id: UUID
    status: str | None
    duplicate: bool


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of pgqueue.jobs. `msgspec.json.encode(row)` keeps the numbers of its JSON columns exact."""

    job_id: UUID
    seq: int
    queue: str
    job_type: str
    priority: int
    status: str
    attempts: int
    max_retries: int
    lost: int
    shard: int
    created_at: datetime
    updated_at: datetime
    payload_json: msgspec.Raw = msgspec.field(name="payload")
    result_json: msgspec.Raw = msgspec.field(name="result", default=msgspec.Raw(b"null"))
    errors_json: msgspec.Raw = msgspec.field(name="errors", default=msgspec.Raw(b"[]"))
    progress_json: msgspec.Raw = msgspec.field(name="progress", default=msgspec.Raw(b"null"))
    error: str | None = None
    retry_policy: dict[str, Any] | None = None
    timeout_ms: int | None = None
    scheduled_at: datetime | None = None
    due_at: datetime | None = None
    expires_at: datetime | None = None
    idempotency_key: str | None = None
    producer_id: str | None = None
    ordering_key: str | None = None
    worker_id: UUID | None = None
    lease_expires_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    trace_context: dict[str, Any] | None = None

    @property
    def payload(self) -> Any:
        """The payload; raises ValueError for JSON that Python cannot hold."""
        return decode_json(self.payload_json)

    @property
    def result(self) -> Any:
        """What the task returned."""
        return decode_json(self.result_json)

    @property
    def errors(self) -> list[dict[str, Any]]:
        """A record per failed attempt, oldest first."""
        return cast(list[dict[str, Any]], decode_json(self.errors_json))

    @property
    def progress(self) -> Any:
        """The last progress report."""
        return decode_json(self.progress_json)

    @property
    def finished(self) -> bool:
        """Whether the job has ended for good (unless it is retried by hand)."""
        return self.status in FINAL_STATUSES


# What tasks are given -------------------------------------------------------------------------------------------------


_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


def microseconds(moment: datetime) -> int:
    """Return an aware datetime as the microseconds since 2000 that PostgreSQL counts."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def _moment(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)


class ClaimedJob(msgspec.Struct, frozen=True):
    """A claimed row as the worker reads it: 16 bytes of id, JSON as text, times in microseconds since 2000."""

    job_id: bytes
    job_type: str
    payload: str
    attempts: int
    queue: str
    priority: int
    timeout_ms: int | None
    lease_expires_at: int
    updated_at: int
    created_at: int
    scheduled_at: int | None
    max_retries: int
    lost: int
    producer_id: str | None
    ordering_key: str | None
    trace_context: str | None

    def read_payload(self) -> Any:
        """Return the payload; raises InvalidPayload for JSON that Python cannot hold."""
        try:
            return _read_json(self.payload)
        except (msgspec.MsgspecError, RecursionError) as exc:
            raise InvalidPayload(f"the payload cannot be read: JSON that Python cannot hold: {exc}") from None


class Sent:
    """Something that is on its way and need not be waited for."""

    def __await__(self) -> Generator[None, None, None]:
        """Go on at once."""
        yield from ()


SENT: Final = Sent()


class Transaction(Protocol):
    """The transaction in which a job's completion commits.

    `async with` or `await` gives an async task its connection, `with` a sync one. Leaving the block commits nothing:
    the worker does, together with the completion; leaving it by an exception rolls back.
    """

    def __await__(self) -> Generator[Any, Any, psycopg.AsyncConnection[Any]]: ...
    async def __aenter__(self) -> psycopg.AsyncConnection[Any]: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def __enter__(self) -> psycopg.Connection[Any]: ...
    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Once(Protocol):
    """Whether a guard was taken for the first time: `if await job.once(key)`, in a sync task `if job.once(key)`."""

    def __await__(self) -> Generator[Any, Any, bool]: ...
    def __bool__(self) -> bool: ...


class Services(Protocol):
    """What a running job asks of whoever runs it."""

    def report(self, job: "Job", progress: bytes) -> Awaitable[None]:
        """Store a progress report."""

    def transaction(self, job: "Job") -> Transaction:
        """Give the job's transaction, the same one each time."""

    def once(self, job: "Job", key: str) -> Once:
        """Take a guard within the job's transaction."""


class Job:
    """The job a task works on. Everything is read when asked for; nothing is made for tasks that do not ask."""

    __slots__ = ("_log", "_payload", "_services", "cancelled", "claimed")

    def __init__(self, claimed: ClaimedJob, services: Services | None = None) -> None:
        """Make the job of a claimed row; without services it runs nowhere and can only be read."""
        self.claimed = claimed
        self._services = services
        self._payload: Any = None
        self._log: log.Logger | None = None
        #: True once the attempt should stop: cancel requested, timed out, lease lost, or the worker shuts down.
        self.cancelled = False

    @classmethod
    def of(cls, row: JobRow, services: Services | None = None) -> Self:
        """Return the job of a row that was read rather than claimed."""
        claimed = ClaimedJob(
            job_id=row.job_id.bytes,
            job_type=row.job_type,
            payload=bytes(row.payload_json).decode(),
            attempts=row.attempts,
            queue=row.queue,
            priority=row.priority,
            timeout_ms=row.timeout_ms,
            lease_expires_at=microseconds(row.lease_expires_at or row.updated_at),
            updated_at=microseconds(row.updated_at),
            created_at=microseconds(row.created_at),
            scheduled_at=microseconds(row.scheduled_at) if row.scheduled_at else None,
            max_retries=row.max_retries,
            lost=row.lost,
            producer_id=row.producer_id,
            ordering_key=row.ordering_key,
            trace_context=json.dumps(row.trace_context) if row.trace_context else None,
        )
        return cls(claimed, services)

    @property
    def job_id(self) -> UUID:
        """The job's id."""
        return UUID(bytes=self.claimed.job_id)

    @property
    def job_type(self) -> str:
        """The job's type, which is its task's name."""
        return self.claimed.job_type

    @property
    def queue(self) -> str:
        """The queue it came from."""
        return self.claimed.queue

    @property
    def priority(self) -> int:
        """0 critical, 1 high, 2 normal, 3 low."""
        return self.claimed.priority

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.claimed.attempts

    @property
    def max_retries(self) -> int:
        """Retries after the first attempt at most."""
        return self.claimed.max_retries

    @property
    def lost(self) -> int:
        """How often a worker died with this job."""
        return self.claimed.lost

    @property
    def scheduled_at(self) -> datetime | None:
        """Not before when it was to run, in UTC: the due time of a schedule's fire. None if enqueued without a time, or
        retried by hand.
        """
        return None if self.claimed.scheduled_at is None else _moment(self.claimed.scheduled_at)

    @property
    def created_at(self) -> datetime:
        """When it was enqueued, in UTC."""
        return _moment(self.claimed.created_at)

    @property
    def producer_id(self) -> str | None:
        """Who enqueued it."""
        return self.claimed.producer_id

    @property
    def ordering_key(self) -> str | None:
        """The key whose jobs run one at a time, in order."""
        return self.claimed.ordering_key

    @property
    def trace_context(self) -> dict[str, str]:
        """The W3C trace context it was enqueued with, empty without one."""
        return decode_json(self.claimed.trace_context) if self.claimed.trace_context else {}

    @property
    def payload(self) -> Any:
        """The payload; raises InvalidPayload for JSON that Python cannot hold."""
        if self._payload is None:
            self._payload = self.claimed.read_payload()
        return self._payload

    @property
    def log(self) -> log.Logger:
        """A logger that names the job in each line."""
        if self._log is None:
            self._log = log.logger("pgqueue.job").bind(
                job_id=str(self.job_id), job_type=self.job_type, queue=self.queue, attempt=self.attempt
            )
        return self._log

    def progress(self, value: object) -> Awaitable[None]:
        """Store a JSON value as the job's progress, soon and without waiting; `await` waits until it is stored.

        Raises InvalidJob if it is not JSON.
        """
        try:
            encoded = encode_json(value, "progress")
        except NotJson as exc:
            raise InvalidJob(str(exc), column="progress") from None
        return self.forward(encoded)

    def forward(self, encoded: bytes) -> Awaitable[None]:
        """Store progress that is JSON already."""
        return self._served.report(self, encoded)

    def connection(self) -> Transaction:
        """Return the transaction in which this job's completion commits: the task's writes in it and the completion
        are atomic.

        `async with job.connection() as connection:` in an async task, `with` in a sync one. It is in READ COMMITTED,
        whatever the role's default. What was set in its session (settings, locks, temporary tables) is gone with the
        job.
        """
        return self._served.transaction(self)

    def once(self, key: str) -> Once:
        """Say whether `key` is guarded for the first time by this job, within the transaction of `connection()`.

        `if await job.once("charge"):` in an async task, `if job.once("charge"):` in a sync one. A guard lasts if and
        only if the attempt completes.
        """
        return self._served.once(self, key)

    @property
    def _served(self) -> Services:
        if self._services is None:
            raise ConfigError("this job is not run by a worker: it has no progress, no transaction and no guards")
        return self._services

    def __repr__(self) -> str:
        """Name the job and its attempt."""
        return f"<Job {self.job_type} {self.job_id} attempt {self.attempt}>"
