"""The listener: hears, comes back, and says at the start when it cannot hear."""

import asyncio
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from psycopg.sql import SQL, Identifier

from pgqueue import App, Job
from pgqueue.errors import ConfigError
from pgqueue.listener import Listener
from pgqueue.settings import Settings
from tests.python.running import make_app, worker_of

Session = psycopg.Connection[Any]
CUT = """select pg_terminate_backend(pid, 5000) from pg_stat_activity
          where application_name = 'pgqueue listener' and datname = current_database()"""


def test_bells_are_heard_and_a_cut_is_told(database: str, connection: Session) -> None:
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def listen() -> None:
        settings = Settings(poll_interval=0.2)
        listener = Listener(database, settings, ["a_b1"], lambda channel, payload: heard.put_nowait((channel, payload)))
        running = asyncio.create_task(listener.run())
        for round_ in range(3):
            async with asyncio.timeout(20):
                assert await heard.get() == ("", ""), "it has connected: bells before may have been missed"
                connection.execute("select pg_notify('a_b1', %s)", (f"é {round_}",))
                assert await heard.get() == ("a_b1", f"é {round_}")
                connection.execute(CUT)
        running.cancel()

    asyncio.run(listen())


def test_no_timeout_of_idle_sessions_ends_it(database: str, connection: Session) -> None:
    heard: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    setting = SQL("alter database {} set idle_session_timeout = '200ms'").format(Identifier(connection.info.dbname))
    connection.execute(setting)

    async def listen() -> None:
        listener = Listener(database, Settings(), ["a"], lambda channel, payload: heard.put_nowait((channel, payload)))
        running = asyncio.create_task(listener.run())
        async with asyncio.timeout(20):
            assert await heard.get() == ("", "")
            await asyncio.sleep(0.5)
            connection.execute("select pg_notify('a', 'still there')")
            assert await heard.get() == ("a", "still there"), "it has connected anew"
        running.cancel()

    asyncio.run(listen())


@pytest.mark.parametrize("channel", ["", "a b", "A", 'a"', "x" * 64])
def test_channels_that_listen_would_misread_are_refused(channel: str) -> None:
    with pytest.raises(ConfigError, match="the channel is"):
        Listener("", Settings(), [channel], print)


@pytest.fixture
def app(database: str) -> Iterator[App]:
    # A bell does not cross databases, as it does not cross a pooler in transaction mode.
    with make_app(database, listen_dsn=make_conninfo(database, dbname="postgres")) as app:

        @app.task("t")
        async def t(job: Job) -> None: ...

        yield app


def test_a_worker_that_cannot_hear_refuses_to_start(app: App) -> None:
    async def run() -> None:
        await asyncio.wait_for(app.worker().run(), 20)

    with pytest.raises(ConfigError, match="set PGQUEUE_LISTEN_DSN to a direct connection, or PGQUEUE_WAKE=poll"):
        asyncio.run(run())


def test_polling_needs_no_bell(app: App, database: str) -> None:
    with make_app(database, listen_dsn="host=nowhere.invalid", wake="poll", poll_interval=0.1) as polling:
        polling.tasks.add(app.tasks["t"])
        with worker_of(polling):
            assert polling.result_sync(app.enqueue_sync("t"), wait=10) is None
