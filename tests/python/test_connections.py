"""What sessions of ours keep to, whatever the defaults of the role or database."""

import asyncio
from typing import Any

import psycopg
import pytest

from pgqueue import App, Job
from pgqueue.errors import InvalidJob
from tests.python.running import eventually, make_app, worker_of

Session = psycopg.Connection[Any]
LEVELS = ["repeatable read", "serializable"]
SEEN = """
    create table public.seen (level text);
    create function public.see() returns trigger language plpgsql as $$
    begin
      insert into public.seen values (current_setting('transaction_isolation'));
      return null;
    end $$;
    create trigger see after insert or update or delete on pgqueue.jobs_live execute function public.see();
"""
SET = """do $$ begin
    execute format('alter database %I set default_transaction_isolation = \'\'{}\'\'', current_database());
end $$"""


@pytest.mark.parametrize("level", LEVELS)
def test_everything_runs_in_read_committed(database: str, connection: Session, level: str) -> None:
    connection.execute(SEEN)
    connection.execute(SET.format(level))
    with make_app(database, sweep_interval=0.05, poll_interval=0.2) as app:

        @app.task("async")
        async def asynchronous(job: Job) -> str:
            async with job.connection() as session:
                return str(await (await session.execute("show transaction_isolation")).fetchone())

        @app.task("sync")
        def sync(job: Job) -> str:
            with job.connection() as session:
                return str(session.execute("show transaction_isolation").fetchone())

        @app.task("noop")
        async def noop(job: Job) -> None: ...

        async def enqueue() -> list[Any]:
            return [await app.enqueue("noop"), *await app.enqueue_many([{"job_type": "noop"}] * 3)]

        with worker_of(app):
            jobs = [*asyncio.run(enqueue()), app.enqueue_sync("noop", delay=0.1)]
            jobs += app.enqueue_many_sync([{"job_type": "noop"}] * 3)
            assert {app.finished_job_sync(job, wait=30).status for job in jobs} == {"completed"}
            for task in (asynchronous, sync):
                assert app.result_sync(task.enqueue_sync(), wait=30) == "('read committed',)"
    assert connection.execute("select distinct level from seen").fetchall() == [("read committed",)]


def test_a_transaction_of_the_callers_own_is_left_alone(app: App, connection: Session) -> None:
    connection.execute(SEEN)
    with connection.transaction():
        connection.execute("set transaction isolation level serializable")
        app.enqueue_sync("t", connection=connection)
    assert connection.execute("select distinct level from seen").fetchall() == [("serializable",)]


def test_a_call_that_fails_leaves_no_transaction_open(database: str, connection: Session) -> None:
    connection.execute(SET.format("serializable"))
    with make_app(database) as app:
        with pytest.raises(InvalidJob):
            app.enqueue_sync("t" * 200)
        app.enqueue_sync("t")
        open_ones = "select count(*) from pg_stat_activity where state like 'idle in%' and datname = current_database()"
        eventually(lambda: connection.execute(open_ones).fetchone() == (0,))
