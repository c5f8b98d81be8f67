"""Reads whose cost nobody knows beforehand: read-only, with a short time limit, along indexes."""

import asyncio
from typing import Any, Final, TypeVar

import psycopg

from pgqueue import calling, calls_dashboard
from pgqueue.api.core import Api
from pgqueue.calling import Call
from pgqueue.connections import AsyncPool
from pgqueue.errors import DatabaseUnavailable, from_db

T = TypeVar("T")
#: Seconds.
_LIMIT: Final = 5.0


class Reading(Api):
    """An API as it is, but for its calls: each may only read."""

    def __init__(self, api: Api) -> None:
        """`api` has the connections."""
        self._of = api
        self.config = api.config

    @property
    def pool(self) -> AsyncPool:
        """The connections of all requests."""
        return self._of.pool

    async def call(self, call: Call[T], **parameters: Any) -> T:
        """Run a call in a read-only transaction of its own."""
        try:
            async with self.pool.connection() as connection, asyncio.timeout(_LIMIT), connection.transaction():
                await calling.run_async(connection, calls_dashboard.ONLY_READ, milliseconds=round(_LIMIT * 1000))
                return await calling.run_async(connection, call, **parameters)
        except psycopg.Error as exc:
            raise from_db(exc) from exc
        except TimeoutError:
            raise DatabaseUnavailable(f"the database did not answer {call.name} within {_LIMIT:g} s") from None
