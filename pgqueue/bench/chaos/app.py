"""The app that the workers of a chaos run have: its tasks write each start and each end to a file of their process."""

import asyncio
import os
import random
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pgqueue.app import App
from pgqueue.bench.chaos import statements
from pgqueue.bench.chaos.ledger import RAISED, RETURNED, SNOOZED, STOPPED, Ledger
from pgqueue.errors import Snooze
from pgqueue.job import Job

FOLDER: Final = "PGQUEUE_CHAOS_LEDGER"
app: Final = App(name="chaos")
_opened: list[Ledger] = []
_guard: Final = threading.Lock()


class Planned(Exception):
    """A failure that the job asked for."""


def _ledger() -> Ledger:
    with _guard:
        if not _opened:
            _opened.append(Ledger(Path(os.environ[FOLDER]), "tasks"))
        return _opened[0]


@contextmanager
def told(job: Job, n: int) -> Iterator[dict[str, Any]]:
    """Write down the start and the end of an attempt; give the result that the task is to return."""
    ledger = _ledger()
    job_id = str(job.job_id)
    token = secrets.token_hex(6)
    ledger.write("start", job_id, job.attempt, n, job.job_type)
    outcome = STOPPED
    try:
        yield {"n": n, "attempt": job.attempt, "token": token}
        outcome = RETURNED
    except Snooze:
        outcome = SNOOZED
        raise
    except Exception:
        outcome = RAISED
        raise
    finally:
        ledger.write("end", job_id, job.attempt, outcome, token if outcome == RETURNED else None)


@app.task("quick")
async def quick(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Return at once, or fail the first `times` attempts."""
    with told(job, n) as result:
        if job.attempt <= times:
            raise Planned
        return result


@app.task("slow")
async def slow(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Wait as a task does that asks something of the network."""
    with told(job, n) as result:
        await asyncio.sleep(seconds)
        return result


@app.task("thread")
def thread(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Wait in a thread."""
    with told(job, n) as result:
        # time.sleep fails under libfaketime.
        threading.Event().wait(seconds)
        return result


@app.task("ordered")
async def ordered(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Run for a moment, so that another of its key would be caught beside it, or fail the first `times` attempts."""
    with told(job, n) as result:
        await asyncio.sleep(seconds)
        if job.attempt <= times:
            raise Planned
        return result


@app.task("doomed")
async def doomed(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> None:
    """Fail every time."""
    with told(job, n):
        raise Planned


@app.task("snoozes")
async def snoozes(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Put the first attempt off."""
    with told(job, n) as result:
        if job.attempt == 1:
            raise Snooze(random.uniform(0.05, 0.5))
        return result


@app.task("effect")
async def effect(job: Job, n: int, seconds: float = 0.0, times: int = 0) -> dict[str, Any]:
    """Write a row in the transaction in which the job completes."""
    with told(job, n) as result:
        async with job.connection() as connection:
            await connection.execute(statements.EFFECT, {"job_id": job.job_id, "attempt": job.attempt})
            await asyncio.sleep(seconds)
        return result
