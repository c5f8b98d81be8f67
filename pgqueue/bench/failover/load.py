"""What runs against the servers: producers that remember what was accepted, workers, and the comparison of both."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import psycopg

from pgqueue import schema
from pgqueue.bench import statements as bench_statements
from pgqueue.bench.children import BenchError
from pgqueue.bench.failover import statements
from pgqueue.bench.failover.pair import wait_for
from pgqueue.client import Client
from pgqueue.errors import DatabaseUnavailable
from pgqueue.settings import Settings

APP: Final = "pgqueue.bench.tasks:app"
#: A node that hangs says nothing: whoever waits for it gives it up by these.
STATEMENT_LIMIT: Final = 3.0
CONNECT_TIMEOUT: Final = 2.0
_PAUSE: Final = 0.02


class Producers:
    """Threads that enqueue one job after the other until told to stop, and remember each that was accepted."""

    def __init__(self, dsn: str, count: int = 4) -> None:
        """Begin."""
        self.accepted: list[tuple[float, str, int]] = []
        self.refused = 0
        self._client = Client(
            settings=Settings(
                dsn=dsn, pool_size=count, statement_limit=STATEMENT_LIMIT, connect_timeout=CONNECT_TIMEOUT
            )
        )
        self._stop = threading.Event()
        self._next = iter(range(1 << 62))
        self._threads = [threading.Thread(target=self._produce, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _produce(self) -> None:
        while not self._stop.wait(_PAUSE):
            number = next(self._next)
            try:
                job = self._client.enqueue_sync("answer", {"n": number})
            except DatabaseUnavailable:
                # Whether it was stored is not known: it may be there, it need not.
                self.refused += 1
            else:
                self.accepted.append((time.time(), str(job.job_id), number))

    def first_after(self, moment: float, seconds: float = 60.0) -> float:
        """When the first job after a moment was accepted; waits for it."""
        wait_for(lambda: self.accepted and self.accepted[-1][0] > moment, "a job was accepted", seconds)
        return min(at for at, _, _ in self.accepted[-1000:] if at > moment)

    def stop(self) -> None:
        """Enqueue no more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        self._client.close()


def prepare(dsn: str) -> None:
    """Make the schema, and take the limits off the queue."""
    schema.migrate(dsn)
    with psycopg.connect(dsn, autocommit=True) as session:
        session.execute(bench_statements.WITHOUT_LIMITS)


@contextmanager
def workers(dsn: str, count: int = 2) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run worker processes for as long as the block lasts; one that ends by itself is an error."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PGQUEUE_")},
        "PGQUEUE_STATEMENT_LIMIT": f"{STATEMENT_LIMIT:g}",
        "PGQUEUE_CONNECT_TIMEOUT": f"{CONNECT_TIMEOUT:g}",
        "PGQUEUE_DSN": dsn,
        "PGQUEUE_LOG_LEVEL": "warning",
        "PGQUEUE_GRACE": "5",
    }
    with tempfile.TemporaryFile() as log:
        running = [
            subprocess.Popen(
                [sys.executable, "-m", "pgqueue", "worker", APP],
                env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )
            for _ in range(count)
        ]  # fmt: skip
        try:
            wait_for(lambda: _scalar(dsn, statements.WORKERS) >= count, "the workers registered")
            yield running
            if any(process.poll() is not None for process in running):
                log.seek(0)
                raise BenchError(f"a worker ended: {log.read()[-2000:].decode()}")
        finally:
            for process in running:
                process.terminate()
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                process.kill()
                process.wait()


def first_completed(dsn: str, moment: float) -> float:
    """When the first job after a moment was completed; waits for it."""
    found: list[float] = []

    def look() -> bool:
        at = _scalar(dsn, statements.COMPLETED_SINCE, since=moment)
        found.extend([] if at is None else [at])
        return bool(found)

    wait_for(look, "a job was completed")
    return found[0]


def drained(dsn: str) -> None:
    """Wait until every job has ended."""
    wait_for(lambda: _scalar(dsn, statements.UNFINISHED) == 0, "all jobs had ended", 120)


def verdict(dsn: str, producers: Producers) -> dict[str, int]:
    """Compare what was accepted with what is there: how many jobs are lost, did not end well, or answered wrongly."""
    with psycopg.connect(dsn, connect_timeout=5) as session:
        fates = {row[0]: row[1:] for row in session.execute(statements.FATES)}
    accepted = {job_id: number for _, job_id, number in producers.accepted}
    found = {job_id: fates[job_id] for job_id in accepted if job_id in fates}
    return {
        "accepted": len(accepted),
        "refused": producers.refused,
        "lost": len(accepted) - len(found),
        "not completed": sum(fate[0] != "completed" for fate in found.values()),
        "wrong": sum(fate[1:] != (accepted[job_id],) * 2 for job_id, fate in found.items()),
    }


def _scalar(dsn: str, statement: Any, **parameters: object) -> Any:
    with psycopg.connect(dsn, autocommit=True, connect_timeout=2, options="-c statement_timeout=10s") as session:
        row = session.execute(statement, parameters or None).fetchone()
        return None if row is None else row[0]
