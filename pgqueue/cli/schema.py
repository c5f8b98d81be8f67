"""`pgqueue migrate` and `pgqueue schema`: the version of the schema in the database."""

import rich_click as click

from pgqueue.cli.codes import UNHEALTHY
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import note, print_json


@click.command()
@click.option("--sql", is_flag=True, help="Print the SQL of an empty database's migration and connect nowhere.")
@door_options
@pass_door
def migrate(door: Door, sql: bool) -> None:
    """Bring the database's schema pgqueue to the version of this package. Any number may run at once."""
    from pgqueue import schema as versions

    if sql:
        click.echo(versions.migration_sql(), nl=False)
        return
    with door.dsn() as dsn:
        applied = versions.migrate(dsn)
        missing = versions.grant_roles(dsn)
    if door.as_json:
        print_json({"applied": applied, "version": versions.head(), "missing_roles": missing})
    elif applied:
        note(f"pgqueue: migrated: {', '.join(applied)}")
    else:
        note(f"pgqueue: the schema is at {versions.head()}, nothing to do")
    if missing:
        note(f"pgqueue: missing roles: {', '.join(missing)}; {versions.roles_advice(missing)}")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def schema() -> None:
    """The schema pgqueue in the database."""


@schema.command()
@door_options
@pass_door
@click.pass_context
def version(ctx: click.Context, door: Door) -> None:
    """Print the database's schema version. Exit code 5 when it is not the one that this package needs."""
    from pgqueue import schema as versions

    with door.dsn() as dsn:
        found, wanted = versions.current_version(dsn), versions.head()
    if door.as_json:
        print_json({"version": found, "wanted": wanted})
    else:
        click.echo(found or "none")
    if found != wanted:
        note(f"pgqueue: this package needs schema version {wanted}; run: pgqueue migrate")
        ctx.exit(UNHEALTHY)
