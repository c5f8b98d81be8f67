"""The processes in which `process=True` tasks run: one job at a time each, killed when the job must stop.

Each leads a process group, so that programs which a task has started end with it.
"""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, spawn
from multiprocessing.connection import Connection
from typing import Any, Final, NoReturn, TypeAlias

from pgqueue.attempt import SETTLED, Attempt, Cancelled, Outcome, Released, Stop
from pgqueue.errors import Cancel, ConfigError
from pgqueue.held import Held
from pgqueue.job import SENT, ClaimedJob, Job, Once, Transaction
from pgqueue.tasks import Task

_Pipe: TypeAlias = "Connection[Any, Any]"
_GROUPS: Final = hasattr(os, "killpg")


class Child:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        """Start it."""
        self.pipe, theirs = Pipe()
        # Closed by the end of this process, however it ends, and read by the child's watchdog.
        reading, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno()), str(reading)],
                pass_fds=(theirs.fileno(), reading),
                stdin=subprocess.DEVNULL,
                process_group=0 if _GROUPS else None,
            )
        finally:
            theirs.close()
            os.close(reading)
        self.pipe.send(sys.path)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    def kill(self) -> None:
        """End it at once, with what it has started."""
        # Nobody has waited for it yet, so its number is still its group's.
        if _GROUPS and self.process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> int:
        """End it if it still lives, with what it has started, and return its exit code."""
        self.pipe.close()
        self.kill()
        os.close(self._lifeline)
        return self.process.wait()


class Processes:
    """Runs held attempts in child processes. `run` blocks a thread; `interrupt` may come from any other."""

    def __init__(self) -> None:
        """Start no process yet."""
        self._idle: list[Child] = []
        self._guard = threading.Lock()
        self._closed = False

    def run(self, held: Held) -> Outcome:
        """Run an attempt that has begun in a process and return its outcome."""
        child = self._take()
        with self._guard:
            held.process = child
            stopped = held.stop is not None
        try:
            if not stopped:
                child.pipe.send(_request(held))
            while not stopped:
                kind, value = child.pipe.recv()
                if kind == "progress":
                    held.job.forward(value)
                    continue
                if kind == "begins":
                    held.deadline = min(held.deadline, time.monotonic() + held.timeout)
                    continue
                outcome = value if kind == "outcome" else held.raised(ConfigError(value))
                return self._give_back(held, child, outcome)
        except (EOFError, OSError):
            pass
        except Exception as exc:
            self._drop(held, child)
            return held.raised(exc)
        return _died(held, self._drop(held, child))

    def interrupt(self, held: Held) -> None:
        """Kill the process that runs an attempt."""
        with self._guard:
            if held.process is not None:
                held.process.kill()

    def close(self) -> None:
        """End all processes that run nothing."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for child in idle:
            child.close()

    def _take(self) -> Child:
        while True:
            with self._guard:
                child = self._idle.pop() if self._idle else None
            if child is None:
                return Child()
            if child.alive:
                return child
            child.close()

    def _give_back(self, held: Held, child: Child, outcome: Outcome) -> Outcome:
        with self._guard:
            held.process = None
            keep = held.stop is None and not self._closed
            if keep:
                self._idle.append(child)
        if not keep:
            child.close()
        return outcome

    def _drop(self, held: Held, child: Child) -> int | None:
        with self._guard:
            held.process = None
        return child.close()


def _died(held: Held, code: int | None) -> Outcome:
    match held.stop:
        case Stop.TIMEOUT:
            return held.timed_out()
        case Stop.CANCEL:
            return Cancelled(held.record(Cancel("cancelled on request")))
        case Stop.SHUTDOWN:
            return Released(started=True)
        case Stop.LOST:
            return SETTLED
    end = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
    return held.raised(ChildProcessError(f"the process of the task ended with {end}"))


def _request(held: Held) -> tuple[dict[str, Any] | None, str, str, ClaimedJob, int | None]:
    function = held.task.function
    # What is defined in the program itself is found by running its file, as multiprocessing does.
    main = spawn.get_preparation_data("pgqueue") if function.__module__ == "__main__" else None
    return main, function.__module__, function.__qualname__, held.claimed, held.task.options.memory_limit


# In the child ---------------------------------------------------------------------------------------------------------


class _ChildServices:
    """What a job in a process of its own can ask: progress goes through the pipe, the rest needs the worker's own."""

    def __init__(self, pipe: _Pipe) -> None:
        self._pipe = pipe

    def report(self, job: Job, progress: bytes) -> Awaitable[None]:
        self._pipe.send(("progress", progress))
        return SENT

    def transaction(self, job: Job) -> Transaction:
        raise ConfigError("job.connection() is not there for process tasks: the transaction is the worker's")

    def once(self, job: Job, key: str) -> Once:
        raise ConfigError("job.once() is not there for process tasks: the transaction is the worker's")


_START: Final = "import sys; from pgqueue.processes import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"


def serve(pipe_fd: int, lifeline: int) -> None:
    """Run the tasks that come through the pipe until it closes; the lifeline closes when the worker has ended."""
    # The worker decides when its children end, also at Ctrl-C in a terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), daemon=True).start()
    pipe: _Pipe = Connection(pipe_fd)
    with suppress(EOFError, OSError):
        sys.path[:] = pipe.recv()
        while True:
            pipe.send(_run(pipe, *pipe.recv()))


def _end_with_parent(lifeline: int) -> NoReturn:
    os.read(lifeline, 1)
    if _GROUPS and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _run(
    pipe: _Pipe,
    main: dict[str, Any] | None,
    module: str,
    name: str,
    claimed: ClaimedJob,
    memory_limit: int | None,
) -> tuple[str, Any]:
    try:
        if main is not None:
            spawn.prepare(main)
        task: Any = importlib.import_module(module)
        for part in name.split("."):
            task = getattr(task, part)
    except BaseException as exc:
        return "fault", f"{module}.{name} cannot be imported in the task's process: {type(exc).__name__}: {exc}"
    if not isinstance(task, Task):
        return "fault", f"{module}.{name} is not the task: a process task must be found by its name in its module"
    attempt = Attempt(claimed, task, _ChildServices(pipe))
    pipe.send(("begins", None))
    with _limited(memory_limit):
        return "outcome", asyncio.run(attempt.run_async()) if task.is_async else attempt.run()


@contextmanager
def _limited(size: int | None) -> Iterator[None]:
    """Let the process use `size` bytes of data at most, where the system can limit that."""
    if size is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
