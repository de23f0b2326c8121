"""What programs may create in place: blocks of arrays whose elements follow from their position in the whole.

So the values do not depend on how the array is cut, or how many devices there are. Random numbers are those of the
initializers of variables: counter based, a stream for each tile of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.geometry.partition import Block
from pscluster.ps.initializers import Initializer, RandomNormal, RandomUniform, TruncatedNormal

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Maker:
    """Fills a block of an array of some shape; takes so many numbers."""

    numbers: int
    fill: Callable[..., None]  # (whole shape, block, out, *numbers)


def _full(shape: Shape, block: Block, out: Array, real: float, imaginary: float) -> None:
    del shape, block
    out[...] = complex(real, imaginary) if imaginary else real


def _arange(shape: Shape, block: Block, out: Array, start: float, step: float) -> None:
    """As NumPy does: from the first two elements, in the type of the result."""
    del shape
    first = out.dtype.type(start)
    second = out.dtype.type(start + step)
    with np.errstate(over="ignore"):
        out[...] = np.arange(block.start[0], block.stop[0]).astype(out.dtype)
        out *= second - first
        out += first
    if block.start[0] <= 1 < block.stop[0]:
        out[1 - block.start[0]] = second


def _eye(shape: Shape, block: Block, out: Array, diagonal: int) -> None:
    del shape
    rows, columns = out.shape
    out[...] = np.eye(rows, columns, k=int(diagonal) + block.start[0] - block.start[1], dtype=out.dtype)


def _random(kind: Callable[..., Initializer]) -> Callable[..., None]:
    def fill(shape: Shape, block: Block, out: Array, *numbers: float) -> None:
        kind(*numbers).generate(shape, block.start, out)

    return fill


MAKERS: Mapping[str, Maker] = MappingProxyType(
    {
        "full": Maker(2, _full),
        "arange": Maker(2, _arange),
        "eye": Maker(1, _eye),
        "normal": Maker(3, _random(RandomNormal)),
        "truncated_normal": Maker(3, _random(TruncatedNormal)),
        "uniform": Maker(3, _random(RandomUniform)),
    }
)
"""By name."""
