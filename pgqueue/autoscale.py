"""Autoscaling: how many workers a measured state of the queue asks for, and a pool of worker processes that follows.

`decide` is the rule, a pure function. It adds workers while jobs pile up, wait long or keep all slots busy, and takes
some away while little waits or little is done, but never so many that the opposite rule would hold at once.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from pgqueue.calls import WorkerLoad
from pgqueue.errors import ConfigError

Direction = Literal["up", "down", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The numbers of the rule: jobs per worker, seconds, parts of 1, workers."""

    minimum: int = 2
    maximum: int = 100
    depth_high: float = 100
    depth_low: float = 10
    latency_high: float = 30
    utilization_high: float = 0.9
    utilization_low: float = 0.2
    #: Workers are taken away only if those that stay would be busy for no larger part of their time.
    utilization_after: float = 0.7
    step: int = 2
    step_over_soft_limit: int = 4
    up_cooldown: float = 30
    down_cooldown: float = 300

    def __post_init__(self) -> None:
        if not 0 <= self.minimum <= self.maximum:
            raise ConfigError(f"{self.minimum} to {self.maximum} workers are no bounds: 0 <= minimum <= maximum")


@dataclass(frozen=True, slots=True)
class History:
    """When the number of workers was last changed, in seconds of any clock that only goes forward."""

    changed_up_at: float = -math.inf
    changed_down_at: float = -math.inf


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers there should be, and why."""

    wanted: int
    direction: Direction
    reason: str


def decide(load: WorkerLoad, workers: int, history: History, now: float, policy: Policy) -> Decision:
    """Return how many workers there should be, of which `workers` are there; `load.workers` shares the jobs.

    Fewer than the minimum are made good at once, whatever the cooldowns say.
    """
    if workers < policy.minimum:
        return Decision(policy.minimum, "up", f"{workers} of at least {policy.minimum} workers are there")
    if workers > policy.maximum:
        return Decision(policy.maximum, "down", f"{workers} workers are more than {policy.maximum}")
    if why := _why_more(load, policy):
        size = policy.step_over_soft_limit if load.pending > load.soft_limit else policy.step
        wait = history.changed_up_at + policy.up_cooldown - now
        return _changed(workers, min(workers + size, policy.maximum), "up", why, wait, "the maximum is reached")
    if why := _why_fewer(load, policy):
        wanted = max(workers - policy.step, policy.minimum)
        if not _bearable(load, workers - wanted, policy):
            return Decision(workers, "none", f"{why}, but fewer workers would be too busy")
        wait = max(history.changed_down_at, history.changed_up_at) + policy.down_cooldown - now
        return _changed(workers, wanted, "down", why, wait, "the minimum is reached")
    return Decision(workers, "none", "the load suits the workers")


def _why_more(load: WorkerLoad, policy: Policy) -> str | None:
    if load.pending > policy.depth_high * load.workers:
        return f"{load.pending} jobs wait for {load.workers} workers"
    if load.pending > 0 and load.processing_seconds > policy.latency_high:
        # Without jobs that wait, more workers would end none of them sooner.
        return f"jobs wait while others take {load.processing_seconds:.0f} s"
    if load.utilization > policy.utilization_high:
        return f"workers are busy for {load.utilization:.0%} of the time"
    return None


def _why_fewer(load: WorkerLoad, policy: Policy) -> str | None:
    if load.pending < policy.depth_low * load.workers:
        return f"{load.pending} jobs wait for {load.workers} workers"
    if load.utilization < policy.utilization_low:
        return f"workers are busy for {load.utilization:.0%} of the time"
    return None


def _bearable(load: WorkerLoad, fewer: int, policy: Policy) -> bool:
    left = load.workers - fewer
    if left <= 0:
        return load.pending == 0 and load.running == 0
    return (
        load.utilization * load.workers <= policy.utilization_after * left and load.pending <= policy.depth_high * left
    )


def _changed(workers: int, wanted: int, direction: Direction, why: str, wait: float, bound: str) -> Decision:
    if wanted == workers:
        return Decision(workers, "none", f"{why}; {bound}")
    if wait > 0:
        return Decision(workers, "none", f"{why}; the last change was too recently, {wait:.0f} s are left")
    return Decision(wanted, direction, why)


def remembered(history: History, decision: Decision, now: float) -> History:
    """Return the history after a decision was followed."""
    match decision.direction:
        case "up":
            return History(now, history.changed_down_at)
        case "down":
            return History(history.changed_up_at, now)
        case _:
            return history


def report(load: WorkerLoad, policy: Policy | None = None) -> Mapping[str, Any]:
    """Return what GET /admin/autoscale answers: `value` is the number of workers that there should be next.

    It knows no cooldowns: KEDA, HPA and whoever else follows it have their own.
    """
    policy = policy or Policy()
    decision = decide(load, load.workers, History(), 0.0, policy)
    return {
        "value": decision.wanted,
        "direction": decision.direction,
        "reason": decision.reason,
        "load": load._asdict(),
        "policy": asdict(policy),
    }


DEFAULT: Final = Policy()
