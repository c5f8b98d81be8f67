"""Scale: tasks that wait, which more workers should work off in proportion."""

from typing import Final

from pgqueue.bench.draining import drain, drained_copy
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.site import Site

_CONCURRENCY: Final = 50
_WAIT: Final = 0.1


def _workers(processes: int) -> Variant:
    def run(site: Site) -> Sample:
        rate = processes * _CONCURRENCY / _WAIT
        jobs = int(rate * site.sizes.seconds)
        drained = drained_copy(
            site, jobs, lambda database: drain(database, jobs, processes=processes, concurrency=_CONCURRENCY), "ask"
        )
        return Sample({**drained.figures, "of_linear": drained.figures["jobs_per_s"] / rate}, drained.course())

    return Variant(f"{processes} process" + ("es" if processes > 1 else ""), run)


_COUNTS: Final = (1, 2, 4, 8)

MEASURE: Final = Measure(
    "scale",
    "Tasks that wait 100 ms, 50 at once",
    [_workers(processes) for processes in _COUNTS],
    [
        Ratio(
            f"{processes} ÷ 1",
            Place("scale", f"{processes} processes"),
            Place("scale", "1 process"),
            at_least=processes * 0.95,
        )
        for processes in _COUNTS[1:]
    ],
    headline="of_linear",
)
