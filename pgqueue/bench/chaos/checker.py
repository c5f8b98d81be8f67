"""The checker: compares the ledger with the final tables, and says where they contradict each other.

It knows what was promised, and nothing of how the queue keeps it:

missing     what a producer was told is accepted is there
uninvited   what is there, and what ran, was asked for and not refused
twice       a job is in one place, and what was asked for once is one job
stuck       in the end everything has ended
changed     a final state that was seen once stays
starts      every start is an attempt, no attempt starts twice, and an attempt that never started lost its lease
early       no lease is lost before its time
vain        what returned is not run again, unless its lease was lost
charged     a job fails as often as it may, not more and not less
result      a completed job's result is what its last attempt returned
cancelled   what an operator was told is cancelled ends cancelled, and does not start afterwards
order       jobs of one ordering key start in the order in which they were enqueued, each after the one before
together    two jobs of one key never run at once
effects     what a task wrote in its job's transaction is there if, and only if, the job completed
counters    the metrics say what the tables and the tasks say
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pgqueue.bench.chaos.ledger import RAISED, RETURNED, Book, Run
from pgqueue.bench.chaos.tables import FINAL, Row, Tables

#: Errors that a row keeps at most: of a job with as many, not every lost lease is told any more.
_KEPT: Final = 20


@dataclass(frozen=True, slots=True)
class Terms:
    """What was agreed on. `unsent_seconds`: what a killed worker counted for so long before its end may be missing."""

    lease: float
    max_lost: int
    unsent_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken, and by what."""

    rule: str
    what: str


class Case:
    """Ledger and tables side by side."""

    def __init__(self, book: Book, tables: Tables, terms: Terms) -> None:
        """Index the rows."""
        self.book = book
        self.tables = tables
        self.terms = terms
        self.rows: dict[str, Row] = {}
        self.by_n: dict[int, list[Row]] = defaultdict(list)
        for row in tables.rows:
            self.rows[row.job_id] = row
            self.by_n[row.n].append(row)

    def revived(self, row: Row) -> int:
        """How often dead letters of its kind were retried by hand: how often it may have begun anew."""
        return self.book.revivals.get(row.job_type, 0)

    def lost(self, run: Run) -> bool:
        """Whether the row says that this attempt's lease ran out (or has no room left to say so)."""
        row = self.rows.get(run.job_id)
        return row is not None and (len(row.errors) >= _KEPT or run.attempt in row.leases_lost)


Found = Iterator[str]


def missing(case: Case) -> Found:
    """What was accepted is there."""
    for n, ids in case.book.ids.items():
        for job_id in ids:
            if job_id not in case.rows:
                yield f"job {job_id} (n {n}) was accepted and is gone"


def uninvited(case: Case) -> Found:
    """What is there and what ran was asked for."""
    for row in case.tables.rows:
        if row.n not in case.book.asked:
            yield f"job {row.job_id} (n {row.n}) is there and was never asked for"
        elif row.n not in case.book.ids and row.n not in case.book.unsure:
            yield f"job {row.job_id} (n {row.n}) is there, and its producer was never told so"
    for job_id, runs in case.book.runs.items():
        if job_id not in case.rows:
            yield f"job {job_id} (n {runs[0].n}) ran {len(runs)} times and is not there"


def twice(case: Case) -> Found:
    """One job for what was asked for once, in one place."""
    for job_id, times in Counter(row.job_id for row in case.tables.rows).items():
        if times > 1:
            states = sorted(row.status for row in case.tables.rows if row.job_id == job_id)
            yield f"job {job_id} is there {times} times: {', '.join(states)}"
    for n, rows in case.by_n.items():
        if len({row.job_id for row in rows}) > 1:
            yield f"n {n} became {len(rows)} jobs: {', '.join(row.job_id for row in rows)}"


def stuck(case: Case) -> Found:
    """Everything has ended."""
    for row in case.tables.rows:
        if row.status not in FINAL:
            yield f"job {row.job_id} ({row.job_type}) is still {row.status} after {row.attempts} attempts"


def changed(case: Case) -> Found:
    """A final state stays, but that of a dead letter which an operator retried."""
    for job_id, seen in case.book.finals.items():
        row = case.rows.get(job_id)
        for _, status, attempts, token in seen:
            if row is None:
                yield f"job {job_id} was seen {status} and is gone"
            elif (row.status, row.attempts, row.token) != (status, attempts, token) and not (
                status == "dead_letter" and case.revived(row)
            ):
                yield (
                    f"job {job_id} was seen {status} (attempt {attempts}, result {token}) and is "
                    f"{row.status} (attempt {row.attempts}, result {row.token})"
                )


def starts(case: Case) -> Found:
    """Starts and attempts explain each other."""
    for job_id, runs in case.book.runs.items():
        for attempt, times in Counter(run.attempt for run in runs).items():
            if times > 1:
                yield f"job {job_id} started {times} times as attempt {attempt}"
        row = case.rows.get(job_id)
        if row is not None and max(run.attempt for run in runs) > row.attempts:
            yield f"job {job_id} started as attempt {max(run.attempt for run in runs)} of {row.attempts}"
    for row in case.tables.rows:
        if row.status not in FINAL or len(row.errors) >= _KEPT:
            continue
        begun = {run.attempt for run in case.book.runs.get(row.job_id, ())}
        lost = row.leases_lost
        for attempt in range(1, row.attempts + 1):
            stopped = row.status == "cancelled" and attempt == row.attempts
            if attempt not in begun and attempt not in lost and not stopped:
                yield f"job {row.job_id} is {row.status}, and its attempt {attempt} of {row.attempts} never started"


def early(case: Case) -> Found:
    """A lease lasts for its time at least."""
    for row in case.tables.rows:
        for attempt, seconds in row.leases_lost.items():
            if seconds < case.terms.lease - 0.05:
                yield (
                    f"job {row.job_id} lost the lease of attempt {attempt} after {seconds:.2f} s "
                    f"of {case.terms.lease:g} s"
                )


def vain(case: Case) -> Found:
    """What returned counts. A commit may fail after the task's return, and nothing stops a thread that was given up."""
    for run in case.book.all_runs():
        row = case.rows.get(run.job_id)
        if run.outcome != RETURNED or row is None or run.job_type in ("effect", "thread") or case.lost(run):
            continue
        counts = row.status == "completed" and run.attempt == row.attempts
        if not counts and row.status != "cancelled" and row.status in FINAL:
            yield f"job {run.job_id}: attempt {run.attempt} returned, and the job is {row.status} by {row.attempts}"


def charged(case: Case) -> Found:
    """A job fails as often as it may."""
    for row in case.tables.rows:
        asked = case.book.asked.get(row.n)
        if asked is None or row.job_type == "effect":
            continue
        raised = sum(run.outcome == RAISED for run in case.book.runs.get(row.job_id, ()))
        most = (asked.max_retries + 1) * (1 + case.revived(row))
        # A failure that came after its lease was lost is not charged.
        if raised > most + len(row.leases_lost) and len(row.errors) < _KEPT:
            yield f"job {row.job_id} failed {raised} times; {most} were to be had"
        if row.status != "dead_letter" or case.revived(row):
            continue
        if row.lost > case.terms.max_lost:
            continue
        if raised < asked.max_retries + 1:
            yield f"job {row.job_id} is a dead letter after {raised} failures of {asked.max_retries + 1}: {row.error}"


def result(case: Case) -> Found:
    """A completed job's result is what its last attempt returned."""
    for row in case.tables.rows:
        if row.status != "completed":
            continue
        runs = [run for run in case.book.runs.get(row.job_id, ()) if run.attempt == row.attempts]
        if not runs:
            yield f"job {row.job_id} is completed by attempt {row.attempts}, which never started"
        elif row.token is None or row.token != runs[0].token:
            yield (
                f"job {row.job_id} has the result {row.token}; its attempt {row.attempts} {runs[0].outcome} "
                f"with {runs[0].token}"
            )


def cancelled(case: Case) -> Found:
    """What was answered to operators is so."""
    for job_id, (at, answer) in case.book.cancels.items():
        row = case.rows.get(job_id)
        if answer not in ("cancelled", "cancel_requested") or row is None:
            continue
        if row.status != "cancelled":
            yield f"job {job_id} was answered {answer} and is {row.status}"
        if answer == "cancelled" and any(run.at > at for run in case.book.runs.get(job_id, ())):
            yield f"job {job_id} was answered cancelled and started afterwards"


def _lines(case: Case) -> Iterator[tuple[str, list[Row]]]:
    """Give the jobs of each ordering key in the order in which their producer enqueued them."""
    keys: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in case.tables.rows:
        if row.ordering_key is not None and row.n in case.book.asked:
            keys[row.queue, row.ordering_key].append(row)
    for (_, key), rows in keys.items():
        yield key, sorted(rows, key=lambda row: case.book.asked[row.n].place)


def order(case: Case) -> Found:
    """Each after the end of the one before. A dead letter that was retried joins its line anew."""
    for key, rows in _lines(case):
        free_at, holder = 0.0, ""
        for row in rows:
            runs = case.book.runs.get(row.job_id, ())
            if not runs or case.revived(row):
                continue
            began = min(run.at for run in runs)
            if began < free_at:
                yield f"key {key}: job {row.job_id} started {free_at - began:.3f} s before job {holder} had ended"
            ends = [run.ended_at for run in runs if run.ended_at is not None and not case.lost(run)]
            if ends and max(ends) > free_at:
                free_at, holder = max(ends), row.job_id


def together(case: Case) -> Found:
    """Of one key one at a time. A worker that is told too late of its lost lease is not meant."""
    for key, rows in _lines(case):
        spans = sorted(
            (run.at, run.ended_at, run)
            for row in rows
            for run in case.book.runs.get(row.job_id, ())
            if run.ended_at is not None and not case.lost(run)
        )
        until, who = 0.0, ""
        for began, ended, run in spans:
            if began < until:
                yield f"key {key}: job {run.job_id} started {until - began:.3f} s before {who} ended"
            if ended > until:
                until, who = ended, f"attempt {run.attempt} of job {run.job_id}"


def effects(case: Case) -> Found:
    """A task's writes and its job's completion are one."""
    for (job_id, attempt), times in case.tables.effects.items():
        row = case.rows.get(job_id)
        if row is None or row.status != "completed" or row.attempts != attempt or times != 1:
            state = "gone" if row is None else f"{row.status} by attempt {row.attempts}"
            yield f"job {job_id} is {state}, and attempt {attempt} wrote {times} rows in its transaction"
    for row in case.tables.rows:
        wrote = (row.job_id, row.attempts) in case.tables.effects
        if row.job_type == "effect" and row.status == "completed" and not wrote:
            yield f"job {row.job_id} is completed without what its task wrote in the same transaction"


def counters(case: Case) -> Found:
    """The metrics count every job once, and every attempt once but what a killed worker had not sent yet."""
    tables = case.tables
    if tables.submitted is not None:
        there = Counter((row.queue, row.job_type) for row in case.rows.values())
        for queue, job_type in sorted(there | tables.submitted):
            told, jobs = tables.submitted[queue, job_type], there[queue, job_type]
            if told != jobs:
                yield f"jobs_submitted_total of {job_type} in {queue} is {told}; there are {jobs} jobs"
    if tables.processed is None:
        return
    completed = sum(row.status == "completed" for row in case.rows.values())
    # A task that returns although its job's cancel was requested has completed its attempt, but not its job.
    beside = sum(
        run.outcome == RETURNED and case.rows[run.job_id].status == "cancelled"
        for run in case.book.all_runs()
        if run.job_id in case.rows
    )
    # A worker that had no answer to its completion asks again, and hears that it has lost its lease.
    counted, unheard = tables.processed.get("completed", 0), tables.processed.get("lost", 0)
    files: dict[str, list[float]] = defaultdict(list)
    for run in case.book.all_runs():
        files[run.by].append(run.at if run.ended_at is None else run.ended_at)
    unsent = 0
    for moments in files.values():
        since = max(moments) - case.terms.unsent_seconds
        unsent += sum(at > since for at in moments)
    if not completed - unsent - unheard <= counted <= completed + beside:
        yield (
            f"jobs_processed_total of completed is {counted}; {completed} jobs are completed "
            f"({unsent + unheard} may be untold, {beside} were cancelled)"
        )


RULES: Final[tuple[Callable[[Case], Found], ...]] = (
    missing, uninvited, twice, stuck, changed, starts, early, vain, charged, result, cancelled, order, together,
    effects, counters,
)  # fmt: skip


def check(book: Book, tables: Tables, terms: Terms) -> list[Violation]:
    """Return every contradiction between ledger and tables."""
    case = Case(book, tables, terms)
    found = [Violation("torn", line) for line in book.torn]
    for rule in RULES:
        found += [Violation(rule.__name__, what) for what in rule(case)]
    return found
