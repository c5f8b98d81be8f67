"""Two PostgreSQL servers, one of which follows the other: started, lost, promoted and joined again."""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import embedded
from pgqueue.bench.children import BenchError
from pgqueue.bench.failover import statements
from pgqueue.programs import ended, free_port, identity_for, servers_of

#: pg_rewind needs to know of each changed page, and the log since before the nodes parted.
SETTINGS: Final[Mapping[str, str]] = {
    "wal_log_hints": "on",
    "wal_keep_size": "1GB",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "wal_receiver_status_interval": "1s",
}
_PATIENCE: Final = 60.0


class Node:
    """One server in a directory of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pgdata = path / "pgdata"
        self.port = free_port()
        self._server: embedded.Server | None = None

    @property
    def server(self) -> embedded.Server:
        """The running server."""
        if self._server is None:
            raise BenchError(f"the server in {self.path} was not started")
        return self._server

    @property
    def pids(self) -> list[int]:
        """All its processes."""
        return servers_of(self.pgdata)

    def start(self) -> None:
        """Start it as what its directory says that it is; the first time it is made."""
        if self._server is not None:
            self._server.stop()
        made = self.pgdata.exists()
        self._server = embedded.start(self.path, port=self.port, settings=SETTINGS)
        if not made:
            # In the file too: the recovery that pg_rewind has done first would throw log away that it needs then.
            with (self.pgdata / "postgresql.conf").open("a") as conf:
                conf.writelines(f"{name} = '{value}'\n" for name, value in SETTINGS.items())

    def stop(self) -> None:
        """Stop it for good, whatever state it is in."""
        self.signal(signal.SIGCONT)
        if self._server is not None:
            self._server.stop("immediate", force=True)

    def signal(self, number: int) -> None:
        """Send a signal to each of its processes."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """What the loss of a machine is to its server: kill -9 of every process."""
        pids = self.pids
        self.signal(signal.SIGKILL)
        if not ended(pids, 30):
            raise BenchError(f"the server in {self.path} does not die")

    def promote(self) -> None:
        """Make a standby the primary; returns when it takes writes."""
        self._run("pg_ctl", "promote", "-D", self.pgdata, "-w", "-t", "60")

    def follow(self, primary: "Node") -> None:
        """Become the standby of another node, as a copy that is made anew."""
        if self._server is not None:
            self._server.stop("immediate", force=True)
        shutil.rmtree(self.pgdata, ignore_errors=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        shutil.copy2(primary.path / "password", self.path / "password")
        identity_for(self.path).own(self.path / "password")
        source = make_conninfo(primary.server.dsn, dbname="")
        self._run("pg_basebackup", "-d", source, "-D", self.pgdata, "-R", "-X", "stream", "-c", "fast")
        self.start()

    def rewind(self, primary: "Node") -> bool:
        """Become the standby of the node that was promoted in its place; False if it had to be copied anew."""
        primary.execute(statements.CHECKPOINT)
        if self._server is not None:
            self._server.stop("immediate", force=True)
        source = make_conninfo(primary.server.dsn)
        try:
            self._run("pg_rewind", "-D", self.pgdata, "-R", f"--source-server={source}")
        except BenchError:
            self.follow(primary)
            return False
        self.start()
        return True

    def execute(self, statement: Any, **parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement in a session of its own."""
        with psycopg.connect(self.server.dsn, autocommit=True, connect_timeout=5) as session:
            cursor = session.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def _run(self, program: str, *words: str | Path) -> None:
        from pgqueue.programs import find_binaries

        bindir = self._server.bindir if self._server is not None else find_binaries()
        with identity_for(self.path).popen(
            [bindir / program, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            said = process.communicate()[0]
        if process.returncode:
            raise BenchError(f"{program} failed: {said.strip()[-2000:]}")


class Pair:
    """A primary and its standby. `synchronous`: a commit waits until the standby has it on disk."""

    def __init__(self, folder: Path, *, synchronous: bool = True) -> None:
        """Start both."""
        self.synchronous = synchronous
        self.primary, self.standby = Node(folder / "a"), Node(folder / "b")
        self.nodes = (self.primary, self.standby)
        self.primary.start()
        self.primary.execute(statements.MARKERS)
        self.standby.follow(self.primary)
        self.attach()

    @property
    def dsn(self) -> str:
        """The DSN that names both nodes and finds the one that takes writes."""
        given = conninfo_to_dict(self.nodes[0].server.tcp_dsn)
        hosts = ",".join("127.0.0.1" for _ in self.nodes)
        ports = ",".join(str(node.port) for node in self.nodes)
        return make_conninfo(
            "", host=hosts, port=ports, user=given["user"], password=given["password"], dbname=given["dbname"],
            target_session_attrs="read-write",
        )  # fmt: skip

    def attach(self) -> None:
        """Have commits wait for the standby, and wait until it has what was committed before."""
        if self.synchronous:
            self.primary.execute(statements.SYNC_ON)
            self.primary.execute(statements.RELOAD)
        state = "sync" if self.synchronous else "async"
        wait_for(lambda: self.primary.execute(statements.IN_SYNC, state=state)[0][0] == 1, "the standby follows")
        # What the primary says of its standby is no proof; what can be read there is.
        marker = secrets.token_hex(8)
        self.primary.execute(statements.MARK, marker=marker)
        wait_for(lambda: self.standby.execute(statements.MARKED, marker=marker)[0][0] == 1, "a marker was replicated")

    def fail_over(self) -> None:
        """Promote the standby. The other one must be gone, or be about to be fenced off."""
        self.standby.promote()
        self.primary, self.standby = self.standby, self.primary

    def rejoin(self) -> bool:
        """Take the lost primary back as the standby; False if it had to be copied anew."""
        rewound = self.standby.rewind(self.primary)
        self.attach()
        return rewound

    def close(self) -> None:
        """Stop both."""
        for node in self.nodes:
            node.stop()


@contextmanager
def pair(folder: Path, *, synchronous: bool = True) -> Iterator[Pair]:
    """Run a pair for as long as the block lasts."""
    made: Pair | None = None
    try:
        made = Pair(folder, synchronous=synchronous)
        yield made
    finally:
        if made is not None:
            made.close()
        else:
            for name in ("a", "b"):
                embedded.stop(folder / name, "immediate")


def wait_for(condition: Callable[[], object], what: str, seconds: float = _PATIENCE) -> None:
    """Return when a condition holds, asking again after errors of the database; raises BenchError when too late."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(psycopg.Error):
            if condition():
                return
        if time.monotonic() > deadline:
            raise BenchError(f"{seconds:g} s went by before {what}")
        time.sleep(0.02)
