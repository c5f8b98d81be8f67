"""The worker in one process: what it holds, claims, waits for and gives back."""

import asyncio
import statistics
import threading
import time
from typing import Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from pgqueue import App, Job, calls, connections
from pgqueue.errors import LeaseLost, PgqueueError
from tests.meet import running_time
from tests.python.running import asleep, eventually, lose, make_app, stalling_proxy, worker_of

Session = psycopg.Connection[Any]


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
            began = running_time()
            worker.request_stop()
        assert running_time() - began < 3
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


def test_what_finds_no_slot_is_given_back_though_nothing_else_waits(app: App, connection: Session) -> None:
    """A worker of quick tasks meets a long one: what it claimed ahead is not for it to keep."""
    leave = threading.Event()

    @app.task("quick")
    async def quick() -> None:
        pass

    @app.task("long")
    def long() -> None:
        leave.wait(30)

    with app, worker_of(app, concurrency=1):
        for job in [quick.enqueue_sync() for _ in range(40)]:
            app.finished_job_sync(job, wait=10)
        blocking = long.enqueue_sync()
        eventually(lambda: app.job_sync(blocking).status == "processing")
        late = quick.enqueue_sync()
        try:
            # As often as it is claimed ahead: after that it is somebody else's.
            eventually(
                lambda: connection.execute(
                    "select status = 'pending' and updated_at > created_at + interval '0.5 seconds'"
                    " or status = 'pending' and created_at < now() - interval '3 seconds'"
                    "  from pgqueue.jobs where job_id = %s", [late.job_id],
                ).fetchone()[0],
                within=8,
            )  # fmt: skip
            with worker_of(app, concurrency=1):
                assert app.finished_job_sync(late, wait=10).status == "completed"
            assert app.job_sync(blocking).status == "processing"
        finally:
            leave.set()
        assert app.finished_job_sync(blocking, wait=10).status == "completed"


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


def test_slow_jobs_wait_in_a_worker_only_for_slots_that_come_free_during_a_claim(
    database: str, connection: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready: list[int] = []
    claims: list[float] = []
    within = connections._within

    async def timed(limit: float, connection: Any, call: Any, parameters: Any) -> Any:
        began = time.monotonic()
        answer = await within(limit, connection, call, parameters)
        if call is calls.CLAIM:
            claims.append(time.monotonic() - began)
        return answer

    monkeypatch.setattr(connections, "_within", timed)
    with stalling_proxy(database, 0.05) as (through, _), make_app(through, concurrency=10) as app:

        @app.task("t")
        async def t(n: int) -> None:
            # By then whatever had a slot has begun.
            await asyncio.sleep(0.05)
            ready.append(sum(not held.began for held in worker.held.values()))
            # The first ten end one after the other, and so those that follow them do too.
            await asyncio.sleep(0.45 + (n * 0.05 if n < 10 else 0))

        connection.execute(
            """insert into pgqueue.jobs (job_type, payload)
                 select 't', jsonb_build_object('n', n) from generate_series(0, 99) n"""
        )
        with worker_of(app) as worker:
            eventually(lambda: connection.execute("select count(*) from pgqueue.jobs_completed").fetchone() == (100,))
    # A slot comes free every 0.05 s, and a claim is sent when half of what it is to fill up is left. Of most jobs:
    # where something holds up the process, many slots come free at once.
    assert statistics.median(ready) <= 2 * statistics.median(claims) / 0.05


def test_an_idle_worker_sleeps_and_wakes_by_the_bell(app: App, connection: Session, database: str) -> None:
    sleeper = make_app(database, poll_interval=30, sweep_interval=30)

    @sleeper.task("t")
    async def t(job: Job) -> None: ...

    with sleeper, worker_of(sleeper):
        for _ in range(3):
            asleep(connection)
            began = running_time()
            app.finished_job_sync(app.enqueue_sync("t"), wait=10)
            assert running_time() - began < 8


def test_one_bell_is_enough_for_many_queues(connection: Session, database: str) -> None:
    sleeper = make_app(database, poll_interval=60, sweep_interval=0.5)

    @sleeper.task("t")
    async def t(job: Job) -> None: ...

    with sleeper, worker_of(sleeper):
        eventually(lambda: connection.execute("select count(*) from pgqueue.waiting").fetchone() == (1,))
        connection.execute("set pgqueue.wake = off")
        connection.execute(
            "insert into pgqueue.jobs (job_type, queue) select 't', 'q' || n from generate_series(1, 300) n"
        )
        connection.execute("set pgqueue.wake = on")
        connection.execute("insert into pgqueue.jobs (job_type) values ('t')")
        eventually(lambda: connection.execute("select count(*) from pgqueue.jobs_completed").fetchone() == (301,))


def test_an_insert_that_commits_late_is_found_without_a_poll(app: App, connect: Any, database: str) -> None:
    sleeper = make_app(database, poll_interval=30, sweep_interval=30)

    @sleeper.task("t")
    async def t(job: Job) -> None: ...

    with sleeper:
        session = connect(autocommit=False)
        # Its trigger looks for sleepers before there is one.
        job = sleeper.enqueue_sync("t", connection=session)
        with worker_of(sleeper):
            asleep(connect())
            began = running_time()
            session.commit()
            app.finished_job_sync(job, wait=10)
            assert running_time() - began < 8


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
        # A statement that was prepared before still finds it.
        connection.execute(
            """select pg_terminate_backend(pid, 5000) from pg_stat_activity
                where application_name = 'pgqueue sweeper' and datname = current_database()"""
        )
        eventually(lambda: "does not exist" in worker.faults().get("sweeper", ""))
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


def test_a_worker_does_not_start_without_the_schema(
    app: App, connection: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    connection.execute("drop schema pgqueue cascade")

    @app.task("t")
    async def t(job: Job) -> None: ...

    with pytest.raises(PgqueueError, match="run: pgqueue migrate"), worker_of(app):
        pass
    assert "worker stopped" not in "".join(capsys.readouterr())


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
