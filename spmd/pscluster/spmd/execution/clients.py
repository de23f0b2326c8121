"""Several clients: a function that runs on several workers at once is one program on arrays of all of them.

Each replica of the gang is a client, and has one task of the mesh. All clients do the same operations in the same
order, and each runs its part of an operation at once, on its own devices: nothing goes by the coordinator. Where pieces
move, the clients exchange them by the gang's collectives, which name a client that does something else.

Arrays live as long as the execution that has made them. If a client fails, or its worker dies, the gang ends, and where
it runs again, all clients begin from the start, with another mesh session, since they have another replica context.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
import xxhash

from pscluster.core import checks
from pscluster.core.context import current_function
from pscluster.core.errors import MeshError, MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import LOCAL_JOB, WORKER_JOB, Device, Dims, Mesh
from pscluster.spmd.execution.executors import Ended
from pscluster.spmd.execution.recording import Ref, Sendable
from pscluster.spmd.execution.session import Session
from pscluster.worker.collectives.algorithms import Incoming, Meanwhile, Outgoing
from pscluster.worker.collectives.replica import ReplicaContext, replica_context, user_place
from pscluster.worker.programs.exchange import AmongWorkers, gather_bytes
from pscluster.worker.programs.interpreter import run
from pscluster.worker.programs.program import ArrayType, Fetch
from pscluster.worker.programs.reading import parse
from pscluster.worker.programs.store import BlockStore

_MAX_TEXT = 1 << 22
_MAX_SHOWN = 5  # disagreements in an error


class _Client:
    """This replica's devices."""

    def __init__(self, mesh: Mesh, replica: ReplicaContext) -> None:
        self._ranks = [index for _, index in mesh.tasks]
        self._replica = weakref.ref(replica)  # which keeps the session
        self._store = BlockStore()
        self._operations = self._digest = 0

    @property
    def replica(self) -> ReplicaContext:
        """The replica. Raise MisuseError if it has ended."""
        if (replica := self._replica()) is None:
            raise MisuseError("the function that has created this mesh has ended, and so have its arrays")
        return replica

    def check(self) -> None:
        """Do nothing: a replica's programs are not scheduled."""

    def start(self, program: Sendable) -> Ended:
        """Run a program here. Raises its error at once: it ends the gang."""
        parsed = parse(program.text)
        if not all(isinstance(instruction, Fetch) for instruction in parsed.code):  # clients may fetch on their own
            self._operations += 1
            self._digest = xxhash.xxh3_64_intdigest(program.text.encode(), self._digest)
        exchange = _Compared(self.replica, self._ranks, f"after {self._operations} operations, {self._digest:016x}")
        fetched = run(parsed, self._store, exchange, program.numbers, program.payloads[0], program.functions)
        return Ended([fetched])


class _Compared(AmongWorkers):
    """Exchanges pieces with those clients that have done the same operations before."""

    def __init__(self, replica: ReplicaContext, ranks: Sequence[int], before: str) -> None:
        super().__init__(replica, ranks, user_place())
        self._before = before

    def swap(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        label: str,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Exchange, as one collective. Raise MisuseError if a client has done something else."""
        super().swap(outgoing, incoming, f"{label} ({self._before})", meanwhile)


class ClientSession(Session):
    """A mesh's session in one of its clients."""

    def __init__(self, mesh: Mesh, replica: ReplicaContext) -> None:
        self._client = _Client(mesh, replica)
        super().__init__(mesh, self._client, [mesh.tasks.index((WORKER_JOB, replica.replica_id))])

    def _send_soon(self) -> None:
        """Run what is recorded: which operations run together must not depend on who fetches something."""
        self.flush()

    def gather(self, facts: list[Any]) -> list[Any]:
        """Return what is known of each device of the mesh, given it for this client's."""
        texts = _gathered(self._client.replica, json.dumps(facts), "what components are like")
        by_rank = [iter(json.loads(text)) for text in texts]
        return [next(by_rank[device.task]) for device in self.mesh.devices]

    def whole(self, source: Ref, timeout: float | None = None) -> npt.NDArray[Any]:
        """Return the whole array, gathered by all clients."""
        of = source.type
        if not of.layout.is_replicated:
            replicated = Layout.replicated(self.mesh, of.layout.rank)
            source = self.move(source, ArrayType(of.shape, of.dtype, replicated))
        return self.blocks(source, timeout)[0].copy()


def create_distributed_mesh(
    dims: Dims, devices: Sequence[str] | None = None, *, devices_per_task: int = 1, name: str = ""
) -> Mesh:
    """Make a mesh of the devices of all clients, in a function that runs on several workers at once.

    Each replica of the function is a client, and one task of the mesh: replica 1 has "/job:worker/task:1/device:CPU:0"
    and so on. A barrier: it returns once all clients have called it, with equal arguments.

    Args:
        dims: names and sizes, as those of `create_mesh`.
        devices: the names of all devices, in their order. None: those of replica 0, of replica 1, and so on.
        devices_per_task: how many devices each client has, if they are not named.
        name: part of the mesh.

    Raises:
        MeshError: clients disagree on the mesh; the arguments make no mesh, or not one of all clients.
        MisuseError: this is no function on a worker.
    """
    if current_function() is None:
        raise MisuseError(
            "create_distributed_mesh() is for functions that run on workers, each of them a client: elsewhere use "
            "create_mesh(), with coordinator= for the devices of a cluster"
        )
    replica = replica_context()
    each = checks.whole("devices_per_task", devices_per_task, at_least=1)
    clients = range(replica.num_replicas)
    if devices is None:
        mesh = Mesh(dims, [Device(WORKER_JOB, rank, number) for rank in clients for number in range(each)], name=name)
    elif each != 1:
        raise MeshError("devices are given, so devices_per_task has no meaning: leave it out")
    else:
        mesh = Mesh(dims, devices, name=name)
    if set(mesh.tasks) != {(WORKER_JOB, rank) for rank in clients}:
        raise MeshError(
            f"the devices are of {', '.join(f'{job} {task}' for job, task in mesh.tasks)}, but the clients are "
            f"{', '.join(f'{WORKER_JOB} {rank}' for rank in clients)}: each of them must have some"
        )
    _check_agreed(replica, mesh)
    if mesh not in replica.attached:
        replica.attached[mesh] = ClientSession(mesh, replica)
    return mesh


def client_session(mesh: Mesh) -> Session | None:
    """Return a mesh's session in the client that runs here; None if there is none."""
    if mesh.devices[0].job == LOCAL_JOB or (function := current_function()) is None or function.replica is None:
        return None
    session: Session | None = function.replica.attached.get(mesh)
    return session


def _check_agreed(replica: ReplicaContext, mesh: Mesh) -> None:
    """Wait until all clients have called this. Raise MeshError on all of them if their meshes differ."""
    texts = _gathered(replica, str(mesh), "the meshes of clients")
    if len(set(texts)) == 1:
        return
    meshes = [Mesh.from_string(text) for text in texts]
    found = [_difference(rank, other, meshes[0]) for rank, other in enumerate(meshes) if other != meshes[0]]
    more = f"; and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
    raise MeshError(
        f"the clients disagree on the mesh: {'; '.join(found[:_MAX_SHOWN])}{more}. Call create_distributed_mesh() with "
        "the same arguments on all of them"
    )


def _difference(rank: int, mesh: Mesh, first: Mesh) -> str:
    """Return in words how one client's mesh differs from the first's."""
    if mesh.dims != first.dims:
        own, of_first = (", ".join(f"{name}={size}" for name, size in one.dims) for one in (mesh, first))
        return f"client {rank} gives dimensions {own}, and client 0 {of_first}"
    if mesh.name != first.name:
        return f"client {rank} calls it {mesh.name!r}, and client 0 {first.name!r}"
    pairs = enumerate(zip(mesh.devices, first.devices, strict=True))  # as many: the sizes are the same
    nth, (device, other) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
    return f"device {nth} is {device} for client {rank}, and {other} for client 0"


def _gathered(replica: ReplicaContext, text: str, label: str) -> list[str]:
    """Return the text of each replica."""
    data = text.encode()
    if len(data) > _MAX_TEXT:
        raise MisuseError(f"{len(data):,} bytes are described to the other clients; at most {_MAX_TEXT:,} can be")
    ranks = range(replica.num_replicas)
    exchange = AmongWorkers(replica, ranks, user_place())
    return [theirs.decode() for theirs in gather_bytes(exchange, len(ranks), data, label)]
