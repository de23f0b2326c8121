"""Updates of the parameter servers: each is applied once, however often it is sent."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence

from pscluster.core.context import FunctionContext, in_background
from pscluster.core.errors import MisuseError, StaleError
from pscluster.core.fault_points import reach
from pscluster.core.phases import Phases, run
from pscluster.core.transport.frames import Buffer, padded, view
from pscluster.ps.client.exchanges import Exchanges
from pscluster.ps.client.overlap.queue import StepOverlap
from pscluster.ps.client.placement.cuts import Cut
from pscluster.ps.client.placement.placements import Placements
from pscluster.ps.client.synchronous.steps import ReplicaSteps
from pscluster.ps.client.updates.residuals import Push, Residuals, limit_bytes
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.spec import NOT_IN_STEP, SYNCHRONOUS
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

_LAST_EPOCH = (1 << 64) - 1
"""Of a run that is over."""


class Updater:
    """Updates from one client, as one incarnation. Thread-safe."""

    def __init__(
        self, job: int, incarnation: int, exchanges: Exchanges, placements: Placements, metrics: ClientMetrics
    ) -> None:
        self.term = 0  # of updates outside of functions; see UpdateRequest
        self._job = job
        self._incarnation = incarnation
        self._exchanges = exchanges
        self._placements = placements
        self._lock = threading.Lock()
        self._last = 0  # sequence number of a request outside of functions
        self._open: set[int] = set()  # sequence numbers not answered yet
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # by shard: boot id of its server, and updates
        self._residuals = Residuals(limit_bytes(), metrics)

    def reshard(self, old: Cut, new: Cut) -> None:
        """Go on with the residuals of a variable that is resharded."""
        self._residuals.reshard(old, new)

    def update(self, updates: Sequence[ShardUpdate]) -> None:
        """Apply every update once, however often it is sent. Return when all servers have acknowledged.

        In a function whose steps overlap return at once: see `overlap.queue`.
        """
        function = self._exchanges.begin()
        if function is not None and function.steps is not None:
            _check_whole([update for update in updates if not update.asynchronous])
            function.sends_update()
            function.steps.add([update for update in updates if not update.asynchronous])
            updates = [update for update in updates if update.asynchronous]
            if not updates:
                return
            function.steps.updated_at_once = True
        if function is not None and (overlap := function.overlap) is not None:
            self._push(updates, function, overlap)
        else:
            self._apply(updates, function)

    def _push(self, updates: Sequence[ShardUpdate], function: FunctionContext, overlap: StepOverlap) -> None:
        """Begin to apply updates. They get copies of the caller's arrays, which it may use again."""
        if in_background():
            raise MisuseError("lookups must not change variables: it only names the rows that its step will read")
        nbytes = 0
        for update in updates:
            if not update.owned:
                update.own()
            nbytes += len(update.values) + (0 if update.ids is None else update.ids.nbytes)
        if overlap.fetched is not None and not overlap.fetched.is_empty:
            overlap.fetched.drop({update.item.variable for update in updates})
        overlap.push(lambda: self._applying(updates, function), nbytes)

    def _apply(self, updates: Sequence[ShardUpdate], function: FunctionContext | None) -> None:
        """Send updates, those with an encoding in that, until all servers have acknowledged."""
        run(self._applying(updates, function))

    def _applying(self, updates: Sequence[ShardUpdate], function: FunctionContext | None) -> Phases[None]:
        """Do what `_apply` does. The updates are under way once it has begun, if all requests are small."""
        # The same for all attempts.
        term = function.term if function is not None and function.function else self.term
        pushes: dict[int, Push] = {}
        try:
            if any(update.encoding is not None for update in updates):
                updates = self._encoded(updates, term, pushes)
            yield from self._applying_once(updates, term, function, pushes)
        finally:
            if pushes:
                with contextlib.suppress(KeyError):  # after Ctrl-C, large ones may still be answered on other threads
                    while True:
                        self._residuals.fail(pushes.popitem()[1])

    def _encoded(self, updates: Sequence[ShardUpdate], term: int, pushes: dict[int, Push]) -> list[ShardUpdate]:
        """Return updates as they are to be sent; add what is to be acknowledged of them, by their ids."""
        result = []
        for update in updates:
            if update.encoding is None:
                result.append(update)
                continue
            encoded, push = self._residuals.encode(update, term)
            pushes[id(encoded)] = push
            result.append(encoded)
        return result

    def _applying_once(
        self, updates: Sequence[ShardUpdate], term: int, function: FunctionContext | None, pushes: dict[int, Push]
    ) -> Phases[None]:
        if inside := function is not None and function.function > 0:
            function.sends_update()
        sequence, settled = (0, 0) if inside else self._next_sequence()
        origin = ps_pb2.UpdateRequest(
            job=self._job,
            incarnation=self._incarnation,
            function=function.function if function is not None else 0,
            key=function.key if function is not None else 0,
            sequence=sequence,
            settled=settled,
            term=term,
        )
        try:
            reach("client.update.before")
            yield from self._placements.following_begun(lambda: self._sending(updates, origin, function, pushes))
            reach("client.update.after")
        finally:
            with self._lock:
                self._open.discard(sequence)

    def _sending(
        self,
        updates: Sequence[ShardUpdate],
        origin: ps_pb2.UpdateRequest,
        function: FunctionContext | None,
        pushes: dict[int, Push],
    ) -> Phases[None]:
        """Send each server its updates, of which it may have applied some already."""
        by_server: defaultdict[int, list[ShardUpdate]] = defaultdict(list)
        shards: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # of these
        seen, placements = self._seen, self._placements
        for update in updates:
            item = update.item
            shard = item.variable, item.shard
            if (known := seen.get(shard)) is not None:
                item.boot_id, item.seen = known
            index = placements.owner(*shard, update.server) if placements.changes else update.server
            by_server[index].append(update)
            shards[index].append(shard)
        requests: dict[int, tuple[ps_pb2.Request, list[Buffer]]] = {}
        nbytes = 0
        for index, of_server in by_server.items():
            request = ps_pb2.Request(update=origin)
            request.update.items.extend([update.item for update in of_server])
            segments: list[memoryview] = []
            for update in of_server:
                if update.ids is not None:
                    segments.append(view(update.ids))
                segments.append(update.values)
            nbytes += sum(map(len, segments))
            requests[index] = request, padded(segments)

        def finish(index: int, reply: ps_pb2.UpdateReply) -> None:
            self._note(shards[index], reply)
            for update in by_server[index] if pushes else ():
                if (push := pushes.pop(id(update), None)) is not None:
                    self._residuals.acknowledge(push)

        return self._exchanges.sending_updates(requests, finish, function, nbytes)

    def header(self, function: FunctionContext) -> ps_pb2.UpdateRequest:
        """Return the origin of a function's updates, for its contributions to synchronous steps."""
        return ps_pb2.UpdateRequest(
            job=self._job, incarnation=self._incarnation, function=function.function, term=function.term
        )

    def settle_run(self, run: int, epoch: int) -> int:
        """Begin an epoch of a synchronous run, outside of functions; return how many of its steps are committed.

        When this returns, all servers have applied these steps, and have nothing else of this or an earlier epoch.
        """
        sequence, settled = self._next_sequence()
        try:
            header = ps_pb2.UpdateRequest(
                job=self._job, incarnation=self._incarnation, sequence=sequence, settled=settled, term=self.term
            )
            steps = ReplicaSteps(
                self._exchanges, header, run=run, step=0, epoch=epoch, replica=0, replicas=1, seconds=0
            )
            state = steps.open()
            steps.go_on(state)
            steps.begin_on(range(1, len(self._exchanges.servers)))
            return state.committed
        finally:
            with self._lock:
                self._open.discard(sequence)

    def settle_recorded(self, texts: Mapping[str, str]) -> None:
        """Have all servers apply the steps that are committed under another coordinator, and end its synchronous runs.

        `texts` are the job's metadata, read once that coordinator was shut out.
        """
        record = json.loads(texts.get(SYNCHRONOUS, "{}"))
        if "run" in record:
            try:
                self.settle_run(int(record["run"]), _LAST_EPOCH)
            except StaleError as error:  # it has restarted without a log
                logger.error("the last synchronous step is not whole: %s", error)

    def _next_sequence(self) -> tuple[int, int]:
        """Return the next request's sequence number, and the number below which all requests are answered."""
        with self._lock:
            settled = min(self._open, default=self._last + 1)
            self._last += 1
            self._open.add(self._last)
            return self._last, settled

    def _note(self, shards: Sequence[tuple[int, int]], reply: ps_pb2.UpdateReply) -> None:
        """Record what was acknowledged, so that a server that restarts with less learns what it has lost."""
        now, seen = reply.boot_id, self._seen
        for shard, count in zip(shards, reply.updates, strict=False):
            boot_id, most = seen.get(shard, (0, 0))
            if boot_id != now or count > most:
                seen[shard] = now, count

    def forget(self, variable: int) -> None:
        """Forget the updates of a variable, by id, that was deleted: it can't lose any more."""
        for shard in [shard for shard in list(self._seen) if shard[0] == variable]:
            self._seen.pop(shard, None)

    def has_updated(self, variable: int) -> bool:
        """Return whether an update of this client to a variable, by id, was acknowledged."""
        return any(known == variable for known, _ in list(self._seen))

    def seen(self) -> list[ps_pb2.SeenUpdates]:
        return [
            ps_pb2.SeenUpdates(variable=variable, shard=shard, boot_id=boot_id, updates=updates)
            for (variable, shard), (boot_id, updates) in list(self._seen.items())
        ]


def _check_whole(updates: Sequence[ShardUpdate]) -> None:
    """Raise MisuseError for updates of a synchronous step that would be encoded: replicas combine them as they are."""
    for update in updates:
        if update.encoding is not None:
            raise MisuseError(f"variable {update.name!r} {NOT_IN_STEP}")
