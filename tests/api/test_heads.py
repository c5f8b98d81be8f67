"""HEAD is answered as GET would be, without a body."""

import re
import socket
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.api.dashboard.shell import _PAGES
from tests.api.conftest import Api, Live, MakeLive
from tests.meet import wait_until

TIMES = ("/dashboard", "/queues", "/stats", "/metrics", "/health/ready")
DASHBOARD = [f"/dashboard{path}" for path, _, _ in _PAGES]


def paths(live: Live) -> list[str]:
    """Every address that takes GET, those of the document and those of pages, with things that there are."""
    job_id = live.http.post("/jobs", json={"type": "a", "queue": "a/b"}).json()["job_id"]
    assert live.http.put("/schedules/s", json={"cron": "@hourly", "job_type": "a"}).status_code == 201
    values = {"job_id": job_id, "queue_name": "a%2Fb", "schedule_name": "s"}
    document = live.http.get("/schema/openapi.json").json()["paths"]
    got = [path for path in document if "get" in document[path]]
    described = [re.sub(r"{(\w+)}", lambda found: values[found[1]], path) for path in got]
    (style,) = re.findall(r'href="([^"]*style.css)"', live.http.get("/dashboard").text)
    wait = [path + "?wait=0" if path.endswith("/result") else path for path in described]
    own = ["/", "/schema", "/schema/openapi.json", style, f"/dashboard/jobs/{job_id}", "/dashboard/login"]
    return [
        *wait,
        *DASHBOARD,
        *own,
        "/dashboard/nowhere",
        "/jobs/",
        "/jobs/5",
        "/jobs?limit=0",
        "/events?x=1",
        "/nothing",
    ]


def known(answer: httpx.Response) -> tuple[int, dict[str, str]]:
    """The status, the headers' names, and their values where they do not differ from request to request."""
    differ = ("date", "x-request-id", "etag")
    return answer.status_code, {name: "" if name in differ else value for name, value in answer.headers.items()}


def test_head_is_get_without_a_body(live: MakeLive) -> None:
    api = live()
    asked = paths(api)
    assert len(asked) > 30
    for path in asked:
        if path.endswith("/events"):
            continue
        head, get = api.http.head(path), api.http.get(path)
        # What a page or a list says of times, and the ids of requests, differ by some digits.
        near = get.status_code >= 400 or path.startswith(TIMES)
        sizes = [int(one.headers.pop("content-length")) for one in (head, get)]
        assert abs(sizes[0] - sizes[1]) <= (100 if near else 0), path
        assert known(head) == known(get), path
        assert head.content == b""
        assert head.status_code != 405, path


@pytest.mark.parametrize("path", ["/events", "/jobs/{}/events", "/dashboard/events"])
def test_head_of_a_stream_ends(live: MakeLive, path: str) -> None:
    api = live(max_streams=1)
    path = path.format(api.http.post("/jobs", json={"type": "a"}).json()["job_id"])
    with api.http.stream("GET", path) as get:
        assert get.status_code == 200
        # There is one seat for streams.
        assert api.http.head(path, timeout=5).status_code == 503
    wait_until(lambda: api.app.state.pgqueue._streams == 0, 10)
    for _ in range(3):
        head = api.http.head(path, timeout=5)
        assert known(head) == known(get)
        wait_until(lambda: api.hub.followers == 0, 10)


@pytest.mark.parametrize("path", [b"/health/live", b"/jobs", b"/jobs/5", b"/events", b"/metrics", b"/dashboard"])
def test_nothing_comes_after_the_headers(live: MakeLive, path: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live().port), timeout=10) as connection:
        connection.sendall(b"HEAD %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
        connection.sendall(b"HEAD /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        said = b"".join(iter(lambda: connection.recv(65536), b""))
    first, second, rest = said.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 404" if path.endswith(b"5") else b"HTTP/1.1 200"), first
    assert second.startswith(b"HTTP/1.1 200")
    assert rest == b""


def test_what_has_no_get_has_no_head(api: Api) -> None:
    for path in ("/jobs/batch", "/leases/claim"):
        refused = api.head(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
    assert api.head("/nothing").status_code == 404
    assert api.delete("/jobs").headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert api.options("/jobs").headers["allow"] == "GET, HEAD, OPTIONS, POST"
    assert api.options("/jobs/batch").headers["allow"] == "OPTIONS, POST"
    assert not any("head" in item for item in api.get("/schema/openapi.json").json()["paths"].values())


def test_keys_and_rates_hold(api: Api, connection: psycopg.Connection[Any]) -> None:
    made = api.post("/admin/keys", json={"name": "k", "scopes": ["read"], "rate": 3}).json()
    weak = api.post("/admin/keys", json={"name": "w", "scopes": ["admin"]}, headers=bearer(made["key"]))
    assert weak.status_code == 403
    refused = api.head("/jobs")
    assert (refused.status_code, refused.content) == (401, b"")
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert api.head("/dashboard", follow_redirects=False).headers["location"].startswith("/dashboard/login")
    answers = [api.head("/jobs", headers=bearer(made["key"])) for _ in range(20)]
    assert {one.status_code for one in answers} == {200, 429}
    assert all("retry-after" in one.headers for one in answers if one.status_code == 429)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
