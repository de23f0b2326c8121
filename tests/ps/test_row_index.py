"""The index of a table's rows, where others have chosen their ids."""

from __future__ import annotations

import numpy as np

from pscluster.core.numbers.splitmix import GOLDEN, MULTIPLIERS, Hashes, mixed
from pscluster.ps.row_index import RowIndex


def unshifted(numbers: Hashes, bits: int) -> Hashes:
    """Undo z ^= z >> bits."""
    z = numbers
    for _ in range(64 // bits):
        z = numbers ^ (z >> np.uint64(bits))
    return z


def ids_of(hashes: Hashes) -> Hashes:
    """The numbers that have these hashes, if there is no secret key."""
    first, second = (np.uint64(pow(multiplier, -1, 1 << 64)) for multiplier in MULTIPLIERS)
    return unshifted(unshifted(unshifted(hashes, 31) * second, 27) * first, 30) - np.uint64(GOLDEN)


def test_ids_chosen_to_collide_are_spread() -> None:
    """Integers whose hashes would end alike without the key: each search would take as many steps as there are ids."""
    wanted = np.arange(20_000, dtype=np.uint64) << np.uint64(32)
    chosen = ids_of(wanted)
    np.testing.assert_array_equal(mixed(chosen), wanted)
    index, ids, places = RowIndex(), chosen.view(np.int64), np.arange(20_000)
    index.make_room(len(ids))
    assert len(np.unique(index._first_slots(ids))) > 10_000
    index.enter(ids, places)
    np.testing.assert_array_equal(index.find(ids, ids), places)
