"""Metrics for Prometheus: one query of the database, shared by all scrapes of a few seconds.

`MetricsPage` answers scrapes in an event loop, `PgqueueCollector` those of a prometheus_client registry, and `serve`
opens a port for them. All processes show the same numbers, so take `max` over instances, never `sum`.
"""

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from pgqueue.calls import Sample
from pgqueue.errors import PgqueueError
from pgqueue.log import logger

_log: Final = logger("pgqueue.metrics")
#: Seconds for which one query answers scrapes.
MAX_AGE: Final = 5.0
_REMIND: Final = 60.0
_HELP: Final = {
    "pgqueue_jobs": "Jobs by status; completed and cancelled ones by the statistics of their tables.",
    "pgqueue_dead_letters": "Dead letters; counting ends at 10,001.",
    "pgqueue_queue_depth": "Pending jobs.",
    "pgqueue_queue_oldest_age_seconds": "How long the oldest pending job has waited; 0 without one.",
    "pgqueue_queue_paused": "1 while a queue is paused.",
    "pgqueue_queue_workers": "Live workers that serve a queue.",
    "pgqueue_queue_types_without_worker": "Job types that wait in a queue and that no worker which serves it takes.",
    "pgqueue_workers": "Worker processes by status; lost ones gave no sign of life for a minute.",
    "pgqueue_worker_slots": "Jobs that live workers can run at once.",
    "pgqueue_worker_utilization": "The part of the last seconds in which slots were busy.",
    "pgqueue_jobs_submitted_total": "Jobs that arrived, through whichever door.",
    "pgqueue_jobs_processed_total": "Attempts that ended, by outcome.",
    "pgqueue_jobs_failed_total": "Attempts that failed: those to be retried, and those that ended as dead letters.",
    "pgqueue_jobs_lost_total": "Attempts that ended after their lease was lost.",
    "pgqueue_job_duration_seconds": "Run time of attempts.",
    "pgqueue_job_wait_seconds": "Time from when a job could start to its first attempt.",
    "pgqueue_table_bytes": "Size of tables with their indexes.",
    "pgqueue_table_dead_rows": "Dead rows that vacuum has not removed.",
    "pgqueue_sweep_age_seconds": "Time since a sweep last ran.",
    "pgqueue_sweep_step_failures": "Times in a row that a step of the sweep failed.",
    "pgqueue_retention_behind_seconds": "For how long finished jobs have been past their retention; 0: none is.",
    "pgqueue_sweep_jobs_total": "Jobs that a step of the sweep moved on.",
    "pgqueue_alerts": "Alerts that fire, as the sweep evaluates them.",
    "pgqueue_oldest_transaction_seconds": "Age of the oldest open transaction, which keeps dead rows.",
    "pgqueue_notify_queue_usage_ratio": "How full PostgreSQL's queue of notices is.",
    "pgqueue_schema_info": "Versions of the schema and of the server.",
}
_SUFFIXES: Final = ("_bucket", "_sum")


@dataclass
class Snapshot:
    """What the database said, or why it said nothing, and how long that took in seconds."""

    samples: Sequence[Sample] = ()
    fault: str | None = None
    seconds: float = 0.0
    taken_at: float = field(default_factory=time.monotonic)

    @property
    def fresh(self) -> bool:
        """Whether it may answer a scrape."""
        return time.monotonic() - self.taken_at < MAX_AGE

    def collect(self) -> Iterable[Metric]:
        """Return the families; of a database that did not answer only that it is down."""
        up = Metric("pgqueue_collector_up", "Whether the database answered.", "gauge")
        up.add_sample(up.name, {}, float(self.fault is None))
        took = Metric("pgqueue_collector_duration_seconds", "How long the database took to answer.", "gauge")
        took.add_sample(took.name, {}, self.seconds)
        return [up, took, *families(self.samples)]


def families(samples: Iterable[Sample]) -> Iterator[Metric]:
    """Give the samples of each metric together, as the formats ask; buckets in order, with their count."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        name = sample.name
        if sample.kind == "histogram":
            name = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)
        groups.setdefault((name, sample.kind), []).append(sample)
    for (name, kind), members in groups.items():
        metric = Metric(name.removesuffix("_total") if kind == "counter" else name, _HELP.get(name, name), kind)
        if kind == "histogram":
            _add_histograms(metric, members)
        else:
            for sample in members:
                metric.add_sample(sample.name, sample.labels, sample.value)
        yield metric


def _add_histograms(metric: Metric, members: Iterable[Sample]) -> None:
    series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
    sums: dict[frozenset[tuple[str, str]], float] = {}
    for sample in members:
        labels = dict(sample.labels)
        upto = labels.pop("le", None)
        key = frozenset(labels.items())
        if upto is None:
            sums[key] = sample.value
        else:
            series.setdefault(key, []).append((float(upto), sample.value))
    for key, buckets in series.items():
        labels = dict(sorted(key))
        buckets.sort()
        for limit, below in buckets:
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": _limit(limit)}, below)
        metric.add_sample(f"{metric.name}_count", labels, buckets[-1][1])
        metric.add_sample(f"{metric.name}_sum", labels, sums.get(key, 0.0))


def _limit(seconds: float) -> str:
    return "+Inf" if math.isinf(seconds) else str(float(seconds))


class _Faults:
    """Tells of a fault once, and again when it lasts."""

    def __init__(self) -> None:
        self._told_at = 0.0

    def tell(self, exc: Exception) -> None:
        if not self._told_at or time.monotonic() - self._told_at > _REMIND:
            self._told_at = time.monotonic()
            _log.warning("no metrics: the database did not answer", error=str(exc))


def encode(snapshot: Snapshot, accept: str | None = None) -> tuple[bytes, str]:
    """Return a page and its content type: OpenMetrics for who accepts it, else Prometheus's text."""
    encoder, content_type = choose_encoder(accept or "")
    page: bytes = encoder(snapshot)
    return page, content_type


class MetricsPage:
    """Answers scrapes in an event loop; `fetch` is `client.metrics` of the client whose queue it shows."""

    def __init__(self, fetch: Callable[[], Awaitable[Sequence[Sample]]]) -> None:
        """Ask nothing yet."""
        self._fetch = fetch
        self._snapshot: Snapshot | None = None
        self._asking = asyncio.Lock()
        self._faults = _Faults()

    async def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """Return the page and its content type. Does not raise: pgqueue_collector_up says whether it knows anything."""
        return encode(await self.snapshot(), accept)

    async def snapshot(self) -> Snapshot:
        """Return a snapshot of the last few seconds; whoever asks meanwhile waits for the same one."""
        async with self._asking:
            if self._snapshot is None or not self._snapshot.fresh:
                begun = time.monotonic()
                try:
                    taken = Snapshot(await self._fetch())
                except PgqueueError as exc:
                    self._faults.tell(exc)
                    taken = Snapshot(fault=str(exc))
                taken.seconds = time.monotonic() - begun
                self._snapshot = taken
            return self._snapshot


class PgqueueCollector(Collector):
    """A collector for a registry of prometheus_client; `fetch` is `client.metrics_sync`."""

    def __init__(self, fetch: Callable[[], Sequence[Sample]]) -> None:
        """Ask nothing yet."""
        self._fetch = fetch
        self._snapshot: Snapshot | None = None
        self._asking = threading.Lock()
        self._faults = _Faults()

    def collect(self) -> Iterable[Metric]:
        """Return the families of a snapshot of the last few seconds."""
        with self._asking:
            if self._snapshot is None or not self._snapshot.fresh:
                begun = time.monotonic()
                try:
                    taken = Snapshot(self._fetch())
                except PgqueueError as exc:
                    self._faults.tell(exc)
                    taken = Snapshot(fault=str(exc))
                taken.seconds = time.monotonic() - begun
                self._snapshot = taken
            return self._snapshot.collect()

    def describe(self) -> Iterable[Metric]:
        """Name nothing beforehand, so that registering asks the database nothing."""
        return ()


def serve(fetch: Callable[[], Sequence[Sample]], host: str = "127.0.0.1", port: int = 9464) -> tuple[Any, int]:
    """Serve /metrics in threads of their own; return the server (`shutdown()` ends it) and its port."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(PgqueueCollector(fetch))
    server, _ = start_http_server(port, host, registry)
    return server, server.server_port
