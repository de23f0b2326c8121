"""Bidirectional streams of bytes without threads of grpc's own.

grpc moves what goes over a bidirectional stream by way of two threads in the client: for one exchange five switches
of threads. `DirectStream` does without, as grpc's `SingleThreadedUnaryStream` does for calls that have one request
only: the threads that use it start the operations, and the one that receives waits for their events. Measured beside
the other, an exchange takes the client half the CPU, and 0.6 of the time; beside grpc.aio a third of the CPU.

It is built of what that option is built of, which is not a public interface: `grpc._cython.cygrpc`. Where grpc is
not as this module knows it, `open_raw_stream` gives a `QueuedStream`, of public parts.

One thread receives; any thread sends. What is sent while something is on its way waits its turn in memory: who sends
much without an answer bounds it.

    open  --send, end: nothing is on its way--> its operation is started
    open  --send, end: something is-----------> it waits; the receiving thread starts it at the event of the other
    any   --the call ends: its status comes as an event--> ended; what waits is dropped, all later calls raise that
    any   --cancel, by any thread--> the same, with CANCELLED
    any   --close, by the thread that receives--> cancelled, and its last events taken off
    any   --Ctrl-C in a wait--> ended: grpc has thrown the call away by then
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections import deque
from typing import Any, Protocol

import grpc

Metadata = tuple[tuple[str, str], ...]

try:
    cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
except ImportError:  # grpc is built otherwise one day
    cygrpc = None

CODES = {code.value[0]: code for code in grpc.StatusCode}


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
    """What goes over a call, in both directions."""

    def send(self, data: bytes) -> None:
        """Send a message; never waits. What is wrong with the stream, `receive` raises."""
        ...

    def end(self) -> None:
        """Nothing more will be sent."""
        ...

    def receive(self) -> bytes:
        """Wait for a message. grpc.RpcError once the stream has ended, with OK if in order."""
        ...

    def cancel(self) -> None:
        """End the stream. Any thread may."""
        ...

    def close(self) -> None:
        """End the stream, by the thread that receives, or while none does."""
        ...


class QueuedStream:
    """A stream of grpc's public parts."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox = outbox
        call: Any = channel.stream_stream(path)
        self._call = call(iter(outbox.get, None), metadata=metadata)
        # Without the sentinel the thread that reads the outbox would never end.
        if not self._call.add_callback(self.end):
            self.end()  # it has ended already

    def initial_metadata(self) -> Any:
        """Wait for what the server sends before all else; nothing, if the stream ends without it."""
        return self._call.initial_metadata() or ()

    def end_of(self) -> StreamEndedError:
        """Wait for the stream's end, and return it."""
        return StreamEndedError(self._call.code(), self._call.details() or "", self._call.trailing_metadata() or ())

    def send(self, data: bytes) -> None:
        """Hand it to grpc's thread."""
        self._outbox.put(data)

    def end(self) -> None:
        """The sentinel."""
        self._outbox.put(None)

    def receive(self) -> bytes:
        """As grpc's other thread brings it."""
        try:
            data: bytes = next(self._call)
        except StopIteration:
            raise StreamEndedError(grpc.StatusCode.OK, "") from None
        return data

    def cancel(self) -> None:
        """Also ends the thread that sends."""
        self.end()
        self._call.cancel()

    def close(self) -> None:
        """The same."""
        self.cancel()


class DirectStream:
    """A stream that its threads drive themselves; see the module's docstring.

    Raises:
        AttributeError, TypeError: grpc is not as this class knows it.
    """

    def __init__(self, channel: Any, path: str, metadata: Metadata) -> None:
        operations = (
            (cygrpc.SendInitialMetadataOperation(metadata, 0),),
            (cygrpc.ReceiveStatusOnClientOperation(0),),
            (cygrpc.ReceiveInitialMetadataOperation(0),),
        )
        self._lock = threading.Lock()  # of all below; held for starting an operation, never while one is waited for
        self._due = len(operations)  # batches of operations that were started, and whose event has not come
        self._sending = False
        self._outbox: deque[Any] = deque()  # operations behind the one that is on its way
        # Not the error itself: with its traceback it would hold this, and whatever those hold who wait for a reply.
        self._ended: tuple[grpc.StatusCode, str, Any] | None = None
        self._initial: Any = None  # metadata, once it has come
        self._call = channel._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS,
            path.encode(),
            None,
            None,
            metadata,
            None,
            tuple((batch, None) for batch in operations),
            None,
        )

    def initial_metadata(self) -> Any:
        """Wait for what the server sends before all else; nothing, if the stream ends without it."""
        while self._initial is None and self._due:
            self._next()
        return self._initial or ()

    def end_of(self) -> StreamEndedError:
        """Wait for the stream's end, and return it; messages that come before it are lost."""
        self._drain()
        assert self._ended is not None
        return StreamEndedError(*self._ended)

    def send(self, data: bytes) -> None:
        """Start to send, or let it wait until what is on its way is sent."""
        self._send(cygrpc.SendMessageOperation(data, 0))

    def end(self) -> None:
        """The last of what is sent."""
        self._send(cygrpc.SendCloseFromClientOperation(0))

    def _send(self, operation: Any) -> None:
        with self._lock:
            if self._sending:
                self._outbox.append(operation)
            else:
                self._sending = self._start(operation)

    def receive(self) -> bytes:
        """Take events off until a message is there."""
        with self._lock:
            waiting = self._start(cygrpc.ReceiveMessageOperation(0))
        message: bytes | None = None
        while waiting:
            for operation in self._next():
                if operation.type() == cygrpc.OperationType.receive_message:
                    message, waiting = operation.message(), False
        if message is not None:
            return message
        raise self.end_of()  # no message announces it

    def cancel(self) -> None:
        """The thread that waits sees the end."""
        if self._ended is None:
            self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "the stream was closed")

    def close(self) -> None:
        """Nothing is left of it in grpc."""
        self.cancel()
        self._drain()

    def _start(self, operation: Any) -> bool:
        """Under the lock. True if there will be an event; none once the stream has ended."""
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
            with self._lock:
                self._due, self._sending = 0, False
                self._ended = grpc.StatusCode.CANCELLED, "interrupted", ()
                self._outbox.clear()
            raise
        with self._lock:
            self._due -= 1
            for operation in operations:
                kind = operation.type()
                if kind in (cygrpc.OperationType.send_message, cygrpc.OperationType.send_close_from_client):
                    self._sending = bool(self._outbox) and self._start(self._outbox.popleft())
                elif kind == cygrpc.OperationType.receive_initial_metadata:
                    self._initial = operation.initial_metadata() or ()
                elif kind == cygrpc.OperationType.receive_status_on_client:
                    details = operation.details()
                    text = details.decode(errors="replace") if isinstance(details, bytes) else str(details or "")
                    code = CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
                    self._ended = code, text, operation.trailing_metadata()
                    self._outbox.clear()
        return operations


_direct = cygrpc is not None


def open_raw_stream(channel: grpc.Channel, path: str, metadata: Metadata) -> DirectStream | QueuedStream:
    """A stream of raw bytes for a method by its path: a direct one where that is possible."""
    global _direct
    if _direct:
        try:
            return DirectStream(channel, path, metadata)
        except (AttributeError, TypeError):
            _direct = False
    return QueuedStream(channel, path, metadata)
