"""Retention: partitions made ahead and dropped, walks for queues that keep less, archives, and who waits for whom."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.conftest import Connect
from tests.meet import running_time
from tests.sql.test_6_time_sweep import noted, set_queue, step
from tests.sql.verbs import Row, Verbs, kill_by_failing

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)
ALL = {"completed", "cancelled", "dead_letter"}


@pytest.fixture(autouse=True)
def bare(q: Verbs) -> None:
    """No partitions yet but the default ones."""
    for (name,) in q.rows("select name from pgqueue.partition_list() where lower is not null"):
        q.session.execute(sql.SQL("drop table pgqueue.{}").format(sql.Identifier(name)))


def maintain(q: Verbs, *max_actions: int) -> dict[str, str]:
    return {row.partition: row.action for row in q.call("maintain_partitions", *max_actions)}


def partitions(q: Verbs, status: str) -> list[str]:
    rows = q.rows("select name from pgqueue.partition_list() where status = %s order by lower nulls first", [status])
    return [name.removeprefix(f"jobs_{status}_") for (name,) in rows]


def retention(q: Verbs, status: str = "completed") -> Row:
    return q.one("select * from pgqueue.retention where status = %s", [status])


def finished(
    q: Verbs, count: int, queue: str = "default", ago: timedelta = timedelta(0), status: str = "completed"
) -> None:
    """Rows of jobs that ended so long ago, wherever they belong."""
    q.session.execute(
        f"""insert into pgqueue.jobs_{status} (job_type, queue, status, finished_at, payload)
            select 't', %s, %s, pgqueue.clock() - %s, jsonb_build_object('n', n) from generate_series(1, %s) n""",
        [queue, status, ago, count],
    )


def kept(q: Verbs, queue: str = "default", status: str = "completed") -> int:
    found = q.value("select count(*) from pgqueue.jobs where queue = %s and status = %s", [queue, status])
    assert isinstance(found, int)
    return found


def walk(q: Verbs, most: int = 100) -> int:
    """Sweeps retention until nothing is left to do now; how many rows that removed."""
    removed = 0
    for _ in range(most):
        jobs = step(q, "retention").jobs
        removed += jobs
        if not jobs:
            return removed
    raise AssertionError(f"{removed} rows, and no end")


# Partitions -----------------------------------------------------------------------------------------------------------


def test_partitions_are_made_ahead(q: Verbs) -> None:
    q.freeze(NOON)
    assert set(maintain(q).values()) == {"made"}
    assert partitions(q, "completed") == [
        "default",
        *(f"202611{day}" for day in (29, 30)),
        *(f"2026120{n}" for n in range(1, 7)),
    ]
    assert partitions(q, "dead_letter") == ["default", "20261123", "20261130", "20261207", "20261214"]
    assert maintain(q) == {}
    q.advance(days=1)
    assert set(maintain(q)) == {"jobs_completed_20261207", "jobs_cancelled_20261207", "jobs_dead_letter_20261221"}
    assert noted(q, "partitions").last_jobs == 3
    assert retention(q).made_until == datetime(2026, 12, 8, tzinfo=UTC)


@pytest.mark.parametrize("zone", ["America/New_York", "Europe/Berlin", "Asia/Kathmandu", "Pacific/Apia"])
def test_bounds_are_days_of_utc_whatever_the_sessions_zone(q: Verbs, zone: str) -> None:
    q.session.execute("select set_config('TimeZone', %s, false)", [zone])
    for day in (
        datetime(2026, 3, 7, 12, tzinfo=UTC),
        datetime(2026, 10, 24, 23, 30, tzinfo=UTC),
        datetime(2026, 10, 31, tzinfo=UTC),
    ):
        q.freeze(day)
        assert set(maintain(q).values()) <= {"made", "dropped"}
    # Read in UTC, since Python subtracts times of one zone by their walls.
    q.session.execute("set TimeZone = 'UTC'")
    bounds = q.rows(
        "select status, lower, upper, pg_get_expr(c.relpartbound, c.oid) as bound from pgqueue.partition_list() l"
        " join pg_class c on c.relname = l.name where lower is not null"
    )
    for status, lower, upper, bound in bounds:
        assert (lower.hour, upper - lower) == (0, timedelta(days=7 if status == "dead_letter" else 1))
        assert bound == f"FOR VALUES FROM ('{lower:%F %T}+00') TO ('{upper:%F %T}+00')"
    assert {status for status, *_ in bounds} == ALL


def test_one_thing_at_a_time(q: Verbs) -> None:
    q.freeze(NOON)
    for _ in range(20):
        assert len(maintain(q, 1)) == 1
    assert maintain(q, 1) == {}


def test_a_missing_partition_stops_nobody_and_is_made_later_with_what_is_its_own(q: Verbs) -> None:
    q.freeze(NOON)
    job = q.start()
    assert q.complete([job])
    assert q.where(job.job_id) == "pgqueue.jobs_completed_default"
    maintain(q)
    assert q.where(job.job_id) == "pgqueue.jobs_completed_20261129"
    q.session.execute("drop table pgqueue.jobs_completed_20261130")
    q.advance(days=1)
    job = q.start()
    assert q.complete([job])
    assert q.where(job.job_id) == "pgqueue.jobs_completed_default"
    assert q.job(job.job_id).status == "completed"
    assert maintain(q)["jobs_completed_20261130"] == "made"
    assert q.where(job.job_id) == "pgqueue.jobs_completed_20261130"


def test_many_rows_are_not_moved_while_others_would_wait(q: Verbs) -> None:
    q.freeze(NOON)
    finished(q, 2001)
    made = maintain(q)
    assert made.pop("jobs_completed_20261129") == "crowded"
    assert set(made.values()) == {"made"}
    assert maintain(q) == {"jobs_completed_20261129": "crowded"}
    # Retention finds them where they are.
    q.advance(days=31)
    assert walk(q) == 2001


def test_partitions_past_retention_are_dropped(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    finished(q, 10)
    finished(q, 10, status="cancelled")
    kill_by_failing(q, q.insert())
    q.advance(days=7, hours=11)
    assert "dropped" not in maintain(q).values()
    q.advance(hours=2)
    assert [name for name, action in maintain(q).items() if action == "dropped"] == ["jobs_cancelled_20261129"]
    q.advance(days=23)
    assert maintain(q)["jobs_completed_20261129"] == "dropped"
    assert (kept(q), kept(q, status="cancelled"), kept(q, status="dead_letter")) == (0, 0, 1)
    q.freeze(datetime(2026, 11, 30, tzinfo=UTC) + timedelta(days=90, minutes=1))
    assert maintain(q)["jobs_dead_letter_20261123"] == "dropped"
    assert (kept(q, status="dead_letter"), retention(q).behind) == (0, timedelta(0))
    assert q.value("select count(*) from pgqueue.partitions n where to_regclass('pgqueue.' || n.name) is null") == 0


@contextmanager
def looking(connect: Connect, table: str = "pgqueue.jobs") -> Iterator[psycopg.Connection[Any]]:
    """A transaction of somebody who reads the table for a long time."""
    session = connect()
    with session.transaction():
        session.execute(f"select count(*) from {table}")
        yield session


def test_nobody_waits_for_a_drop_that_waits_for_a_reader(q: Verbs, connect: Connect) -> None:
    q.freeze(NOON)
    maintain(q)
    finished(q, 10)
    q.advance(days=31)
    maintain(q, 100)
    q.session.execute("select set_config('lock_timeout', '0', false)")
    finished(q, 1)
    q.advance(days=31)
    other = Verbs(connect())
    other.session.execute("set lock_timeout = '100ms'")
    with looking(connect):
        for _ in range(3):
            began = running_time()
            actions = maintain(q)
            assert "busy" in actions.values()
            assert running_time() - began < 5
            # Every verb goes on, within the 100 ms that its session allows.
            job = other.start()
            assert other.complete([job])
            assert other.cancel(other.insert()) == "cancelled"
        row = retention(q)
        assert row.behind >= timedelta(hours=1)
        assert "others use it" in row.problem
        # For a while that is no fault.
        assert noted(q, "partitions").failures == 0
    assert "dropped" in maintain(q).values()
    assert (retention(q).behind, noted(q, "partitions").failures) == (timedelta(0), 0)


def test_making_gives_way_too(q: Verbs, connect: Connect) -> None:
    q.freeze(NOON)
    with looking(connect, "pgqueue.jobs_completed_default"):
        assert maintain(q)["jobs_completed_20261129"] == "busy"
    assert maintain(q)["jobs_completed_20261129"] == "made"


# Archives -------------------------------------------------------------------------------------------------------------


def test_a_partition_is_archived_before_it_goes(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    finished(q, 25)
    q.session.execute(
        """create table public.archive (job_id uuid primary key, job jsonb);
           create function public.keep(partition regclass) returns void language plpgsql as $$
           begin
             execute format('insert into public.archive select job_id, to_jsonb(p) from %s p', partition);
           end $$;
           insert into pgqueue.archives values ('completed', 'public.keep')"""
    )
    q.advance(days=31)
    while (action := maintain(q, 1).get("jobs_completed_20261129")) is None:
        pass
    assert (action, q.value("select count(*) from public.archive")) == ("archived", 25)
    assert "jobs_completed_20261129" in {f"jobs_completed_{name}" for name in partitions(q, "completed")}
    assert maintain(q, 1) == {"jobs_completed_20261129": "dropped"}
    assert q.value("select count(*) from public.archive where job ->> 'status' = 'completed'") == 25


@pytest.mark.parametrize("function", ["public.nothing", "public.fails"])
def test_a_partition_whose_archive_fails_is_kept(q: Verbs, function: str) -> None:
    q.freeze(NOON)
    maintain(q)
    finished(q, 5)
    q.session.execute(
        """create function public.fails(partition regclass) returns void language plpgsql as $$
           begin delete from pgqueue.jobs_completed; raise exception 'the disk is full'; end $$"""
    )
    q.session.execute("insert into pgqueue.archives values ('completed', %s)", [function])
    q.advance(days=31)
    actions = maintain(q)
    assert "archive failed" in actions["jobs_completed_20261129"]
    assert kept(q) == 5
    assert "archive failed" in noted(q, "partitions").last_error
    assert "archive failed" in retention(q).problem
    q.session.execute("delete from pgqueue.archives")
    assert maintain(q)["jobs_completed_20261129"] == "dropped"


# Walks ----------------------------------------------------------------------------------------------------------------


def test_a_queue_that_keeps_less_loses_its_rows_and_no_other(q: Verbs) -> None:
    q.freeze(NOON)
    set_queue(
        q, "short", completed_ttl=timedelta(hours=6), cancelled_ttl=timedelta(days=1), dead_letter_ttl=timedelta(days=1)
    )
    maintain(q)
    for status in ALL:
        finished(q, 300, "short", status=status)
        finished(q, 300, status=status)
    q.advance(hours=5)
    assert walk(q) == 0
    q.advance(hours=2)
    assert walk(q) == 300
    q.advance(days=1)
    assert walk(q) == 600
    assert [kept(q, "short", status) for status in sorted(ALL)] == [0, 0, 0]
    assert [kept(q, status=status) for status in sorted(ALL)] == [300, 300, 300]
    assert retention(q).behind == timedelta(0)


def test_a_queue_that_keeps_more_keeps_partitions_and_the_others_are_walked(q: Verbs) -> None:
    q.freeze(NOON)
    set_queue(q, "long", completed_ttl=timedelta(days=365))
    maintain(q)
    finished(q, 200, "long")
    finished(q, 200)
    q.advance(days=31)
    assert "dropped" not in {action for name, action in maintain(q).items() if "completed" in name}
    assert walk(q) == 200
    assert (kept(q), kept(q, "long")) == (0, 200)
    q.advance(days=335)
    assert maintain(q)["jobs_completed_20261129"] == "dropped"


def rows_read(q: Verbs) -> Any:
    return q.value(
        "select sum(seq_tup_read + idx_tup_fetch) from pg_stat_xact_user_tables"
        " where relname = 'jobs_completed_20261129'"
    )


def test_a_day_that_is_over_is_walked_once_for_each_change_of_settings(q: Verbs) -> None:
    q.freeze(NOON)
    set_queue(q, "short", completed_ttl=timedelta(hours=1))
    maintain(q)
    finished(q, 50, "short")
    finished(q, 50)
    q.advance(days=2)
    assert walk(q) == 50
    again = q.value("select walk_again_at::text from pgqueue.partitions where name = 'jobs_completed_20261129'")
    assert again == "infinity"
    with q.session.transaction():
        before = rows_read(q)
        assert step(q, "retention").jobs == 0
        assert rows_read(q) == before
    set_queue(q, "default", completed_ttl=timedelta(hours=1))
    assert walk(q) == 50


def test_rows_of_a_day_that_is_not_over_go_within_a_twentieth_of_their_time(q: Verbs) -> None:
    q.freeze(NOON)
    set_queue(q, "short", completed_ttl=timedelta(hours=2))
    maintain(q)
    for _ in range(40):
        finished(q, 5, "short")
        walk(q)
        q.advance(minutes=6)
    assert 20 * 5 <= kept(q, "short") <= 23 * 5


@pytest.mark.parametrize("rows", [30_000])
def test_under_a_statement_timeout_every_sweep_makes_progress_and_a_locked_row_is_left(
    q: Verbs, connect: Connect, rows: int
) -> None:
    shrink_under_timeout(q, connect, rows, max_jobs=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_hundred_thousand_rows_under_a_statement_timeout(q: Verbs, connect: Connect) -> None:
    shrink_under_timeout(q, connect, 300_000, max_jobs=2000)


def shrink_under_timeout(q: Verbs, connect: Connect, rows: int, max_jobs: int) -> None:
    q.freeze(NOON)
    maintain(q)
    set_queue(q, "short", completed_ttl=timedelta(days=1))
    finished(q, rows, "short")
    finished(q, 500)
    q.advance(days=3)
    locked = q.value("select job_id from pgqueue.jobs where queue = 'short' order by job_id limit 1 offset 1000")
    holder = connect()
    runner = Verbs(connect())
    runner.session.execute("set statement_timeout = '1s'")
    with holder.transaction():
        holder.execute("select from pgqueue.jobs_completed where job_id = %s for update", [locked])
        left = kept(q, "short")
        sweeps = 0
        while left > 1:
            runner.call("sweep", max_jobs=max_jobs)
            now_left = kept(q, "short")
            assert now_left < left, f"{left} rows are left after {sweeps} sweeps"
            left, sweeps = now_left, sweeps + 1
        runner.call("sweep", max_jobs=max_jobs)
        q.advance(minutes=1)
        runner.call("sweep", max_jobs=max_jobs)
        assert kept(q, "short") == 1
        row = retention(q)
        assert row.behind >= timedelta(minutes=1)
        assert "1 rows past retention are locked" in row.problem
    q.advance(seconds=11)
    # On a slow disk a walk over the whole partition takes more than one.
    for _ in range(10):
        runner.call("sweep", max_jobs=max_jobs)
        if retention(q).problem is None:
            break
    assert (kept(q, "short"), kept(q)) == (0, 500)
    assert (retention(q).behind, retention(q).problem) == (timedelta(0), None)
    assert noted(q, "retention").last_error is None


def test_default_partitions_lose_what_is_past_any_retention(q: Verbs) -> None:
    q.freeze(NOON)
    for status, days in (("completed", 30), ("cancelled", 7), ("dead_letter", 90)):
        finished(q, 40, ago=timedelta(days=days, hours=1), status=status)
        finished(q, 40, ago=timedelta(days=days, hours=-1), status=status)
    assert walk(q) == 120
    q.advance(hours=3)
    assert walk(q) == 120


# Statistics -----------------------------------------------------------------------------------------------------------


def test_the_table_as_a_whole_is_analysed_once_a_day(q: Verbs) -> None:
    q.freeze(NOON)
    q.fill(500)
    assert q.call_value("analyse") is True
    assert q.value("select reltuples from pg_class where oid = 'pgqueue.jobs'::regclass") == 500
    assert q.value("select count(*) > 2 from pg_stats where schemaname = 'pgqueue' and tablename = 'jobs'")
    assert q.call_value("analyse") is False
    q.advance(days=1, seconds=1)
    assert q.call_value("analyse") is True


def test_retention_that_is_a_day_behind_is_a_metric_and_an_alert(q: Verbs, connect: Connect) -> None:
    def seconds() -> float:
        value = q.value(
            "select value from pgqueue.metrics() where name = 'pgqueue_retention_behind_seconds'"
            """ and labels = '{"status": "completed"}'"""
        )
        assert isinstance(value, float)
        return value

    def summaries() -> list[str]:
        rows = q.rows("select summary from pgqueue.alert_conditions() where alert = 'RetentionBehind'")
        return [summary for (summary,) in rows]

    q.freeze(NOON)
    maintain(q)
    finished(q, 5)
    q.advance(days=30)
    maintain(q)
    q.advance(days=1)
    assert seconds() == timedelta(hours=12).total_seconds()
    assert summaries() == []
    with looking(connect):
        maintain(q)
        q.advance(days=1)
        assert seconds() == timedelta(hours=36).total_seconds()
        (summary,) = summaries()
        assert "for 1 day 12:00:00" in summary
        assert "others use it" in summary
    maintain(q)
    assert (seconds(), summaries()) == (0, [])
