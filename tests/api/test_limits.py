"""Back-pressure: hard and soft limits, rates, shedding; by REST and by SQL, and however many ask at once."""

import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from tests.api.conftest import Api, MakeApi, MakeLive
from tests.api.problems import problem
from tests.conftest import Connect

QUEUE = "insert into pgqueue.queues (name, {}) values ('q', {})"
FILL = "insert into pgqueue.jobs (job_type, queue, priority) select 'a', 'q', %s from generate_series(1, %s)"


def pending(session: psycopg.Connection[Any]) -> int:
    row = session.execute("select count(*) from pgqueue.jobs where status = 'pending' and queue = 'q'").fetchone()
    assert row
    return int(row[0])


def drain(session: psycopg.Connection[Any]) -> None:
    worker = uuid.uuid4()
    while session.execute(
        "with c as (select array_agg(job_id) ids, array_agg(attempts) n from pgqueue.claim(%(w)s, '{q}', 1000))"
        " select pgqueue.complete(%(w)s, ids, n, null) from c where ids is not null",
        {"w": worker},
    ).fetchall():
        pass


def sweep(session: psycopg.Connection[Any]) -> None:
    for _ in range(2):
        session.execute("select pgqueue.sweep()")


def test_a_full_queue_answers_503_and_takes_jobs_again_once_drained(
    api: Api, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(QUEUE.format("hard_limit", 3))
    statuses = [api.post("/jobs", json={"type": "a", "queue": "q"}).status_code for _ in range(5)]
    assert statuses == [201] * 3 + [503] * 2
    refused = api.post("/jobs", json={"type": "a", "queue": "q"})
    body = problem(refused, 503, "queue-full")
    assert refused.headers["retry-after"] == "1"
    assert body["retry_after"] == 1
    problem(api.post("/jobs/batch", json={"jobs": [{"type": "a", "queue": "q"}] * 2}), 503, "queue-full")
    assert api.post("/jobs", json={"type": "a", "queue": "elsewhere"}).status_code == 201
    with pytest.raises(psycopg.Error) as sql:
        connection.execute(FILL, [2, 1])
    assert sql.value.sqlstate == "PQ503"
    firing = {alert["alert"]: alert for alert in api.get("/stats").json()["alerts"]}
    assert firing["QueueFull"]["queue"] == "q"
    drain(connection)
    assert api.post("/jobs", json={"type": "a", "queue": "q"}).status_code == 201
    assert "QueueFull" not in {alert["alert"] for alert in api.get("/stats").json()["alerts"]}


@pytest.mark.parametrize("door", ["rest", "sql"])
def test_twenty_batches_at_once_pass_the_limit_by_one_at_most(
    door: str, live: MakeLive, connect: Connect, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(QUEUE.format("hard_limit", 100))
    served = live() if door == "rest" else None
    sessions = [connect() for _ in range(20)] if door == "sql" else []

    def attempt(n: int) -> bool:
        barrier.wait()
        if served:
            answer = served.http.post("/jobs/batch", json={"jobs": [{"type": "a", "queue": "q"}] * 50})
            assert answer.status_code in (201, 503), answer.text
            assert answer.status_code == 201 or answer.headers["retry-after"]
            return answer.status_code == 201
        try:
            sessions[n].execute(FILL, [2, 50])
        except psycopg.Error as error:
            if error.sqlstate != "PQ503":
                raise
            return False
        return True

    for _ in range(2):
        barrier = threading.Barrier(20)
        with ThreadPoolExecutor(20) as pool:
            accepted = sum(pool.map(attempt, range(20)))
        assert pending(connection) == accepted * 50
        assert 100 <= accepted * 50 <= 150
        drain(connection)


def test_above_the_soft_limit_producers_share_a_thousand_a_second(
    api: Api, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(QUEUE.format("soft_limit, hard_limit", "10, 1000000"))
    connection.execute(FILL, [2, 50])
    sweep(connection)
    # More than there is may be taken at once; it is paid back by waiting.
    assert api.post("/jobs/batch", json={"jobs": [{"type": "a", "queue": "q"}] * 3000}).status_code == 201
    refused = api.post("/jobs", json={"type": "a", "queue": "q"})
    body = problem(refused, 429, "rate-limited")
    assert 1 <= int(refused.headers["retry-after"]) <= 3
    assert 0 < body["retry_after"] <= 2.1
    with pytest.raises(psycopg.Error) as sql:
        connection.execute(FILL, [2, 1])
    assert sql.value.sqlstate == "PQ429"
    # Other queues go on, and so does this one once its time has come, or once it has been drained.
    assert api.post("/jobs", json={"type": "a", "queue": "elsewhere"}).status_code == 201
    time.sleep(body["retry_after"])
    assert api.post("/jobs", json={"type": "a", "queue": "q"}).status_code == 201
    assert api.post("/jobs/batch", json={"jobs": [{"type": "a", "queue": "q"}] * 9000}).status_code == 201
    problem(api.post("/jobs", json={"type": "a", "queue": "q"}), 429, "rate-limited")
    drain(connection)
    sweep(connection)
    assert api.post("/jobs", json={"type": "a", "queue": "q"}).status_code == 201


def test_the_rate_above_the_soft_limit_is_kept_by_many_at_once(
    live: MakeLive, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(QUEUE.format("soft_limit, hard_limit", "10, 1000000"))
    connection.execute(FILL, [2, 50])
    sweep(connection)
    one, other = live(), live()
    begun = time.monotonic()

    def hammer(n: int) -> int:
        accepted, server = 0, (one, other)[n % 2]
        while time.monotonic() - begun < 2:
            answer = server.http.post("/jobs/batch", json={"jobs": [{"type": "a", "queue": "q"}] * 100})
            assert answer.status_code in (201, 429), answer.text
            accepted += 100 * (answer.status_code == 201)
        return accepted

    with ThreadPoolExecutor(6) as pool:
        accepted = sum(pool.map(hammer, range(6)))
    seconds = time.monotonic() - begun
    # A second's worth to begin with, and what was taken together with others when there was just one left.
    assert accepted <= 1000 * (seconds + 1) + 800, (accepted, seconds)
    assert accepted >= 1000


def test_low_jobs_are_shed_above_the_soft_limit(api: Api, connection: psycopg.Connection[Any]) -> None:
    connection.execute(QUEUE.format("soft_limit, hard_limit, shed_low", "20, 1000, true"))
    low = [api.post("/jobs", json={"type": "a", "queue": "q", "priority": "low"}).json()["job_id"] for _ in range(5)]
    connection.execute(FILL, [2, 19])
    sweep(connection)
    assert api.post("/jobs", json={"type": "a", "queue": "q", "priority": "normal"}).status_code == 201
    refused = api.post("/jobs", json={"type": "a", "queue": "q", "priority": "low"})
    problem(refused, 503, "queue-full")
    assert refused.headers["retry-after"]
    states = [api.get(f"/jobs/{job_id}").json() for job_id in low]
    assert [job["status"] for job in states] == ["pending"] + ["dead_letter"] * 4
    assert "shed" in states[-1]["error"]
    assert pending(connection) == 21
    drain(connection)
    sweep(connection)
    assert api.post("/jobs", json={"type": "a", "queue": "q", "priority": "low"}).status_code == 201


def test_a_queue_is_held_to_its_rate(api: Api, connection: psycopg.Connection[Any]) -> None:
    connection.execute(QUEUE.format("rate_per_second", 1))
    answers = [api.post("/jobs", json={"type": "a", "queue": "q"}) for _ in range(12)]
    accepted = [one.status_code for one in answers].count(201)
    assert 1 <= accepted < 12
    refused = next(one for one in answers if one.status_code != 201)
    problem(refused, 429, "rate-limited")
    assert refused.headers["retry-after"] == "1"
    # It may find a place by now, and leaves none.
    with suppress(psycopg.Error):
        connection.execute(FILL, [2, 5])
    with pytest.raises(psycopg.Error) as sql:
        connection.execute(FILL, [2, 5])
    assert sql.value.sqlstate == "PQ429"


def test_a_key_is_held_to_its_rate_over_all_processes(make_api: MakeApi, connection: psycopg.Connection[Any]) -> None:
    from pgqueue.api.access import new_key

    key, digest, prefix = new_key()
    connection.execute("select pgqueue.create_key('slow', %s, %s, '{read}', 10, null)", [digest, prefix])
    one, other = make_api(maintenance=False), make_api(maintenance=False)
    headers = {"Authorization": f"Bearer {key}"}
    begun = time.monotonic()
    answers = [(one, other)[n % 2].get("/jobs", headers=headers) for n in range(60)]
    seconds = time.monotonic() - begun
    accepted = [answer.status_code for answer in answers].count(200)
    assert 10 <= accepted <= 10 * (seconds + 1) + 2
    refused = next(answer for answer in answers if answer.status_code != 200)
    body = problem(refused, 429, "rate-limited")
    assert (refused.headers["retry-after"], "10 requests a second" in body["detail"]) == ("1", True)
    time.sleep(1.1)
    assert one.get("/jobs", headers=headers).status_code == 200
