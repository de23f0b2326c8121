"""Reads that updates do not wait for: a snapshot is the value at one moment, whatever happens meanwhile."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.conftest import search

from pscluster.core.transport.frames import Buffer, padding, view
from pscluster.ps import optim
from pscluster.ps.server import creation, reads, shard, updates
from pscluster.ps.server.payload import Payload
from pscluster.ps.server.shard import Shard, Snapshot
from pscluster.ps.server.store import Store
from pscluster.ps.storage.spill import Spill
from pscluster.v1 import ps_pb2

CHUNK = 32
"""Bytes of a block in these tests, so that a few rows make many blocks."""

Values = npt.NDArray[np.float32]


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Cut reads into blocks of `CHUNK` bytes."""
    patch.setattr(shard, "CHUNK_BYTES", CHUNK)
    patch.setattr(reads, "CHUNK_BYTES", CHUNK)


class Reading:
    """A snapshot under way, and what it must give."""

    def __init__(self, snapshot: Snapshot, expected: bytes, copy: Callable[[memoryview], bytes]) -> None:
        self.snapshot = snapshot
        self.chunks: Iterator[bytes] = (chunk for chunk, _ in snapshot.packed(copy))
        self.expected = expected
        self.got = b""


class Sending(Reading):
    """The same as it is sent: each chunk may be looked at until the next is asked for, and may come again then."""

    def __init__(self, snapshot: Snapshot, expected: bytes, waits: Callable[[], None], blocks: int) -> None:
        super().__init__(snapshot, expected, bytes)
        self.waits = waits  # while the network is slow
        self.blocks = blocks
        self.chunks = self.sent()

    def sent(self) -> Iterator[bytes]:
        """What the other side has of each chunk once no other comes in its place."""
        before = None
        chunks = self.snapshot.chunks(self.blocks)
        while (following := next(chunks, None)) is not None:
            chunk, again = following
            if before is not None and not again:
                yield before
            assert 0 < len(chunk) <= self.blocks * CHUNK
            self.waits()
            before = bytes(chunk)
        if before is not None:
            yield before


class SnapshotMachine(RuleBasedStateMachine):
    """Snapshots of one shard, read chunk by chunk in any order between updates, against copies made at once."""

    @initialize(rows=st.integers(1, 40), width=st.integers(1, 20))
    def make(self, rows: int, width: int) -> None:
        """A shard whose rows are smaller or larger than a block."""
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch)
        self.array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
        self.shard = Shard(self.array)
        self.readings: list[Reading] = []
        self.spill = Spill(limit=2 * CHUNK)
        self.interrupt: Callable[[], None] | None = None
        self.last = 0.0

    def fresh(self, shape: tuple[int, ...]) -> Values:
        """Values that were never there before."""
        count = int(np.prod(shape))
        self.last += count
        return np.arange(self.last, self.last + count, dtype=np.float32).reshape(shape)

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A read of any range begins."""
        start = data.draw(st.integers(0, self.array.nbytes))
        stop = data.draw(st.integers(start, self.array.nbytes))
        expected = self.array.tobytes()[start:stop]
        self.readings.append(Reading(self.shard.snapshot(start, stop, self.spill), expected, self.copy))

    @rule(data=st.data())
    def begin_to_send(self, data: st.DataObject) -> None:
        """The same, of the live array."""
        start = data.draw(st.integers(0, self.array.nbytes))
        stop = data.draw(st.integers(start, self.array.nbytes))
        expected = self.array.tobytes()[start:stop]
        snapshot, blocks = self.shard.snapshot(start, stop, self.spill), data.draw(st.integers(1, 5))
        self.readings.append(Sending(snapshot, expected, self.maybe_change, blocks))

    def maybe_change(self) -> None:
        """While a chunk waits to be sent an update may come."""
        if self.interrupt is not None:
            change, self.interrupt = self.interrupt, None
            change()

    def copy(self, chunk: memoryview) -> bytes:
        """A copy of a chunk, in the middle of which an update may come."""
        half = bytes(chunk[: len(chunk) // 2])
        self.maybe_change()
        return half + bytes(chunk[len(half) :])

    @rule()
    def interrupt_the_next_copy(self) -> None:
        """An update will come while a chunk is copied."""
        self.interrupt = self.change_all

    @rule(which=st.integers(0, 9), chunks=st.integers(1, 5))
    def read_on(self, which: int, chunks: int) -> None:
        """The network takes some more of a read."""
        if not self.readings:
            return
        reading = self.readings[which % len(self.readings)]
        for _ in range(chunks):
            chunk = next(reading.chunks, None)
            if chunk is None:
                self.end(reading)
                return
            assert len(chunk)
            reading.got += chunk

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        """A reader goes away in the middle."""
        if self.readings:
            reading = self.readings.pop(which % len(self.readings))
            reading.snapshot.close()
            reading.chunks = iter(())  # the call has ended

    @rule()
    def dense_update(self) -> None:
        """All of the shard changes."""
        self.change_all()

    def change_all(self) -> None:
        with self.shard.lock:
            self.shard.before_change()
            self.array[...] = self.fresh(self.array.shape)

    @rule()
    def replace(self) -> None:
        """Another array takes the place of the one that there is, unless that is being read."""
        values = self.fresh(self.array.shape)
        with self.shard.lock:
            replaced = self.shard.replace(values)
        assert replaced is not bool(self.readings)
        if replaced:
            self.array = values

    @rule(cuts=st.lists(st.integers(0, 800), max_size=5))
    def dense_update_in_spans(self, cuts: list[int]) -> None:
        """All of the shard changes, a piece after the other."""
        flat, values = self.array.reshape(-1), self.fresh((self.array.size,))
        ends = sorted({min(cut, flat.size) for cut in cuts} | {0, flat.size})
        with self.shard.lock:
            for start, stop in itertools.pairwise(ends):
                self.shard.before_span_changes(start, stop)
                flat[start:stop] = values[start:stop]

    @rule(data=st.data())
    def sparse_update(self, data: st.DataObject) -> None:
        """Some rows change, some of them twice."""
        rows = data.draw(st.lists(st.integers(0, len(self.array) - 1), max_size=6))
        ids = np.array(rows, np.int64)
        with self.shard.lock:
            self.shard.before_rows_change(ids)
            self.array[ids] = self.fresh((len(ids), self.array.shape[1]))

    def read_to_the_end(self, reading: Reading) -> None:
        reading.got += b"".join(reading.chunks)
        self.end(reading)

    def end(self, reading: Reading) -> None:
        assert reading.got == reading.expected
        reading.snapshot.close()
        self.readings.remove(reading)

    @invariant()
    def what_came_is_of_the_moment(self) -> None:
        """Everything given out so far is what stood there when the snapshot was made."""
        for reading in getattr(self, "readings", ()):
            assert reading.expected.startswith(reading.got)

    def teardown(self) -> None:
        """The rest of every read is right too, and afterwards no update does anything for a snapshot."""
        if not hasattr(self, "patch"):
            return
        try:
            while self.readings:
                self.read_to_the_end(self.readings[0])
            assert (self.spill.in_memory, self.spill.spilled) == (0, 0)
            self.patch.setattr(Snapshot, "save", None)
            self.dense_update()
        finally:
            self.patch.undo()


TestSnapshot = SnapshotMachine.TestCase
TestSnapshot.__doc__ = "Whatever updates come between its chunks, a snapshot gives the value at one moment."
TestSnapshot.settings = search(80, 40)


JOB = 7
VARIABLE, OPTIMIZER = 1, 2
SHAPE = (10, 5)
SPLIT = (6, 10)  # two shards, of 6 and of 4 rows


def new_store() -> Store:
    """A server's state with one variable of two shards, all zero, and an SGD that subtracts the gradient."""
    held = Store(0, JOB)
    spec = ps_pb2.VariableSpec(
        id=VARIABLE, name="v", dtype="float32", shape=SHAPE, owners=[0, 0], splits=[{"ends": SPLIT}, {"ends": [5]}]
    )
    request = ps_pb2.CreateRequest(job=JOB, variable=spec)
    creation.create(held, request, Payload([memoryview(bytes(creation.expected_bytes(held, request) or 0))]))
    numbers, flags = optim.SGD(learning_rate=1.0).to_spec()
    optimizer = ps_pb2.OptimizerSpec(id=OPTIMIZER, name="sgd", rule=optim.SGD.name, numbers=numbers, flags=flags)
    creation.create(held, ps_pb2.CreateRequest(job=JOB, optimizer=optimizer), Payload([]))
    return held


def padded(*arrays: npt.NDArray[Any]) -> Payload:
    """A payload with these segments."""
    pieces = [piece for array in arrays for piece in (bytes(view(array)), bytes(padding(array.nbytes)))]
    return Payload([memoryview(b"".join(pieces))])


class Client:
    """Sends a store updates as a client without a function does."""

    def __init__(self, held: Store) -> None:
        self.held = held
        self.sequence = 0

    def update(
        self, item: ps_pb2.UpdateItem, *segments: npt.NDArray[Any], payload: Payload | None = None
    ) -> ps_pb2.UpdateReply:
        """One item."""
        self.sequence += 1
        item.variable, item.nth, item.value_bytes = VARIABLE, 1, segments[-1].nbytes
        request = ps_pb2.UpdateRequest(
            job=JOB, incarnation=9, sequence=self.sequence, settled=self.sequence, items=[item]
        )
        total = sum(array.nbytes + padding(array.nbytes) for array in segments)
        return updates.apply(
            self.held, request, updates.check_update(self.held, request, total), payload or padded(*segments)
        )

    def dense(self, number: int, kind: ps_pb2.UpdateKind, values: Values, optimizer: int = 0) -> None:
        """An update of a whole shard."""
        item = ps_pb2.UpdateItem(shard=number, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(all=True))
        self.update(item, values)

    def replace(self, number: int, values: Values) -> None:
        """An array for a whole shard."""
        item = ps_pb2.UpdateItem(shard=number, kind=ps_pb2.ASSIGN, rows=ps_pb2.Rows(all=True))
        self.update(item, values, payload=Payload([view(values)], arrays={0: values}))

    def rows(self, number: int, kind: ps_pb2.UpdateKind, ids: list[int], values: Values, optimizer: int = 0) -> None:
        """An update of rows of a shard."""
        item = ps_pb2.UpdateItem(shard=number, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(ids=len(ids)))
        self.update(item, np.array(ids, np.int64), values)


def read_request() -> ps_pb2.ReadRequest:
    """Both shards, whole."""
    items = [ps_pb2.ReadItem(variable=VARIABLE, shard=number, rows=ps_pb2.Rows(all=True)) for number in range(2)]
    return ps_pb2.ReadRequest(job=JOB, items=items)


SIZES = [6 * 5 * 4, 4 * 5 * 4]


class StoreMachine(RuleBasedStateMachine):
    """Reads of a store, taken piece by piece between updates of every kind, against NumPy on a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch)
        self.held = new_store()
        self.client = Client(self.held)
        self.twin = [np.zeros((6, 5), np.float32), np.zeros((4, 5), np.float32)]
        self.reads: list[tuple[Iterator[Buffer], list[bytes], bytearray]] = []

    @rule()
    def begin(self) -> None:
        """A read of both shards begins; each is cut into several blocks."""
        self.reads.append((reads.read(self.held, read_request(), Payload([])), [], bytearray()))

    @rule(which=st.integers(0, 9), pieces=st.integers(1, 6))
    def read_on(self, which: int, pieces: int) -> None:
        """Some more pieces of a read are taken."""
        if not self.reads:
            return
        pieces_of, moments, got = read = self.reads[which % len(self.reads)]
        for _ in range(pieces):
            edge = SIZES[0] + padding(SIZES[0])
            if len(got) in (0, edge):  # a shard's moment is when its first piece is asked for
                moments.append(self.twin[len(moments)].tobytes())
            piece = next(pieces_of, None)
            if piece is None:
                self.reads.remove(read)
                assert len(got) == sum(size + padding(size) for size in SIZES)
                return
            got += piece
            expected = b"".join(moment + bytes(padding(len(moment))) for moment in moments)
            assert expected.startswith(bytes(got))

    @rule(which=st.integers(0, 9))
    def give_up(self, which: int) -> None:
        """A reader goes away."""
        if self.reads:
            pieces_of = self.reads.pop(which % len(self.reads))[0]
            assert isinstance(pieces_of, Iterator)
            pieces_of.close()  # type: ignore[attr-defined]  # a generator; gRPC closes it so

    @rule(
        number=st.integers(0, 1), seed=st.integers(0, 99), how=st.sampled_from(["assign", "replace", "add", "gradient"])
    )
    def dense_update(self, number: int, seed: int, how: str) -> None:
        """All of a shard changes."""
        twin = self.twin[number]
        values = np.random.default_rng(seed).integers(-9, 9, twin.shape).astype(np.float32)
        if how == "assign":
            self.client.dense(number, ps_pb2.ASSIGN, values)
            twin[...] = values
        elif how == "replace":
            self.client.replace(number, values)
            twin[...] = values
        elif how == "add":
            self.client.dense(number, ps_pb2.ADD, values)
            twin += values
        else:
            self.client.dense(number, ps_pb2.APPLY_GRADIENT, values, OPTIMIZER)
            twin -= values

    @rule(
        number=st.integers(0, 1),
        ids=st.lists(st.integers(0, 3), max_size=5),
        seed=st.integers(0, 99),
        how=st.sampled_from(["add", "max", "gradient"]),
    )
    def sparse_update(self, number: int, ids: list[int], seed: int, how: str) -> None:
        """Rows of a shard change; of duplicates the sum, or the largest, counts."""
        twin = self.twin[number]
        values = np.random.default_rng(seed).integers(-9, 9, (len(ids), 5)).astype(np.float32)
        if how == "add":
            self.client.rows(number, ps_pb2.ADD, ids, values)
            np.add.at(twin, ids, values)
        elif how == "max":
            self.client.rows(number, ps_pb2.MAX, ids, values)
            np.maximum.at(twin, ids, values)
        else:
            self.client.rows(number, ps_pb2.APPLY_GRADIENT, ids, values, OPTIMIZER)
            np.subtract.at(twin, ids, values)

    def teardown(self) -> None:
        """The values are the twin's."""
        try:
            whole = b"".join(reads.read(self.held, read_request(), Payload([])))
            assert whole == b"".join(twin.tobytes() + bytes(padding(twin.nbytes)) for twin in self.twin)
        finally:
            self.patch.undo()


TestStore = StoreMachine.TestCase
TestStore.__doc__ = "A read through the store is, shard by shard, the value at one moment; the values are NumPy's."
TestStore.settings = search(60, 40)


def test_a_read_under_real_threads_is_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """While threads add 1 to every element, no read sees an addition half done."""
    small_blocks(monkeypatch)
    held = new_store()
    additions, readers = 300, 3
    over = threading.Event()
    seen: list[list[int]] = [[] for _ in range(readers)]
    wrong: list[bytes] = []

    def read(mine: list[int]) -> None:
        while not over.is_set():
            whole = b"".join(reads.read(held, read_request(), Payload([])))
            for start, size in ((0, SIZES[0]), (SIZES[0] + padding(SIZES[0]), SIZES[1])):
                values = np.frombuffer(whole[start : start + size], np.float32)
                if len(set(values.tolist())) != 1:
                    wrong.append(whole)
            mine.append(int(values[0]))

    threads = [threading.Thread(target=read, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    client = Client(held)
    for _ in range(additions):
        for number, rows in enumerate((6, 4)):
            client.dense(number, ps_pb2.ADD, np.ones((rows, 5), np.float32))
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(mine == sorted(mine) for mine in seen), "a later read is not of an earlier moment"
    final = np.frombuffer(b"".join(reads.read(held, read_request(), Payload([])))[: SIZES[0]], np.float32)
    assert final.tolist() == [additions] * 30
