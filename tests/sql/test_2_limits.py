"""Limits of queues that no sweep looks after: before the first one, and after the last."""

import re

import psycopg
import pytest

from tests.sql.plans import touched
from tests.sql.verbs import Verbs, refused

INSERT = "insert into pgqueue.jobs (job_type, queue) values ('t', 'new')"


def test_a_new_queue_is_not_counted_job_by_job(q: Verbs) -> None:
    for _ in range(2):
        q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'new' from generate_series(1, 5000)")
    assert touched(q.session, INSERT).rows() < 10
    q.sweep()
    assert touched(q.session, INSERT).rows() < 10


def test_a_new_queue_has_its_limits_at_once(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit, soft_limit) values ('new', 20000, 20000)")
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'new' from generate_series(1, 20000)")
    with refused("PQ503", "more than 20000 jobs"):
        q.session.execute(INSERT)


def test_jobs_of_other_queues_fill_no_new_one(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit, soft_limit) values ('new', 20000, 10001)")
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'other' from generate_series(1, 30000)")
    for _ in range(3):
        q.session.execute(INSERT)


def test_nobody_is_slowed_down_by_jobs_that_are_done_while_no_sweep_comes(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit, soft_limit) values ('new', 20000, 300)")
    q.session.execute(INSERT)
    for _ in range(3):
        q.sweep()
    q.session.execute("update pgqueue.sweep_state set candidate_at = pgqueue.clock() - interval '1 minute'")
    for _ in range(3):
        q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'new' from generate_series(1, 250)")
        jobs = q.claim(300, queues=["new"])
        assert q.complete(jobs) == {job.job_id for job in jobs}
    q.session.execute(INSERT)


def test_a_long_queue_above_its_soft_limit_is_counted_once_a_second(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit, soft_limit) values ('new', 20000, 6000)")
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'new' from generate_series(1, 6100)")

    def depth() -> object:
        return q.value("select pending from pgqueue.queue_depths where queue = 'new'")

    q.freeze()
    for _ in range(3):
        q.sweep("cursors")
    assert touched(q.session, "select pgqueue.sweep('cursors')").rows() < 1000
    jobs = q.claim(500, queues=["new"])
    assert q.complete(jobs) == {job.job_id for job in jobs}
    q.sweep("cursors")
    assert depth() == 6100
    q.advance(seconds=1)
    for _ in range(2):
        q.sweep("cursors")
    assert depth() == 5600


def test_a_batch_closes_a_queue_with_a_rate_for_a_minute_at_most(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, rate_per_second) values ('new', 5)")
    q.session.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'new' from generate_series(1, 20000)")

    def wait() -> float:
        with pytest.raises(psycopg.Error) as refusal:
            q.session.execute(INSERT)
        assert refusal.value.sqlstate == "PQ429"
        said = re.fullmatch("retry after (.*) s", refusal.value.diag.message_detail or "")
        assert said is not None
        return float(said[1])

    assert 30 < wait() <= 60.2
    # Of the rate that holds now.
    q.session.execute("update pgqueue.queues set rate_per_second = 1")
    assert 30 < wait() <= 61.2
    # As if that time had gone by.
    q.session.execute("update pgqueue.token_buckets set filled_at = filled_at - interval '61.3 seconds'")
    q.session.execute(INSERT)


@pytest.mark.parametrize(
    ("limits", "said"),
    [("rate_per_second = 5", "takes 5 jobs a second"), ("soft_limit = 5", "more than 5 jobs pending")],
)
def test_a_transaction_that_was_let_in_is_not_refused_for_what_it_took_itself(q: Verbs, limits: str, said: str) -> None:
    column, number = limits.split(" = ")
    q.session.execute(f"insert into pgqueue.queues (name, {column}) values ('new', {number}), ('next', {number})")
    q.sweep()
    many = "insert into pgqueue.jobs (job_type, queue) select 't', {} from generate_series(1, 1500) i"
    with q.session.transaction():
        for queue in ("'new'", "'new'", "'next'", "case when i % 2 = 0 then 'new' else 'next' end"):
            with q.session.transaction():
                q.session.execute(many.format(queue))
    # It owes all of it.
    with refused("PQ429", said):
        q.session.execute(INSERT)
    with refused("PQ429", said), q.session.transaction():
        q.session.execute(INSERT)
