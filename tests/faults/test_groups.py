"""A group of worker processes that divides the shards, of which one is killed."""

import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import psycopg

from pgqueue.membership import MISSED, SHARDS
from tests.meet import running_time
from tests.python.apps import MARKS
from tests.python.running import eventually, make_app, worker_process

Session = psycopg.Connection[Any]
_LEAST = f"select count(distinct shard) = {SHARDS} from pgqueue.jobs"


def test_the_shards_of_a_killed_member_are_soon_served(database: str, connection: Session) -> None:
    connection.execute(MARKS)
    with make_app(database) as app, ExitStack() as processes:
        for _ in range(4):
            processes.enter_context(
                worker_process(database, call="app.run_worker(group='g', partitions='assigned')", wait=False)
            )
        eventually(lambda: len(app.workers_sync()) == 4)
        # Signs of life, and looks for those of others.
        time.sleep(3)
        app.enqueue_many_sync([{"job_type": "noop"}] * 1000)
        assert connection.execute(_LEAST).fetchone() == (True,)
        done = "select count(*) from pgqueue.jobs where status = 'completed'"
        eventually(lambda: connection.execute(done).fetchone() == (1000,))
        members = sorted(row["worker_id"] for row in app.workers_sync())
        served = connection.execute("select distinct worker_id::text, shard from pgqueue.jobs").fetchall()
        assert sorted(served) == sorted((members[shard % 4], shard) for shard in range(SHARDS))

        killed = members[2]
        os.kill(next(row["pid"] for row in app.workers_sync() if row["worker_id"] == killed), signal.SIGKILL)
        killed_at = running_time()
        app.enqueue_many_sync([{"job_type": "noop"}] * 1000)
        eventually(lambda: connection.execute(done).fetchone() == (2000,))
        assert running_time() - killed_at < MISSED + 2
