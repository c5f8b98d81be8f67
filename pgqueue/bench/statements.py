"""The benchmark's own SQL: scratch databases, loads, counters, and the bare statements that pgqueue is held against."""

from collections.abc import Sequence
from typing import Any, Final, LiteralString

from psycopg import IsolationLevel
from psycopg.sql import SQL, Composed, Identifier, Literal

from pgqueue.connections import SyncConnection

NOOP: Final = "noop"
REPEATABLE_READ: Final = IsolationLevel.REPEATABLE_READ


def run(connection: SyncConnection, text: LiteralString | Composed, **parameters: object) -> None:
    """Run a statement and forget its rows."""
    connection.execute(text, parameters or None)


def rows(connection: SyncConnection, text: LiteralString, **parameters: object) -> Sequence[Sequence[Any]]:
    """Return the rows of a statement."""
    return connection.execute(text, parameters or None).fetchall()


def scalar(connection: SyncConnection, text: LiteralString, **parameters: object) -> Any:
    """Return the first value of the first row."""
    return rows(connection, text, **parameters)[0][0]


# Databases ------------------------------------------------------------------------------------------------------------


def create_database(name: str, template: str = "template1") -> Composed:
    """Return the statement that makes a database as a copy of another."""
    return SQL("create database {} template {}").format(Identifier(name), Identifier(template))


def drop_database(name: str) -> Composed:
    """Return the statement that drops a database and ends its sessions."""
    return SQL("drop database if exists {} with (force)").format(Identifier(name))


CHECKPOINT: Final = "checkpoint"


def set_for_all(name: str, setting: str, value: str) -> Composed:
    """Return the statement that sets something for all sessions of a database that begin from now on."""
    return SQL("alter database {} set {} = {}").format(Identifier(name), Identifier(setting), Literal(value))


VACUUM: Final = "vacuum analyze"
WAL_POSITION: Final = "select pg_current_wal_insert_lsn() - '0/0'"
CLOCK: Final = "select extract(epoch from clock_timestamp())::float8"
COMMITS: Final = "select xact_commit from pg_stat_database where datname = %(database)s"
SERVER: Final = """
  select s.name, current_setting(s.name) from unnest(array['server_version', 'shared_buffers', 'fsync',
    'synchronous_commit', 'full_page_writes', 'wal_level', 'max_wal_size', 'max_connections']) s(name)"""

# Loads ----------------------------------------------------------------------------------------------------------------

WITHOUT_LIMITS: Final = """
  insert into pgqueue.queues (name, soft_limit, hard_limit) values ('default', 2000000000, 2000000000)
  on conflict (name) do update set soft_limit = excluded.soft_limit, hard_limit = excluded.hard_limit"""
INSERT_MANY: Final = """
  insert into pgqueue.jobs (job_type, payload)
  select %(job_type)s::text, jsonb_build_object('n', i) from generate_series(1, %(jobs)s::int) i"""
INSERT_SCHEDULED: Final = """
  insert into pgqueue.jobs (job_type, payload, scheduled_at)
  select 'noop', jsonb_build_object('n', i), pgqueue.clock() + interval '1 day' + i * interval '1 second'
    from generate_series(1, %(jobs)s::int) i"""
INSERT_KEYED: Final = """
  insert into pgqueue.jobs (job_type, payload, ordering_key)
  select 'noop', jsonb_build_object('n', i), 'one' from generate_series(1, %(jobs)s::int) i"""
INSERT_QUEUES: Final = """
  insert into pgqueue.jobs (job_type, payload, queue)
  select 'noop', jsonb_build_object('n', i), 'queue ' || i %% %(queues)s::int
    from generate_series(1, %(jobs)s::int) i"""
INSERT_SIZED: Final = """
  insert into pgqueue.jobs (job_type, payload)
  select 'noop', jsonb_build_object('n', i, 'text', left((
      select string_agg(md5(i::text || ' ' || part::text), '') from generate_series(0, %(size)s::int / 32) part),
      greatest(%(size)s::int - 24, 0)))
    from generate_series(1, %(jobs)s::int) i"""
INSERT_PRIORITIES: Final = """
  insert into pgqueue.jobs (job_type, payload, priority)
  select 'noop', jsonb_build_object('n', i), (2 + i %% %(count)s::int) %% 4 from generate_series(1, %(jobs)s::int) i"""
#: Empty leaves of days gone by, as a long history has them.
MANY_PARTITIONS: Final = """
  select pgqueue.make_partition('completed', d at time zone 'UTC', (d + interval '1 day') at time zone 'UTC')
    from generate_series(current_date - interval '1 day' * (%(days)s::int + 2), current_date - interval '3 days',
                         interval '1 day') d"""
PAUSE_TYPE: Final = """
  insert into pgqueue.job_type_pauses (job_type, until) values (%(job_type)s, pgqueue.clock() + interval '1 day')"""
INSERT_COMPLETED: Final = """
  insert into pgqueue.jobs_completed (job_type, payload, status, attempts, worker_id, created_at, updated_at,
    started_at, finished_at)
  select 'noop', jsonb_build_object('n', i), 'completed', 1, gen_random_uuid(), pgqueue.clock(), pgqueue.clock(),
    pgqueue.clock(), pgqueue.clock()
    from generate_series(1, %(jobs)s::int) i"""
SWEEP: Final = "select step, jobs from pgqueue.sweep()"
PARTITIONS: Final = "select partition, action from pgqueue.maintain_partitions()"
DROP_TRIGGERS: Final = """
  do $$
  declare
    t record;
  begin
    for t in select tgname, tgrelid::regclass as relation from pg_trigger
              where tgrelid in ('pgqueue.jobs'::regclass, 'pgqueue.jobs_live'::regclass) and not tgisinternal
    loop
      execute format('drop trigger %I on %s', t.tgname, t.relation);
    end loop;
  end $$"""

# What became of them --------------------------------------------------------------------------------------------------

LAST_JOB: Final = "select job_id from pgqueue.jobs_live order by seq desc limit 1"
IS_LIVE: Final = "select exists (select from pgqueue.jobs_live where job_id = %(job_id)s)"
ANY_LIVE: Final = "select exists (select from pgqueue.jobs_live)"
WORKERS_READY: Final = """
  select count(*) from pgqueue.workers where pid = any (%(pids)s::int[]) and status <> 'stopped'"""
FIRST_START: Final = "select extract(epoch from min(started_at))::float8 from pgqueue.jobs_completed"
FINISHES: Final = """
  select extract(epoch from finished_at)::float8, count(*) from pgqueue.jobs_completed
   group by finished_at order by 1"""
LATENCIES: Final = """
  select extract(epoch from j.started_at)::float8 - c.committed_at,
         extract(epoch from j.finished_at)::float8 - c.committed_at
    from unnest(%(job_ids)s::uuid[], %(committed)s::float8[]) c(job_id, committed_at)
    join pgqueue.jobs_completed j on j.job_id = c.job_id"""
COMPLETED_JOBS: Final = "select count(*) from pgqueue.jobs_completed"

# A soak ---------------------------------------------------------------------------------------------------------------

SHORT_HISTORY: Final = """
  update pgqueue.queues set completed_ttl = '1 minute' where name = 'default'"""
WAITING: Final = "select pgqueue.count_pending('default', %(most)s::bigint)"
SOAK: Final = """
  select (select count(*) from pgqueue.jobs_live), pg_total_relation_size('pgqueue.jobs_live'),
         (select sum(pg_total_relation_size(c.oid)) from pg_class c join pg_namespace n on n.oid = c.relnamespace
           where n.nspname = 'pgqueue' and c.relkind = 'r')"""

# Single jobs ----------------------------------------------------------------------------------------------------------

INSERT_ONE: Final = "insert into pgqueue.jobs (job_type, payload) values ('noop', %(payload)s::jsonb)"
INSERT_ONE_RETURNING: Final = """
  insert into pgqueue.jobs (job_type, payload) values ('noop', %(payload)s::jsonb) returning job_id"""
RESULT: Final = "select status from pgqueue.job_results where job_id = %(job_id)s"
WATCH: Final = "select pgqueue.watch(gen_random_uuid(), interval '1 hour')"
LISTEN: Final = "listen pgqueue_status"
SNAPSHOT: Final = "select 1"

# A worker's calls, bare -----------------------------------------------------------------------------------------------

CLAIM: Final = """
  select job_id, attempts from pgqueue.claim(%(worker_id)s::uuid, null, %(jobs)s::int, null, %(job_types)s::text[])"""
COMPLETE: Final = "select pgqueue.complete(%(worker_id)s::uuid, %(job_ids)s::uuid[], %(attempts)s::int[], '{}')"

# Without pgqueue ------------------------------------------------------------------------------------------------------

PLAIN_TABLE: Final = """
  create table plain (like pgqueue.jobs including defaults including generated, primary key (job_id))"""
PLAIN_INSERT_ONE: Final = "insert into plain (job_type, payload) values ('noop', %(payload)s::jsonb)"
PLAIN_INSERT_MANY: Final = """
  insert into plain (job_type, payload)
  select 'noop', jsonb_build_object('n', i) from generate_series(1, %(jobs)s::int) i"""
COPY: Final = "copy pgqueue.jobs (job_type, payload) from stdin (format binary)"
PLAIN_COPY: Final = "copy plain (job_type, payload) from stdin (format binary)"
PLAIN_DONE: Final = "create table plain_done (like plain including defaults including generated, primary key (job_id))"
PLAIN_CLAIM: Final = """
  update plain set status = 'processing', attempts = attempts + 1, worker_id = %(worker_id)s::uuid, started_at = now(),
      updated_at = now(), lease_expires_at = now() + interval '30 seconds'
   where job_id in (select job_id from plain where status = 'pending' order by seq limit %(jobs)s::int)"""
PLAIN_COMPLETE: Final = """
  with done as (delete from plain where status = 'processing' returning *)
  insert into plain_done (job_id, seq, queue, job_type, payload, priority, status, attempts, worker_id, created_at,
    updated_at, started_at, finished_at)
  select job_id, seq, queue, job_type, payload, priority, 'completed', attempts, worker_id, created_at, now(),
    started_at, now() from done"""
