"""The hub: one LISTEN connection of the process, from which any number of streams and waiting requests hear.

A bell says when to look, the table is the truth. What a notice may miss (it is sent only while somebody watches, and
a connection may break without a word) is read again: shortly after a stream began, every few seconds, and whenever
the listener comes back. A bell of our own, which is heard after all that were rung before it, keeps what was read in
order with what was heard, and shows that the listener hears.
"""

import asyncio
import time
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar
from uuid import UUID, uuid4

import msgspec

from pgqueue import calls, calls_rest
from pgqueue.api.access import Identity
from pgqueue.api.config import ApiConfig
from pgqueue.api.watches import Event, Poller, Watch, due, snapshot
from pgqueue.calling import Call
from pgqueue.connections import Link
from pgqueue.errors import ConfigError, PgqueueError
from pgqueue.listener import Listener, bell
from pgqueue.log import logger
from pgqueue.settings import Settings

T = TypeVar("T")
_log: Final = logger("pgqueue.api.hub")
STATUS_CHANNEL: Final = "pgqueue_status"
#: All in seconds.
_TICK: Final = 0.25
LOOK_EVERY: Final = 4.0
_ARRIVALS_EVERY: Final = 1.0
_ARRIVALS_BACK: Final = 10.0
_TEST_EVERY: Final = 2.0
#: A test that fails holds up whoever polls meanwhile.
_TEST_DEAF_EVERY: Final = 60.0
_WATCH_FOR: Final = 30.0
_WATCH_AGAIN: Final = 10.0
_UNWATCH_AFTER: Final = 5.0
_PATIENCE: Final = 2.0
#: How many events a client that comes back may have missed without beginning anew.
_REMEMBERED: Final = 2048
_ARRIVALS_AT_MOST: Final = 500
#: Few enough that the events of others are not held up by reading these.
_STATES_AT_ONCE: Final = 100


_decode: Final = msgspec.json.Decoder(list[Event]).decode


class Hub:
    """Listens, reads what may have been missed, and tells streams and waiting requests."""

    def __init__(self, dsn: str, settings: Settings, config: ApiConfig) -> None:
        """Open nothing yet."""
        self._dsn, self._settings, self._config = dsn, settings, config
        self._watcher_id = uuid4()
        self.name = self._watcher_id.hex[:12]
        self.wake_channel = calls.wake_channel(self._watcher_id)
        self._link = Link(dsn, settings, "pgqueue api hub")
        self._turn = asyncio.Lock()
        self._listening = settings.wake == "notify"
        self._listener: Listener | None = None
        self._listener_task: asyncio.Task[None] | None = None
        self._by_job: dict[str, set[Watch]] = {}
        self._wide: set[Watch] = set()
        self._pollers: set[Poller] = set()
        self._remembered: deque[tuple[int, Event]] = deque(maxlen=_REMEMBERED)
        self._announced: dict[str, None] = {}
        self._count = 0
        self._wanted = asyncio.Event()
        self._watched_at = self._looked_at = self._arrivals_at = self._tested_at = float("-inf")
        self._left_at = 0.0
        self._look_now = False
        self._tested = False
        self._test_after = _TEST_EVERY
        self._clock_ahead = timedelta(0)
        self._primed = False
        self._closed = False
        self.fault: str | None = None
        #: What to do about a listener that is connected and hears nothing, None unless there is one.
        self.deaf: str | None = None

    # For streams and requests ----------------------------------------------------------------------------------------

    @contextmanager
    def follow(
        self,
        *,
        job_id: UUID | None = None,
        queue: str | None = None,
        job_type: str | None = None,
        identity: Identity | None = None,
    ) -> Iterator[Watch]:
        """Give a watch of a job, or of a queue, a type or everything; it ends with the key of `identity`."""
        watch = Watch(self._config.backlog, None if job_id is None else str(job_id), queue, job_type)
        if identity is not None:
            watch.guarded, watch.digest = True, identity.digest
        group = self._wide if watch.job_id is None else self._by_job.setdefault(watch.job_id, set())
        group.add(watch)
        if self._closed:
            watch.close()
        self._wanted.set()
        try:
            yield watch
        finally:
            group.discard(watch)
            if watch.job_id is not None and not group and self._by_job.get(watch.job_id) is group:
                del self._by_job[watch.job_id]
            self._left_at = time.monotonic()

    @contextmanager
    def poll(self, poller: Poller) -> Iterator[None]:
        """Ring it when jobs may have come for it."""
        self._pollers.add(poller)
        try:
            yield
        finally:
            self._pollers.discard(poller)

    def polls(self, worker_id: UUID) -> int:
        """Return how many requests of a worker wait here."""
        return sum(poller.worker_id == worker_id for poller in self._pollers)

    def digests(self) -> set[bytes | None]:
        """Return the hashes of the keys by which streams are open, None for no key."""
        return {watch.digest for watch in self._watches() if watch.guarded}

    def end(self, digests: Collection[bytes | None]) -> None:
        """End the streams that were opened by these keys."""
        for watch in self._watches():
            if watch.guarded and watch.digest in digests:
                watch.close()

    def _watches(self) -> list[Watch]:
        return [*self._wide, *(one for group in self._by_job.values() for one in group)]

    async def watching(self, *, wide: bool = False) -> None:
        """Return once the database knows that somebody watches; raises DatabaseUnavailable.

        `wide`: for a stream of more than a job, which now reads where things stand.
        """
        if self._listener is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._listener.ready.wait()
        if not self._polling and time.monotonic() - self._watched_at > _WATCH_AGAIN:
            await self._watch()
        if wide and not self._primed:
            # What is there already is no news to the first of them.
            for row in await self._arrivals():
                self._announced[row["job_id"]] = None
            self._primed = True
            self._forget()

    def since(self, event_id: str) -> list[tuple[int, Event]] | None:
        """Return the events after one, None when they are no longer known."""
        name, _, number = event_id.rpartition("-")
        if self._polling or name != self.name or not number.isdecimal():
            return None
        last = int(number)
        oldest = self._remembered[0][0] if self._remembered else self._count + 1
        if not oldest - 1 <= last <= self._count:
            return None
        return [(n, event) for n, event in self._remembered if n > last]

    @property
    def position(self) -> str:
        """The id of the newest event."""
        return f"{self.name}-{self._count}"

    @property
    def followers(self) -> int:
        """How many streams and requests there are."""
        return len(self._wide) + len(self._pollers) + sum(map(len, self._by_job.values()))

    @property
    def hears(self) -> bool:
        """Whether the listener is connected and not known to be deaf, or none is wanted."""
        return not self._listening or (self._connected and self.deaf is None)

    @property
    def _connected(self) -> bool:
        return self._listener is not None and self._listener.ready.is_set()

    @property
    def _polling(self) -> bool:
        """Whether notices are of no use."""
        return not self._listening or self.deaf is not None

    # The work ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Listen and look until cancelled."""
        try:
            if self._listening:
                self._listen()
            while not self._closed:
                try:
                    await self._step()
                    if self.fault is not None:
                        self.fault, self._look_now = None, True
                        _log.info("hub recovered")
                except Exception as exc:
                    if self.fault is None:
                        _log.warning("hub cannot read", error=str(exc), exc_info=not isinstance(exc, PgqueueError))
                    self.fault = f"{type(exc).__name__}: {exc}"
                await self._rest()
        finally:
            self._link.close()
            await self._stop_listening()

    async def close(self) -> None:
        """End all streams and tell the database that nobody watches."""
        if self._closed:
            return
        self._closed = True
        for watch in self._watches():
            watch.close()
        for poller in self._pollers:
            poller.bell.set()
        if self._watched_at > 0:
            with suppress(PgqueueError, TimeoutError):
                async with asyncio.timeout(1):
                    await self._call(calls_rest.UNWATCH, watcher_id=self._watcher_id)
        self._link.close()

    async def _rest(self) -> None:
        if self.followers:
            await asyncio.sleep(_TICK)
            return
        self._wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNWATCH_AFTER / 2):
                await self._wanted.wait()

    async def _step(self) -> None:
        now = time.monotonic()
        # Once without any follower too, so that a deaf one is known before somebody relies on it.
        if (self.followers or not self._tested) and self._connected and now - self._tested_at > self._test_after:
            await self._test()
        if not self._wide:
            self._primed = False
        if not (self._by_job or self._wide):
            if self._watched_at > 0 and now - self._left_at > _UNWATCH_AFTER:
                self._watched_at = float("-inf")
                self._forget()
                await self._call(calls_rest.UNWATCH, watcher_id=self._watcher_id)
            return
        if not self._polling and now - self._watched_at > _WATCH_AGAIN:
            await self._watch()
        everything = self._look_now or now - self._looked_at >= (
            self._settings.poll_interval if self._polling else LOOK_EVERY
        )
        if everything:
            self._looked_at, missed, self._look_now = now, self._look_now, False
            if missed or self._polling:
                for watch in self._wide:
                    watch.lag()
        await self._look([job_id for job_id, group in self._by_job.items() if everything or due(group, now)])
        if self._wide and now - self._arrivals_at >= _ARRIVALS_EVERY:
            self._arrivals_at = now
            await self._read_arrivals()

    async def _look(self, job_ids: list[str]) -> None:
        """Read where jobs stand and tell who follows them."""
        for start in range(0, len(job_ids), _STATES_AT_ONCE):
            asked = job_ids[start : start + _STATES_AT_ONCE]
            found = {row["job_id"]: row for row in await self._call(calls_rest.JOB_STATES, job_ids=asked)}
            # So that what is read comes after the notices of what led there.
            await self._hear_all()
            for job_id in asked:
                state = found.get(job_id)
                event = Event("job.gone", job_id) if state is None else snapshot(state)
                for watch in self._by_job.get(job_id, ()):
                    watch.put(self._count, event)

    async def _arrivals(self) -> list[dict[str, Any]]:
        begin = datetime.now(UTC) + self._clock_ahead - timedelta(seconds=_ARRIVALS_BACK)
        lowest = UUID(int=int(begin.timestamp() * 1000) << 80)
        return await self._call(calls_rest.ARRIVALS, since=lowest, limit=_ARRIVALS_AT_MOST * 4)

    async def _read_arrivals(self) -> None:
        """Tell of jobs whose notice was left out, since producers share few of them."""
        if not self._primed:
            return
        rows = await self._arrivals()
        fresh = [row for row in rows if row["job_id"] not in self._announced]
        if len(fresh) > _ARRIVALS_AT_MOST:
            for row in fresh:
                self._announced[row["job_id"]] = None
            for watch in self._wide:
                watch.lag()
            return
        for row in fresh:
            self._tell(snapshot(row))

    # Notices ----------------------------------------------------------------------------------------------------------

    def _heard(self, channel: str, payload: str) -> None:
        if channel == STATUS_CHANNEL:
            try:
                events = _decode(payload)
            except msgspec.MsgspecError as exc:
                _log.warning("a notice cannot be read", error=str(exc))
                return
            for event in events:
                if event.event == "resync":
                    self._look_now = True
                    self._forget()
                else:
                    event.at = event.at.astimezone(UTC)
                    self._tell(event)
            return
        if not channel:
            # Connected, perhaps again: what came meanwhile was not heard.
            self._tested = False
            self._looked_at = float("-inf")
            self._forget()
            self._wanted.set()
            for watch in self._wide:
                watch.lag()
        rung = bell(payload)
        for poller in self._pollers:
            if rung is not None or not channel:
                poller.rang(rung)

    def _forget(self) -> None:
        """Have all who come back begin anew, since something may have happened that was not heard."""
        self._remembered.clear()
        # Whoever has the number of the newest event did not hear all that came after it either.
        self._count += 1

    def _tell(self, event: Event) -> None:
        self._count += 1
        self._remembered.append((self._count, event))
        self._announced[event.job_id] = None
        while len(self._announced) > 4 * _REMEMBERED + 4 * _ARRIVALS_AT_MOST:
            del self._announced[next(iter(self._announced))]
        for watch in self._by_job.get(event.job_id, ()):
            watch.put(self._count, event)
        for watch in self._wide:
            if watch.wants(event):
                watch.put(self._count, event)

    @property
    def listener(self) -> int | None:
        """The server process that hears what the hub hears, None while nothing is heard."""
        return None if self._listener is None or self.deaf is not None else self._listener.process

    def _listen(self) -> None:
        self._listener = Listener(self._dsn, self._settings, (self.wake_channel, STATUS_CHANNEL), self._heard)
        self._listener_task = asyncio.get_running_loop().create_task(self._listener.run())

    async def _stop_listening(self) -> None:
        listener, task = self._listener, self._listener_task
        self._listener = self._listener_task = None
        if listener is not None and task is not None:
            task.cancel()
            listener.cut_off()
            await asyncio.wait([task], timeout=0.5)

    async def _hear_all(self) -> None:
        """Return once all notices of what is committed by now were heard, where notices are heard at all."""
        if self._listening and self.hears:
            await self._test()

    async def _test(self) -> None:
        """Ring our own bell, which is heard after all that were rung before it.

        A listener that is connected but does not hear it is deaf: for good behind a pooler, else because the other side
        is gone without a word.
        """
        listener = self._listener
        if listener is None:
            return
        self._tested_at = time.monotonic()
        try:
            self._tested = await listener.test(self._call, _PATIENCE)
        except ConfigError as exc:
            if self.deaf is None:
                self.deaf = str(exc)
                _log.warning("the listener is deaf; connecting anew, and polling meanwhile", error=self.deaf)
            else:
                self._test_after = min(self._test_after * 2, _TEST_DEAF_EVERY)
            await self._stop_listening()
            self._listen()
            return
        if self._tested and self.deaf is not None:
            _log.info("the listener hears again")
            self.deaf, self._test_after = None, _TEST_EVERY

    async def _watch(self) -> None:
        now = time.monotonic()
        clock = await self._call(calls_rest.WATCH, watcher_id=self._watcher_id, seconds=_WATCH_FOR)
        self._watched_at = now
        self._clock_ahead = datetime.fromtimestamp(clock, UTC) - datetime.now(UTC)

    async def _call(self, call: Call[T], **parameters: object) -> T:
        async with self._turn:
            return await self._link.call(call, **parameters)
