"""The parameter servers of a job that come and go: added and removed, registered, and found again at another place.

What changes is told to all: the coordinator's own client, its attachments, the dispatcher with its workers, and the
request with which it attaches. That happens on the loop's thread, one at a time. Shards are moved elsewhere: see
`pscluster.coordinator.moves.servers`.
"""

from __future__ import annotations

import logging
import time

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.job.server_places import ServerClaim, ServerPlace, moves
from pscluster.coordinator.scheduling.connections import loop
from pscluster.coordinator.scheduling.connections.lifecycle import end_job
from pscluster.coordinator.scheduling.connections.server_link import ServerAttachment
from pscluster.core.errors import UnavailableError
from pscluster.core.fault_points import reach
from pscluster.core.transport.channels import PeerAddress
from pscluster.v1 import node_pb2

logger = logging.getLogger(__name__)

WAIT_PAUSE = 0.05
"""Seconds between two looks whether a server has registered."""

LEAVE_SECONDS = 10.0
"""For which a server that was removed is kept, until all workers know it."""


def add(context: JobContext, peer: PeerAddress) -> ServerAttachment:
    """Take another server, with the next index, for the job, and have all know it. It has nothing yet.

    BusyError if it has another coordinator, UnavailableError if it does not answer. Nothing has changed then.
    """

    async def take() -> ServerAttachment:
        server = ServerAttachment(peer, context.request, context.client.declare_again, event_log=context.event_log)
        server.knows(context.servers[0])
        try:
            await server.attach()
        except BaseException:
            await server.close()
            raise
        server.on_return, server.on_lost = context.server_is_back, context.client.give_up
        server.begin()
        context.tasks = [*(task for task in context.tasks if task.role == "ps"), peer, *context.workers]
        context.client.exchanges.add_server(peer, server.store_id)
        context.servers.append(server)
        context.request.resized = True
        context.request.ps_addresses.append(peer.address)
        context.request.store_ids.append(server.store_id)
        # TF_CONFIG may name another one of that index, which was removed.
        place = node_pb2.ServerAddress(index=peer.index, address=peer.address, tls_name=peer.tls_name)
        context.request.moved_servers.append(place)
        if context.dispatcher is not None:
            context.dispatcher.add_server(server)
        return server

    return loop.run(take())


def wait_until_known(context: JobContext, timeout: float) -> None:
    """Wait until all connected workers know the servers that there are now, but not for ever: one may be frozen."""
    if context.dispatcher is None:
        return
    servers, end = tuple(server.store_id for server in context.servers), time.monotonic() + timeout
    state = context.dispatcher.state
    while time.monotonic() < end:
        connections = [handle.connection for handle in state.workers if handle.up]
        if all(connection is None or connection.servers == servers for connection in connections):
            return
        time.sleep(0.005)


def remove_last(context: JobContext) -> None:
    """Let go of the server with the highest index, which has nothing any more: its part of the job is over.

    It is told so once all workers know. One that does not may ask it for what has moved, and would take a server
    that knows nothing of the job for one that has lost it.
    """

    async def remove() -> PeerAddress:
        server = context.servers[-1]
        if context.dispatcher is not None:
            context.dispatcher.servers.remove(server)
        context.servers.pop()
        context.tasks = [task for task in context.tasks if (task.role, task.index) != ("ps", server.peer.index)]
        context.request.resized = True
        moved = [other for other in context.request.moved_servers if other.index != server.peer.index]
        del context.request.ps_addresses[-1], context.request.store_ids[-1], context.request.moved_servers[:]
        context.request.moved_servers.extend(moved)
        if context.dispatcher is not None:
            context.dispatcher.state.servers_moved()
        context.client.exchanges.remove_server()
        await server.retire()
        return server.peer

    peer = loop.run(remove())
    wait_until_known(context, LEAVE_SECONDS)
    loop.run(end_job(peer, context.request.job, "the server was removed from the job"))


def note_waiting(context: JobContext, claim: ServerClaim, peer: PeerAddress) -> None:
    """Take note that a server has registered that the job does not have: it may be added. Errors as `claim`."""

    async def note() -> bool:
        if context.closed:
            raise UnavailableError("the job is over: the server joins the next one")
        return context.waiting_servers.claim(claim, peer, time.monotonic())

    if loop.run(note()):
        logger.info("%s has registered, and waits until the script adds it: strategy.add_server()", peer)
        context.event_log.record(peer.task, "note", "waits to be added to the job")


def waiting(context: JobContext) -> list[int]:
    """Return the indices of servers that have registered and may be added."""

    async def indices() -> list[int]:
        return context.waiting_servers.indices(time.monotonic())

    return loop.run(indices())


def next_waiting(context: JobContext, timeout: float) -> PeerAddress:
    """Return a server with the next index that has registered; wait for one. UnavailableError if none comes."""

    async def take(index: int) -> PeerAddress | None:
        return context.waiting_servers.take(index, time.monotonic())

    end = time.monotonic() + timeout
    while (peer := loop.run(take(context.client.num_servers))) is None:
        context.client.exchanges.check_open()
        if time.monotonic() >= end:
            index, place = context.client.num_servers, context.spec.task_address("chief", 0)
            raise UnavailableError(
                f"no server has registered as ps {index} within {timeout:g} s: start one with pscluster ps --join "
                f"{place} --task {index}, or give its address"
            )
        time.sleep(WAIT_PAUSE)
    return peer


def register(context: JobContext, claim: ServerClaim, peer: PeerAddress, seen: PeerAddress, *, answers: bool) -> None:
    """Take a server that has registered at the place of `peer`; `answers`: does one answer at `seen`?

    BusyError if it is in the cluster, RefusedError if this is not the one; nothing has changed then.
    """

    async def take() -> None:
        if context.closed:
            raise UnavailableError("the job is over: the server joins the next one")
        here = context.client.place_of(peer)
        if here.address != seen.address:
            raise UnavailableError(f"{peer.task} has just moved: trying again")
        attachments = context.servers or context.taking
        server = next((server for server in attachments if server.peer.index == peer.index), None)
        store_id, boot_id = (server.store_id, server.boot_id) if server is not None else (0, 0)
        attached = server is not None and server.is_here
        place = ServerPlace(peer.index, here.address, store_id, attached or answers, boot_id)
        if moves(claim, place):
            _move(context, peer, server)

    loop.run(take())


def _move(context: JobContext, peer: PeerAddress, server: ServerAttachment | None) -> None:
    """Dial a server there from now on, and have all others do so."""
    logger.info("%s has registered from there: connecting to it there from now on", peer)
    context.event_log.record(peer.task, "note", f"is at {peer.address} now")
    reach("coordinator.move.before")
    moved = [known for known in context.request.moved_servers if known.index != peer.index]
    moved.append(node_pb2.ServerAddress(index=peer.index, address=peer.address, tls_name=peer.tls_name))
    del context.request.moved_servers[:]
    context.request.moved_servers.extend(moved)
    context.tasks = [peer if (task.role, task.index) == ("ps", peer.index) else task for task in context.tasks]
    context.client.move(peer)
    if server is not None:
        server.move(peer)
    reach("coordinator.move.after")
    if context.dispatcher is not None:
        context.dispatcher.state.servers_moved()
