"""Submits: enqueues of many requests in few transactions.

A request alone is sent at once. Those that arrive while others are on their way to the database share the next call, as
nothing is gained by a commit for each. Should such a call be refused, each of its jobs is sent alone, so that nobody
sees another's error.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from pgqueue import calls_rest
from pgqueue.errors import DatabaseConflict, DatabaseUnavailable, PgqueueError

MOST_JOBS: Final = 200
MOST_BYTES: Final = 1 << 20


class Submitted(NamedTuple):
    """A job as it is in the queue, as JSON; whether its key was known; and if so, whether it is the job asked for."""

    job: str
    duplicate: bool
    same: bool


class _Waiting(NamedTuple):
    job: str
    hashes: frozenset[bytes | None]
    told: asyncio.Future[Submitted]


class Submits:
    """Sends jobs to the database, together where several wait."""

    def __init__(self, run: Callable[..., Awaitable[Any]]) -> None:
        """`run` runs a call of pgqueue.calls in a transaction of its own."""
        self._run = run
        self._waiting: list[_Waiting] = []
        self._flight: asyncio.Task[None] | None = None

    async def submit(self, job: str, hashes: frozenset[bytes | None]) -> Submitted:
        """Enqueue a job given as a JSON object; raises what the database says of it.

        hashes: of keys that must be in force, KeyRefused else; None stands for there being no key at all.
        """
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Submitted] = loop.create_future()
        self._waiting.append(_Waiting(job, hashes, told))
        # One call at a time: with two on their way, each carries half as much, and costs as much as a fuller one.
        if self._flight is None or self._flight.done():
            self._flight = loop.create_task(self._fly())
        return await told

    async def _fly(self) -> None:
        while self._waiting:
            size = count = 0
            for one in self._waiting[:MOST_JOBS]:
                size += len(one.job)
                if count and size > MOST_BYTES:
                    break
                count += 1
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            await self._send(taken)

    async def _send(self, taken: list[_Waiting]) -> None:
        try:
            rows = await self._run(
                calls_rest.SUBMIT,
                jobs=f"[{','.join(one.job for one in taken)}]",
                hashes=list(frozenset().union(*(one.hashes for one in taken))),
            )
        except Exception as exc:
            away = isinstance(exc, DatabaseUnavailable) and not isinstance(exc, DatabaseConflict)
            if len(taken) > 1 and isinstance(exc, PgqueueError) and not away:
                await asyncio.gather(*(self._send([one]) for one in taken))
                return
            for one in taken:
                if not one.told.done():
                    one.told.set_exception(exc)
            return
        for row, one in zip(rows, taken, strict=True):
            if not one.told.done():
                one.told.set_result(Submitted(*row))
