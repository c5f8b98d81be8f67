"""SQL calls of the tools that watch: `pgqueue top`, `pgqueue doctor` and the scaler."""

from typing import Final, cast

from pgqueue.calling import Call, document
from pgqueue.calls import WorkerLoad

TOP: Final = Call(
    "top",
    """select json_build_object(
         'queues', (select coalesce(json_agg(s order by s.queue, s.priority), '[]') from pgqueue.queue_stats s),
         'paused', (select coalesce(json_agg(q.name), '[]') from pgqueue.queues q where q.paused),
         'workers', (select coalesce(json_agg(w order by w.started_at, w.worker_id), '[]') from pgqueue.live_workers w),
         'running', (select coalesce(json_agg(r), '[]') from (
            select p.job_id, p.queue, p.job_type, p.attempts, p.started_at, p.worker_id, p.cancel_requested_at
              from (select j.* from pgqueue.jobs_processing j limit 2000) p
             order by p.started_at limit %(limit)s::int) r),
         'failed', (select coalesce(json_agg(f), '[]') from (
            select d.job_id, d.queue, d.job_type, d.status, d.attempts, d.error, d.due_at, d.updated_at
              from (select j.* from pgqueue.jobs j where j.status = 'failed' and j.due_at is not null
                     order by j.due_at limit %(limit)s::int) d
             union all
            select d.job_id, d.queue, d.job_type, d.status, d.attempts, d.error, null, d.updated_at
              from (select j.* from pgqueue.jobs j where j.status = 'dead_letter'
                     order by j.job_id desc limit %(limit)s::int) d) f),
         'alerts', (select coalesce(json_agg(a), '[]') from (
            select s.alert, s.severity, s.summary from pgqueue.alert_states s where s.fired_at is not null
             order by s.severity, s.since) a),
         'at', pgqueue.clock())::text""",
    document,
)
#: What the doctor asks, part by part: a role may be refused one and told the others.
DOCTOR: Final = (
    Call(
        "server",
        """select json_build_object(
             'server', current_setting('server_version'), 'schema', pgqueue.schema_version(),
             'now', clock_timestamp(), 'read_only', current_setting('transaction_read_only') = 'on',
             'pid', pg_backend_pid(),
             'settings', (select json_object_agg(s.name, s.setting) from pg_settings s
                where s.name in ('fsync', 'full_page_writes', 'autovacuum', 'track_counts', 'max_connections',
                                 'synchronous_commit')),
             'connections', (select count(*) from pg_stat_activity a where a.backend_type = 'client backend'),
             'xid_age', (select age(d.datfrozenxid) from pg_database d where d.datname = current_database()),
             'notify_usage', pg_notification_queue_usage(),
             'tables', (select coalesce(json_agg(t), '[]') from (
                select u.relname as name, u.n_live_tup as live, u.n_dead_tup as dead, u.last_autovacuum, u.last_vacuum,
                       pg_total_relation_size(u.relid) as bytes
                  from pg_stat_all_tables u where u.schemaname = 'pgqueue' order by u.n_dead_tup desc) t))::text""",
        document,
    ),
    Call(
        "horizon",
        """select json_build_object('horizon',
             (select coalesce(json_agg(h order by h.xmin_age desc), '[]') from pgqueue.horizon() h))::text""",
        document,
    ),
    Call(
        "partitions",
        """select json_build_object(
             'partitions', (select coalesce(json_agg(c.relname), '[]') from pg_class c
                where c.relnamespace = 'pgqueue'::regnamespace and c.relispartition and c.relkind = 'r'),
             'today', to_char(clock_timestamp() at time zone 'UTC', 'YYYYMMDD'),
             'tomorrow', to_char((clock_timestamp() + interval '1 day') at time zone 'UTC', 'YYYYMMDD'),
             'this_week', to_char(date_trunc('week', clock_timestamp() at time zone 'UTC'), 'YYYYMMDD'),
             'strays', (select coalesce(json_agg(d.name), '[]') from (
                select 'jobs_completed_default' as name where exists (select from pgqueue.jobs_completed_default)
                union all select 'jobs_cancelled_default' where exists (select from pgqueue.jobs_cancelled_default)
                union all select 'jobs_dead_letter_default'
                 where exists (select from pgqueue.jobs_dead_letter_default)) d))::text""",
        document,
    ),
    Call("roles", "select json_build_object('roles', pgqueue.missing_roles())::text", document),
    Call(
        "sweep",
        """select json_build_object('steps', (select coalesce(json_agg(s), '[]') from (
             select s.step, s.last_run_at, s.failures, s.last_error,
                    extract(epoch from pgqueue.clock() - s.last_run_at) as age from pgqueue.sweep_steps s) s))::text""",
        document,
    ),
    Call(
        "workers",
        """select json_build_object('lost', (select coalesce(json_agg(w), '[]') from (
             select w.name, w.hostname, w.pid, w.last_heartbeat from pgqueue.workers w
              where w.status <> 'stopped' and w.last_heartbeat <= pgqueue.clock() - interval '60 seconds') w))::text""",
        document,
    ),
    Call(
        "alert",
        "select json_build_object('alerts', (select coalesce(json_agg(a), '[]') from pgqueue.alerts a))::text",
        document,
    ),
)
FLEET: Final = Call(
    "fleet",
    """select l.pending, l.workers, l.slots, l.running, l.utilization, l.processing_seconds, l.soft_limit,
              (select json_object_agg(w.name, json_build_array(
                        w.status not in ('stopped', 'draining')
                          and w.last_heartbeat > pgqueue.clock() - interval '1 minute', coalesce(p.jobs, 0)))
                 from pgqueue.workers w
                 left join (select j.worker_id, count(*) as jobs from pgqueue.jobs_processing j group by j.worker_id) p
                   on p.worker_id = w.worker_id
                where w.name = any (%(names)s::text[]))
         from pgqueue.worker_load(%(queues)s::text[]) l""",
    lambda rows: (WorkerLoad(*rows[0][:-1]), cast(dict[str, tuple[bool, int]], rows[0][-1] or {})),
)
