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
