"""`--root-path`: behind a proxy that serves the API below a path, and takes that away."""

import html
import re
import subprocess
import sys

import httpx
import psycopg
import pytest

from tests.api.conftest import Serve, Served
from tests.api.problems import problem

#: Also the beginning of a path of ours.
ROOT = "/queue"
SAME = {"Sec-Fetch-Site": "same-origin"}


class Proxy(httpx.BaseTransport):
    """Takes the root away from paths, and serves nothing else."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode()
        assert path == ROOT or path.startswith((f"{ROOT}/", f"{ROOT}?")), f"this leads away: {path}"
        request.url = request.url.copy_with(raw_path=(path.removeprefix(ROOT) or "/").encode())
        return self._inner.handle_request(request)

    def close(self) -> None:
        self._inner.close()


def through_proxy(served: Served) -> httpx.Client:
    return httpx.Client(base_url=served.url + ROOT, transport=Proxy(), timeout=30)


def links(page: httpx.Response) -> set[str]:
    found = re.findall(r'(?:href|src|action|data-base|data-events)="([^"#][^"]*)"', page.text)
    return {html.unescape(one) for one in found}


@pytest.mark.parametrize("how", ["option", "variable"])
def test_all_that_leads_somewhere_begins_with_it(serve: Serve, how: str) -> None:
    api = serve("--root-path", ROOT) if how == "option" else serve(env={"PGQUEUE_ROOT_PATH": ROOT})
    with through_proxy(api) as http:
        for path in (ROOT, f"{ROOT}/"):
            assert httpx_get(http, path).headers["location"] == f"{ROOT}/dashboard"
        made = http.post("/jobs", json={"type": "a", "queue": "a/b"})
        assert made.headers["location"] == f"{ROOT}/jobs/{made.json()['job_id']}"
        place = http.put("/schedules/a%2Fb", json={"cron": "@hourly", "job_type": "a"})
        assert place.status_code == 201, (place.text, place.request.url)
        assert place.headers["location"] == f"{ROOT}/schedules/a%2Fb"
        for path in (made.headers["location"], place.headers["location"]):
            assert httpx_get(http, path).status_code == 200
        for path in ("/queues", "/queues/a%2Fb", "/schema", "/health/live", "/metrics"):
            get, head = http.get(path), http.head(path)
            assert (get.status_code, head.status_code) == (200, 200), path
            assert head.headers.get("content-security-policy") == get.headers["content-security-policy"]
        document = http.get("/schema/openapi.json").json()
        assert document["servers"] == [{"url": ROOT}]
        assert "/jobs" in document["paths"]
        for path, status in (("/queues/5/6", 404), ("/nothing", 404), ("/jobs?limit=0", 422), ("/jobs?x=1", 422)):
            assert http.get(path).json()["instance"] == ROOT + path.partition("?")[0]
            assert http.get(path).status_code == status
        problem(http.get(f"{ROOT}/jobs"), 404, "not-found")


def httpx_get(http: httpx.Client, path: str) -> httpx.Response:
    """GET of an address as a page or a header has it."""
    return http.get(http.base_url.join(path))


def test_the_dashboard_leads_nowhere_else(serve: Serve, connection: psycopg.Connection) -> None:
    api = serve("--root-path", ROOT)
    connection.execute("insert into pgqueue.jobs (job_type) select 'a' from generate_series(1, 60)")
    with through_proxy(api) as http:
        http.put("/schedules/s", json={"cron": "@hourly", "job_type": "a"})
        todo, seen, streams = {f"{ROOT}/dashboard"}, set[str](), set[str]()
        while todo and len(seen) < 60:
            path = min(todo, key=len)
            todo.remove(path)
            seen.add(path)
            page = httpx_get(http, path)
            # Forms are sent there by POST.
            assert page.status_code in (200, 303, 404), path
            if page.headers["content-type"].startswith("text/html") and page.status_code == 200:
                assert all(one.startswith(ROOT) for one in links(page)), path
                todo |= {one for one in links(page) - seen if "/events" not in one}
                streams |= {one for one in links(page) if "/events" in one}
        assert {f"{ROOT}/dashboard/{page}" for page in ("jobs", "queues", "schedules", "system")} <= seen
        assert len(streams) > 1
        for path in sorted(streams)[:2]:
            with http.stream("GET", http.base_url.join(path)) as stream:
                assert stream.headers["content-type"].startswith("text/event-stream")
        assert any(path.endswith("style.css") for path in seen)
        shown = http.get("/dashboard/jobs?type=a")
        (back,) = set(re.findall(r'name="back" value="([^"]*)"', shown.text))
        assert back == f"{ROOT}/dashboard/jobs?type=a"
        done = http.post("/dashboard/queues/pause", data={"name": "default", "back": back}, headers=SAME)
        assert done.headers["location"] == back
        assert f"path={ROOT}/dashboard;" in done.headers["set-cookie"].lower() + ";"
        key = http.post("/admin/keys", json={"name": "k", "scopes": ["admin"]}).json()["key"]
        login = http.get("/dashboard/jobs?type=a").headers["location"]
        assert login == f"{ROOT}/dashboard/login?next=%2Fqueue%2Fdashboard%2Fjobs%3Ftype%3Da"
        entered = http.post("/dashboard/login", data={"key": key, "next": back}, headers=SAME)
        assert entered.headers["location"] == back
        assert httpx_get(http, back).status_code == 200


def test_what_is_no_path_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgqueue", "serve", "--root-path", "queue/"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "root_path is 'queue/'; it must be a path such as /queue" in done.stderr
    assert "Traceback" not in done.stderr
