"""Both kinds of streams against a real server: what goes over them, how they end, what they leave behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tests.conftest import grpc_server

from pscluster.core.transport import grpc_streams
from pscluster.core.transport.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from pscluster.core.transport.grpc_streams import DirectStream, QueuedStream, Stream, StreamEndedError, open_raw_stream

PATH = "/echo/Session"
TOKEN = (("token", "t"),)
_CLIENT_THREADS = ("consume_request_iterator", "channel_spin")


def session(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Echoes, until it is told to do something else."""
    assert TOKEN[0] in [tuple(pair) for pair in context.invocation_metadata()]
    for request in requests:
        if request == b"end":
            return
        if request == b"last":
            yield request
            return
        if request == b"abort":
            context.set_trailing_metadata((("kind", "mine"),))
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "näher nicht")
        if request == b"silence":
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait()
            return
        yield request


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Where a server listens."""
    handlers: Any = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    with grpc_server(300, options=SERVER_OPTIONS) as running:
        running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
        address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
        running.start()
        yield address


@pytest.fixture
def channel(server: str) -> Iterator[grpc.Channel]:
    """A connection."""
    with grpc.insecure_channel(server, options=CHANNEL_OPTIONS) as channel:
        yield channel


def direct(channel: grpc.Channel) -> Stream:
    """Driven by the caller."""
    return DirectStream(channel, PATH, TOKEN)


def queued(channel: grpc.Channel) -> Stream:
    """Of grpc's public parts."""
    return QueuedStream(channel, PATH, TOKEN)


Open = Callable[[grpc.Channel], Stream]
both = pytest.mark.parametrize("opened", [direct, queued])


def ask(stream: Stream, request: bytes) -> bytes:
    """An exchange."""
    stream.send(request)
    return stream.receive()


def end_of(stream: Stream) -> Any:
    """What receiving raises."""
    with pytest.raises(grpc.RpcError) as raised:
        stream.receive()
    return raised.value


@both
def test_exchanges(channel: grpc.Channel, opened: Open) -> None:
    """Small and large, one after the other, on several streams of a channel."""
    first, second = opened(channel), opened(channel)
    for size in (0, 1, 1000, 1 << 20, 5 << 20, 7):
        for stream in (first, second):
            assert ask(stream, b"x" * size) == b"x" * size
    first.close()
    assert ask(second, b"still") == b"still"
    second.close()


@both
def test_the_server_ends_it(channel: grpc.Channel, opened: Open) -> None:
    """In order, also behind a last reply; or with a status, words and metadata; asked again it says so again."""
    for farewell in (b"end", b"last"):
        stream = opened(channel)
        assert ask(stream, b"first") == b"first"
        stream.send(farewell)
        if farewell == b"last":
            assert stream.receive() == farewell
        assert end_of(stream).code() is grpc.StatusCode.OK
        stream.close()
    stream = opened(channel)
    stream.send(b"abort")
    for _ in range(2):
        error = end_of(stream)
        assert (error.code(), error.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "näher nicht")
        assert ("kind", "mine") in [tuple(pair) for pair in error.trailing_metadata()]
        stream.send(b"more")
    stream.close()


@both
def test_nobody_is_there(opened: Open) -> None:
    """UNAVAILABLE, as of any call."""
    with grpc.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as channel:
        stream = opened(channel)
        stream.send(b"anybody?")
        assert end_of(stream).code() is grpc.StatusCode.UNAVAILABLE
        stream.close()


@both
@pytest.mark.parametrize("how", ["cancel", "channel"])
def test_another_thread_ends_it(server: str, opened: Open, how: str) -> None:
    """Who waits learns it at once."""
    channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)
    stream, errors, waiting = opened(channel), list[Any](), threading.Event()
    assert ask(stream, b"first") == b"first"
    stream.send(b"silence")

    def wait() -> None:
        waiting.set()
        try:
            stream.receive()
        except grpc.RpcError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    if how == "cancel":
        stream.cancel()
    else:
        channel.close()
    thread.join(60)
    assert not thread.is_alive()
    assert errors[0].code() is grpc.StatusCode.CANCELLED
    stream.close()
    channel.close()


@both
def test_ctrl_c(channel: grpc.Channel, opened: Open) -> None:
    """Gets through to who waits; the stream has ended then, and others have not."""
    other = opened(channel)
    for _ in range(3):
        stream = opened(channel)
        assert ask(stream, b"first") == b"first"
        stream.send(b"silence")
        main = threading.main_thread().ident or 0
        threading.Timer(0.1, lambda: signal.pthread_kill(main, signal.SIGINT)).start()  # noqa: B023  (called here)
        with pytest.raises(KeyboardInterrupt):
            stream.receive()
        stream.close()
    assert ask(other, b"still") == b"still"
    other.close()


def test_a_direct_stream_leaves_nothing(channel: grpc.Channel) -> None:
    """No thread of the client's, no open file, however it ends."""
    first = direct(channel)
    assert ask(first, b"x") == b"x"
    files = len(os.listdir("/proc/self/fd"))
    for number in range(200):
        stream = direct(channel)
        assert ask(stream, b"x") == b"x"
        if number % 3 == 0:
            stream.send(b"end")
            assert end_of(stream).code() is grpc.StatusCode.OK
        elif number % 3 == 1:
            stream.send(b"silence")
        stream.close()
        stream.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if any(part in name for part in _CLIENT_THREADS)]
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert ask(first, b"still") == b"still"
    first.close()


def test_where_grpc_is_another(channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the parts it needs, sessions are made of the public ones."""
    usual = open_raw_stream(channel, PATH, TOKEN)
    assert isinstance(usual, DirectStream)
    assert ask(usual, b"x") == b"x"
    usual.close()
    monkeypatch.setattr(grpc_streams, "_direct", True)

    class Other:
        """Another grpc's inside."""

    monkeypatch.setattr(grpc_streams, "cygrpc", Other)
    for _ in range(2):
        other = open_raw_stream(channel, PATH, TOKEN)
        assert isinstance(other, QueuedStream)
        assert ask(other, b"x") == b"x"
        other.close()


def test_an_end_in_words() -> None:
    """As grpc's own errors show themselves."""
    assert str(StreamEndedError(grpc.StatusCode.CANCELLED, "why")) == "CANCELLED: why"
