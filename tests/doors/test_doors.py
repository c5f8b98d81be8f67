"""The same job through every door: INSERT, the SQL function, psql, Python and the command line."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgqueue import App
from tests.servers import ServerUnderTest

Connection = psycopg.Connection[Any]

PAYLOAD = {"a": 1, "text": 'it\'s "quoted" ü', "deep": [{"b": None}, 1.5, True], "big": 123456789012345678901}
DOORS = ("insert", "function", "psql", "python", "cli")
# What each job has of its own.
OWN = ("job_id", "seq", "shard", "created_at", "updated_at", "expires_at")


class Doors:
    """Enqueues `echo` jobs into a database through the door of each name; every door returns the job's id."""

    def __init__(self, dsn: str, psql: str) -> None:
        self.dsn, self._psql_program = dsn, psql

    def enqueue(self, door: str, payload: object = PAYLOAD, **options: str) -> str:
        """Enqueue by a door; `options` are text, named as the columns. Raises what the door raises."""
        enqueue: Callable[..., str] = getattr(self, f"_{door}")
        return enqueue(json.dumps(payload), options)

    def _statement(self, columns: dict[str, str], value: Callable[[str], str]) -> str:
        names, values = ", ".join(columns), ", ".join(map(value, columns))
        return f"INSERT INTO pgqueue.jobs ({names}) VALUES ({values}) RETURNING job_id"

    def _insert(self, payload: str, options: dict[str, str]) -> str:
        columns = {"job_type": "echo", "payload": payload, **options}
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(self._statement(columns, lambda name: f"%({name})s"), columns).fetchone()
        assert row is not None
        return str(row[0])

    def _function(self, payload: str, options: dict[str, str]) -> str:
        arguments = "".join(f", {name} => %({name})s" for name in options)
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute(
                f"SELECT job_id FROM pgqueue.enqueue('echo', %(payload)s{arguments})", {"payload": payload, **options}
            ).fetchone()
        assert row is not None
        return str(row[0])

    def _psql(self, payload: str, options: dict[str, str]) -> str:
        columns = {"job_type": "echo", "payload": payload, **options}
        variables = [f"--set={name}={value}" for name, value in columns.items()]
        return self._run(
            [self._psql_program, "-XqAt", "-v", "ON_ERROR_STOP=1", *variables, self.dsn],
            stdin=self._statement(columns, lambda name: f":'{name}'"),
        )

    def _cli(self, payload: str, options: dict[str, str]) -> str:
        names = {"idempotency_key": "key", "producer_id": "producer"}
        arguments = [f"--{names.get(name, name).replace('_', '-')}={value}" for name, value in options.items()]
        return self._run([sys.executable, "-m", "pgqueue", "enqueue", "echo", "-", *arguments], stdin=payload)

    def _python(self, payload: str, options: dict[str, Any]) -> str:
        if "priority" in options:
            options = options | {"priority": int(options["priority"])}
        with App(self.dsn) as app:
            return str(app.enqueue_sync("echo", json.loads(payload), **options).job_id)

    def _run(self, command: list[str], stdin: str) -> str:
        done = subprocess.run(
            command,
            input=stdin,
            env={**os.environ, "PGQUEUE_DSN": self.dsn},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Refused(done.stderr, done.returncode, done.stdout.strip())
        return done.stdout.strip()


class Refused(Exception):
    """A program said no: what it said, its exit code, what it printed."""


@pytest.fixture
def doors(database: str, server: ServerUnderTest) -> Doors:
    return Doors(database, str(Path(server.bindir) / "psql"))


@pytest.fixture
def worker(database: str) -> Iterator[None]:
    """A worker of the demo's tasks in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "worker", "pgqueue.demo:app", "--concurrency", "4"],
        env={**os.environ, "PGQUEUE_DSN": database},
    )
    yield
    process.terminate()
    assert process.wait(30) == 0


def test_all_doors_make_the_same_job(doors: Doors, connection: Connection) -> None:
    ids = [doors.enqueue(door) for door in DOORS]
    rows = []
    for job_id in ids:
        (row,) = connection.execute("select to_jsonb(j) from pgqueue.job(%s) j", (job_id,)).fetchone() or (None,)
        assert row is not None
        rows.append({name: value for name, value in row.items() if name not in OWN})
    assert rows[0]["payload"] == PAYLOAD
    assert rows[0]["status"] == "pending"
    assert all(row == rows[0] for row in rows)
    order = connection.execute("select job_id::text from pgqueue.jobs order by seq").fetchall()
    assert [job_id for (job_id,) in order] == ids


def test_what_comes_in_by_any_door_is_run(doors: Doors, worker: None) -> None:
    ids = {door: doors.enqueue(door) for door in DOORS}
    with App(doors.dsn) as app:
        assert {door: app.result_sync(job_id, wait=30) for door, job_id in ids.items()} == dict.fromkeys(ids, PAYLOAD)


def test_a_key_taken_by_one_door_is_known_at_all(doors: Doors, connection: Connection) -> None:
    first = doors.enqueue("python", idempotency_key="order-42")
    assert doors.enqueue("function", idempotency_key="order-42") == first
    assert doors.enqueue("python", idempotency_key="order-42") == first
    with pytest.raises(Refused) as by_cli:
        doors.enqueue("cli", idempotency_key="order-42")
    assert by_cli.value.args[1:] == (4, first)
    with pytest.raises(psycopg.errors.UniqueViolation):
        doors.enqueue("insert", idempotency_key="order-42")
    with pytest.raises(Refused, match="idempotency_key"):
        doors.enqueue("psql", idempotency_key="order-42")
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (1,)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"queue": ""}, "queue"), ({"priority": "7"}, "priority"), ({"producer_id": "p" * 65}, "producer")],
)
@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_what_is_illegal_and_names_the_column(
    doors: Doors, connection: Connection, door: str, options: dict[str, str], named: str
) -> None:
    with pytest.raises(Exception, match=named):
        doors.enqueue(door, **options)
    assert connection.execute("select count(*) from pgqueue.jobs").fetchone() == (0,)
