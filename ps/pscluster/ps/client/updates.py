"""Updates of the parameter servers: each is applied once, however often it is sent."""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.context import FunctionContext
from pscluster.core.errors import StaleError
from pscluster.core.fault_points import reach
from pscluster.core.transport.frames import Buffer, padded, view
from pscluster.ps.client.exchanges import Exchanges
from pscluster.ps.client.placements import Placements
from pscluster.ps.client.steps import ReplicaSteps
from pscluster.ps.spec import SYNCHRONOUS
from pscluster.v1 import ps_pb2

logger = logging.getLogger(__name__)

_LAST_EPOCH = (1 << 64) - 1
"""Of a run that is over."""


@dataclass(slots=True)
class ShardUpdate:
    """One shard's share of an update."""

    server: int
    item: ps_pb2.UpdateItem
    values: memoryview
    ids: npt.NDArray[np.int64] | None = None
    name: str = ""  # of the variable
    dtype: np.dtype[Any] | None = None  # of the shard
    asynchronous: bool = False  # applied at once, also in a synchronous step


class Updater:
    """Updates from one client, as one incarnation. Thread-safe."""

    def __init__(self, job: int, incarnation: int, exchanges: Exchanges, placements: Placements) -> None:
        self.term = 0  # of updates outside of functions; see UpdateRequest
        self._job = job
        self._incarnation = incarnation
        self._exchanges = exchanges
        self._placements = placements
        self._lock = threading.Lock()
        self._last = 0  # sequence number of a request outside of functions
        self._open: set[int] = set()  # sequence numbers not answered yet
        self._seen: dict[tuple[int, int], tuple[int, int]] = {}  # by shard: boot id of its server, and updates

    def update(self, updates: Sequence[ShardUpdate]) -> None:
        """Apply every update once, however often it is sent. Return when all servers have acknowledged."""
        function = self._exchanges.begin()
        if function is not None and function.steps is not None:
            function.steps.add([update for update in updates if not update.asynchronous])
            updates = [update for update in updates if update.asynchronous]
            if not updates:
                return
            function.steps.updated_at_once = True
        inside = function is not None and function.function
        sequence, settled = (0, 0) if inside else self._next_sequence()
        origin = ps_pb2.UpdateRequest(
            job=self._job,
            incarnation=self._incarnation,
            function=function.function if function is not None else 0,
            key=function.key if function is not None else 0,
            sequence=sequence,
            settled=settled,
            # The same for all attempts.
            term=function.term if function is not None and inside else self.term,
        )
        try:
            reach("client.update.before")
            self._placements.following(lambda: self._send(updates, origin, function))
            reach("client.update.after")
        finally:
            with self._lock:
                self._open.discard(sequence)

    def _send(
        self, updates: Sequence[ShardUpdate], origin: ps_pb2.UpdateRequest, function: FunctionContext | None
    ) -> None:
        """Send each server its updates, of which it may have applied some already."""
        by_server: defaultdict[int, list[ShardUpdate]] = defaultdict(list)
        for update in updates:
            by_server[self._placements.owner(update.item.variable, update.item.shard, update.server)].append(update)
        requests: dict[int, tuple[ps_pb2.Request, list[Buffer]]] = {}
        for index, of_server in by_server.items():
            for update in of_server:
                seen = self._seen.get((update.item.variable, update.item.shard), (0, 0))
                update.item.boot_id, update.item.seen = seen
            request = ps_pb2.Request(update=origin)
            request.update.items.extend(update.item for update in of_server)
            segments = [
                segment
                for update in of_server
                for segment in ((view(update.ids), update.values) if update.ids is not None else (update.values,))
            ]
            requests[index] = request, padded(segments)
        self._exchanges.send_updates(requests, lambda index, reply: self._note(by_server[index], reply), function)

    def header(self, function: FunctionContext) -> ps_pb2.UpdateRequest:
        """Return the origin of a function's updates, for its contributions to synchronous steps."""
        return ps_pb2.UpdateRequest(
            job=self._job, incarnation=self._incarnation, function=function.function, term=function.term
        )

    def settle_run(self, run: int, epoch: int) -> int:
        """Begin an epoch of a synchronous run, outside of functions; return how many of its steps are committed.

        When this returns, all servers have applied these steps, and no other one will be committed in an earlier epoch.
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

    def _note(self, updates: Sequence[ShardUpdate], reply: ps_pb2.UpdateReply) -> None:
        """Record what was acknowledged, so that a server that restarts with less learns what it has lost."""
        for update, count in zip(updates, reply.updates, strict=False):
            key = update.item.variable, update.item.shard
            boot_id, most = self._seen.get(key, (0, 0))
            self._seen[key] = reply.boot_id, max(most, count) if boot_id == reply.boot_id else count

    def seen(self) -> list[ps_pb2.SeenUpdates]:
        return [
            ps_pb2.SeenUpdates(variable=variable, shard=shard, boot_id=boot_id, updates=updates)
            for (variable, shard), (boot_id, updates) in list(self._seen.items())
        ]
