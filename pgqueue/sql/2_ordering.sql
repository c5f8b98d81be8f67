-- Ordering keys.
--
-- Of the jobs of one key only the head is anything but waiting (submitted without due_at). Whoever settles the head
-- promotes the next one it can see. A writer whose row the settler could not see yet leaves a note for the sweep.

create function pgqueue.promote_keys(queues text[], ordering_keys text[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  firsts uuid[];
  their_queues text[];
  their_keys text[];
  locked uuid[];
  tids tid[];
  r record;
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    insert into pgqueue.sweep_notes (queue, ordering_key) select u.queue, u.key from unnest(queues, ordering_keys) u(queue, key);
    return;
  end if;
  -- A waiting job that is cancelled leaves the head in its place.
  select array_agg(f.job_id), array_agg(f.queue), array_agg(f.key) into firsts, their_queues, their_keys from (
    select k.queue, k.key, (
             select n.job_id from pgqueue.jobs_live n
              where n.queue = k.queue and n.ordering_key = k.key and not n.in_line and n.due_at is null
              order by n.seq limit 1) as job_id
      from (select distinct u.queue, u.key from unnest(queues, ordering_keys) u(queue, key)) k
     where (select l.job_id from pgqueue.jobs_live l
             where l.queue = k.queue and l.ordering_key = k.key and (l.in_line or l.due_at is not null)) is null) f
   where f.job_id is not null;
  if firsts is null then
    return;
  end if;
  select array_agg(l.job_id), array_agg(l.ctid order by l.seq) into locked, tids
    from (select n.job_id, n.ctid, n.seq, n.queue, n.ordering_key from pgqueue.jobs_live n
           where n.job_id = any (firsts) and n.status = 'submitted' and n.due_at is null
             for update skip locked) l
    join unnest(firsts, their_queues, their_keys) f(job_id, queue, key)
      on f.job_id = l.job_id and f.queue = l.queue and f.key = l.ordering_key;
  if cardinality(locked) is distinct from cardinality(firsts) then
    -- Somebody is at it. To take the one behind it would break the order, to wait could be a deadlock.
    insert into pgqueue.sweep_notes (queue, ordering_key)
      select f.queue, f.key from unnest(firsts, their_queues, their_keys) f(job_id, queue, key)
       where (f.job_id = any (locked)) is not true;
  end if;
  for r in
    with promoted as (
      update pgqueue.jobs_live w
         set status = case when w.scheduled_at > pgqueue.clock() then 'submitted' else 'pending' end,
             due_at = case when w.scheduled_at > pgqueue.clock() then w.scheduled_at end,
             seq = nextval('pgqueue.jobs_seq'), updated_at = pgqueue.clock()
       where w.ctid = any (tids)
      returning w.job_id, w.queue, w.job_type, w.status, w.attempts, w.seq)
    select p.queue, array_agg(p.job_type) as job_types,
           case when pgqueue.watched() then
             array_agg(pgqueue.event('job.queued', p.job_id, p.queue, p.job_type, 'submitted', 'pending', p.attempts) order by p.seq) end as events
      from promoted p where p.status = 'pending' group by p.queue order by p.queue
  loop
    perform pgqueue.ring(r.queue, r.job_types);
    perform pgqueue.publish(r.events);
  end loop;
end $$;
comment on function pgqueue.promote_keys(text[], text[]) is
  'Makes the first waiting job of each key that has no head its head. An old snapshot may not show it: then the sweep does it.';

create function pgqueue.lock_key(queue text, ordering_key text) returns boolean
  language sql volatile set search_path = pg_catalog, pg_temp
  as $$
    select current_setting('transaction_isolation') in ('read committed', 'read uncommitted')
       and pg_try_advisory_xact_lock(1885827429, hashtext(queue || chr(1) || ordering_key) & 1023)
  $$;
comment on function pgqueue.lock_key(text, text) is
  'Only whoever holds the lock of a key may decide, by a later snapshot, that it has no head. False: leave a note.';
