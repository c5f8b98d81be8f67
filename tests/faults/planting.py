"""Bugs for the queue's SQL, and a producer, worker and operator by hand, who keep the ledger that the checker reads."""

import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.types.json import Jsonb

from pgqueue.bench.chaos import checker, ledger, statements, tables
from pgqueue.bench.chaos.checker import Terms, Violation
from tests.servers import CHECKOUT

Session = psycopg.Connection[Any]
#: Short enough for a test to wait for its end.
LEASE = 0.3


@dataclass(frozen=True)
class Change:
    """A function of pgqueue, and what is replaced in its text; `times` is how often that must stand there."""

    function: str
    pieces: Sequence[tuple[str, str]]
    times: int = 1


@dataclass(frozen=True)
class Bug:
    """A bug: changed functions and statements; `rules` are those of the checker of which one at least must tell."""

    name: str
    rules: frozenset[str]
    scenario: Callable[["Hand"], None]
    changes: Sequence[Change] = ()
    statements: Sequence[str] = field(default_factory=tuple)


def source(function: str) -> str:
    """The `create function` statement of a function of that name in pgqueue/sql."""
    found = []
    for path in sorted((CHECKOUT / "pgqueue" / "sql").glob("[1-9]_*.sql")):
        pattern = rf"^create function pgqueue\.{function}\(.*?\$\$;$"
        found += re.findall(pattern, path.read_text(), re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"{len(found)} functions pgqueue.{function} in pgqueue/sql"
    return str(found[0])


def plant(session: Session, bug: Bug) -> None:
    """Put the bug into a database; fails when a text that it changes is no longer there."""
    for statement in bug.statements:
        session.execute(statement.encode())
    for change in bug.changes:
        text = source(change.function).replace("create function", "create or replace function", 1)
        for was, becomes in change.pieces:
            assert text.count(was) == change.times, f"{change.function} has {was!r} {text.count(was)} times"
            text = text.replace(was, becomes)
        session.execute(text.encode(), prepare=False)


class Claimed:
    """A job that a hand holds."""

    def __init__(self, worker: UUID, row: dict[str, Any]) -> None:
        self.worker, self.job_id, self.attempt = worker, row["job_id"], row["attempts"]
        self.n, self.job_type = int(row["payload"]["n"]), row["job_type"]
        self.token = secrets.token_hex(6)

    @property
    def result(self) -> Jsonb:
        return Jsonb({"n": self.n, "attempt": self.attempt, "token": self.token})


class Hand:
    """Does what processes of a chaos run do, a step at a time, and writes down what those would."""

    def __init__(self, folder: Path, connect: Callable[[], Session], terms: Terms) -> None:
        self.session, self.connect, self.terms = connect(), connect, terms
        self.folder = folder
        self.producer = ledger.Ledger(folder, "producer")
        self.operator = ledger.Ledger(folder, "operator")
        self.observer = ledger.Ledger(folder, "observer")
        self._tasks: dict[UUID, ledger.Ledger] = {}
        self._n = 0
        self.session.execute(statements.EFFECTS)
        self.set_queue()

    def rows(self, query: str, *parameters: object, session: Session | None = None) -> list[dict[str, Any]]:
        cursor = (session or self.session).cursor(row_factory=psycopg.rows.dict_row)
        return cursor.execute(query.encode(), parameters or None).fetchall()

    def set_queue(self, **settings: object) -> None:
        values = {"name": "default", "max_lost": self.terms.max_lost, "lease_ms": round(self.terms.lease * 1000)}
        self.session.execute(statements.QUEUE, {**values, **settings})

    # Producer ----------------------------------------------------------------------------------------------------

    def enqueue(
        self,
        job_type: str = "quick",
        *,
        key: str | None = None,
        retries: int = 3,
        n: int | None = None,
        session: Session | None = None,
        **more: object,
    ) -> int:
        """Enqueue a job under its own idempotency key; return its n. With `n` it is sent again."""
        if n is None:
            self._n += 1
            n = self._n
        self.producer.write("tried", [[n, job_type, retries, key, "default"]])
        found = self.rows(
            "select job_id from pgqueue.enqueue(%s, %s, ordering_key => %s, max_retries => %s, idempotency_key => %s)",
            job_type, Jsonb({"n": n}), key, retries, f"n {n}", session=session,
        )  # fmt: skip
        self.producer.write("accepted", [[n, found[0]["job_id"]]])
        return n

    # Worker ------------------------------------------------------------------------------------------------------

    def claim(self, jobs: int = 1, worker: UUID | None = None) -> list[Claimed]:
        """Claim without starting."""
        worker = worker or uuid4()
        return [Claimed(worker, row) for row in self.rows("select * from pgqueue.claim(%s, null, %s)", worker, jobs)]

    def start(self, job: Claimed) -> Claimed:
        ledger = self._task_ledger(job)
        ledger.write("start", str(job.job_id), job.attempt, job.n, job.job_type)
        return job

    def take(self) -> Claimed:
        """Claim and start one job."""
        (job,) = self.claim()
        return self.start(job)

    def end(self, job: Claimed, outcome: str = ledger.RETURNED) -> None:
        """The task ends; nobody has been told."""
        told = job.token if outcome == ledger.RETURNED else None
        self._task_ledger(job).write("end", str(job.job_id), job.attempt, outcome, told)

    def complete(self, job: Claimed, *, session: Session | None = None) -> bool:
        """Tell the queue that the task returned; whether it was accepted."""
        sent = self.rows(
            "select pgqueue.complete(%s, %s, %s, %s::jsonb[])",
            job.worker, [job.job_id], [job.attempt], [job.result], session=session,
        )  # fmt: skip
        return bool(sent)

    def finish(self, job: Claimed) -> bool:
        self.end(job)
        return self.complete(job)

    def fail(self, job: Claimed) -> str | None:
        self.end(job, ledger.RAISED)
        return self.report_failure(job)

    def report_failure(self, job: Claimed) -> str | None:
        """Tell the queue that the task raised; the retry is due at once."""
        error = Jsonb({"type": "Planned", "message": "planned"})
        (row,) = self.rows(
            "select pgqueue.fail(%s, %s, %s, %s, retry_in => interval '0') as status",
            job.worker, job.job_id, job.attempt, error,
        )  # fmt: skip
        return row["status"]  # type: ignore[no-any-return]

    def release(self, job: Claimed) -> None:
        self.rows("select pgqueue.release(%s, %s, %s)", job.worker, [job.job_id], [job.attempt])

    def count(self, job: Claimed, batch: int) -> None:
        """Send what a worker has counted: one attempt that completed."""
        bucket = [1] + [0] * 16
        counts = {
            "queue": "default", "job_type": job.job_type, "priority": 2, "completed": 1, "failed": 0, "dead_letter": 0,
            "cancelled": 0, "snoozed": 0, "lost": 0, "duration_seconds": 0, "wait_seconds": 0, "durations": bucket,
            "waits": bucket,
        }  # fmt: skip
        self.rows("select pgqueue.add_counts(%s, %s, 0.5, %s)", job.worker, batch, Jsonb([counts]))

    # Operator and observer ---------------------------------------------------------------------------------------

    def cancel(self, job_id: UUID) -> None:
        (row,) = self.rows("select pgqueue.cancel(%s) as outcome", job_id)
        self.operator.write("cancel", str(job_id), row["outcome"])

    def observe(self) -> None:
        for row in self.rows("select * from pgqueue.jobs where status in ('completed', 'cancelled', 'dead_letter')"):
            token = (row["result"] or {}).get("token")
            self.observer.write("final", str(row["job_id"]), row["status"], row["attempts"], token)

    # Time --------------------------------------------------------------------------------------------------------

    def lose_leases(self) -> None:
        """Let every lease run out and take back what was lost."""
        time.sleep(self.terms.lease + 0.05)
        self.sweep()

    def sweep(self, step: str | None = None) -> None:
        self.rows("select * from pgqueue.sweep(%s)", step)

    def work(self, turns: int = 200) -> None:
        """Run everything that is left, for so many sweeps at most."""
        for _ in range(turns):
            self.sweep()
            for job in self.claim(50):
                self.start(job)
                if job.job_type == "doomed":
                    self.fail(job)
                else:
                    self.finish(job)
            (left,) = self.rows("select count(*) as jobs from pgqueue.jobs_live")
            if not left["jobs"]:
                return

    def findings(self) -> list[Violation]:
        """What the checker finds."""
        self.rows("select * from pgqueue.sweep('measure')")
        final = tables.read(self.connect())
        if not any((final.processed or {}).values()):
            # Nobody has counted: what a hand did is no worker's word.
            final.processed = None
        final.submitted = None
        return checker.check(ledger.read(self.folder), final, self.terms)

    def _task_ledger(self, job: Claimed) -> ledger.Ledger:
        if job.worker not in self._tasks:
            self._tasks[job.worker] = ledger.Ledger(self.folder, "tasks")
        return self._tasks[job.worker]


__all__ = ["LEASE", "Bug", "Change", "Hand", "plant", "source"]
