"""A producer process of a chaos run: `python -m pgqueue.bench.chaos.produce JSON`, started by `rig`.

It enqueues its jobs at a steady pace through one door and writes down what it tried and what it was told. What has an
idempotency key is sent again until there is an answer; what has none is left as it is when no answer comes.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import psycopg

from pgqueue import http
from pgqueue.bench.chaos import statements
from pgqueue.bench.chaos.ledger import Ledger
from pgqueue.client import Client
from pgqueue.errors import InvalidJob, PgqueueError, QueueFull, RateLimitedError
from pgqueue.settings import Settings

QUEUES: Final = ("default", "other")
_KEYS: Final = 8
_LARGEST: Final = 40
_AGAIN_AFTER: Final = 0.2


@dataclass(frozen=True, slots=True)
class Wanted:
    """A job to be enqueued."""

    n: int
    job_type: str
    seconds: float = 0.0
    times: int = 0
    max_retries: int = 3
    ordering_key: str | None = None
    queue: str = QUEUES[0]
    priority: int = 2

    def told(self) -> list[Any]:
        """Return it as the ledger has it."""
        return [self.n, self.job_type, self.max_retries, self.ordering_key, self.queue]

    def keyed(self) -> dict[str, Any]:
        """Return it as clients take it, with an idempotency key."""
        return {
            "job_type": self.job_type,
            "payload": {"n": self.n, "seconds": self.seconds, "times": self.times},
            "max_retries": self.max_retries,
            "ordering_key": self.ordering_key,
            "queue": self.queue,
            "priority": self.priority,
            "idempotency_key": f"chaos-{self.n}",
        }


class Unsure(Exception):
    """No answer came."""


class Refused(Exception):
    """The queue said no."""


Send = Callable[[list[Wanted]], list[tuple[int, str]]]


def mixture(seed: int, number: int, jobs: int) -> Iterator[Wanted]:
    """Give a producer's jobs: most are quick, a tenth takes 0.1 to 5 seconds, some fail, wait in line or snooze."""
    chance = random.Random(f"{seed} producer {number}")
    for i in range(jobs):
        n = number * 10**9 + i
        queue = QUEUES[chance.random() < 0.2]
        priority = chance.choice((0, 1, 2, 2, 2, 3))
        draw = chance.random()
        if draw < 0.80:
            yield Wanted(n, "quick", times=int(chance.random() < 0.04), queue=queue, priority=priority)
        elif draw < 0.90:
            yield Wanted(n, "slow", seconds=0.1 * 50 ** chance.random(), queue=queue, priority=priority)
        elif draw < 0.91:
            yield Wanted(n, "thread", seconds=chance.uniform(0.1, 0.5), queue=queue, priority=priority)
        elif draw < 0.95:
            key = f"key {number} {chance.randrange(_KEYS)}"
            yield Wanted(n, "ordered", chance.uniform(0, 0.02), int(chance.random() < 0.05), ordering_key=key)
        elif draw < 0.96:
            yield Wanted(n, "doomed", max_retries=1, queue=queue, priority=priority)
        elif draw < 0.98:
            yield Wanted(n, "snoozes", queue=queue, priority=priority)
        else:
            yield Wanted(n, "effect", seconds=chance.uniform(0, 0.3), max_retries=1000, queue=queue, priority=priority)


def by_sql(dsn: str) -> Send:
    """INSERT rows into the table, as a program without pgqueue does. Nothing tells such rows from those sent before."""
    opened: list[psycopg.Connection[Any]] = []

    def send(batch: list[Wanted]) -> list[tuple[int, str]]:
        try:
            if not opened or opened[0].closed:
                opened[:] = [psycopg.connect(dsn, autocommit=True, connect_timeout=5)]
        except psycopg.Error as exc:
            raise Refused(str(exc)) from exc
        columns = {name: [getattr(job, name) for job in batch] for name in Wanted.__slots__}
        try:
            rows = opened[0].execute(statements.INSERT, columns).fetchall()
        except psycopg.Error as exc:
            state = exc.sqlstate or "08"
            if opened[0].closed or state[:2] in ("08", "57"):
                opened[0].close()
                # A statement that was cancelled ended without effect; a session that was may have committed.
                if state != "57014":
                    raise Unsure(str(exc)) from exc
            raise Refused(str(exc)) from exc
        return [(n, str(job_id)) for n, job_id in rows]

    return send


def _by_client(enqueue_many: Callable[[list[dict[str, Any]]], Any]) -> Send:
    def send(batch: list[Wanted]) -> list[tuple[int, str]]:
        try:
            answers = enqueue_many([job.keyed() for job in batch])
        except InvalidJob:
            raise
        except (QueueFull, RateLimitedError) as exc:
            raise Refused(str(exc)) from exc
        except (PgqueueError, OSError) as exc:
            raise Unsure(f"{type(exc).__name__}: {exc}") from exc
        return [(job.n, str(answer.job_id)) for job, answer in zip(batch, answers, strict=True)]

    return send


def by_python(dsn: str) -> Send:
    """Enqueue by the client."""
    return _by_client(Client(dsn, settings=Settings(dsn=dsn)).enqueue_many_sync)


def by_rest(url: str) -> Send:
    """Enqueue by the REST API."""
    return _by_client(http.Client(url, timeout=10.0).enqueue_many_sync)


DOORS: Final[dict[str, Callable[[str], Send]]] = {"sql": by_sql, "python": by_python, "rest": by_rest}


def produce(ledger: Ledger, send: Send, jobs: Iterator[Wanted], rate: float, seed: int, *, keyed: bool) -> None:
    """Enqueue all jobs, so many a second, in batches of chance sizes."""
    chance = random.Random(f"{seed} batches")
    began, sent = time.monotonic(), 0
    while batch := list(islice(jobs, chance.randint(1, _LARGEST))):
        # Late after a fault, it hurries: four times as fast until it has caught up.
        time.sleep(max(began + sent / rate - time.monotonic(), len(batch) / rate / 4))
        sent += len(batch)
        while True:
            ledger.write("tried", [job.told() for job in batch])
            numbers = [job.n for job in batch]
            try:
                accepted = send(batch)
            except Refused as exc:
                ledger.write("refused", numbers, str(exc)[:200])
            except Unsure as exc:
                ledger.write("unsure", numbers, str(exc)[:200])
                if not keyed:
                    break
            else:
                ledger.write("accepted", accepted)
                break
            time.sleep(_AGAIN_AFTER)


def main() -> None:
    """Do what the argument says."""
    told = json.loads(sys.argv[1])
    ledger = Ledger(Path(told["ledger"]), f"producer-{told['door']}")
    produce(
        ledger,
        DOORS[told["door"]](told["at"]),
        mixture(told["seed"], told["number"], told["jobs"]),
        told["rate"],
        told["seed"],
        keyed=told["door"] != "sql",
    )


if __name__ == "__main__":
    main()
