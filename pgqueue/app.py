"""The app: what a user's program holds. A client that knows tasks and can run them."""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar, Unpack, overload

from pgqueue.alerts import with_webhooks
from pgqueue.client import Client
from pgqueue.errors import ConfigError
from pgqueue.job import priority_number
from pgqueue.maintenance import declaring
from pgqueue.maintenance import maintenance as all_maintenance
from pgqueue.middleware import Middleware
from pgqueue.process import run_process
from pgqueue.scheduler import Declarations
from pgqueue.settings import Settings
from pgqueue.supervisor import Supervisor, supervised
from pgqueue.tasks import Schedule, Task, TaskKeywords, Tasks, task_options
from pgqueue.worker import Worker, WorkerOptions

P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=Middleware)


class MakesTask(Protocol):
    """What `App.task` with options returns."""

    def __call__(self, function: Callable[P, R], /) -> Task[P, R]:
        """Return the task of a function."""


class App(Client):
    """Tasks, the client's verbs, and workers.

    app = App()  # PGQUEUE_DSN, or the embedded PostgreSQL

    @app.task("send_email", queue="mail", max_retries=5, timeout=30)
    async def send_email(job: Job, to: str) -> dict: ...

    await send_email.enqueue(to="a@example.com")
    app.run_worker()
    """

    def __init__(self, dsn: str | None = None, *, name: str | None = None, settings: Settings | None = None) -> None:
        """Open nothing yet. By `name` (without it: that of the module which makes the app) its schedules are known."""
        super().__init__(dsn, settings=settings)
        self.name: Final = name or _module(sys._getframe(1).f_globals)
        self.tasks: Final = Tasks()

    @overload
    def task(self, name: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, name: str | None = None, /, **options: Unpack[TaskKeywords]) -> MakesTask: ...
    def task(self, name: Any = None, /, **options: Unpack[TaskKeywords]) -> Any:
        """Declare a function as the task of job type `name` (without it: of the function's name).

        The options are those of TaskKeywords. Raises ConfigError for a name that another function has.
        """
        checked = task_options(options)

        def declare(function: Callable[..., Any]) -> Task[Any, Any]:
            task_name = name if isinstance(name, str) else function.__name__
            task: Task[Any, Any] = Task(task_name, function, checked, self, self.tasks.middlewares)
            self.tasks.add(task)
            return task

        return declare(name) if callable(name) else declare

    def middleware(self, function: M, /) -> M:
        """Have a generator function of the job, sync or async, run around every attempt of this app's tasks.

        @app.middleware
        def timed(job: Job):
            began = time.monotonic()  # before
            try:
                result = yield  # the attempt
            except BaseException as exc:
                job.log.error("failed", after=time.monotonic() - began)
            else:
                job.log.info("returned", result=result)

        Of several, the first one declared is outermost. They run where the task runs: sync ones must not block an async
        task's event loop; async ones of a sync task run in the worker's loop. A timeout, cancel or shutdown comes
        as the exception by which the task is stopped. What a middleware raises before its yield counts as raised by
        the task, which does not run; the signals (`Snooze`, `Cancel`) too. After its yield it can change nothing any
        more: what it raises or swallows there is without effect, and a fault is logged.
        """
        if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
            raise ConfigError(f"{function!r} is no middleware: it must be a generator function, sync or async")
        self.tasks.middlewares.append(function)
        return function

    def schedule(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        payload: Mapping[str, Any] | None = None,
        queue: str | None = None,
        priority: int | str | None = None,
        misfire: str | None = None,
        overlap: str | None = None,
    ) -> Callable[[Task[P, R]], Task[P, R]]:
        """Declare that a task recurs: the row of pgqueue.schedules `name` (without it: the task's name).

        Stands above `@app.task`. Workers of this app write the row, and remove it once the app no longer declares it.
        The jobs have the task's own queue, priority, max_retries, timeout and retry_policy. Raises InvalidJob for what
        cannot fire.
        """
        from pgqueue.cron import Cron

        Cron(cron, timezone)

        def declare(task: Task[P, R]) -> Task[P, R]:
            if not isinstance(task, Task):
                raise ConfigError("@app.schedule stands above @app.task")
            self.tasks.add_schedule(
                Schedule(
                    name=name or task.name,
                    cron=cron,
                    job_type=task.name,
                    timezone=timezone,
                    payload=task.bind(dict(payload or {})),
                    queue=queue or task.options.queue,
                    priority=task.options.priority if priority is None else priority_number(priority),
                    max_retries=task.options.max_retries,
                    retry_policy=task.options.retry_policy,
                    timeout=task.options.timeout,
                    misfire=misfire,
                    overlap=overlap,
                )
            )
            return task

        return declare

    def _task_options(self, job_type: str) -> Mapping[str, Any]:
        task = self.tasks.get(job_type)
        return {} if task is None else task.options.enqueue_options()

    def declarations(self) -> Declarations:
        """Return what keeps the schedules of this app in force, and removes those that it no longer declares."""
        return Declarations(self.name, self.tasks.schedules.values())

    def worker(
        self, *, maintenance: bool = True, settings: Settings | None = None, **options: Unpack[WorkerOptions]
    ) -> Worker:
        """Return a worker of this app's tasks; `await worker.run()` runs it in the present event loop.

        With `maintenance` it also sweeps, fires schedules, keeps partitions, evaluates alerts and sends them. Raises
        ConfigError without any task.
        """
        settings = settings or self.settings
        tasks = with_webhooks(self.tasks, self) if maintenance and len(self.tasks) else self.tasks
        made = Worker(tasks, self.dsn, settings, options)
        services = all_maintenance if maintenance else declaring
        made.services.extend(services(self.dsn, settings, self.declarations()))
        if settings.statsd:
            from pgqueue.statsd import StatsD

            made.services.append(StatsD(settings.statsd, made.tally, self.dsn, settings))
        return made

    def run_worker(
        self,
        *,
        maintenance: bool = True,
        processes: int = 1,
        watched: Iterable[Path] = (),
        **options: Unpack[WorkerOptions],
    ) -> int:
        """Run a worker until SIGTERM or SIGINT, drain it, and return the process's exit code.

        Owns the process: signal handlers, the event loop (uvloop when present), and its end within grace + 5 s. More
        than one of `processes`, or directories to be `watched` for changes, makes this process a supervisor of others
        that run the same command.
        """
        number = supervised()
        if number is None and (processes > 1 or watched):
            return Supervisor(processes, self.settings.grace, watched=watched).run()
        name = options.get("name")
        if name is not None and number is not None:
            options["name"] = f"{name}-{number}"
        return run_process(self.worker(maintenance=maintenance, **options))


def _module(namespace: Mapping[str, Any]) -> str:
    """Return the name of a module from its globals, that of a script included."""
    name = str(namespace.get("__name__"))
    if name != "__main__":
        return name
    spec = namespace.get("__spec__")
    return spec.name if spec is not None else Path(str(namespace.get("__file__", name))).stem
