"""Prepared reads: for the bytes of a request that was answered before, the arrays it reads.

A request that is repeated byte for byte need not be decoded and checked again. Only reads of small whole variables are
prepared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pscluster.core.transport.frames import Buffer, before_payload, padding
from pscluster.ps.request_metrics import ShardTraffic, VariableMetrics
from pscluster.v1 import ps_pb2

MAX_PREPARED = 64
"""The most that are held; beyond that the oldest are dropped."""

MAX_REQUEST_BYTES = 64 << 10
"""Larger requests are not prepared."""


class PreparedRead:
    """The answer to a request that the server has seen before: the current values of its arrays."""

    def __init__(
        self,
        sources: Sequence[tuple[threading.Lock, memoryview]],
        metrics: Sequence[tuple[VariableMetrics, ShardTraffic]] = (),
    ) -> None:
        self._times, self._seconds = 0, 0.0  # how often it was answered, and the time that took
        self._counted = 0, 0.0
        self._metrics = metrics
        self._sources: list[tuple[threading.Lock, memoryview, slice]] = []
        self._total = 0
        for lock, values in sources:
            self._sources.append((lock, values, slice(self._total, self._total + len(values))))
            self._total += len(values) + padding(len(values))
        head = ps_pb2.Reply(last=True, total_bytes=self._total, read=ps_pb2.ReadReply())
        self._head = before_payload(head, self._total) if self._total else head.SerializeToString()

    def count_reads(self) -> None:
        """Add the reads since the last call to the variables' counts: not at each read, of maybe hundreds of arrays."""
        times, seconds = self._times - self._counted[0], self._seconds - self._counted[1]
        self._counted = self._counted[0] + times, self._counted[1] + seconds
        if times:
            total = sum(len(values) for _, values, _ in self._sources) or 1
            for (metrics, traffic), (_, values, _) in zip(self._metrics, self._sources, strict=True):
                traffic.add(len(values) * times)
                metrics.read(len(values) * times, seconds * len(values) / total, 0, times)

    def reply(self) -> list[Buffer]:
        """Return the whole frame, in parts."""
        return [self._head, self.values()]

    def values(self) -> memoryview:
        """Return the payload; each array is copied under its shard's lock."""
        begin = time.monotonic()
        payload = memoryview(bytearray(self._total))
        for lock, values, segment in self._sources:
            with lock:
                payload[segment] = values
        took = time.monotonic() - begin  # computed first, since other threads may add at the same time
        self._times += 1
        self._seconds += took
        return payload
