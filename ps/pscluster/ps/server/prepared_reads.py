"""Reads that are repeated, prepared by the server: by the bytes of a request, which arrays it asks for.

A request that is byte for byte one that was answered before need not be decoded and checked again. Only small whole
arrays of variables are read so.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from pscluster.core.transport.frames import Buffer, before_payload, padding
from pscluster.ps.request_metrics import VariableCounts
from pscluster.v1 import ps_pb2

MAX_PREPARED = 64
"""As many are kept; of more, the oldest go."""

MAX_REQUEST_BYTES = 64 << 10
"""Larger requests are not kept."""


class PreparedRead:
    """What a server answers to a request that it has seen before: these arrays, as they are now."""

    def __init__(
        self, sources: Sequence[tuple[threading.Lock, memoryview]], counts: Sequence[VariableCounts] = ()
    ) -> None:
        self.times, self.seconds = 0, 0.0  # how often it was answered, and how long that took
        self._settled = 0, 0.0
        self._counts = counts
        self._sources: list[tuple[threading.Lock, memoryview, slice]] = []
        self._total = 0
        for lock, values in sources:
            self._sources.append((lock, values, slice(self._total, self._total + len(values))))
            self._total += len(values) + padding(len(values))
        head = ps_pb2.Reply(last=True, total_bytes=self._total, read=ps_pb2.ReadReply())
        self._head = before_payload(head, self._total) if self._total else head.SerializeToString()

    def settle(self) -> None:
        """Have the variables know what was read of them since the last time: not each time, there may be hundreds."""
        times, seconds = self.times - self._settled[0], self.seconds - self._settled[1]
        self._settled = self._settled[0] + times, self._settled[1] + seconds
        if times:
            total = sum(len(values) for _, values, _ in self._sources) or 1
            for counts, (_, values, _) in zip(self._counts, self._sources, strict=True):
                counts.read(len(values) * times, seconds * len(values) / total, 0, times)

    def reply(self) -> list[Buffer]:
        """The whole frame, in parts; each array as it is at one moment, under its shard's lock."""
        payload = memoryview(bytearray(self._total))
        for lock, values, place in self._sources:
            with lock:
                payload[place] = values
        return [self._head, payload]


class PreparedReads:
    """Those of one store, by the bytes of their requests. Guarded by the store's lock, except `find`."""

    def __init__(self) -> None:
        self._prepared: dict[bytes, PreparedRead] = {}

    def find(self, request: bytes) -> PreparedRead | None:
        """Return what answers this request, byte for byte one that was prepared."""
        return self._prepared.get(request) if len(request) <= MAX_REQUEST_BYTES else None  # to hash it takes time, too

    def add(self, request: bytes, prepared: PreparedRead) -> None:
        """Keep one more, instead of the oldest if there are many."""
        while len(self._prepared) >= MAX_PREPARED:
            self._prepared.pop(next(iter(self._prepared))).settle()
        self._prepared[request] = prepared

    def settle(self) -> None:
        """Have the variables know what was read of them so far."""
        for prepared in self._prepared.values():
            prepared.settle()

    def clear(self) -> None:
        """Forget all: what they read may be there no more."""
        self.settle()
        self._prepared.clear()
