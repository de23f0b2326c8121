"""Parameter servers that join a running job, and leave it.

    add      take the server, which holds nothing --> have all workers know it --> declare all variables and optimizers
             there --> have all servers save how many there are --> it gets variables that are created, and shards
    remove   place nothing there any more --> move all shards away --> have the others save how many there are
             --> its part of the job is over, and the workers forget it

Servers have indices without gaps, by which shards name them, so only the one with the highest index is removed. What a
server has is decided by moves alone (`decision`), so whatever dies in between, no shard is lost: a server that was
added, and is not counted yet, has none; one that is being removed counts until it has none. A coordinator that takes
over must list as many servers as the job has; it is refused otherwise, by server 0, which is the first to save their
number.

Both wait for a checkpoint that is being written (`job.cuts`), and one that is begun meanwhile waits for them.

Replicas that step together tell all servers, in each call of `run`, which steps are committed. So there (`hold`) the
servers change between two functions, when all of them have applied all steps: a server that leaves has nothing of a
step, and one that comes knows of none and takes the first step that it hears of as the next one.
"""

from __future__ import annotations

import contextlib
import logging

from pscluster.coordinator.job import servers
from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.job.terms import check_restored
from pscluster.coordinator.moves.balance import balanced
from pscluster.coordinator.moves.mover import Moved, ShardMover, held
from pscluster.core.errors import BusyError, MisuseError, UnavailableError
from pscluster.core.ids import fresh_id
from pscluster.core.transport.channels import PeerAddress, open_peer_channel, say_hello, wait_for_peers
from pscluster.ps.client.placement.move_steps import MoveSteps

logger = logging.getLogger(__name__)


def add_server(context: JobContext, peer: PeerAddress, timeout: float, *, hold: bool = False) -> None:
    """Take a server, with the next index, for the job. It has no shards yet. `hold`: no function runs meanwhile.

    BusyError if it has a job, UnavailableError if it does not answer within `timeout` seconds, WaitTimeoutError if a
    function runs too long. Nothing has changed then.
    """
    wait_for_peers([peer], context.request.coordinator, timeout=timeout, purpose="coordinator")
    with open_peer_channel(peer) as channel:
        hello = say_hello(channel, peer, context.request.coordinator)
    if hello.job_id:
        raise BusyError(f"{peer} already holds a job ({hello.job_name or 'unnamed'}): end that job, or restart it")
    client = context.client
    with context.moving, context.placing_of_servers(), held(context) if hold else contextlib.nullcontext():
        check_restored(context)
        if peer.index != client.num_servers:
            raise MisuseError(f"{peer} is not the next server: the job has {client.num_servers}, numbered from 0")
        servers.add(context, peer)
        try:
            servers.wait_until_known(context, timeout)
            client.declare_all(peer.index)
            _resize(context, client.num_servers)
        except BaseException:
            servers.remove_last(context)
            raise
        context.variables.resize(client.num_servers)
    logger.info("%s was added: the job has %d parameter servers", peer, client.num_servers)
    context.event_log.record(peer.task, "note", "was added to the job")


def remove_server(context: JobContext, *, hold: bool = False) -> list[Moved]:
    """Move all shards from the server with the highest index to the others, and let go of it.

    `hold`: no function runs while anything changes. MisuseError if it is the only one, UnavailableError while an
    evaluation beside the training uses it. If this raises, the server is still there, perhaps with fewer shards.
    """
    client, moved = context.client, list[Moved]()
    mover = ShardMover(context, hold=hold)
    with context.moving:
        last = client.num_servers - 1
        if not last:
            raise MisuseError("the only parameter server can't be removed: add another one first")
        task = context.servers[last].peer.task
        context.variables.resize(last)
        try:
            for move in balanced(mover.loads("bytes")[0], range(last)):
                if move.source == last and (done := mover.carry_out(move)) is not None:
                    moved.append(done)
            with context.placing_of_servers(), held(context) if hold else contextlib.nullcontext():
                if any(last in spec.owners for spec in client.directory()[last].variables):
                    raise UnavailableError(
                        f"{task} still has copies of variables, for an evaluation that is under way: try again later"
                    )
                _resize(context, last)
                servers.remove_last(context)
        except BaseException:
            context.variables.resize(client.num_servers)
            raise
    logger.info("%s was removed: the job has %d parameter servers", task, last)
    context.event_log.record(task, "note", "was removed from the job")
    return moved


def _resize(context: JobContext, count: int) -> None:
    """Have all servers of the job save how many there are, the first one first."""
    steps = MoveSteps(context.client, fresh_id(), 0, 0, 0, 0)
    for server in range(count):
        steps.resize(server, count)
