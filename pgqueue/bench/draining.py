"""A drain: jobs that wait, workers that are ready, and what happens once the queue is resumed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, LiteralString

from pgqueue.bench import statements
from pgqueue.bench.children import BenchError, wait_until, workers
from pgqueue.bench.machine import Meter, ServerProcesses
from pgqueue.bench.scratch import Database, Fill
from pgqueue.bench.site import Site
from pgqueue.client import Client
from pgqueue.connections import SyncConnection

_CAP: Final = 600.0
_LOOK: Final = 0.05


@dataclass(slots=True)
class Drained:
    """What a drain was like.

    `finishes` has how many jobs were finished when, `server` how much processor time the server had used when; times
    are in seconds since the first claim.
    """

    jobs: int
    seconds: float
    cost: dict[str, float]
    finishes: Sequence[tuple[float, int]]
    server: Sequence[tuple[float, float]]
    looks: int

    @property
    def figures(self) -> dict[str, float]:
        """The figures of the whole drain."""
        return {"jobs_per_s": self.jobs / self.seconds, **self.cost}

    def rate(self, first: int, last: int) -> float:
        """Return the jobs per second between the completions of job number `first` (0: the start) and `last`."""
        return (last - first) / max(self._when(last) - self._when(first), 1e-6)

    def server_us(self, first: int, last: int) -> float | None:
        """Return the server's processor time per job, in µs, between two completions; None where it does not tell."""
        if not self.server:
            return None
        used = self._used(self._when(last)) - self._used(self._when(first))
        return used / (last - first) * 1e6

    def course(self, parts: int = 10) -> list[float]:
        """Return the rate of each of so many equal parts of the jobs."""
        bounds = [self.jobs * part // parts for part in range(parts + 1)]
        return [self.rate(first, last) for first, last in pairwise(bounds)]

    def _used(self, at: float) -> float:
        """Return the server's processor time at a moment, between two looks in proportion."""
        before = self.server[0]
        for look in self.server:
            if look[0] >= at:
                part = (at - before[0]) / (look[0] - before[0]) if look[0] > before[0] else 0.0
                return before[1] + (look[1] - before[1]) * max(part, 0.0)
            before = look
        return before[1]

    def _when(self, number: int) -> float:
        done = 0
        for at, jobs in self.finishes if number else ():
            done += jobs
            if done >= number:
                return at
        return self.seconds if number else 0.0


class _Observer:
    """Looks at a database and knows how often it did."""

    def __init__(self, connection: SyncConnection) -> None:
        self._connection = connection
        self.looks = 0

    def __call__(self, text: LiteralString, **parameters: object) -> Any:
        self.looks += 1
        return statements.scalar(self._connection, text, **parameters)


def load(jobs: int, job_type: str = statements.NOOP) -> Fill:
    """Return what fills a database with jobs."""

    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.INSERT_MANY, job_type=job_type, jobs=jobs)

    return fill


def drain(database: Database, jobs: int, *, processes: int = 1, concurrency: int | None = None) -> Drained:
    """Let workers work off the `jobs` that wait, from the moment when all of them are ready."""
    with Client(database.dsn, settings=database.settings) as client, database.connection() as connection:
        look = _Observer(connection)
        client.pause_sync("default")
        with workers(database, processes, concurrency=concurrency) as pids:
            last = look(statements.LAST_JOB)
            meter = Meter(connection, pids)
            processes_seen = ServerProcesses.find(connection)
            used: list[tuple[float, float]] = []

            def gone() -> bool:
                # A server whose processes are seen has this machine's clock.
                if processes_seen is not None:
                    used.append((time.time(), sum(processes_seen.processor_times().values())))
                return not look(statements.IS_LIVE, job_id=last)

            client.resume_sync("default")
            wait_until(gone, "the drain", seconds=_CAP, every=_LOOK)
            wait_until(lambda: not look(statements.ANY_LIVE), "the drain", seconds=_CAP)
            ended = look(statements.CLOCK)
            cost = meter.per_job(jobs)
        began = look(statements.FIRST_START)
        if began is None:
            raise BenchError("no job of the drain was completed")
        finishes = [(at - began, done) for at, done in statements.rows(connection, statements.FINISHES)]
    return Drained(jobs, ended - began, cost, finishes, [(at - began, spent) for at, spent in used], look.looks)


def drained_copy(site: Site, jobs: int, act: Callable[[Database], Drained], job_type: str = statements.NOOP) -> Drained:
    """Drain a fresh copy of a database in which so many jobs wait, and count its commits."""
    with site.scratch.copy(f"{jobs} of {job_type}", load(jobs, job_type)) as database:
        before = site.scratch.commits(database)
        drained = act(database)
        # Sessions tell their commits when they end, and all but the observer's were the queue's.
        drained.cost["commits"] = max(site.scratch.commits(database) - before - drained.looks, 0) / jobs
    return drained
