"""What watching costs with two million finished and a hundred thousand pending jobs."""

import time
import uuid
from collections.abc import Callable

import pytest

from tests.conftest import Connect
from tests.sql.verbs import Verbs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def milliseconds(work: Callable[[], object], times: int = 10) -> float:
    """The shortest time of some calls, on a machine that has other work too; the first plans and does not count."""
    work()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append((time.perf_counter() - begun) * 1000)
    return min(taken)


def test_each_look_takes_less_than_300_ms(q: Verbs, connect: Connect) -> None:
    q.call("maintain_partitions")
    q.session.execute(
        "insert into pgqueue.jobs_completed (job_id, job_type, queue, status, attempts, started_at, finished_at)"
        " select pgqueue.new_job_id(), 't' || n % 20, 'q' || n % 5, 'completed', 1, now(), now()"
        " from generate_series(1, 2000000) n"
    )
    q.session.execute(
        "insert into pgqueue.jobs (job_type, queue, priority)"
        " select 't' || n % 20, 'q' || n % 5, n % 4 from generate_series(1, 100000) n"
    )
    for _ in range(3):
        q.sweep()
    claims = Verbs(connect())

    def claim() -> None:
        jobs = claims.claim(10, uuid.uuid4(), None)
        claims.release(jobs, jobs[0].worker_id)

    before = milliseconds(claim, 50)
    looks = {
        statement: milliseconds(lambda statement=statement: q.rows(statement))  # type: ignore[misc]
        for statement in (
            "select * from pgqueue.metrics()",
            "select * from pgqueue.queue_stats",
            "select * from pgqueue.alerts",
            "select pgqueue.backlog(), pgqueue.wanted_workers()",
            "select * from pgqueue.history()",
        )
    }
    assert all(taken < 300 for taken in looks.values()), looks
    scans = "select sum(seq_scan) from pg_stat_user_tables where relname like 'jobs%'"
    q.session.execute("select pg_stat_force_next_flush()")
    counted = q.value(scans)
    for statement in looks:
        q.rows(statement)
    q.session.execute("select pg_stat_force_next_flush()")
    assert q.value(scans) == counted
    after = milliseconds(claim, 50)
    assert after < 1.5 * before + 1, (before, after)
    # Arrivals are counted in parts; what is left is counted in the next ones.
    taken = milliseconds(lambda: q.call("count_arrivals"), 10)
    assert taken < 1500
