"""The chaos run in short: real processes on a server of their own, faults by a plan, and the checker's word on them."""

from pathlib import Path

import psycopg
import pytest

from pgqueue.bench.chaos import gaps, plot, report
from pgqueue.bench.chaos.plan import LANES
from pgqueue.bench.chaos.rig import Options
from pgqueue.bench.chaos.run import Outcome, run
from tests.faults.planting import plant
from tests.faults.test_planted_bugs import BUGS

#: Those that cost seconds of waiting are left to the long run.
SHORT = (
    "server killed", "backend killed", "backends terminated", "read-only", "long transaction", "partition missing",
    "worker killed", "worker stopped", "worker terminated", "API killed", "network cut", "bulk cancel", "queue paused",
)  # fmt: skip
ALL = tuple(kind for lane in LANES.values() for kind in lane)


def broken(outcome: Outcome) -> str:
    told = report.document(outcome)
    return "\n".join(report.lines(told))


@pytest.mark.timeout(240)
@pytest.mark.xdist_group("chaos")
def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    outcome = run(Options(minutes=0.4, jobs=1200, seed=5, kinds=SHORT, every=3.5), said.append, keep=tmp_path)
    assert not outcome.failed, broken(outcome)
    assert {fault.kind for fault in outcome.book.faults} == set(SHORT)
    assert sum(len(ids) for ids in outcome.book.ids.values()) >= 1000
    told = report.document(outcome)
    assert told["violations"] == {}
    assert plot.svg(told).startswith("<svg")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize("seed", [11, 12])
def test_a_run_of_all_faults_loses_nothing(tmp_path: Path, seed: int) -> None:
    outcome = run(Options(minutes=2.5, jobs=20_000, seed=seed, every=6.0), lambda _: None, keep=tmp_path)
    assert not outcome.failed, broken(outcome)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("complete takes any attempt", ["worker stopped"]),
        ("the reaper comes early", ["worker killed"]),
        ("a finish overwrites a cancel", ["bulk cancel"]),
        ("a release drops its job", ["worker terminated"]),
        ("the last of a key comes first", ["worker killed"]),
    ],
)
def test_a_bug_in_what_runs_is_found(name: str, kinds: list[str]) -> None:
    (bug,) = [one for one in BUGS if one.name == name]

    def prepare(dsn: str) -> None:
        with psycopg.connect(dsn, autocommit=True) as session:
            plant(session, bug)

    outcome = run(Options(0.5, 3000, 31, kinds, every=3.0, prepare=prepare), lambda _: None)
    assert {violation.rule for violation in outcome.violations} & bug.rules, broken(outcome)


def test_every_fault_has_a_rate() -> None:
    assert set(gaps.PER_YEAR) == set(ALL)
