"""`pgqueue jobs`: look at jobs, cancel, retry and wait for them."""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from pgqueue.cli.codes import FAILURE
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import (
    STATUSES,
    Column,
    ago,
    duration,
    instant,
    note,
    plain,
    print_fields,
    print_json,
    print_table,
    priority_name,
    status_style,
)
from pgqueue.cli.values import CENTURY, SPAN, Listed

if TYPE_CHECKING:
    from pgqueue.job import JobRow

FOREVER: Final = 50 * 365 * 86400.0
#: Seconds that a job is waited for before anybody asks why.
UNASKED: Final = 3.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def jobs() -> None:
    """Look at jobs, cancel, retry and wait for them."""


@jobs.command("list")
@click.option("--status", type=Listed(click.Choice(STATUSES), "a,b"), help="Only these statuses.")
@click.option("--queue", help="Only this queue.")
@click.option("--type", "job_type", help="Only this job type.")
@click.option("--producer", help="Only this producer's.")
@click.option("--before", metavar="JOB_ID", help="Older than this job: the last id of the page before.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@door_options
@pass_door
def list_jobs(
    door: Door,
    status: list[str] | None,
    queue: str | None,
    job_type: str | None,
    producer: str | None,
    before: str | None,
    limit: int,
) -> None:
    """List jobs, newest first."""
    with door.client() as client:
        rows = client.jobs_sync(
            statuses=status, queue=queue, job_type=job_type, producer_id=producer, before=before, limit=limit
        )
    print_jobs(door, rows)


@jobs.command()
@click.argument("job_id")
@door_options
@pass_door
def show(door: Door, job_id: str) -> None:
    """Show everything about a job, and why it is not running."""
    with door.client() as client:
        row = client.job_sync(job_id)
        why = client.why_sync(job_id)
    if door.as_json:
        print_json(row)
        return
    print_fields(_fields(row) | {"why": why})
    for record in row.errors:
        click.echo()
        print_fields(_attempt(record))


@jobs.command()
@click.argument("job_ids", metavar="JOB_ID...", nargs=-1, required=True)
@door_options
@pass_door
@click.pass_context
def cancel(ctx: click.Context, door: Door, job_ids: tuple[str, ...]) -> None:
    """Cancel jobs: waiting ones at once (cancelled), running ones are asked to stop (cancel_requested)."""
    with door.client() as client:
        ctx.exit(each(door, job_ids, lambda job_id: client.cancel_sync(job_id)))


@jobs.command()
@click.argument("job_ids", metavar="JOB_ID...", nargs=-1, required=True)
@door_options
@pass_door
@click.pass_context
def retry(ctx: click.Context, door: Door, job_ids: tuple[str, ...]) -> None:
    """Make failed jobs and dead letters pending now, with fresh attempts."""
    with door.client() as client:
        ctx.exit(each(door, job_ids, lambda job_id: client.retry_sync(job_id).status))


@jobs.command("pause-type", options_metavar="--for SPAN [OPTIONS]")
@click.argument("job_type", metavar="TYPE")
@click.option("--for", "seconds", type=CENTURY, required=True, help="How long, such as 90, 5m or 1h30m. Always needed.")
@door_options
@pass_door
def pause_type(door: Door, job_type: str, seconds: float) -> None:
    """Start no job of a type for as long as --for says. Running ones end, enqueues go on; a longer pause stays."""
    from pgqueue import calling, calls

    with door.connection() as connection:
        calling.run(connection, calls.PAUSE_JOB_TYPE, job_type=job_type, seconds=seconds)
    if door.as_json:
        print_json({"job_type": job_type, "paused": True})
    else:
        click.echo(f"job type {job_type} is paused for {duration(seconds)}")


@jobs.command("resume-type")
@click.argument("job_type", metavar="TYPE")
@door_options
@pass_door
def resume_type(door: Door, job_type: str) -> None:
    """Let jobs of a paused type start again."""
    from pgqueue import calling, calls

    with door.connection() as connection:
        changed = calling.run(connection, calls.RESUME_JOB_TYPE, job_type=job_type)
    if door.as_json:
        print_json({"job_type": job_type, "changed": changed})
    else:
        click.echo(f"job type {job_type} is {'resumed' if changed else 'not paused'}")


@jobs.command()
@click.argument("job_id")
@click.option("--timeout", type=SPAN, help="Give up after so long, with exit code 6 (default: never).")
@door_options
@pass_door
@click.pass_context
def wait(ctx: click.Context, door: Door, job_id: str, timeout: float | None) -> None:
    """Wait for a job's end and print its result as JSON. Exit code 1 when it became a dead letter or was cancelled.

    After a few seconds it says why the job is not running.
    """
    from pgqueue.errors import NotFinished

    limit = FOREVER if timeout is None else timeout
    with door.client() as client:
        try:
            row = client.finished_job_sync(job_id, wait=min(limit, UNASKED))
        except NotFinished:
            if limit <= UNASKED:
                raise
            if client.job_sync(job_id).status != "processing":
                note(f"pgqueue: not yet: {client.why_sync(job_id)}")
            row = client.finished_job_sync(job_id, wait=limit - UNASKED)
    completed = row.status == "completed"
    if door.as_json:
        print_json(row)
    elif completed:
        print_json(row.result_json)
    if not completed:
        note(f"pgqueue: job {row.job_id} is {row.status}" + (f": {row.error}" if row.error else ""))
        ctx.exit(FAILURE)


def print_jobs(door: Door, rows: "list[JobRow]") -> None:
    """Print jobs as a table, or as the JSON array of their rows."""
    if door.as_json:
        print_json(rows)
        return
    columns: list[Column[JobRow]] = [
        Column("JOB ID", lambda row: row.job_id),
        Column("TYPE", lambda row: row.job_type),
        Column("QUEUE", lambda row: row.queue),
        Column("PRIORITY", lambda row: priority_name(row.priority)),
        Column("STATUS", lambda row: row.status, style=lambda row: status_style(row.status)),
        Column("ATTEMPTS", lambda row: f"{row.attempts}/{row.max_retries + 1}", right=True),
        Column("CREATED", lambda row: row.created_at),
        Column("DETAIL", _detail),
    ]
    print_table(columns, rows)


def each(door: Door, job_ids: tuple[str, ...], act: Callable[[str], str]) -> int:
    """Do one thing to each job, print what became of it, and return the first failure's exit code, 0 without any.

    Raises InvalidJob, with nothing done, when one of them is no id.
    """
    from pgqueue.cli.failures import exit_code
    from pgqueue.errors import DatabaseError, PgqueueError
    from pgqueue.verbs import id_text

    # A typing error is found before anything is done.
    for job_id in job_ids:
        id_text(job_id)
    code = 0
    outcomes: list[dict[str, Any]] = []
    for job_id in job_ids:
        try:
            outcomes.append({"job_id": job_id, "outcome": act(job_id)})
        except DatabaseError:
            raise
        except PgqueueError as exc:
            outcomes.append({"job_id": job_id, "outcome": "refused", "error": str(exc)})
            note(f"pgqueue: {exc}")
            code = code or exit_code(exc)
            continue
        if not door.as_json:
            click.echo(f"{job_id} {outcomes[-1]['outcome']}")
    if door.as_json:
        print_json(outcomes)
    return code


def _detail(row: "JobRow") -> str:
    match row.status:
        case "submitted" | "failed" if row.due_at is not None:
            due = f"due {ago(row.due_at)}"
            return f"{due}: {row.error}" if row.error else due
        case "submitted":
            return f"behind ordering_key {row.ordering_key}"
        case "processing" if row.cancel_requested_at is not None:
            return "asked to stop"
        case "completed" if row.started_at is not None and row.finished_at is not None:
            return f"ran {duration((row.finished_at - row.started_at).total_seconds())}"
        case _:
            return row.error or ""


def _fields(row: "JobRow") -> dict[str, object]:
    times = ("created_at", "scheduled_at", "due_at", "expires_at", "started_at", "lease_expires_at")
    shown: dict[str, object] = {
        "job_id": row.job_id,
        "job_type": row.job_type,
        "queue": row.queue,
        "priority": priority_name(row.priority),
        "status": row.status,
        "attempts": f"{row.attempts} of {row.max_retries + 1} at most" + (f", {row.lost} lost" if row.lost else ""),
        "payload": bytes(row.payload_json).decode(),
        "result": None if row.status != "completed" else bytes(row.result_json).decode(),
        "progress": None if bytes(row.progress_json) == b"null" else bytes(row.progress_json).decode(),
        "error": row.error,
    }
    for name in (*times, "cancel_requested_at", "finished_at"):
        moment = getattr(row, name)
        shown[name] = None if moment is None else f"{instant(moment)} ({ago(moment)})"
    if row.started_at is not None and row.finished_at is not None:
        shown["duration"] = row.finished_at - row.started_at
    shown["timeout"] = None if row.timeout_ms is None else timedelta(milliseconds=row.timeout_ms)
    for name in ("worker_id", "idempotency_key", "ordering_key", "producer_id", "retry_policy", "trace_context"):
        shown[name] = getattr(row, name)
    return {name: value for name, value in shown.items() if value is not None}


def _attempt(record: dict[str, Any]) -> dict[str, object]:
    shown: dict[str, object] = {
        f"attempt {plain(record.get('attempt'))}": f"{record.get('type')}: {record.get('message')}",
        "at": record.get("at"),
        "after": None if record.get("duration_ms") is None else duration(float(record["duration_ms"]) / 1000),
        "worker_id": record.get("worker_id"),
        "retryable": record.get("retryable"),
        "traceback": record.get("traceback"),
    }
    return {name: value for name, value in shown.items() if value is not None}
