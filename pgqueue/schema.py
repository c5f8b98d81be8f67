"""Bring a database's schema `pgqueue` to the version that this package needs.

`pgqueue/sql/*.sql` is the present text of the queue. An alembic revision is three files in `alembic/versions/`
(`pgqueue/_migrations/versions/` in a wheel): a few lines of Python, and the frozen text `NNNN_x.up.sql` and
`NNNN_x.down.sql`. Once released they never change; a test holds that all of them together equal the present text.

How a migration runs:

- One migrator at a time in a database. The lock is a transaction's, so that it holds behind a pooler too, and it is
  polled: a session that waits inside a statement holds a snapshot, which CREATE INDEX CONCURRENTLY would wait for.
- Each revision is a transaction of its own and begins with its own `set local`: a short lock_timeout, so that a lock
  queue in front of producers ends by itself, and an empty search_path, so that the role's does not matter. What could
  not get its locks is rolled back whole and tried again after a pause in which producers catch up.
- Frozen text goes to the server as it is: no parameters, `%` and `:name` mean nothing.
"""

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psycopg
from alembic import command, op
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, NullPool, column, create_engine, func, inspect, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateSchema

from pgqueue.errors import ConfigError, DatabaseConflict, SchemaOutdated, from_db

SCHEMA: Final = "pgqueue"
_LOCK_KEY: Final = int.from_bytes(b"pgqueue!", "big", signed=True)
_PAUSES: Final = (1.0, 2.0, 4.0, 8.0)

# What passes when others get on with their work: a lock that was not to be had, or roles, which all databases of a
# server share, made by a migration of another database in the same instant.
_PASSING: Final = (
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
)

# alembic keeps the running environment in module globals.
_one_environment = threading.Lock()


def migrate(dsn: str, *, patience: float = 600.0) -> list[str]:
    """Run every revision that the database lacks and return their ids, oldest first (none: nothing was to do).

    Any number of processes may call this at once; one works, the others wait. `patience`, in seconds, bounds the wait
    for them and for locks that long transactions hold on the queue's tables. Raises a PgqueueError: DatabaseConflict
    when patience ran out, SchemaOutdated when the schema is newer than this package, ConfigError when the database's
    encoding is not UTF8, else the database's own. What was committed by then stays, for a later call to go on.
    """
    deadline = time.monotonic() + patience
    pauses = iter(_PAUSES)
    with _one_environment, _database_errors(), exclusively(dsn, deadline=deadline) as connection:
        before = _revision_of(connection)
        while True:
            try:
                command.upgrade(_config(connection=connection), "head")
                break
            except (psycopg.Error, DBAPIError) as exc:
                connection.rollback()
                pause = next(pauses, _PAUSES[-1])
                if not isinstance(getattr(exc, "orig", exc), _PASSING):
                    raise
                if time.monotonic() + pause > deadline:
                    raise DatabaseConflict(
                        "the migration did not get its locks: end the long transactions on the tables of schema "
                        "pgqueue, which pg_stat_activity shows, and run it again"
                    ) from exc
            time.sleep(pause * random.uniform(0.8, 1.2))
        script = ScriptDirectory.from_config(_config())
        return [revision.revision for revision in script.iterate_revisions("head", before or "base")][::-1]


def grant_roles(dsn: str) -> list[str]:
    """Make the group roles that are missing, with their rights, and return those that this role may not make.

    For a database that has been migrated. Raises a PgqueueError.
    """
    owner = select(func.pg_has_role(column("nspowner"), "usage")).select_from(table("pg_namespace"))
    with _database_errors(), _engine(dsn).begin() as connection:
        found: list[str] = connection.execute(select(func.pgqueue.missing_roles())).scalar_one()
        if found and connection.scalar(owner.where(column("nspname") == SCHEMA)):
            found = connection.execute(select(func.pgqueue.grant_roles())).scalar_one()
        return found


def roles_advice(missing: list[str]) -> str:
    """Return what to do about group roles that are missing."""
    made = " ".join(f"create role {role} nologin;" for role in missing)
    return f"as a role that may create roles run: {made} then as the schema's owner: select pgqueue.grant_roles();"


def migration_sql(start: str | None = None) -> str:
    """Return the text that `psql -f` runs to bring a database from revision `start` (None: an empty one) to head."""
    text = io.StringIO()
    with _one_environment:
        command.upgrade(_config(output=text), f"{start or 'base'}:head", sql=True)
    return text.getvalue()


def current_version(dsn: str) -> str | None:
    """Return the id of the newest revision that the database has, None without any."""
    with _database_errors(), _engine(dsn).connect() as connection:
        return _revision_of(connection)


def head() -> str:
    """Return the id of the newest revision that this package has."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def frozen(revision_file: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return the upgrade and downgrade of a revision: run the .up.sql and .down.sql beside its file."""
    path = Path(revision_file)

    def upgrade() -> None:
        _run(path.with_suffix(".up.sql"))

    def downgrade() -> None:
        _run(path.with_suffix(".down.sql"))

    return upgrade, downgrade


@contextmanager
def exclusively(dsn: str, *, deadline: float | None = None) -> Iterator[Connection]:
    """Give a connection to the database while no other migrator works on it.

    `deadline` (time.monotonic(), seconds; None: never) ends the wait for the others with DatabaseConflict.
    """
    engine = _engine(dsn)
    with engine.connect() as lock:
        while not lock.scalar(select(func.pg_try_advisory_xact_lock(_LOCK_KEY))):
            lock.rollback()
            if deadline is not None and time.monotonic() > deadline:
                raise DatabaseConflict("another migration of this database is still at work")
            time.sleep(random.uniform(0.1, 0.3))
        _keep_open(lock)
        with engine.connect() as connection:
            yield connection


def run_revisions(context: EnvironmentContext, connection: Connection) -> None:
    """Run what alembic's command asks for on `connection`, each revision in its own transaction.

    Raises ConfigError, before anything is made, in a database whose encoding cannot hold every text.
    """
    encoding = connection.scalar(select(func.getdatabaseencoding()))
    # SQL_ASCII keeps the bytes that it is sent, which are UTF-8.
    if encoding not in ("UTF8", "SQL_ASCII"):
        raise ConfigError(
            f"the database has the encoding {encoding}, and pgqueue needs UTF8: "
            "create one by CREATE DATABASE ... ENCODING 'UTF8' TEMPLATE template0"
        )
    # Its `if not exists` asks for the right to create schemas even when there is nothing to create.
    if not inspect(connection).has_schema(SCHEMA):
        connection.execute(CreateSchema(SCHEMA, if_not_exists=True))
    connection.commit()
    context.configure(connection=connection, version_table_schema=SCHEMA, transaction_per_migration=True)
    with context.begin_transaction():
        context.run_migrations()


def print_revisions(context: EnvironmentContext) -> None:
    """Print what alembic's command asks for as SQL, each revision in its own transaction."""
    context.configure(dialect_name="postgresql", version_table_schema=SCHEMA, transaction_per_migration=True)
    if context.get_starting_revision_argument() in (None, "base"):
        context.get_impl().static_output(f"{CreateSchema(SCHEMA, if_not_exists=True)};")
    with context.begin_transaction():
        context.run_migrations()


def _run(path: Path) -> None:
    context = op.get_context()
    text = path.read_text(encoding="utf-8")
    if context.as_sql:
        context.impl.static_output(text)
        return
    assert context.connection is not None
    driver = context.connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    try:
        driver.execute(text.encode(), prepare=False)
    except psycopg.Error as exc:
        if position := exc.diag.statement_position:
            exc.add_note(f"{path.name}, line {text.count(chr(10), 0, int(position)) + 1}")
        raise


def _config(connection: Connection | None = None, output: io.StringIO | None = None) -> Config:
    config = Config(output_buffer=output)
    # A path may hold a `%`, which this parser would take for its own.
    config.set_main_option("script_location", str(_location()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    if connection is not None:
        config.attributes["connection"] = connection
    return config


def _location() -> Path:
    packaged = Path(__file__).parent / "_migrations"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "alembic"


def _engine(dsn: str) -> Engine:
    # libpq alone reads the DSN: SQLAlchemy's URLs know neither all of its forms nor all of its passwords.
    def connect() -> psycopg.Connection:
        return psycopg.connect(
            dsn, client_encoding="utf8", fallback_application_name="pgqueue migrate", prepare_threshold=None
        )

    return create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool, use_native_hstore=False)


def _keep_open(connection: Connection) -> None:
    """Free the open transaction from the limits that a server may set on idle and long ones."""
    limits = ("idle_in_transaction_session_timeout", "transaction_timeout")
    settings = table("pg_settings", column("name"))
    connection.execute(select(func.set_config(settings.c.name, "0", True)).where(settings.c.name.in_(limits)))


def _revision_of(connection: Connection) -> str | None:
    context = MigrationContext.configure(connection, opts={"version_table_schema": SCHEMA})
    revision = context.get_current_revision()
    connection.rollback()
    return revision


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, DBAPIError) as exc:
        raise from_db(exc) from exc
    except CommandError as exc:
        if isinstance(exc.__cause__, ResolutionError):
            raise SchemaOutdated("the schema is newer than this pgqueue: install the release that made it") from exc
        raise
