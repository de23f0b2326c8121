"""What a function of global arrays would do, without doing it; and layouts as pictures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pscluster.core import checks
from pscluster.core.errors import LayoutError
from pscluster.core.layouts.layout import Layout
from pscluster.spmd.placing import check_is_layout
from pscluster.spmd.tracing.function import Function, arguments_of, traced_call
from pscluster.spmd.tracing.trace import Step, check_is_function
from pscluster.worker.programs.program import ArrayType


@dataclass(frozen=True)
class Explanation:
    """The steps of a function. As text it is a table."""

    steps: tuple[Step, ...]
    devices: int

    @property
    def moved_bytes(self) -> int:
        """The bytes that go from one device to another."""
        return sum(step.moved_bytes for step in self.steps)

    def work(self, name: str) -> int:
        """Return the elements, or multiplications, of all steps of this name, on all devices together."""
        return self.devices * sum(step.work for step in self.steps if step.name == name)

    def __str__(self) -> str:
        head = ("operation", "operands", "result", "work", "on all", "bytes moved")
        rows = [head]
        for step in self.steps:
            work = (f"{step.work:,}", f"{step.work * self.devices:,}") if step.work else ("", "")
            moved = f"{step.moved_bytes:,}" if step.moved_bytes else ""
            rows.append((step.name, _described(step.inputs), _described(step.outputs), *work, moved))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self.steps)} operations, {self.moved_bytes:,} bytes moved"])


def _described(arrays: Sequence[ArrayType]) -> str:
    return ", ".join(f"{of} {_specs(of.layout)}{_terms(of.partial)}" for of in arrays)


def _specs(layout: Layout) -> str:
    return "(" + ", ".join(spec if spec in layout.mesh else "-" for spec in layout.specs) + ")"


def _terms(partial: Sequence[str]) -> str:
    return f" in terms over {', '.join(partial)}" if partial else ""


def explain(fn: Callable[..., Any] | Function[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Return what a function would do with these arguments, operation by operation. Nothing runs.

    Work is the number of elements that an operation goes through on the busiest device; of products, multiplications.
    """
    check_is_function("explain", fn)
    tensors, _, arguments = arguments_of(args, kwargs)
    plain = fn.plain if isinstance(fn, Function) else fn
    traced = traced_call(plain, tensors, arguments)
    return Explanation(traced.steps, traced.program.mesh.size)


def visualize(layout: Layout, shape: Sequence[int]) -> str:
    """Return a picture of which devices have which block of an array with at most two axes.

    Each cell is a block: the indices of its rows and columns are at the sides, its devices inside.
    """
    check_is_layout(layout)
    layout.check_shape(checks.per_axis("shape", shape))
    if layout.rank > 2:
        raise LayoutError(f"an array with {layout.rank} axes is not drawn: at most 2; see layout.slices(shape, device)")
    partition = layout.partition(shape)
    rows, columns = (*(1,) * (2 - layout.rank), *partition.grid)
    holders: list[list[str]] = [[] for _ in partition.blocks]
    for device in range(layout.mesh.size):
        holders[layout.shard_of(device)].append(str(device))
    cells = [",".join(devices) for devices in holders]
    tops = [_range(partition.blocks[column].slices[-1:]) for column in range(columns)]
    sides = [_range(partition.blocks[row * columns].slices[:-1]) for row in range(rows)]
    width = max(map(len, (*cells, *tops)))
    margin = max(map(len, sides))
    line = " " * margin + "+" + ("-" * (width + 2) + "+") * columns
    picture = [" " * (margin + 1) + " ".join(top.center(width + 2) for top in tops).rstrip()] if layout.rank else []
    picture.append(line)
    for row, side in enumerate(sides):
        own = itertools.islice(cells, row * columns, (row + 1) * columns)
        picture += [side.rjust(margin) + "|" + "|".join(f" {cell.center(width)} " for cell in own) + "|", line]
    return "\n".join(picture)


def _range(axis: Sequence[slice]) -> str:
    return f"{axis[0].start}:{axis[0].stop}" if axis else ""
