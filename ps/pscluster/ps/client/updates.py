"""Updates of the parameter servers: each part once, however often it has to be sent."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pscluster.core.context import FunctionContext
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer, parts_of, view
from pscluster.ps.client.connections import new_session
from pscluster.ps.client.exchanges import Exchanges, padded
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2


@dataclass(slots=True)
class UpdatePart:
    """One shard's share of an update."""

    server: int
    item: ps_pb2.UpdateItem
    values: memoryview
    ids: npt.NDArray[np.int64] | None = None


class _Sequences:
    """Numbers this client's requests, and knows below which number all are answered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def take(self) -> tuple[int, int]:
        with self._lock:
            settled = min(self._open, default=self._last + 1)
            self._last += 1
            self._open.add(self._last)
            return self._last, settled

    def done(self, number: int) -> None:
        with self._lock:
            self._open.discard(number)


class Updater:
    """Updates from one client, as one incarnation. Thread-safe.

    Attributes:
        term: of what is updated outside of functions; see UpdateRequest.
    """

    def __init__(self, job: int, incarnation: int, exchanges: Exchanges) -> None:
        self.term = 0
        self._job = job
        self._incarnation = incarnation
        self._exchanges = exchanges
        self._sequences = _Sequences()
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # by shard: life of its server, and updates then

    def update(self, parts: Sequence[UpdatePart]) -> None:
        """Apply every part once, however often it has to be sent. Returns when all servers have acknowledged."""
        function = self._exchanges.begin()
        by_server: defaultdict[int, list[UpdatePart]] = defaultdict(list)
        for part in parts:
            by_server[part.server].append(part)
        inside = function is not None and function.function
        number, settled = (0, 0) if inside else self._sequences.take()
        term = function.term if function is not None and inside else self.term  # one, however often it is sent
        small: dict[int, Sequence[Buffer]] = {}
        large: dict[int, Callable[[], object]] = {}
        try:
            for index, mine in by_server.items():
                for part in mine:
                    part.item.life, part.item.seen = self._seen.get((part.item.variable, part.item.shard), (0, 0))
                request = ps_pb2.Request(
                    update=ps_pb2.UpdateRequest(
                        job=self._job,
                        incarnation=self._incarnation,
                        function=function.function if function is not None else 0,
                        key=function.key if function is not None else 0,
                        sequence=number,
                        settled=settled,
                        term=term,
                        items=[part.item for part in mine],
                    )
                )
                segments = [
                    segment
                    for part in mine
                    for segment in ((view(part.ids), part.values) if part.ids is not None else (part.values,))
                ]
                buffers = padded(segments)
                request.total_bytes = sum(map(len, buffers))
                if request.total_bytes <= SESSION_BYTES:
                    request.last = True
                    small[index] = parts_of(request, buffers)
                else:
                    large[index] = functools.partial(self._push_update, index, request, buffers, mine, function)
            reach("client.update.before")
            if small:
                self._exchanges.exchange(
                    "push", small, lambda index, reply, _: self._note(by_server[index], reply.update), function
                )
            if large:
                self._exchanges.on_each(large)
            reach("client.update.after")
            pushed = sum(len(part.values) + (0 if part.ids is None else part.ids.nbytes) for part in parts)
            self._exchanges.pushed += pushed
        finally:
            if number:
                self._sequences.done(number)

    def _push_update(
        self,
        index: int,
        request: ps_pb2.Request,
        buffers: list[Buffer],
        parts: Sequence[UpdatePart],
        function: FunctionContext | None,
    ) -> None:
        name, begin = new_session(), time.monotonic()
        reply = self._exchanges.push(index, request, buffers, name=name)()
        self._exchanges.count("push", index, (name, 1), begin, sum(map(len, buffers)), 0, function)
        self._note(parts, reply.update)

    def _note(self, parts: Sequence[UpdatePart], reply: ps_pb2.UpdateReply) -> None:
        """Remember what was acknowledged, so that a server that comes back with less learns what it has lost."""
        for part, updates in zip(parts, reply.updates, strict=False):
            key = part.item.variable, part.item.shard
            life, most = self._seen.get(key, (0, 0))
            self._seen[key] = reply.life, max(most, updates) if life == reply.life else updates

    def seen(self) -> list[ps_pb2.SeenUpdates]:
        """Return what this client was told of."""
        return [
            ps_pb2.SeenUpdates(variable=variable, shard=shard, life=life, updates=updates)
            for (variable, shard), (life, updates) in list(self._seen.items())
        ]
