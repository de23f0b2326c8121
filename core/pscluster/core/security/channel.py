"""The client's side over gRPC: both sides prove themselves in every call, the server before the client sends a request.

A channel reconnects by itself, to whatever process listens there by then. So each call, of any arity, is opened as a
stream: its head carries the proof of the channel's session, the server's initial metadata answers it, and only then is
the request sent. That costs a round trip per call; frequent calls use a stream, or the data plane.

    none    --a call--> handshake --the server proves itself--> session; the call is opened
                                  --it does not--> UNAVAILABLE: it is not the role
                                  --it refuses--> its own status, unless the role has proved itself before
    session --a call--> opened --the server's answer is right--> the request is sent
                               --it does not know the session--> none, and the call is opened once more
                               --no answer, or a wrong one--> UNAVAILABLE; the call is cancelled

Nothing unproved is trusted, not even a status: of those that end a call before the server has proved itself, only the
ones count that gRPC itself produces when no server is there.
"""

from __future__ import annotations

import functools
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
    NOT_ACCEPTED,
    PROOF_METADATA,
    SESSION_METADATA,
    UNKNOWN_SESSION,
)
from pscluster.core.security.handshake import UNPROVEN, ClientSession, Secret, accept_reply, make_request
from pscluster.core.transport.base import Metadata, StreamEndedError
from pscluster.core.transport.watchdog import StallWatchdog
from pscluster.v1 import authentication_pb2

HANDSHAKE_SECONDS = 30.0
OPEN_SECONDS = 60.0
"""Time for a server to prove itself: one whose user code holds the GIL for long is not dead."""

_watchdog = StallWatchdog(OPEN_SECONDS)
_opening = threading.local()


@contextmanager
def reporting_calls(report: Callable[[Any], None]) -> Iterator[None]:
    """Pass each call that this thread opens in the block to `report`, before its server has proved itself."""
    _opening.report = report
    try:
        yield
    finally:
        _opening.report = None


class SessionHolder:
    """The session of one channel, and the rules for its calls. Thread-safe."""

    def __init__(self, secret: Secret, address: str, task: tuple[str, int] | None = None) -> None:
        self._secret, self._address, self._task = secret, address, task
        self.session: ClientSession | None = None  # None: a handshake is due
        self._proved = False  # whether a server there has ever proved that it knows the token

    def request(self) -> authentication_pb2.HandshakeRequest:
        return make_request(self._secret, self._address)

    def accept(
        self, request: authentication_pb2.HandshakeRequest, reply: authentication_pb2.HandshakeReply | None
    ) -> ClientSession:
        """Take the server's reply. Raise StreamEndedError if it is missing, proves nothing, or is another task's."""
        if not isinstance(reply, authentication_pb2.HandshakeReply):  # grpc.aio has a special value for none
            raise unproven()
        try:
            session = accept_reply(self._secret, request, reply)
        except UnavailableError:
            raise unproven() from None
        if self._task is not None and self._task != (reply.role, reply.index):
            if self._proved:  # a relay to another role
                raise unproven()
            role, index = self._task
            raise StreamEndedError(
                grpc.StatusCode.UNKNOWN,
                f"{self._address} should be {role} {index}, but {reply.role} {reply.index} answers there: compare the "
                "cluster in TF_CONFIG on both",
                ((KIND_METADATA, "error"),),
            )
        self.session, self._proved = session, True
        return session

    def refused(self, code: grpc.StatusCode, details: str, trailing: Any) -> StreamEndedError:
        """Return the error for a handshake that failed with this status, which is unproved."""
        if self._secret.file is not None:
            details = details.replace(NOT_ACCEPTED, f"{NOT_ACCEPTED} (from {self._secret.file})", 1)
        if code is grpc.StatusCode.UNAUTHENTICATED:  # it may be one role of many that has another token
            task = "" if self._task is None else "{} {} at ".format(*self._task)
            details += f" (refused by {task}{self._address})"
        if code in _OF_TRANSPORT:
            return StreamEndedError(code, details)
        if code not in _OF_REFUSALS:
            return unproven()
        if self._proved:  # by the role: then this refusal does not come from it
            return StreamEndedError(grpc.StatusCode.UNAVAILABLE, details)
        return StreamEndedError(code, details, tuple(trailing or ()))

    def ended(self, session: ClientSession, end: StreamEndedError, *, again: bool) -> StreamEndedError | None:
        """Return the error for a call that ended without a proof; None if another handshake may help."""
        if end.code() in _OF_TRANSPORT:
            return StreamEndedError(end.code(), end.details())
        if self.session is session:
            self.session = None
        if end.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return unproven()
        if again and (SESSION_METADATA, UNKNOWN_SESSION) in (end.trailing_metadata() or ()):
            return None
        return StreamEndedError(grpc.StatusCode.UNAVAILABLE, end.details())


def unproven() -> StreamEndedError:
    """Return the error for a server that does not prove that it knows the token: as if none were there."""
    return StreamEndedError(grpc.StatusCode.UNAVAILABLE, UNPROVEN)


_OF_TRANSPORT = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
"""Statuses with which gRPC itself ends calls: they need no proof."""

_OF_REFUSALS = frozenset(
    {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT}
)


def is_proved(initial: Any, expected: str) -> bool:
    """Return whether the server's initial metadata holds the expected proof.

    False: there is no initial metadata, but only a status. StreamEndedError: the metadata is another server's.
    """
    given = [str(value) for key, value in initial or () if key == PROOF_METADATA]
    if given and hmac.compare_digest(given[0].encode(), expected.encode()):
        return True
    if len(tuple(initial or ())):
        raise unproven()
    return False


class _Gate:
    """Holds requests back until the server has proved itself; grpc's own thread reads them."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._requests = requests
        self._decided = threading.Event()
        self._open = False

    def decide(self, *, is_open: bool) -> None:
        self._open = is_open
        self._decided.set()

    def __iter__(self) -> Iterator[Any]:
        self._decided.wait()
        if self._open:
            yield from self._requests


class AuthenticatedChannel(grpc.Channel):
    """A channel to one address, and to `task` if given, whose calls are authenticated by a token."""

    def __init__(
        self, channel: grpc.Channel, secret: Secret, address: str, task: tuple[str, int] | None = None
    ) -> None:
        self._plain = channel
        self._holder = SessionHolder(secret, address, task)
        self._shake_hands: Any = channel.stream_unary(
            HANDSHAKE_PATH, response_deserializer=authentication_pb2.HandshakeReply.FromString
        )

    def session(self, timeout: float | None = None, *, wait_for_ready: bool = False) -> ClientSession:
        """Return the channel's session, after a handshake if there is none. grpc.RpcError if that fails.

        The handshake has a lower limit than `timeout`, unless it waits for a server, as grpc's calls do.
        """
        if (session := self._holder.session) is not None:
            return session
        request = self._holder.request()
        metadata = ((HANDSHAKE_METADATA, request.SerializeToString()),)
        try:
            limit = timeout if wait_for_ready else min(timeout or HANDSHAKE_SECONDS, HANDSHAKE_SECONDS)
            asking = self._shake_hands.future(iter(()), timeout=limit, metadata=metadata, wait_for_ready=wait_for_ready)
            if (report := getattr(_opening, "report", None)) is not None:
                report(asking)
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
        """Start a call, and return it once the server has proved itself. grpc.RpcError if it does not.

        `start` is given all metadata and the remaining seconds, and must not send a request yet.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        for again in (True, False):
            session = self.session(seconds_left(deadline), wait_for_ready=wait_for_ready)
            header, expected = session.next_call(path)
            call = start((*(metadata or ()), (CALL_METADATA, header)), seconds_left(deadline))
            opening = _Opening(call)
            if (report := getattr(_opening, "report", None)) is not None:
                report(call)
            try:
                with _watchdog.with_call(opening):
                    if is_proved(call.initial_metadata(), expected):
                        return call
                    end = StreamEndedError(call.code(), call.details() or "", call.trailing_metadata() or ())
                if opening.late:
                    raise unproven()
            except BaseException:
                call.cancel()
                raise
            failure = self._holder.ended(session, end, again=again)
            try:
                if failure is not None:
                    raise failure
            finally:
                # The error and this frame would hold each other, and the call with its requests.
                del end, call, opening, failure
        raise AssertionError("the second try ends it")

    def _method(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, *, shape: str, **_: Any
    ) -> _Method:
        return _Method(self, self._plain, path, request_serializer, response_deserializer, shape)

    unary_unary = functools.partialmethod(_method, shape="unary_unary")
    unary_stream = functools.partialmethod(_method, shape="unary_stream")
    stream_unary = functools.partialmethod(_method, shape="stream_unary")
    stream_stream = functools.partialmethod(_method, shape="stream_stream")

    def subscribe(self, callback: Any, try_to_connect: Any = False) -> None:
        self._plain.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        self._plain.unsubscribe(callback)

    def close(self) -> None:
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
        """Cancel the call: the server took too long."""
        self.late = True
        self._call.cancel()
        return True


def seconds_left(deadline: float | None) -> float | None:
    """Return the seconds until the deadline, 0 after it; None without one."""
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


class _Method:
    """A method of any arity, on such a channel."""

    def __init__(
        self, channel: AuthenticatedChannel, plain: grpc.Channel, path: str, serialize: Any, parse: Any, shape: str
    ) -> None:
        self._channel, self._path = channel, path
        self._takes, self._gives = shape.split("_")
        make = plain.stream_stream if self._gives == "stream" else plain.stream_unary
        call: Any = make(path, request_serializer=serialize, response_deserializer=parse)
        self._begin = call if self._gives == "stream" else call.future

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        call = self.future(request, timeout, metadata, **more)
        if self._gives == "stream":
            return call
        try:
            return call.result()
        except BaseException:
            call.cancel()  # Ctrl-C: else the sending thread would wait for ever
            raise

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **more: Any) -> Any:
        """Start the call, as grpc's `future` does, and return it once the server has proved itself."""
        requests = request if self._takes == "stream" else (request,)
        gates: list[_Gate] = []

        def start(whole: Metadata, left: float | None) -> Any:
            gates.append(_Gate(requests))
            return self._begin(iter(gates[-1]), timeout=left, metadata=whole, **more)

        is_open = False
        try:
            wait = bool(more.get("wait_for_ready"))
            call = self._channel.open(self._path, start, metadata, timeout, wait_for_ready=wait)
            is_open = True
        finally:
            for gate in gates:
                gate.decide(is_open=is_open and gate is gates[-1])
        return call
