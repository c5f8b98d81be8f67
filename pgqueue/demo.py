"""An app to try things with: `pgqueue worker pgqueue.demo:app`."""

import asyncio
import hashlib
from typing import Any, Final

from pgqueue.app import App
from pgqueue.errors import DeadLetter
from pgqueue.job import Job

app: Final = App()


@app.task("noop")
async def noop(job: Job) -> None:
    """Do nothing."""


@app.task("echo")
async def echo(job: Job) -> Any:
    """Return the payload."""
    return job.payload


@app.task("sleep")
async def sleep(job: Job, seconds: float = 1.0) -> dict[str, float]:
    """Wait for `seconds`."""
    await asyncio.sleep(seconds)
    return {"slept": seconds}


@app.task("fail")
async def fail(job: Job, message: str = "this task always fails", retryable: bool = True) -> None:
    """Fail with a message; not retryable: for good, at once."""
    if not retryable:
        raise DeadLetter(message)
    raise RuntimeError(message)


@app.task("flaky")
async def flaky(job: Job, times: int = 1) -> dict[str, int]:
    """Fail `times` times, then succeed."""
    if job.attempt - job.lost <= times:
        raise ConnectionError(f"attempt {job.attempt} of at least {times + 1} fails")
    return {"attempts": job.attempt}


@app.task("send_email", queue="mail", priority="high", max_retries=5, timeout=30)
def send_email(job: Job, to: str, subject: str = "") -> dict[str, str]:
    """Print instead of sending."""
    print(f"to {to}: {subject or '(no subject)'}", flush=True)
    return {"to": to}


@app.task("crunch", process=True, memory_limit=1024**3)
def crunch(job: Job, rounds: int = 200_000) -> dict[str, str]:
    """Keep a processor busy, in a process of its own."""
    digest = b"pgqueue"
    for done in range(rounds):
        digest = hashlib.sha256(digest).digest()
        if done % 50_000 == 0:
            job.progress({"done": done, "of": rounds})
    return {"digest": digest.hex()}
