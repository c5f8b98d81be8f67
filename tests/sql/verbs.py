"""The verbs of the queue as Python calls, one SQL function each, for tests that speak to one session."""

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

WORKER = uuid.UUID("00000000-0000-4000-8000-000000000001")
OTHER = uuid.UUID("00000000-0000-4000-8000-000000000002")
DEFAULT: Any = ...
Row = Any


@contextlib.contextmanager
def refused(sqlstate: str, *words: str, column: str | None = None, constraint: str | None = None) -> Iterator[None]:
    """Expects an error of this SQLSTATE whose message holds all the words, and which names a column or constraint."""
    with pytest.raises(psycopg.Error) as caught:
        yield
    diag = caught.value.diag
    assert diag.sqlstate == sqlstate, caught.value
    for word in words:
        assert word in (diag.message_primary or ""), caught.value
    assert column is None or diag.column_name == column, (diag.column_name, caught.value)
    assert constraint is None or diag.constraint_name == constraint, (diag.constraint_name, caught.value)


class Verbs:
    """Calls on one session; rows come as named tuples. Left out arguments are left to SQL's defaults."""

    def __init__(self, session: psycopg.Connection[Any]) -> None:
        self.session = session
        self.now: datetime | None = None

    def rows(self, statement: Any, parameters: Any = None) -> list[Row]:
        cursor = self.session.cursor(row_factory=namedtuple_row)
        cursor.execute(statement, parameters)
        return cursor.fetchall() if cursor.description is not None else []

    def one(self, statement: Any, parameters: Any = None) -> Row:
        (row,) = self.rows(statement, parameters)
        return row

    def value(self, statement: Any, parameters: Any = None) -> Any:
        row = self.one(statement, parameters)
        return row[0]

    def call(self, function: str, *positional: Any, **named: Any) -> list[Row]:
        """Calls pgqueue.`function`; arguments that are DEFAULT are left out, dicts go as jsonb."""
        given = {name: value for name, value in named.items() if value is not DEFAULT}
        arguments = [sql.Placeholder()] * len(positional) + [
            sql.SQL("{} => {}").format(sql.Identifier(name), sql.Placeholder()) for name in given
        ]
        statement = sql.SQL("select * from pgqueue.{}({})").format(
            sql.Identifier(function), sql.SQL(", ").join(arguments)
        )
        values = [Jsonb(value) if isinstance(value, dict) else value for value in (*positional, *given.values())]
        return self.rows(statement, values)

    def call_value(self, function: str, *positional: Any, **named: Any) -> Any:
        ((value,),) = self.call(function, *positional, **named)
        return value

    # Enqueue

    def insert(self, **columns: Any) -> uuid.UUID:
        """A plain INSERT, as any program would write it."""
        columns = {"job_type": "t", **columns}
        statement = sql.SQL("insert into pgqueue.jobs ({}) values ({}) returning job_id").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join([sql.Placeholder()] * len(columns)),
        )
        value = self.value(statement, [Jsonb(v) if isinstance(v, dict | list) else v for v in columns.values()])
        assert isinstance(value, uuid.UUID)
        return value

    def fill(self, jobs: int, job_type: str = "t", **columns: Any) -> None:
        """INSERT ... SELECT of many equal jobs; payload holds their number."""
        columns = {"job_type": job_type, **columns}
        statement = sql.SQL(
            "insert into pgqueue.jobs (payload, {}) select jsonb_build_object('n', n), {} from generate_series(1, {}) n"
        ).format(
            sql.SQL(", ").join(map(sql.Identifier, columns)),
            sql.SQL(", ").join(map(sql.Literal, columns.values())),
            sql.Literal(jobs),
        )
        self.session.execute(statement)

    def enqueue(self, job_type: str | None = "t", **named: Any) -> Row:
        (row,) = self.call("enqueue", job_type, **named)
        return row

    def enqueue_many(self, *jobs: Any) -> list[Row]:
        return self.rows("select * from pgqueue.enqueue_many(%s)", [Jsonb(list(jobs))])

    def enqueue_rows(self, job_types: list[str], **arrays: list[Any]) -> Row:
        types = {
            "job_types": "text", "payloads": "jsonb", "queues": "text", "priorities": "int",
            "scheduled_at": "timestamptz", "delays_ms": "bigint", "idempotency_keys": "text", "max_retries": "int",
            "retry_policies": "jsonb", "timeouts_ms": "int", "expires_at": "timestamptz", "producer_ids": "text",
            "ordering_keys": "text",
            "trace_contexts": "jsonb", "job_ids": "uuid",
        }  # fmt: skip
        casts = ", ".join(f"%s::{kind}[]" for kind in types.values())
        given = {"job_types": job_types, **arrays}
        return self.one(f"select * from pgqueue.enqueue_rows({casts})", [given.get(name) for name in types])

    # Work

    def claim(
        self, max_jobs: int = 1, worker: uuid.UUID = WORKER, queues: Sequence[str] | None = ("default",), **named: Any
    ) -> list[Row]:
        return self.call("claim", worker, list(queues) if queues is not None else None, max_jobs, **named)

    def start(self, worker: uuid.UUID = WORKER, **columns: Any) -> Row:
        """Enqueues a job and claims it; nothing else may be pending in its queue."""
        job_id = self.insert(**columns)
        (job,) = self.claim(1, worker, [columns.get("queue", "default")])
        assert job.job_id == job_id
        return job

    def complete(
        self, jobs: Sequence[Row], results: Sequence[Any] | None = None, worker: uuid.UUID = WORKER
    ) -> set[uuid.UUID]:
        rows = self.rows(
            "select * from pgqueue.complete(%s, %s, %s, %s)",
            [
                worker, [job.job_id for job in jobs], [job.attempts for job in jobs],
                None if results is None else [None if r is None else Jsonb(r) for r in results],
            ],
        )  # fmt: skip
        return {row[0] for row in rows}

    def fail(
        self, job: Row, error: Any = DEFAULT, retryable: Any = DEFAULT, retry_in: Any = DEFAULT,
        worker: uuid.UUID = WORKER,
    ) -> Any:  # fmt: skip
        error = {"type": "ValueError", "message": "it broke"} if error is DEFAULT else error
        return self.call_value(
            "fail", worker, job.job_id, job.attempts, Jsonb(error), retryable=retryable, retry_in=retry_in
        )

    def snooze(self, job: Row, delay: timedelta | None = timedelta(minutes=1), worker: uuid.UUID = WORKER) -> Any:
        return self.call_value("snooze", worker, job.job_id, job.attempts, delay)

    def release(self, jobs: Sequence[Row], worker: uuid.UUID = WORKER, started: Any = DEFAULT) -> set[uuid.UUID]:
        rows = self.call("release", worker, [j.job_id for j in jobs], [j.attempts for j in jobs], started=started)
        return {row[0] for row in rows}

    def cancel_attempt(self, job: Row, worker: uuid.UUID = WORKER, error: Any = DEFAULT) -> Any:
        return self.call_value("cancel_attempt", worker, job.job_id, job.attempts, error=error)

    def rate_limit(self, job: Row, retry_after: timedelta, worker: uuid.UUID = WORKER) -> Any:
        return self.call_value("rate_limit", worker, job.job_id, job.attempts, retry_after)

    def set_progress(self, job: Row, progress: Any, worker: uuid.UUID = WORKER) -> Any:
        return self.call_value("set_progress", worker, job.job_id, job.attempts, Jsonb(progress))

    def heartbeat(
        self, jobs: Sequence[Row], worker: uuid.UUID = WORKER, lease: Any = DEFAULT
    ) -> dict[tuple[uuid.UUID, int], str]:
        rows = self.call("heartbeat", worker, [j.job_id for j in jobs], [j.attempts for j in jobs], lease=lease)
        return {(row.job_id, row.attempt): row.reason for row in rows}

    # Operate

    def cancel(self, job_id: uuid.UUID) -> Any:
        return self.call_value("cancel", job_id)

    def retry(self, job_id: uuid.UUID) -> Row:
        (row,) = self.call("retry", job_id)
        return row

    def why(self, job_id: uuid.UUID) -> Any:
        return self.call_value("why", job_id)

    def sweep(self, *steps: str) -> dict[str, int]:
        """Runs the sweep, or some of its steps; what each did. A step that failed fails the test."""
        done: dict[str, int] = {}
        for step in steps or (None,):
            done |= {row.step: row.jobs for row in self.call("sweep", step)}
        failures = self.rows("select step, last_error from pgqueue.sweep_steps where last_error is not null")
        assert not failures, failures
        return done

    def swept(self, step: str, max_jobs: int) -> int:
        """Runs a step for as long as it takes, however slow the machine; how many jobs it moved."""
        (row,) = self.call("sweep_step", step, max_jobs, timedelta(minutes=1), False)
        assert row.problem is None, row.problem
        return int(row.jobs)

    # Look

    def job(self, job_id: uuid.UUID) -> Row:
        """The job wherever it is; fails when it is nowhere, or twice."""
        return self.one("select * from pgqueue.jobs where job_id = %s", [job_id])

    def where(self, job_id: uuid.UUID) -> str:
        """The partition that holds the job."""
        return str(self.value("select tableoid::regclass::text from pgqueue.jobs where job_id = %s", [job_id]))

    def snapshot(self) -> list[Row]:
        """Every job, whole, in a fixed order: to see that something changed nothing."""
        return self.rows("select * from pgqueue.jobs order by job_id")

    # Time

    def freeze(self, now: datetime | None = None) -> datetime:
        """Stops the clock of the database at a whole second; from then on only advance() moves it."""
        found = now or self.value("select date_trunc('second', statement_timestamp()) + interval '1 second'")
        self.now = found.astimezone(UTC)
        self.session.execute(
            sql.SQL(
                "create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe as {}"
            ).format(sql.Literal(f"select timestamptz '{self.now.isoformat()}'"))
        )
        return self.now

    def advance(self, **by: float) -> datetime:
        """Moves the clock, which freeze() stopped, by this timedelta."""
        assert self.now is not None
        return self.freeze(self.now + timedelta(**by))


def kill_by_failing(verbs: Verbs, job_id: uuid.UUID, queue: str = "default") -> Row:
    """Makes a pending job a dead letter; nothing else may be pending in its queue."""
    (job,) = verbs.claim(1, queues=[queue])
    assert job.job_id == job_id
    assert verbs.fail(job, retryable=False) == "dead_letter"
    return verbs.job(job_id)
