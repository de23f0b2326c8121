"""A table by id is cut into any number of shards, by the servers' own code: each row goes along, with all beside it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from pscluster.coordinator.moves.reshard import merged
from pscluster.coordinator.moves.table_cut import check_bytes, copy_rows, copy_seen, counted, partition_of_table
from pscluster.core.errors import InvalidUpdateError, ProtocolError
from pscluster.ps.client.placement.reshard_steps import ReshardSteps
from pscluster.ps.optim.rules import Adagrad
from pscluster.ps.server.embedding.table_policy import CountMinSketch, ages
from pscluster.ps.server.embedding.tables import new_array, rows_of, space_of
from pscluster.ps.server.resharding import Resharding
from pscluster.ps.server.state.directory import HeldOptimizer, HeldVariable
from pscluster.ps.server.state.shard import Shard
from pscluster.ps.server.state.store import Store
from pscluster.ps.spec import partition_of
from pscluster.ps.table_policies import SeenTimes, Unused
from pscluster.ps.tables import TAIL, row_limit, shards_before, shards_of, tails_of
from pscluster.v1 import ps_pb2

JOB, DIM, ROWS, ADAGRAD = 7, 2, 500, 3
IDS = np.arange(ROWS) * 7919 - 1_000_000
MOVE = ps_pb2.MoveRequest
Floats = npt.NDArray[np.float32]


class Steps:
    """What a coordinator asks of servers: here of one, which has all shards."""

    def __init__(self, shards: int) -> None:
        self.store = Store(0, JOB)
        self.resharding = Resharding(cast(Any, None))
        self.old = spec_of(1, "t", [0] * shards)
        held = HeldVariable(self.old, np.dtype(np.float32), partition_of(self.old), {})
        where, rng = shards_of(IDS, shards), np.random.default_rng(1)
        for index in range(shards):
            ids = IDS[where == index]
            limit = row_limit(self.old, held.partition, index)
            shard = held.shards[index] = Shard(new_array(0, limit, DIM + TAIL), 10 * index, limit)
            rows = rows_of(shard, DIM)
            shard.grow(len(ids), lambda _: {})
            rows.attach(space_of(shard))
            rows.append(ids, rng.normal(size=(len(ids), DIM)).astype(np.float32), (10 * index << 32) + index + 1)
            if index % 2 == 0:
                slot = np.full((len(ids), DIM), index + 2, np.float32)
                shard.put({f"slot/{ADAGRAD}/accumulator": slot, f"average/{ADAGRAD}": slot + 1})
            shard.sightings = CountMinSketch()
            shard.sightings.add(ids)
        self.store.directory.restore([held], {})
        self.store.put_optimizer(HeldOptimizer(ps_pb2.OptimizerSpec(id=ADAGRAD, name="adagrad"), Adagrad()))

    def ask(self, payload: bytes = b"", **about: Any) -> tuple[ps_pb2.MoveReply, Any]:
        request = MOVE(job=JOB, id=9, variable=1, **about)
        return self.resharding.handle(self.store, request, memoryview(payload))

    def count(self, _server: int, shard: int, num_shards: int) -> tuple[list[int], list[str]]:
        reply, _ = self.ask(action=MOVE.COUNT, shard=shard, num_shards=num_shards)
        return list(reply.rows), list(reply.state.arrays)

    def take(self, _server: int, shard: int, array: str, first: int, rows: int, nbytes: int, updates: int) -> bytes:
        state = ps_pb2.ShardState(rows=rows, updates=updates)
        _, buffers = self.ask(action=MOVE.TAKE, shard=shard, arrays=[array], start=first, state=state)
        data = b"".join(map(bytes, buffers))
        assert len(data) == nbytes
        return data

    def fill(
        self, _server: int, shard: int, array: str, start: int, data: memoryview, _itemsize: int, *, seen: int = 0
    ) -> None:
        about = {"arrays": [array], "start": start, "state": ps_pb2.ShardState(seen=seen)}
        for _ in range(2):  # an answer may be lost
            self.ask(bytes(data), action=MOVE.FILL, shard=shard, **about)

    def rows(self, variable: int, array: str) -> tuple[npt.NDArray[Any], Floats]:
        """All rows of a variable, by rising id."""
        shards = [shard for _, shard in sorted(self.store.directory.variables[variable].shards.items())]
        ids = np.concatenate([tails_of(cast(Floats, shard.array), DIM)[0] for shard in shards])
        found_by = [shard.arrays().get(array, np.full((len(shard.array), DIM), np.nan)) for shard in shards]
        found = np.concatenate([np.asarray(each, np.float32) for each in found_by])
        return np.sort(ids), found[np.argsort(ids)]


def spec_of(number: int, name: str, owners: list[int], rows: int = 1 << 20) -> ps_pb2.VariableSpec:
    spec = ps_pb2.VariableSpec(id=number, name=name, dtype="float32", owners=owners, asynchronous=True)
    spec.shape.extend((len(owners) * rows, DIM + TAIL))
    spec.splits.add(ends=[rows * (n + 1) for n in range(len(owners))])
    spec.splits.add(ends=[DIM + TAIL])
    spec.table.dim, spec.table.initializer = DIM, "zeros"
    spec.table.admission.CopyFrom(SeenTimes(2).message())
    spec.table.eviction.CopyFrom(Unused(steps=9).message())
    return spec


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (3, 5), (5, 3), (4, 1), (2, 8)])
def test_rows_take_along_what_is_beside_them(before: int, after: int) -> None:
    """Values, slots, averages, ages, frequencies, and how often ids without a row were seen."""
    steps = Steps(before)
    driver = cast(ReshardSteps, steps)
    sizes, row_bytes = counted(driver, steps.old, after)
    assert (sum(sizes), row_bytes) == (ROWS, 4 * (DIM + TAIL) + 2 * 4 * DIM)
    np.testing.assert_array_equal(sizes, np.bincount(shards_of(IDS, after), minlength=after))
    assert partition_of_table(steps.old, sizes).shape == (after << 20, DIM + TAIL)
    final = spec_of(5, "t", [0] * after)
    final.origin = 1
    made = ps_pb2.VariableSpec()
    made.CopyFrom(final)
    made.name, made.evaluation = "pscluster/cut/5/t", 6
    steps.ask(action=MOVE.MAKE, spec=made)
    captured = [steps.ask(action=MOVE.CAPTURE, shard=shard)[0].state for shard in range(before)]
    state = merged(captured)
    old_ids, old = steps.rows(1, "value")
    slots, averages = (steps.rows(1, kind)[1] for kind in (f"slot/{ADAGRAD}/accumulator", f"average/{ADAGRAD}"))
    copied = copy_rows(driver, steps.old, final, captured, state.updates)
    copy_seen(driver, steps.old, final, captured)

    ids, new = steps.rows(5, "value")
    np.testing.assert_array_equal(ids, old_ids)
    np.testing.assert_array_equal(new[:, :DIM], old[:, :DIM])
    has_slot = shards_of(old_ids, before) % 2 == 0
    assert copied == new.nbytes + (2 * has_slot.sum() + (~has_slot).sum()) * 4 * DIM
    expected = np.where(has_slot[:, None], slots, np.float32(0.1))
    found = steps.rows(5, f"slot/{ADAGRAD}/accumulator")[1]
    np.testing.assert_array_equal(np.where(np.isnan(found), np.float32(0.1), found), expected)
    expected = np.where(has_slot[:, None], averages, new[:, :DIM])
    np.testing.assert_array_equal(steps.rows(5, f"average/{ADAGRAD}")[1], expected)
    uses = tails_of(new, DIM)[1]
    assert not ages(uses, state.updates).any(), "all were used at the last update of their shard"
    np.testing.assert_array_equal(uses & np.uint64(0xFFFF_FFFF), shards_of(old_ids, before) + 1)
    for index, shard in steps.store.directory.variables[5].shards.items():
        assert shard.sightings is not None
        assert (shard.sightings.add(IDS[shards_of(IDS, after) == index]) >= 2).all()
        others = {n for n in range(before) if n not in shards_before(index, after, before)}
        assert others.isdisjoint(shards_of(IDS[shards_of(IDS, after) == index], before).tolist())


def test_a_full_table_has_room_for_the_rows_that_there_are() -> None:
    """Its capacity decides, unless a hash has given a shard more."""
    old = spec_of(1, "t", [0, 0])
    old.table.capacity = 1000
    assert partition_of_table(old, [300] * 4).shape[0] == 4 * 345
    assert partition_of_table(old, [300, 400, 300, 300]).shape[0] == 4 * 400
    final = spec_of(5, "t", [0, 1, 0])
    row = 3 * 4 * (DIM + TAIL)
    final.table.max_bytes = 1000 * row
    check_bytes(final, [550, 900, 550], row)
    with pytest.raises(InvalidUpdateError, match="in 3 shards ps 0 would hold 115,200 bytes of it"):
        check_bytes(final, [800, 400, 800], row)


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ({"action": MOVE.COUNT}, "by id into 0 shards"),
        ({"action": MOVE.COUNT, "num_shards": 1 << 20}, "by id into 1,048,576 shards"),
        ({"action": MOVE.TAKE, "arrays": ["slot/3/m"]}, "no array 'slot/3/m' to be cut"),
        ({"action": MOVE.TAKE, "arrays": ["value"], "state": ps_pb2.ShardState(rows=ROWS)}, "500 rows from row 0 of a"),
        ({"action": MOVE.FILL, "arrays": ["value"]}, "2 elements from element 0, which are not rows of"),
        ({"action": MOVE.FILL, "arrays": ["value"], "start": 60}, "2 elements from element 60, which are no"),
        ({"action": MOVE.FILL, "arrays": ["seen"]}, "8 bytes of counts of ids, after 0 sightings"),
    ],
)
def test_what_a_server_refuses(about: dict[str, Any], sentence: str) -> None:
    steps = Steps(2)
    made = spec_of(5, "pscluster/cut/5/t", [0] * 4)
    made.evaluation, made.origin = 6, 1
    steps.ask(action=MOVE.MAKE, spec=made)
    with pytest.raises(ProtocolError, match=sentence):
        steps.ask(b"8 bytes!" if about["action"] == MOVE.FILL else b"", **about)
    assert not any(len(shard.array) for shard in steps.store.directory.variables[5].shards.values())
