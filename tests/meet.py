"""How sessions and processes of a test meet: by facts that are seen, never by sleeping long enough."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import psycopg

P = ParamSpec("P")
T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float = 10.0, interval: float = 0.01) -> T:
    """Calls `predicate` until it returns something true, and returns that; fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"still {value!r} after {timeout:g} s"
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
