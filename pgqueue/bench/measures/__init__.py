"""The measures, in the order in which they are taken."""

from collections.abc import Sequence
from typing import Final

from pgqueue.bench.figures import Measure
from pgqueue.bench.measures import (
    bulk,
    ceiling,
    crowd,
    drain,
    growth,
    held,
    idle,
    notify,
    pickup,
    rest,
    scale,
    submit,
    tuning,
    wal,
)

ALL: Final[Sequence[Measure]] = (
    ceiling.MEASURE,
    submit.MEASURE,
    rest.MEASURE,
    bulk.MEASURE,
    drain.MEASURE,
    scale.MEASURE,
    pickup.MEASURE,
    held.MEASURE,
    notify.MEASURE,
    *crowd.MEASURES,
    wal.MEASURE,
    idle.MEASURE,
)

#: Taken only when they are named.
LONG: Final[Sequence[Measure]] = (*growth.MEASURES, *tuning.MEASURES)
