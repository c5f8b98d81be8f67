"""PgBouncer in transaction mode in front of the database."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue.programs import free_port, identity_for
from tests.api.conftest import Served
from tests.meet import wait_until
from tests.python.apps import MARKS
from tests.python.running import CHECKOUT, command, eventually, make_app, worker_process

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_SWEEP_INTERVAL": "0.5", "PGQUEUE_POLL_INTERVAL": "30"}
END_OTHERS = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)
PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")

pytestmark = [
    pytest.mark.skipif(PGBOUNCER is None, reason="PgBouncer is not installed"),
    pytest.mark.timeout(120),
]


@contextmanager
def pgbouncer(dsn: str, folder: Path, pool: int = 8) -> Iterator[str]:
    """A DSN that goes through PgBouncer in transaction mode with so many connections."""
    assert PGBOUNCER is not None
    given = conninfo_to_dict(dsn)
    port = free_port()
    folder.chmod(0o755)
    (folder / "users.txt").write_text(f'"{given["user"]}" ""\n')
    (folder / "pgbouncer.ini").write_text(
        f"""[databases]
* = host={given["host"]} port={given["port"]}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {folder / "users.txt"}
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = 500
ignore_startup_parameters = extra_float_digits
"""
    )
    with identity_for(folder).popen(
        [PGBOUNCER, folder / "pgbouncer.ini"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        through = make_conninfo("", host="127.0.0.1", port=port, user=given["user"], dbname=given["dbname"])

        def answers() -> bool:
            try:
                with psycopg.connect(through, prepare_threshold=None, connect_timeout=2):
                    return True
            except psycopg.OperationalError:
                assert process.poll() is None, "PgBouncer ended"
                return False

        try:
            wait_until(answers, 10)
            yield through
        finally:
            process.terminate()


@pytest.fixture
def through(database: str, connection: Session, tmp_path: Path) -> Iterator[str]:
    connection.execute(MARKS)
    with pgbouncer(database, tmp_path) as dsn:
        yield dsn


def test_all_parts_work_through_it_and_bells_come_directly(database: str, connection: Session, through: str) -> None:
    variables = {**QUICK, "PGQUEUE_PREPARE": "off", "PGQUEUE_LISTEN_DSN": database}
    with (
        worker_process(through, **variables),
        worker_process(through, **variables),
        command(through, "scheduler", **variables),
        make_app(through, prepare=False) as app,
    ):
        api = Served(through, env=variables)
        try:
            body = {"jobs": [{"type": "noop"}] * 250}
            assert api.http.post("/jobs/batch", json=body).status_code == 201
            app.enqueue_many_sync([{"job_type": "noop"}] * 240 + [{"job_type": "noop", "delay": 1}] * 10)
            done = "select count(*) from pgqueue.jobs where status = 'completed'"
            eventually(lambda: connection.execute(done).fetchone() == (500,), 60)
            # Workers sleep and look only every 30 s: what starts a job at once is the bell.
            time.sleep(3)
            row = app.finished_job_sync(app.enqueue_sync("noop"), wait=20)
            assert row.started_at is not None
            assert (row.started_at - row.created_at).total_seconds() < 15
            with api.http.stream("GET", f"/jobs/{row.job_id}/events") as events:
                assert "job.completed" in events.read().decode()
            assert api.http.get("/health/ready").status_code == 200
        finally:
            api.close()


def test_a_worker_that_would_not_hear_refuses_to_start(through: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "pgqueue", "worker", "tests.python.apps:app"],
        cwd=CHECKOUT, env={**os.environ, "PGQUEUE_DSN": through, "PGQUEUE_PREPARE": "off"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert process.returncode != 0
    assert "PGQUEUE_LISTEN_DSN" in process.stderr
    assert "PGQUEUE_WAKE=poll" in process.stderr
    assert "Traceback" not in process.stderr


def test_an_api_that_hears_nothing_says_so_and_polls(connection: Session, through: str) -> None:
    api = Served(through, env={"PGQUEUE_PREPARE": "off", "PGQUEUE_POLL_INTERVAL": "0.2"})
    try:
        # Before anybody relies on it.
        wait_until(lambda: "PGQUEUE_LISTEN_DSN" in api.told(), 20)
        wait_until(lambda: api.http.get("/health/ready").status_code == 200, 20)
        told = api.http.get("/health/ready").json()["checks"]["listener"]["detail"]
        assert told.startswith("it polls: ")
        assert "set PGQUEUE_LISTEN_DSN to a direct connection, or PGQUEUE_WAKE=poll" in told
        job = api.http.post("/jobs", json={"type": "noop"}).json()["job_id"]
        with api.http.stream("GET", f"/jobs/{job}/events") as events:
            lines = events.iter_lines()
            assert "event: job.queued" in lines
            connection.execute("select pgqueue.cancel(%s)", [job])
            assert "event: job.cancelled" in lines
        assert api.told().count("the listener is deaf") == 1
    finally:
        api.close()


def test_an_api_whose_prepared_statements_are_not_kept_advises(connection: Session, through: str) -> None:
    api = Served(through, "--no-maintenance", env={"PGQUEUE_WAKE": "poll"})
    answers = []

    def advised() -> bool:
        # Often enough that the driver prepares it; then the pooler has sessions that do not know it.
        for _ in range(10):
            answers.append(api.http.post("/jobs", json={"type": "noop"}))
        connection.execute(END_OTHERS)
        return "set PGQUEUE_PREPARE=off, or connect directly" in api.told()

    try:
        wait_until(advised, 30)
        refused = [answer for answer in answers if answer.status_code != 201]
        assert {answer.status_code for answer in refused} == {503}
        assert {answer.json()["type"] for answer in refused} == {"urn:pgqueue:problem:database-unavailable"}
    finally:
        api.close()


def test_polling_needs_no_direct_connection(connection: Session, through: str) -> None:
    variables = {"PGQUEUE_PREPARE": "off", "PGQUEUE_WAKE": "poll", "PGQUEUE_POLL_INTERVAL": "0.2"}
    with worker_process(through, **variables), make_app(through, prepare=False, wake="poll") as app:
        jobs = app.enqueue_many_sync([{"job_type": "noop"}] * 100)
        assert {app.finished_job_sync(job, wait=30).status for job in jobs} == {"completed"}


def test_sweeps_and_claims_are_in_read_committed(connection: Session, through: str) -> None:
    alter = "alter database %I set default_transaction_isolation = serializable"
    connection.execute(f"do $$ begin execute format('{alter}', current_database()); end $$")
    # The sessions of the pooler that were there before keep what they have.
    connection.execute(END_OTHERS)
    variables = {"PGQUEUE_PREPARE": "off", "PGQUEUE_WAKE": "poll", "PGQUEUE_POLL_INTERVAL": "0.2"}
    with worker_process(through, **variables), make_app(through, prepare=False, wake="poll") as app:
        jobs = app.enqueue_many_sync([{"job_type": "noop"}] * 50 + [{"job_type": "noop", "delay": 0.5}] * 50)
        assert {app.finished_job_sync(job, wait=30).status for job in jobs} == {"completed"}
    # What is set for others who use the same sessions stays.
    with psycopg.connect(through, prepare_threshold=None) as other:
        assert other.execute("show transaction_isolation").fetchone() == ("serializable",)
