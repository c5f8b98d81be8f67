"""What a worker knows of a job that it holds: the attempt, its lease, and how it is being run."""

import asyncio
from typing import Any, Final

from pgqueue.attempt import Attempt, Outcome

_MICROSECONDS: Final = 1e-6


class Held(Attempt, eq=False):
    """An attempt under a lease. Times are of time.monotonic(), in seconds.

    lapses_at    counted from when the claim was sent, so that the lease is never thought longer than it is
    claimed_at   when the claim was sent
    renewed_at   when the lease was last renewed; 0.0: not since the claim
    deadline     when the run is to be stopped; 0.0: nothing has been told to run it
    given_back   the heartbeat gave it back unbegun
    """

    claimed_at: float = 0.0
    renewed_at: float = 0.0
    deadline: float = 0.0
    asyncio_task: "asyncio.Task[Outcome] | None" = None
    thread: int | None = None
    process: Any = None
    abandoned: bool = False
    took: float = 0.0
    given_back: bool = False

    @property
    def key(self) -> bytes:
        """The job's id in bytes: with the attempt's number and the worker's id the fence."""
        return self.claimed.job_id

    @property
    def number(self) -> int:
        """The attempt's number."""
        return self.claimed.attempts

    @property
    def unbegun(self) -> bool:
        """Whether nothing has begun to run it."""
        return not self.began and self.outcome is None and (self.task.in_loop or not self.deadline)

    @property
    def lease(self) -> float:
        """How long the lease lasts, in seconds."""
        return (self.claimed.lease_expires_at - self.claimed.updated_at) * _MICROSECONDS
