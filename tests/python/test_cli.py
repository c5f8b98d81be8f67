"""The commands, each on a real database: what they print, where, and the exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from click.testing import CliRunner, Result

from pgqueue import __version__
from pgqueue.cli import root

Invoke = Callable[..., Result]
Connection = psycopg.Connection[Any]


@pytest.fixture
def pgqueue(database: str) -> Invoke:
    """Runs a command on the test's database."""

    def invoke(*args: str, env: Mapping[str, str | None] | None = None, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(root, args, env={"PGQUEUE_DSN": database, **(env or {})}, input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def enqueue(pgqueue: Invoke, *args: str) -> str:
    result = pgqueue("enqueue", *args)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def dead_letter(connection: Connection, job_id: str, message: str = "no such address") -> None:
    """Claims the job and fails it for good."""
    worker_id = str(uuid4())
    claimed = connection.execute("select job_id, attempts from pgqueue.claim(%s, null, 1000)", (worker_id,)).fetchall()
    attempts = dict(claimed)
    error = json.dumps({"type": "ValueError", "message": message, "traceback": "Traceback ...", "duration_ms": 12})
    for claimed_id, attempt in attempts.items():
        if str(claimed_id) == job_id:
            status = connection.execute(
                "select pgqueue.fail(%s, %s, %s, %s, false)", (worker_id, claimed_id, attempt, error)
            ).fetchone()
            assert status == ("dead_letter",)


def complete(connection: Connection, job_id: str, result: object) -> None:
    worker_id = str(uuid4())
    (attempt,) = connection.execute(
        "select attempts from pgqueue.claim(%s, null, 1000) where job_id = %s", (worker_id, job_id)
    ).fetchone() or (None,)
    done = connection.execute(
        "select pgqueue.complete(%s, array[%s]::uuid[], array[%s]::int[], array[%s]::jsonb[])",
        (worker_id, job_id, attempt, json.dumps(result)),
    ).fetchall()
    assert len(done) == 1


# start, help, usage ---------------------------------------------------------------------------------------------------


def test_version_starts_fast_and_loads_no_driver() -> None:
    code = "import sys; from pgqueue.cli import root; assert not {'psycopg', 'asyncio', 'alembic'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    taken = []
    for _ in range(3):
        begun = os.times()
        said = subprocess.run(
            [sys.executable, "-m", "pgqueue", "--version"], capture_output=True, text=True, check=True
        )
        ended = os.times()
        # Processor time: on a busy machine the clock says how busy it is.
        taken.append(ended.children_user + ended.children_system - begun.children_user - begun.children_system)
        assert said.stdout == f"pgqueue {__version__}\n"
    assert min(taken) < 0.3


def test_help_names_every_command_and_loads_no_driver() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom pgqueue.cli import root\n"
        "print(CliRunner().invoke(root, ['--help']).stdout)\nassert not {'psycopg', 'alembic'} & set(sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for command in ("up", "migrate", "schema", "worker", "enqueue", "jobs", "dlq", "queues", "workers", "psql"):
        assert f" {command} " in said


@pytest.mark.parametrize(
    "args",
    [
        ["nonsense"],
        ["jobs"],
        ["jobs", "show"],
        ["jobs", "list", "--status", "lost"],
        ["jobs", "list", "--limit", "0"],
        ["enqueue"],
        ["enqueue", "echo", "{"],
        ["enqueue", "echo", "[1]"],
        ["enqueue", "echo", "--priority", "4"],
        ["enqueue", "echo", "--delay", "-5"],
        ["enqueue", "echo", "--delay", "soon"],
        ["enqueue", "echo", "--at", "tomorrow"],
        ["enqueue", "echo", "--at", "2090-01-01T10:00"],
        ["--dsn", "", "jobs", "list"],
        ["jobs", "list", "--dsn", " "],
        ["autoscale", "no_such_module:app", "--print"],
        ["dlq", "retry"],
        ["dlq", "retry", "x", "--all"],
        ["dlq", "discard"],
        ["queues", "set", "q"],
        ["queues", "set", "q", "--weights", "1,2,3"],
        ["worker"],
        ["worker", "no_such_module:app"],
        ["worker", "json"],
        ["worker", "json:nothing"],
        ["worker", "json:dumps"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_2_and_leave_stdout_to_data(pgqueue: Invoke, args: list[str]) -> None:
    result = pgqueue(*args)
    assert result.exit_code == 2
    if args != ["jobs"]:
        assert result.stdout == ""
        assert result.stderr != ""


def test_values_the_database_refuses_exit_with_2_and_name_the_column(pgqueue: Invoke) -> None:
    result = pgqueue("enqueue", "echo", "--queue", "q" * 64)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "queue" in result.stderr
    assert pgqueue("enqueue", "echo", '{"a": "\\u0000"}').exit_code == 2
    assert pgqueue("jobs", "show", "not-a-uuid").exit_code == 2
    assert pgqueue("jobs", "list", env={"PGQUEUE_POOL_SIZE": "none"}).exit_code == 2


def test_a_database_that_cannot_be_reached_exits_with_7(pgqueue: Invoke) -> None:
    result = pgqueue("--dsn", "host=127.0.0.1 port=1 connect_timeout=2", "jobs", "list")
    assert (result.exit_code, result.stdout) == (7, "")
    assert result.stderr.startswith("pgqueue: ")


def test_a_role_that_may_not_is_told_what_it_needs(pgqueue: Invoke, database: str) -> None:
    dsn = psycopg.conninfo.make_conninfo(database, options="-c role=pgqueue_reader")
    for command in (["enqueue", "echo"], ["jobs", "cancel", "01890000-0000-7000-8000-000000000000"]):
        refused = pgqueue("--dsn", dsn, *command)
        assert (refused.exit_code, refused.stdout) == (1, "")
        assert "permission denied for function" in refused.stderr
        assert "pgqueue_producer (to enqueue)" in refused.stderr
        assert "pgqueue_operator (to operate)" in refused.stderr


def test_a_database_without_the_schema_exits_with_5(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute("set client_min_messages = error; drop schema pgqueue cascade")
    for command in (["jobs", "list"], ["enqueue", "echo"], ["queues", "list"], ["schema", "version"]):
        result = pgqueue(*command)
        assert result.exit_code == 5, result.stderr
        assert "pgqueue migrate" in result.stderr


# schema ---------------------------------------------------------------------------------------------------------------


def test_migrate_and_schema_version(pgqueue: Invoke, connection: Connection) -> None:
    (at,) = connection.execute("select pgqueue.schema_version()").fetchone() or (None,)
    connection.execute("set client_min_messages = error; drop schema pgqueue cascade")
    assert json.loads(pgqueue("schema", "version", "--json").stdout)["version"] is None
    first = pgqueue("migrate")
    assert (first.exit_code, first.stdout) == (0, "")
    assert str(at) in first.stderr
    assert json.loads(pgqueue("--json", "migrate").stdout) == {"applied": [], "version": at, "missing_roles": []}
    assert pgqueue("schema", "version").stdout == f"{at}\n"


def test_migrate_sql_prints_sql_alone_and_connects_nowhere(pgqueue: Invoke) -> None:
    result = pgqueue("migrate", "--sql", "--dsn", "host=127.0.0.1 port=1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "create table pgqueue.jobs" in result.stdout
    assert result.stdout == pgqueue("migrate", "--sql").stdout


# enqueue --------------------------------------------------------------------------------------------------------------


def test_enqueue_prints_the_id_alone(pgqueue: Invoke, connection: Connection) -> None:
    job_id = enqueue(pgqueue, "send_email", '{"to": "a@example.com"}')
    row = connection.execute(
        "select job_type, payload, queue, priority, status from pgqueue.job(%s)", (job_id,)
    ).fetchone()
    assert row == ("send_email", {"to": "a@example.com"}, "default", 2, "pending")


def test_enqueue_takes_every_option(pgqueue: Invoke, connection: Connection) -> None:
    job_id = enqueue(
        pgqueue, "echo", "--queue", "mail", "--priority", "critical", "--delay", "1h30m", "--key", "order-42",
        "--ordering-key", "customer-7", "--producer", "shop", "--max-retries", "0", "--timeout", "1.5",
    )  # fmt: skip
    row = connection.execute(
        """select queue, priority, status, scheduled_at - created_at, idempotency_key, ordering_key, producer_id,
                  max_retries, timeout_ms from pgqueue.job(%s)""",
        (job_id,),
    ).fetchone()
    assert row is not None
    assert row[:3] == ("mail", 0, "submitted")
    assert 5399 < row[3].total_seconds() < 5401
    assert row[4:] == ("order-42", "customer-7", "shop", 0, 1500)


def test_enqueue_at_a_moment_and_from_stdin(pgqueue: Invoke, connection: Connection) -> None:
    result = pgqueue("enqueue", "echo", "-", "--at", "2090-01-01T12:00:00+02:00", "--json", stdin='{"n": 1}')
    job = json.loads(result.stdout)
    assert (job["status"], job["duplicate"]) == ("submitted", False)
    at, payload = connection.execute(
        "select scheduled_at, payload from pgqueue.job(%s)", (job["job_id"],)
    ).fetchone() or (None, None)
    assert payload == {"n": 1}
    assert at == datetime(2090, 1, 1, 10, tzinfo=UTC)


def test_a_known_key_prints_its_job_and_exits_with_4(pgqueue: Invoke) -> None:
    first = enqueue(pgqueue, "echo", "--key", "k")
    again = pgqueue("enqueue", "echo", "--key", "k")
    assert (again.exit_code, again.stdout.strip()) == (4, first)
    assert "known" in again.stderr
    assert "another one" not in again.stderr
    for given in (("sleep",), ("echo", '{"n": 1}')):
        other = pgqueue("enqueue", *given, "--key", "k")
        assert (other.exit_code, other.stdout.strip()) == (4, first)
        assert "another one than asked for (of type 'echo'), now pending" in other.stderr
    assert json.loads(pgqueue("enqueue", "echo", "--key", "k", "--json").stdout)["duplicate"] is True


# jobs -----------------------------------------------------------------------------------------------------------------


def test_jobs_list_filters_and_pages(pgqueue: Invoke) -> None:
    ids = [enqueue(pgqueue, "echo", "--queue", queue, "--producer", "p") for queue in ("a", "a", "b")]
    delayed = enqueue(pgqueue, "sleep", "--delay", "60", "--queue", "a")

    def listed(*args: str) -> list[str]:
        return [row["job_id"] for row in json.loads(pgqueue("jobs", "list", "--json", *args).stdout)]

    assert listed() == [delayed, *reversed(ids)]
    assert listed("--queue", "a") == [delayed, ids[1], ids[0]]
    assert listed("--status", "pending,completed") == ids[::-1]
    assert listed("--type", "sleep") == [delayed]
    assert listed("--producer", "p", "--limit", "2") == [ids[2], ids[1]]
    assert listed("--producer", "p", "--before", ids[1]) == [ids[0]]
    table = pgqueue("jobs", "list").stdout.splitlines()
    assert table[0].split()[:3] == ["JOB", "ID", "TYPE"]
    assert [line.split()[0] for line in table[1:]] == [delayed, *reversed(ids)]
    assert "\x1b" not in "".join(table)


def test_jobs_show_tells_all_and_why(pgqueue: Invoke, connection: Connection) -> None:
    job_id = enqueue(pgqueue, "echo", '{"n": 123456789012345678901234567890}')
    waiting = pgqueue("jobs", "show", job_id).stdout
    assert 'No worker serves queue "default"' in waiting
    assert '{"n": 123456789012345678901234567890}' in waiting
    dead_letter(connection, job_id)
    dead = pgqueue("jobs", "show", job_id).stdout
    assert "ValueError: no such address" in dead
    assert "Traceback ..." in dead
    assert "123456789012345678901234567890" in pgqueue("jobs", "show", "--json", job_id).stdout
    assert pgqueue("jobs", "show", "01890000-0000-7000-8000-000000000000").exit_code == 3


def test_what_jobs_carry_cannot_steer_the_terminal(pgqueue: Invoke, connection: Connection) -> None:
    hostile = "\x1b]0;owned\x07\x1b[31m[bold]red[/bold]\u202e"
    job_id = enqueue(pgqueue, hostile, json.dumps({"a": hostile}))
    dead_letter(connection, job_id, hostile)
    for command in (["jobs", "list"], ["jobs", "show", job_id], ["dlq", "list"]):
        said = pgqueue(*command).stdout
        assert not {"\x1b", "\x07", "\u202e"} & set(said)
        assert "[bold]red[/bold]" in said


def test_cancel_and_retry_say_what_they_did(pgqueue: Invoke, connection: Connection) -> None:
    job_id = enqueue(pgqueue, "echo")
    assert pgqueue("jobs", "cancel", job_id).stdout == f"{job_id} cancelled\n"
    refused = pgqueue("jobs", "retry", job_id)
    assert (refused.exit_code, refused.stdout) == (4, "")
    unknown = "01890000-0000-7000-8000-000000000000"
    assert pgqueue("jobs", "cancel", unknown).exit_code == 3
    other = enqueue(pgqueue, "echo")
    both = pgqueue("jobs", "cancel", "--json", unknown, other)
    assert both.exit_code == 3
    assert [entry["outcome"] for entry in json.loads(both.stdout)] == ["refused", "cancelled"]
    dead = enqueue(pgqueue, "echo")
    dead_letter(connection, dead)
    assert pgqueue("jobs", "retry", dead).stdout == f"{dead} pending\n"


def test_a_word_among_ids_is_found_before_anything_is_done(pgqueue: Invoke, connection: Connection) -> None:
    dead, waiting = enqueue(pgqueue, "echo"), enqueue(pgqueue, "echo")
    dead_letter(connection, dead)
    connection.execute("select pgqueue.release(worker_id, array[job_id], array[attempts]) from pgqueue.jobs_live")
    for command, job_id in (("dlq retry", dead), ("dlq discard", dead), ("jobs retry", dead), ("jobs cancel", waiting)):
        refused = pgqueue(*command.split(), job_id, "nonsense")
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr == "pgqueue: job_id is 'nonsense'; it must be a UUID\n"
    states = connection.execute("select job_id::text, status from pgqueue.jobs").fetchall()
    assert dict(states) == {dead: "dead_letter", waiting: "pending"}


def test_wait_prints_the_result(pgqueue: Invoke, connection: Connection) -> None:
    job_id = enqueue(pgqueue, "echo")
    late = pgqueue("jobs", "wait", job_id, "--timeout", "50ms")
    assert (late.exit_code, late.stdout) == (6, "")
    complete(connection, job_id, {"a": [1]})
    done = pgqueue("jobs", "wait", job_id)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {"a": [1]}
    assert json.loads(pgqueue("jobs", "wait", job_id, "--json").stdout)["status"] == "completed"
    dead = enqueue(pgqueue, "echo")
    dead_letter(connection, dead)
    failed = pgqueue("jobs", "wait", dead)
    assert (failed.exit_code, failed.stdout) == (1, "")
    assert "no such address" in failed.stderr


def test_an_interrupted_command_exits_with_130(database: str, connection: Connection) -> None:
    (job_id,) = connection.execute("select job_id from pgqueue.enqueue('echo')").fetchone() or (None,)
    waiting = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "jobs", "wait", str(job_id)],
        env={**os.environ, "PGQUEUE_DSN": database}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    sessions = (
        "select count(*) from pg_stat_activity where application_name = 'pgqueue' and datname = current_database()"
    )
    while connection.execute(sessions).fetchone() == (0,):
        time.sleep(0.05)
    waiting.send_signal(signal.SIGINT)
    assert waiting.communicate(timeout=20)[1] == "pgqueue: interrupted\n"
    assert waiting.returncode == 130


# dead letters, queues, workers ----------------------------------------------------------------------------------------


def test_dead_letters_one_by_one_and_in_bulk(pgqueue: Invoke, connection: Connection) -> None:
    ids = [enqueue(pgqueue, kind) for kind in ("a", "a", "b", "b", "c")]
    for job_id in ids:
        dead_letter(connection, job_id)
        connection.execute("select pgqueue.release(worker_id, array[job_id], array[attempts]) from pgqueue.jobs_live")
    listed = json.loads(pgqueue("dlq", "list", "--json").stdout)
    assert [row["job_id"] for row in listed] == ids[::-1]
    assert pgqueue("dlq", "retry", ids[0]).stdout == f"{ids[0]} pending\n"
    assert pgqueue("dlq", "retry", "--type", "a").stdout == "1 retried\n"
    assert pgqueue("dlq", "discard", ids[2]).stdout == f"{ids[2]} discarded\n"
    asked = pgqueue("dlq", "discard", "--type", "b", stdin="n\n")
    assert (asked.exit_code, asked.stdout) == (1, "")
    assert json.loads(pgqueue("dlq", "discard", "--type", "b", "--yes", "--json").stdout) == {"discarded": 1}
    assert pgqueue("dlq", "retry", "--since", "2090-01-01T00:00Z").stdout == "0 retried\n"
    assert pgqueue("dlq", "retry", "--all").stdout == "1 retried\n"
    assert pgqueue("dlq", "discard", ids[0]).exit_code == 4


def test_queues_list_pause_resume_set(pgqueue: Invoke, connection: Connection) -> None:
    enqueue(pgqueue, "echo", "--queue", "mail", "--priority", "high")
    enqueue(pgqueue, "echo", "--queue", "mail", "--delay", "60")
    assert pgqueue("queues", "pause", "mail").stdout == "queue mail is paused\n"
    assert json.loads(pgqueue("queues", "pause", "mail", "--json").stdout) == {"queue": "mail", "changed": False}
    (row,) = json.loads(pgqueue("queues", "list", "--json").stdout)
    assert (row["queue"], row["paused"], row["pending"], row["submitted"]) == ("mail", True, 1, 1)
    assert "mail" in pgqueue("queues", "list").stdout
    assert pgqueue("queues", "resume", "mail").exit_code == 0
    assert pgqueue("queues", "set", "mail", "--weights", "1,0,0,0", "--lease", "5s").exit_code == 0
    assert pgqueue("queues", "set", "mail", "--pending-ttl", "2h").exit_code == 0
    kept = pgqueue("queues", "set", "mail", "--hard-limit", "7", "--json")
    settings = json.loads(kept.stdout)
    assert (settings["weights"], settings["lease_ms"], settings["hard_limit"]) == ([1, 0, 0, 0], 5000, 7)
    ttl = connection.execute("select pending_ttl = interval '2 hours' from pgqueue.queues").fetchall()
    assert ttl == [(True,)]
    assert json.loads(pgqueue("queues", "set", "mail", "--weights", "strict", "--json").stdout)["weights"] is None
    assert "\nweights          strict\n" in pgqueue("queues", "set", "mail", "--weights", "strict").stdout
    for option, value, most in (("--pending-ttl", "40000000d", "100 years"), ("--lease", "2d", "1 day")):
        refused = pgqueue("queues", "set", "new", option, value)
        assert refused.exit_code == 2
        assert f"{value!r} is too long: it must be at most {most}" in " ".join(refused.stderr.replace("│", " ").split())
    refused = pgqueue("queues", "set", "new", "--timeout", "100000d")
    assert (refused.exit_code, "setting timeout_ms cannot be 8640000000000" in refused.stderr) == (2, True), (
        refused.stderr
    )
    refused = pgqueue("queues", "set", "new", "--soft-limit", "11", "--hard-limit", "10")
    assert (refused.exit_code, "soft_limit must not be above hard_limit" in refused.stderr) == (2, True), refused.stderr
    refused = pgqueue("queues", "set", "new", "--lease", "0")
    assert refused.exit_code == 2
    assert "lease_ms" in refused.stderr
    assert connection.execute("select name from pgqueue.queues").fetchall() == [("mail",)]


def test_rates_shedding_and_retries_of_a_queue_are_set_and_unset(pgqueue: Invoke) -> None:
    def settings(*options: str) -> list[Any]:
        row = json.loads(pgqueue("queues", "set", "mail", *options, "--json").stdout)
        return [row["rate_per_second"], row["shed_low"], row["retry_policy"]]

    policy = {"base_delay_ms": 500, "jitter": False}
    given = ["--rate-per-second", "100", "--shed-low", "--retry-policy", json.dumps(policy)]
    assert settings(*given) == [100, True, policy]
    assert settings("--max-lost", "3") == [100, True, policy]
    assert settings("--rate-per-second", "none", "--no-shed-low", "--retry-policy", "none") == [None, False, None]
    for wrong in (["--rate-per-second", "0"], ["--retry-policy", "[]"], ["--retry-policy", '{"base": 1}']):
        assert pgqueue("queues", "set", "mail", *wrong).exit_code == 2


def test_job_types_are_paused_and_resumed(pgqueue: Invoke, connection: Connection) -> None:
    claim = "select count(*) from pgqueue.claim('01890000-0000-4000-8000-000000000001', null, 1)"
    enqueue(pgqueue, "echo")
    assert pgqueue("jobs", "pause-type", "echo", "--for", "1h").stdout == "job type echo is paused for 1h\n"
    assert connection.execute(claim).fetchone() == (0,)
    assert pgqueue("jobs", "resume-type", "echo").stdout == "job type echo is resumed\n"
    assert json.loads(pgqueue("jobs", "resume-type", "echo", "--json").stdout)["changed"] is False
    assert connection.execute(claim).fetchone() == (1,)


def test_workers_are_listed(pgqueue: Invoke, connection: Connection) -> None:
    worker_id = uuid4()
    connection.execute(
        "select pgqueue.worker_started(%s, 'w1', 'host', 7, null, '{a,b}', '{echo}', '{0,1}', 4, '0.1.0')", (worker_id,)
    )
    said = pgqueue("workers").stdout
    assert "w1" in said
    assert "a,b" in said
    assert "critical,high" in said
    assert json.loads(pgqueue("workers", "--json").stdout)[0]["worker_id"] == str(worker_id)


# psql -----------------------------------------------------------------------------------------------------------------


def test_psql_opens_the_database_with_the_schema_on_the_path(database: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgqueue", "psql", "-XAtc", "select count(*) from jobs; show search_path"],
        env={**os.environ, "PGQUEUE_DSN": database}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "0\npgqueue,public\n"
    failed = subprocess.run(
        [sys.executable, "-m", "pgqueue", "psql", "-X", "-v", "ON_ERROR_STOP=1", "-c", "select nonsense"],
        env={**os.environ, "PGQUEUE_DSN": database}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert failed.returncode == 1


def test_psql_keeps_the_password_out_of_the_arguments() -> None:
    from pgqueue.cli.psql import session

    environment, rest = session(
        "postgresql://me:s3cret@a,b:5433/db?options=-cgeqo%3Doff&keepalives_idle=5", {"PATH": "/bin"}
    )
    assert rest == "keepalives_idle=5"
    assert environment["PGPASSWORD"] == "s3cret"
    assert (environment["PGHOST"], environment["PGPORT"], environment["PGUSER"]) == ("a,b", ",5433", "me")
    assert environment["PGOPTIONS"] == "-cgeqo=off -csearch_path=pgqueue,public"
