"""The arithmetic of waits between attempts."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from tests.sql.verbs import Verbs

YEAR_MS = 31_536_000_000


def wait(q: Verbs, policy: Any, attempt: int | None) -> timedelta:
    value = q.value("select pgqueue.backoff(%s, %s)", [None if policy is None else Jsonb(policy), attempt])
    assert isinstance(value, timedelta)
    return value


@pytest.mark.parametrize(("policy", "seconds"), [
    (None, [1, 2, 4, 8, 16, 30, 30]),
    ({}, [1, 2, 4, 8, 16, 30, 30]),
    ({"base_delay_ms": 100}, [0.1, 0.2, 0.4, 0.8]),
    ({"base_delay_ms": 60_000}, [30, 30]),
    ({"base_delay_ms": 60_000, "max_delay_ms": 600_000}, [60, 120, 240, 480, 600, 600]),
    ({"backoff_multiplier": 3}, [1, 3, 9, 27, 30]),
    ({"backoff_multiplier": 1.5}, [1, 1.5, 2.25, 3.375]),
    ({"backoff_multiplier": 1}, [1, 1, 1]),
    ({"base_delay_ms": 0}, [0, 0, 0]),
    ({"max_delay_ms": 0}, [0, 0, 0]),
])  # fmt: skip
def test_the_waits(q: Verbs, policy: Any, seconds: list[float]) -> None:
    for attempt, expected in enumerate(seconds, 1):
        exact = wait(q, {**(policy or {}), "jitter": False}, attempt)
        assert exact == timedelta(seconds=expected)
        for _ in range(10):
            assert exact <= wait(q, policy, attempt) <= exact * 1.1 + timedelta(microseconds=1)


@pytest.mark.parametrize("attempt", [0, -1, -2_147_483_648, None])
def test_before_the_first_attempt_it_is_the_first_wait(q: Verbs, attempt: int | None) -> None:
    assert wait(q, {"jitter": False}, attempt) == timedelta(seconds=1)


@pytest.mark.parametrize("attempt", [31, 1_000, 1_000_000, 2_147_483_647])
def test_any_attempt_waits_at_most_the_cap(q: Verbs, attempt: int) -> None:
    assert wait(q, {"jitter": False}, attempt) == timedelta(seconds=30)
    assert wait(q, {"jitter": False, "base_delay_ms": 1e-300, "backoff_multiplier": 1000}, attempt) <= timedelta(
        seconds=30
    )


numbers = st.one_of(
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([10**400, -(10**400), 0, 0.5, 1, 1.0000001, 5e-324, None]),
)
policies = st.fixed_dictionaries(
    {},
    optional={
        "base_delay_ms": numbers,
        "max_delay_ms": numbers,
        "backoff_multiplier": numbers,
        "jitter": st.booleans(),
    },
)
delays = st.integers(0, YEAR_MS) | st.integers(0, 10**9).map(lambda n: n / 1000)
lawful = st.fixed_dictionaries(
    {},
    optional={
        "base_delay_ms": delays,
        "max_delay_ms": delays,
        "backoff_multiplier": st.integers(10**6, 10**9).map(lambda n: n / 10**6),
        "jitter": st.booleans(),
    },
)
attempts = st.integers(-(2**31), 2**31 - 1)
MANY = settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@MANY
@given(policies, attempts)
@example({"max_delay_ms": 10**400}, 2**31 - 1)
@example({"base_delay_ms": 10**400, "max_delay_ms": 10**400, "backoff_multiplier": 10**400}, 2)
def test_no_policy_makes_it_negative_or_overflow(q: Verbs, policy: dict[str, Any], attempt: int) -> None:
    assert timedelta(0) <= wait(q, policy, attempt) <= timedelta(milliseconds=YEAR_MS) * 1.1


@MANY
@given(lawful, st.integers(1, 200))
def test_it_is_the_formula(q: Verbs, policy: dict[str, Any], attempt: int) -> None:
    assert q.value("select pgqueue.retry_policy_fault(%s) is null", [Jsonb(policy)]) is True
    base, most = policy.get("base_delay_ms", 1000), policy.get("max_delay_ms", 30_000)
    try:
        grown = base * policy.get("backoff_multiplier", 2) ** (attempt - 1)
    except OverflowError:
        grown = float("inf")
    expected = min(grown, most) if base else 0
    milliseconds = wait(q, policy, attempt) / timedelta(milliseconds=1)
    most_jitter = 1.1 if policy.get("jitter", True) else 1
    assert expected * (1 - 1e-9) - 0.001 <= milliseconds <= expected * most_jitter * (1 + 1e-9) + 0.001


@MANY
@given(lawful, st.integers(1, 60))
def test_it_never_shrinks_from_one_attempt_to_the_next(q: Verbs, policy: dict[str, Any], attempt: int) -> None:
    policy = {**policy, "jitter": False}
    assert wait(q, policy, attempt) <= wait(q, policy, attempt + 1) + timedelta(microseconds=1)
