"""Text that means something elsewhere, bodies that are too much, and requests that pretend to be others."""

import base64
import json
import re
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest

from pgqueue import App
from tests.api.conftest import Api, MakeLive
from tests.api.problems import problem
from tests.api.test_access import bearer, make_key
from tests.doors.test_doors import DOORS, Doors
from tests.meet import running_time
from tests.python.running import make_app
from tests.servers import ServerUnderTest

MEANING = [
    "'; drop table pgqueue.jobs; --",
    '"; drop schema pgqueue cascade; --',
    "$$; select pg_sleep(60); $$ -- $1 $body$",
    "%s %(n)s %% %",
    "a' or '1'='1",
    "\\'; select 1; -- \\",
    ":name {0} ${x} {{7*7}} #{y}",
    "-1; select 1 & 0",
    "*) union select rolname::text from pg_roles --",
    "\u2019 \uff07 ; delete from pgqueue.jobs",
]
FIELDS = ["queue", "idempotency_key", "producer_id", "ordering_key"]
OBJECTS = """select count(*), sum(hashtext(relname::text)) from pg_class
  where relnamespace = 'pgqueue'::regnamespace and relkind in ('r', 'p', 'v', 'S', 'i')
  and relname not similar to 'jobs_(completed|cancelled|dead_letter)_%'"""


@pytest.fixture
def doors(database: str, server: ServerUnderTest) -> Doors:
    from pathlib import Path

    return Doors(database, str(Path(server.bindir) / "psql"))


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database) as made:
        yield made


@pytest.fixture
def whole(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Nothing but jobs has come or gone."""
    before = connection.execute(OBJECTS).fetchone()
    yield
    assert connection.execute(OBJECTS).fetchone() == before


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("whole")
def test_sql_in_every_field_is_text_at_every_door(doors: Doors, api: Api, connection: psycopg.Connection[Any]) -> None:
    for number, text in enumerate(MEANING):
        # Programs take a while to start: each text goes through two of those doors that are programs.
        chosen = [door for place, door in enumerate(DOORS) if door in ("insert", "function", "python")]
        chosen += [("psql", "cli")[number % 2]]
        for door in chosen:
            options = dict.fromkeys(FIELDS, f"{text}{door}"[:60])
            payload = {text: [text, {"deep": text}]}
            job_id = doors.enqueue(door, payload, **options)
            row = connection.execute("select to_jsonb(j) from pgqueue.job(%s) j", [job_id]).fetchone()
            assert row is not None
            assert {name: row[0][name] for name in FIELDS} == options
            assert row[0]["payload"] == payload
        body = {"type": text, "payload": {text: text}, **dict.fromkeys(FIELDS, text)}
        made = api.post("/jobs", json=body)
        assert made.status_code == 201, made.text
        assert {name: made.json()[name] for name in body} == body
        in_batch = api.post("/jobs/batch", json={"jobs": [{**body, "idempotency_key": f"{text} 2"}]})
        assert in_batch.status_code == 201, in_batch.text
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (len(MEANING) * 6,)


@pytest.mark.usefixtures("whole")
def test_sql_in_every_filter_and_path_finds_what_is_called_so(api: Api, connection: psycopg.Connection[Any]) -> None:
    api.post("/jobs", json={"type": "other", "queue": "other"})
    for text in MEANING:
        api.post("/jobs", json={"type": text, "queue": text, "producer_id": text})
        for name in ("queue", "type", "producer"):
            answer = api.get("/jobs", params={name: text})
            assert answer.status_code == 200, answer.text
            assert [job["type"] for job in answer.json()["items"]] == [text]
        assert api.get("/jobs", params={"q": text}).status_code == 200
        for name in ("status", "cursor", "limit", "since"):
            assert api.get("/jobs", params={name: text}).status_code in (200, 422)
        path = quote(text, safe="")
        assert api.get(f"/queues/{path}").status_code == 200
        assert api.post(f"/admin/queues/{path}/pause").json()["queue"] == text
        assert api.post(f"/admin/queues/{path}/resume").json()["queue"] == text
        assert api.patch(f"/admin/queues/{path}", json={"hard_limit": 100_000}).status_code == 200
        assert api.patch(f"/admin/queues/{path}", json={text: 1}).status_code == 422
        for verb in ("retry-all", "discard-all"):
            answer = api.post(f"/admin/dlq/{verb}", params={"filter": f"job_type:{text}"})
            assert answer.status_code in (200, 422), answer.text
            assert answer.status_code == 422 or answer.json().get("count", 0) == 0
        assert api.put(f"/schedules/{path}", json={"cron": "@daily", "job_type": text}).status_code in (200, 201)
        assert api.put(f"/schedules/{path}", json={"cron": text, "job_type": "a"}).status_code == 422
        zone = api.put(f"/schedules/{path}", json={"cron": "@daily", "timezone": text, "job_type": "a"})
        assert zone.status_code == 422
        assert api.delete(f"/schedules/{path}").status_code in (200, 204)
        assert api.get(f"/jobs/{path}").status_code in (404, 422)
        for route in ("/leases/claim", "/leases/complete"):
            assert api.post(route, json={"worker_id": text, "queues": [text], "jobs": []}).status_code == 422
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (len(MEANING) + 1,)
    assert api.get("/queues").status_code == 200


@pytest.mark.usefixtures("whole")
def test_sql_in_arguments_of_verbs_in_python_is_text(app: App, connection: psycopg.Connection[Any]) -> None:
    for text in MEANING:
        assert app.jobs_sync(queue=text, job_type=text, producer_id=text) == []
        assert app.retry_dead_letters_sync(job_type=text, queue=text) == 0
        assert app.discard_dead_letters_sync(job_type=text, queue=text) == 0
        assert app.pause_sync(text) is True
        assert app.resume_sync(text) is True
        for verb in (app.job_sync, app.cancel_sync, app.retry_sync, app.why_sync):
            with pytest.raises(Exception, match=r"job_id|UUID|uuid"):
                verb(text)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.timeout(180)
def test_deep_long_and_many_are_taken_or_refused_but_never_break(api: Api) -> None:
    def send(path: str, body: str | bytes) -> int:
        answer = api.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code < 500, (answer.status_code, body[:80], answer.text[:300])
        if answer.status_code == 201 and path == "/jobs":
            assert api.get(f"/jobs/{answer.json()['job_id']}").status_code == 200
        return answer.status_code

    for depth in (100, 900, 1100, 5000, 100_000):
        for body in (
            f'{{"type": "a", "payload": {{"d": {nested(depth)}}}}}',
            '{"type": "a", "payload": {"d": ' + '{"a":' * depth + "1" + "}" * depth + "}}",
            nested(depth),
        ):
            for path in ("/jobs", "/jobs/batch", "/leases/complete"):
                code = send(path, body)
                assert code in (201, 413, 422, 400)
    for text in ("1e5000", "-1e400", "9" * 5000, "0." + "1" * 5000, "1" + "0" * 400):
        assert send("/jobs", f'{{"type": "a", "payload": {{"n": {text}}}}}') in (201, 422, 400)
    assert send("/jobs", json.dumps({"type": "a", "payload": {f"k{n}": n for n in range(50_000)}})) in (201, 413, 422)
    assert send("/jobs", b'{"type": "a", "type": "b"}') in (201, 400, 422)
    assert send("/jobs", b'{"type": "a"} {"type": "b"}') in (400, 422)
    assert send("/jobs", b"\xef\xbb\xbf" + b'{"type": "a"}') in (201, 400, 422)
    assert send("/jobs", b"") in (400, 422)
    assert send("/jobs", b"[" * (20 << 20)) == 413
    for query in (f"q={'x' * 20_000}", "&".join(f"queue={n}" for n in range(2000)), f"cursor={'A' * 5000}"):
        assert api.get(f"/jobs?{query}").status_code in (200, 400, 414, 422)
    assert api.get(f"/jobs/{'a' * 5000}").status_code in (404, 414, 422)
    deep = base64.urlsafe_b64encode(b"[" * 40_000).decode()
    assert api.get("/dashboard", headers={"Cookie": f"pgqueue_flash={deep}"}).status_code == 200
    assert api.get("/jobs", headers={f"X-{n}": "y" for n in range(200)}).status_code == 200


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(request)
        peer.settimeout(5)
        said = b""
        try:
            while part := peer.recv(65536):
                said += part
                if b"\r\n\r\n" in said and b"HTTP/1.1 4" in said[:12]:
                    break
        except TimeoutError:
            pass
        return said


def test_requests_that_are_none_are_cut_off(live: MakeLive) -> None:
    api = live()
    head = b"Host: localhost\r\nContent-Type: application/json\r\n"
    for request in (
        b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\nConnection: close\r\n\r\n",
        b"POST /jobs HTTP/1.1\r\n"
        + head
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
        b"POST /jobs HTTP/1.1\r\n" + head + b"Content-Length: -1\r\n\r\n",
        b"POST /jobs HTTP/1.1\r\n" + head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"GET /jobs\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX-Big: " + b"x" * 200_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ):
        said = raw(api.port, request)
        assert b"HTTP/1.1 5" not in said, (request[:80], said[:200])
        assert said.count(b"HTTP/1.1 2") <= 1
    assert api.http.get("/jobs").status_code == 200


def test_no_path_or_header_gets_around_scopes(api: Api) -> None:
    admin = make_key(api, "root", "admin")
    reader = bearer(make_key(api, "look", "read", admin=admin))
    assert api.get("/jobs", headers=reader).status_code == 200
    assert api.get("/admin/keys", headers=reader).status_code == 403
    for path in (
        "//admin/keys", "/./admin/keys", "/jobs/../admin/keys", "/jobs/..%2fadmin/keys", "/admin%2fkeys", "/ADMIN/keys",
        "/admin/keys/", "/admin/keys;x", "/admin/keys%00", "/admin/keys%20", "/%61dmin/keys", "/admin//keys",
        "/dashboard/../admin/keys", "/jobs/%2e%2e/admin/keys", "/admin\\keys",
    ):  # fmt: skip
        answer = api.get(path, headers=reader)
        assert answer.status_code in (403, 404, 307, 308, 301), (path, answer.status_code, answer.text[:200])
        assert "prefix" not in answer.text
        problems = {401, 404, 307, 308, 301}
        assert api.get(path).status_code in problems, path
    for name, value in (
        ("X-HTTP-Method-Override", "DELETE"), ("X-Original-URL", "/admin/keys"), ("X-Rewrite-URL", "/admin/keys"),
        ("X-Forwarded-For", "127.0.0.1"), ("X-Forwarded-User", "root"), ("X-Real-IP", "127.0.0.1"),
        ("Forwarded", "for=127.0.0.1"), ("X-Forwarded-Host", "localhost"), ("X-Forwarded-Prefix", "/admin"),
    ):  # fmt: skip
        assert api.get("/admin/keys", headers={**reader, name: value}).status_code == 403
        assert api.get("/jobs", headers={name: value}).status_code == 401
    both = api.get("/admin/keys", headers={**reader, "X-API-Key": admin})
    assert both.status_code in (401, 403), "the key that is named first counts"
    for method in ("TRACE", "CONNECT", "PROPFIND", "FOO"):
        assert api.request(method, "/jobs", headers=reader).status_code in (404, 405)
    assert api.head("/admin/keys", headers=reader).status_code in (403, 404, 405)
    key = api.get(f"/jobs?key={admin}&api_key={admin}")
    assert key.status_code == 401, "keys are no parameters"


def test_a_key_is_in_no_answer_and_no_log(live: MakeLive, capfd: pytest.CaptureFixture[str]) -> None:
    api = live()
    made = api.http.post("/admin/keys", json={"name": "root", "scopes": ["admin"]}).json()["key"]
    tried = "pgq_" + "z" * 43
    for answer in (
        api.http.get("/jobs", headers=bearer(tried)),
        api.http.get("/admin/keys", headers=bearer(made)),
        api.http.get("/nothing", headers=bearer(made)),
        api.http.post("/jobs", content=b"{", headers={**bearer(made), "Content-Type": "application/json"}),
    ):
        assert made not in answer.text + str(answer.headers)
        assert tried not in answer.text + str(answer.headers)
    out, err = capfd.readouterr()
    assert made not in out + err
    assert tried not in out + err


class Page(HTMLParser):
    """What of a page could run or lead elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.inline: list[str] = []
        self.handlers: list[str] = []
        self.elsewhere: list[str] = []
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._script = tag == "script" and "src" not in dict(attrs)
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.handlers.append(f"{tag} {name}={value}")
            if name in ("src", "href", "action", "formaction", "data") and re.match(
                r"\s*(javascript|data|vbscript|//|https?:)", value or "", re.IGNORECASE
            ):
                self.elsewhere.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._script = False


REFLECTED = "\"'><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}"
PAGES = ["", "/jobs", "/failures", "/queues", "/schedules", "/workers", "/dead-letters", "/system", "/login"]


def test_pages_run_only_our_scripts_and_reflect_only_text(api: Api) -> None:
    for page in PAGES:
        for query in ("", "?" + "&".join(f"{n}={quote(REFLECTED)}" for n in (
            "q", "queue", "type", "status", "producer", "next", "cursor", "since", "until", "error", "range", "sort"
        ))):  # fmt: skip
            answer = api.get(f"/dashboard{page}{query}", follow_redirects=True)
            assert answer.status_code in (200, 404, 422), (page, answer.status_code)
            policy = answer.headers["content-security-policy"]
            directives = {part.split()[0]: part.split()[1:] for part in policy.split(";") if part.strip()}
            for name in ("script-src", "style-src", "connect-src", "default-src"):
                allowed = directives.get(name, directives["default-src"])
                assert not {"'unsafe-inline'", "'unsafe-eval'", "*", "data:", "http:", "https:"} & set(allowed), policy
            assert directives["frame-ancestors"] == ["'none'"]
            assert directives["base-uri"] == ["'none'"]
            assert directives["form-action"] == ["'self'"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "<script>alert" not in answer.text
            assert "<img src=x" not in answer.text
            found = Page(answer.text)
            assert (found.inline, found.handlers, found.elsewhere) == ([], [], []), page


POSTS = [
    "/login", "/logout", "/jobs/cancel", "/jobs/retry", "/queues/pause", "/queues/resume", "/queues/limits",
    "/schedules/run", "/schedules/enable", "/jobs/bulk",
]  # fmt: skip


def test_no_other_site_can_have_a_browser_act(live: MakeLive, connection: psycopg.Connection[Any]) -> None:
    api = live()
    connection.execute("select pgqueue.enqueue('a')")
    own = f"http://127.0.0.1:{api.port}"
    for path in POSTS:
        for headers in (
            {"Sec-Fetch-Site": "cross-site", "Origin": own},
            {"Sec-Fetch-Site": "same-site"},
            {"Sec-Fetch-Site": "none"},
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": f"http://127.0.0.1.evil.example:{api.port}"},
            {"Referer": f"{own}/dashboard"},
            {},
        ):
            answer = api.http.post(f"/dashboard{path}", data={"queue": "default"}, headers=headers)
            assert answer.status_code == 403, (path, headers, answer.status_code)
            assert "set-cookie" not in answer.headers
        for method in ("GET", "PUT", "DELETE"):
            if (method, path) != ("GET", "/login"):
                answer = api.http.request(method, f"/dashboard{path}", headers={"Origin": own})
                assert answer.status_code in (404, 405, 422), (method, path, answer.status_code)
    assert connection.execute("select count(*) from pgqueue.audit").fetchone() == (0,)
    # Simple requests, which need no permission of the server, are no JSON.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = api.http.post("/jobs", content=b'{"type": "a"}', headers={"Content-Type": kind})
        assert answer.status_code in (400, 415, 422), answer.text
    preflight = api.http.options(
        "/jobs", headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    )
    assert not [name for name in preflight.headers if name.startswith("access-control-")]


def sign_in(http: httpx.Client, key: str, onward: str = "", cookies: dict[str, str] | None = None) -> httpx.Response:
    cookie = {"Cookie": "; ".join(f"{name}={value}" for name, value in (cookies or {}).items())} if cookies else {}
    return http.post(
        "/dashboard/login", data={"key": key, "next": onward}, headers={"Sec-Fetch-Site": "same-origin", **cookie}
    )


def test_a_session_is_whoever_signed_in_last_and_ends(live: MakeLive) -> None:
    api = live()
    admin = api.http.post("/admin/keys", json={"name": "root", "scopes": ["admin"]}).json()["key"]

    def key(name: str, *scopes: str) -> str:
        body = {"name": name, "scopes": list(scopes)}
        return str(api.http.post("/admin/keys", json=body, headers=bearer(admin)).json()["key"])

    reader, operator, producer = key("look", "read"), key("ops", "operate"), key("shop", "submit")
    assert api.http.get("/dashboard").status_code in (302, 303, 401)
    # A value that somebody else put there is nobody's, and gives way to the key that signs in.
    fixed = sign_in(api.http, operator, cookies={"pgqueue_key": "fixed", "session": "fixed"})
    assert fixed.status_code == 303
    cookie = fixed.headers["set-cookie"]
    assert f"pgqueue_key={operator}" in cookie
    assert "fixed" not in cookie
    for flag in ("HttpOnly", "SameSite=lax", "Path=/dashboard"):
        assert flag.lower() in cookie.lower()
    api.http.cookies.clear()
    for value in ("", "fixed", "x" * 4000, "../..", "%00", '"a"', admin[:-1]):
        answer = api.http.get("/dashboard", headers={"Cookie": f"pgqueue_key={value}"})
        assert answer.status_code in (302, 303, 401), value
    for wrong in ("", "wrong", producer, "x" * 300):
        answer = sign_in(api.http, wrong)
        assert answer.status_code in (401, 403, 422)
        assert "set-cookie" not in answer.headers
        assert not wrong or wrong not in answer.text
    # The cookie is the dashboard's alone, and a reader's opens nothing to act.
    assert api.http.get("/jobs", headers={"Cookie": f"pgqueue_key={admin}"}).status_code == 401
    with httpx.Client(base_url=api.url, headers={"Cookie": f"pgqueue_key={reader}"}) as looking:
        assert looking.get("/dashboard").status_code == 200
        answer = looking.post(
            "/dashboard/queues/pause", data={"queue": "default"}, headers={"Sec-Fetch-Site": "same-origin"}
        )
        assert answer.status_code == 403
        out = looking.post("/dashboard/logout", headers={"Sec-Fetch-Site": "same-origin"})
        assert "max-age=0" in out.headers["set-cookie"].lower()
        # What is revoked has ended at once, whatever a browser still sends.
        gone = api.http.post("/admin/keys/look/revoke", headers=bearer(admin))
        if gone.status_code == 404:
            gone = api.http.delete("/admin/keys/look", headers=bearer(admin))
        assert gone.status_code in (200, 204), gone.text
        assert looking.get("/dashboard").status_code in (302, 303, 401)


def test_signing_in_leads_to_our_own_pages_only(live: MakeLive) -> None:
    api = live()
    key = api.http.post("/admin/keys", json={"name": "root", "scopes": ["admin"]}).json()["key"]
    for onward in (
        "https://evil.example", "//evil.example", "/\\evil.example", "/dashboard/../../evil", "javascript:alert(1)",
        "/dashboard//evil.example", "/dashboard\r\nSet-Cookie: a=b", "/dashboard@evil.example", "/dashboardevil", " /x",
        "/dashboard/%0d%0aSet-Cookie:a=b", "http:/dashboard", "/admin/keys",
    ):  # fmt: skip
        answer = sign_in(api.http, key, onward)
        assert answer.status_code in (303, 422), onward
        if answer.status_code == 303:
            to = answer.headers["location"]
            assert to == "/dashboard" or to.startswith(("/dashboard/", "/dashboard?")), (onward, to)
            assert not re.search(r"[\r\n\\]|//", to)
        assert "a=b" not in str(answer.headers.get_list("set-cookie"))
    assert sign_in(api.http, key, "/dashboard/jobs?queue=a").headers["location"] == "/dashboard/jobs?queue=a"


def test_assets_are_only_assets(api: Api) -> None:
    page = api.get("/dashboard", follow_redirects=True).text
    (asset, *_) = re.findall(r'/dashboard/assets/[^"\' ]+', page)
    assert api.get(asset).status_code == 200
    folder = asset.rpartition("/")[0]
    for name in (
        "../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "....//etc/passwd",
        "..%5c..%5cetc", "/etc/passwd", "%00", "..%252f..%252fetc", "../templates/login.html", "__init__.py", "",
    ):  # fmt: skip
        answer = api.get(f"{folder}/{name}")
        assert answer.status_code in (400, 404), (name, answer.status_code)
        assert "root:" not in answer.text


def test_a_wrong_key_takes_no_longer_the_more_of_it_is_right(api: Api) -> None:
    """Keys are found by their hash: no beginning of a key comes nearer to it than any other text."""
    admin = make_key(api, "root", "admin")
    for wrong in (
        admin[:-1],
        admin[:-1] + ("a" if admin[-1] != "a" else "b"),
        admin.upper(),
        admin + " x",
        admin[::-1],
    ):
        problem(api.get("/jobs", headers=bearer(wrong)), 401, "unauthenticated")
    began = running_time()
    problem(api.get("/jobs", headers=bearer("x" * 60_000)), 401, "unauthenticated")
    assert running_time() - began < 5


def test_producers_have_no_way_to_what_is_others(live: MakeLive) -> None:
    api = live()
    admin = api.http.post("/admin/keys", json={"name": "root", "scopes": ["admin"]}).json()["key"]

    def key(name: str) -> dict[str, str]:
        body = {"name": name, "scopes": ["submit"]}
        return bearer(api.http.post("/admin/keys", json=body, headers=bearer(admin)).json()["key"])

    one, two = key("one"), key("two")
    mine = api.http.post("/jobs", json={"type": "a", "payload": {"secret": 1}}, headers=one).json()["job_id"]
    for path, body in (
        ("/jobs", {"type": "a", "producer_id": "one"}),
        ("/jobs/batch", {"jobs": [{"type": "a"}, {"type": "a", "producer_id": "one", "idempotency_key": "k"}]}),
    ):
        problem(api.http.post(path, json=body, headers=two), 403, "forbidden")
        assert api.http.post(path, json=body, headers=bearer(admin)).status_code == 201
        assert api.http.post(path, json=body, headers=one).status_code == 201 or path == "/jobs/batch"
    assert api.http.post("/jobs", json={"type": "a", "producer_id": "till 3"}, headers=two).status_code == 201
    assert api.http.post(f"/jobs/{mine}/cancel", headers=two).status_code in (403, 404)
    for method, path in (
        ("GET", f"/jobs/{mine}"), ("GET", f"/jobs/{mine}/result"), ("GET", f"/jobs/{mine}/events"), ("GET", "/jobs"),
        ("GET", "/events"), ("GET", "/stats"), ("GET", "/admin/dlq"), ("POST", "/leases/claim"), ("GET", "/metrics"),
        ("POST", f"/admin/jobs/{mine}/retry"), ("POST", "/admin/dlq/discard-all"), ("GET", "/admin/keys"),
        ("POST", "/admin/keys"), ("PATCH", "/admin/queues/default"), ("PUT", "/schedules/x"), ("GET", "/workers"),
    ):  # fmt: skip
        answer = api.http.request(method, path, headers=two, json=None if method == "GET" else {})
        assert answer.status_code == 403, (method, path, answer.status_code)
