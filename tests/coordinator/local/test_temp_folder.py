"""What a cluster that dies leaves on disk goes with the next one: real processes, killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.support import gone
from tests.waiting import until

from pscluster.coordinator.local import temp_folder
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.local.temp_folder import OwnFolder
from pscluster.core.errors import ConfigurationError

OWNER = """
import os, sys
from pscluster.coordinator.local.temp_folder import OwnFolder

folder = OwnFolder()
(folder.path / "state" / "0").mkdir(parents=True)
(folder.path / "state" / "0" / "lock").touch()
(folder.path / "state" / "0" / "data").write_text("mine")
print(folder.path, flush=True)
if sys.stdin.readline() == "remove\\n":
    folder.remove()
os._exit(9)
"""

# Makes folders while others do, and sweep: one that it holds must stay whole.
ONE_OF_MANY = """
import os, random
from pscluster.coordinator.local.temp_folder import OwnFolder

for _ in range(500):
    folder = OwnFolder()
    folder.state.mkdir()
    (folder.state / "mine").touch()
    assert (folder.state / "mine").exists()
    if random.random() < 0.5:
        folder.remove()
    else:
        os.close(folder._lock)  # as if it had died
"""

CLUSTER = """
import signal, sys
import numpy as np
from pscluster.coordinator import LocalCluster, ParameterServerStrategy, Variable

if __name__ == "__main__":
    cluster = LocalCluster(1, 1, tls=True, log_level="ERROR").start()
    with ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            Variable(np.ones(1 << 18, np.float32), name="v")
        print(*cluster.pids.values(), flush=True)
        signal.pause()
"""


@pytest.fixture(autouse=True)
def temp_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def left_folder(temp_root: Path) -> Path:
    """Of a server, in what an owner has left."""
    server = temp_root / "pscluster-local-abcd1237.tmp" / "state" / "ps-0"
    server.mkdir(parents=True)
    (server.parents[1] / ".tls.0123abcd").mkdir()  # it died while it made certificates
    return server


def started(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a folder, and where it is. It dies without removing it, unless it is told to."""
    with started(OWNER) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


@pytest.mark.timeout(60)
def test_the_folder_of_a_killed_owner_is_removed(temp_root: Path, owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = owner
    process.kill()
    process.wait()
    assert (theirs / "state" / "0" / "data").read_text() == "mine"
    mine = OwnFolder()
    assert list(temp_root.iterdir()) == [mine.path]
    mine.remove()
    assert not list(temp_root.iterdir())


@pytest.mark.timeout(60)
def test_what_is_used_stays(temp_root: Path, owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = owner
    mine = OwnFolder()
    assert (theirs / "state" / "0" / "data").read_text() == "mine"
    mine.remove()
    process.communicate("remove\n")
    assert not list(temp_root.iterdir())


@pytest.mark.timeout(60)
def test_a_server_that_still_saves_is_waited_for(temp_root: Path, owner: tuple[subprocess.Popen[str], Path]) -> None:
    process, theirs = owner
    lock = f"import fcntl; f = open({str(theirs / 'state/0/lock')!r}); fcntl.flock(f, fcntl.LOCK_EX); print(); input()"
    with started(lock) as server:
        assert server.stdout is not None
        server.stdout.readline()
        process.kill()
        process.wait()
        OwnFolder().remove()
        assert (theirs / "state" / "0" / "data").read_text() == "mine"
        server.communicate("\n")
    OwnFolder().remove()
    assert not list(temp_root.iterdir())


@pytest.mark.timeout(60)
def test_a_server_that_begins_during_a_sweep(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner starts it, and dies, just before the sweep has the owner's lock."""
    server = left_folder(temp_root)
    taken, others = temp_folder._taken, list[int]()

    def late(lock: int) -> bool:
        if not others:
            others.append(os.open(server / "lock", os.O_RDWR | os.O_CREAT))
            assert taken(others[0])
        return taken(lock)

    monkeypatch.setattr(temp_folder, "_taken", late)
    temp_folder._sweep(temp_root)
    assert (server / "lock").exists()
    os.close(others[0])
    temp_folder._sweep(temp_root)
    assert not list(temp_root.iterdir())


def test_a_sweep_that_comes_before_the_owner_has_the_lock(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken, seen = temp_folder._taken, list[Path]()

    def late(lock: int) -> bool:
        if not seen:
            seen.extend(temp_root.iterdir())
            temp_folder._sweep(temp_root)
        return taken(lock)

    monkeypatch.setattr(temp_folder, "_taken", late)
    mine = OwnFolder()
    assert list(temp_root.iterdir()) == [mine.path] != seen
    temp_folder._sweep(temp_root)
    assert list(temp_root.iterdir()) == [mine.path]
    mine.remove()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EBADF])
def test_where_there_are_no_locks(temp_root: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(_lock: int, _how: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", fail)
    mine, other = OwnFolder(), OwnFolder()
    assert sorted(temp_root.iterdir()) == sorted([mine.path, other.path])
    mine.remove()
    other.remove()
    assert not list(temp_root.iterdir())


def test_what_is_not_ours_stays(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = temp_root / "elsewhere"
    (elsewhere / "state").mkdir(parents=True)
    (temp_root / "pscluster-local-abcd1234.tmp").symlink_to(elsewhere)
    (temp_root / "pscluster-local-abcd1235.tmp").touch()
    (temp_root / "pscluster-local-mine" / "state").mkdir(parents=True)
    (temp_root / "pscluster-local-abcd1236.tmp" / "state").mkdir(parents=True)
    (temp_root / "pscluster-local-abcd1236.tmp" / "thesis.txt").touch()
    before = sorted(temp_root.rglob("*"))
    temp_folder._sweep(temp_root)
    assert sorted(temp_root.rglob("*")) == before

    theirs, me = left_folder(temp_root), os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    temp_folder._sweep(temp_root)
    assert theirs.exists()


def test_links_in_what_is_left_are_not_followed(temp_root: Path) -> None:
    (temp_root / "precious").mkdir()
    (temp_root / "precious" / "data").touch()
    (left_folder(temp_root) / "link").symlink_to(temp_root / "precious")
    temp_folder._sweep(temp_root)
    assert sorted(temp_root.rglob("*")) == [temp_root / "precious", temp_root / "precious" / "data"]


def test_what_could_not_be_removed_is_removed_later(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = OwnFolder()
    left_folder(temp_root)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda _path, ignore_errors: None)
        mine.remove()
        temp_folder._sweep(temp_root)
        assert len(list(temp_root.iterdir())) == 2
    temp_folder._sweep(temp_root)
    assert not list(temp_root.iterdir())


@pytest.mark.timeout(120)
def test_many_at_once(temp_root: Path) -> None:
    processes = [started(ONE_OF_MANY) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    for process in processes:
        process.communicate()
    temp_folder._sweep(temp_root)
    assert not list(temp_root.iterdir())


def test_no_place_for_it(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temp_root / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"No such file.*nowhere.*set TMPDIR to a directory where"):
        LocalCluster(1, 1).start()
    monkeypatch.setattr(tempfile, "tempdir", str(temp_root))
    with LocalCluster(1, 1, log_level="ERROR"):
        assert list(temp_root.glob("pscluster-local-*"))
    assert not list(temp_root.iterdir())


@pytest.mark.timeout(120)
def test_a_cluster_that_was_killed(temp_root: Path) -> None:
    """Its servers make a last save when their parent has died; the next cluster removes it, and the keys."""
    with started(CLUSTER) as process:
        try:
            assert process.stdout is not None
            pids = [int(pid) for pid in process.stdout.readline().split()]
            (left,) = temp_root.glob("pscluster-local-*")
            assert list(left.rglob("*.safetensors"))
            assert list(left.rglob("*.key"))
        finally:
            process.kill()
    for pid in pids:
        until(lambda pid=pid: gone(pid), f"{pid} is gone")  # type: ignore[misc]
    with LocalCluster(1, 1, log_level="ERROR"):
        (mine,) = temp_root.glob("pscluster-local-*")
        assert mine != left
    assert not list(temp_root.glob("pscluster-local-*"))
