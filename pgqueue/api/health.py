"""/health: whether the process lives, and whether it can do its work, with the reasons."""

import asyncio
from typing import Final

from litestar.handlers import HTTPRouteHandler

from pgqueue import calls_rest, schema
from pgqueue.api.core import Api
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.values_operate import Check, Health, Live
from pgqueue.errors import PgqueueError

_TAG: Final = "health"
_PATIENCE: Final = 2.0
#: Each step of the sweep notes at least every 5 s that it ran.
_FRESH: Final = 8.0


@operation(HttpMethod.GET, "/health/live", needs=None, gives={200: Gives(Live, "The process runs.")}, tag=_TAG)
async def get_live(request: AnyRequest) -> Answer:
    """See whether the process lives. It asks nobody."""
    return answer(Live())


@operation(
    HttpMethod.GET,
    "/health/ready",
    needs=None,
    gives={200: Gives(Health, "Ready."), 503: Gives(Health, "Not ready; `checks` says why.")},
    tag=_TAG,
)
async def get_ready(request: AnyRequest) -> Answer:
    """See whether the API can do its work: database, schema, listener, sweeper."""
    checks = await ready_checks(api_of(request))
    ready = all(check.ok for check in checks.values())
    headers = {} if ready else {"Retry-After": "1"}
    return answer(Health("ready" if ready else "not_ready", checks), 200 if ready else 503, headers)


async def ready_checks(api: Api) -> dict[str, Check]:
    """Return what the API needs, and whether it has it."""
    hears = _listener_check(api)
    try:
        async with asyncio.timeout(_PATIENCE):
            found = await api.call(calls_rest.HEALTH)
    except TimeoutError:
        return {"database": Check(False, f"it did not answer within {_PATIENCE:g} s"), "listener": hears}
    except PgqueueError as exc:
        return {"database": Check(False, exc.title), "listener": hears}
    wanted = schema.head()
    version = found["version"]
    return {
        "database": Check(not found["read_only"], "it takes no writes" if found["read_only"] else "it answers"),
        "schema": Check(version == wanted, f"it is at {version}; this package needs {wanted}"),
        "listener": hears,
        "sweeper": _sweeper_check(api, found),
    }


def _listener_check(api: Api) -> Check:
    hub = api.hub
    if hub.deaf is not None:
        # What polls serves everything, if later.
        return Check(True, f"it polls: {hub.deaf}")
    return Check(hub.hears, "it hears notices" if hub.hears else "it is not connected")


def _sweeper_check(api: Api, found: dict[str, object]) -> Check:
    faulty = [service.name for service in api.services if service.fault is not None]
    if faulty:
        return Check(False, f"maintenance of this process fails: {', '.join(faulty)}")
    failing = found["failing"]
    if isinstance(failing, dict) and failing:
        return Check(False, f"steps of the sweep fail: {', '.join(sorted(failing))}")
    ago = found["swept_seconds_ago"]
    if not isinstance(ago, (int, float)):
        return Check(False, "no sweep has ever run; start a worker or a scheduler")
    limit = max(_FRESH, 3 * api.settings.sweep_interval + 5)
    return Check(ago <= limit, f"the last sweep was {ago:.1f} s ago")


ROUTES: Final[list[HTTPRouteHandler]] = [get_live, get_ready]
