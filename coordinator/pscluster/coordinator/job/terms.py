"""Terms, which count the restores of a job: no update from before a restore lands on what was restored.

Updates carry the term in which they were made. Servers that have a restored checkpoint's values refuse updates of
earlier terms; on the others they are overwritten. If terms differ, a restore was broken off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pscluster.coordinator.job.context import JobContext
from pscluster.core.errors import CheckpointError


def begin_term(context: JobContext, term: int) -> None:
    """Send updates under this term, or a later one, from now on."""
    context.client.updater.term = context.request.term = term
    if context.dispatcher is not None:
        context.dispatcher.state.term = term


@contextlib.contextmanager
def restoring(context: JobContext, action: str) -> Iterator[int]:
    """Give all servers other values within the block, under the term that it is given.

    No function runs meanwhile. If the block raises, nothing is saved until another one has succeeded.
    """
    term = context.request.term + 1
    context.half_restored = f"{action} was broken off: some parameter servers may have its values, and others not"
    try:
        yield term
    finally:
        begin_term(context, term)
    for server in context.servers:
        server.term = term
    context.half_restored = ""


def check_restored(context: JobContext) -> None:
    """Raise CheckpointError if only some servers have a restored checkpoint's values."""
    term, why = context.request.term, context.half_restored
    if not why and (behind := [str(server.peer) for server in context.servers if server.term < term]):
        why = f"{', '.join(behind)} came back with what was there before the last restore"
    if why:
        raise CheckpointError(
            f"nothing is saved, because {why}: restore again, or keep the current values with "
            "Checkpoint(strategy).give_up_restore()"
        )
