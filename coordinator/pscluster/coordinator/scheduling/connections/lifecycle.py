"""What connections to parameter servers and workers share: how they are lost, diagnosed, redialled and ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import tenacity

from pscluster.coordinator.scheduling.connections.loop import in_thread
from pscluster.core.errors import (
    AuthenticationError,
    ConfigurationError,
    NotPermittedError,
    PsClusterError,
    UnavailableError,
    VersionMismatchError,
    from_rpc,
)
from pscluster.core.security.aio_channel import AuthenticatedAioChannel
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress, open_aio_channel, why_untrusted
from pscluster.core.transport.methods import Stub
from pscluster.core.transport.retry import FEW_ATTEMPTS, until
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
_END_SECONDS = 5.0
_CHECK_SECONDS = 5.0
_REDIAL_SECONDS = 0.05, 0.5  # at least, and at most
_TO_BE_FIXED = ConfigurationError, VersionMismatchError, AuthenticationError, NotPermittedError

AioChannel = grpc.aio.Channel | AuthenticatedAioChannel

LOST_CONNECTION = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises when a connection is lost: a status, or an error of a closed channel or of a write to a call
that ended before its status was read."""


def is_cancelled() -> bool:
    """Return whether the task that has got a CancelledError was cancelled.

    Otherwise the call that it awaits has ended because its channel was closed: grpc.aio raises the same error then.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def why_lost(error: BaseException, peer: str) -> PsClusterError:
    """Convert one of those errors to a PsClusterError; return a PsClusterError as it is."""
    if isinstance(error, PsClusterError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc(error, peer)
    return UnavailableError(f"the connection to {peer} has ended: {error}")


class TlsDiagnosis:
    """Finds out why a peer is no longer trusted (a certificate has expired), or refuses until something is fixed."""

    def __init__(self, peer: PeerAddress) -> None:
        self.peer = peer
        self._next_check = 0.0
        self._refusal = ""
        self.why = ""

    async def diagnose(self, failure: PsClusterError) -> None:
        """Log the reason, once. Not every attempt checks for it."""
        if isinstance(failure, _TO_BE_FIXED) and str(failure) != self._refusal:
            self._refusal = str(failure)
            logger.error("%s refuses this coordinator until this is fixed: %s", self.peer, failure)
        if self.peer.tls is None or not isinstance(failure, UnavailableError) or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_SECONDS
        why = str(await in_thread(why_untrusted, self.peer) or "")
        if why and why != self.why:
            logger.error("%s", why)
        self.why = why


def seconds_to_redial(away: float, chance: float) -> float:
    """Return the seconds to wait before dialling a worker that has been down for `away` seconds.

    A twentieth to a tenth of that, by `chance` (random, 0 to 1), and at most 0.5: a worker that is back is found soon,
    and one that stays away costs about three attempts a second, of less than a millisecond each.
    """
    shortest, longest = _REDIAL_SECONDS
    return min(max(away / 10, shortest), longest) * (0.5 + chance / 2)


async def repeat(call: Callable[[], Awaitable[object]], *also: type[Exception], **limits: Any) -> None:
    """Call this until it succeeds, or raise its error; see `retry.until` for the limits."""
    async for attempt in tenacity.AsyncRetrying(**until(*also, **limits), reraise=True):
        with attempt:
            await call()


async def end_job(peer: PeerAddress, job: int, reason: str) -> None:
    """Tell a role that the job is over, on a new connection: the ones in use may be broken."""
    request = node_pb2.EndJobRequest(job=job, reason=reason)
    async with open_aio_channel(peer) as channel:
        node, end = Stub(channel, NODE_SERVICE), time.monotonic() + _END_SECONDS
        try:
            # A role that is not told keeps its state and waits. One that is down fails at once each time.
            await repeat(
                lambda: node.end_job(request, timeout=max(end - time.monotonic(), 0.1)),
                seconds=_END_SECONDS,
                attempts=FEW_ATTEMPTS,
            )
        except grpc.RpcError as error:
            logger.debug("could not tell %s that the job is over: %s", peer, error.code().name)
