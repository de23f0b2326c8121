"""Propagation of shardings, from relayouts back to what is relaid out: what is only needed in shards is made in them.

While a function is traced, each operation is recorded in the layout that its operands give it. What becomes of the
result is known when the trace ends. An array all of whose uses, through elementwise functions alone, end in relayouts
to the same shards is then made in these: terms of a sum are combined straight into them (a reduce-scatter in place of
an all-reduce), and each device computes its part only. So a step whose optimizer's state is sharded does with a
gradient what Xu et al. describe in "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training".

Values stay what they were, to the bit, but for the signs of NaNs: terms are combined in the same order, and an
elementwise function gives the same for a part of an array as for the whole. In NumPy those of complex numbers and
float16 may not, nor `fmax`, `fmin`, `power` with exponents that are an array, and casts of floats to integers: these
stay as recorded. Everything else ends the search: products, reductions, functions that are called, and results of the
program.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import UNSHARDED
from pscluster.core.layouts.moving import combine_through
from pscluster.core.layouts.rule import Label, elementwise
from pscluster.spmd.execution.ordering import Recorded, reads_and_writes, with_places
from pscluster.worker.programs.operations import ELEMENTWISE
from pscluster.worker.programs.program import ArrayType


def way_to(layout: Layout, of: ArrayType) -> list[ArrayType]:
    """Return the types that an array takes on its way to a layout, of which the last one has that; [] if it lies so."""
    if of.layout == layout and not of.partial:
        return []
    through = combine_through(layout, of.partial, of.shape, of.nbytes)
    return [ArrayType(of.shape, of.dtype, on_the_way) for on_the_way in (through, layout) if on_the_way is not None]


def propagate_shardings(
    code: Sequence[Recorded], types: Sequence[ArrayType], kept: Collection[int]
) -> tuple[list[Recorded], list[ArrayType]]:
    """Return a program with what is only needed in shards made in these.

    Args:
        code: its instructions.
        types: of its arrays, by place. Those that are added have the places that follow.
        kept: the places of its results, which stay there, as they are.
    """
    targets = _targets(code, types, kept)
    return _Rewriting(code, types, kept, targets).run() if targets else (list(code), list(types))


def _targets(code: Sequence[Recorded], types: Sequence[ArrayType], kept: Collection[int]) -> dict[int, Layout]:
    """Return the arrays that are made in another layout than was recorded, by place."""
    needed: defaultdict[int, set[Layout]] = defaultdict(set)  # by place: the layouts that its uses need
    targets: dict[int, Layout] = {}
    for place in kept:
        needed[place].add(types[place].layout)
    for instruction in reversed(code):
        read, written = reads_and_writes(instruction)
        needed_of_reads = [types[place].layout for place in read]
        if instruction[0] == "move" and _is_free(*(types[place] for place in (*read, *written))):
            needed_of_reads = [types[place].layout for place in written]
        wanted = set[Layout]().union(*(needed[place] for place in written))
        if len(wanted) == 1 and wanted != {types[written[0]].layout}:
            (layout,) = wanted
            if (operands := _operands_for(layout, instruction, types)) is not None:
                targets.update(dict.fromkeys(written, layout))
                needed_of_reads = operands
        for place, layout in zip(read, needed_of_reads, strict=True):
            needed[place].add(layout)
    return targets


def _operands_for(layout: Layout, instruction: Recorded, types: Sequence[ArrayType]) -> list[Layout] | None:
    """Return how the operands of an instruction have to lie for its results to lie in a layout.

    Return None if its results can't lie in another one than was recorded.
    """
    match instruction:
        case ("create", *_):
            return []
        case ("move", source, _):
            of = types[source]
            return [layout if _is_free(of, replace(of, layout=layout)) else of.layout]
        case ("compute", written, function, read, args, *_) if _is_elementwise(function, args) and read:
            operands, result = [types[place] for place in read], types[written[0]]
            if (
                _have_same_bits([of.dtype for of in operands], [types[place].dtype for place in written])
                and np.broadcast_shapes(*(of.shape for of in operands)) == result.shape
                and all(types[place].layout == result.layout for place in written)
                and _of_operands(operands, result.layout) == [of.layout for of in operands]
            ):
                return _of_operands(operands, layout)
    return None


def _is_free(of: ArrayType, to: ArrayType) -> bool:
    """Return whether each device has what it needs for a layout: some axes are sharded in addition."""
    specs = zip(of.layout.specs, to.layout.specs, strict=True)
    return not of.partial and all(own in (spec, UNSHARDED) for own, spec in specs)


def _is_elementwise(function: str, args: Sequence[Any]) -> bool:
    """Return whether an element of the results depends on the corresponding ones alone, to the bit."""
    if function in ("fmax", "fmin"):  # of zeros with different signs either one, as it comes
        return False
    if function == "power":  # an exponent of 2 squares if it is the same for all of a row, or of a column
        return not isinstance(args[1], list)
    return function in ELEMENTWISE


def _have_same_bits(operands: Sequence[np.dtype[Any]], results: Sequence[np.dtype[Any]]) -> bool:
    """Return whether elementwise functions of NumPy give the same for an element wherever it is in an array."""
    if any(dtype.kind == "f" for dtype in operands) and any(dtype.kind in "iu" for dtype in results):
        return False  # a number that is too large for its integer becomes any one
    return all(dtype.kind in "biu" or dtype.name in ("float32", "float64") for dtype in (*operands, *results))


def _of_operands(operands: Sequence[ArrayType], layout: Layout) -> list[Layout]:
    """Return how operands lie of which an elementwise function makes a result in a layout."""
    specs: dict[Label, str] = dict(zip(range(-layout.rank, 0), layout.specs, strict=True))
    labels = elementwise([of.shape for of in operands])
    return [Layout([specs.get(label, UNSHARDED) for label in axes], layout.mesh) for axes in labels]


class _Rewriting:
    """A program being written again, with the arrays that were found in their new layouts."""

    def __init__(
        self, code: Sequence[Recorded], types: Sequence[ArrayType], kept: Collection[int], targets: dict[int, Layout]
    ) -> None:
        self._code, self._targets = code, targets
        self._types = [replace(of, layout=targets[place]) if place in targets else of for place, of in enumerate(types)]
        made = {place for instruction in code for place in reads_and_writes(instruction)[1]}
        self._fixed = {*kept, *range(len(types))} - made.difference(kept)  # what comes from elsewhere, and results
        self._terms = self._combined_on_the_way()
        self._same: dict[int, int] = {}  # by place: where the same array is
        self._shards: dict[tuple[int, Layout], int] = {}  # by place of an array: where it is in another layout
        self._written: list[Recorded] = []

    def _combined_on_the_way(self) -> dict[int, int]:
        """Return what is combined only to be moved on to an array that was found, and the place of its terms."""
        moves = {written: source for name, source, written, *_ in self._code if name == "move"}
        uses = Counter(place for instruction in self._code for place in reads_and_writes(instruction)[0])
        return {
            source: moves[source]
            for written, source in moves.items()
            if written in self._targets
            and source in moves
            and self._types[moves[source]].partial
            and uses[source] == 1
            and source not in self._fixed
        }

    def run(self) -> tuple[list[Recorded], list[ArrayType]]:
        """Return the program and its types."""
        for instruction in self._code:
            match instruction:
                case ("move", int(source), int(written)):
                    if written not in self._terms:
                        self._move(self._terms.get(source, source), written)
                case ("compute", written, function, read, args, kwargs, _) if written[0] in self._targets:
                    of = self._types[written[0]]
                    layouts = _of_operands([self._types[place] for place in read], of.layout)
                    read = [self._in_layout(*pair) for pair in zip(read, layouts, strict=True)]
                    work = math.prod(of.layout.local_shape(of.shape, 0))
                    self._written.append(("compute", written, function, read, args, kwargs, work))
                case _:
                    self._written.append(instruction)
        return [with_places(instruction, self._place) for instruction in self._written], self._types

    def _place(self, place: int) -> int:
        while place in self._same:
            place = self._same[place]
        return place

    def _move(self, source: int, written: int) -> None:
        """Write a move, unless the array is in that layout already."""
        of, layout = self._types[source], self._types[written].layout
        if not of.partial and (there := self._there(source, layout)) is not None:
            if written not in self._fixed:
                self._same[written] = there
                return
            if there not in self._fixed:
                self._same[there] = written
                return
        if written in self._targets:
            for on_the_way in way_to(layout, of)[:-1]:
                source = self._moved(source, on_the_way)
        elif _is_free(of, self._types[written]):
            self._shards[source, layout] = written
        self._written.append(("move", source, written))

    def _in_layout(self, place: int, layout: Layout) -> int:
        """Return the place of an operand in a layout for which each device has what it needs."""
        if (there := self._there(place, layout)) is None:
            of = replace(self._types[place], layout=layout)
            there = self._shards[place, layout] = self._moved(place, of)
        return there

    def _there(self, place: int, layout: Layout) -> int | None:
        """Return the place of an array in a layout, or None if it is not there in that."""
        found = place if self._types[place].layout == layout else self._shards.get((place, layout))
        return None if found is None else self._place(found)

    def _moved(self, place: int, of: ArrayType) -> int:
        """Write a move to a new place, and return that."""
        self._types.append(of)
        self._written.append(("move", place, len(self._types) - 1))
        return len(self._types) - 1
