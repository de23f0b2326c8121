"""Which rows a table's shard makes and which it drops: the decisions. Pure, but for the counts that it is given.

    no row    --a gradient of the id that is not admitted--> no row: the gradient is dropped, and the id seen once more
              --one that is, or any other kind of update--> a row, with its initial values, fresh slots and this use
    a row     --an update of its id--> used now, and once more
              --an update of the shard that finds it expired, or needs its room--> no row; nothing is known of it

Decided once, by an update under the shard's lock, before it changes any value; never for a row of its own. The decision
is logged with the update (`TableChange`), as the ids that went and that came. A replay does what it says and decides
nothing: neither the clock nor what had been seen need be the same. Rows' uses are part of them, and so are saved, moved
and restored with them (`TableEviction`).

May be lost: what has been seen of ids that have no row. It goes with the process, and when the shard moves or is
restored; those ids are admitted later. If the table is cut into other shards it goes along (`CountMinSketch.take`). A
shard that has no updates drops nothing, however old its rows are.

Work is bounded by the update's: it looks at a window of rows, which goes round the shard, and drops what it finds. So
a row that has expired may stay until the window is there, and of more rows than one window has, the one that goes is
the least used of those. All of a shard is looked at only where it is full, and what makes room there is age or norm.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ProtocolError
from pscluster.core.numbers.splitmix import Hashes, mixed
from pscluster.core.transport.frames import view
from pscluster.ps.row_ids import RowIds, numbers_of
from pscluster.ps.tables import SEEN_BYTES, Ids, Rows
from pscluster.v1 import ps_pb2

Uses = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

_COUNT = np.uint64((1 << 32) - 1)
_AGE_BITS = np.uint64(32)
_HALF = np.uint64(1 << 31)

_HASHES = 4
_CELLS = SEEN_BYTES // _HASHES
_AGEING = 8 * _CELLS
"""Counts are halved after this many sightings: ids that are no longer seen are forgotten, and the others stay apart."""

_DROPPED = 1 << 16
"""Ids that are remembered after their rows were dropped, at most: 512 KiB a shard."""

_WINDOW = 1 << 12
"""Rows that are looked at for those that have expired, at least: four for each id of the update."""

_CANDIDATES = 1 << 16
"""Rows among which those to make room are chosen, at least: eight for each."""


class CountMinSketch:
    """How often ids were seen, in memory of a fixed size. A count is never too low, and seldom too high.

    A count-min sketch (Cormode and Muthukrishnan 2005), of which only the lowest counts are raised (Estan and Varghese
    2002), by double hashing (Kirsch and Mitzenmacher 2006), and halved at times (Einziger, Friedman and Manes 2017).
    """

    def __init__(self) -> None:
        self._counts = np.zeros((_HASHES, _CELLS), np.uint8)
        self.added = 0

    def add(self, ids: RowIds) -> npt.NDArray[np.int64]:
        """See these ids once more, each of which is given once; return how often they have been seen, 255 at most."""
        hashes = mixed(numbers_of(ids))
        first, second = hashes & np.uint64(0xFFFF_FFFF), (hashes >> np.uint64(32)) | np.uint64(1)
        cells = [((first + np.uint64(k) * second) % np.uint64(_CELLS)).view(np.int64) for k in range(_HASHES)]
        least = np.min([row[at] for row, at in zip(self._counts, cells, strict=True)], axis=0)
        counts: npt.NDArray[np.int64] = np.minimum(least.astype(np.int64) + 1, 255)
        for row, at in zip(self._counts, cells, strict=True):
            np.maximum.at(row, at, counts.astype(np.uint8))
        self.added += len(ids)
        if self.added >= _AGEING:
            np.right_shift(self._counts, 1, out=self._counts)
            self.added //= 2
        return counts

    @property
    def data(self) -> memoryview:
        """All counts, as bytes."""
        return view(self._counts)

    def take(self, data: memoryview, added: int) -> None:
        """Take over counts that were made elsewhere, after this many sightings. ProtocolError if they are none.

        If they are cell by cell the highest of several, no count of an id that one of these has seen is too low.
        """
        if len(data) != self._counts.nbytes or not 0 <= added < _AGEING:
            raise ProtocolError(f"{len(data):,} bytes of counts of ids, after {added:,} sightings")
        self._counts[...] = np.frombuffer(data, np.uint8).reshape(self._counts.shape)
        self.added = added


class RecentlyEvicted:
    """Ids whose rows were evicted recently, in memory of a fixed size: a later one may overwrite an earlier one."""

    def __init__(self) -> None:
        self._hashes = ~np.arange(_DROPPED, dtype=np.uint64)  # none that belongs in its place

    def add(self, ids: RowIds) -> None:
        hashes = mixed(numbers_of(ids))
        self._hashes[hashes % np.uint64(_DROPPED)] = hashes

    def count(self, ids: RowIds) -> int:
        """Return how many of these ids it remembers: a lower bound."""
        hashes = mixed(numbers_of(ids))
        return int(np.count_nonzero(self._hashes[hashes % np.uint64(_DROPPED)] == hashes))


def admitted(policy: ps_pb2.TableAdmission, ids: RowIds, seen: CountMinSketch, step: int) -> Mask:
    """Return which of some ids without a row get one by a gradient, in this step of the shard. Counts them as seen."""
    if policy.seen:
        return seen.add(ids) >= policy.seen
    keys = mixed(numbers_of(ids) ^ _mixed_number(policy.seed)) ^ _mixed_number(step)
    return (mixed(keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53 < policy.probability


def _mixed_number(number: int) -> np.uint64:
    hashed: np.uint64 = mixed(np.array([number & ((1 << 64) - 1)], np.uint64))[0]
    return hashed


def uses(before: Uses, now: int) -> Uses:
    """Return the uses of rows that are used once more."""
    counts = np.minimum((before & _COUNT) + np.uint64(1), _COUNT)
    used: Uses = np.uint64(now) << _AGE_BITS | counts
    return used


def ages(row_uses: Uses, now: int) -> Hashes:
    """Return how long ago rows were last used. The clock, of 32 bits, may have been set back: then it is 0."""
    ago: Hashes = (np.uint64(now) - (row_uses >> _AGE_BITS)) & _COUNT
    ago[ago >= _HALF] = 0
    return ago


def moved_to(row_uses: Uses, before: int, now: int) -> Uses:
    """Return the uses as of a clock that shows `now` where the one of before has shown `before`."""
    moved: Uses = ((np.uint64(now) - ages(row_uses, before)) & _COUNT) << _AGE_BITS | row_uses & _COUNT
    return moved


def newest(row_uses: Uses) -> int:
    """Return the latest use, on a clock that has not gone round."""
    return int((row_uses >> _AGE_BITS).max(initial=0))


def in_steps(updates: int) -> int:
    """Return what a clock of 32 bits shows after this many updates."""
    return updates & int(_COUNT)


def in_seconds(now: float) -> int:
    """Return what it shows this many seconds after the epoch."""
    return int(now) & int(_COUNT)


def counts_steps(table: ps_pb2.TableSpec) -> bool:
    """Return whether the clock by which rows age counts the shard's updates."""
    return table.HasField("eviction") and table.eviction.kind != ps_pb2.TableEviction.SECONDS


def expired(policy: ps_pb2.TableEviction, row_uses: Uses, values: Rows, now: int) -> Mask:
    """Return which rows are dropped, full or not."""
    if policy.kind in (ps_pb2.TableEviction.STEPS, ps_pb2.TableEviction.SECONDS):
        return ages(row_uses, now) > np.uint64(policy.age)
    if policy.kind == ps_pb2.TableEviction.NORM:
        squares: Mask = np.einsum("ij,ij->i", values, values, dtype=np.float64) < policy.norm**2
        return squares
    return np.zeros(len(row_uses), np.bool_)


def least_used(policy: ps_pb2.TableEviction, row_uses: Uses, now: int, count: int) -> Ids:
    """Return the numbers of the `count` rows, or fewer, that make room first; of equal ones the first."""
    ago = ages(row_uses, now)
    worth = row_uses & _COUNT if policy.kind == ps_pb2.TableEviction.FREQUENCY else _COUNT - ago
    # Between rows that were used as often, the one of longer ago goes; and the other way round.
    second = _COUNT - ago if policy.kind == ps_pb2.TableEviction.FREQUENCY else row_uses & _COUNT
    rank = worth << _AGE_BITS | second
    if count < len(rank):
        limit = np.partition(rank, count - 1)[count - 1]
        least = np.flatnonzero(rank < limit)
        ties = np.flatnonzero(rank == limit)[: count - len(least)]
        return np.concatenate((least, ties))
    return np.arange(len(rank))


def window(rows: int, hand: int, size: int) -> tuple[Ids, int]:
    """Return the places of a window of a shard's rows, and where the next one begins."""
    size = min(size, rows)
    if not size:
        return np.empty(0, np.int64), 0
    start = hand % rows
    return (start + np.arange(size)) % rows, (start + size) % rows


def window_for_expiry(ids: int) -> int:
    """Return how many rows an update of this many ids looks at."""
    return max(_WINDOW, 4 * ids)


def candidates_for(room: int) -> int:
    """Return among how many rows those are chosen that make this much room."""
    return max(_CANDIDATES, 8 * room)
