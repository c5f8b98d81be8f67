"""/jobs: enqueue, look, wait, cancel."""

import gzip
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from tests.api.conftest import Api, MakeApi, MakeLive
from tests.api.problems import problem
from tests.conftest import Connect
from tests.meet import wait_until

NO_ID = "01a22800-0000-7000-8000-000000000000"


def test_a_job_is_enqueued_with_all_that_can_be_said_of_it(api: Api, connection: psycopg.Connection[Any]) -> None:
    asked = {
        "type": "send_email",
        "payload": {"to": "a@example.com", "n": 1970670598291982290, "deep": [1.5, None, {"x": "é😀"}]},
        "queue": "mail",
        "priority": "high",
        "scheduled_at": "2031-02-01T06:59:00+23:59",
        "idempotency_key": "order-42",
        "max_retries": 7,
        "retry_policy": {"base_delay_ms": 10, "jitter": False},
        "timeout_ms": 5000,
        "expires_at": "2032-01-01T00:00:00Z",
        "producer_id": "shop",
        "trace_context": {"traceparent": "00-1-2-3"},
    }
    answer = api.post("/jobs", json=asked)
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/jobs/{job['job_id']}"
    for name in asked.keys() - {"priority", "scheduled_at"}:
        assert job[name] == asked[name], name
    assert (job["priority"], job["scheduled_at"], job["status"]) == (1, "2031-01-31T07:00:00Z", "submitted")
    assert api.get(answer.headers["location"]).json() == job
    row = connection.execute("select payload ->> 'n' from pgqueue.jobs where job_id = %s", [job["job_id"]]).fetchone()
    assert row == ("1970670598291982290",)


def test_a_known_idempotency_key_answers_its_job_and_refuses_another(api: Api) -> None:
    asked = {"type": "echo", "payload": {"a": [1, {"b": 2.0}]}, "idempotency_key": "k"}
    first = api.post("/jobs", json=asked)
    again = api.post("/jobs", json={**asked, "payload": {"a": [1.0, {"b": 2}]}})
    header = api.post("/jobs", json={"type": "echo", "payload": asked["payload"]}, headers={"Idempotency-Key": '"k"'})
    bare = api.post("/jobs", json={"type": "echo", "payload": asked["payload"]}, headers={"Idempotency-Key": "k"})
    assert [one.status_code for one in (first, again, header, bare)] == [201, 200, 200, 200]
    assert len({one.json()["job_id"] for one in (first, again, header, bare)}) == 1
    assert again.headers["location"] == first.headers["location"]
    assert [one.headers.get("idempotency-replayed") for one in (first, again, bare)] == [None, "true", "true"]
    for other in (
        {"payload": {"a": [1, {"b": 3}]}},
        {"type": "noop"},
        {"queue": "q"},
        {"priority": 0},
        {"max_retries": 1},
    ):
        problem(api.post("/jobs", json={**asked, **other}), 422, "idempotency-key-reused")
    problem(api.post("/jobs", json=asked, headers={"Idempotency-Key": "other"}), 422, "invalid-request")
    assert len(api.get("/jobs").json()["items"]) == 1


def test_two_idempotency_keys_are_refused(live: MakeLive) -> None:
    http = live().http
    both = [("Idempotency-Key", "k"), ("Idempotency-Key", "other")]
    problem(http.post("/jobs", json={"type": "echo"}, headers=both), 400, "repeated-parameter")
    assert http.get("/jobs").json()["items"] == []
    assert http.post("/jobs", json={"type": "echo"}, headers=both[:1] * 2).status_code == 201


FAR, FARTHER = "2030-01-01T00:00:00Z", "2031-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        ({}, {}, 200),
        ({}, {"scheduled_at": FAR}, 422),
        ({}, {"delay_ms": 5000}, 422),
        ({}, {"expires_at": FAR}, 422),
        ({"scheduled_at": FAR}, {}, 422),
        ({"scheduled_at": FAR}, {"scheduled_at": FAR}, 200),
        ({"scheduled_at": FAR}, {"scheduled_at": FARTHER}, 422),
        ({"scheduled_at": FAR}, {"delay_ms": 5000}, 422),
        ({"delay_ms": 50000}, {"delay_ms": 50000}, 200),
        ({"delay_ms": 50000}, {"delay_ms": 60000}, 422),
        ({"delay_ms": 50000}, {}, 422),
        ({"expires_at": FAR}, {"expires_at": FAR}, 200),
        ({"expires_at": FAR}, {"expires_at": FARTHER}, 422),
        ({"expires_at": FAR}, {}, 422),
    ],
)
def test_the_times_of_a_known_key_must_be_the_same(
    api: Api, first: dict[str, Any], second: dict[str, Any], status: int
) -> None:
    job = {"type": "t", "idempotency_key": "k"}
    assert api.post("/jobs", json={**job, **first}).status_code == 201
    assert api.post("/jobs", json={**job, **second}).status_code == status


def test_keys_that_cannot_be_are_refused_with_the_rule(api: Api) -> None:
    for key in ("", "x" * 257, "a\0b"):
        body = problem(api.post("/jobs", json={"type": "echo", "idempotency_key": key}), 422, "invalid-request")
        assert body["errors"][0]["pointer"] == "/idempotency_key"


def test_odd_keys_are_taken_as_they_are(api: Api) -> None:
    for key in ("😀" * 256, " leading and trailing ", "x" * 256, "%_'\"\\"):
        first, again = (api.post("/jobs", json={"type": "echo", "idempotency_key": key}) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 200)
        assert again.json()["idempotency_key"] == key


def test_fifty_posts_of_one_key_make_one_job(live: MakeLive, connection: psycopg.Connection[Any]) -> None:
    served = live()
    barrier = threading.Barrier(50)

    def post(_: int) -> tuple[int, str]:
        barrier.wait()
        answer = served.http.post("/jobs", json={"type": "echo", "payload": {"a": 1}, "idempotency_key": "one"})
        return answer.status_code, answer.json()["job_id"]

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(post, range(50)))
    assert sorted({status for status, _ in answers}) in ([200, 201], [201])
    assert [status for status, _ in answers].count(201) == 1
    assert len({job_id for _, job_id in answers}) == 1
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (1,)


def test_waiters_for_a_key_go_on_when_its_winner_rolls_back(live: MakeLive, connect: Connect) -> None:
    served = live()
    winner = connect(autocommit=False)
    winner.execute("select pgqueue.enqueue('echo', idempotency_key => 'k')")
    with ThreadPoolExecutor(10) as pool:
        waiting = [
            pool.submit(served.http.post, "/jobs", json={"type": "echo", "idempotency_key": "k"}) for _ in range(10)
        ]
        time.sleep(0.3)
        assert not any(one.done() for one in waiting)
        winner.rollback()
        answers = [one.result() for one in waiting]
    assert sorted(one.status_code for one in answers) == [200] * 9 + [201]
    assert len({one.json()["job_id"] for one in answers}) == 1


INVALID: list[tuple[Any, str]] = [
    ({}, "/type"),
    ({"type": ""}, "/type"),
    ({"type": "x" * 129}, "/type"),
    ({"type": "a", "job_type": "b"}, "/type"),
    ({"type": "a", "unknown": 1}, ""),
    ({"type": "a", "priority": 4}, "/priority"),
    ({"type": "a", "priority": "urgent"}, "/priority"),
    ({"type": "a", "queue": ""}, "/queue"),
    ({"type": "a", "queue": "q" * 64}, "/queue"),
    ({"type": "a", "max_retries": -1}, "/max_retries"),
    ({"type": "a", "timeout_ms": 0}, "/timeout_ms"),
    ({"type": "a", "delay_ms": -1}, "/delay_ms"),
    ({"type": "a", "scheduled_at": "2031-01-01T00:00:00"}, "/scheduled_at"),
    ({"type": "a", "scheduled_at": "soon"}, "/scheduled_at"),
    ({"type": "a", "scheduled_at": "2031-01-01T00:00:00Z", "delay_ms": 5}, "/delay_ms"),
    ({"type": "a", "retry_policy": {"backoff_multiplier": 0}}, "/retry_policy/backoff_multiplier"),
    ({"type": "a", "producer_id": "x" * 65}, "/producer_id"),
    ({"type": 5}, "/type"),
    ([], ""),
]


def test_what_is_not_valid_says_where(api: Api, subtests: pytest.Subtests) -> None:
    for body, pointer in INVALID:
        with subtests.test(body=str(body)[:60]):
            answer = problem(api.post("/jobs", json=body), 422, "invalid-request")
            assert answer["errors"][0].get("pointer", "") == pointer


UNSTORABLE: list[tuple[bytes, int]] = [
    (b"", 400),
    (b"{", 400),
    (b'{"type": "a", "payload": {"x": NaN}}', 400),
    (b'{"type": "a", "payload": {"x": Infinity}}', 400),
    (b'{"type": "a", "max_retries": 3.0, "payload": {"x": NaN}}', 422),
    (b'{"type": "a", "max_retries": 3.0, "payload": {"x": -Infinity}}', 422),
    (b'{"type": "a", "payload": {"x": 1e400}}', 422),
    (b'{"type": "a", "payload": {"x": 1e5000}}', 422),
    (b'{"type": "a", "payload": {"x": "\xff"}}', 422),
    (b'{"type": "a", "payload": {"x": "\\ud800"}}', 422),
    (b'{"type": "a", "payload": {"x": "a\\u0000b"}}', 422),
    (b'{"type": "a", "payload": ' + b"[" * 5000 + b"]" * 5000 + b"}", 422),
    (b'{"type": "a\\u0000"}', 422),
]


def test_json_that_cannot_be_stored_is_refused_at_once(api: Api, subtests: pytest.Subtests) -> None:
    for body, status in UNSTORABLE:
        with subtests.test(body=str(body)[:60]):
            answer = api.post("/jobs", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == status, answer.text
            problem(answer, status, "malformed-json" if status == 400 else answer.json()["type"].rpartition(":")[2])
    assert api.get("/jobs").json()["items"] == []


def test_the_last_of_what_fits_is_taken(api: Api) -> None:
    for payload in ({"x": "é" * 4000}, {"x": "y" * 1_000_000}, {"x": "y" * 7999}):
        answer = api.post("/jobs", json={"type": "echo", "payload": payload})
        assert answer.status_code == 201
        assert api.get(answer.headers["location"]).json()["payload"] == payload


def test_too_large_a_body_or_payload_is_refused(api: Api) -> None:
    body = problem(api.post("/jobs", json={"type": "echo", "payload": {"x": "y" * (2 << 20)}}), 413, "body-too-large")
    assert body["limit_bytes"] == 2 << 20
    problem(api.post("/jobs", json={"type": "echo", "payload": {"x": "y" * (5 << 20)}}), 413, "body-too-large")


def test_bodies_must_be_sent_as_json(api: Api) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = api.post("/jobs", content=b'{"type": "a"}', headers={"Content-Type": kind})
        problem(answer, 415, "unsupported-media-type")
        assert answer.headers["accept-post"] == "application/json"
    answer = api.post(
        "/jobs", content=b'{"type": "a"}', headers={"Content-Type": "application/vnd.x+json; charset=utf-8"}
    )
    assert answer.status_code == 201


def test_an_encoded_body_is_refused_by_the_name_of_its_encoding(api: Api) -> None:
    body = gzip.compress(b'{"type": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert (
        "'gzip'" in problem(api.post("/jobs", content=body, headers=headers), 415, "unsupported-media-type")["detail"]
    )


def test_a_batch_is_all_or_nothing(api: Api) -> None:
    jobs: list[dict[str, Any]] = [{"type": "echo", "payload": {"n": n}} for n in range(3)]
    jobs[1]["idempotency_key"] = "k"
    first = api.post("/jobs/batch", json={"jobs": jobs})
    assert first.status_code == 201
    assert (first.json()["created"], first.json()["duplicates"]) == (3, 0)
    assert [one["status"] for one in first.json()["jobs"]] == ["pending"] * 3
    again = api.post("/jobs/batch", json={"jobs": jobs}).json()
    assert (again["created"], again["duplicates"]) == (2, 1)
    assert again["jobs"][1] == {"job_id": first.json()["jobs"][1]["job_id"], "status": "pending", "duplicate": True}

    def count() -> int:
        return len(api.get("/jobs", params={"limit": 1000}).json()["items"])

    assert count() == 5
    refused: list[tuple[list[dict[str, Any]], str]] = [
        ([{"type": "a"}, {"type": ""}], "/jobs/1/type"),
        ([{"type": "a"}, {"type": "a", "scheduled_at": "2031-01-01T00:00:00Z", "delay_ms": 1}], "/jobs/1/delay_ms"),
        ([], "/jobs"),
    ]
    for batch, pointer in refused:
        body = problem(api.post("/jobs/batch", json={"jobs": batch}), 422, "invalid-request")
        assert body["errors"][0]["pointer"] == pointer
    problem(
        api.post("/jobs/batch", json={"jobs": [{"type": "a"}, {"type": "z", "idempotency_key": "k"}]}),
        422,
        "invalid-job",
    )
    assert count() == 5


def test_ten_thousand_jobs_fit_in_a_batch_and_no_more(api: Api, connection: psycopg.Connection[Any]) -> None:
    answer = api.post("/jobs/batch", json={"jobs": [{"type": "noop"}] * 10_000})
    assert answer.status_code == 201
    assert len({one["job_id"] for one in answer.json()["jobs"]}) == 10_000
    problem(api.post("/jobs/batch", json={"jobs": [{"type": "noop"}] * 10_001}), 422, "invalid-request")
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (10_000,)


def test_lists_page_by_cursor_and_filter(api: Api) -> None:
    for n in range(25):
        api.post("/jobs", json={"type": "even" if n % 2 == 0 else "odd", "queue": f"q{n % 3}", "payload": {"n": n}})
    seen: list[int] = []
    params: dict[str, Any] = {"limit": 10}
    while True:
        page = api.get("/jobs", params=params).json()
        seen += [job["payload"]["n"] for job in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert seen == list(range(24, -1, -1))
    filters: list[tuple[dict[str, Any], int]] = [
        ({"type": "even"}, 13),
        ({"queue": "q1"}, 8),
        ({"type": "odd", "queue": "q1"}, 4),
        ({"status": "pending"}, 25),
        ({"status": ["completed", "failed"]}, 0),
        ({"producer": "nobody"}, 0),
        ({"q": '"n": 7}'}, 1),
        ({"q": "ODD"}, 12),
    ]
    for query, count in filters:
        assert len(api.get("/jobs", params={**query, "limit": 100}).json()["items"]) == count, query


def test_a_job_that_commits_late_is_in_lists_made_after_its_commit(api: Api, connect: Connect) -> None:
    late = connect(autocommit=False)
    late.execute("insert into pgqueue.jobs (job_type) values ('late')")
    api.post("/jobs", json={"type": "early"})
    assert [job["type"] for job in api.get("/jobs").json()["items"]] == ["early"]
    late.commit()
    assert {job["type"] for job in api.get("/jobs").json()["items"]} == {"early", "late"}


def test_lists_show_no_secrets_and_no_large_payloads(api: Api) -> None:
    secret = {"user": "u", "Password": "p", "nested": [{"api_key": {"deep": 1}, "n": 0.1}]}
    made = api.post("/jobs", json={"type": "a", "payload": secret})
    assert made.json()["payload"] == secret
    api.post("/jobs", json={"type": "b", "payload": {"x": "y" * 20_000}})
    large, small = api.get("/jobs").json()["items"]
    assert (large["payload"], large["payload_omitted"]) == (None, True)
    hidden = {"user": "u", "Password": "[redacted]", "nested": [{"api_key": "[redacted]", "n": 0.1}]}
    assert small["payload"] == hidden
    assert api.get(made.headers["location"]).json()["payload"] == secret


def test_times_are_utc_whatever_the_database_thinks(make_api: MakeApi, connection: psycopg.Connection[Any]) -> None:
    connection.execute(f'alter database "{connection.info.dbname}" set timezone = "Asia/Tokyo"')
    api = make_api(maintenance=False)
    far, near = "9998-12-31T23:59:59.5Z", "2031-03-29T01:30:00-05:00"
    for asked, told in ((far, "9998-12-31T23:59:59.500000Z"), (near, "2031-03-29T06:30:00Z")):
        answer = api.post("/jobs", json={"type": "a", "scheduled_at": asked})
        assert answer.status_code == 201, answer.text
        assert answer.json()["scheduled_at"] == told
        assert api.get(answer.headers["location"]).json()["scheduled_at"] == told
        assert answer.json()["created_at"].endswith("Z")
    past = api.post("/jobs", json={"type": "a", "scheduled_at": "2020-01-01T00:00:00Z"}).json()
    assert past["status"] == "pending"
    assert api.post("/jobs", json={"type": "a", "delay_ms": 0}).json()["status"] == "pending"
    delayed = api.post("/jobs", json={"type": "a", "delay_ms": 3_600_000}).json()
    assert delayed["status"] == "submitted"
    problem(api.post("/jobs", json={"type": "a", "scheduled_at": "9999-12-31T23:59:59Z"}), 422, "invalid-job")


def test_pages_may_be_short_but_lead_on(api: Api, connection: psycopg.Connection[Any]) -> None:
    """Only so many jobs are looked at for one page; what lies behind them is on the next."""
    connection.execute("insert into pgqueue.queues (name, soft_limit, hard_limit) values ('q', 1000000, 1000000)")
    [(rare,)] = connection.execute("select job_id::text from pgqueue.enqueue('rare', queue => 'q')").fetchall()
    connection.execute("insert into pgqueue.jobs (job_type, queue) select 'common', 'q' from generate_series(1, 20500)")
    first = api.get("/jobs", params={"type": "rare"}).json()
    assert (first["items"], first["next_cursor"] is None) == ([], False)
    second = api.get("/jobs", params={"type": "rare", "cursor": first["next_cursor"]}).json()
    assert ([job["job_id"] for job in second["items"]], second["next_cursor"]) == ([rare], None)


def test_unknown_jobs_and_parameters_are_told(api: Api) -> None:
    for path in (f"/jobs/{NO_ID}", f"/jobs/{NO_ID}/result", f"/jobs/{NO_ID}/events", f"/jobs/{NO_ID}/why"):
        problem(api.get(path), 404, "job-not-found")
    problem(api.post(f"/jobs/{NO_ID}/cancel"), 404, "job-not-found")
    assert "'not-a-uuid' is no job id" in problem(api.get("/jobs/not-a-uuid"), 404, "not-found")["detail"]
    assert problem(api.get("/jobz"), 404, "not-found")["detail"] == "there is nothing at this path"
    assert problem(api.get("/jobs?limit=0"), 422, "invalid-request")["errors"][0]["parameter"] == "limit"
    assert problem(api.get("/jobs?stauts=pending"), 422, "invalid-request")["errors"][0]["parameter"] == "stauts"
    problem(api.get("/jobs?cursor=x"), 422, "invalid-request")
    problem(api.get("/jobs?q=a%00b"), 422, "invalid-request")


def test_an_etag_saves_what_has_not_changed(api: Api) -> None:
    location = api.post("/jobs", json={"type": "a"}).headers["location"]
    first = api.get(location)
    same = api.get(location, headers={"If-None-Match": first.headers["etag"]})
    assert (same.status_code, same.content) == (304, b"")
    api.post(f"{location}/cancel")
    changed = api.get(location, headers={"If-None-Match": first.headers["etag"]})
    assert (changed.status_code, changed.json()["status"]) == (200, "cancelled")


def test_cancelling_says_what_it_did(api: Api, connection: psycopg.Connection[Any]) -> None:
    worker = uuid.uuid4()
    waiting, running, done = (api.post("/jobs", json={"type": kind}).json()["job_id"] for kind in "abc")
    assert api.post(f"/jobs/{waiting}/cancel").json() == {"job_id": waiting, "outcome": "cancelled"}
    assert api.delete(f"/jobs/{waiting}").json()["outcome"] == "cancelled"
    connection.execute("select pgqueue.claim(%s, null, 2)", [worker])
    assert api.delete(f"/jobs/{running}").json()["outcome"] == "cancel_requested"
    connection.execute("select pgqueue.complete(%s, %s::uuid[], '{1}', '{null}')", [worker, [done]])
    problem(api.post(f"/jobs/{done}/cancel"), 409, "wrong-state")
    many = api.post("/admin/jobs/cancel", json={"job_ids": [waiting, running, done, NO_ID, done]}).json()["jobs"]
    assert {one["job_id"]: one["outcome"] for one in many} == {
        waiting: "cancelled",
        running: "cancel_requested",
        done: "completed",
        NO_ID: "not_found",
    }


def test_a_result_is_waited_for(make_api: MakeApi, connect: Connect) -> None:
    api = make_api(maintenance=False)
    job_id = api.post("/jobs", json={"type": "a"}).json()["job_id"]
    now = api.get(f"/jobs/{job_id}/result")
    assert (now.status_code, now.json()["status"]) == (202, "pending")
    begun = time.monotonic()
    assert api.get(f"/jobs/{job_id}/result?wait=0.5").status_code == 202
    assert 0.4 < time.monotonic() - begun < 20

    def finish() -> None:
        session, worker = connect(), uuid.uuid4()
        time.sleep(0.3)
        session.execute("select pgqueue.claim(%s, null, 1)", [worker])
        session.execute(
            "select pgqueue.complete(%s, %s::uuid[], '{1}', array['{\"x\": 1e2}'::jsonb])", [worker, [job_id]]
        )

    thread = threading.Thread(target=finish)
    thread.start()
    begun = time.monotonic()
    answer = api.get(f"/jobs/{job_id}/result?wait=30")
    assert time.monotonic() - begun < 20
    thread.join()
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["result"], answer.json()["attempts"]) == ("completed", {"x": 100}, 1)
    problem(api.get(f"/jobs/{job_id}/result?wait=61"), 422, "invalid-request")


def test_why_a_job_waits_is_told(api: Api) -> None:
    job_id = api.post("/jobs", json={"type": "a"}).json()["job_id"]
    assert "No worker serves" in api.get(f"/jobs/{job_id}/why").json()["why"]


def test_a_key_whose_job_was_deleted_is_told(api: Api, connection: psycopg.Connection[Any]) -> None:
    worker = uuid.uuid4()
    job_id = api.post("/jobs", json={"type": "a", "idempotency_key": "k"}).json()["job_id"]
    connection.execute("select pgqueue.claim(%s, null, 1)", [worker])
    connection.execute("select pgqueue.fail(%s, %s, 1, '{}', false)", [worker, job_id])
    assert api.post("/jobs", json={"type": "a", "idempotency_key": "k"}).json()["status"] == "dead_letter"
    connection.execute("select pgqueue.discard(%s)", [job_id])
    body = problem(api.post("/jobs", json={"type": "a", "idempotency_key": "k"}), 409, "duplicate-job")
    assert body["job_id"] == job_id


def test_one_bad_job_among_many_fails_alone(live: MakeLive, connection: psycopg.Connection[Any]) -> None:
    """Requests that arrive together share a call to the database, and nothing else."""
    served = live()
    connection.execute("insert into pgqueue.queues (name, hard_limit) values ('full', 0)")
    barrier = threading.Barrier(30)

    def post(n: int) -> int:
        barrier.wait()
        queue = "full" if n % 5 == 0 else "open"
        payload = {"x": "a\0"} if n % 7 == 1 else {"n": n}
        return served.http.post("/jobs", json={"type": "a", "queue": queue, "payload": payload}).status_code

    with ThreadPoolExecutor(30) as pool:
        statuses = list(pool.map(post, range(30)))
    expected = [422 if n % 7 == 1 else 503 if n % 5 == 0 else 201 for n in range(30)]
    # The database looks at the payload before it counts the queue.
    assert statuses == expected
    accepted = connection.execute("select count(*) from pgqueue.jobs").fetchone()
    assert accepted == (expected.count(201),)
    wait_until(lambda: served.http.get("/health/live").status_code == 200)
