"""Random global arrays. Their values depend on seed, shape and type alone: not on layout, mesh or number of tasks.

They are counter based: each element's number follows from its position in the whole (see `pscluster.ps.initializers`,
whose streams these are). So the same seed gives the same values again, and two arrays need two seeds.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.layouts.layout import Layout
from pscluster.ps.initializers import Initializer, RandomNormal, RandomUniform, TruncatedNormal
from pscluster.spmd.creation import Shape, make
from pscluster.spmd.tensor import DTensor


def normal(
    shape: Shape,
    seed: int,
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return normally distributed numbers."""
    return _random("normal", RandomNormal(mean, stddev, seed), (mean, stddev, seed), shape, dtype, layout)


def truncated_normal(
    shape: Shape,
    seed: int,
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return normally distributed numbers, none further than two standard deviations from the mean."""
    return _random("truncated_normal", TruncatedNormal(mean, stddev, seed), (mean, stddev, seed), shape, dtype, layout)


def uniform(
    shape: Shape,
    seed: int,
    *,
    minval: float = 0,
    maxval: float = 1,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return numbers that are evenly distributed in [minval, maxval); integers, if `dtype` is an integer type."""
    return _random("uniform", RandomUniform(minval, maxval, seed), (minval, maxval, seed), shape, dtype, layout)


def _random(
    maker: str, initializer: Initializer, numbers: tuple[Any, ...], shape: Shape, dtype: npt.DTypeLike, layout: Layout
) -> DTensor:
    initializer.check(checks.per_axis("shape", shape), dtype)  # its errors are better here than on a device
    return make(shape, dtype, layout, maker, *numbers)
