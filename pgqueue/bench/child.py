"""A client process of the benchmark: `python -m pgqueue.bench.child`, started by `children`.

It reads what to do as a line of JSON, connects, answers a line, waits for another one, works, answers what it did, and
stays until its stdin is closed.
"""

import json
import random
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final
from uuid import uuid4

from pgqueue import wire
from pgqueue.bench import statements
from pgqueue.bench.children import BenchError
from pgqueue.client import Client
from pgqueue.connections import SyncConnection, SyncPool, connect
from pgqueue.settings import Settings
from pgqueue.wire import IntArray, UuidArray

_TYPES: Final = ["text", "jsonb"]


def _timed(one: Callable[[int], object], seconds: float, rate: float | None = None) -> dict[str, Any]:
    """Do one after the other for so long, or `rate` a second; return how many there were and how long each took.

    With a rate each is timed from when it was due, so that one that keeps others waiting counts for these too. All
    times are in seconds.
    """
    latencies: list[float] = []
    # Clients that begin together must not all be due together.
    phase = random.random()
    began = at = time.perf_counter()
    until = began + seconds
    while at < until:
        if rate is not None:
            due = began + (len(latencies) + phase) / rate
            time.sleep(max(0.0, due - time.perf_counter()))
            at = due
        one(len(latencies))
        done = time.perf_counter()
        latencies.append(done - at)
        at = done
    return {"jobs": len(latencies), "seconds": at - began, "latencies": latencies}


def _in_threads(threads: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Do what `work` does in so many threads at once; return all that they did."""
    with ThreadPoolExecutor(threads) as pool:
        answers = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
    return {
        "jobs": sum(answer["jobs"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
        "latencies": [latency for answer in answers for latency in answer["latencies"]],
    }


def insert(dsn: str, plain: bool, seconds: float, rate: float | None = None) -> Callable[[], dict[str, Any]]:
    """Insert single jobs, or rows of a plain table, each in a transaction of its own; `rate`: so many a second."""
    connection = connect(dsn, Settings())
    statement = statements.PLAIN_INSERT_ONE if plain else statements.INSERT_ONE

    def one(number: int) -> None:
        connection.execute(statement, {"payload": f'{{"n": {number}}}'}, prepare=True)

    one(0)
    return lambda: _timed(one, seconds, rate)


def insert_pooled(dsn: str, threads: int, seconds: float) -> Callable[[], dict[str, Any]]:
    """Insert single jobs through one pool, from as many threads as it has connections."""
    pool = SyncPool(dsn, Settings(dsn=dsn, pool_size=threads))

    def one(number: int) -> None:
        with pool.connection() as connection:
            connection.execute(statements.INSERT_ONE, {"payload": f'{{"n": {number}}}'}, prepare=True)

    with ExitStack() as all_open:
        for _ in range(threads):
            connection = all_open.enter_context(pool.connection())
            connection.execute(statements.INSERT_ONE, {"payload": "{}"}, prepare=True)
    return lambda: _in_threads(threads, lambda: _timed(one, seconds))


def post(dsn: str, port: int, threads: int, seconds: float) -> Callable[[], dict[str, Any]]:
    """Post single jobs to the REST API of this machine, each thread over a connection of its own."""

    def work() -> dict[str, Any]:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:

            def one(number: int) -> None:
                # http.client would take longer over a request than the API itself.
                body = f'{{"job_type": "noop", "payload": {{"n": {number}}}}}'
                head = "POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                answer = b""
                while not _is_whole(answer):
                    part = connection.recv(65536)
                    if not part:
                        raise BenchError(f"the API hung up after {answer!r:.200}")
                    answer += part
                if not answer.startswith(b"HTTP/1.1 201 "):
                    raise BenchError(f"the API answered {answer!r:.200}")

            one(0)
            return _timed(one, seconds)

    return lambda: _in_threads(threads, work)


def _is_whole(answer: bytes) -> bool:
    """Say whether an answer, which must name its length, has come whole."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    length = head.lower().partition(b"content-length:")[2].split()
    if not length:
        raise BenchError(f"the API answered without a length: {answer!r:.200}")
    return len(body) >= int(length[0])


def enqueue(dsn: str, seconds: float) -> Callable[[], dict[str, Any]]:
    """Enqueue single jobs through the client."""
    client = Client(dsn, settings=Settings(dsn=dsn))

    def one(number: int) -> None:
        client.enqueue_sync("noop", {"n": number})

    one(0)
    return lambda: _timed(one, seconds)


def enqueue_many(dsn: str, jobs: int, batch: int) -> Callable[[], dict[str, Any]]:
    """Enqueue jobs through the client, a batch at a time."""
    client = Client(dsn, settings=Settings(dsn=dsn))
    client.enqueue_many_sync([{"job_type": "noop", "payload": {"n": 0}}])

    def work() -> dict[str, Any]:
        began = time.perf_counter()
        for first in range(0, jobs, batch):
            numbers = range(first, min(first + batch, jobs))
            client.enqueue_many_sync([{"job_type": "noop", "payload": {"n": number}} for number in numbers])
        return {"jobs": jobs, "seconds": time.perf_counter() - began}

    return work


def copy(dsn: str, plain: bool, jobs: int) -> Callable[[], dict[str, Any]]:
    """COPY jobs, or rows of a plain table, in one transaction."""
    connection = connect(dsn, Settings())
    statement = statements.PLAIN_COPY if plain else statements.COPY

    def work() -> dict[str, Any]:
        began = time.perf_counter()
        with connection.cursor() as cursor, cursor.copy(statement) as rows:
            rows.set_types(_TYPES)
            for number in range(jobs):
                rows.write_row(("noop", f'{{"n": {number}}}'))
        return {"jobs": jobs, "seconds": time.perf_counter() - began}

    return work


def pace(dsn: str, rate: float, seconds: float) -> Callable[[], dict[str, Any]]:
    """Insert single jobs at a steady rate; return their ids and when they were committed, by the server's clock."""
    connection = connect(dsn, Settings())
    statements.rows(connection, statements.CLOCK)

    def work() -> dict[str, Any]:
        job_ids: list[str] = []
        committed: list[float] = []
        began = time.perf_counter()
        for number in range(int(rate * seconds)):
            time.sleep(max(0.0, began + number / rate - time.perf_counter()))
            payload = f'{{"n": {number}}}'
            row = connection.execute(statements.INSERT_ONE_RETURNING, {"payload": payload}, prepare=True).fetchone()
            assert row is not None
            committed.append(statements.scalar(connection, statements.CLOCK))
            job_ids.append(str(row[0]))
        return {"jobs": len(job_ids), "seconds": time.perf_counter() - began, "ids": job_ids, "committed": committed}

    return work


def cycle(
    dsn: str, batch: int, jobs: int | None = None, job_types: list[str] | None = None
) -> Callable[[], dict[str, Any]]:
    """Claim and complete what is pending and do nothing in between, up to so many jobs; one is done before."""
    connection = connect(dsn, Settings())
    wire.read_raw(connection.adapters)
    worker_id = uuid4()
    # The first calls of a session plan their statements, at the price of hundreds of jobs.
    complete(connection, worker_id, claim(connection, worker_id, 1, job_types))

    def work() -> dict[str, Any]:
        done = 0
        began = time.perf_counter()
        while jobs is None or done < jobs:
            claimed = claim(connection, worker_id, batch, job_types)
            if not claimed:
                break
            done += complete(connection, worker_id, claimed)
        return {"jobs": done, "seconds": time.perf_counter() - began}

    return work


def claim(connection: SyncConnection, worker_id: object, jobs: int, job_types: list[str] | None) -> list[Any]:
    """Claim jobs; return their ids and attempts."""
    parameters = {"worker_id": worker_id, "jobs": jobs, "job_types": job_types}
    return connection.execute(statements.CLAIM, parameters, prepare=True, binary=True).fetchall()


def complete(connection: SyncConnection, worker_id: object, claimed: list[Any]) -> int:
    """Complete claimed jobs without results; return how many were accepted."""
    parameters = {
        "worker_id": worker_id,
        "job_ids": UuidArray([job_id for job_id, _ in claimed]),
        "attempts": IntArray([attempts for _, attempts in claimed]),
    }
    return len(connection.execute(statements.COMPLETE, parameters, prepare=True, binary=True).fetchall())


_ROLES: Final[dict[str, Callable[..., Callable[[], dict[str, Any]]]]] = {
    role.__name__: role for role in (insert, insert_pooled, post, enqueue, enqueue_many, copy, pace, cycle)
}


def main() -> None:
    """Do what the lines on stdin say."""
    told = json.loads(sys.stdin.readline())
    work = _ROLES[told.pop("role")](**told)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    processor = time.process_time()
    answer = work()
    print(json.dumps(answer | {"processor": time.process_time() - processor}), flush=True)
    # The server's process of our session is looked at before we go.
    sys.stdin.readline()


if __name__ == "__main__":
    main()
