"""The document's pages: the OpenAPI document as JSON, and as a page that needs nothing from anywhere else."""

import html
import json
from base64 import b64encode
from hashlib import sha256
from typing import Any, Final

from litestar import Request
from litestar.enums import MediaType, OpenAPIMediaType
from litestar.openapi.plugins import OpenAPIRenderPlugin

from pgqueue.api.openapi import SECURITY_SCHEME
from pgqueue.api.paths import root_of

_METHODS: Final = ("get", "post", "put", "patch", "delete")
_NEEDS_KEY: Final = json.dumps({"security": [{SECURITY_SCHEME: []}]})[1:-1]
_MAY_HAVE_KEY: Final = json.dumps({"security": [{}, {SECURITY_SCHEME: []}]})[1:-1]
_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
details { border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .4rem .8rem; }
summary { cursor: pointer; } summary code { font-weight: 600; } summary .dim { margin-left: .6rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; }
td { text-align: left; vertical-align: top; padding: .2rem .6rem .2rem 0; }
.dim { color: var(--dim); } .method { display: inline-block; min-width: 4rem; }
"""


class JsonDocument(OpenAPIRenderPlugin):
    """The document as JSON."""

    def __init__(self) -> None:
        """Serve it at /openapi.json below the document's path."""
        super().__init__(path="/openapi.json", media_type=OpenAPIMediaType.OPENAPI_JSON)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return it. As long as there is no key, operations can do without one."""
        root = root_of(request.scope)
        document = {**openapi_schema, "servers": [{"url": root}]} if root else openapi_schema
        text = json.dumps(document, ensure_ascii=False)
        if request.app.state.pgqueue.access.any_key is False:
            text = text.replace(_NEEDS_KEY, _MAY_HAVE_KEY)
        return text.encode()


class OfflineDocument(OpenAPIRenderPlugin):
    """The document as a page without script, font, style or picture from elsewhere."""

    def __init__(self) -> None:
        """Serve it at the document's path."""
        super().__init__(path="/", media_type=MediaType.HTML)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        """Return the page."""
        return page(openapi_schema).encode()


def page(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as HTML."""
    info = document["info"]
    groups: dict[str, list[str]] = {}
    for path, item in document["paths"].items():
        for method in _METHODS:
            if method in item:
                tag = (item[method].get("tags") or ["other"])[0]
                groups.setdefault(tag, []).append(_operation(method, path, item[method]))
    body = "".join(f"<h2>{_text(tag)}</h2>{''.join(operations)}" for tag, operations in groups.items())
    schemas = "".join(
        f'<details id="{_text(name)}"><summary><code>{_text(name)}</code>'
        f'<span class="dim">{_text(schema.get("description", ""))}</span></summary>{_json(schema)}</details>'
        for name, schema in sorted(document["components"]["schemas"].items())
    )
    title = f"{_text(info['title'])} {_text(info['version'])}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body><h1>{title}</h1><p>{_text(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="schema/openapi.json">openapi.json</a>.</p>'
        f"{body}<h2>Schemas</h2>{schemas}</body></html>"
    )


def style_hash() -> str:
    """Return the Content-Security-Policy source of the page's style."""
    return f"'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'"


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    parameters = "".join(
        f"<tr><td><code>{_text(one['name'])}</code></td><td>{_text(one['in'])}"
        f"{', required' if one.get('required') else ''}</td><td>{_text(one.get('description', ''))}</td>"
        f"<td><code>{_text(json.dumps(one.get('schema', {})))}</code></td></tr>"
        for one in operation.get("parameters", [])
    )
    takes = "".join(
        f"<p>Takes {_link(media)}.</p>{_json(media['example']) if 'example' in media else ''}"
        for media in operation.get("requestBody", {}).get("content", {}).values()
    )
    answers = "".join(
        f"<tr><td>{_text(status)}</td><td>{_text(one.get('description', ''))}</td><td>{_media(one)}</td></tr>"
        for status, one in operation["responses"].items()
    )
    return (
        f"<details><summary><code><span class=method>{method.upper()}</span> {_text(path)}</code>"
        f'<span class="dim">{_text(operation.get("summary", ""))}</span></summary>'
        f"<p>{_text(operation.get('description', ''))}</p>"
        f"{f'<table>{parameters}</table>' if parameters else ''}{takes}<table>{answers}</table></details>"
    )


def _media(answer: dict[str, Any]) -> str:
    kinds = answer.get("content", {}).items()
    return ", ".join(f'{_link(media)} <span class="dim">{_text(kind)}</span>' for kind, media in kinds)


def _link(media: dict[str, Any]) -> str:
    reference = media.get("schema", {}).get("$ref")
    if reference is None:
        return _text(media.get("schema", {}).get("type", "anything"))
    name = _text(reference.rpartition("/")[2])
    return f'<a href="#{name}">{name}</a>'


def _json(value: Any) -> str:
    return f"<pre>{_text(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _text(value: Any) -> str:
    return html.escape(str(value))
