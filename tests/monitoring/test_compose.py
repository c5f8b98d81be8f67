"""compose.yaml: what can be checked without a Docker engine."""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
import yaml
from psycopg.conninfo import conninfo_to_dict

from pgqueue.cli import root
from tests.servers import CHECKOUT, ServerUnderTest

SERVICES: dict[str, Any] = yaml.safe_load((CHECKOUT / "compose.yaml").read_text())["services"]


def test_every_file_that_is_mounted_exists() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ()) if mount.startswith(".")]
    assert len(mounts) == 5
    for mount in mounts:
        assert (CHECKOUT / mount.split(":")[0]).is_file(), mount


def test_every_dependency_is_a_service() -> None:
    for service in SERVICES.values():
        assert set(service.get("depends_on", ())) <= SERVICES.keys()


@pytest.mark.parametrize("name", ["migrate", "api", "workers"])
def test_commands_are_commands_of_ours(name: str) -> None:
    first, *rest = [part.replace("${PGQUEUE_APP:-pgqueue.demo:app}", "a:b") for part in SERVICES[name]["command"]]
    command = root.get_command(click.Context(root), first)
    assert command is not None
    command.make_context(first, rest, resilient_parsing=False)


def test_keys_are_made_once_and_can_be_read_back(database: str, server: ServerUnderTest, tmp_path: Path) -> None:
    script = SERVICES["keys"]["command"][2].replace("$$", "$").replace("/keys", str(tmp_path))
    where = {key: str(value) for key, value in conninfo_to_dict(database).items()}
    environment = {
        **os.environ,
        "PATH": f"{server.bindir}:{os.environ['PATH']}",
        **{f"PG{key.upper()}": where[name] for key, name in (("host", "host"), ("user", "user"), ("port", "port"))},
        "PGDATABASE": where["dbname"],
        "PGPASSWORD": where.get("password", ""),
    }
    for _ in range(2):
        done = subprocess.run(["bash", "-euc", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with psycopg.connect(database) as connection:
        rows = connection.execute("select name, sha256, scopes from pgqueue.api_keys order by name").fetchall()
    assert [(name, scopes) for name, _, scopes in rows] == [("compose-admin", ["admin"]), ("compose-metrics", ["read"])]
    for (_, digest, _), file in zip(rows, ("admin", "metrics"), strict=True):
        key = (tmp_path / file).read_text()
        assert len(key) == 68
        assert hashlib.sha256(key.encode()).digest() == digest
