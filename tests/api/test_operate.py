"""Queues, dead letters, schedules, workers, statistics, health."""

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.api.conftest import Api, MakeApi, MakeLive
from tests.api.problems import problem
from tests.meet import wait_until


def dead_letter(
    session: psycopg.Connection[Any], job_type: str = "a", queue: str = "default", message: str = "no"
) -> str:
    worker = uuid.uuid4()
    row = session.execute("select job_id from pgqueue.enqueue(%s, queue => %s)", [job_type, queue]).fetchone()
    assert row
    session.execute("select pgqueue.claim(%s, %s, 1)", [worker, [queue]])
    error = {"type": "E", "message": message, "traceback": "t" * 30_000}
    session.execute("select pgqueue.fail(%s, %s, 1, %s, false)", [worker, row[0], Jsonb(error)])
    return str(row[0])


def test_retry_does_its_part_in_each_status(api: Api, connection: psycopg.Connection[Any]) -> None:
    worker = uuid.uuid4()
    waiting, running, done = (api.post("/jobs", json={"type": "a"}).json()["job_id"] for _ in range(3))
    connection.execute("select pgqueue.cancel(%s)", [waiting])
    connection.execute("select pgqueue.claim(%s, null, 2)", [worker])
    connection.execute("select pgqueue.complete(%s, %s::uuid[], '{1}', null)", [worker, [done]])
    pending = api.post("/jobs", json={"type": "a"}).json()["job_id"]
    for job_id in (waiting, running, done, pending):
        before = api.get(f"/jobs/{job_id}").json()
        problem(api.post(f"/admin/jobs/{job_id}/retry"), 409, "wrong-state")
        assert api.get(f"/jobs/{job_id}").json() == before
    dead = dead_letter(connection, queue="other")
    again = api.post(f"/admin/jobs/{dead}/retry")
    assert (again.status_code, again.json()["status"], again.json()["error"]) == (200, "pending", None)
    assert again.json()["max_retries"] - again.json()["attempts"] == 3
    problem(api.post(f"/admin/jobs/{dead}/retry"), 409, "wrong-state")


def test_dead_letters_are_listed_retried_and_discarded_by_filter(api: Api, connection: psycopg.Connection[Any]) -> None:
    for n in range(3):
        dead_letter(connection, "send_email", "mail", f"n{n}")
    other = dead_letter(connection, "resize", "images")
    page = api.get("/admin/dlq").json()
    assert [job["type"] for job in page["items"]] == ["resize"] + ["send_email"] * 3
    error = page["items"][1]["errors"][0]
    assert (error["message"], len(error["traceback"])) == ("n2", 4001)
    assert len(api.get("/admin/dlq", params={"queue": "mail", "limit": 2}).json()["items"]) == 2
    for query in ("filter=status:dead", "filter=job_type", "since=2026-01-01T00:00:00", "since=7", "typ=x"):
        problem(api.post(f"/admin/dlq/discard-all?{query}"), 422, "invalid-request")
    assert api.post("/admin/dlq/retry-all?filter=job_type:none").json() == {"jobs": 0}
    assert api.post("/admin/dlq/discard-all?queue=mail&filter=queue:images").json() == {"jobs": 0}
    assert api.post("/admin/dlq/retry-all?filter=job_type:send_email&filter=queue:mail&max_jobs=2").json() == {
        "jobs": 2
    }
    assert api.post("/admin/dlq/retry-all?type=send_email&since=2020-01-01T00:00:00Z").json() == {"jobs": 1}
    assert api.delete(f"/admin/dlq/{other}").json() == {"jobs": 1}
    problem(api.get(f"/jobs/{other}"), 404, "job-not-found")
    dead_letter(connection, "x", "x")
    for verb in ("retry-all", "discard-all"):
        asked = api.post(f"/admin/dlq/{verb}", json={"filter": "job_type:none"})
        assert "query parameters" in problem(asked, 422, "invalid-request")["detail"]
    assert api.post("/admin/dlq/discard-all").json() == {"jobs": 1}
    verbs = connection.execute(
        "select verb, jobs from pgqueue.audit where verb like '%discard%' order by audit_id"
    ).fetchall()
    assert verbs == [("discard", 1), ("discard_dead_letters", 1)]


def test_queues_show_depth_and_settings_and_change(api: Api, connection: psycopg.Connection[Any]) -> None:
    problem(api.get("/queues/q"), 404, "not-found")
    for n in range(4):
        api.post("/jobs", json={"type": "a", "queue": "q", "priority": n % 2})
    api.post("/jobs", json={"type": "a", "queue": "q", "delay_ms": 60_000})
    connection.execute("select pgqueue.claim(%s, '{q}', 1)", [uuid.uuid4()])
    queue = api.get("/queues/q").json()
    assert queue["depth"] == {"pending": 3, "submitted": 1, "processing": 1, "failed": 0}
    assert [part["pending"] for part in queue["priorities"]] == [1, 2, 0, 0]
    assert (queue["weights"], queue["soft_limit"], queue["pending_ttl_ms"]) == ([8, 4, 2, 1], 50_000, 86_400_000)
    changed = api.patch(
        "/admin/queues/q",
        json={
            "weights": None,
            "hard_limit": 7,
            "retry_policy": {"jitter": False},
            "completed_ttl_ms": 5000,
            "shed_low": True,
        },
    )
    assert changed.status_code == 200
    now = changed.json()
    assert (now["weights"], now["hard_limit"], now["retry_policy"], now["completed_ttl_ms"]) == (
        None,
        7,
        {"jitter": False},
        5000,
    )
    assert (
        api.patch("/admin/queues/q", json={"retry_policy": None, "weights": [1, 0, 0, 0]}).json()["retry_policy"]
        is None
    )
    refused: list[tuple[dict[str, Any], str]] = [
        ({"weights": [0, 0, 0, 0]}, ""),
        ({"weights": [1, 2, 3]}, "/weights"),
        ({"lease_ms": 5}, "/lease_ms"),
        ({"nothing": 1}, ""),
        ({"hard_limit": "7"}, "/hard_limit"),
    ]
    for body, pointer in refused:
        answer = problem(api.patch("/admin/queues/q", json=body), 422, "invalid-request")
        assert pointer in str(answer.get("errors", ""))
    for body in ({"soft_limit": 8}, {"soft_limit": 101, "hard_limit": 100}):
        answer = problem(api.patch("/admin/queues/q", json=body), 422, "invalid-job")
        assert answer["errors"] == [{"detail": "soft_limit must not be above hard_limit", "pointer": "/soft_limit"}]
    assert [one["name"] for one in api.get("/queues").json()["items"]] == ["q"]
    detail = connection.execute(
        "select target, detail -> 'hard_limit' from pgqueue.audit order by audit_id limit 1"
    ).fetchone()
    assert detail == ("q", 7)


@pytest.mark.parametrize("name", ["q" * 63, "MyQueue", "a b;c'd\"e", "😀" * 30, "é%_\\", "a/b", "/", "a//b/"])
def test_any_name_of_a_queue_works_everywhere(api: Api, name: str, connection: psycopg.Connection[Any]) -> None:
    from urllib.parse import quote

    assert api.post("/jobs", json={"type": "a", "queue": name}).status_code == 201
    path = quote(name, safe="")
    assert api.post(f"/admin/queues/{path}/pause").json() == {"queue": name, "paused": True, "changed": True}
    assert api.get(f"/queues/{path}").json()["paused"] is True
    assert api.post(f"/admin/queues/{path}/resume").json()["changed"] is True
    assert len(api.get("/jobs", params={"queue": name}).json()["items"]) == 1
    worker = str(uuid.uuid4())
    assert len(api.post("/leases/claim", json={"worker_id": worker, "queues": [name]}).json()["jobs"]) == 1


# Litestar's client for tests decodes paths twice, so this asks a server.
@pytest.mark.parametrize("name", ["a/b", "/é/", "%2F/%25", "a b/"])
def test_names_with_slashes_of_schedules_and_keys_work_everywhere(live: MakeLive, name: str) -> None:
    from urllib.parse import quote

    api = live(maintenance=False).http
    path = quote(name, safe="")
    made = api.put(f"/schedules/{path}", json={"cron": "@daily", "job_type": "a"})
    assert (made.status_code, made.headers["location"]) == (201, f"/schedules/{path}")
    assert api.get(made.headers["location"]).json()["name"] == name
    assert api.get(f"/schedules/{path}/preview").json()["name"] == name
    assert api.post(f"/admin/schedules/{path}/run").json()["name"] == name
    assert api.delete(f"/schedules/{path}").json() == {"name": name}
    unknown = problem(api.get(f"/schedules/{path}"), 404, "not-found")
    assert unknown["instance"] == "/schedules/" + name.replace("%", "%25").replace("/", "%2F")
    key = api.post("/admin/keys", json={"name": name, "scopes": ["admin"]}).json()["key"]
    bearer = {"Authorization": f"Bearer {key}"}
    assert api.delete(f"/admin/keys/{path}", headers=bearer).json() == {"name": name, "changed": True}


def test_a_slash_that_divides_still_does(api: Api) -> None:
    problem(api.get("/queues/a/b"), 404, "not-found")
    problem(api.get("/queues%2Fa"), 404, "not-found")
    problem(api.post("/admin/queues/q%2Fpause"), 405, "method-not-allowed")


def test_a_paused_queue_gives_nothing_and_takes_all(api: Api) -> None:
    api.post("/admin/queues/q/pause")
    assert api.post("/jobs", json={"type": "a", "queue": "q"}).status_code == 201
    worker = str(uuid.uuid4())
    assert api.post("/leases/claim", json={"worker_id": worker, "queues": ["q"]}).json() == {"jobs": []}
    assert api.post("/admin/queues/q/pause").json()["changed"] is False
    api.post("/admin/queues/q/resume")
    assert len(api.post("/leases/claim", json={"worker_id": worker, "queues": ["q"]}).json()["jobs"]) == 1


def test_the_next_run_is_told_though_no_scheduler_has_seen_the_schedule(api: Api) -> None:
    asked = {"cron": "30 2 * * *", "job_type": "report"}
    made = api.put("/schedules/nightly", json=asked).json()
    assert made["next_run_at"].endswith("T02:30:00Z")
    assert timedelta(0) < datetime.fromisoformat(made["next_run_at"]) - datetime.now(UTC) <= timedelta(days=1)
    assert api.put("/schedules/nightly", json={**asked, "enabled": False}).json()["next_run_at"] is None


def test_schedules_are_made_replaced_run_previewed_and_deleted(api: Api, connection: psycopg.Connection[Any]) -> None:
    asked = {
        "cron": "30 2 * * *",
        "timezone": "Europe/Berlin",
        "job_type": "report",
        "payload": {"n": 1},
        "priority": "high",
    }
    made = api.put("/schedules/nightly", json=asked)
    assert (made.status_code, made.headers["location"]) == (201, "/schedules/nightly")
    assert made.json()["words"] == "at 02:30 (Europe/Berlin)"
    replaced = api.put("/schedules/nightly", json={**asked, "cron": "@daily", "timezone": "UTC"})
    assert (replaced.status_code, replaced.json()["payload"]) == (200, {"n": 1})
    preview = api.get("/schedules/nightly/preview?n=3&from=2026-11-29T12:00:00Z").json()
    assert preview["utc"] == ["2026-11-30T00:00:00Z", "2026-12-01T00:00:00Z", "2026-12-02T00:00:00Z"]
    for end in ("9999-12-31T23:59:59Z", "9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00%2B14:00"):
        beyond = api.get(f"/schedules/nightly/preview?from={end}")
        assert (beyond.status_code, beyond.headers["content-type"]) == (422, "application/problem+json")
    ran = api.post("/admin/schedules/nightly/run")
    assert ran.status_code == 201
    job = api.get(f"/jobs/{ran.json()['job_id']}").json()
    assert (job["type"], job["priority"], job["payload"]) == ("report", 1, {"n": 1})
    assert [one["name"] for one in api.get("/schedules").json()["items"]] == ["nightly"]
    for cron in ("* * * * * *", "R * * * *", "*/5 * * * * 30", "61 * * * *", "0 0 30 2 *", "", "@reboot"):
        problem(
            api.put("/schedules/bad", json={**asked, "cron": cron}),
            422,
            "invalid-request" if not cron else "invalid-job",
        )
    problem(api.put("/schedules/bad", json={**asked, "timezone": "Mars/Base"}), 422, "invalid-job")
    assert api.delete("/schedules/nightly").json() == {"name": "nightly"}
    for method, path in (("DELETE", "/schedules/x"), ("GET", "/schedules/x"), ("POST", "/admin/schedules/x/run")):
        problem(api.request(method, path), 404, "not-found")
    verbs = connection.execute("select verb from pgqueue.audit order by audit_id").fetchall()
    assert [verb for (verb,) in verbs] == ["put_schedule", "put_schedule", "run_schedule", "drop_schedule"]


def test_workers_and_statistics_are_shown(api: Api, connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "select pgqueue.worker_started(%s, 'w', 'host', 1, null, null, null, null, 4, '1')", [uuid.uuid4()]
    )
    api.post("/jobs", json={"type": "a"})
    dead_letter(connection, queue="other")
    [worker] = api.get("/workers").json()["items"]
    assert (worker["name"], worker["live"], worker["concurrency"], worker["queues"]) == ("w", True, 4, None)
    stats = api.get("/stats").json()
    assert (stats["depth"]["pending"], stats["dead_letters"], stats["workers"], stats["slots"]) == (1, 1, 1, 4)
    assert {"alert", "severity", "summary"} <= stats["alerts"][0].keys()


def test_health_says_what_is_missing(make_api: MakeApi, connection: psycopg.Connection[Any]) -> None:
    bare = make_api(maintenance=False)
    assert bare.get("/health/live").json() == {"status": "live"}
    answer = bare.get("/health/ready")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["checks"]["sweeper"] == {
        "ok": False,
        "detail": "no sweep has ever run; start a worker or a scheduler",
    }
    full = make_api(maintenance=True)
    ready: Any = wait_until(lambda: (answer := full.get("/health/ready")).status_code == 200 and answer)
    assert all(check["ok"] for check in ready.json()["checks"].values())
    connection.execute("alter function pgqueue.schema_version() rename to elsewhere")
    assert full.get("/health/ready").json()["checks"]["database"]["ok"] is False
    connection.execute("alter function pgqueue.elsewhere() rename to schema_version")
    # A sweeper that cannot work shows, and shows that it works again.
    connection.execute("alter function pgqueue.sweep_step(text, integer, interval, boolean) rename to elsewhere")
    wait_until(lambda: full.get("/health/ready").status_code == 503, 9)
    connection.execute("alter function pgqueue.elsewhere(text, integer, interval, boolean) rename to sweep_step")
    wait_until(lambda: full.get("/health/ready").status_code == 200, 10)


def all_pages(api: Api, path: str, limit: int) -> list[list[dict[str, Any]]]:
    """Return the pages of a list, as a client that follows next_cursor sees them."""
    pages = []
    query: dict[str, str | int] = {"limit": limit}
    while True:
        page = api.get(path, params=query).json()
        pages.append(page["items"])
        if page["next_cursor"] is None:
            return pages
        query["cursor"] = page["next_cursor"]


@pytest.mark.parametrize("path", ["/queues", "/schedules", "/workers", "/admin/keys"])
def test_every_list_pages_by_cursor(api: Api, connection: psycopg.Connection[Any], path: str) -> None:
    names = sorted(f"{letter} {number}" for letter in "Aaäb+" for number in range(2))
    connection.execute("insert into pgqueue.queues (name) select unnest(%s::text[])", [names])
    connection.execute(
        "insert into pgqueue.schedules (name, cron, job_type) select n, '@daily', 'a' from unnest(%s::text[]) n",
        [names],
    )
    connection.execute(
        "select pgqueue.worker_started(gen_random_uuid(), n, 'here', 1, null, null, null, null, 1, '0')"
        " from unnest(%s::text[]) n",
        [names],
    )
    connection.execute(
        "select pgqueue.create_key(n, sha256(convert_to(n, 'utf8')), 'p', '{read,admin}', null, null)"
        " from unnest(%s::text[]) n",
        [names],
    )
    api.headers["Authorization"] = f"Bearer {names[0]}"
    key = "worker_id" if path == "/workers" else "name"
    whole = api.get(path).json()
    assert whole["next_cursor"] is None
    wanted = [one[key] for one in whole["items"]]
    assert len(set(wanted)) == len(names)
    for limit in (1, 3, len(names)):
        pages = all_pages(api, path, limit)
        assert [one[key] for page in pages for one in page] == wanted
        assert [len(page) for page in pages[:-1]] == [limit] * (len(pages) - 1)
    for query in ("limit=0", "limit=1001", "cursor=%00", "limit=x"):
        problem(api.get(f"{path}?{query}"), 422, "invalid-request")


def test_a_page_of_workers_goes_on_after_one_that_is_gone(api: Api, connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "select pgqueue.worker_started(gen_random_uuid(), n::text, 'here', 1, null, null, null, null, 1, '0')"
        " from generate_series(1, 3) n"
    )
    wanted = [one["worker_id"] for one in api.get("/workers").json()["items"]]
    first = api.get("/workers?limit=1").json()
    connection.execute("delete from pgqueue.workers where worker_id = %s", [wanted[0]])
    rest = api.get("/workers", params={"cursor": first["next_cursor"]}).json()
    assert [one["worker_id"] for one in rest["items"]] == wanted[1:]
    for cursor in ("x", wanted[1], f"9-{wanted[1]}-", "9" * 18 + f"-{wanted[1]}"):
        problem(api.get("/workers", params={"cursor": cursor}), 422, "invalid-request")
