"""A client that is not Python: Node, over HTTP with its own fetch, and by SQL with pg where npm can fetch that."""

import shutil
import subprocess
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from tests.api.conftest import MakeLive

NODE = shutil.which("node")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A directory with pg in it; None without npm, or without a registry."""
    npm = shutil.which("npm")
    if npm is None:
        return None
    place = tmp_path_factory.mktemp("node")
    try:
        done = subprocess.run(
            [npm, "install", "pg@8", "--no-audit", "--no-fund"], cwd=place, capture_output=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        return None
    return place if done.returncode == 0 else None


@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_a_node_program_produces_works_and_watches(live: MakeLive, database: str, modules: Path | None) -> None:
    assert NODE is not None
    told = {name: str(value) for name, value in conninfo_to_dict(database).items()}
    dsn = f"postgresql://{told['user']}@/{told['dbname']}?host={told['host']}&port={told.get('port', '5432')}"
    program = Path(__file__).with_name("client.mjs")
    done = subprocess.run(
        [NODE, str(program), live().url, dsn, *([str(modules)] if modules else [])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "well"), done.stderr
    if modules is None:
        pytest.skip("pg cannot be had here; the HTTP half passed")
