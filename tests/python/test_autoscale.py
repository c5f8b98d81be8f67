"""The scaling rule as a function, over a day, and with real worker processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pgqueue.autoscale import Decision, History, Policy, decide, remembered, report
from pgqueue.calls import WorkerLoad
from pgqueue.errors import ConfigError
from pgqueue.simulation import plot, simulate
from tests.meet import wait_until
from tests.servers import CHECKOUT

POLICY = Policy()


def load(pending: int = 0, workers: int = 10, utilization: float = 0.5, **more: Any) -> WorkerLoad:
    values = {"slots": workers * 10, "running": 0, "processing_seconds": 1.0, "soft_limit": 50_000, **more}
    return WorkerLoad(pending=pending, workers=workers, utilization=utilization, **values)


def wanted(state: WorkerLoad, history: History | None = None, now: float = 1000.0, **policy: Any) -> int:
    return decide(state, state.workers, history or History(), now, Policy(**policy)).wanted


# The rule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (load(1000), 10),
        (load(1001), 12),
        (load(50_000), 12),
        (load(50_001), 14),
        (load(100), 10),
        (load(99, utilization=0.3), 8),
        (load(99, utilization=0.6), 10),
        (load(500, utilization=0.9), 10),
        (load(500, utilization=0.91), 12),
        (load(500, utilization=0.19), 8),
        (load(800, utilization=0.19), 8),
        (load(801, utilization=0.19), 10),
        (load(500, processing_seconds=31.0), 12),
        (load(0, processing_seconds=31.0, utilization=0.6), 10),
        (load(0, workers=100, utilization=0.99), 100),
        (load(0, workers=2, utilization=0.0), 2),
        (load(0, workers=1), 2),
        (load(0, workers=103), 100),
        (load(99_999, workers=99), 100),
    ],
)
def test_numbers_of_the_seed(state: WorkerLoad, expected: int) -> None:
    assert wanted(state) == expected


def test_up_waits_half_a_minute_and_down_five() -> None:
    busy, idle = load(5000), load(0, utilization=0.1)
    changed = History(changed_up_at=970.1)
    assert wanted(busy, changed, 1000.0) == 10
    assert wanted(busy, changed, 1000.2) == 12
    assert wanted(idle, History(changed_down_at=701), 1000.0) == 10
    assert wanted(idle, History(changed_down_at=700), 1000.0) == 8
    assert wanted(idle, History(changed_up_at=701), 1000.0) == 10
    # Less than the minimum is an emergency, no change of mind.
    assert wanted(load(0, workers=0), History(changed_up_at=999.9), 1000.0) == 2


def test_nothing_is_taken_away_that_would_be_added_again() -> None:
    """After any step down the state that it leads to asks for no step up."""
    for workers in range(2, 40):
        for pending in range(0, workers * 12, 5):
            for part in range(0, 101, 4):
                state = load(pending, workers, part / 100)
                decision = decide(state, workers, History(), 0.0, POLICY)
                if decision.direction != "down":
                    continue
                after = load(pending, decision.wanted, part / 100 * workers / decision.wanted)
                assert decide(after, decision.wanted, History(), 0.0, POLICY).direction != "up", (state, after)


def test_none_at_all_is_possible() -> None:
    assert wanted(load(0, workers=0, utilization=0.0), minimum=0) == 0
    assert wanted(load(1, workers=0, utilization=0.0), minimum=0) == 2
    assert wanted(load(0, workers=2, utilization=0.0), minimum=0) == 0
    assert wanted(load(0, workers=2, utilization=0.0, running=1), minimum=0) == 2


def test_history_remembers_the_last_change_of_each_kind() -> None:
    history = remembered(History(), Decision(4, "up", ""), 5.0)
    history = remembered(history, Decision(4, "none", ""), 6.0)
    history = remembered(history, Decision(2, "down", ""), 7.0)
    assert history == History(5.0, 7.0)


def test_bounds_must_make_sense() -> None:
    with pytest.raises(ConfigError, match="5 to 2"):
        Policy(minimum=5, maximum=2)


def test_a_report_has_one_number_and_a_reason() -> None:
    said = report(load(1001))
    assert (said["value"], said["direction"]) == (12, "up")
    assert "1001 jobs wait" in said["reason"]


# A day ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 7])
def test_a_day_without_flapping(seed: int) -> None:
    day = simulate(seed=seed)
    figures = day.figures()
    assert figures["jobs"] > 9_000_000
    assert 2 == figures["workers_least"] < figures["workers_most"] <= 100
    assert figures["shortest_gap_up"] >= 30
    assert figures["shortest_gap_down"] >= 300
    assert figures["shortest_reversal"] >= 300
    assert figures["changes_up"] + figures["changes_down"] < 100
    # The bulk load arrives at once; of everything else the rush is the worst, and it is worked off.
    assert figures["pending_most"] < 61_000
    assert day.moments[-1].pending == 0
    assert figures["wait_mean"] < 5
    assert figures["worker_hours"] < figures["worker_hours_of_a_fixed_pool"] / 3


def test_the_plot_that_is_shipped_is_of_this_rule() -> None:
    assert (CHECKOUT / "pgqueue" / "monitoring" / "autoscale.svg").read_text() == plot(simulate())


# Processes ------------------------------------------------------------------------------------------------------------


class Scaler:
    """`pgqueue autoscale` in a process of its own, and what its log says."""

    def __init__(self, dsn: str, *options: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "autoscale", "pgqueue.demo:app", *options],
            env={**os.environ, "PGQUEUE_DSN": dsn, "PGQUEUE_LOG_FORMAT": "json", "PGQUEUE_GRACE": "20"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    @property
    def changes(self) -> list[str]:
        return [line for line in self.lines if '"event": "scaled"' in line]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(40)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def scaler(dsn: str, *options: str) -> Iterator[Scaler]:
    running = Scaler(dsn, *options)
    try:
        yield running
    finally:
        running.close()


def enqueue(connection: psycopg.Connection[Any], jobs: int, seconds: float) -> None:
    connection.execute(
        "insert into pgqueue.jobs (job_type, payload) select 'sleep', jsonb_build_object('seconds', %s::float8)"
        " from generate_series(1, %s)",
        (seconds, jobs),
    )


def numbers(connection: psycopg.Connection[Any], statement: str) -> list[Any]:
    return [row[0] for row in connection.execute(statement).fetchall()]


def test_workers_come_with_jobs_and_all_end_with_the_scaler(database: str, connection: psycopg.Connection[Any]) -> None:
    with scaler(database, "--min", "0", "--max", "2", "--concurrency", "2") as running:
        enqueue(connection, 3, 0.2)
        live = "select count(*) from pgqueue.live_workers"
        wait_until(lambda: numbers(connection, live) == [2], 40)
        wait_until(
            lambda: numbers(connection, "select count(*) from pgqueue.jobs where status = 'completed'") == [3], 30
        )
        enqueue(connection, 1, 3)
        wait_until(
            lambda: numbers(connection, "select count(*) from pgqueue.jobs where status = 'processing'") == [1], 30
        )
        assert running.end() == 0
    assert len(running.changes) == 1
    assert numbers(connection, live) == [0]
    # What ran when the end came has ended, within the grace.
    assert set(numbers(connection, "select attempts from pgqueue.jobs")) == {1}
    assert numbers(connection, "select count(*) from pgqueue.jobs where status = 'completed'") == [4]


def test_a_worker_that_dies_is_replaced_and_a_scaler_that_dies_leaves_none(
    database: str, connection: psycopg.Connection[Any]
) -> None:
    with scaler(database, "--min", "1", "--max", "1") as running:
        pids = "select pid from pgqueue.live_workers"
        (first,) = wait_until(lambda: numbers(connection, pids), 40)
        os.kill(first, signal.SIGKILL)
        connection.execute("delete from pgqueue.workers")
        (second,) = wait_until(lambda: numbers(connection, pids), 40)
        assert second != first
        running.process.kill()
        running.process.wait()
        wait_until(lambda: numbers(connection, "select status from pgqueue.workers") == ["stopped"], 30)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_no_busy_worker_is_stopped(database: str, connection: psycopg.Connection[Any]) -> None:
    """Five jobs of 40 s, then twenty short ones every ten seconds for three minutes."""
    with scaler(database, "--min", "0", "--max", "5", "--concurrency", "1") as running:
        enqueue(connection, 5, 40)
        begun = time.monotonic()
        most = 0
        while time.monotonic() - begun < 180:
            enqueue(connection, 20, 0.05)
            until = time.monotonic() + 10
            while time.monotonic() < until:
                most = max(most, *numbers(connection, "select count(*) from pgqueue.live_workers"))
                time.sleep(0.5)
        wait_until(
            lambda: numbers(connection, "select count(*) from pgqueue.jobs where status <> 'completed'") == [0], 150
        )
        changes = list(running.changes)
        connections = numbers(connection, "select count(*) from pg_stat_activity where datname = current_database()")[0]
        assert running.end() == 0
    assert set(numbers(connection, "select attempts from pgqueue.jobs")) == {1}
    assert set(numbers(connection, "select lost from pgqueue.jobs")) == {0}
    assert most <= 5
    # Up at most every 30 s, down at most every 300 s.
    assert len(changes) <= 8, changes
    # Five for each worker, one for the scaler, one for this test.
    assert connections <= 5 * 5 + 2
