-- Leases: claims are looked at again, and what was lost or ran for too long is taken from its worker.
--
-- An index of leases would be written by every claim and heartbeat. Instead a claim leaves one row in pgqueue.claims that
-- names its jobs, in the same transaction. The row says when a sweep is to look: a second later, when most batches are over
-- and the row goes, then after twice the time, but never after the first lease of those that still run. Leases only grow,
-- and who shortens one by hand adds a row of his own (jobs_edited), so no lease runs out unseen.
-- A job may be named twice, by a claim that it was released from and by the next: either row finds its present lease.

create function pgqueue.look_at_claims(until timestamptz) returns uuid[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  since timestamptz := (select s.claims_swept_to from pgqueue.sweep_state s);
  after tid := '(0,0)';
  few int := 5;
  looked int;
  late_ids uuid[];
  lost uuid[] := '{}';
begin
  loop
    with due as materialized (
      select c.ctid as tid, c.look_at, c.timeout_at as had, c.job_ids from pgqueue.claims c
       where c.look_at >= since and (c.look_at > since or c.ctid > after) and c.look_at < pgqueue.clock()
       order by c.look_at, c.ctid limit few for update skip locked),
    held as materialized (
      select d.tid, d.look_at, d.had, h.* from due d cross join lateral (
        select array_agg(l.job_id) as job_ids, array_agg(l.job_id) filter (where l.lease_expires_at < pgqueue.clock()) as lost_ids,
               coalesce(min(l.lease_expires_at), 'infinity') as lease_at, min(l.started_at) filter (where isfinite(l.started_at)) as started_at,
               -- What is overdue queues up behind those that became so before.
               greatest(pgqueue.clock(), min(least(l.started_at, pgqueue.clock()) + (coalesce(l.timeout_ms,
                 (select q.timeout_ms from pgqueue.queues q where q.name = l.queue), 900000) + 10000::bigint) * interval '1 millisecond')) as timeout_at
          from pgqueue.jobs_live l where l.job_id = any (d.job_ids) and l.status = 'processing') h),
    over as (
      delete from pgqueue.claims c using held h where c.ctid = h.tid and h.job_ids is null),
    kept as (
      -- After twice the time, so that what has ended is not named for much longer than it ran. What is late stays where it
      -- is, until it has been given back or its holder is done.
      update pgqueue.claims c
         set job_ids = h.job_ids, timeout_at = h.timeout_at,
             look_at = case when h.lost_ids is null
               then least(h.lease_at, pgqueue.clock() + greatest(interval '1 second', pgqueue.clock() - h.started_at)) else h.look_at end
        from held h where c.ctid = h.tid and h.job_ids is not null and (h.lost_ids is null or h.had is null))
    select count(*), array(select unnest(o.lost_ids) from held o),
           (array_agg(h.look_at order by h.look_at desc, h.tid desc))[1], (array_agg(h.tid order by h.look_at desc, h.tid desc))[1]
      into looked, late_ids, since, after from held h;
    lost := lost || late_ids;
    exit when looked < few or clock_timestamp() > until;
    -- On from the last one: what was done here is not walked again.
    few := least(few * 2, 200);
  end loop;
  return lost;
end $$;
comment on function pgqueue.look_at_claims(timestamptz) is
  'Forgets claims of which nothing runs any more, says when the others are to be looked at, and answers the jobs whose lease ran out.';

create function pgqueue.note_strays(pages bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  start constant bigint := (select s.stray_page from pgqueue.sweep_state s);
begin
  -- Somebody may have edited jobs_live itself, or claims. Part of the table each time, from where the last call ended.
  insert into pgqueue.claims (look_at, job_ids)
    select pgqueue.clock() - random() * interval '1 second', array_agg(n.job_id)
      from (select l.job_id, row_number() over () / 100 as part from pgqueue.jobs_live l
             where l.ctid >= format('(%s,0)', start)::tid and l.ctid < format('(%s,0)', start + pages)::tid
               and l.status = 'processing' and l.lease_expires_at < pgqueue.clock() - interval '1 minute'
               and l.job_id not in (select unnest(c.job_ids) from pgqueue.claims c)) n
     group by n.part;
  update pgqueue.sweep_state set stray_page = case
    when (start + pages) * current_setting('block_size')::bigint < pg_relation_size('pgqueue.jobs_live') then start + pages else 0 end;
end $$;
comment on function pgqueue.note_strays(bigint) is
  'Has the next sweep look at processing jobs whose lease ran out long ago and that no claim names.';

create function pgqueue.sweep_leases(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  half constant interval := (until - clock_timestamp()) / 2;
  -- So many that a few which somebody holds leave room for others.
  ids constant uuid[] := (pgqueue.look_at_claims(clock_timestamp() + half))[1:least(max_jobs, 1000000) + 5000];
  last constant timestamptz := greatest(until, clock_timestamp() + half);
  r record;
  j pgqueue.jobs;
  moved bigint := 0;
begin
  if ids = '{}' then
    return 0;
  end if;
  for r in
    with lost as materialized (
      select l.* from pgqueue.jobs_live l
       where l.job_id = any (ids) and l.status = 'processing' and l.lease_expires_at < pgqueue.clock()
       order by l.lease_expires_at limit max_jobs for update skip locked)
    select l as job, coalesce(w.name || ' (' || w.hostname || ', pid ' || w.pid || ')', l.worker_id::text) as worker,
           row_number() over (partition by l.worker_id order by l.started_at, l.priority, l.seq)
             <= coalesce(w.concurrency, max_jobs) as may_have_begun
      from lost l left join pgqueue.workers w on w.worker_id = l.worker_id
     order by l.lease_expires_at
  loop
    j := r.job;
    if r.may_have_begun then
      j.lost := least(j.lost, 2147483646) + 1;
    else
      -- A worker begins what it holds in order, and no more at once than its concurrency: this one was not begun, and does
      -- not die unrun with one worker after another.
      j.uncharged := least(j.uncharged, 2147483646) + 1;
      j.max_retries := least(j.max_retries + 1, 1000000);
    end if;
    j.errors := pgqueue.add_error(j.errors, pgqueue.error_record(j.attempts, j.worker_id, jsonb_build_object(
      'type', 'LeaseLost', 'message', format('worker %s let its lease run out at %s', r.worker, j.lease_expires_at)), true, j.started_at));
    if j.cancel_requested_at is not null then
      perform pgqueue.settle(j, 'cancelled', 'cancelled on request; worker ' || r.worker || ' was lost');
    elsif j.lost > coalesce((select q.max_lost from pgqueue.queues q where q.name = j.queue), 5) then
      perform pgqueue.settle(j, 'dead_letter', format('%s leases were lost, the last by worker %s', j.lost, r.worker));
    else
      -- The seq stays, so the job goes first.
      update pgqueue.jobs_live l
         set status = 'pending', lost = j.lost, uncharged = j.uncharged, max_retries = j.max_retries, errors = j.errors,
             error = 'the lease of worker ' || r.worker || ' ran out', lease_expires_at = null, updated_at = pgqueue.clock()
       where l.job_id = j.job_id;
      perform pgqueue.say_released(j);
    end if;
    moved := moved + 1;
    exit when clock_timestamp() > last;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_leases is 'A step of the sweep: takes back jobs whose leases ran out.';

create function pgqueue.sweep_timeouts(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  since constant timestamptz := (select s.timeouts_swept_to from pgqueue.sweep_state s);
  half constant interval := (until - clock_timestamp()) / 2;
  last timestamptz;
  tids tid[];
  ids uuid[];
  j record;
  moved bigint := 0;
begin
  -- Workers end attempts at their timeout; this is for those that do not, though they renew their leases.
  perform pgqueue.look_at_claims(clock_timestamp() + half);
  last := greatest(until, clock_timestamp() + half);
  select array_agg(distinct d.tid), array_agg(u.job_id) into tids, ids
    from (select c.ctid as tid, c.job_ids from pgqueue.claims c where c.timeout_at >= since and c.timeout_at <= pgqueue.clock()
           order by c.timeout_at limit 100 for update skip locked) d
   cross join unnest(d.job_ids) u(job_id);
  if tids is null then
    return 0;
  end if;
  for j in
    select l.worker_id, l.job_id, l.attempts, coalesce(l.timeout_ms, q.timeout_ms, 900000) as timeout_ms
      from pgqueue.jobs_live l left join pgqueue.queues q on q.name = l.queue
     where l.job_id = any (ids) and l.status = 'processing' and l.lease_expires_at >= pgqueue.clock()
       and l.started_at < pgqueue.clock() - (coalesce(l.timeout_ms, q.timeout_ms, 900000) + 10000::bigint) * interval '1 millisecond'
     order by l.lease_expires_at limit max_jobs for update of l skip locked
  loop
    perform pgqueue.fail(j.worker_id, j.job_id, j.attempts, jsonb_build_object('type', 'TimeoutError', 'message',
      format('the attempt ran longer than its timeout (%s s), and its worker did not end it', round(j.timeout_ms / 1000.0, 1))));
    -- Its worker lives, and may be at it still: it has time to say so (hold_retry), and lets go when the attempt is over.
    perform pgqueue.hold_retry(j.worker_id, array[j.job_id], array[j.attempts], interval '30 seconds');
    moved := moved + 1;
    exit when clock_timestamp() > last;
  end loop;
  if moved < max_jobs and clock_timestamp() <= last then
    -- The next look at these claims says when it is to come here again.
    update pgqueue.claims c set timeout_at = null, look_at = least(c.look_at, pgqueue.clock()) where c.ctid = any (tids);
  end if;
  return moved;
end $$;
comment on function pgqueue.sweep_timeouts is 'A step of the sweep: ends attempts that ran longer than their timeout though their worker lives.';
