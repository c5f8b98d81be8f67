"""Heartbeats: leases renewed, and what a worker is told of its jobs."""

import uuid
from datetime import timedelta

import pytest

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Verbs, refused


def test_a_heartbeat_renews_the_leases_of_its_jobs(q: Verbs) -> None:
    q.freeze()
    q.fill(3)
    jobs = q.claim(3)
    now = q.advance(seconds=20)
    assert q.heartbeat(jobs[:2]) == {}
    assert [q.job(job.job_id).lease_expires_at - now for job in jobs] == [
        timedelta(seconds=30), timedelta(seconds=30), timedelta(seconds=10)
    ]  # fmt: skip
    q.heartbeat(jobs[:1], lease=timedelta(minutes=5))
    assert q.job(jobs[0].job_id).lease_expires_at == now + timedelta(minutes=5)


@pytest.mark.parametrize("lease", ["20000 years", "1 day 1 microsecond", "25 hours", "0", "-1 second"])
def test_a_lease_is_a_day_at_most(q: Verbs, lease: str) -> None:
    words = "lease must be positive and at most 1 day, but is "
    q.insert()
    with refused("PQ422", words, column="lease"):
        q.claim(lease=lease)
    (job,) = q.claim(lease="1 day")
    with refused("PQ422", words, column="lease"):
        q.heartbeat([job], lease=lease)
    with refused("PQ422", words, column="lease"):
        q.call("complete_and_claim", WORKER, [job.job_id], [1], None, ["default"], 1, lease)
    assert q.heartbeat([job], lease="24 hours") == {}
    assert q.complete([job]) == {job.job_id}


def test_a_heartbeat_never_shortens_a_lease(q: Verbs) -> None:
    now = q.freeze()
    q.insert()
    jobs = q.claim(lease=timedelta(hours=1))
    assert q.heartbeat(jobs) == {}
    assert q.job(jobs[0].job_id).lease_expires_at == now + timedelta(hours=1)


def test_a_heartbeat_uses_the_queues_lease(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute("insert into pgqueue.queues (name, lease_ms) values ('slow', 120000)")
    q.insert(queue="slow")
    jobs = q.claim(queues=["slow"], lease=timedelta(seconds=1))
    q.heartbeat(jobs)
    assert q.job(jobs[0].job_id).lease_expires_at == now + timedelta(minutes=2)


def test_a_heartbeat_saves_a_job_whose_lease_ran_out_but_was_not_reaped(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    q.advance(minutes=10)
    assert q.heartbeat([job]) == {}
    assert q.sweep()["leases"] == 0
    assert q.complete([job]) == {job.job_id}


def test_a_heartbeat_tells_what_was_lost_and_what_is_to_stop(q: Verbs) -> None:
    q.freeze()
    q.fill(7)
    completed, failed, released, reclaimed, cancelled, stopping, running = jobs = q.claim(7)
    q.complete([completed])
    q.fail(failed)
    q.release([released, reclaimed])
    assert [job.job_id for job in q.claim(1, OTHER)] == [released.job_id]
    q.claim(1, OTHER)
    q.cancel_attempt(cancelled)
    q.cancel(stopping.job_id)
    before = q.job(reclaimed.job_id)
    told = q.heartbeat(jobs, lease=timedelta(hours=1))
    lost = (completed, failed, released, reclaimed, cancelled)
    assert told == {(job.job_id, 1): "lost" for job in lost} | {(stopping.job_id, 1): "cancel"}
    assert q.job(reclaimed.job_id) == before
    assert q.job(stopping.job_id).lease_expires_at == q.job(running.job_id).lease_expires_at


def test_an_earlier_attempt_of_the_same_worker_is_lost(q: Verbs) -> None:
    q.freeze()
    first = q.start()
    q.advance(hours=1)
    q.sweep()
    (second,) = q.claim()
    assert (first.worker_id, first.attempts, second.attempts) == (second.worker_id, 1, 2)
    assert q.heartbeat([first]) == {(first.job_id, 1): "lost"}
    assert q.heartbeat([second]) == {}
    unknown = first._replace(job_id=uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057"))
    assert q.heartbeat([unknown, second]) == {(unknown.job_id, 1): "lost"}
    assert q.heartbeat([]) == {}


def test_a_job_that_somebody_holds_for_a_moment_is_not_lost(q: Verbs, connect: Connect) -> None:
    job = q.start()
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.jobs_live for update")
    q.session.execute("set lock_timeout = '1s'")
    assert q.heartbeat([job]) == {}
    holder.rollback()
    assert q.complete([job]) == {job.job_id}
