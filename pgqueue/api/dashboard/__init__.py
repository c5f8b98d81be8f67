"""The dashboard at /dashboard: pages made on the server, forms for actions, hints of changes as server-sent events."""

from typing import Any, Final

from litestar import Router, get

from pgqueue.api.dashboard import actions, bulk, live, pages, session, shell

_PAGES: Final[list[Any]] = [*pages.ROUTES, *session.ROUTES, *live.ROUTES]
_ACTIONS: Final[list[Any]] = [*actions.ROUTES, *bulk.ROUTES]
_paths: Final = {path for handler in (*_PAGES, *_ACTIONS) for path in handler.paths}


def _nowhere() -> list[str]:
    """Return the addresses at which there is no page: the router looks no further than the last part that it knows."""
    posted = {path for handler in (*_ACTIONS, session.logout) for path in handler.paths}
    return [*posted, *(f"{path.rstrip('/')}/{{_:path}}" for path in _paths - {"/jobs"})]


#: Found by pgqueue.api.plugin.
ROUTES: Final = [
    Router(
        "/dashboard",
        route_handlers=[*_PAGES, *_ACTIONS, *shell.ROUTES, get(_nowhere())(shell.no_such_page)],
        exception_handlers=shell.EXCEPTION_HANDLERS,
        include_in_schema=False,
    )
]
