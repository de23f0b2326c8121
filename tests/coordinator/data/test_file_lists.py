"""The files that are saved with a position, and how others are named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pscluster.coordinator import sources
from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.data.file_lists import MOST, FileList
from pscluster.core.errors import CheckpointMismatchError
from pscluster.worker.data.sources import Listed, source_of

FILES = [Listed(f"/data/{month}/part.csv", 100 + month, 2) for month in (1, 2, 3)]


def test_the_same_files_elsewhere() -> None:
    """They may be in another folder; a single one, too."""
    moved = [file._replace(name=file.name.replace("/data/", "s3://bucket/year/")) for file in FILES]
    for before, now in ((FILES, moved), (FILES[:1], moved[:1])):
        FileList(now).check(json.loads(json.dumps(FileList(before).state())))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (FILES[:2], "'3/part.csv' is missing; restore the files as they were, or give the dataset another name"),
        ([*FILES, Listed("/data/4/part.csv", 1, 1)], "'4/part.csv' is new;"),
        ([*FILES[:2], Listed("/data/3/part.csv", 7, 2)], "'3/part.csv' has 7 bytes, and had 103;"),
        ([*FILES[:2], Listed("/data/3/part.csv", 103, 5)], "'3/part.csv' is read in 5 blocks, and was in 2;"),
        ([*FILES[:2], FILES[2]._replace(digest="b0")], "'3/part.csv' has other contents than it had;"),
        (FILES[::-1], "they are in another order;"),
        (
            [Listed(f"/data/{n}/x", 1, 1) for n in range(9)],
            "'2/part.csv' is missing, '3/part.csv' is missing, and 9 more;",
        ),
        (
            [Listed(f"/data/{n}", 1, 1) for n in range(MOST + 1)],
            "their names, sizes or order are not those of the 1,001 files",
        ),
    ],
)
def test_other_files_are_named(now: list[Listed], said: str) -> None:
    """Each with what has become of it."""
    with pytest.raises(CheckpointMismatchError, match=f"the saved position is of other files: .*{said}"):
        FileList(now).check(json.loads(json.dumps(FileList(FILES).state())))


def write_npy(path: Path, values: Any) -> None:
    """A file of rows."""
    with path.open("wb") as file:
        np.save(file, values)


def write_arrow(path: Path, values: Any) -> None:
    """An Arrow file with a column."""
    table = pa.table({"x": values})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)


@pytest.mark.parametrize(
    ("write", "source"),
    [
        (write_npy, lambda folder: sources.npy(f"{folder}/*")),
        (write_npy, lambda folder: sources.npy({"x": f"{folder}/[01]", "y": f"{folder}/[23]"})),
        (write_arrow, lambda folder: sources.arrow(f"{folder}/*")),
    ],
)
def test_files_of_rows_with_other_contents(
    tmp_path: Path, write: Callable[[Path, Any], None], source: Callable[[Path], Any]
) -> None:
    """They are noticed, also those with as many rows and bytes; copies elsewhere are the same."""

    def listed(folder: Path) -> FileList:
        files = source_of(source(folder)).listed  # type: ignore[union-attr]
        assert files is not None
        return FileList(files)

    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        for number in range(4):
            write(folder / str(number), np.arange(5000) * number)
    os.utime(there / "0", (0, 0))
    saved = json.loads(json.dumps(listed(here).state()))
    listed(there).check(saved)
    size = (there / "3").stat().st_size
    write(there / "3", np.arange(5000) * 7)
    assert (there / "3").stat().st_size == size
    with pytest.raises(CheckpointMismatchError, match="'3' has other contents than it had; restore the files"):
        listed(there).check(saved)


def test_many_files_are_known_by_a_digest() -> None:
    """It is short, and another size is noticed."""
    many = [Listed(f"/data/{n}", n, 1) for n in range(MOST + 1)]
    saved = FileList(many).state()
    assert len(saved) == 64
    FileList(many).check(saved)
    with pytest.raises(CheckpointMismatchError, match="not those of the 1,001 files here"):
        FileList([*many[:-1], Listed("/data/1000", 7, 1)]).check(saved)


@pytest.mark.parametrize("saved", [None, 3, [[1]], [["x", "y", "z"]], {}, [[{}, 1, 2]]])
def test_nonsense_is_refused(saved: object) -> None:
    """As other files, before the position is taken from it."""
    coverage = EpochCoverage(6, 6, files=FileList(FILES))
    coverage.commit(0, 0, 2)
    state = {**coverage.state(), "files": saved}
    with pytest.raises(CheckpointMismatchError, match="of other files"):
        coverage.load(state)
    assert coverage.visited(0) == 2
