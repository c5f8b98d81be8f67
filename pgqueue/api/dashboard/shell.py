"""What every page has: its frame, its headers, its assets, and pages for what went wrong."""

import base64
import json
import math
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Response, get
from litestar.datastructures import Cookie
from litestar.exceptions import HTTPException, NotFoundException
from litestar.params import FromPath

from pgqueue import __version__
from pgqueue.api.access import Identity
from pgqueue.api.dashboard import charts, words
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.headers import request_id
from pgqueue.api.paths import asked_path, root_of
from pgqueue.api.problems import NotFound, Unauthenticated
from pgqueue.errors import DatabaseError, DatabaseReadOnly, DatabaseUnavailable, PgqueueError, SchemaOutdated
from pgqueue.log import logger

_log: Final = logger("pgqueue.api.dashboard")
_HERE: Final = Path(__file__).parent
_KINDS: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FLASH: Final = "pgqueue_flash"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "frame-ancestors 'none'; form-action 'self'; base-uri 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    # Not no-referrer: browsers would then send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
}
#: Path, name, key after g.
_PAGES: Final = (
    ("", "Overview", "o"),
    ("/jobs", "Jobs", "j"),
    ("/failures", "Failures", "f"),
    ("/queues", "Queues", "q"),
    ("/schedules", "Schedules", "c"),
    ("/workers", "Workers", "w"),
    ("/dead-letters", "Dead letters", "d"),
    ("/system", "System", "s"),
)
_SAID_INSTEAD: Final[tuple[tuple[type[PgqueueError], str], ...]] = (
    (SchemaOutdated, "The schema in the database is missing or of another version: run pgqueue migrate."),
    (DatabaseReadOnly, "The database takes no writes now. This page tries again by itself."),
    (DatabaseUnavailable, "The database cannot be reached or does not answer. This page tries again by itself."),
    (DatabaseError, "The database refused this. The server's log says why."),
)


def base_of(request: AnyRequest) -> str:
    """Return the path of the dashboard as the browser sees it."""
    return f"{root_of(request.scope)}{api_of(request).config.path.rstrip('/')}/dashboard"


def html(
    request: AnyRequest, template: str, identity: Identity | None, *, status: int = 200, under: str = "", **values: Any
) -> Response[bytes]:
    """Return a page. `under`: the page from which a form led to it."""
    base = base_of(request)
    here = (under.partition("?")[0] or asked_path(request.scope)).rstrip("/")
    flash = _flash_of(request)

    def link(page: str, **query: Any) -> str:
        chosen = [(name, value) for name, value in query.items() if value not in (None, "", [])]
        asked = urlencode(chosen, doseq=True, quote_via=quote)
        return f"{base}{'/' if page else ''}{page}" + (f"?{asked}" if asked else "")

    text = (
        _templates()
        .get_template(template)
        .render(
            base=base,
            assets=f"{base}/assets/{_assets_version()}",
            link=link,
            pages=[] if template == "login.html" else _pages(base, here),
            identity=identity,
            can_act=identity is not None and "operate" in identity.scopes,
            version=__version__,
            flash=flash,
            **values,
        )
    )
    answer = Response(text.encode("utf-8", "replace"), status_code=status, media_type="text/html", headers=_HEADERS)
    if flash is not None:
        answer.set_cookie(_flash_cookie(request, "", 0))
    return answer


def redirect(to: str) -> Response[Any]:
    """Lead on to a page of ours."""
    return Response(b"", status_code=303, headers={**_HEADERS, "Location": to}, media_type="text/html")


def done(request: AnyRequest, to: str, said: str, kind: str = "good") -> Response[Any]:
    """Lead on to a page of ours, which says once what was done."""
    answer = redirect(to)
    text = json.dumps([kind, said[:600]])
    answer.set_cookie(_flash_cookie(request, base64.urlsafe_b64encode(text.encode()).decode(), 60))
    return answer


def back(request: AnyRequest, to: str) -> str:
    """Return a page to go back to: what a form says, if it is ours, else the dashboard."""
    base = base_of(request)
    inside = to == base or to.startswith((f"{base}/", f"{base}?"))
    return to if inside and "//" not in to.partition("?")[0] and "\\" not in to and to.isprintable() else base


def _flash_of(request: AnyRequest) -> tuple[str, str] | None:
    given = request.cookies.get(_FLASH)
    if not given:
        return None
    try:
        kind, said = json.loads(base64.urlsafe_b64decode(given))
    except (ValueError, TypeError, RecursionError):
        return None
    return ("good" if kind == "good" else "bad", str(said))


def _flash_cookie(request: AnyRequest, value: str, lasts: int) -> Cookie:
    return Cookie(
        key=_FLASH,
        value=value,
        path=base_of(request),
        max_age=lasts,
        httponly=True,
        secure=request.scope["scheme"] == "https",
        samesite="strict",
    )


def _pages(base: str, here: str) -> list[tuple[str, str, str, bool]]:
    return [(base + path, name, key, _is_here(base, path, here)) for path, name, key in _PAGES]


def _is_here(base: str, path: str, here: str) -> bool:
    return here == base + path or (path != "" and here.startswith(f"{base}{path}/"))


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    for made in (
        words.when,
        words.exact,
        words.number,
        words.rate,
        words.percent,
        words.size,
        words.duration,
        words.short_id,
        words.priority,
        words.status,
        words.pretty,
    ):
        environment.filters[made.__name__] = made
    environment.globals.update(bar=charts.bar, sparkline=charts.sparkline, stack=charts.stack)
    return environment


# Assets ---------------------------------------------------------------------------------------------------------------


@cache
def _assets() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((_HERE / "assets").iterdir()) if path.suffix in _KINDS}


@cache
def _assets_version() -> str:
    return sha256(b"".join(_assets().values())).hexdigest()[:12]


@get("/assets/{release:str}/{name:str}", sync_to_thread=False)
def asset(release: FromPath[str], name: FromPath[str]) -> Response[bytes]:
    """Return a script, the style sheet or an image. Its address changes with it, so browsers keep it."""
    found = _assets().get(name)
    if found is None:
        raise NotFound("there is no such file")
    lasts = "public, max-age=31536000, immutable" if release == _assets_version() else "no-cache"
    kind = _KINDS[Path(name).suffix]
    return Response(found, media_type=kind, headers={"Cache-Control": lasts})


# What went wrong ------------------------------------------------------------------------------------------------------


def _from_pgqueue_error(request: AnyRequest, exc: PgqueueError) -> Response[Any]:
    if isinstance(exc, Unauthenticated):
        if request.method == "GET" and not request.headers.get("x-live"):
            query = request.scope["query_string"].decode("latin-1")
            onward = asked_path(request.scope) + (f"?{query}" if query else "")
            return redirect(f"{base_of(request)}/login?{urlencode({'next': onward[:250]})}")
        return _problem(request, 401, "Sign in again", "The key is unknown, revoked or expired.")
    said = next((text for kind, text in _SAID_INSTEAD if isinstance(exc, kind)), None)
    if said is not None or exc.http_status >= 500:
        _log.warning("page failed", request_id=request_id(request.scope), error=f"{type(exc).__name__}: {exc}")
    again = isinstance(exc, DatabaseUnavailable)
    answer = _problem(request, exc.http_status, exc.title, said or str(exc), again=again)
    if exc.retry_after is not None:
        answer.headers["Retry-After"] = str(max(1, math.ceil(exc.retry_after)))
    return answer


def _from_http_exception(request: AnyRequest, exc: HTTPException) -> Response[Any]:
    if exc.status_code >= 500:
        return _from_bug(request, exc)
    if exc.status_code == 404:
        return _problem(request, 404, "No such page", "There is nothing at this address.")
    return _problem(request, exc.status_code, "This did not work", exc.detail)


async def no_such_page() -> Response[Any]:
    """Say that there is nothing at an address."""
    raise NotFoundException


def _from_bug(request: AnyRequest, exc: Exception) -> Response[Any]:
    known = request_id(request.scope)
    _log.error("page met a bug", request_id=known, path=request.scope["path"], exc_info=exc)
    return _problem(request, 500, "Something went wrong", f"The server's log knows it as {known}.")


def _problem(request: AnyRequest, status: int, title: str, said: str, *, again: bool = False) -> Response[bytes]:
    return html(request, "problem.html", None, status=status, title=title, said=said, again=again)


EXCEPTION_HANDLERS: Final[dict[Any, Any]] = {
    PgqueueError: _from_pgqueue_error,
    HTTPException: _from_http_exception,
    Exception: _from_bug,
}
ROUTES: Final[list[Any]] = [asset]
