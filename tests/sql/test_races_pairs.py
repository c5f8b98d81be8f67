"""Every pair of verbs on one job in two sessions, of which the first holds what it did while the second comes by."""

from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace

import psycopg
import pytest

from tests.meet import aside, wait_for_lock, wait_until
from tests.servers import Databases
from tests.sql.meetings import STARTS, VERBS, Outcome, Session, Verb, drain, enqueue, say, state

MEETINGS = [(start, first) for start, (_, firsts) in STARTS.items() for first in firsts]


@pytest.fixture(scope="module")
def sessions(template_copies: Databases) -> Iterator[list[Session]]:
    """Three autocommit sessions on a database of this module: two that meet and one that looks on."""
    dsn = template_copies.create()
    opened = [psycopg.connect(dsn, autocommit=True) for _ in range(3)]
    yield opened
    for session in opened:
        session.close()
    template_copies.drop(dsn)


def in_turn(session: Session, start: str, verbs: list[Verb], *, keyed: bool) -> Outcome:
    """What the verbs do one after the other."""
    job, behind = enqueue(session, keyed=keyed)
    STARTS[start][0](session, job)
    said = {verb.name: say(verb, session, job) for verb in verbs}
    return Outcome(state(session, [job, behind or job]), said)


def at_once(sessions: list[Session], start: str, verbs: list[Verb], *, keyed: bool, commits: bool) -> Outcome:
    """What they do when the first ends only after the second was seen to wait for it, or to have passed it by."""
    one, two, looker = sessions
    first, second = verbs
    job, behind = enqueue(looker, keyed=keyed)
    STARTS[start][0](looker, job)
    with one.transaction(force_rollback=not commits):
        said = {first.name: say(first, one, job)}
        answer = aside(say, second, two, job)

        def met() -> str | None:
            if answer.done():
                return "passed"
            row = looker.execute("select pg_blocking_pids(%s)", [two.info.backend_pid]).fetchone()
            return "waits" if row and one.info.backend_pid in row[0] else None

        wait_until(met, interval=0.001)
        assert second.waits or answer.done(), f"{second.name} waits for {first.name}"
    wait([answer], timeout=10)
    said[second.name] = answer.result()
    outcome = Outcome(state(looker, [job, behind or job]), said)
    outcome.lost = drain(looker)
    return outcome


def test_cancel_of_a_job_that_dies_and_comes_back_meanwhile(sessions: list[Session]) -> None:
    one, two, looker = sessions
    job, _ = enqueue(looker, keyed=False)
    STARTS["processing"][0](looker, job)
    with one.transaction():
        say(VERBS["fail_for_good"], one, job)
        say(VERBS["retry"], one, job)
        answer = aside(say, VERBS["cancel"], two, job)
        wait_for_lock(looker, two.info.backend_pid)
    assert answer.result(10) == [("cancelled",)]


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
@pytest.mark.parametrize(("start", "first"), MEETINGS, ids=lambda value: value)
def test_two_verbs_meet(sessions: list[Session], start: str, first: str, keyed: bool) -> None:
    looker = sessions[2]
    untouched = in_turn(looker, start, [], keyed=keyed)
    alone = in_turn(looker, start, [VERBS[first]], keyed=keyed)
    assert alone.state != untouched.state or first in ("heartbeat", "set_progress", "cancel"), "the first does nothing"
    unlawful = []
    for second in VERBS.values():
        if second.name == first:
            second = replace(second, name=f"{second.name} again")
        for commits in (True, False):
            met = at_once(sessions, start, [VERBS[first], second], keyed=keyed, commits=commits)
            if not commits:
                del met.said[first]
            missed = (
                met.said[second.name] == second.misses
                and met.state == (alone if commits else untouched).state
                and not met.lost
            )
            orders = [[VERBS[first], second], [second, VERBS[first]]] if commits else [[second]]
            if not missed and not any(met == in_turn(looker, start, order, keyed=keyed) for order in orders):
                unlawful.append(f"{second.name}, {'commit' if commits else 'rollback'}: {met}")
    assert not unlawful, "\n".join(unlawful)
