"""The files that are saved with a position, and how others are named."""

from __future__ import annotations

import json

import pytest

from pscluster.coordinator.data.epoch_coverage import EpochCoverage
from pscluster.coordinator.data.file_lists import MOST, FileList, Listed
from pscluster.core.errors import CheckpointMisfitError

FILES: list[Listed] = [(f"/data/{month}/part.csv", 100 + month, 2) for month in (1, 2, 3)]


def test_the_same_files_elsewhere() -> None:
    """They may be in another folder; a single one, too."""
    moved = [(name.replace("/data/", "s3://bucket/year/"), size, blocks) for name, size, blocks in FILES]
    for before, now in ((FILES, moved), (FILES[:1], moved[:1])):
        FileList(now).check(json.loads(json.dumps(FileList(before).state())))


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (FILES[:2], "'3/part.csv' is missing; restore the files as they were, or give the dataset another name"),
        ([*FILES, ("/data/4/part.csv", 1, 1)], "'4/part.csv' is new;"),
        ([*FILES[:2], ("/data/3/part.csv", 7, 2)], "'3/part.csv' has 7 bytes, and had 103;"),
        ([*FILES[:2], ("/data/3/part.csv", 103, 5)], "'3/part.csv' is read in 5 blocks, and was in 2;"),
        (FILES[::-1], "they are in another order;"),
        ([(f"/data/{n}/x", 1, 1) for n in range(9)], "'2/part.csv' is missing, '3/part.csv' is missing, and 9 more;"),
        (
            [(f"/data/{n}", 1, 1) for n in range(MOST + 1)],
            "their names, sizes or order are not those of the 1,001 files",
        ),
    ],
)
def test_other_files_are_named(now: list[Listed], said: str) -> None:
    """Each with what has become of it."""
    with pytest.raises(CheckpointMisfitError, match=f"the saved position is of other files: .*{said}"):
        FileList(now).check(json.loads(json.dumps(FileList(FILES).state())))


def test_many_files_are_known_by_a_digest() -> None:
    """It is short, and another size is noticed."""
    many = [(f"/data/{n}", n, 1) for n in range(MOST + 1)]
    saved = FileList(many).state()
    assert len(saved) == 64
    FileList(many).check(saved)
    with pytest.raises(CheckpointMisfitError, match="not those of the 1,001 files here"):
        FileList([*many[:-1], ("/data/1000", 7, 1)]).check(saved)


@pytest.mark.parametrize("saved", [None, 3, [[1]], [["x", "y", "z"]], {}, [[{}, 1, 2]]])
def test_nonsense_is_refused(saved: object) -> None:
    """As other files, before the position is taken from it."""
    coverage = EpochCoverage(6, 6, files=FileList(FILES))
    coverage.commit(0, 0, 2)
    state = {**coverage.state(), "files": saved}
    with pytest.raises(CheckpointMisfitError, match="of other files"):
        coverage.load(state)
    assert coverage.visited(0) == 2
