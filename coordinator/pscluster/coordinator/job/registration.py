"""Workers that join: the service at which they register, and the rules for where they may be.

A worker registers, and the coordinator dials it and attaches to it, as to one that TF_CONFIG names. Before anything
changes, this is checked, in this order:

    who it is       with mutual TLS its certificate is a worker's (`access`), and with a token it has proved that it
                    knows it (`authenticator`): by the time that a request is here
    how often       from one address at most RATE registrations a second, and BURST at once
    what it runs    the version of the coordinator; the job, if it names one
    where it is     the address that its call comes from, with the port that it names; or the one that it advertises,
                    which must be within the coordinator's ranges. Over a Unix socket: one in the coordinator's folder
    which task      as `members` decides: nobody takes the task of a worker that is there

So whoever knows the token can make the coordinator dial a port of his own machine, and nothing else. What answers there
must prove that it knows the token, and be the process that has registered (its boot id), before it gets a function.

Its certificate is not asked for a host name, which such workers do not have, but for that of its role (`role_host`).

What becomes of the work of a worker that leaves or dies: see `worker_link`. Nothing is kept of a registration but an
entry of `members`, a handle of the dispatcher and a peer of the job.
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

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.job.members import Claim
from pscluster.core.cluster.spec import parse_address
from pscluster.core.errors import ConfigurationError, ProtocolError, RefusedError, UnavailableError
from pscluster.core.ids import check_version
from pscluster.core.limits import check_name
from pscluster.core.role.options import RoleOptions
from pscluster.core.sanitize import shown
from pscluster.core.security.access import role_host
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.peer_names import address_of, host_of, is_on_unix_socket
from pscluster.core.transport.unix_sockets import path_of
from pscluster.v1 import coordinator_pb2, node_pb2

logger = logging.getLogger(__name__)

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]

RATE, BURST = 50.0, 200.0
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
                f"--worker-range {text!r} is no network ({error}); give one such as 10.0.0.0/8"
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
    """Return the address at which to dial a worker; `caller` is gRPC's name of it, `own` the coordinator's address.

    Raise RefusedError if it is not allowed, ProtocolError if it is malformed.
    """
    if is_on_unix_socket(caller):
        folder = os.path.dirname(path_of(own) or "")
        if not request.path or os.path.dirname(request.path) != folder:
            raise RefusedError(
                f"the worker listens at {shown(request.path) or 'a port'!r}, but one that joins over a Unix socket has "
                f"its own in the coordinator's folder: give --bind unix:{folder}/worker-0"
            )
        address = f"unix:{request.path}"
    else:
        if request.path:
            raise RefusedError("the worker listens at a Unix socket, but joins over TCP: give it --bind HOST:PORT")
        address = f"{_host_of(request.host, host_of(caller), ranges)}:{request.port}"
    try:
        parse_address(address, "the worker's address")
    except ConfigurationError as error:
        raise ProtocolError(str(error)) from None
    return address


def _host_of(advertised: str, caller: str, ranges: Sequence[Network]) -> str:
    """Return the host to dial, in brackets if it is IPv6."""
    try:
        given = ipaddress.ip_address(advertised.strip("[]") or caller)
        mine = ipaddress.ip_address(caller)
    except ValueError:
        raise RefusedError(
            f"the worker advertises {shown(advertised[:80])!r}, which is no IP address: give --advertise HOST, or "
            "HOST:PORT, with the IP address of its machine or pod"
        ) from None
    if given != mine and not (given.is_loopback and mine.is_loopback) and not any(given in net for net in ranges):
        raise RefusedError(
            f"the worker advertises {given}, but calls from {mine}, and the coordinator allows no other address: leave "
            "--advertise out, or give the coordinator --worker-range with a network that has it"
        )
    return f"[{given}]" if given.version == 6 else str(given)


class Registration:
    """Servicer of pscluster.v1.Coordinator. `context` returns the job; None once it is over."""

    def __init__(self, context: Callable[[], JobContext | None], own: str, options: RoleOptions) -> None:
        """Raise ConfigurationError if the options have a wrong range."""
        self._context, self._own, self._options = context, own, options
        self._ranges = parse_ranges(options.worker_ranges)
        self._lock = threading.Lock()
        self._limit = RateLimit()

    def register(
        self, request: coordinator_pb2.RegisterRequest, call: grpc.ServicerContext
    ) -> coordinator_pb2.RegisterReply:
        context = self._context()
        if context is None or not context.connected:
            raise UnavailableError("the coordinator is not ready for workers yet")
        with self._lock:
            if not self._limit.take(address_of(call.peer()), time.monotonic()):
                raise UnavailableError("too many registrations from there: the worker tries again")
        check_version(request.identity, context.request.coordinator)
        if request.identity.role != "worker":
            raise ProtocolError(f"a {request.identity.role} registers, but only workers join a running cluster")
        check_name(request.job_name, "a job's name")
        if request.job_name and request.job_name != context.request.job_name:
            raise RefusedError(
                f"the worker is for the job {shown(request.job_name)!r}, and this coordinator's is "
                f"{shown(context.request.job_name)!r}: give the worker the address of its own coordinator, or another "
                "--job-name, or none"
            )
        address = place_of(request, call.peer(), self._own, self._ranges)
        claim = Claim(request.secret, request.task, request.last_index if request.had_index else None)
        peer = context.register(claim, self._peer(address), request.identity.boot_id)
        return coordinator_pb2.RegisterReply(
            index=peer.index,
            address=address,
            coordinator=context.request.coordinator.name,
            job_name=context.request.job_name,
        )

    def _peer(self, address: str) -> PeerAddress:
        """Return a worker at that address, whose index is not known yet. RefusedError if it can't be dialled safely."""
        options = self._options
        name = "" if options.tls is None else role_host("worker")
        peer = PeerAddress("worker", 0, address, options.tls, options.token, tls_name=name)
        try:
            peer.check_plain(insecure=options.insecure)
        except ConfigurationError as error:
            raise RefusedError(str(error)) from None
        return peer


def addresses_of(peers: Sequence[PeerAddress]) -> list[node_pb2.WorkerAddress]:
    """Return what the coordinator's status says of its workers."""
    return [node_pb2.WorkerAddress(index=peer.index, address=peer.address, tls_name=peer.tls_name) for peer in peers]
