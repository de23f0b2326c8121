"""Reads of the parameter servers: planned (`read_plans`), transferred, and decoded to where the values belong.

What fits in one message goes over a session, the rest is pulled in frames. Plans of whole variables, which are read
again and again, are kept; large shards that do not change come from the `ReadCache`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from pscluster.core.context import FunctionContext
from pscluster.core.errors import UnavailableError
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.transport.frames import pack, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.client.connections import new_session
from pscluster.ps.client.exchanges import SLOWEST_BYTES_PER_SECOND, Exchanges
from pscluster.ps.client.read_cache import CacheDecision, Key, ReadCache, cache_bytes
from pscluster.ps.client.read_plans import Array, ReadPart, ReadPlan, WholeReadPlan, WholeVariable, divided, request_for
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2

MAX_PLANS = 64
"""Plans of whole variables that a client keeps; the oldest make room."""


class Reader:
    """Reads for one client. Thread-safe."""

    def __init__(self, job: int, exchanges: Exchanges) -> None:
        self._job = job
        self._exchanges = exchanges
        self._plans: dict[tuple[int, ...], WholeReadPlan] = {}
        self._planning = threading.Lock()
        self._cache = ReadCache(cache_bytes())

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read every part to its target: one request per server, all servers at once."""
        function = self._exchanges.begin()
        to_keep: list[tuple[ReadPart, int]] = []
        if self._cache.limit:
            parts, to_keep = self._without_copies(parts)
        plan = ReadPlan(self._job, parts)
        self._transfer(plan, plan.deliver, function)
        if to_keep:
            self._keep_unchanged(to_keep)

    def read_planned(self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]) -> list[Array] | None:
        """Return the values of whole variables, by ids; None if they do not fit in one message.

        Their plan is made only once, from what `describe` returns.
        """
        key = tuple(variables)
        plan = self._plans.get(key)
        if plan is None:
            plan = WholeReadPlan(self._job, describe())
            with self._planning:
                while len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan
        if plan.large:
            return None
        results = plan.new_results()
        self._transfer(plan, functools.partial(plan.deliver_to, results), self._exchanges.begin())
        return results

    def _transfer(
        self, plan: ReadPlan, decode: Callable[[int, memoryview], None], function: FunctionContext | None
    ) -> None:
        """Send a plan's requests; give each reply in one message to `decode`, and pull the others to their targets."""

        def finish(server: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            plan.check(server, reply, payload)
            decode(server, payload)

        if plan.requests:
            self._exchanges.exchange("pull", plan.requests, finish, function)
        if plan.large:
            self._exchanges.on_each(
                functools.partial(self._pull, server, parts, function) for server, parts in plan.large.items()
            )
        self._exchanges.pulled += plan.pulled
        self._exchanges.pushed += plan.pushed

    def _pull(self, index: int, parts: list[ReadPart], function: FunctionContext | None) -> None:
        server = self._exchanges.servers[index]
        timeout = self._exchanges.timeout + sum(part.size for part in parts) / SLOWEST_BYTES_PER_SECOND
        # A function that takes all values at once gets them from a buffer.
        received = [
            part if isinstance(part.target, memoryview) else replace(part, target=memoryview(bytearray(part.size)))
            for part in parts
        ]

        def attempt() -> None:
            for pieces in divided(received):
                sink = PayloadSink(ps_pb2.Reply, [cast(memoryview, piece.target) for piece in pieces])
                name, begin = new_session(), time.monotonic()
                request = pack(*request_for(self._job, pieces))
                server.pull(request, ((SESSION_HEADER, name),), timeout, sink.take)
                if not sink.complete:
                    raise UnavailableError(f"the reply ended {sink.missing} bytes too early")
                self._exchanges.count("pull", index, (name, 1), begin, len(request), sink.received, function)
            for part, buffered in zip(parts, received, strict=True):
                if buffered is not part:
                    part.take(cast(memoryview, buffered.target))

        self._exchanges.retrying(server, attempt)

    # The cache

    def _without_copies(self, parts: Sequence[ReadPart]) -> tuple[Sequence[ReadPart], list[tuple[ReadPart, int]]]:
        """Fill the parts that the cache has; return the others, and those to keep if their version does not change."""
        candidates = [
            part
            for part in parts
            if part.size >= SESSION_BYTES
            and isinstance(part.target, memoryview)  # otherwise the bytes do not lie in one piece
            and part.item.rows.all
            and not part.item.slot
            and self._cache.asks(_key(part), part.size)
        ]
        if not candidates:
            return parts, []
        to_keep, cached = [], set()
        for part, version in zip(candidates, self._versions(candidates), strict=True):
            decision, copy = self._cache.decide(_key(part), version)
            if decision is CacheDecision.KEEP:
                to_keep.append((part, version))
            elif decision is CacheDecision.COPY:
                cached.add(id(part))
                part.take(memoryview(copy))
        return [part for part in parts if id(part) not in cached], to_keep

    def _keep_unchanged(self, parts: Sequence[tuple[ReadPart, int]]) -> None:
        """Cache the parts that still have the version they had before the read."""
        for (part, before), after in zip(parts, self._versions([part for part, _ in parts]), strict=True):
            if before == after:
                assert isinstance(part.target, memoryview)  # see _without_copies
                self._cache.keep(_key(part), after, part.target)

    def _versions(self, parts: Sequence[ReadPart]) -> list[int]:
        """Return the versions of shards: one small request per server."""
        versions = np.empty(len(parts), "<u8")
        rows = ps_pb2.Rows(version=True)
        items = [ps_pb2.ReadItem(variable=part.item.variable, shard=part.item.shard, rows=rows) for part in parts]
        self.read(
            [
                ReadPart(part.server, item, versions.itemsize, view(versions[index : index + 1]))
                for index, (part, item) in enumerate(zip(parts, items, strict=True))
            ]
        )
        result: list[int] = versions.tolist()
        return result


def _key(part: ReadPart) -> Key:
    return part.item.variable, part.item.shard
