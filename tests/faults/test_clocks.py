"""Hosts whose clocks are an hour off: only the database's counts. The workers and the API run under libfaketime."""

import signal
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import psycopg
import pytest

from pgqueue import App
from pgqueue.bench.chaos.processes import faketime
from tests.api.conftest import Served
from tests.meet import running_time
from tests.python.running import eventually, worker_process

Session = psycopg.Connection[Any]
LIBRARY = faketime()

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not installed")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("offset", ["-1h", pytest.param("+1h", marks=pytest.mark.slow)])
def test_a_host_an_hour_off_starts_renews_and_recovers_by_the_databases_clock(
    app: App, database: str, connection: Session, offset: str
) -> None:
    shifted = {
        "LD_PRELOAD": str(LIBRARY), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PGQUEUE_LEASE": "5", "PGQUEUE_SWEEP_INTERVAL": "0.5", "PGQUEUE_POLL_INTERVAL": "0.5",
    }  # fmt: skip
    api = Served(database, env=shifted)
    try:
        with worker_process(database, **shifted) as first:
            hosts = parsedate_to_datetime(api.http.get("/health/live").headers["date"])
            assert abs(hosts - datetime.now(UTC)) > timedelta(minutes=55), "its clock is not off"
            due = datetime.now(UTC) + timedelta(seconds=6)
            later = api.http.post("/jobs", json={"type": "marked", "scheduled_at": due.isoformat()}).json()
            delayed = api.http.post("/jobs", json={"type": "marked", "delay_ms": 4000}).json()
            long = app.enqueue_sync("slow", {"seconds": 12})
            killed = app.enqueue_sync("slow", {"seconds": 600})
            rows = [app.finished_job_sync(job["job_id"], wait=30) for job in (later, delayed)]
            for row, wanted in zip(rows, (due, rows[1].created_at + timedelta(seconds=4)), strict=True):
                assert row.started_at is not None
                # By the host's clock they would be an hour early or late.
                assert timedelta(0) <= row.started_at - wanted < timedelta(minutes=1)
            row = app.finished_job_sync(long, wait=30)
            assert (row.status, row.attempts, row.lost) == ("completed", 1, 0)
            with worker_process(database, **shifted):
                owner = app.job_sync(killed).worker_id
                first.send(signal.SIGKILL)
                began = running_time()
                eventually(lambda: app.job_sync(killed).attempts == 2, 30)
                # Lease, sweep and a second, with room for a busy machine.
                assert running_time() - began < 5 + 0.5 + 1 + 5
                assert app.job_sync(killed).worker_id != owner
                assert app.cancel_sync(killed) == "cancel_requested"
                assert app.finished_job_sync(killed, wait=20).status == "cancelled"
    finally:
        api.close()
