"""A real Prometheus scrapes a real /metrics; an alert fires and clears."""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from tests.meet import wait_until
from tests.monitoring.test_rules import MONITORING

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="it is missing: apt-get install prometheus"),
    pytest.mark.xdist_group("prometheus"),
]
Connection = psycopg.Connection[Any]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def get(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.read()
    except (urllib.error.URLError, ConnectionError):
        return None


@contextmanager
def process(*command: str, ready: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready once `ready` answers."""
    started = subprocess.Popen(command, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: started.poll() is not None or get(ready) is not None, 40)
        assert started.poll() is None, f"{command} ended"
        yield started
    finally:
        started.terminate()
        try:
            started.wait(15)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


class Prometheus:
    def __init__(self, base: str) -> None:
        self.base = base

    def query(self, expression: str) -> list[Any]:
        asked = urllib.parse.urlencode({"query": expression})
        answer = json.loads(get(f"{self.base}/api/v1/query?{asked}") or b'{"data": {"result": []}}')
        return list(answer["data"]["result"])

    def value(self, expression: str) -> float | None:
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        alerts = json.loads(get(f"{self.base}/api/v1/alerts") or b'{"data": {"alerts": []}}')["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@pytest.fixture
def prometheus(database: str, tmp_path: Path) -> Iterator[Prometheus]:
    """Prometheus as the package sets it up, in a hurry, over `pgqueue serve` on the test's database."""
    api, own = free_port(), free_port()
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(MONITORING / "rules.yml")]
    (job,) = config["scrape_configs"]
    # The API asks for no key on this machine.
    del job["authorization"]
    job["static_configs"] = [{"targets": [f"127.0.0.1:{api}"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    serve = process(
        sys.executable, "-m", "pgqueue", "serve", "--port", str(api),
        ready=f"http://127.0.0.1:{api}/health/live", PGQUEUE_DSN=database,
    )  # fmt: skip
    scraper = process(
        "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}", ready=f"http://127.0.0.1:{own}/-/ready",
    )  # fmt: skip
    with serve, scraper:
        yield Prometheus(f"http://127.0.0.1:{own}")


def test_an_alert_fires_and_clears(prometheus: Prometheus, connection: Connection) -> None:
    wait_until(lambda: prometheus.value("pgqueue_collector_up") == 1, 30)
    assert prometheus.value("up") == 1
    wait_until(lambda: "WorkerCountLow" in prometheus.firing(), 30)
    assert "DLQBreach" not in prometheus.firing()

    connection.execute("insert into pgqueue.jobs (job_type, queue) values ('t', 'mail')")
    connection.execute(
        "insert into pgqueue.jobs_dead_letter (job_type, queue, status, finished_at)"
        " select 't', 'mail', 'dead_letter', now() from generate_series(1, 501)"
    )
    wait_until(lambda: "DLQBreach" in prometheus.firing(), 30)
    assert prometheus.value("pgqueue_dead_letters:sum") == 501
    assert prometheus.value('pgqueue_queue_depth{queue="mail", priority="normal"}') == 1

    connection.execute("select pgqueue.discard_dead_letters()")
    connection.execute("select pgqueue.claim(gen_random_uuid(), '{mail}', 1)")
    wait_until(lambda: "DLQBreach" not in prometheus.firing(), 30)
    assert prometheus.value('pgqueue_dead_letters{queue="mail"}') == 0
    wait_until(lambda: prometheus.value('pgqueue_queue_depth{queue="mail", priority="normal"}') == 0, 30)
