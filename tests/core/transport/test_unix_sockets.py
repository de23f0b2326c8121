"""Unix sockets against a real kernel: who owns them, who holds them, and what another user can do with them."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import TIMEOUT

from pscluster.core.errors import ConfigurationError, PsClusterError
from pscluster.core.transport import unix_sockets
from pscluster.core.transport.peer_names import OTHER_USER, address_of
from pscluster.core.transport.tcp.client import DataPort
from pscluster.core.transport.tcp.server import DataServer
from pscluster.core.transport.unix_sockets import (
    MAX_PATH_BYTES,
    SocketLock,
    candidate_folders,
    check_address,
    connect,
    data_path,
    listen,
    peer_uid,
    why_unsafe,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user, too")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder of this user's."""
    with tempfile.TemporaryDirectory(prefix="psc-", dir="/tmp") as made:
        yield Path(made)


def of_nobody(script: str, *arguments: object) -> list[str]:
    """The beginning of a command for a program of another user; it imports nothing of ours."""
    become = f"import os, socket, sys\nos.setgroups([])\nos.setgid({NOBODY})\nos.setuid({NOBODY})\n"
    return [sys.executable, "-I", "-S", "-c", become + script, *map(str, arguments)]


def as_nobody(script: str, *arguments: object) -> str:
    """What such a program prints."""
    command = of_nobody(script, *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=True).stdout.strip()


@pytest.mark.parametrize(("given", "is_safe"), [(0o700, True), (0o711, False), (0o750, False), (0o1777, False)])
def test_a_folder_has_to_be_private(folder: Path, given: int, is_safe: bool) -> None:
    folder.chmod(given)
    why = why_unsafe(str(folder))
    assert (not why) == is_safe
    if not is_safe:
        assert f"mode {given:04o}" in why
        assert f"chmod 700 {folder}" in why
        for refused in (lambda: check_address(f"unix:{folder}/ps-0"), lambda: SocketLock(f"{folder}/ps-0")):
            with pytest.raises(ConfigurationError, match=f"refusing to use unix:{folder}/ps-0"):
                refused()
        assert not os.listdir(folder), "before anything has changed"


def test_nobody_else_can_put_another_folder_in_its_place(folder: Path) -> None:
    """The folder may not be a link, or be where others may write, unless only its owner can rename it there."""
    inner = folder / "inner"
    inner.mkdir(0o700)
    assert not why_unsafe(str(inner))
    folder.chmod(0o777)
    assert f"others may write to {folder}" in why_unsafe(str(inner))
    assert f"others may write to {folder}" in why_unsafe(str(folder / "not made yet"))
    folder.chmod(0o1777)
    assert not why_unsafe(str(inner))
    folder.chmod(0o700)
    link = folder / "link"
    link.symlink_to(inner)
    assert "is a link" in why_unsafe(str(link))
    assert not why_unsafe(str(link / "made behind a link of ours"))
    assert "not a folder" in why_unsafe(__file__)


@as_root
def test_a_folder_of_another_user(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    assert f"belongs to another user (uid {NOBODY}" in why_unsafe(str(folder))
    assert "who could replace its contents" in why_unsafe(str(folder / "inner"))


def test_the_folder_of_a_socket_is_made(folder: Path) -> None:
    lock = SocketLock(f"{folder}/made/ps-0")
    assert stat.S_IMODE((folder / "made").stat().st_mode) == 0o700
    lock.close()
    with pytest.raises(ConfigurationError, match="No such file or directory"):
        SocketLock(f"{folder}/not/there/ps-0")


_HOLD = """
import os, sys
from pscluster.core.transport.unix_sockets import SocketLock, listen
lock = SocketLock(sys.argv[1])
listeners = [listen(sys.argv[1]), listen(sys.argv[1] + ".data")]
print("listening", flush=True)
sys.stdin.read()
"""


def test_two_processes_want_the_same_socket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process leaves the first one's socket alone; a dead one's is removed, other files never are."""
    monkeypatch.setattr(unix_sockets, "LOCK_SECONDS", 0.2)
    path = f"{folder}/ps-0"
    command = [sys.executable, "-c", _HOLD, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "listening\n"
        with pytest.raises(PsClusterError, match=f"unix:{path}: another process has this socket"):
            SocketLock(path)
        connect(path, TIMEOUT).close()
        connect(data_path(path), TIMEOUT).close()
        first.kill()
    monkeypatch.setattr(unix_sockets, "LOCK_SECONDS", TIMEOUT)
    assert stat.S_ISSOCK(os.stat(path).st_mode)
    lock = SocketLock(path)
    assert sorted(os.listdir(folder)) == ["ps-0.lock"]
    with listen(path), listen(data_path(path)):
        assert {stat.S_IMODE(os.stat(socket_path).st_mode) for socket_path in (path, data_path(path))} == {0o600}
    lock.close()
    (folder / "ps-0.data").write_text("somebody's")
    with pytest.raises(ConfigurationError, match="the file is not a socket"):
        SocketLock(path)
    assert (folder / "ps-0.data").read_text() == "somebody's"


def test_a_process_that_ends_within_a_moment_is_waited_for(folder: Path) -> None:
    """For example a role that has just been killed, and is restarted."""
    path = f"{folder}/ps-0"
    first = SocketLock(path)
    closer = threading.Timer(0.2, first.close)
    closer.start()
    SocketLock(path).close()
    closer.join(TIMEOUT)


def test_both_sides_are_told_the_user(folder: Path) -> None:
    path = f"{folder}/ps-0"
    with listen(path) as listener, connect(path, TIMEOUT) as ours:
        theirs, _ = listener.accept()
        with theirs:
            assert peer_uid(ours) == peer_uid(theirs) == os.geteuid()
            assert ours.gettimeout() is None
            theirs.sendall(b"x")
            assert ours.recv(1) == b"x"


_TRY = """
def outcome(action, *arguments):
    try:
        action(*arguments)
    except OSError as error:
        return type(error).__name__
    return "done"
path = sys.argv[1]
client = socket.socket(socket.AF_UNIX)
print(outcome(os.listdir, os.path.dirname(path)), outcome(client.connect, path), outcome(os.unlink, path),
      outcome(os.rename, path, path + "x"), outcome(socket.socket(socket.AF_UNIX).bind, path + "y"))
"""


@as_root
def test_another_user_can_neither_open_nor_replace_a_socket(folder: Path) -> None:
    path = f"{folder}/ps-0"
    with listen(path):
        assert as_nobody(_TRY, path).split() == ["PermissionError"] * 5
        folder.chmod(0o755)  # by a user who wanted to look: the socket's own mode still protects it
        assert as_nobody(_TRY, path).split() == ["done", *["PermissionError"] * 4]


@as_root
def test_another_user_is_refused_by_the_uid(folder: Path) -> None:
    """This holds even if all modes are open, for callers and for listeners."""
    path = f"{folder}/ps-0.data"
    refused: list[str] = []

    def note(peer: str, **_how: bool) -> bool:
        refused.append(peer)
        return True

    server = DataServer(listen(path), [], [], refused=note)
    server.start()
    try:
        folder.chmod(0o777)
        os.chmod(path, 0o777)
        call = "client = socket.socket(socket.AF_UNIX)\nclient.connect(sys.argv[1])\n"
        read = "try:\n    print(client.recv(100))\nexcept ConnectionResetError:\n    print(b'')"
        assert as_nobody(call + read, path) == "b''"
        assert refused == [OTHER_USER]
    finally:
        server.stop()
    thief = "os.unlink(sys.argv[1])\nthief = socket.socket(socket.AF_UNIX)\nthief.bind(sys.argv[1])\nthief.listen()\n"
    serve = "os.chmod(sys.argv[1], 0o777)\nprint('ready', flush=True)\nprint(thief.accept()[0].recv(100))\n"
    with subprocess.Popen(of_nobody(thief + serve, path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        port = DataPort("ps 0", "the token")
        port.is_at(path)
        assert port.connect("/test/Echo", ()) is None
        assert not port.usable()
        assert process.stdout.readline() == b"b''\n", "not a byte"


def test_refusals_are_counted_by_whose_they_are() -> None:
    assert address_of(OTHER_USER) == "another user of this machine"
    assert address_of("unix:") == address_of("unix:data:7") == "this machine"


def test_folders_for_sockets_are_short_whatever_tmpdir_is(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    long = folder / ("x" * 150) / ("y" * 150)
    long.mkdir(parents=True)
    for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    folders = list(candidate_folders())
    assert folders
    assert folders[0] == "/tmp"
    assert all(len(candidate) < MAX_PATH_BYTES // 2 for candidate in folders)
    mine = folder / "run"
    mine.mkdir()
    (mine / "x").touch()  # another user's file of any name is in nobody's way
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(mine))
    assert list(candidate_folders())[1] == str(mine)
    mine.chmod(0o777)
    assert str(mine) not in candidate_folders()


def test_a_socket_that_takes_no_more_connections(folder: Path) -> None:
    """A client waits for its turn, but not forever."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(f"{folder}/full")
        listener.listen(0)
        stack.enter_context(connect(f"{folder}/full", TIMEOUT))
        with pytest.raises(BlockingIOError):
            stack.enter_context(connect(f"{folder}/full", 0.1))
