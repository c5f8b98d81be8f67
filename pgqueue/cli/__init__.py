"""The command line: `pgqueue COMMAND`. A file per noun; each is imported when its command is asked for.

Exit codes: 0 ok, 1 failure, 2 usage, 3 not found, 4 conflict or duplicate, 5 unhealthy, 6 timeout,
7 database unreachable, 130 interrupted.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import rich_click as click
from click.exceptions import Exit

from pgqueue import __version__
from pgqueue.cli.codes import INTERRUPTED, OK
from pgqueue.cli.context import door_options

_COMMANDS: Final = {
    "up": "pgqueue.cli.up:up",
    "migrate": "pgqueue.cli.schema:migrate",
    "schema": "pgqueue.cli.schema:schema",
    "worker": "pgqueue.cli.worker:worker",
    "enqueue": "pgqueue.cli.enqueue:enqueue",
    "jobs": "pgqueue.cli.jobs:jobs",
    "dlq": "pgqueue.cli.dlq:dlq",
    "queues": "pgqueue.cli.queues:queues",
    "schedules": "pgqueue.cli.schedules:schedules",
    "scheduler": "pgqueue.cli.scheduler:scheduler",
    "workers": "pgqueue.cli.workers:workers",
    "serve": "pgqueue.cli.serve:serve",
    "keys": "pgqueue.cli.keys:keys",
    "autoscale": "pgqueue.cli.autoscale:autoscale",
    "top": "pgqueue.cli.top:top",
    "alerts": "pgqueue.cli.metrics:alerts",
    "metrics": "pgqueue.cli.metrics:metrics",
    "doctor": "pgqueue.cli.doctor:doctor",
    "psql": "pgqueue.cli.psql:psql",
    "bench": "pgqueue.cli.bench:bench",
    "completion": "pgqueue.cli.completion:completion",
}


class Commands(click.RichGroup):
    """The group of all commands, which turns the errors of pgqueue into messages and exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order a newcomer meets them."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None for an unknown name."""
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name].split(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that is asked for; a usage error names the one that may have been meant."""
        name = args[0]
        if name not in _COMMANDS and not ctx.resilient_parsing:
            from difflib import get_close_matches

            for near in get_close_matches(name, _COMMANDS, n=1):
                raise click.UsageError(f"No such command {name!r}. Did you mean {near!r}?", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; raises Exit with the code of what went wrong."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("pgqueue: interrupted", err=True)
            raise Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # Whoever read our output has what it wanted; the interpreter's last flush must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise Exit(OK) from None
        except (click.ClickException, Exit, click.Abort):
            raise
        except Exception as exc:
            from pgqueue.cli.failures import report

            raise Exit(report(exc)) from exc


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pgqueue", message="%(prog)s %(version)s")
@door_options
def root() -> None:
    """A job queue that is PostgreSQL.

    Commands use the database of PGQUEUE_DSN (or --dsn). Without one they use the embedded PostgreSQL, which all
    pgqueue processes of a user share.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line with `args` (None: the process's) and exit."""
    root.main(args=list(args) if args is not None else None, prog_name="pgqueue", complete_var="_PGQUEUE_COMPLETE")


__all__ = ["main", "root"]
