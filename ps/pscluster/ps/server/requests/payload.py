"""The bytes of a request, in the chunks they arrived in or in arrays that the server goes on to use, and reuses."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.transport.frames import padding, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.row_ids import RowIds
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
_NOTHING = memoryview(b"")


class Payload:
    """The bytes of a request, in the chunks they arrived in.

    With `once`, `blocks` is called once for each segment: a list of chunks is emptied, and each is freed after its last
    block. `arrays` are segments, by their start, that were received into separate arrays without other references.
    """

    def __init__(
        self, chunks: Sequence[memoryview], *, once: bool = False, arrays: Mapping[int, Array] | None = None
    ) -> None:
        self._arrays = arrays or {}
        self.chunks, self._ends = list(chunks), list(itertools.accumulate(map(len, chunks)))
        self._once = once
        if once and isinstance(chunks, list):
            chunks.clear()

    def blocks(self, start: int, size: int, itemsize: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset in the segment, bytes) for each chunk of the segment, without splitting elements."""
        extents = self._extents(start, size)
        if any((high - low) % itemsize for _, _, low, high in extents):
            yield 0, memoryview(b"".join(self.chunks[index][low:high] for index, _, low, high in extents))
            return
        for index, offset, low, high in extents:
            yield offset, self.chunks[index][low:high]
            if self._once and high - low == self._ends[index] - (self._ends[index - 1] if index else 0):
                self.chunks[index] = _NOTHING

    def _extents(self, start: int, size: int) -> list[tuple[int, int, int, int]]:
        """Return (chunk, offset in the segment, start and end in the chunk) for each chunk of a segment."""
        first, extents = bisect.bisect_right(self._ends, start), []
        for index in range(first, len(self._ends)):
            at = self._ends[index - 1] if index else 0
            if at >= start + size:
                break
            low, high = max(start - at, 0), min(start + size, self._ends[index]) - at
            if low < high:
                extents.append((index, at + low - start, low, high))
        return extents

    def own(self, start: int) -> Array | None:
        """Return the segment that begins here if it was received into its own array, which may be retained."""
        return self._arrays.get(start)

    def array(self, start: int, count: int, dtype: npt.DTypeLike) -> Array:
        """Return a segment as one array, copied only if it crosses chunks."""
        if len(self.chunks) == 1:
            return np.frombuffer(self.chunks[0], dtype, count, start)
        extents = self._extents(start, count * np.dtype(dtype).itemsize)
        pieces = [self.chunks[index][low:high] for index, _, low, high in extents]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return np.frombuffer(data, dtype, count)

    def joined(self) -> memoryview:
        """Return all bytes, copied only if there are several chunks."""
        return self.chunks[0] if len(self.chunks) == 1 else memoryview(b"".join(self.chunks))

    def ids(self, start: int, rows: ps_pb2.Rows) -> RowIds:
        """Return the row numbers of an item, or ids of a table, which may be bytes."""
        if rows.id_bytes:
            return self.array(start, rows.ids, f"S{rows.id_bytes}")
        return self.array(start, rows.ids, np.int64).view(np.int64)


class Staging:
    """New arrays into which whole values are received, to replace those of shards."""

    def __init__(self, arrays: Mapping[int, Array]) -> None:
        self._arrays = arrays  # by their start in the payload, ascending, with nothing but padding between them
        self.sink = PayloadSink(ps_pb2.Request, [view(array) for array in arrays.values()])

    def payload(self) -> Payload:
        """Return the whole payload, once it has arrived."""
        segments = [(view(array), memoryview(bytes(padding(array.nbytes)))) for array in self._arrays.values()]
        return Payload([chunk for segment in segments for chunk in segment], arrays=self._arrays)
