"""enqueue_many: any number of jobs in one call, all or none, on every kind of connection."""

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from pgqueue import App, EnqueuedJob, calling, calls, verbs
from pgqueue.connections import AsyncPool, SyncPool
from pgqueue.errors import InvalidJob, QueueFull
from pgqueue.settings import Settings
from pgqueue.verbs import many_parameters
from tests.conftest import Connect
from tests.python.running import eventually, make_app

NEW_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
MANY = 100_000


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as app:
        yield app


def asyncpg_arguments(database: str) -> dict[str, Any]:
    known = {"host": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
    given = conninfo_to_dict(database)
    return {known[name]: given[name] for name in known if name in given}


def jobs() -> list[dict[str, Any]]:
    """One with all there is to say, between two of which nothing is said."""
    at = datetime(2100, 1, 1, tzinfo=UTC)
    return [
        {"job_type": "t"},
        {
            "type": "send",
            "payload": {"to": 'é "\\ {,} NULL', "n": 2**60},
            "queue": 'odd "\\ {,} NULL',
            "priority": "critical",
            "scheduled_at": at,
            "idempotency_key": "null",
            "max_retries": 7,
            "retry_policy": {"base_delay_ms": 5},
            "timeout": timedelta(seconds=1.5),
            "expires_at": at + timedelta(hours=1),
            "producer_id": "p",
            "ordering_key": "o",
            "trace_context": {"traceparent": "00"},
            "job_id": NEW_ID,
        },
        {"job_type": "t", "delay": 3600.25},
        {"job_type": "t", "payload": None, "queue": None},
    ]


def check(app: App, ids: list[UUID]) -> None:
    """That they are stored as they were given."""
    first, said, later, last = (app.job_sync(job_id) for job_id in ids)
    assert [first.seq, said.seq, later.seq, last.seq] == sorted([first.seq, said.seq, later.seq, last.seq])
    for row in (first, last):
        assert (row.status, row.queue, row.priority, row.max_retries, row.payload) == ("pending", "default", 2, 3, {})
    assert (said.job_id, said.job_type, said.payload) == (UUID(NEW_ID), "send", {"to": 'é "\\ {,} NULL', "n": 2**60})
    assert (said.queue, said.priority, said.status, said.max_retries) == ('odd "\\ {,} NULL', 0, "submitted", 7)
    assert (said.retry_policy, said.timeout_ms, said.trace_context) == (
        {"base_delay_ms": 5},
        1500,
        {"traceparent": "00"},
    )
    assert (said.idempotency_key, said.producer_id, said.ordering_key) == ("null", "p", "o")
    at = datetime(2100, 1, 1, tzinfo=UTC)
    assert (said.scheduled_at, said.expires_at) == (at, at + timedelta(hours=1))
    assert later.status == "submitted"
    assert later.scheduled_at is not None
    assert later.scheduled_at - later.created_at == timedelta(seconds=3600.25)


def test_all_that_can_be_said_is_stored(app: App) -> None:
    answers = app.enqueue_many_sync(jobs())
    assert [answer.duplicate for answer in answers] == [False] * 4
    assert [answer.status for answer in answers] == ["pending", "submitted", "submitted", "pending"]
    check(app, [answer.job_id for answer in answers])


def test_by_any_driver(app: App, database: str) -> None:
    async def by_asyncpg() -> list[UUID]:
        session = await asyncpg.connect(**asyncpg_arguments(database))
        answers = await app.enqueue_many(jobs(), connection=session)
        await session.close()
        return [answer.job_id for answer in answers]

    async def by_sqlalchemy() -> list[UUID]:
        async def creator() -> Any:
            return await asyncpg.connect(**asyncpg_arguments(database))

        engine = create_async_engine("postgresql+asyncpg://", async_creator=creator)
        async with engine.begin() as session:
            answers = await app.enqueue_many(jobs(), connection=session)
        await engine.dispose()
        return [answer.job_id for answer in answers]

    def by_psycopg() -> list[UUID]:
        with psycopg.connect(database) as session:
            return [answer.job_id for answer in app.enqueue_many_sync(jobs(), connection=session)]

    def by_sqlalchemy_and_psycopg() -> list[UUID]:
        engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database))
        with engine.begin() as session:
            answers = app.enqueue_many_sync(jobs(), connection=session)
        engine.dispose()
        return [answer.job_id for answer in answers]

    for enqueue in (
        lambda: asyncio.run(by_asyncpg()),
        lambda: asyncio.run(by_sqlalchemy()),
        by_psycopg,
        by_sqlalchemy_and_psycopg,
    ):
        check(app, enqueue())
        app.cancel_sync(NEW_ID)
        with psycopg.connect(database, autocommit=True) as session:
            session.execute("truncate pgqueue.jobs")
            session.execute("truncate pgqueue.idempotency_keys")


def test_known_keys_answer_their_jobs(app: App) -> None:
    (first,) = app.enqueue_many_sync([{"job_type": "t", "idempotency_key": "k"}])
    answers = app.enqueue_many_sync(
        [
            {"job_type": "t", "idempotency_key": "new"},
            {"job_type": "t", "idempotency_key": "k"},
            {"job_type": "t"},
            {"job_type": "t", "idempotency_key": "new"},
        ]
    )
    assert [answer.duplicate for answer in answers] == [False, True, False, True]
    assert answers[1].job_id == first.job_id
    assert answers[3].job_id == answers[0].job_id


@pytest.mark.parametrize(
    ("wrong", "said", "column"),
    [
        ({"delay": -1}, "jobs[1]: delay is -1", None),
        (
            {"delay": 1, "scheduled_at": datetime(2100, 1, 1, tzinfo=UTC)},
            "jobs[1]: give scheduled_at or delay",
            "delay",
        ),
        ({"scheduled_at": datetime(2100, 1, 1)}, "without a time zone", "scheduled_at"),  # noqa: DTZ001
        ({"priority": 9}, "jobs[1]: priority is 9", "priority"),
        ({"idempotency_key": ""}, "jobs[1]: idempotency_key must have 1 to 256 characters", "idempotency_key"),
        ({"idempotency_key": "k" * 257}, "jobs[1]: idempotency_key must have 1 to 256 characters", "idempotency_key"),
        ({"idempotency_key": "k", "producer_id": ""}, "jobs[1]: producer_id must have 1 to 64", "producer_id"),
        ({"producer_id": "p" * 65}, "producer_id", None),
        ({"queue": ""}, "queue", None),
        ({"payload": [1]}, "jobs[1]['payload'] is list [1]; it must be a mapping", "payload"),
        ({"payload": {"x": float("inf")}}, "jobs[1]['payload']['x'] is inf", "payload"),
        ({"colour": "red"}, "jobs[1]: unknown option 'colour'", None),
        ({"queue": "a\0"}, "0x00", None),
        ({"queue": "\ud800"}, "cannot be stored", None),
    ],
)
def test_one_that_is_wrong_refuses_all(app: App, wrong: dict[str, Any], said: str, column: str | None) -> None:
    with pytest.raises(InvalidJob) as refused:
        app.enqueue_many_sync([{"job_type": "t"}, {"job_type": "t", **wrong}, {"job_type": "t"}])
    assert said in str(refused.value)
    assert column is None or refused.value.column == column
    assert app.jobs_sync() == []


@pytest.mark.parametrize(
    ("keyed", "many"), [(False, MANY), (True, MANY // 5), pytest.param(True, MANY, marks=pytest.mark.slow)]
)
def test_a_hundred_thousand_are_one_call(app: App, connect: Connect, keyed: bool, many: int) -> None:
    session = connect()
    session.execute("insert into pgqueue.queues (name, soft_limit, hard_limit) values ('q', 200000, 200000)")
    options = {"queue": "q", "producer_id": "p"}
    wanted: list[dict[str, Any]] = [
        {"job_type": "t", "payload": {"n": n}, **options, **({"idempotency_key": f"key {n}"} if keyed else {})}
        for n in range(many)
    ]
    answers = app.enqueue_many_sync(wanted)
    assert len({answer.job_id for answer in answers}) == many
    rows = session.execute("select job_id, (payload->>'n')::int from pgqueue.jobs order by seq").fetchall()
    assert rows == [(answer.job_id, n) for n, answer in enumerate(answers)]
    if keyed:
        again = app.enqueue_many_sync(wanted)
        assert [answer.job_id for answer in again] == [answer.job_id for answer in answers]
        assert all(answer.duplicate for answer in again)
        return
    some = wanted[:20_000]
    with pytest.raises(InvalidJob):
        app.enqueue_many_sync([*some, {**some[0], "idempotency_key": ""}])
    session.execute("update pgqueue.queues set hard_limit = 110000, soft_limit = 110000")
    session.execute("select pgqueue.sweep()")

    def fill() -> None:
        for _ in range(2):
            app.enqueue_many_sync(some)

    with pytest.raises(QueueFull):
        fill()
    (stored,) = session.execute("select count(*) from pgqueue.jobs").fetchone() or (0,)
    assert stored in (many, many + len(some))


def test_many_may_take_longer_than_one() -> None:
    for jobs, seconds in ((1, 30), (10_000, 30), (100_000, 300)):
        parameters = many_parameters([{"job_type": "t"}] * jobs, lambda job_type: {})
        assert calls.ENQUEUE_MANY.limit(30, parameters) == seconds
    assert calls.ENQUEUE.limit(30, {}) == 30


def test_the_limit_is_the_calls(database: str) -> None:
    slow = calling.Call(
        "slow", "select pg_sleep(%(seconds)s)", len, times=lambda parameters: 10 * parameters["seconds"]
    )
    settings = Settings(dsn=database, statement_limit=0.2)

    async def run() -> int:
        pool = AsyncPool(database, settings)
        try:
            return await pool.run(slow, seconds=0.6)
        finally:
            pool.close()

    assert asyncio.run(run()) == 1
    pool = SyncPool(database, settings)
    assert pool.run(slow, seconds=0.6) == 1
    pool.close()


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "PART", 10)


def made(app: App, blocking: bool, jobs: Iterable[dict[str, Any]]) -> list[EnqueuedJob]:
    return app.enqueue_many_sync(jobs) if blocking else asyncio.run(app.enqueue_many(jobs))


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("blocking", [True, False])
def test_parts_are_one_transaction_in_the_order_given(app: App, connect: Connect, blocking: bool) -> None:
    answers = made(app, blocking, ({"job_type": "t", "payload": {"n": n}, "queue": "q"} for n in range(95)))
    rows = (
        connect().execute("select job_id, (payload->>'n')::int, xmin::text from pgqueue.jobs order by seq").fetchall()
    )
    assert [row[:2] for row in rows] == [(answer.job_id, n) for n, answer in enumerate(answers)]
    assert len({row[2] for row in rows}) == 1


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"payload": {"n": object()}}, InvalidJob, "jobs[57]"),
        ({"queue": ["q"]}, InvalidJob, "jobs[57]: queue is list"),
        ({"job_type": ["t"]}, InvalidJob, "jobs[57] has no job_type"),
        ({"payload": {"n": "\0"}}, InvalidJob, "payload"),
        ({"payload": {}}, QueueFull, 'queue "small"'),
    ],
)
def test_one_that_is_wrong_refuses_all_parts(
    app: App, connect: Connect, blocking: bool, wrong: dict[str, Any], kind: type[Exception], said: str
) -> None:
    session = connect()
    session.execute("insert into pgqueue.queues (name, hard_limit) values ('small', 80)")
    queue = "small" if kind is QueueFull else "big"
    jobs: list[dict[str, Any]] = [{"job_type": "t", "queue": queue} for _ in range(95)]
    jobs[57] |= wrong
    with pytest.raises(kind, match=re.escape(said)):
        made(app, blocking, jobs)
    assert session.execute("select count(*) from pgqueue.jobs").fetchone() == (0,)
    assert len(made(app, blocking, jobs[:57])) == 57


@pytest.mark.usefixtures("in_parts")
@pytest.mark.parametrize("each", [{"idempotency_key": "{}"}, {"queue": "q{}"}, {"ordering_key": "{}"}])
def test_jobs_for_which_locks_are_taken_in_order_go_in_one_call(
    app: App, called: Counter[str], each: dict[str, str]
) -> None:
    (option, name) = next(iter(each.items()))
    asyncio.run(app.enqueue_many([{"job_type": "t", option: name.format(n)} for n in range(40)]))
    assert called["enqueue_many"] == 1


@pytest.mark.usefixtures("in_parts")
def test_a_part_is_made_while_the_one_before_is_stored(app: App, connect: Connect) -> None:
    watcher, seen = connect(), []
    holder = connect(autocommit=False)
    holder.execute("lock table pgqueue.jobs_live in share mode")

    class Job(dict[str, Any]):
        """Asked for when its part is made: says whether the part before is with the database."""

        def get(self, name: str, default: Any = None) -> Any:
            if name == "payload" and not seen:
                eventually(lambda: waits(watcher))
                seen.append(True)
                holder.rollback()
            return super().get(name, default)

    jobs = [*({"job_type": "t"} for _ in range(10)), Job(job_type="t"), *({"job_type": "t"} for _ in range(30))]
    assert len(app.enqueue_many_sync(jobs)) == 41
    assert seen == [True]


def waits(watcher: Any) -> bool:
    (waiting,) = watcher.execute(
        """select exists (select from pg_stat_activity where datname = current_database()
             and wait_event_type = 'Lock' and query like '%enqueue_rows%')"""
    ).fetchone()
    return bool(waiting)


@pytest.mark.parametrize("wrong", [5, "x", None, ["t"]])
def test_what_is_no_mapping_is_named_with_its_place(app: App, wrong: Any) -> None:
    for jobs in ([wrong], [{"job_type": "t"}] * 3 + [wrong]):
        with pytest.raises(InvalidJob, match=rf"jobs\[{len(jobs) - 1}\] is .*; it must be a mapping"):
            app.enqueue_many_sync(jobs)


def test_any_lawful_offset_of_utc_is_taken(app: App) -> None:
    moment = datetime(2090, 1, 1, tzinfo=timezone(timedelta(hours=23, minutes=59)))
    jobs = app.enqueue_many_sync([{"job_type": "t", "scheduled_at": moment, "expires_at": moment + timedelta(1)}])
    assert app.job_sync(jobs[0]).scheduled_at == moment
