"""What commands print: tables for people, JSON for programs. Data goes to stdout, everything else to stderr."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, Generic, NamedTuple, TextIO, TypeVar

import rich_click as click
from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

STATUSES: Final = ("submitted", "pending", "processing", "completed", "failed", "dead_letter", "cancelled")

_STYLES: Final = {
    "submitted": "blue",
    "pending": "cyan",
    "processing": "bold yellow",
    "completed": "green",
    "failed": "magenta",
    "dead_letter": "bold red",
    "cancelled": "dim",
}
# Pipes get every character of a cell; only a terminal has an edge to fit in.
_UNBOUNDED: Final = 100_000


class Column(NamedTuple, Generic[T]):
    """A table's column: heading, and what to show of an item. `style` colours the cell, `right` aligns numbers."""

    heading: str
    value: Callable[[T], object]
    style: Callable[[T], str] | None = None
    right: bool = False
    fold: bool = False


def console(stream: TextIO | None = None) -> Console:
    """Return a console for `stream` (None: stdout) with colour only on a terminal without NO_COLOR."""
    stream = stream if stream is not None else sys.stdout
    terminal = stream.isatty()
    return Console(
        file=stream,
        width=None if terminal else _UNBOUNDED,
        color_system="auto" if terminal and not os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not terminal,
    )


def status_style(status: str) -> str:
    """Return the style in which a job status is shown."""
    return _STYLES.get(status, "")


def print_table(columns: Sequence[Column[T]], items: Iterable[T]) -> None:
    """Print items as aligned columns on stdout; only the headings without any item."""
    out = console()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(
            column.heading,
            justify="right" if column.right else "left",
            no_wrap=not column.fold,
            overflow="fold" if column.fold else "ellipsis",
        )
    for item in items:
        table.add_row(*(text(column.value(item), column.style(item) if column.style else "") for column in columns))
    if out.is_terminal:
        out.print(table)
        return
    with out.capture() as captured:
        out.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def print_fields(fields: Mapping[str, object]) -> None:
    """Print names and values as two aligned columns; further lines of a value stand below its first."""
    width = max(map(len, fields), default=0)
    for name, value in fields.items():
        lines = printable(plain(value)).splitlines() or [""]
        click.echo(f"{name:<{width}}  " + f"\n{' ' * (width + 2)}".join(lines))


def print_json(value: object) -> None:
    """Print a value as JSON on stdout, indented."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def note(message: str) -> None:
    """Tell the person at the terminal something that is no data: on stderr."""
    click.echo(printable(message), err=True)


def text(value: object, style: str = "") -> Text:
    """Return any value as text for a cell: None as a dash, times as ages, JSON compact."""
    return Text(printable(plain(value)), style=style)


def plain(value: object) -> str:
    """Return a value in one line, as people read it."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case datetime():
            return ago(value)
        case timedelta():
            return duration(value.total_seconds())
        case list() | tuple() if all(isinstance(item, str) for item in value):
            return ",".join(value) or "-"
        case dict() | list() | tuple():
            return json.dumps(value, default=str, ensure_ascii=False)
        case _:
            return str(value)


def printable(message: str) -> str:
    """Return text in which characters that steer a terminal are written as escapes; line ends and tabs stay."""
    return "".join(
        character if character in "\n\t" or character.isprintable() else ascii(character)[1:-1] for character in message
    )


def duration(seconds: float) -> str:
    """Return a span of time, in seconds, with its two most telling digits or units: 12ms, 3.4s, 5m10s, 2h5m, 3d4h."""
    seconds = abs(seconds)
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = int(seconds)
    for unit, size, lower, small in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"


def ago(moment: datetime) -> str:
    """Return how far a moment is from now: `5s ago`, or `in 5s`."""
    distance = (datetime.now(UTC) - moment).total_seconds()
    return f"{duration(distance)} ago" if distance >= 0 else f"in {duration(distance)}"


def instant(moment: datetime) -> str:
    """Return a moment as RFC 3339 in UTC, as JSON prints it too."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def parse_instant(text: str | None) -> datetime | None:
    """Return the moment that the database's JSON names, None for none."""
    return None if text is None else datetime.fromisoformat(text)


def priority_name(priority: int) -> str:
    """Return the name of a priority's number."""
    from pgqueue.job import PRIORITIES

    return PRIORITIES[priority] if 0 <= priority < len(PRIORITIES) else str(priority)
