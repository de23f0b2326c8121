"""What comes with a request: its bytes, as the chunks they came in, or where they are to stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.transport.frames import padding, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.v1 import ps_pb2

Ids = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
_NOTHING = memoryview(b"")


class Payload:
    """The bytes of a request, as the chunks they came in.

    Args:
        chunks: if it is a list and `once`, this empties it.
        once: what `blocks` has given is not asked for again: a chunk's memory goes with the last of its blocks.
        arrays: segments, by where they begin, that came in arrays of their own, which nobody else has.
    """

    def __init__(
        self, chunks: Sequence[memoryview], *, once: bool = False, arrays: Mapping[int, Array] | None = None
    ) -> None:
        self._arrays = arrays or {}
        self._chunks, self._sizes = list(chunks), [len(chunk) for chunk in chunks]
        self._once = once
        if once and isinstance(chunks, list):
            chunks.clear()

    def blocks(self, start: int, size: int, itemsize: int) -> Iterator[tuple[int, memoryview]]:
        """(offset in the segment, bytes) of the segment, cut where the chunks are; elements stay whole."""
        places = self._places(start, size)
        if any((high - low) % itemsize for _, _, low, high in places):
            yield 0, memoryview(b"".join(self._chunks[number][low:high] for number, _, low, high in places))
            return
        for number, offset, low, high in places:
            yield offset, self._chunks[number][low:high]
            if self._once and high - low == self._sizes[number]:
                self._chunks[number] = _NOTHING

    def _places(self, start: int, size: int) -> list[tuple[int, int, int, int]]:
        """Of a segment: number of the chunk, offset in the segment, and from where to where in the chunk."""
        at, places = 0, []
        for number, length in enumerate(self._sizes):
            low, high = max(start - at, 0), min(start + size - at, length)
            if low < high:
                places.append((number, at + low - start, low, high))
            at += length
            if at >= start + size:
                break
        return places

    def own(self, start: int) -> Array | None:
        """The segment that begins here, as an array to be kept; None if it did not come in one."""
        return self._arrays.get(start)

    def array(self, start: int, count: int, dtype: npt.DTypeLike) -> Array:
        """A segment as one array; a copy only where it crosses chunks."""
        if len(self._chunks) == 1:
            return np.frombuffer(self._chunks[0], dtype, count, start)
        places = self._places(start, count * np.dtype(dtype).itemsize)
        pieces = [self._chunks[number][low:high] for number, _, low, high in places]
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return np.frombuffer(data, dtype, count)

    @property
    def chunks(self) -> Sequence[memoryview]:
        """As they came."""
        return self._chunks

    def joined(self) -> memoryview:
        """All of it."""
        return self._chunks[0] if len(self._chunks) == 1 else memoryview(b"".join(self._chunks))

    def ids(self, start: int, count: int) -> Ids:
        """A segment of row numbers."""
        return self.array(start, count, np.int64).view(np.int64)


class Staging:
    """New arrays in which whole values come, to take the place of those that there are.

    Args:
        arrays: by where they begin in the payload, in order; nothing but padding is between them.
    """

    def __init__(self, arrays: Mapping[int, Array]) -> None:
        self._arrays = arrays
        self.sink = PayloadSink(ps_pb2.Request, [view(array) for array in arrays.values()])

    def payload(self) -> Payload:
        """All of it, once it has come."""
        segments = [(view(array), memoryview(bytes(padding(array.nbytes)))) for array in self._arrays.values()]
        return Payload([chunk for segment in segments for chunk in segment], arrays=self._arrays)
