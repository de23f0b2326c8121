"""Error feedback: what was pushed and what is kept add up, whatever happens to the pushes."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pscluster.core.errors import InvalidUpdateError
from pscluster.core.geometry.partition import Partition
from pscluster.core.geometry.row_orders import RowOrder
from pscluster.ps.client.placement.cuts import Cut
from pscluster.ps.client.updates.residuals import Push, Residuals
from pscluster.ps.client.updates.row_places import ById
from pscluster.ps.client.updates.shard_update import Encoding, ShardUpdate
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.wire_dtypes import CODES, decode
from pscluster.v1 import ps_pb2

WIDTH, ROWS = 4, 16


def gradient(
    name: str,
    values: Any,
    ids: Any = None,
    *,
    top_k: float = 0,
    shard: int = 0,
    start: int = 0,
    shape: Any = None,
    by_id: bool = False,
) -> ShardUpdate:
    """The update by a gradient of a shard, of a table unless another shape is given; `by_id`: of any ids."""
    values = np.ascontiguousarray(values, np.float32)
    ids = None if ids is None else np.asarray(ids, np.int64)
    shape = shape or ((ROWS, WIDTH) if ids is not None else values.shape)
    item = ps_pb2.UpdateItem(variable=1, shard=shard, kind=ps_pb2.APPLY_GRADIENT, value_bytes=values.nbytes)
    whole = None if by_id else Partition.whole((start + shape[0], *shape[1:]))
    encoding = Encoding(CODES[name], top_k, (start, *[0] * (len(shape) - 1)), shape, whole)
    return ShardUpdate(0, item, memoryview(values.reshape(-1).view(np.uint8)), ids, "w", encoding=encoding)


def sent(update: ShardUpdate, width: int) -> Any:
    """What a server makes of it."""
    assert len(update.values) == update.item.value_bytes
    if not update.item.elements:
        rows = 1 if update.ids is None else len(update.ids)
        return decode(update.item.wire_dtype, update.values, rows, width)
    count = update.item.elements
    out = np.zeros((1, width), np.float32)
    positions = np.frombuffer(update.values[: 4 * count], "<u4")
    out[0, positions] = decode(update.item.wire_dtype, update.values[4 * count :], 1, count)
    return out


STEPS = st.lists(
    st.tuples(
        st.lists(st.integers(0, ROWS - 1), unique=True, max_size=6).map(sorted),
        st.sampled_from(["acknowledged", "failed", "later"]),
    ),
    max_size=20,
)


@pytest.mark.parametrize(("name", "by_id"), [("bfloat16", True), ("float16", False), ("int8", False), ("int8", True)])
@given(steps=STEPS, seed=st.integers(0, 99))
def test_nothing_is_lost(name: str, by_id: bool, steps: Any, seed: int) -> None:
    """In any order of pushes, acknowledgements and failures, what was acknowledged and what is kept are the gradients
    of acknowledged pushes."""
    random, residuals = np.random.default_rng(seed), Residuals(1 << 20, ClientMetrics(1))
    true, applied = np.zeros((2, ROWS, WIDTH))
    under_way: list[tuple[Push, Any, Any, Any]] = []
    known_as = np.arange(ROWS) * 0x7777_7777_7777_777 - (1 << 62) if by_id else np.arange(ROWS)

    def end(how: str, push: Push, ids: Any, values: Any, pushed: Any) -> None:
        if how == "failed":
            residuals.fail(push)
            return
        residuals.acknowledge(push)
        true[ids] += values
        applied[ids] += pushed

    for ids, how in steps:
        values = random.normal(size=(len(ids), WIDTH)).astype(np.float32)
        update, push = residuals.encode(gradient(name, values, known_as[ids], by_id=by_id), 0)
        under_way.append((push, ids, values, sent(update, WIDTH)))
        if how != "later":
            end(how, *under_way.pop(int(random.integers(len(under_way)))))
    while under_way:
        end("acknowledged", *under_way.pop())
    _, rest = residuals.encode(gradient("bfloat16", np.zeros((ROWS, WIDTH)), known_as, by_id=by_id), 0)
    kept = np.zeros((ROWS, WIDTH)) if rest.taken is None else rest.taken
    np.testing.assert_allclose(applied + kept, true, atol=1e-5)
    assert (np.abs(kept) < 1).all()


def test_a_failed_push_is_repeated_byte_for_byte() -> None:
    """A push that failed leaves what it had found: the same gradient again is the same bytes."""
    residuals = Residuals(1 << 20, ClientMetrics(1))
    values, ids = np.linspace(0.1, 0.9, 3 * WIDTH), [2, 5, 7]
    _, push = residuals.encode(gradient("int8", values, ids), 0)
    residuals.acknowledge(push)
    first, push = residuals.encode(gradient("int8", values, ids), 0)
    residuals.fail(push)
    second, _ = residuals.encode(gradient("int8", values, ids), 0)
    assert bytes(first.values) == bytes(second.values)
    alone, _ = Residuals(1 << 20, ClientMetrics(1)).encode(gradient("int8", values, ids), 0)
    assert bytes(alone.values) != bytes(first.values)


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_top_k_pushes_everything_in_time(name: str) -> None:
    """With a tenth of the elements in each push, the small ones come in their turn."""
    residuals, values = Residuals(1 << 20, ClientMetrics(1)), np.linspace(0.5, 1.5, 100, dtype=np.float32)
    total, seen = np.zeros((1, 100)), Counter[int]()
    for _ in range(100):
        update, push = residuals.encode(gradient(name, values, top_k=0.1), 0)
        residuals.acknowledge(push)
        assert update.item.elements == 10
        pushed = sent(update, 100)
        seen.update(np.flatnonzero(pushed).tolist())
        total += pushed
    assert len(seen) == 100
    # What is left of an element is what it had when it was last too small.
    assert np.abs(total / 100 - values).max() < 0.25


@given(st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=900, unique=True), max_size=4), st.booleans())
def test_places_by_id_are_those_of_a_dictionary(batches: list[list[int]], drops: bool) -> None:
    """However many ids there are, and after some of them were dropped."""
    places, known = ById(), np.empty(0, np.int64)
    for batch in [*batches, range(-700, 5000, 3)]:
        ids = np.array(batch, np.int64)
        new = ids[places.of(ids, known) == 0]
        assert set(new.tolist()) == set(ids.tolist()) - set(known.tolist())
        known, before = np.concatenate((known, new)), len(known)
        places.enter(known, before)
        if drops:
            known, all_known = known[::2], known
            places.replace(all_known, known)
            assert not places.of(all_known[1::2], known).any()
        assert places.of(known[::-1], known).tolist() == list(range(len(known), 0, -1))


@pytest.mark.parametrize(("by_id", "beside"), [(False, 20), (True, 30)])
def test_residuals_that_take_too_much_are_dropped(caplog: pytest.LogCaptureFixture, by_id: bool, beside: int) -> None:
    """Those of the rows that were pushed longest ago go, are counted, and said once; one push is never more."""
    metrics = ClientMetrics(1)
    residuals = Residuals(80 * (4 * WIDTH + beside), metrics)

    def push(*ids: int) -> Any:
        values = np.random.default_rng(1).normal(size=(len(ids), WIDTH))
        update = gradient("int8", values, ids, shape=(1000, WIDTH), by_id=by_id)
        _, pushed = residuals.encode(update, 0)
        residuals.acknowledge(pushed)
        return pushed.taken

    push(*range(40))
    push(*range(100, 140))
    push(0, 1)
    assert (metrics.residual_rows, metrics.residual_rows_dropped) == (80, 0)
    with caplog.at_level(logging.WARNING):
        push(*range(200, 220))
        assert (metrics.residual_rows, metrics.residual_rows_dropped) == (62, 38)
        assert metrics.residual_bytes == 62 * (4 * WIDTH + beside)
        push(*range(500, 600))
    assert (metrics.residual_rows, metrics.residual_rows_dropped) == (62, 138)
    assert [record.message for record in caplog.records] == [
        "residuals of variable 'w' are dropped: all of this process's may take 0 MiB (PSCLUSTER_RESIDUALS_MIB)"
    ]
    assert push(2, 3) is None
    assert push(0, 1) is not None


def test_a_restored_checkpoint_drops_them() -> None:
    """What is kept belongs to one term; a push of an earlier one that ends later leaves nothing."""
    metrics = ClientMetrics(1)
    residuals = Residuals(1 << 20, metrics)
    values = np.linspace(0.1, 0.9, WIDTH)
    _, first = residuals.encode(gradient("int8", values, [1]), 0)
    _, late = residuals.encode(gradient("int8", values, [2]), 0)
    residuals.acknowledge(first)
    assert metrics.residual_rows == 1
    _, push = residuals.encode(gradient("int8", values, [1]), 1)
    assert push.taken is None
    residuals.acknowledge(late)
    assert metrics.residual_rows == 0


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (
            gradient("float16", [[1, 2, 3, 4], [1e6, 0, 0, 0]], [3, 9], start=100),
            r"variable 'w': the gradient of row 109, with what is left of earlier ones, has the value 1e\+06, which "
            "float16 can't hold: it holds numbers below 65520. Nothing was sent: clip gradients, or make the variable "
            'with wire_dtype="bfloat16"',
        ),
        (
            gradient("float16", [[1, 2, 3, 4], [1e6, 0, 0, 0]], [3, -(1 << 60)], by_id=True),
            r"the gradient of row -1152921504606846976, .* has the value 1e\+06, which float16 can't hold",
        ),
        (
            gradient("int8", [[1, 2, 3], [4, np.nan, 6]], start=10),
            r"the gradient of element \[11, 1\].* has the value nan, which int8 can't hold.*nonfinite=\"skip\"",
        ),
        (
            gradient("float16", [[1, 2, 3], [4, 5, -7e5]], start=10, top_k=0.2),
            r"the gradient of element \[11, 2\].* has the value -700000, which float16 can't hold",
        ),
    ],
)
def test_a_value_that_the_type_cannot_hold(update: ShardUpdate, message: str) -> None:
    """The error names variable, row or element, value and hint, and what was kept stays."""
    residuals = Residuals(1 << 20, ClientMetrics(1))
    count = len(update.values) // 4
    by_id = update.encoding is not None and update.encoding.partition is None
    shape = update.encoding and update.encoding.shape
    good = gradient("int8", np.linspace(0.1, 0.9, count), update.ids, shape=shape, by_id=by_id)
    _, push = residuals.encode(good, 0)
    residuals.acknowledge(push)
    with pytest.raises(InvalidUpdateError, match=message):
        residuals.encode(update, 0)
    _, again = residuals.encode(good, 0)
    assert again.taken is not None
    assert again.taken.tobytes() == push.lost.tobytes()


CUTS = [
    Partition.even((ROWS, WIDTH), [3, 2]),
    Partition.even((ROWS, WIDTH), [4, 1]),
    Partition((ROWS, WIDTH), ((6, 11, ROWS), (WIDTH,)), RowOrder("modulo")),
    Partition((ROWS, WIDTH), ((4, 8, 12, ROWS), (WIDTH,)), RowOrder("hash", 3)),
]


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("old", "new"), [(old, new) for old in CUTS for new in CUTS[1:] if old is not new])
def test_they_stay_with_their_rows(old: Partition, new: Partition, dense: bool) -> None:
    """When a variable is resharded, its new shards have exactly what the old ones had."""
    random, residuals = np.random.default_rng(1), Residuals(1 << 20, metrics := ClientMetrics(1))

    def push(partition: Partition, variable: int, whole: Any) -> tuple[Any, Any]:
        """Push some rows of a gradient, or all; return what was taken, and what was lost, with zeros elsewhere."""
        taken, lost = np.zeros((2, ROWS, WIDTH), np.float32)
        for shard, block in enumerate(partition.blocks):
            ids = None if dense else np.arange(0, block.shape[0], 1 + (variable == 1))
            values = whole[partition.index(shard)]
            update = gradient("int8", values if ids is None else values[ids], ids, shard=shard, shape=block.shape)
            update.item.variable = variable
            _, under_way = residuals.encode(update, 0)
            rows = np.arange(block.shape[0]) if ids is None else ids
            for out, amounts in ((taken, under_way.taken), (lost, under_way.lost)):
                if amounts is not None:
                    part = np.zeros(block.shape, np.float32)
                    part[rows] = amounts.reshape(len(rows), -1)
                    out[partition.index(shard)] = part
            residuals.acknowledge(under_way)
        return taken, lost

    _, kept = push(old, 1, random.normal(size=(ROWS, WIDTH)).astype(np.float32))
    count, nbytes = metrics.residual_rows, metrics.residual_bytes
    residuals.reshard(Cut(1, old, (0,) * old.num_shards), Cut(2, new, (0,) * new.num_shards))
    if not dense and old.num_shards == len(old.ends[0]):
        assert (metrics.residual_rows, metrics.residual_bytes) == (count, nbytes)
    taken, _ = push(new, 2, np.zeros((ROWS, WIDTH), np.float32))
    assert np.abs(kept).max() > 0
    np.testing.assert_array_equal(taken, kept)


def test_infinity_leaves_nothing() -> None:
    """An infinite element is sent as it is, and nothing of it is kept."""
    residuals = Residuals(1 << 20, ClientMetrics(1))
    update, push = residuals.encode(gradient("float16", [np.inf, np.nan, 0.1, 0.2]), 0)
    np.testing.assert_array_equal(sent(update, 4)[0, :2], [np.inf, np.nan])
    assert push.lost[0, :2].tolist() == [0, 0]
    assert push.lost[0, 2] != 0
