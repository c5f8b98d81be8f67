-- Heartbeat: renews leases, and answers which attempts are to stop.

create function pgqueue.heartbeat(worker_id uuid, job_ids uuid[], attempts int[], lease interval default null)
  returns table (job_id uuid, attempt int, reason text)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
#variable_conflict use_column
begin
  if heartbeat.lease <= interval '0' or heartbeat.lease > interval '1 day' then
    raise exception 'lease must be positive and at most 1 day, but is %', heartbeat.lease using errcode = 'PQ422', column = 'lease';
  end if;
  -- SKIP LOCKED: whoever holds the row (a finish, a cancel, the sweep) decides about it; a next heartbeat comes.
  return query
    with held as (
      select u.job_id, u.attempt from unnest(heartbeat.job_ids, heartbeat.attempts) u(job_id, attempt)),
    locked as (
      select j.ctid, j.job_id, j.attempts, j.queue, j.cancel_requested_at from pgqueue.jobs_live j
       where j.job_id = any (heartbeat.job_ids) and j.worker_id = heartbeat.worker_id and j.status = 'processing'
       for update skip locked),
    renewed as (
      update pgqueue.jobs_live j
         set lease_expires_at = greatest(j.lease_expires_at, pgqueue.clock() + coalesce(heartbeat.lease,
               (select q.lease_ms from pgqueue.queues q where q.name = j.queue) * interval '1 millisecond', interval '30 seconds')),
             ordering_key = j.ordering_key
        from locked l
       where j.ctid = l.ctid and (l.job_id, l.attempts) in (select h.job_id, h.attempt from held h)
      returning j.job_id, j.attempts, j.cancel_requested_at)
    select h.job_id, h.attempt, case when r.job_id is null then 'lost' else 'cancel' end
      from held h left join renewed r on r.job_id = h.job_id and r.attempts = h.attempt
     where r.cancel_requested_at is not null
        or r.job_id is null and not exists (
             -- A row locked by somebody else is not lost yet: judge by what is committed.
             select from pgqueue.jobs_live j
              where j.job_id = h.job_id and j.worker_id = heartbeat.worker_id and j.attempts = h.attempt
                and j.status = 'processing');
end $$;
comment on function pgqueue.heartbeat is
  'Renews the leases of a worker''s attempts; answers those that were lost, and those whose cancel was requested.';
