"""The way to a role: its data plane where that is reachable, else gRPC. No other module asks which."""

from __future__ import annotations

import grpc

from pscluster.core.transport.base import Metadata, Stream
from pscluster.core.transport.channels import PeerAddress
from pscluster.core.transport.grpc_streams import GrpcStream
from pscluster.core.transport.tcp.client import DataPort


class Transport(DataPort):
    """The way to one role. Thread-safe."""

    def __init__(self, peer: PeerAddress) -> None:
        super().__init__(str(peer), peer.token, peer.tls)

    def open(self, channel: grpc.Channel, path: str, metadata: Metadata = (), *, prompt: bool = False) -> Stream:
        """Open a call, with `channel` for gRPC. Raise grpc.RpcError if the server does not prove that it is this role.

        With `prompt`, sending never waits, in any thread: messages without room are kept in memory.
        """
        stream = self.connect(path, metadata, prompt=prompt)
        return stream or GrpcStream(channel, path, metadata, prompt=prompt)

    def is_outdated(self, stream: Stream) -> bool:
        """Return whether the stream uses gRPC although the data plane has become reachable since."""
        return isinstance(stream, GrpcStream) and self.usable()
