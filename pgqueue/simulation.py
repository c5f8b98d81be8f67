"""A day of traffic against the scaling rule: `python -m pgqueue.simulation` prints the figures, `… PLOT.svg` draws it.

Time is simulated second by second; jobs arrive by chance around a curve of the day with a rush and a bulk load in it.
"""

import math
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from pgqueue.autoscale import History, Policy, decide, remembered
from pgqueue.calls import WorkerLoad

DAY: Final = 86400
#: Seconds: between two looks of the rule, and until a started worker works.
_LOOK_EVERY: Final = 5
_START: Final = 3
_SLOTS: Final = 10
_JOB_SECONDS: Final = 0.5
_RUSH: Final = (13 * 3600, 13 * 3600 + 900)
_BULK_AT: Final = 22 * 3600
_BULK_JOBS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Moment:
    """The state at one second: jobs that arrived in it, jobs that wait, workers, and how busy they were."""

    second: int
    arrived: int
    pending: float
    workers: int
    utilization: float


@dataclass(slots=True)
class Day:
    """What happened: a moment for each second, and the changes as (second, workers before, workers after)."""

    moments: list[Moment] = field(default_factory=list)
    changes: list[tuple[int, int, int]] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Return the figures by which the rule is judged; times are in seconds, jobs waited on the average."""
        ups = [second for second, before, after in self.changes if after > before]
        downs = [second for second, before, after in self.changes if after < before]
        reversals = [
            later[0] - earlier[0]
            for earlier, later in pairwise(self.changes)
            if (earlier[2] > earlier[1]) != (later[2] > later[1])
        ]
        pending = sorted(moment.pending for moment in self.moments)
        arrived = sum(moment.arrived for moment in self.moments)
        workers = [moment.workers for moment in self.moments]
        return {
            "jobs": arrived,
            "workers_least": min(workers),
            "workers_most": max(workers),
            "worker_hours": sum(workers) / 3600,
            "worker_hours_of_a_fixed_pool": max(workers) * 24,
            "changes_up": len(ups),
            "changes_down": len(downs),
            "shortest_gap_up": min(_gaps(ups), default=0),
            "shortest_gap_down": min(_gaps(downs), default=0),
            "shortest_reversal": min(reversals, default=0),
            "pending_p99": pending[int(len(pending) * 0.99)],
            "pending_most": pending[-1],
            "wait_mean": sum(pending) / max(arrived, 1),
        }


def _gaps(seconds: Sequence[int]) -> Iterable[int]:
    return (later - earlier for earlier, later in pairwise(seconds))


def rate(second: int) -> float:
    """Return the jobs per second that arrive on the average at a second of the day."""
    hour = second / 3600
    day = 20 + 260 * math.pow(max(math.sin(math.pi * (hour - 6) / 14), 0.0), 1.5)
    return day * (2.5 if _RUSH[0] <= second < _RUSH[1] else 1.0)


def simulate(policy: Policy | None = None, seed: int = 7) -> Day:
    """Run the rule through one day."""
    policy = policy or Policy()
    chance = random.Random(seed)
    day = Day()
    workers, history = policy.minimum, History()
    starting: list[tuple[int, int]] = []
    pending, busy = 0.0, 0.0
    for second in range(DAY):
        working = workers - sum(number for at, number in starting if at > second)
        mean = rate(second)
        arrived = max(round(chance.gauss(mean, math.sqrt(mean))), 0) + (_BULK_JOBS if second == _BULK_AT else 0)
        capacity = working * _SLOTS / _JOB_SECONDS
        served = min(pending + arrived, capacity)
        pending += arrived - served
        # Workers tell what they did in the last seconds, not in the last one.
        busy += ((served / capacity if capacity else 0.0) - busy) / 5
        if second % _LOOK_EVERY == 0:
            load = WorkerLoad(
                pending=round(pending), workers=workers, slots=workers * _SLOTS, running=round(served * _JOB_SECONDS),
                utilization=busy, processing_seconds=_JOB_SECONDS, soft_limit=50_000,
            )  # fmt: skip
            decision = decide(load, workers, history, second, policy)
            history = remembered(history, decision, second)
            if decision.wanted != workers:
                day.changes.append((second, workers, decision.wanted))
            if decision.wanted > workers:
                starting.append((second + _START, decision.wanted - workers))
            workers = decision.wanted
            starting = [entry for entry in starting if entry[0] > second]
        day.moments.append(Moment(second, arrived, pending, workers, busy))
    return day


_WIDTH: Final = 860
_LEFT: Final = 64
_PANEL: Final = 130
_GAP: Final = 46
_STEP: Final = 120


def plot(day: Day) -> str:
    """Return the day as SVG: arrivals, workers and waiting jobs, each with its greatest value as scale."""
    panels = [
        ("jobs arriving per second", "#2f6fab", [float(moment.arrived) for moment in day.moments], False),
        ("workers", "#3b7d3b", [float(moment.workers) for moment in day.moments], True),
        ("jobs waiting", "#b3541e", [moment.pending for moment in day.moments], True),
    ]
    height = len(panels) * (_PANEL + _GAP) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="12">',
        "<title>A day of traffic against the scaling rule</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, (title, colour, values, highest) in enumerate(panels):
        parts += _panel(title, colour, _thinned(values, highest), number * (_PANEL + _GAP) + 34)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _thinned(values: Sequence[float], highest: bool) -> list[float]:
    """Return one value for every two minutes: their highest, or their mean without a peak of one second."""
    chunks = [values[start : start + _STEP] for start in range(0, len(values), _STEP)]
    if highest:
        return [max(chunk) for chunk in chunks]
    return [sorted(chunk)[len(chunk) // 2] for chunk in chunks]


def _panel(title: str, colour: str, values: Sequence[float], top: int) -> list[str]:
    bottom, width = top + _PANEL, _WIDTH - _LEFT - 20
    most = _round_up(max(values))
    points = " ".join(
        f"{_LEFT + width * index / (len(values) - 1):.1f},{bottom - _PANEL * value / most:.1f}"
        for index, value in enumerate(values)
    )
    parts = [f'<text x="{_LEFT}" y="{top - 10}" font-weight="600" fill="#222">{title}</text>']
    for part in (0.0, 0.5, 1.0):
        y = bottom - _PANEL * part
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{most * part:,.0f}</text>')
    for hour in range(0, 25, 4):
        x = _LEFT + width * hour / 24
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="#555">{hour:02}:00</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    return parts


def _round_up(value: float) -> float:
    size: float = 10 ** math.floor(math.log10(max(value, 1)))
    return next(step * size for step in (1, 2, 4, 5, 8, 10) if step * size >= value)


def main() -> None:
    """Print the figures; with an argument draw the plot there too."""
    day = simulate()
    for name, value in day.figures().items():
        sys.stdout.write(f"{name:<30} {value:>12,.2f}\n")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(plot(day))


if __name__ == "__main__":
    main()
