"""gRPC services read from the proto descriptors: one table of methods for servers and for clients.

A message with a `payload` in field 15 travels as raw bytes (see `frames`); every other one is (de)serialised
by its generated class. Servicers raise our errors; here they become a status, and back.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, ServiceDescriptor
from google.protobuf.message import DecodeError

from pscluster.core.errors import KIND_METADATA, FunctionCancelled, MisuseError, ProtocolError, PsClusterError, kind_of
from pscluster.core.limits import MAX_CONTROL_BYTES, shortened

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service, as both sides need it."""

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
        """grpc's word for the arity, such as "unary_stream"."""
        word = {False: "unary", True: "stream"}
        return f"{word[self.client_streaming]}_{word[self.server_streaming]}"


def _codec(descriptor: Descriptor) -> tuple[Callable[[Any], bytes] | None, Callable[[bytes], Any] | None]:
    payload = descriptor.fields_by_number.get(15)
    if payload is not None and payload.name == "payload":
        return None, None  # raw: gRPC hands the bytes through
    cls: Any = message_factory.GetMessageClass(descriptor)
    return cls.SerializeToString, cls.FromString


def methods(service: ServiceDescriptor) -> Iterator[Method]:
    """The methods of a service."""
    for method in service.methods:
        serialize_request, parse_request = _codec(method.input_type)
        serialize_reply, parse_reply = _codec(method.output_type)
        yield Method(
            path=f"/{service.full_name}/{method.name}",
            name=re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower(),
            client_streaming=method.client_streaming,
            server_streaming=method.server_streaming,
            serialize_request=serialize_request,
            parse_request=parse_request,
            serialize_reply=serialize_reply,
            parse_reply=parse_reply,
        )


def abort(context: grpc.ServicerContext, error: PsClusterError) -> None:
    """End the call with the error's status; raises, as grpc does."""
    kind, status = kind_of(error)
    context.set_trailing_metadata(((KIND_METADATA, kind),))
    context.abort(status, shortened(str(error)))


def _parsed(
    method: Method, behaviour: Callable[[Any, grpc.ServicerContext], Any]
) -> Callable[[Any, grpc.ServicerContext], Any]:
    """Let the behaviour have messages where bytes come: what is no message is an error of ours, not a traceback."""
    parse = method.parse_request
    if parse is None:
        return behaviour

    def message(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            raise ProtocolError(f"not a message of {method.path}: {error}") from None

    def small(data: bytes) -> Any:
        if len(data) > MAX_CONTROL_BYTES:
            raise ProtocolError(
                f"{len(data):,} bytes in one request to {method.path}, the limit is {MAX_CONTROL_BYTES:,}"
            )
        return message(data)

    if method.client_streaming:  # arguments of functions
        return lambda stream, context: behaviour(map(message, stream), context)
    return lambda data, context: behaviour(small(data), context)


# grpc does not catch these: the thread would end and the call would not.
_UNSEEN = (SystemExit, FunctionCancelled)


OnAccepted = Callable[[str], None]
"""Is told of every call that was accepted whose it is, as gRPC names the peer."""


def _unary(
    behaviour: Callable[[Any, grpc.ServicerContext], Any], on_accepted: OnAccepted
) -> Callable[[Any, grpc.ServicerContext], Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Any:
        on_accepted(context.peer())
        try:
            return behaviour(request, context)
        except PsClusterError as error:
            return abort(context, error)
        except _UNSEEN as error:
            return abort(context, MisuseError(f"what ran here for a user raised {error!r}"))

    return call


def _streaming(
    behaviour: Callable[[Any, grpc.ServicerContext], Any], on_accepted: OnAccepted
) -> Callable[[Any, grpc.ServicerContext], Any]:
    def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        on_accepted(context.peer())
        try:
            yield from behaviour(request, context)
        except PsClusterError as error:
            abort(context, error)
        except _UNSEEN as error:
            abort(context, MisuseError(f"what ran here for a user raised {error!r}"))

    return call


def generic_handler(
    service: ServiceDescriptor, servicer: object, on_accepted: OnAccepted = lambda _peer: None
) -> grpc.GenericRpcHandler:
    """A handler for all methods of the service, each implemented by the servicer's method in snake case."""
    handlers = {}
    for method in methods(service):
        behaviour = getattr(servicer, method.name)
        wrap = _streaming if method.server_streaming else _unary
        make = getattr(grpc, f"{method.shape}_rpc_method_handler")
        handlers[method.path.rsplit("/", 1)[1]] = make(
            wrap(_parsed(method, behaviour), on_accepted), response_serializer=method.serialize_reply
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class Stub:
    """Callables for the methods of a service on a channel (of either kind), by their name in snake case."""

    def __init__(self, channel: Any, service: ServiceDescriptor) -> None:
        for method in methods(service):
            call = getattr(channel, method.shape)(
                method.path,
                request_serializer=method.serialize_request,
                response_deserializer=method.parse_reply,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:  # only for what was not set above: tells mypy of the others
        raise AttributeError(name)
