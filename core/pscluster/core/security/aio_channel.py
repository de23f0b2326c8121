"""The same as `channel`, for the coordinator's event loop: the states are there."""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, Self

import grpc

from pscluster.core.security.authenticator import CALL_METADATA, HANDSHAKE_METADATA, HANDSHAKE_PATH
from pscluster.core.security.channel import (
    HANDSHAKE_SECONDS,
    OPEN_SECONDS,
    SessionHolder,
    proof_of,
    seconds_left,
    unproven,
)
from pscluster.core.security.handshake import ClientSession, Secret
from pscluster.core.transport.grpc_streams import StreamEndedError
from pscluster.v1 import authentication_pb2


class AuthenticatedAioChannel:
    """What is used of a grpc.aio.Channel, with calls that are authenticated by a token."""

    def __init__(
        self, channel: grpc.aio.Channel, secret: Secret, address: str, task: tuple[str, int] | None = None
    ) -> None:
        """Nothing is dialled yet; see `AuthenticatedChannel`."""
        self._plain = channel
        self._holder = SessionHolder(secret, address, task)
        self._shake_hands: Any = channel.stream_unary(
            HANDSHAKE_PATH, response_deserializer=authentication_pb2.HandshakeReply.FromString
        )

    async def session(self, timeout: float | None = None) -> ClientSession:
        """That of this channel; by a handshake where there is none. grpc.RpcError if that fails."""
        if (session := self._holder.session) is not None:
            return session
        request = self._holder.request()
        metadata = ((HANDSHAKE_METADATA, request.SerializeToString()),)
        try:
            limit = min(timeout or HANDSHAKE_SECONDS, HANDSHAKE_SECONDS)
            reply = await self._shake_hands(timeout=limit, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise self._holder.refused(error.code(), error.details() or "", error.trailing_metadata()) from None
        return self._holder.accept(request, reply)

    async def open(self, path: str, method: Any, metadata: Any, timeout: float | None) -> Any:
        """Start a call whose server has proved itself. grpc.RpcError if it has not."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for again in (True, False):
            session = await self.session(seconds_left(deadline))
            header, expected = session.next_call(path)
            call = method(metadata=(*(metadata or ()), (CALL_METADATA, header)), timeout=seconds_left(deadline))
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    initial = await call.initial_metadata()
                    proof = proof_of(initial)
                    if proof is not None and hmac.compare_digest(proof.encode(), expected.encode()):
                        return call
                    if len(tuple(initial or ())):  # else it is a status alone, which is there as well
                        raise unproven()
                    end = StreamEndedError(
                        await call.code(), await call.details() or "", tuple(await call.trailing_metadata() or ())
                    )
            except TimeoutError:
                call.cancel()
                raise unproven() from None
            except BaseException:
                call.cancel()
                raise
            failure = self._holder.ended(session, end, again=again)
            try:
                if failure is not None:
                    raise failure
            finally:
                # The error and this frame would hold each other and the call, which holds its connection.
                del end, call, failure
        raise AssertionError("the second try ends it")

    def _method(self, path: str, serialize: Any, parse: Any, *, streaming: tuple[bool, bool]) -> _Method:
        inner = self._plain.stream_stream(path, request_serializer=serialize, response_deserializer=parse)
        return _Method(self, path, inner, streaming)

    def unary_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, streaming=(False, False))

    def unary_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, streaming=(False, True))

    def stream_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, streaming=(True, False))

    def stream_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None) -> Any:
        """As grpc's."""
        return self._method(method, request_serializer, response_deserializer, streaming=(True, True))

    async def close(self, grace: float | None = None) -> None:
        """As grpc's."""
        await self._plain.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Method:
    """A method, by whether it takes and gives streams."""

    def __init__(self, channel: AuthenticatedAioChannel, path: str, inner: Any, streaming: tuple[bool, bool]) -> None:
        self._channel, self._path, self._inner = channel, path, inner
        self._takes_stream, self._gives_stream = streaming

    def __call__(self, requests: Any = None, *, timeout: float | None = None, metadata: Any = None) -> Any:
        given = requests if self._takes_stream else _only(requests)
        call = _Call(self._channel, self._path, self._inner, given, timeout, metadata)
        return call if self._gives_stream else call.result()


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


class _Call:
    """A call that is opened, and whose requests are sent, by the first read."""

    def __init__(
        self,
        channel: AuthenticatedAioChannel,
        path: str,
        inner: Any,
        requests: AsyncIterable[Any],
        timeout: float | None,
        metadata: Any,
    ) -> None:
        self._open = functools.partial(channel.open, path, inner, metadata, timeout)
        self._requests = requests
        self._call: Any = None
        self._cancelled = False

    async def _begin(self) -> Any:
        if self._call is None:
            call = self._call = await self._open()
            if self._cancelled:
                call.cancel()
            try:
                async for request in self._requests:
                    await call.write(request)
                await call.done_writing()
            except asyncio.InvalidStateError:
                pass  # the call has ended, as its status tells
            except BaseException:
                call.cancel()
                raise
        return self._call

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF; grpc.RpcError if the call failed."""
        try:
            return await (await self._begin()).read()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def result(self) -> Any:
        """The only message."""
        message = await self.read()
        call = self._call
        if message is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise StreamEndedError(code, details or "the call ended without an answer")
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise StreamEndedError(code, await call.details() or "", tuple(await call.trailing_metadata() or ()))
        return message

    def cancel(self) -> bool:
        """End it."""
        self._cancelled = True
        return self._call is None or bool(self._call.cancel())
