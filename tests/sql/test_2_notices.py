"""Notices: status events only while somebody watches, bells only for workers that wait."""

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import Connect
from tests.meet import wait_until
from tests.sql.verbs import OTHER, WORKER, Verbs, kill_by_failing

WATCHER = uuid.UUID("00000000-0000-4000-8000-0000000000aa")
Events = list[dict[str, Any]]


class Ear:
    """A session that listens; heard() answers all that was sent until now, by commit order."""

    def __init__(self, connect: Connect, *channels: str) -> None:
        self._session, self._marker = connect(), connect()
        self._notices: list[psycopg.Notify] = []
        self._session.add_notify_handler(self._notices.append)
        for channel in (*channels, "until now"):
            self._session.execute(psycopg.sql.SQL("listen {}").format(psycopg.sql.Identifier(channel)))

    def heard(self) -> list[tuple[str, str]]:
        self._marker.execute("""notify "until now" """)
        wait_until(self._marked, 30)
        told = [(notice.channel, notice.payload) for notice in self._notices]
        place = told.index(("until now", ""))
        # What came after the marker is for the next time.
        del self._notices[: place + 1]
        return told[:place]

    def _marked(self) -> bool:
        self._session.execute("select")
        return any(notice.channel == "until now" for notice in self._notices)


class StatusEar(Ear):
    def __init__(self, connect: Connect) -> None:
        super().__init__(connect, "pgqueue_status")

    def events(self) -> Events:
        events: Events = []
        for _, payload in self.heard():
            assert len(payload.encode()) < 8000
            batch = json.loads(payload)
            assert isinstance(batch, list)
            events += batch
        return events

    def changes(self) -> list[tuple[str, Any, Any, int]]:
        return [(e["event"], e["from"], e["to"], e["attempt"]) for e in self.events()]


@pytest.fixture
def ear(connect: Connect) -> StatusEar:
    return StatusEar(connect)


@pytest.fixture
def watched(q: Verbs, ear: StatusEar) -> Verbs:
    """The verbs, on a database that is watched, at a clock that stands still."""
    q.freeze()
    q.session.execute("select pgqueue.watch(%s, '10 hours')", [WATCHER])
    return q


def let_producers_speak(q: Verbs) -> None:
    """Producers share twenty notices a second; this frees the present one."""
    q.session.execute("select setval('pgqueue.notice_slot', 1)")


def test_an_event_says_what_happened_to_which_job(watched: Verbs, ear: StatusEar) -> None:
    job_id = watched.insert(queue="mail", job_type="send", payload={"secret": 1}, idempotency_key="k")
    (event,) = ear.events()
    at = event.pop("at")
    assert event == {
        "event": "job.queued", "job_id": str(job_id), "queue": "mail", "job_type": "send", "from": None,
        "to": "pending", "attempt": 0,
    }  # fmt: skip
    assert watched.value("select %s::timestamptz = pgqueue.clock()", [at])


def test_every_door_of_enqueue_speaks(watched: Verbs, ear: StatusEar) -> None:
    doors: list[Callable[[], Any]] = [
        watched.insert, watched.enqueue, lambda: watched.enqueue_many({"job_type": "t"}), lambda: watched.fill(1),
    ]  # fmt: skip
    for door in doors:
        let_producers_speak(watched)
        door()
        assert ear.changes() == [("job.queued", None, "pending", 0)]
    let_producers_speak(watched)
    watched.enqueue(delay=timedelta(hours=1))
    assert ear.changes() == [("job.submitted", None, "submitted", 0)]


def test_each_transition_has_its_event(watched: Verbs, ear: StatusEar, subtests: pytest.Subtests) -> None:
    q = watched
    first, second, third = (q.enqueue(priority=p).job_id for p in (2, 2, 0))
    ear.heard()
    jobs = {job.job_id: job for job in q.claim(3, lease=timedelta(days=1))}
    with subtests.test("started, in the order of the claim"):
        assert [(e["event"], e["job_id"]) for e in ear.events()] == [
            ("job.started", str(i)) for i in (third, first, second)
        ]
    q.complete([jobs[first]])
    with subtests.test("completed"):
        assert ear.changes() == [("job.completed", "processing", "completed", 1)]
    q.fail(jobs[second])
    with subtests.test("failed"):
        assert ear.changes() == [("job.failed", "processing", "failed", 1)]
    q.advance(minutes=1)
    q.sweep()
    with subtests.test("retry is due"):
        assert ear.changes() == [("job.queued", "failed", "pending", 1)]
    q.fail(q.claim()[0])
    ear.heard()
    q.retry(second)
    with subtests.test("retry now"):
        assert ear.changes() == [("job.queued", "failed", "pending", 2)]
    q.snooze(q.claim()[0], timedelta(minutes=1))
    with subtests.test("snoozed"):
        assert ear.changes()[1:] == [("job.submitted", "processing", "submitted", 3)]
    q.advance(minutes=1)
    q.sweep()
    with subtests.test("due"):
        assert ear.changes() == [("job.queued", "submitted", "pending", 3)]
    q.release(q.claim())
    with subtests.test("released"):
        assert ear.changes()[1:] == [("job.released", "processing", "pending", 4)]
    q.claim()
    ear.heard()
    q.advance(hours=1)
    q.sweep("leases")
    with subtests.test("lease lost"):
        assert ear.changes() == [("job.released", "processing", "pending", 4)]
    q.fail(q.claim()[0], retryable=False)
    with subtests.test("a final failure is two events"):
        assert ear.changes()[1:] == [
            ("job.failed", "processing", "failed", 5), ("job.dead_letter", "failed", "dead_letter", 5),
        ]  # fmt: skip
    q.retry(second)
    with subtests.test("retried"):
        assert ear.changes() == [("job.queued", "dead_letter", "pending", 5)]
    q.cancel(second)
    with subtests.test("cancelled"):
        assert ear.changes() == [("job.cancelled", "pending", "cancelled", 5)]
    q.cancel(third)
    assert ear.heard() == []
    q.complete([jobs[third]])
    with subtests.test("cancelled while it ran"):
        assert ear.changes() == [("job.cancelled", "processing", "cancelled", 1)]


def test_a_pending_job_that_expires_was_not_failed(watched: Verbs, ear: StatusEar) -> None:
    watched.insert(expires_at=watched.advance(seconds=0) + timedelta(seconds=1))
    ear.heard()
    watched.advance(seconds=2)
    watched.sweep()
    assert ear.changes() == [("job.dead_letter", "pending", "dead_letter", 0)]


def test_a_job_lost_too_often_ends_with_two_events(watched: Verbs, ear: StatusEar) -> None:
    watched.session.execute("insert into pgqueue.queues (name, max_lost) values ('default', 0)")
    watched.start()
    ear.heard()
    watched.advance(hours=1)
    watched.sweep()
    assert ear.changes() == [
        ("job.failed", "processing", "failed", 1), ("job.dead_letter", "failed", "dead_letter", 1)
    ]  # fmt: skip


def test_dead_letters_retried_in_bulk_are_told(watched: Verbs, ear: StatusEar) -> None:
    ids = set()
    for _ in range(3):
        ids.add(str(kill_by_failing(watched, watched.insert()).job_id))
    ear.heard()
    watched.call("retry_dead_letters")
    events = ear.events()
    assert {e["job_id"] for e in events} == ids
    assert {(e["event"], e["from"], e["to"]) for e in events} == {("job.queued", "dead_letter", "pending")}


def test_the_next_of_a_key_is_told_when_it_becomes_head(watched: Verbs, ear: StatusEar) -> None:
    first = watched.insert(ordering_key="o")
    assert ear.changes() == [("job.queued", None, "pending", 0)]
    let_producers_speak(watched)
    second = watched.insert(ordering_key="o")
    assert ear.changes() == [("job.submitted", None, "submitted", 0)]
    watched.complete(watched.claim())
    by_job = [(e["job_id"], e["event"]) for e in ear.events()]
    assert (str(first), "job.completed") in by_job
    assert (str(second), "job.queued") in by_job


def test_a_waiting_job_that_the_sweep_makes_head_is_told(watched: Verbs, ear: StatusEar) -> None:
    first, second = watched.insert(ordering_key="o"), watched.insert(ordering_key="o")
    watched.session.execute("delete from pgqueue.jobs_live where job_id = %s", [first])
    ear.heard()
    watched.sweep()
    assert [(e["job_id"], e["event"], e["from"], e["to"]) for e in ear.events()] == [
        (str(second), "job.queued", "submitted", "pending")
    ]


def whole_life(q: Verbs) -> None:
    q.insert()
    q.enqueue(ordering_key="o")
    q.enqueue(ordering_key="o")
    q.enqueue(delay=timedelta(seconds=1))
    jobs = q.claim(2)
    q.complete(jobs[:1])
    q.fail(jobs[1], retryable=False)
    q.retry(jobs[1].job_id)
    q.cancel(jobs[1].job_id)
    q.release(q.claim())
    q.snooze(q.claim()[0])
    q.advance(hours=1)
    q.sweep()
    q.claim(9)
    q.advance(hours=1)
    q.sweep()


def test_without_a_watcher_there_is_no_event(q: Verbs, ear: StatusEar) -> None:
    q.freeze()
    whole_life(q)
    assert ear.heard() == []
    q.session.execute("select pgqueue.watch(%s, '1 minute')", [WATCHER])
    q.advance(minutes=2)
    whole_life(q)
    assert ear.heard() == []
    q.session.execute("select pgqueue.watch(%s, '10 hours')", [WATCHER])
    q.session.execute("select pgqueue.unwatch(%s)", [WATCHER])
    whole_life(q)
    assert ear.heard() == []
    q.session.execute("select pgqueue.watch(%s, '10 hours')", [WATCHER])
    whole_life(q)
    assert len(ear.events()) > 10


def test_watching_again_lasts_longer(q: Verbs, ear: StatusEar) -> None:
    q.freeze()
    for _ in range(3):
        q.session.execute("select pgqueue.watch(%s, '1 minute')", [WATCHER])
        q.advance(seconds=50)
        let_producers_speak(q)
        q.insert()
        assert len(ear.events()) == 1
    assert q.value("select count(*) from pgqueue.watchers") == 1


def test_one_watcher_of_two_is_enough(watched: Verbs, ear: StatusEar) -> None:
    watched.session.execute("select pgqueue.watch(%s, '1 hour')", [OTHER])
    watched.session.execute("select pgqueue.unwatch(%s)", [OTHER])
    watched.insert()
    assert len(ear.events()) == 1


def test_what_is_rolled_back_is_not_told(watched: Verbs, ear: StatusEar) -> None:
    with watched.session.transaction(force_rollback=True):
        watched.insert()
        watched.claim()
    assert ear.heard() == []


def test_a_batch_is_told_in_notices_that_notify_can_carry(watched: Verbs, ear: StatusEar) -> None:
    watched.fill(150, job_type="\x01" * 128, queue="\N{ROCKET}" * 63)
    assert len(ear.events()) == 150
    jobs = watched.claim(150, queues=["\N{ROCKET}" * 63])
    assert [e["job_id"] for e in ear.events()] == [str(job.job_id) for job in jobs]
    watched.complete(jobs)
    assert {e["job_id"] for e in ear.events()} == {str(job.job_id) for job in jobs}


def test_a_statement_of_very_many_asks_to_read_again(watched: Verbs, ear: StatusEar) -> None:
    watched.fill(20_000)
    told = ear.events()
    assert {"event": "resync"} in told
    assert len(told) < 5000
    watched.claim(20_000)
    assert ear.events()[-1] == {"event": "resync"}


@pytest.mark.parametrize("text", ["x" * 7900, "x" * 8000, "x" * 1_000_000, "\N{CYRILLIC SMALL LETTER YA}" * 4000])
def test_the_size_of_a_payload_does_not_matter(watched: Verbs, ear: StatusEar, text: str) -> None:
    watched.session.execute("select pgqueue.wait_for_work(%s, null, null, 'bell')", [WORKER])
    watched.insert(payload={"text": text})
    (job,) = watched.claim()
    watched.set_progress(job, text)
    assert watched.fail(job, {"type": text, "message": text, "traceback": text}) == "failed"
    watched.retry(job.job_id)
    (job,) = watched.claim()
    watched.complete([job], [text])
    notices = ear.heard()
    assert len(notices) == 6
    assert all(len(payload.encode()) < 1000 for _, payload in notices)
    assert watched.job(job.job_id).result == text


def test_producers_share_twenty_notices_a_second(watched: Verbs, ear: StatusEar) -> None:
    (begun,) = watched.one("select extract(epoch from clock_timestamp())")
    for _ in range(300):
        watched.insert()
    (ended,) = watched.one("select extract(epoch from clock_timestamp())")
    assert 1 <= len(ear.heard()) <= float(ended - begun) * 20 + 2
    jobs = watched.claim(300)
    ear.heard()
    for job in jobs[:50]:
        watched.complete([job])
    assert len(ear.heard()) == 50


def test_a_silent_session_sends_no_event_for_its_enqueues(watched: Verbs, ear: StatusEar) -> None:
    watched.session.execute("set pgqueue.wake = off")
    watched.insert()
    assert ear.heard() == []
    watched.session.execute("set pgqueue.wake = on")
    watched.insert()
    assert len(ear.heard()) == 1


def test_progress_is_no_event(watched: Verbs, ear: StatusEar) -> None:
    job = watched.start()
    ear.heard()
    watched.session.execute("select pgqueue.set_progress(%s, %s, 1, %s)", [WORKER, job.job_id, Jsonb({"done": 1})])
    watched.heartbeat([job])
    assert ear.heard() == []
