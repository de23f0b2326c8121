"""Queries the roles of a cluster for their status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from pscluster.coordinator.cli.health import ASK_SECONDS
from pscluster.core.errors import RETRYABLE, from_rpc
from pscluster.core.transport.channels import NODE_SERVICE, PeerAddress, explain, open_peer_channel
from pscluster.core.transport.methods import Stub
from pscluster.v1 import node_pb2

_AT_ONCE = 32

Answer = node_pb2.StatusReply | str
"""A task's status, or why there is none."""

Answers = Mapping[PeerAddress, Answer]


class StatusClient:
    """Queries all tasks at once, on connections that stay open until `close`."""

    def __init__(self, peers: Iterable[PeerAddress]) -> None:
        self._channels: dict[PeerAddress, grpc.Channel] = {}
        self._stubs: dict[PeerAddress, Stub] = {}
        self.follow(peers)

    def follow(self, peers: Iterable[PeerAddress]) -> None:
        """Query these tasks from now on: workers join and leave."""
        peers = list(peers)
        for peer in set(self._channels).difference(peers):
            self._channels.pop(peer).close()
        self._channels = {peer: self._channels.get(peer) or open_peer_channel(peer) for peer in peers}
        self._stubs = {peer: Stub(channel, NODE_SERVICE) for peer, channel in self._channels.items()}

    def ask(
        self, busiest: int = 0, timeout: float = ASK_SECONDS, *, explained: bool = False, shards: bool = False
    ) -> Answers:
        """Return each task's answer, within `timeout` seconds, with the `busiest` variables of each server.

        `shards`: with the shards of these variables. `explained`: find out why a task does not answer by connecting to
        it, which takes a few seconds more.
        """
        request = node_pb2.StatusRequest(busiest=busiest, shards=shards)

        def answer(peer: PeerAddress) -> Answer:
            try:
                reply: node_pb2.StatusReply = self._stubs[peer].status(request, timeout=timeout)
            except grpc.RpcError as error:
                if error.code() not in RETRYABLE:
                    return str(from_rpc(error, str(peer)))
                return explain(peer.address, peer.tls, peer.tls_name) if explained else "it does not answer"
            theirs = reply.identity
            if (theirs.role, theirs.index) != (peer.role, peer.index):
                return f"{theirs.name} answers there: check TF_CONFIG"
            return reply

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            try:
                return dict(zip(self._stubs, pool.map(answer, self._stubs), strict=True))
            except BaseException:  # such as Ctrl-C, which would take effect only after the last answer
                self.close()
                raise

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()


def replies_by_task(answers: Answers) -> dict[str, node_pb2.StatusReply]:
    """Return the status of the tasks that answered, by name."""
    return {peer.task: answer for peer, answer in answers.items() if not isinstance(answer, str)}
