"""Ordering keys and idempotency keys when sessions meet: no key loses its head, none has two jobs, nobody deadlocks."""

import threading
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import IsolationLevel

from tests.conftest import Connect
from tests.meet import aside, wait_for_lock
from tests.sql.verbs import Verbs

# Ordering keys


def statuses(q: Verbs) -> list[str]:
    """Of all jobs, in the order in which they came."""
    return [row.status for row in q.rows("select status from pgqueue.jobs order by job_id")]


def sweep_thrice(q: Verbs) -> None:
    for _ in range(3):
        q.sweep()


def test_enqueue_behind_a_head_that_is_being_settled(q: Verbs, connect: Connect) -> None:
    """The settler looked before the job was there; the sweep came by before the settler had ended."""
    head = q.start(ordering_key="k")
    settler = Verbs(connect())
    with settler.session.transaction():
        settler.complete([head])
        q.insert(ordering_key="k")
        sweep_thrice(q)
    sweep_thrice(q)
    assert statuses(q) == ["completed", "pending"]


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_settle_while_the_next_job_is_locked(q: Verbs, connect: Connect, end: str) -> None:
    head = q.start(ordering_key="k")
    second, _third = q.insert(ordering_key="k"), q.insert(ordering_key="k")
    operator = connect()
    with operator.transaction(force_rollback=end == "rollback"):
        operator.execute("update pgqueue.jobs set priority = 0 where job_id = %s", [second])
        q.complete([head])
        sweep_thrice(q)
        assert statuses(q)[1:] == ["submitted", "submitted"], "the third overtakes the second"
    sweep_thrice(q)
    assert statuses(q) == ["completed", "pending", "submitted"]


def test_settle_in_a_snapshot_that_does_not_show_the_next_job(q: Verbs, connect: Connect) -> None:
    head = q.start(ordering_key="k")
    settler = connect()
    settler.isolation_level = IsolationLevel.REPEATABLE_READ
    with settler.transaction():
        settler.execute("select 1")
        q.insert(ordering_key="k")
        sweep_thrice(q)
        Verbs(settler).complete([head])
    sweep_thrice(q)
    assert statuses(q) == ["completed", "pending"]


def test_enqueue_in_a_snapshot_that_shows_a_head_already_gone(q: Verbs, connect: Connect) -> None:
    head = q.start(ordering_key="k")
    producer = Verbs(connect())
    producer.session.isolation_level = IsolationLevel.REPEATABLE_READ
    with producer.session.transaction():
        producer.rows("select 1")
        q.complete([head])
        producer.insert(ordering_key="k")
        sweep_thrice(q)
    sweep_thrice(q)
    assert statuses(q) == ["completed", "pending"]


def test_cancel_of_a_waiting_job_does_not_race_for_the_head(q: Verbs, connect: Connect) -> None:
    """Between a head's end and the sweep that follows a note, a key has waiting jobs and no head."""
    head = q.start(ordering_key="k")
    settler, producer, operator = Verbs(connect()), connect(), Verbs(connect())
    with settler.session.transaction():
        settler.complete([head])
        waiting = [q.insert(ordering_key="k") for _ in range(3)]
    with producer.transaction():
        Verbs(producer).insert(ordering_key="k")
        cancelled = aside(operator.cancel, waiting[2])
        assert cancelled.result(10) == "cancelled"
    sweep_thrice(q)
    assert statuses(q) == ["completed", "pending", "submitted", "cancelled", "submitted"]


@pytest.mark.parametrize("status", ["pending", "processing", "failed"])
@pytest.mark.parametrize("change", ["queue = 'elsewhere'", "ordering_key = 'other'", "ordering_key = null"])
def test_a_head_moved_by_hand_frees_its_key(q: Verbs, status: str, change: str) -> None:
    head = q.insert(ordering_key="k")
    if status != "pending":
        (job,) = q.claim()
        if status == "failed":
            q.fail(job)
    q.insert(ordering_key="k")
    q.sweep()
    assert statuses(q) == [status, "submitted"]
    q.rows(f"update pgqueue.jobs set {change} where job_id = %s", [head])
    sweep_thrice(q)
    assert statuses(q) == [status, "pending"]


def test_a_waiting_job_whose_key_is_taken_away_becomes_due(q: Verbs) -> None:
    q.insert(ordering_key="k")
    waiting = q.insert(ordering_key="k")
    q.sweep()
    q.rows("update pgqueue.jobs set ordering_key = 'other' where job_id = %s", [waiting])
    sweep_thrice(q)
    assert statuses(q) == ["pending", "pending"]


def test_two_producers_of_many_keys_and_priorities_in_opposite_order(connect: Connect, q: Verbs) -> None:
    """A head costs no lock that another key's producer wants."""
    one, two = Verbs(connect()), Verbs(connect())
    with one.session.transaction(), two.session.transaction():
        one.insert(ordering_key="a", priority=0)
        two.insert(ordering_key="b", priority=2)
        one.insert(ordering_key="c", priority=2)
        assert aside(two.insert, ordering_key="d", priority=0).result(10)
    sweep_thrice(q)
    assert statuses(q) == ["pending"] * 4


def test_an_open_producer_of_one_key_holds_up_no_sweep(connect: Connect, q: Verbs) -> None:
    q.freeze()
    job = q.start()
    q.advance(minutes=2)
    producer = Verbs(connect())
    with producer.session.transaction():
        producer.insert(ordering_key="k")
        done = aside(q.sweep)
        assert done.result(10)["leases"] == 1
    assert q.job(job.job_id).status == "pending"


def test_keys_under_load(connect: Connect, q: Verbs) -> None:
    """Producers, workers and sweeps on a few keys: every job runs, a key's jobs one at a time and in order."""
    keys, producers, each = 3, 4, 40
    started: dict[str, list[int]] = defaultdict(list)
    running: set[str] = set()
    lock = threading.Lock()
    over = threading.Event()

    def produce(number: int) -> None:
        session = Verbs(connect())
        for n in range(each):
            session.enqueue(queue="k", ordering_key=f"k{(n + number) % keys}", payload={"n": number * each + n})

    def work(_: int) -> int:
        session, worker, done = Verbs(connect()), uuid.uuid4(), 0
        while not over.is_set():
            for job in session.claim(5, worker, ["k"]):
                with lock:
                    assert job.ordering_key not in running, "two of a key at once"
                    running.add(job.ordering_key)
                    started[job.ordering_key].append(job.seq)
                with lock:
                    running.remove(job.ordering_key)
                assert session.complete([job], worker=worker)
                done += 1
        return done

    def sweep() -> None:
        session = Verbs(connect())
        while not over.is_set():
            session.sweep()

    with ThreadPoolExecutor(10) as pool:
        produced = [pool.submit(produce, number) for number in range(producers)]
        workers = [pool.submit(work, number) for number in range(3)]
        sweeper = pool.submit(sweep)
        try:
            for future in produced:
                future.result(60)
            for _ in range(600):
                if not q.value("select count(*) from pgqueue.jobs_live") or over.wait(0.05):
                    break
                assert not sweeper.done(), sweeper.result()
                assert not any(worker.done() for worker in workers), [worker.result() for worker in workers]
        finally:
            over.set()
        sweeper.result(10)
        assert sum(future.result(10) for future in workers) == producers * each
    assert all(seqs == sorted(seqs) for seqs in started.values())


# Idempotency keys


@pytest.mark.parametrize("door", ["enqueue", "enqueue_many", "insert"])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_two_transactions_with_one_key(q: Verbs, connect: Connect, door: str, end: str) -> None:
    def put(session: Verbs) -> Any:
        if door == "insert":
            try:
                return session.insert(idempotency_key="k"), False
            except psycopg.errors.UniqueViolation:
                return None
        if door == "enqueue":
            job = session.enqueue(idempotency_key="k")
        else:
            (job,) = session.enqueue_many({"job_type": "t", "idempotency_key": "k"})
        return job.job_id, job.duplicate

    first, second = Verbs(connect()), Verbs(connect())
    with first.session.transaction(force_rollback=end == "rollback"):
        first_id, duplicate = put(first)
        assert not duplicate
        answer = aside(put, second)
        assert wait_for_lock(q.session, second.session.info.backend_pid) == [first.session.info.backend_pid]
    if end == "commit":
        assert answer.result(10) == (None if door == "insert" else (first_id, True))
    else:
        second_id, duplicate = answer.result(10)
        assert not duplicate
        assert second_id != first_id
    assert q.value("select count(*) from pgqueue.jobs") == 1
    assert q.value("select count(*) from pgqueue.idempotency_keys") == 1


@pytest.mark.parametrize("doors", [("insert", "insert"), ("enqueue_many", "enqueue_many"), ("insert", "enqueue_many")])
def test_the_same_keys_in_opposite_order(q: Verbs, connect: Connect, doors: tuple[str, str]) -> None:
    """Also in queues whose names sort the other way round than the keys."""
    sessions = [Verbs(connect()) for _ in range(2)]
    barrier = threading.Barrier(2)

    def put(number: int, round_number: int) -> str:
        session = sessions[number]
        jobs = [
            {"job_type": "t", "queue": f"q{(n + 3) % 7}", "idempotency_key": f"{round_number}-{n}"} for n in range(40)
        ]
        if number:
            jobs.reverse()
        barrier.wait(10)
        if doors[number] == "enqueue_many":
            return "duplicate" if session.enqueue_many(*jobs)[0].duplicate else "new"
        try:
            session.rows(
                "insert into pgqueue.jobs (job_type, queue, idempotency_key)"
                " select 't', * from unnest(%s::text[], %s::text[])",
                [[job["queue"] for job in jobs], [job["idempotency_key"] for job in jobs]],
            )
        except psycopg.errors.UniqueViolation:
            return "duplicate"
        return "new"

    with ThreadPoolExecutor(2) as pool:
        for round_number in range(30):
            answers = pool.map(put, range(2), [round_number] * 2)
            assert sorted(answers) == ["duplicate", "new"]
    assert q.value("select count(*) from pgqueue.jobs") == 30 * 40


def test_fifty_at_once_with_one_key(q: Verbs, connect: Connect) -> None:
    sessions = [Verbs(connect()) for _ in range(50)]
    barrier = threading.Barrier(50)

    def put(session: Verbs) -> Any:
        barrier.wait(30)
        return session.enqueue(idempotency_key="k", payload={"n": 1})

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(put, sessions))
    assert len({answer.job_id for answer in answers}) == 1
    assert sorted(answer.duplicate for answer in answers) == [False] + [True] * 49
    assert all(answer.status == "pending" for answer in answers)
    assert q.value("select count(*) from pgqueue.jobs") == 1


def test_ten_waiters_after_a_rollback(q: Verbs, connect: Connect) -> None:
    first, waiters = Verbs(connect()), [Verbs(connect()) for _ in range(10)]
    with first.session.transaction(force_rollback=True):
        lost = first.enqueue(idempotency_key="k")
        answers = [aside(waiter.enqueue, idempotency_key="k") for waiter in waiters]
        for waiter in waiters:
            wait_for_lock(q.session, waiter.session.info.backend_pid)
    got = [answer.result(10) for answer in answers]
    assert len({job.job_id for job in got}) == 1
    assert lost.job_id != got[0].job_id
    assert sorted(job.duplicate for job in got) == [False] + [True] * 9


def test_keys_and_the_hard_limit_are_asked_for_in_one_order(q: Verbs, connect: Connect) -> None:
    """A producer near the limit that waits for a key holds nothing that the key's owner wants."""
    q.rows("insert into pgqueue.queues (name, hard_limit) values ('default', 100)")
    q.fill(30)
    owner, rival = Verbs(connect()), Verbs(connect())
    with owner.session.transaction():
        owner.enqueue(idempotency_key="k")
        answer = aside(rival.enqueue, idempotency_key="k")
        wait_for_lock(q.session, rival.session.info.backend_pid)
        assert aside(owner.insert).result(10)
    assert answer.result(10).duplicate
