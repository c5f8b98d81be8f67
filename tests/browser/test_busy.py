"""What takes minutes: how soon an open page shows a change, and what pages cost a queue that works at full speed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest

from tests.api.conftest import Serve, Served, serve
from tests.browser.conftest import Screens
from tests.browser.scene import Scene
from tests.browser.test_dashboard import PAGES
from tests.conftest import Connect
from tests.meet import wait_until

__all__ = ["serve"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RATE = 5000
SECONDS = 6.0
# Enqueues at a rate, in statements of fifty jobs by four sessions; SIGTERM ends it.
PRODUCER = f"""
import psycopg, signal, sys, threading, time
stop, made = [], [0] * 4
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
def produce(n):
    s, begun = psycopg.connect(sys.argv[1], autocommit=True), time.monotonic()
    while not stop:
        s.execute("insert into pgqueue.jobs (job_type, queue) select 'noop', 'busy' from generate_series(1, 50)")
        made[n] += 50
        time.sleep(max(0, made[n] * 4 / {RATE} - (time.monotonic() - begun)))
threads = [threading.Thread(target=produce, args=[n], daemon=True) for n in range(4)]
for t in threads: t.start()
while not stop: time.sleep(0.1)
"""
DONE = (
    "select (select count(*) from pgqueue.jobs_completed where queue = 'busy'),"
    " (select last_value from pgqueue.jobs_seq), extract(epoch from clock_timestamp())::float8"
)


def percentile(times: list[float], part: float) -> float:
    return sorted(times)[min(int(len(times) * part), len(times) - 1)]


def idle_machine() -> bool:
    """Whether times measured here say something."""
    return os.getloadavg()[0] < 4


def test_how_soon_a_change_shows(screens: Screens, scene: Scene) -> None:
    late = []
    with screens.open("/dashboard/jobs?status=completed") as page:
        page.evaluate(
            """window.shown = {};
               new MutationObserver(() => {
                 for (const row of document.querySelectorAll("tr[id]")) window.shown[row.id] ??= Date.now();
               }).observe(document.getElementById("live"), { subtree: true, childList: true });"""
        )
        for n in range(20):
            job_id = scene.enqueue("t", queue="timed")
            scene.claim(1, "timed")
            # At any moment of the page's round.
            page.wait_for_timeout(1500 + 97 * n)
            scene.complete(job_id)
            committed = time.time() * 1000
            page.wait_for_selector(f"#j-{job_id}", timeout=10_000)
            late.append((page.evaluate("(id) => window.shown[id]", f"j-{job_id}") - committed) / 1000)
    print(f"\na change shows after p50 {percentile(late, 0.5):.2f} s, at most {max(late):.2f} s")
    if idle_machine():
        assert max(late) < 1


@contextlib.contextmanager
def load(dsn: str) -> Iterator[None]:
    """Producers and a worker."""
    env = {**os.environ, "PGQUEUE_DSN": dsn, "PGQUEUE_LOG_LEVEL": "error"}
    worker = [sys.executable, "-m", "pgqueue", "worker", "pgqueue.demo:app", "--queues", "busy", "--concurrency", "100"]
    running = [
        subprocess.Popen([sys.executable, "-c", PRODUCER, dsn]),
        subprocess.Popen(worker, env=env, stdout=subprocess.DEVNULL),
    ]
    try:
        yield
    finally:
        for one in running:
            one.send_signal(signal.SIGTERM)
        for one in running:
            one.wait(30)


class Page:
    """An open page, as a browser on another machine has it: a stream of hints, and a fetch after each."""

    def __init__(self, served: Served, path: str) -> None:
        self.took: list[float] = []
        self._url, self._path = served.url, path
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as http, http.stream("GET", "/dashboard/events") as hints:
            for line in hints.iter_lines():
                if self._stop.is_set():
                    return
                if line == "event: changed":
                    begun = time.perf_counter()
                    assert http.get(self._path, headers={"X-Live": "1"}).status_code == 200
                    self.took.append(time.perf_counter() - begun)
                    time.sleep(max(0.0, 0.75 - self.took[-1]))

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)


def measured(session: psycopg.Connection[Any]) -> tuple[float, float]:
    """Jobs completed and jobs enqueued a second, over some seconds."""
    ((done, made, at),) = session.execute(DONE).fetchall()
    time.sleep(SECONDS)
    ((done_then, made_then, at_then),) = session.execute(DONE).fetchall()
    return (done_then - done) / (at_then - at), (made_then - made) / (at_then - at)


def test_pages_of_a_busy_queue_are_quick_and_cost_it_little(serve: Serve, connect: Connect, database: str) -> None:
    session = connect()
    served = serve()
    with load(database):
        wait_until(lambda: session.execute(DONE).fetchone()[0] > 2 * RATE, 60)  # type: ignore[index]
        (some,) = session.execute("select job_id from pgqueue.jobs where queue = 'busy' limit 1").fetchone()  # type: ignore[misc]
        paths = [f"/dashboard{path}" for path in [*PAGES, f"/jobs/{some}"]]
        without, beside = [], []
        took: dict[str, list[float]] = {path: [] for path in paths}
        for path in paths:
            without.append(measured(session))
            page = Page(served, path)
            beside.append(measured(session))
            page.close()
            took[path] = page.took
    done, made = (sum(column) for column in zip(*without, strict=True))
    done_beside, made_beside = (sum(column) for column in zip(*beside, strict=True))
    for path, times in took.items():
        p50, p95 = percentile(times, 0.5), percentile(times, 0.95)
        print(f"\n{path[:30]}: {len(times)} times, p50 {p50:.3f} s, p95 {p95:.3f} s", end="")
    print(
        f"\n{done / len(paths):.0f} jobs/s done, {made / len(paths):.0f} enqueued;"
        f" beside a page {done_beside / done:.3f} and {made_beside / made:.3f} of that"
    )
    assert all(times for times in took.values())
    if idle_machine():
        assert max(percentile(times, 0.95) for times in took.values()) < 0.5
        assert done_beside / done >= 0.95
        assert made_beside / made >= 0.95
