"""The log: acknowledged updates are in it once, whatever the disk does, and no others are acknowledged."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from tests.disks import small_disk
from tests.ps.storage import support
from tests.ps.storage.support import (
    IDENTITY,
    JOB,
    NEVER,
    Client,
    Hold,
    Part,
    Sendable,
    Trouble,
    begun,
    beside,
    box,
    declare,
    declare_rule,
    dense,
    facts,
    killed,
    manager_of,
    names,
    put,
    rows,
    scalar,
    values_of,
)
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.ps.server.requests import update_checks
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.write_path import write
from pscluster.ps.storage.files.generations import DamagedError, StateDirectory
from pscluster.ps.storage.job_state import JobIdentity
from pscluster.ps.storage.log import format as log_format
from pscluster.ps.storage.log import writer as log_module
from pscluster.ps.storage.log.reader import records
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import Durability
from pscluster.v1 import ps_pb2, state_pb2

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

SEGMENT_HEAD = log_format.FIRST
RECORD_HEAD = log_format.HEAD.size


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Iterator[None]:
    """Small segments can be copied and read many times; they grow as large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "_GROW", 4096)
        yield


def restored(folder: Path) -> Store | None:
    """Return the store that a server with a log restores from a copy of this folder."""
    return support.restored(killed(folder), Durability.LOG)


def found_in(folder: Path) -> Store:
    """Return the restored store; there must be one."""
    held = restored(folder)
    assert held is not None
    return held


def fill(manager: StateManager, held: Store) -> None:
    """Create variables of several kinds: in two shards, with two leading axes, a scalar, bfloat16, an empty one."""
    declare(held, 1, np.zeros((8, 3), np.float32), (5, 8))
    declare(held, 2, np.zeros((4, 3, 2)))
    declare(held, 3, np.array(1, np.int64))
    declare(held, 4, np.zeros((6, 2), BFLOAT16))
    declare(held, 5, np.zeros((0, 3), np.float32))
    declare_rule(held, 6, "adam", ema=0.75)
    declare_rule(held, 7, "ftrl", learning_rate=0.5)
    manager.save()


def some_part(random: np.random.Generator) -> Part:
    """Return an item of any kind."""
    shard = int(random.integers(0, 2))
    height = (5, 3)[shard]
    gradient = random.normal(size=(height, 3)).astype(np.float32)
    ids = random.integers(0, height, 4).tolist()
    optimizer = int(random.integers(6, 8))
    kinds = (ps_pb2.ASSIGN, ps_pb2.ADD, ps_pb2.SUB, ps_pb2.MUL, ps_pb2.DIV, ps_pb2.MIN, ps_pb2.MAX)
    kind = kinds[int(random.integers(0, len(kinds)))]
    makers: list[Callable[[], Part]] = [
        lambda: dense(kind, gradient, shard=shard),
        lambda: rows(kind, ids, random.normal(size=(4, 3)).astype(np.float32), shard=shard),
        lambda: dense(ps_pb2.APPLY_GRADIENT, gradient, shard=shard, optimizer=optimizer),
        lambda: rows(
            ps_pb2.APPLY_GRADIENT,
            ids,
            random.normal(size=(4, 3)).astype(np.float32),
            shard=shard,
            optimizer=optimizer,
        ),
        lambda: rows(ps_pb2.ASSIGN, random.integers(0, 12, 3).tolist(), random.normal(size=(3, 2)), 2, leading=2),
        lambda: box(kind, [(3, -1, 2), (0, 2, 2), (1, 1, 1)], random.normal(size=(2, 2, 1)), 2),
        lambda: box(kind, [(0, 1, 4), (0, 1, 1), (0, 1, 2)], np.array(random.normal()), 2),
        lambda: scalar(kind, np.array(random.normal()), 2),
        lambda: dense(ps_pb2.ADD, np.array(random.integers(0, 99), np.int64), 3),
        lambda: rows(ps_pb2.ADD, [0, 5, 0], random.normal(size=(3, 2)).astype(BFLOAT16), 4),
        lambda: dense(ps_pb2.APPLY_GRADIENT, random.normal(size=(6, 2)).astype(BFLOAT16), 4, optimizer=optimizer),
        lambda: dense(ps_pb2.ADD, np.zeros((0, 3), np.float32), 5),
        lambda: put(f"text {random.integers(0, 3)}", f"{random.random()}"),
    ]
    return makers[int(random.integers(0, len(makers)))]()


def some_update(random: np.random.Generator) -> list[Part]:
    """Return one to four items, of the same shard too."""
    return [some_part(random) for _ in range(random.integers(1, 5))]


@pytest.mark.parametrize("fsync", [False, True])
def test_every_kind_of_update_comes_back(tmp_path: Path, fsync: bool) -> None:
    """Bit for bit, with slots, steps, averages, counts and keys, from the log alone and after generations."""
    random = np.random.default_rng(1)
    with begun(tmp_path / "s", fsync=fsync) as (manager, held):
        fill(manager, held)
        client = Client(manager, held)
        for index in range(240):
            client.update(*some_update(random), function=index % 7 * 3)
            if index % 60 == 30:
                assert facts(found_in(killed(tmp_path / "s")), ledger=False) == _with_all_keys(held, tmp_path / "s")
                manager.save()
        last = facts(held, ledger=False)
        again = facts(found_in(killed(tmp_path / "s")), ledger=False)
    assert _values(again) == _values(last)


def _values(contents: dict[object, object]) -> dict[object, object]:
    """Return the facts without keys: a log also remembers those that clients have settled since."""
    return {key: value for key, value in contents.items() if not (isinstance(key, tuple) and key[-1] == "keys")}


def _with_all_keys(held: Store, folder: Path) -> dict[object, object]:
    """Return the live store's facts with the keys that a restored store has: at least those of the live one."""
    live, recovered = facts(held, ledger=False), facts(found_in(killed(folder)), ledger=False)
    for key in live:
        if isinstance(key, tuple) and key[-1] == "keys":
            lost = [entry for entry in live[key] if entry not in recovered[key]]
            assert not lost, f"a repetition of {lost} would be applied again"
            live[key] = recovered[key]
    return live


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), kill_at=st.lists(st.sampled_from(["go on", "die", "save"]), max_size=12))
def test_one_process_after_another(tmp_path_factory: pytest.TempPathFactory, seed: int, kill_at: list[str]) -> None:
    """Servers die and restart repeatedly, with the same effect as one server."""
    random, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("lives") / "s"
    with begun(folder) as (manager, held):
        fill(manager, held)
        client = Client(manager, held)
        for _ in range(3):
            client.update(*some_update(random))
        copy = killed(folder)
        before, sequence = _values(facts(held, ledger=False)), client.sequence
    for index, event in enumerate(kill_at):
        with manager_of(copy) as manager:
            recovered = manager.restore()
            assert recovered is not None
            assert _values(facts(recovered.store, ledger=False)) == before, f"life {index}"
            client = Client(manager, recovered.store)
            client.sequence = sequence
            if event == "save":
                manager.save()
            for _ in range(random.integers(0, 3)):
                client.update(*some_update(random))
            before, sequence = _values(facts(recovered.store, ledger=False)), client.sequence
            copy = killed(copy) if event != "go on" else copy
            if event == "go on":
                copy = shutil.copytree(copy, folder.with_name(f"next-{index}"))


def no_more_generations(manager: StateManager) -> None:
    """Wait until nothing is being saved, so that the directory can be copied."""

    def idle() -> bool:
        with manager._changed:
            manager._plan.every, manager._plan._next = NEVER, time.monotonic() + NEVER
            return manager._plan._saving is None and manager._plan._requested <= manager._plan._persisted

    until(idle, "no generation is being saved, or asked for")


def test_many_clients_at_once(tmp_path: Path) -> None:
    """While generations are saved, too, the log holds the acknowledged updates in the order they were applied."""
    with begun(tmp_path / "s") as (manager, held):
        fill(manager, held)
        over = threading.Event()

        def work(seed: int) -> None:
            random, client = np.random.default_rng(seed), Client(manager, held, 100 + seed)
            for _ in range(40):
                client.update(*some_update(random))

        def save() -> None:
            while not over.is_set():
                manager.save()

        with beside(save) as failed:
            with beside(*(lambda seed=seed: work(seed) for seed in range(6))) as raised:
                pass
            over.set()
        assert raised == failed == []
        copy = killed(tmp_path / "s")
        assert _values(facts(found_in(copy), ledger=False)) == _values(facts(held, ledger=False))
        assert len(names(copy)) <= 1 + 2 + 10 + 3


def test_a_kill_while_many_clients_write(tmp_path: Path) -> None:
    """Every addition that was acknowledged before is there once; each of the others once or not at all."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(4 * 50, np.int64))
        manager.save()
        acknowledged = [list[int]() for _ in range(4)]
        over = threading.Event()

        def work(seed: int) -> None:
            client = Client(manager, held, 100 + seed)
            for row in range(50):
                client.update(rows(ps_pb2.ADD, [seed * 50 + row], np.array([[1]])))
                acknowledged[seed].append(row)
                if row == 49:
                    over.wait()

        with beside(*(lambda seed=seed: work(seed) for seed in range(4))) as raised:
            try:
                for _ in range(5):
                    before = [list(done) for done in acknowledged]
                    copy = killed(tmp_path / "s")
                    applied = values_of(found_in(copy), 1).reshape(4, 50)
                    assert applied.max() <= 1, "an update came back twice"
                    for seed, places in enumerate(before):
                        assert applied[seed, places].all(), "an acknowledged update is lost"
            finally:
                over.set()
        assert raised == []
        assert values_of(found_in(killed(tmp_path / "s")), 1).all()


def one_by_one(folder: Path, count: int = 4, *, fsync: bool = False) -> tuple[Path, Path, list[list[float]]]:
    """Return a copy of a directory whose log has `count` additions, its segment, and the values after each."""
    with begun(folder, fsync=fsync) as (manager, held):
        declare(held, 1, np.zeros(6, np.float32))
        manager.save()
        client, values = Client(manager, held), [values_of(held, 1).tolist()]
        for exponent in range(count):
            client.update(dense(ps_pb2.ADD, np.arange(6, dtype=np.float32) + 10**exponent))
            values.append(values_of(held, 1).tolist())
        copy = killed(folder)
        (segment,) = (path for path in copy.iterdir() if path.name.startswith("log") and records_of(path))
    return copy, segment, values


def records_of(segment: Path) -> list[tuple[state_pb2.LogRecord, memoryview]]:
    """Return the records of one segment, as if it were the only one."""
    return list(records([segment], int(segment.stem.rpartition("-")[2])))


def ends_of(segment: Path) -> list[int]:
    """Return where its records end."""
    data, at, ends = segment.read_bytes(), SEGMENT_HEAD, list[int]()
    for record, payload in records_of(segment):
        at += RECORD_HEAD + log_format.HEAD.unpack_from(data, at)[3]
        assert len(payload) == record.total_bytes
        ends.append(at)
    return ends


# Damage


def marked(segment: bytes, end: int, count: int, *, synced: bool = False) -> bytes:
    """Return a segment with a mark for these acknowledged bytes and records, synced or not."""
    head, mark = log_format.SEGMENT.size, b"".join(log_format.mark_twice(end, count, synced))
    return segment[:head] + mark + segment[SEGMENT_HEAD:]


def of_another_boot(segment: bytes) -> bytes:
    """Return the segment as it is found after a restart of the machine."""
    form = log_format.SEGMENT
    magic, generation, previous, boot, _ = form.unpack_from(segment)
    assert boot == log_format.machine_boot_id() != b""
    return log_format.with_crc(form, magic, generation, previous, bytes(16)) + segment[form.size :]


def losses_written(manager: StateManager) -> None:
    """Wait until the losses are on disk."""
    until(lambda: not manager._lost_more(), "it is written down")


def flips(data: bytes, low: int, high: int, step: int = 1) -> Iterator[tuple[int, bytes]]:
    """Yield copies with one bit flipped, in each byte or every `step`-th of a range in turn."""
    for at in range(low, high, step):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        yield at, bytes(changed)


def test_torn_tails(tmp_path: Path) -> None:
    """Cut or zeroed at every byte of a record that was not acknowledged: the state is without that record."""
    copy, segment, values = one_by_one(tmp_path / "s")
    whole, ends = segment.read_bytes(), ends_of(segment)
    assert len(ends) == 4
    unacknowledged = marked(whole, ends[-2], 3)
    for at in range(ends[-2], ends[-1] + 1):
        for data in (unacknowledged[:at], unacknowledged[:at] + bytes(len(whole) - at)):
            segment.write_bytes(data)
            recovered = values_of(found_in(copy), 1).tolist()
            # The last bytes of a payload may be zeros, and then none is missing.
            assert recovered == values[3] or (recovered == values[4] and data[: ends[-1]] == unacknowledged[: ends[-1]])
    segment.write_bytes(whole[: ends[-1]])
    assert values_of(found_in(copy), 1).tolist() == values[4]


def test_a_tear_in_what_was_acknowledged(tmp_path: Path) -> None:
    """While the machine runs no write is half undone: cut or zeroed at any byte, the last record is damaged."""
    _, segment, _ = one_by_one(tmp_path / "s")
    whole, ends = segment.read_bytes(), ends_of(segment)
    for at in range(ends[-3], ends[-1]):
        for data in (whole[:at], whole[:at] + bytes(len(whole) - at)):
            if data[: ends[-1]] != whole[: ends[-1]]:
                segment.write_bytes(data)
                with pytest.raises(DamagedError, match=rf"{segment.name} is damaged at byte"):
                    records_of(segment)


def test_records_after_a_torn_tail_are_kept(tmp_path: Path) -> None:
    """The server continues with a new segment, and the torn one does not disturb the next restart."""
    copy, segment, values = one_by_one(tmp_path / "s")
    ends = ends_of(segment)
    segment.write_bytes(marked(segment.read_bytes(), ends[-2], 3)[: ends[-1] - 1])
    with manager_of(copy) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert "3 updates logged since" in recovered.words
        client = Client(manager, recovered.store, 10)
        client.update(dense(ps_pb2.ADD, np.full(6, 7, np.float32)))
        expected = values_of(recovered.store, 1).tolist()
        assert expected == (np.array(values[3]) + 7).tolist()
        assert recovered.store.lost == {}, "it had not been acknowledged"
        again = killed(copy)
    assert values_of(found_in(again), 1).tolist() == expected
    # Even if the generation that began the new segment is damaged: then the torn segment is read again.
    newest = max(again.glob("state-*.manifest"))
    newest.write_bytes(b"")
    assert values_of(found_in(again), 1).tolist() == expected


def test_any_flipped_bit(tmp_path: Path) -> None:
    """In any record, the last one too: an error that names the file, the offset and what to do. In the mark: none."""
    copy, segment, values = one_by_one(tmp_path / "s")
    whole, ends = segment.read_bytes(), ends_of(segment)
    marks = range(log_format.SEGMENT.size, SEGMENT_HEAD)
    begins = [SEGMENT_HEAD, *ends]
    for at, data in flips(whole, 0, ends[-1]):
        segment.write_bytes(data)
        if at in marks:
            assert ends_of(segment) == ends
            continue
        where = "at its beginning" if at < SEGMENT_HEAD else f"at byte {max(b for b in begins if b <= at):,}, with"
        with pytest.raises(DamagedError, match=rf"{segment.name} is damaged {where}"):
            records_of(segment)
    for at, data in flips(whole, marks.start, ends[-1], 29):
        segment.write_bytes(data)
        if at in marks:
            assert values_of(found_in(copy), 1).tolist() == values[-1]
            continue
        with pytest.raises(ConfigurationError, match=rf"{segment.name} is damaged at byte.*--durability snapshot"):
            restored(copy)


@pytest.mark.parametrize("how", ["cut", "zeros", "flipped"])
def test_after_another_boot(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """Without --fsync a crash may lose acknowledged updates: they are dropped, logged and counted, once."""
    copy, segment, values = one_by_one(tmp_path / "s")
    whole, ends = of_another_boot(segment.read_bytes()), ends_of(segment)
    segment.write_bytes(whole)
    pristine = killed(copy)
    assert values_of(found_in(killed(pristine)), 1).tolist() == values[4], "nothing is wrong"
    for kept in (2, 3):
        for at in range(ends[kept - 1], ends[kept], 17):
            data = bytearray(whole[:at] if how == "cut" else whole)
            if how == "zeros":
                data[at:] = bytes(len(data) - at)
            if how == "flipped":
                data[at] ^= 1 << at % 8
            if data[: ends[kept]] == whole[: ends[kept]]:
                continue  # the last bytes of a payload may be zeros
            folder = killed(pristine)
            (folder / segment.name).write_bytes(data)
            caplog.clear()
            with manager_of(folder) as manager:
                recovered = manager.restore()
                assert recovered is not None
                assert values_of(recovered.store, 1).tolist() == values[kept]
                lost = recovered.store.lost
                losses_written(manager)
            assert sum(lost.values()) == 4 - kept
            if how == "flipped" and kept == 2:
                assert lost == {"v1": 1, "(unknown)": 1}, "the last record can be read"
            assert f"at least {4 - kept} acknowledged updates were lost" in caplog.text
            with manager_of(folder) as manager:
                again = manager.restore()
                assert again is not None
                assert again.store.lost == lost, "neither forgotten, nor counted twice"
    # The mark may be older than the records: then fewer are known to be lost.
    older = bytearray(marked(whole, ends[1], 2))
    older[ends[-1] - 5] ^= 1
    (pristine / segment.name).write_bytes(older)
    again_found = found_in(pristine)
    assert values_of(again_found, 1).tolist() == values[3]
    assert again_found.lost == {}


def test_after_another_boot_with_fsync(tmp_path: Path) -> None:
    """Synced bytes must be there, by the mark or by a later batch; updates beyond may not have been acknowledged."""
    copy, segment, values = one_by_one(tmp_path / "s", fsync=True)
    whole, ends = of_another_boot(segment.read_bytes()), ends_of(segment)
    for count in (4, 3):
        for at, data in flips(marked(whole, ends[count - 1], count, synced=True), SEGMENT_HEAD, ends[-1], 13):
            segment.write_bytes(data)
            if at < ends[count - 1]:
                with pytest.raises(ConfigurationError, match=rf"{segment.name} is damaged at byte"):
                    restored(copy)
            else:
                again = killed(copy)
                assert values_of(found_in(again), 1).tolist() == values[3]
    # The mark is older than the last batch, which says that those before it were synced.
    for _, data in flips(marked(whole, ends[0], 1, synced=True), ends[0], ends[-2], 13):
        segment.write_bytes(data)
        with pytest.raises(ConfigurationError, match=rf"{segment.name} is damaged at byte"):
            restored(copy)


@pytest.mark.parametrize(
    "change",
    [False, True],
)
def test_what_the_error_of_a_damaged_log_says_helps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: bool
) -> None:
    """Started once with snapshots, the server has the generation, reports the loss, and runs with a log afterwards."""
    copy, segment, values = one_by_one(tmp_path / "s")
    changed = bytearray(segment.read_bytes())
    changed[SEGMENT_HEAD + RECORD_HEAD + 5] ^= 1
    segment.write_bytes(changed)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"To go on without .* start it once with --durability snapshot"):
            support.restored(copy, Durability.LOG)
    expected = values[0]
    with manager_of(copy, Durability.SNAPSHOT) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert f"{segment.name} is damaged at byte" in caplog.text
        assert "the updates after the last snapshot are lost" in caplog.text
        assert values_of(recovered.store, 1).tolist() == values[0]
        assert recovered.store.lost == {"v1": 3, "(unknown)": 1}, "the first record can't be read"
        if change:
            Client(manager, recovered.store, 10).update(dense(ps_pb2.ADD, np.ones(6, np.float32)))
            expected = [value + 1 for value in expected]
    with manager_of(copy) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert values_of(recovered.store, 1).tolist() == expected
        Client(manager, recovered.store, 11).update(dense(ps_pb2.ADD, np.ones(6, np.float32)))
        assert values_of(found_in(copy), 1).tolist() == [value + 1 for value in expected]


def test_garbage_is_no_segment(tmp_path: Path) -> None:
    """Nor is a whole segment under another name, or after other bytes; after its records, garbage is a torn record."""
    random, path = np.random.default_rng(3), tmp_path / "log-000001.bin"
    for size in (0, 1, SEGMENT_HEAD - 1, SEGMENT_HEAD, SEGMENT_HEAD + 1, 5000):
        path.write_bytes(random.bytes(size))
        with pytest.raises(DamagedError, match=r"log-000001\.bin is damaged at its beginning"):
            list(records([path], 1))
    _, segment, _ = one_by_one(tmp_path / "s")
    whole, ends = segment.read_bytes(), ends_of(segment)
    other = segment.with_name("log-000077.bin")
    for data in (whole, random.bytes(777) + whole):
        other.write_bytes(data)
        with pytest.raises(DamagedError, match="log-000077"):
            list(records([other], 77))
    for size in (1, RECORD_HEAD - 1, RECORD_HEAD, 5000):
        segment.write_bytes(whole[: ends[-1]] + random.bytes(size))
        assert ends_of(segment) == ends
    with pytest.raises(DamagedError, match="snapshot 7 is missing"):
        list(records([], 7))


@pytest.mark.parametrize("where", ["one segment", "two segments"])
def test_records_in_another_order(tmp_path: Path, where: str) -> None:
    """Two updates of a shard may reach the log in reverse: they are applied in their own order."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.array([1.0, 2.0]))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.array([3.0, 4.0])))
        if where == "two segments":
            manager.save()
        client.update(dense(ps_pb2.MUL, np.array([5.0, 6.0])))
        copy = killed(tmp_path / "s")
        expected = values_of(held, 1).tolist()
    segments = [path for path in sorted(copy.glob("log-*.bin")) if records_of(path)]
    if where == "two segments":
        max(copy.glob("state-*.manifest")).unlink()
    data = [path.read_bytes() for path in segments]
    cuts = [(SEGMENT_HEAD, *ends_of(path)) for path in segments]
    records = [data[n][low:high] for n, ends in enumerate(cuts) for low, high in itertools.pairwise(ends)]
    assert len(records) == 2
    turned = iter(reversed(records))
    for path, whole, ends in zip(segments, data, cuts, strict=True):
        turned_here = list[bytes]()
        for record_number in range(1, len(ends)):
            record = next(turned)
            _, _, checksum, size, batch, _, _ = log_format.HEAD.unpack_from(record)
            generation = int.from_bytes(whole[8:16], "little")
            turned_here.append(
                log_format.header_of(checksum, size, batch, generation, record_number) + record[RECORD_HEAD:]
            )
        end = SEGMENT_HEAD + sum(map(len, turned_here))
        path.write_bytes(marked(whole, end, len(turned_here))[:SEGMENT_HEAD] + b"".join(turned_here) + bytes(99))
    assert values_of(found_in(copy), 1).tolist() == expected == [20, 36]


def test_a_machine_that_dies_in_the_middle_of_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages of a batch reach the disk in any order: it was not acknowledged, so none of it is damage."""

    class SecondFlush(Hold):
        """Blocks all calls but the first."""

        def fail(self) -> None:
            if self.raised == 2:
                super().fail()

    write, flush = Hold(monkeypatch, "pwritev", "log-"), SecondFlush(monkeypatch, "fdatasync", "log-")
    with begun(tmp_path / "s", fsync=True) as (manager, held):
        declare(held, 1, np.zeros(1000))
        manager.save()
        log = manager._log
        assert log is not None
        works = [
            lambda seed=seed: Client(manager, held, seed).update(dense(ps_pb2.ADD, np.ones(1000))) for seed in (5, 6, 7)
        ]
        write.armed = flush.armed = True
        with beside(works[0]) as one:
            assert write.entered.wait(TIMEOUT)
            with beside(*works[1:]) as two:
                until(lambda: len(log._queue) == 2, "two wait for the first to be written")
                write.armed = False
                write.go.set()
                assert flush.entered.wait(TIMEOUT), "the first is flushed, and then the batch"
                copy = killed(tmp_path / "s")
                flush.go.set()
        assert one == two == []
    segment = max(copy.glob("log-*"))
    first, second, _ = ends_of(segment)
    data = bytearray(segment.read_bytes())
    data[first:second] = bytes(second - first)  # pages of the second, which had not been acknowledged
    segment.write_bytes(data)
    with manager_of(copy) as manager:
        recovered = manager.restore()
        assert recovered is not None
        assert values_of(recovered.store, 1)[0] == 1
        Client(manager, recovered.store, 8).update(dense(ps_pb2.ADD, np.ones(1000)))
        again = killed(copy)
    assert values_of(found_in(again), 1)[0] == 2, "what comes after it is kept"


def test_damage_at_the_end_of_a_segment_with_another_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last record of a segment must be whole if there are records in the next one."""
    disk = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        disk.armed = True
        with pytest.raises(Exception, match="No space left"):
            manager.save()  # it has begun a segment
        disk.armed = False
        client.update(dense(ps_pb2.ADD, np.full(3, 10.0)))
        copy = killed(tmp_path / "s")
    assert values_of(found_in(copy), 1).tolist() == [11] * 3
    first = next(path for path in sorted(copy.glob("log-*")) if records_of(path))
    data = bytearray(first.read_bytes())
    data[ends_of(first)[-1] - 20] ^= 1
    first.write_bytes(data)
    with pytest.raises(ConfigurationError, match=first.name):
        restored(copy)


def test_a_segment_is_not_read_into_memory_whole(tmp_path: Path) -> None:
    """It may have grown for as long as a large snapshot took: what is in memory is one record."""
    size, count = 1 << 20, 24
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(size // 4, np.float32))
        manager.save()
        client = Client(manager, held)
        for _ in range(count):
            client.update(dense(ps_pb2.ADD, np.ones(size // 4, np.float32)))
        copy = killed(tmp_path / "s")
    (segment,) = (path for path in copy.iterdir() if path.name.startswith("log") and path.stat().st_size > count * size)
    tracemalloc.start()
    try:
        assert sum(1 for _ in records([segment], int(segment.stem.rpartition("-")[2]))) == count
        assert tracemalloc.get_traced_memory()[1] < 8 * size
    finally:
        tracemalloc.stop()


def test_a_segment_that_is_missing_or_another_s(tmp_path: Path) -> None:
    """If a generation's log is missing, or is another generation's, updates are lost: that is an error."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        manager.save()
        client.update(dense(ps_pb2.ADD, np.full(3, 10.0)))
        missing, swapped = killed(tmp_path / "s"), killed(tmp_path / "s")
    max(missing.glob("log-*")).unlink()
    before, last = sorted(swapped.glob("log-*"))[-2:]
    before.rename(swapped / "x")
    last.rename(before)
    (swapped / "x").rename(last)
    # The same for a segment in the middle, if the generation that counts is an earlier one.
    between = killed(tmp_path / "s")
    max(between.glob("state-*.manifest")).unlink()
    max(between.glob("log-*")).rename(between / "log-000099.bin")
    for copy, why in ((missing, "is missing"), (swapped, "at its beginning"), (between, "at its beginning")):
        with pytest.raises(ConfigurationError, match=why):
            restored(copy)


# Disks that fail


def test_a_disk_without_room_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is refused before any of it is applied; once there is room it is taken."""
    disk = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    with begun(tmp_path / "s") as (manager, held):
        big = np.ones(3 << 20)  # more than the space that is reserved in advance
        declare(held, 1, big)
        manager.save()
        client, before = Client(manager, held), facts(held)
        disk.armed = True
        made = client.made(dense(ps_pb2.ADD, big))
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"can't grow \(No space left.*free some disk space there"):
                client.send(made)
        assert facts(held) == before
        small = client.update(rows(ps_pb2.ADD, [3], np.ones((1, 1))))
        assert small.applied == 1, "what was set aside is of use"
        disk.armed = False
        assert client.send(made).applied == 1
        no_more_generations(manager)
        assert _values(facts(found_in(killed(tmp_path / "s")))) == _values(facts(held))


def test_a_disk_with_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are as small as they have to be, also where a failure takes what there is; what fits is saved."""
    allocate = os.posix_fallocate

    def allocate_little(descriptor: int, begin: int, size: int) -> None:
        if begin + size > 1 << 20:
            allocate(descriptor, begin, (1 << 20) - begin)  # as ext4 does
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(descriptor, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate_little)
    monkeypatch.setattr(log_module, "_GROW", 16 << 20)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(1 << 14))  # of 128 KiB
        client = Client(manager, held)
        for _ in range(3):
            manager.save()
            for _ in range(6):
                longest = max(path.stat().st_size for path in (tmp_path / "s").glob("log-*"))
                assert longest < 1 << 20, "the rest is free, for what is saved"
                assert client.update(dense(ps_pb2.ADD, np.ones(1 << 14))).applied == 1
        no_more_generations(manager)
        assert values_of(found_in(killed(tmp_path / "s")), 1)[0] == values_of(held, 1)[0] == 18


def update_until_taken(client: Client, part: Part) -> list[str]:
    """Send an update again until the disk has room for it, as a worker does; return why it was refused."""
    made, refused = client.made(part), list[str]()

    def taken() -> bool:
        try:
            return client.send(made).applied == 1
        except UnavailableError as error:
            refused.append(str(error))
            return False

    until(taken, "the update is taken", lambda: refused[-1:])
    return refused


@pytest.mark.parametrize("fsync", [False, True])
def test_a_log_leaves_room_for_the_state_that_replaces_it(tmp_path: Path, fsync: bool) -> None:
    """Many more updates than the disk has room for are logged, and none is lost."""
    with small_disk(tmp_path / "s", 6) as disk, begun(disk, fsync=fsync) as (manager, held):
        declare(held, 1, np.zeros(1 << 14))
        manager.save()
        client, refused = Client(manager, held), list[str]()
        for count in range(1, 151):  # 19 MiB
            refused += update_until_taken(client, dense(ps_pb2.ADD, np.ones(1 << 14)))
            if count % 50 == 0:
                assert values_of(found_in(killed(disk)), 1)[0] == count
        assert all("until the state has been saved" in why for why in refused)
        assert manager.failures == 0


def test_a_log_that_no_state_can_replace_takes_the_rest_of_the_disk(tmp_path: Path) -> None:
    """Where others have left no room for the state, updates go on until the disk is full, and again once it is not."""
    with small_disk(tmp_path / "s", 6) as disk, begun(disk) as (manager, held):
        declare(held, 1, np.zeros(1 << 17))  # of 1 MiB
        manager.save()
        filler = disk / "filler"
        filler.write_bytes(bytes(3 << 20))
        client, part = Client(manager, held), dense(ps_pb2.ADD, np.ones(1 << 17))
        taken, why = 0, ""
        while "can't grow" not in why:
            try:
                taken += client.update(part).applied
            except UnavailableError as error:
                why = str(error)
        assert taken
        assert values_of(found_in(killed(disk)), 1)[0] == taken
        filler.unlink()
        update_until_taken(client, part)
        assert values_of(found_in(killed(disk)), 1)[0] == taken + 1


def test_a_disk_without_room_at_the_beginning_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A creation is refused, with the reason, and succeeds once there is room."""
    disk = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    disk.armed = True
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        with pytest.raises(Exception, match="No space left"):
            manager.save()
        with pytest.raises(UnavailableError):
            Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        assert values_of(held, 1).tolist() == [0] * 3
        disk.armed = False
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [1] * 3


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
def test_a_broken_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """No update is acknowledged until a generation is saved; then the repetition is, and counts once from then on."""
    disk = Trouble(monkeypatch, call, "log-", errno.EIO)
    full = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)  # so that it is not repaired too early
    with begun(tmp_path / "s", fsync=True) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.full(3, 100.0)))
        first, second = client.made(dense(ps_pb2.ADD, np.ones(3))), client.made(dense(ps_pb2.ADD, np.full(3, 10.0)))
        disk.armed = full.armed = True
        with pytest.raises(UnavailableError, match=r"could not be logged.*Input/output error"):
            client.send(first)
        disk.armed = False
        for made in (first, second):
            with pytest.raises(UnavailableError, match="updates are refused"):
                client.send(made)
        assert "failing" in manager.words
        no_more_generations(manager)  # it tried to repair the log, in vain
        assert values_of(found_in(killed(tmp_path / "s")), 1)[0] in (100, 101)
        full.armed = False
        manager.save()
        assert "failing" not in manager.words
        reply = client.send(first)
        assert (reply.applied, reply.repeated_) == (0, 1)
        assert client.send(second).applied == 1
        assert values_of(held, 1).tolist() == [111] * 3
        again = found_in(copy := killed(tmp_path / "s"))
        assert values_of(again, 1).tolist() == [111] * 3
        with manager_of(copy) as other:
            recovered = other.restore()
            assert recovered is not None
            client = Client(other, recovered.store)
            assert client.send(first).repeated_ == 1
            assert client.send(second).repeated_ == 1
            assert values_of(recovered.store, 1).tolist() == [111] * 3


def test_a_log_that_breaks_while_a_generation_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next generation, which comes by itself, repairs it."""
    disk = Hold(monkeypatch, "pwritev", "log-")
    disk.failing = True
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        made = client.made(dense(ps_pb2.ADD, np.ones(3)))

        def first() -> None:
            with pytest.raises(UnavailableError):
                client.send(made)

        disk.armed = True
        with beside(first) as raised:
            assert disk.entered.wait(TIMEOUT)
            with manager._changed:
                manager._plan.every = 0.001
            with beside(manager.save):  # it begins before the log breaks
                until(
                    lambda: manager._plan._saving is not None, "the generation is begun, and waits for the log's writer"
                )
                disk.armed = False
                disk.go.set()
        assert raised == []

        until(lambda: not (manager._log and manager._log.broken), "the log is repaired", lambda: manager.words)
        assert client.send(made).repeated_ == 1
        no_more_generations(manager)
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [1] * 3


def test_a_log_that_breaks_while_a_generation_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That generation does not repair it, since it lacks later updates; the next one does, by itself."""
    disk, log_disk = Hold(monkeypatch, "pwritev", "state-"), Trouble(monkeypatch, "pwritev", "log-")
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        declare(held, 2, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        for variable in (1, 2):
            client.update(dense(ps_pb2.ADD, np.ones(3), variable))
        made = client.made(dense(ps_pb2.ADD, np.full(3, 10.0)), dense(ps_pb2.ADD, np.full(3, 10.0), 2))
        with disk.during(manager.save):
            log_disk.armed = True
            with pytest.raises(UnavailableError):
                client.send(made)
            log_disk.armed = False
        until(lambda: not (manager._log and manager._log.broken), "the log is repaired", lambda: manager.words)
        no_more_generations(manager)
        assert client.send(made).repeated_ == 2
        again = found_in(killed(tmp_path / "s"))
        assert [values_of(again, variable).tolist() for variable in (1, 2)] == [[11] * 3] * 2


def test_a_break_with_many_in_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that saw a failure may repeat; others find their updates in the log: all count once."""
    disk = Trouble(monkeypatch, "pwritev", "log-", errno.EIO)
    with begun(tmp_path / "s", every=0.005) as (manager, held):
        declare(held, 1, np.zeros(5 * 30, np.int64))
        manager.save()

        def sent(client: Client, made: Sendable) -> None:
            def acknowledged() -> bool:
                try:
                    client.send(made)
                except UnavailableError:
                    return False
                return True

            until(acknowledged, "an update is acknowledged", lambda: manager.words)

        def work(seed: int) -> None:
            client = Client(manager, held, 100 + seed)
            for row in range(30):
                sent(client, client.made(rows(ps_pb2.ADD, [seed * 30 + row], np.array([[1]]))))

        def spoil() -> None:
            for _ in range(5):
                already, disk.armed = disk.raised, True
                until(functools.partial(failed_since, already), "the disk fails")
                disk.armed = False
                until(lambda: not (manager._log and manager._log.broken), "the log is repaired", lambda: manager.words)

        def failed_since(already: int) -> bool:
            return disk.raised > already or over.is_set()

        over = threading.Event()
        with beside(spoil) as failed:
            with beside(*(lambda seed=seed: work(seed) for seed in range(5))) as raised:
                pass
            over.set()
        assert raised == failed == []
        assert (values_of(held, 1) == 1).all()
        no_more_generations(manager)
        assert (values_of(found_in(killed(tmp_path / "s")), 1) == 1).all()


def test_a_repetition_waits_for_the_first_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repetition that arrives while the first is being written is not acknowledged before the first is on disk."""
    disk = Hold(monkeypatch, "pwritev", "log-")
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client, order = Client(manager, held), list[str]()
        made = client.made(dense(ps_pb2.ADD, np.ones(3)))

        def first() -> None:
            client.send(made)

        def second() -> None:
            reply = client.send(made)
            order.append(f"repeated {reply.repeated_}")

        assert manager._log is not None
        disk.armed = True
        with beside(first) as raised:
            assert disk.entered.wait(TIMEOUT)
            with beside(second) as others:
                until(lambda: manager._log and manager._log._plan.horizon() == 2, "the repetition is there")
                until(lambda: manager._log and len(manager._log._plan._open) == 1, "the repetition waits")
                assert order == [], "acknowledged before it was on disk"
                copy = killed(tmp_path / "s")
                assert values_of(support.found_in(copy), 1).tolist() == [0] * 3
                order.append("flushed")
                disk.go.set()
        assert raised == others == []
        assert order == ["flushed", "repeated 1"]
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [1] * 3


def test_an_update_whose_first_item_counts_and_whose_second_fails(tmp_path: Path) -> None:
    """The item that was applied is in the log: a restart has neither more nor less."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros((2, 2)))
        declare_rule(held, 2, "sgd", learning_rate=1.0)
        manager.save()
        held.directory._optimizers[2].rule.__dict__["learning_rate_at"] = lambda step: 1 / 0
        client = Client(manager, held)
        made = client.made(
            dense(ps_pb2.ADD, np.ones((2, 2))), dense(ps_pb2.APPLY_GRADIENT, np.ones((2, 2)), optimizer=2)
        )
        with pytest.raises(MisuseError, match="ZeroDivisionError"):
            client.send(made)
        alone = client.made(dense(ps_pb2.APPLY_GRADIENT, np.ones((2, 2)), optimizer=2))
        with pytest.raises(MisuseError, match="ZeroDivisionError"):
            client.send(alone)
        client.update(dense(ps_pb2.ADD, np.ones((2, 2))))
        assert manager._log is not None
        assert manager._log._plan.all_ended
        assert manager._log._promised == 0
        again = found_in(killed(tmp_path / "s"))
        assert values_of(again, 1).tolist() == values_of(held, 1).tolist() == [[2, 2], [2, 2]]


def test_space_that_was_promised_is_given_back(tmp_path: Path) -> None:
    """Whatever the outcome of the updates."""
    with begun(tmp_path / "s") as (manager, held):
        fill(manager, held)
        random, client = np.random.default_rng(9), Client(manager, held)
        kept = [client.made(*some_update(random)) for _ in range(20)]
        for made in kept[-2:] * 3:
            client.send(made)
        assert manager._log is not None
        assert manager._log._promised == 0
        assert manager._log._done == set()
        segment = max((tmp_path / "s").glob("log-*"))
        assert manager._log._end == ends_of(segment)[-1]
        assert len(ends_of(segment)) == 2


def test_a_disk_that_is_full_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations that fail repeatedly do not use up more and more of the remaining room."""
    disk = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        disk.armed = True
        sizes = list[int]()
        for _ in range(6):
            with pytest.raises(Exception, match="No space left"):
                manager.save()
            sizes.append(sum(path.stat().st_blocks * 512 for path in (tmp_path / "s").iterdir()))
        assert all(later <= earlier for earlier, later in itertools.pairwise(sizes[1:])), sizes


def test_a_disk_that_has_no_room_for_segments_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations that can't even begin do not leave more and more files."""
    disk = Trouble(monkeypatch, "posix_fallocate", "log-", errno.ENOSPC)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        disk.armed = True
        counts = list[int]()
        for _ in range(4):
            with pytest.raises(Exception, match="No space left"):
                manager.save()
            counts.append(len(names(tmp_path / "s")))
        assert counts[-1] == counts[0], counts


# Updates in progress while something else changes


@pytest.mark.parametrize("shape", [(3,), (4,)])
def test_a_late_update_of_the_previous_job(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """It is checked, its payload arrives slowly, and meanwhile the next job begins, which must not get it."""
    with begun(tmp_path / "s") as (manager, old):
        declare(old, 1, np.zeros(3))
        manager.save()
        client = Client(manager, old)
        client.update(dense(ps_pb2.ADD, np.full(3, 1000.0)))
        request, payload, total = client.made(dense(ps_pb2.ADD, np.full(3, 1000.0)))
        placed = update_checks.check_update(old, request, total)
        new = Store(0, JOB + 1)
        manager.begin(new, IDENTITY)
        declare(new, 1, np.zeros(shape))
        manager.save()
        write(manager, old, request, placed, payload, total)
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [0] * shape[0]


def test_an_update_in_progress_when_its_variable_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its record follows the generation without the variable: the server starts all the same."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        declare(held, 2, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        request, payload, total = client.made(dense(ps_pb2.ADD, np.ones(3)))
        placed = update_checks.check_update(held, request, total)
        held.delete("v1")
        manager.save()
        write(manager, held, request, placed, payload, total)
        client.update(dense(ps_pb2.ADD, np.ones(3), 2))
        again = found_in(killed(tmp_path / "s"))
        assert [variable.spec.id for variable in again.held()[0]] == [2]
        assert values_of(again, 2).tolist() == [1] * 3
        assert "1 updates in the log belong to variables that no longer exist" in caplog.text


def test_updates_under_new_hyperparameters(tmp_path: Path) -> None:
    """An optimizer is declared anew, and updates are acknowledged before the generation that has it is saved."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        declare_rule(held, 2, "sgd", learning_rate=1.0)
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.APPLY_GRADIENT, np.ones(3), optimizer=2))
        declare_rule(held, 2, "sgd", learning_rate=100.0)  # its `manager.save()` is slow
        client.update(dense(ps_pb2.APPLY_GRADIENT, np.ones(3), optimizer=2))
        assert values_of(held, 1).tolist() == [-101] * 3
        assert values_of(found_in(killed(tmp_path / "s")), 1).tolist() == [-101] * 3


def test_new_hyperparameters_and_a_damaged_generation(tmp_path: Path) -> None:
    """Falling back to the previous generation and its log gives the same values, or is refused."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        declare_rule(held, 2, "sgd", learning_rate=1.0)
        manager.save()
        declare_rule(held, 2, "sgd", learning_rate=100.0)
        manager.save()
        Client(manager, held).update(dense(ps_pb2.APPLY_GRADIENT, np.ones(3), optimizer=2))
        copy = killed(tmp_path / "s")
    max(copy.glob("state-*.manifest")).write_bytes(b"")
    try:
        again = restored(copy)
    except ConfigurationError:
        return
    assert again is None or values_of(again, 1).tolist() == [-100] * 3


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_an_update_of_several_variables_of_which_one_is_not_there(tmp_path: Path, how: str) -> None:
    """Deleted meanwhile, or of a damaged generation: the part of the other variable was acknowledged, too."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 2, np.zeros(3))
        manager.save()
        declare(held, 1, np.zeros((4, 3)))
        manager.save()
        client = Client(manager, held)
        request, payload, total = client.made(
            rows(ps_pb2.ADD, [1, 2, 1], np.ones((3, 3))), dense(ps_pb2.ADD, np.ones(3), 2)
        )
        placed = update_checks.check_update(held, request, total)
        if how == "deleted":
            held.delete("v1")
            manager.save()
        assert write(manager, held, request, placed, payload, total).applied == 2
        client.update(dense(ps_pb2.MUL, np.full(3, 10.0), 2))
        copy = killed(tmp_path / "s")
        assert values_of(held, 2).tolist() == [10] * 3
    if how == "damaged":
        max(copy.glob("state-*.manifest")).write_bytes(b"")
    again = found_in(copy)
    assert [variable.spec.id for variable in again.held()[0]] == [2]
    assert values_of(again, 2).tolist() == [10] * 3


# A death at any moment


class Deaths:
    """Copies a directory before each call that changes something there, and once after the last."""

    CALLS = ("open", "pwritev", "posix_fallocate", "ftruncate", "truncate", "unlink", "replace", "rename")

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._real = folder, {call: getattr(os, call) for call in self.CALLS}
        self.copies = dict[str, Path]()
        self.armed = False
        for call in self.CALLS:
            patch.setattr(os, call, functools.partial(self._called, call))

    def _called(self, call: str, target: Any, *rest: Any, **more: Any) -> Any:
        path = Path(os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target)
        if self.armed and path.parent == self._folder and path.name.startswith(("log", "state-")):
            self.armed = False
            self.copies[f"{len(self.copies)}, before {call} of {path.name}"] = killed(self._folder)
            self.armed = True
        return self._real[call](target, *rest, **more)


def outcomes(copies: dict[str, Path], expected: list[float]) -> list[str]:
    """Return the copies from which a server does not start, or restores something unexpected."""
    wrong = list[str]()
    for when, copy in copies.items():
        try:
            if (recovered := values_of(found_in(copy), 1).tolist()) != expected:
                wrong.append(f"{when}: {recovered}")
        except Exception as error:
            wrong.append(f"{when}: {error!r}")
    return wrong


@pytest.mark.parametrize("disk", ["good", "full"])
def test_a_death_at_any_moment_of_a_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str) -> None:
    """During a generation that is saved, or several that fail and one that is saved: no acknowledged update is lost."""
    trouble = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC)
    deaths = Deaths(tmp_path / "s", monkeypatch)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        Client(manager, held).update(dense(ps_pb2.ADD, np.ones(3)))
        deaths.armed = True
        if disk == "full":
            trouble.armed = True
            for _ in range(3):
                with pytest.raises(PsClusterError, match="No space left"):
                    manager.save()
            trouble.armed = False
        for _ in range(3):
            manager.save()
        deaths.armed = False
    assert len(deaths.copies) > 20
    assert outcomes(deaths.copies, [1] * 3) == []


def test_a_death_at_any_moment_of_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a torn tail in the log: the next restart finds the same."""
    copy, segment, values = one_by_one(tmp_path / "s")
    ends = ends_of(segment)
    segment.write_bytes(marked(segment.read_bytes(), ends[-2], 3)[: ends[-1] - 1])
    deaths = Deaths(copy, monkeypatch)
    deaths.armed = True
    with manager_of(copy) as manager:
        assert manager.restore() is not None
        deaths.armed = False
    assert len(deaths.copies) > 5
    assert outcomes(deaths.copies, values[3]) == []


def test_an_empty_segment_that_can_not_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty segment of a generation that failed does no harm."""
    disk, unlink = Trouble(monkeypatch, "pwritev", "state-", errno.ENOSPC), os.unlink
    kept = "log-x"

    def fails(path: Any, **rest: Any) -> None:
        if Path(path).name.startswith("log-") and Path(path).name > kept:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **rest)

    monkeypatch.setattr(os, "unlink", fails)
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        kept, disk.armed = max(path.name for path in (tmp_path / "s").glob("log-*")), True
        for _ in range(2):
            with pytest.raises(PsClusterError, match="No space left"):
                manager.save()
        disk.armed = False
        client.update(dense(ps_pb2.ADD, np.full(3, 10.0)))
        copy = killed(tmp_path / "s")
        kept = "log-x"
    assert values_of(found_in(copy), 1).tolist() == [11] * 3


def test_a_segment_whose_name_can_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log goes on in the one before, whose last record may be torn when the server dies."""
    with begun(tmp_path / "s", fsync=True) as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        client = Client(manager, held)
        client.update(dense(ps_pb2.ADD, np.ones(3)))
        with monkeypatch.context() as patch:
            disk = Trouble(patch, "fsync")
            sync_names = StateDirectory.sync_names

            def fails(directory: StateDirectory) -> None:
                disk.armed = True
                try:
                    sync_names(directory)
                finally:
                    disk.armed = False

            patch.setattr(StateDirectory, "sync_names", fails)
            with pytest.raises(PsClusterError, match="could not be saved: Input/output error"):
                manager.save()
        client.update(dense(ps_pb2.ADD, np.full(3, 10.0)))
        copy = killed(tmp_path / "s")
    segment = max(path for path in copy.glob("log-*") if records_of(path))
    data, end = segment.read_bytes(), ends_of(segment)[-1]
    segment.write_bytes(data[:end] + b"torn" + data[end + 4 :])
    assert values_of(found_in(copy), 1).tolist() == [11] * 3


def filled(folder: Path, identity: JobIdentity, *, updates: int, parts: int, generations: int) -> Path:
    """Return what a server leaves that dies after that many updates since its first generation, and later ones."""
    with manager_of(folder) as manager:
        assert manager.restore() is None
        held = Store(0, JOB)
        declare(held, 1, np.zeros(3))
        manager.begin(held, identity)
        until(lambda: manager._plan.saved, "the first generation is saved")
        no_more_generations(manager)
        for index in range(updates):
            Client(manager, held, 100 + index).update(*(dense(ps_pb2.ADD, np.ones(3)) for _ in range(parts)))
        for _ in range(generations):
            manager.save()
        return killed(folder)


def test_leftovers_in_a_reused_segment(tmp_path: Path) -> None:
    """Records longer than those of its new use, ending at any byte: none of the old ones comes back."""
    with begun(tmp_path / "s") as (manager, held):
        declare(held, 1, np.zeros(3))
        manager.save()
        for index, count in enumerate((20, 9, 7, 1, 3, 0, 2)):
            for at in range(count):
                update = dense(ps_pb2.ADD, np.ones(3))
                Client(manager, held, 1000 * (index + 1) + at).update(*[update] * (1 + at % 2))
            assert facts(found_in(killed(tmp_path / "s")))[1, 0, "value"] == facts(held)[1, 0, "value"]
            manager.save()


def test_a_segment_of_a_job_whose_end_was_broken_off(tmp_path: Path) -> None:
    """A server that dies while it removes a job's files: the rest of them is not part of the next job."""
    before = filled(tmp_path / "a", JobIdentity(1, 2, 1, "before"), updates=20, parts=1, generations=2)
    (tmp_path / "b").mkdir()
    shutil.copy(before / "log.spare", tmp_path / "b")  # the file that is removed last
    copy = filled(tmp_path / "b", IDENTITY, updates=1, parts=2, generations=0)
    assert values_of(found_in(copy), 1).tolist() == [2] * 3
