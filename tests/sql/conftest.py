"""A session with the verbs of the queue."""

from typing import Any

import psycopg
import pytest

from tests.sql.verbs import Verbs


@pytest.fixture
def q(connection: psycopg.Connection[Any]) -> Verbs:
    """The verbs, in autocommit mode, on a fresh database."""
    # A superuser called pgqueue would find everything in "$user".
    connection.execute("set search_path = public")
    return Verbs(connection)
