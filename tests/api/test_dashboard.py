"""The dashboard without a browser: which jobs its forms act on, and what it says where there is nothing."""

import html
import re
import uuid
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest

from pgqueue import calls_rest
from tests.api.conftest import Api

Connection = psycopg.Connection[Any]
SAME = {"Sec-Fetch-Site": "same-origin"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def fields(page: httpx.Response, form: str) -> dict[str, str]:
    """What a browser sends of the hidden fields of a page's form."""
    said = page.text.split(form, 1)[1].split("</form>", 1)[0]
    return dict(re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', said))


@pytest.mark.parametrize("name", ["precious ", " precious", " "])
@pytest.mark.parametrize("field", ["queue", "type", "producer"])
def test_all_that_match_are_those_of_the_name_as_it_is(api: Api, connection: Connection, field: str, name: str) -> None:
    insert = "insert into pgqueue.jobs (queue, job_type, producer_id) values (%s, %s, %s)"
    wanted = {"queue": "precious", "type": "precious", "producer": "precious", field: name}
    connection.execute(insert, ["precious"] * 3)
    connection.execute(insert, [wanted["queue"], wanted["type"], wanted["producer"]])
    shown = api.get(f"/dashboard/jobs?{field}={quote(name)}")
    assert shown.text.count('<tr id="j-') == 1
    chosen = {**fields(shown, 'id="bulk"'), "verb": "cancel", "target": "all"}
    asked = api.post("/dashboard/jobs/bulk", data=chosen, headers=SAME)
    assert "Cancel 1 job?" in asked.text
    api.post("/dashboard/jobs/bulk", data=fields(asked, 'action="/dashboard/jobs/bulk"'), headers=SAME)
    column = {"queue": "queue", "type": "job_type", "producer": "producer_id"}[field]
    found = connection.execute(f"select {column}, status from pgqueue.jobs order by status").fetchall()
    assert found == [(name, "cancelled"), ("precious", "pending")]


@pytest.mark.parametrize(
    ("path", "name", "verb"),
    [("dead-letters?q=no", "Dead letters", "discard"), ("jobs?status=dead_letter&type=t", "Jobs", "retry")],
)
def test_a_bulk_action_keeps_the_place(api: Api, connection: Connection, path: str, name: str, verb: str) -> None:
    connection.execute("insert into pgqueue.jobs (job_type) values ('t')")
    worker = uuid.uuid4()
    connection.execute("select pgqueue.claim(%s, null, 1)", [worker])
    end = 'select pgqueue.fail(%s, job_id, 1, \'{"message": "no"}\', false) from pgqueue.jobs'
    connection.execute(end, [worker])
    form = {field: html.unescape(value) for field, value in fields(api.get(f"/dashboard/{path}"), 'id="bulk"').items()}
    nothing = api.post("/dashboard/jobs/bulk", data={**form, "verb": verb, "target": "selected"}, headers=SAME)
    assert nothing.url.raw_path.decode() == f"/dashboard/{path}"
    assert "Select at least one job" in nothing.text
    asked = api.post("/dashboard/jobs/bulk", data={**form, "verb": verb, "target": "all"}, headers=SAME)
    for shown in (nothing, asked):
        assert f'aria-current="page">{name}<' in shown.text
    assert f'<a class="button" href="{html.escape(f"/dashboard/{path}")}">Back</a>' in asked.text


@pytest.mark.parametrize(
    "path", ["/dashboard/nowhere", "/dashboard/jobs/1/2/3", "/dashboard/queues/x", "/dashboard/jobs/bulk"]
)
def test_an_unknown_address_of_the_dashboard_is_a_page(api: Api, path: str) -> None:
    answer = api.get(path, headers=BROWSER)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "No such page" in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(("page", "status"), [("jobs", "completed"), ("dead-letters", "dead_letter")])
def test_a_list_that_found_nothing_yet_leads_on(
    api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch, page: str, status: str
) -> None:
    monkeypatch.setattr(calls_rest, "LOOKED_AT", 5)
    connection.execute("insert into pgqueue.jobs (job_type) values ('old')")
    connection.execute("insert into pgqueue.jobs (job_type) select 'new' from generate_series(1, 5)")
    worker = uuid.uuid4()
    connection.execute("select pgqueue.claim(%s, null, 6)", [worker])
    ended = {
        "completed": "select pgqueue.complete(%s, array_agg(job_id), array_agg(attempts), null) from pgqueue.jobs",
        "dead_letter": 'select pgqueue.fail(%s, job_id, attempts, \'{"message": "no"}\', false) from pgqueue.jobs',
    }
    connection.execute(ended[status], [worker])
    shown = api.get(f"/dashboard/{page}?status={status}&type=old").text
    assert "No job matches" not in shown
    assert "No dead letter matches" not in shown
    (onward,) = re.findall(r'<a href="([^"]*)">Look further</a>', shown)
    assert ">old</a>" in api.get(html.unescape(onward)).text
