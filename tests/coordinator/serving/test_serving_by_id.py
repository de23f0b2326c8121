"""Embedding tables served from checkpoints and deltas: what is looked up is what the job's tables have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.ps.strings import colliding, text_of
from xxhash import xxh3_128

from pscluster.coordinator import (
    CheckpointManager,
    EmbeddingTable,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    SavedVariables,
    Variable,
    initializers,
    table_policies,
)
from pscluster.coordinator.serving import ServingTable, by_id, export_delta
from pscluster.core.errors import CheckpointError, InvalidUpdateError, MisuseError, StaleError

DIM = 4
IDS = np.concatenate([np.arange(-300, 700), [(1 << 63) - 1, -(1 << 63)]])
WORDS = np.array([text_of(number) for number in range(-5, 700)])
Rows = npt.NDArray[np.float32]
Made = tuple[Path, list[Rows], list[Rows]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A directory of four checkpoints, the first without rows, and what lookups gave in each of them."""
    directory, values, of_words = tmp_path_factory.mktemp("checkpoints"), list[Any](), list[Any]()
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
            words = EmbeddingTable(
                DIM, ids=str, initializer=initializers.RandomNormal(seed=1), name="words", num_shards=3
            )
            Variable(np.zeros((5, DIM), np.float32), name="variable")
        for ids in (range(0), range(-50, 50), range(-50, 350), range(250, 650)):
            table.scatter_add(IndexedSlices(np.ones((len(ids), DIM), np.float32), np.array(ids, np.int64)))
            words.scatter_add(IndexedSlices(np.ones((len(ids), DIM), np.float32), [text_of(each) for each in ids]))
            manager.save().result()
            values.append(table.lookup(IDS))
            of_words.append(words.lookup(WORDS))
        assert len(table) < 500
    return directory, values, of_words


def test_lookups_are_those_of_the_job(made: Made) -> None:
    directory, values, _ = made
    for number, expected in enumerate(values, 1):
        served = ServingTable.open(_path(directory, number), "table")
        np.testing.assert_array_equal(served.lookup(IDS), expected)
        np.testing.assert_array_equal(served.lookup(IDS.reshape(2, -1)[:, ::-1]), expected.reshape(2, -1, DIM)[:, ::-1])
    assert served.shape == (0, DIM)
    assert served.lookup([]).shape == (0, DIM)
    for wrong in ([0.5], np.array([1 << 63], np.uint64)):
        with pytest.raises(InvalidUpdateError, match="table 'table': id"):
            served.lookup(wrong)


@pytest.mark.parametrize("key", [by_id._KEY, 0], ids=["random", "0"])
def test_strings_are_looked_up(made: Made, key: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the key 0, some have one hash. Numbers are no strings, and a string that is too long is no id."""
    monkeypatch.setattr(by_id, "_KEY", key)
    directory, _, of_words = made
    for number, expected in enumerate(of_words, 1):
        served = ServingTable.open(_path(directory, number), "words")
        np.testing.assert_array_equal(served.lookup(WORDS), expected)
    assert len(np.unique(served.lookup(list(colliding())))) == DIM  # of the same hash, they began as one
    np.testing.assert_array_equal(served.lookup(WORDS[::-1].tolist()), expected[::-1])
    for wrong, said in (([7], r"ids\[0\] is 7, an int"), (["x" * 65], "has 65 bytes")):
        with pytest.raises(InvalidUpdateError, match=f"table 'words': .*{said}"):
            served.lookup(wrong)


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
@pytest.mark.parametrize("name", ["table", "words"])
def test_deltas_lead_from_one_to_the_next(made: Made, tmp_path: Path, name: str, ending: str) -> None:
    """Rows that were dropped in between have their initial values again."""
    directory, *of_tables = made
    ids, values = (IDS, of_tables[0]) if name == "table" else (WORDS, of_tables[1])
    served = ServingTable.open(_path(directory, 1), name)
    deltas = [
        export_delta(_path(directory, number), name, since=number - 1, out=tmp_path / f"{number}.{ending}")
        for number in (2, 3, 4)
    ]
    with pytest.raises(StaleError, match="follow the deltas in order"):
        served.follow(deltas[1].path)
    for delta, expected in zip(deltas, values[1:], strict=True):
        served.follow(delta.path)
        np.testing.assert_array_equal(served.lookup(ids), expected)
    whole = export_delta(_path(directory, 4), name, since=1, out=tmp_path / f"whole.{ending}")
    assert whole.changed < sum(delta.changed for delta in deltas)
    again = ServingTable.open(_path(directory, 1), name)
    again.follow(whole.path)
    np.testing.assert_array_equal(again.lookup(ids), values[-1])
    assert again.refresh() is False
    has = np.isin(ids, SavedVariables(_path(directory, 4)).rows(name)[0])
    assert 0 < np.count_nonzero(has) < len(ids)
    dropped = np.isin(ids, SavedVariables(_path(directory, 3)).rows(name)[0]) & ~has
    assert dropped.any() == (name == "table")
    assert served.changed_rows == len(SavedVariables(_path(directory, 4)).rows(name)[0]), "no row that was dropped"
    for table in (served, again, ServingTable.open(_path(directory, 4), name)):
        np.testing.assert_array_equal(table.lookup(ids[has], missing="error"), values[-1][has])
        for id_ in (*ids[~has][:20].tolist(), *ids[dropped][:20].tolist()):
            with pytest.raises(InvalidUpdateError, match=f"table '{name}': id {id_!r} has no row: "):
                table.lookup([*ids[has][:3], id_], missing="error")


def test_what_does_not_fit_is_refused(made: Made, tmp_path: Path) -> None:
    directory, *_ = made
    newest = _path(directory, 4)
    other, variable = (ServingTable.open(newest, name) for name in ("other seed", "variable"))
    table = ServingTable.open(newest, "table")
    for one, another in ((table, other), (variable, table), (table, variable)):
        with pytest.raises(MisuseError, match="is an EmbeddingTable of rows of 4 values"):
            one._state.base.check_like(another._state.base)
    delta = export_delta(newest, "table", since=3, out=tmp_path / "delta")
    with pytest.raises(CheckpointError, match="is of table 'table'"):
        variable.follow(delta.path)


def test_deltas_of_strings_are_checked(made: Made, tmp_path: Path) -> None:
    """Other ids than the table's, and what is no text, though the checksum is right: nothing changes."""
    directory, _, of_words = made
    served = ServingTable.open(_path(directory, 3), "words")
    export_delta(_path(directory, 4), "words", since=3, out=tmp_path / "delta")
    whole = (tmp_path / "delta").read_bytes()
    at = 8 + int.from_bytes(whole[:8], "little")
    first = whole[at : at + 64].rstrip(b"\0")
    for before, after, said in (
        (first, b"\xff" + first[1:], "is not UTF-8"),
        (first, b"\0" + first[1:], "has a NUL"),
        (b'\\"id_bytes\\": 64', b'\\"id_bytes\\": 63', "ids of 63 bytes"),
        (b'\\"id_bytes\\": 64', b'\\"id_bytes\\": 32', "not a readable delta"),
        (b'\\"any_ids\\": true', b'\\"any_ids\\": null', "ids of 64 bytes"),
    ):
        assert before in whole
        data = whole.replace(before, after, 1)[:-16]
        (tmp_path / "wrong").write_bytes(data + xxh3_128(data).digest())
        with pytest.raises(CheckpointError, match=said):
            served.follow(tmp_path / "wrong")
    np.testing.assert_array_equal(served.lookup(WORDS), of_words[2])


def _path(directory: Path, number: int) -> Path:
    return directory / f"ckpt-{number:06d}"
