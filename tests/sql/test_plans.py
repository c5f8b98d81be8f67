"""What each verb touches: the right index of one live partition, and no more rows than it is about.

Whatever the statistics say, whether few or many jobs are in flight, and by custom and generic plans.
"""

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from tests.servers import Databases
from tests.sql.plans import touched
from tests.sql.verbs import OTHER, WORKER, Verbs

FINISHED = 300_000
DAYS = 30


def build(dsn: str, flight: int, finished: int) -> None:
    """A queue with `flight` jobs running and 5,000 in each way of waiting, and a history of a month."""
    with psycopg.connect(dsn, autocommit=True) as session:
        q = Verbs(session)
        q.session.execute("alter table pgqueue.jobs_live set (autovacuum_enabled = off)")
        now = q.freeze()
        for days in range(DAYS, -1, -6):
            q.freeze(now - timedelta(days=days))
            q.rows("select * from pgqueue.maintain_partitions()")
        q.rows(
            "create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe"
            " as 'select pg_catalog.statement_timestamp()'"
        )
        for status, share in (("completed", 8), ("cancelled", 1), ("dead_letter", 1)):
            q.rows(
                f"""insert into pgqueue.jobs_{status} (job_id, job_type, status, attempts, worker_id, finished_at)
                    select pgqueue.new_job_id(), 't', '{status}', 1, %s, now() - random() * {DAYS} * interval '1 day'
                      from generate_series(1, %s)""",
                [OTHER, finished * share // 10],
            )
        q.fill(flight, "flying", queue="flight")
        assert len(q.claim(flight, OTHER, ["flight"], lease="1 day")) == flight
        for queue in ("default", "other"):
            q.rows(
                "insert into pgqueue.jobs (job_type, queue, priority) select 'type' || n %% 3, %s, n %% 4"
                " from generate_series(1, 5000) n",
                [queue],
            )
        q.fill(5000, scheduled_at="2999-01-01 00:00+00")
        q.fill(5000, ordering_key="k")
        q.rows("analyze pgqueue.jobs")
        for _ in range(3):
            q.sweep()
        assert q.value("select count(*) from pgqueue.claim_cursors where cardinality(job_types) = 3") == 8


@dataclass
class Scene:
    dsn: str
    flight: int
    finished: int


SCENES = [
    pytest.param((flight, finished), id=name, marks=pytest.mark.xdist_group(name))
    for name, flight, finished in [("few in flight", 10, 0), ("many in flight, long history", 20_000, FINISHED)]
]


@pytest.fixture(scope="module", params=SCENES)
def scene(request: pytest.FixtureRequest, template_copies: Databases) -> Iterator[Scene]:
    dsn = template_copies.create()
    build(dsn, *request.param)
    yield Scene(dsn, *request.param)
    template_copies.drop(dsn)


STATISTICS = {
    # As in the first minute of a queue.
    "never": [
        "delete from pg_statistic where starelid::regclass::text like 'pgqueue.%'",
        """update pg_class set relpages = 0, reltuples = -1, relallvisible = 0
            where oid::regclass::text like 'pgqueue.jobs%'""",
    ],
    # As when autovacuum came by in a moment of rest.
    "empty": [
        "delete from pg_statistic where starelid::regclass::text like 'pgqueue.%'",
        """update pg_class set relpages = 1, reltuples = 0, relallvisible = 1
            where oid::regclass::text like 'pgqueue.jobs%'""",
    ],
    # As when it came by while everything was another queue's.
    "misleading": [
        "create temp table kept on commit drop as select job_id, status, queue, priority from pgqueue.jobs_live",
        "set local session_replication_role = replica",
        """update pgqueue.jobs_live set queue = 'misleading', priority = 3, job_type = 'misleading'
            where status = 'pending'""",
        "analyze pgqueue.jobs_live",
        """update pgqueue.jobs_live l set queue = k.queue, priority = k.priority, job_type = 'type0'
             from kept k where k.job_id = l.job_id and k.status = 'pending'""",
        "set local session_replication_role = origin",
    ],
    "fresh": ["analyze pgqueue.jobs_live"],
}


@pytest.fixture(params=STATISTICS)
def q(request: pytest.FixtureRequest, scene: Scene) -> Iterator[Verbs]:
    """A session of its own, whose plans nobody has made yet; what it does is undone."""
    with psycopg.connect(scene.dsn) as session:
        for statement in STATISTICS[request.param]:
            session.execute(statement)
        yield Verbs(session)
        session.rollback()


Case = Callable[[Verbs], tuple[str, Any]]


def running(q: Verbs, jobs: int) -> tuple[list[uuid.UUID], list[int]]:
    taken = q.claim(jobs)
    assert len(taken) == jobs
    return [job.job_id for job in taken], [job.attempts for job in taken]


def claim(jobs: int, arguments: str = "array['default']", more: str = "") -> Case:
    return lambda q: (f"select * from pgqueue.claim(%s, {arguments}, {jobs}{more})", [WORKER])


def with_running(statement: str, jobs: int = 50) -> Case:
    return lambda q: (statement, [WORKER, *running(q, jobs)])


def with_one(statement: str) -> Case:
    def prepare(q: Verbs) -> tuple[str, Any]:
        (job_id,), (attempt,) = running(q, 1)
        return statement, {"worker": WORKER, "job": job_id, "attempt": attempt}

    return prepare


def of_a_dead_letter(statement: str) -> Case:
    def prepare(q: Verbs) -> tuple[str, Any]:
        (job,) = q.claim(1)
        q.fail(job, retryable=False)
        return statement, {"job": job.job_id}

    return prepare


def of_a_failed_job(statement: str) -> Case:
    def prepare(q: Verbs) -> tuple[str, Any]:
        (job,) = q.claim(1)
        q.fail(job)
        return statement, {"job": job.job_id}

    return prepare


def of_a_completed_job(statement: str) -> Case:
    def prepare(q: Verbs) -> tuple[str, Any]:
        (job,) = q.claim(1)
        q.complete([job])
        return statement, {"job": job.job_id}

    return prepare


def of_nobody(statement: str) -> Case:
    return lambda q: (statement, {"job": q.value("select pgqueue.new_job_id()")})


def of_an_old_id(statement: str) -> Case:
    """Made elsewhere, an hour ago."""
    milliseconds = int((datetime.now(UTC) - timedelta(hours=1)).timestamp() * 1000)
    return lambda q: (statement, {"job": uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62)})


def sweep(step: str) -> Case:
    def prepare(q: Verbs) -> tuple[str, Any]:
        q.claim(100)
        return "select * from pgqueue.sweep(%s)", [step]

    return prepare


def sweep_again(step: str) -> Case:
    """Once it has seen what there is."""

    def prepare(q: Verbs) -> tuple[str, Any]:
        q.sweep(step)
        again = sweep(step)(q)
        # A claim is looked at again after a second, which may pass before the statement runs.
        q.session.execute("update pgqueue.claims set look_at = look_at + interval '1 minute'")
        return again

    return prepare


def behind_a_head(q: Verbs) -> tuple[str, Any]:
    return "insert into pgqueue.jobs (job_type, ordering_key) values ('t', 'k')", None


def of_a_head(q: Verbs) -> tuple[str, Any]:
    (head,) = q.rows("select job_id from pgqueue.jobs_live where ordering_key is not null and status = 'pending'")
    return "select pgqueue.cancel(%s)", [head.job_id]


# What is done, the rows of live jobs that it may look at, and the indexes for that.
PENDING, TYPE, KEY = {"jobs_live_pending"}, {"jobs_live_pending_type"}, {"jobs_live_pkey"}
HEADS = {"ordering_key must have only one job that does not wait", "jobs_live_key_waiting"}
CASES: dict[str, tuple[Case, int, set[str]]] = {
    "claim of 50": (claim(50), 60, PENDING),
    "claim of 1": (claim(1), 6, PENDING),
    "claim of one priority": (claim(50, more=", priorities => array[2::smallint]"), 60, PENDING),
    "claim of any queue": (claim(50, "null"), 80, PENDING),
    "claim of some types": (claim(20, more=", job_types => array['type0']"), 130, PENDING | TYPE),
    "claim of another type": (claim(20, more=", job_types => array['none']"), 4, PENDING | TYPE),
    "claim of an empty queue": (claim(50, "array['none']"), 0, PENDING),
    "complete 50": (with_running("select pgqueue.complete(%s, %s, %s, null)"), 50, KEY),
    "complete 1": (with_running("select pgqueue.complete(%s, %s, %s, null)", 1), 1, KEY),
    "heartbeat of 50": (with_running("select pgqueue.heartbeat(%s, %s, %s)"), 150, KEY),
    "release 50": (with_running("select pgqueue.release(%s, %s, %s)"), 150, KEY),
    "fail": (with_one("select pgqueue.fail(%(worker)s, %(job)s, %(attempt)s, '{}')"), 3, KEY),
    "fail for good": (with_one("select pgqueue.fail(%(worker)s, %(job)s, %(attempt)s, '{}', false)"), 3, KEY),
    "snooze": (with_one("select pgqueue.snooze(%(worker)s, %(job)s, %(attempt)s, '1 s')"), 3, KEY),
    "set_progress": (with_one("select pgqueue.set_progress(%(worker)s, %(job)s, %(attempt)s, '1')"), 3, KEY),
    "cancel_attempt": (with_one("select pgqueue.cancel_attempt(%(worker)s, %(job)s, %(attempt)s)"), 3, KEY),
    "cancel": (with_one("select pgqueue.cancel(%(job)s)"), 3, KEY),
    "cancel of a head": (of_a_head, 10, KEY | HEADS),
    "job that runs": (with_one("select * from pgqueue.job(%(job)s)"), 2, KEY),
    "job that completed": (of_a_completed_job("select * from pgqueue.job(%(job)s)"), 2, KEY),
    "job that nobody knows": (of_nobody("select * from pgqueue.job(%(job)s)"), 2, KEY),
    "why": (with_one("select pgqueue.why(%(job)s)"), 2, KEY),
    "retry of a failed job": (of_a_failed_job("select pgqueue.retry(%(job)s)"), 3, KEY),
    "retry of a dead letter": (of_a_dead_letter("select pgqueue.retry(%(job)s)"), 3, KEY),
    "discard": (of_a_dead_letter("select pgqueue.discard(%(job)s)"), 3, KEY),
    "insert": (lambda q: ("insert into pgqueue.jobs (job_type) values ('t')", None), 0, KEY),
    "insert behind a head": (behind_a_head, 4, HEADS | KEY),
    "enqueue": (lambda q: ("select * from pgqueue.enqueue('t', idempotency_key => 'k')", None), 2, KEY),
    "enqueue for later": (lambda q: ("select * from pgqueue.enqueue('t', delay => '1 h')", None), 2, KEY),
    "enqueue of an old id": (of_an_old_id("select * from pgqueue.enqueue('t', job_id => %(job)s)"), 2, KEY),
    "sweep of cursors": (sweep("cursors"), 1500, PENDING | {"jobs_live_due"}),
    "sweep of nothing due": (sweep("due"), 0, {"jobs_live_due"} | KEY),
    "first look at claims": (sweep("leases"), 20_000, KEY),
    "sweep of no lost lease": (sweep_again("leases"), 0, KEY),
    "sweep of nothing expired": (sweep("expired"), 1000, PENDING | {"jobs_live_expires"} | KEY),
    "sweep of keys": (sweep("keys"), 0, HEADS),
}

# They may ask for a finished job, in partitions that a job of today can be in.
LOOK_UPS = {
    "job that completed", "job that nobody knows", "retry of a dead letter", "discard", "enqueue of an old id",
}  # fmt: skip


def over(leaf: str) -> bool:
    """Whether nothing ends in this partition since the day before yesterday."""
    day = leaf.rpartition("_")[2]
    if not day.isdigit():
        return False
    begins = datetime.strptime(day, "%Y%m%d").replace(tzinfo=UTC)
    return begins + timedelta(days=7 if leaf.startswith("jobs_dead") else 1) < datetime.now(UTC) - timedelta(days=2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["auto", "force_custom_plan", "force_generic_plan"])
def test_touches(q: Verbs, scene: Scene, mode: str, subtests: pytest.Subtests) -> None:
    for name, (prepare, most, indexes) in CASES.items():
        with subtests.test(name):
            q.session.execute("savepoint before")
            statement, parameters = prepare(q)
            q.session.execute(f"discard plans; set local plan_cache_mode = {mode}")
            seen = touched(q.session, statement, parameters)
            q.session.execute("rollback to before")
            assert seen.rows() <= most
            assert seen.indexes() <= indexes
            assert not (seen.without_index() if scene.finished else seen.without_index() & {"jobs_live"})
            assert not {leaf for leaf in seen.finished() if name not in LOOK_UPS or over(leaf)}
