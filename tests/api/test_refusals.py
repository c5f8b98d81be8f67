"""What a request is refused for is named: which rule, and where in the body or the query."""

from typing import Any

import psycopg
import pytest

from tests.api.conftest import Api, MakeApi
from tests.api.problems import problem

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("name", ["scheduled_at", "expires_at"])
@pytest.mark.parametrize("moment", ["9999-01-01T00:00:00Z", "9998-12-31T23:59:59-02:00", "0001-01-01T00:00:00Z"])
def test_a_moment_beyond_what_is_stored_is_pointed_at(api: Api, name: str, moment: str) -> None:
    job = {"type": "a", name: moment}
    one = problem(api.post("/jobs", json=job), 422, "invalid-job")
    assert one["errors"] == [{"detail": "must lie between the years 1 and 9998", "pointer": f"/{name}"}]
    many = problem(api.post("/jobs/batch", json={"jobs": [{"type": "a"}, job]}), 422, "invalid-job")
    assert many["errors"][0]["pointer"] == f"/jobs/1/{name}"


@pytest.mark.parametrize("text", ["\\u0000", "a\\ud800", "\\ud800", "\\udc00b"])
@pytest.mark.parametrize(
    ("payload", "where"),
    [
        ('{"a": ["b", "TEXT"]}', "/a/1"),
        ('{"a/b": {"~": "TEXT"}}', "/a~1b/~0"),
        ('{"a": {"TEXT": 1}}', "/a"),
        ('"TEXT"', ""),
    ],
)
def test_text_that_cannot_be_stored_is_pointed_at(api: Api, text: str, payload: str, where: str) -> None:
    job = f'{{"type": "a", "payload": {payload.replace("TEXT", text)}}}'
    one = problem(api.post("/jobs", content=job, headers=JSON), 422, "invalid-request")
    assert one["errors"][0]["pointer"] == f"/payload{where}"
    assert "cannot be stored" in one["detail"]
    many = problem(api.post("/jobs/batch", content=f'{{"jobs": [{job}]}}', headers=JSON), 422, "invalid-request")
    assert many["errors"][0]["pointer"] == f"/jobs/0/payload{where}"


@pytest.mark.parametrize("text", ["\\ud800", "a\\u0000"])
def test_names_that_cannot_be_stored_are_pointed_at(api: Api, text: str) -> None:
    said = problem(api.post("/jobs", content=f'{{"type": "{text}"}}', headers=JSON), 422, "invalid-request")
    assert said["errors"][0]["pointer"] == "/type"


def test_escapes_of_text_that_can_be_stored_are_taken(api: Api) -> None:
    job = '{"type": "a", "payload": {"a": "\\\\u0000 \\ud83d\\ude00"}}'
    made = api.post("/jobs", content=job, headers=JSON)
    assert made.status_code == 201, made.text
    assert made.json()["payload"] == {"a": "\\u0000 \U0001f600"}


def test_weights_that_are_all_nothing_are_pointed_at(api: Api) -> None:
    said = problem(api.patch("/admin/queues/q", json={"weights": [0, 0, 0, 0]}), 422, "invalid-request")
    assert said["errors"] == [{"detail": "must not all be 0", "pointer": "/weights"}]


def test_a_database_that_takes_no_writes_is_said(make_api: MakeApi, connection: psycopg.Connection[Any]) -> None:
    connection.execute(f"alter database {connection.info.dbname} set default_transaction_read_only = on")
    refused = problem(make_api(maintenance=False).post("/jobs", json={"type": "a"}), 503, "database-unavailable")
    assert "takes no writes" in refused["detail"]
    assert "reached" not in refused["title"]
