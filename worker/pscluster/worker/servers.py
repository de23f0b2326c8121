"""Which parameter servers a worker works with, and whether a coordinator that has them knows this worker.

The servers are those that the worker's own TF_CONFIG lists, under the addresses that it has there. Where it lists none,
as TensorFlow's workers need not, they are those of the coordinator that attaches, under the coordinator's addresses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from pscluster.core.cluster.spec import split_address, tasks_in_words
from pscluster.core.errors import ConfigurationError, ProtocolError, PsClusterError
from pscluster.core.limits import one_line
from pscluster.core.role.options import RoleOptions
from pscluster.core.sanitize import shown
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""So often a worker that no coordinator has taken asks a parameter server whether one lists it."""


class ServerList:
    """The parameter servers that a worker uses, and the refusal of a coordinator that has others."""

    def __init__(self, index: int, listed: Sequence[PeerAddress] = (), options: RoleOptions | None = None) -> None:
        """Take the list of the worker's own TF_CONFIG; empty: a coordinator's is taken.

        Args:
            index: the worker's.
            listed: the servers, in order.
            options: how servers are dialled whose addresses a coordinator tells.
        """
        self.listed = tuple(listed)
        self._index = index
        self._options = options or RoleOptions()
        self._said = ""

    def check_count(self, count: int) -> None:
        """Raise ConfigurationError if a coordinator lists another number of servers; log it, unless it was last."""
        if not self.listed or count == len(self.listed):
            return
        why = (
            f"the coordinator has {count} parameter servers, and TF_CONFIG of worker {self._index} lists "
            f"{len(self.listed)}: give both the same cluster.ps, or leave it out of the worker's, which then takes the "
            "coordinator's"
        )
        if why != self._said:
            self._said = why
            logger.error("%s", why)
        raise ConfigurationError(why)

    def check(self, request: node_pb2.AttachRequest) -> None:
        """Refuse a coordinator whose servers can't be used here.

        Raises:
            ConfigurationError: it lists another number, or one can't be talked to safely.
            ProtocolError: it does not name all of them.
        """
        self.check_count(len(request.holdings))
        self.of(request)

    def of(self, request: node_pb2.AttachRequest) -> tuple[PeerAddress, ...]:
        """Return the servers, in order. Raises as `check`."""
        if self.listed:
            return self.listed
        if len(request.ps_addresses) != len(request.holdings):
            raise ProtocolError(
                f"worker {self._index} lists no parameter servers, and the coordinator gives the addresses of "
                f"{len(request.ps_addresses)} out of {len(request.holdings)}"
            )
        return tuple(self._told(index, address) for index, address in enumerate(request.ps_addresses))

    def _told(self, index: int, address: str) -> PeerAddress:
        try:
            split_address(address, f"the coordinator's cluster.ps[{index}]")
        except ConfigurationError as error:
            raise ProtocolError(str(error)) from None
        peer = PeerAddress("ps", index, address, self._options.tls, self._options.token)
        peer.check_plain(insecure=self._options.insecure)
        return peer


def watch_listing(
    peer: PeerAddress, ours: node_pb2.Identity, waits: Callable[[], object], stop: threading.Event
) -> None:
    """Log it when a coordinator that has the parameter servers does not list this worker: once, until that changes.

    Return when `stop` is set. Nothing is asked while this worker has a coordinator, and `waits` gives nothing.
    """
    said = ""
    while not stop.is_set():
        if waits():
            why = _why_unlisted(peer, ours)
            if why and why != said:
                logger.warning("%s", why)
            said = why or said
        stop.wait(LOOK_SECONDS)


def _why_unlisted(peer: PeerAddress, ours: node_pb2.Identity) -> str:
    """Why no function comes; empty: nothing is known."""
    with open_peer_channel(peer) as channel:
        try:
            reply = say_hello(channel, peer, ours)
        except PsClusterError:
            return ""  # a server that is gone is noticed elsewhere
    if not reply.workers:
        return ""
    return not_listed(ours.index, one_line(reply.holder), reply.workers)


def not_listed(index: int, coordinator: str, workers: Sequence[int]) -> str:
    """Say that a worker is not among those of a coordinator, and what to do."""
    return (
        f"worker {index} gets no functions: cluster.worker of {shown(coordinator)} has {tasks_in_words(workers)}; add "
        f"worker {index} there and start the coordinator again, or stop this worker"
    )
