"""The SQL calls of producers, workers and operators, as data; see calling.py for what runs them."""

import gc
import re
from collections.abc import Mapping
from functools import partial
from itertools import repeat, starmap
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import msgspec

from pgqueue.calling import Call, Rows, column, nothing, records, scalar, tuples
from pgqueue.errors import ConfigError
from pgqueue.job import ClaimedJob, EnqueuedJob, JobRow


def _claimed(rows: Rows) -> list[ClaimedJob]:
    return list(starmap(ClaimedJob, rows))


def _completed_and_claimed(rows: Rows) -> tuple[list[bytes], list[ClaimedJob]]:
    return rows[0][0], [ClaimedJob(*row[1:]) for row in rows if row[1] is not None]


def _uuid(value: Any) -> UUID:
    """Return an id as a UUID: drivers, and our connections that read raw, give bytes, text or a class of their own."""
    if isinstance(value, UUID):
        return UUID(int=value.int)
    return UUID(bytes=value) if isinstance(value, bytes) else UUID(value)


def enqueued(rows: Rows) -> list[EnqueuedJob]:
    """Read what an enqueue answers for each job."""
    return [EnqueuedJob(one if type(one) is UUID else _uuid(one), status, known) for one, status, known in rows]


_read_ids: Final = msgspec.json.Decoder(list[UUID]).decode


def _enqueued_many(rows: Rows) -> list[EnqueuedJob]:
    ids, statuses, duplicates = rows[0]
    # Past the constructor of the named tuple, which is as slow as all the rest.
    made = partial(cast(Any, tuple.__new__), EnqueuedJob)
    collects = gc.isenabled()
    # None of what is made can be garbage yet; until Python 3.12 the collector looks through it again and again.
    gc.disable()
    try:
        said = zip(_read_ids(ids or "[]"), statuses or repeat("pending"), duplicates or repeat(False), strict=False)
        return list(map(made, said))
    finally:
        if collects:
            gc.enable()


_read_job: Final = msgspec.json.Decoder(JobRow).decode


def _jobs(rows: Rows) -> list[JobRow]:
    return [_read_job(row[0]) for row in rows]


def _job(rows: Rows) -> JobRow | None:
    return _read_job(rows[0][0]) if rows else None


class Beat(NamedTuple):
    """What a heartbeat says of one job: "lost", or "cancel" (requested; the lease is renewed all the same)."""

    job_id: bytes
    attempt: int
    reason: str


class Sample(NamedTuple):
    """One metric: its name, kind (gauge, counter, histogram), labels and value."""

    name: str
    kind: str
    labels: dict[str, str]
    value: float


def _samples(rows: Rows) -> list[Sample]:
    return [Sample(name, kind, msgspec.json.decode(labels), value) for name, kind, labels, value in rows]


class WorkerLoad(NamedTuple):
    """What scaling goes by. utilization is a part of 1; processing_seconds the mean of attempts of the last minute."""

    pending: int
    workers: int
    slots: int
    running: int
    utilization: float
    processing_seconds: float
    soft_limit: int


def _beats(rows: Rows) -> list[Beat]:
    return [Beat(*row) for row in rows]


# Producers ------------------------------------------------------------------------------------------------------------

ENQUEUE: Final = Call(
    "enqueue",
    """select job_id, status, duplicate from pgqueue.enqueue(
         job_type => %(job_type)s::text, payload => %(payload)s::jsonb, queue => %(queue)s::text,
         priority => %(priority)s::int, scheduled_at => %(scheduled_at)s::timestamptz, delay => %(delay)s::interval,
         idempotency_key => %(idempotency_key)s::text, max_retries => %(max_retries)s::int,
         retry_policy => %(retry_policy)s::jsonb, timeout_ms => %(timeout_ms)s::int,
         expires_at => %(expires_at)s::timestamptz, producer_id => %(producer_id)s::text,
         ordering_key => %(ordering_key)s::text, trace_context => %(trace_context)s::jsonb,
         job_id => %(job_id)s::uuid)""",
    lambda rows: enqueued(rows)[0],
    hot=True,
)
ENQUEUE_MANY: Final = Call(
    "enqueue_many",
    """select array_to_json(ids)::text, statuses, duplicates from pgqueue.enqueue_rows(
         job_types => %(job_types)s::text[], payloads => %(payloads)s::jsonb[], queues => %(queues)s::text[],
         priorities => %(priorities)s::int[], scheduled_at => %(scheduled_at)s::timestamptz[],
         delays_ms => %(delays_ms)s::bigint[], idempotency_keys => %(idempotency_keys)s::text[],
         max_retries => %(max_retries)s::int[], retry_policies => %(retry_policies)s::text[]::jsonb[],
         timeouts_ms => %(timeouts_ms)s::int[], expires_at => %(expires_at)s::timestamptz[],
         producer_ids => %(producer_ids)s::text[], ordering_keys => %(ordering_keys)s::text[],
         trace_contexts => %(trace_contexts)s::text[]::jsonb[], job_ids => %(job_ids)s::text[]::uuid[])""",
    _enqueued_many,
    times=lambda parameters: max(1.0, len(parameters["job_types"]) / 10_000),
)
JOB: Final = Call("job", "select row_to_json(j)::text from pgqueue.job(%(job_id)s::uuid) j", _job, hot=True)
WHY: Final = Call("why", "select pgqueue.why(%(job_id)s::uuid)", scalar)

# Workers --------------------------------------------------------------------------------------------------------------

_PLAIN: Final = {"payload": "payload::text", "trace_context": "trace_context::text"}
_COLUMNS: Final = ", ".join(_PLAIN.get(column, column) for column in ClaimedJob.__struct_fields__)

CLAIM: Final = Call(
    "claim",
    f"""select {_COLUMNS}
          from pgqueue.claim(%(worker_id)s::uuid, %(queues)s::text[], %(max_jobs)s::int,
                             make_interval(secs => %(lease)s::float8), %(job_types)s::text[],
                             %(priorities)s::smallint[], %(shards)s::smallint[])""",  # noqa: S608
    _claimed,
    hot=True,
)
HEARTBEAT: Final = Call(
    "heartbeat",
    """select job_id, attempt, reason
         from pgqueue.heartbeat(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[],
                                make_interval(secs => %(lease)s::float8))""",
    _beats,
    hot=True,
)


def _times_of_results(parameters: Mapping[str, Any]) -> float:
    return 1.0 + sum(map(len, filter(None, parameters["results"]))) / (8 << 20)


COMPLETE: Final = Call(
    "complete",
    """select pgqueue.complete(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[],
                               %(results)s::jsonb[])""",
    column,
    hot=True,
    times=_times_of_results,
)
#: What became of a job in the transaction that completed it: cancelled, if that was requested before.
BECAME: Final = Call("became", "select status from pgqueue.job(%(job_id)s::uuid)", scalar, hot=True)
#: The claim is made of what the completion set free, such as the next jobs of ordering keys, and commits with it.
COMPLETE_AND_CLAIM: Final = Call(
    "complete_and_claim",
    f"""select r.accepted, {_COLUMNS}
          from pgqueue.complete_and_claim(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[],
                 %(results)s::jsonb[], %(queues)s::text[], %(max_jobs)s::int, make_interval(secs => %(lease)s::float8),
                 %(job_types)s::text[], %(priorities)s::smallint[], %(shards)s::smallint[]) r
         cross join lateral (select (r.claimed).*) c""",  # noqa: S608
    _completed_and_claimed,
    hot=True,
    times=_times_of_results,
)
FAIL: Final = Call(
    "fail",
    """select f.job_id, pgqueue.fail(%(worker_id)s::uuid, f.job_id, f.attempt, f.error, f.retryable,
                                     make_interval(secs => f.retry_in))
         from unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(errors)s::jsonb[], %(retryable)s::boolean[],
                     %(retry_in)s::float8[]) as f(job_id, attempt, error, retryable, retry_in)
        order by f.job_id""",
    tuples,
    hot=True,
)
SNOOZE: Final = Call(
    "snooze",
    """select s.job_id, pgqueue.snooze(%(worker_id)s::uuid, s.job_id, s.attempt, make_interval(secs => s.delay))
         from unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(delays)s::float8[]) as s(job_id, attempt, delay)
        order by s.job_id""",
    tuples,
    hot=True,
)
RATE_LIMIT: Final = Call(
    "rate_limit",
    """select r.job_id, pgqueue.rate_limit(%(worker_id)s::uuid, r.job_id, r.attempt, make_interval(secs => r.delay))
         from unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(delays)s::float8[]) as r(job_id, attempt, delay)
        order by r.job_id""",
    tuples,
)
RELEASE: Final = Call(
    "release",
    "select pgqueue.release(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[], %(started)s::boolean)",
    column,
)
CANCEL_ATTEMPT: Final = Call(
    "cancel_attempt",
    """select c.job_id, pgqueue.cancel_attempt(%(worker_id)s::uuid, c.job_id, c.attempt, c.error)
         from unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(errors)s::jsonb[]) as c(job_id, attempt, error)
        order by c.job_id""",
    tuples,
)
SET_PROGRESS: Final = Call(
    "set_progress",
    """select p.job_id, pgqueue.set_progress(%(worker_id)s::uuid, p.job_id, p.attempt, p.progress)
         from unnest(%(job_ids)s::uuid[], %(attempts)s::int[], %(progress)s::jsonb[]) as p(job_id, attempt, progress)
        order by p.job_id""",
    tuples,
)
CANCEL_REQUESTS: Final = Call(
    "cancel_requests",
    """select job_id from pgqueue.jobs
        where job_id = any (%(job_ids)s::uuid[]) and status = 'processing' and cancel_requested_at is not null""",
    column,
)
WORKER_STARTED: Final = Call(
    "worker_started",
    """select pgqueue.worker_started(%(worker_id)s::uuid, %(name)s::text, %(hostname)s::text, %(pid)s::int,
         %(group_name)s::text, %(queues)s::text[], %(job_types)s::text[], %(priorities)s::smallint[],
         %(concurrency)s::int, %(version)s::text)""",
    nothing,
)
WORKER_SEEN: Final = Call(
    "worker_seen",
    """select pgqueue.worker_seen(%(worker_id)s::uuid, %(status)s::text, %(jobs_processed)s::bigint,
                                  %(jobs_failed)s::bigint),
              (select json_object_agg(q.name, q.timeout_ms) from pgqueue.queues q where q.timeout_ms <> 900000),
              (select count(*)
                 from pgqueue.workers me
                 join pgqueue.live_workers w on w.queues is not distinct from me.queues
                  and w.job_types is not distinct from me.job_types and w.priorities is not distinct from me.priorities
                where me.worker_id = %(worker_id)s::uuid)""",
    lambda rows: cast(tuple[bool, dict[str, int] | None, int], tuple(rows[0])),
    hot=True,
)
GROUP_MEMBERS: Final = Call(
    "group_members",
    """select w.worker_id::text
         from pgqueue.workers me
         join pgqueue.workers w on w.group_name = me.group_name
          and w.queues is not distinct from me.queues and w.job_types is not distinct from me.job_types
          and w.priorities is not distinct from me.priorities
        where me.worker_id = %(worker_id)s::uuid and w.status in ('starting', 'active', 'idle')
          and w.last_heartbeat > pgqueue.clock() - make_interval(secs => %(missed)s::float8)
        order by w.worker_id""",
    lambda rows: [UUID(row[0]) for row in rows],
)
INDEX_SHARDS: Final = Call("index_shards", "select pgqueue.index_shards()", scalar)
ADD_COUNTS: Final = Call(
    "add_counts",
    """select pgqueue.add_counts(%(worker_id)s::uuid, %(batch)s::bigint, %(utilization)s::float8, %(counts)s::jsonb)""",
    scalar,
)
WORKER_STOPPED: Final = Call("worker_stopped", "select pgqueue.worker_stopped(%(worker_id)s::uuid)", nothing)
WAIT_FOR_WORK: Final = Call(
    "wait_for_work",
    """select pgqueue.wait_for_work(%(worker_id)s::uuid, %(queues)s::text[], %(job_types)s::text[],
                                    %(channel)s::text, %(priorities)s::smallint[], %(listener)s::int)""",
    nothing,
)
OPEN_WRITERS: Final = Call("open_writers", "select pgqueue.open_writers()", scalar)
WRITERS_OPEN: Final = Call("writers_open", "select pgqueue.writers_open(%(writers)s::text[])", scalar)
STOP_WAITING: Final = Call(
    "stop_waiting",
    "select pgqueue.stop_waiting(%(worker_id)s::uuid, %(queues)s::text[], %(job_types)s::text[])",
    nothing,
)
SWEEP: Final = Call("sweep", "select step, jobs from pgqueue.sweep()", tuples)
MEASURE: Final = Call("measure", "select step, jobs from pgqueue.sweep('measure')", tuples)
EVALUATE_ALERTS: Final = Call("evaluate_alerts", "select step, jobs from pgqueue.sweep('alerts')", tuples)
ALERT_EVENTS: Final = Call(
    "alert_events",
    """select row_to_json(e)::text from pgqueue.alert_events e
        where e.event_id > %(after)s::bigint and e.pid = pg_backend_pid() order by e.event_id""",
    records,
)

# Operators ------------------------------------------------------------------------------------------------------------

CANCEL: Final = Call("cancel", "select pgqueue.cancel(%(job_id)s::uuid)", scalar)
CANCEL_MANY: Final = Call(
    "cancel_many",
    "select job_id::text, outcome from pgqueue.cancel_many(%(job_ids)s::text[]::uuid[])",
    lambda rows: {UUID(row[0]): cast(str, row[1]) for row in rows},
)
RETRY: Final = Call("retry", "select row_to_json(j)::text from pgqueue.retry(%(job_id)s::uuid) j", _job)
_FILTERS: Final = """job_type => %(job_type)s::text, queue => %(queue)s::text, since => %(since)s::timestamptz,
                     until => %(until)s::timestamptz, max_jobs => %(max_jobs)s::int"""
RETRY_DEAD_LETTERS: Final = Call("retry_dead_letters", f"select pgqueue.retry_dead_letters({_FILTERS})", scalar)
DISCARD: Final = Call("discard", "select pgqueue.discard(%(job_id)s::uuid)", scalar)
DISCARD_DEAD_LETTERS: Final = Call("discard_dead_letters", f"select pgqueue.discard_dead_letters({_FILTERS})", scalar)
PAUSE: Final = Call("pause", "select pgqueue.pause(%(queue)s::text)", scalar)
RESUME: Final = Call("resume", "select pgqueue.resume(%(queue)s::text)", scalar)
PAUSE_JOB_TYPE: Final = Call(
    "pause_job_type",
    """select pgqueue.pause_job_type(%(job_type)s::text,
                                     pgqueue.clock() + make_interval(secs => %(seconds)s::float8))""",
    nothing,
)
RESUME_JOB_TYPE: Final = Call("resume_job_type", "select pgqueue.resume_job_type(%(job_type)s::text)", scalar)
JOBS: Final = Call(
    "jobs",
    """select row_to_json(j)::text from pgqueue.jobs j
        where (%(statuses)s::text[] is null or j.status = any (%(statuses)s::text[]))
          and (%(queue)s::text is null or j.queue = %(queue)s::text)
          and (%(job_type)s::text is null or j.job_type = %(job_type)s::text)
          and (%(producer_id)s::text is null or j.producer_id = %(producer_id)s::text)
          and (%(before)s::uuid is null or j.job_id < %(before)s::uuid)
        order by j.job_id desc limit %(limit)s::int""",
    _jobs,
    planned=True,
)
QUEUES: Final = Call("queues", "select row_to_json(q)::text from pgqueue.queues q order by q.name", records)
SET_QUEUE: Final = Call(
    "set_queue",
    "select row_to_json(q)::text from pgqueue.set_queue(%(queue)s::text, %(settings)s::jsonb) q",
    lambda rows: records(rows)[0],
)
ACTIVITY: Final = Call(
    "activity",
    """select json_build_object(
         'statuses', (select json_object_agg(c.status, c.jobs) from (
            select j.status, count(*) as jobs from pgqueue.jobs j where j.job_id >= %(since)s::uuid
             group by j.status) c),
         'retried', (select count(*) from pgqueue.jobs j
            where j.status = 'completed' and j.job_id >= %(since)s::uuid and j.errors <> '[]'),
         'ended', (select json_agg(e) from (
            select j.job_id, j.job_type, j.status, j.attempts, j.started_at, j.finished_at, j.result, j.error
              from pgqueue.jobs j
             where j.status in ('completed', 'dead_letter', 'cancelled') and j.job_id >= %(since)s::uuid
             order by j.finished_at desc limit %(limit)s::int) e),
         'retries', (select json_agg(f) from (
            select j.job_id, j.job_type, j.attempts, j.max_retries, j.due_at, j.error from pgqueue.jobs j
             where j.status = 'failed' and j.job_id >= %(since)s::uuid order by j.due_at limit %(limit)s::int) f)
       )::text""",
    lambda rows: records(rows)[0],
)
HOLD_RETRY: Final = Call(
    "hold_retry",
    """select pgqueue.hold_retry(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[],
                                 make_interval(secs => %(delay)s::float8))""",
    column,
)
ONCE: Final = Call("once", "select pgqueue.once(%(job_id)s::uuid, %(key)s::text)", scalar)
SCHEMA_VERSION: Final = Call("schema_version", "select pgqueue.schema_version()", scalar)
#: The oldest revision of the schema with which these calls work.
NEEDED_VERSION: Final = "0001"
QUEUE_STATS: Final = Call("queue_stats", "select row_to_json(q)::text from pgqueue.queue_stats q", records)
WORKERS: Final = Call(
    "workers", "select row_to_json(w)::text from pgqueue.workers w order by w.started_at, w.worker_id", records
)


AT_WORK: Final = Call(
    "at_work",
    # One that was killed has no session any more, one that has just ended may still have it.
    """select w.name from pgqueue.live_workers w
        where exists (select from pg_catalog.pg_stat_activity a
                       where a.datname = current_database()
                         and a.application_name in ('pgqueue worker', 'pgqueue heartbeat'))
        order by w.name""",
    column,
)
CLEAR: Final = Call(
    "clear",
    """with jobs as (delete from pgqueue.jobs returning 1),
            claims as (delete from pgqueue.claims),
            keys as (delete from pgqueue.idempotency_keys),
            guards as (delete from pgqueue.once_keys),
            pauses as (delete from pgqueue.job_type_pauses)
       select c.n from (select count(*) as n from jobs) c, pgqueue.note('clear', null, c.n)""",
    scalar,
)


def set_clock(ahead: float) -> Call[None]:
    """Return the call that lets the queue's clock run `ahead` seconds before the server's, for tests."""
    moved = f" + pg_catalog.make_interval(secs => {ahead!r})" if ahead else ""
    return Call(
        "set_clock",
        f"""create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe
              as $$ select pg_catalog.statement_timestamp(){moved} $$""",
        nothing,
    )


ALERTS: Final = Call(
    "alerts",
    "select row_to_json(a)::text from pgqueue.alerts a order by a.severity, a.since, a.alert, a.queue",
    records,
)
METRICS: Final = Call("metrics", "select name, kind, labels::text, value from pgqueue.metrics()", _samples)
PUSH_TURN: Final = Call(
    "push_turn",
    "select submitted from pgqueue.push_turn(make_interval(secs => %(every)s::float8))",
    lambda rows: cast(int, rows[0][0]) if rows else None,
)
WORKER_LOAD: Final = Call(
    "worker_load",
    """select pending, workers, slots, running, utilization, processing_seconds, soft_limit
         from pgqueue.worker_load(%(queues)s::text[])""",
    lambda rows: WorkerLoad(*rows[0]),
)
# Sessions -------------------------------------------------------------------------------------------------------------


def wake_channel(worker_id: UUID) -> str:
    """Return the channel on which a worker is woken."""
    return f"pgqueue_wake_{worker_id.hex}"


def listen(channel: str) -> str:
    """Return the statement that listens on a channel of ours (letters, digits and underscores)."""
    if not re.fullmatch(r"[a-z0-9_]{1,63}", channel):
        raise ConfigError(f"the channel is {channel!r}; it must be 1 to 63 of a-z, 0-9 and _")
    return f'listen "{channel}"'


#: Where a database has array_nulls off, the null in an array is the text NULL.
ISOLATION: Final = Call(
    "isolation",
    """select case when set_config('array_nulls', 'on', false) = 'on'
              then current_setting('default_transaction_isolation') end""",
    scalar,
)
#: What DISCARD ALL does, but for prepared statements: the driver knows of those that it made.
RESET: Final = (
    "close all; reset session authorization; reset role; reset all; set array_nulls = on; unlisten *; "
    "select pg_advisory_unlock_all(); discard temp; discard sequences"
)
PROBE: Final = "select 1"
#: A session that only listens is always idle, and no timeout of idle sessions is meant for it.
STAY: Final = "set idle_session_timeout = 0"
#: Not what libpq has: a pooler says a number of its own.
PROCESS: Final = "select pg_backend_pid()"
RING: Final = Call("ring", "select pg_notify(%(channel)s::text, %(payload)s::text)", nothing)
RING_WORKERS: Final = Call(
    "ring_workers",
    """select pg_notify('pgqueue_wake_' || replace(w.worker_id::text, '-', ''), '')
         from unnest(%(worker_ids)s::uuid[]) w(worker_id)""",
    nothing,
)
