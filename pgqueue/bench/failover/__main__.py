"""`python -m pgqueue.bench.failover`."""

import json
import platform
import signal
import sys
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from pgqueue.bench.failover import rounds


@click.command()
@click.option("--rounds", "count", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--fault", type=click.Choice(rounds.FAULTS), help="Only this one (default: both, in turn).")
@click.option("--patroni", is_flag=True, help="Under Patroni with etcd, which must be installed.")
@click.option("--json", "output", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
def main(count: int, fault: rounds.Fault | None, patroni: bool, output: Path | None) -> None:
    """Lose the primary of a synchronous pair so many times, and compare what was accepted with what is there."""
    # Servers are stopped on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    faults = list(islice(cycle([fault] if fault else rounds.FAULTS), count))
    with TemporaryDirectory(prefix="pgqueue-failover-") as folder:
        if patroni:
            from pgqueue.bench.failover.patroni import by_patroni as run
        else:
            run = rounds.by_hand
        found = run(Path(folder), faults, lambda line: click.echo(line, err=True))
    found = {"system": platform.platform(), "patroni": patroni, **found}
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n")
    click.echo(json.dumps({name: value for name, value in found.items() if name != "rounds"}, indent=2))
    sys.exit(1 if found["lost"] or found["not completed"] or found["wrong"] else 0)


if __name__ == "__main__":
    main()
