"""The stream of one call on the data plane, as its client sees it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.base import CODES, BeforeWaiting, Destination, Metadata, StreamEndedError
from pscluster.core.transport.frames import DATA_FRAME_BYTES, Buffer
from pscluster.core.transport.tcp.packets import ClosedError, Connection, Kind, Packet, UnknownProtocolError
from pscluster.v1 import data_plane_pb2

if TYPE_CHECKING:
    from pscluster.core.transport.tcp.client import DataPort, Endpoint

# Sent by a role of another kind or cluster; calls over gRPC show what is wrong with ours.
_FROM_OTHER_SERVERS = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


class DataStream:
    """A call over a connection of the data plane; see `base.Stream`."""

    frame_bytes = DATA_FRAME_BYTES

    def __init__(
        self, port: DataPort, endpoint: Endpoint | None, connection: Connection, path: str, metadata: Metadata
    ) -> None:
        pairs = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in metadata]
        self._call: bytes | None = data_plane_pb2.DataCall(path=path, metadata=pairs).SerializeToString()
        self._port, self._endpoint, self._connection = port, endpoint, connection
        self._shut = False  # by this side
        self._is_dead = False  # nothing more can be sent
        self._ended = False
        self.reusable: Connection | None = None  # the connection, once the call is over and another may follow

    def send(self, *buffers: Buffer, last: bool = False, before_waiting: BeforeWaiting | None = None) -> None:
        packets: list[Packet] = [(Kind.MESSAGE, buffers)]
        if last:
            packets.append((Kind.END, ()))
            self._ended = True
        self._send(packets, before_waiting)

    def end(self) -> None:
        self._ended = True
        self._send([(Kind.END, ())])

    def _send(self, packets: list[Packet], before_waiting: BeforeWaiting | None = None) -> None:
        if self._call is not None:
            packets.insert(0, (Kind.CALL, (self._call,)))
            self._call = None
        try:
            self._put(packets, before_waiting)
        except OSError:
            self._is_dead = True
            self._connection.shut()  # messages that the server sent before can still be read

    def _put(self, packets: Sequence[Packet], _before_waiting: BeforeWaiting | None) -> None:
        self._connection.send(*packets, before_waiting=_before_waiting)

    def receive(self, destination: Destination | None = None) -> bytes:
        try:
            kind, body = self._connection.receive(destination)
        except ClosedError:
            self._broke()
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the connection was closed") from None
        except UnknownProtocolError as error:
            raise self._met_other_server(str(error)) from None
        except ProtocolError as error:
            raise StreamEndedError(grpc.StatusCode.INTERNAL, str(error)) from None
        except OSError as error:
            self._broke()
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, f"the connection broke: {error}") from None
        if kind is Kind.MESSAGE:
            return body
        if kind is not Kind.STATUS:
            raise self._met_other_server("received a packet that only clients send")
        try:
            status = data_plane_pb2.DataStatus.FromString(body)
        except DecodeError as error:
            raise self._met_other_server(f"received an invalid status: {error}") from None
        if self._ended:
            self.reusable = self._connection
        code = CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not status.trailing:  # not an error of the method
            self._port.avoid(status.details, self._endpoint, ask_again=False)
            code = grpc.StatusCode.UNAVAILABLE
        elif code in _FROM_OTHER_SERVERS:
            raise self._met_other_server(status.details)
        raise StreamEndedError(code, status.details, tuple((pair.key, pair.value) for pair in status.trailing))

    def _broke(self) -> None:
        if not self._shut:
            self._port.broke(self._endpoint)

    def _met_other_server(self, why: str) -> StreamEndedError:
        """Avoid the port, which another process has taken: the role has died, and will report its new one over gRPC."""
        self.reusable = None
        self._port.avoid(why, self._endpoint, ask_again=False)
        return StreamEndedError(grpc.StatusCode.UNAVAILABLE, why)

    def cancel(self) -> None:
        self._shut = self._is_dead = True
        self._connection.shut()

    def close(self) -> None:
        self._connection.shut()
        self._connection.break_off()

    @property
    def is_dead(self) -> bool:
        """Return whether it was cancelled, or has broken, even if all was received: no other call may follow."""
        return self._is_dead

    def release(self) -> None:
        self._port.give_back(self)


class PromptStream(DataStream):
    """A stream on which sending never waits, in any thread: a separate thread sends what there is no room for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lock = threading.Lock()
        self._backlog: deque[list[Packet]] = deque()
        self._sender: threading.Thread | None = None  # while there is a backlog
        self._closed = False

    def _put(self, packets: Sequence[Packet], _before_waiting: BeforeWaiting | None) -> None:
        with self._lock:
            if self._closed:
                return
            if self._sender is not None:
                self._backlog.append([(kind, (b"".join(body),)) for kind, body in packets])
            elif rest := self._connection.start_to_send(*packets):
                self._sender = threading.Thread(target=self._send_rest, args=(rest,), name="data-send", daemon=True)
                self._sender.start()

    def _send_rest(self, rest: bytes) -> None:
        try:
            self._connection.finish(rest)
            while True:
                with self._lock:
                    if not self._backlog:
                        self._sender = None
                        return
                    packets = self._backlog.popleft()
                self._connection.send(*packets)
        except OSError:  # nothing more will arrive; the receiving thread notices
            self._is_dead = True
            self._connection.shut()

    def close(self) -> None:
        self._connection.shut()
        with self._lock:
            self._closed, sender = True, self._sender
        if sender is not None:
            sender.join()
        self._connection.break_off()
