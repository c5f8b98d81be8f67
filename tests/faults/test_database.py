"""The database goes, comes back, takes no writes, forgets functions and rights, or has odd names. All are processes."""

import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import App, schema
from pgqueue.errors import DatabaseUnavailable
from tests.api.conftest import Served
from tests.meet import running_time, wait_until
from tests.python.apps import MARKS
from tests.python.running import WorkerProcess, command, eventually, make_app, worker_process
from tests.servers import OwnServer, ServerUnderTest

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_LEASE": "5", "PGQUEUE_SWEEP_INTERVAL": "0.5", "PGQUEUE_POLL_INTERVAL": "0.5"}
TERMINATE = (
    "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()"
    " and pid <> pg_backend_pid()"
)

SCHEDULE = "insert into pgqueue.schedules (name, cron, job_type) values ('yearly', '0 0 1 1 *', 'marked')"
DUE = "update pgqueue.schedules set next_run_at = pgqueue.clock()"
FIRES = "select count(*) from pgqueue.schedule_fires"


class Everything:
    """Two workers, a scheduler and an API."""

    def __init__(self, workers: list[WorkerProcess], scheduler: WorkerProcess, api: Served) -> None:
        self.workers, self.scheduler, self.api = workers, scheduler, api

    @property
    def processes(self) -> list[Any]:
        return [*(worker.process for worker in self.workers), self.scheduler.process, self.api.process]

    def alive(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def post(self) -> int:
        return self.api.http.post("/jobs", json={"type": "marked"}).status_code

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(20) for process in self.processes] == [0] * len(self.processes)


@contextmanager
def everything(dsn: str, **variables: str) -> Iterator[Everything]:
    given = {**QUICK, **variables}
    with ExitStack() as stack:
        workers = [stack.enter_context(worker_process(dsn, **given)) for _ in range(2)]
        scheduler = stack.enter_context(command(dsn, "scheduler", **given))
        api = Served(dsn, env=given)
        stack.callback(api.close)
        yield Everything(workers, scheduler, api)


def seconds_of_processor(processes: list[Any]) -> list[float]:
    times = [psutil.Process(process.pid).cpu_times() for process in processes]
    return [time.user + time.system for time in times]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("down", "share", "back"),
    [(8, 0.1, 20.0), pytest.param(60, 0.02, 5.0, marks=pytest.mark.slow)],
    ids=["a moment", "a minute"],
)
def test_nobody_ends_and_nobody_spins_while_the_database_is_down(
    own_server: OwnServer, down: int, share: float, back: float
) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        connection.execute(MARKS)
        connection.execute(SCHEDULE)
    with make_app(own_server.dsn) as app, everything(own_server.dsn) as running:
        jobs = app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 0.5}}] * 60)
        jobs += app.enqueue_many_sync([{"job_type": "marked", "delay": 1}] * 20)
        eventually(lambda: app.job_sync(jobs[0]).status == "completed")
        own_server.stop("immediate")
        time.sleep(2)
        before, began = seconds_of_processor(running.processes), time.monotonic()
        assert running.post() == 503
        time.sleep(down)
        after, took = seconds_of_processor(running.processes), time.monotonic() - began
        assert running.alive()
        assert running.post() == 503
        shares = [(late - early) / took for early, late in zip(before, after, strict=True)]
        assert max(shares) < share, shares
        own_server.start()
        returned = running_time()
        wait_until(lambda: running.post() == 201, 20)
        job = app.enqueue_sync("marked")
        app.finished_job_sync(job, wait=30)
        assert running_time() - returned < back
        rows = [app.finished_job_sync(job, wait=60) for job in jobs]
        assert {row.status for row in rows} == {"completed"}
        wait_until(lambda: running.api.http.get("/health/ready").status_code == 200, 20)
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            connection.execute(DUE)
            wait_until(lambda: connection.execute(FIRES).fetchone() != (0,), 30)
        assert running.alive()
        running.end()


@pytest.mark.timeout(180)
def test_work_goes_on_when_writes_are_allowed_again(database: str, connection: Session) -> None:
    connection.execute(MARKS)
    name = sql.Identifier(connection.info.dbname)
    alter = sql.SQL("alter database {} set default_transaction_read_only = on").format(name)
    with make_app(database) as app, everything(database) as running:
        first = app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 1}}] * 30)
        eventually(lambda: app.job_sync(first[0]).status == "processing")
        connection.execute(alter)
        connection.execute(TERMINATE)
        wait_until(lambda: running.post() == 503, 20)
        time.sleep(6)
        assert running.alive()
        assert running.api.http.get("/health/ready").status_code == 503
        connection.execute("set default_transaction_read_only = off")
        connection.execute(sql.SQL("alter database {} reset default_transaction_read_only").format(name))
        # Nobody ends the sessions that began meanwhile: whoever has one throws it away.
        wait_until(lambda: running.post() == 201, 60)

        def enqueue() -> Any:
            try:
                return app.enqueue_sync("marked")
            except DatabaseUnavailable:
                return None

        late = eventually(enqueue, 60)
        rows = [app.finished_job_sync(job, wait=60) for job in [*first, late]]
        assert {row.status for row in rows} == {"completed"}
        assert running.alive()
        running.end()


@pytest.mark.timeout(180)
def test_a_part_whose_right_is_taken_away_works_again_when_it_has_it(database: str, connection: Session) -> None:
    """The sweepers of all processes lose the function that they call; then all listeners are cut off for a while."""
    user = f"worker-{uuid.uuid4().hex[:8]}"
    role = sql.Identifier(user)
    connection.execute(sql.SQL("create role {} login in role pgqueue_worker, pgqueue_operator").format(role))
    connection.execute(MARKS)
    connection.execute(sql.SQL("grant insert on public.marks to {}").format(role))
    dsn = make_conninfo(database, user=user)
    step = "execute on function pgqueue.sweep_step(text, integer, interval, boolean)"
    try:
        with make_app(database) as app, everything(dsn) as running:
            wait_until(lambda: running.api.http.get("/health/ready").status_code == 200, 20)
            connection.execute(f"revoke {step} from pgqueue_worker, pgqueue_operator")
            wait_until(lambda: running.api.http.get("/health/ready").status_code == 503, 20)
            late = app.enqueue_sync("marked", delay=0.5)
            time.sleep(3)
            assert app.job_sync(late).status == "submitted"
            connection.execute(f"grant {step} to pgqueue_worker, pgqueue_operator")
            restored = running_time()
            assert app.finished_job_sync(late, wait=30).status == "completed"
            assert running_time() - restored < 10
            wait_until(lambda: running.api.http.get("/health/ready").status_code == 200, 20)
            until = time.monotonic() + 4
            while time.monotonic() < until:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like '%listener%'"
                    " and datname = current_database()"
                )
                time.sleep(0.05)
            wait_until(lambda: running.api.http.get("/health/ready").status_code == 200, 20)
            assert app.finished_job_sync(app.enqueue_sync("marked"), wait=10).status == "completed"
            assert running.alive()
            running.end()
    finally:
        connection.execute(sql.SQL("drop owned by {}").format(role))
        connection.execute(sql.SQL("drop role {}").format(role))


@pytest.mark.timeout(180)
def test_all_parts_work_with_odd_names_of_database_role_and_password(server: ServerUnderTest) -> None:
    owner, name, password = "app-role %s@b", f"My-Queue db %n {uuid.uuid4().hex[:6]}", "p@:/#% 'x\""
    role, database = sql.Identifier(owner), sql.Identifier(name)
    with psycopg.connect(server.dsn, dbname="postgres", autocommit=True) as admin:
        admin.execute(sql.SQL("create role {} login createrole password {}").format(role, sql.Literal(password)))
        admin.execute(sql.SQL("alter role {} set search_path = ''").format(role))
        admin.execute(sql.SQL("create database {} template template0 owner {}").format(database, role))
        try:
            dsn = make_conninfo(server.dsn, dbname=name, user=owner, password=password)
            schema.migrate(dsn)
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute(MARKS)
                connection.execute(SCHEDULE)
                with everything(dsn) as running:
                    assert running.post() == 201
                    connection.execute(DUE)
                    wait_until(lambda: connection.execute(FIRES).fetchone() != (0,), 30)
                    done = "select count(*) from pgqueue.jobs where status = 'completed'"
                    wait_until(lambda: connection.execute(done).fetchone() == (2,), 30)
                    running.end()
        finally:
            admin.execute(sql.SQL("drop database {} with (force)").format(database))
            admin.execute(sql.SQL("drop role {}").format(role))


def test_a_migration_with_nothing_to_do_waits_for_nobody(database: str, connection: Session, app: App) -> None:
    with psycopg.connect(database) as reader:
        reader.execute("select count(*) from pgqueue.jobs")
        reader.execute("lock table pgqueue.jobs in access exclusive mode")
        began = running_time()
        with command(database, "migrate") as migrating:
            assert migrating.ended(20) == 0
        assert running_time() - began < 20


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as made:
        yield made
