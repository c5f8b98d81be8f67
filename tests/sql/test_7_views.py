"""What psql, REST and metrics read."""

from datetime import timedelta
from typing import Any

from tests.sql.verbs import OTHER, WORKER, Verbs, kill_by_failing


def test_job_results_has_jobs_that_ended_or_failed(q: Verbs) -> None:
    q.freeze()
    completed, failed, dead, cancelled = (q.start() for _ in range(4))
    running = q.start()
    q.insert()
    now = q.advance(seconds=2.5)
    q.complete([completed], [{"n": 1}])
    q.fail(failed)
    q.fail(dead, retryable=False)
    q.cancel_attempt(cancelled)
    results = {row.job_id: row for row in q.rows("select * from pgqueue.job_results")}
    assert set(results) == {completed.job_id, failed.job_id, dead.job_id, cancelled.job_id}
    row = results[completed.job_id]
    assert row == (completed.job_id, "completed", {"n": 1}, None, 2500, WORKER, now)
    assert row._fields == ("job_id", "status", "result", "error", "duration_ms", "worker_id", "completed_at")
    row = results[dead.job_id]
    assert (row.status, row.result, row.error, row.duration_ms) == ("dead_letter", None, "ValueError: it broke", 2500)
    assert (results[failed.job_id].completed_at, results[failed.job_id].duration_ms) == (None, 2500)
    assert running.job_id not in results


def test_dead_letters_has_all_a_human_needs(q: Verbs) -> None:
    now = q.freeze()
    dead = kill_by_failing(q, q.insert(payload={"to": "a"}, producer_id="web", priority=1, idempotency_key="k"))
    row = q.one("select * from pgqueue.dead_letters")
    wanted = {
        "job_id": dead.job_id, "queue": "default", "job_type": "t", "payload": {"to": "a"}, "priority": 1,
        "attempts": 1, "error": "ValueError: it broke", "errors": dead.errors, "producer_id": "web", "created_at": now,
        "died_at": now, "idempotency_key": "k", "worker_id": WORKER,
    }  # fmt: skip
    assert {name: getattr(row, name) for name in wanted} == wanted


def stats(q: Verbs) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row.queue, row.priority): row._asdict() for row in q.rows("select * from pgqueue.queue_stats")}


def test_queue_stats_counts_by_queue_priority_and_status(q: Verbs) -> None:
    q.freeze()
    q.fill(3, priority=1)
    first, second, _ = q.claim(3)
    q.fail(first)
    q.release([second])
    q.fill(4, queue="other")
    q.enqueue(queue="other", delay=timedelta(hours=1))
    q.call("pause", "other")
    q.sweep()
    q.advance(seconds=20)
    found = stats(q)
    assert set(found) == {("default", 1), ("other", 2)}
    names = ("submitted", "pending", "processing", "failed")
    assert [found["default", 1][name] for name in names] == [0, 1, 1, 1]
    assert [found["other", 2][name] for name in names] == [1, 4, 0, 0]
    assert (found["default", 1]["paused"], found["other", 2]["paused"]) == (False, True)
    assert float(found["other", 2]["oldest_pending_seconds"]) == 20


def test_stuck_jobs_are_those_a_sweep_should_have_moved(q: Verbs) -> None:
    q.freeze()
    lost = q.start()
    due = q.enqueue(delay=timedelta(seconds=30)).job_id
    q.advance(seconds=39)
    assert q.rows("select * from pgqueue.stuck_jobs") == []
    q.advance(seconds=2)
    found = {row.job_id: row.problem for row in q.rows("select * from pgqueue.stuck_jobs")}
    assert found == {
        lost.job_id: "its lease ran out and no sweep has come by", due: "it is due and no sweep has come by",
    }  # fmt: skip
    q.sweep()
    assert q.rows("select * from pgqueue.stuck_jobs") == []


def test_workers_are_live_for_a_minute_after_each_sign_of_life(q: Verbs) -> None:
    q.freeze()
    for worker in (WORKER, OTHER):
        q.session.execute(
            "select pgqueue.worker_started(%s, 'w', 'host', 7, 'g', '{a,b}', '{t}', '{0,1}', 8, '1.2')", [worker]
        )

    def live() -> set[Any]:
        return {row.worker_id for row in q.rows("select worker_id from pgqueue.live_workers")}

    row = q.one("select * from pgqueue.workers where worker_id = %s", [WORKER])
    wanted = {
        "name": "w", "hostname": "host", "pid": 7, "group_name": "g", "queues": ["a", "b"], "job_types": ["t"],
        "priorities": [0, 1], "concurrency": 8, "status": "starting", "jobs_processed": 0, "jobs_failed": 0,
        "last_heartbeat": q.now, "started_at": q.now, "version": "1.2",
    }  # fmt: skip
    assert {name: getattr(row, name) for name in wanted} == wanted
    assert live() == {WORKER, OTHER}
    q.advance(seconds=59)
    assert q.call_value("worker_seen", OTHER, "active", 5, 2) is True
    q.advance(seconds=2)
    assert live() == {OTHER}
    row = q.one("select * from pgqueue.workers where worker_id = %s", [OTHER])
    assert (row.status, row.jobs_processed, row.jobs_failed) == ("active", 5, 2)
    q.call("worker_stopped", OTHER)
    assert live() == set()
    assert q.value("select status from pgqueue.workers where worker_id = %s", [OTHER]) == "stopped"
    q.session.execute("delete from pgqueue.workers")
    assert q.call_value("worker_seen", OTHER, "active", 5, 2) is False


def test_schema_version_is_the_revision(q: Verbs) -> None:
    assert q.call_value("schema_version") == "0001"


def test_jobs_that_come_back_do_not_make_a_line_look_young(q: Verbs) -> None:
    q.freeze()
    q.fill(5)
    q.advance(minutes=10)
    q.release(q.claim(2))
    (row,) = q.rows("select * from pgqueue.queue_stats")
    assert (row.pending, row.oldest_pending_seconds) == (5, 600)
