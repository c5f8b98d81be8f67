"""The finisher: writes what came of attempts, everything that has gathered in one call as soon as the last returned."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias
from uuid import UUID

from pgqueue import calls
from pgqueue.attempt import Cancelled, Completed, Failed, Outcome, Released, Settled, Snoozed, Throttled
from pgqueue.calling import Call
from pgqueue.connections import Link
from pgqueue.errors import DatabaseError, DuplicateJob, InvalidJob, InvalidResult, PgqueueError
from pgqueue.held import Held
from pgqueue.job import ClaimedJob
from pgqueue.log import logger
from pgqueue.wire import IntArray, JsonArray, UuidArray

_log: Final = logger("pgqueue.finisher")
_MOST_JOBS: Final = 500
_MOST_BYTES: Final = 8 * 1024 * 1024
#: So few completions are worth waiting for more, where that keeps nobody waiting.
_FEW: Final = 25
#: Results of so many bytes may be why a call failed; one that failed so often alone, while others got through, was.
_LARGE: Final = 1024 * 1024
_REFUSALS: Final = 3
_PROGRESS_EVERY: Final = 0.2
_SLOWEST_RETRY: Final = 1.0
#: How long, in seconds, the retry of a job is put off at a time while a thread that did not stop still works on it.
HOLD: Final = 30.0

Ended: TypeAlias = tuple[Held, Outcome]


class Along(Protocol):
    """Claims in the same call as a completion that sets ordering keys free, so that their next jobs need not wait."""

    def patience(self) -> float:
        """Return for how many seconds completions may wait for others to be written with."""

    def offer(self, freed: int) -> dict[str, Any] | None:
        """Return the parameters of a claim after `freed` jobs with ordering keys, None when there is no room."""

    def taken(self, asked: int, rows: Sequence[ClaimedJob], claimed_at: float) -> None:
        """Take the rows of an offered claim for `asked` jobs; none if it failed."""


class Finisher:
    """Gathers outcomes and progress, and writes them over a link of its own until the database has taken them.

    `settled(some, status)` is told of attempts that are done with. The status is the jobs' new one, None when the
    attempts were not accepted: another owner has the job.
    """

    def __init__(self, link: Link, worker_id: UUID, settled: Callable[[Sequence[Held], str | None], None]) -> None:
        """Nothing to write yet."""
        self._link = link
        self._worker_id = worker_id
        self._settled = settled
        #: Their outcomes are completions.
        self._completed: list[Held] = []
        self._others: list[Ended] = []
        self._progress: dict[bytes, tuple[Held, bytes, list[asyncio.Future[None]]]] = {}
        self._progress_at = 0.0
        self._work = asyncio.Event()
        #: What came cannot wait for others.
        self._urgent = asyncio.Event()
        self._empty = asyncio.Event()
        self._fault: str | None = None
        self.along: Along | None = None
        self.counts: Counter[str] = Counter()
        #: How often each large result failed by itself.
        self._refusals: Counter[bytes] = Counter()

    def add(self, held: Held, outcome: Outcome) -> None:
        """Take an outcome to write."""
        if type(outcome) is Completed:
            # While some wait to be written, nobody need be told of more.
            if not self._completed:
                self._work.set()
            self._completed.append(held)
            if held.claimed.ordering_key is not None:
                self._urgent.set()
        else:
            self._others.append((held, outcome))
            self._work.set()
            self._urgent.set()

    def report(self, held: Held, progress: bytes, told: asyncio.Future[None] | None = None) -> None:
        """Take a progress report, which replaces one of the same job that is not written yet."""
        _, _, waiting = self._progress.get(held.key, (held, b"", []))
        if told is not None:
            waiting.append(told)
        self._progress[held.key] = (held, progress, waiting)
        self._work.set()
        self._urgent.set()

    @property
    def waiting(self) -> int:
        """How many outcomes are not written yet."""
        return len(self._completed) + len(self._others)

    @property
    def stuck(self) -> bool:
        """Whether the database did not take what was written last."""
        return self._fault is not None

    async def run(self) -> None:
        """Write until cancelled; what the database does not take now is kept and tried again."""
        pause = 0.0
        while True:
            await self._work.wait()
            try:
                await self._flush()
                pause = 0.0
                if self._fault is not None:
                    self._fault = None
                    _log.info("outcomes are written again")
            except PgqueueError as exc:
                if self._fault is None:
                    _log.warning("outcomes cannot be written; trying again", error=str(exc), waiting=self.waiting)
                self._fault = str(exc)
                pause = min(max(0.05, pause * 2), _SLOWEST_RETRY)
                self._work.set()
            except Exception:
                _log.exception("the finisher failed; trying again")
                pause = _SLOWEST_RETRY
                self._work.set()
            if pause:
                await asyncio.sleep(pause)

    async def drained(self) -> None:
        """Return when nothing is left to write."""
        self._work.set()
        await self._empty.wait()

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    async def _flush(self) -> None:
        self._work.clear()
        self._empty.clear()
        # By turns, since under load completions never end.
        while self.waiting:
            fault = None
            if self._completed:
                await self._gather()
                try:
                    await self._write_completed()
                except PgqueueError as exc:
                    fault = exc
            if self._others:
                await self._write_others(self._others[:_MOST_JOBS])
            await self._write_due_progress()
            if fault is not None:
                raise fault
        early = await self._write_due_progress()
        if early:
            asyncio.get_running_loop().call_later(early, self._work.set)
        if not self.waiting:
            self._empty.set()

    async def _write_due_progress(self) -> float:
        """Write the progress there is, unless it is too early; return for how many seconds it still is."""
        if not self._progress:
            return 0.0
        early = self._progress_at + _PROGRESS_EVERY - time.monotonic()
        if early > 0:
            return early
        await self._write_progress(list(self._progress))
        return 0.0

    async def _gather(self) -> None:
        """Wait for more completions where there are few, and nothing that somebody waits for."""
        if self.along is None or len(self._completed) >= _FEW or self._others or self._progress:
            return
        if any(held.claimed.ordering_key is not None for held in self._completed):
            return
        seconds = self.along.patience()
        if not seconds:
            return
        self._urgent.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._urgent.wait()
        except TimeoutError:
            pass

    async def _write_completed(self) -> None:
        batch = self._completed[:_MOST_JOBS]
        results = _results(batch)
        fitting = _fitting(results)
        batch, results = batch[:fitting], results[:fitting]
        await self._write_progress(held.key for held in batch)
        try:
            await self._complete(batch, results)
        except PgqueueError:
            if len(results[0] or b"") > _LARGE:
                await self._put_behind(batch[0])
            raise
        del self._completed[: len(batch)]

    async def _put_behind(self, held: Held) -> None:
        """Let others go before what may be too large to get through in time; give it up when it was that often."""
        self._completed.remove(held)
        self._completed.append(held)
        # It proves nothing while the database is away.
        await self._link.call(calls.SCHEMA_VERSION)
        self._refusals[held.key] += 1
        if self._refusals[held.key] >= _REFUSALS:
            del self._refusals[held.key]
            self._completed.remove(held)
            self._refused(held, InvalidJob("the database broke off, or did not answer in time, whenever it was sent"))

    async def _complete(self, batch: Sequence[Held], results: Sequence[bytes | None]) -> None:
        claimed = [held.claimed for held in batch]
        completion = {
            "worker_id": self._worker_id,
            "job_ids": UuidArray([job.job_id for job in claimed]),
            "attempts": IntArray([job.attempts for job in claimed]),
            "results": JsonArray(results if any(results) else ()),
        }
        # Their keys come free.
        freed = len(claimed) - [job.ordering_key for job in claimed].count(None)
        try:
            accepted = await self._completed_of(completion, freed)
        except PgqueueError as exc:
            if not _is_about_a_job(exc):
                raise
            if len(batch) == 1:
                self._refused(batch[0], exc)
                return
            middle = len(batch) // 2
            await self._complete(batch[:middle], results[:middle])
            await self._complete(batch[middle:], results[middle:])
            return
        self.counts["completed"] += len(accepted)
        if len(accepted) == len(batch):
            self._settled(batch, "completed")
        else:
            ours = set(accepted)
            self._settled([held for held in batch if held.key in ours], "completed")
            self._settled([held for held in batch if held.key not in ours], None)

    async def _completed_of(self, completion: dict[str, Any], freed: int) -> list[bytes]:
        accepted: list[bytes]
        claim = self.along.offer(freed) if freed and self.along is not None else None
        if self.along is None or claim is None:
            accepted = await self._link.call(calls.COMPLETE, **completion)
            return accepted
        rows: list[ClaimedJob] = []
        began = time.monotonic()
        try:
            accepted, rows = await self._link.call(calls.COMPLETE_AND_CLAIM, **{**claim, **completion})
        finally:
            self.along.taken(claim["max_jobs"], rows, began)
        return accepted

    def _refused(self, held: Held, exc: PgqueueError) -> None:
        fault = InvalidResult(f"the result is not storable: {exc}") if isinstance(exc, InvalidJob) else exc
        self._others.append((held, held.raised(fault)))

    async def _write_others(self, batch: Sequence[Ended]) -> None:
        """Write outcomes of all kinds but completions, in a call for each kind, and forget those that are written."""
        for kind in (Settled, Failed, Snoozed, Throttled, Cancelled, Released):
            some = [(held, outcome) for held, outcome in batch if isinstance(outcome, kind)]
            if not some:
                continue
            await self._write_progress(held.key for held, _ in some)
            try:
                statuses = await self._write_kind(kind, some)
            except PgqueueError as exc:
                if not _is_about_a_job(exc):
                    raise
                if len(some) > 1:
                    for ended in some:
                        await self._write_others([ended])
                    continue
                held = some[0][0]
                if kind is not Failed:
                    self._others = [ended for ended in self._others if ended[0] is not held]
                    self._others.append((held, held.raised(InvalidResult(f"the outcome is not storable: {exc}"))))
                    continue
                statuses = {}
                _log.error("an outcome cannot be written", job_id=str(held.job.job_id), error=str(exc))
            written = {id(held) for held, _ in some}
            self._others = [ended for ended in self._others if id(ended[0]) not in written]
            self.counts[kind.__name__.lower()] += len(some)
            for held, _ in some:
                self._settled([held], statuses.get(held.key))

    async def _write_kind(self, kind: type[Any], some: Sequence[Ended]) -> dict[bytes, str | None]:
        """Write outcomes of one kind; return the new status of each job that was still ours."""
        if kind is Settled:
            return {held.key: outcome.status for held, outcome in some if isinstance(outcome, Settled)}
        if kind is Released:
            released: dict[bytes, str | None] = {}
            for started in (True, False):
                part = [ended for ended in some if isinstance(ended[1], Released) and ended[1].started is started]
                if part:
                    keys: list[bytes] = await self._call(calls.RELEASE, part, started=started)
                    released |= dict.fromkeys(keys, "pending")
            return released
        call, parameters = _columns(kind, some)
        return dict(await self._call(call, some, **parameters))

    async def _call(self, call: Call[Any], some: Sequence[Ended], **parameters: object) -> Any:
        return await self._link.call(
            call,
            worker_id=self._worker_id,
            job_ids=UuidArray([held.key for held, _ in some]),
            attempts=IntArray([held.number for held, _ in some]),
            **parameters,
        )

    async def _write_progress(self, keys: Iterable[bytes]) -> None:
        if not self._progress:
            return
        reports = [self._progress.pop(key) for key in keys if key in self._progress]
        if not reports:
            return
        try:
            some: list[Ended] = [(held, Settled()) for held, _, _ in reports]
            await self._call(calls.SET_PROGRESS, some, progress=JsonArray([progress for _, progress, _ in reports]))
            self._progress_at = time.monotonic()
        except PgqueueError as exc:
            # A report is of the moment: a later one takes its place.
            _log.debug("progress was not written", error=str(exc))
            if not _is_about_a_job(exc):
                raise
        finally:
            for _, _, waiting in reports:
                for told in waiting:
                    if not told.done():
                        told.set_result(None)


def _results(batch: Sequence[Held]) -> list[bytes | None]:
    outcomes: list[Any] = [held.outcome for held in batch]
    return [outcome.result for outcome in outcomes]


def _fitting(results: Sequence[bytes | None]) -> int:
    """Return how many to send in one call: some megabytes of them, and a large one by itself, whatever its size."""
    size = 0
    for before, result in enumerate(results):
        if result is not None:
            size += len(result)
            if before and (size > _MOST_BYTES or len(result) > _LARGE):
                return before
            if len(result) > _LARGE:
                return 1
    return len(results)


def _columns(kind: type[Any], some: Sequence[Ended]) -> tuple[Call[Any], dict[str, object]]:
    """Return the call of a kind of outcome and its parameters beside ids and attempts."""
    outcomes: list[Any] = [outcome for _, outcome in some]
    if kind is Failed:
        return calls.FAIL, {
            "errors": JsonArray([_encoded(outcome.error) for outcome in outcomes]),
            "retryable": [outcome.retryable for outcome in outcomes],
            "retry_in": [
                HOLD if held.abandoned else outcome.retry_in for held, outcome in some if isinstance(outcome, Failed)
            ],
        }
    if kind is Cancelled:
        return calls.CANCEL_ATTEMPT, {"errors": JsonArray([_encoded(outcome.error) for outcome in outcomes])}
    call = calls.SNOOZE if kind is Snoozed else calls.RATE_LIMIT
    return call, {"delays": [outcome.delay for outcome in outcomes]}


def _encoded(error: dict[str, Any]) -> bytes:
    return json.dumps(error).encode()


def _is_about_a_job(exc: PgqueueError) -> bool:
    """Say whether the database took offence at a value rather than being unable to work."""
    return isinstance(exc, (InvalidJob, DuplicateJob)) or type(exc) is DatabaseError
