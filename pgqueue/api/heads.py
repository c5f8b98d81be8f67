"""HEAD, which load balancers and monitors send: what GET would answer, without its body."""

import re
from collections.abc import Iterable
from typing import Any, Final

from litestar.routes import BaseRoute, HTTPRoute
from litestar.types import ASGIApp, Message, Receive, Send
from litestar.utils import normalize_path

from pgqueue.api.paths import path_below

#: In the `opt` of routes: their GET answers HEAD too. Other routes of an app around this one are its own affair.
ANSWERS_HEAD: Final = "pgqueue_answers_head"


class Heads:
    """Stands before an app's routing: to what comes next, HEAD is GET, so that nothing else need know of it."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        """`app` is what comes next; `routes`: all that the app has."""
        self.app = app
        found = [route for route in routes if isinstance(route, HTTPRoute)]
        self._paths: Final = _any_of(route for route in found if _answers_head(route))
        self._others: Final = _any_of(route for route in found if "HEAD" in route.methods)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Answer HEAD with the status and headers of GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or not self._takes(scope):
            await self.app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                ended = True
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        async def receive_until_sent() -> Any:
            # A stream ends when its client has hung up.
            return {"type": "http.disconnect"} if ended else await receive()

        # A copy, since the server needs to know that it was HEAD.
        get: Any = {**scope, "method": "GET"}
        await self.app(get, receive_until_sent, send_head)

    def _takes(self, scope: Any) -> bool:
        path = normalize_path(path_below(scope))
        return self._paths.fullmatch(path) is not None and self._others.fullmatch(path) is None


def with_head(methods: Iterable[str]) -> str:
    """Return the value of an Allow header: methods, and HEAD where there is GET."""
    named = set(methods)
    return ", ".join(sorted(named | {"HEAD"} if "GET" in named else named))


def _answers_head(route: HTTPRoute) -> bool:
    gets = any("GET" in one.http_methods and one.opt.get(ANSWERS_HEAD) for one in route.route_handlers)
    return gets and "HEAD" not in route.methods


def _any_of(routes: Iterable[HTTPRoute]) -> re.Pattern[str]:
    return re.compile("|".join(_pattern(route) for route in routes) or "(?!)")


def _pattern(route: HTTPRoute) -> str:
    parts = [
        re.escape(part) if isinstance(part, str) else ".+" if part.full.endswith(":path") else "[^/]+"
        for part in route.path_components
    ]
    return "/" + "/".join(parts)
