"""The primary is lost: what a standby takes over, what it cannot know, and what a lost primary may still say."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgqueue import App, Settings, schema
from pgqueue.bench.failover import rounds, statements
from pgqueue.bench.failover.load import CONNECT_TIMEOUT, STATEMENT_LIMIT
from pgqueue.bench.failover.pair import Pair, pair, wait_for
from pgqueue.errors import DatabaseUnavailable, PgqueueError
from tests.meet import wait_until
from tests.python.apps import MARKS
from tests.python.running import eventually, worker_process

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("failover")]


def app_on(dsn: str) -> App:
    return App(settings=Settings(dsn=dsn, statement_limit=STATEMENT_LIMIT, connect_timeout=CONNECT_TIMEOUT))


def check(found: dict[str, Any], count: int) -> None:
    assert len(found["rounds"]) == count
    assert found["accepted"] > 50 * count
    assert (found["lost"], found["not completed"], found["wrong"]) == (0, 0, 0), found


@pytest.mark.parametrize(
    "faults", [["killed", "hung"], pytest.param(["killed", "hung"] * 3, marks=pytest.mark.slow)], ids=["two", "six"]
)
def test_no_accepted_job_is_lost_with_its_primary(tmp_path: Path, faults: list[rounds.Fault]) -> None:
    found = rounds.by_hand(tmp_path, faults, print)
    check(found, len(faults))
    for one in found["rounds"]:
        # Deadlines of two and three seconds, with room for a busy machine.
        assert one["accepted"] - one["promoted"] < 30
        assert one["completed"] - one["promoted"] < 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_accepted_job_is_lost_under_patroni(tmp_path: Path) -> None:
    patroni = pytest.importorskip("pgqueue.bench.failover.patroni")
    if missing := patroni.missing():
        pytest.skip(missing)
    check(patroni.by_patroni(tmp_path, ["killed", "hung"], print), 2)


def test_a_lost_primary_that_comes_back_acknowledges_nothing(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        schema.migrate(servers.dsn)
        old = servers.primary
        with app_on(servers.dsn) as app:
            accepted = app.enqueue_sync("t", {"n": 1})
        old.signal(signal.SIGSTOP)
        servers.fail_over()
        old.signal(signal.SIGCONT)
        # It does not know that it was replaced; its commits wait for a standby that no longer follows.
        assert old.execute(statements.IS_STANDBY) == [(False,)]
        with app_on(old.server.tcp_dsn) as app:
            for _ in range(3):
                with pytest.raises(DatabaseUnavailable):
                    app.enqueue_sync("t", {"n": 2})
        with app_on(servers.primary.server.tcp_dsn) as app:
            assert app.job_sync(accepted).payload == {"n": 1}
            ours = app.enqueue_sync("t", {"n": 3})
        old.kill()
        servers.rejoin()
        payloads = "select payload ->> 'n' from pgqueue.jobs order by 1"
        for node in servers.nodes:
            wait_for(lambda node=node: node.execute(payloads) == [("1",), ("3",)], "both nodes agree")  # type: ignore[misc]
        with app_on(servers.dsn) as app:
            assert app.job_sync(ours).payload == {"n": 3}


def test_a_lost_synchronous_standby_stops_commits_until_somebody_says_so(tmp_path: Path) -> None:
    with pair(tmp_path) as servers:
        schema.migrate(servers.dsn)
        servers.standby.kill()
        with app_on(servers.dsn) as app:
            with pytest.raises(DatabaseUnavailable):
                app.enqueue_sync("t", {"n": 1})
            servers.primary.execute(statements.SYNC_OFF)
            servers.primary.execute(statements.RELOAD)
            wait_until(lambda: _enqueued(app), 20)


def _enqueued(app: App) -> bool:
    try:
        app.enqueue_sync("t", {"n": 2})
    except PgqueueError:
        return False
    return True


@pytest.fixture
def stale(tmp_path: Path) -> Iterator[tuple[Pair, dict[str, list[Any]]]]:
    """A pair that replicates asynchronously, whose standby stopped following before the primary was lost.

    With the jobs that were enqueued before and after that moment, and of the former those that were completed after it.
    """
    with pair(tmp_path, synchronous=False) as servers:
        schema.migrate(servers.dsn)
        servers.primary.execute(MARKS)
        servers.primary.execute("create table public.effects (job_id uuid, at timestamptz default clock_timestamp())")
        with app_on(servers.dsn) as app:
            jobs: dict[str, list[Any]] = {"before": app.enqueue_many_sync([{"job_type": "effective"}] * 20)}
            servers.primary.execute("select pgqueue.sweep()")
            caught_up = "select pg_last_wal_replay_lsn() >= %(lsn)s::pg_lsn"
            ((lsn,),) = servers.primary.execute("select pg_current_wal_flush_lsn()::text")
            wait_for(lambda: servers.standby.execute(caught_up, lsn=lsn) == [(True,)], "the standby has the jobs")
            servers.standby.execute("alter system set primary_conninfo = ''")
            servers.standby.execute(statements.RELOAD)
            wait_for(lambda: servers.standby.execute(statements.RECEIVERS) == [], "the standby follows no more")
            with worker_process(servers.dsn):
                done = [app.finished_job_sync(job, wait=30) for job in jobs["before"]]
            assert {row.status for row in done} == {"completed"}
            jobs["done"] = done
            jobs["after"] = app.enqueue_many_sync([{"job_type": "effective"}] * 10)
        servers.primary.kill()
        servers.fail_over()
        yield servers, jobs


def test_what_a_stale_standby_does_not_know_is_lost_or_runs_again_and_leaves_a_trace(
    stale: tuple[Pair, dict[str, list[Any]]],
) -> None:
    servers, jobs = stale
    began = time.time()
    with app_on(servers.dsn) as app:
        # What was accepted after it stopped following is gone, and was in no answer of this server.
        for job in jobs["after"]:
            with pytest.raises(PgqueueError, match="no job"):
                app.job_sync(job)
        # What was finished after that waits again.
        assert {app.job_sync(job).status for job in jobs["before"]} == {"pending"}
        # What a task wrote in its job's transaction went with the completion: so it is there once, not twice.
        assert servers.primary.execute("select count(*) from public.effects") == [(0,)]
        with worker_process(servers.dsn, PGQUEUE_SWEEP_INTERVAL="0.2"):
            again = [app.finished_job_sync(job, wait=30) for job in jobs["before"]]
            promoted = "select detail from pgqueue.audit where verb = 'promoted'"
            eventually(lambda: servers.primary.execute(promoted), 20)
        assert {row.status for row in again} == {"completed"}
        assert servers.primary.execute("select count(*), count(distinct job_id) from public.effects") == [(20, 20)]
        # The trace: which server took over when, at which place of the log, and so which runs may be second ones.
        (detail,) = servers.primary.execute(promoted)[0]
        assert (int(detail["from"], 16), int(detail["to"], 16)) == (1, 2)
        doubtful = servers.primary.execute(
            """select job_id from pgqueue.jobs j, pgqueue.audit a
                where a.verb = 'promoted' and j.created_at < a.at and j.finished_at > a.at - interval '1 minute'"""
        )
        assert {row[0] for row in doubtful} >= {job.job_id for job in jobs["before"]}
    # Whoever kept what the first run was told sees that the second was another one.
    first = {row.job_id: row for row in jobs["done"]}
    for row in again:
        assert row.finished_at is not None
        assert row.finished_at.timestamp() > began
        assert (row.worker_id, row.finished_at) != (first[row.job_id].worker_id, first[row.job_id].finished_at)
