"""The data plane against real sockets: its transfers, how calls end, unauthenticated callers, garbage."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import select
import socket
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import KIND_METADATA
from pscluster.core.ids import make_identity
from pscluster.core.limits import MAX_CALL_BYTES, MAX_MESSAGE_BYTES, MAX_UNAUTHENTICATED
from pscluster.core.security.authenticator import Authenticator
from pscluster.core.security.certificates import make_certificates
from pscluster.core.security.handshake import Secret, SessionTable, make_request
from pscluster.core.security.tls import Tls
from pscluster.core.security.tokens import Token
from pscluster.core.transport import unix_sockets
from pscluster.core.transport.base import StreamEndedError
from pscluster.core.transport.tcp import client as client_module
from pscluster.core.transport.tcp import server as server_module
from pscluster.core.transport.tcp.client import DataPort, Where
from pscluster.core.transport.tcp.context import DataContext
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import (
    _LOOPBACK_CONGESTION,
    _LOOPBACK_SEND_BYTES,
    ClosedError,
    Connection,
    Kind,
    as_buffers,
    tuned,
)
from pscluster.core.transport.tcp.server import DataServer, listen
from pscluster.core.transport.tcp.stream import DataStream, PromptStream
from pscluster.v1 import data_plane_pb2

TOKEN = "correct-horse-battery-staple"
METADATA = (("session", "1"),)
LARGE = bytes(range(256)) * (3 << 12)  # 3 MiB: more than a socket holds


class Service:
    """Handlers of every arity, and what they saw."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.ended = threading.Event()
        self.refused: weakref.ref[Any] | None = None  # what a handler held when it refused

    def echo(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Echo each message, until told to do something else."""
        for request in requests:
            if request == b"abort":
                context.set_trailing_metadata(((KIND_METADATA, "stale"),))
                context.abort(grpc.StatusCode.ABORTED, "not any more")
            if request == b"fail":
                raise ValueError("of the handler")
            if request == b"wait":
                assert context.add_callback(self.ended.set)
                self.began.set()
                self.ended.wait(TIMEOUT)
                return
            yield request

    def count_down(self, request: bytes, _context: grpc.ServicerContext) -> Iterator[bytes]:
        """Send this many messages."""
        for count in reversed(range(int(request))):
            yield str(count).encode() + LARGE

    def total(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        """The number of bytes of all messages; refuses at the first that begins so, or reads on if it may."""
        size = 0
        for request in requests:
            if request == b"wait":
                self.began.set()
                self.ended.wait(TIMEOUT)
            if request.startswith(b"no"):
                refused = np.zeros(1)
                self.refused = weakref.ref(refused)
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
            size += len(request)
        return str(size).encode()


def _same(request: str, _context: grpc.ServicerContext) -> str:
    return request


@pytest.fixture
def service() -> Service:
    """The service that is served."""
    return Service()


@pytest.fixture
def authenticator() -> Authenticator:
    """The authenticator of a role with the token."""
    return Authenticator(TOKEN, make_identity("ps", 0))


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder short enough for sockets: pytest's own are too long."""
    with tempfile.TemporaryDirectory(prefix="psc-", dir="/tmp") as folder:
        yield Path(folder)


PLAIN = pytest.mark.parametrize("server", ["tcp", "unix"], indirect=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificates of all roles."""
    folder = tmp_path_factory.mktemp("tls") / "certificates"
    make_certificates(folder)
    return folder


@pytest.fixture(params=["tcp", "unix", "tls"])
def server(
    request: pytest.FixtureRequest, service: Service, authenticator: Authenticator, short_folder: Path
) -> Iterator[DataServer]:
    """A server of it, for callers with the token."""
    handlers: dict[str, Any] = {
        "Echo": grpc.stream_stream_rpc_method_handler(service.echo),
        "CountDown": grpc.unary_stream_rpc_method_handler(service.count_down),
        "Total": grpc.stream_unary_rpc_method_handler(service.total),
        "Same": grpc.unary_unary_rpc_method_handler(_same, bytes.decode, str.encode),
    }
    generic: Any = grpc.method_handlers_generic_handler("test", handlers)
    listener = (
        unix_sockets.listen(str(short_folder / "ps-0.data")) if request.param == "unix" else listen("127.0.0.1", 0)
    )
    tls = Tls(request.getfixturevalue("certificates") / "ps") if request.param == "tls" else None
    running = DataServer(listener, [generic], [], authenticator, tls=tls)
    running.start()
    yield running
    service.ended.set()
    running.stop()


def where(server: DataServer) -> Where:
    """The server's address."""
    address: Where = server._listener.getsockname()
    return address


def tls_for(server: DataServer) -> Tls | None:
    """A worker's certificate, if the server wants one."""
    return None if server._tls is None else Tls(server._tls.folder.parent / "worker")


def port_of(server: DataServer, token: str | None = TOKEN) -> DataPort:
    """A client's port."""
    made = DataPort("ps 0", token, tls_for(server))
    made.is_at(where(server))
    return made


@pytest.fixture
def port(server: DataServer) -> Iterator[DataPort]:
    """The port of a client with the token."""
    made = port_of(server)
    yield made
    made.drop()


def open_stream(port: DataPort, method: str = "Echo", metadata: Any = METADATA) -> DataStream:
    """A call on that port."""
    stream = port.connect(f"/test/{method}", metadata)
    assert stream is not None
    return stream


def rest_of(stream: DataStream) -> tuple[list[bytes], StreamEndedError]:
    """All messages to the end of the call, and how it ended."""
    replies = []
    while True:
        try:
            replies.append(stream.receive())
        except StreamEndedError as end:
            return replies, end


def called(port: DataPort, method: str, *requests: bytes) -> tuple[list[bytes], StreamEndedError]:
    """Make a whole call, and give its connection back."""
    stream = open_stream(port, method)
    for request in requests:
        stream.send(request)
    stream.end()
    outcome = rest_of(stream)
    port.give_back(stream)
    return outcome


def connected(server: DataServer) -> socket.socket:
    """A plain connection."""
    at = where(server)
    made = socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET)
    made.settimeout(TIMEOUT)
    made.connect(at)
    return made


def packets_over(plain: socket.socket, server: DataServer) -> Connection:
    """The connection, in TLS if the server wants it."""
    if (tls := tls_for(server)) is None:
        return Connection(plain)
    connection = TlsConnection(plain, tls, "127.0.0.1")
    client_module._secure(connection)
    return connection


def send_raw(connection: Connection, data: bytes) -> None:
    """Send bytes that need not be packets."""
    encrypted = connection._encrypted([data]) if isinstance(connection, TlsConnection) else data
    connection._socket.sendall(encrypted)


def is_closed(plain: socket.socket) -> bool:
    """Whether the server closes it in time."""
    try:
        while plain.recv(1 << 16):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass
    return True


def test_messages_in_turn(port: DataPort) -> None:
    stream = open_stream(port)
    for message in (b"a", b"", LARGE, b"b" * 4321):
        stream.send(message)
        assert stream.receive() == message
    stream.send(b"in ", memoryview(b"some "), *[b"parts "] * 100, last=True)
    assert stream.receive() == b"in some " + b"parts " * 100
    assert rest_of(stream)[1].code() is grpc.StatusCode.OK
    stream.close()


def test_a_connection_serves_call_after_call(port: DataPort) -> None:
    first = open_stream(port)
    connection = first._connection
    port.give_back(_ended(first))
    answers, end = called(port, "CountDown", b"3")
    assert [answer[:1] for answer in answers] == [b"2", b"1", b"0"]
    assert end.code() is grpc.StatusCode.OK
    assert all(answer[1:] == LARGE for answer in answers)
    assert called(port, "Total", LARGE, LARGE, b"")[0] == [str(2 * len(LARGE)).encode()]
    assert called(port, "Same", b"me")[0] == [b"me"]  # with its own (de)serialisers
    last = open_stream(port)
    assert last._connection is connection
    last.close()


def _ended(stream: DataStream) -> DataStream:
    stream.send(b"x")
    stream.end()
    assert rest_of(stream)[0] == [b"x"]
    return stream


def test_how_calls_end(port: DataPort, caplog: pytest.LogCaptureFixture) -> None:
    end = called(port, "Echo", b"abort")[1]
    assert (end.code(), end.details()) == (grpc.StatusCode.ABORTED, "not any more")
    assert end.trailing_metadata() == ((KIND_METADATA, "stale"),)
    with caplog.at_level(logging.CRITICAL, server_module.__name__):
        end = called(port, "Echo", b"fail")[1]
    assert end.code() is grpc.StatusCode.UNKNOWN
    assert "of the handler" in end.details()
    assert called(port, "CountDown")[1].code() is grpc.StatusCode.INVALID_ARGUMENT
    assert called(port, "Same", b"still there")[0] == [b"still there"]


def test_a_role_of_another_kind(port: DataPort) -> None:
    """Another role has taken the port: the call may be made again, to the right one."""
    stream = open_stream(port, "Nothing")
    stream.send(b"", last=True)
    end = rest_of(stream)[1]
    assert (end.code(), end.details()) == (grpc.StatusCode.UNAVAILABLE, "Method not found!")
    assert not port.usable()
    port.give_back(stream)
    assert port.connect("/test/Echo", METADATA) is None


def test_refused_while_it_is_sent(port: DataPort) -> None:
    answers, end = called(port, "Total", b"no", *[LARGE] * 5)
    assert not answers
    assert end.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert called(port, "Total", b"12345")[0] == [b"5"]  # nothing of the previous call is in it


def test_nothing_of_a_refused_call_is_kept(port: DataPort, service: Service) -> None:
    """It is freed without waiting for garbage collection: it may be large."""
    gc.disable()
    try:
        assert called(port, "Total", b"no")[1].code() is grpc.StatusCode.INVALID_ARGUMENT
        until(lambda: service.refused is not None and service.refused() is None, "it is gone")
    finally:
        gc.enable()


def test_a_call_that_ends_before_the_client_does_takes_its_connection_along(port: DataPort) -> None:
    stream = open_stream(port)
    stream.send(b"abort")
    assert rest_of(stream)[1].code() is grpc.StatusCode.ABORTED
    assert stream.reusable is None
    port.give_back(stream)
    assert stream._connection.fileno() == -1


def test_a_call_that_is_cancelled_once_it_is_over_takes_its_connection_along(port: DataPort) -> None:
    stream = open_stream(port)
    stream.send(b"a", last=True)
    assert rest_of(stream)[1].code() is grpc.StatusCode.OK
    assert stream.reusable is not None
    stream.cancel()
    port.give_back(stream)
    assert stream._connection.fileno() == -1, "what the next call sent would be lost"


@pytest.mark.parametrize("method", ["Echo", "CountDown", "Total", "Same"])
def test_without_the_token(server: DataServer, method: str) -> None:
    """A call without a handshake is refused, with a message, and its connection closed."""
    port = port_of(server, None)
    stream = open_stream(port, method)
    stream.send(b"3")
    answers, end = rest_of(stream)
    assert not answers
    assert end.code() is grpc.StatusCode.UNAVAILABLE  # another cluster's, it seems: gRPC will recognise it
    assert "token" in end.details()
    assert not port.usable()
    stream.close()


def test_another_token(server: DataServer, caplog: pytest.LogCaptureFixture) -> None:
    """The client learns it from the handshake, and sends the call another way."""
    port = port_of(server, TOKEN[::-1])
    with caplog.at_level(logging.INFO, client_module.__name__):
        assert port.connect("/test/Echo", METADATA) is None
    assert "this cluster does not accept this process's token" in caplog.text
    assert not port.usable()


@PLAIN
def test_a_thief_on_the_port(server: DataServer, port: DataPort) -> None:
    """A listener without the token gets a handshake, which is useless to it, and not a byte of the call."""
    for answer in (b"", _packet(Kind.HANDSHAKE), _packet(Kind.MESSAGE, b"x"), _of_another_role()):
        with socket.create_server(("127.0.0.1", 0)) as thief, ThreadPoolExecutor(1) as pool:
            port.is_at(("127.0.0.1", thief.getsockname()[1]))
            opening = pool.submit(port.connect, "/test/Echo", METADATA)
            taken, _ = thief.accept()
            with taken:
                taken.settimeout(TIMEOUT)
                stolen = taken.recv(1 << 16)
                taken.sendall(answer)
                with contextlib.suppress(OSError):  # the client has gone already
                    taken.shutdown(socket.SHUT_WR)
                assert opening.result(TIMEOUT) is None
                assert is_closed(taken)
        assert TOKEN.encode() not in stolen
        assert stolen[4] == Kind.HANDSHAKE
        assert len(stolen) == 8 + int.from_bytes(stolen[:4], "little")
        # The stolen request opens nothing: the role answers it, and waits for a proof.
        with connected(server) as plain:
            plain.sendall(stolen + _packet(Kind.PROOF, bytes(32)) + _packet(Kind.CALL, _call("Same")))
            assert plain.recv(8, socket.MSG_WAITALL)[4] == Kind.HANDSHAKE
            assert is_closed(plain)
    port.is_at(where(server))
    assert called(port, "Same", b"x")[0] == [b"x"]


@PLAIN
def test_what_was_recorded_of_a_connection_opens_none(server: DataServer) -> None:
    """It opens none while the connection is open, nor later: a session belongs to one connection."""
    with connected(server) as friend:
        friend_side = Connection(friend)
        recorded: list[bytes] = []
        real = friend_side.send

        def send(*packets: Any) -> None:
            recorded.extend(bytes(b"".join(as_buffers([packet]))) for packet in packets)
            real(*packets)

        friend_side.send = send  # type: ignore[method-assign,assignment]
        DataPort._shake_hands(friend_side, Secret.of(TOKEN), where(server))
        friend_side.send((Kind.CALL, (_call("Echo"),)), (Kind.MESSAGE, (b"x",)))
        assert friend_side.receive() == (Kind.MESSAGE, b"x")
        stolen = b"".join(recorded[:2])
        for still_open in (True, False):
            with connected(server) as plain:
                plain.sendall(stolen + _packet(Kind.CALL, _call("Same")) + _packet(Kind.MESSAGE, b"evil"))
                answers = b""
                with contextlib.suppress(ConnectionResetError):
                    while data := plain.recv(1 << 16):
                        answers += data
                assert b"evil" not in answers
            if still_open:
                friend.shutdown(socket.SHUT_RDWR)
                until(lambda: not server._peers, "the first connection has ended")


def _of_another_role() -> bytes:
    """A handshake's answer from a server with another token."""
    secret = Secret.of(TOKEN[::-1])
    request = make_request(secret, "x")
    return _packet(Kind.HANDSHAKE, SessionTable("ps", 0, 1).open([secret], request, 0.0).reply.SerializeToString())


@PLAIN
def test_a_token_that_is_accepted_no_more(port: DataPort, tmp_path: Path, service: Service) -> None:
    """Connections that proved it are ended, even in the middle of a call."""
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n{TOKEN[::-1]}\n")
    authenticator = Authenticator(Token.of([TOKEN, TOKEN[::-1]], file), make_identity("ps", 0))
    handlers: dict[str, Any] = {"Echo": grpc.stream_stream_rpc_method_handler(service.echo)}
    generic: Any = grpc.method_handlers_generic_handler("test", handlers)
    running = DataServer(listen("127.0.0.1", 0), [generic], [], authenticator)
    running.start()
    authenticator.start()
    try:
        port.is_at(where(running))
        stream = open_stream(port)
        stream.send(b"wait")
        assert service.began.wait(TIMEOUT)
        file.with_suffix(".draft").write_text(f"{TOKEN[::-1]}\n")
        file.with_suffix(".draft").rename(file)
        assert service.ended.wait(TIMEOUT)
        assert rest_of(stream)[1].code() is grpc.StatusCode.UNAVAILABLE
        stream.close()
        assert port.connect("/test/Echo", METADATA) is None
    finally:
        authenticator.stop()
        running.stop()


@pytest.mark.parametrize("away", ["cancel", "close"])
def test_a_client_that_goes(port: DataPort, service: Service, away: str) -> None:
    stream = open_stream(port)
    stream.send(b"wait")
    assert service.began.wait(TIMEOUT)
    getattr(stream, away)()
    assert service.ended.wait(TIMEOUT)  # the call's callback
    stream.close()


def test_who_goes_is_no_error(server: DataServer, port: DataPort, caplog: pytest.LogCaptureFixture) -> None:
    """However a client leaves, in the middle of sending in either direction, only a debug line is logged, no
    traceback."""

    def amid_an_answer(stream: DataStream) -> None:
        stream.send(b"99", last=True)
        stream.receive()

    def amid_a_message(stream: DataStream) -> None:
        stream.send(b"one")
        send_raw(stream._connection, _packet(Kind.MESSAGE, b"x", size=9999))

    def between_two(stream: DataStream) -> None:
        stream.send(b"one")
        stream.receive()

    ways = (("CountDown", amid_an_answer), ("Total", amid_a_message), ("Echo", amid_a_message), ("Echo", between_two))
    with caplog.at_level(logging.DEBUG, "pscluster"):
        for index in range(12):
            for method, way in ways:
                stream = open_stream(port, method)
                way(stream)
                if index % 2:
                    stream._connection.shut()
                stream.close()
        until(lambda: not server._peers, "all are gone")
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG or record.exc_info] == []
    assert "the caller has gone" in caplog.text


def test_a_cancelled_call_ends_for_the_thread_that_waits(port: DataPort, service: Service) -> None:
    stream = open_stream(port)
    stream.send(b"wait")
    assert service.began.wait(TIMEOUT)
    canceller = threading.Timer(0.05, stream.cancel)
    canceller.start()
    assert rest_of(stream)[1].code() is grpc.StatusCode.UNAVAILABLE
    canceller.join(TIMEOUT)
    stream.close()


def test_a_server_that_stops(port: DataPort, server: DataServer, service: Service) -> None:
    waiting, idle = open_stream(port), open_stream(port)
    waiting.send(b"wait")
    idle.send(b"x")
    assert idle.receive() == b"x"
    assert service.began.wait(TIMEOUT)
    server.stop()
    assert service.ended.wait(TIMEOUT)
    for stream in (waiting, idle):
        assert rest_of(stream)[1].code() is grpc.StatusCode.UNAVAILABLE
        stream.close()
    assert port.connect("/test/Echo", METADATA) is None


def test_a_server_that_is_gone_meanwhile(port: DataPort, server: DataServer) -> None:
    called(port, "Same", b"x")
    server.stop()
    _, end = called(port, "Same", b"y")  # on the idle connection
    assert end.code() is grpc.StatusCode.UNAVAILABLE


def test_a_port_that_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port_number = taken.getsockname()[1]
    port = DataPort("ps 3")
    assert not port.usable()
    assert port.connect("/test/Echo", METADATA) is None
    port.is_at(("127.0.0.1", port_number))
    assert port.usable()
    with caplog.at_level(logging.INFO, client_module.__name__):
        assert port.connect("/test/Echo", METADATA) is None
    assert f"ps 3: its data port {port_number}" in caplog.text
    assert not port.usable()  # for a while
    port.is_at(("127.0.0.1", port_number))
    assert not port.usable()  # the same
    port.is_at(("127.0.0.1", port_number + 1))
    assert port.usable()
    port.is_at(None)
    assert not port.usable()


def test_no_place_is_left(port: DataPort, server: DataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "data_connections", lambda: 2)
    streams = [open_stream(port), open_stream(port)]
    for stream in streams:
        stream.send(b"x")
        assert stream.receive() == b"x"
    assert port.connect("/test/Echo", METADATA) is None
    assert not port.usable()  # calls use gRPC from now on
    assert port._endpoint is None  # the address is asked for again
    port.is_at(where(server))
    assert not port.usable()  # it was known that the server could be reached
    for stream in streams:
        stream.close()


def test_silent_unauthenticated_connections_are_closed(server: DataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(server) as silent:
        monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.0)
        assert is_closed(silent)


def test_an_accepted_client_may_be_silent(port: DataPort, server: DataServer, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = open_stream(port)
    stream.send(b"x")
    assert stream.receive() == b"x"
    monkeypatch.setattr(server_module, "HANDSHAKE_SECONDS", 0.0)
    with connected(server) as silent:
        assert is_closed(silent)
    stream.send(b"y")
    assert stream.receive() == b"y"
    stream.close()


def test_of_many_unauthenticated_connections_the_oldest_are_closed(server: DataServer, port: DataPort) -> None:
    crowd = [connected(server) for _ in range(MAX_UNAUTHENTICATED + 3)]
    assert all(is_closed(oldest) for oldest in crowd[:2])
    assert called(port, "Same", b"x")[0] == [b"x"]
    for connection in crowd:
        connection.close()


def _packet(kind: int, body: bytes = b"", size: int | None = None, mark: int = 0xD5) -> bytes:
    return struct.pack("<IBBH", len(body) if size is None else size, kind, mark, 0) + body


def _call(method: str = "Echo", metadata: Any = METADATA) -> bytes:
    pairs = [data_plane_pb2.DataMetadata(key=key, value=value) for key, value in metadata]
    return data_plane_pb2.DataCall(path=f"/test/{method}", metadata=pairs).SerializeToString()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        bytes(64),
        _packet(Kind.MESSAGE, b"x"),
        _packet(Kind.STATUS),
        _packet(9),
        _packet(Kind.CALL, _call(), mark=0),
        _packet(Kind.CALL, size=MAX_CALL_BYTES + 1),
        _packet(Kind.CALL, b"\xff\xff\xff"),
        _packet(Kind.CALL, _call()),
        _packet(Kind.HANDSHAKE, b"\xff\xff\xff"),
        _packet(Kind.HANDSHAKE, size=MAX_CALL_BYTES + 1),
        _packet(Kind.HANDSHAKE, b"x" * 1000) + _packet(Kind.PROOF, b"x" * 32),
        _packet(Kind.PROOF, b"x" * 32),
    ],
)
def test_garbage(server: DataServer, port: DataPort, garbage: bytes) -> None:
    with connected(server) as plain:
        plain.sendall(garbage)
        assert is_closed(plain)
    assert called(port, "Same", b"x")[0] == [b"x"]


@pytest.mark.parametrize(
    "garbage",
    [
        _packet(Kind.CALL, b"\xff\xff\xff"),
        _packet(Kind.HANDSHAKE),
        _packet(Kind.CALL, _call()) + _packet(Kind.MESSAGE, b"x") + _packet(Kind.MESSAGE, size=MAX_MESSAGE_BYTES + 1),
        _packet(Kind.CALL, _call()) + _packet(Kind.CALL, _call()),
        _packet(Kind.CALL, _call()) + _packet(Kind.PROOF, b"x" * 32),
        _packet(Kind.CALL, _call()) + _packet(Kind.MESSAGE, size=100) + b"cut short",
    ],
)
def test_garbage_of_a_friend(server: DataServer, port: DataPort, garbage: bytes) -> None:
    """A caller with the token whose packets make no sense also loses the connection."""
    with connected(server) as plain:
        friend = packets_over(plain, server)
        DataPort._shake_hands(friend, Secret.of(TOKEN), where(server))
        send_raw(friend, garbage)
        if garbage.endswith(b"cut short"):
            plain.shutdown(socket.SHUT_WR)
        assert is_closed(plain)
    assert called(port, "Same", b"x")[0] == [b"x"]


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (_packet(Kind.CALL), grpc.StatusCode.UNAVAILABLE),
        (_packet(Kind.STATUS, b"\xff\xff"), grpc.StatusCode.UNAVAILABLE),
        (bytes(8), grpc.StatusCode.UNAVAILABLE),
        (_packet(Kind.MESSAGE, size=MAX_MESSAGE_BYTES + 1), grpc.StatusCode.INTERNAL),
    ],
)
def test_garbage_comes(answer: bytes, code: grpc.StatusCode) -> None:
    """It comes from another process, which has the port now: that is left alone until the role is elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = DataPort("ps 0")
        port.is_at(("127.0.0.1", port_number := listener.getsockname()[1]))
        for moved in (True, False):
            stream = open_stream(port)
            other, _ = listener.accept()
            if moved:
                port.is_at(("127.0.0.2", port_number))
            with other:
                other.sendall(answer)
                assert rest_of(stream)[1].code() is code
            stream.close()
            assert port.usable() == (moved or code is grpc.StatusCode.INTERNAL)
            port.is_at(("127.0.0.1", port_number))
            assert port.usable() == (moved or code is grpc.StatusCode.INTERNAL)


def test_connections_leave_nothing_behind(server: DataServer, port: DataPort) -> None:
    for _ in range(20):
        stream = open_stream(port)
        stream.send(b"x")
        assert stream.receive() == b"x"
        stream.close()
    over = threading.Event()
    while server._peers or server._by_descriptor:
        over.wait(0.01)


def test_a_packet_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = Connection(ours)
        packet = _packet(Kind.MESSAGE, LARGE)

        def send() -> None:
            for at in range(0, len(packet), 70_001):
                theirs.sendall(packet[at : at + 70_001])

        sender = threading.Thread(target=send)
        sender.start()
        assert reader.receive() == (Kind.MESSAGE, LARGE)
        sender.join(TIMEOUT)


def open_prompt(port: DataPort, method: str = "Echo") -> PromptStream:
    """A call of the other kind."""
    stream = port.connect(f"/test/{method}", METADATA, prompt=True)
    assert isinstance(stream, PromptStream)
    assert stream is not None
    return stream


def test_sending_does_not_wait(port: DataPort, service: Service) -> None:
    """Far more than a socket holds is sent to a server that does not read; when it does, everything arrives in
    order."""
    stream = open_prompt(port, "Total")
    stream.send(b"wait")
    sent = [b"wait", *[bytes([index]) * (1 << 20) for index in range(40)]]
    for message in sent[1:]:
        stream.send(message)
    stream.end()
    assert service.began.wait(TIMEOUT)
    service.ended.set()
    assert stream.receive() == str(sum(map(len, sent))).encode()
    assert rest_of(stream)[1].code() is grpc.StatusCode.OK
    stream.close()


def how_it_sends(connected: socket.socket) -> tuple[int, bytes]:
    """The size of the send buffer, and the congestion control."""
    control = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")
    return connected.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), control


@pytest.mark.parametrize(("address", "within"), [("127.0.0.1", True), ("127.0.0.2", False)])
def test_little_is_buffered_within_a_machine(address: str, within: bool) -> None:
    """Within a machine little is buffered, unless the caller knows better; for a network the kernel decides."""
    with socket.create_server((address, 0)) as listening:
        ours = socket.create_connection(listening.getsockname(), TIMEOUT, source_address=("127.0.0.1", 0))
        theirs, _ = listening.accept()
    for plain in (ours, theirs):
        with plain:
            before, after = how_it_sends(plain), how_it_sends(tuned(plain))
            # The kernel adds its own share of the buffer.
            assert after == ((2 * _LOOPBACK_SEND_BYTES, _LOOPBACK_CONGESTION) if within else before)
            assert how_it_sends(tuned(plain, 50_000)) == ((100_000, _LOOPBACK_CONGESTION) if within else before)


def test_a_caller_may_wait_for_room() -> None:
    """The kernel gives up a peer that acknowledges nothing; with this limit it also gives up one that has no room."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for wait_for_room, limit in ((False, 20_000), (True, 0)):
            with tuned(
                socket.create_connection(listening.getsockname(), TIMEOUT), wait_for_room=wait_for_room
            ) as connected:
                assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == limit


def test_messages_by_many_threads_stay_whole(port: DataPort) -> None:
    stream = open_prompt(port)
    with ThreadPoolExecutor(8) as pool:
        for size in (1, 70_000) * 200:
            pool.submit(stream.send, bytes([size % 251]) * size)
        got = [stream.receive() for _ in range(400)]
    assert sorted({(len(message), message[0]) for message in got}) == [(1, 1), (70_000, 70_000 % 251)]
    assert all(message == message[:1] * len(message) for message in got)
    stream.close()


def test_closed_with_a_backlog(port: DataPort, service: Service) -> None:
    stream = open_prompt(port)
    stream.send(b"wait")
    for _ in range(40):
        stream.send(bytes(1 << 20))
    assert service.began.wait(TIMEOUT)
    stream.close()
    stream.send(b"too late")
    assert service.ended.wait(TIMEOUT)
    assert not [thread for thread in threading.enumerate() if thread.name == "data-send"]


def test_a_message_that_breaks_half_way_is_the_last_of_its_connection() -> None:
    """A context's message sent ahead breaks half-way: later senders are told, and so is the reader."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender, reader = Connection(ours), Connection(theirs)
        context = DataContext(sender, "ipv4:127.0.0.1:1", data_plane_pb2.DataCall())
        assert context.send(b"whole")
        ours.settimeout(0.001)  # what is never read is not sent completely
        assert not context.send(LARGE)
        ours.settimeout(None)
        assert not context.send(b"after it")
        assert reader.receive() == (Kind.MESSAGE, b"whole")
        with pytest.raises(ClosedError):
            reader.receive()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_crowd_that_connects_at_once_is_kept(kind: str) -> None:
    """A server's clients come back at once after it has restarted: none is turned away until it is accepted."""
    with contextlib.ExitStack() as stack:
        if kind == "tcp":
            listener = stack.enter_context(server_module.listen("127.0.0.1", 0))
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="psc-", dir="/tmp"))
            listener = stack.enter_context(unix_sockets.listen(f"{folder}/ps-0"))
        crowd = [stack.enter_context(socket.socket(listener.family)) for _ in range(300)]
        for client in crowd:
            client.setblocking(False)
            begun = client.connect_ex(listener.getsockname())
            assert begun == (errno.EINPROGRESS if kind == "tcp" else 0), f"refused: {errno.errorcode[begun]}"
        unconnected = set(crowd)
        while unconnected:
            _, connected, _ = select.select([], unconnected, [], TIMEOUT)
            assert connected, f"{len(unconnected)} of {len(crowd)} are not connected"
            unconnected -= set(connected)
        for client in crowd:
            client.getpeername()
