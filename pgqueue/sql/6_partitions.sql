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
