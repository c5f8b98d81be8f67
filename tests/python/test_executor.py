"""How attempts of async tasks run in the event loop, whether they ever wait or not."""

import asyncio
import contextvars
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from pgqueue import App, Settings, executor, processes
from pgqueue.attempt import LATE, Completed, Failed, Outcome, Stop
from pgqueue.executor import Executor
from pgqueue.held import Held

from . import apps
from .running import a_job

seen: contextvars.ContextVar[str] = contextvars.ContextVar("seen", default="nothing")


def held_of(function: Callable[..., Any]) -> Held:
    app = App(settings=Settings(dsn="dbname=none"))
    task: Any = app.task("t")(function)
    return Held(a_job().claimed, task, None, time.monotonic())  # type: ignore[arg-type]


async def outcomes_of(*functions: Callable[..., Any]) -> list[Outcome]:
    """Runs each in turn, begun within one step of the loop, and returns how they ended."""
    told: dict[Held, Outcome] = {}
    done = asyncio.Event()

    def ended(held: Held, outcome: Outcome) -> None:
        told[held] = outcome
        if len(told) == len(functions):
            done.set()

    executor = Executor(10, timeout_of=lambda queue: 60.0, ended=ended, gone=lambda held: None)
    some = [held_of(function) for function in functions]
    try:
        for held in some:
            executor.start(held)
        async with asyncio.timeout(10):
            await done.wait()
        assert executor.free == 10
    finally:
        executor.close()
    return [told[held] for held in some]


def test_a_task_that_never_waits_has_ended_when_its_start_returns() -> None:
    async def quick() -> int:
        return 1

    async def main() -> None:
        told: list[Outcome] = []
        executor = Executor(
            1, timeout_of=lambda queue: 60.0, ended=lambda held, outcome: told.append(outcome), gone=lambda held: None
        )
        executor.start(held_of(quick))
        assert executor.free == 1
        assert told == [Completed(b"1")]
        executor.close()

    if sys.version_info < (3, 12):
        pytest.skip("tasks begin at the loop's next step before Python 3.12")
    asyncio.run(main())


@pytest.mark.parametrize("in_loop", [True, False])
def test_what_is_held_past_its_lease_begins_once_that_is_renewed(in_loop: bool) -> None:
    calls: list[int] = []

    def in_thread() -> None:
        calls.append(1)

    async def in_the_loop() -> None:
        calls.append(1)

    async def main() -> None:
        ended: asyncio.Queue[Outcome] = asyncio.Queue()
        executor = Executor(
            1,
            timeout_of=lambda queue: 60.0,
            ended=lambda held, outcome: ended.put_nowait(outcome),
            gone=lambda held: None,
        )
        held = held_of(in_the_loop if in_loop else in_thread)
        held.lapses_at = time.monotonic() - 0.001
        executor.start(held)
        assert await ended.get() == LATE
        assert (calls, held.began, held.outcome) == ([], 0.0, None)
        held.lapses_at = time.monotonic() + 60
        executor.start(held)
        assert await ended.get() == Completed()
        assert calls == [1]
        executor.close()

    asyncio.run(main())


def test_no_task_sees_what_another_set_in_its_context() -> None:
    async def quick() -> str:
        before = seen.get()
        seen.set("quick")
        return before

    async def waits() -> str:
        before = seen.get()
        seen.set("waits")
        await asyncio.sleep(0)
        return before + seen.get()

    async def main() -> None:
        seen.set("the worker's")
        ended = await outcomes_of(quick, waits, quick, waits)
        assert ended == [
            Completed(b'"the worker\'s"'),
            Completed(b'"the worker\'swaits"'),
            Completed(b'"the worker\'s"'),
            Completed(b'"the worker\'swaits"'),
        ]
        assert seen.get() == "the worker's"

    asyncio.run(main())


def test_a_task_is_an_asyncio_task_of_its_own_before_it_first_waits() -> None:
    async def first() -> bool:
        mine = asyncio.current_task()
        async with asyncio.timeout(5):
            await asyncio.sleep(0)
        return mine is not None and mine is asyncio.current_task() and mine is not workers

    async def main() -> None:
        nonlocal workers
        workers = asyncio.current_task()
        assert await outcomes_of(first) == [Completed(b"true")]
        assert asyncio.current_task() is workers

    workers: asyncio.Task[Any] | None = None
    asyncio.run(main())


def test_a_task_that_waits_can_be_stopped_at_once() -> None:
    async def waits() -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        told: list[Outcome] = []
        ended = asyncio.Event()

        def tell(held: Held, outcome: Outcome) -> None:
            told.append(outcome)
            ended.set()

        executor = Executor(1, timeout_of=lambda queue: 60.0, ended=tell, gone=lambda held: None)
        held = held_of(waits)
        executor.start(held)
        executor.stop(held, Stop.CANCEL)
        await asyncio.wait_for(ended.wait(), 10)
        assert type(told[0]).__name__ == "Cancelled"
        executor.close()

    asyncio.run(main())


def test_an_error_before_the_first_wait_is_the_attempts_own() -> None:
    async def breaks() -> None:
        raise ValueError("at once")

    async def main() -> None:
        (outcome,) = await outcomes_of(breaks)
        assert type(outcome).__name__ == "Failed"
        assert getattr(outcome, "error", {})["type"] == "ValueError"

    asyncio.run(main())


async def process_outcome(task: Any, seconds: float) -> Outcome:
    """Runs an attempt of a process task, with a timeout of so many seconds, and returns how it ended."""
    told: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    running = Executor(
        1,
        timeout_of=lambda queue: seconds,
        ended=lambda held, outcome: told.set_result(outcome),
        gone=lambda held: None,
    )
    try:
        running.start(Held(a_job().claimed, task, None, time.monotonic()))  # type: ignore[arg-type]
        async with asyncio.timeout(20):
            return await told
    finally:
        running.close()


def test_the_start_of_a_process_is_not_of_the_tasks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", f"import time; time.sleep(1); {processes._START}")
    assert isinstance(asyncio.run(process_outcome(apps.times, 0.5)), Completed)


@pytest.mark.parametrize("hangs", ["start", "task"])
def test_neither_a_process_that_does_not_start_nor_its_task_goes_on_for_ever(
    hangs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hangs == "start":
        monkeypatch.setattr(processes, "_START", "import time; time.sleep(60)")
    monkeypatch.setattr(executor, "_PROCESS_STARTS_WITHIN", 0.5 if hangs == "start" else 60.0)
    outcome = asyncio.run(process_outcome(apps.dawdles, 0.2))
    assert isinstance(outcome, Failed)
    assert outcome.error["message"] == "the attempt ran longer than its timeout (0.2 s)"
