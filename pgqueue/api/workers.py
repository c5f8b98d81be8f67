"""/workers and /stats."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import msgspec
from litestar.handlers import HTTPRouteHandler

from pgqueue import calls_rest
from pgqueue.api.core import Api
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of
from pgqueue.api.lists import NAMES, Limit, WorkerCursor, page_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.queues import oldest
from pgqueue.api.values_operate import Alert, Depth, Rates, Stats, Workers, WorkerView

_TAG: Final = "workers"
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@operation(HttpMethod.GET, "/workers", needs="read", gives={200: Gives(Workers, "A page of workers.")}, tag=_TAG)
async def list_workers(request: AnyRequest, cursor: WorkerCursor = None, limit: Limit = NAMES) -> Answer:
    """List worker processes, also those that stopped within a day, the oldest first."""
    rows = await worker_rows(api_of(request), cursor, limit + 1)
    views = [msgspec.convert(row, WorkerView) for row in rows]
    return answer(Workers(*page_of(views, limit, _cursor_of)))


@operation(HttpMethod.GET, "/stats", needs="read", gives={200: Gives(Stats, "The state of the queue.")}, tag=_TAG)
async def get_stats(request: AnyRequest) -> Answer:
    """See the whole queue at a glance: depths, rates, workers, what is wrong."""
    api = api_of(request)
    counts = await api.call(calls_rest.QUEUE_COUNTS)
    totals = await api.call(calls_rest.TOTALS)
    return answer(
        Stats(
            depth=Depth(**{name: sum(row[name] for row in counts) for name in Depth.__struct_fields__}),
            dead_letters=totals["dead_letters"],
            oldest_pending_seconds=oldest(counts),
            rates=Rates(**{name: totals[name] for name in Rates.__struct_fields__}),
            workers=totals["workers"],
            slots=totals["slots"],
            alerts=[msgspec.convert(alert, Alert) for alert in await api.call(calls_rest.ALERTS)],
        )
    )


async def worker_rows(api: Api, cursor: str | None, limit: int) -> list[dict[str, Any]]:
    """Return so many workers after the one of a cursor, the oldest first."""
    after = after_id = None
    if cursor is not None:
        started, _, after_id = cursor.partition("-")
        after = _EPOCH + timedelta(microseconds=int(started))
    rows: list[dict[str, Any]] = await api.call(calls_rest.WORKER_ROWS, after=after, after_id=after_id, limit=limit)
    return rows


def _cursor_of(worker: WorkerView) -> str:
    return f"{(worker.started_at - _EPOCH) // timedelta(microseconds=1)}-{worker.worker_id}"


ROUTES: Final[list[HTTPRouteHandler]] = [list_workers, get_stats]
