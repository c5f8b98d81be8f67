"""Crowd: claims in databases full of jobs that a claim should not feel: behind, beside and ahead of what it takes."""

from collections.abc import Callable, Sequence
from typing import Final

from pgqueue.bench import statements
from pgqueue.bench.cycling import cycled
from pgqueue.bench.draining import load
from pgqueue.bench.figures import Measure, Place, Ratio, Variant
from pgqueue.bench.site import Sizes
from pgqueue.connections import SyncConnection

_ALONE: Final = "alone"

_Prepare = Callable[[SyncConnection, Sizes], None]


def _nothing(connection: SyncConnection, sizes: Sizes) -> None:
    return None


def _backlog(connection: SyncConnection, sizes: Sizes) -> None:
    load(sizes.backlog)(connection)


def _history(connection: SyncConnection, sizes: Sizes) -> None:
    statements.run(connection, statements.INSERT_COMPLETED, jobs=sizes.finished)


def _scheduled(connection: SyncConnection, sizes: Sizes) -> None:
    statements.run(connection, statements.INSERT_SCHEDULED, jobs=sizes.backlog)


def _foreign(connection: SyncConnection, sizes: Sizes) -> None:
    load(sizes.backlog, "foreign")(connection)


def _paused(connection: SyncConnection, sizes: Sizes) -> None:
    load(sizes.backlog, "answer")(connection)
    statements.run(connection, statements.PAUSE_TYPE, job_type="answer")


def _ordered(connection: SyncConnection, sizes: Sizes) -> None:
    statements.run(connection, statements.INSERT_KEYED, jobs=sizes.backlog)


def _queues(connection: SyncConnection, sizes: Sizes) -> None:
    statements.run(connection, statements.INSERT_QUEUES, jobs=sizes.backlog, queues=1000)


def _variant(name: str, prepare: _Prepare) -> Variant:
    return Variant(name, lambda site: cycled(site, name, lambda connection: prepare(connection, site.sizes)))


def _measure(
    name: str, title: str, variant: str, prepare: _Prepare, beside: str = _ALONE, with_: _Prepare = _nothing
) -> Measure:
    ratios = [
        Ratio(f"{variant} ÷ {beside}", Place(name, variant), Place(name, beside), at_least=0.9),
        Ratio(f"server CPU, {variant} ÷ {beside}", Place(name, variant, "server_us"), Place(name, beside, "server_us")),
    ]
    return Measure(name, title, [_variant(beside, with_), _variant(variant, prepare)], ratios)


MEASURES: Final[Sequence[Measure]] = (
    _measure("backlog", "Claims with a deep backlog", "many waiting", _backlog),
    _measure("history", "Claims with a big history", "many finished", _history),
    _measure("scheduled", "Claims with many scheduled jobs", "many scheduled", _scheduled),
    _measure("foreign", "Claims behind many jobs of a type without a task", "foreign type ahead", _foreign),
    _measure("paused", "Claims behind many jobs of a paused type", "paused type ahead", _paused),
    _measure("ordered", "Claims behind many jobs of one ordering key", "one key ahead", _ordered),
    # As many jobs on either side, so that nothing but the number of queues differs.
    _measure("queues", "Claims from 1,000 queues", "1,000 queues", _queues, "one queue", _backlog),
)
