"""Copying in blocks: what is written, and what is not once reading or writing has failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pscluster.coordinator.moves.copying import copied


def blocks(count: int, fails: int = -1) -> Iterator[int]:
    for number in range(count):
        if number == fails:
            raise OSError("it can't be read")
        yield number


@pytest.mark.parametrize(
    ("unreadable", "unwritable", "written"), [(-1, -1, [0, 1, 2, 3, 4]), (3, -1, [0, 1, 2]), (-1, 1, [0])]
)
def test_what_is_written(unreadable: int, unwritable: int, written: list[int]) -> None:
    """In order, up to an error, which comes out when nothing is being written any more."""
    done = []

    def write(block: int) -> int:
        if block == unwritable:
            raise OSError("it can't be written")
        done.append(block)
        return 10 * block

    if unreadable == unwritable:
        assert copied(blocks(5), write) == 100
    else:
        with pytest.raises(OSError, match=r"can't be read" if unreadable > 0 else "can't be written"):
            copied(blocks(5, unreadable), write)
    assert done == written
    assert copied([], write) == 0
