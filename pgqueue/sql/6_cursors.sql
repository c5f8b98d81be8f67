-- Claim cursors advance in two sweeps. The first notes the next seq to be drawn (the candidate) and then who is writing
-- to jobs: an INSERT takes its lock on the root before it draws a seq, and keeps it to the end of its transaction,
-- prepared or not. Once none of those writers is open any more, every lower seq is committed or gone, and a cursor may
-- rise to the lowest pending seq that a fresh snapshot shows, but not above the candidate. Whoever makes a job pending at
-- an old seq leaves a row in lowered_cursors, which claims heed until a sweep that sees the job as well takes it away.
-- A writer that stays open is left behind after five seconds, or it would stop the cursors, and with time the claims: as
-- soon as it has ended, a sweep looks again from the first seq that it may have drawn.
-- The indexes of claims and of due jobs have dead ends too: sweeps begin a minute before the moment of the last such candidate.

create function pgqueue.open_writers() returns text[]
  language plpgsql volatile security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- plpgsql, which keeps the plan. PREPARE TRANSACTION keeps the virtual transaction and loses the pid.
  return (
    select coalesce(array_agg(distinct l.virtualtransaction), '{}') from pg_locks l
     where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
       and l.database = (select d.oid from pg_database d where d.datname = current_database())
       and l.relation in ('pgqueue.jobs'::regclass, 'pgqueue.jobs_live'::regclass)
       and l.pid is distinct from pg_backend_pid());
end $$;
comment on function pgqueue.open_writers() is 'The transactions that may have drawn a seq and not ended yet, prepared ones included.';

create function pgqueue.sweep_cursors(max_jobs int) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  st pgqueue.sweep_state;
  now_open text[];
  late text[];
  left_behind jsonb;
  back_to bigint;
  next_seq bigint;
  ceiling bigint;
  cursors int;
  given_back text[] := '{}';
  full_sweep boolean;
  counted_long boolean := false;
  r record;
  counted bigint;
  moved bigint := 0;
begin
  -- A queue is known once it has its row of depth and its four cursors.
  for r in delete from pgqueue.sweep_notes n where n.ordering_key is null returning n.queue loop
    insert into pgqueue.queue_depths (queue, pending, counted_at_seq, slot)
      select r.queue, 0, -9000000000000000000, coalesce(max(d.slot) + 1, 0) from pgqueue.queue_depths d
      on conflict (queue) do nothing;
    insert into pgqueue.claim_cursors (queue, priority) select r.queue, p from generate_series(0, 3) p on conflict do nothing;
  end loop;

  select s.* into st from pgqueue.sweep_state s;
  select s.last_value + s.is_called::int into next_seq from pgqueue.jobs_seq s;
  now_open := pgqueue.open_writers();
  if next_seq < st.candidate_seq then
    -- jobs_seq was set back, or this is a subscriber that took over, to which no sequence is replicated: whatever was
    -- reckoned in seqs counts from the beginning, as if no sweep had been.
    update pgqueue.claim_cursors set low_seq = 0, job_types = null;
    update pgqueue.queue_depths d set counted_at_seq = 0, pending = pgqueue.count_pending(d.queue, coalesce((
      select q.hard_limit from pgqueue.queues q where q.name = d.queue), 100000) + 1);
    update pgqueue.sweep_state
       set candidate_seq = next_seq, candidate_at = pgqueue.clock(), candidate_before = 0, writers = now_open, stragglers = '{}';
    return 1;
  end if;
  late := array(select w from unnest(now_open) w where w = any (st.writers));
  back_to := (select min(e.value::bigint) from jsonb_each_text(st.stragglers) e where e.key <> all (now_open));
  if cardinality(late) = 0 or st.candidate_at not between pgqueue.clock() - interval '5 seconds' and pgqueue.clock() then
    ceiling := st.candidate_seq;
    -- What was not among the writers at the candidate before can have drawn nothing below it. A prepared transaction that
    -- a restart has found again goes by a name that says nothing.
    left_behind := coalesce((
      select jsonb_object_agg(w, coalesce(st.stragglers -> w, to_jsonb(case when w like '-1/%' then 0 else st.candidate_before end)))
        from unnest(now_open) w where st.stragglers ? w or w = any (late) or w like '-1/%'), '{}');
  elsif back_to is null then
    return 0;
  end if;

  if ceiling > 0 or back_to is not null then
    select count(*) into cursors from pgqueue.claim_cursors;
    for r in
      with lowered as (delete from pgqueue.lowered_cursors returning queue, priority, seq),
      starts as (
        select c.queue, c.priority, c.low_seq, c.job_types, l.seq is not null as lowered, least(c.low_seq, l.seq, back_to) as start
          from pgqueue.claim_cursors c
          left join (select w.queue, w.priority, min(w.seq) as seq from lowered w group by w.queue, w.priority) l
            on l.queue = c.queue and l.priority = c.priority)
      select c.queue, c.priority, c.low_seq, c.lowered, t.job_types, c.job_types as had,
             least(coalesce(n.lowest, ceiling, c.low_seq), coalesce(ceiling, c.low_seq)) as new_low
        from starts c
        cross join lateral (
          select (select j.seq from pgqueue.jobs_live j
                   where j.in_line and j.status = 'pending' and j.queue = c.queue and j.priority = c.priority and j.seq >= c.start
                   order by j.seq limit 1) as lowest) n
        cross join lateral (
          -- The head of the line tells whether a claim that wants some types must go type by type.
          select array_agg(distinct h.job_type) as job_types from (
            select j.job_type from pgqueue.jobs_live j
             where j.in_line and j.status = 'pending' and j.queue = c.queue and j.priority = c.priority and j.seq >= n.lowest
             order by j.seq limit case when cursors <= 64 then 50 else 5 end) h) t
    loop
      if r.lowered then
        given_back := given_back || r.queue;
      end if;
      -- Rarely enough that an old snapshot, which keeps every version of a cursor, does not make reading it slow.
      continue when r.new_low >= r.low_seq and r.new_low < r.low_seq + greatest(500, 20 * cursors)
        and r.job_types is not distinct from r.had;
      update pgqueue.claim_cursors c
         set low_seq = case when r.new_low < r.low_seq or r.new_low >= r.low_seq + greatest(500, 20 * cursors) then r.new_low else c.low_seq end,
             job_types = r.job_types
       where c.queue = r.queue and c.priority = r.priority;
      moved := moved + greatest(r.new_low - r.low_seq, 1);
    end loop;
  end if;

  if ceiling > 0 then
    -- Jobs that were given back drew no seq, so the bound does not know of them; nor does it of a straggler's.
    update pgqueue.queue_depths d set counted_at_seq = st.candidate_seq, pending = pgqueue.count_pending(l.queue, l.hard_limit + 1)
      from (select n.queue, coalesce(q.hard_limit, 100000) as hard_limit
              from pgqueue.queue_depths n left join pgqueue.queues q on q.name = n.queue) l
     where l.queue = d.queue
       and (d.queue = any (given_back) or back_to is not null or st.candidate_seq - d.counted_at_seq::numeric >= greatest(l.hard_limit / 8, 100));

    -- Producers of a queue above its soft limit are slowed down: let them go as soon as it has been drained; where counting
    -- takes long, within a second.
    for r in
      select n.queue, n.soft_limit from (
        select d.queue, d.pending, d.counted_at_seq, coalesce(q.soft_limit, 50000) as soft_limit
          from pgqueue.queue_depths d left join pgqueue.queues q on q.name = d.queue) n
       where n.pending + (st.candidate_seq - n.counted_at_seq::numeric) > n.soft_limit
         and n.counted_at_seq > 0
         and (n.soft_limit <= 5000 or st.soft_counted_at not between pgqueue.clock() - interval '0.8 seconds' and pgqueue.clock())
    loop
      counted := pgqueue.count_pending(r.queue, r.soft_limit + 1);
      update pgqueue.queue_depths d set counted_at_seq = st.candidate_seq, pending = counted
       where d.queue = r.queue and counted <= r.soft_limit - r.soft_limit / 20;
      counted_long := counted_long or r.soft_limit > 5000;
    end loop;
    update pgqueue.sweep_state set soft_counted_at = pgqueue.clock() where counted_long;
  end if;

  if ceiling is null then
    update pgqueue.sweep_state set claims_swept_to = '-infinity', timeouts_swept_to = '-infinity', due_swept_to = '-infinity';
  elsif next_seq <> st.candidate_seq or cardinality(now_open) > 0 or left_behind <> st.stragglers
     or st.candidate_at not between pgqueue.clock() - interval '30 seconds' and pgqueue.clock()
  then
    full_sweep := st.full_sweep_at not between pgqueue.clock() - interval '10 minutes' and pgqueue.clock();
    update pgqueue.sweep_state
       set candidate_seq = next_seq, candidate_at = pgqueue.clock(), candidate_before = st.candidate_seq,
           writers = array(select w from unnest(now_open) w where not left_behind ? w), stragglers = left_behind,
           claims_swept_to = case when full_sweep or back_to is not null then '-infinity'
             else least(st.candidate_at - interval '1 minute', (
               select c.look_at from pgqueue.claims c where c.look_at >= st.claims_swept_to order by c.look_at limit 1)) end,
           timeouts_swept_to = case when full_sweep or back_to is not null then '-infinity'
             else least(st.candidate_at - interval '1 minute', (
               select c.timeout_at from pgqueue.claims c where c.timeout_at >= st.timeouts_swept_to order by c.timeout_at limit 1)) end,
           due_swept_to = case when full_sweep or back_to is not null then '-infinity'
             else least(st.candidate_at - interval '1 minute', (
               select l.due_at from pgqueue.jobs_live l
                where l.status in ('submitted', 'failed') and l.due_at is not null and l.due_at >= st.due_swept_to
                order by l.due_at limit 1)) end,
           full_sweep_at = case when full_sweep then pgqueue.clock() else st.full_sweep_at end;
    if full_sweep then
      perform pgqueue.note_headless_keys(5000);
      perform pgqueue.note_strays(50000);
    end if;
  end if;
  return moved;
end $$;
comment on function pgqueue.sweep_cursors is 'A step of the sweep: raises claim cursors, counts queues.';
