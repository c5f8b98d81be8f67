"""Membership of a group whose workers divide the shards among themselves, without a leader.

Each member reads from pgqueue.workers which others live and takes every n-th shard, beginning at its own place among
them in the order of ids. Two that see different members for a moment claim from a shard both, or neither: a claim
gives a job to one all the same, and within a second they see the same again.
"""

import math
import time
from collections.abc import Callable
from typing import Final
from uuid import UUID

from pgqueue import calls
from pgqueue.connections import Link
from pgqueue.log import logger

_log: Final = logger("pgqueue.membership")
SHARDS: Final = 64
#: Seconds: a member that gave no sign of life for so long is out; how often it gives one, and looks who else does.
MISSED: Final = 10.0
SIGN_EVERY: Final = 3.0
_LOOK_EVERY: Final = 0.9
_INDEX_EVERY: Final = 10.0


class Membership:
    """One worker's place in its group. Only workers of the same queues, job types and priorities share their shards.

    `divided(shards)` is told, in the thread that calls `step`, which ones to claim from; None: from all.
    """

    def __init__(self, worker_id: UUID, group: str, divided: Callable[[list[int] | None], None]) -> None:
        """Alone, and without any shard, until the first step."""
        self._worker_id = worker_id
        self._group = group
        self._divided = divided
        self._members: list[UUID] | None = None
        self._look_at = 0.0
        self._index_at = 0.0
        self._to_ring = False

    def relay(self) -> None:
        """Have the next step wake the others: the bell tells a queue, and the shard may be another's."""
        self._to_ring = True

    async def step(self, link: Link) -> None:
        """Look who lives, and wake the others if that was asked for. Raises a PgqueueError."""
        others = [member for member in self._members or () if member != self._worker_id]
        if self._to_ring and others:
            self._to_ring = False
            await link.call(calls.RING_WORKERS, worker_ids=others)
        if time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + _LOOK_EVERY
        try:
            members = await link.call(calls.GROUP_MEMBERS, worker_id=self._worker_id, missed=MISSED)
        except BaseException:
            if self._members is None:
                self._divided(None)
            raise
        if members != self._members:
            self._members = members
            shards = share(members, self._worker_id)
            _log.info(
                "shards divided",
                group=self._group,
                members=len(members),
                shards=SHARDS if shards is None else len(shards),
            )
            self._divided(shards)
        if self._index_at <= time.monotonic():
            # Claims find their shards without it, but walk over those of others.
            self._index_at = math.inf if await link.call(calls.INDEX_SHARDS) else time.monotonic() + _INDEX_EVERY


def share(members: list[UUID], member: UUID) -> list[int] | None:
    """Return the shards of one of the members, in the order of their ids; None (all) for one that is not among them."""
    if member not in members:
        return None
    return list(range(SHARDS))[members.index(member) :: len(members)]
