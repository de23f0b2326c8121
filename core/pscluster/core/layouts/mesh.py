"""Mesh: devices in a Cartesian arrangement, each dimension of which has a name."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pscluster.core.checks import type_of
from pscluster.core.errors import MeshError

UNSHARDED = "unsharded"
"""In a layout: an axis that is not sharded. `None` means the same."""

MATCH = "match"
"""In the layout of a `relayout`: the axis stays as it is."""

MAX_DEVICES = 1 << 16

_NAME = re.compile(r"[^\W\d]\w*", re.ASCII)
_SHORT = re.compile(r"(?:CPU|device:CPU):(\d{1,9})", re.ASCII)
_LONG = re.compile(r"/job:(\w+)/(?:replica:0/)?task:(\d{1,9})(?:/device:CPU:(\d{1,9}))?", re.ASCII)
_STRING = re.compile(r"(?P<name>[^|]*)\|(?P<dims>[^|]*)\|(?P<ids>[^|]*)\|(?P<local>[^|]*)\|(?P<devices>[^|]*)")

LOCAL_JOB = "localhost"
"""The job of devices that are this process itself."""

WORKER_JOB = "worker"
"""The job of a cluster's workers."""

Dims = Mapping[str, int] | Iterable[tuple[str, int]]


class Device(NamedTuple):
    """One device of a mesh: the task that it belongs to, and its number there."""

    job: str
    task: int
    number: int = 0

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.task}/device:CPU:{self.number}"

    @classmethod
    def parse(cls, name: str) -> Device:
        """Return the device of a name such as "CPU:0" or "/job:worker/task:1/device:CPU:0". MeshError if it is none."""
        if isinstance(name, str):
            if (short := _SHORT.fullmatch(name)) is not None:
                return cls(LOCAL_JOB, 0, int(short[1]))
            if (long := _LONG.fullmatch(name)) is not None:
                return cls(long[1], int(long[2]), int(long[3] or 0))
        raise MeshError(f'{name!r} is not the name of a device: write "CPU:0", or "/job:worker/task:1/device:CPU:0"')


class Mesh:
    """A Cartesian arrangement of devices, numbered in C order, the last dimension fastest. Immutable; a value.

    Args:
        dims: names and sizes, as a dict or pairs, such as {"x": 3, "y": 2}. One size may be -1: as many as fit.
        devices: their names, in order. None: virtual devices of this process.
        name: shown, and compared like the rest.

    Raises MeshError for a name that is not an identifier, is reserved or repeated, a size below 1, or devices that are
    repeated or not as many as the sizes say.
    """

    __slots__ = ("__dict__", "devices", "dims", "name")  # the dictionary holds what is computed from them

    def __init__(self, dims: Dims, devices: Sequence[str | Device] | None = None, *, name: str = "") -> None:
        pairs = _checked_dims(dims)
        if devices is None:
            if any(size == -1 for _, size in pairs):
                raise MeshError(f"a size of {_described(pairs)} is -1, which needs devices to infer it from")
            devices = [Device(LOCAL_JOB, 0, number) for number in range(math.prod(size for _, size in pairs))]
        elif isinstance(devices, str) or not isinstance(devices, Sequence):
            raise MeshError(f"devices is {type_of(devices)}; give a list of names")
        parsed = tuple(device if isinstance(device, Device) else Device.parse(device) for device in devices)
        if len(set(parsed)) < len(parsed):
            twice = next(device for device in parsed if parsed.count(device) > 1)
            raise MeshError(f"device {twice} occurs more than once in a mesh: give each of its devices once")
        object.__setattr__(self, "dims", _inferred(pairs, len(parsed)))
        object.__setattr__(self, "devices", parsed)
        object.__setattr__(self, "name", name)
        if self.size != len(parsed):
            raise MeshError(
                f"a mesh of {_described(self.dims)} has {self.size} devices, but {len(parsed)} are given: change a "
                "size, or give -1 for one of them"
            )

    dims: tuple[tuple[str, int], ...]
    devices: tuple[Device, ...]
    name: str

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a mesh does not change ({name}): make another one")

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(type(self), name=self.name), (self.dims, self.devices)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.dims, self.devices, self.name) == (other.dims, other.devices, other.name)

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.devices, self.name))

    @functools.cached_property
    def dim_names(self) -> tuple[str, ...]:
        """The names of its dimensions."""
        return tuple(name for name, _ in self.dims)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The sizes of its dimensions."""
        return tuple(size for _, size in self.dims)

    @functools.cached_property
    def size(self) -> int:
        """The number of its devices."""
        return math.prod(self.shape)

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.dims)

    @functools.cached_property
    def tasks(self) -> tuple[tuple[str, int], ...]:
        """The tasks, as job and index, that its devices belong to, in the order of their first devices."""
        return tuple(dict.fromkeys((device.job, device.task) for device in self.devices))

    @functools.cached_property
    def task_of(self) -> tuple[int, ...]:
        """For each device: the position of its task in `tasks`."""
        positions = {task: position for position, task in enumerate(self.tasks)}
        return tuple(positions[device.job, device.task] for device in self.devices)

    def devices_of(self, task: int) -> tuple[int, ...]:
        """Return the numbers of the devices of a task, which is given by its position in `tasks`."""
        return self._devices_of[task]

    @functools.cached_property
    def _devices_of(self) -> tuple[tuple[int, ...], ...]:
        """By task."""
        numbers = range(len(self.tasks))
        return tuple(tuple(number for number, of in enumerate(self.task_of) if of == task) for task in numbers)

    @functools.cached_property
    def _coordinates(self) -> tuple[tuple[int, ...], ...]:
        return tuple(itertools.product(*map(range, self.shape)))

    def coords(self, device: int) -> tuple[int, ...]:
        """Return the place of a device, given by its number, on each dimension. IndexError if there is none."""
        if not 0 <= device < self.size:
            raise IndexError(f"there is no device {device} in a mesh of {self.size}")
        return self._coordinates[device]

    def __getitem__(self, dim: str) -> int:
        """Return the size of a dimension. KeyError if there is none of that name."""
        if (size := self._sizes.get(dim)) is None:
            raise KeyError(f"the mesh has no dimension {dim!r}: it has {_described(self.dims)}")
        return size

    def __contains__(self, dim: object) -> bool:
        return dim in self._sizes

    def __iter__(self) -> Iterator[str]:
        return iter(self.dim_names)

    def __len__(self) -> int:
        return len(self.dims)

    def dim_size(self, dim: str) -> int:
        """Return the size of a dimension, as `mesh[dim]` does."""
        return self[dim]

    def to_string(self) -> str:
        """Return dimensions, numbers of all devices, of those of this process, and their names: see `from_string`."""
        numbers = ",".join(map(str, range(self.size)))
        dims = ",".join(f"{name}={size}" for name, size in self.dims)
        return f"{self.name}|{dims}|{numbers}|{numbers}|{','.join(map(str, self.devices))}"

    __str__ = to_string

    @classmethod
    def from_string(cls, text: str) -> Mesh:
        """Return the mesh of such a string. Raise MeshError if it is none."""
        found = _STRING.fullmatch(text) if isinstance(text, str) else None
        try:
            if found is not None:
                named = [item.split("=") for item in found["dims"].split(",")]
                dims = [(name, int(size)) for name, size in named]
                return cls(dims, found["devices"].split(","), name=found["name"])
        except ValueError as error:
            if isinstance(error, MeshError):
                raise
        raise MeshError(f"{text!r:.200} is not a mesh, such as |x=2|0,1|0,1|CPU:0,CPU:1")

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"<Mesh {_described(self.dims)} on {self.size} devices of {len(self.tasks)} tasks{name}>"


def _checked_dims(dims: Dims) -> list[tuple[str, int]]:
    try:
        pairs = [(name, size) for name, size in (dims.items() if isinstance(dims, Mapping) else dims)]
    except (TypeError, ValueError):
        raise MeshError(f'dims is {dims!r:.200}; give names and sizes, such as {{"x": 3, "y": 2}}') from None
    if not pairs:
        raise MeshError('a mesh has at least one dimension: give its name and size, such as {"x": 1}')
    checked: dict[str, int] = {}
    for name, size in pairs:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MeshError(f'{name!r} does not name a dimension of a mesh: give a name such as "x" or "batch"')
        if name in (UNSHARDED, MATCH):
            raise MeshError(f"a dimension of a mesh can't be named {name!r}, which has a meaning in layouts: rename it")
        if name in checked:
            raise MeshError(f"two dimensions of a mesh are named {name!r}: rename one of them")
        try:
            checked[name] = 0 if isinstance(size, bool) else operator.index(size)
        except TypeError:
            checked[name] = 0
        if checked[name] < 1 and checked[name] != -1:
            raise MeshError(f"dimension {name!r} has size {size!r}; give 1 or more, or -1 for as many as fit")
        if checked[name] > MAX_DEVICES:
            raise MeshError(f"dimension {name!r} has size {size}; a mesh has at most {MAX_DEVICES:,} devices")
    if list(checked.values()).count(-1) > 1:
        raise MeshError(f"more than one size of {_described(list(checked.items()))} is -1: give all but one")
    if math.prod(map(abs, checked.values())) > MAX_DEVICES:
        raise MeshError(f"{_described(list(checked.items()))} is more than {MAX_DEVICES:,} devices: give smaller sizes")
    return list(checked.items())


def _inferred(dims: Sequence[tuple[str, int]], devices: int) -> tuple[tuple[str, int], ...]:
    """Return the dimensions with a size for -1, that fits this many devices."""
    known = math.prod(size for _, size in dims if size != -1)
    inferred, left = divmod(devices, known)
    if any(size == -1 for _, size in dims) and (left or not inferred):
        raise MeshError(
            f"{devices} devices can't be arranged as {_described(dims)}: they are not a multiple of {known}"
        )
    return tuple((name, inferred if size == -1 else size) for name, size in dims)


def _described(dims: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in dims)
