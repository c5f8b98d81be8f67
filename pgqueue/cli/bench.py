"""`pgqueue bench`: the benchmark, on the configured server."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import rich_click as click

from pgqueue.cli.codes import FAILURE, INTERRUPTED
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import Column, note, print_json, print_table
from pgqueue.cli.values import NAMES

_QUICK: Final = (1, 20_000, 1.0)
_WHOLE: Final = (3, 100_000, 4.0)


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--reps", type=click.IntRange(min=1), help="Repetitions, of which medians are told (default: 3).")
@click.option("--jobs", type=click.IntRange(min=500), help="Jobs of a drain; other sizes follow (default: 100,000).")
@click.option("--only", type=NAMES, help="Only these measures, such as submit,drain,ceiling (default: all).")
@click.option("--quick", is_flag=True, help="One repetition with 20,000 jobs: an impression within minutes.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot there.")
@door_options
@pass_door
@click.pass_context
def bench(
    ctx: click.Context,
    door: Door,
    reps: int | None,
    jobs: int | None,
    only: Sequence[str] | None,
    quick: bool,
    svg: Path | None,
) -> None:
    """Measure the queue on the configured server, in scratch databases that are dropped at the end.

    The jobs that are there already are neither read nor touched. The role needs the right to create databases.
    """
    if ctx.invoked_subcommand is not None:
        return
    from pgqueue.bench import plot, report
    from pgqueue.bench.measures import ALL, LONG
    from pgqueue.bench.run import run
    from pgqueue.bench.scratch import Scratch
    from pgqueue.bench.site import Site, Sizes

    unknown = sorted(set(only or ()) - {measure.name for measure in (*ALL, *LONG)})
    if unknown:
        known = ", ".join(measure.name for measure in (*ALL, *LONG))
        raise click.UsageError(f"there is no measure {unknown[0]!r}; there are: {known}")
    chosen = ALL if only is None else [measure for measure in (*ALL, *LONG) if measure.name in only]
    default_reps, default_jobs, seconds = _QUICK if quick else _WHOLE
    reps, sizes = reps or default_reps, Sizes(jobs or default_jobs, seconds)
    with _interruptible(), door.dsn() as dsn, Scratch(dsn, door.settings) as scratch:
        results = run(Site(scratch, sizes), chosen, reps, note)
        told = report.document(results, chosen, report.about(scratch.admin, sizes, reps))
    if svg is not None:
        svg.write_text(plot.svg(told), encoding="utf-8")
    if door.as_json:
        print_json(told)
    else:
        for line in report.lines(told):
            click.echo(line)
    if results.faults:
        ctx.exit(INTERRUPTED if results.interrupted else FAILURE)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, so that databases are dropped on the way out."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@bench.command()
@click.argument("home", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--server", envvar="BENCH_ADMIN_DSN", required=True, metavar="DSN", help="A server for benchmarks only.")
@click.option("--peers", type=NAMES, default="graphile-worker,pgmq", show_default=True, help="Peers of bench-peers.")
@click.option("--tests", type=NAMES, default="submit1,submit8,drain1,drain2,drain4,e2e100", show_default=True)
@click.option("--reps", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--jobs", type=click.IntRange(min=500), default=100_000, show_default=True, help="Of a drain.")
@click.option("--python", default=sys.executable, help="The Python that runs bench-peers (default: this one).")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Keep bench-peers' JSON there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@pass_door
@click.pass_context
def compare(
    ctx: click.Context,
    door: Door,
    *,
    as_json: bool,
    home: Path,
    server: str,
    peers: Sequence[str],
    tests: Sequence[str],
    reps: int,
    jobs: int,
    python: str,
    output: Path | None,
) -> None:
    """Measure pgqueue beside other queues, with bench-peers in the folder HOME.

    Databases of that server whose names begin with bench_ are dropped and made anew. The peers are those that are
    installed as bench-peers' README says (PEERS_HOME).
    """
    from pgqueue.bench.compare import Comparison, faults, label, quotients
    from pgqueue.bench.compare import compare as run_peers

    comparison = Comparison(home, server, peers, tests, reps, jobs, python)
    with TemporaryDirectory() as folder:
        document = run_peers(comparison, output or Path(folder, "peers.json"), note)
    rows, wrong = quotients(document), faults(document)
    if door.as_json or as_json:
        print_json({"ratios": rows, "faults": wrong})
    else:
        columns: list[Column[dict[str, Any]]] = [
            Column("TEST", lambda row: row["test"]),
            Column("FIGURE", lambda row: label(row["figure"])),
            Column("PGQUEUE", lambda row: f"{row['pgqueue']:,.6g}", right=True),
            Column("PEER", lambda row: row["peer"]),
            Column("ITS", lambda row: f"{row['theirs']:,.6g}", right=True),
            Column("RATIO", lambda row: f"{row['ratio']:.2f}", right=True),
        ]
        print_table(columns, rows)
        if not rows:
            note("pgqueue: no peer ran beside pgqueue; bench-peers' own tables are above")
        for fault in wrong:
            note(f"pgqueue: {fault}")
    if wrong:
        ctx.exit(FAILURE)


@bench.command()
@click.option("--minutes", type=click.FloatRange(min=0.2), default=60.0, show_default=True)
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all readings there.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot there.")
@pass_door
@click.pass_context
def soak(
    ctx: click.Context, door: Door, minutes: float, workers: int, json_file: Path | None, svg: Path | None
) -> None:
    """Work for an hour on the configured server, in a scratch database, and see whether it stays fast and small."""
    from pgqueue.bench import soak as soaking
    from pgqueue.bench.scratch import Scratch

    with _interruptible(), door.dsn() as dsn, Scratch(dsn, door.settings) as scratch:
        told = soaking.soak(scratch, minutes, workers, note)
    _write(told, json_file, soaking.svg(told) if svg is not None else None, svg)
    if door.as_json:
        print_json({name: value for name, value in told.items() if name != "readings"})
    else:
        for line in soaking.lines(told):
            click.echo(line)
    if told["faults"]:
        ctx.exit(FAILURE)


@bench.command()
@click.option("--minutes", type=click.FloatRange(min=0.1), default=30.0, show_default=True)
@click.option("--jobs", type=click.IntRange(min=10), default=300_000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the faults and the jobs.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report there.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot there.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep ledger and logs in this folder.")
@click.pass_context
def chaos(
    ctx: click.Context,
    minutes: float,
    jobs: int,
    seed: int,
    json_file: Path | None,
    svg: Path | None,
    keep: Path | None,
) -> None:
    """Break a queue of its own in every way, on a server of its own, and check that nothing is lost."""
    from pgqueue.bench.chaos import plot, report
    from pgqueue.bench.chaos.rig import Options
    from pgqueue.bench.chaos.run import run

    with _interruptible():
        outcome = run(Options(minutes, jobs, seed), note, keep=keep)
    told = report.document(outcome)
    _write(told, json_file, plot.svg(told) if svg is not None else None, svg)
    for line in report.lines(told):
        click.echo(line)
    if outcome.failed:
        ctx.exit(FAILURE)


def _write(told: dict[str, Any], json_file: Path | None, page: str | None, svg: Path | None) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if svg is not None and page is not None:
        svg.write_text(page, encoding="utf-8")
