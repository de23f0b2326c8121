"""What has to move for an array to lie in another layout: which piece each device needs, and from which device.

An array may be partial over dimensions of the mesh: then the devices along them have terms, which are combined on the
way. They are combined in the order of those devices' places, whichever tasks have them and whenever they come, so the
bits of the result depend on the layouts and the mesh alone.

A device takes a piece from itself if it has it, else from another device of its task, else from the device that all of
its task take it from. Everyone computes the same plan.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pscluster.core.geometry.moves import moves
from pscluster.core.geometry.partition import Block
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh

THROUGH_BYTES = 64 << 10
"""Terms of larger arrays are combined on one device each before they are sent to all: see `combine_through`."""


class Piece(NamedTuple):
    """A part of an array, in coordinates of the whole, and the devices that have its terms, in order: one if none."""

    box: Block
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Moving:
    """The pieces that each device needs for its block; they don't overlap, and fill it."""

    mesh: Mesh
    pieces: tuple[tuple[Piece, ...], ...]  # by device

    @functools.cached_property
    def transfers(self) -> dict[tuple[int, int], tuple[tuple[int, Block], ...]]:
        """From one task to another: the pieces that go there, each once, and the devices that have them."""
        found: dict[tuple[int, int], dict[tuple[int, Block], None]] = {}
        for target, pieces in enumerate(self.pieces):
            to = self.mesh.task_of[target]
            for piece in pieces:
                for source in piece.sources:
                    if (of := self.mesh.task_of[source]) != to:
                        found.setdefault((of, to), {})[source, piece.box] = None
        return {tasks: tuple(sorted(sent, key=_order)) for tasks, sent in found.items()}

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements that go from one device to another."""
        return sum(
            piece.box.size
            for target, pieces in enumerate(self.pieces)
            for piece in pieces
            for source in piece.sources
            if source != target
        )

    @property
    def is_free(self) -> bool:
        """Whether nothing goes from one device to another."""
        return not self.elements


def _order(sent: tuple[int, Block]) -> tuple[object, ...]:
    device, box = sent
    return device, box.start, box.stop


@functools.lru_cache(maxsize=1024)
def moving(source: Layout, target: Layout, shape: tuple[int, ...], partial: tuple[str, ...] = ()) -> Moving:
    """Plan how an array of this shape gets from one layout to another, of the same mesh.

    `partial` are the dimensions over which it is a combination of terms; the source does not shard over them.
    """
    mesh = source.mesh
    assert target.mesh == mesh, "arrays move within a mesh"
    assert not source.used.intersection(partial), "an array is not sharded over a dimension that it is partial over"
    old, new = source.partition(shape), target.partition(shape)
    by_shard: list[list[tuple[int, Block]]] = [[] for _ in range(new.num_shards)]
    for move in moves(old, new):
        by_shard[move.new_shard].append((move.old_shard, move.block))
    holders = _holders(source, partial)
    first_of = [mesh.devices_of(task)[0] for task in range(len(mesh.tasks))]
    free = [mesh.dim_names.index(dim) for dim in mesh.dim_names if dim not in source.used and dim not in partial]

    def choice(candidates: Sequence[int], device: int) -> int:
        if device in candidates:
            return device
        task = mesh.task_of[device]
        if near := [candidate for candidate in candidates if mesh.task_of[candidate] == task]:
            return near[0]
        wanted = mesh.coords(first_of[task])
        return next(
            candidate for candidate in candidates if all(mesh.coords(candidate)[at] == wanted[at] for at in free)
        )

    pieces = tuple(
        tuple(
            Piece(box, tuple(choice(candidates, device) for candidates in holders[old_shard]))
            for old_shard, box in by_shard[target.shard_of(device)]
        )
        for device in range(mesh.size)
    )
    return Moving(mesh, pieces)


@functools.lru_cache(maxsize=1024)
def gathering(source: Layout, target: Layout, shape: tuple[int, ...], partial: tuple[str, ...], nth: int) -> Moving:
    """Plan how each block of the target layout gets to one device only: of those that have it there, the n-th.

    Blocks of one array are spread over the devices, and so are whole arrays of different numbers.
    """
    plan, owners = moving(source, target, shape, partial), set(owners_of(target, nth))
    return Moving(plan.mesh, tuple(pieces if device in owners else () for device, pieces in enumerate(plan.pieces)))


def owners_of(layout: Layout, nth: int) -> tuple[int, ...]:
    """Return for each block one of the devices that have it: another one for each array, by its number."""
    holders: list[list[int]] = [[] for _ in layout.owners]
    for device in range(layout.mesh.size):
        holders[layout.shard_of(device)].append(device)
    return tuple(of_block[(nth + shard) % len(of_block)] for shard, of_block in enumerate(holders))


def _holders(source: Layout, partial: Sequence[str]) -> list[list[list[int]]]:
    """Return, by block and by term, the devices that have it."""
    mesh = source.mesh
    places = [mesh.dim_names.index(dim) for dim in sorted(partial, key=mesh.dim_names.index)]
    terms = {place: nth for nth, place in enumerate(itertools.product(*(range(mesh.shape[at]) for at in places)))}
    found: list[list[list[int]]] = [[[] for _ in terms] for _ in source.owners]
    for device in range(mesh.size):
        coords = mesh.coords(device)
        found[source.shard_of(device)][terms[tuple(coords[at] for at in places)]].append(device)
    return found


def combine_through(target: Layout, partial: tuple[str, ...], shape: tuple[int, ...], nbytes: int) -> Layout | None:
    """Return a layout to combine terms in first, each element on one device, before they are sent to all that need it.

    It shards, over the dimensions in `partial`, axes that the target does not shard, the longest first. None if the
    target shards over them already, no axes are long enough, or it does not pay: combine in the target at once.

    It pays for arrays of more than `THROUGH_BYTES`, and more than two terms: with two each device needs as many bytes
    if it is sent the other's, and one exchange less.
    """
    if nbytes <= THROUGH_BYTES or math.prod(target.mesh[dim] for dim in partial) <= 2:
        return None
    specs = list(target.specs)
    mesh, left = target.mesh, [dim for dim in partial if dim not in target.used]
    by_length = sorted((axis for axis in range(len(shape)) if not _is_cut(target, axis)), key=lambda axis: -shape[axis])
    for axis in by_length:
        if left and shape[axis] >= mesh[left[0]]:
            specs[axis] = left.pop(0)
    through = Layout(specs, mesh)
    return None if through == target else through


def _is_cut(layout: Layout, axis: int) -> bool:
    return layout.specs[axis] in layout.used
