"""The SQL of the chaos run: its settings, its looks at final tables, and the harm that is done by SQL."""

from typing import Final

EFFECTS: Final = """
  create table if not exists public.chaos_effects (job_id uuid not null, attempt int not null)"""
EFFECT: Final = "insert into public.chaos_effects (job_id, attempt) values (%(job_id)s, %(attempt)s)"
QUEUE: Final = """
  insert into pgqueue.queues (name, soft_limit, hard_limit, max_lost, lease_ms, retry_policy)
  values (%(name)s, 2000000000, 2000000000, %(max_lost)s, %(lease_ms)s,
          '{"base_delay_ms": 200, "max_delay_ms": 2000}')
  on conflict (name) do update set soft_limit = excluded.soft_limit, hard_limit = excluded.hard_limit,
    max_lost = excluded.max_lost, lease_ms = excluded.lease_ms, retry_policy = excluded.retry_policy"""
INSERT: Final = """
  insert into pgqueue.jobs (job_type, payload, max_retries, ordering_key, queue, priority)
  select u.job_type, jsonb_build_object('n', u.n, 'seconds', u.seconds, 'times', u.times), u.max_retries,
         u.ordering_key, u.queue, u.priority
    from unnest(%(n)s::bigint[], %(job_type)s::text[], %(seconds)s::float8[], %(times)s::int[], %(max_retries)s::int[],
                %(ordering_key)s::text[], %(queue)s::text[], %(priority)s::int[])
         with ordinality u(n, job_type, seconds, times, max_retries, ordering_key, queue, priority, i)
   order by u.i
  returning (payload ->> 'n')::bigint, job_id"""

# What became of everything --------------------------------------------------------------------------------------------

FINAL: Final = """
  select job_id::text, status, (payload ->> 'n')::bigint, job_type, queue, ordering_key, seq, attempts, lost,
         max_retries, worker_id::text, result ->> 'token', error, errors, idempotency_key
    from pgqueue.jobs where payload ? 'n'"""
ALL_EFFECTS: Final = "select job_id::text, attempt, count(*) from public.chaos_effects group by 1, 2"
LIVE: Final = """
  select count(*), count(*) filter (
           where status = 'processing'
             and lease_expires_at < clock_timestamp() - %(slack)s::float8 * interval '1 second')
    from pgqueue.jobs_live where payload ? 'n'"""
ENDED_SINCE: Final = """
  select job_id::text, status, attempts, result ->> 'token', finished_at::text,
         (finished_at - interval '10 seconds')::text from pgqueue.jobs
   where status in ('completed', 'cancelled', 'dead_letter') and finished_at >= %(since)s::timestamptz and payload ? 'n'
   order by finished_at limit 20000"""
METRICS: Final = """
  select name, labels, value from pgqueue.metrics()
   where name in ('pgqueue_jobs_submitted_total', 'pgqueue_jobs_processed_total', 'pgqueue_jobs_lost_total')"""
MEASURE: Final = "select step, jobs from pgqueue.sweep('measure')"
NOW: Final = "select clock_timestamp()"
COUNTED: Final = "select arrivals_to >= %(moment)s::timestamptz from pgqueue.measures"
SOME_LIVE: Final = """
  select job_id from pgqueue.jobs_live where status = any (%(statuses)s::text[]) and payload ? 'n'
   order by random() limit %(jobs)s"""
CANCEL_MANY: Final = "select job_id::text, outcome from pgqueue.cancel_many(%(job_ids)s::uuid[])"
RETRY_DEAD_LETTERS: Final = "select pgqueue.retry_dead_letters(job_type => %(job_type)s, max_jobs => %(jobs)s)"
PAUSE: Final = "select pgqueue.pause(%(queue)s)"
RESUME: Final = "select pgqueue.resume(%(queue)s)"

# Harm -----------------------------------------------------------------------------------------------------------------

TERMINATE_ALL: Final = """
  select count(pg_terminate_backend(pid)) from pg_stat_activity
   where pid <> pg_backend_pid() and backend_type = 'client backend'"""
TERMINATE_OURS: Final = """
  select count(pg_terminate_backend(pid)) from pg_stat_activity
   where application_name like 'pgqueue%%' and backend_type = 'client backend'"""
A_BACKEND: Final = """
  select pid from pg_stat_activity where application_name like 'pgqueue%%' and backend_type = 'client backend'
   order by (state = 'active') desc, random() limit 1"""
RELOAD: Final = "select pg_reload_conf()"
SNAPSHOT: Final = "select count(*) from pgqueue.queues"
DAY_PARTITIONS: Final = """
  select c.oid::regclass::text from pg_inherits i join pg_class c on c.oid = i.inhrelid
   where i.inhparent = %(parent)s::regclass and pg_get_expr(c.relpartbound, c.oid) <> 'DEFAULT'
   order by 1"""
ROOM: Final = """
  select coalesce(sum(reltuples) filter (where reltuples > 0), 0)::bigint from pg_class
   where oid = any (%(names)s::text[]::regclass[])"""
DROP_PARTITION: Final = (
    "alter table {parent} detach partition {name}",
    "insert into {parent}_default ({columns}) select {columns} from {name}",
    "drop table {name}",
)
COLUMNS: Final = """
  select string_agg(quote_ident(attname), ', ' order by attnum) from pg_attribute
   where attrelid = 'pgqueue.jobs'::regclass and attnum > 0 and not attisdropped and attgenerated = ''"""
INSERT_LATE: Final = """
  insert into pgqueue.jobs (job_type, payload)
  select 'quick', jsonb_build_object('n', n) from unnest(%(n)s::bigint[]) n
  returning (payload ->> 'n')::bigint, job_id"""
DROP_PREPARED: Final = "select gid from pg_prepared_xacts where database = current_database()"
