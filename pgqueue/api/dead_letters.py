"""/admin/dlq and /admin/jobs/{id}/retry: dead letters, the jobs that need a human."""

from typing import Annotated, Any, Final

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from msgspec import Meta, Raw

from pgqueue import calls
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of, moment_of, moment_parameter, refuse_body
from pgqueue.api.guard import identity_of
from pgqueue.api.jobs import JobId, QueueFilter, TextFilter, TypeFilter, job_page, job_view
from pgqueue.api.lists import JobCursor
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.values import JobPage, JobView, Moved
from pgqueue.calling import Call

_TAG: Final = "dead letters"
_ERRORS_SHOWN: Final = 5
_TEXT_SHOWN: Final = 4000
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode

_FILTER: Final = r"^(job_type|type|queue):[^\x00]{1,128}$"
Filter = Annotated[
    list[Annotated[str, Meta(pattern=_FILTER)]] | None,
    QueryParameter(
        name="filter",
        description="`job_type:NAME` or `queue:NAME`; may stand several times.",
        schema_extra={"items": {"type": "string", "pattern": _FILTER}},
    ),
]
Since = Annotated[str | None, moment_parameter("That died at this moment or later.")]
Until = Annotated[str | None, moment_parameter("That died before this moment.")]
MaxJobs = Annotated[int | None, QueryParameter(ge=1, le=2**31 - 1, description="So many at most, the oldest first.")]


@operation(
    HttpMethod.POST,
    "/admin/jobs/{job_id:uuid}/retry",
    needs="operate",
    gives={200: Gives(JobView, "The job, pending again.")},
    refuses=(404, 409),
    tag=_TAG,
)
async def retry_job(request: AnyRequest, job_id: JobId) -> Answer:
    """Retry a dead letter, or a failed job that waits for its next attempt, now.

    It gets fresh attempts. A job in any other status is left alone (409).
    """
    api = api_of(request)
    await api.act(identity_of(request.scope), calls.RETRY, job_id=str(job_id))
    return answer(await job_view(api, job_id))


@operation(
    HttpMethod.DELETE,
    "/admin/dlq/{job_id:uuid}",
    needs="operate",
    gives={200: Gives(Moved, "It is gone.")},
    refuses=(404, 409),
    tag=_TAG,
)
async def discard_job(request: AnyRequest, job_id: JobId) -> Answer:
    """Delete a dead letter for good."""
    await api_of(request).act(identity_of(request.scope), calls.DISCARD, job_id=str(job_id))
    return answer(Moved(1))


@operation(HttpMethod.GET, "/admin/dlq", needs="read", gives={200: Gives(JobPage, "A page of dead letters.")}, tag=_TAG)
async def list_dead_letters(
    request: AnyRequest,
    queue_name: QueueFilter = None,
    job_type: TypeFilter = None,
    producer: TextFilter = None,
    q: TextFilter = None,
    cursor: JobCursor = None,
    limit: Annotated[int, QueryParameter(ge=1, le=200)] = 50,
) -> Answer:
    """List dead letters with the errors of their last attempts, the newest jobs first."""
    page = await job_page(
        api_of(request),
        statuses=["dead_letter"],
        queue=queue_name,
        job_type=job_type,
        producer_id=producer,
        search=q or None,
        cursor=cursor,
        limit=limit,
        with_errors=True,
    )
    for item in page.items:
        item.errors = _shortened(item.errors)
    return answer(page)


@operation(
    HttpMethod.POST,
    "/admin/dlq/retry-all",
    needs="operate",
    gives={200: Gives(Moved, "How many were moved.")},
    tag=_TAG,
)
async def retry_dead_letters(
    request: AnyRequest,
    filters: Filter = None,
    queue_name: QueueFilter = None,
    job_type: TypeFilter = None,
    since: Since = None,
    until: Until = None,
    max_jobs: MaxJobs = None,
) -> Answer:
    """Retry all dead letters, or those that match every filter."""
    chosen = _chosen(filters, queue_name, job_type, since, until, max_jobs)
    await refuse_body(request, "filters")
    return await _on_many(request, calls.RETRY_DEAD_LETTERS, chosen)


@operation(
    HttpMethod.POST,
    "/admin/dlq/discard-all",
    needs="operate",
    gives={200: Gives(Moved, "How many were deleted.")},
    tag=_TAG,
)
async def discard_dead_letters(
    request: AnyRequest,
    filters: Filter = None,
    queue_name: QueueFilter = None,
    job_type: TypeFilter = None,
    since: Since = None,
    until: Until = None,
    max_jobs: MaxJobs = None,
) -> Answer:
    """Delete all dead letters, or those that match every filter, for good. It is written to the audit."""
    chosen = _chosen(filters, queue_name, job_type, since, until, max_jobs)
    await refuse_body(request, "filters")
    return await _on_many(request, calls.DISCARD_DEAD_LETTERS, chosen)


async def _on_many(request: AnyRequest, call: Call[int], chosen: dict[str, object] | None) -> Answer:
    if chosen is None:
        return answer(Moved(0))
    return answer(Moved(await api_of(request).act(identity_of(request.scope), call, **chosen)))


def _chosen(
    filters: list[str] | None,
    queue: str | None,
    job_type: str | None,
    since: str | None,
    until: str | None,
    max_jobs: int | None,
) -> dict[str, object] | None:
    """Return the parameters of a verb on many; None when filters contradict each other, so that nothing can match."""
    chosen: dict[str, object] = {
        "queue": queue,
        "job_type": job_type,
        "since": moment_of(since, "since"),
        "until": moment_of(until, "until"),
        "max_jobs": max_jobs,
    }
    for one in filters or []:
        name, _, value = one.partition(":")
        name = "job_type" if name == "type" else name
        if chosen[name] not in (None, value):
            return None
        chosen[name] = value
    return chosen


def _shortened(errors: Raw) -> Raw:
    """Return the newest records with their long texts cut; a job asked for alone has all of them."""
    records = _decode(errors)[-_ERRORS_SHOWN:]
    return Raw(_encode([{key: _cut(value) for key, value in record.items()} for record in records]))


def _cut(value: Any) -> Any:
    return value[:_TEXT_SHOWN] + "…" if isinstance(value, str) and len(value) > _TEXT_SHOWN else value


ROUTES: Final[list[HTTPRouteHandler]] = [
    retry_job,
    discard_job,
    list_dead_letters,
    retry_dead_letters,
    discard_dead_letters,
]
