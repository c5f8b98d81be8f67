"""The claimer: the one that claims in a process. Keeps a short buffer of claimed jobs in front of the executor's slots.

The buffer holds about 0.1 s of work at the measured time of tasks. When they are slower it holds one job per free slot,
and beyond these only what finds a slot within 0.06 s: so no slot waits for a claim, and slow jobs are left to others.
A database that answers slowly is asked less often, for more at a time. So is one that many slow tasks keep busy: while
no slot is free, completions wait a tenth of a task's time for others.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pgqueue import calls
from pgqueue.attempt import UNBEGUN, Stop
from pgqueue.connections import Link
from pgqueue.errors import PgqueueError
from pgqueue.executor import Executor
from pgqueue.finisher import Finisher
from pgqueue.held import Held
from pgqueue.idling import Idling
from pgqueue.job import ClaimedJob
from pgqueue.listener import unmet
from pgqueue.log import logger
from pgqueue.tasks import Task

_log: Final = logger("pgqueue.claimer")
#: Seconds of work that may be held without being run: usually, of tasks that take longer, and when claims take long.
AHEAD: Final = 0.1
AHEAD_OF_SLOW: Final = 0.06
AHEAD_AT_MOST: Final = 0.5
MOST_AHEAD: Final = 1000
MOST_PER_CLAIM: Final = 500
#: The part of a task's time, and the seconds at most, for which completions wait for others while all slots are busy.
PATIENCE: Final = 0.1
PATIENCE_AT_MOST: Final = 0.02
#: So many times the time that claims take counts of one that takes longer.
HELD_UP: Final = 10
#: What a job costs at least, in seconds, however fast its task.
_CHEAPEST: Final = 20e-6
#: Jobs that were held for so many seconds without a free slot are given back for others to run.
_STALE: Final = 1.0
_SLOWEST_RETRY: Final = 1.0
#: Seconds between looks at jobs whose leases are being renewed.
_POSTPONED: Final = 0.05


class Claimer:
    """Claims for an executor until told to stop.

    `parameters` are those of calls.CLAIM but max_jobs, read anew at each claim; `admit(rows, claimed_at)` makes held
    jobs of claimed rows; `dropped(held)` is told of held jobs whose attempt is to stop before it began; `empty()`,
    where given, of each claim that came back empty.
    """

    def __init__(
        self,
        link: Link,
        idling: Idling,
        executor: Executor,
        finisher: Finisher,
        *,
        concurrency: int,
        parameters: Mapping[str, Any],
        admit: Callable[[Sequence[ClaimedJob], float], Sequence[Held]],
        dropped: Callable[[Held], None],
        empty: Callable[[], None] | None = None,
    ) -> None:
        """Hold nothing yet; made within the event loop that it will use."""
        self._loop = asyncio.get_running_loop()
        self._link = link
        self._idling = idling
        self._executor = executor
        self._finisher = finisher
        self._concurrency = concurrency
        self._parameters = parameters
        self._admit = admit
        self._dropped = dropped
        self._empty = empty
        self._buffer: deque[Held] = deque()
        self._postponed: list[Held] = []
        self._room = asyncio.Event()
        self._hungry = False
        self._filling = False
        self._watching = False
        self._stopped = False
        self._asked = 0
        self._fed = False
        self._duration: float | None = None
        self._claim_time = 0.001

    async def run(self) -> None:
        """Claim until stopped; a claim that fails is tried again."""
        pause = 0.0
        while not self._stopped:
            try:
                await self._claim()
                if pause:
                    _log.info("claiming again")
                pause = 0.0
            except Exception as exc:
                if not pause:
                    known = isinstance(exc, PgqueueError)
                    _log.warning("cannot claim; trying again", error=str(exc), exc_info=not known)
                pause = min(max(0.05, pause * 2), _SLOWEST_RETRY)
                self._idling.forget()
                await asyncio.sleep(pause)

    def stop(self) -> None:
        """Claim no more, and give back what has not begun."""
        self._stopped = True
        self._idling.bell.set()
        self._room.set()
        self._give_back(lambda held: True)

    def ended(self, duration: float | None) -> None:
        """Note how long an attempt took, in seconds, None for one that never began, and use the slot that came free."""
        if duration is not None:
            before = self._duration
            self._duration = duration if before is None else before + (duration - before) * 0.05
        if not self._filling:
            self._fill()

    def patience(self) -> float:
        """Return for how many seconds completions may wait for others: not at all while a slot is free."""
        if self._stopped or self._duration is None or self._executor.free > 0:
            return 0.0
        return min(self._duration * PATIENCE, PATIENCE_AT_MOST)

    def offer(self, freed: int) -> dict[str, Any] | None:
        """Return the parameters of a claim that another makes for this one, None without room; `taken` must follow.

        One that is under way asks for all there is room for, but may be too early for the `freed` jobs' next ones.
        """
        wanted = 0 if self._stopped else max(self._wanted(), min(freed, self._executor.free - len(self._buffer)))
        if wanted < 1:
            return None
        self._asked += wanted
        return {**self._parameters, "max_jobs": wanted}

    def taken(self, asked: int, rows: Sequence[ClaimedJob], claimed_at: float) -> None:
        """Take the rows of an offered claim for `asked` jobs."""
        self._asked -= asked
        if rows:
            self._fed = True
            self._idling.fed(len(rows))
            self._take(rows, claimed_at)
        if self._hungry and self._wanted() > 0:
            self._room.set()

    def postpone(self, held: Held) -> None:
        """Begin a job whose lease has lapsed once the heartbeat has renewed it."""
        if not self._postponed:
            self._loop.call_later(_POSTPONED, self._look_at_postponed)
        self._postponed.append(held)

    def give_back_type(self, task: Task[Any, Any]) -> None:
        """Give back what has not begun of a job type that is to pause."""
        self._give_back(lambda held: held.task is task)

    async def _claim(self) -> None:
        """Claim what there is room for, or wait: for room, or for jobs."""
        wanted = self._wanted()
        if wanted < 1:
            await self._idling.worked(0, self._claim_time)
            if not await self._wait_for_room():
                await self._idling.full()
            return
        heard = self._idling.heed()
        began = time.monotonic()
        self._asked += wanted
        try:
            rows = await self._link.call(calls.CLAIM, max_jobs=wanted, **self._parameters)
        finally:
            self._asked -= wanted
        # One that was held up, as by a lock, says little of the next ones.
        took = min(time.monotonic() - began, HELD_UP * self._claim_time)
        self._claim_time += (took - self._claim_time) * 0.1
        more = len(rows) * 2 >= wanted
        if len(rows) >= wanted:
            # A bell may be later than its job.
            heard += self._idling.heed()
            if heard:
                self._idling.left_over(unmet(heard, ((row.queue, row.job_type) for row in rows)))
        if rows:
            self._take(rows, began)
            if not more:
                # What few wait for is their start: a claim that is sent before may take the processor from them.
                self._fill()
                await asyncio.sleep(0)
        if rows or self._fed:
            self._fed = False
            await self._idling.worked(len(rows), self._claim_time)
        elif self._empty is not None:
            self._empty()
        if not more and not self._stopped:
            await self._idling.wait(len(rows), self._claim_time)

    def _wanted(self) -> int:
        """Return how many jobs to claim now."""
        if self._finisher.waiting > (self._concurrency if self._finisher.stuck else 2 * MOST_AHEAD):
            return 0
        free = self._executor.free
        ahead = 0
        if self._duration is not None:
            # A claim is sent when half of it is left, which must last until the answer.
            least = AHEAD if self._duration < AHEAD else AHEAD_OF_SLOW
            seconds = min(max(least, 2 * self._claim_time), AHEAD_AT_MOST)
            ahead = min(int(seconds / max(self._duration / self._concurrency, _CHEAPEST)), MOST_AHEAD)
        waiting = len(self._buffer) + self._asked
        if ahead > free and waiting * 2 > ahead:
            return 0
        return min(max(free, ahead) - waiting, MOST_PER_CLAIM)

    async def _wait_for_room(self) -> bool:
        """Return whether there is some."""
        self._room.clear()
        self._hungry = True
        try:
            async with asyncio.timeout(AHEAD):
                await self._room.wait()
        except TimeoutError:
            return False
        finally:
            self._hungry = False
        return True

    def _take(self, rows: Sequence[ClaimedJob], claimed_at: float) -> None:
        self._buffer.extend(self._admit(rows, claimed_at))
        if self._stopped:
            self._give_back(lambda held: True)
        # Once the next claim is on its way, so that the database works while attempts run here.
        self._loop.call_soon(self._fill)
        if not self._watching:
            self._watching = True
            self._loop.call_later(_STALE, self._look_at_first, None)

    def _look_at_first(self, seen: Held | None) -> None:
        """Give back what waits here for a slot in vain: others may have time for it."""
        self._watching = bool(self._buffer) and not self._stopped
        if not self._watching:
            return
        first = self._buffer[0]
        stale = self._executor.free < 1 and time.monotonic() - first.claimed_at > _STALE
        # Twice, since a loop that was held up comes to all of its timers at once.
        if stale and first is seen:
            self._give_back(lambda held: True)
            self._duration = None
        self._loop.call_later(AHEAD if stale else _STALE, self._look_at_first, first)

    def _look_at_postponed(self) -> None:
        now = time.monotonic()
        lost: list[Held] = []
        ready: list[Held] = []
        waiting: list[Held] = []
        for held in self._postponed:
            if held.stop is Stop.LOST:
                lost.append(held)
            elif now <= held.lapses_at and not held.late():
                ready.append(held)
            elif not held.given_back:
                waiting.append(held)
        self._postponed = waiting
        if waiting:
            self._loop.call_later(_POSTPONED, self._look_at_postponed)
        self._buffer.extendleft(reversed(ready))
        for held in lost:
            self._dropped(held)
        if self._stopped:
            self._give_back(lambda held: True)
        self._fill()

    def _fill(self) -> None:
        """Start what is held and finds a free slot."""
        if self._filling:
            return
        self._filling = True
        buffer, executor = self._buffer, self._executor
        running, concurrency = executor.running, self._concurrency
        try:
            for _ in range(MOST_PER_CLAIM):
                if not buffer or len(running) >= concurrency:
                    break
                held = buffer.popleft()
                if held.given_back:
                    continue
                if held.stop is None:
                    executor.start(held)
                else:
                    self._dropped(held)
            else:
                self._loop.call_soon(self._fill)
        finally:
            self._filling = False
        if self._hungry and self._wanted() > 0:
            self._room.set()

    def _give_back(self, chosen: Callable[[Held], bool]) -> None:
        for _ in range(len(self._buffer)):
            held = self._buffer.popleft()
            if held.late():
                # The heartbeat's: two who give a job back would hit its next attempt.
                continue
            if chosen(held):
                held.outcome = UNBEGUN
                self._finisher.add(held, held.outcome)
            else:
                self._buffer.append(held)
