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
