"""The API of a process: its connections, its listener, its limits, and what starts and ends with it."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg

from pgqueue import calling, calls_rest
from pgqueue.api.access import Access, Identity
from pgqueue.api.config import ApiConfig
from pgqueue.api.hub import Hub
from pgqueue.api.problems import TooManyStreams
from pgqueue.api.rounds import Rounds
from pgqueue.api.submits import Submits
from pgqueue.calling import Call
from pgqueue.client import Client
from pgqueue.connections import AsyncPool, answered_within
from pgqueue.errors import DatabaseConflict, DatabaseUnavailable, PgqueueError, from_db
from pgqueue.maintenance import maintenance
from pgqueue.services import Service
from pgqueue.settings import Settings

T = TypeVar("T")
_TRIES: Final = 5
#: Seconds between looks whether the keys of open streams are still in force.
_KEYS_EVERY: Final = 2.0


class Api:
    """What the handlers of one process share."""

    def __init__(self, client: Client, config: ApiConfig) -> None:
        """Open nothing yet. `client` says which database it is."""
        self.client = client
        self.config = config
        limit = config.answer_limit
        given = client.settings
        self.settings: Final[Settings] = dataclasses.replace(
            given,
            connect_timeout=min(given.connect_timeout, limit / 2),
            statement_limit=min(given.statement_limit, limit),
        )
        self._pool: AsyncPool | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._streams = 0
        self.hub: Hub
        self.services: list[Service] = []
        self.http_workers: dict[UUID, float] = {}
        self.access = Access(self.call, config.hosts)
        self.submits = Submits(self.call)
        self._depths: Rounds[None, list[dict[str, Any]]] = Rounds(self._read_depths)

    @property
    def pool(self) -> AsyncPool:
        """The connections of all requests."""
        if self._pool is None:
            raise DatabaseUnavailable("the API has not begun, or has ended")
        return self._pool

    async def start(self) -> None:
        """Open what lasts as long as the process. A database that is away is no reason not to start."""
        dsn = await asyncio.to_thread(lambda: self.client.dsn)
        self._pool = AsyncPool(dsn, self.settings, "pgqueue api")
        self.hub = Hub(dsn, self.settings, self.config)
        self._begin(self.hub.run())
        if not self.config.trusted:
            self._begin(self._end_streams_of_ended_keys())
        if self.config.maintenance:
            self.services = maintenance(dsn, self.settings)
            for service in self.services:
                self._begin(service.run())

    async def stop(self) -> None:
        """Close everything; open streams end."""
        if self._pool is None:
            return
        await self.hub.close()
        for service in self.services:
            # What waits for a database that is silent ends at once when its connection is gone.
            await service.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        self._tasks.clear()
        pool, self._pool = self._pool, None
        pool.close()

    async def _end_streams_of_ended_keys(self) -> None:
        while True:
            await asyncio.sleep(_KEYS_EVERY)
            if digests := self.hub.digests():
                with suppress(PgqueueError):
                    self.hub.end(await self.access.ended(digests))

    @contextmanager
    def stream_seat(self) -> Iterator[None]:
        """Hold one of the seats for streams and waiting requests; raises TooManyStreams when all are taken."""
        if self._streams >= self.config.max_streams:
            raise TooManyStreams(f"this process has {self.config.max_streams} streams open, which is its most")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    async def call(self, call: Call[T], **parameters: object) -> T:
        """Run a call in a transaction of its own."""
        return await self.pool.run(call, **parameters)

    async def depths(self) -> list[dict[str, Any]]:
        """Read the depths of all queues, once for all who ask at about the same time."""
        return await self._depths.find(None)

    async def _read_depths(self, _: set[None]) -> Callable[[None], list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = await self.call(calls_rest.QUEUE_COUNTS)
        return lambda _: rows

    async def act(self, identity: Identity, call: Call[T], **parameters: object) -> T:
        """Run a call of an operator, for whom the audit names the key."""
        for left in reversed(range(_TRIES)):
            try:
                return await self._act_once(identity.actor, call, parameters)
            except DatabaseConflict:
                if not left:
                    raise
                await asyncio.sleep(0.02)
        raise AssertionError

    async def _act_once(self, actor: str, call: Call[T], parameters: dict[str, object]) -> T:
        limit = self.settings.statement_limit
        async with self.pool.connection() as connection:
            try:
                with answered_within(limit, connection, call.name):
                    async with connection.transaction():
                        await calling.run_async(connection, calls_rest.ACT_AS, actor=actor)
                        return await calling.run_async(connection, call, **parameters)
            except psycopg.Error as exc:
                raise from_db(exc) from exc

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))
