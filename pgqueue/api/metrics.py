"""/metrics: what Prometheus scrapes."""

from typing import Final
from weakref import WeakKeyDictionary

from litestar.handlers import HTTPRouteHandler
from litestar.types import Receive, Scope, Send

from pgqueue import calls
from pgqueue.api.core import Api
from pgqueue.api.exchange import Answer, AnyRequest, api_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.metrics import MetricsPage

_pages: Final[WeakKeyDictionary[Api, MetricsPage]] = WeakKeyDictionary()


class _Text(Answer):
    """An answer that is no JSON."""

    __slots__ = ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        sent = [(name.lower().encode(), value.encode("latin-1")) for name, value in (self.headers or {}).items()]
        sent.append((b"content-length", b"%d" % len(self.body)))
        await send({"type": "http.response.start", "status": self.status, "headers": sent})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


@operation(
    HttpMethod.GET,
    "/metrics",
    needs="read",
    gives={200: Gives(None, "The metrics, in Prometheus's text or OpenMetrics.", media_type="text/plain")},
    tag="metrics",
)
async def get_metrics(request: AnyRequest) -> Answer:
    """Read all metrics. One query of the database answers all scrapes of five seconds."""
    api = api_of(request)
    page = _pages.get(api)
    if page is None:
        page = _pages[api] = MetricsPage(lambda: api.call(calls.METRICS))
    body, content_type = await page.render(request.headers.get("accept"))
    return _Text(body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})


ROUTES: Final[list[HTTPRouteHandler]] = [get_metrics]
