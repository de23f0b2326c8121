"""Small gradients of one request are applied together: with the values, counts and refusals of one after another."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.ps.storage.support import padded

from pscluster.core.errors import InvalidUpdateError, ShardMovedError
from pscluster.core.transport.frames import padding
from pscluster.ps.optim import joint, rules
from pscluster.ps.server.requests import changes, creation, update_checks, update_values, updates
from pscluster.ps.server.requests.payload import Payload
from pscluster.ps.server.requests.updates import Applied
from pscluster.ps.server.state.directory import HeldOptimizer
from pscluster.ps.server.state.store import Store
from pscluster.v1 import ps_pb2

Gradient = tuple[int, list[int] | None, npt.NDArray[Any]]
"""Variable, rows or None for all, and values."""

SHAPES = {1: (40, 4), 2: (40, 4), 3: (6,), 4: (5, 2, 3), 5: (30, 8), 6: (20, 4)}
DTYPES = {6: "float64"}


def new_store() -> Store:
    """A server with small variables and two optimizers."""
    store = Store(0, 1)
    rng = np.random.default_rng(1)
    for number, shape in SHAPES.items():
        dtype = DTYPES.get(number, "float32")
        splits = [ps_pb2.AxisSplit(ends=[length]) for length in shape]
        spec = ps_pb2.VariableSpec(id=number, name=f"v{number}", shape=shape, dtype=dtype, owners=[0], splits=splits)
        creation.create(store, ps_pb2.CreateRequest(job=1, variable=spec), padded(rng.normal(size=shape).astype(dtype)))
    for number, rule in ((1, rules.Adam(0.1)), (2, rules.Adagrad(0.1))):
        numbers, flags = rule.to_spec()
        spec_of_rule = ps_pb2.OptimizerSpec(id=number, name=rule.name, rule=rule.name, numbers=numbers, flags=flags)
        store.put_optimizer(HeldOptimizer(spec_of_rule, rule))
    return store


def request_of(gradients: Sequence[Gradient], function: int, optimizer: int = 1) -> tuple[Any, int, Payload]:
    """An update, the bytes of its payload, and the payload."""
    request = ps_pb2.UpdateRequest(job=1, incarnation=9, function=function)
    segments: list[npt.NDArray[Any]] = []
    for variable, ids, values in gradients:
        rows = ps_pb2.Rows(all=True) if ids is None else ps_pb2.Rows(ids=len(ids))
        segments += [values] if ids is None else [np.array(ids, np.int64), values]
        request.items.append(
            ps_pb2.UpdateItem(
                variable=variable,
                kind=ps_pb2.APPLY_GRADIENT,
                rows=rows,
                optimizer=optimizer,
                nth=1,
                value_bytes=values.nbytes,
            )
        )
    return request, sum(array.nbytes + padding(array.nbytes) for array in segments), padded(*segments)


def push(
    store: Store,
    gradients: Sequence[Gradient],
    function: int,
    optimizer: int = 1,
    applied: Applied | None = None,
) -> ps_pb2.UpdateReply:
    """Apply gradients in one request."""
    request, total, payload = request_of(gradients, function, optimizer)
    return updates.apply(store, request, update_checks.check_update(store, request, total), payload, applied)


def state_of(store: Store) -> dict[str, Any]:
    """All that updates change."""
    state: dict[str, Any] = {}
    for number, held in store.directory.variables.items():
        shard = held.shards[0]
        state |= {f"{number}/{name}": array.tobytes() for name, array in shard.arrays().items()}
        state[f"{number}/counts"] = shard.updates, shard.changes, dict(shard.steps)
        state[f"{number}/metrics"] = held.metrics.pushes, held.metrics.pushed_bytes, held.metrics.rows_updated
    return state


def some_gradients(rng: np.random.Generator) -> list[Gradient]:
    """Of some variables in any order; rows sorted, in any order, twice, or none at all."""
    gradients: list[Gradient] = []
    for variable in rng.permutation(list(SHAPES))[: rng.integers(1, 7)].tolist():
        shape, dtype = SHAPES[variable], DTYPES.get(variable, "float32")
        ids = None
        if len(shape) > 1 and rng.random() < 0.7:
            ids = sorted(set(rng.integers(shape[0], size=rng.integers(0, 7)).tolist()))
            if rng.random() < 0.2:
                ids = rng.permutation([*ids, *ids]).tolist()
            shape = (len(ids), *shape[1:])
        gradients.append((variable, ids, rng.normal(size=shape).astype(dtype)))
    return gradients


@pytest.mark.parametrize("seed", range(20))
def test_together_as_one_after_another(seed: int) -> None:
    """Random requests, some repeated, some of other optimizers: state, counts and metrics are the same."""
    rng = np.random.default_rng(seed)
    together, alone = new_store(), new_store()
    for function in range(1, 25):
        gradients = some_gradients(rng)
        optimizer = 1 if rng.random() < 0.8 else 2
        if rng.random() < 0.3:
            some = gradients[: rng.integers(len(gradients) + 1)]
            push(together, some, function, optimizer)
            push(alone, some, function, optimizer)
        applied = Applied()
        reply = push(together, gradients, function, optimizer, applied)
        replies = [push(alone, [gradient], function, optimizer) for gradient in gradients]
        assert list(reply.updates) == [one.updates[0] for one in replies]
        assert [bool(count) for count in applied.counts] == [bool(one.applied) for one in replies]
        assert (reply.applied, reply.repeated_) == (sum(r.applied for r in replies), sum(r.repeated_ for r in replies))
        assert state_of(together) == state_of(alone)
    assert together.remembered == alone.remembered


def test_one_run_of_the_rule_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of one type and step need one run, up to its limit; others their own."""
    runs: list[int] = []

    def counted(rule: rules.UpdateRule, parts: Sequence[joint.Part], step: int) -> None:
        runs.append(len(parts))
        joint.apply_together(rule, parts, step)

    monkeypatch.setattr(update_values, "apply_together", counted)
    store = new_store()
    gradients: list[Gradient] = [(number, None, np.ones(SHAPES[number], np.float32)) for number in (1, 2, 3, 4, 5)]
    push(store, gradients, 1)
    push(store, [*gradients[:2], (6, None, np.ones(SHAPES[6])), *gradients[2:]], 2)
    push(store, gradients[:1], 3)  # it is a step ahead now
    push(store, gradients, 4)
    assert runs == [5, 2, 3, 4]
    for module in (changes, updates):  # 160, 160, 6, 30 and 240 of which the last exceeds its half
        monkeypatch.setattr(module, "MAX_ELEMENTS", 400)
    push(store, gradients[1:], 5)
    assert runs[4:] == [3]


def test_what_is_known_of_gradients_follows_the_optimizer() -> None:
    """An optimizer of another form takes the place of the one by which gradients were just applied."""
    store, gradients = new_store(), [(number, None, np.ones(SHAPES[number], np.float32)) for number in (3, 5)]

    def joins() -> list[int]:
        request, total, _ = request_of(gradients, 1)
        return [change.joins for change in update_checks.check_update(store, request, total)]

    assert joins() == joins() == [6, 240]
    rule = rules.Adam(0.1)
    averaging = ps_pb2.OptimizerSpec(id=1, name=rule.name, rule=rule.name, ema_momentum=0.5)
    store.put_optimizer(HeldOptimizer(averaging, rule))
    assert joins() == [0, 0]


def test_new_arrays_take_the_places_of_those_that_were_known() -> None:
    """Gradients change the shard's present values and slots, and nothing keeps the memory of former ones."""
    ours, others = new_store(), new_store()
    rng = np.random.default_rng(3)
    former: list[weakref.ref[npt.NDArray[Any]]] = []
    for function, optimizer in enumerate((1, 1, 2, 1, 1, 1), 1):
        gradients: list[Gradient] = [(n, None, rng.normal(size=SHAPES[n]).astype("f")) for n in (1, 3)]
        gradients += [(n, [0, 3], rng.normal(size=(2, *SHAPES[n][1:])).astype("f")) for n in (2, 4)]
        push(ours, gradients, function, optimizer)
        for gradient in gradients:
            push(others, [gradient], function, optimizer)
        assert state_of(ours) == state_of(others)
        for store in (ours, others):
            for number in (1, 2, 3, 4):
                shard = store.directory.variables[number].shards[0]
                former.append(weakref.ref(shard.array))
                if function in (2, 3):  # as a large value that is assigned whole
                    assert shard.replace(shard.array + 1)
                    assert former[-1]() is None
                elif function == 4:  # as a checkpoint is restored
                    former += [weakref.ref(array) for array in shard.slots[1].values()]
                    arrays = {name: array.copy() for name, array in shard.arrays().items() if name.startswith("slot/1")}
                    shard.slots.clear()
                    shard.put(arrays)
                    assert former[-1]() is None
                elif function == 5:  # as those of a deleted optimizer that is declared anew
                    del shard.slots[1], shard.steps[1]


def test_a_shard_in_use_is_waited_for_with_no_other_lock_held() -> None:
    """Two requests in opposite orders, and readers that hold locks in turn, never wait for each other."""
    store = new_store()
    numbers = [1, 2, 3, 4, 5]
    locks = {number: store.directory.variables[number].shards[0].lock for number in numbers}
    done = threading.Event()

    def train(order: list[int], first: int) -> None:
        for function in range(first, first + 60):
            push(store, [(number, None, np.ones(SHAPES[number], np.float32)) for number in order], function)

    def hold() -> None:
        while not done.is_set():
            for number in numbers:
                with locks[number]:
                    pass

    with ExitStack() as stack:
        holder = threading.Thread(target=hold)
        holder.start()
        stack.callback(holder.join)
        stack.callback(done.set)
        trainers = [threading.Thread(target=train, args=(numbers[::way], 100 * way + 200)) for way in (1, -1)]
        for thread in trainers:
            thread.start()
        for thread in trainers:
            thread.join(60)
            assert not thread.is_alive()
    assert [store.directory.variables[number].shards[0].updates for number in numbers] == [120] * 5
    assert not any(lock.locked() for lock in locks.values())


def test_what_can_not_be_applied_leaves_the_others_whole() -> None:
    """A shard that has moved stops the request where it stands in it; a wrong row stops all of it."""
    store = new_store()
    gradients: list[Gradient] = [(number, None, np.ones(SHAPES[number], np.float32)) for number in (1, 2, 3)]
    request, total, payload = request_of(gradients, 1)
    changes = update_checks.check_update(store, request, total)
    changes[1].shard.moved = True
    applied = Applied()
    with pytest.raises(ShardMovedError):
        updates.apply(store, request, changes, payload, applied)
    assert applied.counts == [1]
    assert [change.shard.updates for change in changes] == [1, 0, 0]
    assert not any(change.shard.lock.locked() for change in changes)
    before = state_of(store)
    for ids in ([0, 40], [-1, 3], [41, 2]):
        with pytest.raises(InvalidUpdateError, match=f"row {next(i for i in ids if not 0 <= i < 40)} of a shard"):
            push(store, [(3, None, np.ones(6, np.float32)), (1, ids, np.ones((2, 4), np.float32))], 7)
    assert state_of(store) == before
