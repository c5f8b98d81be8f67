"""WAL: what a job writes from its enqueue to its end, and what the same row costs in plain tables."""

from typing import Final
from uuid import uuid4

from pgqueue import wire
from pgqueue.bench import statements
from pgqueue.bench.child import claim, complete
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.machine import Meter
from pgqueue.bench.site import Site

_BATCH: Final = 500


def _queue(site: Site) -> Sample:
    jobs = site.sizes.few
    worker_id = uuid4()
    with site.scratch.copy() as database, database.connection() as connection:
        wire.read_raw(connection.adapters)
        meter = Meter(connection)
        load(jobs)(connection)
        while claimed := claim(connection, worker_id, _BATCH, None):
            complete(connection, worker_id, claimed)
        return Sample(meter.per_job(jobs))


def _plain(site: Site) -> Sample:
    jobs = site.sizes.few
    worker_id = uuid4()
    with site.scratch.copy() as database, database.connection() as connection:
        statements.run(connection, statements.PLAIN_TABLE)
        statements.run(connection, statements.PLAIN_DONE)
        meter = Meter(connection)
        statements.run(connection, statements.PLAIN_INSERT_MANY, jobs=jobs)
        for _ in range(0, jobs, _BATCH):
            statements.run(connection, statements.PLAIN_CLAIM, worker_id=worker_id, jobs=_BATCH)
            statements.run(connection, statements.PLAIN_COMPLETE)
        return Sample({"wal_bytes": meter.per_job(jobs)["wal_bytes"]})


MEASURE: Final = Measure(
    "wal",
    "WAL of a job's whole life",
    [Variant("insert, update, delete and insert in plain tables", _plain), Variant("enqueue, claim, complete", _queue)],
    [
        Ratio(
            "pgqueue ÷ plain tables",
            Place("wal", "enqueue, claim, complete", "wal_bytes"),
            Place("wal", "insert, update, delete and insert in plain tables", "wal_bytes"),
            at_most=1.2,
        )
    ],
    headline="wal_bytes",
)
