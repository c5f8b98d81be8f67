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
