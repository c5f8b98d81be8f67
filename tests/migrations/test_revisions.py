"""The frozen revisions: together they are the present text, each goes up, down and up again."""

import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from pgqueue import schema
from tests.migrations.conftest import CHECKOUT, EmptyDatabases

FROZEN = sorted((CHECKOUT / "alembic" / "versions").glob("*.sql"))
OUTSIDE = """
    select 'relation', c.oid::regclass::text from pg_class c
     where relnamespace::regnamespace::text not in ('pgqueue', 'pg_catalog', 'information_schema', 'pg_toast')
    union all select 'function', oid::regprocedure::text from pg_proc
     where pronamespace::regnamespace::text not in ('pgqueue', 'pg_catalog', 'information_schema')
    union all select 'type', oid::regtype::text from pg_type
     where typnamespace::regnamespace::text not in ('pgqueue', 'pg_catalog', 'information_schema', 'pg_toast')
    union all select 'schema', nspname from pg_namespace
     where nspname !~ '^pg_temp|^pg_toast_temp' and nspname <> 'pgqueue'
    union all select 'extension', extname from pg_extension
    union all select 'event trigger', evtname from pg_event_trigger
    union all select 'publication', pubname from pg_publication
    union all select 'cast', oid::text from pg_cast where oid >= 16384
    union all select 'large object', oid::text from pg_largeobject_metadata
    order by 1, 2"""


def alembic(dsn: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "alembic", *arguments],
        cwd=CHECKOUT, env=os.environ | {"PGQUEUE_DSN": dsn}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def versions(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("select version_num from pgqueue.alembic_version")]


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.name)
def test_frozen_text_states_its_limits_first(path: Path) -> None:
    """Or a migration would stop producers behind its locks, or depend on its role's settings."""
    first = path.read_text().splitlines()[:3]
    assert first == [
        "set local lock_timeout = '2s';",
        "set local statement_timeout = 0;",
        "set local search_path = '';",
    ]


def test_head_equals_the_present_text(databases: EmptyDatabases, empty: str) -> None:
    present = databases.create()
    for path in sorted((CHECKOUT / "pgqueue" / "sql").glob("*.sql")):
        databases.run("psql", "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", "-d", present, "-f", path)

    schema.migrate(empty)

    assert databases.dump(empty) == databases.dump(present), "run .ci/freeze, or write a revision"


def test_every_revision_goes_up_and_down_and_up(databases: EmptyDatabases, empty: str) -> None:
    history = alembic(empty, "history").splitlines()
    revisions = [line.split(" -> ")[1].split(",")[0].split()[0] for line in reversed(history)]
    assert revisions[-1] == schema.head()
    before = databases.dump(empty)
    for revision in revisions:
        alembic(empty, "upgrade", revision)
        after = databases.dump(empty)
        alembic(empty, "downgrade", "-1")
        assert without_schema(databases.dump(empty)) == without_schema(before)
        alembic(empty, "upgrade", revision)
        assert databases.dump(empty) == after
        assert versions(empty) == [revision]
        before = after


def without_schema(dump: str) -> str:
    """Strip the empty schema, in which the version table stays when everything else has gone."""
    return "\n".join(line for line in dump.splitlines() if line and "pgqueue" not in line and line != "--")


def test_all_the_way_down_leaves_only_the_version_table(empty: str) -> None:
    alembic(empty, "upgrade", "head")
    alembic(empty, "downgrade", "base")

    assert versions(empty) == []
    with psycopg.connect(empty) as connection:
        left = connection.execute(
            "select relname from pg_class where relnamespace = 'pgqueue'::regnamespace order by 1"
        )
        assert left.fetchall() == [("alembic_version",), ("alembic_version_pkc",)]
    assert schema.migrate(empty)[-1] == schema.head()


def test_nothing_is_made_outside_the_schema(empty: str) -> None:
    with psycopg.connect(empty, autocommit=True) as connection:
        before = connection.execute(OUTSIDE).fetchall()
        schema.migrate(empty)
        assert connection.execute(OUTSIDE).fetchall() == before


def test_printed_sql_through_psql_equals_migrate(databases: EmptyDatabases, empty: str, tmp_path: Path) -> None:
    schema.migrate(empty)
    script = tmp_path / "pgqueue.sql"
    script.write_text(schema.migration_sql())
    printed = databases.create()
    databases.run("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", printed, "-f", script)

    assert databases.dump(printed) == databases.dump(empty)
    assert versions(printed) == [schema.head()]
    assert schema.migrate(printed) == []


def test_printed_sql_can_start_at_a_revision() -> None:
    assert schema.migration_sql(schema.head()).strip() == ""
