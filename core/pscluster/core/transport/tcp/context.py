"""A handler's context on the data plane, with the interface of gRPC's own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import grpc

from pscluster.core.transport.base import Destination, Readable, ServerCall
from pscluster.core.transport.frames import DATA_FRAME_BYTES, Buffer
from pscluster.core.transport.tcp.packets import Connection, Kind
from pscluster.v1 import data_plane_pb2

logger = logging.getLogger(__name__)


class HandlerAborted(Exception):  # noqa: N818  (it ends a handler, as gRPC's own does; the caller gets the error)
    """Raised by `abort`."""


class DataContext(ServerCall, grpc.ServicerContext):
    """The context of one call."""

    frame_bytes = DATA_FRAME_BYTES
    destination: Destination | None = None  # for the next messages, if not for the handler
    has_room = False  # for all messages that follow: they are not counted for admission

    def __init__(
        self,
        connection: Connection,
        peer: str,
        call: data_plane_pb2.DataCall,
        shown: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._connection = connection
        self._shown = shown
        self._peer = peer
        self._metadata = tuple((pair.key, pair.value) for pair in call.metadata)
        self._lock = threading.Lock()
        self._active = True
        self._callbacks: list[Callable[[], None]] = []
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: tuple[tuple[str, str], ...] = ()

    def reply(self, buffers: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the buffers; the socket joins them."""
        return buffers

    def receive_into(self, destination: Destination) -> None:
        self.destination = destination

    def has_taken_memory(self) -> None:
        self.has_room = True

    def sender(self) -> Callable[[bytes], bool]:
        return self.send

    def listener(self) -> Callable[[], Readable] | None:
        return self._connection.listen if self._connection.can_listen else None

    def send(self, message: bytes) -> bool:
        """Send a message outside of the handler's answers; see `ServerCall.sender`."""
        try:
            self._connection.send((Kind.MESSAGE, (message,)))
        except OSError:
            self._connection.shut()  # half of it may be sent already: nothing can follow it
            return False
        return True

    def is_active(self) -> bool:
        return self._active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        with self._lock:
            if self._active:
                self._callbacks.append(callback)
            return self._active

    def end(self) -> None:
        """End the context: the call is over, or its caller has disconnected. Any thread may call this."""
        with self._lock:
            self._active = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback at the end of a call failed")

    def cancel(self) -> bool:
        """End the call with its connection: a thread that reads or writes there gets an exception."""
        self._connection.shut()
        self.end()
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        self._code, self._details = code, details
        raise HandlerAborted(f"{code.name}: {details}")

    def abort_with_status(self, status: Any) -> NoReturn:
        self._trailing = tuple(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def status(self, failure: BaseException | None) -> data_plane_pb2.DataStatus:
        """Return the call's status; UNKNOWN if the handler failed with anything but `abort`."""
        code, details = self._code or grpc.StatusCode.OK, self._details
        if failure is not None and not isinstance(failure, HandlerAborted):
            code, details = grpc.StatusCode.UNKNOWN, f"Exception calling application: {failure}"
        trailing = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in self._trailing]
        return data_plane_pb2.DataStatus(code=code.value[0], details=details, trailing=trailing)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        """Return the caller, named as by gRPC."""
        return self._peer

    def auth_context(self) -> Mapping[str, Any]:
        """Return the properties of the caller's certificate, if it had to show one."""
        return self._shown

    def peer_identities(self) -> None:
        """Return None: there are none."""

    def peer_identity_key(self) -> None:
        """Return None: there is none."""

    def time_remaining(self) -> Any:
        """Return None: callers keep their own deadlines, and close the connection."""

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailing = tuple(trailing_metadata)

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        """Ignore it: the data plane has none."""
