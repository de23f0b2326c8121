"""Tensors to arrays and back, in the same memory where both can use it."""

from __future__ import annotations

from typing import Any

import torch

from pscluster.core.dtypes import dtype_named
from pscluster.ps.handles.indexing import Array


def array_of(tensor: torch.Tensor) -> Array:
    """Return the values of a tensor; of one on the CPU without a copy."""
    array: Array
    tensor = tensor.detach()
    try:
        array = tensor.numpy()
        return array
    except (TypeError, RuntimeError):  # bfloat16, sparse, or elsewhere
        pass
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(dtype_named("bfloat16"))
    array = tensor.numpy()
    return array


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor of an array's memory, on the CPU; of a copy if the array is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def name_of(dtype: Any) -> str:
    """Return NumPy's name of a tensor's element type."""
    return str(dtype).removeprefix("torch.")
