"""Keys, scopes, strict headers, and what a database role of the API must be able to do."""

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue.settings import Settings
from tests.api.conftest import Api, MakeApi, MakeLive, Serve
from tests.api.problems import problem


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def make_key(api: Api, name: str, *scopes: str, admin: str | None = None, **options: Any) -> str:
    answer = api.post(
        "/admin/keys",
        json={"name": name, "scopes": list(scopes), **options},
        headers=bearer(admin) if admin else {},
    )
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


@pytest.fixture
def admin(api: Api) -> str:
    """The first key, with every right."""
    return make_key(api, "root", "admin")


def test_from_the_first_key_on_every_request_needs_one(api: Api) -> None:
    assert api.get("/jobs").status_code == 200
    key = make_key(api, "root", "admin")
    answer = api.get("/jobs")
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert api.get("/jobs", headers=bearer(key)).status_code == 200
    assert api.get("/jobs", headers={"X-API-Key": key}).status_code == 200
    for wrong in ("Bearer", "Bearer x", f"Bearer {key}x", f"Basic {key}", f"Bearer {key[:-1]}"):
        problem(api.get("/jobs", headers={"Authorization": wrong}), 401, "unauthenticated")
    for path in ("/health/live", "/health/ready", "/schema", "/schema/openapi.json"):
        assert api.get(path).status_code in (200, 503), path


def test_a_key_is_stored_as_a_hash_and_shown_once(api: Api, admin: str, connection: psycopg.Connection[Any]) -> None:
    key = make_key(api, "shop", "submit", "read", admin=admin)
    stored = connection.execute("select row_to_json(k)::text from pgqueue.api_keys k where name = 'shop'").fetchone()
    assert stored
    assert key not in stored[0]
    listed = api.get("/admin/keys", headers=bearer(admin)).json()["items"]
    assert [(one["name"], one["prefix"]) for one in listed] == [("root", admin[:12]), ("shop", key[:12])]
    taken = problem(api.post("/admin/keys", json={"name": "shop"}, headers=bearer(admin)), 409, "wrong-state")
    assert "job" not in taken["title"]
    assert len(key) > 40


def test_a_revoked_or_expired_key_ends_at_once(api: Api, admin: str, connection: psycopg.Connection[Any]) -> None:
    key = make_key(api, "shop", "read", admin=admin)
    assert api.get("/jobs", headers=bearer(key)).status_code == 200
    assert api.delete("/admin/keys/shop", headers=bearer(admin)).json() == {"name": "shop", "changed": True}
    problem(api.get("/jobs", headers=bearer(key)), 401, "unauthenticated")
    assert api.delete("/admin/keys/shop", headers=bearer(admin)).json()["changed"] is False
    problem(api.delete("/admin/keys/nobody", headers=bearer(admin)), 404, "not-found")
    soon = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    expired = make_key(api, "old", "read", admin=admin, expires_at=soon)
    connection.execute("update pgqueue.api_keys set expires_at = clock_timestamp() where name = 'old'")
    problem(api.get("/jobs", headers=bearer(expired)), 401, "unauthenticated")
    # With no key in force, the API is closed, not open.
    api.delete("/admin/keys/root", headers=bearer(admin))
    problem(api.get("/jobs"), 401, "unauthenticated")


def test_an_ended_key_enqueues_nothing_more(api: Api, connection: psycopg.Connection[Any]) -> None:
    job = {"type": "t", "payload": {}}
    assert api.post("/jobs", json=job).status_code == 201
    admin = make_key(api, "root", "admin")
    problem(api.post("/jobs", json=job), 401, "unauthenticated")
    shop, other = (make_key(api, name, "submit", admin=admin) for name in ("shop", "other"))
    for key in (shop, other):
        assert api.post("/jobs", json=job, headers=bearer(key)).status_code == 201
    connection.execute("select pgqueue.revoke_key('shop')")
    answer = api.post("/jobs", json=job, headers=bearer(shop))
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert api.post("/jobs", json=job, headers=bearer(other)).status_code == 201
    connection.execute("update pgqueue.api_keys set expires_at = clock_timestamp() where name = 'other'")
    problem(api.post("/jobs", json=job, headers=bearer(other)), 401, "unauthenticated")
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (4,)


def test_an_ended_key_does_not_fail_those_that_share_its_call(api: Api, connection: psycopg.Connection[Any]) -> None:
    job = {"type": "t", "payload": {}}
    admin = make_key(api, "root", "admin")
    shop, other = (make_key(api, name, "submit", admin=admin) for name in ("shop", "other"))
    for key in (shop, other):
        assert api.post("/jobs", json=job, headers=bearer(key)).status_code == 201
    connection.execute("select pgqueue.revoke_key('shop')")
    with ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(
                lambda number: api.post("/jobs", json=job, headers=bearer((shop, other)[number % 2])).status_code,
                range(40),
            )
        )
    assert answers == [401, 201] * 20
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (22,)


ALLOWED = {
    "submit": {("POST", "/jobs"), ("POST", "/jobs/batch")},
    "read": {("GET", "/jobs"), ("GET", "/queues"), ("GET", "/admin/dlq"), ("GET", "/stats"), ("GET", "/schedules")},
    "operate": {
        ("POST", "/admin/dlq/retry-all"),
        ("POST", "/admin/queues/q/pause"),
        ("PATCH", "/admin/queues/q"),
        ("POST", "/leases/claim"),
        ("PUT", "/schedules/s"),
        ("POST", "/admin/jobs/cancel"),
    },
    "admin": {("GET", "/admin/keys"), ("POST", "/admin/keys")},
}
INCLUDED = {
    "submit": {"submit"},
    "read": {"read"},
    "operate": {"operate", "read"},
    "admin": {"submit", "read", "operate", "admin"},
}


def test_each_scope_may_do_its_part_and_nothing_more(api: Api, admin: str) -> None:
    for scope, included in INCLUDED.items():
        key = make_key(api, f"k-{scope}", scope, admin=admin)
        for needed, routes in ALLOWED.items():
            for method, path in routes:
                answer = api.request(method, path, headers=bearer(key), json={})
                if needed in included:
                    assert answer.status_code not in (401, 403), (scope, method, path, answer.text)
                else:
                    body = problem(answer, 403, "forbidden")
                    assert body["required_scope"] == needed


def test_jobs_carry_the_name_of_the_key_and_cancels_only_ones_own(
    api: Api, admin: str, connection: psycopg.Connection[Any]
) -> None:
    shop, other = (make_key(api, name, "submit", admin=admin) for name in ("shop", "other"))
    job = api.post("/jobs", json={"type": "a"}, headers=bearer(shop)).json()
    assert job["producer_id"] == "shop"
    given = api.post("/jobs", json={"type": "a", "producer_id": "till 3"}, headers=bearer(shop)).json()
    assert given["producer_id"] == "till 3"
    problem(api.post(f"/jobs/{job['job_id']}/cancel", headers=bearer(other)), 403, "forbidden")
    assert api.post(f"/jobs/{job['job_id']}/cancel", headers=bearer(shop)).status_code == 200
    api.post("/admin/queues/q/pause", headers=bearer(admin))
    audit = connection.execute("select actor, verb from pgqueue.audit order by audit_id").fetchall()
    assert audit == [
        ("api", "create_key"),
        ("key root", "create_key"),
        ("key root", "create_key"),
        ("key shop", "cancel"),
        ("key root", "pause"),
    ]


def test_a_key_that_operates_cancels_the_jobs_of_all(api: Api, admin: str) -> None:
    shop, operator, reader = (make_key(api, scope, scope, admin=admin) for scope in ("submit", "operate", "read"))
    for method, path in (("POST", "/jobs/{}/cancel"), ("DELETE", "/jobs/{}")):
        job_id = api.post("/jobs", json={"type": "a"}, headers=bearer(shop)).json()["job_id"]
        problem(api.request(method, path.format(job_id), headers=bearer(reader)), 403, "forbidden")
        assert api.request(method, path.format(job_id), headers=bearer(operator)).status_code == 200


def test_one_producer_cannot_meet_the_keys_of_another(api: Api, admin: str) -> None:
    shop, other = (make_key(api, name, "submit", admin=admin) for name in ("shop", "other"))
    asked = {"type": "a", "idempotency_key": "order-1"}
    first, second = (api.post("/jobs", json=asked, headers=bearer(key)) for key in (shop, other))
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json()["job_id"] != second.json()["job_id"]


def test_without_keys_only_this_machine_is_served(live: MakeLive) -> None:
    api = live()
    assert api.http.get("/jobs").status_code == 200
    for host in ("example.com", "localhost.example.com", "10.0.0.1"):
        problem(api.http.get("/jobs", headers={"Host": host}), 403, "cross-site")
    for host in ("localhost:8080", "127.0.0.1", "[::1]:9", "x.localhost"):
        assert api.http.get("/jobs", headers={"Host": host}).status_code == 200
    for site in ("cross-site", "same-site"):
        answer = api.http.post("/jobs", json={"type": "a"}, headers={"Sec-Fetch-Site": site})
        problem(answer, 403, "cross-site")
    assert api.http.post("/jobs", json={"type": "a"}, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 201
    # What a proxy on this machine passes on comes from elsewhere.
    for name, elsewhere, here in (
        (
            "X-Forwarded-For",
            ("10.1.2.3", "unknown", "10.1.2.3, 127.0.0.1"),
            ("127.0.0.1", "::1", "127.0.0.1, [::1]:80"),
        ),
        ("X-Real-IP", ("10.1.2.3", "unknown"), ("127.0.0.1", "::1")),
        (
            "Forwarded",
            ("for=10.1.2.3", "For=_hidden;proto=http", "proto=https", 'for=127.0.0.1, for="[2001:db8::1]:80"'),
            ("for=127.0.0.1;proto=http", 'proto=http; for="[::1]:80"'),
        ),
    ):
        for value in elsewhere:
            problem(api.http.get("/jobs", headers={name: value}), 401, "unauthenticated")
        for value in here:
            assert api.http.get("/jobs", headers={name: value}).status_code == 200, (name, value)


def test_serve_binds_to_this_machine_until_there_is_a_key(serve: Serve) -> None:
    served = serve("--host", "0.0.0.0")
    assert served.http.get("/health/live").status_code == 200
    assert served.stop() == 0
    told = served.told()
    assert "there is no API key, so this listens on 127.0.0.1" in told
    assert f"http://127.0.0.1:{served.port}" in told


def test_answers_have_strict_headers_and_an_id(api: Api) -> None:
    for path in ("/jobs", "/nothing", "/jobs?limit=x", "/health/live"):
        headers = api.get(path, headers={"X-Request-ID": "abc-1"}).headers
        assert headers["x-request-id"] == "abc-1"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert headers["content-security-policy"].startswith("default-src 'none'")
        assert headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    for bad in ("a b", "x" * 65, "é"):
        given = api.get("/jobs", headers={"X-Request-ID": bad.encode()}).headers["x-request-id"]
        assert given.isascii()
        assert given != bad


def test_methods_and_paths_that_are_not_there(api: Api) -> None:
    answer = api.put("/jobs")
    problem(answer, 405, "method-not-allowed")
    assert answer.headers["allow"] == "GET, HEAD, OPTIONS, POST"
    problem(api.get("/jobz"), 404, "not-found")
    assert api.options("/jobs").headers["allow"] == "GET, HEAD, OPTIONS, POST"


def test_a_bug_tells_nothing_of_the_inside(api: Api, connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        "create or replace function pgqueue.why(job_id uuid) returns text language plpgsql as"
        " $$ begin perform 1 / 0; raise exception 'secret of table x' using errcode = 'XX000'; end $$"
    )
    job_id = api.post("/jobs", json={"type": "a"}).json()["job_id"]
    connection.execute(
        "create or replace function pgqueue.why(job_id uuid) returns text language plpgsql as"
        " $$ begin raise exception 'secret of table x' using errcode = 'XX000'; end $$"
    )
    body = problem(api.get(f"/jobs/{job_id}/why"), 500, "database-error")
    assert "secret" not in str(body)
    connection.execute("drop function pgqueue.why(uuid)")
    gone = api.get(f"/jobs/{job_id}/why")
    body = problem(gone, 503, "schema-outdated")
    assert "why" not in body["detail"]
    api.app.state.pgqueue.hub.follow = None
    body = problem(api.get(f"/jobs/{job_id}/result?wait=1"), 500, "internal-error")
    assert "NoneType" not in str(body)


@pytest.fixture
def login(connection: psycopg.Connection[Any], database: str) -> Iterator[str]:
    """The DSN of a login role that has what an API needs and is nobody otherwise."""
    name = f"api_{connection.info.dbname}"
    role = sql.Identifier(name)
    connection.execute(sql.SQL("create role {} login in role pgqueue_operator, pgqueue_worker").format(role))
    yield make_conninfo(database, user=name)
    connection.execute(sql.SQL("drop owned by {}").format(role))
    connection.execute(sql.SQL("drop role {}").format(role))


def test_a_role_with_two_group_roles_is_all_that_the_api_needs(
    login: str, make_api: MakeApi, connection: psycopg.Connection[Any]
) -> None:
    try:
        psycopg.connect(login).close()
    except psycopg.OperationalError as error:
        pytest.skip(f"this server lets no new role in: {error}")
    api = make_api(settings=Settings(dsn=login, sweep_interval=0.2), maintenance=True)
    worker = "6b2f0c1e-3d6a-4b65-9b39-2a1d1f1b5a10"
    job_id = api.post("/jobs", json={"type": "a", "idempotency_key": "k"}).json()["job_id"]
    assert api.post("/jobs/batch", json={"jobs": [{"type": "a"}] * 3}).status_code == 201
    claimed = api.post("/leases/claim", json={"worker_id": worker, "max_jobs": 2, "wait_ms": 100}).json()["jobs"]
    held = [{"job_id": job["job_id"], "attempt": 1} for job in claimed]
    failure = {**held[1], "error": {"message": "no"}, "retryable": False}
    done = {
        ("POST", "/leases/heartbeat"): {"worker_id": worker, "jobs": held},
        ("POST", "/leases/progress"): {"worker_id": worker, "jobs": [{**held[0], "progress": 1}]},
        ("POST", "/leases/complete"): {"worker_id": worker, "jobs": [held[0]]},
        ("POST", "/leases/fail"): {"worker_id": worker, "jobs": [failure]},
        ("POST", f"/admin/jobs/{held[1]['job_id']}/retry"): None,
        ("POST", f"/jobs/{held[1]['job_id']}/cancel"): None,
        ("POST", "/admin/dlq/retry-all"): None,
        ("POST", "/admin/dlq/discard-all"): None,
        ("POST", "/admin/queues/q/pause"): None,
        ("POST", "/admin/queues/q/resume"): None,
        ("PATCH", "/admin/queues/q"): {"hard_limit": 5},
        ("PUT", "/schedules/s"): {"cron": "@daily", "job_type": "a"},
        ("POST", "/admin/schedules/s/run"): None,
        ("GET", "/schedules/s/preview"): None,
        ("DELETE", "/schedules/s"): None,
        ("GET", f"/jobs/{job_id}/result?wait=0.1"): None,
        ("GET", "/jobs?q=a"): None,
        ("GET", "/queues"): None,
        ("GET", "/workers"): None,
        ("GET", "/stats"): None,
        ("GET", "/admin/dlq"): None,
        ("GET", f"/jobs/{job_id}/why"): None,
        ("GET", "/health/ready"): None,
        ("POST", "/admin/keys"): {"name": "k", "scopes": ["admin"]},
    }
    for (method, path), body in done.items():
        answer = api.request(method, path, json=body)
        assert answer.status_code < 300, (method, path, answer.text)
    # It is nobody otherwise: no table may be written past the verbs.
    with psycopg.connect(login, autocommit=True) as session:
        for statement in (
            "update pgqueue.jobs set status = 'pending'",
            "delete from pgqueue.jobs",
            "insert into pgqueue.api_keys (name, sha256) values ('x', sha256('x'))",
            "select * from pgqueue.api_keys",
            "delete from pgqueue.audit",
            "select pgqueue.note('x', 'y', 1)",
            "create table pgqueue.mine (x int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                session.execute(statement)
    row = connection.execute("select count(*) from pgqueue.audit where actor = 'api'").fetchone()
    assert row
    assert row[0] >= 9


LARGE = b"a" * 200_000
HEAD = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "request_of_it",
    [
        HEAD + b"X-Long: " + LARGE,
        HEAD + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 100) for n in range(1500)),
        b"GET /health/live?" + LARGE,
        b"GET / HTTP/1.1\r\n" + LARGE,
        CHUNKED + b"2\r\n{}\r\n0\r\nX-Late: " + LARGE,
        CHUNKED + b"2;" + LARGE,
    ],
)
def test_what_a_request_sends_beside_its_body_is_bounded(live: MakeLive, request_of_it: bytes, whole: bool) -> None:
    served = live()
    assert served.server.config.http == "h11"
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as peer:
        told = b""
        with contextlib.suppress(ConnectionError):
            if whole:
                peer.sendall(request_of_it + b"\r\n\r\n")
            else:
                # Never at its end: the server must not wait for it.
                for first in range(0, len(request_of_it), 10_000):
                    peer.sendall(request_of_it[first : first + 10_000])
                    time.sleep(0.001)
            while part := peer.recv(65536):
                told += part
    assert not told.startswith(b"HTTP/1.1 2")


def test_a_large_body_in_many_parts_is_no_large_head(live: MakeLive) -> None:
    served = live()
    body = b'{"type": "a", "payload": {"d": "' + b"x" * 300_000 + b'"}}'
    parts = b"".join(
        b"%x\r\n%s\r\n" % (len(part), part) for part in (body[n : n + 1000] for n in range(0, len(body), 1000))
    )
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as peer:
        peer.sendall(head + parts + b"0\r\n\r\n")
        told = b""
        while part := peer.recv(65536):
            told += part
    assert told.startswith(b"HTTP/1.1 201 ")


def test_a_client_that_offers_another_protocol_is_served_in_this_one(live: MakeLive) -> None:
    """Java's client, and curl --http2, offer HTTP/2 with their first request, and keep the connection."""
    served = live()
    offer = (
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAA\r\n"
    )
    body = b'{"type": "a"}'
    post = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(
        body
    )
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as peer:
        for sent in (HEAD + offer + b"\r\n", post + offer + b"\r\n" + body, post + b"\r\n" + body, HEAD + b"\r\n"):
            peer.sendall(sent)
            told = peer.recv(65536)
            assert told.startswith(b"HTTP/1.1 20"), (sent, told)
            while not told.split(b"\r\n\r\n", 1)[1]:
                part = peer.recv(65536)
                assert part
                told += part


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"GET /health/live HTTP/1.1\r\n", b"400"),
        (HEAD + b"Host: example.com\r\n", b"400"),
        (b"GET /health/live HTTP/1.0\r\n", b"200"),
    ],
)
def test_a_request_names_one_host(live: MakeLive, head: bytes, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live().port), timeout=20) as peer:
        peer.sendall(head + b"\r\n")
        assert peer.recv(12) == b"HTTP/1.1 " + said
