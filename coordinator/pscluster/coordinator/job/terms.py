"""Terms: a restore begins another one, under which the servers take other values, all of them or none.

Updates carry the term that they were made in. What is of the term before is refused by servers that have the new
values, and overwritten on the others; and where terms differ among the servers, a restore was broken off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pscluster.coordinator.job.context import JobContext
from pscluster.core.errors import CheckpointError


def begin_term(context: JobContext, term: int) -> None:
    """What is updated from now on is of this term, or a later one."""
    context.client.term = context.request.term = term
    if context.dispatcher is not None:
        context.dispatcher.term = term


@contextlib.contextmanager
def restoring(context: JobContext, what: str) -> Iterator[int]:
    """Within the block the parameter servers take other values, all of them, under the term that this gives.

    No function runs meanwhile. What the script updates at the same time is of the term before, so that servers
    which have the new values refuse it; on the others it is overwritten. Where the block raises, nothing is saved
    until another one has ended: see `check_restored`.
    """
    term = context.request.term + 1
    context.half_restored = f"{what} was broken off: some parameter servers may have its values, and others not"
    try:
        yield term
    finally:
        begin_term(context, term)
    for server in context.servers:
        server.term = term
    context.half_restored = ""


def check_restored(context: JobContext) -> None:
    """CheckpointError if some servers have the values of a restored checkpoint, and others not, or not any more."""
    term, why = context.request.term, context.half_restored
    if not why and (behind := [str(server.peer) for server in context.servers if server.term < term]):
        why = f"{', '.join(behind)} came back with what was there before the last restore"
    if why:
        raise CheckpointError(
            f"nothing is saved, because {why}: restore again, or keep the current values with "
            "Checkpoint(strategy).give_up_restore()"
        )
