"""Layout: which dimension of a mesh, if any, each axis of an array is sharded over.

An array is replicated over every dimension of the mesh that its layout does not name. Axes are cut as evenly as
possible, as `numpy.array_split` does, so any length fits; the blocks of a layout are those of a `Partition`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from pscluster.core.checks import type_of
from pscluster.core.errors import LayoutError
from pscluster.core.geometry.partition import Block, Partition
from pscluster.core.layouts.mesh import MATCH, UNSHARDED, Mesh

Spec = str | None

_STRING = re.compile(r"sharding_specs:(?P<specs>[^|]*?),? mesh:(?P<mesh>.*)")


class Layout:
    """How an array lies on a mesh: for each axis the dimension that it is sharded over, or UNSHARDED.

    Immutable, compared by value, and usable as a key. A layout for a scalar has no specs.

    Args:
        specs: one for each axis: the name of a dimension of the mesh, or UNSHARDED, or None, which means the same.
        mesh: the mesh.

    Raises LayoutError if the mesh has no such dimension, or one is named twice.
    """

    __slots__ = ("__dict__", "mesh", "specs")

    mesh: Mesh
    specs: tuple[str, ...]

    def __init__(self, specs: Sequence[Spec], mesh: Mesh) -> None:
        if not isinstance(mesh, Mesh):
            raise LayoutError(f"a layout needs a Mesh, not {type_of(mesh)}: give Layout(specs, mesh)")
        whole = tuple(UNSHARDED if spec is None else spec for spec in _listed(specs))
        for axis, spec in enumerate(whole):
            if spec == UNSHARDED:
                continue
            if not isinstance(spec, str) or spec not in mesh:
                hint = "; MATCH is only for relayout()" if spec == MATCH else ""
                raise LayoutError(
                    f"axis {axis} can't be sharded over {spec!r}: the mesh has the dimensions "
                    f"{', '.join(mesh.dim_names)}{hint}"
                )
            if (first := whole.index(spec)) != axis:
                raise LayoutError(
                    f"axes {first} and {axis} are both sharded over {spec!r}, which can shard one axis only: leave one "
                    "of them UNSHARDED, or use another dimension"
                )
        object.__setattr__(self, "specs", whole)
        object.__setattr__(self, "mesh", mesh)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a layout does not change ({name}): make another one")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.specs, self.mesh)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Layout):
            return NotImplemented
        return self.specs == other.specs and self.mesh == other.mesh

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.specs, self.mesh))

    # Makers

    @classmethod
    def replicated(cls, mesh: Mesh, rank: int) -> Layout:
        """Return the layout of an array of this rank that every device has in whole."""
        return cls(_unsharded(rank), mesh)

    @classmethod
    def batch_sharded(cls, mesh: Mesh, batch_dim: str, rank: int, axis: int = 0) -> Layout:
        """Return the layout that shards one axis, by default the first, over this dimension."""
        specs = _unsharded(rank)
        if not isinstance(axis, int) or not -rank <= axis < rank:
            raise LayoutError(f"an array of rank {rank} has no axis {axis!r} to shard over {batch_dim!r}")
        specs[axis] = batch_dim
        return cls(specs, mesh)

    @classmethod
    def inner_sharded(cls, mesh: Mesh, inner_dim: str, rank: int) -> Layout:
        """Return the layout that shards the last axis over this dimension."""
        return cls.batch_sharded(mesh, inner_dim, rank, axis=-1)

    def delete(self, axes: Iterable[int]) -> Layout:
        """Return the layout of an array without these axes."""
        gone = {axis + self.rank if axis < 0 else axis for axis in axes}
        if wrong := [axis for axis in gone if not 0 <= axis < self.rank]:
            raise LayoutError(f"a layout of rank {self.rank} has no axis {wrong[0]}")
        return Layout([spec for axis, spec in enumerate(self.specs) if axis not in gone], self.mesh)

    def matched(self, specs: Sequence[Spec]) -> Layout:
        """Return the layout with these specs, of which MATCH stands for this layout's own."""
        given = _listed(specs)
        if len(given) != self.rank:
            raise LayoutError(f"{len(given)} specs were given for an array of rank {self.rank}: give one for each axis")
        return Layout([own if spec == MATCH else spec for own, spec in zip(self.specs, given, strict=True)], self.mesh)

    # Questions

    @property
    def sharding_specs(self) -> list[str]:
        """The specs as a list."""
        return list(self.specs)

    @property
    def rank(self) -> int:
        """The number of axes of the arrays that it is for."""
        return len(self.specs)

    @functools.cached_property
    def used(self) -> frozenset[str]:
        """The dimensions that it shards over."""
        return frozenset(spec for spec in self.specs if spec != UNSHARDED)

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole array."""
        return not self.used

    def num_shards(self, axis: int) -> int:
        """Return how many pieces an axis is cut into."""
        spec = self.specs[axis]
        return 1 if spec == UNSHARDED else self.mesh[spec]

    def check_shape(self, shape: Sequence[int], label: str = "an array") -> None:
        """Raise LayoutError if an array of this shape has not as many axes as the layout."""
        if len(shape) != self.rank:
            raise LayoutError(
                f"{label} of shape {tuple(shape)} has {len(shape)} axes, but the layout has {self.rank}: "
                f"[{', '.join(self.specs)}]; give one entry for each axis"
            )

    def partition(self, shape: Sequence[int]) -> Partition:
        """Return the blocks that it cuts an array into."""
        self.check_shape(shape)
        return _partition(self, tuple(shape))

    def shard_of(self, device: int) -> int:
        """Return the number of the block that a device has."""
        return self._shards[device]

    @functools.cached_property
    def _shards(self) -> tuple[int, ...]:
        """For each device the number of its block."""
        positions = [-1 if spec == UNSHARDED else self.mesh.dim_names.index(spec) for spec in self.specs]
        shards = []
        for device in range(self.mesh.size):
            coords, shard = self.mesh.coords(device), 0
            for axis, position in enumerate(positions):
                if position >= 0:
                    shard = shard * self.num_shards(axis) + coords[position]
            shards.append(shard)
        return tuple(shards)

    def block(self, shape: Sequence[int], device: int) -> Block:
        """Return which part of an array of this shape a device has."""
        return self.partition(shape).blocks[self._shards[device]]

    def slices(self, shape: Sequence[int], device: int) -> tuple[slice, ...]:
        """Return the index of a device's block in an array of this shape."""
        return self.block(shape, device).slices

    def local_shape(self, shape: Sequence[int], device: int) -> tuple[int, ...]:
        """Return the shape of a device's block."""
        return self.block(shape, device).shape

    def whole_shape(self, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Return the shape of the array whose blocks, one for each device, have these: of as many axes as the layout.

        An axis is as long as the pieces of the devices along its dimension that are the first on all others. Whether
        all blocks are those of such an array is not checked.
        """
        lengths = []
        for axis, spec in enumerate(self.specs):
            along = [0]
            if spec != UNSHARDED:
                place = self.mesh.dim_names.index(spec)
                coords = map(self.mesh.coords, range(self.mesh.size))
                along = [device for device, at in enumerate(coords) if sum(at) == at[place]]
            lengths.append(sum(shapes[device][axis] for device in along))
        return tuple(lengths)

    @functools.cached_property
    def owners(self) -> tuple[int, ...]:
        """For each block the first device that has it."""
        first: dict[int, int] = {}
        for device, shard in enumerate(self._shards):
            first.setdefault(shard, device)
        return tuple(first[shard] for shard in range(len(first)))

    def replica_of(self, device: int) -> int:
        """Return how many devices before this one have the same block."""
        return self._shards[:device].count(self._shards[device])

    # Text

    def to_string(self) -> str:
        """Return specs and mesh as text: see `from_string`."""
        return f"sharding_specs:{''.join(f'{spec},' for spec in self.specs)} mesh:{self.mesh}"

    __str__ = to_string

    @classmethod
    def from_string(cls, text: str) -> Layout:
        """Return the layout of such a string. Raise LayoutError or MeshError if it is none."""
        found = _STRING.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise LayoutError(f"{text!r:.200} is not a layout, such as sharding_specs:x,unsharded, mesh:|x=1|0|0|CPU:0")
        return cls(found["specs"].split(",") if found["specs"] else [], Mesh.from_string(found["mesh"]))

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.mesh.dims)
        return f"<Layout [{', '.join(self.specs)}] of mesh {dims}>"


def _listed(specs: object) -> list[Spec]:
    if isinstance(specs, str) or not isinstance(specs, Iterable):
        raise LayoutError(f"specs is {specs!r}; give a list with one entry for each axis, such as ['x', UNSHARDED]")
    return list(specs)


def _unsharded(rank: object) -> list[Spec]:
    if not isinstance(rank, int) or rank < 0:
        raise LayoutError(f"rank is {rank!r}; it must be the number of an array's axes, 0 or more")
    return [UNSHARDED] * rank


@functools.lru_cache(maxsize=4096)
def _partition(layout: Layout, shape: tuple[int, ...]) -> Partition:
    return Partition.even(shape, [layout.num_shards(axis) for axis in range(layout.rank)])
