"""`pgqueue schedules` and `pgqueue scheduler`: what they print, where, and the exit code."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result

from pgqueue.cli import root

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


def offline(*args: str) -> Result:
    """Runs a command that needs no database."""
    return CliRunner().invoke(root, args, env={"PGQUEUE_DSN": "host=/nowhere"})


@pytest.mark.parametrize(("args", "expected"), [
    (["0 0 13 * 5", "--from", "2026-11-29", "-n", "3"],
     ["2026-12-04T00:00:00Z", "2026-12-11T00:00:00Z", "2026-12-13T00:00:00Z"]),
    (["0 9 29 2 *", "--from", "2026-11-29", "-n", "1"], ["2028-02-29T09:00:00Z"]),
    (["30 2 * * *", "--timezone", "America/New_York", "--from", "2026-03-08T00:00:00Z", "-n", "2"],
     ["2026-03-08T07:00:00Z", "2026-03-09T06:30:00Z"]),
    (["30 1 * * *", "--timezone", "America/New_York", "--from", "2026-11-01T00:00:00-04:00", "-n", "2"],
     ["2026-11-01T05:30:00Z", "2026-11-02T06:30:00Z"]),
    (["@hourly", "--from", "2026-11-29T10:59:59.9+01:00", "-n", "1"], ["2026-11-29T10:00:00Z"]),
])  # fmt: skip
def test_preview_prints_instants_in_utc(args: list[str], expected: list[str]) -> None:
    result = offline("schedules", "preview", *args)
    assert (result.exit_code, result.stdout.splitlines()) == (0, expected)
    assert result.stderr.strip().endswith(")")


def test_preview_begins_now_and_shows_five() -> None:
    assert len(offline("schedules", "preview", "* * * * *").stdout.splitlines()) == 5


def test_preview_as_json_has_words_and_zone_time() -> None:
    args = ["0 9 * * mon-fri", "--timezone", "Europe/Berlin", "--from", "2026-11-29", "-n", "1"]
    assert json.loads(offline("schedules", "preview", "--json", *args).stdout) == {
        "cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin",
        "words": "at 09:00 on Monday to Friday (Europe/Berlin)",
        "fires": ["2026-11-30T08:00:00Z"], "local": ["2026-11-30T09:00:00+01:00"],
    }  # fmt: skip


def test_preview_on_a_terminal_shows_zone_time() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pgqueue", "schedules", "preview", "0 9 * * *", "--timezone", "Europe/Berlin"]
    with subprocess.Popen([*command, "--from", "2026-11-29", "-n", "1"], stdout=theirs, stderr=theirs) as process:
        process.wait(30)
        os.close(theirs)
        shown = os.read(ours, 10_000).decode()
        os.close(ours)
    assert "Sun 29 Nov 2026 09:00 CET" in shown
    assert "2026-11-29T08:00:00Z" in shown


@pytest.mark.parametrize("args", [
    ["* * * * * *"], ["R * * * *"], ["0 0 30 2 *"], ["* * * * *", "--timezone", "Mars/Olympus"],
    ["* * * * *", "--from", "yesterday"], ["* * * * *", "-n", "0"],
])  # fmt: skip
def test_preview_refuses(args: list[str]) -> None:
    result = offline("schedules", "preview", *args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr


def test_list(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute(
        "insert into pgqueue.schedules (name, cron, timezone, job_type, queue, next_run_at, last_error)"
        " values ('daily', '0 9 * * *', 'Europe/Berlin', 'report', 'mail', now() + interval '2 hours', 'it is odd')"
    )
    connection.execute(
        "insert into pgqueue.schedules (name, cron, job_type, enabled) values ('off', '@hourly', 't', false)"
    )
    heading, daily, off = pgqueue("schedules", "list").stdout.splitlines()
    assert heading.split() == ["NAME", "CRON", "TIMEZONE", "TYPE", "QUEUE", "ENABLED", "NEXT", "LAST", "WORDS", "ERROR"]
    for word in ("daily", "0 9 * * *", "Europe/Berlin", "report", "mail", "yes", "in 1h59m", "at 09:00", "it is odd"):
        assert word in daily
    assert "no" in off.split()
    rows = json.loads(pgqueue("schedules", "list", "--json").stdout)
    assert [(row["name"], row["words"]) for row in rows] == [
        ("daily", "at 09:00 (Europe/Berlin)"), ("off", "at minute 0 of every hour (UTC)"),
    ]  # fmt: skip


def test_run_enable_and_disable(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute(
        "insert into pgqueue.schedules (name, cron, job_type, overlap) values ('s', '@daily', 't', 'skip')"
    )
    ran = pgqueue("schedules", "run", "s")
    assert ran.exit_code == 0
    job = connection.execute(
        "select status, job_type from pgqueue.jobs where job_id = %s", [ran.stdout.strip()]
    ).fetchone()
    assert job == ("pending", "t")
    again = pgqueue("schedules", "run", "s")
    assert (again.exit_code, "has not ended" in again.stderr) == (4, True)
    assert pgqueue("schedules", "disable", "s").stdout == "schedule s is disabled\n"
    assert json.loads(pgqueue("schedules", "enable", "s", "--json").stdout)["enabled"] is True
    for verb in ("run", "enable", "disable"):
        missing = pgqueue("schedules", verb, "nothing")
        assert (missing.exit_code, 'no schedule "nothing"' in missing.stderr) == (3, True)


def test_create_and_delete(pgqueue: Invoke, connection: Connection) -> None:
    args = ["daily", "0 9 * * mon-fri", "report", '{"to": "a@example.com"}', "--timezone", "Europe/Berlin"]
    options = ["--queue", "mail", "--priority", "high", "--max-retries", "0", "--timeout", "2m", "--overlap", "skip"]
    assert pgqueue("schedules", "create", *args, *options).stdout == "schedule daily is created\n"
    columns = "cron, timezone, job_type, payload, queue, priority, max_retries, timeout_ms, misfire, overlap, enabled"
    assert connection.execute(f"select {columns} from pgqueue.schedules").fetchall() == [
        ("0 9 * * mon-fri", "Europe/Berlin", "report", {"to": "a@example.com"}, "mail", 1, 0, 120_000,
         "run_once", "skip", True),
    ]  # fmt: skip
    assert json.loads(pgqueue("schedules", "create", *args, "--json").stdout) == {"schedule": "daily", "created": False}
    for wrong in (["0 0 30 2 *", "t"], ["* * * *", "t"], ["* * * * *", "t", "[1]"], ["* * * * *", "t" * 129]):
        refused = pgqueue("schedules", "create", "wrong", *wrong)
        assert (refused.exit_code, refused.stdout) == (2, "")
    assert pgqueue("schedules", "delete", "daily").stdout == "schedule daily is deleted\n"
    assert connection.execute("select from pgqueue.schedules").fetchall() == []
    assert pgqueue("schedules", "delete", "daily").exit_code == 3


def test_the_scheduler_says_what_it_does_and_needs_a_known_app(pgqueue: Invoke) -> None:
    assert "MODULE:APP" in pgqueue("scheduler", "--help").stdout
    assert pgqueue("scheduler", "no_such_module:app").exit_code == 2
