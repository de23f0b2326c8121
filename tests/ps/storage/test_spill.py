"""Old bytes that are still to be written or sent: little of it in memory, the rest in a file that nobody sees."""

from __future__ import annotations

import os
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from tests.ps.storage.support import CHUNK, JOB, Client, declare, dense, small_blocks

from pscluster.core.errors import UnavailableError
from pscluster.ps.server.shard import Shard
from pscluster.ps.server.store import Store
from pscluster.ps.storage.generations import StateDirectory
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.ps.storage.spill import SavedBlock, Spill
from pscluster.v1 import ps_pb2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are small."""
    small_blocks(monkeypatch)


def save(spill: Spill, numbers: range) -> list[SavedBlock]:
    """A block full of each number."""
    return [spill.save(memoryview(bytes([number]) * CHUNK)) for number in numbers]


def check(blocks: list[SavedBlock], numbers: range) -> None:
    assert [block.read() for block in blocks] == [bytes([number]) * CHUNK for number in numbers]


def open_files(folder: Path) -> list[int]:
    """Of this folder, with or without a name."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/"):
                found.append(number)
    return found


def test_beyond_the_limit_it_is_in_a_file(tmp_path: Path) -> None:
    """As much as may be is in memory; the file has no name, and goes with the last that is in it."""
    spill = Spill(tmp_path, limit=4 * CHUNK)
    blocks = save(spill, range(10))
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 6)
    assert list(tmp_path.iterdir()) == []
    assert len(open_files(tmp_path)) == 1
    check(blocks, range(10))
    del blocks[4:]
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 0)
    assert len(open_files(tmp_path)) == 0
    blocks += save(spill, range(4, 6))
    check(blocks, range(6))
    blocks.clear()
    assert (spill.in_memory, spill.spilled) == (0, 0)


def test_its_places_are_used_again(tmp_path: Path) -> None:
    """The file grows to the most that was in it at a time."""
    spill = Spill(tmp_path, limit=0)
    blocks = save(spill, range(3))
    for number in range(3, 50):
        del blocks[0]
        blocks += save(spill, range(number, number + 1))
    check(blocks, range(47, 50))
    (number,) = open_files(tmp_path)
    assert os.fstat(number).st_size == 3 * CHUNK


def test_short_blocks(tmp_path: Path) -> None:
    """The last of an array."""
    spill = Spill(tmp_path, limit=0)
    blocks = [spill.save(memoryview(bytes([size]) * size)) for size in (5, 1, CHUNK, 7)]
    assert [block.read() for block in blocks] == [bytes([size]) * size for size in (5, 1, CHUNK, 7)]


def test_where_there_is_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It stays in memory, which is said once."""
    spill = Spill(tmp_path / "missing", limit=CHUNK)
    blocks = save(spill, range(4))
    check(blocks, range(4))
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 0)
    assert caplog.text.count("stay in memory") == 1
    assert str(tmp_path / "missing") in caplog.text


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What has no room stays in memory; once there is room again, it is used."""
    spill = Spill(tmp_path, limit=CHUNK)
    with files_of_at_most(2 * CHUNK):
        blocks = save(spill, range(6))
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 2)
    check(blocks, range(6))
    assert caplog.text.count("stay in memory") == 1
    blocks += save(spill, range(6, 8))
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 4)
    check(blocks, range(8))


def test_where_there_is_no_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose disk can't be written."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    spill = Spill(limit=CHUNK)
    check(save(spill, range(4)), range(4))
    assert caplog.text.count("stay in memory") == 1


def test_a_disk_that_stays_full_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Though there is room now and then."""
    spill = Spill(tmp_path, limit=CHUNK)
    with files_of_at_most(2 * CHUNK):
        blocks = save(spill, range(6))
        for number in range(6, 16):
            del blocks[1]
            blocks += save(spill, range(number, number + 1))
    assert caplog.text.count("stay in memory") == 1


@pytest.mark.parametrize("how", ["other bytes", "too short"])
def test_a_disk_that_loses_what_it_took(tmp_path: Path, how: str) -> None:
    """No bytes are given, and who reads is told to try again."""
    spill = Spill(tmp_path, limit=0)
    shard = Shard(np.zeros(100, np.float32))
    snapshot = shard.snapshot(0, 400, spill)
    with shard.lock:
        shard.before_change()
        shard.array[...] = 1
    (number,) = open_files(tmp_path)
    if how == "too short":
        os.truncate(number, CHUNK + 3)
    else:
        os.pwrite(number, b"x", CHUNK + 3)
    with pytest.raises(
        UnavailableError,
        match=r"try again: old values (read|can't be read) back from the disk",
    ):
        list(snapshot)
    snapshot.close()
    assert spill.spilled == 0


def test_who_lets_go_waits_for_nobody(tmp_path: Path) -> None:
    """The last reference may end anywhere, under whatever locks; whoever has the lock looks again."""
    spill = Spill(tmp_path, limit=CHUNK)
    blocks = save(spill, range(3))
    with spill._lock:
        blocks.clear()
        assert spill.spilled == 2
    spill._look()
    assert (spill.in_memory, spill.spilled, open_files(tmp_path)) == (0, 0, [])


def test_by_several_threads(tmp_path: Path) -> None:
    """Each finds its own bytes, whoever lets go of others meanwhile."""
    spill, wrong = Spill(tmp_path, limit=5 * CHUNK), []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        kept: list[tuple[bytes, SavedBlock]] = []
        for _ in range(300):
            data = random.bytes(CHUNK)
            kept.append((data, spill.save(memoryview(data))))
            if len(kept) > 8:
                data, block = kept.pop(int(random.integers(len(kept))))
                if block.read() != data:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (spill.in_memory, spill.spilled) == (0, 0)
    assert len(open_files(tmp_path)) == 0


def test_a_server_s_lies_with_its_state(tmp_path: Path) -> None:
    """What is captured and changed all over is read as it was; most of it never was in memory twice."""
    manager = StateManager(DurabilityOptions(Durability.SNAPSHOT, tmp_path / "state"))
    try:
        held, before = Store(0, JOB), np.arange(64, dtype=np.float32)
        declare(held, 1, before.copy())
        shard = held.held()[0][0].shards[0]
        manager.spill._limit = 2 * CHUNK
        with shard.lock:
            capture = shard.capture(manager.spill)
        Client(manager, held).update(dense(ps_pb2.ASSIGN, np.ones(64, np.float32)))
        assert manager.spill.in_memory == 2 * CHUNK
        assert manager.spill.spilled == 64 * 4 // CHUNK - 2
        assert len(open_files(tmp_path / "state")) == 2  # the lock is the other
        blocks = {block.offset: block.data for block in capture.blocks()}
        assert b"".join(blocks[offset] for offset in sorted(blocks)) == before.tobytes()
        shard.release(capture)
    finally:
        manager.close()
    StateDirectory(tmp_path / "state").close()
