"""Named fault points, at which tests make a role fail on purpose, with what has happened by then.

Code calls `reach("ps.log.after")` before and after each act that outlives the process or that others see. That costs
one call and one comparison (60 ns), and does nothing; no point is in a loop over chunks or rows. Tests set `on_reach`
to a function that kills, stops, delays or fails there (see CONTRIBUTING.md). A test checks that this table and the
calls in the code match.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS: dict[str, str] = {
    # Every role
    "node.attach.before": "a coordinator is admitted, and does not know it yet",
    "node.attach.after": "the coordinator was told that it has the role",
    "node.end.before": "the end of the job was announced, and nothing is dropped",
    "node.end.after": "the state of the job is dropped, and the coordinator has no answer",
    # Parameter servers: an update
    "ps.update.before": "an update is checked and has room in the log; nothing is applied",
    "ps.update.after": "the values of a shard are changed, and the ledger does not have the key",
    "ps.ledger.after": "the ledger has the update's key; other shards of the request do not",
    "ps.log.before": "the update is applied and remembered, and not in the log",
    "ps.log.written": "records are in the log, and its mark does not cover them",
    "ps.log.after": "its record is in the log, and no client knows it",
    "ps.acknowledge.before": "everything promised of the update is done, and the answer is not sent",
    "ps.answer.after": "an answer was given to the session's stream",
    # Parameter servers: synchronous steps
    "ps.stage_step.before": "a contribution to a step is staged, and not in the log",
    "ps.stage_step.after": "it is in the log, and the replica has no answer",
    "ps.step.before": "all replicas have contributed to a step, and nothing of it is applied",
    "ps.step.after": "it is applied and logged, and no replica has the answer",
    # Parameter servers: the directory
    "ps.create.before": "a variable or an optimizer has arrived completely, and is not in the directory",
    "ps.create.after": "it is in the directory, and not on disk",
    "ps.create.saved": "it is on disk, and its creator has no answer",
    "ps.delete.after": "a variable is removed from the directory, and not from the disk",
    # Parameter servers: generations
    "ps.segment.before": "the log's next segment is written under a temporary name",
    "ps.segment.after": "it has its name: from now on records go there",
    "ps.generation.before": "nothing of a new generation is written",
    "ps.manifest.before": "its manifest (or the record of losses) is written under a temporary name",
    "ps.manifest.after": "its manifest has its name: it counts; obsolete files are still there",
    "ps.generation.after": "obsolete files are removed",
    "ps.clear.before": "the files of a job that is over are still there",
    "ps.clear.after": "they are removed",
    "ps.losses.before": "updates are known to be lost, and this is not on disk",
    "ps.losses.after": "it is on disk",
    "ps.stop.before": "no request is under way any more, and the state is not saved for the last time",
    # Parameter servers: restarts, coordinators and workers
    "ps.restore.before": "a server starts, and has read nothing",
    "ps.restore.after": "the state is read, and no request is served",
    "ps.takeover.before": "another coordinator continues the job, and the previous one is not shut out",
    "ps.takeover.after": "the previous one is shut out; on disk the job is still its own",
    "ps.incarnation.before": "a worker should be shut out, and is not",
    "ps.incarnation.after": "it is, and the coordinator has no answer",
    "ps.finish.after": "the keys of ended functions are forgotten, and the coordinator has no answer",
    # Parameter servers: shards that move
    "ps.freeze.after": "a shard is frozen at its source, and the coordinator has no answer",
    "ps.adopt.before": "its target has it all, in memory, and nothing is saved",
    "ps.adopt.saved": "it is saved there: the move is decided, and the coordinator does not know",
    "ps.place.after": "a server has dropped it, or heard where it is now, and the coordinator has no answer",
    "ps.capture.after": "a shard that is resharded is frozen, and nothing is copied",
    "ps.fill.after": "a part of a new shard has come, in memory",
    "ps.seal.saved": "the new shards are saved beside the old ones, and the coordinator does not know",
    "ps.adopt_cut.before": "the new shards are in the place of the old ones, in memory",
    "ps.adopt_cut.saved": "that is saved, and the coordinator does not know",
    # Parameter servers: checkpoints
    "ps.mark.after": "the shards are marked, and the coordinator has no answer",
    "ps.part.before": "the server's part of a checkpoint is not written",
    "ps.part.after": "it is written, and the coordinator has no answer",
    "ps.stage.after": "a checkpoint is read, beside the current state",
    "ps.commit.after": "it has replaced the current state, and is not saved",
    "ps.commit.saved": "it is saved, and the coordinator has no answer",
    # Clients that update: workers, and the script
    "client.update.before": "nothing of an update is sent",
    "client.exchange.after": "small requests were sent to all servers, and no answer was read",
    "client.update.after": "all servers have acknowledged it",
    "client.step.reduced": "the replicas have reduced large gradients, and this one has sent nothing of its block",
    "client.step.staged": "what a replica contributes to a step is staged on all servers but the first",
    "client.tick.before": "a replica with bounded staleness has completed a step, and server 0 does not know",
    "client.tick.after": "server 0 knows, and the replica has not gone on",
    # Workers
    "worker.define.after": "a function, a dataset or large arguments were taken, and the coordinator has no answer",
    "worker.run.before": "a function was received, and has not begun",
    "worker.run.after": "it has returned, and its result is not encoded",
    "worker.result.before": "outcomes are not sent",
    "worker.result.after": "outcomes were given to the stream",
    "worker.download.after": "a large result was sent completely, and is not dropped",
    "worker.exchange.before": "a program over global arrays needs pieces of other workers, and has sent them nothing",
    "worker.exchange.after": "it has sent and received pieces, and not gone on",
    "worker.recall.after": "functions were given back, and the coordinator has no answer",
    "worker.answer.after": "an answer was taken, and the coordinator does not know",
    "worker.move.after": "servers are dialled at another place, and the coordinator does not know",
    "worker.stop.before": "the worker was told to stop, and has not announced it",
    "worker.stop.after": "nothing runs and no result is left to be fetched; its streams are open",
    # The coordinator
    "coordinator.attach.first": "server 0 is taken, and no other",
    "coordinator.attach.after": "all servers are taken, and the job has none of its variables",
    "coordinator.create.before": "a variable has its id and its placement, and no server has it",
    "coordinator.create.after": "all servers have it, and the script has not",
    "coordinator.pin.before": "no function runs, and nothing is copied for an evaluation",
    "coordinator.pin.after": "all servers have the copies, possibly not on disk, and no function runs yet",
    "coordinator.unpin.before": "an evaluation has ended, and its copies are not removed",
    "coordinator.unpin.after": "they are removed from reachable servers",
    "coordinator.send.before": "functions are assigned to a worker, and not sent",
    "coordinator.send.after": "they are sent",
    "coordinator.outcome.before": "outcomes came, and their large results did not",
    "coordinator.outcome.after": "the results are there",
    "coordinator.close.before": "a worker is lost, and no server has shut it out",
    "coordinator.close.after": "all servers have, and no worker has its functions",
    "coordinator.retry.after": "its functions wait again",
    "coordinator.move.before": "a server has registered from another place, and is not dialled there yet",
    "coordinator.move.after": "the coordinator dials it there, and the workers were not told",
    "coordinator.freeze.before": "a shard was copied while it changed, and its source is not frozen",
    "coordinator.commit_move.before": "all of it has come to its target, and the source is frozen",
    "coordinator.commit_move.after": "the move is decided, and the source still has the shard",
    "coordinator.serve.before": "the source has dropped it, and the target does not serve it yet",
    "coordinator.serve.after": "the target serves it, and the other servers do not know",
    "coordinator.reshard.ahead": "all of a variable is copied into its new shards, while functions change it",
    "coordinator.reshard.copied": "no function runs, all of it is in its new shards as it is, and nothing is saved",
    "coordinator.reshard.sealed": "all servers have saved them beside the old ones",
    "coordinator.reshard.decided": "server 0 has them in the place of the old ones, and no other server",
    "coordinator.reshard.adopted": "all servers have, and the coordinator's handles name the old ones",
    "coordinator.finish.before": "a server has not been told which functions have ended",
    "coordinator.progress.before": "progress is not persisted",
    "coordinator.progress.after": "it is, and the script does not know",
    "coordinator.mark.after": "all servers have marked a checkpoint",
    "coordinator.parts.after": "all servers have written their parts, and there is no index",
    "coordinator.index.before": "the index is written under a temporary name",
    "coordinator.index.after": "it has its name: the checkpoint counts; older ones are still there",
    "coordinator.remove.before": "an old checkpoint is still complete",
    "coordinator.remove.after": "its index is removed, and its parts are still there",
    "coordinator.finished.before": "the mark that no more checkpoints come is written under a temporary name",
    "coordinator.finished.after": "it has its name: observers of the checkpoints end",
    "coordinator.stage.after": "all servers have read a checkpoint, and use none of it",
    "coordinator.commit.after": "all servers use it",
    "coordinator.end.before": "the job ends, and no role knows it",
    "coordinator.end.after": "all roles were told",
}

on_reach: Callable[[str], None] | None = None
"""Called with each point that is reached. Only tests set it."""


def reach(point: str) -> None:
    """Call `on_reach` with this point of the table."""
    if on_reach is not None:
        on_reach(point)
