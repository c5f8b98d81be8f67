"""Held: a drain while another session keeps a snapshot open from before the load, and the same without."""

from contextlib import ExitStack
from typing import Final

from pgqueue.bench import statements
from pgqueue.bench.draining import drain, load
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.site import Site


def _drained(name: str, *, hold: bool) -> Variant:
    def run(site: Site) -> Sample:
        jobs = 3 * site.sizes.jobs
        window = jobs // 6
        with site.scratch.copy() as database, ExitStack() as stack:
            if hold:
                holder = stack.enter_context(database.connection())
                holder.autocommit = False
                holder.isolation_level = statements.REPEATABLE_READ
                statements.scalar(holder, statements.SNAPSHOT)
            with database.connection() as connection:
                load(jobs)(connection)
            drained = drain(database, jobs)
            figures = {
                **drained.figures,
                "first_per_s": drained.rate(0, window),
                "last_per_s": drained.rate(jobs - window, jobs),
            }
            parts = {"first_us": drained.server_us(0, window), "last_us": drained.server_us(jobs - window, jobs)}
            figures |= {name: spent for name, spent in parts.items() if spent is not None}
        return Sample(figures, drained.course(20))

    return Variant(name, run)


def _held(figure: str) -> Place:
    return Place("held", "snapshot held", figure)


def _free(figure: str) -> Place:
    return Place("held", "no snapshot", figure)


MEASURE: Final = Measure(
    "held",
    "A drain while another session holds an old snapshot",
    [_drained("no snapshot", hold=False), _drained("snapshot held", hold=True)],
    [
        Ratio("last ÷ first part", _held("last_per_s"), _held("first_per_s"), at_least=0.95),
        Ratio("last part ÷ no snapshot", _held("last_per_s"), _free("last_per_s"), at_least=0.9),
        Ratio("server CPU, last ÷ first part", _held("last_us"), _held("first_us")),
        Ratio("server CPU, last part ÷ no snapshot", _held("last_us"), _free("last_us")),
    ],
    headline="last_per_s",
)
