"""Channels that prove the token over real connections: what an impostor on the port learns, and what still works."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.faults.proxy import Proxy
from tests.waiting import TIMEOUT, until

from pscluster.core.errors import KIND_METADATA, AuthenticationError, UnavailableError, from_rpc
from pscluster.core.ids import make_identity
from pscluster.core.security.authenticator import (
    CALL_METADATA,
    HANDSHAKE_METADATA,
    HANDSHAKE_PATH,
    AuthenticationInterceptor,
    Authenticator,
    NoTokenInterceptor,
)
from pscluster.core.security.channel import AuthenticatedChannel
from pscluster.core.security.handshake import UNPROVEN, Secret, make_request
from pscluster.core.security.tokens import Token
from pscluster.core.transport.channels import PeerAddress, open_aio_channel, open_channel, open_peer_channel
from pscluster.core.transport.grpc_streams import GrpcStream

TOKEN = "correct-horse-battery-staple"
PAYLOAD = b"the payload that nobody else may see"
METHODS = ("UnaryUnary", "UnaryStream", "StreamUnary", "StreamStream")


def _echo(request: Any, _context: grpc.ServicerContext) -> bytes:
    return request if isinstance(request, bytes) else b"".join(request)


def _echoes(request: Any, _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from ((request,) if isinstance(request, bytes) else request)


def _waits(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


@contextmanager
def serving(
    address: str = "127.0.0.1:0", token: str = TOKEN, interceptors: list[grpc.ServerInterceptor] | None = None
) -> Iterator[tuple[str, Authenticator]]:
    """A server of echo methods of every arity, for callers with the token; its address."""
    authenticator = Authenticator(token, make_identity("ps", 0))
    authenticator.start()
    handlers: dict[str, Any] = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(_echo),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(_echoes),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(_echo),
        "StreamStream": grpc.stream_stream_rpc_method_handler(_waits),
    }
    with ThreadPoolExecutor(20) as pool:
        own: list[grpc.ServerInterceptor] = [AuthenticationInterceptor(authenticator)]
        gates = own if interceptors is None else interceptors
        server = grpc.server(pool, interceptors=gates, options=[("grpc.so_reuseport", 1)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
        port = server.add_insecure_port(address)
        server.start()
        try:
            yield f"127.0.0.1:{port}", authenticator
        finally:
            authenticator.stop()
            server.stop(0).wait()


def call(channel: Any, method: str, payload: bytes = PAYLOAD) -> bytes:
    """The answer of a method of any arity."""
    first = "Stream" if method.startswith("Stream") else "Unary"
    shape = f"{first.lower()}_{method.removeprefix(first).lower()}"
    request: object = iter([payload]) if first == "Stream" else payload
    answer = getattr(channel, shape)(f"/test/{method}")(request, timeout=TIMEOUT)
    return answer if isinstance(answer, bytes) else b"".join(answer)


async def acall(channel: Any, method: str, payload: bytes = PAYLOAD) -> bytes:
    """The same, in asyncio."""

    async def requests() -> Any:
        yield payload

    first = "Stream" if method.startswith("Stream") else "Unary"
    end = method.removeprefix(first)
    made = getattr(channel, f"{first.lower()}_{end.lower()}")(f"/test/{method}")(
        requests() if first == "Stream" else payload, timeout=TIMEOUT
    )
    if end == "Unary":
        return bytes(await made)
    pieces = []
    while (piece := await made.read()) is not grpc.aio.EOF:
        pieces.append(piece)
    return b"".join(pieces)


@pytest.mark.parametrize("method", METHODS)
def test_every_arity(method: str) -> None:
    """All arities work, sync and asyncio, repeatedly on one channel, and after the server was restarted."""
    with serving() as (address, _):
        with open_channel(address, None, TOKEN) as channel:
            for _ in range(3):
                assert call(channel, method) == PAYLOAD
        assert asyncio.run(_thrice(address, method)) == [PAYLOAD] * 3


async def _thrice(address: str, method: str) -> list[bytes]:
    async with open_aio_channel(PeerAddress("ps", 0, address, token=TOKEN)) as channel:
        return [await acall(channel, method) for _ in range(3)]


def test_streams() -> None:
    """Streams work, even with a session that the server does not know."""
    with serving() as (address, authenticator), open_channel(address, None, TOKEN) as channel:
        for _ in range(2):
            stream = GrpcStream(channel, "/test/StreamStream", ())
            stream.send(PAYLOAD)
            assert stream.receive() == PAYLOAD
            stream.close()
            with authenticator._lock:
                authenticator._table.drop_tokens(frozenset())


def test_many_calls_at_once() -> None:
    """With many threads on one channel, counters may overtake each other, and none is used twice."""
    with serving() as (address, _), open_channel(address, None, TOKEN) as channel, ThreadPoolExecutor(16) as pool:
        bodies = [str(index).encode() for index in range(200)]
        assert list(pool.map(lambda body: call(channel, "UnaryUnary", body), bodies)) == bodies


def test_a_server_that_was_started_anew() -> None:
    """It does not know the old sessions: the channel makes another handshake, and the call succeeds."""
    with serving() as (address, _):
        channel = open_channel(address, None, TOKEN)
        assert call(channel, "UnaryUnary") == PAYLOAD
    with serving(address), channel:
        until(lambda: _answered(channel), "the channel has found it")


def _answered(channel: grpc.Channel) -> bool:
    try:
        return call(channel, "UnaryUnary") == PAYLOAD
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return False


class Impostor(grpc.ServerInterceptor):
    """Listens on another server's port, accepts every call, and records everything that it is sent."""

    def __init__(self, answer: Callable[[grpc.ServicerContext], None]) -> None:
        self.heard: list[bytes] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.calls = threading.Semaphore(0)
        self._answer = answer

    def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        """Accept it, whatever it is."""
        self.metadata.append(dict(details.invocation_metadata or ()))

        def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            self.calls.release()
            self._answer(context)
            for request in requests:
                self.heard.append(request)
                yield request

        return grpc.stream_stream_rpc_method_handler(take)


def _proves_at_random(context: grpc.ServicerContext) -> None:
    context.send_initial_metadata((("pscluster-proof", "0" * 64),))


def _says_nothing(context: grpc.ServicerContext) -> None:
    context.send_initial_metadata((("hello", "there"),))


def _knows_no_session(context: grpc.ServicerContext) -> None:
    context.set_trailing_metadata((("pscluster-session", "unknown"),))
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")


def _refuses(context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")


@pytest.mark.parametrize("answer", [_proves_at_random, _says_nothing, _knows_no_session, _refuses])
@pytest.mark.parametrize("kind", ["UnaryUnary", "StreamStream", "raw", "aio"])
def test_a_thief_between_two_calls(answer: Callable[[grpc.ServicerContext], None], kind: str) -> None:
    """On an open channel it gets no byte of a request, nothing that opens the role, and never the token."""
    impostor = Impostor(answer)
    loop = asyncio.new_event_loop()
    peer = PeerAddress("ps", 0, "", token=TOKEN)

    def attempt(channel: Any) -> bytes:
        if kind == "aio":
            return loop.run_until_complete(acall(channel, "UnaryUnary"))
        if kind != "raw":
            return call(channel, kind)
        stream = GrpcStream(channel, "/test/StreamStream", ())
        try:
            stream.send(PAYLOAD)
            return stream.receive()
        finally:
            stream.close()

    async def opened(address: str) -> Any:
        return open_aio_channel(PeerAddress("ps", 0, address, token=TOKEN))

    assert peer.token == TOKEN
    with serving() as (address, _):
        channel: Any = loop.run_until_complete(opened(address)) if kind == "aio" else open_channel(address, None, TOKEN)
        assert attempt(channel) == PAYLOAD
    try:
        with serving(address, interceptors=[impostor]):

            def met() -> bool:
                with pytest.raises(grpc.RpcError) as error:
                    attempt(channel)
                refused = error.value.code()
                assert refused in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
                return bool(impostor.metadata)

            until(met, "the channel has dialled the impostor")
        assert impostor.heard == []
        assert TOKEN not in repr(impostor.metadata)
        with serving(address), grpc.insecure_channel(address) as plain_channel:
            for stolen in impostor.metadata:
                shown = tuple((key, stolen[key]) for key in (CALL_METADATA, HANDSHAKE_METADATA) if key in stolen)
                ways: Any = plain_channel.stream_stream("/test/StreamStream")
                with pytest.raises(grpc.RpcError) as refused:
                    next(ways(iter([PAYLOAD]), metadata=shown, timeout=TIMEOUT))
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        if kind == "aio":
            loop.run_until_complete(channel.close())
        else:
            channel.close()
        loop.close()


def test_a_proof_is_good_once() -> None:
    """A proof read in transit opens nothing: neither that method again, nor another."""
    with serving() as (address, _), grpc.insecure_channel(address) as plain:
        session = AuthenticatedChannel(plain, Secret.of(TOKEN), address).session()
        header, answer = session.next_call("/test/UnaryUnary")
        ways: dict[str, Any] = {name: plain.stream_stream(f"/test/{name}") for name in ("UnaryUnary", "StreamUnary")}
        wrong: Any = ways["StreamUnary"](iter([PAYLOAD]), metadata=((CALL_METADATA, header),), timeout=TIMEOUT)
        assert wrong.code() is grpc.StatusCode.UNAUTHENTICATED
        used: Any = ways["UnaryUnary"](iter([PAYLOAD]), metadata=((CALL_METADATA, header),), timeout=TIMEOUT)
        assert dict(used.initial_metadata())["pscluster-proof"] == answer
        assert next(used) == PAYLOAD
        again: Any = ways["UnaryUnary"](iter([PAYLOAD]), metadata=((CALL_METADATA, header),), timeout=TIMEOUT)
        assert again.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        (make_request(Secret.of(TOKEN[::-1]), "x", bytes(32)).SerializeToString(), grpc.StatusCode.UNAUTHENTICATED),
    ],
    ids=["empty", "rubbish", "another token"],
)
def test_a_handshake_that_is_none(given: bytes, code: grpc.StatusCode) -> None:
    """It is answered without reading any of its message."""
    with serving() as (address, _), grpc.insecure_channel(address) as plain:
        over = threading.Event()

        def nothing() -> Iterator[bytes]:
            over.wait()
            yield from ()

        ways: Any = plain.stream_unary(HANDSHAKE_PATH)
        asked = ways.future(nothing(), metadata=((HANDSHAKE_METADATA, given),), timeout=TIMEOUT)
        assert asked.code() is code
        over.set()


def test_sides_with_different_tokens() -> None:
    """The server says what is missing, and recognizes a caller without a token; a foreign server counts as absent."""
    with serving() as (address, _), open_channel(address, None, TOKEN[::-1]) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, "UnaryUnary")
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "this cluster does not accept this process's token" in (refused.value.details() or "")
    with serving(interceptors=[NoTokenInterceptor()]) as (address, _), open_channel(address, None, TOKEN) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            call(channel, "UnaryUnary")
        assert "runs without a cluster token, and this process has one" in (refused.value.details() or "")
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        open_channel(f"127.0.0.1:{silent.getsockname()[1]}", None, TOKEN) as channel,
    ):
        ways: Any = channel.unary_unary("/test/UnaryUnary")
        with pytest.raises(grpc.RpcError) as refused:
            ways(b"x", timeout=0.5)
        assert refused.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


def test_a_token_that_is_taken_out(tmp_path: Path) -> None:
    """Streams under it are ended; those under another one continue."""
    file, other = tmp_path / "token", TOKEN[::-1]
    file.write_text(f"{TOKEN}\n{other}\n")
    with (
        serving(token=Token.of([TOKEN, other], file)) as (address, _),
        open_channel(address, None, TOKEN) as old,
        open_channel(address, None, other) as new,
    ):
        opened = [GrpcStream(channel, "/test/StreamStream", ()) for channel in (old, new)]
        for stream in opened:
            stream.send(PAYLOAD)
            assert stream.receive() == PAYLOAD
        file.with_suffix(".draft").write_text(f"{other}\n")
        file.with_suffix(".draft").rename(file)
        with pytest.raises(grpc.RpcError) as ended:
            opened[0].receive()
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        with pytest.raises(grpc.RpcError) as refused:
            call(old, "UnaryUnary")
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        opened[1].send(PAYLOAD)
        assert opened[1].receive() == PAYLOAD
        for stream in opened:
            stream.close()


def test_unproven_is_said() -> None:
    """A server that answers a handshake without the token is distinguished from one that does not answer."""
    impostor = Impostor(_proves_at_random)
    with (
        serving(interceptors=[impostor]) as (address, _),
        open_channel(address, None, TOKEN) as channel,
        pytest.raises(grpc.RpcError) as refused,
    ):
        call(channel, "UnaryUnary")
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAVAILABLE, UNPROVEN)


def _ends(code: grpc.StatusCode, *trailing: tuple[str, str]) -> Callable[[grpc.ServicerContext], None]:
    def answer(context: grpc.ServicerContext) -> None:
        context.set_trailing_metadata(trailing)
        context.abort(code, "so they say")

    return answer


UNBELIEVED = {
    "stale": _ends(grpc.StatusCode.ABORTED, (KIND_METADATA, "stale")),
    "lost": _ends(grpc.StatusCode.UNAVAILABLE, (KIND_METADATA, "ps-unavailable")),
    "unknown": _ends(grpc.StatusCode.NOT_FOUND, (KIND_METADATA, "unknown-variable")),
    "full": _ends(grpc.StatusCode.RESOURCE_EXHAUSTED),
    "none": _ends(grpc.StatusCode.UNIMPLEMENTED),
    "bad": _ends(grpc.StatusCode.INVALID_ARGUMENT),
    "another token": _ends(grpc.StatusCode.UNAUTHENTICATED, (KIND_METADATA, "authentication")),
    "no text": lambda context: context.send_initial_metadata((("pscluster-proof-bin", b"\xff"),)),
}


@pytest.mark.parametrize("answer", UNBELIEVED.values(), ids=UNBELIEVED.keys())
def test_the_status_of_an_impostor_is_not_believed(answer: Callable[[grpc.ServicerContext], None]) -> None:
    """A status that ends a call before a proof counts, for a client that has known the role, as no answer at all."""
    impostor = Impostor(answer)
    with serving() as (address, _):
        channel = open_channel(address, None, TOKEN)
        assert call(channel, "UnaryUnary") == PAYLOAD
        stream = GrpcStream(channel, "/test/StreamStream", ())
        stream.close()
    with channel, serving(address, interceptors=[impostor]):
        for attempt in (
            lambda: call(channel, "UnaryUnary"),
            lambda: GrpcStream(channel, "/test/StreamStream", ()),
            lambda: call(channel, "StreamStream"),
        ):

            def met(attempt: Callable[[], object] = attempt) -> bool:
                before = len(impostor.metadata)
                with pytest.raises(grpc.RpcError) as error:
                    attempt()
                failure = from_rpc(error.value, "ps 0")
                assert type(failure) is UnavailableError, failure
                return len(impostor.metadata) > before

            until(met, "the impostor has been asked")
    assert impostor.heard == []


@pytest.mark.parametrize("kind", ["sync", "aio"])
def test_calls_are_not_passed_on_to_another_role(kind: str) -> None:
    """An attacker that forwards bytes from one role's port to another role that knows the token gets no request: the
    other says who it is, and is not the one expected."""
    with serving() as (address, _), Proxy(address) as proxy:
        peer = PeerAddress("ps", 1, proxy.address, token=TOKEN)
        ask = functools.partial(asyncio.run, _once(peer)) if kind == "aio" else functools.partial(_ask, peer)
        with pytest.raises(grpc.RpcError, match="should be ps 1, but ps 0 answers there"):
            ask()


def _ask(peer: PeerAddress) -> bytes:
    with open_peer_channel(peer) as channel:
        return call(channel, "UnaryUnary")


async def _once(peer: PeerAddress) -> bytes:
    async with open_aio_channel(peer) as channel:
        return await acall(channel, "UnaryUnary")


def test_the_token_is_shared_with_who_looks_first(tmp_path: Path) -> None:
    """The metrics server has the same object and checks the file, too: what it finds takes effect here."""
    file, other = tmp_path / "token", TOKEN[::-1]
    file.write_text(f"{TOKEN}\n")
    token = Token.of([TOKEN], file)
    authenticator = Authenticator(token, make_identity("ps", 0))
    file.with_suffix(".draft").write_text(f"{other}\n")
    file.with_suffix(".draft").rename(file)
    until(lambda: token.accepts(other.encode()), "somebody else has looked")
    authenticator.check()
    authenticator.open(make_request(Secret.of(other), "x"))
    with pytest.raises(AuthenticationError):
        authenticator.open(make_request(Secret.of(TOKEN), "x"))
