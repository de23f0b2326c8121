"""What Python's gRPC can reach: grpc_side.py [--ps N] [--workers N]; see `bare`.

Large arrays are sent as frames of 1 MiB over streams, small requests over streams that the calling thread drives (those
of our own sessions, since gRPC's public ones are slower).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bare

from pscluster.core.transport.channels import CHANNEL_OPTIONS, SERVER_OPTIONS

FRAME = 1 << 20


def server(data: bare.Data) -> None:
    """Answer until killed."""
    import grpc

    def pull(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        values = data.held(int(request))
        for start in range(0, len(values), FRAME):
            yield bytes(values[start : start + FRAME])

    def take(frames: Iterator[bytes], values: memoryview) -> None:
        at = 0
        for frame in frames:
            values[at : at + len(frame)] = frame
            at += len(frame)

    def push(frames: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        take(frames, data.held(int(next(frames))))
        return b"done"

    def add(frames: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
        values = data.scratch(int(next(frames)))
        take(frames, values)
        data.add(values)
        return b"done"

    def exchange(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            yield bytes(data.answer(request))

    handlers = {
        "pull": grpc.unary_stream_rpc_method_handler(pull),
        "push": grpc.stream_unary_rpc_method_handler(push),
        "add": grpc.stream_unary_rpc_method_handler(add),
        "exchange": grpc.stream_stream_rpc_method_handler(exchange),
    }
    running = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    print(port, flush=True)
    running.wait_for_termination()


class Client(bare.Client):
    """Over gRPC."""

    def __init__(self, ports: Sequence[int]) -> None:
        import grpc
        from grpc.experimental import ChannelOptions

        from pscluster.core.transport.grpc_streams import GrpcStream

        super().__init__(len(ports))
        options = [*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1)]
        self._channels: list[Any] = [grpc.insecure_channel(f"127.0.0.1:{port}", options=options) for port in ports]
        self._sessions = [GrpcStream(channel, "/bare/exchange", ()) for channel in self._channels]

    def pull(self, size: int) -> None:
        import numpy as np

        share = size // self._servers

        def take(server: int) -> None:
            values, at = memoryview(np.empty(share, np.uint8)), 0
            for frame in self._channels[server].unary_stream("/bare/pull")(str(share).encode()):
                values[at : at + len(frame)] = frame
                at += len(frame)

        self.on_each(take)

    def push(self, size: int) -> None:
        self._give("/bare/push", size)

    def add(self, size: int) -> None:
        self._give("/bare/add", size)

    def _give(self, method: str, size: int) -> None:
        share = size // self._servers

        def frames(server: int) -> Iterator[bytes]:
            values = self.warm(share, server)
            yield str(share).encode()
            for at in range(0, share, FRAME):
                yield bytes(values[at : at + FRAME])

        self.on_each(lambda server: self._channels[server].stream_unary(method)(frames(server)))

    def exchange(self, requests: Sequence[bare.Parts]) -> list[Any]:
        for session, request in zip(self._sessions, requests, strict=True):
            session.send(b"".join(request))
        return [session.receive() for session in self._sessions]


def versions() -> dict[str, str]:
    """The versions of what it is measured with."""
    import grpc

    return {"grpcio": grpc.__version__}


if __name__ == "__main__":
    bare.main(__file__, server, Client, versions)
