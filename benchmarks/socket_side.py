"""The limit: one TCP connection over loopback between two Python processes, nothing on it but the bytes.

The client receives into, and sends from, memory that is warm; the server likewise. A push ends with a byte
that says it has all come.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time

import numpy as np
from driver import Handlers, serve


def _receive(connection: socket.socket, into: memoryview) -> bool:
    at = 0
    while at < len(into):
        got = connection.recv_into(into[at:])
        if not got:
            return False
        at += got
    return True


def server() -> None:
    """Answer one connection until it ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data: dict[int, memoryview] = {}
    head = bytearray(9)
    while _receive(connection, memoryview(head)):
        push, size = struct.unpack("!?Q", head)
        if size not in data:
            data[size] = memoryview(np.ones(size, np.uint8)).cast("B")
        if push:
            if not _receive(connection, data[size]):
                return
            connection.sendall(b"!")
        else:
            connection.sendall(data[size])


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the server's process and connect."""
    process = subprocess.Popen([sys.executable, __file__, "--server"], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    assert process.stdout is not None
    connection = socket.create_connection(("127.0.0.1", int(process.stdout.readline())), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stack.callback(connection.close)
    data: dict[int, memoryview] = {}

    def single(mib: int, n: int, push: bool) -> list[float]:
        size = mib << 20
        if size not in data:
            data[size] = memoryview(np.ones(size, np.uint8)).cast("B")
        took = []
        for _ in range(n):
            begin = time.perf_counter()
            connection.sendall(struct.pack("!?Q", push, size))
            if push:
                connection.sendall(data[size])
                assert connection.recv(1) == b"!"
            else:
                assert _receive(connection, data[size])
            took.append(time.perf_counter() - begin)
        return took

    return {"single": single}, {"python": sys.version.split()[0]}


if __name__ == "__main__":
    if "--server" in sys.argv:
        server()
    else:
        serve(start)
