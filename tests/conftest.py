"""Fixtures for everything that needs a database; `pytest --postgres=...` says which server to use."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from tests.servers import Databases, OwnServer, Run, ServerUnderTest

RUN = pytest.StashKey[Run]()


class Connect(Protocol):
    """Opens a session on the test's database; autocommit unless asked otherwise; closed after the test."""

    def __call__(self, **options: Any) -> psycopg.Connection[Any]: ...


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pgqueue")
    group.addoption(
        "--postgres", default="embedded", metavar="SERVER",
        help="embedded (default), system (the newest in /usr/lib/postgresql, or PGQUEUE_PG_BINDIR), container, or the "
        "DSN of a superuser on a server for tests",
    )  # fmt: skip
    group.addoption(
        "--schema", default="migrated", choices=["migrated", "present"],
        help="how test databases get the schema: by the migrations (default), or from pgqueue/sql as it is now",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    kind, which_schema = config.getoption("--postgres"), config.getoption("--schema")
    if worker := getattr(config, "workerinput", None):
        config.stash[RUN] = Run(Path(worker["run"]), kind, which_schema)
    else:
        try:
            config.stash[RUN] = Run.begin(kind, which_schema)
        except Exception as error:
            raise pytest.UsageError(f"--postgres={kind}: {error}") from error


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["run"] = str(node.config.stash[RUN].path)


def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run and not hasattr(config, "workerinput"):
        run.end()


def pytest_report_header(config: pytest.Config) -> str:
    kind = config.getoption("--postgres")
    return f"postgres: {kind if kind in ('embedded', 'system', 'container') else 'by DSN'}"


@pytest.fixture(scope="session")
def server(pytestconfig: pytest.Config) -> ServerUnderTest:
    """The run's server: `dsn` of its superuser, `bindir` of client programs."""
    return pytestconfig.stash[RUN].server()


@pytest.fixture(scope="session")
def template_copies(server: ServerUnderTest) -> Iterator[Databases]:
    copies = Databases(server)
    yield copies
    copies.close()


@pytest.fixture
def database(template_copies: Databases) -> Iterator[str]:
    """The DSN of a fresh database with the schema."""
    dsn = template_copies.create()
    yield dsn
    template_copies.drop(dsn)


@pytest.fixture
def connect(database: str) -> Iterator[Connect]:
    """A factory of sessions on the test's database."""
    opened: list[psycopg.Connection[Any]] = []

    def open_session(**options: Any) -> psycopg.Connection[Any]:
        opened.append(psycopg.connect(database, **{"autocommit": True, **options}))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


@pytest.fixture
def connection(connect: Connect) -> psycopg.Connection[Any]:
    """A session in autocommit mode on the test's database."""
    return connect()


@pytest.fixture
def own_server(pytestconfig: pytest.Config) -> Iterator[OwnServer]:
    """A durable server of this test alone."""
    own = OwnServer(pytestconfig.stash[RUN].which_schema)
    yield own
    own.close()
