"""Names with slashes. A path has them as %2F, which servers decode before an app sees it, so that they would divide."""

import re
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import unquote

from litestar.types import ASGIApp, Receive, Scope, Send

_KEPT: Final = "pgqueue_slashes_kept"
_SLASH: Final = re.compile("%2f", re.IGNORECASE)


class Slashes:
    """Stands before an app's routing: paths below `prefixes` keep the slashes of names as %2F, and so % as %25."""

    def __init__(self, app: ASGIApp, prefixes: Collection[str]) -> None:
        """`app` is what comes next."""
        self.app = app
        self._prefixes = tuple(prefixes)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Write the path so that it is divided where the client divided it."""
        raw = scope.get("raw_path")
        if scope["type"] == "http" and raw and b"%2" in raw:
            path = raw.partition(b"?")[0].decode("latin-1")
            # An app around this one may have changed the path, which then holds.
            if _SLASH.search(path) and unquote(path) == scope["path"]:
                kept = "%2F".join(unquote(part).replace("%", "%25") for part in _SLASH.split(path))
                if kept.removeprefix(scope.get("root_path", "")).startswith(self._prefixes):
                    scope["path"] = kept
                    scope[_KEPT] = True
        await self.app(scope, receive, send)


def slashes_kept(scope: Any) -> bool:
    """Say whether a request's path has escapes."""
    return _KEPT in scope


def give_slashes_back(scope: Scope) -> None:
    """Let handlers see names as they are."""
    if slashes_kept(scope):
        # The router shares the parameters of a path among requests.
        scope["path_params"] = {
            name: unquote(value) if isinstance(value, str) else value for name, value in scope["path_params"].items()
        }
