"""What the command line reads and writes, without a database."""

import io
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import rich_click as click

from pgqueue import errors
from pgqueue.cli import failures, values
from pgqueue.cli.live import Lines, Page, Rates, Snapshot
from pgqueue.cli.load import batch, opening
from pgqueue.cli.output import Column, ago, console, duration, plain, print_fields, print_json, print_table, printable
from pgqueue.embedded import EmbeddedError

JOB = {
    "job_id": "01890000-0000-7000-8000-000000000000", "job_type": "echo", "status": "completed", "attempts": 1,
    "started_at": "2030-01-01T00:00:00+00:00", "finished_at": "2030-01-01T00:00:01.5+00:00", "result": {"a": 1},
    "error": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("90", 90), ("1.5", 1.5), ("500ms", 0.5), ("5m", 300), ("1h30m", 5400), ("7d", 604800), ("2w", 1209600)],
)
def test_spans(text: str, seconds: float) -> None:
    assert values.SPAN.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "-1", "-5m", "soon", "5 m", "inf", "nan", "1x", "m"])
def test_no_spans(text: str) -> None:
    with pytest.raises(click.BadParameter):
        values.SPAN.convert(text, None, None)


def test_instants_name_their_zone() -> None:
    assert values.INSTANT.convert("2030-01-31T09:00:00Z", None, None) == datetime(2030, 1, 31, 9, tzinfo=UTC)
    assert values.INSTANT.convert("2030-01-31T09:00+01:00", None, None) == datetime(2030, 1, 31, 8, tzinfo=UTC)
    for text, zoned in (("2030-01-31T09:00", "2030-01-31T09:00:00Z"), ("2030-01-31", "2030-01-31T00:00:00Z")):
        with pytest.raises(click.BadParameter, match=f"{text!r} has no time zone; give it one, such as {zoned} for"):
            values.INSTANT.convert(text, None, None)


def test_lists_and_priorities() -> None:
    assert values.NAMES.convert(" a, b ,", None, None) == ["a", "b"]
    assert values.PRIORITY_LIST.convert("critical,3,Normal", None, None) == [0, 3, 2]
    assert values.WEIGHTS.convert("strict", None, None) == "strict"
    assert values.WEIGHTS.convert("8,4,2,1", None, None) == [8, 4, 2, 1]
    for kind, text in (
        (values.NAMES, " , "),
        (values.PRIORITY_LIST, "4"),
        (values.WEIGHTS, "1,2"),
        (values.PRIORITY, ""),
    ):
        with pytest.raises(click.BadParameter):
            kind.convert(text, None, None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (0.0123, "12ms"),
        (3.44, "3.4s"),
        (59.9, "59s"),
        (60, "1m"),
        (310, "5m10s"),
        (7500, "2h5m"),
        (273600, "3d4h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_ages() -> None:
    assert ago(datetime.now(UTC) - timedelta(minutes=5)) == "5m ago"
    assert ago(datetime.now(UTC) + timedelta(hours=2, seconds=1)) == "in 2h"


def test_plain_values() -> None:
    assert [plain(value) for value in (None, True, "x", ["a", "b"], [], {"a": [1]}, timedelta(seconds=90))] == [
        "-", "yes", "x", "a,b", "-", '{"a": [1]}', "1m30s"
    ]  # fmt: skip


def test_characters_that_steer_terminals_are_written_as_escapes() -> None:
    assert printable("a\x1b[31m\r\x07\x9b\u202e\n\tü") == "a\\x1b[31m\\r\\x07\\x9b\\u202e\n\tü"


def test_tables_in_pipes_are_whole_and_plain(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 500
    columns: list[Column[dict[str, Any]]] = [
        Column("NAME", lambda row: row["name"], style=lambda _: "red"),
        Column("N", lambda row: row["n"], right=True),
        Column("END", lambda row: row["end"]),
    ]
    rows: list[dict[str, Any]] = [{"name": long, "n": 5, "end": "[red]"}, {"name": "y", "n": 100, "end": None}]
    print_table(columns, rows)
    heading, first, second = capsys.readouterr().out.splitlines()
    assert heading.split() == ["NAME", "N", "END"]
    assert first == f"{long}    5  [red]"
    assert second.split() == ["y", "100", "-"]
    print_table(columns, [])
    assert capsys.readouterr().out == "NAME  N  END\n"


def test_fields_align_and_keep_lines(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields({"a": 1, "long": "x\ny"})
    assert capsys.readouterr().out == "a     1\nlong  x\n      y\n"


def test_json_keeps_types(capsys: pytest.CaptureFixture[str]) -> None:
    big = 2**70
    print_json({"id": UUID(int=5), "at": datetime(2030, 1, 1, tzinfo=UTC), "n": big, "text": "ü"})
    said = capsys.readouterr().out
    assert json.loads(said) == {"id": str(UUID(int=5)), "at": "2030-01-01T00:00:00Z", "n": big, "text": "ü"}
    assert "ü" in said


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_colour_needs_a_terminal_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert console(Screen()).color_system is not None
    assert console(io.StringIO()).color_system is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert console(Screen()).color_system is None


def test_every_error_has_its_exit_code() -> None:
    codes: dict[type[Exception], int] = {
        errors.ConfigError: 2, errors.InvalidJob: 2, errors.InvalidPayload: 2, errors.UnknownTask: 2,
        errors.JobNotFound: 3, errors.WrongState: 4, errors.DuplicateJob: 4, errors.DatabaseConflict: 4,
        errors.SchemaOutdated: 5, errors.NotFinished: 6, errors.DatabaseUnavailable: 7, EmbeddedError: 7,
        errors.QueueFull: 1, errors.AccessDenied: 1, errors.DatabaseError: 1, errors.JobFailed: 1, ValueError: 1,
    }  # fmt: skip
    assert {kind: failures.exit_code(kind("x")) for kind in codes} == codes


# the demo's views -----------------------------------------------------------------------------------------------------


def snapshot(completed: int, retried: int = 0, dead: int = 0, **more: Any) -> Snapshot:
    return Snapshot({"completed": completed, "pending": 2, "dead_letter": dead}, retried, **more)


def test_rates_look_back_a_few_seconds() -> None:
    rates = Rates()
    assert rates.add(0.0, snapshot(0)) == (0, 0)
    assert rates.add(2.0, snapshot(20)) == (10, 10)
    for second in range(3, 20):
        enqueued, ended = rates.add(float(second), snapshot(20))
    assert (enqueued, ended) == (0, 0)


def test_lines_come_on_change_and_the_first_of_each_kind_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    retried = {**JOB, "attempts": 2}
    dead = {**JOB, "status": "dead_letter", "error": "E: \x1b no"}
    for _ in range(3):
        lines.show(snapshot(1, ended=(JOB,)))
    lines.show(snapshot(2, retried=1, dead=1, ended=(dead, retried, JOB)))
    lines.say("draining")
    lines.say("draining")
    lines.end()
    said = [line[10:] for line in capsys.readouterr().out.splitlines()]
    assert [line.split(":")[0].split("  ")[0] for line in said] == [
        "completed", "submitted 0", "retried", "dead letter", "submitted 0", "seen so far", "draining", "ended"
    ]  # fmt: skip
    assert said[-1] == "ended: 2 completed, of these 1 after retries; 1 dead letters; 2 still to do"
    assert "\x1b" not in "".join(said)


@pytest.mark.parametrize("height", [24, 40, 80])
def test_the_page_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, height: int) -> None:
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", str(height))
    hostile = {**JOB, "job_type": "\x1b[31m[b]", "result": {"a": "y" * 500}}
    retry = {**JOB, "status": "failed", "due_at": "2030-01-01T00:00:00+00:00", "max_retries": 3, "error": "E: no\nway"}
    worker = {"name": "w", "status": "idle", "jobs_processed": 5, "jobs_failed": 1, "concurrency": 10,
              "last_heartbeat": "2030-01-01T00:00:00+00:00"}  # fmt: skip
    with Page("pgqueue", "hint") as page:
        page.show(snapshot(5, 1, 1, ended=(hostile,) * 30, retries=(retry,) * 30, workers=(worker,) * 9))
        picture = screen.getvalue()
        page.end()
    assert len(picture.splitlines()) <= height
    assert "Last ended" in picture
    assert "\\x1b[31m[b]" in picture
    assert "\x1b[31m" not in picture
    assert "Ended: 5 completed" in screen.getvalue()


def test_the_demo_has_every_kind_at_once_and_about_the_rate() -> None:
    kinds = {entry["job_type"] for entry in opening()}
    assert kinds == {"echo", "noop", "sleep", "flaky", "fail"}
    assert any("delay" in entry for entry in opening())
    assert any(entry.get("payload", {}).get("retryable") is False for entry in opening())
    arrived = batch(1000, 10)
    assert 9000 < len(arrived) < 11000
    assert {entry.get("priority") for entry in arrived} >= {"critical", "high", "normal", "low"}
