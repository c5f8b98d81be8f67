"""StatsD push: what one worker counted, and the state of the queue once for all workers, every ten seconds by UDP.

A host that is dead, or whose name means nothing, costs a warning now and then: names are looked up in a thread of their
own and at most once a minute, and no job ever waits for a packet.
"""

import asyncio
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from pgqueue import calls
from pgqueue.calls import Sample
from pgqueue.connections import Link
from pgqueue.counts import LIMITS, Count, Counts, Key, gained
from pgqueue.errors import ConfigError
from pgqueue.log import logger
from pgqueue.services import Service
from pgqueue.settings import Settings

_log: Final = logger("pgqueue.statsd")
EVERY: Final = 10.0
_LOOK_UP_EVERY: Final = 60.0
_PATIENCE: Final = 3.0
#: Bytes in a packet that no network cuts.
_PACKET: Final = 1400
_MOST_TIMES: Final = 200
_FAILED: Final = ("failed", "dead_letter")
_PROCESSED: Final = ("completed", "failed", "dead_letter", "cancelled", "snoozed")


def address(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`, `[v6]:port` or `host`; raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):
        host, port = text, "8125"
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"PGQUEUE_STATSD is {text!r}; it must be host:port")
    return host.strip("[]"), int(port)


class StatsD(Service):
    """Pushes every ten seconds. Gauges and jobs.submitted are of the whole queue: one of all workers has the turn."""

    name = "statsd"
    interval = EVERY

    def __init__(self, target: str, counts: Counts, dsn: str, settings: Settings) -> None:
        """Look nothing up yet. Raises ConfigError for a target that cannot be one."""
        super().__init__()
        self._host, self._port = address(target)
        self._counts = counts
        self._sent: dict[Key, Count] = {}
        self._link = Link(dsn, settings, "pgqueue statsd")
        self._socket: socket.socket | None = None
        self._looked_up_at = float("-inf")
        self._told_at = float("-inf")

    async def step(self) -> bool:
        """Push once."""
        sock = await self._open()
        if sock is None:
            return False
        now = self._counts.copy()
        lines = list(of_counts(gained(now, self._sent).values()))
        self._sent = now
        submitted = await self._link.call(calls.PUSH_TURN, every=EVERY * 0.9)
        if submitted is not None:
            samples = await self._link.call(calls.METRICS)
            lines += [f"jobs.submitted:{submitted}|c", *of_samples(samples)]
        self._push(sock, lines)
        return False

    async def close(self) -> None:
        """Push what is left of this worker's counts, and hang up."""
        self._link.close()
        if self._socket is not None:
            self._push(self._socket, of_counts(gained(self._counts.copy(), self._sent).values()))
            self._socket.close()

    def _push(self, sock: socket.socket, lines: Iterable[str]) -> None:
        for packet in packets(lines):
            try:
                sock.send(packet)
            except OSError as exc:
                # A port that nobody listens on: the next try may find somebody.
                self._warn(exc)

    async def _open(self) -> socket.socket | None:
        if self._socket is not None or time.monotonic() - self._looked_up_at < _LOOK_UP_EVERY:
            return self._socket
        self._looked_up_at = time.monotonic()
        try:
            self._socket = await _within(_PATIENCE, lambda: _connected(self._host, self._port))
        except (OSError, TimeoutError) as exc:
            self._warn(exc)
        return self._socket

    def _warn(self, exc: Exception) -> None:
        if time.monotonic() - self._told_at > 10 * _LOOK_UP_EVERY:
            self._told_at = time.monotonic()
            _log.warning(
                "StatsD cannot be reached; going on without", host=self._host, port=self._port, error=repr(exc)
            )


def _connected(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setblocking(False)
    sock.connect(where)
    return sock


async def _within(seconds: float, work: Callable[[], socket.socket]) -> socket.socket:
    """Do blocking work in a daemon thread, which a look-up that hangs may keep for as long as it likes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[socket.socket] = loop.create_future()

    def tell(result: socket.socket | None, fault: Exception | None) -> None:
        if not done.done():
            if result is not None:
                done.set_result(result)
            else:
                done.set_exception(fault or OSError("nothing found"))

    def run() -> None:
        result, fault = None, None
        try:
            result = work()
        except Exception as exc:
            fault = exc
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, result, fault)

    threading.Thread(target=run, name="pgqueue-look-up", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await done


def of_counts(counts: Iterable[Count]) -> Iterator[str]:
    """Give the lines of what one worker counted. Times are drawn from the histogram, at most 200 with their rate."""
    some = list(counts)
    processed = sum(count.outcomes.get(outcome, 0) for count in some for outcome in _PROCESSED)
    failed = sum(count.outcomes.get(outcome, 0) for count in some for outcome in _FAILED)
    if not processed:
        return
    yield f"jobs.processed:{processed}|c"
    yield f"jobs.failed:{failed}|c"
    buckets = [sum(count.durations[index] for count in some) for index in range(len(LIMITS) + 1)]
    total = sum(buckets)
    # Buckets of one sample are told by the mean, which is then exact.
    exact = total == 1
    rate = min(_MOST_TIMES / total, 1.0) if total else 1.0
    for index, number in enumerate(buckets):
        for _ in range(_part(number, rate)):
            seconds = sum(count.duration_seconds for count in some) if exact else _within_bucket(index)
            yield f"worker.processing_time_ms:{seconds * 1000:.3f}|ms" + (f"|@{rate:.6f}" if rate < 1 else "")


def _part(number: int, rate: float) -> int:
    """Return about number * rate, right on the average."""
    whole, rest = divmod(number * rate, 1)
    return int(whole) + (random.random() < rest)


def _within_bucket(index: int) -> float:
    low = LIMITS[index - 1] if index else 0.0
    high = LIMITS[index] if index < len(LIMITS) else low
    return random.uniform(low, high)


def of_samples(samples: list[Sample]) -> Iterator[str]:
    """Give the lines of the queue's gauges."""
    depth = sum(sample.value for sample in samples if sample.name == "pgqueue_queue_depth")
    dead = sum(sample.value for sample in samples if sample.name == "pgqueue_dead_letters")
    age = max((sample.value for sample in samples if sample.name == "pgqueue_queue_oldest_age_seconds"), default=0.0)
    busy = sum(sample.value for sample in samples if sample.name == "pgqueue_worker_utilization")
    workers = sum(_live(sample.labels) * sample.value for sample in samples if sample.name == "pgqueue_workers")
    yield f"queue.depth:{depth:.0f}|g"
    yield f"jobs.in_dlq:{dead:.0f}|g"
    yield f"queue.age_seconds:{age:.3f}|g"
    yield f"worker.utilization:{busy * 100:.2f}|g"
    yield f"worker.count:{workers:.0f}|g"


def _live(labels: Mapping[str, str]) -> bool:
    return labels["status"] in ("starting", "active", "idle")


def packets(lines: Iterable[str]) -> Iterator[bytes]:
    """Give the lines in packets, separated by newlines."""
    batch: list[str] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > _PACKET:
            yield "\n".join(batch).encode()
            batch, size = [], 0
        batch.append(line)
        size += len(line) + 1
    if batch:
        yield "\n".join(batch).encode()
