-- Finish: complete, fail, snooze, release, cancel_attempt. Every one is fenced by (worker_id, attempts): what is not
-- accepted does not come back and changes nothing.
--
-- Many rows are locked in job_id order (the index gives it), so that batches that meet wait instead of deadlocking.

create function pgqueue.backoff(policy jsonb, attempt integer) returns interval
  language plpgsql volatile set search_path = pg_catalog, pg_temp
  as $$
declare
  -- Rounded, and within the bounds of retry_policy_fault whoever made the policy.
  base constant double precision := round(greatest(least(coalesce((policy ->> 'base_delay_ms')::numeric, 1000), 31536000000), 0), 3);
  most constant double precision := round(greatest(least(coalesce((policy ->> 'max_delay_ms')::numeric, 30000), 31536000000), 0), 3);
  multiplier constant double precision := round(greatest(least(coalesce((policy ->> 'backoff_multiplier')::numeric, 2), 1000), 1), 6);
  waits constant double precision := greatest(attempt, 1) - 1;
  delay double precision;
begin
  -- min(base * multiplier ^ (attempt - 1), max) by logarithms, which cannot overflow; then up to 10 % jitter.
  if base = 0 or most = 0 then
    return interval '0';
  elsif ln(base) + waits * ln(multiplier) < ln(most) then
    delay := least(base * multiplier ^ waits, most);
  else
    delay := most;
  end if;
  if coalesce((policy ->> 'jitter')::boolean, true) then
    delay := delay + delay * 0.1 * random();
  end if;
  return delay * interval '1 millisecond';
end $$;
comment on function pgqueue.backoff(jsonb, integer) is
  'The wait before retry number `attempt`: min(base_delay_ms * backoff_multiplier ^ (attempt - 1), max_delay_ms) plus up to 10 % jitter.';

create function pgqueue.cut(words text, bytes integer) returns text
  language plpgsql immutable strict set search_path = pg_catalog, pg_temp
  as $$
declare
  -- A character has at most six bytes in JSON, so the first sixth always fits and the rest is found by halving.
  low int := (bytes - 12) / 6;
  high int := least(length(words), bytes);
  middle int;
begin
  if octet_length(words) <= bytes and octet_length(to_json(words)::text) <= bytes then
    return words;
  end if;
  while low < high loop
    middle := (low + high + 1) / 2;
    if octet_length(to_json(left(words, middle))::text) <= bytes - 12 then low := middle; else high := middle - 1; end if;
  end loop;
  return left(words, low) || ' … (cut)';
end $$;
comment on function pgqueue.cut(text, integer) is
  'The text, or as many whole characters of it as fit into so many bytes of JSON, with a mark.';

create function pgqueue.error_record(attempt integer, worker_id uuid, error jsonb, retryable boolean, started_at timestamptz)
  returns jsonb
  language sql stable set search_path = pg_catalog, pg_temp
  as $$
    select jsonb_build_object(
      'attempt', attempt, 'at', pgqueue.clock(), 'worker_id', worker_id,
      'type', left(coalesce(error ->> 'type', 'Error'), 200),
      'message', pgqueue.cut(coalesce(error ->> 'message', error #>> '{}', ''), 8000),
      'traceback', pgqueue.cut(error ->> 'traceback', 23000),
      'retryable', retryable,
      'duration_ms', case when jsonb_typeof(error -> 'duration_ms') = 'number' then error -> 'duration_ms'
                          else to_jsonb(round(extract(epoch from pgqueue.clock() - started_at) * 1000)) end)
  $$;
comment on function pgqueue.error_record is 'One record for `errors`.';

create function pgqueue.add_error(errors jsonb, record jsonb) returns jsonb
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
declare
  kept jsonb := errors || jsonb_build_array(record);
begin
  while jsonb_array_length(kept) > 20 or (jsonb_array_length(kept) > 1 and octet_length(kept::text) > 524288) loop
    kept := kept - 0;
  end loop;
  return kept;
end $$;
comment on function pgqueue.add_error(jsonb, jsonb) is 'Appends a record and keeps the newest 20, of 512 KiB at most.';

create function pgqueue.store(j pgqueue.jobs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- One text for the three finished partitions and, for a job that comes back, the live one.
  execute 'insert into pgqueue.' || case j.status
      when 'completed' then 'jobs_completed' when 'cancelled' then 'jobs_cancelled'
      when 'dead_letter' then 'jobs_dead_letter' else 'jobs_live' end
    || ' (job_id, seq, queue, job_type, payload, priority, status, attempts, max_retries, lost, uncharged, retry_policy,
          timeout_ms, scheduled_at, due_at, expires_at, idempotency_key, producer_id, ordering_key, worker_id,
          lease_expires_at, cancel_requested_at, created_at, updated_at, started_at, finished_at, result, error, errors,
          progress, trace_context)
        select ($1).job_id, ($1).seq, ($1).queue, ($1).job_type, ($1).payload, ($1).priority, ($1).status, ($1).attempts,
          ($1).max_retries, ($1).lost, ($1).uncharged, ($1).retry_policy, ($1).timeout_ms, ($1).scheduled_at, ($1).due_at,
          ($1).expires_at, ($1).idempotency_key, ($1).producer_id, ($1).ordering_key, ($1).worker_id,
          ($1).lease_expires_at, ($1).cancel_requested_at, ($1).created_at, ($1).updated_at, ($1).started_at,
          ($1).finished_at, ($1).result, ($1).error, ($1).errors, ($1).progress, ($1).trace_context' using j;
end $$;
comment on function pgqueue.store is 'Puts a job into the table of its status.';

create function pgqueue.settle(j pgqueue.jobs, final text, reason text) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  was constant text := j.status;
  events jsonb[] := '{}';
begin
  -- The caller holds the lock of the live row.
  delete from pgqueue.jobs_live l where l.job_id = j.job_id;
  j.status := final;
  j.due_at := null;
  j.lease_expires_at := null;
  j.updated_at := pgqueue.clock();
  j.finished_at := pgqueue.clock();
  j.error := left(regexp_replace(coalesce(reason, j.error), '[[:space:]]+', ' ', 'g'), 1000);
  perform pgqueue.store(j);
  if j.ordering_key is not null then
    perform pgqueue.promote_keys(array[j.queue::text], array[j.ordering_key::text]);
  end if;
  if pgqueue.watched() then
    if final = 'dead_letter' and was = 'processing' then
      events := events || pgqueue.event('job.failed', j.job_id, j.queue, j.job_type, was, 'failed', j.attempts);
    end if;
    perform pgqueue.publish(events || pgqueue.event('job.' || final, j.job_id, j.queue, j.job_type,
      case when cardinality(events) > 0 then 'failed' else was end, final, j.attempts));
  end if;
end $$;
comment on function pgqueue.settle(pgqueue.jobs, text, text) is
  'Moves a locked live job to its final status, frees its ordering key and says so.';

create function pgqueue.complete(worker_id uuid, job_ids uuid[], attempts int[], results jsonb[]) returns setof uuid
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
#variable_conflict use_column
declare
  accepted uuid[];
  queues text[];
  keys text[];
  to_cancel pgqueue.jobs[];
  j pgqueue.jobs;
  watching constant boolean := exists (select from pgqueue.watchers) and pgqueue.watched();
  events jsonb[];
begin
  if cardinality(job_ids) is distinct from cardinality(complete.attempts)
     or cardinality(coalesce(results, '{}')) not in (0, cardinality(job_ids)) then
    raise exception 'job_ids, attempts and results must have the same length, not %, % and %',
        cardinality(job_ids), cardinality(complete.attempts), cardinality(results)
      using errcode = 'PQ422', column = 'job_ids';
  end if;
  with given as materialized (
    select array_agg(s.job_id) as job_ids, array_agg(s.attempt) as attempts, array_agg(s.place) as places
      from (select u.job_id, u.attempt, u.place::int
              from unnest(complete.job_ids, complete.attempts) with ordinality u(job_id, attempt, place)
             where u.job_id is not null order by u.job_id, u.attempt) s),
  done as (
    -- The attempt of an id is looked up in sorted arrays: a join would cost twice as much, and another order of locks.
    delete from pgqueue.jobs_live j
     where j.job_id = any (complete.job_ids) and j.worker_id = complete.worker_id and j.status = 'processing'
       and j.attempts = (select g.attempts from given g)[width_bucket(j.job_id, (select g.job_ids from given g))]
    returning j.job_id, j.seq, j.queue, j.job_type, j.payload, j.priority, j.attempts, j.max_retries, j.lost, j.uncharged,
      j.retry_policy, j.timeout_ms, j.scheduled_at, j.expires_at, j.idempotency_key, j.producer_id, j.ordering_key, j.worker_id,
      j.cancel_requested_at, j.created_at, j.started_at, j.errors, j.progress, j.trace_context,
      case when complete.results <> '{}' then complete.results[(select g.places from given g)[width_bucket(j.job_id, (select g.job_ids from given g))]] end as result),
  completed as (
    insert into pgqueue.jobs_completed (job_id, seq, queue, job_type, payload, priority, status, attempts, max_retries, lost,
        uncharged, retry_policy, timeout_ms, scheduled_at, expires_at, idempotency_key, producer_id, ordering_key, worker_id,
        created_at, updated_at, started_at, finished_at, result, errors, progress, trace_context)
    select d.job_id, d.seq, d.queue, d.job_type, d.payload, d.priority, 'completed', d.attempts, d.max_retries, d.lost,
        d.uncharged, d.retry_policy, d.timeout_ms, d.scheduled_at, d.expires_at, d.idempotency_key, d.producer_id, d.ordering_key, d.worker_id,
        d.created_at, pgqueue.clock(), d.started_at, pgqueue.clock(), d.result, d.errors, d.progress, d.trace_context
      from done d where d.cancel_requested_at is null)
  select array_agg(d.job_id),
         array_agg(d.queue::text) filter (where d.ordering_key is not null),
         array_agg(d.ordering_key::text) filter (where d.ordering_key is not null),
         array(select jsonb_populate_record(null::pgqueue.jobs, to_jsonb(c)) from done c where c.cancel_requested_at is not null),
         array_agg(pgqueue.event(case when d.cancel_requested_at is null then 'job.completed' else 'job.cancelled' end,
             d.job_id, d.queue, d.job_type, 'processing',
             case when d.cancel_requested_at is null then 'completed' else 'cancelled' end, d.attempts)) filter (where watching)
    into accepted, queues, keys, to_cancel, events from done d;
  if coalesce(cardinality(accepted), 0) < cardinality(job_ids) and exists (
       select from unnest(complete.job_ids) u(id) group by u.id
       having count(*) > 1 and (u.id = any (accepted) or exists (
         select from pgqueue.jobs_live j
          where j.job_id = u.id and j.worker_id = complete.worker_id and j.status = 'processing'))) then
    raise exception 'a job stands twice in job_ids' using errcode = 'PQ422', column = 'job_ids';
  end if;

  foreach j in array to_cancel loop
    j.status := 'cancelled';
    j.updated_at := pgqueue.clock();
    j.finished_at := pgqueue.clock();
    perform pgqueue.store(j);
  end loop;
  if keys is not null then
    perform pgqueue.promote_keys(queues, keys);
  end if;
  if events is not null then
    perform pgqueue.publish(events);
  end if;
  return query select unnest(accepted);
end $$;
comment on function pgqueue.complete is
  'Completes attempts of one worker and stores their results; answers the ids that were still its own.';

create function pgqueue.complete_and_claim(
  worker_id uuid, job_ids uuid[], attempts int[], results jsonb[], queues text[], max_jobs int, lease interval default null,
  job_types text[] default null, priorities smallint[] default null, shards smallint[] default null)
  returns table (accepted uuid[], claimed pgqueue.jobs)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off
  as $$
declare
  wake constant text := coalesce(current_setting('pgqueue.wake', true), '');
  their_queues text[];
  their_keys text[];
  r record;
begin
  select array_agg(j.queue::text), array_agg(j.ordering_key::text) into their_queues, their_keys
    from pgqueue.jobs_live j where j.job_id = any (complete_and_claim.job_ids) and j.ordering_key is not null;
  perform set_config('pgqueue.wake', 'off', true);
  accepted := array(select pgqueue.complete(complete_and_claim.worker_id, complete_and_claim.job_ids, complete_and_claim.attempts, results));
  perform set_config('pgqueue.wake', wake, true);
  -- With the first row only: in each of five hundred they would be megabytes.
  return query select case when row_number() over () = 1 then complete_and_claim.accepted end, c
    from pgqueue.claim(complete_and_claim.worker_id, queues, max_jobs, complete_and_claim.lease, complete_and_claim.job_types,
                       complete_and_claim.priorities, complete_and_claim.shards) c;
  if not found then
    return next;
  end if;
  -- What this worker does not take itself is for those that sleep.
  for r in
    select h.queue, array_agg(h.job_type::text) as job_types
      from unnest(their_queues, their_keys) u(queue, key)
     cross join lateral (
       select l.queue, l.job_type, l.status from pgqueue.jobs_live l
        where l.queue = u.queue and l.ordering_key = u.key and (l.in_line or l.due_at is not null)
        limit 1) h
     where h.status = 'pending' group by h.queue
  loop
    perform pgqueue.ring(r.queue, r.job_types);
  end loop;
end $$;
comment on function pgqueue.complete_and_claim is
  'Completes, and claims in the same transaction: a worker takes the jobs whose ordering keys it set free without waking another.
What was accepted stands in the first row.';

create function pgqueue.held(worker_id uuid, job_id uuid, attempt int) returns pgqueue.jobs
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
declare
  j pgqueue.jobs;
begin
  select l.* into j from pgqueue.jobs_live l
   where l.job_id = held.job_id and l.worker_id = held.worker_id and l.attempts = held.attempt
     and l.status = 'processing'
   for update;
  return j;
end $$;
comment on function pgqueue.held(uuid, uuid, int) is 'Locks and answers a job if the worker still holds this attempt, else nulls.';

create function pgqueue.fail(
  worker_id uuid, job_id uuid, attempt int, error jsonb, retryable boolean default true, retry_in interval default null)
  returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  j pgqueue.jobs := pgqueue.held(worker_id, job_id, attempt);
  wait interval;
  reason text;
begin
  if j.job_id is null then
    return null;
  end if;
  error := case when jsonb_typeof(error) = 'object' then error else jsonb_build_object('message', error #>> '{}') end;
  if coalesce(error ->> 'message', '') = '' then
    error := error || jsonb_build_object('message', 'no reason was given');
  end if;
  j.errors := pgqueue.add_error(j.errors, pgqueue.error_record(attempt, worker_id, error, retryable, j.started_at));
  reason := left(coalesce(nullif(error ->> 'type', '') || ': ', '')
    || case when error ->> 'message' ~ '[^[:space:]]' then error ->> 'message' else 'no reason was given' end, 1000);
  if j.cancel_requested_at is not null then
    perform pgqueue.settle(j, 'cancelled', reason);
    return 'cancelled';
  elsif not coalesce(retryable, true) or j.attempts - j.lost > j.max_retries then
    perform pgqueue.settle(j, 'dead_letter', reason);
    return 'dead_letter';
  end if;
  wait := least(greatest(coalesce(retry_in, pgqueue.backoff(
    coalesce(j.retry_policy, (select q.retry_policy from pgqueue.queues q where q.name = j.queue)),
    j.attempts - j.lost - j.uncharged)), interval '0'),
    -- The sweep ends a job that has been failed for so long.
    coalesce((select least(q.failed_ttl, interval '100 years') from pgqueue.queues q where q.name = j.queue), interval '7 days'));
  update pgqueue.jobs_live l
     set status = 'failed', due_at = pgqueue.clock() + wait, lease_expires_at = null, updated_at = pgqueue.clock(),
         error = regexp_replace(reason, '[[:space:]]+', ' ', 'g'), errors = j.errors
   where l.job_id = j.job_id;
  if pgqueue.watched() then
    perform pgqueue.publish(array[pgqueue.event('job.failed', j.job_id, j.queue, j.job_type, 'processing', 'failed', j.attempts)]);
  end if;
  return 'failed';
end $$;
comment on function pgqueue.fail is
  'Ends an attempt with an error: failed (a retry is due), dead_letter, or cancelled when that was requested; null: not the owner.';

create function pgqueue.snooze(worker_id uuid, job_id uuid, attempt int, delay interval) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  j pgqueue.jobs := pgqueue.held(worker_id, job_id, attempt);
begin
  if j.job_id is null then
    return null;
  elsif j.cancel_requested_at is not null then
    perform pgqueue.settle(j, 'cancelled', 'cancelled on request');
    return 'cancelled';
  end if;
  update pgqueue.jobs_live l
     set status = 'submitted', due_at = pgqueue.clock() + least(greatest(delay, interval '0'), interval '100 years'),
         lease_expires_at = null, updated_at = pgqueue.clock(), max_retries = least(j.max_retries + 1, 1000000),
         uncharged = least(j.uncharged, 2147483646) + 1
   where l.job_id = j.job_id;
  if pgqueue.watched() then
    perform pgqueue.publish(array[pgqueue.event('job.submitted', j.job_id, j.queue, j.job_type, 'processing', 'submitted', j.attempts)]);
  end if;
  return 'submitted';
end $$;
comment on function pgqueue.snooze is 'Puts an attempt off by a delay without charging it; null: not the owner.';

create function pgqueue.rate_limit(worker_id uuid, job_id uuid, attempt int, retry_after interval) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  type_name text;
  became text;
begin
  select l.job_type into type_name from pgqueue.jobs_live l where l.job_id = rate_limit.job_id;
  became := pgqueue.snooze(worker_id, job_id, attempt, retry_after);
  if became is not null then
    perform pgqueue.pause_job_type(type_name, pgqueue.clock() + least(greatest(retry_after, interval '0'), interval '100 years'));
  end if;
  return became;
end $$;
comment on function pgqueue.rate_limit is 'Snoozes the attempt and pauses its job type until then.';

create function pgqueue.cancel_attempt(worker_id uuid, job_id uuid, attempt int, error jsonb default null) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  j pgqueue.jobs := pgqueue.held(worker_id, job_id, attempt);
begin
  if j.job_id is null then
    return null;
  end if;
  perform pgqueue.settle(j, 'cancelled', coalesce(error ->> 'message', 'cancelled by the task'));
  return 'cancelled';
end $$;
comment on function pgqueue.cancel_attempt is 'Ends an attempt as cancelled, as the task asked or as was requested; null: not the owner.';

create function pgqueue.say_released(j pgqueue.jobs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  perform pgqueue.lower_cursor(j.queue, j.priority, j.seq);
  perform pgqueue.ring(j.queue, array[j.job_type]);
  if pgqueue.watched() then
    perform pgqueue.publish(array[pgqueue.event('job.released', j.job_id, j.queue, j.job_type, 'processing', 'pending', j.attempts)]);
  end if;
end $$;
comment on function pgqueue.say_released(pgqueue.jobs) is
  'Tells claims, sleepers and watchers of a job that is pending again at its old place.';

create function pgqueue.release(worker_id uuid, job_ids uuid[], attempts int[], started boolean default false)
  returns setof uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
declare
  g record;
  j pgqueue.jobs;
begin
  -- The seq stays, so the job goes first.
  for g in select distinct u.job_id, u.attempt from unnest(release.job_ids, release.attempts) u(job_id, attempt) order by u.job_id loop
    j := pgqueue.held(release.worker_id, g.job_id, g.attempt);
    continue when j.job_id is null;
    if j.cancel_requested_at is not null then
      perform pgqueue.settle(j, 'cancelled', 'cancelled on request');
    else
      update pgqueue.jobs_live l
         set status = 'pending', lease_expires_at = null, updated_at = pgqueue.clock(),
             attempts = j.attempts - case when started then 0 else 1 end,
             max_retries = least(j.max_retries + case when started then 1 else 0 end, 1000000),
             uncharged = least(j.uncharged, 2147483646) + case when started then 1 else 0 end,
             started_at = case when started then j.started_at end
       where l.job_id = j.job_id;
      perform pgqueue.say_released(j);
    end if;
    return next g.job_id;
  end loop;
end $$;
comment on function pgqueue.release is
  'Gives jobs back at their old place without charging an attempt; `started` says that their tasks had begun.';

create function pgqueue.set_progress(worker_id uuid, job_id uuid, attempt int, progress jsonb) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
begin
  update pgqueue.jobs_live l set progress = set_progress.progress, updated_at = pgqueue.clock()
   where l.job_id = set_progress.job_id and l.worker_id = set_progress.worker_id and l.attempts = set_progress.attempt
     and l.status = 'processing';
  return found;
end $$;
comment on function pgqueue.set_progress is 'Stores what a running attempt reports; false: not the owner.';

create function pgqueue.hold_retry(worker_id uuid, job_ids uuid[], attempts int[], delay interval) returns setof uuid
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
begin
  -- Only the worker that failed the attempt, and only while nobody has begun another.
  return query
    update pgqueue.jobs_live j
       set ordering_key = j.ordering_key, updated_at = pgqueue.clock(),
           -- A backoff that lasts longer stays; and the sweep ends a job that has been failed for failed_ttl.
           due_at = case when hold_retry.delay > interval '0' then greatest(j.due_at, pgqueue.clock() + least(hold_retry.delay,
                           coalesce((select q.failed_ttl from pgqueue.queues q where q.name = j.queue), interval '7 days') - interval '1 second'))
                         when j.due_at < pgqueue.clock() + interval '30 seconds' then pgqueue.clock()
                         else j.due_at end
      from unnest(hold_retry.job_ids, hold_retry.attempts) u(job_id, attempt)
     where j.job_id = u.job_id and j.worker_id = hold_retry.worker_id and j.attempts = u.attempt
       and j.status = 'failed'
    returning j.job_id;
end $$;
comment on function pgqueue.hold_retry is
  'Puts off the retries of failed attempts whose threads could not be stopped; delay 0 lets them go. Answers what it still found.';

create function pgqueue.once(job_id uuid, key text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  insert into pgqueue.once_keys (job_id, key) values (once.job_id, once.key) on conflict do nothing;
  return found;
end $$;
comment on function pgqueue.once(uuid, text) is
  'Whether this key is guarded for the first time by the job; lasts if the transaction commits.';
