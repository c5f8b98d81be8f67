"""What a SQL call is, how its rows become a value, and what runs one: `run` and, awaited, `run_async`.

A call runs on a connection of ours or on the caller's own, within the caller's transaction: psycopg, SQLAlchemy (sync
or async, over any driver) or asyncpg. Hot calls are prepared, unless the connection was opened without prepared
statements.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar, cast

import msgspec
import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from pgqueue.errors import ConfigError, PgqueueError, from_db

T = TypeVar("T")
Rows: TypeAlias = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One SQL call: its text with %(name)s parameters, and how its rows become a value.

    `hot`: prepared at once. `planned`: never prepared, since its plan depends on what it is asked. `times`: how many
    times as long as other calls it may take, by its parameters.
    """

    name: str
    sql: str
    read: Callable[[Rows], T]
    hot: bool = False
    planned: bool = False
    times: Callable[[Mapping[str, Any]], float] | None = None

    def limit(self, seconds: float, parameters: Mapping[str, Any]) -> float:
        """Return the seconds that it may take with these parameters where other calls may take `seconds`."""
        return seconds if self.times is None else seconds * self.times(parameters)


# How rows are read ----------------------------------------------------------------------------------------------------


def nothing(rows: Rows) -> None:
    """Read no answer."""


def scalar(rows: Rows) -> Any:
    """Read the one value of the one row."""
    return rows[0][0]


def column(rows: Rows) -> list[Any]:
    """Read the first value of each row."""
    return [row[0] for row in rows]


def tuples(rows: Rows) -> list[tuple[Any, ...]]:
    """Read each row as it is."""
    return [tuple(row) for row in rows]


def document(rows: Rows) -> Any:
    """Read the one row's JSON."""
    return msgspec.json.decode(rows[0][0])


def records(rows: Rows) -> list[dict[str, Any]]:
    """Read each row's JSON object."""
    return [msgspec.json.decode(row[0]) for row in rows]


# Running --------------------------------------------------------------------------------------------------------------

_AS_IT_IS: Final = nullcontext()
_parameter: Final = re.compile(r"%\((\w+)\)s")


@functools.lru_cache
def _numbered(sql: str) -> tuple[str, tuple[str, ...]]:
    """Return the text with $1, $2, … and the names of the parameters in that order."""
    names = tuple(dict.fromkeys(_parameter.findall(sql)))
    return _parameter.sub(lambda found: f"${names.index(found[1]) + 1}", sql), names


@functools.lru_cache
def _named(sql: str) -> Any:
    """Return the text as SQLAlchemy's, with :name parameters."""
    from sqlalchemy import text

    # The blank keeps the casts: `:name::text` is not a parameter to SQLAlchemy.
    return text(_parameter.sub(r":\1 ", sql))


def _family(connection: object) -> str:
    """Return the root package of a connection's class, looking through subclasses of the user's."""
    roots = (kind.__module__.partition(".")[0] for kind in type(connection).__mro__)
    return next((root for root in roots if root in ("psycopg", "sqlalchemy", "asyncpg")), "")


def _levelled(connection: Any) -> Any:
    """Return the block for a call: a transaction, where the server would begin one of another level than is wanted."""
    if (
        connection.isolation_level == IsolationLevel.READ_COMMITTED
        and connection.autocommit
        and connection.pgconn.transaction_status == TransactionStatus.IDLE
    ):
        return connection.transaction()
    return _AS_IT_IS


def run(connection: object, call: Call[T], **parameters: object) -> T:
    """Run a call on a sync connection: psycopg's, or SQLAlchemy's Connection or Session.

    Raises the PgqueueError that the database's error stands for.
    """
    try:
        if isinstance(connection, psycopg.Connection):
            with _levelled(connection), psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
                cursor.execute(call.sql, parameters, prepare=_prepared(connection, call), binary=True)
                return call.read(cursor.fetchall() if _has_rows(cursor) else [])
        if _family(connection) == "sqlalchemy" and not _is_async(connection):
            return call.read(cast(Any, connection).execute(_named(call.sql), parameters).all())
    except Exception as exc:
        raise _translated(exc) from exc
    raise ConfigError(f"{_describe(connection)} cannot be used here: {_SYNC_KINDS}")


async def run_async(connection: object, call: Call[T], **parameters: object) -> T:
    """Run a call on an async connection: psycopg's, SQLAlchemy's AsyncConnection or AsyncSession, or asyncpg's.

    Raises the PgqueueError that the database's error stands for.
    """
    try:
        if isinstance(connection, psycopg.AsyncConnection):
            async with _levelled(connection), psycopg.AsyncCursor(connection, row_factory=tuple_row) as cursor:
                await cursor.execute(call.sql, parameters, prepare=_prepared(connection, call), binary=True)
                return call.read(await cursor.fetchall() if _has_rows(cursor) else [])
        family = _family(connection)
        if family == "sqlalchemy" and _is_async(connection):
            return call.read((await cast(Any, connection).execute(_named(call.sql), parameters)).all())
        if family == "asyncpg":
            sql, names = _numbered(call.sql)
            return call.read(await cast(Any, connection).fetch(sql, *(parameters[name] for name in names)))
    except Exception as exc:
        raise _translated(exc) from exc
    raise ConfigError(f"{_describe(connection)} cannot be used here: {_ASYNC_KINDS}")


def run_parts(
    connection: psycopg.Connection[Any], call: Call[list[T]], parts: Iterable[Mapping[str, object]]
) -> list[T]:
    """Run a call with the parameters of each part in one transaction, and return all their values.

    While the database does what one asks, the next is taken from `parts`. Raises what that raises, or the PgqueueError
    that the database's error stands for, and leaves nothing then.
    """
    values: list[T] = []
    try:
        with connection.pipeline(), connection.transaction():
            # Held until all are sent: an answer that is asked for is waited for.
            cursors = []
            for parameters in parts:
                cursor = psycopg.Cursor(connection, row_factory=tuple_row)
                cursors.append(cursor.execute(call.sql, parameters, binary=True))
            for cursor in cursors:
                values += call.read(cursor.fetchall())
    except Exception as exc:
        raise _translated(exc) from exc
    return values


async def run_parts_async(
    connection: psycopg.AsyncConnection[Any], call: Call[list[T]], parts: Iterable[Mapping[str, object]]
) -> list[T]:
    """Do what `run_parts` does over an async connection."""
    values: list[T] = []
    try:
        async with connection.pipeline(), connection.transaction():
            cursors = []
            for parameters in parts:
                cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
                cursors.append(await cursor.execute(call.sql, parameters, binary=True))
            for cursor in cursors:
                values += call.read(await cursor.fetchall())
    except Exception as exc:
        raise _translated(exc) from exc
    return values


_SYNC_KINDS: Final = "give a psycopg Connection, or SQLAlchemy's Connection or Session; await the async form for others"
_ASYNC_KINDS: Final = (
    "give a psycopg AsyncConnection, SQLAlchemy's AsyncConnection or AsyncSession, or an asyncpg connection; "
    "sync ones go to the _sync form"
)


def _describe(connection: object) -> str:
    kind = type(connection)
    return f"a connection of type {kind.__module__}.{kind.__qualname__}"


def _is_async(connection: object) -> bool:
    return hasattr(connection, "__aenter__")


def _has_rows(cursor: psycopg.Cursor[Any] | psycopg.AsyncCursor[Any]) -> bool:
    # Its description would say so too, and makes an object of each column for it.
    return cursor.pgresult is not None and cursor.pgresult.nfields > 0


def _prepared(connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], call: Call[Any]) -> bool | None:
    if call.planned:
        return False
    if not call.hot or connection.prepare_threshold is None:
        return None
    return True


def _translated(exc: Exception) -> Exception:
    if isinstance(exc, PgqueueError):
        return exc
    driver_error = isinstance(exc, (psycopg.Error, UnicodeError)) or _family(exc) in ("sqlalchemy", "asyncpg")
    return from_db(exc) if driver_error else exc
