"""Variables whose rows are cut by modulo or hash, on real servers: in all that they do, as in contiguous shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from tests.coordinator.checkpoints.test_checkpoints import Model
from tests.core.metrics.scraping import addresses, scrape
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    Checkpoint,
    ClusterCoordinator,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    ModuloPartitioner,
    ParameterServerStrategy,
    SavedVariables,
    Variable,
    embedding_bag,
    embedding_lookup,
    errors,
    initializers,
    optimizers,
)
from pscluster.coordinator.checkpoints import tools
from pscluster.ps.handles.variables.blocks import BlockUpdate, read_blocks, shard_updates
from pscluster.ps.spec import partition_of
from pscluster.ps.storage.files.tensor_files import CHUNK_BYTES
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]
CUTS = [ModuloPartitioner(2), ModuloPartitioner(3), HashPartitioner(3), HashPartitioner(2, seed=5)]
ROWS = 23


@pytest.fixture(params=CUTS, ids=str)
def cut(request: pytest.FixtureRequest) -> Any:
    """How variables are cut."""
    return request.param


Make = Callable[..., Variable]


@pytest.fixture
def make(strategy: ParameterServerStrategy, cut: Any) -> Make:
    """Make a variable that is cut so."""

    def variable(value: Any, **arguments: Any) -> Variable:
        with strategy.scope():
            return Variable(value, **({"partitioner": cut} | arguments))

    return variable


def test_indexing_and_assigning(make: Make) -> None:
    """Whole, boxes, masks, and rows: as NumPy's arrays, of several ranks, and of a type that is no NumPy type."""
    generator = np.random.default_rng(0)
    indices: list[Any] = [
        ...,
        3,
        -1,
        slice(2, 17, 3),
        slice(None, None, -2),
        slice(5, 5),
        [4, 0, 4, 22],
        np.arange(ROWS) % 3 == 1,
    ]
    columns: list[Any] = [(slice(None), 1), (slice(4, 9), slice(None, None, -1)), (7, ..., 0), (None, 2), (20, 1)]
    for shape, dtype in (((ROWS,), np.int64), ((ROWS, 4), np.float32), ((ROWS, 3, 2), ml_dtypes.bfloat16)):
        twin = generator.integers(0, 100, shape).astype(dtype)
        variable = make(twin)
        for index in indices + (columns if len(shape) > 1 else []):
            np.testing.assert_array_equal(variable[index], twin[index])
            if isinstance(index, list) or (isinstance(index, tuple) and None in index):
                continue  # duplicates, and new axes
            values = generator.integers(0, 100, twin[index].shape).astype(dtype)
            if not isinstance(index, np.ndarray):
                variable[index] = values
                twin[index] = values
                variable.assign_add(2, at=index)
                twin[index] += np.asarray(2, dtype)
            np.testing.assert_array_equal(variable.numpy(), twin)
        variable.assign(twin * np.asarray(2, dtype)).assign_sub(twin).assign_add(1)
        np.testing.assert_array_equal(variable.numpy(), twin + np.asarray(1, dtype))


def test_rows(make: Make) -> None:
    """Lookups of any shape, bags, and all updates of rows."""
    twin = np.arange(ROWS * 2, dtype=np.float64).reshape(ROWS, 2)
    table, ids = make(twin), np.array([[5, 22, 5], [0, 1, 11]])
    np.testing.assert_array_equal(table.gather(ids), twin[ids])
    np.testing.assert_array_equal(embedding_lookup(table, ids), twin[ids])
    np.testing.assert_allclose(embedding_bag(table, ids), twin[ids].mean(axis=1))
    values, flat = np.arange(12.0).reshape(6, 2), ids.reshape(-1)
    for update, function in (("add", np.add), ("sub", np.subtract), ("min", np.minimum), ("mul", np.multiply)):
        getattr(table, f"scatter_{update}")(IndexedSlices(values, flat))
        function.at(twin, flat, values)
        np.testing.assert_allclose(table.numpy(), twin)
    table.scatter_update(IndexedSlices(values, flat))
    twin[flat] = values
    np.testing.assert_allclose(table.numpy(), twin)
    batch = np.arange(ROWS).reshape(ROWS, 1) % 2
    table.batch_scatter_update(IndexedSlices(np.full((ROWS, 1), -1.0), batch))
    np.put_along_axis(twin, batch, -1.0, axis=1)
    np.testing.assert_allclose(table.numpy(), twin)
    with pytest.raises(errors.InvalidUpdateError, match="row id 23"):
        table.gather([23])


def by_block(shape: Any, dtype: Any, partition_shape: Any, partition_offset: Any) -> Array:
    return np.arange(np.prod(shape), dtype=dtype).reshape(shape)[partition_offset[0] :][: partition_shape[0]]


def test_initial_values(make: Make, cut: Any) -> None:
    """Rows begin with the values of contiguous shards, from the script or the servers; also in pieces."""
    contiguous = FixedShardsPartitioner(cut.num_shards)
    for initial in (
        initializers.RandomNormal(seed=1),
        initializers.GlorotUniform(seed=2),
        initializers.Ones(),
        by_block,
        lambda shape, dtype: np.arange(np.prod(shape), dtype=dtype).reshape(shape),
        lambda shape, dtype, **_: np.arange(np.prod(shape), dtype=dtype).reshape(shape),
    ):
        one, other = (make(initial, shape=(ROWS, 3), partitioner=by) for by in (cut, contiguous))
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    rows = (9 << 20) // (4 * 1024)
    large = make(initializers.RandomUniform(seed=3), shape=(rows, 1024))
    ids = [0, 1, rows // 2, rows - 1]
    np.testing.assert_array_equal(large[ids], initializers.RandomUniform(seed=3)((rows, 1024))[ids])
    assert make(initializers.Zeros(), shape=(0, 2)).shape == (0, 2)


RULES: dict[str, tuple[Callable[[], optimizers.Optimizer], tuple[str, ...]]] = {
    "sgd": (lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True), ("momentum",)),
    "adagrad": (lambda: optimizers.Adagrad(0.1), ("accumulator",)),
    "adam": (lambda: optimizers.Adam(0.1, use_ema=True), ("m", "v")),
    "adamw": (lambda: optimizers.AdamW(0.1), ("m", "v")),
    "rmsprop": (lambda: optimizers.RMSprop(0.1, centered=True), ("velocity", "average_gradient")),
    "ftrl": (lambda: optimizers.Ftrl(0.1), ("accumulator", "linear")),
    "adadelta": (lambda: optimizers.Adadelta(0.1), ("accumulated_grad", "accumulated_delta_var")),
    "lion": (lambda: optimizers.Lion(0.1), ("m",)),
}
"""The optimizers, and their slots."""


def test_gradients_through_every_optimizer(strategy: ParameterServerStrategy, make: Make, cut: Any) -> None:
    """Dense ones and those of rows, from functions on workers: values and slots as in contiguous shards, by row."""
    start = np.random.default_rng(1).normal(size=(ROWS, 3)).astype(np.float32)
    with strategy.scope():
        rules = [make_rule() for make_rule, _ in RULES.values()]
    pairs = [[make(start, partitioner=by) for by in (cut, FixedShardsPartitioner(cut.num_shards))] for _ in rules]

    def step(seed: int) -> None:
        generator = np.random.default_rng(seed)
        dense = generator.normal(size=(ROWS, 3)).astype(np.float32)
        rows = IndexedSlices(generator.normal(size=(5, 3)).astype(np.float32), generator.integers(0, ROWS, 5))
        for rule, pair in zip(rules, pairs, strict=True):
            for variable in pair:
                rule.apply_gradients([(dense if seed % 2 else rows, variable)])

    coordinator = ClusterCoordinator(strategy)
    for seed in range(4):
        coordinator.schedule(step, args=(seed,))
        coordinator.join(TIMEOUT)
    for rule, (one, other), (_, slots) in zip(rules, pairs, RULES.values(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), str(rule))
        assert not np.array_equal(one.numpy(), start)
        for slot in slots:
            np.testing.assert_array_equal(rule.slot(one, slot).numpy(), rule.slot(other, slot).numpy())
            np.testing.assert_array_equal(rule.slot(one, slot)[3:9, 1], rule.slot(other, slot)[3:9, 1])
    averages = [rules[2].average(variable).numpy() for variable in pairs[2]]
    np.testing.assert_array_equal(averages[0], averages[1])


def test_shards(make: Make, cut: Any) -> None:
    """Each says which rows it has, in which order, and can be read and replaced alone."""
    twin = np.arange(ROWS * 2.0).reshape(ROWS, 2)
    table = make(twin)
    shards = table.variables
    assert sorted(row for shard in shards for row in shard.row_ids.tolist()) == list(range(ROWS))
    assert max(len(shard.row_ids) for shard in shards) - min(len(shard.row_ids) for shard in shards) <= 1
    for shard in shards:
        np.testing.assert_array_equal(shard.read_value(), twin[shard.row_ids])
    shards[1].assign(-1.0)
    twin[shards[1].row_ids] = -1
    np.testing.assert_array_equal(table.numpy(), twin)
    assert make(twin, partitioner=type(cut)(1)).partition == make(twin, partitioner=None).partition


def test_only_where_it_is_named(strategy: ParameterServerStrategy, make: Make) -> None:
    """Variables without a partitioner stay whole, scalars too; a strategy may name one for all."""
    with strategy.scope():
        assert Variable(np.zeros(4)).num_shards == 1
    assert make(1.0).num_shards == 1


def test_blocks_of_meshes(make: Make) -> None:
    """They are read wherever their rows are; none is a shard, so that none can be updated."""
    twin = np.arange(ROWS * 2.0).reshape(ROWS, 2)
    table = make(twin)
    block = table.partition.block(0)
    np.testing.assert_array_equal(read_blocks([(table, block)])[0], twin[block.slices])
    with pytest.raises(errors.MisuseError, match="is not cut as the layout of its global array is"):
        shard_updates([BlockUpdate(ps_pb2.ASSIGN, table, block, twin[block.slices])])


def test_what_can_not_be_cut_is_refused(strategy: ParameterServerStrategy) -> None:
    """Before anything is made: numbers out of range, and another axis."""
    for by in (ModuloPartitioner, HashPartitioner):
        for shards in (0, 1025, 1.5):
            with pytest.raises(errors.ConfigurationError, match="num_shards"):
                by(shards)  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigurationError, match=f"{by.__name__} cuts rows, on axis 0, not along axis 1"):
            by(2)((3, 3), np.dtype(np.float32), axis=1)
    for seed in (-1, 1 << 64, "a"):
        with pytest.raises(errors.ConfigurationError, match="seed"):
            HashPartitioner(2, seed=seed)  # type: ignore[arg-type]


def test_a_spec_that_makes_no_sense() -> None:
    """An order of rows that a peer names is checked, like all else."""
    spec = ps_pb2.VariableSpec(id=1, name="v", shape=[5], owners=[0, 0], splits=[ps_pb2.AxisSplit(ends=[3, 5])])
    spec.row_order.kind = "hash"
    assert partition_of(spec).order == HashPartitioner(2).row_order
    spec.row_order.kind = "md5"
    with pytest.raises(errors.ProtocolError, match="variable 'v': there is no order of rows 'md5'"):
        partition_of(spec)
    spec.row_order.kind, spec.splits[0].ends[0] = "modulo", 1
    with pytest.raises(errors.ProtocolError, match="variable 'v': axis 0: by modulo, pieces end at"):
        partition_of(spec)


@pytest.mark.parametrize("servers", [2, 4])
def test_skewed_rows_are_spread_over_servers(servers: int) -> None:
    """By Zipf's law (1.1): no server reads more than 1.3 times the mean of distinct rows; with ranges one does."""
    rows, draw = 100_000, np.random.default_rng(0)
    weights = np.arange(1, rows + 1) ** -1.1
    with LocalCluster(servers, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        cuts = {"modulo": ModuloPartitioner, "hash": HashPartitioner, "range": FixedShardsPartitioner}
        with strategy.scope():
            tables = [Variable(0.0, shape=(rows, 1), name=name, partitioner=by(servers)) for name, by in cuts.items()]
        for _ in range(3):
            ids = draw.choice(rows, 4096, p=weights / weights.sum())
            embedding_lookup(tables, [ids] * len(tables))
        scraped = {role: scrape(address) for role, address in addresses(strategy).items() if role.startswith("ps")}
    assert len(scraped) == servers
    worst = {}
    for name in cuts:
        shares = [each.value("pscluster_ps_variable_rows_read_total", variable=name) for each in scraped.values()]
        worst[name] = max(shares) / (sum(shares) / servers)
    assert max(worst["modulo"], worst["hash"]) < 1.3 < 1.6 < worst["range"]


# Checkpoints

ALL_CUTS = [None, FixedShardsPartitioner(3), lambda shape, dtype: [2, 2][: len(shape)], *CUTS]


@pytest.mark.parametrize("old", [1, 3, 5])
def test_checkpoints_between_all_cuts(cluster: LocalCluster, tmp_path: Path, old: int) -> None:
    """Values, slots and averages of any cut come back in any other; offline, rows are in the order of their ids."""
    with ParameterServerStrategy(cluster, ALL_CUTS[old], placement="round_robin") as strategy:
        model = Model(strategy)
        for seed in range(3):
            model.train(seed)
        facts = model.facts()
        values = {variable.name: variable.numpy() for variable in model.variables}
        path = Checkpoint(strategy).write(str(tmp_path / "checkpoint"))
        model.train(7)
        Checkpoint(strategy).read(path)
        assert model.facts() == facts
    saved = SavedVariables(path)
    for name, value in values.items():
        np.testing.assert_array_equal(saved[name], value)
    tools.verify(path)
    tools.merge(path, str(tmp_path / "merged"))
    data = (tmp_path / "merged" / "model-00001-of-00001.safetensors").read_bytes()
    for name in ("dense", "table", "half"):
        assert values[name].tobytes() in data
    by = getattr(ALL_CUTS[old], "row_order", None)
    assert by is None or f"by {by.kind}" in tools.inspect(path)
    for new in ALL_CUTS:
        with ParameterServerStrategy(cluster, new) as strategy:
            other = Model(strategy)
            Checkpoint(strategy).read(path)
            assert other.facts() == facts


def test_a_merged_table_of_many_chunks(cluster: LocalCluster, tmp_path: Path) -> None:
    """Each shard is read, and the file written, in several pieces."""
    rows = 5 * CHUNK_BYTES // 4096
    with ParameterServerStrategy(cluster, HashPartitioner(2)) as strategy:
        with strategy.scope():
            Variable(initializers.RandomUniform(seed=3), shape=(rows, 1024), name="table")
        path = Checkpoint(strategy).write(str(tmp_path / "checkpoint"))
    tools.merge(path, str(tmp_path / "merged"))
    data = (tmp_path / "merged" / "model-00001-of-00001.safetensors").read_bytes()
    expected = initializers.RandomUniform(seed=3)((rows, 1024)).tobytes()
    assert data[-len(expected) :] == expected
