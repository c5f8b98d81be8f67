"""`pgqueue scheduler`: sweeps, schedules and partitions, without running jobs."""

import rich_click as click

from pgqueue.cli.context import Door, dsn_option, pass_door
from pgqueue.cli.loading import load_app
from pgqueue.cli.output import note


@click.command()
@click.argument("app_name", metavar="[MODULE:APP]", required=False)
@dsn_option
@pass_door
@click.pass_context
def scheduler(ctx: click.Context, door: Door, app_name: str | None) -> None:
    """Do what time asks for, until SIGTERM or Ctrl-C: promote due jobs, fire schedules, expire jobs, keep partitions.

    Workers do it too, unless told --no-maintenance; any number may, one works at a time. With MODULE:APP the schedules
    which that app declares are kept in force, as its workers do.
    """
    from pgqueue import log
    from pgqueue.client import Client
    from pgqueue.maintenance import Maintenance
    from pgqueue.process import run_process

    app = None if app_name is None else load_app(app_name, door)
    with app or Client(settings=door.settings) as client:
        log.configure(client.settings.log_level, client.settings.log_format)
        declarations = None if app is None else app.declarations()
        maintenance = Maintenance(client.dsn, client.settings, declarations)
        note("pgqueue: the scheduler is at work; Ctrl-C ends it")
        ctx.exit(run_process(maintenance))
