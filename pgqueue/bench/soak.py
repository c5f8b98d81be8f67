"""`pgqueue bench soak`: whether an hour of work leaves the queue as fast and as small as it was.

Workers and an API run on a scratch database as they would for a user. A feeder keeps some thousand jobs waiting, so
that the workers are never idle; jobs are kept for a minute after their end, so that history is pruned all along. Every
few seconds the jobs that ended, the sizes of tables and indexes, and the memory of workers and API are read.
"""

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pgqueue.bench import children, statements
from pgqueue.bench.scratch import Database, Scratch
from pgqueue.client import Client
from pgqueue.connections import SyncConnection
from pgqueue.errors import PgqueueError

Tell = Callable[[str], None]
_BATCH: Final = 500
_WAITING: Final = 3000
#: The part of a run that is its beginning and its end; of an hour ten minutes.
_PART: Final = 1 / 6
#: By then caches, plans and partitions are there, and the first history has been pruned.
_WARM_PART: Final = 1 / 12
THROUGHPUT_KEPT: Final = 0.95
SIZE_GROWN: Final = 1.5
MEMORY_GROWN: Final = 1.15
_MEMORY_SLACK: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """One look: `seconds` since the start, jobs ended so far, bytes of tables with indexes, and of each process."""

    seconds: float
    ended: int
    live_bytes: int
    all_bytes: int
    worker_bytes: int
    api_bytes: int


class _Feeder:
    """Keeps jobs waiting."""

    def __init__(self, database: Database) -> None:
        self.enqueued = 0
        self._database = database
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-feeder", daemon=True)
        self.fault: Exception | None = None
        self._thread.start()

    def _run(self) -> None:
        batch = [{"job_type": "answer", "payload": {"n": n}} for n in range(_BATCH)]
        try:
            with Client(self._database.dsn) as client, self._database.connection() as connection:
                while not self._over.is_set():
                    if statements.scalar(connection, statements.WAITING, most=_WAITING) < _WAITING:
                        client.enqueue_many_sync(batch)
                        self.enqueued += _BATCH
                    else:
                        time.sleep(0.01)
        except PgqueueError as exc:
            self.fault = exc

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def _resident(pid: int) -> int:
    """Return the memory that a process holds, in bytes; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * 4096


def soak(scratch: Scratch, minutes: float, workers: int, tell: Tell) -> dict[str, Any]:
    """Work for so long and return the readings and what they say, as data."""
    readings: list[Reading] = []
    every = max(min(10.0, minutes), 1.0)
    with scratch.copy() as database, children.workers(database, workers) as pids, children.api(database) as (api, _):
        with database.connection() as connection:
            statements.run(connection, statements.SHORT_HISTORY)
            feeder = _Feeder(database)
            try:
                began = told = time.monotonic()
                while (seconds := time.monotonic() - began) < minutes * 60 and feeder.fault is None:
                    time.sleep(every)
                    readings.append(_look(connection, feeder.enqueued, began, pids, api))
                    if time.monotonic() - told > 60:
                        told = time.monotonic()
                        tell(f"{seconds / 60:5.1f} min  {readings[-1].ended:,} jobs have ended")
            finally:
                feeder.close()
        if feeder.fault is not None:
            raise feeder.fault
    return {"minutes": minutes, "workers": workers, "readings": [asdict(one) for one in readings], **found(readings)}


def _look(connection: SyncConnection, enqueued: int, began: float, pids: Sequence[int], api: int) -> Reading:
    live, live_bytes, all_bytes = statements.rows(connection, statements.SOAK)[0]
    return Reading(
        seconds=time.monotonic() - began,
        ended=max(enqueued - int(live), 0),
        live_bytes=int(live_bytes),
        all_bytes=int(all_bytes),
        worker_bytes=sum(map(_resident, pids)),
        api_bytes=_resident(api),
    )


def found(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return rates, growth, and whether each is within its bound."""
    if len(readings) < 12:
        return {"faults": [f"{len(readings)} readings are too few"]}
    part = max(int(len(readings) * _PART), 2)
    warm = max(int(len(readings) * _WARM_PART), 1)
    first, last = readings[: part + 1], readings[-part - 1 :]
    warmed = readings[warm : warm + part]
    rates = [(span[-1].ended - span[0].ended) / (span[-1].seconds - span[0].seconds) for span in (first, last)]
    kept = rates[1] / rates[0]

    def grown(name: str) -> float:
        before = max(getattr(one, name) for one in warmed)
        after = statistics.median(getattr(one, name) for one in last)
        return float(after / max(before, 1))

    figures = {
        "first_per_second": round(rates[0], 1),
        "last_per_second": round(rates[1], 1),
        "throughput_kept": round(kept, 3),
        "live_size_grown": round(grown("live_bytes"), 3),
        "all_size_grown": round(grown("all_bytes"), 3),
        "worker_memory_grown": round(grown("worker_bytes"), 3),
        "api_memory_grown": round(grown("api_bytes"), 3),
    }
    faults = []
    if kept < THROUGHPUT_KEPT:
        faults.append(f"throughput fell to {kept:.3f} of that of the beginning")
    for name in ("live_size_grown", "all_size_grown"):
        if figures[name] > SIZE_GROWN:
            faults.append(f"{name} is {figures[name]}")
    for name, of in (("worker_memory_grown", "worker_bytes"), ("api_memory_grown", "api_bytes")):
        more = statistics.median(getattr(one, of) for one in last) - max(getattr(one, of) for one in warmed)
        if figures[name] > MEMORY_GROWN and more > _MEMORY_SLACK:
            faults.append(f"{name} is {figures[name]}")
    return {"figures": figures, "faults": faults}


def lines(told: Mapping[str, Any]) -> list[str]:
    """Return the findings as text for people."""
    if "figures" not in told:
        return list(told["faults"])
    figures = told["figures"]
    return [
        f"{told['readings'][-1]['ended']:,} jobs in {told['minutes']:g} minutes, {told['workers']} worker processes",
        f"jobs per second: {figures['first_per_second']:,} at first, {figures['last_per_second']:,} at last "
        f"({figures['throughput_kept']:.2f}; wanted {THROUGHPUT_KEPT})",
        f"size, last to warmed up: live jobs {figures['live_size_grown']:.2f}, all tables "
        f"{figures['all_size_grown']:.2f} (at most {SIZE_GROWN})",
        f"memory, last to warmed up: workers {figures['worker_memory_grown']:.2f}, API "
        f"{figures['api_memory_grown']:.2f} (at most {MEMORY_GROWN})",
        *(f"failed: {fault}" for fault in told["faults"]),
    ]


_WIDTH: Final = 860
_HEIGHT: Final = 110
_PANELS: Final = (
    ("jobs per second", "rate", 1.0),
    ("live jobs, MB", "live_bytes", 1 << 20),
    ("all tables, MB", "all_bytes", 1 << 20),
    ("workers' memory, MB", "worker_bytes", 1 << 20),
    ("API's memory, MB", "api_bytes", 1 << 20),
)


def svg(told: Mapping[str, Any]) -> str:
    """Return the course of everything that was read, as an SVG page."""
    readings = told["readings"]
    rows = [
        {**after, "rate": (after["ended"] - before["ended"]) / max(after["seconds"] - before["seconds"], 0.001)}
        for before, after in pairwise(readings)
    ]
    height = 50 + len(_PANELS) * (_HEIGHT + 24)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="26" font-size="15">pgqueue bench soak: {told["minutes"]:g} minutes</text>',
    ]
    for n, (title, name, unit) in enumerate(_PANELS):
        top = 50 + n * (_HEIGHT + 24)
        values = [row[name] / unit for row in rows]
        most = max(values, default=1.0) or 1.0
        step = (_WIDTH - 240) / max(len(values) - 1, 1)
        points = " ".join(f"{150 + i * step:.1f},{top + _HEIGHT * (1 - v / most):.1f}" for i, v in enumerate(values))
        parts += [
            f'<text x="142" y="{top + 12}" text-anchor="end">{title}</text>',
            f'<text x="{_WIDTH - 84}" y="{top + 12}">{most:,.0f}</text>',
            f'<polyline points="{points}" fill="none" stroke="#2f6fab"/>',
            f'<line x1="150" y1="{top + _HEIGHT}" x2="{_WIDTH - 90}" y2="{top + _HEIGHT}" stroke="#999999"/>',
        ]
    return "\n".join([*parts, "</svg>", ""])
