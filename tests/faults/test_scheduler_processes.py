"""Schedulers as real processes: killed, cut off, restarted with other code, and told to end."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue.programs import servers_of
from tests.meet import running_time, wait_until
from tests.python.running import CHECKOUT
from tests.servers import OwnServer

Session = psycopg.Connection[Any]
READY = "the scheduler is at work"


class SchedulerProcess:
    """`pgqueue scheduler` in a process of its own."""

    def __init__(self, dsn: str, *args: str, path: Path | None = None, **variables: str) -> None:
        self._path = os.pathsep.join(str(part) for part in (path, CHECKOUT) if part)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "scheduler", *args],
            cwd=path or CHECKOUT,
            env={
                **os.environ,
                "PGQUEUE_DSN": dsn,
                "PGQUEUE_SWEEP_INTERVAL": "0.3",
                "PYTHONPATH": self._path,
                **variables,
            },
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> "SchedulerProcess":
        """Waits until it has begun to work."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if READY in line:
                return self
        raise AssertionError("it ended")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def stop(self, within: float = 10.0) -> int:
        """Tells it to end; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def schedulers(dsn: str, count: int = 1, *args: str, **options: Any) -> Iterator[list[SchedulerProcess]]:
    """So many processes; whoever is left is killed at the end."""
    processes = [SchedulerProcess(dsn, *args, **options) for _ in range(count)]
    try:
        yield [process.ready() for process in processes]
    finally:
        for process in processes:
            process.kill()


def hurry(connection: Session, times: int) -> None:
    """Has the database's clock go so many times faster from now on, beginning a second before a minute."""
    row = connection.execute("select clock_timestamp()::text, date_trunc('minute', clock_timestamp())::text").fetchone()
    assert row is not None
    began, minute = row
    connection.execute(
        f"""create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe as $$
              select timestamptz '{minute}' + interval '59 seconds'
                     + (pg_catalog.statement_timestamp() - timestamptz '{began}') * {times} $$"""
    )


def schedule(connection: Session, name: str = "every minute", cron: str = "* * * * *") -> None:
    connection.execute("insert into pgqueue.schedules (name, cron, job_type) values (%s, %s, 't')", [name, cron])


def ticks(connection: Session, name: str = "every minute") -> list[Any]:
    rows = connection.execute("select due_at from pgqueue.schedule_fires where schedule = %s order by 1", [name])
    return [due for (due,) in rows]


def assert_one_job_a_minute(connection: Session, minutes: int) -> None:
    fired = ticks(connection)[:minutes]
    assert len(fired) == minutes
    assert {(later - earlier).total_seconds() for earlier, later in itertools.pairwise(fired)} == {60}
    found = connection.execute(
        "select count(*), count(distinct scheduled_at) from pgqueue.jobs where producer_id = 'schedule:every minute'"
    ).fetchone()
    assert found == (len(ticks(connection)),) * 2


def kill_now_and_then(connection: Session, dsn: str, minutes: int, every: float) -> None:
    """Five schedulers; every so often one is killed and another one started, and once a session is ended."""
    rng = random.Random(minutes)
    with schedulers(dsn, 5) as running:
        schedule(connection)
        killed_at, terminated = time.monotonic(), False
        while len(ticks(connection)) < minutes:
            if time.monotonic() - killed_at > every:
                killed_at = time.monotonic()
                victim = running.pop(rng.randrange(len(running)))
                victim.kill()
                replacement = SchedulerProcess(dsn)
                running.append(replacement)
                if not terminated:
                    terminated = True
                    ended = connection.execute(
                        "select pg_terminate_backend(pid) from pg_stat_activity"
                        " where application_name = 'pgqueue sweeper' and datname = current_database() limit 1"
                    ).rowcount
                    assert ended == 1
            time.sleep(0.05)
        try:
            assert_one_job_a_minute(connection, minutes)
        finally:
            for process in running:
                process.kill()


@pytest.mark.timeout(300)
def test_one_job_a_minute_while_schedulers_are_killed(database: str, connection: Session) -> None:
    """Six minutes at ten times the speed."""
    hurry(connection, 10)
    kill_now_and_then(connection, database, minutes=6, every=4.0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_job_a_minute_for_six_real_minutes(database: str, connection: Session) -> None:
    kill_now_and_then(connection, database, minutes=6, every=20.0)


def test_a_renamed_declaration_fires_by_its_new_name_only(database: str, connection: Session, tmp_path: Path) -> None:
    hurry(connection, 20)
    schedule(connection)
    code = """
from pgqueue import App, Job
app = App()
@app.schedule("* * * * *", name="{name}")
@app.task
def t(job: Job) -> None: ...
"""
    counts: dict[str, int] = {}
    for name in ("first name", "second name"):
        (tmp_path / "declared.py").write_text(code.format(name=name))
        with schedulers(database, 1, "declared:app", path=tmp_path):
            wait_until(lambda name=name: len(ticks(connection, name)) >= 2, 60)
        counts[name] = len(ticks(connection, name))
        if name == "second name":
            assert len(ticks(connection, "first name")) == counts["first name"]
    rows = connection.execute("select name, declared_by from pgqueue.schedules order by name").fetchall()
    assert rows == [("every minute", None), ("second name", "declared")]
    assert len(ticks(connection)) >= 2


@pytest.mark.timeout(240)
def test_schedulers_live_through_a_crash_of_the_database(own_server: OwnServer) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        hurry(connection, 10)
        schedule(connection)
    with schedulers(own_server.tcp_dsn, 2) as running:
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            wait_until(lambda: ticks(connection), 60)
        own_server.kill()
        time.sleep(3)
        own_server.start()
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            before = len(ticks(connection))
            wait_until(lambda: len(ticks(connection)) >= before + 2, 60)
            found = connection.execute("select count(*), count(distinct scheduled_at) from pgqueue.jobs").fetchone()
            assert found == (len(ticks(connection)),) * 2
        assert [process.process.poll() for process in running] == [None, None]
        assert [process.stop() for process in running] == [0, 0]


def frozen(pids: Sequence[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):  # a server's helpers come and go
            os.kill(pid, number)


@pytest.mark.parametrize("fault", ["stopped", "hung"])
def test_it_ends_when_told_though_the_database_is_gone(own_server: OwnServer, fault: str) -> None:
    with schedulers(own_server.tcp_dsn) as (process,):
        with psycopg.connect(own_server.dsn, autocommit=True) as connection:
            wait_until(
                lambda: connection.execute("select from pgqueue.sweep_steps where step = 'schedules'").rowcount, 30
            )
        pids = servers_of(own_server.pgdata)
        if fault == "stopped":
            own_server.stop("immediate")
        else:
            frozen(pids, signal.SIGSTOP)
        try:
            time.sleep(1.5)
            began = running_time()
            process.stop(30)
            assert running_time() - began < 6
        finally:
            if fault == "hung":
                frozen(pids, signal.SIGCONT)
