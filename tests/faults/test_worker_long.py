"""What workers keep over many deaths and many jobs. Workers are real processes; each test takes minutes."""

import os
import random
import signal
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg
import pytest

from pgqueue import App
from tests.python.running import eventually, make_app, stalling_proxy, worker_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Session = psycopg.Connection[Any]
LEASE, SWEEP = 2.0, 0.5
QUICK = {"PGQUEUE_LEASE": f"{LEASE}", "PGQUEUE_SWEEP_INTERVAL": f"{SWEEP}", "PGQUEUE_POLL_INTERVAL": "0.5"}
ENDED = "select count(*) from pgqueue.jobs where status in ('completed', 'dead_letter', 'cancelled')"
STARTS = "select job_id, count(*) from public.marks where what in ('begun', 'ran') group by 1"
#: Of owners that are dead, while nobody takes jobs.
LEFT = "select count(*) from pgqueue.jobs where status = 'processing'"


def count(connection: Session, statement: str) -> int:
    (number,) = connection.execute(statement).fetchone() or (0,)
    assert isinstance(number, int)
    return number


def statuses(connection: Session) -> dict[str, int]:
    return dict(connection.execute("select status, count(*) from pgqueue.jobs group by 1").fetchall())


def assert_starts_are_recorded(connection: Session) -> None:
    starts = dict(connection.execute(STARTS).fetchall())
    for job_id, attempts in connection.execute("select job_id, attempts from pgqueue.jobs").fetchall():
        assert starts.get(job_id, 0) <= attempts


@pytest.mark.parametrize(("rounds", "moment"), [(300, 0.06), (60, 2.0)])
def test_ends_at_any_moment_lose_and_double_nothing(
    app: App, database: str, connection: Session, rounds: int, moment: float
) -> None:
    """Each round: a worker starts, jobs are enqueued, and after a moment of chance it is killed or told to end."""
    chance = random.Random(11)
    if moment < 1:
        # Workers that live for a few milliseconds take the same jobs with them more often than a job is suffered to.
        connection.execute("insert into pgqueue.queues (name, max_lost) values ('default', 1000)")
    for _ in range(rounds):
        with worker_process(database, **QUICK) as worker:
            app.enqueue_many_sync([{"job_type": "marked"}] * 4 + [{"job_type": "slow", "payload": {"seconds": 0.05}}])
            time.sleep(chance.uniform(0, moment))
            worker.send(chance.choice([signal.SIGTERM, signal.SIGKILL]))
            worker.ended(15)
    # One that sweeps and has no task for these jobs: what the dead held must be free after lease and sweep.
    with worker_process(database, "tests.python.apps:newer", **QUICK):
        time.sleep(LEASE + SWEEP + 1)
        assert count(connection, LEFT) == 0
    with worker_process(database, **QUICK):
        eventually(lambda: count(connection, ENDED) == rounds * 5, within=120)
    assert statuses(connection) == {"completed": rounds * 5}
    assert_starts_are_recorded(connection)


def test_a_mixed_load_with_a_kill_every_five_seconds(app: App, database: str, connection: Session) -> None:
    until, chance, enqueued = time.monotonic() + 600, random.Random(13), 0
    ends: dict[Any, Any] = {}

    def look() -> None:
        """What has ended stays as it ended."""
        rows = connection.execute(
            "select job_id, status, attempts, worker_id, finished_at, result, error from pgqueue.jobs"
            " where finished_at is not null"
        ).fetchall()
        for job_id, *end in rows:
            assert ends.setdefault(job_id, end) == end
        assert len(rows) == len(ends)

    with ExitStack() as processes:
        workers = [processes.enter_context(worker_process(database, **QUICK)) for _ in range(3)]
        while time.monotonic() < until:
            killed_at = time.monotonic()
            killed = workers.pop(0)
            killed.send(signal.SIGKILL)
            killed.ended(5)
            workers.append(processes.enter_context(worker_process(database, wait=False, **QUICK)))
            look()
            while time.monotonic() < killed_at + 5:
                batch = [
                    {"job_type": "marked"},
                    {"job_type": "slow", "payload": {"seconds": chance.uniform(0, 3)}},
                    {"job_type": "raises", "payload": {"what": "100 KB"}, "max_retries": 1},
                    {"job_type": "marked", "delay": chance.uniform(0, 5)},
                    {"job_type": "thread", "payload": {"seconds": chance.uniform(0, 0.5)}},
                    {"job_type": "crunch", "payload": {"seconds": 0.02}},
                    {"job_type": "noop", "priority": chance.choice(["critical", "low"])},
                    {"job_type": "marked", "ordering_key": f"k{chance.randrange(5)}"},
                ] * 2
                enqueued += len(app.enqueue_many_sync(batch))
                time.sleep(0.5)
        eventually(lambda: count(connection, ENDED) == enqueued, within=300)
        look()
    ended = statuses(connection)
    assert ended.keys() == {"completed", "dead_letter"}
    assert sum(ended.values()) == len(ends) == enqueued
    assert_starts_are_recorded(connection)


def test_five_hundred_seconds_of_work_survive_three_kills(app: App, database: str, connection: Session) -> None:
    app.enqueue_many_sync([{"job_type": "slow", "payload": {"seconds": 1}, "max_retries": 0}] * 500)
    for _ in range(3):
        with worker_process(database, PGQUEUE_CONCURRENCY="10", **QUICK) as worker:
            time.sleep(8)
            worker.send(signal.SIGKILL)
    with worker_process(database, PGQUEUE_CONCURRENCY="10", **QUICK):
        eventually(lambda: count(connection, ENDED) == 500, within=300)
    assert statuses(connection) == {"completed": 500}
    assert_starts_are_recorded(connection)


@pytest.mark.parametrize("job_type", ["noop", "nothing"])
def test_memory_does_not_grow_with_jobs(app: App, database: str, connection: Session, job_type: str) -> None:
    unlimited = "insert into pgqueue.queues (name, soft_limit, hard_limit) values ('default', 1000000, 1000000)"
    connection.execute(unlimited)
    with worker_process(database, PGQUEUE_CONCURRENCY="50") as worker:

        def after(jobs: int) -> tuple[int, int, int]:
            """Resident memory in kB, file descriptors and threads once so many jobs have been completed."""
            for _ in range((jobs - count(connection, "select count(*) from pgqueue.jobs")) // 5000):
                app.enqueue_many_sync([{"job_type": job_type}] * 5000)
            eventually(lambda: count(connection, ENDED) == jobs, within=600)
            time.sleep(3)
            pid = worker.process.pid
            with open(f"/proc/{pid}/status") as status:
                lines = dict(line.split(":", 1) for line in status)
            return int(lines["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(lines["Threads"])

        early, late = after(50_000), after(200_000)
    print(f"after 50,000 jobs: {early}; after 200,000: {late} (kB, descriptors, threads)")
    assert late[0] <= early[0] * 1.05
    assert late[1:] == early[1:]


@contextmanager
def echo() -> Iterator[int]:
    """The port of a server that sends back what it gets."""

    class Echo(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(self.request.recv(1))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_no_cut_ends_a_worker(own_server: Any) -> None:
    """Its tasks open sockets all the while, which get the numbers of descriptors that libpq has closed."""
    chance = random.Random(17)
    enqueued = 0
    with (
        stalling_proxy(own_server.dsn) as (through, _),
        echo() as port,
        make_app(own_server.dsn) as app,
        worker_process(own_server.dsn, PGQUEUE_CONCURRENCY="20", **QUICK) as direct,
        worker_process(through, PGQUEUE_CONCURRENCY="20", **QUICK) as beyond,
    ):
        cut = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'pgqueue %'"
        for n in range(60):
            enqueued += len(app.enqueue_many_sync([{"job_type": "talks", "payload": {"port": port}}] * 100))
            time.sleep(chance.uniform(0.2, 1.0))
            match n % 10:
                case 9:
                    own_server.kill()
                    time.sleep(0.5)
                    own_server.start()
                case 4:
                    own_server.stop("immediate")
                    own_server.start()
                case _:
                    with psycopg.connect(own_server.dsn, autocommit=True) as session:
                        session.execute(cut)
            assert (direct.process.poll(), beyond.process.poll()) == (None, None)
        with psycopg.connect(own_server.dsn, autocommit=True) as session:
            eventually(lambda: count(session, ENDED) == enqueued, within=600)
            assert statuses(session) == {"completed": enqueued}
        for worker in (direct, beyond):
            worker.send(signal.SIGTERM)
            assert worker.ended(15) == 0
