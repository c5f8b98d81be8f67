"""What is refused says which rule it breaks, in words of the caller's and not of the tables."""

import datetime
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App
from pgqueue.errors import InvalidJob, WrongState, from_db
from pgqueue.http import _job_body


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with App(database) as opened:
        yield opened


@pytest.mark.parametrize(
    ("options", "column", "said"),
    [
        ({"max_retries": -1}, "max_retries", "max_retries is -1; it must be a whole number from 0 to 1000000"),
        ({"max_retries": 2**31}, "max_retries", "max_retries is 2147483648; it must be"),
        ({"max_retries": 1.5}, "max_retries", "max_retries is 1.5; it must be a whole number"),
        ({"timeout": 0}, "timeout_ms", "timeout is 0; it must be a millisecond or more"),
        ({"ordering_key": "x" * 300}, "ordering_key", "ordering_key must have 1 to 256 characters"),
        ({"ordering_key": ""}, "ordering_key", "ordering_key must have 1 to 256 characters"),
        ({"producer_id": ""}, "producer_id", "producer_id must have 1 to 64 characters"),
        ({"queue": ["q"]}, "queue", "queue is list ['q']; it must be a string"),
        ({"ordering_key": 42}, "ordering_key", "ordering_key is int 42; it must be a string"),
        ({"idempotency_key": b"k"}, "idempotency_key", "idempotency_key is bytes b'k'; it must be a string"),
        ({"producer_id": {}}, "producer_id", "producer_id is dict {}; it must be a string"),
        ({"queue": "x" * 64}, "queue", "queue must have 1 to 63 characters"),
        ({"queue": ""}, "queue", "queue must have 1 to 63 characters"),
        (
            {"scheduled_at": datetime.datetime(9999, 1, 1, tzinfo=datetime.UTC)},
            "scheduled_at",
            "scheduled_at must lie between the years 1 and 9998",
        ),
        ({"retry_policy": {"a": 1}}, "retry_policy", "retry_policy must have no key"),
    ],
)
def test_an_enqueue_that_is_refused_names_the_rule_and_the_column(
    app: App, options: dict[str, Any], column: str, said: str
) -> None:
    with pytest.raises(InvalidJob) as one:
        app.enqueue_sync("echo", **options)
    with pytest.raises(InvalidJob) as many:
        app.enqueue_many_sync([{"job_type": "echo", **options}])
    for refused in (one.value, many.value):
        assert (refused.column, said in str(refused)) == (column, True), refused
        assert "violates" not in str(refused)


def test_a_rule_of_a_table_is_told_without_the_table(connection: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.Error) as caught:
        connection.execute("insert into pgqueue.queues (name, lease_ms) values ('q', 1)")
    refused = from_db(caught.value)
    assert (str(refused), refused.column) == ("lease_ms must be 100 to 86400000", "lease_ms")


def test_a_value_that_needs_more_memory_than_the_server_ever_gives_is_the_values_fault(
    connection: psycopg.Connection[Any],
) -> None:
    with pytest.raises(psycopg.Error) as caught:
        connection.execute("select repeat('x', 1 << 28) ~ 'y'")
    assert caught.value.sqlstate == "XX000"
    refused = from_db(caught.value)
    assert type(refused) is InvalidJob
    assert "invalid memory alloc request size" in str(refused)


def test_a_hint_ends_the_sentence(app: App) -> None:
    job = app.enqueue_sync("echo")
    app.cancel_sync(job)
    with pytest.raises(WrongState) as refused:
        app.retry_sync(job)
    assert str(refused.value).endswith("; only failed jobs and dead letters can be retried")


def test_a_time_limit_of_nothing_is_refused_over_http_too() -> None:
    with pytest.raises(InvalidJob, match="timeout is 0; it must be a millisecond or more"):
        _job_body({"job_type": "echo", "timeout": 0})
