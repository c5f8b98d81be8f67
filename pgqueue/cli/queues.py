"""`pgqueue queues`: depths and settings of queues, pause and resume."""

import json
import re
from collections import defaultdict
from typing import Any, Final

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, duration, note, print_fields, print_json, print_table
from pgqueue.cli.values import CENTURY, DAY, JSON_OBJECT, SPAN, WEIGHTS, OrNone

_INTERVAL: Final = re.compile(r"(?:(\d+) days?)? ?(?:(\d+):(\d\d):(\d\d(?:\.\d+)?))?")
_LIMITS: Final = (50_000, 100_000)
COUNTS = ("pending", "submitted", "processing", "failed")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def queues() -> None:
    """Look at queues, pause, resume and set them."""


@queues.command("list")
@door_options
@pass_door
def list_queues(door: Door) -> None:
    """List queues that have live jobs or settings of their own."""
    from pgqueue import calling, calls

    with door.connection() as connection:
        rows = summarise(calling.run(connection, calls.QUEUES), calling.run(connection, calls.QUEUE_STATS))
    if door.as_json:
        print_json(rows)
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("QUEUE", lambda row: row["queue"]),
        Column("PAUSED", lambda row: "paused" if row["paused"] else "-"),
        *map(_count, COUNTS),
        Column("OLDEST", lambda row: _age(row["oldest_pending_seconds"]), right=True),
        Column("WEIGHTS", lambda row: _weights(row["settings"])),
        Column("LIMITS", lambda row: _limits(row["settings"])),
    ]
    print_table(columns, rows)


@queues.command()
@click.argument("queue")
@door_options
@pass_door
def pause(door: Door, queue: str) -> None:
    """Stop claims from a queue. Running jobs end, enqueues go on. It need not have had a job yet."""
    from pgqueue import calling, calls, calls_rest

    with door.connection() as connection:
        known = any(row["queue"] == queue for row in calling.run(connection, calls_rest.QUEUE_COUNTS))
        changed = calling.run(connection, calls.PAUSE, queue=queue)
    if not known:
        note(f"pgqueue: queue {queue} has had no job so far; what is enqueued there will wait")
    _say(door, queue, "paused" if changed else "paused already", changed)


@queues.command()
@click.argument("queue")
@door_options
@pass_door
def resume(door: Door, queue: str) -> None:
    """Let a paused queue be claimed from again."""
    with door.client() as client:
        changed = client.resume_sync(queue)
    _say(door, queue, "resumed" if changed else "not paused", changed)


@queues.command("set")
@click.argument("queue")
@click.option("--weights", type=WEIGHTS, help="Shares of critical, high, normal and low in a claim.")
@click.option("--lease", type=DAY, help="How long a claimed job stays claimed without a heartbeat.")
@click.option("--timeout", type=SPAN, help="One attempt's run time at most.")
@click.option("--max-lost", type=click.IntRange(min=0), help="Workers that may die with a job.")
@click.option("--idempotency", type=SPAN, help="How long an idempotency key is known.")
@click.option("--soft-limit", type=click.IntRange(min=0), help="Pending jobs above which producers are slowed down.")
@click.option("--hard-limit", type=click.IntRange(min=0), help="Pending jobs above which enqueues are refused.")
@click.option(
    "--rate-per-second",
    type=OrNone(click.IntRange(min=1), "n"),
    help="Jobs that may be enqueued in a second; none: any number. Runs are not limited.",
)
@click.option("--shed-low/--no-shed-low", default=None, help="Give up low jobs above the soft limit.")
@click.option(
    "--retry-policy", type=OrNone(JSON_OBJECT, "json"), help='Such as {"base_delay_ms": 500, "jitter": true}.'
)
@click.option("--pending-ttl", type=CENTURY, help="How long a job may wait.")
@click.option("--completed-ttl", type=CENTURY, help="How long completed jobs are kept.")
@click.option("--failed-ttl", type=CENTURY, help="How long failed jobs may wait for their retry.")
@click.option("--dead-letter-ttl", type=CENTURY, help="How long dead letters are kept.")
@click.option("--cancelled-ttl", type=CENTURY, help="How long cancelled jobs are kept.")
@door_options
@pass_door
def set_queue(door: Door, /, queue: str, weights: list[int] | str | None, **options: Any) -> None:
    """Set a queue's settings and print them all. What is not given stays."""
    from pgqueue import calling, calls

    settings: dict[str, Any] = {
        name: None if value == "none" else value
        for name, value in options.items()
        if value is not None and not name.endswith("_ttl")
    }
    for name in ("lease", "timeout", "idempotency"):
        if name in settings:
            settings[f"{name}_ms"] = round(settings.pop(name) * 1000)
    for name, seconds in options.items():
        if seconds is not None and name.endswith("_ttl"):
            settings[name] = f"{seconds} seconds"
    if weights is not None:
        settings["weights"] = None if weights == "strict" else weights
    if not settings:
        raise click.UsageError("Give at least one setting.")
    with door.connection() as connection:
        row = calling.run(connection, calls.SET_QUEUE, queue=queue, settings=json.dumps(settings))
    if door.as_json:
        print_json(row)
    else:
        told = {name: _readable(value) if name.endswith("_ttl") else value for name, value in row.items()}
        print_fields(told | {"weights": _shares(row["weights"])})


def _readable(interval: str) -> str:
    """Return a span of time as PostgreSQL writes it, in days and hours; one with months or years as it is."""
    match = _INTERVAL.fullmatch(interval)
    if match is None or not any(match.groups()):
        return interval
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return duration(days * 86400 + hours * 3600 + minutes * 60 + seconds)


def summarise(settings: list[dict[str, Any]], stats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per queue from the rows of `queues` and of `queue_stats` (which has one per priority)."""
    own = {row["name"]: row for row in settings}
    parts: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in stats:
        parts[row["queue"]].append(row)
    return [
        {
            "queue": name,
            "paused": name in own and own[name]["paused"],
            **{count: sum(row[count] for row in parts[name]) for count in COUNTS},
            "oldest_pending_seconds": max(
                (age for row in parts[name] if (age := row["oldest_pending_seconds"]) is not None), default=None
            ),
            "settings": own.get(name),
        }
        for name in sorted(own.keys() | parts.keys())
    ]


def _count(status: str) -> Column[dict[str, Any]]:
    return Column(status.upper(), lambda row: row[status], right=True)


def _say(door: Door, queue: str, state: str, changed: bool) -> None:
    if door.as_json:
        print_json({"queue": queue, "changed": changed})
    else:
        click.echo(f"queue {queue} is {state}")


def _age(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)


def _shares(weights: list[int] | None) -> str:
    return "strict" if weights is None else ",".join(map(str, weights))


# A queue that was paused once has a row, which need not set anything else.
def _weights(settings: dict[str, Any] | None) -> str:
    return "default" if settings is None or settings["weights"] == [8, 4, 2, 1] else _shares(settings["weights"])


def _limits(settings: dict[str, Any] | None) -> str:
    if settings is None:
        return "default"
    depths, rate = (settings["soft_limit"], settings["hard_limit"]), settings["rate_per_second"]
    limits = []
    if depths != _LIMITS:
        limits.append(f"{depths[0]}/{depths[1]}")
    if rate is not None:
        limits.append(f"{rate}/s")
    return ",".join(limits) or "default"
