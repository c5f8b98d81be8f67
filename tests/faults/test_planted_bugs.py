"""The checker finds what is wrong: the same steps on the queue as it is, and on one with a bug planted in its SQL."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pgqueue.bench.chaos import ledger
from pgqueue.bench.chaos.checker import Terms
from tests.conftest import Connect
from tests.faults.planting import LEASE, Bug, Change, Hand, plant
from tests.python.running import eventually

HELD = 42
PROMOTE = "perform pgqueue.promote_keys(array[j.queue::text], array[j.ordering_key::text]);"


def a_zombie_completes(hand: Hand) -> None:
    hand.enqueue()
    zombie = hand.take()
    hand.lose_leases()
    heir = hand.take()
    hand.finish(zombie)
    hand.finish(heir)


def a_zombie_fails(hand: Hand) -> None:
    hand.enqueue()
    zombie = hand.take()
    hand.lose_leases()
    heir = hand.take()
    hand.fail(zombie)
    hand.finish(heir)
    hand.work()


def a_finish_meets_the_reaper(hand: Hand) -> None:
    hand.set_queue(max_lost=0)
    hand.enqueue()
    job = hand.take()
    hand.rows("select pg_sleep(%s)", hand.terms.lease + 0.05)
    hand.rows("select pg_advisory_lock(%s)", HELD)
    other = hand.connect()
    sweep = threading.Thread(target=lambda: hand.rows("select * from pgqueue.sweep('leases')", session=other))
    sweep.start()
    waits = "select 1 from pg_locks where locktype = 'advisory' and not granted and pid = %s"
    eventually(lambda: hand.rows(waits, other.info.backend_pid) or not sweep.is_alive())
    hand.finish(job)
    hand.rows("select pg_advisory_unlock(%s)", HELD)
    sweep.join()


def a_head_fails_once(hand: Hand) -> None:
    for _ in range(2):
        hand.enqueue("ordered", key="k")
    hand.fail(hand.take())
    for job in hand.claim():
        hand.finish(hand.start(job))
    hand.work()


def three_of_a_key(hand: Hand) -> None:
    for _ in range(3):
        hand.enqueue("ordered", key="k")
    hand.work()


def a_long_line(hand: Hand) -> None:
    for _ in range(3):
        hand.enqueue()
    hand.rows("select setval('pgqueue.jobs_seq', 5000)")
    for _ in range(4):
        hand.sweep()
    hand.work(turns=4)


def a_late_commit(hand: Hand) -> None:
    hand.enqueue()
    hand.work()
    late = hand.connect()
    with late.transaction():
        hand.enqueue(session=late)
        hand.rows("select setval('pgqueue.jobs_seq', 5000)")
        for _ in range(4):
            hand.sweep()
    hand.work(turns=4)


def always_fails(hand: Hand) -> None:
    hand.enqueue("doomed", retries=1)
    hand.work(turns=8)


def a_loss_and_failures(hand: Hand) -> None:
    hand.enqueue("doomed", retries=1)
    hand.take()
    hand.lose_leases()
    hand.work()


def a_worker_that_dies(hand: Hand) -> None:
    """With one of the two jobs that it had claimed at once done."""
    hand.enqueue()
    hand.enqueue()
    done, _ = hand.claim(2)
    hand.start(done)
    hand.finish(done)
    hand.lose_leases()
    hand.work()


def a_cancel_of_what_runs(hand: Hand) -> None:
    hand.enqueue()
    job = hand.take()
    hand.cancel(job.job_id)
    hand.finish(job)


def sent_twice(hand: Hand) -> None:
    n = hand.enqueue()
    hand.enqueue(n=n)
    hand.work()


def given_back(hand: Hand) -> None:
    hand.enqueue()
    (job,) = hand.claim()
    hand.release(job)
    hand.work()


def a_finished_job_is_retried(hand: Hand) -> None:
    hand.enqueue()
    job = hand.take()
    hand.finish(job)
    hand.observe()
    with contextlib.suppress(psycopg.Error):
        hand.rows("select pgqueue.retry(%s)", job.job_id)
    hand.work()


def a_sweep_while_it_runs(hand: Hand) -> None:
    hand.enqueue()
    job = hand.take()
    hand.sweep("leases")
    hand.finish(job)
    hand.work()


def counts_come_twice(hand: Hand) -> None:
    hand.enqueue()
    (job,) = hand.claim(worker=(worker := uuid4()))
    hand.session.execute(
        "insert into pgqueue.workers (worker_id, name, hostname, pid, concurrency) values (%s, 'w', 'h', 1, 1)",
        [worker],
    )
    hand.finish(hand.start(job))
    for _ in range(2):
        hand.count(job, batch=1)


def accepted_and_killed(hand: Hand) -> None:
    for _ in range(30):
        hand.enqueue()


def bug(
    name: str, rules: str, scenario: Callable[[Hand], None], *changes: Change, statements: tuple[str, ...] = ()
) -> Bug:
    return Bug(name, frozenset(rules.split()), scenario, changes, statements)


BUGS = [
    bug(
        "complete takes any attempt", "result", a_zombie_completes,
        Change("complete", [
            ("any (complete.job_ids) and j.worker_id = complete.worker_id", "any (complete.job_ids)"),
            ("j.attempts = (select g.attempts from given g)[width_bucket(j.job_id, (select g.job_ids from given g))]",
             "true"),
        ]),
    ),
    bug(
        "fail takes any attempt", "vain", a_zombie_fails,
        Change("held", [("and l.worker_id = held.worker_id and l.attempts = held.attempt", "")]),
    ),
    bug(
        "the reaper does not look again", "twice", a_finish_meets_the_reaper,
        Change("sweep_leases", [
            (" limit max_jobs for update skip locked", " limit max_jobs"),
            ("j := r.job;", f"perform pg_advisory_xact_lock({HELD}); j := r.job;"),
        ]),
    ),
    bug(
        "the reaper comes early", "early", a_sweep_while_it_runs,
        Change("sweep_leases", [
            ("l.lease_expires_at < pgqueue.clock()", "l.lease_expires_at < pgqueue.clock() + interval '1 hour'"),
        ]),
        Change("look_at_claims", [
            ("c.look_at < pgqueue.clock()", "true"), (" filter (where l.lease_expires_at < pgqueue.clock())", ""),
        ]),
    ),
    bug(
        "a claim is not written down", "stuck", a_worker_that_dies,
        Change("claim", [("t.ids);\n  return query", "'{}');\n  return query")]),
    ),
    bug(
        "a lost lease is not counted", "charged", a_loss_and_failures,
        Change("sweep_leases", [("j.lost := least(j.lost, 2147483646) + 1;", "j.lost := j.lost;")]),
    ),
    bug(
        "a failure frees its ordering key", "order", a_head_fails_once,
        Change("fail", [
            ("errors = j.errors\n   where l.job_id = j.job_id;",
             f"errors = j.errors\n   where l.job_id = j.job_id; {PROMOTE}"),
        ]),
        Change("promote_keys", [("(l.in_line or l.due_at is not null)", "false")]),
        statements=('drop index pgqueue."ordering_key must have only one job that does not wait"',),
    ),
    bug(
        "the last of a key comes first", "order", three_of_a_key,
        Change("promote_keys", [("order by n.seq limit 1", "order by n.seq desc limit 1")]),
    ),
    bug(
        "the cursor jumps over what waits", "stuck", a_long_line,
        Change("sweep_cursors", [
            ("least(coalesce(n.lowest, ceiling, c.low_seq), coalesce(ceiling, c.low_seq)) as new_low",
             "coalesce(ceiling, c.low_seq) as new_low"),
        ]),
    ),
    bug(
        "the cursor does not wait for writers", "stuck", a_late_commit,
        Change("open_writers", [
            ("array_agg(distinct l.virtualtransaction)", "(array_agg(distinct l.virtualtransaction))[1:0]"),
        ]),
    ),
    bug(
        "a retry is not charged", "charged", always_fails,
        Change("fail", [(" or j.attempts - j.lost > j.max_retries then", " then")]),
    ),
    bug(
        "a finish overwrites a cancel", "cancelled", a_cancel_of_what_runs,
        Change("complete", [
            ("where d.cancel_requested_at is null", "where true"),
            ("where c.cancel_requested_at is not null", "where false"),
        ]),
    ),
    bug(
        "a key is taken twice", "twice", sent_twice,
        Change("take_keys", [
            ("where k.expires_at <= pgqueue.clock() or (again and k.job_id = excluded.job_id)", "where true"),
        ]),
    ),
    bug(
        "a release drops its job", "missing", given_back,
        Change("release", [
            ("perform pgqueue.say_released(",
             "delete from pgqueue.jobs_live l where l.job_id = j.job_id; perform pgqueue.say_released("),
        ]),
    ),
    bug(
        "a retry takes back what is completed", "changed", a_finished_job_is_retried,
        Change("retry", [("delete from pgqueue.jobs_dead_letter d", "delete from pgqueue.jobs_completed d")]),
    ),
    bug(
        "counts are taken twice", "counters", counts_come_twice,
        Change("add_counts", [("w.counted < add_counts.batch", "true")]),
    ),
]  # fmt: skip

UNFLUSHED = bug(
    "accepted before it is written", "missing", accepted_and_killed,
    Change("jobs_arrived", [
        (
            "begin\n  -- One look at the first row",
            "begin\n  perform set_config('synchronous_commit', 'off', true);\n  -- One look at the first row",
        ),
    ]),
    statements=("alter system set wal_writer_delay = '10s'", "select pg_reload_conf()"),
)  # fmt: skip


@pytest.fixture
def hand(tmp_path: Path, connect: Connect, request: pytest.FixtureRequest) -> Hand:
    planted: Bug = request.param
    max_lost = 0 if planted.scenario is a_finish_meets_the_reaper else 5
    return Hand(tmp_path, connect, Terms(LEASE, max_lost))


@pytest.mark.parametrize(
    ("hand", "planted"), [(one, one) for one in BUGS], indirect=["hand"], ids=[one.name for one in BUGS]
)
def test_a_planted_bug_is_found(hand: Hand, planted: Bug) -> None:
    plant(hand.session, planted)
    planted.scenario(hand)
    found = {violation.rule for violation in hand.findings()}
    assert found & planted.rules, f"found only {sorted(found)}"


@pytest.mark.parametrize(
    ("hand", "planted"), [(one, one) for one in BUGS], indirect=["hand"], ids=[one.name for one in BUGS]
)
def test_the_same_steps_without_it_are_clean(hand: Hand, planted: Bug) -> None:
    planted.scenario(hand)
    assert hand.findings() == []


@pytest.mark.parametrize("with_bug", [True, False])
def test_what_was_accepted_outlives_the_server(tmp_path: Path, own_server: Any, with_bug: bool) -> None:
    opened = contextlib.ExitStack()

    def connect() -> psycopg.Connection[Any]:
        return opened.enter_context(contextlib.closing(psycopg.connect(own_server.dsn, autocommit=True)))

    hand = Hand(tmp_path, connect, Terms(LEASE, 5))
    if with_bug:
        plant(hand.session, UNFLUSHED)
    UNFLUSHED.scenario(hand)
    own_server.kill()
    own_server.start()
    hand.session = connect()
    hand.work()
    found = {violation.rule for violation in hand.findings()}
    opened.close()
    assert found == (UNFLUSHED.rules if with_bug else set())


def test_what_never_was_is_found(tmp_path: Path, connect: Connect) -> None:
    hand = Hand(tmp_path, connect, Terms(LEASE, 5))
    hand.enqueue()
    job = hand.take()
    hand.start(job)
    hand.finish(job)
    hand.session.execute("insert into pgqueue.jobs (job_type, payload) values ('quick', '{\"n\": 77}')")
    with (tmp_path / "tasks-torn.ledger").open("w") as torn:
        torn.write('["start",1.0,"')
    rules = {violation.rule for violation in hand.findings()}
    assert {"torn", "uninvited", "starts", "stuck"} <= rules


def test_a_lost_attempt_may_end_late(tmp_path: Path, connect: Connect) -> None:
    hand = Hand(tmp_path, connect, Terms(LEASE, 5))
    hand.enqueue("ordered", key="k")
    zombie = hand.take()
    hand.lose_leases()
    hand.finish(hand.take())
    hand.enqueue("ordered", key="k")
    hand.finish(hand.take())
    hand.end(zombie, ledger.RETURNED)
    assert hand.findings() == []
