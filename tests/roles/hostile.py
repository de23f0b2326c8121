"""A hostile client, without a token unless it is given proofs: what it does to a role's port."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
from google.protobuf.descriptor import ServiceDescriptor

from pscluster.core.security.authenticator import CALL_METADATA
from pscluster.core.transport.methods import methods

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 3, 4, 6, 8, 9
_INITIAL_WINDOW = 4
_END_HEADERS = 4
_BOMB = 8 << 20  # zeros; 8 KiB when compressed

PROBES = (
    b"GET /healthz HTTP/1.1\r\nHost: there\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # the beginning of a TLS handshake
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"*1\r\n$4\r\nPING\r\n",
    b"\x00" * 500,
    b"\xff" * 500,
    PREFACE[:11],
    PREFACE + b"\x00\x00\x00\x63\x00\x00\x00\x00\x00",
)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def head(path: str, stream: int = 1, *, flags: int = _END_HEADERS, more: tuple[tuple[str, str], ...] = ()) -> bytes:
    """The head of a call, its names and values as given."""
    names = ((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "there"), ("te", "trailers"))
    block = b""
    for name, value in (*names, ("content-type", "application/grpc"), *more):
        block += b"\x00" + _text(name) + _text(value)
    return frame(_HEADERS, flags, stream, block)


def _text(text: str) -> bytes:
    data = text.encode()
    if len(data) < 127:
        return bytes((len(data),)) + data
    rest, out = len(data) - 127, bytearray((127,))
    while rest >= 128:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes((*out, rest)) + data


def opened(address: str) -> socket.socket:
    """Open a connection."""
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def rubbish(address: str, generator: random.Random) -> None:
    """Send other protocols, broken frames and noise, each on a separate connection."""
    calls = head("/pscluster.v1.Node/Status")
    lying = struct.pack(">BI", 0, 2**32 - 1)  # the prefix of a message of 4 GiB
    endless = b"".join(frame(_CONTINUATION, 0, 1, b"\x00" + _text("x") + _text("y" * 4000)) for _ in range(40))
    broken = (
        frame(_SETTINGS, 0, 0) + calls + frame(_DATA, 0, 1, lying + b"x"),
        frame(_SETTINGS, 0, 0) + calls + frame(_DATA, 1, 1, struct.pack(">BI", 1, 20) + bytes(20)),
        frame(_SETTINGS, 0, 0) + head("/pscluster.v1.Node/Status", flags=0) + endless,
        frame(_SETTINGS, 0, 0) + head("/x", more=(("authorization", "Bearer " + "a" * 100_000),)),
        frame(_SETTINGS, 0, 0) + b"".join(frame(_PING, 0, 0, bytes(8)) for _ in range(3000)),
        frame(_SETTINGS, 0, 0) + b"".join(head("/pscluster.v1.Node/Attach", 2 * n + 1) for n in range(2000)),
    )
    noise = [generator.randbytes(generator.choice((1, 30, 3000))) for _ in range(10)]
    for data in (*PROBES, *(PREFACE + frames for frames in broken), *noise, *(PREFACE + frames for frames in noise)):
        with contextlib.suppress(OSError), opened(address) as connection:
            connection.sendall(data)
            connection.settimeout(0.02)
            connection.recv(1000)


def bombs(address: str, services: tuple[ServiceDescriptor, ...]) -> None:
    """Send messages that are small when compressed and large when decompressed, and large ones, to every method."""
    zeros = bytes(_BOMB)
    with grpc.insecure_channel(address, options=[("grpc.max_send_message_length", -1)]) as channel:
        for method in (method for service in services for method in methods(service)):
            for compression in (grpc.Compression.Gzip, grpc.Compression.NoCompression):
                request: object = iter([zeros]) if method.client_streaming else zeros
                call = getattr(channel, method.shape)(method.path)
                with contextlib.suppress(grpc.RpcError):
                    reply = call(request, timeout=30, compression=compression)
                    if method.server_streaming:
                        list(reply)
                    raise AssertionError(f"{method.path} was answered")


@contextmanager
def half_messages(address: str, path: str, proofs: Sequence[str], size: int) -> Iterator[tuple[int, set[int]]]:
    """Make calls on one connection, one for each proof, each with all but one byte of a message; return the bytes taken
    and the calls that were ended. Nothing is sent beyond the role's flow-control window, as HTTP/2 demands."""
    calls, initial, ended = [2 * index + 1 for index in range(len(proofs))], 65535, set[int]()
    with opened(address) as connection:
        connection.sendall(PREFACE + frame(_SETTINGS, 0, 0))
        room, left, sent, buffer = {0: 65535} | dict.fromkeys(calls, initial), dict.fromkeys(calls, size - 1), 0, b""
        for call, proof in zip(calls, proofs, strict=True):
            more = ((CALL_METADATA, proof),)
            connection.sendall(head(path, call, more=more) + frame(_DATA, 0, call, struct.pack(">BI", 0, size)))
            room[call], room[0] = room[call] - 5, room[0] - 5
        connection.settimeout(0.5)
        while True:
            moved = False
            for call in set(calls) - ended:
                # One at a time: otherwise calls would share the connection's window, and none would get much of its
                # message through.
                while (count := min(16384, left[call], room[call], room[0])) > 0:
                    connection.sendall(frame(_DATA, 0, call, bytes(count)))
                    room[call], room[0], left[call] = room[call] - count, room[0] - count, left[call] - count
                    sent, moved = sent + count, True
            try:
                buffer += connection.recv(1 << 16)
            except TimeoutError:
                if not moved:  # it takes no more
                    break
            while len(buffer) >= 9 and len(buffer) >= 9 + int.from_bytes(buffer[:3]):
                length, kind, flags = int.from_bytes(buffer[:3]), buffer[3], buffer[4]
                call, body, buffer = int.from_bytes(buffer[5:9]), buffer[9 : 9 + length], buffer[9 + length :]
                if kind == _WINDOW_UPDATE and call in room:
                    room[call] += int.from_bytes(body)
                elif kind == _PING and not flags:
                    connection.sendall(frame(_PING, 1, 0, body))
                elif kind == _SETTINGS and not flags:
                    for at in range(0, length, 6):
                        if int.from_bytes(body[at : at + 2]) == _INITIAL_WINDOW:
                            grown = int.from_bytes(body[at + 2 : at + 6]) - initial
                            initial += grown
                            room = {key: value + grown * (key > 0) for key, value in room.items()}
                    connection.sendall(frame(_SETTINGS, 1, 0))
                elif kind == _RST_STREAM or (kind == _HEADERS and flags & 1):
                    ended.add(call)
        yield sent, ended


@contextmanager
def crowd(address: str, count: int) -> Iterator[list[socket.socket]]:
    """Open many connections: one third is silent, one speaks HTTP/2, one calls and never ends its message."""
    said = (b"", PREFACE + frame(_SETTINGS, 0, 0))
    says = (*said, said[1] + head("/pscluster.v1.Node/Status") + frame(_DATA, 0, 1, struct.pack(">BI", 0, 900)))
    connections: list[socket.socket] = []
    try:
        for index in range(count):
            with contextlib.suppress(OSError):  # refused, or closed immediately: as it should be
                connections.append(opened(address))
                connections[-1].sendall(says[index % 3])
        yield connections
    finally:
        for connection in connections:
            connection.close()


def trickle(address: str, count: int, until: Callable[[], bool]) -> int:
    """Send a valid beginning byte by byte on this many connections until they are closed; return the bytes taken."""
    data = PREFACE + frame(_SETTINGS, 0, 0) + head("/pscluster.v1.Worker/Upload") + frame(_DATA, 0, 1, bytes(4000))
    connections = [opened(address) for _ in range(count)]
    sent = 0
    try:
        for at in range(len(data)):
            if until():
                break
            for connection in connections:
                with contextlib.suppress(OSError):
                    sent += connection.send(data[at : at + 1])
            time.sleep(0.01)
    finally:
        for connection in connections:
            connection.close()
    return sent
