"""What processes cost: processor time from /proc, WAL and commits from the server."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pgqueue.bench import statements
from pgqueue.connections import SyncConnection

_PROC: Final = Path("/proc")


def _ticks() -> float:
    return float(os.sysconf("SC_CLK_TCK"))


def _stat(pid: int | str) -> list[str] | None:
    """Return the fields of a process from its state on, None when it is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None


def processor_time(pids: Iterable[int]) -> float:
    """Return the seconds of processor time that live processes, and their children that ended, have used."""
    total = 0.0
    for pid in pids:
        fields = _stat(pid)
        if fields is not None:
            total += sum(map(int, fields[11:15])) / _ticks()
    return total


def busy_time() -> float | None:
    """Return the seconds of processor time that this whole machine has used, None where it does not tell."""
    try:
        values = [int(value) for value in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(values) - values[3] - values[4]) / _ticks()


@dataclass(frozen=True, slots=True)
class ServerProcesses:
    """The processes of a PostgreSQL on this machine that serve one database."""

    postmaster: str
    database: str

    @classmethod
    def find(cls, connection: SyncConnection) -> "ServerProcesses | None":
        """Return those behind a connection, None when they are not to be seen from here."""
        pid = connection.info.backend_pid
        fields = _stat(pid)
        # Another machine's process may have the same number: the title of ours names the database.
        if fields is None or not _serves(pid, connection.info.dbname):
            return None
        return cls(fields[1], connection.info.dbname)

    def processor_times(self) -> dict[str, float]:
        """Return the seconds of processor time that each which lives has used."""
        times = {}
        for entry in os.listdir(_PROC):
            if not entry.isdigit():
                continue
            fields = _stat(entry)
            if fields is not None and fields[1] == self.postmaster and _serves(entry, self.database):
                times[entry] = sum(map(int, fields[11:13])) / _ticks()
        return times


def _growth(began: dict[str, float], end: dict[str, float]) -> float:
    """Return what those that are left have used meanwhile; what one that ended had used before is not taken off."""
    return sum(used - began.get(pid, 0.0) for pid, used in end.items())


def _serves(pid: int | str, database: str) -> bool:
    """Say whether a process's title, which a server's process sets, names a database."""
    try:
        return database in (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    server: dict[str, float] | None
    client: float
    busy: float | None
    wal: int


class Meter:
    """Counts from its making on what the server and some client processes use."""

    def __init__(self, connection: SyncConnection, pids: Iterable[int] = ()) -> None:
        """Begin; `connection` is read once now and once at the end."""
        self._connection = connection
        self._pids = list(pids)
        self._server = ServerProcesses.find(connection)
        self._began = self._read()

    def _read(self) -> _Reading:
        wal = statements.scalar(self._connection, statements.WAL_POSITION)
        return _Reading(
            at=time.monotonic(),
            server=self._server.processor_times() if self._server else None,
            client=processor_time(self._pids),
            busy=busy_time(),
            wal=int(wal),
        )

    def per_job(self, jobs: int, *, client_seconds: float | None = None) -> dict[str, float]:
        """Return what was used until now, per job; `client_seconds` is what clients counted themselves."""
        end = self._read()
        jobs = max(jobs, 1)
        client = client_seconds if client_seconds is not None else end.client - self._began.client
        figures = {"wal_bytes": (end.wal - self._began.wal) / jobs}
        if client > 0:
            figures["client_us"] = client / jobs * 1e6
        if end.server is not None and self._began.server is not None:
            server = _growth(self._began.server, end.server)
            figures["server_us"] = server / jobs * 1e6
            if end.busy is not None and self._began.busy is not None:
                others = end.busy - self._began.busy - server - client
                figures["other_cores"] = max(others, 0.0) / (end.at - self._began.at)
        return figures

    def percent(self) -> dict[str, float]:
        """Return what was used until now, in per cent of one processor."""
        end = self._read()
        wall = end.at - self._began.at
        figures = {"client_percent": (end.client - self._began.client) / wall * 100}
        if end.server is not None and self._began.server is not None:
            figures["server_percent"] = _growth(self._began.server, end.server) / wall * 100
        return figures
