"""How soon workers run what waits, and how much at once. Workers are real processes on a server of their own.

Each prints what it measured (`pytest -m slow -s`), and holds it to its bar: they want a machine that does nothing else.
"""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue import App
from pgqueue.programs import servers_of
from tests.python.apps import MARKS
from tests.python.running import eventually, make_app, worker_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Session = psycopg.Connection[Any]
MANY = "__import__('tests.python.running', fromlist=['run_many']).run_many(app, 50)"
COMPLETED = "select count(*) from pgqueue.jobs_completed"
#: Of jobs of a queue: how long each waited from its enqueue to its start, in milliseconds.
WAITS = """select extract(epoch from started_at - created_at)::float8 * 1000
             from pgqueue.jobs where queue = %s and started_at is not null"""


@pytest.fixture
def connection(own_server: Any) -> Iterator[Session]:
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        connection.execute(MARKS)
        yield connection


@pytest.fixture
def app(own_server: Any, connection: Session) -> Iterator[App]:
    with make_app(own_server.dsn) as app:
        yield app


def number(connection: Session, statement: str, *parameters: Any) -> float:
    (found,) = connection.execute(statement, parameters).fetchone() or (None,)
    return float(found or 0)


def pickups(app: App, connection: Session, queue: str, count: int, **options: Any) -> list[float]:
    """The waits of so many single jobs, in milliseconds, sorted."""
    for n in range(count):
        app.enqueue_sync("noop", queue=queue, **options)
        # Not in step with anything that workers do at intervals.
        time.sleep(0.05 + 0.013 * (n % 7))
    eventually(lambda: len(connection.execute(WAITS, (queue,)).fetchall()) == count)
    return sorted(wait for (wait,) in connection.execute(WAITS, (queue,)).fetchall())


def told(what: str, waits: list[float]) -> None:
    p99 = waits[min(len(waits) - 1, int(len(waits) * 0.99))]
    print(f"{what}: median {statistics.median(waits):.1f} ms, p99 {p99:.1f} ms, longest {waits[-1]:.1f} ms")


def test_a_critical_job_overtakes_ten_thousand_low_ones(app: App, own_server: Any, connection: Session) -> None:
    with worker_process(own_server.dsn):
        app.enqueue_many_sync([{"job_type": "pause", "payload": {"seconds": 0.1}, "priority": "low"}] * 10_000)
        eventually(lambda: number(connection, COMPLETED) > 100)
        waits = pickups(app, connection, "urgent", 100, priority="critical")
        told("critical before low ones", waits)
        assert number(connection, COMPLETED) < 10_000
    assert waits[-1] < 300


def test_an_idle_worker_shares_a_backlog_at_once(app: App, own_server: Any, connection: Session) -> None:
    """Be it one that has just come, or one that has waited and hears the bell with the other."""
    work = {"job_type": "pause", "payload": {"seconds": 0.02}}
    first_start = """select extract(epoch from min(j.started_at) - w.started_at)::float8 * 1000
                       from pgqueue.workers w join pgqueue.jobs j using (worker_id)
                      where w.name = 'second' group by w.started_at"""
    with worker_process(own_server.dsn):
        app.enqueue_many_sync([work] * 10_000)
        eventually(lambda: number(connection, COMPLETED) > 100)
        with worker_process(own_server.dsn, call="app.run_worker(name='second')"):
            waited = eventually(lambda: number(connection, first_start))
            print(f"a worker that comes to a backlog begins after {waited:.1f} ms")
            assert waited < 100
            eventually(lambda: number(connection, COMPLETED) == 10_000, within=120)
            time.sleep(3)
            late: list[float] = []
            for n in range(10):
                queue = f"q{n}"
                app.enqueue_many_sync([{**work, "queue": queue}] * 500)
                eventually(lambda n=n: number(connection, COMPLETED) == 10_000 + 500 * (n + 1))  # type: ignore[misc]
                starts = connection.execute(
                    "select extract(epoch from min(started_at - created_at))::float8 * 1000"
                    " from pgqueue.jobs where queue = %s group by worker_id",
                    (queue,),
                ).fetchall()
                assert len(starts) == 2
                late.append(max(start for (start,) in starts))
                time.sleep(1.5)
            told("the later of two that wait", sorted(late))
            assert statistics.median(late) < 100


def _seconds_of_servers(pgdata: Any) -> float:
    """What the server's processes have used of a CPU so far."""
    ticks = 0
    for pid in servers_of(pgdata):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_two_hundred_idle_workers_cost_little(own_server: Any, connection: Session) -> None:
    """They have all their connections and threads, fifty to a process: 200 processes would fill a machine."""
    connection.close()
    own_server.stop()
    own_server.start(max_connections="1500")
    with (
        psycopg.connect(own_server.dsn, autocommit=True) as session,
        make_app(own_server.dsn) as app,
        ExitStack() as processes,
    ):
        for _ in range(4):
            processes.enter_context(worker_process(own_server.dsn, call=MANY, wait=False))
        eventually(lambda: number(session, "select count(*) from pgqueue.waiting") == 200, within=120)
        time.sleep(15)
        before, began = _seconds_of_servers(own_server.pgdata), time.monotonic()
        time.sleep(30)
        used = (_seconds_of_servers(own_server.pgdata) - before) / (time.monotonic() - began)
        print(f"the servers of 200 idle workers use {used * 100:.1f} % of a core")
        waits = pickups(app, session, "q", 100)
        told("pickup by 200 idle workers", waits)
    assert statistics.median(waits) < 50
    assert used < 0.05


def _per_second(app: App, connection: Session, keys: int, jobs: int) -> float:
    """The jobs per second of so many ordering keys, from a backlog."""
    queue = f"k{keys}"
    for start in range(0, jobs, 1000):
        app.enqueue_many_sync(
            [
                {"job_type": "noop", "queue": queue, "ordering_key": f"{n % keys}"}
                for n in range(start, min(start + 1000, jobs))
            ]
        )
    before = number(connection, COMPLETED)
    app.resume_sync(queue)
    eventually(lambda: number(connection, COMPLETED) == before + jobs, within=180)
    took = number(
        connection,
        "select extract(epoch from max(finished_at) - min(started_at))::float8 from pgqueue.jobs where queue = %s",
        queue,
    )
    return jobs / took


def test_ordering_keys_run_fast(app: App, own_server: Any, connection: Session) -> None:
    for queue in ("k1", "k50"):
        app.pause_sync(queue)
    with ExitStack() as processes:
        for _ in range(4):
            processes.enter_context(worker_process(own_server.dsn, wait=False))
        eventually(lambda: len(app.workers_sync()) == 4)
        one, fifty = _per_second(app, connection, 1, 3000), _per_second(app, connection, 50, 10_000)
    print(f"one key: {one:.0f} jobs/s; 50 keys: {fifty:.0f} jobs/s")
    assert one >= 200
    assert fifty >= 5 * 200


def test_a_thousand_jobs_wait_at_once_in_one_process(app: App, own_server: Any, connection: Session) -> None:
    with worker_process(own_server.dsn, PGQUEUE_CONCURRENCY="1000"):
        app.enqueue_many_sync([{"job_type": "pause", "payload": {"seconds": 5}}] * 1000)
        eventually(lambda: number(connection, COMPLETED) == 1000)
    last_start, first_end = connection.execute(
        "select max(started_at), min(finished_at) from pgqueue.jobs"
    ).fetchone() or (None, None)
    assert last_start is not None
    assert first_end is not None
    assert last_start < first_end


def test_a_process_task_harms_no_pickup(app: App, own_server: Any, connection: Session) -> None:
    with worker_process(own_server.dsn):
        pickups(app, connection, "warm", 30)
        idle = pickups(app, connection, "idle", 200)
        job = app.enqueue_sync("crunch", {"seconds": 60}, max_retries=0)
        eventually(lambda: number(connection, "select count(*) from public.marks") == 1)
        busy = pickups(app, connection, "busy", 200)
        assert app.job_sync(job).status == "processing"
    told("idle", idle)
    told("beside a process task", busy)
    assert busy[int(len(busy) * 0.99)] < 2 * idle[int(len(idle) * 0.99)]
