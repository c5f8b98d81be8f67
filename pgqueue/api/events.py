"""Event streams: the present state first, then every change, as server-sent events."""

from collections.abc import AsyncIterator, Iterable
from datetime import datetime
from typing import Annotated, Final
from uuid import UUID

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import HeaderParameter, QueryParameter

from pgqueue import calls_rest
from pgqueue.api.access import Identity
from pgqueue.api.core import Api
from pgqueue.api.exchange import AnyRequest, EventStream, api_of
from pgqueue.api.guard import identity_of
from pgqueue.api.jobs import JobId, QueueFilter, TypeFilter, job_view
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.watches import Event, snapshot
from pgqueue.errors import PgqueueError

_TAG: Final = "events"
_encode: Final = msgspec.json.Encoder().encode
_BEGIN: Final = b"retry: 2000\n\n"
_PING: Final = b": ping\n\n"
_EXAMPLE: Final = (
    "id: 5f2c9a0b1d3e-42\n"
    "event: job.completed\n"
    'data: {"event":"job.completed","job_id":"01a228de-518f-7626-adad-bcdf2993f8fd","queue":"default",'
    '"job_type":"echo","from":"processing","to":"completed","attempt":1,"at":"2030-01-31T09:00:00Z","snapshot":false}\n\n'
)
LastEventId = Annotated[
    str | None, HeaderParameter(name="Last-Event-ID", max_length=100, description="Resumes a stream.")
]
LastEventIdParameter = Annotated[
    str | None, QueryParameter(max_length=100, description="As the header Last-Event-ID, for who cannot send it.")
]
_GIVES: Final = {200: Gives(None, "Server-sent events.", media_type=EventStream.MEDIA_TYPE, example=_EXAMPLE)}


@operation(HttpMethod.GET, "/jobs/{job_id:uuid}/events", needs="read", gives=_GIVES, refuses=(404,), tag=_TAG)
async def follow_job(request: AnyRequest, job_id: JobId) -> EventStream:
    """Follow a job.

    The first event says where the job stands (`snapshot` is true), named as the change to that status is; then come
    its changes, and the stream ends with the job, or with its key. A stream that broke is resumed by asking again.
    """
    api = api_of(request)
    await job_view(api, job_id)
    return EventStream(api, _job_stream(api, job_id, identity_of(request.scope)))


@operation(HttpMethod.GET, "/events", needs="read", gives=_GIVES, tag=_TAG)
async def follow_all(
    request: AnyRequest,
    queue_name: QueueFilter = None,
    job_type: TypeFilter = None,
    last_event_id: LastEventIdParameter = None,
    last_event: LastEventId = None,
) -> EventStream:
    """Follow a queue, a job type, or everything.

    The first event, `state`, has the depths of the queues; then come the changes of jobs. With Last-Event-ID the stream
    goes on after that event; when that is no longer known, or a slow client has missed events, `resync` and a new
    `state` say so.
    """
    api = api_of(request)
    resume = last_event or last_event_id
    return EventStream(api, _wide_stream(api, queue_name, job_type, resume, identity_of(request.scope)))


def _wire(number: str, event: Event) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (number.encode(), event.event.encode(), _encode(event))


async def _job_stream(api: Api, job_id: UUID, identity: Identity) -> AsyncIterator[bytes]:
    with api.hub.follow(job_id=job_id, identity=identity) as watch:
        yield _BEGIN
        shown = _Shown()
        try:
            await api.hub.watching()
            for state in await api.call(calls_rest.JOB_STATES, job_ids=[str(job_id)]):
                watch.put(0, snapshot(state))
        except PgqueueError:
            # The hub looks again as soon as the database is back.
            yield _PING
        while not watch.closed:
            if not await watch.wait(api.config.ping):
                yield _PING
            watch.lagging = False
            for number, event in watch.take():
                if shown.is_news(event):
                    yield _wire(f"{api.hub.name}-{number}", event)
                if event.final or event.event == "job.gone":
                    return


class _Shown:
    """What a stream has told of its job, so that it tells nothing twice and nothing that is over."""

    def __init__(self) -> None:
        self._last: tuple[str, int] | None = None
        self._as_of: datetime | None = None
        self._told_at: datetime | None = None

    def is_news(self, event: Event) -> bool:
        if event.snapshot:
            # A notice may have overtaken what was read. An end is told whatever the clock says of it.
            stale = self._told_at is not None and event.at < self._told_at and not event.final
            if stale or (event.to, event.attempt) == self._last:
                return False
            self._as_of = event.at
        elif self._as_of is not None and event.event != "job.gone" and event.at <= self._as_of:
            return False
        self._last, self._told_at = (event.to, event.attempt), event.at
        return True


async def _wide_stream(
    api: Api, queue: str | None, job_type: str | None, resume: str | None, identity: Identity
) -> AsyncIterator[bytes]:
    with api.hub.follow(queue=queue, job_type=job_type, identity=identity) as watch:
        yield _BEGIN
        try:
            await api.hub.watching(wide=True)
        except PgqueueError:
            yield _PING
        missed = None if resume is None else api.hub.since(resume)
        # What came until now is in what comes next.
        watch.drop()
        if missed is None:
            if resume is not None:
                yield _resync(api)
            for part in await _state(api, queue):
                yield part
        else:
            for number, event in missed:
                if watch.wants(event):
                    yield _wire(f"{api.hub.name}-{number}", event)
        while not watch.closed:
            if not await watch.wait(api.config.ping):
                yield _PING
            if watch.lagging:
                watch.lagging = False
                yield _resync(api)
                for part in await _state(api, queue):
                    yield part
            for number, event in watch.take():
                yield _wire(f"{api.hub.name}-{number}", event)


def _resync(api: Api) -> bytes:
    return b"id: %s\nevent: resync\ndata: {}\n\n" % api.hub.position.encode()


async def _state(api: Api, queue: str | None) -> Iterable[bytes]:
    """Return the depths of a queue or of all, or a ping when the database does not answer; it is asked again later."""
    try:
        counts = await api.depths()
    except PgqueueError:
        return [_PING]
    rows = [row for row in counts if queue is None or row["queue"] == queue]
    return [b"id: %s\nevent: state\ndata: %s\n\n" % (api.hub.position.encode(), _encode({"queues": rows}))]


ROUTES: Final[list[HTTPRouteHandler]] = [follow_job, follow_all]
