"""What a task writes over the connection of its attempt, and what it sees of others."""

import asyncio
from typing import Any

import psycopg
import pytest

from pgqueue import App, Job
from tests.python.running import eventually, lose, make_app, worker_of

Session = psycopg.Connection[Any]
QUICK = {"retry_policy": {"base_delay_ms": 10, "jitter": False}}


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tasks_writes_and_its_completion_are_one(app: App, connection: Session, asynchronous: bool) -> None:
    connection.execute("create table paid (job_id uuid, attempt int)")
    insert = "insert into paid values (%s, %s)"

    if asynchronous:

        @app.task("pay", max_retries=1, **QUICK)
        async def pay(job: Job) -> str:
            async with job.connection() as session:
                await session.execute(insert, (job.job_id, job.attempt))
            assert await job.connection() is session
            if job.attempt == 1:
                raise ValueError("after the write")
            return "paid"

    else:

        @app.task("pay", max_retries=1, **QUICK)
        def pay(job: Job) -> str:
            with job.connection() as session:
                session.execute(insert, (job.job_id, job.attempt))
            if job.attempt == 1:
                raise ValueError("after the write")
            return "paid"

    with worker_of(app):
        job = app.enqueue_sync("pay")
        assert app.result_sync(job, wait=10) == "paid"
    assert connection.execute("select * from paid").fetchall() == [(job.job_id, 2)]


def test_a_guard_says_the_same_each_time_and_counts_with_its_attempt(app: App) -> None:
    @app.task("threaded", max_retries=1, **QUICK)
    def threaded(job: Job) -> list[bool]:
        first, second = job.once("a"), job.once("a")
        seen = [bool(first), bool(first), bool(second)]
        if job.attempt == 1:
            raise ValueError("again")
        return seen

    @app.task("coroutine", max_retries=1, **QUICK)
    async def coroutine(job: Job) -> list[bool]:
        first, second = job.once("a"), job.once("a")
        seen = [await first, await first, await second]
        if job.attempt == 1:
            raise ValueError("again")
        return seen

    with worker_of(app):
        for name in ("threaded", "coroutine"):
            assert app.result_sync(app.enqueue_sync(name), wait=10) == [True, True, False]


def test_a_transaction_of_an_attempt_that_lost_its_job_is_undone(app: App, connection: Session) -> None:
    connection.execute("create table paid (attempt int)")

    @app.task("pay")
    async def pay(job: Job) -> str:
        async with job.connection() as session:
            await session.execute("insert into paid values (%s)", (job.attempt,))
            if job.attempt == 1:
                await asyncio.to_thread(lose, connection, job)
        return f"attempt {job.attempt}"

    with worker_of(app):
        job = app.enqueue_sync("pay")
        assert app.result_sync(job, wait=10) == "attempt 2"
    assert connection.execute("select * from paid").fetchall() == [(2,)]
    assert app.job_sync(job).lost == 1


def test_a_stop_that_comes_with_the_end_leaves_no_transaction_open(app: App, connection: Session) -> None:
    connection.execute("create table paid (attempt int)")

    @app.task("pay", max_retries=0)
    async def pay(job: Job) -> None:
        async with job.connection() as session:
            await session.execute("insert into paid values (%s)", (job.attempt,))
        # Takes effect with the next thing that is waited for: the completion.
        current = asyncio.current_task()
        assert current is not None
        current.cancel()

    with worker_of(app):
        job = app.enqueue_sync("pay")
        eventually(lambda: app.job_sync(job).status != "processing" and app.job_sync(job).attempts == 1)
        open_ones = "select count(*) from pg_stat_activity where state like 'idle in%' and datname = current_database()"
        # Before the worker stops. One of a sweep may be open for a moment.
        eventually(lambda: connection.execute(open_ones).fetchone() == (0,))
    assert connection.execute("select * from paid").fetchall() == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_task_whose_job_ends_cancelled_has_written_nothing(app: App, connection: Session, asynchronous: bool) -> None:
    connection.execute("create table paid (attempt int)")
    # No bell, so that the task hears nothing of it before it returns.
    connection.execute("set pgqueue.wake = off")

    def cancel(job: Job) -> str:
        return str(connection.execute("select pgqueue.cancel(%s)", (job.job_id,)).fetchall()[0][0])

    if asynchronous:

        @app.task("pay")
        async def pay(job: Job) -> str:
            async with job.connection() as session:
                await session.execute("insert into paid values (%s)", (job.attempt,))
            return cancel(job)

    else:

        @app.task("pay")
        def pay(job: Job) -> str:
            with job.connection() as session:
                session.execute("insert into paid values (%s)", (job.attempt,))
            return cancel(job)

    with worker_of(app):
        row = app.finished_job_sync(app.enqueue_sync("pay"), wait=20)
    assert (row.status, row.error, row.attempts) == ("cancelled", "cancelled on request", 1)
    assert connection.execute("select * from paid").fetchall() == []


def test_a_transaction_block_left_by_an_exception_is_undone(app: App, connection: Session) -> None:
    connection.execute("create table paid (what text)")

    @app.task("pay")
    async def pay(job: Job) -> str:
        try:
            async with job.connection() as session:
                await session.execute("insert into paid values ('wrong')")
                raise ValueError
        except ValueError:
            pass
        async with job.connection() as session:
            await session.execute("insert into paid values ('right')")
        return "ok"

    with worker_of(app):
        assert app.result_sync(app.enqueue_sync("pay"), wait=10) == "ok"
    assert connection.execute("select * from paid").fetchall() == [("right",)]


def test_transactions_wait_for_connections_without_harm(database: str, connection: Session) -> None:
    connection.execute("create table paid (n int)")
    with make_app(database, pool_size=2) as app:

        @app.task("pay")
        async def pay(job: Job, n: int) -> None:
            async with job.connection() as session:
                await session.execute("insert into paid values (%s)", (n,))

        @app.task("own")
        async def own(job: Job) -> None:
            await app.job(job.job_id)

        with worker_of(app, concurrency=20):
            jobs = [pay.enqueue_sync(n) for n in range(100)] + [own.enqueue_sync() for _ in range(100)]
            rows = [app.finished_job_sync(job, wait=30) for job in jobs]
    assert {(row.status, row.lost) for row in rows} == {("completed", 0)}
    assert connection.execute("select count(*) from paid").fetchone() == (100,)


def test_the_tasks_connection_is_an_ordinary_one(app: App) -> None:
    @app.task("t")
    def t(job: Job) -> list[str]:
        with job.connection() as session:
            row = session.execute("select %s::uuid, now()", (job.job_id,)).fetchone()
            assert row is not None
            return [type(value).__name__ for value in row]

    with worker_of(app):
        assert app.result_sync(t.enqueue_sync(), wait=10) == ["UUID", "datetime"]


LEAVE = [
    "set statement_timeout = '1234ms'",
    "set timezone = 'Asia/Tokyo'",
    "set search_path = 'public'",
    "set my.setting = 'on'",
    "create temp table left_over (n int)",
    "create sequence drawn",
    "select nextval('drawn')",
    "select pg_advisory_lock(42)",
    "listen left_over",
    "declare left_over cursor with hold for select 1",
    "set role pgqueue_worker",
]
LEFT = """
    select current_setting('statement_timeout'), current_setting('timezone'), current_setting('search_path'),
           coalesce(current_setting('my.setting', true), ''), to_regclass('pg_temp.left_over') is not null,
           (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid() and objid = 42),
           (select count(*) from pg_listening_channels()), (select count(*) from pg_cursors),
           current_user = session_user, current_setting('client_encoding'), current_setting('application_name')
"""
PID = "select pg_backend_pid(), (select count(*) from pg_prepared_statements)"


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_task_leaves_in_its_session_no_other_meets(app: App, asynchronous: bool, fails: bool) -> None:
    if asynchronous:

        @app.task("look")
        async def look(job: Job) -> Any:
            async with job.connection() as session:
                left = await (await session.execute(LEFT)).fetchone()
                pid = await (await session.execute(PID)).fetchone()
            return [left, pid]

        @app.task("leave", max_retries=0)
        async def leave(job: Job) -> None:
            async with job.connection() as session:
                for statement in LEAVE:
                    await session.execute(statement)
                if fails:
                    raise ValueError("after all that")

    else:

        @app.task("look")
        def look(job: Job) -> Any:
            with job.connection() as session:
                return [session.execute(LEFT).fetchone(), session.execute(PID).fetchone()]

        @app.task("leave", max_retries=0)
        def leave(job: Job) -> None:
            with job.connection() as session:
                for statement in LEAVE:
                    session.execute(statement)
                if fails:
                    raise ValueError("after all that")

    with worker_of(app, concurrency=1):
        clean, (pid, _) = app.result_sync(app.enqueue_sync("look"), wait=20)
        ended = app.finished_job_sync(app.enqueue_sync("leave"), wait=20)
        assert ended.status == ("dead_letter" if fails else "completed"), ended.error
        again, (the_same, prepared) = app.result_sync(app.enqueue_sync("look"), wait=20)
    assert (again, the_same) == (clean, pid)
    assert clean[-2:] == ["UTF8", "pgqueue task"]
    if not fails:
        # A rollback has the driver forget what it has prepared.
        assert prepared >= 2


def test_context_variables_do_not_leak_from_job_to_job(app: App) -> None:
    import contextvars

    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    @app.task("async")
    async def asynchronous(job: Job, n: int) -> Any:
        before = variable.get(None)
        variable.set(n)
        return before

    @app.task("sync")
    def sync(job: Job, n: int) -> Any:
        before = variable.get(None)
        variable.set(n)
        return before

    with worker_of(app, concurrency=1):
        for task in (asynchronous, sync):
            jobs = [task.enqueue_sync(n) for n in range(3)]
            assert [app.result_sync(job, wait=10) for job in jobs] == [None] * 3
