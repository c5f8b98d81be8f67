"""`pgqueue dlq`: dead letters, the jobs that need a human."""

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.jobs import each, print_jobs
from pgqueue.cli.output import print_json
from pgqueue.cli.values import INSTANT

F = TypeVar("F", bound=Callable[..., Any])


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def dlq() -> None:
    """Look at dead letters, retry or discard them."""


@dlq.command("list")
@click.option("--queue", help="Only this queue.")
@click.option("--type", "job_type", help="Only this job type.")
@click.option("--before", metavar="JOB_ID", help="Older than this job: the last id of the page before.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@door_options
@pass_door
def list_dead_letters(door: Door, queue: str | None, job_type: str | None, before: str | None, limit: int) -> None:
    """List dead letters, the newest jobs first."""
    with door.client() as client:
        rows = client.jobs_sync(statuses=["dead_letter"], queue=queue, job_type=job_type, before=before, limit=limit)
    print_jobs(door, rows)


def _selection(command: F) -> F:
    """Add what chooses dead letters: their ids, or a filter, or all of them."""
    for option in reversed(
        (
            click.argument("job_ids", metavar="[JOB_ID]...", nargs=-1),
            click.option("--queue", help="All of this queue."),
            click.option("--type", "job_type", help="All of this job type."),
            click.option("--since", type=INSTANT, help="All that died at this moment or later: 2030-01-31T09:00Z."),
            click.option("--until", type=INSTANT, help="All that died before this moment: 2030-01-31T09:00Z."),
            click.option("--limit", "max_jobs", type=click.IntRange(min=1), help="So many at most, the oldest first."),
            click.option("--all", "everything", is_flag=True, help="All dead letters."),
        )
    ):
        command = option(command)
    return command


@dlq.command()
@_selection
@door_options
@pass_door
@click.pass_context
def retry(
    ctx: click.Context,
    door: Door,
    job_ids: tuple[str, ...],
    queue: str | None,
    job_type: str | None,
    since: datetime | None,
    until: datetime | None,
    max_jobs: int | None,
    everything: bool,
) -> None:
    """Make dead letters pending now, with fresh attempts: those named, or all that the options choose."""
    _check(job_ids, queue, job_type, since, until, everything)
    with door.client() as client:
        if job_ids:
            ctx.exit(each(door, job_ids, lambda job_id: client.retry_sync(job_id).status))
        moved = client.retry_dead_letters_sync(
            job_type=job_type, queue=queue, since=since, until=until, max_jobs=max_jobs
        )
    _print_count(door, "retried", moved)


@dlq.command()
@_selection
@click.option("--yes", is_flag=True, help="Do not ask.")
@door_options
@pass_door
@click.pass_context
def discard(
    ctx: click.Context,
    door: Door,
    job_ids: tuple[str, ...],
    queue: str | None,
    job_type: str | None,
    since: datetime | None,
    until: datetime | None,
    max_jobs: int | None,
    everything: bool,
    yes: bool,
) -> None:
    """Delete dead letters for good: those named, or all that the options choose."""
    _check(job_ids, queue, job_type, since, until, everything)
    with door.client() as client:
        if job_ids:
            ctx.exit(each(door, job_ids, lambda job_id: client.discard_sync(job_id)))
        if not yes:
            click.confirm("Delete all dead letters that match, for good?", abort=True, err=True)
        removed = client.discard_dead_letters_sync(
            job_type=job_type, queue=queue, since=since, until=until, max_jobs=max_jobs
        )
    _print_count(door, "discarded", removed)


def _check(
    job_ids: tuple[str, ...],
    queue: str | None,
    job_type: str | None,
    since: datetime | None,
    until: datetime | None,
    everything: bool,
) -> None:
    chosen = any(value is not None for value in (queue, job_type, since, until))
    if job_ids and (chosen or everything):
        raise click.UsageError("Name jobs or choose them by options, not both.")
    if not (job_ids or chosen or everything):
        raise click.UsageError("Name jobs, or choose them with --type, --queue, --since, --until, or take --all.")


def _print_count(door: Door, outcome: str, jobs: int) -> None:
    if door.as_json:
        print_json({outcome: jobs})
    else:
        click.echo(f"{jobs} {outcome}")
