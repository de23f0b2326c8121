"""Embedding tables on real servers against a dictionary: through kills, moves and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.core.metrics.scraping import addresses, scrape
from tests.faults.support import Job, running_job
from tests.faults.table_chaos import TableChaos
from tests.faults.test_ps_healing import kill
from tests.ps.strings import texts_of
from tests.waiting import until

from pscluster.coordinator import (
    EmbeddingTable,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    SavedVariables,
    ShardedVariable,
    SynchronousStrategy,
    Variable,
    embedding_bag,
    embedding_lookup,
    initializers,
    metrics,
    optimizers,
    table_policies,
)
from pscluster.coordinator.api import Checkpoint
from pscluster.coordinator.checkpoints import tools
from pscluster.core.errors import (
    CheckpointMismatchError,
    InvalidUpdateError,
    MisuseError,
    PsClusterError,
    UnavailableError,
)
from pscluster.core.transport.frames import view
from pscluster.ps.client.reads.plans import ShardRead
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.v1 import ps_pb2

DIM = 4
INITIAL = initializers.RandomUniform(-1.0, 1.0, seed=3)
MOST = (1 << 63) - 1
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """Two servers with logs."""
    with running_job(num_ps=2, num_workers=2, durability="log") as job:
        yield job


@pytest.fixture
def table(job: Job) -> EmbeddingTable:
    with job.strategy.scope():
        return EmbeddingTable(DIM, capacity=5000, initializer=INITIAL)


def move_all(job: Job, table: EmbeddingTable) -> None:
    """Move each shard to the other server, once that has returned: a move does not wait for it."""

    def moved(shard: Any, target: int) -> bool:
        try:
            return job.strategy.move_shard(shard, target) is not None
        except UnavailableError:
            return False

    for shard in table.variables:
        target = 1 - shard.owners[0]
        until(partial(moved, shard, target), f"{shard.name} is on ps {target}")


def initial_rows(job: Job, ids: npt.ArrayLike) -> Array:
    """The rows of these ids that have had no update, by a table of one shard."""
    with job.strategy.scope():
        return EmbeddingTable(DIM, capacity=10, initializer=INITIAL, num_shards=1).lookup(ids)


@pytest.mark.timeout(120)
def test_it_is_a_dictionary_through_kills_moves_and_checkpoints(job: Job, tmp_path: Path) -> None:
    """Also tables that are full, and whose rows expire or have to be admitted (`benchmarks/chaos_tables.py`)."""
    chaos = TableChaos(job.strategy, job.cluster, tmp_path, seed=1)
    chaos.run(16_000, kill_every=400, move_every=150, save_every=250, progress=lambda: None)
    counts = chaos.counts
    assert min(counts.kills, counts.moves, counts.saves, counts.restores) > 0
    assert counts.dropped > 100
    assert job.strategy.lost_updates() == {}


def test_initial_values_are_the_same_however_it_is_cut(job: Job, table: EmbeddingTable) -> None:
    """They depend on the id alone, and lookups make no rows."""
    ids = np.array([[0, -1, 5, MOST], [5, 5, -MOST - 1, 77]])
    rows = table.lookup(ids)
    assert rows.shape == (2, 4, DIM)
    # On whichever servers have the least: the test before has moved shards.
    assert f"dim={DIM} ids=int capacity={table.capacity} on /job:ps/task:" in repr(table)
    np.testing.assert_array_equal(rows, initial_rows(job, ids))
    np.testing.assert_array_equal(rows, embedding_lookup([table, table], [ids, ids])[1])
    np.testing.assert_allclose(embedding_bag(table, ids), rows.mean(1), rtol=1e-6)
    assert table.lookup([]).shape == (0, DIM)
    assert len(table) == 0
    table.scatter_add(IndexedSlices(np.zeros((1, DIM)), [5]))
    assert len(table) == 1
    np.testing.assert_array_equal(table.lookup(ids), rows)
    assert table.shape[1] == table.dim == DIM
    assert table.capacity is not None
    assert table.capacity >= 5000


@pytest.mark.parametrize(
    ("ids", "make"),
    [
        (int, lambda: optimizers.SGD(0.1, momentum=0.9)),
        (str, lambda: optimizers.Adagrad(0.1)),
        (str, lambda: optimizers.AdamW(0.1, weight_decay=0.1, clipnorm=1.0, use_ema=True)),
        (int, lambda: optimizers.Ftrl(0.1)),
        (int, lambda: optimizers.Lion(0.1, nonfinite="refuse")),
    ],
)
def test_optimizers_do_as_with_a_variable(job: Job, ids: Any, make: Callable[[], optimizers.Optimizer]) -> None:
    """A variable whose rows begin as the table's gets the same values. Ids may look like NaN."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, ids=ids, capacity=5000, initializer=INITIAL, num_shards=1)
        ids = np.array([3, -1, 0x7FA0_0001_7FA0_0001, MOST, 9]) if ids is int else texts_of(np.arange(5))
        dense = Variable(table.lookup(ids))
        optimizer = make()
    rng = np.random.default_rng(0)
    for _ in range(5):
        rows = rng.integers(0, 5, 7)
        gradient = rng.normal(size=(7, DIM)).astype(np.float32)
        optimizer.apply_gradients([(IndexedSlices(gradient, rows), dense)])
        optimizer.apply_gradients([(IndexedSlices(gradient, ids[rows]), table)])
        np.testing.assert_allclose(table.lookup(ids), dense.numpy(), rtol=1e-6)
    with pytest.raises(MisuseError, match="slots and averages can't be read"):
        optimizer.slot(table, "m")


@pytest.mark.timeout(60)
def test_a_table_has_an_optimizer_of_its_own(job: Job) -> None:
    """Whichever optimizer is called applies its own variables, and the table's applies the table, on workers, too."""
    ids = np.array([4, -9])
    with job.strategy.scope():
        own = optimizers.Adagrad(0.5, clipvalue=1.0, nonfinite="refuse", name="own")
        sgd = optimizers.SGD(1.0, name="of others")
        table = EmbeddingTable(DIM, initializer=INITIAL, optimizer=own)
        plain = EmbeddingTable(DIM, initializer=INITIAL)
        dense = Variable(table.lookup(ids))
    assert table.optimizer is not None
    assert (table.optimizer.name, plain.optimizer) == ("own", None)

    def step() -> None:
        gradient = np.full((2, DIM), 5.0, np.float32)
        sgd.apply_gradients([(IndexedSlices(gradient, ids), table), (IndexedSlices(gradient, ids), plain)])
        own.apply_gradients([(gradient, dense)])

    begun = plain.lookup(ids)
    job.coordinator.schedule(step).fetch()
    step()
    np.testing.assert_allclose(table.lookup(ids), dense.numpy(), rtol=1e-6)
    np.testing.assert_allclose(plain.lookup(ids), begun - 10, rtol=1e-6)
    table.apply_gradients(IndexedSlices(np.ones((2, DIM), np.float32), ids))
    assert own.iterations == 3
    before = table.lookup(ids), plain.lookup(ids)
    rows = IndexedSlices(np.full((2, DIM), np.nan, np.float32), ids)
    with pytest.raises(InvalidUpdateError, match=r"NaN or infinity .*nothing was applied"):
        sgd.apply_gradients([(IndexedSlices(np.ones((2, DIM)), ids), plain), (rows, table)])
    np.testing.assert_array_equal((table.lookup(ids), plain.lookup(ids)), before)
    with pytest.raises(MisuseError, match="has no optimizer of its own: make it with optimizer="):
        plain.apply_gradients(rows)


@pytest.mark.timeout(120)
def test_functions_count_once(job: Job, table: EmbeddingTable) -> None:
    """Workers find the table by its handle; each function counts once, though servers and workers die."""
    with job.strategy.scope():
        sgd = optimizers.SGD(1.0)
    ids = np.arange(0, 100, 7)

    def step(shift: int) -> int:
        before = table.lookup(ids + shift)
        sgd.apply_gradients([(IndexedSlices(np.full((2 * len(ids), DIM), -0.5), np.tile(ids + shift, 2)), table)])
        return len(before)

    begun = table.lookup(ids)
    values = [job.coordinator.schedule(step, args=(number % 2,)) for number in range(60)]
    job.until_done(values, 20)
    kill(job, 1)
    job.kill(0)
    job.join()
    assert len(table) == 2 * len(ids)
    np.testing.assert_allclose(table.lookup(ids), begun + 30, rtol=1e-5)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ids", [int, str])
def test_checkpoints_fit_any_number_of_shards(
    cluster: LocalCluster, tmp_path: Path, ids: type[int] | type[str]
) -> None:
    """Slots come along: the next gradients do what they would have done. A smaller table is refused.

    So is one with ids of another kind, or shorter ones; longer ones are taken. Ids without a row begin as they did,
    with the seed that the table's name gives, since none is given.
    """
    some = texts_of(np.arange(50)) if ids is str else np.arange(50) * 0x7777_7777
    gradients = IndexedSlices(np.ones((50, DIM), np.float32), some)

    def build(strategy: ParameterServerStrategy, num_shards: int, capacity: int = 100, **more: Any) -> Any:
        of = {"ids": ids, "max_id_bytes": None if ids is int else 100 if num_shards == 7 else 64} | more
        with strategy.scope():
            made = initializers.RandomUniform(-1.0, 1.0)
            table = EmbeddingTable(DIM, capacity=capacity, initializer=made, name="t", num_shards=num_shards, **of)
            return table, optimizers.Adam(0.1, name="adam")

    path = tmp_path / "first"
    with ParameterServerStrategy(cluster) as strategy:
        table, adam = build(strategy, 3)
        for _ in range(3):
            adam.apply_gradients([(gradients, table)])
        Checkpoint(strategy).write(str(path))
        saved, unseen = (table.lookup(wanted) for wanted in (gradients.indices, [ids(-2)]))
        with strategy.scope():
            other = EmbeddingTable(DIM, initializer=initializers.RandomUniform(-1.0, 1.0), ids=ids, name="another")
        assert (other.lookup([ids(-2)]) != unseen).all()
        strategy.delete_variable(other)
        assert f"50 rows of {DIM} " in tools.inspect(str(path))
        assert f"rows of {DIM} " in strategy.placement()
        stored, values = SavedVariables(path).rows("t")
        np.testing.assert_array_equal(table.lookup(stored), values)
        np.testing.assert_array_equal(np.sort(stored), np.sort(some))
        adam.apply_gradients([(gradients, table)])
        later = table.lookup(gradients.indices)
        Checkpoint(strategy).read(str(path))
        assert len(table) == 50
        np.testing.assert_array_equal(table.lookup(gradients.indices), saved)
        table.scatter_add(IndexedSlices(np.ones((1, DIM)), [ids(-1)]))
        assert len(table) == 51
    others: list[tuple[dict[str, Any], str]] = [({"ids": str, "max_id_bytes": 50}, "strings of up to 56 bytes")]
    if ids is str:
        others.append(({"ids": int, "max_id_bytes": None}, "int64"))
    for changed, kind in others:
        with ParameterServerStrategy(cluster) as strategy:
            table, adam = build(strategy, 2, **changed)
            with pytest.raises(CheckpointMismatchError, match=f"'t' has ids that are {kind}, but (strings|int64)"):
                Checkpoint(strategy).read(str(path))
            assert len(table) == 0
    for num_shards in (1, 2, 7):
        with ParameterServerStrategy(cluster) as strategy:
            table, adam = build(strategy, num_shards, max_bytes=60 * 120)
            Checkpoint(strategy).read(str(path))
            assert len(table) == 50
            np.testing.assert_array_equal(table.lookup(gradients.indices), saved)
            np.testing.assert_array_equal(table.lookup([ids(-2)]), unseen)
            adam.apply_gradients([(gradients, table)])
            np.testing.assert_allclose(table.lookup(gradients.indices), later, rtol=1e-6)
    with ParameterServerStrategy(cluster) as strategy:
        table, _ = build(strategy, 1, capacity=49)
        with pytest.raises(CheckpointMismatchError, match="'t' has room for 49 rows, and the checkpoint has more"):
            Checkpoint(strategy).read(str(path))
        assert len(table) == 0
    with ParameterServerStrategy(cluster) as strategy:
        table, _ = build(strategy, 2, max_bytes=400)  # with room for 3 or 6 rows on each of two servers
        refused = r"'t' would take .* and its max_bytes are 400: give it larger"
        with pytest.raises(CheckpointMismatchError, match=refused):
            Checkpoint(strategy).read(str(path))
        assert len(table) == 0
    with ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            Variable(np.zeros((5, DIM), np.float32), name="t")
        with pytest.raises(CheckpointMismatchError, match="'t' is a variable, but a table with rows of 4 values in"):
            Checkpoint(strategy).read(str(path))


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda t: t.lookup([0.5]), "ids must be integers, but they are float64"),
        (lambda t: t.lookup(["a"]), "ids must be integers, but the first is .*'a'.*: make|with ids=str"),
        (lambda t: t.lookup(np.array([1 << 63], np.uint64)), "id 9223372036854775808 does not fit in int64"),
        (lambda t: t.scatter_add(IndexedSlices(np.ones((1, DIM)), [1.5])), "ids must be integers"),
        (lambda t: t.lookup([[1], [1, 2]]), "the ids are not an array"),
        (lambda t: t.scatter_add(IndexedSlices(np.ones((1, DIM + 1)), [1])), "the values of the rows have shape"),
        (lambda t: t.scatter_add(IndexedSlices(np.full((1, DIM), 1e300), [1])), "which can't hold 1e\\+300"),
        (lambda t: t.scatter_add(IndexedSlices([["a"] * DIM], [1])), "the values of the rows are .*: give numbers"),
        (lambda t: embedding_bag(t, [[1], [2]], [[1.0], []]), "weights must have the same lengths"),
        (lambda t: t.scatter_add(IndexedSlices(np.ones((6000, DIM)), np.arange(6000))), "is full: .* larger capacity"),
        (lambda t: optimizers.SGD(1.0).apply_gradients([(np.ones((5000, DIM)), t)]), "must be IndexedSlices"),
        (lambda t: t.read_value(), "rows by id only: read them with lookup"),
        (lambda t: t[3], "rows by id only"),
        (lambda t: t.variables[0].read_value(), "rows by id only"),
        (lambda t: t.assign(1.0), "rows by id only"),
        (lambda t: t.assign_add(np.ones(t.shape)), "rows by id only"),
        (lambda t: np.asarray(t), "rows by id only"),
        (lambda t: list(t), "rows by id only"),
    ],
)
def test_what_a_table_refuses_changes_nothing(job: Job, do: Callable[[EmbeddingTable], object], said: str) -> None:
    with job.strategy.scope():
        table = EmbeddingTable(DIM, capacity=5000, initializer=INITIAL, num_shards=1)
        with pytest.raises(InvalidUpdateError, match=f"{table.name}.*{said}") as caught:
            do(table)
    assert "variable" not in str(caught.value)
    assert len(table) == 0


def test_other_refusals(job: Job, table: EmbeddingTable) -> None:
    with job.strategy.scope():
        cases: list[tuple[dict[str, Any], str]] = [
            ({"dim": 0, "capacity": 1}, "dim is 0; it must be a whole number"),
            ({"dim": 4, "capacity": 0}, "capacity is 0"),
            ({"dim": 4, "max_bytes": 31}, "max_bytes is 31; it must be a whole number, at least 32 "),
            ({"dim": 4, "admission": 3}, "admission is 3; give one of SeenTimes, WithProbability, or None"),
            ({"dim": 4, "eviction": table_policies.LeastFrequentlyUsed()}, "give a capacity or max_bytes"),
            ({"dim": 4, "optimizer": "adam"}, "optimizer is 'adam'; it must be an optimizer"),
            ({"dim": 4, "capacity": 1 << 60}, "capacity is 1152921504606846976"),
            ({"dim": 4, "ids": "str"}, "ids is 'str'; give int or str, the type"),
            ({"dim": 4, "max_id_bytes": 8}, "max_id_bytes is 8, but only ids that are strings have a limit"),
            ({"dim": 4, "ids": str, "max_id_bytes": 1025}, "max_id_bytes is 1025"),
            ({"dim": 4, "capacity": 4, "num_shards": 0}, "num_shards is 0"),
            ({"dim": 4, "num_shards": 10_001}, "num_shards is 10001; .* at most 10,000"),
            ({"dim": 4, "capacity": 4, "initializer": "zeros"}, "must be an initializer"),
            ({"dim": 4, "capacity": 4, "initializer": initializers.HeNormal()}, "depend on the number of rows"),
        ]
        for wrong, said in cases:
            with pytest.raises(MisuseError, match=f"EmbeddingTable 'x': .*{said}"):
                EmbeddingTable(**wrong, name="x")
        single = EmbeddingTable(DIM, capacity=5, num_shards=1)
    with pytest.raises(TypeError, match=r"variables\[0\]"):
        ShardedVariable([single])
    with pytest.raises(MisuseError, match="outside a strategy's scope"):
        EmbeddingTable(4, capacity=4)
    assert job.strategy.client.directory()[0].variables[-1].name == single.name


def test_a_server_believes_no_peer(job: Job, table: EmbeddingTable) -> None:
    """Requests that our clients do not send are refused, and change nothing."""
    table.scatter_add(IndexedSlices(np.ones((9, DIM)), np.arange(9)))
    before = table.lookup(np.arange(12))
    four = np.ones(DIM, np.float32)
    owner, client, rows = table.owners[0], job.strategy.client, ps_pb2.Rows

    def update(of: ps_pb2.Rows, values: Array, **more: Any) -> None:
        item = ps_pb2.UpdateItem(variable=table.id, kind=ps_pb2.ADD, rows=of, value_bytes=values.nbytes, **more)
        ids = np.zeros(of.ids, np.int64) if of.ids else None
        client.update([ShardUpdate(owner, item, view(values), ids, table.name, table.dtype)])

    def read(of: ps_pb2.Rows, size: int, variable: int = table.id, **more: Any) -> None:
        item = ps_pb2.ReadItem(variable=variable, rows=of, **more)
        ids = np.zeros(of.ids, np.int64) if of.ids else None
        client.read([ShardRead(owner, item, size, view(np.empty(size, np.uint8)), ids)])

    with job.strategy.scope():
        dense = Variable(np.zeros((8, DIM), np.float32))
    by_ids_only = "not of rows by their ids, applied at once"
    requests: list[tuple[Callable[[], None], str]] = [
        (lambda: update(rows(all=True), np.ones(table.partition.block(0).shape, np.float32)), by_ids_only),
        (lambda: update(rows(ids=1, leading=2), four), by_ids_only),
        (lambda: update(rows(ids=1), four, gradients=2), by_ids_only),
        (lambda: update(rows(ids=1), four, offset=0), by_ids_only),
        (lambda: update(rows(ids=1), np.ones(DIM + 4, np.float32)), "got 32 bytes of values"),
        (lambda: read(rows(ids=1, leading=2), 16), "not of values by their ids"),
        (lambda: read(rows(ids=1), 16, slot="average"), "a read of slots or averages of table"),
        (lambda: read(rows(in_use=True), 8, variable=dense.id), "without rows"),
    ]
    for refused, said in requests:
        with pytest.raises(PsClusterError, match=said):
            refused()
    spec = ps_pb2.VariableSpec()
    spec.CopyFrom(next(each for each in client.directory()[0].variables if each.id == table.id))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "float64"}, "not rows of 4 values"),
        ({"asynchronous": False}, "not rows of 4 values"),
        ({"table": ps_pb2.TableSpec(dim=3, initializer="zeros")}, "not rows of 3 values"),
        ({"table": ps_pb2.TableSpec(dim=4, initializer="he_normal", numbers='{"seed": 1}')}, "depend on the number"),
        ({"table": ps_pb2.TableSpec(dim=4)}, "no initializer ''"),
        (
            {"table": ps_pb2.TableSpec(dim=4, initializer="zeros", optimizer="none", capacity=9)},
            "an optimizer of its own, 'none', which is not in this job",
        ),
        ({"table": ps_pb2.TableSpec(dim=4, initializer="zeros")}, "is not limited, and has a shape of"),
    ]
    for change, said in changes:
        wrong = ps_pb2.VariableSpec()
        wrong.CopyFrom(spec)
        wrong.id, wrong.name = 1 << 20, "wrong"
        for name, value in change.items():
            if isinstance(value, ps_pb2.TableSpec):
                wrong.table.CopyFrom(value)
            else:
                setattr(wrong, name, value)
        with pytest.raises(PsClusterError, match=said):
            client.create_variable(wrong, None, [(ps_pb2.Initializer(name="zeros"), b"")])
    np.testing.assert_array_equal(table.lookup(np.arange(12)), before)
    assert len(table) == 9


def test_a_server_believes_no_strings(job: Job) -> None:
    """Ids that are cut anywhere, of another width or kind, no text, or in a table that has none: nothing changes."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, ids=str, max_id_bytes=16, initializer=INITIAL, num_shards=1)
        numbers = EmbeddingTable(DIM, initializer=INITIAL, num_shards=1)
    known = ["one", "thé", "x" * 16]
    for of, ids in ((table, known), (numbers, [1, 2, 3])):
        of.scatter_add(IndexedSlices(np.ones((3, DIM)), ids))
    before, client = table.lookup([*known, "two"]), job.strategy.client
    whole = np.array(known).astype(object)
    data = np.array([text.encode() for text in whole.tolist()], "S16").tobytes()

    def send(of: EmbeddingTable, ids: bytes, id_bytes: int, count: int = 3) -> None:
        """Send an update and a read with these bytes as their ids."""
        rows, sent = ps_pb2.Rows(ids=count, id_bytes=id_bytes), np.frombuffer(ids, np.uint8)
        values = np.ones((count, DIM), np.float32)
        update = ps_pb2.UpdateItem(variable=of.id, kind=ps_pb2.ADD, rows=rows, value_bytes=values.nbytes)
        read = ShardRead(of.owners[0], ps_pb2.ReadItem(variable=of.id, rows=rows), values.nbytes, view(values), sent)
        with pytest.raises(PsClusterError, match=r"bytes|table"):
            client.update([ShardUpdate(of.owners[0], update, view(values), sent, of.name, of.dtype)])
        with pytest.raises(PsClusterError, match=r"bytes|table|strings"):
            client.read([read])

    for stop in range(0, len(data), 16):  # a segment of the payload is a multiple of 16 bytes
        send(table, data[:stop], 16)
    for id_bytes in (0, 1, 5, 15, 24, 1 << 31):
        send(table, data, id_bytes)
    for place in (0, 3, 16, 47):
        send(table, data[:place] + b"\xff" + data[place + 1 :], 16)
    send(table, data[:1] + b"\0" + data[2:], 16)
    send(numbers, data, 16)
    np.testing.assert_array_equal(table.lookup([*known, "two"]), before)
    assert (len(table), len(numbers)) == (3, 3)


def test_a_table_of_limited_bytes_names_table_limit_and_mend(job: Job) -> None:
    with job.strategy.scope():
        table = EmbeddingTable(DIM, max_bytes=100 * (DIM + 4) * 4, initializer=INITIAL, name="limited", num_shards=1)
        adagrad = optimizers.Adagrad(0.1)
    assert table.max_bytes == 3200
    adagrad.apply_gradients([(IndexedSlices(np.ones((40, DIM)), np.arange(40)), table)])
    rows = table.lookup(np.arange(500))
    for update in (table.scatter_add, lambda slices: adagrad.apply_gradients([(slices, table)])):
        with pytest.raises(InvalidUpdateError, match=r"is full: .* its limit is 3,200 bytes a server: give it"):
            update(IndexedSlices(np.ones((500, DIM)), np.arange(500)))
    np.testing.assert_array_equal(table.lookup(np.arange(40, 500)), rows[40:])


def test_metrics_count_rows_and_hits(job: Job) -> None:
    with job.strategy.scope():
        table = EmbeddingTable(DIM, capacity=100, name="counted", num_shards=1)
    table.scatter_add(IndexedSlices(np.ones((3, DIM)), [1, 2, 3]))
    table.scatter_add(IndexedSlices(np.ones((3, DIM)), [2, 3, 4]))
    table.lookup([1, 1, 2, 7, 8])
    scraped = scrape(addresses(job.strategy)[f"ps {table.owners[0]}"])
    for name, expected in {
        "table_rows": 4,
        "table_rows_made_total": 4,
        "table_rows_found_total": 2,
        "variable_rows_read_total": 4,
        "variable_rows_updated_total": 6,
    }.items():
        assert scraped.value(f"pscluster_ps_{name}", variable="counted") == expected


@pytest.mark.parametrize(("ids", "wire_dtype"), [(int, None), (str, "int8")])
def test_ids_whose_rows_were_dropped_are_named(job: Job, ids: type[Any], wire_dtype: Any) -> None:
    """Where their initial values would be wrong; in the script and in functions. One that comes back is counted."""
    with job.strategy.scope():
        table = EmbeddingTable(
            DIM,
            ids=ids,
            capacity=2,
            eviction=table_policies.LeastRecentlyUsed(),
            initializer=INITIAL,
            name=f"dropping-{ids.__name__}",
            num_shards=1,
            wire_dtype=wire_dtype,
        )
        sgd = optimizers.SGD(1.0)
    one, two, three, never = (ids(number) for number in range(4))

    def push(id_: int | str) -> None:
        sgd.apply_gradients([(IndexedSlices(np.ones((1, DIM), np.float32), [id_]), table)])

    def look(*wanted: int | str) -> Array:
        return table.lookup([[*wanted]], missing="error")

    for id_ in (one, two):
        push(id_)
    initial = table.lookup([one]) + 1
    np.testing.assert_array_equal(look(one, two), table.lookup([[one, two]]))
    push(three)

    def said_of(*wanted: int | str) -> str:
        with pytest.raises(InvalidUpdateError) as caught:
            look(*wanted)
        return str(caught.value)

    for id_ in (one, never):
        said = f"table {table.name!r}: id {id_!r} has no row: it has had no update"
        assert said in said_of(two, three, id_)
        assert said in job.coordinator.schedule(said_of, args=(two, three, id_)).fetch()
    with pytest.raises(InvalidUpdateError, match=r"has no row \(nor have 1 of the other ids\)"):
        look(never, one, never)
    with pytest.raises(MisuseError, match="missing is 'zeros'; it must be 'initial' or 'error'"):
        table.lookup([one], missing="zeros")  # type: ignore[arg-type]
    assert len(table) == 2
    push(one)  # as of a worker that looked it up before it was dropped: a new row, with this gradient
    np.testing.assert_allclose(look(one)[0], initial - 1, rtol=1e-6)
    scraped = scrape(addresses(job.strategy)[f"ps {table.owners[0]}"])
    for name, expected in {"made": 4, "made_again": 1, "evicted": 2}.items():
        assert scraped.value(f"pscluster_ps_table_rows_{name}_total", variable=table.name) == expected


def test_another_coordinator_goes_on_with_it(cluster: LocalCluster) -> None:
    def make(seed: int, ids: type[int] | type[str] = int) -> EmbeddingTable:
        initializer = initializers.RandomUniform(seed=seed)
        return EmbeddingTable(DIM, ids=ids, capacity=100, initializer=initializer, name="t", num_shards=3)

    with ParameterServerStrategy(cluster, job_name="resumed") as first:
        with first.scope():
            table = make(1)
        table.scatter_add(IndexedSlices(np.ones((3, DIM)), [1, 2, 3]))
        rows = table.lookup(range(6))
        with ParameterServerStrategy(cluster, job_name="resumed", take_over=True) as second, second.scope():
            with pytest.raises(MisuseError, match="'t' is a variable here, but an EmbeddingTable in the job"):
                Variable(np.zeros((1, DIM + 4), np.float32), name="t")
            with pytest.raises(MisuseError, match="has ids that are strings of up to 64 bytes here, but int64 in the"):
                make(2, str)
            table = make(2)
            assert len(table) == 3
            np.testing.assert_array_equal(table.lookup(range(6)), rows)


def test_more_rows_than_one_request_takes(job: Job) -> None:
    """Lookups and updates of any length come back in the order of their ids."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, capacity=400_000, initializer=INITIAL)
    ids = np.random.default_rng(0).permutation(300_000) * 0x1_0000_0001
    values = np.arange(len(ids) * DIM, dtype=np.float32).reshape(-1, DIM)
    table.scatter_update(IndexedSlices(values, ids))
    assert len(table) == len(ids)
    np.testing.assert_array_equal(table.gather(ids), values)
    table.scatter_add(IndexedSlices(values, ids))
    np.testing.assert_array_equal(table.lookup(ids[::-1]), 2 * values[::-1])


def test_replicas_of_synchronous_steps_update_it_at_once(cluster: LocalCluster) -> None:
    """Each its own rows; a gradient that is clipped is that of all of them."""
    ids = [np.array([5, -1]), np.array(["five", "東京"])]
    with SynchronousStrategy(cluster) as strategy:
        with strategy.scope():
            tables = [
                EmbeddingTable(DIM, ids=kind, capacity=100, initializer=initializers.Zeros()) for kind in (int, str)
            ]
            plain, clipped = optimizers.SGD(1.0), optimizers.SGD(1.0, clipvalue=1.5)

        def step(optimizer: optimizers.Optimizer) -> None:
            rows = [IndexedSlices(np.ones((2, DIM), np.float32), of_table) for of_table in ids]
            optimizer.apply_gradients(list(zip(rows, tables, strict=True)))

        for optimizer, expected in ((plain, -2), (clipped, -3.5)):
            strategy.run(step, (optimizer,))
            for table, of_table in zip(tables, ids, strict=True):
                np.testing.assert_array_equal(table.lookup(of_table), np.full((2, DIM), expected))


@pytest.mark.timeout(120)
def test_snapshots_have_whole_rows() -> None:
    """What a killed server has lost, it has lost as a whole: the rows and values of the last snapshot are there."""
    with running_job(num_ps=1, num_workers=1, durability="snapshot") as job:
        with job.strategy.scope():
            table = EmbeddingTable(DIM, capacity=5000, initializer=initializers.Zeros())
        rows = IndexedSlices(np.ones((1000, DIM)), np.arange(1000))
        for count in range(1, 30):
            table.scatter_add(rows)
            table.scatter_add(IndexedSlices(np.full((1, DIM), 7), [-count]))
            if count == 15:
                with job.strategy.scope():
                    Variable(0.0)  # it is saved, with all there is, before this returns
        kill(job, 0)
        kept = len(table) - 1000
        assert 15 <= kept < 30
        values = table.lookup(rows.indices)
        assert (values == values[0, 0]).all()
        assert values[0, 0] in (kept, kept + 1)
        np.testing.assert_array_equal(table.lookup(-np.arange(1, 30))[:, 0], 7.0 * (np.arange(29) < kept))
        assert job.strategy.lost_updates().keys() <= {table.name}


@pytest.mark.timeout(120)
def test_an_evaluation_sees_one_moment(job: Job) -> None:
    """It reads copies, with their rows, while training goes on, and leaves nothing behind."""
    with job.strategy.scope():
        table = EmbeddingTable(DIM, capacity=100, initializer=initializers.Zeros(), num_shards=2)
    table.scatter_add(IndexedSlices(np.ones((4, DIM)), [1, 2, 3, 4]))

    data = job.coordinator.distribute_dataset(np.array([1, 2, 3, 99])).batch(2)

    def step(ids: Array) -> tuple[Any]:
        return (table.lookup(ids)[:, 0],)

    assert job.coordinator.evaluate(step, data, [metrics.Sum()], concurrent=True) == {"sum": 3.0}
    assert len(table) == 4
    assert not [spec for each in job.strategy.client.directory() for spec in each.variables if spec.evaluation]
