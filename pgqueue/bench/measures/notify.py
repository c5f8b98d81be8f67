"""Notify: what the bell costs producers, with a worker that works the queue and with somebody who watches."""

from contextlib import ExitStack
from typing import Final

from pgqueue.bench import statements
from pgqueue.bench.children import workers
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.measures.submit import submitted
from pgqueue.bench.site import Site


def _clients(name: str, *, wake: str | None, watched: bool = False) -> Variant:
    def run(site: Site) -> Sample:
        with site.scratch.copy() as database, ExitStack() as stack:
            if watched:
                watcher = stack.enter_context(database.connection())
                statements.run(watcher, statements.LISTEN)
                statements.run(watcher, statements.WATCH)
            if wake is not None:
                stack.enter_context(workers(database, wake=wake))
            return submitted(database, site, 8, "insert", plain=False)

    return Variant(name, run)


MEASURE: Final = Measure(
    "notify",
    "8 clients inserting single jobs while a worker works",
    [
        _clients("poll", wake="poll"),
        _clients("notify", wake="notify"),
        _clients("notify, watched", wake="notify", watched=True),
        _clients("no worker", wake=None),
    ],
    [
        Ratio("notify ÷ poll", Place("notify", "notify"), Place("notify", "poll"), 0.9),
        Ratio("watched ÷ not", Place("notify", "notify, watched"), Place("notify", "notify"), 0.9),
    ],
)
