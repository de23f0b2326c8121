"""Draw random numbers for any block of an array, bit for bit the same however the array is cut.

The elements of the whole, in C order, are divided into tiles of `TILE`. Each tile is drawn in full, by NumPy's
`Generator` on a Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") whose key is the seed and
whose counter is the tile's index (times 2**64, far more than a tile can use up). Distributions that reject some draws
can do so without affecting other tiles. The values are those of NumPy's distributions, unchanged since NumPy 1.26;
tests would notice a change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Draw = Callable[["np.random.Generator", Array], None]
"""Fills a tile. The generator's type is in quotes, since `np.random` is slow to import."""
Scale = tuple[float, float, float]
"""(factor, shift, highest value)"""

TILE = 2048  # elements; changing it changes the values
_PIECE = 1 << 16  # elements made at a time, which fit in the processor's cache


def fill_block(seed: int, draw: Draw, shape: Shape, offset: Shape, out: Array, scale: Scale | None = None) -> None:
    """Fill `out` with the block of the whole array of `shape` that starts at `offset` and has the shape of `out`.

    With a scale, an element is the number drawn times the factor, plus the shift, and at most the highest value. Floats
    of 16 bits are drawn as float32, then scaled, then rounded. The block is made in small pieces: additional memory
    does not grow with its size.
    """
    bits = np.random.Philox(key=seed)
    generator, state = np.random.Generator(bits), bits.state
    half = out.dtype.kind not in "iu" and out.dtype.itemsize == 2  # bfloat16 has a kind of its own
    drawn = np.empty(_PIECE + 3 * TILE, np.float32 if half else out.dtype.newbyteorder("="))

    def fill(start: int, shape: Shape, offset: Shape, out: Array) -> None:
        """Fill a block of the part of the whole that has this shape and starts with this element."""
        inner, stride = shape[1:], math.prod(shape[1:])
        start += offset[0] * stride
        if stride > TILE:
            for row in range(len(out)):
                fill(start + row * stride, inner, offset[1:], out[row])
            return
        # Rows are made in full, though the block may not need all of each.
        needed = map(slice, offset[1:], map(operator.add, offset[1:], out.shape[1:]))
        rows, index = max(1, _PIECE // stride), (slice(None), *needed)
        for row in range(0, len(out), rows):
            piece = out[row : row + rows]
            first, skipped = divmod(start + row * stride, TILE)
            stop = skipped + len(piece) * stride
            for tile, begin in enumerate(range(0, stop, TILE), first):
                state["state"]["counter"][1] = tile
                bits.state = state
                draw(generator, drawn[begin : begin + TILE])
            values = drawn[skipped:stop].reshape(-1, *inner)[index]
            if scale is None:
                piece[...] = values
            else:
                factor, shift, highest = scale
                values *= factor
                values += shift
                np.minimum(values, highest, out=piece, casting="same_kind")

    fill(0, shape or (1,), offset or (0,), np.atleast_1d(out))


def uniform(generator: np.random.Generator, tile: Array) -> None:
    """Draw uniform numbers in [0, 1): multiples of 2**-53 in float64, of 2**-24 in float32."""
    generator.random(out=tile, dtype=tile.dtype.type)


def integers(low: int, below: int) -> Draw:
    """Return what draws uniform integers in [low, below)."""

    def draw(generator: np.random.Generator, tile: Array) -> None:
        tile[:] = generator.integers(low, below, tile.size, tile.dtype.type)

    return draw


def normal(generator: np.random.Generator, tile: Array) -> None:
    """Draw numbers of the standard normal distribution."""
    generator.standard_normal(out=tile, dtype=tile.dtype.type)


def truncated_normal(generator: np.random.Generator, tile: Array) -> None:
    """Draw such numbers until all lie within 2 of 0."""
    normal(generator, tile)
    beyond = np.flatnonzero(np.abs(tile) > 2)
    while beyond.size:
        tile[beyond] = again = generator.standard_normal(beyond.size, tile.dtype.type)
        beyond = beyond[np.abs(again) > 2]
