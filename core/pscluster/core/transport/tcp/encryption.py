"""A connection of the data plane in TLS: Python's `ssl` makes the bytes, which its threads send and receive themselves.

OpenSSL's state is for one thread at a time, and a reader waits for as long as nothing comes. So it is never given the
socket: it writes and reads memory, under a lock that nobody holds while the network is waited for.

TLS ends with the connection, without a farewell of its own: what is cut off lacks its END or STATUS.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Any

from pscluster.core.security.tls import Tls
from pscluster.core.transport.frames import Buffer, pieces
from pscluster.core.transport.tcp.packets import CLOSED, ClosedError, Connection, Packet, as_buffers

_RECORD_BYTES = 16 << 10  # of TLS, at most
_CHUNK_BYTES = 128 << 10  # a Python call each; of these several stay in a core's cache
_WORN_BYTES = 1 << 38  # 2**24 records: the keys of AES-GCM are for no more (RFC 8446, 5.5), and are not changed here


class TlsConnection(Connection):
    """Packets in TLS, over a connected socket, behind `shake_hands`.

    Args:
        host: that was dialled; None: this is the server's side.

    Raises:
        OSError: OpenSSL does not take the certificates.
    """

    def __init__(self, connected: socket.socket, tls: Tls, host: str | None = None) -> None:
        super().__init__(connected)
        self._owner = tls
        self._generation = tls.look_again()  # before the context, which may be newer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.context(server=host is None).wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._state = threading.Lock()  # of these three
        self._carried = 0

    @property
    def worn(self) -> bool:
        """Were its certificates renewed, or have its keys done their work?"""
        return self._carried > _WORN_BYTES or self._owner.look_again() != self._generation

    def shake_hands(self) -> None:
        """Have both sides show what they have to. OSError if this side does not trust the other."""
        ready = False
        while not ready:
            try:
                self._tls.do_handshake()
                ready = True
            except ssl.SSLWantReadError:
                pass
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.sendall(self._outgoing.read())  # why
                raise
            self._socket.sendall(self._outgoing.read())
            if not ready:
                self._take(_RECORD_BYTES)

    def shown(self) -> dict[str, Any]:
        """What the other side's certificate says, in the words of gRPC's contexts; nothing if it had to show none."""
        if (der := self._tls.getpeercert(binary_form=True)) is None:
            return {}
        names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return {
            "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()],
            "peer_uri": [name.encode() for kind, name in names if kind == "URI"],
        }

    def send(self, *packets: Packet) -> None:
        """Send packets. Waits for room; OSError if the connection is broken."""
        for group in pieces(as_buffers(packets), _CHUNK_BYTES):
            self._socket.sendall(self._encrypted(group))

    def start_to_send(self, *packets: Packet) -> bytes:
        """Send what there is room for, without waiting; what is left, encrypted."""
        return self._send_some(self._encrypted([b"".join(as_buffers(packets))]))

    def _encrypted(self, buffers: list[Buffer]) -> bytes:
        if sum(map(len, buffers)) <= _RECORD_BYTES:
            buffers = [b"".join(buffers)]
        with self._state:
            for buffer in buffers:
                view = memoryview(buffer)
                while len(view):
                    view = view[self._tls.write(view) :]
            data = self._outgoing.read()
        self._carried += len(data)
        return data

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        self._fill(memoryview(data))
        return bytes(data)

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                with self._state:
                    while len(view):
                        count: Any = self._tls.read(len(view), view)  # a number, whatever the stubs say
                        if not count:
                            raise ClosedError(CLOSED)
                        view = view[count:]
            except ssl.SSLWantReadError:
                self._take(len(view))

    def _take(self, size: int) -> None:
        """Wait for some of what comes, about as much."""
        data = self._socket.recv(max(_RECORD_BYTES, min(size, _CHUNK_BYTES)))
        if not data:
            raise ClosedError(CLOSED)
        with self._state:
            self._incoming.write(data)
        self._carried += len(data)
