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
from tests.ps.storage.support import CHUNK, padded, small_blocks

from pscluster.core.transport.frames import Buffer, padding, unpack, view
from pscluster.ps.optim import rules
from pscluster.ps.server.requests import creation, reads, update_checks, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.shard import Shard, Snapshot
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.files.spill import Spill
from pscluster.v1 import ps_pb2

Values = npt.NDArray[np.float32]


class Reading:
    """A snapshot that is being read, and what it must give: the next chunk may replace the previous one."""

    def __init__(
        self, snapshot: Snapshot, expected: bytes, copy: Callable[[memoryview], bytes], blocks: int = 1
    ) -> None:
        self.snapshot = snapshot
        self.chunks = self.copied(copy, blocks)
        self.expected = expected
        self.got = b""

    def copied(self, copy: Callable[[memoryview], bytes], blocks: int) -> Iterator[bytes]:
        """Yield copies of the chunks that no other replaces."""
        before = None
        for chunk, again in self.snapshot.chunks(blocks):
            if before is not None and not again:
                yield before
            assert 0 < len(chunk) <= blocks * CHUNK
            before = copy(chunk)
        if before is not None:
            yield before


class SnapshotMachine(RuleBasedStateMachine):
    """Snapshots of one shard, read chunk by chunk in any order between updates, against copies made immediately."""

    @initialize(rows=st.integers(1, 40), width=st.integers(1, 20))
    def make(self, rows: int, width: int) -> None:
        """Create a shard whose rows are smaller or larger than a block."""
        self.patch = pytest.MonkeyPatch()
        small_blocks(self.patch)
        self.array = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
        self.shard = Shard(self.array)
        self.readings: list[Reading] = []
        self.spill = Spill(limit=2 * CHUNK)
        self.interrupt: Callable[[], None] | None = None
        self.last = 0.0

    def fresh(self, shape: tuple[int, ...]) -> Values:
        """Return values that were never there before."""
        count = int(np.prod(shape))
        self.last += count
        return np.arange(self.last, self.last + count, dtype=np.float32).reshape(shape)

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Begin a read of any range."""
        start = data.draw(st.integers(0, self.array.nbytes))
        stop = data.draw(st.integers(start, self.array.nbytes))
        expected = self.array.tobytes()[start:stop]
        self.readings.append(Reading(self.shard.snapshot(start, stop, self.spill), expected, self.copy))

    @rule(data=st.data())
    def begin_to_send(self, data: st.DataObject) -> None:
        """Begin a read of the live array."""
        start = data.draw(st.integers(0, self.array.nbytes))
        stop = data.draw(st.integers(start, self.array.nbytes))
        expected = self.array.tobytes()[start:stop]
        snapshot, blocks = self.shard.snapshot(start, stop, self.spill), data.draw(st.integers(1, 5))
        self.readings.append(Reading(snapshot, expected, self.send, blocks))

    def send(self, chunk: memoryview) -> bytes:
        """Return what the other side receives of a chunk after a while."""
        self.maybe_change()
        return bytes(chunk)

    def maybe_change(self) -> None:
        """Maybe update, while a chunk waits to be sent."""
        if self.interrupt is not None:
            change, self.interrupt = self.interrupt, None
            change()

    def copy(self, chunk: memoryview) -> bytes:
        """Copy a chunk, maybe with an update in the middle."""
        half = bytes(chunk[: len(chunk) // 2])
        self.maybe_change()
        return half + bytes(chunk[len(half) :])

    @rule()
    def interrupt_the_next_copy(self) -> None:
        """Have an update arrive while a chunk is copied."""
        self.interrupt = self.change_all

    @rule(which=st.integers(0, 9), chunks=st.integers(1, 5))
    def read_on(self, which: int, chunks: int) -> None:
        """Read some chunks."""
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
        """Stop reading."""
        if self.readings:
            reading = self.readings.pop(which % len(self.readings))
            reading.snapshot.close()
            reading.chunks = iter(())  # the call has ended

    @rule()
    def dense_update(self) -> None:
        """Change all of the shard."""
        self.change_all()

    def change_all(self) -> None:
        with self.shard.lock:
            self.shard.before_change()
            self.array[...] = self.fresh(self.array.shape)

    @rule()
    def replace(self) -> None:
        """Replace the array, unless it is being read."""
        values = self.fresh(self.array.shape)
        with self.shard.lock:
            replaced = self.shard.replace(values)
        assert replaced is not bool(self.readings)
        if replaced:
            self.array = values

    @rule(cuts=st.lists(st.integers(0, 800), max_size=5))
    def dense_update_in_spans(self, cuts: list[int]) -> None:
        """Change all of the shard, one piece after another."""
        flat, values = self.array.reshape(-1), self.fresh((self.array.size,))
        ends = sorted({min(cut, flat.size) for cut in cuts} | {0, flat.size})
        with self.shard.lock:
            for start, stop in itertools.pairwise(ends):
                self.shard.before_span_changes(start, stop)
                flat[start:stop] = values[start:stop]

    @rule(data=st.data())
    def sparse_update(self, data: st.DataObject) -> None:
        """Change some rows, some of them twice."""
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
        """Check that everything given out so far is of the moment of the snapshot."""
        for reading in getattr(self, "readings", ()):
            assert reading.expected.startswith(reading.got)

    def teardown(self) -> None:
        """Check that the rest of every read is right too, and that afterwards updates save nothing."""
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
    """Create a state with one variable of two shards, all zero, and an SGD that subtracts the gradient."""
    held = Store(0, JOB)
    spec = ps_pb2.VariableSpec(
        id=VARIABLE, name="v", dtype="float32", shape=SHAPE, owners=[0, 0], splits=[{"ends": SPLIT}, {"ends": [5]}]
    )
    request = ps_pb2.CreateRequest(job=JOB, variable=spec)
    creation.create(held, request, Payload([memoryview(bytes(creation.expected_bytes(held, request) or 0))]))
    numbers, flags = rules.SGD(learning_rate=1.0).to_spec()
    optimizer = ps_pb2.OptimizerSpec(id=OPTIMIZER, name="sgd", rule=rules.SGD.name, numbers=numbers, flags=flags)
    creation.create(held, ps_pb2.CreateRequest(job=JOB, optimizer=optimizer), Payload([]))
    return held


class Client:
    """Sends a store updates, outside of functions."""

    def __init__(self, held: Store) -> None:
        self.held = held
        self.sequence = 0

    def update(
        self, item: ps_pb2.UpdateItem, *segments: npt.NDArray[Any], payload: Payload | None = None
    ) -> ps_pb2.UpdateReply:
        """Apply an update of one item."""
        self.sequence += 1
        item.variable, item.nth, item.value_bytes = VARIABLE, 1, segments[-1].nbytes
        request = ps_pb2.UpdateRequest(
            job=JOB, incarnation=9, sequence=self.sequence, settled=self.sequence, items=[item]
        )
        total = sum(array.nbytes + padding(array.nbytes) for array in segments)
        return updates.apply(
            self.held, request, update_checks.check_update(self.held, request, total), payload or padded(*segments)
        )

    def dense(self, shard: int, kind: ps_pb2.UpdateKind, values: Values, optimizer: int = 0) -> None:
        """Update a whole shard."""
        item = ps_pb2.UpdateItem(shard=shard, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(all=True))
        self.update(item, values)

    def replace(self, shard: int, values: Values) -> None:
        """Assign a whole shard in an array of its own."""
        item = ps_pb2.UpdateItem(shard=shard, kind=ps_pb2.ASSIGN, rows=ps_pb2.Rows(all=True))
        self.update(item, values, payload=Payload([view(values)], arrays={0: values}))

    def rows(self, shard: int, kind: ps_pb2.UpdateKind, ids: list[int], values: Values, optimizer: int = 0) -> None:
        """Update rows of a shard."""
        item = ps_pb2.UpdateItem(shard=shard, kind=kind, optimizer=optimizer, rows=ps_pb2.Rows(ids=len(ids)))
        self.update(item, np.array(ids, np.int64), values)


def read_request() -> ps_pb2.ReadRequest:
    """Return a read of both shards, whole."""
    items = [ps_pb2.ReadItem(variable=VARIABLE, shard=shard, rows=ps_pb2.Rows(all=True)) for shard in range(2)]
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
        """Begin a read of both shards; each is cut into several blocks."""
        self.reads.append((reads.read(self.held, read_request(), Payload([])), [], bytearray()))

    @rule(which=st.integers(0, 9), pieces=st.integers(1, 6))
    def read_on(self, which: int, pieces: int) -> None:
        """Read some more pieces."""
        if not self.reads:
            return
        pieces_of, moments, got = read = self.reads[which % len(self.reads)]
        for _ in range(pieces):
            edge = SIZES[0] + padding(SIZES[0])
            if len(got) in (0, edge):  # a shard's moment is when its first piece is requested
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
        """Stop reading."""
        if self.reads:
            pieces_of = self.reads.pop(which % len(self.reads))[0]
            assert isinstance(pieces_of, Iterator)
            pieces_of.close()  # type: ignore[attr-defined]  # a generator; gRPC closes it so

    @rule(
        shard=st.integers(0, 1), seed=st.integers(0, 99), how=st.sampled_from(["assign", "replace", "add", "gradient"])
    )
    def dense_update(self, shard: int, seed: int, how: str) -> None:
        """Change all of a shard."""
        twin = self.twin[shard]
        values = np.random.default_rng(seed).integers(-9, 9, twin.shape).astype(np.float32)
        if how == "assign":
            self.client.dense(shard, ps_pb2.ASSIGN, values)
            twin[...] = values
        elif how == "replace":
            self.client.replace(shard, values)
            twin[...] = values
        elif how == "add":
            self.client.dense(shard, ps_pb2.ADD, values)
            twin += values
        else:
            self.client.dense(shard, ps_pb2.APPLY_GRADIENT, values, OPTIMIZER)
            twin -= values

    @rule(
        shard=st.integers(0, 1),
        ids=st.lists(st.integers(0, 3), max_size=5),
        seed=st.integers(0, 99),
        how=st.sampled_from(["add", "max", "gradient"]),
    )
    def sparse_update(self, shard: int, ids: list[int], seed: int, how: str) -> None:
        """Change rows of a shard; of duplicates the sum, or the largest, counts."""
        twin = self.twin[shard]
        values = np.random.default_rng(seed).integers(-9, 9, (len(ids), 5)).astype(np.float32)
        if how == "add":
            self.client.rows(shard, ps_pb2.ADD, ids, values)
            np.add.at(twin, ids, values)
        elif how == "max":
            self.client.rows(shard, ps_pb2.MAX, ids, values)
            np.maximum.at(twin, ids, values)
        else:
            self.client.rows(shard, ps_pb2.APPLY_GRADIENT, ids, values, OPTIMIZER)
            np.subtract.at(twin, ids, values)

    def teardown(self) -> None:
        """Check that the values are the twin's."""
        try:
            whole = b"".join(reads.read(self.held, read_request(), Payload([])))
            assert whole == b"".join(twin.tobytes() + bytes(padding(twin.nbytes)) for twin in self.twin)
        finally:
            self.patch.undo()


TestStore = StoreMachine.TestCase
TestStore.__doc__ = "A read through the store is, shard by shard, the value at one moment; the values are NumPy's."
TestStore.settings = search(60, 40)


def read_whole(held: Store, how: str) -> bytes:
    """Read both shards in pieces, or in frames of the live arrays, of one block or of four."""
    if how == "pieces":
        return b"".join(reads.read(held, read_request(), Payload([])))
    request, got, before = ps_pb2.Request(id=3, read=read_request()), bytearray(), 0
    total = reads.reply_bytes(reads.sources_of(held, request.read, 0))
    last = []
    for frame in reads.frames(held, request, Payload([]), total, (4 if how == "large frames" else 1) * CHUNK):
        reply, payload = unpack(b"".join(frame), ps_pb2.Reply)
        if reply.again:
            del got[before:]
        before = len(got)
        got += payload
        last.append(reply.last)
    assert last[-1]
    assert len(got) == total
    return bytes(got)


@pytest.mark.parametrize("how", ["pieces", "frames", "large frames"])
def test_a_read_under_real_threads_is_of_one_moment(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While threads add 1 to every element, no read sees an addition half done."""
    small_blocks(monkeypatch)
    held = new_store()
    additions, readers = 300, 3
    over = threading.Event()
    seen: list[list[int]] = [[] for _ in range(readers)]
    wrong: list[bytes] = []

    def read(mine: list[int]) -> None:
        while not over.is_set():
            whole = read_whole(held, how)
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
        for index, rows in enumerate((6, 4)):
            client.dense(index, ps_pb2.ADD, np.ones((rows, 5), np.float32))
    over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(mine == sorted(mine) for mine in seen), "a later read is not of an earlier moment"
    final = np.frombuffer(read_whole(held, how)[: SIZES[0]], np.float32)
    assert final.tolist() == [additions] * 30
