"""Routes and the OpenAPI document: each operation says what it takes, gives and refuses, and the document is that.

Bodies are read by msgspec straight from their bytes, so that JSON goes to the database as it came; their schemas are
msgspec's too. Litestar's own document gets them as components.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from litestar import Litestar
from litestar.enums import HttpMethod, ParamType
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import (
    OpenAPIHeader,
    OpenAPIMediaType,
    OpenAPIResponse,
    Operation,
    Reference,
    RequestBody,
    Schema,
)
from litestar.openapi.spec.security_scheme import SecurityScheme
from litestar.params import ParameterKwarg
from litestar.types import Empty

from pgqueue.api.access import Scope
from pgqueue.api.problems import MEDIA_TYPE, Problem

F = TypeVar("F", bound=Callable[..., Any])
_REF: Final = "#/components/schemas/{name}"
_NO_NUL: Final = r"^[^\x00]*$"
SECURITY_SCHEME: Final = "key"

#: Any JSON that PostgreSQL can store: no NUL in any text.
JSON_SCHEMA: Final[dict[str, Any]] = {
    "description": "Any JSON, without NUL characters.",
    "anyOf": [
        {"type": ["null", "boolean", "number"]},
        {"type": "string", "pattern": _NO_NUL},
        {"type": "array", "items": {"$ref": "#/components/schemas/Json"}},
        {
            "type": "object",
            "propertyNames": {"pattern": _NO_NUL},
            "additionalProperties": {"$ref": "#/components/schemas/Json"},
        },
    ],
}
_REASONS: Final = {
    400: "The body is no JSON, or a parameter that takes one value stands more than once.",
    401: "A key is needed, or it is unknown, revoked or expired.",
    403: "The key's scopes do not allow this.",
    404: "There is no such thing.",
    409: "The present state does not allow this.",
    413: "The body is too large.",
    415: "The body is not sent as application/json.",
    422: "The request is not valid; `errors` says where.",
    429: "Too many requests, or too many jobs; Retry-After says when to come back.",
    500: "A bug; the server's log knows it by `request_id`.",
    503: "The queue is full, or the database is away; Retry-After says when to come back.",
}


@dataclass(frozen=True, slots=True)
class Gives:
    """One answer of an operation. `body` None: no body, or what `media_type` says."""

    body: type | None
    description: str
    media_type: str = "application/json"
    headers: tuple[str, ...] = ()
    example: Any = None


_HEADERS: Final = {
    "Location": Schema(description="The path of what was made.", type="string"),  # type: ignore[arg-type]
    "Idempotency-Replayed": Schema(
        description="`true`: nothing was enqueued; the job is that of an earlier request.",
        type="string",  # type: ignore[arg-type]
    ),
    "ETag": Schema(description="For If-None-Match.", type="string"),  # type: ignore[arg-type]
    "Retry-After": Schema(description="Seconds to wait.", type="integer"),  # type: ignore[arg-type]
}
_structs: dict[str, type] = {"Problem": Problem}


def operation(
    method: HttpMethod,
    path: str,
    *,
    needs: Scope | None,
    gives: dict[int, Gives],
    takes: type | None = None,
    optional_body: bool = False,
    refuses: Sequence[int] = (),
    tag: str,
    max_body: int | None = None,
    example: Any = None,
    checks_key: bool = False,
    or_needs: Scope | None = None,
) -> Callable[[F], HTTPRouteHandler]:
    """Make a route of a handler `async (request, ...) -> Response[bytes]`.

    `needs`: the scope of the key, None for a route that is open. `takes`: the struct of the body, which the handler
    reads with `read_body`. `refuses`: statuses of problems besides those that always may come. `checks_key`: the
    handler has its key checked along with what it does. `or_needs`: another scope that does instead.
    """
    always = {422, 500, 503} | ({401, 403, 429} if needs else set())
    if takes is not None:
        always |= {400, 413, 415}
        _structs[takes.__name__] = takes
    for answer in gives.values():
        if answer.body is not None:
            _structs[answer.body.__name__] = answer.body

    @dataclass
    class Described(Operation):
        def __post_init__(self) -> None:
            # Litestar knows about parameters; bodies and answers are ours.
            self.responses = {str(status): _given(answer) for status, answer in gives.items()}
            for status in sorted(always | set(refuses)):
                self.responses[str(status)] = _refused(status)
            if takes is not None:
                self.request_body = RequestBody(
                    required=not optional_body,
                    content={"application/json": _media(Reference(ref=_REF.format(name=takes.__name__)), example)},
                )

    def make(handler: F) -> HTTPRouteHandler:
        inner, names, query = _with_own_names(handler, path)
        if query:
            always.add(400)
        summary, _, description = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
        route = HTTPRouteHandler(
            path,
            http_method=method,
            status_code=next(iter(gives)),
            summary=" ".join(summary.split()).rstrip("."),
            description=description or None,
            operation_id=handler.__name__,
            operation_class=Described,
            tags=[tag],
            opt={
                "needs": needs,
                "or_needs": or_needs,
                "checks_key": checks_key,
                "query": query,
                "names": names,
            },
            security=[{SECURITY_SCHEME: []}] if needs else None,
            request_max_body_size=Empty if max_body is None else max_body,
        )
        return route(inner)

    return make


def _media(schema: Any, example: Any) -> OpenAPIMediaType:
    return OpenAPIMediaType(schema=schema, example=example)


def _given(answer: Gives) -> OpenAPIResponse:
    content = None
    if answer.body is not None:
        content = {answer.media_type: _media(Reference(ref=_REF.format(name=answer.body.__name__)), answer.example)}
    elif answer.media_type != "application/json":
        content = {answer.media_type: _media(Schema(type="string"), answer.example)}  # type: ignore[arg-type]
    headers: dict[str, Any] = {name: OpenAPIHeader(schema=_HEADERS[name]) for name in answer.headers}
    return OpenAPIResponse(description=answer.description, content=content, headers=headers or None)


def _refused(status: int) -> OpenAPIResponse:
    headers: dict[str, Any] = (
        {"Retry-After": OpenAPIHeader(schema=_HEADERS["Retry-After"])} if status in (429, 503) else {}
    )
    return OpenAPIResponse(
        description=_REASONS[status],
        content={MEDIA_TYPE: _media(Reference(ref=_REF.format(name="Problem")), None)},
        headers=headers or None,
    )


def _with_own_names(
    handler: Callable[..., Any], path: str
) -> tuple[Callable[..., Any], dict[str, str], dict[str, bool]]:
    """Return a handler whose parameters no dependency of an app around this one can have the names of.

    And what each of them is called in requests, and of which in the query, whether it may stand several times.
    """
    hints = get_type_hints(handler, include_extras=True)
    parameters = dict(inspect.signature(handler).parameters)
    names: dict[str, str] = {}
    query: dict[str, bool] = {}
    for name in list(parameters):
        if name == "request" or f"{{{name}:" in path:
            continue
        kind, *told = get_args(hints.pop(name))
        given = next(one for one in told if isinstance(one, ParameterKwarg))
        own = f"pgqueue_{name}"
        names[own] = given.name or name
        if given.param_type is not ParamType.HEADER:
            query[names[own]] = any(get_origin(one) is list for one in (kind, *get_args(kind)))
        hints[own] = Annotated[kind, dataclasses.replace(given, name=names[own])]
        parameters[own] = parameters.pop(name).replace(name=own, annotation=hints[own])
    if not names:
        return handler, names, query

    @functools.wraps(handler)
    async def renaming(**values: Any) -> Any:
        return await handler(**{name.removeprefix("pgqueue_"): value for name, value in values.items()})

    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters.values()]
    renaming.__signature__ = inspect.signature(handler).replace(parameters=keywords)  # type: ignore[attr-defined]
    renaming.__annotations__ = hints
    del renaming.__wrapped__
    return renaming, names, query


def components() -> dict[str, Any]:
    """Return the schemas of all bodies by name."""
    _, schemas = msgspec.json.schema_components(list(_structs.values()), ref_template=_REF)
    schemas["Json"] = JSON_SCHEMA
    if "NewJob" in schemas:
        # One of the two names of the type, and one of the two ways to say when.
        schemas["NewJob"]["oneOf"] = [{"required": ["type"]}, {"required": ["job_type"]}]
        schemas["NewJob"]["not"] = {
            "required": ["scheduled_at", "delay_ms"],
            "properties": {"scheduled_at": {"type": "string"}, "delay_ms": {"type": "integer"}},
        }
    return schemas


def complete_document(app: Litestar) -> None:
    """Add our components to an app's OpenAPI document, before it is first shown."""
    if app.openapi_config is None:
        return
    document = app.openapi_schema
    # Litestar's spec wants Schema objects; what is a dict already it passes on as it is.
    schemas: Any = document.components.schemas
    schemas.update(components())
    schemes = document.components.security_schemes or {}
    schemes[SECURITY_SCHEME] = SecurityScheme(
        type="http",
        scheme="bearer",
        description="An API key: `pgqueue keys create NAME`. Without any key the API serves only its own machine.",
    )
    document.components.security_schemes = schemes


__all__ = ["Gives", "HttpMethod", "NoneType", "complete_document", "components", "operation"]
