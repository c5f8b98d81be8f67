"""Submit: single jobs, each in a transaction of its own, by clients that do nothing else."""

from typing import Any, Final

from pgqueue.bench import statements
from pgqueue.bench.children import clients
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant, percentile
from pgqueue.bench.machine import Meter
from pgqueue.bench.scratch import Database
from pgqueue.bench.site import Site
from pgqueue.connections import SyncConnection


def plain(connection: SyncConnection) -> None:
    """Make the plain table that jobs are held against: the same columns, defaults and primary key."""
    statements.run(connection, statements.PLAIN_TABLE)


def submitted(database: Database, site: Site, count: int, role: str, **told: object) -> Sample:
    """Let clients submit for the site's seconds, to a queue that sweeps have counted, as beside any live worker."""
    with clients(database, count, role, seconds=site.sizes.seconds, **told) as started, database.connection() as own:
        load(1)(own)
        for _ in range(2):
            statements.run(own, statements.SWEEP)
        meter = Meter(own)
        answers: list[dict[str, Any]] = started.run()
        jobs = sum(answer["jobs"] for answer in answers)
        cost = meter.per_job(jobs, client_seconds=sum(answer["processor"] for answer in answers))
    latencies = [latency * 1000 for answer in answers for latency in answer["latencies"]]
    return Sample(
        {
            "jobs_per_s": jobs / max(answer["seconds"] for answer in answers),
            "p50_ms": percentile(latencies, 0.5),
            "p99_ms": percentile(latencies, 0.99),
            **cost,
        }
    )


def _clients(count: int, door: str, role: str, **told: object) -> Variant:
    def run(site: Site) -> Sample:
        with site.scratch.copy("plain", plain) as database:
            return submitted(database, site, count, role, **told)

    return Variant(f"{door}, {count} client" + ("s" if count > 1 else ""), run)


def _at_half(count: int) -> Variant:
    def run(site: Site) -> Sample:
        with site.scratch.copy() as database:
            saturated = submitted(database, site, count, "insert", plain=False).figures["jobs_per_s"]
        with site.scratch.copy() as database:
            return submitted(database, site, count, "insert", plain=False, rate=saturated / 2 / count)

    return Variant(f"INSERT, {count} clients, half as fast", run)


def _beside_plain(name: str, figure: str, at_most: float | None = None, at_least: float | None = None) -> list[Ratio]:
    return [
        Ratio(
            f"{name}, {clients}",
            Place("submit", f"INSERT, {clients}", figure),
            Place("submit", f"plain table, {clients}", figure),
            at_most=at_most,
            at_least=at_least,
        )
        for clients in ("1 client", "8 clients")
    ]


MEASURE: Final = Measure(
    "submit",
    "Single jobs, a commit each",
    [
        _clients(1, "plain table", "insert", plain=True),
        _clients(1, "INSERT", "insert", plain=False),
        _clients(1, "Python", "enqueue"),
        _clients(8, "plain table", "insert", plain=True),
        _clients(8, "INSERT", "insert", plain=False),
        _at_half(8),
        _clients(8, "Python", "enqueue"),
    ],
    [
        *_beside_plain("rate ÷ plain table", "jobs_per_s"),
        *_beside_plain("server CPU ÷ plain table", "server_us", at_most=2),
        *_beside_plain("WAL ÷ plain table", "wal_bytes", at_most=1.3),
    ],
)
