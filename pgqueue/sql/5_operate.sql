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
