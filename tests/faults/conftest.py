"""What most tests of faults begin with."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pgqueue import App
from tests.python.apps import MARKS
from tests.python.running import make_app


@pytest.fixture
def app(database: str, connection: psycopg.Connection[Any]) -> Iterator[App]:
    """An app on a database with the table in which tasks leave marks."""
    connection.execute(MARKS)
    with make_app(database) as app:
        yield app
