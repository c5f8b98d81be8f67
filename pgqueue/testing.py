"""Tools for the tests of programs that enqueue and run jobs.

clear(app)
await enqueue_something(app)
assert_enqueued(app, "send_email", {"to": "a@example.com"})
assert (await drain(app)).failed == 0
"""

import asyncio
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any, Final
from uuid import UUID, uuid4

from pgqueue import calls
from pgqueue.app import App
from pgqueue.attempt import Attempt, Completed, Failed, Outcome
from pgqueue.errors import JobFailed, WrongState, as_seconds
from pgqueue.job import ClaimedJob, EnqueuedJob, JobRow, decode_json, microseconds
from pgqueue.process import new_event_loop
from pgqueue.verbs import Request

_ROUNDS: Final = 1000


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: attempts that ended, and those of them that failed."""

    processed: int
    failed: int


async def drain(app: App, *, concurrency: int = 10) -> Drained:
    """Run every job that is due by the database's clock, until none is left.

    Whoever enqueued them: the app's database is to be one for tests.
    Jobs that are due later stay, and so does, as failed, one whose attempt failed; `moved_clock` brings their time.
    """
    settings = dataclasses.replace(app.settings, wake="poll", poll_interval=0.01, dsn=app.dsn)
    processed = failed = 0
    pool = await app._async_pool()
    for _ in range(_ROUNDS):
        swept: list[tuple[str, int]] = await pool.run(calls.SWEEP)
        worker = app.worker(maintenance=False, concurrency=concurrency, settings=settings, until_empty=True)
        await worker.run()
        processed += worker.counts["processed"]
        failed += worker.counts["failed"]
        if not worker.counts["processed"] and not any(
            jobs for step, jobs in swept if step in ("due", "leases", "keys")
        ):
            break
    return Drained(processed, failed)


def drain_sync(app: App, *, concurrency: int = 10) -> Drained:
    """Do as `drain`, from a program without an event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        try:
            return runner.run(drain(app, concurrency=concurrency))
        finally:
            app.forget_loop(runner.get_loop())


def assert_enqueued(
    app: App,
    job_type: str,
    payload: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    count: int | None = None,
) -> list[JobRow]:
    """Return the jobs of a type, in any status, whose payload has these entries; newest first.

    Those of earlier tests too, unless `clear` was called.
    Raises AssertionError without any, or unless there are `count`.
    """
    rows = app.jobs_sync(job_type=job_type, queue=queue, limit=10_000)
    wanted = dict(payload or {})
    found = [row for row in rows if {key: row.payload.get(key) for key in wanted} == wanted]
    if len(found) == count or (count is None and found):
        return found
    seen = "\n".join(f"  {row.status} {row.payload}" for row in rows[:20]) or "  none"
    expected = "a job" if count is None else f"{count} jobs"
    raise AssertionError(f"expected {expected} {job_type!r} with {wanted}, found {len(found)}; of this type:\n{seen}")


def clear(app: App) -> int:
    """Delete every job of this database, whatever its status, and return how many there were.

    Idempotency keys, guards and pauses of job types go with them; queues, schedules and metrics stay. Needs the owner's
    role. Raises WrongState while a worker is at work: the database is not one for tests, or the worker is still needed.
    """
    pool = app._sync_pool()
    if workers := pool.run(calls.AT_WORK):
        raise WrongState(f"worker {workers[0]} is at work on this database; clear is for a database of tests alone")
    removed: int = pool.run(calls.CLEAR)
    return removed


@contextmanager
def moved_clock(app: App, by: float | timedelta) -> Iterator[None]:
    """Within the block the queue's clock, of this database, is `by` later. Needs the owner's role."""
    app._sync_pool().run(calls.set_clock(as_seconds("by", by) or 0.0))
    try:
        yield
    finally:
        app._sync_pool().run(calls.set_clock(0.0))


@dataclass(frozen=True, slots=True)
class InlineJob:
    """A job that was run inline."""

    job_id: UUID
    job_type: str
    payload: dict[str, Any]
    outcome: Outcome

    @property
    def result(self) -> Any:
        """What its task returned, None for any other end."""
        if isinstance(self.outcome, Completed) and self.outcome.result is not None:
            return decode_json(self.outcome.result)
        return None


@contextmanager
def inline(app: App, *, raise_errors: bool = True) -> Iterator[list[InlineJob]]:
    """Within the block each enqueue runs its task at once, in this process and without a database.

    Gives the list of the jobs that ran. With raise_errors a failed one raises JobFailed from the enqueue. Jobs have
    no transaction, guards or progress.
    """
    inline_runs = _Inline(app, raise_errors)
    app.intercept = inline_runs
    try:
        yield inline_runs.jobs
    finally:
        app.intercept = None


class _Inline:
    """Answers the requests of enqueue verbs by running the tasks."""

    def __init__(self, app: App, raise_errors: bool) -> None:
        self.jobs: list[InlineJob] = []
        self._app = app
        self._raise_errors = raise_errors

    async def answer(self, request: Request[Any]) -> Any:
        if request.call is calls.ENQUEUE_MANY:
            types: Any = request.parameters["job_types"]
            payloads: Any = request.parameters["payloads"] or ()
            times: Any = request.parameters["scheduled_at"] or ()
            return [await self._run(*one) for one in zip_longest(types, payloads, times)]
        if request.call is calls.ENQUEUE:
            one: Any = [request.parameters[name] for name in ("job_type", "payload", "scheduled_at")]
            return await self._run(*one)
        raise AssertionError(f"{request.call.name} needs a database; inside `inline` there is none")

    async def _run(self, job_type: str, encoded: str | None, scheduled_at: datetime | None) -> EnqueuedJob:
        job_id, payload = uuid4(), decode_json(encoded) if encoded else {}
        attempt = Attempt(_claimed(job_id, job_type, encoded or "{}", scheduled_at), self._app.tasks[job_type])
        if attempt.task.is_async:
            outcome = await attempt.run_async()
        else:
            outcome = await asyncio.to_thread(attempt.run)
        self.jobs.append(InlineJob(job_id, job_type, payload, outcome))
        if isinstance(outcome, Failed) and self._raise_errors:
            error = outcome.error
            raise JobFailed(f"{job_type}: {error['type']}: {error['message']}\n{error['traceback']}".rstrip())
        return EnqueuedJob(job_id, "completed" if isinstance(outcome, Completed) else "failed", False)


def _claimed(job_id: UUID, job_type: str, payload: str, scheduled_at: datetime | None) -> ClaimedJob:
    now = microseconds(datetime.now(UTC))
    return ClaimedJob(
        job_id=job_id.bytes,
        job_type=job_type,
        payload=payload,
        attempts=1,
        queue="default",
        priority=2,
        timeout_ms=None,
        lease_expires_at=now + 30_000_000,
        updated_at=now,
        created_at=now,
        scheduled_at=None if scheduled_at is None else microseconds(scheduled_at),
        max_retries=3,
        lost=0,
        producer_id=None,
        ordering_key=None,
        trace_context=None,
    )
