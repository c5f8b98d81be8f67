"""Idling: what a worker does between an empty claim and the next job.

It lingers, claiming every few milliseconds, so that producers which are faster than the bell never pay for it; then it
asks for the bell and claims on until every writer that may have looked before it asked has ended; then it sleeps until
the bell rings, or for the poll interval. Once it has asked, it stays asked: it takes itself off the list only after a
time without sleep, which is longer where that turned out to be too short, so that the list is rarely written.
"""

import asyncio
import random
import time
from typing import Final
from uuid import UUID

from pgqueue import calls
from pgqueue.connections import Link
from pgqueue.log import logger
from pgqueue.settings import Settings

_log: Final = logger("pgqueue.idling")
#: All in seconds.
LINGER: Final = 0.06
LINGER_STEP: Final = 0.003
WRITERS_STEP: Final = 0.005
BUSY_FOR: Final = 0.5
BUSY_AT_MOST: Final = 16.0


class Idling:
    """Says how long to wait before the next claim, and does the waiting."""

    def __init__(
        self,
        link: Link,
        settings: Settings,
        worker_id: UUID,
        queues: list[str] | None,
        job_types: list[str],
    ) -> None:
        """Not on the list yet."""
        self._link = link
        self._notify = settings.wake == "notify"
        self._poll = settings.poll_interval
        self._registration = {
            "worker_id": worker_id,
            "queues": queues,
            "job_types": job_types,
            "channel": calls.wake_channel(worker_id),
        }
        #: Ends a sleep; set by the listener, and by whoever wants a claim now.
        self.bell = asyncio.Event()
        self._had_work_at = time.monotonic()
        self._slept_at = time.monotonic()
        self._busy_for = BUSY_FOR
        self._left_at = 0.0
        self._registered_at = 0.0
        self._writers: list[str] = []
        self.registered = False
        #: So many times longer it sleeps on a bell, since others look for lost ones too.
        self.crowd = 1.0

    def forget(self) -> None:
        """Take it that the list may have lost us, as after a lost connection."""
        self.registered = False

    def fed(self) -> None:
        """Note that jobs came another way than by a claim."""
        self._had_work_at = time.monotonic()

    async def worked(self) -> None:
        """Note that a claim had jobs or that all slots are busy, and leave the list once that has lasted."""
        now = self._had_work_at = time.monotonic()
        if self.registered and now - self._slept_at > self._busy_for:
            self.registered = False
            self._left_at = now
            await self._link.call(calls.STOP_WAITING, worker_id=self._registration["worker_id"])

    async def wait(self, claim_time: float) -> None:
        """Wait as long as it makes sense after an empty claim; `claim_time` is what a claim takes, in seconds."""
        now = time.monotonic()
        if now - self._had_work_at < LINGER + 2 * claim_time:
            # A database that answers slowly is asked less often.
            await self._nap(max(LINGER_STEP, 2 * claim_time))
            return
        if not self._notify:
            await self._sleep(max(self._poll, 20 * claim_time))
            return
        if not self.registered:
            await self._register(now)
            return
        if self._writers:
            waited = now - self._registered_at
            if await self._link.call(calls.WRITERS_OPEN, writers=self._writers):
                # One that stays open for long is looked after less and less often.
                await self._nap(min(max(WRITERS_STEP, waited / 10), self._poll))
            else:
                self._writers = []
            return
        await self._sleep(max(self._poll * self.crowd, 20 * claim_time))

    async def _register(self, now: float) -> None:
        if now - self._left_at < 10 * self._busy_for:
            self._busy_for = min(self._busy_for * 2, BUSY_AT_MOST)
        elif self._busy_for > BUSY_FOR:
            self._busy_for = max(self._busy_for / 2, BUSY_FOR)
        await self._link.call(calls.WAIT_FOR_WORK, **self._registration)
        self.registered = True
        self._registered_at = time.monotonic()
        self._writers = await self._link.call(calls.OPEN_WRITERS) or []

    async def _nap(self, seconds: float) -> None:
        await self._until_bell(seconds)

    async def _sleep(self, seconds: float) -> None:
        await self._until_bell(seconds * random.uniform(0.9, 1.1))
        self._slept_at = time.monotonic()

    async def _until_bell(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.bell.wait()
        except TimeoutError:
            pass
        self.bell.clear()
