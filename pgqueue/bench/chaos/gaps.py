"""For how long nothing happened around each fault, and what that makes in a year."""

import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from pgqueue.bench.chaos.ledger import Book, Fault, Run

#: Seconds after a fault that still belong to it.
_AFTER: Final = 10.0
_LONG: Final = frozenset({"slow", "thread", "effect"})
_LONGEST: Final = 5.0

#: How often a year each fault is taken to come, for a deployment of some ten machines that is released every day. A
#: paused queue is what an operator wants, and bulk verbs are no faults; they are counted all the same.
PER_YEAR: Final[Mapping[str, float]] = {
    "server stopped": 12, "server killed": 4, "backend killed": 4, "backends terminated": 12,
    "connections exhausted": 6, "slow commits": 24, "disk full": 1, "read-only": 2, "statement timeout": 2,
    "idle timeout": 2, "long transaction": 52, "partition missing": 2, "worker killed": 52, "worker stopped": 24,
    "worker terminated": 365, "API killed": 24, "PgBouncer killed": 12, "network cut": 24, "network silent": 12,
    "network slow": 24, "network half-open": 12, "clock off": 2, "bulk cancel": 52, "bulk retry": 52,
    "queue paused": 12,
}  # fmt: skip
YEAR_SECONDS: Final = 365.25 * 86400
WANTED: Final = 0.9999


@dataclass(slots=True)
class Kind:
    """What one kind of fault did: how often it came, how often while long jobs ran, and the gaps in seconds.

    `work` are the longest times around each in which no attempt began, `doors` those in which no job was accepted.
    """

    kind: str
    times: int = 0
    busy: int = 0
    met: int = 0
    work: list[float] = field(default_factory=list)
    doors: list[float] = field(default_factory=list)

    @property
    def per_year(self) -> float:
        """How often it is taken to come in a year."""
        return PER_YEAR.get(self.kind, 0.0)


def longest(moments: Sequence[float], since: float, until: float) -> float:
    """Return the longest time within a span in which none of the sorted `moments` lies."""
    within = moments[bisect_right(moments, since) : bisect_left(moments, until)]
    return max(after - before for before, after in pairwise([since, *within, until]))


def _pid(run: Run) -> int:
    return int(run.by.split("-")[1])


def _busy(fault: Fault, long_runs: Iterable[Run], pids: Mapping[str, Sequence[int]]) -> bool:
    wanted = pids.get(fault.victim)
    return any(
        run.at < fault.at < (run.ended_at if run.ended_at is not None else run.at + _LONGEST)
        and (wanted is None or _pid(run) in wanted)
        for run in long_runs
    )


def kinds(book: Book, pids: Mapping[str, Sequence[int]]) -> list[Kind]:
    """Return what each kind did; `pids` are the processes of each worker, by name."""
    starts = sorted(run.at for run in book.all_runs())
    accepts = sorted(book.accepts)
    by_second: dict[int, list[Run]] = defaultdict(list)
    for run in book.all_runs():
        if run.job_type in _LONG:
            by_second[int(run.at)].append(run)
    found: dict[str, Kind] = {}
    for fault in book.faults:
        kind = found.setdefault(fault.kind, Kind(fault.kind))
        kind.times += 1
        near = [run for second in range(int(fault.at - _LONGEST) - 1, int(fault.at) + 1) for run in by_second[second]]
        kind.busy += _busy(fault, near, pids)
        kind.met += fault.detail.startswith("met another fault")
        # Once everything has been enqueued nothing is a gap any more.
        until = max(min(fault.until + _AFTER, accepts[-1] if accepts else fault.at), fault.at)
        kind.work.append(longest(starts, fault.at, until))
        kind.doors.append(longest(accepts, fault.at, until))
    return sorted(found.values(), key=lambda kind: kind.kind)


def yearly_seconds(found: Iterable[Kind], of: str = "work", by: str = "median") -> float:
    """Return the seconds without service in a year: each kind's gap, times how often it comes."""
    total = 0.0
    for kind in found:
        seconds = kind.work if of == "work" else kind.doors
        total += kind.per_year * (statistics.median(seconds) if by == "median" else max(seconds))
    return total


def availability(seconds: float) -> float:
    """Return the part of a year that is left."""
    return 1.0 - seconds / YEAR_SECONDS
