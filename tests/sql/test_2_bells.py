"""Bells: only for workers that wait, and no more of them than jobs came."""

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.meet import aside, wait_until
from tests.sql.test_2_notices import WATCHER, Ear, whole_life
from tests.sql.verbs import WORKER, Verbs, refused


def waiting(q: Verbs, workers: int, queues: Any = None, job_types: Any = None) -> list[str]:
    """Registers workers that wait; their channels."""
    channels = []
    for _ in range(workers):
        worker = uuid.uuid4()
        channels.append(f"pgqueue_wake_{worker.hex}")
        q.session.execute("select pgqueue.wait_for_work(%s, %s, %s, %s)", [worker, queues, job_types, channels[-1]])
    return channels


def bell(queue: str, job_type: str | None = "t") -> str:
    return json.dumps([queue, job_type])


def rung(connect: Connect, channels: list[str]) -> Callable[[], list[tuple[str, str]]]:
    return Ear(connect, *channels).heard


def test_nobody_waits_nobody_is_rung(q: Verbs, connect: Connect) -> None:
    q.freeze()
    ear = Ear(connect, "pgqueue_wake", f"pgqueue_wake_{WORKER.hex}")
    channels = waiting(q, 1)
    q.session.execute("select pgqueue.stop_waiting(worker_id) from pgqueue.waiting")
    heard = rung(connect, channels)
    whole_life(q)
    assert ear.heard() == heard() == []


def test_as_many_are_rung_as_jobs_came_each_once(q: Verbs, connect: Connect) -> None:
    channels = waiting(q, 5)
    heard = rung(connect, channels)
    for jobs, bells in ((1, 1), (3, 3), (5, 5), (100, 5)):
        q.fill(jobs)
        got = heard()
        assert len(got) == len(set(got)) == bells
        assert {payload for _, payload in got} == {bell("default")}
    q.insert()
    q.enqueue()
    q.enqueue_many({"job_type": "t"})
    assert len(heard()) == 3


def test_no_more_than_64_are_rung_at_once(q: Verbs, connect: Connect) -> None:
    heard = rung(connect, waiting(q, 80))
    q.fill(1000)
    assert len(heard()) == 64


def test_not_always_the_same_is_rung(q: Verbs, connect: Connect) -> None:
    heard = rung(connect, waiting(q, 4))
    for _ in range(60):
        q.insert()
    assert len({channel for channel, _ in heard()}) == 4


def test_only_those_are_rung_who_serve_queue_and_type(q: Verbs, connect: Connect) -> None:
    any_work, mail, mail_send, other = (
        waiting(q, 1, queues, types)[0]
        for queues, types in ((None, None), (["mail", "x"], None), (["mail"], ["send", "y"]), (["other"], None))
    )
    heard = rung(connect, [any_work, mail, mail_send, other])

    def who(**columns: Any) -> set[str]:
        q.fill(9, **columns)
        return {channel for channel, _ in heard()}

    assert who(queue="mail", job_type="send") == {any_work, mail, mail_send}
    assert who(queue="mail", job_type="receive") == {any_work, mail}
    assert who(queue="other") == {any_work, other}
    assert who(queue="nobody's") == {any_work}


def test_those_of_some_priorities_are_rung_beside_the_others(q: Verbs, connect: Connect) -> None:
    """A bell does not say what priority a job has: it must not go to somebody alone who may not take it."""
    channels = waiting(q, 2)
    q.session.execute("select pgqueue.wait_for_work(%s, null, null, 'some', '{0,1}')", [WORKER])
    heard = rung(connect, [*channels, "some"])
    for _ in range(10):
        q.insert()
        got = {channel for channel, _ in heard()}
        assert "some" in got
        assert len(got) == 2


def test_who_leaves_has_others_woken_for_the_bells_it_made_nothing_of(q: Verbs, connect: Connect) -> None:
    both, mail = waiting(q, 1)[0], waiting(q, 1, ["mail"])[0]
    q.session.execute("select pgqueue.wait_for_work(%s, null, null, 'leaves')", [WORKER])
    heard = rung(connect, [both, mail, "leaves"])
    q.session.execute("select pgqueue.stop_waiting(%s, '{mail,default,mail}', '{t,null,t}')", [WORKER])
    assert sorted(heard()) == sorted([(both, bell("default", None)), (both, bell("mail")), (mail, bell("mail"))])
    q.session.execute("select pgqueue.stop_waiting(%s)", [WORKER])
    assert heard() == []


def test_bells_are_handed_on_to_those_of_the_same_types(q: Verbs, connect: Connect) -> None:
    alike, others = waiting(q, 1, None, ["a", "c"]), waiting(q, 9, None, ["b"])
    heard = rung(connect, alike + others)
    for _ in range(3):
        q.session.execute("select pgqueue.stop_waiting(%s, '{default}', '{a}')", [WORKER])
        assert heard() == [(alike[0], bell("default", "a"))]


def test_jobs_of_one_transaction_ring_a_worker_each(q: Verbs, connect: Connect) -> None:
    """PostgreSQL folds notices that are alike into one: the second job's bell must not go where the first's went."""
    channels = waiting(q, 6)
    heard = rung(connect, channels)
    with q.session.transaction():
        for _ in range(6):
            q.insert()
    assert sorted(heard()) == sorted((channel, bell("default")) for channel in channels)
    with q.session.transaction():
        for _ in range(5):
            with q.session.transaction(force_rollback=True):
                q.insert()
        q.fill(6)
    assert len(heard()) == 6


def test_each_type_of_a_statement_rings_its_own(q: Verbs, connect: Connect) -> None:
    many, one = waiting(q, 8, None, ["many"]), waiting(q, 1, None, ["one"])
    heard = rung(connect, many + one)
    for _ in range(3):
        q.session.execute("insert into pgqueue.jobs (job_type) values ('many'), ('one'), ('many')")
        q.enqueue_many({"job_type": "many"}, {"job_type": "one"}, {"job_type": "many"})
        got = heard()
        assert [channel for channel, payload in got if payload == bell("default", "one")] == one * 2
        assert len({channel for channel, _ in got} & set(many)) in range(2, 5)
        assert len(got) == 6


def test_jobs_that_are_due_later_ring_nobody_for_those_that_are_due(q: Verbs, connect: Connect) -> None:
    heard = rung(connect, waiting(q, 1, None, ["later"]))
    q.session.execute(
        "insert into pgqueue.jobs (job_type, scheduled_at) values ('now', null), ('later', now() + interval '1 hour')"
    )
    assert heard() == []


def test_a_row_that_is_written_anew_stays(q: Verbs, connect: Connect) -> None:
    """Its listener was gone when the sweep looked, and is another one by the time the row is to be deleted."""
    q.session.execute("select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, null, null, 1, '1')", [WORKER])
    wait_for_work = "select pgqueue.wait_for_work(%s, null, null, 'bell', null, %s)"
    q.session.execute(wait_for_work, [WORKER, 2**30])
    worker, process = connect(), connect().info.backend_pid
    with worker.transaction():
        worker.execute(wait_for_work, [WORKER, process])
        assert aside(q.sweep, "prune").result(10) == {"prune": 0}
    q.sweep("prune")
    assert q.rows("select listener from pgqueue.waiting") == [(process,)]


def test_whose_listener_is_gone_is_rung_no_more(q: Verbs, connect: Connect) -> None:
    listener = connect()
    worker_lives = "select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, null, null, 1, '1')"
    for worker, process in ((uuid.uuid4(), listener.info.backend_pid), (uuid.uuid4(), None)):
        q.session.execute(worker_lives, [worker])
        q.session.execute("select pgqueue.wait_for_work(%s, null, null, 'bell', null, %s)", [worker, process])
    q.sweep("prune")
    assert q.value("select count(*) from pgqueue.waiting") == 2
    process = listener.info.backend_pid
    listener.close()
    wait_until(lambda: not q.rows("select from pg_stat_activity where pid = %s", [process]))
    q.sweep("prune")
    assert q.rows("select listener from pgqueue.waiting") == [(None,)]


def test_odd_queue_names_ring_too(q: Verbs, connect: Connect) -> None:
    for name in ("q" * 63, "MyQueue", "a b;c'd\"e", "\N{ROCKET}" * 63, "%s"):
        (channel,) = waiting(q, 1, [name])
        heard = rung(connect, [channel])
        q.insert(queue=name)
        ((channel_rung, payload),) = heard()
        assert (channel_rung, json.loads(payload)) == (channel, [name, "t"])


def test_a_delayed_job_rings_when_it_is_due(q: Verbs, connect: Connect) -> None:
    q.freeze()
    heard = rung(connect, waiting(q, 3))
    q.enqueue(delay=timedelta(minutes=1))
    assert heard() == []
    q.advance(minutes=2)
    q.session.execute("delete from pgqueue.workers")
    assert q.sweep("due") == {"due": 1}
    assert len(heard()) == 1


def test_whatever_makes_a_job_pending_rings(q: Verbs, connect: Connect, subtests: pytest.Subtests) -> None:
    q.freeze()
    heard = rung(connect, waiting(q, 3))
    q.insert()
    (job,) = q.claim()
    heard()
    with subtests.test("release"):
        q.release([job])
        assert len(heard()) == 1
    with subtests.test("lease lost"):
        q.claim()
        q.advance(hours=1)
        q.sweep("leases")
        assert len(heard()) == 1
    with subtests.test("retry of a failed job"):
        q.fail(q.claim()[0])
        q.retry(job.job_id)
        assert len(heard()) == 1
    with subtests.test("retry of a dead letter"):
        q.fail(q.claim()[0], retryable=False)
        assert heard() == []
        q.retry(job.job_id)
        assert len(heard()) == 1
    with subtests.test("retry in bulk"):
        q.fail(q.claim()[0], retryable=False)
        q.call("retry_dead_letters")
        assert len(heard()) == 1
    with subtests.test("resume"):
        q.call("pause", "default")
        q.call("resume", "default")
        assert len(heard()) == 3
        q.call("resume", "default")
        assert heard() == []
    with subtests.test("next of a key"):
        q.complete(q.claim())
        q.insert(ordering_key="o")
        assert len(heard()) == 1
        q.insert(ordering_key="o")
        assert heard() == []
        q.complete(q.claim())
        assert len(heard()) == 1


def test_a_rolled_back_or_refused_enqueue_rings_nobody(q: Verbs, connect: Connect) -> None:
    heard = rung(connect, waiting(q, 3))
    with q.session.transaction(force_rollback=True):
        q.insert()
    with pytest.raises(psycopg.Error):
        q.insert(priority=9)
    assert heard() == []


def test_a_silent_session_rings_nobody_and_may_prepare(q: Verbs, connect: Connect) -> None:
    heard = rung(connect, waiting(q, 3))
    q.session.execute("select pgqueue.watch(%s, '1 hour')", [WATCHER])
    q.session.execute("set pgqueue.wake = off")
    q.insert()
    assert heard() == []
    with q.session.transaction():
        q.insert()
        q.fill(10)
        q.insert(idempotency_key="k", ordering_key="o")
        with pytest.raises(ZeroDivisionError), q.session.transaction():
            raise ZeroDivisionError
    if int(q.value("show max_prepared_transactions")) > 0:
        q.session.execute("begin")
        q.insert()
        q.session.execute("prepare transaction 'one'")
        q.session.execute("commit prepared 'one'")
        q.session.execute("set pgqueue.wake = on")
        q.session.execute("begin")
        q.insert()
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            q.session.execute("prepare transaction 'two'")
        q.session.execute("rollback")
    assert heard() == []


def test_the_worker_of_a_running_job_hears_of_a_cancel(q: Verbs, connect: Connect) -> None:
    job = q.start()
    ear = Ear(connect, f"pgqueue_wake_{WORKER.hex}")
    q.cancel(job.job_id)
    assert ear.heard() == [(f"pgqueue_wake_{WORKER.hex}", f"cancel {job.job_id}")]


def test_registering_again_changes_nothing_or_what_is_asked(q: Verbs) -> None:
    q.session.execute("select pgqueue.wait_for_work(%s, '{a}', null, 'bell')", [WORKER])
    before = q.rows("select ctid, * from pgqueue.waiting")
    q.session.execute("select pgqueue.wait_for_work(%s, '{a}', null, 'bell')", [WORKER])
    assert q.rows("select ctid, * from pgqueue.waiting") == before
    q.session.execute("select pgqueue.wait_for_work(%s, '{b}', '{t}', 'bell')", [WORKER])
    assert q.rows("select queues, job_types from pgqueue.waiting") == [(["b"], ["t"])]


def test_open_writers_are_those_whose_jobs_may_still_come(q: Verbs, connect: Connect) -> None:
    assert q.value("select pgqueue.open_writers()") == []
    writer, reader = connect(autocommit=False), connect(autocommit=False)
    reader.execute("select count(*) from pgqueue.jobs")
    writer.execute("insert into pgqueue.jobs (job_type) values ('t')")
    writers = q.value("select pgqueue.open_writers()")
    assert len(writers) == 1
    assert q.value("select pgqueue.writers_open(%s)", [writers]) is True
    q.insert()
    assert q.value("select pgqueue.writers_open(%s)", [writers]) is True
    writer.commit()
    writer.execute("insert into pgqueue.jobs (job_type) values ('t')")
    assert q.value("select pgqueue.writers_open(%s)", [writers]) is False
    assert q.value("select pgqueue.writers_open('{}')") is False


@pytest.mark.parametrize(("room", "bells"), [(9, 0), (2, 1)])
def test_whoever_claims_what_it_sets_free_wakes_others_for_the_rest(
    q: Verbs, connect: Connect, room: int, bells: int
) -> None:
    keys = ("a", "b", "c")
    for key in keys * 2:
        q.insert(ordering_key=key)
    heads = q.claim(3)
    heard = rung(connect, waiting(q, 5))
    rows = q.rows(
        "select r.accepted, (r.claimed).ordering_key from pgqueue.complete_and_claim(%s, %s, %s, %s, null, %s) r",
        [WORKER, [job.job_id for job in heads], [job.attempts for job in heads], [Jsonb(n) for n in range(3)], room],
    )
    assert {row.ordering_key for row in rows} == set(keys[:room])
    assert set(rows[0].accepted) == {job.job_id for job in heads}
    assert [row.accepted for row in rows[1:]] == [None] * (len(rows) - 1)
    assert len(heard()) == bells
    assert {q.job(job.job_id).status for job in heads} == {"completed"}


def test_a_completion_with_nothing_to_claim_says_what_was_accepted(q: Verbs) -> None:
    job = q.start(ordering_key="k")
    call = "select accepted, claimed is null as none from pgqueue.complete_and_claim(%s, %s, %s, null, null, 5)"
    (row,) = q.rows(call, [WORKER, [job.job_id], [job.attempts]])
    assert row.accepted == [job.job_id]
    assert row.none
    (row,) = q.rows(call, [WORKER, [job.job_id], [job.attempts]])
    assert row.accepted == []
    assert row.none


@pytest.mark.parametrize("channel", ["w" * 64, "é" * 32, "", None])
def test_no_worker_waits_where_no_bell_can_ring(q: Verbs, channel: str | None) -> None:
    with refused("PQ422", "channel must have 1 to 63 bytes", column="channel"):
        q.session.execute("select pgqueue.wait_for_work(%s, null, null, %s)", [WORKER, channel])
    assert q.insert()
