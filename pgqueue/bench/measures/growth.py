"""Growth: claims with ten times as many jobs, claimers, queues or connections, and ten times again.

Left out of a run that names no measures: loading ten million jobs takes minutes and gigabytes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from pgqueue.bench import statements
from pgqueue.bench.cycling import cycled
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.site import Site
from pgqueue.connections import SyncConnection

_JOBS: Final = (10_000, 100_000, 1_000_000, 10_000_000)
_Run = Callable[[int, Site], Sample]


def _waiting(jobs: int, site: Site) -> Sample:
    return cycled(site, f"{jobs} waiting", load(jobs))


def _finished(jobs: int, site: Site) -> Sample:
    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.INSERT_COMPLETED, jobs=jobs)

    return cycled(site, f"{jobs} finished", fill)


def _claimers(count: int, site: Site) -> Sample:
    return cycled(site, "backlog of claimers", load(site.sizes.jobs), claimers=count)


def _queues(count: int, site: Site) -> Sample:
    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.INSERT_QUEUES, jobs=site.sizes.jobs, queues=count)

    return cycled(site, f"{count} queues", fill)


def _connections(count: int, site: Site) -> Sample:
    return cycled(site, "backlog of connections", load(site.sizes.jobs), idle=count - 1)


def _measure(what: str, steps: Sequence[int], run: _Run, bars: Sequence[tuple[int, int, float]] = ()) -> Measure:
    """Compare each step with the first one, and with another where a bar says `(step, other, at_least)`."""
    name = f"growth-{what}"
    variants = [Variant(f"{step:,} {what}", partial(_within, step, run)) for step in steps]
    places = {step: Place(name, variant.name) for step, variant in zip(steps, variants, strict=True)}
    # Nothing worse than logarithmic: a thousand times as much may cost what ten more steps down a tree cost.
    wanted = [*((step, steps[0], None) for step in steps[1:]), *bars]
    ratios = [
        Ratio(f"{places[of].variant} ÷ {places[over].variant}", places[of], places[over], at_least)
        for of, over, at_least in wanted
    ]
    return Measure(name, f"Claims with growing numbers: {what}", variants, ratios)


def _within(step: int, run: _Run, site: Site) -> Sample:
    """Leave out what is more than a hundred times the jobs of a drain."""
    return run(step, site) if step <= 100 * site.sizes.jobs else Sample({})


MEASURES: Final[Sequence[Measure]] = (
    _measure("waiting", _JOBS, _waiting),
    _measure("finished", (0, *_JOBS), _finished),
    _measure("claimers", (1, 2, 4, 8, 16, 32, 64), _claimers, [(64, 4, 0.8)]),
    _measure("queues", (1, 10, 100, 1000), _queues),
    _measure("connections", (1, 10, 100, 200), _connections),
)
