"""From one splitting of an array to another: which blocks and rows go from which shard to which."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pscluster.core.geometry.partition import Block, Partition
from pscluster.core.geometry.row_orders import Ids


@dataclass(frozen=True, slots=True)
class Move:
    """A block that goes from an old shard to a new one: in coordinates of the whole array, but places instead of rows.

    If the rows' places change, it is all rows, and it goes what both shards have of them; see `common_rows`.
    """

    old_shard: int
    new_shard: int
    block: Block


def moves(old: Partition, new: Partition) -> Iterator[Move]:
    """Yield the blocks to move between two splittings of one shape.

    The blocks are not empty, don't overlap and together cover the whole, unless the rows' places change. An unchanged
    shard also yields one move: whether it actually moves depends on the owners, which this module doesn't know. Raise
    ValueError, at the first step, if the shapes differ.
    """
    if old.shape != new.shape:
        raise ValueError(f"shape {old.shape} can't be split again as shape {new.shape}")
    axes = [list(_common_pieces(a, b)) for a, b in zip(old.ends, new.ends, strict=True)]
    if not old.has_order_of(new):
        pairs = itertools.product(range(len(old.ends[0])), range(len(new.ends[0])))
        axes[0] = [_CommonPiece(a, b, 0, old.shape[0]) for a, b in pairs if old.shape[0]]
    for pieces in itertools.product(*axes):
        yield Move(
            old.shard_index(p.old for p in pieces),
            new.shard_index(p.new for p in pieces),
            Block(tuple(p.start for p in pieces), tuple(p.stop for p in pieces)),
        )


def common_rows(old: Partition, old_piece: int, new: Partition, new_piece: int) -> tuple[Ids, Ids]:
    """Return the rows that an old and a new piece of axis 0 have in common: their numbers in the old, and in the new.

    The partitions are of rows, as `of_rows` is, and of the same ones.
    """
    local = new.places(old.row_ids(old_piece)) - new.block(new_piece).start[0]
    inside = np.flatnonzero((local >= 0) & (local < new.block(new_piece).shape[0]))
    return inside, local[inside]


class _CommonPiece(NamedTuple):
    old: int
    new: int
    start: int
    stop: int


def _common_pieces(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[_CommonPiece]:
    """Yield the non-empty pieces of one axis that both cuts leave whole, in order."""
    i = j = start = 0
    while i < len(old) and j < len(new):
        stop = min(old[i], new[j])
        if stop > start:
            yield _CommonPiece(i, j, start, stop)
        start = stop
        # Advance both if they end together, else the one that ends first.
        i, j = i + (old[i] == stop), j + (new[j] == stop)
