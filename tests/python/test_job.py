"""Jobs as values, and the one rule for what is JSON."""

import datetime
import decimal
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgqueue.errors import ConfigError, InvalidJob, InvalidPayload
from pgqueue.job import JobRow, NotJson, decode_json, encode_json, priority_number
from tests.python.running import a_job

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner)
    ),
    max_leaves=20,
)


@given(JSON)
def test_json_comes_back_as_it_went(value: Any) -> None:
    assert decode_json(encode_json(value)) == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"m": float("nan")}, "value['m'] is nan; JSON has only finite numbers"),
        ([1, float("-inf")], "value[1] is -inf"),
        ({"a": {"b": datetime.date(2026, 1, 1)}}, "value['a']['b'] is datetime.date(2026, 1, 1) of type date; JSON"),
        (decimal.Decimal(1), "of type Decimal"),
        (b"x", "of type bytes"),
        ({1, 2}, "of type set"),
        (object(), "of type object"),
        ("a\0b", "value has a NUL character"),
        ({"a\0": 1}, "a key of value has a NUL character"),
        ("\ud800", "value has a lone surrogate"),
        ({(1, 2): 3}, "value has the key (1, 2); JSON keys are text"),
    ],
)  # fmt: skip
def test_what_is_not_json_is_named(value: Any, said: str) -> None:
    with pytest.raises(NotJson) as refused:
        encode_json(value)
    assert said in str(refused.value)


def test_an_integer_too_long_to_write_is_refused() -> None:
    with pytest.raises(NotJson, match="value is not JSON"):
        encode_json(10**5000)


def test_a_value_within_itself_and_a_deep_one_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (loop, deep):
        with pytest.raises(NotJson, match="nested too deep or contains itself"):
            encode_json(value)


class Moody(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("not now")


def test_a_container_that_raises_is_not_json() -> None:
    with pytest.raises(NotJson, match="value is not JSON: not now"):
        encode_json(Moody(a=1))


def test_what_no_jsonb_value_can_hold_is_refused_with_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    # A real one takes a gigabyte to make.
    monkeypatch.setattr("pgqueue.job.MOST_JSON_BYTES", 10)
    assert encode_json("x" * 8) == b'"xxxxxxxx"'
    with pytest.raises(NotJson, match="value has 11 bytes of JSON, of which PostgreSQL stores 10 at most"):
        encode_json("x" * 9)


def test_a_backslash_before_u0000_is_no_nul() -> None:
    assert decode_json(encode_json("\\u0000")) == "\\u0000"
    with pytest.raises(NotJson):
        encode_json("\\\0")


@pytest.mark.parametrize("stored", ["1" + "0" * 5000, "[" * 3000 + "]" * 3000])
def test_stored_json_that_python_cannot_hold_is_a_clear_error(stored: str) -> None:
    with pytest.raises(ValueError, match="Python cannot hold"):
        decode_json(stored)


def test_large_integers_are_exact() -> None:
    assert decode_json('{"id": 1970670598291982290}') == {"id": 1970670598291982290}
    assert decode_json("1" + "0" * 400) == 10**400


@pytest.mark.parametrize(("given_priority", "number"), [("critical", 0), ("HIGH", 1), (2, 2), ("low", 3)])
def test_priorities_are_numbers_or_names(given_priority: int | str, number: int) -> None:
    assert priority_number(given_priority) == number


@pytest.mark.parametrize("wrong", ["urgent", 4, -1, True, None, 1.0])
def test_other_priorities_are_refused(wrong: Any) -> None:
    with pytest.raises(InvalidJob, match="it must be 0 to 3 or one of critical, high, normal, low"):
        priority_number(wrong)


def test_a_job_says_what_it_is() -> None:
    job = a_job('{"a": [1]}')
    assert str(job.job_id) == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert (job.attempt, job.priority, job.queue) == (2, 1, "q")
    assert job.payload == {"a": [1]}
    assert job.trace_context == {"traceparent": "00-a"}
    assert (job.scheduled_at, job.created_at) == (None, datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
    assert repr(job) == "<Job t 00010203-0405-0607-0809-0a0b0c0d0e0f attempt 2>"


def test_a_payload_that_python_cannot_hold_is_invalid() -> None:
    with pytest.raises(InvalidPayload):
        _ = a_job("[" * 3000 + "]" * 3000).payload


def test_a_job_outside_a_worker_has_no_services() -> None:
    with pytest.raises(ConfigError, match="not run by a worker"):
        a_job().progress(1)
    with pytest.raises(InvalidJob, match="progress is nan"):
        a_job().progress(float("nan"))


def test_raw_columns_of_a_row_keep_their_text() -> None:
    text = json.dumps(
        {
            "job_id": "01a228cf-1f8c-70ac-a063-8f4e42a5bd24", "seq": 1, "queue": "q", "job_type": "t", "priority": 2,
            "status": "completed", "attempts": 1, "max_retries": 3, "lost": 0, "shard": 1,
            "created_at": "2026-11-29T00:00:00+00:00", "updated_at": "2026-11-29T00:00:00+00:00",
            "payload": {"id": 1970670598291982290}, "later_column": 1,
        }
    )  # fmt: skip
    row = msgspec.json.decode(text, type=JobRow)
    assert row.payload == {"id": 1970670598291982290}
    assert row.result is None
    assert b"1970670598291982290" in msgspec.json.encode(row)
    assert row.finished
