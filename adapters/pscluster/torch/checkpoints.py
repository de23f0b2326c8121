"""Checkpoints of a served module in ordinary modules."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from pscluster.core.errors import CheckpointMismatchError
from pscluster.ps.handles.indexing import Array
from pscluster.torch.structure import Structure
from pscluster.torch.tensors import tensor_of


def load_checkpoint(module: nn.Module, saved: Mapping[str, Array], name: str | None = None) -> None:
    """Load the parameters and buffers of a served module from a checkpoint into an ordinary one, without a cluster.

    Args:
        module: like the one that was served.
        saved: `SavedVariables(path)`; or any arrays by the names of variables.
        name: with which it was served, if with one.

    Raises:
        CheckpointMismatchError: a variable is missing, or has another shape. Nothing was loaded.
    """
    structure = Structure.of(module)
    prefix = "" if name is None else f"{name}/"
    own = structure.parameters | structure.buffers
    values: dict[str, Array] = {}
    for key, tensor in own.items():
        if prefix + key not in saved:
            raise CheckpointMismatchError(
                f"the checkpoint has no variable {prefix + key!r}: give the name under which it was served"
            )
        value = saved[prefix + key]
        if value.shape != tuple(tensor.shape):
            raise CheckpointMismatchError(
                f"{prefix + key!r} has shape {value.shape} in the checkpoint, and {tuple(tensor.shape)} in the module"
            )
        values[key] = value
    with torch.no_grad():
        for key, tensor in own.items():
            tensor.copy_(tensor_of(values[key]))
