"""Apps by name: `MODULE:APP` from the working directory or the installed packages."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import rich_click as click

if TYPE_CHECKING:
    from pgqueue.app import App
    from pgqueue.cli.context import Door


def load_app(name: str, door: Door) -> App:
    """Return the app that `MODULE:APP` names, or raise a usage error.

    An app reads PGQUEUE_DSN when it is made, so that `--dsn` is put there first; processes started later see it too.
    """
    from pgqueue.app import App

    if door.given_dsn is not None:
        os.environ["PGQUEUE_DSN"] = door.given_dsn
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise click.UsageError(f"{name!r} is not MODULE:APP, such as tasks:app")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        app: object = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        # A module that the user's own lacks is another fault, which its traceback tells best.
        if exc.name is None or not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        raise click.UsageError(f"there is no module {exc.name!r} here or among the installed packages") from None
    for part in attribute.split("."):
        if not hasattr(app, part):
            raise click.UsageError(f"module {module_name!r} has no {attribute!r}")
        app = getattr(app, part)
    if not isinstance(app, App):
        raise click.UsageError(f"{name} is {type(app).__name__}, not an App")
    return app
