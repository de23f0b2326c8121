"""The role of a parameter server: which job it works for, what it holds, and what it says of that."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace

from pscluster.core.errors import StaleError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.ids import fresh_id
from pscluster.core.role.node import Role
from pscluster.ps.request_metrics import ServiceCounts, StoreCounts
from pscluster.ps.server.store import Store
from pscluster.ps.spec import OURS
from pscluster.ps.storage.checkpoint_parts import Parts
from pscluster.ps.storage.manager import Lineage, StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.ps.storage.roots import Roots
from pscluster.v1 import node_pb2

OWN_SECONDS = 3.0
"""So long a server that comes back is kept for the coordinator that it had, which dials every quarter of a second."""

MAX_BUSIEST = 256
"""Of so many variables at most does a status tell."""


class ParameterServerRole(Role):
    """Keeps the store of the job that the server works for."""

    def __init__(self, index: int, manager: StateManager | None = None, roots: Roots | None = None) -> None:
        self.roots = roots or Roots()
        self.manager = manager or StateManager(DurabilityOptions())
        self.parts = Parts()
        self.counts = ServiceCounts()
        self._store_counts = StoreCounts()
        reach("ps.restore.before")
        found = self.manager.restore()
        reach("ps.restore.after")
        self._take_on(Store(index) if found is None else found.store)
        self.kept_job = self.store.job
        self._origin = Lineage() if found is None else found.lineage
        self._restored = "" if found is None else found.words
        # Restored, and not told yet which workers were given up meanwhile: nobody is served before that.
        self.waiting = found is not None
        self._own_until = time.monotonic() + OWN_SECONDS
        self._new = False  # the job has begun, and may not be on disk

    def _take_on(self, store: Store) -> None:
        """Another store, of the same server."""
        store.counts, store.spill = self._store_counts, self.manager.spill
        self.store = store

    def serving(self) -> Store:
        """The store, for whoever asks for something of it. UnavailableError while it waits for its coordinator."""
        if self.waiting:
            raise UnavailableError(f"ps {self.store.index} has restarted and is waiting for its coordinator")
        return self.store

    def admit(self, request: node_pb2.AttachRequest) -> None:
        """StaleError for a coordinator whose job is not the one that is held here, or was taken over."""
        mine = self._origin
        if (
            self.waiting
            and request.job != self.kept_job
            and not request.take_over
            and time.monotonic() < self._own_until
        ):
            raise UnavailableError("it has restarted and is waiting for its previous coordinator; try again")
        if request.holding and request.holding != mine.holding:
            raise StaleError(
                "it was restarted, or worked for another coordinator meanwhile, and has lost its shards of all "
                "variables: start a new coordinator to start over"
            )
        if request.lineage and request.lineage == mine.lineage:
            first = request.epoch > mine.epoch
            if not first and not (request.epoch == mine.epoch and request.job == self.store.job):
                raise StaleError(
                    f"coordinator number {mine.epoch} of this job has taken it over from number {request.epoch}"
                )

    def job_began(self, request: node_pb2.AttachRequest) -> None:
        """Go on with what there is, if it is of the same lineage; else start empty: what is left is dropped."""
        if request.lineage and request.lineage == self._origin.lineage:
            reach("ps.epoch.before")
            self.store.take_over(request.job)
            self.parts.forget()  # checkpoints of a coordinator that is gone
            reach("ps.epoch.after")
            self._origin = replace(self._origin, epoch=request.epoch)
            self.manager.go_on(self._origin)
            return
        self.parts.forget()
        self._take_on(Store(self.store.index, request.job))
        self._restored = ""
        self._origin = Lineage(fresh_id(), request.lineage, request.epoch, request.job_name)
        self.manager.begin(self.store, self._origin)
        self._new = True

    def attached(self, request: node_pb2.AttachRequest) -> int:
        """Another number where the store is another: a coordinator that comes back sees what it has lost."""
        for incarnation in request.closed:
            self.store.close_incarnation(incarnation)
        self.store.finish_functions(list(zip(request.finished_starts, request.finished_stops, strict=True)))
        self.waiting = False
        return self._origin.holding

    def account(self, event: node_pb2.AttachEvent) -> None:
        """What was restored, once, what can't be without help, and the term."""
        event.restored, self._restored = self._restored, ""
        event.missing_rules.extend(self.store.held()[2])
        event.term = self.store.term

    def introduce(self, reply: node_pb2.HelloReply) -> None:
        """What is held."""
        mine = self._origin
        reply.holding, reply.lineage, reply.epoch, reply.job_name = mine.holding, mine.lineage, mine.epoch, mine.name

    def keep(self) -> None:
        """A job that has begun is on disk: else a server that dies now comes back without it, or with the one before.

        PsClusterError, with the reason, if it can't be put there.
        """
        if self._new:
            self.manager.save()
            self._new = False

    def job_ended(self) -> None:
        """Drop the job's variables."""
        self.parts.forget()
        self._take_on(Store(self.store.index))
        self._origin, self.waiting = Lineage(), False
        self.manager.end()

    def describe(self, reply: node_pb2.StatusReply) -> None:
        """Shards and bytes."""
        reply.variables, reply.variable_bytes = self.store.totals()
        reply.detail = f"{self.store.remembered} updates remembered; {self.manager.words}"
        reply.lost_updates.update(self.store.lost)
        reply.requests = sum(self.counts.pulls.counts) + sum(self.counts.pushes.counts)
        reply.bytes_in, reply.bytes_out = self.counts.pushed_bytes, self.counts.pulled_bytes
        if self.waiting:
            reply.state = "restored, waiting for its coordinator"

    def describe_load(self, reply: node_pb2.StatusReply, busiest: int) -> None:
        """The variables of which most bytes were read and updated."""
        most = min(busiest, MAX_BUSIEST)
        traffic = [each for each in self.store.traffic() if not each[0].startswith(OURS)]
        found = heapq.nlargest(most, traffic, key=lambda each: each[2].pulled_bytes + each[2].pushed_bytes)
        for name, nbytes, counts in found:
            load = reply.busiest.add(name=name, bytes=nbytes, reads=counts.pulls, read_bytes=counts.pulled_bytes)
            load.updates, load.update_bytes = counts.pushes, counts.pushed_bytes

    def recorded(self) -> Iterator[node_pb2.Recorded]:
        """Requests."""
        return self.counts.recording.messages()
