"""A connection of the data plane: packets in, packets out, without knowledge of calls."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from enum import IntEnum

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_MESSAGE_BYTES
from pscluster.core.transport.base import BeforeWaiting, Destination, Readable
from pscluster.core.transport.frames import Buffer

_LINGER_ZERO = struct.pack("ii", 1, 0)
_HEAD = struct.Struct("<IBBH")
_MARK = 0xD5
_START_BYTES = 512  # more than the header of a frame takes, nearly always
_MAX_BUFFERS = 64  # of one system call; more are joined first
_UNACKNOWLEDGED_MS = 20_000
# Data between two processes of a machine should stay in a core's cache: the kernel's own choice may be ten times as
# much, and then each byte comes from memory. Nor is there congestion to control, and BBR delays packets by its timers.
# Reno exists on every Linux. The kernel's usual limit of a send buffer is 208 KiB.
_LOOPBACK_SEND_BYTES = 192 << 10
_LOOPBACK_CONGESTION = b"reno"
_UNIX_SEND_BYTES = 256 << 10  # half as much halves the speed; more does not help
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))


class Kind(IntEnum):
    """The kind of a packet."""

    CALL = 1
    MESSAGE = 2
    END = 3
    STATUS = 4
    HANDSHAKE = 5
    PROOF = 6
    READY = 7


_KINDS = {int(kind): kind for kind in Kind}


Packet = tuple[Kind, Sequence[Buffer]]
"""Its kind and its body, these buffers in order."""


CLOSED = "the connection was closed by the other side"


class ClosedError(ConnectionError):
    """The peer has closed the connection, between two packets or within one."""


class UnknownProtocolError(ProtocolError):
    """The bytes received are no packet: the other end is not a data plane."""


def as_buffers(packets: Sequence[Packet]) -> list[Buffer]:
    """Return the buffers to send, few enough for one system call."""
    buffers: list[Buffer] = []
    for kind, body in packets:
        buffers.append(_HEAD.pack(sum(map(len, body)), kind, _MARK, 0))
        buffers.extend(body)
    return buffers if len(buffers) <= _MAX_BUFFERS else [b"".join(buffers)]


def supported() -> bool:
    """Return whether this system supports the data plane."""
    return hasattr(socket, "TCP_USER_TIMEOUT")


def tuned(connected: socket.socket, send_bytes: int | None = None, *, wait_for_room: bool = False) -> socket.socket:
    """Return the socket, set to send at once and to detect a lost peer. Close it and raise OSError if it has ended.

    `send_bytes` is the size of its send buffer within a machine; None: what suits a server and its client. If
    `wait_for_room`, a peer that takes nothing for long is not lost: the caller finds out by itself whether it is there.
    """
    try:
        connected.settimeout(None)
        if connected.family not in _INTERNET:  # the kernel reports its end by itself, and sends at once
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes or _UNIX_SEND_BYTES)
            return connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not wait_for_room:  # it also ends the connection to a peer that lives, and has no room
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if connected.getsockname()[0] == connected.getpeername()[0]:  # on a network the kernel's own choices are right
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes or _LOOPBACK_SEND_BYTES)
            with contextlib.suppress(OSError):  # a container may forbid it; it is only slower without
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)
    except OSError:
        connected.close()
        raise
    return connected


class Connection:
    """Packets over a connected socket.

    One thread at a time reads and one writes, and neither during `close`; any thread may call `shut` at any time.
    """

    can_listen = True
    """Whether `listen` tells if there is something to receive."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()  # else `shut` could hit another connection that has reused the descriptor
        self.limit = MAX_MESSAGE_BYTES  # of a received packet

    @property
    def worn(self) -> bool:
        """Return whether it must carry no further call."""
        return False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *packets: Packet, before_waiting: BeforeWaiting | None = None) -> None:
        """Send packets. Waits for room; raises OSError if the connection is broken."""
        buffers = as_buffers(packets)
        if before_waiting is None:
            sent = self._socket.sendmsg(buffers)
        else:
            try:
                sent = self._socket.sendmsg(buffers, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
        if sent == sum(map(len, buffers)):  # as nearly always
            return
        if before_waiting is not None:
            before_waiting()
        for buffer in buffers:  # a signal interrupted the call, or there was no room
            if sent < len(buffer):
                self._socket.sendall(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))

    def listen(self) -> Readable:
        """Return a function that waits until something can be received, for some seconds at most."""
        arrivals = select.poll()
        arrivals.register(self._socket, select.POLLIN)
        return lambda seconds: bool(arrivals.poll(seconds * 1000))

    def start_to_send(self, *packets: Packet) -> bytes:
        """Send as much as there is room for, without waiting. Return the rest. OSError if the connection is broken."""
        return self._send_some(b"".join(as_buffers(packets)))

    def _send_some(self, data: bytes) -> bytes:
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        return data[sent:]

    def finish(self, rest: bytes) -> None:
        """Send the rest. Waits for room; raises OSError if the connection is broken."""
        self._socket.sendall(rest)

    def receive(
        self, destination: Destination | None = None, announce: Callable[[int], None] | None = None
    ) -> tuple[Kind, bytes]:
        """Wait for a packet; the body of a message that `destination` has taken is empty.

        `announce` is called with a packet's size before memory is allocated for it. Raises OSError if the connection is
        closed or broken, and ProtocolError if the packet is too large, or none.
        """
        size, code, mark, zeros = _HEAD.unpack(self._exactly(_HEAD.size))
        kind = _KINDS.get(code)
        if kind is None or mark != _MARK or zeros:
            raise UnknownProtocolError("received no packet of the data plane")
        if size > self.limit:
            raise ProtocolError(f"a message of {size:,} bytes; the limit is {self.limit:,}")
        if announce is not None:
            announce(size)
        if destination is None or kind is not Kind.MESSAGE:
            return kind, self._exactly(size) if size else b""
        self._put(destination, size)
        return kind, b""

    def _put(self, destination: Destination, size: int) -> None:
        start = self._exactly(min(size, _START_BYTES)) if size else b""
        rest = destination(start, size)
        if rest is None:
            rest = destination(start + self._exactly(size - len(start)), size) or ()
        for view in rest:
            self._fill(view)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            count = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not count:
                raise ClosedError(CLOSED)
            view = view[count:]

    def _exactly(self, size: int) -> bytes:
        data = self._socket.recv(size, socket.MSG_WAITALL)
        if len(data) == size:
            return data
        pieces = [data]
        while data and (left := size - sum(map(len, pieces))):  # a signal interrupted it
            data = self._socket.recv(left, socket.MSG_WAITALL)
            pieces.append(data)
        if not data:
            raise ClosedError(CLOSED)
        return b"".join(pieces)

    def shut(self) -> None:
        """End it for the threads that read or write, at both ends."""
        with self._lock, contextlib.suppress(OSError):  # closed already, or the peer has disconnected
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, from the thread that uses it."""
        with self._lock:
            self._socket.close()

    def break_off(self) -> None:
        """Close the socket and discard unsent data, so that the peer learns of the end without reading it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self.close()
