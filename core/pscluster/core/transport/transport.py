"""The way to a role: its data plane where that is reachable, else gRPC. No other module asks which."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import grpc

from pscluster.core.errors import PsClusterError
from pscluster.core.transport.base import Metadata, Stream
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.grpc_streams import GrpcStream
from pscluster.core.transport.tcp.client import DataPort


class Transport(DataPort):
    """The way to one role. Thread-safe.

    `say_hello` shakes hands with the role, and gives the reply to `learn`: called now and then to find out where its
    data plane is. None if the owner does so by itself. `send_bytes` is the size of the send buffers of its connections
    within a machine, if not the usual one. If `wait_for_room`, a call may wait for room for any time.
    """

    def __init__(
        self,
        peer: PeerAddress,
        say_hello: Callable[[], object] | None = None,
        *,
        send_bytes: int | None = None,
        wait_for_room: bool = False,
    ) -> None:
        super().__init__(str(peer), peer.token, peer.tls, peer.tls_name, send_bytes, wait_for_room=wait_for_room)
        self._say_hello = say_hello

    def _ask(self) -> None:
        if self._say_hello is not None and self.should_ask():
            with contextlib.suppress(PsClusterError):  # the call itself fails, too
                self._say_hello()

    def open(self, channel: grpc.Channel, path: str, metadata: Metadata = (), *, prompt: bool = False) -> Stream:
        """Open a call, with `channel` for gRPC. Raise grpc.RpcError if the server does not prove that it is this role.

        With `prompt`, sending never waits, in any thread: messages without room are kept in memory.
        """
        self._ask()
        stream = self.connect(path, metadata, prompt=prompt)
        return stream or GrpcStream(channel, path, metadata, prompt=prompt)

    def is_outdated(self, stream: Stream) -> bool:
        """Return whether a new stream would be faster, since the role can be reached in a better way now."""
        self._ask()
        return isinstance(stream, GrpcStream) and self.usable()
