"""Hints of changes: a page hears `changed` at most once a second, and fetches itself anew."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from litestar import get

from pgqueue.api.access import Identity
from pgqueue.api.core import Api
from pgqueue.api.dashboard.session import enter, read_query
from pgqueue.api.exchange import AnyRequest, EventStream, api_of
from pgqueue.api.problems import Invalid
from pgqueue.errors import PgqueueError

_EVERY: Final = 0.7
#: Then the browser asks again, and the key is looked up again.
_LASTS: Final = 300.0


@get("/events")
async def events(request: AnyRequest) -> EventStream:
    """Say when a job, or any job, has changed."""
    identity = await enter(request)
    asked = read_query(request).one("job")
    try:
        job_id = UUID(asked) if asked else None
    except ValueError:
        raise Invalid("job must be an id") from None
    api = api_of(request)
    return EventStream(api, _hints(api, job_id, identity))


async def _hints(api: Api, job_id: UUID | None, identity: Identity) -> AsyncIterator[bytes]:
    ends_at = time.monotonic() + _LASTS
    with api.hub.follow(job_id=job_id, identity=identity) as watch:
        yield b"retry: 2000\n\n"
        with suppress(PgqueueError):
            await api.hub.watching(wide=job_id is None)
        while not watch.closed and time.monotonic() < ends_at:
            if not await watch.wait(api.config.ping):
                yield b": ping\n\n"
                continue
            watch.drop()
            yield b"event: changed\ndata: 1\n\n"
            await asyncio.sleep(_EVERY)


ROUTES: Final[list[Any]] = [events]
