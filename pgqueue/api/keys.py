"""/admin/keys: API keys."""

from typing import Annotated, Final

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.params import PathParameter

from pgqueue import calls_rest
from pgqueue.api.access import new_key
from pgqueue.api.exchange import Answer, AnyRequest, answer, api_of, read_body
from pgqueue.api.guard import identity_of
from pgqueue.api.lists import NAMES, Limit, NameCursor, page_of
from pgqueue.api.openapi import Gives, HttpMethod, operation
from pgqueue.api.problems import NotFound
from pgqueue.api.values_operate import Keys, KeyView, MadeKey, NewKey, Revoked
from pgqueue.errors import JobNotFound

_TAG: Final = "keys"
_new_key: Final = msgspec.json.Decoder(NewKey)


@operation(HttpMethod.GET, "/admin/keys", needs="admin", gives={200: Gives(Keys, "A page of keys.")}, tag=_TAG)
async def list_keys(request: AnyRequest, cursor: NameCursor = None, limit: Limit = NAMES) -> Answer:
    """List API keys by name."""
    rows = await api_of(request).call(calls_rest.KEYS, after=cursor, limit=limit + 1)
    views = [msgspec.convert(row, KeyView) for row in rows]
    return answer(Keys(*page_of(views, limit, lambda view: view.name)))


@operation(
    HttpMethod.POST,
    "/admin/keys",
    needs="admin",
    takes=NewKey,
    gives={201: Gives(MadeKey, "The key, which is shown this once.")},
    refuses=(409,),
    tag=_TAG,
    example={"name": "shop", "scopes": ["submit", "read"]},
)
async def create_key(request: AnyRequest) -> Answer:
    """Make an API key. From the first one on every request needs a key."""
    asked = await read_body(request, _new_key)
    key, digest, prefix = new_key()
    scopes = list(dict.fromkeys(asked.scopes))
    await api_of(request).act(
        identity_of(request.scope),
        calls_rest.CREATE_KEY,
        name=asked.name,
        sha256=digest,
        prefix=prefix,
        scopes=scopes,
        rate=asked.rate,
        expires_at=asked.expires_at,
    )
    return answer(MadeKey(asked.name, key, scopes), 201)


@operation(
    HttpMethod.DELETE,
    "/admin/keys/{key_name:str}",
    needs="admin",
    gives={200: Gives(Revoked, "The key no longer works.")},
    refuses=(404,),
    tag=_TAG,
)
async def revoke_key(
    request: AnyRequest, key_name: Annotated[str, PathParameter(pattern=r"^[^\x00]+$", max_length=64)]
) -> Answer:
    """Revoke an API key. It ends at once."""
    try:
        changed = await api_of(request).act(identity_of(request.scope), calls_rest.REVOKE_KEY, name=key_name)
    except JobNotFound as exc:
        raise NotFound(str(exc)) from None
    return answer(Revoked(key_name, changed))


ROUTES: Final[list[HTTPRouteHandler]] = [list_keys, create_key, revoke_key]
