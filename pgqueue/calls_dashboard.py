"""The SQL calls that only the dashboard makes, as data; see calling.py. What they count they count up to a bound."""

from typing import Final, cast

from pgqueue.calling import Call, column, document, records, scalar, tuples
from pgqueue.calls_rest import FILTERS, LOOKED_AT

ONLY_READ: Final = Call(
    "only_read",
    """select set_config('transaction_read_only', 'on', true), set_config('enable_seqscan', 'off', true),
              set_config('jit', 'off', true), set_config('statement_timeout', %(milliseconds)s::text, true)""",
    lambda rows: None,
)
PACE: Final = Call(
    "pace",
    """with r as materialized (select * from pgqueue.rates(make_interval(secs => %(seconds)s::float8)))
       select json_build_object(
         'submitted_per_second', coalesce(sum(r.submitted / r.seconds), 0),
         'processed_per_second', coalesce(sum(r.processed / r.seconds), 0),
         'processed', coalesce(sum(r.processed), 0), 'failed', coalesce(sum(r.failed), 0),
         'duration_seconds', coalesce(sum(r.duration_seconds), 0),
         'durations', (select json_agg(b.jobs order by b.n) from (
            select u.n, sum(u.jobs) as jobs from r cross join lateral unnest(r.durations) with ordinality u(jobs, n)
             group by u.n) b))::text
         from r""",
    document,
)
HISTORY: Final = Call(
    "history",
    """select submitted_per_second, processed_per_second, failed_per_second
         from pgqueue.history(make_interval(secs => %(seconds)s::float8), %(points)s::int)""",
    tuples,
)
#: Finished jobs are too many to count: what the statistics say.
FINISHED: Final = Call(
    "finished",
    """select json_build_object(
         'completed', coalesce(sum(f.jobs) filter (where f.name like 'jobs\\_completed%%'), 0),
         'cancelled', coalesce(sum(f.jobs) filter (where f.name like 'jobs\\_cancelled%%'), 0))::text
         from (select c.relname as name, greatest(pg_stat_get_live_tuples(c.oid), 0) as jobs
                 from pg_class c join pg_namespace n on n.oid = c.relnamespace
                where n.nspname = 'pgqueue' and c.relkind = 'r' and c.relname like 'jobs\\_c%%') f""",
    document,
)
NAMES: Final = Call(
    "names",
    """select json_build_object(
         'queues', coalesce((select json_agg(q.queue order by q.queue) from (
            select distinct c.queue from pgqueue.counters c where c.queue <> '_OTHER') q), '[]'),
         'types', coalesce((select json_agg(t.job_type order by t.job_type) from (
            select distinct c.job_type from pgqueue.counters c where c.job_type <> '_OTHER') t), '[]'))::text""",
    document,
)
RUNNING: Final = Call(
    "running",
    """select json_build_object(
         'job_id', j.job_id, 'job_type', j.job_type, 'queue', j.queue, 'attempts', j.attempts, 'worker_id', j.worker_id,
         'started_at', j.started_at, 'lease_expires_at', j.lease_expires_at,
         'late', j.lease_expires_at < pgqueue.clock(), 'stopping', j.cancel_requested_at is not null)::text
         from pgqueue.jobs_processing j order by j.lease_expires_at desc limit %(limit)s::int""",
    records,
)
#: So many failed jobs and dead letters are looked at, the newest.
FAILURES_LOOKED_AT: Final = 5_000
FAILURES: Final = Call(
    "failures",
    f"""select row_to_json(g)::text from (
          select f.job_type, f.pattern, count(*) as jobs, count(*) filter (where f.status = 'failed') as waiting,
                 min(f.updated_at) as first_at, max(f.updated_at) as last_at,
                 (array_agg(f.job_id order by f.updated_at desc))[1] as latest,
                 (array_agg(distinct f.queue))[1:4] as queues
            from (select j.job_id, j.job_type, j.queue, j.status, j.updated_at,
                         regexp_replace(left(coalesce(j.error, 'no error recorded'), 200),
                           '[0-9a-f]{{8}}-[0-9a-f-]{{27}}|0x[0-9a-f]+|[0-9]+', '#', 'g') as pattern
                    from ((select d.job_id, d.job_type, d.queue, d.status, d.updated_at, d.error from pgqueue.jobs d
                            where d.status = 'dead_letter' order by d.job_id desc limit {FAILURES_LOOKED_AT})
                          union all
                          (select d.job_id, d.job_type, d.queue, d.status, d.updated_at, d.error from pgqueue.jobs d
                            where d.status = 'failed' and d.due_at is not null
                            order by d.due_at desc limit {FAILURES_LOOKED_AT})) j) f
           group by f.job_type, f.pattern order by count(*) desc, max(f.updated_at) desc limit 200) g""",  # noqa: S608
    records,
)
#: The jobs that a list with these filters shows, on all its pages; as many jobs are looked at as for the list.
MATCHING: Final = Call(
    "matching",
    f"""select l.job_id::text from (
          select j.* from pgqueue.jobs j
           where (%(statuses)s::text[] is null or j.status = any (%(statuses)s::text[]))
             and (%(upto)s::uuid is null or j.job_id <= %(upto)s::uuid)
           order by j.job_id desc limit {LOOKED_AT}) l
        where {FILTERS}
        order by l.job_id desc limit %(limit)s::int""",  # noqa: S608
    column,
)
CHOSEN: Final = Call(
    "chosen",
    """select row_to_json(c)::text from (
         select j.job_id, j.job_type, j.queue, j.status, j.error from pgqueue.jobs j
          where j.job_id = any (%(job_ids)s::text[]::uuid[]) and j.status = any (%(statuses)s::text[])
          order by j.job_id desc) c""",
    records,
)
_EACH: Final = """select count(*) from (
         select j.job_id from pgqueue.jobs j
          where j.job_id = any (%(job_ids)s::text[]::uuid[]) and j.status = any (%(statuses)s::text[]) offset 0) c
         cross join lateral"""
RETRY_THESE: Final = Call("retry_these", f"{_EACH} pgqueue.retry(c.job_id) r", scalar)
DISCARD_THESE: Final = Call("discard_these", f"{_EACH} pgqueue.discard(c.job_id) r", scalar)
ENABLE_SCHEDULE: Final = Call(
    "enable_schedule",
    """select count(pgqueue.put_schedule(s.name, to_jsonb(s) || jsonb_build_object('enabled', %(enabled)s::boolean)))
         from pgqueue.schedules s where s.name = %(name)s::text""",
    scalar,
)
SWEEP_STEPS: Final = Call(
    "sweep_steps", "select row_to_json(s)::text from pgqueue.sweep_steps s order by s.step", records
)
TABLES: Final = Call(
    "tables",
    """select row_to_json(t)::text from (
         select g.name, count(*) as parts, sum(pg_total_relation_size(g.oid)) as bytes,
                sum(greatest(pg_stat_get_live_tuples(g.oid), 0)) as rows,
                sum(greatest(pg_stat_get_dead_tuples(g.oid), 0)) as dead
           from (select c.oid, case when c.relname like 'jobs\\_completed%%' then 'jobs_completed'
                                    when c.relname like 'jobs\\_cancelled%%' then 'jobs_cancelled'
                                    when c.relname like 'jobs\\_dead\\_letter%%' then 'jobs_dead_letter'
                                    else c.relname end as name
                   from pg_class c join pg_namespace n on n.oid = c.relnamespace
                  where n.nspname = 'pgqueue' and c.relkind = 'r') g
          group by g.name order by sum(pg_total_relation_size(g.oid)) desc, g.name limit 14) t""",
    records,
)
HORIZON: Final = Call(
    "horizon",
    """select row_to_json(h)::text from pgqueue.horizon() h
        where h.kind <> 'session' or h.since < clock_timestamp() - interval '1 second'
        order by h.xmin_age desc nulls last limit 20""",
    records,
)
SERVER: Final = Call(
    "server",
    """select json_build_object(
         'schema', pgqueue.schema_version(), 'server', current_setting('server_version'),
         'database', current_database(), 'database_bytes', pg_database_size(current_database()),
         'started_at', pg_postmaster_start_time(), 'notify_usage', pg_notification_queue_usage(),
         'sessions', (select sum(numbackends) from pg_stat_database),
         'max_connections', current_setting('max_connections')::int,
         'ahead', extract(epoch from clock_timestamp()))::text""",
    document,
)
AUDIT: Final = Call(
    "audit",
    """select json_build_object('at', a.at, 'actor', a.actor, 'verb', a.verb, 'target', a.target, 'jobs', a.jobs)::text
         from pgqueue.audit a order by a.audit_id desc limit %(limit)s::int""",
    records,
)
DEAD_LETTERS: Final = Call(
    "dead_letters",
    """select count(*) from (
         select from pgqueue.jobs j where j.status = 'dead_letter' order by j.job_id limit 10001) d""",
    lambda rows: cast(int, rows[0][0]),
)
