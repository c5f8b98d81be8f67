"""Idling: what a worker does between an empty claim and the next job.

It lingers, claiming every few milliseconds, so that producers which are faster than the bell never pay for it; then it
asks for the bell and claims on until every writer that may have looked before it asked has ended; then it sleeps after
each claim that finds nothing, until the bell rings, or for the poll interval.

Commits that ring go through one at a time. So a worker is on the list as long as jobs come slowly enough to take a
small part of that time, and else claims by itself. Which of the two is looked at once in a while, or as soon as there
were too many for all of it; and more rarely where the answer changed back and forth, so that it is rarely written.

A bell goes to one worker, which must make something of it. One that had no room for a while, or that drains, leaves the
list and has another woken for what it heard. One that does not hear is not on the list.
"""

import asyncio
import random
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple
from uuid import UUID

from pgqueue import calls
from pgqueue.connections import Link
from pgqueue.errors import PgqueueError
from pgqueue.listener import Bell, columns
from pgqueue.log import logger
from pgqueue.settings import Settings

_log: Final = logger("pgqueue.idling")
#: All in seconds.
LINGER: Final = 0.06
LINGER_STEP: Final = 0.001
#: A claim that brings so many jobs is followed by a pause of its own length, one of few by a shorter one.
LARGE: Final = 8
ALIKE_AT_MOST: Final = 16
_WRITERS_STEP: Final = 0.005
#: The wait after a claim that brought as many jobs as bells rang, of which hardly one's job is still to come, and for
#: which bells after jobs are taken as theirs.
EVEN: Final = 0.005
#: The part of the time for which commits may ring one after the other; asked for again below half of it.
RINGING: Final = 0.5
UNHEEDED_AT_MOST: Final = 64
BUSY_FOR: Final = 0.5
BUSY_AT_MOST: Final = 16.0


def between_looks(waited: float) -> float:
    """Return for how long to wait until open writers are looked after again, of which one is open for `waited` seconds.

    In seconds; one that stays open for long is looked after less and less often.
    """
    return max(_WRITERS_STEP, waited / 10)


class _Weighed(NamedTuple):
    """The part of a time that bells for all its jobs would have taken, and whether the worker slept in it."""

    ringing: float
    slept: bool


class Idling:
    """Says how long to wait before the next claim, and does the waiting."""

    def __init__(
        self,
        link: Link,
        settings: Settings,
        worker_id: UUID,
        queues: list[str] | None,
        job_types: list[str],
        priorities: list[int] | None = None,
    ) -> None:
        """Not on the list yet."""
        self._link = link
        self._notify = settings.wake == "notify"
        self._poll = settings.poll_interval
        self._registration: dict[str, Any] = {
            "worker_id": worker_id,
            "queues": queues,
            "job_types": job_types,
            "channel": calls.wake_channel(worker_id),
            "priorities": priorities,
            "listener": None,
        }
        #: Bells that no claim followed yet.
        self._unheeded: list[Bell] = []
        #: Ends a sleep; set by `rang`, and by whoever wants a claim now.
        self.bell = asyncio.Event()
        #: How many bells were heard since it last slept, and jobs came by claims that were to bring more.
        self._bells = 0
        self._came = 0
        self._napping = False
        self._had_work_at = time.monotonic()
        #: How many jobs came since, and whether it slept.
        self._counted_from = time.monotonic()
        self._jobs = 0
        self._slept = False
        self._busy_for = BUSY_FOR
        self._left_at = 0.0
        self._registered_at = 0.0
        self._writers: list[str] = []
        self.registered = False
        #: Whether the list may have us.
        self._listed = False
        #: So many times longer it sleeps on a bell, since others look for lost ones too.
        self.crowd = 1.0
        #: Live workers that take the same jobs, this one included.
        self.alike = 1

    def rang(self, bell: Bell | None = None) -> None:
        """Note a bell, None for one that does not say of what, and end a wait.

        But not, for a moment, after as many jobs or more: it tells of one of them.
        """
        self._bells += 1
        if bell is not None and len(self._unheeded) < UNHEEDED_AT_MOST:
            self._unheeded.append(bell)
        if not self._napping or self._bells > self._came:
            self.bell.set()

    def listens(self, process: int | None) -> None:
        """Note which process of the server hears for this worker; once that is gone, the list does without it."""
        self._registration = {**self._registration, "listener": process}
        self.forget()

    def heed(self) -> list[Bell]:
        """Note that a claim begins, which may find what bells told of; return these."""
        heard, self._unheeded = self._unheeded, []
        return heard

    def left_over(self, bells: list[Bell]) -> None:
        """Note that the claim that was to follow these bells had no room for what they told of."""
        self._unheeded[:0] = bells

    async def full(self) -> None:
        """Note that there was no room for a while: others are to have what bells told of."""
        if self._unheeded:
            await self._leave(self.heed())

    async def away(self) -> None:
        """Leave the list for good, and have others woken for what is heard all the same, until cancelled."""
        while True:
            self.bell.clear()
            if self._listed or self._unheeded:
                with suppress(PgqueueError):
                    await self._leave(self.heed())
            await self.bell.wait()

    async def _leave(self, unheeded: list[Bell]) -> None:
        """Leave the list, and have others woken for bells that no claim followed."""
        self.registered = False
        try:
            await self._link.call(calls.STOP_WAITING, worker_id=self._registration["worker_id"], **columns(unheeded))
        except BaseException:
            self.left_over(unheeded)
            raise
        self._listed = False

    def forget(self) -> None:
        """Take it that the list may have lost us, as after a lost connection."""
        self.registered = False

    def fed(self, jobs: int) -> None:
        """Note that jobs came another way than by a claim."""
        self._had_work_at = time.monotonic()
        self._jobs += jobs

    async def worked(self, jobs: int, claim_time: float) -> None:
        """Note that a claim had jobs, 0 that all slots are busy; leave the list once it costs others too much.

        `claim_time` is what a claim takes, in seconds.
        """
        now = self._had_work_at = time.monotonic()
        self._jobs += jobs
        weighed = self._weigh(now, claim_time) if self.registered else None
        if weighed is not None and (not weighed.slept or weighed.ringing > RINGING):
            self._left_at = now
            # With jobs, it goes on claiming.
            await self._leave([] if jobs else self.heed())

    async def wait(self, jobs: int, claim_time: float) -> None:
        """Wait as long as it makes sense after a claim of so many jobs, which was to bring more.

        `claim_time` is what a claim takes, in seconds.
        """
        now = time.monotonic()
        # A database that answers slowly is asked less often, and so is one that has many jobs: they come together.
        step = max(LINGER_STEP, claim_time * min(max(jobs / LARGE, 0.5), 2.0)) * min(self.alike, ALIKE_AT_MOST)
        if not self.registered and self._lingers(now, claim_time):
            await self._nap(step)
        elif not self._notify or self._registration["listener"] is None:
            await self._sleep(max(self._poll, 20 * claim_time))
        elif not self.registered:
            await self._register(now)
        elif self._writers:
            waited = now - self._registered_at
            if await self._link.call(calls.WRITERS_OPEN, writers=self._writers):
                await self._nap(min(between_looks(waited), self._poll))
            else:
                self._writers = []
        elif jobs:
            await self._nap_after(jobs, step)
        else:
            self._bells = self._came = 0
            await self._sleep(max(self._poll * self.crowd, 20 * claim_time))

    def _lingers(self, now: float, claim_time: float) -> bool:
        if now - self._had_work_at > LINGER + 2 * claim_time:
            return False
        weighed = self._weigh(now, claim_time) if self._notify else None
        return weighed is None or weighed.ringing > RINGING / 2

    def _weigh(self, now: float, claim_time: float) -> _Weighed | None:
        """Return what the time since the last look was like, and count anew; None: it is too early for one."""
        # A claim takes about as long as a commit.
        ringing = self._jobs * self.alike * claim_time
        # So many jobs are too many, whatever the rest of the time will be like.
        lasted = max(now - self._counted_from, self._busy_for if ringing > RINGING * self._busy_for else 0.0)
        if lasted < self._busy_for:
            return None
        weighed = _Weighed(ringing / lasted, self._slept)
        self._count_anew(now)
        return weighed

    def _count_anew(self, now: float) -> None:
        self._counted_from = now
        self._jobs = 0
        self._slept = False

    async def _register(self, now: float) -> None:
        if now - self._left_at < 10 * self._busy_for:
            self._busy_for = min(self._busy_for * 2, BUSY_AT_MOST)
        elif self._busy_for > BUSY_FOR:
            self._busy_for = max(self._busy_for / 2, BUSY_FOR)
        registration = self._registration
        self._listed = True
        await self._link.call(calls.WAIT_FOR_WORK, **registration)
        self.registered = registration is self._registration
        self._registered_at = time.monotonic()
        self._bells = self._came = 0
        self._count_anew(self._registered_at)
        self._writers = await self._link.call(calls.OPEN_WRITERS) or []

    async def _nap_after(self, jobs: int, seconds: float) -> None:
        """Pass over the bells of so many jobs, which have come already, for EVEN at most."""
        # No bell tells of what a claim left: it looks into some of many queues, and passes over what others hold.
        self._came += jobs
        if self._came == self._bells and self.bell.is_set():
            self.bell.clear()
            seconds = EVEN
        before = self._bells
        self._napping = True
        try:
            ended = await self._until_bell(min(seconds, EVEN))
        finally:
            self._napping = False
        # One bell tells of many jobs or of one, and others may have taken theirs: none is passed over for long.
        if seconds > EVEN and not ended and self._bells == before:
            await self._nap(seconds - EVEN)

    async def _nap(self, seconds: float) -> None:
        await self._until_bell(seconds)

    async def _sleep(self, seconds: float) -> None:
        self._slept = self._slept or not self.bell.is_set()
        await self._until_bell(seconds * random.uniform(0.9, 1.1))

    async def _until_bell(self, seconds: float) -> bool:
        """Return whether the bell ended the wait."""
        rung = True
        try:
            async with asyncio.timeout(seconds):
                await self.bell.wait()
        except TimeoutError:
            rung = False
        self.bell.clear()
        return rung
