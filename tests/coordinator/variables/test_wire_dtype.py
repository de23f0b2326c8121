"""Variables that travel in fewer bytes: what functions read and push, what stays exact, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.ps.strings import texts_of
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    Checkpoint,
    ClusterCoordinator,
    EmbeddingTable,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    SynchronousStrategy,
    Variable,
    embedding_lookup,
    exact_reads,
    initializers,
    metrics,
    optimizers,
    table_policies,
)
from pscluster.core.errors import FunctionError, InvalidUpdateError, MisuseError
from pscluster.ps.spec import SESSION_BYTES
from pscluster.ps.wire_dtypes import CODES, decode, encode

ENCODED = ["bfloat16", "float16", "int8"]
RATIOS = {"bfloat16": 0.5, "float16": 0.5, "int8": 36 / 128}
ROWS, WIDTH = 1000, 32


def coded(name: str, values: Any) -> Any:
    """What comes of rows, (rows, width), that are sent."""
    rows = np.ascontiguousarray(values).reshape(len(values), -1)
    return decode(CODES[name], bytes(encode(CODES[name], rows)), *rows.shape).reshape(values.shape)


@pytest.mark.parametrize("name", ENCODED)
def test_reads(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, name: Any) -> None:
    """In functions they are encoded, whatever is read and however it is cut; outside they are exact."""
    initial = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    with strategy.scope():
        whole = Variable(initial, wire_dtype=name)
        cut = Variable(initial, wire_dtype=name, partitioner=FixedShardsPartitioner(3))
        columns = Variable(initial, wire_dtype=name, partitioner=lambda *_: [2, 2])
        exact, empty = Variable(initial), Variable(np.zeros((0, 4), np.float32), wire_dtype=name)
        scalar = Variable(np.float32(0.1), wire_dtype=name)
    ids, mask = np.array([[7, 999], [7, 0]]), np.arange(ROWS) % 3 == 1

    def step() -> Any:
        return [
            [
                variable.gather(ids),
                variable[mask],
                variable[3:700:2, 1:5],
                variable[5],
                variable[2, 3],
                variable.read_value(),
                embedding_lookup(variable, ids),
                variable.variables[0].read_value(),
            ]
            for variable in (whole, cut, columns)
        ]

    def together() -> Any:
        return [strategy.read([exact, whole, cut, scalar, empty]) for _ in range(2)]

    results = coordinator.fetch(coordinator.schedule(step), TIMEOUT)
    tolerance = np.abs(initial).max() / 127
    for values in results:
        first, masked, box, row, element, everything, looked_up, shard = values
        for got, wanted in (
            (first, initial[ids]),
            (masked, initial[mask]),
            (box, initial[3:700:2, 1:5]),
            (row, initial[5]),
            (element, initial[2, 3]),
            (everything, initial),
            (looked_up, initial[ids]),
            (shard, initial[: shard.shape[0], : shard.shape[1]]),
        ):
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, atol=tolerance)
            assert np.size(got) < 4 or not np.array_equal(got, wanted)
    np.testing.assert_array_equal(results[0][0], coded(name, initial[ids.reshape(-1)]).reshape(2, 2, WIDTH))
    np.testing.assert_array_equal(results[0][5], coded(name, initial.reshape(1, -1)).reshape(initial.shape))
    for values in coordinator.fetch(coordinator.schedule(together), TIMEOUT):
        np.testing.assert_array_equal(values[0], initial)
        np.testing.assert_array_equal(values[1], results[0][5])
        np.testing.assert_array_equal(values[2], results[1][5])
        assert values[3].shape == ()
        assert values[4].shape == (0, 4)

    def exactly() -> Any:
        with exact_reads():
            return [strategy.read([exact, whole]), whole.gather(ids)]

    (_, read), gathered = coordinator.fetch(coordinator.schedule(exactly), TIMEOUT)
    np.testing.assert_array_equal(read, initial)
    np.testing.assert_array_equal(gathered, initial[ids])
    for variable in (whole, cut, columns):
        np.testing.assert_array_equal(variable.numpy(), initial)
        np.testing.assert_array_equal(variable.gather(ids), initial[ids])
    (value,) = strategy.read([whole])
    np.testing.assert_array_equal(value, initial)


@pytest.mark.parametrize("name", ENCODED)
def test_pushes_add_up(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, name: Any) -> None:
    """The sum of many gradients is the true one within one quantum, of rows and of dense ones, cut or not."""
    with strategy.scope():
        tables = [
            Variable(np.zeros((50, WIDTH), np.float32), wire_dtype=name, partitioner=FixedShardsPartitioner(shards))
            for shards in (1, 3)
        ]
        dense = [
            Variable(np.zeros((40, 30), np.float32), wire_dtype=name, partitioner=FixedShardsPartitioner(shards))
            for shards in (1, 3)
        ]
        rule = optimizers.SGD(1.0)
    steps = 60

    def gradients(seed: int) -> tuple[Any, Any, Any]:
        random = np.random.default_rng(seed)
        ids = random.integers(0, 50, 64)
        return ids, random.normal(size=(64, WIDTH)).astype(np.float32), random.normal(size=(40, 30)).astype(np.float32)

    def step() -> None:
        for seed in range(steps):
            ids, rows, whole = gradients(seed)
            rule.apply_gradients([(IndexedSlices(rows, ids), table) for table in tables])
            rule.apply_gradients([(whole, variable) for variable in dense])

    coordinator.schedule(step)
    coordinator.join(TIMEOUT)
    table_sum, dense_sum = np.zeros((50, WIDTH)), np.zeros((40, 30))
    for seed in range(steps):
        ids, rows, whole = gradients(seed)
        np.add.at(table_sum, ids, rows)
        dense_sum += whole
    # Gradients of rows are sums of some normal numbers, rarely above 10; of what was left, at most a half more.
    quantum = {"bfloat16": 16 * 2**-8, "float16": 16 * 2**-11, "int8": 16 / 254}[name] + 1e-4
    for variable, total in [*((table, table_sum) for table in tables), *((one, dense_sum) for one in dense)]:
        error = np.abs(variable.numpy() + total)
        assert 0 < error.max() < quantum


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_top_k(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, name: Any) -> None:
    """Only the largest elements travel; optimizers see a dense gradient with zeros, and the others come later."""
    values = np.linspace(1, 2, 400, dtype=np.float32).reshape(20, 20)
    with strategy.scope():
        one, many = (Variable(np.zeros((20, 20), np.float32), wire_dtype=name, push_top_k=0.05) for _ in range(2))
        same = Variable(np.zeros((20, 20), np.float32))
        large = Variable(np.zeros((600, 1000), np.float32), wire_dtype=name, push_top_k=0.01)
        adam, sgd = optimizers.Adam(0.1), optimizers.SGD(1.0)

    def first() -> None:
        adam.apply_gradients([(values, one)])
        zeros = np.where(values > np.sort(values.reshape(-1))[-21], values, np.float32(0))
        adam.apply_gradients([(zeros, same)])
        sgd.apply_gradients([(np.arange(600_000, dtype=np.float32).reshape(600, 1000), large)])

    def others() -> None:
        for _ in range(40):
            sgd.apply_gradients([(values, many)])

    coordinator.schedule(first)
    coordinator.schedule(others)
    coordinator.join(TIMEOUT)
    assert np.count_nonzero(one.numpy()) == 20
    np.testing.assert_allclose(one.numpy(), same.numpy(), rtol=1e-5)
    np.testing.assert_allclose(adam.slot(one, "m").numpy(), adam.slot(same, "m").numpy(), rtol=0.01)
    np.testing.assert_allclose(-many.numpy() / 40, values, atol=0.8)
    pushed = large.numpy().reshape(-1)
    assert np.flatnonzero(pushed)[[0, -1]].tolist() == [594_000, 599_999]
    np.testing.assert_allclose(-pushed[594_000:], np.arange(594_000, 600_000), rtol=0.005)


def test_bytes(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """A gather and a push of rows of 32 take the share of bytes that the type promises, beside row numbers."""
    ids = np.arange(0, ROWS, 2)
    with strategy.scope():
        tables = {
            name: Variable(np.ones((ROWS, WIDTH), np.float32), wire_dtype=name)  # type: ignore[arg-type]
            for name in ("float32", *ENCODED)
        }
        sparse = Variable(np.zeros((ROWS, WIDTH), np.float32), push_top_k=0.01)
        rule = optimizers.SGD(0.1)

    def step() -> Any:
        moved = []
        for table in tables.values():
            before = strategy.traffic()
            table.gather(ids)
            pulled = strategy.traffic()
            rule.apply_gradients([(IndexedSlices(np.ones((len(ids), WIDTH), np.float32), ids), table)])
            moved.append(((pulled - before).pulled, (strategy.traffic() - pulled).pushed - 8 * len(ids)))
        before = strategy.traffic()
        rule.apply_gradients([(np.ones((ROWS, WIDTH), np.float32), sparse)])
        return moved, (strategy.traffic() - before).pushed

    (exact, *moved), dense = coordinator.fetch(coordinator.schedule(step), TIMEOUT)
    assert exact == (len(ids) * WIDTH * 4,) * 2
    for name, (pulled, pushed) in zip(ENCODED, moved, strict=True):
        assert (pulled / exact[0], pushed / exact[1]) == (RATIOS[name], RATIOS[name])
    assert dense == 320 * 8


@pytest.mark.parametrize("name", ENCODED)
def test_large_requests(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, name: Any) -> None:
    """What is too large for one message is read and pushed in frames, in the same encoding."""
    rows = 5 * SESSION_BYTES // 4 // WIDTH + 7
    initial = np.random.default_rng(2).normal(size=(rows, WIDTH)).astype(np.float32)
    with strategy.scope():
        table = Variable(initial, wire_dtype=name)
        rule = optimizers.SGD(1.0)

    def step() -> Any:
        ids = np.arange(rows - 1, -1, -1)
        whole, gathered, part = table.read_value(), table.gather(ids), table[3:]
        rule.apply_gradients([(initial, table)])
        rule.apply_gradients([(IndexedSlices(initial, np.arange(rows)), table)])
        return whole, gathered[::-1], part

    whole, gathered, part = coordinator.fetch(coordinator.schedule(step), TIMEOUT)
    np.testing.assert_array_equal(whole, coded(name, initial.reshape(1, -1)).reshape(initial.shape))
    np.testing.assert_array_equal(gathered, coded(name, initial))
    np.testing.assert_array_equal(part, coded(name, initial[3:].reshape(1, -1)).reshape(part.shape))
    np.testing.assert_allclose(table.numpy(), -initial, atol=0.1)


def test_all_but_gradients_and_reads_is_exact(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy
) -> None:
    """Assignments, additions, scatters and slots are what they were."""
    values = np.random.default_rng(1).normal(size=(8, WIDTH)).astype(np.float32)
    with strategy.scope():
        table = Variable(np.zeros((8, WIDTH), np.float32), wire_dtype="int8", push_top_k=0.5)
        rule = optimizers.Adam(0.1)

    def step() -> Any:
        table.assign(values)
        table.assign_add(values, at=slice(0, 8))
        table.scatter_add(IndexedSlices(values[:2], [1, 5]))
        rule.apply_gradients([(np.zeros((8, WIDTH), np.float32), table)])
        return rule.slot(table, "m").read_value()

    coordinator.fetch(coordinator.schedule(step), TIMEOUT)
    wanted = 2 * values
    wanted[[1, 5]] += values[:2]
    np.testing.assert_array_equal(table.numpy(), wanted)


@pytest.mark.parametrize(("name", "kind"), [*((name, int) for name in ENCODED), ("int8", str)])
def test_embedding_tables(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, name: Any, kind: type[int] | type[str]
) -> None:
    """Lookups are encoded in functions, initial values, too, and gradients add up by id; scatters are exact."""
    ids: Any = np.concatenate([np.arange(-20, 20), [(1 << 63) - 1, -(1 << 63)]])
    if kind is str:
        ids = texts_of(np.arange(-20, 22))
    id_bytes = 8 if kind is int else max(len(text.encode()) for text in ids.tolist())
    with strategy.scope():
        table, admitting = (
            EmbeddingTable(
                WIDTH,
                ids=kind,
                initializer=initializers.RandomUniform(seed=1),
                wire_dtype=name,
                admission=admission,
            )
            for admission in (None, table_policies.SeenTimes(3))
        )
        rule = optimizers.SGD(1.0)
    initial, rows = table.lookup(ids), np.random.default_rng(0).normal(size=(len(ids), WIDTH)).astype(np.float32)

    def step() -> Any:
        before = strategy.traffic()
        looked_up = table.lookup(ids)
        pulled = strategy.traffic()
        with exact_reads():
            exact = table.lookup(ids)
        exactly = strategy.traffic()
        rule.apply_gradients([(IndexedSlices(rows, ids), table)])
        pushed = (strategy.traffic() - exactly).pushed - id_bytes * len(ids)
        for _ in range(29):
            rule.apply_gradients([(IndexedSlices(rows, ids), table), (IndexedSlices(rows, ids), admitting)])
        return looked_up, exact, (pulled - before).pulled / initial.nbytes, pushed / initial.nbytes

    looked_up, exact, *ratios = coordinator.fetch(coordinator.schedule(step), TIMEOUT)
    np.testing.assert_array_equal(looked_up, coded(name, initial))
    np.testing.assert_array_equal(exact, initial)
    assert ratios == [RATIOS[name]] * 2
    assert len(table) == len(admitting) == len(ids)
    quantum = {"bfloat16": 8 * 2**-8, "float16": 8 * 2**-11, "int8": 8 / 254}[name] + 1e-4
    assert 0 < np.abs(table.lookup(ids) - initial + 30 * rows).max() < quantum
    assert 0 < np.abs(admitting.lookup(ids) - initial + 27 * rows).max() < 4 * quantum, "but for what was not admitted"
    table.scatter_update(IndexedSlices(rows, ids))
    np.testing.assert_array_equal(table.lookup(ids), rows)
    with strategy.scope(), pytest.raises(MisuseError, match="'t': wire_dtype is 'int4'; it must be one of 'float32'"):
        EmbeddingTable(4, name="t", wire_dtype="int4")  # type: ignore[arg-type]


def test_values_that_the_type_cannot_hold(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy) -> None:
    """The error of a push, or of a read by ids, names variable, row and value; of other reads, variable and value."""
    with strategy.scope():
        table = Variable(np.ones((10, 4), np.float32), name="table", wire_dtype="float16")
        other = Variable(np.ones(4, np.float32), name="other")
        hashed = Variable(np.ones((9, 4), np.float32), name="h", wire_dtype="float16", partitioner=HashPartitioner(3))
        grows = EmbeddingTable(4, ids=str, name="grows", wire_dtype="float16")
        rule = optimizers.SGD(1.0)

    def push() -> None:
        slices = IndexedSlices(np.full((1, 4), 1e6, np.float32), [7])
        rule.apply_gradients([(np.ones(4, np.float32), other), (slices, table)])

    coordinator.schedule(push)
    message = r"'table': the gradient of row 7, .* value 1e\+06, which float16"
    with pytest.raises(InvalidUpdateError, match=message) as caught:
        coordinator.join(TIMEOUT)
    assert isinstance(caught.value, FunctionError)
    assert not caught.value.partly_applied
    assert other.numpy().tolist() == [1] * 4
    assert rule.iterations == 0
    table.assign(1e5, at=3)
    hashed.assign(1e5, at=5)
    grows.scatter_update(IndexedSlices(np.full((1, 4), 1e5), ["tea"]))
    for read, named in (
        (lambda: table.gather([0, 3]), "'table', row 3,"),
        (table.read_value, "'table'"),
        (lambda: hashed.gather([8, 5, 0, 1, 2, 3]), "'h', row 5,"),
        (lambda: grows.lookup(["milk", "tea"]), "'grows', row 'tea',"),
    ):
        coordinator.schedule(read)
        with pytest.raises(InvalidUpdateError, match=rf"{named} has the value 100000, which float16 .*exact_reads"):
            coordinator.join(TIMEOUT)
    assert table[3].tolist() == [1e5] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire_dtype": "int4"}, "wire_dtype is 'int4'; it must be one of 'float32', 'bfloat16', 'float16', 'int8'"),
        ({"wire_dtype": np.int8}, "it must be one of"),
        ({"push_top_k": 0}, "push_top_k is 0; it must be .*above 0"),
        ({"push_top_k": 1.5}, "push_top_k is 1.5"),
        ({"wire_dtype": "int8", "dtype": np.float64}, "'v' is float64, and only float32 has a wire_dtype"),
        ({"push_top_k": 0.1, "dtype": np.int32}, "'v' is int32, and only float32 has a wire_dtype or push_top_k"),
    ],
)
def test_options_that_describe_nothing(strategy: ParameterServerStrategy, options: Any, message: str) -> None:
    """The error names the variable, the value and what there is; nothing was made."""
    with strategy.scope():
        with pytest.raises(MisuseError, match=message):
            Variable(0, name="v", shape=[4], **{"dtype": np.float32, **options})
        with pytest.raises(MisuseError, match=r"a shard of 8,589,934,592 elements.*cut it into more shards"):
            Variable(initializers.Zeros(), name="v", shape=(1 << 17, 1 << 16), push_top_k=0.1)
        Variable(np.zeros(4), name="v", dtype=np.float32, wire_dtype="float32", push_top_k=1)


def test_synchronous_steps(cluster: LocalCluster) -> None:
    """They combine gradients exactly, so that a variable of theirs can't be encoded, but one beside them can."""
    with SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            with pytest.raises(MisuseError, match="'v' has wire_dtype or push_top_k, and is"):
                Variable(np.zeros(4, np.float32), name="v", wire_dtype="int8")
            table = Variable(np.zeros((9, WIDTH), np.float32), wire_dtype="int8", consistency="async")
            dense = Variable(np.zeros(WIDTH, np.float32))
            rule = optimizers.SGD(1.0)
        values = np.linspace(0.1, 1, WIDTH, dtype=np.float32)

        def step() -> Any:
            rows = table.gather([3])
            rule.apply_gradients([(IndexedSlices(values[np.newaxis], [3]), table), (values, dense)])
            return rows.shape

        strategy.run(step, steps=10, timeout=TIMEOUT)
        np.testing.assert_allclose(-table.numpy()[3] / 20, values, atol=1 / 127)
        np.testing.assert_allclose(-dense.numpy() / 20, values, rtol=1e-5)


def test_bounded_staleness(cluster: LocalCluster) -> None:
    """Under a bound the replicas' updates are applied as they come, and may be encoded."""
    with SynchronousStrategy(cluster, staleness=1) as strategy:
        with strategy.scope():
            dense = Variable(np.zeros(WIDTH, np.float32), wire_dtype="int8", push_top_k=0.5)
            rule = optimizers.SGD(1.0)
        values = np.linspace(0.5, 1, WIDTH, dtype=np.float32)

        def step() -> None:
            strategy.read([dense])
            rule.apply_gradients([(values, dense)], examples=1)

        strategy.run(step, steps=20, timeout=TIMEOUT)
        np.testing.assert_allclose(-dense.numpy() / 20, values, atol=0.2)


def test_checkpoints_and_evaluations_on_copies(strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """A checkpoint is exact; an evaluation that reads copies while training continues reads them as training does."""
    values = np.random.default_rng(4).normal(size=(50, WIDTH)).astype(np.float32)
    with strategy.scope():
        table = Variable(values, name="table", wire_dtype="int8")
        rule = optimizers.SGD(1.0)
    coordinator = ClusterCoordinator(strategy)
    path = str(tmp_path / "one")
    Checkpoint(strategy).write(path)
    rule.apply_gradients([(np.ones((50, WIDTH), np.float32), table)])
    Checkpoint(strategy).read(path)
    np.testing.assert_array_equal(table.numpy(), values)

    def step(batch: Any) -> tuple[Any]:
        with exact_reads():
            exact = table.gather(batch)
        return (np.abs(table.gather(batch) - exact).max(),)

    data = coordinator.distribute_dataset(np.arange(50)).batch(25)
    for concurrent in (False, True):
        total = coordinator.evaluate(step, data, {"error": metrics.Sum()}, concurrent=concurrent, timeout=TIMEOUT)
        assert 0 < total["error"] < 8 / 127
