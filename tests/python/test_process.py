"""A worker's process: how the garbage collector is set where pgqueue owns the process."""

import subprocess
import sys

import pytest

_PROGRAM = """
import gc
from pgqueue.process import run_process
from pgqueue.settings import Settings

class Program:
    settings, recycle = Settings(), False
    async def run(self):
        print(gc.get_threshold()[0], gc.get_freeze_count() > 10_000, gc.isenabled())
    def request_stop(self): ...

raise SystemExit(run_process(Program()))
"""


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("", "20000 True True"),
        ("import gc; gc.set_threshold(50_000)", "50000 True True"),
        ("import gc; gc.set_threshold(0)", "0 True True"),
        ("import gc; gc.disable()", " True False"),
    ],
)
def test_the_collector_spares_what_is_loaded_and_what_is_under_way(before: str, told: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", before + _PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.strip().endswith(told.strip()), ran.stdout


def test_a_worker_that_owns_its_process_refuses_to_run_within_an_event_loop() -> None:
    program = "import asyncio" + _PROGRAM.replace(
        "raise SystemExit(run_process(Program()))",
        "async def main():\n    return run_process(Program())\nraise SystemExit(asyncio.run(main()))",
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "within an event loop" in ran.stdout + ran.stderr
