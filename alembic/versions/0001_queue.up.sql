set local lock_timeout = '2s';
set local statement_timeout = 0;
set local search_path = '';
set local standard_conforming_strings = on;

-- pgqueue: the queue itself. Everything else (worker, REST, command line, any other language) calls it by name.
--
-- A job is one row of pgqueue.jobs. It lives in one small partition, jobs_live, while anything can still happen to
-- it, and moves to jobs_completed, jobs_cancelled or jobs_dead_letter when it ends:
--
--   submitted -> pending -> processing -> completed
--       ^           ^        |  |  |
--       | snoozed   | retry, |  |  +----> failed (waits for its retry) -> pending
--       +-----------+ lost   |  |                                   \
--                     lease  |  +----> cancelled                     +-> dead_letter -> pending (retry)
--                            +-------> dead_letter
--
-- The files stand in the order of a job's life: 1 schema, 2 enqueue, 3 claim, 4 finish, 5 operate, 6 sweep, 7 views,
-- 8 access. Rules that hold everywhere:
--   * A row leaves jobs_live by DELETE and enters a finished partition by INSERT, in one statement or transaction, and
--     never through the root (whose triggers are for producers) and never by an UPDATE that moves it.
--   * (worker_id, attempts) is the fence: whoever finishes an attempt must name both.
--   * Claims start at claim_starts.low_seq, so that dead index entries which an old snapshot keeps are not walked.
--     Whoever makes a row pending below that point says so with lower_cursor(); everybody else draws a new seq.
--   * An UPDATE of many live jobs that leaves their status sets ordering_key to itself: where no column is named of which
--     shard or in_line is made, PostgreSQL 16 to 18 reads these expressions anew for every row.
--   * A claim, a heartbeat and progress change no column that an index of jobs_live names, in its columns or its condition
--     (nor does a new index): so they write no entry in any (HOT), and half of each page is left free for them.
--   * What producers and claimers read on every call (queues, queue_depths, claim_cursors, waiting, watchers) gains a
--     row version only now and then, since an old snapshot would keep them all.

create schema if not exists pgqueue;
comment on schema pgqueue is 'pgqueue: a job queue in which PostgreSQL is the only moving part';

create function pgqueue.clock() returns timestamptz
  language sql stable parallel safe
  as $$ select pg_catalog.statement_timestamp() $$;
comment on function pgqueue.clock() is
  'The one clock. Tests move it by replacing this function; stable and inlined, so that it can bound an index scan.';

do $$
begin
  if pg_catalog.current_setting('server_version_num')::int >= 180000 then
    create function pgqueue.new_job_id() returns uuid language sql volatile parallel safe
      as 'select pg_catalog.uuidv7()';
    create function pgqueue.made_between(job_id uuid, since timestamptz, upto timestamptz) returns boolean
      language sql stable parallel safe
      as 'select pg_catalog.uuid_extract_version(job_id) = 7 and pg_catalog.uuid_extract_timestamp(job_id) between since and upto';
  else
    create function pgqueue.new_job_id() returns uuid language sql volatile parallel safe
      as $f$
        select (overlay(pg_catalog.lpad(pg_catalog.to_hex(pg_catalog.trunc(extract(epoch from pg_catalog.clock_timestamp()) * 4096000)::bigint), 15, '0')
                  placing '7' from 13 for 0)
                || pg_catalog.substr(pg_catalog.gen_random_uuid()::text, 20))::uuid
      $f$;
    create function pgqueue.made_between(job_id uuid, since timestamptz, upto timestamptz) returns boolean
      language sql stable parallel safe
      as $f$
        select job_id between
          (pg_catalog.lpad(pg_catalog.to_hex((extract(epoch from since) * 1000)::bigint), 12, '0') || '70000000000000000000')::uuid
          and (pg_catalog.lpad(pg_catalog.to_hex((extract(epoch from upto) * 1000)::bigint), 12, '0') || '7fffffffffffffffffff')::uuid
          and job_id::text like '______________7%'
      $f$;
  end if;
end $$;
comment on function pgqueue.made_between(uuid, timestamptz, timestamptz) is
  'Whether a UUID is of version 7, and made between two instants; null is no. Inlined, so that to ask once costs little.';
comment on function pgqueue.new_job_id() is
  'A UUID of version 7: milliseconds since 1970, 12 bits of the fraction (RFC 9562, 6.2, method 3), then random bits.';

create function pgqueue.new_job_ids(jobs integer) returns uuid[]
  language plpgsql volatile set search_path = pg_catalog, pg_temp
  as $$
declare
  -- Drawn once and counted on (RFC 9562, 6.2, method 2): random bits for each id are a quarter of what a job costs.
  drawn constant text := pgqueue.new_job_id()::text;
  head constant text := left(drawn, 24);
  start constant bigint := 140737488355328 + (('x' || right(drawn, 12))::bit(48)::bigint & 70368744177663);
begin
  return array(select (head || to_hex(start + n))::uuid from generate_series(1, jobs) n);
end $$;
comment on function pgqueue.new_job_ids(integer) is 'So many new ids, one after the other.';

create function pgqueue.id_time(job_id uuid) returns timestamptz
  language sql immutable strict parallel safe
  as $$
    select pg_catalog.to_timestamp((
      (pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 0)::bigint << 40)
      + (pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 1)::bigint << 32)
      + (pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 2)::bigint << 24)
      + (pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 3)::bigint << 16)
      + (pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 4)::bigint << 8)
      + pg_catalog.get_byte(pg_catalog.uuid_send(job_id), 5)::bigint) / 1000.0)
  $$;
comment on function pgqueue.id_time(uuid) is 'The instant inside a UUID of version 7.';

create function pgqueue.retry_policy_fault(policy jsonb) returns text
  language plpgsql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$
declare
  r record;
  low numeric;
  high numeric;
begin
  if jsonb_typeof(policy) <> 'object' then
    return 'must be an object of base_delay_ms, max_delay_ms, backoff_multiplier and jitter, not ' || left(policy::text, 100);
  end if;
  for r in select e.key, e.value from jsonb_each(policy) e order by e.key loop
    if r.key = 'jitter' then
      if jsonb_typeof(r.value) <> 'boolean' then
        return 'must have true or false as jitter, not ' || left(r.value::text, 100);
      end if;
      continue;
    elsif r.key not in ('base_delay_ms', 'max_delay_ms', 'backoff_multiplier') then
      return format('must have no key %s: it takes base_delay_ms, max_delay_ms, backoff_multiplier and jitter', to_json(left(r.key, 100)));
    end if;
    low := case r.key when 'backoff_multiplier' then 1 else 0 end;
    high := case r.key when 'backoff_multiplier' then 1000 else 31536000000 end;
    if jsonb_typeof(r.value) <> 'number' or (r.value #>> '{}')::numeric not between low and high then
      return format('must have a number from %s to %s as %s, not %s', low, high, r.key, left(r.value::text, 100));
    end if;
  end loop;
  return null;
end $$;
comment on function pgqueue.retry_policy_fault(jsonb) is
  'What is wrong with a retry policy, to be read after its name; null: nothing. Right is an object of base_delay_ms and
max_delay_ms (0 to a year), backoff_multiplier (1 to 1000) and jitter (boolean), each optional.';

create function pgqueue.check_retry_policy(policy jsonb) returns boolean
  language plpgsql immutable strict parallel safe set search_path = pg_catalog, pg_temp
  as $$
declare
  -- plpgsql, since a function in SQL would be inlined into the check anew by every INSERT.
  fault constant text := pgqueue.retry_policy_fault(policy);
begin
  if fault is not null then
    raise exception 'retry_policy %', fault using errcode = 'check_violation', column = 'retry_policy',
      constraint = 'retry_policy must be a retry policy';
  end if;
  return true;
end $$;
comment on function pgqueue.check_retry_policy(jsonb) is
  'True for a valid retry policy; of another it says what is wrong, for which the name of a constraint is too short.';

-- Rules of single columns are domains and not CHECKs of the table: a domain's rule is compiled once a session, a CHECK
-- anew by every statement (60 of the 130 microseconds of a small INSERT), and only values that come from outside pay.
-- Columns that people gather into arrays (job_id, queue, job_type) stay plain, since an array of a domain is no text[].
create domain pgqueue.priority as smallint constraint "priority must be 0, 1, 2 or 3" check (value between 0 and 3);
create domain pgqueue.max_retries as integer
  constraint "max_retries must be 0 to 1000000" check (value between 0 and 1000000);
create domain pgqueue.timeout_ms as integer constraint "timeout_ms must be positive" check (value > 0);
create domain pgqueue.retry_policy as jsonb
  constraint "retry_policy must be a retry policy" check (value is null or pgqueue.check_retry_policy(value));
create domain pgqueue.scheduled_at as timestamptz
  constraint "scheduled_at must lie between the years 1 and 9998"
  check (value >= '0001-01-03 00:00+00' and value < '9999-01-01 00:00+00');
create domain pgqueue.expires_at as timestamptz
  constraint "expires_at must lie between the years 1 and 9998"
  check (value >= '0001-01-03 00:00+00' and value < '9999-01-01 00:00+00');
create domain pgqueue.idempotency_key as text
  constraint "idempotency_key must have 1 to 256 characters" check (length(value) between 1 and 256);
create domain pgqueue.producer_id as text
  constraint "producer_id must have 1 to 64 characters" check (length(value) between 1 and 64);
create domain pgqueue.ordering_key as text
  constraint "ordering_key must have 1 to 256 characters" check (length(value) between 1 and 256);

create domain pgqueue.trace_context as jsonb
  constraint "trace_context must be a JSON object" check (jsonb_typeof(value) = 'object');

create sequence pgqueue.jobs_seq as bigint cache 1;
comment on sequence pgqueue.jobs_seq is 'The order of jobs in their queue.';

create table pgqueue.jobs (
  job_id uuid not null default pgqueue.new_job_id(),
  seq bigint not null default nextval('pgqueue.jobs_seq'),
  queue text not null default 'default',
  job_type text not null,
  payload jsonb not null default '{}',
  priority pgqueue.priority not null default 2,
  status text not null default 'pending',
  attempts integer not null default 0,
  max_retries pgqueue.max_retries not null default 3,
  lost integer not null default 0,
  uncharged integer not null default 0,
  retry_policy pgqueue.retry_policy,
  timeout_ms pgqueue.timeout_ms,
  scheduled_at pgqueue.scheduled_at,
  due_at timestamptz,
  expires_at pgqueue.expires_at,
  idempotency_key pgqueue.idempotency_key,
  producer_id pgqueue.producer_id,
  ordering_key pgqueue.ordering_key,
  -- Every statement that writes a job reads these expressions anew, so they are short ones.
  shard smallint not null generated always as (coalesce(hashtext(ordering_key), get_byte(uuid_send(job_id), 15)) & 63) stored,
  -- Pending or processing.
  in_line boolean not null generated always as (starts_with(status, 'p')) stored,
  worker_id uuid,
  lease_expires_at timestamptz,
  cancel_requested_at timestamptz,
  created_at timestamptz not null default pgqueue.clock(),
  updated_at timestamptz not null default pgqueue.clock(),
  started_at timestamptz,
  finished_at timestamptz,
  result jsonb,
  error text,
  errors jsonb not null default '[]',
  progress jsonb,
  trace_context pgqueue.trace_context
) partition by list (status);
comment on table pgqueue.jobs is
  'All jobs. INSERT INTO pgqueue.jobs (job_type, payload) is a full enqueue; everything after that is a function''s work.';
comment on column pgqueue.jobs.job_id is 'A UUID of version 7; given ones must be new and of the present time.';
comment on column pgqueue.jobs.queue is '1 to 63 characters.';
comment on column pgqueue.jobs.job_type is 'Which task runs it; 1 to 128 characters.';
comment on column pgqueue.jobs.payload is 'What the task is given, any JSON.';
comment on column pgqueue.jobs.status is 'submitted (not due yet), pending, processing, completed, failed (a retry is due), dead_letter or cancelled.';
comment on column pgqueue.jobs.max_retries is 'Retries after the first attempt: 3 means four attempts at most.';
comment on column pgqueue.jobs.retry_policy is 'In place of the queue''s: base_delay_ms, max_delay_ms, backoff_multiplier, jitter.';
comment on column pgqueue.jobs.timeout_ms is 'How long one attempt may run; null: as the queue says, else 15 minutes.';
comment on column pgqueue.jobs.scheduled_at is 'Not before this time, as asked.';
comment on column pgqueue.jobs.expires_at is 'Not after this time; null: as long as the queue lets jobs wait.';
comment on column pgqueue.jobs.idempotency_key is 'One job for each key and producer_id, for as long as the queue''s idempotency_ms.';
comment on column pgqueue.jobs.producer_id is 'Who enqueued it.';
comment on column pgqueue.jobs.ordering_key is 'Jobs of one key in a queue run one at a time, in the order in which they came.';
comment on column pgqueue.jobs.shard is '0 to 63, by the ordering_key if there is one, else by the job_id: what the workers of a group divide.';
comment on column pgqueue.jobs.worker_id is 'The start of a worker that holds it, or held it last.';
comment on column pgqueue.jobs.lease_expires_at is 'When its worker counts as lost, unless it renews this.';
comment on column pgqueue.jobs.cancel_requested_at is 'When somebody asked to cancel it while it ran.';
comment on column pgqueue.jobs.created_at is 'When it was enqueued.';
comment on column pgqueue.jobs.updated_at is 'When it was last changed by the queue.';
comment on column pgqueue.jobs.started_at is 'When the last attempt began.';
comment on column pgqueue.jobs.finished_at is 'When it came to its final status.';
comment on column pgqueue.jobs.result is 'What its task returned.';
comment on column pgqueue.jobs.error is 'The last error, in one line.';
comment on column pgqueue.jobs.errors is 'A record of each failed attempt, the newest twenty.';
comment on column pgqueue.jobs.progress is 'What the running attempt reported last.';
comment on column pgqueue.jobs.trace_context is 'W3C traceparent and tracestate of whoever enqueued it.';
comment on column pgqueue.jobs.seq is 'Order in the queue; drawn anew when a delayed job or a retry becomes pending.';
comment on column pgqueue.jobs.priority is '0 critical, 1 high, 2 normal, 3 low';
comment on column pgqueue.jobs.in_line is 'Pending or processing: a claim does not change it, so indexes of pending jobs hold both, and the claim writes none.';
comment on column pgqueue.jobs.attempts is 'Attempts begun; with worker_id the fence of every finish.';
comment on column pgqueue.jobs.lost is 'Leases lost because the worker died; not charged against max_retries.';
comment on column pgqueue.jobs.uncharged is
  'Attempts that max_retries was raised for (snoozes, and all before the last retry by hand): the backoff counts without them.';
comment on column pgqueue.jobs.due_at is
  'When a submitted or failed job becomes pending. A submitted job without it waits for the job before it of its ordering_key.';

create table pgqueue.jobs_live partition of pgqueue.jobs
  for values in ('submitted', 'pending', 'processing', 'failed')
  with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000,
        autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0.2,
        fillfactor = 45);
comment on table pgqueue.jobs_live is
  'Jobs to which something can still happen. Edit them as pgqueue.jobs, where what you write is checked.';
-- That a name is not empty is looked at by triggers, which costs less; an index must never see one that is too long.
alter table pgqueue.jobs_live
  add primary key (job_id),
  add constraint "queue must have 1 to 63 characters" check (length(queue) <= 63),
  add constraint "job_type must have 1 to 128 characters" check (length(job_type) <= 128);
-- No two entries are alike, so a full page looks for equals in vain.
create index jobs_live_pending on pgqueue.jobs_live (queue, priority, seq)
  with (deduplicate_items = off) where in_line;
create index jobs_live_pending_type on pgqueue.jobs_live (queue, job_type, priority, seq)
  with (deduplicate_items = off) where in_line;
create index jobs_live_due on pgqueue.jobs_live (due_at) where due_at is not null;
create index jobs_live_expires on pgqueue.jobs_live (expires_at) where in_line and expires_at is not null;
create unique index "ordering_key must have only one job that does not wait"
  on pgqueue.jobs_live (queue, ordering_key)
  where ordering_key is not null and (in_line or due_at is not null);
create index jobs_live_key_waiting on pgqueue.jobs_live (queue, ordering_key, seq)
  where ordering_key is not null and not in_line and due_at is null;

create table pgqueue.jobs_completed partition of pgqueue.jobs for values in ('completed') partition by range (finished_at);
create table pgqueue.jobs_cancelled partition of pgqueue.jobs for values in ('cancelled') partition by range (finished_at);
create table pgqueue.jobs_dead_letter partition of pgqueue.jobs for values in ('dead_letter') partition by range (finished_at);
-- Never holds a row: a status that has no partition comes here to be told what it should have been.
create table pgqueue.jobs_unknown partition of pgqueue.jobs default;
comment on table pgqueue.jobs_unknown is 'Always empty: it refuses jobs of an unknown status.';
create table pgqueue.jobs_completed_default partition of pgqueue.jobs_completed default;
create table pgqueue.jobs_cancelled_default partition of pgqueue.jobs_cancelled default;
create table pgqueue.jobs_dead_letter_default partition of pgqueue.jobs_dead_letter default;
create function pgqueue.keep_few_statistics(jobs regclass) returns void
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
begin
  -- Hot statements have pinned plans, and the columns that others look by are few. With the usual target of 100 an ANALYZE
  -- of a table of jobs, of which autovacuum makes one after the other, takes 0.4 s; with these 0.015 s.
  execute (
    select format('alter table %s %s', jobs, string_agg(format('alter column %I set statistics %s', a.attname, case
        when a.attname in ('job_id', 'seq', 'queue', 'job_type', 'priority', 'status', 'scheduled_at', 'due_at', 'expires_at',
                           'idempotency_key', 'producer_id', 'ordering_key', 'worker_id', 'lease_expires_at', 'created_at',
                           'updated_at', 'started_at', 'finished_at') then 10 else 0 end), ', '))
      from pg_attribute a where a.attrelid = jobs and a.attnum > 0 and not a.attisdropped);
end $$;
comment on function pgqueue.keep_few_statistics(regclass) is
  'Sets what ANALYZE keeps of a table of jobs, and of its partitions.';
do $$ begin perform pgqueue.keep_few_statistics('pgqueue.jobs'); end $$;
create function pgqueue.index_ids(jobs regclass) returns void
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
declare
  index constant text := (select c.relname from pg_class c where c.oid = jobs) || '_job_id';
begin
  -- Of the partition alone, since a unique index of all would need finished_at as well. It is what a subscriber knows rows
  -- by: in a publication of all tables nobody can change rows of a table without such, and of one with generated columns
  -- the whole row does not do.
  execute format('create unique index %I on %s (job_id)', index, jobs);
  execute format('alter table %s replica identity using index %I', jobs, index);
end $$;
comment on function pgqueue.index_ids(regclass) is 'Gives a partition of finished jobs its index of ids.';
do $$ begin
  perform pgqueue.index_ids(d::regclass)
     from unnest(array['pgqueue.jobs_completed_default', 'pgqueue.jobs_cancelled_default', 'pgqueue.jobs_dead_letter_default']) d;
end $$;
comment on table pgqueue.jobs_completed is 'Completed jobs, a partition per day.';
comment on table pgqueue.jobs_cancelled is 'Cancelled jobs, a partition per day.';
comment on table pgqueue.jobs_dead_letter is 'Dead letters, a partition per week.';

create table pgqueue.queues (
  name text primary key constraint "name must have 1 to 63 characters" check (length(name) between 1 and 63),
  paused boolean not null default false,
  paused_at timestamptz,
  weights smallint[] default '{8,4,2,1}'
    constraint "weights must be four numbers from 0 to 100, not all 0"
    check (array_ndims(weights) = 1 and cardinality(weights) = 4 and array_position(weights, null) is null
           and 0 <= all (weights) and 100 >= all (weights) and 0 < any (weights))
    constraint "weights must have the subscripts 1 to 4" check (array_lower(weights, 1) = 1),
  lease_ms integer not null default 30000 constraint "lease_ms must be 100 to 86400000" check (lease_ms between 100 and 86400000),
  timeout_ms integer not null default 900000 constraint "timeout_ms must be positive" check (timeout_ms > 0),
  max_lost integer not null default 5 constraint "max_lost must not be negative" check (max_lost >= 0),
  idempotency_ms bigint not null default 86400000
    constraint "idempotency_ms must be 0 to 315360000000" check (idempotency_ms between 0 and 315360000000),
  retry_policy jsonb constraint "retry_policy must be a retry policy" check (retry_policy is null or pgqueue.check_retry_policy(retry_policy)),
  soft_limit integer not null default 50000 constraint "soft_limit must not be negative" check (soft_limit >= 0),
  hard_limit integer not null default 100000 constraint "hard_limit must not be negative" check (hard_limit >= 0),
  -- Whoever lowers hard_limit alone need not know of the other, whose default then does nothing.
  constraint "soft_limit must not be above hard_limit" check (soft_limit <= hard_limit or soft_limit = 50000),
  rate_per_second integer constraint "rate_per_second must be positive" check (rate_per_second > 0),
  shed_low boolean not null default false,
  pending_ttl interval not null default '24 hours' constraint "pending_ttl must be positive and at most 100 years"
    check (pending_ttl > '0' and extract(epoch from pending_ttl) <= 3155760000),
  completed_ttl interval not null default '30 days' constraint "completed_ttl must be positive and at most 100 years"
    check (completed_ttl > '0' and extract(epoch from completed_ttl) <= 3155760000),
  failed_ttl interval not null default '7 days' constraint "failed_ttl must be positive and at most 100 years"
    check (failed_ttl > '0' and extract(epoch from failed_ttl) <= 3155760000),
  dead_letter_ttl interval not null default '90 days' constraint "dead_letter_ttl must be positive and at most 100 years"
    check (dead_letter_ttl > '0' and extract(epoch from dead_letter_ttl) <= 3155760000),
  cancelled_ttl interval not null default '7 days' constraint "cancelled_ttl must be positive and at most 100 years"
    check (cancelled_ttl > '0' and extract(epoch from cancelled_ttl) <= 3155760000),
  created_at timestamptz not null default pgqueue.clock(),
  updated_at timestamptz not null default pgqueue.clock()
);
comment on table pgqueue.queues is 'Settings of queues; a queue without a row has the defaults. Edit by SQL.';
comment on column pgqueue.queues.weights is 'Shares of critical, high, normal and low in a claim; null is strict order.';
comment on column pgqueue.queues.soft_limit is
  'Pending jobs above which producers are slowed down: those of all such queues share 1,000 jobs a second (SQLSTATE PQ429 beyond). Not above hard_limit, unless it is the default.';
comment on column pgqueue.queues.hard_limit is 'Pending jobs above which enqueues are refused with SQLSTATE PQ503.';
comment on column pgqueue.queues.rate_per_second is
  'Jobs that may be enqueued per second (SQLSTATE PQ429 beyond); null: any number. A statement may bring more at once, after which none are let in until that is made up for, at most for a minute.';
comment on column pgqueue.queues.shed_low is
  'Above soft_limit low jobs are refused (PQ503), and the newest waiting ones become dead letters until the queue is at soft_limit.';

create table pgqueue.queue_pauses (
  queue text not null,
  paused_at timestamptz not null,
  resumed_at timestamptz,
  primary key (queue, paused_at)
);
comment on table pgqueue.queue_pauses is 'When queues were paused: the time to live of pending jobs stands still meanwhile.';

create table pgqueue.job_type_pauses (
  job_type text primary key,
  until timestamptz not null
);
comment on table pgqueue.job_type_pauses is 'Job types that are not claimed for now, such as those whose upstream limits the rate.';

create table pgqueue.schedules (
  name text primary key constraint "name must have 1 to 128 characters" check (length(name) between 1 and 128),
  cron text not null,
  timezone text not null default 'UTC',
  job_type text not null constraint "job_type must have 1 to 128 characters" check (length(job_type) between 1 and 128),
  payload jsonb not null default '{}',
  queue text not null default 'default' constraint "queue must have 1 to 63 characters" check (length(queue) between 1 and 63),
  priority smallint not null default 2 constraint "priority must be 0, 1, 2 or 3" check (priority between 0 and 3),
  max_retries integer constraint "max_retries must be 0 to 1000000" check (max_retries between 0 and 1000000),
  retry_policy jsonb constraint "retry_policy must be a retry policy" check (retry_policy is null or pgqueue.check_retry_policy(retry_policy)),
  timeout_ms integer constraint "timeout_ms must be positive" check (timeout_ms > 0),
  enabled boolean not null default true,
  misfire text not null default 'run_once'
    constraint "misfire must be run_once, skip or run_all" check (misfire in ('run_once', 'skip', 'run_all')),
  misfire_cap integer not null default 100 constraint "misfire_cap must be 1 to 10000" check (misfire_cap between 1 and 10000),
  overlap text not null default 'allow'
    constraint "overlap must be allow, skip or cancel" check (overlap in ('allow', 'skip', 'cancel')),
  declared_by text,
  next_run_at timestamptz constraint "next_run_at must lie between the years 1 and 9998"
    check (next_run_at >= '0001-01-03 00:00+00' and next_run_at < '9999-01-01 00:00+00'),
  last_run_at timestamptz constraint "last_run_at must lie between the years 1 and 9998"
    check (last_run_at >= '0001-01-03 00:00+00' and last_run_at < '9999-01-01 00:00+00'),
  last_job_id uuid,
  last_error text,
  created_at timestamptz not null default pgqueue.clock(),
  updated_at timestamptz not null default pgqueue.clock()
);
comment on table pgqueue.schedules is 'Recurring jobs. INSERT, UPDATE and DELETE are the interface.';
comment on column pgqueue.schedules.misfire is
  'What becomes of times missed while no scheduler ran: run_once enqueues one job for the latest, skip none, run_all the latest misfire_cap.';
comment on column pgqueue.schedules.overlap is
  'While the job before has not ended: allow enqueues all the same, skip does not, cancel cancels that one.';
comment on column pgqueue.schedules.next_run_at is 'Computed by a scheduler; null asks for it.';
comment on column pgqueue.schedules.declared_by is 'The app that declared it in code, null for a row made by hand.';

create table pgqueue.schedule_fires (
  schedule text not null,
  due_at timestamptz not null,
  job_id uuid not null,
  fired_at timestamptz not null default pgqueue.clock(),
  primary key (schedule, due_at)
);
comment on table pgqueue.schedule_fires is 'One row for each time a schedule fired: (schedule, due time) is unique.';

create table pgqueue.workers (
  worker_id uuid primary key,
  name text not null,
  hostname text not null,
  pid integer not null,
  group_name text,
  queues text[],
  job_types text[],
  priorities smallint[],
  concurrency integer not null,
  status text not null default 'starting'
    constraint "status must be a worker status" check (status in ('starting', 'active', 'idle', 'draining', 'stopped')),
  jobs_processed bigint not null default 0,
  jobs_failed bigint not null default 0,
  last_heartbeat timestamptz not null default pgqueue.clock(),
  started_at timestamptz not null default pgqueue.clock(),
  version text,
  utilization real not null default 0,
  counted bigint not null default 0
) with (fillfactor = 50);
comment on table pgqueue.workers is 'A row per live worker process. Leases never depend on it.';
comment on column pgqueue.workers.utilization is 'The part of the last ten seconds or so in which its slots were busy.';
comment on column pgqueue.workers.counted is 'The last batch of counts that was taken from it.';

create table pgqueue.waiting (
  worker_id uuid primary key,
  channel text not null,
  queues text[],
  job_types text[],
  priorities smallint[],
  listener int
);
comment on table pgqueue.waiting is 'Workers that sleep and want a bell on their channel; null arrays mean any.';
comment on column pgqueue.waiting.listener is 'The server process that hears for it, without which the row is of no use; null: unknown.';

create table pgqueue.watchers (
  watcher_id uuid primary key,
  expires_at timestamptz not null
);
comment on table pgqueue.watchers is 'Who follows pgqueue_status: notices are sent only while somebody does.';

create sequence pgqueue.notice_slot as bigint cache 1;
comment on sequence pgqueue.notice_slot is 'The last twentieth of a second in which a producer''s commit sent a notice.';
create sequence pgqueue.claim_tick as bigint cache 1;
comment on sequence pgqueue.claim_tick is 'Turns the wheel of shares for claims that are smaller than the sum of weights.';
create sequence pgqueue.claim_front as bigint minvalue 0 start 0 cache 1;
comment on sequence pgqueue.claim_front is
  'The line from which the last claim of many jobs took them (17 bits of queue, filters and priority), and the seq behind the last of them (46).';
create sequence pgqueue.tokens as bigint cache 1;
comment on sequence pgqueue.tokens is
  'The millisecond up to which producers of queues above their soft limit have used up their 1,000 jobs a second.';

create table pgqueue.token_buckets (
  bucket text primary key,
  tokens double precision not null,
  filled_at timestamptz not null
) with (fillfactor = 50);
comment on table pgqueue.token_buckets is
  'What is left of rates that several processes share: of an API key (key:NAME), or of a queue with rate_per_second (queue:NAME).';

create table pgqueue.idempotency_keys (
  producer_id text,
  idempotency_key text not null,
  job_id uuid not null,
  expires_at timestamptz not null,
  constraint "idempotency_key is taken" unique nulls not distinct (producer_id, idempotency_key)
);
alter table pgqueue.idempotency_keys replica identity full;
create index idempotency_keys_expires on pgqueue.idempotency_keys (expires_at);
comment on table pgqueue.idempotency_keys is 'Which job a key stands for, until the key may be used again.';

create table pgqueue.claim_cursors (
  queue text not null,
  priority smallint not null,
  low_seq bigint not null default 0,
  job_types text[],
  primary key (queue, priority)
) with (fillfactor = 50);
comment on table pgqueue.claim_cursors is 'How far the sweep has come; it alone writes here. Claims begin at claim_starts.';
comment on column pgqueue.claim_cursors.job_types is 'Job types of the first jobs in line, as the last sweep saw them.';

create table pgqueue.claims (
  look_at timestamptz not null,
  timeout_at timestamptz,
  job_ids uuid[] not null
) with (autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);
-- Compressed ids would cost a claim more than they save.
alter table pgqueue.claims alter column job_ids set storage external;
alter table pgqueue.claims replica identity full;
create index claims_look_at on pgqueue.claims (look_at);
create index claims_timeout_at on pgqueue.claims (timeout_at) where timeout_at is not null;
comment on table pgqueue.claims is
  'Jobs that were claimed together, a row per claim. Every processing job is named here; the sweep takes away those that no longer run.';
comment on column pgqueue.claims.look_at is 'Soon after the claim; then no later than the first lease of those that still run ends.';
comment on column pgqueue.claims.timeout_at is 'When the sweep is to end the first of those that still run; null until it first looked.';

create table pgqueue.expiry_cursors (
  queue text not null,
  priority smallint not null,
  seq bigint not null,
  primary key (queue, priority)
) with (fillfactor = 50);
comment on table pgqueue.expiry_cursors is
  'How far the sweep has come in lines that are too long to be looked through at once for jobs past their pending_ttl.';

create table pgqueue.once_keys (
  job_id uuid not null,
  key text not null constraint "key must have 1 to 256 characters" check (length(key) between 1 and 256),
  at timestamptz not null default pgqueue.clock(),
  primary key (job_id, key)
);
create index once_keys_at on pgqueue.once_keys (at);
comment on table pgqueue.once_keys is
  'Guards of side effects: a row per key that a job''s task took in a transaction that committed.';

create table pgqueue.lowered_cursors (
  queue text not null,
  priority smallint not null,
  seq bigint not null
);
alter table pgqueue.lowered_cursors replica identity full;
create index lowered_cursors_seq on pgqueue.lowered_cursors (queue, priority, seq);
comment on table pgqueue.lowered_cursors is
  'Jobs that became pending at an old seq since the last sweep. Only inserted into and taken away, so that nobody waits here.';

create view pgqueue.claim_starts as
  select c.queue, c.priority, c.job_types, least(c.low_seq, (
           select l.seq from pgqueue.lowered_cursors l
            where l.queue = c.queue and l.priority = c.priority order by l.seq limit 1)) as low_seq
    from pgqueue.claim_cursors c;
comment on view pgqueue.claim_starts is 'Where claims begin: no pending job of the queue and priority has a lower seq.';

create table pgqueue.queue_depths (
  queue text primary key,
  pending bigint not null,
  counted_at_seq bigint not null,
  slot integer not null unique
) with (fillfactor = 50);
comment on table pgqueue.queue_depths is
  'An upper bound of pending jobs: pending + (seq now - counted_at_seq). A queue has a row once a sweep has seen it.';
comment on column pgqueue.queue_depths.slot is 'Numbers queues from 0 on, so that claims can begin with any of them.';

create table pgqueue.sweep_notes (
  queue text not null,
  ordering_key text
);
alter table pgqueue.sweep_notes replica identity full;
create index sweep_notes_queue on pgqueue.sweep_notes (queue) where ordering_key is null;
comment on table pgqueue.sweep_notes is
  'What writers ask the next sweep to look at: a new queue, or an ordering key that may have lost its head.';

create table pgqueue.sweep_state (
  only_row boolean primary key default true check (only_row),
  candidate_seq bigint not null default 0,
  candidate_at timestamptz not null default '-infinity',
  candidate_before bigint not null default 0,
  writers text[] not null default '{}',
  stragglers jsonb not null default '{}',
  claims_swept_to timestamptz not null default '-infinity',
  timeouts_swept_to timestamptz not null default '-infinity',
  due_swept_to timestamptz not null default '-infinity',
  full_sweep_at timestamptz not null default pgqueue.clock(),
  soft_counted_at timestamptz not null default '-infinity',
  key_queue text not null default '',
  key_name text not null default '',
  stray_page bigint not null default 0,
  timeline text
) with (fillfactor = 50);
insert into pgqueue.sweep_state default values;
comment on table pgqueue.sweep_state is 'What sweep() remembers from one call to the next.';
comment on column pgqueue.sweep_state.stragglers is
  'Writers that stayed open for so long that cursors went on without them, with the lowest seq that they may have drawn.';
comment on column pgqueue.sweep_state.key_name is
  'With key_queue how far full sweeps have come in looking for ordering keys whose head was deleted.';
comment on column pgqueue.sweep_state.stray_page is 'How far full sweeps have come in looking for leases that no claim names.';
comment on column pgqueue.sweep_state.timeline is 'The timeline of the server''s log at the last look: another one, and a standby was promoted.';

create table pgqueue.sweep_steps (
  step text primary key,
  last_run_at timestamptz not null,
  last_duration_ms double precision not null,
  last_jobs bigint not null,
  runs bigint not null default 1,
  jobs bigint not null default 0,
  last_error text,
  failures integer not null default 0,
  retry_at timestamptz
) with (fillfactor = 50);
comment on table pgqueue.sweep_steps is 'When each step of the sweep last ran, how long it took and what it did.';

create table pgqueue.audit (
  audit_id bigint generated always as identity primary key,
  at timestamptz not null default pgqueue.clock(),
  actor text not null default session_user,
  verb text not null,
  target text,
  jobs bigint,
  detail jsonb
);
comment on table pgqueue.audit is 'What operators did, and when a standby was promoted.';

create table pgqueue.api_keys (
  name text primary key constraint "name must have 1 to 64 characters" check (length(name) between 1 and 64),
  sha256 bytea not null unique constraint "sha256 must be 32 bytes" check (length(sha256) = 32),
  prefix text not null default '',
  scopes text[] not null default '{submit,read}'
    constraint "scopes must be submit, read, operate or admin" check (scopes <@ array['submit', 'read', 'operate', 'admin']),
  enabled boolean not null default true,
  rate integer constraint "rate must be positive" check (rate > 0),
  expires_at timestamptz constraint "expires_at must lie between the years 1 and 9998"
    check (expires_at >= '0001-01-03 00:00+00' and expires_at < '9999-01-01 00:00+00'),
  created_at timestamptz not null default pgqueue.clock(),
  last_used_at timestamptz
);
comment on table pgqueue.api_keys is 'Keys of the REST API; only the hash of a key is stored.';
comment on column pgqueue.api_keys.rate is 'Requests per second; null: no limit.';

create type pgqueue.enqueued as (
  job_id uuid, seq bigint, queue text, job_type text, payload jsonb, priority smallint, status text, attempts integer,
  max_retries integer, lost integer, uncharged integer, retry_policy jsonb, timeout_ms integer, scheduled_at timestamptz,
  due_at timestamptz, expires_at timestamptz, idempotency_key text, producer_id text, ordering_key text, shard smallint,
  in_line boolean, worker_id uuid, lease_expires_at timestamptz, cancel_requested_at timestamptz, created_at timestamptz,
  updated_at timestamptz, started_at timestamptz, finished_at timestamptz, result jsonb, error text, errors jsonb,
  progress jsonb, trace_context jsonb, duplicate boolean
);
comment on type pgqueue.enqueued is 'A job as enqueue() answers it: every column of pgqueue.jobs, and whether it was there before.';
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
-- Idempotency keys: one job for each key of a producer, until the key expires.

create function pgqueue.take_keys(producers text[], keys text[], job_ids uuid[], ttls bigint[], again boolean) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
#variable_conflict use_column
declare
  had bigint;
begin
  -- Sorted, so that two statements with the same keys wait for each other instead of deadlocking.
  with taken as (
    insert into pgqueue.idempotency_keys as k (producer_id, idempotency_key, job_id, expires_at)
    select w.producer, w.key, w.job_id, pgqueue.clock() + w.ttl * interval '1 millisecond'
      from unnest(producers, keys, job_ids, ttls) w(producer, key, job_id, ttl)
     order by w.producer, w.key
    on conflict on constraint "idempotency_key is taken" do update
       set job_id = excluded.job_id, expires_at = excluded.expires_at
     where k.expires_at <= pgqueue.clock() or (again and k.job_id = excluded.job_id)
    returning 1)
  select count(*) into had from taken;
  return had;
end $$;
comment on function pgqueue.take_keys(text[], text[], uuid[], bigint[], boolean) is
  'Takes idempotency keys for jobs, expired ones in place; says how many were to be had. No key may stand twice; `again` counts those that the same jobs hold.';

create function pgqueue.jobs_take_keys(producers text[], keys text[], job_ids uuid[], ttls bigint[]) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  twice record;
begin
  select u.producer, u.key into twice from unnest(producers, keys) u(producer, key)
   group by u.producer, u.key having count(*) > 1 limit 1;
  if not found and pgqueue.take_keys(producers, keys, job_ids, ttls, true) = cardinality(keys) then
    return;
  end if;
  if twice.key is null then
    select u.producer, u.key into twice from unnest(producers, keys, job_ids) u(producer, key, job_id)
     where exists (select from pgqueue.idempotency_keys t
                    where t.producer_id = u.producer and t.idempotency_key = u.key and t.job_id <> u.job_id)
        or u.producer is null and exists (select from pgqueue.idempotency_keys t
                    where t.producer_id is null and t.idempotency_key = u.key and t.job_id <> u.job_id)
     limit 1;
  end if;
  raise exception 'idempotency_key "%" of producer % is taken', twice.key, coalesce('"' || twice.producer || '"', 'null')
    using errcode = 'unique_violation', constraint = 'idempotency_key is taken', column = 'idempotency_key',
          hint = 'pgqueue.enqueue returns the existing job instead.';
end $$;
comment on function pgqueue.jobs_take_keys is 'Takes the idempotency keys of new rows; refuses the statement when one is taken.';
-- Limits of depth and rate: what an INSERT owes to the queue that it fills.
--
-- A transaction that was let in is not slowed down for what it took itself, or one with several statements could never
-- succeed: it owes all of it, and whoever comes next waits. What says so is an advisory lock, which goes with the
-- transaction or the savepoint. Whoever takes that lock by hand is not slowed down; a limit is no right.

create function pgqueue.let_in(bucket text) returns void
  language sql set search_path = pg_catalog, pg_temp
  -- Tried, so that nobody who holds it otherwise can keep a producer waiting.
  as $$ select pg_try_advisory_xact_lock_shared(1885827434, hashtext(bucket)) $$;
comment on function pgqueue.let_in(text) is 'Notes that this transaction was given from a bucket.';

create function pgqueue.was_let_in(bucket text) returns boolean
  language sql set search_path = pg_catalog, pg_temp
  as $$
    select exists (select from pg_locks l where l.locktype = 'advisory' and l.pid = pg_backend_pid() and l.mode = 'ShareLock'
                      and (l.classid, l.objid, l.objsubid) = (1885827434, hashtext(bucket)::oid, 2))
  $$;
comment on function pgqueue.was_let_in(text) is 'Whether this transaction was given from a bucket before.';

create function pgqueue.note_queue(queue text) returns void
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
begin
  -- One note will do, since claims look into each queue that is noted. Those that others have not committed yet come besides.
  if not exists (select from pgqueue.queue_depths d where d.queue = note_queue.queue)
     and not exists (select from pgqueue.sweep_notes n where n.queue = note_queue.queue and n.ordering_key is null) then
    insert into pgqueue.sweep_notes (queue) values (note_queue.queue);
  end if;
end $$;
comment on function pgqueue.note_queue(text) is 'Tells the next sweep of a queue that none has seen.';

create function pgqueue.uncounted_bound(queue text, top bigint, soft_limit int, hard_limit int) returns bigint
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
begin
  perform pgqueue.note_queue(queue);
  -- No sweep has counted the queue, so its jobs are younger than the last sweep but one.
  return (select top - w.candidate_before from pgqueue.sweep_state w
           where top - w.candidate_before <= least(soft_limit, hard_limit) and hard_limit > 10000);
end $$;
comment on function pgqueue.uncounted_bound(text, bigint, int, int) is
  'As many jobs may be pending in a queue that no sweep has counted, which the next one is told of; null: too many to say. `top`: the highest seq of the new ones.';

create function pgqueue.admit(queue text, ready bigint, bound bigint, settings pgqueue.queues, low boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
declare
  hard_limit constant int := coalesce(settings.hard_limit, 100000);
  soft_limit constant int := coalesce(settings.soft_limit, 50000);
  depth bigint := bound;
begin
  -- Half of a small limit, since what others have not committed yet is not in anybody's count.
  if coalesce(depth, 9223372036854775807) > (case when hard_limit > 10000 then hard_limit else hard_limit / 2 end) then
    depth := pgqueue.check_depth(queue, hard_limit);
  end if;
  if depth > soft_limit then
    perform pgqueue.slow_down(queue, soft_limit, ready, low);
  end if;
  if settings.rate_per_second is not null then
    perform pgqueue.take_rate(queue, settings.rate_per_second, ready);
  end if;
end $$;
comment on function pgqueue.admit(text, bigint, bigint, pgqueue.queues, boolean) is
  'Owed by an insert of `ready` pending jobs into a queue: refuses them where they are too many. `bound`: as many may be pending, null: nobody knows; `low`: some are shed where low ones are.';

create function pgqueue.count_pending(queue text, most bigint) returns bigint
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  low bigint;
  found bigint;
  counted bigint := 0;
begin
  -- From where claims begin, or dead entries would be walked. Volatile: each call looks anew.
  for p in 0 .. 3 loop
    low := coalesce((select c.low_seq from pgqueue.claim_starts c where c.queue = count_pending.queue and c.priority = p), 0);
    select count(*) into found from (
      select from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = count_pending.queue and j.priority = p::smallint and j.seq >= low
       order by j.seq limit most - counted) n;
    counted := counted + found;
    exit when counted >= most;
  end loop;
  return counted;
end $$;
comment on function pgqueue.count_pending(text, bigint) is 'How many jobs are pending in a queue, counted up to `most`.';

create function pgqueue.check_depth(queue text, hard_limit bigint) returns bigint
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off set lock_timeout = '900ms'
  as $$
declare
  depth bigint;
begin
  -- The bound in queue_depths was not enough to say yes. Count; near the limit one producer at a time. Near a small limit
  -- is everywhere, since batches that others have not committed yet are in nobody's count.
  if hard_limit > 10000 then
    depth := pgqueue.count_pending(queue, hard_limit + 1);
    if depth <= hard_limit / 4 then
      return depth;
    end if;
  end if;
  begin
    perform pg_advisory_xact_lock(1885827430, hashtext(queue));
  exception
    -- Rather a batch too many than every producer behind one that leaves its transaction open.
    when lock_not_available then null;
  end;
  depth := pgqueue.count_pending(queue, hard_limit + 1);
  if depth > hard_limit then
    raise exception 'queue "%" is full: more than % jobs are pending', queue, hard_limit
      using errcode = 'PQ503', hint = 'Retry later, or raise hard_limit in pgqueue.queues.';
  end if;
  return depth;
end $$;
comment on function pgqueue.check_depth is 'How many jobs are pending in a queue, for the limit''s sake: near it one producer counts at a time.';

create function pgqueue.slow_down(queue text, soft_limit bigint, jobs bigint, low boolean) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  now_ms constant bigint := (extract(epoch from clock_timestamp()) * 1000)::bigint;
  used bigint;
begin
  -- Without sweeps nobody counts again what is left.
  if not exists (select from pgqueue.sweep_state w where w.candidate_at > pgqueue.clock() - interval '40 seconds')
     and pgqueue.count_pending(queue, soft_limit + 1) <= soft_limit then
    return;
  end if;
  if low then
    raise exception 'queue "%" sheds jobs of low priority: more than % jobs are pending', queue, soft_limit
      using errcode = 'PQ503', hint = 'Retry later; shed_low and soft_limit in pgqueue.queues say so.';
  end if;
  -- A job is a millisecond of the bucket's time. A sequence, since whoever takes from it must not keep others waiting
  -- until it commits. More than there is may be taken at once, by up to ten seconds: it is paid back by waiting.
  select t.last_value into used from pgqueue.tokens t;
  if used > now_ms and not pgqueue.was_let_in('tokens') then
    raise exception 'queue "%" has more than % jobs pending, and producers of such queues share 1000 jobs a second', queue, soft_limit
      using errcode = 'PQ429', detail = format('retry after %s s', round((used - now_ms) / 1000.0, 3)),
            hint = 'Retry later, or raise soft_limit in pgqueue.queues.';
  elsif used < now_ms - 1000 then
    perform setval('pgqueue.tokens', now_ms - 1000);
    used := now_ms - 1000;
  end if;
  perform pgqueue.let_in('tokens');
  perform nextval('pgqueue.tokens') from generate_series(1, least(jobs, now_ms + 10000 - used));
end $$;
comment on function pgqueue.slow_down(text, bigint, bigint, boolean) is
  'Owed by an insert into a queue above its soft limit: refuses low jobs that are shed (PQ503), and jobs beyond 1,000 a second (PQ429).';

create function pgqueue.take_rate(queue text, per_second integer, jobs bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  name constant text := 'queue:' || queue;
  now_is timestamptz;
  b pgqueue.token_buckets;
begin
  -- Producers of a queue with a rate take turns. A batch may take more than there is: it is paid back by waiting, but for
  -- no longer than a minute, or one batch could close the queue for hours.
  insert into pgqueue.token_buckets (bucket, tokens, filled_at) values (name, per_second, clock_timestamp()) on conflict do nothing;
  select t.* into b from pgqueue.token_buckets t where t.bucket = name for update;
  now_is := clock_timestamp();
  b.tokens := least(per_second, greatest(b.tokens, -60.0 * per_second) + greatest(extract(epoch from now_is - b.filled_at), 0) * per_second);
  if b.tokens < 1 and not pgqueue.was_let_in(name) then
    raise exception 'queue "%" takes % jobs a second', queue, per_second
      using errcode = 'PQ429', detail = format('retry after %s s', round(((1 - b.tokens) / per_second)::numeric, 3)),
            hint = 'Retry later, or raise rate_per_second in pgqueue.queues.';
  end if;
  update pgqueue.token_buckets t set tokens = b.tokens - jobs, filled_at = now_is where t.bucket = name;
  perform pgqueue.let_in(name);
end $$;
comment on function pgqueue.take_rate(text, integer, bigint) is 'Holds a queue to its rate_per_second (PQ429).';

create function pgqueue.arrive(queue text, top bigint, ready bigint, low boolean, job_types text[]) returns void
  language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  as $$
declare
  g record;
  bound bigint;
  hard_limit int;
  soft_limit int;
begin
  select (select q from pgqueue.queues q where q.name = arrive.queue) as settings,
         (select d.pending + top - d.counted_at_seq from pgqueue.queue_depths d where d.queue = arrive.queue and d.counted_at_seq >= 0) as bound,
         exists (select from pgqueue.waiting) as sleepers
    into g;
  hard_limit := coalesce((g.settings).hard_limit, 100000);
  soft_limit := coalesce((g.settings).soft_limit, 50000);
  bound := g.bound;
  if bound is null then
    bound := pgqueue.uncounted_bound(arrive.queue, top, soft_limit, hard_limit);
  end if;
  if ready = 0 then
    return;
  end if;
  if coalesce(bound, 9223372036854775807) > least(soft_limit, hard_limit / 2) or (g.settings).rate_per_second is not null then
    perform pgqueue.admit(queue, ready, bound, g.settings, low and (g.settings).shed_low is true);
  end if;
  if g.sleepers and job_types is not null then
    perform pgqueue.ring(queue, job_types);
  end if;
end $$;
comment on function pgqueue.arrive(text, bigint, bigint, boolean, text[]) is
  'Owed for each queue by whoever inserts `ready` pending jobs. `top`: the highest seq of the new jobs; `low`: pending ones are of low priority; `job_types`: of each of them, null where nobody is to be woken.';
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
-- Transitions by hand: an UPDATE may do what the state machine allows, and nothing else.

create function pgqueue.check_names(queue text, job_type text) returns void
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
begin
  if queue = '' then
    raise exception 'queue must have 1 to 63 characters, not none' using errcode = 'check_violation',
      schema = 'pgqueue', table = 'jobs', column = 'queue', constraint = 'queue must have 1 to 63 characters';
  elsif job_type = '' then
    raise exception 'job_type must have 1 to 128 characters, not none' using errcode = 'check_violation',
      schema = 'pgqueue', table = 'jobs', column = 'job_type', constraint = 'job_type must have 1 to 128 characters';
  end if;
end $$;
comment on function pgqueue.check_names(text, text) is 'Refuses an empty queue or job_type, as a CHECK would.';

create function pgqueue.check_edit(was pgqueue.jobs, now_is pgqueue.jobs) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong text;
begin
  perform pgqueue.check_names(now_is.queue, now_is.job_type);
  if now_is.status <> was.status and not (
       was.status = 'submitted' and now_is.status = 'pending'
    or was.status = 'pending' and now_is.status = 'processing'
    or was.status = 'processing' and now_is.status in ('failed', 'pending', 'submitted')
    or was.status = 'failed' and now_is.status = 'pending')
  then
    raise exception 'a job cannot go from % to % by UPDATE', was.status, now_is.status
      using errcode = 'PQ409', column = 'status',
            hint = 'Use pgqueue.cancel, retry, complete, fail, snooze, release or discard.';
  end if;
  if now_is.status = 'processing' and (now_is.worker_id is null or now_is.lease_expires_at is null
       or (was.status = 'pending' and now_is.attempts - 1 <> was.attempts)) then
    raise exception 'a job cannot become processing without worker_id, lease_expires_at and one more attempt'
      using errcode = 'PQ409', column = 'status', hint = 'Use pgqueue.claim.';
  end if;
  -- With worker_id the fence: no pair of them may come a second time. A release takes back the attempt that it did not begin.
  if now_is.attempts <> was.attempts and not (was.status = 'pending' and now_is.status = 'processing')
     and not (was.status = 'processing' and now_is.status = 'pending' and now_is.attempts = was.attempts - 1 and now_is.started_at is null) then
    raise exception 'attempts of a % job is % and cannot be changed to %', was.status, was.attempts, now_is.attempts
      using errcode = 'PQ409', column = 'attempts', hint = 'Only pgqueue.claim and release count attempts; max_retries may be changed.';
  end if;
  if now_is.worker_id is distinct from was.worker_id and not (was.status = 'pending' and now_is.status = 'processing') then
    raise exception 'worker_id of a % job cannot be changed to %', was.status, coalesce(now_is.worker_id::text, 'null')
      using errcode = 'PQ409', column = 'worker_id', hint = 'Use pgqueue.release, then claim.';
  end if;
  if now_is.seq <> was.seq and now_is.seq not between 1 and (select s.last_value from pgqueue.jobs_seq s) then
    raise exception 'seq must be one that pgqueue.jobs_seq has given out, which % is not', now_is.seq
      using errcode = 'PQ422', column = 'seq', hint = 'Use nextval(''pgqueue.jobs_seq'') to put a job at the end of its line.';
  end if;
  if now_is.due_at is null and (now_is.status = 'failed' or now_is.status = 'submitted' and now_is.ordering_key is null) then
    raise exception 'a % job must have due_at', now_is.status using errcode = 'PQ409', column = 'due_at';
  end if;
  -- What stands there already does not hold up the functions, which count on from it.
  if jsonb_typeof(now_is.errors) <> 'array' and now_is.errors <> was.errors then
    raise exception 'errors must be a JSON array of records, not %', left(now_is.errors::text, 100)
      using errcode = 'check_violation', schema = 'pgqueue', table = 'jobs', column = 'errors',
            constraint = 'errors must be a JSON array';
  end if;
  wrong := case when now_is.lost <> was.lost and now_is.lost not between 0 and 1000000 then 'lost'
                when now_is.uncharged <> was.uncharged and now_is.uncharged not between 0 and 1000000 then 'uncharged' end;
  if wrong is not null then
    raise exception '% must be 0 to 1000000, not %', wrong, case wrong when 'lost' then now_is.lost else now_is.uncharged end
      using errcode = 'check_violation', schema = 'pgqueue', table = 'jobs', column = wrong,
            constraint = wrong || ' must be 0 to 1000000';
  end if;
  -- Its key was taken, for its producer, by the INSERT.
  wrong := case when now_is.idempotency_key is distinct from was.idempotency_key then 'idempotency_key'
                when now_is.producer_id is distinct from was.producer_id and was.idempotency_key is not null then 'producer_id' end;
  if wrong is not null then
    raise exception '% of a job with an idempotency key cannot be changed', wrong using errcode = 'PQ409', column = wrong,
      hint = 'Cancel the job, and enqueue another one.';
  end if;
  wrong := case when now_is.result is distinct from was.result then 'result'
                when now_is.finished_at is distinct from was.finished_at then 'finished_at'
                when now_is.started_at is distinct from was.started_at and not isfinite(now_is.started_at) then 'started_at'
                when now_is.created_at <> was.created_at
                     and now_is.created_at not between '0001-01-03 00:00+00' and pgqueue.clock() then 'created_at' end;
  if wrong is not null then
    raise exception '% of a % job cannot be changed to that', wrong, was.status
      using errcode = 'PQ409', column = wrong, hint = 'Use pgqueue.complete, which stores a result with the end of an attempt.';
  end if;
end $$;
comment on function pgqueue.check_edit(pgqueue.jobs, pgqueue.jobs) is 'Refuses an edit of a job by hand that would break what the queue relies on.';

create function pgqueue.jobs_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  r record;
  was pgqueue.jobs;
  now_is pgqueue.jobs;
begin
  if exists (select from now_are n where not exists (select from were w where w.job_id = n.job_id)) then
    raise exception 'job_id of a job cannot be changed' using errcode = 'PQ409', column = 'job_id';
  end if;
  for r in
    select w, n from were w join now_are n on n.job_id = w.job_id
     where (w.status, w.queue, w.job_type, w.priority, w.seq, w.attempts, w.worker_id, w.lease_expires_at, w.due_at, w.ordering_key,
            w.lost, w.uncharged, w.errors, w.result, w.finished_at, w.created_at, w.timeout_ms, w.started_at, w.idempotency_key,
            w.producer_id)
           is distinct from
           (n.status, n.queue, n.job_type, n.priority, n.seq, n.attempts, n.worker_id, n.lease_expires_at, n.due_at, n.ordering_key,
            n.lost, n.uncharged, n.errors, n.result, n.finished_at, n.created_at, n.timeout_ms, n.started_at, n.idempotency_key,
            n.producer_id)
     order by n.job_id
  loop
    was := r.w;
    now_is := r.n;
    perform pgqueue.check_edit(was, now_is);
    if now_is.status = 'pending' and (was.status <> 'pending' or now_is.queue <> was.queue
         or now_is.priority <> was.priority or now_is.seq <> was.seq) then
      perform pgqueue.lower_cursor(now_is.queue, now_is.priority, now_is.seq);
    end if;
    -- A time that is put back means now: sweeps do not begin at the beginning of time.
    if now_is.due_at < was.due_at or now_is.lease_expires_at < was.lease_expires_at then
      update pgqueue.jobs_live l
         set due_at = case when now_is.due_at < was.due_at then greatest(l.due_at, pgqueue.clock() - interval '1 second') else l.due_at end,
             lease_expires_at = case when now_is.lease_expires_at < was.lease_expires_at
               then greatest(l.lease_expires_at, pgqueue.clock() - interval '1 second') else l.lease_expires_at end
       where l.job_id = now_is.job_id;
    end if;
    if now_is.status = 'processing' and (was.status <> 'processing' or now_is.lease_expires_at < was.lease_expires_at
         or now_is.timeout_ms is distinct from was.timeout_ms) then
      insert into pgqueue.claims (look_at, job_ids) values (pgqueue.clock() - random() * interval '1 second', array[now_is.job_id]);
    end if;
    if now_is.queue <> was.queue then
      perform pgqueue.note_queue(now_is.queue);
    end if;
    if now_is.queue <> was.queue or now_is.ordering_key is distinct from was.ordering_key
       or now_is.status = 'submitted' and (now_is.due_at is null or was.status <> 'submitted') then
      -- The key that it leaves may have lost its head, and the one that it joins may have none.
      insert into pgqueue.sweep_notes (queue, ordering_key)
        select k.queue, k.ordering_key
          from (values (was.queue, was.ordering_key), (now_is.queue, now_is.ordering_key)) k(queue, ordering_key)
         where k.ordering_key is not null;
    end if;
  end loop;
  return null;
end $$;
comment on function pgqueue.jobs_edited is 'Trigger: checks what was changed by hand, and does what the functions would have done beside it.';

-- On the root, which is what people name. The functions of this schema name jobs_live, check their own transitions, and
-- do not pay: a trigger for each row costs a claim a fifth.
create trigger jobs_edited after update on pgqueue.jobs
  referencing old table as were new table as now_are
  for each statement execute function pgqueue.jobs_edited();

create function pgqueue.finished_job_is_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  raise exception 'job % is % and cannot be changed', old.job_id, old.status
    using errcode = 'PQ409', column = 'status', hint = 'pgqueue.retry moves a dead letter back to pending.';
end $$;
comment on function pgqueue.finished_job_is_edited is 'Trigger: refuses changes of finished jobs.';
create trigger jobs_completed_final before update on pgqueue.jobs_completed
  for each row execute function pgqueue.finished_job_is_edited();
create trigger jobs_cancelled_final before update on pgqueue.jobs_cancelled
  for each row execute function pgqueue.finished_job_is_edited();
create trigger jobs_dead_letter_final before update on pgqueue.jobs_dead_letter
  for each row execute function pgqueue.finished_job_is_edited();

create function pgqueue.status_is_unknown() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  raise exception 'status must be submitted, pending, processing, completed, failed, dead_letter or cancelled, not %',
      coalesce(quote_literal(new.status), 'null')
    using errcode = 'check_violation', schema = 'pgqueue', table = 'jobs', column = 'status',
          constraint = 'status must be a job status', hint = 'Leave status out of a new job.';
end $$;
comment on function pgqueue.status_is_unknown is 'Trigger: refuses a status that does not exist.';
create trigger jobs_unknown_refused before insert on pgqueue.jobs_unknown
  for each row execute function pgqueue.status_is_unknown();
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
-- Heartbeat: renews leases, and answers which attempts are to stop.

create function pgqueue.heartbeat(worker_id uuid, job_ids uuid[], attempts int[], lease interval default null)
  returns table (job_id uuid, attempt int, reason text)
  language plpgsql security definer
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan
  set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
#variable_conflict use_column
begin
  if heartbeat.lease <= interval '0' or heartbeat.lease > interval '1 day' then
    raise exception 'lease must be positive and at most 1 day, but is %', heartbeat.lease using errcode = 'PQ422', column = 'lease';
  end if;
  -- SKIP LOCKED: whoever holds the row (a finish, a cancel, the sweep) decides about it; a next heartbeat comes.
  return query
    with held as (
      select u.job_id, u.attempt from unnest(heartbeat.job_ids, heartbeat.attempts) u(job_id, attempt)),
    locked as (
      select j.ctid, j.job_id, j.attempts, j.queue, j.cancel_requested_at from pgqueue.jobs_live j
       where j.job_id = any (heartbeat.job_ids) and j.worker_id = heartbeat.worker_id and j.status = 'processing'
       for update skip locked),
    renewed as (
      update pgqueue.jobs_live j
         set lease_expires_at = greatest(j.lease_expires_at, pgqueue.clock() + coalesce(heartbeat.lease,
               (select q.lease_ms from pgqueue.queues q where q.name = j.queue) * interval '1 millisecond', interval '30 seconds')),
             ordering_key = j.ordering_key
        from locked l
       where j.ctid = l.ctid and (l.job_id, l.attempts) in (select h.job_id, h.attempt from held h)
      returning j.job_id, j.attempts, j.cancel_requested_at)
    select h.job_id, h.attempt, case when r.job_id is null then 'lost' else 'cancel' end
      from held h left join renewed r on r.job_id = h.job_id and r.attempts = h.attempt
     where r.cancel_requested_at is not null
        or r.job_id is null and not exists (
             -- A row locked by somebody else is not lost yet: judge by what is committed.
             select from pgqueue.jobs_live j
              where j.job_id = h.job_id and j.worker_id = heartbeat.worker_id and j.attempts = h.attempt
                and j.status = 'processing');
end $$;
comment on function pgqueue.heartbeat is
  'Renews the leases of a worker''s attempts; answers those that were lost, and those whose cancel was requested.';
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
-- Operate: look up, cancel, retry, discard, pause and explain jobs.

create function pgqueue.finished_job(job_id uuid) returns setof pgqueue.jobs
  language plpgsql stable security definer
  -- To plan for scores of partitions takes far longer than to leave most of them out when it runs.
  set search_path = pg_catalog, pg_temp set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off
  as $$
declare
  -- A job ends after it was made; a day of slack for ids from a host whose clock is off.
  since constant timestamptz := pgqueue.id_time(job_id) - interval '1 day';
begin
  return query select f.* from pgqueue.jobs_completed f where f.job_id = finished_job.job_id and f.finished_at >= since;
  if not found then
    return query select f.* from pgqueue.jobs_dead_letter f where f.job_id = finished_job.job_id and f.finished_at >= since;
  end if;
  if not found then
    return query select f.* from pgqueue.jobs_cancelled f where f.job_id = finished_job.job_id and f.finished_at >= since;
  end if;
end $$;
comment on function pgqueue.finished_job is 'A job among the finished, by the time in its id.';

create function pgqueue.finished_job_exists(job_id uuid) returns boolean
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$ select exists (select from pgqueue.finished_job(job_id)) $$;
comment on function pgqueue.finished_job_exists is 'Whether a finished job has this id.';

create function pgqueue.find_job(job_id uuid) returns setof pgqueue.jobs
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
declare
  j pgqueue.jobs;
begin
  -- A job that moved between two looks is met by looking at the live ones last as well.
  select l.* into j from pgqueue.jobs_live l where l.job_id = find_job.job_id;
  if j.job_id is null then
    select f.* into j from pgqueue.finished_job(find_job.job_id) f;
  end if;
  if j.job_id is null then
    select l.* into j from pgqueue.jobs_live l where l.job_id = find_job.job_id;
  end if;
  if j.job_id is not null then
    return next j;
  end if;
end $$;
comment on function pgqueue.find_job is 'A job wherever it is, without a look at who asks.';

create function pgqueue.job(job_id uuid) returns setof pgqueue.jobs
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  as $$ begin return query select f.* from pgqueue.find_job(job.job_id) f where pgqueue.may_read(f.producer_id); end $$;
comment on function pgqueue.job(uuid) is 'One job wherever it is. A bare producer sees its own (producer_id null or its role name).';

create function pgqueue.may_read(producer_id text) returns boolean
  language sql stable set search_path = pg_catalog, pg_temp
  as $$
    -- Membership is asked of the session's role: inside a security definer function current_user is the owner.
    -- Null where there is no such role.
    select producer_id is null or producer_id = session_user
        or pg_has_role(session_user, to_regrole('pgqueue_producer'), 'member') is not true
        or pg_has_role(session_user, to_regrole('pgqueue_worker'), 'member') is true
        or pg_has_role(session_user, to_regrole('pgqueue_operator'), 'member') is true
        or pg_has_role(session_user, to_regrole('pgqueue_reader'), 'member') is true
  $$;
comment on function pgqueue.may_read is 'Whether whoever asks may read the jobs of this producer.';

create function pgqueue.note(verb text, target text, jobs bigint, detail jsonb default null) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    insert into pgqueue.audit (actor, verb, target, jobs, detail)
    values (coalesce(nullif(current_setting('pgqueue.actor', true), ''), session_user), verb, target, jobs, detail)
  $$;
comment on function pgqueue.note is 'Writes to the audit who did what; `set pgqueue.actor` names the person behind a shared role.';

create function pgqueue.cancel_one(job_id uuid) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
declare
  j pgqueue.jobs;
  was text;
begin
  -- Twice, since a retry may bring it back between the two looks.
  for look in 1 .. 2 loop
    select l.* into j from pgqueue.jobs_live l where l.job_id = cancel_one.job_id for update;
    exit when j.job_id is not null;
    was := (select f.status from pgqueue.finished_job(job_id) f);
    if was is not null then
      return was;
    end if;
  end loop;
  if j.job_id is null then
    return 'not_found';
  elsif j.status = 'processing' then
    update pgqueue.jobs_live l
       set cancel_requested_at = coalesce(j.cancel_requested_at, pgqueue.clock()), updated_at = pgqueue.clock()
     where l.job_id = j.job_id;
    if current_setting('pgqueue.wake', true) is distinct from 'off' then
      perform pg_notify('pgqueue_wake_' || replace(j.worker_id::text, '-', ''), 'cancel ' || j.job_id);
    end if;
    return 'cancel_requested';
  end if;
  j.cancel_requested_at := pgqueue.clock();
  perform pgqueue.settle(j, 'cancelled', 'cancelled on request');
  return 'cancelled';
end $$;
comment on function pgqueue.cancel_one is 'Cancels one job, or asks its worker to; answers its status.';

create function pgqueue.cancel(job_id uuid) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  outcome constant text := pgqueue.cancel_one(job_id);
begin
  if outcome = 'not_found' then
    raise exception 'there is no job %', job_id using errcode = 'PQ404';
  elsif outcome in ('completed', 'dead_letter') then
    raise exception 'job % is % and can no longer be cancelled', job_id, outcome
      using errcode = 'PQ409', hint = 'Only submitted, pending, failed and processing jobs can be cancelled.';
  end if;
  perform pgqueue.note('cancel', job_id::text, 1);
  return outcome;
end $$;
comment on function pgqueue.cancel(uuid) is
  'Cancels a waiting job at once (cancelled); asks a running one to stop (cancel_requested). Errors: PQ404, PQ409.';

create function pgqueue.cancel_many(job_ids uuid[]) returns table (job_id uuid, outcome text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
begin
  return query
    select u.id, pgqueue.cancel_one(u.id) from (select distinct i as id from unnest(job_ids) i order by i) u;
  perform pgqueue.note('cancel', null, cardinality(job_ids));
end $$;
comment on function pgqueue.cancel_many(uuid[]) is
  'cancel for many jobs, in job_id order: cancelled, cancel_requested, the final status it already had, or not_found.';

create function pgqueue.revive(j pgqueue.jobs) returns pgqueue.jobs
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- Fresh attempts without giving up the fence: attempts goes on, and max_retries is raised by all that went before.
  j.max_retries := least(j.max_retries + greatest(j.attempts - j.uncharged, 0), 1000000);
  j.uncharged := greatest(j.attempts, j.uncharged);
  j.lost := 0;
  j.status := 'pending';
  j.in_line := true;
  j.due_at := null;
  j.scheduled_at := null;
  j.expires_at := null;
  j.finished_at := null;
  j.cancel_requested_at := null;
  j.lease_expires_at := null;
  j.result := null;
  j.progress := null;
  j.error := null;
  j.updated_at := pgqueue.clock();
  lock table only pgqueue.jobs in row exclusive mode;
  j.seq := nextval('pgqueue.jobs_seq');
  perform pgqueue.store(j);
  if j.ordering_key is not null then
    select l.* into j from pgqueue.jobs_live l where l.job_id = j.job_id;
    if j.status = 'submitted' then
      insert into pgqueue.sweep_notes (queue, ordering_key) values (j.queue, j.ordering_key);
    end if;
  end if;
  return j;
end $$;
comment on function pgqueue.revive is 'Puts a dead letter back into its queue with fresh attempts.';

create function pgqueue.retry(job_id uuid) returns pgqueue.jobs
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
declare
  j pgqueue.jobs;
  was text := 'failed';
begin
  update pgqueue.jobs_live l
     set status = 'pending', due_at = null, scheduled_at = null, seq = nextval('pgqueue.jobs_seq'), expires_at = null, updated_at = pgqueue.clock()
   where l.job_id = retry.job_id and l.status = 'failed'
  returning l.* into j;
  if j.job_id is null then
    delete from pgqueue.jobs_dead_letter d
     where d.job_id = retry.job_id and d.finished_at >= pgqueue.id_time(retry.job_id) - interval '1 day'
    returning d.* into j;
    if j.job_id is null then
      select f.* into j from pgqueue.job(retry.job_id) f;
      if j.job_id is null then
        raise exception 'there is no job %', retry.job_id using errcode = 'PQ404';
      end if;
      raise exception 'job % is % and cannot be retried', retry.job_id, j.status
        using errcode = 'PQ409', hint = 'Only failed jobs and dead letters can be retried.';
    end if;
    was := 'dead_letter';
    j := pgqueue.revive(j);
  end if;
  perform pgqueue.note('retry', j.job_id::text, 1);
  if j.status = 'pending' then
    perform pgqueue.ring(j.queue, array[j.job_type]);
  end if;
  if pgqueue.watched() then
    perform pgqueue.publish(array[pgqueue.event('job.queued', j.job_id, j.queue, j.job_type, was, j.status, j.attempts)]);
  end if;
  return j;
end $$;
comment on function pgqueue.retry(uuid) is
  'Makes a dead letter pending with fresh attempts, or a failed job that waits pending now. Errors: PQ404, PQ409.';

create function pgqueue.retry_dead_letters(
  job_type text default null, queue text default null, since timestamptz default null, until timestamptz default null,
  max_jobs integer default null)
  returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  d pgqueue.jobs;
  moved bigint := 0;
  r record;
  queues text[] := '{}';
  job_types text[] := '{}';
  watched constant boolean := pgqueue.watched();
  events jsonb[] := '{}';
begin
  if max_jobs < 0 then
    raise exception 'max_jobs must not be negative, but is %', max_jobs using errcode = 'PQ422', column = 'max_jobs';
  end if;
  for d in
    select l.* from pgqueue.jobs_dead_letter l
     where (retry_dead_letters.job_type is null or l.job_type = retry_dead_letters.job_type)
       and (retry_dead_letters.queue is null or l.queue = retry_dead_letters.queue)
       and (since is null or l.finished_at >= since) and (until is null or l.finished_at < until)
     order by l.job_id limit max_jobs for update skip locked
  loop
    delete from pgqueue.jobs_dead_letter l where l.job_id = d.job_id and l.finished_at = d.finished_at;
    d := pgqueue.revive(d);
    moved := moved + 1;
    if d.status = 'pending' then
      queues := queues || d.queue::text;
      job_types := job_types || d.job_type::text;
    end if;
    if watched and moved <= 2000 then
      events := events || pgqueue.event('job.queued', d.job_id, d.queue, d.job_type, 'dead_letter', d.status, d.attempts);
    end if;
  end loop;
  for r in select u.queue, array_agg(u.job_type) as job_types from unnest(queues, job_types) u(queue, job_type)
            group by u.queue order by u.queue
  loop
    perform pgqueue.ring(r.queue, r.job_types);
  end loop;
  perform pgqueue.publish(events);
  perform pgqueue.note('retry_dead_letters', null, moved,
    jsonb_build_object('job_type', job_type, 'queue', queue, 'since', since, 'until', until));
  return moved;
end $$;
comment on function pgqueue.retry_dead_letters is 'retry for all dead letters that match; says how many were moved.';

create function pgqueue.discard(job_id uuid) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
declare
  j pgqueue.jobs;
begin
  delete from pgqueue.jobs_dead_letter d
   where d.job_id = discard.job_id and d.finished_at >= pgqueue.id_time(discard.job_id) - interval '1 day'
  returning d.* into j;
  if j.job_id is null then
    select f.* into j from pgqueue.job(discard.job_id) f;
    if j.job_id is null then
      raise exception 'there is no job %', discard.job_id using errcode = 'PQ404';
    end if;
    raise exception 'job % is %: only dead letters can be discarded', discard.job_id, j.status using errcode = 'PQ409';
  end if;
  perform pgqueue.note('discard', j.job_id::text, 1, jsonb_build_object('job_type', j.job_type, 'queue', j.queue, 'error', j.error));
  return 'discarded';
end $$;
comment on function pgqueue.discard(uuid) is 'Deletes a dead letter, with a row in the audit. Errors: PQ404, PQ409.';

create function pgqueue.discard_dead_letters(
  job_type text default null, queue text default null, since timestamptz default null, until timestamptz default null,
  max_jobs integer default null)
  returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  removed bigint;
begin
  if max_jobs < 0 then
    raise exception 'max_jobs must not be negative, but is %', max_jobs using errcode = 'PQ422', column = 'max_jobs';
  end if;
  delete from pgqueue.jobs_dead_letter d
   where (d.job_id, d.finished_at) in (
     select l.job_id, l.finished_at from pgqueue.jobs_dead_letter l
      where (discard_dead_letters.job_type is null or l.job_type = discard_dead_letters.job_type)
        and (discard_dead_letters.queue is null or l.queue = discard_dead_letters.queue)
        and (since is null or l.finished_at >= since) and (until is null or l.finished_at < until)
      order by l.job_id limit max_jobs for update skip locked);
  get diagnostics removed = row_count;
  perform pgqueue.note('discard_dead_letters', null, removed,
    jsonb_build_object('job_type', job_type, 'queue', queue, 'since', since, 'until', until));
  return removed;
end $$;
comment on function pgqueue.discard_dead_letters is 'discard for all dead letters that match; says how many were deleted.';

create function pgqueue.queue_is_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- Settings are edited by SQL, so a pause is the same whether by UPDATE or by pgqueue.pause.
  if tg_when = 'BEFORE' then
    new.updated_at := pgqueue.clock();
    new.paused_at := case when not new.paused then null
                          when tg_op = 'UPDATE' then case when old.paused and old.name = new.name then old.paused_at else pgqueue.clock() end
                          else pgqueue.clock() end;
    return new;
  end if;
  if tg_op = 'UPDATE' and new.timeout_ms < old.timeout_ms then
    -- Sweeps look anew at what runs. Rows beside the others, which this transaction would keep from them until it ends.
    insert into pgqueue.claims (look_at, job_ids)
      select pgqueue.clock() - random() * interval '1 second', c.job_ids from pgqueue.claims c
       where c.look_at > pgqueue.clock() + interval '10 seconds';
  end if;
  if tg_op <> 'INSERT' then
    if old.paused and (tg_op = 'DELETE' or not new.paused or new.name <> old.name) then
      update pgqueue.queue_pauses p set resumed_at = pgqueue.clock() where p.queue = old.name and p.resumed_at is null;
      perform pgqueue.note('resume', old.name, null);
      perform pgqueue.ring(old.name, array_fill(null::text, array[64]));
    end if;
    if tg_op = 'DELETE' or not new.paused or (old.paused and new.name = old.name) then
      return null;
    end if;
  end if;
  if new.paused then
    insert into pgqueue.queue_pauses (queue, paused_at) values (new.name, new.paused_at)
      on conflict (queue, paused_at) do update set resumed_at = null;
    perform pgqueue.note('pause', new.name, null);
  end if;
  return null;
end $$;
comment on function pgqueue.queue_is_edited is 'Trigger: checks a queue''s settings, and wakes workers when a pause ends.';
create trigger queues_edited before insert or update on pgqueue.queues
  for each row execute function pgqueue.queue_is_edited();
create trigger queues_were_edited after insert or update of name, paused, timeout_ms or delete on pgqueue.queues
  for each row execute function pgqueue.queue_is_edited();

create function pgqueue.need(name text, value anyelement) returns anyelement
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
begin
  if value is null then
    raise exception '% must be given, not null', name using errcode = 'PQ422', column = name;
  end if;
  return value;
end $$;
comment on function pgqueue.need(text, anyelement) is 'The value of an argument, which must not be null.';

create function pgqueue.pause(queue text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  insert into pgqueue.queues as q (name, paused) values (pgqueue.need('queue', pause.queue), true)
    on conflict (name) do update set paused = true where not q.paused;
  return found;
end $$;
comment on function pgqueue.pause(text) is 'Stops claims of a queue; running jobs end, enqueues go on. False: it was paused.';

create function pgqueue.resume(queue text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  update pgqueue.queues q set paused = false where q.name = pgqueue.need('queue', resume.queue) and q.paused;
  return found;
end $$;
comment on function pgqueue.resume(text) is 'Lets a paused queue be claimed again. False: it was not paused.';

create function pgqueue.pause_job_type(job_type text, until timestamptz) returns void
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    insert into pgqueue.job_type_pauses as p (job_type, until) values (pgqueue.need('job_type', pause_job_type.job_type), pgqueue.need('until', pause_job_type.until))
      on conflict (job_type) do update set until = greatest(p.until, excluded.until)
  $$;
comment on function pgqueue.pause_job_type(text, timestamptz) is 'Stops claims of a job type until then.';

create function pgqueue.resume_job_type(job_type text) returns boolean
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    with gone as (delete from pgqueue.job_type_pauses p where p.job_type = pgqueue.need('job_type', resume_job_type.job_type) returning 1)
    select exists (select from gone)
  $$;
comment on function pgqueue.resume_job_type is 'Ends the pause of a job type.';

create function pgqueue.why(job_id uuid) returns text
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
declare
  j pgqueue.jobs;
  q pgqueue.queues;
  w pgqueue.workers;
  n bigint;
  wait text;
  until timestamptz;
begin
  select f.* into j from pgqueue.job(why.job_id) f;
  if j.job_id is null then
    return format('There is no job %s: it was never enqueued, its transaction has not committed, or retention has removed it.', why.job_id);
  end if;
  wait := regexp_replace(date_trunc('second', greatest(j.due_at - pgqueue.clock(), interval '0'))::text, '^00:', '');
  case j.status
    when 'completed' then
      return format('It completed at %s.', date_trunc('second', j.finished_at));
    when 'cancelled' then
      return format('It was cancelled at %s.', date_trunc('second', j.finished_at));
    when 'dead_letter' then
      return format('It is a dead letter since %s (%s); a retry gives it fresh attempts.', date_trunc('second', j.finished_at), coalesce(j.error, 'no error recorded'));
    when 'failed' then
      if j.due_at >= j.updated_at + coalesce((select least(f.failed_ttl, interval '100 years') from pgqueue.queues f where f.name = j.queue), interval '7 days') then
        return format('Attempt %s failed (%s); its retry lies beyond failed_ttl of its queue: it becomes a dead letter in %s.', j.attempts, coalesce(j.error, 'no error recorded'), wait);
      end if;
      return format('Attempt %s failed (%s); it becomes pending again in %s.', j.attempts, coalesce(j.error, 'no error recorded'), wait);
    when 'submitted' then
      if j.due_at is null then
        if not exists (select from pgqueue.jobs_live h
                        where h.queue = j.queue and h.ordering_key = j.ordering_key and (h.in_line or h.due_at is not null)) then
          return format('It is the turn of ordering_key "%s", whose head has ended or was deleted: a sweep lets the next job go, within about ten minutes.', j.ordering_key);
        end if;
        return format('It waits for the job before it with ordering_key "%s".', j.ordering_key);
      end if;
      return format('It is scheduled: it becomes pending in %s.', wait);
    when 'processing' then
      select k.* into w from pgqueue.workers k where k.worker_id = j.worker_id;
      if j.lease_expires_at < pgqueue.clock() then
        return format('Its lease ran out at %s: worker %s has gone silent, and the next sweep gives the job back.', date_trunc('second', j.lease_expires_at), coalesce(w.name, j.worker_id::text));
      end if;
      return format('It is running: attempt %s on worker %s since %s%s.', j.attempts, coalesce(w.name, j.worker_id::text), date_trunc('second', j.started_at),
        case when j.cancel_requested_at is not null then ', and was asked to stop' else '' end);
    else
      null;
  end case;
  select s.* into q from pgqueue.queues s where s.name = j.queue;
  if q.paused then
    return format('Queue "%s" is paused since %s.', j.queue, date_trunc('second', q.paused_at));
  end if;
  select p.until into until from pgqueue.job_type_pauses p where p.job_type = j.job_type and p.until > pgqueue.clock();
  if found then
    return format('Job type "%s" is paused until %s.', j.job_type, date_trunc('second', until));
  end if;
  if j.expires_at <= pgqueue.clock() then
    return format('It expired at %s; the next sweep makes it a dead letter.', date_trunc('second', j.expires_at));
  end if;
  select count(*) into n from pgqueue.live_workers k where k.queues is null or j.queue = any (k.queues);
  if n = 0 then
    return format('No worker serves queue "%s".', j.queue);
  end if;
  select count(*) into n from pgqueue.live_workers k
   where (k.queues is null or j.queue = any (k.queues)) and (k.job_types is null or j.job_type = any (k.job_types));
  if n = 0 then
    return format('No worker for this type: none that serves queue "%s" has a task for "%s".', j.queue, j.job_type);
  end if;
  select count(*) into n from pgqueue.live_workers k
   where (k.queues is null or j.queue = any (k.queues)) and (k.job_types is null or j.job_type = any (k.job_types))
     and (k.priorities is null or j.priority = any (k.priorities)) and k.status <> 'draining';
  if n = 0 then
    return format('No worker that could run it takes priority %s now.', j.priority);
  end if;
  select count(*) into n from (
    select from pgqueue.jobs_live l
     where l.in_line and l.status = 'pending' and l.queue = j.queue and l.priority = j.priority and l.seq < j.seq limit 1001) c;
  return format('It waits its turn: %s of its queue and priority %s first.',
    case when n > 1000 then 'more than 1000 jobs' when n = 1 then '1 job' else n || ' jobs' end, case when n = 1 then 'goes' else 'go' end);
end $$;
comment on function pgqueue.why(uuid) is 'Why a job is not running now, in one sentence.';
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
-- Leases: claims are looked at again, and what was lost or ran for too long is taken from its worker.
--
-- An index of leases would be written by every claim and heartbeat. Instead a claim leaves one row in pgqueue.claims that
-- names its jobs, in the same transaction. The row says when a sweep is to look: a second later, when most batches are over
-- and the row goes, then after twice the time, but never after the first lease of those that still run. Leases only grow,
-- and who shortens one by hand adds a row of his own (jobs_edited), so no lease runs out unseen.
-- A job may be named twice, by a claim that it was released from and by the next: either row finds its present lease.

create function pgqueue.look_at_claims(until timestamptz) returns uuid[]
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  since timestamptz := (select s.claims_swept_to from pgqueue.sweep_state s);
  after tid := '(0,0)';
  few int := 5;
  looked int;
  late_ids uuid[];
  lost uuid[] := '{}';
begin
  loop
    with due as materialized (
      select c.ctid as tid, c.look_at, c.timeout_at as had, c.job_ids from pgqueue.claims c
       where c.look_at >= since and (c.look_at > since or c.ctid > after) and c.look_at < pgqueue.clock()
       order by c.look_at, c.ctid limit few for update skip locked),
    held as materialized (
      select d.tid, d.look_at, d.had, h.* from due d cross join lateral (
        select array_agg(l.job_id) as job_ids, array_agg(l.job_id) filter (where l.lease_expires_at < pgqueue.clock()) as lost_ids,
               coalesce(min(l.lease_expires_at), 'infinity') as lease_at, min(l.started_at) filter (where isfinite(l.started_at)) as started_at,
               -- What is overdue queues up behind those that became so before.
               greatest(pgqueue.clock(), min(least(l.started_at, pgqueue.clock()) + (coalesce(l.timeout_ms,
                 (select q.timeout_ms from pgqueue.queues q where q.name = l.queue), 900000) + 10000::bigint) * interval '1 millisecond')) as timeout_at
          from pgqueue.jobs_live l where l.job_id = any (d.job_ids) and l.status = 'processing') h),
    over as (
      delete from pgqueue.claims c using held h where c.ctid = h.tid and h.job_ids is null),
    kept as (
      -- After twice the time, so that what has ended is not named for much longer than it ran. What is late stays where it
      -- is, until it has been given back or its holder is done.
      update pgqueue.claims c
         set job_ids = h.job_ids, timeout_at = h.timeout_at,
             look_at = case when h.lost_ids is null
               then least(h.lease_at, pgqueue.clock() + greatest(interval '1 second', pgqueue.clock() - h.started_at)) else h.look_at end
        from held h where c.ctid = h.tid and h.job_ids is not null and (h.lost_ids is null or h.had is null))
    select count(*), array(select unnest(o.lost_ids) from held o),
           (array_agg(h.look_at order by h.look_at desc, h.tid desc))[1], (array_agg(h.tid order by h.look_at desc, h.tid desc))[1]
      into looked, late_ids, since, after from held h;
    lost := lost || late_ids;
    exit when looked < few or clock_timestamp() > until;
    -- On from the last one: what was done here is not walked again.
    few := least(few * 2, 200);
  end loop;
  return lost;
end $$;
comment on function pgqueue.look_at_claims(timestamptz) is
  'Forgets claims of which nothing runs any more, says when the others are to be looked at, and answers the jobs whose lease ran out.';

create function pgqueue.note_strays(pages bigint) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  start constant bigint := (select s.stray_page from pgqueue.sweep_state s);
begin
  -- Somebody may have edited jobs_live itself, or claims. Part of the table each time, from where the last call ended.
  insert into pgqueue.claims (look_at, job_ids)
    select pgqueue.clock() - random() * interval '1 second', array_agg(n.job_id)
      from (select l.job_id, row_number() over () / 100 as part from pgqueue.jobs_live l
             where l.ctid >= format('(%s,0)', start)::tid and l.ctid < format('(%s,0)', start + pages)::tid
               and l.status = 'processing' and l.lease_expires_at < pgqueue.clock() - interval '1 minute'
               and l.job_id not in (select unnest(c.job_ids) from pgqueue.claims c)) n
     group by n.part;
  update pgqueue.sweep_state set stray_page = case
    when (start + pages) * current_setting('block_size')::bigint < pg_relation_size('pgqueue.jobs_live') then start + pages else 0 end;
end $$;
comment on function pgqueue.note_strays(bigint) is
  'Has the next sweep look at processing jobs whose lease ran out long ago and that no claim names.';

create function pgqueue.sweep_leases(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  half constant interval := (until - clock_timestamp()) / 2;
  -- So many that a few which somebody holds leave room for others.
  ids constant uuid[] := (pgqueue.look_at_claims(clock_timestamp() + half))[1:least(max_jobs, 1000000) + 5000];
  last constant timestamptz := greatest(until, clock_timestamp() + half);
  r record;
  j pgqueue.jobs;
  moved bigint := 0;
begin
  if ids = '{}' then
    return 0;
  end if;
  for r in
    with lost as materialized (
      select l.* from pgqueue.jobs_live l
       where l.job_id = any (ids) and l.status = 'processing' and l.lease_expires_at < pgqueue.clock()
       order by l.lease_expires_at limit max_jobs for update skip locked)
    select l as job, coalesce(w.name || ' (' || w.hostname || ', pid ' || w.pid || ')', l.worker_id::text) as worker,
           row_number() over (partition by l.worker_id order by l.started_at, l.priority, l.seq)
             <= coalesce(w.concurrency, max_jobs) as may_have_begun
      from lost l left join pgqueue.workers w on w.worker_id = l.worker_id
     order by l.lease_expires_at
  loop
    j := r.job;
    if r.may_have_begun then
      j.lost := least(j.lost, 2147483646) + 1;
    else
      -- A worker begins what it holds in order, and no more at once than its concurrency: this one was not begun, and does
      -- not die unrun with one worker after another.
      j.uncharged := least(j.uncharged, 2147483646) + 1;
      j.max_retries := least(j.max_retries + 1, 1000000);
    end if;
    j.errors := pgqueue.add_error(j.errors, pgqueue.error_record(j.attempts, j.worker_id, jsonb_build_object(
      'type', 'LeaseLost', 'message', format('worker %s let its lease run out at %s', r.worker, j.lease_expires_at)), true, j.started_at));
    if j.cancel_requested_at is not null then
      perform pgqueue.settle(j, 'cancelled', 'cancelled on request; worker ' || r.worker || ' was lost');
    elsif j.lost > coalesce((select q.max_lost from pgqueue.queues q where q.name = j.queue), 5) then
      perform pgqueue.settle(j, 'dead_letter', format('%s leases were lost, the last by worker %s', j.lost, r.worker));
    else
      -- The seq stays, so the job goes first.
      update pgqueue.jobs_live l
         set status = 'pending', lost = j.lost, uncharged = j.uncharged, max_retries = j.max_retries, errors = j.errors,
             error = 'the lease of worker ' || r.worker || ' ran out', lease_expires_at = null, updated_at = pgqueue.clock()
       where l.job_id = j.job_id;
      perform pgqueue.say_released(j);
    end if;
    moved := moved + 1;
    exit when clock_timestamp() > last;
  end loop;
  return moved;
end $$;
comment on function pgqueue.sweep_leases is 'A step of the sweep: takes back jobs whose leases ran out.';

create function pgqueue.sweep_timeouts(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  since constant timestamptz := (select s.timeouts_swept_to from pgqueue.sweep_state s);
  half constant interval := (until - clock_timestamp()) / 2;
  last timestamptz;
  tids tid[];
  ids uuid[];
  j record;
  moved bigint := 0;
begin
  -- Workers end attempts at their timeout; this is for those that do not, though they renew their leases.
  perform pgqueue.look_at_claims(clock_timestamp() + half);
  last := greatest(until, clock_timestamp() + half);
  select array_agg(distinct d.tid), array_agg(u.job_id) into tids, ids
    from (select c.ctid as tid, c.job_ids from pgqueue.claims c where c.timeout_at >= since and c.timeout_at <= pgqueue.clock()
           order by c.timeout_at limit 100 for update skip locked) d
   cross join unnest(d.job_ids) u(job_id);
  if tids is null then
    return 0;
  end if;
  for j in
    select l.worker_id, l.job_id, l.attempts, coalesce(l.timeout_ms, q.timeout_ms, 900000) as timeout_ms
      from pgqueue.jobs_live l left join pgqueue.queues q on q.name = l.queue
     where l.job_id = any (ids) and l.status = 'processing' and l.lease_expires_at >= pgqueue.clock()
       and l.started_at < pgqueue.clock() - (coalesce(l.timeout_ms, q.timeout_ms, 900000) + 10000::bigint) * interval '1 millisecond'
     order by l.lease_expires_at limit max_jobs for update of l skip locked
  loop
    perform pgqueue.fail(j.worker_id, j.job_id, j.attempts, jsonb_build_object('type', 'TimeoutError', 'message',
      format('the attempt ran longer than its timeout (%s s), and its worker did not end it', round(j.timeout_ms / 1000.0, 1))));
    -- Its worker lives, and may be at it still: it has time to say so (hold_retry), and lets go when the attempt is over.
    perform pgqueue.hold_retry(j.worker_id, array[j.job_id], array[j.attempts], interval '30 seconds');
    moved := moved + 1;
    exit when clock_timestamp() > last;
  end loop;
  if moved < max_jobs and clock_timestamp() <= last then
    -- The next look at these claims says when it is to come here again.
    update pgqueue.claims c set timeout_at = null, look_at = least(c.look_at, pgqueue.clock()) where c.ctid = any (tids);
  end if;
  return moved;
end $$;
comment on function pgqueue.sweep_timeouts is 'A step of the sweep: ends attempts that ran longer than their timeout though their worker lives.';
-- Partitions and retention. Finished jobs go by dropping whole partitions: a day's or, of dead letters, a week's. Where a
-- queue keeps them for less time than another, the step `retention` deletes its rows in walks over the table's blocks.
--
-- A partition that is missing never stops anybody: its rows go to the default partition, which is walked as well.
-- Making and dropping takes locks that producers and workers would wait for, so nobody here waits for a lock for longer
-- than they may: busy means that it must be tried again.

create table pgqueue.partitions (
  name text primary key,
  next_block bigint not null default 0,
  begun_at timestamptz,
  passed_over bigint not null default 0,
  walk_again_at timestamptz,
  rules text,
  behind_since timestamptz,
  archived_at timestamptz,
  problem text
) with (fillfactor = 50);
comment on table pgqueue.partitions is 'What retention remembers of a partition of finished jobs.';
comment on column pgqueue.partitions.next_block is 'Where the walk that began at begun_at goes on.';
comment on column pgqueue.partitions.passed_over is 'Rows of this walk that others held locked.';
comment on column pgqueue.partitions.rules is 'The times to live that the last walk went by.';
comment on column pgqueue.partitions.behind_since is 'Since when rows that are past retention are still there; null: none is.';
comment on column pgqueue.partitions.problem is 'What kept it from being dropped or archived, or rows from being deleted.';

create table pgqueue.archives (
  status text primary key constraint "status must be completed, cancelled or dead_letter"
    check (status in ('completed', 'cancelled', 'dead_letter')),
  function text not null
);
comment on table pgqueue.archives is
  'Optional: a function (regclass) returning void, by its name, that is called with each partition before it is dropped, for
example to COPY it to a file or to insert it into a table of yours. A partition whose archive fails is kept.';

create function pgqueue.partition_list() returns table (name text, status text, lower timestamptz, upper timestamptz)
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$
    select c.relname::text, s.status, b.lower, b.lower + s.step
      from (values ('completed', interval '24 hours'), ('cancelled', '24 hours'), ('dead_letter', '168 hours')) s(status, step)
      join pg_inherits i on i.inhparent = ('pgqueue.jobs_' || s.status)::regclass
      join pg_class c on c.oid = i.inhrelid
     cross join lateral (
       select case when c.relname ~ '_[0-9]{8}$'
                   then (right(c.relname, 8)::date)::timestamp at time zone 'UTC' end as lower) b
  $$;
comment on function pgqueue.partition_list() is 'The partitions of finished jobs, with bounds of finished_at; without: the default ones.';

create function pgqueue.retention_of(status text, out keep interval, out least_keep interval, out rules text, out longest_walked interval)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  usual constant interval := case status when 'completed' then interval '30 days' when 'cancelled' then '7 days' else '90 days' end;
begin
  execute format(
    'with t as (select q.name, least(q.%1$I, interval ''100 years'') as ttl from pgqueue.queues q where q.%1$I <> %2$L union all select null, %2$L),
          k as (select max(t.ttl) as keep from t)
     select k.keep, min(t.ttl), md5(string_agg(concat_ws('':'', t.name, t.ttl), '','' order by t.name nulls first)),
            max(t.ttl) filter (where t.ttl < k.keep)
       from t cross join k group by k.keep', status || '_ttl', usual)
    into keep, least_keep, rules, longest_walked;
end $$;
comment on function pgqueue.retention_of(text) is
  'How long jobs that ended so are kept: by the most patient queue (then partitions go) and by the least, all settings as one
fingerprint, and the longest time that is still shorter than keep (then nothing is left to walk for).';

create function pgqueue.walk_partition(partition text, status text, blocks bigint, until timestamptz, out removed bigint, out ended boolean)
  language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' set jit = off
  as $$
declare
  p pgqueue.partitions;
  usual constant interval := case status when 'completed' then interval '30 days' when 'cancelled' then '7 days' else '90 days' end;
  pages constant bigint := pg_relation_size(format('pgqueue.%I', partition)::regclass) / current_setting('block_size')::bigint;
  past tid[];
  gone bigint;
begin
  removed := 0;
  select n.* into p from pgqueue.partitions n where n.name = partition;
  while p.next_block < pages loop
    execute format('select array_agg(f.ctid) from pgqueue.%1$I f left join pgqueue.queues q on q.name = f.queue
                     where f.ctid >= %2$L::tid and f.ctid < %3$L::tid and f.finished_at < pgqueue.clock() - least(coalesce(q.%4$I, %5$L), interval ''100 years'')',
                   partition, format('(%s,0)', p.next_block), format('(%s,0)', p.next_block + blocks), status || '_ttl', usual)
      into past;
    if past is not null then
      execute format('delete from pgqueue.%1$I d where d.ctid = any (array(
                        select f.ctid from pgqueue.%1$I f where f.ctid = any ($1) for update skip locked))', partition) using past;
      get diagnostics gone = row_count;
      removed := removed + gone;
      p.passed_over := p.passed_over + cardinality(past) - gone;
    end if;
    p.next_block := p.next_block + blocks;
    exit when clock_timestamp() > until;
  end loop;
  ended := p.next_block >= pages;
  update pgqueue.partitions n set next_block = p.next_block, passed_over = p.passed_over where n.name = partition;
end $$;
comment on function pgqueue.walk_partition is
  'Deletes what is past retention from where the last call ended, some blocks at a time, until it is over or the time is.';

create function pgqueue.sweep_retention(max_jobs int, until timestamptz) returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC' set jit = off
  as $$
declare
  p record;
  w record;
  removed bigint := 0;
begin
  for p in
    select l.name, l.status, l.lower, l.upper, r.keep, r.least_keep, r.rules, r.longest_walked
      from (values ('completed'), ('cancelled'), ('dead_letter')) s(status)
     cross join lateral pgqueue.retention_of(s.status) r
      join pgqueue.partition_list() l on l.status = s.status
      left join pgqueue.partitions n on n.name = l.name
     where (l.lower is null or r.least_keep < r.keep and l.lower < pgqueue.clock() - r.least_keep)
       and (n.walk_again_at is null or n.walk_again_at <= pgqueue.clock() or n.rules is distinct from r.rules or n.begun_at is not null)
     order by n.begun_at, n.walk_again_at nulls first, l.lower
  loop
    exit when clock_timestamp() > until;
    insert into pgqueue.partitions as n (name, begun_at, rules) values (p.name, pgqueue.clock(), p.rules)
      on conflict on constraint partitions_pkey do update
         set begun_at = excluded.begun_at, rules = excluded.rules, next_block = 0, passed_over = 0
       where n.begun_at is null or n.rules <> excluded.rules;
    -- About a row or more per 400 bytes.
    select * into w from pgqueue.walk_partition(p.name, p.status, greatest(1, least(256, max_jobs / 16)), until);
    removed := removed + w.removed;
    update pgqueue.partitions n
       set begun_at = null,
           -- A day that is over, and was when the walk began, need not be walked again.
           walk_again_at = case when n.passed_over > 0 then pgqueue.clock() + interval '10 seconds'
                                when p.upper + p.longest_walked <= n.begun_at then 'infinity'
                                else pgqueue.clock() + least(greatest(p.least_keep / 20, interval '1 minute'), interval '1 hour') end,
           behind_since = case when n.passed_over > 0 then coalesce(n.behind_since, n.begun_at) end,
           problem = case when n.passed_over > 0 then n.passed_over || ' rows past retention are locked by others' end
     where w.ended and n.name = p.name;
    update pgqueue.partitions n set behind_since = coalesce(n.behind_since, n.begun_at) where not w.ended and n.name = p.name;
  end loop;
  return removed;
end $$;
comment on function pgqueue.sweep_retention is 'A step of the sweep: deletes finished jobs past their time where no whole partition can go.';

create function pgqueue.make_partition(status text, lower timestamptz, upper timestamptz) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms' set jit = off
  as $$
declare
  parent constant text := 'jobs_' || status;
  partition constant text := parent || '_' || to_char(lower at time zone 'UTC', 'YYYYMMDD');
  columns constant text := (
    select string_agg(quote_ident(a.attname), ', ' order by a.attnum) from pg_attribute a
     where a.attrelid = 'pgqueue.jobs'::regclass and a.attnum > 0 and not a.attisdropped and a.attgenerated = '');
  -- More rows than can be moved while others wait stay where they are.
  movable constant int := 2000;
  many boolean;
begin
  if lower <= pgqueue.clock() and pg_relation_size(format('pgqueue.%I', parent || '_default')::regclass) > 0 then
    execute format('select count(*) > $1 from (select from pgqueue.%I d where d.finished_at >= $2 and d.finished_at < $3 limit $1 + 1) c',
                   parent || '_default') into many using movable, lower, upper;
    if many then
      return 'crowded';
    end if;
  end if;
  execute format('create table pgqueue.%I (like pgqueue.%I including all)', partition, parent);
  perform pgqueue.keep_few_statistics(format('pgqueue.%I', partition)::regclass);
  perform pgqueue.index_ids(format('pgqueue.%I', partition)::regclass);
  if lower <= pgqueue.clock() then
    -- It may have rows at once. Whoever has read which partitions there are, and waits for the default one, would find
    -- them in neither.
    execute format('lock table only pgqueue.%I in access exclusive mode', parent);
  end if;
  execute format('lock table only pgqueue.%I in access exclusive mode', parent || '_default');
  execute format('with moved as (delete from pgqueue.%1$I where finished_at >= %2$L and finished_at < %3$L returning *)
                  insert into pgqueue.%4$I (%5$s) select %5$s from moved', parent || '_default', lower, upper, partition, columns);
  execute format('alter table pgqueue.%I attach partition pgqueue.%I for values from (%L) to (%L)', parent, partition, lower, upper);
  return 'made';
exception when lock_not_available then
  return 'busy';
end $$;
comment on function pgqueue.make_partition is 'Makes the partition of a span of time for one final status.';

create function pgqueue.make_default_partition(status text) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms'
  as $$
declare
  parent constant text := 'jobs_' || status;
begin
  execute format('create table pgqueue.%I (like pgqueue.%I including all)', parent || '_default', parent);
  perform pgqueue.keep_few_statistics(format('pgqueue.%I', parent || '_default')::regclass);
  perform pgqueue.index_ids(format('pgqueue.%I', parent || '_default')::regclass);
  execute format('alter table pgqueue.%I attach partition pgqueue.%I default', parent, parent || '_default');
  perform pgqueue.grant_roles();
  return 'made';
exception when lock_not_available then
  return 'busy';
end $$;
comment on function pgqueue.make_default_partition is 'Makes the default partition of one final status where somebody dropped it.';

create function pgqueue.drop_partition(partition text, status text) returns text
  language plpgsql security definer set search_path = pg_catalog, pg_temp set lock_timeout = '50ms'
  as $$
declare
  archive constant text := (select a.function from pgqueue.archives a where a.status = drop_partition.status);
  fault text;
begin
  if archive is not null and not exists (select from pgqueue.partitions n where n.name = partition and n.archived_at is not null) then
    begin
      if to_regprocedure(archive || '(regclass)') is null then
        raise exception 'there is no function %(regclass)', archive;
      end if;
      execute format('select %s($1)', to_regprocedure(archive || '(regclass)')::regproc) using format('pgqueue.%I', partition)::regclass;
    exception when others then
      fault := 'its archive failed: ' || sqlerrm;
    end;
    insert into pgqueue.partitions as n (name, archived_at, problem)
      values (partition, case when fault is null then pgqueue.clock() end, fault)
      on conflict on constraint partitions_pkey do update set archived_at = excluded.archived_at, problem = excluded.problem;
    return case when fault is null then 'archived' else fault end;
  end if;
  -- The parent's lock is the one that others wait for: it is taken last.
  execute format('lock table pgqueue.%I in access exclusive mode', partition);
  execute format('drop table pgqueue.%I', partition);
  delete from pgqueue.partitions n where n.name = partition;
  return 'dropped';
exception when lock_not_available then
  insert into pgqueue.partitions as n (name, problem) values (partition, 'others use it, so that it cannot be dropped')
    on conflict on constraint partitions_pkey do update set problem = excluded.problem;
  return 'busy';
end $$;
comment on function pgqueue.drop_partition is 'Drops a partition whose jobs are past their time; where its status has an archive, that is called first.';

create function pgqueue.maintain_partitions(max_actions int default null) returns table (partition text, action text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp set timezone = 'UTC'
  as $$
#variable_conflict use_column
declare
  begun constant timestamptz := clock_timestamp();
  p record;
  d record;
  lower timestamptz;
  acted int := 0;
  problem text;
begin
  if not pg_try_advisory_xact_lock(1885827431, hashtext('partitions')) then
    return;
  end if;
  for p in
    -- In hours, since a day of the session's time zone may have 23 or 25.
    select * from (values ('completed', 'day', interval '24 hours', interval '168 hours'), ('cancelled', 'day', '24 hours', '168 hours'),
                          ('dead_letter', 'week', '168 hours', '504 hours')) v(status, unit, step, ahead)
  loop
    partition := 'jobs_' || p.status || '_default';
    if to_regclass('pgqueue.' || quote_ident(partition)) is null then
      action := pgqueue.make_default_partition(p.status);
      acted := acted + (action = 'made')::int;
      return next;
      continue when action = 'busy';
    end if;
    lower := date_trunc(p.unit, pgqueue.clock(), 'UTC');
    while lower < pgqueue.clock() + p.ahead and acted < coalesce(max_actions, 10000) loop
      partition := 'jobs_' || p.status || '_' || to_char(lower at time zone 'UTC', 'YYYYMMDD');
      if to_regclass('pgqueue.' || quote_ident(partition)) is null then
        action := pgqueue.make_partition(p.status, lower, lower + p.step);
        acted := acted + (action = 'made')::int;
        return next;
        exit when action = 'busy';
      end if;
      lower := lower + p.step;
    end loop;

    for d in
      select l.name from pgqueue.partition_list() l
       where l.status = p.status and l.upper < pgqueue.clock() - (select r.keep from pgqueue.retention_of(p.status) r)
       order by l.lower
    loop
      exit when acted >= coalesce(max_actions, 10000);
      partition := d.name;
      loop
        action := pgqueue.drop_partition(d.name, p.status);
        acted := acted + (action in ('dropped', 'archived'))::int;
        return next;
        exit when action <> 'archived' or acted >= coalesce(max_actions, 10000);
      end loop;
      -- That others use it is no fault, as long as it does not last: pgqueue.retention tells.
      problem := case when action in ('dropped', 'archived', 'busy') then problem else coalesce(problem, 'partition ' || d.name || ': ' || action) end;
      exit when action = 'busy';
    end loop;
  end loop;
  delete from pgqueue.partitions n where to_regclass('pgqueue.' || quote_ident(n.name)) is null;
  perform pgqueue.note_step('partitions', begun, acted, problem);
end $$;
comment on function pgqueue.maintain_partitions(int) is
  'Makes partitions ahead of time and drops those past retention, at most so many; busy means that it must be tried again, and
archived that the next call drops it. A call with max_actions 1 holds its locks the shortest.';

create function pgqueue.analyse() returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  begun constant timestamptz := clock_timestamp();
begin
  -- Autovacuum never analyses a partitioned table itself; its partitions it does.
  if not pg_try_advisory_xact_lock(1885827431, hashtext('analyse'))
     or exists (select from pgqueue.sweep_steps s
                 where s.step = 'analyse' and s.last_error is null and s.last_run_at between pgqueue.clock() - interval '1 day' and pgqueue.clock()) then
    return false;
  end if;
  if current_setting('server_version_num')::int >= 180000 then
    execute 'analyze only pgqueue.jobs';
  else
    execute 'analyze pgqueue.jobs (queue, job_type, status, priority, producer_id)';
  end if;
  perform pgqueue.note_step('analyse', begun, 1, null);
  return true;
end $$;
comment on function pgqueue.analyse() is 'Analyses the table jobs as a whole once a day. False: it was not time, or somebody else is at it.';

create view pgqueue.retention as
  select s.status, r.keep, count(l.name) filter (where l.lower is not null) as partitions,
         min(l.lower) as oldest, max(l.upper) as made_until,
         greatest(coalesce(max(pgqueue.clock() - r.keep - l.upper), '0'), coalesce(pgqueue.clock() - min(n.behind_since), '0'), '0') as behind,
         string_agg(l.name || ': ' || n.problem, '; ' order by l.lower) as problem
    from (values ('completed'), ('cancelled'), ('dead_letter')) s(status)
   cross join lateral pgqueue.retention_of(s.status) r
    left join pgqueue.partition_list() l on l.status = s.status
    left join pgqueue.partitions n on n.name = l.name
   group by s.status, r.keep;
comment on view pgqueue.retention is 'Retention of finished jobs: how far it is behind (0: not at all), and what holds it up.';
-- Schedules: recurring jobs. When an expression fires in its zone is computed by schedulers (pgqueue/cron.py); here is
-- what can be told at once, and what of any number of schedulers only one may do.
--
-- A schedule's own next_run_at is the fence: a scheduler names the due time that it read, and whoever finds another one
-- there does nothing. (schedule, due time) is unique besides. A null asks the schedulers for the next time; an edit of
-- cron, timezone or enabled puts it there, so that an edit never fires for the past.

create function pgqueue.cron_value(word text, field int) returns int
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
declare
  names constant text[] := case field when 4 then array['jan', 'feb', 'mar', 'apr', 'may', 'jun', 'jul', 'aug', 'sep', 'oct', 'nov', 'dec']
                                      when 5 then array['sun', 'mon', 'tue', 'wed', 'thu', 'fri', 'sat'] else '{}' end;
  low constant int := (array[0, 0, 1, 1, 0])[field];
  high constant int := (array[59, 23, 31, 12, 7])[field];
begin
  if array_position(names, word) is not null then
    return array_position(names, word) - 1 + low;
  elsif word ~ '^[0-9]{1,2}$' and word::int between low and high then
    return word::int;
  end if;
  return null;
end $$;
comment on function pgqueue.cron_value(text, int) is 'The number of a word in field 1 to 5 of a cron expression; null: it has none.';

create function pgqueue.cron_fault(cron text) returns text
  language plpgsql immutable set search_path = pg_catalog, pg_temp
  as $$
declare
  kinds constant text[] := array['minute', 'hour', 'day', 'month', 'weekday'];
  highs constant int[] := array[59, 23, 31, 12, 7];
  line constant text := lower(btrim(cron, E' \t') collate "C");
  parts text[] := regexp_split_to_array(line, '[ \t]+');
  term text;
  m text[];
  low int;
  high int;
  step int;
  numbered int := 0;
  first_day int := 32;
  longest int := 0;
begin
  if line ~ '^@' then
    return case when line not in ('@yearly', '@annually', '@monthly', '@weekly', '@daily', '@midnight', '@hourly')
                then line || ' is unknown; known are @yearly, @annually, @monthly, @weekly, @daily, @midnight, @hourly' end;
  elsif line = '' or cardinality(parts) <> 5 then
    return format('it has %s fields, not five: minute hour day month weekday%s', case when line = '' then 0 else cardinality(parts) end,
                  case when cardinality(parts) in (6, 7) then '; seconds and years are not supported' else '' end);
  end if;
  for f in 1 .. 5 loop
    foreach term in array string_to_array(parts[f], ',') loop
      if f = 3 and term = 'l' then
        first_day := 0;
        continue;
      elsif f = 5 and term ~ '^([0-7]|[a-z]{3})#[1-5]$' then
        if pgqueue.cron_value(split_part(term, '#', 1), f) is null then
          return format('%L is no weekday', term);
        end if;
        numbered := numbered + 1;
        continue;
      end if;
      m := regexp_match(term, '^(?:([*])|([0-9]{1,2}|[a-z]{3})(?:-([0-9]{1,2}|[a-z]{3}))?)(?:/([0-9]{1,2}))?$');
      if m is null then
        return format('%L is no %s', term, kinds[f]);
      end if;
      low := case when m[1] is null then pgqueue.cron_value(m[2], f) else (array[0, 0, 1, 1, 0])[f] end;
      high := case when m[3] is not null then pgqueue.cron_value(m[3], f) when m[1] is not null or m[4] is not null then highs[f] else low end;
      -- The week may end on a Sunday.
      high := case when f = 5 and m[3] is not null and high = 0 and low > 0 then 7 else high end;
      step := coalesce(m[4]::int, 1);
      if low is null or high is null then
        return format('%L is no %s: it must be %s to %s', term, kinds[f], (array[0, 0, 1, 1, 0])[f], highs[f]);
      elsif high < low then
        return format('%L ends before it begins', term);
      elsif step not between 1 and highs[f] then
        return format('the step of %L must be 1 to %s', term, highs[f]);
      end if;
      if f = 3 then
        first_day := least(first_day, low);
      elsif f = 4 then
        select greatest(longest, max((array[31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31])[n])) into longest
          from generate_series(low, high, step) n;
      end if;
    end loop;
  end loop;
  if numbered > 0 and numbered < cardinality(string_to_array(parts[5], ',')) then
    return 'weekdays are either all numbered, such as mon#1, or none is';
  elsif numbered > 0 and parts[3] <> '*' then
    return 'a numbered weekday such as mon#1 goes with `*` as day only';
  elsif (parts[3] like '*%' or parts[5] like '*%') and first_day > longest then
    return format('it never fires: no such month has a day %s', first_day);
  end if;
  return null;
end $$;
comment on function pgqueue.cron_fault(text) is 'What is wrong with a cron expression; null: nothing.';

create function pgqueue.zone_fault(timezone text) returns text
  language plpgsql volatile set search_path = pg_catalog, pg_temp
  as $$
declare
  -- Those names mean something else on another machine, or count leap seconds.
  elsewhere constant text := '^(posix/|right/|localtime$|posixrules$|Factory$)';
  wanted constant text := regexp_replace(lower(timezone collate "C"), '^(posix|right)/', '');
  near text;
begin
  -- A look at all zones takes some 50 ms, so those in use are not looked for again.
  if exists (select from pgqueue.schedules s where s.timezone = zone_fault.timezone) then
    return null;
  end if;
  if timezone !~ elsewhere and exists (select from pg_timezone_names n where n.name = timezone) then
    return null;
  end if;
  select n.name into near from pg_timezone_names n
   where n.name !~ elsewhere and (lower(n.name collate "C") = wanted or lower(n.name collate "C") like '%/' || replace(wanted, ' ', '\_'))
   order by n.name limit 1;
  return 'it is not known; it must be such as UTC or Europe/Berlin' || coalesce(' (perhaps ' || near || '?)', '');
end $$;
comment on function pgqueue.zone_fault(text) is 'What is wrong with the name of a time zone; null: nothing.';

create function pgqueue.schedule_is_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  fault text;
begin
  if tg_op = 'INSERT' or new.cron is distinct from old.cron then
    -- That neither is null is for the table to say.
    fault := case when new.cron is not null then pgqueue.cron_fault(new.cron) end;
    if fault is not null then
      raise exception 'cron "%" is not valid: %', new.cron, fault using errcode = 'PQ422', column = 'cron';
    end if;
  end if;
  if tg_op = 'INSERT' or new.timezone is distinct from old.timezone then
    fault := case when new.timezone is not null then pgqueue.zone_fault(new.timezone) end;
    if fault is not null then
      raise exception 'timezone "%" is not valid: %', new.timezone, fault using errcode = 'PQ422', column = 'timezone';
    end if;
  end if;
  if tg_op = 'UPDATE' and (new.cron, new.timezone, new.enabled) is distinct from (old.cron, old.timezone, old.enabled) then
    new.last_error := null;
    if new.next_run_at is not distinct from old.next_run_at then
      new.next_run_at := null;
    end if;
  end if;
  if not new.enabled then
    new.next_run_at := null;
  end if;
  new.updated_at := pgqueue.clock();
  return new;
end $$;
comment on function pgqueue.schedule_is_edited is 'Trigger: checks a schedule, and forgets its next run when its times changed.';

create index schedules_next on pgqueue.schedules (next_run_at) where enabled;
create index schedule_fires_fired on pgqueue.schedule_fires (fired_at);
create trigger schedules_edited before insert or update of cron, timezone, enabled on pgqueue.schedules
  for each row execute function pgqueue.schedule_is_edited();

create function pgqueue.fire_schedule(
  name text, cron text, timezone text, due_at timestamptz, fires timestamptz[], next_run_at timestamptz) returns setof uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
#variable_conflict use_column
declare
  s pgqueue.schedules;
  due timestamptz[] := fire_schedule.fires;
  ids uuid[];
begin
  -- Locked by another scheduler: it fires.
  select c.* into s from pgqueue.schedules c
   where c.name = fire_schedule.name and c.enabled and c.cron = fire_schedule.cron and c.timezone = fire_schedule.timezone
     and c.next_run_at is not distinct from fire_schedule.due_at for update skip locked;
  if s.name is null then
    return;
  end if;
  if s.overlap <> 'allow' and cardinality(due) > 0 then
    -- Each would keep out, or end, the one before it.
    due := due[cardinality(due):];
    if s.last_job_id is not null and exists (select from pgqueue.jobs_live l where l.job_id = s.last_job_id) then
      if s.overlap = 'skip' then
        due := '{}';
      else
        perform pgqueue.cancel_one(s.last_job_id);
      end if;
    end if;
  end if;
  with accepted as (
    insert into pgqueue.schedule_fires (schedule, due_at, job_id)
    select s.name, f.due, pgqueue.new_job_id() from unnest(due) with ordinality f(due, n) order by f.n
    on conflict do nothing
    returning due_at, job_id),
  made as (
    insert into pgqueue.jobs (job_id, job_type, payload, queue, priority, max_retries, retry_policy, timeout_ms, producer_id, scheduled_at)
    select a.job_id, s.job_type, s.payload, s.queue, s.priority, coalesce(s.max_retries, 3), s.retry_policy, s.timeout_ms,
           left('schedule:' || s.name, 64), a.due_at
      from accepted a order by a.due_at
    returning job_id, scheduled_at)
  select array_agg(a.job_id order by a.scheduled_at), coalesce(max(a.scheduled_at), s.last_run_at) into ids, s.last_run_at from made a;
  update pgqueue.schedules c
     set next_run_at = fire_schedule.next_run_at, last_run_at = s.last_run_at, last_job_id = coalesce(ids[cardinality(ids)], s.last_job_id),
         last_error = null, updated_at = pgqueue.clock()
   where c.name = s.name;
  return query select unnest(ids);
end $$;
comment on function pgqueue.fire_schedule(text, text, text, timestamptz, timestamptz[], timestamptz) is
  'Enqueues the jobs of a schedule that is due at due_at for the due times `fires`, and sets when it is due next; once over all
callers, nothing when it was edited or fired meanwhile. What the overlap rule keeps out is not enqueued.';

create function pgqueue.fire_schedules(plans jsonb) returns table (name text, jobs bigint, problem text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  p record;
begin
  for p in
    select r.* from jsonb_to_recordset(plans) r(
      name text, cron text, timezone text, due_at timestamptz, fires timestamptz[], next_run_at timestamptz)
  loop
    name := p.name;
    problem := null;
    begin
      select count(*) into jobs from pgqueue.fire_schedule(p.name, p.cron, p.timezone, p.due_at, p.fires, p.next_run_at);
    exception
      when deadlock_detected or serialization_failure or lock_not_available then
        jobs := 0;
      when others then
        jobs := 0;
        problem := sqlerrm;
    end;
    return next;
  end loop;
end $$;
comment on function pgqueue.fire_schedules(jsonb) is
  'fire_schedule for several, each with name, cron, timezone, due_at, fires and next_run_at: how many jobs it made, or why it failed.';

create function pgqueue.schedule_failed(name text, due_at timestamptz, error text) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  update pgqueue.schedules s
     set last_error = left(regexp_replace(schedule_failed.error, '[[:space:]]+', ' ', 'g'), 1000), updated_at = pgqueue.clock()
   where s.name = schedule_failed.name and s.next_run_at is not distinct from schedule_failed.due_at;
  return found;
end $$;
comment on function pgqueue.schedule_failed(text, timestamptz, text) is 'Records why a schedule cannot fire, or cannot be given a next time.';

create function pgqueue.run_schedule(name text) returns uuid
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  s pgqueue.schedules;
  due timestamptz := date_trunc('milliseconds', pgqueue.clock());
  id uuid;
begin
  select c.* into s from pgqueue.schedules c where c.name = run_schedule.name for update;
  if s.name is null then
    raise exception 'there is no schedule "%"', run_schedule.name using errcode = 'PQ404';
  end if;
  if s.overlap <> 'allow' and exists (select from pgqueue.jobs_live l where l.job_id = s.last_job_id) then
    if s.overlap = 'skip' then
      raise exception 'schedule "%" lets one job run at a time, and job % has not ended', s.name, s.last_job_id
        using errcode = 'PQ409', hint = 'Cancel it, or set overlap to allow.';
    end if;
    perform pgqueue.cancel_one(s.last_job_id);
  end if;
  -- See enqueue.
  lock table only pgqueue.jobs in row exclusive mode;
  id := pgqueue.new_job_id();
  -- Never the due time of a regular run, which this one must not stand for.
  loop
    due := due + interval '1 microsecond';
    insert into pgqueue.schedule_fires (schedule, due_at, job_id) values (s.name, due, id) on conflict do nothing;
    exit when found;
  end loop;
  insert into pgqueue.jobs (job_id, job_type, payload, queue, priority, max_retries, retry_policy, timeout_ms, producer_id)
    values (id, s.job_type, s.payload, s.queue, s.priority, coalesce(s.max_retries, 3), s.retry_policy, s.timeout_ms,
            left('schedule:' || s.name, 64));
  update pgqueue.schedules c set last_run_at = due, last_job_id = id, updated_at = pgqueue.clock() where c.name = s.name;
  perform pgqueue.note('run_schedule', s.name, 1);
  return id;
end $$;
comment on function pgqueue.run_schedule(text) is
  'Enqueues a job of a schedule now, enabled or not, without touching its next time. Errors: PQ404, PQ409 (overlap skip).';

-- Declared in code --------------------------------------------------------------------------------------------------

create table pgqueue.schedule_declarations (
  declared_by text primary key,
  fingerprint text not null,
  replaced text[] not null default '{}',
  seen_at timestamptz not null
);
comment on table pgqueue.schedule_declarations is
  'Which declarations of an app are in force: the newest, as long as a process that holds them was seen within a minute.';

create function pgqueue.declare_schedules(declared_by text, fingerprint text, declared jsonb, started boolean)
  returns table (name text, outcome text)
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
#variable_conflict use_column
declare
  d pgqueue.schedule_declarations;
  fresh boolean;
  r record;
begin
  if declared = '[]' and not exists (select from pgqueue.schedule_declarations n where n.declared_by = declare_schedules.declared_by) then
    outcome := 'none';
    return next;
    return;
  end if;
  insert into pgqueue.schedule_declarations as n (declared_by, fingerprint, seen_at)
    values (declare_schedules.declared_by, '', '-infinity') on conflict on constraint schedule_declarations_pkey do nothing;
  select n.* into d from pgqueue.schedule_declarations n where n.declared_by = declare_schedules.declared_by for update;
  fresh := d.fingerprint <> declare_schedules.fingerprint;
  -- In a rolling deployment processes of the old code are still there, and may start again: they are known by what was
  -- replaced, and come into force once more (a rollback) when nobody with the newer code is left.
  if fresh and d.seen_at > pgqueue.clock() - interval '1 minute'
     and (not started or declare_schedules.fingerprint = any (d.replaced)) then
    return;
  end if;
  if fresh then
    update pgqueue.schedule_declarations n
       set fingerprint = declare_schedules.fingerprint, seen_at = pgqueue.clock(),
           replaced = (array_remove(d.replaced, declare_schedules.fingerprint)
                       || case when d.fingerprint = '' then '{}' else array[d.fingerprint] end)[greatest(1, cardinality(d.replaced) - 18):]
     where n.declared_by = d.declared_by;
  elsif d.seen_at not between pgqueue.clock() - interval '10 seconds' and pgqueue.clock() then
    update pgqueue.schedule_declarations n set seen_at = pgqueue.clock() where n.declared_by = d.declared_by;
  end if;
  if not fresh and not started then
    -- Those that another app held when these came into force may be free by now.
    declared := (select coalesce(jsonb_agg(e), '[]') from jsonb_array_elements(declared) e
                  where exists (select from pgqueue.schedules s
                                 where s.name = e ->> 'name' and s.declared_by is distinct from d.declared_by));
  end if;

  if fresh then
    for name in
      delete from pgqueue.schedules s
       where s.declared_by = d.declared_by and not exists (select from jsonb_array_elements(declared) e where e ->> 'name' = s.name)
      returning s.name
    loop
      outcome := 'removed';
      return next;
    end loop;
  end if;
  for r in
    select e.* from jsonb_to_recordset(declared) e(
      name text, cron text, timezone text, job_type text, payload jsonb, queue text, priority smallint, max_retries int,
      retry_policy jsonb, timeout_ms int, misfire text, overlap text)
     order by e.name
  loop
    name := r.name;
    insert into pgqueue.schedules as s (name, cron, timezone, job_type, payload, queue, priority, max_retries, retry_policy, timeout_ms,
                                        misfire, overlap, declared_by)
      values (r.name, r.cron, coalesce(r.timezone, 'UTC'), r.job_type, coalesce(r.payload, '{}'), coalesce(r.queue, 'default'),
              coalesce(r.priority, 2::smallint), r.max_retries, r.retry_policy, r.timeout_ms,
              coalesce(r.misfire, 'run_once'), coalesce(r.overlap, 'allow'), d.declared_by)
      on conflict on constraint schedules_pkey do update
         set cron = excluded.cron, timezone = excluded.timezone, job_type = excluded.job_type, payload = excluded.payload,
             queue = excluded.queue, priority = excluded.priority, max_retries = excluded.max_retries,
             retry_policy = excluded.retry_policy, timeout_ms = excluded.timeout_ms, misfire = excluded.misfire, overlap = excluded.overlap,
             declared_by = excluded.declared_by, updated_at = pgqueue.clock()
       where (fresh and s.declared_by = d.declared_by)
          or (s.declared_by is not null and s.declared_by <> d.declared_by
              and not exists (select from pgqueue.schedule_declarations o
                               where o.declared_by = s.declared_by and o.seen_at > pgqueue.clock() - interval '1 minute'));
    if found then
      outcome := 'declared';
      return next;
    elsif (select s.declared_by is distinct from d.declared_by from pgqueue.schedules s where s.name = r.name) then
      outcome := 'taken';
      return next;
    end if;
  end loop;
end $$;
comment on function pgqueue.declare_schedules(text, text, jsonb, boolean) is
  'Brings the schedules that an app declares in code into force; called when a process starts and every 15 seconds. Rows made by
hand, and those of other living apps, are left alone (taken). none: this app has never declared any. Edits of a declared row stay until its declaration changes.';
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
-- What psql, REST and metrics read.

create function pgqueue.schema_version() returns text
  language sql stable set search_path = pg_catalog, pg_temp
  as $$ select '0001' $$;
comment on function pgqueue.schema_version() is 'The alembic revision that this schema is at.';

create view pgqueue.live_workers as
  select * from pgqueue.workers w where w.status <> 'stopped' and w.last_heartbeat > pgqueue.clock() - interval '60 seconds';
comment on view pgqueue.live_workers is 'Workers that gave a sign of life within a minute.';

create view pgqueue.job_results as
  select j.job_id, j.status, j.result, j.error,
         (extract(epoch from coalesce(j.finished_at, j.updated_at) - j.started_at) * 1000)::bigint as duration_ms,
         j.worker_id, j.finished_at as completed_at
    from pgqueue.jobs j
   where j.status in ('completed', 'failed', 'dead_letter', 'cancelled');
comment on view pgqueue.job_results is 'Results and errors of jobs that ended, or whose last attempt failed.';

create view pgqueue.dead_letters as
  select j.job_id, j.queue, j.job_type, j.payload, j.priority, j.attempts, j.lost, j.error, j.errors, j.producer_id,
         j.created_at, j.finished_at as died_at, j.worker_id, j.idempotency_key, j.ordering_key
    from pgqueue.jobs_dead_letter j;
comment on view pgqueue.dead_letters is 'Jobs that need a human: pgqueue.retry or pgqueue.discard them.';

create view pgqueue.jobs_processing as
  select j.* from pgqueue.jobs_live j
   where j.status = 'processing' and j.job_id in (select unnest(c.job_ids) from pgqueue.claims c);
comment on view pgqueue.jobs_processing is 'Jobs that workers hold, found without a look at those that wait.';

create view pgqueue.stuck_jobs as
  select j.job_id, j.queue, j.job_type, j.status, j.attempts, j.worker_id, j.lease_expires_at, j.due_at, j.updated_at,
         'its lease ran out and no sweep has come by' as problem
    from pgqueue.jobs_processing j where j.lease_expires_at < pgqueue.clock() - interval '10 seconds'
  union all
  select j.job_id, j.queue, j.job_type, j.status, j.attempts, j.worker_id, j.lease_expires_at, j.due_at, j.updated_at,
         'it is due and no sweep has come by'
    from pgqueue.jobs_live j where j.status in ('submitted', 'failed') and j.due_at < pgqueue.clock() - interval '10 seconds';
comment on view pgqueue.stuck_jobs is 'Jobs that a sweep should have moved on.';
-- Watch: what was counted, how fast it goes, what is wrong, how many workers it wants.
--
-- No job pays for being counted. Workers add up what they ran and hand it over with their signs of life (add_counts);
-- arrivals are read afterwards by the time in their ids (count_arrivals), so that an INSERT by any program counts.
-- Depths are counted along the indexes, from the claim cursors on, and never beyond a bound.

create table pgqueue.counters (
  queue text not null,
  job_type text not null,
  priority smallint not null,
  submitted bigint not null default 0,
  completed bigint not null default 0,
  failed bigint not null default 0,
  dead_letter bigint not null default 0,
  cancelled bigint not null default 0,
  snoozed bigint not null default 0,
  lost bigint not null default 0,
  duration_seconds double precision not null default 0,
  wait_seconds double precision not null default 0,
  durations bigint[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}',
  waits bigint[] not null default '{0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0}',
  updated_at timestamptz not null default pgqueue.clock(),
  primary key (queue, job_type, priority)
) with (fillfactor = 50);
comment on table pgqueue.counters is
  'Jobs that arrived, and attempts by how they ended, since ever. Names beyond a few hundred are counted as _OTHER.';
comment on column pgqueue.counters.durations is 'Attempts by run time, up to each of bucket_limits() and beyond the last.';
comment on column pgqueue.counters.waits is 'First attempts by the time from when the job could start to when it did.';

create table pgqueue.counter_samples (
  queue text not null,
  priority smallint not null,
  at timestamptz not null,
  submitted bigint not null,
  processed bigint not null,
  failed bigint not null,
  duration_seconds double precision not null,
  durations bigint[] not null,
  primary key (queue, priority, at)
);
comment on table pgqueue.counter_samples is 'Sums of counters of the last hour, a row for each ten seconds in which they changed.';

create table pgqueue.measures (
  only_row boolean primary key default true constraint "only_row must be true" check (only_row),
  arrivals_to timestamptz not null default clock_timestamp(),
  candidate_at timestamptz not null default clock_timestamp(),
  writers text[] not null default '{}',
  counted_at timestamptz not null default '-infinity',
  sampled_at timestamptz not null default '-infinity',
  alerts_at timestamptz not null default '-infinity',
  pushed_at timestamptz not null default '-infinity',
  pushed_submitted bigint not null default 0,
  audited_at timestamptz not null default '-infinity',
  below_cursor text[] not null default '{}'
) with (fillfactor = 50);
insert into pgqueue.measures default values;
insert into pgqueue.sweep_steps (step, last_run_at, last_duration_ms, last_jobs, runs)
  select s, pgqueue.clock(), 0, 0, 0 from unnest(array['measure', 'alerts']) s;
comment on table pgqueue.measures is 'What measuring remembers from one call to the next.';
comment on column pgqueue.measures.below_cursor is 'Queues in which the last audit found pending jobs where no claim looked, and had claims look there again.';
comment on column pgqueue.measures.arrivals_to is 'Jobs whose ids are of an earlier time are counted as submitted.';

create table pgqueue.late_arrivals (
  job_id uuid not null,
  queue text not null,
  job_type text not null,
  priority smallint not null
);
alter table pgqueue.late_arrivals replica identity full;
create index late_arrivals_id on pgqueue.late_arrivals (job_id);
comment on table pgqueue.late_arrivals is 'New jobs whose ids are older than they are, until they are counted: their time may have been counted before.';

-- Counting ----------------------------------------------------------------------------------------------------------

create function pgqueue.bucket_limits() returns double precision[]
  language sql immutable parallel safe
  as $$ select '{0.005,0.01,0.025,0.05,0.1,0.25,0.5,1,2.5,5,10,30,60,300,900,3600}'::double precision[] $$;
comment on function pgqueue.bucket_limits() is 'Seconds up to which the buckets of durations and waits reach; one more is beyond.';

create function pgqueue.add_buckets(a bigint[], b bigint[]) returns bigint[]
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$ select array_agg(coalesce(u.x, 0) + coalesce(u.y, 0) order by u.n) from unnest(a, b) with ordinality u(x, y, n) where u.n <= 17 $$;
comment on function pgqueue.add_buckets is 'Two histograms as one.';

create function pgqueue.add_to_counters(counts jsonb) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  room constant bigint := 400 - (select count(*) from pgqueue.counters);
begin
  -- Sorted, so that two of these wait for each other instead of deadlocking.
  insert into pgqueue.counters as c (queue, job_type, priority, submitted, completed, failed, dead_letter, cancelled, snoozed, lost,
                                     duration_seconds, wait_seconds, durations, waits)
  with given as (
    select n.*, c.queue is not null as known,
           count(*) filter (where c.queue is null) over (order by n.queue, n.job_type, n.priority) as newcomer
      from jsonb_to_recordset(counts) n(
             queue text, job_type text, priority smallint, submitted bigint, completed bigint, failed bigint, dead_letter bigint,
             cancelled bigint, snoozed bigint, lost bigint, duration_seconds double precision, wait_seconds double precision,
             durations bigint[], waits bigint[])
      left join pgqueue.counters c on c.queue = n.queue and c.job_type = n.job_type and c.priority = n.priority),
  named as (
    select case when g.known or g.newcomer <= room or g.job_type = 'pgqueue.webhook' then g.queue else '_OTHER' end as to_queue,
           case when g.known or g.newcomer <= room or g.job_type = 'pgqueue.webhook' then g.job_type else '_OTHER' end as to_type, g.*
      from given g),
  buckets as (
    select n.to_queue, n.to_type, n.priority, b.n, coalesce(sum(b.d), 0)::bigint as d, coalesce(sum(b.w), 0)::bigint as w
      from named n cross join lateral (
        select i as n, n.durations[i] as d, n.waits[i] as w from generate_series(1, 17) i) b
     group by n.to_queue, n.to_type, n.priority, b.n)
  select n.to_queue, n.to_type, n.priority, coalesce(sum(n.submitted), 0), coalesce(sum(n.completed), 0), coalesce(sum(n.failed), 0),
         coalesce(sum(n.dead_letter), 0), coalesce(sum(n.cancelled), 0), coalesce(sum(n.snoozed), 0), coalesce(sum(n.lost), 0),
         coalesce(sum(n.duration_seconds), 0), coalesce(sum(n.wait_seconds), 0),
         (select array_agg(b.d order by b.n) from buckets b where (b.to_queue, b.to_type, b.priority) = (n.to_queue, n.to_type, n.priority)),
         (select array_agg(b.w order by b.n) from buckets b where (b.to_queue, b.to_type, b.priority) = (n.to_queue, n.to_type, n.priority))
    from named n
   group by n.to_queue, n.to_type, n.priority
   order by n.to_queue, n.to_type, n.priority
  on conflict (queue, job_type, priority) do update
     set submitted = c.submitted + excluded.submitted, completed = c.completed + excluded.completed, failed = c.failed + excluded.failed,
         dead_letter = c.dead_letter + excluded.dead_letter, cancelled = c.cancelled + excluded.cancelled,
         snoozed = c.snoozed + excluded.snoozed, lost = c.lost + excluded.lost,
         duration_seconds = c.duration_seconds + excluded.duration_seconds, wait_seconds = c.wait_seconds + excluded.wait_seconds,
         durations = pgqueue.add_buckets(c.durations, excluded.durations), waits = pgqueue.add_buckets(c.waits, excluded.waits),
         updated_at = pgqueue.clock();
end $$;
comment on function pgqueue.add_to_counters(jsonb) is
  'Adds an array of {queue, job_type, priority, completed, failed, …, duration_seconds, wait_seconds, durations, waits} to the counters.';

create function pgqueue.add_counts(worker_id uuid, batch bigint, utilization double precision, counts jsonb) returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  -- The number of the batch is the fence: one whose answer was lost is sent again and must not count twice.
  update pgqueue.workers w set counted = add_counts.batch, utilization = least(greatest(add_counts.utilization, 0), 1)
   where w.worker_id = add_counts.worker_id and w.counted < add_counts.batch;
  if found then
    perform pgqueue.add_to_counters(counts);
    return true;
  end if;
  return exists (select from pgqueue.workers w where w.worker_id = add_counts.worker_id);
end $$;
comment on function pgqueue.add_counts is
  'Takes what a worker has counted since its last batch, once for each batch number; false: it has no row, register again.';

create function pgqueue.first_id(since timestamptz) returns uuid
  language sql immutable strict parallel safe set search_path = pg_catalog, pg_temp
  as $$ select (lpad(to_hex(trunc(extract(epoch from since) * 1000)::bigint), 12, '0') || repeat('0', 20))::uuid $$;
comment on function pgqueue.first_id(timestamptz) is 'The lowest UUID that a job of this moment or later can have.';

create function pgqueue.count_arrivals() returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
declare
  st pgqueue.measures;
  now_is constant timestamptz := clock_timestamp();
  now_open constant text[] := pgqueue.open_writers();
  step interval := interval '5 seconds';
  upto timestamptz;
  found_now bigint;
  arrived jsonb;
  total bigint := 0;
begin
  select m.* into st from pgqueue.measures m;
  -- As with the claim cursors: what was written before the last look is committed once its writers are gone. One that
  -- stays for long holds up no more than that; its jobs, if they are of that time, are not counted. An id made elsewhere
  -- may be 250 ms older than its statement before jobs_arrived notes it as late.
  if st.writers && now_open and st.candidate_at > now_is - interval '10 minutes' then
    return 0;
  end if;
  while st.arrivals_to < st.candidate_at and total < 50000 loop
    upto := least(st.arrivals_to + step, st.candidate_at);
    with late as (
      -- In one statement, so that a late job is seen either here and by its time, or in neither way.
      delete from pgqueue.late_arrivals l where l.job_id < pgqueue.first_id(upto) returning l.*)
    select jsonb_agg(jsonb_build_object('queue', g.queue, 'job_type', g.job_type, 'priority', g.priority, 'submitted', g.jobs)),
           coalesce(sum(g.jobs), 0)
      into arrived, found_now
      from (
        select a.queue, a.job_type, a.priority, count(*) as jobs from (
          select l.queue, l.job_type, l.priority from late l where l.job_id < pgqueue.first_id(st.arrivals_to)
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_live j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_completed j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day'
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_cancelled j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day'
          union all
          select j.queue, j.job_type, j.priority from pgqueue.jobs_dead_letter j
           where j.job_id >= pgqueue.first_id(st.arrivals_to) and j.job_id < pgqueue.first_id(upto)
             and j.finished_at >= st.arrivals_to - interval '1 day') a
         group by a.queue, a.job_type, a.priority) g;
    if found_now > 0 then
      perform pgqueue.add_to_counters(arrived);
      total := total + found_now;
    end if;
    st.arrivals_to := upto;
    step := case when found_now < 10000 then step * 2 else interval '5 seconds' end;
  end loop;
  update pgqueue.measures m
     set arrivals_to = st.arrivals_to, candidate_at = greatest(now_is - interval '300 milliseconds', st.arrivals_to), writers = now_open
   where st.arrivals_to >= st.candidate_at;
  update pgqueue.measures m set arrivals_to = st.arrivals_to where st.arrivals_to < st.candidate_at;
  return total;
end $$;
comment on function pgqueue.count_arrivals() is 'Counts jobs that arrived since its last call and whose writers have ended.';

create function pgqueue.measure() returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
declare
  now_is constant timestamptz := pgqueue.clock();
  st pgqueue.measures;
  more boolean := false;
  below text[];
  r record;
begin
  select m.* into st from pgqueue.measures m;
  if st.counted_at not between now_is - interval '1.9 seconds' and now_is then
    more := pgqueue.count_arrivals() >= 50000;
    update pgqueue.measures set counted_at = now_is where not more;
  end if;
  if st.sampled_at between now_is - interval '9.5 seconds' and now_is then
    return case when more then 50000 else 0 end;
  end if;
  insert into pgqueue.counter_samples (queue, priority, at, submitted, processed, failed, duration_seconds, durations)
  select t.queue, t.priority, pgqueue.clock(), t.submitted, t.processed, t.failed, t.duration_seconds, t.durations
    from pgqueue.counter_totals() t
    left join lateral (
      select s.submitted, s.processed, s.failed from pgqueue.counter_samples s
       where s.queue = t.queue and s.priority = t.priority order by s.at desc limit 1) l on true
   where (t.submitted, t.processed, t.failed) is distinct from (l.submitted, l.processed, l.failed)
  on conflict do nothing;
  -- The last one before the hour stays: it is where the hour begins.
  delete from pgqueue.counter_samples s
   where s.at < pgqueue.clock() - interval '1 hour'
     and exists (select from pgqueue.counter_samples n
                  where n.queue = s.queue and n.priority = s.priority and n.at > s.at and n.at < pgqueue.clock() - interval '1 hour');
  delete from pgqueue.counters c where c.updated_at < pgqueue.clock() - interval '30 days';
  delete from pgqueue.alert_events e where e.at < pgqueue.clock() - interval '30 days';
  if st.audited_at not between now_is - interval '10 minutes' and now_is then
    -- Rarely: below the cursors lie all the dead rows that an old snapshot keeps.
    below := '{}';
    for r in
      select c.queue, c.priority, f.seq from pgqueue.claim_starts c
       cross join lateral (
         select j.seq from pgqueue.jobs_live j
          where j.in_line and j.status = 'pending' and j.queue = c.queue and j.priority = c.priority and j.seq < c.low_seq
          order by j.seq limit 1) f
    loop
      perform pgqueue.lower_cursor(r.queue, r.priority, r.seq);
      below := below || r.queue;
    end loop;
    update pgqueue.measures set audited_at = now_is, below_cursor = array(select distinct u.queue from unnest(below) u(queue));
  end if;
  update pgqueue.measures set sampled_at = now_is;
  return case when more then 50000 else 0 end;
end $$;
comment on function pgqueue.measure() is 'A step of the sweep: counts arrivals, and every ten seconds notes the sums from which rates are made. Not 0: there is more to count.';

create function pgqueue.counter_totals() returns table (
  queue text, priority smallint, submitted bigint, processed bigint, failed bigint, duration_seconds double precision, durations bigint[])
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$
    select c.queue, c.priority, sum(c.submitted)::bigint,
           sum(c.completed + c.failed + c.dead_letter + c.cancelled + c.snoozed)::bigint, sum(c.failed + c.dead_letter)::bigint,
           sum(c.duration_seconds),
           array[sum(c.durations[1]), sum(c.durations[2]), sum(c.durations[3]), sum(c.durations[4]), sum(c.durations[5]),
                 sum(c.durations[6]), sum(c.durations[7]), sum(c.durations[8]), sum(c.durations[9]), sum(c.durations[10]),
                 sum(c.durations[11]), sum(c.durations[12]), sum(c.durations[13]), sum(c.durations[14]), sum(c.durations[15]),
                 sum(c.durations[16]), sum(c.durations[17])]::bigint[]
      from pgqueue.counters c where c.job_type <> 'pgqueue.webhook' group by c.queue, c.priority
  $$;
comment on function pgqueue.counter_totals() is
  'The counters by queue and priority: attempts processed, and of these failed. Without jobs that tell of alerts, which would raise alerts.';

create function pgqueue.rates(over_last interval default '1 minute') returns table (
  queue text, priority smallint, seconds double precision, submitted bigint, processed bigint, failed bigint,
  duration_seconds double precision, durations bigint[])
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    -- Whoever has no sample from before has only just begun. A sample is written only after a change.
    select t.queue, t.priority,
           case when b.at is null then extract(epoch from over_last)
                else extract(epoch from pgqueue.clock() - greatest(b.at, pgqueue.clock() - over_last - interval '10 seconds')) end,
           greatest(t.submitted - coalesce(b.submitted, 0), 0), greatest(t.processed - coalesce(b.processed, 0), 0),
           greatest(t.failed - coalesce(b.failed, 0), 0), greatest(t.duration_seconds - coalesce(b.duration_seconds, 0), 0),
           (select array_agg(greatest(u.x - coalesce(u.y, 0), 0) order by u.n) from unnest(t.durations, b.durations) with ordinality u(x, y, n))
      from pgqueue.counter_totals() t
      left join lateral (
        select s.* from pgqueue.counter_samples s
         where s.queue = t.queue and s.priority = t.priority and s.at <= pgqueue.clock() - over_last
         order by s.at desc limit 1) b on true
  $$;
comment on function pgqueue.rates(interval) is 'What the counters gained over the last while (up to an hour), and in how many seconds.';

create function pgqueue.history(over_last interval default '1 hour', points integer default 60)
  returns table (at timestamptz, submitted_per_second double precision, processed_per_second double precision, failed_per_second double precision)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
begin
  if over_last is null or over_last <= interval '0' or over_last > interval '1 year' then
    raise exception 'over_last must be positive and at most 1 year, not %', coalesce(over_last::text, 'null')
      using errcode = 'PQ422', column = 'over_last';
  elsif points is null or points < 1 then
    raise exception 'points must be at least 1, not %', coalesce(points::text, 'null') using errcode = 'PQ422', column = 'points';
  end if;
  return query
    with grid as (
      select n, pgqueue.clock() - over_last + over_last * n / least(points, 1000) as at from generate_series(0, least(points, 1000)) n),
    keys as (select distinct c.queue, c.priority from pgqueue.counters c),
    sums as (
      select g.n, g.at, coalesce(sum(s.submitted), 0) as submitted, coalesce(sum(s.processed), 0) as processed, coalesce(sum(s.failed), 0) as failed
        from grid g cross join keys k
        left join lateral (
          select c.submitted, c.processed, c.failed from pgqueue.counter_samples c
           where c.queue = k.queue and c.priority = k.priority and c.at <= g.at order by c.at desc limit 1) s on true
       group by g.n, g.at)
    select f.at, f.submitted / f.seconds, f.processed / f.seconds, f.failed / f.seconds
      from (select s.n, s.at, greatest(s.submitted - lag(s.submitted) over w, 0)::double precision as submitted,
                   greatest(s.processed - lag(s.processed) over w, 0)::double precision as processed,
                   greatest(s.failed - lag(s.failed) over w, 0)::double precision as failed,
                   extract(epoch from over_last)::double precision / least(points, 1000) as seconds
              from sums s window w as (order by s.n)) f
     where f.n > 0 order by f.n;
end $$;
comment on function pgqueue.history(interval, integer) is 'Rates of all queues at evenly spaced moments of the last hour, the oldest first.';

create function pgqueue.quantile(buckets bigint[], part double precision) returns double precision
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$
    -- Within its bucket by straight line, as Prometheus has it; beyond the last limit that limit.
    select b.low + (coalesce(b.high, b.low) - b.low) * (part * b.jobs - b.below) / b.here
      from (select coalesce(lag(u.high) over w, 0) as low, u.high, u.here, coalesce(sum(u.here) over w - u.here, 0)::double precision as below,
                   sum(u.here) over ()::double precision as jobs, u.n
              from unnest(buckets, pgqueue.bucket_limits()) with ordinality u(here, high, n) window w as (order by u.n)) b
     where b.here > 0 and b.below + b.here >= part * b.jobs
     order by b.n limit 1
  $$;
comment on function pgqueue.quantile(bigint[], double precision) is 'Seconds below which this part of what the buckets counted lies; null for nothing.';

-- Depths ------------------------------------------------------------------------------------------------------------

create function pgqueue.queue_counts() returns table (
  queue text, priority smallint, pending bigint, submitted bigint, processing bigint, failed bigint, oldest_pending_seconds double precision)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp
  set plan_cache_mode = force_generic_plan set jit = off set enable_seqscan = off set enable_bitmapscan = off
  as $$
#variable_conflict use_column
declare
  st pgqueue.sweep_state;
  others jsonb;
  k record;
  -- In all; a queue that is filled to its limits is seen whole.
  left_over bigint := 500000;
  became timestamptz;
begin
  select s.* into st from pgqueue.sweep_state s;
  select jsonb_object_agg(o.key, o.jobs) into others from (
    select l.status || ' ' || l.priority || ' ' || l.queue as key, count(*) as jobs from (
      (select j.status, j.priority, j.queue
         from (select distinct u.job_id from pgqueue.claims c cross join unnest(c.job_ids) u(job_id) where c.look_at >= st.claims_swept_to) n
        cross join lateral (select l.* from pgqueue.jobs_live l where l.job_id = n.job_id and l.status = 'processing' limit 1) j limit 50001)
      union all
      (select j.status, j.priority, j.queue from pgqueue.jobs_live j
        where j.status in ('submitted', 'failed') and j.due_at is not null and j.due_at >= st.due_swept_to limit 50001)
      union all
      (select j.status, j.priority, j.queue from pgqueue.jobs_live j
        where j.ordering_key is not null and not j.in_line and j.due_at is null limit 50001)) l
     group by l.status, l.priority, l.queue) o;
  for k in
    select n.queue, p.priority, coalesce(c.low_seq, 0) as low_seq
      from (select d.queue from pgqueue.queue_depths d
            union select s.queue from pgqueue.sweep_notes s where s.ordering_key is null
            union select q.name from pgqueue.queues q) n
     cross join unnest('{0,1,2,3}'::smallint[]) p(priority)
      left join pgqueue.claim_starts c on c.queue = n.queue and c.priority = p.priority
     order by n.queue, p.priority
  loop
    queue := k.queue;
    priority := k.priority;
    pending := 0;
    oldest_pending_seconds := null;
    -- The first have waited longest, but for those that came back to their old place.
    select min(w.updated_at) into became from (
      select j.updated_at from pgqueue.jobs_live j
       where j.in_line and j.status = 'pending' and j.queue = k.queue and j.priority = k.priority and j.seq >= k.low_seq
       order by j.seq limit 200) w;
    if became is not null then
      oldest_pending_seconds := greatest(extract(epoch from pgqueue.clock() - became), 0);
      select count(*) into pending from (
        select from pgqueue.jobs_live j
         where j.in_line and j.status = 'pending' and j.queue = k.queue and j.priority = k.priority and j.seq >= k.low_seq
         limit greatest(left_over, 1)) c;
      left_over := left_over - pending;
    end if;
    submitted := coalesce((others ->> ('submitted ' || k.priority || ' ' || k.queue))::bigint, 0);
    processing := coalesce((others ->> ('processing ' || k.priority || ' ' || k.queue))::bigint, 0);
    failed := coalesce((others ->> ('failed ' || k.priority || ' ' || k.queue))::bigint, 0);
    return next;
  end loop;
end $$;
comment on function pgqueue.queue_counts() is
  'Live jobs of every known queue by priority and status. Counts end at 500,000 pending jobs and at 50,001 of each other kind.';

create function pgqueue.dead_letter_counts() returns table (queue text, jobs bigint, webhooks bigint)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
#variable_conflict use_column
begin
  return query
    select d.queue, count(*), count(*) filter (where d.job_type = 'pgqueue.webhook')
      from (select l.queue, l.job_type from pgqueue.jobs_dead_letter l order by l.job_id desc limit 10001) d group by d.queue;
end $$;
comment on function pgqueue.dead_letter_counts() is 'Dead letters by queue, and how many of them tell of alerts; counting ends at 10,001.';

create view pgqueue.queue_stats as
  select c.queue, c.priority, c.pending, c.submitted, c.processing, c.failed, c.oldest_pending_seconds, coalesce(q.paused, false) as paused,
         coalesce(r.submitted / r.seconds, 0) as submitted_per_second, coalesce(r.processed / r.seconds, 0) as processed_per_second,
         coalesce(r.failed / r.seconds, 0) as failed_per_second
    from pgqueue.queue_counts() c
    left join pgqueue.queues q on q.name = c.queue
    left join pgqueue.rates('1 minute') r on r.queue = c.queue and r.priority = c.priority
   where c.pending > 0 or c.submitted > 0 or c.processing > 0 or c.failed > 0 or r.submitted > 0 or r.processed > 0;
comment on view pgqueue.queue_stats is
  'Queues and priorities at work: live jobs by status, age of the oldest pending one, and jobs per second over the last minute.';

create function pgqueue.horizon() returns table (kind text, pid integer, since timestamptz, xmin_age integer, what text, query text)
  language sql stable security definer set search_path = pg_catalog, pg_temp
  as $$
    select 'session', a.pid, a.xact_start, greatest(age(a.backend_xmin), age(a.backend_xid)),
           concat_ws(', ', nullif(a.application_name, ''), a.usename, a.state), left(regexp_replace(a.query, '[[:space:]]+', ' ', 'g'), 80)
      from pg_stat_activity a
     where a.pid <> pg_backend_pid() and a.backend_type in ('client backend', 'walsender', 'background worker')
       and a.datname = current_database() and (a.backend_xmin is not null or a.backend_xid is not null)
    union all
    select 'prepared transaction', null, p.prepared, age(p.transaction), p.gid, null
      from pg_prepared_xacts p where p.database = current_database()
    union all
    select 'replication slot', s.active_pid, null, greatest(age(s.xmin), age(s.catalog_xmin)), s.slot_name, null
      from pg_replication_slots s where s.xmin is not null or s.catalog_xmin is not null
  $$;
comment on function pgqueue.horizon() is 'Who keeps dead rows from being removed: open transactions, prepared ones, replication slots.';
-- Alerts, scaling, metrics: what is wrong, how many workers the queue wants, and everything as numbers.
--
-- A condition that holds is noted with the moment it began; it fires once it has held for as long as its rule asks, and
-- ends when it no longer holds. The thresholds are rows.

create table pgqueue.alert_rules (
  alert text primary key,
  severity text not null constraint "severity must be warning or page" check (severity in ('warning', 'page')),
  threshold double precision not null,
  hold interval not null default '0' constraint "hold must not be negative" check (hold >= '0'),
  enabled boolean not null default true,
  meaning text not null
);
comment on table pgqueue.alert_rules is 'What counts as wrong, from which value on and after how long. Edit by SQL.';
insert into pgqueue.alert_rules (alert, severity, threshold, hold, meaning) values
  ('JobsProcessedLow', 'warning', 0.5, '5 minutes', 'attempts that ended per job that arrived, in a minute, are fewer'),
  ('JobsFailedHigh', 'warning', 0.05, '0', 'a larger part of the attempts of a minute failed'),
  ('DeadLettersHigh', 'warning', 100, '0', 'there are more dead letters'),
  ('QueueDepthHigh', 'warning', 50000, '0', 'a queue holds more pending jobs'),
  ('QueueAgeHigh', 'warning', 300, '0', 'the oldest pending job of a queue has waited for more seconds'),
  ('ProcessingTimeHigh', 'warning', 30, '0', 'one of a hundred attempts of five minutes ran for more seconds'),
  ('WorkerUtilizationHigh', 'warning', 0.9, '1 minute', 'workers were busy for a larger part of the time'),
  ('WorkerCountLow', 'warning', 2, '0', 'there are fewer live workers'),
  ('HighFailureRate', 'page', 0.05, '5 minutes', 'a larger part of the attempts of five minutes failed'),
  ('QueueBacklog', 'page', 100000, '10 minutes', 'a queue holds more pending jobs'),
  ('QueueFull', 'page', 0.99, '0', 'a queue is filled to a larger part of its hard_limit, above which jobs are refused'),
  ('StuckJobs', 'page', 600, '0', 'the oldest pending job of a queue has waited for more seconds'),
  ('DLQBreach', 'page', 500, '0', 'there are more dead letters'),
  ('WorkerDown', 'page', 2, '2 minutes', 'there are fewer live workers'),
  ('NoWorkers', 'page', 1, '30 seconds', 'jobs wait in a queue that fewer live workers serve'),
  ('NoWorkersForType', 'warning', 0, '3 minutes', 'jobs wait of more types that no worker takes, of those that serve their queue'),
  ('SweeperStale', 'page', 30, '0', 'no sweep has run for more seconds'),
  ('SweepStepFails', 'page', 0, '30 seconds', 'a step of the sweep failed more times in a row'),
  ('RetentionBehind', 'warning', 86400, '0', 'finished jobs are past their retention for more seconds'),
  ('JobsOverdue', 'page', 0, '10 seconds', 'a sweep should have moved more jobs on'),
  ('BelowCursor', 'page', 0, '0', 'more pending jobs lie where no claim looks'),
  ('LongTransaction', 'page', 900, '0', 'a transaction has been open for more seconds, so that dead rows pile up');

create table pgqueue.alert_states (
  alert text not null,
  queue text not null default '',
  since timestamptz not null,
  fired_at timestamptz,
  severity text not null,
  summary text not null,
  primary key (alert, queue)
) with (fillfactor = 50);
comment on table pgqueue.alert_states is 'Conditions that hold now, and since when; they fire after the hold of their rule.';

create table pgqueue.alert_events (
  event_id bigint generated always as identity primary key,
  at timestamptz not null default pgqueue.clock(),
  alert text not null,
  queue text,
  severity text not null,
  state text not null constraint "state must be firing or resolved" check (state in ('firing', 'resolved')),
  summary text not null,
  since timestamptz not null,
  pid integer not null default pg_backend_pid()
);
comment on table pgqueue.alert_events is 'Alerts that began and ended; kept for 30 days.';

create table pgqueue.alert_webhooks (
  url text primary key constraint "url must be http or https" check (url ~ '^https?://[^[:space:]]+$'),
  severity text constraint "severity must be warning or page" check (severity in ('warning', 'page')),
  queue text not null default 'default' constraint "queue must have 1 to 63 characters" check (length(queue) between 1 and 63),
  enabled boolean not null default true
);
comment on table pgqueue.alert_webhooks is
  'Where alerts are sent: each becomes a job of type pgqueue.webhook in `queue`, which every worker with maintenance can run.';
comment on column pgqueue.alert_webhooks.severity is 'Only alerts of this severity; null: all.';

create function pgqueue.in_words(seconds double precision) returns text
  language sql immutable parallel safe set search_path = pg_catalog, pg_temp
  as $$
    select case when seconds < 120 then round(seconds) || ' s' when seconds < 7200 then round(seconds / 60) || ' min'
                when seconds < 172800 then round(seconds / 3600) || ' h' else round(seconds / 86400) || ' days' end
  $$;
comment on function pgqueue.in_words(double precision) is 'A span of time for people, to two digits or so.';

create function pgqueue.types_without_worker() returns table (queue text, job_types text[])
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
    -- What nobody takes comes to the head of its line, whose types the sweep has noted; no job is looked at.
    with live as materialized (select distinct w.queues, w.job_types from pgqueue.live_workers w where w.status <> 'draining')
    select n.queue, array_agg(n.job_type order by n.job_type)
      from (select distinct c.queue, t.job_type from pgqueue.claim_cursors c cross join unnest(c.job_types) t(job_type)) n
     where exists (select from live l where l.queues is null or n.queue = any (l.queues))
       and not exists (select from live l
                        where (l.queues is null or n.queue = any (l.queues)) and (l.job_types is null or n.job_type = any (l.job_types)))
       and not exists (select from pgqueue.job_type_pauses p where p.job_type = n.job_type and p.until > pgqueue.clock())
     group by n.queue
  $$;
comment on function pgqueue.types_without_worker() is
  'Job types at the head of a queue that no live worker takes, though some serve the queue. Without types that are paused.';

create function pgqueue.alert_conditions() returns table (
  alert text, severity text, queue text, value double precision, threshold double precision, hold interval, summary text)
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off set enable_seqscan = off
  as $$
    with counts as materialized (select * from pgqueue.queue_counts()),
    depths as materialized (
      select c.queue, sum(c.pending) as pending, max(c.oldest_pending_seconds) as age, coalesce(bool_or(q.paused), false) as paused,
             coalesce(min(q.hard_limit), 100000) as hard_limit
        from counts c left join pgqueue.queues q on q.name = c.queue group by c.queue),
    minute as materialized (
      select r.queue, sum(r.submitted) as submitted, sum(r.processed) as processed, sum(r.failed) as failed
        from pgqueue.rates('1 minute') r group by r.queue),
    five as materialized (
      select r.queue, sum(r.processed) as processed, sum(r.failed) as failed,
             array[sum(r.durations[1]), sum(r.durations[2]), sum(r.durations[3]), sum(r.durations[4]), sum(r.durations[5]), sum(r.durations[6]),
                   sum(r.durations[7]), sum(r.durations[8]), sum(r.durations[9]), sum(r.durations[10]), sum(r.durations[11]), sum(r.durations[12]),
                   sum(r.durations[13]), sum(r.durations[14]), sum(r.durations[15]), sum(r.durations[16]), sum(r.durations[17])]::bigint[] as durations
        from pgqueue.rates('5 minutes') r group by r.queue),
    -- An alert's own jobs must not raise the next one.
    dead as materialized (select coalesce(sum(d.jobs - d.webhooks), 0) as jobs from pgqueue.dead_letter_counts() d),
    live as materialized (
      select w.queues, w.concurrency, w.utilization from pgqueue.workers w
       where w.status not in ('stopped', 'draining') and w.last_heartbeat > pgqueue.clock() - interval '60 seconds'),
    pool as materialized (
      select count(*) as workers, sum(l.utilization * l.concurrency) / nullif(sum(l.concurrency), 0) as utilization from live l),
    seen(alert, queue, value, above, summary) as (
      select 'JobsProcessedLow', m.queue, m.processed / m.submitted, false,
             format('queue "%s": %s jobs arrived in a minute, %s were processed', m.queue, m.submitted, m.processed)
        from minute m join depths d on d.queue = m.queue and not d.paused and d.pending > 0 where m.submitted > 0
      union all
      select 'JobsFailedHigh', m.queue, m.failed / m.processed, true,
             format('queue "%s": %s of %s attempts failed in a minute', m.queue, m.failed, m.processed)
        from minute m where m.processed > 0
      union all
      select 'HighFailureRate', f.queue, f.failed / f.processed, true,
             format('queue "%s": %s of %s attempts failed in five minutes', f.queue, f.failed, f.processed)
        from five f where f.processed > 0
      union all
      select a.alert, null, d.jobs, true, format('%s for somebody', case when d.jobs > 10000 then 'more than 10000 dead letters wait' when d.jobs = 1 then '1 dead letter waits' else d.jobs || ' dead letters wait' end)
        from dead d cross join unnest(array['DeadLettersHigh', 'DLQBreach']) a(alert)
      union all
      select a.alert, d.queue, d.pending, true, format('queue "%s" holds %s pending jobs', d.queue, d.pending)
        from depths d cross join unnest(array['QueueDepthHigh', 'QueueBacklog']) a(alert)
      union all
      select 'QueueFull', d.queue, d.pending / nullif(d.hard_limit, 0), true,
             format('queue "%s" holds %s pending jobs of at most %s: more are refused', d.queue, d.pending, d.hard_limit)
        from depths d
      union all
      select a.alert, d.queue, d.age, true, format('queue "%s": the oldest pending job has waited for %s', d.queue, pgqueue.in_words(d.age))
        from depths d cross join unnest(array['QueueAgeHigh', 'StuckJobs']) a(alert) where not d.paused and d.age is not null
      union all
      select 'ProcessingTimeHigh', f.queue, pgqueue.quantile(f.durations, 0.99), true,
             format('queue "%s": the p99 of run time in five minutes is %s s', f.queue, round(pgqueue.quantile(f.durations, 0.99)::numeric, 1))
        from five f
      union all
      select 'WorkerUtilizationHigh', null, p.utilization, true, format('workers are busy for %s %% of the time', round((p.utilization * 100)::numeric))
        from pool p where p.workers > 0
      union all
      select a.alert, null, p.workers, false, format('%s live worker%s, %s wanted', p.workers, case p.workers when 1 then '' else 's' end, a.threshold)
        from pool p cross join pgqueue.alert_rules a where a.alert in ('WorkerCountLow', 'WorkerDown')
      union all
      select 'NoWorkers', d.queue, (select count(*) from live l where l.queues is null or d.queue = any (l.queues)), false,
             format('jobs wait in queue "%s" and no worker serves it', d.queue)
        from depths d where d.pending > 0 and not d.paused
      union all
      select 'NoWorkersForType', d.queue, cardinality(t.job_types), true,
             format('jobs wait in queue "%s" and no worker takes their type: %s', d.queue, array_to_string(t.job_types[:5], ', ')
               || case when cardinality(t.job_types) > 5 then format(' and %s more', cardinality(t.job_types) - 5) else '' end)
        from depths d join pgqueue.types_without_worker() t on t.queue = d.queue where d.pending > 0 and not d.paused
      union all
      select 'SweeperStale', null, extract(epoch from pgqueue.clock() - max(s.last_run_at)), true,
             format('no sweep has run since %s', date_trunc('second', max(s.last_run_at)))
        from pgqueue.sweep_steps s having count(*) > 0
      union all
      select 'SweepStepFails', null, max(s.failures), true,
             'the sweep fails: ' || string_agg(s.step || ': ' || s.last_error, '; ' order by s.step)
        from pgqueue.sweep_steps s where s.failures > 0 having count(*) > 0
      union all
      select 'RetentionBehind', null, extract(epoch from max(r.behind)), true,
             format('finished jobs are past their retention for %s; %s', date_trunc('minute', max(r.behind)),
                    coalesce(string_agg(r.problem, '; '), 'no process drops partitions'))
        from pgqueue.retention r where r.behind > '0' having count(*) > 0
      union all
      select 'JobsOverdue', null, count(*), true, format('%s overdue for the sweep', case count(*) when 1 then '1 job is' else count(*) || ' jobs are' end)
        from (select from pgqueue.stuck_jobs limit 1000) s
      union all
      select 'BelowCursor', b.queue, 1, true, format('a pending job lay below the claim cursor of queue "%s"; claims find it again', b.queue)
        from pgqueue.measures m cross join unnest(m.below_cursor) b(queue)
      union all
      (select 'LongTransaction', null, extract(epoch from clock_timestamp() - h.since), true,
             format('%s is open since %s: %s', case when h.pid is null then h.kind else 'the transaction of pid ' || h.pid end, date_trunc('second', h.since), h.what)
        from pgqueue.horizon() h where h.since is not null order by h.since limit 1))
    select r.alert, r.severity, coalesce(s.queue, ''), s.value, r.threshold, r.hold, s.summary
      from seen s join pgqueue.alert_rules r on r.alert = s.alert and r.enabled
     where case when s.above then s.value > r.threshold else s.value < r.threshold end
  $$;
comment on function pgqueue.alert_conditions() is 'What is beyond the thresholds of alert_rules at this moment, whether or not it has lasted.';

create function pgqueue.send_alert(happened pgqueue.alert_events) returns void
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  raise log 'pgqueue alert % (%) is %: %', happened.alert, happened.severity, happened.state, happened.summary;
  insert into pgqueue.jobs (job_type, payload, queue, priority, max_retries, producer_id)
  select 'pgqueue.webhook',
         jsonb_build_object('url', h.url, 'body', jsonb_build_object(
           'alert', happened.alert, 'severity', happened.severity, 'queue', happened.queue, 'state', happened.state,
           'summary', happened.summary, 'since', happened.since, 'at', happened.at)),
         h.queue, 0, 10, 'pgqueue.alerts'
    from pgqueue.alert_webhooks h where h.enabled and (h.severity is null or h.severity = happened.severity);
end $$;
comment on function pgqueue.send_alert is 'Enqueues a job for each webhook that is to hear of an alert.';

create function pgqueue.evaluate_alerts() returns bigint
  language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
declare
  begun pgqueue.alert_events;
  changes bigint := 0;
  now_is constant timestamptz := pgqueue.clock();
begin
  update pgqueue.measures m set alerts_at = now_is where m.alerts_at not between now_is - interval '9.5 seconds' and now_is;
  if not found then
    return 0;
  end if;
  with now_true as materialized (select c.* from pgqueue.alert_conditions() c),
  over as (
    delete from pgqueue.alert_states s
     where not exists (select from now_true c where c.alert = s.alert and c.queue = s.queue)
    returning s.*),
  noted as (
    insert into pgqueue.alert_states as s (alert, queue, since, severity, summary)
    select c.alert, c.queue, now_is, c.severity, c.summary from now_true c order by c.alert, c.queue
    on conflict (alert, queue) do update set severity = excluded.severity, summary = excluded.summary
     where (s.severity, s.summary) is distinct from (excluded.severity, excluded.summary))
  insert into pgqueue.alert_events (alert, queue, severity, state, summary, since)
  select o.alert, nullif(o.queue, ''), o.severity, 'resolved', o.summary, o.since from over o where o.fired_at is not null;
  with fired as (
    update pgqueue.alert_states s set fired_at = now_is from pgqueue.alert_rules r
     where r.alert = s.alert and s.fired_at is null and s.since <= now_is - r.hold
    returning s.*)
  insert into pgqueue.alert_events (alert, queue, severity, state, summary, since)
  select f.alert, nullif(f.queue, ''), f.severity, 'firing', f.summary, f.since from fired f order by f.severity, f.alert, f.queue;
  for begun in
    select e.* from pgqueue.alert_events e where e.at = now_is and e.pid = pg_backend_pid() order by e.event_id
  loop
    perform pgqueue.send_alert(begun);
    changes := changes + 1;
  end loop;
  return changes;
end $$;
comment on function pgqueue.evaluate_alerts() is
  'A step of the sweep, every ten seconds: notes which conditions hold, fires those that have held for long enough, and ends those that are over.';

create view pgqueue.alerts as
  select c.alert, c.severity, nullif(c.queue, '') as queue, c.summary, coalesce(s.since, pgqueue.clock()) as since, c.value, c.threshold
    from pgqueue.alert_conditions() c
    left join pgqueue.alert_states s on s.alert = c.alert and s.queue = c.queue
   where c.hold = '0' or s.since <= pgqueue.clock() - c.hold;
comment on view pgqueue.alerts is 'What is wrong now, and has been for as long as its rule asks.';

-- Scaling -----------------------------------------------------------------------------------------------------------

create function pgqueue.backlog(queue text default null) returns bigint
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
begin
  return (select coalesce(sum(c.pending), 0) from pgqueue.queue_counts() c
           where (backlog.queue is null or c.queue = backlog.queue)
             and not exists (select from pgqueue.queues q where q.name = c.queue and q.paused));
end $$;
comment on function pgqueue.backlog(text) is
  'Pending jobs of a queue, or of all, that a worker could take now: paused queues count 0. One number, never null.';

create function pgqueue.worker_load(queues text[] default null, out pending bigint, out workers bigint, out slots bigint, out running bigint,
                                    out utilization double precision, out processing_seconds double precision, out soft_limit bigint)
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
begin
  select coalesce(sum(c.pending) filter (where not coalesce(q.paused, false)), 0), coalesce(sum(c.processing), 0),
         coalesce(min(q.soft_limit), 50000)
    into pending, running, soft_limit
    from pgqueue.queue_counts() c left join pgqueue.queues q on q.name = c.queue
   where worker_load.queues is null or c.queue = any (worker_load.queues);
  select count(*), coalesce(sum(w.concurrency), 0), coalesce(sum(w.utilization * w.concurrency) / nullif(sum(w.concurrency), 0), 0)
    into workers, slots, utilization
    from pgqueue.workers w
   where w.status not in ('stopped', 'draining') and w.last_heartbeat > pgqueue.clock() - interval '60 seconds'
     and (worker_load.queues is null or w.queues is null or w.queues && worker_load.queues);
  select coalesce(sum(r.duration_seconds) / nullif(sum(r.processed), 0), 0) into processing_seconds
    from pgqueue.rates('1 minute') r where worker_load.queues is null or r.queue = any (worker_load.queues);
end $$;
comment on function pgqueue.worker_load(text[]) is
  'What scaling goes by: pending jobs, live workers and their slots, how much of the time they were busy, mean seconds per attempt in the last minute.';

create function pgqueue.wanted_workers(queue text default null, min_workers integer default 2, max_workers integer default 100) returns integer
  language plpgsql stable security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
declare
  l record;
  fewer bigint;
begin
  -- The rule of autoscale.py without its cooldowns, which KEDA and HPA have of their own.
  select w.* into l from pgqueue.worker_load(case when queue is not null then array[queue] end) w;
  fewer := greatest(l.workers - 2, min_workers);
  return case
    when l.workers < min_workers then min_workers
    when l.workers > max_workers then max_workers
    when l.pending > 100 * l.workers or l.pending > 0 and l.processing_seconds > 30 or l.utilization > 0.9
      then least(l.workers + case when l.pending > l.soft_limit then 4 else 2 end, max_workers)
    when (l.pending < 10 * l.workers or l.utilization < 0.2)
      and case when fewer = 0 then l.pending = 0 and l.running = 0
               else l.utilization * l.workers <= 0.7 * fewer and l.pending <= 100 * fewer end then fewer
    else l.workers end;
end $$;
comment on function pgqueue.wanted_workers(text, integer, integer) is
  'How many workers a queue, or all, should have next, by the scaling rules without their cooldowns. One number, never null.';

-- Metrics -----------------------------------------------------------------------------------------------------------

create function pgqueue.metrics() returns table (name text, kind text, labels jsonb, value double precision)
  language sql stable security definer set search_path = pg_catalog, pg_temp set jit = off
  as $$
    with counts as materialized (select * from pgqueue.queue_counts()),
    ranked as (
      -- A hundred queues by name, the rest in one.
      select q.queue, dense_rank() over (order by q.work desc, q.queue) as rank
        from (select c.queue, sum(c.pending + c.submitted + c.processing + c.failed) as work from counts c group by c.queue) q),
    shown as materialized (
      select case when r.rank <= 100 then c.queue else '_OTHER' end as queue, c.priority, sum(c.pending) as pending, sum(c.submitted) as submitted,
             sum(c.processing) as processing, sum(c.failed) as failed, coalesce(max(c.oldest_pending_seconds), 0) as age
        from counts c join ranked r on r.queue = c.queue group by 1, 2),
    queues as materialized (select distinct s.queue from shown s),
    live as materialized (
      select w.*, w.last_heartbeat > pgqueue.clock() - interval '60 seconds' as alive from pgqueue.workers w where w.status <> 'stopped'),
    keys as materialized (
      select c.*, jsonb_build_object('queue', c.queue, 'job_type', c.job_type, 'priority', (array['critical', 'high', 'normal', 'low'])[c.priority + 1]) as labels
        from pgqueue.counters c),
    dead as materialized (select d.queue, d.jobs from pgqueue.dead_letter_counts() d),
    tables as materialized (
      select case when starts_with(c.relname, 'jobs_completed') then 'jobs_completed' when starts_with(c.relname, 'jobs_cancelled') then 'jobs_cancelled'
                  when starts_with(c.relname, 'jobs_dead_letter') then 'jobs_dead_letter' else c.relname end as name,
             sum(pg_total_relation_size(c.oid)) as bytes, sum(pg_stat_get_dead_tuples(c.oid)) as dead,
             sum(greatest(pg_stat_get_live_tuples(c.oid), 0)) as rows
        from pg_class c where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and c.relname like 'jobs%' group by 1)
    select 'pgqueue_jobs', 'gauge', jsonb_build_object('queue', s.queue, 'status', v.status), sum(v.jobs)::double precision
      from shown s cross join lateral (values ('submitted', s.submitted), ('pending', s.pending), ('processing', s.processing), ('failed', s.failed)) v(status, jobs)
     group by s.queue, v.status
    union all
    -- Finished jobs are too many to count: what the statistics say.
    select 'pgqueue_jobs', 'gauge', jsonb_build_object('status', v.status), coalesce((select t.rows from tables t where t.name = 'jobs_' || v.status), 0)
      from (values ('completed'), ('cancelled')) v(status)
    union all
    select 'pgqueue_jobs', 'gauge', jsonb_build_object('status', 'dead_letter'), coalesce((select sum(d.jobs) from dead d), 0)
    union all
    select 'pgqueue_dead_letters', 'gauge', jsonb_build_object('queue', q.queue), coalesce(sum(q.jobs), 0)
      from (select case when exists (select from queues s where s.queue = d.queue) then d.queue else '_OTHER' end as queue, d.jobs from dead d
            union all select s.queue, 0 from queues s) q group by q.queue
    union all
    select 'pgqueue_queue_depth', 'gauge',
           jsonb_build_object('queue', s.queue, 'priority', (array['critical', 'high', 'normal', 'low'])[s.priority + 1]), s.pending from shown s
    union all
    select 'pgqueue_queue_oldest_age_seconds', 'gauge',
           jsonb_build_object('queue', s.queue, 'priority', (array['critical', 'high', 'normal', 'low'])[s.priority + 1]), s.age from shown s
    union all
    select 'pgqueue_queue_paused', 'gauge', jsonb_build_object('queue', q.queue),
           (exists (select from pgqueue.queues s where s.name = q.queue and s.paused))::int from queues q
    union all
    select 'pgqueue_queue_workers', 'gauge', jsonb_build_object('queue', q.queue),
           (select count(*) from live w where w.alive and w.status <> 'draining' and (w.queues is null or q.queue = any (w.queues)))
      from queues q where q.queue <> '_OTHER'
    union all
    select 'pgqueue_queue_types_without_worker', 'gauge', jsonb_build_object('queue', q.queue), coalesce(cardinality(t.job_types), 0)
      from queues q left join pgqueue.types_without_worker() t on t.queue = q.queue where q.queue <> '_OTHER'
    union all
    select 'pgqueue_workers', 'gauge', jsonb_build_object('status', v.status),
           (select count(*) from live w where case when w.alive then w.status else 'lost' end = v.status)
      from (values ('starting'), ('active'), ('idle'), ('draining'), ('lost')) v(status)
    union all
    select 'pgqueue_worker_slots', 'gauge', '{}', coalesce(sum(w.concurrency), 0) from live w where w.alive
    union all
    select 'pgqueue_worker_utilization', 'gauge', '{}', coalesce(sum(w.utilization * w.concurrency) / nullif(sum(w.concurrency), 0), 0) from live w where w.alive
    union all
    select 'pgqueue_jobs_submitted_total', 'counter', k.labels, k.submitted from keys k
    union all
    select 'pgqueue_jobs_processed_total', 'counter', k.labels || jsonb_build_object('outcome', v.outcome), v.jobs
      from keys k cross join lateral (values ('completed', k.completed), ('failed', k.failed), ('dead_letter', k.dead_letter),
        ('cancelled', k.cancelled), ('snoozed', k.snoozed)) v(outcome, jobs)
    union all
    select 'pgqueue_jobs_failed_total', 'counter', k.labels, k.failed + k.dead_letter from keys k
    union all
    select 'pgqueue_jobs_lost_total', 'counter', k.labels, k.lost from keys k
    union all
    select h.name || '_bucket', 'histogram', h.labels || jsonb_build_object('le', coalesce((pgqueue.bucket_limits())[b.n]::text, '+Inf')),
           sum(b.jobs) over (partition by h.name, h.labels order by b.n)
      from (select 'pgqueue_job_duration_seconds' as name, k.labels, k.durations as buckets from keys k
            union all select 'pgqueue_job_wait_seconds', k.labels, k.waits from keys k) h
     cross join lateral unnest(h.buckets) with ordinality b(jobs, n)
    union all
    select v.name || '_sum', 'histogram', k.labels, v.seconds
      from keys k cross join lateral (values ('pgqueue_job_duration_seconds', k.duration_seconds), ('pgqueue_job_wait_seconds', k.wait_seconds)) v(name, seconds)
    union all
    select 'pgqueue_table_bytes', 'gauge', jsonb_build_object('table', t.name), t.bytes from tables t
    union all
    select 'pgqueue_table_dead_rows', 'gauge', jsonb_build_object('table', t.name), t.dead from tables t
    union all
    select 'pgqueue_sweep_age_seconds', 'gauge', '{}', coalesce(extract(epoch from pgqueue.clock() - max(s.last_run_at)), 0) from pgqueue.sweep_steps s
    union all
    select 'pgqueue_sweep_step_failures', 'gauge', jsonb_build_object('step', s.step), s.failures from pgqueue.sweep_steps s
    union all
    select 'pgqueue_retention_behind_seconds', 'gauge', jsonb_build_object('status', r.status), extract(epoch from r.behind) from pgqueue.retention r
    union all
    select 'pgqueue_sweep_jobs_total', 'counter', jsonb_build_object('step', s.step), s.jobs from pgqueue.sweep_steps s
    union all
    select 'pgqueue_alerts', 'gauge', jsonb_build_object('alert', r.alert, 'severity', r.severity),
           (select count(*) from pgqueue.alert_states s where s.alert = r.alert and s.fired_at is not null)
      from pgqueue.alert_rules r where r.enabled
    union all
    select 'pgqueue_oldest_transaction_seconds', 'gauge', '{}', coalesce(max(extract(epoch from clock_timestamp() - h.since)), 0) from pgqueue.horizon() h
    union all
    select 'pgqueue_notify_queue_usage_ratio', 'gauge', '{}', pg_notification_queue_usage()
    union all
    select 'pgqueue_schema_info', 'gauge', jsonb_build_object('version', pgqueue.schema_version(), 'server', current_setting('server_version')), 1
  $$;
comment on function pgqueue.metrics() is 'Every metric of the queue as name, kind, labels and value, in one query, for Prometheus, StatsD and sql_exporter.';

create function pgqueue.push_turn(every interval) returns table (submitted bigint)
  language sql security definer set search_path = pg_catalog, pg_temp
  as $$
    -- One of any number of workers wins the turn, and with it what arrived since the last one.
    with now_is as (select coalesce(sum(c.submitted), 0)::bigint as submitted from pgqueue.counters c),
    was as materialized (
      select m.pushed_submitted from pgqueue.measures m
       where m.pushed_at not between pgqueue.clock() - every and pgqueue.clock() for update skip locked),
    won as (
      update pgqueue.measures m set pushed_at = pgqueue.clock(), pushed_submitted = n.submitted from now_is n, was returning n.submitted - was.pushed_submitted as gained)
    select greatest(w.gained, 0) from won w
  $$;
comment on function pgqueue.push_turn(interval) is
  'For whoever pushes metrics: a row, with the jobs that arrived since the last turn, to one caller in each interval.';
-- Who may do what. Four group roles without login; grant them to your own. A role that may not create roles migrates
-- all the same: then the owner alone uses the schema until somebody creates the roles and calls grant_roles().

create function pgqueue.missing_roles() returns text[]
  language sql stable set search_path = pg_catalog, pg_temp
  as $$
    select array(
      select r from unnest(array['pgqueue_producer', 'pgqueue_worker', 'pgqueue_operator', 'pgqueue_reader']) r
       where not exists (select from pg_roles p where p.rolname = r and has_schema_privilege(p.oid, 'pgqueue', 'usage')))
  $$;
comment on function pgqueue.missing_roles() is 'Group roles that do not exist, or were made without their rights.';

create function pgqueue.grant_roles() returns text[]
  language plpgsql set search_path = pg_catalog, pg_temp
  as $$
declare
  f record;
  granted jsonb := '{
    "pgqueue_producer": ["enqueue", "enqueue_many", "enqueue_rows", "submit", "submit_batch", "job", "why", "clock", "missing_roles", "schema_version"],
    "pgqueue_worker": ["enqueue", "enqueue_many", "enqueue_rows", "job", "why", "claim", "index_shards", "heartbeat", "complete", "complete_and_claim", "fail", "snooze", "release",
      "rate_limit", "cancel_attempt", "set_progress", "sweep", "sweep_step", "note_step", "take_turn", "next_due", "maintain_partitions", "analyse",
      "fire_schedule", "fire_schedules", "schedule_failed", "run_schedule", "declare_schedules", "retention_of", "partition_list", "worker_started",
      "hold_retry", "once", "worker_seen", "worker_stopped", "wait_for_work", "stop_waiting", "writers_open", "open_writers", "watch", "unwatch",
      "backoff", "clock", "missing_roles", "schema_version", "add_counts", "add_to_counters", "push_turn",
      "queue_counts", "rates", "history", "alert_conditions", "backlog", "worker_load", "wanted_workers", "metrics"],
    "pgqueue_operator": ["enqueue", "enqueue_many", "enqueue_rows", "job", "why", "cancel", "cancel_many", "retry", "retry_dead_letters", "discard",
      "discard_dead_letters", "pause", "resume", "pause_job_type", "resume_job_type", "sweep", "maintain_partitions",
      "sweep_step", "note_step", "take_turn", "next_due", "analyse", "fire_schedule", "fire_schedules", "schedule_failed", "run_schedule",
      "declare_schedules", "retention_of", "partition_list",
      "watch", "unwatch", "backoff", "clock", "missing_roles", "schema_version",
      "submit", "submit_batch", "check_keys", "create_key", "revoke_key", "keys_used", "lease_tokens", "set_queue",
      "put_schedule", "drop_schedule",
      "queue_counts", "rates", "history", "alert_conditions", "backlog", "worker_load", "wanted_workers", "metrics", "horizon"],
    "pgqueue_reader": ["retention_of", "partition_list", "job", "why", "watch", "unwatch", "backoff", "clock", "missing_roles", "schema_version", "check_keys", "keys_used", "lease_tokens",
      "queue_counts", "rates", "history", "alert_conditions", "backlog", "worker_load", "wanted_workers", "metrics"]}';
  role text;
begin
  foreach role in array pgqueue.missing_roles() loop
    begin
      if not exists (select from pg_catalog.pg_roles where rolname = role) then
        execute pg_catalog.format('create role %I nologin', role);
      end if;
    exception
      when duplicate_object or unique_violation or insufficient_privilege then null;
    end;
  end loop;
  for role in select k from pg_catalog.jsonb_object_keys(granted) k loop
    continue when not exists (select from pg_catalog.pg_roles where rolname = role);
    execute pg_catalog.format('grant usage on schema pgqueue to %I', role);
    for f in
      select p.oid::pg_catalog.regprocedure as name from pg_catalog.pg_proc p
       where p.pronamespace = 'pgqueue'::pg_catalog.regnamespace and granted -> role ? p.proname::text
    loop
      execute pg_catalog.format('grant execute on function %s to %I', f.name, role);
    end loop;
  end loop;

  if exists (select from pg_catalog.pg_roles where rolname = 'pgqueue_producer') then
    -- Defaults and checks run as the one who inserts.
    grant execute on function pgqueue.new_job_id(), pgqueue.id_time(uuid), pgqueue.check_retry_policy(jsonb), pgqueue.retry_policy_fault(jsonb) to pgqueue_producer;
    grant usage on sequence pgqueue.jobs_seq to pgqueue_producer;
    grant insert (job_id, queue, job_type, payload, priority, max_retries, retry_policy, timeout_ms, scheduled_at, expires_at,
      idempotency_key, producer_id, ordering_key, trace_context), select (job_id) on pgqueue.jobs to pgqueue_producer;
  end if;
  for role in select unnest(array['pgqueue_reader', 'pgqueue_operator', 'pgqueue_worker']) loop
    continue when not exists (select from pg_catalog.pg_roles where rolname = role);
    execute pg_catalog.format('grant select on pgqueue.jobs, pgqueue.jobs_completed_default, pgqueue.jobs_cancelled_default,
      pgqueue.jobs_dead_letter_default, pgqueue.queues, pgqueue.queue_pauses, pgqueue.job_type_pauses,
      pgqueue.schedules, pgqueue.schedule_fires, pgqueue.schedule_declarations, pgqueue.partitions, pgqueue.retention, pgqueue.workers, pgqueue.queue_depths, pgqueue.claim_cursors, pgqueue.sweep_steps,
      pgqueue.audit, pgqueue.live_workers, pgqueue.job_results, pgqueue.dead_letters, pgqueue.queue_stats, pgqueue.jobs_processing, pgqueue.stuck_jobs,
      pgqueue.alerts, pgqueue.counters, pgqueue.counter_samples, pgqueue.alert_rules, pgqueue.alert_states, pgqueue.alert_events to %I', role);
  end loop;
  if exists (select from pg_catalog.pg_roles where rolname = 'pgqueue_operator') then
    grant insert, update, delete on pgqueue.queues, pgqueue.schedules to pgqueue_operator;
    grant update (severity, threshold, hold, enabled) on pgqueue.alert_rules to pgqueue_operator;
    grant select, insert, update, delete on pgqueue.alert_webhooks to pgqueue_operator;
    grant select on pgqueue.keys to pgqueue_operator;
    grant execute on function pgqueue.check_retry_policy(jsonb), pgqueue.retry_policy_fault(jsonb) to pgqueue_operator;
  end if;
  return pgqueue.missing_roles();
end $$;
comment on function pgqueue.grant_roles() is
  'Creates the group roles that do not exist and grants all their rights, as often as wanted; returns missing_roles() then.';

revoke all on schema pgqueue from public;
revoke all on all functions in schema pgqueue from public;
alter default privileges in schema pgqueue revoke execute on functions from public;

do $$ begin perform pgqueue.grant_roles(); end $$;

-- From the first job on, so that no partition is attached in the middle of work.
do $$ begin perform pgqueue.maintain_partitions(); end $$;
