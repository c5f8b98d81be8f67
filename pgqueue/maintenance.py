"""Maintenance: what a process does for the queue as a whole, beside its own work or as its only work."""

import asyncio
import dataclasses
from contextlib import suppress
from typing import Final

from pgqueue import calls_time
from pgqueue.connections import Link
from pgqueue.errors import PgqueueError
from pgqueue.scheduler import Declarations, Declaring
from pgqueue.services import Service
from pgqueue.settings import Settings
from pgqueue.sweeper import Sweeper

#: All in seconds. Partitions are made a week ahead, so now and then is often enough; a busy table is tried again soon.
PARTITIONS_EVERY: Final = 3600.0
PARTITIONS_AGAIN: Final = 20.0
# A user's archive of a partition takes its time.
_LIMIT: Final = 3600.0


class Partitions(Service):
    """Makes partitions ahead, drops those past retention, analyses; over a connection for that time only."""

    name = "partitions"

    def __init__(self, dsn: str, settings: Settings) -> None:
        """Open nothing yet."""
        super().__init__()
        self.interval = PARTITIONS_AGAIN
        self._open = (dsn, settings, "pgqueue partitions")
        self._just_started = True

    async def step(self) -> bool:
        """Do one thing at a time, so that its locks are short, until nothing is left to do. Raises a PgqueueError."""
        link = Link(*self._open)
        link.limit = _LIMIT
        self.interval = PARTITIONS_AGAIN
        try:
            while actions := {action for _, action in await link.call(calls_time.MAINTAIN_PARTITIONS, max_actions=1)}:
                if not actions & {"made", "dropped", "archived"}:
                    break
            if self._just_started:
                # Not with the first turn: what a process owes at once is partitions.
                self._just_started = False
                return False
            await link.call(calls_time.ANALYSE)
        except PgqueueError as exc:
            with suppress(PgqueueError):
                await link.call(calls_time.NOTE_STEP, step=self.name, seconds=0.0, jobs=0, problem=str(exc))
            raise
        finally:
            link.close()
        if actions <= {"crowded"}:
            self.interval = PARTITIONS_EVERY
        return False


def maintenance(dsn: str, settings: Settings, declarations: Declarations | None = None) -> list[Service]:
    """Return the services that one process at least must run: sweeps, schedules, alerts and partitions."""
    return [Sweeper(dsn, settings, declarations), Partitions(dsn, settings)]


def declaring(dsn: str, settings: Settings, declarations: Declarations | None) -> list[Service]:
    """Return the services of a process that leaves maintenance to others."""
    return [] if declarations is None else [Declaring(dsn, settings, declarations)]


class Maintenance:
    """A process that does maintenance and nothing else."""

    def __init__(self, dsn: str, settings: Settings, declarations: Declarations | None = None) -> None:
        """Open nothing yet."""
        # Nothing runs here that could be waited for.
        self.settings: Final = dataclasses.replace(settings, grace=0.0)
        self.recycle: Final = False
        self.services: Final = maintenance(dsn, settings, declarations)
        self._loop: asyncio.AbstractEventLoop
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Work until told to stop."""
        self._loop = asyncio.get_running_loop()
        running = [self._loop.create_task(service.run()) for service in self.services]
        await self._stop.wait()
        for task in running:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*running)

    def request_stop(self) -> None:
        """Begin to end; from any thread and from signal handlers."""
        self._loop.call_soon_threadsafe(self._stop.set)
