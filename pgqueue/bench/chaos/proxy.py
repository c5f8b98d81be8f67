"""A TCP proxy that can be told to cut, swallow and delay, or to close one side without the other knowing."""

import contextlib
import select
import socket
import threading
import time
from typing import Final, Literal

Mode = Literal["pass", "swallow", "refuse", "half"]
_CHUNK: Final = 1 << 16


class _Pair:
    """A client's connection and its own to the server, each direction in a thread."""

    def __init__(self, proxy: "Proxy", client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.mute = False
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(proxy, source, target), daemon=True).start()

    def _pump(self, proxy: "Proxy", source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                select.select([source], [], [])
                while (proxy.mode == "swallow" or self.mute) and not proxy.closed:
                    time.sleep(0.02)
                    if source.fileno() < 0:
                        return
                data = source.recv(_CHUNK)
                if proxy.delay:
                    time.sleep(proxy.delay)
                if not data:
                    break
                target.sendall(data)
        if not self.mute:
            self.end()
            proxy.forget(self)

    def end(self) -> None:
        """Close both sides."""
        for one in (self.client, self.server):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def halve(self) -> None:
        """Let the server see an end of which the client hears nothing."""
        self.mute = True
        with contextlib.suppress(OSError):
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


class Proxy:
    """Listens on a port of 127.0.0.1 for a server that listens there too."""

    def __init__(self, target: int) -> None:
        """`target`: the server's port."""
        self.mode: Mode = "pass"
        self.delay = 0.0
        self.closed = False
        self._target = target
        self._pairs: set[_Pair] = set()
        self._guard = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=200)
        self.port: Final[int] = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="chaos-proxy", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                if self.mode == "refuse":
                    client.close()
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._guard:
                    self._pairs.add(_Pair(self, client, server))

    def forget(self, pair: _Pair) -> None:
        """A pair has ended."""
        with self._guard:
            self._pairs.discard(pair)

    def _all(self) -> list[_Pair]:
        with self._guard:
            return list(self._pairs)

    def cut(self) -> None:
        """End all connections at once."""
        for pair in self._all():
            pair.end()

    def halve(self) -> None:
        """Close the server's side of all connections; the clients' stay open and silent."""
        for pair in self._all():
            pair.halve()

    def heal(self) -> None:
        """Let through what comes from now on; connections that were halved end."""
        self.mode, self.delay = "pass", 0.0
        for pair in self._all():
            if pair.mute:
                pair.end()
                self.forget(pair)

    def close(self) -> None:
        """Stop listening and end everything."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()
