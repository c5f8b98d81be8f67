"""What sweeps prune, note and advance, and how they get along with each other."""

import uuid
from datetime import timedelta

import psycopg
import pytest

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Verbs


def test_expired_keys_are_pruned_and_others_kept(q: Verbs) -> None:
    q.freeze()
    q.insert(idempotency_key="old")
    q.advance(hours=23)
    q.insert(idempotency_key="new")
    q.advance(hours=2)
    assert q.sweep()["prune"] == 1
    assert q.rows("select idempotency_key from pgqueue.idempotency_keys") == [("new",)]


def test_the_promotion_of_a_standby_is_noted_once(q: Verbs) -> None:
    q.sweep()
    (timeline,) = q.one("select timeline from pgqueue.sweep_state")
    assert timeline == "00000001"
    q.session.execute("update pgqueue.sweep_state set timeline = '0000000A'")
    for _ in range(2):
        q.sweep()
        row = q.one("select actor, verb, detail from pgqueue.audit")
        assert (row.actor, row.verb) == ("sweep", "promoted")
        assert (row.detail["from"], row.detail["to"]) == ("0000000A", timeline)


def test_what_dead_processes_left_behind_is_pruned(q: Verbs) -> None:
    now = q.freeze()
    for worker in (WORKER, OTHER):
        q.session.execute(
            "select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, null, null, 1, '1'),"
            " pgqueue.wait_for_work(%s, null, null, 'bell'), pgqueue.watch(%s, '90 s')",
            [worker, worker, worker],
        )
    q.session.execute("select pgqueue.pause_job_type('t', %s)", [now + timedelta(seconds=90)])
    q.sweep()
    q.advance(seconds=61)
    q.call("worker_seen", OTHER, "idle", 0, 0)
    q.sweep()
    assert q.rows("select worker_id from pgqueue.waiting") == [(OTHER,)]
    assert q.value("select count(*) from pgqueue.watchers") == 2
    q.advance(seconds=30)
    q.call("watch", OTHER, timedelta(seconds=90))
    q.sweep()
    assert q.rows("select watcher_id from pgqueue.watchers") == [(OTHER,)]
    assert q.rows("select from pgqueue.job_type_pauses") == []
    assert q.value("select count(*) from pgqueue.workers") == 2
    q.advance(hours=24)
    q.call("worker_seen", OTHER, "idle", 0, 0)
    q.sweep()
    assert q.rows("select worker_id from pgqueue.workers") == [(OTHER,)]
    q.advance(seconds=61)
    q.sweep()
    assert q.rows("select worker_id from pgqueue.waiting") == []


# Cursors


def cursor(q: Verbs, queue: str = "default", priority: int = 2) -> int:
    return int(
        q.value("select low_seq from pgqueue.claim_cursors where queue = %s and priority = %s", [queue, priority])
    )


def test_a_cursor_follows_the_lowest_pending_job(q: Verbs) -> None:
    q.fill(3000)
    q.sweep()
    q.sweep()
    assert cursor(q) == 0
    q.complete(q.claim(2000))
    q.fill(1, queue="other")
    q.sweep()
    q.sweep()
    lowest = q.value("select min(seq) from pgqueue.jobs_live where queue = 'default'")
    assert cursor(q) == lowest == 2001
    q.complete(q.claim(1000))
    for _ in range(3):
        q.fill(1, queue="other")
        q.sweep()
    assert cursor(q) > 3000
    q.fill(1)
    assert len(q.claim()) == 1


def test_a_cursor_does_not_pass_a_transaction_that_is_open(q: Verbs, connect: Connect) -> None:
    late = Verbs(connect(autocommit=False))
    job_id = late.insert()
    for _ in range(4):
        q.fill(1000)
        q.complete(q.claim(1000))
        q.sweep()
    assert cursor(q) == 0
    late.session.commit()
    for _ in range(3):
        q.fill(1000)
        q.sweep()
    assert [job.job_id for job in q.claim()] == [job_id]


def test_readers_and_writers_of_other_tables_hold_up_no_cursor(q: Verbs, connect: Connect) -> None:
    q.session.execute("create table other (n int)")
    reader, writer = connect(autocommit=False), connect(autocommit=False)
    reader.execute("set transaction isolation level repeatable read")
    reader.execute("select count(*) from pgqueue.jobs")
    writer.execute("insert into other values (1)")
    for _ in range(4):
        q.fill(1000)
        q.complete(q.claim(1000))
        q.sweep()
    assert cursor(q) > 1000


def test_cursors_know_the_types_at_the_head_of_their_line(q: Verbs) -> None:
    q.fill(10, "a")
    q.fill(10, "b")
    for _ in range(3):
        q.fill(1, queue="other")
        q.sweep()
    types = q.value("select job_types from pgqueue.claim_cursors where queue = 'default' and priority = 2")
    assert sorted(types) == ["a", "b"]


def test_every_queue_that_had_a_job_is_known_after_a_sweep(q: Verbs) -> None:
    for n in range(5):
        q.fill(2, queue=f"q{n}")
    q.enqueue(queue="later", delay=timedelta(hours=1))
    q.sweep()
    names = {f"q{n}" for n in range(5)} | {"later"}
    assert {row.queue for row in q.rows("select queue from pgqueue.queue_depths")} == names
    assert q.value("select count(*) from pgqueue.claim_cursors") == 4 * len(names)
    assert q.rows("select from pgqueue.sweep_notes") == []


def test_no_pending_job_lies_below_where_claims_begin(q: Verbs) -> None:
    q.freeze()
    for _ in range(5):
        q.fill(700)
        jobs = q.claim(600)
        q.release(jobs[:3])
        q.complete(jobs[3:])
        q.sweep()
        below = q.value(
            "select count(*) from pgqueue.claim_starts c join pgqueue.jobs_live j"
            "  on j.queue = c.queue and j.priority = c.priority and j.status = 'pending' and j.seq < c.low_seq"
        )
        assert below == 0


# Steps


def test_the_sweep_notes_what_it_did_and_how_long_it_took(q: Verbs) -> None:
    q.freeze()
    q.enqueue(delay=timedelta(seconds=1))
    now = q.advance(minutes=1)
    q.sweep()
    row = q.one("select * from pgqueue.sweep_steps where step = 'due'")
    assert (row.last_run_at, row.last_jobs, row.jobs, row.runs, row.last_error, row.failures) == (now, 1, 1, 1, None, 0)
    assert row.last_duration_ms > 0


def test_a_step_that_fails_stops_no_other_and_is_noted(q: Verbs) -> None:
    q.freeze()
    q.enqueue(delay=timedelta(seconds=1))
    q.session.execute("alter table pgqueue.idempotency_keys rename to hidden")
    q.advance(minutes=1)
    with_warning = q.session.execute("select step, jobs from pgqueue.sweep()").fetchall()
    assert dict(with_warning)["due"] == 1
    row = q.one("select * from pgqueue.sweep_steps where step = 'prune'")
    assert "idempotency_keys" in row.last_error
    assert row.failures == 1
    q.session.execute("alter table pgqueue.hidden rename to idempotency_keys")
    q.advance(minutes=1)
    assert "prune" in q.sweep()
    row = q.one("select * from pgqueue.sweep_steps where step = 'prune'")
    assert (row.last_error, row.failures) == (None, 0)


def test_of_two_sweeps_at_once_one_works(q: Verbs, connect: Connect) -> None:
    q.freeze()
    q.enqueue(delay=timedelta(seconds=1))
    q.advance(minutes=1)
    first = Verbs(connect(autocommit=False))
    assert first.sweep()["due"] == 1
    q.session.execute("set lock_timeout = '1s'")
    assert q.sweep() == {}
    first.session.commit()
    assert q.sweep()["due"] == 0


def test_the_clock_may_go_back(q: Verbs) -> None:
    """A failover to a server whose clock is behind: nothing is forgotten for longer than the clock went back."""
    q.freeze()
    for _ in range(3):
        q.insert()
        q.sweep()
        q.advance(minutes=5)
    q.advance(hours=-2)
    q.complete(q.claim(9))
    job_id = q.enqueue(delay=timedelta(seconds=1)).job_id
    lost = q.start()
    q.advance(minutes=1)
    q.sweep()
    q.sweep()
    q.advance(minutes=11)
    q.sweep()
    q.sweep()
    assert [q.job(i).status for i in (job_id, lost.job_id)] == ["pending", "pending"]


def test_a_sweep_measures_after_the_clock_went_back(q: Verbs) -> None:
    q.freeze()
    q.advance(minutes=2)
    assert {"measure", "alerts"} <= set(q.sweep())
    assert not {"measure", "alerts"} & set(q.sweep())
    q.advance(days=-1)
    assert {"measure", "alerts"} <= set(q.sweep())


def test_sweeps_in_any_order_of_sessions_conserve_jobs(q: Verbs, connect: Connect) -> None:
    q.freeze()
    sweepers = [Verbs(connect()) for _ in range(3)]
    q.fill(30, retry_policy='{"base_delay_ms": 0}', max_retries=1000)
    for turn in range(30):
        for n, job in enumerate(q.claim(10)):
            if n % 3 == 0:
                q.fail(job)
            elif n % 3 == 1:
                q.snooze(job, timedelta(0))
        sweepers[turn % 3].sweep()
        q.advance(seconds=1)
    q.advance(hours=1)
    for sweeper in sweepers:
        sweeper.sweep()
    assert sorted(job.payload["n"] for job in q.claim(99, uuid.uuid4())) == list(range(1, 31))


def test_a_sweep_needs_no_superuser(q: Verbs) -> None:
    q.session.execute("set role pgqueue_worker")
    assert q.session.execute("select count(*) from pgqueue.sweep()").fetchone()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        q.session.execute("delete from pgqueue.jobs")
