"""Problems: every error of the API as application/problem+json (RFC 9457), and nothing of the inside with it."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, InternalServerException, ValidationException
from msgspec import UNSET, Meta, UnsetType

from pgqueue.api.headers import request_id, strict_headers
from pgqueue.api.heads import with_head
from pgqueue.api.paths import asked_path
from pgqueue.errors import (
    DatabaseConflict,
    DatabaseError,
    DatabaseReadOnly,
    DatabaseUnavailable,
    InvalidJob,
    PgqueueError,
    SchemaOutdated,
)
from pgqueue.log import logger

_log: Final = logger("pgqueue.api")
MEDIA_TYPE: Final = "application/problem+json"
_PREFIX: Final = "urn:pgqueue:problem:"


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong with a request."""

    detail: Annotated[str, Meta(description="What is wrong.")]
    pointer: Annotated[str | None, Meta(description="Where in the body, as a JSON pointer.")] = None
    parameter: Annotated[str | None, Meta(description="Which query parameter, path parameter or header.")] = None


class Problem(msgspec.Struct, kw_only=True):
    """What went wrong, for programs (`type`, `status`) and for people (`title`, `detail`)."""

    type: Annotated[
        str, Meta(description="Which kind of problem; stable.", examples=["urn:pgqueue:problem:wrong-state"])
    ]
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    instance: Annotated[str, Meta(description="The path that was asked.")]
    request_id: Annotated[str, Meta(description="The X-Request-ID of this answer; the server's log has it too.")]
    retry_after: Annotated[float | UnsetType, Meta(description="Seconds after which it may work.")] = UNSET
    errors: list[Fault] | UnsetType = UNSET
    job_id: Annotated[str | UnsetType, Meta(description="The job that is in the way.")] = UNSET
    required_scope: Annotated[str | UnsetType, Meta(description="What the key would need.")] = UNSET
    limit_bytes: Annotated[int | UnsetType, Meta(description="What would have been taken.")] = UNSET


class ApiError(PgqueueError):
    """An error that only a request can have. `extensions` are further members of its problem."""

    http_status: ClassVar[int] = 400
    headers: Mapping[str, str] = {}

    def __init__(self, message: str = "", *, faults: list[Fault] | None = None, **extensions: Any) -> None:
        super().__init__(message)
        self.faults = faults
        self.extensions = extensions


class MalformedJson(ApiError):
    problem_type = "malformed-json"
    title = "The body is no JSON"


class RepeatedParameter(ApiError):
    problem_type = "repeated-parameter"
    title = "A parameter stands more than once"


class Unauthenticated(ApiError):
    http_status = 401
    problem_type = "unauthenticated"
    title = "A key is needed"
    headers: Mapping[str, str] = {"WWW-Authenticate": 'Bearer realm="pgqueue"'}


class Forbidden(ApiError):
    http_status = 403
    problem_type = "forbidden"
    title = "The key may not do this"


class CrossSite(ApiError):
    http_status = 403
    problem_type = "cross-site"
    title = "Pages of other sites may not do this"


class NotFound(ApiError):
    http_status = 404
    problem_type = "not-found"
    title = "No such thing"


class BodyTooLarge(ApiError):
    http_status = 413
    problem_type = "body-too-large"
    title = "The body is too large"


class UnsupportedMedia(ApiError):
    http_status = 415
    problem_type = "unsupported-media-type"
    title = "The body must be JSON"
    headers: Mapping[str, str] = {"Accept": "application/json", "Accept-Post": "application/json"}


class Invalid(ApiError):
    http_status = 422
    problem_type = "invalid-request"
    title = "The request is not valid"


class InvalidMoment(Invalid):
    """A moment that cannot be stored: the problem that the database's refusal is."""

    problem_type = InvalidJob.problem_type
    title = InvalidJob.title


class KeyReused(ApiError):
    http_status = 422
    problem_type = "idempotency-key-reused"
    title = "The idempotency key stands for another job"


class JobDeleted(ApiError):
    http_status = 409
    problem_type = "duplicate-job"
    title = "The idempotency key stands for a job that was deleted"


class TooManyStreams(ApiError):
    http_status = 503
    problem_type = "too-many-streams"
    title = "Too many open streams"
    default_retry_after = 5.0


_TITLES: Final = {
    400: ("bad-request", "Bad request"),
    401: ("unauthenticated", "A key is needed"),
    403: ("forbidden", "The key may not do this"),
    404: ("not-found", "No such thing"),
    405: ("method-not-allowed", "Method not allowed"),
    406: ("not-acceptable", "Not acceptable"),
    413: ("body-too-large", "The body is too large"),
    415: ("unsupported-media-type", "The body must be JSON"),
    422: ("invalid-request", "The request is not valid"),
    429: ("rate-limited", "Too many requests"),
    503: ("unavailable", "Unavailable"),
}
# What the database says of itself may name hosts, roles and tables: it goes to the log, and this to the client.
_SAID_INSTEAD: Final[tuple[tuple[type[PgqueueError], str], ...]] = (
    (DatabaseConflict, "other requests changed the same rows; nothing was done, the same request may be sent again"),
    (
        SchemaOutdated,
        "the schema in the database is missing or of another version; an operator must run pgqueue migrate",
    ),
    (DatabaseReadOnly, "the database takes no writes now; nothing was done"),
    (DatabaseUnavailable, "the database cannot be reached or does not answer; nothing is known to have been done"),
    (DatabaseError, "the database refused the request for a reason that is not the client's"),
)
_encode: Final = msgspec.json.Encoder().encode


def problem_response(
    request: Request[Any, Any, Any],
    status: int,
    kind: str,
    title: str,
    detail: str,
    *,
    headers: Mapping[str, str] | None = None,
    retry_after: float | None = None,
    **members: Any,
) -> Response[bytes]:
    """Return an answer of problem+json with all the headers that answers have."""
    scope = request.scope
    problem = Problem(
        type=_PREFIX + kind,
        title=title,
        status=status,
        detail=detail,
        instance=asked_path(scope),
        request_id=request_id(scope),
        retry_after=UNSET if retry_after is None else round(retry_after, 3),
        **members,
    )
    sent = {**strict_headers(scope), **(headers or {})}
    if retry_after is not None:
        sent["Retry-After"] = str(max(1, math.ceil(retry_after)))
    return Response(_encode(problem), status_code=status, media_type=MEDIA_TYPE, headers=sent)


def from_pgqueue_error(request: Request[Any, Any, Any], exc: PgqueueError) -> Response[bytes]:
    """Answer for an error of pgqueue."""
    detail = next((text for kind, text in _SAID_INSTEAD if isinstance(exc, kind)), str(exc))
    members: dict[str, Any] = {}
    headers: Mapping[str, str] = {}
    if isinstance(exc, ApiError):
        members, headers = dict(exc.extensions), exc.headers
        if exc.faults:
            members["errors"] = exc.faults
    elif exc.column is not None and exc.http_status == 422:
        members["errors"] = [Fault(str(exc), pointer=f"/{exc.column}")]
    if exc.http_status >= 500:
        _log.warning("request failed", request_id=request_id(request.scope), error=f"{type(exc).__name__}: {exc}")
        if exc.http_status == 500:
            detail = f"something went wrong; the server's log knows it as {request_id(request.scope)}"
    return problem_response(
        request,
        exc.http_status,
        exc.problem_type,
        exc.title,
        detail,
        headers=headers,
        retry_after=exc.retry_after,
        **members,
    )


def from_http_exception(request: Request[Any, Any, Any], exc: HTTPException) -> Response[bytes]:
    """Answer for what the framework refuses: unknown routes, methods, parameters, bodies that are too large."""
    status = exc.status_code
    headers = {name: value for name, value in (exc.headers or {}).items() if name.lower() != "content-type"}
    allowed = next((headers.pop(name) for name in list(headers) if name.lower() == "allow"), None)
    if allowed is not None:
        headers["Allow"] = with_head(method.strip() for method in allowed.split(","))
    if isinstance(exc, ValidationException):
        names = getattr(request.scope.get("route_handler"), "opt", {}).get("names", {})
        faults = _parameter_faults(exc.extra, names)
        return problem_response(request, 422, *_TITLES[422], "see errors", headers=headers, errors=faults)
    if isinstance(exc, InternalServerException) and "disconnected" in exc.detail:
        # Nobody is there to read it.
        return problem_response(request, 400, *_TITLES[400], "the client hung up before its request had come")
    if status >= 500:
        return from_bug(request, exc)
    kind, title = _TITLES.get(status, ("bad-request", "Bad request"))
    details = {
        404: _nothing_at(str(request.scope["path"])),
        405: f"{request.method} is not possible here",
        413: "the body is larger than this path takes",
    }
    return problem_response(request, status, kind, title, details.get(status, exc.detail or title), headers=headers)


def _nothing_at(path: str) -> str:
    """Return what is wrong with a path that no route has."""
    said = "there is nothing at this path"
    job_id = re.search(r"/jobs/([^/]+)", path)
    if job_id is None:
        return said
    try:
        UUID(job_id[1])
    except ValueError:
        return f"{said}: {job_id[1]!r:.100} is no job id, which is a UUID"
    return said


def from_bug(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """Answer for an exception that nobody expected: the log has the traceback, the client the id to ask for."""
    known = request_id(request.scope)
    _log.error("request met a bug", request_id=known, method=request.method, path=request.scope["path"], exc_info=exc)
    return problem_response(
        request, 500, "internal-error", "Internal error", f"something went wrong; the server's log knows it as {known}"
    )


def from_decode_error(exc: Exception, where: str = "") -> ApiError:
    """Return the error for a body that msgspec could not read as what it should be."""
    if isinstance(exc, msgspec.ValidationError):
        message, _, path = str(exc).partition(" - at `")
        return Invalid(
            f"the body is not valid: {message}", faults=[Fault(message, pointer=where + _pointer(path.rstrip("`")))]
        )
    if isinstance(exc, RecursionError):
        return Invalid("the body is nested too deep", faults=[Fault("nested too deep", pointer=where)])
    return MalformedJson(f"the body is no JSON: {exc}")


def _pointer(path: str) -> str:
    """Return `$.a[0].b` as `/a/0/b`."""
    return "".join(f"/{name or index}" for name, index in re.findall(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]", path))


def _parameter_faults(extra: Any, names: Mapping[str, str]) -> list[Fault]:
    """Return what the framework found; `names`: what its names of parameters are called in requests."""
    faults = []
    for entry in extra if isinstance(extra, list) else []:
        if isinstance(entry, dict):
            key = entry.get("key")
            faults.append(
                Fault(str(entry.get("message", "")), parameter=names.get(str(key), str(key)) if key else None)
            )
    return faults


EXCEPTION_HANDLERS: Final[dict[Any, Any]] = {
    PgqueueError: from_pgqueue_error,
    HTTPException: from_http_exception,
    Exception: from_bug,
}
