"""Reading requests and writing answers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from hashlib import blake2b
from typing import Any, Final, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec
from litestar import Request
from litestar.params import QueryParameter
from litestar.response.streaming import ASGIStreamingResponse
from litestar.types import Receive, Scope, Send
from msgspec import Raw

from pgqueue.api.core import Api
from pgqueue.api.paths import asked_path
from pgqueue.api.problems import Fault, Invalid, UnsupportedMedia, from_decode_error
from pgqueue.api.slashes import slashes_kept

T = TypeVar("T")
AnyRequest: TypeAlias = Request[Any, Any, Any]
_encode: Final = msgspec.json.Encoder().encode
_encode_exactly: Final = msgspec.json.Encoder(decimal_format="number").encode
_decode_any: Final = msgspec.json.Decoder().decode
_SUSPECT: Final = re.compile(rb"\\u(?:0000|[dD][89a-fA-F])")
_UNSTORABLE: Final = re.compile("[\\x00\\ud800-\\udfff]")


def api_of(request: AnyRequest) -> Api:
    """Return the API that a request came to."""
    api: Api = request.app.state.pgqueue
    return api


async def read_body(request: AnyRequest, decoder: "msgspec.json.Decoder[T]") -> T:
    """Return the body of a request; raises UnsupportedMedia, MalformedJson, Invalid."""
    body = await request.body()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMedia(f"the body is encoded as {encoding[:40]!r}; send it as it is, without Content-Encoding")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMedia(f"the body is sent as {kind or 'nothing'!r}; send Content-Type: application/json")
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as exc:
        if isinstance(exc, msgspec.ValidationError) and "`int" in str(exc):
            with suppress(msgspec.MsgspecError, RecursionError, ValueError, ArithmeticError):
                return decoder.decode(_with_whole_numbers(body))
        _refuse_unstorable(body, "")
        raise from_decode_error(exc) from None


async def refuse_body(request: AnyRequest, what: str) -> None:
    """Raise Invalid for a body that says anything, where `what` it may mean are query parameters."""
    body = (await request.body()).strip()
    if body not in (b"", b"{}", b"null"):
        raise Invalid(f"{what} are query parameters, as in ?filter=job_type:send_email; leave the body out")


def _with_whole_numbers(body: bytes) -> bytes:
    """Return JSON in which 5.0 is 5: the same number, which some languages write so."""
    return _encode_exactly(json.loads(body, parse_float=_number, parse_constant=_no_number))


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    whole = number.to_integral_value()
    return int(whole) if number == whole and number.adjusted() < 20 else number


def check_json(value: Raw, pointer: str) -> None:
    """Raise Invalid for JSON that not every program can read: numbers beyond a double, bad text, deep nesting."""
    raw = bytes(value)
    if len(raw) <= 2:
        return
    if _SUSPECT.search(raw):
        _refuse_unstorable(raw, pointer)
    try:
        _decode_any(raw)
    except (msgspec.MsgspecError, RecursionError) as exc:
        if isinstance(exc, RecursionError):
            raise from_decode_error(exc, pointer) from None
        raise Invalid(f"{pointer[1:]} is not valid: {exc}", faults=[Fault(str(exc), pointer=pointer)]) from None


def _refuse_unstorable(raw: bytes, pointer: str) -> None:
    """Raise Invalid for text that is JSON and no text of PostgreSQL: with NUL or a lone surrogate."""
    try:
        where = _unstorable(json.loads(raw))
    except (ValueError, RecursionError):
        return
    if where is not None:
        rule = "has a character that cannot be stored: NUL, or half of a surrogate pair"
        at = pointer + where
        raise Invalid(f"{at[1:] or 'the body'} {rule}", faults=[Fault(rule, pointer=at)])


def _unstorable(value: object) -> str | None:
    """Return where such text is, as a JSON pointer; a key of an object counts as the object."""
    match value:
        case str():
            return "" if _UNSTORABLE.search(value) else None
        case dict():
            if any(_UNSTORABLE.search(key) for key in value):
                return ""
            items: Iterable[tuple[Any, object]] = value.items()
        case list():
            items = enumerate(value)
        case _:
            return None
    for key, item in items:
        if (where := _unstorable(item)) is not None:
            return "/" + str(key).replace("~", "~0").replace("/", "~1") + where
    return None


class Answer:
    """An answer that is ready to be sent. Litestar's own Response costs half as much as all else that a submit does."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """`body`: JSON, or nothing."""
        self.body = body
        self.status = status
        self.headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        sent = [(name.lower().encode(), value.encode("latin-1")) for name, value in (self.headers or {}).items()]
        if self.status != 304:
            sent += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        await send({"type": "http.response.start", "status": self.status, "headers": sent})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class EventStream(Answer):
    """An answer of server-sent events, which has one of the seats for streams from its first header to its end."""

    __slots__ = ("_api", "_events")
    MEDIA_TYPE: Final = "text/event-stream"

    def __init__(self, api: Api, events: AsyncIterator[bytes]) -> None:
        """`events`: as they are sent."""
        super().__init__(b"", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._api = api
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; raises TooManyStreams."""
        with self._api.stream_seat():
            stream = ASGIStreamingResponse(
                iterator=self._events, media_type=self.MEDIA_TYPE, headers=dict(self.headers or {})
            )
            await stream(scope, receive, send)


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    """Return a struct as JSON."""
    return Answer(_encode(value), status, headers)


def answer_with_etag(request: AnyRequest, value: object) -> Answer:
    """Return a struct as JSON with its ETag, or 304 when that is what the client has."""
    body = _encode(value)
    etag = f'W/"{blake2b(body, digest_size=12).hexdigest()}"'
    asked = request.headers.get("if-none-match", "")
    if asked == "*" or etag in [one.strip() for one in asked.split(",")]:
        return Answer(b"", 304, {"ETag": etag})
    return Answer(body, headers={"ETag": etag})


def moment_parameter(description: str, name: str | None = None) -> QueryParameter:
    """Return what says that a query parameter is a moment. Text, since the framework takes numbers for moments too."""
    extra = {"format": "date-time", "pattern": r"^(?!0000|0001|99)"}
    return QueryParameter(name=name, description=description, schema_extra=extra)


def moment_of(text: str | None, name: str) -> datetime | None:
    """Return the moment that a query parameter names; raises Invalid."""
    if text is None:
        return None
    try:
        # A plus sign that was not escaped comes as a blank.
        moment = datetime.fromisoformat(re.sub(r" (\d\d:?\d\d)$", r"+\1", text))
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() is None or "T" not in text.upper():
        rule = "must be a moment with its zone, such as 2030-01-31T09:00:00Z"
        raise Invalid(f"{name} {rule}", faults=[Fault(rule, parameter=name)])
    return moment


class gone:  # noqa: N801 (used as a context manager's name is)
    """Within it a future is done once the client has hung up."""

    def __init__(self, request: AnyRequest) -> None:
        """`request`: one whose body has been read."""
        self._receive = request.receive
        self._task: asyncio.Task[None] | None = None

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def __aenter__(self) -> "asyncio.Task[None]":
        """Give it."""
        self._task = asyncio.get_running_loop().create_task(self._listen())
        return self._task

    async def __aexit__(self, *exc: object) -> None:
        """Stop listening."""
        assert self._task is not None
        self._task.cancel()


def own_path(request: AnyRequest, *parts: str) -> str:
    """Return a path below the one that was asked, as the client sees it."""
    scope: Any = request.scope
    return quote(
        "/".join([asked_path(scope).rstrip("/"), *parts]), safe="/:@!$&'()*+,;=~" + ("%" if slashes_kept(scope) else "")
    )
