"""The output modes of layers: indices, or an axis with an entry for each index, as Keras has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

MODES = ("int", "one_hot", "multi_hot", "count")

MASKED = np.iinfo(np.int64).max
"""The index of what is left out, in all modes but "int"."""


def checked_mode(label: str, mode: object, modes: tuple[str, ...] = MODES) -> str:
    """Return an output mode. ValueError if there is no such mode."""
    if not isinstance(mode, str) or mode not in modes:
        raise ValueError(f"{label}: output_mode is {mode!r}; it must be one of {', '.join(map(repr, modes))}")
    return mode


def encoded(indices: npt.NDArray[Any], mode: str, depth: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return indices in an output mode. Those outside [0, depth) have no entry.

    - "one_hot": each index has an axis of its own, of length `depth`. It takes the place of a last axis of length 1.
    - "multi_hot" and "count": the last axis, that of an example, becomes one of length `depth`, with a 1, or how often
      the index is there.

    Memory is what the result takes, and as much again.
    """
    if mode == "int":
        return indices.astype(dtype, copy=False)
    if indices.ndim == 0:
        indices = indices.reshape(1)
    if mode == "one_hot" and not (indices.ndim > 1 and indices.shape[-1] == 1):
        indices = indices[..., np.newaxis]
    shape = indices.shape[:-1]
    rows = indices.reshape(-1, indices.shape[-1])
    result = np.zeros((rows.shape[0], depth), dtype)
    known = (rows >= 0) & (rows < depth)
    places = np.nonzero(known)[0], rows[known].astype(np.intp)
    if mode == "count":
        np.add.at(result, places, 1)
    else:
        result[places] = 1
    return result.reshape(*shape, depth)
