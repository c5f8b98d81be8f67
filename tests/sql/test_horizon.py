"""An old horizon, which keeps every dead row and index entry, slows nothing down; nor does what must be passed over.

Measured in blocks that calls touch, which are the same on every machine; PGQUEUE_TEST_FULL=1 adds full size and time.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean, median
from typing import Any

import pytest

from tests.conftest import Connect
from tests.sql.verbs import WORKER, Verbs

FULL = os.environ.get("PGQUEUE_TEST_FULL") == "1"


class Blocks:
    """Blocks of the queue's tables and indexes that a session touches, by what it does."""

    def __init__(self, q: Verbs) -> None:
        self.q = q
        self.of: dict[str, list[int]] = {}

    def _so_far(self) -> int:
        return int(
            self.q.value(
                """select sum(pg_stat_get_xact_blocks_fetched(c.oid)) from pg_class c
                    where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'i')"""
            )
        )

    def count(self, what: str, act: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Does it and notes what it touched."""
        with self.q.session.transaction():
            before = self._so_far()
            done = act(*args, **kwargs)
            self.of.setdefault(what, []).append(self._so_far() - before)
        return done

    def hold(self, part: float = 0.25, **growth: float) -> None:
        """Fails if the mean of the last part has grown by more than so much over that of the first."""
        for what, most in growth.items():
            counts = self.of[what]
            size = int(len(counts) * part)
            # The very first calls fill caches.
            grown = mean(counts[-size:]) / mean(counts[size // 20 + 1 : size + 1])
            assert grown <= most, f"{what} x {grown:.2f}: {counts[:: len(counts) // 20]}"


@contextmanager
def held(connect: Connect, how: str) -> Iterator[None]:
    """Something that keeps the horizon where it is."""
    session = connect()
    session.execute("create table elsewhere (n int)")
    if how == "snapshot":
        session.execute("begin isolation level repeatable read")
        session.execute("select 1")
    else:
        session.execute("begin")
        session.execute(
            "insert into pgqueue.jobs (job_type, queue) values ('t', 'elsewhere')"
            if "enqueue" in how
            else "insert into elsewhere values (1)"
        )
    gid = session.info.dbname
    if "prepared" in how:
        session.execute(f"prepare transaction '{gid}'")
    try:
        yield
    finally:
        session.execute(f"rollback prepared '{gid}'" if "prepared" in how else "rollback")


@pytest.fixture(params=["snapshot", "idle writer", "prepared writer", "idle enqueue", "prepared enqueue"])
def horizon(request: pytest.FixtureRequest, connect: Connect, q: Verbs) -> Iterator[str]:
    q.session.execute("alter table pgqueue.jobs_live set (autovacuum_enabled = off)")
    with held(connect, request.param):
        yield request.param


@pytest.mark.parametrize("queues", [("default",), None], ids=["one queue", "any queue"])
def test_a_drain_in_batches(horizon: str, q: Verbs, queues: tuple[str, ...] | None) -> None:
    jobs, batch, a_sweep = 20_000, 100, 1000
    q.freeze()
    q.sweep()
    q.fill(jobs)
    blocks = Blocks(q)
    for done in range(0, jobs, batch):
        taken = blocks.count("claim", q.claim, batch, queues=queues)
        assert len(taken) == batch
        blocks.count("complete", q.complete, taken)
        if done % a_sweep == 0:
            q.advance(seconds=10)
            blocks.count("sweep", q.sweep)
    blocks.hold(claim=1.1, complete=1.1)
    blocks.hold(0.3, sweep=1.5)


def test_retries_and_delays(horizon: str, q: Verbs) -> None:
    """Of which the due and lease indexes know."""
    q.freeze()
    blocks = Blocks(q)
    for _ in range(60):
        blocks.count("insert", q.fill, 40, scheduled_at=q.advance(seconds=1).replace(year=2000).isoformat())
        taken = blocks.count("claim", q.claim, 40)
        assert len(taken) == 40
        for job in taken[:20]:
            q.rows("select pgqueue.fail(%s, %s, %s, '{}', true, '1 s')", [WORKER, job.job_id, job.attempts])
        blocks.count("release", q.release, taken[20:30], started=True)
        blocks.count("complete", q.complete, taken[30:])
        q.advance(seconds=10)
        blocks.count("sweep", q.sweep)
        again = q.claim(100)
        assert len(again) == 30
        q.complete(again)
    blocks.hold(0.3, insert=1.2, claim=1.5, release=1.3, complete=1.2, sweep=1.5)


@pytest.mark.parametrize("horizon", ["snapshot"], indirect=True)
def test_ordered_jobs(horizon: str, q: Verbs) -> None:
    """Two of each key. What a key has seen before is what its next jobs pay for, since a unique index is asked."""
    q.freeze()
    blocks = Blocks(q)
    for n in range(200):
        for _ in range(2):
            for key in (2 * n, 2 * n + 1):
                blocks.count("insert", q.insert, ordering_key=f"k{key}")
        for _ in range(2):
            taken = blocks.count("claim", q.claim, 10, queues=None)
            assert len(taken) == 2
            blocks.count("complete", q.complete, taken)
        q.advance(seconds=1)
        blocks.count("sweep", q.sweep)
    blocks.hold(insert=1.6, claim=1.8, complete=1.5, sweep=2)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("horizon", ["snapshot"], indirect=True)
def test_one_job_at_a_time(horizon: str, q: Verbs) -> None:
    """On an empty queue, with a worker that asks for a bell before each."""
    jobs = 20_000 if FULL else 2500
    q.freeze()
    q.call("worker_started", WORKER, "w", "h", 1, None, ["default"], ["t"], None, 1, "0")
    blocks = Blocks(q)
    for n in range(jobs):
        q.call("wait_for_work", WORKER, ["default"], ["t"], "pgqueue_wake_test")
        blocks.count("insert", q.insert)
        (job,) = blocks.count("claim", q.claim)
        blocks.count("complete", q.complete, [job])
        if n % 50 == 49:
            q.advance(seconds=5)
            q.call("worker_seen", WORKER, "idle", n, 0)
            blocks.count("sweep", q.sweep)
    # A sweep looks through the leases of the last minute, of which there are more once the run has lasted for one.
    blocks.hold(insert=1.4, claim=1.8, complete=1.2, sweep=3 if FULL else 2)


@pytest.mark.skipif(not FULL, reason="takes minutes; PGQUEUE_TEST_FULL=1 runs it")
@pytest.mark.timeout(1800)
def test_the_time_of_a_long_drain(horizon: str, q: Verbs) -> None:
    """The last 50,000 of 300,000 jobs are drained at 0.9 or more of the rate of the first 50,000.

    By the medians of a hundred claims each: a checkpoint or a sweep beside some of them says nothing of the queue.
    """
    q.rows("insert into pgqueue.queues (name, soft_limit, hard_limit) values ('default', 10000000, 10000000)")
    q.fill(300_000)
    q.sweep()
    q.sweep()
    swept = {None: time.monotonic(), "cursors": time.monotonic()}
    seconds = []
    for _ in range(600):
        began = time.monotonic()
        taken = q.claim(500)
        assert len(q.complete(taken)) == 500
        seconds.append(time.monotonic() - began)
        # As a worker's sweeper does while cursors rise fast.
        for step, every in ((None, 1.0), ("cursors", 0.2)):
            if time.monotonic() - swept[step] > every:
                q.call("sweep", step)
                swept[step] = time.monotonic()
    first, last = (500 / median(part) for part in (seconds[:100], seconds[-100:]))
    assert last >= 0.9 * first, f"{first:.0f}/s, at the end {last:.0f}/s"


@pytest.mark.parametrize("ahead", ["another type", "a paused type", "another shard"])
def test_jobs_that_must_be_passed_over(q: Verbs, ahead: str) -> None:
    """A claim costs the same with a hundred of them or with 50,000, whatever the planner takes them for."""
    blocks = Blocks(q)
    q.rows("insert into pgqueue.queues (name, soft_limit, hard_limit) values ('default', 10000000, 10000000)")

    def put(jobs: int, job_type: str, shard: str) -> None:
        q.session.execute(
            "insert into pgqueue.jobs (job_id, job_type)"
            " select overlay(pgqueue.new_job_id()::text placing %s from 35)::uuid, %s from generate_series(1, %s)",
            [shard, job_type, jobs],
        )

    def claim() -> Any:
        if ahead == "another shard":
            return q.claim(5, shards=[63])
        return q.claim(5, job_types=["mine"] if ahead == "another type" else None)

    def measure(what: str, wall: int) -> None:
        put(wall, "theirs", "00")
        # Statistics that know of nothing else.
        q.session.execute("analyze pgqueue.jobs_live")
        put(20, "mine", "3f")
        for _ in range(3):
            q.sweep("cursors")
        for _ in range(4):
            taken = blocks.count(what, claim)
            assert [job.job_type for job in taken] == ["mine"] * 5
            q.complete(taken)

    if ahead == "a paused type":
        q.call("pause_job_type", "theirs", "2999-01-01")
    elif ahead == "another shard":
        q.call("index_shards")
    measure("few", 100)
    measure("many", 1_000_000 if FULL else 50_000)
    assert mean(blocks.of["many"][1:]) < 1.5 * mean(blocks.of["few"][1:]), blocks.of
