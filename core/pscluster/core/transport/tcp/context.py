"""What a handler is told of a call on the data plane, and may do with it: as gRPC's own context."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

import grpc

from pscluster.core.transport.frames import Buffer
from pscluster.core.transport.server_call import ServerCall
from pscluster.core.transport.tcp.packets import Connection, Kind, Place
from pscluster.v1 import data_plane_pb2

logger = logging.getLogger(__name__)


class HandlerAborted(Exception):  # noqa: N818  (it ends a handler, as gRPC's own does; the caller has the error)
    """Raised by `abort`."""


class DataContext(ServerCall, grpc.ServicerContext):
    """Of one call.

    Attributes:
        place: where the next messages go; the handler reads b"" instead of each. None: to the handler.
        has_room: the handler has taken memory for all messages that follow: they are not counted one by one.
    """

    takes_parts = True
    place: Place | None = None
    has_room = False

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

    def reply(self, parts: Sequence[Buffer]) -> Sequence[Buffer]:
        """Return the parts, which the socket joins."""
        return parts

    def receive_into(self, place: Place) -> None:
        """Put the messages that follow there."""
        self.place = place

    def has_taken_memory(self) -> None:
        """Count no message that follows."""
        self.has_room = True

    def sender(self) -> Callable[[bytes], bool]:
        """Return `send`."""
        return self.send

    def send(self, message: bytes) -> bool:
        """Send a message past the handler's answers; see `ServerCall.sender`."""
        try:
            self._connection.send((Kind.MESSAGE, (message,)))
        except OSError:
            self._connection.shut()  # half of it may be on its way: nothing more can follow
            return False
        return True

    def is_active(self) -> bool:
        """Does the caller wait?"""
        return self._active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have this called at the call's end; False if that has been."""
        with self._lock:
            if self._active:
                self._callbacks.append(callback)
            return self._active

    def end(self) -> None:
        """The call is over, or its caller has gone. Any thread may say so."""
        with self._lock:
            self._active = False
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                logger.exception("a callback at the end of a call failed")

    def cancel(self) -> bool:
        """End it with its connection: whoever reads or writes there is told by an exception."""
        self._connection.shut()
        self.end()
        return True

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the handler with this status."""
        self._code, self._details = code, details
        raise HandlerAborted(f"{code.name}: {details}")

    def abort_with_status(self, status: Any) -> NoReturn:
        """The same."""
        self._trailing = tuple(status.trailing_metadata or ())
        self.abort(status.code, status.details)

    def status(self, failure: BaseException | None) -> data_plane_pb2.DataStatus:
        """How the call ended, for the caller. A handler that raised something else than `abort` does is to blame."""
        code, details = self._code or grpc.StatusCode.OK, self._details
        if failure is not None and not isinstance(failure, HandlerAborted):
            code, details = grpc.StatusCode.UNKNOWN, f"Exception calling application: {failure}"
        trailing = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in self._trailing]
        return data_plane_pb2.DataStatus(code=code.value[0], details=details, trailing=trailing)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """The call's."""
        return self._metadata

    def peer(self) -> str:
        """The caller, as gRPC names it."""
        return self._peer

    def auth_context(self) -> Mapping[str, Any]:
        """What the caller's certificate says, if it had to show one."""
        return self._shown

    def peer_identities(self) -> None:
        """None."""

    def peer_identity_key(self) -> None:
        """None."""

    def time_remaining(self) -> Any:
        """None: who calls keeps its own deadline, and breaks the connection off."""

    def set_code(self, code: grpc.StatusCode) -> None:
        """For the status."""
        self._code = code

    def set_details(self, details: str) -> None:
        """For the status."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        """For the status."""
        self._trailing = tuple(trailing_metadata)

    def send_initial_metadata(self, initial_metadata: Any) -> None:
        """There is none."""
