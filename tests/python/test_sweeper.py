"""The sweeper: what it does step by step or in one statement, and what it costs when there is nothing to do."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App, Job, Settings
from pgqueue.errors import DatabaseError
from pgqueue.sweeper import Sweeper
from tests.meet import wait_until
from tests.python.running import make_app, worker_of

Session = psycopg.Connection[Any]
BROKEN = """create or replace function pgqueue.sweep_keys(max_jobs int) returns bigint language plpgsql
    as $$ begin {}; return 0; end $$"""
LATER = "select from pgqueue.jobs_live where greatest(due_at, lease_expires_at) >= pgqueue.clock()"
CLAIM = "select job_id from pgqueue.claim(gen_random_uuid(), null, 100, interval '100 milliseconds')"


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as app:
        yield app


def sweep(database: str, quiet: bool = True, times: int = 1, interval: float = 0.1) -> None:
    """Have a sweeper that had the turn before take so many steps; not quiet: as if it had just moved something."""

    async def main() -> None:
        made = Sweeper(database, Settings.load(env={}, dsn=database, sweep_interval=interval))
        made._mine = True
        if not quiet:
            made._moved_at = time.monotonic()
        try:
            more = True
            for _ in range(times):
                await asyncio.sleep(0 if more else 0.15)
                more = await made.step()
        finally:
            await made.close()

    asyncio.run(main())


def statuses(connection: Session) -> dict[str, int]:
    return dict(connection.execute("select status, count(*) from pgqueue.jobs group by 1").fetchall())


def all_due(connection: Session) -> None:
    """Waits until every delay and every lease is over."""
    wait_until(lambda: not connection.execute(LATER).rowcount)


def test_an_idle_worker_asks_little(app: App, connection: Session, called: Counter[str]) -> None:
    connection.execute("select pgqueue.maintain_partitions()")

    @app.task("t")
    async def t(job: Job) -> None: ...

    with worker_of(app):
        time.sleep(4)
        called.clear()
        time.sleep(10)
        asked = dict(called)
    assert sum(asked.values()) < 3 * 10, asked


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("jobs", [3, 250])
def test_a_sweep_does_what_is_due(
    app: App, database: str, connection: Session, called: Counter[str], quiet: bool, jobs: int
) -> None:
    app.enqueue_many_sync([{"job_type": "t"}] * min(jobs, 100))
    assert len(connection.execute(CLAIM).fetchall()) == min(jobs, 100)
    app.enqueue_many_sync([{"job_type": "t", "delay": 0.1}] * jobs)
    connection.execute(
        """insert into pgqueue.schedules (name, cron, job_type, next_run_at)
           values ('s', '0 0 * * *', 'scheduled', pgqueue.clock() - interval '1 second')"""
    )
    all_due(connection)
    sweep(database, quiet, times=1 + jobs // 100)
    assert statuses(connection) == {"pending": min(jobs, 100) + jobs + 1}
    assert (called["sweep_steps"] > 0) is quiet
    if not quiet:
        assert called["sweep_step"] >= 9


@pytest.mark.parametrize("quiet", [True, False])
def test_a_step_that_fails_is_named_and_keeps_no_other(
    app: App, database: str, connection: Session, quiet: bool
) -> None:
    app.enqueue_sync("t", delay=0.05)
    connection.execute(BROKEN.format("raise exception 'out of order'"))
    all_due(connection)
    with pytest.raises(DatabaseError, match="keys: out of order"):
        sweep(database, quiet)
    assert statuses(connection) == {"pending": 1}


def test_a_sweep_that_takes_too_long_in_one_is_done_in_steps(
    app: App, database: str, connection: Session, monkeypatch: pytest.MonkeyPatch, called: Counter[str]
) -> None:
    app.enqueue_sync("t", delay=0.05)
    connection.execute(BROKEN.format("perform pg_sleep(2)"))
    all_due(connection)
    with pytest.raises(DatabaseError, match="keys: "):
        sweep(database + " options='-c statement_timeout=500'", times=2)
    assert statuses(connection) == {"pending": 1}
    assert called["sweep_steps"] == 1


def test_of_two_sweepers_one_works(app: App, database: str, called: Counter[str]) -> None:
    sweep(database)
    called.clear()
    # Sooner than within the interval after the last one.
    sweep(database, interval=60.0)
    assert sum(called.values()) <= 2


def test_one_of_a_crowd_asks_for_the_turn_once_the_crowd_is_gone(database: str, called: Counter[str]) -> None:
    async def main() -> None:
        made = Sweeper(database, Settings.load(env={}, dsn=database, sweep_interval=0.2))
        made.crowd = 1000.0
        try:
            await made.step()
            assert made.pause() > 100
            await asyncio.sleep(0.3)
            await made.step()
            made.crowd = 1.0
            await made.step()
        finally:
            await made.close()

    sweep(database, interval=0.2)
    called.clear()
    asyncio.run(main())
    assert called["take_turn"] == 2


@pytest.mark.parametrize("jobs", [500, 4000])
def test_cursors_that_rise_fast_rise_again_soon(app: App, database: str, connection: Session, jobs: int) -> None:
    """An old snapshot keeps what was worked off, and each claim walks it from where the cursors are on."""

    async def pause_after_a_sweep() -> float:
        made = Sweeper(database, Settings.load(env={}, dsn=database, sweep_interval=0.9))
        made._moved_at = time.monotonic()
        try:
            await made.step()
            await asyncio.sleep(1)
            taken = f"select count(*) from pgqueue.claim(gen_random_uuid(), null, {jobs})"
            assert connection.execute(taken).fetchone() == (jobs,)
            await made.step()
            return made.pause()
        finally:
            await made.close()

    app.enqueue_many_sync([{"job_type": "t"}] * jobs)
    for _ in range(2):
        connection.execute("select pgqueue.sweep('cursors')")
    assert (asyncio.run(pause_after_a_sweep()) < 0.3) is (jobs == 4000)
