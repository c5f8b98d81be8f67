"""Counting, rates, depths, scaling and metrics in SQL."""

import json
import uuid
from datetime import timedelta
from itertools import product
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgqueue.autoscale import History, Policy, decide
from pgqueue.calls import WorkerLoad
from pgqueue.counts import LIMITS
from tests.conftest import Connect
from tests.meet import aside, wait_for_lock, wait_until
from tests.sql.verbs import WORKER, Verbs, kill_by_failing
from tests.sql.watching import count, counter, in_bucket, tick, worker

# Counting -------------------------------------------------------------------------------------------------------------


def test_buckets_are_those_that_workers_fill(q: Verbs) -> None:
    assert q.call_value("bucket_limits") == list(LIMITS)


def test_counts_add_up(q: Verbs) -> None:
    count(q, {"completed": 2, "duration_seconds": 1.5, "durations": in_bucket(3, 2), "waits": in_bucket(0, 2)})
    count(q, {"completed": 1, "failed": 1, "durations": in_bucket(3), "waits": in_bucket(16)}, {"completed": 5})
    row = q.one("select * from pgqueue.counters")
    assert (row.completed, row.failed, row.duration_seconds) == (8, 1, 1.5)
    assert row.durations == in_bucket(3, 3)
    assert [row.waits[0], row.waits[16]] == [2, 1]


def test_a_batch_that_comes_twice_counts_once(q: Verbs) -> None:
    worker(q)
    rows = Jsonb([{"queue": "default", "job_type": "t", "priority": 2, "completed": 3}])
    for batch in (1, 1, 2, 1, 2):
        assert q.call_value("add_counts", WORKER, batch, 0.5, rows) is True
    assert counter(q, "completed") == 6
    assert q.value("select utilization from pgqueue.workers") == 0.5


def test_counts_of_a_worker_without_a_row_are_refused(q: Verbs) -> None:
    rows = Jsonb([{"queue": "default", "job_type": "t", "priority": 2, "completed": 3}])
    assert q.call_value("add_counts", WORKER, 1, 0.0, rows) is False
    assert counter(q, "completed") == 0


def test_names_are_bounded(q: Verbs) -> None:
    for start in range(0, 1000, 100):
        count(q, *({"job_type": f"type-{start + number}", "completed": 1} for number in range(100)))
    count(q, {"job_type": "type-5", "completed": 1}, {"job_type": "one more", "completed": 1})
    assert q.value("select count(*) from pgqueue.counters") <= 405
    assert q.value("select sum(completed) from pgqueue.counters") == 1002
    assert counter(q, "completed", job_type="type-5") == 2
    assert counter(q, "completed", "_OTHER", "_OTHER") >= 600


def test_arrivals_through_every_door_are_counted_once(q: Verbs, connect: Connect) -> None:
    q.insert()
    q.enqueue("t", priority=0)
    q.enqueue_many({"job_type": "t"}, {"job_type": "u", "queue": "other"})
    q.fill(500, queue="many")
    with q.session.cursor().copy("copy pgqueue.jobs (job_type, queue) from stdin") as copy:
        copy.write_row(("t", "copied"))
    q.enqueue("t", delay=timedelta(hours=1))
    (job,) = q.claim(1, queues=["other"])
    q.complete([job])
    kill_by_failing(q, q.insert(queue="dying"), "dying")
    q.cancel(q.insert(queue="leaving"))
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted", "leaving"))[1] == 1)
    found = dict(q.rows("select queue, sum(submitted) from pgqueue.counters group by queue"))
    assert found == {"default": 4, "other": 1, "many": 500, "copied": 1, "dying": 1, "leaving": 1}
    assert q.retry(q.value("select job_id from pgqueue.jobs_dead_letter")).status == "pending"
    q.call("count_arrivals")
    q.call("count_arrivals")
    assert q.value("select sum(submitted) from pgqueue.counters") == 508


def test_a_late_commit_is_waited_for(q: Verbs, connect: Connect) -> None:
    late = connect(autocommit=False)
    late.execute("insert into pgqueue.jobs (job_type, queue) values ('t', 'late')")
    q.insert()
    for _ in range(3):
        q.call("count_arrivals")
    late.commit()
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted", "late"))[1] == 1)
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted"))[1] == 1)
    assert counter(q, "submitted", "late") == 1


@pytest.mark.parametrize("door", ["enqueue", "enqueue_rows"])
def test_a_job_whose_id_was_drawn_before_it_waited_is_counted(q: Verbs, connect: Connect, door: str) -> None:
    calls = {
        "enqueue": "select pgqueue.enqueue('t', queue => 'late', idempotency_key => 'k')",
        "enqueue_rows": """select pgqueue.enqueue_rows('{t}', null, '{late}', null, null, null, '{k}', null, null, null,
                                                       null, null, null, null, null)""",
    }
    first, second = connect(autocommit=False), connect(autocommit=False)
    first.execute("select pgqueue.enqueue('t', queue => 'first', idempotency_key => 'k')")
    waiting = aside(second.execute, calls[door])
    wait_for_lock(q.session, second.info.backend_pid)
    # So that what is looked at next reaches beyond the id.
    drawn_before = q.value("select clock_timestamp()")
    wait_until(lambda: q.value("select clock_timestamp() - %s > '0.4 s'", [drawn_before]))
    q.call("count_arrivals")
    first.rollback()
    waiting.result(10)
    for _ in range(3):
        q.call("count_arrivals")
    second.commit()
    q.insert(queue="after")
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted", "after"))[1] == 1)
    assert counter(q, "submitted", "late") == 1


def test_jobs_with_ids_of_an_earlier_time_are_counted_once(q: Verbs, connect: Connect) -> None:
    late = connect(autocommit=False)
    statement = "insert into pgqueue.jobs (job_id, job_type, queue) values (%s, 't', %s)"
    for seconds in (0.2, 1, 100):
        (drawn,) = late.execute(
            "select overlay(pgqueue.new_job_id()::text placing left(pgqueue.first_id(clock_timestamp()"
            " - make_interval(secs => %s))::text, 13) from 1)::uuid",
            [seconds],
        ).fetchone() or (None,)
        late.execute(statement, [drawn, f"late by {seconds}"])
    q.insert()
    for _ in range(3):
        q.call("count_arrivals")
    late.commit()
    q.insert(queue="after")
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted", "after"))[1] == 1)
    q.call("count_arrivals")
    found = dict(q.rows("select queue, sum(submitted) from pgqueue.counters group by queue"))
    assert found == {"default": 1, "after": 1, "late by 0.2": 1, "late by 1": 1, "late by 100": 1}
    assert q.value("select count(*) from pgqueue.late_arrivals") == 0


def test_a_rolled_back_insert_is_not_counted(q: Verbs, connect: Connect) -> None:
    other = connect(autocommit=False)
    other.execute("insert into pgqueue.jobs (job_type) values ('t')")
    other.rollback()
    q.insert(queue="mine")
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted", "mine"))[1] == 1)
    assert counter(q, "submitted") == 0


# Rates ----------------------------------------------------------------------------------------------------------------


def test_rates_are_of_the_last_minute(q: Verbs) -> None:
    q.freeze()
    q.insert()
    # Arrivals go by the server's clock, which is not frozen.
    wait_until(lambda: (q.call_value("count_arrivals"), counter(q, "submitted"))[1] == 1)
    tick(q)
    for _ in range(12):
        count(q, {"completed": 90, "failed": 10, "submitted": 200})
        tick(q, seconds=10)
    (row,) = q.rows("select * from pgqueue.queue_stats")
    assert row.submitted_per_second == pytest.approx(20, rel=0.2)
    assert row.processed_per_second == pytest.approx(10, rel=0.2)
    assert row.failed_per_second == pytest.approx(1, rel=0.2)
    for _ in range(8):
        tick(q, seconds=10)
    rates = q.rows("select submitted, processed, failed from pgqueue.rates('1 minute')")
    assert [tuple(row) for row in rates] == [(0, 0, 0)]


def test_what_came_before_the_first_sample_counts_in_the_first_minute(q: Verbs) -> None:
    q.freeze()
    count(q, {"completed": 60})
    tick(q)
    (row,) = q.rows("select * from pgqueue.rates('1 minute')")
    assert (row.processed, row.seconds) == (60, 60)


def test_samples_are_few_and_kept_for_an_hour(q: Verbs) -> None:
    q.freeze()
    for _ in range(5):
        tick(q, seconds=1)
        tick(q, seconds=10)
    assert q.value("select count(*) from pgqueue.counter_samples") == 0
    for _ in range(100):
        count(q, {"completed": 60})
        tick(q, minutes=1)
    assert q.value("select count(*) from pgqueue.counter_samples") <= 62
    (row,) = q.rows("select * from pgqueue.rates('1 hour')")
    assert row.processed == pytest.approx(3600, rel=0.03)


def test_history_shows_the_hour(q: Verbs) -> None:
    q.freeze()
    tick(q)
    for number in range(60):
        count(q, {"submitted": 60 if number < 30 else 120})
        tick(q, minutes=1)
    rows = q.rows("select * from pgqueue.history('1 hour', 12)")
    assert len(rows) == 12
    assert [row.at for row in rows] == sorted(row.at for row in rows)
    assert rows[2].submitted_per_second == pytest.approx(1, rel=0.3)
    assert rows[10].submitted_per_second == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize(
    ("buckets", "part", "expected"),
    [
        (in_bucket(0, 0), 0.5, None),
        (in_bucket(7, 10), 0.5, 0.75),
        (in_bucket(16, 10), 0.99, 3600),
        ([0] * 7 + [50, 0, 0, 0, 50] + [0] * 5, 0.5, 1.0),
        ([0] * 7 + [50, 0, 0, 0, 50] + [0] * 5, 0.99, pytest.approx(29.6)),
    ],
)
def test_quantiles(q: Verbs, buckets: list[int], part: float, expected: Any) -> None:
    assert q.call_value("quantile", buckets, part) == expected


# Depths ---------------------------------------------------------------------------------------------------------------


def test_counts_by_queue_priority_and_status(q: Verbs) -> None:
    q.fill(7)
    q.fill(3, priority=0)
    q.fill(2, queue="other")
    q.enqueue("t", delay=timedelta(hours=1))
    q.enqueue("t", ordering_key="k")
    q.enqueue("t", ordering_key="k")
    claimed = q.claim(4, queues=["default"])
    q.fail(claimed[0])
    q.sweep()
    rows = q.rows("select * from pgqueue.queue_counts()")
    by_queue = {
        queue: tuple(
            sum(getattr(row, name) for row in rows if row.queue == queue)
            for name in ("pending", "submitted", "processing", "failed")
        )
        for queue in ("default", "other")
    }
    assert by_queue == {"default": (7, 2, 3, 1), "other": (2, 0, 0, 0)}
    assert len(rows) == 8
    (row,) = [row for row in rows if row.queue == "other" and row.priority == 2]
    assert 0 <= row.oldest_pending_seconds < 60


def test_a_backlog_is_one_number_without_paused_queues(q: Verbs) -> None:
    assert q.call_value("backlog") == 0
    assert q.call_value("backlog", "no such queue") == 0
    q.fill(7)
    q.fill(3, queue="other")
    assert q.call_value("backlog") == 10
    assert q.call_value("backlog", "other") == 3
    q.call("pause", "other")
    assert q.call_value("backlog") == 7
    assert q.call_value("backlog", "other") == 0


def test_counting_scans_no_table(q: Verbs) -> None:
    scans = "select sum(seq_scan) from pg_stat_user_tables where relname like 'jobs%'"
    q.fill(3000)
    q.sweep()
    q.session.execute("select pg_stat_force_next_flush()")
    before = q.value(scans)
    for function in ("queue_counts", "dead_letter_counts", "metrics", "alert_conditions", "worker_load"):
        q.call(function)
    q.session.execute("select pg_stat_force_next_flush()")
    assert q.value(scans) == before


# Scaling --------------------------------------------------------------------------------------------------------------


def test_the_number_in_sql_is_that_of_python(q: Verbs, subtests: pytest.Subtests) -> None:
    """Both without cooldowns, over states around every threshold."""
    q.freeze()
    q.session.execute("insert into pgqueue.queues (name, soft_limit) values ('default', 150)")
    bounds = ((0, 5), (2, 100), (3, 6))
    have = 0
    for pending, workers in product((0, 9, 10, 101, 202), range(8)):
        if pending > have:
            q.fill(pending - have)
            have = pending
        q.session.execute("delete from pgqueue.workers")
        for number in range(workers):
            worker(q, uuid.UUID(int=number + 1))
        for utilization in (0.1, 0.5, 0.95):
            q.session.execute("update pgqueue.workers set utilization = %s", [utilization])
            row = q.one("select * from pgqueue.worker_load()")
            load = WorkerLoad(*row)
            assert (load.pending, load.workers) == (pending, workers)
            for minimum, maximum in bounds:
                with subtests.test(load=load, bounds=(minimum, maximum)):
                    policy = Policy(minimum=minimum, maximum=maximum)
                    wanted = decide(load, load.workers, History(), 0.0, policy).wanted
                    assert q.call_value("wanted_workers", None, minimum, maximum) == wanted


def test_a_load_is_of_the_queues_that_were_asked_for(q: Verbs) -> None:
    worker(q, uuid.UUID(int=1), 4, ["default"])
    worker(q, uuid.UUID(int=2), 6)
    q.fill(3)
    q.fill(5, queue="other")
    q.fill(5, queue="stopped")
    q.call("pause", "stopped")
    q.claim(2)
    whole, one = q.one("select * from pgqueue.worker_load()"), q.one("select * from pgqueue.worker_load('{other}')")
    assert (whole.pending, whole.workers, whole.slots, whole.running) == (6, 2, 10, 2)
    assert (one.pending, one.workers, one.slots, one.running) == (5, 1, 6, 0)
    assert q.call_value("wanted_workers", "stopped", 0) == 0


# Metrics --------------------------------------------------------------------------------------------------------------


def metrics(q: Verbs) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {(row.name, tuple(sorted(row.labels.items()))): row.value for row in q.call("metrics")}


def test_gauges_return_to_zero(q: Verbs) -> None:
    q.fill(4, queue="q")
    q.sweep()
    depth = ("pgqueue_queue_depth", (("priority", "normal"), ("queue", "q")))
    age = ("pgqueue_queue_oldest_age_seconds", (("priority", "normal"), ("queue", "q")))
    status = ("pgqueue_jobs", (("queue", "q"), ("status", "processing")))
    found = metrics(q)
    assert (found[depth], found[status]) == (4, 0)
    jobs = q.claim(4, queues=["q"])
    found = metrics(q)
    assert (found[depth], found[age], found[status]) == (0, 0, 4)
    q.complete(jobs)
    q.session.execute("delete from pgqueue.sweep_notes")
    found = metrics(q)
    assert (found[depth], found[age], found[status]) == (0, 0, 0)


def test_no_series_appears_twice_or_names_a_job(q: Verbs) -> None:
    q.fill(4)
    kill_by_failing(q, q.insert(queue="q"), "q")
    count(q, {"completed": 3, "durations": in_bucket(3, 3)})
    q.sweep()
    rows = q.call("metrics")
    keys = [(row.name, json.dumps(row.labels, sort_keys=True)) for row in rows]
    assert len(keys) == len(set(keys))
    labels = {name for row in rows for name in row.labels}
    assert labels <= {
        "queue", "job_type", "priority", "status", "outcome", "le", "step", "table", "alert", "severity", "version",
        "server",
    }  # fmt: skip
    assert all(row.value is not None for row in rows)


def test_a_thousand_queues_make_a_hundred_series(q: Verbs) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue) select 't', 'queue-' || n from generate_series(1, 1000) n"
    )
    q.sweep()
    rows = [row for row in q.call("metrics") if row.name == "pgqueue_queue_depth"]
    assert len({row.labels["queue"] for row in rows}) <= 101
    assert sum(row.value for row in rows) == 1000
    assert sum(row.value for row in rows if row.labels["queue"] == "_OTHER") >= 900


def test_buckets_are_cumulative(q: Verbs) -> None:
    count(q, {"completed": 6, "durations": [1, 2, 3] + [0] * 14})
    rows = [row for row in q.call("metrics") if row.name == "pgqueue_job_duration_seconds_bucket"]
    found = {row.labels["le"]: row.value for row in rows}
    assert [found[limit] for limit in ("0.005", "0.01", "0.025", "+Inf")] == [1, 3, 6, 6]


def test_one_of_many_has_the_turn_to_push(q: Verbs, connect: Connect) -> None:
    q.freeze()
    count(q, {"submitted": 5})
    others = [Verbs(connect()) for _ in range(3)]
    turns = [one.call("push_turn", timedelta(seconds=9)) for one in (q, *others)]
    assert [len(rows) for rows in turns] == [1, 0, 0, 0]
    assert turns[0][0].submitted == 5
    count(q, {"submitted": 2})
    q.advance(seconds=10)
    assert [row.submitted for row in others[0].call("push_turn", timedelta(seconds=9))] == [2]


def test_readers_read_and_change_nothing(q: Verbs, connect: Connect) -> None:
    q.fill(2)
    reader = connect()
    reader.execute("set role pgqueue_reader")
    for statement in (
        "select * from pgqueue.queue_stats", "select * from pgqueue.alerts", "select * from pgqueue.metrics()",
        "select pgqueue.backlog()", "select pgqueue.wanted_workers()", "select * from pgqueue.history()",
    ):  # fmt: skip
        reader.execute(statement)
    for statement in (
        "select pgqueue.add_to_counters('[]')", "update pgqueue.alert_rules set enabled = false",
        "select * from pgqueue.horizon()", "select * from pgqueue.alert_webhooks",
    ):  # fmt: skip
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            reader.execute(statement)
