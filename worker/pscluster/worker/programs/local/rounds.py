"""The decision which collectives of a function's calls can be carried out. Pure.

A function is called once for each device of a mesh. A call runs until it waits in a collective, returns or fails. Once
no call of a task runs any more, its tasks tell each other where theirs are; that is a round. All decide alike:

    WAITING --all devices of the group wait in the same collective--> it is carried out, and they go on
            --one of the group has returned, or waits in another collective of it--> an error, for all
            --no group is complete--> an error, for all: they wait for each other
    any     --a call has failed--> an error, for all; the task of that call raises its own
    ENDED   --all calls have--> the end

So nothing waits for what can't come, whatever functions do, but for calls that never end; and every error names devices
and places in the code. A task that dies is found by the exchange of a round.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MemberUnavailableError, MisuseError, ProtocolError
from pscluster.core.layouts.mesh import Mesh

MAX_WHY = 300
"""Characters of an error that other tasks are told."""

GATHER = "all_gather"
"""The collective whose arrays may differ in length, along its axis."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """What is told of an array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call waits in a collective."""

    operation: str
    dims: tuple[str, ...]  # of the mesh: over which its group extends
    arrays: tuple[ArrayShape, ...]
    axis: int = 0
    place: str = ""  # in the code

    def __str__(self) -> str:
        return f"{self.operation} over {', '.join(self.dims)} at {self.place}"


@dataclass(frozen=True, slots=True)
class Ended:
    """A call has returned."""

    results: tuple[ArrayShape, ...] = ()
    digests: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """A call has raised an error."""

    why: str


Status = Waiting | Ended | Failed


@dataclass(frozen=True, slots=True)
class Group:
    """Devices that wait in the same collective, in order."""

    devices: tuple[int, ...]
    waiting: Waiting  # of the first


def encode(statuses: Mapping[int, Status]) -> bytes:
    """Return statuses by device as bytes."""
    return json.dumps([_encoded(statuses[device]) for device in sorted(statuses)], separators=(",", ":")).encode()


def _encoded(status: Status) -> list[Any]:
    match status:
        case Waiting():
            arrays = [[of.dtype, of.shape] for of in status.arrays]
            return ["waiting", status.operation, status.dims, arrays, status.axis, status.place]
        case Ended():
            return ["ended", [[of.dtype, of.shape] for of in status.results], status.digests]
        case Failed():
            return ["failed", status.why]


def decode(data: bytes, devices: Sequence[int], mesh: Mesh) -> dict[int, Status]:
    """Return the statuses of a task's devices. Raise ProtocolError for what makes no sense."""
    try:
        items = json.loads(data)
        return {device: _decoded(item, mesh) for device, item in zip(devices, items, strict=True)}
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise ProtocolError(
            f"another task has sent an invalid account of its calls: {type(error).__name__}: {error}"
        ) from None


def _decoded(item: Any, mesh: Mesh) -> Status:
    match item:
        case ["waiting", str(operation), list(dims), list(arrays), int(axis), str(place)]:
            if not dims or not all(isinstance(dim, str) and dim in mesh for dim in dims):
                raise ValueError(f"dimensions {dims}")
            return Waiting(operation, tuple(dims), tuple(map(_array, arrays)), axis, place)
        case ["ended", list(results), list(digests)] if all(type(digest) is int for digest in digests):
            return Ended(tuple(map(_array, results)), tuple(digests))
        case ["failed", str(why)]:
            return Failed(why[:MAX_WHY])
    raise ValueError(f"{item!r:.100}")


def _array(item: Any) -> ArrayShape:
    dtype, shape = item
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"a shape {shape!r:.100}")
    return ArrayShape(dtype_named(dtype).name, tuple(shape))


def group_of(mesh: Mesh, dims: Collection[str], device: int) -> tuple[int, ...]:
    """Return the devices that differ from one, if at all, in their places on these dimensions."""
    fixed = [at for at, dim in enumerate(mesh.dim_names) if dim not in dims]
    own = mesh.coords(device)
    return tuple(other for other in range(mesh.size) if all(mesh.coords(other)[at] == own[at] for at in fixed))


def named(mesh: Mesh, device: int) -> str:
    """Return a device in words."""
    return f"device {device} ({mesh.devices[device]})"


def decide(mesh: Mesh, statuses: Mapping[int, Status]) -> list[Group]:
    """Return the groups whose collectives can be carried out; none if all calls have ended.

    Raises:
        MemberUnavailableError: a call has failed.
        MisuseError: calls wait for what will not come.
    """
    for device, status in sorted(statuses.items()):
        if isinstance(status, Failed):
            raise MemberUnavailableError(f"the call of {named(mesh, device)} has failed: {status.why}")
    waiting = {device: status for device, status in sorted(statuses.items()) if isinstance(status, Waiting)}
    complete: dict[tuple[int, ...], Group] = {}
    stuck = ""
    for device, status in waiting.items():
        members = group_of(mesh, status.dims, device)
        others = {other: statuses[other] for other in members}
        here = f"the call of {named(mesh, device)} waits in {status} for "
        for other, theirs in others.items():
            if isinstance(theirs, Ended):
                raise MisuseError(
                    f"{here}{named(mesh, other)}, whose call has returned without it: all devices along "
                    f"{', '.join(status.dims)} have to call the same collectives in the same order"
                )
            assert isinstance(theirs, Waiting), "failures were looked for before"
            if group_of(mesh, theirs.dims, other) != members:
                stuck = stuck or f"{here}{named(mesh, other)}, whose call waits in {theirs}"
                break
            if why := _mismatch(status, theirs):
                raise MisuseError(f"{here}{named(mesh, other)}, whose call waits in {theirs}, {why}")
        else:
            complete.setdefault(members, Group(members, waiting[members[0]]))
    if waiting and not complete:
        raise MisuseError(f"{stuck}: all devices of a group have to call the same collectives in the same order")
    return list(complete.values())


def _mismatch(one: Waiting, other: Waiting) -> str:
    """Return how two collectives differ, or "" if they can be carried out together."""
    if (one.operation, one.axis) != (other.operation, other.axis):
        return "which is another one"
    if len(one.arrays) != len(other.arrays):
        return f"with {len(other.arrays)} arrays, not {len(one.arrays)}"
    for mine, theirs in zip(one.arrays, other.arrays, strict=True):
        shapes = [mine.shape, theirs.shape]
        if one.operation == GATHER:
            shapes = [(len(shape), *shape[: one.axis], *shape[one.axis + 1 :]) for shape in shapes]
        if mine.dtype != theirs.dtype or shapes[0] != shapes[1]:
            return f"with an array {theirs}, not {mine}"
    return ""
