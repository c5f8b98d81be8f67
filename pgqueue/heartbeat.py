"""The heartbeat: renews leases and gives signs of life from a thread that a blocked event loop cannot stop."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Final
from uuid import UUID

from pgqueue import calls
from pgqueue.attempt import BEGIN_WITHIN, Stop
from pgqueue.connections import Link
from pgqueue.counts import Sender
from pgqueue.finisher import HOLD
from pgqueue.held import Held
from pgqueue.membership import SIGN_EVERY, Membership
from pgqueue.services import Service
from pgqueue.settings import Settings
from pgqueue.wire import IntArray, UuidArray

#: A lease is renewed once so much of it is left.
_RENEW_AT: Final = 0.5
#: Seconds that an attempt may take where neither its job nor its queue says.
DEFAULT_TIMEOUT: Final = 900.0
_SEEN_EVERY: Final = 10.0
_COUNTED_EVERY: Final = 5.0
_SHORTEST: Final = 0.05
#: Seconds past its timeout after which the sweep ends an attempt that its worker did not end.
_BEYOND: Final = 10.0
#: Later than what may still begin.
_RELEASE_AFTER: Final = BEGIN_WITHIN + 1.0
_LONGEST: Final = 1.0


class Heartbeat(Service):
    """Renews the leases of held jobs that are near their end, and puts off the retries of jobs that still run.

    While a task blocks the event loop, it also gives back what waits behind it.

    `told(key, attempt, reason)` is called in the heartbeat's thread with what a heartbeat answers of a job.
    """

    name = "heartbeat"

    def __init__(
        self,
        dsn: str,
        settings: Settings,
        worker_id: UUID,
        held: Mapping[bytes, Held],
        told: Callable[[bytes, int, str], None],
        life: Callable[[], tuple[dict[str, Any], dict[str, Any]]],
        sender: Sender,
        membership: Membership | None = None,
        signed: Callable[[int, bool], None] = lambda alike, was_gone: None,
        given_back: Callable[[bytes, int], None] = lambda key, attempt: None,
    ) -> None:
        """Share the worker's dict of held jobs; `life` gives the parameters of worker_seen and of worker_started.

        `signed(alike, was_gone)` is told, with each sign of life, how many live workers take the same jobs as this one,
        itself included, and whether this one had been taken for gone;
        `given_back(key, attempt)` of each job that waited here in vain and is pending again.
        """
        super().__init__()
        self._link = Link(dsn, settings, "pgqueue heartbeat")
        self._worker_id = worker_id
        self._lease = settings.lease
        self._limit = settings.statement_limit
        self._poll_cancels = settings.wake == "poll"
        self._held = held
        self._told = told
        self._life = life
        self._seen_at = 0.0
        self._sender = sender
        self._membership = membership
        self._signed = signed
        self._given_back = given_back
        self._seen_every = _SEEN_EVERY if membership is None else SIGN_EVERY
        self._counted_at = 0.0
        self._cancels_at = 0.0
        self.timeouts: dict[str, float] = {}
        self.on_hold: dict[Held, float] = {}
        self.let_go: list[Held] = []
        self.interval = _LONGEST

    def sign_soon(self) -> None:
        """Give a sign of life now: something has changed. From any thread."""
        self._seen_at = 0.0
        self.nudge()

    @property
    def shortest_lease(self) -> float:
        """What leases must have, in seconds, to be renewed in time without a nudge."""
        return self.interval * 3

    async def step(self) -> bool:
        """Do what is due. A part that fails keeps none of the others from its work."""
        held = list(self._held.values())
        shortest = min((one.lease for one in held), default=_LONGEST * 8)
        self.interval = min(max(shortest / 8, _SHORTEST), _LONGEST)
        # A node that hangs must be given up while there is time to ask another.
        self._link.limit = min(max(shortest / 3, _LONGEST), self._limit)
        now = time.monotonic()
        faults: list[Exception] = []
        first = (self._release, self._renew, self._ask_for_cancels, self._hold)
        for part in (*first, self._give_sign, self._divide, self._count):
            try:
                await part(held, now)
            except Exception as exc:
                faults.append(exc)
        if faults:
            raise faults[0]
        return False

    async def _release(self, held: list[Held], now: float) -> None:
        """Give back what waits here behind a task that blocks the event loop."""
        old = [one for one in held if now - one.admitted_at > _RELEASE_AFTER and not one.given_back]
        late = [one for one in old if one.unbegun and one.stop is not Stop.LOST]
        if not late:
            return
        await self._link.call(
            calls.RELEASE,
            worker_id=self._worker_id,
            job_ids=UuidArray([one.key for one in late]),
            attempts=IntArray([one.number for one in late]),
            started=False,
        )
        for one in late:
            one.given_back = True
            self._given_back(one.key, one.number)

    async def _renew(self, held: list[Held], now: float) -> None:
        due = [one for one in held if one.lapses_at - now < one.lease * _RENEW_AT or self._overdue(one, now)]
        if not due:
            return
        asked_at = time.monotonic()
        beats = await self._link.call(
            calls.HEARTBEAT,
            worker_id=self._worker_id,
            job_ids=UuidArray([one.key for one in due]),
            attempts=IntArray([one.number for one in due]),
            lease=self._lease,
        )
        lost_keys = {beat.job_id for beat in beats if beat.reason == "lost"}
        for one in due:
            one.renewed_at = asked_at
            if one.key not in lost_keys:
                one.lapses_at = asked_at + one.lease
        for beat in beats:
            lost = self._held.get(beat.job_id) if beat.reason == "lost" else None
            if lost is not None and lost.number == beat.attempt and lost.began and lost.outcome is None:
                # If the sweep has ended it for its timeout, its retry waits for it.
                self.on_hold[lost] = now - HOLD
                # It may have ended, and been settled, in between.
                if self._held.get(beat.job_id) is not lost:
                    self.let_go.append(lost)
            self._told(beat.job_id, beat.attempt, beat.reason)

    async def _ask_for_cancels(self, held: list[Held], now: float) -> None:
        if not (self._poll_cancels and held and now - self._cancels_at >= _LONGEST):
            return
        self._cancels_at = now
        keys = await self._link.call(calls.CANCEL_REQUESTS, job_ids=UuidArray([one.key for one in held]))
        numbers = {one.key: one.number for one in held}
        for key in keys:
            self._told(key, numbers[key], "cancel")

    async def _hold(self, held: list[Held], now: float) -> None:
        gone = [self.let_go.pop() for _ in range(len(self.let_go))]
        for one in gone:
            self.on_hold.pop(one, None)
        try:
            await self._put_off(gone, 0.0)
        except Exception:
            self.let_go.extend(gone)
            raise
        due = [one for one, since in list(self.on_hold.items()) if now - since >= HOLD / 3]
        kept = await self._put_off(due, HOLD)
        for one in due:
            if one.key in kept:
                self.on_hold[one] = now
            else:
                self.on_hold.pop(one, None)

    async def _put_off(self, some: list[Held], delay: float) -> set[bytes]:
        if not some:
            return set()
        keys: list[bytes] = await self._link.call(
            calls.HOLD_RETRY,
            worker_id=self._worker_id,
            job_ids=UuidArray([one.key for one in some]),
            attempts=IntArray([one.number for one in some]),
            delay=delay,
        )
        return set(keys)

    async def _count(self, held: list[Held], now: float) -> None:
        if now - self._counted_at >= _COUNTED_EVERY:
            self._counted_at = now
            if not await self._sender.flush(self._link):
                self._seen_at = 0.0

    async def _give_sign(self, held: list[Held], now: float) -> None:
        if now - self._seen_at < self._seen_every:
            return
        seen, started = self._life()
        known, timeouts, alike = await self._link.call(calls.WORKER_SEEN, worker_id=self._worker_id, **seen)
        if not known:
            await self._link.call(calls.WORKER_STARTED, worker_id=self._worker_id, **started)
        self._signed(alike, not known)
        self.timeouts = {queue: milliseconds / 1000 for queue, milliseconds in (timeouts or {}).items()}
        self._seen_at = time.monotonic()

    async def _divide(self, held: list[Held], now: float) -> None:
        if self._membership is not None:
            await self._membership.step(self._link)

    def _overdue(self, one: Held, now: float) -> bool:
        """Say whether the sweep may have ended an attempt that still runs, and is to be asked again."""
        asked_at = one.renewed_at or one.claimed_at
        if not one.began or one.outcome is not None or now - asked_at < _BEYOND:
            return False
        # A task that blocks the event loop from its first step has no timeout yet.
        given = one.claimed.timeout_ms
        limit = self.timeouts.get(one.claimed.queue, DEFAULT_TIMEOUT) if given is None else given / 1000
        return now - one.began > limit + _BEYOND

    async def close(self) -> None:
        """Hang up."""
        self._link.close()
