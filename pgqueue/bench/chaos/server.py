"""The PostgreSQL of a chaos run: started, killed, filled up, and started again where it was."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg

from pgqueue import embedded, schema
from pgqueue.bench.chaos import statements
from pgqueue.connections import SyncConnection
from pgqueue.programs import ended, servers_of

_SETTINGS: Final = {
    "max_connections": "90",
    "max_prepared_transactions": "20",
    "shared_buffers": "256MB",
    "max_wal_size": "512MB",
    "checkpoint_timeout": "5min",
    "autovacuum_naptime": "10s",
}
# Room for half a million jobs and the log, and little enough to be filled within a second.
_DISK_BYTES: Final = 3 << 29
# An administrator's session is in no fault's way.
_ADMIN: Final = "-c default_transaction_read_only=off -c statement_timeout=0 -c idle_session_timeout=0"


class ServerGone(Exception):
    """The server cannot be reached; faults overlap, so that may be meant."""


class Disk:
    """A small file system of its own, which can be filled; None where it cannot be mounted."""

    def __init__(self, path: Path) -> None:
        """`path` is where it is mounted."""
        self.path = path
        self._ballast = path / "ballast"

    @classmethod
    def mount(cls, path: Path) -> "Disk | None":
        """Mount a tmpfs, which only root may."""
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return None
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES},mode=0755", "tmpfs", str(path)], capture_output=True
        )
        return cls(path) if done.returncode == 0 else None

    def fill(self) -> None:
        """Leave no room."""
        fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for step in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):
                    while (free := shutil.disk_usage(self.path).free) > 0:
                        size = os.fstat(fd).st_size
                        os.posix_fallocate(fd, size, max(free - step, step))
        finally:
            os.close(fd)

    def empty(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Unmount it, with all that is on it."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)


class ChaosServer:
    """A durable server. While `down_on_purpose` is held, nobody starts it again."""

    def __init__(self) -> None:
        """Make it, on a file system of its own if that can be had, with the schema."""
        self.place = Path(tempfile.mkdtemp(prefix="pgqueue-chaos-"))
        self.place.chmod(0o755)
        self.disk = Disk.mount(self.place)
        self.path = self.place / "instance"
        self.down_on_purpose = threading.Event()
        self._starting = threading.Lock()
        try:
            self._running = embedded.start(self.path, settings=_SETTINGS)
            self.dsn, self.tcp_dsn, self.port = self._running.dsn, self._running.tcp_dsn, self._running.port
            self.pgdata = self._running.pgdata
            schema.migrate(self.dsn)
        except BaseException:
            self._remove()
            raise

    @property
    def pid(self) -> int | None:
        """The postmaster, None when there is none."""
        return self._running.pid

    def crash(self) -> None:
        """Stop it in immediate mode: its log is replayed at the next start."""
        with self._starting:
            self._running.stop("immediate", force=True)

    def kill(self) -> None:
        """Kill -9 the postmaster, and wait until its backends have noticed."""
        with self._starting:
            pid, left = self.pid, servers_of(self.pgdata)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                ended(left, 30)

    def ensure(self) -> None:
        """Start it again where it was, unless it runs or is down on purpose."""
        with self._starting:
            if self.pid is None and not self.down_on_purpose.is_set():
                self._running.stop()
                self._running = embedded.start(self.path, port=self.port, settings=_SETTINGS)

    @contextlib.contextmanager
    def held_down(self) -> Iterator[None]:
        """Keep it down for as long as the block lasts; started again at its end."""
        self.down_on_purpose.set()
        try:
            yield
        finally:
            self.down_on_purpose.clear()
            self.ensure()

    @contextlib.contextmanager
    def admin(self) -> Iterator[SyncConnection]:
        """Give a superuser's session; raises ServerGone for whatever the database or the way to it does."""
        try:
            with psycopg.connect(self.dsn, autocommit=True, connect_timeout=5, options=_ADMIN) as connection:
                yield connection
        except psycopg.Error as exc:
            raise ServerGone(str(exc).strip()) from exc

    def settle(self) -> None:
        """Undo what faults may have left behind in settings and open transactions; raises ServerGone."""
        with self.admin() as admin:
            for name in ("default_transaction_read_only", "statement_timeout", "idle_session_timeout"):
                admin.execute(f"alter database pgqueue reset {name}")
            admin.execute("alter system reset all")
            admin.execute(statements.RELOAD)
            for (gid,) in admin.execute(statements.DROP_PREPARED).fetchall():
                admin.execute(psycopg.sql.SQL("rollback prepared {}").format(psycopg.sql.Literal(gid)))

    def close(self) -> None:
        """Stop it for good and remove everything."""
        self.down_on_purpose.set()
        if self.disk is not None:
            self.disk.empty()
        self._running.stop("immediate", force=True)
        self._remove()

    def _remove(self) -> None:
        if self.disk is not None:
            self.disk.unmount()
        shutil.rmtree(self.place, ignore_errors=True)
