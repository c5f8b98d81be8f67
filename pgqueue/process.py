"""A worker that owns its process: signals, event loop, and an end that nothing can hold up."""

import asyncio
import gc
import os
import signal
import sys
import threading
from types import FrameType
from typing import Final, Protocol

from pgqueue.errors import PgqueueError
from pgqueue.log import logger
from pgqueue.settings import Settings
from pgqueue.supervisor import when_orphaned

_log: Final = logger("pgqueue.process")
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
    ending = _Ending(worker)
    when_orphaned(ending.begin)
    _collect_less()
    previous = {number: signal.signal(number, ending) for number in _SIGNALS} if _in_main_thread() else {}
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(worker.run())
    except PgqueueError as exc:
        _log.error("worker cannot work", error=str(exc))
        return exc.exit_code
    finally:
        ending.called_off()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if worker.recycle:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    return 0


def _collect_less() -> None:
    """Spare the garbage collector what it would look through in vain: all that was loaded, and jobs that are under way.

    With its usual threshold of 700 to 2,000 objects it looked through every batch of jobs several times: of no-ops a
    tenth to a fifth of the worker's time. Whoever has set a higher threshold, or switched it off, keeps that.
    """
    gc.freeze()
    if gc.isenabled() and 0 < gc.get_threshold()[0] < _YOUNG:
        gc.set_threshold(_YOUNG)


class _Ending:
    """Handles the signals that end a process."""

    def __init__(self, worker: Program) -> None:
        self._worker = worker
        self._timer: threading.Timer | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.begin()

    def begin(self) -> None:
        self._worker.request_stop()
        hurried = self._timer is not None
        self.called_off()
        self._timer = threading.Timer(_BEYOND + (0.0 if hurried else self._worker.settings.grace), _end)
        self._timer.daemon = True
        self._timer.start()

    def called_off(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def _end() -> None:
    sys.stderr.write("pgqueue: the worker did not end in time; ending its process\n")
    sys.stderr.flush()
    os._exit(1)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
