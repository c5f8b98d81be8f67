-- Doors: what the REST API needs beside the queue's own verbs. Keys, request rates, enqueues that say whether a known
-- idempotency key came with the same job, settings of queues.

create function pgqueue.lease_tokens(bucket text, per_second double precision, wanted integer, out granted integer, out retry_ms integer)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  b pgqueue.token_buckets;
  now_is timestamptz;
begin
  if lease_tokens.bucket is null or lease_tokens.bucket not like 'key:%' then
    raise exception 'bucket must be key: and the name of a key, not %', coalesce(lease_tokens.bucket, 'null')
      using errcode = 'PQ422', column = 'bucket';
  end if;
  insert into pgqueue.token_buckets (bucket, tokens, filled_at)
    values (lease_tokens.bucket, greatest(per_second, 1), clock_timestamp()) on conflict do nothing;
  select t.* into b from pgqueue.token_buckets t where t.bucket = lease_tokens.bucket for update;
  -- Read under the lock: the clock of a statement that waited for it may lie behind.
  now_is := clock_timestamp();
  b.tokens := least(greatest(per_second, 1), b.tokens + greatest(extract(epoch from now_is - b.filled_at), 0) * per_second);
  granted := least(wanted, floor(b.tokens)::integer);
  if granted > 0 then
    update pgqueue.token_buckets t set tokens = b.tokens - granted, filled_at = now_is where t.bucket = lease_tokens.bucket;
    retry_ms := 0;
  else
    granted := 0;
    retry_ms := ceil((1 - b.tokens) / per_second * 1000);
  end if;
end $$;
comment on function pgqueue.lease_tokens is
  'Takes up to `wanted` tokens out of a bucket that holds a second''s worth; none: the milliseconds until there is one.';

-- Keys --------------------------------------------------------------------------------------------------------------

create view pgqueue.keys as
  select k.name, k.prefix, k.scopes, k.enabled, k.rate, k.expires_at, k.created_at, k.last_used_at from pgqueue.api_keys k;
comment on view pgqueue.keys is 'API keys without their hashes.';

create function pgqueue.check_keys(hashes bytea[]) returns jsonb
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    select jsonb_build_object(
      'any', exists (select from pgqueue.api_keys),
      'good', coalesce((
        select jsonb_object_agg(encode(k.sha256, 'hex'), jsonb_build_object('name', k.name, 'scopes', k.scopes, 'rate', k.rate))
          from pgqueue.api_keys k
         where k.sha256 = any (hashes) and k.enabled and (k.expires_at is null or k.expires_at > clock_timestamp())), '{}'))
  $$;
comment on function pgqueue.check_keys(bytea[]) is
  'Which of these SHA-256 hashes are of keys in force, with name, scopes and rate; and whether there is any key at all.';

create function pgqueue.create_key(name text, sha256 bytea, prefix text, scopes text[], rate integer, expires_at timestamptz)
  returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  insert into pgqueue.api_keys (name, sha256, prefix, scopes, rate, expires_at)
    values (create_key.name, create_key.sha256, create_key.prefix, create_key.scopes, create_key.rate, create_key.expires_at);
  perform pgqueue.note('create_key', create_key.name, null,
    jsonb_build_object('scopes', create_key.scopes, 'rate', create_key.rate, 'expires_at', create_key.expires_at));
exception when unique_violation then
  raise exception 'there is a key "%"', create_key.name
    using errcode = 'PQ409', hint = 'Names of revoked keys are not free: they stand in the audit.';
end $$;
comment on function pgqueue.create_key is 'Stores the hash of a new API key, with a row in the audit. Error: PQ409 when the name is taken.';

create function pgqueue.revoke_key(name text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  changed boolean;
begin
  update pgqueue.api_keys k set enabled = false where k.name = revoke_key.name and k.enabled;
  changed := found;
  if changed then
    perform pgqueue.note('revoke_key', revoke_key.name, null);
  elsif not exists (select from pgqueue.api_keys k where k.name = revoke_key.name) then
    raise exception 'there is no key "%"', revoke_key.name using errcode = 'PQ404';
  end if;
  return changed;
end $$;
comment on function pgqueue.revoke_key(text) is 'Ends an API key at once. False: it was revoked before. Error: PQ404.';

create function pgqueue.keys_used(names text[]) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    update pgqueue.api_keys k set last_used_at = clock_timestamp()
     where k.name = any (names) and (k.last_used_at is null or k.last_used_at < clock_timestamp() - interval '1 minute')
  $$;
comment on function pgqueue.keys_used(text[]) is 'Notes that keys are in use, to the minute.';

-- Enqueues ----------------------------------------------------------------------------------------------------------

create function pgqueue.same_job(job_id uuid, asked jsonb) returns boolean
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
declare
  -- Volatile, and looked up anew: enqueue_many tells whom may not read it less.
  known pgqueue.jobs;
  delay constant double precision := (asked ->> 'delay_ms')::double precision / 1000;
  untouched boolean;
begin
  select f.* into known from pgqueue.find_job(same_job.job_id) f;
  -- A dead letter that was retried has lost its times.
  untouched := known.attempts = 0 and known.errors = '[]';
  -- What retries and snoozes change is compared as it was, or not at all.
  return known.job_type is null
      or known.job_type = coalesce(asked ->> 'job_type', asked ->> 'type')
     and known.payload = coalesce(nullif(asked -> 'payload', 'null'), '{}')
     and known.queue = coalesce(asked ->> 'queue', 'default')
     and known.priority = pgqueue.priority_number(asked -> 'priority')
     and known.max_retries - known.uncharged = coalesce((asked ->> 'max_retries')::int, 3)
     and known.timeout_ms is not distinct from (asked ->> 'timeout_ms')::int
     and known.retry_policy is not distinct from nullif(asked -> 'retry_policy', 'null')
     and known.ordering_key is not distinct from asked ->> 'ordering_key'
     and case when known.scheduled_at is null then not untouched or num_nonnulls(asked ->> 'scheduled_at', delay) = 0
              -- The delay counts from when it was asked for, which is a moment before the row was made.
              when delay is not null then abs(extract(epoch from known.scheduled_at - known.created_at) - delay) < 0.5
              else known.scheduled_at is not distinct from (asked ->> 'scheduled_at')::timestamptz end
     and (known.expires_at is not distinct from (asked ->> 'expires_at')::timestamptz or known.expires_at is null and not untouched);
end $$;
comment on function pgqueue.same_job(uuid, jsonb) is
  'Whether a job that a known idempotency key stands for is the one that is now asked for.';

create function pgqueue.submit(jobs jsonb, hashes bytea[] default '{}') returns table (job text, duplicate boolean, same boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
begin
  if hashes <> '{}' and exists (
    select from pgqueue.check_keys(hashes) known cross join unnest(hashes) h(sha256)
     where case when h.sha256 is null then (known ->> 'any')::boolean else not known -> 'good' ? encode(h.sha256, 'hex') end)
  then
    raise exception 'the key is unknown, revoked or expired' using errcode = 'PQ401';
  end if;
  return query
    select row_to_json(s.e)::text, (s.e).duplicate, not (s.e).duplicate or pgqueue.same_job((s.e).job_id, jobs -> s.place)
      from (select e, row_number() over ()::int - 1 as place from pgqueue.enqueue_many(jobs) e) s
     order by s.place;
end $$;
comment on function pgqueue.submit(jsonb, bytea[]) is
  'enqueue_many that answers each job as JSON, and for a known idempotency key whether it came with the same job. PQ401 unless
all keys of these hashes are in force; null stands for a request without a key, which may come only where there is none.';

create function pgqueue.submit_batch(jobs jsonb) returns table (job_id uuid, status text, duplicate boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  s record;
begin
  for s in select e, row_number() over ()::int - 1 as place from pgqueue.enqueue_many(jobs) e loop
    if (s.e).duplicate and not pgqueue.same_job((s.e).job_id, jobs -> s.place) then
      raise exception 'jobs[%]: idempotency_key "%" stands for another job', s.place, (s.e).idempotency_key
        using errcode = 'PQ422', column = 'idempotency_key';
    end if;
    job_id := (s.e).job_id;
    status := (s.e).status;
    duplicate := (s.e).duplicate;
    return next;
  end loop;
end $$;
comment on function pgqueue.submit_batch(jsonb) is
  'enqueue_many that refuses the whole batch when a known idempotency key came with another job (PQ422).';

-- Queues ------------------------------------------------------------------------------------------------------------

create function pgqueue.need_object(settings jsonb) returns void
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
begin
  if jsonb_typeof(settings) is distinct from 'object' then
    raise exception 'settings must be a JSON object, not %', left(coalesce(settings::text, 'null'), 100)
      using errcode = 'PQ422', column = 'settings';
  end if;
end $$;
comment on function pgqueue.need_object(jsonb) is 'Refuses settings that are no JSON object.';

create function pgqueue.populate(base anyelement, settings jsonb) returns anyelement
  language plpgsql stable set search_path = pg_catalog, pg_temp
  as $$
declare
  s record;
  wrong text;
  tried jsonb;
begin
  perform pgqueue.need_object(settings);
  begin
    return jsonb_populate_record(base, settings);
  exception
    when data_exception or check_violation or feature_not_supported or invalid_parameter_value then wrong := sqlerrm;
  end;
  -- One at a time, to say which of them it was.
  for s in select e.key, e.value from jsonb_each(settings) e order by e.key loop
    begin
      tried := jsonb_build_object(s.key, s.value);
      perform jsonb_populate_record(base, tried);
    exception
      when data_exception or check_violation or feature_not_supported or invalid_parameter_value then
        raise exception 'setting % cannot be %: %', s.key, left(s.value::text, 100), sqlerrm using errcode = 'PQ422', column = s.key;
    end;
  end loop;
  raise exception 'settings cannot be used: %', wrong using errcode = 'PQ422', column = 'settings';
end $$;
comment on function pgqueue.populate(anyelement, jsonb) is 'jsonb_populate_record that says which setting was wrong.';

create function pgqueue.set_queue(queue text, settings jsonb) returns pgqueue.queues
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong text;
  q pgqueue.queues;
begin
  perform pgqueue.need_object(settings);
  perform pgqueue.need('queue', set_queue.queue);
  select k into wrong from jsonb_object_keys(settings) k
   where k not in ('weights', 'lease_ms', 'timeout_ms', 'max_lost', 'idempotency_ms', 'retry_policy', 'soft_limit', 'hard_limit',
     'rate_per_second', 'shed_low', 'pending_ttl', 'completed_ttl', 'failed_ttl', 'dead_letter_ttl', 'cancelled_ttl') limit 1;
  if found then
    raise exception 'a queue has no setting "%"', wrong using errcode = 'PQ422', column = 'settings';
  end if;
  insert into pgqueue.queues (name) values (set_queue.queue) on conflict do nothing;
  select n.* into q from pgqueue.queues n where n.name = set_queue.queue for update;
  q := pgqueue.populate(q, settings);
  update pgqueue.queues n
     set weights = q.weights, lease_ms = q.lease_ms, timeout_ms = q.timeout_ms, max_lost = q.max_lost,
         idempotency_ms = q.idempotency_ms, retry_policy = q.retry_policy, soft_limit = q.soft_limit,
         hard_limit = q.hard_limit, rate_per_second = q.rate_per_second, shed_low = q.shed_low, pending_ttl = q.pending_ttl,
         completed_ttl = q.completed_ttl, failed_ttl = q.failed_ttl, dead_letter_ttl = q.dead_letter_ttl,
         cancelled_ttl = q.cancelled_ttl, updated_at = pgqueue.clock()
   where n.name = set_queue.queue returning n.* into q;
  perform pgqueue.note('set_queue', set_queue.queue, null, settings);
  return q;
end $$;
comment on function pgqueue.set_queue(text, jsonb) is
  'Changes settings of a queue, which need not have a row yet; an object of columns of pgqueue.queues. Written to the audit.';

-- Schedules ---------------------------------------------------------------------------------------------------------

create function pgqueue.put_schedule(name text, settings jsonb) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  made boolean;
  s pgqueue.schedules;
begin
  select c.* into s from pgqueue.schedules c where c.name = put_schedule.name for update;
  made := not found;
  -- The whole of it: what is left out has its default, as it would have in a new row.
  s := pgqueue.populate(null::pgqueue.schedules, settings);
  insert into pgqueue.schedules as c (name, cron, timezone, job_type, payload, queue, priority, max_retries, retry_policy, timeout_ms,
      enabled, misfire, misfire_cap, overlap)
    values (put_schedule.name, s.cron, coalesce(s.timezone, 'UTC'), s.job_type, coalesce(s.payload, '{}'), coalesce(s.queue, 'default'),
      coalesce(s.priority, 2), s.max_retries, s.retry_policy, s.timeout_ms, coalesce(s.enabled, true), coalesce(s.misfire, 'run_once'),
      coalesce(s.misfire_cap, 100), coalesce(s.overlap, 'allow'))
    on conflict on constraint schedules_pkey do update
       set cron = excluded.cron, timezone = excluded.timezone, job_type = excluded.job_type, payload = excluded.payload,
           queue = excluded.queue, priority = excluded.priority, max_retries = excluded.max_retries,
           retry_policy = excluded.retry_policy, timeout_ms = excluded.timeout_ms, enabled = excluded.enabled,
           misfire = excluded.misfire, misfire_cap = excluded.misfire_cap, overlap = excluded.overlap, updated_at = pgqueue.clock();
  perform pgqueue.note('put_schedule', put_schedule.name, null, settings);
  return made;
end $$;
comment on function pgqueue.put_schedule(text, jsonb) is
  'Makes a schedule, or replaces what it says, with a row in the audit. False: it was there.';

create function pgqueue.drop_schedule(name text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  gone boolean;
begin
  delete from pgqueue.schedules s where s.name = drop_schedule.name;
  gone := found;
  if gone then
    perform pgqueue.note('drop_schedule', drop_schedule.name, null);
  end if;
  return gone;
end $$;
comment on function pgqueue.drop_schedule(text) is 'Deletes a schedule, with a row in the audit. False: there was none.';
