"""The executor: runs held attempts in its slots, in the event loop, in threads or in processes, and stops them."""

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pgqueue.attempt import LATE, SETTLED, Outcome, Released, Stop
from pgqueue.held import Held
from pgqueue.job import Job
from pgqueue.log import logger
from pgqueue.threads import Threads

if TYPE_CHECKING:
    from pgqueue.processes import Processes

_log: Final = logger("pgqueue.executor")
_WATCH: Final = 0.1
#: A run that has not ended so many seconds after it was told to stop is left to itself, and its slot is free again.
_PATIENCE_ASYNC: Final = 5.0
_PATIENCE_THREAD: Final = 0.3
_CANCEL_AGAIN: Final = 1.0
#: Seconds that the process of a task may take to start, and to import it, before its timeout counts. With BEGIN_WITHIN
#: fewer than those after which the sweep ends an attempt past its timeout.
_PROCESS_STARTS_WITHIN: Final = 4.0


if sys.version_info >= (3, 12):

    def _begun(
        attempt: Coroutine[Any, Any, Outcome], loop: asyncio.AbstractEventLoop, context: contextvars.Context
    ) -> "asyncio.Task[Outcome]":
        # It runs at once up to its first wait: what never waits need not pass through the loop.
        return asyncio.Task(attempt, loop=loop, context=context, eager_start=True)

else:

    def _begun(
        attempt: Coroutine[Any, Any, Outcome], loop: asyncio.AbstractEventLoop, context: contextvars.Context
    ) -> "asyncio.Task[Outcome]":
        return loop.create_task(attempt, context=context)


class Executor:
    """Runs attempts, at most `concurrency` at once, and tells `ended(held, outcome)` in the event loop, once for each.

    `timeout_of(queue)` gives the seconds that a job without a limit of its own may take. An attempt that was left to
    itself is in `abandoned` from before its outcome is told until it ends after all, which `gone(held)` tells.
    """

    def __init__(
        self,
        concurrency: int,
        *,
        timeout_of: Callable[[str], float],
        ended: Callable[[Held, Outcome], None],
        gone: Callable[[Held], None],
    ) -> None:
        """Run nothing yet; made within the event loop that it will use."""
        self._loop = asyncio.get_running_loop()
        self._concurrency = concurrency
        self._timeout_of = timeout_of
        self._tell = ended
        self._gone = gone
        self._threads = Threads(self._loop, self._run_blocking, self._ended)
        self._made_processes: Processes | None = None
        # Each job gets a copy: what one sets is not seen by the next.
        self._context = contextvars.copy_context()
        self._guard = threading.Lock()
        self._stopping: dict[Held, float] = {}
        self._watcher: asyncio.TimerHandle | None = None
        self.running: set[Held] = set()
        self.abandoned: set[Held] = set()

    @property
    def free(self) -> int:
        """How many more attempts may start."""
        return self._concurrency - len(self.running)

    def start(self, held: Held) -> None:
        """Begin an attempt."""
        self.running.add(held)
        if held.task.in_loop:
            task = _begun(held.run_async(), self._loop, self._context.copy())
            if task.done():
                self._ended_in_loop(held, task)
                return
            held.asyncio_task = task
            task.add_done_callback(partial(self._ended_in_loop, held))
            self._bound(held)
        else:
            # Made here, since both its thread and this one ask for it.
            held.made = Job(held.claimed, held.services)
            # Before its thread, which brings it forward when a process has begun the task.
            self._bound(held)
            self._threads.start(held)
        if self._watcher is None:
            self._watcher = self._loop.call_later(_WATCH, self._watch)

    def stop(self, held: Held, reason: Stop) -> None:
        """Tell an attempt to stop: an async task is cancelled, a process killed, a thread interrupted.

        A cancel request leaves threads alone: they see `job.cancelled`.
        """
        if held.outcome is not None or held.stop not in (None, Stop.CANCEL) or held.stop is reason:
            return
        held.stop = reason
        held.job.cancelled = True
        if held not in self.running:
            return
        self._halt(held)
        asynchronous = held.asyncio_task is not None
        if asynchronous or reason is not Stop.CANCEL:
            self._stopping[held] = time.monotonic() + (_PATIENCE_ASYNC if asynchronous else _PATIENCE_THREAD)

    def close(self) -> None:
        """Let go of idle threads and processes; what still runs is left to itself."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        self._threads.close()
        if self._made_processes is not None:
            self._made_processes.close()

    def _bound(self, held: Held) -> None:
        timeout_ms = held.claimed.timeout_ms
        held.timeout = self._timeout_of(held.claimed.queue) if timeout_ms is None else timeout_ms / 1000
        held.deadline = time.monotonic() + held.timeout - held.elapsed()
        if held.task.options.process:
            held.deadline += _PROCESS_STARTS_WITHIN

    def _ended_in_loop(self, held: Held, task: "asyncio.Task[Outcome]") -> None:
        # One that did not begin has no outcome.
        outcome = held.outcome
        if outcome is None:
            outcome = held.raised(asyncio.CancelledError()) if task.cancelled() else task.result()
        self._ended(held, outcome)

    @property
    def _processes(self) -> "Processes":
        # Its modules are loaded by those who have a task for it.
        from pgqueue.processes import Processes

        with self._guard:
            if self._made_processes is None:
                self._made_processes = Processes()
        return self._made_processes

    def _run_blocking(self, held: Held) -> Outcome:
        if not held.task.options.process:
            outcome = held.run(self._loop)
        else:
            outcome = self._processes.run(held) if held.begin() else LATE
        if held.tx is not None:
            outcome = held.tx.conclude(outcome)
        return outcome

    def _ended(self, held: Held, outcome: Outcome) -> None:
        try:
            self.running.remove(held)
        except KeyError:
            if held in self.abandoned:
                self.abandoned.discard(held)
                self._gone(held)
            return
        self._tell(held, outcome)

    def _halt(self, held: Held) -> None:
        if held.asyncio_task is not None:
            # Once it has begun, so that the task is told.
            self._loop.call_soon(held.asyncio_task.cancel)
        elif held.task.options.process:
            self._processes.interrupt(held)
        elif held.stop is not Stop.CANCEL:
            self._threads.interrupt(held)

    def _watch(self) -> None:
        now = time.monotonic()
        for held in [held for held in self.running if held.deadline <= now]:
            self.stop(held, Stop.TIMEOUT)
        for held, until in list(self._stopping.items()):
            if held not in self.running:
                del self._stopping[held]
            elif until <= now:
                del self._stopping[held]
                self._abandon(held)
            elif held.asyncio_task is not None and until - now < _PATIENCE_ASYNC - _CANCEL_AGAIN:
                held.asyncio_task.cancel()
        busy = self.running or self._stopping
        self._watcher = self._loop.call_later(_WATCH, self._watch) if busy else None

    def _abandon(self, held: Held) -> None:
        if held.stop is Stop.CANCEL:
            return
        held.abandoned = True
        self.running.discard(held)
        self.abandoned.add(held)
        _log.warning(
            "a task did not stop when told to; it is left to itself",
            job_id=str(held.job.job_id),
            job_type=held.job.job_type,
            reason=held.stop.value if held.stop else None,
        )
        match held.stop:
            case Stop.TIMEOUT:
                self._tell(held, held.timed_out())
            case Stop.SHUTDOWN:
                self._tell(held, Released(started=True))
            case _:
                self._tell(held, SETTLED)
