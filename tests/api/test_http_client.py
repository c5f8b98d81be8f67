"""pgqueue.http.Client: the verbs, the errors, and what is sent again."""

import asyncio
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest

from pgqueue.client import Client as DatabaseClient
from pgqueue.errors import (
    ConfigError,
    DatabaseUnavailable,
    InvalidJob,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotFinished,
    QueueFull,
    RateLimitedError,
    WrongState,
)
from pgqueue.http import ApiRefused, Client
from tests.api.conftest import Live, MakeLive
from tests.api.test_events import Hand
from tests.conftest import Connect


@pytest.fixture
def remote(live: MakeLive) -> Live:
    """An API on a real port."""
    return live()


@pytest.fixture
def client(remote: Live) -> Iterator[Client]:
    """A client of it."""
    with Client(remote.url) as client:
        yield client


@pytest.fixture
def hand(connect: Connect) -> Hand:
    """A worker by hand."""
    return Hand(connect())


def test_a_job_is_enqueued_looked_at_and_waited_for(client: Client, hand: Hand) -> None:
    job = client.enqueue_sync(
        "echo",
        {"big": 1970670598291982290},
        queue="q",
        priority="high",
        delay=timedelta(seconds=0),
        timeout=5,
        max_retries=1,
    )
    assert (job.status, job.duplicate) == ("pending", False)
    row = client.job_sync(job)
    assert (row.payload, row.queue, row.priority, row.timeout_ms) == ({"big": 1970670598291982290}, "q", 1, 5000)
    with pytest.raises(NotFinished):
        client.result_sync(job, wait=0.2)
    assert "No worker" in client.why_sync(job)

    def finish() -> None:
        hand.claim()
        hand.session.execute(
            "select pgqueue.complete(%s, %s::uuid[], '{1}', array['{\"x\": 1}'::jsonb])",
            [hand.worker, [str(job.job_id)]],
        )

    timer = threading.Timer(0.3, finish)
    timer.start()
    assert client.result_sync(job, wait=20) == {"x": 1}
    timer.join()
    assert client.finished_job_sync(job).status == "completed"
    with pytest.raises(WrongState):
        client.cancel_sync(job)


def test_the_awaited_form_does_the_same(client: Client) -> None:
    async def use() -> None:
        jobs = await asyncio.gather(*(client.enqueue("echo", {"n": n}, idempotency_key=f"k{n % 3}") for n in range(3)))
        again = await client.enqueue("echo", {"n": 0}, idempotency_key="k0")
        assert again.job_id == jobs[0].job_id
        assert again.duplicate
        assert await client.cancel(jobs[1]) == "cancelled"
        with pytest.raises(JobCancelled):
            await client.result(jobs[1], wait=5)
        waits = [client.result(job, wait=1) for job in (jobs[0], jobs[2])]
        assert [type(end) for end in await asyncio.gather(*waits, return_exceptions=True)] == [NotFinished] * 2
        listed = await client.jobs(job_type="echo", limit=2)
        assert [row.job_id for row in listed] == sorted([job.job_id for job in jobs], reverse=True)[:2]
        assert len(await client.jobs(statuses=["cancelled", "pending"], before=listed[0])) == 2

    asyncio.run(use())


def test_many_at_once(client: Client) -> None:
    answers = client.enqueue_many_sync(
        [{"type": "a", "payload": {"n": n}, "idempotency_key": f"k{n}"} for n in range(500)]
    )
    assert len({answer.job_id for answer in answers}) == 500
    again = client.enqueue_many_sync(
        {"job_type": "a", "payload": {"n": n}, "idempotency_key": f"k{n}"} for n in range(500)
    )
    assert [answer.job_id for answer in again] == [answer.job_id for answer in answers]
    assert all(answer.duplicate for answer in again)


def test_problems_become_the_errors_of_the_other_client(client: Client, hand: Hand) -> None:
    nobody = uuid.uuid4()
    with pytest.raises(JobNotFound):
        client.job_sync(nobody)
    with pytest.raises(InvalidJob):
        client.enqueue_sync("")
    with pytest.raises(InvalidPayload):
        client.enqueue_sync("a", {"x": float("nan")})
    with pytest.raises(InvalidJob):
        client.enqueue_sync("a", job_id=nobody)
    with pytest.raises(InvalidJob):
        client.enqueue_sync("a", scheduled_at=datetime.now(UTC).replace(tzinfo=None))
    client.enqueue_sync("a", {"x": 1}, idempotency_key="k")
    with pytest.raises(InvalidJob, match="not this one"):
        client.enqueue_sync("a", {"x": 2}, idempotency_key="k")
    hand.session.execute("insert into pgqueue.queues (name, hard_limit) values ('full', 0)")
    with Client(client._wire.url, tries=1) as hasty, pytest.raises(QueueFull) as full:
        hasty.enqueue_sync("a", queue="full")
    assert full.value.retry_after == 1
    hand.claim()
    dead = client.enqueue_sync("dead", queue="d")
    hand.claim()
    hand.fail(str(dead.job_id), retryable=False)
    with pytest.raises(JobFailed):
        client.result_sync(dead)
    assert client.retry_sync(dead).status == "pending"
    assert client.retry_dead_letters_sync(job_type="dead", since=datetime(2020, 1, 1, tzinfo=UTC)) == 0
    assert client.discard_dead_letters_sync() == 0
    assert (client.pause_sync("q x?"), client.resume_sync("q x?"), client.resume_sync("none")) == (True, True, False)
    with pytest.raises(ApiRefused) as refused:
        client.call_sync("PUT", "/jobs")
    assert refused.value.status == 405
    with pytest.raises(ConfigError):
        Client("localhost:8080")


def test_it_has_the_verbs_of_the_other_client() -> None:
    def verbs(client: type[Any]) -> set[str]:
        return {name for name in vars(client) if f"{name}_sync" in vars(client)}

    assert verbs(DatabaseClient) - verbs(Client) == {"queue_stats", "metrics", "schema_version"}


def test_what_operators_look_at(client: Client, database: str, hand: Hand) -> None:
    dead = client.enqueue_sync("dead", queue="d")
    waiting = client.enqueue_sync("a", queue="q")
    with pytest.raises(WrongState):
        client.discard_sync(waiting)
    # One worker is fewer than there should be.
    client.call_sync("POST", "/leases/claim", {"worker_id": str(hand.worker), "job_types": ["none"]})
    hand.session.execute("select pgqueue.sweep('alerts')")
    with DatabaseClient(database) as direct:
        for worker, other in zip(client.workers_sync(), direct.workers_sync(), strict=True):
            assert worker["worker_id"] == other["worker_id"] == str(hand.worker)
        assert client.worker_load_sync() == direct.worker_load_sync()
        assert client.worker_load_sync(["q", "none"]).pending == 1
        alerts = [(alert["alert"], alert["queue"]) for alert in client.alerts_sync()]
        assert alerts == [(alert["alert"], alert["queue"]) for alert in direct.alerts_sync()]
        assert ("WorkerCountLow", None) in alerts
    hand.claim()
    hand.fail(str(dead.job_id), retryable=False)
    assert client.discard_sync(dead) == "discarded"
    with pytest.raises(JobNotFound):
        client.discard_sync(dead)


def test_events_are_followed_to_the_end(client: Client, hand: Hand) -> None:
    job = client.enqueue_sync("a")
    seen = []
    for event in client.events_sync(job):
        seen.append(event["event"])
        if event["event"] == "job.queued":
            hand.claim()
        elif event["event"] == "job.started":
            hand.complete(str(job.job_id))
    assert seen == ["job.queued", "job.started", "job.completed"]


def test_a_worker_over_it(client: Client) -> None:
    job = client.enqueue_sync("a", {"n": 1})
    worker = str(uuid.uuid4())
    [claimed] = client.call_sync("POST", "/leases/claim", {"worker_id": worker, "wait_ms": 1000})["jobs"]
    held = {"job_id": claimed["job_id"], "attempt": claimed["attempts"], "result": claimed["payload"]}
    assert client.call_sync("POST", "/leases/complete", {"worker_id": worker, "jobs": [held]})["lost"] == []
    assert client.result_sync(job) == {"n": 1}


class Flaky:
    """An API that breaks as told: 'drop' hangs up after the request, 503 and 429 refuse it, 'ok' takes it."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                answer = outer.answers.pop(0)
                if answer == "drop":
                    self.close_connection = True
                    self.connection.close()
                    return
                body = b'{"type": "urn:pgqueue:problem:x", "detail": "no"}'
                if answer == "ok":
                    body = JOB
                self.send_response(201 if answer == "ok" else answer)
                self.send_header("Content-Length", str(len(body)))
                if answer in (429, 503):
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def __enter__(self) -> "Flaky":
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


JOB = (
    b'{"job_id": "01a22800-0000-7000-8000-000000000000", "seq": 1, "queue": "q", "job_type": "a", "priority": 2,'
    b' "status": "pending", "attempts": 0, "max_retries": 3, "lost": 0, "shard": 1,'
    b' "created_at": "2030-01-01T00:00:00Z", "updated_at": "2030-01-01T00:00:00Z", "payload": {}}'
)


def test_what_broke_is_sent_again_with_the_same_key() -> None:
    with Flaky("drop", 503, 429, "drop", "ok") as flaky, Client(flaky.url) as client:
        assert client.enqueue_sync("a").status == "pending"
        assert len(flaky.bodies) == 5
        assert len(set(flaky.bodies)) == 1
        assert b"idempotency_key" in flaky.bodies[0]


def test_what_may_not_be_sent_twice_is_not() -> None:
    with Flaky("drop", "ok") as flaky, Client(flaky.url) as client:
        with pytest.raises(DatabaseUnavailable):
            client.call_sync("POST", "/leases/claim", {"worker_id": "x"})
        assert len(flaky.bodies) == 1
    with Flaky(429, "ok") as flaky, Client(flaky.url) as client:
        # What was refused was not done.
        assert client.call_sync("POST", "/leases/claim", {"worker_id": "x"})["status"] == "pending"
    with Flaky(429, 429) as flaky, Client(flaky.url, tries=2) as client, pytest.raises((RateLimitedError, ApiRefused)):
        client.enqueue_sync("a")
    with Client("http://127.0.0.1:1", tries=2) as client, pytest.raises(DatabaseUnavailable):
        client.enqueue_sync("a")


def test_an_api_that_comes_back_is_found_again(
    remote: Live, client: Client, connection: psycopg.Connection[Any]
) -> None:
    client.enqueue_sync("a")
    assert len(client._wire._idle) == 1
    # The server hangs up on what was idle.
    client._wire._idle[0].sock.shutdown(1)
    assert client.enqueue_sync("a").status == "pending"
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (2,)
    assert remote.http.get("/health/live").status_code == 200
