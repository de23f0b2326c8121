"""Captures: a shard as it was at one moment, whatever changes while it is read."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from tests.conftest import search
from tests.ps.storage.support import CHUNK, JOB, Client, declare, declare_rule, dense, rows, small_blocks

from pscluster.ps.server.state.shard import Shard, Snapshot, blocks_of_rows
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.files.spill import Spill
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

DTYPES = [np.dtype(name) for name in ("float32", "float64", "int8", "complex128", "float16", "bool")]
DTYPES.append(np.dtype(ml_dtypes.bfloat16))

SHAPES = st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 12)),
    st.tuples(st.integers(1, 90)),
    st.sampled_from([(), (0, 3), (3, 0), (1, 1, 1), (2, 200)]),
)


class Reading:
    """A capture that is being read, and what it must give."""

    def __init__(self, shard: Shard, spill: Spill | None = None) -> None:
        with shard.lock:
            self.expected = {name: array.tobytes() for name, array in shard.arrays().items()}
            self.capture = shard.capture(spill or Spill())
        self.blocks = ((name, block) for name, array in self.capture.items() for block in array)
        self.got = dict.fromkeys(self.expected, b"")

    def read_on(self) -> bool:
        """Read a block, and check it; return False at the end."""
        name, block = next(self.blocks, ("", b""))
        if not name:
            return False
        assert len(self.got[name]) % CHUNK == 0
        assert 0 < len(block) <= CHUNK
        self.got[name] += block
        assert self.expected[name].startswith(self.got[name]), "a block of another moment"
        return True

    def close(self) -> None:
        """Stop reading."""
        for array in self.capture.values():
            array.close()


class CaptureMachine(RuleBasedStateMachine):
    """Captures of one shard, read block by block between updates of all kinds."""

    @initialize(shape=SHAPES, dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4))
    def make(self, shape: tuple[int, ...], dtypes: list[np.dtype[Any]]) -> None:
        """Create a shard with slots and averages whose rows are smaller or larger than a block."""
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch)
        self.random = np.random.default_rng(math.prod(shape))
        self.shard = Shard(self.fresh(shape, dtypes[0]))
        self.shard.slots = {3: {"m": self.fresh(shape, dtypes[1]), "v": self.fresh(shape, dtypes[2])}}
        self.shard.averages = {4: self.fresh(shape, dtypes[3])}
        self.readings = list[Reading]()
        self.spill = Spill(limit=3 * CHUNK)

    def fresh(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return random values."""
        if dtype.kind == "b":
            return self.random.integers(0, 2, shape).astype(np.bool_)
        noise = self.random.integers(0, 256, (math.prod(shape) * dtype.itemsize,)).astype(np.uint8)
        return noise.view(dtype).reshape(shape)

    @rule()
    def begin(self) -> None:
        """Begin another capture."""
        self.readings.append(Reading(self.shard, self.spill))

    @rule(which=st.integers(0, 9), blocks=st.integers(1, 5))
    def read_on(self, which: int, blocks: int) -> None:
        """Read some blocks."""
        if not self.readings:
            return
        reading = self.readings[which % len(self.readings)]
        for _ in range(blocks):
            if not reading.read_on():
                self.end(reading)
                return

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        """Stop reading, as on a full disk."""
        if self.readings:
            self.readings.pop(which % len(self.readings)).close()

    @rule()
    def dense_update(self) -> None:
        """Change all of it."""
        with self.shard.lock:
            self.shard.before_change()
            for array in self.shard.arrays().values():
                array[...] = self.fresh(array.shape, array.dtype)

    @rule()
    def replace(self) -> None:
        """Replace the array, unless it is captured."""
        with self.shard.lock:
            before = self.shard.array
            replaced = self.shard.replace(self.fresh(before.shape, before.dtype))
            assert replaced is not bool(self.readings)
            assert replaced is (self.shard.array is not before)

    @rule(data=st.data())
    def sparse_update(self, data: st.DataObject) -> None:
        """Change rows over one or two leading axes, in the values, the slots and the averages."""
        shape = self.shard.array.shape
        leading = data.draw(st.integers(1, 2))
        if len(shape) < leading or not math.prod(shape):
            return
        count = math.prod(shape[:leading])
        ids = np.array(data.draw(st.lists(st.integers(0, count - 1), max_size=5)), np.int64)
        with self.shard.lock:
            self.shard.before_rows_change(ids, leading)
            for array in self.shard.arrays().values():
                table = array.reshape(count, math.prod(shape[leading:]))
                table[ids] = self.fresh((len(ids), table.shape[1]), array.dtype)

    @rule(optimizer=st.integers(5, 6))
    def first_gradient(self, optimizer: int) -> None:
        """Add the arrays of another optimizer."""
        with self.shard.lock:
            self.shard.slots.setdefault(optimizer, {"m": self.fresh(self.shard.array.shape, np.dtype(np.float32))})

    def end(self, reading: Reading) -> None:
        assert reading.got == reading.expected
        reading.close()
        self.readings.remove(reading)

    def teardown(self) -> None:
        """Check that the rest of every capture is right too, and that afterwards updates save nothing."""
        if not hasattr(self, "patch"):
            return
        try:
            for reading in list(self.readings):
                while reading.read_on():
                    pass
                self.end(reading)
            assert (self.spill.in_memory, self.spill.spilled) == (0, 0)
            self.patch.setattr(Snapshot, "save", None)
            self.dense_update()
        finally:
            self.patch.undo()


TestCapture = CaptureMachine.TestCase
TestCapture.__doc__ = "Whatever comes between its blocks, a capture gives all arrays as they were at one moment."
TestCapture.settings = search(75, 40)


class Interrupted:
    """The bytes of a snapshot, with an event in the middle of their copy."""

    def __init__(self, data: memoryview, happens: Any) -> None:
        self.data, self.happens = data, happens

    def __getitem__(self, where: slice) -> memoryview:
        if self.happens is not None:
            happens, self.happens = self.happens, None
            happens()
        return self.data[where]


def test_an_update_in_the_middle_of_a_block_s_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that the update saved count, not the copy that was being made."""
    small_blocks(monkeypatch)
    shard = Shard(np.zeros((8, 8), np.float32))

    def change() -> None:
        with shard.lock:
            shard.before_change()
            shard.array[...] = 1

    with shard.lock:
        values = shard.capture(Spill())["value"]
    monkeypatch.setattr(values, "_bytes", Interrupted(values._bytes, change))
    assert b"".join(values) == bytes(8 * 8 * 4)
    assert shard.array.all()


@pytest.mark.parametrize(("how", "leading"), [("assign", 1), ("assign", 2), ("gradient", 1)])
def test_updates_through_the_store(monkeypatch: pytest.MonkeyPatch, how: str, leading: int) -> None:
    """The store saves old bytes of all that it changes: the values, the slots and the averages."""
    small_blocks(monkeypatch)
    held, manager = Store(0, JOB), StateManager(DurabilityOptions())
    declare(held, 1, np.arange(6 * 4 * 5, dtype=np.float32).reshape(6, 4, 5))
    declare_rule(held, 2, "adam", learning_rate=0.5, ema=0.5)
    client, random = Client(manager, held), np.random.default_rng(5)
    client.update(dense(ps_pb2.APPLY_GRADIENT, np.ones((6, 4, 5), np.float32), optimizer=2))
    shard = held.held()[0][0].shards[0]
    assert sorted(shard.arrays()) == ["average/2", "slot/2/m", "slot/2/v", "value"]
    for _ in range(5):
        reading = Reading(shard)
        while reading.read_on():
            width = 5 if leading == 2 else 20
            ids = random.integers(0, 24 if leading == 2 else 6, 3).tolist()
            values = random.normal(size=(3, width)).astype(np.float32)
            kind = ps_pb2.ASSIGN if how == "assign" else ps_pb2.APPLY_GRADIENT
            client.update(rows(kind, ids, values, optimizer=2 if how == "gradient" else 0, leading=leading))
        assert reading.got == reading.expected
        reading.close()


def test_rows_larger_than_a_mebibyte() -> None:
    """With blocks of the real size: a row of several, whose neighbours share its first and last."""
    shard = Shard(np.arange(3 * 300_000, dtype=np.float64).reshape(3, 300_000))
    with shard.lock:
        before, values = shard.array.tobytes(), shard.capture(Spill())["value"]
    got = b""
    for index, block in enumerate(values):
        got += block
        if index in (0, 2, 4):
            with shard.lock:
                shard.before_rows_change(np.array([index // 2]))
                shard.array[index // 2] = -1
    assert got == before
    assert (shard.array == -1).all()


def test_blocks_of_rows() -> None:
    """Every block that contains a byte of these rows, and no other."""
    size = 1 << 20
    assert blocks_of_rows(np.array([], np.int64), 10) == set()
    assert blocks_of_rows(np.array([0, 1]), size) == {0, 1}
    assert blocks_of_rows(np.array([1]), size - 1) == {0, 1}
    assert blocks_of_rows(np.array([2]), 3 * size + 1) == {6, 7, 8, 9}


@pytest.mark.parametrize("shape", [(3, 0, 4), (0, 3, 4), (3, 4, 0)])
def test_no_rows_of_an_empty_shard(shape: tuple[int, ...]) -> None:
    """An update of none of no rows works during a capture as it does otherwise."""
    held, manager = Store(0, JOB), StateManager(DurabilityOptions())
    declare(held, 1, np.zeros(shape, np.float32))
    client, shard = Client(manager, held), held.held()[0][0].shards[0]
    none = rows(ps_pb2.ASSIGN, [], np.zeros((0, shape[2]), np.float32), leading=2)
    client.update(none)
    with shard.lock:
        values = shard.capture(Spill())["value"]
    client.update(none)
    assert list(values) == []
    values.close()
