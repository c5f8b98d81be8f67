-- Enqueue of very many jobs by arrays: what a client calls that has them as columns rather than as JSON.

-- Custom plans, since a plan for any number of rows joins a hundred thousand of them by a loop within a loop. A function of
-- its own, as the plans of what an INSERT fires must stay.
create function pgqueue.take_row_keys(producers text[], keys text[], queues text[], job_ids uuid[]) returns boolean[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_custom_plan
  as $$
declare
  taken boolean[];
begin
  with wanted as (
    select distinct on (w.producer, w.key) w.producer, w.key, w.n, w.id, coalesce(q.idempotency_ms, 86400000) as ttl
      from unnest(job_ids, producers, keys, take_row_keys.queues) with ordinality w(id, producer, key, queue, n)
      left join pgqueue.queues q on q.name = coalesce(w.queue, 'default')
     where w.key is not null order by w.producer, w.key, w.n),
  had as (
    insert into pgqueue.idempotency_keys as k (producer_id, idempotency_key, job_id, expires_at)
    select w.producer, w.key, w.id, pgqueue.clock() + w.ttl * interval '1 millisecond'
      from wanted w order by w.producer, w.key
    on conflict on constraint "idempotency_key is taken" do update
       set job_id = excluded.job_id, expires_at = excluded.expires_at where k.expires_at <= pgqueue.clock()
    returning k.job_id)
  select array_agg(t.n is not null order by u.n) into taken
    from unnest(job_ids) with ordinality u(id, n)
    left join (select w.n from wanted w where w.id in (select h.job_id from had h)) t on t.n = u.n;
  return taken;
end $$;
comment on function pgqueue.take_row_keys(text[], text[], text[], uuid[]) is
  'Takes the keys of jobs given as arrays, expired ones in place, and says for each job whether it has its key now; the first of those with one key has it.';

create function pgqueue.enqueue_rows(
  job_types text[], payloads jsonb[], queues text[], priorities integer[], scheduled_at timestamptz[], delays_ms bigint[],
  idempotency_keys text[], max_retries integer[], retry_policies jsonb[], timeouts_ms integer[], expires_at timestamptz[],
  producer_ids text[], ordering_keys text[], trace_contexts jsonb[], job_ids uuid[],
  out ids uuid[], out statuses text[], out duplicates boolean[])
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  wrong record;
  taken boolean[];
begin
  select w.n, w.what, w.at into wrong from (
    select u.n, case
        when u.delay not between 0 and 250e12 then 'delay must not be negative or too large'
        when u.delay is not null and u.at is not null then 'give scheduled_at or delay, not both'
        when u.priority not between 0 and 3 then 'priority must be 0, 1, 2 or 3, not ' || u.priority
        -- Checked here, since keys are stored before the jobs whose checks would name them.
        when length(u.key) not between 1 and 256 then 'idempotency_key must have 1 to 256 characters'
        when u.key is not null and length(u.producer) not between 1 and 64 then 'producer_id must have 1 to 64 characters' end as what,
      case when u.delay is not null then 'delay' when u.key is null then 'priority'
           when length(u.key) not between 1 and 256 then 'idempotency_key' else 'producer_id' end as at
      from unnest(enqueue_rows.delays_ms, enqueue_rows.scheduled_at, enqueue_rows.priorities, enqueue_rows.idempotency_keys,
                  enqueue_rows.producer_ids) with ordinality u(delay, at, priority, key, producer, n)) w
   where w.what is not null order by w.n limit 1;
  if found then
    raise exception 'jobs[%]: %', wrong.n - 1, wrong.what using errcode = 'PQ422', column = wrong.at;
  end if;

  -- See enqueue.
  lock table only pgqueue.jobs in row exclusive mode;
  ids := pgqueue.new_job_ids(cardinality(enqueue_rows.job_types));

  if num_nonnulls(enqueue_rows.scheduled_at, enqueue_rows.delays_ms, enqueue_rows.idempotency_keys, enqueue_rows.ordering_keys,
                  enqueue_rows.job_ids) = 0 then
    -- With none of these all jobs are pending and nothing about them is to be looked up: they go where the root would send
    -- them, past its trigger, which would look at each once more. The rows of unnest come in the order of the arrays.
    if '' = any (enqueue_rows.job_types) or '' = any (enqueue_rows.queues) then
      perform pgqueue.check_names(w.queue, w.job_type) from unnest(enqueue_rows.queues, enqueue_rows.job_types) w(queue, job_type);
    end if;
    insert into pgqueue.jobs_live (job_id, queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms,
        expires_at, producer_id, trace_context)
    select w.id, coalesce(w.queue, 'default'), w.job_type, coalesce(w.payload, '{}'), coalesce(w.priority, 2),
           coalesce(w.max_retries, 3), w.retry_policy, w.timeout_ms, w.expires_at, w.producer, w.trace_context
      from unnest(ids, enqueue_rows.job_types, enqueue_rows.payloads, enqueue_rows.queues, enqueue_rows.priorities,
                  enqueue_rows.max_retries, enqueue_rows.retry_policies, enqueue_rows.timeouts_ms, enqueue_rows.expires_at,
                  enqueue_rows.producer_ids, enqueue_rows.trace_contexts)
        w(id, job_type, payload, queue, priority, max_retries, retry_policy, timeout_ms, expires_at, producer, trace_context);
    perform pgqueue.arrive(j.queue, currval('pgqueue.jobs_seq'), j.jobs, j.low, case when exists (select from pgqueue.waiting) then array(
        select w.job_type from unnest(enqueue_rows.job_types, enqueue_rows.queues) w(job_type, queue)
         where coalesce(w.queue, 'default') = j.queue) end)
       from (
         select n.queue, sum(n.jobs)::bigint as jobs, bool_or(n.low) as low
           from (select coalesce(u.queue, 'default') as queue, count(*) as jobs, coalesce(bool_or(u.priority = 3), false) as low
                   from unnest(enqueue_rows.queues, enqueue_rows.priorities) u(queue, priority) group by 1
                 union all
                 select 'default', cardinality(enqueue_rows.job_types)
                     - coalesce(greatest(cardinality(enqueue_rows.queues), cardinality(enqueue_rows.priorities)), 0), false) n
          where n.jobs > 0 group by n.queue order by n.queue) j;
    if exists (select from pgqueue.watchers) then
      perform pgqueue.announce(ids, enqueue_rows.job_types, enqueue_rows.queues);
    end if;
    return;
  end if;

  if enqueue_rows.job_ids is not null then
    ids := array(select coalesce(u.given, u.made)
                   from unnest(enqueue_rows.job_ids, ids) with ordinality u(given, made, n) order by u.n);
  end if;
  taken := pgqueue.take_row_keys(enqueue_rows.producer_ids, enqueue_rows.idempotency_keys, enqueue_rows.queues, ids);

  insert into pgqueue.jobs (job_id, queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms,
      scheduled_at, expires_at, idempotency_key, producer_id, ordering_key, trace_context)
  select w.id, coalesce(w.queue, 'default'), w.job_type, coalesce(w.payload, '{}'), coalesce(w.priority, 2),
         coalesce(w.max_retries, 3), w.retry_policy, w.timeout_ms,
         coalesce(w.at, pgqueue.clock() + w.delay * interval '1 millisecond'), w.expires_at, w.key, w.producer, w.ordering_key, w.trace_context
    from unnest(ids, enqueue_rows.job_types, enqueue_rows.payloads, enqueue_rows.queues, enqueue_rows.priorities,
                enqueue_rows.scheduled_at, enqueue_rows.delays_ms, enqueue_rows.max_retries, enqueue_rows.retry_policies,
                enqueue_rows.timeouts_ms, enqueue_rows.expires_at, enqueue_rows.producer_ids, enqueue_rows.ordering_keys,
                enqueue_rows.trace_contexts, enqueue_rows.idempotency_keys, taken)
      w(id, job_type, payload, queue, priority, at, delay, max_retries, retry_policy, timeout_ms, expires_at, producer,
        ordering_key, trace_context, key, taken)
   where w.key is null or w.taken;

  -- A statement of its own, which sees the keys that others took meanwhile, and the jobs that they stand for.
  select array_agg(w.known order by w.n),
         array_agg(coalesce(l.status, (select f.status from pgqueue.find_job(w.known) f)) order by w.n),
         array_agg(w.duplicate order by w.n)
    into ids, statuses, duplicates
    from (
      select u.n, coalesce(p.job_id, o.job_id, u.id) as known, u.key is not null and not u.taken as duplicate
        from unnest(ids, enqueue_rows.producer_ids, enqueue_rows.idempotency_keys, taken) with ordinality u(id, producer, key, taken, n)
        left join pgqueue.idempotency_keys p on p.producer_id = u.producer and p.idempotency_key = u.key
        left join pgqueue.idempotency_keys o on u.producer is null and o.producer_id is null and o.idempotency_key = u.key) w
    left join pgqueue.jobs_live l on l.job_id = w.known;
end $$;
comment on function pgqueue.enqueue_rows is
  'Enqueues jobs given as arrays, all or nothing; one that is null, or shorter than job_types, leaves defaults. Answers arrays in their order: ids, statuses (null: all pending) and which of the jobs were known by their keys (null: none).';
