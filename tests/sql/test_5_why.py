"""why(): the reason why a job is not running now, in one sentence."""

import uuid
from datetime import timedelta
from typing import Any

from tests.sql.test_2_transitions import in_status
from tests.sql.verbs import OTHER, WORKER, Verbs

SECONDS = "select date_trunc('second', %s::timestamptz)::text"
UNKNOWN = uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057")


def a_worker(q: Verbs, worker: uuid.UUID = OTHER, **columns: Any) -> None:
    wanted = {"queues": None, "job_types": None, "priorities": None} | columns
    q.session.execute(
        "select pgqueue.worker_started(%s, 'w-1', 'host', 42, null, %s, %s, %s, 4, '1.0')",
        [worker, wanted["queues"], wanted["job_types"], wanted["priorities"]],
    )


def test_why_of_finished_jobs(q: Verbs) -> None:
    now = q.freeze()
    at = q.value(SECONDS, [now])
    assert q.why(in_status(q, "completed").job_id) == f"It completed at {at}."
    assert q.why(in_status(q, "cancelled").job_id) == f"It was cancelled at {at}."
    assert q.why(in_status(q, "dead_letter").job_id) == (
        f"It is a dead letter since {at} (ValueError: it broke); a retry gives it fresh attempts."
    )


def test_why_of_an_unknown_job(q: Verbs) -> None:
    assert q.why(UNKNOWN) == (
        f"There is no job {UNKNOWN}: it was never enqueued, its transaction has not committed,"
        " or retention has removed it."
    )


def test_why_of_waiting_jobs(q: Verbs) -> None:
    q.freeze()
    job = q.start(retry_policy={"base_delay_ms": 25_000, "jitter": False})
    q.fail(job)
    q.advance(seconds=4)
    assert q.why(job.job_id) == ("Attempt 1 failed (ValueError: it broke); it becomes pending again in 00:21.")
    for delay, text in (
        (timedelta(hours=26, seconds=1), "1 day 02:00:01"),
        (timedelta(seconds=59), "00:59"),
        (timedelta(hours=1), "01:00:00"),
    ):
        assert q.why(q.enqueue(delay=delay).job_id) == f"It is scheduled: it becomes pending in {text}."


def test_why_of_running_jobs(q: Verbs) -> None:
    now = q.freeze()
    at = q.value(SECONDS, [now])
    job = q.start()
    assert q.why(job.job_id) == f"It is running: attempt 1 on worker {WORKER} since {at}."
    a_worker(q, WORKER)
    assert q.why(job.job_id) == f"It is running: attempt 1 on worker w-1 since {at}."
    q.cancel(job.job_id)
    assert q.why(job.job_id) == f"It is running: attempt 1 on worker w-1 since {at}, and was asked to stop."
    q.advance(hours=1)
    expired = q.value("select date_trunc('second', lease_expires_at)::text from pgqueue.jobs")
    assert q.why(job.job_id) == (
        f"Its lease ran out at {expired}: worker w-1 has gone silent, and the next sweep gives the job back."
    )


def test_why_of_pending_jobs(q: Verbs) -> None:
    now = q.freeze()
    at = q.value(SECONDS, [now])
    ids = [q.insert(queue="mail", job_type="send", priority=1) for _ in range(3)]
    assert q.why(ids[0]) == 'No worker serves queue "mail".'
    a_worker(q, queues=["other"])
    assert q.why(ids[0]) == 'No worker serves queue "mail".'
    a_worker(q, queues=["mail"], job_types=["receive"])
    assert q.why(ids[0]) == 'No worker for this type: none that serves queue "mail" has a task for "send".'
    a_worker(q, queues=["mail"], job_types=["send"], priorities=[0])
    assert q.why(ids[0]) == "No worker that could run it takes priority 1 now."
    a_worker(q, queues=["mail"], job_types=["send"])
    assert q.why(ids[0]) == "It waits its turn: 0 jobs of its queue and priority go first."
    assert q.why(ids[1]) == "It waits its turn: 1 job of its queue and priority goes first."
    assert q.why(ids[2]) == "It waits its turn: 2 jobs of its queue and priority go first."
    q.call("worker_seen", OTHER, "draining", 0, 0)
    assert q.why(ids[0]) == "No worker that could run it takes priority 1 now."
    q.call("worker_seen", OTHER, "idle", 0, 0)
    q.advance(minutes=2)
    assert q.why(ids[0]) == 'No worker serves queue "mail".'
    q.call("worker_seen", OTHER, "idle", 0, 0)
    until = q.advance(seconds=0) + timedelta(minutes=1)
    q.session.execute("select pgqueue.pause_job_type('send', %s)", [until])
    assert q.why(ids[0]) == f'Job type "send" is paused until {q.value(SECONDS, [until])}.'
    q.call("pause", "mail")
    paused = q.value("select date_trunc('second', paused_at)::text from pgqueue.queues")
    assert q.why(ids[0]) == f'Queue "mail" is paused since {paused}.'
    expiring = q.insert(expires_at=now)
    assert q.why(expiring) == f"It expired at {at}; the next sweep makes it a dead letter."


def test_why_counts_a_long_line_only_so_far(q: Verbs) -> None:
    a_worker(q)
    q.fill(1500)
    last = q.value("select job_id from pgqueue.jobs order by seq desc limit 1")
    assert q.why(last) == "It waits its turn: more than 1000 jobs of its queue and priority go first."
