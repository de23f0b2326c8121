"""gRPC services read from the proto descriptors: one table of methods for servers and for clients.

A message with a `payload` in field 15 travels as raw bytes (see `frames`); its generated class (de)serializes any
other. Servicers raise our errors, which become a status here.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, FunctionCancelled, MisuseError, ProtocolError, PsClusterError, kind_of
from pscluster.core.limits import MAX_CONTROL_BYTES, shortened
from pscluster.core.transport.watchdog import StallWatchdog

logger = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Lookup = Callable[[grpc.HandlerCallDetails], "Handler | None"]
"""Finds the handler of a call, as interceptors are given to continue."""

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a service, for both sides."""

    path: str
    name: str
    client_streaming: bool
    server_streaming: bool
    serialize_request: Callable[[Any], bytes] | None
    parse_request: Callable[[bytes], Any] | None
    serialize_reply: Callable[[Any], bytes] | None
    parse_reply: Callable[[bytes], Any] | None

    @property
    def shape(self) -> str:
        """Return grpc's name of the arity, such as "unary_stream"."""
        return _shape(self.client_streaming, self.server_streaming)


def _shape(client_streaming: bool, server_streaming: bool) -> str:
    word = {False: "unary", True: "stream"}
    return f"{word[client_streaming]}_{word[server_streaming]}"


def _codec(descriptor: Descriptor) -> tuple[Callable[[Any], bytes] | None, Callable[[bytes], Any] | None]:
    payload = descriptor.fields_by_number.get(15)
    if payload is not None and payload.name == "payload":
        return None, None  # raw: gRPC hands the bytes through
    cls: Any = message_factory.GetMessageClass(descriptor)
    return cls.SerializeToString, cls.FromString


def methods(service: ServiceDescriptor) -> Iterator[Method]:
    for method in service.methods:
        yield Method(
            f"/{service.full_name}/{method.name}",
            re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower(),
            method.client_streaming,
            method.server_streaming,
            *_codec(method.input_type),
            *_codec(method.output_type),
        )


def abort(context: grpc.ServicerContext, error: PsClusterError) -> None:
    """End the call with the error's status. Raises, as grpc's `abort` does."""
    kind, status = kind_of(error)
    context.set_trailing_metadata(((KIND_METADATA, kind),))
    context.abort(status, shortened(str(error)))


def _parsed(method: Method, behaviour: Behaviour) -> Behaviour:
    """Parse the requests of a behaviour: invalid bytes are a ProtocolError, not a traceback."""
    parse = method.parse_request
    if parse is None:
        return behaviour

    limit = math.inf if method.client_streaming else MAX_CONTROL_BYTES  # streams carry arguments of functions

    def message(data: bytes) -> Any:
        if len(data) > limit:
            raise ProtocolError(f"{len(data):,} bytes in one request to {method.path}; the limit is {limit:,}")
        try:
            return parse(data)
        except DecodeError as error:
            raise ProtocolError(f"not a message of {method.path}: {error}") from None

    if method.client_streaming:
        return lambda stream, context: behaviour(map(message, stream), context)
    return lambda data, context: behaviour(message(data), context)


# grpc does not catch these: the thread would end and the call would not.
_UNSEEN = (SystemExit, FunctionCancelled)


OnAccepted = Callable[[str], None]
"""Called with the peer, as gRPC names it, of every accepted call."""


@contextmanager
def _accepted(context: grpc.ServicerContext, on_accepted: OnAccepted) -> Iterator[None]:
    """Report the call as accepted, and end it with the status of an error in the block."""
    on_accepted(context.peer())
    try:
        yield
    except PsClusterError as error:
        abort(context, error)
    except _UNSEEN as error:
        abort(context, MisuseError(f"user code that ran here raised {error!r}"))


def _unary(behaviour: Behaviour, on_accepted: OnAccepted) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        with _accepted(context, on_accepted):
            return behaviour(request, context)

    return call


def _streaming(behaviour: Behaviour, on_accepted: OnAccepted) -> Behaviour:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        with _accepted(context, on_accepted):
            yield from behaviour(request, context)

    return call


def generic_handler(
    service: ServiceDescriptor, servicer: object, on_accepted: OnAccepted = lambda _peer: None
) -> grpc.GenericRpcHandler:
    """Return a handler for all methods of the service: the servicer implements each under its name in snake case."""
    handlers = {}
    for method in methods(service):
        behaviour = getattr(servicer, method.name)
        wrap = _streaming if method.server_streaming else _unary
        make = getattr(grpc, f"{method.shape}_rpc_method_handler")
        handlers[method.path.rsplit("/", 1)[1]] = make(
            wrap(_parsed(method, behaviour), on_accepted), response_serializer=method.serialize_reply
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


REQUEST_SECONDS = 30.0
"""Time for a call to send its only request."""

_watchdog = StallWatchdog(REQUEST_SECONDS)

Before = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]
"""Given the requests of a call, returns those that the handler reads, or aborts the call."""


def behaviour_of(handler: Any) -> Callable[..., Any]:
    """Return a handler's function, whatever its arity."""
    behaviour: Callable[..., Any] = getattr(handler, _shape(handler.request_streaming, handler.response_streaming))
    return behaviour


def guarded(handler: Any, path: str, before: Before, watchdog: StallWatchdog | None = None) -> Handler:
    """Return the handler of a method, with a check before it.

    Whatever the method's arity, the result takes a stream of requests, which is read only on demand: of a refused call
    only the head is read, and no thread waits for the rest.
    """
    behaviour, streams = behaviour_of(handler), handler.request_streaming

    @functools.wraps(behaviour)  # also keeps the attributes that grpc's health check sets on its method
    def call(requests: Iterator[Any], context: grpc.ServicerContext, *rest: Any) -> Any:
        given: Any = before(requests, context)
        if not streams:
            with (watchdog or _watchdog).with_call(context):
                given = next(given, None)
            if given is None:
                abort(context, ProtocolError(f"a call to {path} without a request"))
        return behaviour(given, context, *rest)

    make = getattr(grpc, f"{_shape(True, handler.response_streaming)}_rpc_method_handler")
    made: Handler = make(call, handler.request_deserializer, handler.response_serializer)
    return made


class Stub:
    """Callables for the methods of a service on a channel (blocking or asyncio), by their names in snake case."""

    def __init__(self, channel: Any, service: ServiceDescriptor) -> None:
        for method in methods(service):
            call = getattr(channel, method.shape)(
                method.path, request_serializer=method.serialize_request, response_deserializer=method.parse_reply
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:  # only for names not set above; tells mypy about the others
        raise AttributeError(name)
