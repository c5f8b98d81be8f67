"""/schedules: jobs that recur."""

from datetime import UTC, datetime
from typing import Annotated, Any, Final

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter, QueryParameter

from pgqueue import calls_rest, calls_time
from pgqueue.api.core import Api
from pgqueue.api.exchange import (
    Answer,
    AnyRequest,
    answer,
    api_of,
    check_json,
    moment_of,
    moment_parameter,
    own_path,
    read_body,
)
from pgqueue.api.guard import identity_of
from pgqueue.api.lists import NAMES, Limit, NameCursor, page_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.problems import NotFound
from pgqueue.api.redaction import redact
from pgqueue.api.values_operate import Deleted, Fired, NewSchedule, Preview, Schedules, ScheduleView
from pgqueue.cron import Cron
from pgqueue.cron_words import describe
from pgqueue.errors import InvalidJob, JobNotFound
from pgqueue.job import PRIORITIES

_TAG: Final = "schedules"
_new_schedule: Final = msgspec.json.Decoder(NewSchedule)
_view: Final = msgspec.json.Decoder(ScheduleView).decode
_encode: Final = msgspec.json.Encoder().encode

Name = Annotated[str, PathParameter(pattern=r"^[^\x00]+$", max_length=128)]


@operation(HttpMethod.GET, "/schedules", needs="read", gives={200: Gives(Schedules, "A page of schedules.")}, tag=_TAG)
async def list_schedules(request: AnyRequest, cursor: NameCursor = None, limit: Limit = NAMES) -> Answer:
    """List schedules by name."""
    api = api_of(request)
    views = await schedule_views(api, after=cursor, limit=limit + 1)
    for view in views:
        view.payload = redact(view.payload, api.config.secrets)
    return answer(Schedules(*page_of(views, limit, lambda view: view.name)))


@operation(
    HttpMethod.GET,
    "/schedules/{schedule_name:str}",
    needs="read",
    gives={200: Gives(ScheduleView, "The schedule.")},
    refuses=(404,),
    tag=_TAG,
)
async def get_schedule(request: AnyRequest, schedule_name: Name) -> Answer:
    """Look at a schedule."""
    return answer(await _schedule(api_of(request), schedule_name))


@operation(
    HttpMethod.PUT,
    "/schedules/{schedule_name:str}",
    needs="operate",
    takes=NewSchedule,
    gives={
        200: Gives(ScheduleView, "The schedule as it is now."),
        201: Gives(ScheduleView, "The schedule was made.", headers=("Location",)),
    },
    tag=_TAG,
    example={"cron": "0 9 * * mon-fri", "timezone": "Europe/Berlin", "job_type": "daily_report"},
)
async def put_schedule(request: AnyRequest, schedule_name: Name) -> Answer:
    """Make a schedule, or replace what it says. An edit never fires for the past."""
    asked = await read_body(request, _new_schedule)
    check_json(asked.payload, "/payload")
    # Reads both, and refuses what the database could only find out later: an expression that never fires.
    Cron(asked.cron, asked.timezone).next(datetime.now(UTC))
    if isinstance(asked.priority, str):
        asked.priority = PRIORITIES.index(asked.priority)
    api = api_of(request)
    made = await api.act(
        identity_of(request.scope), calls_rest.PUT_SCHEDULE, name=schedule_name, settings=_encode(asked).decode()
    )
    view = await _schedule(api, schedule_name)
    return answer(view, 201, {"Location": own_path(request)}) if made else answer(view)


@operation(
    HttpMethod.DELETE,
    "/schedules/{schedule_name:str}",
    needs="operate",
    gives={200: Gives(Deleted, "It is gone.")},
    refuses=(404,),
    tag=_TAG,
)
async def delete_schedule(request: AnyRequest, schedule_name: Name) -> Answer:
    """Delete a schedule. Jobs that it made stay."""
    if not await api_of(request).act(identity_of(request.scope), calls_rest.DROP_SCHEDULE, name=schedule_name):
        raise _unknown(schedule_name)
    return answer(Deleted(schedule_name))


@operation(
    HttpMethod.POST,
    "/admin/schedules/{schedule_name:str}/run",
    needs="operate",
    gives={201: Gives(Fired, "The job that was enqueued.")},
    refuses=(404, 409),
    tag=_TAG,
)
async def run_schedule(request: AnyRequest, schedule_name: Name) -> Answer:
    """Run a schedule now, enabled or not, without touching its next time."""
    try:
        job_id = await api_of(request).act(identity_of(request.scope), calls_time.RUN_SCHEDULE, name=schedule_name)
    except JobNotFound:
        raise _unknown(schedule_name) from None
    return answer(Fired(schedule_name, job_id), 201)


@operation(
    HttpMethod.GET,
    "/schedules/{schedule_name:str}/preview",
    needs="read",
    gives={200: Gives(Preview, "The next times.")},
    refuses=(404,),
    tag=_TAG,
)
async def preview_schedule(
    request: AnyRequest,
    schedule_name: Name,
    count: Annotated[int, QueryParameter(name="n", ge=1, le=100, description="How many times.")] = 5,
    after: Annotated[str | None, moment_parameter("Times after this moment; now without it.", "from")] = None,
) -> Answer:
    """See when a schedule fires next, in words, in UTC and in its zone."""
    view = await _schedule(api_of(request), schedule_name)
    cron = Cron(view.cron, view.timezone)
    moment = moment_of(after, "from") or datetime.now(UTC)
    times: list[datetime] = []
    for _ in range(count):
        moment = cron.next(moment)
        times.append(moment.astimezone(UTC))
    local = [time.astimezone(cron.zone).isoformat() for time in times]
    return answer(Preview(schedule_name, describe(view.cron, view.timezone), view.timezone, times, local))


async def schedule_views(
    api: Api, name: str | None = None, *, after: str | None = None, limit: int = 10_000
) -> list[ScheduleView]:
    """Return schedules by name, so many after a name, or the one of a name."""
    rows = await api.call(calls_rest.SCHEDULE_ROWS, name=name, after=after, limit=limit)
    views = [_view(row) for row in rows]
    for view in views:
        view.words = _words(view)
        if view.next_run_at is None and view.enabled and view.last_error is None:
            # The scheduler has not seen it yet, and will reckon alike.
            view.next_run_at = _next_run(view)
        for field in ("next_run_at", "last_run_at"):
            moment: Any = getattr(view, field)
            if moment is not None:
                setattr(view, field, moment.astimezone(UTC))
    return views


def _next_run(view: ScheduleView) -> datetime | None:
    try:
        return Cron(view.cron, view.timezone).next(datetime.now(UTC))
    except (InvalidJob, ValueError, OverflowError):
        return None


def _words(view: ScheduleView) -> str | None:
    try:
        return describe(view.cron, view.timezone)
    except InvalidJob:
        return None


async def _schedule(api: Api, name: str) -> ScheduleView:
    views = await schedule_views(api, name)
    if not views:
        raise _unknown(name)
    return views[0]


def _unknown(name: str) -> NotFound:
    return NotFound(f"there is no schedule {name!r}")


ROUTES: Final[list[HTTPRouteHandler]] = [
    list_schedules,
    get_schedule,
    put_schedule,
    delete_schedule,
    run_schedule,
    preview_schedule,
]
