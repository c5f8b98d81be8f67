"""`python -m pgqueue.bench.chaos`."""

import argparse
import json
import signal
import sys
from pathlib import Path

from pgqueue.bench.chaos import plot, report
from pgqueue.bench.chaos.plan import LANES
from pgqueue.bench.chaos.rig import Options
from pgqueue.bench.chaos.run import run


def main(words: list[str] | None = None) -> int:
    """Do a chaos run; return 0 if every promise was kept."""
    known = [kind for lane in LANES.values() for kind in lane]
    parser = argparse.ArgumentParser(prog="python -m pgqueue.bench.chaos", description="Break a running queue.")
    parser.add_argument("--minutes", type=float, default=30.0, help="of faults (default: 30)")
    parser.add_argument("--jobs", type=int, default=300_000, help="to be enqueued meanwhile (default: 300,000)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan and the jobs (default: 1)")
    parser.add_argument("--every", type=float, default=11.0, help="seconds between two faults of a lane (default: 11)")
    parser.add_argument("--kinds", help=f"only these, with commas between them; there are: {', '.join(known)}")
    parser.add_argument("--json", type=Path, help="write the report there, as JSON")
    parser.add_argument("--svg", type=Path, help="write a plot there")
    parser.add_argument("--keep", type=Path, help="keep the ledger and the logs of all processes in this folder")
    told = parser.parse_args(words)
    kinds = None if told.kinds is None else [kind.strip() for kind in told.kinds.split(",")]
    if unknown := sorted(set(kinds or ()) - set(known)):
        parser.error(f"there is no fault {unknown[0]!r}")
    # Told to end, it ends all that it has started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = Options(told.minutes, told.jobs, told.seed, kinds, told.every)
    outcome = run(options, lambda line: print(line, file=sys.stderr, flush=True), keep=told.keep)
    document = report.document(outcome)
    if told.json is not None:
        told.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if told.svg is not None:
        told.svg.write_text(plot.svg(document), encoding="utf-8")
    print("\n".join(report.lines(document)))
    return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
