"""Tasks: the Python functions of job types, and the registry an app keeps of them."""

import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from pgqueue.errors import ConfigError, InvalidPayload, UnknownTask, as_seconds
from pgqueue.job import EnqueuedJob, Job, priority_number
from pgqueue.middleware import Middleware
from pgqueue.typed import arguments_of

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
F_co = TypeVar("F_co", covariant=True)
ExceptionTypes = tuple[type[BaseException], ...]
_ABSENT: Final = object()


class EnqueueOptions(TypedDict, total=False):
    """How a job is enqueued. None, and what is left out, means the task's own setting, else the default.

    priority is 0 to 3 or a name; delay, timeout are seconds or timedelta; datetimes must name their zone;
    retry_policy has base_delay_ms, max_delay_ms, backoff_multiplier and jitter; connection is a connection or session
    whose open transaction the job becomes part of.
    """

    queue: str | None
    priority: int | str | None
    scheduled_at: datetime | None
    delay: float | timedelta | None
    idempotency_key: str | None
    max_retries: int | None
    retry_policy: Mapping[str, Any] | None
    timeout: float | timedelta | None
    expires_at: datetime | None
    producer_id: str | None
    ordering_key: str | None
    trace_context: Mapping[str, str] | None
    job_id: Any
    connection: Any


class Producer(Protocol):
    """Who enqueues for a task: the app or a client."""

    def enqueue(
        self, job_type: str, payload: Mapping[str, Any] | None = None, **options: Unpack[EnqueueOptions]
    ) -> Coroutine[Any, Any, EnqueuedJob]:
        """Enqueue one job."""

    def enqueue_sync(
        self, job_type: str, payload: Mapping[str, Any] | None = None, **options: Unpack[EnqueueOptions]
    ) -> EnqueuedJob:
        """Enqueue one job, waiting for the database in this thread."""


class TaskKeywords(TypedDict, total=False):
    """What `App.task` takes beside the name.

    queue, priority, max_retries, timeout (seconds or timedelta, of one attempt) and retry_policy apply to each job of
    the task unless its enqueue says otherwise. An exception of `retry_on` is retried and one of `dead_letter_on` is
    not, whatever the defaults say. Sync functions run in threads; with `process` any function runs in a process of its
    own that a timeout or a cancel kills, and that may use `memory_limit` bytes.
    """

    queue: str | None
    priority: int | str | None
    max_retries: int | None
    timeout: float | timedelta | None
    retry_policy: Mapping[str, Any] | None
    retry_on: type[BaseException] | ExceptionTypes
    dead_letter_on: type[BaseException] | ExceptionTypes
    process: bool
    memory_limit: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What a task declares beside its name. timeout is in seconds, memory_limit in bytes (process tasks only)."""

    queue: str | None = None
    priority: int | None = None
    max_retries: int | None = None
    timeout: float | None = None
    retry_policy: Mapping[str, Any] | None = None
    retry_on: ExceptionTypes = ()
    dead_letter_on: ExceptionTypes = ()
    process: bool = False
    memory_limit: int | None = None

    def enqueue_options(self) -> dict[str, Any]:
        """Return what applies to each job of the task unless its enqueue says otherwise."""
        names = ("queue", "priority", "max_retries", "timeout", "retry_policy")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


class OfArguments(Protocol[F_co, R_co]):
    """What is called with the parameters of a task's function, those without `job`."""

    # Overloads of the decorator that makes the task would be ambiguous for each function whose type contains Any.
    @overload
    def __call__(
        self: "OfArguments[Callable[Concatenate[Job, P], Any], R_co]", *args: P.args, **kwargs: P.kwargs
    ) -> R_co: ...
    @overload
    def __call__(self: "OfArguments[Callable[P, Any], R_co]", *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class TakesArguments(Protocol[R_co]):
    """A method that is called as OfArguments is."""

    def __get__(
        self, instance: "Task[P, Any] | Enqueuing[P, Any]", owner: Any, /
    ) -> OfArguments[Callable[P, Any], R_co]: ...


def takes_arguments(method: Callable[..., R]) -> TakesArguments[R]:
    """Return the method, typed."""
    return cast(TakesArguments[R], method)


class Task(Generic[P, R]):
    """The function of a job type, from P to R. Call it directly, or `enqueue` it with its own parameters."""

    def __init__(
        self,
        name: str,
        function: Callable[..., R],
        options: TaskOptions,
        producer: Producer,
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        """Check that a JSON object can be bound to the function's parameters; raises ConfigError if not."""
        self.name = name
        self.function = function
        self.options = options
        self.middlewares = middlewares
        self.is_async = inspect.iscoroutinefunction(function)
        #: Whether it runs in the worker's event loop, rather than in a thread or a process.
        self.in_loop = self.is_async and not options.process
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__qualname__ = getattr(function, "__qualname__", name)
        self.__module__ = function.__module__
        self.__wrapped__ = function
        self._producer = producer
        parameters = list(inspect.signature(function).parameters.values())
        self.takes_job = bool(parameters) and _is_job(parameters[0])
        if self.takes_job:
            parameters = parameters[1:]
        #: A task of the job alone reads `job.payload`, whatever JSON it is; nothing is bound.
        self.takes_job_alone = self.takes_job and not parameters
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
                raise ConfigError(
                    f"task {name!r}: parameter {parameter.name!r} has no name that a payload could use; "
                    "make it an ordinary or keyword-only parameter"
                )
        self._open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
        self._signature = inspect.Signature(parameters)
        self._known: Final = frozenset(parameter.name for parameter in named)
        self._required: Final = frozenset(parameter.name for parameter in named if parameter.default is parameter.empty)
        self._typed: Final = arguments_of(function, named)
        self._loaded: Final = [(argument.name, argument.exact, argument) for argument in self._typed]

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Run the function here and now."""
        return self.function(*args, **kwargs)

    @takes_arguments
    async def enqueue(self, *args: Any, **kwargs: Any) -> EnqueuedJob:
        """Enqueue a job with these arguments (the task's own, without `job`)."""
        return await self._producer.enqueue(self.name, self.payload(*args, **kwargs))

    @takes_arguments
    def enqueue_sync(self, *args: Any, **kwargs: Any) -> EnqueuedJob:
        """Enqueue a job with these arguments, waiting for the database in this thread."""
        return self._producer.enqueue_sync(self.name, self.payload(*args, **kwargs))

    @takes_arguments
    def job(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a job with these arguments for `app.enqueue_many`."""
        return {"job_type": self.name, "payload": self.payload(*args, **kwargs)}

    def having(self, **options: Unpack[EnqueueOptions]) -> "Enqueuing[P, R]":
        """Return the task with options for its next enqueues: `task.having(delay=60).enqueue(to=…)`."""
        return Enqueuing(self, options)

    @takes_arguments
    def payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the payload that stands for these arguments; raises InvalidPayload where they, or their types, do not
        fit.
        """
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as exc:
            options = kwargs.keys() & EnqueueOptions.__annotations__.keys() - self._known
            hint = f"; options of the job are given by having: .having({min(options)}=…).enqueue(…)" if options else ""
            raise InvalidPayload(f"task {self.name!r}: {exc}{hint}", column="payload") from None
        payload = dict(bound.kwargs) | dict(zip(self._signature.parameters, bound.args, strict=False))
        for argument in self._typed:
            if argument.name in payload:
                payload[argument.name] = argument.dumped(self.name, payload[argument.name])
        return payload

    def bind(self, payload: Any) -> dict[str, Any]:
        """Return the keyword arguments that a payload stands for.

        Raises InvalidPayload, as a call would raise TypeError, for missing and unknown parameters, for values that are
        not of their parameter's type, and for a payload that is no JSON object.
        """
        if not isinstance(payload, dict):
            raise InvalidPayload(f"the payload of {self.name!r} is {type(payload).__name__}, not a JSON object")
        if payload.keys() != self._known:
            self._check(payload.keys())
        arguments = payload
        for name, exact, argument in self._loaded:
            value = payload.get(name, _ABSENT)
            if type(value) is exact or value is _ABSENT:
                continue
            # The payload itself stays as it was stored.
            if arguments is payload:
                arguments = payload.copy()
            arguments[name] = argument.loaded(self.name, value)
        return arguments

    def _check(self, keys: Set[str]) -> None:
        """Raise InvalidPayload unless the function can be called with these names."""
        if not self._required <= keys:
            missing = ", ".join(sorted(self._required - keys))
            raise InvalidPayload(f"the payload of {self.name!r} lacks {missing}")
        if not (self._open or self.takes_job_alone or keys <= self._known):
            unknown = ", ".join(sorted(keys - self._known))
            expected = ", ".join(sorted(self._known)) or "none"
            raise InvalidPayload(f"the payload of {self.name!r} has unknown {unknown}; parameters are: {expected}")

    def __repr__(self) -> str:
        """Name the task."""
        return f"<Task {self.name!r}>"


class Enqueuing(Generic[P, R]):
    """A task together with options for its enqueues."""

    def __init__(self, task: Task[P, R], options: EnqueueOptions) -> None:
        """Keep both."""
        self._task = task
        self._options = options

    @takes_arguments
    def job(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a job with these arguments and the options for `app.enqueue_many`."""
        return {**self._task.job(*args, **kwargs), **self._options}

    @takes_arguments
    async def enqueue(self, *args: Any, **kwargs: Any) -> EnqueuedJob:
        """Enqueue a job with these arguments and the options."""
        payload = self._task.payload(*args, **kwargs)
        return await self._task._producer.enqueue(self._task.name, payload, **self._options)

    @takes_arguments
    def enqueue_sync(self, *args: Any, **kwargs: Any) -> EnqueuedJob:
        """Enqueue a job with these arguments and the options, waiting for the database in this thread."""
        payload = self._task.payload(*args, **kwargs)
        return self._task._producer.enqueue_sync(self._task.name, payload, **self._options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A recurring job declared beside its task: the row of pgqueue.schedules it stands for."""

    name: str
    cron: str
    job_type: str
    timezone: str = "UTC"
    payload: Mapping[str, Any] = field(default_factory=dict)
    queue: str | None = None
    priority: int | None = None
    max_retries: int | None = None
    retry_policy: Mapping[str, Any] | None = None
    timeout: float | None = None
    misfire: str | None = None
    overlap: str | None = None


class Tasks:
    """The tasks of an app by name, and the schedules declared beside them."""

    def __init__(self) -> None:
        """Start empty."""
        self._tasks: dict[str, Task[Any, Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.middlewares: list[Middleware] = []

    def add(self, task: Task[Any, Any]) -> None:
        """Add a task; raises ConfigError when its name is taken by another function."""
        known = self._tasks.get(task.name)
        if known is not None and known.function is not task.function:
            raise ConfigError(f"two tasks are named {task.name!r}: {_where(known)} and {_where(task)}")
        self._tasks[task.name] = task

    def add_schedule(self, schedule: Schedule) -> None:
        """Add a schedule; raises ConfigError when its name is taken."""
        if schedule.name in self.schedules:
            raise ConfigError(f"two schedules are named {schedule.name!r}; give one of them a name=")
        self.schedules[schedule.name] = schedule

    def get(self, name: str) -> Task[Any, Any] | None:
        """Return the task of a job type, None without one."""
        return self._tasks.get(name)

    def __getitem__(self, name: str) -> Task[Any, Any]:
        """Return the task of a job type; raises UnknownTask."""
        task = self._tasks.get(name)
        if task is None:
            raise UnknownTask(f"there is no task {name!r}; known are: {', '.join(sorted(self._tasks)) or 'none'}")
        return task

    def __contains__(self, name: object) -> bool:
        """Say whether a job type has a task."""
        return name in self._tasks

    def __iter__(self) -> Iterator[Task[Any, Any]]:
        """Go through the tasks by name."""
        return iter(sorted(self._tasks.values(), key=lambda task: task.name))

    def __len__(self) -> int:
        """Count the tasks."""
        return len(self._tasks)

    @property
    def names(self) -> list[str]:
        """The job types that have a task, sorted."""
        return sorted(self._tasks)


def task_options(given: "TaskKeywords") -> TaskOptions:
    """Return a task's options from what its decorator was given; raises ConfigError or InvalidJob for wrong ones."""
    unknown = given.keys() - TaskKeywords.__annotations__.keys()
    if unknown:
        known = ", ".join(sorted(TaskKeywords.__annotations__))
        raise ConfigError(f"unknown option {min(unknown)!r} of a task; options are: {known}")
    options = TaskOptions(
        queue=given.get("queue"),
        priority=None if (priority := given.get("priority")) is None else priority_number(priority),
        max_retries=given.get("max_retries"),
        timeout=as_seconds("timeout", given.get("timeout")),
        retry_policy=given.get("retry_policy"),
        retry_on=_exceptions("retry_on", given.get("retry_on", ())),
        dead_letter_on=_exceptions("dead_letter_on", given.get("dead_letter_on", ())),
        process=given.get("process", False),
        memory_limit=given.get("memory_limit"),
    )
    if options.timeout == 0:
        raise ConfigError("timeout is 0; it must be more than 0 seconds, or None for the queue's")
    if options.memory_limit is not None and not options.process:
        raise ConfigError("memory_limit needs process=True: threads share their memory")
    return options


def _exceptions(name: str, given: type[BaseException] | ExceptionTypes) -> ExceptionTypes:
    kinds = given if isinstance(given, tuple) else (given,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ConfigError(f"{name} has {kind!r}; it takes exception classes")
    return kinds


def _is_job(parameter: inspect.Parameter) -> bool:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return False
    annotation = parameter.annotation
    if annotation in (parameter.empty, Any, "Any"):
        return parameter.name == "job"
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2] == "Job"
    return isinstance(annotation, type) and issubclass(annotation, Job)


def _where(task: Task[Any, Any]) -> str:
    code = cast(Any, task.function).__code__ if hasattr(task.function, "__code__") else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(task.function)
