"""The faults, each a function that begins one, waits, and undoes it; what it returns is a word on what it did.

Faults of the two lanes overlap, so any of them may find its victim gone: then it raises ServerGone, and that is told.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from pgqueue.bench.chaos import statements
from pgqueue.bench.chaos.ledger import Ledger
from pgqueue.bench.chaos.plan import Injection
from pgqueue.bench.chaos.processes import Service
from pgqueue.bench.chaos.proxy import Proxy
from pgqueue.bench.chaos.server import ChaosServer, ServerGone
from pgqueue.connections import SyncConnection

_CLOCKS: Final = ("+3600", "-3600")


@dataclass(slots=True)
class Rig:
    """What a chaos run consists of: `clocked` is the worker whose clock is off, `proxies` are by who goes through."""

    server: ChaosServer
    ledger: Ledger
    workers: list[Service]
    api: Service
    proxies: dict[str, Proxy]
    pgbouncer: Service | None
    clocked: Service | None
    lease: float


Fault = Callable[[Rig, Injection], str]


def victim(rig: Rig, injection: Injection) -> str:
    """Return the name of what a fault hits: a worker, "all workers", or somebody else."""
    kind = injection.kind
    if kind.startswith("worker"):
        return _worker(rig, injection).name
    if kind.startswith("network"):
        return _proxied(rig, injection)
    if kind == "API killed":
        return rig.api.name
    if kind == "clock off" and rig.clocked is not None:
        return rig.clocked.name
    if kind == "PgBouncer killed":
        return "pooled"
    return "all workers"


def _worker(rig: Rig, injection: Injection) -> Service:
    return rig.workers[int(injection.draw * len(rig.workers))]


def _proxied(rig: Rig, injection: Injection) -> str:
    names = sorted(rig.proxies)
    return names[int(injection.draw * len(names))]


# Of the server -------------------------------------------------------------------------------------------------------


def server_stopped(rig: Rig, injection: Injection) -> str:
    """Immediate stop, and away for some seconds."""
    with rig.server.held_down():
        rig.server.crash()
        time.sleep(4 * injection.seconds)
    return ""


def server_killed(rig: Rig, injection: Injection) -> str:
    """Kill -9 of the postmaster; the watch starts it again."""
    rig.server.kill()
    return ""


def backend_killed(rig: Rig, injection: Injection) -> str:
    """Kill -9 of a backend, upon which the server restarts itself."""
    with rig.server.admin() as admin:
        row = admin.execute(statements.A_BACKEND).fetchone()
    if row is None:
        raise ServerGone("nobody was connected")
    os.kill(row[0], signal.SIGKILL)
    return ""


def backends_terminated(rig: Rig, injection: Injection) -> str:
    """Every session ends."""
    with rig.server.admin() as admin:
        row = admin.execute(statements.TERMINATE_ALL).fetchone()
    return f"{row[0] if row else 0} sessions"


def connections_exhausted(rig: Rig, injection: Injection) -> str:
    """Somebody takes every connection that is left, and those that pgqueue loses."""
    taken: list[psycopg.Connection[Any]] = []
    until = time.monotonic() + 5 * injection.seconds
    try:
        with rig.server.admin() as admin:
            admin.execute(statements.TERMINATE_OURS)
            while time.monotonic() < until:
                try:
                    taken.append(psycopg.connect(rig.server.dsn, autocommit=True, connect_timeout=2))
                except psycopg.Error:
                    time.sleep(0.05)
    finally:
        for connection in taken:
            with contextlib.suppress(psycopg.Error):
                connection.close()
    return f"{len(taken)} taken"


def _for_a_while(
    rig: Rig, seconds: float, begin: Callable[[SyncConnection], None], end: Callable[[SyncConnection], None]
) -> None:
    """Change something by SQL and change it back, however long that takes to succeed."""
    try:
        with rig.server.admin() as admin:
            begin(admin)
        time.sleep(seconds)
    finally:
        deadline = time.monotonic() + 60
        while True:
            try:
                with rig.server.admin() as admin:
                    end(admin)
                break
            except ServerGone:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)


def slow_commits(rig: Rig, injection: Injection) -> str:
    """Every commit takes 100 ms longer, as on a slow disk."""

    def begin(admin: SyncConnection) -> None:
        admin.execute("alter system set commit_delay = 100000")
        admin.execute("alter system set commit_siblings = 0")
        admin.execute(statements.RELOAD)

    def end(admin: SyncConnection) -> None:
        admin.execute("alter system reset all")
        admin.execute(statements.RELOAD)

    _for_a_while(rig, 6 * injection.seconds, begin, end)
    return ""


def disk_full(rig: Rig, injection: Injection) -> str:
    """No byte is left on the server's file system; it may panic and stay down until there is room again."""
    disk = rig.server.disk
    assert disk is not None
    before = rig.server.pid
    try:
        until = time.monotonic() + 5 * injection.seconds
        while time.monotonic() < until:
            # The server gives some back itself, such as its old log.
            disk.fill()
            time.sleep(0.1)
    finally:
        disk.empty()
    return "the server stayed up" if rig.server.pid == before else "the server went down"


def _database_setting(rig: Rig, seconds: float, name: str, value: str) -> None:
    def begin(admin: SyncConnection) -> None:
        admin.execute(psycopg.sql.SQL("alter database pgqueue set {} = {}").format(psycopg.sql.Identifier(name), value))
        admin.execute(statements.TERMINATE_ALL)

    def end(admin: SyncConnection) -> None:
        admin.execute(psycopg.sql.SQL("alter database pgqueue reset {}").format(psycopg.sql.Identifier(name)))

    _for_a_while(rig, seconds, begin, end)


def read_only(rig: Rig, injection: Injection) -> str:
    """The database takes no writes for some seconds; sessions of that time stay read-only."""
    _database_setting(rig, 4 * injection.seconds, "default_transaction_read_only", "on")
    return ""


def statement_timeout(rig: Rig, injection: Injection) -> str:
    """Statements end after 5 ms; sessions of that time keep the setting until somebody ends them."""
    _database_setting(rig, 4 * injection.seconds, "statement_timeout", "5ms")
    time.sleep(1)
    with rig.server.admin() as admin:
        admin.execute(statements.TERMINATE_ALL)
    return ""


def idle_timeout(rig: Rig, injection: Injection) -> str:
    """Idle sessions end after 200 ms; sessions of that time keep the setting."""
    _database_setting(rig, 6 * injection.seconds, "idle_session_timeout", "200ms")
    return ""


_LATE: Final = 900 * 10**9


def long_transaction(rig: Rig, injection: Injection) -> str:
    """An old snapshot, and a prepared transaction with jobs that come late, or never, stay for some seconds."""
    first = _LATE + time.monotonic_ns() // 10**6 * 10
    numbers = list(range(first, first + 3))
    literal = psycopg.sql.Literal(f"chaos {first}")
    commits = injection.draw < 0.7
    with rig.server.admin() as old, rig.server.admin() as writer:
        old.execute("begin isolation level repeatable read")
        old.execute(statements.SNAPSHOT)
        rig.ledger.write("tried", [[n, "quick", 3, None, "default"] for n in numbers])
        rig.ledger.write("unsure", numbers)
        # Whoever has rung a bell cannot prepare.
        writer.execute("begin")
        writer.execute("set local pgqueue.wake = off")
        rows = writer.execute(statements.INSERT_LATE, {"n": numbers}).fetchall()
        writer.execute(psycopg.sql.SQL("prepare transaction {}").format(literal))
        time.sleep(10 * injection.seconds)
        writer.execute(
            psycopg.sql.SQL("{} prepared {}").format(psycopg.sql.SQL("commit" if commits else "rollback"), literal)
        )
        if commits:
            rig.ledger.write("accepted", rows)
        old.execute("rollback")
    return "committed late" if commits else "rolled back"


_SMALL: Final = 20_000


def partition_missing(rig: Rig, injection: Injection) -> str:
    """The partitions of one final state vanish, as if nobody had made them; what was in them goes to the default."""
    parents = ["jobs_completed", "jobs_dead_letter", "jobs_cancelled"]
    with rig.server.admin() as admin:
        parent = f"pgqueue.{parents[int(injection.draw * 3)]}"
        names = [row[0] for row in admin.execute(statements.DAY_PARTITIONS, {"parent": parent}).fetchall()]
        row = admin.execute(statements.ROOM, {"names": names}).fetchone()
        if row is not None and row[0] > _SMALL:
            parent = "pgqueue.jobs_dead_letter"
            names = [row[0] for row in admin.execute(statements.DAY_PARTITIONS, {"parent": parent}).fetchall()]
        (columns,) = admin.execute(statements.COLUMNS).fetchone() or ("",)
        with admin.transaction():
            admin.execute("set local lock_timeout = '3s'")
            for name in names:
                # The catalogue has quoted these names.
                for statement in statements.DROP_PARTITION:
                    admin.execute(statement.format(parent=parent, name=name, columns=columns).encode())
    time.sleep(injection.seconds)
    return f"{len(names)} of {parent}"


# Of everything else --------------------------------------------------------------------------------------------------


def worker_killed(rig: Rig, injection: Injection) -> str:
    """Kill -9."""
    _worker(rig, injection).send(signal.SIGKILL)
    return ""


def worker_stopped(rig: Rig, injection: Injection) -> str:
    """SIGSTOP for longer than a lease, then SIGCONT: what it holds has been taken over meanwhile."""
    worker = _worker(rig, injection)
    worker.send(signal.SIGSTOP)
    try:
        time.sleep(rig.lease + 2.5 * injection.seconds)
    finally:
        worker.send(signal.SIGCONT)
    return ""


def worker_terminated(rig: Rig, injection: Injection) -> str:
    """SIGTERM: it drains."""
    _worker(rig, injection).send(signal.SIGTERM)
    return ""


def api_killed(rig: Rig, injection: Injection) -> str:
    """Kill -9 of the API."""
    rig.api.send(signal.SIGKILL)
    return ""


def pgbouncer_killed(rig: Rig, injection: Injection) -> str:
    """Kill -9 of the pooler."""
    assert rig.pgbouncer is not None
    rig.pgbouncer.send(signal.SIGKILL)
    return ""


def network_cut(rig: Rig, injection: Injection) -> str:
    """Connections are reset, and new ones refused for a moment."""
    proxy = rig.proxies[_proxied(rig, injection)]
    proxy.mode = "refuse"
    proxy.cut()
    try:
        time.sleep(3 * injection.seconds)
    finally:
        proxy.heal()
    return ""


def network_silent(rig: Rig, injection: Injection) -> str:
    """Nothing comes through, for longer than a lease, and nobody is told."""
    proxy = rig.proxies[_proxied(rig, injection)]
    proxy.mode = "swallow"
    try:
        time.sleep(2 * rig.lease * injection.seconds)
    finally:
        proxy.heal()
    return ""


def network_slow(rig: Rig, injection: Injection) -> str:
    """Every packet takes up to 200 ms longer."""
    proxy = rig.proxies[_proxied(rig, injection)]
    proxy.delay = 0.2 * injection.seconds
    try:
        time.sleep(6 * injection.seconds)
    finally:
        proxy.heal()
    return ""


def network_half_open(rig: Rig, injection: Injection) -> str:
    """The server's side of every connection ends; the other hears nothing of it for a while."""
    proxy = rig.proxies[_proxied(rig, injection)]
    proxy.halve()
    try:
        time.sleep(2 * rig.lease * injection.seconds)
    finally:
        proxy.heal()
    return ""


def clock_off(rig: Rig, injection: Injection) -> str:
    """The worker with a clock of its own comes back an hour before or after everybody else."""
    worker = rig.clocked
    assert worker is not None
    offset = _CLOCKS[int(injection.draw * 2)]
    worker.environment["FAKETIME"] = offset
    worker.send(signal.SIGTERM)
    return f"{offset} s"


def bulk_cancel(rig: Rig, injection: Injection) -> str:
    """An operator cancels a hundred jobs that wait or run."""
    with rig.server.admin() as admin:
        statuses = ["pending", "processing", "failed", "submitted"]
        chosen = admin.execute(statements.SOME_LIVE, {"statuses": statuses, "jobs": 100}).fetchall()
        answers = admin.execute(statements.CANCEL_MANY, {"job_ids": [job_id for (job_id,) in chosen]}).fetchall()
    for job_id, answer in answers:
        rig.ledger.write("cancel", job_id, answer)
    return f"{len(answers)} jobs"


def bulk_retry(rig: Rig, injection: Injection) -> str:
    """An operator retries dead letters. Told before, since no answer may come."""
    rig.ledger.write("revived", "doomed", 0)
    with rig.server.admin() as admin:
        row = admin.execute(statements.RETRY_DEAD_LETTERS, {"job_type": "doomed", "jobs": 100}).fetchone()
    return f"{row[0] if row else 0} jobs"


def queue_paused(rig: Rig, injection: Injection) -> str:
    """An operator pauses a queue and resumes it."""
    queue = ("default", "other")[int(injection.draw * 2)]
    _for_a_while(
        rig,
        3 * injection.seconds,
        lambda admin: (admin.execute(statements.PAUSE, {"queue": queue}), None)[1],
        lambda admin: (admin.execute(statements.RESUME, {"queue": queue}), None)[1],
    )
    return queue


FAULTS: Final[dict[str, Fault]] = {
    "server stopped": server_stopped,
    "server killed": server_killed,
    "backend killed": backend_killed,
    "backends terminated": backends_terminated,
    "connections exhausted": connections_exhausted,
    "slow commits": slow_commits,
    "disk full": disk_full,
    "read-only": read_only,
    "statement timeout": statement_timeout,
    "idle timeout": idle_timeout,
    "long transaction": long_transaction,
    "partition missing": partition_missing,
    "worker killed": worker_killed,
    "worker stopped": worker_stopped,
    "worker terminated": worker_terminated,
    "API killed": api_killed,
    "PgBouncer killed": pgbouncer_killed,
    "network cut": network_cut,
    "network silent": network_silent,
    "network slow": network_slow,
    "network half-open": network_half_open,
    "clock off": clock_off,
    "bulk cancel": bulk_cancel,
    "bulk retry": bulk_retry,
    "queue paused": queue_paused,
}
