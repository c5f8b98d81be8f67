"""The sample load of `up --demo`: jobs that succeed, fail and come back, wait, hurry, and are given up."""

import random
from collections.abc import Callable
from typing import Any, Final

Entry = dict[str, Any]

_SUBJECTS: Final = ("Your order is on its way", "Reset your password", "Your weekly report")
_PEOPLE: Final = ("ada", "grace", "edsger", "barbara", "donald")
_POLICY: Final = {"base_delay_ms": 1500, "max_delay_ms": 6000, "backoff_multiplier": 2, "jitter": True}


def _echo(chance: random.Random) -> Entry:
    payload = {"order": chance.randrange(1000, 10_000)}
    return {"job_type": "echo", "payload": payload, "priority": chance.choice(("critical", "high", "normal", "low"))}


def _noop(chance: random.Random) -> Entry:
    return {"job_type": "noop", "priority": "low"}


def _sleep(chance: random.Random) -> Entry:
    return {"job_type": "sleep", "payload": {"seconds": round(chance.uniform(0.3, 4), 1)}}


def _later(chance: random.Random) -> Entry:
    return _echo(chance) | {"delay": round(chance.uniform(2, 10), 1)}


def _flaky(chance: random.Random) -> Entry:
    return {"job_type": "flaky", "payload": {"times": chance.choice((1, 1, 2))}, "retry_policy": _POLICY}


def _refused(chance: random.Random) -> Entry:
    return {"job_type": "fail", "payload": {"message": "the card was declined", "retryable": False}}


def _hopeless(chance: random.Random) -> Entry:
    payload = {"message": f"{chance.choice(_PEOPLE)}.example does not answer"}
    return {"job_type": "fail", "payload": payload, "max_retries": 1, "retry_policy": _POLICY}


_MIXTURE: Final[tuple[tuple[Callable[[random.Random], Entry], int], ...]] = (
    (_echo, 40),
    (_noop, 20),
    (_sleep, 12),
    (_later, 8),
    (_flaky, 8),
    (_refused, 3),
    (_hopeless, 3),
)


def opening() -> list[Entry]:
    """Return one job of each kind, so that a demo shows everything within seconds."""
    chance = random.Random()
    return [make(chance) for make, _ in _MIXTURE]


def batch(seconds: float, per_second: float) -> list[Entry]:
    """Return the jobs that arrive in a span of time at a mean rate, as chance wants it."""
    chance = random.Random()
    # Arrivals that know nothing of each other: exponential gaps.
    arrivals, at = 0, chance.expovariate(per_second)
    while at < seconds:
        arrivals, at = arrivals + 1, at + chance.expovariate(per_second)
    makers, weights = zip(*_MIXTURE, strict=True)
    return [make(chance) for make in chance.choices(makers, weights, k=arrivals)]
