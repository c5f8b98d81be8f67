"""`pgqueue schedules`: recurring jobs. SQL, REST or code makes them; here they are looked at, run and stopped."""

import sys
from datetime import UTC, datetime
from typing import Any

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, instant, note, parse_instant, print_json, print_table
from pgqueue.cli.values import ParamType


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
    """Look at recurring jobs, run, stop and preview them."""


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
    from pgqueue.errors import JobNotFound

    with door.connection() as connection:
        row = calling.run(connection, calls_time.ENABLE_SCHEDULE, name=name, enabled=enabled)
    if row is None:
        raise JobNotFound(f'there is no schedule "{name}"')
    if door.as_json:
        print_json(row)
    else:
        click.echo(f"schedule {name} is {'enabled' if enabled else 'disabled'}")


def _words(row: dict[str, Any]) -> str | None:
    from pgqueue.cron_words import describe
    from pgqueue.errors import InvalidJob

    try:
        return describe(row["cron"], row["timezone"])
    except InvalidJob:
        return None
