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
