"""A stream over gRPC against a real server: what it carries, how it ends, what it leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tests.conftest import grpc_server
from tests.waiting import until

from pscluster.core.transport.base import StreamEndedError
from pscluster.core.transport.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from pscluster.core.transport.grpc_streams import GrpcStream

PATH = "/echo/Session"
TOKEN = (("token", "t"),)


def session(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    """Echo, until told to do something else."""
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
    """The address of a server."""
    handlers: Any = {"Session": grpc.stream_stream_rpc_method_handler(session)}
    with grpc_server(300, options=SERVER_OPTIONS) as running:
        running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
        address = f"127.0.0.1:{running.add_insecure_port('127.0.0.1:0')}"
        running.start()
        yield address


@pytest.fixture
def channel(server: str) -> Iterator[grpc.Channel]:
    """A channel to it."""
    with grpc.insecure_channel(server, options=CHANNEL_OPTIONS) as channel:
        yield channel


def opened(channel: grpc.Channel) -> GrpcStream:
    """An open call."""
    return GrpcStream(channel, PATH, TOKEN)


def ask(stream: GrpcStream, request: bytes) -> bytes:
    """Make an exchange."""
    stream.send(request)
    return stream.receive()


def end_of(stream: GrpcStream) -> Any:
    """The error that receiving raises."""
    with pytest.raises(grpc.RpcError) as raised:
        stream.receive()
    return raised.value


def test_exchanges(channel: grpc.Channel) -> None:
    """Small and large messages are exchanged, one after the other, on several streams of a channel."""
    first, second = opened(channel), opened(channel)
    for size in (0, 1, 1000, 1 << 20, 5 << 20, 7):
        for stream in (first, second):
            assert ask(stream, b"x" * size) == b"x" * size
    first.close()
    assert ask(second, b"still") == b"still"
    second.close()


def test_the_server_ends_it(channel: grpc.Channel) -> None:
    """It ends cleanly, even after a last reply, or with a status, message and metadata, which can be asked for
    again."""
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


def test_nobody_is_there() -> None:
    """The status is UNAVAILABLE, as for any call."""
    with grpc.insecure_channel("127.0.0.1:1", options=CHANNEL_OPTIONS) as channel:
        stream = opened(channel)
        stream.send(b"anybody?")
        assert end_of(stream).code() is grpc.StatusCode.UNAVAILABLE
        stream.close()


@pytest.mark.parametrize("how", ["cancel", "channel"])
def test_another_thread_ends_it(server: str, how: str) -> None:
    """A waiting thread is told immediately."""
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


def test_ctrl_c(channel: grpc.Channel) -> None:
    """Ctrl-C reaches the waiting thread; that stream has ended then, and others have not."""
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


def threads_of_calls() -> int:
    """The threads of gRPC's client."""
    return sum("(_run)" in thread.name for thread in threading.enumerate())


def test_a_stream_leaves_nothing(channel: grpc.Channel) -> None:
    """It leaves no thread and no open file, however it ends."""
    first = opened(channel)
    assert ask(first, b"x") == b"x"
    files, threads = len(os.listdir("/proc/self/fd")), threads_of_calls()
    for index in range(200):
        stream = opened(channel)
        assert ask(stream, b"x") == b"x"
        if index % 3 == 0:
            stream.send(b"end")
            assert end_of(stream).code() is grpc.StatusCode.OK
        elif index % 3 == 1:
            stream.send(b"silence")
        stream.close()
        stream.close()
    until(lambda: threads_of_calls() <= threads, "the threads of the streams have ended")
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert ask(first, b"still") == b"still"
    first.close()


def test_an_end_in_words() -> None:
    """The error is shown like grpc's own."""
    assert str(StreamEndedError(grpc.StatusCode.CANCELLED, "why")) == "CANCELLED: why"
