"""What operators and producers do to a queue at work: cancel, retry, pause, odd names, large values, long sequences."""

import json
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue import App
from pgqueue.errors import WrongState
from tests.api.conftest import Served, parse_events
from tests.meet import running_time
from tests.python.running import eventually, marks, worker_process

Session = psycopg.Connection[Any]
QUICK = {"PGQUEUE_LEASE": "3", "PGQUEUE_SWEEP_INTERVAL": "0.3", "PGQUEUE_POLL_INTERVAL": "0.5"}
ENDED = "select count(*) from pgqueue.jobs where status in ('completed', 'dead_letter', 'cancelled')"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def api(database: str) -> Iterator[Served]:
    served = Served(database, env=QUICK)
    yield served
    served.close()


def count(connection: Session, statement: str = ENDED) -> int:
    row = connection.execute(statement).fetchone()
    assert row is not None
    return int(row[0])


def begun(connection: Session) -> Counter[Any]:
    return Counter(job_id for job_id, _, what in marks(connection) if what in ("begun", "ran"))


def test_cancels_around_the_moment_of_start_never_lie(app: App, database: str, connection: Session) -> None:
    chance = random.Random(26)
    answers: dict[Any, str] = {}

    def one(_: int) -> None:
        job = app.enqueue_sync("slow", {"seconds": 0.01})
        time.sleep(chance.uniform(0, 0.02))
        try:
            answers[job.job_id] = app.cancel_sync(job)
        except WrongState:
            answers[job.job_id] = "too late"
            assert app.job_sync(job).status in ("completed", "cancelled")

    with worker_process(database, **QUICK), ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(500)))
        eventually(lambda: count(connection) == 500, 60)
    rows = dict(connection.execute("select job_id, status::text from pgqueue.jobs").fetchall())
    assert Counter(rows.values()).keys() <= {"cancelled", "completed"}
    assert len(rows) == 500
    started = begun(connection)
    for job_id, answer in answers.items():
        if answer == "cancelled":
            assert (rows[job_id], started[job_id]) == ("cancelled", 0)
        elif answer == "too late":
            assert rows[job_id] == "completed"
        else:
            assert rows[job_id] == "cancelled"
    assert len(set(answers.values())) > 1


def test_nothing_starts_in_a_paused_queue_and_all_ends_after_it(
    app: App, database: str, connection: Session, api: Served
) -> None:
    later = {"base_delay_ms": 4000, "jitter": False}
    with worker_process(database, PGQUEUE_CONCURRENCY="1", **QUICK) as first:
        jobs = [
            app.enqueue_sync("ordered", {"key": "k", "number": n, "fails": True}, retry_policy=later) for n in range(3)
        ]
        eventually(lambda: all(app.job_sync(job).status == "failed" for job in jobs))
        running = app.enqueue_sync("slow", {"seconds": 3})
        eventually(lambda: begun(connection)[running.job_id])
        waiting = app.enqueue_many_sync([{"job_type": "marked"}] * 11)
        jobs += [running, *waiting, *app.enqueue_many_sync([{"job_type": "marked", "delay": 2}] * 5)]
        # In one transaction, since the worker may have taken all that it can see.
        with connection.transaction():
            own = connection.execute(
                "insert into pgqueue.jobs (job_type) values ('marked') returning job_id"
            ).fetchall()
            lost = connection.execute(
                "select job_id from pgqueue.claim(%s, array['default'], 1, interval '1 second')", [uuid.uuid4()]
            ).fetchall()
        ((unlucky,),) = lost
        jobs.append(own[0][0])
        assert app.pause_sync("default") is True
        before = len(marks(connection))
        assert app.finished_job_sync(running, wait=20).status == "completed"
        first.send(signal.SIGTERM)
        assert first.ended(15) == 0
    with worker_process(database, **QUICK):
        taken = api.http.post("/jobs", json={"type": "marked"})
        assert taken.status_code == 201
        time.sleep(8)
        # The running one has told its end.
        assert len(marks(connection)) == before + 1
        assert count(connection, "select count(*) from pgqueue.jobs where status = 'processing'") == 0
        assert count(connection) == 1
        assert app.resume_sync("default") is True
        rows = [app.finished_job_sync(job, wait=30) for job in [*jobs, taken.json()["job_id"]]]
    assert {row.status for row in rows} == {"completed"}
    assert app.job_sync(unlucky).lost == 1


def test_no_priority_starves_behind_the_others(app: App, database: str, connection: Session) -> None:
    for priority in (0, 1, 2):
        app.enqueue_many_sync([{"job_type": "noop", "priority": priority}] * 800)
    app.enqueue_many_sync([{"job_type": "noop", "priority": 3}] * 20)
    with worker_process(database, **QUICK):
        eventually(lambda: count(connection) == 2420, 60)
    rows = connection.execute("select priority, seq from pgqueue.jobs order by started_at, priority, seq").fetchall()
    order = [priority for priority, _ in rows]
    last_low = len(order) - order[::-1].index(3)
    # Half of its share of one in fifteen, and what one claim takes.
    assert last_low <= 20 * 15 * 2 + 500
    shares = Counter(order[:600])
    assert shares[0] == max(shares.values())
    for priority in range(4):
        seqs = [seq for one, seq in rows if one == priority]
        assert all(earlier < later for earlier, later in pairwise(seqs))


def test_large_values_travel_whole_and_no_notice_carries_them(
    app: App, database: str, connection: Session, api: Served, connect: Any
) -> None:
    sizes = {"7.9 KB": "x" * 7900, "8 KB": "x" * 8000, "1 MB": "x" * 1_000_000, "two bytes": "\u00e9" * 4000}
    listening = connect()
    listening.execute("listen pgqueue_status")
    with worker_process(database, **QUICK), httpx.Client(base_url=api.url, timeout=30) as watching:
        with watching.stream("GET", "/events") as stream:
            events = parse_events(stream.iter_lines())
            assert next(events)["event"] in ("state", "ping")
            jobs = {}
            for name, text in sizes.items():
                answer = api.http.post("/jobs", json={"type": "carries", "payload": {"text": text}})
                assert answer.status_code == 201, (name, answer.text[:200])
                jobs[name] = answer.json()["job_id"]
            batch = api.http.post("/jobs/batch", json={"jobs": [{"type": "noop"}] * 2000})
            assert batch.status_code == 201
            broken = api.http.post("/jobs", json={"type": "raises", "payload": {"what": "10 MB"}, "max_retries": 0})
            failed = broken.json()["job_id"]
            seen: set[tuple[str, str]] = set()
            while ("job.dead_letter", failed) not in seen or any(
                ("job.completed", job) not in seen for job in jobs.values()
            ):
                event = next(events)
                data = event.get("data") or {}
                assert len(json.dumps(data)) < 1024 or event["event"] == "state"
                seen.add((event["event"], data.get("job_id", "")))
        rows = {name: app.finished_job_sync(job, wait=30) for name, job in jobs.items()}
        eventually(lambda: count(connection) == 2000 + len(jobs) + 1, 60)
    for name, row in rows.items():
        assert (row.status, row.payload, row.progress) == ("completed", {"text": sizes[name]}, {"text": sizes[name]})
    began = running_time()
    answer = api.http.get(f"/jobs/{failed}")
    assert answer.json()["status"] == "dead_letter"
    assert running_time() - began < 5
    assert len(answer.content) < 100_000
    notices = list(listening.notifies(timeout=0.1))
    assert notices
    assert max(len(notice.payload.encode()) for notice in notices) < 8000


NAMES = ["q" * 63, "MyQueue", "a b;c'd\"e", "\N{ROCKET}" * 30, "%s %(x)s", "$1"]


def test_workers_of_queues_with_odd_names_are_woken(app: App, database: str, connection: Session, api: Served) -> None:
    for name in ("q" * 64, "", "\N{ROCKET}" * 64):
        answer = api.http.post("/jobs", json={"type": "noop", "queue": name})
        assert (answer.status_code, "queue" in answer.text) == (422, True)
    variables = {**QUICK, "PGQUEUE_POLL_INTERVAL": "60"}
    with worker_process(database, call=f"app.run_worker(queues={NAMES!r})", **variables):
        # It sleeps until it is woken.
        eventually(lambda: count(connection, "select count(*) from pgqueue.waiting") > 0)
        time.sleep(2)
        for name in NAMES:
            answer = api.http.post("/jobs", json={"type": "noop", "queue": name})
            assert answer.status_code == 201
            row = app.finished_job_sync(answer.json()["job_id"], wait=20)
            assert row.started_at is not None
            assert row.started_at - row.created_at < timedelta(seconds=10)


def test_bulk_verbs_meet_each_other_and_workers_without_errors(
    app: App, database: str, connection: Session, api: Served
) -> None:
    def post(path: str, body: Any = None) -> int:
        with httpx.Client(base_url=api.url, timeout=60) as client:
            return client.post(path, json=body).status_code

    with worker_process(database, **QUICK), ThreadPoolExecutor(6) as pool:
        for _ in range(8):
            rows = app.enqueue_many_sync(
                [{"job_type": "returns", "payload": {"what": "set"}, "max_retries": 0}] * 150
                + [{"job_type": "noop"}] * 150
                + [{"job_type": "noop", "delay": 0.1}] * 100
            )
            ids = [str(row.job_id) for row in rows]
            calls = [pool.submit(post, "/admin/jobs/cancel", {"job_ids": order}) for order in (ids, ids[::-1])]
            calls += [pool.submit(post, "/admin/dlq/retry-all") for _ in range(2)]
            calls += [pool.submit(post, "/admin/dlq/discard-all?filter=job_type:never") for _ in range(2)]
            assert {call.result() for call in calls} == {200}
        eventually(lambda: count(connection) == 8 * 400, 60)


def test_everything_works_past_two_to_the_31st(app: App, database: str, connection: Session, api: Served) -> None:
    names = connection.execute(
        "select schemaname, sequencename from pg_sequences where schemaname = 'pgqueue'"
    ).fetchall()
    for schema_name, name in names:
        connection.execute(
            "select setval(format('%%I.%%I', %s::text, %s::text)::regclass, 2147483646)", [schema_name, name]
        )
    assert names
    with worker_process(database, **QUICK):
        posted = [api.http.post("/jobs", json={"type": "marked"}).json() for _ in range(5)]
        rows = [app.finished_job_sync(job["job_id"], wait=20) for job in posted]
        assert {row.status for row in rows} == {"completed"}
        again = app.enqueue_sync("ordered", {"key": "k", "number": 1, "fails": True}, ordering_key="k")
        assert app.finished_job_sync(again, wait=20).attempts == 2
        dead = app.enqueue_sync("returns", {"what": "set"}, max_retries=0)
        assert app.finished_job_sync(dead, wait=20).status == "dead_letter"
        assert api.http.post(f"/admin/jobs/{dead.job_id}/retry").status_code == 200
        assert app.finished_job_sync(dead, wait=20).attempts == 2
        later = api.http.post("/jobs", json={"type": "noop", "delay_ms": 600_000, "idempotency_key": "k"}).json()
        assert (
            api.http.post("/jobs", json={"type": "noop", "delay_ms": 600_000, "idempotency_key": "k"}).status_code
            == 200
        )
        assert api.http.post(f"/jobs/{later['job_id']}/cancel").status_code == 200
        put = api.http.put("/schedules/tick", json={"cron": "* * * * *", "job_type": "marked"})
        assert put.status_code in (200, 201), put.text
        connection.execute("update pgqueue.schedules set next_run_at = pgqueue.clock()")
        fired = "select count(*) from pgqueue.jobs where producer_id = 'schedule:tick' and status = 'completed'"
        eventually(lambda: count(connection, fired), 40)
        assert app.pause_sync("default")
        assert app.resume_sync("default")
        with api.http.stream("GET", f"/jobs/{posted[0]['job_id']}/events") as events:
            assert "job.completed" in events.read().decode()
        for path in ("/jobs", "/queues", "/workers", "/stats", "/schedules", "/admin/dlq", "/metrics"):
            assert api.http.get(path).status_code == 200, path
    assert count(connection, "select min(seq) from pgqueue.jobs where seq is not null") > 2_147_483_646
    assert count(connection, "select max(audit_id) from pgqueue.audit") > 2_147_483_647
