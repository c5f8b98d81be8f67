"""How sessions and processes of a test meet: by facts that are seen, never by sleeping long enough."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import psycopg

P = ParamSpec("P")
T = TypeVar("T")


_LOOK_EVERY = 0.05


class _Stalls:
    """Counts for how long the machine stood still, by a thread that should wake often."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._seen: float | None = None
        self._lost = 0.0

    def running_time(self) -> float:
        with self._guard:
            if self._seen is None:
                threading.Thread(target=self._watch, name="stalls", daemon=True).start()
            return self._look()

    def _look(self) -> float:
        now = time.monotonic()
        if self._seen is not None:
            self._lost += max(now - self._seen - 4 * _LOOK_EVERY, 0.0)
        self._seen = now
        return now - self._lost

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY)
            with self._guard:
                self._look()


_stalls = _Stalls()


def running_time() -> float:
    """As time.monotonic(), without the time for which this machine, or this process, did not run at all."""
    return _stalls.running_time()


def wait_until(predicate: Callable[[], T], timeout: float = 10.0, interval: float = 0.01) -> T:
    """Calls `predicate` until it returns something true, and returns that; fails after `timeout` seconds."""
    deadline = running_time() + timeout
    while not (value := predicate()):
        assert running_time() < deadline, f"still {value!r} after {timeout:g} s"
        time.sleep(interval)
    return value


def wait_for_lock(connection: psycopg.Connection[Any], pid: int, timeout: float = 10.0) -> list[int]:
    """Waits until the backend `pid` waits for a lock, looking from `connection`; the backends that hold it up.

    pg_stat_activity would do only outside of a transaction, since a transaction keeps what it saw of it.
    """

    def blockers() -> list[int]:
        row = connection.execute("select pg_blocking_pids(%s)", [pid]).fetchone()
        return list(row[0]) if row else []

    return wait_until(blockers, timeout)


def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Runs `function` in a thread of its own, as a statement that will wait for a lock must be."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
