"""PgqueuePlugin: pgqueue within somebody else's Litestar app."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from litestar import Litestar, Response, get, head, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath
from litestar.testing import TestClient

from pgqueue.api import ApiConfig, PgqueuePlugin
from pgqueue.client import Client
from tests.api.problems import problem


@post("/orders")
async def order(queue: NamedDependency[Client]) -> dict[str, str]:
    job = await queue.enqueue("ship", {"order": 1})
    return {"job_id": str(job.job_id)}


@get("/boom")
async def boom() -> None:
    raise RuntimeError("their own affair")


@get("/files/{name:path}", sync_to_thread=False)
def file(name: FromPath[str]) -> str:
    return name


async def stamp(response: Response[Any]) -> Response[Any]:
    response.headers["X-Theirs"] = "1"
    return response


def their_app(database: str, **config: Any) -> Litestar:
    # Dependencies of theirs whose names are those of our parameters must not get in the way.
    theirs = {name: Provide(lambda: 7, sync_to_thread=False) for name in ("job_type", "limit", "cursor")}
    return Litestar(
        [order, boom, file],
        plugins=[PgqueuePlugin(Client(database), ApiConfig(path="/queue", maintenance=False, **config))],
        dependencies=theirs,
        after_request=stamp,
    )


def test_routes_dependencies_and_lifespan_come_with_it(database: str) -> None:
    with TestClient(their_app(database)) as client:
        job_id = client.post("/orders").json()["job_id"]
        job = client.get(f"/queue/jobs/{job_id}")
        assert (job.status_code, job.json()["type"]) == (200, "ship")
        made = client.post("/queue/jobs", json={"type": "a"})
        assert made.headers["location"] == f"/queue/jobs/{made.json()['job_id']}"
        problem(client.get("/queue/jobs?limit=0"), 422, "invalid-request")
        # Their own errors stay as they are.
        assert client.get("/nothing").json()["detail"] == "Not Found"
        assert client.get("/boom").headers["content-type"] == "application/json"
        assert client.head("/queue/jobs").status_code == 200
        assert client.head("/files/x").status_code == 405
        document = client.get("/schema/openapi.json").json()
        assert {"/orders", "/queue/jobs", "/queue/jobs/{job_id}/events"} <= document["paths"].keys()
        assert {"JobView", "Problem", "Json"} <= document["components"]["schemas"].keys()


def test_a_head_of_theirs_stays_theirs(database: str) -> None:
    @head("/queues/mine")
    async def mine() -> Response[None]:
        return Response(None, headers={"X-Theirs": "1"})

    app = Litestar([mine], plugins=[PgqueuePlugin(Client(database), ApiConfig(path="", maintenance=False))])
    with TestClient(app) as client:
        assert client.head("/queues/mine").headers["x-theirs"] == "1"
        assert client.head("/queues").status_code == 200


def test_names_with_slashes_are_its_own_affair(database: str) -> None:
    app = their_app(database)
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/queue/admin/queues/a%2Fb/pause").json()["queue"] == "a/b"
            assert client.get("/queue/queues/a%2Fb").json()["name"] == "a/b"
            assert client.get("/files/a%2Fb").text == "/a/b"


def test_it_can_leave_access_to_the_app_around(database: str) -> None:
    with TestClient(their_app(database, trusted=True)) as client:
        made = client.post("/queue/admin/keys", json={"name": "k", "scopes": ["admin"]})
        assert made.status_code == 201
        assert client.get("/queue/jobs").status_code == 200
    with TestClient(their_app(database)) as client:
        problem(client.get("/queue/jobs"), 401, "unauthenticated")


def test_it_can_be_mounted_below_a_path(database: str) -> None:
    from litestar import asgi
    from litestar.types import Receive, Scope, Send

    from pgqueue.api import create_app

    inner = create_app(Client(database), ApiConfig(maintenance=False))

    @asgi("/deep/queue", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        await inner(scope, receive, send)

    with TestClient(inner), TestClient(Litestar([mounted])) as client:
        made = client.post("/deep/queue/jobs", json={"type": "a"})
        assert made.status_code == 201
        assert client.get(f"/deep/queue/jobs/{made.json()['job_id']}").status_code == 200


def test_its_commands_are_those_of_pgqueue(database: str, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "from litestar import Litestar\n"
        "from pgqueue.api import PgqueuePlugin\n"
        "app = Litestar([], plugins=[PgqueuePlugin()])\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "litestar", "--app", "theirs:app", "queue", "enqueue", "echo", "{}", "--dsn", database],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) == 36
