"""The PostgreSQL servers that tests run on.

A run has one server for all its pytest processes. Its directory is made by the first process (with pytest-xdist the
controller); whichever process needs the server first starts it and makes the template database, under a file lock,
and writes down where they are. Every test gets a fresh copy of the template. The first process stops the server.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import embedded, schema
from pgqueue.programs import ended, servers_of, system_binaries

CHECKOUT = Path(__file__).parents[1]
SETTINGS = {"max_connections": "300", "max_prepared_transactions": "50"}
PREFIX = "pgqueue-tests-"
# In memory, where there is room: a copy of the template is some 400 files, which takes 20 ms there and up to 400 ms on
# a busy disk.
MEMORY = Path("/dev/shm")
ROOM = 4 << 30


@dataclass(frozen=True)
class ServerUnderTest:
    """A running server. `template` is a database with the schema, `strategy` how to copy it the fastest."""

    dsn: str
    bindir: str
    template: str
    strategy: str


def apply_schema(dsn: str, which: str) -> None:
    """Brings the schema to head ('migrated'), or runs the text in pgqueue/sql as it is now ('present')."""
    if which == "migrated":
        schema.migrate(dsn)
        return
    with psycopg.connect(dsn) as connection:
        connection.execute("set search_path = ''")
        for path in sorted((CHECKOUT / "pgqueue" / "sql").glob("[1-9]_*.sql")):
            connection.execute(path.read_bytes(), prepare=False)


def quick_dir(prefix: str) -> Path:
    """A new directory for what need not survive the machine."""
    fits = MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM
    return Path(tempfile.mkdtemp(prefix=prefix, dir=MEMORY if fits else None))


@contextlib.contextmanager
def flocked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Holds an exclusive lock on a file; without `wait` yields False when somebody else holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


class Run:
    """One test run's server, as seen by one of its processes. `kind`: embedded, system, container or a DSN."""

    def __init__(self, path: Path, kind: str, which_schema: str) -> None:
        self.path, self.kind, self.which_schema = path, kind, which_schema
        self._note = path / "server.json"
        self._first = contextlib.ExitStack()
        self._container: Any = None
        if kind == "system" and "PGQUEUE_PG_BINDIR" not in os.environ:
            os.environ["PGQUEUE_PG_BINDIR"] = str(next(system_binaries()))

    @classmethod
    def begin(cls, kind: str, which_schema: str) -> "Run":
        """For the first process."""
        sweep()
        run = cls(quick_dir(PREFIX), kind, which_schema)
        run._first.enter_context(flocked(run.path / "alive"))
        if kind == "container":
            try:
                run._start_container()
            except BaseException:
                run.end()
                raise
        return run

    def server(self) -> ServerUnderTest:
        """The server, started if no process of this run has done so."""
        with flocked(self.path / "lock"):
            if not self._note.exists():
                server = self._start()
                self._note.write_text(json.dumps(asdict(server)))
            return ServerUnderTest(**json.loads(self._note.read_text()))

    def end(self) -> None:
        """For the first process, after all others."""
        if self._note.exists() and self.kind not in ("embedded", "system"):
            server = self.server()
            with psycopg.connect(server.dsn, autocommit=True) as connection:
                connection.execute(
                    sql.SQL("alter database {} is_template false").format(sql.Identifier(server.template))
                )
                connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(server.template)))
        if self._container is not None:
            self._container.stop()
        embedded.stop(self.path / "instance", "immediate")
        self._first.close()
        shutil.rmtree(self.path)

    def _start(self) -> ServerUnderTest:
        strategy = "wal_log"
        if self.kind in ("embedded", "system"):
            settings = SETTINGS | {"max_wal_size": "512MB"}
            with embedded.start(self.path / "instance", keep=True, durable=False, settings=settings) as running:
                dsn, bindir = running.dsn, running.bindir
            strategy = "file_copy"
        else:
            dsn = (self.path / "container").read_text() if self.kind == "container" else self.kind
            bindir = embedded.find_binaries()
        template = f"pgqueue_template_{uuid.uuid4().hex[:12]}"
        name = sql.Identifier(template)
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(sql.SQL("create database {} template template0").format(name))
            apply_schema(make_conninfo(dsn, dbname=template), self.which_schema)
            connection.execute(sql.SQL("alter database {} is_template true allow_connections false").format(name))
        return ServerUnderTest(dsn, str(bindir), template, strategy)

    def _start_container(self) -> None:
        try:
            from testcontainers.community.postgres import PostgresContainer
        except ImportError:  # before 4.15
            from testcontainers.postgres import PostgresContainer

        image = os.environ.get("PGQUEUE_TEST_IMAGE", "postgres:18")
        options = " ".join(f"-c {name}={value}" for name, value in SETTINGS.items())
        self._container = PostgresContainer(image, driver=None).with_command(f"postgres -c fsync=off {options}")
        self._container.start()
        (self.path / "container").write_text(self._container.get_connection_url())


def sweep() -> None:
    """Ends the servers of runs that were killed."""
    for path in [*MEMORY.glob(f"{PREFIX}*"), *Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]:
        with contextlib.suppress(OSError), flocked(path / "alive", wait=False) as dead:
            # A directory without an instance is one that a run is about to lock.
            if dead and (path / "instance").exists():
                embedded.stop(path / "instance", "immediate")
                shutil.rmtree(path, ignore_errors=True)


class Databases:
    """Copies of the template. They are dropped by a thread, since a drop waits for a checkpoint."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._dropper = ThreadPoolExecutor(1)
        self._dropped: list[Future[None]] = []

    def create(self) -> str:
        """The DSN of a fresh database."""
        name = f"pgqueue_test_{uuid.uuid4().hex[:12]}"
        self._administer(
            sql.SQL("create database {} template {} strategy {}").format(
                sql.Identifier(name), sql.Identifier(self._server.template), sql.SQL(self._server.strategy)
            )
        )
        return make_conninfo(self._server.dsn, dbname=name)

    def drop(self, dsn: str) -> None:
        """Drops what create() made, whoever is still connected."""
        name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
        statement = sql.SQL("drop database {} with (force)").format(sql.Identifier(str(name)))
        self._dropped.append(self._dropper.submit(self._administer, statement))

    def close(self) -> None:
        """Waits for the drops; raises what went wrong with one."""
        self._dropper.shutdown()
        for dropped in self._dropped:
            dropped.result()

    def _administer(self, statement: sql.Composed) -> None:
        with psycopg.connect(self._server.dsn, autocommit=True) as connection:
            connection.execute(statement)


class OwnServer:
    """A durable server of one test, with the schema, for faults: stop it, kill it, start it again."""

    def __init__(self, which_schema: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="pgqueue-own-"))
        self.running = embedded.start(self.path, settings=SETTINGS)
        self.dsn, self.tcp_dsn, self.port = self.running.dsn, self.running.tcp_dsn, self.running.port
        self.bindir, self.pgdata = self.running.bindir, self.running.pgdata
        apply_schema(self.dsn, which_schema)

    @property
    def pid(self) -> int | None:
        """The postmaster's pid; None when it does not run."""
        return self.running.pid

    def stop(self, mode: embedded.StopMode = "fast") -> None:
        """Stops the server; 'immediate' is a crash whose log is replayed at the next start."""
        self.running.stop(mode, force=True)

    def kill(self) -> None:
        """kill -9 of the postmaster; returns when its backends are gone too."""
        pids = servers_of(self.pgdata)
        assert self.pid is not None, "the server does not run"
        os.kill(self.pid, signal.SIGKILL)
        assert ended(pids, 30), f"of {pids} some are left"

    def start(self, **settings: str) -> None:
        """Starts it again where it was, with settings of its own: the DSN stays the same."""
        self.running.stop()
        self.running = embedded.start(self.path, port=self.port, settings=SETTINGS | settings)

    def close(self) -> None:
        """Stops it for good."""
        self.running.stop("immediate", force=True)
        shutil.rmtree(self.path)
