"""Reads of the parameter servers: planned (`plans`), transferred, and decoded to where the values belong.

What fits in one message goes over a session, the rest is pulled in frames. Plans of whole variables, which are read
again and again, are kept; large shards that do not change come from the `ReadCache`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from pscluster.core.context import FunctionContext, encodes_reads
from pscluster.core.errors import UnavailableError
from pscluster.core.metrics.trace import SESSION_HEADER
from pscluster.core.phases import Phases, run
from pscluster.core.transport.frames import Buffer, pack, view
from pscluster.core.transport.payload_sink import PayloadSink
from pscluster.ps.client.connections import new_session
from pscluster.ps.client.exchanges import SLOWEST_BYTES_PER_SECOND, Exchanges
from pscluster.ps.client.overlap.own_thread import OWN_BYTES
from pscluster.ps.client.placement.placements import Placements
from pscluster.ps.client.reads.cache import CacheDecision, Key, ReadCache, cache_bytes
from pscluster.ps.client.reads.plans import (
    Array,
    ReadPlan,
    ShardRead,
    WholeReadPlan,
    WholeVariable,
    divided,
    request_for,
)
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import ps_pb2

MAX_PLANS = 64
"""Plans of whole variables that a client keeps; the oldest make room."""


class Reader:
    """Reads for one client. Thread-safe."""

    def __init__(self, job: int, exchanges: Exchanges, placements: Placements) -> None:
        self._job = job
        self._exchanges = exchanges
        self._placements = placements
        # By whether some may be encoded, and by their variables; each with the `Placements.changes` before it was made.
        self._plans: dict[tuple[int, ...], tuple[int, WholeReadPlan]] = {}
        self._planning = threading.Lock()
        self._cache = ReadCache(cache_bytes())

    def read(self, reads: Sequence[ShardRead], *, whole: bool = False) -> None:
        """Perform every read into its target: one request per server, all servers at once.

        `whole`: they are of all values of their variables.
        """
        function = self._begin()
        if function is not None and function.steps is not None:
            function.steps.note_reads([read.item.variable for read in reads], whole=whole)
        self._placements.following(lambda: self._read_all(reads, function))

    def _begin(self) -> FunctionContext | None:
        """Do what `Exchanges.begin` does. A step reads what it has pushed, even if pushes return at once."""
        function = self._exchanges.begin()
        if function is not None and function.overlap is not None:
            function.overlap.settle_step()
        return function

    def _read_all(self, reads: Sequence[ShardRead], function: FunctionContext | None) -> None:
        for read in reads:
            read.server = self._placements.owner(read.item.variable, read.item.shard, read.server)
        to_store: list[tuple[ShardRead, int]] = []
        if self._cache.limit:
            reads, to_store = self._without_copies(reads, function)
        self._read(reads, function)
        if to_store:
            self._store_unchanged(to_store, function)

    def _read(self, reads: Sequence[ShardRead], function: FunctionContext | None) -> None:
        plan = ReadPlan(self._job, reads)
        self._transfer(plan, plan.deliver, function)

    def read_planned(
        self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]
    ) -> Sequence[Array | None]:
        """Return the values of whole variables, by ids; None for each that has yet to be read, if they are large.

        Their plan is made only once, from what `describe` returns.
        """
        function = self._begin()
        own = {} if function is None or function.steps is None else function.steps.copies_of(variables, describe)
        if own:
            others = [at for at, variable in enumerate(variables) if variable not in own]

            def describe_others() -> list[WholeVariable]:
                wholes = describe()
                return [wholes[at] for at in others]

            values = iter(self.read_planned([variables[at] for at in others], describe_others) if others else [])
            return [own[variable] if variable in own else next(values) for variable in variables]
        return self._placements.following(lambda: self._read_by_plan(variables, describe, function))

    def reading_both(
        self, reads: Sequence[ShardRead], variables: Sequence[int], describe: Callable[[], list[WholeVariable]]
    ) -> Phases[Sequence[Array | None]]:
        """Do what `read` and `read_planned` do, by one request per server if the replies are small.

        These requests are under way once it has begun, unless they are for more than `OWN_BYTES`. Not in a synchronous
        step.
        """
        function = self._begin()
        return self._placements.following_begun(lambda: self._reading_both(reads, variables, describe, function))

    def _reading_both(
        self,
        reads: Sequence[ShardRead],
        variables: Sequence[int],
        describe: Callable[[], list[WholeVariable]],
        function: FunctionContext | None,
    ) -> Phases[Sequence[Array | None]]:
        for read in reads:
            read.server = self._placements.owner(read.item.variable, read.item.shard, read.server)
        whole = self._plan_of((encodes_reads(function), *variables), describe) if variables else None
        plan = ReadPlan(self._job, reads, whole)
        results = [] if whole is None else whole.new_results()
        deliver = functools.partial(plan.deliver_both, results)
        if plan.left_out or plan.pulled > OWN_BYTES:
            yield False
            self._transfer(plan, deliver, function)
        else:
            yield from self._transferring(plan, deliver, function)
        return self._read_by_plan(variables, describe, function) if plan.left_out else results

    def _read_by_plan(
        self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]], function: FunctionContext | None
    ) -> Sequence[Array | None]:
        plan = self._plan_of((encodes_reads(function), *variables), describe)
        if plan.large:
            return [None] * len(variables)
        if function is not None and function.steps is not None:
            function.steps.note_reads(variables, whole=True)
        results = plan.new_results()
        self._transfer(plan, functools.partial(plan.deliver_to, results), function)
        return results

    def _plan_of(self, key: tuple[int, ...], describe: Callable[[], list[WholeVariable]]) -> WholeReadPlan:
        """Return the plan of these variables, made anew if shards have moved since it was made."""
        changes = self._placements.changes
        made, plan = self._plans.get(key, (-1, None))
        if plan is None or made != changes:
            plan = WholeReadPlan(self._job, describe())
            with self._planning:
                while len(self._plans) >= MAX_PLANS:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = changes, plan
        return plan

    def _transfer(
        self, plan: ReadPlan, decode: Callable[[int, memoryview], None], function: FunctionContext | None
    ) -> None:
        """Send a plan's requests; give each reply in one message to `decode`, and pull the others to their targets."""
        run(self._transferring(plan, decode, function))

    def _transferring(
        self, plan: ReadPlan, decode: Callable[[int, memoryview], None], function: FunctionContext | None
    ) -> Phases[None]:
        """Do what `_transfer` does. If all requests are small, they are under way once it has begun."""

        def finish(server: int, reply: ps_pb2.Reply, payload: memoryview) -> None:
            plan.check(server, reply, payload)
            decode(server, payload)

        requests: Mapping[int, Sequence[Buffer]] = plan.requests
        if function is not None and function.steps is not None:
            requests = {server: (function.steps.after, *request) for server, request in requests.items()}
        large = [functools.partial(self._pull, server, reads, function) for server, reads in plan.large.items()]
        yield from self._exchanges.exchanging("pull", requests, finish, function, large)
        self._exchanges.pulled += plan.pulled
        self._exchanges.pushed += plan.pushed

    def _pull(self, index: int, reads: list[ShardRead], function: FunctionContext | None) -> None:
        server = self._exchanges.server(index)
        timeout = self._exchanges.timeout + sum(read.size for read in reads) / SLOWEST_BYTES_PER_SECOND
        # A function that takes all values at once gets them from a buffer.
        received = [
            read if isinstance(read.target, memoryview) else replace(read, target=memoryview(bytearray(read.size)))
            for read in reads
        ]

        def attempt() -> None:
            for pieces in divided(received):
                sink = PayloadSink(ps_pb2.Reply, [cast(memoryview, piece.target) for piece in pieces])
                name, begin = new_session(), time.monotonic()
                request = pack(*request_for(self._job, pieces))
                if function is not None and function.steps is not None:
                    request = function.steps.after + request
                server.pull(request, ((SESSION_HEADER, name),), timeout, sink.take)
                if not sink.complete:
                    raise UnavailableError(f"the reply ended {sink.missing} bytes too early")
                self._exchanges.count("pull", index, (name, 1), begin, len(request), sink.received, function)
            for read, buffered in zip(reads, received, strict=True):
                if buffered is not read:
                    read.take(cast(memoryview, buffered.target))

        self._exchanges.retrying(server, attempt)

    # The cache

    def _without_copies(
        self, reads: Sequence[ShardRead], function: FunctionContext | None
    ) -> tuple[Sequence[ShardRead], list[tuple[ShardRead, int]]]:
        """Serve the reads that the cache has; return the others, and those to store if their version stays."""
        candidates = [
            read
            for read in reads
            if read.size >= SESSION_BYTES
            and isinstance(read.target, memoryview)  # otherwise the bytes do not lie in one piece
            and read.item.rows.all
            and not read.item.slot
            and self._cache.asks(_key(read), read.size)
        ]
        if not candidates:
            return reads, []
        to_store, cached = [], set()
        for read, version in zip(candidates, self._versions(candidates, function), strict=True):
            decision, copy = self._cache.decide(_key(read), version)
            if decision is CacheDecision.STORE:
                to_store.append((read, version))
            elif decision is CacheDecision.COPY:
                cached.add(id(read))
                read.take(memoryview(copy))
        return [read for read in reads if id(read) not in cached], to_store

    def _store_unchanged(self, reads: Sequence[tuple[ShardRead, int]], function: FunctionContext | None) -> None:
        """Store what was read of shards that still have the version they had before."""
        versions = self._versions([read for read, _ in reads], function)
        for (read, before), after in zip(reads, versions, strict=True):
            if before == after:
                assert isinstance(read.target, memoryview)  # see _without_copies
                self._cache.store(_key(read), after, read.target)

    def _versions(self, reads: Sequence[ShardRead], function: FunctionContext | None) -> list[int]:
        """Return the versions of shards: one small request per server, which are no reads of a step."""
        versions = np.empty(len(reads), "<u8")
        rows = ps_pb2.Rows(version=True)
        items = [ps_pb2.ReadItem(variable=read.item.variable, shard=read.item.shard, rows=rows) for read in reads]
        queries = [
            ShardRead(read.server, item, versions.itemsize, view(versions[index : index + 1]))
            for index, (read, item) in enumerate(zip(reads, items, strict=True))
        ]
        self._read(queries, function)
        result: list[int] = versions.tolist()
        return result


def _key(read: ShardRead) -> Key:
    return read.item.variable, read.item.shard
