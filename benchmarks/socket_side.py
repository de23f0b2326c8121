"""The limit: TCP connections between Python processes that carry only the bytes; see `bare`.

socket_side.py [--ps N] [--workers N]. A client receives into, and sends from, warm memory; a server likewise. A push
ends with a byte that confirms that everything has arrived.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import bare

_HEAD = struct.Struct("<BQ")
_PULL, _PUSH, _ADD, _EXCHANGE = range(4)


def _receive(connection: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        got = connection.recv_into(into[at:])
        if not got:
            return False
        at += got
    return True


Prepare = Callable[[socket.socket], object]


def _prompt(connected: socket.socket) -> None:
    """Make a connection send immediately; otherwise it has the kernel's settings."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _serve(connection: socket.socket, data: bare.Data) -> None:
    head, request = memoryview(bytearray(_HEAD.size)), memoryview(bytearray())
    while _receive(connection, head):
        kind, size = _HEAD.unpack(head)
        if kind == _PULL:
            connection.sendall(data.held(size))
        elif kind == _PUSH:
            if not _receive(connection, data.held(size)):
                return
            connection.sendall(b"!")
        elif kind == _ADD:
            if not _receive(connection, data.scratch(size)):
                return
            data.add(data.scratch(size))
            connection.sendall(b"!")
        else:
            if len(request) < size:
                request = memoryview(bytearray(size))
            if not _receive(connection, request[:size]):
                return
            answer = data.answer(request[:size])
            connection.sendmsg([struct.pack("<Q", len(answer))])
            connection.sendall(answer)


def _server(prepare: Prepare, data: bare.Data) -> None:
    """Answer until killed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            prepare(connection)
            threading.Thread(target=_serve, args=(connection, data), daemon=True).start()


class _Client(bare.Client):
    """Over sockets."""

    def __init__(self, prepare: Prepare, ports: Sequence[int]) -> None:
        super().__init__(len(ports))
        self._connections = [socket.create_connection(("127.0.0.1", port), timeout=60) for port in ports]
        for connection in self._connections:
            prepare(connection)

    def pull(self, size: int) -> None:
        share = size // self._servers

        def take(server: int) -> None:
            connection = self._connections[server]
            connection.sendall(_HEAD.pack(_PULL, share))
            assert _receive(connection, self.warm(share, server))

        self.on_each(take)

    def push(self, size: int) -> None:
        self._give(_PUSH, size)

    def add(self, size: int) -> None:
        self._give(_ADD, size)

    def _give(self, opcode: int, size: int) -> None:
        share = size // self._servers

        def give(server: int) -> None:
            connection = self._connections[server]
            connection.sendall(_HEAD.pack(opcode, share))
            connection.sendall(self.warm(share, server))
            assert connection.recv(1) == b"!"

        self.on_each(give)

    def exchange(self, requests: Sequence[bare.Parts]) -> list[Any]:
        for connection, request in zip(self._connections, requests, strict=True):
            parts = [memoryview(buffer).cast("B") for buffer in request]
            connection.sendall(_HEAD.pack(_EXCHANGE, sum(map(len, parts))))
            for buffer in parts:
                connection.sendall(buffer)
        answers = []
        for connection in self._connections:
            head = memoryview(bytearray(8))
            assert _receive(connection, head)
            answer = memoryview(bytearray(*struct.unpack("<Q", head)))
            assert _receive(connection, answer)
            answers.append(answer)
        return answers


def main(script: str, prepare: Prepare) -> None:
    """Run a side of sockets with connections set up in this way."""
    bare.main(script, partial(_server, prepare), partial(_Client, prepare), lambda: {"python": sys.version.split()[0]})


if __name__ == "__main__":
    main(__file__, _prompt)
