"""The scheduler: enqueues the jobs of schedules that are due. Any number may run; the database lets one fire each time.

What was missed while no scheduler ran is for the schedule's misfire policy: `run_once` enqueues one job, for the latest
time missed; `skip` none; `run_all` one for each, the latest `misfire_cap` of them. A time counts as missed when it is
longer ago than ON_TIME.
"""

import functools
import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from pgqueue import calls_time
from pgqueue.connections import Link
from pgqueue.cron import Cron
from pgqueue.errors import InvalidJob
from pgqueue.log import logger
from pgqueue.services import Service
from pgqueue.settings import Settings
from pgqueue.tasks import Schedule

_log: Final = logger("pgqueue.scheduler")
ON_TIME: Final = timedelta(seconds=5)
#: Schedules that are fired in one transaction, and that are looked at before other steps have their turn.
BATCH: Final = 100
MOST: Final = 5000
#: Seconds between two signs of life of declared schedules; after a minute without one, older code may take over.
DECLARE_EVERY: Final = 15.0
#: A schedule that fails is tried again after so many seconds, twice as many each time, at most LONGEST.
_SHORTEST: Final = 0.5
_LONGEST: Final = 60.0


def plan(
    cron: Cron, due: datetime | None, now: datetime, misfire: str = "run_once", cap: int = 100
) -> tuple[list[datetime], datetime]:
    """Return the due times to fire for now, and when it is due next. `due` None: it has not been due yet."""
    following = cron.next(now)
    if due is None:
        return [], following
    if misfire == "run_all":
        return [due, *cron.latest(due, now, cap)][-cap:], following
    latest = [due, *cron.latest(due, now, 1)][-1]
    return [latest] if misfire != "skip" or now - latest <= ON_TIME else [], following


class Scheduler:
    """Plans and fires. One that fails is left for later and stops none of the others."""

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._later: dict[str, tuple[float, float]] = {}

    async def step(self, link: Link) -> int:
        """Do what is due now and return how many jobs that made. Raises a PgqueueError."""
        now = time.monotonic()
        later = [name for name, (until, _) in self._later.items() if until > now]
        rows = await link.call(calls_time.DUE_SCHEDULES, later=later, limit=MOST)
        return sum([await self._fire(link, rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)])

    async def _fire(self, link: Link, rows: Sequence[dict[str, Any]]) -> int:
        """Fire schedules that are due, all in one transaction; one that fails is left out of it."""
        failed, plans = {}, []
        for row in rows:
            try:
                plans.append(_plan(row))
            except InvalidJob as exc:
                failed[row["name"]] = str(exc)
            except Exception as exc:
                # Whatever is wrong with one, all others are to fire.
                _log.exception("a schedule cannot be planned", schedule=row["name"])
                failed[row["name"]] = f"{type(exc).__name__}: {exc}"
        fired = 0
        if plans:
            for name, jobs, problem in await link.call(
                calls_time.FIRE_SCHEDULES, plans=msgspec.json.encode(plans).decode()
            ):
                fired += jobs
                if problem is None:
                    self._later.pop(name, None)
                else:
                    failed[name] = problem
        for row in rows:
            if row["name"] in failed:
                await self._failed(link, row, failed[row["name"]])
        return fired

    async def _failed(self, link: Link, row: dict[str, Any], error: str) -> None:
        self._put_off(row["name"])
        if error[:1000] != row["last_error"] or row["due_at"] is None:
            _log.warning("a schedule cannot fire", schedule=row["name"], error=error)
            await link.call(calls_time.SCHEDULE_FAILED, name=row["name"], due_at=row["due_at"], error=error)

    def _put_off(self, name: str) -> None:
        _, pause = self._later.get(name, (0.0, _SHORTEST))
        self._later[name] = (time.monotonic() + pause, min(pause * 2, _LONGEST))
        if len(self._later) > MOST:
            now = time.monotonic()
            self._later = {other: state for other, state in self._later.items() if state[0] > now}


def _plan(row: dict[str, Any]) -> dict[str, Any]:
    """Return what FIRE_SCHEDULES takes for a row of DUE_SCHEDULES; raises InvalidJob for what can never fire."""
    fires, following = plan(
        _cron(row["cron"], row["timezone"]),
        _instant(row["due_at"]),
        datetime.fromisoformat(row["now"]),
        row["misfire"],
        row["misfire_cap"],
    )
    fence = {name: row[name] for name in ("name", "cron", "timezone", "due_at")}
    return {**fence, "fires": fires, "next_run_at": following}


@functools.lru_cache(maxsize=10_000)
def _cron(expression: str, timezone: str) -> Cron:
    return Cron(expression, timezone)


def _instant(text: str | None) -> datetime | None:
    """Return the moment that the database's JSON names; None for one that Python cannot hold, such as -infinity."""
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError:
        return None


class Declarations:
    """Keeps the schedules that an app declares in code in force, as rows of pgqueue.schedules."""

    def __init__(self, declared_by: str, schedules: Iterable[Schedule]) -> None:
        """`declared_by` tells this app from others and stays the same from one start to the next."""
        self._declared_by = declared_by
        self._declared = msgspec.json.encode(sorted(map(_row, schedules), key=lambda row: row["name"])).decode()
        self._fingerprint = hashlib.sha256(self._declared.encode()).hexdigest()[:16]
        self._again_at = 0.0
        self._started = True
        self._taken: set[str] = set()

    async def step(self, link: Link) -> int:
        """Say so now and then and return how many rows that changed; raises a PgqueueError."""
        if time.monotonic() < self._again_at:
            return 0
        self._again_at = time.monotonic() + DECLARE_EVERY
        outcomes = await link.call(
            calls_time.DECLARE_SCHEDULES,
            declared_by=self._declared_by,
            fingerprint=self._fingerprint,
            declared=self._declared,
            started=self._started,
        )
        self._started = False
        for name, outcome in outcomes:
            if outcome == "none":
                self._again_at = math.inf
            elif outcome != "taken":
                self._taken.discard(name)
                _log.info(f"schedule {outcome}", schedule=name, declared_by=self._declared_by)
            elif name not in self._taken:
                self._taken.add(name)
                _log.warning("another app, or somebody by hand, has a schedule of this name: it stays", schedule=name)
        return sum(outcome in ("declared", "removed") for _, outcome in outcomes)


def _row(schedule: Schedule) -> dict[str, Any]:
    Cron(schedule.cron, schedule.timezone)
    row = {field: getattr(schedule, field) for field in schedule.__slots__}
    timeout = row.pop("timeout")
    return {**row, "timeout_ms": None if timeout is None else round(timeout * 1000)}


class Declaring(Service):
    """Declarations for a process that does no other maintenance."""

    name = "schedules"
    interval = DECLARE_EVERY

    def __init__(self, dsn: str, settings: Settings, declarations: Declarations) -> None:
        """Open nothing yet."""
        super().__init__()
        self._link = Link(dsn, settings, "pgqueue schedules")
        self._declarations = declarations

    async def step(self) -> bool:
        """Declare, over a connection for that time only."""
        try:
            await self._declarations.step(self._link)
        finally:
            self._link.close()
        return False
