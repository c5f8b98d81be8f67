"""Jobs of one ordering key run one at a time, in the order in which they were enqueued."""

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.conftest import Connect
from tests.sql.verbs import WORKER, Row, Verbs, refused


def line(q: Verbs, jobs: int, key: str = "o", **columns: Any) -> list[uuid.UUID]:
    return [q.insert(ordering_key=key, payload={"n": n}, **columns) for n in range(jobs)]


def statuses(q: Verbs, ids: list[uuid.UUID]) -> list[str]:
    return [q.job(i).status for i in ids]


def test_only_the_head_is_pending(q: Verbs) -> None:
    ids = line(q, 3)
    assert statuses(q, ids) == ["pending", "submitted", "submitted"]
    assert [job.job_id for job in q.claim(9)] == [ids[0]]
    assert q.claim(9) == []


def test_a_statement_of_many_has_one_head_for_each_key(q: Verbs) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, ordering_key, payload)"
        " select 't', 'key ' || n % 7, jsonb_build_object('n', n) from generate_series(1, 70) n"
    )
    seen: dict[str, list[int]] = {}
    for _ in range(10):
        jobs = q.claim(70)
        assert len({job.ordering_key for job in jobs}) == len(jobs) == 7
        for job in jobs:
            seen.setdefault(job.ordering_key, []).append(job.payload["n"])
        assert len(q.complete(jobs)) == 7
    assert all(numbers == sorted(numbers) and len(numbers) == 10 for numbers in seen.values())


def test_whatever_their_priority(q: Verbs) -> None:
    ids = [q.insert(ordering_key="o", priority=priority) for priority in (3, 0, 1, 2)]
    ran = []
    for _ in ids:
        jobs = q.claim(9)
        ran += [job.job_id for job in jobs]
        q.complete(jobs)
    assert ran == ids


def test_keys_of_different_queues_are_different(q: Verbs) -> None:
    ids = [q.insert(ordering_key="o", queue=queue) for queue in ("a", "b")]
    assert statuses(q, ids) == ["pending", "pending"]


def ended(q: Verbs, job: Row, how: str) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "completed": lambda: q.complete([job]),
        "dead_letter": lambda: q.fail(job, retryable=False),
        "cancelled by its task": lambda: q.cancel_attempt(job),
        "cancelled on request": lambda: (q.cancel(job.job_id), q.complete([job])),
        "lost": lambda: (q.session.execute("update pgqueue.jobs_live set lost = 5"), q.advance(hours=1), q.sweep()),
    }
    ways[how]()


@pytest.mark.parametrize("how", ["completed", "dead_letter", "cancelled by its task", "cancelled on request", "lost"])
def test_whatever_settles_the_head_makes_the_next_one_pending(q: Verbs, how: str) -> None:
    q.freeze()
    ids = line(q, 3)
    (head,) = q.claim(1)
    ended(q, head, how)
    assert statuses(q, ids[1:]) == ["pending", "submitted"]
    assert [job.job_id for job in q.claim(9)] == [ids[1]]


def test_a_pending_head_that_is_cancelled_or_expires_makes_way(q: Verbs) -> None:
    now = q.freeze()
    ids = [q.insert(ordering_key="o", expires_at=now + timedelta(hours=1)), *line(q, 2)]
    q.advance(hours=2)
    assert q.sweep()["expired"] == 1
    assert statuses(q, ids) == ["dead_letter", "pending", "submitted"]
    assert q.cancel(ids[1]) == "cancelled"
    assert statuses(q, ids) == ["dead_letter", "cancelled", "pending"]


def test_a_delayed_head_holds_its_key(q: Verbs) -> None:
    now = q.freeze()
    ids = [q.insert(ordering_key="o", scheduled_at=now + timedelta(minutes=5)), *line(q, 1)]
    assert q.claim(9) == []
    assert statuses(q, ids) == ["submitted", "submitted"]
    q.advance(minutes=5)
    q.sweep()
    assert [job.job_id for job in q.claim(9)] == [ids[0]]


def test_a_delayed_job_behind_the_head_waits_for_its_time_when_its_turn_comes(q: Verbs) -> None:
    now = q.freeze()
    first = q.insert(ordering_key="o")
    second = q.insert(ordering_key="o", scheduled_at=now + timedelta(minutes=5))
    third = q.insert(ordering_key="o")
    q.complete(q.claim(9))
    assert [q.job(second).status, q.job(second).due_at] == ["submitted", now + timedelta(minutes=5)]
    assert q.claim(9) == []
    q.advance(minutes=5)
    q.sweep()
    (job,) = q.claim(9)
    assert job.job_id == second
    q.complete([job])
    assert [job.job_id for job in q.claim(9)] == [third]
    assert q.job(first).status == "completed"


def test_a_delayed_job_whose_time_passed_while_it_waited_is_pending_at_once(q: Verbs) -> None:
    now = q.freeze()
    q.insert(ordering_key="o")
    second = q.insert(ordering_key="o", scheduled_at=now + timedelta(minutes=5))
    (head,) = q.claim(9)
    q.advance(minutes=6)
    q.complete([head])
    assert q.job(second).status == "pending"


def test_a_failed_head_holds_its_key_until_it_has_ended(q: Verbs) -> None:
    q.freeze()
    ids = line(q, 2)
    for _ in range(3):
        (head,) = q.claim(9)
        assert q.fail(head) == "failed"
        assert q.claim(9) == []
        q.advance(minutes=1)
        q.sweep()
    (head,) = q.claim(9)
    assert head.job_id == ids[0]
    assert q.fail(head) == "dead_letter"
    assert [job.job_id for job in q.claim(9)] == [ids[1]]


@pytest.mark.parametrize("way", ["snoozed", "released", "lost"])
def test_a_head_that_comes_back_stays_head(q: Verbs, way: str) -> None:
    q.freeze()
    ids = line(q, 2)
    (head,) = q.claim(9)
    if way == "snoozed":
        q.snooze(head, timedelta(minutes=1))
        assert q.claim(9) == []
    elif way == "released":
        q.release([head])
    q.advance(minutes=2)
    q.sweep()
    assert [job.job_id for job in q.claim(9)] == [ids[0]]


def test_a_waiting_job_can_be_cancelled_without_touching_the_head(q: Verbs) -> None:
    ids = line(q, 3)
    assert q.cancel(ids[1]) == "cancelled"
    assert statuses(q, ids) == ["pending", "cancelled", "submitted"]
    q.complete(q.claim(9))
    assert [job.job_id for job in q.claim(9)] == [ids[2]]


def test_a_retried_dead_letter_joins_the_end_of_its_line(q: Verbs) -> None:
    ids = line(q, 3)
    (head,) = q.claim(9)
    q.fail(head, retryable=False)
    retried = q.retry(ids[0])
    assert (retried.status, retried.due_at) == ("submitted", None)
    ran = []
    while jobs := q.claim(9):
        ran += [job.job_id for job in jobs]
        q.complete(jobs)
    assert ran == [ids[1], ids[2], ids[0]]


def test_a_retried_dead_letter_without_others_is_pending(q: Verbs) -> None:
    (job_id,) = line(q, 1)
    (head,) = q.claim(9)
    q.fail(head, retryable=False)
    assert q.retry(job_id).status == "pending"
    assert [job.job_id for job in q.claim(9)] == [job_id]


def test_many_retried_dead_letters_run_one_at_a_time(q: Verbs) -> None:
    ids = line(q, 4)
    for _ in ids:
        q.fail(q.claim(9)[0], retryable=False)
    assert q.call_value("retry_dead_letters") == 4
    ran = []
    while jobs := q.claim(9):
        assert len(jobs) == 1
        ran += [job.job_id for job in jobs]
        q.complete(jobs)
    assert sorted(ran) == sorted(ids)


def test_a_failed_head_can_be_retried_now(q: Verbs) -> None:
    ids = line(q, 2)
    q.fail(q.claim(9)[0])
    assert q.retry(ids[0]).status == "pending"
    assert [job.job_id for job in q.claim(9)] == [ids[0]]


def test_why_says_what_a_waiting_job_waits_for(q: Verbs) -> None:
    ids = line(q, 2, key="account 7")
    assert q.why(ids[1]) == 'It waits for the job before it with ordering_key "account 7".'


def test_keys_with_any_characters_are_settled(q: Verbs) -> None:
    for key in ("a\x01b", "\x01", "'; drop", "\N{ROCKET}", " ", "%s", "a\nb"):
        ids = line(q, 2, key=key, queue="q\x01r")
        q.complete(q.claim(9, queues=["q\x01r"]))
        (job,) = q.claim(9, queues=["q\x01r"])
        assert job.job_id == ids[1]
        q.complete([job])


def test_many_heads_complete_in_one_batch(q: Verbs) -> None:
    for key in "abcde":
        line(q, 3, key=key)
    for expected in (5, 5, 5, 0):
        jobs = q.claim(99)
        assert len(jobs) == len(q.complete(jobs)) == expected


def test_a_head_cannot_be_doubled_by_hand(q: Verbs) -> None:
    ids = line(q, 2)
    for change in ("status = 'pending'", "due_at = now()", "due_at = now() + interval '1 hour'"):
        with refused("23505", "ordering_key must have only one job that does not wait"):
            q.session.execute(f"update pgqueue.jobs set {change} where job_id = %s", [ids[1]])
    with refused("23505", "ordering_key must have only one job that does not wait"):
        q.session.execute("update pgqueue.jobs set due_at = now() where status = 'submitted'")
    assert statuses(q, ids) == ["pending", "submitted"]


def test_jobs_moved_to_another_queue_or_key_by_hand_strand_nobody(q: Verbs) -> None:
    ids = line(q, 3)
    q.session.execute("update pgqueue.jobs set queue = 'b' where job_id = %s", [ids[0]])
    q.session.execute("update pgqueue.jobs set queue = 'c' where job_id = %s", [ids[1]])
    q.sweep()
    assert statuses(q, ids) == ["pending"] * 3
    ids = line(q, 2, key="x")
    q.session.execute("update pgqueue.jobs set ordering_key = 'y' where job_id = %s", [ids[0]])
    q.sweep()
    assert statuses(q, ids) == ["pending"] * 2


def test_a_delayed_head_made_to_wait_by_hand_is_found_again(q: Verbs) -> None:
    q.freeze()
    row = q.enqueue(ordering_key="o", delay=timedelta(hours=1))
    q.session.execute("update pgqueue.jobs set due_at = null, scheduled_at = null")
    q.sweep()
    assert q.job(row.job_id).status == "pending"


def test_the_sweep_gives_a_key_without_head_one(q: Verbs) -> None:
    """What is left when the one who settled the head could not see the next job yet."""
    ids = line(q, 2)
    q.session.execute("delete from pgqueue.jobs_live where job_id = %s", [ids[0]])
    assert q.claim(9) == []
    q.sweep()
    assert [job.job_id for job in q.claim(9)] == [ids[1]]


def test_notes_of_keys_with_a_head_do_not_pile_up(q: Verbs) -> None:
    line(q, 20)
    q.sweep()
    assert q.value("select count(*) from pgqueue.sweep_notes") == 0


def test_an_enqueue_answers_what_its_place_made_of_it(q: Verbs) -> None:
    rows = [q.enqueue(ordering_key="o") for _ in range(2)]
    assert [row.status for row in rows] == ["pending", "submitted"]
    many = q.enqueue_many(*[{"job_type": "t", "ordering_key": key} for key in ("o", "p", "p")])
    assert [row.status for row in many] == statuses(q, [row.job_id for row in many])
    assert [row.status for row in many] == ["submitted", "pending", "submitted"]


def test_order_among_jobs_with_and_without_keys_is_by_enqueue(q: Verbs) -> None:
    rows = q.enqueue_many(
        *[{"job_type": "t", "payload": {"n": n}} | ({"ordering_key": f"k{n}"} if n % 2 else {}) for n in range(10)]
    )
    assert [job.payload["n"] for job in q.claim(10)] == list(range(10))
    assert [row.seq for row in rows] == sorted(row.seq for row in rows)


def test_a_key_in_a_repeatable_read_transaction_is_settled_by_the_sweep(q: Verbs) -> None:
    q.insert(ordering_key="o")
    with q.session.transaction():
        q.session.execute("set transaction isolation level repeatable read")
        late = q.insert(ordering_key="p")
    assert q.job(late).status == "submitted"
    q.sweep()
    assert {job.ordering_key for job in q.call("claim", WORKER, ["default"], 9)} == {"o", "p"}


def test_an_open_transaction_with_a_key_holds_up_no_other_producer(q: Verbs, connect: Connect) -> None:
    first = connect(autocommit=False)
    first.execute("insert into pgqueue.jobs (job_type, ordering_key) values ('t', 'a')")
    q.session.execute("set lock_timeout = '2s'")
    other, same = q.insert(ordering_key="b"), q.insert(ordering_key="a")
    assert statuses(q, [other, same]) == ["pending", "submitted"]
    first.rollback()
    q.sweep()
    assert statuses(q, [other, same]) == ["pending", "pending"]


def test_a_job_that_comes_while_the_head_is_being_settled_is_not_stranded(q: Verbs, connect: Connect) -> None:
    q.insert(ordering_key="o")
    (head,) = q.claim()
    settler = Verbs(connect(autocommit=False))
    settler.complete([head])
    late = q.insert(ordering_key="o")
    q.sweep()
    settler.session.commit()
    assert q.job(late).status == "submitted"
    q.sweep()
    assert q.job(late).status == "pending"


def test_a_head_settled_under_an_old_snapshot_makes_way_all_the_same(q: Verbs, connect: Connect) -> None:
    q.insert(ordering_key="o")
    (head,) = q.claim()
    settler = Verbs(connect(autocommit=False))
    settler.session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
    settler.snapshot()
    late = q.insert(ordering_key="o")
    q.sweep()
    settler.complete([head])
    settler.session.commit()
    q.sweep()
    assert q.job(late).status == "pending"


def test_the_next_is_not_passed_over_because_somebody_holds_it(q: Verbs, connect: Connect) -> None:
    ids = line(q, 3)
    holder = connect(autocommit=False)
    holder.execute("update pgqueue.jobs set priority = 1 where job_id = %s", [ids[1]])
    q.complete(q.claim())
    assert statuses(q, ids[1:]) == ["submitted", "submitted"]
    holder.rollback()
    q.sweep()
    assert statuses(q, ids[1:]) == ["pending", "submitted"]


@pytest.mark.parametrize("head", ["pending", "processing", "scheduled"])
def test_a_key_whose_head_was_deleted_by_hand_goes_on(q: Verbs, head: str) -> None:
    q.freeze()
    q.sweep()
    delay = timedelta(days=1) if head == "scheduled" else None
    first = q.enqueue(ordering_key="o", delay=delay).job_id
    second, third = line(q, 2)
    if head == "processing":
        q.claim()
    assert "waits for the job before it" in q.why(second)
    q.session.execute("delete from pgqueue.jobs where job_id = %s", [first])
    assert "a sweep lets the next job go" in q.why(second)
    q.advance(minutes=11)
    for _ in range(2):
        q.sweep()
    assert statuses(q, [second, third]) == ["pending", "submitted"]
    assert "waits for the job before it" in q.why(third)


def test_keys_without_a_head_are_found_however_many_there_are(q: Verbs) -> None:
    q.freeze()
    for queue in ("a", "b"):
        for part in ("head", "next"):
            q.session.execute(
                "insert into pgqueue.jobs (job_type, queue, ordering_key)"
                " select %s, %s, n from generate_series(1, 40) n",
                [part, queue],
            )
    q.sweep("keys")
    assert q.rows("select * from pgqueue.sweep_notes where ordering_key is not null") == []
    q.session.execute("delete from pgqueue.jobs where job_type = 'head' and queue = 'b'")
    assert [q.call_value("note_headless_keys", 30) for _ in range(5)] == [0, 20, 20, 0, 20]
    q.sweep("keys")
    became = q.rows("select queue, status, count(*) from pgqueue.jobs where job_type = 'next' group by 1, 2 order by 1")
    assert became == [("a", "submitted", 40), ("b", "pending", 40)]
