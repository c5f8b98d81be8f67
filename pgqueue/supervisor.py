"""The supervisor: keeps several processes of the same command alive, restarts those that die, and ends with them."""

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from pgqueue.log import logger

_log: Final = logger("pgqueue.supervisor")
_VARIABLE: Final = "PGQUEUE_SUPERVISED"
_TICK: Final = 0.1
_LOOK_EVERY: Final = 0.5
#: A process that lived for less counts as one that cannot start; the pause before the next try doubles.
_LIVED: Final = 5.0
_SHORTEST: Final = 0.2
_LONGEST: Final = 30.0
_BEYOND_GRACE: Final = 6.0
_OF_NO_INTEREST: Final = ("__pycache__", "node_modules", "site-packages")


def supervised() -> int | None:
    """Return the number of this process among its supervisor's, from 0; None without a supervisor."""
    value = os.environ.get(_VARIABLE)
    return None if value is None else int(value.partition(":")[0])


#: What `when_orphaned` took out of the environment.
_kept: Final[list[str]] = []


def stay_supervised() -> None:
    """Tell the program that takes this process over that it has this process's supervisor."""
    for value in _kept:
        os.environ[_VARIABLE] = value


def when_orphaned(act: Callable[[], object]) -> None:
    """Call `act`, in a thread of its own, when this process's supervisor has ended."""
    # Out of the environment: programs that tasks start have no supervisor.
    value = os.environ.pop(_VARIABLE, None)
    if value is None:
        return
    _kept.append(value)
    lifeline = int(value.partition(":")[2])

    def wait() -> None:
        os.read(lifeline, 1)
        act()

    threading.Thread(target=wait, name="pgqueue-lifeline", daemon=True).start()


@dataclass(slots=True)
class _Seat:
    """One of the processes that are to run."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    pause: float = _SHORTEST
    #: When it is killed, if it has been told to end.
    kill_at: float = math.inf


@dataclass(slots=True)
class Supervisor:
    """Runs `count` processes of `command` (this one's by default) until SIGTERM or SIGINT, which it passes on.

    SIGHUP, or a change below one of `watched`, has them end and start anew. Those that have not ended `grace` and some
    seconds after they were told to are killed.
    """

    count: int
    grace: float
    command: list[str] = field(default_factory=lambda: [sys.executable, *sys.orig_argv[1:]])
    watched: Iterable[Path] = ()
    _signals: int = 0
    _anew: bool = False
    _seats: list[_Seat] = field(default_factory=list)

    def run(self) -> int:
        """Run, and return 0 when all processes ended well after the signal."""
        self._seats = [_Seat(number) for number in range(self.count)]
        handlers = {signal.SIGTERM: self._on_stop, signal.SIGINT: self._on_stop, signal.SIGHUP: self._on_anew}
        previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # Held open by this process alone; its end, however it comes, ends the others.
        reading, lifeline = os.pipe()
        try:
            return self._run(reading)
        finally:
            os.close(lifeline)
            os.close(reading)
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _run(self, lifeline: int) -> int:
        changes = _Changes(self.watched)
        codes = [0] * self.count
        told = 0
        while True:
            now = time.monotonic()
            while told < self._signals:
                told += 1
                self._end_all(self.grace if told == 1 else 0.0)
            for seat in self._seats:
                if seat.process is None:
                    if not told and now >= seat.start_at:
                        self._start(seat, lifeline)
                elif (code := seat.process.poll()) is not None:
                    codes[seat.number] = code
                    self._ended(seat, code)
                elif now >= seat.kill_at:
                    seat.process.kill()
            if told:
                if all(seat.process is None for seat in self._seats):
                    return max((abs(code) for code in codes), default=0) and 1
            elif self._anew or changes.seen():
                self._anew = False
                self._end_all(self.grace)
                for seat in self._seats:
                    # What kept it from starting may have been mended.
                    seat.start_at, seat.pause = now, _SHORTEST
            time.sleep(_TICK)

    def _start(self, seat: _Seat, lifeline: int) -> None:
        # A session of its own: Ctrl-C in a terminal reaches us alone, and they hear of it once.
        seat.process = subprocess.Popen(
            self.command,
            env={**os.environ, _VARIABLE: f"{seat.number}:{lifeline}"},
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        seat.started_at = time.monotonic()

    def _ended(self, seat: _Seat, code: int) -> None:
        seat.process, seat.kill_at = None, math.inf
        if self._signals:
            return
        now = time.monotonic()
        if code == 0 or now - seat.started_at >= _LIVED:
            seat.pause = _SHORTEST
        else:
            seat.pause = min(seat.pause * 2, _LONGEST)
        seat.start_at = now + seat.pause * random.uniform(0.8, 1.2)
        if code:
            _log.warning("a worker process ended; starting another", number=seat.number, code=code, pause=seat.pause)

    def _end_all(self, grace: float) -> None:
        kill_at = time.monotonic() + grace + _BEYOND_GRACE
        for seat in self._seats:
            if seat.process is not None:
                seat.process.send_signal(signal.SIGTERM)
                seat.kill_at = min(seat.kill_at, kill_at)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        # No more: it may come in the middle of a start.
        self._signals += 1

    def _on_anew(self, number: int, frame: FrameType | None) -> None:
        self._anew = True


class _Changes:
    """Sees when a Python file below some directories changes."""

    def __init__(self, watched: Iterable[Path]) -> None:
        self._roots = list(watched)
        self._known = self._state()
        self._looked_at = time.monotonic()

    def seen(self) -> bool:
        if not self._roots or time.monotonic() - self._looked_at < _LOOK_EVERY:
            return False
        self._looked_at = time.monotonic()
        before, self._known = self._known, self._state()
        return self._known != before

    def _state(self) -> dict[str, float]:
        state: dict[str, float] = {}
        for root in self._roots:
            for directory, names, files in os.walk(root):
                if "pyvenv.cfg" in files:
                    names.clear()
                    continue
                names[:] = [name for name in names if not name.startswith(".") and name not in _OF_NO_INTEREST]
                for file in files:
                    if file.endswith(".py"):
                        path = os.path.join(directory, file)
                        try:
                            state[path] = os.stat(path).st_mtime
                        except OSError:
                            continue
        return state
