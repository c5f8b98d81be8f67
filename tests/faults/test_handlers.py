"""What tasks raise, return, and do not stop doing. Workers are real processes.

| what goes wrong elsewhere                                | tests |
|----------------------------------------------------------|---|
| a result that is no JSON is lost, and the job run anew | test_a_result_that_cannot_be_stored_ends_the_first_attempt |
| (the same in payloads, over REST)                        | api/test_jobs.py |
| a long error breaks the write of the failure             | test_errors_of_any_size_end_their_attempt, |
|                                                          | test_many_long_errors_make_no_long_row |
| a thread that does not stop keeps its slot, or meets its | test_threads_that_do_not_stop_keep_no_slot |
| own retry                                                | |
| an old worker eats jobs whose task it lacks              | test_an_old_worker_leaves_new_job_types_alone |
| jobs of one key run in another order, or two at a time   | test_ordering_keys_over_processes |
"""

import json
import signal
import time
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest

from pgqueue import App
from pgqueue.testing import assert_enqueued
from tests.conftest import Connect
from tests.meet import running_time
from tests.python.apps import VALUES
from tests.python.running import eventually, worker_process

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_LEASE": "2", "PGQUEUE_SWEEP_INTERVAL": "0.3", "PGQUEUE_POLL_INTERVAL": "0.5"}
AT_ONCE = {"base_delay_ms": 0, "jitter": False}
ENDED = "select count(*) from pgqueue.jobs where status in ('completed', 'dead_letter', 'cancelled')"


def starts(connection: Session) -> dict[Any, int]:
    rows = connection.execute("select job_id, count(*) from public.marks where what in ('begun', 'ran') group by 1")
    return dict(rows.fetchall())


def test_a_result_that_cannot_be_stored_ends_the_first_attempt(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK):
        jobs = {what: app.enqueue_sync("returns", {"what": what}, max_retries=2) for what in VALUES}
        rows = {what: app.finished_job_sync(job, wait=20) for what, job in jobs.items()}
        assert app.result_sync(app.enqueue_sync("noop"), wait=10) is None
    assert {what: (row.status, row.attempts) for what, row in rows.items()} == dict.fromkeys(VALUES, ("dead_letter", 1))
    assert all("InvalidResult" in (row.error or "") for row in rows.values())
    assert set(starts(connection).values()) == {1}


def test_errors_of_any_size_end_their_attempt(app: App, database: str, connect: Connect) -> None:
    watcher = connect()
    watcher.execute("listen pgqueue_status")
    watcher.execute("select pgqueue.watch(gen_random_uuid(), interval '5 minutes')")
    with worker_process(database, **QUICK):
        jobs = [
            app.enqueue_sync("raises", {"what": what}, max_retries=1, retry_policy=AT_ONCE)
            for what in ("10 MB", "4-byte", "recursion")
        ]
        rows = [app.finished_job_sync(job, wait=30) for job in jobs]
        began = running_time()
        for job in jobs:
            app.job_sync(job)
        assert running_time() - began < 3
    for row, kind in zip(rows, ("ValueError", "ValueError", "RecursionError"), strict=True):
        assert (row.status, row.attempts) == ("dead_letter", 2)
        for error in row.errors:
            assert error["type"] == kind
            assert len(error["message"].encode()) + len(error["traceback"].encode()) < 64 * 1024
    assert all("(cut)" in row.errors[0]["message"] for row in rows[:2])
    told = [event for notice in watcher.notifies(timeout=2) for event in json.loads(notice.payload)]
    ends = {(event["job_id"], event["attempt"]) for event in told if event["event"] == "job.failed"}
    assert ends == {(str(job.job_id), attempt) for job in jobs for attempt in (1, 2)}
    assert {event["job_id"] for event in told if event["event"] == "job.dead_letter"} == {
        str(job.job_id) for job in jobs
    }
    assert max(len(json.dumps(event)) for event in told) < 1024


@pytest.mark.parametrize("retries", [40, pytest.param(299, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_many_long_errors_make_no_long_row(app: App, database: str, connection: Session, retries: int) -> None:
    with worker_process(database, **QUICK):
        job = app.enqueue_sync("raises", {"what": "100 KB"}, max_retries=retries, retry_policy=AT_ONCE)
        row = app.finished_job_sync(job, wait=60 + retries)
    assert (row.status, row.attempts) == ("dead_letter", retries + 1)
    size = connection.execute("select pg_column_size(j.errors::text), length(j::text) from pgqueue.jobs j").fetchone()
    assert size is not None
    assert max(size) < 1_000_000


def test_threads_that_do_not_stop_keep_no_slot(app: App, database: str, connection: Session) -> None:
    variables = {**QUICK, "PGQUEUE_CONCURRENCY": "2", "PGQUEUE_GRACE": "1"}
    with worker_process(database, **variables):
        stuck = app.enqueue_many_sync(
            [{"job_type": "blocking", "payload": {"seconds": 30}, "timeout": 1, "retry_policy": AT_ONCE}] * 5
        )
        began = running_time()
        app.finished_job_sync(app.enqueue_sync("marked"), wait=30)
        assert running_time() - began < 10
        rows = eventually(lambda: [row for row in map(app.job_sync, stuck) if row.errors], within=20)
        assert all("longer than its timeout" in row.errors[0]["message"] for row in rows)
        assert all(1000 <= row.errors[0]["duration_ms"] <= 3000 for row in rows)
        time.sleep(5)
        # Their threads live on, so that none of them was started again.
        assert max(starts(connection).values()) == 1


def test_an_old_worker_leaves_new_job_types_alone(app: App, database: str, connection: Session) -> None:
    connection.execute(
        """insert into pgqueue.schedules (name, cron, job_type, next_run_at)
           values ('chain', '0 0 29 2 *', 'new_task', pgqueue.clock() - interval '1 second')"""
    )
    next_run = "select next_run_at from pgqueue.schedules where name = 'chain' and next_run_at > pgqueue.clock()"
    with worker_process(database, **QUICK):
        job = app.enqueue_sync("new_task", max_retries=0)
        assert app.result_sync(app.enqueue_sync("noop"), wait=10) is None
        eventually(lambda: connection.execute(next_run).fetchone())
        time.sleep(3)
        rows = assert_enqueued(app, "new_task", count=2)
        assert {(row.status, row.attempts) for row in rows} == {("pending", 0)}
        assert "worker" in app.why_sync(job)
        with worker_process(database, "tests.python.apps:newer", **QUICK):
            began = running_time()
            eventually(lambda: len(starts(connection)) == 2)
            assert running_time() - began < 5
            assert {app.finished_job_sync(row, wait=10).status for row in rows} == {"completed"}


@pytest.mark.parametrize(
    ("keys", "each"), [(8, 20), pytest.param(50, 200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_ordering_keys_over_processes(app: App, database: str, connection: Session, keys: int, each: int) -> None:
    """Every tenth job fails once; one of the processes is killed midway."""
    with ExitStack() as processes:
        workers = [processes.enter_context(worker_process(database, wait=False, **QUICK)) for _ in range(4)]
        eventually(lambda: len(app.workers_sync()) == 4)
        for number in range(each):
            app.enqueue_many_sync(
                [
                    {
                        "job_type": "ordered",
                        "payload": {"key": f"k{key}", "number": number, "fails": (number + key) % 10 == 0},
                        "ordering_key": f"k{key}",
                    }
                    for key in range(keys)
                ]
            )
        eventually(lambda: (connection.execute(ENDED).fetchone() or (0,))[0] > keys * each / 4, within=300)
        workers[0].send(signal.SIGKILL)
        eventually(lambda: connection.execute(ENDED).fetchone() == (keys * each,), within=300)
    assert connection.execute("select distinct status from pgqueue.jobs").fetchall() == [("completed",)]
    running: dict[str, tuple[int, int]] = {}
    done: dict[str, int] = {}
    for what, attempt in connection.execute("select what, attempt from public.marks order by at").fetchall():
        verb, key, number = what.split()
        if verb == "begun":
            # What ran here before did not end: it was the killed worker's.
            assert key not in running or running[key] == (int(number), attempt - 1)
            assert int(number) - done.get(key, -1) in (0, 1)
            running[key] = (int(number), attempt)
        else:
            assert running.pop(key) == (int(number), attempt)
            if verb == "done":
                done[key] = int(number)
    assert done == {f"k{key}": each - 1 for key in range(keys)}
