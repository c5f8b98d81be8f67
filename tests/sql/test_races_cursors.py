"""No pending job ends up below where claims begin, whenever whoever made it pending meets the sweep."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from tests.conftest import Connect
from tests.meet import aside, wait_for_lock
from tests.servers import Databases, OwnServer
from tests.sql.verbs import OTHER, WORKER, Verbs, refused

# A sweep that stops at two gates: between its look at the sequence and at the writers, and after the latter.
GATES = """
    alter function pgqueue.open_writers() rename to really_open_writers;
    create function pgqueue.open_writers() returns text[] language plpgsql as $$
    declare
      writers text[];
    begin
      perform pg_advisory_xact_lock_shared(1);
      writers := pgqueue.really_open_writers();
      perform pg_advisory_xact_lock_shared(2);
      return writers;
    end $$;
    create function pgqueue.gate() returns trigger language plpgsql as $$
    begin
      perform pg_advisory_xact_lock_shared(3);
      return new;
    end $$;
    create trigger gate before update on pgqueue.claim_cursors for each row execute function pgqueue.gate();
"""


class Stage:
    """A database with a sweeper that stops at gates, and sessions that act while it stands."""

    def __init__(self, dsn: str, patient: bool) -> None:
        self.patient = patient
        self.sessions = [psycopg.connect(dsn, autocommit=True) for _ in range(4)]
        self.q, self.actor, self.sweeper, self.gatekeeper = map(Verbs, self.sessions)
        self.q.session.execute(GATES)
        # Names of prepared transactions are the whole server's.
        self.gid = self.q.value("select current_database()")

    def close(self) -> None:
        for session in self.sessions:
            session.close()

    def clear(self) -> None:
        """No jobs, and cursors that two sweeps have brought up to now."""
        self.q.session.execute("delete from pgqueue.jobs")
        if not self.patient:
            self.q.freeze()
        self.sweep_past(3)

    def draw(self) -> None:
        """As if 5,000 jobs had been enqueued, and drained again; for an impatient sweep also as if that took time."""
        if not self.patient:
            self.q.advance(seconds=6)
        self.q.session.execute("select setval('pgqueue.jobs_seq', nextval('pgqueue.jobs_seq') + 5000)")

    def sweep_past(self, sweeps: int) -> None:
        for _ in range(sweeps):
            self.draw()
            self.q.sweep("cursors")

    def play(self, acts: dict[int, list[Callable[[], object]]]) -> None:
        """Two sweeps; `acts` happen before the first (0), at its gates (1 to 3), before the second (4), and so on."""
        for first in (0, 4):
            for act in acts.get(first, []):
                self.act(act)
            self.draw()
            gates = [gate for gate in (1, 2, 3) if first + gate in acts]
            for gate in gates:
                self.gatekeeper.rows("select pg_advisory_lock(%s)", [gate])
            swept = aside(self.sweeper.sweep, "cursors")
            for gate in gates:
                with contextlib.suppress(AssertionError):
                    # A sweep that moves no cursor never comes to the third.
                    wait_for_lock(self.q.session, self.sweeper.session.info.backend_pid, 2 if gate < 3 else 0.1)
                for act in acts[first + gate]:
                    self.act(act)
                self.gatekeeper.rows("select pg_advisory_unlock(%s)", [gate])
            swept.result(10)
        for act in acts.get(8, []):
            self.act(act)

    def act(self, act: Callable[[], object]) -> None:
        """Neither side may wait for the other."""
        aside(act).result(10)

    def claims_first(self) -> Any:
        """The job that the next claim takes, after three sweeps more and with a newcomer behind."""
        self.q.insert(job_type="newcomer")
        self.sweep_past(3)
        (job,) = self.q.claim(1, OTHER)
        assert not self.q.rows("select * from pgqueue.alerts where alert = 'BelowCursor'")
        return job.job_id


@pytest.fixture(scope="module")
def stage(request: pytest.FixtureRequest, template_copies: Databases) -> Iterator[Stage]:
    """The sweep waits for writers that it has noted, or leaves them behind at once."""
    dsn = template_copies.create()
    made = Stage(dsn, request.param == "patient")
    yield made
    made.close()
    template_copies.drop(dsn)


def an_insert(stage: Stage) -> Callable[[], object]:
    return lambda: stage.actor.insert(job_type="late")


def a_copy(stage: Stage) -> Callable[[], object]:
    def copy() -> None:
        with stage.actor.session.cursor().copy("copy pgqueue.jobs (job_type) from stdin") as writer:
            writer.write_row(["late"])

    return copy


def a_savepoint(stage: Stage) -> Callable[[], object]:
    def insert() -> None:
        with stage.actor.session.transaction(force_rollback=True):
            stage.actor.insert(job_type="lost")
        with stage.actor.session.transaction():
            stage.actor.insert(job_type="late")

    return insert


def an_ordered_insert(stage: Stage) -> Callable[[], object]:
    return lambda: stage.actor.insert(job_type="late", ordering_key="k")


def claimed(stage: Stage) -> Any:
    stage.q.insert(job_type="late")
    (job,) = stage.q.claim(1, WORKER)
    return job


def a_release(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    return lambda: stage.actor.release([job])


def a_lost_lease(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    stage.q.rows("update pgqueue.jobs set lease_expires_at = now() - interval '5 s' where job_id = %s", [job.job_id])
    return lambda: stage.actor.sweep("leases")


def a_retry(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    stage.q.fail(job)
    return lambda: stage.actor.retry(job.job_id)


def a_revival(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    stage.q.fail(job, retryable=False)
    return lambda: stage.actor.retry(job.job_id)


def a_due_job(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    stage.q.rows("select pgqueue.fail(%s, %s, 1, '{}', true, '0')", [WORKER, job.job_id])
    return lambda: stage.actor.sweep("due")


def by_hand(change: str, before: str = "true") -> Callable[[Stage], Callable[[], object]]:
    def prepare(stage: Stage) -> Callable[[], object]:
        job_id = stage.q.insert(job_type="late")
        stage.q.rows(f"update pgqueue.jobs set {before} where job_id = %s", [job_id]) if before != "true" else None
        return lambda: stage.actor.rows(f"update pgqueue.jobs set {change} where job_id = %s", [job_id])

    return prepare


def a_failed_job_by_hand(stage: Stage) -> Callable[[], object]:
    job = claimed(stage)
    stage.q.fail(job)
    return lambda: stage.actor.rows("update pgqueue.jobs set status = 'pending' where job_id = %s", [job.job_id])


ACTS: dict[str, Callable[[Stage], Callable[[], object]]] = {
    "insert": an_insert,
    "copy": a_copy,
    "savepoint": a_savepoint,
    "ordered insert": an_ordered_insert,
    "release": a_release,
    "lost lease": a_lost_lease,
    "retry of a failed job": a_retry,
    "retry of a dead letter": a_revival,
    "due": a_due_job,
    "failed to pending by hand": a_failed_job_by_hand,
    "priority by hand": by_hand("priority = 2", "priority = 3"),
    "queue by hand": by_hand("queue = 'default'", "queue = 'elsewhere'"),
    "seq by hand": by_hand("seq = 1"),
}
PATIENT = [("patient", name) for name in ACTS]
# What draws a seq in a transaction that may be left behind, and one that does not.
IMPATIENT = [
    (False, name)
    for name in ("insert", "copy", "savepoint", "due", "ordered insert", "retry of a dead letter", "release")
]
MOMENTS = list(itertools.combinations_with_replacement(range(9), 2))


@pytest.mark.parametrize(("stage", "name"), [*PATIENT, *IMPATIENT], indirect=["stage"])
def test_every_moment_of_an_act_and_its_commit(stage: Stage, name: str) -> None:
    for begins, ends in MOMENTS:
        stage.clear()
        act = ACTS[name](stage)
        stage.sweep_past(3)
        transaction = contextlib.ExitStack()

        def begin(act: Callable[[], object] = act, transaction: contextlib.ExitStack = transaction) -> None:
            transaction.enter_context(stage.actor.session.transaction())
            act()

        acts: dict[int, list[Callable[[], object]]] = {begins: [begin]}
        acts.setdefault(ends, []).append(transaction.close)
        stage.play(acts)
        (late,) = stage.q.rows("select * from pgqueue.jobs where job_type = 'late'")
        assert late.status == "pending"
        assert stage.claims_first() == late.job_id, f"begun at {begins}, ended at {ends}"


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        ("patient", "insert"),
        ("patient", "ordered insert"),
        ("patient", "release"),
        ("patient", "priority by hand"),
        ("impatient", "insert"),
    ],
    indirect=["stage"],
)
def test_every_moment_of_a_prepared_transaction(stage: Stage, name: str) -> None:
    triples = list(itertools.combinations_with_replacement((0, 1, 2, 4, 5, 6, 8), 3))
    for begins, prepared, ends in triples:
        stage.clear()
        act = ACTS[name](stage)
        stage.sweep_past(3)

        def begin(act: Callable[[], object] = act) -> None:
            stage.actor.session.execute("begin")
            act()

        acts: dict[int, list[Callable[[], object]]] = {begins: [begin]}
        acts.setdefault(prepared, []).append(lambda: stage.actor.session.execute(f"prepare transaction '{stage.gid}'"))
        acts.setdefault(ends, []).append(lambda: stage.q.session.execute(f"commit prepared '{stage.gid}'"))
        stage.play(acts)
        (late,) = stage.q.rows("select * from pgqueue.jobs where job_type = 'late'")
        assert stage.claims_first() == late.job_id, f"begun at {begins}, prepared at {prepared}, ended at {ends}"


@pytest.mark.parametrize("how", ["plain", "savepoint", "copy", "prepared", "release", "priority"])
def test_ten_thousand_jobs_pass_an_open_transaction(q: Verbs, connect: Connect, how: str) -> None:
    late = Verbs(connect())
    opened = contextlib.ExitStack()
    if how in ("release", "priority"):
        q.insert(job_type="late", priority=2 if how == "release" else 3)
        (job,) = q.claim() if how == "release" else [None]
        q.sweep()
    if how == "copy":
        writer = opened.enter_context(late.session.cursor().copy("copy pgqueue.jobs (job_type) from stdin"))
        writer.write_row(["late"])
        writer.write_row(["late"])
        # libpq sends what has grown to some size.
        for _ in range(2000):
            writer.write_row(["x" * 100])
    elif how == "prepared":
        late.session.execute("begin")
        late.insert(job_type="late")
    else:
        opened.enter_context(late.session.transaction())
        if how == "plain":
            late.insert(job_type="late")
        elif how == "savepoint":
            with late.session.transaction():
                late.insert(job_type="late")
        elif how == "release":
            late.release([job])
        else:
            late.rows("update pgqueue.jobs set priority = 2")
    q.sweep()
    if how == "prepared":
        gid = q.value("select current_database()")
        late.session.execute(f"prepare transaction '{gid}'")
        opened.callback(q.session.execute, f"commit prepared '{gid}'")
    for _ in range(10):
        q.fill(1000, "other")
        q.sweep()
        while jobs := q.claim(500, job_types=["other"]):
            q.complete(jobs)
        q.sweep()
    assert q.value("select count(*) from pgqueue.jobs_completed") == 10_000
    opened.close()
    q.insert(job_type="newcomer")
    for _ in range(3):
        q.sweep()
    (first,) = q.claim()
    assert first.job_type == "late"
    assert q.value("select max(low_seq) > 5000 from pgqueue.claim_cursors") or how not in ("release", "priority")


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_an_old_snapshot_does_not_move_cursors(q: Verbs, connect: Connect, level: psycopg.IsolationLevel) -> None:
    """A sweep in REPEATABLE READ would see writers end, and not what they wrote."""
    writer, sweeper = Verbs(connect()), Verbs(connect())
    q.complete([q.start()])
    q.sweep()
    with writer.session.transaction():
        writer.insert(job_type="late")
        q.session.execute("select setval('pgqueue.jobs_seq', 5000)")
        q.sweep()
        sweeper.session.isolation_level = level
        sweeper.session.autocommit = False
        sweeper.rows("select 1")
    with refused("PQ422", "READ COMMITTED"):
        sweeper.rows("select * from pgqueue.sweep()")
    sweeper.session.rollback()
    assert [job.job_type for job in q.claim()] == ["late"]


@pytest.mark.parametrize("patient", [True, False], ids=["patient", "impatient"])
def test_a_prepared_transaction_that_a_restart_finds_again(own_server: OwnServer, patient: bool) -> None:
    draw = "select setval('pgqueue.jobs_seq', nextval('pgqueue.jobs_seq') + 5000)"
    with psycopg.connect(own_server.dsn, autocommit=True) as session, psycopg.connect(own_server.dsn) as writer:
        q = Verbs(session)
        q.freeze()
        q.complete([q.start()])
        q.sweep()
        Verbs(writer).insert(job_type="late")
        session.execute(draw)
        q.sweep()
        if not patient:
            q.advance(seconds=6)
            q.sweep()
        writer.execute("prepare transaction 'late'")
    own_server.stop("immediate")
    own_server.start()
    with psycopg.connect(own_server.dsn, autocommit=True) as session:
        q = Verbs(session)
        for _ in range(3):
            session.execute(draw)
            q.sweep()
        session.execute("commit prepared 'late'")
        q.insert(job_type="newcomer")
        for _ in range(3):
            q.sweep()
        assert [job.job_type for job in q.claim()] == ["late"]


def cursors_at_5000(q: Verbs) -> None:
    """5,000 jobs come and go, and cursors follow."""
    q.fill(5000)
    q.sweep()
    while jobs := q.claim(500):
        q.complete(jobs)
    for _ in range(5):
        q.sweep()
    assert q.value("select min(low_seq) from pgqueue.claim_cursors") >= 5000


def test_jobs_are_claimed_when_the_sequence_was_set_back(q: Verbs, connect: Connect) -> None:
    cursors_at_5000(q)
    writer = Verbs(connect())
    q.session.execute("truncate pgqueue.jobs")
    q.session.execute("select setval('pgqueue.jobs_seq', 1)")
    with writer.session.transaction():
        late = writer.insert()
        ids = [q.insert() for _ in range(5)]
        for _ in range(3):
            q.sweep()
        assert [job.job_id for job in q.claim(9)] == ids
        q.session.execute("select setval('pgqueue.jobs_seq', 2000)")
        for _ in range(3):
            q.sweep()
    ids = [late, *(q.insert() for _ in range(5))]
    for _ in range(3):
        q.sweep()
    assert [job.job_id for job in q.claim(9)] == ids


def test_limits_hold_when_the_sequence_was_set_back(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, hard_limit) values ('default', 10000)")
    cursors_at_5000(q)
    q.session.execute("update pgqueue.queues set hard_limit = 20")
    q.session.execute("select setval('pgqueue.jobs_seq', 1)")
    q.sweep()
    q.fill(15)
    with refused("PQ503", "more than 20 jobs"):
        q.fill(10)
