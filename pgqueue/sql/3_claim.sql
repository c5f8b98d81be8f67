-- Claim. It costs the same however many rows wait, are finished, or must be passed over:
--   * it begins at claim_starts.low_seq, or where the last claim ended (claim_front), and takes jobs from the first that a
--     look from there has found;
--   * one statement looks into queues, in an order that changes with every claim, until it has found enough of them; one
--     more locks jobs of all of these, by a limit per queue and priority, and so no more rows than it takes;
--   * where the last sweep saw job types that this worker lacks, it goes type by type over jobs_live_pending_type;
--   * where workers divide the shards, it goes shard by shard over jobs_live_pending_shard as soon as others' lie ahead;
--   * of an ordering key only the head is pending; paused queues and types are left out before anything is read.
-- What it passes over are the jobs that run, between where it begins and the first that waits: few, as a sweep moves that
-- place up, but where jobs of other types or shards hold it back, all of its own that run.
-- Of many jobs a second thousands run or have run since that sweep. So a claim of many jobs notes its line (a queue's
-- priority, for workers of the same types and shards) and the last that it took: in a sequence, since a row would leave a
-- version for each claim. The next one begins there, if low_seq is far below. Between them waits only what came late, was
-- given back or was in a claim that failed: every sixteenth claim begins at low_seq all the same, and one that finds too
-- few goes back there. Claims of fewer than 25 jobs always begin at low_seq.
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

create function pgqueue.take_by_type(
  queue text, priority smallint, low_seq bigint, wanted int, job_types text[], shards smallint[],
  out tids tid[], out ids uuid[], out top bigint, out parts int)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  as $$
declare
  part tid[];
  part_ids uuid[];
  present text[];
  firsts bigint[];
  counts int[] := array[wanted];
begin
  parts := 0;
  -- Compared as rows, which jobs_live_pending cannot do: where statistics knew of one type only, the planner took it, and
  -- walked all jobs of the others.
  select array_agg(w.job_type), array_agg(w.first) into present, firsts from (
    select y.job_type, (
             select j.seq from pgqueue.jobs_live j
              where j.in_line and j.status = 'pending' and j.queue = take_by_type.queue
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
            where j.in_line and j.status = 'pending' and j.queue = take_by_type.queue
              and (j.job_type, j.priority, j.seq) >= (y.job_type, take_by_type.priority, y.first)
              and (j.job_type, j.priority, j.seq) < (y.job_type, take_by_type.priority + 1, 0)
              and (take_by_type.shards is null or j.shard = any (take_by_type.shards))
              and (j.expires_at is null or j.expires_at > pgqueue.clock())
            order by j.job_type, j.priority, j.seq limit wanted) h
         order by h.seq limit wanted) n
       group by n.job_type) o;
  end if;
  for i in 1 .. coalesce(cardinality(present), 0) loop
    select array_agg(s.ctid), array_agg(s.job_id), greatest(top, max(s.seq)) into part, part_ids, top from (
      select j.ctid, j.job_id, j.seq from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = take_by_type.queue
         and (j.job_type, j.priority, j.seq) >= (present[i], take_by_type.priority, firsts[i])
         and (j.job_type, j.priority, j.seq) < (present[i], take_by_type.priority + 1, 0)
         and (take_by_type.shards is null or j.shard = any (take_by_type.shards))
         and (j.expires_at is null or j.expires_at > pgqueue.clock())
       order by j.job_type, j.priority, j.seq limit counts[i] for update skip locked) s;
    tids := tids || part;
    ids := ids || part_ids;
    parts := parts + (part is not null)::int;
  end loop;
end $$;
comment on function pgqueue.take_by_type is
  'Locks up to `wanted` pending jobs of some types of one queue and priority, oldest first, without walking the other types. `parts`: of so many types, each in its order.';

create function pgqueue.index_shards() returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms'
  as $$
begin
  if to_regclass('pgqueue.jobs_live_pending_shard') is null then
    create index if not exists jobs_live_pending_shard on pgqueue.jobs_live (queue, shard, priority, seq) where in_line;
  end if;
  return true;
exception
  when lock_not_available or deadlock_detected then return false;
end $$;
comment on function pgqueue.index_shards() is
  'Owed by whoever claims by shards, which few do: every INSERT pays for the index. False: not now, come again.';

create function pgqueue.take_by_shard(
  queue text, priority smallint, low_seq bigint, wanted int, shards smallint[], job_types text[],
  out tids tid[], out ids uuid[], out top bigint, out parts int)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  as $$
declare
  t record;
  part tid[];
  part_ids uuid[];
  high bigint;
begin
  -- A short walk finds them where the shards are mixed; where others' lie ahead, the index of shards does.
  select max(w.seq) into high from (
    select j.seq from pgqueue.jobs_live j
     where j.in_line and j.status = 'pending' and j.queue = take_by_shard.queue and j.priority = take_by_shard.priority and j.seq >= low_seq
     order by j.seq limit wanted * 4 + 100) w;
  select array_agg(s.ctid), array_agg(s.job_id), max(s.seq) into tids, ids, top from (
    select j.ctid, j.job_id, j.seq from pgqueue.jobs_live j
     where j.in_line and j.status = 'pending' and j.queue = take_by_shard.queue and j.priority = take_by_shard.priority
       and j.seq >= low_seq and j.seq <= high
       and j.shard = any (take_by_shard.shards)
       and (take_by_shard.job_types is null or j.job_type = any (take_by_shard.job_types))
       and (j.expires_at is null or j.expires_at > pgqueue.clock())
     order by j.seq limit wanted for update skip locked) s;
  parts := (tids is not null)::int;
  wanted := wanted - coalesce(cardinality(tids), 0);
  if wanted = 0 then
    return;
  end if;
  for t in
    select o.shard, count(*)::int as jobs from (
      select h.shard, h.seq from unnest(take_by_shard.shards) y(shard)
       cross join lateral (
         select j.shard, j.seq from pgqueue.jobs_live j
          where j.in_line and j.status = 'pending' and j.queue = take_by_shard.queue
            and (j.shard, j.priority, j.seq) > (y.shard, take_by_shard.priority, high)
            and (j.shard, j.priority, j.seq) < (y.shard, take_by_shard.priority + 1, 0)
            and (take_by_shard.job_types is null or j.job_type = any (take_by_shard.job_types))
            and (j.expires_at is null or j.expires_at > pgqueue.clock())
          order by j.shard, j.priority, j.seq limit wanted) h
       order by h.seq limit wanted) o
     group by o.shard
  loop
    select array_agg(s.ctid), array_agg(s.job_id), greatest(top, max(s.seq)) into part, part_ids, top from (
      select j.ctid, j.job_id, j.seq from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = take_by_shard.queue
         and (j.shard, j.priority, j.seq) > (t.shard, take_by_shard.priority, high)
         and (j.shard, j.priority, j.seq) < (t.shard, take_by_shard.priority + 1, 0)
         and (take_by_shard.job_types is null or j.job_type = any (take_by_shard.job_types))
         and (j.expires_at is null or j.expires_at > pgqueue.clock())
       order by j.shard, j.priority, j.seq limit t.jobs for update skip locked) s;
    tids := tids || part;
    ids := ids || part_ids;
    parts := parts + (part is not null)::int;
  end loop;
end $$;
comment on function pgqueue.take_by_shard is
  'Locks up to `wanted` pending jobs of some shards of one queue and priority, oldest first, without walking the other shards. `parts`: in so many pieces, each in its order.';

create function pgqueue.take(
  queues text[], max_jobs int, job_types text[], priorities smallint[], shards smallint[],
  out tids tid[], out ids uuid[], out visited text[], out leases interval[])
  language plpgsql
  set enable_indexscan = on set enable_memoize = off
  as $$
#variable_conflict use_column
declare
  tick constant bigint := nextval('pgqueue.claim_tick');
  front bigint;
  front_seq bigint;
  front_line bigint;
  alike bigint;
  by_front boolean;
  alone boolean;
  to_seq bigint;
  top bigint;
  wanted_types text[] := take.job_types;
  wanted_priorities constant smallint[] := coalesce(take.priorities, '{0,1,2,3}');
  by_shard boolean := false;
  -- A queue's turn comes round, so a claim need not take from a thousand of them, nor from many for a few jobs. Those that
  -- give nothing, since their jobs are of other types or others hold them, do not count; looks for the others widen.
  visits_left int := 16;
  jobs_per_visit constant int := 25;
  wider int := 1;
  giving int;
  slots int := 0;
  names text[];
  candidates int;
  start int := 0;
  stride int := 1;
  next_n int := 0;
  visits int;
  visit text[];
  lease_of interval[];
  weights smallint[];
  firsts bigint[];
  kinds int[];
  types_paused boolean;
  left_over int := max_jobs;
  pool int;
  own int[];
  gave int[];
  open int;
  part int;
  waits int;
  first_p int;
  share int[];
  line_i int[];
  line_p int[];
  line_want int[];
  taken record;
  part_tids tid[];
  part_ids uuid[];
  got int;
  parts int := 0;
begin
  if take.queues is null then
    select coalesce(max(d.slot) + 1, 0), array(select n.queue from pgqueue.sweep_notes n where n.ordering_key is null)
      into slots, names from pgqueue.queue_depths d;
    if cardinality(names) > 0 then
      names := array(
        select distinct n from unnest(names) n
         where not exists (select from pgqueue.queue_depths d where d.queue = n and d.slot < slots));
    end if;
  else
    names := array(select distinct n from unnest(take.queues) n);
  end if;
  if take.shards is not null then
    -- An index that was made while claims went on is not for transactions that may still see what was before.
    by_shard := exists (
      select from pg_index i where i.indexrelid = to_regclass('pgqueue.jobs_live_pending_shard')
         and (not i.indcheckxmin or age(i.xmin) > age(pg_snapshot_xmin(pg_current_snapshot())::xid)));
  end if;
  candidates := slots + cardinality(names);
  if candidates = 0 then
    return;
  end if;
  -- From places in golden-section steps and by another stride each time: whichever queues have work, all come first
  -- equally often.
  if candidates > 1 then
    start := ((tick & 2147483647) * 2654435769 & 4294967295) * candidates >> 32;
    stride := 1 + (hashint8(tick) & 2147483647) % candidates;
    while gcd(stride, candidates) <> 1 loop
      stride := stride + 1;
    end loop;
  end if;
  if max_jobs >= 25 then
    alike := hash_array_extended(coalesce(take.job_types, '{}'), coalesce(hash_array_extended(take.shards, 0), 0));
    front := pg_sequence_last_value('pgqueue.claim_front'::regclass);
    if hashint8(tick) & 15 > 0 then
      front_line := front >> 46;
      front_seq := front & 70368744177663;
    end if;
  end if;

  while left_over > 0 and visits_left > 0 loop
    visits := least(greatest(least(left_over, 4), left_over / jobs_per_visit), visits_left) * wider;
    -- Jobs are taken from the first that is found here on, so that what an old snapshot keeps in the index is walked once.
    -- The order, of which `exists` would make nothing, keeps the planner off jobs_live_pending_type.
    select array_agg(v.queue), array_agg(v.lease), array_agg(v.weights), array_agg(v.kind), array_agg(v.firsts), max(v.n) + 1,
           bool_or(v.by_front), exists (select from pgqueue.job_type_pauses t where t.until > pgqueue.clock())
      into visit, lease_of, weights, kinds, firsts, next_n, by_front, types_paused from (
      select n, k.queue, coalesce(q.lease_ms * interval '1 millisecond', interval '30 seconds') as lease,
             case when q.lease_ms is null then '{8,4,2,1}' else coalesce(q.weights, '{0,0,0,0}') end as weights,
             case when s.by_type then 1 when by_shard then 2 else 0 end as kind, f.firsts, s.by_front
        from (select generate_series(next_n, candidates - 1) as n) turns
       cross join lateral (
         select case when o.slot < slots then (select d.queue from pgqueue.queue_depths d where d.slot = o.slot)
                     else names[o.slot - slots + 1] end as queue
           from (select ((start + n::bigint * stride) % candidates)::int as slot) o offset 0) k
        left join lateral (select q.paused, q.lease_ms, q.weights from pgqueue.queues q where q.name = k.queue limit 1) q on true
       cross join lateral (
         select array_agg(l.priority) as priorities, array_agg(case when l.by_front then front_seq else l.low_seq end) as start_seqs,
                bool_or(l.by_front) as by_front, bool_or(not l.job_types <@ take.job_types) as by_type
           from (
             select c.priority, c.low_seq, c.job_types, front_seq > c.low_seq + 500
                    and front_line = (hashtextextended(k.queue, alike) & 32767) * 4 + c.priority as by_front
               from (select c.priority, c.low_seq, c.job_types from pgqueue.claim_starts c where c.queue = k.queue offset 0) c) l) s
       cross join lateral (
         select array_agg(case when p = any (wanted_priorities) then (
                  select j.seq from pgqueue.jobs_live j
                   where j.in_line and j.status = 'pending' and j.queue = k.queue and j.priority = p::smallint
                     and j.seq >= coalesce(s.start_seqs[array_position(s.priorities, p::smallint)], 0)
                   order by j.seq limit 1) end) as firsts
           from generate_series(0, 3) p
         offset 0) f
       where q.paused is not true and (f.firsts <> array[null, null, null, null]::bigint[] or s.by_front)
       limit visits) v;
    exit when visit is null;
    if types_paused then
      wanted_types := array(
        select t from unnest(coalesce(take.job_types, pgqueue.job_types_waiting(visit))) t
         where not exists (select from pgqueue.job_type_pauses p where p.job_type = t and p.until > pgqueue.clock()));
      if wanted_types is distinct from take.job_types then
        kinds := array_fill(1, array[cardinality(visit)]);
      end if;
    end if;
    alone := cardinality(visit) = 1 and kinds[1] = 0 and num_nonnulls(firsts[1][1], firsts[1][2], firsts[1][3], firsts[1][4]) = 1;
    if by_front and not (alone and firsts[1][(front_line & 3) + 1] is not null) then
      -- What is to be shared, by whole lines.
      front_line := null;
      next_n := 0;
      continue;
    end if;

    if alone then
      -- Nothing is to be shared, as with most claims of few jobs: one statement, and no arithmetic.
      first_p := case when firsts[1][1] is not null then 1 when firsts[1][2] is not null then 2
                      when firsts[1][3] is not null then 3 else 4 end;
      loop
        select array_agg(s.ctid), array_agg(s.job_id), max(s.seq) into part_tids, part_ids, top from (
          select j.ctid, j.job_id, j.seq from pgqueue.jobs_live j
           where j.in_line and j.status = 'pending' and j.queue = visit[1] and j.priority = (first_p - 1)::smallint
             and j.seq >= firsts[1][first_p] and j.seq <= coalesce(to_seq, 9223372036854775807)
             and (wanted_types is null or j.job_type = any (wanted_types))
             and (take.shards is null or j.shard = any (take.shards))
             and (j.expires_at is null or j.expires_at > pgqueue.clock())
           order by j.seq limit left_over for update skip locked) s;
        giving := (part_tids is not null)::int;
        tids := tids || part_tids;
        ids := ids || part_ids;
        parts := parts + giving;
        left_over := left_over - coalesce(cardinality(part_tids), 0);
        exit when left_over = 0 or by_front is not true;
        -- Too few: on with what may wait between the cursor and the front. A claim by the front looks for four queues or
        -- more and found this one, so it ends here: nothing after this loop sees to_seq again.
        by_front := false;
        to_seq := firsts[1][first_p] - 1;
        firsts[1][first_p] := (select s.low_seq from pgqueue.claim_starts s where s.queue = visit[1] and s.priority = first_p - 1);
      end loop;
      if left_over = 0 and max_jobs >= 25 and top < 70368744177663 then
        perform setval('pgqueue.claim_front', ((hashtextextended(visit[1], alike) & 32767) * 4 + first_p - 1) << 46 | top + 1);
      end if;
    else
      own := array_fill(0, array[cardinality(visit)]);
      gave := array_fill(0, array[cardinality(visit)]);
      pool := left_over;
      while left_over > 0 loop
        open := 0;
        for i in 1 .. cardinality(visit) loop
          if num_nonnulls(firsts[i][1], firsts[i][2], firsts[i][3], firsts[i][4]) > 0 then
            open := open + 1;
          else
            pool := pool + own[i];
            own[i] := 0;
          end if;
        end loop;
        exit when open = 0;
        line_i := '{}';
        line_p := '{}';
        line_want := '{}';
        for i in 1 .. cardinality(visit) loop
          waits := num_nonnulls(firsts[i][1], firsts[i][2], firsts[i][3], firsts[i][4]);
          continue when waits = 0;
          -- An even part of what is to be had, by shares, of which those without takers go to the highest priority that
          -- waits; as does, in the next round, what a priority has left. What a queue has left then goes to the others.
          part := ceil(pool::numeric / open);
          pool := pool - part;
          open := open - 1;
          first_p := case when firsts[i][1] is not null then 1 when firsts[i][2] is not null then 2
                          when firsts[i][3] is not null then 3 else 4 end;
          share := '{0,0,0,0}';
          if waits > 1 and part > 0 and weights[i][1] + weights[i][2] + weights[i][3] + weights[i][4] > 0 then
            share := pgqueue.shares(array[weights[i][1], weights[i][2], weights[i][3], weights[i][4]], part, tick);
            for p in 1 .. 4 loop
              if firsts[i][p] is null then
                share[first_p] := share[first_p] + share[p];
                share[p] := 0;
              end if;
            end loop;
          else
            share[first_p] := part;
          end if;
          share[first_p] := share[first_p] + own[i];
          own[i] := own[i] + part;
          for p in first_p .. 4 loop
            if share[p] > 0 then
              line_i := line_i || i;
              line_p := line_p || p;
              line_want := line_want || share[p];
            end if;
          end loop;
        end loop;

        for taken in
          select l.i, l.p, l.want, t.tids, t.ids, t.top, 1 as parts from unnest(line_i, line_p, line_want) l(i, p, want)
           cross join lateral (
             select array_agg(s.ctid) as tids, array_agg(s.job_id) as ids, max(s.seq) as top from (
               select j.ctid, j.job_id, j.seq from pgqueue.jobs_live j
                where j.in_line and j.status = 'pending' and j.queue = visit[l.i] and j.priority = (l.p - 1)::smallint and j.seq >= firsts[l.i][l.p]
                  and (wanted_types is null or j.job_type = any (wanted_types))
                  and (take.shards is null or j.shard = any (take.shards))
                  and (j.expires_at is null or j.expires_at > pgqueue.clock())
                order by j.seq limit l.want for update skip locked) s) t
           where kinds[l.i] = 0
          union all
          select l.i, l.p, l.want, t.tids, t.ids, t.top, t.parts from unnest(line_i, line_p, line_want) l(i, p, want)
           cross join lateral pgqueue.take_by_type(
             visit[l.i], (l.p - 1)::smallint, firsts[l.i][l.p], l.want, wanted_types, take.shards) t
           where kinds[l.i] = 1
          union all
          select l.i, l.p, l.want, t.tids, t.ids, t.top, t.parts from unnest(line_i, line_p, line_want) l(i, p, want)
           cross join lateral pgqueue.take_by_shard(
             visit[l.i], (l.p - 1)::smallint, firsts[l.i][l.p], l.want, take.shards, wanted_types) t
           where kinds[l.i] = 2
        loop
          got := coalesce(cardinality(taken.tids), 0);
          gave[taken.i] := gave[taken.i] + got;
          tids := tids || taken.tids;
          ids := ids || taken.ids;
          parts := parts + case when got = 0 then 0 else taken.parts end;
          left_over := left_over - got;
          own[taken.i] := own[taken.i] - got;
          -- The next round begins behind what this one took, since SKIP LOCKED does not skip one's own.
          firsts[taken.i][taken.p] := case when got = taken.want then least(taken.top, 9223372036854775806) + 1 end;
        end loop;
      end loop;
      giving := cardinality(array_remove(gave, 0));
    end if;
    visited := visited || visit;
    leases := leases || lease_of;
    exit when cardinality(visit) < visits;
    front_line := null;
    visits_left := visits_left - giving;
    wider := case when giving = 0 then least(wider * 2, 16) else 1 end;
  end loop;

  if parts > 1 then
    tids := array(select j.ctid from pgqueue.jobs_live j where j.ctid = any (tids) order by j.priority, j.seq);
  end if;
end $$;
comment on function pgqueue.take is
  'Locks what a claim is to take (`tids` in priority, seq order, `ids` in any); answers the queues visited, and their leases. Runs under the settings of claim.';

create function pgqueue.say_started(job_ids uuid[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on
  as $$
begin
  perform pgqueue.publish(array_agg(pgqueue.event('job.started', j.job_id, j.queue, j.job_type, 'pending', 'processing', j.attempts)
                                    order by j.priority, j.seq))
     from pgqueue.jobs_live j where j.job_id = any (say_started.job_ids);
end $$;
comment on function pgqueue.say_started is 'Tells watchers which jobs a claim took.';

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
  select n.tids, n.ids, n.visited, n.leases into t
    from pgqueue.take(claim.queues, max_jobs, claim.job_types, claim.priorities, claim.shards) n;
  if t.tids is null then
    return;
  end if;
  lease_of_all := coalesce(claim.lease, case when cardinality(t.leases) = 1 then t.leases[1] end);
  -- Before the sweep looks here most batches are over.
  insert into pgqueue.claims (look_at, job_ids)
    values (pgqueue.clock() + least(interval '1 second', coalesce(lease_of_all, (select min(l) from unnest(t.leases) l))), t.ids);
  return query
    update pgqueue.jobs_live j
       set status = 'processing', attempts = j.attempts + 1, worker_id = claim.worker_id,
           lease_expires_at = pgqueue.clock() + coalesce(lease_of_all, t.leases[array_position(t.visited, j.queue)]),
           started_at = pgqueue.clock(), updated_at = pgqueue.clock(), progress = null
      from unnest(t.tids) u(tid)
     where j.ctid = u.tid
    returning j.*;
  if exists (select from pgqueue.watchers) and pgqueue.watched() then
    perform pgqueue.say_started(t.ids);
  end if;
end $$;
comment on function pgqueue.claim is
  'Takes up to max_jobs pending jobs under a lease, by priority shares; answers them in priority, seq order.';

create function pgqueue.job_types_waiting(queues text[]) returns text[]
  language sql stable set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    -- A loose scan: one probe of the index per type, not one row per job.
    with recursive t as (
      select q.queue, (select min(j.job_type) from pgqueue.jobs_live j where j.in_line and j.status = 'pending' and j.queue = q.queue) as job_type
        from unnest(queues) q(queue)
      union all
      select t.queue, (select min(j.job_type) from pgqueue.jobs_live j
                        where j.in_line and j.status = 'pending' and j.queue = t.queue and j.job_type > t.job_type)
        from t where t.job_type is not null)
    select coalesce(array_agg(distinct t.job_type), '{}') from t where t.job_type is not null
  $$;
comment on function pgqueue.job_types_waiting is 'Job types of which jobs wait in these queues.';
