"""OpenTelemetry: spans of producers and consumers, and what attempts are measured by."""

import subprocess
import sys
from typing import Any

import pytest

from tests.api.conftest import MakeLive, live

pytest.importorskip("opentelemetry.sdk", reason="the SDK of OpenTelemetry is not installed")

__all__ = ["live"]

# In a process of its own, since a provider is set once and for all that come after.
PROGRAM = """
import asyncio, sys
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pgqueue import App, Job, http

spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
metrics.set_meter_provider(MeterProvider([reader]))
app = App(sys.argv[1])

@app.task("sync", max_retries=0)
def sync(job: Job, fails: bool = False) -> str:
    if fails:
        raise ValueError("no")
    return f"{trace.get_current_span().get_span_context().span_id:016x}"

@app.task("async", queue="other")
async def asynchronous(job: Job) -> str:
    (child,) = await app.enqueue_many([{"job_type": "sync"}])
    return f"{trace.get_current_span().get_span_context().span_id:016x} {child.job_id}"

jobs = {"async": app.enqueue_sync("async"), "failing": app.enqueue_sync("sync", {"fails": True})}
with http.Client(sys.argv[2]) as client:
    jobs["rest"] = client.enqueue_sync("sync")
many = app.enqueue_many_sync([{"job_type": "sync"}] * 3)
asyncio.run(app.worker(maintenance=False, until_empty=True).run())

made = {f"{span.context.span_id:016x}": span for span in spans.get_finished_spans()}
runs = {span.attributes["messaging.message.id"]: span for span in made.values() if span.kind is trace.SpanKind.CONSUMER}
parent = lambda job: made[f"{runs[str(job)].parent.span_id:016x}"]
own, child = app.result_sync(jobs["async"]).split()
assert made[own] is runs[str(jobs["async"].job_id)]
assert made[own].name == "run async" and made[own].attributes["messaging.destination.name"] == "other"
assert parent(jobs["async"].job_id).name == "enqueue async"
assert parent(jobs["async"].job_id).kind is trace.SpanKind.PRODUCER
assert parent(jobs["async"].job_id).attributes["messaging.destination.name"] == "other"
assert parent(child).parent.span_id == made[own].context.span_id
assert parent(jobs["rest"].job_id).name == "enqueue sync"
assert len({id(parent(job.job_id)) for job in many}) == 1
assert parent(many[0].job_id).attributes["messaging.batch.message_count"] == 3
failing = runs[str(jobs["failing"].job_id)]
assert failing.status.status_code is trace.StatusCode.ERROR
assert [event.name for event in failing.events] == ["exception"]
assert len(runs) == 7

points = {
    (metric.name, point.attributes["pgqueue.job_type"], point.attributes.get("pgqueue.outcome")): point.count
    for resource in reader.get_metrics_data().resource_metrics
    for scope in resource.scope_metrics for metric in scope.metrics for point in metric.data.data_points
}
assert points == {
    ("messaging.process.duration", "sync", "completed"): 5,
    ("messaging.process.duration", "sync", "dead_letter"): 1,
    ("messaging.process.duration", "async", "completed"): 1,
    ("pgqueue.job.wait", "sync", None): 6,
    ("pgqueue.job.wait", "async", None): 1,
}, points
print("well")
"""


def test_producers_and_consumers_are_linked_and_attempts_measured(live: MakeLive, database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, database, live().url], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["well"]), done.stderr


def test_a_program_without_it_imports_none_of_it() -> None:
    program = "import sys, pgqueue, pgqueue.http, pgqueue.worker; print([m for m in sys.modules if 'opentel' in m])"
    done: Any = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
