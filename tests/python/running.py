"""Workers for tests: in a thread of the test's process, or in a process of their own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import App, EnqueuedJob, Job, Settings
from pgqueue.job import ClaimedJob
from pgqueue.process import new_event_loop
from pgqueue.worker import Worker
from tests.meet import wait_until

T = TypeVar("T")
CHECKOUT = Path(__file__).parents[2]


def make_app(dsn: str, **settings: Any) -> App:
    """An app without tasks on a test database, with its own settings."""
    return App(settings=Settings.load(env={}, dsn=dsn, **{"grace": 5.0, **settings}))


def a_job(payload: str = "{}") -> Job:
    """The second attempt of a job that nobody runs."""
    return Job(
        ClaimedJob(
            job_id=bytes(range(16)), job_type="t", payload=payload, attempts=2, queue="q", priority=1, timeout_ms=None,
            lease_expires_at=30_000_000, updated_at=0, created_at=0, scheduled_at=None, max_retries=3, lost=0,
            producer_id=None, ordering_key=None, trace_context='{"traceparent": "00-a"}',
        )
    )  # fmt: skip


@contextmanager
def worker_of(app: App, **options: Any) -> Iterator[Worker]:
    """A worker in a thread; stopped and drained at the end."""
    started = threading.Event()
    failures: list[BaseException] = []
    made: list[Worker] = []

    async def main() -> None:
        made.append(app.worker(**options))
        running = asyncio.ensure_future(made[0].run())
        await asyncio.sleep(0)
        started.set()
        await running

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(main())
        except BaseException as exc:
            failures.append(exc)
        finally:
            started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield made[0]
    finally:
        if thread.is_alive() and not made[0].stopping:
            made[0].request_stop()
        thread.join(30)
        assert not thread.is_alive(), "the worker did not drain"
        if failures:
            raise failures[0]


def run_many(app: App, count: int) -> int:
    """Runs many workers in this process until SIGTERM, each with all its connections and its thread."""

    async def run() -> None:
        workers = [app.worker() for _ in range(count)]

        def stop() -> None:
            for worker in workers:
                worker.request_stop()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await asyncio.gather(*(worker.run() for worker in workers))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run())
    return 0


@dataclass
class WorkerProcess:
    """`pgqueue worker`-like process on an app of this directory."""

    process: subprocess.Popen[str]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def ended(self, within: float) -> int:
        eventually(lambda: self.process.poll() is not None, within)
        return self.process.wait()


@contextmanager
def supervised_workers(dsn: str, count: int, **variables: str) -> Iterator[WorkerProcess]:
    """Worker processes under a supervisor."""
    with worker_process(dsn, call=f"app.run_worker(processes={count})", **variables) as supervisor:
        yield supervisor


@contextmanager
def worker_process(
    dsn: str,
    app: str = "tests.python.apps:app",
    *,
    call: str = "app.run_worker()",
    wait: bool = True,
    **variables: str,
) -> Iterator[WorkerProcess]:
    """A worker in a process of its own, ready unless told not to wait; killed at the end."""
    module, _, name = app.partition(":")
    code = "\n".join(
        [
            "import sys",
            "from pgqueue import log",
            f"from {module} import {name} as app",
            "log.configure('info', 'json')",
            f"sys.exit({call})",
        ]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        env={**os.environ, "PGQUEUE_DSN": dsn, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "worker started" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if wait:
            if not ready.wait(60):
                process.send_signal(signal.SIGUSR1)
                time.sleep(2)
                raise AssertionError(f"the worker did not start; it said: {''.join(lines)}")
            assert process.poll() is None, "".join(lines)
        yield WorkerProcess(process)
    finally:
        if process.poll() is None:
            # A stopped process dies as well.
            process.send_signal(signal.SIGKILL)
        process.wait()
        reader.join(5)
        process.stderr.close()


@contextmanager
def command(dsn: str, *words: str, **variables: str) -> Iterator[WorkerProcess]:
    """A command of `pgqueue` in a process of its own; killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", *words],
        cwd=CHECKOUT,
        env={**os.environ, "PGQUEUE_DSN": dsn, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield WorkerProcess(process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def stalling_proxy(dsn: str, delay: float = 0.0) -> Iterator[tuple[str, Callable[[], None]]]:
    """A DSN that goes through a TCP proxy, and what makes the proxy go silent without closing anything.

    What is answered comes `delay` seconds late.
    """
    given = conninfo_to_dict(dsn)
    host, port = str(given["host"]), int(str(given["port"]))
    listening = socket.create_server(("127.0.0.1", 0))
    silent = threading.Event()
    opened: list[socket.socket] = []

    def connect() -> socket.socket:
        if not host.startswith("/"):
            return socket.create_connection((host, port))
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(f"{host}/.s.PGSQL.{port}")
        except OSError:
            server.close()
            raise
        return server

    def pump(source: socket.socket, target: socket.socket, late: float) -> None:
        with suppress(OSError):
            while (data := source.recv(65536)) and not silent.is_set():
                time.sleep(late)
                target.sendall(data)
            silent.wait(0 if not data else None)

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                try:
                    server = connect()
                except OSError:
                    client.close()
                    continue
                opened.extend((client, server))
                for told in ((client, server, 0.0), (server, client, delay)):
                    threading.Thread(target=pump, args=told, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield make_conninfo(dsn, host="127.0.0.1", port=listening.getsockname()[1], sslmode="disable"), silent.set
    finally:
        silent.set()
        for end in (listening, *opened):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def eventually(look: Callable[[], T], within: float = 30.0) -> T:
    """What `look` returns once it is true, for what processes do."""
    return wait_until(look, within)


def asleep(connection: psycopg.Connection[Any], workers: int = 1) -> None:
    """Waits until so many workers, all that there are, have looked once more since they are listed for a bell."""
    looked = """select count(*) from pg_stat_activity
                 where application_name = 'pgqueue worker' and datname = current_database()
                   and state = 'idle' and query ~ 'claim\\(|writers_open\\('"""
    for count in ("select count(*) from pgqueue.waiting", looked):
        eventually(lambda count=count: connection.execute(count).fetchone() == (workers,))


def marks(connection: psycopg.Connection[Any]) -> list[tuple[Any, ...]]:
    """What tasks wrote into the table `marks`, in order."""
    return connection.execute("select job_id, attempt, what from public.marks order by at").fetchall()


def lose(connection: psycopg.Connection[Any], job: Job | EnqueuedJob) -> None:
    """Has the lease of a running job expire, and a sweep see it."""
    attempt = "select attempts, status from pgqueue.jobs where job_id = %s"
    before = connection.execute(attempt, (job.job_id,)).fetchone()
    connection.execute(
        "update pgqueue.jobs set lease_expires_at = now() - interval '1 second' where job_id = %s", (job.job_id,)
    )

    def swept() -> bool:
        connection.execute("select pgqueue.sweep()")
        return connection.execute(attempt, (job.job_id,)).fetchone() != before

    eventually(swept)
