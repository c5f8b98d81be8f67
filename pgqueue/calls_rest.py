"""The SQL calls that only the REST API makes, as data; see calling.py."""

from typing import Final, cast

from pgqueue.calling import Call, Rows, column, document, nothing, records, scalar, tuples
from pgqueue.calls import enqueued


def _text(rows: Rows) -> str | None:
    return cast(str, rows[0][0]) if rows else None


ACT_AS: Final = Call("act_as", "select set_config('pgqueue.actor', %(actor)s::text, true)", nothing)
CHECK_KEYS: Final = Call("check_keys", "select pgqueue.check_keys(%(hashes)s::bytea[])::text", document, hot=True)
KEYS: Final = Call(
    "keys",
    """select row_to_json(k)::text from pgqueue.keys k
        where %(after)s::text is null or k.name > %(after)s::text
        order by k.name limit %(limit)s::int""",
    records,
)
KEY_NAMES: Final = Call("key_names", "select k.name from pgqueue.keys k where k.name = any (%(names)s::text[])", column)
KEYS_USED: Final = Call("keys_used", "select pgqueue.keys_used(%(names)s::text[])", nothing)
CREATE_KEY: Final = Call(
    "create_key",
    """select pgqueue.create_key(%(name)s::text, %(sha256)s::bytea, %(prefix)s::text, %(scopes)s::text[],
                                 %(rate)s::int, %(expires_at)s::timestamptz)""",
    nothing,
)
REVOKE_KEY: Final = Call("revoke_key", "select pgqueue.revoke_key(%(name)s::text)", scalar)
LEASE_TOKENS: Final = Call(
    "lease_tokens",
    """select granted, retry_ms
         from pgqueue.lease_tokens(%(bucket)s::text, %(per_second)s::float8, %(wanted)s::int)""",
    lambda rows: cast(tuple[int, int], tuple(rows[0])),
)
SUBMIT: Final = Call(
    "submit",
    "select job, duplicate, same from pgqueue.submit(%(jobs)s::jsonb, %(hashes)s::bytea[])",
    tuples,
    hot=True,
)
SUBMIT_BATCH: Final = Call(
    "submit_batch",
    "select job_id, status, duplicate from pgqueue.submit_batch(%(jobs)s::jsonb)",
    enqueued,
)
JOB_JSON: Final = Call("job_json", "select row_to_json(j)::text from pgqueue.job(%(job_id)s::uuid) j", _text, hot=True)
JOB_STATES: Final = Call(
    "job_states",
    """select json_build_object('job_id', j.job_id, 'queue', j.queue, 'job_type', j.job_type, 'status', j.status,
                                'attempts', j.attempts, 'updated_at', j.updated_at)::text
         from unnest(%(job_ids)s::text[]::uuid[]) u(job_id) cross join lateral pgqueue.job(u.job_id) j""",
    records,
)
ARRIVALS: Final = Call(
    "arrivals",
    """select json_build_object('job_id', j.job_id, 'queue', j.queue, 'job_type', j.job_type, 'status', j.status,
                                'attempts', j.attempts, 'updated_at', j.updated_at)::text
         from pgqueue.jobs j
        where j.status in ('pending', 'submitted') and j.attempts = 0 and j.job_id >= %(since)s::uuid
        order by j.job_id limit %(limit)s::int""",
    records,
)
#: How many jobs are looked at for a page, at most; and how many live ones, of which only some statuses are wanted.
LOOKED_AT: Final = 20_000
LOOKED_AT_LIVE: Final = 100_000
# A page costs the same whatever its filters are: so many jobs are looked at, at most. Planned each time, since an array
# prunes partitions only when it is known.
_LOOKED_AT: Final = """select j.* from pgqueue.jobs j
        where j.status = any (%(parts)s::text[]) and j.job_id < %(before)s::uuid
        order by j.job_id desc limit %(looked_at)s::int"""
#: What a list of jobs `l` is asked to show of those looked at.
FILTERS: Final = """(%(queue)s::text is null or l.queue = %(queue)s::text)
             and (%(job_type)s::text is null or l.job_type = %(job_type)s::text)
             and (%(producer_id)s::text is null or l.producer_id = %(producer_id)s::text)
             and (%(search)s::text is null
                  or strpos(lower(concat_ws(' ', l.job_id, l.job_type, l.queue, l.idempotency_key, l.ordering_key,
                                            l.producer_id, l.error)), lower(%(search)s::text)) > 0
                  or octet_length(l.payload::text) <= 16384
                     and strpos(lower(l.payload::text), lower(%(search)s::text)) > 0)"""
LIST_JOBS: Final = Call(
    "list_jobs",
    f"""select row_to_json(p)::text from (
          select l.job_id, l.seq, l.queue, l.job_type, l.priority, l.status, l.attempts, l.max_retries, l.lost,
                 l.retry_policy, l.timeout_ms, l.scheduled_at, l.due_at, l.expires_at, l.idempotency_key, l.producer_id,
                 l.ordering_key, l.shard, l.worker_id, l.lease_expires_at, l.cancel_requested_at, l.created_at,
                 l.updated_at, l.started_at, l.finished_at, l.error, l.progress, l.trace_context,
                 case when %(with_errors)s::boolean then l.errors else '[]' end as errors,
                 case when pg_column_size(l.payload) <= 8192 and octet_length(l.payload::text) <= 16384
                      then l.payload end as payload,
                 not (pg_column_size(l.payload) <= 8192 and octet_length(l.payload::text) <= 16384) as payload_omitted
            from ({_LOOKED_AT}) l
           where l.status = any (%(statuses)s::text[])
             and {FILTERS}
           order by l.job_id desc limit %(limit)s::int) p""",  # noqa: S608
    column,
    planned=True,
)
LAST_LOOKED_AT: Final = Call(
    "last_looked_at",
    f"select l.job_id::text from ({_LOOKED_AT}) l offset %(looked_at)s::int - 1",  # noqa: S608
    _text,
    planned=True,
)
QUEUES_NAMED: Final = Call(
    "queues_named",
    """select row_to_json(q)::text
         from (select x.name, coalesce(q.paused, false) as paused, q.paused_at,
                      case when q.name is null then '{8,4,2,1}' else q.weights end as weights,
                      coalesce(q.lease_ms, 30000) as lease_ms, coalesce(q.timeout_ms, 900000) as timeout_ms,
                      coalesce(q.max_lost, 5) as max_lost, coalesce(q.idempotency_ms, 86400000) as idempotency_ms,
                      q.retry_policy, coalesce(q.soft_limit, 50000) as soft_limit,
                      coalesce(q.hard_limit, 100000) as hard_limit, q.rate_per_second,
                      coalesce(q.shed_low, false) as shed_low,
                      extract(epoch from coalesce(q.pending_ttl, '24 hours')) * 1000 as pending_ttl_ms,
                      extract(epoch from coalesce(q.completed_ttl, '30 days')) * 1000 as completed_ttl_ms,
                      extract(epoch from coalesce(q.failed_ttl, '7 days')) * 1000 as failed_ttl_ms,
                      extract(epoch from coalesce(q.dead_letter_ttl, '90 days')) * 1000 as dead_letter_ttl_ms,
                      extract(epoch from coalesce(q.cancelled_ttl, '7 days')) * 1000 as cancelled_ttl_ms
                 from unnest(%(names)s::text[]) x(name) left join pgqueue.queues q on q.name = x.name) q
        where %(after)s::text is null or q.name > %(after)s::text
        order by q.name limit %(limit)s::int""",
    records,
)
QUEUE_COUNTS: Final = Call("queue_counts", "select row_to_json(c)::text from pgqueue.queue_counts() c", records)
HEALTH: Final = Call(
    "health",
    """select json_build_object(
         'version', pgqueue.schema_version(),
         'read_only', current_setting('transaction_read_only') = 'on',
         'swept_seconds_ago', extract(epoch from pgqueue.clock() - max(s.last_run_at) filter (where s.step = 'due')),
         'failing', json_object_agg(s.step, s.failures) filter (where s.failures > 0))::text
         from pgqueue.sweep_steps s""",
    document,
)
WATCH: Final = Call(
    "watch",
    """select extract(epoch from clock_timestamp())::float8,
              pgqueue.watch(%(watcher_id)s::uuid, make_interval(secs => %(seconds)s::float8))""",
    scalar,
)
UNWATCH: Final = Call("unwatch", "select pgqueue.unwatch(%(watcher_id)s::uuid)", nothing)
CLAIM_JSON: Final = Call(
    "claim_json",
    """select row_to_json(j)::text
         from pgqueue.claim(%(worker_id)s::uuid, %(queues)s::text[], %(max_jobs)s::int,
                            make_interval(secs => %(lease)s::float8), %(job_types)s::text[],
                            %(priorities)s::smallint[], %(shards)s::smallint[]) j""",
    column,
    hot=True,
)
WORKER_ROWS: Final = Call(
    "worker_rows",
    """select row_to_json(r)::text
         from (select w.*, w.status <> 'stopped' and w.last_heartbeat > pgqueue.clock() - interval '60 seconds' as live
                 from pgqueue.workers w
                where %(after_id)s::uuid is null
                   or (w.started_at, w.worker_id) > (%(after)s::timestamptz, %(after_id)s::uuid)
                order by w.started_at, w.worker_id limit %(limit)s::int) r""",
    records,
)
TOTALS: Final = Call(
    "totals",
    """select json_build_object(
         'dead_letters', (select count(*) from (
            select from pgqueue.jobs j where j.status = 'dead_letter' limit 10001) d),
         'workers', (select count(*) from pgqueue.live_workers),
         'slots', (select coalesce(sum(w.concurrency), 0) from pgqueue.live_workers w where w.status <> 'draining'),
         'submitted_per_second', coalesce(sum(r.submitted / r.seconds), 0),
         'processed_per_second', coalesce(sum(r.processed / r.seconds), 0),
         'failed_per_second', coalesce(sum(r.failed / r.seconds), 0))::text
         from pgqueue.rates('1 minute') r""",
    document,
)
ALERTS: Final = Call(
    "alerts",
    """select json_build_object('alert', a.alert, 'severity', a.severity, 'queue', a.queue, 'summary', a.summary,
                                'since', a.since)::text
         from pgqueue.alerts a order by a.severity, a.alert, a.queue""",
    records,
)
PUT_SCHEDULE: Final = Call("put_schedule", "select pgqueue.put_schedule(%(name)s::text, %(settings)s::jsonb)", scalar)
DROP_SCHEDULE: Final = Call("drop_schedule", "select pgqueue.drop_schedule(%(name)s::text)", scalar)
SCHEDULE_ROWS: Final = Call(
    "schedule_rows",
    """select row_to_json(s)::text from pgqueue.schedules s
        where (%(name)s::text is null or s.name = %(name)s::text)
          and (%(after)s::text is null or s.name > %(after)s::text)
        order by s.name limit %(limit)s::int""",
    column,
)
