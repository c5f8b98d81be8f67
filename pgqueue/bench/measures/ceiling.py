"""The ceiling: the same claim and complete in a bare loop, with nothing in between."""

from typing import Final

from pgqueue.bench.children import clients
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Measure, Sample, Variant
from pgqueue.bench.machine import Meter
from pgqueue.bench.site import Site

#: What a worker claims and completes at once when it is busy.
BATCH: Final = 500


def _bare(connections: int) -> Variant:
    def run(site: Site) -> Sample:
        jobs = site.sizes.jobs
        with (
            site.scratch.copy(f"{jobs} of noop", load(jobs)) as database,
            clients(database, connections, "cycle", batch=BATCH) as loops,
            database.connection() as connection,
        ):
            meter = Meter(connection)
            answers = loops.run()
            cost = meter.per_job(jobs, client_seconds=sum(answer["processor"] for answer in answers))
        done = sum(answer["jobs"] for answer in answers)
        return Sample({"jobs_per_s": done / max(answer["seconds"] for answer in answers), **cost})

    return Variant(f"{connections} connections", run)


MEASURE: Final = Measure(
    "ceiling", "Claim and complete in a bare loop, 500 at a time", [_bare(count) for count in (2, 4, 8)]
)
