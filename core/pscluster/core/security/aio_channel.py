"""`channel` for the coordinator's event loop; see there for the states."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any, Self

import grpc

from pscluster.core.security.authenticator import CALL_METADATA, HANDSHAKE_METADATA, HANDSHAKE_PATH
from pscluster.core.security.channel import (
    HANDSHAKE_SECONDS,
    OPEN_SECONDS,
    SessionHolder,
    is_proved,
    seconds_left,
    unproven,
)
from pscluster.core.security.handshake import ClientSession, Secret
from pscluster.core.transport.base import StreamEndedError
from pscluster.v1 import authentication_pb2


class AuthenticatedAioChannel:
    """The used part of a grpc.aio.Channel, with calls that are authenticated by a token."""

    def __init__(
        self, channel: grpc.aio.Channel, secret: Secret, address: str, task: tuple[str, int] | None = None
    ) -> None:
        self._plain = channel
        self._holder = SessionHolder(secret, address, task)
        self._shake_hands: Any = channel.stream_unary(
            HANDSHAKE_PATH, response_deserializer=authentication_pb2.HandshakeReply.FromString
        )

    async def session(self, timeout: float | None = None) -> ClientSession:
        """Return the channel's session, after a handshake if there is none. grpc.RpcError if that fails."""
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
        """Start a call, and return it once the server has proved itself. grpc.RpcError if it does not."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for again in (True, False):
            session = await self.session(seconds_left(deadline))
            header, expected = session.next_call(path)
            call = method(metadata=(*(metadata or ()), (CALL_METADATA, header)), timeout=seconds_left(deadline))
            try:
                async with asyncio.timeout(OPEN_SECONDS):
                    if is_proved(await call.initial_metadata(), expected):
                        return call
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

    def _method(
        self, path: str, request_serializer: Any = None, response_deserializer: Any = None, *, shape: str
    ) -> Callable[..., Any]:
        takes, gives = shape.split("_")
        inner = self._plain.stream_stream(
            path, request_serializer=request_serializer, response_deserializer=response_deserializer
        )

        def begin(requests: Any = None, *, timeout: float | None = None, metadata: Any = None) -> Any:
            given = requests if takes == "stream" else _only(requests)
            call = _Call(functools.partial(self.open, path, inner, metadata, timeout), given)
            return call if gives == "stream" else call.result()

        return begin

    unary_unary = functools.partialmethod(_method, shape="unary_unary")
    unary_stream = functools.partialmethod(_method, shape="unary_stream")
    stream_unary = functools.partialmethod(_method, shape="stream_unary")
    stream_stream = functools.partialmethod(_method, shape="stream_stream")

    async def close(self, grace: float | None = None) -> None:
        await self._plain.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _only(request: Any) -> AsyncIterator[Any]:
    yield request


class _Call:
    """A call that the first read opens, and whose requests it sends."""

    def __init__(self, opened: Callable[[], Awaitable[Any]], requests: AsyncIterable[Any]) -> None:
        self._open, self._requests = opened, requests
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
                pass  # the call has ended; its status says why
            except BaseException:
                call.cancel()
                raise
        return self._call

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF. grpc.RpcError if the call failed."""
        try:
            return await (await self._begin()).read()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def result(self) -> Any:
        message = await self.read()
        call = self._call
        if message is grpc.aio.EOF:
            code, details = await call.code(), await call.details()
            raise StreamEndedError(code, details or "the call ended without an answer")
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise StreamEndedError(code, await call.details() or "", tuple(await call.trailing_metadata() or ()))
        return message

    def cancel(self) -> bool:
        self._cancelled = True
        return self._call is None or bool(self._call.cancel())
