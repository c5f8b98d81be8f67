"""When a worker asks for the bell, and when it claims by itself."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from pgqueue import calls
from pgqueue import idling as idling_module
from pgqueue.connections import Link
from pgqueue.idling import EVEN, Idling
from pgqueue.listener import Bell
from pgqueue.settings import Settings
from tests.conftest import Connect
from tests.meet import wait_until
from tests.python.running import make_app, worker_of
from tests.sql.test_2_notices import Ear

Session = psycopg.Connection[Any]
#: Seconds.
CLAIM = 0.002


def idling(database: str, body: Callable[[Idling], Awaitable[None]]) -> None:
    """Run the body with an Idling that sleeps on the bell."""

    async def run() -> None:
        settings = Settings.load(dsn=database, poll_interval=30)
        link = Link(database, settings, "test")
        made = Idling(link, settings, uuid4(), None, ["t"])
        try:
            made.listens(1)
            made.bell.set()
            while not made.registered or made._writers:
                await made.wait(0, CLAIM)
            await body(made)
        finally:
            link.close()

    asyncio.run(run())


async def work(made: Idling, jobs: int, times: int, *, until: Callable[[], bool] = lambda: False) -> int:
    """Have a claim of jobs and an empty one every 25 ms; return how many waits after the latter a bell ended."""
    rung = 0
    for _ in range(times):
        await made.worked(jobs, CLAIM)
        if until():
            break
        await made.wait(jobs, CLAIM)
        waiting = asyncio.ensure_future(made.wait(0, CLAIM))
        await asyncio.sleep(0.025)
        rung += not waiting.done()
        made.bell.set()
        await waiting
        made.bell.clear()
    return rung


def listed(connection: Session) -> list[Any]:
    return connection.execute("select ctid::text, xmin::text from pgqueue.waiting").fetchall()


def test_who_has_few_jobs_stays_on_the_list_and_sleeps_between_them(database: str, connection: Session) -> None:
    async def body(made: Idling) -> None:
        before = listed(connection)
        assert len(before) == 1
        # Sooner one after the other than the time for which a worker lingers that is not on the list.
        assert await work(made, 1, 60) == 60
        assert made.registered
        assert listed(connection) == before

    idling(database, body)


def test_who_has_many_jobs_leaves_the_list_until_they_are_few(database: str, connection: Session) -> None:
    async def body(made: Idling) -> None:
        await work(made, 100, 400, until=lambda: not made.registered)
        assert listed(connection) == []
        await work(made, 100, 40)
        assert not made.registered
        await work(made, 1, 400, until=lambda: made.registered)
        assert len(listed(connection)) == 1

    idling(database, body)


def test_who_has_very_many_jobs_leaves_the_list_at_once(database: str, connection: Session) -> None:
    async def body(made: Idling) -> None:
        claims = 0
        while made.registered:
            claims += 1
            await made.worked(100, CLAIM)
        assert claims == 2
        assert listed(connection) == []

    idling(database, body)


def test_many_workers_alike_ring_as_one_does(database: str, connection: Session) -> None:
    async def body(made: Idling) -> None:
        made.alike = 50
        await work(made, 1, 400, until=lambda: not made.registered)
        assert listed(connection) == []

    idling(database, body)


def test_who_is_busy_without_a_break_leaves_the_list(database: str, connection: Session) -> None:
    async def body(made: Idling) -> None:
        for _ in range(400):
            await made.worked(0, CLAIM)
            if not made.registered:
                break
            await asyncio.sleep(0.01)
        assert listed(connection) == []

    idling(database, body)


def ear(connect: Connect) -> Ear:
    """One who waits too, and hears what it is rung for."""
    connect().execute(
        "select pgqueue.worker_started(w, 'w', 'h', 1, null, null, null, null, 1, '1'),"
        " pgqueue.wait_for_work(w, null, null, 'ear') from gen_random_uuid() w"
    )
    return Ear(connect, "ear")


def test_who_has_no_room_hands_its_bells_on(database: str, connection: Session, connect: Connect) -> None:
    async def body(made: Idling) -> None:
        other = ear(connect)
        await made.full()
        assert made.registered
        made.rang(Bell("mail", "t"))
        made.heed()
        await made.full()
        assert made.registered
        assert other.heard() == []
        made.rang(Bell("mail", "t"))
        made.rang(Bell("default", None))
        await made.full()
        assert sorted(other.heard()) == [("ear", '["default", null]'), ("ear", '["mail", "t"]')]
        assert len(listed(connection)) == 1
        await made.full()
        assert other.heard() == []
        made.rang(Bell("a", "t"))
        made.rang(Bell("b", "t"))
        made.left_over(made.heed()[1:])
        await made.full()
        assert other.heard() == [("ear", '["b", "t"]')]

    idling(database, body)


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_claim_without_room_for_all_that_was_heard_hands_the_rest_on(
    database: str, connection: Session, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    app = make_app(database, poll_interval=60.0)
    release = threading.Event()
    app.task("held")(lambda: release.wait(30) and None)
    handed_on: list[Bell] = []
    leave = Idling._leave

    async def noting(self: Idling, unheeded: list[Bell]) -> None:
        handed_on.extend(unheeded)
        await leave(self, unheeded)

    monkeypatch.setattr(Idling, "_leave", noting)
    with worker_of(app, concurrency=1) as worker:
        try:
            wait_until(lambda: worker._idling.registered and not worker._idling._writers)
            connection.execute(
                "insert into pgqueue.jobs (job_type, queue, priority)"
                " select 'held', q, case when q = %s then 0 else 3 end from unnest('{a,b}'::text[]) q",
                [first],
            )
            wait_until(lambda: bool(handed_on))
            (waits,) = connection.execute("select queue from pgqueue.jobs where in_line and status = 'pending'")
            assert Bell(waits[0], "held") in handed_on
        finally:
            release.set()


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_away_hands_on_what_it_hears_all_the_same(
    database: str, connection: Session, connect: Connect, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async def body(made: Idling) -> None:
        other = ear(connect)
        # The list may have it, though it was told to take it that it has not.
        made.forget()
        away = asyncio.ensure_future(made.away())
        await eventually(lambda: len(listed(connection)) == 1)
        if fails:
            monkeypatch.setattr(calls, "STOP_WAITING", dataclasses.replace(calls.STOP_WAITING, sql="select 1 / 0"))
            made.rang(Bell("mail", "t"))
            await eventually(lambda: made._unheeded == [Bell("mail", "t")] and not made.bell.is_set())
            monkeypatch.undo()
        made.rang(Bell("mail", "t"))
        heard: list[Any] = []

        def hears() -> bool:
            heard.extend(other.heard())
            return bool(heard)

        await eventually(hears)
        away.cancel()
        assert heard == [("ear", '["mail", "t"]')]

    idling(database, body)


async def eventually(holds: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, holds)


@pytest.mark.parametrize("state", ["its only slot is taken", "it drains"])
def test_no_bell_stays_with_a_worker_that_takes_no_jobs(
    database: str, connection: Session, connect: Connect, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    # It does not leave the list for being busy all the time.
    monkeypatch.setattr(idling_module, "BUSY_FOR", 60.0)
    app = make_app(database, poll_interval=60.0)
    release, begun = threading.Event(), threading.Event()

    @app.task("held")
    def held() -> None:
        begun.set()
        release.wait(30)

    with worker_of(app, concurrency=1) as worker:
        try:
            wait_until(lambda: bool(listed(connection)))
            connection.execute("insert into pgqueue.jobs (job_type) values ('held')")
            assert begun.wait(10)
            if state == "it drains":
                worker.request_stop()
                wait_until(lambda: not listed(connection))
            other = ear(connect)
            for _ in range(8):
                connection.execute("insert into pgqueue.jobs (job_type) values ('held')")
                wait_until(lambda: bool(other.heard()))
        finally:
            release.set()


def test_a_worker_that_was_taken_for_gone_is_on_the_list_again(database: str, connection: Session) -> None:
    """As one that was stopped for so long that the sweep took it off, and goes on."""
    app = make_app(database, poll_interval=60.0)
    app.task("t")(lambda: None)
    with worker_of(app) as worker:
        wait_until(lambda: worker._idling.registered and not worker._idling._writers)

        def taken_off() -> bool:
            connection.execute("update pgqueue.workers set last_heartbeat = now() - interval '61 seconds'")
            connection.execute("select from pgqueue.sweep('prune')")
            return listed(connection) == []

        # A sign of life may come in between.
        wait_until(taken_off)
        worker._heartbeat.sign_soon()
        wait_until(lambda: len(listed(connection)) == 1)


def test_a_listener_that_connects_anew_is_on_the_list_anew(database: str, connection: Session) -> None:
    app = make_app(database, poll_interval=60.0)
    app.task("t")(lambda: None)
    one = "select w.listener from pgqueue.waiting w join pg_stat_activity a on a.pid = w.listener"
    with worker_of(app):
        wait_until(lambda: connection.execute(one).fetchone() is not None)
        (before,) = connection.execute(one).fetchone() or (None,)
        connection.execute("select pg_terminate_backend(%s)", [before])
        wait_until(lambda: connection.execute(one + " and a.pid <> %s", [before]).fetchone() is not None)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_jobs_whose_bells_rang_are_not_looked_for_again_at_once(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idling_module, "EVEN", 30.0)

    async def body(made: Idling) -> None:
        for _ in range(2):
            made.rang()
        waiting = asyncio.ensure_future(made.wait(2, 30.0))
        await turns()
        assert not waiting.done()
        made.rang()
        await waiting

    idling(database, body)


def test_a_bell_that_comes_after_its_job_ends_no_nap(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idling_module, "EVEN", 30.0)

    async def body(made: Idling) -> None:
        waiting = asyncio.ensure_future(made.wait(2, 30.0))
        for _ in range(2):
            await turns()
            made.rang()
        await turns()
        assert not waiting.done()
        made.rang()
        await waiting

    idling(database, body)


def test_no_bell_is_passed_over_for_long(database: str) -> None:
    async def body(made: Idling) -> None:
        # As after one bell for many jobs, beside so many workers that naps are long.
        made.alike = 16
        async with asyncio.timeout(5):
            for early in (True, False):
                waiting = asyncio.ensure_future(made.wait(5, 2.0))
                await asyncio.sleep(0 if early else 4 * EVEN)
                assert not waiting.done()
                made.rang()
                await waiting

    idling(database, body)


def test_every_bell_ends_a_sleep(database: str) -> None:
    async def body(made: Idling) -> None:
        # Rung during the claim that found nothing, after as many as jobs came.
        made.rang()
        await made.wait(2, 0.001)
        made.rang()
        await made.wait(0, CLAIM)
        for _ in range(3):
            waiting = asyncio.ensure_future(made.wait(0, CLAIM))
            await turns()
            assert not waiting.done()
            made.rang()
            await waiting

    idling(database, body)


def test_a_claim_that_was_held_up_once_delays_none_after_it(database: str, connection: Session) -> None:
    held_up = """select count(*) from pg_stat_activity where application_name = 'pgqueue worker'
                   and datname = current_database() and wait_event_type = 'Lock'"""
    with make_app(database, wake="poll", poll_interval=0.1) as app:
        app.task("t")(lambda: None)
        with worker_of(app, maintenance=False), psycopg.connect(database) as holder:
            app.finished_job_sync(app.enqueue_sync("t"), wait=10)
            holder.execute("lock table pgqueue.jobs_live in access exclusive mode")
            wait_until(lambda: connection.execute(held_up).fetchone() != (0,), 10)
            began = time.monotonic()
            time.sleep(3)
            holder.commit()
            lasted = time.monotonic() - began
            wait_until(lambda: connection.execute(held_up).fetchone() == (0,), 10)
            row = app.finished_job_sync(app.enqueue_sync("t"), wait=30)
            assert row.started_at is not None
            assert (row.started_at - row.created_at).total_seconds() < lasted
