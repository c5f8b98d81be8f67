"""Many sessions at once. PGQUEUE_TEST_FULL=1 runs them at full size."""

import os
import random
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pytest

from tests.conftest import Connect
from tests.meet import aside
from tests.sql.verbs import OTHER, WORKER, Verbs

FULL = os.environ.get("PGQUEUE_TEST_FULL") == "1"


def deadlocks(q: Verbs) -> int:
    """Of the database so far, those that a step of the sweep has swallowed included."""
    q.rows("select pg_stat_force_next_flush()")
    return int(q.value("select deadlocks from pg_stat_database where datname = current_database()"))


def together(seconds: float, *loops: Callable[[threading.Event], Any]) -> list[Any]:
    """Runs loops in threads until the first has ended, or one has failed; what each of them returned."""
    over = threading.Event()
    with ThreadPoolExecutor(len(loops)) as pool:
        futures = [pool.submit(loop, over) for loop in loops]
        wait(futures, seconds, FIRST_COMPLETED)
        over.set()
        return [future.result() for future in futures]


@pytest.mark.timeout(900)
def test_sixteen_claimers_and_everybody_else(q: Verbs, connect: Connect) -> None:
    jobs = 100_000 if FULL else 10_000
    q.session.execute(
        "insert into pgqueue.jobs (job_type, priority) select 't', n %% 4 from generate_series(1, %s) n", [jobs]
    )
    q.session.execute("insert into pgqueue.queues (name, retry_policy) values ('default', '{\"base_delay_ms\": 0}')")
    ids = [row.job_id for row in q.rows("select job_id from pgqueue.jobs")]
    claims: list[list[tuple[uuid.UUID, int]]] = []
    completed = Counter[str]()

    def work(over: threading.Event) -> None:
        session, worker, chance, mine = Verbs(connect()), uuid.uuid4(), random.Random(len(claims)), list[Any]()
        claims.append(mine)
        while not over.is_set():
            taken = session.claim(50, worker)
            mine += [(job.job_id, job.attempts) for job in taken]
            if chance.random() < 0.2:
                assert "lost" not in session.heartbeat(taken, worker).values()
            failing = [job for job in taken if chance.random() < 0.02]
            for job in failing:
                assert session.fail(job, worker=worker) in ("failed", "dead_letter", "cancelled")
            rest = [job for job in taken if job not in failing]
            back = rest[:2] if chance.random() < 0.05 else []
            assert session.release(back, worker, started=True) == {job.job_id for job in back}
            assert session.complete(rest[len(back) :], worker=worker) == {job.job_id for job in rest[len(back) :]}

    def operate(over: threading.Event) -> None:
        session, chance = Verbs(connect()), random.Random(7)
        while not over.is_set():
            some = chance.sample(ids, 20)
            session.call("cancel_many", some[:5])
            session.rows(
                "update pgqueue.jobs set priority = %s where job_id = any (%s) and status = 'pending'",
                [chance.randrange(4), some],
            )
            for job_id in some[5:8]:
                try:
                    session.retry(job_id)
                    completed["retried"] += 1
                except psycopg.errors.Error as error:
                    if error.sqlstate != "PQ409":
                        raise

    def sweep(over: threading.Event) -> None:
        session = Verbs(connect())
        while not over.wait(0.02):
            session.sweep()

    def until_drained(over: threading.Event) -> None:
        session = Verbs(connect())
        while not over.wait(0.1) and session.value("select count(*) from pgqueue.jobs_live"):
            pass

    together(600, until_drained, *[work] * 16, operate, sweep)
    assert deadlocks(q) == 0
    begun = Counter(claim for mine in claims for claim in mine)
    assert max(begun.values()) == 1, "an attempt was claimed twice"
    attempts: dict[uuid.UUID, list[int]] = defaultdict(list)
    for job_id, attempt in begun:
        attempts[job_id].append(attempt)
    ended = q.rows("select job_id, status, attempts from pgqueue.jobs")
    assert len(ended) == jobs
    assert {job.status for job in ended} <= {"completed", "cancelled", "dead_letter"}
    assert all(sorted(attempts[job.job_id]) == list(range(1, job.attempts + 1)) for job in ended)


@pytest.mark.timeout(600)
def test_bulk_verbs_on_the_same_jobs_in_opposite_order(q: Verbs, connect: Connect) -> None:
    jobs, rounds = (1000, 50) if FULL else (200, 15)
    one, two, worker, sweeper = (Verbs(connect()) for _ in range(4))
    for _ in range(rounds):
        q.fill(jobs)
        dying, running = q.claim(jobs // 4), q.claim(jobs // 2)
        for job in dying:
            q.fail(job, retryable=False)
        ids = [row.job_id for row in q.rows("select job_id from pgqueue.jobs_live order by random()")]
        futures: list[Future[Any]] = [
            aside(one.call, "cancel_many", ids),
            aside(two.call, "cancel_many", ids[::-1]),
            aside(worker.complete, running[::-1]),
            aside(sweeper.sweep),
        ]
        for future in futures:
            future.result(60)
        futures = [
            aside(one.call_value, "retry_dead_letters"),
            aside(two.call_value, "retry_dead_letters"),
            aside(worker.claim, 10, OTHER),
            aside(sweeper.sweep),
        ]
        moved, more, claimed, _ = (future.result(60) for future in futures)
        assert moved + more == len(dying)
        q.complete(claimed, worker=OTHER)
        while rest := q.claim(jobs):
            q.complete(rest)
    assert deadlocks(q) == 0
    statuses = dict(q.rows("select status, count(*) from pgqueue.jobs group by status"))
    assert set(statuses) <= {"completed", "cancelled"}
    assert sum(statuses.values()) == jobs * rounds


def test_releases_of_two_priorities_in_opposite_order(q: Verbs, connect: Connect) -> None:
    one, two = Verbs(connect()), Verbs(connect())
    jobs = [q.start(WORKER if n < 2 else OTHER, priority=(0, 2, 2, 0)[n]) for n in range(4)]
    with one.session.transaction(), two.session.transaction():
        one.release(jobs[:1], WORKER)
        two.release(jobs[2:3], OTHER)
        assert aside(one.release, jobs[1:2], WORKER).result(10)
        assert aside(two.release, jobs[3:4], OTHER).result(10)
    assert {job.job_id for job in q.claim(10)} == {job.job_id for job in jobs}


def test_an_open_release_holds_up_no_sweep(q: Verbs, connect: Connect) -> None:
    q.freeze()
    lapsed = [q.start() for _ in range(3)]
    q.advance(minutes=1)
    held = q.start()
    holder = Verbs(connect())
    with holder.session.transaction():
        holder.release([held])
        assert aside(q.sweep).result(10)["leases"] == 3
    assert {job.job_id for job in q.claim(10)} == {held.job_id, *(job.job_id for job in lapsed)}


@pytest.mark.parametrize("batch", [50, 20, 1])
def test_the_hard_limit_under_parallel_producers(q: Verbs, connect: Connect, batch: int) -> None:
    """Twenty sessions go on until they are refused."""
    q.rows("insert into pgqueue.queues (name, hard_limit) values ('default', 100)")
    barrier = threading.Barrier(20)

    def produce(session: Verbs) -> int:
        accepted = 0
        barrier.wait(30)
        while True:
            try:
                session.fill(batch)
            except psycopg.errors.Error as error:
                if error.sqlstate != "PQ503":
                    raise
                return accepted
            accepted += batch

    sessions = [Verbs(connect()) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        accepted = sum(pool.map(produce, sessions))
    assert q.value("select count(*) from pgqueue.jobs") == accepted
    assert 100 <= accepted <= 100 + batch
    with pytest.raises(psycopg.errors.Error, match="full"):
        q.fill(batch)
    while jobs := q.claim(50):
        q.complete(jobs)
    q.fill(batch)
    q.sweep()
    q.fill(batch)


def test_an_open_producer_near_the_hard_limit_does_not_stop_the_others(q: Verbs, connect: Connect) -> None:
    q.rows("insert into pgqueue.queues (name, hard_limit) values ('default', 100)")
    producer = Verbs(connect())
    with producer.session.transaction():
        producer.fill(60)
        aside(q.fill, 30).result(10)
        with pytest.raises(psycopg.errors.Error, match="full"):
            aside(q.fill, 80).result(10)
