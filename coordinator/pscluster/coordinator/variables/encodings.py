"""In what form the values of a variable travel, as requested of `Variable`."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core import checks
from pscluster.core.errors import MisuseError
from pscluster.core.geometry.partition import Partition
from pscluster.ps.handles.scope import VariableRequest
from pscluster.ps.wire_dtypes import CODES

_MOST_NUMBERED = 1 << 32


def check_shards(partition: Partition, push_top_k: float, name: str) -> None:
    """Raise MisuseError if a shard has more elements than can be numbered, of which single ones are to be pushed."""
    if push_top_k and (largest := max(block.size for block in partition.blocks)) > _MOST_NUMBERED:
        raise MisuseError(
            f"variable {name!r} has push_top_k, and a shard of {largest:,} elements; the limit is {_MOST_NUMBERED:,}: "
            "cut it into more shards, with a partitioner"
        )


def encoding_of(request: VariableRequest, name: str, dtype: np.dtype[Any]) -> tuple[int, float]:
    """Return the wire type, and the share of a dense gradient's elements that is pushed; 0: as they are, and all.

    MisuseError, with the variable's name, if they are invalid, or do not go with its type.
    """
    requested, share = request.wire_dtype, request.push_top_k
    if requested is not None and (not isinstance(requested, str) or requested not in CODES):
        known = ", ".join(map(repr, CODES))
        raise MisuseError(f"variable {name!r}: wire_dtype is {requested!r}; it must be one of {known}, or None")
    if share is not None:
        try:
            share = checks.real(f"variable {name!r}: push_top_k", share, ", or None for all", above=0, at_most=1)
        except (TypeError, ValueError) as error:
            raise MisuseError(str(error)) from None
    wire_dtype = CODES[requested or "float32"]
    if (wire_dtype or share is not None) and dtype != np.float32:
        raise MisuseError(
            f"variable {name!r} is {dtype.name}, and only float32 has a wire_dtype or push_top_k: leave them out, "
            "or give dtype=np.float32"
        )
    return wire_dtype, share if share is not None and share < 1 else 0.0
