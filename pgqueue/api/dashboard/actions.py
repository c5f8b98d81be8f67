"""Actions on one thing: a job, a queue, a schedule. Each is a form that leads back to where it stood."""

from typing import Any, Final

import msgspec
from litestar import Response, post

from pgqueue import calls, calls_dashboard, calls_time
from pgqueue.api.dashboard.filters import read_id
from pgqueue.api.dashboard.reads import reads_of
from pgqueue.api.dashboard.session import Form, enter_to_act, read_form
from pgqueue.api.dashboard.shell import back, done
from pgqueue.api.dashboard.words import whole_number
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.problems import Invalid, NotFound
from pgqueue.errors import DatabaseError, PgqueueError


def _said(request: AnyRequest, form: Form, said: str, kind: str = "good") -> Response[Any]:
    reads_of(api_of(request)).forget()
    return done(request, back(request, form.one("back")), said, kind)


def _refused(request: AnyRequest, form: Form, exc: PgqueueError) -> Response[Any]:
    """Go back and say why not; what is no matter of the request is a page of its own."""
    if isinstance(exc, DatabaseError) or exc.http_status >= 500:
        raise exc
    return _said(request, form, str(exc), "bad")


def _name(form: Form) -> str:
    name = form.one("name")
    if not name:
        raise Invalid("name is missing")
    return name


@post("/jobs/cancel")
async def cancel(request: AnyRequest) -> Response[Any]:
    """Cancel a job."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    try:
        outcome = await api_of(request).act(identity, calls.CANCEL, job_id=read_id(form.one("id"), "id"))
    except PgqueueError as exc:
        return _refused(request, form, exc)
    return _said(request, form, "It is cancelled." if outcome == "cancelled" else "It runs, and was asked to stop.")


@post("/jobs/retry")
async def retry(request: AnyRequest) -> Response[Any]:
    """Retry a dead letter, or a failed job now."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    try:
        await api_of(request).act(identity, calls.RETRY, job_id=read_id(form.one("id"), "id"))
    except PgqueueError as exc:
        return _refused(request, form, exc)
    return _said(request, form, "It is pending again.")


@post("/queues/pause")
async def pause(request: AnyRequest) -> Response[Any]:
    """Pause a queue."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    name = _name(form)
    changed = await api_of(request).act(identity, calls.PAUSE, queue=name)
    return _said(request, form, f"Queue “{name}” {'is' if changed else 'was already'} paused.")


@post("/queues/resume")
async def resume(request: AnyRequest) -> Response[Any]:
    """Resume a queue."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    name = _name(form)
    changed = await api_of(request).act(identity, calls.RESUME, queue=name)
    return _said(request, form, f"Queue “{name}” {'runs again' if changed else 'was not paused'}.")


@post("/queues/limits")
async def limits(request: AnyRequest) -> Response[Any]:
    """Set a queue's limits."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    name = _name(form)
    try:
        settings = {
            "soft_limit": whole_number(form.one("soft_limit"), "the soft limit", 0),
            "hard_limit": whole_number(form.one("hard_limit"), "the hard limit", 0),
            "rate_per_second": whole_number(form.one("rate_per_second"), "the rate", 1),
        }
        if settings["soft_limit"] is None or settings["hard_limit"] is None:
            raise Invalid("the soft and the hard limit must be given")
        await api_of(request).act(
            identity, calls.SET_QUEUE, queue=name, settings=msgspec.json.encode(settings).decode()
        )
    except PgqueueError as exc:
        return _refused(request, form, exc)
    return _said(request, form, f"The limits of queue “{name}” are set.")


@post("/schedules/run")
async def run_schedule(request: AnyRequest) -> Response[Any]:
    """Run a schedule now."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    name = _name(form)
    try:
        job_id = await api_of(request).act(identity, calls_time.RUN_SCHEDULE, name=name)
    except PgqueueError as exc:
        return _refused(request, form, exc)
    return _said(request, form, f"Schedule “{name}” enqueued job {job_id}.")


@post("/schedules/enable")
async def enable_schedule(request: AnyRequest) -> Response[Any]:
    """Let a schedule fire, or not."""
    identity = await enter_to_act(request)
    form = await read_form(request)
    name, enabled = _name(form), form.one("enabled") == "1"
    if not await api_of(request).act(identity, calls_dashboard.ENABLE_SCHEDULE, name=name, enabled=enabled):
        raise NotFound(f"there is no schedule {name!r}")
    return _said(request, form, f"Schedule “{name}” is {'enabled' if enabled else 'disabled'}.")


ROUTES: Final[list[Any]] = [cancel, retry, pause, resume, limits, run_schedule, enable_schedule]
