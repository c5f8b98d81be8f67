"""A cycle: bare claims and completes of jobs that wait, in a database that is full of others."""

from contextlib import ExitStack
from typing import Final

from pgqueue.bench import statements
from pgqueue.bench.children import clients
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Sample
from pgqueue.bench.machine import Meter
from pgqueue.bench.scratch import Fill
from pgqueue.bench.site import Site

_BATCH: Final = 100
#: Fewer of a claimer are over before the last one has begun.
_CLAIMS: Final = 10
_TYPES: Final = ["answer", "noop", "wait"]


def cycled(site: Site, key: str, fill: Fill, *, claimers: int = 1, idle: int = 0) -> Sample:
    """Claim and complete jobs by so many claimers, in a database that `fill` has filled and `idle` sessions look at.

    Large, so the database is kept under its key from one repetition to the next: each takes a fiftieth of it.
    """
    jobs = max(site.sizes.few, claimers * _CLAIMS * _BATCH)
    database = site.scratch.kept(key, fill)
    with ExitStack() as open_:
        connection = open_.enter_context(database.connection())
        load(jobs + claimers)(connection)
        statements.run(connection, statements.SWEEP)
        for _ in range(idle):
            open_.enter_context(database.connection())
        loop = open_.enter_context(
            clients(database, claimers, "cycle", batch=_BATCH, jobs=jobs // claimers, job_types=_TYPES)
        )
        meter = Meter(connection)
        answers = loop.run()
        done = sum(answer["jobs"] for answer in answers)
        cost = meter.per_job(done, client_seconds=sum(answer["processor"] for answer in answers))
    return Sample({"jobs_per_s": done / max(answer["seconds"] for answer in answers), **cost})
