"""Tables, defaults, checks and identifiers."""

import re
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.sql.verbs import WORKER, Verbs, refused

COLUMNS = {
    "job_id": "uuid", "seq": "bigint", "queue": "text", "job_type": "text", "payload": "jsonb", "priority": "smallint",
    "status": "text", "attempts": "integer", "max_retries": "integer", "lost": "integer", "retry_policy": "jsonb",
    "timeout_ms": "integer", "scheduled_at": "timestamp with time zone", "due_at": "timestamp with time zone",
    "expires_at": "timestamp with time zone", "idempotency_key": "text", "producer_id": "text", "ordering_key": "text",
    "shard": "smallint", "worker_id": "uuid", "lease_expires_at": "timestamp with time zone",
    "cancel_requested_at": "timestamp with time zone", "created_at": "timestamp with time zone",
    "updated_at": "timestamp with time zone", "started_at": "timestamp with time zone",
    "finished_at": "timestamp with time zone", "result": "jsonb", "error": "text", "errors": "jsonb",
    "progress": "jsonb", "trace_context": "jsonb",
}  # fmt: skip


def test_jobs_has_the_columns_of_the_contract_in_order(q: Verbs) -> None:
    found = {
        row.attname: row.type
        for row in q.rows(
            "select attname, format_type(coalesce(nullif(typbasetype, 0), atttypid), null) as type"
            "  from pg_attribute join pg_type on pg_type.oid = atttypid"
            " where attrelid = 'pgqueue.jobs'::regclass and attnum > 0 and not attisdropped order by attnum"
        )
    }
    assert {name: found.get(name) for name in COLUMNS} == COLUMNS
    assert [name for name in found if name in COLUMNS] == list(COLUMNS)


def test_a_plain_insert_has_all_defaults(q: Verbs) -> None:
    now = q.freeze()
    job = q.job(q.insert(job_type="echo", payload={"a": 1}))
    expected = {
        "queue": "default", "job_type": "echo", "payload": {"a": 1}, "priority": 2, "status": "pending", "attempts": 0,
        "max_retries": 3, "lost": 0, "retry_policy": None, "timeout_ms": None, "scheduled_at": None, "due_at": None,
        "expires_at": None, "idempotency_key": None, "producer_id": None, "ordering_key": None, "worker_id": None,
        "lease_expires_at": None, "cancel_requested_at": None, "created_at": now, "updated_at": now, "started_at": None,
        "finished_at": None, "result": None, "error": None, "errors": [], "progress": None, "trace_context": None,
    }  # fmt: skip
    assert {name: getattr(job, name) for name in expected} == expected
    assert job.job_id.version == 7
    assert job.seq == 1


def test_payload_defaults_to_an_empty_object(q: Verbs) -> None:
    assert q.job(q.insert()).payload == {}


BAD = [
    ("job_id", uuid.UUID("9f0f0e30-0c4d-4f5e-8a5b-3f0d3f1d8f3a"), "job_id must be a UUID of version 7"),
    ("job_id", uuid.UUID(int=0), "job_id must be a UUID of version 7"),
    ("queue", "", "queue must have 1 to 63 characters"),
    ("queue", "q" * 64, "queue must have 1 to 63 characters"),
    ("job_type", "", "job_type must have 1 to 128 characters"),
    ("job_type", "t" * 129, "job_type must have 1 to 128 characters"),
    ("priority", -1, "priority must be 0, 1, 2 or 3"),
    ("priority", 4, "priority must be 0, 1, 2 or 3"),
    ("max_retries", -1, "max_retries must be 0 to 1000000"),
    ("max_retries", 1000001, "max_retries must be 0 to 1000000"),
    ("timeout_ms", 0, "timeout_ms must be positive"),
    ("timeout_ms", -5, "timeout_ms must be positive"),
    ("scheduled_at", "infinity", "scheduled_at must lie between the years 1 and 9998"),
    ("scheduled_at", "-infinity", "scheduled_at must lie between the years 1 and 9998"),
    ("scheduled_at", "9999-01-01 00:00+00", "scheduled_at must lie between the years 1 and 9998"),
    ("expires_at", "infinity", "expires_at must lie between the years 1 and 9998"),
    ("expires_at", "0044-03-15 BC", "expires_at must lie between the years 1 and 9998"),
    ("idempotency_key", "", "idempotency_key must have 1 to 256 characters"),
    ("idempotency_key", "k" * 257, "idempotency_key must have 1 to 256 characters"),
    ("producer_id", "", "producer_id must have 1 to 64 characters"),
    ("producer_id", "p" * 65, "producer_id must have 1 to 64 characters"),
    ("ordering_key", "", "ordering_key must have 1 to 256 characters"),
    ("ordering_key", "o" * 257, "ordering_key must have 1 to 256 characters"),
    ("trace_context", [], "trace_context must be a JSON object"),
    ("trace_context", Jsonb(1), "trace_context must be a JSON object"),
    ("trace_context", Jsonb(None), "trace_context must be a JSON object"),
]


def test_an_illegal_value_is_refused_by_a_check_that_names_column_and_rule(q: Verbs, subtests: pytest.Subtests) -> None:
    for column, value, constraint in BAD:
        with subtests.test(column=column, value=str(value)[:20]), refused("23514", constraint, constraint=constraint):
            q.insert(**{column: value})
    assert q.snapshot() == []


BAD_POLICIES = [
    ([], "retry_policy must be an object of base_delay_ms, max_delay_ms, backoff_multiplier and jitter, not []"),
    ({"base": 1}, 'must have no key "base": it takes base_delay_ms, max_delay_ms, backoff_multiplier and jitter'),
    ({"base_delay_ms": -1}, "retry_policy must have a number from 0 to 31536000000 as base_delay_ms, not -1"),
    ({"max_delay_ms": "5"}, 'retry_policy must have a number from 0 to 31536000000 as max_delay_ms, not "5"'),
    ({"backoff_multiplier": 0.5}, "retry_policy must have a number from 1 to 1000 as backoff_multiplier, not 0.5"),
    ({"jitter": 1}, "retry_policy must have true or false as jitter, not 1"),
]


def test_a_bad_retry_policy_is_told_what_is_wrong_with_it(q: Verbs, subtests: pytest.Subtests) -> None:
    q.session.execute("insert into pgqueue.queues (name) values ('q')")
    q.session.execute("insert into pgqueue.schedules (name, cron, job_type) values ('s', '* * * * *', 't')")
    ways = [
        "insert into pgqueue.jobs (job_type, retry_policy) values ('t', %s)",
        "select pgqueue.enqueue('t', retry_policy => %s)",
        "update pgqueue.queues set retry_policy = %s",
        "update pgqueue.schedules set retry_policy = %s",
    ]
    for way in ways:
        for policy, words in BAD_POLICIES:
            with (
                subtests.test(way=way, policy=str(policy)),
                refused("23514", words, column="retry_policy", constraint="retry_policy must be a retry policy"),
            ):
                q.session.execute(way, [Jsonb(policy)])
        q.session.execute(way, [Jsonb({"base_delay_ms": 0.5, "jitter": True})])
        q.session.execute(way, [None])


TTLS = ("pending_ttl", "completed_ttl", "failed_ttl", "dead_letter_ttl", "cancelled_ttl")


@pytest.mark.parametrize("column", TTLS)
def test_no_time_to_live_is_longer_than_a_century(q: Verbs, column: str) -> None:
    q.session.execute("insert into pgqueue.queues (name) values ('q')")
    rule = f"{column} must be positive and at most 100 years"
    infinite = ["infinity"] if q.session.info.server_version >= 170000 else []
    for value in ["100 years 1 day", "36525 days 1 microsecond", "100000 years", "40000000 days", *infinite]:
        with refused("23514", rule, constraint=rule):
            q.session.execute(f"update pgqueue.queues set {column} = %s", [value])
    for value in ("100 years", "36525 days", "1200 months", "3155760000 seconds", "1 microsecond"):
        q.session.execute(f"update pgqueue.queues set {column} = %s", [value])
        q.sweep()
        q.call("maintain_partitions")
        q.call("evaluate_alerts")


@pytest.mark.parametrize("column", TTLS)
def test_a_time_to_live_out_of_range_from_before_the_rule_harms_nobody(q: Verbs, column: str) -> None:
    q.session.execute(f'alter table pgqueue.queues drop constraint "{column} must be positive and at most 100 years"')
    q.session.execute(f"insert into pgqueue.queues (name, {column}) values ('old', '100000 years')")
    q.freeze()
    old, other = q.insert(queue="old"), q.insert(queue="other")
    broken = q.start(queue="old", job_type="broken") if column == "failed_ttl" and q.cancel(old) else None
    assert broken is None or q.fail(broken, retry_in=timedelta(days=1)) == "failed"
    q.sweep()
    q.advance(days=2)
    q.sweep()
    assert q.job(other).status == "dead_letter"
    q.call("maintain_partitions")
    assert q.rows("select * from pgqueue.retention")


@pytest.mark.parametrize(
    ("status", "shown"), [("running", "'running'"), ("", "''"), ("Pending", "'Pending'"), (None, "null")]
)
def test_an_unknown_status_is_refused(q: Verbs, status: str | None, shown: str) -> None:
    words = f"status must be submitted, pending, processing, completed, failed, dead_letter or cancelled, not {shown}"
    with refused("23514", words, column="status", constraint="status must be a job status"):
        q.insert(status=status)
    with (
        refused("23514", words, column="status"),
        q.session.cursor().copy("copy pgqueue.jobs (job_type, status) from stdin") as copy,
    ):
        copy.write_row(("t", status))
    with refused("23514", words, column="status"):
        q.session.execute("insert into pgqueue.jobs_unknown (job_type, status) values ('t', %s)", [status])
    assert q.snapshot() == []


def test_a_missing_job_type_is_named(q: Verbs) -> None:
    with refused("23502", "job_type", column="job_type"):
        q.session.execute("insert into pgqueue.jobs (payload) values ('{}')")
    with refused("23502", "job_type", column="job_type"):
        q.enqueue(None)


def test_null_is_refused_where_a_value_is_needed(q: Verbs, subtests: pytest.Subtests) -> None:
    for column in ("job_id", "queue", "payload", "priority", "max_retries", "errors"):
        with subtests.test(column=column), refused("23502", column, column=column):
            q.insert(**{column: None})


EDGES: list[tuple[str, Any]] = [
    ("queue", "q" * 63), ("queue", "MyQueue"), ("queue", "a b;c'd\"e"), ("queue", "%s"), ("queue", "\N{ROCKET}" * 30),
    ("job_type", "t" * 128), ("job_type", "\N{ROCKET}" * 128), ("priority", 0), ("priority", 3),
    ("max_retries", 0), ("max_retries", 1000000), ("timeout_ms", 1), ("timeout_ms", 2147483647),
    ("idempotency_key", "\N{ROCKET}" * 256), ("idempotency_key", "  k  "), ("producer_id", "p" * 64),
    ("ordering_key", "\N{ROCKET}" * 256), ("retry_policy", {}),
    ("scheduled_at", datetime(9998, 12, 31, tzinfo=UTC)), ("scheduled_at", datetime(1, 1, 4, tzinfo=UTC)),
    ("trace_context", {}), ("trace_context", None),
    ("payload", [1970670598291982290, None, "\N{ROCKET}", {"": {}}]),
]  # fmt: skip


def test_values_at_the_edge_are_taken_as_they_are(q: Verbs, subtests: pytest.Subtests) -> None:
    for column, value in EDGES:
        with subtests.test(column=column, value=str(value)[:20]):
            assert getattr(q.job(q.insert(**{column: value})), column) == value


def test_every_rule_in_the_schema_names_its_column(q: Verbs) -> None:
    rules = q.rows(
        "select c.conname, r.relname as name,"
        " (select array_agg(a.attname::text) from pg_attribute a"
        "   where a.attrelid = c.conrelid or c.contypid <> 0 and a.atttypid = c.contypid) as columns"
        "  from pg_constraint c left join pg_class r on r.oid = c.conrelid"
        " where c.contype = 'c' and c.connamespace = 'pgqueue'::regnamespace"
        "   and r.relname is distinct from 'sweep_state'"
    )
    assert len(rules) > 30
    nameless = [row for row in rules if row.conname.split(" ")[0] not in row.columns or " must " not in row.conname]
    assert [row.conname for row in nameless] == []


BAD_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("queues", {"name": ""}, "name must have 1 to 63 characters"),
    ("queues", {"name": "q" * 64}, "name must have 1 to 63 characters"),
    ("queues", {"weights": [8, 4, 2]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": [0, 0, 0, 0]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": [8, 4, 2, 101]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": [8, 4, 2, -1]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": [8, 4, 2, None]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": []}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": [[8, 4], [2, 1]]}, "weights must be four numbers from 0 to 100, not all 0"),
    ("queues", {"weights": "[5:8]={1,2,3,4}"}, "weights must have the subscripts 1 to 4"),
    ("queues", {"lease_ms": 99}, "lease_ms must be 100 to 86400000"),
    ("queues", {"lease_ms": 86400001}, "lease_ms must be 100 to 86400000"),
    ("queues", {"timeout_ms": 0}, "timeout_ms must be positive"),
    ("queues", {"max_lost": -1}, "max_lost must not be negative"),
    ("queues", {"idempotency_ms": -1}, "idempotency_ms must be 0 to 315360000000"),
    ("queues", {"idempotency_ms": 315360000001}, "idempotency_ms must be 0 to 315360000000"),
    ("queues", {"soft_limit": -1}, "soft_limit must not be negative"),
    ("queues", {"hard_limit": -1}, "hard_limit must not be negative"),
    ("queues", {"soft_limit": 11, "hard_limit": 10}, "soft_limit must not be above hard_limit"),
    ("queues", {"soft_limit": 100_001}, "soft_limit must not be above hard_limit"),
    ("queues", {"rate_per_second": 0}, "rate_per_second must be positive"),
    ("queues", {"pending_ttl": timedelta(0)}, "pending_ttl must be positive and at most 100 years"),
    ("queues", {"completed_ttl": timedelta(-1)}, "completed_ttl must be positive and at most 100 years"),
    ("queues", {"failed_ttl": timedelta(0)}, "failed_ttl must be positive and at most 100 years"),
    ("queues", {"dead_letter_ttl": timedelta(0)}, "dead_letter_ttl must be positive and at most 100 years"),
    ("queues", {"cancelled_ttl": timedelta(0)}, "cancelled_ttl must be positive and at most 100 years"),
    ("schedules", {"name": ""}, "name must have 1 to 128 characters"),
    ("schedules", {"job_type": ""}, "job_type must have 1 to 128 characters"),
    ("schedules", {"queue": "q" * 64}, "queue must have 1 to 63 characters"),
    ("schedules", {"priority": 4}, "priority must be 0, 1, 2 or 3"),
    ("schedules", {"misfire": "never"}, "misfire must be run_once, skip or run_all"),
    ("schedules", {"misfire_cap": 0}, "misfire_cap must be 1 to 10000"),
    ("schedules", {"overlap": "queue"}, "overlap must be allow, skip or cancel"),
    ("schedules", {"next_run_at": "infinity"}, "next_run_at must lie between the years 1 and 9998"),
    ("schedules", {"next_run_at": "-infinity"}, "next_run_at must lie between the years 1 and 9998"),
    ("schedules", {"next_run_at": "9999-01-01 00:00+00"}, "next_run_at must lie between the years 1 and 9998"),
    ("schedules", {"last_run_at": "0044-03-15 BC"}, "last_run_at must lie between the years 1 and 9998"),
    ("api_keys", {"expires_at": "infinity"}, "expires_at must lie between the years 1 and 9998"),
    ("api_keys", {"expires_at": "10000-01-01 00:00+00"}, "expires_at must lie between the years 1 and 9998"),
    ("api_keys", {"name": ""}, "name must have 1 to 64 characters"),
    ("api_keys", {"sha256": b"short"}, "sha256 must be 32 bytes"),
    ("api_keys", {"scopes": ["root"]}, "scopes must be submit, read, operate or admin"),
    ("api_keys", {"rate": 0}, "rate must be positive"),
    ("workers", {"status": "gone"}, "status must be a worker status"),
]


def test_settings_are_checked(q: Verbs, subtests: pytest.Subtests) -> None:
    lawful: dict[str, dict[str, Any]] = {
        "queues": {"name": "q"},
        "schedules": {"name": "s", "cron": "* * * * *", "job_type": "t"},
        "api_keys": {"name": "k", "sha256": b"x" * 32},
        "workers": {"worker_id": WORKER, "name": "w", "hostname": "h", "pid": 1, "concurrency": 1},
    }

    def insert(table: str, columns: dict[str, Any]) -> None:
        names, marks = ", ".join(columns), ", ".join(["%s"] * len(columns))
        adapted = [str(v).replace("'", '"') if isinstance(v, dict) else v for v in columns.values()]
        q.session.execute(f"insert into pgqueue.{table} ({names}) values ({marks})", adapted)

    for table, values, constraint in BAD_SETTINGS:
        with subtests.test(constraint, values=str(values)), refused("23514", constraint, constraint=constraint):
            insert(table, lawful[table] | values)
    for table, values in lawful.items():
        insert(table, values)


def test_null_weights_mean_strict_order_and_are_lawful(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name, weights) values ('q', null)")
    assert q.value("select weights from pgqueue.queues") is None


def test_a_queue_row_has_the_defaults_of_the_contract(q: Verbs) -> None:
    q.session.execute("insert into pgqueue.queues (name) values ('q')")
    row = q.one("select * from pgqueue.queues")
    assert (row.paused, row.weights, row.timeout_ms, row.max_lost) == (False, [8, 4, 2, 1], 900_000, 5)
    assert (row.lease_ms, row.idempotency_ms, row.soft_limit, row.hard_limit) == (30_000, 86_400_000, 50_000, 100_000)
    ttls = (row.pending_ttl, row.completed_ttl, row.failed_ttl, row.dead_letter_ttl, row.cancelled_ttl)
    assert [ttl / timedelta(hours=1) for ttl in ttls] == [24, 30 * 24, 7 * 24, 90 * 24, 7 * 24]


POLICIES = [
    ("{}", True), ('{"jitter": false}', True), ('{"base_delay_ms": 0, "max_delay_ms": 0}', True),
    ('{"base_delay_ms": 1.5, "max_delay_ms": 31536000000, "backoff_multiplier": 1000}', True),
    ('{"backoff_multiplier": 1}', True), ('{"backoff_multiplier": 0.99}', False),
    ('{"backoff_multiplier": 1001}', False),
    ('{"base_delay_ms": "1"}', False), ('{"base_delay_ms": null}', False), ('{"max_delay_ms": 31536000001}', False),
    ('{"max_delay_ms": 1e400}', False), ('{"jitter": null}', False), ('{"unknown": 1}', False), ("[]", False),
    ("null", False), ("1", False),
]  # fmt: skip


def test_what_is_wrong_with_a_retry_policy(q: Verbs, subtests: pytest.Subtests) -> None:
    for policy, valid in POLICIES:
        with subtests.test(policy=policy):
            assert q.value("select pgqueue.retry_policy_fault(%s::jsonb) is null", [policy]) is valid


def test_job_ids_are_unique_of_version_7_and_carry_the_time(q: Verbs) -> None:
    row = q.one(
        "select array_agg(id) as ids, min(pgqueue.id_time(id)) as first, max(pgqueue.id_time(id)) as last,"
        " statement_timestamp() as before, clock_timestamp() as after"
        " from (select pgqueue.new_job_id() as id from generate_series(1, 10000)) i"
    )
    assert len(set(row.ids)) == 10_000
    assert {(i.version, i.variant) for i in row.ids} == {(7, uuid.RFC_4122)}
    slack = timedelta(milliseconds=2)
    assert row.before - slack <= row.first <= row.last <= row.after + slack


def test_job_ids_made_one_after_the_other_rise(q: Verbs) -> None:
    """Within a millisecond too, as those of PostgreSQL 18 do, so that an order by id is one of time."""
    ids = q.value(
        "select array_agg(case when n % 2 = 0 then pgqueue.new_job_id() else (pgqueue.new_job_ids(3))[1] end)"
        " from generate_series(1, 1000) n"
    )
    assert ids == sorted(ids)


def test_id_time_reads_all_48_bits(q: Verbs) -> None:
    for milliseconds in (0, 1, 2**31, 2**32 + 5, 253_370_764_799_999):
        job_id = uuid.UUID(int=milliseconds << 80 | 7 << 76 | 2 << 62)
        read = q.value("select (extract(epoch from pgqueue.id_time(%s)) * 1000)::bigint", [job_id])
        assert read == milliseconds


MADE = "pgqueue.made_between(%s::uuid, now() - interval '1 s', now() + interval '1 s')"


def test_made_between_asks_for_version_and_time(q: Verbs) -> None:
    assert q.value(f"select {MADE}", [q.value("select pgqueue.new_job_id()")]) is True
    milliseconds = q.value("select (extract(epoch from now()) * 1000)::bigint")
    for off, version in ((-2000, 7), (2000, 7), (0, 4)):
        job_id = uuid.UUID(int=(milliseconds + off) << 80 | version << 76 | 2 << 62)
        assert not q.value(f"select {MADE}", [job_id])


def test_made_between_is_inlined(q: Verbs) -> None:
    query = "select pgqueue.made_between(j.job_id, now(), clock_timestamp()) from pgqueue.jobs_live j"
    (plan,) = q.value(f"explain (verbose, format json) {query}")
    (output,) = plan["Plan"]["Output"]
    assert "job_id" in output
    assert "made_between" not in output


def test_shards_are_0_to_63_and_follow_the_ordering_key(q: Verbs) -> None:
    q.fill(2000)
    found = q.rows("select shard, count(*) as jobs from pgqueue.jobs group by shard")
    assert {row.shard for row in found} == set(range(64))
    q.session.execute(
        "insert into pgqueue.jobs (job_type, ordering_key) select 't', 'key ' || n % 3 from generate_series(1, 30) n"
    )
    keyed = q.rows(
        "select ordering_key, count(distinct shard) as n from pgqueue.jobs where ordering_key <> '' group by 1"
    )
    assert [row.n for row in keyed] == [1, 1, 1]


def test_each_status_has_its_partition(q: Verbs) -> None:
    homes = {}
    for outcome in ("completed", "dead_letter", "cancelled"):
        job = q.start()
        if outcome == "completed":
            q.complete([job])
        elif outcome == "dead_letter":
            q.fail(job, retryable=False)
        else:
            q.cancel_attempt(job)
        assert q.job(job.job_id).status == outcome
        homes[outcome] = q.where(job.job_id)
    failed = q.start()
    q.fail(failed)
    running = q.start()
    waiting = q.insert()
    delayed = q.enqueue(delay=timedelta(hours=1)).job_id
    live = {q.job(i).status: q.where(i) for i in (failed.job_id, running.job_id, waiting, delayed)}
    assert set(live) == {"failed", "processing", "pending", "submitted"}
    assert set(live.values()) == {"pgqueue.jobs_live"}
    for status, home in homes.items():
        assert re.fullmatch(rf"pgqueue\.jobs_{status}_(default|\d{{8}})", home)


def test_every_sequence_can_pass_two_to_the_31st(q: Verbs) -> None:
    q.freeze()
    sequences = q.rows(
        "select c.oid::regclass::text as name from pg_class c"
        " where c.relkind = 'S' and c.relnamespace = 'pgqueue'::regnamespace"
    )
    assert len(sequences) >= 4
    for sequence in sequences:
        q.session.execute("select setval(%s, 2147483646)", [sequence.name])
    q.session.execute("select pgqueue.watch(%s, '1 hour')", [WORKER])
    ids = [q.insert(), q.enqueue().job_id, *(row.job_id for row in q.enqueue_many(*[{"job_type": "t"}] * 3))]
    completed, failed, dead, released, cancelled = q.claim(5)
    assert [job.job_id for job in (completed, failed, dead, released, cancelled)] == ids
    assert q.complete([completed]) == {ids[0]}
    assert q.fail(failed) == "failed"
    assert q.fail(dead, retryable=False) == "dead_letter"
    assert q.release([released]) == {ids[3]}
    assert q.cancel(ids[4]) == "cancel_requested"
    assert q.snooze(cancelled) == "cancelled"
    assert q.retry(ids[2]).seq > 2**31
    q.advance(minutes=1)
    assert q.sweep()["due"] == 1
    assert q.job(ids[1]).seq > 2**31
    assert [job.job_id for job in q.claim(5)] == [ids[3], ids[2], ids[1]]
    assert q.value("select max(audit_id) from pgqueue.audit") >= 2**31
    narrow = q.rows(
        "select attrelid::regclass::text from pg_attribute a join pg_class c on c.oid = attrelid"
        " where relnamespace = 'pgqueue'::regnamespace and attname = 'seq' and atttypid <> 'bigint'::regtype"
    )
    assert narrow == []


def test_sessions_without_a_search_path_can_do_everything(q: Verbs) -> None:
    q.session.execute("set search_path = ''")
    whole_life(q)


def test_a_hostile_search_path_is_not_followed(q: Verbs) -> None:
    q.session.execute("create schema evil")
    for function in ("statement_timestamp()", "now()"):
        q.session.execute(
            f"create function evil.{function} returns timestamptz language sql as $$ select timestamptz 'infinity' $$"
        )
    q.session.execute("create function evil.nextval(regclass) returns bigint language sql as 'select -1::bigint'")
    q.session.execute("create function evil.pg_notify(text, text) returns void language sql as 'select 1 / 0'")
    q.session.execute("create table evil.jobs_live (job_id uuid)")
    q.session.execute("set search_path = evil, pg_catalog")
    whole_life(q)


def whole_life(q: Verbs) -> None:
    q.session.execute("select pgqueue.watch(%s, '1 hour')", [WORKER])
    q.session.execute("select pgqueue.wait_for_work(%s, null, null, 'bell')", [WORKER])
    q.insert(idempotency_key="k", ordering_key="o", retry_policy={"base_delay_ms": 0})
    q.insert(scheduled_at=datetime(2100, 1, 1, tzinfo=UTC))
    q.enqueue(idempotency_key="l", delay=timedelta(seconds=0))
    q.enqueue_many({"job_type": "t", "idempotency_key": "m"}, {"type": "t", "delay_ms": 0})
    jobs = q.claim(4)
    assert len(jobs) == 4
    q.heartbeat(jobs)
    q.set_progress(jobs[0], {"percent": 1})
    assert q.complete(jobs[:1]) == {jobs[0].job_id}
    assert q.fail(jobs[1]) == "failed"
    assert q.release(jobs[2:3]) == {jobs[2].job_id}
    assert q.fail(jobs[3], retryable=False) == "dead_letter"
    q.retry(jobs[3].job_id)
    q.cancel(jobs[3].job_id)
    q.sweep()
    q.call("maintain_partitions")
    q.call("pause", "default")
    assert "paused" in q.why(jobs[2].job_id)
    q.call("resume", "default")
    for view in ("queue_stats", "job_results", "dead_letters", "stuck_jobs", "alerts"):
        q.rows(f"select * from pgqueue.{view}")


def test_everything_in_the_schema_says_what_it_is(q: Verbs) -> None:
    assert not q.rows(
        """select p.oid::regprocedure::text as what from pg_proc p
            where p.pronamespace = 'pgqueue'::regnamespace and obj_description(p.oid, 'pg_proc') is null
           union all
           select c.oid::regclass::text from pg_class c
            where c.relnamespace = 'pgqueue'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
              and c.relname <> 'alembic_version' and obj_description(c.oid, 'pg_class') is null
           union all
           select 'jobs.' || a.attname from pg_attribute a
            where a.attrelid = 'pgqueue.jobs'::regclass and a.attnum > 0
              and col_description(a.attrelid, a.attnum) is null"""
    )


def test_a_publication_of_all_tables_stops_nothing(q: Verbs) -> None:
    q.freeze()
    q.session.execute("create publication everything for all tables")
    whole_life(q)
    dead, done = q.start(queue="other"), q.start(queue="other")
    q.fail(dead, retryable=False)
    q.complete([done])
    q.call("discard", dead.job_id)
    finished = "select count(*) from pgqueue.jobs where status in ('completed', 'cancelled', 'dead_letter')"
    assert q.value(finished) > 0
    ttls = [f"{status}_ttl" for status in ("completed", "cancelled", "dead_letter")]
    q.session.execute("insert into pgqueue.queues (name) values ('other')")
    q.session.execute(f"update pgqueue.queues set {', '.join(f'{ttl} = interval $$1 minute$$' for ttl in ttls)}")
    q.advance(minutes=5)
    q.sweep()
    assert q.value(finished) == 0
    without = q.rows(
        "select c.oid::regclass::text as name from pg_class c"
        " where c.relnamespace = 'pgqueue'::regnamespace and c.relkind = 'r' and c.relreplident <> 'f'"
        "   and c.relname <> 'jobs_unknown'"
        "   and not exists (select from pg_index i where i.indrelid = c.oid and (i.indisprimary or i.indisreplident))"
    )
    assert without == []
    assert not q.rows("select step, last_error from pgqueue.sweep_steps where last_error is not null")


def test_old_settings_of_a_session_change_nothing(q: Verbs) -> None:
    q.session.execute("set escape_string_warning = off; set standard_conforming_strings = off; set array_nulls = off")
    q.insert(max_retries=0)
    (job,) = q.claim()
    assert q.fail(job, {"type": "E", "message": "disk is  full"}) == "dead_letter"
    assert q.job(job.job_id).error == "E: disk is full"
    q.session.execute("insert into pgqueue.schedules (name, cron, job_type) values ('s', '*/5 * * * *', 't')")


@pytest.mark.parametrize("zone", ["Asia/Shanghai", "Asia/Kolkata", "Asia/Jakarta"])
def test_how_a_session_writes_times_changes_nothing(q: Verbs, zone: str) -> None:
    q.session.execute("set datestyle = 'SQL, MDY'")
    q.session.execute("select set_config('TimeZone', %s, false)", [zone])
    q.session.execute("select pgqueue.pause_job_type('t', pgqueue.clock() + interval '1 minute')")
    left = q.value("select extract(epoch from until - pgqueue.clock())::float8 from pgqueue.job_type_pauses")
    assert 50 < left <= 60
    with refused("PQ422", "until must be given"):
        q.call("pause_job_type", "t", None)
