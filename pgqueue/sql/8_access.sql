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
