-- Claim and heartbeat.
--
-- A claim costs the same however many rows wait, are finished, or must be passed over:
--   * it begins at claim_starts.low_seq, read into variables first: a join with the cursor hides the limit from the planner;
--   * one statement per queue and priority that has work, which locks no more rows than it takes;
--   * where the last sweep saw job types that this worker lacks, it goes type by type over jobs_live_pending_type;
--   * where workers divide the shards, it goes shard by shard over jobs_live_pending_shard as soon as others' lie ahead;
--   * of an ordering key only the head is pending; paused queues and types are left out before anything is read.
-- The plans are pinned: generic, and by index, since statistics of a queue table are always of another moment.

create function pgqueue.shares(weights smallint[], wanted int, tick bigint) returns int[]
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
declare
  total constant int := weights[1] + weights[2] + weights[3] + weights[4];
  got int[] := array[weights[1] * (wanted / total), weights[2] * (wanted / total),
                     weights[3] * (wanted / total), weights[4] * (wanted / total)];
  rest constant int := wanted % total;
  stride int := greatest(1, (total * 0.382)::int);
  slot int;
begin
  -- The rest of a division is dealt from a wheel with one place per share, walked in golden-section steps, so that
  -- claims of any size come out even over a turn, and a priority never comes in a long run. Every turn begins one place
  -- further on: a queue that gets every third or fifth tick only must come by all places too.
  if rest > 0 then
    while gcd(stride, total) <> 1 loop
      stride := stride + 1;
    end loop;
    for i in 0 .. rest - 1 loop
      slot := ((tick % total * rest + i) * stride + tick / total) % total;
      if slot < weights[1] then got[1] := got[1] + 1;
      elsif slot < weights[1] + weights[2] then got[2] := got[2] + 1;
      elsif slot < total - weights[4] then got[3] := got[3] + 1;
      else got[4] := got[4] + 1;
      end if;
    end loop;
  end if;
  return got;
end $$;
comment on function pgqueue.shares(smallint[], int, bigint) is
  'How many of `wanted` jobs each priority gets; exact over a turn of `tick` for a given claim size.';

create function pgqueue.queues_with_work(tick bigint) returns text[]
  language sql stable set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    with known as (
      select d.queue from pgqueue.queue_depths d
      union
      select n.queue from pgqueue.sweep_notes n where n.ordering_key is null),
    working as (
      select k.queue from known k
       where not exists (select from pgqueue.queues q where q.name = k.queue and q.paused) and exists (
         select from unnest('{0,1,2,3}'::smallint[]) p(priority)
          where (
            select j.seq from pgqueue.jobs_live j
             where j.status = 'pending' and j.queue = k.queue and j.priority = p.priority
               and j.seq >= coalesce((select c.low_seq from pgqueue.claim_starts c
                                       where c.queue = k.queue and c.priority = p.priority), 0)
             order by j.seq limit 1) is not null))
    select array_agg(w.queue order by hashtext(w.queue || tick::text)) from working w
  $$;
comment on function pgqueue.queues_with_work(bigint) is 'The queues in which something is pending, in an order that changes with tick.';

create function pgqueue.take_by_type(
  queue text, priority smallint, low_seq bigint, wanted int, job_types text[], shards smallint[], out tids tid[], out top bigint)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  as $$
declare
  part tid[];
  present text[];
  firsts bigint[];
  counts int[] := array[wanted];
begin
  -- Compared as rows, which jobs_live_pending cannot do: where statistics knew of one type only, the planner took it, and
  -- walked all jobs of the others.
  select array_agg(w.job_type), array_agg(w.first) into present, firsts from (
    select y.job_type, (
             select j.seq from pgqueue.jobs_live j
              where j.status = 'pending' and j.queue = take_by_type.queue
                and (j.job_type, j.priority, j.seq) >= (y.job_type, take_by_type.priority, low_seq)
                and (j.job_type, j.priority, j.seq) < (y.job_type, take_by_type.priority + 1, 0)
              order by j.job_type, j.priority, j.seq limit 1) as first
      from unnest(take_by_type.job_types) y(job_type)) w
   where w.first is not null;
  if cardinality(present) > 1 then
    -- Which of the oldest jobs are of which type, then as many of each.
    select array_agg(o.job_type), array_agg(o.first), array_agg(o.jobs) into present, firsts, counts from (
      select n.job_type, min(n.seq) as first, count(*)::int as jobs from (
        select h.job_type, h.seq from unnest(present, firsts) y(job_type, first)
         cross join lateral (
           select j.job_type, j.seq from pgqueue.jobs_live j
            where j.status = 'pending' and j.queue = take_by_type.queue
              and (j.job_type, j.priority, j.seq) >= (y.job_type, take_by_type.priority, y.first)
              and (j.job_type, j.priority, j.seq) < (y.job_type, take_by_type.priority + 1, 0)
              and (take_by_type.shards is null or j.shard = any (take_by_type.shards))
              and (j.expires_at is null or j.expires_at > pgqueue.clock())
            order by j.job_type, j.priority, j.seq limit wanted) h
         order by h.seq limit wanted) n
       group by n.job_type) o;
  end if;
  for i in 1 .. coalesce(cardinality(present), 0) loop
    select array_agg(s.ctid), greatest(top, max(s.seq)) into part, top from (
      select j.ctid, j.seq from pgqueue.jobs_live j
       where j.status = 'pending' and j.queue = take_by_type.queue
         and (j.job_type, j.priority, j.seq) >= (present[i], take_by_type.priority, firsts[i])
         and (j.job_type, j.priority, j.seq) < (present[i], take_by_type.priority + 1, 0)
         and (take_by_type.shards is null or j.shard = any (take_by_type.shards))
         and (j.expires_at is null or j.expires_at > pgqueue.clock())
       order by j.job_type, j.priority, j.seq limit counts[i] for update skip locked) s;
    tids := tids || part;
  end loop;
end $$;
comment on function pgqueue.take_by_type is
  'Locks up to `wanted` pending jobs of some types of one queue and priority, oldest first, without walking the other types.';

create function pgqueue.index_shards() returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms'
  as $$
begin
  if to_regclass('pgqueue.jobs_live_pending_shard') is null then
    create index if not exists jobs_live_pending_shard on pgqueue.jobs_live (queue, shard, priority, seq) where status = 'pending';
  end if;
  return true;
exception
  when lock_not_available or deadlock_detected then return false;
end $$;
comment on function pgqueue.index_shards() is
  'Owed by whoever claims by shards, which few do: every INSERT pays for the index. False: not now, come again.';

create function pgqueue.take_by_shard(
  queue text, priority smallint, after_seq bigint, wanted int, shards smallint[], job_types text[], out tids tid[], out top bigint)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  as $$
declare
  t record;
  part tid[];
begin
  for t in
    select o.shard, count(*)::int as jobs from (
      select h.shard, h.seq from unnest(take_by_shard.shards) y(shard)
       cross join lateral (
         select j.shard, j.seq from pgqueue.jobs_live j
          where j.status = 'pending' and j.queue = take_by_shard.queue
            and (j.shard, j.priority, j.seq) > (y.shard, take_by_shard.priority, after_seq)
            and (j.shard, j.priority, j.seq) < (y.shard, take_by_shard.priority + 1, 0)
            and (take_by_shard.job_types is null or j.job_type = any (take_by_shard.job_types))
            and (j.expires_at is null or j.expires_at > pgqueue.clock())
          order by j.shard, j.priority, j.seq limit wanted) h
       order by h.seq limit wanted) o
     group by o.shard
  loop
    select array_agg(s.ctid), greatest(top, max(s.seq)) into part, top from (
      select j.ctid, j.seq from pgqueue.jobs_live j
       where j.status = 'pending' and j.queue = take_by_shard.queue
         and (j.shard, j.priority, j.seq) > (t.shard, take_by_shard.priority, after_seq)
         and (j.shard, j.priority, j.seq) < (t.shard, take_by_shard.priority + 1, 0)
         and (take_by_shard.job_types is null or j.job_type = any (take_by_shard.job_types))
         and (j.expires_at is null or j.expires_at > pgqueue.clock())
       order by j.shard, j.priority, j.seq limit t.jobs for update skip locked) s;
    tids := tids || part;
  end loop;
end $$;
comment on function pgqueue.take_by_shard is
  'Locks up to `wanted` pending jobs of some shards of one queue and priority, oldest first, without walking the other shards.';

create function pgqueue.take(
  queues text[], max_jobs int, lease interval, job_types text[], priorities smallint[], shards smallint[],
  out tids tid[], out visited text[], out leases interval[])
  language plpgsql
  set enable_indexscan = on
  as $$
#variable_conflict use_column
declare
  tick constant bigint := nextval('pgqueue.claim_tick');
  wanted_types text[] := take.job_types;
  -- A queue's turn comes round, so a claim need not visit a thousand of them.
  visit_at_most constant int := 16;
  names text[] := take.queues;
  q text;
  s record;
  low bigint[];
  seen text[];
  work boolean[];
  by_type boolean;
  share int[];
  first_p int;
  want int;
  taken record;
  in_order boolean;
  left_over int;
  quota int;
  more boolean[];
  i int;
  once_round int;
  behind bigint[] := '{}';
  p_now smallint;
  low_now bigint;
  high_now bigint := 9223372036854775807;
  by_shard constant boolean := take.shards is not null and to_regclass('pgqueue.jobs_live_pending_shard') is not null;
begin
  if names is null then
    names := array(select d.queue from pgqueue.queue_depths d
                   union select n.queue from pgqueue.sweep_notes n where n.ordering_key is null limit 5);
  end if;
  if cardinality(names) > 4 then
    names := array(select n from unnest(pgqueue.queues_with_work(tick)) n where take.queues is null or n = any (take.queues)
                    limit visit_at_most);
  elsif cardinality(names) > 1 then
    names := array(select distinct n from unnest(names) n);
    names := names[1 + tick % cardinality(names) :] || names[: tick % cardinality(names)];
  end if;
  if exists (select from pgqueue.job_type_pauses t where t.until > pgqueue.clock()) then
    wanted_types := array(
      select t from unnest(coalesce(take.job_types, pgqueue.job_types_waiting(names))) t
       where not exists (select from pgqueue.job_type_pauses p where p.job_type = t and p.until > pgqueue.clock()));
  end if;

  left_over := max_jobs;
  once_round := coalesce(cardinality(names), 0);
  i := 0;
  while i < cardinality(names) and left_over > 0 loop
    i := i + 1;
    q := names[i];
    select coalesce(q1.paused, false) as paused, coalesce(q1.lease_ms, 30000) as lease_ms,
           case when q1.name is null then '{8,4,2,1}' else q1.weights end as weights
      into s from (select) one left join pgqueue.queues q1 on q1.name = q;
    continue when s.paused;

    low := '{0,0,0,0}';
    by_type := wanted_types is distinct from take.job_types;
    for taken in select c.priority, c.low_seq, c.job_types from pgqueue.claim_starts c where c.queue = q loop
      low[taken.priority + 1] := taken.low_seq;
      by_type := by_type or (wanted_types is not null and taken.job_types is not null and not taken.job_types <@ wanted_types);
    end loop;
    if i > once_round then
      -- Behind what the first round took: SKIP LOCKED does not skip one's own.
      low := behind[4 * (i - once_round) - 3 : 4 * (i - once_round)];
    end if;

    -- The order, of which `exists` would make nothing, keeps the planner off jobs_live_pending_type. What an old snapshot
    -- keeps in the index is walked once: the jobs are taken from the first that is found on.
    select array[
      (select j.seq from pgqueue.jobs_live j where j.status = 'pending' and j.queue = q and j.priority = 0::smallint and j.seq >= low[1] order by j.seq limit 1),
      (select j.seq from pgqueue.jobs_live j where j.status = 'pending' and j.queue = q and j.priority = 1::smallint and j.seq >= low[2] order by j.seq limit 1),
      (select j.seq from pgqueue.jobs_live j where j.status = 'pending' and j.queue = q and j.priority = 2::smallint and j.seq >= low[3] order by j.seq limit 1),
      (select j.seq from pgqueue.jobs_live j where j.status = 'pending' and j.queue = q and j.priority = 3::smallint and j.seq >= low[4] order by j.seq limit 1)]
      into low;
    work := array[low[1] is not null, low[2] is not null, low[3] is not null, low[4] is not null];
    if take.priorities is not null then
      for p in 1 .. 4 loop
        work[p] := work[p] and (p - 1)::smallint = any (take.priorities);
      end loop;
    end if;
    first_p := array_position(work, true);
    continue when first_p is null;

    -- Even parts of what is left for the queues still to be visited; what one does not use goes to the next.
    quota := ceil(left_over::numeric / ((case when i <= once_round then once_round else cardinality(names) end) - i + 1));
    if s.weights is null then
      share := '{0,0,0,0}';
      share[first_p] := quota;
    else
      share := pgqueue.shares(s.weights, quota, tick);
    end if;
    -- Shares without takers go to the highest priority that waits, then down, and once more round for what is still left.
    want := 0;
    for p in 1 .. 4 loop
      if not work[p] then
        want := want + share[p];
        share[p] := 0;
      end if;
    end loop;
    more := work;
    for p in 1 .. 8 loop
      first_p := (p - 1) % 4 + 1;
      continue when not more[first_p];
      want := want + case when p <= 4 then share[first_p] else 0 end;
      if want > 0 then
        p_now := first_p - 1;
        if by_type then
          select t.tids, t.top into taken
            from pgqueue.take_by_type(q, p_now, low[first_p], want, wanted_types, take.shards) t;
        else
          low_now := low[first_p];
          if by_shard then
            -- A short walk finds them where the shards are mixed; where others' lie ahead, the index of shards does.
            high_now := coalesce((select max(w.seq) from (
              select j.seq from pgqueue.jobs_live j
               where j.status = 'pending' and j.queue = q and j.priority = p_now and j.seq >= low_now
               order by j.seq limit want * 4 + 100) w), low_now);
          end if;
          select array_agg(s.ctid) as tids, max(s.seq) as top into taken from (
            select j.ctid, j.seq from pgqueue.jobs_live j
             where j.status = 'pending' and j.queue = q and j.priority = p_now and j.seq >= low_now and j.seq <= high_now
               and (wanted_types is null or j.job_type = any (wanted_types))
               and (take.shards is null or j.shard = any (take.shards))
               and (j.expires_at is null or j.expires_at > pgqueue.clock())
             order by j.seq limit want for update skip locked) s;
          if by_shard and coalesce(cardinality(taken.tids), 0) < want then
            select taken.tids || t.tids as tids, greatest(taken.top, t.top) as top into taken
              from pgqueue.take_by_shard(q, p_now, high_now, want - coalesce(cardinality(taken.tids), 0), take.shards, wanted_types) t;
          end if;
        end if;
        if taken.tids is not null then
          in_order := tids is null and not by_type and not by_shard;
          tids := tids || taken.tids;
          left_over := left_over - cardinality(taken.tids);
          low[first_p] := least(taken.top, 9223372036854775806) + 1;
        end if;
        more[first_p] := coalesce(cardinality(taken.tids), 0) = want;
        want := want - coalesce(cardinality(taken.tids), 0);
      end if;
      exit when p >= 4 and want = 0;
    end loop;
    visited := visited || q;
    leases := leases || coalesce(take.lease, s.lease_ms * interval '1 millisecond');
    if i < once_round and true = any (more) then
      -- It has more than its part: it gets what the queues behind it leave.
      names := names || q;
      behind := behind || low;
    end if;
  end loop;

  if not in_order then
    tids := array(select j.ctid from pgqueue.jobs_live j where j.ctid = any (tids) order by j.priority, j.seq);
  end if;
end $$;
comment on function pgqueue.take is
  'Locks what a claim is to take, in priority, seq order; answers the leases of the queues visited. Runs under the settings of claim.';

create function pgqueue.claim(
  worker_id uuid, queues text[], max_jobs int, lease interval default null, job_types text[] default null,
  priorities smallint[] default null, shards smallint[] default null)
  returns setof pgqueue.jobs
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  -- What is left for its own statement is to fetch the rows one by one, in the order of their ids, and so to answer them.
  set enable_indexscan = off set enable_hashjoin = off set enable_mergejoin = off
  as $$
#variable_conflict use_column
declare
  t record;
  lease_of_all interval;
begin
  if claim.worker_id is null or max_jobs is null or max_jobs < 1 then
    raise exception 'claim needs a worker_id and max_jobs of at least 1, not % and %', claim.worker_id, max_jobs
      using errcode = 'PQ422', column = 'max_jobs';
  end if;
  if claim.lease <= interval '0' or claim.lease > interval '1 day' then
    raise exception 'lease must be positive and at most 1 day, but is %', claim.lease using errcode = 'PQ422', column = 'lease';
  end if;
  select n.tids, n.visited, n.leases into t
    from pgqueue.take(claim.queues, max_jobs, claim.lease, claim.job_types, claim.priorities, claim.shards) n;
  if t.tids is null then
    return;
  end if;
  lease_of_all := coalesce(claim.lease, case when cardinality(t.leases) = 1 then t.leases[1] end);
  return query
    update pgqueue.jobs_live j
       set status = 'processing', attempts = j.attempts + 1, worker_id = claim.worker_id,
           lease_expires_at = pgqueue.clock() + coalesce(lease_of_all, t.leases[array_position(t.visited, j.queue)]),
           started_at = pgqueue.clock(), updated_at = pgqueue.clock(), progress = null, ordering_key = j.ordering_key
      from unnest(t.tids) u(tid)
     where j.ctid = u.tid
    returning j.*;
  if exists (select from pgqueue.watchers) and pgqueue.watched() then
    perform pgqueue.publish(array_agg(pgqueue.event('job.started', j.job_id, j.queue, j.job_type, 'pending', 'processing', j.attempts)
                                      order by j.priority, j.seq))
       from pgqueue.jobs_live j
      where j.status = 'processing' and j.worker_id = claim.worker_id and j.xmin = pg_current_xact_id()::xid
        and j.lease_expires_at >= pgqueue.clock();
  end if;
end $$;
comment on function pgqueue.claim is
  'Takes up to max_jobs pending jobs under a lease, by priority shares; answers them in priority, seq order.';

create function pgqueue.job_types_waiting(queues text[]) returns text[]
  language sql stable set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    -- A loose scan: one probe of the index per type, not one row per job.
    with recursive t as (
      select q.queue, (select min(j.job_type) from pgqueue.jobs_live j where j.status = 'pending' and j.queue = q.queue) as job_type
        from unnest(queues) q(queue)
      union all
      select t.queue, (select min(j.job_type) from pgqueue.jobs_live j
                        where j.status = 'pending' and j.queue = t.queue and j.job_type > t.job_type)
        from t where t.job_type is not null)
    select coalesce(array_agg(distinct t.job_type), '{}') from t where t.job_type is not null
  $$;

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
       where j.job_id = any (heartbeat.job_ids) and j.worker_id = heartbeat.worker_id and (j.status = 'processing') is true
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
                and (j.status = 'processing') is true);
end $$;
comment on function pgqueue.heartbeat is
  'Renews the leases of a worker''s attempts; answers those that were lost, and those whose cancel was requested.';
