"""A request's payload, in the chunks that arrived."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from pscluster.ps.server.requests.payload import Payload


def chunks_of(*sizes: int) -> tuple[list[memoryview], list[weakref.ref[np.ndarray]]]:
    """Return chunks whose bytes count on from one to the next, and references that show which are still in memory."""
    made, at = [], 0
    for size in sizes:
        made.append(np.arange(at, at + size, dtype=np.uint8))
        at += size
    return [array.data for array in made], [weakref.ref(array) for array in made]


@pytest.mark.parametrize("once", [False, True])
def test_blocks_are_cut_where_the_chunks_are(once: bool) -> None:
    payload = Payload(chunks_of(8, 8, 16)[0], once=once)
    assert [(offset, bytes(block)) for offset, block in payload.blocks(4, 24, 4)] == [
        (0, bytes(range(4, 8))),
        (4, bytes(range(8, 16))),
        (12, bytes(range(16, 28))),
    ]


def test_elements_stay_whole() -> None:
    payload = Payload(chunks_of(6, 10)[0], once=True)
    assert [(offset, bytes(block)) for offset, block in payload.blocks(0, 16, 4)] == [(0, bytes(range(16)))]


def test_what_was_given_once_goes() -> None:
    chunks, alive = chunks_of(8, 8, 8)
    payload = Payload(chunks, once=True)
    assert chunks == []  # else the caller's list would keep them alive
    seen = []
    for _, block in payload.blocks(0, 20, 4):
        seen.append([reference() is not None for reference in alive])
        del block
    assert seen == [[True, True, True], [False, True, True], [False, False, True]]
    assert alive[2]() is not None  # more of it is needed
    assert bytes(next(payload.blocks(20, 4, 4))[1]) == bytes(range(20, 24))


def test_what_is_asked_for_again_stays() -> None:
    chunks, alive = chunks_of(8, 8)
    payload = Payload(chunks)
    for _ in range(2):
        assert b"".join(block for _, block in payload.blocks(0, 16, 8)) == bytes(range(16))
    assert payload.array(0, 2, np.int64).tolist() == payload.array(0, 2, np.int64).tolist()
    assert all(reference() is not None for reference in alive)
    assert len(payload.chunks) == 2
