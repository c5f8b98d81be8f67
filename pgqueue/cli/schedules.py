"""`pgqueue schedules`: recurring jobs."""

import json
import sys
from datetime import UTC, datetime
from typing import Any

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, instant, note, parse_instant, print_json, print_table
from pgqueue.cli.values import JSON_OBJECT, PRIORITY, SPAN, ParamType


class UtcInstant(ParamType):
    """A moment in ISO 8601; without a zone it is UTC."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        """Return the moment with its zone."""
        try:
            moment = datetime.fromisoformat(str(value).strip())
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is no moment in ISO 8601, such as 2030-01-31T09:00:00+01:00", param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def schedules() -> None:
    """Look at recurring jobs, make, run, stop and preview them."""


@schedules.command("list")
@door_options
@pass_door
def list_schedules(door: Door) -> None:
    """List schedules by name."""
    from pgqueue import calling, calls_time

    with door.connection() as connection:
        rows = calling.run(connection, calls_time.SCHEDULES)
    if door.as_json:
        print_json([{**row, "words": _words(row)} for row in rows])
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("NAME", lambda row: row["name"]),
        Column("CRON", lambda row: row["cron"]),
        Column("TIMEZONE", lambda row: row["timezone"]),
        Column("TYPE", lambda row: row["job_type"]),
        Column("QUEUE", lambda row: row["queue"]),
        Column("ENABLED", lambda row: row["enabled"]),
        Column("NEXT", lambda row: parse_instant(row["next_run_at"])),
        Column("LAST", lambda row: parse_instant(row["last_run_at"])),
        Column("WORDS", _words),
        Column("ERROR", lambda row: row["last_error"], lambda row: "bold red"),
    ]
    print_table(columns, rows)


@schedules.command()
@click.argument("name")
@door_options
@pass_door
def run(door: Door, name: str) -> None:
    """Enqueue a job of a schedule now, and print its id. When it is due next stays as it is."""
    from pgqueue import calling, calls_time

    with door.connection() as connection:
        job_id = calling.run(connection, calls_time.RUN_SCHEDULE, name=name)
    if door.as_json:
        print_json({"schedule": name, "job_id": str(job_id)})
    else:
        click.echo(str(job_id))


@schedules.command()
@click.argument("name")
@door_options
@pass_door
def enable(door: Door, name: str) -> None:
    """Let a schedule fire again, from now on: what it missed meanwhile is not made up for."""
    _set(door, name, True)


@schedules.command()
@click.argument("name")
@door_options
@pass_door
def disable(door: Door, name: str) -> None:
    """Stop a schedule from firing. Jobs that it has enqueued stay."""
    _set(door, name, False)


@schedules.command()
@click.argument("name")
@click.argument("cron")
@click.argument("job_type", metavar="TYPE")
@click.argument("payload", metavar="[JSON]", type=JSON_OBJECT, default="{}")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="Such as Europe/Berlin.")
@click.option("--queue", help="Queue of its jobs (default: default).")
@click.option("--priority", type=PRIORITY, help="critical, high, normal or low, or 0 to 3 (default: normal).")
@click.option("--max-retries", type=click.IntRange(min=0), help="Retries after the first attempt (default: 3).")
@click.option("--timeout", type=SPAN, help="One attempt's run time at most (default: the queue's).")
@click.option(
    "--misfire", type=click.Choice(["run_once", "skip", "run_all"]), help="For missed times (default: run_once)."
)
@click.option(
    "--overlap", type=click.Choice(["allow", "skip", "cancel"]), help="While the job before runs (default: allow)."
)
@door_options
@pass_door
def create(door: Door, /, name: str, cron: str, timezone: str, timeout: float | None, **options: Any) -> None:
    """Have a job enqueued whenever CRON says, five fields. Replaces the schedule of that name, if there is one."""
    from pgqueue import calling, calls_rest
    from pgqueue.cron import Cron
    from pgqueue.verbs import timeout_ms

    # Finds what the database could only find out later: an expression that never fires.
    Cron(cron, timezone).next(datetime.now(UTC))
    settings = {"cron": cron, "timezone": timezone, "timeout_ms": timeout_ms(timeout), **options}
    with door.connection() as connection:
        made = calling.run(connection, calls_rest.PUT_SCHEDULE, name=name, settings=json.dumps(settings))
    if door.as_json:
        print_json({"schedule": name, "created": made})
    else:
        click.echo(f"schedule {name} is {'created' if made else 'replaced'}")


@schedules.command()
@click.argument("name")
@door_options
@pass_door
def delete(door: Door, name: str) -> None:
    """Delete a schedule. Jobs that it has enqueued stay."""
    from pgqueue import calling, calls_rest

    with door.connection() as connection:
        if not calling.run(connection, calls_rest.DROP_SCHEDULE, name=name):
            raise _unknown(name)
    if door.as_json:
        print_json({"schedule": name, "deleted": True})
    else:
        click.echo(f"schedule {name} is deleted")


@schedules.command()
@click.argument("cron")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="Such as Europe/Berlin.")
@click.option(
    "--from", "after", type=UtcInstant(), metavar="INSTANT", help="Fires after this; without a zone UTC (default: now)."
)
@click.option("-n", "count", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many.")
@door_options
@pass_door
def preview(door: Door, cron: str, timezone: str, after: datetime | None, count: int) -> None:
    """Print when a cron expression fires next, in UTC. What it says, and zone time, are for people at a terminal."""
    from pgqueue.cron import Cron
    from pgqueue.cron_words import describe

    expression = Cron(cron, timezone)
    moments = [after or datetime.now(UTC)]
    for _ in range(count):
        moments.append(expression.next(moments[-1]))
    fires = moments[1:]
    words = describe(cron, timezone)
    if door.as_json:
        local = [moment.astimezone(expression.zone).isoformat() for moment in fires]
        told = {"cron": cron, "timezone": timezone, "words": words}
        print_json({**told, "fires": [instant(moment) for moment in fires], "local": local})
        return
    note(words)
    if sys.stdout.isatty():
        columns: list[Column[datetime]] = [
            Column("UTC", lambda moment: instant(moment)),
            Column(timezone, lambda moment: moment.astimezone(expression.zone).strftime("%a %d %b %Y %H:%M %Z")),
        ]
        print_table(columns, fires)
        return
    for moment in fires:
        click.echo(instant(moment))


def _set(door: Door, name: str, enabled: bool) -> None:
    from pgqueue import calling, calls_time

    with door.connection() as connection:
        row = calling.run(connection, calls_time.ENABLE_SCHEDULE, name=name, enabled=enabled)
    if row is None:
        raise _unknown(name)
    if door.as_json:
        print_json(row)
    else:
        click.echo(f"schedule {name} is {'enabled' if enabled else 'disabled'}")


def _unknown(name: str) -> Exception:
    from pgqueue.errors import JobNotFound

    return JobNotFound(f'there is no schedule "{name}"')


def _words(row: dict[str, Any]) -> str | None:
    from pgqueue.cron_words import describe
    from pgqueue.errors import InvalidJob

    try:
        return describe(row["cron"], row["timezone"])
    except InvalidJob:
        return None
