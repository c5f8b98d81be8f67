"""What of the chaos run and the soak can be told without a server: plans, ledgers, gaps, findings."""

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pgqueue.bench import soak
from pgqueue.bench.chaos import gaps, ledger
from pgqueue.bench.chaos.__main__ import main
from pgqueue.bench.chaos.faults import FAULTS
from pgqueue.bench.chaos.plan import LANES, plan
from pgqueue.bench.chaos.produce import Refused, Unsure, Wanted, mixture, produce
from pgqueue.cli import root

ALL = [kind for lane in LANES.values() for kind in lane]


def test_half_an_hour_has_ten_of_each_fault() -> None:
    planned = plan(1, 1800, ALL)
    assert len(planned) >= 200
    assert min(Counter(one.kind for one in planned).values()) >= 10
    assert {one.kind for one in planned} == set(ALL) == set(FAULTS)


def test_a_seed_is_replayed() -> None:
    assert plan(3, 600, ALL) == plan(3, 600, ALL) != plan(4, 600, ALL)
    assert [one.at for one in plan(3, 600, ALL)] == sorted(one.at for one in plan(3, 600, ALL))
    assert list(mixture(3, 1, 50)) == list(mixture(3, 1, 50)) != list(mixture(4, 1, 50))


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    written = ledger.Ledger(tmp_path, "operator")

    def write() -> None:
        for _ in range(200):
            written.write("revived", "x" * 500, 1)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    book = ledger.read(tmp_path)
    assert (book.torn, book.revivals) == ([], {"x" * 500: 800})


def test_only_what_has_a_key_is_sent_again(tmp_path: Path) -> None:
    answers = [Unsure("gone"), Refused("full"), None]

    def send(batch: list[Wanted]) -> list[tuple[int, str]]:
        answer = answers.pop(0) if answers else None
        if answer is not None:
            raise answer
        return [(job.n, f"job {job.n}") for job in batch]

    for keyed in (True, False):
        folder = tmp_path / str(keyed)
        folder.mkdir()
        answers[:] = [Unsure("gone"), Refused("full"), None]
        produce(ledger.Ledger(folder, "producer"), send, mixture(1, 1, 60), 1e6, 1, keyed=keyed)
        book = ledger.read(folder)
        assert len(book.asked) == 60
        assert (len(book.ids) == 60) is keyed
        assert book.unsure | set(book.ids) == set(book.asked)


@pytest.mark.parametrize(
    ("moments", "longest"), [([], 10), ([4], 6), ([0, 4, 12], 6), ([-5, 3, 4, 30], 6), ([2, 3, 9], 6)]
)
def test_the_longest_gap_within_a_span(moments: list[float], longest: float) -> None:
    assert gaps.longest(moments, 0, 10) == longest


def test_a_year_without_gaps_is_whole() -> None:
    nothing = gaps.Kind("server killed", times=1, work=[0.0], doors=[0.0])
    some = gaps.Kind("server killed", times=2, work=[1.0, 5.0], doors=[2.0, 2.0])
    assert gaps.availability(gaps.yearly_seconds([nothing])) == 1.0
    assert gaps.yearly_seconds([some], by="worst") == 5.0 * gaps.PER_YEAR["server killed"]
    assert gaps.yearly_seconds([some], "doors") == 2.0 * gaps.PER_YEAR["server killed"]


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "nonsense"])
    assert "there is no fault 'nonsense'" in capsys.readouterr().err


def reading(n: int, rate: float = 100.0, size: float = 1e6, memory: float = 5e7) -> soak.Reading:
    return soak.Reading(n * 10.0, int(n * 10 * rate), int(size), int(size * 3), int(memory), int(memory))


def test_a_soak_that_stays_as_it_was_has_no_fault() -> None:
    found = soak.found([reading(n) for n in range(1, 61)])
    assert (found["faults"], found["figures"]["throughput_kept"]) == ([], 1.0)


def test_a_soak_that_slows_down_and_grows_is_told() -> None:
    told: dict[str, Any] = {"minutes": 10, "workers": 1, "readings": []}
    slow = [reading(n) for n in range(1, 40)]
    slow += [
        soak.Reading(n * 10.0, 39_000 + (n - 39) * 500, 9_000_000, 9_000_000, 200_000_000, 10) for n in range(40, 61)
    ]
    told |= soak.found(slow)
    assert [fault.split()[0] for fault in told["faults"]] == [
        "throughput", "live_size_grown", "all_size_grown", "worker_memory_grown",
    ]  # fmt: skip
    assert soak.found(slow[:3])["faults"]


@pytest.mark.xdist_group("bench")
def test_a_soak_reads_and_plots_and_tells(database: str, tmp_path: Path) -> None:
    readings, page = tmp_path / "soak.json", tmp_path / "soak.svg"
    words = ["bench", "soak", "--minutes", "0.25", "--json", str(readings), "--svg", str(page)]
    done = CliRunner().invoke(root, words, env={"PGQUEUE_DSN": database})
    # A quarter of a minute on a busy machine says nothing about an hour: only that it is told, either way.
    assert "jobs per second" in done.stdout, done.output
    assert done.exit_code == (1 if "failed: " in done.stdout else 0)
    told = json.loads(readings.read_text())
    assert told["readings"][-1]["ended"] > told["readings"][0]["ended"]
    assert all(one["worker_bytes"] > 0 < one["api_bytes"] for one in told["readings"])
    assert page.read_text().count("<polyline") == 5
