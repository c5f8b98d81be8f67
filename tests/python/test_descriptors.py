"""Descriptors that libpq closes: no event loop watches them by then, so that no other socket is mistaken for them.

uvloop hangs or aborts the process otherwise, so each case is a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCENE = '''
import asyncio, os, sys, time
import psycopg, uvloop
from pgqueue import calling, calls
from pgqueue.connections import Link
from pgqueue.errors import DatabaseUnavailable
from pgqueue.listener import Listener
from pgqueue.settings import Settings

DSN = os.environ["PGQUEUE_DSN"]


async def closed(descriptor):
    """Returns at the very turn of the loop at which the descriptor is no more."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.fstat(descriptor)
        except OSError:
            return
        await asyncio.sleep(0)
    raise AssertionError("not closed")


async def sockets_work():
    """Sockets made now, of which one gets the number of the closed one, answer."""
    async def answer(reader, writer):
        writer.write(await reader.read(1))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    where = server.sockets[0].getsockname()
    pairs = [await asyncio.open_connection(*where) for _ in range(4)]
    for reader, writer in pairs:
        writer.write(b"x")
        async with asyncio.timeout(10):
            assert await reader.read(1) == b"x"
        writer.close()
    server.close()


async def listener():
    told = asyncio.Queue()
    made = Listener(DSN, Settings(poll_interval=0.1), ["c"], lambda *notice: told.put_nowait(notice))
    running = asyncio.create_task(made.run())
    cut = """select pg_terminate_backend(pid) from pg_stat_activity
              where application_name = 'pgqueue listener' and datname = current_database()"""
    with psycopg.connect(DSN, autocommit=True) as connection:
        for _ in range(10):
            async with asyncio.timeout(20):
                assert await told.get() == ("", "")
            descriptor = made._connection.pgconn.socket
            cutting = asyncio.create_task(asyncio.to_thread(connection.execute, cut))
            await closed(descriptor)
            await sockets_work()
            await cutting
    running.cancel()


async def link():
    slow = calling.Call("slow", "select pg_sleep(60)", lambda cursor: cursor.fetchall())
    for _ in range(10):
        made = Link(DSN, Settings(), "test")
        running = asyncio.create_task(made.call(slow))
        while made.connection is None or made.connection.pgconn.transaction_status != 1:
            await asyncio.sleep(0.01)
        descriptor = made.connection.pgconn.socket
        # Beside the call: one of the two closes the descriptor.
        made.close()
        await closed(descriptor)
        await sockets_work()
        try:
            await asyncio.wait_for(running, 10)
        except DatabaseUnavailable:
            continue
        raise AssertionError("it went on")


with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(globals()[sys.argv[1]]())
print("well")
'''


@pytest.mark.parametrize("what", ["listener", "link"])
def test_an_event_loop_watches_no_descriptor_that_libpq_closes(database: str, what: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _SCENE, what],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PGQUEUE_DSN": database},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("well\n")
