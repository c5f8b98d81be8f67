"""Claims: shares, order, filters, queues, pauses; and heartbeats."""

from collections import Counter
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from tests.conftest import Connect
from tests.sql.plans import touched
from tests.sql.verbs import OTHER, WORKER, Row, Verbs, refused

SHARES = {0: 8 / 15, 1: 4 / 15, 2: 2 / 15, 3: 1 / 15}


def numbers(jobs: list[Row]) -> list[int]:
    return [job.payload["n"] for job in jobs]


def by_priority(jobs: list[Row]) -> list[int]:
    counts = Counter(job.priority for job in jobs)
    return [counts[priority] for priority in range(4)]


def fill_all(q: Verbs, jobs: int, **columns: Any) -> None:
    for priority in range(4):
        q.fill(jobs, priority=priority, **columns)


# What a claim does to a job


def test_a_claim_begins_an_attempt_under_a_lease(q: Verbs) -> None:
    now = q.freeze()
    job_id = q.insert()
    before = q.job(job_id)
    later = q.advance(seconds=5)
    (job,) = q.claim()
    assert job == q.job(job_id)
    changed = {
        "status": "processing", "attempts": 1, "worker_id": WORKER, "lease_expires_at": later + timedelta(seconds=30),
        "started_at": later, "updated_at": later,
    }  # fmt: skip
    assert job == before._replace(**changed)
    assert job.created_at == now


def test_the_lease_is_the_callers_or_the_queues(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute("insert into pgqueue.queues (name, lease_ms) values ('slow', 120000)")
    for queue, lease, seconds in (("slow", None, 120), ("slow", 7, 7), ("default", None, 30), ("default", 900, 900)):
        q.insert(queue=queue)
        (job,) = q.claim(queues=[queue], lease=None if lease is None else timedelta(seconds=lease))
        assert job.lease_expires_at == now + timedelta(seconds=seconds)


def test_jobs_of_several_queues_have_each_its_lease(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute("insert into pgqueue.queues (name, lease_ms) values ('a', 1000), ('b', 2000)")
    for queue in "abc":
        q.fill(2, queue=queue)
    jobs = q.claim(6, queues=["a", "b", "c"])
    assert {job.queue: (job.lease_expires_at - now).seconds for job in jobs} == {"a": 1, "b": 2, "c": 30}


def test_a_claim_takes_at_most_what_is_asked(q: Verbs) -> None:
    q.fill(5)
    assert [len(q.claim(2)) for _ in range(4)] == [2, 2, 1, 0]
    q.fill(1)
    assert len(q.claim(2_147_483_647)) == 1


@pytest.mark.parametrize(("worker", "max_jobs"), [(None, 1), (WORKER, 0), (WORKER, -1), (WORKER, None)])
def test_a_claim_without_worker_or_number_is_refused(q: Verbs, worker: Any, max_jobs: Any) -> None:
    q.insert()
    with refused("PQ422", "worker_id", "max_jobs"):
        q.call("claim", worker, ["default"], max_jobs)


def test_jobs_held_by_another_session_are_passed_over(q: Verbs, connect: Connect) -> None:
    q.fill(3)
    q.session.execute("set lock_timeout = '1s'")
    first = Verbs(connect(autocommit=False))
    assert numbers(first.claim(1)) == [1]
    assert numbers(q.claim(2, OTHER)) == [2, 3]
    first.session.rollback()
    assert numbers(q.claim(2, OTHER)) == [1]


def test_only_pending_jobs_are_claimed(q: Verbs) -> None:
    q.freeze()
    for finish in (q.fail, q.snooze, q.cancel_attempt, lambda job: q.complete([job]), lambda job: job):
        finish(q.start())
    q.enqueue(delay=timedelta(minutes=1))
    assert q.claim(9, OTHER) == []


def test_an_expired_job_is_not_started_even_before_the_sweep(q: Verbs) -> None:
    now = q.freeze()
    expiring = q.insert(expires_at=now + timedelta(seconds=10))
    lasting = q.insert(expires_at=now + timedelta(days=3000))
    q.advance(seconds=10)
    assert [job.job_id for job in q.call("claim", WORKER, ["default"], 1)] == [lasting]
    assert q.call("claim", WORKER, ["default"], 9, job_types=["t"]) == []
    assert q.job(expiring).status == "pending"


# Shares


def test_a_claim_of_15_is_8_4_2_1(q: Verbs) -> None:
    fill_all(q, 1000)
    for _ in range(4):
        assert by_priority(q.claim(15)) == [8, 4, 2, 1]
    assert by_priority(q.claim(150)) == [80, 40, 20, 10]


@pytest.mark.parametrize("size", [1, 3, 7])
def test_small_claims_come_out_even(q: Verbs, size: int) -> None:
    for priority, share in SHARES.items():
        q.fill(int(1500 * size * share) + 200, priority=priority)
    q.session.execute(
        f"do $$ begin for i in 1 .. 1500 loop"
        f"  perform pgqueue.claim('{WORKER}', '{{default}}', {size}); commit;"
        f" end loop; end $$"
    )
    taken = q.rows("select priority, count(*) as jobs from pgqueue.jobs where status = 'processing' group by 1")
    assert sum(row.jobs for row in taken) == 1500 * size
    for row in taken:
        assert row.jobs == pytest.approx(1500 * size * SHARES[row.priority], rel=0.05)


def test_shares_deal_out_all_that_is_wanted_and_come_out_exact_over_a_turn(q: Verbs) -> None:
    for weights in ([8, 4, 2, 1], [1, 1, 1, 1], [100, 0, 0, 0], [0, 0, 0, 7], [3, 0, 5, 0], [100, 99, 98, 97]):
        total = sum(weights)
        rows = q.rows(
            "select wanted, array_agg((select sum(n) from unnest(s.got) n)) as dealt,"
            "       array[sum(got[1]), sum(got[2]), sum(got[3]), sum(got[4])] as sums,"
            "       min(got[1]) as least, max(got[1]) as most"
            "  from unnest(array[1, 2, 3, 7, 14, 15, 16, 31, 400]) wanted"
            " cross join generate_series(%(total)s * 3, %(total)s * 4 - 1) tick"
            " cross join lateral (select pgqueue.shares(%(weights)s::smallint[], wanted, tick) as got) s"
            " group by wanted",
            {"weights": weights, "total": total},
        )
        assert len(rows) == 9
        for row in rows:
            assert set(row.dealt) == {row.wanted}
            assert [int(n) for n in row.sums] == [weight * row.wanted for weight in weights]
            assert row.most - row.least <= row.wanted % total


def test_no_priority_comes_in_a_long_run(q: Verbs) -> None:
    dealt = q.value(
        "select array_agg(array_position(pgqueue.shares('{8,4,2,1}', 1, tick), 1) order by tick)"
        "  from generate_series(0, 149) tick"
    )
    for start in range(len(dealt) - 5):
        assert len(set(dealt[start : start + 5])) > 1
    for priority in (1, 2, 3, 4):
        seen = [n for n, p in enumerate(dealt) if p == priority]
        assert max(b - a for a, b in pairwise(seen)) <= 30


@pytest.mark.parametrize("queues", [2, 3, 4])
def test_each_of_several_queues_has_its_shares(q: Verbs, queues: int) -> None:
    """A worker of three queues looks first at every third tick's queue."""
    names = [f"q{n}" for n in range(queues)]
    for name in names:
        fill_all(q, 400, queue=name)
    q.session.execute(
        f"do $$ begin for i in 1 .. {300 * queues} loop"
        f"  perform pgqueue.claim('{WORKER}', '{{{','.join(names)}}}', 1); commit;"
        f" end loop; end $$"
    )
    taken = q.rows(
        "select queue, priority, count(*) as jobs from pgqueue.jobs where status = 'processing' group by 1, 2"
    )
    assert len(taken) == 4 * queues
    for row in taken:
        assert row.jobs == pytest.approx(300 * SHARES[row.priority], rel=0.25)


def test_shares_without_takers_go_to_the_highest_that_waits(q: Verbs) -> None:
    q.fill(100, priority=1)
    q.fill(100, priority=3)
    assert by_priority(q.claim(15)) == [0, 14, 0, 1]
    q.fill(2, priority=0)
    assert by_priority(q.claim(15)) == [2, 12, 0, 1]


def test_a_claim_is_filled_whenever_enough_waits(q: Verbs) -> None:
    for priority, jobs in ((0, 3), (1, 0), (2, 40), (3, 5)):
        q.fill(jobs, priority=priority) if jobs else None
    assert len(q.claim(30)) == 30
    assert len(q.claim(30)) == 18


@pytest.mark.parametrize("types", [None, ["x"]])
def test_what_other_queues_leave_goes_to_those_that_have_more(q: Verbs, types: list[str] | None) -> None:
    for number, jobs in enumerate((20, 1, 0)):
        for _ in range(jobs):
            q.enqueue("x", queue=f"q{number}")
            if types:
                q.enqueue("foreign", queue=f"q{number}")
    q.sweep()
    names = ["q0", "q1", "q2"]
    seen: list[Any] = []
    for size in (6, 6, 6, 3):
        claimed = q.claim(size, queues=names, job_types=types)
        assert len(claimed) == size
        assert [job.seq for job in claimed] == sorted(job.seq for job in claimed)
        seen += [job.job_id for job in claimed]
    assert len(set(seen)) == 21
    assert q.claim(9, queues=names, job_types=types) == []


def test_twenty_low_jobs_under_an_endless_critical_load_all_start(q: Verbs) -> None:
    q.fill(20, priority=3)
    rounds = 0
    while q.value("select count(*) from pgqueue.jobs where priority = 3 and status = 'pending'"):
        q.fill(10, priority=0)
        q.complete(q.claim(10))
        rounds += 1
        assert rounds < 60
    assert rounds > 10


def test_the_queues_weights_are_used(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, weights) values ('default', '{1,1,1,0}')")
    fill_all(q, 100)
    assert by_priority(q.claim(30)) == [10, 10, 10, 0]
    while by_priority(q.claim(30))[3] == 0:
        pass
    assert q.rows("select from pgqueue.jobs where status = 'pending' and priority < 3") == []


def test_null_weights_are_strict_order(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, weights) values ('default', null)")
    fill_all(q, 10)
    assert [by_priority(q.claim(8)) for _ in range(6)] == [
        [8, 0, 0, 0], [2, 6, 0, 0], [0, 4, 4, 0], [0, 0, 6, 2], [0, 0, 0, 8], [0, 0, 0, 0]
    ]  # fmt: skip


def test_strict_order_holds_with_filters(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, weights) values ('default', null)")
    fill_all(q, 3, job_type="mine")
    fill_all(q, 3, job_type="foreign")
    assert by_priority(q.claim(8, job_types=["mine"], priorities=[1, 2, 3])) == [0, 3, 3, 2]


# Order


def test_first_in_first_out_within_a_priority(q: Verbs) -> None:
    q.fill(100)
    assert numbers(q.claim(40)) == list(range(1, 41))
    assert [number for _ in range(60) for number in numbers(q.claim())] == list(range(41, 101))


def test_claimed_jobs_come_in_order_of_priority_and_seq(q: Verbs) -> None:
    fill_all(q, 50)
    keys = [(job.priority, job.seq) for job in q.claim(150)]
    assert keys == sorted(keys)
    assert len({priority for priority, _ in keys}) == 4


def test_order_is_by_seq_also_after_vacuum_and_reuse_of_space(q: Verbs) -> None:
    q.fill(2000)
    q.complete(q.claim(1000))
    q.session.execute("vacuum pgqueue.jobs_live")
    q.session.execute(
        "insert into pgqueue.jobs (job_type, payload)"
        " select 't', jsonb_build_object('n', n) from generate_series(2001, 3000) n"
    )
    physical = q.value("select array_agg(seq order by ctid) from pgqueue.jobs_live where status = 'pending'")
    assert physical != sorted(physical)
    got: list[int] = []
    for _ in range(20):
        q.sweep("cursors")
        jobs = q.claim(100)
        got += numbers(jobs)
    assert got == list(range(1001, 3001))
    assert q.claim() == []


def test_released_and_lost_jobs_go_first_retried_and_delayed_ones_last(q: Verbs) -> None:
    q.freeze()
    q.fill(5)
    released, lost, failed, snoozed, dead = q.claim(5)
    q.enqueue(payload={"n": 6}, delay=timedelta(seconds=1))
    q.fail(dead, retryable=False)
    q.fail(failed)
    q.snooze(snoozed, timedelta(seconds=1))
    q.fill(1)
    q.release([released])
    q.advance(hours=1)
    q.sweep()
    q.retry(dead.job_id)
    order = [job.job_id for job in q.claim(9)]
    assert order[:2] == [released.job_id, lost.job_id]
    assert q.job(order[2]).attempts == 1
    assert order[2] not in (failed.job_id, snoozed.job_id, dead.job_id)
    assert set(order[3:6]) >= {failed.job_id, snoozed.job_id}
    assert order[-1] == dead.job_id


def test_jobs_that_are_due_together_keep_the_order_of_their_times(q: Verbs) -> None:
    q.freeze()
    for seconds in (5, 1, 4, 2, 3):
        q.enqueue(payload={"n": seconds}, delay=timedelta(seconds=seconds))
    q.advance(minutes=1)
    q.sweep()
    assert numbers(q.claim(9)) == [1, 2, 3, 4, 5]


# Where the last claim ended


def run_many(q: Verbs, *, jobs: int = 1500) -> list[Row]:
    """Claims of many jobs since the last sweep: a front far beyond the cursor."""
    q.sweep()
    return [job for _ in range(jobs // 100) for job in q.claim(100)]


def test_a_claim_of_many_does_not_walk_past_all_that_run(q: Verbs) -> None:
    q.fill(4000)
    run_many(q)
    looked_at = sorted(
        touched(q.session, f"select pgqueue.claim('{WORKER}', '{{default}}', 100)").rows() for _ in range(7)
    )
    # One in sixteen looks at all of them.
    assert looked_at[3] < 500


def test_what_was_given_back_behind_the_front_is_claimed_soon(q: Verbs) -> None:
    q.fill(9000)
    given_back = run_many(q)[300]
    q.release([given_back])
    claims = [[job.job_id for job in q.claim(50)] for _ in range(120)]
    assert sum(given_back.job_id in claim for claim in claims) == 1
    # A claim of few has the first of all.
    first = run_many(q, jobs=900)[7]
    q.release([first])
    assert [job.job_id for job in q.claim(1)] == [first.job_id]


def test_a_claim_that_would_be_given_too_few_takes_what_is_behind_the_front(q: Verbs, connect: Connect) -> None:
    q.fill(2000)
    failing = Verbs(connect(autocommit=False))
    q.sweep()
    lost = {job.job_id for job in failing.claim(1000)}
    run_many(q, jobs=900)
    failing.session.rollback()
    rest = q.claim(1200)
    assert len(rest) == 1100
    assert lost < {job.job_id for job in rest}
    assert [job.seq for job in rest] == sorted(job.seq for job in rest)


@pytest.mark.parametrize("column", ["job_type", "priority", "queue"])
def test_what_other_workers_pass_over_keeps_its_turn(q: Verbs, column: str) -> None:
    passed_over = {"job_type": "other", "priority": 1, "queue": "other"}[column]
    queues = ["default", "other"]
    # Deeper than a sweep looks for types, so that claims do not go type by type.
    q.fill(100)
    q.fill(30, **{column: passed_over})
    q.fill(3000)
    q.sweep()
    mine = {"job_types": ["t"], "priorities": [2]}
    for _ in range(15):
        assert len(q.claim(100, queues=["default"], **mine)) == 100
    claimed = q.claim(60, queues=queues)
    assert sum(getattr(job, column) == passed_over for job in claimed) == 30
