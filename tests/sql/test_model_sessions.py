"""The SQL API in three sessions that take turns in every order: what must hold of jobs holds whoever waits for whom.

A step is one statement in one session. A session may be in a transaction of several verbs that another one waits for;
which sessions wait is asked of the server, never guessed by time. What a transaction was told counts once it commits.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from psycopg.types.json import Jsonb

from tests.meet import aside, wait_until
from tests.servers import Databases
from tests.sql.verbs import Verbs

EXAMPLES = int(os.environ.get("PGQUEUE_MODEL_EXAMPLES", "12"))
SESSIONS = 3
QUEUE = "q"
FINAL = ("completed", "cancelled", "dead_letter")
#: What a verb may say of a job that is not there, or not in the state for it.
REFUSED = ("PQ404", "PQ409")
DEADLOCK = "40P01"
#: A snapshot that is older than what a verb must see; a sweep refuses to work in one.
OLD_SNAPSHOT = ("40001", "PQ422")
EMPTY = """truncate pgqueue.jobs, pgqueue.idempotency_keys, pgqueue.claim_cursors, pgqueue.lowered_cursors,
  pgqueue.queue_depths, pgqueue.sweep_notes, pgqueue.queues, pgqueue.queue_pauses, pgqueue.sweep_steps;
  alter sequence pgqueue.claim_tick restart; select setseed(0.5);
  delete from pgqueue.sweep_state; insert into pgqueue.sweep_state default values"""

Told = Callable[[], None]


class Actor:
    """One session, what it waits for, and what it was told in its open transaction."""

    def __init__(self, session: psycopg.Connection[Any], number: int) -> None:
        self.q = Verbs(session)
        self.session = session
        self.worker = uuid.UUID(int=0x4000 << 64 | 0x8000 << 48 | number + 1)
        self.pid = session.info.backend_pid
        self.begin_anew()

    def begin_anew(self) -> None:
        self.waiting: Future[Any] | None = None
        self.then: Callable[[Any], Told | None] = lambda answer: None
        self.told: list[Told] = []
        self.mode: str | None = None
        self.aborted = False
        self.verbs = 0


class Sessions(RuleBasedStateMachine):
    """Whatever is done in whatever order, what is committed is lawful."""

    def __init__(self, actors: list[Actor], looker: Verbs) -> None:
        super().__init__()
        self.actors, self.looker = actors, looker
        for actor in actors:
            actor.begin_anew()
        looker.session.execute(EMPTY)
        self.accepted: set[uuid.UUID] = set()
        self.discarded: set[uuid.UUID] = set()
        self.keys: dict[str, uuid.UUID] = {}
        self.claimed: list[tuple[uuid.UUID, uuid.UUID, int]] = []
        self.begun: set[tuple[uuid.UUID, uuid.UUID, int]] = set()
        self.finished: dict[uuid.UUID, str] = {}
        self.ended: dict[uuid.UUID, tuple[Any, ...]] = {}
        self.revived: set[uuid.UUID] = set()

    # Steps

    def say(self, actor: Actor, call: Callable[[], Any], then: Callable[[Any], Told | None]) -> None:
        """Have a session call something; `then` makes of the answer what counts once it is committed."""
        actor.then = then
        actor.verbs += 1
        actor.waiting = aside(call)
        self.settle()

    def settle(self) -> None:
        """Return when each session has its answer, or waits for a lock that another one of us holds."""

        def stands() -> bool:
            blocked: dict[int, list[int]] = {}
            for actor in self.actors:
                if actor.waiting is None or self.heard(actor):
                    continue
                pids = self.looker.value("select pg_blocking_pids(%s)", [actor.pid])
                if not pids:
                    return False
                blocked[actor.pid] = pids
            # Those that wait for each other wait until the server ends one of them.
            return not any(self.leads_back(pid, blocked) for pid in blocked)

        wait_until(stands, 20, interval=0.001)

    @staticmethod
    def leads_back(start: int, blocked: dict[int, list[int]]) -> bool:
        seen: set[int] = set()
        ahead = list(blocked[start])
        while ahead:
            pid = ahead.pop()
            if pid == start:
                return True
            if pid not in seen:
                seen.add(pid)
                ahead += blocked.get(pid, [])
        return False

    def heard(self, actor: Actor) -> bool:
        """Take a session's answer, if it has come."""
        if actor.waiting is None or not actor.waiting.done():
            return False
        waiting, actor.waiting = actor.waiting, None
        error = waiting.exception()
        if error is not None:
            self.refused(actor, error)
            return True
        told = actor.then(waiting.result())
        if told is not None:
            if actor.mode:
                actor.told.append(told)
            else:
                told()
        return True

    def refused(self, actor: Actor, error: BaseException) -> None:
        state = error.sqlstate if isinstance(error, psycopg.Error) else None
        lawful = [*REFUSED, DEADLOCK, *(OLD_SNAPSHOT if actor.mode == "repeatable read" else [])]
        assert state in lawful, error
        # Single verbs lock in one order: only transactions of several can meet in a deadlock.
        assert state != DEADLOCK or any(other.mode and other.verbs > 1 for other in self.actors), error
        actor.aborted = actor.mode is not None

    def free(self, number: int) -> Actor | None:
        """A session that can be given something to do."""
        actor = self.actors[number]
        if actor.aborted:
            self.finish(actor, commit=False)
        return actor if actor.waiting is None else None

    def finish(self, actor: Actor, *, commit: bool) -> None:
        if commit and not actor.aborted:
            actor.session.execute("commit")
            for told in actor.told:
                told()
        else:
            actor.session.execute("rollback")
        actor.begin_anew()
        self.settle()

    numbers = st.integers(0, SESSIONS - 1)

    @rule(number=numbers, mode=st.sampled_from(["read committed", "read committed", "repeatable read"]))
    def begins(self, number: int, mode: str) -> None:
        actor = self.free(number)
        if actor and actor.mode is None:
            actor.session.execute(f"begin isolation level {mode}")
            actor.mode, actor.verbs = mode, 0

    @rule(number=numbers, commit=st.sampled_from([True, True, True, False]))
    def ends(self, number: int, commit: bool) -> None:
        actor = self.actors[number]
        if actor.waiting is None and actor.mode is not None:
            self.finish(actor, commit=commit)

    # Producers

    @rule(
        number=numbers, priority=st.integers(0, 1), ordering_key=st.sampled_from([None, None, "o", "p"]),
        idempotency_key=st.sampled_from([None, None, "k", "l"]), retries=st.integers(0, 1),
    )  # fmt: skip
    def enqueue(
        self, number: int, priority: int, ordering_key: str | None, idempotency_key: str | None, retries: int
    ) -> None:
        if (actor := self.free(number)) is None:
            return

        def then(row: Any) -> Told:
            def told() -> None:
                if idempotency_key is not None:
                    assert self.keys.setdefault(idempotency_key, row.job_id) == row.job_id, "two jobs of one key"
                if row.duplicate:
                    assert row.job_id in self.accepted
                else:
                    assert row.job_id not in self.accepted
                    self.accepted.add(row.job_id)

            return told

        wishes = {
            "queue": QUEUE, "priority": priority, "ordering_key": ordering_key, "idempotency_key": idempotency_key,
            "max_retries": retries,
        }  # fmt: skip
        self.say(actor, lambda: actor.q.enqueue(**wishes), then)

    # Workers

    @rule(number=numbers, wanted=st.integers(1, 3), lapses=st.booleans())
    def claim(self, number: int, wanted: int, lapses: bool) -> None:
        if (actor := self.free(number)) is None:
            return
        lease = "1 millisecond" if lapses else "1 hour"

        def then(rows: list[Any]) -> Told:
            def told() -> None:
                for row in rows:
                    attempt = (actor.worker, row.job_id, row.attempts)
                    assert attempt not in self.begun, "an attempt begins twice"
                    self.begun.add(attempt)
                    self.claimed.append(attempt)

            return told

        self.say(actor, lambda: actor.q.claim(wanted, actor.worker, [QUEUE], lease=lease), then)

    def attempt(self, n: int) -> tuple[uuid.UUID, uuid.UUID, int]:
        return self.claimed[-1 - n % len(self.claimed)]

    @precondition(lambda self: self.claimed)
    @rule(
        number=numbers, n=st.integers(0, 5), flag=st.booleans(),
        verb=st.sampled_from(["complete", "complete", "fail", "fail for good", "snooze", "release", "cancel_attempt"]),
    )  # fmt: skip
    def settles(self, number: int, n: int, flag: bool, verb: str) -> None:
        if (actor := self.free(number)) is None:
            return
        worker, job_id, attempts = picked = self.attempt(n)
        q = actor.q
        calls: dict[str, Callable[[], Any]] = {
            "complete": lambda: q.rows(
                "select * from pgqueue.complete(%s, %s, %s, %s)", [worker, [job_id], [attempts], [Jsonb(str(worker))]]
            ),
            "fail": lambda: q.call_value("fail", worker, job_id, attempts, {"message": "m"}, retry_in="0"),
            "fail for good": lambda: q.call_value("fail", worker, job_id, attempts, {"message": "m"}, retryable=False),
            "snooze": lambda: q.call_value("snooze", worker, job_id, attempts, "0"),
            "release": lambda: q.call("release", worker, [job_id], [attempts], started=flag),
            "cancel_attempt": lambda: q.call_value("cancel_attempt", worker, job_id, attempts),
        }

        def then(answer: Any) -> Told | None:
            if not answer:
                return None

            def told() -> None:
                if verb == "release" and not flag:
                    # It never ran: the number is free again.
                    self.begun.discard(picked)
                    return
                assert picked in self.begun
                if verb == "complete":
                    assert self.finished.setdefault(job_id, verb) == verb
                    row = self.looker.job(job_id)
                    assert row.status in ("completed", "cancelled")
                    assert (row.worker_id, row.attempts) == (worker, attempts)

            return told

        self.say(actor, calls[verb], then)

    @precondition(lambda self: self.claimed)
    @rule(number=numbers, n=st.integers(0, 5))
    def heartbeat(self, number: int, n: int) -> None:
        if (actor := self.free(number)) is not None:
            worker, job_id, attempts = self.attempt(n)
            self.say(actor, lambda: actor.q.call("heartbeat", worker, [job_id], [attempts]), lambda _: None)
            assert actor.waiting is None, "a heartbeat waits"

    # Operators and sweeps

    @precondition(lambda self: self.accepted)
    @rule(number=numbers, n=st.integers(0, 9), verb=st.sampled_from(["cancel", "retry", "discard", "cancel_many"]))
    def operate(self, number: int, n: int, verb: str) -> None:
        if (actor := self.free(number)) is None:
            return
        ids = sorted(self.accepted)
        job_id = ids[n % len(ids)]
        given = ids if n % 2 else ids[::-1]

        def then(answer: Any) -> Told | None:
            def told() -> None:
                if verb == "retry":
                    self.revived.add(job_id)
                elif verb == "discard":
                    self.discarded.add(job_id)

            return told

        argument: Any = given if verb == "cancel_many" else job_id
        self.say(actor, lambda: actor.q.call(verb, argument), then)

    @rule(number=numbers, verb=st.sampled_from(["retry_dead_letters", "discard_dead_letters"]))
    def operate_in_bulk(self, number: int, verb: str) -> None:
        if (actor := self.free(number)) is None:
            return

        def then(count: int) -> Told:
            def told() -> None:
                if verb == "retry_dead_letters":
                    self.revived |= self.accepted
                    return
                gone = self.accepted - self.discarded - {row.job_id for row in self.looker.snapshot()}
                assert len(gone) <= count
                self.discarded |= gone

            return told

        self.say(actor, lambda: actor.q.call_value(verb, queue=QUEUE), then)
        assert actor.waiting is None, "a bulk verb waits"

    @rule(number=numbers, step=st.sampled_from([None, None, "due", "leases", "keys", "cursors"]))
    def sweep(self, number: int, step: str | None) -> None:
        if (actor := self.free(number)) is not None:
            self.say(actor, lambda: actor.q.call("sweep", step), lambda _: None)
            assert actor.waiting is None, "a sweep waits"

    # What always holds of what is committed

    @invariant()
    def what_is_committed_is_lawful(self) -> None:
        rows = self.looker.snapshot()
        there = {row.job_id: row for row in rows}
        assert len(there) == len(rows), "a job is in two places"
        assert set(there) == self.accepted - self.discarded
        for job_id, row in there.items():
            if row.status not in FINAL:
                before = self.ended.pop(job_id, None)
                assert before is None or (before[0] == "dead_letter" and job_id in self.revived), (before, row)
                assert job_id not in self.finished
                continue
            end = (row.status, row.attempts, row.worker_id, row.result, row.finished_at)
            before = self.ended.setdefault(job_id, end)
            if before != end:
                assert before[0] == "dead_letter", (before, end)
                assert job_id in self.revived, (before, end)
                self.ended[job_id] = end
        heads = [
            row.ordering_key
            for row in rows
            if row.ordering_key and row.status not in FINAL and not (row.status == "submitted" and row.due_at is None)
        ]
        assert len(heads) == len(set(heads)), "two jobs of one key could run"
        below = self.looker.rows(
            "select j.job_id from pgqueue.claim_starts c join pgqueue.jobs_live j"
            "  on j.queue = c.queue and j.priority = c.priority and j.status = 'pending' and j.seq < c.low_seq"
        )
        assert below == [], "a pending job lies below where claims begin"

    def teardown(self) -> None:
        try:
            for _ in range(SESSIONS + 1):
                for actor in self.actors:
                    if actor.waiting is None and (actor.mode or actor.aborted):
                        self.finish(actor, commit=not actor.aborted)
            assert all(actor.waiting is None for actor in self.actors), "somebody waits for nobody"
            self.what_is_committed_is_lawful()
            self.drain()
            self.what_is_committed_is_lawful()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End what a step that failed has left open."""
        ended: set[int] = set()
        while len(ended) < SESSIONS:
            for actor in self.actors:
                if actor.pid not in ended and (actor.waiting is None or actor.waiting.done()):
                    actor.session.rollback()
                    ended.add(actor.pid)
            time.sleep(0.001)

    def drain(self) -> None:
        """Nothing is stuck: what is left ends when time passes and a worker comes."""
        q = self.looker
        for _ in range(40):
            q.session.execute(
                "update pgqueue.jobs set due_at = case when status in ('submitted', 'failed') then now() end,"
                " lease_expires_at = case when status = 'processing' then now() - interval '1 s' end"
                " where finished_at is null and (due_at is not null or lease_expires_at is not null)"
            )
            for step in ("cursors", "due", "leases", "expired", "keys"):
                q.call("sweep", step)
            for row in q.claim(20, self.actors[0].worker, [QUEUE]):
                q.complete([row], worker=self.actors[0].worker)
            if not q.value("select count(*) from pgqueue.jobs_live"):
                return
        raise AssertionError(q.rows("select job_id, status, due_at, ordering_key, seq from pgqueue.jobs_live"))


@pytest.fixture
def actors(template_copies: Databases) -> Iterator[tuple[list[Actor], Verbs]]:
    dsn = template_copies.create()
    opened = [psycopg.connect(dsn, autocommit=True) for _ in range(SESSIONS + 1)]
    for session in opened:
        session.execute("set search_path = public")
        session.execute("set deadlock_timeout = '20ms'")
    yield [Actor(session, number) for number, session in enumerate(opened[1:])], Verbs(opened[0])
    for session in opened:
        session.close()
    template_copies.drop(dsn)


@pytest.mark.timeout(900)
def test_whatever_sessions_do_at_once_is_lawful(actors: tuple[list[Actor], Verbs]) -> None:
    run_state_machine_as_test(
        lambda: Sessions(*actors),  # type: ignore[arg-type]
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=50, deadline=None, derandomize=EXAMPLES == 12,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
