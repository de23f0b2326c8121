"""Tables so large that 32 bits can number neither their bytes nor their elements, on real servers.

They take up to 7 GiB of memory; most of the time is spent making the values. If the machine has less to spare, they are
skipped and say so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from tests.conftest import run_cluster
from tests.waiting import TIMEOUT

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    ParameterServerStrategy,
    Variable,
    embedding_lookup,
    initializers,
    optimizers,
)
from pscluster.ps.client.exchanges import Traffic

Array = npt.NDArray[Any]
T = TypeVar("T")

# A correct run takes seconds; on a busy machine, moving gigabytes may take much longer.
pytestmark = pytest.mark.timeout(600)

GIB = 1 << 30
WIDTH = 500  # so that rows lie across the 2 and 4 GiB boundaries
ITEM = 8  # float64: drawing the values takes most of the time, and these are half as many as float32 would be
ROW_BYTES = WIDTH * ITEM
ID_BYTES = 8
INITIALIZER = initializers.RandomUniform(-1.0, 1.0, seed=2024)


def available_bytes() -> int:
    """Memory that can be used without harming other processes: as the system reports, or else what is unused."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # sysconf does not count what files are cached in, most of the memory after a while
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def need(gib: float) -> None:
    """Skip the test if it would leave the machine no memory."""
    available = available_bytes() / GIB
    if available < gib:
        pytest.skip(f"needs {gib:g} GiB of memory, and {available:.1f} GiB are available")


@contextmanager
def servers(count: int, durability: str = "none") -> Iterator[ParameterServerStrategy]:
    """Separate servers for the test, and a worker: their memory is freed at the end.

    Nothing is saved, unless the test is about that too: gigabytes are written after each creation and at the end.
    """
    with (
        contextmanager(run_cluster)(count, 1, durability=durability) as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        yield strategy


def block(shape: tuple[int, int], rows: range) -> Array:
    """Rows of the whole table, made here by the initializer."""
    return INITIALIZER(shape, np.float64, (len(rows), shape[1]), (rows.start, 0))


def by_id(shape: tuple[int, int], ids: Array) -> Array:
    """Single rows in the same way."""
    return np.concatenate([block(shape, range(row, row + 1)) for row in ids.tolist()])


def moved(strategy: ParameterServerStrategy, call: Callable[[], T], pulled: int, pushed: int) -> T:
    """Call it, and check that it transfers exactly this many bytes."""
    before = strategy.traffic()
    result = call()
    assert strategy.traffic() - before == (pulled, pushed)
    return result


@pytest.fixture(scope="class")
def strategy() -> Iterator[ParameterServerStrategy]:
    """One server, which saves what it has: its creation waits for that."""
    need(5.5)
    with servers(1, "snapshot") as strategy:
        yield strategy


@pytest.fixture(scope="class")
def optimizer(strategy: ParameterServerStrategy) -> optimizers.Optimizer:
    """An optimizer, created before the table: a creation saves everything that has changed."""
    with strategy.scope():
        return optimizers.SGD(0.5)


@pytest.fixture(scope="class")
def table(strategy: ParameterServerStrategy, optimizer: optimizers.Optimizer) -> Variable:
    """One shard of more than 4 GiB, created on its server."""
    with strategy.scope():
        table = Variable(INITIALIZER, name="table", shape=TestOneShard.shape, dtype=np.float64)
    assert table.num_shards == 1
    assert table.nbytes == 4_320_000_000 > 4 * GIB
    return table


class TestOneShard:
    """One shard of more than 4 GiB; each test restores what it has changed."""

    shape = (1_080_000, WIDTH)
    at_2_gib = 2 * GIB // ROW_BYTES  # the row that contains byte 2**31
    at_4_gib = 4 * GIB // ROW_BYTES

    @contextmanager
    def changing(self, table: Variable, rows: range) -> Iterator[Array]:
        """These rows' values, for the test to change together with the table: at the end they are equal.

        Nothing has changed at the places to which 32-bit byte offsets would have led.
        """
        expected = block(self.shape, rows)
        try:
            yield expected
            np.testing.assert_array_equal(table[rows.start : rows.stop], expected)
            start, stop = (max(0, row - self.at_4_gib) for row in (rows.start - 1, rows.stop + 1))
            np.testing.assert_array_equal(table[start:stop], block(self.shape, range(start, stop)))
        finally:
            table.assign(block(self.shape, rows), at=np.s_[rows.start : rows.stop])

    @pytest.mark.parametrize("count", [3, 400])  # 400 rows come in several frames
    @pytest.mark.parametrize(
        "first", [0, at_2_gib - 1, at_4_gib - 1, -400], ids=["start", "at 2 GiB", "at 4 GiB", "end"]
    )
    def test_slices(self, strategy: ParameterServerStrategy, table: Variable, first: int, count: int) -> None:
        """A slice anywhere equals what the initializer makes, and nothing else is transferred."""
        first %= len(table)
        got = moved(strategy, lambda: table[first : first + count], count * ROW_BYTES, 0)
        np.testing.assert_array_equal(got, block(self.shape, range(first, first + count)))

    def test_slices_with_gaps(self, strategy: ParameterServerStrategy, table: Variable) -> None:
        """Of distant rows, read from the end to the start, and of columns only the requested ones are transferred."""
        ids = np.arange(len(table) - 1, -1, -200_000)
        columns = len(range(0, WIDTH, 7))
        got = moved(strategy, lambda: table[::-200_000, ::7], len(ids) * columns * ITEM, 0)
        np.testing.assert_array_equal(got, by_id(self.shape, ids)[:, ::7])
        end = block(self.shape, range(len(table) - 600, len(table)))
        np.testing.assert_array_equal(moved(strategy, lambda: table[-600:, -1], 600 * ITEM, 0), end[:, -1])
        assert moved(strategy, lambda: table[-1, -1], ITEM, 0) == end[-1, -1]

    @pytest.mark.parametrize("count", [20, 700])  # 700 rows come in several frames
    def test_rows_by_id(self, strategy: ParameterServerStrategy, table: Variable, count: int) -> None:
        """Rows from the start, both boundaries and the end come in the order of their ids, duplicates included."""
        places = np.array([0, self.at_2_gib, self.at_2_gib + 1, self.at_4_gib, self.at_4_gib + 1, len(table) - 1])
        which = np.random.default_rng(count).integers(0, len(places), count)
        got = moved(strategy, lambda: table.gather(places[which]), count * ROW_BYTES, count * ID_BYTES)
        np.testing.assert_array_equal(got, by_id(self.shape, places)[which])

    @pytest.mark.parametrize("first", [at_2_gib - 1, at_4_gib - 1, -10], ids=["at 2 GiB", "at 4 GiB", "end"])
    def test_scattered_rows(self, strategy: ParameterServerStrategy, table: Variable, first: int) -> None:
        """Rows that are replaced, added to and multiplied by id change in the right place."""
        first %= len(table)
        local = np.array([9, 0, 3])
        rows = np.random.default_rng(1).integers(-9, 9, (3, WIDTH)).astype(np.float64)
        sizes = 0, rows.nbytes + local.nbytes
        with self.changing(table, range(first, first + 10)) as expected:
            moved(strategy, lambda: table.scatter_update(IndexedSlices(rows, first + local)), *sizes)
            expected[local] = rows
            moved(strategy, lambda: table.scatter_add(IndexedSlices(rows, first + local - local % 2)), *sizes)
            expected[local - local % 2] += rows
            moved(strategy, lambda: table.scatter_mul(IndexedSlices(rows, first + local)), *sizes)
            expected[local] *= rows

    @pytest.mark.parametrize("first", [at_2_gib - 500, at_4_gib - 500, -1000], ids=["at 2 GiB", "at 4 GiB", "end"])
    def test_updated_slices(self, strategy: ParameterServerStrategy, table: Variable, first: int) -> None:
        """Slices, some of several frames, are replaced, added to, subtracted from and filled."""
        first %= len(table)
        values = np.random.default_rng(first).random((900, WIDTH), np.float64)
        with self.changing(table, range(first, first + 1000)) as expected:
            moved(strategy, lambda: table.assign(values, at=np.s_[first + 100 : first + 1000]), 0, 900 * ROW_BYTES)
            expected[100:] = values
            moved(strategy, lambda: table.assign_add(values[:800], at=np.s_[first : first + 800]), 0, 800 * ROW_BYTES)
            expected[:800] += values[:800]
            moved(strategy, lambda: table.assign_sub(values[:2], at=np.s_[first + 499 : first + 501]), 0, 2 * ROW_BYTES)
            expected[499:501] -= values[:2]
            moved(strategy, lambda: table.assign(7.0, at=np.s_[first + 490 : first + 999 : 3, ::2]), 0, ITEM)
            expected[490:999:3, ::2] = 7

    def test_sparse_gradients(
        self, strategy: ParameterServerStrategy, optimizer: optimizers.Optimizer, table: Variable
    ) -> None:
        """An optimizer changes the rows that have a gradient; those with equal ids are summed before they are sent."""
        ids = np.array([len(table) - 1, len(table) - 3, len(table) - 1, len(table) - 4])
        gradient = np.random.default_rng(3).integers(-9, 9, (len(ids), WIDTH)).astype(np.float64)
        with self.changing(table, range(len(table) - 5, len(table))) as expected:
            slices = IndexedSlices(gradient, ids)
            moved(strategy, lambda: optimizer.apply_gradients([(slices, table)]), 0, 3 * (ROW_BYTES + ID_BYTES))
            expected[[-1, -3, -4]] -= 0.5 * np.stack([gradient[0] + gradient[2], gradient[1], gradient[3]])


def counted(start: int, stop: int) -> Array:
    """Numbers of elements modulo a prime, which distinguishes elements at a distance of 2**n."""
    return (np.arange(start, stop) % 251).astype(np.uint8)


def test_more_elements_than_31_bits_count() -> None:
    """All of more than 2**31 elements are read and assigned in one call; ids beyond 2**31 work like others."""
    need(7.5)
    border = 1 << 31
    size, piece, width = border + 12_345, 251 << 20, 4000
    places = (0, border // 2 - width // 2, border - width // 2, size - width)
    with servers(1) as strategy:
        with strategy.scope():
            v = Variable(initializers.Constant(255), shape=(size,), dtype=np.uint8)

        # Marks in the same, read with all
        for start in places:
            moved(strategy, partial(v.assign, counted(start, start + width), at=np.s_[start : start + width]), 0, width)
        whole = moved(strategy, v.read_value, size, 0)
        assert whole.shape == (size,)
        for start in places:
            np.testing.assert_array_equal(whole[start : start + width], counted(start, start + width))
            whole[start : start + width] = 255
        assert all(whole[start : start + piece].min() == 255 for start in range(0, size, piece))

        # Other values everywhere, assigned with all
        period = np.tile(counted(0, 251), 1 << 20)
        for start in range(0, size, piece):
            whole[start : start + piece] = period[: size - start]
        moved(strategy, lambda: v.assign(whole), 0, size)
        ids = np.random.default_rng(4).integers(0, size, 10_000)
        ids[:4] = size - 1, border, border - 1, size - 1
        got = moved(strategy, lambda: v.gather(ids), len(ids), len(ids) * ID_BYTES)
        np.testing.assert_array_equal(got, (ids % 251).astype(np.uint8))

        # Some of them changed
        first = border - width // 2
        expected = counted(first, first + width)
        two = np.full(10, 2, np.uint8)
        moved(strategy, lambda: v.assign_add(two, at=np.s_[border - 5 : border + 5]), 0, 10)
        expected[width // 2 - 5 : width // 2 + 5] += 2
        beyond = np.array([9, 1900])
        rows = IndexedSlices(np.array([7, 8], np.uint8), border + beyond)
        moved(strategy, lambda: v.scatter_update(rows), 0, 2 + 2 * ID_BYTES)
        expected[width // 2 + beyond] = 7, 8
        np.testing.assert_array_equal(v[first : first + width], expected)
        np.testing.assert_array_equal(v[:width], counted(0, width))  # to which 31 bits would have led


def test_a_table_on_three_servers() -> None:
    """A table of 4 GiB is made on its servers, as the initializer would make it here; only requested data is sent."""
    need(5.5)
    shape = (4 * GIB // ROW_BYTES + 1000, WIDTH)
    rng = np.random.default_rng(5)
    with servers(3) as strategy:
        with strategy.scope():
            partitioner = FixedShardsPartitioner(3)
            table = Variable(INITIALIZER, name="table", shape=shape, dtype=np.float64, partitioner=partitioner)
        assert table.nbytes > 4 * GIB
        assert table.owners == (0, 1, 2)
        borders = [shard.block.start[0] for shard in table.variables[1:]]

        for first in (0, *(border - 200 for border in borders), len(table) - 400):
            got = moved(strategy, partial(table.__getitem__, np.s_[first : first + 400]), 400 * ROW_BYTES, 0)
            np.testing.assert_array_equal(got, block(shape, range(first, first + 400)))
        ids = np.concatenate([rng.integers(0, len(table), 900), [0, *borders, len(table) - 1]])
        values = by_id(shape, ids)
        sizes = len(ids) * ROW_BYTES, len(ids) * ID_BYTES
        np.testing.assert_array_equal(moved(strategy, lambda: table.gather(ids), *sizes), values)
        again = rng.integers(0, len(ids), (7, 1000))  # a row that is requested several times is sent once
        asked = len(np.unique(ids[again]))
        looked_up = moved(strategy, lambda: embedding_lookup(table, ids[again]), asked * ROW_BYTES, asked * ID_BYTES)
        np.testing.assert_array_equal(looked_up, values[again])

        def step() -> tuple[Array, Traffic]:
            before = strategy.traffic()
            rows = table.gather(ids)
            return rows, strategy.traffic() - before

        coordinator = ClusterCoordinator(strategy)
        on_worker, moved_there = coordinator.fetch(coordinator.schedule(step), TIMEOUT)
        np.testing.assert_array_equal(on_worker, values)
        assert moved_there == sizes

        new = rng.random((len(ids), WIDTH), np.float64)
        ids, unique = np.unique(ids, return_index=True)
        new, values = new[unique], values[unique]
        sizes = 0, len(ids) * (ROW_BYTES + ID_BYTES)
        moved(strategy, lambda: table.scatter_update(IndexedSlices(new, ids)), *sizes)
        np.testing.assert_array_equal(table.gather(ids), new)
        moved(strategy, lambda: table.scatter_add(IndexedSlices(values, ids)), *sizes)
        np.testing.assert_array_equal(table.gather(ids), new + values)
        neighbours = np.setdiff1d((ids[:-1] + 1)[:300], ids)
        np.testing.assert_array_equal(table.gather(neighbours), by_id(shape, neighbours))
