-- Watch: what was counted, how fast it goes, what is wrong, how many workers it wants.
--
-- No job pays for being counted. Workers add up what they ran and hand it over with their signs of life (add_counts);
-- arrivals are read afterwards by the time in their ids (count_arrivals), so that an INSERT by any program counts.
-- Depths are counted along the indexes, from the claim cursors on, and never beyond a bound.

create table pgqueue.counters (
  queue text not null,
  job_type text not null,
  priority smallint not null,
  submitted bigint not null default 0,
  completed bigint not null default 0,
  failed bigint not null default 0,
  dead_letter bigint not null default 0,
  cancelled bigint not null default 0,
  snoozed bigint not null default 0,
  lost bigint not null default 0,
  duration_seconds double precision not null default 0,
  wait_seconds double precision not null default 0,
  durations bigint[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}',
  waits bigint[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}',
  updated_at timestamptz not null default pgqueue.clock(),
  primary key (queue, job_type, priority)
) with (fillfactor = 50);
comment on table pgqueue.counters is
  'Jobs that arrived, and attempts by how they ended, since ever. Names beyond a few hundred are counted as _OTHER.';
comment on column pgqueue.counters.durations is 'Attempts by run time, up to each of bucket_limits() and beyond the last.';
comment on column pgqueue.counters.waits is 'First attempts by the time from when the job could start to when it did.';

create table pgqueue.counter_samples (
  queue text not null,
  priority smallint not null,
  at timestamptz not null,
  submitted bigint not null,
  processed bigint not null,
  failed bigint not null,
  duration_seconds double precision not null,
  durations bigint[] not null,
  primary key (queue, priority, at)
);
comment on table pgqueue.counter_samples is 'Sums of counters of the last hour, a row for each ten seconds in which they changed.';

create table pgqueue.measures (
  only_row boolean primary key default true constraint "only_row must be true" check (only_row),
  arrivals_to timestamptz not null default clock_timestamp(),
  candidate_at timestamptz not null default clock_timestamp(),
  writers text[] not null default '{}',
  counted_at timestamptz not null default '-infinity',
  sampled_at timestamptz not null default '-infinity',
  alerts_at timestamptz not null default '-infinity',
  pushed_at timestamptz not null default '-infinity',
  pushed_submitted bigint not null default 0,
  audited_at timestamptz not null default '-infinity',
  below_cursor text[] not null default '{}'
) with (fillfactor = 50);
insert into pgqueue.measures default values;
insert into pgqueue.sweep_steps (step, last_run_at, last_duration_ms, last_jobs, runs)
  select s, pgqueue.clock(), 0, 0, 0 from unnest(array['measure', 'alerts']) s;
comment on table pgqueue.measures is 'What measuring remembers from one call to the next.';
comment on column pgqueue.measures.below_cursor is 'Queues in which the last audit found pending jobs where no claim looked, and had claims look there again.';
comment on column pgqueue.measures.arrivals_to is 'Jobs whose ids are of an earlier time are counted as submitted.';

create table pgqueue.late_arrivals (
  job_id uuid not null,
  queue text not null,
  job_type text not null,
  priority smallint not null
);
alter table pgqueue.late_arrivals replica identity full;
create index late_arrivals_id on pgqueue.late_arrivals (job_id);
comment on table pgqueue.late_arrivals is 'New jobs whose ids are older than they are, until they are counted: their time may have been counted before.';

-- Counting ----------------------------------------------------------------------------------------------------------

create function pgqueue.bucket_limits() returns double precision[]
  language sql immutable parallel safe
  as $$ select '{0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300,900,3600}'::double precision[] $$;
comment on function pgqueue.bucket_limits() is 'Seconds up to which the buckets of durations and waits reach; one more is beyond.';

create function pgqueue.add_buckets(a bigint[], b bigint[]) returns bigint[]
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select array_agg(coalesce(u.x, 0) + coalesce(u.y, 0) order by u.n) from unnest(a, b) with ordinality u(x, y, n) where u.n <= 17 $$;
comment on function pgqueue.add_buckets is 'Two histograms as one.';

create function pgqueue.add_to_counters(counts jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  room constant bigint := 400 - (select count(*) from pgqueue.counters);
begin
  -- Sorted, so that two of these wait for each other instead of deadlocking.
  insert into pgqueue.counters as c (queue, job_type, priority, submitted, completed, failed, dead_letter, cancelled, snoozed, lost,
                                     duration_seconds, wait_seconds, durations, waits)
  with given as (
    select n.*, c.queue is not null as known,
           count(*) filter (where c.queue is null) over (order by n.queue, n.job_type, n.priority) as newcomer
      from jsonb_to_recordset(counts) n(
             queue text, job_type text, priority smallint, submitted bigint, completed bigint, failed bigint, dead_letter bigint,
             cancelled bigint, snoozed bigint, lost bigint, duration_seconds double precision, wait_seconds double precision,
             durations bigint[], waits bigint[])
      left join pgqueue.counters c on c.queue = n.queue and c.job_type = n.job_type and c.priority = n.priority),
  named as (
    select case when g.known or g.newcomer <= room or g.job_type = 'pgqueue.webhook' then g.queue else '_OTHER' end as to_queue,
           case when g.known or g.newcomer <= room or g.job_type = 'pgqueue.webhook' then g.job_type else '_OTHER' end as to_type, g.*
      from given g),
  buckets as (
    select n.to_queue, n.to_type, n.priority, b.n, coalesce(sum(b.d), 0)::bigint as d, coalesce(sum(b.w), 0)::bigint as w
      from named n cross join lateral (
        select i as n, n.durations[i] as d, n.waits[i] as w from generate_series(1, 17) i) b
     group by n.to_queue, n.to_type, n.priority, b.n)
  select n.to_queue, n.to_type, n.priority, coalesce(sum(n.submitted), 0), coalesce(sum(n.completed), 0), coalesce(sum(n.failed), 0),
         coalesce(sum(n.dead_letter), 0), coalesce(sum(n.cancelled), 0), coalesce(sum(n.snoozed), 0), coalesce(sum(n.lost), 0),
         coalesce(sum(n.duration_seconds), 0), coalesce(sum(n.wait_seconds), 0),
         (select array_agg(b.d order by b.n) from buckets b where (b.to_queue, b.to_type, b.priority) = (n.to_queue, n.to_type, n.priority)),
         (select array_agg(b.w order by b.n) from buckets b where (b.to_queue, b.to_type, b.priority) = (n.to_queue, n.to_type, n.priority))
    from named n
   group by n.to_queue, n.to_type, n.priority
   order by n.to_queue, n.to_type, n.priority
  on conflict (queue, job_type, priority) do update
     set submitted = c.submitted + excluded.submitted, completed = c.completed + excluded.completed, failed = c.failed + excluded.failed,
         dead_letter = c.dead_letter + excluded.dead_letter, cancelled = c.cancelled + excluded.cancelled,
         snoozed = c.snoozed + excluded.snoozed, lost = c.lost + excluded.lost,
         duration_seconds = c.duration_seconds + excluded.duration_seconds, wait_seconds = c.wait_seconds + excluded.wait_seconds,
         durations = pgqueue.add_buckets(c.durations, excluded.durations), waits = pgqueue.add_buckets(c.waits, excluded.waits),
         updated_at = pgqueue.clock();
end $$;
comment on function pgqueue.add_to_counters(jsonb) is
  'Adds an array of {queue, job_type, priority, completed, failed, …, duration_seconds, wait_seconds, durations, waits} to the counters.';

create function pgqueue.add_counts(worker_id uuid, batch bigint, utilization double precision, counts jsonb) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- The number of the batch is the fence: one whose answer was lost is sent again and must not count twice.
  update pgqueue.workers w set counted = add_counts.batch, utilization = least(greatest(add_counts.utilization, 0), 1)
   where w.worker_id = add_counts.worker_id and w.counted < add_counts.batch;
  if found then
    perform pgqueue.add_to_counters(counts);
    return true;
  end if;
  return exists (select from pgqueue.workers w where w.worker_id = add_counts.worker_id);
end $$;
comment on function pgqueue.add_counts is
  'Takes what a worker has counted since its last batch, once for each batch number; false: it has no row, register again.';

create function pgqueue.first_id(since timestamptz) returns uuid
  language sql immutable strict parallel safe set search_path = pg_catalog, pg_temp
  as $$ select (lpad(to_hex(trunc(extract(epoch from since) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid $$;
comment on function pgqueue.first_id(timestamptz) is 'The lowest UUID that a job of this moment or later can have.';

create function pgqueue.count_arrivals() returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  st pgqueue.measures;
  now_is constant timestamptz := clock_timestamp();
  now_open constant text[] := pgqueue.open_writers();
  step interval := interval '5 seconds';
  upto timestamptz;
  found_now bigint;
  arrived jsonb;
  total bigint := 0;
begin
  select m.* into st from pgqueue.measures m;
  -- As with the claim cursors: what was written before the last look is committed once its writers are gone. One that
  -- stays for long holds up no more than that; its jobs, if they are of that time, are not counted. An id made elsewhere
  -- may be 250 ms older than its statement before jobs_arrived notes it as late.
  if st.writers && now_open and st.candidate_at > now_is - interval '10 minutes' then
    return 0;
  end if;
  while st.arrivals_to < st.candidate_at and total < 50000 loop
    upto := least(st.arrivals_to + step, st.candidate_at);
    with late as (
      -- In one statement, so that a late job is seen either here and by its time, or in neither way.
      delete from pgqueue.late_arrivals l where l.job_id < pgqueue.first_id(upto) returning l.*)
    select jsonb_agg(jsonb_build_object('queue', g.queue, 'job_type', g.job_type, 'priority', g.priority, 'submitted', g.jobs)),
           coalesce(sum(g.jobs), 0)
      into arrived, found_now
      from (
        select a.queue, a.job_type, a.priority, count(*) as jobs from (
          select l.queue, l.job_type, l.priority from late l where l.job_id < pgqueue.first_id(st.arrivals_to)
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_live j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_completed j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day'
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_cancelled j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day'
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_dead_letter j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day') a
         group by a.queue, a.job_type, a.priority) g;
    if found_now > 0 then
      perform pgqueue.add_to_counters(arrived);
      total := total + found_now;
    end if;
    st.arrivals_to := upto;
    step := case when found_now < 10000 then step * 2 else interval '5 seconds' end;
  end loop;
  update pgqueue.measures m
     set arrivals_to = st.arrivals_to, candidate_at = greatest(now_is - interval '300 milliseconds', st.arrivals_to), writers = now_open
   where st.arrivals_to >= st.candidate_at;
  update pgqueue.measures m set arrivals_to = st.arrivals_to where st.arrivals_to < st.candidate_at;
  return total;
end $$;
comment on function pgqueue.count_arrivals() is 'Counts jobs that arrived since its last call and whose writers have ended.';

create function pgqueue.measure() returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
declare
  now_is constant timestamptz := pgqueue.clock();
  st pgqueue.measures;
  more boolean := false;
  below text[];
  r record;
begin
  select m.* into st from pgqueue.measures m;
  if st.counted_at not between now_is - interval '1.9 seconds' and now_is then
    more := pgqueue.count_arrivals() >= 50000;
    update pgqueue.measures set counted_at = now_is where not more;
  end if;
  if st.sampled_at between now_is - interval '9.5 seconds' and now_is then
    return case when more then 50000 else 0 end;
  end if;
  insert into pgqueue.counter_samples (queue, priority, at, submitted, processed, failed, duration_seconds, durations)
  select t.queue, t.priority, pgqueue.clock(), t.submitted, t.processed, t.failed, t.duration_seconds, t.durations
    from pgqueue.counter_totals() t
    left join lateral (
      select s.submitted, s.processed, s.failed from pgqueue.counter_samples s
       where s.queue = t.queue and s.priority = t.priority order by s.at desc limit 1) l on true
   where (t.submitted, t.processed, t.failed) is distinct from (l.submitted, l.processed, l.failed)
  on conflict do nothing;
  -- The last one before the hour stays: it is where the hour begins.
  delete from pgqueue.counter_samples s
   where s.at < pgqueue.clock() - interval '1 hour'
     and exists (select from pgqueue.counter_samples n
                  where n.queue = s.queue and n.priority = s.priority and n.at > s.at and n.at < pgqueue.clock() - interval '1 hour');
  delete from pgqueue.counters c where c.updated_at < pgqueue.clock() - interval '30 days';
  delete from pgqueue.alert_events e where e.at < pgqueue.clock() - interval '30 days';
  if st.audited_at not between now_is - interval '10 minutes' and now_is then
    -- Rarely: below the cursors lie all the dead rows that an old snapshot keeps.
    below := '{}';
    for r in
      select c.queue, c.priority, f.seq from pgqueue.claim_starts c
       cross join lateral (
         select j.seq from pgqueue.jobs_live j
          where j.in_line and j.status = 'pending' and j.queue = c.queue and j.priority = c.priority and j.seq < c.low_seq
          order by j.seq limit 1) f
    loop
      perform pgqueue.lower_cursor(r.queue, r.priority, r.seq);
      below := below || r.queue;
    end loop;
    update pgqueue.measures set audited_at = now_is, below_cursor = array(select distinct u.queue from unnest(below) u(queue));
  end if;
  update pgqueue.measures set sampled_at = now_is;
  return case when more then 50000 else 0 end;
end $$;
comment on function pgqueue.measure() is 'A step of the sweep: counts arrivals, and every ten seconds notes the sums from which rates are made. Not 0: there is more to count.';

create function pgqueue.counter_totals() returns table (
  queue text, priority smallint, submitted bigint, processed bigint, failed bigint, duration_seconds double precision, durations bigint[])
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$
    select c.queue, c.priority, sum(c.submitted)::bigint,
           sum(c.completed + c.failed + c.dead_letter + c.cancelled + c.snoozed)::bigint, sum(c.failed + c.dead_letter)::bigint,
           sum(c.duration_seconds),
           array[sum(c.durations[1]), sum(c.durations[2]), sum(c.durations[3]), sum(c.durations[4]), sum(c.durations[5]),
                 sum(c.durations[6]), sum(c.durations[7]), sum(c.durations[8]), sum(c.durations[9]), sum(c.durations[10]),
                 sum(c.durations[11]), sum(c.durations[12]), sum(c.durations[13]), sum(c.durations[14]), sum(c.durations[15]),
                 sum(c.durations[16]), sum(c.durations[17])]::bigint[]
      from pgqueue.counters c where c.job_type <> 'pgqueue.webhook' group by c.queue, c.priority
  $$;
comment on function pgqueue.counter_totals() is
  'The counters by queue and priority: attempts processed, and of these failed. Without jobs that tell of alerts, which would raise alerts.';

create function pgqueue.rates(over_last interval default '1 minute') returns table (
  queue text, priority smallint, seconds double precision, submitted bigint, processed bigint, failed bigint,
  duration_seconds double precision, durations bigint[])
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    -- Whoever has no sample from before has only just begun. A sample is written only after a change.
    select t.queue, t.priority,
           case when b.at is null then extract(epoch from over_last)
                else extract(epoch from pgqueue.clock() - greatest(b.at, pgqueue.clock() - over_last - interval '10 seconds')) end,
           greatest(t.submitted - coalesce(b.submitted, 0), 0), greatest(t.processed - coalesce(b.processed, 0), 0),
           greatest(t.failed - coalesce(b.failed, 0), 0), greatest(t.duration_seconds - coalesce(b.duration_seconds, 0), 0),
           (select array_agg(greatest(u.x - coalesce(u.y, 0), 0) order by u.n) from unnest(t.durations, b.durations) with ordinality u(x, y, n))
      from pgqueue.counter_totals() t
      left join lateral (
        select s.* from pgqueue.counter_samples s
         where s.queue = t.queue and s.priority = t.priority and s.at <= pgqueue.clock() - over_last
         order by s.at desc limit 1) b on true
  $$;
comment on function pgqueue.rates(interval) is 'What the counters gained over the last while (up to an hour), and in how many seconds.';

create function pgqueue.history(over_last interval default '1 hour', points integer default 60)
  returns table (at timestamptz, submitted_per_second double precision, processed_per_second double precision, failed_per_second double precision)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
begin
  if over_last is null or over_last <= interval '0' or over_last > interval '1 year' then
    raise exception 'over_last must be positive and at most 1 year, not %', coalesce(over_last::text, 'null')
      using errcode = 'PQ422', column = 'over_last';
  elsif points is null or points < 1 then
    raise exception 'points must be at least 1, not %', coalesce(points::text, 'null') using errcode = 'PQ422', column = 'points';
  end if;
  return query
    with grid as (
      select n, pgqueue.clock() - over_last + over_last * n / least(points, 1000) as at from generate_series(0, least(points, 1000)) n),
    keys as (select distinct c.queue, c.priority from pgqueue.counters c),
    sums as (
      select g.n, g.at, coalesce(sum(s.submitted), 0) as submitted, coalesce(sum(s.processed), 0) as processed, coalesce(sum(s.failed), 0) as failed
        from grid g cross join keys k
        left join lateral (
          select c.submitted, c.processed, c.failed from pgqueue.counter_samples c
           where c.queue = k.queue and c.priority = k.priority and c.at <= g.at order by c.at desc limit 1) s on true
       group by g.n, g.at)
    select f.at, f.submitted / f.seconds, f.processed / f.seconds, f.failed / f.seconds
      from (select s.n, s.at, greatest(s.submitted - lag(s.submitted) over w, 0)::double precision as submitted,
                   greatest(s.processed - lag(s.processed) over w, 0)::double precision as processed,
                   greatest(s.failed - lag(s.failed) over w, 0)::double precision as failed,
                   extract(epoch from over_last)::double precision / least(points, 1000) as seconds
              from sums s window w as (order by s.n)) f
     where f.n > 0 order by f.n;
end $$;
comment on function pgqueue.history(interval, integer) is 'Rates of all queues at evenly spaced moments of the last hour, the oldest first.';

create function pgqueue.quantile(buckets bigint[], part double precision) returns double precision
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$
    -- Within its bucket by straight line, as Prometheus has it; beyond the last limit that limit.
    select b.low + (coalesce(b.high, b.low) - b.low) * (part * b.jobs - b.below) / b.here
      from (select coalesce(lag(u.high) over w, 0) as low, u.high, u.here, coalesce(sum(u.here) over w - u.here, 0)::double precision as below,
                   sum(u.here) over ()::double precision as jobs, u.n
              from unnest(buckets, pgqueue.bucket_limits()) with ordinality u(here, high, n) window w as (order by u.n)) b
     where b.here > 0 and b.below + b.here >= part * b.jobs
     order by b.n limit 1
  $$;
comment on function pgqueue.quantile(bigint[], double precision) is 'Seconds below which this part of what the buckets counted lies; null for nothing.';

-- Depths ------------------------------------------------------------------------------------------------------------

create function pgqueue.queue_counts() returns table (
  queue text, priority smallint, pending bigint, submitted bigint, processing bigint, failed bigint, oldest_pending_seconds double precision)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
#variable_conflict use_column
declare
  st pgqueue.sweep_state;
  others jsonb;
  k record;
  -- In all; a queue that is filled to its limits is seen whole.
  left_over bigint := 500000;
  became timestamptz;
begin
  select s.* into st from pgqueue.sweep_state s;
  select jsonb_object_agg(o.key, o.jobs) into others from (
    select l.status || ' ' || l.priority || ' ' || l.queue as key, count(*) as jobs from (
      (select j.status, j.priority, j.queue
         from (select distinct u.job_id from pgqueue.claims c cross join unnest(c.job_ids) u(job_id) where c.look_at >= st.claims_swept_to) n
        cross join lateral (select l.* from pgqueue.jobs_live l where l.job_id = n.job_id and l.status = 'processing' limit 1) j limit 50001)
      union all
      (select j.status, j.priority, j.queue from pgqueue.jobs_live j
        where j.status in ('submitted', 'failed') and j.due_at is not null and j.due_at >= st.due_swept_to limit 50001)
      union all
      (select j.status, j.priority, j.queue from pgqueue.jobs_live j
        where j.ordering_key is not null and not j.in_line and j.due_at is null limit 50001)) l
     group by l.status, l.priority, l.queue) o;
  for k in
    select n.queue, p.priority, coalesce(c.low_seq, 0) as low_seq
      from (select d.queue from pgqueue.queue_depths d
            union select s.queue from pgqueue.sweep_notes s where s.ordering_key is null
            union select q.name from pgqueue.queues q) n
     cross join unnest('{0,1,2,3}'::smallint[]) p(priority)
      left join pgqueue.claim_starts c on c.queue = n.queue and c.priority = p.priority
     order by n.queue, p.priority
  loop
    queue := k.queue;
    priority := k.priority;
    pending := 0;
    oldest_pending_seconds := null;
    -- The first have waited longest, but for those that came back to their old place.
    select min(w.updated_at) into became from (
      select j.updated_at from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = k.queue and j.priority = k.priority and j.seq >= k.low_seq
       order by j.seq limit 200) w;
    if became is not null then
      oldest_pending_seconds := greatest(extract(epoch from pgqueue.clock() - became), 0);
      select count(*) into pending from (
        select from pgqueue.jobs_live j
         where j.in_line and j.status = 'pending' and j.queue = k.queue and j.priority = k.priority and j.seq >= k.low_seq
         limit greatest(left_over, 1)) c;
      left_over := left_over - pending;
    end if;
    submitted := coalesce((others ->> ('submitted ' || k.priority || ' ' || k.queue))::bigint, 0);
    processing := coalesce((others ->> ('processing ' || k.priority || ' ' || k.queue))::bigint, 0);
    failed := coalesce((others ->> ('failed ' || k.priority || ' ' || k.queue))::bigint, 0);
    return next;
  end loop;
end $$;
comment on function pgqueue.queue_counts() is
  'Live jobs of every known queue by priority and status. Counts end at 500,000 pending jobs and at 50,001 of each other kind.';

create function pgqueue.dead_letter_counts() returns table (queue text, jobs bigint, webhooks bigint)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
begin
  return query
    select d.queue, count(*), count(*) filter (where d.job_type = 'pgqueue.webhook')
      from (select l.queue, l.job_type from pgqueue.jobs_dead_letter l order by l.job_id desc limit 10001) d group by d.queue;
end $$;
comment on function pgqueue.dead_letter_counts() is 'Dead letters by queue, and how many of them tell of alerts; counting ends at 10,001.';

create view pgqueue.queue_stats as
  select c.queue, c.priority, c.pending, c.submitted, c.processing, c.failed, c.oldest_pending_seconds, coalesce(q.paused, false) as paused,
         coalesce(r.submitted / r.seconds, 0) as submitted_per_second, coalesce(r.processed / r.seconds, 0) as processed_per_second,
         coalesce(r.failed / r.seconds, 0) as failed_per_second
    from pgqueue.queue_counts() c
    left join pgqueue.queues q on q.name = c.queue
    left join pgqueue.rates('1 minute') r on r.queue = c.queue and r.priority = c.priority
   where c.pending > 0 or c.submitted > 0 or c.processing > 0 or c.failed > 0 or r.submitted > 0 or r.processed > 0;
comment on view pgqueue.queue_stats is
  'Queues and priorities at work: live jobs by status, age of the oldest pending one, and jobs per second over the last minute.';

create function pgqueue.horizon() returns table (kind text, pid integer, since timestamptz, xmin_age integer, what text, query text)
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$
    select 'session', a.pid, a.xact_start, greatest(age(a.backend_xmin), age(a.backend_xid)),
           concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state), left(regexp_replace(a.query, '[[:space:]]+', ' ', 'g'), 80)
      from pg_stat_activity a
     where a.pid <> pg_backend_pid() and a.backend_type in ('client backend', 'walsender', 'background worker')
       and a.datname = current_database() and (a.backend_xmin is not null or a.backend_xid is not null)
    union all
    select 'prepared transaction', null, p.prepared, age(p.transaction), p.gid, null
      from pg_prepared_xacts p where p.database = current_database()
    union all
    select 'replication slot', s.active_pid, null, greatest(age(s.xmin), age(s.catalog_xmin)), s.slot_name, null
      from pg_replication_slots s where s.xmin is not null or s.catalog_xmin is not null
  $$;
comment on function pgqueue.horizon() is 'Who keeps dead rows from being removed: open transactions, prepared ones, replication slots.';
