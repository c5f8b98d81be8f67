"""What takes minutes: many streams over a busy queue, and how many jobs a second one process takes."""

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.calling import Call
from tests.api.conftest import Serve, Served
from tests.conftest import Connect
from tests.meet import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 500
BUSY = (
    "select count(*) from pg_stat_activity where application_name like 'pgqueue api%' and datname = current_database()"
    " and state <> 'idle'"
)
WORKER = "6b2f0c1e-3d6a-4b65-9b39-2a1d1f1b5a10"
# Two thousand jobs a second, enqueued, claimed and completed in the database; prints how many it was.
LOAD = """
import psycopg, signal, sys, time, uuid
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
s = psycopg.connect(sys.argv[1], autocommit=True)
w, n, begun = uuid.uuid4(), 0, time.monotonic()
while not stop:
    s.execute("insert into pgqueue.jobs (job_type, queue) select 'load', 'load' from generate_series(1, 100)")
    s.execute("with c as (select array_agg(job_id) ids, array_agg(attempts) n from pgqueue.claim(%(w)s, '{load}', 100))"
              " select pgqueue.complete(%(w)s, ids, n, null) from c where ids is not null", {"w": w})
    n += 100
    time.sleep(max(0, n / 2000 - (time.monotonic() - begun)))
print(n / (time.monotonic() - begun))
"""


def memory_of(served: Served) -> float:
    """The resident memory of a server, in MiB."""
    with open(f"/proc/{served.process.pid}/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 2**20


def idle_machine() -> bool:
    """Whether times measured here say something."""
    return os.getloadavg()[0] < 4


def test_five_hundred_streams_hear_every_end_while_two_thousand_jobs_a_second_run(
    serve: Serve, connect: Connect, database: str
) -> None:
    served = serve("--no-maintenance")
    session = connect()
    batch = json.dumps([{"type": "a", "queue": "watched"}] * STREAMS)
    ids = [str(row[0]) for row in session.execute("select job_id from pgqueue.enqueue_many(%s)", [batch])]
    load = subprocess.Popen([sys.executable, "-c", LOAD, database], stdout=subprocess.PIPE, text=True)
    try:
        late, before, after = asyncio.run(_watch(served, ids, database))
    finally:
        load.terminate()
        rate = float(load.communicate(timeout=30)[0] or 0)
    assert len(late) == STREAMS
    late.sort()
    p50, p99 = late[len(late) // 2], late[int(len(late) * 0.99)]
    print(
        f"\n{rate:.0f} jobs/s beside, {STREAMS} ends: p50 {p50:.3f} s, p99 {p99:.3f} s; {before:.0f} -> {after:.0f} MiB"
    )
    assert after < before * 1.2 + 20
    wait_until(lambda: session.execute(BUSY).fetchone() == (0,), 15)
    wait_until(lambda: session.execute("select count(*) from pgqueue.watchers").fetchone() == (0,), 20)
    if idle_machine():
        assert p99 < 0.25


async def _watch(served: Served, ids: list[str], database: str) -> tuple[list[float], float, float]:
    finished: dict[str, float] = {}
    late: list[float] = []
    following = asyncio.Semaphore(0)

    async def follow(client: httpx.AsyncClient, job_id: str) -> None:
        async with client.stream("GET", f"/jobs/{job_id}/events") as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line == "event: job.queued":
                    following.release()
                elif line == "event: job.completed":
                    late.append(time.monotonic() - finished[job_id])

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=served.url, limits=limits, timeout=120) as client:
        streams = [asyncio.create_task(follow(client, job_id)) for job_id in ids]
        for _ in ids:
            await asyncio.wait_for(following.acquire(), 120)
        before = memory_of(served)
        async with await psycopg.AsyncConnection.connect(database, autocommit=True) as session:
            for _ in range(STREAMS // 10):
                claimed = await session.execute(
                    "select job_id, attempts from pgqueue.claim(%s, '{watched}', 10)", [WORKER]
                )
                rows = await claimed.fetchall()
                # A little before the commit, so that nothing is made to look better than it is.
                finished.update({str(row[0]): time.monotonic() for row in rows})
                await session.execute(
                    "select pgqueue.complete(%s, %s, %s, null)",
                    [WORKER, [row[0] for row in rows], [row[1] for row in rows]],
                )
                await asyncio.sleep(0.4)
        done, pending = await asyncio.wait(streams, timeout=10)
        assert not pending, f"{len(pending)} streams did not end"
        for one in done:
            one.result()
    return late, before, memory_of(served)


INSERT = Call(
    "insert",
    "insert into pgqueue.jobs (job_type, payload) values (%(job_type)s, %(payload)s::jsonb) returning job_id::text",
    lambda rows: rows,
    hot=True,
)
TIMED = """
import asyncio, json, sys, time
try:
    import uvloop as loops
except ImportError:
    loops = asyncio
async def timed(one, workers, seconds, rate=0.0):
    late, begun = [], time.perf_counter()
    async def work(n):
        due = begun + (n / rate if rate else 0)
        while time.perf_counter() - begun < seconds:
            if rate:
                await asyncio.sleep(max(0, due - time.perf_counter()))
                due += workers / rate
            t = time.perf_counter()
            await one(n)
            late.append(time.perf_counter() - t)
    await asyncio.gather(*(work(n) for n in range(workers)))
    late.sort()
    return {"rate": len(late) / (time.perf_counter() - begun), "p99": late[int(len(late) * .99)]}
"""
BARE = f"""{TIMED}
from pgqueue import connections, settings
from tests.api.test_slow import INSERT
async def main():
    pool = connections.AsyncPool(sys.argv[1], settings.Settings(pool_size=16))
    one = lambda n: pool.run(INSERT, job_type="echo", payload='{{"a":1}}')
    await timed(one, 16, 1)
    print(json.dumps(await timed(one, 16, 5, float(sys.argv[2]))))
loops.run(main())
"""
HTTP = f"""{TIMED}
from urllib.parse import urlsplit
BODY = b'{{"type":"echo","payload":{{"a":1}}}}'
HEAD = ["POST /jobs HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: %d" % len(BODY)]
REQUEST = "\\r\\n".join([*HEAD, "", ""]).encode() + BODY
async def main():
    url, rate = urlsplit(sys.argv[1]), float(sys.argv[2])
    peers = [await asyncio.open_connection(url.hostname, url.port) for _ in range(16)]
    async def one(n):
        reader, writer = peers[n]
        writer.write(REQUEST)
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        assert head.startswith(b"HTTP/1.1 201"), head
        at = head.lower().index(b"content-length:")
        await reader.readexactly(int(head[at + 15:head.index(b"\\r\\n", at)]))
    await timed(one, 16, 1)
    print(json.dumps(await timed(one, 16, 5, rate)))
loops.run(main())
""".replace("\r\n", "\\r\\n")


def _measured(program: str, *arguments: Any) -> dict[str, float]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def test_submits_over_http_against_bare_inserts(serve: Serve, connect: Connect, database: str) -> None:
    """One API process, 16 connections on loopback, beside the INSERT of the same rows through the same pool."""
    served = serve("--no-maintenance", env={"PGQUEUE_POOL_SIZE": "16"})
    connect().execute(
        "insert into pgqueue.queues (name, soft_limit, hard_limit) values ('default', 10000000, 10000000)"
    )
    rounds = [(_measured(BARE, database, 0)["rate"], _measured(HTTP, served.url, 0)["rate"]) for _ in range(3)]
    bare, rest = (statistics.median(column) for column in zip(*rounds, strict=True))
    bare_half, half = (_measured(BARE, database, rest / 2)["p99"], _measured(HTTP, served.url, rest / 2)["p99"])
    print(
        f"\nbare {bare:.0f}/s, HTTP {rest:.0f}/s, ratio {rest / bare:.2f}; at half of that p99 {half * 1000:.1f} ms,"
        f" of bare inserts {bare_half * 1000:.1f} ms"
    )
    if idle_machine():
        assert rest / bare >= 0.5
        assert half < 0.010
