"""The running queue that a chaos run breaks: server, proxies, pooler, workers, API and producers."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue.bench.chaos import statements
from pgqueue.bench.chaos.app import FOLDER
from pgqueue.bench.chaos.faults import Rig
from pgqueue.bench.chaos.ledger import Ledger
from pgqueue.bench.chaos.plan import LANES
from pgqueue.bench.chaos.processes import Service, bouncer, faketime, python
from pgqueue.bench.chaos.produce import DOORS, QUEUES
from pgqueue.bench.chaos.proxy import Proxy
from pgqueue.bench.chaos.server import ChaosServer, ServerGone
from pgqueue.programs import free_port

APP: Final = "pgqueue.bench.chaos.app:app"
LEASE: Final = 3.0
#: So many that chance does not end a job by them: a job may meet a dozen faults.
MAX_LOST: Final = 100
_LOOK_EVERY: Final = 0.1


@dataclass(slots=True)
class Options:
    """What a run is asked for. `kinds` None: all that this machine offers; every: seconds between two of a lane."""

    minutes: float = 30.0
    jobs: int = 300_000
    seed: int = 1
    kinds: Sequence[str] | None = None
    every: float = 11.0
    concurrency: int = 30
    prepare: Callable[[str], None] | None = None
    doors: Sequence[str] = field(default_factory=lambda: tuple(DOORS))


def through(dsn: str, port: int) -> str:
    """Return a DSN that goes to another port of this machine; the proxies speak no TLS."""
    return make_conninfo(dsn, host="127.0.0.1", port=port, sslmode="disable")


def _environment(folder: Path, dsn: str, **variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PGQUEUE_")}
    return {
        **kept,
        FOLDER: str(folder),
        "PGQUEUE_DSN": dsn,
        "PGQUEUE_LEASE": str(LEASE),
        "PGQUEUE_GRACE": "2",
        "PGQUEUE_LOG_LEVEL": "warning",
        "PGQUEUE_LOG_FORMAT": "json",
        **variables,
    }


class Site:
    """A rig, its files, and the watch that starts again what ends."""

    def __init__(self, folder: Path, options: Options) -> None:
        """Make everything but start no process yet."""
        self.folder = folder
        self.options = options
        self.missing: list[str] = []
        self.kinds = [kind for lane in LANES.values() for kind in lane]
        (folder / "logs").mkdir()
        self.ledgers = folder / "ledger"
        self.ledgers.mkdir()
        self._over = threading.Event()
        self._producers: list[subprocess.Popen[bytes]] = []
        server = ChaosServer()
        try:
            self.rig = self._make(server)
        except BaseException:
            server.close()
            raise
        self._watch = threading.Thread(target=self._watching, name="chaos-watch", daemon=True)

    def _make(self, server: ChaosServer) -> Rig:
        with server.admin() as admin:
            admin.execute(statements.EFFECTS)
            for name in QUEUES:
                admin.execute(statements.QUEUE, {"name": name, "max_lost": MAX_LOST, "lease_ms": round(LEASE * 1000)})
        if self.options.prepare is not None:
            self.options.prepare(server.dsn)
        proxies = {name: Proxy(server.port) for name in ("proxied", "api", "producer")}
        worker = python("pgqueue", "worker", APP, "--concurrency", str(self.options.concurrency))
        logs = self.folder / "logs"

        def service(name: str, command: Sequence[str], environment: Mapping[str, str]) -> Service:
            return Service(name, command, environment, logs)

        workers = [
            service("direct", [*worker, "--name", "direct"], self._variables(server.dsn)),
            service(
                "proxied", [*worker, "--name", "proxied"],
                self._variables(through(server.tcp_dsn, proxies["proxied"].port)),
            ),
        ]  # fmt: skip
        pooler, clocked = None, None
        port = free_port()
        given = conninfo_to_dict(server.tcp_dsn)
        command = bouncer(self.folder, port, server.port, str(given["user"]), str(given["password"]))
        if command is not None:
            pooler = service("pgbouncer", command, dict(os.environ))
            variables = self._variables(
                through(server.tcp_dsn, port), PGQUEUE_LISTEN_DSN=server.dsn, PGQUEUE_PREPARE="off"
            )
            workers.append(service("pooled", [*worker, "--name", "pooled"], variables))
        else:
            self._leave_out("PgBouncer killed", "PgBouncer is not installed")
        library = faketime()
        if library is not None:
            variables = self._variables(
                server.dsn, LD_PRELOAD=str(library), FAKETIME="+3600", FAKETIME_DONT_FAKE_MONOTONIC="1"
            )
            clocked = service("clocked", [*worker, "--name", "clocked"], variables)
            workers.append(clocked)
        else:
            self._leave_out("clock off", "libfaketime is not installed")
        if server.disk is None:
            self._leave_out("disk full", "a file system to fill cannot be mounted")
        self.api_port = free_port()
        api = service(
            "api", python("pgqueue", "serve", "--port", str(self.api_port)),
            self._variables(through(server.tcp_dsn, proxies["api"].port)),
        )  # fmt: skip
        return Rig(server, Ledger(self.ledgers, "operator"), workers, api, proxies, pooler, clocked, LEASE)

    def _variables(self, dsn: str, **more: str) -> dict[str, str]:
        return _environment(self.ledgers, dsn, **more)

    def _leave_out(self, kind: str, why: str) -> None:
        self.kinds.remove(kind)
        self.missing.append(f"{kind}: {why}")

    @property
    def services(self) -> list[Service]:
        """Everything that is started again when it ends."""
        pooler = [] if self.rig.pgbouncer is None else [self.rig.pgbouncer]
        return [*pooler, *self.rig.workers, self.rig.api]

    def start(self) -> None:
        """Start all services and the watch."""
        for service in self.services:
            service.start()
        self._watch.start()

    def _watching(self) -> None:
        while not self._over.wait(_LOOK_EVERY):
            for service in self.services:
                service.ensure()
            # A start that fails, such as for want of room, is tried again.
            with contextlib.suppress(Exception):
                self.rig.server.ensure()

    def start_producers(self, seconds: float) -> None:
        """Start a producer for each door, which enqueues its part within so many seconds."""
        doors = list(self.options.doors)
        places = {
            "sql": self.rig.server.dsn,
            "python": through(self.rig.server.tcp_dsn, self.rig.proxies["producer"].port),
            "rest": f"http://127.0.0.1:{self.api_port}",
        }
        for number, door in enumerate(doors, start=1):
            jobs = self.options.jobs // len(doors) + (number <= self.options.jobs % len(doors))
            told: dict[str, Any] = {
                "door": door, "at": places[door], "seed": self.options.seed, "number": number, "jobs": jobs,
                "rate": max(jobs / seconds, 0.1), "ledger": str(self.ledgers),
            }  # fmt: skip
            with (self.folder / "logs" / f"producer-{door}.log").open("ab") as log:
                self._producers.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "pgqueue.bench.chaos.produce", json.dumps(told)],
                        env=self._variables(places["sql"]), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    )
                )  # fmt: skip

    def producing(self) -> bool:
        """Whether any producer has something left to enqueue."""
        return any(process.poll() is None for process in self._producers)

    def producers_failed(self) -> list[int]:
        """Return the exit codes of producers that ended otherwise than by having enqueued everything."""
        return [process.returncode for process in self._producers if process.returncode]

    def end_producers(self) -> None:
        """End producers that take too long."""
        for process in self._producers:
            if process.poll() is None:
                process.kill()

    def alive(self) -> tuple[int, int] | None:
        """Return how many jobs are alive, and how many of them under a lease that ran out some time ago."""
        try:
            with self.rig.server.admin() as admin:
                row = admin.execute(statements.LIVE, {"slack": LEASE + 2.0}).fetchone()
        except ServerGone:
            return None
        return (int(row[0]), int(row[1])) if row else None

    def drained(self, seconds: float) -> Iterator[tuple[int, int]]:
        """Give what is alive, until nothing is or so many seconds are over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (left := self.alive()) is not None:
                yield left
                if left[0] == 0:
                    return
            time.sleep(0.5)

    def stop_services(self) -> list[str]:
        """End workers and API by SIGTERM; return the names of those that had to be killed."""
        self._over.set()
        self._watch.join()
        killed = []
        services = [*self.rig.workers, self.rig.api]
        for service in services:
            with contextlib.suppress(ProcessLookupError):
                if service.pid is not None:
                    os.kill(service.pid, 15)
        for service in services:
            if not service.stop(10.0):
                killed.append(service.name)
        return killed

    def close(self) -> None:
        """End everything, at once."""
        self._over.set()
        if self._watch.is_alive():
            self._watch.join()
        for process in self._producers:
            if process.poll() is None:
                process.kill()
            process.wait()
        for service in self.services:
            service.close()
        for proxy in self.rig.proxies.values():
            proxy.close()
        self.rig.server.close()
        self.rig.ledger.close()
