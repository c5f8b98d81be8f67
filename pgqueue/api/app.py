"""The API as an app of its own."""

from contextlib import suppress
from typing import Final

from litestar import Litestar, Response, Router, get
from litestar.config.app import AppConfig
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Server
from litestar.plugins import InitPlugin
from litestar.response import Redirect

from pgqueue import __version__
from pgqueue.api.config import ApiConfig
from pgqueue.api.docs import JsonDocument, OfflineDocument, style_hash
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.heads import ANSWERS_HEAD
from pgqueue.api.paths import path_below, root_of
from pgqueue.api.plugin import PgqueuePlugin
from pgqueue.api.problems import EXCEPTION_HANDLERS
from pgqueue.client import Client
from pgqueue.errors import PgqueueError

_DESCRIPTION: Final = (
    "A job queue that is PostgreSQL. Errors are application/problem+json (RFC 9457) with a stable type; times are in "
    "UTC; lists page by cursor; every answer has an X-Request-ID. With a key: Authorization: Bearer KEY."
)


def create_app(client: Client | None = None, config: ApiConfig | None = None) -> Litestar:
    """Return an app with the REST API, its document at /schema, and the dashboard if there is one."""
    plugin = PgqueuePlugin(client, config)
    return Litestar(
        route_handlers=[_root],
        plugins=[plugin, _Document()],
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=OpenAPIConfig(
            title="pgqueue",
            version=__version__,
            description=_DESCRIPTION,
            openapi_router=Router(
                "/schema",
                route_handlers=[],
                include_in_schema=False,
                before_request=_look,
                dto=None,
                return_dto=None,
                opt={ANSWERS_HEAD: True},
            ),
            servers=[Server(url="/")],
            render_plugins=[OfflineDocument(), JsonDocument()],
        ),
        logging_config=None,
    )


async def _look(request: AnyRequest) -> None:
    with suppress(PgqueueError):
        await api_of(request).access.open_to_all()


@get("/", include_in_schema=False, sync_to_thread=False, opt={ANSWERS_HEAD: True})
def _root(request: AnyRequest) -> Response[None] | Redirect:
    """Lead people to the page that there is."""
    has_dashboard = any(route.path.startswith("/dashboard") for route in request.app.routes)
    page = "dashboard" if has_dashboard else "schema"
    root = root_of(request.scope)
    # Below a root, its own address may come without the slash at which a relative one would begin.
    return Redirect(f"{root}/{page}" if root else page, status_code=307)


class _Document(InitPlugin):
    """Lets the document's page have its own style, and nothing else."""

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Set its policy."""
        policy = (
            f"default-src 'none'; style-src {style_hash()}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
        )

        async def add_policy(message: dict[str, object], scope: dict[str, object]) -> None:
            if message["type"] == "http.response.start" and path_below(scope).rstrip("/") == "/schema":
                headers = list(message["headers"])  # type: ignore[call-overload]
                message["headers"] = [*headers, (b"content-security-policy", policy.encode())]

        app_config.before_send.append(add_policy)  # type: ignore[arg-type]
        return app_config
