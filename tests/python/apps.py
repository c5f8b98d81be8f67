"""The app that worker processes of tests run. Its tasks say what they do over a connection of their own."""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import psycopg

from pgqueue import App, Cancel, Job, Settings

DSN = os.environ.get("PGQUEUE_DSN", "")
MARKS = """create table if not exists public.marks (
    at timestamptz default clock_timestamp(), job_id uuid, attempt int, what text)"""

app = App(settings=Settings.load(grace=float(os.environ.get("PGQUEUE_GRACE", "5"))))


def mark(job: Job, what: str) -> None:
    with psycopg.connect(DSN, autocommit=True) as connection:
        connection.execute(
            "insert into public.marks (job_id, attempt, what) values (%s, %s, %s)", (job.job_id, job.attempt, what)
        )


@app.middleware
def marking(job: Job) -> Iterator[None]:
    if job.job_type != "surrounded":
        return
    mark(job, f"before {os.getpid()}")
    yield
    mark(job, f"after {os.getpid()}")


@app.middleware
async def marking_too(job: Job) -> AsyncIterator[None]:
    if job.job_type != "surrounded":
        return
    yield
    await asyncio.sleep(0)
    mark(job, "async")


@app.task("surrounded", process=True)
def surrounded(job: Job) -> None:
    mark(job, "ran")


@app.task("noop")
async def noop(job: Job) -> None: ...


@app.task("pause")
async def pause(job: Job, seconds: float) -> None:
    """Waits and leaves no mark."""
    await asyncio.sleep(seconds)


@app.task("talks")
async def talks(job: Job, port: int) -> None:
    """Opens sockets, one after the other."""
    for _ in range(5):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(b"x")
            async with asyncio.timeout(20):
                assert await reader.read(1) == b"x"
        finally:
            writer.close()


@app.task("nothing")
def nothing(job: Job) -> None:
    """Of a thread."""


@app.task("marked")
def marked(job: Job) -> None:
    mark(job, "ran")


@app.task("slow")
async def slow(job: Job, seconds: float) -> str:
    mark(job, "begun")
    await asyncio.sleep(seconds)
    mark(job, "done")
    return "slept"


@app.task("blocking", timeout=1)
def blocking(job: Job, seconds: float) -> None:
    mark(job, "begun")
    time.sleep(seconds)
    mark(job, "done")


@app.task("thread")
def thread(job: Job, seconds: float) -> None:
    """Works in a thread until its time is over or it is told to stop."""
    mark(job, "begun")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if job.cancelled:
            mark(job, "told")
            raise Cancel
        time.sleep(0.01)
    mark(job, "done")


@app.task("blocks_the_loop")
async def blocks_the_loop(job: Job, seconds: float) -> None:
    mark(job, "begun")
    time.sleep(seconds)  # noqa: ASYNC251
    mark(job, "done")


@app.task("stubborn")
async def stubborn(job: Job, seconds: float) -> None:
    """Does not let itself be cancelled."""
    mark(job, "begun")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            await asyncio.sleep(until - time.monotonic())
        except asyncio.CancelledError:
            continue


@app.task("crunch", process=True)
def crunch(job: Job, seconds: float) -> int:
    mark(job, f"begun {os.getpid()}")
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until:
        count += 1
    mark(job, "done")
    return count


@app.task("dawdles", process=True)
def dawdles(job: Job) -> None:
    time.sleep(60)


@app.task("hungry", process=True, memory_limit=300 * 1024 * 1024, max_retries=0)
def hungry(job: Job, size: int) -> int:
    return len(bytearray(size))


@app.task("dies", process=True, max_retries=0)
def dies(job: Job) -> None:
    os.kill(os.getpid(), 9)


VALUES: dict[str, Any] = {
    "nan": {"m": math.nan},
    "inf": {"m": [math.inf]},
    "date": datetime(2026, 11, 29, tzinfo=UTC),
    "decimal": Decimal("1.5"),
    "set": {1},
    "bytes": b"x",
    "object": object(),
    "nul": "a\0b",
    "surrogate": "\ud800",
    "huge number": 10**5000,
}


@app.task("returns")
async def returns(job: Job, what: str) -> Any:
    mark(job, "ran")
    return VALUES[what]


def endless(what: str) -> None:
    endless(what)


@app.task("raises")
def raises(job: Job, what: str) -> None:
    mark(job, "ran")
    match what:
        case "10 MB":
            raise ValueError("x" * 10_000_000)
        case "4-byte":
            raise ValueError("\U0001f600" * 250_000)
        case "100 KB":
            raise ValueError("y" * 100_000)
        case _:
            endless(what)


@app.task("ordered", max_retries=3, retry_policy={"base_delay_ms": 50, "jitter": False})
def ordered(job: Job, key: str, number: int, fails: bool) -> None:
    with psycopg.connect(DSN, autocommit=True) as connection:
        into = "insert into public.marks (job_id, attempt, what) values (%s, %s, %s)"
        connection.execute(into, (job.job_id, job.attempt, f"begun {key} {number}"))
        time.sleep(0.002)
        failing = fails and job.attempt == 1
        connection.execute(into, (job.job_id, job.attempt, f"{'failed' if failing else 'done'} {key} {number}"))
    if failing:
        raise ConnectionError("once")


newer = App(settings=app.settings)


@newer.task("new_task")
async def new_task(job: Job) -> None:
    mark(job, "ran")


@app.task("reports", process=True)
async def reports(job: Job) -> dict[str, Any]:
    await job.progress({"half": True})
    return {"pid": os.getpid()}


@app.task("times", process=True)
def times(job: Job) -> list[str]:
    return [str(job.scheduled_at), str(job.created_at)]


@app.task("carries")
async def carries(job: Job, text: str) -> None:
    await job.progress({"text": text})


@app.task("effective")
def effective(job: Job) -> None:
    with job.connection() as connection:
        connection.execute("insert into public.effects (job_id) values (%s)", (job.job_id,))
