"""Who may do what: four roles with least privilege, and nobody else."""

import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.sql.verbs import OTHER, WORKER, Verbs, refused

PRODUCER, WORKS, OPERATOR, READER = "pgqueue_producer", "pgqueue_worker", "pgqueue_operator", "pgqueue_reader"
ROLES = (PRODUCER, WORKS, OPERATOR, READER)
ENQUEUES = {"enqueue", "enqueue_many", "enqueue_rows"}
LOOKS = {"job", "why", "clock", "schema_version", "missing_roles"}
WORK = {
    "claim", "heartbeat", "complete", "complete_and_claim", "fail", "snooze", "release", "rate_limit",
    "cancel_attempt", "set_progress",
    "worker_started", "worker_seen", "worker_stopped", "wait_for_work", "stop_waiting", "writers_open", "open_writers",
}  # fmt: skip
CARE = {"sweep", "maintain_partitions"}
OPERATE = {
    "cancel", "cancel_many", "retry", "retry_dead_letters", "discard", "discard_dead_letters", "pause", "resume",
    "pause_job_type", "resume_job_type",
}  # fmt: skip
WATCH = {"watch", "unwatch"}
MAY = {
    PRODUCER: ENQUEUES | LOOKS,
    WORKS: ENQUEUES | LOOKS | WORK | CARE | WATCH | {"backoff"},
    OPERATOR: ENQUEUES | LOOKS | OPERATE | CARE | WATCH | {"backoff"},
    READER: LOOKS | WATCH | {"backoff"},
}
INTERNAL = {
    "settle", "store", "revive", "held", "take_keys", "take_row_keys", "jobs_take_keys", "promote_keys",
    "lock_key", "note", "publish", "ring", "lower_cursor", "check_depth", "find_job", "finished_job", "known_job",
    "cancel_one", "job_arrives", "jobs_arrived", "jobs_edited", "check_edit", "take", "sweep_due", "sweep_leases",
    "sweep_expired", "sweep_cursors", "sweep_prune", "add_error", "error_record", "keep_few_statistics",
    "let_in", "was_let_in", "look_at_claims", "note_strays", "say_started", "say_released", "grant_roles",
}  # fmt: skip


def privileges(q: Verbs, role: str) -> dict[str, bool]:
    rows = q.rows(
        "select p.proname, bool_and(has_function_privilege(%s, p.oid, 'execute')) as may"
        "  from pg_proc p where p.pronamespace = 'pgqueue'::regnamespace group by 1",
        [role],
    )
    return {row.proname: row.may for row in rows}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_call_its_verbs_and_no_others(q: Verbs, role: str) -> None:
    may = privileges(q, role)
    verbs = set().union(*MAY.values())
    assert {name for name in verbs if may[name]} == MAY[role]
    assert set(may) >= INTERNAL
    assert {name for name in INTERNAL if may[name]} == set()


def test_whoever_has_no_role_has_nothing(q: Verbs) -> None:
    assert q.rows(
        "select p.oid::regprocedure from pg_proc p"
        " cross join aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a"
        " where p.pronamespace = 'pgqueue'::regnamespace and a.grantee = 0"
    ) == []  # fmt: skip
    assert q.rows(
        "select c.relname from pg_class c cross join aclexplode(c.relacl) a"
        " where c.relnamespace = 'pgqueue'::regnamespace and a.grantee = 0"
    ) == []  # fmt: skip


def test_functions_that_run_as_their_owner_pin_the_search_path(q: Verbs) -> None:
    loose = q.rows(
        "select p.oid::regprocedure::text as name from pg_proc p"
        " where p.pronamespace = 'pgqueue'::regnamespace and p.prosecdef"
        "   and not exists (select from unnest(p.proconfig) c where c = 'search_path=pg_catalog, pg_temp')"
    )
    assert loose == []


def test_triggers_run_as_the_owner(q: Verbs) -> None:
    rows = q.rows(
        "select distinct p.proname, p.prosecdef from pg_trigger t join pg_proc p on p.oid = t.tgfoid"
        " where p.pronamespace = 'pgqueue'::regnamespace and not t.tgisinternal"
    )
    assert len(rows) >= 4
    assert [row.proname for row in rows if not row.prosecdef] == []


@pytest.fixture
def as_role(q: Verbs, connect: Connect) -> Callable[[str], Verbs]:
    """Sessions that have taken on one of the group roles."""

    def session(role: str) -> Verbs:
        verbs = Verbs(connect())
        verbs.session.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
        return verbs

    return session


@pytest.fixture
def login(q: Verbs, connect: Connect) -> Iterator[Callable[..., tuple[str, Verbs]]]:
    """Sessions of login roles made for the test, members of the roles given."""
    made = []

    def session(*groups: str) -> tuple[str, Verbs]:
        name = f"test_{uuid.uuid4().hex[:12]}"
        q.session.execute(sql.SQL("create role {} login").format(sql.Identifier(name)))
        made.append(name)
        for group in groups:
            q.session.execute(sql.SQL("grant {} to {}").format(sql.Identifier(group), sql.Identifier(name)))
        verbs = Verbs(connect())
        verbs.session.execute(sql.SQL("set session authorization {}").format(sql.Identifier(name)))
        return name, verbs

    yield session
    for name in made:
        q.session.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


def denied(action: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        action(*arguments)


# A producer


def test_a_bare_producer_can_enqueue_by_every_door(q: Verbs, login: Callable[..., tuple[str, Verbs]]) -> None:
    _, producer = login(PRODUCER)
    producer.session.execute("insert into pgqueue.jobs (job_type, payload) values ('a', '{}')")
    producer.insert(job_type="b")
    producer.insert(
        job_id=uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057"), job_type="c", payload={"n": 1}, queue="new",
        priority=0, max_retries=1, retry_policy={"jitter": False}, timeout_ms=5, idempotency_key="i", producer_id="p",
        scheduled_at=q.freeze() + timedelta(hours=1), expires_at=q.freeze() + timedelta(hours=2), ordering_key="o",
        trace_context={},
    )  # fmt: skip
    producer.fill(100, "d", ordering_key="o")
    with producer.session.cursor().copy("copy pgqueue.jobs (job_type, idempotency_key) from stdin") as copy:
        copy.write_row(("e", "copied"))
    assert producer.enqueue("f", idempotency_key="k", ordering_key="o").duplicate is False
    assert producer.enqueue("f", idempotency_key="k").duplicate is True
    assert len(producer.enqueue_many({"job_type": "g", "idempotency_key": "k"}, {"type": "h"})) == 2
    found = q.rows("select job_type, count(*) as jobs from pgqueue.jobs group by 1 order by 1")
    assert {row.job_type: row.jobs for row in found} == dict.fromkeys("abcefh", 1) | {"d": 100}


def test_a_bare_producer_wakes_workers_and_tells_watchers(q: Verbs, login: Callable[..., tuple[str, Verbs]]) -> None:
    _, producer = login(PRODUCER)
    q.session.execute("select pgqueue.watch(%s, '1 hour')", [WORKER])
    q.session.execute("select pgqueue.wait_for_work(%s, null, null, 'bell')", [WORKER])
    q.session.execute("listen bell")
    q.session.execute("listen pgqueue_status")
    producer.insert()
    heard = [notice.channel for notice in q.session.notifies(timeout=10, stop_after=2)]
    assert sorted(heard) == ["bell", "pgqueue_status"]


def test_a_producer_meets_limits_and_rules_like_anybody(q: Verbs, as_role: Callable[[str], Verbs]) -> None:
    producer = as_role(PRODUCER)
    q.session.execute("insert into pgqueue.queues (name, hard_limit) values ('default', 1)")
    producer.insert()
    with pytest.raises(psycopg.Error, match="is full"):
        producer.insert()
    with pytest.raises(psycopg.errors.CheckViolation, match="retry_policy"):
        producer.insert(retry_policy={"x": 1}, queue="b")


def test_a_producer_cannot_write_anything_else(q: Verbs, as_role: Callable[[str], Verbs]) -> None:
    producer = as_role(PRODUCER)
    producer.insert()
    for column in ("status", "attempts", "seq", "worker_id", "result", "created_at", "finished_at", "due_at"):
        denied(producer.session.execute, f"insert into pgqueue.jobs (job_type, {column}) values ('t', null)")
    for statement in (
        "update pgqueue.jobs set priority = 0",
        "delete from pgqueue.jobs",
        "truncate pgqueue.jobs",
        "insert into pgqueue.jobs_live (job_type) values ('t')",
        "insert into pgqueue.queues (name) values ('q')",
        "insert into pgqueue.jobs_completed (job_type, status) values ('t', 'completed')",
        "select setval('pgqueue.jobs_seq', 1)",
        "create table pgqueue.mine (n int)",
    ):
        denied(producer.session.execute, statement)
    denied(lambda: producer.claim())
    denied(lambda: producer.cancel(uuid.uuid4()))
    denied(lambda: producer.sweep())


def test_a_producer_cannot_read_what_others_put_in(q: Verbs, login: Callable[..., tuple[str, Verbs]]) -> None:
    name, producer = login(PRODUCER)
    own, free, foreign = (q.insert(producer_id=who, payload={"secret": 1}) for who in (name, None, "somebody else"))
    for statement in (
        "select payload from pgqueue.jobs", "select * from pgqueue.jobs", "select * from pgqueue.jobs_live",
        "select * from pgqueue.job_results", "select * from pgqueue.dead_letters", "select * from pgqueue.queue_stats",
        "select * from pgqueue.idempotency_keys", "select * from pgqueue.api_keys", "select * from pgqueue.audit",
        "insert into pgqueue.jobs (job_type) values ('t') returning payload",
    ):  # fmt: skip
        denied(producer.session.execute, statement)
    # Ids are no secrets: `returning job_id` needs the right to select them.
    assert {row.job_id for row in producer.rows("select job_id from pgqueue.jobs")} == {own, free, foreign}
    assert [len(producer.call("job", job_id)) for job_id in (own, free, foreign)] == [1, 1, 0]
    assert "There is no job" in producer.why(foreign)
    assert "No worker" in producer.why(own)
    assert q.call("job", foreign)


def test_a_producer_gets_its_job_back_under_whatever_name_it_enqueues(
    q: Verbs, login: Callable[..., tuple[str, Verbs]]
) -> None:
    _, producer = login(PRODUCER)
    first = producer.enqueue(idempotency_key="k", producer_id="billing", payload={"n": 1})
    again = producer.enqueue(idempotency_key="k", producer_id="billing")
    # Whether that was it or another of the name cannot be told, so it is not told what is in it.
    withheld = first._replace(payload=None, errors=None, duplicate=True)
    assert again == withheld
    assert producer.enqueue_many({"job_type": "t", "idempotency_key": "k", "producer_id": "billing"}) == [withheld]


def test_a_key_known_to_another_producer_tells_a_bare_one_no_contents(
    q: Verbs, login: Callable[..., tuple[str, Verbs]]
) -> None:
    _, producer = login(PRODUCER)
    job_id = q.insert(producer_id="somebody else", idempotency_key="k", payload={"secret": 1})
    job = {"job_type": "t", "idempotency_key": "k", "producer_id": "somebody else", "payload": {"secret": 1}}
    found = [
        producer.enqueue(idempotency_key="k", producer_id="somebody else"),
        producer.enqueue_many(job)[0],
    ]
    assert [(row.job_id, row.duplicate, row.status, row.payload) for row in found] == [
        (job_id, True, "pending", None)
    ] * 2
    told = producer.one("select s.job::jsonb as job, s.duplicate, s.same from pgqueue.submit(%s) s", [Jsonb([job])])
    assert (told.job["job_id"], told.job["payload"], told.duplicate, told.same) == (str(job_id), None, True, True)
    assert not producer.value("select s.same from pgqueue.submit(%s) s", [Jsonb([job | {"payload": {"secret": 2}}])])


def test_a_producer_that_is_also_a_reader_sees_all(q: Verbs, login: Callable[..., tuple[str, Verbs]]) -> None:
    foreign = q.insert(producer_id="somebody else")
    for groups in ((PRODUCER, READER), (PRODUCER, WORKS), (PRODUCER, OPERATOR), (READER,)):
        assert len(login(*groups)[1].call("job", foreign)) == 1


# A worker


def test_a_worker_can_do_all_its_work(q: Verbs, as_role: Callable[[str], Verbs]) -> None:
    worker = as_role(WORKS)
    worker.session.execute("select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, null, null, 4, '1')", [WORKER])
    q.fill(8)
    jobs = worker.claim(8)
    assert worker.heartbeat(jobs) == {}
    assert worker.set_progress(jobs[0], 1) is True
    assert len(worker.complete(jobs[:2])) == 2
    assert worker.fail(jobs[2]) == "failed"
    assert worker.fail(jobs[3], retryable=False) == "dead_letter"
    assert worker.snooze(jobs[4]) == "submitted"
    assert worker.release(jobs[5:6]) == {jobs[5].job_id}
    assert worker.cancel_attempt(jobs[6]) == "cancelled"
    assert worker.rate_limit(jobs[7], timedelta(seconds=5)) == "submitted"
    worker.enqueue()
    worker.call("sweep")
    worker.call("maintain_partitions")
    worker.call("wait_for_work", WORKER, None, None, "bell")
    assert worker.call_value("writers_open", worker.call_value("open_writers")) is False
    worker.call("stop_waiting", WORKER)
    worker.call("worker_seen", WORKER, "idle", 1, 0)
    worker.call("worker_stopped", WORKER)
    assert worker.rows("select status, count(*) as jobs from pgqueue.jobs group by 1")
    denied(lambda: worker.cancel(jobs[2].job_id))
    denied(lambda: worker.retry(jobs[3].job_id))
    denied(lambda: worker.call("pause", "default"))
    denied(lambda: worker.insert())
    for statement in (
        "update pgqueue.jobs set priority = 0", "delete from pgqueue.jobs", "update pgqueue.queues set paused = true",
        "select * from pgqueue.api_keys",
    ):  # fmt: skip
        denied(worker.session.execute, statement)


# An operator


def test_an_operator_can_operate(q: Verbs, as_role: Callable[[str], Verbs]) -> None:
    operator = as_role(OPERATOR)
    dead, discarded = q.start(), q.start()
    for job in (dead, discarded):
        q.fail(job, retryable=False)
    assert operator.retry(dead.job_id).status == "pending"
    assert operator.cancel(dead.job_id) == "cancelled"
    assert operator.call_value("discard", discarded.job_id) == "discarded"
    assert operator.call("cancel_many", [uuid.uuid4()])[0].outcome == "not_found"
    assert operator.call_value("retry_dead_letters") == operator.call_value("discard_dead_letters") == 0
    assert operator.call_value("pause", "default") is True
    assert operator.call_value("resume", "default") is True
    operator.session.execute("insert into pgqueue.queues (name, retry_policy) values ('q', '{}')")
    operator.session.execute("update pgqueue.queues set paused = true, weights = null where name = 'q'")
    operator.session.execute("delete from pgqueue.queues where name = 'q'")
    operator.session.execute("insert into pgqueue.schedules (name, cron, job_type) values ('s', '* * * * *', 't')")
    operator.session.execute("delete from pgqueue.schedules")
    operator.call("sweep")
    assert operator.rows("select * from pgqueue.audit")
    denied(lambda: operator.claim())
    denied(lambda: operator.complete([dead]))
    denied(lambda: operator.fail(dead))
    for statement in (
        "update pgqueue.jobs set priority = 0", "delete from pgqueue.jobs", "delete from pgqueue.audit",
        "update pgqueue.api_keys set enabled = true", "insert into pgqueue.jobs (job_type) values ('t')",
    ):  # fmt: skip
        denied(operator.session.execute, statement)


def test_an_operators_pause_by_update_is_noted_under_its_name(
    q: Verbs, login: Callable[..., tuple[str, Verbs]]
) -> None:
    name, operator = login(OPERATOR)
    operator.session.execute("insert into pgqueue.queues (name, paused) values ('q', true)")
    assert q.rows("select actor, verb, target from pgqueue.audit") == [(name, "pause", "q")]


# A reader


def test_a_reader_can_read_and_nothing_else(q: Verbs, as_role: Callable[[str], Verbs]) -> None:
    reader = as_role(READER)
    job = q.start()
    for relation in (
        "jobs", "queues", "schedules", "workers", "job_results", "dead_letters", "queue_stats", "stuck_jobs", "alerts",
        "sweep_steps", "audit", "live_workers",
    ):  # fmt: skip
        reader.session.execute(sql.SQL("select * from pgqueue.{}").format(sql.Identifier(relation)))
    assert reader.call("job", job.job_id) == [job]
    assert "running" in reader.why(job.job_id)
    reader.call("watch", OTHER, timedelta(minutes=1))
    reader.call("unwatch", OTHER)
    for action in (
        lambda: reader.enqueue(), lambda: reader.enqueue_many({"job_type": "t"}), lambda: reader.insert(),
        lambda: reader.claim(), lambda: reader.complete([job]), lambda: reader.cancel(job.job_id),
        lambda: reader.call("pause", "default"), lambda: reader.call("sweep"),
        lambda: reader.session.execute("update pgqueue.jobs set priority = 0"),
        lambda: reader.session.execute("delete from pgqueue.jobs"),
        lambda: reader.session.execute("select * from pgqueue.api_keys"),
        lambda: reader.session.execute("select * from pgqueue.idempotency_keys"),
    ):  # fmt: skip
        denied(action)
    assert q.job(job.job_id) == job


def test_a_reader_takes_no_tokens_of_queues_and_watches_for_a_day_at_most(
    q: Verbs, as_role: Callable[[str], Verbs]
) -> None:
    reader = as_role(READER)
    assert reader.one("select * from pgqueue.lease_tokens('key:shop', 10, 1)").granted == 1
    for bucket in ("queue:default", "anything", None):
        with refused("PQ422", "bucket must be", column="bucket"):
            reader.rows("select * from pgqueue.lease_tokens(%s, 10, 1)", [bucket])
    reader.rows("select pgqueue.watch(%s, '100 years')", [WORKER])
    assert q.value("select max(expires_at) <= pgqueue.clock() + interval '1 day' from pgqueue.watchers")


# Nobody


def test_a_role_of_no_group_gets_nowhere(q: Verbs, login: Callable[..., tuple[str, Verbs]]) -> None:
    _, nobody = login()
    for action in (
        lambda: nobody.insert(), lambda: nobody.enqueue(), lambda: nobody.claim(), lambda: nobody.call("clock"),
        lambda: nobody.rows("select * from pgqueue.jobs"), lambda: nobody.rows("select * from pgqueue.queue_stats"),
    ):  # fmt: skip
        denied(action)


@pytest.mark.parametrize("role", ROLES)
def test_nobody_but_the_owner_moves_the_clock(as_role: Callable[[str], Verbs], role: str) -> None:
    denied(lambda: as_role(role).freeze())


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_be_granted_but_not_logged_in_as(q: Verbs, role: str) -> None:
    assert q.one("select rolcanlogin, rolsuper, rolcreaterole from pg_roles where rolname = %s", [role]) == (False,) * 3
