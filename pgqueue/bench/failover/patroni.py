"""Two servers under Patroni, which keeps who is the primary in etcd: the deployment that README recommends."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

import psycopg
from psycopg.conninfo import make_conninfo

from pgqueue.bench.children import BenchError
from pgqueue.bench.failover import statements
from pgqueue.bench.failover.pair import SETTINGS, wait_for
from pgqueue.bench.failover.rounds import Fault, play
from pgqueue.programs import ended, find_binaries, free_port, identity_for, servers_of

#: The shortest that Patroni allows: a primary whose key is this old is lost. The others must fit into it.
TTL: Final = 20
LOOP_WAIT: Final = 5
RETRY_TIMEOUT: Final = 5
_PATIENCE: Final = 120.0
_USER: Final = "pgqueue"


def missing() -> str | None:
    """Say what is not installed here."""
    if find_spec("patroni") is None or find_spec("etcd") is None:
        return "Patroni, or its extra for etcd, is not installed: pip install 'patroni[etcd3]'"
    if shutil.which("etcd") is None:
        return "etcd is not installed; its Debian package is etcd-server"
    return None


class Member:
    """One server and the Patroni that runs it."""

    def __init__(self, name: str, folder: Path, etcd: int, password: str) -> None:
        self.name, self.folder, self.pgdata = name, folder / name, folder / name / "pgdata"
        self.port, self._rest = free_port(), free_port()
        self._dsn = make_conninfo(
            "", host="127.0.0.1", port=self.port, user=_USER, password=password, dbname="postgres"
        )
        self._process: subprocess.Popen[str] | None = None
        self.folder.mkdir(mode=0o700)
        (self.folder / "patroni.json").write_text(json.dumps(self._configuration(etcd, password)))

    def _configuration(self, etcd: int, password: str) -> dict[str, Any]:
        parameters = dict(SETTINGS) | {"unix_socket_directories": ""}
        login = {"username": _USER, "password": password}
        return {
            "scope": "pgqueue",
            "name": self.name,
            "restapi": {"listen": f"127.0.0.1:{self._rest}", "connect_address": f"127.0.0.1:{self._rest}"},
            "etcd3": {"host": f"127.0.0.1:{etcd}"},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL, "loop_wait": LOOP_WAIT, "retry_timeout": RETRY_TIMEOUT,
                    # A primary that crashed is not waited for.
                    "primary_start_timeout": 0,
                    "synchronous_mode": True,
                    "postgresql": {"use_pg_rewind": True, "parameters": parameters},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"],
            },
            "postgresql": {
                "listen": f"127.0.0.1:{self.port}", "connect_address": f"127.0.0.1:{self.port}",
                "data_dir": str(self.pgdata), "bin_dir": str(find_binaries()), "pgpass": str(self.folder / "pgpass"),
                "authentication": {"superuser": login, "replication": login, "rewind": login},
                "pg_hba": [f"host {database} all 127.0.0.1/32 scram-sha-256" for database in ("all", "replication")],
            },
        }  # fmt: skip

    def start(self) -> None:
        """Start Patroni, which starts the server as what it finds that it must be."""
        with (self.folder / "patroni.log").open("a") as log:
            self._process = identity_for(self.folder).popen(
                [sys.executable, "-m", "patroni", self.folder / "patroni.json"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def signal(self, number: int) -> None:
        """Send a signal to Patroni and to each process of its server, as to a whole machine."""
        for pid in [*([self._process.pid] if self._process is not None else []), *servers_of(self.pgdata)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Lose the machine."""
        self.signal(signal.SIGKILL)
        # What Patroni had begun to start meanwhile.
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None
        if not ended(servers_of(self.pgdata), 30):
            raise BenchError(f"{self.name} does not die")

    def execute(self, statement: Any, **parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement in a session of its own."""
        with psycopg.connect(self._dsn, autocommit=True, connect_timeout=2) as session:
            cursor = session.execute(statement, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def is_primary(self) -> bool:
        """Say whether its server takes writes."""
        try:
            return self.execute(statements.IS_STANDBY) == [(False,)]
        except psycopg.Error:
            return False

    def may_follow(self) -> bool:
        """Say whether Patroni has noted that this is the synchronous standby: it promotes no other."""
        with suppress(OSError), urlopen(f"http://127.0.0.1:{self._rest}/synchronous", timeout=2):
            return True
        return False

    def last_words(self) -> str:
        """Return the end of Patroni's log."""
        try:
            return (self.folder / "patroni.log").read_text()[-2000:]
        except FileNotFoundError:
            return f"{self.name} was not started"


class Cluster:
    """Two members and one etcd."""

    def __init__(self, folder: Path) -> None:
        """Start them, one after the other, so that it is known which is the primary."""
        if lacking := missing():
            raise BenchError(lacking)
        etcd = str(shutil.which("etcd"))
        password = secrets.token_urlsafe(12)
        client, peer = free_port(), free_port()
        self._etcd = subprocess.Popen(
            [
                etcd, "--data-dir", str(folder / "etcd"),
                "--listen-client-urls", f"http://127.0.0.1:{client}",
                "--advertise-client-urls", f"http://127.0.0.1:{client}",
                "--listen-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
                "--initial-cluster", f"default=http://127.0.0.1:{peer}",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._password = password
        self.members = [Member(name, folder, client, password) for name in ("a", "b")]
        try:
            self._begin()
        except BenchError as exc:
            words = "\n".join(member.last_words() for member in self.members)
            self.close()
            raise BenchError(f"{exc}\n{words}") from None

    def _begin(self) -> None:
        self.members[0].start()
        wait_for(self.members[0].is_primary, "Patroni made a primary", _PATIENCE)
        self.members[0].execute(statements.CREATE_DATABASE)
        self.members[0].execute(statements.MARKERS)
        self.members[1].start()
        self._in_sync(*self.members)

    @property
    def dsn(self) -> str:
        """The DSN that names both and finds the one that takes writes."""
        return make_conninfo(
            "", host="127.0.0.1,127.0.0.1", port=",".join(str(member.port) for member in self.members), user=_USER,
            password=self._password, dbname="pgqueue", target_session_attrs="read-write",
        )  # fmt: skip

    def lose(self, fault: Fault) -> tuple[float, float]:
        """Lose the primary's machine; when it was lost, and when Patroni had promoted the other one."""
        self._lost, self._left = sorted(self.members, key=lambda member: not member.is_primary())
        self._fault = fault
        if fault == "killed":
            self._lost.kill()
        else:
            self._lost.signal(signal.SIGSTOP)
        lost = time.time()
        wait_for(self._left.is_primary, "Patroni promoted the standby", _PATIENCE)
        return lost, time.time()

    def restore(self) -> None:
        """Have the machine back; Patroni makes a standby of it."""
        if self._fault == "killed":
            self._lost.start()
        else:
            self._lost.signal(signal.SIGCONT)
        self._in_sync(self._left, self._lost)

    def _in_sync(self, primary: Member, standby: Member) -> None:
        def synchronous() -> bool:
            return primary.execute(statements.IN_SYNC, state="sync") == [(1,)] and standby.may_follow()

        wait_for(synchronous, "Patroni has a synchronous standby", _PATIENCE)
        marker = secrets.token_hex(8)
        primary.execute(statements.MARK, marker=marker)
        wait_for(lambda: standby.execute(statements.MARKED, marker=marker)[0][0] == 1, "a marker was replicated")

    def close(self) -> None:
        """End everything."""
        for member in self.members:
            member.kill()
        self._etcd.kill()
        self._etcd.wait()


def by_patroni(folder: Path, faults: Sequence[Fault], told: Callable[[str], None]) -> dict[str, Any]:
    """Play rounds on a cluster in a folder."""
    cluster = Cluster(folder)
    try:
        return play(cluster, faults, told)
    finally:
        cluster.close()
