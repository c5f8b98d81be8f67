"""PgqueuePlugin: pgqueue in a Litestar app of your own. Routes, dependency injection, lifespan and commands."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from click import Group
from litestar import Litestar, Router
from litestar.config.app import AppConfig
from litestar.di import Provide
from litestar.plugins import CLIPlugin, InitPlugin

from pgqueue.api import dead_letters, events, health, jobs, keys, leases, queues, schedules, workers
from pgqueue.api.config import ApiConfig
from pgqueue.api.core import Api
from pgqueue.api.guard import Guard
from pgqueue.api.heads import ANSWERS_HEAD, Heads
from pgqueue.api.openapi import complete_document
from pgqueue.api.problems import EXCEPTION_HANDLERS
from pgqueue.api.slashes import Slashes
from pgqueue.client import Client

_MODULES: Final = (jobs, events, dead_letters, queues, schedules, workers, leases, health, keys)
#: Modules that come with more of pgqueue: each has ROUTES, a list of Litestar's route handlers or routers.
_OPTIONAL: Final = ("pgqueue.api.metrics", "pgqueue.api.scaling", "pgqueue.api.dashboard")


async def _as_it_is(response: Any) -> Any:
    return response


class PgqueuePlugin(InitPlugin, CLIPlugin):
    """Adds the REST API below `config.path`, the dependency `queue` (a Client), and the commands `litestar queue …`.

    Litestar([...], plugins=[PgqueuePlugin(App("postgresql://…"), ApiConfig(path="/queue"))])
    """

    def __init__(self, client: Client | None = None, config: ApiConfig | None = None) -> None:
        """`client`: an App or Client that says which database it is; without one, PGQUEUE_DSN does."""
        self.client = client or Client()
        self.config = config or ApiConfig()
        self.api = Api(self.client, self.config)

    def on_app_init(self, app_config: AppConfig) -> AppConfig:
        """Add what this plugin adds."""
        app_config.state["pgqueue"] = self.api
        app_config.route_handlers.append(self.router())
        app_config.dependencies.setdefault("queue", Provide(self._provide_client, sync_to_thread=False))
        app_config.signature_types.append(Client)
        app_config.lifespan.append(self._lifespan)
        return app_config

    def on_cli_init(self, cli: Group) -> None:
        """Add the commands of pgqueue as `litestar queue …`."""
        # Found by name, since the command line imports this package.
        cli.add_command(import_module("pgqueue.cli").root, "queue")

    def router(self) -> Router:
        """Return the routes."""
        handlers: list[Any] = [handler for module in _MODULES for handler in module.ROUTES]
        for name in _OPTIONAL:
            if find_spec(name) is not None:
                handlers += getattr(import_module(name), "ROUTES", [])
        return Router(
            self.config.path or "/",
            route_handlers=handlers,
            middleware=[Guard],
            opt={ANSWERS_HEAD: True},
            # Hooks of the app around expect Litestar's own responses.
            after_request=_as_it_is,
            exception_handlers=EXCEPTION_HANDLERS,
            request_max_body_size=self.config.max_body,
        )

    def _named(self) -> set[str]:
        """Return what stands before names in the paths of this plugin's routes."""
        base = "/".join(["", *self.config.path.strip("/").split("/")]).rstrip("/")
        paths = [path for module in _MODULES for handler in module.ROUTES for path in handler.paths]
        return {base + path.partition("{")[0] for path in paths if ":str}" in path}

    def _provide_client(self) -> Client:
        return self.client

    @asynccontextmanager
    async def _lifespan(self, app: Litestar) -> AsyncIterator[None]:
        complete_document(app)
        routing = app.asgi_handler
        # Middleware of an app comes after its routing.
        app.asgi_handler = Slashes(Heads(routing, app.routes), self._named())
        await self.api.start()
        try:
            yield
        finally:
            app.asgi_handler = routing
            await self.api.stop()
            self.client.leave_loop()
