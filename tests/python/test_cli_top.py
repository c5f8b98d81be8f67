"""`pgqueue top` on a real terminal: what it shows, and what its keys do."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner

from pgqueue.cli import root
from tests.meet import wait_until

Connection = psycopg.Connection[Any]
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]")


def _without_size() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}


class Terminal:
    """A command on a terminal; `screen` is its last whole picture."""

    def __init__(self, *command: str, columns: int = 130, lines: int = 40, **variables: str) -> None:
        self._fd, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", *command],
            env={**_without_size(), "TERM": "xterm-256color", **variables},
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
        )
        os.close(inner)
        self._raw = b""

    def read(self, seconds: float = 0.1) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and select.select([self._fd], [], [], left)[0]:
            try:
                self._raw += os.read(self._fd, 65536)
            except OSError:
                return

    @property
    def screen(self) -> str:
        # Each picture begins with the cursor at home.
        last = self._raw.split(b"\x1b[H")[-2:]
        return "\n".join(_ESCAPES.sub(b"", part).decode(errors="replace") for part in last)

    def shows(self, *words: str, within: float = 20.0) -> str:
        """Waits until the screen has all the words."""

        def seen() -> bool:
            self.read()
            return all(word in self.screen for word in words)

        try:
            wait_until(seen, within)
        except AssertionError:
            raise AssertionError(f"{words} do not all stand in:\n{self.screen}") from None
        return self.screen

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._fd)


@pytest.fixture
def terminal(database: str) -> Iterator[Terminal]:
    made = Terminal("top", "--every", "0.2s", PGQUEUE_DSN=database)
    yield made
    made.close()


def status(connection: Connection, job_id: object) -> str:
    row = connection.execute("select status from pgqueue.jobs where job_id = %s", (job_id,)).fetchone()
    return row[0] if row else "gone"


def add(connection: Connection, job_type: str, queue: str = "default") -> Any:
    row = connection.execute(
        "insert into pgqueue.jobs (job_type, queue) values (%s, %s) returning job_id", (job_type, queue)
    ).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.parametrize(("jobs", "told"), [(50, "failed (50)"), (51, "failed (51+)")])
def test_it_says_when_there_may_be_more(database: str, connection: Connection, jobs: int, told: str) -> None:
    worker = uuid4()
    connection.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, %s)", (jobs,))
    connection.execute(
        """select pgqueue.fail(%s, c.job_id, 1, '{"type": "E", "message": "broken"}', false)
             from pgqueue.claim(%s, '{default}', %s) c""",
        (worker, worker, jobs),
    )
    done = CliRunner().invoke(root, ["top", "--once"], env={"PGQUEUE_DSN": database})
    assert done.exit_code == 0, done.output
    assert told in done.output


def test_it_shows_and_acts(terminal: Terminal, connection: Connection) -> None:
    worker = uuid4()
    connection.execute(
        "select pgqueue.worker_started(%s, 'night shift', 'host', 1, null, '{default}', '{t}', null, 7, '1')", (worker,)
    )
    waiting, dead = add(connection, "waiting", "mail"), add(connection, "hopeless")
    connection.execute("select pgqueue.claim(%s, '{default}', 1)", (worker,))
    connection.execute(
        """select pgqueue.fail(%s, %s, 1, '{"type": "E", "message": "broken"}', false)""", (worker, dead)
    )
    running = add(connection, "busy")
    connection.execute("select pgqueue.claim(%s, '{default}', 1)", (worker,))
    connection.execute("select pgqueue.sweep()")

    terminal.shows("queues (2)", "night shift", "busy", "hopeless", "E: broken", "1 pending", "q quit")
    # mail is the second queue.
    terminal.press("jp")
    terminal.shows("mail: paused")
    assert connection.execute("select name from pgqueue.queues where paused").fetchall() == [("mail",)]
    terminal.press("p")
    terminal.shows("mail: resumed")

    terminal.press("\t\tc")
    terminal.shows(f"cancel busy {running}? y/n")
    terminal.press("n")
    terminal.shows("nothing was done")
    terminal.press("cy")
    terminal.shows(f"{running}: cancel requested")
    assert connection.execute(
        "select cancel_requested_at is not null from pgqueue.jobs where job_id = %s", (running,)
    ).fetchone() == (True,)

    terminal.press("\t")
    terminal.press("r")
    terminal.shows(f"{dead} is pending")
    assert status(connection, dead) == "pending"
    terminal.press("r")
    assert status(connection, waiting) == "pending"
    terminal.press("q")
    assert terminal.process.wait(10) == 0


def test_text_that_steers_terminals_is_shown_as_text(terminal: Terminal, connection: Connection) -> None:
    add(connection, "t", "\x1b[2J\x07evil")
    terminal.shows("\\x1b[2J\\x07evil")
    terminal.press("\x1b")
    assert terminal.process.wait(10) == 0


def test_a_thousand_queues_fit(terminal: Terminal, connection: Connection) -> None:
    connection.execute(
        "insert into pgqueue.jobs (job_type, queue) select 't', 'queue-' || n from generate_series(1, 200) n"
    )
    terminal.shows("queues (200)", "workers (0)", "failed (0)", "q quit")


def test_numbers_are_whole_on_a_narrow_terminal(database: str, connection: Connection) -> None:
    connection.execute(
        "insert into pgqueue.jobs (job_type, queue) select 't', repeat('long', 15) from generate_series(1, 12345)"
    )
    connection.execute("select pgqueue.sweep()")
    terminal = Terminal("top", columns=80, lines=24, PGQUEUE_DSN=database)
    try:
        screen = terminal.shows("12,345", "longlong", "q quit")
        assert "PENDING RUNNING DELAYED FAILED OLDEST" in screen
    finally:
        terminal.close()


def test_without_a_terminal_it_is_a_picture(database: str, connection: Connection) -> None:
    add(connection, "t")
    environment = {"PGQUEUE_DSN": database}
    said = CliRunner().invoke(root, ["top"], env=environment)
    assert said.exit_code == 0
    assert "queues (1)" in said.stdout
    assert all(len(line) < 200 for line in said.stdout.splitlines())
    seen = json.loads(CliRunner().invoke(root, ["top", "--json"], env=environment).stdout)
    assert seen["queues"][0]["pending"] == 1
