"""/leases: workers in any language, over HTTP. The verbs and their fences are those of SQL."""

import asyncio
import time
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import msgspec
from litestar.handlers import HTTPRouteHandler

from pgqueue import __version__, calls, calls_rest
from pgqueue.api.core import Api
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of, check_json, gone, read_body
from pgqueue.api.guard import identity_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.values import JobView
from pgqueue.api.values_leases import (
    Accepted,
    Claim,
    Claimed,
    Completions,
    Ended,
    EndedAttempts,
    FailedAttempts,
    HeartbeatAnswer,
    Heartbeats,
    Held,
    ProgressReports,
    Releases,
    SnoozedAttempts,
)
from pgqueue.api.watches import Poller
from pgqueue.errors import PgqueueError
from pgqueue.idling import between_looks
from pgqueue.job import PRIORITIES
from pgqueue.listener import Bell, columns, unmet
from pgqueue.wire import IntArray, JsonArray, UuidArray

_TAG: Final = "leases"
_claim: Final = msgspec.json.Decoder(Claim)
_heartbeats: Final = msgspec.json.Decoder(Heartbeats)
_completions: Final = msgspec.json.Decoder(Completions)
_failures: Final = msgspec.json.Decoder(FailedAttempts)
_releases: Final = msgspec.json.Decoder(Releases)
_snoozes: Final = msgspec.json.Decoder(SnoozedAttempts)
_progress: Final = msgspec.json.Decoder(ProgressReports)
_view: Final = msgspec.json.Decoder(JobView).decode
_encode: Final = msgspec.json.Encoder().encode
#: How often a worker over HTTP is noted as alive, in seconds.
_SIGN_EVERY: Final = 10.0


@operation(
    HttpMethod.POST,
    "/leases/claim",
    needs="operate",
    takes=Claim,
    gives={200: Gives(Claimed, "The jobs; none when there was nothing to do.")},
    tag=_TAG,
    example={"worker_id": "6b2f0c1e-3d6a-4b65-9b39-2a1d1f1b5a10", "max_jobs": 10, "wait_ms": 20000},
)
async def claim_jobs(request: AnyRequest) -> Answer:
    """Claim jobs under a lease, waiting for the first one if asked to.

    Each comes with its `attempts`: send it as `attempt` with everything that ends or renews the lease.
    """
    asked = await read_body(request, _claim)
    api = api_of(request)
    parameters = {
        "worker_id": asked.worker_id,
        "queues": asked.queues,
        "max_jobs": asked.max_jobs,
        "lease": None if asked.lease_ms is None else asked.lease_ms / 1000,
        "job_types": asked.job_types,
        "priorities": None if asked.priorities is None else sorted({_number(one) for one in asked.priorities}),
        "shards": asked.shards,
    }
    await _sign_of_life(api, asked, identity_of(request.scope).name)
    rows = await api.call(calls_rest.CLAIM_JSON, **parameters)
    if not rows and asked.wait_ms:
        async with gone(request) as left:
            jobs = await _wait_for_jobs(api, asked, parameters, left)
            if left.done() and jobs:
                # Nobody is there to run them.
                await api.call(calls.RELEASE, worker_id=asked.worker_id, started=False, **_held(jobs_held(jobs)))
                jobs = []
            return answer(Claimed(jobs))
    return answer(Claimed([_view(row) for row in rows]))


async def _wait_for_jobs(
    api: Api, asked: Claim, parameters: dict[str, Any], left: "asyncio.Task[None]"
) -> list[JobView]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    deadline = began + asked.wait_ms / 1000
    poller = Poller(asked.worker_id, asked.queues, asked.job_types)
    jobs: list[JobView] = []
    heard: list[Bell] = []
    listener: int | None = None
    writers: list[str] = []
    with api.stream_seat(), api.hub.poll(poller):
        try:
            while not jobs and not left.done():
                if api.hub.listener not in (None, listener):
                    listener = api.hub.listener
                    await api.call(
                        calls.WAIT_FOR_WORK,
                        worker_id=asked.worker_id,
                        queues=asked.queues,
                        job_types=asked.job_types,
                        channel=api.hub.wake_channel,
                        priorities=parameters["priorities"],
                        listener=listener,
                    )
                    writers = await api.call(calls.OPEN_WRITERS) or []
                elif writers and not await api.call(calls.WRITERS_OPEN, writers=writers):
                    writers = []
                heard = poller.heed()
                jobs = [_view(row) for row in await api.call(calls_rest.CLAIM_JSON, **parameters)]
                # A writer that is still open may have looked who waits before we were on the list.
                step = between_looks(loop.time() - began) if writers else api.settings.poll_interval
                seconds = min(deadline - loop.time(), step, api.settings.poll_interval)
                if jobs or seconds <= 0:
                    break
                ringing = loop.create_task(poller.bell.wait())
                both: set[asyncio.Task[Any]] = {ringing, left}
                await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                ringing.cancel()
        finally:
            # A claim with room left has looked for all that they told of; the bells of its jobs may be later than it.
            told = (heard if len(jobs) >= asked.max_jobs else []) + poller.heed()
            await _stop_waiting(api, poller, unmet(told, ((job.queue, job.job_type) for job in jobs)))
    return jobs


async def _stop_waiting(api: Api, poller: Poller, left_over: list[Bell]) -> None:
    """Leave the list, and have others woken for bells that no claim followed."""
    while True:
        bells = left_over + poller.heed()
        # Another request of the worker, which heard what this one did, is on the list by the same row.
        if api.hub.polls(poller.worker_id) > 1:
            return
        # The sweep removes who is gone.
        with suppress(PgqueueError):
            await api.call(calls.STOP_WAITING, worker_id=poller.worker_id, **columns(bells))
        left_over = []
        if not poller.bell.is_set():
            return


async def _still_alive(api: Api, worker_id: UUID) -> None:
    """Note that a worker that has claimed lives on, now and then."""
    now = time.monotonic()
    if now - api.http_workers.get(worker_id, float("-inf")) >= _SIGN_EVERY:
        api.http_workers[worker_id] = now
        await api.call(calls.WORKER_SEEN, worker_id=worker_id, status="active", jobs_processed=0, jobs_failed=0)


async def _sign_of_life(api: Api, asked: Claim, key: str | None) -> None:
    """Note that a worker lives, now and then: people want to see it, and only the living are rung."""
    now = time.monotonic()
    seen = api.http_workers
    if now - seen.get(asked.worker_id, float("-inf")) < _SIGN_EVERY:
        return
    for worker_id in [worker_id for worker_id, at in seen.items() if now - at > 6 * _SIGN_EVERY]:
        del seen[worker_id]
    await api.call(
        calls.WORKER_STARTED,
        worker_id=asked.worker_id,
        name=asked.name or key or "http",
        hostname="http",
        pid=0,
        group_name=None,
        queues=asked.queues,
        job_types=asked.job_types,
        priorities=None if asked.priorities is None else [_number(one) for one in asked.priorities],
        concurrency=asked.max_jobs,
        version=__version__,
    )
    await api.call(calls.WORKER_SEEN, worker_id=asked.worker_id, status="active", jobs_processed=0, jobs_failed=0)
    seen[asked.worker_id] = now


@operation(
    HttpMethod.POST,
    "/leases/heartbeat",
    needs="operate",
    takes=Heartbeats,
    gives={200: Gives(HeartbeatAnswer, "Which leases were lost, and which jobs are to be cancelled.")},
    tag=_TAG,
)
async def renew_leases(request: AnyRequest) -> Answer:
    """Renew leases, well before they expire."""
    asked = await read_body(request, _heartbeats)
    await _still_alive(api_of(request), asked.worker_id)
    beats = await api_of(request).call(
        calls.HEARTBEAT,
        worker_id=asked.worker_id,
        lease=None if asked.lease_ms is None else asked.lease_ms / 1000,
        **_held(asked.jobs),
    )
    told: dict[str, list[Held]] = {"lost": [], "cancel": []}
    for beat in beats:
        told[beat.reason].append(Held(_uuid(beat.job_id), beat.attempt))
    return answer(HeartbeatAnswer(**told))


@operation(
    HttpMethod.POST,
    "/leases/complete",
    needs="operate",
    takes=Completions,
    gives={200: Gives(Accepted, "Which were accepted.")},
    tag=_TAG,
)
async def complete_jobs(request: AnyRequest) -> Answer:
    """Complete attempts with their results."""
    asked = await read_body(request, _completions)
    for index, job in enumerate(asked.jobs):
        check_json(job.result, f"/jobs/{index}/result")
    accepted = await api_of(request).call(
        calls.COMPLETE,
        worker_id=asked.worker_id,
        results=JsonArray([bytes(job.result) for job in asked.jobs]),
        **_held(asked.jobs),
    )
    return answer(_accepted(asked.jobs, accepted))


@operation(
    HttpMethod.POST,
    "/leases/fail",
    needs="operate",
    takes=FailedAttempts,
    gives={200: Gives(EndedAttempts, "What became of each job.")},
    tag=_TAG,
)
async def fail_jobs(request: AnyRequest) -> Answer:
    """End attempts with errors: each job is retried by its policy, or becomes a dead letter."""
    asked = await read_body(request, _failures)
    rows = await api_of(request).call(
        calls.FAIL,
        worker_id=asked.worker_id,
        errors=JsonArray([_encode(job.error) for job in asked.jobs]),
        retryable=[job.retryable for job in asked.jobs],
        retry_in=[None if job.retry_in_ms is None else job.retry_in_ms / 1000 for job in asked.jobs],
        **_held(asked.jobs),
    )
    return answer(EndedAttempts([Ended(_uuid(job_id), status) for job_id, status in rows]))


@operation(
    HttpMethod.POST,
    "/leases/release",
    needs="operate",
    takes=Releases,
    gives={200: Gives(Accepted, "Which were given back.")},
    tag=_TAG,
)
async def release_jobs(request: AnyRequest) -> Answer:
    """Give jobs back at their old place in the queue, without charging an attempt."""
    asked = await read_body(request, _releases)
    accepted = await api_of(request).call(
        calls.RELEASE, worker_id=asked.worker_id, started=asked.started, **_held(asked.jobs)
    )
    return answer(_accepted(asked.jobs, accepted))


@operation(
    HttpMethod.POST,
    "/leases/snooze",
    needs="operate",
    takes=SnoozedAttempts,
    gives={200: Gives(EndedAttempts, "What became of each job.")},
    tag=_TAG,
)
async def snooze_jobs(request: AnyRequest) -> Answer:
    """Put attempts off by a delay, without charging them."""
    asked = await read_body(request, _snoozes)
    rows = await api_of(request).call(
        calls.SNOOZE,
        worker_id=asked.worker_id,
        delays=[job.delay_ms / 1000 for job in asked.jobs],
        **_held(asked.jobs),
    )
    return answer(EndedAttempts([Ended(_uuid(job_id), status) for job_id, status in rows]))


@operation(
    HttpMethod.POST,
    "/leases/progress",
    needs="operate",
    takes=ProgressReports,
    gives={200: Gives(Accepted, "Which were stored.")},
    tag=_TAG,
)
async def report_progress(request: AnyRequest) -> Answer:
    """Store how far running attempts are."""
    asked = await read_body(request, _progress)
    for index, job in enumerate(asked.jobs):
        check_json(job.progress, f"/jobs/{index}/progress")
    rows = await api_of(request).call(
        calls.SET_PROGRESS,
        worker_id=asked.worker_id,
        progress=JsonArray([bytes(job.progress) for job in asked.jobs]),
        **_held(asked.jobs),
    )
    return answer(_accepted(asked.jobs, [job_id for job_id, stored in rows if stored]))


def jobs_held(jobs: list[JobView]) -> list[Held]:
    """Return what a worker holds of jobs that it has just claimed."""
    return [Held(job.job_id, job.attempts) for job in jobs]


def _held(jobs: list[Any]) -> dict[str, Any]:
    return {
        "job_ids": UuidArray([job.job_id.bytes for job in jobs]),
        "attempts": IntArray([job.attempt for job in jobs]),
    }


def _accepted(asked: list[Any], accepted: list[Any]) -> Accepted:
    taken = {_uuid(job_id) for job_id in accepted}
    lost = [job.job_id for job in asked if job.job_id not in taken]
    return Accepted(sorted(taken), list(dict.fromkeys(lost)))


def _uuid(value: Any) -> UUID:
    return value if isinstance(value, UUID) else UUID(bytes=bytes(value))


def _number(priority: int | str) -> int:
    return PRIORITIES.index(priority) if isinstance(priority, str) else priority


ROUTES: Final[list[HTTPRouteHandler]] = [
    claim_jobs,
    renew_leases,
    complete_jobs,
    fail_jobs,
    release_jobs,
    snooze_jobs,
    report_progress,
]
