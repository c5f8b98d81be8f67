"""What tests of counting, alerts and scaling do: counts, workers that say they live, time that passes."""

import uuid
from typing import Any

from psycopg.types.json import Jsonb

from pgqueue.counts import LIMITS
from tests.sql.verbs import WORKER, Verbs

BUCKETS = len(LIMITS) + 1


def count(q: Verbs, *rows: dict[str, Any]) -> None:
    """Adds to the counters; a row has queue "default", type "t" and priority 2 unless it says otherwise."""
    full = [{"queue": "default", "job_type": "t", "priority": 2, **row} for row in rows]
    q.session.execute("select pgqueue.add_to_counters(%s)", [Jsonb(full)])


def counter(q: Verbs, column: str, queue: str = "default", job_type: str = "t") -> int:
    value = q.value(
        f"select coalesce(sum({column}), 0)::bigint from pgqueue.counters where queue = %s and job_type = %s",
        [queue, job_type],
    )
    assert isinstance(value, int)
    return value


def in_bucket(index: int, number: int = 1) -> list[int]:
    return [number if at == index else 0 for at in range(BUCKETS)]


def worker(q: Verbs, worker_id: uuid.UUID = WORKER, concurrency: int = 10, queues: list[str] | None = None) -> None:
    q.call("worker_started", worker_id, "w", "host", 1, None, queues, ["t"], None, concurrency, "1")


def tick(q: Verbs, **by: float) -> None:
    """Lets time pass and has the sweep measure, as a worker would."""
    if by:
        q.advance(**by)
    q.sweep("measure")
