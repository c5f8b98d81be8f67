"""How attempts end: complete, fail, snooze, release, cancel_attempt, rate_limit; fences and error records."""

import random
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Row, Verbs, refused

UNKNOWN = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


# Complete


def test_a_completed_job_keeps_everything_and_its_result(q: Verbs) -> None:
    q.freeze()
    job = q.start(payload={"a": 1}, idempotency_key="k", producer_id="p", ordering_key="o", timeout_ms=5)
    q.set_progress(job, {"percent": 50})
    now = q.advance(seconds=3)
    assert q.complete([job], [{"answer": 42}]) == {job.job_id}
    stored = q.job(job.job_id)
    assert stored == job._replace(
        status="completed", in_line=False, lease_expires_at=None, finished_at=now, updated_at=now,
        result={"answer": 42}, progress={"percent": 50},
    )  # fmt: skip


@pytest.mark.parametrize("result", [None, 0, "text", [1, None], {"n": 1970670598291982290}, False, {}])
def test_a_result_is_any_json(q: Verbs, result: Any) -> None:
    job = q.start()
    q.complete([job], [result])
    assert q.job(job.job_id).result == result


def test_a_batch_is_completed_each_with_its_result(q: Verbs) -> None:
    q.fill(500)
    jobs = q.claim(500)
    assert q.complete(jobs, [job.payload["n"] * 2 for job in jobs]) == {job.job_id for job in jobs}
    doubled = "select count(*) from pgqueue.jobs_completed where result = to_jsonb((payload -> 'n')::int * 2)"
    assert q.value(doubled) == 500
    assert q.value("select count(*) from pgqueue.jobs_live") == 0


def test_of_a_batch_only_what_is_still_held_is_accepted(q: Verbs) -> None:
    q.freeze()
    q.fill(4)
    first, second, third, fourth = jobs = q.claim(4)
    q.release([second])
    q.fail(third)
    unknown = first._replace(job_id=UNKNOWN)
    earlier = fourth._replace(attempts=0)
    assert q.complete([unknown, earlier, *jobs[:3]]) == {first.job_id}
    assert [q.job(job.job_id).status for job in jobs] == ["completed", "pending", "failed", "processing"]


def test_results_may_be_left_out(q: Verbs) -> None:
    q.fill(2)
    one, two = q.claim(2)
    assert q.call_value("complete", WORKER, [one.job_id], [1], None) == one.job_id
    assert q.rows("select * from pgqueue.complete(%s, %s, '{1}', '{}')", [WORKER, [two.job_id]]) == [(two.job_id,)]
    assert q.complete([]) == set()


def test_arrays_of_different_length_are_refused(q: Verbs) -> None:
    job = q.start()
    for attempts, results in (([1, 1], None), ([], None), ([1], [Jsonb(1), Jsonb(2)])):
        with refused("PQ422", "same length"):
            q.rows("select * from pgqueue.complete(%s, %s, %s::int[], %s)", [WORKER, [job.job_id], attempts, results])
    assert q.job(job.job_id) == job


def test_a_job_given_twice_is_refused_whole_and_never_stored_twice(q: Verbs) -> None:
    q.fill(2)
    one, two = q.claim(2)
    with refused("PQ422", "twice", column="job_ids"):
        q.complete([one, two, one], [1, 2, 3])
    q.cancel(two.job_id)
    with refused("PQ422", "twice", column="job_ids"):
        q.complete([two, two])
    with refused("PQ422", "twice", column="job_ids"):
        q.call("complete", WORKER, [one.job_id, one.job_id], [one.attempts, one.attempts + 1], None)
    assert [q.job(job.job_id).status for job in (one, two)] == ["processing", "processing"]
    assert q.complete([one, two]) == {one.job_id, two.job_id}
    # Of what is not the worker's nothing is stored, however often it is named.
    assert q.complete([one, one]) == set()


def test_each_job_gets_its_own_result_in_whatever_order_they_come(q: Verbs) -> None:
    q.fill(40)
    jobs = q.claim(40)
    random.Random(3).shuffle(jobs)
    q.cancel(jobs[7].job_id)
    stale = [*jobs[:5], *jobs[6:]]
    assert q.fail(jobs[5], retry_in=timedelta(0)) == "failed"
    given = [(job.job_id, job.attempts + (job is jobs[9]), Jsonb({"seq": job.seq})) for job in jobs]
    accepted = q.call("complete", WORKER, *(list(column) for column in zip(*given, strict=True)))
    assert {row for (row,) in accepted} == {job.job_id for job in stale if job is not jobs[9]}
    for job in stale:
        row = q.job(job.job_id)
        if job is jobs[9]:
            assert (row.status, row.result) == ("processing", None)
        else:
            assert (row.status, row.result) == ("cancelled" if job is jobs[7] else "completed", {"seq": job.seq})


def test_completing_again_changes_nothing(q: Verbs) -> None:
    job = q.start()
    q.complete([job], ["first"])
    before = q.snapshot()
    assert q.complete([job], ["second"]) == set()
    assert q.snapshot() == before


def test_errors_of_earlier_attempts_stay_but_error_is_empty(q: Verbs) -> None:
    q.freeze()
    q.fail(q.start())
    q.advance(minutes=1)
    q.sweep()
    (job,) = q.claim()
    assert job.error == "ValueError: it broke"
    q.complete([job])
    stored = q.job(job.job_id)
    assert (stored.error, [e["attempt"] for e in stored.errors], stored.attempts) == (None, [1], 2)


# Fences

FINISHES: dict[str, Callable[[Verbs, Row, uuid.UUID], Any]] = {
    "complete": lambda q, job, worker: q.complete([job], ["zombie"], worker),
    "fail": lambda q, job, worker: q.fail(job, worker=worker),
    "fail for good": lambda q, job, worker: q.fail(job, retryable=False, worker=worker),
    "snooze": lambda q, job, worker: q.snooze(job, worker=worker),
    "release": lambda q, job, worker: q.release([job], worker),
    "release, started": lambda q, job, worker: q.release([job], worker, started=True),
    "cancel_attempt": lambda q, job, worker: q.cancel_attempt(job, worker),
    "rate_limit": lambda q, job, worker: q.rate_limit(job, timedelta(hours=1), worker),
    "set_progress": lambda q, job, worker: q.set_progress(job, "zombie", worker),
    "heartbeat": lambda q, job, worker: q.heartbeat([job], worker, lease=timedelta(days=1)) == {} or None,
}


@pytest.mark.parametrize("now", ["pending", "processing", "processing by itself", "completed", "dead_letter", "failed"])
def test_a_zombie_gets_nothing_accepted_and_changes_nothing(q: Verbs, subtests: pytest.Subtests, now: str) -> None:
    q.freeze()
    zombie = q.start(ordering_key="o")
    q.advance(hours=1)
    q.sweep()
    if now != "pending":
        (job,) = q.claim(1, WORKER if now == "processing by itself" else OTHER)
        finish: dict[str, Callable[[], Any]] = {
            "completed": lambda: q.complete([job], worker=OTHER), "failed": lambda: q.fail(job, worker=OTHER),
            "dead_letter": lambda: q.fail(job, retryable=False, worker=OTHER),
        }  # fmt: skip
        finish.get(now, lambda: None)()
    assert q.job(zombie.job_id).status == now.split()[0]
    before = q.snapshot()
    for name, call in FINISHES.items():
        with subtests.test(name):
            assert not call(q, zombie, WORKER)
            assert q.snapshot() == before
            assert q.rows("select * from pgqueue.job_type_pauses") == []
    if now == "processing":
        assert q.complete([job], worker=OTHER) == {job.job_id}


def test_another_worker_or_attempt_or_job_is_not_accepted(q: Verbs, subtests: pytest.Subtests) -> None:
    job = q.start()
    before = q.snapshot()
    strangers = [(job, OTHER), (job._replace(attempts=2), WORKER), (job._replace(attempts=0), WORKER),
                 (job._replace(job_id=UNKNOWN), WORKER), (job._replace(attempts=None), WORKER)]  # fmt: skip
    for name, call in FINISHES.items():
        for stranger, worker in strangers:
            with subtests.test(name, stranger=stranger.attempts, worker=worker):
                assert not call(q, stranger, worker)
                assert q.snapshot() == before
    assert q.complete([job]) == {job.job_id}


# Cancel requests

ENDS: dict[str, Callable[[Verbs, Row], Any]] = {
    "complete": lambda q, job: q.complete([job], ["late"]) and "cancelled",
    "fail": lambda q, job: q.fail(job),
    "fail for good": lambda q, job: q.fail(job, retryable=False),
    "snooze": lambda q, job: q.snooze(job),
    "release": lambda q, job: q.release([job]) and "cancelled",
    "cancel_attempt": lambda q, job: q.cancel_attempt(job),
    "rate_limit": lambda q, job: q.rate_limit(job, timedelta(minutes=1)),
    "lost": lambda q, job: (q.advance(hours=1), q.sweep("leases")) and "cancelled",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_job_whose_cancel_was_requested_ends_cancelled_whatever_its_attempt_does(q: Verbs, end: str) -> None:
    q.freeze()
    job = q.start()
    assert q.cancel(job.job_id) == "cancel_requested"
    requested = q.job(job.job_id)
    assert (requested.status, requested.cancel_requested_at) == ("processing", q.now)
    assert ENDS[end](q, job) == "cancelled"
    stored = q.job(job.job_id)
    assert (stored.status, stored.cancel_requested_at) == ("cancelled", requested.cancel_requested_at)
    assert (stored.lease_expires_at, stored.due_at, stored.finished_at) == (None, None, q.now)
    assert q.claim() == []


# Snooze


def test_a_snoozed_attempt_is_put_off_and_not_charged(q: Verbs) -> None:
    now = q.freeze()
    job = q.start()
    assert q.snooze(job, timedelta(minutes=5)) == "submitted"
    stored = q.job(job.job_id)
    assert (stored.status, stored.due_at, stored.attempts) == ("submitted", now + timedelta(minutes=5), 1)
    assert (stored.lease_expires_at, stored.errors) == (None, [])
    q.advance(minutes=4.9)
    q.sweep()
    assert q.claim() == []
    q.advance(minutes=0.1)
    q.sweep()
    assert q.claim()[0].attempts == 2


def test_however_often_it_was_snoozed_a_job_fails_four_times_with_the_same_waits(q: Verbs) -> None:
    now = q.freeze()
    q.insert(retry_policy={"jitter": False})
    waits, outcomes = [], []
    for turn in range(100):
        jobs = q.claim()
        if not jobs:
            break
        if turn % 3:
            assert q.snooze(jobs[0], timedelta(0)) == "submitted"
        else:
            outcomes.append(q.fail(jobs[0]))
            due = q.job(jobs[0].job_id).due_at
            waits.append((due - now).total_seconds() if due else None)
        now = q.advance(minutes=1)
        q.sweep()
    assert outcomes == ["failed", "failed", "failed", "dead_letter"]
    assert waits == [1, 2, 4, None]


@pytest.mark.parametrize(("delay", "seconds"), [
    (timedelta(seconds=-5), 0), (timedelta(0), 0), (None, 0), (timedelta(days=800_000), None)
])  # fmt: skip
def test_a_snooze_of_any_length_is_possible(q: Verbs, delay: Any, seconds: Any) -> None:
    now = q.freeze()
    job = q.start()
    assert q.snooze(job, delay) == "submitted"
    due = q.job(job.job_id).due_at
    if seconds is None:
        assert due > now + timedelta(days=36_000)
    else:
        assert due == now
        q.sweep()
        assert len(q.claim()) == 1


def test_rate_limit_snoozes_the_job_and_pauses_its_type(q: Verbs) -> None:
    now = q.freeze()
    job = q.start(job_type="mail")
    q.insert(job_type="mail")
    other = q.insert(job_type="other")
    assert q.rate_limit(job, timedelta(seconds=30)) == "submitted"
    assert q.job(job.job_id).due_at == now + timedelta(seconds=30)
    assert [j.job_id for j in q.claim(9)] == [other]
    q.advance(seconds=30)
    q.sweep()
    assert [j.job_type for j in q.claim(9)] == ["mail", "mail"]


# Release


def test_an_unstarted_job_is_given_back_as_if_never_claimed(q: Verbs) -> None:
    q.freeze()
    job_id = q.insert()
    before = q.job(job_id)
    q.advance(seconds=1)
    (job,) = q.claim()
    assert q.release([job]) == {job_id}
    assert q.job(job_id) == before._replace(worker_id=WORKER, updated_at=q.now)
    assert q.claim()[0].attempts == 1


def test_a_started_job_is_given_back_without_charge(q: Verbs) -> None:
    q.freeze()
    job = q.start(retry_policy={"jitter": False})
    assert q.release([job], started=True) == {job.job_id}
    stored = q.job(job.job_id)
    assert (stored.status, stored.attempts, stored.seq) == ("pending", 1, job.seq)
    outcomes = []
    while jobs := q.claim():
        outcomes.append((jobs[0].attempts, q.fail(jobs[0])))
        q.advance(minutes=1)
        q.sweep()
    assert outcomes == [(2, "failed"), (3, "failed"), (4, "failed"), (5, "dead_letter")]


def test_of_a_batch_only_what_is_held_is_released_once(q: Verbs) -> None:
    q.fill(4)
    one, two, three, four = q.claim(4)
    q.complete([two])
    assert q.release([four, one, two, one, three._replace(attempts=9)]) == {one.job_id, four.job_id}
    assert [q.job(job.job_id).status for job in (one, two, three, four)] == [
        "pending", "completed", "processing", "pending",
    ]  # fmt: skip
    assert [job.job_id for job in q.claim(9)] == [one.job_id, four.job_id]


def test_a_released_job_is_seen_below_a_cursor_that_has_passed_it(q: Verbs) -> None:
    held = q.start()
    for _ in range(4):
        q.fill(1000)
        q.sweep("cursors")
        q.complete(q.claim(1000))
    q.sweep("cursors")
    assert q.value("select max(low_seq) from pgqueue.claim_cursors") > 1000
    q.fill(10)
    q.release([held])
    for _ in range(3):
        q.sweep("cursors")
    assert q.claim()[0].job_id == held.job_id


# Cancel by the task, progress


@pytest.mark.parametrize(("error", "line"), [
    (..., "cancelled by the task"), ({"message": "not\nneeded"}, "not needed"), ({}, "cancelled by the task"),
])  # fmt: skip
def test_a_task_may_cancel_its_job(q: Verbs, error: Any, line: str) -> None:
    now = q.freeze()
    job = q.start()
    assert q.cancel_attempt(job, error=error) == "cancelled"
    stored = q.job(job.job_id)
    assert (stored.status, stored.error, stored.finished_at) == ("cancelled", line, now)


def test_progress_is_the_running_attempts(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    for progress in ({"percent": 10}, "half", None, "x" * 1_000_000, {"percent": 90}):
        assert q.set_progress(job, progress) is True
        assert q.job(job.job_id).progress == progress
    q.fail(job)
    assert q.job(job.job_id).progress == {"percent": 90}
    q.advance(minutes=1)
    q.sweep()
    assert q.claim()[0].progress is None


def test_finishing_waits_for_whoever_holds_the_row_and_is_then_judged_by_what_is_true(
    q: Verbs, connect: Connect
) -> None:
    """The lease is reaped while the worker completes: one of them wins, and the row has one end."""
    q.freeze()
    job = q.start()
    q.advance(hours=1)
    finisher = Verbs(connect(autocommit=False))
    assert finisher.complete([job]) == {job.job_id}
    assert q.sweep("leases") == {"leases": 0}
    finisher.session.commit()
    assert q.sweep("leases") == {"leases": 0}
    assert q.job(job.job_id).status == "completed"
