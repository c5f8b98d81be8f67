"""Metrics: what workers count, how scrapes share a query, and StatsD."""

import asyncio
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from pgqueue import App, Job, Retry, Snooze, calls
from pgqueue.client import Client
from pgqueue.connections import Link
from pgqueue.counts import LIMITS, Counts, Sender, gained
from pgqueue.errors import ConfigError, DatabaseUnavailable
from pgqueue.metrics import MetricsPage, PgqueueCollector, serve
from pgqueue.settings import Settings
from pgqueue.statsd import address, of_counts, packets
from tests.meet import running_time
from tests.python.running import make_app, worker_of

Connection = psycopg.Connection[Any]


@pytest.fixture
def client(database: str) -> Iterator[Client]:
    with Client(settings=Settings.load(env={}, dsn=database)) as client:
        yield client


@pytest.fixture
def app(database: str) -> Iterator[App]:
    """An app with a task for each outcome."""
    with make_app(database, sweep_interval=0.05) as app:

        @app.task("works")
        async def works(job: Job, seconds: float = 0.0) -> None:
            await asyncio.sleep(seconds)

        @app.task("breaks", max_retries=1, retry_policy={"base_delay_ms": 1})
        async def breaks(job: Job) -> None:
            raise ValueError("no")

        @app.task("comes_back")
        async def comes_back(job: Job) -> None:
            if job.attempt == 1:
                raise Snooze(0.01)
            if job.attempt == 2:
                raise Retry("again", in_=0.01)

        yield app


def values(connection: Connection, column: str) -> dict[str, int]:
    rows = connection.execute(f"select job_type, sum({column}) from pgqueue.counters group by job_type").fetchall()
    return {job_type: int(number) for job_type, number in rows if number}


# Counting -------------------------------------------------------------------------------------------------------------


def test_a_worker_counts_how_attempts_end(app: App, connection: Connection) -> None:
    with worker_of(app):
        jobs = [app.enqueue_sync("works") for _ in range(20)]
        jobs += [app.enqueue_sync("works", {"seconds": 0.06}) for _ in range(3)]
        jobs += [app.enqueue_sync("breaks") for _ in range(2)] + [app.enqueue_sync("comes_back")]
        for job in jobs:
            app.finished_job_sync(job, wait=30)
    assert values(connection, "completed") == {"works": 23, "comes_back": 1}
    assert values(connection, "failed") == {"breaks": 2, "comes_back": 1}
    assert values(connection, "dead_letter") == {"breaks": 2}
    assert values(connection, "snoozed") == {"comes_back": 1}
    durations, waits = connection.execute(
        "select durations, waits from pgqueue.counters where job_type = 'works'"
    ).fetchone() or ([], [])
    assert sum(durations) == sum(waits) == 23
    # 60 ms are between 50 and 100.
    assert sum(durations[4:]) >= 3
    # Waits are of first attempts.
    assert values(connection, "(select sum(w) from unnest(waits) w)") == {"works": 23, "breaks": 2, "comes_back": 1}


def test_a_worker_tells_how_busy_it_is(app: App, connection: Connection) -> None:
    def utilization() -> float:
        row = connection.execute("select max(utilization) from pgqueue.workers").fetchone()
        return float(row[0] or 0) if row else 0.0

    with worker_of(app, concurrency=2):
        jobs = [app.enqueue_sync("works", {"seconds": 8}) for _ in range(1)]
        deadline = time.monotonic() + 20
        while not 0.3 < utilization() < 0.7 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 0.3 < utilization() < 0.7
        app.finished_job_sync(jobs[0], wait=30)


def test_counting_costs_microseconds() -> None:
    counts = Counts()
    begun = time.perf_counter()
    for _ in range(20_000):
        counts.ended(("default", "t", 2), "completed", 0.003, 0.01)
    assert (time.perf_counter() - begun) / 20_000 < 20e-6


def test_copies_taken_while_it_counts_add_up() -> None:
    counts = Counts()

    def work() -> None:
        for number in range(20_000):
            counts.ended(("default", f"t{number % 50}", 2), "completed", 0.003, None)

    thread = threading.Thread(target=work)
    thread.start()
    copies = [counts.copy() for _ in range(200)]
    thread.join()
    copies.append(counts.copy())
    assert sum(count.ended for count in copies[-1].values()) == 20_000
    total = 0
    for earlier, later in pairwise([{}, *copies]):
        found = gained(later, earlier).values()
        assert all(count.ended >= 0 for count in found)
        total += sum(count.ended for count in found)
    assert total == 20_000


def test_names_are_bounded() -> None:
    counts = Counts()
    for number in range(5000):
        counts.ended((f"queue {number}", f"type {number}", 1), "completed", 0.1, None)
    found = counts.copy()
    assert len(found) <= 401
    assert sum(count.ended for count in found.values()) == 5000
    assert found["_OTHER", "_OTHER", 1].ended >= 4600


def test_a_batch_whose_answer_is_lost_counts_once(database: str, connection: Connection) -> None:
    """The link breaks after the server has taken the batch, before the answer is read."""
    worker_id = uuid4()
    connection.execute("select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, '{t}', null, 1, '1')", (worker_id,))
    counts = Counts()
    sender = Sender(counts, worker_id, lambda: 0.0, 1)

    class Breaking(Link):
        breaks = True

        async def call(self, call: Any, **parameters: object) -> Any:
            answer = await super().call(call, **parameters)
            if self.breaks:
                self.close()
                raise DatabaseUnavailable("gone")
            return answer

    async def main() -> None:
        link = Breaking(database, Settings.load(env={}, dsn=database), "test")
        counts.ended(("default", "t", 2), "completed", 0.1, None)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await sender.flush(link)
            counts.ended(("default", "t", 2), "completed", 0.1, None)
        link.breaks = False
        assert await sender.flush(link)
        assert await sender.flush(link)
        link.close()

    asyncio.run(main())
    assert values(connection, "completed") == {"t": 3}


# Pages ----------------------------------------------------------------------------------------------------------------


def test_many_scrapes_are_one_query(client: Client) -> None:
    asked = 0

    async def fetch() -> list[calls.Sample]:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return await client.metrics()

    async def main() -> list[tuple[bytes, str]]:
        page = MetricsPage(fetch)
        return [
            *await asyncio.gather(*(page.render() for _ in range(50))),
            await page.render("application/openmetrics-text; version=1.0.0"),
        ]

    *pages, (open_page, open_type) = asyncio.run(main())
    assert asked == 1
    assert len(set(pages)) == 1
    assert pages[0][1].startswith("text/plain; version=0.0.4")
    names = {family.name for family in text_string_to_metric_families(pages[0][0].decode())}
    assert {"pgqueue_workers", "pgqueue_collector_up", "pgqueue_jobs"} <= names
    assert open_type.startswith("application/openmetrics-text")
    assert {family.name for family in parse_openmetrics(open_page.decode())} >= {"pgqueue_workers"}


def test_the_page_says_what_happened(app: App, client: Client) -> None:
    with worker_of(app):
        for _ in range(4):
            app.finished_job_sync(app.enqueue_sync("works"), wait=20)
        app.finished_job_sync(app.enqueue_sync("breaks"), wait=20)
    registry = CollectorRegistry()
    registry.register(PgqueueCollector(client.metrics_sync))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"queue": "default", **labels})

    works = {"job_type": "works", "priority": "normal"}
    assert value("pgqueue_jobs_processed_total", outcome="completed", **works) == 4
    assert value("pgqueue_jobs_failed_total", job_type="breaks", priority="normal") == 2
    assert value("pgqueue_job_duration_seconds_count", **works) == 4
    assert value("pgqueue_job_duration_seconds_bucket", le="+Inf", **works) == 4
    assert value("pgqueue_job_wait_seconds_count", **works) == 4
    assert value("pgqueue_dead_letters") == 1
    assert value("pgqueue_queue_depth", priority="normal") == 0
    assert b"job_id" not in generate_latest(registry)


def test_a_database_that_does_not_answer_is_said_to_be_down(database: str) -> None:
    settings = Settings.load(env={}, dsn="host=127.0.0.1 port=1 dbname=none", connect_timeout=1.0)
    with Client(settings=settings) as away:
        page, _ = asyncio.run(_render(away))
        assert b"pgqueue_collector_up 0.0" in page
        assert b"pgqueue_workers" not in page


async def _render(client: Client) -> tuple[bytes, str]:
    return await MetricsPage(client.metrics).render()


def test_a_port_of_its_own(client: Client) -> None:
    server, port = serve(client.metrics_sync, port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert b"pgqueue_collector_up 1.0" in answer.read()
    finally:
        server.shutdown()
        server.server_close()


# StatsD ---------------------------------------------------------------------------------------------------------------


@contextmanager
def statsd_server() -> Iterator[tuple[str, list[str]]]:
    """A StatsD address, and the lines that came to it."""
    lines: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        sock.settimeout(0.1)
        ended = threading.Event()

        def listen() -> None:
            while True:
                try:
                    lines.extend(sock.recv(65536).decode().split("\n"))
                except TimeoutError:
                    # All that was sent is here: it did not leave the machine.
                    if ended.is_set():
                        return

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield f"127.0.0.1:{sock.getsockname()[1]}", lines
        finally:
            ended.set()
            thread.join()


def test_statsd_gets_the_names_of_the_seed(database: str) -> None:
    with statsd_server() as (target, lines), make_app(database, statsd=target, sweep_interval=0.05) as app:

        @app.task("t")
        async def t(job: Job) -> None:
            await asyncio.sleep(0.02)

        with worker_of(app):
            for job in [app.enqueue_sync("t") for _ in range(5)]:
                app.finished_job_sync(job, wait=20)
    sent: dict[str, list[str]] = {}
    for line in lines:
        name, _, rest = line.partition(":")
        sent.setdefault(name, []).append(rest)
    assert set(sent) == {
        "jobs.submitted", "jobs.processed", "jobs.failed", "jobs.in_dlq", "queue.depth", "queue.age_seconds",
        "worker.processing_time_ms", "worker.utilization", "worker.count",
    }  # fmt: skip
    assert sum(int(rest.split("|")[0]) for rest in sent["jobs.processed"]) == 5
    times = [float(rest.split("|")[0]) for rest in sent["worker.processing_time_ms"]]
    assert len(times) == 5
    assert all(10 <= time_ms <= 250 for time_ms in times)
    assert all(rest.endswith("|g") for rest in sent["queue.depth"])


@pytest.mark.parametrize("target", ["does-not-exist.invalid:8125", "192.0.2.1:8125", "127.0.0.1:9"])
def test_a_dead_statsd_host_changes_nothing(database: str, target: str) -> None:
    with make_app(database, statsd=target, sweep_interval=0.05) as app:

        @app.task("t")
        async def t(job: Job) -> None:
            pass

        jobs = app.enqueue_many_sync([{"job_type": "t"} for _ in range(500)])
        begun = running_time()
        with worker_of(app) as worker:
            for job in jobs:
                app.finished_job_sync(job, wait=30)
            assert running_time() - begun < 15
            assert "statsd" not in worker.faults()


def test_names_are_not_looked_up_per_event(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    real = socket.getaddrinfo

    def counted(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host == "does-not-exist.invalid":
            asked.append(host)
        return real(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", counted)
    test_a_dead_statsd_host_changes_nothing(database, "does-not-exist.invalid:8125")
    assert len(asked) == 1


def test_lines_of_many_attempts_are_few() -> None:
    counts = Counts()
    for number in range(50_000):
        counts.ended(("default", "t", 2), "completed" if number % 10 else "failed", 0.3, None)
    lines = list(of_counts(counts.copy().values()))
    assert lines[:2] == ["jobs.processed:50000|c", "jobs.failed:5000|c"]
    assert 150 < len(lines) < 250
    assert all(line.endswith("|@0.004000") for line in lines[2:])
    assert all(250 <= float(line.split(":")[1].split("|")[0]) <= 500 for line in lines[2:])
    assert all(len(packet) <= 1400 for packet in packets(lines))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("localhost:9125", ("localhost", 9125)), ("statsd", ("statsd", 8125)), ("[::1]:99", ("::1", 99))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert address(text) == expected


@pytest.mark.parametrize("text", [":1", "host:0", "host:x", "host:70000"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="PGQUEUE_STATSD"):
        address(text)


def test_limits_are_ascending() -> None:
    assert list(LIMITS) == sorted(set(LIMITS))
