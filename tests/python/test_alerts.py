"""Alerts as workers see to them: logged, sent to webhooks as jobs, cleared."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psycopg
import pytest
import structlog

from pgqueue import App, DeadLetter, Job
from pgqueue.alerts import WEBHOOK, Alerts, deliver
from pgqueue.connections import Link
from pgqueue.settings import Settings
from tests.meet import wait_until
from tests.python.running import make_app, worker_of

Connection = psycopg.Connection[Any]


class Receiver:
    """A web server that keeps what is posted, and answers with `answers`, the last one over and over."""

    def __init__(self, *answers: int) -> None:
        self.posted: list[dict[str, Any]] = []
        self.types: list[str | None] = []
        waiting = list(answers)
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.posted.append(json.loads(body))
                receiver.types.append(self.headers["Content-Type"])
                self.send_response(waiting.pop(0) if len(waiting) > 1 else waiting[0])
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/alerts"


@contextmanager
def receiver(*answers: int) -> Iterator[Receiver]:
    made = Receiver(*(answers or (204,)))
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.server.shutdown()
        thread.join()
        made.server.server_close()


@pytest.fixture
def app(database: str) -> Iterator[App]:
    with make_app(database, sweep_interval=0.05) as app:

        @app.task("t")
        async def t(job: Job) -> None:
            raise DeadLetter("no such address")

        yield app


def only(connection: Connection, *alerts: str) -> None:
    """Switches all other rules off, and makes these fire at the first case."""
    connection.execute("update pgqueue.alert_rules set enabled = alert = any (%s)", (list(alerts),))
    connection.execute("update pgqueue.alert_rules set threshold = 0, hold = '0' where enabled")


def hurry(connection: Connection) -> None:
    """Has the next sweep evaluate, without waiting for its turn."""
    connection.execute("update pgqueue.measures set alerts_at = '-infinity'")


def test_an_alert_is_posted_when_it_fires_and_when_it_is_over(app: App, connection: Connection) -> None:
    only(connection, "DLQBreach")
    with receiver(500, 204) as web:
        connection.execute("insert into pgqueue.alert_webhooks (url, severity) values (%s, 'page')", (web.url,))
        with worker_of(app):
            app.finished_job_sync(app.enqueue_sync("t"), wait=20)
            connection.execute("select pgqueue.sweep('alerts')")
            hurry(connection)
            connection.execute("select pgqueue.sweep('alerts')")
            # The first answer was 500: the job is tried again.
            wait_until(lambda: len(web.posted) == 2, 20)
            assert web.posted[0] == web.posted[1]
            body = web.posted[0]
            assert (body["alert"], body["severity"], body["state"]) == ("DLQBreach", "page", "firing")
            assert body["summary"] == "1 dead letter waits for somebody"
            assert web.types[0] == "application/json"
            app.discard_dead_letters_sync()
            hurry(connection)
            connection.execute("select pgqueue.sweep('alerts')")
            wait_until(lambda: len(web.posted) == 3, 20)
            assert web.posted[2]["state"] == "resolved"
    states = connection.execute("select alert, state from pgqueue.alert_events order by event_id").fetchall()
    assert states == [("DLQBreach", "firing"), ("DLQBreach", "resolved")]


def test_who_evaluates_logs(database: str, connection: Connection) -> None:
    only(connection, "WorkerDown")
    connection.execute("update pgqueue.alert_rules set threshold = 1 where enabled")
    with structlog.testing.capture_logs() as logged:
        _evaluate(database)
        _evaluate(database)
        connection.execute("update pgqueue.alert_rules set threshold = 0 where enabled")
        hurry(connection)
        _evaluate(database)
    told = [(entry["event"], entry["log_level"], entry["alert"]) for entry in logged if "alert" in entry]
    assert told == [("alert", "error", "WorkerDown"), ("alert is over", "info", "WorkerDown")]


def test_one_worker_on_the_embedded_database_is_no_error(database: str, connection: Connection) -> None:
    only(connection, "WorkerDown")
    connection.execute("update pgqueue.alert_rules set threshold = 2 where enabled")
    started = "select pgqueue.worker_started(gen_random_uuid(), 'w', 'host', 1, null, null, '{t}', null, 10, '1')"
    connection.execute(started)
    with structlog.testing.capture_logs() as logged:
        _evaluate(database, one_machine=True)
        connection.execute("delete from pgqueue.workers")
        connection.execute("delete from pgqueue.alert_states")
        hurry(connection)
        _evaluate(database, one_machine=True)
    told = [(entry["log_level"], entry["summary"], "advice" in entry) for entry in logged if entry["event"] == "alert"]
    assert told == [("warning", "1 live worker, 2 wanted", True), ("error", "0 live workers, 2 wanted", False)]


def _evaluate(database: str, *, one_machine: bool = False) -> None:
    import asyncio

    async def main() -> None:
        link = Link(database, Settings.load(env={}, dsn=database), "test")
        await Alerts(one_machine=one_machine, first_after=0).step(link)
        link.close()

    asyncio.run(main())


def test_the_task_of_webhooks_is_there_unasked_but_not_in_the_app(app: App) -> None:
    assert WEBHOOK not in app.tasks
    assert WEBHOOK in app.worker()._job_types
    assert WEBHOOK not in app.worker(maintenance=False)._job_types


def test_an_own_task_for_webhooks_stays(app: App) -> None:
    @app.task(WEBHOOK)
    async def own(job: Job, **payload: Any) -> None:
        pass

    assert app.worker()._tasks[WEBHOOK].function is own.function


@pytest.mark.parametrize(("answer", "error"), [(404, DeadLetter), (400, DeadLetter), (503, OSError), (429, OSError)])
def test_what_is_worth_another_try(answer: int, error: type[Exception]) -> None:
    with receiver(answer) as web, pytest.raises(error, match=str(answer)):
        deliver(web.url, {"alert": "a"})


def test_a_receiver_that_is_not_there_is_tried_again() -> None:
    with receiver() as web:
        url = web.url
    with pytest.raises(OSError, match="refused"):
        deliver(url, {})


def test_no_files_are_read() -> None:
    with pytest.raises(DeadLetter, match="not http"):
        deliver("file:///etc/passwd", {})
