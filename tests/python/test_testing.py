"""The tools for users' tests."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import App, Cancel, Job, RateLimited
from pgqueue.errors import AccessDenied, JobFailed, UnknownTask, WrongState
from pgqueue.testing import assert_enqueued, clear, drain, drain_sync, inline, moved_clock
from tests.python.running import eventually, make_app, worker_of, worker_process


@pytest.fixture
def app(database: str, connection: psycopg.Connection[Any]) -> Iterator[App]:
    connection.execute("select pgqueue.maintain_partitions()")
    with make_app(database) as app:

        @app.task("add")
        async def add(job: Job, a: int, b: int) -> int:
            return a + b

        @app.task("chain")
        def chain(job: Job, n: int) -> None:
            if n:
                app.enqueue_sync("chain", {"n": n - 1})

        @app.task("flaky")
        async def flaky(job: Job) -> str:
            if job.attempt == 1:
                raise ConnectionError("once")
            return "then fine"

        @app.task("guarded")
        async def guarded(job: Job) -> bool:
            return bool(await job.once("key"))

        @app.task("limited")
        async def limited(job: Job) -> None:
            raise RateLimited(3600)

        @app.task("cancels")
        async def cancels(job: Job) -> None:
            raise Cancel

        yield app


def test_drain_runs_what_is_due_and_what_that_enqueues(app: App) -> None:
    job = app.enqueue_sync("add", {"a": 1, "b": 2})
    app.enqueue_sync("chain", {"n": 3})
    later = app.enqueue_sync("add", {"a": 1, "b": 2}, delay=3600)
    done = asyncio.run(drain(app))
    assert (done.processed, done.failed) == (5, 0)
    assert app.result_sync(job) == 3
    assert app.job_sync(later).status == "submitted"
    assert drain_sync(app).processed == 0


def test_a_moved_clock_brings_delays_and_retries(app: App) -> None:
    later = app.enqueue_sync("flaky", delay=3600)
    assert drain_sync(app).processed == 0
    with moved_clock(app, 3601):
        assert (drain_sync(app).failed, app.job_sync(later).status) == (1, "failed")
    with moved_clock(app, 3700):
        drain_sync(app)
        assert app.result_sync(later) == "then fine"


def test_what_was_enqueued_can_be_asserted(app: App) -> None:
    app.enqueue_sync("add", {"a": 1, "b": 2}, queue="sums")
    assert assert_enqueued(app, "add", {"a": 1})[0].payload == {"a": 1, "b": 2}
    assert_enqueued(app, "add", queue="sums", count=1)
    assert_enqueued(app, "chain", count=0)
    with pytest.raises(AssertionError, match=r"expected a job 'add' with \{'a': 2\}, found 0.*\n  pending"):
        assert_enqueued(app, "add", {"a": 2})
    with pytest.raises(AssertionError, match="expected 2 jobs 'add'"):
        assert_enqueued(app, "add", count=2)


def test_clear_leaves_nothing_of_earlier_tests(app: App, connection: psycopg.Connection[Any]) -> None:
    for _ in range(2):
        app.enqueue_sync("add", {"a": 1, "b": 2}, idempotency_key="k", ordering_key="o")
        app.enqueue_sync("add", {"a": 1, "b": 3}, ordering_key="o")
        app.enqueue_sync("add", {"a": 1, "b": 2}, delay=3600, ordering_key="late")
        app.enqueue_sync("add", {"a": 1, "b": 4}, ordering_key="late")
        for job_type in ("flaky", "guarded", "cancels"):
            app.enqueue_sync(job_type)
        app.enqueue_sync("unknown")
        # Of a dead letter, and a job that nobody ran to its end.
        app.enqueue_sync("add", {"b": 2})
        app.enqueue_sync("left", queue="left")
        connection.execute("select pgqueue.claim(gen_random_uuid(), '{left}', 1)")
        done = drain_sync(app)
        # An ordering key waits for its head.
        assert (done.processed, done.failed) == (6, 2)
        assert [row.status for row in assert_enqueued(app, "flaky")] == ["failed"]
        assert app.result_sync(assert_enqueued(app, "guarded", count=1)[0]) is True
        assert clear(app) == 10
        assert_enqueued(app, "add", count=0)
        assert connection.execute("select jobs from pgqueue.audit where verb = 'clear'").fetchall()[-1] == (10,)
        with moved_clock(app, 3700):
            assert drain_sync(app).processed == 0
    assert clear(app) == 0


def test_clear_ends_the_pause_of_a_limited_type(app: App) -> None:
    for _ in range(2):
        app.enqueue_sync("limited")
        assert drain_sync(app).processed == 1
        clear(app)


def test_clear_refuses_where_a_worker_is_at_work(app: App, database: str) -> None:
    job = app.enqueue_sync("add", {"a": 1, "b": 2}, delay=3600)
    with worker_of(app) as worker:
        eventually(app.workers_sync)
        with pytest.raises(WrongState, match=r"worker \S+ is at work on this database"):
            clear(app)
    assert worker.stopping
    assert app.job_sync(job).status == "submitted"
    with worker_process(database) as killed:
        killed.send(9)
        killed.ended(10)
    eventually(lambda: clear(app) == 1)


def test_clear_needs_the_owners_role(app: App, database: str) -> None:
    app.enqueue_sync("add", {"a": 1, "b": 2})
    with make_app(f"{database} options='-c role=pgqueue_operator'") as other, pytest.raises(AccessDenied):
        clear(other)
    assert clear(app) == 1


def test_inline_runs_at_once_without_a_database() -> None:
    app = make_app("host=nowhere.invalid")

    @app.task("add")
    async def add(job: Job, a: int, b: int) -> int:
        return a + b

    @app.task("broken")
    def broken(job: Job) -> None:
        raise ValueError("it is")

    with inline(app) as ran:
        add.enqueue_sync(1, b=2)
        asyncio.run(many(app))
        assert [(job.job_type, job.payload, job.result) for job in ran] == [
            ("add", {"a": 1, "b": 2}, 3), ("add", {"a": 3, "b": 4}, 7), ("add", {"a": 5, "b": 6}, 11),
        ]  # fmt: skip
        with pytest.raises(JobFailed, match="broken: ValueError: it is"):
            broken.enqueue_sync()
        with pytest.raises(UnknownTask):
            app.enqueue_sync("unknown")
        with pytest.raises(AssertionError, match="job needs a database"):
            app.job_sync("01a228cf-1f8c-70ac-a063-8f4e42a5bd24")
    with inline(app, raise_errors=False) as ran:
        assert broken.enqueue_sync().status == "failed"
    assert app.intercept is None


def test_inline_jobs_have_their_times() -> None:
    app = make_app("host=nowhere.invalid")
    seen: list[Any] = []

    @app.task("t")
    def t(job: Job) -> None:
        seen.append(job.scheduled_at)
        assert abs(datetime.now(UTC) - job.created_at) < timedelta(minutes=1)

    due = datetime(2030, 1, 2, tzinfo=UTC)
    with inline(app):
        t.enqueue_sync()
        t.having(scheduled_at=due).enqueue_sync()
        app.enqueue_many_sync([t.job(), t.having(scheduled_at=due).job()])
    assert seen == [None, due, None, due]


async def many(app: App) -> None:
    await app.enqueue("add", {"a": 3, "b": 4})
    await app.enqueue_many([{"job_type": "add", "payload": {"a": 5, "b": 6}}])
