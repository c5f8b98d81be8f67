"""Empty databases, their dumps, and a set of revisions that a test can add to."""

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from pgqueue import schema

CHECKOUT = Path(__file__).parents[2]


class EmptyDatabases:
    """Makes empty databases on the server under test and drops them."""

    def __init__(self, server_dsn: str, bindir: Path) -> None:
        self.server_dsn = server_dsn
        self.bindir = bindir
        self._made: list[str] = []

    def create(self, name: str | None = None, owner: str | None = None, encoding: str | None = None) -> str:
        """Return the DSN of a new database, for the server's superuser."""
        name = name or f"migrations_{uuid.uuid4().hex[:12]}"
        statement = sql.SQL("create database {} template template0").format(sql.Identifier(name))
        if owner:
            statement += sql.SQL(" owner {}").format(sql.Identifier(owner))
        if encoding:
            statement += sql.SQL(" encoding {} locale_provider libc locale 'C'").format(sql.Literal(encoding))
        self.administer(statement)
        self._made.append(name)
        return make_conninfo(self.server_dsn, dbname=name)

    def administer(self, *statements: str | sql.Composable) -> None:
        """Run statements outside any test's database."""
        with psycopg.connect(self.server_dsn, dbname="postgres", autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)

    def dump(self, dsn: str) -> str:
        """Return the definitions in a database, less alembic's own table and what differs from dump to dump."""
        text = self.run("pg_dump", "--schema-only", "--exclude-table=pgqueue.alembic_version", "--dbname", dsn)
        return re.sub(r"^\\(un)?restrict .*$", "", text, flags=re.MULTILINE)

    def run(self, program: str, *arguments: str | Path) -> str:
        """Return what a program of the server's own version prints."""
        done = subprocess.run(
            [self.bindir / program, *arguments], capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def drop_all(self) -> None:
        """Drop what create() made, whoever is still connected."""
        for name in self._made:
            self.administer(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@pytest.fixture
def databases(server) -> Iterator[EmptyDatabases]:
    made = EmptyDatabases(server.dsn, Path(server.bindir))
    yield made
    made.drop_all()


@pytest.fixture
def empty(databases: EmptyDatabases) -> str:
    return databases.create()


@pytest.fixture
def add_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A revision on top of head, seen by this test alone; its folder's name is one that config files trip over."""
    revisions = tmp_path / "100% of them"
    shutil.copytree(CHECKOUT / "alembic", revisions, ignore=shutil.ignore_patterns("__pycache__"))

    def add(up: str, down: str = "select 1;") -> str:
        before = schema.head()
        monkeypatch.setattr(schema, "_location", lambda: revisions)
        revision = f"{int(before) + 1:04}"
        path = revisions / "versions" / f"{revision}_toy.py"
        path.write_text(
            '"""Toy."""\nfrom pgqueue.schema import frozen\n'
            f'revision, down_revision = "{revision}", "{before}"\nupgrade, downgrade = frozen(__file__)\n'
        )
        path.with_suffix(".up.sql").write_text("set local lock_timeout = '2s';\n" + up)
        path.with_suffix(".down.sql").write_text(down)
        return revision

    return add
