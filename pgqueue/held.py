"""What a worker knows of a job that it holds: the attempt, its lease, and how it is being run."""

import asyncio
import time
from typing import Any, Final

from pgqueue.attempt import Attempt, Outcome
from pgqueue.job import ClaimedJob, Job, Services
from pgqueue.tasks import Task

_MICROSECONDS: Final = 1e-6


class Held(Attempt):
    """An attempt under a lease. Times are of time.monotonic(), in seconds."""

    __slots__ = (
        "abandoned",
        "asyncio_task",
        "claimed_at",
        "deadline",
        "key",
        "lease",
        "lease_until",
        "number",
        "outcome",
        "process",
        "thread",
        "took",
        "tx",
    )

    def __init__(self, claimed: ClaimedJob, task: Task[Any, Any], services: Services, claimed_at: float) -> None:
        """Not begun; `claimed_at` is when the claim was sent, so that the lease is never thought longer than it is."""
        super().__init__(Job(claimed, services), task)
        #: The job's id in bytes, and the attempt's number: with the worker's id the fence.
        self.key = claimed.job_id
        self.number = claimed.attempts
        self.claimed_at = claimed_at
        self.lease = (claimed.lease_expires_at - claimed.updated_at) * _MICROSECONDS
        self.lease_until = claimed_at + self.lease
        self.deadline = 0.0
        self.outcome: Outcome | None = None
        self.asyncio_task: asyncio.Task[None] | None = None
        self.thread: int | None = None
        self.process: Any = None
        self.tx: Any = None
        self.abandoned = False
        self.took = 0.0

    def begin(self, timeout: float) -> None:
        """Set the deadline of a run that begins now."""
        self.deadline = time.monotonic() + timeout
