"""Tuning: what a setting of the server, of the table or of the jobs themselves does to drains and submits.

Left out of a run that names no measures: it answers questions that most never ask.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, LiteralString

from pgqueue.bench import statements
from pgqueue.bench.children import clients
from pgqueue.bench.draining import drain, load
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.scratch import Database, Fill
from pgqueue.bench.site import Site
from pgqueue.connections import SyncConnection

_SIZES: Final = (100, 1_000, 10_000, 100_000, 1_000_000)
_VOLUME: Final = 100_000_000
_COMMITS: Final = {
    "as it is": {},
    "synchronous_commit off": {"synchronous_commit": "off"},
    "commit_delay 1 ms": {"commit_delay": "1000", "commit_siblings": "3"},
}
_TABLES: Final[dict[str, LiteralString]] = {
    "as it is": "select 1",
    "fillfactor 100": "alter table pgqueue.jobs_live set (fillfactor = 100)",
    "fillfactor 30": "alter table pgqueue.jobs_live set (fillfactor = 30)",
    "autovacuum off": "alter table pgqueue.jobs_live set (autovacuum_enabled = off)",
}


def _both(fill: Fill, alter: LiteralString) -> Fill:
    def filled(connection: SyncConnection) -> None:
        statements.run(connection, alter)
        fill(connection)

    return filled


def _set(database: Database, settings: dict[str, str]) -> None:
    """Settings of a database are not copied with it."""
    with database.connection() as connection:
        for name, value in settings.items():
            statements.run(connection, statements.set_for_all(database.name, name, value))


def _drained(key: str, fill: Fill, jobs: int, settings: dict[str, str], site: Site) -> Sample:
    with site.scratch.copy(key, fill) as database:
        _set(database, settings)
        return Sample(drain(database, jobs).figures)


def _submitted(settings: dict[str, str], site: Site) -> Sample:
    with site.scratch.copy() as database:
        _set(database, settings)
        with clients(database, 8, "insert", plain=False, seconds=site.sizes.seconds) as eight:
            answers = eight.run()
    return Sample({"jobs_per_s": sum(answer["jobs"] for answer in answers) / site.sizes.seconds})


def _commit_drain(settings: dict[str, str], site: Site) -> Sample:
    return _drained("tuned jobs", load(site.sizes.jobs), site.sizes.jobs, settings, site)


def _table(name: str, alter: LiteralString, site: Site) -> Sample:
    return _drained(f"tuned {name}", _both(load(site.sizes.jobs), alter), site.sizes.jobs, {}, site)


def _payload(size: int, site: Site) -> Sample:
    jobs = max(min(site.sizes.jobs, _VOLUME // size), 100)

    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.INSERT_SIZED, jobs=jobs, size=size)

    return _drained(f"{size} bytes", fill, jobs, {}, site)


def _priorities(count: int, site: Site) -> Sample:
    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.INSERT_PRIORITIES, jobs=site.sizes.jobs, count=count)

    return _drained(f"{count} priorities", fill, site.sizes.jobs, {}, site)


def _partitions(days: int, site: Site) -> Sample:
    def fill(connection: SyncConnection) -> None:
        statements.run(connection, statements.MANY_PARTITIONS, days=days)
        load(site.sizes.jobs)(connection)

    return _drained(f"{days} days", fill, site.sizes.jobs, {}, site)


def _measure(what: str, title: str, variants: dict[str, Callable[[Site], Sample]]) -> Measure:
    name = f"tuning-{what}"
    first, *others = variants
    ratios = [Ratio(f"{other} ÷ {first}", Place(name, other), Place(name, first)) for other in others]
    return Measure(name, title, [Variant(label, run) for label, run in variants.items()], ratios)


MEASURES: Final[Sequence[Measure]] = (
    _measure("commit", "Drains, by how commits wait", {k: partial(_commit_drain, v) for k, v in _COMMITS.items()}),
    _measure(
        "submit", "8 clients' submits, by how commits wait", {k: partial(_submitted, v) for k, v in _COMMITS.items()}
    ),
    _measure("table", "Drains, by settings of jobs_live", {k: partial(_table, k, v) for k, v in _TABLES.items()}),
    _measure("payload", "Drains, by size of payloads", {f"{n:,} B": partial(_payload, n) for n in _SIZES}),
    _measure("priorities", "Drains, by priorities in use", {str(n): partial(_priorities, n) for n in (1, 4)}),
    _measure("partitions", "Drains, by days of history", {f"{n} days": partial(_partitions, n) for n in (0, 90, 365)}),
)
