"""ParameterServerStrategy: connects to the cluster, and makes variables on its parameter servers.

A facade of `job/` (the job's context, how it begins and ends) and `variables/`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self

from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.job import progress, servers
from pscluster.coordinator.job.attach import attach, describe_job
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.moves.applying import Applied, apply_plan
from pscluster.coordinator.moves.mover import Moved, ShardMover
from pscluster.coordinator.moves.plan import Plan
from pscluster.coordinator.moves.servers import add_server, remove_server
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.variables.placement import placement_html, placement_table
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.scope import Partitioner, colocated_with, creating_with, current_creator, has_creator
from pscluster.ps.handles.variables.variable import Shard, Variable
from pscluster.v1 import worker_pb2
from pscluster.worker.strategy import ReduceOp, Strategy

logger = logging.getLogger(__name__)

PS_TIMEOUT = 600.0
"""Seconds to wait for a parameter server that is unreachable."""


@functools.cache
def _warn_outside(method: str, what: str) -> None:
    logger.warning(
        "strategy.%s() outside a scheduled function %s: call it in a function that is given to "
        "ClusterCoordinator.schedule()",
        method,
        what,
    )


class ParameterServerStrategy(Strategy):
    """Variables on parameter servers, functions on workers.

    Making one connects to the cluster: it waits until all parameter servers and workers that its description names
    answer, in whatever order they start, and takes the servers for its job. Other workers may join while it runs.

    Args:
        cluster_resolver: a `TFConfigClusterResolver`, another resolver, or a `LocalCluster`, which is started if it is
            not running.
        variable_partitioner: a callable `(shape, dtype) -> shards per axis` that cuts variables; None: not cut.
        placement: which server gets a shard: "bytes" (the one that holds least), "round_robin", or a callable.
        seed: from which per-worker datasets derive theirs.
        token: the cluster token; default: from the environment, like certificates (PSCLUSTER_TLS).
        connect_timeout: seconds to wait for the cluster's tasks.
        ps_timeout: seconds for which functions, and all calls here, wait for an unreachable parameter server. The job
            goes on if it comes back with its state.
        job_name: names the job to the servers. Default: the path of the script.
        resume: continue a job of this name on the servers whose coordinator has died: variables and optimizers made
            here under a name that lives there take it as it is. False: start over.
        take_over: take the tasks from another coordinator that has them now; what it still sends is refused.
        allow_pickle: whether functions and objects may be sent as pickles; see docs/security.md. None: as the
            LocalCluster, the command line or PSCLUSTER_ALLOW_PICKLE says, else only if a token protects the roles.

    Attributes:
        context: what the parts of the job share; for internal use.
        telemetry: the job's metrics: `telemetry.snapshot()`.

    Raises:
        ConfigurationError: the cluster's description is wrong.
        UnavailableError: tasks did not answer in time; the message names them.
        BusyError: another coordinator uses this cluster; the message names it.

    Examples:
        >>> with LocalCluster(num_ps=2) as two, ParameterServerStrategy(two, FixedShardsPartitioner(2)) as strategy:
        ...     with strategy.scope():
        ...         w = Variable(np.zeros((10, 3)), name="w")
        ...     sorted(shard.device for shard in w.variables)
        ['/job:ps/task:0', '/job:ps/task:1']
    """

    is_synchronous: ClassVar[bool] = False
    """Whether all workers run each step together."""

    devices_per_worker: int = 1
    """How many replicas each worker is, if they do."""

    min_replicas: int = 0
    """With how many replicas on workers of their own they go on when workers are lost."""
    step_options: worker_pb2.SynchronousSteps = worker_pb2.SynchronousSteps()
    """What a `SynchronousStrategy` says of all its steps."""

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
        self.cluster_resolver = cluster_resolver
        self.context = describe_job(
            cluster_resolver,
            variable_partitioner,
            placement=placement,
            seed=seed,
            token=token,
            ps_timeout=ps_timeout,
            job_name=job_name,
            take_over=take_over,
            allow_pickle=allow_pickle,
        )
        self._check_workers(len(self.context.workers))
        super().__init__(self.context.client)
        self.telemetry = CoordinatorTelemetry(self.context)
        attach(self.context, self.telemetry, connect_timeout, resume)

    def _check_workers(self, count: int) -> None:
        """Check the arguments against the number of workers, before anything is connected."""

    # The job

    @property
    def client(self) -> PsClient:
        """Return the coordinator's own client of the parameter servers."""
        return self._client

    @property
    def tasks(self) -> list[PeerAddress]:
        """Return the parameter servers and workers."""
        return self.context.tasks

    @property
    def token(self) -> str | None:
        return self.context.options.token

    @property
    def job(self) -> int:
        """Return the job's number, which each coordinator draws anew."""
        return self.context.request.job

    @property
    def job_name(self) -> str:
        """Return the name under which the servers know the job."""
        return self.context.request.job_name

    @property
    def metrics_address(self) -> str:
        """Return HOST:PORT of `/metrics`; "" if it is not served."""
        return self.context.metrics_address

    @property
    def connected(self) -> bool:
        """Return whether all tasks have answered and the job is not over."""
        return self.context.connected

    @property
    def resumed(self) -> bool:
        """Return whether this continues a job whose coordinator has died."""
        return self.context.resumed

    @property
    def progress(self) -> dict[str, Any]:
        """Return what `save_progress` last saved, perhaps by an earlier coordinator or in a checkpoint; else {}."""
        return progress.load(self._client, progress.PROGRESS)

    def save_progress(self, **values: Any) -> None:
        """Save the progress of the job (epoch, step, position in the data, random state) beside the variables.

        It replaces what was saved before, is as durable as the variables, and goes into checkpoints.

        Args:
            values: anything that JSON can hold; NumPy numbers and arrays come back as Python numbers and lists.

        Raises:
            MisuseError: it takes more than 64 KiB, or is not JSON.
        """
        progress.save(self._client, progress.PROGRESS, values)

    def restore_or_initialize(self, directory: str) -> RestoredFrom:
        """Do what `CheckpointManager.restore_or_initialize` does."""
        with CheckpointManager(directory, strategy=self) as manager:
            return manager.restore_or_initialize()

    def lost_updates(self) -> dict[str, int]:
        """Count, by variable, acknowledged updates that were lost when parameter servers died; {} if none is known.

        They are counted and logged as soon as such a server is back: `join` waits for that.

        A lower bound: updates that were acknowledged to clients that still exist, beyond what the servers had saved. Of
        several shards the one that lost most counts. Unreadable records of a log count under `(unknown)`,
        lost progress, positions of datasets and state of `fit` under `(metadata)`.

        Raises:
            UnavailableError: a server does not answer.
        """
        return self.context.lost_updates()

    def close(self, reason: str = "its strategy was closed") -> None:
        """End the job: tell all roles, close all connections. The variables are lost. Idempotent.

        Waits for a checkpoint that is being written, unless a server is unreachable. Functions that have not ended are
        cancelled; the log says how many, and gives an error that was never raised.
        """
        self.context.close(reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Variables

    @contextlib.contextmanager
    def scope(self) -> Iterator[Self]:
        """Make variables and optimizers within the block on this strategy's servers.

        Raises:
            MisuseError: it is within the scope of another strategy.
        """
        mine = self.context.variables
        if has_creator() and current_creator("another strategy") is not mine:
            raise MisuseError(
                "the scope of one strategy was entered inside that of another one, where it would be unclear whose "
                "variables are made: leave that `with` block first"
            )
        with creating_with(mine):
            yield self

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Variable | Shard) -> Iterator[None]:
        """Place new variables within the block, whole, on the server of this shard, or of the variable's first one."""
        if not isinstance(variable, Variable | Shard):
            raise TypeError(f"colocate_vars_with takes a variable or a shard of one, not {type_of(variable)}")
        whole = variable.variable if isinstance(variable, Shard) else variable
        if whole.client is not self._client:
            raise MisuseError(
                f"variable {whole.name!r} belongs to another strategy: variables can't be placed beside it here"
            )
        with self.scope(), colocated_with(variable.owners[0]):
            yield

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call `fn` here, in the script; the log warns of that, once. In a scheduled function, on its worker."""
        _warn_outside("run", "calls the function in the script, and on no worker")
        return super().run(fn, args, kwargs)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | None = None) -> Any:
        """Do what it does in a scheduled function, with this value alone; the log warns of that, once."""
        _warn_outside("reduce", "has only the value that it is given, and none of workers'")
        return super().reduce(reduce_op, value, axis)

    @property
    def extended(self) -> ParameterServerStrategy:
        """Return the strategy itself: TensorFlow has `colocate_vars_with` on `extended`."""
        return self

    @property
    def variables(self) -> list[Variable]:
        """Return all variables, in the order in which they were made."""
        return self.context.variables.all

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable and its slots from the servers. Its name is free again, and its handles are stale."""
        self.context.variables.delete_variable(variable)

    def move_shard(self, shard: Variable | Shard, server: int) -> Moved | None:
        """Move a shard to another parameter server, with its slots, counts and remembered updates, while training runs.

        Returns once it is there. Reads wait for milliseconds; updates of this shard while its last changes travel and
        are saved. docs/guarantees.md says what holds.

        Args:
            shard: one of `variable.variables`, or a variable that is not cut.
            server: the index of the parameter server that is to have it.

        Returns:
            What was moved, or None if it is there already.

        Raises:
            ConfigurationError: there is no such server.
            MisuseError: the variable is cut, or was deleted.
            PsClusterError: it could not be moved, and stays where it was; the message says why.
            PSUnavailableError: a parameter server is lost.
        """
        mover = ShardMover(self.context, hold=self.is_synchronous)
        return mover.move(self._own_shard(shard), checks.whole("server", server, at_least=0))

    def rebalance(self, by: Literal["bytes", "load"] = "bytes") -> list[Moved]:
        """Move shards, one after the other, until all parameter servers have about the same; see `move_shard`.

        Args:
            by: as in `plan`.

        Returns:
            What was moved: as little as balances the servers to within a few percent, if the shards are small enough.

        Raises:
            ValueError: `by` is neither.
            InvalidUpdateError: a table would take more than its `max_bytes` on a server, so that it was not cut.
            PsClusterError: a shard could not be moved. What was moved before stays where it is.
        """
        with self.context.moving:
            return list(self.apply(replace(self.plan(by), cuts=())).moves)

    def plan(self, by: Literal["bytes", "load"] = "load") -> Plan:
        """Return what would give all parameter servers about the same; changes nothing. `print` shows it.

        Args:
            by: "load": bytes of values read and updated lately, those of two minutes ago counted half, and so on; or
                "bytes" of values held, without slots: of an `EmbeddingTable`, of the rows that there are.

        Returns:
            For `apply`, the shards to move, and the variables to reshard, since moves do not help; and the load
            of each server before and after the moves.

        Raises:
            ValueError: `by` is neither.
        """
        if by not in ("bytes", "load"):
            raise ValueError(f"by is {by!r}; it must be 'bytes' or 'load'")
        return ShardMover(self.context).plan(by)

    def apply(self, plan: Plan) -> Applied:
        """Make the moves of a plan, and then its cuts, one after the other, while the job lives.

        Training goes on while a shard moves, and while the values and slots of a variable are copied into new shards;
        see `move_shard`. No function runs from then until the last changes are copied, too, nor while the rows of an
        `EmbeddingTable` are. Functions and handles go on with the new shards. docs/guarantees.md says what holds.

        Returns:
            What was moved and cut; and which variables were not cut, and why: a global array's, or one that the script
            has not made yet.

        Raises:
            MisuseError: the plan no longer fits: a variable was deleted or resharded, a shard is elsewhere by now,
                or a server was removed; the message names it. Nothing has changed.
            WaitTimeoutError: functions, or reads and updates of other threads of the script, did not end within a
                minute, so that a variable was not cut.
            PsClusterError: a shard could not be moved, or a variable not be resharded, and is as before. What was
                done before stays.
            PSUnavailableError: a parameter server is lost.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"apply takes a plan, as strategy.plan() returns it, not {type_of(plan)}")
        return apply_plan(self.context, plan, synchronous=self.is_synchronous)

    def add_server(self, address: str | None = None, *, timeout: float = 60.0) -> int:
        """Take another parameter server for the job, while training runs; return its index.

        Variables that are created from now on are placed on it, too; `rebalance()` moves shards there.

        Args:
            address: HOST:PORT of a server that is up and has no job, started as the next task. Default: a
                `LocalCluster` of this process starts one; otherwise it is the one that registers as the next task
                (`pscluster ps --join`), now or within `timeout` seconds.
            timeout: seconds for it to register, and to answer.

        Raises:
            ValueError: an argument is wrong.
            MisuseError: without an address, the cluster is not a `LocalCluster`, and has no address to register at.
            BusyError: the server has a job.
            UnavailableError: it does not register, or answer, within `timeout` seconds.
            WaitTimeoutError: a call of `run` does not end within a minute, in a `SynchronousStrategy`. In all these
                cases nothing has changed.
        """
        timeout = checks.real("timeout", timeout, kind="number of seconds", at_least=0)
        context, resolver = self.context, self.cluster_resolver
        index, cluster = self._client.num_servers, resolver if isinstance(resolver, LocalCluster) else None
        if address is not None:
            parse_address(address, "address")
            cluster = None
        elif cluster is None and context.role_server is None:
            raise MisuseError(
                "give the address of the server to add: this coordinator has no address at which one could register"
            )
        peer = servers.next_waiting(context, timeout) if address is None and cluster is None else None
        if cluster is not None:
            address = cluster.start_server(index)
        try:
            if peer is None:
                assert address is not None
                peer = PeerAddress("ps", index, address, context.options.tls, context.options.token)
                peer.check_plain(insecure=context.options.insecure)
            add_server(context, peer, timeout, hold=self.is_synchronous)
        except BaseException:
            if cluster is not None:
                cluster.stop_server(index)
            raise
        return peer.index

    @property
    def waiting_servers(self) -> list[int]:
        """The indices of servers that have registered and are not in the job: `add_server()` takes the next one."""
        return servers.waiting(self.context)

    def remove_server(self) -> list[Moved]:
        """Move all shards from the parameter server with the highest index to the others, and remove it from the job.

        Training goes on meanwhile. A `LocalCluster` of this process then stops it; others wait for another job.

        Returns:
            What was moved.

        Raises:
            MisuseError: it is the only server.
            UnavailableError: an evaluation beside the training uses it: try again when that has ended.
            PsClusterError: a shard could not be moved. The server is still in the job.
            WaitTimeoutError: a call of `run` does not end within a minute, in a `SynchronousStrategy`. The same.
        """
        moved = remove_server(self.context, hold=self.is_synchronous)
        last = self._client.num_servers
        if isinstance(self.cluster_resolver, LocalCluster) and self.cluster_resolver.has_server(last):
            self.cluster_resolver.stop_server(last)
        return moved

    def _own_shard(self, shard: Variable | Shard) -> Shard:
        """Return the shard that is meant. TypeError or MisuseError if it is none of this strategy's."""
        if not isinstance(shard, Variable | Shard):
            raise TypeError(f"a shard of a variable, or one that is not cut, can be moved, not {type_of(shard)}")
        if isinstance(shard, Variable):
            parts = shard.variables
            if len(parts) != 1 or not isinstance(parts[0], Shard):
                raise MisuseError(f"{shard.name!r} has {len(parts)} shards: name one of {shard.name}.variables to move")
            shard = parts[0]
        if shard.variable.client is not self._client:
            raise MisuseError(f"{shard.name!r} belongs to another strategy")
        return shard

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """Return the handle that a function returned. Raise ProtocolError if there is none of that kind here."""
        return self if kind == self.handle_kind else self.context.variables.resolve_handle(kind, key)

    def placement(self) -> str:
        """Return a table of where each shard lives, and a bar chart of each server's bytes (without slots)."""
        return placement_table(self.variables, self._client.num_servers)

    def _repr_html_(self) -> str:
        """Return a table of its variables, and of how full each server is, for a notebook."""
        return placement_html(repr(self)[1:-1], self.variables, self._client.num_servers)

    def __repr__(self) -> str:
        life = ", closed" if self.context.closed else ""
        return f"<{type(self).__name__} {self._client.num_servers} ps, {len(self.context.workers)} workers{life}>"
