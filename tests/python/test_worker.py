"""The worker in one process: how jobs end."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from pgqueue import App, Cancel, DeadLetter, Job, RateLimited, Retry, Snooze, claimer, connections
from pgqueue.errors import ConfigError
from pgqueue.worker import Worker, cancelled
from tests.meet import running_time
from tests.python.running import eventually, make_app, worker_of

Session = psycopg.Connection[Any]
QUICK = {"retry_policy": {"base_delay_ms": 10, "jitter": False}}


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


def test_a_result_that_never_gets_through_in_time_holds_up_no_other_and_is_given_up(
    database: str, connection: Session
) -> None:
    connection.execute(
        """create function slow() returns trigger language plpgsql as
             $$ begin if length(new.result::text) > 2000000 then
                  perform pg_sleep(2.5); raise 'too late'; end if; return new; end $$"""
    )
    connection.execute(
        "create trigger slow before insert on pgqueue.jobs_completed_default for each row execute function slow()"
    )
    for (name,) in connection.execute(
        "select inhrelid::regclass::text from pg_inherits where inhparent = 'pgqueue.jobs_completed'::regclass"
        " and inhrelid <> 'pgqueue.jobs_completed_default'::regclass"
    ).fetchall():
        connection.execute(f"create trigger slow before insert on {name} for each row execute function slow()")
    with make_app(database, statement_limit=1.0) as app:

        @app.task("t")
        async def t(job: Job, size: int = 1) -> Any:
            return "x" * size

        with worker_of(app):
            large = t.enqueue_sync(2_100_000)
            eventually(lambda: app.job_sync(large).status == "processing")
            for _ in range(5):
                assert app.result_sync(t.enqueue_sync(), wait=20) == "x"
            row = app.finished_job_sync(large, wait=60)
    assert (row.status, row.attempts) == ("dead_letter", 1)
    assert "the result is not storable: the database broke off, or did not answer in time" in (row.error or "")


def test_an_outcome_that_only_the_database_refuses_is_a_failure_that_says_so(app: App, connection: Session) -> None:
    connection.execute(
        """create or replace function pgqueue.snooze(worker_id uuid, job_id uuid, attempt int, delay interval)
             returns text language plpgsql as $$ begin raise exception 'not today' using errcode = 'PQ422'; end $$"""
    )

    @app.task("t", max_retries=0)
    async def t(job: Job) -> None:
        raise Snooze(5)

    with worker_of(app):
        row = app.finished_job_sync(t.enqueue_sync(), wait=10)
    assert (row.status, row.attempts, row.lost) == ("dead_letter", 1, 0)
    assert "the outcome is not storable: not today" in (row.error or "")


def test_a_signal_that_is_none_leaks_no_slot(app: App) -> None:
    class Later(Retry):
        def __init__(self) -> None:
            Exception.__init__(self, "later")

    @app.task("t", max_retries=0)
    async def t(job: Job) -> None:
        await asyncio.sleep(0)
        raise Later

    @app.task("echo")
    async def echo(job: Job) -> int:
        return 1

    jobs = [t.enqueue_sync() for _ in range(3)]
    with worker_of(app, concurrency=1):
        assert app.result_sync(echo.enqueue_sync(), wait=10) == 1
        rows = [app.finished_job_sync(job, wait=10) for job in jobs]
    assert {(row.status, row.attempts, row.errors[0]["type"]) for row in rows} == {("dead_letter", 1, "AttributeError")}


def test_a_database_that_reads_no_nulls_in_arrays_is_served_like_others(database: str, connection: Session) -> None:
    connection.execute(
        "do $$ begin execute format('alter database %I set array_nulls = off', current_database()); end $$"
    )
    with make_app(database) as app:

        @app.task("t", max_retries=1, retry_policy={"base_delay_ms": 0})
        async def t(job: Job) -> None:
            raise ValueError("no use")

        jobs = app.enqueue_many_sync([{"job_type": "t", "ordering_key": key} for key in ("k", None, "NULL")] * 2)
        with worker_of(app):
            rows = [app.finished_job_sync(job, wait=20) for job in jobs]
    assert {(row.status, row.attempts, row.error) for row in rows} == {("dead_letter", 2, "ValueError: no use")}
    assert [row.ordering_key for row in rows] == ["k", None, "NULL"] * 2


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


@pytest.mark.parametrize("kind", ["async", "thread"])
def test_a_timeout_says_which_applied_and_how_long_the_attempt_ran(app: App, kind: str) -> None:
    @app.task("async")
    async def asynchronous(job: Job, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @app.task("thread")
    def thread(job: Job, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.01)

    with worker_of(app):
        job = app.enqueue_sync(kind, {"seconds": 60}, timeout=0.25, max_retries=0)
        (error,) = app.finished_job_sync(job, wait=30).errors
    assert error["message"] == "the attempt ran longer than its timeout (0.25 s)"
    assert error["duration_ms"] >= 250


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
        began = running_time()
        assert app.result_sync(quick.enqueue_sync(), wait=10) == "quick"
        assert running_time() - began < 8
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


def test_while_no_slot_is_free_the_completions_of_slow_tasks_wait_for_others(app: App, called: Counter[str]) -> None:
    calls: list[int] = []
    done = 0

    @app.task("slow")
    async def slow(seconds: float) -> None:
        nonlocal done
        await asyncio.sleep(seconds)
        done += 1
        # As many again find all slots busy, and what came before is of no measured time yet.
        if done in (100, 300):
            calls.append(called["complete"])

    spread = [0.15 + 0.1 * (i * 0.618 % 1) for i in range(400)]
    app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": seconds}} for seconds in spread])
    with worker_of(app, concurrency=100):
        eventually(lambda: done == 400)
    assert calls[1] - calls[0] < 60


def test_few_jobs_begin_before_the_next_claim_is_sent(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    claims = 0
    #: How many claims were sent when one was answered that had jobs, and when its job began.
    answered: list[int] = []
    began: list[tuple[int, int]] = []
    within = connections._within
    workers: list[Worker] = []

    async def rung(limit: float, connection: Any, call: Any, parameters: Any) -> Any:
        nonlocal claims
        claims += call.name == "claim"
        rows = await within(limit, connection, call, parameters)
        if call.name == "claim" and rows:
            # As if another job's bell had rung meanwhile: the next claim follows at once.
            workers[0]._idling.bell.set()
            answered.append(claims)
        return rows

    monkeypatch.setattr(connections, "_within", rung)

    @app.task("quick")
    async def quick() -> None:
        began.append((answered[-1], claims))

    with worker_of(app) as worker:
        workers.append(worker)
        for _ in range(5):
            app.result_sync(quick.enqueue_sync(), wait=10)
    assert len(began) == 5
    assert all(before == then for before, then in began), began


def test_completions_that_wait_for_others_keep_no_failure_waiting(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claimer, "PATIENCE", 1e9)
    monkeypatch.setattr(claimer, "PATIENCE_AT_MOST", 60.0)
    began: list[str] = []
    told = threading.Event()

    @app.task("quick")
    async def quick() -> None: ...

    @app.task("waits", max_retries=0)
    async def waits(name: str) -> None:
        began.append(name)
        await asyncio.to_thread(told.wait)
        raise ValueError(name)

    with worker_of(app, concurrency=2):
        app.result_sync(quick.enqueue_sync(), wait=10)
        jobs = [("waits", {"name": "first"}), ("quick", {}), ("waits", {"name": "second"})]
        made = app.enqueue_many_sync([{"job_type": job_type, "payload": payload} for job_type, payload in jobs])
        eventually(lambda: began == ["first", "second"])
        # All slots are busy, so this one may wait for a minute.
        assert app.job_sync(made[1].job_id).status == "processing"
        told.set()
        assert app.finished_job_sync(made[0].job_id, wait=10).status == "dead_letter"
        assert app.finished_job_sync(made[1].job_id, wait=10).status == "completed"


def test_a_bell_is_a_cancel_only_with_a_jobs_id() -> None:
    job_id = "01a2382f-ce1c-7715-8c6b-b8b2cc75f3e1"
    assert cancelled(f"cancel {job_id}") == bytes.fromhex(job_id.replace("-", ""))
    for queue in ("", "default", "cancel", "cancel ", "cancel orders", f"cancels {job_id}"):
        assert cancelled(queue) is None
