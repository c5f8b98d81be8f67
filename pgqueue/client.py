"""The client: every verb of the queue, awaited or in the calling thread."""

import asyncio
import atexit
import threading
import weakref
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Self, Unpack

from pgqueue import calls
from pgqueue.connections import AsyncPool, SyncPool
from pgqueue.errors import as_seconds
from pgqueue.job import EnqueuedJob, JobRow
from pgqueue.settings import Settings
from pgqueue.tasks import EnqueueOptions
from pgqueue.verbs import (
    Intercept,
    JobId,
    Request,
    awaited,
    blocking,
    ended,
    enqueue_parameters,
    filters,
    found,
    given,
    id_text,
    many_parameters,
    many_parts,
    result_of,
)


class Client:
    """A door to the queue for producers and operators. Each verb comes in two forms: awaited, and `…_sync`.

    Both raise a PgqueueError for whatever the database refuses. Use it as (async) context manager, or `close` it, to
    close its connections.
    """

    def __init__(self, dsn: str | None = None, *, settings: Settings | None = None) -> None:
        """Open nothing yet. Without a DSN, here and in PGQUEUE_DSN, the first call starts the embedded PostgreSQL."""
        self.settings: Final = Settings.load(dsn=dsn) if settings is None else settings
        self._dsn = dsn or self.settings.dsn
        self._server: Any = None
        self._guard = threading.Lock()
        #: Set by `pgqueue.testing.inline`.
        self.intercept: Intercept | None = None
        self._sync: SyncPool | None = None
        self._async: dict[asyncio.AbstractEventLoop, AsyncPool] = {}
        _open_clients.add(self)

    @property
    def dsn(self) -> str:
        """The DSN in use. Starts (and migrates) the embedded PostgreSQL when none was given."""
        if self._dsn is None:
            with self._guard:
                if self._dsn is None:
                    # Alembic and SQLAlchemy take 0.2 s to load, which only this branch needs.
                    from pgqueue import embedded, schema

                    self._server = embedded.start(self.settings.data_dir)
                    schema.migrate(self._server.dsn)
                    self._dsn = self._server.dsn
        return self._dsn

    def close(self) -> None:
        """Close the connections and leave the embedded PostgreSQL, if this client uses it."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        while self._async:
            self._async.popitem()[1].close()
        if self._server is not None:
            self._server.stop()
            self._server = self._dsn = None

    def forget_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close the connections of an event loop that is about to end."""
        pool = self._async.pop(loop, None)
        if pool is not None:
            pool.close()

    def leave_loop(self) -> None:
        """Close the connections that belong to the running event loop, which is about to end."""
        pool = self._async.pop(asyncio.get_running_loop(), None)
        if pool is not None:
            pool.close()

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

    def _sync_pool(self) -> SyncPool:
        dsn = self.dsn
        with self._guard:
            if self._sync is None:
                self._sync = SyncPool(dsn, self.settings)
            return self._sync

    async def _async_pool(self) -> AsyncPool:
        loop = asyncio.get_running_loop()
        pool = self._async.get(loop)
        if pool is None:
            dsn = await asyncio.to_thread(lambda: self.dsn) if self._dsn is None else self._dsn
            for other in [other for other in self._async if other.is_closed()]:
                self._async.pop(other).close()
            pool = self._async.setdefault(loop, AsyncPool(dsn, self.settings))
        return pool

    def _task_options(self, job_type: str) -> Mapping[str, Any]:
        """Return what applies to each job of a type unless its enqueue says otherwise."""
        return {}

    # Verbs of producers ----------------------------------------------------------------------------------------------

    def _enqueue(
        self, job_type: str, payload: Mapping[str, Any] | None = None, **options: Unpack[EnqueueOptions]
    ) -> Request[EnqueuedJob]:
        """Enqueue a job and return its id, status and whether its idempotency key was known.

        A known key answers with the job it has, also where that is of another type or payload; `job()` tells.
        With `connection=` it becomes part of that connection's (or session's) transaction. The options are those of
        EnqueueOptions. Raises InvalidJob, QueueFull, RateLimitedError, DatabaseUnavailable.
        """
        connection = options.pop("connection", None)
        parameters = enqueue_parameters(job_type, payload, {**self._task_options(job_type), **given(options)})
        return Request(calls.ENQUEUE, parameters, connection=connection)

    def _enqueue_many(self, jobs: Iterable[Mapping[str, Any]], *, connection: Any = None) -> Request[list[EnqueuedJob]]:
        """Enqueue jobs, all or none of them, and return one answer for each in the order given.

        Each is a mapping with `job_type` (or `type`), `payload`, and the options of `enqueue`. They are sent as arrays,
        thousands of plain ones for one queue in parts of one transaction: one is made while the one before is stored.
        """
        wanted = list(jobs)
        parts = many_parts(wanted, self._task_options) if connection is None and self.intercept is None else None
        if parts is not None:
            return Request(calls.ENQUEUE_MANY, {"job_types": wanted}, parts=parts)
        return Request(calls.ENQUEUE_MANY, many_parameters(wanted, self._task_options), connection=connection)

    def _job(self, job_id: JobId) -> Request[JobRow]:
        """Return a job's row wherever it is; raises JobNotFound."""
        return Request(calls.JOB, {"job_id": id_text(job_id)}, lambda row: found(row, job_id))

    def _result(self, job_id: JobId, *, wait: float | timedelta | None = None) -> Request[Any]:
        """Return what the job's task returned, waiting up to `wait` for its end.

        The job is looked at after 5 ms and then ever less often, four times a second in the end: a bell would take a
        connection of its own in every process that waits. The REST API's wait, and its events, are woken by one.
        Raises NotFinished when it has not ended by then, JobFailed for a dead letter, JobCancelled, JobNotFound.
        """
        return Request(
            calls.JOB,
            {"job_id": id_text(job_id)},
            lambda row: result_of(found(row, job_id)),
            wait=as_seconds("wait", wait) or 0.0,
        )

    def _finished_job(self, job_id: JobId, *, wait: float | timedelta | None = None) -> Request[JobRow]:
        """Return the row of a job that has ended, however it ended, waiting up to `wait`; raises NotFinished."""
        return Request(
            calls.JOB,
            {"job_id": id_text(job_id)},
            lambda row: ended(found(row, job_id)),
            wait=as_seconds("wait", wait) or 0.0,
        )

    def _cancel(self, job_id: JobId, *, connection: Any = None) -> Request[str]:
        """Cancel a job: "cancelled", or "cancel_requested" when it runs; raises WrongState, JobNotFound."""
        return Request(calls.CANCEL, {"job_id": id_text(job_id)}, connection=connection)

    # Verbs of operators ----------------------------------------------------------------------------------------------

    def _retry(self, job_id: JobId) -> Request[JobRow]:
        """Make a failed job or a dead letter pending again; raises WrongState, JobNotFound."""
        return Request(calls.RETRY, {"job_id": id_text(job_id)}, lambda row: found(row, job_id))

    def _retry_dead_letters(
        self,
        *,
        job_type: str | None = None,
        queue: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        max_jobs: int | None = None,
    ) -> Request[int]:
        """Make the dead letters that match pending again and return how many; without filters all of them."""
        return Request(calls.RETRY_DEAD_LETTERS, filters(job_type, queue, since, until, max_jobs))

    def _discard(self, job_id: JobId) -> Request[str]:
        """Delete a dead letter; raises WrongState, JobNotFound."""
        return Request(calls.DISCARD, {"job_id": id_text(job_id)})

    def _discard_dead_letters(
        self,
        *,
        job_type: str | None = None,
        queue: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        max_jobs: int | None = None,
    ) -> Request[int]:
        """Delete the dead letters that match and return how many; without filters all of them."""
        return Request(calls.DISCARD_DEAD_LETTERS, filters(job_type, queue, since, until, max_jobs))

    def _pause(self, queue: str) -> Request[bool]:
        """Stop claims from a queue; True if it was not paused before."""
        return Request(calls.PAUSE, {"queue": queue})

    def _resume(self, queue: str) -> Request[bool]:
        """Let a paused queue be claimed from again; True if it was paused."""
        return Request(calls.RESUME, {"queue": queue})

    def _why(self, job_id: JobId) -> Request[str]:
        """Say in one sentence why a job is not running now; raises JobNotFound."""
        return Request(calls.WHY, {"job_id": id_text(job_id)})

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
        return Request(
            calls.JOBS,
            {
                "statuses": None if statuses is None else list(statuses),
                "queue": queue,
                "job_type": job_type,
                "producer_id": producer_id,
                "before": None if before is None else id_text(before),
                "limit": limit,
            },
        )

    def _queue_stats(self) -> Request[list[dict[str, Any]]]:
        """Return the rows of the view queue_stats."""
        return Request(calls.QUEUE_STATS, {})

    def _workers(self) -> Request[list[dict[str, Any]]]:
        """Return the rows of the table workers."""
        return Request(calls.WORKERS, {})

    def _alerts(self) -> Request[list[dict[str, Any]]]:
        """Return the rows of the view alerts: what is wrong now, pages first."""
        return Request(calls.ALERTS, {})

    def _metrics(self) -> Request[list[calls.Sample]]:
        """Return every metric of the queue: name, kind, labels and value."""
        return Request(calls.METRICS, {})

    def _worker_load(self, queues: Iterable[str] | None = None) -> Request[calls.WorkerLoad]:
        """Return what scaling goes by, for some queues or (None) all."""
        return Request(calls.WORKER_LOAD, {"queues": None if queues is None else list(queues)})

    def _schema_version(self) -> Request[str]:
        """Return the version of the schema in the database; raises SchemaOutdated without one."""
        return Request(calls.SCHEMA_VERSION, {})

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
    why = awaited(_why)
    why_sync = blocking(_why)
    jobs = awaited(_jobs)
    jobs_sync = blocking(_jobs)
    queue_stats = awaited(_queue_stats)
    queue_stats_sync = blocking(_queue_stats)
    workers = awaited(_workers)
    workers_sync = blocking(_workers)
    alerts = awaited(_alerts)
    alerts_sync = blocking(_alerts)
    metrics = awaited(_metrics)
    metrics_sync = blocking(_metrics)
    worker_load = awaited(_worker_load)
    worker_load_sync = blocking(_worker_load)
    schema_version = awaited(_schema_version)
    schema_version_sync = blocking(_schema_version)


_open_clients: Final[weakref.WeakSet[Client]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for client in list(_open_clients):
        client.close()
