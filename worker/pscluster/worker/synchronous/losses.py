"""Losses of replicas that train together, scaled such that their sum over the replicas is that of the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.core import checks
from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.worker.collectives.replica import replica_context


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None) -> Any:
    """Return the sum of the losses of this replica's examples, divided by the number of examples of all replicas.

    The sum of that over all replicas is the mean loss of the whole batch; likewise with gradients.

    Args:
        per_example_loss: an array, with one loss an example along its first axis; or a number, or a torch tensor or
            another object with `sum()` and arithmetic.
        sample_weight: a number or array that multiplies the losses; axes that it lacks are added at the end.
        global_batch_size: the number of examples of all replicas. Default: as many on each replica as here, so give it
            where that differs, as in a partial batch.

    Raises:
        ValueError: the losses have no axis of examples and no `global_batch_size` is given, or it is not 0 or more, or
            the weights' shape is not that of the losses.
        TypeError: the losses or weights are not numbers.
        RuntimeError: there is no `global_batch_size`, and this is not a step function, which has a number of replicas.
    """
    losses = _as_array(per_example_loss)
    if global_batch_size is None:
        if not getattr(losses, "shape", ()):
            raise ValueError(
                f"compute_average_loss takes the losses of examples, in an array, not {type_of(per_example_loss)}: or "
                "give global_batch_size"
            )
        size = int(losses.shape[0]) * _num_replicas("compute_average_loss without global_batch_size")
    else:
        size = checks.whole("global_batch_size", global_batch_size, at_least=0)
    if sample_weight is not None:
        losses = _weighted(losses, _as_array(sample_weight))
    return _divided(_total(losses), size)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return a loss that depends on the variables alone, divided by the number of replicas.

    Each replica adds it to its own loss, so that their sum has it once.

    Args:
        regularization_loss: a number, an array, a torch tensor or the like, or a list of these, which are added up.

    Raises:
        RuntimeError: this is not a step function, which has a number of replicas.
    """
    replicas = _num_replicas("scale_regularization_loss")
    if isinstance(regularization_loss, list | tuple):
        return _divided(sum(_total(_as_array(loss)) for loss in regularization_loss), replicas)
    return _divided(_total(_as_array(regularization_loss)), replicas)


def _num_replicas(caller: str) -> int:
    if current_function() is None:
        raise RuntimeError(f"{caller} works only in a step function, which has a number of replicas: call it there")
    return replica_context().num_replicas


def _as_array(value: Any) -> Any:
    """Return an object with arithmetic as it is, such as a torch tensor, which records gradients, else an array."""
    if hasattr(value, "sum") and hasattr(value, "shape"):
        return value
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise TypeError(f"a loss or weight is a number, an array or a tensor, not {type_of(value)}")
    return array


def _weighted(losses: Any, weights: Any) -> Any:
    missing = len(losses.shape) - len(weights.shape)
    if not weights.shape:
        # A torch tensor takes a number, not NumPy's array of one.
        return losses * (weights.item() if isinstance(weights, np.ndarray | np.generic) else weights)
    aligned = weights.reshape((*weights.shape, *[1] * missing)) if missing > 0 else weights
    if isinstance(losses, np.ndarray) and isinstance(aligned, np.ndarray) and losses.dtype.kind in "fc":
        aligned = aligned.astype(losses.dtype)
    weighted = losses * aligned
    if tuple(weighted.shape) != tuple(losses.shape):  # such as (4, 1) and (4,), which give (4, 4)
        raise ValueError(
            f"sample_weight has the shape {tuple(weights.shape)}, but the losses have {tuple(losses.shape)}: give a "
            "weight for each example, or for each loss"
        )
    return weighted


def _total(values: Any) -> Any:
    return values.sum()


def _divided(total: Any, count: int) -> Any:
    """Divide a sum. NumPy's floats keep their type; a replica without examples has the sum 0."""
    quotient = total / (count or 1)
    if isinstance(total, np.inexact | np.ndarray) and total.dtype.kind in "fc":
        return np.asarray(quotient).astype(total.dtype)[()]
    return quotient
