"""Hooks of the schemathesis run: waits are shortened, so that a run does not consist of them, and no queue is full."""

from typing import Any

import schemathesis


def _waits(value: Any, most: float) -> bool:
    """Whether a value is one that would be waited for."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return False
    try:
        return 0 <= float(value) <= most
    except ValueError:
        return False


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.query, dict) and _waits(case.query.get("wait"), 60):
        case.query["wait"] = 0.01
    if (
        isinstance(case.body, dict)
        and not isinstance(case.body.get("wait_ms"), str)
        and _waits(case.body.get("wait_ms"), 30_000)
    ):
        case.body["wait_ms"] = 5
    # A full queue answers 503, as it should.
    if isinstance(case.body, dict) and type(limit := case.body.get("hard_limit")) is int and 0 <= limit < 1000:
        case.body["hard_limit"] = 1000
