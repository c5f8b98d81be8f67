"""How connections speak HTTP: uvicorn's fast protocol, with a bound on what a request may send beside its body.

Clients may offer another protocol with a request, as Java's and curl's do HTTP/2. The parser takes such a request to
end with its head, and stops; so a new one is told the head without the offer, and goes on with what follows.
"""

from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a request's head, of its trailers, or of what stands between two parts of its body.
MOST_BESIDE_BODY: Final = 64 << 10
_OFFERS: Final = frozenset({b"upgrade", b"http2-settings"})


class BoundedProtocol(HttpToolsProtocol):
    """Gives up a connection that sends more than that, which the parser would gather without end."""

    #: What came since the last part of a body or whole request, of which the parser may have told nothing yet.
    _unread = 0
    #: The request's URL, headers and trailers.
    _named = 0
    _hosts = 0

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        self._unset_keepalive_if_required()
        self._unread += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")
            return
        if self._unread > MOST_BESIDE_BODY:
            self._refuse("The head of the request is too large.")

    def on_message_begin(self) -> None:
        """Note that a request begins."""
        self._named = self._hosts = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._name(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._name(len(name) + len(value))
        self._hosts += name.lower() == b"host"
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Serve the request, of which a body may follow; one with an offer is told anew."""
        if self._hosts > 1 or (self._hosts < 1 and self.parser.get_http_version() == "1.1"):
            # RFC 9112, section 3.2.
            raise ValueError("a request names one host")
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which the API bounds as a whole."""
        self._unread = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that a request has come whole."""
        if not self.parser.should_upgrade():
            self._unread = 0
            super().on_message_complete()

    def _refuse(self, why: str) -> None:
        self.logger.warning(why)
        self.send_400_response(why)

    def _name(self, size: int) -> None:
        self._named += size
        if self._named > MOST_BESIDE_BODY:
            # The parser raises it as its own.
            raise ValueError("the head of the request is too large")

    def _feed(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
            self.parser = httptools.HttpRequestParser(self)

    def _head_without_offer(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b",".join(word for word in value.split(b",") if word.strip().lower() not in _OFFERS)
            if name not in _OFFERS:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])
