"""Which jobs a claim may take: priorities, types, shards, queues, and pauses of them."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Connect
from tests.sql.plans import touched
from tests.sql.test_3_claim import by_priority, fill_all, numbers
from tests.sql.verbs import OTHER, WORKER, Verbs


def test_priorities(q: Verbs) -> None:
    fill_all(q, 10)
    assert by_priority(q.claim(99, priorities=[0, 3])) == [10, 0, 0, 10]
    assert q.claim(99, priorities=[0, 3]) == []
    assert by_priority(q.claim(99)) == [0, 10, 10, 0]


def test_priorities_are_shared_out_among_those_wanted(q: Verbs) -> None:
    fill_all(q, 100)
    for _ in range(3):
        assert by_priority(q.claim(15, priorities=[2, 3]))[:2] == [0, 0]
    assert by_priority(q.claim(15, priorities=[2, 3])) == [0, 0, 14, 1]


def test_job_types(q: Verbs) -> None:
    for job_type in ("a", "b", "c"):
        q.fill(10, job_type)
    jobs = q.claim(99, job_types=["a", "c", "unknown"])
    assert Counter(job.job_type for job in jobs) == {"a": 10, "c": 10}
    assert [job.seq for job in jobs] == sorted(job.seq for job in jobs)
    assert q.claim(99, job_types=["a"]) == q.claim(99, job_types=[]) == []
    assert len(q.claim(99)) == 10


@pytest.mark.parametrize("swept", [False, True])
def test_a_foreign_type_far_ahead_is_passed_over_in_order(q: Verbs, swept: bool) -> None:
    q.fill(3000, "foreign")
    q.session.execute(
        "insert into pgqueue.jobs (job_type, payload)"
        " select case n % 3 when 0 then 'a' when 1 then 'b' else 'foreign' end, jsonb_build_object('n', n)"
        "  from generate_series(1, 300) n"
    )
    if swept:
        for _ in range(3):
            q.fill(1, "foreign")
            q.sweep("cursors")
    got: list[int] = []
    while jobs := q.claim(7, job_types=["a", "b"]):
        assert {job.job_type for job in jobs} <= {"a", "b"}
        got += numbers(jobs)
    assert got == [n for n in range(1, 301) if n % 3 < 2]


def test_shards(q: Verbs) -> None:
    q.fill(500)
    even = q.claim(999, shards=list(range(0, 64, 2)))
    assert {job.shard % 2 for job in even} == {0}
    odd = q.claim(999)
    assert {job.shard % 2 for job in odd} == {1}
    assert len(even) + len(odd) == 500


@pytest.mark.parametrize("indexed", [False, True])
def test_shards_in_order_however_many_lie_between(q: Verbs, indexed: bool) -> None:
    """Jobs of three shards in turn, of which two are wanted; then a long run of the third, and more of all."""
    if indexed:
        assert q.value("select pgqueue.index_shards() and pgqueue.index_shards()")

    def put(shards: list[int]) -> None:
        q.session.execute(
            """insert into pgqueue.jobs (job_id, job_type, priority, payload)
               select overlay(pgqueue.new_job_id()::text placing lpad(to_hex(s), 2, '0') from 35)::uuid, 't',
                      case when mod(n, 5) = 0 then 1 else 2 end, jsonb_build_object('n', n)
                 from unnest(%s::int[]) with ordinality u(s, n)""",
            [shards],
        )

    put([1, 2, 3] * 20)
    put([3] * 3000)
    put([2, 3, 1] * 20)
    expected = q.rows("""select job_id from pgqueue.jobs where shard in (1, 2) order by seq""")
    got: list[Any] = []
    for size in (1, 7, 30, 100):
        jobs = q.claim(size, shards=[1, 2, 44])
        assert [(job.priority, job.seq) for job in jobs] == sorted((job.priority, job.seq) for job in jobs)
        got += jobs
    assert {job.job_id for job in got} == {row.job_id for row in expected}
    assert len(got) == len(expected) == 80
    for priority in (1, 2):
        seqs = [job.seq for job in got if job.priority == priority]
        assert seqs == sorted(seqs)
    assert q.claim(5, shards=[1, 2, 44]) == []


def test_all_filters_at_once(q: Verbs) -> None:
    for queue in ("x", "y"):
        for job_type in ("a", "b"):
            fill_all(q, 64, queue=queue, job_type=job_type)
    jobs = q.rows(
        "select * from pgqueue.claim(%s, '{x}', 9999, job_types => '{a}', priorities => '{1,2}', shards => %s)",
        [WORKER, list(range(32))],
    )
    wanted = q.value(
        "select count(*) from pgqueue.jobs where queue = 'x' and job_type = 'a' and priority in (1, 2) and shard < 32"
    )
    assert len(jobs) == wanted > 0
    assert {(j.queue, j.job_type, j.priority in (1, 2), j.shard < 32) for j in jobs} == {("x", "a", True, True)}


# Queues


def test_only_the_queues_named_are_claimed(q: Verbs) -> None:
    for queue in "abc":
        q.fill(3, queue=queue)
    assert {job.queue for job in q.claim(9, queues=["a", "c"])} == {"a", "c"}
    assert q.claim(9, queues=["a", "unknown"]) == q.claim(9, queues=[]) == []
    assert len(q.claim(9, queues=["b"])) == 3


def test_a_queue_named_twice_is_one_queue(q: Verbs) -> None:
    q.fill(10)
    assert len(q.claim(10, queues=["default", "default"])) == 10


@pytest.mark.parametrize("queues", [2, 4, 7, 40])
def test_no_queue_starves_another(q: Verbs, queues: int) -> None:
    names = [f"q{n}" for n in range(queues)]
    for name in names:
        q.fill(60, queue=name)
    got = Counter(job.queue for _ in range(20 * queues) for job in q.claim(1, queues=names))
    assert set(got) == set(names)
    assert min(got.values()) >= 5
    assert sum(got.values()) == 20 * queues


def test_one_claim_is_shared_by_the_queues(q: Verbs) -> None:
    for name, jobs in (("a", 100), ("b", 3), ("c", 100)):
        q.fill(jobs, queue=name)
    assert sorted(Counter(job.queue for job in q.claim(9, queues=["a", "b", "c"])).values()) == [3, 3, 3]
    got = [Counter(job.queue for job in q.claim(10, queues=["a", "b", "c"])) for _ in range(6)]
    assert all(counts["a"] >= 3 <= counts["c"] for counts in got)


@pytest.mark.parametrize("swept", [False, True])
def test_null_means_every_queue(q: Verbs, swept: bool) -> None:
    names = [f"q{n}" for n in range(30)]
    for name in names:
        q.fill(2, queue=name)
    if swept:
        q.sweep()
    got = []
    while jobs := q.claim(9, queues=None):
        got += jobs
    assert Counter(job.queue for job in got) == dict.fromkeys(names, 2)


@pytest.mark.parametrize("jobs", [1, 100])
def test_a_claim_looks_into_few_of_many_queues(q: Verbs, jobs: int) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue) select 't', 'q' || n % 300 from generate_series(1, 3000) n"
    )
    q.sweep()
    seen = touched(q.session, "select * from pgqueue.claim(%s, null, %s)", [WORKER, jobs])
    # What it takes, and in each of at most 16 queues a look.
    assert seen.rows() <= 3 * jobs + 16
    assert seen.rows("queue_depths") <= 1 + 16
    assert seen.rows("claim_cursors") <= 4 * 16


def test_queues_beside_empty_ones_have_equal_turns(q: Verbs) -> None:
    names = [f"q{n}" for n in range(64)]
    for name in names:
        q.insert(queue=name)
    q.sweep()
    while q.claim(99, queues=None):
        pass
    for name in names[20:36]:
        q.fill(60, queue=name)
    got = Counter(job.queue for _ in range(320) for job in q.claim(1, queues=None))
    assert set(got) == set(names[20:36])
    assert min(got.values()) >= 10


# Pauses


def test_a_paused_queue_is_not_claimed_and_takes_jobs(q: Verbs) -> None:
    q.fill(2)
    q.fill(2, queue="other")
    running = q.claim(1)
    assert q.call_value("pause", "default") is True
    q.fill(1)
    for queues in (["default"], ["default", "other"], None):
        assert {job.queue for job in q.claim(1, queues=queues)} <= {"other"}
    assert q.complete(running) == {running[0].job_id}
    assert q.call_value("resume", "default") is True
    assert len(q.claim(9)) == 2


def test_a_thousand_paused_queues_hide_no_other(q: Verbs) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue) select 't', 'q' || n from generate_series(1, 1000) n;"
        "insert into pgqueue.queues (name, paused) select 'q' || n, true from generate_series(1, 1000) n"
    )
    q.sweep()
    q.fill(1, queue="open")
    assert [job.queue for job in q.claim(1, queues=None)] == ["open"]


def test_what_comes_back_in_a_paused_queue_waits(q: Verbs) -> None:
    """One running, ten pending, five due soon, three in back-off, one lost: nineteen after resume."""
    q.freeze()
    q.fill(5)
    running, lost, *failing = q.claim(5)
    for job in failing:
        q.fail(job)
    q.fill(10)
    for _ in range(5):
        q.enqueue(delay=timedelta(seconds=2))
    q.call("pause", "default")
    q.heartbeat([running], lease=timedelta(days=1))
    for _ in range(5):
        q.advance(minutes=2)
        q.sweep()
        assert q.claim(99, OTHER) == []
    assert q.job(lost.job_id).status == "pending"
    assert q.insert()
    q.complete([running])
    q.call("resume", "default")
    assert len(q.claim(99, OTHER)) == 20


def test_a_paused_job_type_is_not_claimed_for_a_while(q: Verbs) -> None:
    now = q.freeze()
    for job_type in ("a", "b"):
        q.fill(3, job_type)
    q.session.execute("select pgqueue.pause_job_type('a', %s)", [now + timedelta(minutes=1)])
    for job_types in (None, ["a", "b"], ["a"]):
        assert {job.job_type for job in q.claim(1, job_types=job_types)} <= {"b"}
    assert [job.job_type for job in q.claim(9, queues=None)] == ["b"]
    q.advance(seconds=59)
    assert q.claim(9) == []
    q.advance(seconds=1)
    assert [job.job_type for job in q.claim(9)] == ["a"] * 3


def test_a_pause_of_a_job_type_is_never_shortened_but_can_be_ended(q: Verbs) -> None:
    now = q.freeze()
    q.insert(job_type="a")
    for minutes in (5, 1):
        q.session.execute("select pgqueue.pause_job_type('a', %s)", [now + timedelta(minutes=minutes)])
    q.advance(minutes=2)
    assert q.claim() == []
    assert q.call_value("resume_job_type", "a") is True
    assert q.call_value("resume_job_type", "a") is False
    assert len(q.claim()) == 1


@pytest.mark.parametrize("paused", [False, True])
def test_many_queues_of_foreign_types_hide_no_job(q: Verbs, paused: bool) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue) select 'theirs', 'q' || n from generate_series(1, 100) n"
    )
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 'mine', 'm' from generate_series(1, 12)")
    for _ in range(2):
        q.sweep("cursors")
    types = ["mine"]
    if paused:
        q.call("pause_job_type", "theirs", "2999-01-01")
        types = ["mine", "theirs"]
    for size in (1, 1, 1, 2, 3, 4):
        assert [job.job_type for job in q.claim(size, queues=None, job_types=types)] == ["mine"] * size
    assert q.claim(5, queues=None, job_types=types) == []


def test_queues_whose_jobs_others_hold_hide_no_job(q: Verbs, connect: Connect) -> None:
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'q' || n from generate_series(1, 300) n")
    q.sweep("cursors")
    other = connect()
    with other.transaction():
        other.execute("select from pgqueue.jobs_live where queue <> 'q300' for update")
        assert [job.queue for job in q.claim(1, queues=None)] == ["q300"]
        assert q.claim(1, queues=None) == []
