"""Idempotency keys, and the limits of a queue."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.conftest import Connect
from tests.meet import aside
from tests.sql.plans import touched
from tests.sql.verbs import Verbs, kill_by_failing, refused

V7 = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_a_known_key_answers_the_job_it_stands_for(q: Verbs) -> None:
    first = q.enqueue(idempotency_key="k", payload={"n": 1})
    again = q.enqueue("other", idempotency_key="k", payload={"n": 2}, queue="elsewhere")
    assert again.duplicate is True
    assert again[:-1] == first[:-1] == q.job(first.job_id)
    assert q.value("select count(*) from pgqueue.jobs") == 1


def test_a_known_key_fails_a_plain_insert_like_any_unique_column(q: Verbs) -> None:
    q.insert(idempotency_key="k")
    with refused("23505", '"k"', constraint="idempotency_key is taken", column="idempotency_key"):
        q.insert(idempotency_key="k")
    assert q.value("select count(*) from pgqueue.jobs") == 1


def test_keys_are_those_of_a_producer(q: Verbs) -> None:
    ids = {q.insert(idempotency_key="k", producer_id=producer) for producer in ("a", "b", None)}
    assert len(ids) == 3
    for producer in ("a", "b", None):
        assert q.enqueue(idempotency_key="k", producer_id=producer).duplicate
        with refused("23505"):
            q.insert(idempotency_key="k", producer_id=producer)


def test_keys_differ_in_every_character(q: Verbs) -> None:
    keys = ["k", "K", " k", "k ", "\N{ROCKET}", "k\u200b", "0", "00"]
    assert len({q.enqueue(idempotency_key=key).job_id for key in keys}) == len(keys)


@pytest.mark.parametrize("outcome", ["processing", "completed", "dead_letter", "cancelled", "failed"])
def test_a_key_stands_for_its_job_whatever_became_of_it(q: Verbs, outcome: str) -> None:
    q.freeze()
    job = q.start(idempotency_key="k")
    finish: dict[str, Callable[[], Any]] = {
        "processing": lambda: None, "completed": lambda: q.complete([job], ["r"]),
        "dead_letter": lambda: q.fail(job, retryable=False), "cancelled": lambda: q.cancel_attempt(job),
        "failed": lambda: q.fail(job),
    }  # fmt: skip
    finish[outcome]()
    q.advance(hours=23.9)
    again = q.enqueue(idempotency_key="k")
    assert (again.duplicate, again.job_id, again.status) == (True, job.job_id, outcome)
    assert again[:-1] == q.job(job.job_id)
    q.advance(hours=0.2)
    fresh = q.enqueue(idempotency_key="k")
    assert not fresh.duplicate
    assert fresh.job_id != job.job_id
    assert q.job(job.job_id).status == outcome


def test_an_expired_key_is_taken_over_by_every_door(q: Verbs) -> None:
    q.freeze()
    ids = {q.insert(idempotency_key="k")}
    doors: list[Callable[[], Any]] = [
        lambda: q.insert(idempotency_key="k"),
        lambda: q.enqueue_many({"job_type": "t", "idempotency_key": "k"})[0].job_id,
        lambda: q.enqueue(idempotency_key="k").job_id,
    ]
    for door in doors:
        q.advance(hours=24, seconds=1)
        job_id = door()
        assert job_id not in ids
        ids.add(job_id)
        assert q.enqueue(idempotency_key="k").job_id == job_id
    assert q.value("select count(*) from pgqueue.idempotency_keys") == 1


def test_the_window_is_the_queues(q: Verbs) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, idempotency_ms) values ('default', 60000), ('off', 0)")
    for door in (
        lambda: q.insert(idempotency_key="a"),
        lambda: q.enqueue(idempotency_key="b"),
        lambda: q.enqueue(idempotency_key="c", queue=None),
        lambda: q.enqueue_many({"job_type": "t", "idempotency_key": "d"}),
    ):
        door()
    windows = q.rows("select idempotency_key, expires_at - pgqueue.clock() as window from pgqueue.idempotency_keys")
    assert {row.idempotency_key: row.window for row in windows} == dict.fromkeys("abcd", timedelta(minutes=1))
    assert q.enqueue(queue="off", idempotency_key="e").job_id != q.enqueue(queue="off", idempotency_key="e").job_id


def test_one_key_twice_in_a_statement(q: Verbs) -> None:
    with refused("23505", '"k"', constraint="idempotency_key is taken"):
        q.session.execute("insert into pgqueue.jobs (job_type, idempotency_key) values ('t', 'k'), ('t', 'k')")
    with refused("23505", '"k"', constraint="idempotency_key is taken"):
        q.session.execute(
            "insert into pgqueue.jobs (job_type, queue, idempotency_key) values ('t', 'a', 'k'), ('t', 'b', 'k')"
        )
    with refused("23505", '"k"'):
        q.session.execute(
            "insert into pgqueue.jobs (job_type, producer_id, idempotency_key) values ('t', 'p', 'k'), ('t', 'p', 'k')"
        )
    assert q.snapshot() == []


def test_one_key_twice_in_enqueue_many_is_one_job(q: Verbs) -> None:
    rows = q.enqueue_many(
        {"job_type": "t", "idempotency_key": "k", "payload": {"n": 1}},
        {"job_type": "t", "idempotency_key": "other"},
        {"job_type": "t", "idempotency_key": "k", "payload": {"n": 2}},
        {"job_type": "t", "idempotency_key": "k", "producer_id": "p"},
    )
    assert [row.duplicate for row in rows] == [False, False, True, False]
    assert rows[2][:-1] == rows[0][:-1]
    assert rows[2].payload == {"n": 1}
    assert q.value("select count(*) from pgqueue.jobs") == 3


def test_an_enqueue_sent_again_with_its_job_id_is_a_duplicate(q: Verbs) -> None:
    """What a client does whose connection broke before the answer came."""
    first = q.enqueue(idempotency_key="k", job_id=V7, payload={"n": 1})
    again = q.enqueue(idempotency_key="k", job_id=V7, payload={"n": 1})
    assert (first.duplicate, again.duplicate, again.job_id, again.status) == (False, True, V7, "pending")
    (many,) = q.enqueue_many({"job_type": "t", "idempotency_key": "k", "job_id": str(V7)})
    assert (many.duplicate, many.job_id) == (True, V7)


def test_a_key_whose_job_was_discarded_still_stands(q: Verbs) -> None:
    dead = kill_by_failing(q, q.insert(idempotency_key="k", producer_id="p"))
    q.call("discard", dead.job_id)
    again = q.enqueue(idempotency_key="k", producer_id="p")
    assert (again.duplicate, again.job_id, again.status) == (True, dead.job_id, None)


# Limits


def limited(q: Verbs, limit: int, queue: str = "default") -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit) values (%s, %s)", [queue, limit])


@pytest.mark.parametrize("door", ["insert", "enqueue", "enqueue_many", "ordered", "copy"])
def test_a_full_queue_refuses_and_takes_again_after_drain(q: Verbs, door: str) -> None:
    limited(q, 5)

    def one() -> None:
        match door:
            case "insert":
                q.insert()
            case "enqueue":
                q.enqueue()
            case "enqueue_many":
                q.enqueue_many({"job_type": "t"})
            case "ordered":
                q.insert(ordering_key=str(uuid.uuid4()))
            case _:
                with q.session.cursor().copy("copy pgqueue.jobs (job_type) from stdin") as copy:
                    copy.write_row(["t"])

    for _ in range(5):
        one()
    q.sweep()
    for _ in range(2):
        with refused("PQ503", '"default"', "5"):
            one()
    assert len(q.snapshot()) == 5
    q.complete(q.claim(1))
    one()
    with refused("PQ503"):
        one()
    q.complete(q.claim(5))
    one()


def test_a_batch_is_taken_whole_or_refused_whole(q: Verbs) -> None:
    limited(q, 100)
    q.fill(60)
    with refused("PQ503"):
        q.fill(41)
    assert q.value("select count(*) from pgqueue.jobs") == 60
    q.fill(40)
    with refused("PQ503"):
        q.enqueue_many({"job_type": "t"})


def test_a_limit_counts_pending_jobs_of_its_queue_only(q: Verbs) -> None:
    limited(q, 3)
    q.fill(3)
    q.fill(50, queue="other")
    assert q.enqueue(delay=timedelta(hours=1)).status == "submitted"
    with refused("PQ503"):
        q.insert()
    q.claim(3)
    q.fill(3)


def test_a_limit_holds_after_many_jobs_have_passed(q: Verbs) -> None:
    """What the sweep counted is a bound for a while only."""
    limited(q, 200)
    for _ in range(10):
        q.fill(150)
        q.sweep()
        q.complete(q.claim(150))
    q.sweep()
    q.fill(200)
    q.sweep()
    with refused("PQ503"):
        q.insert()
    q.session.execute("update pgqueue.queues set hard_limit = 201")
    q.insert()
    with refused("PQ503"):
        q.insert()


def test_a_limit_of_nought_closes_the_queue(q: Verbs) -> None:
    limited(q, 0)
    with refused("PQ503"):
        q.insert()
    assert q.insert(queue="other")


def test_a_duplicate_is_answered_though_the_queue_is_full(q: Verbs) -> None:
    limited(q, 1)
    first = q.enqueue(idempotency_key="k")
    q.sweep()
    assert q.enqueue(idempotency_key="k").job_id == first.job_id


def test_batches_that_come_at_once_do_not_overshoot_together(q: Verbs, connect: Connect) -> None:
    limited(q, 100)
    q.insert()
    q.complete(q.claim())
    q.sweep()
    sessions = [Verbs(connect()) for _ in range(20)]
    outcomes = [aside(session.fill, 50) for session in sessions]
    errors = [outcome.exception(timeout=60) for outcome in outcomes]
    assert q.value("select count(*) from pgqueue.jobs where status = 'pending'") == 100
    refusals = [error.diag.sqlstate for error in errors if isinstance(error, psycopg.Error)]
    assert refusals == ["PQ503"] * 18


@pytest.mark.parametrize("producer", ["p 7", None])
def test_a_known_key_is_found_among_many(q: Verbs, producer: str | None) -> None:
    q.session.execute(
        """insert into pgqueue.idempotency_keys (producer_id, idempotency_key, job_id, expires_at)
           select nullif('p ' || n % 5000, 'p 0'), 'k ' || n, pgqueue.new_job_id(), now() + interval '1 day'
             from generate_series(1, 50000) n"""
    )
    job = q.enqueue(producer_id=producer, idempotency_key="k")
    found = touched(
        q.session,
        "select * from pgqueue.enqueue('t', producer_id => %s, idempotency_key => 'k')",
        [producer],
    )
    # A walk through all of the index is 350 blocks more.
    assert found.buffers < 300, found.scans
    assert q.enqueue(producer_id=producer, idempotency_key="k").job_id == job.job_id
