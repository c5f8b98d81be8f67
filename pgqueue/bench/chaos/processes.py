"""The processes of a chaos run: started, watched and started again when they end, as a service manager would."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_AGAIN_AFTER: Final = 0.3
_FAKETIME: Final = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib/faketime/libfaketimeMT.so.1")


def faketime() -> Path | None:
    """Return the library that shifts a process's clock, None where it is not installed."""
    for pattern in _FAKETIME:
        for path in Path("/").glob(pattern.lstrip("/")):
            return path
    return None


class Service:
    """A process that is started again whenever it ends. `pids` are all that it ever had."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """Start nothing yet; its output goes to `folder`."""
        self.name = name
        self.arguments = list(arguments)
        self.environment = dict(environment)
        self.pids: list[int] = []
        self.ends: list[int] = []
        self._log = (folder / f"{name}.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = False
        self._guard = threading.RLock()
        self._again_at = 0.0

    @property
    def pid(self) -> int | None:
        """The living process."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def start(self) -> None:
        """Start it, and keep it running from now on."""
        self._wanted = True
        self.ensure()

    def ensure(self) -> None:
        """Start it again if it ended a moment ago."""
        with self._guard:
            if not self._wanted or self.pid is not None:
                return
            now = time.monotonic()
            if self._process is not None:
                self.ends.append(self._process.returncode)
                self._process, self._again_at = None, now + _AGAIN_AFTER
            if now < self._again_at:
                return
            self._process = subprocess.Popen(
                self.arguments, env=self.environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                start_new_session=True,
            )  # fmt: skip
            self.pids.append(self._process.pid)

    def send(self, number: signal.Signals) -> bool:
        """Signal it; False when it does not run."""
        pid = self.pid
        if pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    def stop(self, seconds: float) -> bool:
        """End it by SIGTERM, and by SIGKILL if that takes too long; False when it had to be killed."""
        with self._guard:
            self._wanted = False
            process = self._process
        if process is None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            process.wait(seconds)
            return True
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return False

    def close(self) -> None:
        """End it at once."""
        with self._guard:
            self._wanted = False
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._log.close()


def python(*arguments: str) -> list[str]:
    """Return the command that runs a module of ours."""
    return [sys.executable, "-m", *arguments]


def bouncer(folder: Path, port: int, server_port: int, user: str, password: str) -> list[str] | None:
    """Return the command of a PgBouncer in transaction mode in front of a server, None where it is not installed."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return None
    place = folder / "pgbouncer"
    place.mkdir()
    (place / "users.txt").write_text(f'"{user}" "{password}"\n')
    (place / "pgbouncer.ini").write_text(
        f"""[databases]
pgqueue = host=127.0.0.1 port={server_port} dbname=pgqueue
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = plain
auth_file = {place / "users.txt"}
pool_mode = transaction
default_pool_size = 10
max_client_conn = 200
server_login_retry = 1
query_wait_timeout = 10
ignore_startup_parameters = extra_float_digits,options
"""
    )
    command = [program, str(place / "pgbouncer.ini")]
    if os.geteuid() == 0:
        for path in (folder, place, *place.iterdir()):
            path.chmod(0o755)
        command[1:1] = ["-u", "nobody"]
    return command
