-- Limits of depth and rate: what an INSERT owes to the queue that it fills.
--
-- A transaction that was let in is not slowed down for what it took itself, or one with several statements could never
-- succeed: it owes all of it, and whoever comes next waits. What says so is an advisory lock, which goes with the
-- transaction or the savepoint. Whoever takes that lock by hand is not slowed down; a limit is no right.

create function pgqueue.let_in(bucket text) returns void
  language sql set search_path = pg_catalog, pg_temp
  -- Tried, so that nobody who holds it otherwise can keep a producer waiting.
  as $$ select pg_try_advisory_xact_lock_shared(1885827434, hashtext(bucket)) $$;
comment on function pgqueue.let_in(text) is 'Notes that this transaction was given from a bucket.';

create function pgqueue.was_let_in(bucket text) returns boolean
  language sql set search_path = pg_catalog, pg_temp
  as $$
    select exists (select from pg_locks l where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.mode = 'ShareLock'
                      and (l.classid, l.objid, l.objsubid) = (1885827434, hashtext(bucket)::oid, 2))
  $$;
comment on function pgqueue.was_let_in(text) is 'Whether this transaction was given from a bucket before.';

create function pgqueue.note_queue(queue text) returns void
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
begin
  -- One note will do, since claims look into each queue that is noted. Those that others have not committed yet come besides.
  if not exists (select from pgqueue.queue_depths d where d.queue = note_queue.queue)
     and not exists (select from pgqueue.sweep_notes n where n.queue = note_queue.queue and n.ordering_key is null) then
    insert into pgqueue.sweep_notes (queue) values (note_queue.queue);
  end if;
end $$;
comment on function pgqueue.note_queue(text) is 'Tells the next sweep of a queue that none has seen.';

create function pgqueue.uncounted_bound(queue text, top bigint, soft_limit int, hard_limit int) returns bigint
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
begin
  perform pgqueue.note_queue(queue);
  -- No sweep has counted the queue, so its jobs are younger than the last sweep but one.
  return (select top - w.candidate_before from pgqueue.sweep_state w
           where top - w.candidate_before <= least(soft_limit, hard_limit) and hard_limit > 10000);
end $$;
comment on function pgqueue.uncounted_bound(text, bigint, int, int) is
  'As many jobs may be pending in a queue that no sweep has counted, which the next one is told of; null: too many to say. `top`: the highest seq of the new ones.';

create function pgqueue.admit(queue text, ready bigint, bound bigint, settings pgqueue.queues, low boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
declare
  hard_limit constant int := coalesce(settings.hard_limit, 100000);
  soft_limit constant int := coalesce(settings.soft_limit, 50000);
  depth bigint := bound;
begin
  -- Half of a small limit, since what others have not committed yet is not in anybody's count.
  if coalesce(depth, 9223372036854775807) > (case when hard_limit > 10000 then hard_limit else hard_limit / 2 end) then
    depth := pgqueue.check_depth(queue, hard_limit);
  end if;
  if depth > soft_limit then
    perform pgqueue.slow_down(queue, soft_limit, ready, low);
  end if;
  if settings.rate_per_second is not null then
    perform pgqueue.take_rate(queue, settings.rate_per_second, ready);
  end if;
end $$;
comment on function pgqueue.admit(text, bigint, bigint, pgqueue.queues, boolean) is
  'Owed by an insert of `ready` pending jobs into a queue: refuses them where they are too many. `bound`: as many may be pending, null: nobody knows; `low`: some are shed where low ones are.';

create function pgqueue.count_pending(queue text, most bigint) returns bigint
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  low bigint;
  found bigint;
  counted bigint := 0;
begin
  -- From where claims begin, or dead entries would be walked. Volatile: each call looks anew.
  for p in 0 .. 3 loop
    low := coalesce((select c.low_seq from pgqueue.claim_starts c where c.queue = count_pending.queue and c.priority = p), 0);
    select count(*) into found from (
      select from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = count_pending.queue and j.priority = p::smallint and j.seq >= low
       order by j.seq limit most - counted) n;
    counted := counted + found;
    exit when counted >= most;
  end loop;
  return counted;
end $$;
comment on function pgqueue.count_pending(text, bigint) is 'How many jobs are pending in a queue, counted up to `most`.';

create function pgqueue.check_depth(queue text, hard_limit bigint) returns bigint
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off set lock_timeout = '900ms'
  as $$
declare
  depth bigint;
begin
  -- The bound in queue_depths was not enough to say yes. Count; near the limit one producer at a time. Near a small limit
  -- is everywhere, since batches that others have not committed yet are in nobody's count.
  if hard_limit > 10000 then
    depth := pgqueue.count_pending(queue, hard_limit + 1);
    if depth <= hard_limit / 4 then
      return depth;
    end if;
  end if;
  begin
    perform pg_advisory_xact_lock(1885827430, hashtext(queue));
  exception
    -- Rather a batch too many than every producer behind one that leaves its transaction open.
    when lock_not_available then null;
  end;
  depth := pgqueue.count_pending(queue, hard_limit + 1);
  if depth > hard_limit then
    raise exception 'queue "%" is full: more than % jobs are pending', queue, hard_limit
      using errcode = 'PQ503', hint = 'Retry later, or raise hard_limit in pgqueue.queues.';
  end if;
  return depth;
end $$;
comment on function pgqueue.check_depth is 'How many jobs are pending in a queue, for the limit''s sake: near it one producer counts at a time.';

create function pgqueue.slow_down(queue text, soft_limit bigint, jobs bigint, low boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  now_ms constant bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
  used bigint;
begin
  -- Without sweeps nobody counts again what is left.
  if not exists (select from pgqueue.sweep_state w where w.candidate_at > pgqueue.clock() - interval '40 seconds')
     and pgqueue.count_pending(queue, soft_limit + 1) <= soft_limit then
    return;
  end if;
  if low then
    raise exception 'queue "%" sheds jobs of low priority: more than % jobs are pending', queue, soft_limit
      using errcode = 'PQ503', hint = 'Retry later; shed_low and soft_limit in pgqueue.queues say so.';
  end if;
  -- A job is a millisecond of the bucket's time. A sequence, since whoever takes from it must not keep others waiting
  -- until it commits. More than there is may be taken at once, by up to ten seconds: it is paid back by waiting.
  select t.last_value into used from pgqueue.tokens t;
  if used > now_ms and not pgqueue.was_let_in('tokens') then
    raise exception 'queue "%" has more than % jobs pending, and producers of such queues share 1000 jobs a second', queue, soft_limit
      using errcode = 'PQ429', detail = format('retry after %s s', round((used - now_ms) / 1000.0, 3)),
            hint = 'Retry later, or raise soft_limit in pgqueue.queues.';
  elsif used < now_ms - 1000 then
    perform setval('pgqueue.tokens', now_ms - 1000);
    used := now_ms - 1000;
  end if;
  perform pgqueue.let_in('tokens');
  perform nextval('pgqueue.tokens') from generate_series(1, least(jobs, now_ms + 10000 - used));
end $$;
comment on function pgqueue.slow_down(text, bigint, bigint, boolean) is
  'Owed by an insert into a queue above its soft limit: refuses low jobs that are shed (PQ503), and jobs beyond 1,000 a second (PQ429).';

create function pgqueue.take_rate(queue text, per_second integer, jobs bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  name constant text := 'queue:' || queue;
  now_is timestamptz;
  b pgqueue.token_buckets;
begin
  -- Producers of a queue with a rate take turns. A batch may take more than there is: it is paid back by waiting, but for
  -- no longer than a minute, or one batch could close the queue for hours.
  insert into pgqueue.token_buckets (bucket, tokens, filled_at) values (name, per_second, clock_timestamp()) on conflict do nothing;
  select t.* into b from pgqueue.token_buckets t where t.bucket = name for update;
  now_is := clock_timestamp();
  b.tokens := least(per_second, greatest(b.tokens, -60.0 * per_second) + greatest(extract(epoch from now_is - b.filled_at), 0) * per_second);
  if b.tokens < 1 and not pgqueue.was_let_in(name) then
    raise exception 'queue "%" takes % jobs a second', queue, per_second
      using errcode = 'PQ429', detail = format('retry after %s s', round(((1 - b.tokens) / per_second)::numeric, 3)),
            hint = 'Retry later, or raise rate_per_second in pgqueue.queues.';
  end if;
  update pgqueue.token_buckets t set tokens = b.tokens - jobs, filled_at = now_is where t.bucket = name;
  perform pgqueue.let_in(name);
end $$;
comment on function pgqueue.take_rate(text, integer, bigint) is 'Holds a queue to its rate_per_second (PQ429).';

create function pgqueue.arrive(queue text, top bigint, ready bigint, low boolean, job_types text[]) returns void
  language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
declare
  g record;
  bound bigint;
  hard_limit int;
  soft_limit int;
begin
  select (select q from pgqueue.queues q where q.name = arrive.queue) as settings,
         (select d.pending + top - d.counted_at_seq from pgqueue.queue_depths d where d.queue = arrive.queue and d.counted_at_seq >= 0) as bound,
         exists (select from pgqueue.waiting) as sleepers
    into g;
  hard_limit := coalesce((g.settings).hard_limit, 100000);
  soft_limit := coalesce((g.settings).soft_limit, 50000);
  bound := g.bound;
  if bound is null then
    bound := pgqueue.uncounted_bound(arrive.queue, top, soft_limit, hard_limit);
  end if;
  if ready = 0 then
    return;
  end if;
  if coalesce(bound, 9223372036854775807) > least(soft_limit, hard_limit / 2) or (g.settings).rate_per_second is not null then
    perform pgqueue.admit(queue, ready, bound, g.settings, low and (g.settings).shed_low is true);
  end if;
  if g.sleepers and job_types is not null then
    perform pgqueue.ring(queue, job_types);
  end if;
end $$;
comment on function pgqueue.arrive(text, bigint, bigint, boolean, text[]) is
  'Owed for each queue by whoever inserts `ready` pending jobs. `top`: the highest seq of the new jobs; `low`: pending ones are of low priority; `job_types`: of each of them, null where nobody is to be woken.';
