"""/workers and /stats."""

from typing import Final

import msgspec
from litestar.handlers import HTTPRouteHandler

from pgqueue import calls_rest
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.queues import oldest
from pgqueue.api.values_operate import Alert, Depth, Rates, Stats, Workers, WorkerView

_TAG: Final = "workers"


@operation(HttpMethod.GET, "/workers", needs="read", gives={200: Gives(Workers, "All workers.")}, tag=_TAG)
async def list_workers(request: AnyRequest) -> Answer:
    """List worker processes, also those that stopped within a day, the oldest first."""
    rows = await api_of(request).call(calls_rest.WORKER_ROWS)
    return answer(Workers([msgspec.convert(row, WorkerView) for row in rows]))


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


ROUTES: Final[list[HTTPRouteHandler]] = [list_workers, get_stats]
