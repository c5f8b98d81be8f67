"""`pgqueue up` and `pgqueue worker` as processes: what they show, how they end."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.programs import servers_of
from tests.faults.test_scheduler_processes import frozen
from tests.meet import running_time
from tests.python.apps import MARKS
from tests.servers import OwnServer

Connection = psycopg.Connection[Any]
COMMAND = [sys.executable, "-m", "pgqueue"]


def environment(dsn: str, **more: str) -> dict[str, str]:
    return {**os.environ, "PGQUEUE_DSN": dsn, **more}


def until(met: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


class Terminal:
    """A program on a terminal of 100 by 40; `said` is everything it wrote."""

    def __init__(self, args: list[str], env: dict[str, str]) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.said = ""
        self.process = subprocess.Popen(
            [*COMMAND, *args], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**env, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
        )  # fmt: skip
        os.close(theirs)

    def read(self) -> str:
        """Take in what there is to read."""
        while select.select([self._fd], [], [], 0.05)[0]:
            try:
                self.said += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:
                break
        return self.said

    def ended(self) -> bool:
        self.read()
        return self.process.poll() is not None

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._fd)


@contextmanager
def terminal(args: list[str], env: dict[str, str]) -> Iterator[Terminal]:
    opened = Terminal(args, env)
    try:
        yield opened
    finally:
        opened.close()


def test_the_demo_shows_all_that_can_become_of_a_job(database: str, connection: Connection) -> None:
    done = subprocess.run(
        [*COMMAND, "up", "--demo", "--seconds", "7"], env=environment(database),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line[10:] for line in done.stdout.splitlines()]
    for first in ("completed: ", "retried: ", "dead letter: ", "failed: "):
        assert sum(line.startswith(first) for line in lines) == 1
    (seen,) = [line for line in lines if line.startswith("seen so far")]
    assert re.search(r"[1-9]\d* completed, of these [1-9]\d* after retries; [1-9]\d* dead letters", seen)
    assert lines[-1].startswith("ended: ")
    # A line a second and the first of each kind: no flood.
    assert len(lines) < 25
    assert "Traceback" not in done.stderr
    assert "job failed" not in done.stderr
    counts = dict(connection.execute("select status, count(*) from pgqueue.jobs group by status").fetchall())
    assert counts["completed"] > 10
    assert counts["dead_letter"] >= 1
    assert "processing" not in counts
    priorities = connection.execute("select count(distinct priority) from pgqueue.jobs").fetchone()
    assert priorities == (4,)


def test_on_a_terminal_the_demo_is_a_page_and_ctrl_c_drains(database: str, connection: Connection) -> None:
    with terminal(["up", "--demo"], environment(database)) as screen:
        until(lambda: re.search(r"completed .*after retries", screen.read()) and "dead_letter" in screen.said)
        until(lambda: re.search(r"attempt \d: ", screen.read()))
        for heading in ("Last ended", "Next retries", "Workers", "Ctrl-C drains", "/dashboard"):
            assert heading in screen.said
        screen.process.send_signal(signal.SIGINT)
        until(screen.ended)
        assert screen.process.returncode == 0
        assert "Ended: " in screen.said
        assert "Traceback" not in screen.said
    assert connection.execute("select count(*) from pgqueue.jobs where status = 'processing'").fetchone() == (0,)


def test_a_second_ctrl_c_hurries(database: str, connection: Connection) -> None:
    connection.execute("""select pgqueue.enqueue('sleep', '{"seconds": 60}')""")
    up = subprocess.Popen([*COMMAND, "up"], env=environment(database), stderr=subprocess.PIPE, text=True)
    running = "select count(*) from pgqueue.jobs where status = 'processing'"
    until(lambda: connection.execute(running).fetchone() == (1,))
    up.send_signal(signal.SIGINT)
    draining = "select from pgqueue.workers where status = 'draining'"
    until(lambda: connection.execute(draining).rowcount == 1)
    assert up.poll() is None
    up.send_signal(signal.SIGINT)
    assert up.communicate(timeout=20)[1]
    assert up.returncode == 130
    # The attempt was stopped, not lost: the job is back in its place, uncharged.
    assert connection.execute("select status, lost from pgqueue.jobs").fetchone() == ("pending", 0)


def test_up_ends_in_time_whatever_hangs(own_server: OwnServer) -> None:
    with psycopg.connect(own_server.dsn, autocommit=True) as session:
        session.execute(MARKS)
        session.execute("""select pgqueue.enqueue('stubborn', '{"seconds": 60}')""")
        command = [*COMMAND, "up", "tests.python.apps:app", "--port", "0"]
        up = subprocess.Popen(command, env=environment(own_server.dsn, PGQUEUE_GRACE="1"))
        until(lambda: session.execute("select from public.marks").rowcount)
    servers = servers_of(own_server.pgdata)
    try:
        frozen(servers, signal.SIGSTOP)
        up.send_signal(signal.SIGTERM)
        began = running_time()
        up.wait(30)
        assert running_time() - began < 1 + 5
    finally:
        up.kill()
        up.wait()
        frozen(servers, signal.SIGCONT)


def test_up_migrates_and_needs_no_demo(database: str, connection: Connection) -> None:
    connection.execute("set client_min_messages = error; drop schema pgqueue cascade")
    up = subprocess.Popen(
        [*COMMAND, "up", "--seconds", "4"], env=environment(database), stdout=subprocess.PIPE, text=True
    )
    until(lambda: connection.execute("select to_regclass('pgqueue.workers') is not null").fetchone() == (True,))
    until(lambda: connection.execute("select count(*) from pgqueue.workers").fetchone() == (1,))
    connection.execute("""insert into pgqueue.jobs (job_type, payload) values ('echo', '{"a": 1}')""")
    assert up.communicate(timeout=30)[0] == ""
    assert up.returncode == 0
    assert connection.execute("select status, result from pgqueue.jobs").fetchone() == ("completed", {"a": 1})


def test_up_serves_the_api_until_the_worker_has_drained(database: str) -> None:
    # Not 8080: another test's `up` may take it as soon as this one has ended.
    command = [*COMMAND, "up", "--port", "0"]
    up = subprocess.Popen(command, env=environment(database), stderr=subprocess.PIPE, text=True)
    assert up.stderr is not None
    told = r"the API is at (http://127\.0\.0\.1:\d+), its document at /schema, the dashboard at /dashboard$"
    url = next(found[1] for line in up.stderr if (found := re.search(told, line)))
    assert "Overview" in httpx.get(f"{url}/dashboard").raise_for_status().text
    job = httpx.post(f"{url}/jobs", json={"type": "echo", "payload": {"a": 1}}).raise_for_status().json()
    done = httpx.get(f"{url}/jobs/{job['job_id']}/result?wait=20", timeout=30).raise_for_status().json()
    assert done["result"] == {"a": 1}
    up.send_signal(signal.SIGTERM)
    up.communicate(timeout=30)
    assert up.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_port_that_is_taken_is_refused_when_asked_for(database: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "up", "--port", port], env=environment(database), capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert port in done.stderr
        command = [*COMMAND, "up", "--port", port, "--no-serve", "--seconds", "0.5"]
        subprocess.run(command, env=environment(database), check=True)


def test_without_a_dsn_all_commands_share_the_embedded_server(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "PGQUEUE_DSN"}
    env["PGQUEUE_DATA_DIR"] = str(tmp_path / "data")

    def pgqueue(*args: str) -> str:
        return subprocess.run([*COMMAND, *args], env=env, capture_output=True, text=True, check=True).stdout

    # Nothing runs yet: the command makes the database, uses it and stops it.
    early = pgqueue("enqueue", "echo", '{"n": 1}').strip()
    assert json.loads(pgqueue("jobs", "show", early, "--json"))["status"] == "pending"
    up = subprocess.Popen([*COMMAND, "up"], env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert json.loads(pgqueue("jobs", "wait", early, "--timeout", "30")) == {"n": 1}
        late = pgqueue("enqueue", "echo", '{"n": 2}').strip()
        assert json.loads(pgqueue("jobs", "wait", late, "--timeout", "30")) == {"n": 2}
        assert pgqueue("psql", "-XAtc", "select count(*) from jobs").strip() == "2"
    finally:
        up.send_signal(signal.SIGTERM)
        said = up.communicate(timeout=30)[1]
    assert up.returncode == 0
    assert str(tmp_path / "data") in said
    assert not (tmp_path / "data" / "pgdata" / "postmaster.pid").exists()


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A directory with an app of its own in tasks.py."""
    (tmp_path / "tasks.py").write_text(
        "from pgqueue import App, Job\n\napp = App()\n\n\n"
        "@app.task\ndef shout(job: Job, word: str) -> str:\n    return word.upper()\n"
    )
    return tmp_path


def test_a_worker_finds_the_app_in_the_working_directory(database: str, connection: Connection, tasks: Path) -> None:
    connection.execute("""select pgqueue.enqueue('shout', '{"word": "hey"}', queue => 'a')""")
    connection.execute("""select pgqueue.enqueue('shout', '{"word": "no"}', queue => 'b')""")
    worker = subprocess.Popen(
        [*COMMAND, "worker", "tasks:app", "--dsn", database, "--queues", "a", "--name", "w1", "--group", "g",
         "--priorities", "high,2", "--concurrency", "3"],
        cwd=tasks, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until(lambda: connection.execute("select result from pgqueue.job_results").fetchone() == ("HEY",))
    row = connection.execute("select name, group_name, queues, priorities, concurrency from pgqueue.workers").fetchone()
    assert row == ("w1", "g", ["a"], [1, 2], 3)
    worker.send_signal(signal.SIGTERM)
    assert worker.communicate(timeout=30)[1]
    assert worker.returncode == 0
    assert connection.execute("select status from pgqueue.jobs where queue = 'b'").fetchone() == ("pending",)


def test_several_processes_are_kept_running_and_end_together(database: str, connection: Connection) -> None:
    supervisor = subprocess.Popen(
        [*COMMAND, "worker", "pgqueue.demo:app", "--processes", "2", "--name", "w"],
        env=environment(database), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def alive() -> dict[str, int]:
        rows = connection.execute("select name, pid from pgqueue.workers where status <> 'stopped'").fetchall()
        return {name: pid for name, pid in rows if Path(f"/proc/{pid}").exists()}

    until(lambda: alive().keys() == {"w-0", "w-1"})
    before = alive()
    os.kill(before["w-0"], signal.SIGKILL)
    until(lambda: (now := alive()).keys() == before.keys() and now["w-0"] != before["w-0"])
    assert alive()["w-1"] == before["w-1"]
    supervisor.send_signal(signal.SIGTERM)
    said = supervisor.communicate(timeout=30)[1]
    assert supervisor.returncode == 0
    assert "starting another" in said
    assert not alive()
