"""Pickup: how soon an idle worker has a job that was committed, and how soon its result is there."""

import time
from typing import Any, Final
from uuid import uuid4

from pgqueue import wire
from pgqueue.bench import statements
from pgqueue.bench.child import claim, complete
from pgqueue.bench.children import BenchError, clients, wait_until, workers
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant, percentile
from pgqueue.bench.site import Site
from pgqueue.connections import SyncConnection

_PRODUCERS: Final = 4
#: Long enough for a worker to have gone to sleep.
_IDLE: Final = 1.5
_PAYLOAD: Final = '{"a": 1}'
_WORKER: Final = uuid4()


def _sample(started: list[float], done: list[float]) -> Sample:
    figures = {"p50_ms": percentile(started, 0.5), "p99_ms": percentile(started, 0.99)} if started else {}
    figures |= {"done_p50_ms": percentile(done, 0.5), "done_p99_ms": percentile(done, 0.99)}
    return Sample({name: value * 1000 for name, value in figures.items()})


def _paced(rate: int) -> Variant:
    def run(site: Site) -> Sample:
        with (
            site.scratch.copy() as database,
            workers(database),
            clients(database, _PRODUCERS, "pace", rate=rate / _PRODUCERS, seconds=site.sizes.seconds) as producers,
            database.connection() as connection,
        ):
            time.sleep(_IDLE)
            answers = producers.run()
            jobs = sum(answer["jobs"] for answer in answers)
            wait_until(lambda: statements.scalar(connection, statements.COMPLETED_JOBS) == jobs, "all had run")
            latencies: list[Any] = []
            for answer in answers:
                latencies += statements.rows(
                    connection, statements.LATENCIES, job_ids=answer["ids"], committed=answer["committed"]
                )
        return _sample([max(started, 0.0) for started, _ in latencies], [max(done, 0.0) for _, done in latencies])

    return Variant(f"{rate} jobs/s", run)


def _seen(connection: SyncConnection, reader: SyncConnection, late: float) -> float:
    """Insert a job and return the seconds from its commit until its result can be read."""
    if late:
        with connection.transaction():
            job_id = statements.scalar(connection, statements.INSERT_ONE_RETURNING, payload=_PAYLOAD)
            time.sleep(late)
    else:
        job_id = statements.scalar(connection, statements.INSERT_ONE_RETURNING, payload=_PAYLOAD)
    committed = time.perf_counter()
    while not statements.rows(reader, statements.RESULT, job_id=job_id):
        if time.perf_counter() - committed > 60:
            raise BenchError("a job was not run within a minute")
        time.sleep(0.0005)
    return time.perf_counter() - committed


def _one_by_one(name: str, late: float) -> Variant:
    def run(site: Site) -> Sample:
        with (
            site.scratch.copy() as database,
            workers(database),
            database.connection() as connection,
            database.connection() as reader,
        ):
            time.sleep(_IDLE)
            done = []
            for _ in range(max(20, min(200, int(site.sizes.seconds * 50)))):
                done.append(_seen(connection, reader, late))
                time.sleep(0.02)
        return _sample([], done)

    return Variant(name, run)


def _by_hand(site: Site) -> Sample:
    took = []
    with site.scratch.copy() as database, database.connection() as connection:
        wire.read_raw(connection.adapters)
        for _ in range(200):
            began = time.perf_counter()
            statements.run(connection, statements.INSERT_ONE, payload=_PAYLOAD)
            complete(connection, _WORKER, claim(connection, _WORKER, 1, None))
            took.append(time.perf_counter() - began)
    return _sample([], took)


MEASURE: Final = Measure(
    "pickup",
    "From the commit of a job to its start and to its result, one worker",
    [
        Variant("INSERT, claim and complete by hand", _by_hand),
        _paced(100),
        _paced(500),
        _one_by_one("one by one", 0.0),
        _one_by_one("one by one, commit 200 ms after the INSERT", 0.2),
    ],
    [
        Ratio(
            f"{rate} jobs/s ÷ by hand",
            Place("pickup", f"{rate} jobs/s", "done_p50_ms"),
            Place("pickup", "INSERT, claim and complete by hand", "done_p50_ms"),
        )
        for rate in (100, 500)
    ],
    headline="done_p50_ms",
)
