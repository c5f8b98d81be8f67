"""`pgqueue serve`: the REST API and the dashboard."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from typing import TYPE_CHECKING, Any, Final

import rich_click as click

from pgqueue.cli.codes import FAILURE
from pgqueue.cli.context import Door, door_options, pass_door
from pgqueue.cli.output import note

if TYPE_CHECKING:
    import uvicorn
    from litestar import Litestar

    from pgqueue.client import Client

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = 8080


@click.command()
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--root-path", metavar="PATH", help="What a proxy takes away from paths, as /queue (default: PGQUEUE_ROOT_PATH)."
)
@click.option("--no-maintenance", is_flag=True, help="Do not sweep; workers or a scheduler do.")
@door_options
@pass_door
@click.pass_context
def serve(ctx: click.Context, door: Door, host: str, port: int, root_path: str | None, no_maintenance: bool) -> None:
    """Serve the REST API, its document at /schema and the dashboard at /dashboard.

    Until the first API key is made (`pgqueue keys create NAME`) only this machine is served, whatever --host says.
    """
    from pgqueue import log
    from pgqueue.api import ApiConfig, create_app

    with door.client(root_path=root_path) as client:
        log.configure(client.settings.log_level, client.settings.log_format)
        host = safe_host(client, host)
        app = create_app(client, ApiConfig(maintenance=not no_maintenance))
        server = make_server(app, host, port, root_path=client.settings.root_path)
        # What lasts as long as the process need not be looked through by each collection, while requests wait.
        gc.collect()
        gc.freeze()
        # uvicorn sends itself the signal again once it has ended in good order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        asyncio.run(server.serve())
        if not server.started:
            ctx.exit(FAILURE)


def safe_host(client: Client, host: str) -> str:
    """Return where to listen: this machine alone as long as there is no key."""
    from pgqueue import calling, calls_rest
    from pgqueue.api.access import is_local_address
    from pgqueue.connections import connect
    from pgqueue.errors import DatabaseUnavailable, SchemaOutdated

    if host == "localhost" or is_local_address(host):
        return host
    try:
        with connect(client.dsn, client.settings, "pgqueue serve") as connection:
            known: dict[str, Any] = calling.run(connection, calls_rest.CHECK_KEYS, hashes=[])
    except (DatabaseUnavailable, SchemaOutdated) as exc:
        # Each request is checked all the same.
        note(f"pgqueue: whether there are keys is not known yet ({exc.title.lower()})")
        return host
    if known["any"]:
        return host
    note(f"pgqueue: there is no API key, so this listens on {DEFAULT_HOST} instead of {host}")
    note("pgqueue: create one (pgqueue keys create NAME --scopes admin) and start again")
    return DEFAULT_HOST


def cannot_listen(host: str, port: int, reason: str | None) -> click.ClickException:
    """Return the error of a server whose address cannot be had."""
    return click.ClickException(f"the API cannot listen on {host}, port {port}: {reason}; --port chooses another")


def _told_below(record: logging.LogRecord) -> bool:
    return not isinstance(record.msg, OSError)


def make_server(app: Litestar, host: str, port: int, *, grace: float = 10.0, root_path: str = "") -> uvicorn.Server:
    """Return a server of an app, which ends open streams when it is told to stop.

    root_path: what a proxy takes away from the beginning of paths.
    """
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            log = logging.getLogger("uvicorn.error")
            # It logs why it cannot listen, which is told below, and ends with a code that means something else here.
            log.addFilter(_told_below)
            try:
                await super().startup(sockets)
            except SystemExit as exc:
                why = exc.__context__
                if not isinstance(why, OSError):
                    raise click.ClickException("the API did not start") from None
                reason = os.strerror(why.errno) if why.errno and why.errno > 0 else why.strerror or str(why)
                raise cannot_listen(host, port, reason) from None
            finally:
                log.removeFilter(_told_below)
            for one in self.servers:
                for socket in one.sockets:
                    address, bound = socket.getsockname()[:2]
                    url = f"http://{address}:{bound}"
                    note(f"pgqueue: the API is at {url}, its document at /schema, the dashboard at /dashboard")

        async def shutdown(self, sockets: Any = None) -> None:
            await app.state.pgqueue.hub.close()
            await super().shutdown(sockets)

    return Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            root_path=root_path,
            # libuv aborts the process when a descriptor it polls is closed under it, as libpq may close a connection's.
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(grace)),
            # It alone bounds the head of a request; httptools, which would be taken where it is installed, does not.
            http="h11",
            h11_max_incomplete_event_size=64 << 10,
        )
    )
