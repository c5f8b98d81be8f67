"""What the tests of the library share."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App, connections
from tests.python.running import make_app


@pytest.fixture
def app(database: str, connection: psycopg.Connection[Any]) -> Iterator[App]:
    """An app whose worker sweeps and polls often."""
    # As on any day but the first: a row does not meet the making of its partition.
    connection.execute("select pgqueue.maintain_partitions()")
    with make_app(database, sweep_interval=0.05, poll_interval=0.2) as app:
        yield app


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each call was made over links and pools of the process."""
    names: Counter[str] = Counter()
    within = connections._within

    async def counted(limit: float, connection: Any, call: Any, parameters: Any) -> Any:
        names[call.name] += 1
        return await within(limit, connection, call, parameters)

    monkeypatch.setattr(connections, "_within", counted)
    return names
