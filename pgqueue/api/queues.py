"""/queues: what is in them, pause and resume, settings."""

from typing import Annotated, Any, Final

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter
from msgspec import UNSET

from pgqueue import calls, calls_rest
from pgqueue.api.core import Api
from pgqueue.api.exchange import Answer, AnyRequest, answer, answer_with_etag, api_of, read_body
from pgqueue.api.guard import identity_of
from pgqueue.api.lists import NAMES, Limit, NameCursor, page_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.problems import Fault, Invalid, NotFound
from pgqueue.api.values_operate import Depth, Paused, PriorityDepth, QueueChange, Queues, QueueView

_TAG: Final = "queues"
_change: Final = msgspec.json.Decoder(QueueChange)
_COUNTS: Final = ("pending", "submitted", "processing", "failed")

Name = Annotated[str, PathParameter(pattern=r"^[^\x00]+$", max_length=63)]


@operation(HttpMethod.GET, "/queues", needs="read", gives={200: Gives(Queues, "A page of queues.")}, tag=_TAG)
async def list_queues(request: AnyRequest, cursor: NameCursor = None, limit: Limit = NAMES) -> Answer:
    """List queues by name, with their depths and settings."""
    views = await queue_views(api_of(request), after=cursor, limit=limit + 1)
    return answer(Queues(*page_of(views, limit, lambda view: view.name)))


@operation(
    HttpMethod.GET,
    "/queues/{queue_name:str}",
    needs="read",
    gives={200: Gives(QueueView, "The queue.", headers=("ETag",)), 304: Gives(None, "Nothing has changed.")},
    refuses=(404,),
    tag=_TAG,
)
async def get_queue(request: AnyRequest, queue_name: Name) -> Answer:
    """Look at a queue."""
    return answer_with_etag(request, await queue_view(api_of(request), queue_name))


@operation(
    HttpMethod.PATCH,
    "/admin/queues/{queue_name:str}",
    needs="operate",
    takes=QueueChange,
    gives={200: Gives(QueueView, "The queue as it is now.")},
    tag=_TAG,
    example={"hard_limit": 200000, "weights": [8, 4, 2, 1]},
)
async def change_queue(request: AnyRequest, queue_name: Name) -> Answer:
    """Change settings of a queue, which need not exist yet. It is written to the audit."""
    change = await read_body(request, _change)
    api = api_of(request)
    settings: dict[str, Any] = {}
    for field in change.__struct_fields__:
        value = getattr(change, field)
        if value is UNSET:
            continue
        if field.endswith("_ttl_ms"):
            settings[field.removesuffix("_ms")] = f"{value} milliseconds"
        else:
            settings[field] = value
    if change.weights is not UNSET and change.weights is not None and not any(change.weights):
        raise Invalid("weights must not all be 0", faults=[Fault("must not all be 0", pointer="/weights")])
    await api.act(
        identity_of(request.scope),
        calls.SET_QUEUE,
        queue=queue_name,
        settings=msgspec.json.encode(settings).decode(),
    )
    return answer(await queue_view(api, queue_name))


@operation(
    HttpMethod.POST,
    "/admin/queues/{queue_name:str}/pause",
    needs="operate",
    gives={200: Gives(Paused, "It is paused.")},
    tag=_TAG,
)
async def pause_queue(request: AnyRequest, queue_name: Name) -> Answer:
    """Pause a queue: nothing of it is claimed any more. Running jobs end, and jobs may still be enqueued."""
    changed = await api_of(request).act(identity_of(request.scope), calls.PAUSE, queue=queue_name)
    return answer(Paused(queue_name, True, changed))


@operation(
    HttpMethod.POST,
    "/admin/queues/{queue_name:str}/resume",
    needs="operate",
    gives={200: Gives(Paused, "It is not paused.")},
    tag=_TAG,
)
async def resume_queue(request: AnyRequest, queue_name: Name) -> Answer:
    """Resume a paused queue."""
    changed = await api_of(request).act(identity_of(request.scope), calls.RESUME, queue=queue_name)
    return answer(Paused(queue_name, False, changed))


async def queue_view(api: Api, name: str) -> QueueView:
    """Return a queue; raises NotFound when it has no row and never had a job."""
    found = await queue_views(api, name)
    if not found:
        raise NotFound(f"there is no queue {name!r}: it has no settings and has had no job")
    return found[0]


async def queue_views(
    api: Api, name: str | None = None, *, after: str | None = None, limit: int | None = None
) -> list[QueueView]:
    """Return queues by name with their depths, all of them or so many after a name."""
    counts: dict[str, list[dict[str, Any]]] = {}
    for row in await api.call(calls_rest.QUEUE_COUNTS):
        if name is None or row["queue"] == name:
            counts.setdefault(row["queue"], []).append(row)
    views = []
    for row in await api.call(calls_rest.QUEUES_NAMED, names=list(counts), after=after, limit=limit):
        parts = counts[row["name"]]
        row["depth"] = Depth(**{count: sum(part[count] for part in parts) for count in _COUNTS})
        row["priorities"] = [
            PriorityDepth(**{key: part[key] for key in PriorityDepth.__struct_fields__}) for part in parts
        ]
        row["oldest_pending_seconds"] = oldest(parts)
        views.append(msgspec.convert(row, QueueView, from_attributes=True, strict=False))
    return views


def oldest(parts: list[dict[str, Any]]) -> float | None:
    """Return the age of the oldest pending job among rows of queue_counts."""
    return max((age for part in parts if (age := part["oldest_pending_seconds"]) is not None), default=None)


ROUTES: Final[list[HTTPRouteHandler]] = [list_queues, get_queue, change_queue, pause_queue, resume_queue]
