"""What connections to parameter servers and workers share: how they are lost, distrusted and ended."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import tenacity

from pscluster.coordinator.scheduling.loop import in_thread
from pscluster.core.errors import (
    AuthenticationError,
    ConfigurationError,
    NotPermittedError,
    PsClusterError,
    UnavailableError,
    VersionMismatchError,
    from_rpc,
    is_retryable,
)
from pscluster.core.security.aio_channel import AuthenticatedAioChannel
from pscluster.core.transport.channels import (
    NODE_SERVICE,
    PeerAddress,
    open_aio_channel,
    why_untrusted,
)
from pscluster.core.transport.methods import Stub
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

CALL_SECONDS = 30.0
_END_SECONDS = 5.0
_LOOK_SECONDS = 5.0
RETRY_WAIT = tenacity.wait_random_exponential(multiplier=0.05, max=0.25)
_REDIAL_SECONDS = 0.05, 0.5  # at least, and at most
_TO_BE_MENDED = ConfigurationError, VersionMismatchError, AuthenticationError, NotPermittedError
FEW_ATTEMPTS = 3  # attempts of what nobody is to wait long for

AioChannel = grpc.aio.Channel | AuthenticatedAioChannel

LOST_CONNECTION = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What grpc.aio raises where a connection is lost: a status; or what is said of a closed channel, or of a write to
a call that has ended before its status was read."""


def why_lost(error: BaseException, peer: str) -> PsClusterError:
    """Our error for one of those, or one of ours as it is."""
    if isinstance(error, PsClusterError):
        return error
    if isinstance(error, grpc.RpcError):
        return from_rpc(error, peer)
    return UnavailableError(f"the connection to {peer} has ended: {error}")


class TlsDiagnosis:
    """Why two sides whose connection was good once can't trust each other any more: a certificate has expired.

    Or why a peer refuses for as long as nobody mends it: it lists other servers, or is of another version.
    """

    def __init__(self, peer: PeerAddress) -> None:
        self._peer = peer
        self._next_look = 0.0
        self._refusal = ""
        self.why = ""

    async def diagnose(self, failure: PsClusterError) -> None:
        """Log what it is, once: it is waited for that somebody mends it. Not looked for at each attempt."""
        if isinstance(failure, _TO_BE_MENDED) and str(failure) != self._refusal:
            self._refusal = str(failure)
            logger.error("%s refuses this coordinator until this is fixed: %s", self._peer, failure)
        if self._peer.tls is None or not isinstance(failure, UnavailableError) or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_SECONDS
        why = str(await in_thread(why_untrusted, self._peer) or "")
        if why and why != self.why:
            logger.error("%s", why)
        self.why = why


def seconds_to_redial(away: float, chance: float) -> float:
    """How long to wait before a worker that has been away for so many seconds is dialled again.

    A twentieth to a tenth of that, half a second at most: one that is back is found soon, and one that stays away
    costs some three attempts a second, of less than a millisecond each.

    Args:
        away: seconds.
        chance: a random number from 0 to 1.
    """
    shortest, longest = _REDIAL_SECONDS
    return min(max(away / 10, shortest), longest) * (0.5 + chance / 2)


async def end_job(peer: PeerAddress, job: int, reason: str) -> None:
    """Tell a role that the job is over, on a connection of its own: the ones in use may be broken."""
    request = node_pb2.EndJobRequest(job=job, reason=reason)
    async with open_aio_channel(peer) as channel:
        node, until = Stub(channel, NODE_SERVICE), time.monotonic() + _END_SECONDS
        try:
            # A role that did not hear of it keeps what it holds, and waits. One that is gone fails at once each time.
            async for attempt in tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(is_retryable),
                wait=RETRY_WAIT,
                stop=tenacity.stop_after_attempt(FEW_ATTEMPTS) | tenacity.stop_after_delay(_END_SECONDS),
                reraise=True,
            ):
                with attempt:
                    await node.end_job(request, timeout=max(until - time.monotonic(), 0.1))
        except grpc.RpcError as error:
            logger.debug("could not tell %s that the job is over: %s", peer, error.code().name)
