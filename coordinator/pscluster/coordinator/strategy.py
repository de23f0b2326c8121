"""ParameterServerStrategy: connects to the cluster, and makes variables on its parameter servers.

A facade: what a job is made of lies in `job/` (its context, how it begins and ends) and `variables/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from pscluster.coordinator.checkpoints.manager import CheckpointManager, RestoredFrom
from pscluster.coordinator.job.attach import attach, describe_job
from pscluster.coordinator.job.progress import JobProgress
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.observability.telemetry import CoordinatorTelemetry
from pscluster.coordinator.variables.placement import placement_table
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.client.client import PsClient
from pscluster.ps.handles.scope import Partitioner, colocated_with, creating_with
from pscluster.ps.handles.variable import Shard, Variable
from pscluster.worker.strategy import Strategy

PS_TIMEOUT = 600.0
"""Seconds for which a parameter server that is gone is waited for."""


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
        ps_timeout: seconds to wait for a parameter server that is gone, by functions and by all calls
            here. One that comes back with what it held is gone on with.
        job_name: names the job to the servers. Default: the path of the script.
        resume: go on with what the servers hold of a job of this name whose coordinator has died: variables and
            optimizers that are made here under the name of one that lives take it as it is. False: begin anew.
        take_over: take the tasks from another coordinator that has them now; what it still sends is refused.
        allow_pickle: whether functions and objects may be sent as pickles; see docs/security.md. None: as the
            LocalCluster, the command line or PSCLUSTER_ALLOW_PICKLE says, else where a token protects the roles.

    Attributes:
        cluster_resolver: as it was given.
        context: what the parts of the job share; of use to pscluster itself.
        telemetry: figures of the job, for whoever looks on: `telemetry.snapshot()`.

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
        super().__init__(self.context.client)
        self.telemetry = CoordinatorTelemetry(self.context)
        self._progress = JobProgress(self.context.variables)
        attach(self.context, self.telemetry, connect_timeout, resume)

    # The job

    @property
    def client(self) -> PsClient:
        """The coordinator's own client of the parameter servers."""
        return self._client

    @property
    def tasks(self) -> list[PeerAddress]:
        """The parameter servers and workers."""
        return self.context.tasks

    @property
    def token(self) -> str | None:
        """That of the cluster."""
        return self.context.options.token

    @property
    def job(self) -> int:
        """The job's number, which each coordinator makes anew."""
        return self.context.request.job

    @property
    def job_name(self) -> str:
        """By which the servers know the job."""
        return self.context.request.job_name

    @property
    def metrics_address(self) -> str:
        """HOST:PORT of `/metrics`; "": it is not served."""
        return self.context.metrics_address

    @property
    def connected(self) -> bool:
        """Have all tasks answered, and is the job not over?"""
        return self.context.connected

    @property
    def resumed(self) -> bool:
        """Does this go on with a job whose coordinator has died?"""
        return self.context.resumed

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

    def restore_or_initialize(self, directory: str) -> RestoredFrom:
        """See `CheckpointManager.restore_or_initialize`."""
        with CheckpointManager(directory, strategy=self) as manager:
            return manager.restore_or_initialize()

    def lost_updates(self) -> dict[str, int]:
        """Updates that were acknowledged and lost when parameter servers died, by variable; {} if none is known of.

        It is found out, and said in the log, as soon as such a server is back: `join` waits for that.

        A lower bound: what clients that are still there were told of, beyond what the servers had saved. Of several
        shards the one counts that has lost most. Records of a log that can't be read count under `(unknown)`.

        Raises:
            UnavailableError: a server does not answer.
        """
        return self.context.lost_updates()

    def close(self, reason: str = "its strategy was closed") -> None:
        """End the job: tell all roles, close all connections. Variables are gone then. Idempotent.

        A checkpoint that is being written is waited for, unless a server is gone. Functions that have not ended are
        cancelled; how many, and the error of one that nobody was told of, is logged.
        """
        self.context.close(reason)

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Variables

    @contextlib.contextmanager
    def scope(self) -> Iterator[ParameterServerStrategy]:
        """Within the block `Variable(...)` and optimizers are made on this strategy's servers."""
        with creating_with(self.context.variables):
            yield self

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Variable | Shard) -> Iterator[None]:
        """Put new variables within the block, whole, on the server of this shard or of the variable's first."""
        if not isinstance(variable, Variable | Shard):
            raise TypeError(f"colocate_vars_with takes a variable or a shard of one, not a {type(variable).__name__}")
        whole = variable.variable if isinstance(variable, Shard) else variable
        if whole.client is not self._client:
            raise MisuseError(
                f"variable {whole.name!r} belongs to another strategy: variables can't be placed beside it here"
            )
        with self.scope(), colocated_with(variable.owners[0]):
            yield

    @property
    def extended(self) -> ParameterServerStrategy:
        """Return where TensorFlow has `colocate_vars_with`: on `extended`."""
        return self

    @property
    def variables(self) -> list[Variable]:
        """Return all variables, in the order in which they were made."""
        return self.context.variables.of_user

    def delete_variable(self, variable: Variable) -> None:
        """Delete a variable from its servers, with its slots. Its name is free again, and handles of it are stale."""
        self.context.variables.delete_variable(variable)

    def resolve_handle(self, kind: str, key: str) -> Handle:
        """Return the handle that a function returned. ProtocolError if there is none of that kind here."""
        return self if kind == self.handle_kind else self.context.variables.resolve_handle(kind, key)

    def placement(self) -> str:
        """A table of which shard lives where, and a picture of how full each server is (slots not counted)."""
        return placement_table(self.variables, self._client.num_servers)

    def __repr__(self) -> str:
        life = ", closed" if self.context.closed else ""
        return f"<ParameterServerStrategy {self._client.num_servers} ps, {len(self.context.workers)} workers{life}>"
