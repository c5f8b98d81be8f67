"""`pgqueue worker`: runs an app's tasks, in this process or in several."""

from pathlib import Path
from typing import Literal

import rich_click as click

from pgqueue.cli.context import Door, dsn_option, pass_door
from pgqueue.cli.loading import load_app
from pgqueue.cli.values import NAMES, PRIORITY_LIST


@click.command()
@click.argument("app_name", metavar="MODULE:APP")
@click.option("--queues", type=NAMES, help="Only these queues (default: all).")
@click.option("--priorities", type=PRIORITY_LIST, help="Only these priorities, by name or number (default: all).")
@click.option("--concurrency", type=click.IntRange(min=1), help="Jobs at once (default: PGQUEUE_CONCURRENCY, 10).")
@click.option("--processes", type=click.IntRange(1, 512), default=1, show_default=True, help="So many workers.")
@click.option("--group", help="Name of the group of workers it belongs to.")
@click.option(
    "--partitions",
    type=click.Choice(["all", "assigned"]),
    default="all",
    show_default=True,
    help="Claim from all shards, or from those that the group's live workers divide among themselves.",
)
@click.option("--name", help="What it is called (default: host and process id).")
@click.option("--reload", is_flag=True, help="Begin anew when a Python file below the working directory changes.")
@click.option("--no-maintenance", is_flag=True, help="Leave sweeps and partitions to others.")
@dsn_option
@pass_door
@click.pass_context
def worker(
    ctx: click.Context,
    door: Door,
    app_name: str,
    queues: list[str] | None,
    priorities: list[int] | None,
    concurrency: int | None,
    processes: int,
    group: str | None,
    partitions: Literal["all", "assigned"],
    name: str | None,
    reload: bool,
    no_maintenance: bool,
) -> None:
    """Run the tasks of an app until SIGTERM or Ctrl-C, then drain: what runs may end within PGQUEUE_GRACE seconds.

    MODULE:APP is looked for in the working directory and the installed packages. A second signal hurries.
    """
    from pgqueue import log

    if partitions == "assigned" and group is None:
        raise click.UsageError("--partitions assigned needs --group")
    app = load_app(app_name, door)
    log.configure(app.settings.log_level, app.settings.log_format)
    with app:
        ctx.exit(
            app.run_worker(
                queues=queues,
                priorities=priorities,
                concurrency=concurrency,
                group=group,
                partitions=partitions,
                name=name,
                processes=processes,
                watched=[Path.cwd()] if reload else (),
                maintenance=not no_maintenance,
            )
        )
