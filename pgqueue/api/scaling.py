"""/admin/autoscale: how many workers there should be."""

from typing import Annotated, Final

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import QueryParameter
from msgspec import Meta

from pgqueue import calls
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.problems import Fault, Invalid
from pgqueue.api.values import PLAIN
from pgqueue.autoscale import DEFAULT, Policy, report


class Load(msgspec.Struct, frozen=True):
    """What was measured."""

    pending: int
    workers: int
    slots: int
    running: int
    utilization: float
    processing_seconds: float
    soft_limit: int


class Scaling(msgspec.Struct, frozen=True):
    """`value` is the number of workers that there should be next; `load` is what it was made of."""

    value: int
    direction: str
    reason: str
    load: Load


@operation(
    HttpMethod.GET,
    "/admin/autoscale",
    needs="read",
    gives={200: Gives(Scaling, "How many workers there should be.")},
    tag="workers",
)
async def get_autoscale(
    request: AnyRequest,
    queues: Annotated[
        list[Annotated[str, Meta(pattern=PLAIN)]] | None,
        QueryParameter(
            name="queue",
            description="Only these; without it all.",
            schema_extra={"items": {"type": "string", "pattern": PLAIN}},
        ),
    ] = None,
    minimum: Annotated[
        int | None,
        QueryParameter(name="min", ge=0, le=1_000_000, description="Workers at least: 2, or max where that is less."),
    ] = None,
    maximum: Annotated[
        int | None,
        QueryParameter(name="max", ge=0, le=1_000_000, description="Workers at most: 100, or min where that is more."),
    ] = None,
) -> Answer:
    """See how many workers there should be next. No cooldown is kept: KEDA and HPA have theirs."""
    least = minimum if minimum is not None else min(DEFAULT.minimum, DEFAULT.maximum if maximum is None else maximum)
    most = maximum if maximum is not None else max(DEFAULT.maximum, least)
    if least > most:
        rule = f"must not be more than max, {most}"
        raise Invalid(f"min {rule}", faults=[Fault(rule, parameter="min")])
    load = await api_of(request).call(calls.WORKER_LOAD, queues=queues)
    said = report(load, Policy(minimum=least, maximum=most))
    return answer(Scaling(said["value"], said["direction"], said["reason"], Load(**said["load"])))


ROUTES: Final[list[HTTPRouteHandler]] = [get_autoscale]
