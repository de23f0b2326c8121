"""A shard that is moving here, page by page, while its source still changes it; see `moves` for the whole."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pscluster.core.errors import InvalidUpdateError, ProtocolError, StaleError
from pscluster.core.transport.frames import view
from pscluster.ps.server.embedding.reserved_rows import resized
from pscluster.ps.server.pages import arrays_named, in_items, pages_bytes, pages_of, put_into, save
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.shard import Array
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.arrivals import ShardFile
from pscluster.ps.storage.checkpoint_parts import blank_array
from pscluster.v1 import ps_pb2


@dataclass(slots=True)
class StagedShard:
    """What has come of a shard. `stage` and `write` are thread-safe."""

    name: tuple[int, int]  # variable and shard
    shape: tuple[int, ...]  # of the values
    row_limit: int  # of a table's shard, whose rows may get more or fewer; else 0
    row_items: int  # into how many items a row of a table is divided; else 0
    begin_file: Callable[[Mapping[str, Array]], ShardFile | None]
    arrays: dict[str, Array] = field(default_factory=dict)
    state: ps_pb2.ShardState = field(default_factory=ps_pb2.ShardState)  # with the keys of functions so far
    round: int = 0  # of the last pages that have come
    file: ShardFile | None = None  # with the same, if the server saves what it has
    lock: threading.Lock = field(default_factory=threading.Lock)

    def drop(self) -> None:
        """Remove what was written, unless it was saved."""
        if self.file is not None:
            self.file.discard()

    def stage(self, store: Store, held: HeldVariable, state: ps_pb2.ShardState) -> None:
        """Make room for the arrays that the source has now, and record the keys of functions that come with them."""
        with self.lock:
            if self.row_limit and state.arrays:
                self._resize(state.rows)
            if new := [array for array in state.arrays if array not in self.arrays]:
                self.arrays.update({array: _blank(store, held, self.shape, array, self.row_limit) for array in new})
                self.drop()  # with new arrays, all pages of all arrays come again
                self.file = self.begin_file(self._with_room())
        self.state.MergeFrom(ps_pb2.ShardState(keys=state.keys))

    def write(self, request: ps_pb2.MoveRequest, payload: memoryview) -> None:
        """Put pages into the arrays, and write them to the file. StaleError if later ones have come."""
        arrays, pages = arrays_named(self.arrays, request.arrays), pages_of(request, self._elements)
        if self.row_items:
            arrays = [in_items(array, self.row_items) for array in arrays]
        if len(payload) != pages_bytes(pages, arrays):
            raise ProtocolError(f"{len(payload):,} bytes for pages that take {pages_bytes(pages, arrays):,}")
        at = 0
        with self.lock:
            if request.round < self.round:
                raise StaleError("these pages are a late copy: later ones have come")
            self.round = request.round
            for array in arrays:
                size = pages_bytes(pages, [array])
                put_into(array, pages, payload[at : at + size])
                at += size
            if self.file is not None:
                save(self.file, dict(zip(request.arrays, arrays, strict=True)), pages, payload)

    def _resize(self, rows: int) -> None:
        """Go on with this many rows; a file that has no room for them is begun anew, with what has come."""
        if rows == self.shape[0]:
            return
        self.arrays = {name: resized(array, rows, self.row_limit) for name, array in self.arrays.items()}
        self.shape = rows, *self.shape[1:]
        if self.file is not None and self.arrays and not self.file.has_room(self.arrays):
            self.drop()
            if (file := self.begin_file(self._with_room())) is not None:
                for name, array in self.arrays.items():
                    file.put(name, 0, view(array))
            self.file = file

    @property
    def _elements(self) -> int:
        """How many elements, or items of a table's rows, pages are counted by."""
        return self.shape[0] * self.row_items if self.row_items else math.prod(self.shape)

    def _with_room(self) -> Mapping[str, Array]:
        """Return the arrays with rows for what may come until the shard is frozen, if it can get more."""
        if not self.row_limit:
            return self.arrays
        rows = min(self.shape[0] + self.shape[0] // 4 + 4096, self.row_limit)
        return {name: resized(array, rows, self.row_limit) for name, array in self.arrays.items()}


def _blank(store: Store, held: HeldVariable, shape: tuple[int, ...], name: str, limit: int) -> Array:
    kind, _, rest = name.partition("/")
    try:
        if kind == "average":
            store.directory.optimizer(int(rest))
        elif kind != "slot" and name != "value":
            raise ValueError
        return blank_array(store, held, shape, name, limit)
    except ValueError:
        raise ProtocolError(f"a move of an array {name[:80]!r}") from None
    except MemoryError:
        raise InvalidUpdateError(
            f"ps {store.index} has too little memory for a shard of {held.spec.name!r}, of shape {shape}"
        ) from None
