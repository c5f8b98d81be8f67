"""migrate(): any number of callers, any names, busy tables, faults in the middle."""

import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import schema
from pgqueue.errors import ConfigError, DatabaseConflict, PgqueueError, SchemaOutdated
from tests.migrations.conftest import CHECKOUT, EmptyDatabases

PASSWORD = "p@:/#%"
AddRevision = Callable[..., str]


def migrate_by_command(*dsns: str) -> None:
    """Run `pgqueue migrate` once for each DSN, all at the same time."""

    def run(dsn: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pgqueue", "migrate"]
        return subprocess.run(command, env=os.environ | {"PGQUEUE_DSN": dsn}, capture_output=True, text=True)

    with ThreadPoolExecutor(len(dsns)) as pool:
        for done in pool.map(run, dsns):
            assert done.returncode == 0, done.stdout + done.stderr


def version_rows(dsn: str) -> list[tuple[str]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute("select version_num from pgqueue.alembic_version").fetchall()


def test_five_at_once_on_one_empty_database(empty: str) -> None:
    migrate_by_command(*[empty] * 5)
    assert version_rows(empty) == [(schema.head(),)]


def test_several_databases_of_one_server_at_once(databases: EmptyDatabases) -> None:
    dsns = [databases.create() for _ in range(3)]
    migrate_by_command(*dsns)
    for dsn in dsns:
        assert version_rows(dsn) == [(schema.head(),)]


def test_threads_of_one_process(empty: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(schema.migrate, [empty] * 3))
    assert sorted(done, key=len)[:2] == [[], []]
    assert schema.current_version(empty) == schema.head()


@pytest.fixture
def odd_names(databases: EmptyDatabases) -> Iterator[dict[str, str]]:
    """A database and its owner, no superuser, whose names and password need quoting everywhere; no search_path."""
    owner = f"job-owner {uuid.uuid4().hex[:8]}"
    role = sql.Identifier(owner)
    databases.administer(
        sql.SQL("create role {} login createrole password {}").format(role, sql.Literal(PASSWORD)),
        sql.SQL("alter role {} set search_path = ''").format(role),
        sql.SQL("alter role {} set idle_in_transaction_session_timeout = '300ms'").format(role),
    )
    dsn = databases.create(f"My-Queue db {uuid.uuid4().hex[:8]}", owner=owner)
    yield conninfo_to_dict(make_conninfo(dsn, user=owner, password=PASSWORD))
    databases.drop_all()
    databases.administer(sql.SQL("drop role {}").format(role))


@pytest.mark.parametrize("form", ["keywords", "uri"])
def test_any_password_database_and_role(odd_names: dict[str, str], form: str) -> None:
    if form == "uri":
        user, password, name = (quote(odd_names[key], safe="") for key in ("user", "password", "dbname"))
        dsn = f"postgresql://{user}:{password}@/{name}?host={quote(odd_names['host'])}&port={odd_names['port']}"
    else:
        dsn = make_conninfo(**odd_names)

    migrate_by_command(dsn)

    assert schema.current_version(dsn) == schema.head()
    with psycopg.connect(dsn) as connection:
        owners = connection.execute(
            "select distinct relowner::regrole::text from pg_class where relnamespace = 'pgqueue'::regnamespace"
        ).fetchall()
    assert owners == [(f'"{odd_names["user"]}"',)]


def test_limits_on_idle_transactions_do_not_lose_the_lock(odd_names: dict[str, str], add_revision: AddRevision) -> None:
    dsn = make_conninfo(**odd_names)
    schema.migrate(dsn)
    add_revision("select pg_sleep(1); create table pgqueue.toy ();")
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(schema.migrate, [dsn, dsn])) == [[], ["0002"]]


def test_a_long_reader_delays_the_migration_and_not_the_producers(empty: str, add_revision: AddRevision) -> None:
    schema.migrate(empty)
    add_revision("alter table pgqueue.jobs add column toy int;")
    waits: list[float] = []
    done = threading.Event()

    def produce() -> None:
        with psycopg.connect(empty, autocommit=True) as connection:
            while not done.wait(0.1):
                began = time.monotonic()
                connection.execute("insert into pgqueue.jobs (job_type) values ('toy')")
                waits.append(time.monotonic() - began)

    with ThreadPoolExecutor(2) as pool:
        with psycopg.connect(empty) as reader:
            reader.execute("select count(*) from pgqueue.jobs")
            producing = pool.submit(produce)
            migrating = pool.submit(schema.migrate, empty)
            time.sleep(7)
            assert not migrating.done()
        assert migrating.result(30) == ["0002"]
        done.set()
        producing.result()
    assert 1 < max(waits) < 5, "the migration met the reader, and let go"


def test_patience_that_ends_leaves_nothing_behind(empty: str, add_revision: AddRevision) -> None:
    schema.migrate(empty)
    add_revision("create table pgqueue.toy (); alter table pgqueue.jobs add column toy int;")
    with psycopg.connect(empty) as reader:
        reader.execute("select count(*) from pgqueue.jobs")
        with pytest.raises(DatabaseConflict, match="long transactions"):
            schema.migrate(empty, patience=1)
        assert schema.current_version(empty) == "0001"
    assert schema.migrate(empty) == ["0002"]


def test_waiting_for_another_migration_ends_with_patience(empty: str) -> None:
    with schema.exclusively(empty), pytest.raises(DatabaseConflict, match="another migration"):
        schema.migrate(empty, patience=0.2)
    assert schema.migrate(empty)


def test_a_faulty_revision_is_undone_and_named(empty: str, add_revision: AddRevision) -> None:
    add_revision("create table pgqueue.toy ();\nselect wrong;\n")
    with pytest.raises(PgqueueError) as caught:
        schema.migrate(empty)
    assert "0002_toy.up.sql, line 3" in "".join(caught.value.__cause__.__notes__)
    assert version_rows(empty) == [("0001",)]


def test_bodies_are_not_searched_for_parameters(
    databases: EmptyDatabases, empty: str, add_revision: AddRevision
) -> None:
    add_revision("create function pgqueue.toy() returns text language sql as $$ select '100%s %(a)s' || ':b' $$;")
    schema.migrate(empty)
    script = schema.migration_sql("0001")
    with psycopg.connect(empty) as connection:
        assert connection.execute("select pgqueue.toy()").fetchone() == ("100%s %(a)s:b",)
    assert "'100%s %(a)s' || ':b'" in script


def test_a_newer_schema_is_refused(empty: str, add_revision: AddRevision, monkeypatch: pytest.MonkeyPatch) -> None:
    add_revision("create table pgqueue.toy ();")
    schema.migrate(empty)
    monkeypatch.undo()
    with pytest.raises(SchemaOutdated, match="newer"):
        schema.migrate(empty)
    assert version_rows(empty) == [("0002",)]


@pytest.mark.parametrize("encoding", ["LATIN1", "EUC_JP"])
def test_another_encoding_than_utf8_is_refused_before_anything_is_made(
    databases: EmptyDatabases, encoding: str
) -> None:
    dsn = databases.create(encoding=encoding)
    with pytest.raises(ConfigError, match=f"encoding {encoding}.*UTF8"):
        schema.migrate(dsn)
    alembic = subprocess.run(
        [sys.executable, "-m", "alembic", "upgrade", "head"],
        cwd=CHECKOUT, env=os.environ | {"PGQUEUE_DSN": dsn}, capture_output=True, text=True,
    )  # fmt: skip
    assert alembic.returncode != 0
    assert f"encoding {encoding}" in alembic.stderr
    with psycopg.connect(dsn) as connection:
        assert connection.execute("select to_regnamespace('pgqueue') is null").fetchone() == (True,)


def test_a_database_that_keeps_any_bytes_will_do(databases: EmptyDatabases) -> None:
    dsn = databases.create(encoding="SQL_ASCII")
    assert schema.migrate(dsn) == [schema.head()]


def test_no_version_before_the_first_migration(empty: str) -> None:
    assert schema.current_version(empty) is None
