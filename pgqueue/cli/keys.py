"""`pgqueue keys`: keys of the REST API."""

from datetime import UTC, datetime, timedelta
from typing import Any

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, note, parse_instant, print_json, print_table
from pgqueue.cli.values import INSTANT, SPAN, Listed

SCOPES = ("submit", "read", "operate", "admin")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Create, list and revoke keys of the REST API.

    Until the first is made only this machine is served; from then on everybody needs one, also once all are revoked.
    """


@keys.command()
@click.argument("name")
@click.option(
    "--scopes",
    type=Listed(click.Choice(SCOPES), "a,b"),
    default="submit,read",
    show_default=True,
    help="submit, read, operate (includes read) or admin (includes all).",
)
@click.option("--rate", type=click.IntRange(min=1), help="Requests per second at most (default: any number).")
@click.option("--expires-in", type=SPAN, help="Ends after so long: 30d.")
@click.option("--expires-at", type=INSTANT, help="Ends at this moment: 2030-01-31T09:00Z.")
@door_options
@pass_door
def create(
    door: Door, name: str, scopes: list[str], rate: int | None, expires_in: float | None, expires_at: datetime | None
) -> None:
    """Create a key called NAME and print it. It is stored as a hash only, so this is the one time to see it."""
    from pgqueue import calling, calls_rest
    from pgqueue.api.access import new_key

    if expires_in is not None and expires_at is not None:
        raise click.UsageError("Give --expires-in or --expires-at, not both.")
    if expires_in is not None:
        expires_at = datetime.now(UTC) + timedelta(seconds=expires_in)
    key, digest, prefix = new_key()
    with door.connection() as connection:
        calling.run(
            connection,
            calls_rest.CREATE_KEY,
            name=name,
            sha256=digest,
            prefix=prefix,
            scopes=list(dict.fromkeys(scopes)),
            rate=rate,
            expires_at=expires_at,
        )
    if door.as_json:
        print_json({"name": name, "key": key, "scopes": scopes})
    else:
        click.echo(key)
        note("pgqueue: keep it now, it cannot be shown again")


@keys.command("list")
@door_options
@pass_door
def list_keys(door: Door) -> None:
    """List keys, also those that are revoked or expired."""
    from pgqueue import calling, calls_rest

    with door.connection() as connection:
        rows = calling.run(connection, calls_rest.KEYS, after=None, limit=None)
    if door.as_json:
        print_json(rows)
        return
    columns: list[Column[dict[str, Any]]] = [
        Column("NAME", lambda row: row["name"]),
        Column("KEY", lambda row: f"{row['prefix']}…"),
        Column("SCOPES", lambda row: ",".join(row["scopes"])),
        Column("ENABLED", lambda row: row["enabled"]),
        Column("RATE", lambda row: row["rate"], right=True),
        Column("EXPIRES", lambda row: parse_instant(row["expires_at"])),
        Column("CREATED", lambda row: parse_instant(row["created_at"])),
        Column("USED", lambda row: parse_instant(row["last_used_at"])),
    ]
    print_table(columns, rows)


@keys.command()
@click.argument("name")
@door_options
@pass_door
def revoke(door: Door, name: str) -> None:
    """Revoke a key. It ends at once; its name stays taken, since the audit knows it.

    When it was the last, nobody is let in until another is created.
    """
    from pgqueue import calling, calls_rest

    with door.connection() as connection:
        changed = calling.run(connection, calls_rest.REVOKE_KEY, name=name)
    if door.as_json:
        print_json({"name": name, "changed": changed})
    else:
        click.echo(f"key {name} is revoked")
