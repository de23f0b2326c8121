"""A stream of request and reply in turn, used by one thread at a time: as a session needs it, and nothing more.

grpc moves what goes over a bidirectional stream by way of two threads of its own in the client: for one exchange five
switches of threads. `DirectStream` does without, as grpc's `SingleThreadedUnaryStream` does for calls that have one
request only: the calling thread starts the operations and waits for their events itself. Measured beside the other,
an exchange takes the client half the CPU, and 0.6 of the time.

It is built of what that option is built of, which is not a public interface: `grpc._cython.cygrpc`. Where grpc is
not as this module knows it, `open_stream` gives a `QueuedStream`, of public parts.

    open --send--> asked --receive--> open
    any  --the call ends: its status comes as an event--> ended; all later calls raise that
    any  --cancel, by any thread--> the same, with CANCELLED
    any  --close, by the thread that uses it--> cancelled, and its last events taken off
    any  --Ctrl-C in a wait--> ended: grpc has thrown the call away by then
"""

from __future__ import annotations

import importlib
import queue
from typing import Any, Protocol

import grpc

from pscluster.core.rpc import Stub

Metadata = tuple[tuple[str, str], ...]

try:
    cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
except ImportError:  # grpc is built otherwise one day
    cygrpc = None

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class StreamEndedError(grpc.RpcError):
    """How a stream ended, with what is asked of grpc's own errors."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        super().__init__(f"{code.name}: {details}")
        self._code, self._details, self._trailing = code, details, trailing

    def code(self) -> grpc.StatusCode:
        """OK, too, where the server ended it in order."""
        return self._code

    def details(self) -> str:
        """In words."""
        return self._details

    def trailing_metadata(self) -> Any:
        """What the server sent at the end."""
        return self._trailing


class Stream(Protocol):
    """What a session is made of."""

    def send(self, data: bytes) -> None:
        """Send a request. What is wrong with the stream, `receive` raises."""
        ...

    def receive(self) -> bytes:
        """Wait for the reply to what was sent. grpc.RpcError once the stream has ended, with OK if in order."""
        ...

    def cancel(self) -> None:
        """End the stream. Any thread may."""
        ...

    def close(self) -> None:
        """End the stream, by the thread that uses it."""
        ...


class QueuedStream:
    """A stream of grpc's public parts."""

    def __init__(self, stub: Stub, metadata: Metadata) -> None:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox = outbox
        self._call = stub.session(iter(outbox.get, None), metadata=metadata)
        # Without the sentinel the thread that reads the outbox would never end.
        if not self._call.add_callback(lambda: outbox.put(None)):
            outbox.put(None)  # it has ended already

    def send(self, data: bytes) -> None:
        """Hand it to grpc's thread."""
        self._outbox.put(data)

    def receive(self) -> bytes:
        """As grpc's other thread brings it."""
        try:
            data: bytes = next(self._call)
        except StopIteration:
            raise StreamEndedError(grpc.StatusCode.OK, "") from None
        return data

    def cancel(self) -> None:
        """Also ends the thread that sends."""
        self._outbox.put(None)
        self._call.cancel()

    def close(self) -> None:
        """The same."""
        self.cancel()


class DirectStream:
    """A stream that the calling thread drives; see the module's docstring.

    Raises:
        AttributeError, TypeError: grpc is not as this class knows it.
    """

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        operations = (
            (cygrpc.SendInitialMetadataOperation(metadata, 0),),
            (cygrpc.ReceiveStatusOnClientOperation(0),),
            (cygrpc.ReceiveInitialMetadataOperation(0),),
        )
        self._due = len(operations)  # batches of operations that were started, and whose event has not come
        self._sending = False
        # Not the error itself: with its traceback it would hold this, and whatever those hold who wait for a reply.
        self._ended: tuple[grpc.StatusCode, str, Any] | None = None
        inner: Any = channel
        self._call = inner._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            path.encode(),
            None,
            None,
            metadata,
            None,
            tuple((batch, None) for batch in operations),
            None,
        )

    def send(self, data: bytes) -> None:
        """Start to send; `receive` waits until it is sent, too."""
        self._sending = self._start(cygrpc.SendMessageOperation(data, 0))

    def receive(self) -> bytes:
        """Take events off until the reply is there and the request is gone."""
        reply: bytes | None = None
        waiting = self._start(cygrpc.ReceiveMessageOperation(0))
        while waiting or self._sending:
            for operation in self._next():
                if operation.type() == cygrpc.OperationType.receive_message:
                    reply, waiting = operation.message(), False
        if reply is not None:
            return reply
        self._drain()  # no reply announces the end
        assert self._ended is not None
        raise StreamEndedError(*self._ended)

    def cancel(self) -> None:
        """The thread that waits sees the end."""
        if self._ended is None:
            self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "the session was closed")

    def close(self) -> None:
        """Nothing is left of it in grpc."""
        self.cancel()
        self._drain()

    def _start(self, operation: Any) -> bool:
        """True if there will be an event; none once the stream has ended."""
        if self._ended is not None or not self._call.operate((operation,), None):
            return False
        self._due += 1
        return True

    def _drain(self) -> None:
        while self._due:
            self._next()

    def _next(self) -> Any:
        """What the next event is of."""
        try:
            operations = self._call.next_event().batch_operations
        except BaseException:
            self._due, self._sending = 0, False
            self._ended = grpc.StatusCode.CANCELLED, "interrupted", ()
            raise
        self._due -= 1
        for operation in operations:
            if operation.type() == cygrpc.OperationType.send_message:
                self._sending = False
            elif operation.type() == cygrpc.OperationType.receive_status_on_client:
                details = operation.details()
                text = details.decode(errors="replace") if isinstance(details, bytes) else str(details or "")
                code = _CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
                self._ended = code, text, operation.trailing_metadata()
        return operations


_direct = cygrpc is not None


def open_stream(channel: grpc.Channel, path: str, stub: Stub, metadata: Metadata) -> Stream:
    """A stream for a session: a direct one where that is possible."""
    global _direct
    if _direct:
        try:
            return DirectStream(channel, path, metadata)
        except (AttributeError, TypeError):
            _direct = False
    return QueuedStream(stub, metadata)
