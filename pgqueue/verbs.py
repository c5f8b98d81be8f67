"""Verbs: each is written once, as a function from its arguments to a `Request`.

`awaited` and `blocking` make the two methods of it that users see.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar
from uuid import UUID

from pgqueue import calling, tracing
from pgqueue.calling import Call
from pgqueue.connections import AsyncPool, SyncPool
from pgqueue.errors import InvalidJob, InvalidPayload, JobCancelled, JobFailed, JobNotFound, NotFinished, as_seconds
from pgqueue.job import EnqueuedJob, JobRow, NotJson, encode_json, priority_number
from pgqueue.tasks import EnqueueOptions
from pgqueue.wire import IntArray, JsonTextArray, TextArray

P = ParamSpec("P")
T = TypeVar("T")
JobId: TypeAlias = UUID | str | EnqueuedJob | JobRow


class Intercept(Protocol):
    """Answers requests in the place of a database, in tests."""

    async def answer(self, request: "Request[Any]") -> Any:
        """Return what the call would have."""


class Pools(Protocol):
    """What verbs run on when they are given no connection."""

    def _sync_pool(self) -> SyncPool: ...

    async def _async_pool(self) -> AsyncPool: ...

    @property
    def intercept(self) -> "Intercept | None":
        """What answers in the place of the database, if anything does."""


S = TypeVar("S", bound=Pools)


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One call with its parameters; `then` turns its value into the verb's (or raises).

    With `wait` (seconds) it is made again until `then` no longer raises NotFinished. With `parts` it is made with the
    parameters of each rather than its own, in one transaction, and its value is all of theirs.
    """

    call: Call[Any]
    parameters: Mapping[str, object]
    then: Callable[[Any], T] = field(default=lambda value: value)
    connection: object = None
    wait: float = 0
    parts: Callable[[], Iterator[Mapping[str, object]]] | None = None


def awaited(verb: Callable[Concatenate[S, P], Request[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the awaited method of a verb."""

    @functools.wraps(verb)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        request = verb(self, *args, **kwargs)
        for pause in _until(request.wait):
            try:
                if self.intercept is not None:
                    value = await self.intercept.answer(request)
                elif request.connection is not None:
                    value = await calling.run_async(request.connection, request.call, **request.parameters)
                elif request.parts is not None:
                    value = await (await self._async_pool()).run_parts(
                        request.call, request.parts, **request.parameters
                    )
                else:
                    value = await (await self._async_pool()).run(request.call, **request.parameters)
                return request.then(value)
            except NotFinished:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError

    return method


def blocking(verb: Callable[Concatenate[S, P], Request[T]]) -> Callable[Concatenate[S, P], T]:
    """Make the method of a verb that blocks its thread."""

    @functools.wraps(verb)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        request = verb(self, *args, **kwargs)
        for pause in _until(request.wait):
            try:
                if self.intercept is not None:
                    value = _finish(self.intercept.answer(request))
                elif request.connection is not None:
                    value = calling.run(request.connection, request.call, **request.parameters)
                elif request.parts is not None:
                    value = self._sync_pool().run_parts(request.call, request.parts, **request.parameters)
                else:
                    value = self._sync_pool().run(request.call, **request.parameters)
                return request.then(value)
            except NotFinished:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError

    return method


def _finish(answer: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from sync code, whether or not an event loop runs in this thread."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(asyncio.run, answer).result()


def _until(wait: float) -> Iterable[float | None]:
    """Give pauses that grow from 5 to 250 ms until `wait` seconds are over, then None."""
    deadline = time.monotonic() + wait
    pause = 0.005
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 1.5, 0.25)
    yield None


# Parameters -----------------------------------------------------------------------------------------------------------

MOST_RETRIES: Final = 1_000_000
_ENQUEUE_NAMES: Final = frozenset(EnqueueOptions.__annotations__) - {"connection"}


def enqueue_parameters(
    job_type: str, payload: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> dict[str, object]:
    """Return the parameters of calls.ENQUEUE for what a user gave; raises InvalidJob naming what is wrong."""
    unknown = options.keys() - _ENQUEUE_NAMES
    if unknown:
        raise InvalidJob(f"unknown option {min(unknown)!r}; options are: {', '.join(sorted(_ENQUEUE_NAMES))}")
    delay = as_seconds("delay", options.get("delay"))
    timeout = timeout_ms(options.get("timeout"))
    max_retries = options.get("max_retries")
    if max_retries is not None and not (type(max_retries) is int and 0 <= max_retries <= MOST_RETRIES):
        raise InvalidJob(
            f"max_retries is {max_retries!r:.100}; it must be a whole number from 0 to {MOST_RETRIES}",
            column="max_retries",
        )
    priority = options.get("priority")
    job_id = options.get("job_id")
    return {
        "job_type": job_type,
        "payload": None if payload is None else encoded("payload", payload),
        "queue": _text("queue", options),
        "priority": None if priority is None else priority_number(priority),
        "scheduled_at": instant("scheduled_at", options.get("scheduled_at")),
        "delay": None if delay is None else timedelta(seconds=delay),
        "idempotency_key": _text("idempotency_key", options),
        "max_retries": max_retries,
        "retry_policy": encoded("retry_policy", options.get("retry_policy")),
        "timeout_ms": timeout,
        "expires_at": instant("expires_at", options.get("expires_at")),
        "producer_id": _text("producer_id", options),
        "ordering_key": _text("ordering_key", options),
        "trace_context": encoded(
            "trace_context", options.get("trace_context") or tracing.created(job_type, options.get("queue"))
        ),
        "job_id": None if job_id is None else id_text(job_id),
    }


def _text(name: str, options: Mapping[str, Any]) -> str | None:
    value = options.get(name)
    if value is None or isinstance(value, str):
        return value
    raise InvalidJob(f"{name} is {type(value).__name__} {value!r:.80}; it must be a string", column=name)


#: The names of the arrays of calls.ENQUEUE_MANY, by the parameters of calls.ENQUEUE that they hold.
_ARRAYS: Final = {
    "payload": "payloads",
    "queue": "queues",
    "priority": "priorities",
    "scheduled_at": "scheduled_at",
    "delay": "delays_ms",
    "idempotency_key": "idempotency_keys",
    "max_retries": "max_retries",
    "retry_policy": "retry_policies",
    "timeout_ms": "timeouts_ms",
    "expires_at": "expires_at",
    "producer_id": "producer_ids",
    "ordering_key": "ordering_keys",
    "trace_context": "trace_contexts",
    "job_id": "job_ids",
}
_TEXTS: Final = frozenset(
    {"queue", "idempotency_key", "retry_policy", "producer_id", "ordering_key", "trace_context", "job_id"}
)
_INTS: Final = frozenset({"priority", "max_retries", "timeout_ms"})
#: Options for which a job is looked at one by one, as enqueue_rows says.
_LOOKED_UP: Final = frozenset({"scheduled_at", "delay", "idempotency_key", "ordering_key", "job_id"})
#: So many jobs go in a call while the ones before are stored.
PART: Final = 5000


def many_parameters(
    jobs: Iterable[Mapping[str, Any]], options_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, object]:
    """Return the parameters of calls.ENQUEUE_MANY; `options_of` gives what applies to a job type.

    Raises InvalidJob naming the job and what is wrong with it. An option that no job has is None rather than an array.
    """
    wanted = list(jobs)
    return _arrays(wanted, 0, options_of, _span(wanted))


def many_parts(
    jobs: Sequence[Mapping[str, Any]], options_of: Callable[[str], Mapping[str, Any]]
) -> Callable[[], Iterator[dict[str, object]]] | None:
    """Return what makes the parameters of many jobs part by part, None for those that must go in one call.

    Parts are for plain jobs of one queue. For others the database takes locks, in an order of its own: of keys, and of
    queues with limits.
    """
    if len(jobs) <= PART or not all(isinstance(job, Mapping) and job.keys().isdisjoint(_LOOKED_UP) for job in jobs):
        return None
    job_types = [_type(job)[0] for job in jobs]
    if not all(isinstance(job_type, str) for job_type in job_types):
        return None
    usual = {job_type: options_of(job_type).get("queue") for job_type in set(job_types)}
    queues = [job.get("queue") or usual[job_type] or "default" for job, job_type in zip(jobs, job_types, strict=True)]
    # Any of them may be what no queue can be.
    if queues.count(queues[0]) != len(queues):
        return None
    context = _span(jobs)

    def parts() -> Iterator[dict[str, object]]:
        for first in range(0, len(jobs), PART):
            yield _arrays(jobs[first : first + PART], first, options_of, context)

    return parts


def _span(jobs: Sequence[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return the trace context of one span for all of them."""
    job_type = _type(jobs[0])[0] if jobs and isinstance(jobs[0], Mapping) else None
    if not isinstance(job_type, str):
        return None
    return tracing.created(job_type, jobs[0].get("queue"), len(jobs))


#: The keys of a job that are no options, by the key that its type has.
_TYPED: Final = frozenset({"job_type", "payload"})
_NAMED: Final = _TYPED | {"type"}


def check_mapping(index: int, job: object) -> None:
    """Refuse what does not describe a job with an InvalidJob."""
    if not isinstance(job, Mapping):
        raise InvalidJob(f"jobs[{index}] is {job!r:.200}; it must be a mapping with job_type, payload and options")


def _type(job: Mapping[str, Any]) -> tuple[Any, frozenset[str]]:
    """Return what a job says its type is, and which of its keys are no options."""
    job_type = job.get("job_type")
    return (job_type, _TYPED) if job_type else (job.get("type"), _NAMED)


def _arrays(
    jobs: Sequence[Mapping[str, Any]],
    first: int,
    options_of: Callable[[str], Mapping[str, Any]],
    context: Mapping[str, str] | None,
) -> dict[str, object]:
    """Return the parameters of some jobs, of which messages count from `first`."""
    job_types: list[str | None] = TextArray()
    payloads: list[str | None] = JsonTextArray()
    values: list[Mapping[str, Any]] = []
    defaults: dict[str, Mapping[str, Any]] = {}
    # What a job has that says no more than its type, by type.
    usual: dict[str, Mapping[str, Any]] = {}
    for index, job in enumerate(jobs, first):
        check_mapping(index, job)
        job_type, rest = _type(job)
        if not isinstance(job_type, str):
            raise InvalidJob(f"jobs[{index}] has no job_type", column="job_type")
        one = usual.get(job_type)
        if one is None or not job.keys() <= rest:
            if job_type not in defaults:
                defaults[job_type] = options_of(job_type)
            options = {name: value for name, value in job.items() if value is not None and name not in rest}
            one = _said(index, job_type, {**defaults[job_type], **options}, context)
            if not options:
                usual[job_type] = one
        payload = job.get("payload")
        payloads.append(None if payload is None else _payload(index, payload))
        job_types.append(job_type)
        values.append(one)
    names = {name for one in {id(one): one for one in values}.values() for name in one}
    arrays: dict[str, list[Any]] = {}
    for name in names:
        kind: type[list[Any]] = TextArray if name in _TEXTS else IntArray if name in _INTS else list
        arrays[_ARRAYS[name]] = kind(one.get(name) for one in values)
    return {
        **dict.fromkeys(_ARRAYS.values()),
        **arrays,
        "job_types": job_types,
        "payloads": payloads if any(payloads) else None,
    }


def _payload(index: int, payload: object) -> str | None:
    if type(payload) is dict:
        try:
            return encode_json(payload).decode()
        except NotJson:
            # Below it is named, which costs too much for each.
            pass
    return encoded(f"jobs[{index}]['payload']", payload, "payload")


def _said(
    index: int, job_type: str, options: Mapping[str, Any], context: Mapping[str, str] | None
) -> Mapping[str, Any]:
    """Return the parameters of calls.ENQUEUE that one of many jobs has beside its type and its payload."""
    if context is not None and "trace_context" not in options:
        options = {**options, "trace_context": context}
    if not options:
        return {}
    try:
        said = enqueue_parameters(job_type, None, options)
    except InvalidJob as exc:
        raise type(exc)(f"jobs[{index}]: {exc}", column=exc.column) from None
    delay = said["delay"]
    if isinstance(delay, timedelta):
        said["delay"] = round(delay.total_seconds() * 1000)
    return {name: value for name, value in said.items() if value is not None and name != "job_type"}


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that say something."""
    return {name: value for name, value in options.items() if value is not None}


def encoded(name: str, value: object, column: str | None = None) -> str | None:
    """Return a mapping as JSON text; raises InvalidPayload naming what cannot be stored."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidPayload(
            f"{name} is {type(value).__name__} {value!r:.80}; it must be a mapping", column=column or name
        )
    try:
        return encode_json(value if isinstance(value, dict) else dict(value), name).decode()
    except NotJson as exc:
        raise InvalidPayload(str(exc), column=column or name) from None


def timeout_ms(timeout: float | timedelta | None) -> int | None:
    """Return a time limit as the milliseconds that are stored, None for None; raises InvalidJob."""
    seconds = as_seconds("timeout", timeout)
    if seconds is None:
        return None
    if seconds < 0.001:
        raise InvalidJob(f"timeout is {timeout!r}; it must be a millisecond or more", column="timeout_ms")
    return min(round(seconds * 1000), 2**31 - 1)


def instant(name: str, value: Any) -> Any:
    """Return a moment in UTC, None for None; raises InvalidJob for what is no datetime or names no zone."""
    if value is None:
        return None
    if not isinstance(value, datetime):
        raise InvalidJob(f"{name} is {value!r}; it must be a datetime", column=name)
    if value.utcoffset() is None:
        raise InvalidJob(f"{name} is {value.isoformat()} without a time zone; give it one, such as UTC", column=name)
    try:
        # PostgreSQL reads offsets up to 15:59 only.
        return value.astimezone(UTC)
    except OverflowError:
        return value


def id_text(job_id: JobId) -> str:
    """Return a job's id as text; raises InvalidJob for what is none."""
    if isinstance(job_id, (EnqueuedJob, JobRow)):
        job_id = job_id.job_id
    try:
        return str(job_id if isinstance(job_id, UUID) else UUID(str(job_id)))
    except ValueError:
        raise InvalidJob(f"job_id is {str(job_id)!r:.100}; it must be a UUID", column="job_id") from None


def filters(
    job_type: str | None, queue: str | None, since: datetime | None, until: datetime | None, max_jobs: int | None
) -> dict[str, object]:
    """Return the parameters by which dead letters are chosen."""
    return {
        "job_type": job_type,
        "queue": queue,
        "since": instant("since", since),
        "until": instant("until", until),
        "max_jobs": max_jobs,
    }


# Answers --------------------------------------------------------------------------------------------------------------


def found(row: JobRow | None, job_id: JobId) -> JobRow:
    """Return the row; raises JobNotFound without one."""
    if row is None:
        raise JobNotFound(f"there is no job {id_text(job_id)}; it never was, or its time to live has passed")
    return row


def ended(row: JobRow) -> JobRow:
    """Return the row of a job that has ended; raises NotFinished."""
    if not row.finished:
        raise NotFinished(f"job {row.job_id} is {row.status}; it has not ended")
    return row


def result_of(row: JobRow) -> Any:
    """Return the result of a completed job; raises what stands for any other end."""
    if ended(row).status == "completed":
        return row.result
    if row.status == "cancelled":
        raise JobCancelled(f"job {row.job_id} was cancelled")
    raise JobFailed(f"job {row.job_id} is a dead letter: {row.error or 'no error was recorded'}")
