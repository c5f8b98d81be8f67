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

create function pgqueue.job_is_renamed() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  perform pgqueue.check_names(new.queue, new.job_type);
  return new;
end $$;
create trigger jobs_live_renamed before update of queue, job_type on pgqueue.jobs_live
  for each row when (new.queue = '' or new.job_type = '') execute function pgqueue.job_is_renamed();

create function pgqueue.job_is_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  if new.job_id <> old.job_id then
    raise exception 'job_id of a job cannot be changed' using errcode = 'PQ409', column = 'job_id';
  end if;
  if new.status <> old.status and not (
       old.status = 'submitted' and new.status = 'pending'
    or old.status = 'pending' and new.status = 'processing'
    or old.status = 'processing' and new.status in ('failed', 'pending', 'submitted')
    or old.status = 'failed' and new.status = 'pending')
  then
    raise exception 'a job cannot go from % to % by UPDATE', old.status, new.status
      using errcode = 'PQ409', column = 'status',
            hint = 'Use pgqueue.cancel, retry, complete, fail, snooze, release or discard.';
  end if;
  if new.status = 'processing' and (new.worker_id is null or new.lease_expires_at is null
       or (old.status = 'pending' and new.attempts - 1 <> old.attempts)) then
    raise exception 'a job cannot become processing without worker_id, lease_expires_at and one more attempt'
      using errcode = 'PQ409', column = 'status', hint = 'Use pgqueue.claim.';
  end if;
  -- With worker_id the fence: no pair of them may come a second time. A release takes back the attempt that it did not begin.
  if new.attempts <> old.attempts and not (old.status = 'pending' and new.status = 'processing')
     and not (old.status = 'processing' and new.status = 'pending' and new.attempts = old.attempts - 1 and new.started_at is null) then
    raise exception 'attempts of a % job is % and cannot be changed to %', old.status, old.attempts, new.attempts
      using errcode = 'PQ409', column = 'attempts', hint = 'Only pgqueue.claim and release count attempts; max_retries may be changed.';
  end if;
  if new.worker_id is distinct from old.worker_id and not (old.status = 'pending' and new.status = 'processing') then
    raise exception 'worker_id of a % job cannot be changed to %', old.status, coalesce(new.worker_id::text, 'null')
      using errcode = 'PQ409', column = 'worker_id', hint = 'Use pgqueue.release, then claim.';
  end if;
  if new.seq <> old.seq and new.seq not between 1 and (select s.last_value from pgqueue.jobs_seq s) then
    raise exception 'seq must be one that pgqueue.jobs_seq has given out, which % is not', new.seq
      using errcode = 'PQ422', column = 'seq', hint = 'Use nextval(''pgqueue.jobs_seq'') to put a job at the end of its line.';
  end if;
  if new.due_at is null and (new.status = 'failed' or new.status = 'submitted' and new.ordering_key is null) then
    raise exception 'a % job must have due_at', new.status using errcode = 'PQ409', column = 'due_at';
  end if;
  if new.status = 'pending' and (old.status <> 'pending' or new.queue <> old.queue or new.priority <> old.priority or new.seq <> old.seq) then
    perform pgqueue.lower_cursor(new.queue, new.priority, new.seq);
  end if;
  -- A time that is put back means now: sweeps do not begin at the beginning of time.
  if new.due_at < old.due_at then
    new.due_at := greatest(new.due_at, pgqueue.clock() - interval '1 second');
  end if;
  if new.lease_expires_at < old.lease_expires_at then
    new.lease_expires_at := greatest(new.lease_expires_at, pgqueue.clock() - interval '1 second');
  end if;
  if new.queue <> old.queue then
    insert into pgqueue.sweep_notes (queue) values (new.queue);
  end if;
  if new.queue <> old.queue or new.ordering_key is distinct from old.ordering_key
     or new.status = 'submitted' and (new.due_at is null or old.status <> 'submitted') then
    -- The key that it leaves may have lost its head, and the one that it joins may have none.
    insert into pgqueue.sweep_notes (queue, ordering_key)
      select k.queue, k.ordering_key from (values (old.queue, old.ordering_key), (new.queue, new.ordering_key)) k(queue, ordering_key)
       where k.ordering_key is not null;
  end if;
  return new;
end $$;

-- The functions of this schema only make transitions that this clause lets pass, so they never pay for the call.
create trigger jobs_live_edited before update on pgqueue.jobs_live
  for each row
  when (case new.status
          when 'processing' then old.status not in ('pending', 'processing')
            or new.worker_id is null or new.lease_expires_at is null
            or new.attempts - (old.status = 'pending')::int <> old.attempts
            or (old.status = 'processing' and new.worker_id <> old.worker_id)
            or new.lease_expires_at < old.lease_expires_at
          when 'pending' then old.status not in ('submitted', 'failed') or new.seq <= old.seq or new.attempts <> old.attempts
          when 'failed' then old.status <> 'processing' or new.due_at is null or new.attempts <> old.attempts
          when 'submitted' then old.status <> 'processing' or new.due_at is null or new.attempts <> old.attempts
          else true
        end
        or new.job_id <> old.job_id or new.queue <> old.queue or new.ordering_key is distinct from old.ordering_key)
  execute function pgqueue.job_is_edited();

create function pgqueue.job_is_forged() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
declare
  wrong text;
  given text;
begin
  -- What stands there already does not hold up the functions, which count on from it.
  if jsonb_typeof(new.errors) <> 'array' and new.errors <> old.errors then
    raise exception 'errors must be a JSON array of records, not %', left(new.errors::text, 100)
      using errcode = 'check_violation', schema = 'pgqueue', table = 'jobs', column = 'errors',
            constraint = 'errors must be a JSON array';
  end if;
  select c.name, c.now_is::text into wrong, given
    from (values ('lost', old.lost, new.lost), ('uncharged', old.uncharged, new.uncharged)) c(name, was, now_is)
   where c.now_is <> c.was and c.now_is not between 0 and 1000000 and c.now_is::bigint <> c.was::bigint + 1 limit 1;
  if found then
    raise exception '% must be 0 to 1000000, not %', wrong, given
      using errcode = 'check_violation', schema = 'pgqueue', table = 'jobs', column = wrong,
            constraint = wrong || ' must be 0 to 1000000';
  end if;
  select c.name into wrong
    from (values ('result', old.result is distinct from new.result), ('finished_at', old.finished_at is distinct from new.finished_at),
                 ('created_at', new.created_at not between '0001-01-03 00:00+00' and pgqueue.clock())) c(name, changed)
   where c.changed limit 1;
  if found then
    raise exception '% of a % job cannot be changed to that', wrong, old.status
      using errcode = 'PQ409', column = wrong, hint = 'Use pgqueue.complete, which stores a result with the end of an attempt.';
  end if;
  return new;
end $$;
-- Named columns, since the functions that run for every job set none of these.
create trigger jobs_live_forged before update of lost, uncharged, errors, result, finished_at, created_at on pgqueue.jobs_live
  for each row
  when (new.lost not between 0 and 1000000 or new.uncharged not between 0 and 1000000 or jsonb_typeof(new.errors) <> 'array'
        or new.created_at <> old.created_at or num_nonnulls(new.result, new.finished_at) > 0)
  execute function pgqueue.job_is_forged();

create function pgqueue.finished_job_is_edited() returns trigger
  language plpgsql security definer set search_path = pg_catalog, pg_temp
  as $$
begin
  raise exception 'job % is % and cannot be changed', old.job_id, old.status
    using errcode = 'PQ409', column = 'status', hint = 'pgqueue.retry moves a dead letter back to pending.';
end $$;
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
create trigger jobs_unknown_refused before insert on pgqueue.jobs_unknown
  for each row execute function pgqueue.status_is_unknown();
