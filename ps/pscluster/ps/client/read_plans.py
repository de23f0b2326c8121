"""Plans of reads: which server is asked for what, and where the bytes of its reply go.

A training step reads the same whole variables again and again. Writing and checking such a request item by item takes
longer than moving its bytes (ten times as long for 500 variables of 4 KiB), so their plan is kept: see `WholeReadPlan`
here and `pscluster.ps.server.prepared_reads` on the server.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import UnavailableError
from pscluster.core.geometry import Block
from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.transport.frames import ALIGNMENT, Buffer, padding, parts_of, view
from pscluster.ps.client.exchanges import padded
from pscluster.ps.spec import MAX_ITEMS, ROWS_IDS_BYTES, SESSION_BYTES
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]


@dataclass(slots=True)
class ReadPart:
    """One shard's share of a read: the whole shard, a box of it, or rows by number."""

    server: int
    item: ps_pb2.ReadItem
    size: int  # bytes of the values
    target: memoryview | Callable[[memoryview], None]  # memory of that size, or a function that takes all values
    ids: npt.NDArray[np.int64] | None = None

    def take(self, values: memoryview) -> None:
        if isinstance(self.target, memoryview):
            self.target[:] = values
        else:
            self.target(values)


class ReadPlan:
    """A read, by server."""

    def __init__(self, job: int, parts: Sequence[ReadPart]) -> None:
        self.requests: dict[int, Sequence[Buffer]] = {}  # what to send on sessions, if it and the reply fit a message
        self.large: dict[int, list[ReadPart]] = {}  # of the other servers: the parts to pull in frames
        self.pulled = sum(part.size for part in parts)
        self.pushed = sum(part.ids.nbytes for part in parts if part.ids is not None)
        self._parts: defaultdict[int, list[ReadPart]] = defaultdict(list)
        self._sizes: dict[int, int] = {}  # of the replies in one message
        for part in parts:
            self._parts[part.server].append(part)
        for server, items in self._parts.items():
            request, buffers = request_for(job, items)
            size = sum(part.size + padding(part.size) for part in items)
            if size <= SESSION_BYTES and request.total_bytes <= SESSION_BYTES and len(items) <= MAX_ITEMS:
                self.requests[server] = parts_of(request, buffers)
                self._sizes[server] = size
            else:
                self.large[server] = items

    def check(self, server: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
        """Raise UnavailableError if a reply in one message is not whole."""
        if len(payload) != self._sizes[server] or not reply.last:
            raise UnavailableError(f"the reply has {len(payload)} bytes, not {self._sizes[server]}")

    def deliver(self, server: int, payload: memoryview) -> None:
        """Put the values of a reply in one message where they go."""
        start = 0
        for part in self._parts[server]:
            part.take(payload[start : start + part.size])
            start += part.size + padding(part.size)


def divided(parts: Sequence[ReadPart]) -> Iterator[list[ReadPart]]:
    """Divide a server's parts, with memory as targets, into reads that ask for no more than it answers at once."""
    group, ids_bytes = list[ReadPart](), 0
    for piece in itertools.chain.from_iterable(map(_pieces_of, parts)):
        size = 0 if piece.ids is None else piece.ids.nbytes + ALIGNMENT
        if group and (len(group) == MAX_ITEMS or ids_bytes + size > ROWS_IDS_BYTES):
            yield group
            group, ids_bytes = [], 0
        group.append(piece)
        ids_bytes += size
    if group:
        yield group


def _pieces_of(part: ReadPart) -> Iterator[ReadPart]:
    if part.ids is None or not len(part.ids):
        yield part
        return
    target, row = cast(memoryview, part.target), part.size // len(part.ids)
    most = max(min((ROWS_IDS_BYTES - ALIGNMENT) // part.ids.itemsize, MAX_ROWS_BYTES // max(row, 1)), 1)
    for start in range(0, len(part.ids), most):
        ids, item = part.ids[start : start + most], ps_pb2.ReadItem()
        item.CopyFrom(part.item)
        item.rows.ids = len(ids)
        yield ReadPart(part.server, item, len(ids) * row, target[start * row : (start + len(ids)) * row], ids)


def request_for(job: int, parts: Sequence[ReadPart]) -> tuple[ps_pb2.Request, list[Buffer]]:
    """Return a request for these parts, and its payload: their row numbers."""
    buffers = padded(view(part.ids) for part in parts if part.ids is not None)
    read = ps_pb2.ReadRequest(job=job, items=[part.item for part in parts])
    return ps_pb2.Request(read=read, last=True, total_bytes=sum(map(len, buffers))), buffers


@dataclass(frozen=True, slots=True)
class WholeVariable:
    """A variable to read, and for each of its shards the server, the item that asks for it, and its block."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shards: Sequence[tuple[int, ps_pb2.ReadItem, Block]]


class _Target(NamedTuple):
    """Where in a server's reply the bytes of a shard begin, and where they go."""

    result: int
    offset: int
    shape: tuple[int, ...]
    index: Any  # in the result; None: they are all of it


class WholeReadPlan(ReadPlan):
    """The plan of a read of whole variables, whose values become new arrays; used again for each such read."""

    def __init__(self, job: int, variables: Sequence[WholeVariable]) -> None:
        self._variables = [(variable.shape, variable.dtype) for variable in variables]
        self._targets: defaultdict[int, list[_Target]] = defaultdict(list)
        parts: list[ReadPart] = []
        offsets: defaultdict[int, int] = defaultdict(int)
        for result, variable in enumerate(variables):
            for server, item, block in variable.shards:
                size = block.size * variable.dtype.itemsize
                index = (*block.slices, ...) if len(variable.shards) > 1 else None
                self._targets[server].append(_Target(result, offsets[server], block.shape, index))
                offsets[server] += size + padding(size)
                parts.append(ReadPart(server, item, size, memoryview(b"")))  # the bytes go where `deliver_to` says
        self._uncut = {server for server, targets in self._targets.items() if any(t.index is None for t in targets)}
        super().__init__(job, parts)
        self._parts.clear()  # for `deliver` only

    def new_results(self) -> list[Any]:
        """Return the list that `deliver_to` fills, with None for each variable."""
        return [None] * len(self._variables)

    def deliver_to(self, results: list[Any], server: int, payload: memoryview) -> None:
        """Make arrays of the values of a reply.

        Uncut variables lie side by side in one piece of memory a server, copied at once: a third of the time that
        separate arrays take for 500 variables of 4 KiB. An array that is kept keeps that piece, which is no larger
        than a message.
        """
        copy = np.frombuffer(payload, np.uint8).copy() if server in self._uncut else None
        for result, offset, shape, index in self._targets[server]:
            whole, dtype = self._variables[result]
            if index is None:
                results[result] = np.ndarray(shape, dtype, copy, offset)
                continue
            if results[result] is None:
                results[result] = np.empty(whole, dtype)
            results[result][index] = np.ndarray(shape, dtype, payload, offset)
