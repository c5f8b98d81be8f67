"""Declaring tasks, and binding payloads to their parameters."""

from typing import Any

import pytest

from pgqueue import App, Job
from pgqueue.errors import ConfigError, InvalidJob, InvalidPayload, UnknownTask
from tests.python.running import make_app


@pytest.fixture
def app() -> App:
    return make_app("host=nowhere.invalid")


def test_names_options_and_the_kind_of_function(app: App) -> None:
    @app.task("send_email", queue="mail", priority="high", max_retries=5, timeout=30)
    async def send_email(job: Job, to: str, subject: str = "") -> dict[str, str]:
        """Send it."""
        return {"to": to, "subject": subject}

    @app.task
    def plain(a: int) -> int:
        return a + 1

    assert app.tasks.names == ["plain", "send_email"]
    assert send_email.options.enqueue_options() == {"queue": "mail", "priority": 1, "max_retries": 5, "timeout": 30.0}
    assert (send_email.is_async, plain.is_async) == (True, False)
    assert (send_email.takes_job, plain.takes_job) == (True, False)
    assert send_email.__doc__ == "Send it."
    assert plain(1) == 2


def test_two_functions_of_one_name_are_refused_with_their_places(app: App) -> None:
    @app.task("a")
    def one(job: Job) -> None: ...

    with pytest.raises(ConfigError, match=r"two tasks are named 'a': .*test_tasks.py:\d+ and .*test_tasks.py:\d+"):

        @app.task("a")
        def two(job: Job) -> None: ...


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": -1}, "timeout is -1"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"priority": "urgent"}, "priority is 'urgent'"),
        ({"retry_on": "ValueError"}, "retry_on has 'ValueError'; it takes exception classes"),
        ({"memory_limit": 1}, "memory_limit needs process=True"),
        ({"retries": 3}, "unknown option 'retries' of a task"),
    ],
)
def test_wrong_options_are_refused(app: App, options: dict[str, Any], said: str) -> None:
    with pytest.raises((ConfigError, InvalidJob)) as refused:
        app.task("t", **options)(lambda job: None)
    assert said in str(refused.value)


def test_parameters_that_a_payload_cannot_name_are_refused(app: App) -> None:
    def starred(job: Job, *rest: int) -> None: ...

    def positional(job: Job, a: int, /) -> None: ...

    for function in (starred, positional):
        with pytest.raises(ConfigError, match="has no name that a payload could use"):
            app.task("t")(function)


def test_payloads_are_bound_like_calls(app: App) -> None:
    @app.task("t")
    def t(job: Job, a: int, b: int = 2, *, c: int = 3) -> None: ...

    @app.task("open")
    def open_(job: Job, a: int, **rest: int) -> None: ...

    assert t.bind({"a": 1, "c": 2}) == {"a": 1, "c": 2}
    assert open_.bind({"a": 1, "z": 2}) == {"a": 1, "z": 2}
    with pytest.raises(InvalidPayload, match="the payload of 't' lacks a"):
        t.bind({"b": 1})
    with pytest.raises(InvalidPayload, match="is"):
        t.bind([1])
    with pytest.raises(InvalidPayload, match="has unknown z; parameters are: a, b, c"):
        t.bind({"a": 1, "z": 1})


def test_arguments_become_a_payload(app: App) -> None:
    @app.task("t")
    def t(job: Job, a: int, b: int = 2, **rest: int) -> None: ...

    assert t.payload(1, z=3) == {"a": 1, "z": 3}
    assert t.payload(1, 5) == {"a": 1, "b": 5}
    with pytest.raises(InvalidPayload, match="task 't': missing a required argument: 'a'"):
        t.payload()  # type: ignore[call-overload]


def test_an_option_among_the_arguments_is_pointed_to_having(app: App) -> None:
    @app.task("t")
    def t(job: Job, a: int, queue: str = "") -> None: ...

    with pytest.raises(InvalidPayload, match=r"unexpected .* 'delay'; .* having: \.having\(delay=…\)\.enqueue\(…\)"):
        t.enqueue_sync(1, delay=5)  # type: ignore[call-overload]
    with pytest.raises(InvalidPayload, match=r"argument 'b'$"):
        t.enqueue_sync(1, b=5)  # type: ignore[call-overload]
    assert t.payload(1, queue="own") == {"a": 1, "queue": "own"}


def test_an_unknown_task_is_named_with_the_known_ones(app: App) -> None:
    app.task("a")(lambda job: None)
    with pytest.raises(UnknownTask, match="there is no task 'b'; known are: a"):
        app.tasks["b"]


def test_schedules_are_declared_beside_their_task(app: App) -> None:
    @app.schedule("0 9 * * mon-fri", timezone="Europe/Berlin")
    @app.task("daily_report", queue="reports", priority="low")
    def daily_report(job: Job) -> None: ...

    (declared,) = app.tasks.schedules.values()
    assert (declared.name, declared.job_type, declared.cron, declared.timezone, declared.queue, declared.priority) == (
        "daily_report", "daily_report", "0 9 * * mon-fri", "Europe/Berlin", "reports", 3,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="two schedules are named 'daily_report'; give one of them a name="):
        app.schedule("@daily")(daily_report)
    with pytest.raises(ConfigError, match="stands above"):
        app.schedule("@daily")(lambda job: None)  # type: ignore[arg-type]
