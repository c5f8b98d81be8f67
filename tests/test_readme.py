"""Runs what README.md says, as a newcomer would: in a copy of the checkout, with a virtual environment of its own."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

import click
import psutil
import psycopg
import pytest

from pgqueue import Settings, schema
from pgqueue.cli import codes, root
from tests.servers import OwnServer

CHECKOUT = Path(__file__).parents[1]
README = (CHECKOUT / "README.md").read_text()
NOT_COPIED = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")

# One process makes the environment and uses it; a cold cache of packages takes its time.
pytestmark = [pytest.mark.xdist_group("readme"), pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and text."""

    language: str
    text: str


BLOCKS = [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]
SHELL = [block.text for block in BLOCKS if block.language == "sh"]
DEMO, TESTS = SHELL[:2]
INSTALL, REMOVE = SHELL[-2:]


@dataclass
class Place:
    """A copy of the checkout, and the environment of commands in it."""

    path: Path
    env: dict[str, str]

    def run(self, command: str, **env: str) -> str:
        """Run a block to its end and return its stdout; its stderr is this test's."""
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command], cwd=self.path, env={**self.env, **env},
            stdout=subprocess.PIPE, text=True, check=False, timeout=800,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    @contextmanager
    def running(self, command: str) -> Iterator["Running"]:
        """Run a block in the background; the pgqueue that it started is interrupted at the end, and must drain."""
        output = self.path / f"output-{time.monotonic_ns()}"
        with output.open("w") as file:
            shell = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command], cwd=self.path, env=self.env,
                stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
        started = Running(shell, output)
        try:
            yield started
            started.interrupt()
            assert shell.wait(60) == 0, started.said()
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()


@dataclass
class Running:
    """A block at work."""

    shell: subprocess.Popen[bytes]
    output: Path

    def said(self) -> str:
        """Return what it printed so far."""
        return self.output.read_text()

    def until(self, met: Callable[[str], object], seconds: float) -> None:
        """Wait until what it printed meets a condition."""
        deadline = time.monotonic() + seconds
        while not met(self.said()):
            assert self.shell.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Do what Ctrl-C does to the pgqueue that runs."""
        family = [psutil.Process(self.shell.pid), *psutil.Process(self.shell.pid).children(recursive=True)]
        (pgqueue,) = [process for process in family if ".venv/bin/pgqueue" in " ".join(process.cmdline()[:2])]
        pgqueue.send_signal(signal.SIGINT)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A copy of the checkout in which the README's first command has been run."""
    home = tmp_path_factory.mktemp("readme")
    clone = home / "clone"
    shutil.copytree(CHECKOUT, clone, ignore=shutil.ignore_patterns(*NOT_COPIED))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PGQUEUE_", "PYTEST_", "PYTHON"))}
    return Place(clone, env | {"XDG_DATA_HOME": str(home / "data")})


def test_the_first_command_shows_completed_retried_and_dead_lettered_jobs(place: Place) -> None:
    with place.running(DEMO) as demo:
        demo.until(lambda said: "seen so far: " in said, 600)
        assert re.search(
            r"seen so far: [1-9]\d* completed, of these [1-9]\d* after retries; [1-9]\d* dead", demo.said()
        )
    assert "ended: " in demo.said()
    assert "Traceback" not in demo.said()
    (data,) = (Path(place.env["XDG_DATA_HOME"]) / "pgqueue").iterdir()
    assert re.fullmatch(r"pg\d\d", data.name)


def test_the_second_command_runs_the_tests(place: Place) -> None:
    # The whole suite would run this test again; some tests on a database, and the import of all, show that it can.
    assert re.search(r"[1-9]\d* passed", place.run(TESTS, PYTEST_ADDOPTS="-q tests/doors"))
    assert "error" not in place.run(".venv/bin/pytest --collect-only -q").splitlines()[-1]


def test_one_job_goes_through_every_door(place: Place) -> None:
    if not (place.path / ".venv").exists():
        place.run(DEMO.replace(" && .venv/bin/pgqueue up --demo", ""))
    said = ""
    first, beyond = (BLOCKS.index(Block("sh", text)) for text in (SHELL[2], INSTALL))
    starting, following = BLOCKS[first:beyond], [""]
    with place.running(starting.pop(0).text) as up:
        up.until(lambda said: "Ctrl-C" in said, 60)
        (port,) = re.findall(r"API is at http://127.0.0.1:(\d+)", up.said())
        for block in starting:
            match block:
                case Block("sh", text) if " worker " in text:
                    following.append(text)
                case Block("sh", text):
                    # Where 8080 was taken it is another.
                    said += place.run(text.replace(":8080", f":{port}"))
                case Block("python", text) if text.startswith("# tasks.py"):
                    (place.path / "tasks.py").write_text(text)
                case Block("python", text):
                    (place.path / "script.py").write_text(text)
                    said += place.run(".venv/bin/python script.py")
        for door in (
            '"hello": "command line"',
            '"hello": "REST"',
            '"hello": "INSERT"',
            '"hello": "SQL"',
            "'hello': 'Python'",
        ):
            assert door in said
        resize = said.split()[-1]
        with place.running(following.pop()) as worker:
            result = place.run(f".venv/bin/pgqueue jobs wait {resize} --timeout 30")
            worker.until(lambda said: "started" in said, 30)
    assert '"path": "cat.png"' in result


def test_what_is_installed_and_upgraded_can_be_removed(place: Place, own_server: OwnServer) -> None:
    if not (place.path / ".venv").exists():
        place.run(DEMO.replace(" && .venv/bin/pgqueue up --demo", ""))
    traces = (
        "select nspname::text from pg_namespace where nspname like 'pgqueue%'"
        " union all select rolname from pg_roles where rolname like 'pgqueue\\_%' order by 1"
    )
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        assert len(connection.execute(traces).fetchall()) == 5
        for _ in range(2):
            place.run(REMOVE, PGQUEUE_DSN=own_server.dsn)
            assert connection.execute(traces).fetchall() == []
            # For the first time, and with nothing to do.
            for _ in range(2):
                place.run(INSTALL, PGQUEUE_DSN=own_server.dsn)
                assert len(connection.execute(traces).fetchall()) == 5
        assert place.run(".venv/bin/pgqueue schema version", PGQUEUE_DSN=own_server.dsn) == f"{schema.head()}\n"


def test_the_settings_are_true() -> None:
    rows = re.findall(r"^\| `(PGQUEUE_\w+)` \| ([^|]*) \|", README, re.MULTILINE)
    known = {f"PGQUEUE_{field.name.upper()}": field.default for field in fields(Settings)}
    assert len(rows) >= 8
    for name, default in rows:
        if name == "PGQUEUE_PG_BINDIR":
            continue
        assert name in known
        if default.strip("` ").isdigit():
            assert float(default) == known[name]


def test_the_commands_and_exit_codes_are_true() -> None:
    table = README.partition("## Commands")[2].partition("## Settings")[0]
    commands = set(root.list_commands(click.Context(root)))
    assert commands <= {row.split()[0] for row in re.findall(r"`([^`]+)`", table)}
    assert set(re.findall(r"^\| `(\w+)", table, re.MULTILINE)) <= commands
    said = dict(re.findall(r"(\d+) (\w+)", table.partition("Exit codes:")[2]))
    assert {int(code) for code in said} == {value for name, value in vars(codes).items() if name.isupper()}
