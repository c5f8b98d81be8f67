"""What time does to jobs: due, lost, expired; what sweeps prune, note and advance."""

from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Verbs, refused

FOR_EVER = 2_147_483_647


def test_a_sweep_of_nothing_says_that_it_did_nothing(q: Verbs) -> None:
    done = q.sweep()
    steps = {"cursors", "due", "leases", "expired", "keys", "prune"}
    assert {step: jobs for step, jobs in done.items() if step in steps} == dict.fromkeys(steps, 0)


def test_one_step_can_be_asked_for(q: Verbs) -> None:
    assert q.sweep("due") == {"due": 0}


# Due


def test_delayed_jobs_become_pending_when_their_time_has_come_and_not_before(q: Verbs) -> None:
    now = q.freeze()
    job_id = q.enqueue(delay=timedelta(seconds=10)).job_id
    q.advance(seconds=9.999)
    assert q.sweep()["due"] == 0
    q.advance(seconds=0.001)
    assert q.sweep()["due"] == 1
    job = q.job(job_id)
    assert (job.status, job.due_at, job.updated_at, job.attempts) == ("pending", None, now + timedelta(seconds=10), 0)
    assert job.scheduled_at == now + timedelta(seconds=10)
    assert q.sweep()["due"] == 0


def test_retries_become_pending_when_they_are_due(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    q.fail(job, retry_in=timedelta(minutes=1))
    q.advance(seconds=59)
    assert q.sweep()["due"] == 0
    q.advance(seconds=1)
    assert q.sweep()["due"] == 1
    stored = q.job(job.job_id)
    assert (stored.status, stored.due_at, stored.attempts, stored.error) == ("pending", None, 1, "ValueError: it broke")
    assert stored.seq > job.seq


def test_a_sweep_moves_at_most_so_many_and_the_rest_next_time(q: Verbs) -> None:
    q.freeze()
    q.session.execute(
        "insert into pgqueue.jobs (job_type, scheduled_at)"
        " select 't', pgqueue.clock() + interval '1 second' from generate_series(1, 250)"
    )
    q.advance(minutes=1)
    assert [q.swept("due", 100) for _ in range(4)] == [100, 100, 50, 0]


def test_a_job_due_long_ago_is_found_though_sweeps_went_on_without_it(q: Verbs, connect: Connect) -> None:
    """A transaction that stays open for an hour commits a job that was due at once."""
    q.freeze()
    late = Verbs(connect(autocommit=False))
    job = late.enqueue(delay=timedelta(seconds=1))
    for _ in range(20):
        q.advance(minutes=3)
        q.insert()
        q.sweep()
    late.session.commit()
    q.sweep()
    q.advance(minutes=11)
    q.sweep()
    assert q.job(job.job_id).status == "pending"


def test_a_retry_beyond_the_time_that_failed_jobs_are_kept_is_a_dead_letter(q: Verbs) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, failed_ttl) values ('default', '1 hour')")
    job, kept = q.start(), q.start()
    q.fail(job, retry_in=timedelta(hours=2))
    q.fail(kept, retry_in=timedelta(minutes=59))
    q.advance(hours=3)
    q.sweep()
    dead = q.job(job.job_id)
    assert (dead.status, dead.due_at) == ("dead_letter", None)
    assert "ValueError: it broke" in dead.error
    assert q.job(kept.job_id).status == "pending"


# Leases


def test_a_lost_lease_gives_the_job_back_at_its_place_without_charge(q: Verbs) -> None:
    q.freeze()
    q.session.execute("select pgqueue.worker_started(%s, 'w-1', 'host', 42, null, null, null, null, 4, '1')", [WORKER])
    job = q.start()
    q.advance(seconds=30)
    assert q.sweep()["leases"] == 0
    now = q.advance(seconds=0.001)
    assert q.sweep()["leases"] == 1
    stored = q.job(job.job_id)
    assert stored == job._replace(
        status="pending", lost=1, lease_expires_at=None, updated_at=now, errors=stored.errors,
        error="the lease of worker w-1 (host, pid 42) ran out",
    )  # fmt: skip
    (record,) = stored.errors
    assert (record["attempt"], record["type"], record["retryable"]) == (1, "LeaseLost", True)
    assert "w-1 (host, pid 42)" in record["message"]
    assert q.claim(1, OTHER)[0].attempts == 2


def test_lost_leases_are_not_charged_as_retries(q: Verbs) -> None:
    q.freeze()
    q.insert(max_retries=1, retry_policy={"jitter": False})
    outcomes = []
    for turn in range(6):
        (job,) = q.claim()
        if turn % 2:
            now = q.now
            outcomes.append((q.fail(job), q.job(job.job_id).due_at))
            assert now is not None
            if outcomes[-1][1]:
                assert outcomes[-1][1] - now == timedelta(seconds=1)
            else:
                break
        q.advance(minutes=1)
        q.sweep()
    assert [outcome for outcome, _ in outcomes] == ["failed", "dead_letter"]


def test_jobs_that_a_lost_worker_held_but_cannot_have_begun_are_not_charged(q: Verbs) -> None:
    q.freeze()
    q.call("worker_started", WORKER, "w", "h", 1, None, None, None, None, 2, "0")
    for _ in range(4):
        q.insert(max_retries=0)
    for _ in range(20):
        held = q.claim(2)
        q.advance(seconds=1)
        held += q.claim(2)
        q.advance(seconds=31)
        q.sweep("leases")
        if q.job(held[0].job_id).status == "dead_letter":
            break
    rows = [q.job(job.job_id) for job in held]
    assert [(row.status, row.lost) for row in rows] == [("dead_letter", 6)] * 2 + [("pending", 0)] * 2
    # Neither does it count as a retry.
    for job in q.claim(2):
        assert q.fail(job, {"message": "no"}) == "dead_letter"


@pytest.mark.parametrize("max_lost", [0, 2, 5])
def test_a_job_that_loses_too_many_leases_is_a_dead_letter_that_names_the_worker(q: Verbs, max_lost: int) -> None:
    q.freeze()
    if max_lost != 5:
        q.session.execute("insert into pgqueue.queues (name, max_lost) values ('default', %s)", [max_lost])
    job_id = q.insert()
    for lost in range(max_lost + 1):
        assert q.job(job_id).lost == lost
        (job,) = q.claim()
        assert job.attempts == lost + 1
        q.advance(minutes=1)
        q.sweep()
    dead = q.job(job_id)
    assert (dead.status, dead.lost, dead.attempts) == ("dead_letter", max_lost + 1, max_lost + 1)
    assert dead.error == f"{max_lost + 1} leases were lost, the last by worker {WORKER}"
    assert [record["attempt"] for record in dead.errors] == list(range(1, max_lost + 2))


def test_a_job_whose_worker_row_is_gone_is_reaped_all_the_same(q: Verbs) -> None:
    q.freeze()
    q.session.execute("select pgqueue.worker_started(%s, 'w-1', 'host', 42, null, null, null, null, 4, '1')", [WORKER])
    q.start()
    q.session.execute("delete from pgqueue.workers")
    q.advance(minutes=1)
    assert q.sweep()["leases"] == 1


def test_a_lease_renewed_in_time_is_kept_for_ever(q: Verbs) -> None:
    q.freeze()
    job = q.start(timeout_ms=FOR_EVER)
    for _ in range(100):
        q.advance(seconds=25)
        assert q.heartbeat([job]) == {}
        assert q.sweep()["leases"] == 0
    assert q.complete([job]) == {job.job_id}
    assert q.job(job.job_id).attempts == 1


def test_a_row_that_somebody_holds_is_left_for_the_next_sweep(q: Verbs, connect: Connect) -> None:
    q.freeze()
    q.fill(2)
    held, free = q.claim(2)
    q.advance(minutes=1)
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.jobs_live where job_id = %s for update", [held.job_id])
    q.session.execute("set lock_timeout = '1s'")
    assert q.sweep()["leases"] == 1
    assert [q.job(job.job_id).status for job in (held, free)] == ["processing", "pending"]
    holder.rollback()
    assert q.sweep()["leases"] == 1


def test_one_key_in_trouble_holds_up_no_other_lease(q: Verbs) -> None:
    """A lost head of an ordering key, whose next was made a second head by hand, and ten other lost leases."""
    q.freeze()
    for n in range(11):
        q.insert(ordering_key=f"k{n}")
        q.insert(ordering_key=f"k{n}", idempotency_key=f"i{n}")
    q.claim(99)
    q.advance(minutes=1)
    assert q.sweep()["leases"] == 11
    assert len(q.claim(99, OTHER)) == 11


def test_an_attempt_that_outruns_its_timeout_is_failed_though_its_lease_is_renewed(q: Verbs) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, timeout_ms) values ('slow', 3600000)")
    jobs = [
        q.start(timeout_ms=60_000),
        q.start(),
        q.start(queue="slow"),
        q.start(queue="slow", timeout_ms=FOR_EVER),
    ]
    ends = []
    for minutes in (1, 1, 13, 1, 46):
        q.advance(minutes=minutes)
        q.heartbeat(jobs, lease=timedelta(hours=1))
        ends.append(q.sweep("timeouts")["timeouts"])
    assert ends == [0, 1, 0, 1, 1]
    assert [q.job(job.job_id).status for job in jobs] == ["failed", "failed", "failed", "processing"]
    failed = q.job(jobs[0].job_id)
    assert (failed.errors[0]["type"], failed.errors[0]["attempt"]) == ("TimeoutError", 1)
    assert "60.0 s" in failed.error
    assert q.complete(jobs) == {jobs[3].job_id}


# Expiry


def test_a_job_is_not_started_after_its_expiry(q: Verbs) -> None:
    now = q.freeze()
    expires_at = now + timedelta(minutes=1)
    job_id = q.insert(expires_at=expires_at)
    q.advance(seconds=59)
    assert q.sweep()["expired"] == 0
    q.advance(seconds=1)
    assert q.sweep()["expired"] == 1
    dead = q.job(job_id)
    assert (dead.status, dead.attempts, dead.finished_at) == ("dead_letter", 0, expires_at)
    assert dead.error == f"expired: it was to start before {q.value('select %s::timestamptz::text', [expires_at])}"


def test_expiry_concerns_pending_jobs_only(q: Verbs) -> None:
    now = q.freeze()
    columns: dict[str, Any] = {"expires_at": now + timedelta(minutes=1), "timeout_ms": FOR_EVER}
    running = q.start(**columns)
    delayed = q.insert(scheduled_at=now + timedelta(minutes=5), **columns)
    q.advance(minutes=2)
    q.heartbeat([running])
    assert q.sweep()["expired"] == 0
    assert q.complete([running]) == {running.job_id}
    q.advance(minutes=4)
    q.sweep()
    assert q.job(delayed).status == "dead_letter"


def test_without_expiry_a_job_waits_as_long_as_its_queue_says(q: Verbs) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, pending_ttl) values ('short', '1 hour')")
    usual, short, own = q.insert(), q.insert(queue="short"), None
    own = q.insert(queue="short", expires_at=q.advance(seconds=0) + timedelta(days=300))
    q.sweep()
    q.advance(minutes=59)
    assert q.sweep()["expired"] == 0
    q.advance(minutes=2)
    assert q.sweep()["expired"] == 1
    assert q.job(short).status == "dead_letter"
    assert q.job(short).error == "expired: it waited longer than 01:00:00"
    q.advance(hours=22)
    assert q.sweep()["expired"] == 0
    q.advance(hours=2)
    assert q.sweep()["expired"] == 1
    assert (q.job(usual).status, q.job(own).status) == ("dead_letter", "pending")


def test_the_wait_counts_from_when_the_job_became_pending(q: Verbs) -> None:
    q.freeze()
    delayed = q.enqueue(delay=timedelta(hours=30)).job_id
    retried = q.start()
    q.fail(retried, retry_in=timedelta(hours=30))
    q.advance(hours=31)
    q.sweep()
    q.sweep()
    assert {q.job(i).status for i in (delayed, retried.job_id)} == {"pending"}
    q.advance(hours=25)
    assert q.sweep()["expired"] == 2


@pytest.mark.parametrize("pauses", [1, 3])
def test_a_pause_stops_the_clock(q: Verbs, pauses: int) -> None:
    q.freeze()
    job_id = q.insert()
    q.sweep()
    q.advance(hours=20)
    for _ in range(pauses):
        q.call("pause", "default")
        q.advance(hours=100)
        q.sweep()
        q.call("resume", "default")
        q.advance(hours=1)
        q.sweep()
    assert q.job(job_id).status == "pending"
    q.advance(hours=4 - pauses, seconds=-1)
    assert q.sweep()["expired"] == 0
    q.advance(seconds=2)
    assert q.sweep()["expired"] == 1


def test_a_pause_before_the_job_came_does_not_count(q: Verbs) -> None:
    q.freeze()
    q.call("pause", "default")
    q.advance(hours=100)
    q.insert()
    q.advance(hours=10)
    q.call("resume", "default")
    q.sweep()
    q.advance(hours=24, seconds=-1)
    assert q.sweep()["expired"] == 0
    q.advance(seconds=2)
    assert q.sweep()["expired"] == 1


def test_a_long_line_expires_in_several_sweeps(q: Verbs) -> None:
    q.freeze()
    for priority in range(4):
        q.fill(150, priority=priority)
    q.sweep()
    q.advance(hours=25)
    q.insert()
    expired = 0
    for _ in range(10):
        expired += q.sweep()["expired"]
    assert expired == 600
    assert q.value("select count(*) from pgqueue.jobs_live") == 1


def test_jobs_with_an_expiry_of_their_own_hide_no_others_behind_them(q: Verbs) -> None:
    now = q.freeze()
    q.fill(150, expires_at=now + timedelta(days=30))
    q.fill(1)
    q.sweep()
    q.advance(hours=25)
    assert q.sweep()["expired"] == 1


def test_a_step_that_does_not_exist_is_refused_and_the_others_are_named(q: Verbs) -> None:
    with refused("PQ422", 'there is no step "bogus" of the sweep, only cursors, due, leases', column="only_step"):
        q.call("sweep", "bogus")
    for jobs in (0, -1, None):
        with refused("PQ422", "max_jobs must be at least 1, not", column="max_jobs"):
            q.call("sweep", max_jobs=jobs)
