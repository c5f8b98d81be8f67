"""Whether an exception is worth a retry: the defaults for the standard library's and common clients' exceptions.

Network timeouts, rate limits and services that are unavailable are retried; invalid payloads, authentication failures
and refusals are not; what is not known is retried.
"""

from collections.abc import Callable
from typing import Any, Final, TypeVar

from pgqueue.tasks import TaskOptions

# By qualified name, so that no library is imported; the nearest class in the method resolution order decides.
# None: the HTTP status inside decides.
_RETRYABLE: Final[dict[str, bool | None]] = {
    "builtins.TimeoutError": True,
    "builtins.ConnectionError": True,
    "builtins.PermissionError": False,
    "socket.gaierror": True,
    "json.decoder.JSONDecodeError": False,
    "http.client.HTTPException": True,
    "urllib.error.URLError": True,
    "urllib.error.HTTPError": None,
    "smtplib.SMTPAuthenticationError": False,
    "smtplib.SMTPRecipientsRefused": False,
    "smtplib.SMTPException": True,
    "ftplib.error_perm": False,
    "httpx.TransportError": True,
    "httpx.UnsupportedProtocol": False,
    "httpx.InvalidURL": False,
    "httpx.HTTPStatusError": None,
    "requests.exceptions.ConnectionError": True,
    "requests.exceptions.Timeout": True,
    "requests.exceptions.HTTPError": None,
    "requests.exceptions.InvalidURL": False,
    "aiohttp.client_exceptions.ClientConnectionError": True,
    "aiohttp.client_exceptions.ClientResponseError": None,
    "pydantic_core._pydantic_core.ValidationError": False,
    "msgspec.DecodeError": False,
    "psycopg.OperationalError": True,
    "pgqueue.errors.InvalidJob": False,
    "pgqueue.errors.InvalidPayload": False,
    "pgqueue.errors.InvalidResult": False,
    "pgqueue.errors.UnknownTask": False,
    "pgqueue.errors.ConfigError": False,
    "pgqueue.errors.AccessDenied": False,
    "pgqueue.errors.DeadLetter": False,
}
T = TypeVar("T")
_RETRYABLE_STATUS: Final = frozenset({408, 421, 425, 429, *range(500, 600)} - {501, 505})


def is_retryable(exc: BaseException, options: TaskOptions) -> bool:
    """Say whether a task that raised this should be tried again; the task's own lists come first."""
    # A user's exception may be of any depth, and its attributes may raise.
    return _tried(lambda: _judged(exc, options), True)


def _judged(exc: BaseException, options: TaskOptions) -> bool:
    if options.dead_letter_on and isinstance(exc, options.dead_letter_on):
        return False
    if options.retry_on and isinstance(exc, options.retry_on):
        return True
    if isinstance(exc, BaseExceptionGroup):
        return any(_judged(part, options) for part in exc.exceptions)
    for kind in type(exc).__mro__:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _RETRYABLE:
            known = _RETRYABLE[name]
            return _status(exc) in _RETRYABLE_STATUS if known is None else known
    return True


def retry_after(exc: Any) -> float | None:
    """Return the seconds that a refused HTTP request was told to wait, if it was."""
    seconds = _tried(lambda: float(getattr(exc, "response", exc).headers["Retry-After"]), -1.0)
    return seconds if 0 <= seconds <= 86400 else None


def _status(exc: Any) -> int | None:
    response = getattr(exc, "response", None)
    for source, name in ((response, "status_code"), (exc, "status"), (exc, "code"), (exc, "status_code")):
        status = getattr(source, name, None)
        if isinstance(status, int):
            return status
    return None


def _tried(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except BaseException:
        return otherwise
