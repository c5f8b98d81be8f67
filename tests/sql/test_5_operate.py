"""Operators' verbs: look up, cancel, retry, discard, pause; each says what it did and leaves a trace in the audit."""

import uuid
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.sql.test_2_transitions import FINAL, LIVE, in_status
from tests.sql.verbs import Row, Verbs, kill_by_failing, refused

UNKNOWN = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def audit(q: Verbs) -> list[tuple[str, Any, Any]]:
    rows = q.rows("select verb, target, jobs from pgqueue.audit order by audit_id")
    return [(row.verb, row.target, row.jobs) for row in rows]


# Look up


@pytest.mark.parametrize("status", LIVE + FINAL)
def test_job_finds_one_job_wherever_it_is(q: Verbs, status: str) -> None:
    job = in_status(q, status)
    assert q.call("job", job.job_id) == [job]


def test_job_of_an_unknown_id_is_no_row(q: Verbs) -> None:
    for job_id in (UNKNOWN, uuid.uuid4(), uuid.UUID(int=0), None):
        assert q.call("job", job_id) == []


def test_job_finds_what_ended_long_after_it_was_made_and_in_dated_partitions(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    q.advance(days=60)
    q.call("maintain_partitions")
    q.complete([job])
    assert q.where(job.job_id).rpartition("_")[2].isdigit()
    assert [j.status for j in q.call("job", job.job_id)] == ["completed"]


# Cancel


@pytest.mark.parametrize("status", ["submitted", "pending", "failed"])
def test_a_job_that_does_not_run_is_cancelled_at_once(q: Verbs, status: str) -> None:
    q.freeze()
    job = in_status(q, status)
    now = q.advance(seconds=1)
    assert q.cancel(job.job_id) == "cancelled"
    stored = q.job(job.job_id)
    assert stored == job._replace(
        status="cancelled", in_line=False, error="cancelled on request", cancel_requested_at=now, updated_at=now,
        finished_at=now, due_at=None,
    )  # fmt: skip
    q.advance(days=1)
    q.sweep()
    assert q.claim(9, queues=None) == []


def test_a_running_job_is_asked_to_stop_and_the_first_request_counts(q: Verbs) -> None:
    first = q.freeze()
    job = in_status(q, "processing")
    assert q.cancel(job.job_id) == "cancel_requested"
    q.advance(seconds=5)
    assert q.cancel(job.job_id) == "cancel_requested"
    assert q.job(job.job_id) == job._replace(cancel_requested_at=first, updated_at=q.now)


@pytest.mark.parametrize("status", ["completed", "dead_letter"])
def test_a_job_past_cancelling_is_refused_unchanged(q: Verbs, status: str) -> None:
    job = in_status(q, status)
    with refused("PQ409", status, str(job.job_id)):
        q.cancel(job.job_id)
    assert q.job(job.job_id) == job
    assert audit(q) == []


def test_cancelling_a_cancelled_job_again_says_so_and_changes_nothing(q: Verbs) -> None:
    job = in_status(q, "cancelled")
    assert q.cancel(job.job_id) == "cancelled"
    assert q.job(job.job_id) == job


def test_cancelling_an_unknown_job_is_not_found(q: Verbs) -> None:
    with refused("PQ404", str(UNKNOWN)):
        q.cancel(UNKNOWN)


def test_cancel_many_says_for_each_what_became_of_it(q: Verbs) -> None:
    jobs = {status: in_status(q, status).job_id for status in LIVE + FINAL}
    ids = [*jobs.values(), UNKNOWN, jobs["pending"]]
    outcomes = {row.job_id: row.outcome for row in q.call("cancel_many", ids)}
    assert outcomes == {
        jobs["submitted"]: "cancelled", jobs["pending"]: "cancelled", jobs["failed"]: "cancelled",
        jobs["processing"]: "cancel_requested", jobs["completed"]: "completed", jobs["cancelled"]: "cancelled",
        jobs["dead_letter"]: "dead_letter", UNKNOWN: "not_found",
    }  # fmt: skip
    assert q.call("cancel_many", []) == []


def test_no_job_answered_cancelled_ever_runs_or_completes(q: Verbs) -> None:
    """Cancels at every moment of a life; each answer is kept."""
    q.fill(60)
    answers = {}
    ids = [row.job_id for row in q.rows("select job_id from pgqueue.jobs order by seq")]
    running: list[Row] = []
    for turn, job_id in enumerate(ids):
        if turn % 3 == 0:
            running += q.claim(2)
        if turn % 5 == 0:
            q.complete(running)
            running = []
        try:
            answers[job_id] = q.cancel(job_id)
        except psycopg.Error as error:
            answers[job_id] = error.diag.sqlstate
    q.complete(running)
    q.complete(q.claim(60))
    ends = {row.job_id: row.status for row in q.rows("select job_id, status from pgqueue.jobs")}
    assert set(ends.values()) <= {"cancelled", "completed"}
    for job_id, answer in answers.items():
        assert ends[job_id] == ("completed" if answer == "PQ409" else "cancelled")
    assert set(answers.values()) == {"cancelled", "cancel_requested", "PQ409"}


# Retry


def test_a_retried_dead_letter_has_fresh_attempts_and_keeps_its_history(q: Verbs) -> None:
    q.freeze()
    job_id = q.insert(retry_policy={"jitter": False})
    for _ in range(4):
        outcome = q.fail(q.claim()[0])
        q.advance(minutes=1)
        q.sweep()
    assert outcome == "dead_letter"
    dead = q.job(job_id)
    retried = q.retry(job_id)
    assert retried == q.job(job_id)
    assert (retried.status, retried.attempts, retried.errors) == ("pending", 4, dead.errors)
    assert (retried.error, retried.finished_at, retried.due_at, retried.result) == (None,) * 4
    assert retried.seq > dead.seq
    waits = []
    for _ in range(4):
        (job,) = q.claim()
        outcome = q.fail(job)
        due = q.job(job_id).due_at
        waits.append((due - q.advance(seconds=0)).total_seconds() if due else None)
        q.advance(minutes=1)
        q.sweep()
    assert (outcome, waits) == ("dead_letter", [1, 2, 4, None])
    assert [e["attempt"] for e in q.job(job_id).errors] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_retried_job_survives_as_many_lost_leases_as_a_new_one(q: Verbs) -> None:
    q.freeze()
    job_id = q.insert(retry_policy={"jitter": False, "base_delay_ms": 0})
    for _ in range(2):
        lost = 0
        while q.job(job_id).status != "dead_letter":
            assert len(q.claim()) == 1
            q.advance(minutes=1)
            lost += q.sweep("leases")["leases"]
        assert lost == 6
        q.retry(job_id)
    outcomes = []
    while jobs := q.claim():
        outcomes.append(q.fail(jobs[0]))
        q.sweep("due")
    assert outcomes == ["failed"] * 3 + ["dead_letter"]


def test_a_job_retried_a_second_time_starts_afresh_again(q: Verbs) -> None:
    q.freeze()
    job_id = q.insert(max_retries=1, retry_policy={"base_delay_ms": 0})
    for _ in range(3):
        outcomes = []
        while jobs := q.claim():
            outcomes.append(q.fail(jobs[0]))
            q.sweep("due")
        assert outcomes == ["failed", "dead_letter"]
        q.retry(job_id)
    assert q.job(job_id).attempts == 6


def test_retry_clears_what_belonged_to_the_old_life(q: Verbs) -> None:
    now = q.freeze()
    job_id = q.insert(expires_at=now + timedelta(minutes=1), scheduled_at=now - timedelta(1), producer_id="p",
                      idempotency_key="k", payload={"a": 1})  # fmt: skip
    (job,) = q.claim()
    q.set_progress(job, 5)
    q.fail(job, retryable=False)
    q.advance(minutes=2)
    retried = q.retry(job_id)
    assert (retried.expires_at, retried.scheduled_at, retried.cancel_requested_at, retried.progress) == (None,) * 4
    assert (retried.payload, retried.producer_id, retried.idempotency_key) == ({"a": 1}, "p", "k")
    q.sweep()
    assert q.claim()[0].job_id == job_id


def test_an_expired_dead_letter_can_be_retried(q: Verbs) -> None:
    now = q.freeze()
    job_id = q.insert(expires_at=now + timedelta(minutes=1))
    q.advance(minutes=2)
    q.sweep()
    assert q.job(job_id).status == "dead_letter"
    q.retry(job_id)
    q.sweep()
    assert [job.job_id for job in q.claim()] == [job_id]


def test_retry_of_a_failed_job_makes_it_pending_now_at_the_tail(q: Verbs) -> None:
    q.freeze()
    failed = in_status(q, "failed")
    other = q.insert(queue=failed.queue)
    retried = q.retry(failed.job_id)
    assert (retried.status, retried.due_at, retried.attempts, retried.errors) == ("pending", None, 1, failed.errors)
    assert [job.job_id for job in q.claim(2, queues=[failed.queue])] == [other, failed.job_id]


def test_why_tells_of_a_retry_that_will_not_be(q: Verbs) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, failed_ttl) values ('default', '1 hour')")
    soon, late = q.start(), q.start()
    q.fail(soon, retry_in=timedelta(minutes=59))
    q.fail(late, retry_in=timedelta(days=30))
    assert "it becomes pending again in 59:00" in q.why(soon.job_id)
    assert "it becomes a dead letter in 01:00:00" in q.why(late.job_id)
    q.advance(hours=1)
    q.sweep()
    assert [q.job(job.job_id).status for job in (soon, late)] == ["pending", "dead_letter"]


def test_a_retry_by_hand_forgets_when_a_job_was_scheduled(q: Verbs) -> None:
    q.freeze()
    job_id = q.enqueue(delay=timedelta(seconds=1)).job_id
    q.advance(seconds=1)
    q.sweep()
    q.fail(q.claim()[0])
    assert q.job(job_id).scheduled_at is not None
    assert q.retry(job_id).scheduled_at is None


@pytest.mark.parametrize("status", ["submitted", "pending", "processing", "completed", "cancelled"])
def test_retry_of_any_other_job_is_refused_unchanged(q: Verbs, status: str) -> None:
    job = in_status(q, status)
    with refused("PQ409", status, str(job.job_id)):
        q.retry(job.job_id)
    assert q.job(job.job_id) == job
    assert audit(q) == []


def test_retry_of_an_unknown_job_is_not_found(q: Verbs) -> None:
    with refused("PQ404", str(UNKNOWN)):
        q.retry(UNKNOWN)


def dead_letters(q: Verbs) -> dict[str, uuid.UUID]:
    """Five dead letters: two types, two queues, an hour apart."""
    q.freeze()
    found = {}
    for name, queue, job_type in (
        ("first", "a", "mail"), ("second", "a", "report"), ("third", "b", "mail"), ("fourth", "b", "report"),
        ("fifth", "a", "mail"),
    ):  # fmt: skip
        found[name] = kill_by_failing(q, q.insert(queue=queue, job_type=job_type), queue).job_id
        q.advance(hours=1)
    return found


FILTERS = [
    ({}, ["first", "second", "third", "fourth", "fifth"]),
    ({"job_type": "mail"}, ["first", "third", "fifth"]),
    ({"queue": "a"}, ["first", "second", "fifth"]),
    ({"job_type": "mail", "queue": "b"}, ["third"]),
    ({"job_type": "unknown"}, []),
    ({"since": -3}, ["third", "fourth", "fifth"]),
    ({"until": -3}, ["first", "second"]),
    ({"since": -4, "until": -2}, ["second", "third"]),
    ({"max_jobs": 2}, ["first", "second"]),
    ({"max_jobs": 0}, []),
]


@pytest.mark.parametrize("verb", ["retry_dead_letters", "discard_dead_letters"])
@pytest.mark.parametrize(("filters", "names"), FILTERS)
def test_bulk_verbs_take_what_matches(q: Verbs, verb: str, filters: dict[str, Any], names: list[str]) -> None:
    jobs = dead_letters(q)
    now = q.advance(seconds=0)
    named = {k: now + timedelta(hours=v) if k in ("since", "until") else v for k, v in filters.items()}
    assert q.call_value(verb, **named) == len(names)
    left = {row.job_id: row.status for row in q.rows("select job_id, status from pgqueue.jobs")}
    for name, job_id in jobs.items():
        if name not in names:
            assert left[job_id] == "dead_letter"
        elif verb == "retry_dead_letters":
            assert left[job_id] == "pending"
        else:
            assert job_id not in left
    assert audit(q) == [(verb, None, len(names))]
    (detail,) = q.one("select detail from pgqueue.audit")
    assert (detail["job_type"], detail["queue"]) == (filters.get("job_type"), filters.get("queue"))


def test_dead_letters_retried_in_bulk_are_whole_and_claimed_once(q: Verbs) -> None:
    q.freeze()
    q.fill(1000, max_retries=0)
    for job in q.claim(1000):
        q.fail(job)
    assert q.call_value("retry_dead_letters") == 1000
    jobs = q.claim(2000)
    assert sorted(job.payload["n"] for job in jobs) == list(range(1, 1001))
    assert {(job.attempts, job.status) for job in jobs} == {(2, "processing")}
    assert q.value("select count(*) from pgqueue.jobs") == 1000


# Discard


def test_discard_deletes_a_dead_letter_and_says_so_in_the_audit(q: Verbs) -> None:
    dead = in_status(q, "dead_letter")
    assert q.call_value("discard", dead.job_id) == "discarded"
    assert q.snapshot() == []
    row = q.one("select * from pgqueue.audit")
    assert (row.verb, row.target, row.jobs, row.actor) == (
        "discard",
        str(dead.job_id),
        1,
        q.value("select session_user"),
    )
    assert row.detail == {"job_type": "t", "queue": dead.queue, "error": "ValueError: it broke"}
    with refused("PQ404"):
        q.call("discard", dead.job_id)


@pytest.mark.parametrize("status", [*LIVE, "completed", "cancelled"])
def test_only_dead_letters_can_be_discarded(q: Verbs, status: str) -> None:
    job = in_status(q, status)
    with refused("PQ409", status):
        q.call("discard", job.job_id)
    assert q.snapshot() == [job]


def test_the_audit_names_the_person_behind_a_shared_role(q: Verbs) -> None:
    q.session.execute("set pgqueue.actor = 'ada'")
    q.cancel(q.insert())
    q.session.execute("reset pgqueue.actor")
    q.call("pause", "default")
    assert q.rows("select actor from pgqueue.audit order by audit_id") == [("ada",), (q.value("select session_user"),)]


def test_each_verb_leaves_a_trace(q: Verbs) -> None:
    cancelled, dead = q.insert(), in_status(q, "dead_letter")
    q.cancel(cancelled)
    q.call("cancel_many", [q.insert(), UNKNOWN])
    q.retry(dead.job_id)
    for _ in range(2):
        q.call("pause", "default")
    for _ in range(2):
        q.call("resume", "default")
    assert audit(q) == [
        ("cancel", str(cancelled), 1), ("cancel", None, 2), ("retry", str(dead.job_id), 1),
        ("pause", "default", None), ("resume", "default", None),
    ]  # fmt: skip


# Pause


def test_pause_and_resume_say_whether_they_changed_anything(q: Verbs) -> None:
    now = q.freeze()
    assert [q.call_value(verb, "q") for verb in ("resume", "pause", "pause", "resume", "resume")] == [
        False, True, False, True, False
    ]  # fmt: skip
    row = q.one("select * from pgqueue.queues")
    assert (row.name, row.paused, row.paused_at, row.hard_limit) == ("q", False, None, 100_000)
    q.call("pause", "q")
    assert q.one("select paused, paused_at from pgqueue.queues") == (True, now)


def test_pause_keeps_the_settings_of_a_queue(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, lease_ms) values ('q', 5000)")
    q.call("pause", "q")
    assert q.one("select lease_ms, paused from pgqueue.queues") == (5000, True)


@pytest.mark.parametrize("name", ["", "q" * 64])
def test_a_name_that_no_queue_can_have_is_refused(q: Verbs, name: str) -> None:
    with refused("23514", constraint="name must have 1 to 63 characters"):
        q.call("pause", name)


BY_HAND = {
    "update": ("update pgqueue.queues set paused = true", "update pgqueue.queues set paused = false"),
    "insert and delete": (
        "insert into pgqueue.queues (name, paused) values ('new', true)",
        "delete from pgqueue.queues",
    ),
    "rename": ("update pgqueue.queues set paused = true, name = 'new'", "update pgqueue.queues set name = 'newer'"),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_a_pause_by_hand_is_the_same_as_by_the_function(q: Verbs, way: str) -> None:
    began = q.freeze()
    q.session.execute("insert into pgqueue.queues (name) values ('old')")
    q.session.execute(BY_HAND[way][0])
    name = "old" if way == "update" else "new"
    assert q.rows("select * from pgqueue.queue_pauses") == [(name, began, None)]
    job_id = q.insert(queue=name)
    assert q.claim(queues=[name]) == []
    assert q.why(job_id) == f'Queue "{name}" is paused since {q.value("select %s::timestamptz::text", [began])}.'
    ended = q.advance(hours=1)
    q.session.execute(BY_HAND[way][1])
    assert q.rows("select * from pgqueue.queue_pauses where queue = %s", [name]) == [(name, began, ended)]
    assert len(q.claim(queues=[name])) == 1
    assert [verb for verb, target, _ in audit(q) if target == name] == ["pause", "resume"]


def test_a_queue_paused_twice_in_a_transaction_is_paused(q: Verbs) -> None:
    q.freeze()
    for verb in ("pause", "resume", "pause"):
        q.call(verb, "q")
    assert q.rows("select queue, resumed_at from pgqueue.queue_pauses") == [("q", None)]


BAD_CALLS = [
    ("retry_dead_letters(max_jobs => -1)", "max_jobs", "max_jobs must not be negative, but is -1"),
    ("discard_dead_letters(max_jobs => -1)", "max_jobs", "max_jobs must not be negative, but is -1"),
    ("pause(null)", "queue", "queue must be given, not null"),
    ("resume(null)", "queue", "queue must be given, not null"),
    ("pause_job_type(null, now())", "job_type", "job_type must be given, not null"),
    ("pause_job_type('t', null)", "until", "until must be given, not null"),
    ("resume_job_type(null)", "job_type", "job_type must be given, not null"),
    ("history('1h', 0)", "points", "points must be at least 1, not 0"),
    ("history('1h', null)", "points", "points must be at least 1, not null"),
    ("history('-1 hour')", "over_last", "over_last must be positive and at most 1 year, not -01:00:00"),
    ("history('100000 years')", "over_last", "over_last must be positive and at most 1 year, not 100000 years"),
    ("set_queue(null, '{}')", "queue", "queue must be given, not null"),
    ("set_queue('q', '[]')", "settings", "settings must be a JSON object, not []"),
    ("set_queue('q', null)", "settings", "settings must be a JSON object, not null"),
    ("""set_queue('q', '{"shed_low": true, "completed_ttl": "5 parsecs"}')""", "completed_ttl",
     'setting completed_ttl cannot be "5 parsecs": invalid input syntax for type interval'),
    ("""set_queue('q', '{"lease_ms": "x"}')""", "lease_ms", 'setting lease_ms cannot be "x": invalid input syntax'),
    ("""set_queue('q', '{"hard_limit": 99999999999}')""", "hard_limit", "setting hard_limit cannot be 99999999999: "),
    ("""set_queue('q', '{"weights": 5}')""", "weights", "setting weights cannot be 5: "),
    ("""put_schedule('s', '{"cron": "* * * * *", "job_type": "t", "priority": "x"}')""", "priority",
     'setting priority cannot be "x": '),
    ("put_schedule('s', '5')", "settings", "settings must be a JSON object, not 5"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "column", "words"), BAD_CALLS)
def test_a_wrong_argument_is_named(q: Verbs, call: str, column: str, words: str) -> None:
    with refused("PQ422", words, column=column):
        q.session.execute(f"select * from pgqueue.{call}")
    assert q.rows("select * from pgqueue.queues") + q.rows("select * from pgqueue.schedules") == []
