"""What sweeps and producers remember instead of looking at everything: it hides no job, and never counts too low."""

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Connect
from tests.sql.verbs import Verbs, refused


def pass_time(q: Verbs, minutes: float = 5, steps: int = 5) -> None:
    """Time goes by, with sweeps and with jobs that come and go, so that what the sweep remembers moves on."""
    for _ in range(steps):
        q.advance(seconds=minutes * 60 / steps)
        q.insert(queue="elsewhere")
        q.sweep("cursors")


def swept_to(q: Verbs, step: str) -> float:
    """Where the next sweep of `step` begins, in seconds before now."""
    value = q.value(f"select extract(epoch from pgqueue.clock() - {step}_swept_to) from pgqueue.sweep_state")
    return float(value)


@pytest.fixture
def moving(q: Verbs) -> Verbs:
    """With a clock that the test moves, and sweeps that begin near to now."""
    q.freeze()
    pass_time(q)
    assert 60 <= swept_to(q, "due") < 240
    assert 60 <= swept_to(q, "claims") < 240
    return q


def late_jobs(q: Verbs, kind: str, jobs: int = 1) -> None:
    """Jobs for `kind`: due now, or with a lease that has run out now."""
    if kind == "due":
        q.session.execute(
            "insert into pgqueue.jobs (job_type, scheduled_at)"
            " select 't', pgqueue.clock() + interval '1 second' from generate_series(1, %s)",
            [jobs],
        )
        q.advance(seconds=2)
    else:
        q.fill(jobs)
        assert len(q.claim(jobs)) == jobs
        q.advance(seconds=31)


KINDS = {"due": ("due", ["submitted"]), "leases": ("leases", ["processing"])}


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_a_sweep_takes(moving: Verbs, kind: str) -> None:
    """However slowly they are swept."""
    late_jobs(moving, kind, 50)
    for _ in range(5):
        moving.rows("select * from pgqueue.sweep(%s, 10)", [kind])
        pass_time(moving)
    assert [job.status for job in moving.snapshot() if job.queue == "default"] == ["pending"] * 50


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_was_locked_when_the_sweep_came_by(moving: Verbs, connect: Connect, kind: str, end: str) -> None:
    late_jobs(moving, kind)
    operator = connect()
    with operator.transaction(force_rollback=end == "rollback"):
        operator.execute("update pgqueue.jobs set payload = '1' where queue = 'default'")
        for _ in range(5):
            assert moving.sweep(kind) == {kind: 0}
            pass_time(moving)
    pass_time(moving)
    assert moving.sweep(kind) == {kind: 1}


@pytest.mark.parametrize("how", ["plain", "prepared"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_committed_late(moving: Verbs, connect: Connect, kind: str, how: str) -> None:
    writer = Verbs(connect())
    moving.insert()
    gid = moving.value("select current_database()")
    with contextlib.ExitStack() as ends:
        if how == "plain":
            ends.enter_context(writer.session.transaction())
        else:
            writer.session.execute("begin")
        if kind == "due":
            writer.rows(
                "insert into pgqueue.jobs (job_type, scheduled_at) values ('t', pgqueue.clock() + interval '1 s')"
            )
        else:
            assert len(writer.claim()) == 1
        if how == "prepared":
            pass_time(moving, 1, 1)
            writer.session.execute(f"prepare transaction '{gid}'")
            ends.callback(moving.session.execute, f"commit prepared '{gid}'")
        pass_time(moving)
    pass_time(moving)
    assert moving.sweep(kind) == {kind: 1}


@pytest.mark.parametrize("by", ["1 hour", "10 years"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_time_put_back_by_hand(moving: Verbs, kind: str, by: str) -> None:
    """To have a job tried again now, or a worker's job taken away."""
    if kind == "due":
        moving.insert(scheduled_at=moving.advance(seconds=1).replace(year=2100))
        column = "due_at"
    else:
        moving.start()
        column = "lease_expires_at"
    pass_time(moving, 0.4)
    moving.rows(f"update pgqueue.jobs set {column} = pgqueue.clock() - interval '{by}' where queue = 'default'")
    moving.advance(seconds=2)
    assert moving.sweep(kind) == {kind: 1}


@pytest.mark.parametrize("lease", ["-1 hour", "-1 microsecond"])
def test_a_lease_that_has_run_out_before_it_begins_is_refused(q: Verbs, lease: str) -> None:
    q.insert()
    with refused("PQ422", "lease"):
        q.claim(lease=lease)


def test_a_clock_that_jumps_back(moving: Verbs) -> None:
    """As after a failover to a host whose clock is right."""
    moving.advance(hours=2)
    pass_time(moving)
    moving.advance(hours=-2)
    moving.sweep()
    moving.start()
    moving.insert(scheduled_at=moving.advance(seconds=1))
    moving.advance(minutes=2)
    moving.sweep()
    moving.sweep()
    assert {job.status for job in moving.snapshot() if job.queue == "default"} == {"pending"}


# Depth


def check_bound(q: Verbs, queue: str, what: str) -> None:
    """What the next producer would take for the depth is no lower than the depth."""
    rows = q.rows(
        """select d.pending + nextval('pgqueue.jobs_seq') - d.counted_at_seq as bound,
                  (select count(*) from pgqueue.jobs j where j.status = 'pending' and j.queue = d.queue) as depth
             from pgqueue.queue_depths d where d.queue = %s""",
        [queue],
    )
    for row in rows:
        assert row.bound >= row.depth, f"after {what}"


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_of_a_queue_is_never_below_its_depth(q: Verbs, connect: Connect, seed: int) -> None:
    """Apart from jobs that were given back at their old place, of which the next sweep tells."""
    chance = random.Random(seed)
    q.freeze()
    q.rows("insert into pgqueue.queues (name, hard_limit) values ('default', 20000), ('elsewhere', 20000)")
    other = Verbs(connect())
    held: list[Any] = []
    opened = contextlib.ExitStack()

    def commit() -> None:
        """Whoever was open for long is counted by the next sweep."""
        opened.close()
        q.sweep("cursors")

    def hold() -> None:
        commit()
        opened.enter_context(other.session.transaction())
        other.fill(chance.randrange(60))

    def give_back(verb: str) -> None:
        jobs, held[:] = held[:20], held[20:]
        if verb == "lose":
            q.advance(minutes=1)
            held.clear()
            q.sweep("leases")
        elif verb == "move":
            q.rows(
                "update pgqueue.jobs set queue = 'elsewhere'"
                " where status = 'pending' and job_id in (select job_id from pgqueue.jobs limit 20)"
            )
        else:
            q.release(jobs)
        # With whatever is in flight when they come.
        opened.close()
        q.sweep("cursors")
        q.sweep("cursors")

    def finish(how: str) -> None:
        jobs, held[:] = held[:20], held[20:]
        for job in jobs if how != "complete" else []:
            q.fail(job, retryable=how == "fail")
        if how == "complete":
            q.complete(jobs)

    acts: dict[str, Callable[[], object]] = {
        "fill": lambda: q.fill(chance.randrange(60)),
        "scheduled": lambda: q.fill(20, scheduled_at=q.advance(seconds=1).replace(year=2100).isoformat()),
        "hold": hold,
        "commit": commit,
        "claim": lambda: held.extend(q.claim(chance.randrange(1, 120))),
        "complete": lambda: finish("complete"),
        "fail": lambda: finish("fail"),
        "die": lambda: finish("die"),
        "due": lambda: (
            q.advance(seconds=40),
            q.rows("update pgqueue.jobs set due_at = pgqueue.clock() where due_at is not null"),
            q.sweep("due"),
        ),
        "retry": lambda: q.call("retry_dead_letters"),
        "draw": lambda: q.rows("select setval('pgqueue.jobs_seq', nextval('pgqueue.jobs_seq') + 2500)"),
        "sweep": lambda: q.sweep("cursors", "due", "expired", "keys"),
        "release": lambda: give_back("release"),
        "lose": lambda: give_back("lose"),
        "move": lambda: give_back("move"),
    }
    for _ in range(150):
        name = chance.choice(list(acts))
        with contextlib.suppress(Exception) if name in ("fill", "hold", "scheduled") else contextlib.nullcontext():
            acts[name]()
        for queue in ("default", "elsewhere"):
            check_bound(q, queue, name)
    opened.close()
