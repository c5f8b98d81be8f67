-- Sweep: what time does to jobs. Any number of processes may call sweep() as often as they like: each step takes a
-- try-lock, is bounded, and leaves the rest to its next call. Partitions are made and dropped by maintain_partitions(),
-- in a call of its own, since its locks last to the end of the transaction.

create function pgqueue.sweep_due(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  since constant timestamptz := (select s.due_swept_to from pgqueue.sweep_state s);
  few int;
  tids tid[];
  statuses text[];
  too_late uuid[];
  j pgqueue.jobs;
  r record;
  moved bigint := 0;
begin
  loop
    few := least(max_jobs - moved, 500);
    -- A job that failed longer ago than its queue keeps failed ones is not tried again.
    select array_agg(d.ctid order by d.due_at, d.seq) filter (where not d.late),
           array_agg(d.status order by d.due_at, d.seq) filter (where not d.late),
           array_agg(d.job_id order by d.due_at, d.seq) filter (where d.late)
      into tids, statuses, too_late
      from (select l.ctid, l.job_id, l.due_at, l.seq, l.status,
                   l.status = 'failed' and l.due_at >= l.updated_at
                     + coalesce((select least(q.failed_ttl, interval '100 years') from pgqueue.queues q where q.name = l.queue), interval '7 days') as late
              from pgqueue.jobs_live l
             where l.status in ('submitted', 'failed') and l.due_at is not null and l.due_at >= since and l.due_at <= pgqueue.clock()
             order by l.due_at limit few for update skip locked) d;

    for r in
      with numbered as materialized (
        -- A new seq: they join the tail, in the order in which they became due.
        select u.tid, u.was, nextval('pgqueue.jobs_seq') as seq from unnest(tids, statuses) u(tid, was)),
      promoted as (
        update pgqueue.jobs_live l
           set status = 'pending', seq = n.seq, due_at = null, updated_at = pgqueue.clock()
          from numbered n where l.ctid = n.tid
        returning l.job_id, l.queue, l.job_type, l.attempts, l.seq, n.was)
      select p.queue, array_agg(p.job_type) as job_types,
             case when pgqueue.watched() then
               array_agg(pgqueue.event('job.queued', p.job_id, p.queue, p.job_type, p.was, 'pending', p.attempts) order by p.seq) end as events
        from promoted p group by p.queue order by p.queue
    loop
      perform pgqueue.ring(r.queue, r.job_types);
      perform pgqueue.publish(r.events);
    end loop;
    for j in select l.* from pgqueue.jobs_live l where l.job_id = any (too_late) loop
      perform pgqueue.settle(j, 'dead_letter', 'its retry lay beyond the time that failed jobs are kept; last error: ' || coalesce(j.error, 'none'));
    end loop;
    moved := moved + coalesce(cardinality(tids), 0) + coalesce(cardinality(too_late), 0);
    exit when coalesce(cardinality(tids), 0) + coalesce(cardinality(too_late), 0) < few or moved >= max_jobs or clock_timestamp() > until;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_due is 'A step of the sweep: makes jobs pending whose time has come.';

create function pgqueue.paused_for(queue text, since timestamptz) returns interval
  language sql stable set search_path = pg_catalog, pg_temp
  as $$
    select coalesce(sum(coalesce(p.resumed_at, pgqueue.clock()) - greatest(p.paused_at, since)), interval '0')
      from pgqueue.queue_pauses p
     where p.queue = paused_for.queue and coalesce(p.resumed_at, pgqueue.clock()) > since
  $$;
comment on function pgqueue.paused_for(text, timestamptz) is 'For how long the queue has been paused since then.';

create function pgqueue.waiting_since(queue text, ttl interval) returns timestamptz
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  since timestamptz := pgqueue.clock() - ttl;
  earlier timestamptz;
begin
  loop
    earlier := pgqueue.clock() - ttl - pgqueue.paused_for(queue, since);
    exit when earlier >= since;
    since := earlier;
  end loop;
  return since;
end $$;
comment on function pgqueue.waiting_since(text, interval) is
  'Whoever was pending in the queue before then has waited longer than that, not counting pauses.';

create function pgqueue.sweep_expired(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  j pgqueue.jobs;
  c record;
  few bigint;
  moved bigint := 0;
  before timestamptz;
  start bigint;
  looked_at bigint;
  in_order boolean;
  top bigint;
  ids uuid[];
begin
  for j in
    select l.* from pgqueue.jobs_live l
     where l.in_line and l.status = 'pending' and l.expires_at is not null and l.expires_at <= pgqueue.clock()
     order by l.expires_at limit max_jobs for update skip locked
  loop
    perform pgqueue.settle(j, 'dead_letter', format('expired: it was to start before %s', j.expires_at));
    moved := moved + 1;
    exit when clock_timestamp() > until;
  end loop;
  -- Without expires_at the oldest stand at the head of their line. Where jobs that have one, or were given back, stand
  -- there, somebody older may stand anywhere: such a line is looked through in turns.
  for c in
    select u.queue, u.priority, u.low_seq, least(coalesce(q.pending_ttl, interval '24 hours'), interval '100 years') as ttl, e.seq as behind
      from pgqueue.claim_cursors u
      left join pgqueue.queues q on q.name = u.queue
      left join pgqueue.expiry_cursors e on e.queue = u.queue and e.priority = u.priority
  loop
    before := null;
    start := c.low_seq;
    for part in 1 .. 2 loop
      loop
        exit when moved >= max_jobs or clock_timestamp() > until;
        select count(*), max(w.seq), bool_and(w.expires_at is null and w.worker_id is null),
               array_agg(w.job_id order by w.seq) filter (where w.expires_at is null and w.updated_at < pgqueue.clock() - c.ttl)
          into looked_at, top, in_order, ids from (
          select e.job_id, e.seq, e.updated_at, e.expires_at, e.worker_id from pgqueue.jobs_live e
           where e.in_line and e.status = 'pending' and e.queue = c.queue and e.priority = c.priority and e.seq >= start
           order by e.seq limit case part when 1 then 100 else 1000 end) w;
        exit when ids is null;
        before := coalesce(before, pgqueue.waiting_since(c.queue, c.ttl));
        few := moved;
        for j in
          select l.* from pgqueue.jobs_live l
           where l.job_id = any (array(
             select o.job_id from pgqueue.jobs_live o
              where o.job_id = any (ids) and o.status = 'pending' and o.updated_at < before order by o.seq limit 100))
           order by l.job_id for update skip locked
        loop
          continue when j.status <> 'pending' or j.expires_at is not null or j.updated_at >= before;
          perform pgqueue.settle(j, 'dead_letter', format('expired: it waited longer than %s', c.ttl));
          moved := moved + 1;
        end loop;
        exit when moved < few + 100;
      end loop;
      exit when moved >= max_jobs or clock_timestamp() > until;
      if part = 1 then
        if looked_at < 100 or in_order then
          if c.behind is not null then
            delete from pgqueue.expiry_cursors e where e.queue = c.queue and e.priority = c.priority;
          end if;
          exit;
        end if;
        start := greatest(top, c.behind);
      else
        -- From the head again once the end has been seen.
        top := case when looked_at < 1000 then c.low_seq else top end;
        insert into pgqueue.expiry_cursors as e (queue, priority, seq) values (c.queue, c.priority, top)
          on conflict on constraint expiry_cursors_pkey do update set seq = excluded.seq where e.seq <> excluded.seq;
      end if;
    end loop;
    exit when moved >= max_jobs or clock_timestamp() > until;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_expired is 'A step of the sweep: ends jobs that waited past their expires_at or their queue''s time.';

create function pgqueue.sweep_shed(max_jobs int) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  q record;
  j pgqueue.jobs;
  depth bigint;
  moved bigint := 0;
begin
  for q in select s.name, s.soft_limit from pgqueue.queues s where s.shed_low order by s.name loop
    select count(*) into depth from (
      select from pgqueue.jobs_live l where l.in_line and l.status = 'pending' and l.queue = q.name limit q.soft_limit::bigint + max_jobs) c;
    continue when depth <= q.soft_limit;
    for j in
      select l.* from pgqueue.jobs_live l
       where l.in_line and l.status = 'pending' and l.queue = q.name and l.priority = 3
       order by l.seq desc limit least(depth - q.soft_limit, max_jobs - moved) for update skip locked
    loop
      perform pgqueue.settle(j, 'dead_letter', format('shed: more than %s jobs were pending, and this one has low priority', q.soft_limit));
      moved := moved + 1;
    end loop;
    exit when moved >= max_jobs;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_shed is 'A step of the sweep: ends pending jobs of low priority as dead letters where a queue with shed_low is above its soft_limit.';

create function pgqueue.note_headless_keys(max_keys int) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off
  as $$
declare
  q text;
  k text;
  noted bigint := 0;
begin
  -- Whoever deletes a head by hand leaves no note. A probe of the index per key, not a row per job; from where the last call ended.
  select s.key_queue, s.key_name into q, k from pgqueue.sweep_state s;
  for i in 1 .. max_keys loop
    select w.queue, w.ordering_key into q, k from pgqueue.jobs_live w
     where w.ordering_key is not null and not w.in_line and w.due_at is null and (w.queue, w.ordering_key) > (q, k)
     order by w.queue, w.ordering_key limit 1;
    exit when not found;
    if not exists (select from pgqueue.jobs_live h
                    where h.queue = q and h.ordering_key = k and (h.in_line or h.due_at is not null)) then
      insert into pgqueue.sweep_notes (queue, ordering_key) values (q, k);
      noted := noted + 1;
    end if;
  end loop;
  update pgqueue.sweep_state set key_queue = coalesce(q, ''), key_name = coalesce(k, '');
  return noted;
end $$;
comment on function pgqueue.note_headless_keys(int) is
  'Asks the next sweep to look at ordering keys whose jobs wait for a head that is not there, some keys at a time.';

create function pgqueue.sweep_keys(max_jobs int) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
declare
  n record;
  head uuid;
  moved bigint := 0;
begin
  for n in
    with noted as (
      delete from pgqueue.sweep_notes d
       where d.ctid = any (array(select s.ctid from pgqueue.sweep_notes s where s.ordering_key is not null limit max_jobs for update skip locked))
      returning d.queue, d.ordering_key)
    select distinct queue, ordering_key from noted order by queue, ordering_key
  loop
    select l.job_id into head from pgqueue.jobs_live l
     where l.queue = n.queue and l.ordering_key = n.ordering_key and (l.in_line or l.due_at is not null);
    if not found and pgqueue.lock_key(n.queue, n.ordering_key) then
      -- Again, since the snapshot must be younger than the lock.
      select l.job_id into head from pgqueue.jobs_live l
       where l.queue = n.queue and l.ordering_key = n.ordering_key and (l.in_line or l.due_at is not null);
      if not found then
        perform pgqueue.promote_keys(array[n.queue::text], array[n.ordering_key::text]);
        moved := moved + 1;
        continue;
      end if;
    end if;
    -- Whoever settles this head later will see the job that the note is about; whoever is at it now may not.
    perform from pgqueue.jobs_live l where l.job_id = head for key share skip locked;
    if not found then
      insert into pgqueue.sweep_notes (queue, ordering_key) values (n.queue, n.ordering_key);
    end if;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_keys is 'A step of the sweep: sets ordering keys free whose head is gone.';

create function pgqueue.sweep_prune(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  gone bigint;
  removed bigint := 0;
  deaf int[];
  lsn constant pg_lsn := pg_current_wal_insert_lsn();
  line constant text := substr(pg_walfile_name(lsn), 1, 8);
  before constant text := (select s.timeline from pgqueue.sweep_state s);
begin
  -- A standby that had fallen behind runs jobs again whose end it never heard of: this is when that may have begun.
  if line is distinct from before then
    update pgqueue.sweep_state set timeline = line;
    if before is not null then
      insert into pgqueue.audit (actor, verb, target, detail)
        values ('sweep', 'promoted', 'server', jsonb_build_object('from', before, 'to', line, 'lsn', lsn));
    end if;
  end if;
  delete from pgqueue.idempotency_keys k
   where k.ctid = any (array(select i.ctid from pgqueue.idempotency_keys i where i.expires_at <= pgqueue.clock()
                              order by i.expires_at limit max_jobs for update skip locked));
  get diagnostics removed = row_count;
  -- Bells for workers that were killed are lost. What is read of the server's processes must be younger than the rows, and
  -- a row that was written anew since is of another one.
  perform pg_stat_clear_snapshot();
  deaf := array(select w.listener from pgqueue.waiting w
                 where w.listener is not null and not exists (select from pg_stat_get_activity(w.listener)));
  if deaf <> '{}' then
    delete from pgqueue.waiting w
     where w.ctid = any (array(select g.ctid from pgqueue.waiting g where g.listener = any (deaf) for update skip locked));
  end if;
  delete from pgqueue.waiting w
   where not exists (select from pgqueue.workers k where k.worker_id = w.worker_id and k.last_heartbeat > pgqueue.clock() - interval '60 seconds');
  get diagnostics gone = row_count;
  removed := removed + gone;
  -- A day, so that the reaper can still name the worker whose lease ran out.
  delete from pgqueue.workers w where w.last_heartbeat < pgqueue.clock() - interval '1 day';
  get diagnostics gone = row_count;
  removed := removed + gone;
  delete from pgqueue.watchers w where w.expires_at < pgqueue.clock();
  get diagnostics gone = row_count;
  removed := removed + gone;
  delete from pgqueue.job_type_pauses p where p.until < pgqueue.clock();
  get diagnostics gone = row_count;
  removed := removed + gone;
  delete from pgqueue.queue_pauses p where p.resumed_at < pgqueue.clock() - interval '400 days';
  -- Longer than a dead letter is kept, since a retry by hand must still find the guards of its side effects.
  delete from pgqueue.once_keys g
   where g.ctid = any (array(select o.ctid from pgqueue.once_keys o where o.at < pgqueue.clock() - interval '100 days'
                              order by o.at limit max_jobs for update skip locked));
  get diagnostics gone = row_count;
  removed := removed + gone;
  delete from pgqueue.schedule_fires f
   where f.ctid = any (array(select o.ctid from pgqueue.schedule_fires o where o.fired_at < pgqueue.clock() - interval '7 days'
                              order by o.fired_at limit max_jobs for update skip locked));
  get diagnostics gone = row_count;
  return removed + gone;
end $$;
comment on function pgqueue.sweep_prune is 'A step of the sweep: deletes what nobody needs any more, such as expired keys and workers that are long gone.';

create function pgqueue.note_step(step text, begun timestamptz, jobs bigint, problem text) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
begin
  -- Before the INSERT, whose conflict locks the row: a sweep without work is to write nothing.
  if note_step.jobs = 0 and problem is null and exists (
       select from pgqueue.sweep_steps s
        where s.step = note_step.step and s.last_error is null
          and s.last_run_at between pgqueue.clock() - interval '5 seconds' and pgqueue.clock()) then
    return;
  end if;
  insert into pgqueue.sweep_steps as s (step, last_run_at, last_duration_ms, last_jobs, jobs, last_error, failures, retry_at)
    values (note_step.step, pgqueue.clock(), extract(epoch from clock_timestamp() - begun) * 1000, note_step.jobs, note_step.jobs, problem,
            (problem is not null)::int, case when problem is not null then pgqueue.clock() end)
    on conflict on constraint sweep_steps_pkey do update
       set last_run_at = excluded.last_run_at, last_duration_ms = excluded.last_duration_ms, last_jobs = excluded.last_jobs,
           runs = s.runs + 1, jobs = s.jobs + excluded.jobs, last_error = excluded.last_error,
           failures = case when excluded.last_error is null then 0 else s.failures + 1 end,
           -- Slowly enough that a fault of ten seconds is over within two sweeps.
           retry_at = case when excluded.last_error is not null then pgqueue.clock() + least(s.failures * 0.1, 30) * interval '1 second' end;
end $$;
comment on function pgqueue.note_step(text, timestamptz, bigint, text) is
  'Notes a run of a step of the sweep that began at `begun`; one that did nothing is noted every five seconds.';

create function pgqueue.sweep_step(step text, max_jobs int, patience interval, patient boolean, out jobs bigint, out problem text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '500ms'
  as $$
declare
  begun constant timestamptz := clock_timestamp();
  until constant timestamptz := begun + patience;
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'sweep must see what was committed a moment ago: call it in READ COMMITTED, not %',
        upper(current_setting('transaction_isolation')) using errcode = 'PQ422', column = 'transaction_isolation';
  end if;
  if not pg_try_advisory_xact_lock(1885827431, hashtext(step))
     or patient and exists (select from pgqueue.sweep_steps s where s.step = sweep_step.step
                             and s.retry_at between pgqueue.clock() and pgqueue.clock() + interval '1 minute') then
    return;
  end if;
  begin
    jobs := case step
      when 'cursors' then pgqueue.sweep_cursors(max_jobs)
      when 'due' then pgqueue.sweep_due(max_jobs, until)
      when 'leases' then pgqueue.sweep_leases(max_jobs, until)
      when 'timeouts' then pgqueue.sweep_timeouts(max_jobs, until)
      when 'expired' then pgqueue.sweep_expired(max_jobs, until)
      when 'shed' then pgqueue.sweep_shed(max_jobs)
      when 'keys' then pgqueue.sweep_keys(max_jobs)
      when 'retention' then pgqueue.sweep_retention(max_jobs, until)
      when 'prune' then pgqueue.sweep_prune(max_jobs, until)
      when 'measure' then pgqueue.measure()
      when 'alerts' then pgqueue.evaluate_alerts()
    end;
  exception when others then
    problem := sqlerrm;
    jobs := 0;
  end;
  if jobs is null then
    raise exception 'there is no step "%" of the sweep', step using errcode = 'PQ422', column = 'step';
  end if;
  perform pgqueue.note_step(step, begun, jobs, problem);
end $$;
comment on function pgqueue.sweep_step(text, int, interval, boolean) is
  'One step of the sweep, for about as long as `patience` at most: what it did and what went wrong. Nulls: somebody else is at it
or, with `patient`, it failed a moment ago.';

create function pgqueue.sweep(only_step text default null, max_jobs int default 2000) returns table (step text, jobs bigint)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  problem text;
  steps constant text[] := array['cursors', 'due', 'leases', 'timeouts', 'expired', 'shed', 'keys', 'retention', 'prune', 'measure', 'alerts'];
begin
  if only_step <> all (steps) then
    raise exception 'there is no step "%" of the sweep, only %', only_step, array_to_string(steps, ', ')
      using errcode = 'PQ422', column = 'only_step';
  elsif max_jobs is null or max_jobs < 1 then
    raise exception 'max_jobs must be at least 1, not %', coalesce(max_jobs::text, 'null') using errcode = 'PQ422', column = 'max_jobs';
  end if;
  -- Every step can be asked for by name, in a transaction of its own, so that one that fails stops no other.
  for step in
    select s.name from unnest(steps) with ordinality s(name, n)
     where only_step is null or s.name = only_step order by s.n
  loop
    -- Measuring takes long, and the locks of the other steps would wait for its end: workers ask for it by name.
    continue when only_step is null and step in ('measure', 'alerts')
      and exists (select from pgqueue.sweep_steps s where s.step = sweep.step and s.last_run_at between pgqueue.clock() - interval '1 minute' and pgqueue.clock());
    select r.jobs, r.problem into jobs, problem
      from pgqueue.sweep_step(step, max_jobs, interval '100 milliseconds', only_step is null) r;
    if problem is not null then
      raise warning 'sweep step % failed: %', step, problem;
    end if;
    continue when jobs is null;
    return next;
  end loop;
end $$;
comment on function pgqueue.sweep is
  'Promotes due jobs, fires retries, reaps lost leases, expires, prunes and advances claim cursors; says what it did. Call it often.';

create sequence pgqueue.sweep_turns as bigint cache 1;
comment on sequence pgqueue.sweep_turns is 'When the last turn of the sweep was taken, in milliseconds since 1970.';

create function pgqueue.take_turn(every interval) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  now_is constant bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
begin
  if (select s.last_value from pgqueue.sweep_turns s) between now_is - (extract(epoch from every) * 1000)::bigint and now_is then
    return false;
  end if;
  perform setval('pgqueue.sweep_turns', now_is);
  return true;
end $$;
comment on function pgqueue.take_turn(interval) is
  'Whether nobody has taken the turn within that time, which takes it: of many sweepers one need not do what another just did.';

create function pgqueue.next_due() returns interval
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    select least(
      (select l.due_at from pgqueue.jobs_live l
        where l.status in ('submitted', 'failed') and l.due_at is not null and l.due_at > pgqueue.clock()
        order by l.due_at limit 1),
      (select c.next_run_at from pgqueue.schedules c where c.enabled and c.next_run_at > pgqueue.clock() order by c.next_run_at limit 1))
      - pgqueue.clock()
  $$;
comment on function pgqueue.next_due() is 'How long it is until another job or schedule is due; null: none will be.';
