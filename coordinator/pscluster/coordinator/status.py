"""Asking roles how they do: `pscluster status`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import grpc
from rich.table import Table

from pscluster.coordinator.health import ASK_SECONDS, Metadata
from pscluster.coordinator.render import rendered
from pscluster.core.channels import NODE_SERVICE, PeerAddress, explain, open_channel
from pscluster.core.cluster import ClusterSpec
from pscluster.core.errors import RETRYABLE, from_rpc
from pscluster.core.rpc import Stub
from pscluster.core.tls import Tls
from pscluster.core.tokens import call_metadata
from pscluster.v1 import node_pb2

_AT_ONCE = 32


def ask(peer: PeerAddress, metadata: Metadata) -> node_pb2.StatusReply | str:
    """A task's own account of itself, or why there is none."""
    with open_channel(peer.address, peer.tls) as channel:
        try:
            reply: node_pb2.StatusReply = Stub(channel, NODE_SERVICE).status(
                node_pb2.StatusRequest(), timeout=ASK_SECONDS, metadata=metadata
            )
        except grpc.RpcError as error:
            if error.code() in RETRYABLE:
                return explain(peer.address, peer.tls)
            return str(from_rpc(error, str(peer)))
    return reply


def status_table(
    cluster: ClusterSpec, token: str | None, tls: Tls | None = None, *, insecure: bool = False
) -> tuple[str, bool]:
    """Every task's state as a table, and whether all answered. Nobody waits for an evaluator."""
    peers = [
        PeerAddress(job, index, cluster.task_address(job, index), tls)
        for job in ("chief", "ps", "worker", "evaluator")
        if job in cluster.jobs
        for index in cluster.task_indices(job)
    ]
    for peer in peers:
        peer.check_plain(token, insecure=insecure)
    metadata = call_metadata(token)
    with ThreadPoolExecutor(_AT_ONCE) as pool:  # those that don't answer take seconds each
        replies = list(pool.map(lambda peer: ask(peer, metadata), peers))
    table = Table("task", "address", "state", "up", "what it has")
    everyone = True
    for peer, reply in zip(peers, replies, strict=True):
        task = f"{peer.role} {peer.index}"
        if isinstance(reply, str):
            everyone = everyone and peer.role == "evaluator"
            table.add_row(task, peer.address, "not up", "", reply)
        elif (reply.identity.role, reply.identity.index) != (peer.role, peer.index):
            everyone = False
            table.add_row(task, peer.address, "not up", "", f"{reply.identity.name} answers there: compare TF_CONFIG")
        else:
            table.add_row(task, peer.address, reply.state, f"{reply.uptime_seconds:.0f} s", _detail(reply))
    return rendered(table, 140), everyone


def _detail(reply: node_pb2.StatusReply) -> str:
    parts = []
    if reply.identity.role == "ps":
        parts.append(f"{reply.variables} shards, {reply.variable_bytes:,} bytes")
    if reply.identity.role == "worker":
        parts.append(f"{reply.functions_done} functions done, {reply.functions_running} running")
    if reply.detail:
        parts.append(reply.detail)
    parts.append(f"{reply.identity.name}, version {reply.identity.version}")
    return "; ".join(parts)
