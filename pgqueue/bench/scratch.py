"""Scratch databases: the benchmark's own, on the server of a DSN. Nothing else there is read or written."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import psycopg
from psycopg.conninfo import make_conninfo

from pgqueue import schema
from pgqueue.bench import statements
from pgqueue.connections import SyncConnection, connect
from pgqueue.errors import ConfigError, from_db
from pgqueue.log import logger
from pgqueue.settings import Settings

_log: Final = logger("pgqueue.bench")
PREFIX: Final = "pgqueue_bench_"

Fill = Callable[[SyncConnection], None]


@dataclass(frozen=True, slots=True)
class Database:
    """A scratch database with the schema."""

    name: str
    dsn: str
    settings: Settings

    @contextmanager
    def connection(self) -> Iterator[SyncConnection]:
        """Give a connection in autocommit mode."""
        with connect(self.dsn, self.settings, "pgqueue bench") as connection:
            yield connection


class Scratch:
    """Makes scratch databases and drops them all when closed."""

    def __init__(self, dsn: str, settings: Settings) -> None:
        """Connect to the server of `dsn`; raises DatabaseUnavailable."""
        self._dsn = dsn
        self._settings = settings
        self._run = PREFIX + secrets.token_hex(4)
        self._made: dict[str, Database] = {}
        self._copies = 0
        self._admin = connect(dsn, settings, "pgqueue bench")

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Drop everything."""
        self.close()

    def close(self) -> None:
        """Drop every database that was made, and hang up."""
        for key in list(self._made):
            self._drop(key)
        self._admin.close()

    @property
    def admin(self) -> SyncConnection:
        """A connection to the configured database, for what concerns the server."""
        return self._admin

    def commits(self, database: Database) -> int:
        """Return how many transactions have committed in a database, as far as their sessions have ended."""
        commits: int = statements.scalar(self._admin, statements.COMMITS, database=database.name)
        return commits

    def kept(self, key: str, fill: Fill | None = None) -> Database:
        """Return the database of a key, which is made, given the schema and filled when it is first asked for."""
        if key in self._made:
            return self._made[key]
        if key == "empty":
            database = self._create(key, "template1")
            schema.migrate(database.dsn)
            with database.connection() as connection:
                statements.run(connection, statements.PARTITIONS)
                statements.run(connection, statements.WITHOUT_LIMITS)
                statements.run(connection, statements.SWEEP)
        else:
            database = self._create(key, self.kept("empty").name)
        if fill is not None:
            with database.connection() as connection:
                fill(connection)
                statements.run(connection, statements.VACUUM)
                # The first makes a cursor's candidate, the second takes it.
                statements.run(connection, statements.SWEEP)
                statements.run(connection, statements.SWEEP)
        return database

    @contextmanager
    def copy(self, key: str = "empty", fill: Fill | None = None) -> Iterator[Database]:
        """Give a copy of the database of a key for as long as the block lasts. Begins after a checkpoint."""
        template = self.kept(key, fill)
        self._copies += 1
        name = f"copy {self._copies}"
        try:
            database = self._create(name, template.name)
            self._checkpoint()
            yield database
        finally:
            self._drop(name)

    def _create(self, key: str, template: str) -> Database:
        name = f"{self._run}_{len(self._made)}_{self._copies}"
        # Noted before it is there: whoever is interrupted in between must drop it.
        self._made[key] = database = Database(name, make_conninfo(self._dsn, dbname=name), self._settings)
        try:
            statements.run(self._admin, statements.create_database(name, template))
        except psycopg.Error as exc:
            del self._made[key]
            if isinstance(exc, psycopg.errors.InsufficientPrivilege):
                raise ConfigError(
                    "the benchmark works in databases of its own: its role needs the right to create them (CREATEDB)"
                ) from None
            raise from_db(exc) from exc
        return database

    def _drop(self, key: str) -> None:
        database = self._made.pop(key, None)
        if database is None:
            return
        try:
            statements.run(self._admin, statements.drop_database(database.name))
        except psycopg.Error as exc:
            _log.error("a scratch database was not dropped", database=database.name, error=str(exc).strip())

    def _checkpoint(self) -> None:
        try:
            statements.run(self._admin, statements.CHECKPOINT)
        except psycopg.errors.InsufficientPrivilege:
            # It only makes runs more alike.
            return
