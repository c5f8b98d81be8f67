"""What the API does when its database goes, comes back, takes no writes, or its clients vanish."""

import json
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from pgqueue.api import ApiConfig
from pgqueue.settings import Settings
from tests.api.conftest import Live, MakeLive, Serve
from tests.api.problems import problem
from tests.conftest import Connect
from tests.meet import running_time, wait_until
from tests.servers import OwnServer

OURS = (
    "select state from pg_stat_activity where application_name like 'pgqueue api%' and datname = current_database()"
    " and state <> 'idle'"
)


@pytest.mark.timeout(180)
def test_a_restart_of_the_database_is_503_meanwhile_and_loses_nothing(own_server: OwnServer, serve: Serve) -> None:
    served = serve(dsn=own_server.dsn)
    accepted: list[str] = []
    other: list[int] = []
    stop = threading.Event()

    def post(client: httpx.Client) -> None:
        while not stop.is_set():
            begun = running_time()
            answer = client.post("/jobs", json={"type": "a"})
            assert running_time() - begun < 12
            if answer.status_code == 201:
                accepted.append(answer.json()["job_id"])
            else:
                problem(answer, 503, "database-unavailable")
                assert int(answer.headers["retry-after"]) >= 1
                other.append(answer.status_code)
                time.sleep(0.02)

    clients = [httpx.Client(base_url=served.url, timeout=30) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        posting = [pool.submit(post, client) for client in clients]
        wait_until(lambda: len(accepted) > 50, 30)
        for mode in ("immediate", "fast"):
            before = len(other)
            own_server.stop(mode)  # type: ignore[arg-type]
            wait_until(lambda before=before: len(other) > before + 5, 20)  # type: ignore[misc]
            assert served.http.get("/health/live").status_code == 200
            ready = served.http.get("/health/ready")
            assert (ready.status_code, ready.json()["checks"]["database"]["ok"]) == (503, False)
            own_server.start()
            count = len(accepted)
            begun = running_time()
            wait_until(lambda count=count: len(accepted) > count, 15)  # type: ignore[misc]
            assert running_time() - begun < 10
        stop.set()
        for one in posting:
            one.result()
    for client in clients:
        client.close()
    with psycopg.connect(own_server.dsn) as session:
        stored = {str(row[0]) for row in session.execute("select job_id from pgqueue.jobs")}
    assert set(accepted) <= stored
    assert served.process.poll() is None
    wait_until(lambda: served.http.get("/health/ready").status_code == 200, 15)


@pytest.mark.timeout(120)
def test_streams_outlive_a_restart_of_the_database(own_server: OwnServer) -> None:
    api = Live(Settings(dsn=own_server.dsn, poll_interval=0.5), ApiConfig(maintenance=False))
    try:
        with psycopg.connect(own_server.dsn, autocommit=True) as session:
            row = session.execute("select job_id from pgqueue.enqueue('a')").fetchone()
            assert row
        with api.events(f"/jobs/{row[0]}/events") as events:
            assert next(events)["event"] == "job.queued"
            own_server.stop("immediate")
            time.sleep(1)
            own_server.start()
            with psycopg.connect(own_server.dsn, autocommit=True) as session:
                session.execute("select pgqueue.cancel(%s)", [row[0]])
            done = running_time()
            seen = [event["event"] for event in events if event["event"] != "ping"]
        assert seen == ["job.cancelled"]
        assert running_time() - done < 8
    finally:
        api.close()


def test_a_database_that_takes_no_writes_for_a_while(live: MakeLive, connection: psycopg.Connection[Any]) -> None:
    api = live()
    assert api.http.post("/jobs", json={"type": "a"}).status_code == 201
    name = connection.info.dbname
    others = (
        "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"
    )
    connection.execute(f'alter database "{name}" set default_transaction_read_only = on')
    connection.execute(others, [name])

    def post() -> int:
        return api.http.post("/jobs", json={"type": "a"}).status_code

    wait_until(lambda: post() == 503)
    assert [post() for _ in range(12)] == [503] * 12
    assert api.http.get("/jobs").status_code == 200
    assert api.http.get("/health/ready").json()["checks"]["database"] == {"ok": False, "detail": "it takes no writes"}
    # Sessions that began meanwhile stay as they are; the API throws them away as it meets them.
    connection.execute("set default_transaction_read_only = off")
    connection.execute(f'alter database "{name}" reset default_transaction_read_only')
    wait_until(lambda: post() == 201, 20)
    wait_until(lambda: [post() for _ in range(10)] == [201] * 10, 20)
    wait_until(lambda: api.http.get("/health/ready").json()["checks"]["database"]["ok"], 10)


class Silent:
    """A way to the database that, once told, passes nothing on and says nothing."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._stalled = threading.Event()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            self._sockets.append(here)
            if self._stalled.is_set():
                continue
            there = socket.create_connection(self._target)
            self._sockets.append(there)
            for one, two in ((here, there), (there, here)):
                threading.Thread(target=self._pass, args=(one, two), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                while self._stalled.is_set():
                    time.sleep(0.05)
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, sink):
                one.close()

    def stall(self, stalled: bool) -> None:
        (self._stalled.set if stalled else self._stalled.clear)()

    def close(self) -> None:
        self._stalled.clear()
        self._server.close()
        for one in self._sockets:
            one.close()


@pytest.fixture
def silent(own_server: OwnServer) -> Iterator[Silent]:
    """A way to an own server that can be made silent."""
    proxy = Silent("127.0.0.1", own_server.port)
    yield proxy
    proxy.close()


@pytest.mark.timeout(120)
def test_a_database_that_says_nothing_is_answered_for_in_time(own_server: OwnServer, silent: Silent) -> None:
    dsn = psycopg.conninfo.make_conninfo(own_server.tcp_dsn, host="127.0.0.1", port=silent.port)
    settings = Settings(dsn=dsn, statement_limit=2, connect_timeout=2, pool_size=4)
    api = Live(settings, ApiConfig(maintenance=False))
    try:
        assert api.http.post("/jobs", json={"type": "a"}).status_code == 201
        silent.stall(True)
        begun = running_time()
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda _: api.http.post("/jobs", json={"type": "a"}), range(12)))
        assert running_time() - begun < 12
        assert {answer.status_code for answer in answers} == {503}
        assert api.http.get("/health/ready").status_code == 503
        silent.stall(False)
        wait_until(lambda: api.http.post("/jobs", json={"type": "a"}).status_code == 201, 10)
    finally:
        api.close()


@pytest.mark.timeout(180)
def test_clients_that_vanish_leave_nothing_behind(live: MakeLive, connect: Connect, database: str) -> None:
    api = live(settings=Settings(dsn=database, pool_size=4, poll_interval=0.5))
    session = connect()
    jobs = [
        str(row[0])
        for row in session.execute("select job_id from pgqueue.enqueue_many(%s)", ['[{"type": "a"}]']).fetchall()
    ]
    paths = [
        "/jobs?q=a",
        f"/jobs/{jobs[0]}/result?wait=30",
        f"/jobs/{jobs[0]}/events",
        "/events",
        "/stats",
    ]

    def vanish(n: int) -> None:
        path = paths[n % len(paths)]
        with socket.create_connection(("127.0.0.1", api.port), timeout=20) as peer:
            if n % 7 == 3:
                body = b'{"worker_id": "%s", "wait_ms": 20000, "queues": ["none"]}' % str(uuid.uuid4()).encode()
                head = b"POST /leases/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                peer.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            else:
                peer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            time.sleep(0.005 + (n % 10) * 0.005)
            # A reset, not a farewell.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(vanish, range(500)))
    wait_until(lambda: api.hub.followers == 0, 20)
    assert api.app.state.pgqueue._streams == 0
    wait_until(lambda: not session.execute(OURS).fetchall(), 10)
    begun = running_time()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.http.get("/jobs").status_code, range(8)))
    assert answers == [200] * 8
    assert running_time() - begun < 5
    wait_until(lambda: session.execute("select count(*) from pgqueue.waiting").fetchone() == (0,), 5)
    assert api.http.get(f"/jobs/{jobs[0]}").json()["status"] == "pending"


@pytest.mark.timeout(120)
def test_bulk_verbs_in_opposite_order_meet_without_errors(live: MakeLive, connect: Connect) -> None:
    api = live()
    session = connect()
    for _ in range(4):
        batch = json.dumps([{"type": "a"}] * 400)
        rows = session.execute("select job_id::text from pgqueue.enqueue_many(%s)", [batch]).fetchall()
        ids = [row[0] for row in rows]
        session.execute("select pgqueue.claim(%s, null, 100)", [uuid.uuid4()])

        def cancel(order: list[str]) -> int:
            return api.http.post("/admin/jobs/cancel", json={"job_ids": order}).status_code

        with ThreadPoolExecutor(5) as pool:
            cancels = [pool.submit(cancel, order) for order in (ids, ids[::-1], ids, ids[::-1])]
            retries = [pool.submit(api.http.post, "/admin/dlq/retry-all") for _ in range(2)]
            assert [one.result() for one in cancels] == [200] * 4
            assert [one.result().status_code for one in retries] == [200] * 2
    statuses = {row[0] for row in session.execute("select distinct status from pgqueue.jobs")}
    assert statuses <= {"cancelled", "processing"}


def test_a_background_task_that_fails_is_seen_and_comes_back(
    live: MakeLive, connection: psycopg.Connection[Any]
) -> None:
    api = live(maintenance=True)
    wait_until(lambda: api.http.get("/health/ready").status_code == 200)
    connection.execute("alter function pgqueue.watch(uuid, interval) rename to elsewhere")
    connection.execute("select pgqueue.enqueue('a')")
    with api.events("/events") as events:
        # It begins with what can be told, and goes on as soon as it can.
        assert next(events)["event"] in ("ping", "state")
        time.sleep(1)
        connection.execute("alter function pgqueue.elsewhere(uuid, interval) rename to watch")
        wait_until(lambda: api.hub.fault is None and api.hub.hears, 5)
        connection.execute("select pgqueue.enqueue('late')")
        seen = set()
        while ("job.queued", "late") not in seen:
            event = next(events)
            seen.add((event["event"], event.get("data", {}).get("job_type", "")))
