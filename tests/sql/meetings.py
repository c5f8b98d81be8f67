"""Two verbs meet on one job: where the job starts from, what each verb says, and where all of it ends.

What is lawful is not written down a second time here. Whatever two sessions do at once must look like one of them
after the other (or, for a verb that skips locked rows, like its not having come by), which is found out by running
them one after the other in the same database.
"""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg.rows import dict_row

Session = psycopg.Connection[Any]

HOLDER = uuid.UUID("00000000-0000-7000-8000-000000000001")
OTHER = uuid.UUID("00000000-0000-7000-8000-000000000002")
QUEUE = "meeting"


@dataclass(frozen=True)
class Verb:
    """`call` runs the verb on a job and answers what it said.

    `waits` is false for one that passes locked rows by; `misses` is what one says that did not come across the job.
    """

    name: str
    call: Callable[[Session, uuid.UUID], Any]
    waits: bool = True
    misses: Any = None


def scalar(statement: str, **constants: Any) -> Callable[[Session, uuid.UUID], Any]:
    """A verb that is one statement with one answer, in which %(job)s is the job."""

    def call(session: Session, job: uuid.UUID) -> Any:
        parameters = {"job": job, "holder": HOLDER, "other": OTHER, "queue": QUEUE, **constants}
        cursor = session.execute(statement, parameters)
        if not cursor.description:
            return cursor.rowcount
        return [
            tuple(value if not isinstance(value, uuid.UUID) else ["another", "the job"][value == job] for value in row)
            for row in cursor
        ]

    return call


def swept(step: str) -> Verb:
    return Verb(
        f"sweep_{step}", scalar("select coalesce(sum(jobs), 0) from pgqueue.sweep(%(step)s)", step=step), False, [(0,)]
    )


VERBS = {
    verb.name: verb
    for verb in [
        Verb("claim", scalar("select job_id from pgqueue.claim(%(other)s, array[%(queue)s], 1)"), False, []),
        Verb(
            "heartbeat",
            scalar("select attempt, reason from pgqueue.heartbeat(%(holder)s, array[%(job)s], '{1}')"),
            False,
            [],
        ),
        Verb("complete", scalar("select pgqueue.complete(%(holder)s, array[%(job)s], '{1}', array['1'::jsonb])")),
        Verb("fail", scalar('select pgqueue.fail(%(holder)s, %(job)s, 1, \'{"message": "m"}\')')),
        Verb("fail_for_good", scalar('select pgqueue.fail(%(holder)s, %(job)s, 1, \'{"message": "m"}\', false)')),
        Verb("snooze", scalar("select pgqueue.snooze(%(holder)s, %(job)s, 1, '1 hour')")),
        Verb("release", scalar("select pgqueue.release(%(holder)s, array[%(job)s], '{1}')")),
        Verb("release_started", scalar("select pgqueue.release(%(holder)s, array[%(job)s], '{1}', true)")),
        Verb("cancel_attempt", scalar("select pgqueue.cancel_attempt(%(holder)s, %(job)s, 1)")),
        Verb("set_progress", scalar("select pgqueue.set_progress(%(holder)s, %(job)s, 1, '{}')")),
        Verb("cancel", scalar("select pgqueue.cancel(%(job)s)")),
        Verb("cancel_many", scalar("select outcome from pgqueue.cancel_many(array[%(job)s])")),
        Verb("retry", scalar("select status from pgqueue.retry(%(job)s)")),
        Verb("retry_dead_letters", scalar("select pgqueue.retry_dead_letters(queue => %(queue)s)"), False, [(0,)]),
        Verb("discard", scalar("select pgqueue.discard(%(job)s)")),
        Verb("discard_dead_letters", scalar("select pgqueue.discard_dead_letters(queue => %(queue)s)"), False, [(0,)]),
        # An UPDATE by hand waits, and then does not follow the row to another partition.
        Verb("edit_priority", scalar("update pgqueue.jobs set priority = 0 where job_id = %(job)s"), misses=0),
        Verb("edit_queue", scalar("update pgqueue.jobs set queue = 'elsewhere' where job_id = %(job)s"), misses=0),
        swept("due"),
        swept("leases"),
        swept("expired"),
        swept("keys"),
        # How many cursors it moves is no part of the job's story.
        Verb("sweep_cursors", scalar("select step from pgqueue.sweep('cursors')"), False, [("cursors",)]),
    ]
}


def _claimed(session: Session) -> None:
    session.execute("select pgqueue.claim(%s, array[%s], 1)", [HOLDER, QUEUE])
    # As far as a sweep could have come meanwhile.
    session.execute(
        "update pgqueue.claim_cursors set low_seq = (select last_value + 1 from pgqueue.jobs_seq) where queue = %s",
        [QUEUE],
    )


def _pending(session: Session, job: uuid.UUID) -> None:
    pass


def _expired(session: Session, job: uuid.UUID) -> None:
    session.execute("update pgqueue.jobs_live set expires_at = now() - interval '1 s' where job_id = %s", [job])


def _processing(session: Session, job: uuid.UUID) -> None:
    _claimed(session)


def _lapsed(session: Session, job: uuid.UUID) -> None:
    _claimed(session)
    session.execute("update pgqueue.jobs set lease_expires_at = now() - interval '1 s' where job_id = %s", [job])


def _cancelling(session: Session, job: uuid.UUID) -> None:
    _claimed(session)
    session.execute("select pgqueue.cancel(%s)", [job])


def _failed(session: Session, job: uuid.UUID) -> None:
    _claimed(session)
    session.execute("select pgqueue.fail(%s, %s, 1, '{}', true, '0')", [HOLDER, job])


def _snoozed(session: Session, job: uuid.UUID) -> None:
    _claimed(session)
    session.execute("select pgqueue.snooze(%s, %s, 1, '0')", [HOLDER, job])


def _dead_letter(session: Session, job: uuid.UUID) -> None:
    _claimed(session)
    session.execute("select pgqueue.fail(%s, %s, 1, '{}', false)", [HOLDER, job])


FINISHING = [
    "complete", "fail", "fail_for_good", "snooze", "release", "release_started", "cancel_attempt", "set_progress",
    "cancel", "cancel_many", "edit_priority", "edit_queue",
]  # fmt: skip

# Where a job starts from, how it gets there from pending, and the verbs that change it there.
STARTS: dict[str, tuple[Callable[[Session, uuid.UUID], None], list[str]]] = {
    "pending": (_pending, ["claim", "cancel", "cancel_many", "edit_priority", "edit_queue"]),
    "expired": (_expired, ["cancel", "edit_priority", "sweep_expired"]),
    "processing": (_processing, ["heartbeat", *FINISHING]),
    "lapsed": (_lapsed, ["heartbeat", "sweep_leases", *FINISHING]),
    "cancelling": (_cancelling, ["heartbeat", "complete", "fail", "snooze", "release", "cancel_attempt"]),
    "failed": (_failed, ["cancel", "cancel_many", "retry", "sweep_due", "edit_priority", "edit_queue"]),
    "snoozed": (_snoozed, ["cancel", "sweep_due", "edit_priority"]),
    "dead_letter": (_dead_letter, ["retry", "retry_dead_letters", "discard", "discard_dead_letters"]),
}


@dataclass
class Outcome:
    """Where the jobs stand, what each verb that ran said, and the statuses of jobs that nothing will ever end."""

    state: list[dict[str, Any]]
    said: dict[str, Any]
    lost: list[str] = field(default_factory=list)


def say(verb: Verb, session: Session, job: uuid.UUID) -> Any:
    """What the verb answers; a refusal is an answer, any other error is raised."""
    try:
        return verb.call(session, job)
    except psycopg.Error as error:
        if error.sqlstate in ("PQ404", "PQ409"):
            return error.sqlstate
        raise


def enqueue(session: Session, *, keyed: bool) -> tuple[uuid.UUID, uuid.UUID | None]:
    """A job in a queue of its own and, if it has an ordering key, one that waits behind it."""
    session.execute("delete from pgqueue.jobs")
    ids = [
        row[0]
        for key in (["k", "k"] if keyed else [None])
        for row in session.execute(
            "select job_id from pgqueue.enqueue('t', queue => %s, ordering_key => %s)", [QUEUE, key]
        )
    ]
    # What the second one noted is swept already.
    session.execute("select pgqueue.sweep('keys')")
    return ids[0], ids[1] if keyed else None


def state(session: Session, ids: list[uuid.UUID]) -> list[dict[str, Any]]:
    """The jobs as they stand, without what differs from run to run."""
    with session.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(
            """select array_position(%(ids)s::uuid[], job_id) as job, status, attempts, max_retries, lost, uncharged,
                      priority, queue, right(worker_id::text, 1) as worker, due_at is not null as has_due,
                      lease_expires_at is not null as leased,
                      cancel_requested_at is not null as cancelling, finished_at is not null as finished,
                      expires_at is not null as expires, jsonb_array_length(errors) as errors, progress, result
                 from pgqueue.jobs where job_id = any (%(ids)s) order by 1, status""",
            {"ids": ids},
        ).fetchall()
    return [{name: value for name, value in row.items() if value} for row in rows]


def drain(session: Session) -> list[str]:
    """Runs everything that is left, as time would; the statuses of jobs that never end."""
    for _ in range(6):
        session.execute(
            """update pgqueue.jobs set due_at = case when status in ('submitted', 'failed') then now() end,
                      lease_expires_at = case when status = 'processing' then now() - interval '1 s' end,
                      expires_at = null
                where finished_at is null
                  and (due_at is not null or lease_expires_at is not null or expires_at is not null)"""
        )
        session.execute("select pgqueue.sweep()")
        session.execute(
            """with taken as materialized (select * from pgqueue.claim(%(other)s, array[%(queue)s, 'elsewhere'], 10))
               select pgqueue.complete(%(other)s, array_agg(job_id), array_agg(attempts), null) from taken""",
            {"other": OTHER, "queue": QUEUE},
        )
        left = [row[0] for row in session.execute("select status from pgqueue.jobs_live")]
        if not left:
            break
    return left
