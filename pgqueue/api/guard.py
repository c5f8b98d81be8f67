"""The guard: what every request passes before its handler, and every answer before it leaves."""

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Send
from litestar.types import Scope as AsgiScope

from pgqueue.api.access import EVERYBODY, Identity
from pgqueue.api.headers import add_strict_headers
from pgqueue.api.heads import with_head
from pgqueue.api.problems import Fault, Invalid, RepeatedParameter
from pgqueue.api.slashes import give_slashes_back

_IDENTITY: Final = "pgqueue_identity"


class Guard:
    """Middleware of the API's router: keys, scopes, rates, unknown and repeated parameters, strict headers."""

    def __init__(self, app: ASGIApp) -> None:
        """`app` is what comes next."""
        self.app = app

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Let a request in or raise what refuses it."""
        if scope["type"] != ScopeType.HTTP:
            await self.app(scope, receive, send)
            return

        async def send_strictly(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message["headers"])
                if scope["method"] == "OPTIONS":
                    # The framework names only the methods of one of the path's handlers.
                    headers = [(b"allow", _methods(scope).encode())]
                message["headers"] = add_strict_headers(scope, headers)
            await send(message)

        give_slashes_back(scope)
        opt = scope["route_handler"].opt
        needs = opt.get("needs")
        api = scope["litestar_app"].state.pgqueue
        if needs is not None and scope["method"] != "OPTIONS":
            identity: Identity = EVERYBODY
            if not api.config.trusted:
                identity = await api.access.identify(scope, checked_later=opt.get("checks_key", False))
            scope.setdefault("state", {})[_IDENTITY] = identity
            if opt.get("or_needs") not in identity.scopes:
                identity.require(needs)
        known = opt.get("query")
        if known is not None and scope["query_string"]:
            _check_query(scope["query_string"], known)
        await self.app(scope, receive, send_strictly)


def identity_of(scope: Any) -> Identity:
    """Return whose request it is."""
    identity: Identity = scope["state"][_IDENTITY]
    return identity


def _methods(scope: Any) -> str:
    routes = scope["litestar_app"].routes
    methods = {method for route in routes if route.path == scope["path_template"] for method in route.methods}
    return with_head(methods)


def _check_query(query: bytes, known: Mapping[str, bool]) -> None:
    """Raise what refuses a query. `known`: its parameters, and whether each may stand several times."""
    seen = set()
    for name, _ in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        # A filter that is misspelt and ignored would choose everything.
        if name not in known:
            raise Invalid(
                f"unknown query parameter {name!r}", faults=[Fault("unknown query parameter", parameter=name[:100])]
            )
        # The framework takes one of its values, and drops the others.
        if name in seen and not known[name]:
            raise RepeatedParameter(
                f"the query parameter {name!r} takes one value and stands more than once",
                faults=[Fault("must stand once", parameter=name)],
            )
        seen.add(name)
