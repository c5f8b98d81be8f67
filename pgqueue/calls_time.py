"""The SQL calls that sweepers, schedulers and people who look at schedules make, as data; see calling.py."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast
from uuid import UUID

import msgspec

from pgqueue.calling import Call, Rows, records, scalar, tuples


def _record(rows: Rows) -> dict[str, Any] | None:
    return records(rows)[0] if rows else None


# Sweepers -------------------------------------------------------------------------------------------------------------

TAKE_TURN: Final = Call(
    "take_turn", "select pgqueue.take_turn(make_interval(secs => %(every)s::float8))", scalar, hot=True
)
NEXT_DUE: Final = Call(
    "next_due", "select extract(epoch from pgqueue.next_due())::float8", lambda rows: cast(float | None, rows[0][0])
)


class Swept(NamedTuple):
    """What a sweep in one statement did: by step, the jobs (None: another is at it) and what went wrong.

    mine: whether the turn was ours; without it nothing was done. due_in: seconds until something is due.
    """

    mine: bool
    due_in: float | None
    schedules_due: bool
    steps: dict[str, tuple[int | None, str | None]]


def _swept(rows: Rows) -> Swept:
    mine, due_in, schedules_due, steps = rows[0]
    return Swept(mine, due_in, bool(schedules_due), msgspec.json.decode(steps) if steps else {})


SWEEP_STEPS: Final = Call(
    "sweep_steps",
    """with turn as materialized (select pgqueue.take_turn(make_interval(secs => %(every)s::float8)) as mine)
       select t.mine,
              case when t.mine then extract(epoch from pgqueue.next_due())::float8 end,
              case when t.mine then exists (select from pgqueue.schedules s where s.enabled
                     and (s.next_run_at is null or s.next_run_at <= pgqueue.clock())) end,
              case when t.mine then (
                select json_object_agg(s.step, json_build_array(r.jobs, r.problem))::text
                  from unnest(%(steps)s::text[]) s(step)
                 cross join lateral pgqueue.sweep_step(s.step, %(max_jobs)s::int,
                                                       make_interval(secs => %(patience)s::float8), true) r) end
         from turn t""",
    _swept,
    hot=True,
)
SWEEP_STEP: Final = Call(
    "sweep_step",
    """select jobs, problem from pgqueue.sweep_step(%(step)s::text, %(max_jobs)s::int,
                                                    make_interval(secs => %(patience)s::float8), true)""",
    lambda rows: cast(tuple[int | None, str | None], tuple(rows[0])),
    hot=True,
)
NOTE_STEP: Final = Call(
    "note_step",
    """select pgqueue.note_step(%(step)s::text, clock_timestamp() - make_interval(secs => %(seconds)s::float8),
                                %(jobs)s::bigint, %(problem)s::text)""",
    lambda rows: None,
)
MAINTAIN_PARTITIONS: Final = Call(
    "maintain_partitions", "select partition, action from pgqueue.maintain_partitions(%(max_actions)s::int)", tuples
)
ANALYSE: Final = Call("analyse", "select pgqueue.analyse()", scalar)

# Schedulers -----------------------------------------------------------------------------------------------------------

_DUE_COLUMNS: Final = """json_build_object(
    'name', s.name, 'cron', s.cron, 'timezone', s.timezone, 'misfire', s.misfire, 'misfire_cap', s.misfire_cap,
    'due_at', s.next_run_at, 'now', pgqueue.clock(), 'last_error', s.last_error)::text"""
DUE_SCHEDULES: Final = Call(
    "due_schedules",
    f"""(select {_DUE_COLUMNS} from pgqueue.schedules s
          where s.enabled and s.next_run_at is null
            and (s.last_error is null
                 or s.updated_at not between pgqueue.clock() - interval '10 minutes' and pgqueue.clock())
            and s.name <> all (%(later)s::text[])
          limit %(limit)s::int)
        union all
        (select {_DUE_COLUMNS} from pgqueue.schedules s
          where s.enabled and s.next_run_at <= pgqueue.clock() and s.name <> all (%(later)s::text[])
          order by s.next_run_at limit %(limit)s::int)""",  # noqa: S608
    records,
    hot=True,
)
FIRE_SCHEDULES: Final = Call(
    "fire_schedules",
    "select name, jobs, problem from pgqueue.fire_schedules(%(plans)s::jsonb)",
    lambda rows: cast(list[tuple[str, int, str | None]], tuples(rows)),
)
SCHEDULE_FAILED: Final = Call(
    "schedule_failed",
    "select pgqueue.schedule_failed(%(name)s::text, %(due_at)s::text::timestamptz, %(error)s::text)",
    scalar,
)
DECLARE_SCHEDULES: Final = Call(
    "declare_schedules",
    """select name, outcome from pgqueue.declare_schedules(%(declared_by)s::text, %(fingerprint)s::text,
         %(declared)s::jsonb, %(started)s::boolean)""",
    tuples,
)

# Operators ------------------------------------------------------------------------------------------------------------

SCHEDULES: Final = Call("schedules", "select row_to_json(s)::text from pgqueue.schedules s order by s.name", records)
SCHEDULE: Final = Call(
    "schedule", "select row_to_json(s)::text from pgqueue.schedules s where s.name = %(name)s::text", _record
)
RUN_SCHEDULE: Final = Call(
    "run_schedule", "select pgqueue.run_schedule(%(name)s::text)::text", lambda rows: UUID(rows[0][0])
)
ENABLE_SCHEDULE: Final[Call[Mapping[str, Any] | None]] = Call(
    "enable_schedule",
    """update pgqueue.schedules s set enabled = %(enabled)s::boolean where s.name = %(name)s::text
       returning row_to_json(s)::text""",
    _record,
)
RETENTION: Final = Call("retention", "select row_to_json(r)::text from pgqueue.retention r order by r.status", records)
