"""A job's own transaction: what the task writes in it commits together with the completion, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final
from uuid import UUID

import psycopg

from pgqueue import calling, calls
from pgqueue.attempt import SETTLED, Completed, Outcome, Settled
from pgqueue.connections import AsyncConnection, AsyncPool, SyncConnection, SyncPool
from pgqueue.errors import Cancel, ConfigError, InvalidJob, InvalidResult, LeaseLost, from_db
from pgqueue.finisher import Finisher
from pgqueue.held import Held
from pgqueue.job import SENT, Job
from pgqueue.log import logger
from pgqueue.settings import Settings
from pgqueue.wire import IntArray, JsonArray, UuidArray

_log: Final = logger("pgqueue.transactions")


class _Undo(Exception):
    """Ends a transaction block without committing it."""


@contextmanager
def _block(pool: SyncPool) -> Iterator[SyncConnection]:
    try:
        with pool.connection() as connection, connection.transaction():
            yield connection
    except _Undo:
        pass


@asynccontextmanager
async def _async_block(pool: AsyncPool) -> AsyncIterator[AsyncConnection]:
    try:
        async with pool.connection() as connection, connection.transaction():
            yield connection
    except _Undo:
        pass


class JobTransaction:
    """The transaction of one attempt, begun when the task first asks for it and concluded by the worker."""

    def __init__(self, held: Held, worker_id: UUID, sync_pool: SyncPool, async_pool: AsyncPool) -> None:
        """Begin nothing yet."""
        self._held = held
        self._worker_id = worker_id
        self._sync_pool = sync_pool
        self._async_pool = async_pool
        self._connection: Any = None
        self._stack: Any = None

    # For async tasks.

    async def begun_async(self) -> AsyncConnection:
        """Return the connection, within the transaction."""
        if self._connection is None:
            if not self._held.task.is_async:
                raise ConfigError("a sync task takes its transaction by `with job.connection() as connection:`")
            self._stack = AsyncExitStack()
            self._connection = await self._stack.enter_async_context(_async_block(self._async_pool))
        connection: AsyncConnection = self._connection
        return connection

    async def conclude_async(self, outcome: Outcome) -> Outcome:
        """Commit a completion together with what the task wrote, or undo that; return what is left to write."""
        if self._connection is None:
            return outcome
        try:
            if not isinstance(outcome, Completed):
                await self.undo_async()
                return outcome
            accepted = await calling.run_async(self._connection, calls.COMPLETE, **self._completion(outcome))
            if not accepted:
                await self.undo_async()
                return SETTLED
            if await calling.run_async(self._connection, calls.BECAME, job_id=self._held.job.job_id) != "completed":
                await self.undo_async()
                return self._cancelled()
            stack, self._connection = self._stack, None
            await stack.aclose()
            return Settled("completed")
        except BaseException as exc:
            # Also when it was told to stop at its very end: what is left open would keep its locks.
            await self._abort_async()
            if not isinstance(exc, Exception):
                raise
            return self._failed(exc)

    async def undo_async(self) -> None:
        """Roll back; a later use begins anew."""
        stack, self._connection = self._stack, None
        await stack.__aexit__(_Undo, _Undo(), None)

    async def _abort_async(self) -> None:
        if self._connection is not None:
            try:
                await self.undo_async()
            except Exception as exc:
                _log.debug("rolling back failed", error=str(exc))

    # For sync tasks.

    def begun(self) -> SyncConnection:
        """Return the connection, within the transaction."""
        if self._connection is None:
            if self._held.task.is_async:
                raise ConfigError("an async task takes its transaction by `async with job.connection() as connection:`")
            self._stack = ExitStack()
            self._connection = self._stack.enter_context(_block(self._sync_pool))
        connection: SyncConnection = self._connection
        return connection

    def conclude(self, outcome: Outcome) -> Outcome:
        """Do as conclude_async, in the thread of a sync task."""
        if self._connection is None:
            return outcome
        try:
            if not isinstance(outcome, Completed):
                self.undo()
                return outcome
            accepted = calling.run(self._connection, calls.COMPLETE, **self._completion(outcome))
            if not accepted:
                self.undo()
                return SETTLED
            if calling.run(self._connection, calls.BECAME, job_id=self._held.job.job_id) != "completed":
                self.undo()
                return self._cancelled()
            stack, self._connection = self._stack, None
            stack.close()
            return Settled("completed")
        except BaseException as exc:
            self._abort()
            if not isinstance(exc, Exception):
                raise
            return self._failed(exc)

    def undo(self) -> None:
        """Roll back; a later use begins anew."""
        stack, self._connection = self._stack, None
        stack.__exit__(_Undo, _Undo(), None)

    def _abort(self) -> None:
        if self._connection is not None:
            try:
                self.undo()
            except Exception as exc:
                _log.debug("rolling back failed", error=str(exc))

    def _completion(self, outcome: Completed) -> dict[str, object]:
        return {
            "worker_id": self._worker_id,
            "job_ids": UuidArray([self._held.key]),
            "attempts": IntArray([self._held.number]),
            "results": JsonArray([outcome.result]),
        }

    def _cancelled(self) -> Outcome:
        """Return the end of a job that was not completed, since its cancel had been requested."""
        return self._held.raised(Cancel("cancelled on request"))

    def _failed(self, exc: Exception) -> Outcome:
        fault = from_db(exc) if isinstance(exc, psycopg.Error) else exc
        if isinstance(fault, InvalidJob):
            fault = InvalidResult(f"the result is not storable: {fault}")
        return self._held.raised(fault)


class Connecting:
    """What `job.connection()` returns: the transaction's connection by `await`, `async with`, or `with`."""

    def __init__(self, transaction: JobTransaction) -> None:
        """Begin nothing yet."""
        self._transaction = transaction

    def __await__(self) -> Generator[Any, Any, AsyncConnection]:
        """Return the connection of an async task."""
        return self._transaction.begun_async().__await__()

    async def __aenter__(self) -> AsyncConnection:
        """Return the connection of an async task."""
        return await self._transaction.begun_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo what was written if the block was left by an exception."""
        if kind is not None:
            await self._transaction.undo_async()

    def __enter__(self) -> SyncConnection:
        """Return the connection of a sync task."""
        return self._transaction.begun()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Undo what was written if the block was left by an exception."""
        if kind is not None:
            self._transaction.undo()


class Guarding:
    """What `job.once(key)` returns: whether the guard was free, by `await` or as a truth value."""

    def __init__(self, transaction: JobTransaction, job_id: UUID, key: str) -> None:
        """Ask nothing yet."""
        self._transaction = transaction
        self._parameters = {"job_id": job_id, "key": key}
        self._free: bool | None = None

    def __await__(self) -> Generator[Any, Any, bool]:
        """Take the guard in an async task."""
        return self._take().__await__()

    async def _take(self) -> bool:
        if self._free is None:
            connection = await self._transaction.begun_async()
            self._free = bool(await calling.run_async(connection, calls.ONCE, **self._parameters))
        return self._free

    def __bool__(self) -> bool:
        """Take the guard in a sync task."""
        if self._free is None:
            self._free = bool(calling.run(self._transaction.begun(), calls.ONCE, **self._parameters))
        return self._free


class JobServices:
    """What the jobs of a worker ask of it: progress, transaction and guards. From any thread."""

    def __init__(
        self, held: Mapping[bytes, Held], worker_id: UUID, finisher: Finisher, dsn: str, settings: Settings
    ) -> None:
        """Open nothing yet; made within the worker's event loop."""
        self._loop = asyncio.get_running_loop()
        self._held = held
        self._worker_id = worker_id
        self._finisher = finisher
        self._sync_pool = SyncPool(dsn, settings, "pgqueue task", calls.RESET)
        self._async_pool = AsyncPool(dsn, settings, "pgqueue task", calls.RESET)

    def report(self, job: Job, progress: bytes) -> Awaitable[None]:
        """Store a job's progress; raises LeaseLost."""
        held = self._of(job)
        if _running_loop() is self._loop:
            told = self._loop.create_future()
            self._finisher.report(held, progress, told)
            return told
        self._loop.call_soon_threadsafe(self._finisher.report, held, progress)
        return SENT

    def transaction(self, job: Job) -> Connecting:
        """Return the transaction of a job; raises LeaseLost."""
        return Connecting(self._transaction(job))

    def once(self, job: Job, key: str) -> Guarding:
        """Return a guard within the transaction of a job; raises LeaseLost."""
        return Guarding(self._transaction(job), job.job_id, key)

    def close(self) -> None:
        """Close what is idle."""
        self._sync_pool.close()
        self._async_pool.close()

    def _transaction(self, job: Job) -> JobTransaction:
        held = self._of(job)
        if not isinstance(held.tx, JobTransaction):
            held.tx = JobTransaction(held, self._worker_id, self._sync_pool, self._async_pool)
        return held.tx

    def _of(self, job: Job) -> Held:
        held = self._held.get(job.claimed.job_id)
        if held is None or held.job is not job:
            raise LeaseLost(f"this attempt no longer owns job {job.job_id}")
        return held


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
