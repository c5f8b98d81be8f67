"""The scheduler: what it fires after a pause, what fails alone, declared schedules, and when due jobs start."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
import pytest
from structlog.testing import capture_logs

from pgqueue import App, Job, Settings, calls_time
from pgqueue.connections import Link
from pgqueue.errors import ConfigError, InvalidJob
from pgqueue.maintenance import Maintenance, Partitions, maintenance
from pgqueue.scheduler import Scheduler
from pgqueue.services import Background, Service
from pgqueue.sweeper import Sweeper
from pgqueue.testing import drain_sync
from tests.conftest import Connect
from tests.meet import running_time, wait_until
from tests.python.running import make_app, worker_of, worker_process
from tests.sql.verbs import Verbs

Session = psycopg.Connection[Any]
T = TypeVar("T")
NOW = datetime(2026, 11, 29, 12, 0, 20, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


@pytest.fixture
def q(connection: Session) -> Verbs:
    verbs = Verbs(connection)
    verbs.freeze(NOW)
    return verbs


def settings_of(database: str, **others: Any) -> Settings:
    return Settings.load(env={}, dsn=database, sweep_interval=0.2, **others)


def linked(database: str, work: Callable[[Link], Coroutine[Any, Any, T]]) -> T:
    """Runs `work` on a link of its own."""

    async def main() -> T:
        link = Link(database, settings_of(database), "test")
        try:
            return await work(link)
        finally:
            link.close()

    return asyncio.run(main())


def fire(database: str, times: int = 1, scheduler: Scheduler | None = None) -> list[int]:
    """Lets a scheduler look so many times; how many jobs each look made."""
    made = scheduler or Scheduler()

    async def looks(link: Link) -> list[int]:
        return [await made.step(link) for _ in range(times)]

    return linked(database, looks)


@contextmanager
def at_work(*services: Service) -> Iterator[Background]:
    """The services, in a thread."""
    background = Background(services)
    background.start()
    try:
        yield background
    finally:
        background.stop(10)


def schedule(q: Verbs, name: str = "s", cron: str = "* * * * *", **columns: Any) -> None:
    columns = {"job_type": "t", "name": name, "cron": cron, **columns}
    q.session.execute(
        f"insert into pgqueue.schedules ({', '.join(columns)}) values ({', '.join(['%s'] * len(columns))})",
        list(columns.values()),
    )


def due_times(q: Verbs, name: str = "s") -> list[str]:
    rows = q.rows("select due_at from pgqueue.schedule_fires where schedule = %s order by due_at", [name])
    return [f"{due:%H:%M}" for (due,) in rows]


def jobs(q: Verbs) -> int:
    count = q.value("select count(*) from pgqueue.jobs")
    assert isinstance(count, int)
    return count


# Firing ---------------------------------------------------------------------------------------------------------------


def test_a_new_schedule_begins_with_its_next_time(q: Verbs, database: str) -> None:
    schedule(q)
    assert fire(database, 2) == [0, 0]
    assert q.value("select next_run_at from pgqueue.schedules") == datetime(2026, 11, 29, 12, 1, tzinfo=UTC)
    for minute in range(1, 4):
        q.advance(minutes=1)
        assert fire(database, 2) == [1, 0]
        assert due_times(q)[-1] == f"12:0{minute}"
    row = q.one("select last_run_at, last_job_id, last_error from pgqueue.schedules")
    assert (f"{row.last_run_at:%H:%M}", q.job(row.last_job_id).scheduled_at) == ("12:03", row.last_run_at)


def test_a_task_sees_its_due_time(q: Verbs, database: str) -> None:
    seen = []
    # Not before the ids of its jobs.
    now = (datetime.now(UTC) + timedelta(days=1)).replace(second=20, microsecond=0)
    q.freeze(now)
    schedule(q)
    schedule(q, "in a process", job_type="times")
    fire(database)
    q.advance(minutes=1)
    assert fire(database) == [2]
    due = now.replace(second=0) + MINUTE
    with make_app(database) as app:

        @app.task("t")
        def t(job: Job) -> None:
            seen.append((job.scheduled_at, job.created_at))

        app.enqueue_sync("t")
        plain = app.enqueue_sync("times")
        drain_sync(app)
        assert seen == [(due, now + MINUTE), (None, now + MINUTE)]
        with worker_process(database):
            fired = app.jobs_sync(job_type="times")[-1]
            assert app.result_sync(fired, wait=20) == [str(due), str(now + MINUTE)]
            assert app.result_sync(plain, wait=20) == ["None", str(now + MINUTE)]


@pytest.mark.parametrize(("misfire", "cap", "first", "count"), [
    ("run_once", 100, "22:00", 1), ("skip", 100, None, 0), ("run_all", 100, "20:21", 100),
    ("run_all", 1000, "12:01", 600),
])  # fmt: skip
def test_ten_hours_down(q: Verbs, database: str, misfire: str, cap: int, first: str | None, count: int) -> None:
    schedule(q, misfire=misfire, misfire_cap=cap)
    fire(database)
    q.advance(hours=10)
    assert fire(database, 3) == [count, 0, 0]
    fired = due_times(q)
    assert (len(fired), fired[0] if fired else None) == (count, first)
    assert jobs(q) == len(set(fired)) == count
    # And on with the next minute, a second late.
    q.advance(seconds=41)
    assert fire(database, 2) == [1, 0]
    assert due_times(q)[-1] == "22:01"


@pytest.mark.parametrize("misfire", ["run_once", "run_all", "skip"])
def test_overlap_and_a_pause(q: Verbs, database: str, misfire: str) -> None:
    for overlap in ("skip", "cancel"):
        schedule(q, overlap, overlap=overlap, misfire=misfire)
    fire(database)
    q.advance(minutes=1, seconds=-20)
    assert fire(database) == [2]
    q.advance(hours=10)
    assert sum(fire(database, 3)) == 1
    assert q.value("select count(*) from pgqueue.jobs where status = 'pending'") == 2


def test_years_down_take_no_time(q: Verbs, database: str) -> None:
    for misfire in ("run_once", "skip", "run_all"):
        schedule(q, misfire, misfire=misfire)
        schedule(q, f"{misfire} rarely", "0 9 29 2 *", misfire=misfire)
    fire(database)
    q.advance(days=3653)
    began = running_time()
    assert fire(database, 2) == [1 + 0 + 100 + 1 + 0 + 3, 0]
    assert running_time() - began < 5


def test_schedules_that_fail_stop_no_other_and_are_flagged_once(q: Verbs, database: str) -> None:
    # Rows from before there was a rule.
    q.session.execute("alter table pgqueue.schedules disable trigger user")
    q.session.execute(
        'alter table pgqueue.schedules drop constraint "next_run_at must lie between the years 1 and 9998"'
    )
    schedule(q, "unknown zone", timezone="Mars/Olympus")
    schedule(q, "never", "0 0 30 2 *")
    schedule(q, "due, but odd", "odd", next_run_at=NOW)
    schedule(q, "before all time", next_run_at="-infinity")
    schedule(q, "never due", next_run_at="infinity")
    q.session.execute("alter table pgqueue.schedules enable trigger user")
    q.session.execute("insert into pgqueue.queues (name, hard_limit) values ('full', 0)")
    schedule(q, "full", queue="full")
    schedule(q, "good")
    scheduler = Scheduler()
    fire(database, scheduler=scheduler)
    q.advance(minutes=1)
    assert fire(database, 2, scheduler) == [2, 0]
    errors = dict(q.rows("select name, last_error from pgqueue.schedules"))
    assert {name for name, error in errors.items() if error} == {"unknown zone", "never", "due, but odd", "full"}
    assert "Mars/Olympus" in errors["unknown zone"]
    assert "never fires" in errors["never"]
    assert "full" in errors["full"]
    flagged = q.rows("select name, xmin::text from pgqueue.schedules where last_error is not null order by name")
    time.sleep(1.2)
    assert fire(database, 3, scheduler) == [0, 0, 0]
    assert fire(database, 2) == [0, 0]
    assert (
        q.rows("select name, xmin::text from pgqueue.schedules where last_error is not null order by name") == flagged
    )
    # Mended, each goes on.
    q.session.execute("update pgqueue.schedules set timezone = 'Europe/Berlin' where name = 'unknown zone'")
    q.session.execute("update pgqueue.queues set hard_limit = 100")
    assert fire(database) == [1]
    q.advance(minutes=1)
    assert fire(database) == [4]
    assert q.value("select count(*) from pgqueue.schedules where last_error is not null") == 2


def test_a_time_of_centuries_ago_stops_no_other_schedule(q: Verbs, database: str) -> None:
    schedule(q, "old", "@yearly", misfire="run_all", misfire_cap=10_000, next_run_at="0500-01-01")
    schedule(q, "good")
    fire(database)
    q.advance(minutes=1)
    fire(database)
    made = dict(q.rows("select job_type, count(*) from pgqueue.jobs group by 1"))
    assert sorted(made.values()) == [1, 1527] or sum(made.values()) == 1528, made


def test_many_schedules_in_one_look(q: Verbs, database: str) -> None:
    q.session.execute(
        "insert into pgqueue.schedules (name, cron, job_type)"
        " select 's' || n, '* * * * *', 't' from generate_series(1, 1200) n"
    )
    assert fire(database) == [0]
    q.advance(minutes=1)
    assert fire(database, 2) == [1200, 0]
    assert q.value("select count(distinct producer_id) from pgqueue.jobs") == 1200


def test_five_schedulers_at_once_fire_once(q: Verbs, database: str) -> None:
    q.session.execute(
        "insert into pgqueue.schedules (name, cron, job_type, overlap)"
        " select 's' || n, '* * * * *', 't', (array['allow', 'skip', 'cancel'])[1 + n % 3]"
        " from generate_series(1, 60) n"
    )

    async def race() -> list[int]:
        links = [Link(database, settings_of(database), "test") for _ in range(5)]
        try:
            return [
                sum(made)
                for made in [await asyncio.gather(*(Scheduler().step(link) for link in links)) for _ in range(2)]
            ]
        finally:
            for link in links:
                link.close()

    assert asyncio.run(race()) == [0, 0]
    for minute in range(1, 4):
        q.advance(minutes=1)
        assert sum(asyncio.run(race())) in (60, 40)
        fires = q.value(
            "select count(*) from pgqueue.schedule_fires where due_at >= %s", [NOW + minute * MINUTE - MINUTE]
        )
        assert fires == (60 if minute == 1 else 40)
    assert jobs(q) == q.value("select count(*) from pgqueue.schedule_fires")


# The sweeper's loop ---------------------------------------------------------------------------------------------------


def test_jobs_start_when_they_are_due(database: str, connection: Session) -> None:
    """Far more precisely than the interval of sweeps."""
    connection.execute(
        "insert into pgqueue.jobs (job_type, scheduled_at)"
        " select 't', clock_timestamp() + interval '2 seconds' + n * interval '20 milliseconds'"
        " from generate_series(1, 200) n"
    )
    with at_work(Sweeper(database, Settings.load(env={}, dsn=database, sweep_interval=2.0))):
        wait_until(lambda: connection.execute("select from pgqueue.jobs where status = 'submitted'").rowcount == 0, 30)
    late = connection.execute(
        "select extract(epoch from updated_at - scheduled_at)::float8 from pgqueue.jobs order by 1"
    ).fetchall()
    assert late[0][0] >= 0
    assert late[180][0] < 1.0, "nine of ten are late by less than half of the interval"


def test_a_fault_of_ten_seconds_is_seen_and_over_within_two_sweeps(database: str, connection: Session) -> None:
    sweeper = Sweeper(database, settings_of(database))
    connection.execute("insert into pgqueue.schedules (name, cron, job_type) values ('s', '* * * * *', 't')")
    planned = "select from pgqueue.schedules where next_run_at is not null"
    failing = "select last_error from pgqueue.sweep_steps where step = 'schedules' and failures > 0"
    with at_work(sweeper) as background:
        wait_until(lambda: connection.execute(planned).rowcount)
        connection.execute("alter table pgqueue.schedules rename to away")
        wait_until(lambda: background.faults().get("sweeper") and connection.execute(failing).rowcount)
        ended = time.monotonic() + 10
        while time.monotonic() < ended:
            assert background.faults(), "healthy without its table"
            assert background.alive
            job = connection.execute("select job_id from pgqueue.enqueue('t', delay => '0.1 seconds')").fetchone()
            wait_until(
                lambda job=job: (
                    connection.execute(
                        "select from pgqueue.jobs where job_id = %s and status = 'pending'", job
                    ).rowcount
                )
            )
            time.sleep(0.2)
        connection.execute("alter table pgqueue.away rename to schedules")
        connection.execute("update pgqueue.schedules set next_run_at = pgqueue.clock()")
        restored = running_time()
        wait_until(lambda: connection.execute("select from pgqueue.schedule_fires").rowcount)
        wait_until(lambda: not background.faults() and not connection.execute(failing).rowcount)
        assert running_time() - restored < 5


def test_a_step_that_is_too_slow_does_less_until_it_is_quick_enough(database: str, connection: Session) -> None:
    connection.execute(
        """create or replace function pgqueue.sweep_keys(max_jobs int) returns bigint language plpgsql as $$
           begin perform pg_sleep(max_jobs * 0.01); return 0; end $$"""
    )
    user = psycopg.sql.Identifier(connection.info.user)
    connection.execute(psycopg.sql.SQL("alter role {} in database {} set statement_timeout = '400ms'").format(
        user, psycopg.sql.Identifier(connection.info.dbname)
    ))  # fmt: skip
    failed = "select failures, last_error from pgqueue.sweep_steps where step = 'keys' and failures > 0"
    with at_work(Sweeper(database, settings_of(database))):
        wait_until(lambda: connection.execute(failed).rowcount)
        said = connection.execute(failed).fetchone()
        assert said is not None
        assert "statement timeout" in said[1]
        wait_until(
            lambda: connection.execute("select from pgqueue.sweep_steps where step = 'keys' and failures = 0").rowcount
        )


def test_of_many_sweepers_one_does_the_work(database: str, connection: Session) -> None:
    with at_work(*(Sweeper(database, settings_of(database)) for _ in range(8))):
        connected = """select from pg_stat_activity
                        where application_name = 'pgqueue sweeper' and datname = current_database()"""
        wait_until(lambda: connection.execute(connected).rowcount == 8)
        before = connection.execute("select last_value from pgqueue.sweep_turns").fetchone()
        turns = set()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            turns.add(connection.execute("select last_value from pgqueue.sweep_turns").fetchone())
            time.sleep(0.01)
    assert before is not None
    assert 4 <= len(turns) <= 4 / (0.2 * 0.8) + 2


def test_partitions_are_made_dropped_and_analysed_by_the_service(
    q: Verbs, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q.advance(days=200)
    monkeypatch.setattr("pgqueue.maintenance.PARTITIONS_AGAIN", 0.1)
    with at_work(Partitions(database, settings_of(database))):
        wait_until(lambda: q.rows("select from pgqueue.sweep_steps where step = 'analyse'"))
    assert q.value("select min(lower) from pgqueue.partition_list() where status = 'completed'") > NOW + timedelta(
        days=160
    )
    assert q.value("select made_until from pgqueue.retention where status = 'completed'") > q.now


def test_the_services_of_a_process(database: str) -> None:
    assert [type(service) for service in maintenance(database, settings_of(database))] == [Sweeper, Partitions]


def test_maintenance_alone_ends_when_told(database: str, connection: Session) -> None:
    async def main() -> None:
        alone = Maintenance(database, settings_of(database))
        running = asyncio.create_task(alone.run())
        await asyncio.to_thread(wait_until, lambda: connection.execute(swept).rowcount)
        alone.request_stop()
        await asyncio.wait_for(running, 10)

    swept = "select from pgqueue.sweep_steps where step = 'cursors'"
    asyncio.run(main())


@pytest.mark.parametrize("hours", [-1, 1])
def test_only_the_databases_clock_counts(database: str, connection: Session, hours: int) -> None:
    """This host's clock differs from the database's by an hour."""
    connection.execute(
        f"create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe"
        f" as $$ select pg_catalog.statement_timestamp() + interval '{hours} hours' $$"
    )
    with make_app(database, sweep_interval=0.2) as app:

        @app.task
        def note(job: Job) -> None: ...

        with worker_of(app):
            delayed = app.enqueue_sync("note", delay=1.5)
            at = connection.execute("select pgqueue.clock() + interval '1.5 seconds'").fetchone()
            assert at is not None
            dated = app.enqueue_sync("note", scheduled_at=at[0])
            rows = [app.finished_job_sync(job, wait=20) for job in (delayed, dated)]
    for row in rows:
        assert row.scheduled_at is not None
        assert row.started_at is not None
        assert timedelta(0) <= row.started_at - row.scheduled_at < timedelta(minutes=1)
        assert row.attempts == 1


# Declared in code -----------------------------------------------------------------------------------------------------


def test_an_app_declares_schedules_with_the_options_of_their_tasks(database: str, q: Verbs) -> None:
    with make_app(database) as app:

        @app.schedule("0 9 * * mon-fri", timezone="Europe/Berlin", payload={"to": "all"}, overlap="skip")
        @app.schedule("@hourly", name="often", payload={"to": "me"}, priority="low", misfire="run_all")
        @app.task("report", queue="mail", priority="high", max_retries=7, timeout=90, retry_policy={"jitter": False})
        def report(job: Job, to: str) -> None: ...

        linked(database, app.declarations().step)
    rows = {row.name: row for row in q.rows("select * from pgqueue.schedules")}
    assert rows.keys() == {"report", "often"}
    daily, often = rows["report"], rows["often"]
    assert (daily.cron, daily.timezone, daily.payload, daily.overlap) == (
        "0 9 * * mon-fri", "Europe/Berlin", {"to": "all"}, "skip",
    )  # fmt: skip
    assert (daily.queue, daily.priority, daily.max_retries, daily.timeout_ms) == ("mail", 1, 7, 90_000)
    assert daily.retry_policy == {"jitter": False}
    assert (often.cron, often.priority, often.misfire, often.payload) == ("@hourly", 3, "run_all", {"to": "me"})
    assert {row.declared_by for row in rows.values()} == {app.name}


def test_what_cannot_fire_is_refused_where_it_is_declared(database: str) -> None:
    with make_app(database) as app:
        with pytest.raises(InvalidJob, match="6 fields"):
            app.schedule("* * * * * *")
        with pytest.raises(InvalidJob, match="timezone"):
            app.schedule("* * * * *", timezone="Mars/Olympus")

        @app.task
        def plain(job: Job) -> None: ...

        app.schedule("@daily")(plain)
        with pytest.raises(ConfigError, match="two schedules"):
            app.schedule("@hourly")(plain)


def test_apps_are_told_apart_by_their_module_or_name(database: str) -> None:
    assert make_app(database).name == "tests.python.running"
    assert App(name="billing").name == "billing"
    script = {"__name__": "__main__", "__file__": "/srv/jobs/tasks.py", "App": App}
    exec("app = App()", script)
    made = script["app"]
    assert isinstance(made, App)
    assert made.name == "tasks"


@pytest.mark.parametrize("maintained", [True, False])
def test_any_worker_of_an_app_writes_its_schedules(database: str, q: Verbs, maintained: bool) -> None:
    with make_app(database) as app:

        @app.schedule("@daily")
        @app.task
        def daily(job: Job) -> None: ...

        with worker_of(app, maintenance=maintained):
            wait_until(lambda: q.rows("select from pgqueue.schedules where name = 'daily'"))


def test_a_taken_name_is_told_once(database: str, q: Verbs) -> None:
    schedule(q, "daily")
    with make_app(database) as app, capture_logs() as told:

        @app.schedule("@daily")
        @app.task
        def daily(job: Job) -> None: ...

        declarations = app.declarations()
        linked(database, declarations.step)
        declarations._again_at = 0.0
        linked(database, declarations.step)
    assert [entry["schedule"] for entry in told if "it stays" in entry["event"]] == ["daily"]
    assert q.value("select cron from pgqueue.schedules") == "* * * * *"


def test_calls_for_people(database: str, q: Verbs, connect: Connect) -> None:
    from pgqueue import calling

    schedule(q, "s")
    session = connect()
    (row,) = calling.run(session, calls_time.SCHEDULES)
    assert row == calling.run(session, calls_time.SCHEDULE, name="s")
    assert calling.run(session, calls_time.SCHEDULE, name="none") is None
    assert {row["status"] for row in calling.run(session, calls_time.RETENTION)} == {
        "completed",
        "cancelled",
        "dead_letter",
    }
