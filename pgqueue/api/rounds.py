"""Questions to the database that many requests share."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Rounds(Generic[K, V]):
    """Questions asked together, each round begun after the requests that it answers had arrived."""

    def __init__(self, ask: Callable[[set[K]], Awaitable[Callable[[K], V]]]) -> None:
        """`ask`: takes what a round wants to know, and returns what answers each of it."""
        self._ask = ask
        self._waiting: list[tuple[K, asyncio.Future[V]]] = []
        self._flight: asyncio.Task[None] | None = None

    async def find(self, key: K) -> V:
        """Return the answer for a key; raises what the round raised."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[V] = loop.create_future()
        self._waiting.append((key, told))
        if self._flight is None:
            self._flight = loop.create_task(self._fly())
        return await told

    async def _fly(self) -> None:
        try:
            while self._waiting:
                waiting, self._waiting = self._waiting, []
                await self._answer(waiting)
        finally:
            self._flight = None

    async def _answer(self, waiting: list[tuple[K, asyncio.Future[V]]]) -> None:
        try:
            answer = await self._ask({key for key, _ in waiting})
        except Exception as exc:
            for _, told in waiting:
                if not told.done():
                    told.set_exception(exc)
            return
        for key, told in waiting:
            if not told.done():
                told.set_result(answer(key))
