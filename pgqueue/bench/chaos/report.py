"""What a chaos run showed, as data and as text."""

import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from pgqueue import __version__
from pgqueue.bench.chaos import gaps
from pgqueue.bench.chaos.run import Outcome

_TOLD: Final = 50


def document(outcome: Outcome) -> dict[str, Any]:
    """Return everything as data."""
    book, rows = outcome.book, outcome.tables.rows
    found = gaps.kinds(book, outcome.pids)
    by_median, by_worst = gaps.yearly_seconds(found), gaps.yearly_seconds(found, by="worst")
    doors = gaps.yearly_seconds(found, "doors")
    return {
        "pgqueue": __version__,
        "python": platform.python_version(),
        "machine": {"system": platform.platform(), "processors": os.cpu_count()},
        "server": outcome.server_version,
        "seed": outcome.options.seed,
        "minutes": outcome.options.minutes,
        "seconds": round(outcome.ended - outcome.began, 1),
        "accepted": sum(len(ids) for ids in book.ids.values()),
        "jobs": len(rows),
        "statuses": dict(Counter(row.status for row in rows)),
        "starts": sum(len(runs) for runs in book.runs.values()),
        "started_again": sum(len(runs) > 1 for runs in book.runs.values()),
        "leases_lost": sum(len(row.leases_lost) for row in rows),
        "injections": len(book.faults),
        "while_busy": sum(kind.busy for kind in found),
        "restarts": outcome.exits,
        "left_out": list(outcome.left_out),
        "drained_seconds": outcome.drained_seconds and round(outcome.drained_seconds, 1),
        "overdue": outcome.overdue,
        "troubles": outcome.troubles,
        "violations": dict(Counter(one.rule for one in outcome.violations)),
        "told": [{"rule": one.rule, "what": one.what} for one in outcome.violations[:_TOLD]],
        "kinds": [
            {
                "kind": kind.kind,
                "times": kind.times,
                "while_busy": kind.busy,
                "met_another": kind.met,
                "work_gap": _gap(kind.work),
                "door_gap": _gap(kind.doors),
                "per_year": kind.per_year,
            }
            for kind in found
        ],
        "availability": {
            "wanted": gaps.WANTED,
            "seconds_per_year": {"median": round(by_median), "worst": round(by_worst), "doors_median": round(doors)},
            "work": round(gaps.availability(by_median), 6),
            "work_by_worst_gaps": round(gaps.availability(by_worst), 6),
            "doors": round(gaps.availability(doors), 6),
        },
        "course": _course(outcome),
    }


def _gap(seconds: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)}


def _course(outcome: Outcome) -> list[int]:
    """Return how many attempts ended in each ten seconds since the first fault could come."""
    counts: Counter[int] = Counter()
    for run in outcome.book.all_runs():
        if run.ended_at is not None and run.ended_at >= outcome.began:
            counts[int((run.ended_at - outcome.began) / 10)] += 1
    return [counts[n] for n in range(max(counts, default=-1) + 1)]


def lines(told: Mapping[str, Any]) -> list[str]:
    """Return a document as text for people."""
    drained = told["drained_seconds"]
    out = [
        f"seed {told['seed']}, PostgreSQL {told['server']}, pgqueue {told['pgqueue']}: {told['injections']} faults "
        f"in {told['minutes']:g} minutes, {told['while_busy']} of them while jobs of 0.1 to 5 s ran",
        f"{told['accepted']:,} jobs accepted, {told['jobs']:,} there: "
        + ", ".join(f"{number:,} {status}" for status, number in sorted(told["statuses"].items())),
        f"{told['starts']:,} starts; {told['leases_lost']:,} leases lost; {told['started_again']:,} jobs started again",
        "nothing was left alive "
        + (f"{drained:g} s after the last fault" if drained is not None else "— no: jobs are stuck"),
        "",
        f"{'fault':24}{'times':>6}{'busy':>6}{'met':>5}   {'nothing began for':>19}   {'nothing accepted for':>21}",
    ]
    for kind in told["kinds"]:
        work, doors = kind["work_gap"], kind["door_gap"]
        out.append(
            f"{kind['kind']:24}{kind['times']:6}{kind['while_busy']:6}{kind['met_another']:5}   "
            f"{work['median']:7.2f} … {work['worst']:7.2f} s   {doors['median']:9.2f} … {doors['worst']:7.2f} s"
        )
    computed = told["availability"]
    out += [
        "",
        "availability, from median gaps and the rates in gaps.PER_YEAR: "
        f"{computed['work']:.4%} of work, {computed['doors']:.4%} of enqueueing; "
        f"from the worst gaps {computed['work_by_worst_gaps']:.4%}; wanted {computed['wanted']:.2%}",
        *(f"left out: {why}" for why in told["left_out"]),
        *(f"trouble: {trouble}" for trouble in told["troubles"]),
    ]
    if told["violations"]:
        out += ["", "BROKEN PROMISES: " + ", ".join(f"{rule} {n}" for rule, n in told["violations"].items())]
        out += [f"  {one['rule']}: {one['what']}" for one in told["told"]]
    else:
        out += ["no contradiction between ledger and tables: nothing lost, nothing doubled, nothing stuck"]
    return out
