"""`pgqueue top`: queues, rates, workers, running and failed jobs, live; and keys to pause, retry and cancel."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import console, duration, parse_instant, print_json, printable, status_style
from pgqueue.cli.values import SPAN

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pgqueue.client import Client
    from pgqueue.connections import SyncConnection

Row = Mapping[str, Any]
PANES: Final = ("queues", "workers", "running", "failed")
_HELP: Final = "q quit · tab pane · ↑↓ select · p pause or resume · r retry · c cancel"
_MOST: Final = 50
_CUT: Final = ("running", "failed")
_COUNTS: Final = ("pending", "processing", "submitted", "failed")


@click.command()
@click.option("--every", type=SPAN, default=1.0, help="Time between two looks (default: 1s).")
@click.option("--once", is_flag=True, help="Print one picture and end, as without a terminal.")
@door_options
@pass_door
def top(door: Door, /, every: float, once: bool) -> None:
    """Watch the queue live. Keys: tab and arrows select, p pauses or resumes a queue, r retries, c cancels, q quits."""
    from pgqueue import calling, calls_watch

    with door.client() as client, door.connection() as connection:

        def look() -> Row:
            return calling.run(connection, calls_watch.TOP, limit=_MOST + 1)

        if door.as_json:
            print_json(look())
        elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            out = console()
            with out.capture() as captured:
                out.print(render(State(look()), 0))
            for line in captured.get().splitlines():
                click.echo(line.rstrip())
        else:
            _run(client, connection, look, max(every, 0.1))


@dataclass
class State:
    """What is shown: the last look, which row of which pane is selected, and what was said last."""

    seen: Row
    pane: str = "queues"
    rows: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PANES, 0))
    message: str = ""
    #: What y does: a question was asked.
    pending: Callable[[], str] | None = None

    def items(self, pane: str) -> list[Row]:
        """Return the rows of a pane."""
        return queues(self.seen) if pane == "queues" else list(self.seen[pane])

    @property
    def selected(self) -> Row | None:
        """The selected row of the present pane, None in an empty one."""
        items = self.items(self.pane)
        if not items:
            return None
        return items[min(self.rows[self.pane], len(items) - 1)]

    def move(self, by: int) -> None:
        """Select another row."""
        most = max(len(self.items(self.pane)) - 1, 0)
        self.rows[self.pane] = min(max(min(self.rows[self.pane], most) + by, 0), most)


def queues(seen: Row) -> list[Row]:
    """Return a row per queue from those per queue and priority; paused ones are there without a job."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(
        lambda: {**dict.fromkeys(_COUNTS, 0), "in": 0.0, "out": 0.0, "bad": 0.0, "age": None}
    )
    for row in seen["queues"]:
        queue = found[row["queue"]]
        for name in _COUNTS:
            queue[name] += row[name]
        queue["in"] += row["submitted_per_second"]
        queue["out"] += row["processed_per_second"]
        queue["bad"] += row["failed_per_second"]
        ages = [age for age in (queue["age"], row["oldest_pending_seconds"]) if age is not None]
        queue["age"] = max(ages, default=None)
    for name in seen["paused"]:
        found[name]["paused"] = True
    return [{"queue": name, "paused": False, **found[name]} for name in sorted(found)]


def press(state: State, key: str, client: Client) -> bool:
    """Do what a key asks for; False ends."""
    if state.pending is not None:
        pending, state.pending = state.pending, None
        state.message = _done(pending) if key == "y" else "nothing was done"
        return True
    match key:
        case "q" | "escape":
            return False
        case "tab" | "back-tab":
            step = 1 if key == "tab" else -1
            state.pane = PANES[(PANES.index(state.pane) + step) % len(PANES)]
        case "down" | "j":
            state.move(1)
        case "up" | "k":
            state.move(-1)
        case "page-down":
            state.move(10)
        case "page-up":
            state.move(-10)
        case "p" | "r" | "c":
            _act(state, key, client)
        case _:
            pass
    return True


def _act(state: State, key: str, client: Client) -> None:
    row = state.selected
    match key, state.pane:
        case "p", "queues" if row is not None:
            verb = client.resume_sync if row["paused"] else client.pause_sync
            state.message = _done(lambda: f"{row['queue']}: {_paused(row['paused'], verb(row['queue']))}")
        case "r", "failed" if row is not None:
            state.message = _done(lambda: f"{row['job_id']} is {client.retry_sync(row['job_id']).status}")
        case "c", "running" | "failed" if row is not None:
            state.message = f"cancel {row['job_type']} {row['job_id']}? y/n"
            state.pending = lambda: f"{row['job_id']}: {client.cancel_sync(row['job_id']).replace('_', ' ')}"
        case "p", _:
            state.message = "p pauses the queue that is selected: press tab until queues is marked"
        case "r", _:
            state.message = "r retries the job that is selected: press tab until failed is marked"
        case _:
            state.message = "c cancels the job that is selected: press tab until running or failed is marked"


def _paused(was: bool, changed: bool) -> str:
    if not changed:
        return "no change"
    return "resumed" if was else "paused"


def _done(act: Callable[[], str]) -> str:
    from pgqueue.errors import PgqueueError

    try:
        return act()
    except PgqueueError as exc:
        return str(exc)


def _run(client: Client, connection: SyncConnection, look: Callable[[], Row], every: float) -> None:
    from rich.live import Live

    from pgqueue.cli.screen import keyboard

    state = State(look())
    out = console()
    with keyboard() as keys, Live(console=out, screen=True, auto_refresh=False) as live:
        looked_at = time.monotonic()
        while True:
            live.update(render(state, out.height), refresh=True)
            key = keys.read(looked_at + every - time.monotonic())
            if key is not None and not press(state, key, client):
                return
            if key is None or key in "pry":
                state.seen = look()
                looked_at = time.monotonic()


# Drawing --------------------------------------------------------------------------------------------------------------


def render(state: State, height: int) -> RenderableType:
    """Return the page for a terminal of so many lines; 0: as many as it takes."""
    from rich.console import Group
    from rich.text import Text

    now = parse_instant(state.seen["at"])
    assert now is not None
    parts: list[RenderableType] = [_heading(state.seen)]
    parts += [
        Text(f"{alert['severity']}: {printable(alert['summary'])}", style="red" if alert["severity"] == "page" else "")
        for alert in state.seen["alerts"][:3]
    ]
    # Heading, alerts, a title with headings for each pane, blank lines, message and help.
    fixed = 2 + min(len(state.seen["alerts"]), 3) + 3 * len(PANES) + 2
    room = _rooms([len(state.items(pane)) for pane in PANES], height - fixed) if height else [_MOST] * len(PANES)
    for pane, lines in zip(PANES, room, strict=True):
        parts += [Text(), *_pane(state, pane, lines, now)]
    parts += [Text(), Text(printable(state.message), style="bold yellow")]
    if height:
        parts.append(Text(_HELP, style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _rooms(wanted: Sequence[int], lines: int) -> list[int]:
    """Share lines: nobody gets more than is wanted, and everybody who wants any gets one."""
    rooms = [min(want, 1) for want in wanted]
    while sum(rooms) < lines:
        short = [index for index, want in enumerate(wanted) if rooms[index] < want]
        if not short:
            break
        rooms[min(short, key=lambda index: rooms[index])] += 1
    return rooms


def _heading(seen: Row) -> RenderableType:
    from rich.text import Text

    rows = queues(seen)
    slots = sum(worker["concurrency"] for worker in seen["workers"])
    busy = sum(worker["utilization"] * worker["concurrency"] for worker in seen["workers"])
    return Text.assemble(
        ("pgqueue", "bold"),
        f"  {sum(row['pending'] for row in rows):,} pending",
        f"  in {sum(row['in'] for row in rows):,.1f}/s  out {sum(row['out'] for row in rows):,.1f}/s",
        f"  {len(seen['workers'])} workers, {busy / slots if slots else 0:.0%} of {slots} slots busy",
    )


def _pane(state: State, pane: str, lines: int, now: datetime) -> list[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    items = state.items(pane)
    here = state.pane == pane
    # Jobs of each status are looked at up to a number, queues and workers are all there.
    cut = pane in _CUT and max(Counter(row.get("status") for row in items).values(), default=0) > _MOST
    title = Text(f"{'▶' if here else ' '} {pane} ({len(items)}{'+' if cut else ''})", style="bold")
    headings, cells = _COLUMNS[pane]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for heading in headings.split():
        side: Literal["left", "right"] = "right" if heading.startswith(">") else "left"
        table.add_column(heading.lstrip(">~"), justify=side, no_wrap=not heading.startswith("~"), overflow="ellipsis")
    chosen = min(state.rows[pane], max(len(items) - 1, 0))
    # The selected row stays in sight.
    first = max(min(chosen - lines // 2, len(items) - lines), 0)
    for index, row in enumerate(items[first : first + lines], first):
        style = "reverse" if here and index == chosen else ""
        texts = [cell if isinstance(cell, Text) else Text(printable(cell)) for cell in cells(row, now)]
        for text in texts:
            text.no_wrap = True
        table.add_row(*texts, style=style)
    return [title, Padding(table, (0, 0, 0, 2))]


def _queue_cells(row: Row, now: datetime) -> list[Any]:
    from rich.text import Text

    return [
        Text(printable(row["queue"]), style="yellow" if row["paused"] else ""),
        *(f"{row[name]:,}" for name in _COUNTS),
        "-" if row["age"] is None else duration(row["age"]),
        *(f"{row[name]:,.1f}" for name in ("in", "out", "bad")),
        "paused" if row["paused"] else "",
    ]


def _worker_cells(row: Row, now: datetime) -> list[Any]:
    return [
        row["name"],
        row["status"],
        f"{row['utilization']:.0%}",
        str(row["concurrency"]),
        f"{row['jobs_processed']:,}",
        f"{row['jobs_failed']:,}",
        "all" if row["queues"] is None else ",".join(row["queues"]),
        _since(row["last_heartbeat"], now),
    ]


def _running_cells(row: Row, now: datetime) -> list[Any]:
    asked = "cancel requested" if row["cancel_requested_at"] else ""
    return [row["job_id"], row["job_type"], row["queue"], str(row["attempts"]), _since(row["started_at"], now), asked]


def _failed_cells(row: Row, now: datetime) -> list[Any]:
    from rich.text import Text

    due = parse_instant(row["due_at"])
    when = _since(row["updated_at"], now) if due is None else f"retry in {_span(due, now)}"
    status = Text(row["status"], style=status_style(row["status"]))
    return [row["job_id"], row["job_type"], row["queue"], status, str(row["attempts"]), when, row["error"] or ""]


def _since(moment: str | None, now: datetime) -> str:
    then = parse_instant(moment)
    return "-" if then is None else _span(now, then)


def _span(later: datetime, earlier: datetime) -> str:
    return duration(max((later - earlier).total_seconds(), 0.0))


#: A heading that begins with > is of numbers; one that begins with ~ gives way where the terminal is narrow.
_COLUMNS: Final[Mapping[str, tuple[str, Callable[[Row, datetime], list[Any]]]]] = {
    "queues": ("~QUEUE >PENDING >RUNNING >DELAYED >FAILED >OLDEST >IN/s >OUT/s >FAIL/s STATE", _queue_cells),
    "workers": ("~NAME STATUS >BUSY >SLOTS >PROCESSED >FAILED ~QUEUES >SEEN", _worker_cells),
    "running": ("JOB ~TYPE ~QUEUE >TRY >FOR ~STATE", _running_cells),
    "failed": ("JOB ~TYPE ~QUEUE ~STATUS >TRIES ~WHEN ~ERROR", _failed_cells),
}
