"""What the queue should do, in Python: jobs, their places, and the line of each ordering key.

The model knows nothing of seq but the order in which it is drawn, and nothing of how the queue stores or finds jobs.
"""

import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

FINAL = ("completed", "cancelled", "dead_letter")
LEASE = timedelta(seconds=30)
MAX_LOST = 2
START = datetime(2027, 3, 10, 12, tzinfo=UTC)


@dataclass
class Job:
    """What the model knows of a job; `place` is its turn among all places ever drawn."""

    job_id: uuid.UUID
    queue: str
    priority: int
    place: int
    max_retries: int
    ordering_key: str | None
    scheduled_at: datetime | None
    expires_at: datetime | None
    status: str = "pending"
    due_at: datetime | None = None
    attempts: int = 0
    lost: int = 0
    uncharged: int = 0
    worker: uuid.UUID | None = None
    lease: datetime | None = None
    cancel_requested: bool = False
    errors: list[int] = field(default_factory=list)
    result: Any = None

    @property
    def live(self) -> bool:
        return self.status not in FINAL

    @property
    def waits_for_its_key(self) -> bool:
        return self.status == "submitted" and self.due_at is None


@dataclass(frozen=True)
class Attempt:
    """A claim that was answered once; it may be long over."""

    worker: uuid.UUID
    job_id: uuid.UUID
    attempts: int


class Expectation:
    """All jobs as they should be."""

    def __init__(self) -> None:
        self.now = START
        self.places = 0
        self.jobs: dict[uuid.UUID, Job] = {}
        self.keys: dict[str, uuid.UUID] = {}
        self.paused: set[str] = set()
        self.ended: dict[uuid.UUID, Any] = {}

    def draw(self, job: Job) -> None:
        self.places += 1
        job.place = self.places

    def line(self, queue: str, ordering_key: str | None) -> list[Job]:
        return [j for j in self.jobs.values() if j.live and (j.queue, j.ordering_key) == (queue, ordering_key)]

    def arrive(self, job: Job) -> None:
        if job.ordering_key is not None and self.line(job.queue, job.ordering_key):
            job.status, job.due_at = "submitted", None
        elif job.scheduled_at is not None and job.scheduled_at > self.now:
            job.status, job.due_at = "submitted", job.scheduled_at
        else:
            job.status, job.due_at = "pending", None
        self.jobs[job.job_id] = job

    def end(self, job: Job, status: str) -> None:
        job.status, job.due_at, job.lease = status, None, None
        if job.ordering_key is None:
            return
        line = self.line(job.queue, job.ordering_key)
        if line and all(j.waits_for_its_key for j in line):
            head = min(line, key=lambda j: j.place)
            self.draw(head)
            if head.scheduled_at is not None and head.scheduled_at > self.now:
                head.due_at = head.scheduled_at
            else:
                head.status = "pending"

    def held(self, attempt: Attempt) -> Job | None:
        job = self.jobs.get(attempt.job_id)
        if job and job.status == "processing" and (job.worker, job.attempts) == (attempt.worker, attempt.attempts):
            return job
        return None

    def revive(self, job: Job) -> None:
        job.max_retries += job.attempts - job.uncharged
        job.uncharged, job.lost, job.cancel_requested = job.attempts, 0, False
        job.scheduled_at = job.expires_at = job.result = None
        self.ended.pop(job.job_id, None)
        self.draw(job)
        self.arrive(job)
