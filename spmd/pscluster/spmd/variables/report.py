"""What the rules of a LayoutMap do with weights, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pscluster.core.errors import LayoutError
from pscluster.core.layouts.layout import Layout


@dataclass(frozen=True, slots=True)
class Placed:
    """One weight, and the layout that it gets."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rule: str  # "": none matches, so it is replicated
    layout: Layout

    @property
    def num_blocks(self) -> int:
        """Into how many blocks it is cut."""
        return math.prod(self.layout.num_shards(axis) for axis in range(self.layout.rank))

    @property
    def block_bytes(self) -> int:
        """The bytes of the largest block: what a device has of it."""
        return max(block.size for block in self.layout.partition(self.shape).blocks) * self.dtype.itemsize


@dataclass(frozen=True)
class Report:
    """What becomes of all weights. As text it is a table, and lines for what does not fit."""

    placed: tuple[Placed, ...]
    unused: tuple[str, ...]  # rules that match no weight
    mismatched: tuple[str, ...]  # why weights can't have the layout of their rule, a sentence each

    @property
    def unmatched(self) -> tuple[str, ...]:
        """The paths of weights that no rule matches: they are replicated."""
        return tuple(placed.path for placed in self.placed if not placed.rule)

    @property
    def problems(self) -> list[str]:
        """What `require_all` refuses, a sentence each."""
        problems = list(self.mismatched)
        if self.unused:
            problems.append(f"no weight is matched by {', '.join(map(repr, self.unused))}")
        if self.unmatched:
            problems.append(f"no rule matches {', '.join(map(repr, self.unmatched))}")
        return problems

    def check(self) -> None:
        """Raise LayoutError if there is a problem."""
        if problems := self.problems:
            paths = ", ".join(repr(placed.path) for placed in self.placed)
            raise LayoutError(f"rules and weights do not fit: {'; '.join(problems)}. The weights are {paths}")

    def __str__(self) -> str:
        rows = [("path", "shape", "rule", "layout", "blocks", "bytes of one")]
        for placed in self.placed:
            specs = ", ".join(spec if spec in placed.layout.mesh else "-" for spec in placed.layout.specs)
            shape = f"{placed.dtype}[{', '.join(map(str, placed.shape))}]"
            counts = str(placed.num_blocks), f"{placed.block_bytes:,}"
            rows.append((placed.path, shape, placed.rule or "(none)", f"({specs})", *counts))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *self.problems[: len(self.mismatched) + bool(self.unused)]])
