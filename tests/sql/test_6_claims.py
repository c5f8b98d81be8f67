"""The ledger of claims: every processing job is named there, for as long as it runs, and no index is written for it."""

from datetime import timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Verbs, refused

UPDATES = """select pg_stat_get_xact_tuples_updated(c.oid) as updated, pg_stat_get_xact_tuples_hot_updated(c.oid) as hot
               from pg_class c where c.oid = 'pgqueue.jobs_live'::regclass"""


def named(q: Verbs) -> list[Any]:
    return [row.id for row in q.rows("select unnest(job_ids) as id from pgqueue.claims order by id")]


@pytest.mark.parametrize("key", [None, "k"])
def test_a_claim_a_heartbeat_and_progress_write_no_entry_in_an_index(
    q: Verbs, connect: Connect, key: str | None
) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, payload, ordering_key)"
        " select 't', jsonb_build_object('n', i), %s || i from generate_series(1, 200) i",
        [key],
    )
    worker = Verbs(connect(autocommit=False))
    # Few enough that their page has room left for those of them that are written once more.
    jobs = worker.claim(15)
    assert len(jobs) == 15
    assert worker.heartbeat(jobs[:3], lease=timedelta(minutes=1)) == {}
    assert worker.set_progress(jobs[0], 50)
    assert worker.one(UPDATES) == (19, 19)
    worker.session.rollback()


def test_what_runs_is_named_until_it_ends(q: Verbs) -> None:
    q.freeze()
    q.fill(5)
    jobs = q.claim(5, lease=timedelta(minutes=1))
    assert named(q) == sorted(job.job_id for job in jobs)
    q.complete(jobs[:2])
    q.advance(seconds=2)
    q.sweep("leases")
    assert named(q) == sorted(job.job_id for job in jobs[2:])
    q.complete(jobs[2:4])
    q.release(jobs[4:])
    q.advance(minutes=2)
    assert q.sweep("leases") == {"leases": 0}
    assert named(q) == []


def test_a_job_that_is_claimed_again_is_looked_at_for_its_new_lease(q: Verbs) -> None:
    q.freeze()
    job = q.start()
    q.release([job])
    q.advance(seconds=0.5)
    (again,) = q.claim(1, OTHER, lease=timedelta(minutes=10))
    for seconds in (1, 1, 30, 500):
        q.advance(seconds=seconds)
        assert q.sweep("leases") == {"leases": 0}
        assert job.job_id in named(q)
    q.advance(seconds=100)
    assert q.sweep("leases") == {"leases": 1}
    assert (q.job(again.job_id).status, q.job(again.job_id).lost) == ("pending", 1)


def test_leases_that_nobody_looks_at_are_found_in_the_end(q: Verbs) -> None:
    """Somebody edited jobs_live itself, past the trigger that says so, or took away a claim."""
    q.freeze()
    q.fill(2)
    held, stray = q.claim(2, lease=timedelta(hours=20))
    q.session.execute("delete from pgqueue.claims")
    q.sweep()
    q.session.execute(
        "update pgqueue.jobs_live set lease_expires_at = pgqueue.clock() - interval '5 minutes' where job_id = %s",
        [stray.job_id],
    )
    for _ in range(3):
        q.advance(minutes=11)
        q.insert(queue="elsewhere")
        q.sweep()
    assert (q.job(held.job_id).status, q.job(stray.job_id).status) == ("processing", "pending")


def test_a_part_of_the_table_at_a_time_is_looked_through_for_strays(q: Verbs) -> None:
    q.fill(500)
    jobs = q.claim(500)
    q.session.execute("delete from pgqueue.claims")
    q.session.execute("update pgqueue.jobs_live set lease_expires_at = pgqueue.clock() - interval '1 hour'")
    pages = q.value("select pg_relation_size('pgqueue.jobs_live') / current_setting('block_size')::int")
    assert pages > 6
    for _ in range((pages + 1) // 2):
        q.session.execute("select pgqueue.note_strays(2)")
    assert set(named(q)) == {job.job_id for job in jobs}
    assert q.value("select stray_page from pgqueue.sweep_state") == 0


def test_many_lost_claims_are_given_back_at_once(q: Verbs) -> None:
    """A worker of single claims dies: which of its jobs had begun is judged by all of them."""
    q.freeze()
    q.session.execute("select pgqueue.worker_started(%s, 'w-1', 'host', 42, null, null, null, null, 4, '1')", [WORKER])
    q.fill(60)
    for _ in range(60):
        q.claim(1)
    q.advance(minutes=1)
    assert q.sweep("leases") == {"leases": 60}
    assert q.value("select count(*) from pgqueue.jobs_live where lost = 1") == 4


def test_what_ended_is_named_for_about_as_long_as_it_ran(q: Verbs) -> None:
    """However long its lease: what counts running jobs looks at all that are named."""
    q.freeze()
    q.fill(5)
    jobs = q.claim(5, lease=timedelta(hours=5))
    for seconds in (2, 2, 2):
        q.advance(seconds=seconds)
        q.sweep("leases")
    q.complete(jobs[1:])
    q.advance(seconds=10)
    q.sweep("leases")
    assert named(q) == [jobs[0].job_id]
    q.complete(jobs[:1])
    q.advance(seconds=20)
    q.sweep("leases")
    assert named(q) == []


def test_lost_jobs_that_somebody_holds_hold_up_no_others(q: Verbs, connect: Connect) -> None:
    q.freeze()
    held = []
    for _ in range(30):
        q.fill(10)
        held += q.claim(10)[:1]
    q.fill(1)
    (last,) = q.claim(1)
    q.advance(minutes=1)
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.jobs_live where job_id = any (%s) for update", [[job.job_id for job in held]])
    assert q.swept("leases", 1000) == 30 * 9 + 1
    assert q.job(last.job_id).status == "pending"
    assert {q.job(job.job_id).status for job in held} == {"processing"}
    holder.rollback()
    assert q.swept("leases", 1000) == 30
    q.advance(seconds=2)
    q.sweep("leases")
    assert named(q) == []


def test_many_claims_that_are_late_at_one_moment_are_all_looked_at(q: Verbs) -> None:
    q.freeze()
    q.fill(130)
    for _ in range(130):
        q.claim(1)
    q.advance(minutes=1)
    assert [q.swept("leases", 50) for _ in range(4)] == [50, 50, 30, 0]


def test_a_time_at_the_end_of_all_times_stops_no_sweep(q: Verbs) -> None:
    q.freeze()
    strange, job = q.start(), q.start()
    with refused("PQ409", "started_at", column="started_at"):
        q.session.execute("update pgqueue.jobs set started_at = '-infinity' where job_id = %s", [strange.job_id])
    q.session.execute(
        "update pgqueue.jobs set started_at = '294276-12-31 00:00+00' where job_id = %s", [strange.job_id]
    )
    q.advance(minutes=1)
    assert q.sweep("timeouts") == {"timeouts": 0}
    assert q.sweep("leases") == {"leases": 2}
    assert q.job(job.job_id).status == "pending"


def test_shards_are_found_though_their_index_is_not_for_everybody_yet(q: Verbs, connect: Connect) -> None:
    """It was made while claims went on and somebody's snapshot was open."""
    q.fill(300)
    old = connect(autocommit=False)
    old.execute("set transaction isolation level repeatable read")
    old.execute("select count(*) from pgqueue.jobs")
    q.claim(50)
    assert q.call_value("index_shards")
    assert q.value("select indcheckxmin from pg_index where indexrelid = 'pgqueue.jobs_live_pending_shard'::regclass")
    found = q.claim(300, shards=list(range(32)))
    assert found
    assert {job.shard < 32 for job in found} == {True}
    old.rollback()
    assert len(q.claim(300, shards=list(range(32, 64)))) == 250 - len(found)


def overdue(q: Verbs, **columns: Any) -> Any:
    """A job that is past its timeout, with a lease of an hour."""
    q.insert(**columns)
    (job,) = q.claim(1, lease=timedelta(hours=1))
    return job


def test_overdue_jobs_that_somebody_holds_hold_up_no_others(q: Verbs, connect: Connect) -> None:
    q.freeze()
    held = [overdue(q, timeout_ms=1000) for _ in range(120)]
    q.advance(seconds=1)
    other = overdue(q, timeout_ms=1000)
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.jobs_live where job_id = any (%s) for update", [[job.job_id for job in held]])
    for _ in range(3):
        q.advance(seconds=10)
        q.sweep()
    assert [error["type"] for error in q.job(other.job_id).errors] == ["TimeoutError"]
    assert {q.job(job.job_id).status for job in held} == {"processing"}
    holder.rollback()
    for _ in range(3):
        q.advance(seconds=1)
        q.sweep()
    assert [len(q.job(job.job_id).errors) for job in held] == [1] * 120


def test_a_lost_job_that_somebody_holds_leaves_the_timeouts_of_its_claim(q: Verbs, connect: Connect) -> None:
    q.freeze()
    q.fill(1, timeout_ms=900_000)
    q.fill(1, timeout_ms=2000)
    q.fill(1, timeout_ms=15_000)
    lost, soon, later = q.claim(3, lease=timedelta(seconds=2))
    q.heartbeat([soon, later], lease=timedelta(hours=1))
    holder = connect(autocommit=False)
    holder.execute("select from pgqueue.jobs_live where job_id = %s for update", [lost.job_id])
    for _ in range(4):
        q.advance(seconds=4)
        q.sweep()
    assert [q.job(job.job_id).status for job in (lost, soon, later)] == ["processing", "failed", "processing"]
    for _ in range(4):
        q.advance(seconds=4)
        q.sweep()
    assert [error["type"] for error in q.job(later.job_id).errors] == ["TimeoutError"]
    holder.rollback()


def test_claims_of_thousands_are_given_back_in_calls_of_many(q: Verbs) -> None:
    q.freeze()
    for _ in range(6):
        q.fill(5000)
        assert len(q.claim(5000)) == 5000
    q.advance(minutes=1)
    # A call ends by its time: one that the machine held up moves few.
    assert all(q.sweep("leases")["leases"] for _ in range(3))
    assert q.swept("leases", 2000) == 2000


@pytest.mark.parametrize("what", ["job", "queue"])
def test_a_timeout_that_is_lowered_is_noticed(q: Verbs, what: str) -> None:
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, timeout_ms) values ('default', 900000)")
    job = overdue(q)
    for seconds in (2, 2, 4, 8, 30):
        q.advance(seconds=seconds)
        q.sweep()
    if what == "job":
        q.session.execute("update pgqueue.jobs set timeout_ms = 1000 where job_id = %s", [job.job_id])
    else:
        q.session.execute("update pgqueue.queues set timeout_ms = 1000")
    assert q.sweep()["timeouts"] == 1
    assert q.job(job.job_id).status == "failed"


def test_an_edit_of_a_queue_that_has_not_committed_hides_no_lost_lease(q: Verbs, connect: Connect) -> None:
    q.session.execute("insert into pgqueue.queues (name) values ('default')")
    q.fill(2)
    q.claim(2, lease=timedelta(minutes=1))
    editor = connect(autocommit=False)
    editor.execute("update pgqueue.queues set timeout_ms = 1000")
    q.freeze()
    q.advance(minutes=2)
    assert q.swept("leases", 2147483647) == 2
    editor.rollback()


@pytest.mark.parametrize(
    ("failed_ttl", "base_delay_ms", "waits"), [("7 days", 1, 30), ("20 s", 1, 19), ("7 days", 60000, 60)]
)
def test_an_attempt_that_a_live_worker_did_not_end_has_time_to_end(
    q: Verbs, failed_ttl: str, base_delay_ms: int, waits: int
) -> None:
    q.freeze()
    policy = Jsonb({"base_delay_ms": base_delay_ms, "max_delay_ms": 60000, "jitter": False})
    q.session.execute("insert into pgqueue.queues (name, failed_ttl) values ('default', %s)", [failed_ttl])
    job = overdue(q, timeout_ms=1000, retry_policy=policy)
    for seconds in (2, 2, 4, 8):
        q.advance(seconds=seconds)
        q.sweep()
    failed = q.job(job.job_id)
    assert (failed.status, (failed.due_at - failed.updated_at).total_seconds()) == ("failed", waits)
    q.advance(seconds=waits)
    q.sweep()
    assert q.job(job.job_id).status == "pending"
