"""The state machine against hand-written statements: what UPDATE may do to a job, and what it may not."""

import uuid
from datetime import timedelta
from itertools import product

import pytest

from tests.sql.verbs import OTHER, WORKER, Row, Verbs, kill_by_failing, refused

LIVE = ["submitted", "pending", "processing", "failed"]
FINAL = ["completed", "cancelled", "dead_letter"]
LAWFUL = {
    ("submitted", "pending"), ("pending", "processing"), ("processing", "failed"), ("processing", "pending"),
    ("processing", "submitted"), ("failed", "pending"),
} | {(status, status) for status in LIVE}  # fmt: skip
# Everything that a lawful change to this status must set as well.
WHOLE = {
    "submitted": ", due_at = pgqueue.clock() + interval '1 hour', lease_expires_at = null",
    "pending": ", due_at = null, lease_expires_at = null",
    "processing": (
        f", worker_id = case when status = 'processing' then worker_id else '{OTHER}' end,"
        " attempts = attempts + case when status = 'processing' then 0 else 1 end,"
        " lease_expires_at = pgqueue.clock() + interval '1 hour', due_at = null"
    ),
    "failed": ", due_at = pgqueue.clock() + interval '1 hour', lease_expires_at = null",
    "completed": ", finished_at = pgqueue.clock(), lease_expires_at = null",
    "cancelled": ", finished_at = pgqueue.clock(), lease_expires_at = null",
    "dead_letter": ", finished_at = pgqueue.clock(), lease_expires_at = null",
}


def in_status(q: Verbs, status: str) -> Row:
    """A job of this status, in a queue of its own."""
    queue = f"{status} {uuid.uuid4()}"
    match status:
        case "submitted":
            return q.job(q.enqueue(queue=queue, delay=timedelta(hours=1)).job_id)
        case "pending":
            return q.job(q.insert(queue=queue))
    job = q.start(queue=queue)
    match status:
        case "failed":
            assert q.fail(job) == "failed"
        case "completed":
            assert q.complete([job])
        case "cancelled":
            assert q.cancel_attempt(job) == "cancelled"
        case "dead_letter":
            assert q.fail(job, retryable=False) == "dead_letter"
    row = q.job(job.job_id)
    assert row.status == status
    return row


def test_the_matrix_of_updates(q: Verbs, subtests: pytest.Subtests) -> None:
    jobs = {status: in_status(q, status) for status in LIVE + FINAL}
    for was, became in product(LIVE + FINAL, repeat=2):
        for whole in (True, False):
            statement = f"update pgqueue.jobs set status = '{became}'{WHOLE[became] if whole else ''}"
            with subtests.test(was=was, became=became, whole=whole):
                before = q.snapshot()
                with q.session.transaction(force_rollback=True):
                    if (was, became) in LAWFUL and (whole or was == became or became == "pending"):
                        q.session.execute(f"{statement} where job_id = %s", [jobs[was].job_id])
                        assert q.job(jobs[was].job_id).status == became
                    else:
                        with refused("PQ409"):
                            q.session.execute(f"{statement} where job_id = %s", [jobs[was].job_id])
                assert q.snapshot() == before


@pytest.mark.parametrize("status", FINAL)
def test_a_finished_job_cannot_be_changed_at_all(q: Verbs, status: str) -> None:
    job = in_status(q, status)
    before = q.snapshot()
    home = q.where(job.job_id)
    for table in ("pgqueue.jobs", f"pgqueue.jobs_{status}", home):
        for change in ("error = 'x'", "payload = '{}'", "status = status", "job_id = pgqueue.new_job_id()"):
            with refused("PQ409", str(job.job_id), column="status"):
                q.session.execute(f"update {table} set {change} where job_id = %s", [job.job_id])
    assert q.snapshot() == before


@pytest.mark.parametrize("status", FINAL)
def test_a_finished_job_cannot_be_changed_in_a_dated_partition(q: Verbs, status: str) -> None:
    q.call("maintain_partitions")
    job = in_status(q, status)
    home = q.where(job.job_id)
    assert home.rpartition("_")[2].isdigit()
    for table in ("pgqueue.jobs", home):
        with refused("PQ409", str(job.job_id)):
            q.session.execute(f"update {table} set error = 'x' where job_id = %s", [job.job_id])


def test_a_refusal_says_what_to_use_instead(q: Verbs) -> None:
    job = in_status(q, "pending")
    with pytest.raises(Exception, match=r"from pending to completed") as caught:
        q.session.execute("update pgqueue.jobs set status = 'completed' where job_id = %s", [job.job_id])
    assert "pgqueue.cancel" in str(caught.value)
    dead = in_status(q, "dead_letter")
    with pytest.raises(Exception, match=r"is dead_letter") as caught:
        q.session.execute("update pgqueue.jobs set status = 'pending' where job_id = %s", [dead.job_id])
    assert "pgqueue.retry" in str(caught.value)


@pytest.mark.parametrize("missing", ["worker_id", "lease_expires_at", "attempts"])
def test_a_job_cannot_become_processing_by_half(q: Verbs, missing: str) -> None:
    job = in_status(q, "pending")
    parts = {
        "worker_id": f"worker_id = '{OTHER}'", "lease_expires_at": "lease_expires_at = now()",
        "attempts": "attempts = attempts + 1",
    }  # fmt: skip
    del parts[missing]
    with refused("PQ409", "processing"):
        q.session.execute(f"update pgqueue.jobs set status = 'processing', {', '.join(parts.values())}")
    assert q.job(job.job_id) == job


def test_a_running_job_cannot_lose_what_it_runs_under(q: Verbs) -> None:
    job = q.start()
    for change in ("worker_id = null", "lease_expires_at = null"):
        with refused("PQ409", "processing"):
            q.session.execute(f"update pgqueue.jobs set {change}")
    assert q.complete([job]) == {job.job_id}


FORGED = [
    ("PQ409", "attempts", "2147483647"), ("PQ409", "attempts", "attempts + 1"), ("PQ409", "attempts", "-5"),
    ("23514", "lost", "2147483647"), ("23514", "lost", "-1"), ("23514", "uncharged", "-1"),
    ("23514", "uncharged", "2147483647"), ("23514", "errors", "'{}'"), ("23514", "errors", "'5'"),
    ("PQ409", "worker_id", "pgqueue.new_job_id()"), ("PQ409", "result", "'1'"), ("PQ409", "finished_at", "now()"),
    ("PQ409", "created_at", "'infinity'"),
]  # fmt: skip


@pytest.mark.parametrize(("sqlstate", "column", "value"), FORGED)
def test_what_the_queue_counts_cannot_be_forged(q: Verbs, sqlstate: str, column: str, value: str) -> None:
    for status in LIVE:
        job = in_status(q, status)
        with refused(sqlstate, column, column=column):
            q.session.execute(
                f"update pgqueue.jobs set {column} = {value}, updated_at = now() where job_id = %s", [job.job_id]
            )
        assert q.job(job.job_id) == job


@pytest.mark.parametrize("became", [
    "status = 'pending', lease_expires_at = null", "status = status",
    "status = 'failed', due_at = now(), lease_expires_at = null",
    "status = 'submitted', due_at = now(), lease_expires_at = null",
])  # fmt: skip
def test_no_attempt_of_a_worker_comes_twice_by_an_edit(q: Verbs, became: str) -> None:
    job = q.start()
    for change in ("attempts = 0", "attempts = 0, seq = nextval('pgqueue.jobs_seq')", "attempts = attempts - 2"):
        with refused("PQ409", "attempts of a processing job is 1 and cannot be changed to", column="attempts"):
            q.session.execute(f"update pgqueue.jobs set {became}, {change}")
    assert q.fail(job, retry_in=timedelta(0)) == "failed"
    with refused("PQ409", "attempts", column="attempts"):
        q.session.execute(
            "update pgqueue.jobs set status = 'pending', due_at = null, attempts = 0, seq = nextval('pgqueue.jobs_seq')"
        )
    q.session.execute("update pgqueue.jobs set status = 'pending', due_at = null")
    assert q.claim()[0].attempts == 2


@pytest.mark.parametrize("change", ["idempotency_key = 'b'", "idempotency_key = null", "producer_id = 'other'"])
def test_a_taken_key_stays_with_its_job(q: Verbs, change: str) -> None:
    q.insert(idempotency_key="a", producer_id="p")
    with refused("PQ409", "idempotency key", column=change.partition(" ")[0]):
        q.session.execute(f"update pgqueue.jobs set {change}")
    q.insert(producer_id="p")
    q.session.execute("update pgqueue.jobs set producer_id = 'other' where idempotency_key is null")


@pytest.mark.parametrize("seq", ["9223372036854775807", "0", "-1", "(select last_value + 1 from pgqueue.jobs_seq)"])
def test_a_pending_job_cannot_be_put_at_a_place_that_is_none(q: Verbs, seq: str) -> None:
    first, second = q.insert(), q.insert()
    with refused("PQ422", "seq must be one that pgqueue.jobs_seq has given out", column="seq"):
        q.session.execute(f"update pgqueue.jobs set seq = {seq} where job_id = %s", [first])
    q.session.execute("update pgqueue.jobs set seq = nextval('pgqueue.jobs_seq') where job_id = %s", [first])
    assert [job.job_id for job in q.claim(2)] == [second, first]


def test_counts_out_of_range_from_before_the_rule_harm_nobody(q: Verbs) -> None:
    q.freeze()
    old, other = q.start(queue="old"), q.start(queue="other")
    q.session.execute("set session_replication_role = replica")
    q.session.execute(
        "update pgqueue.jobs_live set lost = 2147483647, uncharged = 2147483647 where job_id = %s", [old.job_id]
    )
    q.session.execute("reset session_replication_role")
    q.advance(minutes=1)
    q.sweep()
    assert (q.job(old.job_id).status, q.job(other.job_id).status) == ("dead_letter", "pending")


def test_what_is_an_operators_to_change_can_be_changed(q: Verbs) -> None:
    changes = [
        "payload = '{\"a\": 1}'", "max_retries = 9", "lost = 0", "timeout_ms = 5", "priority = 1", "error = 'known'",
        "retry_policy = '{}'", "expires_at = now() + interval '1 day'", "errors = '[]'", "progress = '1'",
        "lost = 5", "attempts = attempts", "result = null",
    ]  # fmt: skip
    for status in LIVE:
        job = in_status(q, status)
        for change in changes:
            q.session.execute(f"update pgqueue.jobs set {change} where job_id = %s", [job.job_id])


def test_a_waiting_job_cannot_lose_its_time(q: Verbs) -> None:
    failed, submitted = in_status(q, "failed"), in_status(q, "submitted")
    for job in (failed, submitted):
        with refused("PQ409", "due_at", column="due_at"):
            q.session.execute("update pgqueue.jobs set due_at = null where job_id = %s", [job.job_id])
    keyed = q.start(ordering_key="o")
    q.fail(keyed)
    with refused("PQ409", "due_at", column="due_at"):
        q.session.execute("update pgqueue.jobs set due_at = null where job_id = %s", [keyed.job_id])


def test_a_job_keeps_its_id(q: Verbs) -> None:
    for status in LIVE:
        job = in_status(q, status)
        with refused("PQ409", "job_id", column="job_id"):
            q.session.execute("update pgqueue.jobs set job_id = pgqueue.new_job_id() where job_id = %s", [job.job_id])


def test_checks_hold_for_updates_too(q: Verbs) -> None:
    q.insert()
    with refused("23514", constraint="priority must be 0, 1, 2 or 3"):
        q.session.execute("update pgqueue.jobs set priority = 4")
    with refused("23514", constraint="max_retries must be 0 to 1000000"):
        q.session.execute("update pgqueue.jobs set max_retries = -1")


def test_a_job_made_pending_by_hand_is_claimed_wherever_the_cursor_stands(q: Verbs) -> None:
    ids = [in_status(q, status).job_id for status in ("submitted", "failed", "processing")]
    queues = [q.job(i).queue for i in ids]
    pass_cursors(q, *queues)
    q.session.execute("update pgqueue.jobs set status = 'pending', due_at = null, lease_expires_at = null"
                      " where status in ('submitted', 'failed', 'processing')")  # fmt: skip
    for job_id, queue in zip(ids, queues, strict=True):
        assert q.claim(1, queues=[queue])[0].job_id == job_id


def test_a_change_of_priority_by_hand_is_seen_by_claims(q: Verbs) -> None:
    first = q.insert(priority=3)
    pass_cursors(q, "default")
    assert q.job(first).status == "pending"
    q.session.execute("update pgqueue.jobs set priority = 0 where job_id = %s", [first])
    later = q.insert(priority=0)
    assert [job.job_id for job in q.claim(2)] == [first, later]


@pytest.mark.parametrize("back", ["'-infinity'", "pgqueue.clock() - interval '1 day'"])
def test_a_time_that_is_put_back_means_now(q: Verbs, back: str) -> None:
    q.freeze()
    failed, submitted, running = (in_status(q, status) for status in ("failed", "submitted", "processing"))
    for _ in range(3):
        q.advance(minutes=2)
        q.fill(1, queue="elsewhere")
        q.call("heartbeat", WORKER, [running.job_id], [running.attempts], timedelta(hours=1))
        q.sweep()
    q.session.execute(
        f"update pgqueue.jobs set due_at = {back} where status in ('failed', 'submitted');"
        f"update pgqueue.jobs set lease_expires_at = {back} where status = 'processing'"
    )
    q.sweep()
    assert {q.job(job.job_id).status for job in (failed, submitted, running)} == {"pending"}


def test_many_jobs_are_edited_as_one_is(q: Verbs) -> None:
    jobs = [in_status(q, "pending") for _ in range(3)]
    pass_cursors(q, *(job.queue for job in jobs))
    q.session.execute("update pgqueue.jobs set priority = 0, payload = '{\"edited\": true}' where status = 'pending'")
    for job in jobs:
        assert [(j.job_id, j.payload) for j in q.claim(1, queues=[job.queue])] == [(job.job_id, {"edited": True})]
    with refused("PQ409", "from processing to completed"):
        q.session.execute(
            "update pgqueue.jobs set status = 'completed', lease_expires_at = null where job_id = %s", [jobs[2].job_id]
        )
    assert {q.job(job.job_id).status for job in jobs} == {"processing"}


def test_a_change_of_queue_by_hand_is_seen_by_claims(q: Verbs) -> None:
    first = q.insert(queue="a")
    pass_cursors(q, "b")
    q.session.execute("update pgqueue.jobs set queue = 'b' where job_id = %s", [first])
    assert [job.job_id for job in q.claim(2, queues=["b"])] == [first]


@pytest.mark.parametrize("status", ["pending", "submitted", "failed"])
def test_a_queue_that_appears_by_an_update_is_known_to_those_who_serve_all(q: Verbs, status: str) -> None:
    q.freeze()
    job = in_status(q, status)
    q.sweep()
    q.session.execute("update pgqueue.jobs set queue = 'brand new' where job_id = %s", [job.job_id])
    q.advance(hours=2)
    q.sweep()
    assert [j.queue for j in q.claim(2, queues=None)] == ["brand new"]


def pass_cursors(q: Verbs, *queues: str) -> None:
    """Lets 5,000 other jobs of every priority pass through the queues, so that their cursors rise."""
    for queue in queues:
        q.session.execute(
            "insert into pgqueue.jobs (job_type, queue, priority)"
            " select 'filler', %s, n %% 4 from generate_series(1, 5000) n",
            [queue],
        )
    for _ in range(3):
        q.sweep("cursors")
    for queue in queues:
        while fillers := q.call("claim", WORKER, [queue], 5000, job_types=["filler"]):
            q.complete(fillers)
    for _ in range(3):
        q.sweep("cursors")
        q.fill(1, queue="elsewhere")
    for queue in queues:
        cursors = q.rows("select low_seq from pgqueue.claim_cursors where queue = %s", [queue])
        assert max(row.low_seq for row in cursors) > 5000


def test_only_a_dead_letter_comes_back_and_only_by_retry(q: Verbs) -> None:
    job_id = q.insert()
    dead = kill_by_failing(q, job_id)
    assert (dead.status, q.retry(job_id).status) == ("dead_letter", "pending")
    for status in ("completed", "cancelled"):
        with refused("PQ409", status):
            q.retry(in_status(q, status).job_id)


@pytest.mark.parametrize("column", ["queue", "job_type"])
@pytest.mark.parametrize("name", ["", "x" * 200])
def test_an_update_to_a_bad_name_is_refused(q: Verbs, column: str, name: str) -> None:
    job = q.start()
    for status in ("processing", "pending"):
        with refused("23514", constraint=f"{column} must have 1 to {63 if column == 'queue' else 128} characters"):
            q.session.execute(f"update pgqueue.jobs set {column} = %s", [name])
        assert q.job(job.job_id).status == status
        q.call("release", WORKER, [job.job_id], [job.attempts])
