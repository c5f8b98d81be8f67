"""Alerts in SQL: what fires when, for how long it must hold, and who is told."""

import uuid

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.sql.verbs import Row, Verbs, kill_by_failing
from tests.sql.watching import count, in_bucket, tick, worker


def alerts(q: Verbs) -> dict[str, Row]:
    return {row.alert: row for row in q.rows("select * from pgqueue.alerts")}


def evaluate(q: Verbs, *, living: bool = True, **by: float) -> list[tuple[str, str]]:
    """Lets time pass and has the sweep evaluate; what it began and ended. Workers and sweeps go on meanwhile."""
    last = q.value("select coalesce(max(event_id), 0) from pgqueue.alert_events")
    q.advance(**by)
    if living:
        lively(q)
    q.sweep("alerts")
    rows = q.rows("select alert, state from pgqueue.alert_events where event_id > %s order by event_id", [last])
    return [(row.alert, row.state) for row in rows]


@pytest.fixture
def calm(q: Verbs) -> Verbs:
    """A stopped clock, two live workers, sweeps that have just run: nothing is wrong."""
    q.freeze()
    lively(q)
    assert alerts(q) == {}
    return q


def lively(q: Verbs) -> None:
    for number in (1, 2):
        worker(q, uuid.UUID(int=number))
    q.session.execute(
        "update pgqueue.workers set last_heartbeat = pgqueue.clock(),"
        " status = case status when 'draining' then status else 'idle' end"
    )
    q.sweep()


def test_dead_letters_warn_and_page(calm: Verbs) -> None:
    calm.session.execute("update pgqueue.alert_rules set threshold = threshold / 100")
    for _ in range(2):
        kill_by_failing(calm, calm.insert())
    assert {alert: row.severity for alert, row in alerts(calm).items()} == {"DeadLettersHigh": "warning"}
    for _ in range(4):
        kill_by_failing(calm, calm.insert())
    assert {alert: row.severity for alert, row in alerts(calm).items()} == {
        "DeadLettersHigh": "warning",
        "DLQBreach": "page",
    }
    assert sorted(evaluate(calm, seconds=10)) == [("DLQBreach", "firing"), ("DeadLettersHigh", "firing")]
    assert evaluate(calm, seconds=10) == []
    calm.call("discard_dead_letters")
    assert alerts(calm) == {}
    assert sorted(evaluate(calm, seconds=10)) == [("DLQBreach", "resolved"), ("DeadLettersHigh", "resolved")]
    assert calm.value("select count(*) from pgqueue.alert_states") == 0


def test_a_backlog_pages_after_ten_minutes(calm: Verbs) -> None:
    calm.session.execute(
        "update pgqueue.alert_rules set threshold = 5 where alert in ('QueueDepthHigh', 'QueueBacklog')"
    )
    calm.session.execute(
        "update pgqueue.alert_rules set enabled = false where alert like '%Age%' or alert = 'StuckJobs'"
    )
    calm.fill(6)
    fired: dict[int, list[tuple[str, str]]] = {}
    for minute in range(13):
        events = evaluate(calm, minutes=1)
        if events:
            fired[minute] = events
    assert fired == {0: [("QueueDepthHigh", "firing")], 10: [("QueueBacklog", "firing")]}
    assert alerts(calm)["QueueBacklog"].queue == "default"
    calm.complete(calm.claim(6))
    assert "QueueBacklog" not in alerts(calm)
    assert set(evaluate(calm, minutes=1)) == {("QueueDepthHigh", "resolved"), ("QueueBacklog", "resolved")}


def test_a_condition_that_ends_before_its_hold_says_nothing(calm: Verbs) -> None:
    calm.session.execute("update pgqueue.alert_rules set threshold = 5 where alert = 'QueueBacklog'")
    calm.fill(6)
    assert evaluate(calm, seconds=30) == []
    calm.complete(calm.claim(6))
    assert evaluate(calm, seconds=30) == []
    assert calm.value("select count(*) from pgqueue.alert_events") == 0


def test_old_jobs_page_but_not_those_of_paused_queues(calm: Verbs) -> None:
    calm.insert()
    calm.insert(queue="stopped")
    calm.call("pause", "stopped")
    calm.advance(seconds=299)
    lively(calm)
    assert alerts(calm) == {}
    calm.advance(seconds=2)
    assert [(alert, row.queue) for alert, row in alerts(calm).items()] == [("QueueAgeHigh", "default")]
    calm.advance(seconds=300)
    lively(calm)
    assert {alert for alert, row in alerts(calm).items() if row.queue == "default"} == {"QueueAgeHigh", "StuckJobs"}


def test_failures_warn_in_a_minute_and_page_after_five(calm: Verbs) -> None:
    first: dict[str, int] = {}
    for second in range(0, 420, 10):
        count(calm, {"completed": 9, "failed": 1})
        tick(calm, seconds=10)
        for alert, state in evaluate(calm, seconds=0.001):
            assert state == "firing"
            first[alert] = second
    assert first["JobsFailedHigh"] == 0
    assert 290 <= first["HighFailureRate"] <= 320
    assert first.keys() == {"JobsFailedHigh", "HighFailureRate"}
    for _ in range(45):
        count(calm, {"completed": 10})
        tick(calm, seconds=10)
        evaluate(calm, seconds=0.001)
    assert alerts(calm) == {}


def test_slow_attempts_warn(calm: Verbs) -> None:
    count(calm, {"completed": 99, "durations": in_bucket(4, 99)})
    tick(calm, seconds=10)
    assert alerts(calm) == {}
    count(calm, {"completed": 2, "durations": in_bucket(13, 2)})
    tick(calm, seconds=10)
    assert list(alerts(calm)) == ["ProcessingTimeHigh"]


def test_workers_that_go(calm: Verbs) -> None:
    calm.session.execute("update pgqueue.workers set status = 'draining' where worker_id = %s", [uuid.UUID(int=1)])
    assert list(alerts(calm)) == ["WorkerCountLow"]
    assert evaluate(calm, seconds=10) == [("WorkerCountLow", "firing")]
    for _ in range(12):
        evaluate(calm, seconds=10)
    assert set(alerts(calm)) == {"WorkerCountLow", "WorkerDown"}


def test_a_queue_that_nobody_serves(calm: Verbs) -> None:
    for number in (1, 2):
        worker(calm, uuid.UUID(int=number), queues=["default"])
    calm.insert(queue="lonely")
    calm.session.execute("update pgqueue.alert_rules set hold = '15 seconds' where alert = 'NoWorkers'")
    calm.advance(seconds=10)
    calm.sweep("alerts")
    assert "NoWorkers" not in alerts(calm)
    calm.advance(seconds=20)
    calm.sweep("alerts")
    assert alerts(calm)["NoWorkers"].queue == "lonely"
    calm.session.execute("update pgqueue.workers set queues = null")
    assert alerts(calm) == {}


def test_a_type_that_no_worker_takes(calm: Verbs) -> None:
    fired = ("NoWorkersForType", "firing")
    calm.insert(queue="some")
    for number in range(7):
        calm.insert(job_type=f"typo {number}", queue="some")
    calm.insert(job_type="halted")
    calm.call("pause_job_type", "halted", calm.value("select pgqueue.clock() + interval '1 hour'"))
    calm.insert(job_type="other", queue="stopped")
    calm.call("pause", "stopped")
    assert fired not in evaluate(calm, seconds=10)
    for _ in range(17):
        assert fired not in evaluate(calm, seconds=10)
    assert fired in evaluate(calm, seconds=10)
    one = alerts(calm)["NoWorkersForType"]
    assert (one.queue, one.severity, one.value) == ("some", "warning", 7)
    assert one.summary == (
        'jobs wait in queue "some" and no worker takes their type: typo 0, typo 1, typo 2, typo 3, typo 4 and 2 more'
    )
    gauge = "select labels ->> 'queue', value from pgqueue.metrics() where name = 'pgqueue_queue_types_without_worker'"
    assert sorted(calm.rows(gauge)) == [("default", 0), ("some", 7), ("stopped", 1)]
    calm.session.execute("update pgqueue.workers set job_types = null where worker_id = %s", [uuid.UUID(int=1)])
    assert ("NoWorkersForType", "resolved") in evaluate(calm, seconds=10, living=False)


def test_a_type_is_not_missed_behind_a_backlog_that_is_taken(calm: Verbs) -> None:
    calm.session.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, 200)")
    calm.insert(job_type="typo")
    calm.sweep()
    assert calm.rows("select * from pgqueue.types_without_worker()") == []
    calm.claim(max_jobs=200, job_types=["t"])
    calm.insert(job_type="t")
    calm.sweep()
    assert calm.rows("select * from pgqueue.types_without_worker()") == [("default", ["typo"])]


def test_busy_workers_warn(calm: Verbs) -> None:
    calm.call("add_counts", uuid.UUID(int=1), 1, 1.0, Jsonb([]))
    calm.call("add_counts", uuid.UUID(int=2), 1, 0.85, Jsonb([]))
    evaluate(calm, seconds=10)
    assert alerts(calm) == {}
    evaluate(calm, seconds=61)
    assert list(alerts(calm)) == ["WorkerUtilizationHigh"]


def test_a_sweep_that_does_not_come(calm: Verbs) -> None:
    calm.advance(seconds=31)
    calm.session.execute("update pgqueue.workers set last_heartbeat = pgqueue.clock()")
    assert list(alerts(calm)) == ["SweeperStale"]


def test_a_transaction_that_stays_open(calm: Verbs, connect: Connect) -> None:
    calm.session.execute("update pgqueue.alert_rules set threshold = 0 where alert = 'LongTransaction'")
    assert alerts(calm) == {}
    other = connect(autocommit=False, application_name="forgotten")
    other.execute("set transaction isolation level repeatable read")
    other.execute("select count(*) from pgqueue.jobs")
    found = alerts(calm)["LongTransaction"]
    assert str(other.info.backend_pid) in found.summary
    assert "forgotten" in found.summary
    other.rollback()
    assert alerts(calm) == {}


def test_the_audit_finds_what_no_claim_would(calm: Verbs) -> None:
    lost = calm.insert()
    calm.sweep()
    calm.sweep("measure")
    assert alerts(calm) == {}
    calm.session.execute("update pgqueue.claim_cursors set low_seq = 1000000 where queue = 'default'")
    calm.advance(minutes=11)
    calm.sweep("measure")
    lively(calm)
    found = alerts(calm)
    assert (found["BelowCursor"].severity, found["BelowCursor"].queue) == ("page", "default")
    assert [job.job_id for job in calm.claim(9)] == [lost]
    calm.sweep("cursors")
    calm.advance(minutes=11)
    calm.sweep("measure")
    lively(calm)
    assert "BelowCursor" not in alerts(calm)


def test_alerts_become_jobs_for_webhooks(calm: Verbs) -> None:
    calm.session.execute(
        "insert into pgqueue.alert_webhooks (url, severity, queue) values"
        " ('http://127.0.0.1:1/all', null, 'ops'), ('https://127.0.0.1:1/pages', 'page', 'ops')"
    )
    calm.session.execute("update pgqueue.alert_rules set threshold = 0 where alert in ('DeadLettersHigh', 'DLQBreach')")
    kill_by_failing(calm, calm.insert())
    evaluate(calm, seconds=10)
    sent = [row.payload for row in calm.rows("select payload from pgqueue.jobs where job_type = 'pgqueue.webhook'")]
    assert sorted((one["url"], one["body"]["alert"]) for one in sent) == [
        ("http://127.0.0.1:1/all", "DLQBreach"),
        ("http://127.0.0.1:1/all", "DeadLettersHigh"),
        ("https://127.0.0.1:1/pages", "DLQBreach"),
    ]
    assert all(one["body"]["state"] == "firing" for one in sent)


def test_webhooks_that_fail_raise_no_alerts(calm: Verbs) -> None:
    calm.session.execute("update pgqueue.alert_rules set threshold = 0 where alert in ('DeadLettersHigh', 'DLQBreach')")
    kill_by_failing(calm, calm.insert(job_type="pgqueue.webhook", queue="ops"), "ops")
    count(calm, {"queue": "ops", "job_type": "pgqueue.webhook", "failed": 9, "dead_letter": 1})
    tick(calm, seconds=10)
    assert alerts(calm) == {}
    kill_by_failing(calm, calm.insert(queue="ops"), "ops")
    count(calm, {"queue": "ops", "failed": 1})
    tick(calm, seconds=10)
    found = alerts(calm)
    assert found.keys() >= {"JobsFailedHigh", "DeadLettersHigh", "DLQBreach"}
    assert found["JobsFailedHigh"].summary == 'queue "ops": 1 of 1 attempts failed in a minute'
    assert found["DLQBreach"].value == 1


def test_summaries_say_what_people_read(calm: Verbs) -> None:
    calm.insert()
    calm.session.execute("update pgqueue.workers set status = 'draining' where worker_id = %s", [uuid.UUID(int=1)])
    assert alerts(calm)["WorkerCountLow"].summary == "1 live worker, 2 wanted"
    calm.advance(seconds=1636)
    lively(calm)
    assert alerts(calm)["StuckJobs"].summary == 'queue "default": the oldest pending job has waited for 27 min'


def test_only_web_addresses_are_webhooks(q: Verbs) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        q.session.execute("insert into pgqueue.alert_webhooks (url) values ('file:///etc/passwd')")


def test_rules_can_be_changed_and_switched_off(calm: Verbs) -> None:
    calm.session.execute(
        "update pgqueue.alert_rules set enabled = false where alert in ('WorkerCountLow', 'WorkerDown')"
    )
    calm.session.execute("delete from pgqueue.workers")
    assert alerts(calm) == {}
