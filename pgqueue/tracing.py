"""OpenTelemetry, where the program around has it: attempts have the trace context of whoever enqueued their job.

Where the program has set up a tracer provider, an enqueue is a span of kind producer and each attempt a child of it, of
kind consumer; where it has set up a meter provider, attempts are counted by their run times and waits. Nothing is
imported that the program has not imported, and without a provider nothing is made.
"""

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

_NAME: Final = "pgqueue"
_SYSTEM: Final = {"messaging.system": "pgqueue"}


def current() -> dict[str, str] | None:
    """Return the present trace context as it is stored, None without one."""
    # What nobody has imported has no span; looking costs nothing.
    if "opentelemetry.trace" not in sys.modules or (api := _api()) is None:
        return None
    carrier: dict[str, str] = {}
    api[1].inject(carrier)
    return carrier or None


def created(job_type: str, queue: str | None = None, jobs: int = 1) -> dict[str, str] | None:
    """Return the trace context that jobs store: of a new span of kind producer, else the present one, if any."""
    tracer = _tracer()
    if tracer is None:
        return current()
    from opentelemetry.trace import SpanKind

    attributes: dict[str, str | int] = {
        **_SYSTEM,
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "create",
        "messaging.destination.name": queue or "default",
        "pgqueue.job_type": job_type,
    }
    if jobs > 1:
        attributes["messaging.batch.message_count"] = jobs
    with tracer.start_as_current_span(f"enqueue {job_type}", kind=SpanKind.PRODUCER, attributes=attributes):
        return current()


def traced() -> bool:
    """Say whether attempts are spans."""
    return "opentelemetry.trace" in sys.modules and _tracer() is not None


@contextmanager
def running(stored: str | None, job_id: bytes, job_type: str, queue: str, attempt: int) -> Iterator[None]:
    """Within the block the trace context is the one that was stored with a job, and there is a span of the attempt."""
    with _restored(stored):
        tracer = _tracer()
        if tracer is None:
            yield
            return
        from opentelemetry.trace import SpanKind

        attributes = {
            **_SYSTEM,
            "messaging.operation.name": "run",
            "messaging.operation.type": "process",
            "messaging.destination.name": queue,
            "messaging.message.id": str(UUID(bytes=job_id)),
            "pgqueue.job_type": job_type,
            "pgqueue.attempt": attempt,
        }
        with tracer.start_as_current_span(f"run {job_type}", kind=SpanKind.CONSUMER, attributes=attributes):
            yield


class Meters:
    """Histograms of attempts."""

    def __init__(self) -> None:
        """Make the instruments, which lead nowhere until the program sets up a meter provider."""
        self._made: tuple[Any, Any] | None = None

    @property
    def wanted(self) -> bool:
        """Whether the program has imported what could read them."""
        return "opentelemetry.metrics" in sys.modules

    def attempt(self, queue: str, job_type: str, outcome: str, seconds: float, wait: float | None) -> None:
        """Record an attempt that ended after `seconds` of work; `wait` is None for all but the first of a job."""
        if self._made is None:
            from opentelemetry import metrics

            meter = metrics.get_meter(_NAME)
            self._made = (
                meter.create_histogram("messaging.process.duration", "s", "Run times of attempts."),
                meter.create_histogram("pgqueue.job.wait", "s", "Times from when a job could start until it did."),
            )
        attributes = {**_SYSTEM, "messaging.destination.name": queue, "pgqueue.job_type": job_type}
        self._made[0].record(seconds, {**attributes, "pgqueue.outcome": outcome})
        if wait is not None:
            self._made[1].record(wait, attributes)


@contextmanager
def _restored(stored: str | None) -> Iterator[None]:
    if stored is None or (api := _api()) is None:
        yield
        return
    context, propagator = api
    token = context.attach(propagator.extract(_carrier(stored), context.Context()))
    try:
        yield
    finally:
        context.detach(token)


def _carrier(stored: str) -> dict[str, str]:
    """Return what may be a trace context of any producer as the propagator wants it."""
    try:
        given = json.loads(stored)
    except (ValueError, RecursionError):
        return {}
    pairs = given.items() if isinstance(given, dict) else ()
    return {key.lower(): value for key, value in pairs if isinstance(value, str)}


def _tracer() -> Any:
    """Return what makes spans, None where no provider was set up."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider.get_tracer(_NAME)


@functools.cache
def _api() -> tuple[Any, Any] | None:
    """Return OpenTelemetry's context module and its W3C propagator, None without them."""
    try:
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return None
    return context, TraceContextTextMapPropagator()
