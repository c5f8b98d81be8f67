"""What pages read, kept for a moment, so that any number of open pages cost the database one query."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any, Final, TypeVar, cast
from weakref import WeakKeyDictionary

from pgqueue import calls_dashboard, calls_rest
from pgqueue.api.core import Api
from pgqueue.api.dashboard.reading import Reading
from pgqueue.api.queues import queue_views
from pgqueue.api.values_operate import QueueView
from pgqueue.api.workers import worker_rows
from pgqueue.counts import LIMITS
from pgqueue.job import PRIORITIES

T = TypeVar("T")
#: Seconds.
_PACE_OVER: Final = 300.0
HISTORY_OVER: Final = 900.0
_POINTS: Final = 60
_WORKERS: Final = 5000
_LONGEST: Final = 5.0
DEAD_LETTERS_COUNTED: Final = 10_000


class Reads:
    """The reads of one process."""

    def __init__(self, api: Api) -> None:
        """Read nothing yet."""
        self._api = api
        self._reading = Reading(api)
        self._kept: dict[str, tuple[float, asyncio.Future[Any]]] = {}
        self._took: dict[str, float] = {}

    async def _keep(self, name: str, seconds: float, read: Callable[[], Awaitable[T]]) -> T:
        """Return what was read in the last while, or what is being read, or read."""
        known = self._kept.get(name)
        # What takes long is kept for longer, so that pages take at most a twentieth of a connection's time.
        lasts = max(seconds, min(20 * self._took.get(name, 0.0), _LONGEST))
        if known is None or (known[1].done() and (known[0] < time.monotonic() - lasts or _failed(known[1]))):
            # A task of its own: whoever asked first may go away.
            task = asyncio.ensure_future(self._read(name, read))
            known = self._kept[name] = (time.monotonic(), task)
        return cast(T, await asyncio.shield(known[1]))

    async def _read(self, name: str, read: Callable[[], Awaitable[T]]) -> T:
        begun = time.monotonic()
        found = await read()
        self._took[name] = time.monotonic() - begun
        return found

    def forget(self) -> None:
        """Read anew: something was changed from here."""
        self._kept.clear()

    async def queues(self) -> list[QueueView]:
        """Return all queues with their depths."""
        return await self._keep("queues", 1.0, lambda: queue_views(self._api))

    async def workers(self) -> list[dict[str, Any]]:
        """Return worker processes."""
        return await self._keep("workers", 1.0, lambda: worker_rows(self._api, None, _WORKERS))

    async def alerts(self) -> list[dict[str, Any]]:
        """Return what is wrong."""
        return await self._keep("alerts", 1.0, lambda: self._api.call(calls_rest.ALERTS))

    async def dead_letters(self) -> int:
        """Return how many dead letters there are; counting ends at 10,001."""
        return await self._keep("dead_letters", 1.0, lambda: self._reading.call(calls_dashboard.DEAD_LETTERS))

    async def finished(self) -> dict[str, Any]:
        """Return about how many jobs have ended."""
        return await self._keep("finished", 5.0, lambda: self._api.call(calls_dashboard.FINISHED))

    async def pace(self) -> dict[str, Any]:
        """Return rates and run times of the last minutes."""
        return await self._keep("pace", 1.0, lambda: self._api.call(calls_dashboard.PACE, seconds=_PACE_OVER))

    async def rates(self) -> dict[str, Any]:
        """Return rates of the last minute."""
        return await self._keep("rates", 1.0, lambda: self._api.call(calls_dashboard.PACE, seconds=60.0))

    async def history(self) -> list[tuple[float, float, float]]:
        """Return submitted, processed and failed per second over the last quarter of an hour."""
        return await self._keep(
            "history",
            3.0,
            lambda: self._api.call(calls_dashboard.HISTORY, seconds=HISTORY_OVER, points=_POINTS),
        )

    async def names(self) -> dict[str, list[str]]:
        """Return the names of queues and job types that were counted."""
        return await self._keep("names", 10.0, lambda: self._api.call(calls_dashboard.NAMES))

    async def running(self) -> list[dict[str, Any]]:
        """Return jobs that run."""
        return await self._keep("running", 1.0, lambda: self._reading.call(calls_dashboard.RUNNING, limit=500))

    async def failures(self) -> list[dict[str, Any]]:
        """Return groups of failures."""
        return await self._keep("failures", 3.0, lambda: self._reading.call(calls_dashboard.FAILURES))


def _failed(future: "asyncio.Future[Any]") -> bool:
    return future.cancelled() or future.exception() is not None


_reads: Final[WeakKeyDictionary[Api, Reads]] = WeakKeyDictionary()


def reads_of(api: Api) -> Reads:
    """Return what the pages of an API share."""
    known = _reads.get(api)
    if known is None:
        known = _reads[api] = Reads(api)
    return known


def quantile(buckets: list[float] | None, part: float) -> float | None:
    """Return the seconds below which a part of what the buckets counted lies, as pgqueue.quantile does."""
    whole = sum(buckets or [])
    if not buckets or not whole:
        return None
    below = 0.0
    for (low, high), here in zip(pairwise((0.0, *LIMITS, LIMITS[-1])), buckets, strict=True):
        if here and below + here >= part * whole:
            return low + (high - low) * (part * whole - below) / here
        below += here
    return float(LIMITS[-1])


def attention(
    alerts: list[dict[str, Any]],
    queues: list[QueueView],
    workers: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return what needs somebody, the worst first: alerts, then what will become one."""
    found = [
        {
            "severity": one["severity"],
            "title": _spaced(one["alert"]),
            "text": one["summary"],
            "queue": one["queue"],
            "since": one["since"],
        }
        for one in sorted(alerts, key=lambda one: (one["severity"] != "page", one["alert"], one["queue"] or ""))
    ]
    known = {(one["title"], one["queue"]) for one in found}
    live = [one for one in workers if one["live"]]
    for queue in queues:
        if not queue.depth.pending:
            continue
        waits = f"{queue.depth.pending:,} pending {'job waits' if queue.depth.pending == 1 else 'jobs wait'}"
        served = any(one["queues"] is None or queue.name in one["queues"] for one in live)
        if queue.paused:
            found.append(_note("Queue is paused", f"{waits} until it is resumed.", queue, queue.paused_at))
        elif not served and not any(name == queue.name and "orker" in str(title) for title, name in known):
            found.append(_note("No worker for this queue", f"{waits} and no live worker serves the queue.", queue))
        elif queue.depth.pending > queue.soft_limit and not any(name == queue.name for _, name in known):
            found.append(_note("Queue is above its soft limit", f"{waits}; producers are slowed down.", queue))
    late = [one for one in workers if one["status"] != "stopped" and not one["live"]]
    if late:
        names = ", ".join(one["name"] for one in late[:3]) + (" and others" if len(late) > 3 else "")
        found.append(
            {
                "severity": "warning",
                "title": "Workers went silent" if len(late) > 1 else "A worker went silent",
                "text": f"No sign of life for a minute from {names}. Leases bring the jobs back.",
                "queue": None,
                "since": max(one["last_heartbeat"] for one in late),
            }
        )
    return found


def _spaced(name: str) -> str:
    """Return an alert's name as words; what is all capitals stays so."""
    first, *others = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).split()
    return " ".join([first, *(word if word.isupper() else word.lower() for word in others)])


def _note(title: str, text: str, queue: QueueView, since: Any = None) -> dict[str, Any]:
    return {"severity": "warning", "title": title, "text": text, "queue": queue.name, "since": since}


def by_priority(queue: QueueView) -> list[tuple[str, float, str]]:
    """Return a queue's pending jobs as parts of a bar."""
    pending = {part.priority: part.pending for part in queue.priorities}
    return [
        (f"p{place}", float(pending.get(place, 0)), f"{name}: {pending.get(place, 0):,} pending")
        for place, name in enumerate(PRIORITIES)
    ]
