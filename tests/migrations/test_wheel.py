"""The built wheel: what is in it, and that it migrates a database from a directory that holds nothing else."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from pgqueue import schema
from tests.migrations.conftest import CHECKOUT


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, cwd=CHECKOUT)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of an environment that has the wheel, and borrows what it depends on from this one."""
    venv = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    run(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--no-deps", wheel, cwd=venv)
    (packages,) = venv.glob("lib/python*/site-packages")
    # A path in a .pth file is not searched for further .pth files, so the checkout stays out of reach.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return venv / "bin"


def test_wheel_has_the_migrations_inside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    versions = {path.name for path in (CHECKOUT / "alembic" / "versions").iterdir() if path.is_file()}

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"pgqueue"}
    assert {name.removeprefix("pgqueue/_migrations/") for name in names if "/_migrations/" in name} == {
        "env.py",
        *(f"versions/{name}" for name in versions),
    }
    assert "pgqueue/py.typed" in names
    assert not [name for name in names if name.endswith((".pyc", "__pycache__/"))]


def test_installed_wheel_migrates_from_an_empty_directory(installed: Path, empty: str, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import pgqueue.schema as s; print(s._location())", cwd=tmp_path)
    assert where.strip().startswith(str(installed.parent))

    run(installed / "pgqueue", "migrate", cwd=tmp_path, PGQUEUE_DSN=empty)
    assert schema.current_version(empty) == schema.head()
    assert run(installed / "pgqueue", "migrate", "--sql", cwd=tmp_path).strip() == schema.migration_sql().strip()
    assert list(tmp_path.iterdir()) == []
