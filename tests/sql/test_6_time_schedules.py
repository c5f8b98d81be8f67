"""Schedules in SQL: what is refused, who fires, what an edit does, and those that are declared in code."""

import random
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from pgqueue.cron import parse
from pgqueue.errors import InvalidJob
from tests.conftest import Connect
from tests.meet import aside, wait_for_lock
from tests.sql.verbs import Row, Verbs, refused

MINUTE = timedelta(minutes=1)


def schedule(q: Verbs, name: str = "s", **columns: Any) -> None:
    columns = {"name": name, "cron": "* * * * *", "job_type": "t", **columns}
    q.session.execute(
        sql.SQL("insert into pgqueue.schedules ({}) values ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join([sql.Placeholder()] * len(columns))
        ),
        [Jsonb(value) if isinstance(value, dict) else value for value in columns.values()],
    )


def of(q: Verbs, name: str = "s") -> Row:
    return q.one("select * from pgqueue.schedules where name = %s", [name])


def fire(
    q: Verbs, due: datetime | None, *fires: datetime, name: str = "s", following: datetime | None = None
) -> list[uuid.UUID]:
    row = of(q, name)
    following = following or (max([*fires, due or datetime(2026, 1, 1, tzinfo=UTC)]) + MINUTE)
    rows = q.rows(
        "select * from pgqueue.fire_schedule(%s, %s, %s, %s, %s::timestamptz[], %s)",
        [name, row.cron, row.timezone, due, list(fires), following],
    )
    return [found for (found,) in rows]


# What is refused ------------------------------------------------------------------------------------------------------


TERMS = """
    * */5 5 1-5 5-1 0-59/7 3/4 7 0 12 31 30 60 24 L l jan mon fri-sun sun-mon mon#2 8#1 */0 */90 1,2 1,,2 x 1- -1 2#6
    *,5 1#1,2 5#3,L 1-5/0 jan-mar/2 08 008
"""


def mutated(rng: random.Random) -> str:
    count = rng.choice((5,) * 12 + (4, 6, 7))
    fields = [",".join(rng.choices(TERMS.split(), k=rng.choice((1, 1, 1, 1, 2)))) for _ in range(count)]
    # Mostly valid but for one or two fields, so that each rule meets all the others.
    for index in range(min(5, count)):
        if rng.random() < 0.6:
            fields[index] = rng.choice(("*", "1", "*", str(rng.randint(0, 40))))
    return rng.choice((" ", " ", "  ", "\t")).join(fields)


def fault(expression: str) -> str | None:
    try:
        parse(expression)
    except InvalidJob as exc:
        return str(exc)
    return None


def test_the_database_and_python_refuse_the_same(q: Verbs) -> None:
    rng = random.Random(5)
    aliases = ["@hourly", "@Daily", " @weekly ", "@reboot", "@", "@every 5m", "", " ", "0\n0 * * *"]
    expressions = [*aliases, *(mutated(rng) for _ in range(4000))]
    faults = dict(q.rows("select e, pgqueue.cron_fault(e) from unnest(%s::text[]) e", [expressions]))
    for expression in expressions:
        assert (fault(expression) is None) == (faults[expression] is None), (expression, faults[expression])
    accepted = sum(found is None for found in faults.values())
    assert 300 < accepted < 3500


@pytest.mark.parametrize(("columns", "column", "word"), [
    ({"cron": "* * * * * *"}, "cron", "6 fields"), ({"cron": "R * * * *"}, "cron", "no minute"),
    ({"cron": "*/5 * * * * 30"}, "cron", "6 fields"), ({"cron": "*/90 * * * *"}, "cron", "step"),
    ({"cron": "0 0 30 2 *"}, "cron", "never fires"), ({"cron": ""}, "cron", "0 fields"),
    ({"timezone": "Mars/Olympus"}, "timezone", "not known"),
    ({"timezone": "europe/berlin"}, "timezone", "Europe/Berlin?"),
    ({"timezone": "posix/Europe/Berlin"}, "timezone", "perhaps Europe/Berlin?"),
    ({"timezone": "EST5EDT4"}, "timezone", "not known"), ({"timezone": "+01:00"}, "timezone", "not known"),
    ({"timezone": ""}, "timezone", "not known"),
])  # fmt: skip
def test_what_cannot_fire_is_refused_and_names_the_column(q: Verbs, columns: Any, column: str, word: str) -> None:
    with refused("PQ422", word, column=column):
        schedule(q, **columns)
    schedule(q, "good", timezone="America/New_York", cron="30 2 * * mon-fri")
    with refused("PQ422", word, column=column):
        q.session.execute(
            sql.SQL("update pgqueue.schedules set {} = %s").format(sql.Identifier(column)), [columns[column]]
        )
    assert (of(q, "good").cron, of(q, "good").timezone) == ("30 2 * * mon-fri", "America/New_York")


@pytest.mark.parametrize(("column", "value"), [
    ("misfire", "sometimes"), ("overlap", "maybe"), ("misfire_cap", 0), ("priority", 4), ("job_type", ""),
    ("max_retries", -1), ("timeout_ms", 0), ("retry_policy", {"unknown": 1}),
])  # fmt: skip
def test_other_columns_have_checks(q: Verbs, column: str, value: Any) -> None:
    with refused("23514", constraint=None):
        schedule(q, **{column: value})


# Edits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["cron", "timezone", "job_type"])
def test_a_missing_column_is_named(q: Verbs, column: str) -> None:
    columns: dict[str, Any] = {"name": "s", "cron": "@daily", "timezone": "UTC", "job_type": "t"} | {column: None}
    with refused("23502", column, column=column):
        q.session.execute(
            "insert into pgqueue.schedules (name, cron, timezone, job_type) values (%s, %s, %s, %s)",
            [*columns.values()],
        )


def test_an_edit_asks_for_the_next_time_and_nothing_else_does(q: Verbs) -> None:
    now = q.freeze()
    schedule(q)
    fire(q, None, following=now)
    for edit, planned in [
        ("payload = '{\"a\": 1}'", True), ("cron = cron", True), ("misfire = 'skip'", True),
        ("cron = '*/5 * * * *'", False), ("timezone = 'Europe/Berlin'", False), ("enabled = false", False),
    ]:  # fmt: skip
        q.session.execute("update pgqueue.schedules set next_run_at = %s, enabled = true, last_error = 'x'", [now])
        q.session.execute(f"update pgqueue.schedules set {edit}")
        row = of(q)
        assert (row.next_run_at == now, row.last_error == "x") == (planned, planned), edit
    q.session.execute("update pgqueue.schedules set enabled = true, next_run_at = %s", [now])
    assert of(q).next_run_at == now
    q.session.execute("update pgqueue.schedules set cron = '@daily', next_run_at = %s", [now + MINUTE])
    assert of(q).next_run_at == now + MINUTE


def test_an_edit_while_a_scheduler_computes_wins(q: Verbs) -> None:
    now = q.freeze()
    schedule(q)
    row = of(q)
    for edit in ("cron = '@daily'", "timezone = 'Europe/Berlin'", "enabled = false"):
        q.session.execute(
            "update pgqueue.schedules set cron = %s, timezone = %s, enabled = true", [row.cron, row.timezone]
        )
        q.session.execute(f"update pgqueue.schedules set {edit}")
        done = q.rows(
            "select * from pgqueue.fire_schedule('s', %s, %s, null, array[%s]::timestamptz[], %s)",
            [row.cron, row.timezone, now, now + MINUTE],
        )
        assert done == []
        assert of(q).next_run_at is None


# Fires ----------------------------------------------------------------------------------------------------------------


def test_a_fire_is_one_job_with_the_settings_of_the_schedule(q: Verbs) -> None:
    now = q.freeze()
    schedule(
        q, queue="mail", priority=1, payload={"a": [1]}, max_retries=7, timeout_ms=5000,
        retry_policy={"base_delay_ms": 5}, job_type="report",
    )  # fmt: skip
    assert fire(q, None, following=now - MINUTE) == []
    (job_id,) = fire(q, now - MINUTE, now - MINUTE, following=now + MINUTE)
    job = q.job(job_id)
    assert (job.queue, job.priority, job.payload, job.max_retries) == ("mail", 1, {"a": [1]}, 7)
    assert (job.timeout_ms, job.retry_policy, job.job_type) == (5000, {"base_delay_ms": 5}, "report")
    assert (job.status, job.scheduled_at, job.producer_id) == ("pending", now - MINUTE, "schedule:s")
    row = of(q)
    assert (row.next_run_at, row.last_run_at, row.last_job_id, row.last_error) == (
        now + MINUTE, now - MINUTE, job_id, None,
    )  # fmt: skip
    assert q.rows("select schedule, due_at, job_id from pgqueue.schedule_fires") == [("s", now - MINUTE, job_id)]


def test_a_due_time_fires_once_whoever_comes_and_whatever_is_set_back(q: Verbs) -> None:
    now = q.freeze()
    schedule(q)
    fire(q, None, following=now)
    assert len(fire(q, now, now, following=now + MINUTE)) == 1
    assert fire(q, now, now, following=now + MINUTE) == []
    q.session.execute("update pgqueue.schedules set next_run_at = %s", [now])
    assert fire(q, now, now, now + MINUTE, following=now + MINUTE) == q.value(
        "select array_agg(job_id) from pgqueue.schedule_fires where due_at = %s", [now + MINUTE]
    )
    q.session.execute("delete from pgqueue.schedules")
    schedule(q, next_run_at=now)
    assert fire(q, now, now) == []
    assert q.value("select count(*) from pgqueue.jobs") == 2


def test_schedulers_that_meet_fire_once_and_do_not_wait(q: Verbs, connect: Connect) -> None:
    now = q.freeze()
    schedule(q)
    fire(q, None, following=now)
    other = Verbs(connect())
    with q.session.transaction():
        assert len(fire(q, now, now)) == 1
        assert fire(other, now, now) == []
    with q.session.transaction(force_rollback=True):
        fire(q, now + MINUTE, now + MINUTE)
    # The one that failed left it to others.
    assert len(fire(other, now + MINUTE, now + MINUTE)) == 1
    assert q.value("select count(distinct due_at) = count(*) and count(*) = 2 from pgqueue.schedule_fires")


def test_the_latest_of_many_fires_is_the_last_job(q: Verbs) -> None:
    now = q.freeze()
    schedule(q, misfire="run_all")
    fire(q, None, following=now - 3 * MINUTE)
    jobs = fire(q, now - 3 * MINUTE, *(now - n * MINUTE for n in (3, 2, 1, 0)))
    assert [q.job(job).scheduled_at for job in jobs] == [now - n * MINUTE for n in (3, 2, 1, 0)]
    assert of(q).last_job_id == jobs[-1]
    assert [job.job_id for job in q.claim(9)] == jobs


@pytest.mark.parametrize("status", ["pending", "processing", "failed", "completed", "dead_letter"])
@pytest.mark.parametrize("overlap", ["allow", "skip", "cancel"])
def test_overlap(q: Verbs, overlap: str, status: str) -> None:
    now = q.freeze()
    schedule(q, overlap=overlap)
    fire(q, None, following=now)
    (first,) = fire(q, now, now)
    if status != "pending":
        (job,) = q.claim()
        match status:
            case "failed":
                q.fail(job)
            case "completed":
                q.complete([job])
            case "dead_letter":
                q.fail(job, retryable=False)
    then = now + MINUTE
    fired = fire(q, then, then, then + MINUTE)
    live = status in ("pending", "processing", "failed")
    assert len(fired) == {"allow": 2, "skip": 0 if live else 1, "cancel": 1}[overlap]
    assert of(q).next_run_at == then + 2 * MINUTE
    assert of(q).last_run_at == (now if live and overlap == "skip" else then + MINUTE)
    became = q.job(first)
    if overlap == "cancel" and live:
        assert (became.status, became.cancel_requested_at is not None) == (
            "processing" if status == "processing" else "cancelled", True,
        )  # fmt: skip
    else:
        assert (became.status, became.cancel_requested_at) == (status, None)


def test_a_full_queue_fails_the_fire_and_loses_nothing(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute("insert into pgqueue.queues (name, hard_limit) values ('default', 0)")
    schedule(q)
    fire(q, None, following=now)
    with refused("PQ503"):
        fire(q, now, now)
    assert q.call_value("schedule_failed", "s", now, 'queue "default"\n is full')
    assert (of(q).next_run_at, of(q).last_error) == (now, 'queue "default" is full')
    assert not q.call_value("schedule_failed", "s", now - MINUTE, "of another time")
    q.session.execute("update pgqueue.queues set hard_limit = 10")
    assert len(fire(q, now, now)) == 1
    assert of(q).last_error is None


def test_sequences_beyond_four_bytes(q: Verbs) -> None:
    for (name,) in q.rows(
        "select oid::regclass::text from pg_class where relkind = 'S' and relnamespace = 'pgqueue'::regnamespace"
    ):
        q.session.execute("select setval(%s, 2147483646)", [name])
    now = q.freeze()
    schedule(q)
    fire(q, None, following=now)
    fire(q, now, now, now + MINUTE)
    q.sweep()
    assert min(job.seq for job in q.claim(2)) >= 2147483646
    assert q.call_value("take_turn", timedelta(seconds=1))


# By hand --------------------------------------------------------------------------------------------------------------


def test_run_now_touches_nothing_but_what_ran_last(q: Verbs) -> None:
    now = q.freeze(datetime(2026, 11, 29, 12, tzinfo=UTC))
    schedule(q, payload={"a": 1}, max_retries=1)
    fire(q, None, following=now)
    first, second = q.call_value("run_schedule", "s"), q.call_value("run_schedule", "s")
    row = of(q)
    assert (row.next_run_at, row.last_job_id) == (now, second)
    assert now < row.last_run_at < now + timedelta(seconds=1)
    assert (q.job(first).payload, q.job(first).max_retries) == ({"a": 1}, 1)
    # It did not stand for the regular one.
    assert len(fire(q, now, now)) == 1
    q.session.execute("update pgqueue.schedules set enabled = false")
    assert q.call_value("run_schedule", "s")
    assert q.value("select array_agg(distinct target) from pgqueue.audit where verb = 'run_schedule'") == ["s"]


def test_run_now_knows_errors_and_overlap(q: Verbs) -> None:
    with refused("PQ404", "no schedule"):
        q.call("run_schedule", "s")
    schedule(q, overlap="skip")
    first = q.call_value("run_schedule", "s")
    with refused("PQ409", str(first)):
        q.call("run_schedule", "s")
    q.session.execute("update pgqueue.schedules set overlap = 'cancel'")
    q.call("run_schedule", "s")
    assert q.job(first).status == "cancelled"


@pytest.mark.parametrize(("role", "allowed"), [
    ("pgqueue_producer", False), ("pgqueue_reader", False), ("pgqueue_worker", False), ("pgqueue_operator", True),
])  # fmt: skip
def test_operators_edit_schedules(q: Verbs, role: str, allowed: bool) -> None:
    q.session.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
    if not allowed:
        with refused("42501"):
            schedule(q)
        return
    schedule(q)
    assert q.call_value("run_schedule", "s")
    with refused("PQ422"):
        schedule(q, "odd", cron="odd")
    q.session.execute("update pgqueue.schedules set enabled = false")
    q.session.execute("delete from pgqueue.schedules")


# Declared in code -----------------------------------------------------------------------------------------------------


def declare(q: Verbs, *names: str, app: str = "app", started: bool = True, **columns: Any) -> dict[str, str]:
    declared = [{"name": name, "cron": "@daily", "job_type": "t", **columns} for name in names]
    fingerprint = f"{names}{columns}"
    rows = q.rows(
        "select * from pgqueue.declare_schedules(%s, %s, %s, %s)", [app, fingerprint, Jsonb(declared), started]
    )
    return {row.name: row.outcome for row in rows}


def names(q: Verbs) -> set[str]:
    return {row.name for row in q.rows("select name from pgqueue.schedules")}


def test_a_renamed_declaration_leaves_no_orphan_and_those_made_by_hand_stay(q: Verbs) -> None:
    q.freeze()
    schedule(q, "by hand")
    assert declare(q, "a", "b") == {"a": "declared", "b": "declared"}
    assert declare(q, "x", app="other app") == {"x": "declared"}
    assert declare(q, "b", "c") == {"a": "removed", "b": "declared", "c": "declared"}
    assert names(q) == {"by hand", "b", "c", "x"}
    assert declare(q) == {"b": "removed", "c": "removed"}
    assert names(q) == {"by hand", "x"}


def test_an_app_that_never_declared_anything_leaves_no_trace(q: Verbs) -> None:
    assert q.rows("select * from pgqueue.declare_schedules('app', 'f', '[]', true)") == [(None, "none")]
    assert q.rows("select * from pgqueue.schedule_declarations") == []


def test_the_same_declaration_again_changes_nothing_but_brings_back_what_is_gone(q: Verbs) -> None:
    now = q.freeze()
    declare(q, "a", "b")
    q.session.execute("update pgqueue.schedules set cron = '@hourly', enabled = false, next_run_at = %s", [now])
    q.session.execute("delete from pgqueue.schedules where name = 'b'")
    assert declare(q, "a", "b", started=False) == {}
    assert names(q) == {"a"}
    assert declare(q, "a", "b") == {"b": "declared"}
    assert (of(q, "a").cron, of(q, "a").enabled) == ("@hourly", False)
    # A new declaration is the truth again, but for what an operator switched off.
    assert declare(q, "a", "b", timezone="Europe/Berlin", max_retries=9, misfire="skip", overlap="cancel") == {
        "a": "declared", "b": "declared",
    }  # fmt: skip
    row = of(q, "a")
    assert (row.cron, row.timezone, row.enabled, row.max_retries) == ("@daily", "Europe/Berlin", False, 9)
    assert (row.misfire, row.overlap) == ("skip", "cancel")


def test_old_processes_of_a_rolling_deployment_change_nothing(q: Verbs) -> None:
    q.freeze()
    declare(q, "old")
    declare(q, "new")
    for _ in range(10):
        q.advance(seconds=15)
        assert declare(q, "old", started=False) == {}
        # It died and was started again.
        assert declare(q, "old") == {}
        assert declare(q, "new", started=False) == {}
    assert names(q) == {"new"}
    # A rollback: nobody is left with the newer code.
    q.advance(seconds=61)
    assert declare(q, "old", started=False) == {"new": "removed", "old": "declared"}
    q.advance(seconds=1)
    assert declare(q, "new", started=False) == {}
    assert names(q) == {"old"}


def test_a_name_that_is_taken_stays_with_its_owner_until_that_is_gone(q: Verbs) -> None:
    q.freeze()
    schedule(q, "a", cron="@hourly")
    declare(q, "b", app="first")
    assert declare(q, "a", "b", "c", app="second") == {"a": "taken", "b": "taken", "c": "declared"}
    assert (of(q, "a").cron, of(q, "b").declared_by) == ("@hourly", "first")
    q.advance(seconds=30)
    declare(q, "b", app="first", started=False)
    q.advance(seconds=59)
    assert declare(q, "a", "b", "c", app="second", started=False) == {"a": "taken", "b": "taken"}
    q.advance(seconds=15)
    # The module was renamed, and with it the app.
    assert declare(q, "a", "b", "c", app="second", started=False) == {"a": "taken", "b": "declared"}
    assert of(q, "b").declared_by == "second"


def test_many_processes_that_declare_at_once(q: Verbs, connect: Connect) -> None:
    sessions = [Verbs(connect()) for _ in range(6)]
    with q.session.transaction():
        assert set(declare(q, "a", "b").values()) == {"declared"}
        waiting = [aside(declare, other, "a", "b") for other in sessions]
        looker = connect()
        for other in sessions:
            wait_for_lock(looker, other.session.info.backend_pid)
    assert [future.result(10) for future in waiting] == [{}] * 6
    assert names(q) == {"a", "b"}


def test_a_declaration_that_cannot_fire_is_refused_whole(q: Verbs) -> None:
    declare(q, "a")
    with refused("PQ422", column="cron"):
        declare(q, "b", cron="0 0 30 2 *")
    assert names(q) == {"a"}
