"""Whose request it is: the API's own rules, with the key in a cookie, and no POST from pages of other sites."""

from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from litestar import Response, get, post
from litestar.datastructures import Cookie

from pgqueue.api.access import EVERYBODY, Identity, Scope
from pgqueue.api.dashboard.shell import base_of, html, redirect
from pgqueue.api.exchange import AnyRequest, api_of
from pgqueue.api.problems import CrossSite, Forbidden, Invalid, Unauthenticated

KEY_COOKIE: Final = "pgqueue_key"
_LASTS: Final = 12 * 3600
_LONGEST: Final = 256
#: Addresses, which hold filters.
_LONGEST_ADDRESS: Final = 4096
_MOST_FIELDS: Final = 2000


async def enter(request: AnyRequest, needs: Scope = "read") -> Identity:
    """Return who asks for a page; raises Unauthenticated, Forbidden, CrossSite, RateLimitedError."""
    api = api_of(request)
    if api.config.trusted:
        identity = EVERYBODY
    else:
        key = request.cookies.get(KEY_COOKIE)
        try:
            identity = await api.access.identify(_with_key(request, key) if key else request.scope)
        except Unauthenticated:
            # A cookie may be of another queue that was once at this address.
            if not key or not await api.access.open_to_all():
                raise
            identity = await api.access.identify(request.scope)
    identity.require(needs)
    return identity


async def enter_to_act(request: AnyRequest) -> Identity:
    """Return who wants to change something; raises what `enter` raises."""
    check_same_origin(request)
    return await enter(request, "operate")


def check_same_origin(request: AnyRequest) -> None:
    """Raise CrossSite unless a page of this dashboard sent the request, as browsers say it."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        same = site == "same-origin"
    else:
        origin = request.headers.get("origin", "")
        same = bool(origin) and urlsplit(origin).netloc == request.headers.get("host")
    if not same:
        raise CrossSite("this may be done only from a page of the dashboard itself")


class Form:
    """The fields of a form; no field is longer than any filter may be, or holds what no text of the database can."""

    def __init__(self, fields: list[tuple[str, str]]) -> None:
        """`fields`: names and values, in order."""
        for name, value in fields:
            longest = _LONGEST_ADDRESS if name in ("back", "next") else _LONGEST
            if "\x00" in value or len(value) > longest:
                raise Invalid(f"{name[:40]} must have at most {longest} characters and no character of code 0")
        self._fields = fields

    def one(self, name: str) -> str:
        """Return the last value of a field, or nothing."""
        return next((value for known, value in reversed(self._fields) if known == name), "")

    def all(self, name: str) -> list[str]:
        """Return every value of a field."""
        return [value for known, value in self._fields if known == name and value]


async def read_form(request: AnyRequest) -> Form:
    """Return the fields of a POST; raises Invalid."""
    body = await request.body()
    try:
        return Form(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS))
    except ValueError as exc:
        raise Invalid(f"the form cannot be read: {exc}") from None


def read_query(request: AnyRequest) -> Form:
    """Return the fields of the URL; raises Invalid."""
    query = request.scope["query_string"].decode("latin-1")
    try:
        return Form(parse_qsl(query, keep_blank_values=True, max_num_fields=200))
    except ValueError as exc:
        raise Invalid(f"the address cannot be read: {exc}") from None


def _with_key(request: AnyRequest, key: str) -> Any:
    headers = [pair for pair in request.scope["headers"] if pair[0] not in (b"authorization", b"x-api-key")]
    return {**request.scope, "headers": [*headers, (b"x-api-key", key.encode("latin-1", "replace"))]}


@get("/login")
async def login_page(request: AnyRequest) -> Response[Any]:
    """Ask for a key, unless none is needed."""
    try:
        await enter(request)
    except (Unauthenticated, Forbidden):
        return html(request, "login.html", None, error=None, onward=read_query(request).one("next"))
    return redirect(base_of(request))


@post("/login")
async def login(request: AnyRequest) -> Response[Any]:
    """Take a key and keep it in a cookie that no script can read."""
    check_same_origin(request)
    form = await read_form(request)
    key = form.one("key").strip()
    onward = form.one("next")
    try:
        if not key:
            raise Unauthenticated("give a key")
        identity = await api_of(request).access.identify(_with_key(request, key))
        identity.require("read")
    except (Unauthenticated, Forbidden) as exc:
        return html(request, "login.html", None, status=exc.http_status, error=str(exc), onward=onward)
    base = base_of(request)
    # Only to a page of this dashboard, whatever the form says.
    safe = onward == base or (onward.startswith((f"{base}/", f"{base}?")) and "\\" not in onward and "//" not in onward)
    answer = redirect(onward if safe else base)
    answer.set_cookie(_cookie(request, key, _LASTS))
    return answer


@post("/logout")
async def logout(request: AnyRequest) -> Response[Any]:
    """Forget the key."""
    check_same_origin(request)
    answer = redirect(f"{base_of(request)}/login")
    answer.set_cookie(_cookie(request, "", 0))
    return answer


def _cookie(request: AnyRequest, key: str, lasts: int) -> Cookie:
    return Cookie(
        key=KEY_COOKIE,
        value=key,
        path=base_of(request),
        max_age=lasts,
        httponly=True,
        secure=request.scope["scheme"] == "https",
        samesite="lax",
    )


ROUTES: Final[list[Any]] = [login_page, login, logout]
