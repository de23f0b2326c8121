"""The interface of both transports, gRPC and the data plane: a client's stream, and a handler's call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import grpc

from pscluster.core.transport.frames import CHUNK_BYTES, Buffer

Metadata = tuple[tuple[str, str], ...]

Destination = Callable[[bytes, int], Iterable[memoryview] | None]
"""Returns memory for the rest of a message, given its first bytes and its size, so that the rest is not copied.
None if it needs the whole message, which a second call then passes."""

BeforeWaiting = Callable[[], object]
"""Called by a thread before it waits until the other end receives more."""

Readable = Callable[[float], bool]
"""Waits until a message begins to arrive, or the call ends or breaks; False if neither happens within these seconds.
For one thread at a time."""

CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamEndedError(grpc.RpcError):
    """How a stream ended, with the methods of grpc's own errors."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        """Return the status; OK if the server ended the stream cleanly."""
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing


class Cancellable(Protocol):
    """A call's context or connection, as far as it takes to end it."""

    def cancel(self) -> object:
        """End the call, from any thread; one that waits for its messages gets an exception."""


class Stream(Protocol):
    """A client's side of a call. One thread receives, and one at a time sends."""

    frame_bytes: int  # recommended maximum payload of a frame

    def send(self, *buffers: Buffer, last: bool = False, before_waiting: BeforeWaiting | None = None) -> None:
        """Send a message, waiting for room unless opened with `prompt`; `receive` raises the stream's errors.

        `before_waiting` is called before it waits, or in any case if the transport can't tell.
        """

    def end(self) -> None:
        """Announce that no more messages follow."""

    def receive(self, destination: Destination | None = None) -> bytes:
        """Wait for a message; return it or put it into `destination`. Raise grpc.RpcError at its end, even if OK."""

    def cancel(self) -> None:
        """End the stream, from any thread."""

    def close(self) -> None:
        """End the stream, from the thread that receives, or while none does."""

    def release(self) -> None:
        """Close the stream, keeping its connection for the next call if this one is over."""


class ServerCall:
    """What a handler can do with its call beyond gRPC's context; here for gRPC, which has whole messages only."""

    frame_bytes = CHUNK_BYTES  # recommended maximum payload of a frame

    def reply(self, buffers: Sequence[Buffer]) -> Any:
        """Return a message of these buffers, for a handler to yield. They may change once the next one is requested."""
        return b"".join(buffers)

    def sender(self) -> Callable[[bytes], bool] | None:
        """Return a function that sends a message from any thread, while the handler is not producing an answer.

        It returns False if it fails: the handler must then yield the message, which raises the reason. None: the
        handler must yield every message.
        """
        return None

    def listener(self) -> Callable[[], Readable] | None:
        """Return what makes a `Readable` for a thread that requests messages: any may, but one at a time.

        None: only the handler's thread may request them, and can't tell before whether it will wait.
        """
        return None

    def receive_into(self, destination: Destination) -> None:
        """Put the messages that follow there, if the transport can: the handler reads b"" instead of each."""

    def has_taken_memory(self) -> None:
        """Stop counting messages for admission: the handler has reserved memory for all that follow."""


_GRPC = ServerCall()


def server_call(context: grpc.ServicerContext) -> ServerCall:
    """Return the transport's interface to this call."""
    return context if isinstance(context, ServerCall) else _GRPC
