"""The dashboard at /dashboard: pages made on the server, forms for actions, hints of changes as server-sent events."""

from typing import Final

from litestar import Router

from pgqueue.api.dashboard import actions, bulk, live, pages, session, shell

#: Found by pgqueue.api.plugin.
ROUTES: Final = [
    Router(
        "/dashboard",
        route_handlers=[
            *pages.ROUTES,
            *actions.ROUTES,
            *bulk.ROUTES,
            *session.ROUTES,
            *live.ROUTES,
            *shell.ROUTES,
        ],
        exception_handlers=shell.EXCEPTION_HANDLERS,
        include_in_schema=False,
    )
]
