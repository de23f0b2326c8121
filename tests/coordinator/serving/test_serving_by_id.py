"""Embedding tables served from checkpoints and deltas: what is looked up is what the job's tables have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pscluster.coordinator import (
    CheckpointManager,
    EmbeddingTable,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    initializers,
    table_policies,
)
from pscluster.coordinator.serving import ServingTable, export_delta
from pscluster.core.errors import CheckpointError, InvalidUpdateError, MisuseError, StaleError

DIM = 4
IDS = np.concatenate([np.arange(-300, 700), [(1 << 63) - 1, -(1 << 63)]])
Rows = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Rows]]:
    """A directory of four checkpoints, the first without rows, and what lookups gave in each of them."""
    directory, values = tmp_path_factory.mktemp("checkpoints"), list[Any]()
    with (
        LocalCluster(2, 1, durability="none", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
        CheckpointManager(str(directory)) as manager,
    ):
        with strategy.scope():
            table = EmbeddingTable(
                DIM,
                capacity=300,
                initializer=initializers.RandomNormal(seed=1),
                eviction=table_policies.LeastRecentlyUsed(),
                name="table",
                num_shards=3,
            )
            EmbeddingTable(DIM, initializer=initializers.RandomNormal(seed=2), name="other seed")
            Variable(np.zeros((5, DIM), np.float32), name="variable")
        for ids in (range(0), range(-50, 50), range(-50, 350), range(250, 650)):
            table.scatter_add(IndexedSlices(np.ones((len(ids), DIM), np.float32), np.array(ids, np.int64)))
            manager.save().result()
            values.append(table.lookup(IDS))
        assert len(table) < 500
    return directory, values


def test_lookups_are_those_of_the_job(made: tuple[Path, list[Rows]]) -> None:
    directory, values = made
    for number, expected in enumerate(values, 1):
        served = ServingTable.open(_path(directory, number), "table")
        np.testing.assert_array_equal(served.lookup(IDS), expected)
        np.testing.assert_array_equal(served.lookup(IDS.reshape(2, -1)[:, ::-1]), expected.reshape(2, -1, DIM)[:, ::-1])
    assert served.shape == (0, DIM)
    assert served.lookup([]).shape == (0, DIM)
    for wrong in ([0.5], np.array([1 << 63], np.uint64)):
        with pytest.raises(InvalidUpdateError, match="table 'table': id"):
            served.lookup(wrong)


@pytest.mark.parametrize("ending", ["delta", "parquet"])
def test_deltas_lead_from_one_to_the_next(made: tuple[Path, list[Rows]], tmp_path: Path, ending: str) -> None:
    """Rows that were dropped in between have their initial values again."""
    directory, values = made
    served = ServingTable.open(_path(directory, 1), "table")
    deltas = [
        export_delta(_path(directory, number), "table", since=number - 1, out=tmp_path / f"{number}.{ending}")
        for number in (2, 3, 4)
    ]
    with pytest.raises(StaleError, match="follow the deltas in order"):
        served.follow(deltas[1].path)
    for delta, expected in zip(deltas, values[1:], strict=True):
        served.follow(delta.path)
        np.testing.assert_array_equal(served.lookup(IDS), expected)
    whole = export_delta(_path(directory, 4), "table", since=1, out=tmp_path / f"whole.{ending}")
    assert whole.changed < sum(delta.changed for delta in deltas)
    again = ServingTable.open(_path(directory, 1), "table")
    again.follow(whole.path)
    np.testing.assert_array_equal(again.lookup(IDS), values[-1])
    assert again.refresh() is False


def test_what_does_not_fit_is_refused(made: tuple[Path, list[Rows]], tmp_path: Path) -> None:
    directory, _ = made
    newest = _path(directory, 4)
    other, variable = (ServingTable.open(newest, name) for name in ("other seed", "variable"))
    table = ServingTable.open(newest, "table")
    for one, another in ((table, other), (variable, table), (table, variable)):
        with pytest.raises(MisuseError, match="is an EmbeddingTable of rows of 4 values"):
            one._state.base.check_like(another._state.base)
    delta = export_delta(newest, "table", since=3, out=tmp_path / "delta")
    with pytest.raises(CheckpointError, match="is of table 'table'"):
        variable.follow(delta.path)


def _path(directory: Path, number: int) -> Path:
    return directory / f"ckpt-{number:06d}"
