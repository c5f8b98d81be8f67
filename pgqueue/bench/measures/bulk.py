"""Bulk: many jobs at once, by every door, and the same rows without the queue's triggers or in a plain table."""

import time
from typing import Final, LiteralString

from pgqueue.bench import statements
from pgqueue.bench.children import clients
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.machine import Meter
from pgqueue.bench.measures.submit import plain
from pgqueue.bench.site import Site

#: A call, so that a hundred thousand jobs are one.
_BATCH: Final = 100_000


def _select(name: str, statement: LiteralString, *, triggers: bool = True) -> Variant:
    def run(site: Site) -> Sample:
        jobs = site.sizes.jobs
        with site.scratch.copy("plain", plain) as database, database.connection() as connection:
            if not triggers:
                statements.run(connection, statements.DROP_TRIGGERS)
            meter = Meter(connection)
            began = time.perf_counter()
            statements.run(connection, statement, job_type=statements.NOOP, jobs=jobs)
            seconds = time.perf_counter() - began
            return Sample({"jobs_per_s": jobs / seconds, "seconds": seconds, **meter.per_job(jobs)})

    return Variant(name, run)


def _client(name: str, role: str, **told: object) -> Variant:
    def run(site: Site) -> Sample:
        jobs = site.sizes.jobs
        with (
            site.scratch.copy("plain", plain) as database,
            clients(database, 1, role, jobs=jobs, **told) as one,
            database.connection() as connection,
        ):
            meter = Meter(connection)
            (answer,) = one.run()
            cost = meter.per_job(jobs, client_seconds=answer["processor"])
        return Sample({"jobs_per_s": jobs / answer["seconds"], "seconds": answer["seconds"], **cost})

    return Variant(name, run)


MEASURE: Final = Measure(
    "bulk",
    "Many jobs at once",
    [
        _select("INSERT SELECT, plain table", statements.PLAIN_INSERT_MANY),
        _select("INSERT SELECT, no triggers", statements.INSERT_MANY, triggers=False),
        _select("INSERT SELECT", statements.INSERT_MANY),
        _client("COPY, plain table", "copy", plain=True),
        _client("COPY", "copy", plain=False),
        _client("Python enqueue_many", "enqueue_many", batch=_BATCH),
    ],
    [
        Ratio(
            "time ÷ no triggers",
            Place("bulk", "INSERT SELECT", "seconds"),
            Place("bulk", "INSERT SELECT, no triggers", "seconds"),
            at_most=1.35,
        ),
        Ratio("COPY ÷ plain table", Place("bulk", "COPY"), Place("bulk", "COPY, plain table")),
        Ratio(
            "enqueue_many ÷ COPY, plain table",
            Place("bulk", "Python enqueue_many"),
            Place("bulk", "COPY, plain table"),
            at_least=0.5,
        ),
    ],
)
