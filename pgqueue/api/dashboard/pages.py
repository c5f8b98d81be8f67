"""The pages."""

import asyncio
from datetime import UTC, datetime
from typing import Any, Final, cast
from uuid import UUID

import msgspec
from litestar import Response, get
from litestar.params import FromPath

from pgqueue import __version__, calls, calls_dashboard, schema
from pgqueue.api.core import Api
from pgqueue.api.dashboard import timeline
from pgqueue.api.dashboard.filters import Filters
from pgqueue.api.dashboard.reading import Reading
from pgqueue.api.dashboard.reads import (
    DEAD_LETTERS_COUNTED,
    HISTORY_OVER,
    attention,
    by_priority,
    quantile,
    reads_of,
)
from pgqueue.api.dashboard.session import enter, read_query
from pgqueue.api.dashboard.shell import html
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.health import ready_checks
from pgqueue.api.jobs import job_page, job_view, looked_through
from pgqueue.api.paths import asked_path
from pgqueue.api.problems import NotFound
from pgqueue.api.schedules import schedule_views
from pgqueue.api.values import JobView
from pgqueue.api.values_operate import QueueView, ScheduleView
from pgqueue.cron import Cron
from pgqueue.errors import DatabaseUnavailable, InvalidJob, PgqueueError
from pgqueue.job import FINAL_STATUSES

_PER_PAGE: Final = 50
_STATUSES: Final = ("pending", "submitted", "processing", "failed", "completed", "dead_letter", "cancelled")


def _sum(queues: list[QueueView], name: str) -> int:
    return sum(getattr(queue.depth, name) for queue in queues)


@get("/")
async def overview(request: AnyRequest) -> Response[bytes]:
    """See the whole queue at a glance."""
    identity = await enter(request)
    reads = reads_of(api_of(request))
    (queues, workers, alerts, running), (dead, pace, rates, history) = await asyncio.gather(
        asyncio.gather(reads.queues(), reads.workers(), reads.alerts(), reads.running()),
        asyncio.gather(reads.dead_letters(), reads.pace(), reads.rates(), reads.history()),
    )
    live = [one for one in workers if one["live"]]
    slots = sum(one["concurrency"] for one in live)
    busy = sum(one["utilization"] * one["concurrency"] for one in live)
    processed = pace["processed"]
    return html(
        request,
        "overview.html",
        identity,
        needs=attention(alerts, queues, workers),
        raised={one["alert"] for one in alerts},
        queues=sorted(queues, key=lambda one: (-one.depth.pending, one.name))[:20],
        more_queues=max(len(queues) - 20, 0),
        by_priority=by_priority,
        pending=_sum(queues, "pending"),
        scheduled=_sum(queues, "submitted"),
        processing=_sum(queues, "processing"),
        retrying=_sum(queues, "failed"),
        soft_limit=sum(one.soft_limit for one in queues) or 50_000,
        oldest=max((one.oldest_pending_seconds or 0.0 for one in queues), default=0.0),
        dead=dead,
        dead_most=DEAD_LETTERS_COUNTED,
        rates=rates,
        history=history,
        history_minutes=round(HISTORY_OVER / 60),
        processed=processed,
        failed=pace["failed"],
        failure_rate=pace["failed"] / processed if processed else 0.0,
        p50=quantile(pace["durations"], 0.5),
        p99=quantile(pace["durations"], 0.99),
        live=live,
        slots=slots,
        busy=busy / slots if slots else 0.0,
        running=sorted(running, key=lambda one: one["started_at"] or "")[:8],
        workers_named={one["worker_id"]: one["name"] for one in workers},
    )


@get("/jobs")
async def jobs(request: AnyRequest) -> Response[bytes]:
    """List jobs, the newest first."""
    identity = await enter(request)
    filters = Filters.read(read_query(request))
    return await _list(request, identity, filters, "jobs.html")


@get("/dead-letters")
async def dead_letters(request: AnyRequest) -> Response[bytes]:
    """List the jobs that need a human."""
    identity = await enter(request)
    filters = Filters.read(read_query(request))
    filters.statuses = ["dead_letter"]
    return await _list(request, identity, filters, "dead_letters.html", with_errors=True)


async def _list(
    request: AnyRequest, identity: Any, filters: Filters, template: str, *, with_errors: bool = False
) -> Response[bytes]:
    api = api_of(request)
    reads = reads_of(api)
    page, queues, dead, finished, names = await asyncio.gather(
        job_page(
            Reading(api),
            statuses=filters.statuses or None,
            queue=filters.queue or None,
            job_type=filters.job_type or None,
            producer_id=filters.producer or None,
            search=filters.search or None,
            cursor=filters.cursor,
            limit=_PER_PAGE,
            with_errors=with_errors,
        ),
        reads.queues(),
        reads.dead_letters(),
        reads.finished(),
        reads.names(),
    )
    counts = {name: f"{_sum(queues, name):,}" for name in ("pending", "submitted", "processing", "failed")}
    counts["dead_letter"] = f"{min(dead, DEAD_LETTERS_COUNTED):,}" + ("+" if dead > DEAD_LETTERS_COUNTED else "")
    counts |= {name: f"~{finished[name]:,.0f}" if finished[name] else "" for name in ("completed", "cancelled")}
    return html(
        request,
        template,
        identity,
        filters=filters,
        items=page.items,
        following=page.next_cursor,
        looked_at=looked_through(filters.statuses).at_most,
        counts=counts,
        statuses=_STATUSES,
        dead=dead,
        names=names,
        queue_names=sorted({*names["queues"], *(one.name for one in queues)}),
        attempts_of=timeline.attempts_of,
        here=_here(request),
        ran=_ran,
    )


def _ran(job: JobView) -> float | None:
    """Return how long the last attempt took, or takes."""
    if job.started_at is None or job.status in ("pending", "submitted"):
        return None
    until = job.finished_at or (datetime.now(UTC) if job.status == "processing" else job.updated_at)
    return max((until - job.started_at).total_seconds(), 0.0)


def _here(request: AnyRequest) -> str:
    query = request.scope["query_string"].decode("latin-1")
    return asked_path(request.scope) + (f"?{query}" if query else "")


@get("/jobs/{job_id:str}")
async def job(request: AnyRequest, job_id: FromPath[str]) -> Response[bytes]:
    """See all about a job."""
    identity = await enter(request)
    try:
        known = UUID(job_id)
    except ValueError:
        raise NotFound(f"{job_id[:60]!r} is no job's id") from None
    api = api_of(request)
    view, why, workers = await asyncio.gather(
        job_view(api, known), Reading(api).call(calls.WHY, job_id=known), reads_of(api).workers()
    )
    attempts = timeline.attempts_of(view)
    steps = timeline.steps_of(view, attempts)
    worker = next((one for one in workers if one["worker_id"] == str(view.worker_id)), None)
    return html(
        request,
        "job.html",
        identity,
        job=view,
        why=why,
        attempts=attempts,
        steps=steps,
        spans=timeline.spans_of(steps),
        ran=None if attempts and attempts[0].number == view.attempts else _ran(view),
        worker=worker,
        workers_named={one["worker_id"]: one["name"] for one in workers},
        final=view.status in FINAL_STATUSES,
        has_result=bytes(view.result) != b"null",
        has_progress=bytes(view.progress) != b"null",
        trace=_shown(view.trace_context),
        policy=_shown(view.retry_policy),
        here=_here(request),
    )


def _shown(value: Any) -> bytes | None:
    return None if not value else msgspec.json.encode(value)


@get("/failures")
async def failures(request: AnyRequest) -> Response[bytes]:
    """See failures by error and type."""
    identity = await enter(request)
    groups = await reads_of(api_of(request)).failures()
    for group in groups:
        # What the search of the list can find again: the longest part of the pattern without a gap.
        group["search"] = max(group["pattern"].split("#"), key=len).strip()[:120]
    most = max((group["jobs"] for group in groups), default=0)
    return html(
        request,
        "failures.html",
        identity,
        groups=groups,
        most=most,
        looked_at=calls_dashboard.FAILURES_LOOKED_AT,
    )


@get("/queues")
async def queues(request: AnyRequest) -> Response[bytes]:
    """See queues, and set their limits."""
    identity = await enter(request)
    reads = reads_of(api_of(request))
    found, workers = await asyncio.gather(reads.queues(), reads.workers())
    live = [one for one in workers if one["live"] and one["status"] != "draining"]
    serving = {
        queue.name: sum(1 for one in live if one["queues"] is None or queue.name in one["queues"]) for queue in found
    }
    return html(
        request,
        "queues.html",
        identity,
        queues=found[:200],
        more=max(len(found) - 200, 0),
        serving=serving,
        by_priority=by_priority,
        edited=read_query(request).one("edit"),
    )


@get("/schedules")
async def schedules(request: AnyRequest) -> Response[bytes]:
    """See schedules and when they fire next."""
    identity = await enter(request)
    found = await schedule_views(api_of(request))
    shown = found[:200]
    return html(
        request,
        "schedules.html",
        identity,
        schedules=shown,
        more=len(found) - len(shown),
        next_runs={one.name: _next_runs(one) for one in shown},
    )


def _next_runs(one: ScheduleView) -> list[datetime]:
    if not one.enabled:
        return []
    at = one.next_run_at
    try:
        cron = Cron(one.cron, one.timezone)
        times = [at or cron.next(datetime.now(UTC))]
        for _ in range(2):
            times.append(cron.next(times[-1]))
        return [time.astimezone(cron.zone) for time in times]
    except (InvalidJob, ValueError, OverflowError):
        return [at] if at else []


@get("/workers")
async def workers(request: AnyRequest) -> Response[bytes]:
    """See what runs where."""
    identity = await enter(request)
    reads = reads_of(api_of(request))
    found, running = await asyncio.gather(reads.workers(), reads.running())
    jobs_of: dict[str, list[dict[str, Any]]] = {}
    for one in running:
        jobs_of.setdefault(one["worker_id"] or "", []).append(one)
    present = [one for one in found if one["status"] != "stopped"]
    known = {one["worker_id"] for one in present}
    return html(
        request,
        "workers.html",
        identity,
        workers=sorted(present, key=lambda one: (not one["live"], one["name"]))[:300],
        stopped=sorted(
            (one for one in found if one["status"] == "stopped"), key=lambda one: one["last_heartbeat"], reverse=True
        )[:20],
        jobs_of=jobs_of,
        strays=[one for one in running if one["worker_id"] not in known][:50],
        shown_jobs=6,
    )


@get("/system")
async def system(request: AnyRequest) -> Response[bytes]:
    """See what pgqueue itself does, and what the database makes of it."""
    identity = await enter(request)
    api = api_of(request)
    (steps, tables, server, audit), (checks, horizon) = await asyncio.gather(
        asyncio.gather(
            api.call(calls_dashboard.SWEEP_STEPS),
            api.call(calls_dashboard.TABLES),
            api.call(calls_dashboard.SERVER),
            api.call(calls_dashboard.AUDIT, limit=30),
        ),
        asyncio.gather(ready_checks(api), _horizon(api)),
    )
    return html(
        request,
        "system.html",
        identity,
        steps=steps,
        tables=tables,
        most=max((one["bytes"] for one in tables), default=0),
        server=server,
        audit=audit,
        checks=checks,
        horizon=horizon,
        package=__version__,
        schema_wanted=schema.head(),
        streams=api.hub.followers,
        clock=abs(server["ahead"] - datetime.now(UTC).timestamp()),
    )


async def _horizon(api: Api) -> list[dict[str, Any]] | None:
    try:
        return cast(list[dict[str, Any]], await api.call(calls_dashboard.HORIZON))
    except DatabaseUnavailable:
        raise
    except PgqueueError:
        # Only operators and the owner may look.
        return None


ROUTES: Final[list[Any]] = [
    overview,
    jobs,
    job,
    failures,
    queues,
    schedules,
    workers,
    dead_letters,
    system,
]
