"""The whole SQL API against a model in Python: whatever is called in whatever order, both agree on every job.

One session; the database's clock is a setting of it.
"""

import os
import uuid
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from psycopg.types.json import Jsonb

from tests.sql.model import LEASE, MAX_LOST, Attempt, Expectation, Job
from tests.sql.verbs import Verbs, refused

WORKERS = [uuid.UUID(int=0x4000 << 64 | 0x8000 << 48 | n) for n in (1, 2)]
# With another number the examples are new ones each time.
EXAMPLES = int(os.environ.get("PGQUEUE_MODEL_EXAMPLES", "50"))


class Model(Expectation, RuleBasedStateMachine):
    def __init__(self, q: Verbs) -> None:
        RuleBasedStateMachine.__init__(self)
        Expectation.__init__(self)
        self.q = q
        self.attempts: list[Attempt] = []
        self.begun: set[Attempt] = set()
        q.session.execute(
            "truncate pgqueue.jobs, pgqueue.idempotency_keys, pgqueue.claim_cursors, pgqueue.lowered_cursors,"
            " pgqueue.queue_depths, pgqueue.sweep_notes, pgqueue.queues, pgqueue.queue_pauses, pgqueue.sweep_steps;"
            # Chance and turns begin anew, so that an example can be repeated.
            "alter sequence pgqueue.claim_tick restart; select setseed(0.5);"
            "delete from pgqueue.sweep_state; insert into pgqueue.sweep_state default values;"
            "insert into pgqueue.queues (name, weights, max_lost, timeout_ms)"
            " values ('strict', null, 2, 2147483647), ('shared', '{8,4,2,1}', 2, 2147483647)"
        )
        self.tick(timedelta(0))

    # What the model does

    def tick(self, by: timedelta) -> None:
        self.now += by
        self.q.session.execute("select set_config('test.now', %s, false)", [self.now.isoformat()])

    # Enqueue

    wishes = st.fixed_dictionaries({
        "queue": st.sampled_from(["strict", "strict", "shared"]), "priority": st.integers(0, 3),
        "max_retries": st.integers(0, 2), "ordering_key": st.sampled_from([None, None, None, "o", "p"]),
        "idempotency_key": st.sampled_from([None, None, None, "k", "l", "m"]),
        "scheduled_at": st.sampled_from([None, None, -5, 0, 3, 9, 20]),
        "expires_at": st.sampled_from([None, None, None, 5, 40]),
    })  # fmt: skip

    @rule(wishes=st.lists(wishes, min_size=1, max_size=4), door=st.sampled_from(["insert", "enqueue", "enqueue_many"]))
    def enqueue(self, wishes: list[dict[str, Any]], door: str) -> None:
        jobs: list[dict[str, Any]] = [
            {"job_type": "t"} | {
                name: self.now + timedelta(seconds=value) if name.endswith("_at") and value is not None else value
                for name, value in wish.items()
            }
            for wish in wishes
        ]  # fmt: skip
        if door == "enqueue_many":
            texts = [{k: v.isoformat() if isinstance(v, datetime) else v for k, v in job.items()} for job in jobs]
            rows = self.q.enqueue_many(*texts)
            assert len(rows) == len(jobs)
            for job, row in zip(jobs, rows, strict=True):
                self.enqueued(job, row)
            return
        for job in jobs:
            if door == "enqueue":
                self.enqueued(job, self.q.enqueue(**job))
            elif job["idempotency_key"] in self.keys:
                with refused("23505"):
                    self.q.insert(**job)
            else:
                self.enqueued(job, self.q.job(self.q.insert(**job)))

    def enqueued(self, job: dict[str, Any], row: Any) -> None:
        key = job["idempotency_key"]
        if key in self.keys:
            assert (row.duplicate, row.job_id) == (True, self.keys[key])
            return
        assert not getattr(row, "duplicate", False)
        if key:
            self.keys[key] = row.job_id
        made = Job(
            row.job_id, job["queue"], job["priority"], 0, job["max_retries"], job["ordering_key"], job["scheduled_at"],
            job["expires_at"],
        )  # fmt: skip
        self.draw(made)
        self.arrive(made)
        assert (row.status, row.due_at) == (made.status, made.due_at)

    # Work

    @rule(worker=st.sampled_from(WORKERS), queue=st.sampled_from(["strict", "shared"]), wanted=st.integers(1, 4))
    def claim_some(self, worker: uuid.UUID, queue: str, wanted: int) -> None:
        self.claim(worker, queue, wanted)

    def claim(self, worker: uuid.UUID, queue: str, wanted: int) -> None:
        eligible = sorted(
            (
                j for j in self.jobs.values()
                if j.status == "pending" and j.queue == queue and (j.expires_at is None or j.expires_at > self.now)
            ),
            key=lambda j: (j.priority, j.place),
        )  # fmt: skip
        if queue in self.paused:
            eligible = []
        rows = self.q.claim(wanted, worker, [queue])
        got = [row.job_id for row in rows]
        assert len(got) == min(wanted, len(eligible))
        if queue == "strict":
            assert got == [j.job_id for j in eligible[:wanted]]
        for priority in range(4):
            line = [j.job_id for j in eligible if j.priority == priority]
            taken = [job_id for job_id in got if self.jobs[job_id].priority == priority]
            assert taken == line[: len(taken)]
        assert [(row.priority, row.seq) for row in rows] == sorted((row.priority, row.seq) for row in rows)
        for row in rows:
            job = self.jobs[row.job_id]
            job.status, job.worker, job.lease = "processing", worker, self.now + LEASE
            job.attempts += 1
            attempt = Attempt(worker, row.job_id, row.attempts)
            assert attempt not in self.begun
            self.begun.add(attempt)
            self.attempts.append(attempt)

    def attempt(self, n: int) -> tuple[Attempt, Job | None]:
        # The latest are the likeliest to be still held.
        attempt = self.attempts[-1 - n % len(self.attempts)]
        return attempt, self.held(attempt)

    def complete(self, picked: list[int]) -> None:
        # A job given twice would be refused.
        attempts = list({attempt.job_id: attempt for attempt, _ in map(self.attempt, picked)}.values())
        rows = self.q.rows(
            "select * from pgqueue.complete(%s, %s, %s, %s)",
            [
                attempts[0].worker, [a.job_id for a in attempts], [a.attempts for a in attempts],
                [Jsonb(str(a.job_id)) for a in attempts],
            ],
        )  # fmt: skip
        mine = [self.held(a) for a in attempts if a.worker == attempts[0].worker]
        accepted = [job for job in mine if job]
        assert {row[0] for row in rows} == {job.job_id for job in accepted}
        assert len(rows) == len(accepted)
        for job in accepted:
            job.result = str(job.job_id)
        for job in accepted:
            job.status = "cancelled" if job.cancel_requested else "completed"
        for job in sorted(accepted, key=lambda j: (j.queue, j.ordering_key or "")):
            self.end(job, job.status)

    def fail(self, n: int, retryable: bool, retry_in: int | None) -> None:
        attempt, job = self.attempt(n)
        wait = None if retry_in is None else timedelta(seconds=retry_in)
        became = self.q.call_value(
            "fail",
            attempt.worker,
            attempt.job_id,
            attempt.attempts,
            {"message": "m"},
            retryable=retryable,
            retry_in=wait,
        )
        if job is None:
            assert became is None
            return
        job.errors.append(job.attempts)
        if job.cancel_requested:
            self.end(job, "cancelled")
        elif not retryable or job.attempts - job.lost > job.max_retries:
            self.end(job, "dead_letter")
        else:
            job.status, job.lease = "failed", None
            due = self.q.value("select due_at from pgqueue.jobs where job_id = %s", [job.job_id])
            if wait is None:
                charged = job.attempts - job.lost - job.uncharged
                wait = timedelta(seconds=min(2 ** (charged - 1), 30))
                assert self.now + wait <= due <= self.now + wait * 1.1
            else:
                assert due == self.now + max(wait, timedelta(0))
            job.due_at = due
        assert became == job.status

    def snooze(self, n: int, seconds: int) -> None:
        attempt, job = self.attempt(n)
        delay = timedelta(seconds=seconds)
        became = self.q.call_value("snooze", attempt.worker, attempt.job_id, attempt.attempts, delay)
        if job is None:
            assert became is None
        elif job.cancel_requested:
            self.end(job, "cancelled")
            assert became == "cancelled"
        else:
            job.status, job.lease, job.due_at = "submitted", None, self.now + max(delay, timedelta(0))
            job.max_retries += 1
            job.uncharged += 1
            assert became == "submitted"

    def release(self, n: int, started: bool) -> None:
        attempt, job = self.attempt(n)
        rows = self.q.call("release", attempt.worker, [attempt.job_id], [attempt.attempts], started=started)
        assert [row[0] for row in rows] == ([job.job_id] if job else [])
        if job is None:
            return
        if job.cancel_requested:
            self.end(job, "cancelled")
            return
        job.status, job.lease = "pending", None
        if started:
            job.max_retries += 1
            job.uncharged += 1
        else:
            job.attempts -= 1
            self.begun.remove(attempt)

    def cancel_attempt(self, n: int) -> None:
        attempt, job = self.attempt(n)
        became = self.q.call_value("cancel_attempt", attempt.worker, attempt.job_id, attempt.attempts)
        assert became == ("cancelled" if job else None)
        if job:
            self.end(job, "cancelled")

    def heartbeat(self, n: int) -> None:
        attempt, job = self.attempt(n)
        rows = self.q.call("heartbeat", attempt.worker, [attempt.job_id], [attempt.attempts])
        reasons = [row.reason for row in rows]
        if job is None:
            assert reasons == ["lost"]
            return
        assert reasons == (["cancel"] if job.cancel_requested else [])
        assert job.lease is not None
        job.lease = max(job.lease, self.now + LEASE)

    deeds = st.tuples(
        st.sampled_from(
            ["complete", "complete", "fail", "fail", "fail", "fail for good", "snooze", "release", "cancel_attempt",
             "heartbeat"]
        ),
        st.one_of(st.integers(0, 3), st.integers(0, 30)), st.booleans(), st.sampled_from([None, None, 0, 2, 30, -1]),
    )  # fmt: skip

    @rule(worker=st.sampled_from(WORKERS), deeds=st.lists(deeds, max_size=8))
    def work(self, worker: uuid.UUID, deeds: list[Any]) -> None:
        for queue in ("strict", "shared"):
            self.claim(worker, queue, 10)
        if self.attempts:
            self.finish(deeds)

    @precondition(lambda self: self.attempts)
    @rule(deeds=st.lists(deeds, min_size=1, max_size=5))
    def finish_some(self, deeds: list[Any]) -> None:
        self.finish(deeds)

    def finish(self, deeds: list[tuple[str, int, bool, int | None]]) -> None:
        for verb, n, flag, seconds in deeds:
            match verb:
                case "complete":
                    self.complete([n, n + 1] if flag else [n])
                case "fail":
                    self.fail(n, True, seconds)
                case "fail for good":
                    self.fail(n, False, None)
                case "snooze":
                    self.snooze(n, seconds or 0)
                case "release":
                    self.release(n, flag)
                case "cancel_attempt":
                    self.cancel_attempt(n)
                case "heartbeat":
                    self.heartbeat(n)

    # Operate

    def pick(self, n: int) -> Job:
        return list(self.jobs.values())[n % len(self.jobs)]

    def cancel(self, n: int) -> None:
        job = self.pick(n)
        if job.status in ("completed", "dead_letter"):
            with refused("PQ409"):
                self.q.cancel(job.job_id)
        elif job.status == "processing":
            assert self.q.cancel(job.job_id) == "cancel_requested"
            job.cancel_requested = True
        else:
            assert self.q.cancel(job.job_id) == "cancelled"
            if job.status != "cancelled":
                job.cancel_requested = True
                self.end(job, "cancelled")

    def retry(self, n: int) -> None:
        # Dead letters first, since few jobs are any.
        job = self.pick(n)
        if dead := [j for j in self.jobs.values() if j.status == "dead_letter"]:
            job = dead[n % len(dead)]
        if job.status == "failed":
            assert self.q.retry(job.job_id).status == "pending"
            job.status, job.due_at, job.scheduled_at, job.expires_at = "pending", None, None, None
            self.draw(job)
        elif job.status == "dead_letter":
            row = self.q.retry(job.job_id)
            self.revive(job)
            assert row.status == job.status
        else:
            with refused("PQ409"):
                self.q.retry(job.job_id)

    def retry_dead_letters(self, queue: str | None, most: int | None) -> None:
        dead = [j for j in self.jobs.values() if j.status == "dead_letter" and queue in (None, j.queue)]
        dead = sorted(dead, key=lambda j: j.job_id)[:most]
        assert self.q.call_value("retry_dead_letters", queue=queue, max_jobs=most) == len(dead)
        for job in dead:
            self.revive(job)

    def discard(self, n: int) -> None:
        dead = [j for j in self.jobs.values() if j.status == "dead_letter"]
        if not dead:
            return
        job = dead[n % len(dead)]
        assert self.q.call_value("discard", job.job_id) == "discarded"
        del self.jobs[job.job_id], self.ended[job.job_id]

    def pause(self, queue: str, verb: str) -> None:
        assert self.q.call_value(verb, queue) is ((queue in self.paused) == (verb == "resume"))
        (self.paused.add if verb == "pause" else self.paused.discard)(queue)

    @precondition(lambda self: self.jobs)
    @rule(
        n=st.integers(0, 30), queue=st.sampled_from([None, "strict", "shared"]), most=st.sampled_from([None, 1]),
        verb=st.sampled_from(
            ["cancel", "cancel", "retry", "retry", "retry_dead_letters", "discard", "pause", "resume", "resume"]
        ),
    )  # fmt: skip
    def operate(self, n: int, queue: str | None, most: int | None, verb: str) -> None:
        match verb:
            case "cancel":
                self.cancel(n)
            case "retry":
                self.retry(n)
            case "retry_dead_letters":
                self.retry_dead_letters(queue, most)
            case "discard":
                self.discard(n)
            case _:
                self.pause(queue or "shared", verb)

    # Time

    @rule()
    def many_jobs_pass_elsewhere(self) -> None:
        """So that claim cursors find it worth while to rise."""
        self.q.session.execute("select setval('pgqueue.jobs_seq', (select last_value from pgqueue.jobs_seq) + 3000)")
        for _ in range(3):
            self.q.sweep("cursors")

    @rule(seconds=st.sampled_from([0, 0.5, 2, 3, 10, 31]), sweeps=st.integers(0, 2))
    def time_passes(self, seconds: float, sweeps: int) -> None:
        self.tick(timedelta(seconds=seconds))
        for _ in range(sweeps):
            done = self.q.sweep()
            due = [j for j in self.jobs.values() if j.due_at is not None and j.due_at <= self.now]
            for job in sorted(due, key=lambda j: (j.due_at, j.place)):
                job.status, job.due_at = "pending", None
                self.draw(job)
            lost = [j for j in self.jobs.values() if j.lease is not None and j.lease < self.now]
            for job in sorted(lost, key=lambda j: (j.lease, j.place)):
                job.lost += 1
                job.errors.append(job.attempts)
                if job.cancel_requested:
                    self.end(job, "cancelled")
                elif job.lost > MAX_LOST:
                    self.end(job, "dead_letter")
                else:
                    job.status, job.lease = "pending", None
            # Whoever becomes head only now is met by the next sweep.
            late = [
                j for j in self.jobs.values()
                if j.status == "pending" and j.expires_at is not None and j.expires_at <= self.now
            ]  # fmt: skip
            for job in sorted(late, key=lambda j: (j.expires_at, j.place)):
                self.end(job, "dead_letter")
            assert (done["due"], done["leases"], done["expired"]) == (len(due), len(lost), len(late))

    # What always holds

    @invariant()
    def model_and_queue_agree(self) -> None:
        rows = {row.job_id: row for row in self.q.snapshot()}
        assert len(rows) == self.q.value("select count(*) from pgqueue.jobs")
        assert set(rows) == set(self.jobs)
        for job_id, row in rows.items():
            job = self.jobs[job_id]
            stored = replace(
                job, status=row.status, queue=row.queue, priority=row.priority, attempts=row.attempts, lost=row.lost,
                uncharged=row.uncharged, max_retries=row.max_retries, due_at=row.due_at, lease=row.lease_expires_at,
                cancel_requested=row.cancel_requested_at is not None, expires_at=row.expires_at, worker=row.worker_id,
                scheduled_at=row.scheduled_at, ordering_key=row.ordering_key, result=row.result,
                errors=[record["attempt"] for record in row.errors],
            )  # fmt: skip
            assert stored == replace(job, errors=job.errors[-20:])
            if not job.live:
                assert self.ended.setdefault(job_id, row) == row
                assert row.finished_at is not None

    @invariant()
    def places_are_in_order(self) -> None:
        rows = self.q.rows("select job_id from pgqueue.jobs_live where status = 'pending' order by seq")
        places = [self.jobs[row.job_id].place for row in rows]
        assert places == sorted(places)

    @invariant()
    def a_key_has_one_head(self) -> None:
        for queue in ("strict", "shared"):
            for key in ("o", "p"):
                line = self.line(queue, key)
                assert sum(not j.waits_for_its_key for j in line) == min(len(line), 1)

    @invariant()
    def no_pending_job_lies_below_where_claims_begin(self) -> None:
        below = self.q.rows(
            "select j.job_id from pgqueue.claim_starts c join pgqueue.jobs_live j"
            "  on j.queue = c.queue and j.priority = c.priority and j.status = 'pending' and j.seq < c.low_seq"
        )
        assert below == []


@pytest.mark.timeout(900)
def test_the_queue_is_its_model(q: Verbs) -> None:
    q.session.execute(
        "create or replace function pgqueue.clock() returns timestamptz language sql stable parallel safe"
        " as $$ select current_setting('test.now')::timestamptz $$;"
        "set test.now = '2027-03-10 12:00+00'"
    )
    run_state_machine_as_test(
        lambda: Model(q),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=60, deadline=None, derandomize=EXAMPLES == 50,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
