"""An attempt: one task run once. Knows no database; what came of it is an outcome for the worker to write down."""

import asyncio
import enum
import math
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from pgqueue import middleware
from pgqueue.classification import is_retryable, retry_after
from pgqueue.errors import (
    Cancel,
    InvalidPayload,
    InvalidResult,
    RateLimited,
    Retry,
    Snooze,
    TaskSignal,
    as_delay,
    as_seconds,
)
from pgqueue.job import ClaimedJob, Job, NotJson, Services, encode_json
from pgqueue.middleware import around, around_sync
from pgqueue.tasks import Task
from pgqueue.tracing import running, traced

MESSAGE_BYTES: Final = 8000
TRACEBACK_BYTES: Final = 22000
_FRAMES: Final = 60
#: Seconds from when it came here within which a job is begun or not at all: others may have been given it since.
BEGIN_WITHIN: Final = 5.0
_OURS: Final = (__file__, middleware.__file__)
#: What a metaclass cannot put something else in the place of.
_module_of: Final[Callable[[type], str]] = type.__dict__["__module__"].__get__
_name_of: Final[Callable[[type], str]] = type.__dict__["__qualname__"].__get__


class Interrupted(BaseException):
    """Raised inside the thread of a sync task that must stop."""


class Stop(enum.Enum):
    """Why an attempt was told to stop."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    LOST = "lost"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Completed:
    """The task returned; `result` is JSON, None for None."""

    result: bytes | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The task raised, or returned what cannot be stored. `error` has type, message, traceback and duration_ms."""

    error: dict[str, Any]
    retryable: bool
    retry_in: float | None = None


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The task wants to run again after `delay` seconds; nothing is charged."""

    delay: float


@dataclass(frozen=True, slots=True)
class Throttled:
    """As Snoozed, and no job of the type starts for `delay` seconds."""

    delay: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task cancelled its job, or obeyed a cancel request."""

    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Released:
    """The job goes back to its place and nothing is charged: it was not started, or a shutdown stopped it."""

    started: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """Nothing is left to write: the job has its new status already, or (None) the lease was lost."""

    status: str | None = None


Outcome: TypeAlias = Completed | Failed | Snoozed | Throttled | Cancelled | Released | Settled
NOTHING: Final = Completed()
UNBEGUN: Final = Released(started=False)
SETTLED: Final = Settled()
#: It was too late to begin, for now or for good. The heartbeat, and it alone, gives back what waited for too long: the
#: next attempt has the same number.
LATE: Final = Settled("pending")


class Concluding(Protocol):
    """The transaction of an attempt, which ends with it."""

    async def conclude_async(self, outcome: Outcome) -> Outcome:
        """Commit or undo what the task wrote, and return what is left to write."""

    def conclude(self, outcome: Outcome) -> Outcome:
        """Do so in the thread of a sync task."""


class _Course(msgspec.Struct, eq=False, kw_only=True):
    """What becomes of an attempt. `timeout` is the seconds that it may take."""

    made: Job | None = None
    stop: Stop | None = None
    began: float = 0.0
    timeout: float = 0.0
    outcome: Outcome | None = None
    tx: Concluding | None = None


class Attempt(_Course, eq=False):
    """One run of a task for a job. `run` in a thread or process, `run_async` in an event loop; neither ever raises.

    `admitted_at` is when the job came here, `lapses_at` when its lease ends unless it is renewed, by time.monotonic().
    """

    claimed: ClaimedJob
    task: Task[Any, Any]
    services: Services | None = None
    admitted_at: float = math.inf
    lapses_at: float = math.inf

    @property
    def job(self) -> Job:
        """The job as the task sees it, made for the first who asks."""
        job = self.made
        if job is None:
            job = self.made = Job(self.claimed, self.services)
        return job

    def run(self, loop: asyncio.AbstractEventLoop | None = None) -> Outcome:
        """Run a sync task here and now; its async middlewares run in `loop`, which another thread has."""
        if not self.begin():
            return LATE
        try:
            if self._alone():
                return self._returned(self._call())
            with self._traced():
                return self._returned(around_sync(self.task.middlewares, self.job, self._call, loop))
        except BaseException as exc:
            return self.raised(exc)

    async def run_async(self) -> Outcome:
        """Run an async task within the present asyncio task."""
        if not self.begin():
            return LATE
        outcome: Outcome
        try:
            if self._alone():
                value = await self._call()
                # As most end; the rest is looked at more closely.
                outcome = NOTHING if value is None and self.stop is None else self._returned(value)
            else:
                with self._traced():
                    outcome = self._returned(await around(self.task.middlewares, self.job, self._call_async))
        except BaseException as exc:
            outcome = self.raised(exc)
        if self.tx is not None:
            outcome = await self._concluded(self.tx, outcome)
        self.outcome = outcome
        return outcome

    async def _concluded(self, tx: Concluding, outcome: Outcome) -> Outcome:
        # It has ended: from now on nobody stops it.
        self.outcome = outcome
        try:
            return await tx.conclude_async(outcome)
        except BaseException as exc:
            return self.raised(exc)

    def late(self) -> bool:
        """Say whether it is too late to begin, whatever the heartbeat does."""
        return time.monotonic() - self.admitted_at > BEGIN_WITHIN

    def begin(self) -> bool:
        """Note that it begins; False: it is too late to, or its lease has lapsed and others may have been given it."""
        # In this order: whoever saw that it had not begun knows that it will not.
        self.began = time.monotonic()
        if self.began > self.lapses_at or self.late():
            self.began = 0.0
            return False
        return True

    def elapsed(self) -> float:
        """Return the seconds since it began; 0 before."""
        return time.monotonic() - self.began if self.began else 0.0

    def timed_out(self) -> Failed:
        """Return the outcome of a run that took too long, for those that do not end when told to."""
        return self._failed(TimeoutError(f"the attempt ran longer than its timeout ({self.timeout} s)"))

    def _alone(self) -> bool:
        """Say whether nothing is to be done around the call of the function."""
        return not self.task.middlewares and self.claimed.trace_context is None and not traced()

    def _traced(self) -> AbstractContextManager[None]:
        job = self.claimed
        return running(job.trace_context, job.job_id, job.job_type, job.queue, job.attempts)

    async def _call_async(self) -> Any:
        return await self._call()

    def _call(self) -> Any:
        task = self.task
        if task.takes_job_alone:
            return task.function(self.job)
        if task.takes_job or self.made is not None:
            arguments = task.bind(self.job.payload)
            return task.function(self.job, **arguments) if task.takes_job else task.function(**arguments)
        return task.function(**task.bind(self.claimed.read_payload()))

    def _returned(self, value: Any) -> Outcome:
        if self.stop is Stop.TIMEOUT:
            return self.timed_out()
        if value is None:
            return NOTHING
        try:
            return Completed(encode_json(value, "result"))
        except NotJson as exc:
            return self._failed(InvalidResult(f"the result is not storable: {exc}"))

    def raised(self, exc: BaseException) -> Outcome:
        """Return the outcome of a task that raised."""
        try:
            return self._raised(exc)
        except BaseException as fault:
            # A class of the user's own whose attributes are missing, are no delays, or raise.
            return self._failed(fault)

    def _raised(self, exc: BaseException) -> Outcome:
        if self.stop is Stop.TIMEOUT:
            return self.timed_out()
        if isinstance(exc, (asyncio.CancelledError, Interrupted)):
            if self.stop is Stop.CANCEL:
                return Cancelled(self.record(Cancel("cancelled on request")))
            if self.stop is Stop.SHUTDOWN:
                return Released(started=True)
            if self.stop is Stop.LOST:
                return SETTLED
        if isinstance(exc, TaskSignal):
            return self._signalled(exc)
        return self._failed(exc)

    def _signalled(self, signal: TaskSignal) -> Outcome:
        match signal:
            case Snooze():
                return Snoozed(as_delay("for_", signal.for_))
            case RateLimited():
                return Throttled(as_delay("retry_after", signal.retry_after))
            case Cancel():
                return Cancelled(self.record(signal))
            case Retry():
                return Failed(self.record(signal), retryable=True, retry_in=as_seconds("in_", signal.in_))
            case _:
                return self._failed(signal)

    def _failed(self, exc: BaseException) -> Failed:
        retryable = is_retryable(exc, self.task.options)
        return Failed(self.record(exc), retryable, retry_after(exc) if retryable else None)

    def record(self, exc: BaseException) -> dict[str, Any]:
        """Return an error as it is stored."""
        return {
            "type": kind_of(exc),
            "message": capped(_text(exc), MESSAGE_BYTES),
            "traceback": _guarded(lambda: _trace(exc)),
            "duration_ms": round(self.elapsed() * 1000),
        }


def kind_of(exc: BaseException) -> str:
    """Return the name of an exception's class, with its module unless it is Python's or ours."""
    kind = type(exc)
    module, name = _module_of(kind), _name_of(kind)
    return name if module in ("builtins", "pgqueue.errors") else storable(f"{module}.{name}")[:200]


def storable(text: str) -> str:
    """Return text that PostgreSQL can hold: NUL and lone surrogates are written as escapes."""
    return text.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def capped(text: str, size: int) -> str:
    """Return storable text of at most `size` bytes, cut between characters and marked."""
    text = storable(text[: size + 1])
    encoded = text.encode()
    if len(encoded) <= size:
        return text
    return encoded[: size - 16].decode(errors="ignore") + " … (cut)"


def _text(exc: BaseException) -> str:
    return _guarded(lambda: str(exc))


def _trace(exc: BaseException) -> str:
    trace = exc.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    if isinstance(exc, (TaskSignal, InvalidPayload, InvalidResult)) and exc.__cause__ is None:
        return ""
    formatted = traceback.TracebackException(type(exc), exc, trace, limit=-_FRAMES, compact=True)
    lines = [line if len(line) <= 2000 else line[:2000] + " … (cut)\n" for line in formatted.format()]
    text = storable("".join(lines))
    encoded = text.encode()
    if len(encoded) <= TRACEBACK_BYTES:
        return text
    # The end says more than the beginning: the innermost frames and the message.
    return "(cut) … " + encoded[16 - TRACEBACK_BYTES :].decode(errors="ignore")


def _guarded(make: Callable[[], str]) -> str:
    try:
        return make()
    except BaseException as fault:
        return f"(its text cannot be made: {kind_of(fault)})"
