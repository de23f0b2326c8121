"""Connections to other workers, for members of gangs, kept from one gang to the next: channels and data streams."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import grpc

from pscluster.core.errors import PsClusterError
from pscluster.core.role.options import RoleOptions
from pscluster.core.security.channel import reporting_calls
from pscluster.core.transport.base import Cancellable, Stream
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello
from pscluster.core.transport.transport import Transport
from pscluster.v1 import node_pb2, worker_pb2
from pscluster.worker.collectives.cached_thread_pool import CachedThreadPool
from pscluster.worker.collectives.gang import Member

_PATH = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Exchange"

_SEND_BYTES = 1 << 20
"""Of the send buffer. All members send and receive at once, and there may be more of them than cores: with a smaller
one a core changes between them so often that an all-reduce of 40 MiB among four takes a fifth longer."""


class _PeerConnection:
    """The connection to one incarnation of a worker."""

    def __init__(self, peer: PeerAddress, incarnation: int, identity: node_pb2.Identity) -> None:
        self.peer, self.incarnation, self._identity = peer, incarnation, identity
        self._lock = threading.Lock()
        # A member may compute for long before it takes what it was sent.
        self._transport = Transport(peer, self._hello, send_bytes=_SEND_BYTES, wait_for_room=True)
        self._version = 0 if peer.tls is None else peer.tls.refresh()
        self._channel = open_peer_channel(peer)
        self._retired: grpc.Channel | None = None  # of the previous certificate

    def _hello(self) -> None:
        self._transport.learn(self.peer, say_hello(self._channel, self.peer, self._identity))

    def leads_to(self, member: Member) -> bool:
        return (self.peer.address, self.incarnation) == (member.address, member.incarnation)

    def answers(self, seconds: float) -> bool:
        """Return whether the worker answers within this many seconds. It may be computing."""
        try:
            say_hello(self._channel, self.peer, self._identity, seconds)
        except (PsClusterError, ValueError):  # ValueError: the channel was closed, for another process at that address
            return False
        return True

    def open(self, report: Callable[[Any], None]) -> Stream:
        version = 0 if self.peer.tls is None else self.peer.tls.refresh()  # reads files: not under the lock
        outdated = None
        with self._lock:
            if version > self._version:
                # Calls on the old channel end normally: it is closed at the next renewal.
                outdated, self._retired = self._retired, self._channel
                self._version, self._channel = version, open_peer_channel(self.peer)
        if outdated is not None:
            outdated.close()
        with reporting_calls(report):
            return self._transport.open(self._channel, _PATH)

    def open_idle(self) -> Stream | None:
        return self._transport.connect_idle(_PATH)

    def close(self) -> None:
        self._transport.close()
        for channel in (self._retired, self._channel):
            if channel is not None:
                channel.close()


class ConnectionPool:
    """Connections to other workers, kept from one gang to the next. Thread-safe."""

    def __init__(self, identity: node_pb2.Identity, options: RoleOptions) -> None:
        self._identity, self._options = identity, options
        self._lock = threading.Lock()
        self._connections: dict[int, _PeerConnection] = {}
        self.links: weakref.WeakSet[Cancellable] = weakref.WeakSet()  # that are open, or will be
        self.threads = CachedThreadPool("exchange")

    def open(self, member: Member, report: Callable[[Any], None]) -> Stream:
        """Open an exchange with a member. Raises grpc.RpcError, or one of our errors."""
        return self._connection_to(member).open(report)

    def open_idle(self, member: Member) -> Stream | None:
        """Open an exchange with a member on a connection that another gang has left. None if there is none."""
        with self._lock:
            connection = self._connections.get(member.worker)
            if connection is None or not connection.leads_to(member):
                return None
        return connection.open_idle()

    def answers(self, member: Member, seconds: float) -> bool:
        """Return whether a member's worker answers within this many seconds: if not, it is frozen or cut off."""
        return self._connection_to(member).answers(seconds)

    def _connection_to(self, member: Member) -> _PeerConnection:
        options, outdated = self._options, None
        with self._lock:
            connection = self._connections.get(member.worker)
            if connection is None or not connection.leads_to(member):
                peer = PeerAddress(
                    "worker", member.worker, member.address, options.tls, options.token, tls_name=member.tls_name
                )
                peer.check_plain(insecure=options.insecure)
                # A new incarnation may be a new process: connections to the old one would only seem to be usable.
                outdated, connection = connection, _PeerConnection(peer, member.incarnation, self._identity)
                self._connections[member.worker] = connection
        if outdated is not None:
            outdated.close()
        return connection

    def close(self) -> None:
        with self._lock:
            connections, self._connections = list(self._connections.values()), {}
        for link in list(self.links):
            link.cancel()
        for connection in connections:
            connection.close()
        self.threads.close()
