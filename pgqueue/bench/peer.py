"""pgqueue as a peer of bench-peers: `python -m pgqueue.bench.peer meta|setup|submit|bulk|produce|work …`.

The protocol is that project's: `meta` prints a line of JSON; `submit N BASE`, `bulk N` and `produce N BASE RATE` print
READY, wait for a line, and print a line of JSON; `work` runs until SIGTERM. BENCH_DSN names the database and BENCH_OUT
the folder of records, each a little-endian int64 and float64: a job's number and a Unix time.
"""

import json
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pgqueue import __version__
from pgqueue.app import App
from pgqueue.bench import statements
from pgqueue.connections import connect
from pgqueue.log import configure
from pgqueue.settings import Settings

_BATCH: Final = 5000
_COUNTS: Final = "select (select count(*) from pgqueue.jobs_live), (select count(*) from pgqueue.jobs_completed)"
_record: Final = struct.Struct("<qd").pack

settings: Final = Settings.load(dsn=os.environ.get("BENCH_DSN"), log_level="warning")
app: Final = App(settings=settings)


class Records:
    """A file of records of one kind, of this process."""

    def __init__(self, kind: str) -> None:
        """Open nothing yet."""
        self._kind = kind
        self._file: int | None = None

    def add(self, number: int) -> None:
        """Record that it is this job's turn now."""
        if self._file is None:
            path = os.path.join(os.environ.get("BENCH_OUT", "."), f"{self._kind}-{os.getpid()}.bin")
            self._file = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(self._file, _record(number, time.time()))


_handled: Final = Records("handled")


@app.task("noop")
async def noop(n: int) -> None:
    """Record that it ran."""
    _handled.add(n)


def _say(**told: object) -> None:
    print(json.dumps(told), flush=True)


def _begin() -> float:
    print("READY", flush=True)
    if not sys.stdin.readline():
        sys.exit(3)
    return time.perf_counter()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def meta() -> None:
    """Say what this is."""
    _say(
        kind="pg",
        versions={"pgqueue": __version__} | {name: _version(name) for name in ("psycopg", "uvloop")},
        settings=f"App.run_worker() with its defaults, results and history kept; submit: App.enqueue_sync; bulk: "
        f"App.enqueue_many_sync, {_BATCH} a call; limits of the queue raised",
        counts=_COUNTS,
    )


def setup() -> None:
    """Give an empty database the schema."""
    # Loads Alembic and SQLAlchemy, which no worker of a user does.
    from pgqueue import schema

    schema.migrate(app.dsn)
    with connect(app.dsn, settings) as connection:
        statements.run(connection, statements.PARTITIONS)
        statements.run(connection, statements.WITHOUT_LIMITS)


def _connected() -> None:
    app.jobs_sync(limit=1)


def submit(jobs: int, base: int) -> None:
    """Enqueue one job a call."""
    from pgqueue.bench.figures import percentile

    _connected()
    began = _begin()
    latencies = []
    for number in range(base, base + jobs):
        at = time.perf_counter()
        app.enqueue_sync("noop", {"n": number})
        latencies.append((time.perf_counter() - at) * 1000)
    seconds = time.perf_counter() - began
    _say(n=jobs, secs=seconds, p50_ms=percentile(latencies, 0.5), p99_ms=percentile(latencies, 0.99))


def bulk(jobs: int) -> None:
    """Enqueue many jobs a call."""
    _connected()
    began = _begin()
    for first in range(0, jobs, _BATCH):
        numbers = range(first, min(first + _BATCH, jobs))
        app.enqueue_many_sync([{"job_type": "noop", "payload": {"n": number}} for number in numbers])
    _say(n=jobs, secs=time.perf_counter() - began)


def produce(jobs: int, base: int, rate: float) -> None:
    """Enqueue at a steady rate and record when each call returned."""
    _connected()
    produced = Records("produced")
    began = _begin()
    for step in range(jobs):
        time.sleep(max(0.0, began + step / rate - time.perf_counter()))
        app.enqueue_sync("noop", {"n": base + step})
        produced.add(base + step)
    _say(n=jobs, secs=time.perf_counter() - began)


def work() -> None:
    """Run a worker until SIGTERM."""
    configure(settings.log_level, settings.log_format)
    print("READY", flush=True)
    sys.exit(app.run_worker())


def main(arguments: Sequence[str]) -> None:
    """Do what the command line says."""
    command, *numbers = arguments
    commands: dict[str, Callable[..., None]] = {
        role.__name__: role for role in (meta, setup, submit, bulk, produce, work)
    }
    kinds: tuple[Callable[[str], Any], ...] = (int, int, float)
    commands[command](*(kind(number) for kind, number in zip(kinds, numbers, strict=False)))


if __name__ == "__main__":
    main(sys.argv[1:])
