"""Named fault points: where tests make a role fail on purpose, and what has happened by then.

Code says `reach("ps.log.after")` before and after each act that outlives it or that others see. That costs one call and
one comparison (60 ns), and does nothing: no point stands in a loop over chunks or rows. Tests set `on_reach` to what
kills, stops, delays or fails there (see CONTRIBUTING.md). A point in this table and the place that names it are one: a
test holds that neither is without the other.
"""

from __future__ import annotations

from collections.abc import Callable

POINTS: dict[str, str] = {
    # Every role
    "node.attach.before": "a coordinator is let in, and knows nothing of it",
    "node.attach.after": "the coordinator was told that it has the role",
    "node.end.before": "the end of the job was heard of, and nothing is dropped",
    "node.end.after": "what was held for the job is dropped, and the coordinator has no answer",
    # Parameter servers: an update
    "ps.update.before": "an update is checked and has room in the log; nothing is applied",
    "ps.update.after": "the values of a shard are changed, and the ledger knows nothing of it",
    "ps.ledger.after": "the ledger has the update's key; other shards of the request have theirs still to come",
    "ps.log.before": "the update is applied and remembered, and not in the log",
    "ps.log.written": "records are in the log, and its mark does not say so",
    "ps.log.after": "its record is in the log, and nobody was told",
    "ps.acknowledge.before": "all that is promised of the update is done, and the answer is not sent",
    "ps.answer.after": "an answer was given to the session's stream",
    # Parameter servers: the directory
    "ps.create.before": "a variable or an optimizer came whole, and is not entered",
    "ps.create.after": "it is entered, and not on disk",
    "ps.create.saved": "it is on disk, and its maker has no answer",
    "ps.delete.after": "a variable is gone from the directory, and not from the disk",
    # Parameter servers: generations
    "ps.segment.before": "the log's next segment is written under a name that does not count",
    "ps.segment.after": "it has its name: what comes now is written there",
    "ps.generation.before": "a generation is to be written, and nothing of it is",
    "ps.manifest.before": "its manifest (or what is known to be lost) is written under a name that does not count",
    "ps.manifest.after": "its manifest has its name: it counts; what is needed no more is still there",
    "ps.generation.after": "what is needed no more is removed",
    "ps.clear.before": "what is on disk of a job that is over is to go",
    "ps.clear.after": "nothing is left of it",
    "ps.losses.before": "it is known that updates are lost, and not on disk",
    "ps.losses.after": "it is on disk",
    "ps.stop.before": "no request is under way any more, and the state is not saved for the last time",
    # Parameter servers: coming back, and who works with them
    "ps.restore.before": "a server starts, and has read nothing",
    "ps.restore.after": "the state is read, and nobody is served",
    "ps.epoch.before": "another coordinator goes on with the job, and the one before is not shut out",
    "ps.epoch.after": "the one before is shut out; on disk the job is still its",
    "ps.incarnation.before": "a worker is to be shut out, and is not",
    "ps.incarnation.after": "it is, and the coordinator has no answer",
    "ps.finish.after": "the keys of functions that have ended are forgotten, and the coordinator has no answer",
    # Parameter servers: checkpoints
    "ps.mark.after": "the shards are marked, and the coordinator has no answer",
    "ps.part.before": "the server's part of a checkpoint is to be written",
    "ps.part.after": "it is written, and the coordinator has no answer",
    "ps.stage.after": "a checkpoint is read beside what there is",
    "ps.commit.after": "it has taken the place of what there was, and is not saved as state",
    "ps.commit.saved": "it is saved, and the coordinator has no answer",
    # Whoever updates: workers, and the script
    "client.update.before": "an update is to be sent, and none of it is",
    "client.exchange.after": "small requests were sent to all servers, and no answer was taken",
    "client.update.after": "all servers have acknowledged it",
    # Workers
    "worker.define.after": "a function, a dataset or large arguments were taken, and the coordinator has no answer",
    "worker.run.before": "a function was received, and has not begun",
    "worker.run.after": "it has returned, and its result is not encoded",
    "worker.result.before": "outcomes are to be sent",
    "worker.result.after": "outcomes were given to the stream",
    "worker.download.after": "a large result went out whole, and is not dropped",
    "worker.recall.after": "functions were given back, and the coordinator has no answer",
    "worker.stop.before": "the worker was told to stop, and has told nobody",
    "worker.stop.after": "nothing runs and nothing is left to be fetched; its streams are open",
    # The coordinator
    "coordinator.attach.first": "server 0 is taken, and no other",
    "coordinator.attach.after": "all servers are taken, and the job has none of its variables",
    "coordinator.create.before": "a variable has its number and its place, and no server knows of it",
    "coordinator.create.after": "all servers have it, and the script has not",
    "coordinator.pin.before": "no function runs, and nothing is copied for an evaluation",
    "coordinator.pin.after": "all servers have the copies, perhaps not on disk, and no function runs yet",
    "coordinator.unpin.before": "an evaluation has ended, and its copies are to go",
    "coordinator.unpin.after": "they are gone, where a server was reached",
    "coordinator.send.before": "functions are a worker's, and not sent",
    "coordinator.send.after": "they are sent",
    "coordinator.outcome.before": "outcomes came, and their large results did not",
    "coordinator.outcome.after": "the results are there",
    "coordinator.close.before": "a worker is lost, and no server has shut it out",
    "coordinator.close.after": "all servers have, and its functions are with nobody",
    "coordinator.retry.after": "its functions wait again",
    "coordinator.finish.before": "a server is to be told which functions have ended",
    "coordinator.progress.before": "progress is to be kept",
    "coordinator.progress.after": "it is kept, and the script does not know",
    "coordinator.mark.after": "all servers have marked a checkpoint",
    "coordinator.parts.after": "all servers have written their parts, and there is no index",
    "coordinator.index.before": "the index is written under a name that does not count",
    "coordinator.index.after": "it has its name: the checkpoint counts; older ones are still there",
    "coordinator.remove.before": "an old checkpoint is to go, and is whole",
    "coordinator.remove.after": "its index is gone, and its parts are still there",
    "coordinator.finished.before": "that no more checkpoints come is written under a name that does not count",
    "coordinator.finished.after": "it has its name: who looks on ends",
    "coordinator.stage.after": "all servers have read a checkpoint, and use none of it",
    "coordinator.commit.after": "all servers use it",
    "coordinator.end.before": "the job is to be ended, and no role knows of it",
    "coordinator.end.after": "all roles were told",
}

on_reach: Callable[[str], None] | None = None
"""Called with each point that is reached. Only tests set it."""


def reach(point: str) -> None:
    """Tell `on_reach` that what the table says of this point has happened."""
    if on_reach is not None:
        on_reach(point)
