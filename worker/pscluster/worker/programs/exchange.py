"""How the tasks of a mesh send each other pieces of arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pscluster.core.errors import ProtocolError
from pscluster.core.fault_points import reach
from pscluster.core.layouts.mesh import LOCAL_JOB, Mesh
from pscluster.worker.collectives.algorithms import Incoming, Meanwhile, Outgoing
from pscluster.worker.collectives.replica import ReplicaContext

_SLOT = 1024  # bytes that each task sends each other in a gather; what is longer follows
_HEAD = 8
_MAX_BYTES = 16 << 20


class Exchange(Protocol):
    """A task's way to the other tasks of a mesh, which are numbered as in `Mesh.tasks`."""

    @property
    def task(self) -> int:
        """The number of this one."""

    def swap(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        label: str,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Send other tasks bytes, and fill memory with theirs: both sides know how many. `label` is shown in errors.

        `meanwhile` is called before theirs are awaited. See `algorithms.exchange`.
        """


class OneProcess:
    """All devices are of this process: nothing is sent."""

    task = 0

    def swap(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        label: str,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Exchange nothing."""
        assert not outgoing, label
        assert not incoming, label
        meanwhile()


class AmongWorkers:
    """The members of a gang, one for each task of a mesh."""

    def __init__(self, replica: ReplicaContext, ranks: Sequence[int], place: str = "a program") -> None:
        """Take this member, the number of each task's, and what errors say of where exchanges are called."""
        self.task = ranks.index(replica.replica_id)
        self._replica, self._ranks, self._place = replica, ranks, place

    def swap(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        label: str,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Exchange, as one collective. Raise MemberUnavailableError if a member that is awaited is gone."""
        reach("worker.exchange.before")
        to = {self._ranks[task]: buffer for task, buffer in outgoing.items()}
        of = {self._ranks[task]: memory for task, memory in incoming.items()}
        self._replica.exchange(to, of, label, self._place, meanwhile)
        reach("worker.exchange.after")


def exchange_of(mesh: Mesh, replica: ReplicaContext, worker: int) -> AmongWorkers:
    """Return how this worker exchanges pieces with the others of a mesh.

    Raise ProtocolError if the mesh is not of the workers that run this function.
    """
    if len(mesh.tasks) != replica.num_replicas or mesh.tasks[replica.replica_id][1] != worker:
        raise ProtocolError(
            f"replica {replica.replica_id} of {replica.num_replicas} runs on worker {worker}, but the mesh is of "
            f"{', '.join(f'{job} {index}' for job, index in mesh.tasks)}"
        )
    if any(job == LOCAL_JOB for job, _ in mesh.tasks):
        raise ProtocolError("a mesh of another process' own devices can't be used on a worker")
    return AmongWorkers(replica, range(replica.num_replicas))


def gather_bytes(exchange: Exchange, tasks: int, data: bytes, label: str) -> list[bytes]:
    """Send all other tasks some bytes, and return those of each task. Raise ProtocolError if there are too many."""
    me = exchange.task
    others = [task for task in range(tasks) if task != me]
    if not others:
        return [data]
    own = (len(data).to_bytes(_HEAD, "little") + data[: _SLOT - _HEAD]).ljust(_SLOT, b"\0")
    slots = {task: bytearray(_SLOT) for task in others}
    exchange.swap(dict.fromkeys(others, memoryview(own)), {of: memoryview(slot) for of, slot in slots.items()}, label)
    lengths = {task: int.from_bytes(slot[:_HEAD], "little") for task, slot in slots.items()} | {me: len(data)}
    if (longest := max(lengths.values())) > _MAX_BYTES:
        raise ProtocolError(f"a task sends {longest:,} bytes in {label}; at most {_MAX_BYTES:,} are read")
    rests = {task: bytearray(max(0, length - _SLOT + _HEAD)) for task, length in lengths.items()}
    if any(rests.values()):  # all tasks know this
        outgoing = dict.fromkeys(others if rests[me] else [], memoryview(data)[_SLOT - _HEAD :])
        exchange.swap(outgoing, {of: memoryview(rests[of]) for of in others if rests[of]}, label)
    gathered = {of: bytes(slot[_HEAD : _HEAD + lengths[of]] + rests[of]) for of, slot in slots.items()} | {me: data}
    return [gathered[task] for task in range(tasks)]
