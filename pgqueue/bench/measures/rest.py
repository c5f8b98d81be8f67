"""REST: single jobs over HTTP, beside the same INSERTs through one pool."""

from typing import Final

from pgqueue.bench.children import api
from pgqueue.bench.figures import Measure, Place, Ratio, Sample, Variant
from pgqueue.bench.measures.submit import submitted
from pgqueue.bench.site import Site

_THREADS: Final = 8


def _pooled(site: Site) -> Sample:
    with site.scratch.copy() as database:
        return submitted(database, site, 1, "insert_pooled", threads=_THREADS)


def _posted(site: Site) -> Sample:
    with site.scratch.copy() as database, api(database) as (_, port):
        return submitted(database, site, 1, "post", port=port, threads=_THREADS)


MEASURE: Final = Measure(
    "rest",
    "8 threads of one process submitting single jobs",
    [Variant("one pool", _pooled), Variant("REST", _posted)],
    [Ratio("REST ÷ one pool", Place("rest", "REST"), Place("rest", "one pool"), 0.5)],
)
