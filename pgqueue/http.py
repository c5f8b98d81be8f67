"""The client over HTTP: the verbs of the queue through its REST API, for programs that have no database connection.

It needs nothing but the standard library on the wire. Requests that may be sent twice without harm are sent again after
a broken connection, 429 and 503; enqueues may, since each carries an idempotency key.
"""

import functools
import threading
import time
import uuid
from asyncio import get_running_loop
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote, urlencode
from uuid import UUID

import msgspec

from pgqueue import tracing
from pgqueue.calls import WorkerLoad
from pgqueue.errors import DatabaseUnavailable, InvalidJob, InvalidPayload, NotFinished
from pgqueue.errors import as_seconds as seconds_of
from pgqueue.http_wire import BROKEN, ApiRefused, Reply, Wire, pauses
from pgqueue.job import EnqueuedJob, JobRow, NotJson, encode_json
from pgqueue.tasks import EnqueueOptions
from pgqueue.verbs import JobId, check_mapping, ended, given, id_text, instant, result_of, timeout_ms

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="Client")
#: The longest that one request waits on the server, in seconds.
_LONGEST_WAIT: Final = 30.0
_THREADS: Final = 64
_decode_row: Final = msgspec.json.Decoder(JobRow).decode


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One request. `repeatable`: sending it twice does no more than once. `wait`: seconds until a result is there."""

    method: str
    path: str
    then: Callable[[Reply], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    repeatable: bool = True
    wait: float = 0.0


class DeadLetterFilters(TypedDict, total=False):
    """Which dead letters: of a type, of a queue, that died in a span of time, so many at most (the oldest first)."""

    job_type: str | None
    queue: str | None
    since: datetime | None
    until: datetime | None
    max_jobs: int | None


def awaited(verb: Callable[Concatenate[S, P], Request[T]]) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make the awaited method of a verb."""

    @functools.wraps(verb)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        request = verb(self, *args, **kwargs)
        return await get_running_loop().run_in_executor(self._threads(), self._run, request)

    return method


def blocking(verb: Callable[Concatenate[S, P], Request[T]]) -> Callable[Concatenate[S, P], T]:
    """Make the method of a verb that blocks its thread."""

    @functools.wraps(verb)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(verb(self, *args, **kwargs))

    return method


class Client:
    """A door to the queue over HTTP. Each verb comes in two forms: awaited, and `…_sync`.

    with Client("http://127.0.0.1:8080", key="pgq_…") as client:
        job = client.enqueue_sync("send_email", {"to": "a@example.com"})
        print(client.result_sync(job, wait=30))
    """

    def __init__(self, url: str, key: str | None = None, *, tries: int = 5, timeout: float = 30.0) -> None:
        """`tries`: how often a request is sent at most. `timeout`: seconds without an answer, beyond a `wait`."""
        self._wire = Wire(url, key, tries, timeout)
        self._guard = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def close(self) -> None:
        """Close the connections."""
        self._wire.close()
        with self._guard:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    # Verbs ------------------------------------------------------------------------------------------------------------

    def _enqueue(
        self, job_type: str, payload: Mapping[str, Any] | None = None, **options: Unpack[EnqueueOptions]
    ) -> Request[EnqueuedJob]:
        """Enqueue a job and return its id, status and whether its idempotency key was known.

        Raises InvalidJob, QueueFull, RateLimitedError, DatabaseUnavailable.
        """
        body = _job_body({**options, "job_type": job_type, "payload": payload})
        given_key = "idempotency_key" in body
        if "trace_context" not in body and (context := tracing.created(job_type, body.get("queue"))) is not None:
            body["trace_context"] = context
        # A key of our own lets the request be sent again after a broken connection.
        body.setdefault("idempotency_key", f"http-{uuid.uuid4()}")

        def then(reply: Reply) -> EnqueuedJob:
            job = _row(reply)
            return EnqueuedJob(job.job_id, job.status, given_key and reply.status == 200)

        return Request("POST", "/jobs", then, body=body)

    def _enqueue_many(self, jobs: Iterable[Mapping[str, Any]]) -> Request[list[EnqueuedJob]]:
        """Enqueue up to 10,000 jobs, all or none of them, and return one answer for each in the order given."""
        batch = []
        for index, one in enumerate(jobs):
            check_mapping(index, one)
            fields = dict(one)
            fields.setdefault("job_type", fields.pop("type", None))
            if not isinstance(fields["job_type"], str):
                raise InvalidJob(f"jobs[{index}] has no job_type", column="job_type")
            batch.append(_job_body(fields))
        keyed = all("idempotency_key" in one for one in batch)
        context = tracing.created(batch[0]["job_type"], batch[0].get("queue"), len(batch)) if batch else None
        if context is not None:
            for one in batch:
                one.setdefault("trace_context", context)
        return Request("POST", "/jobs/batch", _enqueued, body={"jobs": batch}, repeatable=keyed)

    def _job(self, job_id: JobId) -> Request[JobRow]:
        """Return a job wherever it is; raises JobNotFound."""
        return Request("GET", f"/jobs/{id_text(job_id)}", _row)

    def _result(self, job_id: JobId, *, wait: float | timedelta | None = None) -> Request[Any]:
        """Return what the job's task returned, waiting up to `wait` for its end.

        Raises NotFinished when it has not ended by then, JobFailed for a dead letter, JobCancelled, JobNotFound.
        """
        return self._ended(job_id, result_of, wait)

    def _finished_job(self, job_id: JobId, *, wait: float | timedelta | None = None) -> Request[JobRow]:
        """Return a job that has ended, however it ended, waiting up to `wait`; raises NotFinished."""
        return self._ended(job_id, ended, wait)

    def _ended(self, job_id: JobId, of: Callable[[JobRow], T], wait: float | timedelta | None) -> Request[T]:
        return Request(
            "GET", f"/jobs/{id_text(job_id)}", lambda reply: of(_row(reply)), wait=seconds_of("wait", wait) or 0.0
        )

    def _cancel(self, job_id: JobId) -> Request[str]:
        """Cancel a job: "cancelled", or "cancel_requested" when it runs; raises WrongState, JobNotFound."""
        return Request("POST", f"/jobs/{id_text(job_id)}/cancel", lambda reply: str(_json(reply)["outcome"]))

    def _why(self, job_id: JobId) -> Request[str]:
        """Say in one sentence why a job is not running now; raises JobNotFound."""
        return Request("GET", f"/jobs/{id_text(job_id)}/why", lambda reply: str(_json(reply)["why"]))

    def _jobs(
        self,
        *,
        statuses: Iterable[str] | None = None,
        queue: str | None = None,
        job_type: str | None = None,
        producer_id: str | None = None,
        before: JobId | None = None,
        limit: int = 50,
    ) -> Request[list[JobRow]]:
        """Return jobs, newest first; `before` is the last id of the page before this one."""
        query = {"queue": queue, "type": job_type, "producer": producer_id, "limit": limit}
        query["status"] = None if statuses is None else list(statuses)  # type: ignore[assignment]
        query["cursor"] = None if before is None else id_text(before)
        return Request(
            "GET", "/jobs", lambda reply: msgspec.json.decode(reply.content, type=_Page).items, query=given(query)
        )

    def _retry(self, job_id: JobId) -> Request[JobRow]:
        """Make a failed job or a dead letter pending again; raises WrongState, JobNotFound."""
        return Request("POST", f"/admin/jobs/{id_text(job_id)}/retry", _row, repeatable=False)

    def _retry_dead_letters(self, **filters: Unpack[DeadLetterFilters]) -> Request[int]:
        """Make the dead letters that match pending again and return how many; without filters all of them."""
        return Request("POST", "/admin/dlq/retry-all", lambda reply: int(_json(reply)["jobs"]), query=_filters(filters))

    def _discard(self, job_id: JobId) -> Request[str]:
        """Delete a dead letter; raises WrongState, JobNotFound."""
        return Request("DELETE", f"/admin/dlq/{id_text(job_id)}", lambda _: "discarded", repeatable=False)

    def _discard_dead_letters(self, **filters: Unpack[DeadLetterFilters]) -> Request[int]:
        """Delete the dead letters that match and return how many; without filters all of them."""
        return Request(
            "POST", "/admin/dlq/discard-all", lambda reply: int(_json(reply)["jobs"]), query=_filters(filters)
        )

    def _pause(self, queue: str) -> Request[bool]:
        """Stop claims from a queue; True if it was not paused before."""
        return Request(
            "POST", f"/admin/queues/{quote(queue, safe='')}/pause", lambda reply: bool(_json(reply)["changed"])
        )

    def _resume(self, queue: str) -> Request[bool]:
        """Let a paused queue be claimed from again; True if it was paused."""
        return Request(
            "POST", f"/admin/queues/{quote(queue, safe='')}/resume", lambda reply: bool(_json(reply)["changed"])
        )

    def _workers(self) -> Request[list[dict[str, Any]]]:
        """Return the oldest 1,000 workers, also those that stopped within a day, as GET /workers has them."""
        return Request("GET", "/workers", lambda reply: list(_json(reply)["items"]))

    def _alerts(self) -> Request[list[dict[str, Any]]]:
        """Return what is wrong now, pages first, as GET /stats has it."""
        return Request("GET", "/stats", lambda reply: list(_json(reply)["alerts"]))

    def _worker_load(self, queues: Iterable[str] | None = None) -> Request[WorkerLoad]:
        """Return what scaling goes by, for some queues or (None) all."""
        query = {} if queues is None else {"queue": list(queues)}
        return Request("GET", "/admin/autoscale", lambda reply: WorkerLoad(**_json(reply)["load"]), query=query)

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        repeatable: bool = False,
    ) -> Request[Any]:
        """Make any request of the API and return its JSON, such as call("POST", "/leases/claim", {...})."""
        return Request(method, path, _json, query=query or {}, body=body, repeatable=repeatable or method == "GET")

    enqueue = awaited(_enqueue)
    enqueue_sync = blocking(_enqueue)
    enqueue_many = awaited(_enqueue_many)
    enqueue_many_sync = blocking(_enqueue_many)
    job = awaited(_job)
    job_sync = blocking(_job)
    result = awaited(_result)
    result_sync = blocking(_result)
    finished_job = awaited(_finished_job)
    finished_job_sync = blocking(_finished_job)
    cancel = awaited(_cancel)
    cancel_sync = blocking(_cancel)
    why = awaited(_why)
    why_sync = blocking(_why)
    jobs = awaited(_jobs)
    jobs_sync = blocking(_jobs)
    retry = awaited(_retry)
    retry_sync = blocking(_retry)
    retry_dead_letters = awaited(_retry_dead_letters)
    retry_dead_letters_sync = blocking(_retry_dead_letters)
    discard = awaited(_discard)
    discard_sync = blocking(_discard)
    discard_dead_letters = awaited(_discard_dead_letters)
    discard_dead_letters_sync = blocking(_discard_dead_letters)
    pause = awaited(_pause)
    pause_sync = blocking(_pause)
    resume = awaited(_resume)
    resume_sync = blocking(_resume)
    workers = awaited(_workers)
    workers_sync = blocking(_workers)
    alerts = awaited(_alerts)
    alerts_sync = blocking(_alerts)
    worker_load = awaited(_worker_load)
    worker_load_sync = blocking(_worker_load)
    call = awaited(_call)
    call_sync = blocking(_call)

    def events_sync(self, job_id: JobId) -> Iterator[dict[str, Any]]:
        """Give where a job stands and then its changes, until it ends. A broken stream is taken up again."""
        left = pauses(self._wire.tries)
        while True:
            try:
                for event in self._wire.stream(f"/jobs/{id_text(job_id)}/events"):
                    left = pauses(self._wire.tries)
                    yield event
                    if event.get("to") in ("completed", "dead_letter", "cancelled") or event["event"] == "job.gone":
                        return
            except (*BROKEN, DatabaseUnavailable):
                pass
            pause = next(left, None)
            if pause is None:
                raise DatabaseUnavailable(f"the event stream of job {id_text(job_id)} keeps breaking")
            time.sleep(pause)

    # How --------------------------------------------------------------------------------------------------------------

    def _threads(self) -> ThreadPoolExecutor:
        with self._guard:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="pgqueue-http")
            return self._executor

    def _run(self, request: Request[T]) -> T:
        body = None if request.body is None else _encoded(request.body)
        target = f"{request.path}?{urlencode(request.query, doseq=True)}" if request.query else request.path
        deadline = time.monotonic() + request.wait
        while True:
            left = deadline - time.monotonic()
            if left > 0:
                # This is answered as soon as the job has ended; how it did, the job itself says.
                wait = min(left, _LONGEST_WAIT)
                self._wire.send("GET", f"{request.path}/result?wait={wait:.3f}", None, True, wait)
            try:
                return request.then(self._wire.send(request.method, target, body, request.repeatable))
            except NotFinished:
                if time.monotonic() >= deadline:
                    raise


class _Page(msgspec.Struct):
    items: list[JobRow]


def _encoded(body: Any) -> bytes:
    try:
        return encode_json(body, "body")
    except NotJson as exc:
        raise InvalidPayload(str(exc), column="payload") from None


def _json(reply: Reply) -> Any:
    return msgspec.json.decode(reply.content)


def _row(reply: Reply) -> JobRow:
    return _decode_row(reply.content)


def _enqueued(reply: Reply) -> list[EnqueuedJob]:
    return [EnqueuedJob(UUID(one["job_id"]), one["status"], one["duplicate"]) for one in _json(reply)["jobs"]]


def _job_body(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as the API takes it; raises InvalidJob for options that HTTP does not have."""
    body = given(options)
    for name in ("connection", "job_id"):
        if name in body:
            raise InvalidJob(f"{name} is no option over HTTP")
    if "delay" in body:
        body["delay_ms"] = round((seconds_of("delay", body.pop("delay")) or 0.0) * 1000)
    if "timeout" in body:
        body["timeout_ms"] = timeout_ms(body.pop("timeout"))
    for name in ("scheduled_at", "expires_at"):
        if name in body:
            body[name] = instant(name, body[name]).isoformat()
    return body


def _filters(filters: Mapping[str, Any]) -> dict[str, Any]:
    query = given(filters)
    unknown = query.keys() - {"job_type", "queue", "since", "until", "max_jobs"}
    if unknown:
        raise InvalidJob(f"unknown filter {min(unknown)!r}")
    if "job_type" in query:
        query["type"] = query.pop("job_type")
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in query.items()}


__all__ = ["ApiRefused", "Client", "DeadLetterFilters"]
