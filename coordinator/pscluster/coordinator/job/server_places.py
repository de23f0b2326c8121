"""Where each parameter server is, as they return elsewhere. Pure: no connections, no clock, no locks.

A server's task is fixed: what it holds of each variable. Its place is not: a process that registers as the task, and
holds what the task has held, is the task. The states of one, as the coordinator knows it:

    AWAITED  --it answers where TF_CONFIG says-----------------------> HERE   before the job has begun
             --a claim, and nothing answers as this task there-------> AWAITED  at the place of the claim
    HERE     --its connection is down--------------------------------> AWAY   its state is on its disk
    AWAY     --it answers there--------------------------------------> HERE   as after any restart
             --a claim, from one that holds its state----------------> AWAY   at the place of the claim, dialled there
             --ps_timeout--------------------------------------------> lost, for good
    HERE     --a claim, of the process that is there-----------------> HERE
    HERE     --a claim, of another process---------------------------> refused; it may try again
    any      --a claim, from one that holds another state, or none---> refused

Only AWAY can move. So there is at most one place for a task at any time, as long as one process at a time has its
state: its folder is locked. Whoever copies such a folder, and starts servers on both copies, has two.

The move itself changes nothing on any server, and is not written down: the coordinator, its client and the workers dial
another address. If the coordinator dies, before or after it, the server registers with the next one. What may be lost:
what any restart of the server loses, by its durability; see `Losses`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pscluster.core.errors import BusyError, RefusedError


@dataclass(frozen=True, slots=True)
class ServerClaim:
    """A process that says that it is a server, and has answered at its place."""

    index: int
    address: str
    boot_id: int
    store_id: int  # of what it holds; 0: nothing


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """What the coordinator knows of a server."""

    index: int
    address: str
    store_id: int  # of what it must hold; 0: anything, since the job has not begun
    is_here: bool  # it is connected, or answers there
    boot_id: int = 0  # of the process that is there, if known


def check_index(index: int, count: int) -> None:
    """Raise RefusedError if a cluster of so many servers has none with this index."""
    if index >= count:
        raise RefusedError(
            f"the task is {index}, but the cluster has {count} parameter servers, the last of which is {count - 1}: "
            "give an index of those, or list more in the coordinator's TF_CONFIG and start a new job"
        )


def moves(claim: ServerClaim, place: ServerPlace) -> bool:
    """Return whether the server is now at the place of the claim; False if it was there before.

    Raise BusyError if another process is there, RefusedError if the claim's does not hold the server's state.
    """
    if place.store_id and claim.store_id != place.store_id:
        holds = "holds the state of another one, or of an older job" if claim.store_id else "holds nothing"
        raise RefusedError(
            f"ps {claim.index} of this job has its part of all variables in its state folder, but the process that "
            f"registers as this task {holds}: start it with the disk, --state-dir and --job-name that it had, and with "
            "--durability snapshot or log"
        )
    if claim.address == place.address:
        return False
    if place.is_here:
        if claim.boot_id == place.boot_id:
            return False
        raise BusyError(
            f"ps {claim.index} is another process, at {place.address}, which is in the cluster now: stop that one, or "
            "give this one another --task"
        )
    return True
