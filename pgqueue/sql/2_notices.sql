-- Notices and bells: what watchers are told, and how sleeping workers are woken. A notice lost costs time only.

create function pgqueue.watched() returns boolean
  language sql stable
  as $$ select exists (select from pgqueue.watchers w where w.expires_at > pgqueue.clock()) $$;
comment on function pgqueue.watched is 'Whether anybody watches events now.';

create function pgqueue.event(
  event text, job_id uuid, queue text, job_type text, was text, became text, attempt integer) returns jsonb
  language sql stable
  as $$
    select pg_catalog.jsonb_build_object('event', event, 'job_id', job_id, 'queue', queue, 'job_type', job_type,
      'from', was, 'to', became, 'attempt', attempt, 'at', pgqueue.clock())
  $$;
comment on function pgqueue.event is 'One event of a job, as streams and pgqueue_status send it.';

create function pgqueue.publish(events jsonb[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  batch text := '';
  batches int := 0;
  one text;
  e jsonb;
begin
  -- NOTIFY takes at most 7,999 bytes; a watcher of a very large statement reads the table instead.
  foreach e in array coalesce(events, '{}') loop
    one := e::text;
    if octet_length(batch) + octet_length(one) > 7800 then
      perform pg_notify('pgqueue_status', '[' || batch || ']');
      batches := batches + 1;
      batch := '';
      if batches = 40 then
        perform pg_notify('pgqueue_status', '[{"event": "resync"}]');
        return;
      end if;
    end if;
    batch := case when batch = '' then one else batch || ',' || one end;
  end loop;
  if batch <> '' then
    perform pg_notify('pgqueue_status', '[' || batch || ']');
  end if;
end $$;
comment on function pgqueue.publish(jsonb[]) is 'Sends events to pgqueue_status, in batches that NOTIFY can carry.';

create function pgqueue.announce(job_ids uuid[], job_types text[], queues text[]) returns void
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
declare
  slot constant bigint := floor(extract(epoch from clock_timestamp()) * 20);
begin
  if current_setting('pgqueue.wake', true) is distinct from 'off' and pgqueue.watched()
     and slot > (select s.last_value from pgqueue.notice_slot s) then
    perform setval('pgqueue.notice_slot', slot);
    perform pgqueue.publish(array_agg(pgqueue.event('job.queued', w.id, coalesce(w.queue, 'default'), w.job_type, null, 'pending', 0)))
       from (select * from unnest(job_ids, job_types, queues) u(id, job_type, queue) limit 2000) w;
  end if;
end $$;
comment on function pgqueue.announce(uuid[], text[], text[]) is
  'Tells watchers of new pending jobs, as jobs_arrived does, for whoever inserts them straight into jobs_live.';

create function pgqueue.ring(queue text, job_types text[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  -- By this transaction, whose notices PostgreSQL folds into one where they are alike.
  rung text[] := string_to_array(current_setting('pgqueue.rung', true), ',');
  chosen text[];
  t record;
begin
  if current_setting('pgqueue.wake', true) is not distinct from 'off' or not exists (select from pgqueue.waiting) then
    return;
  end if;
  for t in select u.job_type, least(count(*), 64) as jobs from unnest(ring.job_types) u(job_type) group by u.job_type loop
    -- Random, so that a bell which meets a worker that has just found work does not always meet the same one. Of those that
    -- take some priorities alone as many again, since what the new jobs have is not known here.
    chosen := array(
      select c.channel
        from (select w.channel, row_number() over (partition by w.priorities order by w.channel = any (rung), random()) as place
                from pgqueue.waiting w
               where (w.queues is null or ring.queue = any (w.queues))
                 and (w.job_types is null or t.job_type is null or t.job_type = any (w.job_types))) c
       where c.place <= t.jobs);
    perform pg_notify(c.channel, json_build_array(ring.queue, t.job_type)::text) from unnest(chosen) c(channel);
    rung := (chosen || rung)[1:64];
  end loop;
  perform set_config('pgqueue.rung', array_to_string(rung, ','), true);
end $$;
comment on function pgqueue.ring(text, text[]) is
  'Wakes as many sleeping workers of a queue as there are new jobs of each type, each on its own channel, of each kind of
priorities. `job_types`: one for each job, null where it may be of any. A bell is the array of the queue and the type.';

create function pgqueue.lower_cursor(queue text, priority smallint, seq bigint) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$ insert into pgqueue.lowered_cursors (queue, priority, seq) values (queue, priority, seq) $$;
comment on function pgqueue.lower_cursor(text, smallint, bigint) is
  'Owed by whoever makes a job pending without drawing a new seq, in the same transaction.';
