"""`pgqueue enqueue`: a job from the shell."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import rich_click as click

from pgqueue.cli.codes import CONFLICT
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import note, print_json
from pgqueue.cli.values import INSTANT, JSON_OBJECT, PRIORITY, SPAN

if TYPE_CHECKING:
    from pgqueue.job import JobRow


@click.command()
@click.argument("job_type", metavar="TYPE")
@click.argument("payload", metavar="[JSON]", type=JSON_OBJECT, default="{}")
@click.option("--queue", help="Queue to put it in (default: default).")
@click.option("--priority", type=PRIORITY, help="critical, high, normal or low, or 0 to 3 (default: normal).")
@click.option("--delay", type=SPAN, help="Not before so much time has passed: 90, 5m, 1h30m.")
@click.option("--at", type=INSTANT, help="Not before this moment, ISO 8601 with its time zone: 2030-01-31T09:00Z.")
@click.option("--key", help="Idempotency key: while it is known, its job is returned and the exit code is 4.")
@click.option("--ordering-key", help="Jobs of one key in a queue run one at a time, in order.")
@click.option("--producer", help="Who enqueues.")
@click.option("--max-retries", type=click.IntRange(min=0), help="Retries after the first attempt (default: 3).")
@click.option("--timeout", type=SPAN, help="One attempt's run time at most (default: the queue's).")
@door_options
@pass_door
@click.pass_context
def enqueue(
    ctx: click.Context,
    door: Door,
    job_type: str,
    payload: dict[str, Any],
    queue: str | None,
    priority: int | None,
    delay: float | None,
    at: datetime | None,
    key: str | None,
    ordering_key: str | None,
    producer: str | None,
    max_retries: int | None,
    timeout: float | None,
) -> None:
    """Enqueue a job and print its id. JSON is the payload, an object; `-` reads it from stdin."""
    with door.client() as client:
        job = client.enqueue_sync(
            job_type,
            payload,
            queue=queue,
            priority=priority,
            delay=delay,
            scheduled_at=at,
            idempotency_key=key,
            ordering_key=ordering_key,
            producer_id=producer,
            max_retries=max_retries,
            timeout=timeout,
        )
        known = client.job_sync(job.job_id) if job.duplicate and job.status is not None else None
    if door.as_json:
        print_json(job._asdict())
    else:
        click.echo(str(job.job_id))
    if job.duplicate:
        became = "which has been deleted" if job.status is None else f"now {job.status}"
        if known is not None and not _is_as_asked(known, job_type, payload):
            became = f"which is another one than asked for (of type {known.job_type!r}), {became}"
        note(f"pgqueue: the idempotency key {key!r} is known: this is its job, {became}")
        ctx.exit(CONFLICT)


def _is_as_asked(known: JobRow, job_type: str, payload: dict[str, Any]) -> bool:
    try:
        return known.job_type == job_type and bool(known.payload == payload)
    except ValueError:
        return False
