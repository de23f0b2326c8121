"""What a coordinator that takes over a job does about moves and resharding: see `decision` and `reshard`."""

from __future__ import annotations

from pscluster.coordinator.job.context import JobContext
from pscluster.coordinator.moves.decision import latest
from pscluster.coordinator.moves.reshard import unfinished
from pscluster.core.ids import fresh_id
from pscluster.ps.client.placement.move_steps import MoveSteps
from pscluster.ps.client.placement.reshard_steps import ReshardSteps


def settle_moves(context: JobContext) -> None:
    """Complete the move that an earlier coordinator had decided, or undo it: all servers get the latest specs.

    Raises:
        PsClusterError: a server can't save a shard that it has got.
    """
    client, directories = context.client, context.client.directory()
    everything = [spec for directory in directories for spec in directory.variables]
    moved = [spec for spec in latest(everything).values() if spec.placement]
    context.announce(moved)
    for spec in moved:
        about = MoveSteps(client, fresh_id(), spec.id, 0, 0, 0)
        aware = [index for index, directory in enumerate(directories) if spec in directory.variables]
        others = [index for index in range(client.num_servers) if index not in aware]
        if others:
            for server in aware:  # one of them may not have saved it yet
                about.place(server, spec, saved=True)
            for server in others:
                about.place(server, spec)
        for shard, owner in enumerate(spec.owners):
            MoveSteps(client, fresh_id(), spec.id, shard, owner, owner).serve(spec)
    client.placements.learn(moved)


def settle_cuts(context: JobContext) -> None:
    """Complete the resharding that an earlier coordinator had decided. An undecided one is dropped with other remains.

    Raises:
        StaleError: a server has lost a variable as it is cut now.
    """
    client = context.client
    for server, spec in unfinished([directory.variables for directory in client.directory()]):
        ReshardSteps(client, fresh_id(), spec.id).adopt([server], spec)
