"""What tasks do to the process that runs them, and the world to its log. Workers are real processes.

| what goes wrong elsewhere                                 | tests |
|-----------------------------------------------------------|---|
| who cannot write its log does nothing any more, and lives | test_a_log_that_cannot_be_written_stops_nothing |
| sys.exit() in a subtask ends the worker without a word    | test_a_task_cannot_end_the_process_of_others |
| a part of the worker ends, and the rest lives on in vain  | test_a_worker_that_lost_a_part_ends_and_says_why |
| what a task forks does not end when told to               | test_what_a_task_forks_ends_when_told_to |
| what a process task started lives on beside its retry     | test_what_a_process_task_started_ends_with_it |
| jobs wait behind a task that blocks the event loop, are   | test_jobs_behind_a_blocked_loop_run_elsewhere, |
| failed unbegun, or run twice                              | test_jobs_behind_a_blocked_loop_run_once_where_the_…, |
|                                                           | test_a_retry_waits_for_an_attempt_that_blocks_its_loop |
| where claims take long, jobs are given back for ever      | test_jobs_of_claims_that_take_long_are_run |
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue import App
from tests.faults.test_handlers import AT_ONCE, QUICK, starts
from tests.python.running import CHECKOUT, eventually, marks, worker_process

Session = psycopg.Connection[Any]
RUDE = "tests.python.rude:app"


def test_a_log_that_cannot_be_written_stops_nothing(app: App, database: str) -> None:
    code = "from pgqueue import log; from tests.python.apps import app as a; log.configure(); exit(a.run_worker())"
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=CHECKOUT, env={**os.environ, "PGQUEUE_DSN": database, **QUICK}, stderr=writing
    ) as process:
        try:
            os.close(writing)
            assert app.result_sync(app.enqueue_sync("noop"), wait=60) is None
            os.close(reading)
            failed = [app.enqueue_sync("raises", {"what": "?"}, max_retries=0) for _ in range(3)]
            assert {app.finished_job_sync(job, wait=30).status for job in failed} == {"dead_letter"}
            # One after the other: each needs the finisher anew.
            for _ in range(3):
                assert app.result_sync(app.enqueue_sync("noop"), wait=30) is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_task_that_closes_stderr_stops_nothing(app: App, database: str) -> None:
    with worker_process(database, RUDE, **QUICK) as worker:
        assert app.finished_job_sync(app.enqueue_sync("closes_stderr"), wait=30).status == "dead_letter"
        for _ in range(3):
            assert app.result_sync(app.enqueue_sync("noop"), wait=30) is None
        worker.send(signal.SIGTERM)
        assert worker.ended(30) == 0


@pytest.mark.parametrize("rude", ["exits_in_a_subtask", "exits_from_a_callback", "stops_the_loop"])
def test_a_task_cannot_end_the_process_of_others(app: App, database: str, connection: Session, rude: str) -> None:
    with worker_process(database, RUDE, **QUICK) as worker:
        beside = app.enqueue_sync("slow", {"seconds": 3})
        eventually(lambda: starts(connection))
        for _ in range(2):
            app.finished_job_sync(app.enqueue_sync(rude, max_retries=0), wait=30)
        assert app.result_sync(beside, wait=30) == "slept"
        assert starts(connection) == {beside.job_id: 1}
        worker.send(signal.SIGTERM)
        assert worker.ended(30) == 0


def test_a_worker_that_lost_a_part_ends_and_says_why(app: App, database: str) -> None:
    with worker_process(database, RUDE, **QUICK) as worker:
        app.enqueue_sync("cancels_all", max_retries=0)
        assert worker.ended(30) == 1


def test_what_a_task_forks_ends_when_told_to(app: App, database: str) -> None:
    with worker_process(database, RUDE, **QUICK):
        result = app.result_sync(app.enqueue_sync("forks"), wait=60)
        assert isinstance(result, dict)
        assert result["code"] == -signal.SIGTERM


@pytest.mark.parametrize("end", ["timeout", "process killed", "worker killed"])
def test_what_a_process_task_started_ends_with_it(app: App, database: str, connection: Session, end: str) -> None:
    with worker_process(database, RUDE, **QUICK) as worker:
        asked = {"dies": end == "process killed"}
        job = app.enqueue_sync("spawns", asked, max_retries=0, timeout=2 if end == "timeout" else 60)
        [(_, _, pid)] = eventually(lambda: marks(connection))
        if end == "worker killed":
            assert _runs(pid)
            worker.send(signal.SIGKILL)
        else:
            assert app.finished_job_sync(job, wait=30).status == "dead_letter"
        eventually(lambda: not _runs(pid))


def _runs(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_jobs_behind_a_blocked_loop_run_elsewhere(app: App, database: str, connection: Session) -> None:
    with worker_process(database, PGQUEUE_CONCURRENCY="4", **QUICK):
        blocker, *others = app.enqueue_many_sync(
            [{"job_type": "blocks_the_loop", "payload": {"seconds": 25}, "timeout": 60}]
            + [{"job_type": "slow", "payload": {"seconds": 0}, "timeout": 1, "max_retries": 0}] * 6
        )
        eventually(lambda: starts(connection))
        with worker_process(database, **QUICK):
            for job in others:
                assert app.result_sync(job, wait=60) == "slept"
            assert "done" not in [what for job_id, _, what in marks(connection) if job_id == blocker.job_id]
            app.finished_job_sync(blocker, wait=60)
    assert set(starts(connection).values()) == {1}


def test_jobs_behind_a_blocked_loop_run_once_where_the_same_worker_takes_them_again(
    app: App, database: str, connection: Session
) -> None:
    with worker_process(database, PGQUEUE_CONCURRENCY="9", **QUICK):
        jobs = app.enqueue_many_sync(
            [{"job_type": "blocks_the_loop", "payload": {"seconds": 9}}]
            + [{"job_type": "slow", "payload": {"seconds": 0.5}}] * 20
        )
        rows = [app.finished_job_sync(job, wait=60) for job in jobs]
        counted = "select sum(completed), sum(lost) from pgqueue.counters"
        assert eventually(lambda: connection.execute(counted).fetchone() == (len(jobs), 0))
    assert {(row.status, row.attempts, row.lost) for row in rows} == {("completed", 1, 0)}
    assert set(starts(connection).values()) == {1}


def test_jobs_of_claims_that_take_long_are_run(app: App, database: str, connection: Session) -> None:
    connection.execute(
        """create function public.holds_up() returns trigger language plpgsql as
             $$ begin perform pg_sleep(6); return new; end $$;
           create trigger holds_up before insert on pgqueue.claims for each row execute function public.holds_up()"""
    )
    with worker_process(database, **QUICK):
        assert app.result_sync(app.enqueue_sync("slow", {"seconds": 0}), wait=60) == "slept"
    assert set(starts(connection).values()) == {1}


def test_a_retry_waits_for_an_attempt_that_blocks_its_loop(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK):
        job = app.enqueue_sync("blocks_the_loop", {"seconds": 25}, timeout=1, max_retries=1, retry_policy=AT_ONCE)
        eventually(lambda: starts(connection))
        with worker_process(database, **QUICK):
            eventually(lambda: len(marks(connection)) >= 3, within=60)
    assert [(attempt, what) for job_id, attempt, what in marks(connection) if job_id == job.job_id][:3] == [
        (1, "begun"),
        (1, "done"),
        (2, "begun"),
    ]
