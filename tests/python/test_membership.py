"""Groups of workers that divide the shards: who gets which, and that nothing is left lying."""

from typing import Any
from uuid import UUID

import psycopg
import pytest

from pgqueue import Job
from pgqueue.errors import ConfigError
from pgqueue.membership import SHARDS, share
from pgqueue.worker import Worker
from tests.meet import running_time
from tests.python.running import asleep, eventually, make_app, worker_of

Session = psycopg.Connection[Any]
MEMBERS = [UUID(int=number) for number in range(1, 101)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 63, 64, 100])
def test_each_shard_has_one_of_the_members(count: int) -> None:
    members = MEMBERS[:count]
    shares = [share(members, member) or [] for member in members]
    assert sorted(shard for shards in shares for shard in shards) == list(range(SHARDS))
    sizes = {len(shards) for shards in shares}
    assert max(sizes) - min(sizes) <= 1


def test_a_member_that_is_not_seen_leaves_nothing_lying() -> None:
    assert share(MEMBERS[:3], MEMBERS[5]) is None


def test_assigned_partitions_need_a_group(database: str) -> None:
    with make_app(database) as app:
        app.task("t")(lambda job: None)
        with pytest.raises(ConfigError, match="need a group"):
            app.worker(partitions="assigned")
        with pytest.raises(ConfigError, match="it must be"):
            app.worker(group="g", partitions="some")  # type: ignore[typeddict-item]


def test_members_of_the_same_work_share_and_others_do_not(database: str) -> None:
    with make_app(database) as app, make_app(database) as newer:

        async def nothing(job: Job) -> None: ...

        app.task("t")(nothing)
        newer.task("t")(nothing)
        newer.task("new")(nothing)
        options: Any = {"group": "g", "partitions": "assigned"}
        with worker_of(app, **options) as first:
            eventually(lambda: first.shards == list(range(SHARDS)))
            with worker_of(app, **options) as second, worker_of(newer, **options) as other:
                eventually(lambda: (len(first.shards or []), len(second.shards or [])) == (32, 32))
                eventually(lambda: other.shards == list(range(SHARDS)))
                assert {*(first.shards or []), *(second.shards or [])} == set(range(SHARDS))
                rows = [app.finished_job_sync(app.enqueue_sync("t"), wait=10) for _ in range(10)]
                assert {row.status for row in rows} == {"completed"}
                app.finished_job_sync(app.enqueue_sync("new"), wait=10)
            eventually(lambda: first.shards == list(range(SHARDS)))


def test_the_bell_reaches_the_member_that_has_the_shard(database: str, connection: Session) -> None:
    options: Any = {"group": "g", "partitions": "assigned"}
    # So slow a poll that only a bell can be in time.
    with make_app(database, poll_interval=30.0) as app:

        @app.task("t")
        async def t(job: Job) -> None: ...

        with worker_of(app, **options) as first, worker_of(app, **options) as second:
            eventually(lambda: (len(first.shards or []), len(second.shards or [])) == (32, 32))
            for _ in range(12):
                asleep(connection, 2)
                began = running_time()
                row = app.finished_job_sync(app.enqueue_sync("t"), wait=20)
                assert running_time() - began < 10
                owner: Worker = first if row.shard in (first.shards or []) else second
                assert row.worker_id == owner.worker_id
