"""Contributions of several replicas, combined: sums and means in the order of the replicas, rows joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pscluster.core.errors import MisuseError, ProtocolError, PsClusterError
from pscluster.core.transport.frames import padding, view
from pscluster.ps.server.requests import update_checks, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.state.store import Store
from pscluster.ps.server.synchronous.combine import (
    Combined,
    Contribution,
    check_contribution,
    combine,
    parts_of_payload,
)
from pscluster.ps.storage.replay import restored
from pscluster.v1 import ps_pb2, state_pb2

W, TABLE = 1, 2


@pytest.fixture
def store() -> Store:
    """A server with w, of 3 float32, and a table of 4 rows of 2; and an SGD."""
    manifest = state_pb2.Manifest(server=0, job=5)
    for variable, name, shape in ((W, "w", (3,)), (TABLE, "table", (4, 2))):
        spec = manifest.variables.add(id=variable, name=name, dtype="float32", shape=shape, owners=[0])
        for length in shape:
            spec.splits.add(ends=[length])
        manifest.shards.add(variable=variable, shard=0)
    sgd = manifest.optimizers.add().spec
    sgd.id, sgd.name, sgd.rule = 9, "sgd", "sgd"
    sgd.numbers["learning_rate"] = 0.5
    sgd.flags["nesterov"] = False
    sgd.numbers["momentum"] = 0.0
    return restored(manifest, [{"value": np.zeros(3, np.float32)}, {"value": np.zeros((4, 2), np.float32)}])


Item = tuple[int, Any, Any, float | None]
"""Variable, row numbers or None, values, weight."""


def pieces_of(store: Store, replica: int, *parts: tuple[int, list[float]], number: int = 1) -> Contribution:
    """A contribution of pieces of the gradient of w: for each its first element, and its values."""
    sent = contribution(store, replica, [(W, None, [0, 0, 0], None) for _ in parts])
    request, data = sent.request, b""
    for item, (start, values) in zip(request.items, parts, strict=True):
        array = np.array(values, np.float32)
        item.offset, item.value_bytes, item.nth = 4 * start, array.nbytes, number
        data += bytes(view(array)) + bytes(padding(array.nbytes))
    return Contribution(
        request, update_checks.changes_of(store, request, len(data)), Payload([memoryview(data)]), len(data)
    )


def contribution(
    store: Store,
    replica: int,
    items: Sequence[Item],
    kind: ps_pb2.UpdateKind = ps_pb2.APPLY_GRADIENT,
    replicas: int = 2,
) -> Contribution:
    request, buffers = ps_pb2.UpdateRequest(job=5), list[bytes]()
    request.contribution.replica, request.contribution.replicas = replica, replicas
    for variable, ids, values, weight in items:
        array = np.ascontiguousarray(values, np.float32)
        item = request.items.add(variable=variable, kind=kind, value_bytes=array.nbytes, nth=1)
        if kind in (ps_pb2.APPLY_GRADIENT, ps_pb2.APPLY_CHANGE):
            item.optimizer = 9
        if weight is not None:
            item.weight = weight
        if ids is None:
            item.rows.all = True
        else:
            item.rows.ids = len(ids)
            buffers.append(bytes(view(np.array(ids, np.int64))) + bytes(padding(8 * len(ids))))
        buffers.append(bytes(view(array)) + bytes(padding(array.nbytes)))
    data = b"".join(buffers)
    changes = update_checks.changes_of(store, request, len(data))
    return Contribution(request, changes, Payload([memoryview(data)]), len(data))


def values_of(combined: Combined, at: int = 0) -> list[float]:
    data, start = b"".join(combined.buffers), 0
    for item in combined.items[: at + 1]:
        start += item.rows.ids * 8 + padding(item.rows.ids * 8)
        values: list[float] = np.frombuffer(data, np.float32, item.value_bytes // 4, start).tolist()
        start += item.value_bytes + padding(item.value_bytes)
    return values


def test_gradients_are_summed_in_the_order_of_the_replicas(store: Store) -> None:
    large, small = np.float32(1e8), np.float32(1.0)
    parts = [[large, 0, 1], [small, 0, 1], [-large, 0, 1]]
    combined = combine([contribution(store, rank, [(W, None, part, None)]) for rank, part in enumerate(parts)])
    assert values_of(combined) == [(large + small) - large, 0, 3], "not the exact sum, but that of this order"
    assert len(combined.items) == 1


def test_a_mean_is_weighted_by_examples(store: Store) -> None:
    parts = [(W, None, [1, 1, 1], 3.0), (W, None, [5, 5, 5], 1.0)]
    combined = combine([contribution(store, rank, [part]) for rank, part in enumerate(parts)])
    assert values_of(combined) == [2, 2, 2]
    assert not combined.items[0].HasField("weight")


def test_a_replica_without_examples_does_not_count(store: Store) -> None:
    parts = [(W, None, [1, 1, 1], 0.0), (W, None, [5, 5, 5], 2.0)]
    combined = combine([contribution(store, rank, [part]) for rank, part in enumerate(parts)])
    assert values_of(combined) == [5, 5, 5]


def test_pieces_are_put_together(store: Store) -> None:
    combined = combine([pieces_of(store, 0, (2, [3])), pieces_of(store, 1), pieces_of(store, 2, (0, [1, 2]))])
    assert values_of(combined) == [1, 2, 3]
    (item,) = combined.items
    assert (item.nth, item.value_bytes, item.HasField("offset")) == (1, 12, False)
    payload, total = parts_of_payload(combined)
    update_checks.changes_of(store, ps_pb2.UpdateRequest(job=5, items=combined.items), total)
    assert payload.array(0, 3, np.float32).tolist() == [1, 2, 3]


def test_several_gradients_in_pieces(store: Store) -> None:
    both = [[pieces_of(store, rank, (rank, [1.0, 2.0][: 1 + rank]), number=at) for rank in range(2)] for at in (1, 2)]
    combined = combine([*both[1], *both[0]])
    assert [values_of(combined, at) for at in range(2)] == [[1, 1, 2]] * 2
    assert [item.nth for item in combined.items] == [1, 2]


def test_one_replica_may_have_all_of_a_shard(store: Store) -> None:
    """Of an update of any kind, one after another by their numbers; two replicas can't assign the same."""

    def whole(replica: int, kind: ps_pb2.UpdateKind, number: int) -> Contribution:
        sent = contribution(store, replica, [(W, None, [replica, 2, number], None)], kind)
        sent.request.items[0].offset, sent.request.items[0].nth = 0, number
        return sent

    sent = [whole(1, ps_pb2.ADD, 2), whole(0, ps_pb2.ASSIGN, 1)]
    for part in sent:
        check_contribution(part.changes)
    combined = combine(sent)
    assert [(item.kind, values_of(combined, at)) for at, item in enumerate(combined.items)] == [
        (ps_pb2.ASSIGN, [0, 2, 1]),
        (ps_pb2.ADD, [1, 2, 2]),
    ]
    with pytest.raises(ProtocolError, match="pieces of an update of 'w', shard 0, do not make"):
        combine([whole(0, ps_pb2.ASSIGN, 1), whole(1, ps_pb2.ASSIGN, 1)])


@pytest.mark.parametrize("parts", [[(0, [1, 2])], [(1, [2, 3])], [(0, [1, 2]), (1, [2, 3])], [(0, [1]), (2, [3])]])
def test_pieces_that_make_no_gradient_are_refused(store: Store, parts: list[tuple[int, list[float]]]) -> None:
    with pytest.raises(ProtocolError, match="pieces of an update of 'w', shard 0, do not make its 12 bytes"):
        combine([pieces_of(store, rank, part) for rank, part in enumerate(parts)])


@pytest.mark.parametrize(
    "fields",
    [
        {"offset": 4},
        {"offset": 2, "value_bytes": 8},
        {"offset": 8, "value_bytes": 8},
        {"offset": 4, "value_bytes": 0},
        {"offset": (1 << 64) - 4, "value_bytes": 8},
        {"offset": 0, "rows": ps_pb2.Rows(ids=1)},
        {"offset": 0, "kind": ps_pb2.MUL},
        {"offset": 4, "kind": ps_pb2.ASSIGN, "value_bytes": 8},
        {"offset": 0, "kind": ps_pb2.ADD, "scalar": True, "value_bytes": 4},
    ],
)
def test_what_is_no_piece_is_refused_when_it_comes(store: Store, fields: dict[str, Any]) -> None:
    sent = contribution(store, 0, [(W, None, [0, 0, 0], None)])
    for name, value in fields.items():
        item = sent.request.items[0]
        item.rows.CopyFrom(value) if name == "rows" else setattr(item, name, value)
    with pytest.raises(ProtocolError, match="not a piece of a gradient of 'w'"):
        update_checks.changes_of(store, sent.request, 16)


def test_only_a_contribution_may_have_pieces(store: Store) -> None:
    sent = pieces_of(store, 0, (0, [1]))
    sent.request.ClearField("contribution")
    with pytest.raises(ProtocolError, match="not a piece of a gradient"):
        update_checks.changes_of(store, sent.request, 16)


def change(store: Store, replica: int, start: int, values: list[float], **fields: Any) -> Contribution:
    """A piece of what three steps have changed in W."""
    sent = pieces_of(store, replica, (start, values))
    item = sent.request.items[0]
    item.kind, item.gradients = ps_pb2.APPLY_CHANGE, 3
    for name, value in fields.items():
        setattr(item, name, value)
    return sent


def test_changes_are_put_together(store: Store) -> None:
    left = contribution(store, 1, [(W, [2], [[0.5]], None)], ps_pb2.APPLY_CHANGE)
    combined = combine([change(store, 0, 0, [1]), left, change(store, 2, 1, [2, 3])])
    assert values_of(combined) == [1, 2, 3]
    item, remainder = combined.items
    assert (remainder.rows.ids, remainder.nth) == (1, 2), "it is added last"
    assert (item.kind, item.gradients, item.HasField("offset")) == (ps_pb2.APPLY_CHANGE, 3, False)
    payload, total = parts_of_payload(combined)
    request = ps_pb2.UpdateRequest(job=5, incarnation=1, sequence=1, items=combined.items)
    updates.apply(store, request, update_checks.changes_of(store, request, total), payload)
    assert store.directory.find(W, 0)[1].array.tolist() == [1, 2, 3.5]
    assert store.directory.find(W, 0)[1].steps == {9: 3}


@pytest.mark.parametrize("other", [{"gradients": 2}, {"slot": "momentum"}, {"kind": ps_pb2.APPLY_GRADIENT}])
def test_changes_that_differ_are_refused(store: Store, other: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="do not make its 12 bytes"):
        combine([change(store, 0, 0, [1]), change(store, 1, 1, [2, 3], **other)])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"slot": "momentum", "gradients": 1}, "by 1 gradients; the limit is 0"),
        ({"gradients": 1 << 20}, "by 1048576 gradients; the limit is 1024"),
        ({"slot": "momentum", "gradients": 0}, "the slot 'momentum', which 'sgd' does not have"),
        ({"offset": 16}, "not a piece of a gradient of 'w'"),
        ({"optimizer": 99}, "optimizer"),
    ],
)
def test_what_is_no_change_is_refused_when_it_comes(store: Store, fields: dict[str, Any], said: str) -> None:
    sent = change(store, 0, 0, [1], **fields)
    with pytest.raises(PsClusterError, match=said):
        update_checks.changes_of(store, sent.request, 16)


def test_rows_are_joined(store: Store) -> None:
    parts = [(TABLE, [3, 0], [[1, 2], [3, 4]], None), (TABLE, [], np.zeros((0, 2)), None), (TABLE, [3], [[5, 6]], None)]
    combined = combine([contribution(store, rank, [part]) for rank, part in enumerate(parts)])
    assert combined.items[0].rows.ids == 3
    assert values_of(combined) == [1, 2, 3, 4, 5, 6]


def test_additions_are_applied_one_by_one(store: Store) -> None:
    parts = [[1, 1, 1], [2, 2, 2]]
    adds = [contribution(store, rank, [(W, None, part, None)], ps_pb2.ADD) for rank, part in enumerate(parts)]
    combined = combine(adds)
    assert [item.nth for item in combined.items] == [1, 2], "each has its own key"
    assert values_of(combined, 1) == [2, 2, 2]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([(W, None, [1, 1, 1], None)], []),
        ([(W, None, [1, 1, 1], None)], [(TABLE, [0], [[1, 1]], None)]),
        ([(TABLE, None, np.ones((4, 2)), None)], [(TABLE, [0], [[1, 1]], None)]),
        ([(W, None, [1, 1, 1], None)], [(W, None, [1, 1, 1], 2.0)]),
    ],
)
def test_replicas_that_update_differently_are_named(store: Store, first: list[Item], second: list[Item]) -> None:
    with pytest.raises(MisuseError, match=r"replica 1 has gradients of .* in a synchronous step, and replica 0 of "):
        combine([contribution(store, 0, first), contribution(store, 1, second)])


def test_what_can_t_be_combined_is_refused_when_it_comes(store: Store) -> None:
    assigned = contribution(store, 0, [(W, None, [1, 1, 1], None)], ps_pb2.ASSIGN)
    with pytest.raises(MisuseError, match="'w' is assigned in a synchronous step"):
        check_contribution(assigned.changes)
    for weight in (-1.0, float("inf"), float("nan")):
        weighted = contribution(store, 0, [(W, None, [1, 1, 1], weight)])
        with pytest.raises(ProtocolError, match="weight"):
            check_contribution(weighted.changes)
