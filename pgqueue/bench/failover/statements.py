"""What the failover run asks of the servers."""

from typing import Final

SYNC_ON: Final = "alter system set synchronous_standby_names = '*'"
SYNC_OFF: Final = "alter system reset synchronous_standby_names"
CREATE_DATABASE: Final = "create database pgqueue"
RELOAD: Final = "select pg_reload_conf()"
#: What a promoted standby must do before the lost primary is rewound: until then its own control file names its old
#: timeline, and pg_rewind finds nothing to do.
CHECKPOINT: Final = "checkpoint"
IS_STANDBY: Final = "select pg_is_in_recovery()"
IN_SYNC: Final = "select count(*) from pg_stat_replication where state = 'streaming' and sync_state = %(state)s"
MARKERS: Final = "create table if not exists public.failover_markers (marker text primary key)"
MARK: Final = "insert into public.failover_markers values (%(marker)s)"
MARKED: Final = "select count(*) from public.failover_markers where marker = %(marker)s"
TIMELINE: Final = "select timeline_id from pg_control_checkpoint()"
RECEIVERS: Final = "select pid from pg_stat_wal_receiver"

WORKERS: Final = "select count(*) from pgqueue.workers where status in ('active', 'idle')"
COMPLETED_SINCE: Final = """
  select extract(epoch from min(finished_at))::float8 from pgqueue.jobs
  where status = 'completed' and finished_at > to_timestamp(%(since)s)"""
FATES: Final = "select job_id::text, status::text, (payload ->> 'n')::int, (result ->> 'n')::int from pgqueue.jobs"
UNFINISHED: Final = """
  select count(*) from pgqueue.jobs where status in ('submitted', 'pending', 'processing', 'failed')"""
