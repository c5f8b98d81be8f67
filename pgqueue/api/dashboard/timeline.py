"""The life of a job: what happened when, and how long each part took."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from pgqueue.api.dashboard.words import duration, moment
from pgqueue.api.values import JobView


@dataclass(frozen=True)
class Step:
    """One thing that happened. `took`: what passed since the step before it, and `how` it was spent."""

    at: datetime
    kind: str
    title: str
    text: str = ""
    took: float | None = None
    how: str = ""


@dataclass(frozen=True)
class Attempt:
    """An attempt that failed."""

    number: int
    at: datetime | None
    error_type: str
    message: str
    traceback: str
    ran: float | None
    worker_id: str
    retryable: bool


def attempts_of(job: JobView) -> list[Attempt]:
    """Return the failed attempts, the newest first. Programs in any language write these records."""
    found = []
    for record in reversed(msgspec.json.decode(job.errors)):
        if not isinstance(record, dict):
            continue
        ran = record.get("duration_ms")
        number = record.get("attempt")
        found.append(
            Attempt(
                number=number if isinstance(number, int) else 0,
                at=_time(record.get("at")),
                error_type=_text(record.get("type")) or "Error",
                message=_text(record.get("message")),
                traceback=_text(record.get("traceback")),
                ran=ran / 1000 if isinstance(ran, (int, float)) and not isinstance(ran, bool) else None,
                worker_id=_text(record.get("worker_id")),
                retryable=record.get("retryable") is not False,
            )
        )
    return found


def steps_of(job: JobView, attempts: list[Attempt]) -> list[Step]:
    """Return what happened, in order."""
    by = f"by {job.producer_id}" if job.producer_id else ""
    raw: list[tuple[datetime, str, str, str, str]] = [(job.created_at, "made", "Enqueued", by, "")]
    told = 0
    for one in reversed(attempts):
        if one.at is None:
            continue
        if one.ran is not None:
            # Run times are by the workers' clocks, and no attempt began before what came before it.
            begun = max(raw[-1][0], one.at - timedelta(seconds=min(one.ran, 1e8)))
            raw.append((begun, "began", f"Attempt {one.number} began", "", "waited"))
        said = f"{one.error_type}: {one.message}" if one.message else one.error_type
        raw.append((one.at, "failed", f"Attempt {one.number} failed", said[:300], "ran"))
        told = max(told, one.number)
    if job.started_at is not None and job.attempts > told:
        raw.append((job.started_at, "began", f"Attempt {job.attempts} began", "", "waited"))
    if job.cancel_requested_at is not None:
        raw.append((job.cancel_requested_at, "asked", "Asked to stop", "", ""))
    if job.finished_at is not None:
        title = {"completed": "Completed", "cancelled": "Cancelled", "dead_letter": "Became a dead letter"}
        said = "" if job.status == "completed" else (job.error or "")[:300]
        ran = "ran" if job.attempts > told and job.started_at is not None else ""
        raw.append((job.finished_at, job.status.replace("_", "-"), title.get(job.status, job.status), said, ran))
    raw.sort(key=lambda step: step[0])
    steps: list[Step] = []
    for at, kind, title_of, text, how in raw:
        took = (at - steps[-1].at).total_seconds() if steps else None
        steps.append(Step(at, kind, title_of, text, took, how))
    now = datetime.now(UTC)
    if job.status == "processing":
        steps.append(Step(now, "now", "Runs", "", (now - steps[-1].at).total_seconds(), "runs for"))
    elif job.status in ("pending", "submitted", "failed"):
        due = f"due in {duration((job.due_at - now).total_seconds())}" if job.due_at and job.due_at > now else ""
        steps.append(Step(now, "now", "Waits", due, (now - steps[-1].at).total_seconds(), "waits for"))
    return steps


def spans_of(steps: list[Step]) -> list[tuple[str, float, str]]:
    """Return how the time was spent, as parts of a bar."""
    spans = []
    for step in steps[1:]:
        running = step.how in ("ran", "runs for")
        kind = "lost" if running and step.kind in ("failed", "dead-letter") else "ran" if running else "waited"
        spans.append((kind, max(step.took or 0.0, 0.0), f"{step.how or 'waited'} {duration(step.took)}"))
    return spans


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _time(value: Any) -> datetime | None:
    try:
        return moment(value) if isinstance(value, str) else None
    except ValueError:
        return None
