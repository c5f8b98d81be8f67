"""What goes in comes out equal, through REST and SQL alike."""

import json
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.api.conftest import Api
from tests.api.problems import problem

# Any text but NUL and lone surrogates, which JSON in PostgreSQL cannot have.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def exact(text: str) -> Any:
    """JSON with numbers as what they are, of which 1, 1.0 and 1e0 are one."""
    return json.loads(text, parse_float=Decimal, parse_int=Decimal)


@pytest.mark.timeout(300)
def test_payloads_come_out_as_they_went_in(api: Api, connection: psycopg.Connection[Any]) -> None:
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(payload=JSON.filter(lambda value: value is not None))
    def round_trip(payload: Any) -> None:
        text = json.dumps(payload)
        by_rest = api.post(
            "/jobs", content=f'{{"type": "a", "payload": {text}}}', headers={"Content-Type": "application/json"}
        )
        assert by_rest.status_code == 201, by_rest.text
        row = connection.execute(
            "insert into pgqueue.jobs (job_type, payload) values ('a', %s::jsonb) returning job_id::text", [text]
        ).fetchone()
        assert row
        for job_id in (by_rest.json()["job_id"], row[0]):
            answer = api.get(f"/jobs/{job_id}").text
            assert exact(answer)["payload"] == exact(text)
            stored = connection.execute("select payload::text from pgqueue.job(%s)", [job_id]).fetchone()
            assert stored
            assert exact(stored[0]) == exact(text)
        batch = api.post(
            "/jobs/batch",
            content=f'{{"jobs": [{{"type": "a", "payload": {text}}}]}}',
            headers={"Content-Type": "application/json"},
        )
        [made] = batch.json()["jobs"]
        assert exact(api.get(f"/jobs/{made['job_id']}").text)["payload"] == exact(text)

    round_trip()


@pytest.mark.timeout(300)
def test_any_text_in_any_field_is_kept_or_refused(api: Api, connection: psycopg.Connection[Any]) -> None:
    anything = st.text(max_size=300)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        fields=st.fixed_dictionaries(
            {"type": anything},
            optional=dict.fromkeys(("queue", "idempotency_key", "producer_id", "ordering_key"), anything),
        )
    )
    def keep(fields: dict[str, str]) -> None:
        answer = api.post("/jobs", content=json.dumps(fields), headers={"Content-Type": "application/json"})
        limits = {"type": 128, "queue": 63, "idempotency_key": 256, "producer_id": 64, "ordering_key": 256}
        whole = all(1 <= len(text) <= limits[name] and "\0" not in text for name, text in fields.items())
        sound = all(not any("\ud800" <= one <= "\udfff" for one in text) for text in fields.values())
        if not sound:
            assert answer.status_code in (400, 422)
        elif not whole:
            problem(answer, 422, "invalid-request")
        else:
            assert answer.status_code in (200, 201, 422), answer.text
            if answer.status_code == 422:
                problem(answer, 422, "idempotency-key-reused")
                return
            job = answer.json()
            assert {name: job[name] for name in fields} == fields
            [found] = connection.execute("select to_jsonb(j) from pgqueue.job(%s) j", [job["job_id"]]).fetchall()
            assert {name: found[0]["job_type" if name == "type" else name] for name in fields} == fields

    keep()


@pytest.mark.timeout(300)
def test_any_bytes_are_answered_by_a_problem(api: Api) -> None:
    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        body=st.binary(max_size=200), path=st.sampled_from(["/jobs", "/jobs/batch", "/leases/claim", "/leases/fail"])
    )
    def refuse(body: bytes, path: str) -> None:
        answer = api.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), (body, answer.text)
        assert answer.headers["content-type"] == "application/problem+json"

    refuse()
