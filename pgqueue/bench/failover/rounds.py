"""The rounds: lose the primary, promote, take it back."""

import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from pgqueue.bench.failover import load
from pgqueue.bench.failover.pair import Pair, pair

Fault = Literal["killed", "hung"]
FAULTS: Final[Sequence[Fault]] = ("killed", "hung")
#: What it takes somebody, or something, to decide that the primary is lost, in seconds.
DECIDED_AFTER: Final = 0.5
_BETWEEN: Final = 2.0
_ON_ITS_WAY: Final = 0.05


class Servers(Protocol):
    """What can lose its primary."""

    @property
    def dsn(self) -> str:
        """The DSN of all of them."""

    def lose(self, fault: Fault) -> tuple[float, float]:
        """Lose the primary; when it was lost, and when the other one was promoted."""

    def restore(self) -> None:
        """Have a primary and a standby in sync again."""


@dataclass(frozen=True, slots=True)
class Round:
    """One loss of the primary; times in seconds from the fault on."""

    fault: Fault
    promoted: float
    accepted: float
    completed: float

    @property
    def since_promotion(self) -> float:
        """From the promotion to the first job that was accepted."""
        return max(0.0, self.accepted - self.promoted)


class ByHand:
    """A pair whose standby is promoted by hand."""

    def __init__(self, servers: Pair) -> None:
        self._pair = servers

    @property
    def dsn(self) -> str:
        """The DSN of both."""
        return self._pair.dsn

    def lose(self, fault: Fault) -> tuple[float, float]:
        """Kill or stop the primary, and promote its standby; the promotion counts from its beginning."""
        if fault == "killed":
            self._pair.primary.kill()
        else:
            self._pair.primary.signal(signal.SIGSTOP)
        lost = time.time()
        time.sleep(DECIDED_AFTER)
        began = time.time()
        self._pair.fail_over()
        return lost, began

    def restore(self) -> None:
        """Fence the lost one off, and have it follow."""
        self._pair.standby.kill()
        self._pair.rejoin()


def play(servers: Servers, faults: Sequence[Fault], told: Callable[[str], None]) -> dict[str, Any]:
    """Play a round for each fault under load, and return what was found."""
    load.prepare(servers.dsn)
    rounds: list[Round] = []
    with load.workers(servers.dsn):
        producers = load.Producers(servers.dsn)
        try:
            for number, fault in enumerate(faults, 1):
                producers.first_after(time.time())
                time.sleep(_BETWEEN)
                rounds.append(_round(servers, producers, fault))
                told(
                    f"{number}/{len(faults)} {fault}: no job accepted for {rounds[-1].accepted:.2f} s, none completed"
                    f" for {rounds[-1].completed:.2f} s"
                )
                servers.restore()
        finally:
            producers.stop()
        load.drained(servers.dsn)
    return {"rounds": [asdict(one) for one in rounds], **summary(rounds), **load.verdict(servers.dsn, producers)}


def _round(servers: Servers, producers: load.Producers, fault: Fault) -> Round:
    lost, promoted = servers.lose(fault)
    # What was on its way when the primary was lost is no service.
    accepted = producers.first_after(lost + _ON_ITS_WAY)
    completed = load.first_completed(servers.dsn, accepted)
    return Round(fault, promoted - lost, accepted - lost, completed - lost)


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return medians and the worst of each fault."""
    told: dict[str, Any] = {}
    for fault in FAULTS:
        mine = [one for one in rounds if one.fault == fault]
        figures = {
            "seconds without service": [one.accepted for one in mine],
            "seconds from promotion to service": [one.since_promotion for one in mine],
            "seconds until a job is completed": [one.completed for one in mine],
        }
        told[fault] = {
            name: {"rounds": len(values), "median": round(statistics.median(values), 3), "worst": round(max(values), 3)}
            for name, values in figures.items()
            if values
        }
    return {name: figures for name, figures in told.items() if figures}


def by_hand(folder: Path, faults: Sequence[Fault], told: Callable[[str], None]) -> dict[str, Any]:
    """Play rounds on a pair in a folder."""
    with pair(folder) as servers:
        return play(ByHand(servers), faults, told)
