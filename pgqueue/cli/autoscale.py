"""`pgqueue autoscale`: runs as many worker processes as the queue asks for, or says how many that are."""

from typing import Any

import rich_click as click

from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.loading import load_app
from pgqueue.cli.output import print_json
from pgqueue.cli.values import NAMES


@click.command()
@click.argument("app_name", metavar="MODULE:APP", required=False)
@click.option("--min", "minimum", type=click.IntRange(min=0), default=2, show_default=True, help="Workers at least.")
@click.option("--max", "maximum", type=click.IntRange(min=0), default=100, show_default=True, help="Workers at most.")
@click.option("--queues", type=NAMES, help="Only these queues (default: all).")
@click.option("--concurrency", type=click.IntRange(min=1), help="Jobs at once of each worker (default: 10).")
@click.option("--group", help="Name of the group of workers they belong to.")
@click.option("--no-maintenance", is_flag=True, help="Leave sweeps and partitions to others.")
@click.option("--print", "only_print", is_flag=True, help="Print the number of workers that there should be, and end.")
@door_options
@pass_door
@click.pass_context
def autoscale(
    ctx: click.Context,
    door: Door,
    /,
    app_name: str | None,
    minimum: int,
    maximum: int,
    only_print: bool,
    **options: Any,
) -> None:
    """Run worker processes of an app, as many as waiting jobs, their run time and busy workers ask for.

    Two are added at a time (four above a queue's soft limit), every 30 seconds at most; two are taken away at a time,
    five minutes after any change at the earliest, and only such as have no job.
    """
    from pgqueue.autoscale import Policy, report

    policy = Policy(minimum=minimum, maximum=maximum)
    if only_print:
        with door.client() if app_name is None else load_app(app_name, door) as client:
            answer = report(client.worker_load_sync(options["queues"]), policy)
        print_json(answer) if door.as_json else click.echo(answer["value"])
        return
    if app_name is None:
        raise click.UsageError("Missing argument 'MODULE:APP'.")
    ctx.exit(_run(door, app_name, policy, options))


def _run(door: Door, app_name: str, policy: Any, options: dict[str, Any]) -> int:
    from pgqueue import calls_watch, log
    from pgqueue.connections import SyncPool
    from pgqueue.fleet import Fleet

    app = load_app(app_name, door)
    log.configure(app.settings.log_level, app.settings.log_format)
    arguments = [app_name]
    for name in ("queues", "concurrency", "group"):
        if options[name] is not None:
            value = options[name]
            arguments += [f"--{name}", ",".join(value) if isinstance(value, list) else str(value)]
    if options["no_maintenance"]:
        arguments.append("--no-maintenance")
    with app:
        # Started here, an embedded PostgreSQL outlives every worker.
        pool = SyncPool(app.dsn, app.settings, "pgqueue autoscale")

        def measure(names: list[str]) -> Any:
            return pool.run(calls_watch.FLEET, names=names, queues=options["queues"])

        return Fleet(arguments, policy, measure, app.settings.grace).run()
