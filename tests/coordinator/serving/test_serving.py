"""Tables served from the checkpoints of a real cluster: what is looked up, and that damage changes nothing."""

from __future__ import annotations

import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import safetensors.numpy

from pscluster.coordinator import (
    CheckpointManager,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    ModuloPartitioner,
    ParameterServerStrategy,
    Variable,
)
from pscluster.coordinator.serving import Delta, ServingTable, TableVersion, delta_parquet, export_delta
from pscluster.coordinator.serving.delta_files import Changes, Header
from pscluster.coordinator.serving.mapped import map_table, of_newest
from pscluster.core.errors import CheckpointError, InvalidUpdateError, MisuseError, StaleError, UnknownVariableError

Array = npt.NDArray[np.float32]

ROWS, DIM = 1000, 6
TOUCHED = ([3, 500, 999], [3, 4], [0])
"""The rows that change between two checkpoints."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Array]]:
    """A directory of four checkpoints, and the table in each of them; and, in it, of one with another table."""
    directory, values = tmp_path_factory.mktemp("checkpoints"), list[Array]()
    with (
        LocalCluster(2, 1, durability="none", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(3)) as strategy,
        CheckpointManager(str(directory)) as manager,
    ):
        start = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
        with strategy.scope():
            table = Variable(start, name="table")
            both = Variable(np.arange(84.0).reshape(7, 12), name="both", partitioner=lambda *_: [2, 3])
            by_row = [
                Variable(start, name=name, partitioner=partitioner)
                for name, partitioner in (("hashed", HashPartitioner(3)), ("modulo", ModuloPartitioner(3)))
            ]
            bias = Variable(np.arange(5, dtype=np.int64), name="bias", partitioner=lambda *_: [1])
            scalar = Variable(1.0, name="scalar")
            complex_ = Variable(np.zeros((4, 2), np.complex64), name="complex")
        for touched in ([], *TOUCHED):
            for variable in (table, *by_row):
                ids = np.array(touched, np.int64)
                variable.scatter_add(IndexedSlices(np.ones((len(touched), DIM), np.float32), ids))
            manager.save().result()
            values.append(table.numpy())
        del both, bias, scalar, complex_, by_row
        strategy.delete_variable(table)
        with strategy.scope():
            Variable(np.zeros((4, 2), np.float32), name="table")
        with CheckpointManager(str(directory / "narrow")) as narrow:
            narrow.save().result()
    return directory, values


@pytest.fixture
def copied(made: tuple[Path, list[Array]], tmp_path: Path) -> tuple[Path, list[Array]]:
    """The same, to be damaged."""
    shutil.copytree(made[0], tmp_path / "checkpoints")
    return tmp_path / "checkpoints", made[1]


def delta_between(directory: Path, since: int, to: int, out: Path, table: str = "table") -> Delta:
    return export_delta(directory / f"ckpt-{to:06d}", table, since=since, out=out)


def test_rows_are_those_of_the_newest_checkpoint(made: tuple[Path, list[Array]]) -> None:
    """In the order of the ids, whatever their shape; also of variables that are resharded, or not at all."""
    directory, values = made
    table = ServingTable.open(directory, "table")
    assert (table.name, table.shape, table.dtype.name, table.version.number) == ("table", (ROWS, DIM), "float32", 4)
    assert table.path == str(directory / "ckpt-000004")
    assert not table.refresh()
    many = np.random.default_rng(1).integers(0, ROWS, (5, 40))
    for ids in (many, [999, 0, 0], 7, [], np.arange(ROWS, dtype=np.uint16)):
        np.testing.assert_array_equal(table.lookup(ids), values[3][np.asarray(ids, np.int64)])
    both = ServingTable.open(directory, "both", verify=False)
    np.testing.assert_array_equal(both.lookup([6, 0, 3]), np.arange(84.0).reshape(7, 12)[[6, 0, 3]])
    assert ServingTable.open(directory, "bias").lookup([4, 4]).tolist() == [4, 4]
    first = ServingTable.open(directory / "ckpt-000001", "table")
    np.testing.assert_array_equal(first.lookup(np.arange(ROWS)), values[0])
    assert not first.refresh(), "one checkpoint was named"
    rows = table.lookup([1])
    rows[:] = 0
    assert table.lookup([1]).any(), "rows are copies"


def test_the_newest_may_be_removed_before_it_is_read(copied: tuple[Path, list[Array]]) -> None:
    """As by a training that keeps few: then the one that has taken its place is read, if there is one."""
    directory, values = copied
    read = list[str]()

    def mapped_too_late(path: str) -> Any:
        if not read:
            shutil.move(path, directory / "ckpt-000005")
        read.append(path)
        return map_table(path, "table", verify=True)

    table = of_newest(directory, mapped_too_late)
    assert read == [str(directory / "ckpt-000004"), str(directory / "ckpt-000005")]
    np.testing.assert_array_equal(table.take(np.arange(ROWS)), values[3])
    with pytest.raises(CheckpointError, match="ckpt-000004 is not a checkpoint"):
        of_newest(directory / "ckpt-000004", mapped_too_late)


@pytest.mark.parametrize("name", ["hashed", "modulo"])
def test_rows_in_other_orders(made: tuple[Path, list[Array]], tmp_path: Path, name: str) -> None:
    """Where rows are cut by hash or modulo, ids are those of rows all the same, also in a delta."""
    directory, values = made
    every = np.arange(ROWS)
    np.testing.assert_array_equal(ServingTable.open(directory, name).lookup(every), values[3])
    table = ServingTable.open(directory / "ckpt-000001", name)
    delta = delta_between(directory, 1, 2, tmp_path / "delta", name)
    assert safetensors.numpy.load_file(delta.path)["ids"].tolist() == TOUCHED[0]
    table.follow(delta.path)
    np.testing.assert_array_equal(table.lookup(every), values[1])


def test_bad_input(made: tuple[Path, list[Array]]) -> None:
    directory, _ = made
    table = ServingTable.open(directory, "table")
    with pytest.raises(InvalidUpdateError, match=r"'table': row id 1000 \(position 1\) is out of range"):
        table.lookup([5, 1000])
    with pytest.raises(InvalidUpdateError, match="row id -1"):
        table.lookup([-1])
    with pytest.raises(InvalidUpdateError, match="must be integers, but they are float64"):
        table.lookup([0.5])
    with pytest.raises(UnknownVariableError, match="has no variable 'tabel'; it has "):
        ServingTable.open(directory, "tabel")
    with pytest.raises(MisuseError, match="'scalar' is a scalar"):
        ServingTable.open(directory, "scalar")
    with pytest.raises(CheckpointError, match="copy the checkpoint to a disk"):
        ServingTable.open("s3://bucket/run", "table")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        ServingTable.open(directory / "nowhere", "table")


def ids_in(path: str) -> list[int]:
    """The ids in a delta, as another program reads them."""
    if path.endswith(".parquet"):
        ids: list[int] = pq.read_table(path)["id"].to_pylist()
        return ids
    return list(safetensors.numpy.load_file(path)["ids"].tolist())


ENDINGS = pytest.mark.parametrize("ending", ["", ".parquet"])


@ENDINGS
def test_deltas_are_followed_in_order(made: tuple[Path, list[Array]], tmp_path: Path, ending: str) -> None:
    """Each has the rows that differ; what they lead to is the later checkpoint, and others are refused."""
    directory, values = made
    deltas = [delta_between(directory, at, at + 1, tmp_path / f"delta-{at}{ending}") for at in (1, 2, 3)]
    for delta, touched in zip(deltas, TOUCHED, strict=True):
        assert (delta.table, delta.changed) == ("table", len(touched))
        assert ids_in(delta.path) == touched
    table = ServingTable.open(directory / "ckpt-000001", "table")
    every = np.arange(ROWS)
    with pytest.raises(
        StaleError, match=r"from version 2 \(\w{8}\) of 'table' to 3 \(\w{8}\), but 1 \(\w{8}\) is open"
    ):
        table.follow(deltas[1].path)
    for at, delta in enumerate(deltas, 1):
        assert table.follow(delta.path) == delta
        np.testing.assert_array_equal(table.lookup(every), values[at])
        assert table.version == ServingTable.open(directory / f"ckpt-{at + 1:06d}", "table").version
    assert table.changed_rows == len({3, 500, 999, 4, 0})
    with pytest.raises(StaleError, match="follow the deltas in order"):
        table.follow(deltas[2].path)
    np.testing.assert_array_equal(table.lookup(every), values[3])
    back = delta_between(directory, 4, 1, tmp_path / f"back{ending}")
    assert back.changed == 5
    table.follow(back.path)
    np.testing.assert_array_equal(table.lookup(every), values[0])
    same = delta_between(directory, 1, 2, tmp_path / f"bias{ending}", "bias")
    assert same.changed == 0
    bias = ServingTable.open(directory / "ckpt-000002", "bias")
    bias.follow(same.path)
    assert bias.lookup([3]).tolist() == [3]
    with pytest.raises(CheckpointError, match="is of table 'bias', int64"):
        table.follow(same.path)
    whole = export_delta(directory, "table", since=directory / "ckpt-000001", out=tmp_path / "whole", verify=False)
    assert (whole.since.number, whole.version.number, whole.changed) == (1, 4, 5)


def test_a_table_follows_newer_checkpoints(copied: tuple[Path, list[Array]], tmp_path: Path) -> None:
    """Also after deltas, whose rows are then dropped; one without an index is none; a damaged one changes nothing."""
    directory, values = copied
    for name in ("ckpt-000003", "ckpt-000004"):
        (directory / name).rename(tmp_path / name)
    every = np.arange(ROWS)
    table = ServingTable.open(directory, "table")
    assert table.version.number == 2
    since = directory / "ckpt-000002"
    table.follow(export_delta(tmp_path / "ckpt-000003", "table", since=since, out=tmp_path / "delta").path)
    assert not table.refresh()
    assert (table.version.number, table.changed_rows) == (3, 2)
    (tmp_path / "ckpt-000003").rename(directory / "ckpt-000003")
    index = directory / "ckpt-000003" / "index.json"
    index.rename(tmp_path / "index.json")
    assert not table.refresh(), "it is not complete"
    (tmp_path / "index.json").rename(index)
    assert table.refresh()
    assert (table.version.number, table.changed_rows) == (3, 0)
    np.testing.assert_array_equal(table.lookup(every), values[2])
    (tmp_path / "ckpt-000004").rename(directory / "ckpt-000004")
    for file in (directory / "ckpt-000004").glob("*.safetensors"):
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damaged, problem in ((flipped, "is damaged"), (data[: len(data) // 2], "is too short"), (b"", "")):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=rf"{file.name} .*{problem}"):
                _ = [ServingTable.open(directory, name) for name in ("table", "both", "bias", "hashed", "modulo")]
        file.write_bytes(data)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match=file.name):
        table.refresh()
    assert table.version.number == 3
    shutil.rmtree(directory)
    np.testing.assert_array_equal(table.lookup(every), values[2], "it is mapped, and may be removed")


@ENDINGS
def test_a_delta_that_is_damaged_is_refused(made: tuple[Path, list[Array]], tmp_path: Path, ending: str) -> None:
    """Any byte that differs, or is missing; the table is as before. Parquet has bytes that no reader looks at."""
    directory, values = made
    path = tmp_path / f"delta{ending}"
    delta_between(directory, 1, 2, path)
    data, table = path.read_bytes(), ServingTable.open(directory / "ckpt-000001", "table")
    before, refusals = table.version, list[str]()
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        try:
            table.follow(path)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            assert ending
            np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), values[1])
            table = ServingTable.open(directory / "ckpt-000001", "table")
    assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)
    assert len(refusals) > len(data) // 14
    for size in (*range(0, len(data), 31), len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=str(path)):
            table.follow(path)
    path.write_bytes(data + b"more")
    with pytest.raises(CheckpointError, match="was not written to its end" if ending else "something was added to it"):
        table.follow(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="can't be read: No such file"):
        table.follow(path)
    assert table.version == before
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), values[0])
    path.write_bytes(data)
    table.follow(path)


def test_parquet_is_for_other_programs_too(made: tuple[Path, list[Array]], tmp_path: Path) -> None:
    """Its columns are ids and lists of values; damage is named with its row group; a foreign file is none."""
    directory, values = made
    path = tmp_path / "any name"
    delta = export_delta(directory, "table", since=1, out=path, format="parquet")
    rows = pq.read_table(path).to_pylist()
    assert [row["id"] for row in rows] == [0, 3, 4, 500, 999]
    np.testing.assert_array_equal(np.array([row["row"] for row in rows], np.float32), values[3][[0, 3, 4, 500, 999]])
    assert ServingTable.open(directory / "ckpt-000001", "table").follow(path) == delta
    table, whole = ServingTable.open(directory / "ckpt-000001", "table"), pq.read_table(path)
    chunk, data = pq.read_metadata(path).row_group(0).column(1), bytearray(path.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"any name is damaged: row group 0 can't be decoded .*copy it again"):
        table.follow(path)
    pq.write_table(whole.select(["id"]), path)
    with pytest.raises(CheckpointError, match=r"its columns are id \(int64\), not id \(int64\), row \(fixed_size_list"):
        table.follow(path)
    with pq.ParquetWriter(path, whole.schema) as writer:
        for part in (whole[2:], whole[:0], whole[:2]):
            writer.write_table(part)
    assert pq.read_metadata(path).num_row_groups == 3
    with pytest.raises(CheckpointError, match=r"id 0 \(position 3\) comes after 999"):
        table.follow(path)
    pq.write_table(whole.replace_schema_metadata(None), path)
    with pytest.raises(CheckpointError, match="is a Parquet file, but no delta: its metadata has no 'pscluster-delta'"):
        table.follow(path)
    assert table.version.number == 1


def test_parquet_has_rows_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each type, in one row group or in several: what is read is what was written, byte for byte."""
    ids, random = np.arange(0, 100, 3), np.random.default_rng(0)

    def of_rows(rows: npt.NDArray[Any], some: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return rows[some // 3]

    def has_all(some: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.ones(len(some), np.bool_)

    monkeypatch.setattr(delta_parquet, "_GROUP_BYTES", 300)
    for shape in ((100,), (100, 6), (100, 2, 3)):
        for name in delta_parquet._TYPES:
            rows = (5 * random.normal(size=(len(ids), *shape[1:]))).astype(name)
            header = Header("t", rows.dtype, shape, False, TableVersion(1, 32 * "a"), TableVersion(2, 32 * "b"))
            for count in (len(ids), 0):
                pieces = [ids[:count][start : start + 5] for start in range(0, count, 5)]
                file = io.BytesIO()
                delta_parquet.write(file, Changes(header, count, pieces.__iter__, partial(of_rows, rows), has_all))
                loaded = delta_parquet.read("file", file.getvalue())
                assert (loaded.header, loaded.delta.changed) == (header, count)
                assert loaded.ids.tobytes() == ids[:count].tobytes()
                assert loaded.rows.tobytes() == rows[:count].tobytes()


@pytest.mark.parametrize(
    ("name", "rows", "ids", "problem"),
    [
        ("other", ROWS, [0, 1], "is of table 'other'"),
        ("table", 10 * ROWS, [0, 1], rf"is of table 'table', float32\[{10 * ROWS}, {DIM}\], not of"),
        ("table", ROWS, [4] * (ROWS + 1), "it has 1,001 of 1,000 rows"),
        ("table", ROWS, [4] * ROWS, r"id 4 \(position 1\) comes after 4"),
        ("table", ROWS, [*range(500), *range(499, 999)], r"id 499 \(position 500\) comes after 499"),
    ],
)
def test_parquet_is_not_decoded_for_nothing(
    made: tuple[Path, list[Array]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    rows: int,
    ids: list[int],
    problem: str,
) -> None:
    """A few KiB may stand for GiB of equal rows: what they are of, and their ids, are checked before."""

    def decode(*_: Any) -> Any:
        raise AssertionError

    table = ServingTable.open(made[0] / "ckpt-000001", "table")
    header = Header(name, np.dtype(np.float32), (rows, DIM), False, table.version, TableVersion(2, 32 * "b"))
    changes = Changes(
        header,
        len(ids),
        lambda: iter([np.array(ids, np.int64)]),
        lambda some: np.zeros((len(some), DIM), np.float32),
        lambda some: np.ones(len(some), np.bool_),
    )
    with (tmp_path / "delta").open("wb") as file:
        delta_parquet.write(file, changes)
    monkeypatch.setattr(delta_parquet, "_arrays", decode)
    monkeypatch.setattr(delta_parquet, "_IDS_AT_ONCE", 500)
    with pytest.raises(CheckpointError, match=problem):
        table.follow(tmp_path / "delta")


def test_parquet_that_cannot_be_is_refused(
    made: tuple[Path, list[Array]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats that do not exist, types that Parquet lacks, and, before anything is read, a missing pyarrow."""
    directory, _ = made
    with pytest.raises(MisuseError, match="format is 'csv'; it must be 'safetensors' or 'parquet'"):
        export_delta(directory, "table", since=1, out=tmp_path / "delta", format="csv")  # type: ignore[arg-type]
    for name in ("ids.csv", "delta.PARQUET", "delta-1.2"):
        with pytest.raises(MisuseError, match=rf"{name} ends in .*; it must end in .safetensors or .parquet, or give"):
            export_delta(directory, "table", since=1, out=tmp_path / name)
    Path(export_delta(directory, "table", since=1, out=tmp_path / "delta-1.2", format="safetensors").path).unlink()
    with pytest.raises(CheckpointError, match="s3://bucket/delta can't be written: give a file on a disk"):
        export_delta(directory, "table", since=1, out="s3://bucket/delta")
    for since in (-1, 1.5, None):
        with pytest.raises(MisuseError, match=rf"'table': since is {since}; it must be a whole number, .*or its path"):
            export_delta(directory, "table", since=since, out=tmp_path / "delta")  # type: ignore[arg-type]
    assert export_delta(directory, "table", since=np.int64(1), out=tmp_path / "d").since.number == 1  # type: ignore[arg-type]
    (tmp_path / "d").unlink()
    with pytest.raises(
        MisuseError, match=r"Parquet has no type for the rows of 'complex', complex64\[2\]: export it as"
    ):
        export_delta(directory, "complex", since=1, out=tmp_path / "delta.parquet")
    path = delta_between(directory, 1, 2, tmp_path / "whole.parquet").path
    table = ServingTable.open(directory / "ckpt-000001", "table")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    missing = r"\.parquet is a delta in Parquet, .* pip install 'pscluster\[parquet\]'"
    with pytest.raises(MisuseError, match=missing):
        export_delta("nowhere", "table", since=1, out=tmp_path / "delta.parquet")
    with pytest.raises(MisuseError, match=missing):
        table.follow(path)
    assert list(tmp_path.iterdir()) == [Path(path)]
    assert table.version.number == 1


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from pscluster.coordinator.serving import deltas, export_delta

    directory, out, when = sys.argv[1:]
    real = getattr(os, when)

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, when, die)
    export_delta(directory, "table", since=int(Path(out).name), out=out)
"""


@pytest.mark.parametrize("when", ["fsync", "replace"])
def test_a_writer_that_is_killed_leaves_the_file_of_before(
    made: tuple[Path, list[Array]], tmp_path: Path, when: str
) -> None:
    """No delta is there under its name, or the one before; the next writer completes it."""
    directory, values = made
    table = ServingTable.open(directory / "ckpt-000002", "table")
    out = tmp_path / "2"
    for attempt in range(2):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(directory), str(out), when]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
        assert (tmp_path / "2.new").exists()
        assert out.exists() == bool(attempt)
        if not attempt:
            delta_between(directory, 2, 3, out)
    os.truncate(tmp_path / "2.new", os.path.getsize(tmp_path / "2.new") // 2)
    with pytest.raises(CheckpointError, match=r"2\.new"):
        table.follow(tmp_path / "2.new")
    table.follow(out)
    np.testing.assert_array_equal(table.lookup(np.arange(ROWS)), values[2])
    with pytest.raises(CheckpointError, match="can't be written: No such file"):
        delta_between(directory, 2, 3, tmp_path / "nowhere" / "delta")
    for folder in (tmp_path, Path()):
        with pytest.raises(CheckpointError, match="can't be written: it is a directory; give the path of a file"):
            delta_between(directory, 2, 3, folder)


@pytest.mark.parametrize("ending", ["safetensors", "parquet"])
def test_a_full_disk_keeps_the_file_of_before_and_gets_its_room_back(
    made: tuple[Path, list[Array]], tmp_path: Path, ending: str
) -> None:
    """A file that can't become as large as the delta, in place of a disk that is full; then a checkpoint is gone."""
    directory, _ = made
    out = tmp_path / f"out.{ending}"
    before = Path(delta_between(directory, 1, 2, out).path).read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"out\.{ending} can't be written: File too large"):
            delta_between(directory, 2, 3, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == before
    with pytest.raises(
        CheckpointError, match=rf"{directory} no longer has checkpoint 9, or never had it; it has 1, 2, 3, 4: export"
    ):
        export_delta(directory, "table", since=9, out=out)
    shutil.copytree(directory / "ckpt-000004", alone := tmp_path / "alone" / "4")
    with pytest.raises(
        CheckpointError, match=rf"{alone.parent} no longer has checkpoint 4, or never had it; it has none: open"
    ):
        export_delta(alone, "table", since=4, out=out)
    assert out.read_bytes() == before


def test_lookups_see_all_of_a_delta_or_nothing(made: tuple[Path, list[Array]], tmp_path: Path) -> None:
    """While another thread follows deltas back and forth."""
    directory, values = made
    there = delta_between(directory, 1, 2, tmp_path / "there").path
    back = delta_between(directory, 2, 1, tmp_path / "back").path
    table, over = ServingTable.open(directory / "ckpt-000001", "table"), threading.Event()
    torn = list[int]()

    def look() -> None:
        ids = np.array(TOUCHED[0])
        while not over.is_set():
            rows = table.lookup(ids)
            if not any((rows == each[ids]).all() for each in values[:2]):
                torn.append(1)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(100):
        table.follow(there)
        table.follow(back)
    over.set()
    thread.join()
    assert not torn


def test_tables_of_another_shape_are_refused(copied: tuple[Path, list[Array]], tmp_path: Path) -> None:
    """In a newer checkpoint, and in the earlier one of a delta."""
    directory, values = copied
    narrow = directory / "narrow" / "ckpt-000001"
    with pytest.raises(MisuseError, match=r"'table' is float32\[1000, 6\] in .*, but float32\[4, 2\] in .*narrow"):
        export_delta(directory, "table", since=narrow, out=tmp_path / "delta")
    assert not (tmp_path / "delta").exists()
    for name in ("ckpt-000003", "ckpt-000004", "ckpt-000002"):
        shutil.rmtree(directory / name)
    table = ServingTable.open(directory, "table")
    narrow.rename(directory / "ckpt-000002")
    with pytest.raises(MisuseError, match=r"'table' is float32\[1000, 6\]"):
        table.refresh()
    np.testing.assert_array_equal(table.lookup([1, 2]), values[0][[1, 2]])


def test_what_serves_imports_no_job() -> None:
    """Reading needs neither the queue nor a transport."""
    code = """
        import sys
        import pscluster.coordinator.serving
        print([name for name in sys.modules if name.startswith(("pscluster.coordinator.job", "pscluster.ps.client",
               "pscluster.coordinator.scheduling", "pscluster.core.transport.tcp", "aiohttp"))])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "[]\n"
