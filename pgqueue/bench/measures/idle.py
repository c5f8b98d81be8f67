"""Idle: what a worker without work asks of the server and of its own processor."""

import time
from typing import Final

from pgqueue.bench.children import workers
from pgqueue.bench.figures import Measure, Sample, Variant
from pgqueue.bench.machine import Meter
from pgqueue.bench.site import Site

#: Until a worker sleeps, its sweeps are quiet, and its sessions tell their commits about once a second.
_SETTLE: Final = 10.0


def _worker(site: Site) -> Sample:
    with site.scratch.copy() as database, workers(database) as pids:
        time.sleep(_SETTLE)
        before, began = site.scratch.commits(database), time.monotonic()
        meter = Meter(site.scratch.admin, pids)
        # Long, since processor time is told in hundredths of a second.
        time.sleep(10 * site.sizes.seconds)
        figures = meter.percent()
        commits = site.scratch.commits(database) - before
        figures["statements_per_s"] = commits / (time.monotonic() - began)
    return Sample(figures)


MEASURE: Final = Measure("idle", "A worker without work", [Variant("1 worker", _worker)], headline="statements_per_s")
