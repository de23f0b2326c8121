"""The client of the parameter servers: workers and coordinators read and update variables through it.

`exchanges` carries requests to the servers; `reads` and `updates` decide what to request of each; the directory and
checkpoints are here. A server that returns with other contents has lost its variables: that is an error at once, which
names the server.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
import numpy.typing as npt
import tenacity

from pscluster.core.context import current_function
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import (
    MisuseError,
    PsClusterError,
    PSUnavailableError,
    ShardMovedError,
    UnavailableError,
    UnknownVariableError,
    from_rpc,
)
from pscluster.core.functions.definitions import split_off_bulk
from pscluster.core.limits import MAX_COUNT
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.core.transport.frames import CHUNK_BYTES, padded, view
from pscluster.core.transport.retry import FEW_ATTEMPTS, until
from pscluster.ps.client.connections import Server, Way
from pscluster.ps.client.exchanges import SLOWEST_BYTES_PER_SECOND, Exchanges
from pscluster.ps.client.placement.cuts import Gate
from pscluster.ps.client.placement.placements import Placements
from pscluster.ps.client.reads.reader import Reader
from pscluster.ps.client.updates.shard_update import ShardUpdate
from pscluster.ps.client.updates.updater import Updater
from pscluster.ps.request_metrics import ClientMetrics
from pscluster.ps.spec import COPY, METADATA, OWN_RULE, part_name, partition_of
from pscluster.v1 import definition_pb2, node_pb2, ps_pb2

_T = TypeVar("_T")
_Form = tuple[ps_pb2.CreateRequest, bytes]
"""One form of a request to create something, with its bulk; a server may not be able to load every form."""

_SLOWEST_FUNCTION = 600.0  # seconds for a user's function that makes an initial value of any size


def _need_servers() -> None:
    """Have a synchronous step be taken by itself, and what was pushed be sent: it asks for what only servers have."""
    function = current_function()
    if function is not None and function.overlap is not None:
        function.overlap.settle()
    if function is not None and function.steps is not None:
        function.steps.need_servers()


def _seconds_for(nbytes: int) -> float:
    """Return the seconds that a server may take to make or to write `nbytes` bytes, in addition to sending them."""
    return _SLOWEST_FUNCTION + nbytes / SLOWEST_BYTES_PER_SECOND


class PsClient:
    """Reads from and updates all parameter servers of a job, as one incarnation.

    Thread-safe. No lock is held over a network call.
    """

    def __init__(
        self,
        peers: Sequence[PeerAddress],
        identity: node_pb2.Identity,
        *,
        job: int,
        incarnation: int,
        retry_seconds: float = 10.0,
        request_timeout: float = 60.0,
        metrics: ClientMetrics | None = None,
    ) -> None:
        self.job = job
        self.metrics = metrics or ClientMetrics(len(peers))
        self.incarnation = incarnation
        self._identity = identity
        self.exchanges = Exchanges(peers, identity, self.metrics, retry_seconds, request_timeout)
        self.gate = Gate()
        """What uses the cuts of variables passes it; see `placement.cuts`."""
        self.placements = Placements(self.moved_variables, self.exchanges.begin, retry_seconds)
        reader = Reader(job, self.exchanges, self.placements)
        self.updater = Updater(job, incarnation, self.exchanges, self.placements, self.metrics)
        self.placements.on_reshard = self.updater.reshard
        self.read, self.read_planned, self.reading_both = reader.read, reader.read_planned, reader.reading_both
        self.update = self.updater.update
        self._servers, self._timeout = self.exchanges.servers, request_timeout
        self._declared: dict[int, tuple[str, list[_Form]]] = {}  # optimizers
        self.optimizers: dict[int, str] = {}
        """The names of the optimizers that this client has handles of, by number."""

    def give_up(self, server: int, error: PSUnavailableError) -> None:
        """Mark a server as lost: raise this error at once from all that needs it, on any thread."""
        self._servers[server].give_up(error)

    @property
    def num_servers(self) -> int:
        return len(self._servers)

    def place_of(self, peer: PeerAddress) -> PeerAddress:
        """Return where the server of this index is now."""
        return self._servers[peer.index].peer

    def move(self, peer: PeerAddress) -> None:
        """Dial the server of this index there from now on; see `Server.move`."""
        self._servers[peer.index].move(peer)

    def moved_variables(self, server: int) -> Sequence[ps_pb2.VariableSpec]:
        """Return the variables of which a shard has moved, as a server knows them."""
        request = ps_pb2.DescribeRequest(job=self.job, moved=True)
        return self._describe(self._servers[server], request).variables

    def declare_all(self, server: int) -> None:
        """Declare all variables and optimizers of the job to a server that is new, and has no shard of them.

        MisuseError if an optimizer's rule is of the user's own, and this client has not declared it.
        """
        request = ps_pb2.DescribeRequest(job=self.job, all=True)
        known = self._describe(self._servers[0], request)
        for optimizer in known.optimizers:
            if optimizer.id not in self._declared:
                if optimizer.rule == OWN_RULE:
                    raise MisuseError(f"optimizer {optimizer.name!r} has its own rule: make it in the script first")
                create = ps_pb2.CreateRequest(job=self.job, optimizer=optimizer)
                self._declared[optimizer.id] = optimizer.name, [(create, b"")]
            self._declare(server, optimizer.id)
        for spec in known.variables:
            self.exchanges.push(server, ps_pb2.Request(create=ps_pb2.CreateRequest(job=self.job, variable=spec)), [])

    def connect(self, timeout: float, stop: threading.Event | None = None) -> None:
        """Shake hands with all servers, waiting for those that have not started yet."""
        peers = [server.peer for server in self._servers]

        def place_of(peer: PeerAddress) -> PeerAddress | None:
            return self.place_of(peer) if peer.index < len(self._servers) else None  # it was removed

        wait_for_peers(peers, self._identity, timeout=timeout, stop=stop, place_of=place_of)

    def introductions(self) -> list[node_pb2.HelloReply]:
        """Return every server's answer to the handshake, which says what it holds."""
        return [self.exchanges.retrying(server, server.hello) for server in self._servers]

    def directory(self) -> list[ps_pb2.DescribeReply]:
        """Return all variables and optimizers, as each server knows them."""
        request = ps_pb2.DescribeRequest(job=self.job, all=True)
        return self._from_each(lambda server: self._describe(server, request))

    def _from_each(self, ask: Callable[[Server], _T]) -> list[_T]:
        """Return each server's answer, one after the other.

        All are asked again if one is removed meanwhile: what it had is on others by then.
        """
        while True:
            servers = list(self._servers)
            try:
                return [ask(server) for server in servers]
            except ShardMovedError:
                if all(server in self._servers for server in servers):
                    raise

    def expect(self, store_ids: Sequence[int]) -> None:
        """Set the id of each server's store for this job: a server that returns with another has lost it."""
        for server, store_id in zip(self._servers, store_ids, strict=True):
            server.store_id = store_id

    def close(self, why: str = "its strategy was closed") -> None:
        """Close all connections. Later requests are refused, with this reason."""
        self.exchanges.close(why)

    def check_servers(self) -> None:
        """Raise PSUnavailableError if a server is lost."""
        for server in list(self._servers):
            with contextlib.suppress(ShardMovedError):  # it was removed
                server.check()

    def report_seen(self, servers: Iterable[int] | None = None) -> None:
        """Have servers that may have restarted compare their updates with those this client has seen acknowledged."""
        seen = self.updater.seen()
        groups = (seen[at : at + MAX_COUNT] for at in range(0, len(seen), MAX_COUNT))
        requests = [ps_pb2.DescribeRequest(job=self.job, seen=group) for group in groups]
        for index in range(len(self._servers)) if servers is None else servers:
            with contextlib.suppress(ShardMovedError):  # it was removed, and loses nothing any more
                for request in requests:
                    self._describe(self.exchanges.server(index), request)

    def statuses(self, busiest: int = 0, *, shards: bool = False) -> list[node_pb2.StatusReply]:
        """Return every server's status, each with as many of the variables that are used most, perhaps with shards."""
        self.exchanges.check_open()
        request = node_pb2.StatusRequest(busiest=busiest, shards=shards)

        def ask(server: Server) -> node_pb2.StatusReply:
            about = functools.partial(server.ask, "node", "status", request, self._timeout)
            reply: node_pb2.StatusReply = self.exchanges.retrying(server, about)
            return reply

        return self._from_each(ask)

    # The job's metadata

    def metadata(self) -> dict[str, str]:
        """Return all texts of the job's metadata, by name."""
        request = ps_pb2.DescribeRequest(job=self.job, metadata=True)
        return dict(self._describe(self._servers[0], request).metadata)

    def put_metadata(self, name: str, text: str) -> None:
        """Store a text under a name, in place of the one before. Returns when it is as durable as an update."""
        variable, shard = METADATA
        item = ps_pb2.UpdateItem(variable=variable, shard=shard, kind=ps_pb2.PUT, nth=1, name=name, text=text)
        self.update([ShardUpdate(0, item, memoryview(b""))])

    # Checkpoints

    def checkpoint(
        self, action: ps_pb2.CheckpointRequest.Action, checkpoint_id: int, directory: str = "", nbytes: int = 0
    ) -> list[ps_pb2.CheckpointReply]:
        """Send a request to all servers at once. It is not retried: a server that dies loses what was marked.

        Waits for a server that is down already, except to drop what it has lost anyway. The timeout is for writing
        about `nbytes`.
        """
        timeout = _seconds_for(nbytes)

        def ask(index: int) -> ps_pb2.CheckpointReply:
            file = part_name(index, self.num_servers)
            request = ps_pb2.CheckpointRequest(
                job=self.job, action=action, id=checkpoint_id, directory=directory, file=file
            )
            retry = action != ps_pb2.CheckpointRequest.DROP
            reply: ps_pb2.CheckpointReply = self._ask(index, "checkpoint", request, timeout, retry=retry)
            return reply

        return self._on_all(ask)

    def restore(self, requests: Mapping[int, ps_pb2.RestoreRequest], nbytes: int = 0) -> None:
        """Send each server its request, all at once; `nbytes` as in `checkpoint`."""
        timeout = _seconds_for(nbytes)
        work = []
        for index, request in requests.items():
            request.job = self.job
            work.append(functools.partial(self._ask, index, "restore", request, timeout, retry=not request.drop))
        self.exchanges.on_each(work)

    def _on_all(self, work: Callable[[int], _T]) -> list[_T]:
        return self.exchanges.on_each(functools.partial(work, index) for index in range(self.num_servers))

    def _ask(self, index: int, method: str, request: Any, timeout: float, *, retry: bool) -> Any:
        self.exchanges.check_open()
        server = self._servers[index]
        if retry:  # on the same channel, which may wait to dial again long after the server is back
            self._describe(server, ps_pb2.DescribeRequest(job=self.job), "bulk")
        try:
            if method == "restore" and request.ByteSize() > CHUNK_BYTES // 2:  # too large for a message
                data = request.SerializeToString()
                return self.exchanges.push(index, ps_pb2.Request(restore=True), [data], timeout, retry=False)
            return server.ask("bulk", method, request, timeout)
        except grpc.RpcError as error:
            raise from_rpc(error, str(server.peer)) from None

    # The directory

    def create_variable(
        self,
        spec: ps_pb2.VariableSpec,
        shards: Sequence[npt.NDArray[Any]] | None,
        initializers: Iterable[tuple[ps_pb2.Initializer, bytes]] = (),
    ) -> None:
        """Declare a variable on all servers, with the initial values (C-contiguous) of each one's shards.

        Without values, each server makes them with the first initializer that it can load; initializers come with
        their function's pickle or arrays. If a server refuses, the others remove the variable, and the refusal is
        raised.
        """
        self.exchanges.check_open()
        forms = self._forms(spec, initializers)

        def create_on(index: int) -> None:
            if shards is None:
                self._create_values(index, spec, forms)
                return
            values = [view(shard) for shard, owner in zip(shards, spec.owners, strict=True) if owner == index]
            create = ps_pb2.CreateRequest(job=self.job, variable=spec)
            self.exchanges.push(index, ps_pb2.Request(create=create), padded(values))

        try:
            self._on_all(create_on)
        except BaseException:
            self.delete_variable(spec.name, spec.id)
            raise
        self.exchanges.pushed += sum(shard.nbytes for shard in shards or ())

    def _forms(
        self, spec: ps_pb2.VariableSpec, initializers: Iterable[tuple[ps_pb2.Initializer, bytes]]
    ) -> list[_Form]:
        create = functools.partial(ps_pb2.CreateRequest, job=self.job, variable=spec)
        return [(create(initializer=initializer), bulk) for initializer, bulk in initializers]

    def _create_values(self, index: int, spec: ps_pb2.VariableSpec, forms: Sequence[_Form]) -> None:
        partition = partition_of(spec)
        size = sum(partition.block(shard).size for shard, owner in enumerate(spec.owners) if owner == index)
        timeout = _seconds_for(size * dtype_named(spec.dtype).itemsize)
        self._create(index, f"the function for the initial value of {spec.name!r}", forms, timeout)

    def _create(
        self, index: int, description: str, forms: Sequence[_Form], timeout: float, *, retry: bool = True
    ) -> None:
        """Send a server the first of these requests whose function it can load. MisuseError if there is none."""
        why = ""
        for create, bulk in forms:
            request, buffers = ps_pb2.Request(create=create), [bulk] if bulk else []
            why = self.exchanges.push(index, request, buffers, timeout, retry=retry).create.unresolved
            if not why:
                return
        raise MisuseError(f"{description} can't be loaded on ps {index}: {why}")

    def create_optimizer(self, spec: ps_pb2.OptimizerSpec, rules: Iterable[definition_pb2.Definition] = ()) -> None:
        """Declare an optimizer on all servers, or change its hyperparameters.

        A custom rule comes in several forms of its class; each server takes the first that it can load.
        """
        self.exchanges.check_open()
        _need_servers()
        forms: list[_Form] = []
        for rule in rules:
            create = ps_pb2.CreateRequest(job=self.job, optimizer=spec, rule=rule)
            forms.append((create, split_off_bulk(create.rule)))
        self._declared[spec.id] = spec.name, forms or [(ps_pb2.CreateRequest(job=self.job, optimizer=spec), b"")]
        self._on_all(lambda index: self._declare(index, spec.id))

    def declare_again(self, index: int, optimizers: Sequence[int]) -> Future[None]:
        """Send a server the optimizers with these ids, as this client last declared them."""

        def declare() -> None:
            for optimizer in optimizers:
                if optimizer in self._declared:
                    self._declare(index, optimizer, retry=False)  # the caller retries

        return self.exchanges.submit(declare)

    def _declare(self, index: int, optimizer: int, *, retry: bool = True) -> None:
        name, forms = self._declared[optimizer]
        self._create(index, f"the rule of optimizer {name!r}", forms, _SLOWEST_FUNCTION, retry=retry)

    def copy_variables(self, copies: Sequence[tuple[int, ps_pb2.VariableSpec]], optimizers: Sequence[int] = ()) -> None:
        """Declare copies of variables as they are now; no values travel.

        The copies, each with its source's id, exist when this returns, but may not be on disk before `check_saved`. If
        this raises, some may exist. Slots of these optimizers are copied, too.
        """
        self.exchanges.check_open()
        made = []
        for source, spec in copies:
            numbers = json.dumps({"variable": source, "optimizers": list(optimizers)})
            made.append((spec, self._forms(spec, [(ps_pb2.Initializer(name=COPY, numbers=numbers), b"")])))

        def copy(index: int) -> None:
            for spec, forms in made:
                self._create_values(index, spec, forms)

        self._on_all(copy)

    def check_saved(self, names: Sequence[str]) -> list[str]:
        """Wait until these variables are as durable as they will be; return why servers can't save them, if any can't.

        UnknownVariableError if a server lacks one.
        """
        request = ps_pb2.DescribeRequest(job=self.job, variables=names)

        def check(index: int) -> str:
            saved = ps_pb2.DescribeRequest(saved=True)
            saved.MergeFrom(request)
            try:
                self._describe(self._servers[index], saved, timeout=_SLOWEST_FUNCTION)
            except PsClusterError as error:
                if type(error) is not PsClusterError:  # anything but a disk that is full or fails
                    raise
                self._describe(self._servers[index], request)
                return f"ps {index}: {error}"
            return ""

        return [reason for reason in self._on_all(check) if reason]

    def delete_variable(self, name: str, variable_id: int, *, retry: bool = False) -> None:
        """Remove a variable from all servers: from the reachable ones, or, with `retry`, waiting for the others."""
        self._delete(ps_pb2.DeleteRequest(job=self.job, name=name, id=variable_id), retry=retry)
        self.updater.forget(variable_id)

    def delete_copies(self, evaluation: int, *, retry: bool = False) -> bool:
        """Remove all copies of an evaluation, as `delete_variable`. Return False if a server was unreachable."""
        if self.exchanges.closed:
            return True  # its variables ended with the job
        return self._delete(ps_pb2.DeleteRequest(job=self.job, evaluation=evaluation), retry=retry)

    def _delete(self, request: ps_pb2.DeleteRequest, *, retry: bool) -> bool:
        # A few attempts: what remains on one server would block a variable of that name. But this may be the cleanup
        # after an error that is being raised, which must not wait for long.
        few_times = tenacity.Retrying(**until(seconds=self._timeout, attempts=FEW_ATTEMPTS), reraise=True)
        everywhere = True
        for server in list(self._servers):
            delete = functools.partial(server.ask, "control", "delete", request, self._timeout)
            if retry:
                with contextlib.suppress(ShardMovedError):  # it was removed, and has nothing any more
                    self.exchanges.retrying(server, delete)
                continue
            try:
                few_times(delete)
            except (grpc.RpcError, UnavailableError):
                everywhere = False
        return everywhere

    def describe_variable(self, name: str, server: int = 0) -> ps_pb2.VariableSpec:
        """Look up a variable. Every server knows all of them."""
        request = ps_pb2.DescribeRequest(job=self.job, variables=[name])
        return self._describe(self._servers[server], request).variables[0]

    def describe_optimizer(self, name: str) -> ps_pb2.OptimizerSpec:
        """Look up an optimizer; its iterations are the highest count of any server.

        A server that is being added may not have it yet. UnknownVariableError if none has it.
        """
        _need_servers()
        request = ps_pb2.DescribeRequest(job=self.job, optimizers=[name])
        unknown: list[UnknownVariableError] = []

        def specs_of(server: Server) -> list[ps_pb2.OptimizerSpec]:
            try:
                return list(self._describe(server, request).optimizers)
            except UnknownVariableError as error:
                unknown.append(error)
                return []

        specs = [spec for found in self._from_each(specs_of) for spec in found]
        if not specs:
            raise unknown[0]
        return max(specs, key=lambda spec: spec.iterations)

    def optimizer_on(self, number: int, server: int) -> ps_pb2.OptimizerSpec | None:
        """Return an optimizer as one server knows it; None if this client has no handle of it."""
        if (name := self.optimizers.get(number)) is None:
            return None
        return self._describe(
            self._servers[server], ps_pb2.DescribeRequest(job=self.job, optimizers=[name])
        ).optimizers[0]

    def _describe(
        self, server: Server, request: ps_pb2.DescribeRequest, way: Way = "control", timeout: float | None = None
    ) -> ps_pb2.DescribeReply:
        self.exchanges.check_open()
        ask = functools.partial(server.ask, way, "describe", request, timeout or self._timeout)
        reply: ps_pb2.DescribeReply = self.exchanges.retrying(server, ask)
        return reply
