"""One run of a task: what each way to end it comes to, without any database."""

import asyncio
import json
import smtplib
import urllib.error
from collections.abc import Callable
from datetime import timedelta
from email.message import Message
from typing import Any, NoReturn

import httpx
import pytest

from pgqueue import Cancel, DeadLetter, Job, RateLimited, Retry, Snooze
from pgqueue.attempt import (
    MESSAGE_BYTES,
    TRACEBACK_BYTES,
    Attempt,
    Cancelled,
    Completed,
    Failed,
    Outcome,
    Released,
    Settled,
    Snoozed,
    Stop,
    Throttled,
)
from pgqueue.classification import is_retryable
from pgqueue.errors import InvalidJob
from pgqueue.tasks import TaskOptions
from tests.python.running import a_job, make_app


def outcomes(body: Callable[..., Any], payload: str = "{}", **options: Any) -> Outcome:
    """Run a function as sync and as async task; both must come to the same."""
    app = make_app("host=nowhere.invalid")

    def sync_task(job: Job, **payload: Any) -> Any:
        return body(**payload)

    async def async_task(job: Job, **payload: Any) -> Any:
        return body(**payload)

    first = Attempt(a_job(payload).claimed, app.task("s", **options)(sync_task)).run()
    second = asyncio.run(Attempt(a_job(payload).claimed, app.task("a", **options)(async_task)).run_async())
    assert type(first) is type(second)
    if isinstance(first, Failed) and isinstance(second, Failed):
        assert (first.retryable, first.retry_in) == (second.retryable, second.retry_in)
        assert first.error["type"] == second.error["type"]
    else:
        assert first == second or isinstance(first, Cancelled)
    return first


def raising(exc: BaseException) -> Callable[[], NoReturn]:
    def body() -> NoReturn:
        raise exc

    return body


def failed(exc: BaseException, **options: Any) -> Failed:
    outcome = outcomes(raising(exc), **options)
    assert isinstance(outcome, Failed)
    return outcome


def test_returns() -> None:
    assert outcomes(lambda: None) == Completed(None)
    assert outcomes(lambda: 0) == Completed(b"0")
    assert outcomes(lambda **payload: payload, '{"a": "é"}') == Completed('{"a":"é"}'.encode())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\0", "\ud800", b"", {1}, object(), 1j])
def test_what_cannot_be_stored_fails_for_good(value: Any) -> None:
    outcome = outcomes(lambda: {"m": value})
    assert isinstance(outcome, Failed)
    assert not outcome.retryable
    assert outcome.error["type"] == "InvalidResult"
    assert outcome.error["message"].startswith("the result is not storable: result['m']")


def test_signals() -> None:
    assert outcomes(raising(Snooze(5))) == Snoozed(5.0)
    assert outcomes(raising(RateLimited(60))) == Throttled(60.0)
    assert isinstance(outcomes(raising(Cancel())), Cancelled)
    assert (failed(Retry(in_=7)).retryable, failed(Retry(in_=7)).retry_in) == (True, 7.0)
    assert (failed(Retry(7)).retry_in, failed(Retry(7)).error["message"]) == (7.0, "the task asked for a retry")
    assert failed(Retry("")).error["message"] == "Retry without a reason"
    assert failed(DeadLetter("")).error["message"] == "DeadLetter without a reason"
    assert not failed(DeadLetter("no use")).retryable
    assert failed(DeadLetter("no use")).error["message"] == "no use"


@pytest.mark.parametrize("wrong", [-1, float("nan"), "soon", None])
def test_signals_refuse_impossible_delays(wrong: Any) -> None:
    with pytest.raises((InvalidJob, AssertionError)):
        Snooze(wrong)


@pytest.mark.parametrize(
    "exc",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        GeneratorExit(),
        asyncio.CancelledError(),
        BaseException("x"),
    ],
)
def test_any_exception_is_an_outcome(exc: BaseException) -> None:
    assert isinstance(outcomes(raising(exc)), Failed)


def test_a_payload_that_does_not_fit_fails_for_good() -> None:
    app = make_app("host=nowhere.invalid")
    task = app.task("t")(lambda job, a: a)
    outcome = Attempt(a_job('{"b": 1}').claimed, task).run()
    assert isinstance(outcome, Failed)
    assert (outcome.retryable, outcome.error["type"]) == (False, "InvalidPayload")


def http_error(status: int, **headers: str) -> httpx.HTTPStatusError:
    request = httpx.Request("GET", "http://x")
    return httpx.HTTPStatusError(
        "x", request=request, response=httpx.Response(status, headers=headers, request=request)
    )


def json_error() -> Exception:
    try:
        json.loads("{")
    except ValueError as exc:
        return exc
    raise AssertionError


@pytest.mark.parametrize(
    ("exc", "retried"),
    [
        (TimeoutError(), True),
        (ConnectionResetError(), True),
        (OSError(113, "no route"), True),
        (httpx.ConnectTimeout("x"), True),
        (httpx.ReadError("x"), True),
        (httpx.UnsupportedProtocol("x"), False),
        (http_error(429), True),
        (http_error(503), True),
        (http_error(501), False),
        (http_error(401), False),
        (http_error(403), False),
        (http_error(422), False),
        (urllib.error.HTTPError("http://x", 502, "x", Message(), None), True),
        (urllib.error.HTTPError("http://x", 404, "x", Message(), None), False),
        (urllib.error.URLError("x"), True),
        (smtplib.SMTPAuthenticationError(535, b"no"), False),
        (smtplib.SMTPServerDisconnected("x"), True),
        (PermissionError(), False),
        (json_error(), False),
        (InvalidJob("x"), False),
        (ValueError("unknown"), True),
        (RuntimeError("unknown"), True),
        (ExceptionGroup("g", [PermissionError(), ValueError()]), True),
        (ExceptionGroup("g", [PermissionError(), http_error(401)]), False),
    ],
)
def test_classification(exc: Exception, retried: bool) -> None:
    assert is_retryable(exc, TaskOptions()) is retried
    if isinstance(exc, urllib.error.HTTPError):
        exc.close()


def test_a_tasks_own_lists_come_first() -> None:
    assert failed(PermissionError(), retry_on=OSError).retryable
    assert not failed(TimeoutError(), dead_letter_on=(ValueError, TimeoutError)).retryable
    assert not failed(ValueError(), retry_on=ValueError, dead_letter_on=ValueError).retryable


def test_a_server_that_says_when_is_asked_again_then() -> None:
    assert failed(http_error(429, **{"Retry-After": "17"})).retry_in == 17.0
    assert failed(http_error(503, **{"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"})).retry_in is None
    assert failed(http_error(401, **{"Retry-After": "17"})).retry_in is None


class Bare(Retry):
    def __init__(self) -> None:
        Exception.__init__(self, "later")


class BareSnooze(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self, "later")


class Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__qualname__":
            raise RuntimeError("no name")
        return super().__getattribute__(name)


class Unnamed(Exception, metaclass=Nameless):
    pass


def changed(signal: Exception, name: str, value: object) -> Exception:
    setattr(signal, name, value)
    return signal


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (Bare, "AttributeError"),
        (BareSnooze, "AttributeError"),
        (lambda: changed(Retry(1), "in_", float("inf")), "InvalidJob"),
        (lambda: changed(Snooze(1), "for_", None), "InvalidJob"),
        (lambda: changed(RateLimited(1), "retry_after", "soon"), "InvalidJob"),
        (lambda: Unnamed("x"), "tests.python.test_attempt.Unnamed"),
    ],
)
def test_odd_classes_of_the_tasks_own_are_a_failure_like_any(made: Callable[[], Exception], kind: str) -> None:
    assert failed(made()).error["type"] == kind


def test_a_signal_whose_delay_was_changed_to_a_lawful_one_keeps_it() -> None:
    assert outcomes(raising(changed(Snooze(1), "for_", timedelta(minutes=1)))) == Snoozed(60.0)
    assert failed(changed(Retry(1), "in_", timedelta(minutes=1))).retry_in == 60.0


def stored(error: dict[str, Any]) -> int:
    encoded = json.dumps(error, ensure_ascii=False).encode()
    assert b"\\u0000" not in encoded
    return len(encoded)


def recursion() -> None:
    recursion()


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Guarded(Exception):
    @property
    def response(self) -> NoReturn:
        raise RuntimeError("call raise_for_status() first")


def nested(depth: int) -> Exception:
    group = ExceptionGroup("innermost", [ValueError()])
    for _ in range(depth):
        group = ExceptionGroup("nested", [group])
    return group


@pytest.mark.parametrize("made", [lambda: Guarded("x"), lambda: nested(3000)], ids=["attribute", "depth"])
def test_the_tasks_own_exception_is_told_whatever_it_is_like(made: Callable[[], Exception]) -> None:
    exc = made()
    outcome = failed(exc)
    assert outcome.retryable
    assert outcome.error["type"].endswith(type(exc).__name__)
    assert outcome.error["message"] == str(exc)


@pytest.mark.parametrize(
    "body",
    [
        raising(ValueError("x" * 10_000_000)),
        raising(ValueError("😀" * 250_000)),
        raising(ValueError("a\0b\ud800c")),
        raising(Mute()),
        recursion,
    ],
)
def test_errors_are_small_and_storable_whatever_was_raised(body: Callable[[], Any]) -> None:
    outcome = outcomes(body)
    assert isinstance(outcome, Failed)
    assert stored(outcome.error) < 32 * 1024
    assert len(outcome.error["message"].encode()) <= MESSAGE_BYTES
    assert len(outcome.error["traceback"].encode()) <= TRACEBACK_BYTES


def test_cuts_are_marked_and_between_characters() -> None:
    message = failed(ValueError("😀" * 10_000)).error["message"]
    assert message.endswith("😀 … (cut)")


def test_the_traceback_begins_at_the_task() -> None:
    trace = failed(ValueError("x")).error["traceback"]
    assert "test_attempt.py" in trace
    assert "pgqueue/attempt.py" not in trace


def stopped(reason: Stop, body: Callable[[], Any]) -> Outcome:
    app = make_app("host=nowhere.invalid")

    async def task(job: Job) -> Any:
        attempt.stop = reason
        return body()

    attempt = Attempt(a_job().claimed, app.task("t")(task))
    return asyncio.run(attempt.run_async())


def test_stopped_attempts() -> None:
    cancelled = raising(asyncio.CancelledError())
    assert isinstance(stopped(Stop.CANCEL, cancelled), Cancelled)
    assert stopped(Stop.SHUTDOWN, cancelled) == Released(started=True)
    assert stopped(Stop.LOST, cancelled) == Settled(None)
    for body in (cancelled, lambda: 1, raising(ValueError())):
        outcome = stopped(Stop.TIMEOUT, body)
        assert isinstance(outcome, Failed)
        assert (outcome.retryable, outcome.error["type"]) == (True, "TimeoutError")
    # What ended before it noticed has ended.
    assert stopped(Stop.CANCEL, lambda: 1) == Completed(b"1")
    assert stopped(Stop.SHUTDOWN, lambda: 1) == Completed(b"1")


def test_an_attempt_that_never_began_took_no_time() -> None:
    attempt = Attempt(a_job().claimed, make_app("dbname=none").task("t")(lambda: None))
    assert attempt.record(ValueError("x"))["duration_ms"] == 0
