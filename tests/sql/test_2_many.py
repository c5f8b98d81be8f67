"""Jobs given as arrays, which go past the trigger of the root: they owe their queues what an INSERT owes."""

from datetime import timedelta

import pytest

from tests.conftest import Connect
from tests.sql.test_2_bells import rung, waiting
from tests.sql.test_2_notices import WATCHER, StatusEar
from tests.sql.verbs import Verbs, refused


def queue(q: Verbs, name: str, **settings: object) -> None:
    columns, values = ", ".join(settings), list(settings.values())
    q.session.execute(
        f"insert into pgqueue.queues (name, {columns}) values (%s{', %s' * len(values)})",  # type: ignore[arg-type]
        [name, *values],
    )


def test_ids_follow_each_other_in_the_order_of_the_jobs(q: Verbs) -> None:
    assert q.enqueue_rows([]).ids == []
    first, second = (q.enqueue_rows(["t"] * 1000) for _ in range(2))
    assert (first.statuses, first.duplicates) == (None, None)
    stored = [row.job_id for row in q.rows("select job_id from pgqueue.jobs_live order by seq")]
    assert stored == [*first.ids, *second.ids]
    assert first.ids == sorted(first.ids)
    assert len(set(stored)) == 2000
    assert {(job_id.version, job_id.variant) for job_id in stored} == {(7, "specified in RFC 4122")}
    near = "bool_and(abs(extract(epoch from pgqueue.id_time(job_id) - created_at)) < 5)"
    assert q.value(f"select {near} from pgqueue.jobs_live")
    assert q.value("select count(distinct shard) from pgqueue.jobs_live") == 64


def test_each_queue_has_its_own_limits(q: Verbs) -> None:
    queue(q, "full", hard_limit=3, soft_limit=3)
    q.enqueue_rows(["t"] * 6, queues=["full", "a", "full", "b", "full"])
    with refused("PQ503", 'queue "full" is full'):
        q.enqueue_rows(["t"] * 3, queues=["a", "full"])
    assert q.value("select count(*) from pgqueue.jobs_live") == 6
    q.enqueue_rows(["t"] * 2, queues=["a", "b"])


def test_a_queue_above_its_soft_limit_slows_producers_down(q: Verbs) -> None:
    queue(q, "slow", soft_limit=10)
    q.enqueue_rows(["t"] * 5000, queues=["slow"] * 5000)
    with refused("PQ429", "more than 10 jobs pending"):
        q.enqueue_rows(["t"], queues=["slow"])
    q.enqueue_rows(["t"])


def test_only_low_jobs_are_shed_and_only_where_they_are(q: Verbs) -> None:
    queue(q, "shed", soft_limit=10, shed_low=True)
    q.enqueue_rows(["t"] * 11, queues=["shed"] * 11)
    q.sweep()
    with refused("PQ503", "sheds jobs of low priority"):
        q.enqueue_rows(["t"] * 2, queues=["a", "shed"], priorities=[2, 3])
    q.enqueue_rows(["t"] * 2, queues=["a", "shed"], priorities=[3, 2])


def test_a_rate_is_kept(q: Verbs) -> None:
    queue(q, "rated", rate_per_second=5)
    q.enqueue_rows(["t"] * 50, queues=["rated"] * 50)
    with refused("PQ429", 'queue "rated" takes 5 jobs a second'):
        q.enqueue_rows(["t"], queues=["rated"])


def test_a_sweep_is_told_of_a_queue_that_is_new(q: Verbs) -> None:
    q.enqueue_rows(["t", "t"], queues=["new"])
    q.sweep()
    assert {row.queue for row in q.rows("select queue from pgqueue.queue_depths")} == {"new", "default"}


def test_workers_that_wait_for_these_jobs_are_rung(q: Verbs, connect: Connect) -> None:
    channels = [*waiting(q, 1, ["mail"], ["send"]), *waiting(q, 3), *waiting(q, 1, ["mail"], ["other"])]
    heard = rung(connect, channels)
    q.enqueue_rows(["send", "t", "t"], queues=["mail"])
    got = heard()
    assert {channel for channel, _ in got} <= set(channels[:4])
    assert sorted(bell for _, bell in got) == ['["default", "t"]', '["default", "t"]', '["mail", "send"]']
    q.session.execute("set pgqueue.wake = off")
    q.enqueue_rows(["send"], queues=["mail"])
    assert heard() == []


def test_watchers_are_told(q: Verbs, connect: Connect) -> None:
    ear = StatusEar(connect)
    q.session.execute("select pgqueue.watch(%s, '10 hours')", [WATCHER])
    for _ in range(2):
        q.session.execute("select setval('pgqueue.notice_slot', 1)")
        ids = q.enqueue_rows(["t", "u"], queues=["mail"]).ids
        events = ear.events()
        assert [(e["event"], e["job_id"], e["queue"], e["job_type"], e["to"]) for e in events] == [
            ("job.queued", str(ids[0]), "mail", "t", "pending"),
            ("job.queued", str(ids[1]), "default", "u", "pending"),
        ]


@pytest.mark.parametrize(
    ("arrays", "column"), [({"job_types": ["t", ""]}, "job_type"), ({"queues": ["", "a"]}, "queue")]
)
def test_empty_names_are_refused(q: Verbs, arrays: dict[str, list[str]], column: str) -> None:
    with refused("23514", column, column=column):
        q.enqueue_rows(**{"job_types": ["t", "t"], **arrays})


def test_jobs_with_a_time_or_a_key_are_stored_by_the_root(q: Verbs) -> None:
    q.freeze()
    row = q.enqueue_rows(["t"] * 4, delays_ms=[None, 1000], ordering_keys=[None, None, "k", "k"])
    assert row.statuses == ["pending", "submitted", "pending", "submitted"]
    assert row.duplicates == [False] * 4
    q.advance(seconds=2)
    q.sweep()
    assert q.job(row.ids[1]).status == "pending"
    assert q.job(row.ids[1]).scheduled_at == q.job(row.ids[0]).created_at + timedelta(seconds=1)
