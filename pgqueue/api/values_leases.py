"""What workers over HTTP send and are given."""

from typing import Annotated, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from pgqueue.api.values import PLAIN, JobType, JobView, Json, Positive, PriorityName, PriorityNumber, QueueName, no_json


class Claim(msgspec.Struct, forbid_unknown_fields=True):
    """Which jobs a worker takes. `worker_id`: a new UUID for each start of the worker's process."""

    worker_id: UUID
    queues: Annotated[list[QueueName], Meta(min_length=1, max_length=1000)] | None = None
    max_jobs: Annotated[int, Meta(ge=1, le=1000)] = 1
    lease_ms: Annotated[
        Annotated[int, Meta(ge=100, le=86_400_000)] | None,
        Meta(description="How long they are its own; null: the queue's."),
    ] = None
    job_types: Annotated[list[JobType], Meta(min_length=1, max_length=1000)] | None = None
    priorities: Annotated[list[PriorityNumber | PriorityName], Meta(min_length=1, max_length=4)] | None = None
    shards: Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(min_length=1, max_length=64)] | None = None
    wait_ms: Annotated[int, Meta(ge=0, le=30_000, description="How long to wait for the first job.")] = 0
    name: Annotated[
        Annotated[str, Meta(min_length=1, max_length=128, pattern=PLAIN)] | None, Meta(description="Shown to people.")
    ] = None


class Claimed(msgspec.Struct):
    """Jobs that are the worker's until their leases expire; none if nothing came."""

    jobs: list[JobView]


class Held(msgspec.Struct, forbid_unknown_fields=True):
    """An attempt that a worker holds: the job and its `attempts` as the claim answered them."""

    job_id: UUID
    attempt: Positive


class Completion(Held, forbid_unknown_fields=True):
    """An attempt that succeeded."""

    result: Json = msgspec.field(default_factory=no_json)


class Failure(msgspec.Struct, forbid_unknown_fields=True):
    """What went wrong."""

    type: Annotated[str, Meta(max_length=1000, pattern=PLAIN)] = "Error"
    message: Annotated[str, Meta(pattern=PLAIN)] = ""
    traceback: Annotated[str, Meta(pattern=PLAIN)] | None = None


class FailedAttempt(Held, forbid_unknown_fields=True, kw_only=True):
    """An attempt that failed. `retry_in_ms`: instead of the policy's delay."""

    error: Failure
    retryable: bool = True
    retry_in_ms: Annotated[int, Meta(ge=0, le=315_360_000_000)] | None = None


class SnoozedAttempt(Held, forbid_unknown_fields=True, kw_only=True):
    """An attempt to be made later; it is not charged."""

    delay_ms: Annotated[int, Meta(ge=0, le=3_155_760_000_000)]


class ProgressReport(Held, forbid_unknown_fields=True, kw_only=True):
    """How far an attempt is."""

    progress: Json


class Heartbeats(msgspec.Struct, forbid_unknown_fields=True):
    """Leases to renew."""

    worker_id: UUID
    jobs: Annotated[list[Held], Meta(max_length=10_000)] = msgspec.field(default_factory=list)
    lease_ms: Annotated[int, Meta(ge=100, le=86_400_000)] | None = None


class Completions(msgspec.Struct, forbid_unknown_fields=True):
    """Attempts that succeeded."""

    worker_id: UUID
    jobs: Annotated[list[Completion], Meta(min_length=1, max_length=10_000)]


class FailedAttempts(msgspec.Struct, forbid_unknown_fields=True):
    """Attempts that failed."""

    worker_id: UUID
    jobs: Annotated[list[FailedAttempt], Meta(min_length=1, max_length=1000)]


class Releases(msgspec.Struct, forbid_unknown_fields=True):
    """Jobs to give back. `started`: their tasks had begun."""

    worker_id: UUID
    jobs: Annotated[list[Held], Meta(min_length=1, max_length=10_000)]
    started: bool = False


class SnoozedAttempts(msgspec.Struct, forbid_unknown_fields=True):
    """Attempts to be made later."""

    worker_id: UUID
    jobs: Annotated[list[SnoozedAttempt], Meta(min_length=1, max_length=1000)]


class ProgressReports(msgspec.Struct, forbid_unknown_fields=True):
    """How far attempts are."""

    worker_id: UUID
    jobs: Annotated[list[ProgressReport], Meta(min_length=1, max_length=1000)]


class HeartbeatAnswer(msgspec.Struct):
    """`lost`: no longer the worker's, stop them. `cancel`: still its own, but asked to stop."""

    lost: list[Held]
    cancel: list[Held]


class Accepted(msgspec.Struct):
    """`lost`: these were no longer the worker's, and nothing was changed."""

    accepted: list[UUID]
    lost: list[UUID]


class Ended(msgspec.Struct):
    """What became of a job; null: it was no longer the worker's."""

    job_id: UUID
    status: Literal["failed", "dead_letter", "cancelled", "submitted"] | None


class EndedAttempts(msgspec.Struct):
    """What became of each job."""

    jobs: list[Ended]
