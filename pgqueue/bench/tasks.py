"""The app whose tasks the benchmark runs: they do next to nothing, so that the queue is all there is."""

import asyncio
from typing import Final

from pgqueue.app import App
from pgqueue.job import Job

app: Final = App()


@app.task("noop")
async def noop(job: Job, n: int = 0, text: str = "") -> None:
    """Do nothing."""


@app.task("answer")
async def answer(job: Job, n: int = 0) -> dict[str, int]:
    """Return a result, which is stored."""
    return {"n": n}


@app.task("wait")
async def wait(job: Job, n: int = 0, seconds: float = 0.005) -> None:
    """Wait as a task does that asks something of the network."""
    await asyncio.sleep(seconds)


@app.task("ask")
async def ask(job: Job, n: int = 0) -> None:
    """Wait for 100 ms."""
    await asyncio.sleep(0.1)
