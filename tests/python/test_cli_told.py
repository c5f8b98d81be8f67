"""What commands tell of things that surprise people: keys of deleted jobs, taken ports, typing errors."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import click
import psycopg
import pytest
from click.testing import CliRunner, Result

from pgqueue import App
from pgqueue.cli import jobs, root, up

Invoke = Callable[..., Result]
Connection = psycopg.Connection[Any]


@pytest.fixture
def pgqueue(database: str) -> Invoke:
    """Runs a command on the test's database."""

    def invoke(*args: str) -> Result:
        result = CliRunner().invoke(root, args, env={"PGQUEUE_DSN": database})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_key_whose_job_was_deleted_is_told(pgqueue: Invoke, database: str, connection: Connection) -> None:
    job_id = pgqueue("enqueue", "echo", "--key", "k").stdout.strip()
    worker_id, error = str(uuid4()), '{"type": "E", "message": "m"}'
    connection.execute("select pgqueue.claim(%s, null, 1)", (worker_id,))
    connection.execute("select pgqueue.fail(%s, %s, 1, %s, false)", (worker_id, job_id, error))
    assert pgqueue("dlq", "discard", job_id).exit_code == 0
    again = pgqueue("enqueue", "echo", "--key", "k")
    assert again.exit_code == 4
    assert "its job, which has been deleted" in again.stderr
    with App(database) as app:
        answer = app.enqueue_sync("echo", idempotency_key="k")
    assert (answer.status, answer.duplicate) == (None, True)


# queues and jobs that nobody serves -----------------------------------------------------------------------------------


def test_a_pause_says_when_nothing_knows_the_queue(pgqueue: Invoke) -> None:
    typo = pgqueue("queues", "pause", "typo")
    assert (typo.exit_code, typo.stdout) == (0, "queue typo is paused\n")
    assert "queue typo has had no job so far" in typo.stderr
    assert pgqueue("queues", "pause", "typo").stderr == ""
    pgqueue("enqueue", "echo", "--queue", "mail")
    assert pgqueue("queues", "pause", "mail").stderr == ""


def test_a_queue_that_was_only_paused_is_listed_with_the_defaults(pgqueue: Invoke) -> None:
    for args in (["enqueue", "echo", "--queue", "plain"], ["queues", "pause", "mail"], ["queues", "resume", "mail"]):
        assert pgqueue(*args).exit_code == 0
    pgqueue("queues", "set", "strict", "--weights", "strict", "--hard-limit", "60000")
    rows = [line.split() for line in pgqueue("queues", "list").stdout.splitlines()[1:]]
    assert {(row[0], *row[-2:]) for row in rows} == {
        ("plain", "default", "default"), ("mail", "default", "default"), ("strict", "strict", "50000/60000"),
    }  # fmt: skip


def test_limits_of_a_queue_name_its_rate(pgqueue: Invoke) -> None:
    pgqueue("queues", "set", "lim", "--rate-per-second", "5")
    pgqueue("queues", "set", "both", "--rate-per-second", "5", "--hard-limit", "60000")
    rows = [line.split() for line in pgqueue("queues", "list").stdout.splitlines()[1:]]
    assert {row[0]: row[-1] for row in rows} == {"lim": "5/s", "both": "50000/60000,5/s"}


def test_a_pause_of_a_type_says_that_it_needs_an_end(pgqueue: Invoke) -> None:
    told = " ".join(pgqueue("jobs", "pause-type", "--help").stdout.split())
    assert "pause-type --for SPAN [OPTIONS] TYPE" in told
    assert "for as long as --for says" in told


@pytest.mark.parametrize("words", [("enqeue",), ("job", "list"), ("jobs", "lst")], ids=" ".join)
def test_a_typing_error_is_told_what_was_meant(pgqueue: Invoke, words: tuple[str, ...]) -> None:
    refused = pgqueue(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "Did you mean" in refused.stderr


def test_defaults_are_told_as_values(pgqueue: Invoke) -> None:
    assert "default: 1s)" in " ".join(pgqueue("top", "--help").stdout.split())


@pytest.mark.parametrize(
    ("given", "shown"), [("40d", "40d"), ("90", "1m30s"), ("36h", "1d12h"), ("500ms", "500ms"), ("30000d", "30000d")]
)
def test_spans_of_a_queue_are_shown_as_they_are_given(pgqueue: Invoke, given: str, shown: str) -> None:
    told = pgqueue("queues", "set", "q", "--pending-ttl", given).stdout
    assert re.search(rf"^pending_ttl +{shown}$", told, re.M), told
    assert re.search(r"^completed_ttl +30d$", told, re.M), told


def test_who_waits_for_a_job_that_nobody_runs_is_told_why(pgqueue: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "UNASKED", 0.1)
    job_id = pgqueue("enqueue", "echo", "--queue", "nobodys").stdout.strip()
    waited = pgqueue("jobs", "wait", job_id, "--timeout", "0.3")
    assert waited.exit_code == 6
    assert 'pgqueue: not yet: No worker serves queue "nobodys".' in waited.stderr
    assert "not yet" not in pgqueue("jobs", "wait", job_id, "--timeout", "0.05").stderr


# ports ----------------------------------------------------------------------------------------------------------------


def test_serve_on_a_taken_port_says_so_and_fails(database: str, taken: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pgqueue", "serve", "--port", str(taken)],
        env={**os.environ, "PGQUEUE_DSN": database}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    said = " ".join(re.findall(r"[^\s│]+", ended.stderr))
    assert f"the API cannot listen on 127.0.0.1, port {taken}: Address already in use; --port chooses another" in said
    assert "Errno" not in said


def test_up_says_that_its_usual_port_is_taken(monkeypatch: pytest.MonkeyPatch, taken: int) -> None:
    monkeypatch.setattr(up, "DEFAULT_PORT", taken)
    said: list[str] = []
    monkeypatch.setattr(up, "note", said.append)
    with up._listening("127.0.0.1", None) as listening:
        assert listening.getsockname()[1] != taken
    assert said == [f"pgqueue: port {taken} is taken: the API gets a free one (--port says which)"]
    with pytest.raises(click.ClickException, match=f"port {taken}: .*; --port chooses another"):
        up._listening("127.0.0.1", taken)
