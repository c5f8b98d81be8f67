"""What `up --demo` shows: a page that renews itself on a terminal, lines that say what changed anywhere else."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pgqueue.cli.output import STATUSES, ago, console, duration, parse_instant, plain, printable, status_style

ENDED: Final = ("completed", "dead_letter", "cancelled")
RATE_SECONDS: Final = 5.0
BAR: Final = 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The queue at one moment: jobs per status, the last that ended, the next retries, and the workers."""

    statuses: Mapping[str, int] = field(default_factory=dict)
    retried: int = 0
    ended: tuple[Mapping[str, Any], ...] = ()
    retries: tuple[Mapping[str, Any], ...] = ()
    workers: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, activity: Mapping[str, Any], workers: list[dict[str, Any]]) -> Self:
        """Make it of what the calls `activity` and `workers` return."""
        return cls(
            activity["statuses"] or {},
            activity["retried"],
            tuple(activity["ended"] or ()),
            tuple(activity["retries"] or ()),
            tuple(worker for worker in workers if worker["status"] != "stopped"),
        )

    def count(self, status: str) -> int:
        """Return how many jobs have this status."""
        return self.statuses.get(status, 0)

    @property
    def seen_all(self) -> bool:
        """Whether there are completed, retried and dead-lettered jobs."""
        return bool(self.count("completed") and self.retried and self.count("dead_letter"))

    def summary(self) -> str:
        """Return in one line what became of the jobs."""
        left = sum(count for status, count in self.statuses.items() if status not in ENDED)
        return (
            f"{self.count('completed')} completed, of these {self.retried} after retries; "
            f"{self.count('dead_letter')} dead letters; {left} still to do"
        )


class Rates:
    """Jobs per second over the last few seconds."""

    def __init__(self) -> None:
        """Start with nothing seen."""
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, at: float, snapshot: Snapshot) -> tuple[float, float]:
        """Take a snapshot made at `at` (monotonic seconds) and return jobs enqueued and jobs ended per second."""
        enqueued = sum(snapshot.statuses.values())
        self._seen.append((at, enqueued, sum(map(snapshot.count, ENDED))))
        while len(self._seen) > 2 and self._seen[1][0] < at - RATE_SECONDS:
            self._seen.popleft()
        (begun, first_enqueued, first_ended), (_, last_enqueued, last_ended) = self._seen[0], self._seen[-1]
        span = max(at - begun, 0.001)
        return max(last_enqueued - first_enqueued, 0) / span, max(last_ended - first_ended, 0) / span


class View(Protocol):
    """Shows snapshots as they come, one in `every` seconds."""

    every: float

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, snapshot: Snapshot) -> None:
        """Show a snapshot."""

    def say(self, message: str) -> None:
        """Show a message, once when it comes again and again."""

    def end(self) -> None:
        """Show what became of the jobs."""


class Lines:
    """For pipes and files: a line whenever the counts changed, and one for each kind of event seen first."""

    every = 1.0

    def __init__(self) -> None:
        """Start with nothing shown."""
        self._last = Snapshot()
        self._rates = Rates()
        self._told: set[str] = set()

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""

    def show(self, snapshot: Snapshot) -> None:
        """Print what is new."""
        enqueued, ended = self._rates.add(time.monotonic(), snapshot)
        for kind, message in _firsts(snapshot):
            if kind not in self._told:
                self._told.add(kind)
                self._line(message)
        if snapshot.statuses != self._last.statuses:
            counts = "  ".join(f"{status} {snapshot.count(status)}" for status in STATUSES if status != "cancelled")
            self._line(f"{counts}  in {enqueued:.1f}/s  out {ended:.1f}/s")
        if snapshot.seen_all and not self._last.seen_all:
            self._line(f"seen so far: {snapshot.summary()}")
        self._last = snapshot

    def say(self, message: str) -> None:
        """Print a message unless it was printed before."""
        if message not in self._told:
            self._told.add(message)
            self._line(message)

    def end(self) -> None:
        """Print the summary."""
        self._line(f"ended: {self._last.summary()}")

    def _line(self, message: str) -> None:
        sys.stdout.write(f"{datetime.now().astimezone():%H:%M:%S}  {printable(message)}\n")
        sys.stdout.flush()


def _firsts(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    for job in reversed(snapshot.ended):
        name = f"{job['job_type']} {job['job_id']}"
        if job["status"] == "dead_letter":
            yield "dead", f"dead letter: {name} after {_attempts(job['attempts'])}: {job['error']}"
        elif job["status"] == "completed" and job["attempts"] > 1:
            yield "retried", f"retried: {name} completed at attempt {job['attempts']}"
        elif job["status"] == "completed":
            yield "completed", f"completed: {name} returned {plain(job['result'])}"
    for job in snapshot.retries:
        name = f"{job['job_type']} {job['job_id']}"
        yield "failed", f"failed: {name}: {job['error']}; retry {job['attempts']} of {job['max_retries']} follows"


class Page:
    """For terminals: the whole picture, renewed in place."""

    every = 0.5

    def __init__(self, title: str, hint: str) -> None:
        """`title` heads the page, `hint` ends it."""
        self._last = Snapshot()
        self._title = title
        self._hint = hint
        self._rates = Rates()
        self._begun = time.monotonic()
        self._console = console()
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        """Take the terminal."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last picture standing."""
        self._live.__exit__(kind, error, trace)

    def show(self, snapshot: Snapshot) -> None:
        """Draw the page anew."""
        self._last = snapshot
        self._live.update(self.render(snapshot), refresh=True)

    def say(self, message: str) -> None:
        """Show the message in place of the hint."""
        self._hint = printable(message)

    def end(self) -> None:
        """Leave the summary at the end of the last picture."""
        self._hint = f"Ended: {self._last.summary()}."
        self.show(self._last)

    def render(self, snapshot: Snapshot) -> RenderableType:
        """Return the page, cut to the terminal's height."""
        enqueued, ended = self._rates.add(time.monotonic(), snapshot)
        heading = Text.assemble(
            (self._title, "bold"),
            f"   up {duration(time.monotonic() - self._begun)}   in {enqueued:.1f}/s   out {ended:.1f}/s",
        )
        # Heading, seven statuses, workers, titles and blank lines; the rest is shared by the two lists.
        room = max(self._console.height - 19 - min(len(snapshot.workers), 3), 4)
        retries = snapshot.retries[: max(room // 3, 2)]
        ended_jobs = snapshot.ended[: max(room - len(retries), 2)]
        return Group(
            heading,
            Text(),
            _statuses(snapshot),
            Text(),
            Text("Last ended", style="bold"),
            _ended_jobs(ended_jobs),
            Text(),
            Text("Next retries", style="bold"),
            _next_retries(retries),
            Text(),
            Text("Workers", style="bold"),
            _workers(snapshot.workers[:3]),
            Text(),
            Text(self._hint, style="dim"),
        )


def _statuses(snapshot: Snapshot) -> RenderableType:
    table = _table()
    table.add_column(width=12)
    table.add_column(justify="right", min_width=6)
    table.add_column(no_wrap=True)
    most = max((*snapshot.statuses.values(), 1))
    for status in STATUSES:
        count, style = snapshot.count(status), status_style(status)
        after = f"  {snapshot.retried} of them after retries" if status == "completed" and snapshot.retried else ""
        bar = "━" * (max(round(BAR * count / most), 1) if count else 0)
        table.add_row(Text(status, style=style), str(count), Text.assemble((bar, style), (after, "dim")))
    return _indented(table)


def _ended_jobs(jobs: tuple[Mapping[str, Any], ...]) -> RenderableType:
    table = _table(wide=True)
    for width in (9, 10, 12, 8):
        table.add_column(min_width=width, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        begun, ended = parse_instant(job["started_at"]), parse_instant(job["finished_at"])
        status = job["status"]
        took = "" if begun is None or ended is None else duration((ended - begun).total_seconds())
        story = plain(job["result"]) if status == "completed" else (job["error"] or "")
        if job["attempts"] > 1:
            story = f"attempt {job['attempts']}: {story}"
        table.add_row(
            f"{ended.astimezone():%H:%M:%S}" if ended else "",
            Text(printable(job["job_type"])),
            Text(status, style=status_style(status)),
            took,
            Text(_one_line(story)),
        )
    return _indented(table) if jobs else _nothing()


def _next_retries(jobs: tuple[Mapping[str, Any], ...]) -> RenderableType:
    table = _table(wide=True)
    for width in (9, 10, 12):
        table.add_column(min_width=width, no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs:
        due = parse_instant(job["due_at"])
        wait = max((due - datetime.now(UTC)).total_seconds(), 0.0) if due else 0.0
        table.add_row(
            f"in {duration(wait)}" if wait else "now",
            Text(printable(job["job_type"])),
            f"retry {job['attempts']} of {job['max_retries']}",
            Text(_one_line(job["error"] or "")),
        )
    return _indented(table) if jobs else _nothing()


def _workers(workers: tuple[Mapping[str, Any], ...]) -> RenderableType:
    table = _table()
    for _ in range(5):
        table.add_column(no_wrap=True)
    for worker in workers:
        seen = parse_instant(worker["last_heartbeat"])
        table.add_row(
            Text(printable(worker["name"])),
            worker["status"],
            f"{worker['jobs_processed']} processed, {worker['jobs_failed']} failed",
            f"{worker['concurrency']} slots",
            Text(f"as of {ago(seen)}" if seen else "", style="dim"),
        )
    return _indented(table) if workers else _nothing()


def _table(*, wide: bool = False) -> Table:
    return Table.grid(padding=(0, 2, 0, 0), expand=wide)


def _indented(table: RenderableType) -> RenderableType:
    return Padding(table, (0, 0, 0, 2))


def _nothing() -> RenderableType:
    return Text("  -", style="dim")


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _attempts(number: int) -> str:
    return "1 attempt" if number == 1 else f"{number} attempts"


@contextmanager
def view(title: str, hint: str) -> Iterator[View]:
    """Give the view that suits stdout."""
    chosen: View = Page(title, hint) if sys.stdout.isatty() else Lines()
    with chosen:
        yield chosen
