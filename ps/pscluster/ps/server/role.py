"""The role of a parameter server: the job it works for, and the state it holds and reports."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace

from pscluster.core.errors import StaleError, UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.ids import fresh_id
from pscluster.core.role.node import Role
from pscluster.ps.request_metrics import ServiceMetrics, StoreMetrics
from pscluster.ps.server.moves import Moves
from pscluster.ps.server.state.directory import HeldVariable
from pscluster.ps.server.state.store import Store
from pscluster.ps.storage.checkpoint_parts import CheckpointParts
from pscluster.ps.storage.files.roots import Roots
from pscluster.ps.storage.job_state import JobIdentity
from pscluster.ps.storage.manager import StateManager
from pscluster.ps.storage.options import DurabilityOptions
from pscluster.ps.tables import BY_ID
from pscluster.v1 import node_pb2

OWN_SECONDS = 3.0
"""How long a restarted server is reserved for its previous coordinator, which dials every quarter of a second."""

MAX_BUSIEST = 4096
"""The most variables that a status lists."""

MAX_SHARDS = 16_384
"""The most shards of these that it lists."""


class ParameterServerRole(Role):
    """Holds the store of the job that the server works for."""

    def __init__(self, index: int, manager: StateManager | None = None, roots: Roots | None = None) -> None:
        self.roots = roots or Roots()
        self.manager = manager or StateManager(DurabilityOptions())
        self.parts = CheckpointParts()
        self.moves = Moves(self.manager)
        self.metrics = ServiceMetrics()
        self._store_metrics = StoreMetrics()
        reach("ps.restore.before")
        saved = self.manager.restore()
        reach("ps.restore.after")
        self._take_on(Store(index) if saved is None else saved.store)
        self.restored_job = self.store.job
        self._identity = JobIdentity() if saved is None else saved.identity
        self._restored = "" if saved is None else saved.words
        # Restored, but the coordinator has not reported yet which workers were given up meanwhile: serve no requests.
        self.waiting = saved is not None
        self._own_until = time.monotonic() + OWN_SECONDS
        self._new = False  # the job has begun, and may not be on disk

    def _take_on(self, store: Store) -> None:
        store.metrics, store.spill = self._store_metrics, self.manager.spill
        self.store = store

    def serving(self) -> Store:
        """Return the store. UnavailableError while the server waits for its coordinator."""
        if self.waiting:
            raise UnavailableError(f"ps {self.store.index} has restarted and is waiting for its coordinator")
        return self.store

    def admit(self, request: node_pb2.AttachRequest) -> None:
        """Raise StaleError for a coordinator whose job is not the one held here, or was taken over."""
        identity = self._identity
        if (
            self.waiting
            and request.job != self.restored_job
            and not request.take_over
            and time.monotonic() < self._own_until
        ):
            raise UnavailableError("it has restarted and is waiting for its previous coordinator; try again")
        if request.store_id and request.store_id != identity.store_id:
            raise StaleError(
                "it was restarted, or worked for another coordinator meanwhile, and has lost its shards of all "
                "variables: start a new coordinator to start over"
            )
        if request.job_id and request.job_id == identity.job_id:
            first = request.coordinator_number > identity.coordinator_number
            if not first and not (
                request.coordinator_number == identity.coordinator_number and request.job == self.store.job
            ):
                raise StaleError(
                    f"coordinator number {identity.coordinator_number} of this job has taken it over from number "
                    f"{request.coordinator_number}"
                )

    def job_began(self, request: node_pb2.AttachRequest) -> None:
        """Continue with the state held here if it has the same job id; else drop it and start empty."""
        if request.job_id and request.job_id == self._identity.job_id:
            reach("ps.takeover.before")
            self.store.take_over(request.job)
            self.parts.forget()  # checkpoints of the previous coordinator
            self.moves.forget(self.store)
            reach("ps.takeover.after")
            self._identity = replace(
                self._identity,
                coordinator_number=request.coordinator_number,
                num_servers=self._identity.num_servers or len(request.ps_addresses),
            )
            self.manager.take_over(self._identity)
            return
        self.parts.forget()
        self.moves.forget(self.store)
        self._take_on(Store(self.store.index, request.job))
        self._restored = ""
        with self.store.ledger() as ledger:
            ledger.open_term(request.term)  # of the other servers, if this one is new to the job
        number, count = request.coordinator_number, len(request.ps_addresses)
        self._identity = JobIdentity(fresh_id(), request.job_id, number, request.job_name, count)
        self.manager.begin(self.store, self._identity)
        self._new = True

    def attached(self, request: node_pb2.AttachRequest, event: node_pb2.AttachEvent) -> None:
        """Report the store id, which differs if the store does: a coordinator that reconnects learns of its loss.

        And what was restored (once), the rules that must be sent again, and the term.
        """
        for incarnation in request.closed:
            self.store.close_incarnation(incarnation)
        self.store.finish_functions(list(zip(request.finished_starts, request.finished_stops, strict=True)))
        self.moves.attached(self.store, request)
        self.waiting = False
        event.store_id = self._identity.store_id
        event.restored, self._restored = self._restored, ""
        event.missing_rules.extend(self.store.held()[2])
        event.term = self.store.term

    def fill_hello(self, reply: node_pb2.HelloReply) -> None:
        identity = self._identity
        reply.store_id, reply.job_id = identity.store_id, identity.job_id
        reply.coordinator_number, reply.job_name = identity.coordinator_number, identity.name
        reply.num_servers = identity.num_servers

    def persist(self) -> None:
        """Save a job that has just begun, so that a server that dies now restarts with it, not the previous one."""
        if self._new:
            self.manager.save()
            self._new = False
        self.moves.persist()

    def resize(self, count: int) -> None:
        """Note, and save, how many servers the job has. PsClusterError if it can't be saved."""
        self._identity = replace(self._identity, num_servers=count)
        self.manager.resize(self._identity)

    def job_ended(self) -> None:
        self.parts.forget()
        self.moves.forget(self.store)
        self._take_on(Store(self.store.index))
        self._identity, self.waiting = JobIdentity(), False
        self.manager.end()

    def describe(self, reply: node_pb2.StatusReply) -> None:
        reply.variables, reply.variable_bytes = self.store.totals()
        reply.detail = f"{self.store.remembered} updates remembered; {self.manager.words}"
        reply.unsaved = self.manager.unsaved
        reply.lost_updates.update(self.store.lost)
        reply.requests = sum(self.metrics.pulls.counts) + sum(self.metrics.pushes.counts)
        reply.bytes_in, reply.bytes_out = self.metrics.pushed_bytes, self.metrics.pulled_bytes
        if self.waiting:
            reply.state = "restored, waiting for its coordinator"

    def describe_load(self, reply: node_pb2.StatusReply, busiest: int, *, shards: bool = False) -> None:
        """Report the variables with the most bytes read and updated."""
        most = min(busiest, MAX_BUSIEST)
        traffic = [(held, nbytes, held.metrics) for held, nbytes in self.store.traffic() if not held.spec.evaluation]
        largest = heapq.nlargest(most, traffic, key=lambda item: item[2].pulled_bytes + item[2].pushed_bytes)
        room = MAX_SHARDS
        for held, nbytes, metrics in largest:
            load = reply.busiest.add(name=held.spec.name, bytes=nbytes)
            load.reads, load.read_bytes = metrics.pulls, metrics.pulled_bytes
            load.updates, load.update_bytes = metrics.pushes, metrics.pushed_bytes
            load.rows = metrics.rows_read + metrics.rows_updated
            if held.spec.HasField("table"):
                _describe_table(load.table, held)
            if shards and (room := room - len(held.shards)) >= 0:
                load.shape.extend(held.spec.shape)
                load.row_order = BY_ID if held.spec.HasField("table") else held.spec.row_order.kind
                for index, shard in held.shards.items():
                    load.shards.add(shard=index, bytes=shard.array.nbytes, traffic=shard.traffic.recent())

    def recorded(self) -> Iterator[node_pb2.Recorded]:
        return self.metrics.recording.messages()


def _describe_table(load: node_pb2.TableLoad, held: HeldVariable) -> None:
    shards, metrics = list(held.shards.values()), held.metrics
    load.rows = sum(len(shard.array) for shard in shards)
    load.capacity = sum(shard.row_limit for shard in shards) if held.spec.table.capacity else 0
    load.rows_read, load.rows_found = metrics.rows_read, metrics.rows_found
    load.rows_made, load.rows_evicted = metrics.rows_made, metrics.rows_evicted
    load.rows_not_admitted = metrics.rows_not_admitted
