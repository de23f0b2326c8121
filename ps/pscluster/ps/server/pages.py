"""Pages of a shard's arrays, as a move sends them: taken from arrays, put into them, written to a file.

A page has `PAGE_ELEMENTS` elements of each array; the last one may have fewer. Pages are named by their numbers, in
ascending order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import ProtocolError, PsClusterError
from pscluster.core.transport.frames import Buffer, view
from pscluster.ps.server.state.shard import Array, pages_in
from pscluster.ps.spec import PAGE_ELEMENTS
from pscluster.ps.storage.arrivals import ShardFile
from pscluster.v1 import ps_pb2

Pages = npt.NDArray[np.int64]


def arrays_named(arrays: Mapping[str, Array], names: Sequence[str]) -> list[Any]:
    """Return those of a shard's arrays that a move names. ProtocolError if there is no such array."""
    try:
        return [arrays[name] for name in names]
    except KeyError as error:
        raise ProtocolError(f"a move of the array {error.args[0][:80]!r}, which is not there") from None


def pages_of(request: ps_pb2.MoveRequest, elements: int) -> Pages:
    """Return the pages that a move names, of arrays with this many elements. ProtocolError if they are invalid."""
    pages = np.array(request.pages, np.int64)
    if len(pages) and (pages[-1] >= pages_in(elements) or (pages[1:] <= pages[:-1]).any()):
        raise ProtocolError(f"pages of a shard that are not ascending, or not among its {pages_in(elements):,}")
    return pages


def in_items(array: Array, row_items: int) -> Any:
    """Return an array of a table as opaque items, the same number for each row."""
    return array.view(np.dtype((np.void, array.strides[0] // row_items))).reshape(-1)


def pages_bytes(pages: Pages, arrays: Sequence[Any]) -> int:
    """Return how many bytes these pages take of arrays with equally many elements."""
    if not len(pages) or not arrays:
        return 0
    size = arrays[0].size
    elements = len(pages) * PAGE_ELEMENTS
    if pages[-1] == size // PAGE_ELEMENTS:  # the last one is not full
        elements -= PAGE_ELEMENTS - size % PAGE_ELEMENTS
    return int(elements * sum(array.itemsize for array in arrays))


def save(file: ShardFile, arrays: Mapping[str, Any], pages: Pages, data: memoryview) -> None:
    """Write these pages of arrays to a file, adjacent ones at once. PsClusterError if the disk refuses them."""
    runs = np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1) if len(pages) else []
    at = 0
    try:
        for name, array in arrays.items():
            for run in runs:
                start, stop = int(run[0]) * PAGE_ELEMENTS, min((int(run[-1]) + 1) * PAGE_ELEMENTS, array.size)
                size = (stop - start) * array.itemsize
                file.put(name, start * array.itemsize, data[at : at + size])
                at += size
        file.flush()
    except OSError as error:
        raise PsClusterError(f"a shard can't be saved: {error.strerror or error}") from None


def _split(array: Any, pages: Pages) -> tuple[Any, Pages, Any]:
    """Return the full pages of an array as rows, which of these pages are such, and the rest if it is asked for."""
    flat = array.reshape(-1)
    full = flat.size // PAGE_ELEMENTS
    rest = flat[full * PAGE_ELEMENTS :] if len(pages) and pages[-1] == full else None
    return flat[: full * PAGE_ELEMENTS].reshape(full, PAGE_ELEMENTS), pages if rest is None else pages[:-1], rest


def _index(pages: Pages) -> Any:
    """Return an index of these rows: a slice, which is not copied, if they follow each other."""
    first, last = (int(pages[0]), int(pages[-1])) if len(pages) else (0, -1)
    return slice(first, last + 1) if last - first == len(pages) - 1 else pages


def taken_from(array: Any, pages: Pages) -> list[Buffer]:
    """Return these pages of an array, as a view of it if they follow each other."""
    rows, full, rest = _split(array, pages)
    return [view(rows[_index(full)]), *([] if rest is None else [view(rest)])]


def put_into(array: Any, pages: Pages, data: memoryview) -> None:
    """Set these pages of an array."""
    rows, full, rest = _split(array, pages)
    end = len(full) * PAGE_ELEMENTS * array.itemsize
    rows[_index(full)] = np.frombuffer(data[:end], array.dtype).reshape(len(full), PAGE_ELEMENTS)
    if rest is not None:
        rest[...] = np.frombuffer(data[end:], array.dtype)
