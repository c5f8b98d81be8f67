"""Processes that the benchmark starts: workers as a user would start them, and clients that begin together."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Final

from pgqueue.bench import statements
from pgqueue.bench.scratch import Database
from pgqueue.errors import PgqueueError
from pgqueue.programs import free_port, is_free

APP: Final = "pgqueue.bench.tasks:app"
_PATIENCE: Final = 60.0
_POLL: Final = 0.02


class BenchError(PgqueueError):
    """Something that was measured did not work."""

    problem_type = "bench-failed"
    title = "The benchmark failed"


def _environment(database: Database, **settings: str) -> dict[str, str]:
    """Return this process's environment with the scratch database in place of the user's."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PGQUEUE_LISTEN_DSN", "PGQUEUE_DSN")}
    return {**kept, "PGQUEUE_DSN": database.dsn, "PGQUEUE_LOG_LEVEL": "warning", **settings}


@dataclass(slots=True)
class _Process:
    popen: "subprocess.Popen[str]"
    log: IO[str]

    def complaint(self) -> str:
        """Return the end of what it wrote to stderr."""
        self.log.seek(0)
        return self.log.read()[-2000:].strip()

    def end(self) -> None:
        """Wait for its end, or bring it about."""
        try:
            self.popen.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.log.close()


def _start(arguments: Sequence[str], environment: dict[str, str], *, talks: bool = False) -> _Process:
    log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 (closed by `end`)
    popen = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env=environment,
        stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
        stdout=subprocess.PIPE if talks else subprocess.DEVNULL,
        stderr=log,
        text=True,
    )
    return _Process(popen, log)


@contextmanager
def workers(
    database: Database, count: int = 1, *, concurrency: int | None = None, wake: str = "notify"
) -> Iterator[list[int]]:
    """Run `pgqueue worker` processes for as long as the block lasts; give their ids once all have registered."""
    arguments = ["pgqueue", "worker", APP]
    if concurrency is not None:
        arguments += ["--concurrency", str(concurrency)]
    started: list[_Process] = []
    try:
        for _ in range(count):
            started.append(_start(arguments, _environment(database, PGQUEUE_WAKE=wake)))
        pids = [process.popen.pid for process in started]
        with database.connection() as connection:
            wait_until(
                lambda: statements.scalar(connection, statements.WORKERS_READY, pids=pids) == count,
                "the workers registered",
                started,
            )
        yield pids
        for process in started:
            if process.popen.poll() is not None:
                raise BenchError(f"a worker ended: {process.complaint()}")
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.popen.terminate()
        for process in started:
            process.end()


@contextmanager
def api(database: Database) -> Iterator[tuple[int, int]]:
    """Run the REST API for as long as the block lasts; give its process id and its port once it answers."""
    port = free_port()
    process = _start(["pgqueue", "serve", "--port", str(port), "--no-maintenance"], _environment(database))
    try:
        wait_until(lambda: not is_free(port), "the API answered", [process])
        yield process.popen.pid, port
    finally:
        with suppress(ProcessLookupError):
            process.popen.terminate()
        process.end()


class Clients:
    """Client processes that are connected and wait for the word."""

    def __init__(self, started: list[_Process]) -> None:
        """Wait until each is ready."""
        self._started = started
        for process in started:
            self._line(process)

    def run(self) -> list[dict[str, Any]]:
        """Let them begin and return what each did."""
        for process in self._started:
            assert process.popen.stdin is not None
            process.popen.stdin.write("go\n")
            process.popen.stdin.flush()
        answers: list[dict[str, Any]] = [json.loads(self._line(process)) for process in self._started]
        return answers

    def _line(self, process: _Process) -> str:
        assert process.popen.stdout is not None
        line = process.popen.stdout.readline()
        if not line:
            raise BenchError(f"a client ended: {process.complaint()}")
        return line


@contextmanager
def clients(database: Database, count: int, role: str, **told: object) -> Iterator[Clients]:
    """Start client processes of a role (`child`) for as long as the block lasts."""
    started: list[_Process] = []
    try:
        for _ in range(count):
            process = _start(["pgqueue.bench.child"], _environment(database), talks=True)
            started.append(process)
            assert process.popen.stdin is not None
            process.popen.stdin.write(json.dumps({"role": role, "dsn": database.dsn, **told}) + "\n")
            process.popen.stdin.flush()
        yield Clients(started)
    except BaseException:
        for process in started:
            process.popen.kill()
        raise
    finally:
        for process in started:
            with suppress(OSError):
                process.popen.communicate()
            process.end()


def wait_until(
    condition: Callable[[], bool],
    what: str,
    started: Sequence[_Process] = (),
    *,
    seconds: float = _PATIENCE,
    every: float = _POLL,
) -> None:
    """Return when a condition holds; raises BenchError when a process ends meanwhile, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in started:
            if process.popen.poll() is not None:
                raise BenchError(f"a process ended before {what}: {process.complaint()}")
        if time.monotonic() > deadline:
            raise BenchError(f"{seconds:g} s went by before {what}")
        time.sleep(every)
