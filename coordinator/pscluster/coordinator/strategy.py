"""ParameterServerStrategy: connects to the cluster, and makes variables on its parameter servers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import inspect
import itertools
import json
import logging
import operator
import os
import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from pscluster.coordinator.checkpoints import CheckpointManager, RestoredFrom
from pscluster.coordinator.cli.tables import rendered
from pscluster.coordinator.data.positions import NAME as POSITIONS
from pscluster.coordinator.data.positions import Positions
from pscluster.coordinator.job.live_job import LiveJob, continue_job, default_job_name
from pscluster.coordinator.job.losses import Losses
from pscluster.coordinator.job.progress import NAME as PROGRESS
from pscluster.coordinator.job.progress import TRAINING, JobProgress
from pscluster.coordinator.job.settings import process_options
from pscluster.coordinator.local.local_cluster import LocalCluster, LocalClusterError
from pscluster.coordinator.observability.events import Observed
from pscluster.coordinator.observability.job_metrics import CoordinatorCounts
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.scheduling import loop
from pscluster.coordinator.scheduling.dispatcher import Dispatcher
from pscluster.coordinator.scheduling.partly_applied import PartlyApplied
from pscluster.coordinator.scheduling.server_link import ServerAttachment, out_of_reach
from pscluster.coordinator.variables.evaluation_snapshot import prefix_of
from pscluster.coordinator.variables.partitioners import partition_for
from pscluster.coordinator.variables.placement import Placer
from pscluster.core.cluster.spec import (
    ClusterResolver,
    ClusterSpec,
    is_loopback,
    is_on_this_machine,
    validate_for_strategy,
)
from pscluster.core.dtypes import as_array, converted, dtype_named, is_variable_dtype
from pscluster.core.errors import (
    CheckpointError,
    ConfigurationError,
    MisuseError,
    ProtocolError,
    PsClusterError,
    PSUnavailableError,
)
from pscluster.core.fault_points import arm, reach
from pscluster.core.functions.definitions import capture, split_off_bulk
from pscluster.core.functions.policy import SerializationPolicy, asked_for, policy_of
from pscluster.core.geometry import Partition
from pscluster.core.ids import fresh_id, make_identity
from pscluster.core.metrics.exposition import MetricsServer
from pscluster.core.role.node import Role
from pscluster.core.role.server import RoleOptions, RoleServer, listen_address, serve_metrics, with_user_token
from pscluster.core.sanitize import shown
from pscluster.core.security.tls import CERTIFICATE, KEY, Tls
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.core.transport.unix_sockets import SocketTakenError
from pscluster.core.values.handles import Handle
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.registry import handle_of
from pscluster.ps.handles.scope import Partitioner, VariableRequest, colocated_with, colocation, creating_with
from pscluster.ps.handles.variable import Array, Shard, Variable, VariableList, whole_index
from pscluster.ps.initializers import Initializer
from pscluster.ps.spec import OURS, partition_of
from pscluster.v1 import definition_pb2, node_pb2, ps_pb2
from pscluster.worker.strategy import Strategy

if TYPE_CHECKING:
    from pscluster.coordinator.checkpoints import CheckpointManager
    from pscluster.coordinator.dashboard import Dashboard
    from pscluster.coordinator.scheduling.cluster_coordinator import ClusterCoordinator

logger = logging.getLogger(__name__)

PS_TIMEOUT = 600.0
"""Seconds for which a parameter server that is gone is waited for."""

HOPELESS = 10.0
"""The same, of a job that is asked to end."""

_TAKEN = {
    "variable": "names are unique in a strategy, those of variables and optimizers together; give another one or "
    "none, or use the one that exists (strategy.variables); strategy.delete_variable(variable) deletes one",
    "metric": "names are unique in a strategy; give another one or none",
}

# Held here until they are closed: a strategy that nobody refers to any more has a job all the same.
_open: set[ParameterServerStrategy] = set()


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, functions on workers.

    Making one connects to the cluster: it waits until all parameter servers and workers answer, whatever the
    order they are started in, and takes the servers for its job.

    Args:
        cluster_resolver: a `TFConfigClusterResolver`, another resolver, or a running `LocalCluster`.
        variable_partitioner: how variables are cut, a callable `(shape, dtype) -> shards per axis`; None: not at all.
        placement: which server gets a shard: "bytes" (the one that holds least), "round_robin", or a callable.
        seed: from which per-worker datasets derive theirs.
        token: the cluster token; default: from the environment, as certificates are (PSCLUSTER_TLS).
        connect_timeout: seconds to wait for the cluster's tasks.
        ps_timeout: seconds for which a parameter server that is gone is waited for, by functions and by all calls
            here. One that comes back with what it held is gone on with.
        job_name: names the job to the servers. Default: the path of the script.
        resume: go on with what the servers hold of a job of this name whose coordinator has died: variables and
            optimizers that are made here under the name of one that lives take it as it is. False: begin anew.
        take_over: take the tasks from another coordinator that has them now; what it still sends is refused.
        allow_pickle: whether functions and objects may be sent as pickles; see docs/security.md. None: as the
            LocalCluster, the command line or PSCLUSTER_ALLOW_PICKLE says, else where a token protects the roles.

    Raises:
        ConfigurationError: the cluster's description is wrong.
        UnavailableError: tasks were missing when the time was over; the message names them.
        BusyError: another coordinator works with this cluster; the message names it.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | LocalCluster,
        variable_partitioner: Partitioner | None = None,
        *,
        placement: str | Callable[..., int] = "bytes",
        seed: int = 0,
        token: str | None = None,
        connect_timeout: float | None = None,
        ps_timeout: float = PS_TIMEOUT,
        job_name: str | None = None,
        resume: bool = True,
        take_over: bool = False,
        allow_pickle: bool | None = None,
    ) -> None:
        if not ps_timeout > 0:
            raise ConfigurationError(f"ps_timeout is {ps_timeout}; give more than 0 seconds")
        if isinstance(cluster_resolver, LocalCluster):
            cluster_resolver.check_not_stopped()
        spec = cluster_resolver.cluster_spec()
        validate_for_strategy(spec, cluster_resolver.task_type, cluster_resolver.task_id)
        options = process_options()
        arm("chief")
        mine = cluster_resolver if isinstance(cluster_resolver, LocalCluster) else options
        tls = mine.tls
        if token is None:
            token = mine.token
        if token is None and mine is options:
            jobs = [job for job in ("ps", "worker", "chief") if job in spec.jobs]
            addresses = [spec.task_address(job, i) for job in jobs for i in spec.task_indices(job)]
            token = with_user_token(options, addresses).token
        self.serialization = _policy_of(
            cluster_resolver, spec, token is not None or (tls is not None and tls.is_mutual), allow_pickle, options
        )
        timeout = options.connect_timeout if connect_timeout is None else connect_timeout
        self.cluster_resolver = cluster_resolver
        self._spec = spec
        self._partitioner = variable_partitioner
        self._placer = Placer(spec.num_tasks("ps"), placement)
        self._variables: dict[str, Variable] = {}
        self._reserved: set[tuple[str, str]] = set()
        self._optimizers = 0
        self._lock = threading.Lock()
        self._last_id = 0
        self._closed = False
        self._dispatcher: Dispatcher | None = None
        self._workers_gone: LocalClusterError | None = None
        self._coordinator: ClusterCoordinator | None = None
        self.positions: Positions | None = None
        """Of distributed datasets, once there is a ClusterCoordinator."""
        self.counts = CoordinatorCounts()
        self.telemetry = CoordinatorTelemetry(self)
        """Figures of this coordinator, for whoever looks on."""
        self._metrics: MetricsServer | None = None
        self._server: RoleServer | None = None
        self._servers: list[ServerAttachment] = []
        self._pages: list[Dashboard] = []
        self.managers: weakref.WeakSet[CheckpointManager] = weakref.WeakSet()
        """That are open: at the end of the job, what they are writing is waited for."""

        self.observed = Observed()
        """What has happened, for who looks on."""
        self.partly_applied = PartlyApplied()
        """Functions that have ended and left a part of their updates."""
        self._losses = Losses(self._count_losses, self.observed)
        self._lost: PSUnavailableError | None = None  # a parameter server, for good
        self._half_restored = ""  # why some servers have a checkpoint's values, and others perhaps not
        self.job = fresh_id()
        self._live = LiveJob()
        self._progress = JobProgress(self)
        self.identity = make_identity("chief", 0)
        ps, self._workers = (
            [_peer(cluster_resolver, spec, job, index, tls, token) for index in spec.task_indices(job)]
            for job in ("ps", "worker")
        )
        for peer in (*ps, *self._workers):
            peer.check_plain(insecure=options.insecure)
        if [peer.index for peer in ps] != list(range(len(ps))):
            raise ConfigurationError("the cluster's parameter servers must be numbered from 0 without gaps")
        client = PsClient(ps, self.identity, job=self.job, incarnation=fresh_id(), retry_seconds=ps_timeout)
        client.on_lost = self._server_is_lost
        super().__init__(client)
        self._attach_request = node_pb2.AttachRequest(
            coordinator=self.identity,
            job=self.job,
            num_workers=len(self._workers),
            seed=seed,
            ps_timeout=ps_timeout,
            job_name=default_job_name() if job_name is None else job_name,
            lineage=fresh_id(),
            epoch=1,
            take_over=take_over,
            ps_addresses=[peer.address for peer in ps],
            workers=[peer.index for peer in self._workers],
        )
        self.token = token
        self.tasks = [*ps, *self._workers]
        """The parameter servers and workers."""
        try:
            options = options.with_credentials(token, tls)
            if options.dashboard:
                self._show(options)
            self._metrics = serve_metrics(self.telemetry, options)
            self._server = self._serve(spec, options)
            tasks = [*ps, *self._workers]
            wait_for_peers(tasks, self.identity, timeout=timeout, purpose="coordinator", num_ps=len(ps))
            self._client.connect(timeout)
            must_hold = [0] * len(ps)
            if resume:
                must_hold = continue_job(self._attach_request, self._client.introductions())
            loop.run(self._attach(ps, must_hold))
            if self._attach_request.epoch > 1:
                self._live = self._find_live()
                self.partly_applied.add("functions", "had begun under a coordinator that died: which is not known")
        except BaseException:
            self.close("the coordinator could not connect")
            raise
        if self._server is not None:
            self._server.ready()
        if self._metrics is not None:
            self._metrics.tell()
        _open.add(self)
        if isinstance(cluster_resolver, LocalCluster):
            cluster_resolver.serve(self)
        # What was registered last runs first: the job is ended before the LocalCluster, made before it, is stopped.
        atexit.unregister(close_all)
        atexit.register(close_all, "the coordinator's script has ended")

    def _show(self, options: RoleOptions) -> None:
        """The live page; where it can't listen, the job goes on without."""
        from pscluster.coordinator.dashboard import Dashboard  # it needs this module, and a moment to load

        address, tls = options.dashboard_address, options.tls
        certificate = key = None
        if address is not None and tls is not None and not is_loopback(address.rpartition(":")[0]):
            certificate, key = tls.folder / CERTIFICATE, tls.folder / KEY
        try:
            page = Dashboard(self, address, certificate=certificate, key=key, insecure=options.insecure)
        except ConfigurationError:
            raise
        except PsClusterError as error:
            logger.error("%s; the job goes on without the page", error)
        else:
            logger.info("the live page is at %s", page.url)

    def _serve(self, spec: ClusterSpec, options: RoleOptions) -> RoleServer | None:
        """Answer health checks and status questions, where the cluster gives the coordinator an address."""
        if "chief" not in spec.jobs or self.cluster_resolver.task_type != "chief":
            return None
        address = listen_address(spec.task_address("chief", 0), options)
        if isinstance(self.cluster_resolver, LocalCluster):
            options = replace(options, share_port="--share-port" in self.cluster_resolver.hand_over_port("chief", 0))
        try:
            server = RoleServer(self.identity, _CoordinatorRole(self), {}, address, options)
        except SocketTakenError:
            if not options.share_port:
                raise
            logger.info("another coordinator answers at %s: nobody can ask this one there", address)
            return None
        server.node.metrics_address = self.metrics_address
        return server

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of `/metrics`; "": it is not served."""
        return self._metrics.address if self._metrics is not None else ""

    async def _attach(self, peers: Sequence[PeerAddress], must_hold: Sequence[int]) -> None:
        servers = [
            ServerAttachment(peer, self._attach_request, self._declare_again, holding, self.observed)
            for peer, holding in zip(peers, must_hold, strict=True)
        ]
        try:
            await servers[0].take()  # of two coordinators that begin at once, server 0 picks one
            reach("coordinator.attach.first")
            await asyncio.gather(*(server.take() for server in servers[1:]))
        except BaseException:
            # The job has not begun: nobody is to be told that it is over, least of all another job's roles.
            await asyncio.gather(*(server.close() for server in servers), return_exceptions=True)
            raise
        for server in servers:
            server.on_return = self._is_back
            server.begin()
        self._servers = servers
        reach("coordinator.attach.after")
        terms = [server.term for server in servers]
        if len(set(terms)) > 1:
            self._half_restored = "the coordinator that died has restored a checkpoint on some parameter servers only"
            logger.error("%s: restore it again", self._half_restored)
        self._begin_term(max(terms))
        holdings = [server.holding for server in servers]
        self._client.expect(holdings)
        self._attach_request.holdings.extend(holdings)

    def _server_is_lost(self, error: PSUnavailableError) -> None:
        """The coordinator's client has found out that one is, before its link has: it is so for everybody."""
        self._lost = error
        if self._dispatcher is not None:
            self._dispatcher.server_is_lost(error)

    def _is_back(self, server: ServerAttachment) -> None:
        """On the loop's thread: a server that was restored."""

        async def tell_seen() -> None:
            if self._dispatcher is not None:
                await self._dispatcher.tell_seen([server.peer.index])

        self._losses.begin(tell_seen)

    def wait_for_losses(self, left: float | None) -> None:
        """Until it is known, and said, what servers that came back have lost; `left` seconds at most, and not long."""
        self._losses.wait(left, lambda: bool(self.out_of_reach()))

    async def _declare_again(self, server: int, optimizers: Sequence[int]) -> None:
        """For a server that came back: the rules that it keeps nowhere."""
        await asyncio.wrap_future(self._client.declare_again(server, list(optimizers)))

    def _find_live(self) -> LiveJob:
        """What the job has; what a coordinator that died has left half made is removed."""
        live, remains = LiveJob.of(self._client.directory())
        evaluations = {prefix for spec in remains if (prefix := prefix_of(spec.name))}
        for prefix in evaluations:
            self._client.delete_variables(prefix, patient=True)
        for spec in remains:
            if not prefix_of(spec.name):
                self._client.delete_variable(spec.name, spec.id, patient=True)
        self._last_id = live.last_id
        names = [name for name in live.variables if not name.startswith(OURS)]
        logger.info("going on with a job of %d variables: %s", len(names), ", ".join(names) or "none")
        return live

    def lives(self, variable: str) -> bool:
        """Is there a variable of this name, made here or still to be attached to?"""
        return variable in self._variables or variable in self._live.variables

    @property
    def resumed(self) -> bool:
        """Does this go on with a job whose coordinator has died?"""
        return self._attach_request.epoch > 1

    @property
    def progress(self) -> dict[str, Any]:
        """What `save_progress` has kept last, also by a coordinator before this one, or in a checkpoint; else {}."""
        return self._progress.load()

    def save_progress(self, **values: Any) -> None:
        """Keep how far the job is (epoch, step, position in the data, random state) beside the variables.

        It takes the place of what was kept before, is as durable as they are, and goes into checkpoints.

        Args:
            values: what JSON can hold; NumPy's numbers and arrays, too, which come back as Python's and lists.

        Raises:
            MisuseError: it is more than 64 KiB, or no JSON.
        """
        self._progress.save(values)

    def start_dispatcher(self, *, max_queued: int, max_attempts: int, worker_lease: float) -> Dispatcher:
        """For the ClusterCoordinator: begin to hand out functions."""
        if self._closed:
            raise MisuseError("this strategy is closed: make another ParameterServerStrategy")
        dispatcher = Dispatcher(
            loop.event_loop(),
            self._workers,
            self._servers,
            self._attach_request,
            max_queued=max_queued,
            max_attempts=max_attempts,
            worker_lease=worker_lease,
            counts=self.counts,
            observed=self.observed,
            partly_applied=self.partly_applied,
        )
        with self._lock:
            self._dispatcher = dispatcher
            dispatcher.workers_gone(self._workers_gone)
        loop.run(dispatcher.start())
        if self._lost is not None:
            dispatcher.server_is_lost(self._lost)
        return dispatcher

    def workers_gone(self, error: LocalClusterError | None) -> None:
        """For the LocalCluster: no worker is left, nor will one come by itself; None: one comes."""
        with self._lock:
            self._workers_gone = error
            if self._dispatcher is not None:
                self._dispatcher.workers_gone(error)

    def close(self, reason: str = "its strategy was closed") -> None:
        """End the job: tell all roles, close all connections. Variables are gone then. Idempotent.

        A checkpoint that is being written is waited for, unless a server is gone. Functions that have not ended are
        cancelled; how many, and the error of one that nobody was told of, is logged.
        """
        for manager in list(self.managers):
            manager.end()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._dispatcher is not None:
            self._dispatcher.tell_of_forgotten()
        self.observed.tell("coordinator", "note", f"the job is over: {reason}")
        for page in self._pages:
            page.close()
        if self.positions is not None:
            self.positions.close()
        dispatcher = self._dispatcher
        if dispatcher is None and self._servers:
            dispatcher = Dispatcher(
                loop.event_loop(),
                self._workers,
                self._servers,
                self._attach_request,
                max_queued=1,
                max_attempts=1,
            )
        try:
            if dispatcher is not None:
                loop.run(dispatcher.close(reason))
            for server in self._servers:
                loop.run(server.close())
        finally:  # Ctrl-C included
            _open.discard(self)
            self._losses.close()
            self._client.close(reason)
            if self._server is not None:
                self._server.stop(0)
            if self._metrics is not None:
                self._metrics.close()

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        """Have all tasks answered, and is the job not over?"""
        return self in _open

    @property
    def job_name(self) -> str:
        """By which the servers know the job."""
        return self._attach_request.job_name

    def out_of_reach(self) -> dict[PeerAddress, float]:
        """The parameter servers that are, and for how many seconds."""
        return out_of_reach(self._servers)

    def hopeless(self) -> str:
        """Why it makes no sense to wait for an end in order: the whole cluster is ending, as a rule. Empty: it does."""
        late = [f"{server} is out of reach for {s:.0f} s" for server, s in self.out_of_reach().items() if s > HOPELESS]
        return ", ".join(late)

    def _begin_term(self, term: int) -> None:
        """What is updated from now on is of this term, or a later one."""
        self._client.term = self._attach_request.term = term
        if self._dispatcher is not None:
            self._dispatcher.term = term

    @contextlib.contextmanager
    def restoring(self, what: str) -> Iterator[int]:
        """Within the block the parameter servers take other values, all of them, under the term that this gives.

        No function runs meanwhile. What the script updates at the same time is of the term before, so that servers
        which have the new values refuse it; on the others it is overwritten. Where the block raises, nothing is saved
        until another one has ended: see `check_restored`.
        """
        term = self._attach_request.term + 1
        self._half_restored = f"{what} was broken off: some parameter servers may have its values, and others not"
        try:
            yield term
        finally:
            self._begin_term(term)
        for server in self._servers:
            server.term = term
        self._half_restored = ""

    def check_restored(self) -> None:
        """CheckpointError if some servers have the values of a restored checkpoint, and others not, or not any more."""
        term, why = self._attach_request.term, self._half_restored
        if not why and (behind := [str(server.peer) for server in self._servers if server.term < term]):
            why = f"{', '.join(behind)} came back with what was there before the last restore"
        if why:
            raise CheckpointError(
                f"nothing is saved, since {why}: restore again, or go on with what there is by "
                "Checkpoint(strategy).give_up_restore()"
            )

    def show_until_closed(self, page: Dashboard) -> None:
        """A live page shows this job; it is closed when this is. MisuseError if the job is over."""
        with self._lock:
            if self._closed:
                raise MisuseError("the job is over: there is nothing to show on a live page")
            self._pages.append(page)

    @property
    def dispatcher(self) -> Dispatcher | None:
        """What hands out functions, once there is a ClusterCoordinator."""
        return self._dispatcher

    def prepare_progress(self, saved: Container[str]) -> None:
        """A checkpoint is to be restored: have a place for its progress, its datasets' positions, and that of `fit`."""
        for name in (PROGRESS, POSITIONS, TRAINING):
            JobProgress(self, name).prepare(saved)

    def restore_or_initialize(self, directory: str) -> RestoredFrom:
        """See `CheckpointManager.restore_or_initialize`."""
        with CheckpointManager(directory, strategy=self) as manager:
            return manager.restore_or_initialize()

    @property
    def client(self) -> PsClient:
        """The coordinator's own client of the parameter servers."""
        return self._client

    # Variables

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Within the block `Variable(...)` and optimizers are made on this strategy's servers."""
        with creating_with(self):
            yield self

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Variable | Shard) -> Iterator[None]:
        """Within the block new variables are put, whole, on the server of this shard or of the variable's first."""
        if not isinstance(variable, Variable | Shard):
            raise TypeError(f"colocate_vars_with takes a variable or a shard of one, not a {type(variable).__name__}")
        whole = variable.variable if isinstance(variable, Shard) else variable
        if whole.client is not self._client:
            raise MisuseError(f"variable {whole.name!r} is of another strategy: nothing can be put beside it here")
        with self.scope(), colocated_with(variable.owners[0]):
            yield

    @property
    def extended(self) -> ParameterServerStrategy:
        """The peer's place for `colocate_vars_with`."""
        return self

    @property
    def variables(self) -> list[Variable]:
        """All variables, in the order in which they were made."""
        return VariableList(each for each in self._variables.values() if not each.name.startswith(OURS))

    @property
    def all_variables(self) -> list[Variable]:
        """Those that keep something of the library's own among them."""
        return VariableList(self._variables.values())

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """The handle that a function returned. ProtocolError if there is none of that kind here."""
        if kind == self.handle_kind:
            return self
        if kind == Variable.handle_kind and key in self._variables:
            return self._variables[key]
        handle = handle_of(kind, key, lambda: self._client, self.resolve_handle)
        if handle is None:
            raise ProtocolError(f"there is no {kind} {key!r} here")
        return handle

    def numbers(self, count: int) -> Sequence[int]:
        """So many numbers that nothing on the servers has."""
        with self._lock:
            self._last_id += count
            return range(self._last_id - count + 1, self._last_id + 1)

    def create_variable(self, request: VariableRequest, *, ours: bool = False) -> Variable:
        """For `Variable(...)`: cut it, place it, put its initial value on the servers.

        Args:
            request: what to make.
            ours: it keeps something of the library's own, and is named so.
        """
        with self.reserving("variable", request.name, ours=ours) as name:
            initial = _initial(request, name, self.serialization)
            shape, dtype = initial.shape, initial.dtype
            if (spec := self._live.take_variable(name, shape, dtype)) is not None:
                with self._lock:
                    self._placer.adopt(partition_of(spec), dtype, list(spec.owners))
                variable = self._variables[name] = Variable.of(spec, self._client)
                return variable
            beside = colocation()
            partitioner = None if beside is not None else request.partitioner or self._partitioner
            partition = partition_for(partitioner, shape, dtype, name)
            with self._lock:
                if beside is None:
                    owners = list(self._placer.place(name, partition, dtype))
                else:
                    owners = [beside]
                    self._placer.adopt(partition, dtype, owners)
                self._last_id += 1
                number = self._last_id
            try:
                spec = ps_pb2.VariableSpec(
                    id=number,
                    name=name,
                    dtype=dtype.name,
                    shape=shape,
                    splits=[ps_pb2.AxisSplit(ends=ends) for ends in partition.ends],
                    owners=owners,
                    trainable=request.trainable,
                )
                reach("coordinator.create.before")
                self._client.create_variable(spec, initial.shards(partition), initial.initializers)
                reach("coordinator.create.after")
            except BaseException:
                with self._lock:
                    self._placer.release(partition, dtype, owners)
                raise
        variable = self._variables[name] = Variable.of(spec, self._client)
        return variable

    def create_optimizer(
        self,
        spec: ps_pb2.OptimizerSpec,
        forms: Sequence[definition_pb2.Definition],
    ) -> tuple[ps_pb2.OptimizerSpec, PsClient]:
        """For an optimizer's constructor: give it a number, and declare it to the servers."""
        if (live := self._live.take_optimizer(spec)) is not None:
            spec = live
        else:
            with self._lock:
                self._last_id += 1
                spec.id = self._last_id
        self._client.create_optimizer(spec, forms)
        return spec, self._client

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable from its servers, with its slots. Its name is free again, and handles of it are stale."""
        self._variables.pop(variable.name, None)
        self._client.delete_variable(variable.name, variable.number)
        with self._lock:
            self._placer.release(variable.partition, variable.dtype, list(variable.owners))
            self._reserved.discard(("variable", variable.name))

    @contextlib.contextmanager
    def reserving(self, what: str, name: str | None, kind: str | None = None, *, ours: bool = False) -> Iterator[str]:
        """For constructors: the name given, or one made up of the kind; free again if the block raises."""
        taken = self._reserve(what, name, kind or what, ours)
        try:
            yield taken
        except BaseException:
            self._reserved.discard((what, taken))
            raise

    def _reserve(self, what: str, name: str | None, kind: str, ours: bool) -> str:
        with self._lock:
            if name is None:
                free = (f"{kind}_{number}" if number else kind for number in itertools.count())
                name = next(candidate for candidate in free if (what, candidate) not in self._reserved)
            elif not isinstance(name, str) or not 0 < len(name) <= 1000 or _has_surrogates(name):
                raise MisuseError(f"a {kind}'s name must be a string of 1 to 1000 characters, not {name!r:.80}")
            elif name.startswith(OURS) and not ours:
                raise MisuseError(
                    f"a {kind} can't be named {name!r}: names that begin with {OURS!r} are pscluster's own"
                )
            elif (what, name) in self._reserved:
                raise MisuseError(f"there is {self._taken_by(what, name)} {name!r} already: {_TAKEN[what]}")
            self._reserved.add((what, name))
        return name

    def _taken_by(self, what: str, name: str) -> str:
        """Variables and optimizers share their names."""
        return f"a {what}" if what != "variable" or name in self._variables else "an optimizer"

    def lost_updates(self) -> dict[str, int]:
        """Updates that were acknowledged and lost when parameter servers died, by variable; {} if none is known of.

        It is found out, and said in the log, as soon as such a server is back: `join` waits for that.

        A lower bound: what clients that are still there were told of, beyond what the servers had saved. Of several
        shards the one counts that has lost most. Records of a log that can't be read count under `(unknown)`.

        Raises:
            UnavailableError: a server does not answer.
        """
        if self._dispatcher is not None and not self._closed:
            away = self.out_of_reach()
            there = [server.peer.index for server in self._servers if server.peer not in away]
            loop.run(self._dispatcher.tell_seen(there))
        return self._count_losses()

    def _count_losses(self) -> dict[str, int]:
        self._client.tell_seen()
        found: dict[str, int] = {}
        for reply in self._client.statuses():
            for name, lost in reply.lost_updates.items():
                found[name] = max(lost, found.get(name, 0))
        return found

    def placement(self) -> str:
        """A table of which shard lives where, and a picture of how full each server is (slots not counted)."""
        table = Table("shard", "shape", "type", "place", "bytes", title="placement")
        per_server: dict[str, int] = {}
        for variable in self.variables:
            for shard in variable.variables:
                per_server[shard.device] = per_server.get(shard.device, 0) + shard.nbytes
                shape = "x".join(map(str, shard.shape)) or "scalar"
                table.add_row(Text(shown(shard.name)), shape, shard.dtype.name, shard.device, f"{shard.nbytes:,}")
        fullest = max(per_server.values(), default=0) or 1
        picture = []
        for index in range(self._client.num_servers):
            size = per_server.get(f"/job:ps/task:{index}", 0)
            picture.append(f"ps {index} |{'#' * round(40 * size / fullest):40}| {size:,} bytes")
        return "\n".join([rendered(table), *picture])

    def __repr__(self) -> str:
        life = ", closed" if self._closed else ""
        return f"<ParameterServerStrategy {self._client.num_servers} ps, {len(self._workers)} workers{life}>"


def open_strategies() -> list[ParameterServerStrategy]:
    """Those of this process that are not closed."""
    return list(_open)


class _CoordinatorRole(Role):
    """What the coordinator answers when asked how it does."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self._strategy = weakref.ref(strategy)

    def describe(self, reply: node_pb2.StatusReply) -> None:
        strategy = self._strategy()
        connected = strategy is not None and strategy in _open
        reply.state = "coordinating" if connected else "waiting for tasks"
        if strategy is not None and strategy._dispatcher is not None:
            reply.detail = strategy._dispatcher.describe()
            seen = strategy._dispatcher.look()
            reply.functions_waiting, reply.functions_running, reply.functions_done = (
                seen.waiting,
                seen.in_flight,
                seen.done,
            )


@dataclass(frozen=True, slots=True)
class _Initial:
    """What a variable is to be born with: its value, or what makes it on the servers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    value: Array | None = None
    initializers: tuple[tuple[ps_pb2.Initializer, bytes], ...] = ()

    def shards(self, partition: Partition) -> list[Array] | None:
        if self.value is None:
            return None
        return [np.ascontiguousarray(self.value[whole_index(block)]) for block in partition.blocks]


def _initial(request: VariableRequest, name: str, policy: SerializationPolicy) -> _Initial:
    initial = request.initial_value
    if initial is None:
        raise MisuseError(f"variable {name!r} needs an initial_value: an array, a number, an initializer or a function")
    if not isinstance(request.trainable, bool):
        raise MisuseError(f"variable {name!r}: trainable is {request.trainable!r}; it must be True or False")
    shape = None if request.shape is None else _shape_of(request.shape, name)
    asked = None if request.dtype is None else _dtype_named(request.dtype, name)
    if callable(initial) and not isinstance(initial, np.ndarray | np.generic):
        if shape is not None:
            dtype = asked or np.dtype(np.float32)
            _check_dtype(dtype, name)
            return _Initial(shape, dtype, None, tuple(_initializers(initial, policy)))
        if isinstance(initial, Initializer) or not _can_be_called_without(initial):
            raise MisuseError(f"variable {name!r}: what makes its initial value needs the shape: give shape=(...)")
        initial = initial()
    value = as_array(cast(npt.ArrayLike, initial), name, "initial value")
    dtype = asked or _dtype_of(value, initial)
    _check_dtype(dtype, name)
    value = converted(value, dtype, name, "initial value")
    try:
        whole = np.broadcast_to(value, value.shape if shape is None else shape)
    except ValueError:
        raise MisuseError(f"variable {name!r}: an initial value of shape {value.shape} for the shape {shape}") from None
    return _Initial(whole.shape, dtype, whole)


def _peer(
    resolver: ClusterResolver | LocalCluster,
    spec: ClusterSpec,
    job: str,
    index: int,
    tls: Tls | None,
    token: str | None,
) -> PeerAddress:
    why_gone = functools.partial(resolver.why_gone, job, index) if isinstance(resolver, LocalCluster) else str
    return PeerAddress(job, index, spec.task_address(job, index), tls, token, why_gone)


def _policy_of(
    resolver: ClusterResolver | LocalCluster,
    spec: ClusterSpec,
    knows_peers: bool,
    asked: bool | None,
    options: RoleOptions,
) -> SerializationPolicy:
    """Whether what is sent may be pickled."""
    if asked is None and isinstance(resolver, LocalCluster):
        asked = resolver.allow_pickle
    exposed = ""
    if not knows_peers:
        addresses = [spec.task_address(job, index) for job in ("ps", "worker") for index in spec.task_indices(job)]
        if not options.insecure:
            exposed = f"the role at {addresses[0]} would take one from anybody, without a token"
        elif far := [address for address in addresses if not is_on_this_machine(address)]:
            exposed = f"the role at {far[0]} would take one from anybody, without a token"
    return policy_of(asked_for(options.allow_pickle if asked is None else asked), exposed)


def _has_surrogates(text: str) -> bool:
    """Halves of characters, which no message can carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _shape_of(given: Any, name: str) -> tuple[int, ...]:
    try:
        shape = tuple(map(operator.index, given if isinstance(given, Iterable) else (given,)))
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise MisuseError(f"variable {name!r}: shape is {given!r}, but must be lengths of axes: integers, 0 or more")
    return shape


def _can_be_called_without(function: Callable[..., Any]) -> bool:
    """Without arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        return True
    try:
        signature.bind()
    except TypeError:
        return False
    return True


def _initializers(
    initial: Callable[..., Any], policy: SerializationPolicy
) -> Iterator[tuple[ps_pb2.Initializer, bytes]]:
    if isinstance(initial, Initializer):
        kind, numbers = initial.to_spec()
        yield ps_pb2.Initializer(name=kind, numbers=json.dumps(numbers)), b""
        return
    for form in capture(initial, policy=policy).forms():
        message = ps_pb2.Initializer(function=form)
        bulk = split_off_bulk(message.function)
        yield message, bulk


def _dtype_named(asked: npt.DTypeLike, name: str) -> np.dtype[Any]:
    if isinstance(asked, str) and asked == "bfloat16":
        return dtype_named(asked)
    try:
        return np.dtype(asked)
    except TypeError:
        raise MisuseError(f"variable {name!r}: dtype is {asked!r}, which is none: give one such as float32") from None


def _dtype_of(value: Array, initial: object) -> np.dtype[Any]:
    if value.dtype == np.float64 and not hasattr(initial, "dtype"):
        return np.dtype(np.float32)  # Python's floats, as the peer
    return value.dtype


def _check_dtype(dtype: np.dtype[Any], name: str) -> None:
    if not is_variable_dtype(dtype):
        raise MisuseError(f"variable {name!r} can't have elements of type {dtype}: give a number type such as float32")


def close_all(reason: str) -> None:
    """End the jobs of all strategies that are open."""
    for strategy in list(_open):
        strategy.close(reason)


os.register_at_fork(after_in_child=_open.clear)  # the jobs are the parent's to end, and it has the loop's thread
