"""Connections of ours: how they are opened, shared, checked and given up."""

import asyncio
import os
import random
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Generic, TypeAlias, TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ConnStatus, TransactionStatus

from pgqueue import calling, calls, wire
from pgqueue.calling import Call
from pgqueue.errors import ConfigError, DatabaseConflict, DatabaseUnavailable, PgqueueError, from_db
from pgqueue.settings import Settings

T = TypeVar("T")
SyncConnection: TypeAlias = psycopg.Connection[Any]
AsyncConnection: TypeAlias = psycopg.AsyncConnection[Any]
Parts: TypeAlias = Callable[[], Iterable[Mapping[str, object]]]
C = TypeVar("C", SyncConnection, AsyncConnection)

# A node that is gone without a word is noticed by the kernel within about a minute.
_DEFAULTS: Final[Mapping[str, str]] = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "client_encoding": "utf8",
}

#: How often calls that block a thread are looked at, in seconds.
_LOOK_EVERY: Final = 0.2


def arguments(dsn: str, settings: Settings, name: str = "pgqueue") -> dict[str, Any]:
    """Return the keyword arguments of a psycopg connect; what the DSN itself says stays. Raises ConfigError."""
    try:
        given = conninfo_to_dict(dsn)
    except psycopg.ProgrammingError as exc:
        raise ConfigError(f"the DSN is not a libpq connection string: {str(exc).strip()}") from None
    defaults = {**_DEFAULTS, "connect_timeout": str(max(2, round(settings.connect_timeout)))}
    if "," in str(given.get("host", "")):
        defaults["target_session_attrs"] = "read-write"
    return {
        **given,
        **{key: value for key, value in defaults.items() if key not in given},
        "fallback_application_name": name,
        "autocommit": True,
        "prepare_threshold": 5 if settings.prepare else None,
    }


def connect(dsn: str, settings: Settings, name: str = "pgqueue") -> SyncConnection:
    """Open a sync connection in autocommit mode and READ COMMITTED; raises DatabaseUnavailable."""
    try:
        connection = psycopg.connect(**arguments(dsn, settings, name))
    except psycopg.Error as exc:
        raise from_db(exc) from exc
    try:
        with _deadlines.within(settings.statement_limit, connection, "connect"):
            connection.isolation_level = _asked_for(calling.run(connection, calls.ISOLATION))
    except BaseException:
        hang_up(connection)
        raise
    wire.send_arrays(connection.adapters)
    return connection


async def connect_async(dsn: str, settings: Settings, name: str = "pgqueue") -> AsyncConnection:
    """Open an async connection in autocommit mode and READ COMMITTED; raises DatabaseUnavailable."""
    try:
        connection = await psycopg.AsyncConnection.connect(**arguments(dsn, settings, name))
    except psycopg.Error as exc:
        raise from_db(exc) from exc
    try:
        with answered_within(settings.statement_limit, connection, "connect"):
            default = await calling.run_async(connection, calls.ISOLATION)
        await connection.set_isolation_level(_asked_for(default))
    except BaseException:
        hang_up(connection)
        raise
    wire.send_arrays(connection.adapters)
    return connection


def _asked_for(default: str) -> IsolationLevel | None:
    """Return the isolation level that each transaction must ask for, None where the session's default will do.

    Asked for with each transaction: a pooler takes no such setting at the start, and one that is made later stays with
    a session of the server that others use too.
    """
    return None if default in ("read committed", "read uncommitted") else IsolationLevel.READ_COMMITTED


def hang_up(connection: SyncConnection | AsyncConnection) -> None:
    """Close a connection at once, whatever it is doing."""
    with suppress(psycopg.Error):
        connection.pgconn.finish()


def cut_off(connection: SyncConnection | AsyncConnection) -> None:
    """End the talk on a connection at once: whoever waits on it finds it broken, and closes it."""
    with suppress(OSError, psycopg.Error), socket.socket(fileno=os.dup(connection.pgconn.socket)) as end:
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def reading(connection: AsyncConnection, ready: Callable[[], object]) -> Iterator[None]:
    """Have the running event loop call `ready` whenever there is something to read.

    The loop watches a descriptor of our own: libpq closes its own when it finds the connection broken, and a loop may
    abort when a descriptor that it watches is gone, or has become that of another socket.
    """
    loop = asyncio.get_running_loop()
    watched = os.dup(connection.pgconn.socket)
    loop.add_reader(watched, ready)
    try:
        yield
    finally:
        loop.remove_reader(watched)
        os.close(watched)


def _usable(connection: SyncConnection | AsyncConnection) -> bool:
    """Say whether a connection that was left alone is idle and not closed by the other side, without a round trip."""
    pgconn = connection.pgconn
    if pgconn.status != ConnStatus.OK or pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    # What a server says unasked on such a connection is that it ends.
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN | select.POLLHUP | select.POLLERR)
    return not poll.poll(0)


class _Shelf(Generic[C]):
    """Connections between two uses, the last used on top."""

    def __init__(self) -> None:
        self._idle: list[C] = []
        self.closed = False

    def take(self) -> C | None:
        while self._idle:
            connection = self._idle.pop()
            if _usable(connection):
                return connection
            hang_up(connection)
        return None

    def put(self, connection: C, fault: BaseException | None) -> None:
        """Keep a connection for the next use, unless it or its server is no longer fit for work."""
        if self.closed or isinstance(fault, DatabaseUnavailable) or not _usable(connection):
            hang_up(connection)
        else:
            self._idle.append(connection)

    def close(self) -> None:
        self.closed = True
        while self._idle:
            hang_up(self._idle.pop())


class SyncPool:
    """At most `settings.pool_size` sync connections, opened when needed, for any number of threads."""

    def __init__(self, dsn: str, settings: Settings, name: str = "pgqueue", reset: str | None = None) -> None:
        """Open nothing yet. `reset` is run on each connection that comes back, before anybody else has it."""
        self._open = (dsn, settings, name)
        self._settings = settings
        self._reset = reset
        self._seats = threading.BoundedSemaphore(settings.pool_size)
        self._shelf: _Shelf[SyncConnection] = _Shelf()

    @contextmanager
    def connection(self) -> Iterator[SyncConnection]:
        """Lend a connection; raises DatabaseUnavailable when none comes free in time or can be opened."""
        if not self._seats.acquire(timeout=self._settings.statement_limit):
            raise _none_free(self._settings)
        try:
            connection = self._shelf.take() or connect(*self._open)
            try:
                yield connection
            except BaseException as exc:
                self._put(connection, exc)
                raise
            self._put(connection, None)
        finally:
            self._seats.release()

    def _put(self, connection: SyncConnection, fault: BaseException | None) -> None:
        try:
            if self._reset is not None and _usable(connection):
                with _deadlines.within(self._settings.statement_limit, connection, "reset"):
                    connection.execute(self._reset.encode(), prepare=False)
        except BaseException:
            # What was done with it is done, also where whoever waits for this is told to stop.
            hang_up(connection)
            return
        self._shelf.put(connection, fault)

    def run(self, call: Call[T], **parameters: object) -> T:
        """Run a call in a transaction of its own, again if it met a deadlock."""
        return self._run(call, parameters, lambda connection: calling.run(connection, call, **parameters))

    def run_parts(self, call: Call[list[T]], parts: Parts, **parameters: object) -> list[T]:
        """Run a call with each of the parts in one transaction, as `run` does; `parameters` are those of the whole."""
        return self._run(call, parameters, lambda connection: calling.run_parts(connection, call, parts()))

    def _run(self, call: Call[T], parameters: Mapping[str, object], work: Callable[[SyncConnection], T]) -> T:
        limit = call.limit(self._settings.statement_limit, parameters)
        for pause in _pauses():
            try:
                with self.connection() as connection, _deadlines.within(limit, connection, call.name):
                    return work(connection)
            except DatabaseConflict:
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError

    def close(self) -> None:
        """Close what is idle now and what is lent when it comes back."""
        self._shelf.close()


class AsyncPool:
    """At most `settings.pool_size` async connections, opened when needed, for one event loop."""

    def __init__(self, dsn: str, settings: Settings, name: str = "pgqueue", reset: str | None = None) -> None:
        """Open nothing yet. `reset` is run on each connection that comes back, before anybody else has it."""
        self._open = (dsn, settings, name)
        self._settings = settings
        self._reset = reset
        self._seats = asyncio.BoundedSemaphore(settings.pool_size)
        self._shelf: _Shelf[AsyncConnection] = _Shelf()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[AsyncConnection]:
        """Lend a connection; raises DatabaseUnavailable when none comes free in time or can be opened."""
        try:
            async with asyncio.timeout(self._settings.statement_limit):
                await self._seats.acquire()
        except TimeoutError:
            raise _none_free(self._settings) from None
        try:
            connection = self._shelf.take() or await connect_async(*self._open)
            try:
                yield connection
            except BaseException as exc:
                await self._put(connection, exc)
                raise
            await self._put(connection, None)
        finally:
            self._seats.release()

    async def _put(self, connection: AsyncConnection, fault: BaseException | None) -> None:
        try:
            if self._reset is not None and _usable(connection):
                with answered_within(self._settings.statement_limit, connection, "reset"):
                    await connection.execute(self._reset.encode(), prepare=False)
        except BaseException:
            # What was done with it is done, also where whoever waits for this is told to stop.
            hang_up(connection)
            return
        self._shelf.put(connection, fault)

    async def run(self, call: Call[T], **parameters: object) -> T:
        """Run a call in a transaction of its own, again if it met a deadlock."""
        limit = call.limit(self._settings.statement_limit, parameters)
        return await self._run(lambda connection: _within(limit, connection, call, parameters))

    async def run_parts(self, call: Call[list[T]], parts: Parts, **parameters: object) -> list[T]:
        """Run a call with each of the parts in one transaction, as `run` does; `parameters` are those of the whole."""
        limit = call.limit(self._settings.statement_limit, parameters)

        async def work(connection: AsyncConnection) -> list[T]:
            with answered_within(limit, connection, call.name):
                return await calling.run_parts_async(connection, call, parts())

        return await self._run(work)

    async def _run(self, work: Callable[[AsyncConnection], Awaitable[T]]) -> T:
        for pause in _pauses():
            try:
                async with self.connection() as connection:
                    return await work(connection)
            except DatabaseConflict:
                if pause is None:
                    raise
                await asyncio.sleep(pause)
        raise AssertionError

    def close(self) -> None:
        """Close what is idle now and what is lent when it comes back."""
        self._shelf.close()


class Link:
    """One async connection that is opened when needed and again after it broke. For one user at a time."""

    def __init__(self, dsn: str, settings: Settings, name: str) -> None:
        """Open nothing yet; `name` is its application_name."""
        self._open = (dsn, settings, name)
        self.limit = settings.statement_limit
        self._connection: AsyncConnection | None = None
        self._calling = False

    @property
    def connection(self) -> AsyncConnection | None:
        """The open connection, None between two of them."""
        return self._connection

    async def call(self, call: Call[T], **parameters: object) -> T:
        """Run a call; raises a PgqueueError, DatabaseUnavailable where trying again later helps."""
        connection = self._connection
        if connection is None:
            connection = self._connection = await connect_async(*self._open)
            wire.read_raw(connection.adapters)
        self._calling = True
        try:
            answer = await _within(self.limit, connection, call, parameters)
        except BaseException as exc:
            self._calling = False
            if (isinstance(exc, DatabaseUnavailable) and not isinstance(exc, DatabaseConflict)) or not _usable(
                connection
            ):
                self.close()
            raise
        self._calling = False
        return answer

    def close(self) -> None:
        """Hang up; a later call opens a new connection. A call that is under way finds its connection broken."""
        connection = self._connection
        if connection is None:
            return
        if self._calling:
            # The event loop watches its descriptor: whoever calls closes it.
            cut_off(connection)
        else:
            self._connection = None
            hang_up(connection)


async def _within(limit: float, connection: AsyncConnection, call: Call[T], parameters: Mapping[str, object]) -> T:
    with answered_within(limit, connection, call.name):
        return await calling.run_async(connection, call, **parameters)


@contextmanager
def answered_within(limit: float, connection: AsyncConnection, what: str) -> Iterator[None]:
    """Cut a connection off once `limit` seconds are over; raises DatabaseUnavailable then.

    Cancelling instead would have the driver ask the server to cancel, and wait for that, over the same silent network.
    """
    overdue = False

    def give_up() -> None:
        nonlocal overdue
        overdue = True
        cut_off(connection)

    timer = asyncio.get_running_loop().call_later(limit, give_up)
    try:
        yield
    except (PgqueueError, psycopg.Error):
        if overdue:
            raise _silent(limit, what) from None
        raise
    finally:
        timer.cancel()


class _Deadlines:
    """Cuts off the sync connections whose call took too long, from one thread of the process for all of them."""

    def __init__(self) -> None:
        self._due: dict[int, tuple[float, SyncConnection]] = {}
        self._some = threading.Event()
        self._guard = threading.Lock()
        self._pid = 0

    @contextmanager
    def within(self, limit: float, connection: SyncConnection, what: str) -> Iterator[None]:
        """Cut a connection off once `limit` seconds are over; raises DatabaseUnavailable then."""
        # A forked child has none of its parent's threads.
        if self._pid != os.getpid():
            self._begin()
        key = id(connection)
        self._due[key] = (time.monotonic() + limit, connection)
        if not self._some.is_set():
            self._some.set()
        try:
            yield
        except (PgqueueError, psycopg.Error):
            if self._due.pop(key, None) is None:
                raise _silent(limit, what) from None
            raise
        finally:
            self._due.pop(key, None)

    def _begin(self) -> None:
        with self._guard:
            if self._pid != os.getpid():
                self._due, self._some = {}, threading.Event()
                threading.Thread(target=self._watch, args=[self._some], name="pgqueue-deadlines", daemon=True).start()
                self._pid = os.getpid()

    def _watch(self, some: threading.Event) -> None:
        while True:
            some.wait()
            some.clear()
            while due := self._due.copy():
                now = time.monotonic()
                for key, entry in due.items():
                    # Whoever takes the entry out decides what became of the call.
                    if entry[0] <= now and self._due.get(key) is entry and self._due.pop(key, None) is entry:
                        cut_off(entry[1])
                time.sleep(_LOOK_EVERY)


_deadlines: Final = _Deadlines()


def _silent(limit: float, what: str) -> PgqueueError:
    return DatabaseUnavailable(f"the database did not answer {what} within {limit:g} s")


def _none_free(settings: Settings) -> PgqueueError:
    return DatabaseUnavailable(
        f"all {settings.pool_size} connections were busy for {settings.statement_limit:g} s; "
        "PGQUEUE_POOL_SIZE sets how many there are"
    )


def _pauses() -> Iterator[float | None]:
    """Give the pauses between tries of a call that met a deadlock, None after the last one."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2):
        yield step * random.uniform(0.5, 1.5)
    yield None
