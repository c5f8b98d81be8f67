"""Headers that every answer has: which request it was, and what a browser may do with it."""

import itertools
import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

_GIVEN_ID: Final = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_KEY: Final = "pgqueue_request_id"
_STRICT: Final = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_prefix: Final = secrets.token_hex(6)
_count: Final = itertools.count(1)
_STRICT_RAW: Final = [(name.lower().encode(), value.encode()) for name, value in _STRICT.items()]


def request_id(scope: Any) -> str:
    """Return the id of a request: the client's X-Request-ID if it is a plain one, else a new one."""
    state = scope.setdefault("state", {})
    known = state.get(_KEY)
    if known is None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        known = given.decode() if _GIVEN_ID.fullmatch(given) else f"{_prefix}-{next(_count)}"
        state[_KEY] = known
    return str(known)


def strict_headers(scope: Any) -> Mapping[str, str]:
    """Return the headers of an answer."""
    return {**_STRICT, "X-Request-ID": request_id(scope)}


def add_strict_headers(scope: Any, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return headers of an answer, with those that it lacks."""
    present = {name.lower() for name, _ in headers}
    added = [pair for pair in _STRICT_RAW if pair[0] not in present]
    if b"x-request-id" not in present:
        added.append((b"x-request-id", request_id(scope).encode()))
    return [*headers, *added]
