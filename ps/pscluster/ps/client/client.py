"""The client of the parameter servers: what a worker or a coordinator reads and updates goes through here.

`exchanges` carries requests to the servers, `reads` and `updates` say what is asked of which; the directory and
checkpoints are here. A server that comes back and holds something else has lost its variables: that is an error at
once, and names it.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import grpc
import numpy.typing as npt
import tenacity

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MisuseError, PSUnavailableError, UnavailableError, from_rpc, is_retryable
from pscluster.core.functions.definitions import split_off_bulk
from pscluster.core.transport.channels import PeerAddress, wait_for_peers
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer, view
from pscluster.core.transport.methods import Stub
from pscluster.ps.client.connections import Server
from pscluster.ps.client.exchanges import SLOWEST_BYTES_PER_SECOND, Exchanges, Traffic, padded
from pscluster.ps.client.read_plans import Array, WholeVariable
from pscluster.ps.client.reads import Reader, ReadPart
from pscluster.ps.client.updates import UpdatePart, Updater
from pscluster.ps.request_metrics import ClientCounts
from pscluster.ps.spec import COPY, part_name, partition_of
from pscluster.v1 import definition_pb2, node_pb2, ps_pb2

_SLOWEST_FUNCTION = 600.0  # seconds for a user's function that makes an initial value, whatever the size


def _patience(nbytes: int) -> float:
    """Seconds for a server to make or to write so many bytes, beside what it takes to send them."""
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
        counts: ClientCounts | None = None,
    ) -> None:
        self.job = job
        self.counts = counts or ClientCounts(len(peers))
        self.incarnation = incarnation
        self._identity = identity
        self._exchanges = Exchanges(peers, identity, self.counts, retry_seconds, request_timeout)
        self._reader = Reader(job, self._exchanges)
        self._updater = Updater(job, incarnation, self._exchanges)
        self._servers, self._timeout = self._exchanges.servers, request_timeout
        self._declared: dict[int, tuple[ps_pb2.OptimizerSpec, list[definition_pb2.Definition | None]]] = {}

    @property
    def term(self) -> int:
        """Of what is updated outside of functions; see UpdateRequest."""
        return self._updater.term

    @term.setter
    def term(self, term: int) -> None:
        self._updater.term = term

    @property
    def on_lost(self) -> Callable[[PSUnavailableError], None] | None:
        """Is told of each error that says that a server is lost, before that is raised."""
        return self._exchanges.on_lost

    @on_lost.setter
    def on_lost(self, on_lost: Callable[[PSUnavailableError], None] | None) -> None:
        self._exchanges.on_lost = on_lost

    def read(self, parts: Sequence[ReadPart]) -> None:
        """Read every part to where its bytes are to go: one request a server, all servers at once."""
        self._reader.read(parts)

    def read_planned(self, variables: Sequence[int], describe: Callable[[], list[WholeVariable]]) -> list[Array] | None:
        """Read whole variables; see `Reader.read_planned`."""
        return self._reader.read_planned(variables, describe)

    def update(self, parts: Sequence[UpdatePart]) -> None:
        """Apply every part once, however often it has to be sent. Returns when all servers have acknowledged."""
        self._updater.update(parts)

    @property
    def traffic(self) -> Traffic:
        """What was moved so far, repetitions not counted."""
        return Traffic(self._exchanges.pulled, self._exchanges.pushed)

    @property
    def num_servers(self) -> int:
        """How many parameter servers the job has."""
        return len(self._servers)

    def connect(self, timeout: float, stop: threading.Event | None = None) -> None:
        """Shake hands with all servers, however late they start."""
        peers = [server.peer for server in self._servers]
        wait_for_peers(peers, self._identity, timeout=timeout, stop=stop)

    def introductions(self) -> list[node_pb2.HelloReply]:
        """What every server says of what it holds."""
        return [self._exchanges.retrying(server, server.hello) for server in self._servers]

    def directory(self) -> list[ps_pb2.DescribeReply]:
        """What every server knows: all variables, all optimizers."""
        request = ps_pb2.DescribeRequest(job=self.job, all=True)
        return [self._describe(server, request) for server in self._servers]

    def expect(self, holdings: Sequence[int]) -> None:
        """What each server holds for this job: one that comes back with anything else has lost it."""
        for server, holding in zip(self._servers, holdings, strict=True):
            server.holding = holding

    def close(self, why: str = "its strategy was closed") -> None:
        """Close all connections. What is asked for afterwards is refused, and says why."""
        self._exchanges.close(why)

    def tell_seen(self, servers: Iterable[int] | None = None) -> None:
        """Have the servers compare what they have with what this client was told of: they may have come back since.

        Args:
            servers: by index; None: all.
        """
        seen = self._updater.seen()
        if seen:
            # What another one holds changes nothing.
            for index in range(len(self._servers)) if servers is None else servers:
                self._describe(self._servers[index], ps_pb2.DescribeRequest(job=self.job, seen=seen))

    def statuses(self) -> list[node_pb2.StatusReply]:
        """Every server's account of itself."""
        self._exchanges.check_open()
        found = []
        for server in self._servers:

            def attempt(server: Server = server) -> node_pb2.StatusReply:
                reply: node_pb2.StatusReply = server.ask(server.node.status, node_pb2.StatusRequest(), self._timeout)
                return reply

            found.append(self._exchanges.retrying(server, attempt))
        return found

    # Checkpoints

    def checkpoint(
        self,
        action: ps_pb2.CheckpointRequest.Action,
        number: int,
        directory: str = "",
        nbytes: int = 0,
    ) -> list[ps_pb2.CheckpointReply]:
        """Every server's answer, all at once. Not repeated: what was marked is gone with a server that died.

        A server that is gone already is waited for, but not to drop what it has forgotten.

        Args:
            nbytes: what is to be written, about, of which the patience depends.
        """
        timeout = _patience(nbytes)
        replies: list[ps_pb2.CheckpointReply] = [ps_pb2.CheckpointReply() for _ in self._servers]

        def ask(index: int) -> None:
            file = part_name(index, self.num_servers)
            request = ps_pb2.CheckpointRequest(job=self.job, action=action, id=number, directory=directory, file=file)
            patient = action != ps_pb2.CheckpointRequest.DROP
            replies[index] = self._ask(index, "checkpoint", request, timeout, patient=patient)

        self._exchanges.on_each({index: functools.partial(ask, index) for index in range(self.num_servers)})
        return replies

    def restore(self, requests: Mapping[int, ps_pb2.RestoreRequest], nbytes: int = 0) -> None:
        """Send every server its own, all at once; `nbytes` as in `checkpoint`."""
        timeout = _patience(nbytes)
        work: dict[int, Callable[[], object]] = {}
        for index, request in requests.items():
            request.job = self.job
            work[index] = functools.partial(self._ask, index, "restore", request, timeout, patient=not request.drop)
        self._exchanges.on_each(work)

    def _ask(self, index: int, method: str, request: Any, timeout: float, *, patient: bool) -> Any:
        self._exchanges.check_open()
        server = self._servers[index]
        if patient:  # on the same channel: it may be waiting to dial again, long after the server is back
            self._describe(server, ps_pb2.DescribeRequest(job=self.job), server.bulk)
        try:
            if method == "restore" and request.ByteSize() > CHUNK_BYTES // 2:  # more than a message has
                push = self._exchanges.push(
                    index, ps_pb2.Request(restore=True), [request.SerializeToString()], timeout, patient=False
                )
                push()
                return ps_pb2.RestoreReply()
            return server.ask(getattr(server.bulk, method), request, timeout)
        except grpc.RpcError as error:
            raise from_rpc(error, str(server.peer)) from None

    # The directory

    def create_variable(
        self,
        spec: ps_pb2.VariableSpec,
        shards: Sequence[npt.NDArray[Any]] | None,
        initializers: Iterable[tuple[ps_pb2.Initializer, bytes]] = (),
    ) -> None:
        """Declare a variable everywhere, with its shards' initial values (C-contiguous) where they live.

        Without values the servers make them: by the first of the initializers, each with its function's pickle
        or arrays, that a server can follow. If any server refuses, the variable is removed from those that took it, and
        the refusal is raised.
        """
        self._exchanges.check_open()
        work: dict[int, Callable[[], object]] = {}
        forms = list(initializers)
        for index in range(self.num_servers):
            request = ps_pb2.Request(create=ps_pb2.CreateRequest(job=self.job, variable=spec))
            if shards is not None:
                mine = [view(shard) for shard, owner in zip(shards, spec.owners, strict=True) if owner == index]
                work[index] = self._exchanges.push(index, request, padded(mine))
            else:
                work[index] = functools.partial(self._create_there, index, spec, forms)
        try:
            self._exchanges.on_each(work)
        except BaseException:
            self.delete_variable(spec.name, spec.id)
            raise
        pushed = sum(shard.nbytes for shard in shards or ())
        self._exchanges.pushed += pushed

    def _create_there(
        self, index: int, spec: ps_pb2.VariableSpec, forms: Sequence[tuple[ps_pb2.Initializer, bytes]]
    ) -> None:
        why, partition = "", partition_of(spec)
        here = sum(partition.block(shard).size for shard, owner in enumerate(spec.owners) if owner == index)
        timeout = _patience(here * dtype_named(spec.dtype).itemsize)
        for initializer, bulk in forms:
            create = ps_pb2.CreateRequest(job=self.job, variable=spec, initializer=initializer)
            buffers: list[Buffer] = [bulk] if bulk else []
            why = self._exchanges.push(index, ps_pb2.Request(create=create), buffers, timeout)().create.unresolved
            if not why:
                return
        raise MisuseError(f"the function for the initial value of {spec.name!r} can't be loaded on ps {index}: {why}")

    def create_optimizer(self, spec: ps_pb2.OptimizerSpec, forms: Iterable[definition_pb2.Definition] = ()) -> None:
        """Declare an optimizer everywhere, or give it other hyperparameters.

        Of a rule of the user's own: by the first of these forms of its class that a server can follow.
        """
        self._exchanges.check_open()
        rules: list[definition_pb2.Definition | None] = [*forms] or [None]
        self._declared[spec.id] = spec, rules
        self._exchanges.on_each(
            {index: functools.partial(self._create_rule, index, spec, rules) for index in range(self.num_servers)}
        )

    def declare_again(self, index: int, optimizers: Sequence[int]) -> Future[None]:
        """Send a server the optimizers with these numbers, as this client has declared them last."""

        def declare() -> None:
            for number in optimizers:
                if number in self._declared:
                    self._create_rule(index, *self._declared[number], patient=False)  # who asks has patience

        return self._exchanges.submit(declare)

    def _create_rule(
        self,
        index: int,
        spec: ps_pb2.OptimizerSpec,
        rules: Sequence[definition_pb2.Definition | None],
        *,
        patient: bool = True,
    ) -> None:
        why = ""
        for rule in rules:
            create = ps_pb2.CreateRequest(job=self.job, optimizer=spec, rule=rule)
            bulk = b"" if rule is None else split_off_bulk(create.rule)
            buffers: list[Buffer] = [bulk] if bulk else []
            send = self._exchanges.push(
                index, ps_pb2.Request(create=create), buffers, _SLOWEST_FUNCTION, patient=patient
            )
            why = send().create.unresolved
            if not why:
                return
        raise MisuseError(f"the rule of optimizer {spec.name!r} can't be loaded on ps {index}: {why}")

    def copy_variables(self, copies: Sequence[tuple[int, ps_pb2.VariableSpec]], optimizers: Sequence[int] = ()) -> None:
        """Declare variables everywhere that are copies of others as they are now, by number; no bytes travel.

        Made when this returns, and perhaps not on disk before `check_saved`. Where this raises some may have been made.

        Args:
            copies: what is copied, and the copy's spec: the same but for number and name.
            optimizers: what these keep beside the values is copied, too.
        """
        self._exchanges.check_open()
        forms = [
            ps_pb2.Initializer(name=COPY, numbers=json.dumps({"variable": source, "optimizers": list(optimizers)}))
            for source, _ in copies
        ]

        def copy(index: int) -> None:
            for (_, spec), form in zip(copies, forms, strict=True):
                self._create_there(index, spec, [(form, b"")])

        self._exchanges.on_each({index: functools.partial(copy, index) for index in range(self.num_servers)})

    def check_saved(self, names: Sequence[str]) -> None:
        """Return when these variables are as durable as they will be. UnknownVariableError if a server lacks one."""
        request = ps_pb2.DescribeRequest(job=self.job, variables=names, saved=True)
        work: dict[int, Callable[[], object]] = {}
        for index, server in enumerate(self._servers):
            work[index] = functools.partial(self._describe, server, request, timeout=_SLOWEST_FUNCTION)
        self._exchanges.on_each(work)

    def delete_variable(self, name: str, number: int, *, patient: bool = False) -> None:
        """Remove a variable everywhere: as far as the servers can be reached, or, if patient, waiting for them."""
        self._delete(ps_pb2.DeleteRequest(job=self.job, name=name, id=number), patient=patient)

    def delete_variables(self, prefix: str, *, patient: bool = False) -> bool:
        """Remove all whose names begin so, as `delete_variable`. False if a server was not reached."""
        if self._exchanges.closed:
            return True  # the job is over, and with it all its variables
        return self._delete(ps_pb2.DeleteRequest(job=self.job, prefix=prefix), patient=patient)

    def _delete(self, request: ps_pb2.DeleteRequest, *, patient: bool) -> bool:
        # A few times: what stays on one server would be in the way of a variable of that name. But not for long where
        # it is a cleanup behind an error that is being raised already.
        few_times = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=tenacity.wait_random_exponential(multiplier=0.02, max=0.25),
            stop=tenacity.stop_after_attempt(3) | tenacity.stop_after_delay(self._timeout),
            reraise=True,
        )
        everywhere = True
        for server in self._servers:
            delete = functools.partial(server.ask, server.control.delete, request, self._timeout)
            if patient:
                self._exchanges.retrying(server, delete)
                continue
            try:
                few_times(delete)
            except (grpc.RpcError, UnavailableError):
                everywhere = False
        return everywhere

    def describe_variable(self, name: str) -> ps_pb2.VariableSpec:
        """Look a variable up. Any server knows all of them."""
        return self._describe(self._servers[0], ps_pb2.DescribeRequest(job=self.job, variables=[name])).variables[0]

    def describe_optimizer(self, name: str) -> ps_pb2.OptimizerSpec:
        """Look an optimizer up; its iterations are those of the server that has counted most."""
        request = ps_pb2.DescribeRequest(job=self.job, optimizers=[name])
        specs = [self._describe(server, request).optimizers[0] for server in self._servers]
        return max(specs, key=lambda spec: spec.iterations)

    def _describe(
        self,
        server: Server,
        request: ps_pb2.DescribeRequest,
        stub: Stub | None = None,
        timeout: float | None = None,
    ) -> ps_pb2.DescribeReply:
        self._exchanges.check_open()
        describe = (stub or server.control).describe

        def attempt() -> ps_pb2.DescribeReply:
            reply: ps_pb2.DescribeReply = server.ask(describe, request, timeout or self._timeout)
            return reply

        result: ps_pb2.DescribeReply = self._exchanges.retrying(server, attempt)
        return result
