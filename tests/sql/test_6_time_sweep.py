"""What time does to jobs: due, expired, beyond their timeout; and the sweep's steps: bounded, alone when they fail."""

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.conftest import Connect
from tests.sql.verbs import OTHER, Row, Verbs, kill_by_failing, refused

DAY = timedelta(days=1)


def set_queue(q: Verbs, name: str = "default", **settings: Any) -> None:
    columns = {"name": name, **settings}
    q.session.execute(
        sql.SQL("insert into pgqueue.queues ({}) values ({})").format(
            sql.SQL(", ").join(map(sql.Identifier, columns)), sql.SQL(", ").join([sql.Placeholder()] * len(columns))
        ),
        list(columns.values()),
    )


def step(q: Verbs, name: str, max_jobs: int = 2000, patience: float = 1.0, patient: bool = True) -> Row:
    return q.one(
        "select jobs, problem from pgqueue.sweep_step(%s, %s, make_interval(secs => %s), %s)",
        [name, max_jobs, patience, patient],
    )


def noted(q: Verbs, name: str) -> Row:
    return q.one("select * from pgqueue.sweep_steps where step = %s", [name])


# Due ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheduled", "waits"), [
    ({"delay": timedelta(0)}, False), ({"delay": timedelta(seconds=0.2)}, True),
    ({"delay": timedelta(days=36500)}, True),
])  # fmt: skip
def test_delays(q: Verbs, scheduled: dict[str, Any], waits: bool) -> None:
    now = q.freeze()
    job = q.enqueue(**scheduled)
    assert (job.status, job.due_at) == (("submitted", now + scheduled["delay"]) if waits else ("pending", None))
    q.freeze(now + scheduled["delay"])
    q.sweep("due")
    assert q.job(job.job_id).status == "pending"


def test_a_past_time_is_now_and_impossible_ones_are_refused(q: Verbs) -> None:
    now = q.freeze()
    assert q.enqueue(scheduled_at=now - DAY).status == "pending"
    assert q.enqueue(scheduled_at=now).status == "pending"
    with refused("PQ422"):
        q.enqueue(delay=timedelta(seconds=-1))
    for word in ("infinity", "-infinity", "10000-01-01 00:00+00", "9999-12-31 23:59:59+00"):
        with refused("23514"):
            q.session.execute("insert into pgqueue.jobs (job_type, scheduled_at) values ('t', %s)", [word])
    q.session.execute("insert into pgqueue.jobs (job_type, scheduled_at) values ('t', '9998-12-31 22:59-01')")
    q.sweep("due")
    assert q.value("select count(*) from pgqueue.jobs where status = 'submitted'") == 1


def test_due_jobs_join_the_tail_in_the_order_in_which_they_were_due(q: Verbs) -> None:
    q.freeze()
    late = q.enqueue(delay=timedelta(seconds=3)).job_id
    early = q.enqueue(delay=timedelta(seconds=1)).job_id
    retried = q.start().job_id
    q.fail(q.job(retried), retry_in=timedelta(seconds=2))
    waiting = q.insert()
    later = q.enqueue(delay=timedelta(seconds=6)).job_id
    q.advance(seconds=5)
    assert step(q, "due") == (3, None)
    assert [job.job_id for job in q.claim(9)] == [waiting, early, retried, late]
    assert q.job(later).status == "submitted"


@pytest.mark.parametrize("what", ["due", "leases"])
def test_a_backlog_beyond_one_sweep_is_never_swept_past(q: Verbs, what: str) -> None:
    """Sweeps remember up to when they looked; that must not go beyond what they have left for the next one."""
    q.freeze()
    if what == "due":
        q.session.execute(
            "insert into pgqueue.jobs (job_type, scheduled_at)"
            " select 't', pgqueue.clock() + interval '1 second' from generate_series(1, 900)"
        )
    else:
        q.fill(900)
        q.sweep("cursors")
        q.claim(900)
    q.advance(minutes=30)
    done = 0
    for _ in range(12):
        q.sweep("cursors")
        done += step(q, what, 100).jobs
        # A minute and more passes between sweeps that are slow, or starved.
        q.advance(minutes=2)
        q.insert(queue="elsewhere")
    assert done == 900


@pytest.mark.parametrize("retry_in", [timedelta(days=30), timedelta(days=7)])
def test_a_job_that_is_failed_for_too_long_is_a_dead_letter(q: Verbs, retry_in: timedelta) -> None:
    q.freeze()
    early, late = q.start(queue="a"), q.start(queue="b")
    set_queue(q, "c", failed_ttl=timedelta(hours=1))
    short = q.start(queue="c")
    assert q.fail(early, retry_in=timedelta(days=6)) == "failed"
    assert q.fail(late, retry_in=retry_in) == "failed"
    assert q.fail(short, retry_in=retry_in) == "failed"
    q.advance(hours=1)
    q.sweep("due")
    assert [q.job(job.job_id).status for job in (early, late, short)] == ["failed", "failed", "dead_letter"]
    q.advance(days=7)
    q.sweep("due")
    assert q.job(early.job_id).status == "pending"
    assert q.job(late.job_id).status == "dead_letter"
    assert "it broke" in q.job(late.job_id).error


# Expiry ---------------------------------------------------------------------------------------------------------------


def test_a_job_that_waits_too_long_is_a_dead_letter_that_says_so(q: Verbs) -> None:
    now = q.freeze()
    set_queue(q, "quick", pending_ttl=timedelta(minutes=10))
    usual, quick = q.insert(), q.insert(queue="quick")
    mine = q.enqueue(expires_at=now + timedelta(minutes=5)).job_id
    far = q.enqueue(expires_at=now + timedelta(days=9)).job_id
    q.sweep("cursors")
    for minutes, expired in [(4, set()), (1, {mine}), (5, {mine}), (1, {mine, quick}), (1440, {mine, quick, usual})]:
        q.advance(minutes=minutes)
        q.sweep("expired")
        assert {job for job in (usual, quick, mine, far) if q.job(job).status == "dead_letter"} == expired, minutes
    assert all("expired" in q.job(job).error for job in (usual, quick, mine))
    q.advance(days=8)
    q.sweep("expired")
    assert q.job(far).status == "dead_letter"


def test_a_retry_clears_what_had_expired(q: Verbs) -> None:
    now = q.freeze()
    job = q.enqueue(expires_at=now + timedelta(minutes=5)).job_id
    q.advance(minutes=6)
    q.sweep()
    assert q.retry(job).expires_at is None
    q.advance(hours=23)
    q.sweep()
    assert q.job(job).status == "pending"


def test_a_pause_stops_the_clock_but_not_a_date(q: Verbs) -> None:
    now = q.freeze()
    usual = q.insert()
    dated = q.enqueue(expires_at=now + timedelta(hours=30)).job_id
    q.sweep("cursors")
    q.advance(hours=23)
    q.call("pause", "default")
    q.advance(hours=48)
    q.sweep("expired")
    assert (q.job(usual).status, q.job(dated).status) == ("pending", "dead_letter")
    q.call("resume", "default")
    q.advance(minutes=50)
    q.sweep("expired")
    assert q.job(usual).status == "pending"
    q.advance(minutes=11)
    q.sweep("expired")
    assert q.job(usual).status == "dead_letter"


def test_what_counts_is_when_it_became_pending(q: Verbs) -> None:
    q.freeze()
    delayed = q.enqueue(delay=timedelta(hours=20)).job_id
    lost = q.start(queue="lost").job_id
    q.sweep("cursors")
    q.advance(hours=20)
    q.sweep("due", "leases")
    q.advance(hours=23)
    q.sweep("expired")
    assert (q.job(delayed).status, q.job(lost).status) == ("pending", "pending")
    q.advance(hours=2)
    q.sweep("expired")
    assert (q.job(delayed).status, q.job(lost).status) == ("dead_letter", "dead_letter")


def test_jobs_with_a_date_of_their_own_do_not_hide_those_behind_them(q: Verbs) -> None:
    now = q.freeze()
    q.fill(300, "dated", expires_at=(now + timedelta(days=30)).isoformat())
    q.fill(250)
    q.sweep("cursors")
    q.advance(hours=25)
    assert step(q, "expired") == (250, None)


def test_beyond_its_timeout_an_attempt_fails_though_its_worker_renews_the_lease(q: Verbs) -> None:
    q.freeze()
    set_queue(q, "slow", timeout_ms=3_600_000)
    usual, slow = q.start(queue="a"), q.start(queue="slow")
    own = q.start(queue="b", timeout_ms=60_000)
    asked = q.start(queue="c", timeout_ms=60_000)
    last = q.start(queue="d", timeout_ms=60_000, max_retries=0)
    for job in (usual, slow, own, asked, last):
        q.heartbeat([job], lease=DAY)
    assert q.cancel(asked.job_id) == "cancel_requested"
    q.advance(seconds=65)
    assert step(q, "timeouts") == (0, None)
    q.advance(seconds=10)
    assert step(q, "timeouts") == (3, None)
    assert [q.job(job.job_id).status for job in (usual, slow, own, asked, last)] == [
        "processing", "processing", "failed", "cancelled", "dead_letter",
    ]  # fmt: skip
    record = q.job(own.job_id).errors[0]
    assert (record["type"], record["retryable"], record["attempt"]) == ("TimeoutError", True, 1)
    assert "(60.0 s)" in record["message"]
    assert q.heartbeat([own]) == {(own.job_id, 1): "lost"}
    assert q.complete([own]) == set()
    q.advance(minutes=15)
    step(q, "timeouts")
    assert [q.job(job.job_id).status for job in (usual, slow)] == ["failed", "processing"]
    q.advance(minutes=45)
    step(q, "timeouts")
    assert q.job(slow.job_id).status == "failed"


def test_a_paused_queue_lets_time_pass_but_nothing_start(q: Verbs) -> None:
    """One runs, ten wait, five are due, three are in back-off, one lost its worker."""
    q.freeze()
    q.fill(5)
    running, _, *failing = q.claim(5)
    for job in failing:
        q.fail(job)
    q.fill(10)
    for _ in range(5):
        q.enqueue(delay=timedelta(seconds=2))
    q.call("pause", "default")
    q.heartbeat([running], lease=DAY)
    for _ in range(5):
        q.advance(minutes=1)
        q.sweep()
        assert q.claim(99, OTHER) == []
    assert q.value("select count(*) from pgqueue.jobs where status = 'pending'") == 19
    assert q.complete([running])
    q.call("resume", "default")
    assert len(q.claim(99, OTHER)) == 19


# The steps ------------------------------------------------------------------------------------------------------------


def test_a_step_that_fails_is_noted_tried_a_little_later_and_stops_no_other(q: Verbs) -> None:
    q.freeze()
    q.sweep()
    q.session.execute("alter table pgqueue.schedule_fires rename to gone")
    due = q.enqueue(delay=timedelta(seconds=5)).job_id
    for failures in range(1, 12):
        q.advance(seconds=1)
        if failures < 11:
            with Warned(q) as warnings:
                done = {row.step for row in q.call("sweep")}
            assert {"cursors", "leases", "keys"} <= done
            assert any("sweep step prune failed" in warning for warning in warnings)
            row = noted(q, "prune")
            assert (row.failures, "schedule_fires" in row.last_error) == (failures, True)
    assert step(q, "prune") == (0, 'relation "pgqueue.schedule_fires" does not exist')
    # For a second or so others leave it alone; who asks for it by name gets it.
    assert step(q, "prune") == (None, None)
    assert step(q, "prune", patient=False).problem is not None
    q.session.execute("alter table pgqueue.gone rename to schedule_fires")
    q.advance(seconds=2)
    assert step(q, "prune") == (0, None)
    row = noted(q, "prune")
    assert (row.failures, row.last_error, row.retry_at) == (0, None, None)
    q.sweep("due")
    assert q.job(due).status == "pending"


class Warned:
    """The warnings that the server sends meanwhile."""

    def __init__(self, q: Verbs) -> None:
        self._session, self.warnings = q.session, list[str]()

    def _keep(self, notice: psycopg.errors.Diagnostic) -> None:
        self.warnings.append(notice.message_primary or "")

    def __enter__(self) -> list[str]:
        self._session.add_notice_handler(self._keep)
        return self.warnings

    def __exit__(self, *exc: object) -> None:
        self._session.remove_notice_handler(self._keep)


def test_one_works_at_a_step_and_others_go_on(q: Verbs, connect: Connect) -> None:
    other = Verbs(connect())
    with q.session.transaction():
        assert step(q, "due").jobs == 0
        assert step(other, "due") == (None, None)
        assert step(other, "leases").jobs == 0
        assert "due" not in {row.step for row in other.call("sweep")}
    assert step(other, "due").jobs == 0
    with refused("PQ422", "no step"):
        step(q, "nonsense")


@pytest.mark.parametrize("what", ["due", "leases", "timeouts", "expired"])
def test_a_step_ends_in_time_and_leaves_the_rest(q: Verbs, what: str) -> None:
    now = q.freeze()
    if what == "due":
        q.session.execute(
            "insert into pgqueue.jobs (job_type, scheduled_at)"
            " select 't', pgqueue.clock() + interval '1 second' from generate_series(1, 1200)"
        )
    else:
        q.fill(1200, expires_at=(now + timedelta(minutes=59)).isoformat() if what == "expired" else None)
        if what != "expired":
            q.sweep("cursors")
            q.claim(1200, lease=DAY if what == "timeouts" else timedelta(seconds=30))
    q.advance(hours=1)
    first = step(q, what, patience=0).jobs
    assert 1 <= first <= 500
    assert step(q, what, 100).jobs == 100
    while step(q, what).jobs:
        pass
    assert q.value("select sum(jobs) from pgqueue.sweep_steps where step = %s", [what]) == 1200


def test_one_locked_row_holds_up_nothing(q: Verbs, connect: Connect) -> None:
    q.freeze()
    jobs = [q.enqueue(delay=timedelta(seconds=1)).job_id for _ in range(5)]
    q.advance(minutes=5)
    other = connect()
    with other.transaction():
        other.execute("select from pgqueue.jobs_live where job_id = %s for update", [jobs[0]])
        assert step(q, "due") == (4, None)
        for _ in range(4):
            q.advance(minutes=5)
            q.sweep("cursors")
    assert step(q, "due") == (1, None)


def touched(q: Verbs) -> tuple[int, int]:
    """Rows of jobs_live that the present transaction read by sequential scans, and by indexes."""
    row = q.one(
        "select seq_tup_read, idx_tup_fetch from pg_stat_xact_user_tables where relid = 'pgqueue.jobs_live'::regclass"
    )
    return row.seq_tup_read or 0, row.idx_tup_fetch or 0


@pytest.mark.parametrize("statistics", ["fresh", "of an empty table", "none"])
def test_a_sweep_touches_only_what_is_due(q: Verbs, statistics: str) -> None:
    q.freeze()
    if statistics == "of an empty table":
        q.session.execute("analyze pgqueue.jobs_live")
    q.session.execute(
        "insert into pgqueue.jobs (job_type, scheduled_at)"
        " select 't', pgqueue.clock() + n * interval '1 second' from generate_series(1, 20000) n"
    )
    q.fill(1000, queue="waiting")
    q.fill(500, queue="running")
    q.sweep("cursors")
    running = [job for _ in range(5) for job in q.claim(100, queues=["running"])]
    q.complete(running[:250])
    if statistics == "fresh":
        q.session.execute("analyze pgqueue.jobs_live")
    q.advance(seconds=10)
    steps = ("due", "leases", "expired", "keys", "shed", "retention", "prune")
    for _ in range(3):
        for name in steps:
            step(q, name)
    q.advance(seconds=10)
    for name in steps:
        with q.session.transaction():
            before = touched(q)
            jobs = step(q, name).jobs
            seq, idx = (now - then for now, then in zip(touched(q), before, strict=True))
            assert jobs == (10 if name == "due" else 0)
            # The oldest of each queue and priority is looked at for its age.
            assert (seq, idx <= {"due": 2 * 10, "expired": 400}.get(name, 0)) == (0, True), (name, seq, idx)


# When to come again ---------------------------------------------------------------------------------------------------


def test_the_next_due_moment(q: Verbs) -> None:
    now = q.freeze()
    assert q.call_value("next_due") is None
    q.enqueue(delay=timedelta(hours=2))
    assert q.call_value("next_due") == timedelta(hours=2)
    q.session.execute(
        "insert into pgqueue.schedules (name, cron, job_type, next_run_at) values ('s', '@daily', 't', %s)",
        [now + timedelta(hours=1)],
    )
    assert q.call_value("next_due") == timedelta(hours=1)
    q.session.execute("update pgqueue.schedules set enabled = false")
    job = q.start()
    q.fail(job, retry_in=timedelta(seconds=3))
    assert q.call_value("next_due") == timedelta(seconds=3)
    # What is overdue is for the sweep that runs now.
    q.advance(seconds=3)
    assert q.call_value("next_due") == timedelta(hours=2, seconds=-3)


def test_a_turn_is_one_sweepers(q: Verbs, connect: Connect) -> None:
    other = Verbs(connect())
    hour = timedelta(hours=1)
    assert [v.call_value("take_turn", hour) for v in (q, other, q)] == [True, False, False]
    assert other.call_value("take_turn", timedelta(0))
    # A clock that was set back gives no turn away for ever.
    q.session.execute("select setval('pgqueue.sweep_turns', 9000000000000)")
    assert q.call_value("take_turn", hour)


def test_what_is_dead_is_listed_with_its_reason(q: Verbs) -> None:
    q.freeze()
    failed = kill_by_failing(q, q.insert())
    assert failed.status == "dead_letter"
    q.insert(queue="old")
    q.sweep("cursors")
    q.advance(hours=25)
    q.sweep("expired")
    reasons = q.rows("select error from pgqueue.dead_letters order by error")
    assert ["expired" in reason for (reason,) in reasons] == [False, True]


def test_jobs_with_a_date_of_their_own_hide_nobody_from_the_pending_ttl(q: Verbs) -> None:
    now = q.freeze()
    q.session.execute("insert into pgqueue.queues (name, pending_ttl) values ('long', '1 s'), ('short', '1 s')")
    q.fill(3000, queue="long", expires_at=(now + timedelta(days=1)).isoformat())
    middle = q.insert(queue="long")
    q.fill(1500, queue="long", expires_at=(now + timedelta(days=1)).isoformat())
    last, other = q.insert(queue="long"), q.insert(queue="short")
    q.sweep()
    q.advance(seconds=2)
    for _ in range(8):
        q.sweep("expired")
    assert [q.job(i).status for i in (middle, last, other)] == ["dead_letter"] * 3
    assert q.value("select count(*) from pgqueue.jobs where status = 'pending'") == 4500
    # Again and again, also for those that come behind the place where it stands.
    again = q.insert(queue="long")
    q.advance(seconds=2)
    for _ in range(8):
        q.sweep("expired")
    assert q.job(again).status == "dead_letter"
    q.session.execute("delete from pgqueue.jobs where queue = 'long'")
    q.sweep("expired")
    assert q.rows("select * from pgqueue.expiry_cursors") == []


def test_jobs_given_back_hide_nobody_from_the_pending_ttl(q: Verbs) -> None:
    q.freeze()
    q.fill(150)
    held = q.claim(150)
    old = q.insert()
    q.sweep()
    q.advance(hours=23)
    q.heartbeat(held, lease=DAY)
    assert len(q.release(held)) == 150
    q.advance(hours=2)
    assert step(q, "expired") == (1, None)
    assert q.job(old).status == "dead_letter"


def test_pauses_are_taken_off_however_many_there_were(q: Verbs) -> None:
    q.freeze()
    job = q.insert()
    q.sweep()
    for _ in range(20):
        q.call("pause", "default")
        q.advance(hours=6)
        q.call("resume", "default")
        q.advance(hours=1)
    late = q.insert()
    q.advance(hours=3, minutes=59)
    assert step(q, "expired") == (0, None)
    q.advance(minutes=2)
    assert step(q, "expired") == (1, None)
    assert (q.job(job).status, q.job(late).status) == ("dead_letter", "pending")
