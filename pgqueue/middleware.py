"""Middlewares: what an app does around every attempt of its tasks, wherever the attempt runs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from pgqueue.job import Job

Middleware: TypeAlias = Callable[[Job], Iterator[Any] | AsyncIterator[Any]]
_Wait: TypeAlias = Callable[[Awaitable[Any]], Awaitable[Any]]


def _here(step: Awaitable[Any]) -> Awaitable[Any]:
    return step


async def around(
    middlewares: Sequence[Middleware], job: Job, call: Callable[[], Awaitable[Any]], wait: _Wait = _here
) -> Any:
    """Return what `call` returns, or raise what it raises, with the middlewares around it, the first one outermost.

    What a middleware raises before its yield is raised in the place of the call. What it raises later is logged: the
    attempt has ended by then. `wait` runs a step of an async middleware.
    """
    entered: list[Any] = []
    try:
        for middleware in middlewares:
            generator = middleware(job)
            # One that ends without a yield has nothing to do afterwards.
            if await _goes_on(generator, "send", None, wait):
                entered.append(generator)
        result = await call()
    except BaseException as exc:
        traceback = exc.__traceback__
        for generator in reversed(entered):
            await _leave(job, generator, "throw", exc, wait)
        # Without the middlewares' frames, through which it was thrown.
        raise exc.with_traceback(traceback) from exc.__cause__
    for generator in reversed(entered):
        await _leave(job, generator, "send", result, wait)
    return result


def around_sync(
    middlewares: Sequence[Middleware], job: Job, call: Callable[[], Any], loop: asyncio.AbstractEventLoop | None
) -> Any:
    """Do as `around` with a sync call, in this thread; async middlewares run in `loop`, or one of their own."""

    async def called() -> Any:
        return call()

    # Never waits for anything in this thread, so that one step is all.
    whole = around(middlewares, job, called, partial(_elsewhere, loop or _own_loop))
    try:
        whole.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError


async def _goes_on(generator: Any, method: str, value: object, wait: _Wait) -> bool:
    """Take a generator, sync or async, to its next yield; False: it ended."""
    try:
        if hasattr(generator, "__anext__"):
            await wait(getattr(generator, f"a{method}")(value))
        else:
            getattr(generator, method)(value)
    except (StopIteration, StopAsyncIteration):
        return False
    return True


async def _leave(job: Job, generator: Any, method: str, value: object, wait: _Wait) -> None:
    try:
        if await _goes_on(generator, method, value, wait):
            raise RuntimeError("a middleware yields once")
    except BaseException as fault:
        if fault is value:
            return
        if not isinstance(fault, Exception):
            raise
        job.log.exception("a middleware failed after its yield; the attempt ends as it did", error=str(fault))


async def _elsewhere(loop: asyncio.AbstractEventLoop | Callable[[], Any], step: Awaitable[Any]) -> Any:
    async def awaited() -> Any:
        return await step

    running = loop if isinstance(loop, asyncio.AbstractEventLoop) else loop()
    return asyncio.run_coroutine_threadsafe(awaited(), running).result()


_guard = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def _own_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop in a thread of its own, for attempts of processes that have none."""
    global _loop
    with _guard:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="pgqueue-middleware", daemon=True).start()
        return _loop
