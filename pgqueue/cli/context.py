"""What all commands share: which database they work on, and how they answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import rich_click as click

if TYPE_CHECKING:
    from pgqueue.client import Client
    from pgqueue.connections import SyncConnection
    from pgqueue.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class Door:
    """How this invocation reaches the queue: `--dsn`, else PGQUEUE_DSN, else the embedded PostgreSQL."""

    given_dsn: str | None = None
    as_json: bool = False

    @property
    def settings(self) -> Settings:
        """The settings in force; raises ConfigError."""
        from pgqueue.settings import Settings

        return Settings.load(dsn=self.given_dsn)

    @contextmanager
    def client(self, **overrides: Any) -> Iterator[Client]:
        """Give a client. The embedded PostgreSQL is started and migrated when it is first needed.

        `overrides`: settings that options say, None where they do not.
        """
        from pgqueue.client import Client
        from pgqueue.settings import Settings

        with Client(settings=Settings.load(dsn=self.given_dsn, **overrides)) as client:
            yield client

    @contextmanager
    def connection(self) -> Iterator[SyncConnection]:
        """Give a connection in autocommit mode, for calls that are no verb of the client."""
        from pgqueue.connections import connect

        with self.client() as client, connect(client.dsn, client.settings) as connection:
            yield connection

    @contextmanager
    def dsn(self) -> Iterator[str]:
        """Give the DSN of a server that runs, whatever is in its database."""
        settings = self.settings
        if settings.dsn is not None:
            yield settings.dsn
            return
        from pgqueue import embedded

        with embedded.start(settings.data_dir) as server:
            yield server.dsn


pass_door = click.make_pass_decorator(Door, ensure=True)


def dsn_option(command: F) -> F:
    """Add `--dsn` to a command; before and after the command's name it means the same."""

    def keep(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value is not None and not value.strip():
            raise click.BadParameter("it is empty, as of a shell variable that is not set; leave it out to go without")
        if value is not None:
            ctx.ensure_object(Door).given_dsn = value

    return click.option(
        "--dsn",
        metavar="DSN",
        expose_value=False,
        callback=keep,
        help="libpq connection string; default: PGQUEUE_DSN, else the embedded PostgreSQL.",
    )(command)


def door_options(command: F) -> F:
    """Add `--dsn` and, for commands that print data, `--json`, likewise."""

    def keep(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Door).as_json = True

    as_json = click.option(
        "--json", "as_json", is_flag=True, expose_value=False, callback=keep, help="Print JSON on stdout."
    )
    return dsn_option(as_json(command))
