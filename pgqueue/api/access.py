"""Access: whose request it is and what it may do.

Keys are looked up in the database for every request, so that a revoked key ends at once; requests that arrive while a
look-up is on its way share the next one. Enqueues, of which there are most, are looked up along with the call that
stores their jobs: such a request goes by what was known of its key within the last second, and that call refuses it.
"""

import asyncio
import functools
import hmac
import ipaddress
import math
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Literal

from pgqueue import calls_rest
from pgqueue.api.problems import CrossSite, Forbidden, Unauthenticated
from pgqueue.api.rounds import Rounds
from pgqueue.errors import PgqueueError, RateLimitedError

Scope = Literal["submit", "read", "operate", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("submit", "read", "operate", "admin")
_INCLUDED: Final[dict[str, frozenset[str]]] = {
    "submit": frozenset({"submit"}),
    "read": frozenset({"read"}),
    "operate": frozenset({"operate", "read"}),
    "admin": frozenset(SCOPES),
}
GIVE_A_KEY: Final = "give a key: Authorization: Bearer KEY"
_PREFIX: Final = "pgq_"
_SHOWN: Final = 12
_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_NOTE_USE_EVERY: Final = 30.0
_FORGET_TOKENS_AFTER: Final = 1.0
_KNOWN_FOR: Final = 1.0
RunCall = Callable[..., Awaitable[Any]]
_Found = tuple[bool, dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. `name` is None for a local request to an API without keys; `digest` is the hash of the key."""

    name: str | None
    scopes: frozenset[str]
    rate: int | None = None
    digest: bytes | None = None

    @property
    def actor(self) -> str:
        """Who the audit says it was."""
        return f"key {self.name}" if self.name is not None else "api"

    def require(self, scope: str) -> None:
        """Raise Forbidden unless the identity has a scope."""
        if scope not in self.scopes:
            raise Forbidden(f"this needs a key with the scope {scope}", required_scope=scope)


EVERYBODY: Final = Identity(None, frozenset(SCOPES))


def new_key() -> tuple[str, bytes, str]:
    """Return a new key, its SHA-256, and the beginning of it that may be shown later."""
    key = _PREFIX + secrets.token_urlsafe(32)
    return key, hash_of(key), key[:_SHOWN]


def hash_of(key: str) -> bytes:
    """Return the SHA-256 of a key, which is all that is stored: a key has 256 random bits, so it needs no salt."""
    return sha256(key.encode()).digest()


@functools.lru_cache(maxsize=1024)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_local_address(host: str) -> bool:
    """Say whether a host is an address that only this machine reaches."""
    address = _address(host)
    if address is None:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def is_local(host: str | None) -> bool:
    """Say whether a peer is on this machine; what is no address is a socket file or a test client."""
    return host is None or _address(host) is None or is_local_address(host)


@functools.lru_cache(maxsize=1024)
def _names_this_machine(host: str) -> bool:
    """Say whether a Host header names this machine and not a site that resolves to it."""
    name = _without_port(host).lower()
    return name == "localhost" or name.endswith(".localhost") or is_local_address(name)


class Access:
    """Decides about requests. `hosts`: names besides this machine's own under which an API without keys is reached."""

    def __init__(self, run: RunCall, hosts: frozenset[str] = frozenset()) -> None:
        """`run` runs a call of pgqueue.calls."""
        self._run = run
        self._hosts = hosts
        self._lookups = Rounds(self._check)
        #: Whether there was a key at the last look; None: nobody has looked.
        self.any_key: bool | None = None
        self._tokens: dict[str, _Tokens] = {}
        #: What was found under a hash, None for no key, and when; only of keys that were in force then.
        self._known: dict[bytes | None, tuple[float, dict[str, Any] | None]] = {}
        self._used: set[str] = set()
        self._noted_at = 0.0
        self._noting: asyncio.Task[None] | None = None

    async def identify(self, scope: Any, *, checked_later: bool = False) -> Identity:
        """Return who asks; raises Unauthenticated, CrossSite, RateLimitedError.

        checked_later: the handler checks the key again with what it does, so that a look a second ago is enough.
        """
        headers = {name: value for name, value in scope["headers"] if name in _LOOKED_AT}
        key = _bearer(headers.get(b"authorization"), headers.get(b"x-api-key"))
        digest = None if key is None else hash_of(key)
        found = await self._find(digest, checked_later)
        if found is not None:
            identity = _identity(found, digest)
            await self._keep_rate(identity)
            self._note_use(identity)
            return identity
        if key is not None:
            raise Unauthenticated("the key is unknown, revoked or expired")
        if self.any_key:
            raise Unauthenticated(GIVE_A_KEY)
        self._check_local(scope, headers)
        return EVERYBODY

    async def _check(self, digests: set[bytes | None]) -> Callable[[bytes | None], _Found]:
        """Look keys up; what is returned says whether there is any, and what the key of a hash is if it is in force."""
        known = await self._run(calls_rest.CHECK_KEYS, hashes=[digest for digest in digests if digest is not None])

        def found(digest: bytes | None) -> _Found:
            key = None
            for held, one in known["good"].items():
                if hmac.compare_digest(bytes.fromhex(held), digest or b""):
                    key = one
            return known["any"], key

        return found

    async def _find(self, digest: bytes | None, checked_later: bool) -> dict[str, Any] | None:
        if checked_later:
            at, known = self._known.get(digest, (-math.inf, None))
            if time.monotonic() - at < _KNOWN_FOR:
                return known
        self.any_key, found = await self._lookups.find(digest)
        if found is not None or (digest is None and not self.any_key):
            self._known[digest] = time.monotonic(), found
        else:
            self._known.pop(digest, None)
        return found

    async def ended(self, digests: Collection[bytes | None]) -> set[bytes | None]:
        """Return those of keys, None for no key, that are no longer let in; raises DatabaseUnavailable."""
        known = await self._run(calls_rest.CHECK_KEYS, hashes=[digest for digest in digests if digest is not None])
        good = {bytes.fromhex(held) for held in known["good"]}
        return {digest for digest in digests if (known["any"] if digest is None else digest not in good)}

    async def open_to_all(self) -> bool:
        """Say whether there is no key, so that every local request may do everything; raises DatabaseUnavailable."""
        self.any_key, _ = await self._lookups.find(None)
        return not self.any_key

    def _check_local(self, scope: Any, headers: dict[bytes, bytes]) -> None:
        peer = scope.get("client")
        if not is_local(peer[0] if peer else None) or not all(map(_is_here, _asked_for(scope["headers"]))):
            raise Unauthenticated("without any key only this machine is served; create one: pgqueue keys create NAME")
        host = headers.get(b"host", b"").decode("latin-1")
        if (
            peer
            and _address(peer[0]) is not None
            and not (_names_this_machine(host) or _without_port(host) in self._hosts)
        ):
            raise CrossSite(f"without any key requests must name this machine, not {host!r}, as their host")
        if scope["method"] not in _SAFE and headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
            raise CrossSite("a page of another site sent this")

    async def _keep_rate(self, identity: Identity) -> None:
        if identity.rate is None or identity.name is None:
            return
        tokens = self._tokens.setdefault(identity.name, _Tokens())
        await tokens.take(identity.name, identity.rate, self._run)

    def _note_use(self, identity: Identity) -> None:
        assert identity.name is not None
        self._used.add(identity.name)
        now = time.monotonic()
        if now - self._noted_at > _NOTE_USE_EVERY and self._noting is None:
            self._noted_at = now
            self._noting = asyncio.get_running_loop().create_task(self._note())

    async def _note(self) -> None:
        names, self._used = sorted(self._used), set()
        try:
            await self._run(calls_rest.KEYS_USED, names=names)
        except PgqueueError:
            # It is only for people; the next minute notes it.
            self._noted_at = 0.0
        finally:
            self._noting = None


_LOOKED_AT: Final = frozenset({b"authorization", b"x-api-key", b"host", b"sec-fetch-site"})


#: By which a proxy says for whom it asks.
_FORWARDED: Final = frozenset({b"x-forwarded-for", b"x-real-ip", b"forwarded"})
_FOR: Final = re.compile(r'(?:^|;)\s*for\s*=\s*"?([^";]*)', re.IGNORECASE)


def _asked_for(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[str]:
    """Give all for whom proxies say that they ask; an empty text for one that does not say it."""
    for name, value in headers:
        if name in _FORWARDED:
            for one in value.decode("latin-1").split(","):
                named = _FOR.search(one)
                yield one if name != b"forwarded" else named[1] if named else ""


def _is_here(node: str) -> bool:
    """Say whether what a proxy names is this machine; a made-up name is not."""
    return is_local_address(_without_port(node.strip()))


def _without_port(node: str) -> str:
    """Return the name or address of HOST, HOST:PORT or [ADDRESS]:PORT; a bare IPv6 address is one."""
    if node.startswith("["):
        return node[1:].partition("]")[0]
    return node.partition(":")[0] if node.count(":") == 1 else node


def _bearer(authorization: bytes | None, x_api_key: bytes | None) -> str | None:
    if authorization is not None:
        kind, _, key = authorization.decode("latin-1").partition(" ")
        if kind.lower() != "bearer" or not key.strip():
            raise Unauthenticated("Authorization must be: Bearer KEY")
        return key.strip()
    return None if x_api_key is None else x_api_key.decode("latin-1").strip()


def _identity(found: dict[str, Any], digest: bytes | None) -> Identity:
    scopes = frozenset[str]().union(*(_INCLUDED[scope] for scope in found["scopes"]))
    return Identity(found["name"], scopes, found["rate"], digest)


class _Tokens:
    """What one process has leased of a key's rate. Processes share the bucket in the database."""

    def __init__(self) -> None:
        self._left = 0
        self._leased_at = 0.0
        self._empty_until = 0.0
        self._turn = asyncio.Lock()

    async def take(self, name: str, rate: int, run: RunCall) -> None:
        """Use one token; raises RateLimitedError."""
        async with self._turn:
            now = time.monotonic()
            if now - self._leased_at > _FORGET_TOKENS_AFTER:
                self._left = 0
            if self._left == 0:
                if now < self._empty_until:
                    raise _too_many(rate, self._empty_until - now)
                # A tenth of a second's worth: few enough that processes share fairly, many enough to ask seldom.
                granted, retry_ms = await run(
                    calls_rest.LEASE_TOKENS, bucket=f"key:{name}", per_second=rate, wanted=max(1, rate // 10)
                )
                if granted == 0:
                    self._empty_until = now + retry_ms / 1000
                    raise _too_many(rate, retry_ms / 1000)
                self._left, self._leased_at = granted, now
            self._left -= 1


def _too_many(rate: int, seconds: float) -> RateLimitedError:
    return RateLimitedError(f"this key may send {rate} requests a second", retry_after=seconds)
