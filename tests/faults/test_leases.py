"""Jobs lost, stuck or doubled: by claims, leases, sweeps and shutdowns. Workers are real processes.

| what goes wrong elsewhere                        | tests |
|---|---|
| a sweep overwrites an end that was just written  | test_a_sweep_never_overwrites_an_end |
| kill -9: recovered late, or lost between claim   | test_worker_processes: a_killed_workers_job_is_taken_over_by_one_ |
| and start                                        | that_runs; test_random_ends_lose_and_double_nothing; |
|                                                  | test_worker_long: ends_at_any_moment_lose_and_double_nothing |
| a worker that came back under its old name, or   | test_a_new_worker_of_the_same_name_keeps_no_dead_ones_job, |
| whose row is gone, keeps a dead one's jobs       | test_jobs_do_not_need_the_row_of_their_worker |
| a worker that was stopped begins what it held    | test_a_stopped_worker_begins_nothing_whose_lease_has_lapsed |
| longer than the lease: started a second time     | test_a_job_longer_than_its_lease_starts_once; |
|                                                  | test_worker_processes: a_blocked_event_loop_keeps_its_leases, |
|                                                  | a_draining_worker_keeps_its_leases |
| later than the lease: delivered many times       | test_a_job_that_is_due_later_than_a_lease_starts_once |
| an end without a database hangs                  | test_everything_ends_without_its_database; |
|                                                  | test_worker_processes: a_worker_ends_while_its_database_hangs |
"""

import signal
import time
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pgqueue import App
from tests.meet import running_time
from tests.python.running import command, eventually, marks, stalling_proxy, worker_process

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_LEASE": "2", "PGQUEUE_SWEEP_INTERVAL": "0.5", "PGQUEUE_POLL_INTERVAL": "0.5"}
STARTS = "select job_id, count(*) from public.marks where what in ('begun', 'ran') group by 1"


def starts(connection: Session) -> dict[Any, int]:
    return dict(connection.execute(STARTS).fetchall())


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_a_sweep_never_overwrites_an_end(app: App, database: str, connection: Session, count: int) -> None:
    jobs = app.enqueue_many_sync(
        [{"job_type": "slow", "payload": {"seconds": 1.7 + 0.01 * (n % 60)}, "max_retries": 9} for n in range(count)]
    )
    ends: dict[Any, Any] = {}

    def look() -> bool:
        rows = connection.execute(
            "select job_id, status, attempts, finished_at, result from pgqueue.jobs where finished_at is not null"
        ).fetchall()
        for job_id, *end in rows:
            assert ends.setdefault(job_id, end) == end
            assert end[0] == "completed"
        assert ends.keys() <= {row[0] for row in rows}
        return len(ends) == len(jobs)

    variables = {**QUICK, "PGQUEUE_CONCURRENCY": "30", "PGQUEUE_SWEEP_INTERVAL": "0.2"}
    with worker_process(database, **variables) as zombie, worker_process(database, **variables):
        for _ in range(4):
            eventually(lambda: starts(connection))
            time.sleep(1.2)
            # What it sends when it goes on meets the sweep that takes its jobs away.
            zombie.send(signal.SIGSTOP)
            time.sleep(1.95)
            zombie.send(signal.SIGCONT)
            look()
        eventually(look, within=60)
    assert connection.execute("select count(*) from pgqueue.jobs where status = 'processing'").fetchone() == (0,)


def test_a_stopped_worker_begins_nothing_whose_lease_has_lapsed(app: App, database: str, connection: Session) -> None:
    def completed() -> int:
        return int(connection.execute("select count(*) from pgqueue.jobs where status = 'completed'").fetchall()[0][0])

    variables = {**QUICK, "PGQUEUE_CONCURRENCY": "1", "PGQUEUE_SWEEP_INTERVAL": "0.2"}
    with worker_process(database, **variables) as zombie:
        # Of quick tasks some are held ahead of the slot, which a slow one has then.
        quick = [{"job_type": "marked", "max_retries": 9}] * 30
        jobs = app.enqueue_many_sync([*quick, {"job_type": "slow", "payload": {"seconds": 0.7}}, *quick])
        eventually(lambda: any(what == "begun" for _, _, what in marks(connection)))
        zombie.send(signal.SIGSTOP)
        with worker_process(database, **variables):
            eventually(lambda: completed() == len(jobs))
            before = sum(starts(connection).values())
            app.enqueue_sync("slow", {"seconds": 3})
            eventually(lambda: len(starts(connection)) == len(jobs) + 1)
            zombie.send(signal.SIGCONT)
            # Only the zombie has a slot for it, after whatever it still holds.
            app.result_sync(app.enqueue_sync("noop"), wait=10)
            assert sum(starts(connection).values()) == before + 1


def test_a_new_worker_of_the_same_name_keeps_no_dead_ones_job(app: App, database: str, connection: Session) -> None:
    call = "app.run_worker(name='w-0')"
    with worker_process(database, call=call, **QUICK) as first:
        job = app.enqueue_sync("slow", {"seconds": 3})
        eventually(lambda: starts(connection))
        first.send(signal.SIGKILL)
        first.ended(5)
        killed_at = running_time()
        with worker_process(database, call=call, **QUICK):
            eventually(lambda: starts(connection)[job.job_id] == 2)
            # Lease, sweep and a second, with room for the start of a process.
            assert running_time() - killed_at < 2 + 0.5 + 1 + 5
            assert app.finished_job_sync(job, wait=20).attempts == 2


def test_jobs_do_not_need_the_row_of_their_worker(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK) as owner:
        job = app.enqueue_sync("slow", {"seconds": 8})
        eventually(lambda: starts(connection))
        with worker_process(database, **QUICK):
            owner.send(signal.SIGKILL)
            connection.execute("delete from pgqueue.workers where worker_id = %s", (app.job_sync(job).worker_id,))
            killed_at = running_time()
            eventually(lambda: starts(connection)[job.job_id] == 2)
            assert running_time() - killed_at < 2 + 0.5 + 1 + 3
            # A worker that lives comes back to the list, and keeps its job meanwhile.
            connection.execute("delete from pgqueue.workers")
            assert app.finished_job_sync(job, wait=30).attempts == 2


def test_a_job_longer_than_its_lease_starts_once(app: App, database: str, connection: Session) -> None:
    variables = {**QUICK, "PGQUEUE_LEASE": "1"}
    with worker_process(database, **variables), worker_process(database, **variables):
        jobs = [app.enqueue_sync(task, {"seconds": 5}) for task in ("slow", "slow", "thread", "crunch")]
        rows = [app.finished_job_sync(job, wait=30) for job in jobs]
    assert [(row.status, row.attempts, row.lost) for row in rows] == [("completed", 1, 0)] * 4


def test_a_job_that_is_due_later_than_a_lease_starts_once(app: App, database: str, connection: Session) -> None:
    variables = {**QUICK, "PGQUEUE_LEASE": "1"}
    with ExitStack() as processes:
        for _ in range(3):
            processes.enter_context(worker_process(database, wait=False, **variables))
        eventually(lambda: len(app.workers_sync()) == 3)
        jobs = app.enqueue_many_sync([{"job_type": "marked", "delay": 5}] * 20)
        rows = [app.finished_job_sync(job, wait=30) for job in jobs]
    assert {(row.status, row.attempts) for row in rows} == {("completed", 1)}
    assert set(starts(connection).values()) == {1}
    waits = [(row.started_at - row.created_at).total_seconds() for row in rows if row.started_at]
    assert min(waits) >= 5
    assert max(waits) < 5 + 10


@pytest.mark.parametrize("gone", ["stopped", "silent"])
@pytest.mark.parametrize("words", [("scheduler",), ("serve", "--port", "0")], ids=["scheduler", "serve"])
def test_everything_ends_without_its_database(own_server: Any, words: tuple[str, ...], gone: str) -> None:
    def connected() -> bool:
        with psycopg.connect(own_server.dsn) as connection:
            names = "select count(*) from pg_stat_activity where application_name like 'pgqueue %'"
            return (connection.execute(names).fetchone() or (0,))[0] > 0

    with (
        stalling_proxy(own_server.dsn) as (through, stall),
        command(through, *words, PGQUEUE_GRACE="1", PGQUEUE_SWEEP_INTERVAL="0.2") as process,
    ):
        eventually(connected)
        time.sleep(1)
        assert process.process.poll() is None
        if gone == "stopped":
            own_server.kill()
        else:
            stall()
        time.sleep(1)
        process.send(signal.SIGTERM)
        began = running_time()
        process.ended(1 + 5 + 5)
        assert running_time() - began < 1 + 5
