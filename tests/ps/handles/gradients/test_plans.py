"""What a plan makes of gradients is what their optimizer makes of them; and it is kept only as long as it holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from tests.conftest import run_strategy

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    ModuloPartitioner,
    ParameterServerStrategy,
    Variable,
    embedding_lookup,
    optimizers,
)
from pscluster.coordinator.moves.plan import ProposedCut
from pscluster.core import errors
from pscluster.core.dtypes import dtype_named
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.handles.gradients import plans as gradient_plans
from pscluster.ps.handles.gradients.parameters import Applied, apply_all
from pscluster.ps.handles.gradients.plans import GradientPlan

WAYS: list[dict[str, Any]] = [
    {},
    {"partitioner": FixedShardsPartitioner(3)},
    {"partitioner": lambda shape, dtype: [2, 2]},
    {"partitioner": FixedShardsPartitioner(2), "wire_dtype": "bfloat16", "push_top_k": 0.5},
    {"dtype": np.float64},
    {"dtype": dtype_named("bfloat16")},
    {"initial_value": 0.0},
    {"initial_value": np.zeros((0, 6))},
]
RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def strategy() -> Iterator[ParameterServerStrategy]:
    """Two servers and a worker."""
    yield from run_strategy(2, 1)


@pytest.fixture(scope="module")
def variables(strategy: ParameterServerStrategy) -> list[Variable]:
    """Variables that are cut in every way, and of several types."""
    common: dict[str, Any] = {"initial_value": np.zeros((7, 6)), "dtype": np.float32}
    with strategy.scope():
        return [Variable(**(common | way)) for way in WAYS]


@pytest.fixture
def uses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of gradients for which a plan was used."""
    uses: list[int] = []
    filled = gradient_plans._filled

    def counted(planned: Any, pairs: Any, examples: Any) -> list[ShardUpdate]:
        uses.append(len(pairs))
        return filled(planned, pairs, examples)

    monkeypatch.setattr(gradient_plans, "_filled", counted)
    return uses


def gradients_of(variables: list[Variable]) -> list[tuple[Any, Variable]]:
    return [(RNG.normal(size=variable.shape).astype(variable.dtype)[...], variable) for variable in variables]


def described(update: ShardUpdate) -> dict[str, Any]:
    values = {field.name: getattr(update, field.name) for field in fields(update)}
    ids = None if update.ids is None else (update.ids.dtype.str, update.ids.tolist())
    return values | {"values": bytes(update.values), "item": str(update.item), "ids": ids}


def assert_same(plan: GradientPlan, optimizer: optimizers.Optimizer, pairs: Any, examples: float | None = None) -> None:
    mine, theirs = (of.updates_of(pairs, examples=examples) for of in (plan, optimizer))
    assert [described(update) for update in mine] == [described(update) for update in theirs]


def test_updates_are_those_of_the_optimizer(
    strategy: ParameterServerStrategy, variables: list[Variable], uses: list[int]
) -> None:
    with strategy.scope():
        adam = optimizers.Adam(0.1)
    plan = GradientPlan(adam)
    for _ in range(2):
        assert_same(plan, adam, gradients_of(variables))
    assert not uses  # one that is used once is not worth a plan
    for examples in (None, 3, 0.5):
        assert_same(plan, adam, gradients_of(variables), examples)
    assert uses == [len(WAYS)] * 3
    with pytest.raises(ValueError, match="examples is -1"):
        plan.updates_of(gradients_of(variables), examples=-1)


def test_what_does_not_fit_is_left_to_the_optimizer(
    strategy: ParameterServerStrategy, variables: list[Variable], uses: list[int]
) -> None:
    with strategy.scope():
        sgd, clips = optimizers.SGD(0.1), optimizers.SGD(0.1, clipvalue=0.5)
        refuses = optimizers.SGD(0.1, nonfinite="refuse")
    one, other = variables[:2]
    plans = {optimizer.name: GradientPlan(optimizer) for optimizer in (sgd, clips, refuses)}
    ones = np.ones((7, 6), np.float32)
    for optimizer in (sgd, clips, refuses):
        for _ in range(3):
            assert_same(plans[optimizer.name], optimizer, [(ones, one)])
    assert uses == [1]
    rows = IndexedSlices(np.ones((1, 6), np.float32), np.array([3]))
    for gradient in (ones.astype(np.float64), ones.tolist(), rows, None):
        assert_same(plans[sgd.name], sgd, [(gradient, one)])
    assert_same(plans[sgd.name], sgd, [(ones, other)])
    assert_same(plans[sgd.name], sgd, [(np.asfortranarray(ones), one)])
    assert uses == [1, 1]  # the last one fits
    with pytest.raises(errors.InvalidUpdateError, match="shape"):
        plans[sgd.name].updates_of([(ones[:6], one)])
    with pytest.raises(errors.InvalidUpdateError, match="NaN or infinity"):
        plans[refuses.name].updates_of([(ones * np.nan, one)])


def slices_of(tables: list[Variable], *ids: Any) -> list[tuple[Any, Variable]]:
    """Gradients by rows that lie apart, as those of a stack do."""
    stacks = [
        RNG.normal(size=(len(of_table), 2, *table.shape[1:])) for table, of_table in zip(tables, ids, strict=True)
    ]
    of = zip(tables, ids, stacks, strict=True)
    return [(IndexedSlices(stack.astype(table.dtype)[:, 1], np.asarray(i)), table) for table, i, stack in of]


def test_updates_of_rows_are_those_of_the_optimizer(strategy: ParameterServerStrategy, uses: list[int]) -> None:
    with strategy.scope():
        adam = optimizers.Adam(0.1)
        partitioners: list[Any] = [None, FixedShardsPartitioner(3), lambda *_: [2, 2], ModuloPartitioner(2)]
        tables = [Variable(np.zeros((7, 6), np.float32), partitioner=each) for each in partitioners]
        tables.append(Variable(np.zeros((5, 6), np.float32)))
        dense = Variable(np.zeros((3, 2), np.float32))
    plan = GradientPlan(adam)
    ids = [[6, 1, 6], [0, 5, 4], [3, 3, 3, 3], np.empty(0, np.int64), [4]]
    for _ in range(4):
        assert_same(plan, adam, [*slices_of(tables, *ids), (np.ones((3, 2), np.float32), dense)], 2.0)
    assert uses == [6, 6]
    embedding_lookup(tables, [np.asarray(of_table) for of_table in ids])  # its plan of rows is used again
    assert_same(plan, adam, [*slices_of(tables, *ids), (np.ones((3, 2), np.float32), dense)])
    one = GradientPlan(adam)
    for rows in ([2, 0, 2], [2, 1], [2, 1], [1, 2, 3]):  # of which the last need no sum
        assert_same(one, adam, slices_of(tables[:1], rows))
    for wrong in ([2, 7], [-1, 2]):
        with pytest.raises(errors.InvalidUpdateError, match=r"row id (7|-1) \(position \d\) is out of range"):
            one.updates_of(slices_of(tables[:1], wrong))
    ((slices, _),) = slices_of(tables[:1], [1, 2])
    for other in (slices._replace(indices=[1, 2]), slices._replace(values=np.asarray(slices.values, np.float64))):
        assert_same(one, adam, [(other, tables[0])])
    with pytest.raises(errors.InvalidUpdateError, match="must be integers"):
        one.updates_of([(slices._replace(indices=np.array([1.0, 2.0])), tables[0])])
    with pytest.raises(errors.InvalidUpdateError, match="dense_shape"):
        one.updates_of([(slices._replace(dense_shape=(8, 6)), tables[0])])


def test_gradients_by_hand_are_sent_by_a_plan(strategy: ParameterServerStrategy, uses: list[int]) -> None:
    with strategy.scope():
        sgd, table = optimizers.SGD(1.0), Variable(np.zeros((4, 2), np.float32))
    for _ in range(4):
        sgd.apply_gradients(iter([(IndexedSlices(np.ones((3, 2), np.float32), np.array([2, 0, 2])), table)]))
        sgd.apply_gradients([(np.ones((4, 2), np.float32), table)])
    assert uses == [1] * 4
    assert table.numpy().tolist() == [[-8, -8], [-4, -4], [-12, -12], [-4, -4]]
    for _ in range(2):  # by the same plans, as frameworks' models
        apply_all([Applied(sgd, [(IndexedSlices(-np.ones((3, 2), np.float32), np.array([2, 0, 2])), table)])])
        apply_all([Applied(sgd, [(-np.ones((4, 2), np.float32), table)])])
    assert uses == [1] * 8
    assert table.numpy().tolist() == [[-4, -4], [-2, -2], [-6, -6], [-2, -2]]
    with pytest.raises(TypeError, match="takes pairs"):
        sgd.apply_gradients([table])  # type: ignore[list-item]


def test_variables_may_be_cut_otherwise(strategy: ParameterServerStrategy, uses: list[int]) -> None:
    with strategy.scope():
        sgd = optimizers.SGD(1.0)
        table = Variable(np.zeros((12, 2), np.float32), partitioner=FixedShardsPartitioner(2), name="to be cut")
    gradient = np.arange(24, dtype=np.float32).reshape(12, 2)
    for _ in range(3):
        apply_all([Applied(sgd, [(gradient, table)])])
    strategy.apply(replace(strategy.plan("bytes"), moves=(), cuts=(ProposedCut(table.name, 0, 0.9, 2, 3, True),)))
    assert (table.num_shards, uses) == (3, [1])
    for _ in range(2):
        apply_all([Applied(sgd, [(gradient, table)])])
    assert uses == [1, 1]
    np.testing.assert_array_equal(table.numpy(), -5 * gradient)


def test_each_update_of_a_function_counts(strategy: ParameterServerStrategy) -> None:
    """They have numbers, by which those that are sent again are known."""
    with strategy.scope():
        sgd = optimizers.SGD(1.0)
        counted = [Variable(np.zeros(3, np.float32), partitioner=FixedShardsPartitioner(n)) for n in (1, 2)]

    def step() -> None:
        for _ in range(5):
            apply_all([Applied(sgd, [(np.ones(3, np.float32), variable) for variable in counted])])
            sgd.apply_gradients([(np.ones(3, np.float32), counted[0])])

    ClusterCoordinator(strategy).schedule(step).fetch(timeout=60)
    assert [variable.numpy().tolist() for variable in counted] == [[-10] * 3, [-5] * 3]
