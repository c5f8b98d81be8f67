"""What operators take and are given: queues, workers, statistics, health, keys."""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta, UnsetType

from pgqueue.api.values import (
    NEXT_PAGE,
    PLAIN,
    Instant,
    JobType,
    Json,
    Milliseconds,
    NotNegative,
    Positive,
    PriorityName,
    PriorityNumber,
    ProducerName,
    QueueName,
    RetryPolicy,
    no_json,
)

NextCursor = Annotated[str | None, NEXT_PAGE]

# Queues ---------------------------------------------------------------------------------------------------------------

TtlMs = Annotated[float, Meta(gt=0)]


class Depth(msgspec.Struct):
    """Live jobs by status. Counting ends at 500,000 pending jobs of all queues, and at 50,001 of each other status."""

    pending: int = 0
    submitted: int = 0
    processing: int = 0
    failed: int = 0


class PriorityDepth(Depth):
    """Live jobs of one priority."""

    priority: PriorityNumber = 2
    oldest_pending_seconds: float | None = None


class QueueView(msgspec.Struct, kw_only=True):
    """A queue: what is in it, and its settings."""

    name: str
    paused: bool
    paused_at: datetime | None = None
    depth: Depth
    priorities: list[PriorityDepth]
    oldest_pending_seconds: float | None = None
    weights: list[int] | None
    lease_ms: int
    timeout_ms: int
    max_lost: int
    idempotency_ms: int
    retry_policy: dict[str, Any] | None = None
    soft_limit: int
    hard_limit: int
    rate_per_second: int | None = None
    shed_low: bool
    pending_ttl_ms: TtlMs
    completed_ttl_ms: TtlMs
    failed_ttl_ms: TtlMs
    dead_letter_ttl_ms: TtlMs
    cancelled_ttl_ms: TtlMs


class Queues(msgspec.Struct):
    """A page of the queues that have a row or have had a job, by name."""

    items: list[QueueView]
    next_cursor: NextCursor


class QueueChange(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of a queue to change; what is left out stays."""

    weights: Annotated[
        Annotated[
            list[Annotated[int, Meta(ge=0, le=100)]],
            Meta(min_length=4, max_length=4, extra_json_schema={"contains": {"minimum": 1}}),
        ]
        | UnsetType
        | None,
        Meta(description="Shares of critical, high, normal and low in a claim; null: strict order."),
    ] = msgspec.UNSET
    lease_ms: Annotated[int, Meta(ge=100, le=86_400_000)] | UnsetType = msgspec.UNSET
    timeout_ms: Positive | UnsetType = msgspec.UNSET
    max_lost: NotNegative | UnsetType = msgspec.UNSET
    idempotency_ms: Annotated[int, Meta(ge=0, le=315_360_000_000)] | UnsetType = msgspec.UNSET
    retry_policy: RetryPolicy | UnsetType | None = msgspec.UNSET
    soft_limit: NotNegative | UnsetType = msgspec.UNSET
    hard_limit: NotNegative | UnsetType = msgspec.UNSET
    rate_per_second: Positive | UnsetType | None = msgspec.UNSET
    shed_low: bool | UnsetType = msgspec.UNSET
    pending_ttl_ms: Milliseconds | UnsetType = msgspec.UNSET
    completed_ttl_ms: Milliseconds | UnsetType = msgspec.UNSET
    failed_ttl_ms: Milliseconds | UnsetType = msgspec.UNSET
    dead_letter_ttl_ms: Milliseconds | UnsetType = msgspec.UNSET
    cancelled_ttl_ms: Milliseconds | UnsetType = msgspec.UNSET


class Paused(msgspec.Struct):
    """Whether a queue is paused now, and whether that was changed."""

    queue: str
    paused: bool
    changed: bool


# Workers, statistics, health ------------------------------------------------------------------------------------------


class WorkerView(msgspec.Struct, kw_only=True):
    """A worker process. `live`: it gave a sign of life within a minute and has not stopped."""

    worker_id: UUID
    name: str
    hostname: str
    pid: int
    group_name: str | None = None
    queues: list[str] | None = None
    job_types: list[str] | None = None
    priorities: list[int] | None = None
    concurrency: int
    status: Literal["starting", "active", "idle", "draining", "stopped"]
    live: bool = False
    utilization: float = 0.0
    jobs_processed: int
    jobs_failed: int
    last_heartbeat: datetime
    started_at: datetime
    version: str | None = None


class Workers(msgspec.Struct):
    """A page of workers, the oldest first."""

    items: list[WorkerView]
    next_cursor: NextCursor


class Rates(msgspec.Struct):
    """Jobs per second over the last minute."""

    submitted_per_second: float
    processed_per_second: float
    failed_per_second: float


class Alert(msgspec.Struct):
    """Something that is wrong now."""

    alert: str
    severity: str
    summary: str
    queue: str | None = None
    since: datetime | None = None


class Stats(msgspec.Struct):
    """The state of the whole queue at a glance."""

    depth: Depth
    dead_letters: Annotated[int, Meta(description="Counting ends at 10,001.")]
    oldest_pending_seconds: float | None
    rates: Rates
    workers: int
    slots: int
    alerts: list[Alert]


class Check(msgspec.Struct):
    """One thing that is needed to be ready."""

    ok: bool
    detail: str


class Health(msgspec.Struct):
    """Whether the API is ready, and what it needs for that."""

    status: Literal["ready", "not_ready"]
    checks: dict[str, Check]


class Live(msgspec.Struct):
    """The process runs."""

    status: Literal["live"] = "live"


# Keys -----------------------------------------------------------------------------------------------------------------

ScopeName = Literal["submit", "read", "operate", "admin"]


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """An API key to make."""

    name: ProducerName
    scopes: Annotated[list[ScopeName], Meta(min_length=1, max_length=4)] = msgspec.field(
        default_factory=lambda: ["submit", "read"]
    )
    rate: Annotated[Positive | None, Meta(description="Requests per second; null: any number.")] = None
    expires_at: Instant | None = None


class KeyView(msgspec.Struct, kw_only=True):
    """A key, without what makes it work."""

    name: str
    prefix: str
    scopes: list[ScopeName]
    enabled: bool
    rate: int | None = None
    expires_at: datetime | None = None
    created_at: datetime | None = None
    last_used_at: datetime | None = None


class Keys(msgspec.Struct):
    """A page of keys by name, also of those that are revoked or expired."""

    items: list[KeyView]
    next_cursor: NextCursor


class MadeKey(msgspec.Struct):
    """A new key. It is shown this once."""

    name: str
    key: str
    scopes: list[ScopeName]


class Revoked(msgspec.Struct):
    """Whether a key was in force until now."""

    name: str
    changed: bool


# Schedules ------------------------------------------------------------------------------------------------------------

CronText = Annotated[str, Meta(min_length=1, max_length=200, pattern=PLAIN, examples=["0 9 * * mon-fri"])]
ZoneName = Annotated[str, Meta(min_length=1, max_length=64, pattern=PLAIN, examples=["Europe/Berlin"])]
Misfire = Literal["run_once", "skip", "run_all"]
Overlap = Literal["allow", "skip", "cancel"]


class NewSchedule(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A job that recurs. What is left out has its default."""

    cron: Annotated[CronText, Meta(description="Five fields, or @hourly, @daily, @weekly, @monthly, @yearly.")]
    job_type: JobType
    timezone: ZoneName = "UTC"
    payload: Json = msgspec.field(default_factory=no_json)
    queue: QueueName = "default"
    priority: PriorityNumber | PriorityName = 2
    max_retries: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    retry_policy: RetryPolicy | None = None
    timeout_ms: Positive | None = None
    enabled: bool = True
    misfire: Annotated[Misfire, Meta(description="What to do about times that nobody was there to fire.")] = "run_once"
    misfire_cap: Annotated[int, Meta(ge=1, le=10_000)] = 100
    overlap: Annotated[Overlap, Meta(description="What to do while the job before has not ended.")] = "allow"


class ScheduleView(msgspec.Struct, kw_only=True):
    """A job that recurs, and when it does."""

    name: str
    cron: str
    timezone: str
    words: Annotated[str | None, Meta(description="What the expression says.")] = None
    job_type: JobType
    payload: Json = msgspec.field(default_factory=no_json)
    queue: QueueName
    priority: PriorityNumber
    max_retries: int | None = None
    retry_policy: dict[str, Any] | None = None
    timeout_ms: int | None = None
    enabled: bool
    misfire: Misfire
    misfire_cap: int
    overlap: Overlap
    declared_by: Annotated[str | None, Meta(description="The app that declares it in code; null: made by hand.")] = None
    next_run_at: datetime | None = None
    last_run_at: datetime | None = None
    last_job_id: UUID | None = None
    last_error: str | None = None


class Schedules(msgspec.Struct):
    """A page of schedules by name."""

    items: list[ScheduleView]
    next_cursor: NextCursor


class Fired(msgspec.Struct):
    """The job that a schedule was run as."""

    name: str
    job_id: UUID


class Deleted(msgspec.Struct):
    """It is gone."""

    name: str


class Preview(msgspec.Struct):
    """When a schedule fires next, in UTC and in its zone."""

    name: str
    words: str
    timezone: str
    utc: list[datetime]
    local: list[str]
