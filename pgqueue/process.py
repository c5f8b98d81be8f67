"""A worker that owns its process: signals, event loop, and an end that nothing can hold up."""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Final, Protocol, Self, TypeVar

from pgqueue.errors import ConfigError, PgqueueError
from pgqueue.log import logger
from pgqueue.settings import Settings
from pgqueue.supervisor import stay_supervised, when_orphaned

_log: Final = logger("pgqueue.process")
T = TypeVar("T")
#: Seconds beyond the grace after which the process ends whatever hangs.
_BEYOND: Final = 4.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
#: More than the objects of as many jobs as a worker holds at once.
_YOUNG: Final = 20_000


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's when it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Program(Protocol):
    """What a process runs: a worker, or maintenance alone."""

    @property
    def settings(self) -> Settings:
        """Those it was made with; `grace` is how long it may take to end."""

    @property
    def recycle(self) -> bool:
        """Whether the process must start anew when it has ended."""

    async def run(self) -> None:
        """Work until asked to stop; raises a PgqueueError if it cannot."""

    def request_stop(self) -> None:
        """Ask it to stop; from any thread and from signal handlers."""


def run_process(worker: Program) -> int:
    """Run a worker until SIGTERM or SIGINT and return the exit code: 0 when it drained, else its error's.

    The second signal hurries. The process ends within the grace and 5 s of the first one, even if the database is gone
    or a task blocks the event loop.
    """
    with Ending(worker) as ending:
        when_orphaned(ending.begin)
        _collect_less()
        try:
            with suppress(RuntimeError):
                asyncio.get_running_loop()
                raise ConfigError(
                    "a worker that owns its process cannot run within an event loop: await app.worker().run()"
                )
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                run_through(runner.get_loop(), worker.run())
        except PgqueueError as exc:
            _log.error("worker cannot work", error=str(exc))
            return exc.exit_code
    if worker.recycle:
        stay_supervised()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    return 0


def run_through(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in the loop to its end, whatever tasks do, and return what it returns.

    Raises what it raises, and a PgqueueError where a task has cancelled it.
    """
    running = loop.create_task(work)
    while True:
        try:
            return loop.run_until_complete(running)
        except (SystemExit, KeyboardInterrupt, RuntimeError) as exc:
            if running.done() or loop.is_closed():
                raise
            # What a task started, such as a subtask or a callback, raises this past the task, or has stopped the loop.
            _log.error("a task tried to end the process; it goes on", error=f"{type(exc).__name__}: {exc}")
        except asyncio.CancelledError:
            raise PgqueueError("a task has cancelled the worker itself; the process ends, to be started anew") from None


def _collect_less() -> None:
    """Spare the garbage collector what it would look through in vain: all that was loaded, and jobs that are under way.

    With its usual threshold of 700 to 2,000 objects it looked through every batch of jobs several times: of no-ops a
    tenth to a fifth of the worker's time. Whoever has set a higher threshold, or switched it off, keeps that.
    """
    gc.freeze()
    if gc.isenabled() and 0 < gc.get_threshold()[0] < _YOUNG:
        gc.set_threshold(_YOUNG)


class Ending:
    """Within its block SIGTERM and SIGINT stop a worker, and the process ends within the grace and 5 s of that.

    Whatever hangs: a task may block the event loop, and closing the loop waits for tasks that cannot be cancelled.
    """

    def __init__(self, worker: Program) -> None:
        """Change nothing yet."""
        self._worker = worker
        self._timer: threading.Timer | None = None
        self._previous: dict[int, Any] = {}
        #: How many have come.
        self.signals = 0

    def __enter__(self) -> Self:
        """Handle the signals."""
        if _in_main_thread():
            self._previous = {number: signal.signal(number, self) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the signals, and the process, to what was before."""
        self._call_off()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take a signal."""
        self.signals += 1
        self.begin()

    def begin(self) -> None:
        """Stop the worker; the second time, hurry. May be called from any thread."""
        self._worker.request_stop()
        hurried = self._timer is not None
        self._call_off()
        self._timer = threading.Timer(_BEYOND + (0.0 if hurried else self._worker.settings.grace), _end)
        self._timer.daemon = True
        self._timer.start()

    def _call_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Forking(threading.local):
    """Lets what a task forks end by the signals that the worker handles, however early they come."""

    blocked: Iterable[int] | None = None

    def before(self) -> None:
        if any(isinstance(signal.getsignal(number), Ending) for number in _SIGNALS):
            self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)

    def after(self) -> None:
        if self.blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
            self.blocked = None

    def after_in_child(self) -> None:
        for number in _SIGNALS:
            if isinstance(signal.getsignal(number), Ending):
                signal.signal(number, signal.SIG_DFL)
        self.after()


if hasattr(os, "register_at_fork"):
    _forking: Final = _Forking()
    os.register_at_fork(before=_forking.before, after_in_parent=_forking.after, after_in_child=_forking.after_in_child)


def _end() -> None:
    sys.stderr.write("pgqueue: the worker did not end in time; ending its process\n")
    sys.stderr.flush()
    os._exit(1)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
