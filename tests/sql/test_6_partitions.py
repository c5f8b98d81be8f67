"""Partitions of finished jobs: made ahead, dropped past retention, and nothing lost in between."""

import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Connect
from tests.meet import aside, wait_until
from tests.sql.verbs import Verbs

# A Wednesday.
NOON = datetime(2027, 3, 10, 12, tzinfo=UTC)
KEPT = {"completed": 30, "cancelled": 7, "dead_letter": 90}
ENDS: dict[str, Callable[[Verbs, Any], Any]] = {
    "completed": lambda q, job: q.complete([job]),
    "cancelled": lambda q, job: q.cancel_attempt(job),
    "dead_letter": lambda q, job: q.fail(job, retryable=False),
}


def maintain(q: Verbs) -> list[tuple[str, str]]:
    return [(row.partition, row.action) for row in q.call("maintain_partitions")]


def tidy(q: Verbs) -> None:
    """All that time asks for, until nothing is left to do."""
    for _ in range(5):
        maintain(q)
        q.sweep()


def partitions(q: Verbs, status: str) -> list[str]:
    rows = q.rows(
        "select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid"
        " where i.inhparent = format('pgqueue.jobs_%%s', %s::text)::regclass order by 1",
        [status],
    )
    return [row.relname for row in rows]


def ended(q: Verbs, status: str, queue: str = "default") -> uuid.UUID:
    job = q.start(queue=queue)
    ENDS[status](q, job)
    job_id = job.job_id
    assert isinstance(job_id, uuid.UUID)
    return job_id


def exists(q: Verbs, job_id: uuid.UUID) -> bool:
    return bool(q.rows("select from pgqueue.jobs where job_id = %s", [job_id]))


def test_partitions_are_made_for_the_days_and_weeks_ahead(q: Verbs) -> None:
    q.freeze(NOON)
    made = {name for name, action in maintain(q) if action == "made"}
    days = [f"{NOON + timedelta(days=n):%Y%m%d}" for n in range(7)]
    for status in ("completed", "cancelled"):
        names = partitions(q, status)
        assert [f"jobs_{status}_{day}" for day in days] == [n for n in names if n[-8:] in days]
        assert made >= {f"jobs_{status}_{day}" for day in days}
        assert names[-1] == f"jobs_{status}_default"
    weeks = {f"jobs_dead_letter_{day}" for day in ("20270308", "20270315", "20270322")}
    assert made >= weeks
    assert weeks <= set(partitions(q, "dead_letter"))
    assert maintain(q) == []


def test_jobs_go_to_the_partition_of_their_day(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    for status, name in (("completed", "20270310"), ("cancelled", "20270310"), ("dead_letter", "20270308")):
        assert q.where(ended(q, status)) == f"pgqueue.jobs_{status}_{name}"
    q.freeze(datetime(2027, 3, 14, 23, 59, 59, 999999, tzinfo=UTC))
    assert q.where(ended(q, "completed")) == "pgqueue.jobs_completed_20270314"
    assert q.where(ended(q, "dead_letter")) == "pgqueue.jobs_dead_letter_20270308"
    q.advance(microseconds=1)
    assert q.where(ended(q, "completed")) == "pgqueue.jobs_completed_20270315"
    assert q.where(ended(q, "dead_letter")) == "pgqueue.jobs_dead_letter_20270315"


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "Pacific/Kiritimati"])
def test_days_are_those_of_utc_whatever_the_session_says(q: Verbs, zone: str) -> None:
    q.session.execute("select set_config('TimeZone', %s, false)", [zone])
    q.freeze(datetime(2027, 3, 10, 0, 0, 1, tzinfo=UTC))
    maintain(q)
    first = ended(q, "completed")
    assert q.where(first) == "pgqueue.jobs_completed_20270310"
    q.freeze(datetime(2027, 3, 10, 23, 59, 59, tzinfo=UTC))
    assert q.where(ended(q, "completed")) == "pgqueue.jobs_completed_20270310"
    q.freeze(datetime(2027, 4, 9, 23, 59, 59, tzinfo=UTC))
    tidy(q)
    assert exists(q, first)
    q.freeze(datetime(2027, 4, 10, 0, 0, 1, tzinfo=UTC))
    tidy(q)
    assert not exists(q, first)


@pytest.mark.parametrize("status", ENDS)
def test_a_missing_partition_stops_nobody_and_its_rows_are_moved_there(q: Verbs, status: str) -> None:
    q.freeze(NOON)
    early = [ended(q, status) for _ in range(3)]
    assert {q.where(job_id) for job_id in early} == {f"pgqueue.jobs_{status}_default"}
    before = q.snapshot()
    maintain(q)
    assert all(re.fullmatch(rf"pgqueue\.jobs_{status}_2027\d{{4}}", q.where(job_id)) for job_id in early)
    assert q.snapshot() == before
    assert [row.status for job_id in early for row in q.call("job", job_id)] == [status] * 3


@pytest.mark.parametrize("status", ENDS)
def test_a_dropped_default_partition_is_made_again(q: Verbs, status: str) -> None:
    columns = "select attname, attstattarget from pg_attribute where attrelid = %s::regclass and attnum > 0 order by 1"
    rights = "select relacl::text from pg_class where oid = %s::regclass"
    default = f"pgqueue.jobs_{status}_default"
    before = q.rows(columns, [default]), q.rows(rights, [default])
    for name in partitions(q, status):
        q.session.execute(f"drop table pgqueue.{name}".encode())
    q.freeze(NOON)
    assert (f"jobs_{status}_default", "made") in maintain(q)
    assert (q.rows(columns, [default]), q.rows(rights, [default])) == before
    today = ended(q, status)
    q.freeze(NOON + timedelta(days=100))
    later = ended(q, status)
    assert q.where(today).startswith(f"pgqueue.jobs_{status}_2027")
    assert q.where(later) == default


@pytest.mark.parametrize("status", ENDS)
def test_who_reads_while_rows_are_moved_to_their_partition_finds_them(q: Verbs, connect: Connect, status: str) -> None:
    for name in partitions(q, status):
        if not name.endswith("default"):
            q.session.execute(f"drop table pgqueue.{name}".encode())
    job_id = ended(q, status)
    maintainer, reader = Verbs(connect(autocommit=False)), Verbs(connect())
    maintain(maintainer)
    reading = aside(exists, reader, job_id)
    waits = "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
    wait_until(lambda: reading.done() or bool(q.rows(waits, [reader.session.info.backend_pid])))
    assert not reading.done()
    maintainer.session.commit()
    assert reading.result(10)


@pytest.mark.parametrize("status", ENDS)
def test_finished_jobs_are_kept_as_long_as_the_contract_says(q: Verbs, status: str) -> None:
    q.freeze(NOON)
    maintain(q)
    job_id = ended(q, status)
    q.advance(days=KEPT[status], seconds=-1)
    tidy(q)
    assert exists(q, job_id)
    # A partition goes when the last of its days or weeks has passed.
    q.advance(days=8)
    tidy(q)
    assert not exists(q, job_id)
    assert q.call("job", job_id) == []
    assert "retention has removed it" in q.why(job_id)


@pytest.mark.parametrize("status", ENDS)
def test_rows_without_a_partition_go_too(q: Verbs, status: str) -> None:
    """Nobody maintained anything for a while, so that all went to the default partition."""
    q.freeze(NOON)
    old = ended(q, status)
    q.advance(days=KEPT[status] - 1)
    young = ended(q, status)
    tidy(q)
    assert exists(q, old)
    q.advance(days=9)
    tidy(q)
    assert not exists(q, old)
    assert exists(q, young) is (status != "cancelled")
    q.advance(days=KEPT[status])
    tidy(q)
    assert not exists(q, young)


def test_the_most_patient_queue_decides_about_a_partition(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    q.session.execute("insert into pgqueue.queues (name, completed_ttl) values ('patient', '60 days')")
    job_id = ended(q, "completed", "patient")
    q.advance(days=40)
    tidy(q)
    assert exists(q, job_id)
    q.advance(days=22)
    tidy(q)
    assert not exists(q, job_id)


@pytest.mark.parametrize("status", ENDS)
def test_a_queue_that_keeps_its_jobs_for_less_time_gets_rid_of_them(q: Verbs, status: str) -> None:
    q.freeze(NOON)
    maintain(q)
    q.session.execute(f"insert into pgqueue.queues (name, {status}_ttl) values ('short', '1 day')")
    job_id, other = ended(q, status, "short"), ended(q, status)
    q.advance(hours=23)
    tidy(q)
    assert exists(q, job_id)
    q.advance(days=2)
    tidy(q)
    assert not exists(q, job_id)
    assert exists(q, other)


def test_live_jobs_are_never_pruned(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    job_id = q.enqueue(delay=timedelta(days=400)).job_id
    for _ in range(8):
        q.advance(days=50)
        tidy(q)
    assert q.job(job_id).status in ("submitted", "pending")


def test_a_job_that_ends_in_the_past_or_far_future_of_the_partitions_is_stored(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    for days in (-3, 30):
        q.freeze(NOON + timedelta(days=days))
        assert q.where(ended(q, "completed")) == "pgqueue.jobs_completed_default"


def test_a_dropped_partition_takes_no_row_of_the_next_day(q: Verbs) -> None:
    q.freeze(NOON)
    ids = []
    for _ in range(40):
        maintain(q)
        ids.append(ended(q, "completed"))
        q.advance(days=1)
    tidy(q)
    kept = [exists(q, job_id) for job_id in ids]
    assert kept == sorted(kept)
    assert 30 <= sum(kept) <= 32


def test_whoever_holds_a_partition_makes_it_busy_for_a_moment_and_stops_nobody(q: Verbs, connect: Connect) -> None:
    q.freeze(NOON)
    maintain(q)
    job_id = ended(q, "cancelled")
    reader = connect(autocommit=False)
    reader.execute("select count(*) from pgqueue.jobs")
    q.advance(days=9)
    assert "busy" in {action for _, action in maintain(q)}
    assert exists(q, job_id)
    assert ended(q, "completed")
    reader.rollback()
    tidy(q)
    assert not exists(q, job_id)


def test_of_two_maintainers_one_works(q: Verbs, connect: Connect) -> None:
    q.freeze(NOON)
    first = connect(autocommit=False)
    assert first.execute("select count(*) from pgqueue.maintain_partitions()").fetchone() != (0,)
    q.session.execute("set lock_timeout = '1s'")
    assert maintain(q) == []
    first.commit()
    assert maintain(q) == []


def test_a_dead_letter_in_a_dated_partition_is_retried_and_discarded(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    retried, discarded, bulk = (ended(q, "dead_letter") for _ in range(3))
    assert q.retry(retried).status == "pending"
    assert q.call_value("discard", discarded) == "discarded"
    assert q.call_value("retry_dead_letters") == 1
    assert {row.job_id for row in q.snapshot()} == {retried, bulk}


def test_an_analyze_of_any_table_of_jobs_looks_at_few_columns_and_few_rows(q: Verbs) -> None:
    q.freeze(NOON)
    maintain(q)
    targets = q.rows(
        "select c.relname, a.attname, a.attstattarget from pg_partition_tree('pgqueue.jobs') t"
        " join pg_class c on c.oid = t.relid join pg_attribute a on a.attrelid = t.relid"
        " where a.attnum > 0 and not a.attisdropped"
    )
    assert {name for name, _, target in targets if target == 10} >= {"jobs", "jobs_live", "jobs_completed_20270310"}
    assert {target for _, _, target in targets} == {0, 10}
    assert {column for _, column, target in targets if target} >= {"queue", "job_type", "status", "finished_at"}
    assert {target for _, column, target in targets if column in ("payload", "result", "errors")} == {0}
