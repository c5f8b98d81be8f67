"""/leases: a worker over HTTP, its fences, and its long poll."""

import threading
import time
import uuid
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.settings import Settings
from tests.api.conftest import Api, Live, MakeLive
from tests.api.problems import problem
from tests.conftest import Connect
from tests.meet import aside, wait_until
from tests.sql.test_2_notices import Ear


@pytest.fixture
def worker() -> str:
    """The id of a worker's process."""
    return str(uuid.uuid4())


def enqueue(api: Api, count: int = 1, **options: Any) -> list[str]:
    return [
        api.post("/jobs", json={"type": "a", "payload": {"n": n}, **options}).json()["job_id"] for n in range(count)
    ]


def claim(api: Api, worker: str, **options: Any) -> list[dict[str, Any]]:
    answer = api.post("/leases/claim", json={"worker_id": worker, **options})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["jobs"])


def held(*jobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"job_id": job["job_id"], "attempt": job["attempts"]} for job in jobs]


def test_jobs_are_claimed_and_completed(api: Api, worker: str) -> None:
    ids = enqueue(api, 3)
    jobs = claim(api, worker, max_jobs=2)
    assert [job["job_id"] for job in jobs] == ids[:2]
    assert [(job["status"], job["attempts"], job["worker_id"]) for job in jobs] == [("processing", 1, worker)] * 2
    done = api.post(
        "/leases/complete",
        json={
            "worker_id": worker,
            "jobs": [{**held(jobs[0])[0], "result": {"big": 1970670598291982290}}, *held(jobs[1])],
        },
    ).json()
    assert (sorted(done["accepted"]), done["lost"]) == (sorted(ids[:2]), [])
    assert api.get(f"/jobs/{ids[0]}/result").json()["result"] == {"big": 1970670598291982290}
    again = api.post("/leases/complete", json={"worker_id": worker, "jobs": held(*jobs)}).json()
    assert (again["accepted"], sorted(again["lost"])) == ([], sorted(ids[:2]))


def test_a_zombie_gets_nothing_accepted(api: Api, worker: str, connection: psycopg.Connection[Any]) -> None:
    [job_id] = enqueue(api)
    [job] = claim(api, worker, lease_ms=100)
    time.sleep(0.15)
    connection.execute("select pgqueue.sweep()")
    [again] = claim(api, str(uuid.uuid4()))
    assert (again["job_id"], again["attempts"], again["lost"]) == (job_id, 2, 1)
    body = {"worker_id": worker, "jobs": held(job)}
    assert api.post("/leases/heartbeat", json=body).json() == {"lost": held(job), "cancel": []}
    assert api.post("/leases/complete", json=body).json() == {"accepted": [], "lost": [job_id]}
    assert api.post("/leases/release", json=body).json() == {"accepted": [], "lost": [job_id]}
    failed = {"worker_id": worker, "jobs": [{**held(job)[0], "error": {"message": "late"}}]}
    assert api.post("/leases/fail", json=failed).json() == {"jobs": [{"job_id": job_id, "status": None}]}
    assert api.get(f"/jobs/{job_id}").json()["worker_id"] == again["worker_id"]


def test_failures_are_retried_or_dead_letters(api: Api, worker: str) -> None:
    enqueue(api, 3)
    one, two, three = claim(api, worker, max_jobs=3)
    error = {"type": "Boom", "message": "x" * 100_000, "traceback": "line 1"}
    answer = api.post(
        "/leases/fail",
        json={
            "worker_id": worker,
            "jobs": [
                {**held(one)[0], "error": error, "retry_in_ms": 0},
                {**held(two)[0], "error": error, "retryable": False},
            ],
        },
    ).json()
    assert {job["job_id"]: job["status"] for job in answer["jobs"]} == {
        one["job_id"]: "failed",
        two["job_id"]: "dead_letter",
    }
    record = api.get(f"/jobs/{one['job_id']}").json()
    assert record["errors"][0]["type"] == "Boom"
    assert len(record["errors"][0]["message"]) < 40_000
    api.post(f"/jobs/{three['job_id']}/cancel")
    beat = api.post("/leases/heartbeat", json={"worker_id": worker, "jobs": held(three)}).json()
    assert beat == {"lost": [], "cancel": held(three)}
    ended = api.post("/leases/complete", json={"worker_id": worker, "jobs": held(three)}).json()
    assert ended["accepted"] == [three["job_id"]]
    assert api.get(f"/jobs/{three['job_id']}").json()["status"] == "cancelled"


def test_jobs_are_given_back_put_off_and_reported_on(api: Api, worker: str) -> None:
    ids = enqueue(api, 3)
    one, two, three = claim(api, worker, max_jobs=3)
    assert api.post("/leases/release", json={"worker_id": worker, "jobs": held(one)}).json()["accepted"] == [ids[0]]
    assert [(job["job_id"], job["attempts"]) for job in claim(api, worker)] == [(ids[0], 1)]
    snoozed = api.post(
        "/leases/snooze", json={"worker_id": worker, "jobs": [{**held(two)[0], "delay_ms": 60_000}]}
    ).json()
    assert snoozed == {"jobs": [{"job_id": ids[1], "status": "submitted"}]}
    report = {**held(three)[0], "progress": {"done": 1, "of": 3}}
    assert api.post("/leases/progress", json={"worker_id": worker, "jobs": [report]}).json()["accepted"] == [ids[2]]
    assert api.get(f"/jobs/{ids[2]}").json()["progress"] == {"done": 1, "of": 3}


def test_claims_choose_by_queue_type_and_priority(api: Api, worker: str) -> None:
    for queue, kind, priority in (("a", "x", "low"), ("a", "y", "critical"), ("b", "x", "normal")):
        enqueue(api, queue=queue, type=kind, priority=priority)
    assert claim(api, worker, queues=["c"]) == []
    assert [job["type"] for job in claim(api, worker, queues=["a"], job_types=["x"], max_jobs=5)] == ["x"]
    assert [job["queue"] for job in claim(api, worker, priorities=["normal"], max_jobs=5)] == ["b"]
    assert [job["priority"] for job in claim(api, worker, max_jobs=5)] == [0]
    for body in (
        {},
        {"worker_id": "x"},
        {"worker_id": worker, "max_jobs": 0},
        {"worker_id": worker, "wait_ms": 99_999},
    ):
        problem(api.post("/leases/claim", json=body), 422, "invalid-request")


def test_a_long_poll_ends_with_the_first_job(live: MakeLive, worker: str, connect: Connect) -> None:
    api = live()
    session = connect()

    def later() -> None:
        time.sleep(0.5)
        session.execute("insert into pgqueue.jobs (job_type, queue) values ('a', 'q')")

    thread = threading.Thread(target=later)
    thread.start()
    begun = time.monotonic()
    answer = api.http.post("/leases/claim", json={"worker_id": worker, "queues": ["q"], "wait_ms": 20_000})
    waited = time.monotonic() - begun
    thread.join()
    assert len(answer.json()["jobs"]) == 1
    assert 0.4 < waited < 15
    begun = time.monotonic()
    assert api.http.post("/leases/claim", json={"worker_id": worker, "wait_ms": 400}).json() == {"jobs": []}
    assert 0.3 < time.monotonic() - begun < 15
    assert session.execute("select count(*) from pgqueue.waiting").fetchone() == (0,)
    [shown] = api.http.get("/workers").json()["items"]
    assert (shown["worker_id"], shown["hostname"], shown["live"]) == (worker, "http", True)


def test_who_waits_is_on_the_list_anew_once_the_api_hears_again(live: MakeLive, worker: str, connect: Connect) -> None:
    api = live()
    session = connect()
    heard_by = "select w.listener from pgqueue.waiting w join pg_stat_activity a on a.pid = w.listener"
    claiming = aside(api.http.post, "/leases/claim", json={"worker_id": worker, "wait_ms": 20_000})
    wait_until(lambda: session.execute(heard_by).fetchone() is not None)
    before = session.execute(heard_by).fetchone()
    assert before is not None
    session.execute("select pg_terminate_backend(%s)", before)
    wait_until(lambda: session.execute(heard_by + " and a.pid <> %s", before).fetchone() is not None)
    session.execute("insert into pgqueue.jobs (job_type) values ('a')")
    assert len(claiming.result(15).json()["jobs"]) == 1


def slow_to_look(live: MakeLive, database: str, **settings: Any) -> Live:
    """An API whose long polls find nothing but by bells."""
    return live(settings=Settings(dsn=database, poll_interval=60, **settings))


def waits(session: psycopg.Connection[Any]) -> list[Any]:
    return session.execute("select worker_id::text from pgqueue.waiting order by 1").fetchall()


def test_a_writer_that_looked_before_the_poll_was_on_the_list_is_waited_for(
    live: MakeLive, database: str, worker: str, connect: Connect
) -> None:
    api = slow_to_look(live, database)
    session = connect()
    with connect(autocommit=False) as writer:
        writer.execute("insert into pgqueue.jobs (job_type) values ('a')")
        claiming = aside(api.http.post, "/leases/claim", json={"worker_id": worker, "wait_ms": 30_000})
        wait_until(lambda: waits(session) == [(worker,)])
    assert len(claiming.result(10).json()["jobs"]) == 1


def test_a_poll_that_ends_has_others_woken_for_what_it_leaves(
    live: MakeLive, database: str, worker: str, connect: Connect
) -> None:
    api = slow_to_look(live, database)
    session = connect()
    other = Ear(connect, "ear")
    with connect(autocommit=False) as writer:
        claiming = aside(api.http.post, "/leases/claim", json={"worker_id": worker, "max_jobs": 1, "wait_ms": 30_000})
        wait_until(lambda: waits(session) == [(worker,)])
        writer.execute("insert into pgqueue.jobs (job_type, priority) values ('a', 3), ('b', 0)")
        session.execute("select pgqueue.wait_for_work(gen_random_uuid(), null, null, 'ear')")
    assert [job["type"] for job in claiming.result(10).json()["jobs"]] == ["b"]
    assert other.heard() == [("ear", '["default", "a"]')]


def test_polls_of_one_worker_share_its_place_on_the_list(
    live: MakeLive, database: str, worker: str, connect: Connect
) -> None:
    api = slow_to_look(live, database)
    session = connect()
    claiming = aside(api.http.post, "/leases/claim", json={"worker_id": worker, "wait_ms": 30_000})
    wait_until(lambda: waits(session) == [(worker,)])
    assert api.http.post("/leases/claim", json={"worker_id": worker, "wait_ms": 300}).json() == {"jobs": []}
    assert waits(session) == [(worker,)]
    session.execute("insert into pgqueue.jobs (job_type) values ('a')")
    assert len(claiming.result(10).json()["jobs"]) == 1
    wait_until(lambda: waits(session) == [])


def test_nobody_who_polls_at_an_api_that_does_not_listen_is_on_the_list(
    live: MakeLive, database: str, worker: str, connect: Connect
) -> None:
    api = slow_to_look(live, database, wake="poll")
    session = connect()
    claiming = aside(api.http.post, "/leases/claim", json={"worker_id": worker, "wait_ms": 2_000})
    wait_until(lambda: bool(session.execute("select from pgqueue.workers").fetchall()))
    while not claiming.done():
        assert waits(session) == []
    assert claiming.result().json() == {"jobs": []}


def test_a_poll_is_woken_whatever_its_queue_is_called(
    live: MakeLive, database: str, worker: str, connect: Connect
) -> None:
    api = slow_to_look(live, database)
    session = connect()
    asked = {"worker_id": worker, "queues": ["test 1"], "wait_ms": 30_000}
    claiming = aside(api.http.post, "/leases/claim", json=asked)
    wait_until(lambda: waits(session) == [(worker,)])
    session.execute("insert into pgqueue.jobs (job_type, queue) values ('a', 'test 1')")
    assert len(claiming.result(10).json()["jobs"]) == 1


def test_a_worker_that_hung_up_gets_no_job(live: MakeLive, worker: str, connect: Connect) -> None:
    api = live()
    with pytest.raises(httpx.ReadTimeout):
        api.http.post("/leases/claim", json={"worker_id": worker, "wait_ms": 20_000}, timeout=0.5)
    session = connect()
    session.execute("insert into pgqueue.jobs (job_type) values ('a')")
    time.sleep(1)
    rows = session.execute("select status, attempts from pgqueue.jobs").fetchall()
    assert rows == [("pending", 0)]
    wait_until(lambda: session.execute("select count(*) from pgqueue.waiting").fetchone() == (0,))
