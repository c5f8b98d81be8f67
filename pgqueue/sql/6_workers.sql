-- Workers that wait and those who watch.

create function pgqueue.worker_started(
  worker_id uuid, name text, hostname text, pid int, group_name text, queues text[], job_types text[], priorities smallint[],
  concurrency int, version text)
  returns void language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    insert into pgqueue.workers as w (worker_id, name, hostname, pid, group_name, queues, job_types, priorities, concurrency, version, status)
    values (worker_id, name, hostname, pid, group_name, queues, job_types, priorities, concurrency, version, 'starting')
    on conflict (worker_id) do update
       set name = excluded.name, hostname = excluded.hostname, pid = excluded.pid, group_name = excluded.group_name,
           queues = excluded.queues, job_types = excluded.job_types, priorities = excluded.priorities,
           concurrency = excluded.concurrency, version = excluded.version, last_heartbeat = pgqueue.clock()
  $$;
comment on function pgqueue.worker_started is 'Registers a worker; a known one is written anew.';

create function pgqueue.worker_seen(worker_id uuid, status text, jobs_processed bigint, jobs_failed bigint) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  lived boolean;
begin
  update pgqueue.workers w
     set status = worker_seen.status, jobs_processed = worker_seen.jobs_processed, jobs_failed = worker_seen.jobs_failed,
         last_heartbeat = pgqueue.clock()
    from pgqueue.workers before
   where w.worker_id = worker_seen.worker_id and before.worker_id = w.worker_id and w.status <> 'stopped'
  returning before.last_heartbeat > pgqueue.clock() - interval '60 seconds' into lived;
  return coalesce(lived, false);
end $$;
comment on function pgqueue.worker_seen is 'A worker''s sign of life with its counters so far; false: it was taken for gone, register again.';

create function pgqueue.worker_stopped(worker_id uuid) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    delete from pgqueue.waiting w where w.worker_id = worker_stopped.worker_id;
    update pgqueue.workers w set status = 'stopped', last_heartbeat = pgqueue.clock() where w.worker_id = worker_stopped.worker_id
  $$;
comment on function pgqueue.worker_stopped is 'Takes a worker off the list.';

create function pgqueue.wait_for_work(
  worker_id uuid, queues text[], job_types text[], channel text, priorities smallint[] default null, listener int default null)
  returns text[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  if wait_for_work.channel is null or octet_length(wait_for_work.channel) not between 1 and 63 then
    raise exception 'channel must have 1 to 63 bytes, but is %', coalesce(left(wait_for_work.channel, 100), 'null')
      using errcode = 'PQ422', column = 'channel';
  end if;
  insert into pgqueue.waiting as w (worker_id, channel, queues, job_types, priorities, listener)
    values (wait_for_work.worker_id, wait_for_work.channel, wait_for_work.queues, wait_for_work.job_types,
            wait_for_work.priorities, wait_for_work.listener)
    on conflict on constraint waiting_pkey do update
       set channel = excluded.channel, queues = excluded.queues, job_types = excluded.job_types,
           priorities = excluded.priorities, listener = excluded.listener
     where w is distinct from excluded;
  return null;
end $$;
comment on function pgqueue.wait_for_work is 'Asks for a bell on `channel` when jobs of these queues, types and priorities arrive, until the server process `listener`, which hears it, is gone. Ask open_writers() next.';

create function pgqueue.stop_waiting(worker_id uuid, queues text[] default '{}', job_types text[] default '{}') returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    delete from pgqueue.waiting w where w.worker_id = stop_waiting.worker_id;
    select pgqueue.ring(b.queue, array_agg(b.job_type))
      from unnest(stop_waiting.queues, stop_waiting.job_types) b(queue, job_type) group by b.queue order by b.queue
  $$;
comment on function pgqueue.stop_waiting is
  'Takes a worker off the list of those to wake, and wakes others for the bells of which it made nothing: their queues and types.';

create function pgqueue.writers_open(writers text[]) returns boolean
  language sql volatile security definer set search_path = pg_catalog, pg_temp
  as $$ select pgqueue.open_writers() && writers $$;
comment on function pgqueue.writers_open(text[]) is
  'Whether one of these transactions is still open: its INSERT may have looked for sleepers before a worker went to sleep.';

create function pgqueue.watch(watcher_id uuid, ttl interval) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    insert into pgqueue.watchers as w (watcher_id, expires_at) values (watcher_id, pgqueue.clock() + least(ttl, interval '1 day'))
      on conflict (watcher_id) do update set expires_at = excluded.expires_at
  $$;
comment on function pgqueue.watch is 'Asks for status notices for as long as ttl, a day at most; ask again before it ends.';

create function pgqueue.unwatch(watcher_id uuid) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$ delete from pgqueue.watchers w where w.watcher_id = unwatch.watcher_id $$;
comment on function pgqueue.unwatch is 'Takes a watcher off the list.';
