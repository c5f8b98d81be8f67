"""`pgqueue up`: everything on this machine, in one process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final
from uuid import UUID

import rich_click as click

from pgqueue.cli.codes import INTERRUPTED, OK
from pgqueue.cli.context import Door, dsn_option, pass_door
from pgqueue.cli.loading import load_app
from pgqueue.cli.output import note
from pgqueue.cli.serve import DEFAULT_HOST, DEFAULT_PORT, cannot_listen
from pgqueue.cli.values import SPAN

if TYPE_CHECKING:
    from pgqueue.app import App
    from pgqueue.cli.live import View
    from pgqueue.connections import Link
    from pgqueue.process import Ending
    from pgqueue.worker import Worker

DEMO_APP: Final = "pgqueue.demo:app"
DEMO_RATE: Final = 10.0
FEED_SECONDS: Final = 0.5
API_STOP_SECONDS: Final = 15.0


@click.command()
@click.argument("app_name", metavar="[MODULE:APP]", default=DEMO_APP)
@click.option("--demo", is_flag=True, help="Add sample load and show what becomes of it.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Jobs at once (default: PGQUEUE_CONCURRENCY, 10).")
@click.option("--host", default=DEFAULT_HOST, show_default=True, help="Address of the API.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port of the API (default: 8080, or a free one).")
@click.option("--no-serve", is_flag=True, help="No API.")
@click.option("--seconds", type=SPAN, help="Drain and end after so long (default: when told to).")
@dsn_option
@pass_door
@click.pass_context
def up(
    ctx: click.Context,
    door: Door,
    app_name: str,
    demo: bool,
    concurrency: int | None,
    host: str,
    port: int | None,
    no_serve: bool,
    seconds: float | None,
) -> None:
    """Run everything on this machine: database (embedded without a DSN), migrations, API, worker and sweeper.

    MODULE:APP is the app whose tasks are run, pgqueue.demo:app without one. Ctrl-C, or SIGTERM, drains; a second one
    hurries.
    """
    from pgqueue import log, schema
    from pgqueue.process import Ending, new_event_loop, run_through

    app = load_app(app_name, door)
    # The demo's failures are its point: the page shows them, and a log of them would hide the page.
    quiet = demo and "PGQUEUE_LOG_LEVEL" not in os.environ
    log.configure("error" if quiet else app.settings.log_level, app.settings.log_format)
    with _database(app), app:
        applied = schema.migrate(app.dsn)
        if applied:
            note(f"pgqueue: migrated: {', '.join(applied)}")
        worker = app.worker(concurrency=concurrency, name="up")
        with (
            Ending(worker) as ending,
            nullcontext() if no_serve else _api(app, host, port) as url,
            asyncio.Runner(loop_factory=new_event_loop) as runner,
        ):
            run_through(runner.get_loop(), _run(app, worker, ending, url=url, demo=demo, seconds=seconds))
        ctx.exit(OK if ending.signals < 2 else INTERRUPTED)


@contextmanager
def _database(app: App) -> Iterator[None]:
    """Say which database it is; keep the embedded one running meanwhile."""
    if app.settings.dsn is not None:
        yield
        return
    from pgqueue import embedded

    note("pgqueue: starting PostgreSQL (the first time it takes some seconds)")
    with embedded.start(app.settings.data_dir) as server:
        note(f"pgqueue: PostgreSQL runs on port {server.port} of this machine, its data is in {server.data_dir}")
        yield


@contextmanager
def _api(app: App, host: str, port: int | None) -> Iterator[str]:
    """Serve the API from a thread of its own and give its URL; raises a ClickException where it cannot."""
    from pgqueue.api import ApiConfig, create_app
    from pgqueue.cli.serve import make_server, safe_host

    host = safe_host(app, host)
    with _listening(host, port) as listening:
        api = create_app(app, ApiConfig(maintenance=False))
        server = make_server(api, host, port or 0, root_path=app.settings.root_path)
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve([listening])), name="pgqueue-api", daemon=True
        )
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise click.ClickException("the API did not start; --no-serve does without it")
            time.sleep(0.01)
        try:
            yield f"http://{host}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(API_STOP_SECONDS)


def _listening(host: str, port: int | None) -> socket.socket:
    """Return a socket that listens; without a port asked for it is 8080, or a free one where that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for tried in (port,) if port is not None else (DEFAULT_PORT, 0):
        try:
            return socket.create_server((host, tried), family=family)
        except OSError as exc:
            failure = exc
        if port is None and failure.errno == errno.EADDRINUSE:
            note(f"pgqueue: port {tried} is taken: the API gets a free one (--port says which)")
    raise cannot_listen(host, port or DEFAULT_PORT, failure.strerror)


async def _run(app: App, worker: Worker, ending: Ending, *, url: str | None, demo: bool, seconds: float | None) -> None:
    """Work until told to stop."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(worker.run())
    if seconds is not None:
        loop.call_later(seconds, lambda: None if worker.stopping else ending.begin())
    if demo:
        await _demonstrate(app, url, worker, working)
    else:
        note("pgqueue: the worker is at work; Ctrl-C drains and ends")
    await working


async def _demonstrate(app: App, url: str | None, worker: Worker, working: asyncio.Task[None]) -> None:
    """Feed the queue until the worker stops, and show what happens until it has ended."""
    from pgqueue.cli.live import view
    from pgqueue.cli.load import opening
    from pgqueue.connections import Link

    since = min(job.job_id for job in await app.enqueue_many(opening()))
    link = Link(app.dsn, app.settings, "pgqueue up")
    page = f" Dashboard: {url}/dashboard" if url else ""
    with view("pgqueue", f"Ctrl-C drains and ends. In another terminal: pgqueue jobs list.{page}") as shown:
        feeding = asyncio.create_task(_feed(app, shown, worker))
        try:
            while not working.done():
                await _show(link, since, shown)
                if worker.stopping:
                    shown.say("draining: what runs may end, the rest stays in the queue")
                await asyncio.wait([working], timeout=shown.every)
            await _show(link, since, shown)
        finally:
            feeding.cancel()
            link.close()
        shown.end()


async def _feed(app: App, shown: View, worker: Worker) -> None:
    from pgqueue.cli.load import batch
    from pgqueue.errors import PgqueueError

    while not worker.stopping:
        try:
            await app.enqueue_many(batch(FEED_SECONDS, DEMO_RATE))
        except PgqueueError as exc:
            shown.say(f"cannot enqueue: {exc}")
        await asyncio.sleep(FEED_SECONDS)


async def _show(link: Link, since: UUID, shown: View) -> None:
    from pgqueue import calls
    from pgqueue.cli.live import Snapshot
    from pgqueue.errors import DatabaseUnavailable

    try:
        activity = await link.call(calls.ACTIVITY, since=since, limit=30)
        shown.show(Snapshot.of(activity, await link.call(calls.WORKERS)))
    except DatabaseUnavailable as exc:
        shown.say(f"cannot look: {exc}")
