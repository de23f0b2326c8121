"""Meshes that have devices: of this process, or of a cluster's workers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.errors import MeshError, MisuseError
from pscluster.core.layouts.layout import Layout, Spec
from pscluster.core.layouts.mesh import LOCAL_JOB, WORKER_JOB, Device, Dims, Mesh
from pscluster.spmd.execution.clients import client_session
from pscluster.spmd.execution.executors import InProcess, Workers
from pscluster.spmd.execution.session import Session
from pscluster.spmd.tracing.trace import active_trace
from pscluster.worker.programs.local.calls import current_call

if TYPE_CHECKING:
    from pscluster.coordinator import ClusterCoordinator

_sessions: dict[Mesh, Session] = {}
_lock = threading.Lock()
_default: ContextVar[Mesh | None] = ContextVar("pscluster-mesh", default=None)


def create_mesh(
    dims: Dims,
    devices: Sequence[str] | None = None,
    *,
    coordinator: ClusterCoordinator | None = None,
    tasks: Sequence[int] | None = None,
    devices_per_task: int = 1,
    name: str = "",
) -> Mesh:
    """Make a mesh of devices, and connect it to them.

    Args:
        dims: names and sizes, as a dict or pairs, such as [("x", 3), ("y", 2)]. One size may be -1: as many as fit.
        devices: their names. Without a coordinator "CPU:0" and so on, virtual devices of this process, the default;
            with one "/job:worker/task:1/device:CPU:0" and so on.
        coordinator: of the cluster whose workers have the devices.
        tasks: in place of devices: the indices of the workers; by default all of the cluster.
        devices_per_task: how many devices each of them has.
        name: part of the mesh.

    Raises:
        MeshError: they make no mesh, or the cluster has no such workers.
    """
    if coordinator is None:
        if tasks is not None or devices_per_task != 1:
            raise MeshError("tasks and devices_per_task are for the workers of a cluster: give its coordinator, too")
        mesh = Mesh(dims, devices, name=name)
        if any(job != LOCAL_JOB for job, _ in mesh.tasks):
            raise MeshError(f"{mesh.devices[0]} is a device of a cluster: give its coordinator, too")
        session_of(mesh)
        return mesh
    if not hasattr(coordinator, "context"):  # a ClusterCoordinator, which needs not be imported for local meshes
        raise MeshError(f"coordinator is {type_of(coordinator)}: give a ClusterCoordinator")
    there = [peer.index for peer in coordinator.context.workers]
    each = checks.whole("devices_per_task", devices_per_task, at_least=1)
    if devices is None:
        chosen = there if tasks is None else list(tasks)
        mesh = Mesh(dims, [Device(WORKER_JOB, task, n) for task in chosen for n in range(each)], name=name)
    elif tasks is not None or each != 1:
        raise MeshError("devices are given, so tasks and devices_per_task have no meaning: leave them out")
    else:
        mesh = Mesh(dims, devices, name=name)
    for job, index in mesh.tasks:
        if job != WORKER_JOB or index not in there:
            raise MeshError(f"the cluster has no {job} {index}; it has the workers {', '.join(map(str, there))}")
    with _lock:
        known = _sessions.get(mesh)
        if known is None or not isinstance(known.executor, Workers) or not known.executor.is_of(coordinator):
            _sessions[mesh] = Session(mesh, Workers(coordinator, mesh))
            coordinator.context.senders.add(_sessions[mesh])
    return mesh


def session_of(mesh: Mesh) -> Session:
    """Return a mesh's session, or the trace of the function that is traced here.

    Raise MeshError if it was not created here, and is not of this process' own devices; MisuseError in a function that
    `local_map` calls.
    """
    if current_call() is not None:
        raise MisuseError(
            "a function that local_map calls gets NumPy arrays, and can't use global arrays: pass them to it"
        )
    if (trace := active_trace(mesh)) is not None:
        return trace
    known = client_session(mesh)
    if known is not None or (known := _sessions.get(mesh)) is not None:
        return known
    if any(job != LOCAL_JOB for job, _ in mesh.tasks):
        raise MeshError(
            f"{mesh!r} is not connected: make it by create_mesh(dims, coordinator=coordinator), or, in a function that "
            "runs on several workers, by create_distributed_mesh(dims)"
        )
    if len(mesh.tasks) > 1:
        raise MeshError(f"{mesh!r} is of several processes: only one of them is this one")
    with _lock:
        return _sessions.setdefault(mesh, Session(mesh, InProcess()))


def check_is_mesh(mesh: object) -> None:
    """Raise MeshError if it is none."""
    if not isinstance(mesh, Mesh):
        raise MeshError(f"a Mesh is needed, not {type_of(mesh)}: make one by create_mesh(dims)")


@contextlib.contextmanager
def default_mesh(mesh: Mesh) -> Iterator[Mesh]:
    """Make it the mesh of `P`, and of traced functions that are called without global arrays, in the block."""
    check_is_mesh(mesh)
    token = _default.set(mesh)
    try:
        yield mesh
    finally:
        _default.reset(token)


def current_mesh() -> Mesh | None:
    """Return the mesh of the `default_mesh` block that this is in, if it is in one."""
    return _default.get()


def P(*specs: Spec) -> Layout:  # noqa: N802  # as in JAX
    """Return the layout with these specs on the default mesh. Raise MeshError if there is none."""
    if (mesh := current_mesh()) is None:
        raise MeshError("there is no default mesh: write `with default_mesh(mesh):`, or Layout(specs, mesh)")
    return Layout(specs, mesh)


def barrier(mesh: Mesh, timeout: float | None = None) -> None:
    """Wait until everything has ended that was computed on a mesh. Raises the first error."""
    check_is_mesh(mesh)
    session_of(mesh).wait(timeout)
