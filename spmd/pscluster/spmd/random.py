"""Random global arrays. Their values depend on seed, shape and type alone: not on layout, mesh or number of tasks.

They are counter based: each element's number follows from its position in the whole (see `pscluster.ps.initializers`,
whose streams these are). So the same seed gives the same values again, and two arrays need two seeds: give one for
each, or set one for the program, of which each array gets its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.context import current_function
from pscluster.core.errors import MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.ps.initializers import RandomNormal, RandomUniform, TruncatedNormal
from pscluster.spmd.creation import Shape, make
from pscluster.spmd.tensor import DTensor
from pscluster.worker.collectives.replica import replica_context

Seed = int | Sequence[int]
"""A whole number, or several, such as TensorFlow's stateless functions take."""

_lock = threading.Lock()
_of_process: dict[str, np.random.SeedSequence] = {}
_KEY = "seeds of random global arrays"


def set_seed(seed: int) -> None:
    """Set the seed from which arrays get theirs if they are made without one, in the order in which they are made.

    In a function on workers it holds for this execution; several clients set the same one. Raise ValueError if it is no
    whole number from 0 on.
    """
    number = checks.whole("seed", seed, at_least=0)
    with _lock:
        _seeds()[_KEY] = np.random.SeedSequence(number)


def _seeds() -> dict[Any, Any]:
    """Return where the seed is kept: with the function that runs here, or for all of this process."""
    return _of_process if current_function() is None else replica_context().attached


def _next_seed(seed: Seed | None) -> int | None:
    """Return a seed, or the next one of the program's; None if none is set: any will do.

    Raise MisuseError if clients would draw different ones.
    """
    if isinstance(seed, tuple | list) and seed:
        words = [checks.whole("seed", word, at_least=0) for word in seed]
        return _drawn(np.random.SeedSequence(words))
    if seed is not None:
        return cast("int", seed)  # the initializer checks it
    with _lock:
        seeds = _seeds()
        if _KEY in seeds:
            (child,) = seeds[_KEY].spawn(1)
            return _drawn(child)
    if seeds is not _of_process and replica_context().num_replicas > 1:
        raise MisuseError(
            "random arrays of several clients need a seed, for all of them to make the same: give seed=, or call "
            "spmd.random.set_seed() in the function"
        )
    return None


def _drawn(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def normal(
    shape: Shape,
    seed: Seed | None = None,
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return normally distributed numbers."""
    return _random("normal", RandomNormal(mean, stddev, _next_seed(seed)), shape, dtype, layout)


def truncated_normal(
    shape: Shape,
    seed: Seed | None = None,
    *,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return normally distributed numbers, none further than two standard deviations from the mean."""
    return _random("truncated_normal", TruncatedNormal(mean, stddev, _next_seed(seed)), shape, dtype, layout)


def uniform(
    shape: Shape,
    seed: Seed | None = None,
    *,
    minval: float = 0,
    maxval: float = 1,
    dtype: npt.DTypeLike = "float32",
    layout: Layout,
) -> DTensor:
    """Return numbers that are evenly distributed in [minval, maxval); integers, if `dtype` is an integer type."""
    return _random("uniform", RandomUniform(minval, maxval, _next_seed(seed)), shape, dtype, layout)


def _random(
    maker: str, initializer: RandomNormal | RandomUniform, shape: Shape, dtype: npt.DTypeLike, layout: Layout
) -> DTensor:
    initializer.check(checks.per_axis("shape", shape), dtype)  # its errors are better here than on a device
    return make(shape, dtype, layout, maker, *dataclasses.astuple(initializer))
