"""The sweeper: has the database do what time asks for. Any number of them may run; one works at a time.

Every step is a call in a transaction of its own, short enough for a statement_timeout of a second. One that fails is
noted in pgqueue.sweep_steps and tried again a little later each time; the others go on. While steps find nothing to do,
a sweep is one statement. Between two sweeps the sweeper sleeps until the next job or schedule is due. Of many sweepers
one takes each turn, and the others do nothing; where there are dozens, those ask less often.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from pgqueue import calls_time
from pgqueue.alerts import Alerts
from pgqueue.connections import Link
from pgqueue.errors import DatabaseError, PgqueueError
from pgqueue.scheduler import Declarations, Scheduler
from pgqueue.services import Service
from pgqueue.settings import Settings

#: Jobs that a step may move in one call, and seconds after which it leaves the rest to the next one.
BATCH: Final = 2000
PATIENCE: Final = 0.3
#: A step that moved so many has probably left some.
_MANY: Final = 500
#: Cursors that rise fast rise again after so many seconds: an old snapshot keeps what claims would walk behind them.
_RISING: Final = 0.2
#: A call that takes longer, in seconds, is given up with its connection.
_LIMIT: Final = 10.0
#: What is due within so many seconds is done together.
_TOGETHER: Final = 0.05
#: A step of Python's that does nothing is noted as seldom as this, in seconds.
_NOTED: Final = 10.0
#: Whoever had the last turn takes the next one, since its backend knows the steps; others do when that one is late.
#: In intervals since the last turn.
_ON_TIME: Final = 0.8
_LATE: Final = 1.5
#: Sweeps are in one statement, which does little, once no step has had anything to do for so many seconds.
_QUIET_AFTER: Final = 5.0
_QUIET_BATCH: Final = 100
_QUIET_PATIENCE: Final = 0.05


@dataclass(slots=True)
class _Step:
    """A step in SQL: how often it is called, in seconds (0: with every sweep), and how much it may do.

    One that moved `many` is called again after `apart` seconds. While nothing is to do, every `calm`th sweep calls it.
    """

    name: str
    every: float = 0.0
    when_due: bool = False
    many: int = _MANY
    apart: float = 0.0
    calm: int = 1
    batch: int = BATCH
    next_at: float = -math.inf


class Sweeper(Service):
    """Sweeps every settings.sweep_interval, and when something is due. `declarations`: schedules to keep in force."""

    name = "sweeper"

    def __init__(self, dsn: str, settings: Settings, declarations: Declarations | None = None) -> None:
        """Open nothing yet."""
        super().__init__()
        self.interval = settings.sweep_interval
        self._link = Link(dsn, settings, "pgqueue sweeper")
        self._link.limit = min(settings.statement_limit, _LIMIT)
        self._scheduler = Scheduler()
        self._declarations = declarations
        self._alerts = Alerts(one_machine=settings.dsn is None)
        self._steps = [
            _Step("due", when_due=True),
            _Step("leases"),
            # What has not moved for seconds need not be looked at every second.
            _Step("cursors", many=BATCH, apart=_RISING, calm=2),
            # What they find may wait for some seconds: no claim takes an expired job, and no key loses its head unseen.
            _Step("keys", calm=4),
            _Step("expired", calm=4),
            _Step("shed", calm=4),
            _Step("timeouts", every=5.0),
            _Step("retention", every=5.0, calm=10),
            # Until it ran, bells are rung for workers that were killed.
            _Step("prune", every=3.0),
        ]
        self._awaited = _Step("next due", every=60.0)
        self._scheduled = _Step("schedules", every=_NOTED)
        self._declared = _Step("declared", every=60.0)
        self._alerted = _Step("alert log", every=60.0)
        self._problems: dict[str, str] = {}
        self._again: dict[str, float] = {}
        self._sweep_at = self._wake_at = self._asked_at = -math.inf
        self._mine = False
        self._moved_at = -math.inf

    def pause(self) -> float:
        """Return how long to sleep, in seconds."""
        return max(self._wake_at - time.monotonic(), 0.0)

    async def step(self) -> bool:
        """Do what is due; True when a step was full. Raises a PgqueueError when one failed."""
        now = time.monotonic()
        # Told of a smaller crowd, it asks for the turn before the time at which it was to.
        whole = now >= self._sweep_at or (not self._mine and now - self._asked_at > self.interval * self.crowd * 1.1)
        done = False
        self._problems.clear()
        if whole:
            self._sweep_at = self._wake_at = now + self.interval * random.uniform(0.9, 1.1)
            # First, so that what is no longer declared does not fire once more.
            if self._declarations is not None:
                await self._attempt(self._declared, self._declarations.step)
            self._alerts.calm = now - self._moved_at >= _QUIET_AFTER
            done = self._mine and self._alerts.calm and await self._sweep_quietly(now)
            if not done:
                late = self.interval * (_ON_TIME if self._mine else _LATE)
                self._mine = await self._link.call(calls_time.TAKE_TURN, every=late)
            self._asked_at = now
            if not self._mine:
                self._sweep_at = self._wake_at = now + self.interval * self.crowd * random.uniform(0.9, 1.1)
        if not done:
            self._wake_at = self._sweep_at
            if self._mine:
                await self._sweep(now, whole)
        if self._problems:
            raise DatabaseError("; ".join(f"{name}: {problem}" for name, problem in self._problems.items()))
        return self._mine and any(at <= time.monotonic() for at in self._again.values())

    async def close(self) -> None:
        """Hang up."""
        self._link.close()

    async def _sweep_quietly(self, now: float) -> bool:
        """Sweep in one statement; False: it must be done step by step."""
        due = [step for step in self._steps if now >= step.next_at]
        names = [step.name for step in due]
        if self._alerts.measure_due:
            names.append("measure")
        try:
            swept = await self._link.call(
                calls_time.SWEEP_STEPS,
                every=self.interval * _ON_TIME,
                steps=names,
                max_jobs=_QUIET_BATCH,
                patience=_QUIET_PATIENCE,
            )
        except PgqueueError:
            # One step may have cost all of them their time.
            self._moved_at = now
            return False
        self._mine = swept.mine
        if not swept.mine:
            return True
        self._wake_at_latest(swept.due_in)
        for name, (jobs, problem) in swept.steps.items():
            if name == "measure":
                self._alerts.measured(jobs)
            elif jobs:
                self._moved_at = now
            if problem is not None:
                self._problems[name] = problem
        for step in due:
            step.next_at = now + max(step.every, (step.calm - 1) * self.interval)
            jobs, _ = swept.steps.get(step.name, (None, None))
            if (jobs or 0) >= _QUIET_BATCH:
                self._once_more(step)
        if self._moved_at == now:
            for step in self._steps:
                step.next_at = min(step.next_at, now + step.every)
        if swept.schedules_due or now >= self._scheduled.next_at:
            await self._attempt(self._scheduled, self._scheduler.step)
        await self._attempt(self._alerted, self._alerts.step)
        return True

    async def _look_ahead(self, link: Link) -> None:
        self._wake_at_latest(await link.call(calls_time.NEXT_DUE))

    def _wake_at_latest(self, due_in: float | None) -> None:
        if due_in is not None:
            self._wake_at = min(self._wake_at, time.monotonic() + max(due_in, _TOGETHER))

    async def _sweep(self, now: float, whole: bool) -> None:
        # Asked for before the steps, which take what is due by then.
        await self._attempt(self._awaited, self._look_ahead)
        again = {name for name, at in self._again.items() if at <= now}
        for name in again:
            del self._again[name]
        await self._attempt(self._scheduled, self._scheduler.step)
        for step in self._steps:
            if step.when_due or step.name in again or (whole and now >= step.next_at):
                step.next_at = now + step.every
                await self._call(step)
        if whole:
            await self._attempt(self._alerted, self._alerts.step)

    async def _call(self, step: _Step) -> None:
        began = time.monotonic()
        try:
            jobs, problem = await self._link.call(
                calls_time.SWEEP_STEP, step=step.name, max_jobs=step.batch, patience=PATIENCE
            )
        except PgqueueError as exc:
            # A step that is too slow for this server, or for its statement_timeout, does less at a time.
            step.batch = max(step.batch // 4, 1)
            await self._note(step, began, 0, exc)
            return
        if problem is not None:
            self._problems[step.name] = problem
        elif jobs is not None:
            if jobs:
                self._moved_at = began
            if jobs >= min(step.many, step.batch):
                self._once_more(step)
            step.batch = min(step.batch + step.batch // 10 + 1, BATCH)

    def _once_more(self, step: _Step) -> None:
        self._again[step.name] = time.monotonic() + step.apart
        self._wake_at_latest(step.apart)

    async def _attempt(self, step: _Step, work: Callable[[Link], Awaitable[int | None]]) -> None:
        """Do what is no step in SQL, and note it as if it were one."""
        began = time.monotonic()
        try:
            jobs = await work(self._link) or 0
        except PgqueueError as exc:
            await self._note(step, began, 0, exc)
            return
        if jobs or began >= step.next_at:
            await self._note(step, began, jobs, None)

    async def _note(self, step: _Step, began: float, jobs: int, exc: PgqueueError | None) -> None:
        """Note a run; raises when the database cannot be reached, which is another fault than the step's."""
        now = time.monotonic()
        step.next_at = now + step.every if exc is None else -math.inf
        if exc is not None:
            self._problems[step.name] = str(exc)
        await self._link.call(
            calls_time.NOTE_STEP,
            step=step.name,
            seconds=now - began,
            jobs=jobs,
            problem=None if exc is None else str(exc),
        )
