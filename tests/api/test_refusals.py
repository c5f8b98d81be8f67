"""What a request is refused for is named: which rule, and where in the body or the query."""

from typing import Any
from uuid import UUID

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


@pytest.mark.parametrize(
    ("query", "name"),
    [
        ("limit=1&limit=2", "limit"),
        ("limit=1&limit=1", "limit"),
        ("queue=a&type=b&queue=c", "queue"),
        ("status=pending&q=&%71=x", "q"),
    ],
)
def test_a_parameter_of_one_value_stands_once(api: Api, query: str, name: str) -> None:
    said = problem(api.get(f"/jobs?{query}"), 400, "repeated-parameter")
    assert said["errors"] == [{"detail": "must stand once", "parameter": name}]
    assert repr(name) in said["detail"]


def test_parameters_of_several_values_may_stand_several_times(api: Api) -> None:
    for status in ("pending", "cancelled", "completed"):
        api.post("/jobs", json={"type": status})
    api.post(f"/jobs/{api.get('/jobs?type=cancelled').json()['items'][0]['job_id']}/cancel")
    found = api.get("/jobs?status=pending&status=cancelled&status=pending").json()["items"]
    assert {job["type"] for job in found} == {"pending", "cancelled", "completed"}
    for path in ("/admin/dlq/retry-all?filter=job_type:a&filter=queue:b", "/admin/dlq/discard-all?filter=a&filter=b"):
        assert "repeated" not in api.post(path).text
    assert api.get("/admin/autoscale?queue=a&queue=b").status_code == 200
    problem(api.get("/admin/autoscale?min=1&min=2"), 400, "repeated-parameter")


def test_every_parameter_says_whether_it_may_stand_twice(api: Api) -> None:
    """What the document calls an array takes several values, everything else one."""
    document = api.get("/schema/openapi.json").json()["paths"]
    for path, item in document.items():
        for method, operation in item.items():
            for parameter in operation.get("parameters", []):
                if parameter["in"] != "query":
                    continue
                assert "400" in operation["responses"], (method, path)
                schema = parameter["schema"]
                several = "array" in {one.get("type") for one in [schema, *schema.get("oneOf", [])]}
                name = parameter["name"]
                said = api.request(method, f"{path.replace('{job_id}', str(UUID(int=7)))}?{name}=&{name}=")
                assert (said.status_code == 400) is not several, (method, path, name, said.text)


def test_pages_take_what_browsers_send(api: Api) -> None:
    ids = [api.post("/jobs", json={"type": "a"}).json()["job_id"] for _ in range(2)]
    assert api.get("/dashboard/jobs?status=pending&status=failed&type=&type=a").text.count('<tr id="j-') == 2
    form = {"verb": "cancel", "target": "selected", "confirmed": "1", "id": ids}
    api.post("/dashboard/jobs/bulk", data=form, headers={"Sec-Fetch-Site": "same-origin"})
    assert {api.get(f"/jobs/{one}").json()["status"] for one in ids} == {"cancelled"}
