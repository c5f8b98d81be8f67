"""The ledger: what producers, tasks, operators and an observer saw, each in files of its own, outside the queue.

A line is a JSON array whose first item says what it is, whose second is CLOCK_MONOTONIC, the same for all processes of
a machine. Files are only appended to, a line by one write, so that a killed process leaves whole lines. The kernel
keeps them when processes die; nothing is synced, since the machine itself stays up.

producers:  tried [[n, job_type, max_retries, ordering_key, queue], …]   accepted [[n, job_id], …]
            refused [n, …]       unsure [n, …] (no answer came: it may be in the queue or not)
tasks:      start job_id attempt n job_type              end job_id attempt outcome token
operators:  cancel job_id answer      revived job_type jobs      fault kind lane victim began detail (at its end)
observer:   final job_id status attempts token
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

RETURNED: Final = "returned"
RAISED: Final = "raised"
SNOOZED: Final = "snoozed"
STOPPED: Final = "stopped"


class Ledger:
    """A file to write to."""

    def __init__(self, folder: Path, who: str) -> None:
        """Open a new file in `folder` for one process's word; `who` begins its name."""
        self.name = f"{who}-{os.getpid()}-{time.monotonic_ns()}"
        self._fd = os.open(folder / f"{self.name}.ledger", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, what: str, *items: object) -> None:
        """Append a line."""
        line = json.dumps([what, time.monotonic(), *items], separators=(",", ":"), default=str) + "\n"
        os.write(self._fd, line.encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class Asked:
    """A job as its producer asked for it; `place` is its place among all that this producer tried."""

    n: int
    job_type: str
    max_retries: int
    ordering_key: str | None
    queue: str
    place: tuple[str, int]


@dataclass(slots=True)
class Run:
    """One attempt as its task told it; without an end the process died in it. `by` is the file, `at` seconds."""

    job_id: str
    attempt: int
    n: int
    job_type: str
    by: str
    at: float
    ended_at: float | None = None
    outcome: str | None = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """An injected fault, from `at` to `until`."""

    kind: str
    lane: str
    victim: str
    at: float
    until: float
    detail: str = ""


@dataclass(slots=True)
class Book:
    """Everything that was told, put together. `ids` are the jobs that a producer was told of, by n."""

    asked: dict[int, Asked] = field(default_factory=dict)
    ids: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    accepted_at: dict[int, float] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    unsure: set[int] = field(default_factory=set)
    runs: dict[str, list[Run]] = field(default_factory=lambda: defaultdict(list))
    cancels: dict[str, tuple[float, str]] = field(default_factory=dict)
    revivals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    finals: dict[str, list[tuple[float, str, int, str | None]]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Fault] = field(default_factory=list)
    accepts: list[float] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)

    def all_runs(self) -> Iterator[Run]:
        """Give every attempt."""
        for runs in self.runs.values():
            yield from runs


def read(folder: Path) -> Book:
    """Read all files of a folder."""
    book = Book()
    for path in sorted(folder.glob("*.ledger")):
        with path.open(encoding="utf-8") as lines:
            _read_file(book, path.stem, lines)
    return book


def _read_file(book: Book, name: str, lines: Iterable[str]) -> None:
    runs: dict[tuple[str, int], Run] = {}
    places = 0
    for line in lines:
        try:
            what, at, *items = json.loads(line)
        except ValueError:
            book.torn.append(f"{name}: {line[:80]!r}")
            continue
        if what == "start":
            job_id, attempt, n, job_type = items
            run = runs[job_id, attempt] = Run(job_id, attempt, n, job_type, name, at)
            book.runs[job_id].append(run)
        elif what == "end":
            job_id, attempt, outcome, token = items
            run = runs[job_id, attempt]
            run.ended_at, run.outcome, run.token = at, outcome, token
        elif what == "tried":
            for n, job_type, max_retries, ordering_key, queue in items[0]:
                if n not in book.asked:
                    book.asked[n] = Asked(n, job_type, max_retries, ordering_key, queue, (name, places))
                    places += 1
        else:
            _read_word(book, what, at, items)


def _read_word(book: Book, what: str, at: float, items: Sequence[Any]) -> None:
    if what == "accepted":
        for n, job_id in items[0]:
            book.ids[n].add(job_id)
            book.accepted_at.setdefault(n, at)
            book.accepts.append(at)
    elif what == "refused":
        book.refused.update(items[0])
    elif what == "unsure":
        book.unsure.update(items[0])
    elif what == "cancel":
        book.cancels.setdefault(items[0], (at, items[1]))
    elif what == "revived":
        book.revivals[items[0]] += 1
    elif what == "final":
        job_id, status, attempts, token = items
        book.finals[job_id].append((at, status, attempts, token))
    elif what == "fault":
        kind, lane, victim, began, detail = items
        book.faults.append(Fault(kind, lane, victim, began, at, detail))
    else:
        raise ValueError(f"the ledger has no word {what!r}")
