"""The listener: one connection that LISTENs, comes back after every failure, and says when bells may be missed.

What rings on a worker's channel is a bell (the JSON array of a queue and a job type), or a word of ours with a space.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import psycopg
from psycopg.pq import ConnStatus

from pgqueue import calls
from pgqueue.connections import AsyncConnection, connect_async, cut_off, hang_up, reading
from pgqueue.errors import ConfigError, DatabaseUnavailable, PgqueueError, from_db
from pgqueue.log import logger
from pgqueue.settings import Settings

_log: Final = logger("pgqueue.listener")
_TEST_PATIENCE: Final = 3.0
#: A connection that is quiet for so long is asked whether it still lives.
_PROBE_EVERY: Final = 30.0


class Bell(NamedTuple):
    """Where jobs came, or of which type; None: of any."""

    queue: str
    job_type: str | None


_bell: Final = msgspec.json.Decoder(Bell).decode


def bell(payload: str) -> Bell | None:
    """Return the bell that a payload is, None for anything else."""
    try:
        return _bell(payload)
    except msgspec.MsgspecError:
        return None


def columns(bells: Sequence[Bell]) -> dict[str, Sequence[str | None]]:
    """Return bells as the parameters of calls.STOP_WAITING."""
    return {"queues": [bell.queue for bell in bells], "job_types": [bell.job_type for bell in bells]}


def unmet(heard: Sequence[Bell], jobs: Iterable[tuple[str, str]]) -> list[Bell]:
    """Return the bells that tell of none of the jobs, given by queue and type, each of which answers one bell."""
    came = Counter(jobs)

    def is_met(bell: Bell) -> bool:
        for of in came:
            if came[of] > 0 and of[0] == bell.queue and bell.job_type in (of[1], None):
                came[of] -= 1
                return True
        return False

    # Those that any job answers come last.
    return [bell for bell in sorted(heard, key=lambda bell: bell.job_type is None) if not is_met(bell)]


class Listener:
    """Listens on channels and tells `heard(channel, payload)`; after each connect `heard("", "")`."""

    def __init__(
        self, dsn: str, settings: Settings, channels: Iterable[str], heard: Callable[[str, str], None]
    ) -> None:
        """Open nothing yet. Raises ConfigError for an impossible channel."""
        self._dsn = settings.listen_dsn or dsn
        self._settings = settings
        self._channels = list(channels)
        self._statements = [calls.listen(channel) for channel in self._channels]
        self._heard = heard
        self._tests: dict[str, asyncio.Event] = {}
        self.ready = asyncio.Event()
        #: The server process that listens, None while there is none.
        self.process: int | None = None
        self._connection: AsyncConnection | None = None

    async def run(self) -> None:
        """Listen until cancelled, however often the connection breaks."""
        pause = 0.1
        while True:
            try:
                await self._listen()
            except Exception as exc:
                if self.ready.is_set():
                    pause = 0.1
                self.ready.clear()
                known = isinstance(exc, PgqueueError)
                _log.warning("listener lost its connection", error=f"{exc}", exc_info=not known)
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._settings.poll_interval)

    def cut_off(self) -> None:
        """Break the connection, so that a cancelled `run` ends at once whatever it waits for."""
        if self._connection is not None:
            cut_off(self._connection)

    async def test(self, call: Callable[..., Awaitable[object]], patience: float = _TEST_PATIENCE) -> bool:
        """Ring our own bell by `call`, once connected, and say whether it was heard, and so all rung before it.

        False means that the connection broke meanwhile. Raises ConfigError where it stands and hears nothing.
        """
        await self.ready.wait()
        token = f"test {secrets.token_hex(8)}"
        self._tests[token] = heard = asyncio.Event()
        try:
            await call(calls.RING, channel=self._channels[0], payload=token)
            async with asyncio.timeout(patience):
                await heard.wait()
        except TimeoutError:
            # A connection that broke meanwhile proves nothing.
            if self.ready.is_set():
                raise ConfigError(
                    "LISTEN hears nothing on this connection, as behind a pooler in transaction mode; "
                    "set PGQUEUE_LISTEN_DSN to a direct connection, or PGQUEUE_WAKE=poll"
                ) from None
            return False
        finally:
            del self._tests[token]
        return True

    async def _listen(self) -> None:
        connection = self._connection = await connect_async(self._dsn, self._settings, "pgqueue listener")
        try:
            connection.add_notify_handler(lambda notice: self._tell(notice.channel, notice.payload))
            await self._execute(connection, calls.STAY, *self._statements)
            self.process = await self._execute(connection, calls.PROCESS)
            self.ready.set()
            self._heard("", "")
            broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            while True:
                with reading(connection, lambda: self._read(connection, broken)):
                    await asyncio.wait([broken], timeout=_PROBE_EVERY)
                if broken.done():
                    raise DatabaseUnavailable("the connection was closed") from broken.exception()
                await self._execute(connection, calls.PROBE)
        finally:
            self._connection = self.process = None
            hang_up(connection)

    async def _execute(self, connection: AsyncConnection, *statements: str) -> Any:
        """Return the one value of the last statement, None for one without rows."""
        try:
            async with asyncio.timeout(self._settings.statement_limit):
                for statement in statements:
                    cursor = await connection.execute(statement.encode())
                row = await cursor.fetchone() if cursor.description else None
        except psycopg.Error as exc:
            raise from_db(exc) from exc
        except TimeoutError:
            raise DatabaseUnavailable("the connection does not answer") from None
        return row and row[0]

    def _read(self, connection: AsyncConnection, broken: asyncio.Future[None]) -> None:
        pgconn = connection.pgconn
        try:
            pgconn.consume_input()
            while notice := pgconn.notifies():
                self._tell(notice.relname.decode(), notice.extra.decode())
        except psycopg.Error as exc:
            if not broken.done():
                broken.set_exception(exc)
            return
        if pgconn.status != ConnStatus.OK and not broken.done():
            broken.set_result(None)

    def _tell(self, channel: str, payload: str) -> None:
        test = self._tests.get(payload)
        if test is not None:
            test.set()
        else:
            self._heard(channel, payload)
