"""A connection of the data plane: packets in, packets out. No call is known here."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from pscluster.core.errors import ProtocolError
from pscluster.core.limits import MAX_MESSAGE_BYTES
from pscluster.core.transport.frames import Buffer

_AT_ONCE = struct.pack("ii", 1, 0)
_HEAD = struct.Struct("<IBBH")
_MARK = 0xD5
_START_BYTES = 128  # more than the header of a frame takes, nearly always
_MAX_BUFFERS = 64  # of one system call; more are joined first
_UNACKNOWLEDGED_MS = 20_000
# What lies between two processes of a machine stays in a core's cache: with what the kernel chooses it may be ten times
# as much, and each byte then comes from memory. There is nothing to control between them, either; BBR lets packets wait
# for its timers. Reno is there on every Linux. The kernel's usual limit of a send buffer is 208 KiB.
_LOOPBACK_SEND_BYTES = 192 << 10
_LOOPBACK_CONGESTION = b"reno"
_UNIX_SEND_BYTES = 256 << 10  # with half as much, half the speed; more does not help
_INTERNET = (socket.AF_INET, socket.AF_INET6)
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))


class Kind(IntEnum):
    """What a packet is."""

    CALL = 1
    MESSAGE = 2
    END = 3
    STATUS = 4
    HANDSHAKE = 5
    PROOF = 6
    READY = 7


_KINDS = {int(kind): kind for kind in Kind}


Packet = tuple[Kind, Sequence[Buffer]]
"""What it is, and its body: these buffers in order."""


Place = Callable[[bytes, int], Iterable[memoryview] | None]
"""Where a message goes, of which it is given the first bytes and the size: memory for the rest, which is not copied so.
None if it needs the whole, which it is given in a second call."""


CLOSED = "the connection was closed by the other side"


class ClosedError(ConnectionError):
    """The peer has closed the connection, between two packets or within one."""


class UnknownProtocolError(ProtocolError):
    """What came is no packet: it is not a data plane that is there."""


def as_buffers(packets: Sequence[Packet]) -> list[Buffer]:
    """What is sent of them, few enough for one system call."""
    buffers: list[Buffer] = []
    for kind, body in packets:
        buffers.append(_HEAD.pack(sum(map(len, body)), kind, _MARK, 0))
        buffers.extend(body)
    return buffers if len(buffers) <= _MAX_BUFFERS else [b"".join(buffers)]


def supported() -> bool:
    """Is there a data plane on this system?"""
    return hasattr(socket, "TCP_USER_TIMEOUT")


def tuned(connected: socket.socket) -> socket.socket:
    """The same, set to send at once, and to end some day. Closed, and an OSError, if it has ended already."""
    try:
        connected.settimeout(None)
        if connected.family not in _INTERNET:  # the kernel tells of its end itself, and sends at once
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
            return connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if connected.getsockname()[0] == connected.getpeername()[0]:  # a network needs what the kernel finds out
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LOOPBACK_SEND_BYTES)
            with contextlib.suppress(OSError):  # a container may forbid it; it is only slower without
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LOOPBACK_CONGESTION)
    except OSError:
        connected.close()
        raise
    return connected


class Connection:
    """Packets over a connected socket.

    One thread reads and one writes at a time, and none does when it is closed; any may call `shut`, at any time.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._lock = threading.Lock()  # else `shut` could meet another connection that has the descriptor by now
        self.limit = MAX_MESSAGE_BYTES  # of a packet that comes

    @property
    def worn(self) -> bool:
        """Is it to carry no further call?"""
        return False

    def fileno(self) -> int:
        """Of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, *packets: Packet) -> None:
        """Send packets. Waits for room; OSError if the connection is broken."""
        buffers = as_buffers(packets)
        sent = self._socket.sendmsg(buffers)
        if sent == sum(map(len, buffers)):  # as nearly always
            return
        for buffer in buffers:  # a signal came in between
            if sent < len(buffer):
                self._socket.sendall(memoryview(buffer)[sent:])
            sent = max(0, sent - len(buffer))

    def start_to_send(self, *packets: Packet) -> bytes:
        """Send what there is room for, without waiting; what is left. OSError if the connection is broken."""
        return self._send_some(b"".join(as_buffers(packets)))

    def _send_some(self, data: bytes) -> bytes:
        try:
            sent = self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        return data[sent:]

    def finish(self, left: bytes) -> None:
        """Send what was left. Waits for room; OSError if the connection is broken."""
        self._socket.sendall(left)

    def receive(self, place: Place | None = None, announce: Callable[[int], None] | None = None) -> tuple[Kind, bytes]:
        """Wait for a packet; of a message that a place has taken there is nothing left.

        Args:
            place: see there.
            announce: called with a packet's size before any memory is taken for it.

        Raises:
            ClosedError: there will be no more.
            UnknownProtocolError: it is no packet.
            ProtocolError: it is one that is too large.
            OSError: the connection is broken.
        """
        size, number, mark, zeros = _HEAD.unpack(self._exactly(_HEAD.size))
        kind = _KINDS.get(number)
        if kind is None or mark != _MARK or zeros:
            raise UnknownProtocolError("what came is no packet of the data plane")
        if size > self.limit:
            raise ProtocolError(f"a message of {size:,} bytes, the limit is {self.limit:,}")
        if announce is not None:
            announce(size)
        if place is None or kind is not Kind.MESSAGE:
            return kind, self._exactly(size) if size else b""
        self._put(place, size)
        return kind, b""

    def _put(self, place: Place, size: int) -> None:
        start = self._exactly(min(size, _START_BYTES)) if size else b""
        rest = place(start, size)
        if rest is None:
            rest = place(start + self._exactly(size - len(start)), size) or ()
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
        while data and (left := size - sum(map(len, pieces))):  # a signal has cut it short
            data = self._socket.recv(left, socket.MSG_WAITALL)
            pieces.append(data)
        if not data:
            raise ClosedError(CLOSED)
        return b"".join(pieces)

    def shut(self) -> None:
        """End it for whoever reads or writes, here and there."""
        with self._lock, contextlib.suppress(OSError):  # it is closed already, or the peer has gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give it back. By the thread that uses it."""
        with self._lock:
            self._socket.close()

    def break_off(self) -> None:
        """The same; what is still to be sent is not, so that the other side learns of the end without reading it."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self.close()
