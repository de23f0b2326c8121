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

A process may also register as a server that the job does not have yet, with the next index or one of the following. It
waits, without anything, until the script adds it (`moves.servers`); the others go on meanwhile:

    (none)   --a claim, from one that holds nothing------------------> WAITING
             --a claim, from one that holds a state------------------> refused
    WAITING  --a claim, of the process that waits--------------------> WAITING
             --a claim, of another process---------------------------> refused; it may try again
             --WAIT_SECONDS without a claim--------------------------> (none)   roles register more often than that
             --the job has as many servers, and adds one-------------> HERE

Only AWAY can move. So there is at most one place for a task at any time, as long as one process at a time has its
state: its folder is locked. Whoever copies such a folder, and starts servers on both copies, has two.

The move itself changes nothing on any server, and is not written down: the coordinator, its client and the workers dial
another address. If the coordinator dies, before or after it, the server registers with the next one. What may be lost:
what any restart of the server loses, by its durability; see `Losses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from pscluster.core.errors import BusyError, RefusedError

MAX_WAITING = 16
"""The most servers that wait to be added."""

WAIT_SECONDS = 20.0

T = TypeVar("T")


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
    """Raise RefusedError if a cluster of this size neither has a server with this index nor may get it soon."""
    if index >= count + MAX_WAITING:
        raise RefusedError(
            f"the task is {index}, but the cluster has {count} parameter servers, the last of which is {count - 1}: "
            f"give an index of those, or {count} for one that the script adds"
        )


class WaitingServers(Generic[T]):
    """The processes that wait to be added, by index, each with what its owner knows it by. The owner serializes calls.

    Bounded, since `check_index` is.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ServerClaim, T, float]] = {}

    def claim(self, claim: ServerClaim, peer: T, now: float) -> bool:
        """Take a claim; return whether it is news. RefusedError or BusyError if the process must not wait."""
        if claim.store_id:
            raise RefusedError(
                f"the job has no ps {claim.index} yet, but the process that registers as this task holds the state of "
                "an older one: start it with an empty --state-dir, or another --job-name"
            )
        known = self._known.get(claim.index)
        alive = known is not None and now - known[2] < WAIT_SECONDS
        if known is not None and alive and known[0].boot_id != claim.boot_id:
            raise BusyError(
                f"ps {claim.index} is another process, at {known[0].address}, which waits to be added: stop that one, "
                "or give this one another --task"
            )
        self._known[claim.index] = claim, peer, now
        return not alive

    def take(self, index: int, now: float) -> T | None:
        """Return the one with this index, which waits no longer; None if there is none."""
        known = self._known.pop(index, None)
        return None if known is None or now - known[2] >= WAIT_SECONDS else known[1]

    def indices(self, now: float) -> list[int]:
        """Return the indices of those that wait, rising."""
        return sorted(index for index, (_, _, at) in self._known.items() if now - at < WAIT_SECONDS)


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
