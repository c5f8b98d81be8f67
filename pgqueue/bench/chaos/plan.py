"""What is injected when, all of it from a seed: the same seed, kinds and seconds make the same plan."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Faults of the server, of which one happens at a time.
SERVER: Final = (
    "server stopped", "server killed", "backend killed", "backends terminated", "connections exhausted", "slow commits",
    "disk full", "read-only", "statement timeout", "idle timeout", "long transaction", "partition missing",
)  # fmt: skip
#: Faults of everything else, beside those.
CLIENTS: Final = (
    "worker killed", "worker stopped", "worker terminated", "API killed", "PgBouncer killed", "network cut",
    "network silent", "network slow", "network half-open", "clock off", "bulk cancel", "bulk retry", "queue paused",
)  # fmt: skip
LANES: Final = {"server": SERVER, "clients": CLIENTS}


@dataclass(frozen=True, slots=True)
class Injection:
    """A fault that begins `at` seconds after the start; `seconds` is how long it lasts where that is to be chosen."""

    at: float
    lane: str
    kind: str
    seconds: float
    draw: float


def plan(seed: int, seconds: float, kinds: Sequence[str], *, every: float = 11.0) -> list[Injection]:
    """Return the plan of a run: every kind as often as any other, in an order that changes from round to round.

    every: about how many seconds lie between two beginnings in one lane.
    """
    injections: list[Injection] = []
    for lane, known in LANES.items():
        chance = random.Random(f"{seed} {lane}")
        of_lane = [kind for kind in known if kind in kinds]
        if not of_lane:
            continue
        rounds = max(1, int(seconds / every / len(of_lane)))
        slot = seconds / (rounds * len(of_lane))
        order: list[str] = []
        for _ in range(rounds):
            order += chance.sample(of_lane, len(of_lane))
        for place, kind in enumerate(order):
            at = (place + chance.uniform(0.0, 0.3)) * slot
            injections.append(Injection(at, lane, kind, chance.uniform(0.5, 1.0), chance.random()))
    return sorted(injections, key=lambda injection: injection.at)
