"""Workers that join, and parameter servers that return: where they register, and the rules for where they may be.

A worker registers, and the coordinator dials it and attaches to it, as to one that TF_CONFIG names. Before anything
changes, this is checked, in this order:

    who it is       with mutual TLS its certificate is a worker's (`access`), and with a token it has proved that it
                    knows it (`authenticator`): by the time that a request is here
    how often       from one address at most RATE registrations a second, and BURST at once
    what it runs    the version of the coordinator; the job, if it names one
    where it is     the address that its call comes from, with the port that it names; or the one that it advertises,
                    which must be within the coordinator's ranges, or where its cluster has started a task. Over a
                    Unix socket: one in the coordinator's folder
    which task      as `members` decides: nobody takes the task of a worker that is there

So whoever knows the token can make the coordinator dial a port of his own machine, or of one on which this process has
started a task, and nothing else. What answers there must prove that it knows the token, and be the process that has
registered (its boot id), before it gets a function.

Its certificate is not asked for a host name, which such workers do not have, but for that of its role (`role_host`).

What becomes of the work of a worker that leaves or dies: see `worker_link`. Nothing is kept of a registration but an
entry of `members`, a handle of the dispatcher and a peer of the job.

A parameter server registers in the same way, also while the coordinator waits for its tasks. It is dialled before it is
answered, to see what it holds: `server_places` decides whether the task is there from now on, or waits to be added.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import grpc

from pscluster.coordinator.job import servers
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.job.members import Claim
from pscluster.coordinator.job.server_places import ServerClaim, check_index
from pscluster.core.cluster.addresses import parse_address
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError, ProtocolError, PsClusterError, RefusedError, UnavailableError
from pscluster.core.ids import check_version
from pscluster.core.limits import check_name
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.access import check_role, role_host
from pscluster.core.transport.channels import PeerAddress, explain, open_peer_channel, say_hello
from pscluster.core.transport.peer_names import address_of, host_of, is_on_unix_socket
from pscluster.core.transport.unix_sockets import path_of
from pscluster.v1 import coordinator_pb2, node_pb2

logger = logging.getLogger(__name__)

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]

LOOK_SECONDS = 3.0
"""A server that registers has this long to answer at its place, and the one that it would follow at its own."""

RATE, BURST = 50.0, 200.0
_MAX_DIGITS = 6
_MAX_CALLERS = 1024  # addresses whose rate is known; a new one replaces the one that was quiet for longest

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse_ranges(texts: Sequence[str]) -> list[Network]:
    """Return the networks. Raise ConfigurationError if a text is none."""
    networks: list[Network] = []
    for text in texts:
        try:
            networks.append(ipaddress.ip_network(text))
        except ValueError as error:
            raise ConfigurationError(
                f"--worker-range {text!r} is not a network ({error}); give one such as 10.0.0.0/8"
            ) from None
    return networks


class RateLimit:
    """How often each caller may call: a token bucket each. The owner serializes calls."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate, self._burst = rate, burst
        self._left: dict[str, tuple[float, float]] = {}  # by caller: tokens, and when; the last to call at the end

    def take(self, caller: str, now: float) -> bool:
        """Return whether the caller may call now."""
        left, at = self._left.pop(caller, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        if len(self._left) >= _MAX_CALLERS:
            del self._left[next(iter(self._left))]
        self._left[caller] = (left - 1 if left >= 1 else left), now
        return left >= 1


def place_of(request: coordinator_pb2.RegisterRequest, caller: str, own: str, ranges: Sequence[Network] = ()) -> str:
    """Return the address at which to dial one that registers; `caller` is gRPC's name of it, `own` the coordinator's.

    Raise RefusedError if it is not allowed, ProtocolError if it is malformed.
    """
    who = "ps" if request.identity.role == "ps" else "worker"
    if is_on_unix_socket(caller):
        folder = os.path.dirname(path_of(own) or "")
        if not request.path or os.path.dirname(request.path) != folder:
            raise RefusedError(
                f"the {who} listens at {shown(request.path) or 'a port'!r}, but one that joins over a Unix socket has "
                f"its own in the coordinator's folder: give --bind unix:{folder}/{who}-0"
            )
        address = f"unix:{request.path}"
    else:
        if request.path:
            raise RefusedError(f"the {who} listens at a Unix socket, but joins over TCP: give it --bind HOST:PORT")
        address = f"{_host_of(who, request.host, host_of(caller), ranges)}:{request.port}"
    try:
        parse_address(address, f"the {who}'s address")
    except ConfigurationError as error:
        raise ProtocolError(str(error)) from None
    return address


def _host_of(who: str, advertised: str, caller: str, ranges: Sequence[Network]) -> str:
    """Return the host to dial, in brackets if it is IPv6."""
    try:
        given = ipaddress.ip_address(advertised.strip("[]") or caller)
        mine = ipaddress.ip_address(caller)
    except ValueError:
        raise RefusedError(
            f"the {who} advertises {shown(advertised[:80])!r}, which is not an IP address: give --advertise HOST, or "
            "HOST:PORT, with the IP address of its machine or pod"
        ) from None
    if given != mine and not (given.is_loopback and mine.is_loopback) and not any(given in net for net in ranges):
        raise RefusedError(
            f"the {who} advertises {given}, but calls from {mine}, and the coordinator allows no other address: leave "
            "--advertise out, or give the coordinator --worker-range with a network that has it"
        )
    return f"[{given}]" if given.version == 6 else str(given)


class Registration:
    """Servicer of pscluster.v1.Coordinator. `context` returns the job; None once it is over."""

    def __init__(
        self,
        context: Callable[[], JobContext | None],
        own: str,
        options: RoleOptions,
        task_hosts: Callable[[], Sequence[str]] = list,
    ) -> None:
        """Raise ConfigurationError if the options have a wrong range.

        `task_hosts` returns addresses that roles may advertise, beside those in the options' ranges.
        """
        self._context, self._own, self._options, self._task_hosts = context, own, options, task_hosts
        self._ranges = parse_ranges(options.worker_ranges)
        self._lock = threading.Lock()
        self._limit = RateLimit()

    def register(
        self, request: coordinator_pb2.RegisterRequest, call: grpc.ServicerContext
    ) -> coordinator_pb2.RegisterReply:
        context, role = self._context(), request.identity.role
        if context is None or context.closed or not (context.connected or role == "ps"):
            raise UnavailableError("the coordinator is not ready for workers yet")
        with self._lock:
            if not self._limit.take(address_of(call.peer()), time.monotonic()):
                raise UnavailableError("too many registrations from this address: trying again")
        check_version(request.identity, context.request.coordinator)
        if role not in ("worker", "ps"):
            raise ProtocolError(f"a {role} registers, but only workers and parameter servers join a running cluster")
        check_role(call, role, f"registering as a {role}")
        check_name(request.job_name, "a job's name")
        if request.job_name and request.job_name != context.request.job_name:
            raise RefusedError(
                f"the {role} is for the job {shown(request.job_name)!r}, and this coordinator's is "
                f"{shown(context.request.job_name)!r}: give the {role} the address of its own coordinator, or another "
                "--job-name, or none"
            )
        ranges = [*self._ranges, *parse_ranges(self._task_hosts())]
        address = place_of(request, call.peer(), self._own, ranges)
        if role == "ps":
            return self._register_server(context, request, address)
        claim = Claim(request.secret, request.task, request.last_index if request.had_index else None)
        peer = context.register(claim, self._peer("worker", address), request.identity.boot_id)
        return coordinator_pb2.RegisterReply(
            index=peer.index,
            address=address,
            coordinator=context.request.coordinator.name,
            job_name=context.request.job_name,
        )

    def _register_server(
        self, context: JobContext, request: coordinator_pb2.RegisterRequest, address: str
    ) -> coordinator_pb2.RegisterReply:
        if not (request.task.isascii() and request.task.isdecimal() and len(request.task) <= _MAX_DIGITS):
            raise ProtocolError(f"a parameter server registers as {shown(request.task[:80])!r}; give its index")
        index = int(request.task)
        check_index(index, context.client.num_servers)
        peer = self._peer("ps", address, index)
        hello = self._hello(peer, context)
        if hello.identity.boot_id != request.identity.boot_id:
            raise RefusedError(f"another process answers at {address} than the one that registers as {peer.task}")
        claim = ServerClaim(index, address, request.identity.boot_id, hello.store_id)
        if index >= context.client.num_servers:
            if not context.connected:
                raise UnavailableError("the job has not started yet")
            servers.note_waiting(context, claim, peer)
            return coordinator_pb2.RegisterReply(
                index=index,
                address=address,
                coordinator=context.request.coordinator.name,
                job_name=context.request.job_name,
                waits=True,
            )
        present = context.client.place_of(peer)
        answers = not present.is_unregistered and present.address != address and self._is_at(present, context)
        servers.register(context, claim, peer, present, answers=answers)
        return coordinator_pb2.RegisterReply(
            index=index,
            address=context.client.place_of(peer).address,
            coordinator=context.request.coordinator.name,
            job_name=context.request.job_name,
        )

    def _hello(self, peer: PeerAddress, context: JobContext) -> node_pb2.HelloReply:
        """Return what answers at the place of a server. UnavailableError, or another of ours, if it is none."""
        with open_peer_channel(peer) as channel:
            try:
                return say_hello(channel, peer, context.request.coordinator, LOOK_SECONDS)
            except UnavailableError:
                why = explain(peer.address, peer.tls, peer.tls_name)
                raise UnavailableError(
                    f"the coordinator can't reach {peer}, which registers from there: {why}"
                ) from None

    def _is_at(self, peer: PeerAddress, context: JobContext) -> bool:
        """Return whether the server answers there."""
        try:
            self._hello(peer, context)
        except PsClusterError:  # it is another one, or nobody
            return False
        return True

    def _peer(self, role: str, address: str, index: int = 0) -> PeerAddress:
        """Return a role at that address, a worker under any index. RefusedError if it can't be dialled safely."""
        options = self._options
        name = "" if options.tls is None else role_host(role)
        peer = PeerAddress(role, index, address, options.tls, options.token, tls_name=name)
        try:
            peer.check_plain(insecure=options.insecure)
        except ConfigurationError as error:
            raise RefusedError(str(error)) from None
        return peer


def addresses_of(peers: Sequence[PeerAddress]) -> list[node_pb2.WorkerAddress]:
    """Return what the coordinator's status says of its workers."""
    return [node_pb2.WorkerAddress(index=peer.index, address=peer.address, tls_name=peer.tls_name) for peer in peers]
