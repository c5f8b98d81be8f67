"""Middlewares around attempts, and the trace context that a job carries."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from typing import Any

import psycopg
import pytest
from opentelemetry import context, trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from pgqueue import App, DeadLetter, Job, Snooze
from pgqueue.errors import ConfigError
from pgqueue.testing import inline
from tests.python.apps import MARKS
from tests.python.running import eventually, make_app, marks, worker_of, worker_process

Session = psycopg.Connection[Any]
SEEN: ContextVar[str] = ContextVar("SEEN", default="nothing")


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database, sweep_interval=0.05, poll_interval=0.2) as app:
        yield app


@pytest.fixture
def told(app: App) -> list[str]:
    """What a sync and an async middleware of the app tell of attempts."""
    told: list[str] = []

    @app.middleware
    def outer(job: Job) -> Iterator[None]:
        SEEN.set("outer's")
        told.append("outer")
        try:
            result = yield
        except BaseException as exc:
            told.append(f"outer {type(exc).__name__}")
            raise
        told.append(f"outer {result}")

    @app.middleware
    async def inner(job: Job) -> AsyncIterator[None]:
        await asyncio.sleep(0.001)
        told.append("inner")
        try:
            result = yield
        except BaseException as exc:
            await asyncio.sleep(0.001)
            told.append(f"inner {type(exc).__name__}")
        else:
            await asyncio.sleep(0.001)
            told.append(f"inner {result}")

    return told


def declare(app: App) -> None:
    @app.task("sync", max_retries=0)
    def sync(job: Job, fails: bool = False) -> str:
        if fails:
            raise KeyError("gone")
        return SEEN.get()

    @app.task("async", max_retries=0)
    async def asynchronous(job: Job, fails: bool = False) -> str:
        await asyncio.sleep(0)
        if fails:
            raise KeyError("gone")
        return SEEN.get()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_middlewares_see_before_after_and_errors(app: App, told: list[str], kind: str) -> None:
    declare(app)
    with worker_of(app):
        assert app.result_sync(app.enqueue_sync(kind), wait=10) == "outer's"
        assert told == ["outer", "inner", "inner outer's", "outer outer's"]
        told.clear()
        row = app.finished_job_sync(app.enqueue_sync(kind, {"fails": True}), wait=10)
        assert told == ["outer", "inner", "inner KeyError", "outer KeyError"]
    assert (row.status, row.error) == ("dead_letter", "KeyError: 'gone'")
    frames = row.errors[0]["traceback"]
    assert "test_middleware.py" in frames
    assert "middleware.py" not in frames.replace("test_middleware.py", "")


def test_inline_runs_have_them_too(app: App, told: list[str]) -> None:
    declare(app)
    with inline(app) as jobs:
        app.enqueue_sync("sync")
        app.enqueue_sync("async")
    assert [job.result for job in jobs] == ["outer's", "outer's"]
    assert len(told) == 8


def test_they_run_in_the_process_of_the_task(database: str, connection: Session) -> None:
    connection.execute(MARKS)
    with make_app(database) as app, worker_process(database):
        app.finished_job_sync(app.enqueue_sync("surrounded"), wait=20)
        done = marks(connection)
        assert [what.split()[0] for _, _, what in done] == ["before", "ran", "async", "after"]
        assert done[0][2].split()[1] == done[3][2].split()[1]
        assert done[0][2].split()[1] not in {str(row["pid"]) for row in app.workers_sync()}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_faults_before_the_attempt_are_its_own(app: App, kind: str) -> None:
    declare(app)
    ran: list[int] = []

    @app.middleware
    def picky(job: Job) -> Iterator[None]:
        ran.append(job.attempt)
        if job.attempt == 1:
            raise Snooze(0.05)
        raise DeadLetter("not today")
        yield

    with worker_of(app):
        row = app.finished_job_sync(app.enqueue_sync(kind), wait=10)
    assert (row.status, row.error, ran) == ("dead_letter", "DeadLetter: not today", [1, 2])


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("fault", ["raises", "raises in async", "swallows", "twice", "skips"])
def test_faults_after_the_attempt_change_nothing(app: App, kind: str, fault: str) -> None:
    declare(app)

    if fault == "raises in async":

        @app.middleware
        async def bad(job: Job) -> AsyncIterator[None]:
            try:
                yield
            finally:
                raise ValueError("mine")

    else:

        @app.middleware
        def bad_too(job: Job) -> Iterator[None]:
            if fault == "skips":
                return
            try:
                yield
            except KeyError:
                if fault == "raises":
                    raise ValueError("mine") from None
            if fault == "raises":
                raise ValueError("mine")
            if fault == "twice":
                yield

    with worker_of(app):
        assert app.result_sync(app.enqueue_sync(kind), wait=10) == "nothing"
        row = app.finished_job_sync(app.enqueue_sync(kind, {"fails": True}), wait=10)
        assert (row.status, row.error) == ("dead_letter", "KeyError: 'gone'")
        assert app.result_sync(app.enqueue_sync(kind), wait=10) == "nothing"


def test_a_timeout_comes_to_middlewares_as_the_tasks_own_end(app: App, told: list[str]) -> None:
    @app.task("long", timeout=0.2, max_retries=0)
    async def long(job: Job) -> None:
        await asyncio.sleep(30)

    with worker_of(app):
        row = app.finished_job_sync(app.enqueue_sync("long"), wait=10)
    assert row.status == "dead_letter"
    assert "longer than its timeout" in (row.error or "")
    assert told == ["outer", "inner", "inner CancelledError", "outer CancelledError"]


def test_only_generator_functions_are_middlewares(app: App) -> None:
    with pytest.raises(ConfigError, match="generator function"):

        @app.middleware
        def wrong(job: Job) -> None: ...  # type: ignore[type-var]


# Trace context --------------------------------------------------------------------------------------------------------

SPAN = NonRecordingSpan(SpanContext(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, TraceFlags(1)))
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_attempt_has_the_trace_context_of_its_producer(app: App, kind: str) -> None:
    def parent() -> str:
        found = trace.get_current_span().get_span_context()
        return f"{found.trace_id:x}-{found.span_id:x}"

    @app.task("sync")
    def sync(job: Job, again: bool = False) -> str:
        if again:
            app.enqueue_sync("sync", idempotency_key="child")
        return parent()

    @app.task("async")
    async def asynchronous(job: Job, again: bool = False) -> str:
        if again:
            await app.enqueue("async", idempotency_key="child")
        return parent()

    with worker_of(app):
        outside = app.enqueue_sync(kind)
        token = context.attach(trace.set_span_in_context(SPAN))
        try:
            one = app.enqueue_sync(kind, {"again": True})
            own = app.enqueue_sync(kind, trace_context={"traceparent": PARENT.replace("b7ad", "0000")})
            (many,) = app.enqueue_many_sync([{"job_type": kind}])
        finally:
            context.detach(token)
        strange = app.enqueue_sync(kind, trace_context={"traceparent": "no such thing"})
        results = [app.result_sync(job, wait=10) for job in (outside, one, own, many, strange)]
        child = app.enqueue_sync(kind, idempotency_key="child")
        assert child.duplicate
    ours = "af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    assert results == ["0-0", ours, ours.replace("b7ad", ""), ours, "0-0"]
    assert app.job_sync(outside).trace_context is None
    assert app.job_sync(one).trace_context == app.job_sync(child).trace_context == {"traceparent": PARENT}


def test_sync_attempts_with_middlewares_share_no_thread_or_loop_for_long(app: App, told: list[str]) -> None:
    declare(app)
    before = threading.active_count()
    with worker_of(app, concurrency=4):
        jobs = app.enqueue_many_sync([{"job_type": "sync"}] * 100)
        assert {app.result_sync(job, wait=20) for job in jobs} == {"outer's"}
    # Threads that are no longer needed end by themselves.
    eventually(lambda: threading.active_count() <= before + 1)
    assert len(told) == 400
