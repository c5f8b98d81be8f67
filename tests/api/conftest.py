"""The API under test: within the test's own process, or as `pgqueue serve`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import httpx
import pytest
from litestar import Litestar
from litestar.testing import TestClient

from pgqueue.api import ApiConfig, create_app
from pgqueue.api.hub import Hub
from pgqueue.cli.serve import make_server
from pgqueue.client import Client
from pgqueue.settings import Settings
from tests.meet import wait_until

Api = TestClient[Litestar]


class MakeApi(Protocol):
    """Makes a client of an API within this process."""

    def __call__(self, *, settings: Settings | None = None, **config: Any) -> Api: ...


@pytest.fixture
def make_api(database: str) -> Iterator[MakeApi]:
    """A factory of APIs on the test's database."""
    with contextlib.ExitStack() as stack:

        def make(*, settings: Settings | None = None, **config: Any) -> Api:
            client = Client(settings=settings or Settings(dsn=database, poll_interval=0.2, sweep_interval=0.2))
            stack.callback(client.close)
            return stack.enter_context(TestClient(create_app(client, ApiConfig(**config))))

        yield make


@pytest.fixture
def api(make_api: MakeApi) -> Api:
    """An API without keys and without maintenance."""
    return make_api(maintenance=False)


class Served:
    """A running `pgqueue serve`."""

    def __init__(self, dsn: str, *options: str, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # A file, since a pipe that nobody reads would stop it once full.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgqueue", "serve", "--port", str(self.port), *options],
            env={**os.environ, "PGQUEUE_DSN": dsn, "PGQUEUE_POLL_INTERVAL": "0.5", **(env or {})},
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            text=True,
        )
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self._wait_until_it_listens()

    def _wait_until_it_listens(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            try:
                self.http.get("/health/live")
                return
            except httpx.TransportError:
                assert self.process.poll() is None, self.told()
                assert time.monotonic() < deadline, "the API did not start"
                time.sleep(0.05)

    def told(self) -> str:
        """What it wrote to stderr."""
        self._log.seek(0)
        return self._log.read()

    def stop(self, patience: float = 15) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(patience)

    def close(self) -> None:
        """Ends it whatever it does."""
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._log.close()


class Live:
    """An API on a real port, served by a thread of this process."""

    def __init__(self, settings: Settings, config: ApiConfig) -> None:
        self.client = Client(settings=settings)
        self.app = create_app(self.client, config)
        self.server = make_server(self.app, "127.0.0.1", 0, grace=2)
        self._thread = threading.Thread(target=self.server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self.server.started and self.server.servers, 30)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=30)

    @property
    def hub(self) -> Hub:
        """What its streams hear from."""
        hub: Hub = self.app.state.pgqueue.hub
        return hub

    @contextlib.contextmanager
    def events(self, path: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        """A stream's events, each with `id`, `event` and `data`; pings are events named ping."""
        with self.http.stream("GET", path, headers=headers, timeout=20) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            yield parse_events(response.iter_lines())

    def close(self) -> None:
        """Stops it."""
        self.server.should_exit = True
        self._thread.join(15)
        self.http.close()
        self.client.close()
        assert not self._thread.is_alive(), "the API did not stop"


def parse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Server-sent events as dicts."""
    event: dict[str, Any] = {}
    for line in lines:
        if line.startswith(":"):
            yield {"event": "ping"}
        elif line:
            name, _, value = line.partition(": ")
            event[name] = json.loads(value) if name == "data" else value
        elif event:
            if "event" in event:
                yield event
            event = {}


class MakeLive(Protocol):
    """Makes an API on a real port."""

    def __call__(self, *, settings: Settings | None = None, **config: Any) -> Live: ...


@pytest.fixture
def live(database: str) -> Iterator[MakeLive]:
    """A factory of APIs on real ports, on the test's database."""
    running: list[Live] = []

    def make(*, settings: Settings | None = None, **config: Any) -> Live:
        given = settings or Settings(dsn=database, poll_interval=0.5, sweep_interval=0.2)
        running.append(Live(given, ApiConfig(**{"maintenance": False, **config})))
        return running[-1]

    yield make
    for one in running:
        one.close()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Serve = Callable[..., Served]


@pytest.fixture
def serve(database: str) -> Iterator[Serve]:
    """A factory of `pgqueue serve` processes, on the test's database unless told another."""
    running: list[Served] = []

    def start(*options: str, dsn: str | None = None, env: dict[str, str] | None = None) -> Served:
        running.append(Served(dsn or database, *options, env=env))
        return running[-1]

    yield start
    for one in running:
        one.close()
