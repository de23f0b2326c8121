"""One call on the data plane, as its server sees it: the messages that arrive, and the handler's answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from pscluster.core.errors import ProtocolError
from pscluster.core.transport.admission import Admission, Waiting
from pscluster.core.transport.frames import Buffer
from pscluster.core.transport.methods import behaviour_of
from pscluster.core.transport.tcp.context import DataContext
from pscluster.core.transport.tcp.packets import Connection, Kind

_SMALL_BYTES = 4 << 10  # of an arriving message, uncounted; every connection may hold this much

Buffers = bytes | Sequence[Buffer]
"""An answer; see `ServerCall.reply`."""


class CallBrokenError(grpc.RpcError):
    """The caller disconnected or sent an invalid packet: raised when a message is requested, as gRPC does."""


class Requests:
    """The messages of a call, up to the client's END. Raises CallBrokenError if the connection breaks."""

    def __init__(self, connection: Connection, context: DataContext, admission: Admission | None = None) -> None:
        self._connection, self._context, self._admission = connection, context, admission
        self._waiting: Waiting | None = None
        self._ended = False
        self.broken = False

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._ended:
            raise StopIteration
        try:
            kind, body = self._connection.receive(self._context.destination, self._announce)
        except (OSError, ProtocolError) as error:
            self.broken = True
            raise CallBrokenError(str(error)) from None
        finally:
            if self._waiting is not None and self._admission is not None:
                self._admission.leave(self._waiting)
                self._waiting = None
        if kind is Kind.END:
            self._ended, self._context.destination = True, None
            raise StopIteration
        if kind is not Kind.MESSAGE:
            self.broken = True
            raise CallBrokenError(f"{kind.name} within a call")
        return body

    def _announce(self, size: int) -> None:
        """Count an arriving message of `size` bytes, unless it is small."""
        if size > _SMALL_BYTES and self._admission is not None and not self._context.has_room:
            self._waiting = self._admission.enter(self._context, size)

    def drop_rest(self) -> None:
        """Drop the messages that the client still sends after the end of its call."""
        self._context.destination = None
        for _ in self:
            pass


def answers_of(handler: Any, requests: Iterator[bytes], context: DataContext) -> Iterator[Buffers]:
    """Yield the handler's answers, whatever its arity."""
    parse, serialize = handler.request_deserializer, handler.response_serializer
    given: Any = requests if parse is None else map(parse, requests)
    if not handler.request_streaming:
        given = next(given, None)
        if given is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without a request")
    answer = behaviour_of(handler)(given, context)
    answers = iter((answer or ()) if handler.response_streaming else (answer,))
    try:
        yield from answers if serialize is None else map(serialize, answers)
    finally:
        if (close := getattr(answers, "close", None)) is not None:
            close()
