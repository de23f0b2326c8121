"""What users call to move shards, and to add and remove parameter servers, while a job runs."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pscluster.coordinator.job import servers
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.local.local_cluster import LocalCluster
from pscluster.coordinator.moves.applying import Applied, apply_plan
from pscluster.coordinator.moves.mover import Moved, ShardMover
from pscluster.coordinator.moves.plan import Plan
from pscluster.coordinator.moves.servers import add_server, remove_server
from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.resolvers import ClusterResolver
from pscluster.core.errors import MisuseError
from pscluster.core.transport.channels import PeerAddress
from pscluster.ps.handles.variables.variable import Shard, Variable
from pscluster.worker.strategy import Strategy


class ElasticStrategy(Strategy):
    """The part of `ParameterServerStrategy` that moves shards, and adds and removes servers."""

    is_synchronous: ClassVar[bool] = False
    """Whether all workers run each step together."""

    context: JobContext
    cluster_resolver: ClusterResolver | LocalCluster

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
