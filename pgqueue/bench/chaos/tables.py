"""The final tables, as the checker takes them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pgqueue.bench.chaos import statements
from pgqueue.connections import SyncConnection

FINAL: Final = frozenset({"completed", "cancelled", "dead_letter"})
LEASE_LOST: Final = "LeaseLost"


@dataclass(frozen=True, slots=True)
class Row:
    """A job as it stands in the end. `token` is what its result says of the run that it came from."""

    job_id: str
    status: str
    n: int
    job_type: str
    queue: str
    ordering_key: str | None
    seq: int
    attempts: int
    lost: int
    max_retries: int
    worker_id: str | None
    token: str | None
    error: str | None
    errors: Sequence[dict[str, Any]]
    idempotency_key: str | None

    @property
    def leases_lost(self) -> dict[int, float]:
        """For how long, in seconds, each attempt had run whose lease was lost."""
        return {
            int(one["attempt"]): float(one["duration_ms"]) / 1000
            for one in self.errors
            if one.get("type") == LEASE_LOST and one.get("duration_ms") is not None
        }


@dataclass(slots=True)
class Tables:
    """All that is read from the database, after everything has ended."""

    rows: list[Row] = field(default_factory=list)
    effects: dict[tuple[str, int], int] = field(default_factory=dict)
    submitted: Counter[tuple[str, str]] | None = None
    processed: dict[str, int] | None = None


def read(connection: SyncConnection) -> Tables:
    """Read the jobs, what their tasks wrote beside them, and the metrics."""
    tables = Tables(rows=list(_rows(connection)))
    for job_id, attempt, times in connection.execute(statements.ALL_EFFECTS).fetchall():
        tables.effects[job_id, attempt] = times
    tables.submitted, tables.processed = Counter(), {}
    for name, labels, value in connection.execute(statements.METRICS).fetchall():
        if name == "pgqueue_jobs_submitted_total":
            tables.submitted[labels["queue"], labels["job_type"]] += int(value)
        else:
            outcome = labels.get("outcome", "lost")
            tables.processed[outcome] = tables.processed.get(outcome, 0) + int(value)
    return tables


def _rows(connection: SyncConnection) -> Iterator[Row]:
    with connection.transaction(), connection.cursor(name="chaos_final") as cursor:
        cursor.itersize = 5000
        cursor.execute(statements.FINAL)
        for values in cursor:
            yield Row(*values)
