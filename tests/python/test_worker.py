"""The worker in one process: how jobs end, and what it does while they run."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from pgqueue import App, Cancel, DeadLetter, EnqueuedJob, Job, RateLimited, Retry, Snooze, calls
from pgqueue.errors import ConfigError, LeaseLost, PgqueueError
from tests.python.running import eventually, make_app, stalling_proxy, worker_of

Session = psycopg.Connection[Any]
QUICK = {"retry_policy": {"base_delay_ms": 10, "jitter": False}}


@pytest.fixture
def app(database: str, connection: Session) -> Iterator[App]:
    # As on any day but the first: a row does not meet the making of its partition.
    connection.execute("select pgqueue.maintain_partitions()")
    with make_app(database, sweep_interval=0.05, poll_interval=0.2) as app:
        yield app


def test_sync_and_async_tasks_get_their_payload_and_give_their_result(app: App) -> None:
    threads = set()

    @app.task("sync")
    def sync(job: Job, a: int, b: int = 2) -> dict[str, Any]:
        threads.add(threading.current_thread().name)
        return {"sum": a + b, "attempt": job.attempt}

    @app.task("async")
    async def asynchronous(job: Job, a: int) -> list[int]:
        await asyncio.sleep(0)
        return [a, job.priority]

    @app.task("bare")
    def bare() -> None: ...

    with worker_of(app):
        assert app.result_sync(sync.enqueue_sync(1), wait=10) == {"sum": 3, "attempt": 1}
        assert app.result_sync(asynchronous.enqueue_sync(a=5), wait=10) == [5, 2]
        assert app.result_sync(bare.enqueue_sync(), wait=10) is None
    assert threads == {"pgqueue-task"}


def test_failures_are_retried_and_then_dead(app: App) -> None:
    @app.task("t", max_retries=2, **QUICK)
    async def t(job: Job) -> None:
        raise ValueError(f"attempt {job.attempt}")

    with worker_of(app):
        row = app.finished_job_sync(t.enqueue_sync(), wait=10)
    assert (row.status, row.attempts, row.error) == ("dead_letter", 3, "ValueError: attempt 3")
    assert [(error["attempt"], error["message"], error["retryable"]) for error in row.errors] == [
        (1, "attempt 1", True), (2, "attempt 2", True), (3, "attempt 3", True),
    ]  # fmt: skip
    assert all("test_worker.py" in error["traceback"] for error in row.errors)


def test_each_signal_ends_as_it_says(app: App, connection: Session) -> None:
    seen: list[str] = []

    @app.task("snooze")
    async def snooze(job: Job) -> int:
        if job.attempt == 1:
            raise Snooze(0.1)
        return job.attempt

    @app.task("retry", max_retries=1)
    def retry(job: Job) -> int:
        if job.attempt == 1:
            raise Retry("once more", in_=0.05)
        return job.attempt

    @app.task("cancel")
    async def cancel(job: Job) -> None:
        raise Cancel("not needed")

    @app.task("dead")
    def dead(job: Job) -> None:
        raise DeadLetter("no use")

    @app.task("limited")
    async def limited(job: Job) -> str:
        if job.attempt == 1 and not seen:
            seen.append("limited")
            raise RateLimited(0.3)
        return "through"

    with worker_of(app):
        began = time.monotonic()
        jobs = [app.enqueue_sync(name) for name in ("snooze", "retry", "cancel", "dead", "limited")]
        rows = [app.finished_job_sync(job, wait=10) for job in jobs]
        assert time.monotonic() - began >= 0.3
    assert [row.status for row in rows] == ["completed", "completed", "cancelled", "dead_letter", "completed"]
    assert [row.result for row in rows] == [2, 2, None, None, "through"]
    assert [row.errors[0]["message"] if row.errors else None for row in rows] == [
        None,
        "once more",
        None,
        "no use",
        None,
    ]
    assert rows[0].max_retries == 4, "a snooze charges no attempt"
    assert rows[2].error == "not needed"


@pytest.mark.parametrize("value", [float("nan"), "a\0", "\ud800", {1}])
def test_what_cannot_be_stored_ends_the_first_attempt(app: App, value: Any) -> None:
    starts: list[int] = []

    @app.task("t")
    async def t(job: Job) -> Any:
        starts.append(job.attempt)
        return {"m": value}

    with worker_of(app):
        row = app.finished_job_sync(t.enqueue_sync(), wait=10)
    assert (row.status, starts) == ("dead_letter", [1])
    assert "the result is not storable: result['m']" in (row.error or "")


def test_what_only_the_database_refuses_ends_the_first_attempt_and_harms_no_other(
    app: App, connection: Session
) -> None:
    connection.execute(
        """alter table pgqueue.jobs_completed add constraint "result must be short" check (length(result::text) < 10)"""
    )

    @app.task("t")
    async def t(job: Job, size: int) -> Any:
        return "x" * size

    jobs = [t.enqueue_sync(size) for size in (1, 2, 20, 3)]
    with worker_of(app):
        rows = [app.finished_job_sync(job, wait=10) for job in jobs]
    assert [row.status for row in rows] == ["completed", "completed", "dead_letter", "completed"]
    assert rows[2].attempts == 1
    assert "the result is not storable" in (rows[2].error or "")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, BaseException])
def test_no_exception_ends_the_worker(app: App, kind: type[BaseException]) -> None:
    @app.task("async", max_retries=0)
    async def asynchronous(job: Job) -> None:
        raise kind

    @app.task("sync", max_retries=0)
    def sync(job: Job) -> None:
        raise kind

    @app.task("fine")
    async def fine(job: Job) -> str:
        return "fine"

    with worker_of(app, concurrency=1):
        for task in (asynchronous, sync):
            assert app.finished_job_sync(task.enqueue_sync(), wait=10).status == "dead_letter"
            assert app.result_sync(fine.enqueue_sync(), wait=10) == "fine"


def test_huge_errors_are_recorded_small(app: App) -> None:
    @app.task("t", max_retries=30, retry_policy={"base_delay_ms": 0})
    async def t(job: Job) -> None:
        raise ValueError(f"{job.attempt} \0\ud800 " + "😀" * 2_500_000)

    with worker_of(app):
        row = app.finished_job_sync(t.enqueue_sync(), wait=60)
    assert (row.status, row.attempts, len(row.errors)) == ("dead_letter", 31, 20)
    assert len(bytes(row.errors_json)) < 1_000_000


def test_an_async_task_that_takes_too_long_is_cancelled(app: App) -> None:
    ended: list[str] = []

    @app.task("t", timeout=0.3, max_retries=0)
    async def t(job: Job) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("cleaned up" if job.cancelled else "?")

    with worker_of(app):
        row = app.finished_job_sync(t.enqueue_sync(), wait=10)
    assert (row.status, ended) == ("dead_letter", ["cleaned up"])
    assert "TimeoutError: the attempt ran longer than its timeout" in (row.error or "")


def test_a_queues_timeout_applies_without_an_own_one(app: App, connection: Session) -> None:
    connection.execute("insert into pgqueue.queues (name, timeout_ms) values ('brief', 300)")

    @app.task("t", queue="brief", max_retries=0)
    async def t(job: Job) -> None:
        await asyncio.sleep(60)

    with worker_of(app) as worker:
        eventually(lambda: worker._heartbeat.timeouts)
        assert app.finished_job_sync(t.enqueue_sync(), wait=10).status == "dead_letter"


def test_a_thread_that_takes_too_long_is_interrupted(app: App) -> None:
    @app.task("t", timeout=0.3, max_retries=1, **QUICK)
    def t(job: Job) -> int:
        while job.attempt == 1:
            pass
        return job.attempt

    with worker_of(app, concurrency=1):
        row = app.finished_job_sync(t.enqueue_sync(), wait=10)
    assert (row.status, row.attempts) == ("completed", 2)
    assert row.errors[0]["type"] == "TimeoutError"


def test_threads_that_do_not_stop_neither_hold_slots_nor_meet_their_retries(app: App, connection: Session) -> None:
    let_go = threading.Event()
    alive: dict[str, int] = {}
    most: dict[str, int] = {}

    @app.task("stuck", timeout=0.3, max_retries=3, **QUICK)
    def stuck(job: Job) -> str:
        key = str(job.job_id)
        alive[key] = alive.get(key, 0) + 1
        most[key] = max(most.get(key, 0), alive[key])
        try:
            if job.attempt == 1:
                let_go.wait(60)
        finally:
            alive[key] -= 1
        return "at last"

    @app.task("quick")
    def quick(job: Job) -> str:
        return "quick"

    with worker_of(app, concurrency=2):
        jobs = [stuck.enqueue_sync() for _ in range(5)]
        began = time.monotonic()
        assert app.result_sync(quick.enqueue_sync(), wait=10) == "quick"
        assert time.monotonic() - began < 8
        eventually(lambda: all(app.job_sync(job).status == "failed" for job in jobs))
        assert {app.job_sync(job).errors[0]["type"] for job in jobs} == {"TimeoutError"}
        time.sleep(0.5)
        assert [app.job_sync(job).attempts for job in jobs] == [1] * 5
        let_go.set()
        assert [app.result_sync(job, wait=20) for job in jobs] == ["at last"] * 5
    assert set(most.values()) == {1}


def test_running_jobs_are_cancelled_on_request(app: App) -> None:
    begun = {"async": threading.Event(), "sync": threading.Event(), "stubborn": threading.Event()}

    @app.task("async")
    async def asynchronous(job: Job) -> None:
        begun["async"].set()
        await asyncio.sleep(60)

    @app.task("sync")
    def sync(job: Job) -> None:
        begun["sync"].set()
        while not job.cancelled:
            time.sleep(0.01)
        raise RuntimeError("told to stop")

    @app.task("stubborn")
    def stubborn(job: Job) -> str:
        begun["stubborn"].set()
        while not job.cancelled:
            time.sleep(0.01)
        return "done all the same"

    with worker_of(app):
        for task in (asynchronous, sync, stubborn):
            job = task.enqueue_sync()
            assert begun[task.name].wait(10)
            assert app.cancel_sync(job) == "cancel_requested"
            row = app.finished_job_sync(job, wait=3)
            assert (row.status, row.attempts) == ("cancelled", 1)


def test_cancel_requests_are_seen_without_bells(app: App, database: str) -> None:
    begun = threading.Event()
    silent = make_app(database, wake="poll", poll_interval=0.05)

    @silent.task("t")
    async def t(job: Job) -> None:
        begun.set()
        await asyncio.sleep(60)

    with silent, worker_of(silent):
        job = app.enqueue_sync("t")
        assert begun.wait(10)
        app.cancel_sync(job)
        assert app.finished_job_sync(job, wait=5).status == "cancelled"


def test_job_types_without_a_task_are_left_alone(app: App, database: str) -> None:
    @app.task("known")
    async def known(job: Job) -> str:
        return "ran"

    with worker_of(app):
        foreign = app.enqueue_sync("foreign")
        assert app.result_sync(known.enqueue_sync(), wait=10) == "ran"
        assert (app.job_sync(foreign).status, app.job_sync(foreign).attempts) == ("pending", 0)
        assert "has a task for" in app.why_sync(foreign)


def test_a_worker_takes_only_its_queues_and_priorities(app: App) -> None:
    @app.task("t")
    async def t(job: Job) -> str:
        return job.queue

    with worker_of(app, queues=["mail"], priorities=["critical", "high"]):
        left = [t.having(priority="critical").enqueue_sync(), t.having(queue="mail").enqueue_sync()]
        assert app.result_sync(t.having(queue="mail", priority="high").enqueue_sync(), wait=10) == "mail"
        assert [app.job_sync(job).status for job in left] == ["pending", "pending"]


def test_an_app_without_tasks_has_no_worker(app: App) -> None:
    with pytest.raises(ConfigError, match="the app has no tasks"):
        app.worker()


def test_progress_is_stored_soon_and_only_the_last_of_many(app: App) -> None:
    seen = threading.Event()

    @app.task("async")
    async def asynchronous(job: Job) -> None:
        await job.progress({"at": 1})
        seen.wait(10)
        for n in range(1000):
            job.progress(n)

    @app.task("sync")
    def sync(job: Job) -> None:
        job.progress("half")
        seen.wait(10)

    with worker_of(app):
        first, second = asynchronous.enqueue_sync(), sync.enqueue_sync()
        eventually(lambda: app.job_sync(first).progress == {"at": 1})
        eventually(lambda: app.job_sync(second).progress == "half" or app.job_sync(second).status == "completed")
        seen.set()
        assert app.finished_job_sync(first, wait=10).progress == 999


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tasks_writes_and_its_completion_are_one(app: App, connection: Session, asynchronous: bool) -> None:
    connection.execute("create table paid (job_id uuid, attempt int)")
    insert = "insert into paid values (%s, %s)"

    if asynchronous:

        @app.task("pay", max_retries=1, **QUICK)
        async def pay(job: Job) -> str:
            async with job.connection() as session:
                await session.execute(insert, (job.job_id, job.attempt))
            assert await job.connection() is session
            if job.attempt == 1:
                raise ValueError("after the write")
            return "paid"

    else:

        @app.task("pay", max_retries=1, **QUICK)
        def pay(job: Job) -> str:
            with job.connection() as session:
                session.execute(insert, (job.job_id, job.attempt))
            if job.attempt == 1:
                raise ValueError("after the write")
            return "paid"

    with worker_of(app):
        job = app.enqueue_sync("pay")
        assert app.result_sync(job, wait=10) == "paid"
    assert connection.execute("select * from paid").fetchall() == [(job.job_id, 2)]


def test_a_transaction_of_an_attempt_that_lost_its_job_is_undone(app: App, connection: Session) -> None:
    connection.execute("create table paid (attempt int)")

    @app.task("pay")
    async def pay(job: Job) -> str:
        async with job.connection() as session:
            await session.execute("insert into paid values (%s)", (job.attempt,))
            if job.attempt == 1:
                await asyncio.to_thread(lose, connection, job)
        return f"attempt {job.attempt}"

    with worker_of(app):
        job = app.enqueue_sync("pay")
        assert app.result_sync(job, wait=10) == "attempt 2"
    assert connection.execute("select * from paid").fetchall() == [(2,)]
    assert app.job_sync(job).lost == 1


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_task_whose_job_ends_cancelled_has_written_nothing(app: App, connection: Session, asynchronous: bool) -> None:
    connection.execute("create table paid (attempt int)")
    # No bell, so that the task hears nothing of it before it returns.
    connection.execute("set pgqueue.wake = off")

    def cancel(job: Job) -> str:
        return str(connection.execute("select pgqueue.cancel(%s)", (job.job_id,)).fetchall()[0][0])

    if asynchronous:

        @app.task("pay")
        async def pay(job: Job) -> str:
            async with job.connection() as session:
                await session.execute("insert into paid values (%s)", (job.attempt,))
            return cancel(job)

    else:

        @app.task("pay")
        def pay(job: Job) -> str:
            with job.connection() as session:
                session.execute("insert into paid values (%s)", (job.attempt,))
            return cancel(job)

    with worker_of(app):
        row = app.finished_job_sync(app.enqueue_sync("pay"), wait=20)
    assert (row.status, row.error, row.attempts) == ("cancelled", "cancelled on request", 1)
    assert connection.execute("select * from paid").fetchall() == []


def test_a_transaction_block_left_by_an_exception_is_undone(app: App, connection: Session) -> None:
    connection.execute("create table paid (what text)")

    @app.task("pay")
    async def pay(job: Job) -> str:
        try:
            async with job.connection() as session:
                await session.execute("insert into paid values ('wrong')")
                raise ValueError
        except ValueError:
            pass
        async with job.connection() as session:
            await session.execute("insert into paid values ('right')")
        return "ok"

    with worker_of(app):
        assert app.result_sync(app.enqueue_sync("pay"), wait=10) == "ok"
    assert connection.execute("select * from paid").fetchall() == [("right",)]


def test_transactions_wait_for_connections_without_harm(database: str, connection: Session) -> None:
    connection.execute("create table paid (n int)")
    with make_app(database, pool_size=2) as app:

        @app.task("pay")
        async def pay(job: Job, n: int) -> None:
            async with job.connection() as session:
                await session.execute("insert into paid values (%s)", (n,))

        @app.task("own")
        async def own(job: Job) -> None:
            await app.job(job.job_id)

        with worker_of(app, concurrency=20):
            jobs = [pay.enqueue_sync(n) for n in range(100)] + [own.enqueue_sync() for _ in range(100)]
            rows = [app.finished_job_sync(job, wait=30) for job in jobs]
    assert {(row.status, row.lost) for row in rows} == {("completed", 0)}
    assert connection.execute("select count(*) from paid").fetchone() == (100,)


def test_the_tasks_connection_is_an_ordinary_one(app: App) -> None:
    @app.task("t")
    def t(job: Job) -> list[str]:
        with job.connection() as session:
            row = session.execute("select %s::uuid, now()", (job.job_id,)).fetchone()
            assert row is not None
            return [type(value).__name__ for value in row]

    with worker_of(app):
        assert app.result_sync(t.enqueue_sync(), wait=10) == ["UUID", "datetime"]


def test_context_variables_do_not_leak_from_job_to_job(app: App) -> None:
    import contextvars

    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    @app.task("async")
    async def asynchronous(job: Job, n: int) -> Any:
        before = variable.get(None)
        variable.set(n)
        return before

    @app.task("sync")
    def sync(job: Job, n: int) -> Any:
        before = variable.get(None)
        variable.set(n)
        return before

    with worker_of(app, concurrency=1):
        for task in (asynchronous, sync):
            jobs = [task.enqueue_sync(n) for n in range(3)]
            assert [app.result_sync(job, wait=10) for job in jobs] == [None] * 3


def lose(connection: Session, job: Job | EnqueuedJob) -> None:
    """Has the lease of a running job expire, and a sweep see it."""
    attempt = "select attempts, status from pgqueue.jobs where job_id = %s"
    before = connection.execute(attempt, (job.job_id,)).fetchone()
    connection.execute(
        "update pgqueue.jobs set lease_expires_at = now() - interval '1 second' where job_id = %s", (job.job_id,)
    )

    def swept() -> bool:
        connection.execute("select pgqueue.sweep()")
        return connection.execute(attempt, (job.job_id,)).fetchone() != before

    eventually(swept)


def test_long_jobs_keep_their_lease(app: App, database: str) -> None:
    starts: list[int] = []
    patient = make_app(database, lease=1.0, sweep_interval=0.1)

    @patient.task("async")
    async def asynchronous(job: Job) -> int:
        starts.append(job.attempt)
        await asyncio.sleep(2.5)
        return job.attempt

    @patient.task("blocking")
    async def blocking(job: Job) -> int:
        starts.append(job.attempt)
        time.sleep(2.5)  # noqa: ASYNC251 (it blocks the event loop: that is the case)
        return job.attempt

    with patient, worker_of(patient, concurrency=4), worker_of(patient, concurrency=4):
        for task in (asynchronous, blocking):
            row = app.finished_job_sync(task.enqueue_sync(), wait=10)
            assert (row.status, row.attempts, row.lost) == ("completed", 1, 0)
    assert starts == [1, 1]


def test_a_lost_lease_ends_the_attempt(app: App, connection: Session, database: str) -> None:
    ended = threading.Event()
    quick = make_app(database, lease=2.0, sweep_interval=60)

    @quick.task("t")
    async def t(job: Job) -> str:
        if job.attempt == 2:
            return "second"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.set()
            raise
        return "first"

    with quick, worker_of(quick):
        job = app.enqueue_sync("t")
        eventually(lambda: app.job_sync(job).status == "processing")
        lose(connection, job)
        assert app.result_sync(job, wait=10) == "second"
        assert ended.wait(5)


def test_draining_gives_back_what_did_not_start(app: App, connection: Session) -> None:
    begun = threading.Event()

    @app.task("t")
    async def t(job: Job) -> str:
        begun.set()
        await asyncio.sleep(0.5)
        return "finished within the grace"

    with worker_of(app, concurrency=1) as worker:
        jobs = [t.enqueue_sync() for _ in range(5)]
        assert begun.wait(10)
        worker.request_stop()
    statuses = [(row.status, row.attempts) for row in map(app.job_sync, jobs)]
    assert statuses.count(("completed", 1)) == 1
    assert statuses.count(("pending", 0)) == 4
    assert connection.execute("select status from pgqueue.workers").fetchone() == ("stopped",)
    assert connection.execute("select count(*) from pgqueue.waiting").fetchone() == (0,)


def test_what_outlasts_the_grace_is_released(database: str) -> None:
    begun = threading.Semaphore(0)
    with make_app(database, grace=0.2) as app:

        @app.task("async")
        async def asynchronous(job: Job) -> None:
            begun.release()
            await asyncio.sleep(60)

        @app.task("sync")
        def sync(job: Job) -> None:
            begun.release()
            while True:
                time.sleep(0.01)

        with worker_of(app) as worker:
            jobs = [asynchronous.enqueue_sync(), sync.enqueue_sync()]
            for _ in jobs:
                assert begun.acquire(timeout=10)
            began = time.monotonic()
            worker.request_stop()
        assert time.monotonic() - began < 3
        rows = [app.job_sync(job) for job in jobs]
        assert [(row.status, row.lost, row.max_retries) for row in rows] == [("pending", 0, 4)] * 2


def test_slow_jobs_are_not_hoarded(app: App) -> None:
    @app.task("slow")
    async def slow(job: Job) -> str:
        await asyncio.sleep(0.3)
        return str(job.claimed.updated_at)

    with worker_of(app, concurrency=2) as one, worker_of(app, concurrency=2) as other:
        eventually(lambda: len(app.workers_sync()) == 2)
        jobs = [slow.enqueue_sync() for _ in range(12)]
        for job in jobs:
            app.result_sync(job, wait=30)
    # Whoever takes a job has a slot for it: two at a time each, and not twelve.
    assert min(one.counts["processed"], other.counts["processed"]) >= 3


def test_the_next_job_of_a_key_is_claimed_with_the_end_of_the_one_before(app: App, connection: Session) -> None:
    order: list[int] = []

    @app.task("t")
    async def t(job: Job, number: int) -> None:
        order.append(number)

    jobs = [{"job_type": "t", "payload": {"number": n}, "ordering_key": "k"} for n in range(50)]
    with worker_of(app):
        app.enqueue_many_sync(jobs)
        eventually(lambda: connection.execute("select count(*) from pgqueue.jobs_completed").fetchone() == (50,))
    assert order == list(range(50))
    together = """select count(*) from (
        select started_at = lag(finished_at) over (order by started_at) as together from pgqueue.jobs) j
         where together"""
    assert (connection.execute(together).fetchone() or (0,))[0] >= 45


def test_a_slow_database_is_asked_for_more_at_a_time(database: str, connection: Session) -> None:
    with stalling_proxy(database, 0.2) as (through, _), make_app(through, concurrency=10) as app:

        @app.task("t")
        async def t(job: Job) -> None:
            await asyncio.sleep(0.01)

        connection.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, 3000)")
        with worker_of(app):
            eventually(lambda: connection.execute("select count(*) from pgqueue.jobs_completed").fetchone() == (3000,))
    # Jobs of one claim start at the same time; those of 0.1 s are 100 at most.
    claims = "select count(*) from pgqueue.jobs group by started_at order by 1 desc limit 1"
    assert (connection.execute(claims).fetchone() or (0,))[0] > 100


def test_an_idle_worker_sleeps_and_wakes_by_the_bell(app: App, connection: Session, database: str) -> None:
    sleeper = make_app(database, poll_interval=30, sweep_interval=30)

    @sleeper.task("t")
    async def t(job: Job) -> None: ...

    with sleeper, worker_of(sleeper):
        for _ in range(3):
            eventually(lambda: connection.execute("select count(*) from pgqueue.waiting").fetchone() == (1,))
            time.sleep(0.3)
            began = time.monotonic()
            app.finished_job_sync(app.enqueue_sync("t"), wait=10)
            assert time.monotonic() - began < 8


def test_an_insert_that_commits_late_is_found_without_a_poll(app: App, connect: Any, database: str) -> None:
    sleeper = make_app(database, poll_interval=30, sweep_interval=30)

    @sleeper.task("t")
    async def t(job: Job) -> None: ...

    with sleeper:
        session = connect(autocommit=False)
        # Its trigger looks for sleepers before there is one.
        job = sleeper.enqueue_sync("t", connection=session)
        with worker_of(sleeper):
            eventually(lambda: connect().execute("select count(*) from pgqueue.waiting").fetchone() == (1,))
            time.sleep(0.3)
            began = time.monotonic()
            session.commit()
            app.finished_job_sync(job, wait=10)
            assert time.monotonic() - began < 8


def test_single_jobs_cost_no_write_to_the_list_of_sleepers(app: App, connection: Session) -> None:
    @app.task("t")
    async def t(job: Job) -> None: ...

    def version() -> Any:
        return connection.execute("select xmin::text, ctid::text from pgqueue.waiting").fetchall()

    with worker_of(app):
        before = eventually(version)
        for _ in range(10):
            app.finished_job_sync(t.enqueue_sync(), wait=10)
            time.sleep(0.1)
        assert version() == before


def test_a_worker_knows_how_many_take_the_same_jobs(app: App) -> None:
    @app.task("t")
    async def t(job: Job) -> None: ...

    with worker_of(app) as one, worker_of(app), worker_of(app, queues=["q"]) as other:
        eventually(lambda: len(app.workers_sync()) == 3)
        seen = {"status": "idle", "jobs_processed": 0, "jobs_failed": 0}
        pool = app._sync_pool()
        alike = [pool.run(calls.WORKER_SEEN, worker_id=worker.worker_id, **seen)[2] for worker in (one, other)]
    assert alike == [2, 1]


def test_the_workers_row_says_what_it_does(app: App, connection: Session) -> None:
    @app.task("t")
    async def t(job: Job) -> None: ...

    with worker_of(app, name="w-0", concurrency=3, group="g", queues=["default"]) as worker:
        app.finished_job_sync(t.enqueue_sync(), wait=10)
        (row,) = app.workers_sync()
        assert (row["name"], row["concurrency"], row["group_name"], row["queues"]) == ("w-0", 3, "g", ["default"])
        assert "t" in row["job_types"]
        assert row["worker_id"] == str(worker.worker_id)
        assert worker.faults() == {}


def test_parts_that_fail_for_a_while_work_again(app: App, connection: Session, database: str) -> None:
    @app.task("t", max_retries=1, retry_policy={"base_delay_ms": 1})
    async def t(job: Job) -> str:
        if job.attempt == 1:
            raise ValueError
        return "ok"

    with worker_of(app) as worker:
        assert app.result_sync(t.enqueue_sync(), wait=10) == "ok"
        connection.execute("alter function pgqueue.sweep rename to sweep_away")
        eventually(lambda: "sweeper" in worker.faults())
        job = t.enqueue_sync()
        eventually(lambda: app.job_sync(job).status == "failed")
        connection.execute("alter function pgqueue.sweep_away rename to sweep")
        assert app.result_sync(job, wait=5) == "ok"
        eventually(lambda: worker.faults() == {})


def test_a_worker_outlives_its_connections(app: App, connection: Session) -> None:
    @app.task("t")
    async def t(job: Job) -> str:
        await asyncio.sleep(0.2)
        return "ok"

    with worker_of(app, concurrency=50):
        for _ in range(3):
            jobs = [t.enqueue_sync() for _ in range(20)]
            connection.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
            rows = [app.finished_job_sync(job, wait=20) for job in jobs]
            assert {row.status for row in rows} == {"completed"}


def test_a_worker_does_not_start_without_the_schema(app: App, connection: Session) -> None:
    connection.execute("drop schema pgqueue cascade")

    @app.task("t")
    async def t(job: Job) -> None: ...

    with pytest.raises(PgqueueError, match="run: pgqueue migrate"), worker_of(app):
        pass


def test_a_job_object_is_of_no_use_after_its_attempt(app: App) -> None:
    kept: list[Job] = []

    @app.task("t")
    async def t(job: Job) -> None:
        kept.append(job)

    with worker_of(app):
        app.finished_job_sync(t.enqueue_sync(), wait=10)
        eventually(lambda: kept)
        with pytest.raises(LeaseLost):
            eventually(lambda: kept[0].progress(1) and False)


def test_many_quick_jobs_and_memory_of_none(app: App, connection: Session) -> None:
    @app.task("t")
    async def t(job: Job) -> None: ...

    connection.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, 20000)")
    with worker_of(app) as worker:
        eventually(lambda: worker.counts["processed"] == 20_000, within=30)
        eventually(lambda: not worker.held)
    assert connection.execute("select status, count(*) from pgqueue.jobs group by 1").fetchall() == [
        ("completed", 20_000)
    ]
    assert connection.cursor(row_factory=tuple_row).execute("select max(attempts) from pgqueue.jobs").fetchone() == (1,)
