"""What the API takes and gives, as msgspec structs. Their constraints are the OpenAPI document's and the checks'."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, Raw, UnsetType

# No NUL: PostgreSQL's text has none.
PLAIN: Final = r"^[^\x00]*$"
_JSON_SCHEMA: Final[dict[str, Any]] = {"$ref": "#/components/schemas/Json"}

Status = Literal["submitted", "pending", "processing", "completed", "failed", "dead_letter", "cancelled"]
PriorityName = Literal["critical", "high", "normal", "low"]
PriorityNumber = Annotated[int, Meta(ge=0, le=3)]
Json = Annotated[Raw, Meta(extra_json_schema=_JSON_SCHEMA)]
QueueName = Annotated[str, Meta(min_length=1, max_length=63, pattern=PLAIN, examples=["default"])]
JobType = Annotated[str, Meta(min_length=1, max_length=128, pattern=PLAIN, examples=["send_email"])]
Key256 = Annotated[str, Meta(min_length=1, max_length=256, pattern=PLAIN)]
ProducerName = Annotated[str, Meta(min_length=1, max_length=64, pattern=PLAIN)]
Text = Annotated[str, Meta(pattern=PLAIN)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NotNegative = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Milliseconds = Annotated[int, Meta(ge=1, le=3_155_760_000_000)]
FIRST_MOMENT: Final = datetime(1, 1, 3, tzinfo=UTC)
LAST_MOMENT: Final = datetime(9999, 1, 1, tzinfo=UTC)
# The years that PostgreSQL and every client can hold in any zone.
Instant = Annotated[
    datetime,
    Meta(tz=True, extra_json_schema={"pattern": r"^(?!0000|0001|9999)", "examples": ["2030-01-31T09:00:00Z"]}),
]


def no_json() -> Raw:
    """Return JSON's null."""
    return Raw(b"null")


class RetryPolicy(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """When a failed attempt is tried again: min(base * multiplier^(attempt - 1), max), plus up to 10 % of jitter."""

    base_delay_ms: Annotated[int, Meta(ge=0, le=31_536_000_000)] | None = None
    max_delay_ms: Annotated[int, Meta(ge=0, le=31_536_000_000)] | None = None
    backoff_multiplier: Annotated[float, Meta(ge=1, le=1000)] | None = None
    jitter: bool | None = None


class NewJob(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A job to enqueue. Only its type is needed, as `type` or `job_type`."""

    type: JobType | UnsetType = msgspec.UNSET
    job_type: JobType | UnsetType = msgspec.UNSET
    payload: Annotated[
        Raw,
        Meta(
            description="Any JSON; tasks in Python take an object.",
            extra_json_schema={**_JSON_SCHEMA, "examples": [{"to": "a@example.com"}]},
        ),
    ] = msgspec.field(default_factory=no_json)
    queue: QueueName | None = None
    priority: PriorityNumber | PriorityName | None = None
    scheduled_at: Annotated[Instant | None, Meta(description="Not before this moment.")] = None
    delay_ms: Annotated[
        Annotated[int, Meta(ge=0, le=3_155_760_000_000)] | None, Meta(description="Not before so many milliseconds.")
    ] = None
    idempotency_key: Annotated[
        Key256 | None,
        Meta(
            description="While it is known, its job is answered; also as header Idempotency-Key.", examples=["order-42"]
        ),
    ] = None
    max_retries: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    retry_policy: RetryPolicy | None = None
    timeout_ms: Annotated[Positive | None, Meta(description="One attempt's run time at most.")] = None
    expires_at: Annotated[Instant | None, Meta(description="Not started after this moment.")] = None
    producer_id: Annotated[ProducerName | None, Meta(description="Who enqueues; without it the key's name.")] = None
    ordering_key: Annotated[
        Key256 | None, Meta(description="Jobs of one key in a queue run one at a time, in order.")
    ] = None
    trace_context: Annotated[dict[Text, Text] | None, Meta(description="W3C traceparent and tracestate.")] = None


class NewJobs(msgspec.Struct, forbid_unknown_fields=True):
    """Jobs to enqueue, all or none of them."""

    jobs: Annotated[list[NewJob], Meta(min_length=1, max_length=10_000)]


class JobView(msgspec.Struct, kw_only=True):
    """A job."""

    job_id: UUID
    type: JobType = ""
    job_type: JobType
    queue: QueueName
    priority: PriorityNumber
    status: Status
    payload: Json = msgspec.field(default_factory=no_json)
    result: Json = msgspec.field(default_factory=no_json)
    progress: Json = msgspec.field(default_factory=no_json)
    error: Annotated[str | None, Meta(description="The last error, one line.")] = None
    errors: Annotated[
        Raw,
        Meta(
            description="A record per failed attempt, oldest first.",
            extra_json_schema={"type": "array", "items": {"type": "object"}},
        ),
    ] = msgspec.field(default_factory=lambda: Raw(b"[]"))
    attempts: int
    max_retries: int
    lost: int
    seq: int
    shard: int
    created_at: datetime
    updated_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    scheduled_at: datetime | None = None
    due_at: datetime | None = None
    expires_at: datetime | None = None
    lease_expires_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    worker_id: UUID | None = None
    idempotency_key: str | None = None
    producer_id: str | None = None
    ordering_key: str | None = None
    timeout_ms: int | None = None
    retry_policy: dict[str, Any] | None = None
    trace_context: dict[str, Any] | None = None
    payload_omitted: Annotated[bool, Meta(description="In lists: the payload is large and was left out.")] = False

    def __post_init__(self) -> None:
        """Fill in the short name, and tell times in UTC whatever the database session's zone is."""
        self.type = self.job_type
        for name in _TIMES:
            moment = getattr(self, name)
            if moment is not None:
                setattr(self, name, moment.astimezone(UTC))


_TIMES: Final = (
    "created_at",
    "updated_at",
    "started_at",
    "finished_at",
    "scheduled_at",
    "due_at",
    "expires_at",
    "lease_expires_at",
    "cancel_requested_at",
)


class Enqueued(msgspec.Struct):
    """One job of a batch. `duplicate`: its idempotency key was known, and this is the job that has it."""

    job_id: UUID
    status: Annotated[Status | None, Meta(description="null: the key's job has been deleted; the key is still known.")]
    duplicate: bool


class EnqueuedBatch(msgspec.Struct):
    """What became of a batch, in its order."""

    jobs: list[Enqueued]
    created: int
    duplicates: int


NEXT_PAGE: Final = Meta(description="The cursor of the next page; null: this was the last.")


class JobPage(msgspec.Struct):
    """A page of jobs, the newest first. It may be short, even empty: go on while there is next_cursor."""

    items: list[JobView]
    next_cursor: Annotated[UUID | None, NEXT_PAGE]


class JobResult(msgspec.Struct, kw_only=True):
    """How a job ended, or where it stands."""

    job_id: UUID
    status: Status
    result: Json = msgspec.field(default_factory=no_json)
    error: str | None = None
    attempts: int
    duration_ms: int | None = None
    worker_id: UUID | None = None
    completed_at: datetime | None = None


class Cancelled(msgspec.Struct):
    """What a cancel did: the job is cancelled, or it runs and was asked to stop."""

    job_id: UUID
    outcome: Literal["cancelled", "cancel_requested"]


class JobIds(msgspec.Struct, forbid_unknown_fields=True):
    """Some jobs."""

    job_ids: Annotated[list[UUID], Meta(min_length=1, max_length=10_000)]


class CancelOutcome(msgspec.Struct):
    """What became of one job: cancelled, cancel_requested, the final status it already had, or not_found."""

    job_id: UUID
    outcome: Literal["cancelled", "cancel_requested", "completed", "dead_letter", "not_found"]


class CancelOutcomes(msgspec.Struct):
    """What became of each job."""

    jobs: list[CancelOutcome]


class Why(msgspec.Struct):
    """Why a job is not running now."""

    job_id: UUID
    why: str


class Moved(msgspec.Struct):
    """How many jobs a verb moved or deleted."""

    jobs: int
