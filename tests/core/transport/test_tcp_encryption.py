"""The data plane over TLS: both directions at the same time, renewal and revocation, and who notices them when."""

from __future__ import annotations

import logging
import random
import shutil
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from tests.waiting import TIMEOUT, until

from pscluster.core.security import tokens
from pscluster.core.security.access import RoleInterceptor
from pscluster.core.security.certificates import make_certificates, renew_certificates
from pscluster.core.security.tls import Tls
from pscluster.core.transport.base import StreamEndedError
from pscluster.core.transport.tcp import client as client_module
from pscluster.core.transport.tcp import encryption
from pscluster.core.transport.tcp.client import DataPort
from pscluster.core.transport.tcp.encryption import TlsConnection
from pscluster.core.transport.tcp.packets import Connection, Kind
from pscluster.core.transport.tcp.server import DataServer, listen
from pscluster.core.transport.tcp.stream import DataStream

PULL, OTHER = "/pscluster.v1.ParameterServer/Pull", "/pscluster.v1.Worker/Steps"


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificates of all roles, checked at every connection."""
    monkeypatch.setattr(tokens, "CHECK_SECONDS", 0.0)
    make_certificates(tmp_path / "certificates")
    return tmp_path / "certificates"


def _echo(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


@contextmanager
def serving(folder: Path) -> Iterator[DataServer]:
    """An echo server with the certificate in the folder, for authorized callers."""
    tls = Tls(folder)
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)
    services: list[Any] = []
    for path in (PULL, OTHER):
        _, service, method = path.split("/")
        services.append(grpc.method_handlers_generic_handler(service, {method: handler}))
    server = DataServer(listen("127.0.0.1", 0), services, [RoleInterceptor(tls=tls)], tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.stop()


PortTo = Callable[[DataServer, Path], DataPort]


@pytest.fixture
def port_to() -> Iterator[PortTo]:
    """Make ports of clients with the certificate in a folder."""
    made = list[DataPort]()

    def make(server: DataServer, folder: Path) -> DataPort:
        made.append(DataPort("ps 0", None, Tls(folder)))
        made[-1].is_at(("127.0.0.1", server.port))
        return made[-1]

    yield make
    for port in made:
        port.close()


def opened(port: DataPort, path: str = PULL) -> DataStream:
    """An open call."""
    stream = port.connect(path, ())
    assert stream is not None
    stream.send(b"x")
    return stream


def ended(port: DataPort, stream: DataStream) -> StreamEndedError:
    """How a call ends, before any answer; its connection is given back."""
    with pytest.raises(StreamEndedError) as caught:
        stream.receive()
    port.give_back(stream)
    return caught.value


def echoed(port: DataPort) -> Connection:
    """The answer of a call that succeeded, and whose connection was given back."""
    stream = opened(port)
    assert stream.receive() == b"x"
    stream.end()
    assert ended(port, stream).code() is grpc.StatusCode.OK
    return stream._connection


def connected_pair(certificates: Path) -> tuple[TlsConnection, TlsConnection]:
    """Both ends of a connection after its handshake."""
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(2) as pool:
        ours = TlsConnection(
            socket.create_connection(listener.getsockname()), Tls(certificates / "worker"), "127.0.0.1"
        )
        theirs = TlsConnection(listener.accept()[0], Tls(certificates / "ps"))
        for shaking in [pool.submit(connection.shake_hands) for connection in (ours, theirs)]:
            shaking.result(TIMEOUT)
    return ours, theirs


def test_both_directions_at_once(certificates: Path) -> None:
    """Four threads use both ends of two connections, whose sockets are mostly full: everything arrives as it was
    sent."""
    sizes = [*range(40), 16_383, 16_384, 16_385, 65_536, 3_000_001, *random.Random(1).choices(range(200_000), k=300)]
    noise = random.Random(2).randbytes(max(sizes))

    def send(connection: TlsConnection) -> None:
        for size in sizes:
            connection.send((Kind.MESSAGE, (noise[:1], memoryview(noise)[:size])), (Kind.END, ()))

    def receive(connection: TlsConnection, in_place: bool) -> None:
        for size in sizes:
            whole = bytearray(size + 1)

            def place(start: bytes, total: int, whole: bytearray = whole) -> list[memoryview]:
                assert total == len(whole)
                whole[: len(start)] = start
                return [memoryview(whole)[len(start) :]]

            kind, body = connection.receive(place if in_place else None)
            assert kind is Kind.MESSAGE
            assert (bytes(whole) if in_place else body) == noise[:1] + noise[:size]
            assert connection.receive() == (Kind.END, b"")

    ends = connected_pair(certificates)
    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(send, end) for end in ends]
        work += [pool.submit(receive, end, index == 0) for index, end in enumerate(ends)]
        try:
            for future in work:
                future.result(TIMEOUT)
        finally:
            for end in ends:
                end.shut()
    for end in ends:
        end.close()


def test_shut_while_both_directions_wait(certificates: Path) -> None:
    """A reader and a writer that wait for the network hold nothing that the other, or a shutdown, would need."""
    ours, theirs = connected_pair(certificates)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(ours.receive)
        writing = pool.submit(ours.send, (Kind.MESSAGE, (bytes(64 << 20),)))
        theirs.send((Kind.END, ()))
        assert reading.result(TIMEOUT) == (Kind.END, b"")
        reading = pool.submit(ours.receive)
        ours.shut()
        for future in (reading, writing):
            assert isinstance(future.exception(TIMEOUT), OSError)
    ours.close()
    theirs.close()


def test_a_role_opens_what_it_opens_over_grpc(certificates: Path, port_to: PortTo) -> None:
    with serving(certificates / "ps") as server:
        echoed(port_to(server, certificates / "worker"))
        for role, path in (("worker", OTHER), ("tool", PULL), ("ps", PULL)):
            port = port_to(server, certificates / role)
            refused = ended(port, opened(port, path))
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
            assert f"a {role}'s certificate does not allow {path}" in refused.details()
        stream = opened(port_to(server, certificates / "coordinator"), OTHER)
        assert stream.receive() == b"x"
        stream.close()


def test_revoked(certificates: Path, port_to: PortTo, caplog: pytest.LogCaptureFixture) -> None:
    """A revoked client loses its connections, busy or idle; a new one is refused with a message, before any call."""
    pem = (certificates / "worker" / "tls.crt").read_bytes()
    with serving(certificates / "ps") as server, caplog.at_level(logging.INFO, client_module.__name__):
        port = port_to(server, certificates / "worker")
        working = opened(port)
        echoed(port)
        assert working.receive() == b"x"
        revoked = f"{x509.load_pem_x509_certificate(pem).serial_number:x}"
        (certificates / "ps" / "revoked.txt").write_text(revoked)
        assert ended(port, working).code() is grpc.StatusCode.UNAVAILABLE
        until(lambda: not server._peers, "the idle one is closed, too")
        port.is_at(("127.0.0.1", server.port))
        assert port.connect(PULL, ()) is None
        assert "can't be used (the caller's certificate was revoked: give this process" in caplog.text
        assert not port.usable()
        echoed(port_to(server, certificates / "coordinator"))


def test_renewed(certificates: Path, tmp_path: Path, port_to: PortTo) -> None:
    """When everybody changes to another CA, connections stay for their current call; the next call has a new one."""
    make_certificates(tmp_path / "new")
    with serving(certificates / "ps") as server:
        port = port_to(server, certificates / "worker")
        going_on, before = opened(port), echoed(port)
        assert echoed(port) is before
        late = port_to(server, shutil.copytree(certificates / "worker", tmp_path / "late"))
        for role in ("ps", "worker"):
            for path in (tmp_path / "new" / role).iterdir():
                path.replace(certificates / role / path.name)
        assert going_on.receive() == b"x"
        going_on.send(b"y")
        assert going_on.receive() == b"y"
        after = echoed(port)
        assert after is not before
        assert before.fileno() == -1, "nothing is left of it"
        going_on.end()
        assert ended(port, going_on).code() is grpc.StatusCode.OK
        assert going_on._connection.fileno() == -1
        assert echoed(port) is after
        assert late.connect(PULL, ()) is None, "who still has the old ones finds no trust"


def test_keys_wear_out(certificates: Path, port_to: PortTo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has carried as much as its keys should encrypt is not used for another call."""
    with serving(certificates / "ps") as server:
        port = port_to(server, certificates / "worker")
        first = echoed(port)
        assert echoed(port) is first
        monkeypatch.setattr(encryption, "_WORN_BYTES", 0)
        assert echoed(port) is not first
        assert not port._idle


def context_of(folder: Path | None, authorities: Path) -> ssl.SSLContext:
    """A client's context, even with files that `Tls` would refuse."""
    context = ssl.create_default_context(cafile=str(authorities / "ca.crt"))
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


def test_who_finds_no_trust(
    certificates: Path, tmp_path: Path, port_to: PortTo, caplog: pytest.LogCaptureFixture
) -> None:
    """From a client without a certificate, with an expired one, one of another CA, or with TLS 1.2 not a byte is
    accepted; nor does a client send one to a server of another CA."""
    old = shutil.copytree(certificates, tmp_path / "old")
    renew_certificates(old, days=-1)
    make_certificates(tmp_path / "other")
    earlier = context_of(certificates / "worker", certificates)
    earlier.maximum_version = ssl.TLSVersion.TLSv1_2
    contexts = {
        "none": context_of(None, certificates),
        "expired": context_of(old / "coordinator", certificates),
        "of another CA": context_of(tmp_path / "other" / "coordinator", certificates),
        "of another time": earlier,
    }
    with serving(certificates / "ps") as server:
        for name, context in contexts.items():
            plain = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
            with (
                plain,
                pytest.raises(OSError, match=r"alert|ALERT"),
                context.wrap_socket(plain, server_hostname="127.0.0.1") as caller,
            ):
                caller.recv(1)
            until(lambda: not server._peers, name)
        port = port_to(server, tmp_path / "other" / "worker")
        with caplog.at_level(logging.INFO, client_module.__name__):
            assert port.connect(PULL, ()) is None
        assert "certificate verify failed" in caplog.text
        good = context_of(certificates / "worker", certificates)
        plain = socket.create_connection(("127.0.0.1", server.port), TIMEOUT)
        with good.wrap_socket(plain, server_hostname="127.0.0.1") as friend:
            assert friend.recv(8)[4] == Kind.READY
            assert friend.version() == "TLSv1.3"
            session: Any = friend.session
            assert session is None or not session.has_ticket, "nothing to come back with, past a look at what it shows"
