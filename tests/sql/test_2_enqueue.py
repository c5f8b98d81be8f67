"""Every way into the queue: INSERT, COPY, enqueue, enqueue_many; idempotency and limits."""

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.sql.verbs import WORKER, Verbs, refused

V7 = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def test_insert_with_a_future_time_is_submitted_until_then(q: Verbs) -> None:
    now = q.freeze()
    at = now + timedelta(seconds=0.2)
    job = q.job(q.insert(scheduled_at=at))
    assert (job.status, job.scheduled_at, job.due_at) == ("submitted", at, at)
    assert q.claim() == []


def test_insert_with_a_past_or_present_time_is_pending(q: Verbs) -> None:
    now = q.freeze()
    ids = [q.insert(scheduled_at=at) for at in (now, now - timedelta(days=1), datetime(1, 2, 3, tzinfo=UTC))]
    assert [(q.job(i).status, q.job(i).due_at) for i in ids] == [("pending", None)] * 3
    assert [job.job_id for job in q.claim(9)] == ids


def test_a_given_status_or_due_time_cannot_shift_a_job(q: Verbs) -> None:
    now = q.freeze()
    later = now + timedelta(hours=1)
    assert q.job(q.insert(status="submitted")).status == "pending"
    assert q.job(q.insert(status="pending", scheduled_at=later)).status == "submitted"
    job = q.job(q.insert(due_at=later))
    assert (job.status, job.due_at) == ("pending", None)


@pytest.mark.parametrize("status", ["processing", "failed", "completed", "cancelled", "dead_letter"])
def test_a_job_cannot_be_born_in_another_status(q: Verbs, status: str) -> None:
    with refused("PQ422", "status"):
        q.insert(status=status)
    with refused("PQ422", "status"):
        q.insert(status=status, worker_id=WORKER, lease_expires_at=datetime.now(UTC), attempts=1)
    with refused("PQ422", "status"):
        q.session.execute(
            "insert into pgqueue.jobs (job_type, status, finished_at) select 't', %s, now() from generate_series(1, 3)",
            [status],
        )
    assert q.snapshot() == []


LATER = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(("column", "value"), [
    ("attempts", 3), ("attempts", -1), ("lost", 1), ("uncharged", 1), ("worker_id", WORKER),
    ("lease_expires_at", LATER), ("started_at", LATER), ("started_at", "infinity"),
    ("cancel_requested_at", LATER), ("finished_at", LATER),
    ("result", {}), ("error", "x"), ("errors", [{}]), ("errors", {}), ("progress", {"done": 1}),
    ("created_at", LATER), ("created_at", "infinity"), ("updated_at", LATER), ("updated_at", "-infinity"),
    ("seq", 2**63 - 1), ("seq", 0), ("seq", -(2**63)),
])  # fmt: skip
def test_a_job_cannot_be_born_with_a_past(q: Verbs, column: str, value: Any) -> None:
    with refused("PQ422", f"{column} of a new job must be left out, not given as ", column=column):
        q.insert(**{column: value})
    usual = {"created_at": "pgqueue.clock()", "updated_at": "pgqueue.clock()", "seq": "5", "errors": "'[]'::jsonb"}.get(
        column,
        "0"
        if column in ("attempts", "lost", "uncharged")
        else "null::timestamptz"
        if column.endswith("_at")
        else "null",
    )
    # The offending one is named when it is one of many, and in whatever queue.
    with refused("PQ422", f"{column} of a new job must be left out", column=column):
        q.session.execute(
            f"insert into pgqueue.jobs (job_type, queue, {column})"
            f" select 't', 'q' || n, case when n = 3 then %s else {usual} end"
            " from generate_series(1, 3) n",
            [Jsonb(value) if isinstance(value, dict | list) else value],
        )
    assert q.snapshot() == []


def test_a_value_that_a_new_job_has_anyway_may_be_given(q: Verbs) -> None:
    job_id = q.value(
        "insert into pgqueue.jobs"
        " (job_type, seq, status, attempts, lost, errors, created_at, updated_at, started_at, progress)"
        " values ('t', nextval('pgqueue.jobs_seq'), 'pending', 0, 0, '[]', now(), statement_timestamp(), null, null)"
        " returning job_id"
    )
    assert [job.job_id for job in q.claim()] == [job_id]


def test_a_far_seq_of_one_queue_does_not_stop_claims_of_another(q: Verbs) -> None:
    q.insert(queue="far")
    q.insert(queue="near")
    # As a restore or a replica would write it.
    q.session.execute("set session_replication_role = replica")
    q.session.execute("update pgqueue.jobs_live set seq = 9223372036854775807 where queue = 'far'")
    q.session.execute("reset session_replication_role")
    assert {job.queue for job in q.claim(9, queues=["far", "near"])} == {"far", "near"}
    assert q.insert(queue="far")


def test_a_given_job_id_is_kept_and_cannot_come_twice(q: Verbs) -> None:
    assert q.insert(job_id=V7) == V7
    with refused("23505"):
        q.insert(job_id=V7)
    with refused("23505"):
        q.enqueue(job_id=V7)
    with refused("23505"):
        q.enqueue_many({"job_type": "t", "job_id": str(V7)})


@pytest.mark.parametrize("outcome", ["completed", "cancelled", "dead_letter"])
def test_the_job_id_of_a_finished_job_stays_taken(q: Verbs, outcome: str) -> None:
    job = q.start(job_id=V7)
    finish: dict[str, Callable[[], Any]] = {
        "completed": lambda: q.complete([job]),
        "cancelled": lambda: q.cancel_attempt(job),
        "dead_letter": lambda: q.fail(job, retryable=False),
    }
    finish[outcome]()
    with refused("23505", "job_id", column="job_id"):
        q.insert(job_id=V7)
    assert q.job(V7).status == outcome


@pytest.mark.parametrize("key", [None, "k"])
def test_the_job_id_of_a_job_that_finished_a_moment_ago_is_taken(q: Verbs, key: str | None) -> None:
    job = q.start(job_id=q.value("select pgqueue.new_job_id()"), idempotency_key=key)
    q.complete([job])
    with refused("23505", "is taken by a finished job", column="job_id"):
        q.insert(job_id=job.job_id, idempotency_key=key)
    with refused("23505", "is taken by a finished job", column="job_id"):
        q.enqueue(job_id=job.job_id)
    assert not q.claim()


def test_a_job_id_of_the_far_future_is_refused(q: Verbs) -> None:
    """Finished jobs are looked up from the time in their id on, so such a job could never be found again."""
    ahead = datetime.now(UTC) + timedelta(days=3)
    job_id = uuid.UUID(int=int(ahead.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62)
    with refused("PQ422", "job_id", column="job_id"):
        q.insert(job_id=job_id)
    with refused("PQ422", "job_id", column="job_id"):
        q.enqueue(job_id=job_id)
    near = uuid.UUID(int=job_id.int - ((int(timedelta(days=2.5).total_seconds()) * 1000) << 80))
    job = q.start(job_id=near)
    q.complete([job])
    assert [j.status for j in q.call("job", near)] == ["completed"]


def test_insert_select_of_many_rows_is_a_full_enqueue(q: Verbs) -> None:
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue, priority, payload)"
        " select 't', 'q' || n % 3, n % 4, jsonb_build_object('n', n) from generate_series(1, 6000) n"
    )
    assert q.rows("select status, count(*), count(distinct job_id) as ids from pgqueue.jobs group by 1") == [
        ("pending", 6000, 6000)
    ]
    jobs = q.claim(6000, queues=None)
    assert len(jobs) == 6000
    for queue in ("q0", "q1", "q2"):
        line = [(job.priority, job.payload["n"]) for job in jobs if job.queue == queue]
        assert line == sorted(line)


def test_the_first_look_at_many_rows_asks_for_one(q: Verbs) -> None:
    q.session.execute("load 'plpgsql'; set plpgsql.extra_errors = 'too_many_rows'")
    q.session.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, 3)")
    assert len(q.claim(9)) == 3


def test_copy_is_a_full_enqueue(q: Verbs) -> None:
    now = q.freeze()
    with q.session.cursor().copy(
        "copy pgqueue.jobs (job_type, payload, priority, idempotency_key, scheduled_at) from stdin"
    ) as copy:
        for n in range(1000):
            at = now + timedelta(minutes=1) if n % 10 == 0 else None
            copy.write_row(("t", Jsonb({"n": n}), n % 4, f"key {n}", at))
    assert q.rows("select status, count(*) from pgqueue.jobs group by 1 order by 1") == [
        ("pending", 900), ("submitted", 100),
    ]  # fmt: skip
    assert q.enqueue(idempotency_key="key 7").duplicate
    with refused("23505"), q.session.cursor().copy("copy pgqueue.jobs (job_type, idempotency_key) from stdin") as copy:
        copy.write_row(("t", "new"))
        copy.write_row(("t", "key 8"))
    assert not q.enqueue(idempotency_key="new").duplicate


def test_insert_on_conflict_do_nothing_keeps_the_first(q: Verbs) -> None:
    q.insert(job_id=V7, payload={"first": True})
    q.session.execute("insert into pgqueue.jobs (job_id, job_type) values (%s, 't') on conflict do nothing", [V7])
    assert q.job(V7).payload == {"first": True}


def test_a_rolled_back_insert_leaves_nothing(q: Verbs) -> None:
    with q.session.transaction(force_rollback=True):
        q.insert(idempotency_key="k")
    assert q.snapshot() == []
    assert q.insert(idempotency_key="k")


def test_enqueue_takes_every_argument(q: Verbs) -> None:
    now = q.freeze()
    policy = {"base_delay_ms": 5, "jitter": False}
    row = q.enqueue(
        "mail", payload={"to": "a"}, queue="mail", priority=1, scheduled_at=now + timedelta(hours=2),
        idempotency_key="k", max_retries=7, retry_policy=policy, timeout_ms=1234, expires_at=now + timedelta(days=9),
        producer_id="web", ordering_key="o", trace_context={"traceparent": "00-1"}, job_id=V7,
    )  # fmt: skip
    stored = q.job(V7)
    assert row[:-1] == stored
    assert row.duplicate is False
    wanted = {
        "job_id": V7, "job_type": "mail", "payload": {"to": "a"}, "queue": "mail", "priority": 1, "status": "submitted",
        "scheduled_at": now + timedelta(hours=2), "due_at": now + timedelta(hours=2), "idempotency_key": "k",
        "max_retries": 7, "retry_policy": policy, "timeout_ms": 1234, "expires_at": now + timedelta(days=9),
        "producer_id": "web", "ordering_key": "o", "trace_context": {"traceparent": "00-1"},
    }  # fmt: skip
    assert {name: getattr(stored, name) for name in wanted} == wanted


def test_enqueue_with_nulls_takes_the_defaults(q: Verbs) -> None:
    row = q.enqueue("t", payload=None, queue=None, priority=None, max_retries=None, delay=None, job_id=None)
    assert (row.payload, row.queue, row.priority, row.max_retries, row.status) == ({}, "default", 2, 3, "pending")


def test_enqueue_answers_the_row_as_it_is_stored(q: Verbs) -> None:
    for arguments in ({}, {"ordering_key": "o"}, {"ordering_key": "o"}, {"delay": timedelta(hours=1)}):
        row = q.enqueue(**arguments)
        assert row[:-1] == q.job(row.job_id)


def test_the_answer_of_enqueue_has_the_columns_of_jobs_and_duplicate(q: Verbs) -> None:
    assert q.enqueue()._fields == (*q.one("select * from pgqueue.jobs")._fields, "duplicate")


def test_delay_counts_from_now(q: Verbs) -> None:
    now = q.freeze()
    row = q.enqueue(delay=timedelta(seconds=90))
    assert (row.status, row.scheduled_at, row.due_at) == ("submitted", *[now + timedelta(seconds=90)] * 2)
    assert q.enqueue(delay=timedelta(0)).status == "pending"


@pytest.mark.parametrize(("named", "column"), [
    ({"delay": timedelta(seconds=-1)}, "delay"),
    ({"delay": timedelta(days=3_000_000)}, "delay"),
    ({"delay": timedelta(1), "scheduled_at": datetime(2040, 1, 1, tzinfo=UTC)}, "scheduled_at"),
    ({"priority": 4}, "priority"), ({"priority": -1}, "priority"), ({"priority": 70_000}, "priority"),
    ({"idempotency_key": ""}, "idempotency_key"), ({"idempotency_key": "k" * 257}, "idempotency_key"),
])  # fmt: skip
def test_enqueue_refuses_and_names_the_argument(q: Verbs, named: dict[str, Any], column: str) -> None:
    with refused("PQ422", column, column=column):
        q.enqueue(**named)
    assert q.snapshot() == []
    assert q.value("select count(*) from pgqueue.idempotency_keys") == 0


def test_a_refused_enqueue_takes_no_key(q: Verbs) -> None:
    with refused("23514", "queue"):
        q.enqueue(queue="q" * 64, idempotency_key="k")
    assert not q.enqueue(idempotency_key="k").duplicate


# enqueue_many


def test_enqueue_many_takes_the_keys_of_rest(q: Verbs) -> None:
    now = q.freeze()
    (row,) = q.enqueue_many({
        "type": "mail", "payload": {"to": "a"}, "queue": "mail", "priority": "high",
        "scheduled_at": (now + timedelta(hours=2)).isoformat(), "idempotency_key": "k", "max_retries": 7,
        "retry_policy": {"jitter": False}, "timeout_ms": 1234, "expires_at": (now + timedelta(days=9)).isoformat(),
        "producer_id": "web", "ordering_key": "o", "trace_context": {"traceparent": "00-1"}, "job_id": str(V7),
    })  # fmt: skip
    stored = q.job(V7)
    assert row.job_id == V7
    wanted = {
        "job_type": "mail", "payload": {"to": "a"}, "queue": "mail", "priority": 1, "status": "submitted",
        "scheduled_at": now + timedelta(hours=2), "due_at": now + timedelta(hours=2), "idempotency_key": "k",
        "max_retries": 7, "retry_policy": {"jitter": False}, "timeout_ms": 1234, "expires_at": now + timedelta(days=9),
        "producer_id": "web", "ordering_key": "o", "trace_context": {"traceparent": "00-1"},
    }  # fmt: skip
    assert {name: getattr(stored, name) for name in wanted} == wanted


def test_enqueue_many_answers_in_the_order_given(q: Verbs) -> None:
    q.enqueue(idempotency_key="old", payload={"n": -1})
    jobs = [
        {"job_type": "t", "payload": {"n": n}, "priority": n % 4, "queue": f"q{n % 7}"}
        | ({"idempotency_key": "old"} if n == 100 else {})
        | ({"delay_ms": 60_000} if n % 5 == 0 else {})
        for n in range(300)
    ]
    rows = q.enqueue_many(*jobs)
    assert [row.payload["n"] for row in rows] == [-1 if n == 100 else n for n in range(300)]
    assert [n for n, row in enumerate(rows) if row.duplicate] == [100]
    fresh = [row.seq for row in rows if not row.duplicate]
    assert fresh == sorted(fresh)
    assert q.value("select count(*) from pgqueue.jobs") == 300


def test_enqueue_many_takes_defaults_for_what_is_missing_or_null(q: Verbs) -> None:
    nulls = dict.fromkeys(
        ["payload", "queue", "priority", "scheduled_at", "delay_ms", "idempotency_key", "max_retries", "retry_policy",
         "timeout_ms", "expires_at", "producer_id", "ordering_key", "trace_context", "job_id"]
    )  # fmt: skip
    for row in q.enqueue_many({"job_type": "t"}, {"job_type": "t"} | nulls):
        assert (row.payload, row.queue, row.priority, row.max_retries, row.status) == ({}, "default", 2, 3, "pending")
        assert (row.retry_policy, row.trace_context, row.idempotency_key, row.scheduled_at) == (None,) * 4


def test_enqueue_many_knows_the_names_of_priorities(q: Verbs) -> None:
    given = ["critical", "high", "normal", "low", 0, 1, 2, 3]
    rows = q.enqueue_many(*[{"job_type": "t", "priority": priority} for priority in given])
    assert [row.priority for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize(("jobs", "words"), [
    ({"job_type": "t"}, ["array"]),
    ("t", ["array"]),
    (None, ["array"]),
    ([{"job_type": "t"}, "job_type"], ["jobs[1]", "object"]),
    ([["job_type"]], ["jobs[0]", "object"]),
    ([{"job_type": "t"}, {"payload": {}}], ["jobs[1]", "job_type"]),
    ([{"job_type": "t", "shedule": 1}], ["jobs[0]", "shedule"]),
    ([{"job_type": "t", "status": "completed"}], ["jobs[0]", "status"]),
    ([{"job_type": "t", "priority": 4}], ["priority", "4"]),
    ([{"job_type": "t", "priority": 1.5}], ["priority", "1.5"]),
    ([{"job_type": "t", "priority": "urgent"}], ["priority", "urgent"]),
    ([{"job_type": "t", "priority": True}], ["priority", "true"]),
    ([{"job_type": "t"}, {"job_type": "t", "delay_ms": -1}], ["jobs[1]", "delay_ms", "-1"]),
    ([{"job_type": "t", "delay_ms": 1e16}], ["jobs[0]", "delay_ms"]),
    ([{"job_type": "t", "delay_ms": 5, "scheduled_at": "2040-01-01T00:00Z"}], ["jobs[0]", "scheduled_at"]),
    ([{"job_type": "t", "idempotency_key": ""}], ["jobs[0]", "idempotency_key", "1 to 256"]),
    ([{"job_type": "t"}, {"job_type": "t", "idempotency_key": "k" * 257}], ["jobs[1]", "idempotency_key", "1 to 256"]),
])  # fmt: skip
def test_enqueue_many_refuses_all_or_nothing(q: Verbs, jobs: Any, words: list[str]) -> None:
    with refused("PQ422", *words):
        q.rows("select * from pgqueue.enqueue_many(%s)", [Jsonb(jobs)])
    assert q.snapshot() == []


def test_values_of_a_wrong_type_are_refused_whole(q: Verbs, subtests: pytest.Subtests) -> None:
    for key, value in (
        ("max_retries", "many"), ("timeout_ms", 1e12), ("scheduled_at", "soon"), ("job_id", "x"), ("delay_ms", "x")
    ):  # fmt: skip
        with subtests.test(key=key), refused("PQ422", f"jobs[1] has a bad {key}: ", column=key):
            q.enqueue_many({"job_type": "t"}, {"job_type": "t", key: value})
    broken: list[dict[str, Any]] = [
        {"queue": "q" * 64},
        {"job_type": ""},
        {"retry_policy": {"x": 1}},
        {"timeout_ms": 0},
    ]
    for job in broken:
        ruled = "retry_policy" in job or "timeout_ms" in job
        with subtests.test(str(job)), refused("PQ422" if ruled else "23514", *job):
            q.enqueue_many({"job_type": "t"}, {"job_type": "t"} | job)
    assert q.snapshot() == []


def test_a_key_that_no_index_can_hold_is_refused_with_its_maximum(q: Verbs) -> None:
    """Random text, since what compresses well would fit."""
    text = "".join(uuid.uuid4().hex for _ in range(200))
    for door in (
        lambda: q.insert(idempotency_key=text),
        lambda: q.enqueue(idempotency_key=text),
        lambda: q.enqueue_many({"job_type": "t", "idempotency_key": text}),
        lambda: q.insert(ordering_key=text),
        lambda: q.insert(queue=text),
        lambda: q.insert(job_type=text),
        lambda: q.insert(producer_id=text, idempotency_key="k"),
        lambda: q.enqueue_many({"job_type": "t", "producer_id": text, "idempotency_key": "k"}),
    ):
        with pytest.raises(psycopg.Error) as caught:
            door()
        assert caught.value.diag.sqlstate in ("PQ422", "23514"), caught.value
        assert "must have 1 to" in str(caught.value)


def test_enqueue_many_of_nothing(q: Verbs) -> None:
    assert q.enqueue_many() == []


def test_enqueue_many_of_ten_thousand(q: Verbs) -> None:
    rows = q.enqueue_many(*[{"job_type": "t", "payload": {"n": n}} for n in range(10_000)])
    assert [row.payload["n"] for row in rows] == list(range(10_000))


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("job_id", "x", 'it must be a UUID of version 7, not "x"'),
    ("priority", 7, "priority must be 0 to 3 or critical, high, normal, low, not 7"),
    ("priority", "urgent", 'priority must be 0 to 3 or critical, high, normal, low, not "urgent"'),
    ("max_retries", "x", 'it must be a whole number up to 2147483647, not "x"'),
    ("max_retries", 1.5, "it must be a whole number up to 2147483647, not 1.5"),
    ("max_retries", 99999999999, "it must be a whole number up to 2147483647, not 99999999999"),
    ("max_retries", -1, "it must be 0 to 1000000, not -1"),
    ("timeout_ms", True, "it must be a whole number up to 2147483647, not true"),
    ("timeout_ms", 0, "it must be positive, not 0"),
    ("scheduled_at", "tomorrow at tea", 'it must be a time, not "tomorrow at tea"'),
    ("scheduled_at", "infinity", 'it must lie between the years 1 and 9998, not "infinity"'),
    ("expires_at", 5, "it must be a time, not 5"),
    ("delay_ms", "soon", 'it must be a number, not "soon"'),
    ("ordering_key", "", 'it must have 1 to 256 characters, not ""'),
    ("retry_policy", {"jitter": 1}, "it must have true or false as jitter, not 1"),
    ("trace_context", 1, "it must be a JSON object, not 1"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "words"), BAD_VALUES)
@pytest.mark.parametrize("function", ["enqueue_many", "submit", "submit_batch"])
def test_a_bad_value_in_a_batch_is_named_with_its_job(
    q: Verbs, function: str, key: str, value: Any, words: str
) -> None:
    jobs = [{"job_type": "t"}, {"job_type": "t", "max_retries": 2}, {"job_type": "t", key: value}]
    with refused("PQ422", f"jobs[2] has a bad {key}: {words}", column=key):
        q.session.execute(f"select * from pgqueue.{function}(%s)", [Jsonb(jobs)])
    assert q.snapshot() == []


def test_null_is_as_good_as_left_out_in_a_batch(q: Verbs) -> None:
    (job,) = q.enqueue_many({"job_type": "t"} | dict.fromkeys([key for key, _, _ in BAD_VALUES]))
    assert (job.max_retries, job.priority, job.retry_policy, job.trace_context) == (3, 2, None, None)


def test_a_queue_that_no_sweep_has_seen_is_noted_once(q: Verbs) -> None:
    for _ in range(3):
        q.session.execute("insert into pgqueue.jobs (job_type, queue) values ('t', 'new')")
        q.enqueue("t", queue="new")
        q.session.execute('select pgqueue.enqueue_many(\'[{"job_type": "t", "queue": "new"}]\')')
    assert q.rows("select queue from pgqueue.sweep_notes") == [("new",)]
    assert len(q.claim(20, queues=None)) == 9
    q.sweep("cursors")
    q.enqueue("t", queue="new")
    assert q.rows("select queue from pgqueue.sweep_notes") == []
