"""The client's side over gRPC: channels on which every call proves itself, and sends nothing before the server has.

A channel connects again by itself, whoever listens there by then. So each call, of whatever kind, is opened as a
stream: its head carries the proof of the channel's session, the server's initial metadata the answer to that, and only
then the request is sent. It costs a round trip a call; what is called often has a stream, or the data plane.

    none    --a call--> handshake --the server proves itself--> session; the call is opened
                                  --it does not--> UNAVAILABLE: whoever it is, it is not the role
                                  --it refuses--> its own status, unless somebody there has proved itself before
    session --a call--> opened --the server's answer is right--> the request is sent
                               --it knows no such session--> none, and the call is opened once more
                               --no answer, or another one--> UNAVAILABLE; the call is cancelled

What is not proved is not believed, a status neither: of those that end a call before the server has proved itself only
gRPC's own count, as it makes them itself where nobody is there.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc

from pscluster.core.errors import KIND_METADATA, UnavailableError
from pscluster.core.security.authenticator import (
    CALL_METADATA,
    HANDSHAKE_METADATA,
    HANDSHAKE_PATH,
    PROOF_METADATA,
    SESSION_METADATA,
    UNKNOWN_SESSION,
)
from pscluster.core.security.handshake import UNPROVEN, ClientSession, Secret, accept_reply, make_request
from pscluster.core.transport.grpc_streams import (
    DirectStream,
    Metadata,
    QueuedStream,
    Stream,
    StreamEndedError,
    open_raw_stream,
)
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.v1 import authentication_pb2

HANDSHAKE_SECONDS = 30.0
OPEN_SECONDS = 60.0
"""How long a server may take to prove itself: one whose user's code holds Python's lock for long is not dead."""

_watchdog = StallWatchdog(OPEN_SECONDS)
_opening = threading.local()


@contextmanager
def telling(tell: Callable[[Any], None]) -> Iterator[None]:
    """Tell of each call that this thread opens in the block, before its server has proved itself: to cancel it."""
    _opening.tell = tell
    try:
        yield
    finally:
        _opening.tell = None


class SessionHolder:
    """The session of one channel, and what a call of it needs. Any thread."""

    def __init__(self, secret: Secret, address: str, task: tuple[str, int] | None = None) -> None:
        self._secret, self._address, self._task = secret, address, task
        self._session: ClientSession | None = None
        self._proved = False  # has anybody there ever proved to know the token?

    @property
    def session(self) -> ClientSession | None:
        """None: a handshake is due."""
        return self._session

    def forget(self, session: ClientSession) -> None:
        """The server does not know it any more."""
        if self._session is session:
            self._session = None

    def request(self) -> authentication_pb2.HandshakeRequest:
        """What a handshake begins with."""
        return make_request(self._secret, self._address)

    def accept(
        self, request: authentication_pb2.HandshakeRequest, reply: authentication_pb2.HandshakeReply | None
    ) -> ClientSession:
        """Take the server's reply. StreamEndedError if it proves nothing, there is none, or it is another task's."""
        if not isinstance(reply, authentication_pb2.HandshakeReply):  # grpc.aio has a value of its own for none
            raise unproven()
        try:
            session = accept_reply(self._secret, request, reply)
        except UnavailableError:
            raise unproven() from None
        if self._task is not None and self._task != (reply.role, reply.index):
            if self._proved:  # somebody who passes on what is meant for another role
                raise unproven()
            role, index = self._task
            raise StreamEndedError(
                grpc.StatusCode.UNKNOWN,
                f"{self._address} should be {role} {index}, but {reply.role} {reply.index} answers there: compare the "
                "cluster in TF_CONFIG on both",
                ((KIND_METADATA, "error"),),
            )
        self._session, self._proved = session, True
        return session

    def refused(self, code: grpc.StatusCode, details: str, trailing: Any) -> StreamEndedError:
        """Return what to make of a handshake that failed, of which nothing is proved.

        Where the role has proved itself before, whoever answers otherwise now is not the role.
        """
        if code in _OF_TRANSPORT:
            return StreamEndedError(code, details)
        if code not in _OF_REFUSALS:
            return unproven()
        if self._proved:
            return StreamEndedError(grpc.StatusCode.UNAVAILABLE, details)
        return StreamEndedError(code, details, tuple(trailing or ()))

    def ended(self, session: ClientSession, end: StreamEndedError, *, again: bool) -> StreamEndedError | None:
        """Return what to make of a call that ended without a proof; None: it is worth another handshake."""
        if end.code() in _OF_TRANSPORT:
            return StreamEndedError(end.code(), end.details())
        self.forget(session)
        if end.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return unproven()
        if is_unknown(end.trailing_metadata()) and again:
            return None
        return StreamEndedError(grpc.StatusCode.UNAVAILABLE, end.details())


def unproven() -> StreamEndedError:
    """Nobody who knows the token is there: as if nobody were."""
    return StreamEndedError(grpc.StatusCode.UNAVAILABLE, UNPROVEN)


_OF_TRANSPORT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""What gRPC itself ends calls with, and what is believed of anybody."""

_OF_REFUSALS = frozenset(
    {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT}
)


def proof_of(metadata: Any) -> str | None:
    """What the server's initial metadata answers; None if nothing."""
    return next((str(value) for key, value in metadata or () if key == PROOF_METADATA), None)


def is_unknown(trailing: Any) -> bool:
    """Does the server not know the session?"""
    return any(key == SESSION_METADATA and value == UNKNOWN_SESSION for key, value in trailing or ())


class _Gate:
    """Requests that wait until the server has proved itself; grpc's own thread reads them."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._requests = requests
        self._decided = threading.Event()
        self._open = False

    def decide(self, *, is_open: bool) -> None:
        """Let them pass, or none of them."""
        self._open = is_open
        self._decided.set()

    def __iter__(self) -> Iterator[Any]:
        self._decided.wait()
        if self._open:
            yield from self._requests


class AuthenticatedChannel(grpc.Channel):
    """A channel to one address, whose calls are authenticated by a token."""

    def __init__(
        self, channel: grpc.Channel, secret: Secret, address: str, task: tuple[str, int] | None = None
    ) -> None:
        """Nothing is dialled yet.

        Args:
            task: the role and index that are to be there; None: any.
        """
        self._plain = channel
        self._holder = SessionHolder(secret, address, task)
        self._shake_hands: Any = channel.stream_unary(
            HANDSHAKE_PATH, response_deserializer=authentication_pb2.HandshakeReply.FromString
        )

    def session(self, timeout: float | None = None, *, wait_for_ready: bool = False) -> ClientSession:
        """That of this channel; by a handshake where there is none. grpc.RpcError if that fails.

        Args:
            timeout: in seconds; the handshake's own limit is less, unless it waits for somebody to be there.
            wait_for_ready: as of grpc's calls.
        """
        if (session := self._holder.session) is not None:
            return session
        request = self._holder.request()
        metadata = ((HANDSHAKE_METADATA, request.SerializeToString()),)
        try:
            limit = timeout if wait_for_ready else min(timeout or HANDSHAKE_SECONDS, HANDSHAKE_SECONDS)
            asking = self._shake_hands.future(iter(()), timeout=limit, metadata=metadata, wait_for_ready=wait_for_ready)
            if (tell := getattr(_opening, "tell", None)) is not None:
                tell(asking)
            try:
                reply = asking.result()
            except BaseException:
                asking.cancel()
                raise
        except grpc.RpcError as error:
            raise self._holder.refused(error.code(), error.details() or "", error.trailing_metadata()) from None
        return self._holder.accept(request, reply)

    def open(
        self,
        path: str,
        start: Callable[[Metadata, float | None], Any],
        metadata: Any = None,
        timeout: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Any:
        """Start a call whose server has proved itself. grpc.RpcError if it has not.

        Args:
            start: is given all metadata and the seconds that are left, and starts the call, of which nothing may be
                sent yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for again in (True, False):
            session = self.session(seconds_left(deadline), wait_for_ready=wait_for_ready)
            header, expected = session.next_call(path)
            call = start((*(metadata or ()), (CALL_METADATA, header)), seconds_left(deadline))
            opening = _Opening(call)
            if (tell := getattr(_opening, "tell", None)) is not None:
                tell(call)
            try:
                with _watchdog.with_call(opening):
                    initial = call.initial_metadata()
                    proof = proof_of(initial)
                    if proof is not None and hmac.compare_digest(proof.encode(), expected.encode()):
                        return call
                    if initial:  # else it is a status alone, which is there as well
                        raise unproven()
                    end = _end_of(call)
                if opening.late:
                    raise unproven()
            except BaseException:
                (call.close if isinstance(call, DirectStream) else call.cancel)()
                raise
            failure = self._holder.ended(session, end, again=again)
            try:
                if failure is not None:
                    raise failure
            finally:
                # The error and this frame would hold each other, and the call with what it was to send.
                del end, call, opening, failure
        raise AssertionError("the second try ends it")

    def open_stream(self, path: str, metadata: Metadata) -> Stream:
        """A stream of raw bytes for a method by its path."""
        stream: DirectStream | QueuedStream = self.open(
            path, lambda whole, _left: open_raw_stream(self._plain, path, whole), metadata
        )
        return stream

    def _method(self, path: str, serialize: Any, parse: Any, kind: type[_Method]) -> Any:
        return kind(self, self._plain, path, serialize, parse)

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, _UnaryUnary)

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, _UnaryStream)

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, _StreamUnary)

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, *_: Any, **__: Any
    ) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, _StreamStream)

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        """As grpc's."""
        self._plain.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """As grpc's."""
        self._plain.unsubscribe(callback)

    def close(self) -> None:
        """As grpc's."""
        self._plain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Opening:
    """A call whose server has not proved itself yet."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.late = False

    def cancel(self) -> bool:
        """The server has had its time."""
        self.late = True
        self._call.cancel()
        return True


def seconds_left(deadline: float | None) -> float | None:
    """Seconds; 0 behind it."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _end_of(call: Any) -> StreamEndedError:
    if isinstance(call, (DirectStream, QueuedStream)):
        return call.end_of()
    return StreamEndedError(call.code(), call.details() or "", call.trailing_metadata() or ())


class _Method:
    """A method of any arity, on such a channel."""

    _streams = False

    def __init__(self, channel: AuthenticatedChannel, plain: grpc.Channel, path: str, serialize: Any, parse: Any):
        self._channel, self._path = channel, path
        make = plain.stream_stream if self._streams else plain.stream_unary
        self._call: Any = make(path, request_serializer=serialize, response_deserializer=parse)

    def _open(self, requests: Iterable[Any], timeout: float | None, metadata: Any, more: dict[str, Any]) -> Any:
        gates: list[_Gate] = []

        def start(whole: Metadata, left: float | None) -> Any:
            gates.append(_Gate(requests))
            begin = self._call if self._streams else self._call.future
            return begin(iter(gates[-1]), timeout=left, metadata=whole, **more)

        is_open = False
        try:
            wait = bool(more.get("wait_for_ready"))
            call = self._channel.open(self._path, start, metadata, timeout, wait_for_ready=wait)
            is_open = True
        finally:
            for gate in gates:
                gate.decide(is_open=is_open and gate is gates[-1])
        return call

    def _result(self, requests: Iterable[Any], timeout: float | None, metadata: Any, more: dict[str, Any]) -> Any:
        call = self._open(requests, timeout, metadata, more)
        try:
            return call.result()
        except BaseException:
            call.cancel()  # Ctrl-C: else the thread that sends would wait for ever
            raise


class _UnaryUnary(_Method):
    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._result((request,), timeout, metadata, more)


class _StreamUnary(_Method):
    def __call__(self, requests: Iterable[Any], timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._result(requests, timeout, metadata, more)

    def future(self, requests: Iterable[Any], timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        """As grpc's, once the server has proved itself."""
        return self._open(requests, timeout, metadata, more)


class _UnaryStream(_Method):
    _streams = True

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._open((request,), timeout, metadata, more)


class _StreamStream(_Method):
    _streams = True

    def __call__(self, requests: Iterable[Any], timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        return self._open(requests, timeout, metadata, more)
