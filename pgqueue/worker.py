"""The worker: claims jobs in batches, runs their tasks, and drains when told to. One process is a complete system.

Five connections: one claims, one writes what came of attempts, one listens, one renews leases and one sweeps; the last
two live in a thread of their own. Tasks that ask for a transaction take theirs from pools of `pool_size`.
"""

import asyncio
import os
import socket
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Final, Literal, TypedDict
from uuid import UUID, uuid4

import pgqueue
from pgqueue import calls
from pgqueue.attempt import LATE, UNBEGUN, Completed, Failed, Outcome, Released, Stop, Throttled
from pgqueue.claimer import Claimer
from pgqueue.connections import Link
from pgqueue.counts import Counts, Sender
from pgqueue.errors import ConfigError, DatabaseUnavailable, PgqueueError, SchemaOutdated
from pgqueue.executor import Executor
from pgqueue.finisher import Finisher
from pgqueue.heartbeat import DEFAULT_TIMEOUT, Heartbeat
from pgqueue.held import Held
from pgqueue.idling import Idling
from pgqueue.job import ClaimedJob, priority_number
from pgqueue.listener import Listener, bell
from pgqueue.log import logger
from pgqueue.membership import Membership
from pgqueue.services import Background, Service
from pgqueue.settings import Settings
from pgqueue.tasks import Tasks
from pgqueue.transactions import JobServices

_log: Final = logger("pgqueue.worker")
#: Up to so many workers that take the same jobs look for lost bells and sweep each as if alone; more do it less often.
ALONE: Final = 10
CROWD_AT_MOST: Final = 20.0


class WorkerOptions(TypedDict, total=False):
    """What one worker is told beside the settings.

    queues and priorities None: all; concurrency None: the setting; until_empty: end when nothing is left to claim.
    partitions "assigned": claim only from this worker's part of the shards, which the live workers of the group divide
    anew whenever one joins, leaves or gives no sign of life for 10 s; "all", the default: from every shard.
    """

    queues: Sequence[str] | None
    priorities: Sequence[int | str] | None
    concurrency: int | None
    group: str | None
    partitions: Literal["all", "assigned"]
    name: str | None
    until_empty: bool


class Worker:
    """One process's worker. `run` works until `request_stop`, then drains."""

    def __init__(self, tasks: Tasks, dsn: str, settings: Settings, options: WorkerOptions) -> None:
        """Open nothing yet. Raises ConfigError for tasks or options that leave nothing to do."""
        if not len(tasks):
            raise ConfigError("the app has no tasks: a worker claims only job types that have one")
        self.worker_id: Final = uuid4()
        self.name: Final = options.get("name") or f"{socket.gethostname()}:{os.getpid()}"
        self.concurrency: Final = options.get("concurrency") or settings.concurrency
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; it must be 1 or more")
        queues, priorities = options.get("queues"), options.get("priorities")
        self.queues: Final = list(queues) if queues else None
        self.priorities: Final = [priority_number(given) for given in priorities] if priorities else None
        self.group: Final = options.get("group")
        self._membership = self._member(options.get("partitions", "all"))
        self.settings: Final = settings
        self.services: Final[list[Service]] = []
        self.held: Final[dict[bytes, Held]] = {}
        self.fault: PgqueueError | None = None
        self.recycle = False
        self._until_empty = options.get("until_empty", False)
        self._tasks = tasks
        self._dsn = dsn
        self._job_types = tasks.names
        self._claims = Link(dsn, settings, "pgqueue worker")
        self._finisher = Finisher(Link(dsn, settings, "pgqueue finisher"), self.worker_id, self._settled)
        self._idling = Idling(self._claims, settings, self.worker_id, self.queues, self._job_types, self.priorities)
        self._claiming: Final[dict[str, Any]] = {
            "worker_id": self.worker_id,
            "queues": self.queues,
            "lease": settings.lease,
            "job_types": self._job_types,
            "priorities": self.priorities,
            "shards": None if self._membership is None else [],
        }
        self.tally: Final = Counts()
        self._busy_seconds = 0.0
        self._sender = Sender(self.tally, self.worker_id, self._busy, self.concurrency)
        self._heartbeat = Heartbeat(
            dsn,
            settings,
            self.worker_id,
            self.held,
            self._beat,
            self._life,
            self._sender,
            self._membership,
            self._signed,
            self._given_back,
        )
        self._cancels: dict[bytes, float] = {}
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._quiet = asyncio.Event()
        self._draining = False
        self.stopping = False
        self.counts: Final = {"processed": 0, "failed": 0}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._executor: Executor
        self._claimer: Claimer
        self._background: Background
        self._services: JobServices
        self._listener: Listener

    # Life ------------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until told to stop, then drain within the grace. Raises a PgqueueError if it cannot begin to work."""
        self._loop = asyncio.get_running_loop()
        self._executor = Executor(
            self.concurrency, timeout_of=self._timeout_of, ended=self._ended, gone=self._heartbeat.let_go.append
        )
        self._services = JobServices(self.held, self.worker_id, self._finisher, self._dsn, self.settings)
        self._claimer = Claimer(
            self._claims,
            self._idling,
            self._executor,
            self._finisher,
            concurrency=self.concurrency,
            parameters=self._claiming,
            admit=self._admit,
            dropped=self._dropped,
            empty=self._none_claimed,
        )
        self._finisher.along = self._claimer
        self._background = Background([self._heartbeat, *self.services], self._broken_background)
        jobs: list[asyncio.Task[None]] = []
        try:
            await self._register()
            self._background.start()
            if self.settings.wake == "notify":
                channel = calls.wake_channel(self.worker_id)
                self._listener = Listener(self._dsn, self.settings, [channel], self._heard)
                jobs += [self._part("listener", self._listener.run()), self._spawn(self._test(self._listener))]
            jobs.append(self._part("finisher", self._finisher.run()))
            claiming = self._part("claimer", self._claimer.run())
            jobs.append(claiming)
            _log.info("worker started", name=self.name, worker_id=str(self.worker_id), job_types=len(self._job_types))
            await self._stop.wait()
            await self._drain(claiming)
        finally:
            self._stop.set()
            for job in jobs:
                job.cancel()
            await asyncio.wait(jobs, timeout=1.0) if jobs else None
            self._executor.close()
            self._services.close()
            self._claims.close()
            self._finisher.close()
            await asyncio.to_thread(self._background.stop, 1.0)
            if jobs:
                _log.info("worker stopped", name=self.name, **self.counts)
        if self.fault is not None:
            raise self.fault

    def request_stop(self) -> None:
        """Begin to drain; the second time, hurry. May be called from any thread and from signal handlers."""
        event = self._hurry if self.stopping else self._stop
        self.stopping = True
        if self._loop is None:
            event.set()
        else:
            self._loop.call_soon_threadsafe(event.set)

    @property
    def shards(self) -> list[int] | None:
        """The shards to claim from, None for all."""
        shards: list[int] | None = self._claiming["shards"]
        return shards

    @shards.setter
    def shards(self, shards: list[int] | None) -> None:
        self._claiming["shards"] = shards
        if self._loop is not None:
            # What lies in a shard that is new here has been waiting for long enough.
            self._loop.call_soon_threadsafe(self._idling.bell.set)

    def faults(self) -> dict[str, str]:
        """Return what is wrong now, by the part of the worker that it is in; empty when all is well."""
        return {service.name: service.fault for service in [self._heartbeat, *self.services] if service.fault}

    def _member(self, partitions: str) -> Membership | None:
        if partitions not in ("all", "assigned"):
            raise ConfigError(f"partitions is {partitions!r}; it must be 'all' or 'assigned'")
        if partitions == "all":
            return None
        if self.group is None:
            raise ConfigError("assigned partitions need a group: its workers divide them")
        return Membership(self.worker_id, self.group, lambda shards: setattr(self, "shards", shards))

    async def _register(self) -> None:
        pause = 0.1
        while True:
            try:
                found = await self._claims.call(calls.SCHEMA_VERSION)
                if found < calls.NEEDED_VERSION:
                    raise SchemaOutdated(
                        f"the schema is at {found}, and this release needs {calls.NEEDED_VERSION}; run: pgqueue migrate"
                    )
                await self._claims.call(calls.WORKER_STARTED, worker_id=self.worker_id, **self._life()[1])
                return
            except DatabaseUnavailable as exc:
                _log.warning("the database cannot be reached; trying again", error=str(exc))
            try:
                async with asyncio.timeout(pause):
                    await self._stop.wait()
                return
            except TimeoutError:
                pause = min(pause * 2, 1.0)

    async def _test(self, listener: Listener) -> None:
        link = Link(self._dsn, self.settings, "pgqueue worker")
        try:
            await listener.test(link.call)
        except ConfigError as exc:
            self.fault = exc
            self._stop.set()
        except PgqueueError as exc:
            _log.debug("the bell was not tested", error=str(exc))
        finally:
            link.close()

    async def _drain(self, claiming: "asyncio.Task[None]") -> None:
        """Let what runs end within the grace, give back the rest, and write down everything."""
        self._draining = True
        self._heartbeat.sign_soon()
        deadline = time.monotonic() + self.settings.grace
        self._claimer.stop()
        # A claim that is under way still brings jobs, to be given back.
        await asyncio.wait([claiming], timeout=2.0)
        # Two calls at once must not share the connection.
        leaving = self._spawn(self._idling.away()) if claiming.done() else None
        await self._quiet_within(deadline - time.monotonic())
        self._hurry.clear()
        for held in list(self._executor.running):
            self._executor.stop(held, Stop.SHUTDOWN)
        await self._quiet_within(1.0)
        for held in list(self._executor.running):
            self._finisher.add(held, Released(started=True))
        # What has ended would run again: as long as there is time, or until somebody hurries.
        patience = max(deadline - time.monotonic(), 2.0)
        waits = [self._spawn(self._finisher.drained()), self._spawn(_set(self._hurry))]
        await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        try:
            async with asyncio.timeout(2.0):
                await self._finisher.drained()
                # A sign of life must not come after the last word.
                await asyncio.to_thread(self._background.stop, 1.0)
                if leaving is not None:
                    leaving.cancel()
                    await asyncio.wait([leaving])
                await self._sender.flush_last(self._claims)
                await self._claims.call(calls.WORKER_STOPPED, worker_id=self.worker_id)
        except (TimeoutError, PgqueueError) as exc:
            _log.warning("stopped without writing everything down", waiting=self._finisher.waiting, error=repr(exc))

    async def _quiet_within(self, seconds: float) -> None:
        """Return when nothing runs any more, when told to hurry, or after so many seconds."""
        if not self._executor.running:
            return
        waits = [self._spawn(_set(self._quiet)), self._spawn(_set(self._hurry))]
        await asyncio.wait(waits, timeout=max(seconds, 0.0), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return asyncio.get_running_loop().create_task(work)

    def _part(self, name: str, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Begin what the worker cannot be without: a worker that has lost it ends, rather than hold jobs in vain."""
        part = self._spawn(work)

        def ended(part: "asyncio.Task[None]") -> None:
            self._broken(name, asyncio.CancelledError() if part.cancelled() else part.exception())

        part.add_done_callback(ended)
        return part

    def _broken(self, part: str, exc: BaseException | None) -> None:
        if self._stop.is_set():
            return
        self.fault = PgqueueError(f"the {part} ended ({exc!r}); the process ends, to be started anew")
        self._stop.set()

    def _broken_background(self, exc: BaseException) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._broken, "background thread", exc)

    def _life(self) -> tuple[dict[str, Any], dict[str, Any]]:
        status = "draining" if self._draining else "active" if self.held else "idle"
        seen = {"status": status, "jobs_processed": self.counts["processed"], "jobs_failed": self.counts["failed"]}
        started = {
            "name": self.name,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "group_name": self.group,
            "queues": self.queues,
            "job_types": self._job_types,
            "priorities": self.priorities,
            "concurrency": self.concurrency,
            "version": pgqueue.__version__,
        }
        return seen, started

    # Ends ------------------------------------------------------------------------------------------------------------

    def _admit(self, rows: Sequence[ClaimedJob], claimed_at: float) -> list[Held]:
        known, services, cancels = self.held, self._services, self._cancels
        task, some, now = self._tasks[rows[0].job_type], [], time.monotonic()
        shortest = min([row.lease_expires_at - row.updated_at for row in rows]) * 1e-6
        lapses_at = claimed_at + shortest
        for row in rows:
            if row.job_type != task.name:
                task = self._tasks[row.job_type]
            held = Held(row, task, services, now, lapses_at, claimed_at)
            key = row.job_id
            if key in known:
                self._executor.stop(known[key], Stop.LOST)
            known[key] = held
            if cancels and cancels.pop(key, 0.0):
                held.stop = Stop.CANCEL
            some.append(held)
        if shortest < self._heartbeat.shortest_lease or now > lapses_at:
            self._heartbeat.nudge()
        return some

    def _dropped(self, held: Held) -> None:
        self._ended(held, held.raised(asyncio.CancelledError()))

    def _none_claimed(self) -> None:
        if self._until_empty and not self.held:
            self._stop.set()

    def _ended(self, held: Held, outcome: Outcome) -> None:
        if outcome is LATE:
            self._left(held)
            return
        held.outcome = outcome
        duration = None
        if held.began:
            duration = held.took = time.monotonic() - held.began
            self._busy_seconds += duration
        self.counts["processed"] += 1
        if type(outcome) is not Completed:
            self._ended_otherwise(held, outcome)
        self._finisher.add(held, outcome)
        self._claimer.ended(duration)
        if self._draining and not self._executor.running:
            self._quiet.set()

    def _ended_otherwise(self, held: Held, outcome: Outcome) -> None:
        if isinstance(outcome, Failed):
            self.counts["failed"] += 1
        elif isinstance(outcome, Throttled):
            self._claimer.give_back_type(held.task)
        if len(self._executor.abandoned) > max(16, 2 * self.concurrency) and not self.recycle:
            _log.error("too many threads did not stop when told to; this process starts anew")
            self.recycle = True
            self._stop.set()

    def _left(self, held: Held) -> None:
        """Leave a job that was too late to begin to the heartbeat: it renews the lease, finds it lost, or gives up."""
        held.deadline = 0.0
        self._heartbeat.nudge()
        self._claimer.postpone(held)
        self._claimer.ended(None)
        if self._draining and not self._executor.running:
            self._quiet.set()

    def _given_back(self, key: bytes, attempt: int) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._gone_back, key, attempt)

    def _gone_back(self, key: bytes, attempt: int) -> None:
        held = self.held.get(key)
        if held is not None and held.given_back and held.number == attempt:
            self._settled([held], "pending")

    def _settled(self, some: Sequence[Held], status: str | None) -> None:
        known = self.held
        for held in some:
            key = held.claimed.job_id
            if known.get(key) is held:
                del known[key]
        self.tally.settled([held.claimed for held in some], status, [held.took for held in some])
        if status != "completed":
            for held in some:
                self._settled_otherwise(held, status)

    def _settled_otherwise(self, held: Held, status: str | None) -> None:
        outcome = held.outcome
        if isinstance(outcome, Failed) and status is not None:
            held.job.log.warning(
                "job failed", status=status, error=f"{outcome.error['type']}: {outcome.error['message']:.500}"
            )
        elif status is None and outcome != UNBEGUN:
            held.job.log.warning("the lease was lost; what this attempt did is not recorded")
        if held in self._heartbeat.on_hold and not held.abandoned:
            self._heartbeat.let_go.append(held)
        if held.abandoned and status == "failed":
            if held in self._executor.abandoned:
                self._heartbeat.on_hold[held] = time.monotonic()
            else:
                self._heartbeat.let_go.append(held)

    def _busy(self) -> float:
        return self._busy_seconds + sum(held.elapsed() for held in list(self._executor.running) if held.began)

    # What others tell ------------------------------------------------------------------------------------------------

    def _timeout_of(self, queue: str) -> float:
        return self._heartbeat.timeouts.get(queue, DEFAULT_TIMEOUT)

    def _beat(self, key: bytes, attempt: int, reason: str) -> None:
        if self._loop is not None:
            stop = Stop.LOST if reason == "lost" else Stop.CANCEL
            self._loop.call_soon_threadsafe(self._beaten, key, attempt, stop)

    def _signed(self, alike: int, was_gone: bool) -> None:
        crowd = min(max(alike / ALONE, 1.0), CROWD_AT_MOST)
        # Those that looked in between are gone: nobody may look before this one's long sleep ends.
        alone = crowd < self._idling.crowd / 2
        self._idling.crowd = crowd
        self._idling.alike = alike
        for service in self.services:
            service.crowd = crowd
            if alone:
                service.nudge()
        if self._loop is not None:
            if was_gone:
                self._loop.call_soon_threadsafe(self._idling.forget)
            if alone or was_gone:
                self._loop.call_soon_threadsafe(self._idling.bell.set)

    def _beaten(self, key: bytes, attempt: int, reason: Stop) -> None:
        held = self.held.get(key)
        if held is not None and held.number == attempt:
            self._executor.stop(held, reason)

    def _heard(self, channel: str, payload: str) -> None:
        key = cancelled(payload)
        if key is None:
            if not channel:
                self._idling.listens(self._listener.process)
            rung = bell(payload)
            self._idling.rang(rung)
            if self._membership is not None and rung is not None:
                self._membership.relay()
                self._heartbeat.nudge()
            return
        held = self.held.get(key)
        if held is not None:
            self._executor.stop(held, Stop.CANCEL)
            return
        # It may be on its way here in the answer to a claim.
        now = time.monotonic()
        self._cancels = {known: at for known, at in self._cancels.items() if now - at < 60.0} | {key: now}


def cancelled(payload: str) -> bytes | None:
    """Return the key of the job that is to be cancelled; None for what says something else."""
    verb, _, job_id = payload.partition(" ")
    if verb != "cancel":
        return None
    try:
        return UUID(job_id).bytes
    except ValueError:
        return None


async def _set(event: asyncio.Event) -> None:
    await event.wait()
