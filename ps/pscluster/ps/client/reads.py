"""Reads of the parameter servers: planned (who is asked for what), transferred, and decoded to where they belong.

What fits one message goes over a session, the rest is pulled in frames. Whole variables that are read again and again
have a `ReadPlan`; large shards that nobody changes come from the `ReadCache`.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pscluster.core.context import FunctionContext
from pscluster.core.errors import UnavailableError
from pscluster.core.limits import MAX_ROWS_BYTES
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.transport.frames import ALIGNMENT, Buffer, pack, padding, parts_of, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.client.connections import new_session
from pscluster.ps.client.exchanges import SLOWEST_BYTES_PER_SECOND, Exchanges, padded
from pscluster.ps.client.read_cache import CacheDecision, ReadCache, cache_bytes
from pscluster.ps.client.read_plans import MAX_PLANS, Array, ReadPlan, WholeVariable
from pscluster.ps.spec import MAX_ITEMS, ROWS_IDS_BYTES, SESSION_BYTES
from pscluster.v1 import ps_pb2


@dataclass(slots=True)
class ReadPart:
    """One shard's share of a read: all of it, a range of rows, or rows by number."""

    server: int
    item: ps_pb2.ReadItem
    size: int  # bytes of the answer
    land: memoryview | Callable[[memoryview], None]  # where they go: so many bytes, or who takes them all at once
    ids: npt.NDArray[np.int64] | None = None


class Reader:
    """Reads for one client. Thread-safe.

    Args:
        job: of the requests.
        exchanges: carry them.
    """

    def __init__(self, job: int, exchanges: Exchanges) -> None:
        self._job = job
        self._exchanges = exchanges
        self._plans: dict[tuple[int, ...], ReadPlan] = {}
        self._planning = threading.Lock()
        self._cache = ReadCache(cache_bytes())

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read every part to where it is to land: one request a server, all servers at once."""
        function = self._exchanges.begin()
        to_keep: list[tuple[ReadPart, int]] = []
        if self._cache.limit:
            parts, to_keep = self._without_copies(parts)
        by_server: defaultdict[int, list[ReadPart]] = defaultdict(list)
        for part in parts:
            by_server[part.server].append(part)
        small: dict[int, Sequence[Buffer]] = {}
        large: dict[int, Callable[[], object]] = {}
        for index, mine in by_server.items():
            request = ps_pb2.Request(read=ps_pb2.ReadRequest(job=self._job, items=[part.item for part in mine]))
            buffers = padded(view(part.ids) for part in mine if part.ids is not None)
            answer = sum(part.size + padding(part.size) for part in mine)
            request.last, request.total_bytes = True, sum(map(len, buffers))
            if answer <= SESSION_BYTES and request.total_bytes <= SESSION_BYTES and len(mine) <= MAX_ITEMS:
                small[index] = parts_of(request, buffers)
            else:
                large[index] = self._pull(index, mine, function)

        def finish(index: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            _deliver(by_server[index], reply, payload)

        if small:
            self._exchanges.exchange("pull", small, finish, function)
        if large:
            self._exchanges.on_each(large)
        pulled = sum(part.size for part in parts)
        pushed = sum(part.ids.nbytes for part in parts if part.ids is not None)
        self._exchanges.pulled += pulled
        self._exchanges.pushed += pushed
        if to_keep:
            behind = self._versions([part for part, _ in to_keep])
            for (part, before), after in zip(to_keep, behind, strict=True):
                if before == after:
                    assert isinstance(part.land, memoryview)  # see _without_copies
                    self._cache.keep((part.item.variable, part.item.shard), after, part.land)

    def _without_copies(self, parts: Sequence[ReadPart]) -> tuple[Sequence[ReadPart], list[tuple[ReadPart, int]]]:
        """What is left to read, and what of it to keep if it has the same version behind the read; see `read_cache`."""
        asked = [
            part
            for part in parts
            if part.size >= SESSION_BYTES
            and isinstance(part.land, memoryview)  # elsewhere there are no bytes in one piece to be kept
            and part.item.rows.all
            and not part.item.slot
            and self._cache.asks((part.item.variable, part.item.shard), part.size)
        ]
        if not asked:
            return parts, []
        to_keep, here = [], set()
        for part, version in zip(asked, self._versions(asked), strict=True):
            decision, copy = self._cache.decide((part.item.variable, part.item.shard), version)
            assert isinstance(part.land, memoryview)  # as was asked for
            if decision is CacheDecision.KEEP:
                to_keep.append((part, version))
            elif decision is CacheDecision.COPY:
                here.add(id(part))
                part.land[:] = copy
        return [part for part in parts if id(part) not in here], to_keep

    def _versions(self, parts: Sequence[ReadPart]) -> list[int]:
        """The versions of shards: one small request a server."""
        versions = np.empty(len(parts), "<u8")
        rows = ps_pb2.Rows(version=True)
        self.read(
            [
                ReadPart(
                    part.server,
                    ps_pb2.ReadItem(variable=part.item.variable, shard=part.item.shard, rows=rows),
                    versions.itemsize,
                    view(versions[number : number + 1]),
                )
                for number, part in enumerate(parts)
            ]
        )
        found: list[int] = versions.tolist()
        return found

    def read_planned(self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]) -> list[Array] | None:
        """The values of whole variables, in small requests that are prepared once; None if they are too large.

        Args:
            variables: their ids.
            describe: called for what they are, the first time.
        """
        key = tuple(variables)
        plan = self._plans.get(key)
        if plan is None:
            plan = ReadPlan(self._job, describe())
            with self._planning:
                while len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
        if max(plan.sizes.values(), default=0) > SESSION_BYTES:
            return None
        function = self._exchanges.begin()
        payloads: dict[int, memoryview] = {}

        def finish(index: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            plan.check(index, reply, payload)
            payloads[index] = payload

        self._exchanges.exchange("pull", plan.requests, finish, function)
        self._exchanges.pulled += plan.moved
        return plan.results(payloads)

    def _pull(
        self,
        index: int,
        parts: list[ReadPart],
        function: FunctionContext | None,
    ) -> Callable[[], None]:
        server = self._exchanges.servers[index]
        timeout = self._exchanges.timeout + sum(part.size for part in parts) / SLOWEST_BYTES_PER_SECOND
        # Those that take all of their bytes at once get them from a buffer.
        whole = [part.land if isinstance(part.land, memoryview) else memoryview(bytearray(part.size)) for part in parts]

        def attempt() -> None:
            for pieces_read in _divided(parts, whole):
                sink = PayloadSink(ps_pb2.Reply, [piece.land for piece in pieces_read])
                name, begin = new_session(), time.monotonic()
                read = ps_pb2.ReadRequest(job=self._job, items=[piece.item for piece in pieces_read])
                buffers = padded(view(piece.ids) for piece in pieces_read if piece.ids is not None)
                request = ps_pb2.Request(read=read, last=True, total_bytes=sum(map(len, buffers)))
                metadata, question = ((SESSION_HEADER, name),), pack(request, buffers)
                server.pull(question, metadata, timeout, sink.take)
                if not sink.complete:
                    raise UnavailableError(f"the reply ended {sink.missing} bytes too early")
                self._exchanges.count("pull", index, (name, 1), begin, len(question), sink.received, function)
            for part, values in zip(parts, whole, strict=True):
                if not isinstance(part.land, memoryview):
                    part.land(values)

        return lambda: self._exchanges.retrying(server, attempt)


class _Piece(NamedTuple):
    """An item of one read, its row numbers, and where its values go."""

    item: ps_pb2.ReadItem
    ids: npt.NDArray[np.int64] | None
    land: memoryview


def _divided(parts: Sequence[ReadPart], whole: Sequence[memoryview]) -> Iterator[list[_Piece]]:
    """The parts, in as many reads as it takes for none to ask for more than a server answers at once."""
    group, ids_bytes = list[_Piece](), 0
    for part, values in zip(parts, whole, strict=True):
        for piece in _pieces_of(part, values):
            size = 0 if piece.ids is None else piece.ids.nbytes + ALIGNMENT
            if group and (len(group) == MAX_ITEMS or ids_bytes + size > ROWS_IDS_BYTES):
                yield group
                group, ids_bytes = [], 0
            group.append(piece)
            ids_bytes += size
    if group:
        yield group


def _pieces_of(part: ReadPart, values: memoryview) -> Iterator[_Piece]:
    if part.ids is None or not len(part.ids):
        yield _Piece(part.item, part.ids, values)
        return
    row = part.size // len(part.ids)
    most = max(min((ROWS_IDS_BYTES - ALIGNMENT) // part.ids.itemsize, MAX_ROWS_BYTES // max(row, 1)), 1)
    for at in range(0, len(part.ids), most):
        ids, item = part.ids[at : at + most], ps_pb2.ReadItem()
        item.CopyFrom(part.item)
        item.rows.ids = len(ids)
        yield _Piece(item, ids, values[at * row : (at + len(ids)) * row])


def _deliver(parts: Sequence[ReadPart], reply: ps_pb2.Reply, payload: memoryview) -> None:
    """Put the bytes of a reply of one message where they belong."""
    at = 0
    for part in parts:
        values = payload[at : at + part.size]
        if len(values) != part.size:
            break
        if isinstance(part.land, memoryview):
            part.land[:] = values
        else:
            part.land(values)
        at += part.size + padding(part.size)
    if at != len(payload) or not reply.last:
        raise UnavailableError(f"the reply of {len(payload)} bytes does not match the request")
