"""One shard: its array, its optimizer slots, its lock, and consistent reads that do not stop updates.

Large shards are read, and written to disk, in chunks, which must not contain half of an update that arrives meanwhile.
A `Snapshot` is lazy copy-on-write: it registers under the lock, and before an update changes a block that the snapshot
has not given out yet, it saves the block's old bytes, in memory up to a limit and beyond that in a file (`spill`). This
costs nothing unless a read and an update meet, and the lock is held for the copy of one block at a time, never while
waiting for the network or the disk.

A shard that moves to another server is copied while it changes, so `ChangedPages` notes what has changed meanwhile, and
is then frozen: see `moves`.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ShardMovedError, StaleError, UnavailableError
from pscluster.core.numbers.unique import sorted_unique
from pscluster.core.transport.frames import CHUNK_BYTES, view
from pscluster.ps.optim.precision import compute_dtype
from pscluster.ps.request_metrics import ShardTraffic
from pscluster.ps.server.embedding.reserved_rows import resized
from pscluster.ps.server.embedding.table_policy import CountMinSketch, RecentlyEvicted
from pscluster.ps.server.embedding.table_rows import TableRows
from pscluster.ps.spec import PAGE_ELEMENTS
from pscluster.ps.storage.files.spill import SavedBlock, Spill

Array = npt.NDArray[np.generic]


class ChangedPages:
    """Which pages of a shard, and of what is kept beside it, have changed since they were last taken, in rounds.

    Needs the shard's lock. In round 0 all have.

    Args:
        move: its id.
        elements: of the shard; of a table's items, as `row_elements` divides its rows (`row_items`).
        row_elements: 0 of a variable.
        page_elements: of a page; 0: `PAGE_ELEMENTS`.
    """

    def __init__(self, move: int, elements: int, row_elements: int = 0, page_elements: int = 0) -> None:
        self.move, self.row_elements, self._page_elements = move, row_elements, page_elements or PAGE_ELEMENTS
        self.names: list[str] = []  # of the arrays, when pages were last taken
        self._round = 0
        self._taken = np.ones(-(-elements // self._page_elements), np.bool_)  # in this round
        self._changed = np.zeros_like(self._taken)  # since

    def take(self, names: list[str], round_number: int) -> npt.NDArray[np.bool_]:
        """Return, by page, whether it has changed since the round before. StaleError for an earlier round.

        New arrays are new on every page.
        """
        if round_number < self._round:
            raise StaleError("this request is a late copy: the shard has been copied further since")
        if round_number == self._round:  # the first answer may have been lost
            self._taken |= self._changed
        else:
            self._taken = self._changed.copy()
        self._changed[:] = False
        self._round = round_number
        if names != self.names:
            self._taken[:] = True
        self.names = names
        return self._taken

    def note_all(self) -> None:
        self._changed[:] = True

    def resize(self, rows: int) -> None:
        """Go on with a table's shard of this many rows; the new ones are noted by those who change them."""
        pages = -(-rows * self.row_elements // self._page_elements)
        for name in ("_taken", "_changed"):
            known = getattr(self, name)[:pages]
            setattr(self, name, np.concatenate((known, np.ones(pages - len(known), np.bool_))))

    def note_span(self, start: int, stop: int) -> None:
        """Note a change of the elements [start, stop)."""
        self._changed[start // self._page_elements : -(-stop // self._page_elements)] = True

    def note_rows(self, rows: npt.NDArray[np.int64], elements: int) -> None:
        """Note a change of these rows of `elements` elements each."""
        if not elements:
            return
        first, last = rows * elements // self._page_elements, ((rows + 1) * elements - 1) // self._page_elements
        for ahead in range(int((last - first).max(initial=0)) + 1):
            self._changed[np.minimum(first + ahead, last)] = True


class GradientViews(NamedTuple):
    """Views of what plain gradients of a shard change; valid while it has this array, and this dictionary of slots."""

    array: Array
    slots: dict[str, Array]
    views: list[Array]  # see `joint.views_of`


@dataclass(slots=True)
class GradientForm:
    """What plain gradients of a shard by one optimizer have in common: see `pscluster.ps.server.requests.changes`.

    It refers to no shard: else the memory of deleted ones would be freed late.
    """

    optimizer: Any  # a `HeldOptimizer`
    itemsize: int
    nbytes: int  # of a gradient of the whole shard
    row_bytes: int  # of that of a row; 0: there are no rows
    joins: bool  # whether they may be applied together with others, if they are small
    # By whether a gradient is for rows. Needs the shard's lock. Dropped with the form when the shard has new arrays.
    views: dict[bool, GradientViews] = field(default_factory=dict)


def pages_in(elements: int) -> int:
    """Return how many pages this many elements take."""
    return -(-elements // PAGE_ELEMENTS)


class Shard:
    """A block of a variable. Every access to `array` and `slots` happens under `lock`.

    That of a table has the rows that are in use, and `row_limit` of them at most: their ids are in `array`, and not in
    what is beside it.
    """

    def __init__(self, array: Array, updates: int = 0, row_limit: int = 0) -> None:
        self.array = array
        self.row_limit = row_limit
        self.updates = updates  # applied so far
        self.changes = 0  # rises before each update, applied or failed
        self.traffic = ShardTraffic()
        self._first_version = secrets.randbits(62)
        self.lock = threading.Lock()
        self.slots: dict[int, dict[str, Array]] = {}  # by optimizer
        self.steps: dict[int, int] = {}
        self.gradients: GradientForm | None = None  # of the optimizer that was used last
        self.averages: dict[int, Array] = {}
        self._snapshots: list[Snapshot] = []
        self.pages: ChangedPages | None = None  # while it is copied to another server
        # While no update is applied, since it is about to move; set when it has moved or will not.
        self.frozen: threading.Event | None = None
        self.moved = False  # another server has it
        self.rows: TableRows | None = None  # of a table, once they are needed
        self.sightings: CountMinSketch | None = None  # of ids without a row, if it has to be known
        self.dropped: RecentlyEvicted | None = None  # ids whose rows were
        self.hand = 0  # where the next search for rows to be dropped begins
        self.arriving: threading.Event | None = None  # while another server may still serve it; set when none does

    @property
    def version(self) -> int:
        """A number that rises before each update, and is never one of another server, or of before a restore."""
        return self._first_version + self.changes

    def arrays(self) -> dict[str, Array]:
        """Return all arrays by name: the values, and each optimizer's slots and average. Needs the lock."""
        slots = {
            f"slot/{optimizer}/{name}": array for optimizer, by in self.slots.items() for name, array in by.items()
        }
        averages = {f"average/{optimizer}": array for optimizer, array in self.averages.items()}
        return {"value": self.array, **slots, **averages}

    def put(self, arrays: Mapping[str, Array]) -> None:
        """Install slots and averages, named as in `arrays`."""
        self.gradients = None  # which has views of the old ones
        for name, array in arrays.items():
            kind, _, rest = name.partition("/")
            if kind == "slot":
                optimizer, _, slot = rest.partition("/")
                self.slots.setdefault(int(optimizer), {})[slot] = array
            elif kind == "average":
                self.averages[int(rest)] = array

    def retain(self, names: Container[str]) -> None:
        """Drop all slots and averages but these, named as in `arrays`. Needs the lock."""
        self.gradients = None
        self.slots = {
            optimizer: kept
            for optimizer, by_name in self.slots.items()
            if (kept := {name: array for name, array in by_name.items() if f"slot/{optimizer}/{name}" in names})
        }
        self.averages = {
            optimizer: array for optimizer, array in self.averages.items() if f"average/{optimizer}" in names
        }

    def copy(self, optimizers: Container[int]) -> Shard:
        """Return a shard with copies of the values and of these optimizers' slots and averages. Takes the lock."""
        with self.lock:
            arrays = {
                name: array.copy()
                for name, array in self.arrays().items()
                if name == "value" or int(name.split("/")[1]) in optimizers
            }
            shard = Shard(arrays["value"], row_limit=self.row_limit)
            shard.put(arrays)
            shard.steps = {optimizer: step for optimizer, step in self.steps.items() if optimizer in optimizers}
        return shard

    @property
    def nbytes(self) -> int:
        """Bytes of the values, slots and averages. Takes no lock: may miss slots that an update is just adding."""
        slots = sum(array.nbytes for by_name in list(self.slots.values()) for array in by_name.values())
        return self.array.nbytes + slots + sum(array.nbytes for array in list(self.averages.values()))

    def average(self, optimizer: int, momentum: float, ids: npt.NDArray[np.int64] | None) -> None:
        """Move the exponential average of the values (Keras' `use_ema`), or of the rows `ids` only, by one step.

        The average begins as the values. Averages of half types are held in float32, since in their own precision they
        would not move. Call this after the update, under the lock.
        """
        average: Any = self.averages.get(optimizer)
        values: Any = self.array if self.rows is None else self.rows.values[: len(self.array)]
        if average is None:
            self.averages[optimizer] = values.astype(compute_dtype(values.dtype))
            return
        share = average.dtype.type(1 - momentum)
        if ids is None:
            average += (values - average) * share
        else:
            rows = sorted_unique(ids)
            average[rows] += (values[rows] - average[rows]) * share

    def grow(self, rows: int, fills: Callable[[int], Mapping[str, float]]) -> None:
        """Give a table's shard this many rows, more than it has. Needs the lock; MemoryError changes nothing.

        The caller writes the new rows' values. Slots hold what they begin with, which `fills` says by optimizer and
        slot, and averages any values.
        """
        of_slots = {optimizer: fills(optimizer) for optimizer in self.slots}
        before, larger = len(self.array), {}
        for name, array in self.arrays().items():
            larger[name] = resized(array, rows, self.row_limit)
        self.array = larger["value"]
        self.put(larger)
        if self.pages is not None:
            self.pages.resize(rows)
        self.before_rows_change(np.arange(before, rows))
        for optimizer, by_name in self.slots.items():
            for name, slot in by_name.items():
                slot[before:] = of_slots[optimizer][name]

    def shrink(self, rows: int, moved: npt.NDArray[np.int64], to: npt.NDArray[np.int64]) -> None:
        """Leave a table's shard this many rows; those that are `moved` take the places of others. Needs the lock."""
        self.before_rows_change(to)
        arrays = self.arrays()
        for array in arrays.values():
            array[to] = array[moved]
        fewer = {name: array[:rows] for name, array in arrays.items()}
        self.array = fewer["value"]
        self.put(fewer)
        if self.pages is not None:
            self.pages.resize(rows)

    def replace(self, array: Array) -> bool:
        """Replace the array, unless a snapshot would hold the old one; return whether that is done. Needs the lock."""
        if self._snapshots or self.pages is not None:
            return False
        self.array, self.gradients = array, None  # which has views of the old one
        return True

    def check_here(self, name: str) -> None:
        """Refuse an update of a shard that moves, or has moved, to another server. Needs the lock."""
        if self.moved:
            raise ShardMovedError(f"a shard of {name!r} has moved to another server")
        if self.frozen is not None:
            raise UnavailableError(f"a shard of {name!r} is about to move to another server, or to be cut")

    def freeze(self) -> None:
        """Have all updates refused, or wait, until `release`. Needs the lock."""
        self.frozen = self.frozen or threading.Event()

    def release(self) -> None:
        """End the freeze, if there is one. Needs the lock."""
        if self.frozen is not None:
            self.frozen.set()
            self.frozen = None

    def let_go(self, move: int = 0) -> None:
        """End a move of the shard away from here, or the cut of its variable; without a number, any. Needs the lock."""
        if self.pages is None or move in (0, self.pages.move):
            self.pages = None
            self.release()

    def serve(self) -> None:
        """Let requests have the shard that has come from another server."""
        if (arriving := self.arriving) is not None:
            self.arriving = None
            arriving.set()

    # The next three prepare for a change of the values, slots and averages, which share one shape, or of a table's the
    # rows: old bytes are saved for snapshots, and pages noted for a move. They need the lock.

    def before_change(self) -> None:
        """Prepare for a change anywhere in the shard."""
        for snapshot in self._snapshots:
            snapshot.save(None)
        if self.pages is not None:
            self.pages.note_all()

    def before_span_changes(self, start: int, stop: int) -> None:
        """Prepare for a change of the elements [start, stop), numbered in C order; not of a table."""
        for snapshot in self._snapshots:
            size = snapshot.dtype.itemsize
            snapshot.save(range(start * size // CHUNK_BYTES, -(-stop * size // CHUNK_BYTES)))
        if self.pages is not None:
            self.pages.note_span(start, stop)

    def before_rows_change(self, ids: npt.NDArray[np.int64], leading: int = 1) -> None:
        """Prepare for a change of these rows, which are numbered over the first `leading` axes."""
        for snapshot in self._snapshots:
            snapshot.save(blocks_of_rows(ids, math.prod(snapshot.shape[leading:]) * snapshot.dtype.itemsize))
        if self.pages is not None:
            self.pages.note_rows(ids, self.pages.row_elements or math.prod(self.array.shape[leading:]))

    def snapshot(self, start: int, stop: int, spill: Spill) -> Snapshot:
        """Return a consistent view of the bytes [start, stop) of the values; the caller closes it. Takes the lock."""
        with self.lock:
            return Snapshot(self.lock, self.array, start, stop, spill, self._snapshots)

    def capture(self, spill: Spill) -> dict[str, Snapshot]:
        """Return snapshots of all arrays, by name as in `arrays`; the caller closes each. Needs the lock."""
        return {
            name: Snapshot(self.lock, array, 0, array.nbytes, spill, self._snapshots)
            for name, array in self.arrays().items()
        }


class Snapshot:
    """The bytes [start, stop) of one of a shard's arrays at one moment, given out once, in order.

    Must be created under the shard's lock. Stays in `registered` until it is closed.
    """

    def __init__(
        self, lock: threading.Lock, array: Array, start: int, stop: int, spill: Spill, registered: list[Snapshot]
    ) -> None:
        self.dtype, self.shape = array.dtype, array.shape
        self._lock = lock
        self._registered = registered
        self._spill = spill
        self._bytes = view(array)
        self._position = start
        self._stop = stop
        self._saved: dict[int, SavedBlock] = {}
        registered.append(self)

    def save(self, blocks: Iterable[int] | None) -> None:
        """Save the old bytes of these blocks (None: all) unless they have been given out. Needs the lock."""
        first, last = self._position // CHUNK_BYTES, -(-self._stop // CHUNK_BYTES)
        for block in range(first, last) if blocks is None else blocks:
            if first <= block < last and block not in self._saved:
                self._saved[block] = self._spill.save(self._bytes[block * CHUNK_BYTES : (block + 1) * CHUNK_BYTES])

    def __iter__(self) -> Iterator[bytes]:
        """Yield copies of the chunks, which end at block boundaries."""
        copy: bytes | None = None
        for chunk, again in self.chunks():
            if copy is not None and not again:
                yield copy
            copy = bytes(chunk)
        if copy is not None:
            yield copy

    def chunks(self, blocks: int = 1) -> Iterator[tuple[memoryview, bool]]:
        """Yield chunks of at most `blocks` blocks, each with True if it replaces the previous one from its beginning.

        Copy or send a chunk before requesting the next one. Chunks are views of the live array and are given out
        without the lock, so that neither reader nor updates wait. If an update arrives meanwhile it saves the block
        first; the copied chunk may be torn, and is given out again with its old bytes. If that happens to a chunk of
        several blocks, they are repeated one by one, and later ones come singly, too: more updates may follow.
        """
        again = False
        while self._position < self._stop:
            start, block = self._position, self._position // CHUNK_BYTES
            with self._lock:
                saved = self._saved.pop(block, None)
                count = next((n for n in range(1, blocks) if block + n in self._saved), blocks) if saved is None else 1
                end = min((block + count) * CHUNK_BYTES, self._stop)
                if saved is not None:
                    self._position = end
            if saved is None:
                yield self._bytes[start:end], again
                with self._lock:
                    again = any(index in self._saved for index in range(block, block + count))
                    if again and count > 1:
                        blocks = 1
                        continue
                    saved = self._saved.pop(block, None)
                    self._position = end
            if saved is not None:
                old = saved.read()
                base = block * CHUNK_BYTES
                yield memoryview(old)[start - base : end - base], again
                again = False

    def close(self) -> None:
        """Stop saving old bytes, and release those that were saved."""
        with self._lock:
            self._registered.remove(self)
        self._saved.clear()
        self._bytes = memoryview(b"")


def blocks_of_rows(rows: npt.NDArray[np.int64], row_bytes: int) -> set[int]:
    """Return the blocks that contain these rows of `row_bytes` bytes each."""
    first, last = rows * row_bytes // CHUNK_BYTES, ((rows + 1) * row_bytes - 1) // CHUNK_BYTES
    pairs = set(zip(first.tolist(), last.tolist(), strict=True))
    return {block for low, high in pairs for block in range(low, high + 1)}
