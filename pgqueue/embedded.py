"""The embedded PostgreSQL: a small launcher over server programs that a wheel or the system brings.

An instance is one directory: `PGQUEUE_DATA_DIR`, else `$XDG_DATA_HOME/pgqueue/pg<major>`, else for root
`/var/lib/pgqueue/pg<major>` and for others `~/.local/share/pgqueue/pg<major>`. In it:

    pgdata/       the cluster              socket/       its unix socket, mode 0700
    lock          held while deciding      users         held shared by every process that uses the server
    server.json   port and such            password      of the superuser `pgqueue` over TCP, mode 0600

Any number of processes share the server. Each holds a shared flock on `users`, which the kernel drops however the
process ends, so counting is asking for that lock exclusively; whoever leaves last stops the server. Starting and
stopping happen under an exclusive flock on `lock`. The server is a direct child in a session of its own: it outlives
its parent, and a server that nobody uses any more is taken over by the next start. What a crash or kill -9 left
behind (a postmaster.pid whose process is gone, is a zombie or is by now another program; backends without a
postmaster) is cleared under the lock, and PostgreSQL replays its log.

It listens on 127.0.0.1, with a scram password, and on a unix socket that only its owner can reach, which is why the
socket asks for no password and `Server.dsn` holds no secret. fsync is on unless a caller asks for `durable=False`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

from pgqueue.programs import (
    EmbeddedError,
    Identity,
    ended,
    find_binaries,
    free_port,
    identity_for,
    is_alive,
    is_free,
    kill,
    reachable,
    servers_of,
    serves,
    version,
)

__all__ = ["EmbeddedError", "Server", "StopMode", "find_binaries", "start", "stop"]

log = logging.getLogger("pgqueue.embedded")

StopMode = Literal["smart", "fast", "immediate"]

SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
LOCK_SECONDS = 300.0
STOP_SECONDS = 60.0
# sockaddr_un holds 104 bytes on macOS and 108 on Linux, the closing zero included.
SOCKET_DIR_BYTES = 103 - len("/.s.PGSQL.65535")

# For a new cluster, into postgresql.conf, where its owner may edit them.
CONF = """
max_connections = 200
shared_buffers = 256MB
max_wal_size = 2GB
checkpoint_timeout = 15min
jit = off
random_page_cost = 1.1
autovacuum_naptime = 10s
timezone = 'UTC'
log_timezone = 'UTC'
logging_collector = on
log_directory = 'log'
log_filename = 'postgresql-%a.log'
log_truncate_on_rotation = on
log_rotation_age = 1d
log_checkpoints = off
"""


def _let_go(fd: int) -> None:
    """Gives up a flock, also where a forked child has inherited the descriptor."""
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


class _Instance:
    """The files of one instance directory, and what they say about its server."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path, self.identity = path, identity
        self.pgdata = path / "pgdata"

    def open(self, name: str, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        fd = os.open(self.path / name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self.identity.own(fd)
        return fd

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole."""
        building = f".{name}.{os.getpid()}.{secrets.token_hex(4)}"
        with os.fdopen(self.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(self.path / building, self.path / name)

    @property
    def state(self) -> dict[str, Any]:
        """What the last start wrote down: port, socket_dir, durable, keep."""
        try:
            return dict(json.loads((self.path / "server.json").read_text()))
        except (FileNotFoundError, ValueError):
            return {}

    @contextlib.contextmanager
    def decide(self) -> Iterator[None]:
        """Holds the lock under which servers are started and stopped."""
        import fcntl

        fd = self.open("lock")
        deadline = time.monotonic() + LOCK_SECONDS
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise EmbeddedError(f"another process is still starting or stopping {self.path}") from None
                    time.sleep(0.02)
            yield
        finally:
            _let_go(fd)

    def lock_users(self, *, alone: bool) -> int | None:
        """A descriptor that holds `users`, shared or alone; None when others hold it."""
        import fcntl

        fd = self.open("users")
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def postmaster(self) -> tuple[int, bool] | None:
        """The server's pid and whether it takes sessions; None when it does not run."""
        try:
            lines = (self.pgdata / "postmaster.pid").read_text().splitlines()
            pid = int(lines[0])
        except (FileNotFoundError, ValueError, IndexError):
            return None
        if not (is_alive(pid) and serves(pid, self.pgdata)):
            return None
        return pid, len(lines) > 7 and lines[7].strip() in ("ready", "standby")

    def initialise(self, bindir: Path, *, durable: bool) -> None:
        """Makes the cluster. It gets its name when it is whole, so an interrupted one is never used."""
        for leftover in self.path.glob("initdb-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.path))
        self.identity.own(building)
        self.write("password", secrets.token_urlsafe(24))
        builtin = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if version(bindir)[0] >= 17 else []
        self.identity.run([
            bindir / "initdb", "-D", building, "--username=pgqueue", f"--pwfile={self.path / 'password'}",
            "--auth-host=scram-sha-256", "--auth-local=trust", "--encoding=UTF8", "--locale=C", *builtin,
            *([] if durable else ["--no-sync"]),
        ])  # fmt: skip
        with (building / "postgresql.conf").open("a") as conf:
            conf.write(CONF)
            conf.flush()
            os.fsync(conf.fileno())
        single: list[str | Path] = [bindir / "postgres", "--single", "-D", building, "-c", "logging_collector=off"]
        self.identity.run([*single, *([] if durable else ["-F"]), "postgres"], stdin="create database pgqueue\n")
        building.rename(self.pgdata)
        folder = os.open(self.path, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def clear(self) -> None:
        """Removes what a server that is gone left behind; PostgreSQL itself would take any living pid for a server."""
        left = servers_of(self.pgdata)
        # Backends see the death of their postmaster at once, unless they are in the middle of a long query.
        for number, patience in ((signal.SIGQUIT, 0.5), (signal.SIGKILL, 5.0)):
            if not ended(left, patience):
                kill(left, number)
        if not ended(left, 5):
            raise EmbeddedError(f"processes of an earlier server at {self.pgdata} do not end: {left}")
        (self.pgdata / "postmaster.pid").unlink(missing_ok=True)
        for leftover in Path(self.state.get("socket_dir", self.path / "socket")).glob(".s.PGSQL.*"):
            leftover.unlink(missing_ok=True)

    def socket_dir(self) -> Path:
        """A directory for the socket that only its owner can enter, short enough for a socket's address."""
        inside = self.path / "socket"
        digest = sha256(os.fsencode(self.path)).hexdigest()[:16]
        # libpq takes a comma in a host as the start of another host.
        fits = len(os.fsencode(inside)) <= SOCKET_DIR_BYTES and "," not in str(inside)
        place = inside if fits else Path("/tmp", f"pgqueue-{digest}")  # noqa: S108 - checked below
        with contextlib.suppress(FileExistsError):
            place.mkdir(mode=0o700)
            self.identity.own(place)
        found = place.lstat()
        owner = os.geteuid() if self.identity.uid is None else self.identity.uid
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != owner or found.st_mode & 0o077:
            raise EmbeddedError(f"{place} must be a directory that belongs to the server's user alone; remove it")
        return place

    def launch(self, bindir: Path, state: dict[str, Any], settings: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts the server process, as written in `state`."""
        directory = str(state["socket_dir"]).replace('"', '""')
        options = dict(settings) | {
            "listen_addresses": "127.0.0.1",
            "port": str(state["port"]),
            "unix_socket_directories": f'"{directory}"',
            "unix_socket_permissions": "0700",
            "fsync": "on" if state["durable"] else "off",
        }
        args: list[str | Path] = [bindir / "postgres", "-D", self.pgdata]
        for name, value in options.items():
            args += ["-c", f"{name}={value}"]
        self.write("server.json", json.dumps(state))
        output = self.open("startup.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            process = self.identity.popen(
                args, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        finally:
            os.close(output)
        # A zombie would look alive to the next start.
        threading.Thread(target=process.wait, name="pgqueue-embedded-reaper", daemon=True).start()
        return process

    def last_words(self) -> str:
        """The ends of the newest logs."""
        logs = sorted((self.pgdata / "log").glob("*.log"), key=lambda path: path.stat().st_mtime)[-1:]
        texts = [path.read_text(errors="replace") for path in (self.path / "startup.log", *logs) if path.exists()]
        return "\n".join("\n".join(text.splitlines()[-8:]) for text in texts)

    def wait_ready(self, process: subprocess.Popen[str] | None) -> bool:
        """Waits, through crash recovery too, until sessions are taken; False when the server ended instead."""
        told = time.monotonic()
        while True:
            ended = process is not None and process.poll() is not None
            running = self.postmaster()
            if running and running[1]:
                return True
            if ended or (process is None and running is None):
                return False
            if time.monotonic() > told + 10:
                told = time.monotonic()
                log.warning("PostgreSQL in %s is still starting (recovery after a crash can take minutes)", self.path)
            time.sleep(0.01)

    def shut_down(self, mode: StopMode) -> bool:
        """Ends the server; False when none runs. A fast stop that takes too long becomes an immediate one."""
        running = self.postmaster()
        if running is None:
            return False
        pids = [running[0]]
        kill(pids, SIGNALS[mode])
        if not ended(pids, STOP_SECONDS):
            if mode == "smart":
                raise EmbeddedError(f"PostgreSQL in {self.path} still has sessions after {STOP_SECONDS:g} s")
            log.warning("PostgreSQL in %s did not stop within %g s: stopping it immediately", self.path, STOP_SECONDS)
            kill(pids, signal.SIGQUIT)
            if not ended(pids, STOP_SECONDS):
                kill(pids, signal.SIGKILL)
        self.clear()
        place = Path(self.state.get("socket_dir", self.path / "socket"))
        if place.parent != self.path:
            with contextlib.suppress(OSError):
                place.rmdir()
        return True


class Server:
    """A process's hold on a running server; leaving a `with` block, `stop()` and the interpreter's end let go of it.

    `dsn` goes by the unix socket and holds no secret; `tcp_dsn` goes by 127.0.0.1 and holds the password.
    """

    def __init__(self, instance: _Instance, bindir: Path, users: int) -> None:
        self._instance = instance
        self._users: int | None = users
        self._pid = os.getpid()
        self.data_dir, self.pgdata, self.bindir = instance.path, instance.pgdata, bindir
        state = instance.state
        self.port = int(state["port"])
        place = quote(str(state["socket_dir"]), safe="")
        password = (instance.path / "password").read_text().strip()
        self.dsn = f"postgresql://pgqueue@/pgqueue?host={place}&port={self.port}"
        self.tcp_dsn = f"postgresql://pgqueue:{password}@127.0.0.1:{self.port}/pgqueue"
        atexit.register(self.stop)

    @property
    def pid(self) -> int | None:
        """The server's process id; None when it does not run."""
        running = self._instance.postmaster()
        return running[0] if running else None

    def stop(self, mode: StopMode = "fast", *, force: bool = False) -> bool:
        """Lets go of the server, and stops it if nobody else uses it and nobody asked to keep it.

        `force` stops it in any case. A second call does nothing. Returns whether the server was stopped.
        """
        # A forked child shares the parent's lock and must not let go of it.
        if os.getpid() != self._pid or (self._users is None and not force):
            return False
        atexit.unregister(self.stop)
        if not self.data_dir.exists():
            return False
        with self._instance.decide():
            if self._users is not None:
                _let_go(self._users)
                self._users = None
            alone = self._instance.lock_users(alone=True)
            if alone is not None:
                _let_go(alone)
            if not force and (alone is None or self._instance.state.get("keep")):
                return False
            return self._instance.shut_down(mode)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _default_dir(major: int) -> Path:
    if wanted := os.environ.get("PGQUEUE_DATA_DIR"):
        return Path(wanted)
    if shared := os.environ.get("XDG_DATA_HOME"):
        root = Path(shared, "pgqueue")
    else:
        root = Path("/var/lib/pgqueue") if os.geteuid() == 0 else Path("~/.local/share/pgqueue").expanduser()
    path = root / f"pg{major}"
    others = [other.name for other in root.glob("pg*") if (other / "pgdata").exists()]
    if others and path.name not in others:
        log.warning("starting with an empty database in %s; %s beside it is not read", path, ", ".join(others))
    return path


def start(
    data_dir: Path | str | None = None,
    *,
    port: int | None = None,
    keep: bool = False,
    durable: bool = True,
    settings: Mapping[str, str] | None = None,
) -> Server:
    """Starts the server of an instance directory, or joins the one that runs there.

    data_dir: the instance directory, made when missing. port: of 127.0.0.1; default the one used before, or a free
    one. keep: leave the server running when its last user leaves. durable: False turns fsync off, for tests.
    settings: server settings for this start, but where it listens and fsync; a running server keeps its own.
    Raises EmbeddedError.
    """
    if sys.platform == "win32":
        raise EmbeddedError("the embedded PostgreSQL does not run on Windows: set PGQUEUE_DSN to a running server")
    path = Path(data_dir).expanduser() if data_dir else _default_dir(version(find_binaries())[0])
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = path.resolve()
        made_by = path / "pgdata" / "PG_VERSION"
        bindir = find_binaries(int(made_by.read_text()) if made_by.exists() else None)
        identity = identity_for(path)
        instance = _Instance(path, identity)
        with instance.decide():
            bindir = reachable(bindir, identity, path)
            _ensure_running(instance, bindir, port=port, keep=keep, durable=durable, settings=settings or {})
            users = instance.lock_users(alone=False)
    except OSError as error:
        raise EmbeddedError(f"cannot use {path} for the embedded PostgreSQL ({error}); set PGQUEUE_DATA_DIR") from error
    if users is None:
        raise EmbeddedError(f"{path / 'users'} is held by a process that is no pgqueue")
    return Server(instance, bindir, users)


def _ensure_running(
    instance: _Instance, bindir: Path, *, port: int | None, keep: bool, durable: bool, settings: Mapping[str, str]
) -> None:
    for _ in range(3):
        if instance.postmaster():
            state = instance.state
            if port not in (None, state["port"]):
                raise EmbeddedError(f"the server in {instance.path} runs already, on port {state['port']}")
            if durable and not state["durable"]:
                raise EmbeddedError(f"the server in {instance.path} was started without fsync")
            if keep and not state["keep"]:
                instance.write("server.json", json.dumps(state | {"keep": True}))
            if instance.wait_ready(None):
                return
            continue
        if not instance.pgdata.exists():
            instance.initialise(bindir, durable=durable)
        instance.clear()
        used = port or instance.state.get("port") or free_port()
        if not is_free(used):
            if port:
                raise EmbeddedError(f"port {port} of 127.0.0.1 is taken")
            used = free_port()
        state = {"port": used, "socket_dir": str(instance.socket_dir()), "durable": durable, "keep": keep}
        process = instance.launch(bindir, state, settings)
        try:
            if instance.wait_ready(process):
                return
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
    raise EmbeddedError(f"PostgreSQL does not start in {instance.path}:\n{instance.last_words()}")


def stop(data_dir: Path | str | None = None, mode: StopMode = "fast") -> bool:
    """Stops the server of an instance directory, whoever uses it or asked to keep it. Returns whether one ran."""
    path = (Path(data_dir).expanduser() if data_dir else _default_dir(version(find_binaries())[0])).resolve()
    if not (path / "pgdata").exists():
        return False
    instance = _Instance(path, Identity())
    with instance.decide():
        return instance.shut_down(mode)
