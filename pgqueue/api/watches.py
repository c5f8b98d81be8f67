"""Events of jobs, and watches: what streams and waiting requests hear of them through."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from pgqueue.job import FINAL_STATUSES
from pgqueue.listener import Bell

#: Seconds after which a new watch's job is read again: what was under way when it began may not have been told.
_YOUNG: Final = (0.25, 1.0)
_EVENT_OF: Final = {
    "submitted": "job.submitted",
    "pending": "job.queued",
    "processing": "job.started",
    "completed": "job.completed",
    "failed": "job.failed",
    "dead_letter": "job.dead_letter",
    "cancelled": "job.cancelled",
}


class Event(msgspec.Struct):
    """A change of a job. `snapshot`: it was read from the table and says where the job stands."""

    event: str
    job_id: str = ""
    queue: str = ""
    job_type: str = ""
    was: str | None = msgspec.field(name="from", default=None)
    to: str = ""
    attempt: int = 0
    at: datetime = datetime.fromtimestamp(0, UTC)
    snapshot: bool = False

    @property
    def final(self) -> bool:
        """Whether the job has ended."""
        return self.to in FINAL_STATUSES


class Watch:
    """What one stream or request waits for. `lagging`: events were dropped, since it did not take them in time."""

    def __init__(
        self, room: int, job_id: str | None = None, queue: str | None = None, job_type: str | None = None
    ) -> None:
        """For one job, or for a queue, a type, all."""
        self.job_id, self.queue, self.job_type = job_id, queue, job_type
        self._events: deque[tuple[int, Event]] = deque()
        self._room = room
        self._bell = asyncio.Event()
        self.lagging = False
        self.closed = False
        #: The hash of the key by which it was opened, None without one; whether it ends with that.
        self.digest: bytes | None = None
        self.guarded = False
        self.looks = list(_YOUNG)
        self.begun = time.monotonic()

    def wants(self, event: Event) -> bool:
        """Say whether an event is for this one."""
        return (self.queue is None or event.queue == self.queue) and (
            self.job_type is None or event.job_type == self.job_type
        )

    def put(self, number: int, event: Event) -> None:
        """Keep an event until it is taken."""
        if len(self._events) >= self._room:
            self.lag()
        elif not self.lagging:
            self._events.append((number, event))
            self._bell.set()

    def lag(self) -> None:
        """Drop what waits: the client begins anew with the present state."""
        self._events.clear()
        self.lagging = True
        self._bell.set()

    def drop(self) -> None:
        """Drop what waits, as of no interest."""
        self._events.clear()
        self.lagging = False

    def close(self) -> None:
        """Tell whoever waits that there will be no more."""
        self.closed = True
        self._bell.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until something is there to be taken, at most so long; False if nothing is."""
        if not (self._events or self.lagging or self.closed):
            self._bell.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._bell.wait()
        return bool(self._events or self.lagging or self.closed)

    def take(self) -> Iterable[tuple[int, Event]]:
        """Give what waits, in order."""
        while self._events:
            yield self._events.popleft()


class Poller:
    """A worker that waits for jobs of some queues and types (None: any)."""

    def __init__(self, worker_id: UUID, queues: list[str] | None, job_types: list[str] | None) -> None:
        """Not rung yet."""
        self.worker_id = worker_id
        self._queues, self._job_types = queues, job_types
        self._unheeded: list[Bell] = []
        self.bell = asyncio.Event()

    def rang(self, bell: Bell | None) -> None:
        """End a wait, but not for a bell that tells of what is not taken. None: of what is not known."""
        if bell is not None:
            if self._queues is not None and bell.queue not in self._queues:
                return
            if self._job_types is not None and bell.job_type is not None and bell.job_type not in self._job_types:
                return
            self._unheeded.append(bell)
        self.bell.set()

    def heed(self) -> list[Bell]:
        """Return the bells since the last call: what they tell of is to be claimed now, or others told of it."""
        self.bell.clear()
        heard, self._unheeded = self._unheeded, []
        return heard


def snapshot(state: dict[str, Any]) -> Event:
    """Return where a job stands, as a row of calls_rest.JOB_STATES, as an event."""
    return Event(
        event=_EVENT_OF[state["status"]],
        job_id=state["job_id"],
        queue=state["queue"],
        job_type=state["job_type"],
        to=state["status"],
        attempt=state["attempts"],
        at=datetime.fromisoformat(state["updated_at"]).astimezone(UTC),
        snapshot=True,
    )


def due(group: set[Watch], now: float) -> bool:
    """Say whether the job of these watches is to be read again."""
    due = False
    for watch in group:
        if watch.looks and now - watch.begun >= watch.looks[0]:
            del watch.looks[0]
            due = True
    return due
