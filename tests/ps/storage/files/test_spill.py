"""Old bytes that are still to be written or sent: few of them in memory, the rest in an unnamed file."""

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
from pscluster.ps.server.requests import reads
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.files.generations import StateDirectory
from pscluster.ps.storage.files.spill import SavedBlock, Spill
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability, DurabilityOptions
from pscluster.v1 import ps_pb2


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks."""
    small_blocks(monkeypatch)


def save(spill: Spill, numbers: range) -> list[SavedBlock]:
    """Save a block full of each number."""
    return [spill.save(memoryview(bytes([value]) * CHUNK)) for value in numbers]


def check(blocks: list[SavedBlock], numbers: range) -> None:
    assert [block.read() for block in blocks] == [bytes([value]) * CHUNK for value in numbers]


def open_files(folder: Path) -> list[int]:
    """Return the open files in this folder, with or without a name."""
    descriptors = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(FileNotFoundError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder}/"):
                descriptors.append(descriptor)
    return descriptors


def test_beyond_the_limit_it_is_in_a_file(tmp_path: Path) -> None:
    """Memory is used up to the limit; the file has no name, and is closed after its last block."""
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


def test_its_slots_are_used_again(tmp_path: Path) -> None:
    """The file grows to the most blocks that it held at a time."""
    spill = Spill(tmp_path, limit=0)
    blocks = save(spill, range(3))
    for value in range(3, 50):
        del blocks[0]
        blocks += save(spill, range(value, value + 1))
    check(blocks, range(47, 50))
    (descriptor,) = open_files(tmp_path)
    assert os.fstat(descriptor).st_size == 3 * CHUNK


def test_short_blocks(tmp_path: Path) -> None:
    """The last block of an array may be short."""
    spill = Spill(tmp_path, limit=0)
    blocks = [spill.save(memoryview(bytes([size]) * size)) for size in (5, 1, CHUNK, 7)]
    assert [block.read() for block in blocks] == [bytes([size]) * size for size in (5, 1, CHUNK, 7)]


def test_where_there_is_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The blocks stay in memory, with one warning."""
    spill = Spill(tmp_path / "missing", limit=CHUNK)
    blocks = save(spill, range(4))
    check(blocks, range(4))
    assert (spill.in_memory, spill.spilled) == (4 * CHUNK, 0)
    assert caplog.text.count("stay in memory") == 1
    assert str(tmp_path / "missing") in caplog.text


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Fail as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks without room stay in memory; once there is room again, the file is used."""
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
    """As in a container whose disk can't be written, the blocks stay in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    spill = Spill(limit=CHUNK)
    check(save(spill, range(4)), range(4))
    assert caplog.text.count("stay in memory") == 1


def test_a_disk_that_stays_full_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It warns once, though there is room now and then."""
    spill = Spill(tmp_path, limit=CHUNK)
    with files_of_at_most(2 * CHUNK):
        blocks = save(spill, range(6))
        for value in range(6, 16):
            del blocks[1]
            blocks += save(spill, range(value, value + 1))
    assert caplog.text.count("stay in memory") == 1


@pytest.mark.parametrize("how", ["other bytes", "too short"])
def test_a_disk_that_loses_what_it_took(tmp_path: Path, how: str) -> None:
    """No bytes are given out, and the reader is told to try again."""
    spill = Spill(tmp_path, limit=0)
    held = Store(0, JOB)
    held.spill = spill
    declare(held, 1, np.zeros(100, np.float32))
    item = ps_pb2.ReadItem(variable=1, rows=ps_pb2.Rows(all=True))
    read = reads.read(held, ps_pb2.ReadRequest(job=JOB, items=[item]), Payload([]))
    assert next(read) == bytes(CHUNK)
    Client(StateManager(DurabilityOptions()), held).update(dense(ps_pb2.ASSIGN, np.ones(100, np.float32)))
    (descriptor,) = open_files(tmp_path)
    if how == "too short":
        os.truncate(descriptor, CHUNK + 3)
    else:
        os.pwrite(descriptor, b"x", CHUNK + 3)
    with pytest.raises(
        UnavailableError,
        match="try again: old values read back from the disk are damaged",
    ):
        list(read)
    assert spill.spilled == 0


def test_releasing_waits_for_no_lock(tmp_path: Path) -> None:
    """The last reference may end anywhere, under any locks; the thread that has the lock reclaims later."""
    spill = Spill(tmp_path, limit=CHUNK)
    blocks = save(spill, range(3))
    with spill._lock:
        blocks.clear()
        assert spill.spilled == 2
    spill._try_reclaim()
    assert (spill.in_memory, spill.spilled, open_files(tmp_path)) == (0, 0, [])


def test_by_several_threads(tmp_path: Path) -> None:
    """Each reads back its own bytes while others are released."""
    spill, wrong = Spill(tmp_path, limit=5 * CHUNK), []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        kept: list[tuple[bytes, SavedBlock]] = []
        for _ in range(300):
            data = random.bytes(CHUNK)
            kept.append((data, spill.save(memoryview(data))))
            if len(kept) > 8:
                data, block = kept.pop(int(random.integers(len(kept))))
                if block.read() != data:
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (spill.in_memory, spill.spilled) == (0, 0)
    assert len(open_files(tmp_path)) == 0


def test_a_server_s_file_is_beside_its_state(tmp_path: Path) -> None:
    """A capture that changes completely is read as it was; most of it was never in memory twice."""
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
        assert len(open_files(tmp_path / "state")) == 2  # the other is the lock
        assert b"".join(capture["value"]) == before.tobytes()
        capture["value"].close()
    finally:
        manager.close()
    StateDirectory(tmp_path / "state").close()
