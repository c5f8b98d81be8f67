"""Drain: no-op jobs that wait, worked off by real worker processes."""

from typing import Final

from pgqueue.bench.draining import drain, drained_copy
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.site import Site


def _workers(processes: int) -> Variant:
    def run(site: Site) -> Sample:
        jobs = site.sizes.jobs
        drained = drained_copy(site, jobs, lambda database: drain(database, jobs, processes=processes))
        return Sample(drained.figures, drained.course())

    return Variant(f"{processes} process" + ("es" if processes > 1 else ""), run)


def _task(job_type: str, name: str, part: int, concurrency: int | None = None) -> Variant:
    def run(site: Site) -> Sample:
        jobs = site.sizes.jobs // part
        drained = drained_copy(site, jobs, lambda database: drain(database, jobs, concurrency=concurrency), job_type)
        return Sample(drained.figures, drained.course())

    return Variant(name, run)


#: A worker claims on one connection and completes on another.
_RATIOS: Final = [
    Ratio(f"{name} ÷ bare loop", Place("drain", name), Place("ceiling", f"{connections} connections"), at_least=0.6)
    for name, connections in (("1 process", 2), ("2 processes", 4), ("4 processes", 8))
]

MEASURE: Final = Measure(
    "drain",
    "No-op jobs worked off",
    [
        *(_workers(processes) for processes in (1, 2, 4)),
        _task("answer", "tasks that return a result", 1),
        _task("wait", "tasks that wait 5 ms, 50 at once", 10, 50),
    ],
    _RATIOS,
)
