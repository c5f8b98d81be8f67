-- What psql, REST and metrics read.

create function pgqueue.schema_version() returns text
  language sql stable set search_path = pg_catalog, pg_temp
  as $$ select '0001' $$;
comment on function pgqueue.schema_version() is 'The alembic revision that this schema is at.';

create view pgqueue.live_workers as
  select * from pgqueue.workers w where w.status <> 'stopped' and w.last_heartbeat > pgqueue.clock() - interval '60 seconds';
comment on view pgqueue.live_workers is 'Workers that gave a sign of life within a minute.';

create view pgqueue.job_results as
  select j.job_id, j.status, j.result, j.error,
         (extract(epoch from coalesce(j.finished_at, j.updated_at) - j.started_at) * 1000)::bigint as duration_ms,
         j.worker_id, j.finished_at as completed_at
    from pgqueue.jobs j
   where j.status in ('completed', 'failed', 'dead_letter', 'cancelled');
comment on view pgqueue.job_results is 'Results and errors of jobs that ended, or whose last attempt failed.';

create view pgqueue.dead_letters as
  select j.job_id, j.queue, j.job_type, j.payload, j.priority, j.attempts, j.lost, j.error, j.errors, j.producer_id,
         j.created_at, j.finished_at as died_at, j.worker_id, j.idempotency_key, j.ordering_key
    from pgqueue.jobs_dead_letter j;
comment on view pgqueue.dead_letters is 'Jobs that need a human: pgqueue.retry or pgqueue.discard them.';

create view pgqueue.jobs_processing as
  select j.* from pgqueue.jobs_live j
   where j.status = 'processing' and j.job_id in (select unnest(c.job_ids) from pgqueue.claims c);
comment on view pgqueue.jobs_processing is 'Jobs that workers hold, found without a look at those that wait.';

create view pgqueue.stuck_jobs as
  select j.job_id, j.queue, j.job_type, j.status, j.attempts, j.worker_id, j.lease_expires_at, j.due_at, j.updated_at,
         'its lease ran out and no sweep has come by' as problem
    from pgqueue.jobs_processing j where j.lease_expires_at < pgqueue.clock() - interval '10 seconds'
  union all
  select j.job_id, j.queue, j.job_type, j.status, j.attempts, j.worker_id, j.lease_expires_at, j.due_at, j.updated_at,
         'it is due and no sweep has come by'
    from pgqueue.jobs_live j where j.status in ('submitted', 'failed') and j.due_at < pgqueue.clock() - interval '10 seconds';
comment on view pgqueue.stuck_jobs is 'Jobs that a sweep should have moved on.';
