"""Background work of a process: services that run in a thread of their own, which a blocked event loop cannot stop."""

import asyncio
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from pgqueue.errors import PgqueueError
from pgqueue.log import logger

_log: Final = logger("pgqueue.services")
# A fault that lasts is told again after this many seconds, not at every try.
_REMIND: Final = 60.0


class Service(ABC):
    """Something done over and over, every `interval` seconds; an exception delays it to the next time and no more."""

    name: str
    interval: float

    def __init__(self) -> None:
        """Start healthy."""
        self.fault: str | None = None
        self._told_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nudged = asyncio.Event()
        self._finishing = False
        #: What many do alike, each of them does so many times less often.
        self.crowd = 1.0

    @abstractmethod
    async def step(self) -> bool:
        """Do it once. True: there is more to do at once."""

    async def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give up what is held, at the end."""

    def pause(self) -> float:
        """Return how long to wait until the next time, in seconds."""
        return self.interval * random.uniform(0.9, 1.1)

    def nudge(self) -> None:
        """Have it done now rather than at its time; from any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._nudged.set)

    def finish(self) -> None:
        """Have it end after the step that it is at; from any thread."""
        self._finishing = True
        self.nudge()

    async def run(self) -> None:
        """Do it until told to finish, or cancelled."""
        self._loop = asyncio.get_running_loop()
        try:
            while not self._finishing:
                more = await self._try()
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if more else self.pause()):
                        await self._nudged.wait()
                self._nudged.clear()
        finally:
            await self.close()

    async def _try(self) -> bool:
        try:
            more = await self.step()
        except Exception as exc:
            self._complain(exc)
            return False
        if self.fault is not None:
            self.fault = None
            _log.info("service recovered", service=self.name)
        return more

    def _complain(self, exc: Exception) -> None:
        first = self.fault is None
        self.fault = f"{type(exc).__name__}: {exc}"
        if first or time.monotonic() - self._told_at > _REMIND:
            self._told_at = time.monotonic()
            _log.warning(
                "service failed", service=self.name, error=self.fault, exc_info=not isinstance(exc, PgqueueError)
            )


class Background:
    """A thread with an event loop of its own in which services run."""

    def __init__(self, services: Sequence[Service], broken: Callable[[BaseException], object] | None = None) -> None:
        """Keep the services; `start` begins them. `broken` is told, in the thread, of what has ended it."""
        self.services = services
        self._broken = broken
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, name="pgqueue-background", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Let the services finish, cancel those that have not after a while, and wait `patience` seconds in all."""
        if self._loop is None or not self._thread.is_alive():
            return
        for service in self.services:
            service.finish()
        self._thread.join(patience * 0.7)
        if self._thread.is_alive() and not self._cancelled:
            self._cancelled = True
            with suppress(RuntimeError):  # The loop is closed.
                self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(patience * 0.3)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def faults(self) -> dict[str, str]:
        """Return what is wrong now, by service."""
        return {service.name: service.fault for service in self.services if service.fault is not None}

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._together())
        except BaseException as exc:
            if self._cancelled:
                return
            if self._broken is None:
                raise
            self._broken(exc)

    async def _together(self) -> None:
        self._main = asyncio.current_task()
        await asyncio.gather(*(service.run() for service in self.services))

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()
