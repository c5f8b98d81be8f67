-- Enqueue: a plain INSERT, COPY or INSERT ... SELECT into pgqueue.jobs, or the functions enqueue and enqueue_many.
--
-- One BEFORE ROW trigger on jobs_live, which runs only for rows that its WHEN clause finds unusual, and one AFTER
-- STATEMENT trigger on the root do all the work: the usual row pays for an expression, a statement pays once.
-- Both are security definer, so that a role which may only insert needs nothing else.

create function pgqueue.job_arrives() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
begin
  if new.status not in ('pending', 'submitted') then
    raise exception 'status of a new job cannot be %: leave it out', new.status
      using errcode = 'PQ422', column = 'status',
            hint = 'A job begins as pending, or as submitted when scheduled_at lies ahead.';
  end if;
  if new.scheduled_at > pgqueue.clock() then
    new.status := 'submitted';
    new.due_at := new.scheduled_at;
  else
    new.status := 'pending';
    new.due_at := null;
  end if;
  if new.ordering_key is not null then
    if not pgqueue.lock_key(new.queue, new.ordering_key) then
      new.status := 'submitted';
      new.due_at := null;
    -- Two conditions, one for each index; a statement of its own, since the snapshot must be younger than the lock.
    elsif exists (select from pgqueue.jobs_live h
                   where h.queue = new.queue and h.ordering_key = new.ordering_key and (h.in_line or h.due_at is not null))
       or exists (select from pgqueue.jobs_live w
                   where w.queue = new.queue and w.ordering_key = new.ordering_key and not w.in_line and w.due_at is null) then
      new.status := 'submitted';
      new.due_at := null;
    end if;
  end if;
  return new;
end $$;
comment on function pgqueue.job_arrives is 'Trigger: where a job that is new begins: pending, or submitted until its time or the job before it of its ordering key.';

-- Of cheap nodes, since every INSERT parses the condition anew.
create trigger jobs_live_arrive before insert on pgqueue.jobs_live
  for each row
  when (new.scheduled_at is not null or new.ordering_key is not null or new.due_at is not null or new.status <> 'pending')
  execute function pgqueue.job_arrives();

create function pgqueue.check_ids(job_ids uuid[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong uuid;
begin
  select i into wrong from unnest(job_ids) i where get_byte(uuid_send(i), 6) >> 4 <> 7 limit 1;
  if found then
    raise exception 'job_id must be a UUID of version 7, which % is not', wrong
      using errcode = 'check_violation', column = 'job_id', constraint = 'job_id must be a UUID of version 7',
            hint = 'Leave job_id out, or make it with uuidv7().';
  end if;
  -- Finished jobs are looked up from a day before the time in their id on.
  select i into wrong from unnest(job_ids) i where pgqueue.id_time(i) > clock_timestamp() + interval '1 day' limit 1;
  if found then
    raise exception 'job_id % was made more than a day ahead of the database clock', wrong
      using errcode = 'PQ422', column = 'job_id';
  end if;
  foreach wrong in array job_ids loop
    if pgqueue.finished_job_exists(wrong) then
      raise exception 'job_id % is taken by a finished job', wrong using errcode = 'unique_violation', column = 'job_id';
    end if;
  end loop;
end $$;
comment on function pgqueue.check_ids(uuid[]) is
  'Refuses ids that new jobs may not have: of another version, of a far day, or of a finished job.';

create function pgqueue.check_new(j record) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong text;
  given text;
begin
  select c.name, c.value into wrong, given
    from (values (1, 'status', case when j.status not in ('pending', 'submitted') then j.status end),
                 (2, 'attempts', nullif(j.attempts, 0)::text), (3, 'lost', nullif(j.lost, 0)::text),
                 (4, 'uncharged', nullif(j.uncharged, 0)::text), (5, 'worker_id', j.worker_id::text),
                 (6, 'lease_expires_at', j.lease_expires_at::text), (7, 'started_at', j.started_at::text),
                 (8, 'finished_at', j.finished_at::text), (9, 'cancel_requested_at', j.cancel_requested_at::text),
                 (10, 'result', j.result::text), (11, 'error', j.error), (12, 'errors', nullif(j.errors, '[]')::text),
                 (13, 'progress', j.progress::text), (14, 'created_at', case when j.created_at not between '0001-01-03 00:00+00' and pgqueue.clock() then j.created_at::text end),
                 (15, 'updated_at', case when j.updated_at not between '0001-01-03 00:00+00' and pgqueue.clock() then j.updated_at::text end),
                 (16, 'seq', case when j.seq not between 1 and 4611686018427387903 then j.seq::text end)) c(n, name, value)
   where c.value is not null order by c.n limit 1;
  raise exception '% of a new job must be left out, not given as %', wrong, left(given, 100)
    using errcode = 'PQ422', column = wrong, hint = 'Jobs move on through pgqueue.claim, complete, fail and cancel.';
end $$;
comment on function pgqueue.check_new(record) is 'Refuses a new job that comes with a past, and says which column it is.';

create function pgqueue.jobs_arrived() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
declare
  n record;
  part record;
  -- An id made elsewhere may be of another version or of a finished job; one made by this statement, whose times are in
  -- milliseconds, cannot.
  since constant timestamptz := statement_timestamp() - interval '1 ms';
  first_id uuid;
  end_id uuid;
begin
  -- One look at the first row with all that is to be looked up. Most statements have but that one, of which nothing more is
  -- to be done: most queues are far from their limits, and the bound of their depth says so.
  select a.queue, a.queue as last_queue, (a.status = 'pending')::int::bigint as ready, a.seq as top,
         a.priority = 3 and a.status = 'pending' as low,
         a.status <> 'pending' or a.errors <> '[]' or a.attempts + a.lost + a.uncharged <> 0
           or num_nonnulls(a.idempotency_key, a.ordering_key, a.worker_id, a.lease_expires_at, a.finished_at, a.result, a.error,
                           a.started_at, a.cancel_requested_at, a.progress) > 0
           or a.created_at <> pgqueue.clock() or a.updated_at <> pgqueue.clock() or a.seq > 4611686018427387903 or a.seq < 1
           or a.queue = '' or a.job_type = ''
           or pgqueue.made_between(a.job_id, since, clock_timestamp() + interval '5 ms') is not true as unusual,
         coalesce((select greatest(d.pending + a.seq - d.counted_at_seq, 0) from pgqueue.queue_depths d where d.queue = a.queue and d.counted_at_seq >= 0)
                    <= coalesce((select case when q.rate_per_second is null then least(q.soft_limit, q.hard_limit / 2) else -1 end
                                   from pgqueue.queues q where q.name = a.queue), 50000), false) as roomy,
         exists (select from pgqueue.waiting) as sleepers,
         -- Commits that notify cannot be grouped: producers share twenty notices a second, and watchers read the rest.
         exists (select from pgqueue.watchers)
           and (select s.last_value <= date_part('epoch', clock_timestamp()) * 20 - 1 from pgqueue.notice_slot s) as notice,
         exists (select from arrived offset 1) as more
    into n from arrived a limit 1;
  if not (n.more or n.unusual or n.sleepers or n.notice) and n.roomy or n.queue is null then
    return null;
  end if;
  if n.more then
    -- Bounds that are made once, not for each row.
    first_id := pgqueue.first_id(since);
    end_id := pgqueue.first_id(clock_timestamp() + interval '5 ms');
    select min(a.queue) as queue, max(a.queue) as last_queue, count(*) filter (where a.status = 'pending') as ready, max(a.seq) as top,
           bool_or(a.priority = 3 and a.status = 'pending') as low,
           bool_or(a.status <> 'pending' or a.errors <> '[]' or a.attempts + a.lost + a.uncharged <> 0
             or num_nonnulls(a.idempotency_key, a.ordering_key, a.worker_id, a.lease_expires_at, a.finished_at, a.result, a.error,
                             a.started_at, a.cancel_requested_at, a.progress) > 0
             or a.created_at <> pgqueue.clock() or a.updated_at <> pgqueue.clock() or a.seq > 4611686018427387903 or a.seq < 1
             or a.queue = '' or a.job_type = ''
             or a.job_id < first_id or a.job_id >= end_id or a.job_id::text not like '______________7%') as unusual,
           null::boolean as roomy, n.sleepers, n.notice, n.more
      into n from arrived a;
  end if;
  if n.unusual then
    perform pgqueue.check_names(a.queue, a.job_type) from arrived a where a.queue = '' or a.job_type = '';
    perform pgqueue.check_new(a) from arrived a
      where a.status not in ('pending', 'submitted') or a.errors <> '[]' or a.attempts <> 0 or a.lost <> 0 or a.uncharged <> 0
         or num_nonnulls(a.worker_id, a.lease_expires_at, a.finished_at, a.result, a.error, a.started_at, a.cancel_requested_at, a.progress) > 0
         or a.created_at > pgqueue.clock() or a.updated_at > pgqueue.clock() or least(a.created_at, a.updated_at) < '0001-01-03 00:00+00' or a.seq > 4611686018427387903 or a.seq < 1;
    perform pgqueue.check_ids(array_agg(a.job_id)) from arrived a
      where pgqueue.made_between(a.job_id, since, clock_timestamp() + interval '5 ms') is not true having count(*) > 0;
    if found then
      insert into pgqueue.late_arrivals (job_id, queue, job_type, priority)
        select a.job_id, a.queue, a.job_type, a.priority from arrived a where pgqueue.id_time(a.job_id) < statement_timestamp() - interval '250 ms';
    end if;
    -- All keys at once, whatever their queues: statements that meet must take them in one order.
    perform pgqueue.jobs_take_keys(array_agg(a.producer_id::text), array_agg(a.idempotency_key::text),
                                   array_agg(a.job_id), array_agg(coalesce(q.idempotency_ms, 86400000)))
       from arrived a left join pgqueue.queues q on q.name = a.queue
      where a.idempotency_key is not null having count(*) > 0;
    -- A head that came along is seen by nobody yet, so whoever settles it will see all of these.
    insert into pgqueue.sweep_notes (queue, ordering_key)
      select a.queue, a.ordering_key from arrived a where a.ordering_key is not null
       group by a.queue, a.ordering_key having bool_and(not a.in_line and a.due_at is null);
  end if;
  if n.sleepers or n.roomy is not true then
    if n.queue = n.last_queue then
      perform pgqueue.arrive(n.queue, n.top, n.ready, n.low,
                             case when n.sleepers then array(select a.job_type from arrived a where a.status = 'pending') end);
    else
      for part in
        select a.queue, max(a.seq) as top, count(*) filter (where a.status = 'pending') as ready,
               bool_or(a.priority = 3 and a.status = 'pending') as low,
               case when n.sleepers then array_agg(a.job_type) filter (where a.status = 'pending') end as job_types
          from arrived a group by a.queue order by a.queue
      loop
        perform pgqueue.arrive(part.queue, part.top, part.ready, part.low, part.job_types);
      end loop;
    end if;
  end if;
  if n.notice and current_setting('pgqueue.wake', true) is distinct from 'off' and pgqueue.watched() then
    perform setval('pgqueue.notice_slot', floor(extract(epoch from clock_timestamp()) * 20)::bigint);
    perform pgqueue.publish(array_agg(pgqueue.event(
        case a.status when 'pending' then 'job.queued' else 'job.submitted' end, a.job_id, a.queue, a.job_type,
        null, a.status, 0) order by a.seq))
       from (select * from arrived order by seq limit 2000) a;
  end if;
  return null;
end $$;
comment on function pgqueue.jobs_arrived is 'Trigger: what each INSERT owes: refuses what no new job may have, takes keys, keeps limits, wakes workers, tells watchers.';

create trigger jobs_arrived after insert on pgqueue.jobs
  referencing new table as arrived
  for each statement execute function pgqueue.jobs_arrived();

create function pgqueue.as_enqueued(j pgqueue.jobs, duplicate boolean) returns pgqueue.enqueued
  language sql immutable
  as $$
    select row(j.job_id, j.seq, j.queue, j.job_type, j.payload, j.priority, j.status, j.attempts, j.max_retries, j.lost,
      j.uncharged, j.retry_policy, j.timeout_ms, j.scheduled_at, j.due_at, j.expires_at, j.idempotency_key, j.producer_id,
      j.ordering_key, j.shard, j.in_line, j.worker_id, j.lease_expires_at, j.cancel_requested_at, j.created_at, j.updated_at,
      j.started_at, j.finished_at, j.result, j.error, j.errors, j.progress, j.trace_context, duplicate)::pgqueue.enqueued
  $$;
comment on function pgqueue.as_enqueued is 'A job as enqueue answers it.';

create function pgqueue.enqueue(
  job_type text, payload jsonb default '{}', queue text default 'default', priority integer default 2,
  scheduled_at timestamptz default null, delay interval default null, idempotency_key text default null,
  max_retries integer default 3, retry_policy jsonb default null, timeout_ms integer default null,
  expires_at timestamptz default null, producer_id text default null, ordering_key text default null,
  trace_context jsonb default null, job_id uuid default null)
  returns setof pgqueue.enqueued
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  j pgqueue.jobs;
  ttl bigint;
  id uuid := enqueue.job_id;
  not_before timestamptz := enqueue.scheduled_at;
begin
  if enqueue.priority not between 0 and 3 then
    raise exception 'priority must be 0, 1, 2 or 3, not %', enqueue.priority using errcode = 'PQ422', column = 'priority';
  end if;
  if delay is not null then
    if enqueue.scheduled_at is not null then
      raise exception 'give scheduled_at or delay, not both' using errcode = 'PQ422', column = 'scheduled_at';
    elsif delay < interval '0' then
      raise exception 'delay must not be negative, but is %', delay using errcode = 'PQ422', column = 'delay';
    elsif extract(epoch from delay) > 250e9 then
      raise exception 'delay % is too long', delay using errcode = 'PQ422', column = 'delay';
    end if;
    not_before := pgqueue.clock() + delay;
  end if;

  if enqueue.idempotency_key is not null then
    if length(enqueue.idempotency_key) not between 1 and 256 then
      raise exception 'idempotency_key must have 1 to 256 characters, not %', length(enqueue.idempotency_key)
        using errcode = 'PQ422', column = 'idempotency_key';
    end if;
    -- Taken before the id is drawn: whoever waits for a key may draw an id long before its job is there, and count_arrivals
    -- looks for no job below its mark unless its writer was seen.
    lock table only pgqueue.jobs in row exclusive mode;
    id := coalesce(id, pgqueue.new_job_id());
    ttl := coalesce((select q.idempotency_ms from pgqueue.queues q where q.name = coalesce(enqueue.queue, 'default')), 86400000);
    if pgqueue.take_keys(array[enqueue.producer_id], array[enqueue.idempotency_key], array[id], array[ttl], false) = 0 then
      return query select * from pgqueue.known_job(enqueue.producer_id, enqueue.idempotency_key);
      return;
    end if;
  end if;

  if num_nonnulls(not_before, enqueue.idempotency_key, enqueue.ordering_key, id) = 0
     and enqueue.job_type <> '' and coalesce(enqueue.queue, 'default') <> '' then
    -- With none of these nothing is to be looked up about the job: it goes where the root would send it, past its trigger.
    insert into pgqueue.jobs_live as n (queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms,
        expires_at, producer_id, trace_context)
      values (coalesce(enqueue.queue, 'default'), enqueue.job_type, coalesce(enqueue.payload, '{}'),
        coalesce(enqueue.priority, 2), coalesce(enqueue.max_retries, 3), enqueue.retry_policy, enqueue.timeout_ms,
        enqueue.expires_at, enqueue.producer_id, enqueue.trace_context)
      returning n.* into j;
    perform pgqueue.arrive(j.queue, j.seq, 1, j.priority = 3, array[j.job_type]);
    if exists (select from pgqueue.watchers) then
      perform pgqueue.announce(array[j.job_id], array[j.job_type], array[j.queue]);
    end if;
    return next pgqueue.as_enqueued(j, false);
    return;
  end if;

  insert into pgqueue.jobs as n (job_id, queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms,
      scheduled_at, expires_at, idempotency_key, producer_id, ordering_key, trace_context)
    values (coalesce(id, pgqueue.new_job_id()), coalesce(enqueue.queue, 'default'), enqueue.job_type, coalesce(enqueue.payload, '{}'),
      coalesce(enqueue.priority, 2), coalesce(enqueue.max_retries, 3), enqueue.retry_policy, enqueue.timeout_ms,
      not_before, enqueue.expires_at, enqueue.idempotency_key, enqueue.producer_id, enqueue.ordering_key, enqueue.trace_context)
    returning n.* into j;
  return next pgqueue.as_enqueued(j, false);
end $$;
comment on function pgqueue.enqueue is
  'Enqueues one job; all arguments but the first are optional. A known idempotency_key answers the job it stands for.';

create function pgqueue.known_job(producer_id text, idempotency_key text) returns setof pgqueue.enqueued
  language plpgsql security definer set search_path = pg_catalog, pg_temp set enable_seqscan = off
  as $$
declare
  id uuid;
  j pgqueue.jobs;
begin
  -- Two conditions, since the index has no other way to null.
  if known_job.producer_id is null then
    select k.job_id into id from pgqueue.idempotency_keys k
     where k.producer_id is null and k.idempotency_key = known_job.idempotency_key;
  else
    select k.job_id into id from pgqueue.idempotency_keys k
     where k.producer_id = known_job.producer_id and k.idempotency_key = known_job.idempotency_key;
  end if;
  select f.* into j from pgqueue.find_job(id) f;
  if j.job_id is null then
    -- Deleted meanwhile by retention or discard: the key still stands for it.
    j.job_id := id;
    j.idempotency_key := known_job.idempotency_key;
    j.producer_id := known_job.producer_id;
  elsif not pgqueue.may_read(j.producer_id) then
    -- Whoever names another as producer_id gets to know that there is a job, as the key demands, and not what is in it.
    j.payload := null;
    j.result := null;
    j.error := null;
    j.errors := null;
    j.progress := null;
    j.trace_context := null;
  end if;
  return next pgqueue.as_enqueued(j, true);
end $$;
comment on function pgqueue.known_job is
  'The job that has an idempotency key already, as enqueue answers it: without its contents to whom may not read it.';

create function pgqueue.priority_number(priority jsonb) returns smallint
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
begin
  if priority is null or jsonb_typeof(priority) = 'null' then
    return 2;
  elsif priority in ('0', '1', '2', '3') then
    return priority::smallint;
  elsif jsonb_typeof(priority) = 'string' and priority #>> '{}' in ('critical', 'high', 'normal', 'low') then
    return array_position(array['critical', 'high', 'normal', 'low'], priority #>> '{}') - 1;
  end if;
  raise exception 'priority must be 0 to 3 or critical, high, normal, low, not %', priority
    using errcode = 'PQ422', column = 'priority';
end $$;
comment on function pgqueue.priority_number is 'A priority given as its name or number, as its number.';

create function pgqueue.job_fault(job jsonb) returns text
  language plpgsql stable set search_path = pg_catalog, pg_temp
  as $$
declare
  at text;
  rule text;
  id uuid;
  number smallint;
  retries pgqueue.max_retries;
  policy pgqueue.retry_policy;
  timeout pgqueue.timeout_ms;
  later pgqueue.scheduled_at;
  expiry pgqueue.expires_at;
  delay numeric;
  key pgqueue.ordering_key;
  context pgqueue.trace_context;
begin
  at := 'job_id'; id := job ->> 'job_id';
  at := 'priority'; number := pgqueue.priority_number(job -> 'priority');
  at := 'max_retries'; retries := job ->> 'max_retries';
  at := 'retry_policy'; policy := nullif(job -> 'retry_policy', 'null');
  at := 'timeout_ms'; timeout := job ->> 'timeout_ms';
  at := 'scheduled_at'; later := job ->> 'scheduled_at';
  at := 'expires_at'; expiry := job ->> 'expires_at';
  at := 'delay_ms'; delay := job ->> 'delay_ms';
  at := 'ordering_key'; key := job ->> 'ordering_key';
  at := 'trace_context'; context := nullif(job -> 'trace_context', 'null');
  return null;
exception
  when check_violation then
    get stacked diagnostics rule = constraint_name;
    return format('has a bad %s: it %s', at, case at when 'retry_policy' then substr(sqlerrm, length(at) + 2)
      else substr(rule, length(at) + 2) || ', not ' || left((job -> at)::text, 100) end);
  when sqlstate 'PQ422' then
    return format('has a bad %s: %s', at, sqlerrm);
  when data_exception then
    return format('has a bad %s: it must be %s, not %s', at,
      case at when 'job_id' then 'a UUID of version 7' when 'scheduled_at' then 'a time' when 'expires_at' then 'a time'
              when 'delay_ms' then 'a number' else 'a whole number up to 2147483647' end, left((job -> at)::text, 100));
end $$;
comment on function pgqueue.job_fault(jsonb) is 'What is wrong with a value in an object that describes a job; null: nothing.';

create function pgqueue.enqueue_many(jobs jsonb) returns setof pgqueue.enqueued
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong record;
begin
  if jsonb_typeof(jobs) is distinct from 'array' then
    raise exception 'jobs must be a JSON array of objects' using errcode = 'PQ422', column = 'jobs';
  end if;
  select w.n, w.what into wrong from (
    select e.n, case
        when jsonb_typeof(e.job) <> 'object' then 'is not an object'
        when not (e.job ? 'job_type' or e.job ? 'type') then 'has no job_type'
        -- Checked here, since keys are stored before the jobs whose checks would name them.
        when length(e.job ->> 'idempotency_key') not between 1 and 256 then 'has a bad idempotency_key: it must have 1 to 256 characters'
        when length(e.job ->> 'producer_id') not between 1 and 64 then 'has a bad producer_id: it must have 1 to 64 characters'
        else coalesce((select 'has the unknown key ' || quote_ident(k) from jsonb_object_keys(case when jsonb_typeof(e.job) = 'object' then e.job else '{}' end) k
               where k not in ('job_type', 'type', 'payload', 'queue', 'priority', 'scheduled_at', 'delay_ms', 'idempotency_key',
                 'max_retries', 'retry_policy', 'timeout_ms', 'expires_at', 'producer_id', 'ordering_key', 'trace_context', 'job_id') limit 1),
          -- Few jobs come with any of these.
          case when e.job ?| array['job_id', 'priority', 'max_retries', 'retry_policy', 'timeout_ms', 'scheduled_at', 'expires_at', 'delay_ms',
                                   'ordering_key', 'trace_context'] then pgqueue.job_fault(e.job) end)
      end as what
      from jsonb_array_elements(jobs) with ordinality e(job, n)) w
   where w.what is not null order by w.n limit 1;
  if found then
    raise exception 'jobs[%] %', wrong.n - 1, wrong.what
      using errcode = 'PQ422', column = coalesce(substring(wrong.what from '^has a bad ([a-z_]+):'), 'jobs');
  end if;
  select e.n, e.job ->> 'delay_ms' as delay_ms into wrong from jsonb_array_elements(jobs) with ordinality e(job, n)
   where (e.job ->> 'delay_ms')::numeric not between 0 and 250e12
      or e.job ->> 'delay_ms' is not null and e.job ->> 'scheduled_at' is not null limit 1;
  if found then
    raise exception 'jobs[%]: delay_ms must not be negative or too large, and not stand beside scheduled_at, but is %', wrong.n - 1, wrong.delay_ms
      using errcode = 'PQ422', column = 'delay_ms';
  end if;

  return query
  with wanted as materialized (
    select e.n, coalesce((e.job ->> 'job_id')::uuid, pgqueue.new_job_id()) as job_id,
           coalesce(e.job ->> 'queue', 'default') as queue, coalesce(e.job ->> 'job_type', e.job ->> 'type') as job_type,
           coalesce(nullif(e.job -> 'payload', 'null'), '{}') as payload, pgqueue.priority_number(e.job -> 'priority') as priority,
           coalesce((e.job ->> 'max_retries')::int, 3) as max_retries, nullif(e.job -> 'retry_policy', 'null') as retry_policy,
           (e.job ->> 'timeout_ms')::int as timeout_ms,
           coalesce((e.job ->> 'scheduled_at')::timestamptz,
                    pgqueue.clock() + (e.job ->> 'delay_ms')::double precision * interval '1 millisecond') as scheduled_at,
           (e.job ->> 'expires_at')::timestamptz as expires_at, e.job ->> 'idempotency_key' as idempotency_key,
           e.job ->> 'producer_id' as producer_id, e.job ->> 'ordering_key' as ordering_key,
           nullif(e.job -> 'trace_context', 'null') as trace_context
      from jsonb_array_elements(jobs) with ordinality e(job, n)),
  keyed as (
    select distinct on (w.producer_id, w.idempotency_key) w.producer_id, w.idempotency_key, w.job_id,
           coalesce(q.idempotency_ms, 86400000) as ttl
      from wanted w left join pgqueue.queues q on q.name = w.queue
     where w.idempotency_key is not null order by w.producer_id, w.idempotency_key, w.n),
  taken as materialized (
    insert into pgqueue.idempotency_keys as k (producer_id, idempotency_key, job_id, expires_at)
    select d.producer_id, d.idempotency_key, d.job_id, pgqueue.clock() + d.ttl * interval '1 millisecond'
      from keyed d order by d.producer_id, d.idempotency_key
    on conflict on constraint "idempotency_key is taken" do update
       set job_id = excluded.job_id, expires_at = excluded.expires_at where k.expires_at <= pgqueue.clock()
    returning k.job_id),
  inserted as (
    insert into pgqueue.jobs as n (job_id, queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms,
        scheduled_at, expires_at, idempotency_key, producer_id, ordering_key, trace_context)
    select w.job_id, w.queue, w.job_type, w.payload, w.priority, w.max_retries, w.retry_policy, w.timeout_ms,
           w.scheduled_at, w.expires_at, w.idempotency_key, w.producer_id, w.ordering_key, w.trace_context
      from wanted w
     where w.idempotency_key is null or w.job_id in (select t.job_id from taken t)
     order by w.n
    returning n.*)
  select a.* from wanted w
    left join inserted i on i.job_id = w.job_id
    cross join lateral (
      select (pgqueue.as_enqueued(i, false)).* where i.job_id is not null
      union all
      select k.* from pgqueue.known_job(w.producer_id, w.idempotency_key) k where i.job_id is null) a
   order by w.n;
end $$;
comment on function pgqueue.enqueue_many(jsonb) is
  'Enqueues an array of jobs in one statement, all or nothing; answers one row for each, in their order.';
