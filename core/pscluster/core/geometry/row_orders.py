"""Orders of rows: in which place of a cut table each row lies.

A table is cut along axis 0 into contiguous ranges of places. With the order "range" the row of an id lies in the place
of that number, as in TensorFlow. Ids often have a meaning, though: frequent ones come first, or new ones last, and then
one range gets most of the traffic. The other orders are bijections from ids to places that spread neighbours:

- "modulo": of n shards, shard `id % n` holds the row, as its row `id // n`. The shards' sizes are those of
  `geometry.even_ends`.
- "hash": places are ids scrambled by a seed. Ids that share a factor with the number of shards are spread as well.

Tables that are joined end to end keep each its own order: `JoinedOrder`.

Hashing: on k bits, `x ^= x >> s` and `x = (x + a) * m`, with an odd m, are bijections; three rounds of them, as in the
finalizer of MurmurHash3 (Appleby 2011), scramble 0..2**k - 1. The constants a are drawn from the seed by SplitMix64
(Steele et al. 2014). For a number of rows that is no power of two, whatever leaves 0..rows - 1 is scrambled again until
it is back: cycle walking (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). That is less than one more
time on average. All is arithmetic on unsigned integers, the same everywhere. It is no cryptography: ids can
be picked so that they meet on one shard.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
import numpy.typing as npt

from pscluster.core.numbers.splitmix import GOLDEN, MASK, MULTIPLIERS, drawn

Ids = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]
_Step = Callable[[_Words], None]

RowOrderKind = Literal["range", "modulo", "hash"]
KINDS: tuple[RowOrderKind, ...] = get_args(RowOrderKind)

_MULTIPLIERS = GOLDEN, *MULTIPLIERS


@dataclass(frozen=True, slots=True)
class RowOrder:
    """An order of rows. Raises ValueError if there is none of that kind, or the seed does not fit in 64 bits.

    The methods take the ends of the shards, which "modulo" depends on.
    """

    kind: RowOrderKind = "range"
    seed: int = 0  # of "hash"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"there is no order of rows {self.kind!r}; choose one of {', '.join(KINDS)}")
        if not 0 <= self.seed <= MASK:
            raise ValueError(f"the seed of an order of rows must lie in 0..2**64 - 1, but it is {self.seed}")
        if self.seed and self.kind != "hash":
            raise ValueError(f"only the order of rows 'hash' has a seed, but {self.kind!r} has {self.seed}")

    def places(self, ids: Ids, ends: tuple[int, ...]) -> Ids:
        """Return the places of the rows with these ids, each in 0..rows - 1."""
        if self.kind == "modulo":
            owners, local_ids = by_modulo(ids, len(ends))
            return np.asarray((0, *ends[:-1]), np.int64)[owners] + local_ids
        return _Hash.of(ends[-1], self.seed).places(ids) if self.kind == "hash" and ids.size else ids

    def row_ids(self, start: int, stop: int, ends: tuple[int, ...]) -> Ids:
        """Return the ids of the rows in the places from `start` to before `stop`."""
        places = np.arange(start, stop, dtype=np.int64)
        if self.kind == "modulo":
            owners = np.searchsorted(np.asarray(ends, np.int64), places, side="right")
            return (places - np.asarray((0, *ends[:-1]), np.int64)[owners]) * len(ends) + owners
        return _Hash.of(ends[-1], self.seed).ids(places) if self.kind == "hash" and places.size else places


RANGE = RowOrder()


@dataclass(frozen=True, slots=True)
class JoinedOrder:
    """The order of rows of tables that lie end to end: each table's rows are in places of its own, in its own order.

    `parts` are the orders of the tables, each with the ends of its shards. The methods are those of `RowOrder`.
    """

    parts: tuple[tuple[RowOrder, tuple[int, ...]], ...]
    kind: ClassVar[Literal["joined"]] = "joined"
    seed: ClassVar[int] = 0

    @property
    def ends(self) -> tuple[int, ...]:
        """The ends of all shards."""
        return tuple(start + end for start, _, ends in self._tables() for end in ends)

    def _tables(self) -> Iterator[tuple[int, RowOrder, tuple[int, ...]]]:
        """Yield the first place, the order and the ends of each table."""
        start = 0
        for order, ends in self.parts:
            yield start, order, ends
            start += ends[-1]

    def places(self, ids: Ids, ends: tuple[int, ...]) -> Ids:
        """Return the places of the rows with these ids, each in 0..rows - 1."""
        del ends
        places = ids.copy()
        for start, order, own in self._tables():
            if order != RANGE:
                there = (ids >= start) & (ids < start + own[-1])
                places[there] = order.places(ids[there] - start, own) + start
        return places

    def row_ids(self, start: int, stop: int, ends: tuple[int, ...]) -> Ids:
        """Return the ids of the rows in the places from `start` to before `stop`."""
        del ends
        pieces = [np.empty(0, np.int64)]
        for first, order, own in self._tables():
            low, high = max(start - first, 0), min(stop - first, own[-1])
            if low < high:
                pieces.append(order.row_ids(low, high, own) + first)
        return np.concatenate(pieces)


def by_modulo(ids: Ids, shards: int) -> tuple[Ids, Ids]:
    """Return `ids % shards` and `ids // shards`; the ids are not negative."""
    local_ids = (ids.view(np.uint64) // np.uint64(shards)).view(np.int64)  # NumPy divides unsigned numbers faster
    return ids - local_ids * shards, local_ids


class _Hash:
    """The bijection of one seed on 0..rows - 1; rows above 0."""

    def __init__(self, rows: int, seed: int) -> None:
        bits = max(1, (rows - 1).bit_length())
        self._rows = np.uint64(rows)
        self._mask = np.uint64((1 << bits) - 1)
        self._shift = np.uint64((bits + 1) // 2)
        # (to add, to multiply by, the multiplier's inverse)
        self._rounds = [
            (add, np.uint64(multiplier), np.uint64(pow(multiplier, -1, 1 << 64)))
            for add, multiplier in zip(drawn(seed, len(_MULTIPLIERS)), _MULTIPLIERS, strict=True)
        ]

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def of(rows: int, seed: int) -> _Hash:
        return _Hash(rows, seed)

    def places(self, ids: Ids) -> Ids:
        return self._walk(ids, self._scramble)

    def ids(self, places: Ids) -> Ids:
        return self._walk(places, self._restore)

    def _walk(self, numbers: Ids, step: _Step) -> Ids:
        words = np.array(numbers, np.int64).view(np.uint64)
        step(words)
        outside = np.flatnonzero(words >= self._rows)
        while outside.size:
            again = words[outside]
            step(again)
            words[outside] = again
            outside = outside[again >= self._rows]
        return words.view(np.int64)

    # Both work in place, on words of k bits. A shift by half of them or more is undone by itself.

    def _scramble(self, words: _Words) -> None:
        for add, multiplier, _ in self._rounds:
            words += add
            words *= multiplier
            words &= self._mask
            words ^= words >> self._shift

    def _restore(self, words: _Words) -> None:
        for add, _, inverse in reversed(self._rounds):
            words ^= words >> self._shift
            words *= inverse
            words -= add
            words &= self._mask
