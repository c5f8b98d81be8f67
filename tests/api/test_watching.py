"""/metrics and /admin/autoscale."""

import threading
from typing import Any

import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pgqueue.calling import Call
from pgqueue.client import Client
from pgqueue.settings import Settings
from tests.api.conftest import Api, MakeApi
from tests.api.problems import problem

Connection = psycopg.Connection[Any]


def test_metrics_are_prometheus_text(api: Api, connection: Connection) -> None:
    connection.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'mail' from generate_series(1, 3)")
    answer = api.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, sample.labels.get("queue"), sample.labels.get("priority")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["pgqueue_queue_depth", "mail", "normal"] == 3
    assert samples["pgqueue_queue_depth", "mail", "low"] == 0
    assert samples["pgqueue_collector_up", None, None] == 1


def test_scrapes_of_five_seconds_are_one_query(
    api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    core = api.app.state.pgqueue
    real = core.call

    async def counted(call: Call[Any], **parameters: object) -> Any:
        asked.append(call.name)
        return await real(call, **parameters)

    monkeypatch.setattr(core, "call", counted)
    threads = [threading.Thread(target=api.get, args=["/metrics"]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked.count("metrics") == 1


def test_a_database_that_is_away_is_a_metric(make_api: MakeApi) -> None:
    away = make_api(
        settings=Settings(dsn="host=127.0.0.1 port=1", connect_timeout=1.0), maintenance=False, trusted=True
    )
    answer = away.get("/metrics")
    assert answer.status_code == 200
    assert "pgqueue_collector_up 0.0" in answer.text


def test_the_wanted_number(api: Api, connection: Connection) -> None:
    assert api.get("/admin/autoscale").json()["value"] == 2
    connection.execute("insert into pgqueue.jobs (job_type, queue) select 't', 'mail' from generate_series(1, 3)")
    said = api.get("/admin/autoscale", params={"min": 0, "queue": "mail"}).json()
    assert (said["value"], said["direction"], said["load"]["pending"]) == (2, "up", 3)
    assert api.get("/admin/autoscale", params={"min": 0, "queue": "other"}).json()["value"] == 0
    assert api.get("/admin/autoscale", params={"min": -1}).status_code == 422
    refused = problem(api.get("/admin/autoscale", params={"min": 9, "max": 4}), 422, "invalid-request")
    assert refused["errors"] == [{"detail": "must not be more than max, 4", "parameter": "min"}]
    assert api.get("/admin/autoscale", params={"max": 1}).json()["value"] == 1
    assert api.get("/admin/autoscale", params={"min": 120}).json()["value"] == 120


def test_the_client_reads_them_too(database: str, connection: Connection) -> None:
    connection.execute("insert into pgqueue.jobs (job_type) values ('t')")
    with Client(settings=Settings.load(env={}, dsn=database)) as client:
        assert client.worker_load_sync().pending == 1
        assert client.worker_load_sync(["other"]).pending == 0
        assert any(sample.name == "pgqueue_workers" for sample in client.metrics_sync())
        assert "WorkerCountLow" in {alert["alert"] for alert in client.alerts_sync()}
