"""The wire of the client over HTTP: kept-alive connections, tries, and problems as errors. Standard library only."""

import http.client
import json
import random
import select
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import msgspec

from pgqueue import __version__, errors
from pgqueue.errors import ConfigError, DatabaseUnavailable, InvalidJob, PgqueueError

#: What a connection that breaks raises.
BROKEN: Final = (OSError, http.client.HTTPException)
_by_problem: Final[dict[str, type[PgqueueError]]] = {
    kind.problem_type: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, PgqueueError) and not issubclass(kind, errors.TaskSignal)
}


class ApiRefused(PgqueueError):
    """The API refused a request for a reason that only HTTP has. `status`, and the whole `problem`."""

    problem_type = "api-refused"
    title = "The API refused the request"

    def __init__(self, message: str, status: int, problem: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.status = status
        self.problem = problem


class Reply(NamedTuple):
    """An answer that is no problem."""

    status: int
    content: bytes


class Wire:
    """Sends requests to one API. For any number of threads."""

    def __init__(self, url: str, key: str | None, tries: int, timeout: float) -> None:
        """Open nothing yet; raises ConfigError for an impossible URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL is {url!r}; it must be such as http://127.0.0.1:8080")
        self.url = url
        self.host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._headers = {"User-Agent": f"pgqueue/{__version__}", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self.tries = max(1, tries)
        self._timeout = timeout
        self._idle: list[http.client.HTTPConnection] = []
        self._guard = threading.Lock()
        self._closed = False

    def close(self) -> None:
        """Close the connections."""
        self._closed = True
        with self._guard:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def send(self, method: str, target: str, body: bytes | None, repeatable: bool, wait: float = 0.0) -> Reply:
        """Send a request, again where that makes sense, and return its answer; raises what a problem stands for."""
        left = pauses(self.tries)
        while True:
            sent = False
            try:
                connection, fresh = self._take(self._timeout + wait)
                try:
                    if fresh:
                        connection.connect()
                    sent = True
                    connection.request(method, self._prefix + target, body, self._sent(body))
                    answer = connection.getresponse()
                    content = answer.read()
                except BaseException:
                    connection.close()
                    raise
                self._give(connection, answer)
            except BROKEN as exc:
                pause = next(left, None)
                if pause is None or (sent and not repeatable):
                    raise DatabaseUnavailable(f"the API at {self.host} cannot be reached: {exc}") from exc
                time.sleep(pause)
                continue
            if answer.status < 400:
                return Reply(answer.status, content)
            error = _error(answer.status, answer.getheader("Retry-After"), content)
            pause = next(left, None) if answer.status in (429, 502, 503, 504) else None
            if pause is None:
                raise error
            time.sleep(max(pause, min(error.retry_after or 0.0, self._timeout)))

    def _sent(self, body: bytes | None) -> dict[str, str]:
        return self._headers if body is None else {**self._headers, "Content-Type": "application/json"}

    def _take(self, timeout: float) -> tuple[http.client.HTTPConnection, bool]:
        if self._closed:
            raise ConfigError("the client is closed")
        while self._idle:
            with self._guard:
                connection = self._idle.pop() if self._idle else None
            if connection is None or connection.sock is None:
                continue
            if select.select([connection.sock], [], [], 0)[0]:
                # The server has closed it meanwhile.
                connection.close()
                continue
            connection.sock.settimeout(timeout)
            return connection, False
        if self._tls is not None:
            return http.client.HTTPSConnection(self.host, self._port, timeout=timeout, context=self._tls), True
        return http.client.HTTPConnection(self.host, self._port, timeout=timeout), True

    def _give(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        with self._guard:
            if not self._closed and not answer.will_close:
                self._idle.append(connection)
                return
        connection.close()

    def stream(self, target: str) -> Iterator[dict[str, Any]]:
        """Give the data of server-sent events until the stream ends or breaks."""
        connection, _ = self._take(self._timeout + 30)
        try:
            connection.request("GET", self._prefix + target, headers={**self._headers, "Accept": "text/event-stream"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise _error(answer.status, answer.getheader("Retry-After"), answer.read())
            for line in answer:
                if line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    yield event
        finally:
            connection.close()


def pauses(tries: int) -> Iterator[float]:
    """Give the pauses between tries: about 0.1 s, 0.2 s, 0.4 s and so on, 5 s at most."""
    for attempt in range(tries - 1):
        yield min(0.1 * 2**attempt, 5.0) * random.uniform(0.8, 1.2)


def _error(status: int, retry_after: str | None, content: bytes) -> PgqueueError:
    """Return the error that a problem stands for."""
    try:
        problem = msgspec.json.decode(content)
        kind = str(problem["type"]).rpartition(":")[2]
        message = str(problem["detail"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        problem, kind, message = {}, "", f"the API answered {status}"
    found = _by_problem.get(kind) or (InvalidJob if status == 422 else DatabaseUnavailable if status >= 502 else None)
    error = found(message) if found is not None else ApiRefused(message, status, problem)
    seconds = problem.get("retry_after", retry_after)
    if seconds is not None:
        error.retry_after = float(seconds)
    return error
