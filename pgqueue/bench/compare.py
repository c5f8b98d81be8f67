"""Drives bench-peers, a side-by-side benchmark of job queues, with pgqueue among its peers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from pgqueue.bench import peer
from pgqueue.errors import ConfigError

NAME: Final = "pgqueue"
#: Figures of bench-peers that are compared, by test; for the last two less is better.
_FIGURES: Final[Mapping[str, str]] = {
    "jobs_per_s": "jobs/s",
    "bulk_per_s": "bulk jobs/s",
    "first_per_s": "first part/s",
    "last_per_s": "last part/s",
    "p50_ms": "p50 ms",
    "p99_ms": "p99 ms",
    "server_cpu_us_per_job": "server µs",
    "client_cpu_us_per_job": "client µs",
    "wal_bytes_per_job": "WAL B",
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is run: `home` holds run.py; the server's databases named bench_* are dropped and made by it."""

    home: Path
    server: str
    peers: Sequence[str]
    tests: Sequence[str]
    reps: int
    jobs: int
    python: str = sys.executable


def compare(comparison: Comparison, output: Path, told: Callable[[str], None]) -> dict[str, Any]:
    """Run bench-peers and return its document, which it also writes to `output`. Its own lines are `told`.

    Raises ConfigError when it is not there or ends with an error.
    """
    program = comparison.home / "run.py"
    if not program.is_file():
        raise ConfigError(f"{program} is not there: give the folder of bench-peers")
    adapter = [sys.executable, str(Path(peer.__file__)), {}, comparison.jobs, 10, comparison.jobs]
    environment = {
        **os.environ,
        "BENCH_ADMIN_DSN": comparison.server,
        "BENCH_EXTRA": json.dumps({**json.loads(os.environ.get("BENCH_EXTRA", "{}")), NAME: adapter}),
        # The adapter is run as a file, from wherever that program runs.
        "PYTHONPATH": os.pathsep.join(filter(None, [_root(), os.environ.get("PYTHONPATH", "")])),
    }
    names = [NAME, *(name for name in comparison.peers if name != NAME)]
    arguments = ["--peers", ",".join(names), "--tests", ",".join(comparison.tests), "--reps", str(comparison.reps)]
    with subprocess.Popen(
        [comparison.python, str(program), *arguments, "--json", str(output)],
        env=environment,
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        for line in process.stdout or ():
            told(line.rstrip())
    if process.returncode or not output.is_file():
        raise ConfigError(f"{program} ended with exit code {process.returncode}")
    document: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return document


def _root() -> str:
    return str(Path(peer.__file__).parents[2])


def quotients(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each figure of pgqueue and of every peer as medians, and pgqueue's divided by the peer's.

    Both sides of a quotient come from the same repetitions, and its median is told.
    """
    runs = [run for run in document["runs"] if "error" not in run]
    tests = list(dict.fromkeys(run["test"] for run in runs))
    peers = [name for name in dict.fromkeys(run["peer"] for run in runs) if name != NAME]
    rows = []
    for test in tests:
        for figure in _FIGURES:
            ours = _by_rep(runs, NAME, test, figure)
            for other in peers:
                theirs = _by_rep(runs, other, test, figure)
                pairs = [(ours[rep], theirs[rep]) for rep in ours.keys() & theirs.keys() if theirs[rep]]
                if pairs:
                    rows.append(
                        {
                            "test": test,
                            "figure": figure,
                            "peer": other,
                            NAME: median(own for own, _ in pairs),
                            "theirs": median(their for _, their in pairs),
                            "ratio": median(own / their for own, their in pairs),
                        }
                    )
    return rows


def _by_rep(runs: Sequence[Mapping[str, Any]], name: str, test: str, figure: str) -> dict[int, float]:
    return {
        run["rep"]: run[figure]
        for run in runs
        if run["peer"] == name and run["test"] == test and run.get(figure) is not None
    }


def label(figure: str) -> str:
    """Return the heading of a figure."""
    return _FIGURES[figure]


def faults(document: Mapping[str, Any]) -> list[str]:
    """Return what failed: tests with an error, and jobs run twice or not stored."""
    told = [f"{run['peer']} {run['test']}: {run['error']}" for run in document["runs"] if "error" in run]
    for run in document["runs"]:
        twice = run.get("run_twice") or run.get("dups")
        unstored = run.get("stored") is not None and run["stored"] != run.get("handled")
        if twice or unstored:
            told.append(
                f"{run['peer']} {run['test']}: {run.get('handled')} handled, {run.get('stored')} stored, "
                f"{twice or 0} run twice"
            )
    return told
