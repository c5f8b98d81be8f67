"""pgqueue as a peer of bench-peers: the adapter keeps the protocol, and the comparison reads what comes back."""

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pgqueue.bench import peer
from pgqueue.bench.compare import faults, quotients
from pgqueue.cli import root
from tests.conftest import Connect

ADAPTER = [sys.executable, str(Path(peer.__file__))]
CHECKOUT = Path(peer.__file__).parents[2]


@pytest.fixture
def adapter(database: str, tmp_path: Path) -> Iterator[Any]:
    """Starts the adapter on the test's database with records in tmp_path."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*ADAPTER, *map(str, arguments)],
            env={**os.environ, "BENCH_DSN": database, "BENCH_OUT": str(tmp_path), "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Let it begin and return its line."""
    assert process.stdin
    assert process.stdout
    assert process.stdout.readline() == "READY\n"
    process.stdin.write("GO\n")
    process.stdin.flush()
    told: dict[str, Any] = json.loads(process.stdout.readline())
    assert process.wait(20) == 0
    return told


def records(folder: Path, kind: str) -> list[tuple[int, float]]:
    return [record for file in folder.glob(f"{kind}-*.bin") for record in struct.iter_unpack("<qd", file.read_bytes())]


class TestAdapter:
    def test_says_what_it_is(self, adapter: Any, connect: Connect) -> None:
        told = json.loads(adapter("meta").communicate()[0])
        assert told["kind"] == "pg"
        assert connect().execute(told["counts"]).fetchone() == (0, 0)

    def test_sets_up_an_empty_database(self, adapter: Any, connect: Connect) -> None:
        assert adapter("setup").wait(60) == 0
        (limit,) = connect().execute("select hard_limit from pgqueue.queues where name = 'default'").fetchone()
        assert limit > 1_000_000

    def test_enqueues_runs_and_records(self, adapter: Any, connect: Connect, tmp_path: Path) -> None:
        told = answer(adapter("submit", 5, 100))
        assert told["n"] == 5
        assert 0 < told["p50_ms"] <= told["p99_ms"]
        assert answer(adapter("bulk", 20))["n"] == 20
        assert answer(adapter("produce", 3, 200, 50))["n"] == 3
        assert [number for number, _ in records(tmp_path, "produced")] == [200, 201, 202]

        worker = adapter("work")
        assert worker.stdout.readline() == "READY\n"
        deadline = time.monotonic() + 30
        while len(records(tmp_path, "handled")) < 28 and time.monotonic() < deadline:
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
        numbers = sorted(number for number, _ in records(tmp_path, "handled"))
        assert numbers == sorted([*range(20), *range(100, 105), *range(200, 203)])
        assert connect().execute("select count(*) from pgqueue.jobs_completed").fetchone() == (28,)


RUN_PY = """
import json, os, sys
peers = sys.argv[sys.argv.index("--peers") + 1].split(",")
extra = json.loads(os.environ["BENCH_EXTRA"])["pgqueue"]
assert os.path.isfile(extra[1]) and extra[3] == 5000
rates = {"pgqueue": [30.0, 60.0], "other": [20.0, 30.0]}
runs = [
    {"peer": name, "test": "drain1", "rep": rep, "jobs_per_s": rate}
    for name in peers for rep, rate in enumerate(rates[name])
]
json.dump({"runs": runs + FAULTS, "server": os.environ["BENCH_ADMIN_DSN"]}, open(sys.argv[-1], "w"))
print("its own table")
"""


def compare(home: Path, faults: str, *args: str) -> Any:
    (home / "run.py").write_text(RUN_PY.replace("FAULTS", faults))
    command = ["bench", "compare", str(home), "--server", "dbname=x", "--peers", "other", "--jobs", "5000", *args]
    return CliRunner().invoke(root, command)


class TestCompare:
    def test_divides_within_repetitions(self, tmp_path: Path) -> None:
        result = compare(tmp_path, "[]", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["ratios"] == [
            {"test": "drain1", "figure": "jobs_per_s", "peer": "other", "pgqueue": 45.0, "theirs": 25.0, "ratio": 1.75}
        ]

    def test_tells_what_went_wrong(self, tmp_path: Path) -> None:
        result = compare(tmp_path, "[{'peer': 'other', 'test': 'held', 'rep': 0, 'error': 'Boom: x'}]")
        assert result.exit_code == 1
        assert "other held: Boom: x" in result.stderr
        assert "1.75" in result.stdout

    def test_needs_the_folder(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(root, ["bench", "compare", str(tmp_path), "--server", "dbname=x"])
        assert result.exit_code == 2
        assert "run.py" in result.stderr

    def test_jobs_that_ran_twice_or_were_not_stored_are_faults(self) -> None:
        run = {"peer": "p", "test": "drain1", "rep": 0, "handled": 10, "stored": 9, "run_twice": 1}
        assert faults({"runs": [run]}) == ["p drain1: 10 handled, 9 stored, 1 run twice"]
        assert quotients({"runs": [run]}) == []
