"""`pgqueue metrics` and `pgqueue alerts`: what Prometheus would read, and what is wrong now."""

import signal
import threading
from typing import Any

import rich_click as click

from pgqueue.cli.codes import UNHEALTHY
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, note, parse_instant, print_json, print_table


@click.command()
@click.option("--serve", metavar="HOST:PORT", help="Serve them at http://HOST:PORT/metrics until Ctrl-C.")
@door_options
@pass_door
def metrics(door: Door, /, serve: str | None) -> None:
    """Print all metrics in Prometheus's text format."""
    from pgqueue.metrics import Snapshot, encode

    with door.client() as client:
        if serve is not None:
            _serve(client.metrics_sync, serve)
            return
        samples = client.metrics_sync()
    if door.as_json:
        print_json([sample._asdict() for sample in samples])
    else:
        click.echo(encode(Snapshot(samples))[0].decode(), nl=False)


@click.command()
@door_options
@pass_door
@click.pass_context
def alerts(ctx: click.Context, door: Door, /) -> None:
    """List what is wrong now, pages first. Ends with 5 when there is a page."""
    with door.client() as client:
        rows = client.alerts_sync()
    if door.as_json:
        print_json(rows)
    else:
        columns: list[Column[dict[str, Any]]] = [
            Column("ALERT", lambda row: row["alert"]),
            Column(
                "SEVERITY", lambda row: row["severity"], lambda row: "bold red" if row["severity"] == "page" else ""
            ),
            Column("SINCE", lambda row: parse_instant(row["since"])),
            Column("SUMMARY", lambda row: row["summary"], fold=True),
        ]
        print_table(columns, rows)
    if any(row["severity"] == "page" for row in rows):
        ctx.exit(UNHEALTHY)


def _serve(fetch: Any, where: str) -> None:
    from pgqueue.metrics import serve

    host, _, port = where.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise click.UsageError(f"{where!r} is not HOST:PORT")
    server, port_number = serve(fetch, host or "127.0.0.1", int(port))
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    note(f"pgqueue: metrics are at http://{host or '127.0.0.1'}:{port_number}/metrics; Ctrl-C ends")
    try:
        ended.wait()
    finally:
        server.shutdown()
