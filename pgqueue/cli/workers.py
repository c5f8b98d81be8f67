"""`pgqueue workers`: the worker processes that are alive."""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, parse_instant, print_json, print_table, priority_name

_SILENT: Final = timedelta(seconds=60)


@click.command()
@click.option("--all", "everyone", is_flag=True, help="Those that have stopped, too.")
@door_options
@pass_door
def workers(door: Door, everyone: bool) -> None:
    """List worker processes, the oldest first."""
    with door.client() as client:
        rows = [row for row in client.workers_sync() if everyone or row["status"] != "stopped"]
    if door.as_json:
        print_json(rows)
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("NAME", lambda row: row["name"]),
        Column("STATUS", _status, lambda row: "bold red" if _status(row) == "lost" else ""),
        Column("HOST", lambda row: row["hostname"]),
        Column("PID", lambda row: row["pid"], right=True),
        Column("GROUP", lambda row: row["group_name"]),
        Column("QUEUES", lambda row: "all" if row["queues"] is None else row["queues"]),
        Column("PRIORITIES", lambda row: _priorities(row["priorities"])),
        Column("SLOTS", lambda row: row["concurrency"], right=True),
        Column("BUSY", lambda row: f"{row['utilization']:.0%}", right=True),
        Column("PROCESSED", lambda row: row["jobs_processed"], right=True),
        Column("FAILED", lambda row: row["jobs_failed"], right=True),
        Column("SEEN", lambda row: parse_instant(row["last_heartbeat"])),
        Column("STARTED", lambda row: parse_instant(row["started_at"])),
        Column("WORKER ID", lambda row: row["worker_id"]),
    ]
    print_table(columns, rows)


def _status(row: dict[str, Any]) -> str:
    """Return the status, or that the worker has gone silent: the database counts those as lost after a minute."""
    seen = parse_instant(row["last_heartbeat"])
    silent = seen is not None and datetime.now(UTC) - seen > _SILENT
    return "lost" if silent and row["status"] != "stopped" else str(row["status"])


def _priorities(numbers: list[int] | None) -> str:
    return "all" if numbers is None else ",".join(map(priority_name, numbers))
