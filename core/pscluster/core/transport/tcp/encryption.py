"""A data-plane connection in TLS: Python's `ssl` makes the bytes, and the connection's threads send and receive them.

OpenSSL's state is for one thread at a time, and a reader may wait for ever. So OpenSSL never gets the socket: it reads
and writes memory, under a lock that no thread holds while it waits for the network.

TLS ends with the connection, without a close_notify: a call that is cut off lacks its END or STATUS.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Any

from pscluster.core.security.tls import Tls
from pscluster.core.transport.base import BeforeWaiting
from pscluster.core.transport.frames import Buffer, pieces
from pscluster.core.transport.tcp.packets import CLOSED, ClosedError, Connection, Packet, as_buffers

_RECORD_BYTES = 16 << 10  # of TLS, at most
_CHUNK_BYTES = 128 << 10  # a Python call each; several of them stay in a core's cache
_WORN_BYTES = 1 << 38  # 2**24 records: the limit of AES-GCM keys (RFC 8446, 5.5), which are not updated here


class TlsConnection(Connection):
    """Packets in TLS over a connected socket, after `shake_hands`.

    `host` was dialled; None: this is the server's side. Raises OSError if OpenSSL rejects the certificates.
    """

    can_listen = False  # what was received may not have been decrypted

    def __init__(self, connected: socket.socket, tls: Tls, host: str | None = None) -> None:
        super().__init__(connected)
        self._owner = tls
        self._version = tls.refresh()  # before the context, which may be newer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = tls.context(server=host is None).wrap_bio(
            self._incoming, self._outgoing, server_side=host is None, server_hostname=host
        )
        self._state = threading.Lock()  # of these three
        self._carried = 0

    @property
    def worn(self) -> bool:
        """Return whether its certificates were renewed, or its keys are at their limit."""
        return self._carried > _WORN_BYTES or self._owner.refresh() != self._version

    def shake_hands(self) -> None:
        """Run the TLS handshake. Raise OSError if this side does not trust the other."""
        ready = False
        while not ready:
            try:
                self._tls.do_handshake()
                ready = True
            except ssl.SSLWantReadError:
                pass
            except OSError:
                with contextlib.suppress(OSError):
                    self._socket.sendall(self._outgoing.read())  # the alert that says why
                raise
            self._socket.sendall(self._outgoing.read())
            if not ready:
                self._take(_RECORD_BYTES)

    def shown(self) -> dict[str, Any]:
        """Return the properties of the peer's certificate, named as in gRPC's contexts; none if it had to show none."""
        if (der := self._tls.getpeercert(binary_form=True)) is None:
            return {}
        names: Any = (self._tls.getpeercert() or {}).get("subjectAltName", ())
        return {
            "x509_pem_cert": [ssl.DER_cert_to_PEM_cert(der).encode()],
            "peer_uri": [name.encode() for kind, name in names if kind == "URI"],
        }

    def send(self, *packets: Packet, before_waiting: BeforeWaiting | None = None) -> None:
        if before_waiting is not None:
            before_waiting()
        for group in pieces(as_buffers(packets), _CHUNK_BYTES):
            self._socket.sendall(self._encrypted(group))

    def start_to_send(self, *packets: Packet) -> bytes:
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
                        count: Any = self._tls.read(len(view), view)  # an int, whatever the stubs say
                        if not count:
                            raise ClosedError(CLOSED)
                        view = view[count:]
            except ssl.SSLWantReadError:
                self._take(len(view))

    def _take(self, size: int) -> None:
        """Wait for data, about `size` bytes."""
        data = self._socket.recv(max(_RECORD_BYTES, min(size, _CHUNK_BYTES)))
        if not data:
            raise ClosedError(CLOSED)
        with self._state:
            self._incoming.write(data)
        self._carried += len(data)
