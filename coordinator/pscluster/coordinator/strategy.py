"""ParameterServerStrategy: connects to the cluster, and makes variables on its parameter servers.

A facade of `job/` (the job's context, how it begins and ends), `variables/`, and `moves/`, whose methods it inherits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.job import progress
from pscluster.coordinator.job.attach import attach, describe_job
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.moves.elastic_strategy import ElasticStrategy
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.variables.placement import placement_html, placement_table
from pscluster.core.checks import type_of
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.scope import Partitioner, colocated_with, creating_with, current_creator, has_creator
from pscluster.ps.handles.variables.variable import Shard, Variable
from pscluster.v1 import worker_pb2
from pscluster.worker.strategy import ReduceOp

logger = logging.getLogger(__name__)

PS_TIMEOUT = 600.0
"""Seconds to wait for a parameter server that is unreachable."""


@functools.cache
def _warn_outside(method: str, consequence: str) -> None:
    logger.warning(
        "strategy.%s() outside a scheduled function %s: call it in a function that is given to "
        "ClusterCoordinator.schedule()",
        method,
        consequence,
    )


class ParameterServerStrategy(ElasticStrategy):
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
        _warn_outside("reduce", "has only the value that it is given, and none from the workers")
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
        if not isinstance(variable, Variable):
            raise TypeError(f"delete_variable takes a variable, not {type_of(variable)}")
        self.context.variables.delete_variable(variable)
        if (dispatcher := self.context.dispatcher) is not None:
            dispatcher.definitions.release_variable(variable.origin)

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
