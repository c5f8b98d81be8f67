"""An app whose tasks do to their process what no task should. Worker processes of tests run it."""

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time
from typing import Any

from pgqueue import Job
from tests.python.apps import app, mark

__all__ = ["app"]


@app.task("closes_stderr", max_retries=0)
def closes_stderr(job: Job) -> None:
    sys.stderr.close()
    raise ValueError("which is to be logged")


@app.task("exits_in_a_subtask", max_retries=0)
async def exits_in_a_subtask(job: Job) -> None:
    async def leave() -> None:
        sys.exit(4)

    await asyncio.gather(leave(), asyncio.sleep(1))


@app.task("exits_from_a_callback")
async def exits_from_a_callback(job: Job) -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 5)
    await asyncio.sleep(0.1)


@app.task("stops_the_loop")
async def stops_the_loop(job: Job) -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.1)


@app.task("cancels_all")
async def cancels_all(job: Job) -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


@app.task("forks")
def forks(job: Job) -> dict[str, Any]:
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,))
    child.start()
    began = time.monotonic()
    child.terminate()
    child.join()
    return {"code": child.exitcode, "seconds": time.monotonic() - began}


@app.task("spawns", process=True)
def spawns(job: Job, dies: bool = False) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as child:
        mark(job, str(child.pid))
        if dies:
            os.kill(os.getpid(), 9)
        child.wait()
