"""A stream over gRPC."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from pscluster.core.transport.base import BeforeWaiting, Destination, Metadata, StreamEndedError
from pscluster.core.transport.frames import CHUNK_BYTES, Buffer

_QUEUED = 4  # messages queued for grpc's thread before `send` waits


class GrpcStream:
    """A call over gRPC; see `base.Stream`. Raises grpc.RpcError if the server has to prove itself, and does not."""

    frame_bytes = CHUNK_BYTES

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata = (), *, prompt: bool = False) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(sys.maxsize if prompt else _QUEUED)
        self._over = False
        call: Any = channel.stream_stream(path)
        self._call = call(self._requests(), metadata=metadata)
        if not self._call.add_callback(self._end):
            self._end()  # it has ended already

    def _requests(self) -> Iterator[bytes]:
        """Yield messages to grpc's thread, until the sentinel."""
        while (data := self._outbox.get()) is not None:
            self._room.release()
            yield data

    def _end(self) -> None:
        self._over = True
        self._room.release()
        self.end()

    def send(self, *buffers: Buffer, last: bool = False, before_waiting: BeforeWaiting | None = None) -> None:
        if before_waiting is not None:
            before_waiting()
        self._room.acquire()
        if self._over:
            self._room.release()  # for the next one
            return
        self._outbox.put(b"".join(buffers))
        if last:
            self.end()

    def end(self) -> None:
        self._outbox.put(None)

    def receive(self, destination: Destination | None = None) -> bytes:
        try:
            data: bytes = next(self._call)
        except StopIteration:
            raise StreamEndedError(grpc.StatusCode.OK, "") from None
        if destination is None:
            return data
        destination(data, len(data))
        return b""

    def cancel(self) -> None:
        self.end()  # ends grpc's thread that sends
        self._call.cancel()

    close = release = cancel
