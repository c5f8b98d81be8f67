"""Time under load: many scheduled and finished rows, a drop of half a million, readers of a minute. All slow."""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from pgqueue import Settings
from pgqueue.services import Background
from pgqueue.sweeper import Sweeper
from tests.conftest import Connect
from tests.sql.test_6_time_retention import finished, maintain, retention
from tests.sql.verbs import Verbs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS = ("cursors", "due", "leases", "timeouts", "expired", "shed", "keys", "retention", "prune")


def claim_and_complete(session: psycopg.Connection[Any], queue: str, jobs: int, batch: int = 50) -> float:
    """Works off so many jobs of a queue that holds them; jobs per second."""
    verbs, done, began = Verbs(session), 0, time.monotonic()
    worker = uuid.uuid4()
    while done < jobs:
        claimed = verbs.claim(batch, worker, [queue])
        assert claimed
        verbs.complete(claimed, worker=worker)
        done += len(claimed)
    return jobs / (time.monotonic() - began)


def test_a_million_scheduled_and_a_million_finished_rows_cost_claims_and_sweeps_nothing(
    q: Verbs, connect: Connect
) -> None:
    maintain(q)
    worker = connect()

    def rate() -> float:
        # The best of several, since the machine does other things too.
        rates = []
        for number in range(5):
            q.fill(4000, queue=f"load {number}")
            q.sweep("cursors")
            q.sweep("cursors")
            rates.append(claim_and_complete(worker, f"load {number}", 4000))
        return max(rates)

    empty = rate()
    q.session.execute("set pgqueue.wake = off")
    for _ in range(10):
        q.session.execute(
            "insert into pgqueue.jobs (job_type, scheduled_at)"
            " select 't', clock_timestamp() + interval '20 minutes' + n * interval '10 milliseconds'"
            " from generate_series(1, 100000) n"
        )
        finished(q, 100_000, ago=timedelta(hours=1))
    q.session.execute("vacuum analyze pgqueue.jobs_live")
    for _ in range(3):
        q.sweep("cursors")
    full = rate()
    took = {}
    for _ in range(5):
        for step in STEPS:
            began = time.monotonic()
            q.sweep(step)
            took.setdefault(step, []).append((time.monotonic() - began) * 1000)
    best = {step: round(min(times), 1) for step, times in took.items()}
    print(f"\nclaims per second: {empty:.0f} on an empty table, {full:.0f} on a full one; a sweep in ms: {best}")
    assert full >= 0.9 * empty
    assert sum(best.values()) < 100


def test_a_hundred_thousand_scheduled_jobs_are_at_most_a_second_late(
    database: str, q: Verbs, connection: psycopg.Connection[Any]
) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, scheduled_at)"
        " select 't', clock_timestamp() + interval '15 seconds' + n * interval '0.6 milliseconds'"
        " from generate_series(1, 100000) n"
    )
    background = Background([Sweeper(database, Settings.load(env={}, dsn=database))])
    background.start()
    try:
        until = time.monotonic() + 120
        while q.value("select exists (select from pgqueue.jobs_live where status = 'submitted')"):
            assert time.monotonic() < until
            time.sleep(0.5)
    finally:
        background.stop(10)
    late = q.one(
        "select percentile_cont(array[0.5, 0.99, 1]) within group"
        " (order by extract(epoch from updated_at - scheduled_at)) as p,"
        " min(updated_at - scheduled_at) >= '0' as never_early from pgqueue.jobs"
    )
    print("\nlate by s, p50, p99, max:", [round(float(p), 3) for p in late.p])
    assert late.never_early
    assert late.p[1] <= 1


def let_days_pass(q: Verbs) -> None:
    """The clock goes on from a day on which today is past retention; most partitions ahead of that are there."""
    for days in (29, 31):
        q.session.execute(
            "create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe"
            f" as $$ select pg_catalog.statement_timestamp() + interval '{days} days' $$"
        )
        if days == 29:
            assert set(maintain(q).values()) <= {"made", "dropped"}
    assert retention(q).behind > timedelta(0)


class Verbed:
    """Insert, claim and finish over and over, with how long each took, in seconds."""

    def __init__(self, connect: Connect) -> None:
        self.took: dict[str, list[float]] = {"insert": [], "claim": [], "finish": []}
        self._verbs = Verbs(connect())
        # What a disk does is another matter.
        self._verbs.session.execute("set synchronous_commit = off")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _timed(self, verb: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        value = work()
        self.took[verb].append(time.monotonic() - began)
        return value

    def _run(self) -> None:
        while not self._stop.is_set():
            self._timed("insert", lambda: self._verbs.insert(queue="verbs"))
            jobs = self._timed("claim", lambda: self._verbs.claim(1, queues=["verbs"]))
            self._timed("finish", lambda jobs=jobs: self._verbs.complete(jobs))

    def __enter__(self) -> "Verbed":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(60)


def p99(times: list[float]) -> float:
    return sorted(times)[int(len(times) * 0.99)] * 1000


def test_dropping_a_day_of_half_a_million_jobs_keeps_no_verb_waiting(q: Verbs, connect: Connect) -> None:
    maintain(q)
    finished(q, 500_000)
    let_days_pass(q)
    q.session.execute("checkpoint")
    with Verbed(connect) as without:
        time.sleep(8)
    with Verbed(connect) as during:
        time.sleep(4)
        while maintain(q, 1):
            pass
        time.sleep(4)
    told = {verb: (round(p99(without.took[verb]), 2), round(p99(during.took[verb]), 2)) for verb in without.took}
    longest = {verb: round(max(during.took[verb]) * 1000, 1) for verb in during.took}
    print(f"\np99 in ms, without and with the drop: {told}; the longest: {longest}")
    assert retention(q).behind == timedelta(0)
    for verb, (before, after) in told.items():
        assert after <= 3 * before, verb


@contextmanager
def reading(connect: Connect) -> Iterator[None]:
    session = connect()
    with session.transaction():
        session.execute("select count(*) from pgqueue.jobs")
        yield


def test_with_a_reader_of_a_minute_no_verb_waits_and_retention_is_seen_to_be_behind(q: Verbs, connect: Connect) -> None:
    maintain(q)
    finished(q, 20_000)
    let_days_pass(q)
    with reading(connect), Verbed(connect) as verbs:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            assert "busy" in maintain(q, 1).values()
            assert retention(q).behind > timedelta(0)
            time.sleep(1)
    longest = {verb: round(max(times) * 1000, 1) for verb, times in verbs.took.items()}
    print(f"\nthe longest of each verb in ms: {longest}")
    assert max(longest.values()) <= 100
    assert "dropped" in maintain(q).values()
    assert retention(q).behind == timedelta(0)
