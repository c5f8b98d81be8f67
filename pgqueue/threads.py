"""The threads in which sync tasks run: made when needed, replaced when one is stuck."""

import asyncio
import contextvars
import ctypes
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from pgqueue.attempt import Interrupted, Outcome
from pgqueue.held import Held


class Threads:
    """Runs held attempts in threads and tells `ended(held, outcome)` in the event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, run: Callable[[Held], Outcome], ended: Callable[[Held, Outcome], None]
    ) -> None:
        """Start no thread yet. `run` runs an attempt in its thread."""
        self._loop = loop
        self._run_attempt = run
        self._ended = ended
        self._waiting: SimpleQueue[Held | None] = SimpleQueue()
        self._results: deque[tuple[Held, Outcome]] = deque()
        self._told = False
        self._idle = 0
        self._guard = threading.Lock()
        self.count = 0

    def start(self, held: Held) -> None:
        """Run an attempt in a thread that is free, or a new one."""
        with self._guard:
            if self._idle > 0:
                self._idle -= 1
                spawn = False
            else:
                spawn = True
                self.count += 1
        self._waiting.put(held)
        if spawn:
            threading.Thread(target=self._work, name="pgqueue-task", daemon=True).start()

    def interrupt(self, held: Held) -> None:
        """Raise Interrupted in the thread of an attempt; it ends at its next Python instruction.

        The thread takes no other job afterwards, so the exception cannot meet the wrong one.
        """
        with self._guard:
            if held.thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(held.thread), ctypes.py_object(Interrupted))

    def close(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        with self._guard:
            for _ in range(self._idle):
                self._waiting.put(None)
            self._idle = 0

    def _work(self) -> None:
        try:
            while (held := self._waiting.get()) is not None:
                if not self._one(held):
                    return
                del held
        finally:
            with self._guard:
                self.count -= 1

    def _one(self, held: Held) -> bool:
        """Run one attempt; False: this thread may still be interrupted and must end."""
        told = False
        try:
            held.thread = threading.get_ident()
            # A context of its own, so that what one job sets is not seen by the next.
            outcome = contextvars.Context().run(self._run_attempt, held)
            with self._guard:
                held.thread = None
                reusable = held.stop is None
                if reusable:
                    self._idle += 1
            told = True
            self._tell(held, outcome)
            return reusable
        except BaseException as exc:
            # An Interrupted that came after the task had ended, or a fault of ours: the slot comes free all the same.
            if not told:
                self._tell(held, held.raised(exc))
            return False

    def _tell(self, held: Held, outcome: Outcome) -> None:
        self._results.append((held, outcome))
        if not self._told:
            self._told = True
            with suppress(RuntimeError):  # The loop is closed: nobody is left to be told.
                self._loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._told = False
        while self._results:
            self._ended(*self._results.popleft())
