"""Paths as clients see them: a proxy, or an app around this one, may have taken what they begin with (root_path)."""

from typing import Any


def root_of(scope: Any) -> str:
    """Return what clients' paths begin with, "" for nothing."""
    return str(scope.get("root_path", "")).rstrip("/")


def path_below(scope: Any) -> str:
    """Return the path of a request below the root, before and after it was routed."""
    path = str(scope["path"])
    # The router takes the root away, and what is left may begin with the same text: /queue, /queues.
    return path if "path_template" in scope else path.removeprefix(root_of(scope))


def asked_path(scope: Any) -> str:
    """Return the path that a client asked for."""
    return root_of(scope) + path_below(scope)
