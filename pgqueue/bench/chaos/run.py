"""A chaos run from its beginning to its findings."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pgqueue.bench.chaos import checker, ledger, statements, tables
from pgqueue.bench.chaos.checker import Terms, Violation
from pgqueue.bench.chaos.faults import FAULTS, victim
from pgqueue.bench.chaos.ledger import Book, Ledger
from pgqueue.bench.chaos.observe import Observer
from pgqueue.bench.chaos.plan import LANES, Injection, plan
from pgqueue.bench.chaos.rig import LEASE, MAX_LOST, Options, Site
from pgqueue.bench.chaos.server import ServerGone

Tell = Callable[[str], None]
#: Before the first fault everything must have begun to work.
_WARM_SECONDS: Final = 60.0
_PATIENCE_SECONDS: Final = 180.0
_DRAIN_SECONDS: Final = 180.0
_SHOWN: Final = 60.0
_COUNTED_WITHIN: Final = 60.0
#: After this nothing may be held under a lease that ran out longer ago than a lease and a sweep take.
_HEALED_SECONDS: Final = 10.0


@dataclass(slots=True)
class Outcome:
    """What a run was and what it showed. Times are CLOCK_MONOTONIC; `began` is when the first fault could come."""

    options: Options
    book: Book
    tables: tables.Tables
    violations: list[Violation]
    began: float
    ended: float
    drained_seconds: float | None
    left_out: Sequence[str]
    exits: dict[str, int]
    pids: dict[str, list[int]]
    server_version: str
    troubles: list[str] = field(default_factory=list)
    overdue: int = 0

    @property
    def failed(self) -> bool:
        """Whether a promise was broken, or something did not end as it should."""
        return bool(self.violations or self.troubles or self.overdue or self.drained_seconds is None)


def _lane(site: Site, injections: Sequence[Injection], began: float, over: threading.Event, tell: Tell) -> None:
    """Inject the faults of one lane, each at its time or as soon as the one before has ended."""
    rig = site.rig
    for injection in injections:
        if over.wait(max(began + injection.at - time.monotonic(), 0.0)):
            return
        for tries_left in (2, 1, 0):
            at, whom, detail = time.monotonic(), victim(rig, injection), ""
            try:
                detail = FAULTS[injection.kind](rig, injection)
            except ServerGone as exc:
                detail = f"met another fault: {str(exc)[:150]}"
                if tries_left and not over.wait(1.0):
                    continue
            break
        _write_fault(rig.ledger, injection, whom, at, detail)
        tell(f"{at - began:7.1f} s  {injection.kind} ({whom}, {time.monotonic() - at:.1f} s) {detail}")


def _write_fault(to: Ledger, injection: Injection, whom: str, at: float, detail: str) -> None:
    # The line's own time is that of its end.
    to.write("fault", injection.kind, injection.lane, whom, at, detail)


def _warm(site: Site, tell: Tell) -> None:
    """Wait until every worker has run something."""
    wanted = len(site.rig.workers)
    deadline = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < deadline:
        if len(list(site.ledgers.glob("tasks-*"))) >= wanted:
            return
        time.sleep(0.1)
    tell(f"not every worker ran something within {_WARM_SECONDS:g} s")


def run(options: Options, tell: Tell, *, keep: Path | None = None) -> Outcome:
    """Do the run. `keep`: a folder that the ledger and the logs of all processes are moved to."""
    folder = Path(tempfile.mkdtemp(prefix="pgqueue-chaos-run-"))
    try:
        return _run(folder, options, tell)
    finally:
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("pgbouncer"))
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, options: Options, tell: Tell) -> Outcome:
    site = Site(folder, options)
    for why in site.missing:
        tell(f"left out: {why}")
    observer = None
    over = threading.Event()
    try:
        seconds = options.minutes * 60
        kinds = [kind for kind in site.kinds if options.kinds is None or kind in options.kinds]
        injections = plan(options.seed, seconds, kinds, every=options.every)
        tell(f"seed {options.seed}: {options.jobs} jobs and {len(injections)} faults in {options.minutes:g} minutes")
        site.start()
        site.start_producers(seconds)
        observer = Observer(site.rig.server, Ledger(site.ledgers, "observer"))
        _warm(site, tell)
        began = time.monotonic()
        lanes = [
            threading.Thread(
                target=_lane, args=(site, [one for one in injections if one.lane == lane], began, over, tell)
            )
            for lane in LANES
        ]
        for lane in lanes:
            lane.start()
        _watch(site, lanes, began, began + seconds * 1.5 + _PATIENCE_SECONDS, tell)
        site.rig.server.ensure()
        _patiently(site.rig.server.settle)
        tell("faults are over; waiting for what is left")
        healed = shown = time.monotonic()
        left, overdue = -1, 0
        for left, late in site.drained(_DRAIN_SECONDS + seconds / 4):
            if time.monotonic() - healed > _HEALED_SECONDS:
                overdue = max(overdue, late)
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                tell(f"{left} jobs are alive")
        drained = time.monotonic() - healed if left == 0 else None
        return _conclude(site, observer, options, began, drained, overdue, tell)
    finally:
        over.set()
        if observer is not None:
            observer.close()
        site.close()


def _watch(site: Site, lanes: Sequence[threading.Thread], began: float, until: float, tell: Tell) -> None:
    """Return when all faults are over and all producers have ended, or are ended because it took too long."""
    told = began
    while any(lane.is_alive() for lane in lanes) or site.producing():
        if time.monotonic() > until:
            site.end_producers()
        time.sleep(0.2)
        if time.monotonic() - told > _SHOWN:
            told = time.monotonic()
            left = site.alive()
            tell(f"{told - began:7.1f} s  " + ("the server is gone" if left is None else f"{left[0]} jobs are alive"))


def _patiently(act: Callable[[], None]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            act()
            return
        except ServerGone:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _conclude(
    site: Site,
    observer: Observer,
    options: Options,
    began: float,
    drained: float | None,
    overdue: int,
    tell: Tell,
) -> Outcome:
    """End the processes, read the final tables, compare."""
    rig = site.rig
    killed = site.stop_services()
    observer.look()
    with rig.server.admin() as admin:
        # A step that a fault made fail is run again after a pause only.
        (ended,) = admin.execute(statements.NOW).fetchone() or (None,)
        deadline = time.monotonic() + _COUNTED_WITHIN
        while time.monotonic() < deadline:
            admin.execute(statements.MEASURE)
            if admin.execute(statements.COUNTED, {"moment": ended}).fetchone() == (True,):
                break
            time.sleep(0.3)
        final = tables.read(admin)
        version = admin.info.parameter_status("server_version") or ""
    book = ledger.read(site.ledgers)
    violations = checker.check(book, final, Terms(LEASE, MAX_LOST))
    troubles = [f"{name} did not end within 10 s of SIGTERM" for name in killed]
    troubles += [f"a producer ended with {code}" for code in site.producers_failed()]
    tell(f"checked {len(final.rows)} jobs: {len(violations)} contradictions")
    exits = {service.name: len(service.ends) for service in site.services}
    return Outcome(
        options=options,
        book=book,
        tables=final,
        violations=violations,
        began=began,
        ended=time.monotonic(),
        drained_seconds=drained,
        left_out=site.missing,
        exits=exits,
        pids={worker.name: worker.pids for worker in rig.workers},
        server_version=version,
        troubles=troubles,
        overdue=overdue,
    )
