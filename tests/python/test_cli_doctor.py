"""`pgqueue doctor`, `alerts`, `metrics`, `completion`: each finding on a real database that has the fault."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.conninfo import make_conninfo

from pgqueue.cli import advice, root
from pgqueue.cli.doctor import Finding
from tests.conftest import Connect
from tests.meet import wait_until
from tests.servers import OwnServer

Invoke = Callable[..., Result]
Connection = psycopg.Connection[Any]


@pytest.fixture
def pgqueue(database: str) -> Invoke:
    """Runs a command on the test's database."""

    def invoke(*args: str, dsn: str = database, **variables: str) -> Result:
        result = CliRunner().invoke(root, args, env={"PGQUEUE_DSN": dsn, **variables})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


def findings(result: Result) -> dict[str, Finding]:
    """What is not ok, by check."""
    rows = [Finding(**row) for row in json.loads(result.stdout)]
    return {row.check: row for row in rows if row.level != "ok"}


@pytest.fixture
def healthy(connection: Connection) -> None:
    """A queue that is swept, has its partitions and two workers."""
    connection.execute("select pgqueue.maintain_partitions()")
    connection.execute("select pgqueue.sweep()")
    for number in (1, 2):
        connection.execute(
            "select pgqueue.worker_started(%s::uuid, 'w', 'host', 1, null, null, '{t}', null, 10, '1')",
            (f"00000000-0000-4000-8000-00000000000{number}",),
        )


@pytest.mark.usefixtures("healthy")
def test_a_healthy_queue(pgqueue: Invoke) -> None:
    # The tests' servers are not durable, which the doctor rightly minds.
    result = pgqueue("doctor", "--json")
    assert set(findings(result)) <= {"settings"}, result.stdout
    text = pgqueue("doctor").stdout
    for words in ("schema", "a bell is heard after", "none: this is a direct connection", "apart from the database"):
        assert words in text


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(
    ("role", "unchecked"),
    [
        ("pgqueue_operator", set()),
        ("pgqueue_reader", {"horizon"}),
        ("pgqueue_worker", {"horizon"}),
        ("pgqueue_producer", {"horizon", "partitions", "sweep", "workers", "alert"}),
    ],
)
def test_a_role_is_told_what_it_may_look_at(pgqueue: Invoke, database: str, role: str, unchecked: set[str]) -> None:
    as_role = psycopg.conninfo.make_conninfo(database, options=f"-c role={role}")
    result = pgqueue("doctor", "--json", dsn=as_role)
    found = findings(result)
    assert found.keys() - {"settings"} == unchecked, result.stdout
    for check in unchecked:
        assert found[check].level == "warning"
        assert found[check].found.startswith("not checked: permission denied for ")
        assert "grant the database role pgqueue_producer" in found[check].found


def test_a_queue_that_nobody_keeps(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute("select pgqueue.maintain_partitions()")
    connection.execute("delete from pgqueue.sweep_steps")
    connection.execute("drop table pgqueue.jobs_completed_" + f"{datetime.now(UTC):%Y%m%d}")
    result = pgqueue("doctor", "--json")
    found = findings(result)
    assert result.exit_code == 1
    assert found["partitions"].level == found["sweep"].level == "problem"
    assert "missing: jobs_completed_2" in found["partitions"].found
    assert "maintain_partitions" in (found["partitions"].advice or "")
    text = pgqueue("doctor").stdout
    assert "PROBLEM  partitions" in text
    assert "→ start a worker" in text


@pytest.mark.usefixtures("healthy")
def test_who_holds_the_horizon_is_named_with_how_to_end_it(
    pgqueue: Invoke, connect: Connect, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgqueue.cli.doctor._LONG", 0.0)
    other = connect(autocommit=False, application_name="report")
    other.execute("set transaction isolation level repeatable read")
    other.execute("select count(*) from pgqueue.jobs")
    prepared = connect(autocommit=False)
    prepared.execute("insert into pgqueue.jobs (job_type) values ('t')")
    prepared.execute("prepare transaction 'forgotten'")
    rows = [Finding(**row) for row in json.loads(pgqueue("doctor", "--json").stdout)]
    held = [row for row in rows if row.check == "horizon"]
    assert {row.level for row in held} == {"problem"}
    pid = other.info.backend_pid
    assert any(f"pid {pid}" in row.found and "report" in row.found for row in held)
    assert any(f"pg_terminate_backend({pid})" in (row.advice or "") for row in held)
    assert any("rollback prepared 'forgotten'" in (row.advice or "") for row in held)
    connection.execute("rollback prepared 'forgotten'")
    other.rollback()


@pytest.mark.usefixtures("healthy")
def test_lost_workers_failing_sweeps_and_alerts(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute(
        "update pgqueue.workers set last_heartbeat = now() - interval '5 minutes'"
        " where worker_id = '00000000-0000-4000-8000-000000000001'"
    )
    connection.execute("update pgqueue.sweep_steps set failures = 3, last_error = 'no rights' where step = 'due'")
    found = findings(pgqueue("doctor", "--json"))
    assert "silent for 5m" in found["workers"].found
    assert "step due failed 3 times: no rights" in found["sweep"].found
    assert found["alert"].found.startswith("WorkerCountLow")


@pytest.mark.usefixtures("healthy")
def test_one_worker_alone_is_a_warning_and_none_a_problem(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute("update pgqueue.alert_rules set hold = '0'")
    connection.execute("delete from pgqueue.workers where worker_id = '00000000-0000-4000-8000-000000000001'")

    def few() -> list[Finding]:
        rows = [Finding(**row) for row in json.loads(pgqueue("doctor", "--json").stdout)]
        return [row for row in rows if row.found.startswith("Worker")]

    assert sorted((row.found, row.level) for row in few()) == [
        ("WorkerCountLow: 1 live worker, 2 wanted", "warning"),
        ("WorkerDown: 1 live worker, 2 wanted", "warning"),
    ]
    assert all("pgqueue worker MODULE:APP" in (row.advice or "") for row in few())
    connection.execute("delete from pgqueue.workers")
    assert ("problem", "WorkerDown: 0 live workers, 2 wanted") in [row[1:3] for row in few()]


def test_each_alert_has_its_advice(connection: Connection) -> None:
    rules = {alert for (alert,) in connection.execute("select alert from pgqueue.alert_rules")}
    assert rules == advice._ADVICE.keys()
    assert advice.advice_on("MyOwn") == "its rule is a row of pgqueue.alert_rules"


@pytest.mark.usefixtures("healthy")
def test_dead_rows(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute("alter table pgqueue.jobs_live set (autovacuum_enabled = off)")
    connection.execute("insert into pgqueue.jobs (job_type) select 't' from generate_series(1, 30000)")
    connection.execute("delete from pgqueue.jobs_live")
    connection.execute("select pg_stat_force_next_flush()")
    found = wait_until(lambda: findings(pgqueue("doctor", "--json")).get("dead rows"), 20)
    assert "jobs_live has 30,000 dead rows" in found.found
    assert "vacuum (analyze) pgqueue.jobs_live" in (found.advice or "")


@pytest.mark.usefixtures("healthy")
def test_jobs_that_no_partition_took(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute(
        "insert into pgqueue.jobs_completed (job_type, status, finished_at)"
        " values ('t', 'completed', now() + interval '1 year')"
    )
    assert "jobs_completed_default hold" in findings(pgqueue("doctor", "--json"))["partitions"].found


def test_roles_that_nobody_made_are_told_of_and_then_made(own_server: OwnServer, pgqueue: Invoke) -> None:
    roles = ["pgqueue_producer", "pgqueue_worker", "pgqueue_operator", "pgqueue_reader"]
    with psycopg.connect(own_server.dsn, autocommit=True) as admin:
        admin.execute("set client_min_messages = error; drop schema pgqueue cascade")
        admin.execute("; ".join(f"drop role {role}" for role in roles) + "; create role plain login")
        admin.execute("create database plain owner plain")
    dsn = make_conninfo(own_server.dsn, dbname="plain")
    owners = make_conninfo(dsn, user="plain")
    plain = pgqueue("migrate", dsn=owners)
    assert plain.exit_code == 0, plain.stderr
    assert all(f"create role {role} nologin;" in plain.stderr for role in roles)
    assert findings(pgqueue("doctor", "--json", dsn=owners))["roles"].found == f"missing: {', '.join(roles)}"
    with psycopg.connect(dsn, autocommit=True) as admin:
        # Made without their rights, which the owner may give.
        admin.execute("create role pgqueue_producer nologin")
        again = json.loads(pgqueue("migrate", "--json", dsn=owners).stdout)
        assert again["missing_roles"] == roles[1:]
        may = "select has_column_privilege('pgqueue_producer', 'pgqueue.jobs', 'payload', 'insert')"
        assert admin.execute(may).fetchone() == (True,)
        assert json.loads(pgqueue("migrate", "--json", dsn=dsn).stdout)["missing_roles"] == []
        may = "select has_function_privilege('pgqueue_worker', oid, 'execute') from pg_proc where proname = 'complete'"
        assert admin.execute(may).fetchone() == (True,)
    assert "roles" not in findings(pgqueue("doctor", "--json", dsn=dsn))


def test_a_server_that_risks_jobs(own_server: OwnServer, pgqueue: Invoke) -> None:
    assert "settings" not in findings(pgqueue("doctor", "--json", dsn=own_server.dsn))
    with psycopg.connect(own_server.dsn, autocommit=True) as connection:
        connection.execute("alter system set fsync = off")
        connection.execute("alter system set autovacuum = off")
        connection.execute("select pg_reload_conf()")
    found = wait_until(lambda: findings(pgqueue("doctor", "--json", dsn=own_server.dsn)).get("settings"), 10)
    assert found.level == "problem"


def test_no_database(pgqueue: Invoke) -> None:
    assert pgqueue("doctor", dsn="host=127.0.0.1 port=1").exit_code == 7


def test_polling_needs_no_bell(pgqueue: Invoke) -> None:
    assert "PGQUEUE_WAKE is poll" in pgqueue("doctor", PGQUEUE_WAKE="poll").stdout


# Others ---------------------------------------------------------------------------------------------------------------


def test_alerts_end_with_5_only_for_pages(pgqueue: Invoke, connection: Connection) -> None:
    connection.execute("select pgqueue.sweep()")
    result = pgqueue("alerts")
    assert result.exit_code == 0
    assert "WorkerCountLow  warning" in result.stdout
    connection.execute("update pgqueue.alert_rules set hold = '0' where alert = 'WorkerDown'")
    result = pgqueue("alerts", "--json")
    assert result.exit_code == 5
    assert [row["alert"] for row in json.loads(result.stdout)] == ["WorkerDown", "WorkerCountLow"]


def test_metrics_as_text_and_json(pgqueue: Invoke) -> None:
    assert "# TYPE pgqueue_workers gauge\n" in pgqueue("metrics").stdout
    rows = json.loads(pgqueue("metrics", "--json").stdout)
    assert {"name", "kind", "labels", "value"} == set(rows[0])
    assert pgqueue("metrics", "--serve", "nonsense").exit_code == 2


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_metrics_on_a_port(database: str, told: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pgqueue", "metrics", "--serve", "127.0.0.1:0"],
        env={**os.environ, "PGQUEUE_DSN": database},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split("at ")[1].split(";")[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert b"pgqueue_collector_up 1.0" in answer.read()
        process.send_signal(told)
        assert (process.wait(30), process.stderr.read()) == (0, "")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(pgqueue: Invoke, shell: str) -> None:
    assert "_PGQUEUE_COMPLETE" in pgqueue("completion", shell).stdout


def test_bash_completes_commands() -> None:
    environment = {**os.environ, "_PGQUEUE_COMPLETE": "bash_complete", "COMP_WORDS": "pgqueue do", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from pgqueue.cli import main; main()"], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["plain,doctor"]


def test_the_wanted_number(pgqueue: Invoke, connection: Connection) -> None:
    assert pgqueue("autoscale", "--print").stdout == "2\n"
    assert pgqueue("autoscale", "--print", "--min", "0").stdout == "0\n"
    connection.execute("insert into pgqueue.jobs (job_type) values ('t')")
    said = json.loads(pgqueue("autoscale", "--print", "--min", "0", "--json").stdout)
    assert (said["value"], said["load"]["pending"]) == (2, 1)
    assert pgqueue("autoscale", "pgqueue.demo:app", "--print").stdout == "2\n"
    assert pgqueue("autoscale").exit_code == 2
    assert pgqueue("autoscale", "a:b", "--min", "5", "--max", "2").exit_code == 2
