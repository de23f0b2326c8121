"""In which type parameters are computed, and which types gradients may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError

DType = np.dtype[Any]


def compute_dtype(dtype: npt.DTypeLike) -> DType:
    """Return the type in which a parameter of `dtype` is updated: float32 for the half types, else its own."""
    given = np.dtype(dtype)
    if given in (np.float32, np.float64):
        return given
    if given == np.float16 or given.name == "bfloat16":
        return np.dtype(np.float32)
    raise InvalidUpdateError(
        f"a variable of dtype {given} can't be optimized: make it float16, bfloat16, float32 or float64"
    )


def is_real(dtype: DType) -> bool:
    """Return whether it is a real floating-point type."""
    return dtype.kind == "f" or dtype.name == "bfloat16"
