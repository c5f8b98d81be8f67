"""Workers as real processes: killed, stopped, blocked, cut off, and told to end."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgqueue import App, calls, schema
from tests.conftest import Connect
from tests.meet import running_time
from tests.python.apps import MARKS
from tests.python.running import CHECKOUT, eventually, make_app, marks, stalling_proxy, worker_process

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_LEASE": "2", "PGQUEUE_SWEEP_INTERVAL": "0.3", "PGQUEUE_POLL_INTERVAL": "0.5"}


@pytest.fixture
def app(database: str, connection: Session) -> Iterator[App]:
    connection.execute(MARKS)
    with make_app(database) as app:
        yield app


def starts(connection: Session) -> dict[Any, int]:
    rows = connection.execute("select job_id, count(*) from public.marks where what in ('begun', 'ran') group by 1")
    return dict(rows.fetchall())


def test_a_killed_workers_job_is_taken_over_by_one_that_runs(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK), worker_process(database, **QUICK):
        job = app.enqueue_sync("slow", {"seconds": 4})
        eventually(lambda: starts(connection))
        owner = str(app.job_sync(job).worker_id)
        os.kill(next(row["pid"] for row in app.workers_sync() if row["worker_id"] == owner), signal.SIGKILL)
        killed_at = running_time()
        eventually(lambda: starts(connection)[job.job_id] == 2)
        # Lease, sweep and a second, with room for a busy machine.
        assert running_time() - killed_at < 2 + 0.3 + 1 + 5
        row = app.finished_job_sync(job, wait=30)
    assert (row.status, row.attempts, row.lost, row.max_retries) == ("completed", 2, 1, 3)
    assert "let its lease run out" in row.errors[0]["message"]


def test_a_stopped_worker_changes_nothing_when_it_goes_on(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK) as zombie:
        job = app.enqueue_sync("slow", {"seconds": 1})
        eventually(lambda: starts(connection))
        zombie.send(signal.SIGSTOP)
        with worker_process(database, **QUICK) as other:
            row = app.finished_job_sync(job, wait=20)
            zombie.send(signal.SIGCONT)
            time.sleep(2)
            assert app.job_sync(job) == row
            assert row.attempts == 2
            other.send(signal.SIGTERM)
            other.ended(10)


def test_a_blocked_event_loop_keeps_its_leases(app: App, database: str, connection: Session) -> None:
    with worker_process(database, **QUICK), worker_process(database, **QUICK):
        job = app.enqueue_sync("blocks_the_loop", {"seconds": 6})
        row = app.finished_job_sync(job, wait=20)
    assert (row.attempts, starts(connection)[job.job_id]) == (1, 1)


def test_a_draining_worker_keeps_its_leases(app: App, database: str, connection: Session) -> None:
    with worker_process(database, PGQUEUE_GRACE="20", **QUICK) as worker, worker_process(database, **QUICK):
        job = app.enqueue_sync("slow", {"seconds": 6})
        eventually(lambda: starts(connection))
        owner = app.job_sync(job).worker_id
        worker.send(signal.SIGTERM)
        row = app.finished_job_sync(job, wait=20)
        assert (row.attempts, row.worker_id) == (1, owner)


def test_a_second_signal_hurries(app: App, database: str, connection: Session) -> None:
    with worker_process(database, PGQUEUE_GRACE="60") as worker:
        job = app.enqueue_sync("slow", {"seconds": 50})
        eventually(lambda: starts(connection))
        worker.send(signal.SIGTERM)
        eventually(lambda: app.workers_sync()[0]["status"] == "draining")
        worker.send(signal.SIGTERM)
        assert worker.ended(5) == 0
    assert (app.job_sync(job).status, app.job_sync(job).lost) == ("pending", 0)


@pytest.mark.parametrize("task", ["blocks_the_loop", "stubborn", "thread", "crunch"])
def test_nothing_holds_up_the_end_for_long(app: App, database: str, connection: Session, task: str) -> None:
    with worker_process(database, PGQUEUE_GRACE="1") as worker:
        app.enqueue_sync(task, {"seconds": 60})
        eventually(lambda: connection.execute("select count(*) from public.marks").fetchone() == (1,))
        worker.send(signal.SIGTERM)
        began = running_time()
        worker.ended(1 + 5)
        assert running_time() - began < 1 + 5


def test_a_worker_ends_without_its_database(own_server: Any) -> None:
    database = own_server.dsn
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(MARKS)
    with make_app(database) as app, worker_process(database, PGQUEUE_GRACE="2") as worker:
        app.enqueue_sync("slow", {"seconds": 60})
        own_server.kill()
        time.sleep(0.5)
        worker.send(signal.SIGTERM)
        began = running_time()
        worker.ended(2 + 5)
        assert running_time() - began < 2 + 5


def test_work_goes_on_when_the_database_comes_back(own_server: Any) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        connection.execute(MARKS)
    with make_app(own_server.dsn) as app, worker_process(own_server.dsn, **QUICK) as worker:
        jobs = app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 0.2}}] * 30)
        time.sleep(0.3)
        own_server.stop("immediate")
        time.sleep(3)
        assert worker.process.poll() is None
        own_server.start()
        began = running_time()
        rows = [app.finished_job_sync(job, wait=30) for job in jobs]
        assert running_time() - began < 20
    assert {row.status for row in rows} == {"completed"}


def test_processes_of_tasks_are_killed_and_replaced(app: App, database: str, connection: Session) -> None:
    with worker_process(database):
        late = app.enqueue_sync("crunch", {"seconds": 60}, timeout=1.5, max_retries=0)
        cancelled = app.enqueue_sync("crunch", {"seconds": 60})
        dead = app.enqueue_sync("dies")
        hungry = app.enqueue_sync("hungry", {"size": 2 * 1024**3})
        fed = app.enqueue_sync("hungry", {"size": 1024})
        reports = app.enqueue_sync("reports")
        eventually(
            lambda: cancelled.job_id in dict(connection.execute("select job_id, what from public.marks").fetchall())
        )
        assert app.cancel_sync(cancelled) == "cancel_requested"
        rows = [app.finished_job_sync(job, wait=20) for job in (late, cancelled, dead, hungry, fed, reports)]
        pids = [int(what.split()[1]) for _, _, what in marks(connection)]
    assert [row.status for row in rows] == [
        "dead_letter", "cancelled", "dead_letter", "dead_letter", "completed", "completed",
    ]  # fmt: skip
    assert "longer than its timeout (1.5 s)" in (rows[0].error or "")
    assert rows[0].errors[0]["duration_ms"] >= 1500
    assert "ended with signal SIGKILL" in (rows[2].error or "")
    assert "MemoryError" in (rows[3].error or "")
    assert rows[5].progress == {"half": True}
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_of_tasks_end_with_a_killed_worker(app: App, database: str, connection: Session) -> None:
    with worker_process(database) as worker:
        app.enqueue_sync("crunch", {"seconds": 60})
        (_, _, what) = eventually(lambda: marks(connection))[0]
        worker.send(signal.SIGKILL)
    eventually(lambda: not _alive(int(what.split()[1])), within=5)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_random_ends_lose_and_double_nothing(app: App, database: str, connection: Session) -> None:
    chance = random.Random(7)
    jobs = []
    for _ in range(12):
        with worker_process(database, wait=False, **QUICK) as worker:
            jobs += app.enqueue_many_sync([{"job_type": "marked"}] * 5)
            time.sleep(chance.uniform(0.3, 0.9))
            worker.send(chance.choice([signal.SIGTERM, signal.SIGKILL]))
            worker.ended(10)
    with worker_process(database, **QUICK):
        rows = [app.finished_job_sync(job, wait=30) for job in jobs]
    assert {row.status for row in rows} == {"completed"}
    ran = starts(connection)
    assert all(ran.get(row.job_id, 0) <= row.attempts for row in rows)


def test_prefetched_jobs_of_killed_workers_do_not_die(app: App, database: str, connection: Session) -> None:
    app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 0.2}, "max_retries": 0}] * 60)
    for _ in range(3):
        with worker_process(database, **QUICK) as worker:
            before = sum(starts(connection).values())
            eventually(lambda before=before: sum(starts(connection).values()) >= before + 5)  # type: ignore[misc]
            worker.send(signal.SIGKILL)
    with worker_process(database, **QUICK):
        done = "select count(*) from pgqueue.jobs where status = 'completed'"
        eventually(lambda: connection.execute(done).fetchone() == (60,), within=30)
    assert connection.execute("select count(*) from pgqueue.jobs where status = 'dead_letter'").fetchone() == (0,)


def test_a_supervisor_replaces_the_dead_and_ends_with_all(app: App, database: str, connect: Connect) -> None:
    from tests.python.running import supervised_workers

    def pids() -> set[int]:
        return {row["pid"] for row in app.workers_sync() if row["status"] != "stopped" and _alive(row["pid"])}

    with supervised_workers(database, count=2) as supervisor:
        first = eventually(lambda: len(pids()) == 2 and pids())
        os.kill(min(first), signal.SIGKILL)
        second = eventually(lambda: len(pids()) == 2 and pids() != first and pids())
        assert app.result_sync(app.enqueue_sync("noop"), wait=10) is None
        supervisor.send(signal.SIGHUP)
        third = eventually(lambda: len(pids()) == 2 and not pids() & second and pids())
        supervisor.send(signal.SIGTERM)
        assert supervisor.ended(15) == 0
        assert not any(_alive(pid) for pid in third)


@pytest.mark.timeout(240)
def test_a_process_that_starts_anew_stays_one_of_its_supervisors(app: App, database: str, tmp_path: Path) -> None:
    def parents() -> Iterator[tuple[int, int]]:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                yield int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])

    def below(pid: int) -> set[int]:
        children = {child for child, parent in parents() if parent == pid}
        return children.union(*map(below, children))

    log = (tmp_path / "log").open("w+")
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "worker", "tests.python.apps:app", "--processes", "2", "--concurrency", "8"],
        cwd=CHECKOUT,
        env={**os.environ, "PGQUEUE_DSN": database},
        stderr=log,
    )
    try:
        eventually(lambda: len(app.workers_sync()) == 2, within=60)
        app.enqueue_many_sync(
            [{"job_type": "blocking", "payload": {"seconds": 600}, "max_retries": 0, "timeout": 1}] * 100
        )
        eventually(lambda: (tmp_path / "log").read_text().count("this process starts anew") >= 1, within=120)
        eventually(lambda: {row["status"] for row in app.workers_sync()} >= {"stopped"}, within=60)
        assert app.result_sync(app.enqueue_sync("noop"), wait=60) is None
        assert len(below(process.pid)) == 2
        process.kill()
        process.wait()
        eventually(lambda: "stopped" in {row["status"] for row in app.workers_sync()}, within=20)
    finally:
        for pid in below(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        log.close()


def test_what_ended_is_written_down_as_long_as_there_is_grace(
    app: App, database: str, connection: Session, connect: Connect
) -> None:
    jobs = app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 0.5}}] * 5)
    with worker_process(database, PGQUEUE_GRACE="30") as worker:
        eventually(lambda: len(starts(connection)) == 5)
        with connect(autocommit=False) as holder:
            holder.execute("lock table pgqueue.jobs_live in exclusive mode")
            worker.send(signal.SIGTERM)
            ends = "select count(*) from public.marks where what = 'done'"
            eventually(lambda: connection.execute(ends).fetchone() == (5,))
            time.sleep(4)
            holder.rollback()
        assert worker.ended(20) == 0
    assert {app.job_sync(job).status for job in jobs} == {"completed"}


def test_a_worker_that_hangs_is_replaced_at_a_reload(app: App, database: str) -> None:
    from tests.python.running import supervised_workers

    def pids() -> set[int]:
        return {row["pid"] for row in app.workers_sync() if row["status"] != "stopped" and _alive(row["pid"])}

    with supervised_workers(database, count=2, PGQUEUE_GRACE="1") as supervisor:
        first = eventually(lambda: len(pids()) == 2 and pids())
        os.kill(min(first), signal.SIGSTOP)
        supervisor.send(signal.SIGHUP)
        eventually(lambda: len(pids()) == 2 and not pids() & first, within=60)


def test_workers_do_not_outlive_a_killed_supervisor(app: App, database: str) -> None:
    from tests.python.running import supervised_workers

    with supervised_workers(database, count=2) as supervisor:
        eventually(lambda: len(app.workers_sync()) == 2)
        supervisor.send(signal.SIGKILL)
        eventually(lambda: {row["status"] for row in app.workers_sync()} == {"stopped"})


@pytest.mark.timeout(300)
def test_a_reloading_worker_follows_its_tasks(app: App, database: str, tmp_path: Path) -> None:
    def write(text: str) -> None:
        (tmp_path / "tasks.py").write_text(text)

    def result() -> Any:
        return app.result_sync(app.enqueue_sync("version"), wait=90)

    code = "from pgqueue import App\napp = App()\n@app.task('version')\ndef version():\n    return "
    write(f"{code} 1")
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "worker", "tasks:app", "--reload"],
        cwd=tmp_path,
        env={**os.environ, "PGQUEUE_DSN": database, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        assert result() == 1
        write(f"{code} 1 +")
        eventually(lambda: {row["status"] for row in app.workers_sync()} == {"stopped"}, within=60)
        write(f"{code} 10 + 1")
        assert result() == 11
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_a_worker_ends_while_its_database_hangs(app: App, database: str, connection: Session) -> None:
    with stalling_proxy(database) as (through, stall), worker_process(through, PGQUEUE_GRACE="1") as worker:
        app.enqueue_sync("slow", {"seconds": 60})
        eventually(lambda: starts(connection))
        stall()
        time.sleep(1)
        worker.send(signal.SIGTERM)
        began = running_time()
        worker.ended(1 + 5)
        assert running_time() - began < 1 + 5


@pytest.mark.parametrize(
    ("change", "code", "advice"),
    [
        ("drop schema pgqueue cascade", 5, "run: pgqueue migrate"),
        (
            "create or replace function pgqueue.schema_version() returns text language sql as $$ select '0000' $$",
            5,
            "the schema is at 0000, and this release needs 0001; run: pgqueue migrate",
        ),
        (None, 2, "set PGQUEUE_LISTEN_DSN to a direct connection"),
    ],
    ids=["missing", "old", "deaf"],
)
def test_a_worker_that_cannot_work_says_what_to_do(
    database: str, connection: Session, change: str | None, code: int, advice: str
) -> None:
    variables = {"PGQUEUE_DSN": database}
    if change is None:
        # A bell does not cross databases, as it does not cross a pooler in transaction mode.
        variables["PGQUEUE_LISTEN_DSN"] = make_conninfo(database, dbname="postgres")
    else:
        connection.execute(change)
    ended = subprocess.run(
        [sys.executable, "-m", "pgqueue", "worker", "pgqueue.demo:app"],
        cwd=CHECKOUT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, advice in ended.stderr) == (code, True), ended.stderr


def test_the_version_that_a_worker_needs_is_that_of_the_migrations() -> None:
    assert schema.head() >= calls.NEEDED_VERSION
