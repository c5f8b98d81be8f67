"""A fleet: worker processes of this machine, as many as `autoscale.decide` wants.

A process that is taken away is one without a job. Should it have claimed one in the meantime, it ends that first: its
grace is a day long. Only the end of the fleet itself cuts jobs short, after the grace that was set.
"""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from types import FrameType
from typing import Final

from pgqueue.autoscale import Decision, History, Policy, decide, remembered
from pgqueue.calls import WorkerLoad
from pgqueue.log import logger

_log: Final = logger("pgqueue.fleet")
_TICK: Final = 0.1
_LOOK_EVERY: Final = 5.0
_PATIENT: Final = 86400.0
#: A process that lived for less counts as one that cannot start; the pause before the next start doubles.
_LIVED: Final = 5.0
_LONGEST_PAUSE: Final = 30.0
_BEYOND_GRACE: Final = 6.0

#: By name: whether it is live in the database's eyes, and how many jobs it holds.
Seen = Mapping[str, tuple[bool, int]]
Measure = Callable[[list[str]], tuple[WorkerLoad, Seen]]


@dataclass(slots=True)
class _Member:
    name: str
    process: subprocess.Popen[bytes]
    started_at: float
    leaving: bool = False


@dataclass(slots=True)
class Fleet:
    """Runs `pgqueue worker` with `arguments` until SIGTERM or SIGINT.

    `measure` is given the names of our workers, and may raise: then everything stays as it is.
    """

    arguments: list[str]
    policy: Policy
    measure: Measure
    grace: float
    look_every: float = _LOOK_EVERY
    prefix: str = field(default_factory=lambda: f"auto-{secrets.token_hex(3)}")
    members: list[_Member] = field(default_factory=list)
    target: int = 0
    _number: int = 0
    _history: History = field(default_factory=History)
    _looked_at: float = float("-inf")
    _looking: "Future[tuple[WorkerLoad, Seen]] | None" = None
    _start_at: float = 0.0
    _pause: float = _TICK
    _reason: str = ""
    _fault: str = ""
    _signals: int = 0

    def run(self) -> int:
        """Run, and return 0 when all ended well after the signal."""
        self.target = self.policy.minimum
        previous = {number: signal.signal(number, self._on_stop) for number in (signal.SIGTERM, signal.SIGINT)}
        # Held open by this process alone; its end, however it comes, ends the others.
        reading, lifeline = os.pipe()
        try:
            while not self._signals:
                self._reap()
                self._look()
                self._fill(reading)
                time.sleep(_TICK)
            return self._end()
        finally:
            os.close(lifeline)
            os.close(reading)
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def active(self) -> list[_Member]:
        """Those that are not on their way out."""
        return [member for member in self.members if not member.leaving]

    def _fill(self, lifeline: int) -> None:
        if len(self.active) >= self.target or time.monotonic() < self._start_at:
            return
        for _ in range(self.target - len(self.active)):
            self._start(lifeline)

    def _start(self, lifeline: int) -> None:
        number, self._number = self._number, self._number + 1
        environment = {
            **os.environ,
            "PGQUEUE_GRACE": str(_PATIENT),
            "PGQUEUE_SUPERVISED": f"{number}:{lifeline}",
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "worker", *self.arguments, "--name", self.prefix],
            env=environment,
            pass_fds=(lifeline,),
            # A session of its own: Ctrl-C in a terminal reaches us alone, and they hear of it once.
            start_new_session=True,
        )
        self.members.append(_Member(f"{self.prefix}-{number}", process, time.monotonic()))

    def _reap(self) -> None:
        for member in list(self.members):
            code = member.process.poll()
            if code is None:
                continue
            self.members.remove(member)
            if member.leaving:
                continue
            now = time.monotonic()
            self._pause = _TICK if now - member.started_at >= _LIVED else min(self._pause * 2, _LONGEST_PAUSE)
            self._start_at = now + self._pause
            _log.warning("a worker ended; starting another", name=member.name, code=code, pause=round(self._pause, 1))

    def _look(self) -> None:
        """Measure in a thread, so that a database that hangs holds up neither signals nor restarts."""
        now = time.monotonic()
        if self._looking is None:
            if now - self._looked_at >= self.look_every:
                self._looked_at = now
                self._looking = _aside(self.measure, [member.name for member in self.members])
            return
        if not self._looking.done():
            return
        looking, self._looking = self._looking, None
        try:
            load, seen = looking.result()
        except Exception as exc:
            if str(exc) != self._fault:
                _log.warning("the queue cannot be measured; the number of workers stays", error=str(exc))
            self._fault = str(exc)
            return
        self._fault = ""
        self._follow(load, seen, now)

    def _follow(self, load: WorkerLoad, seen: Seen, now: float) -> None:
        ours = sum(live for live, _ in seen.values())
        load = load._replace(workers=max(load.workers - ours, 0) + len(self.active))
        decision = decide(load, self.target, self._history, now, self.policy)
        if decision.wanted < self.target:
            decision = self._take_away(decision, seen)
        if decision.wanted != self.target:
            _log.info("scaled", workers=decision.wanted, was=self.target, reason=decision.reason)
        elif decision.reason != self._reason:
            _log.debug("not scaled", workers=self.target, reason=decision.reason)
        self._reason = decision.reason
        self._history = remembered(self._history, decision, now)
        self.target = decision.wanted

    def _take_away(self, decision: Decision, seen: Seen) -> Decision:
        """Have workers without jobs end, the youngest first, and return what became of the decision."""
        idle = [member for member in reversed(self.active) if seen.get(member.name, (False, 1))[1] == 0]
        going = idle[: self.target - decision.wanted]
        for member in going:
            member.leaving = True
            member.process.send_signal(signal.SIGTERM)
        if not going:
            return Decision(self.target, "none", f"{decision.reason}, but every worker has a job")
        return Decision(self.target - len(going), "down", decision.reason)

    def _end(self) -> int:
        """Have all end; those that are not done within the grace cut their jobs short, and give them back."""
        heard = self._signals
        self._tell(signal.SIGTERM)
        deadline = time.monotonic() + self.grace
        hurried_at = 0.0
        codes: list[int] = []
        while self.members:
            for member in list(self.members):
                code = member.process.poll()
                if code is not None:
                    self.members.remove(member)
                    codes.append(code)
            now = time.monotonic()
            if not hurried_at and (now >= deadline or self._signals > heard):
                hurried_at = now
                self._tell(signal.SIGTERM)
            elif hurried_at and now - hurried_at > _BEYOND_GRACE:
                self._tell(signal.SIGKILL)
            time.sleep(_TICK)
        return int(any(codes))

    def _tell(self, number: int) -> None:
        for member in self.members:
            member.process.send_signal(number)

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _aside(measure: Measure, names: list[str]) -> "Future[tuple[WorkerLoad, Seen]]":
    future: Future[tuple[WorkerLoad, Seen]] = Future()

    def run() -> None:
        try:
            future.set_result(measure(names))
        except BaseException as exc:
            future.set_exception(exc)

    Thread(target=run, name="pgqueue-measure", daemon=True).start()
    return future
