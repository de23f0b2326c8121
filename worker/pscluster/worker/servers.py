"""The parameter servers that a worker uses, and whether their coordinator lists this worker.

The servers and their addresses are those in the worker's own TF_CONFIG. If it lists none, as TensorFlow allows, they
are those of the coordinator that attaches. A server that has moved is where the coordinator says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from pscluster.core.cluster.addresses import parse_address
from pscluster.core.cluster.spec import tasks_in_words
from pscluster.core.display.sanitize import shown
from pscluster.core.errors import ConfigurationError, ProtocolError, PsClusterError
from pscluster.core.limits import MAX_COUNT, check_count, one_line
from pscluster.core.role.options import RoleOptions
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0  # how often a worker without a coordinator asks a server whether its coordinator lists the worker


class ServerList:
    """The parameter servers that a worker uses. Refuses a coordinator that has others.

    `listed` are those of the worker's own TF_CONFIG. If empty, a coordinator's are used, and dialled with `options`.
    """

    def __init__(self, index: int, listed: Sequence[PeerAddress] = (), options: RoleOptions | None = None) -> None:
        self.index = index  # of the worker
        self.listed = tuple(listed)
        self._options = options or RoleOptions()
        self._places: dict[int, PeerAddress] = {}  # of servers that have moved, as the last coordinator has said
        self._logged = ""

    def check_count(self, count: int) -> None:
        """Raise ConfigurationError if a coordinator lists another number of servers. Log the same error only once."""
        if not self.listed or count == len(self.listed):
            return
        why = (
            f"the coordinator has {count} parameter servers, and TF_CONFIG of worker {self.index} lists "
            f"{len(self.listed)}: give both the same cluster.ps, or leave it out of the worker's, which then takes the "
            "coordinator's"
        )
        if why != self._logged:
            self._logged = why
            logger.error("%s", why)
        raise ConfigurationError(why)

    def check(self, request: node_pb2.AttachRequest) -> None:
        """Raise ConfigurationError if a coordinator lists another number of servers, or as `of`."""
        if not request.resized:
            self.check_count(len(request.store_ids))
        self.of(request)

    def of(self, request: node_pb2.AttachRequest) -> tuple[PeerAddress, ...]:
        """Return the servers. ProtocolError if addresses are missing; ConfigurationError for an insecure way to one."""
        if not self.listed and len(request.ps_addresses) != len(request.store_ids):
            raise ProtocolError(
                f"worker {self.index} lists no parameter servers, and the coordinator gives the addresses of "
                f"{len(request.ps_addresses)} out of {len(request.store_ids)}"
            )
        self._places = {}
        count = len(request.store_ids)
        self.moved(request.moved_servers, count)
        listed = tuple(map(self.place_of, self.listed[:count]))
        return (*listed, *self.beyond(len(listed), request.ps_addresses[:count]))

    def beyond(self, known: int, addresses: Sequence[str]) -> list[PeerAddress]:
        """Return the servers above the number that is known, where they are now. ProtocolError as `of`."""
        check_count(len(addresses), MAX_COUNT, "parameter servers")
        more = list(enumerate(addresses))[known:]
        return [self._places.get(index) or self._peer(index, address) for index, address in more]

    def moved(self, servers: Sequence[node_pb2.ServerAddress], count: int) -> list[PeerAddress]:
        """Take where these of `count` servers are now, and return it. Raises as `of`."""
        check_count(len(servers), MAX_COUNT, "parameter servers that have moved")
        if wrong := [server.index for server in servers if server.index >= count]:
            raise ProtocolError(f"parameter server {wrong[0]} has moved, but there are {count}")
        peers = [self._peer(server.index, server.address, server.tls_name) for server in servers]
        self._places |= {peer.index: peer for peer in peers}
        return peers

    def place_of(self, peer: PeerAddress) -> PeerAddress:
        """Return where a server is by now."""
        return self._places.get(peer.index, peer)

    def _peer(self, index: int, address: str, tls_name: str = "") -> PeerAddress:
        try:
            parse_address(address, f"the coordinator's cluster.ps[{index}]")
        except ConfigurationError as error:
            raise ProtocolError(str(error)) from None
        peer = PeerAddress("ps", index, address, self._options.tls, self._options.token, tls_name=tls_name)
        peer.check_plain(insecure=self._options.insecure)
        return peer


def watch_listing(
    peer: PeerAddress, ours: node_pb2.Identity, waits: Callable[[], object], stop: threading.Event
) -> None:
    """Log, until `stop` is set, if the coordinator of the parameter servers does not list this worker.

    The same message is logged only once. Nothing is checked while `waits` returns nothing: the worker has a
    coordinator.
    """
    logged = ""
    while not stop.is_set():
        why = _why_unlisted(peer, ours) if waits() else ""
        if why and why != logged:
            logger.warning("%s", why)
            logged = why
        stop.wait(CHECK_SECONDS)


def _why_unlisted(peer: PeerAddress, ours: node_pb2.Identity) -> str:
    """Return why no function comes; "" if unknown."""
    with open_peer_channel(peer) as channel:
        try:
            reply = say_hello(channel, peer, ours)
        except PsClusterError:
            return ""  # a lost server is noticed elsewhere
    if not reply.workers:
        return ""
    return not_listed(ours.index, one_line(reply.holder), reply.workers)


def not_listed(index: int, coordinator: str, workers: Sequence[int]) -> str:
    """Return the message that a coordinator does not list a worker, and what to do."""
    return (
        f"worker {index} gets no functions: cluster.worker of {shown(coordinator)} has {tasks_in_words(workers)}; add "
        f"worker {index} there and start the coordinator again, or stop this worker"
    )
