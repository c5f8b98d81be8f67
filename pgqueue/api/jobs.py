"""/jobs: enqueue, look, wait, cancel."""

import asyncio
import re
from collections.abc import Sequence
from datetime import UTC
from typing import Annotated, Any, Final, Literal, NamedTuple, cast
from uuid import UUID

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import HeaderParameter, PathParameter, QueryParameter
from msgspec import UNSET, Raw

from pgqueue import calls, calls_rest
from pgqueue.api.access import GIVE_A_KEY, Identity
from pgqueue.api.core import Api
from pgqueue.api.exchange import (
    Answer,
    AnyRequest,
    answer,
    answer_with_etag,
    api_of,
    check_json,
    gone,
    own_path,
    read_body,
)
from pgqueue.api.guard import identity_of
from pgqueue.api.lists import JobCursor, Limit, page_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.problems import (
    BodyTooLarge,
    Fault,
    Forbidden,
    Invalid,
    InvalidMoment,
    JobDeleted,
    KeyReused,
    RepeatedParameter,
    Unauthenticated,
)
from pgqueue.api.redaction import redact
from pgqueue.api.values import (
    FIRST_MOMENT,
    LAST_MOMENT,
    Cancelled,
    CancelOutcome,
    CancelOutcomes,
    Enqueued,
    EnqueuedBatch,
    JobIds,
    JobPage,
    JobResult,
    JobView,
    NewJob,
    NewJobs,
    Status,
    Why,
)
from pgqueue.api.watches import Watch
from pgqueue.errors import JobNotFound, KeyRefused
from pgqueue.job import FINAL_STATUSES, PRIORITIES

_TAG: Final = "jobs"
LIVE: Final = frozenset({"submitted", "pending", "processing", "failed"})
STATUSES: Final = LIVE | FINAL_STATUSES
_new_job: Final = msgspec.json.Decoder(NewJob)
_new_jobs: Final = msgspec.json.Decoder(NewJobs)
_job_ids: Final = msgspec.json.Decoder(JobIds)
_view: Final = msgspec.json.Decoder(JobView).decode
_encode: Final = msgspec.json.Encoder().encode
_EXAMPLE: Final = {"type": "send_email", "payload": {"to": "a@example.com"}, "priority": "high"}
# RFC 8941 strings are quoted; clients send bare ones too.
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\["\\])*)"')

JobId = Annotated[UUID, PathParameter(description="A job's id.")]
TextFilter = Annotated[str | None, QueryParameter(pattern=r"^[^\x00]*$", max_length=256)]
# Parameters of Python are not called as the dependencies of an app around this one may be.
QueueFilter = Annotated[str | None, QueryParameter(name="queue", pattern=r"^[^\x00]*$", max_length=256)]
TypeFilter = Annotated[str | None, QueryParameter(name="type", pattern=r"^[^\x00]*$", max_length=256)]
Wait = Annotated[float, QueryParameter(ge=0, le=60, description="Seconds to wait for the job's end.")]


@operation(
    HttpMethod.POST,
    "/jobs",
    needs="submit",
    takes=NewJob,
    gives={
        201: Gives(JobView, "The job was enqueued.", headers=("Location",)),
        200: Gives(
            JobView,
            "The idempotency key is known; this is the job that it stands for.",
            headers=("Location", "Idempotency-Replayed"),
        ),
    },
    refuses=(409,),
    tag=_TAG,
    example=_EXAMPLE,
    checks_key=True,
)
async def enqueue_job(
    request: AnyRequest,
    idempotency_key: Annotated[
        str | None,
        HeaderParameter(
            name="Idempotency-Key",
            description="The idempotency key, quoted or bare.",
            min_length=1,
            max_length=256,
            pattern=r'^(?!""$)[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$',
        ),
    ] = None,
) -> Answer:
    """Enqueue a job.

    While an idempotency key is known (24 hours, a setting of the queue), the same request answers the same job; the
    key with another job is refused with 422. Above its hard limit a queue refuses jobs with 503, above its soft limit
    jobs beyond 1,000 a second with 429, both with Retry-After.
    """
    job = await read_body(request, _new_job)
    api = api_of(request)
    if idempotency_key is not None:
        if len(set(request.headers.getall("Idempotency-Key"))) > 1:
            raise RepeatedParameter(
                "Idempotency-Key stands more than once, with different keys",
                faults=[Fault("must stand once", parameter="Idempotency-Key")],
            )
        _take_header(job, idempotency_key)
    identity = identity_of(request.scope)
    await _check_names(api, identity, [job])
    hashes = frozenset[bytes | None]() if api.config.trusted else frozenset((identity.digest,))
    try:
        row, duplicate, same = await api.submits.submit(_prepared(job, api, identity.name), hashes)
    except KeyRefused as exc:
        raise Unauthenticated(str(exc) if identity.digest else GIVE_A_KEY) from None
    if not same:
        raise KeyReused(f"idempotency_key {job.idempotency_key!r} stands for a job that is not this one")
    try:
        view = _view(row)
    except msgspec.ValidationError:
        known = msgspec.json.decode(row)["job_id"]
        raise JobDeleted("it has been deleted, and its idempotency key is still known", job_id=known) from None
    headers = {"Location": own_path(request, str(view.job_id))}
    if duplicate:
        headers["Idempotency-Replayed"] = "true"
    return answer(view, 200 if duplicate else 201, headers)


@operation(
    HttpMethod.POST,
    "/jobs/batch",
    needs="submit",
    takes=NewJobs,
    gives={201: Gives(EnqueuedBatch, "All jobs are in the queue.")},
    tag=_TAG,
    max_body=64 << 20,
    example={"jobs": [_EXAMPLE, {"type": "send_email", "payload": {"to": "b@example.com"}}]},
)
async def enqueue_jobs(request: AnyRequest) -> Answer:
    """Enqueue up to 10,000 jobs, all of them or none.

    Jobs whose idempotency key is known are answered as they are; a key that stands for another job refuses the batch.
    """
    batch = await read_body(request, _new_jobs)
    api, identity = api_of(request), identity_of(request.scope)
    await _check_names(api, identity, batch.jobs)
    prepared = []
    for index, job in enumerate(batch.jobs):
        prepared.append(_prepared(job, api, identity.name, f"/jobs/{index}"))
        if index % 500 == 499:
            # Ten thousand take a while; others must not wait for all of them.
            await asyncio.sleep(0)
    rows = await api.call(calls_rest.SUBMIT_BATCH, jobs=f"[{','.join(prepared)}]")
    duplicates = sum(duplicate for _, _, duplicate in rows)
    jobs = [Enqueued(job_id, cast(Status, status), duplicate) for job_id, status, duplicate in rows]
    return answer(EnqueuedBatch(jobs, len(jobs) - duplicates, duplicates), 201)


@operation(HttpMethod.GET, "/jobs", needs="read", gives={200: Gives(JobPage, "A page of jobs.")}, tag=_TAG)
async def list_jobs(
    request: AnyRequest,
    status: Annotated[list[Status] | None, QueryParameter(description="Only these; may stand several times.")] = None,
    queue_name: QueueFilter = None,
    job_type: TypeFilter = None,
    producer: TextFilter = None,
    q: Annotated[
        str | None,
        QueryParameter(
            description="Text in ids, names, keys, errors or payloads.", pattern=r"^[^\x00]*$", max_length=256
        ),
    ] = None,
    cursor: JobCursor = None,
    limit: Limit = 50,
) -> Answer:
    """List jobs, the newest first.

    Values of payloads under keys such as `password` are not shown, and payloads above 16 KiB are left out; a job asked
    for alone has all of it. A page with filters looks at so many jobs at most: it may be short or empty though more
    match, and `next_cursor` leads on; the list is at its end when that is null.
    """
    return answer(
        await job_page(
            api_of(request),
            statuses=list(dict.fromkeys(status)) if status else None,
            queue=queue_name,
            job_type=job_type,
            producer_id=producer,
            search=q or None,
            cursor=cursor,
            limit=limit,
        )
    )


class Look(NamedTuple):
    """Which statuses a page wants, those of the jobs that are looked at for it, and how many these are at most."""

    wanted: set[str]
    parts: set[str]
    at_most: int


def looked_through(statuses: list[Any] | None) -> Look:
    """Return what is looked at for a page of these statuses."""
    wanted = set(statuses or STATUSES)
    # Live jobs share a partition, which is walked whatever their status is.
    parts = wanted | LIVE if wanted & LIVE else wanted
    return Look(wanted, parts, calls_rest.LOOKED_AT_LIVE if parts != wanted else calls_rest.LOOKED_AT)


async def job_page(
    api: Api,
    *,
    statuses: list[Any] | None = None,
    queue: str | None = None,
    job_type: str | None = None,
    producer_id: str | None = None,
    search: str | None = None,
    cursor: UUID | None = None,
    limit: int = 50,
    with_errors: bool = False,
) -> JobPage:
    """Return a page of jobs, redacted. Only so many jobs are looked at for it, so that it may be short."""
    look = looked_through(statuses)
    chosen: dict[str, object] = {
        "parts": sorted(look.parts),
        "before": cursor or UUID(int=2**128 - 1),
        "looked_at": look.at_most,
    }
    rows = await api.call(
        calls_rest.LIST_JOBS,
        **chosen,
        statuses=sorted(look.wanted),
        queue=queue,
        job_type=job_type,
        producer_id=producer_id,
        search=search,
        limit=limit + 1,
        with_errors=with_errors,
    )
    items = [_view(row) for row in rows]
    for item in items:
        item.payload = redact(item.payload, api.config.secrets)
    items, following = page_of(items, limit, lambda item: item.job_id)
    if following is None and (
        look.parts != look.wanted or any(value is not None for value in (queue, job_type, producer_id, search))
    ):
        last = await api.call(calls_rest.LAST_LOOKED_AT, **chosen)
        following = None if last is None else UUID(last)
    return JobPage(items, following)


@operation(
    HttpMethod.GET,
    "/jobs/{job_id:uuid}",
    needs="read",
    gives={200: Gives(JobView, "The job.", headers=("ETag",)), 304: Gives(None, "Nothing has changed.")},
    refuses=(404,),
    tag=_TAG,
)
async def get_job(request: AnyRequest, job_id: JobId) -> Answer:
    """Look a job up, wherever it is."""
    return answer_with_etag(request, await job_view(api_of(request), job_id))


async def job_view(api: Api, job_id: UUID) -> JobView:
    """Return a job; raises JobNotFound."""
    row = await api.call(calls_rest.JOB_JSON, job_id=job_id)
    if row is None:
        raise JobNotFound(f"there is no job {job_id}; it never was, or its time to live has passed")
    return _view(row)


@operation(
    HttpMethod.GET,
    "/jobs/{job_id:uuid}/result",
    needs="read",
    gives={
        200: Gives(JobResult, "The job has ended, and so."),
        202: Gives(JobResult, "The job has not ended yet."),
    },
    refuses=(404,),
    tag=_TAG,
)
async def get_result(request: AnyRequest, job_id: JobId, wait: Wait = 0.0) -> Answer:
    """See how a job ended, waiting up to `wait` seconds for it."""
    api = api_of(request)
    view = await (wait_for_end(api, job_id, wait, request) if wait > 0 else job_view(api, job_id))
    ran = (view.finished_at or view.updated_at) - view.started_at if view.started_at else None
    result = JobResult(
        job_id=view.job_id,
        status=view.status,
        result=view.result,
        error=view.error,
        attempts=view.attempts,
        duration_ms=round(ran.total_seconds() * 1000) if ran is not None and view.finished_at else None,
        worker_id=view.worker_id,
        completed_at=view.finished_at,
    )
    return answer(result, 200 if view.status in FINAL_STATUSES else 202)


async def wait_for_end(api: Api, job_id: UUID, wait: float, request: AnyRequest) -> JobView:
    """Return a job as it is at its end, or after `wait` seconds, or when the client has gone."""
    view = await job_view(api, job_id)
    if view.status in FINAL_STATUSES:
        return view
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    with api.stream_seat(), api.hub.follow(job_id=job_id) as watch:
        async with gone(request) as left:
            await api.hub.watching()
            view = await job_view(api, job_id)
            while view.status not in FINAL_STATUSES and not left.done():
                seconds = deadline - loop.time()
                if seconds <= 0 or watch.closed:
                    break
                if await watch.wait(min(seconds, 1.0)) and _worth_a_look(watch):
                    view = await job_view(api, job_id)
    return view


def _worth_a_look(watch: Watch) -> bool:
    ended: bool = watch.lagging or watch.closed
    watch.lagging = False
    for _, event in watch.take():
        ended = ended or event.final or event.event == "job.gone"
    return ended


@operation(
    HttpMethod.GET,
    "/jobs/{job_id:uuid}/why",
    needs="read",
    gives={200: Gives(Why, "One sentence.")},
    refuses=(404,),
    tag=_TAG,
)
async def why_not(request: AnyRequest, job_id: JobId) -> Answer:
    """Ask why a job is not running now."""
    api = api_of(request)
    await job_view(api, job_id)
    return answer(Why(job_id, await api.call(calls.WHY, job_id=job_id)))


async def _cancel(request: AnyRequest, job_id: UUID) -> Answer:
    api, identity = api_of(request), identity_of(request.scope)
    if "operate" not in identity.scopes and (await job_view(api, job_id)).producer_id != identity.name:
        raise Forbidden("this key may cancel only jobs of its own", required_scope="operate")
    outcome = await api.act(identity, calls.CANCEL, job_id=job_id)
    return answer(Cancelled(job_id, cast(Literal["cancelled", "cancel_requested"], outcome)))


_CANCELS: Final = {200: Gives(Cancelled, "The job is cancelled, or runs and was asked to stop.")}


@operation(
    HttpMethod.POST,
    "/jobs/{job_id:uuid}/cancel",
    needs="submit",
    or_needs="operate",
    gives=_CANCELS,
    refuses=(404, 409),
    tag=_TAG,
)
async def cancel_job(request: AnyRequest, job_id: JobId) -> Answer:
    """Cancel a job.

    One that waits is cancelled at once; one that runs is asked to stop and ends as cancelled. A job that has ended
    otherwise is past cancelling (409). A key without the scope operate cancels only jobs of its own.
    """
    return await _cancel(request, job_id)


@operation(
    HttpMethod.DELETE,
    "/jobs/{job_id:uuid}",
    needs="submit",
    or_needs="operate",
    gives=_CANCELS,
    refuses=(404, 409),
    tag=_TAG,
)
async def delete_job(request: AnyRequest, job_id: JobId) -> Answer:
    """Cancel a job, as POST …/cancel does. Its row stays until its time to live has passed."""
    return await _cancel(request, job_id)


@operation(
    HttpMethod.POST,
    "/admin/jobs/cancel",
    needs="operate",
    takes=JobIds,
    gives={200: Gives(CancelOutcomes, "What became of each job.")},
    tag=_TAG,
)
async def cancel_jobs(request: AnyRequest) -> Answer:
    """Cancel up to 10,000 jobs."""
    asked = await read_body(request, _job_ids)
    ids = [str(job_id) for job_id in dict.fromkeys(asked.job_ids)]
    outcomes = await api_of(request).act(identity_of(request.scope), calls.CANCEL_MANY, job_ids=ids)
    return answer(CancelOutcomes([CancelOutcome(job_id, cast(Any, outcome)) for job_id, outcome in outcomes.items()]))


# Parts ----------------------------------------------------------------------------------------------------------------


def _take_header(job: NewJob, header: str) -> None:
    quoted = _QUOTED.fullmatch(header)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else header
    if not 1 <= len(key) <= 256:
        raise Invalid(
            "Idempotency-Key must have 1 to 256 characters",
            faults=[Fault("must have 1 to 256 characters", parameter="Idempotency-Key")],
        )
    if job.idempotency_key not in (None, key):
        raise Invalid(
            "the header Idempotency-Key and idempotency_key differ",
            faults=[Fault("differs from the header Idempotency-Key", pointer="/idempotency_key")],
        )
    job.idempotency_key = key


async def _check_names(api: Api, identity: Identity, jobs: Sequence[NewJob]) -> None:
    """Raise Forbidden where a producer gives the name of another key: whose jobs, and idempotency keys, are its own."""
    names = {job.producer_id for job in jobs if job.producer_id is not None} - {identity.name}
    if not names or identity.name is None or "operate" in identity.scopes:
        return
    if taken := await api.call(calls_rest.KEY_NAMES, names=sorted(names)):
        raise Forbidden(f"producer_id {taken[0]!r} is the name of another key", required_scope="operate")


def _prepared(job: NewJob, api: Api, producer: str | None, where: str = "") -> str:
    """Return a job as SQL takes it; raises Invalid, BodyTooLarge."""
    if (job.type is UNSET) == (job.job_type is UNSET):
        raise Invalid("give type", faults=[Fault("give type, or job_type, once", pointer=f"{where}/type")])
    if job.scheduled_at is not None and job.delay_ms is not None:
        raise Invalid(
            "give scheduled_at or delay_ms, not both",
            faults=[Fault("stands beside scheduled_at", pointer=f"{where}/delay_ms")],
        )
    for name in ("scheduled_at", "expires_at"):
        moment = getattr(job, name)
        if moment is not None and not FIRST_MOMENT <= moment < LAST_MOMENT:
            rule = "must lie between the years 1 and 9998"
            raise InvalidMoment(f"{name} {rule}", faults=[Fault(rule, pointer=f"{where}/{name}")])
        if moment is not None:
            # PostgreSQL reads offsets up to 15:59 only.
            setattr(job, name, moment.astimezone(UTC))
    payload = bytes(job.payload)
    if len(payload) > api.config.max_payload:
        raise BodyTooLarge(f"{where[1:]} payload has {len(payload)} bytes".strip(), limit_bytes=api.config.max_payload)
    check_json(job.payload, f"{where}/payload")
    if isinstance(job.priority, str):
        job.priority = PRIORITIES.index(job.priority)
    if job.producer_id is None:
        job.producer_id = producer
    if job.type is not UNSET:
        job.job_type, job.type = job.type, UNSET
    job.payload = Raw(payload)
    return _encode(job).decode()


ROUTES: Final[list[HTTPRouteHandler]] = [
    enqueue_job,
    enqueue_jobs,
    list_jobs,
    get_job,
    get_result,
    why_not,
    cancel_job,
    delete_job,
    cancel_jobs,
]
