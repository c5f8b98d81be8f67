"""The dashboard without a browser: which jobs its forms act on, and what it says where there is nothing."""

import html
import re
import uuid
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from psycopg.types.json import Jsonb

from pgqueue import calls_rest
from pgqueue.api.dashboard.reads import attention
from tests.api.conftest import Api
from tests.meet import wait_until

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
    assert "One page looks at 5 jobs at most" in shown
    (onward,) = re.findall(r'<a href="([^"]*)">Look further</a>', shown)
    assert ">old</a>" in api.get(html.unescape(onward)).text


def test_a_page_of_some_live_statuses_says_its_own_bound(
    api: Api, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_rest, "LOOKED_AT_LIVE", 3)
    connection.execute("insert into pgqueue.jobs (job_type) select 'new' from generate_series(1, 5)")
    assert "One page looks at 3 jobs at most" in api.get("/dashboard/jobs?status=failed").text


@pytest.fixture
def dead(connection: Connection) -> str:
    """A dead letter."""
    connection.execute("insert into pgqueue.jobs (job_type) values ('t')")
    worker = uuid.uuid4()
    fail = 'select pgqueue.fail(%s, %s, 1, \'{"message": "no"}\', false)'
    (dead,) = connection.execute("select job_id from pgqueue.claim(%s, null, 1)", [worker]).fetchone() or ()
    connection.execute(fail, [worker, dead])
    return str(dead)


def test_a_dead_letter_says_in_words_of_the_page_what_helps(api: Api, dead: str) -> None:
    (why,) = re.findall(r'id="why">([^<]*)<', api.get(f"/dashboard/jobs/{dead}").text)
    assert why.endswith(" (no); a retry gives it fresh attempts.")


def card(page: str, title: str) -> str:
    return page.split(f"<h2>{title}</h2>", 1)[1].split("</article>", 1)[0]


def test_only_what_needs_attention_is_red(api: Api, connection: Connection) -> None:
    counted = [{"queue": "default", "job_type": "t", "priority": 2, "completed": 1, "failed": 1}]
    connection.execute("select pgqueue.add_to_counters(%s)", [Jsonb(counted)])
    connection.execute("select pgqueue.sweep('measure')")
    shown = api.get("/dashboard").text
    assert "Jobs failed high" in shown
    assert 'class="bar bad"' in card(shown, "Failure rate")
    connection.execute("update pgqueue.alert_rules set enabled = false")
    # What took long to read is kept for some seconds.
    wait_until(lambda: "Nothing needs attention." in api.get("/dashboard").text, 15)
    shown = api.get("/dashboard").text
    assert "50 %" in card(shown, "Failure rate")
    assert 'class="bar warn"' in card(shown, "Failure rate")
    assert 'class="bar bad"' not in shown


def test_alerts_are_named_in_words(connection: Connection) -> None:
    rows = connection.execute("select alert from pgqueue.alert_rules").fetchall()
    alerts = [{"alert": alert, "severity": "page", "summary": "", "queue": None, "since": None} for (alert,) in rows]
    titles = {note["title"] for note in attention(alerts, [], [])}
    assert titles >= {"DLQ breach", "Jobs failed high", "No workers for type", "Below cursor"}
    assert len(titles) == len(rows)


def test_idle_workers_are_not_counted_as_active(api: Api, connection: Connection) -> None:
    connection.execute("select pgqueue.worker_started(%s, 'w', 'h', 1, null, null, null, null, 8, '0')", [uuid.uuid4()])
    workers = card(api.get("/dashboard").text, "Workers")
    assert "<small>live</small>" in workers
    assert "active" not in workers
