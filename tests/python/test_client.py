"""The client: every verb, awaited and blocking, on connections of its own and on the caller's."""

import asyncio
import itertools
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgqueue import App
from pgqueue.client import Client
from pgqueue.errors import (
    ConfigError,
    DatabaseUnavailable,
    InvalidJob,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotFinished,
    PgqueueError,
    QueueFull,
    SchemaOutdated,
    WrongState,
)
from pgqueue.settings import Settings
from tests.conftest import Connect
from tests.meet import running_time
from tests.python.running import eventually, make_app, stalling_proxy

Session_ = psycopg.Connection[Any]


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as app:
        yield app


def claim(connection: Session_, max_jobs: int = 1) -> tuple[UUID, list[tuple[Any, ...]]]:
    worker = uuid4()
    rows = connection.execute("select job_id, attempts from pgqueue.claim(%s, null, %s)", (worker, max_jobs)).fetchall()
    return worker, rows


def end(connection: Session_, how: str, result: str = "null") -> UUID:
    """Claims the next job and ends it; returns its id."""
    worker, ((job_id, attempt),) = claim(connection)
    if how == "complete":
        connection.execute("select pgqueue.complete(%s, %s, %s, %s::jsonb[])", (worker, [job_id], [attempt], [result]))
    else:
        connection.execute(
            """select pgqueue.fail(%s, %s, %s, '{"type": "E", "message": "broke"}', false)""", (worker, job_id, attempt)
        )
    return UUID(str(job_id))


def test_a_job_is_stored_as_it_was_given(app: App) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)
    job_id = app.enqueue_sync("t").job_id
    given = app.enqueue_sync(
        "send", {"to": "é"}, queue="mail", priority="critical", scheduled_at=at, idempotency_key="k", max_retries=7,
        retry_policy={"base_delay_ms": 5}, timeout=timedelta(seconds=1.5), expires_at=at + timedelta(hours=1),
        producer_id="p", trace_context={"traceparent": "00"},
    )  # fmt: skip
    assert (given.status, given.duplicate) == ("submitted", False)
    row = app.job_sync(given)
    assert (row.job_type, row.payload, row.queue, row.priority, row.scheduled_at) == (
        "send",
        {"to": "é"},
        "mail",
        0,
        at,
    )
    assert (row.max_retries, row.timeout_ms, row.retry_policy) == (7, 1500, {"base_delay_ms": 5})
    assert (row.producer_id, row.idempotency_key, row.trace_context) == ("p", "k", {"traceparent": "00"})
    plain = app.job_sync(str(job_id))
    assert (plain.status, plain.queue, plain.priority, plain.max_retries, plain.payload) == (
        "pending",
        "default",
        2,
        3,
        {},
    )
    assert app.job_sync(plain) == plain


def test_a_known_key_answers_with_the_job_it_has(app: App) -> None:
    first = app.enqueue_sync("t", {"a": 1}, idempotency_key="k")
    again = app.enqueue_sync("t", {"a": 1}, idempotency_key="k")
    assert (again.job_id, again.duplicate) == (first.job_id, True)
    other = app.enqueue_sync("u", {"a": 2}, idempotency_key="k")
    assert (other.job_id, other.duplicate) == (first.job_id, True)
    assert app.job_sync(other).job_type == "t"


def test_a_tasks_options_apply_unless_the_enqueue_says_otherwise(app: App) -> None:
    @app.task("t", queue="q", priority=0, max_retries=9, timeout=3)
    def t(job: Any, a: int) -> None: ...

    row = app.job_sync(t.enqueue_sync(a=1))
    assert (row.queue, row.priority, row.max_retries, row.timeout_ms, row.payload) == ("q", 0, 9, 3000, {"a": 1})
    row = app.job_sync(t.having(queue="r", delay=60).enqueue_sync(a=1))
    assert (row.queue, row.priority, row.status) == ("r", 0, "submitted")
    (many,) = app.enqueue_many_sync([{"type": "t", "payload": {"a": 2}, "max_retries": 1}])
    row = app.job_sync(many)
    assert (row.queue, row.max_retries, row.timeout_ms) == ("q", 1, 3000)


def test_many_jobs_with_a_tasks_own_arguments(app: App) -> None:
    @app.task("t", queue="q")
    def t(job: Any, a: int) -> None: ...

    made = app.enqueue_many_sync([t.job(1), t.having(delay=60, ordering_key="k").job(a=2)])
    rows = [app.job_sync(job) for job in made]
    assert [(row.queue, row.payload, row.ordering_key, row.status) for row in rows] == [
        ("q", {"a": 1}, None, "pending"), ("q", {"a": 2}, "k", "submitted"),
    ]  # fmt: skip
    with pytest.raises(InvalidPayload, match="missing a required argument: 'a'"):
        t.job()  # type: ignore[call-overload]
    with pytest.raises(InvalidJob, match="connection"):
        app.enqueue_many_sync([t.having(connection=object()).job(1)])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"delay": -1}, "delay is -1; it must be from 0 seconds to 100 years"),
        ({"delay": float("nan")}, "delay is nan"),
        ({"delay": float("inf")}, "delay is inf"),
        ({"delay": 2**70}, "100 years"),
        ({"delay": "soon"}, "delay is 'soon'; it must be seconds or a timedelta"),
        ({"scheduled_at": datetime(2026, 1, 1)}, "scheduled_at is 2026-01-01T00:00:00 without a time zone"),  # noqa: DTZ001
        ({"scheduled_at": "tomorrow"}, "scheduled_at is 'tomorrow'; it must be a datetime"),
        ({"priority": "urgent"}, "priority is 'urgent'"),
        ({"queue": "q" * 64}, "queue"),
        ({"queue": ""}, "queue"),
        ({"max_retries": -1}, "max_retries"),
        ({"idempotency_key": "k" * 257}, "idempotency_key"),
        ({"job_id": "7"}, "job_id is '7'; it must be a UUID"),
        ({"job_id": uuid4()}, "job_id"),
        ({"retry_policy": {"speed": 3}}, "retry_policy"),
        ({"payload": {"m": float("nan")}}, "payload['m'] is nan"),
        ({"payload": {"m": "a\0"}}, "payload['m'] has a NUL character"),
        ({"payload": [1]}, "payload is list [1]; it must be a mapping"),
        ({"producer_id": "a\0"}, "cannot be stored"),
        ({"producer_id": "\ud800"}, "cannot be stored"),
        ({"colour": "red"}, "unknown option 'colour'"),
    ],
)
def test_what_is_illegal_is_refused_by_name(app: App, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        app.enqueue_sync("t", **options)
    assert said in str(refused.value)
    assert refused.value.http_status == 422


@pytest.mark.parametrize("delay", [0, 0.0, timedelta(0)])
def test_no_delay_is_now(app: App, delay: float) -> None:
    assert app.enqueue_sync("t", delay=delay).status == "pending"
    assert app.enqueue_sync("t", scheduled_at=datetime.now(UTC) - timedelta(days=1)).status == "pending"


def test_many_are_enqueued_in_order_or_not_at_all(app: App, connection: Session_) -> None:
    answers = app.enqueue_many_sync({"job_type": "t", "payload": {"n": n}, "delay": 0} for n in range(3_000))
    assert [app.job_sync(answers[n]).payload for n in (0, 1, 2_999)] == [{"n": 0}, {"n": 1}, {"n": 2_999}]
    with pytest.raises(InvalidJob):
        app.enqueue_many_sync([{"job_type": "t"}, {"job_type": "t", "priority": 9}])
    with pytest.raises(InvalidJob, match=r"jobs\[1\] has no job_type"):
        app.enqueue_many_sync([{"job_type": "t"}, {"payload": {}}])
    with pytest.raises(InvalidPayload, match=r"jobs\[0\]\['payload'\]\['x'\] is inf"):
        app.enqueue_many_sync([{"job_type": "t", "payload": {"x": float("inf")}}])
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (3_000,)
    assert app.enqueue_many_sync([]) == []


def test_results(app: App, connection: Session_) -> None:
    first = app.enqueue_sync("t")
    with pytest.raises(NotFinished, match="is pending"):
        app.result_sync(first)
    end(connection, "complete", '{"ok": true}')
    assert app.result_sync(first) == {"ok": True}
    second = app.enqueue_sync("t")
    end(connection, "fail")
    with pytest.raises(JobFailed, match="broke"):
        app.result_sync(second)
    third = app.enqueue_sync("t")
    assert app.cancel_sync(third) == "cancelled"
    with pytest.raises(JobCancelled):
        app.result_sync(third)
    with pytest.raises(JobNotFound):
        app.result_sync("01a228cf-1f8c-70ac-a063-8f4e42a5bd24")


def test_a_result_that_comes_is_waited_for(app: App, connection: Session_) -> None:
    async def wait() -> Any:
        job = await app.enqueue("t")
        waiting = asyncio.create_task(app.result(job, wait=10))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(waiting)
        await asyncio.to_thread(end, connection, "complete", "7")
        return await waiting

    assert asyncio.run(wait()) == 7


def test_verbs_of_operators(app: App, connection: Session_) -> None:
    job = app.enqueue_sync("t", queue="q")
    with pytest.raises(WrongState, match="cannot be retried"):
        app.retry_sync(job)
    assert app.pause_sync("q")
    assert not app.pause_sync("q")
    assert "paused" in app.why_sync(job)
    assert app.resume_sync("q")
    end(connection, "fail")
    with pytest.raises(WrongState):
        app.cancel_sync(job)
    assert app.retry_sync(job).status == "pending"
    end(connection, "fail")
    assert app.retry_dead_letters_sync(job_type="other") == 0
    assert app.retry_dead_letters_sync(job_type="t", queue="q") == 1
    end(connection, "fail")
    assert app.discard_sync(job) == "discarded"
    with pytest.raises(JobNotFound):
        app.job_sync(job)
    app.enqueue_sync("t")
    end(connection, "fail")
    assert app.discard_dead_letters_sync() == 1


def test_pages_of_jobs(app: App) -> None:
    ids = [answer.job_id for answer in app.enqueue_many_sync([{"job_type": f"t{n % 2}"} for n in range(5)])]
    newest_first = [row.job_id for row in app.jobs_sync()]
    assert newest_first == sorted(ids, reverse=True)
    assert [row.job_id for row in app.jobs_sync(limit=2, before=newest_first[1])] == newest_first[2:4]
    assert {row.job_type for row in app.jobs_sync(job_type="t1", statuses=["pending"])} == {"t1"}
    assert app.jobs_sync(statuses=["completed"]) == []


def test_every_verb_has_its_two_forms_and_its_documentation() -> None:
    forms = [name for name in vars(Client) if f"{name}_sync" in vars(Client)]
    assert len(forms) > 15
    for name in forms:
        assert asyncio.iscoroutinefunction(getattr(Client, name))
        assert not asyncio.iscoroutinefunction(getattr(Client, f"{name}_sync"))
        assert getattr(Client, name).__doc__ == getattr(Client, f"{name}_sync").__doc__
        assert getattr(Client, name).__doc__


# The caller's own transaction.


NEW_ID = "01a228cf-1f8c-70ac-a063-8f4e42a5bd24"


def asyncpg_arguments(database: str) -> dict[str, Any]:
    known = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    given = conninfo_to_dict(database)
    return {known[name]: given[name] for name in known if name in given}


def kept(app: App, job_id: UUID) -> bool:
    try:
        return app.job_sync(job_id).job_id == job_id
    except JobNotFound:
        return False


@pytest.mark.parametrize("commit", [True, False])
def test_in_a_psycopg_transaction(app: App, connect: Connect, commit: bool) -> None:
    session = connect(autocommit=False, row_factory=dict_row)
    job = app.enqueue_sync("t", {"a": 1}, connection=session)
    many = app.enqueue_many_sync([{"job_type": "t"}], connection=session)
    assert not kept(app, job.job_id)
    session.commit() if commit else session.rollback()
    assert kept(app, job.job_id) is kept(app, many[0].job_id) is commit


@pytest.mark.parametrize("commit", [True, False])
def test_in_a_sqlalchemy_transaction(app: App, database: str, commit: bool) -> None:
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database))
    at = datetime.now(UTC) + timedelta(hours=1)
    options: dict[str, Any] = {"scheduled_at": at, "retry_policy": {"jitter": False}, "delay": None, "timeout": 2}
    with Session(engine) as session, engine.connect() as plain:
        session.execute(text("create table mine (id int)"))
        jobs = [
            app.enqueue_sync("t", {"a": ":b %s %(c)s"}, connection=given, **options).job_id
            for given in (session, plain)
        ]
        for given in (session, plain):
            given.commit() if commit else given.rollback()
    engine.dispose()
    assert [kept(app, job) for job in jobs] == [commit, commit]
    if commit:
        assert app.job_sync(jobs[0]).payload == {"a": ":b %s %(c)s"}
        assert app.job_sync(jobs[0]).scheduled_at == at


@pytest.mark.parametrize("commit", [True, False])
def test_in_async_transactions(app: App, database: str, commit: bool) -> None:
    async def work() -> list[UUID]:
        async def creator() -> Any:
            return await psycopg.AsyncConnection.connect(database)

        engine = create_async_engine("postgresql+psycopg://", async_creator=creator)
        bare = await psycopg.AsyncConnection.connect(database)
        async with AsyncSession(engine) as session, engine.connect() as plain:
            jobs = [(await app.enqueue("t", {"a": 1}, connection=given)).job_id for given in (session, plain, bare)]
            for given in (session, plain, bare):
                await (given.commit() if commit else given.rollback())
        await bare.close()
        await engine.dispose()
        return jobs

    assert [kept(app, job) for job in asyncio.run(work())] == [commit] * 3


@pytest.mark.parametrize("commit", [True, False])
def test_in_an_asyncpg_transaction(app: App, database: str, commit: bool) -> None:
    at = datetime.now(UTC) + timedelta(hours=1)

    async def work() -> list[UUID]:
        session = await asyncpg.connect(**asyncpg_arguments(database))
        transaction = session.transaction()
        await transaction.start()
        job = await app.enqueue(
            "t", {"a": 1}, priority="low", timeout=2, delay=3, retry_policy={"jitter": False}, connection=session
        )
        later = await app.enqueue("t", scheduled_at=at, job_id=NEW_ID, connection=session)
        (many,) = await app.enqueue_many([{"job_type": "t"}], connection=session)
        await (transaction.commit() if commit else transaction.rollback())
        await session.close()
        return [job.job_id, later.job_id, many.job_id]

    jobs = asyncio.run(work())
    assert [kept(app, job) for job in jobs] == [commit] * 3
    if commit:
        row = app.job_sync(jobs[0])
        assert (row.payload, row.priority, row.timeout_ms, row.status) == ({"a": 1}, 3, 2000, "submitted")
        assert (app.job_sync(jobs[1]).job_id, app.job_sync(jobs[1]).scheduled_at) == (UUID(NEW_ID), at)


def test_an_error_of_asyncpg_is_ours(app: App, database: str) -> None:
    async def work() -> None:
        session = await asyncpg.connect(**asyncpg_arguments(database))
        try:
            await app.enqueue("t", max_retries=-1, connection=session)
        finally:
            await session.close()

    with pytest.raises(InvalidJob, match="max_retries"):
        asyncio.run(work())


def test_the_wrong_kind_of_connection_is_refused(app: App, connection: Session_) -> None:
    with pytest.raises(ConfigError, match=r"psycopg.Connection cannot be used here: give a psycopg AsyncConnection"):
        asyncio.run(app.enqueue("t", connection=connection))
    with pytest.raises(ConfigError, match=r"builtins.object cannot be used here: give a psycopg Connection"):
        app.enqueue_sync("t", connection=object())


def test_an_error_in_the_callers_transaction_is_ours(app: App, connect: Connect) -> None:
    session = connect(autocommit=False)
    with pytest.raises(InvalidJob):
        app.enqueue_sync("t", max_retries=-1, connection=session)


# Faults of the database.


def test_nowhere_to_connect_to() -> None:
    with make_app("host=127.0.0.1 port=1") as app, pytest.raises(DatabaseUnavailable) as refused:
        app.enqueue_sync("t")
    assert (refused.value.http_status, refused.value.retry_after) == (503, 1.0)


def test_what_is_no_dsn() -> None:
    with make_app("nonsense") as app, pytest.raises(ConfigError, match="not a libpq connection string"):
        app.enqueue_sync("t")


def test_a_database_without_the_schema(app: App, connection: Session_) -> None:
    connection.execute("drop schema pgqueue cascade")
    with pytest.raises(SchemaOutdated, match="run: pgqueue migrate"):
        app.enqueue_sync("t")


def test_a_full_queue(app: App, connection: Session_) -> None:
    connection.execute("insert into pgqueue.queues (name, hard_limit) values ('small', 3)")
    app.enqueue_many_sync([{"job_type": "t", "queue": "small"}] * 3)
    for _ in range(3):
        connection.execute("select pgqueue.sweep()")
    with pytest.raises(QueueFull) as refused:
        app.enqueue_many_sync([{"job_type": "t", "queue": "small"}] * 2)
    assert (refused.value.http_status, refused.value.retry_after) == (503, 1.0)


def test_connections_that_were_cut_are_replaced_without_an_error(app: App, connection: Session_) -> None:
    async def twice() -> None:
        await app.enqueue("t")
        cut()
        await app.enqueue("t")

    def cut() -> None:
        connection.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where application_name = 'pgqueue'"
            " and datname = current_database()"
        )

    app.enqueue_sync("t")
    cut()
    app.enqueue_sync("t")
    asyncio.run(twice())


def test_a_node_that_hangs_is_given_up_in_time(database: str) -> None:
    with (
        stalling_proxy(database) as (through, stall),
        make_app(through, statement_limit=1.0, connect_timeout=2.0) as app,
    ):
        app.enqueue_sync("t")
        stall()
        began = running_time()
        with pytest.raises(DatabaseUnavailable, match="did not answer enqueue within 1 s"):
            app.enqueue_sync("t")
        with pytest.raises(DatabaseUnavailable):
            app.enqueue_sync("t")
        assert running_time() - began < 20


def test_a_node_that_became_read_only_is_left(app: App, connection: Session_) -> None:
    alter = "do $$ begin execute format('alter database %I {}', current_database()); end $$"
    connection.execute(alter.format("set default_transaction_read_only = on"))
    with pytest.raises(DatabaseUnavailable):
        app.enqueue_sync("t")
    connection.execute("set default_transaction_read_only = off")
    connection.execute(alter.format("reset default_transaction_read_only"))
    app.enqueue_sync("t")


def test_callers_that_go_away_leave_no_seat_taken(database: str, connection: Session_) -> None:
    async def hammer(app: App) -> None:
        job = await app.enqueue("t")
        for pause in itertools.islice(itertools.cycle([0.0, 0.001, 0.003]), 60):
            calls = [asyncio.create_task(app.result(job, wait=30)) for _ in range(8)]
            await asyncio.sleep(pause)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        assert len(await asyncio.gather(*(app.job(job) for _ in range(8)))) == 8

    with make_app(database, pool_size=4) as app:
        asyncio.run(asyncio.wait_for(hammer(app), 60))
        ours = "from pg_stat_activity where application_name = 'pgqueue' and datname = current_database()"
        busy = f"select count(*) {ours} and state <> 'idle'"
        assert connection.execute(busy).fetchone() == (0,)
        seats = f"select count(*) <= 4 {ours}"
        # The server takes a moment to see that a connection given up for dead was closed.
        assert eventually(lambda: connection.execute(seats).fetchone() == (True,))


def test_more_callers_than_connections_wait_their_turn(database: str) -> None:
    async def many(app: App) -> int:
        return len(await asyncio.gather(*(app.enqueue("t") for _ in range(200))))

    with make_app(database, pool_size=2) as app:
        assert asyncio.run(many(app)) == 200


def test_without_prepared_statements(database: str, connection: Session_) -> None:
    with make_app(database, prepare=False) as app:
        for _ in range(10):
            app.enqueue_sync("t")
        with app._sync_pool().connection() as session:
            assert session.execute("select count(*) from pg_prepared_statements").fetchone() == (0,)
    with make_app(database) as app:
        app.enqueue_sync("t")
        with app._sync_pool().connection() as session:
            assert session.execute("select count(*) from pg_prepared_statements").fetchone() == (1,)


def test_errors_are_one_tree() -> None:
    from pgqueue import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert all(issubclass(kind, PgqueueError) for kind in kinds)
    assert all(400 <= kind.http_status < 600 and kind.problem_type and kind.title for kind in kinds)
    assert all(kind.__doc__ or kind.title for kind in kinds)


def test_settings_of_an_app_may_be_given(database: str) -> None:
    with App(database) as first, App(settings=Settings(dsn=database)) as second:
        assert first.dsn == second.dsn == database
