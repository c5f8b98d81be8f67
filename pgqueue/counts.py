"""What a worker counts of the attempts it ran, and how the counts reach the database: in batches, once each.

Counting costs a job no SQL. The database adds up what workers send every few seconds; what a killed worker had not
sent is lost.
"""

import asyncio
import json
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import UUID

from pgqueue import calls
from pgqueue.connections import Link
from pgqueue.job import ClaimedJob
from pgqueue.tracing import Meters

#: Seconds up to which the buckets of run times and waits reach, as pgqueue.bucket_limits() has them.
LIMITS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600)
OUTCOMES: Final = ("completed", "failed", "dead_letter", "cancelled", "snoozed", "lost")
OTHER: Final = "_OTHER"
#: Queue, job type and priority.
Key: TypeAlias = tuple[str, str, int]
_MOST_KEYS: Final = 400
_FIRST: Final = LIMITS[0]
_BUCKETS: Final = len(LIMITS) + 1
#: How an attempt ended, by the job's status after it; one that was given back is not counted.
_OUTCOMES: Final[dict[str | None, str | None]] = {None: "lost", "submitted": "snoozed", "pending": None}


@dataclass(slots=True)
class Count:
    """Attempts of one queue, job type and priority: how many ended how, and histograms of run time and wait."""

    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    duration_seconds: float = 0.0
    wait_seconds: float = 0.0
    durations: list[int] = field(default_factory=lambda: [0] * _BUCKETS)
    waits: list[int] = field(default_factory=lambda: [0] * _BUCKETS)

    def add(self, outcome: str, seconds: float, wait: float | None) -> None:
        """Count an attempt that ended after `seconds` of work; `wait` is None for all but the first of a job."""
        self.outcomes[outcome] += 1
        self.duration_seconds += seconds
        # Most attempts are quick, and the first bucket needs no search.
        self.durations[bisect_left(LIMITS, seconds) if seconds > _FIRST else 0] += 1
        if wait is not None:
            self.wait_seconds += wait
            self.waits[bisect_left(LIMITS, wait) if wait > _FIRST else 0] += 1

    def copy(self) -> "Count":
        """Return a copy that shares nothing."""
        return Count(
            dict(self.outcomes), self.duration_seconds, self.wait_seconds, list(self.durations), list(self.waits)
        )

    def since(self, before: "Count") -> "Count":
        """Return what was gained since an earlier copy."""
        return Count(
            {name: number - before.outcomes.get(name, 0) for name, number in self.outcomes.items()},
            self.duration_seconds - before.duration_seconds,
            self.wait_seconds - before.wait_seconds,
            [now - was for now, was in zip(self.durations, before.durations, strict=True)],
            [now - was for now, was in zip(self.waits, before.waits, strict=True)],
        )

    @property
    def ended(self) -> int:
        """How many attempts ended."""
        return sum(self.outcomes.values())


class Counts:
    """Everything counted since this process began: by one thread, while any others copy it.

    Counting is on the path of every job, so there is no lock: a copy may have one half of the newest attempt, and the
    next copy has the rest.
    """

    def __init__(self) -> None:
        """Start at nothing."""
        self._counts: dict[Key, Count] = {}
        self._meters = Meters()

    def ended(self, key: Key, outcome: str, seconds: float, wait: float | None) -> None:
        """Count an attempt that ended after `seconds` of work; `wait` is None for all but the first of a job."""
        self._of(key).add(outcome, seconds, wait)

    def settled(self, jobs: Sequence[ClaimedJob], status: str | None, seconds: Sequence[float]) -> None:
        """Count attempts, and how long each worked, by the status that their jobs have now; None: not accepted."""
        outcome = _OUTCOMES.get(status, status)
        if outcome is None:
            return
        metered = self._meters.wanted
        # Of many that end together most are alike.
        key, count = None, Count()
        for job, worked in zip(jobs, seconds, strict=True):
            if key is None or job.job_type != key[1] or job.queue != key[0] or job.priority != key[2]:
                key = (job.queue, job.job_type, job.priority)
                count = self._of(key)
            wait = None
            if job.attempts == 1:
                # A job that was to start later could not start before.
                could = job.created_at if job.scheduled_at is None else max(job.created_at, job.scheduled_at)
                wait = (job.updated_at - could) * 1e-6
            count.add(outcome, worked, wait)
            if metered:
                self._meters.attempt(job.queue, job.job_type, outcome, worked, wait)

    def copy(self) -> dict[Key, Count]:
        """Return the counts at this moment."""
        return {key: count.copy() for key, count in list(self._counts.items())}

    def _of(self, key: Key) -> Count:
        count = self._counts.get(key)
        if count is not None:
            return count
        if len(self._counts) >= _MOST_KEYS:
            key = (OTHER, OTHER, key[2])
        return self._counts.setdefault(key, Count())


def gained(now: Mapping[Key, Count], before: Mapping[Key, Count]) -> dict[Key, Count]:
    """Return what was counted between two copies, without keys of which nothing was."""
    nothing = Count()
    return {
        key: count.since(before.get(key, nothing))
        for key, count in now.items()
        if key not in before or count.ended != before[key].ended
    }


class Sender:
    """Hands what is new to the database. One whose answer was lost goes out again under the same number."""

    def __init__(self, counts: Counts, worker_id: UUID, busy: Callable[[], float], concurrency: int) -> None:
        """`busy` gives the seconds, since the process began, that slots were busy, added up over all slots."""
        self._counts = counts
        self._worker_id = worker_id
        self._busy = busy
        self._concurrency = concurrency
        self._sent: dict[Key, Count] = {}
        self._batch = 0
        self._pending: tuple[dict[Key, Count], str] | None = None
        self._sending = threading.Lock()
        self._busy_before = (time.monotonic(), 0.0)
        self.utilization = 0.0

    async def flush(self, link: Link) -> bool:
        """Send what is new over `link`; False when the worker has no row and must register first. Raises PgqueueError.

        While another thread is at it, nothing is done.
        """
        if not self._sending.acquire(blocking=False):
            return True
        try:
            return await self._flush(link)
        finally:
            self._sending.release()

    async def flush_last(self, link: Link) -> None:
        """Send what is new when nothing more will come, after whoever is sending now."""
        await asyncio.to_thread(self._sending.acquire)
        try:
            for _ in range(2):
                await self._flush(link)
        finally:
            self._sending.release()

    async def _flush(self, link: Link) -> bool:
        was_busy = self.utilization
        self._measure()
        if self._pending is None:
            now = self._counts.copy()
            new = gained(now, self._sent)
            if not new and round(was_busy, 2) == round(self.utilization, 2):
                return True
            self._batch += 1
            self._pending = (now, json.dumps([_row(key, count) for key, count in new.items()]))
        now, rows = self._pending
        taken: bool = await link.call(
            calls.ADD_COUNTS,
            worker_id=self._worker_id,
            batch=self._batch,
            utilization=self.utilization,
            counts=rows,
        )
        if taken:
            self._sent, self._pending = now, None
        return taken

    def _measure(self) -> None:
        now, busy = time.monotonic(), self._busy()
        then, busy_then = self._busy_before
        if now - then >= 1.0:
            self.utilization = min(max((busy - busy_then) / ((now - then) * self._concurrency), 0.0), 1.0)
            self._busy_before = (now, busy)


def _row(key: Key, count: Count) -> dict[str, Any]:
    queue, job_type, priority = key
    return {
        "queue": queue,
        "job_type": job_type,
        "priority": priority,
        **count.outcomes,
        "duration_seconds": round(count.duration_seconds, 6),
        "wait_seconds": round(count.wait_seconds, 6),
        "durations": count.durations,
        "waits": count.waits,
    }
