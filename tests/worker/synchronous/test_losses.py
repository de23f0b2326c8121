"""Losses of replicas: their sum over all replicas is the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pscluster.coordinator import ReplicaContext, compute_average_loss, scale_regularization_loss
from pscluster.core.context import FunctionContext, running

LOSSES = np.array([1.0, 2.0, 3.0, 6.0], np.float32)


@contextmanager
def one_of(replicas: int) -> Iterator[None]:
    """A step function that is run by this many replicas together."""
    context = FunctionContext(function=1, attempt=1, worker_index=0, num_workers=replicas)
    context.replica = ReplicaContext(size=replicas)
    with running(context):
        yield


class Tensor:
    """Numbers with arithmetic of their own, such as a torch tensor, which NumPy must not touch."""

    __array_ufunc__ = None

    def __init__(self, array: Any) -> None:
        self._array = np.asarray(array)
        self.shape = self._array.shape

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("its gradient would be lost")

    def sum(self) -> Tensor:
        return Tensor(self._array.sum())

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self._array.reshape(shape))

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self._array + getattr(other, "_array", other))

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        assert isinstance(other, Tensor | float), "a torch tensor takes numbers and tensors"
        return Tensor(self._array * getattr(other, "_array", other))

    def __truediv__(self, other: int) -> Tensor:
        return Tensor(self._array / other)

    def item(self) -> Any:
        return self._array.item()


def test_the_mean_loss_is_that_of_the_global_batch() -> None:
    with one_of(4):
        average = compute_average_loss(LOSSES)
        assert (average, average.dtype) == (0.75, np.float32)
        assert compute_average_loss([1, 2]) == 3 / 8
        assert compute_average_loss(np.ones((2, 3))) == 6 / 8
        assert compute_average_loss(LOSSES, global_batch_size=6) == 2
        assert compute_average_loss(np.empty(0)) == 0, "a replica without examples has no part in it"
    assert compute_average_loss(6.0, global_batch_size=3) == 2


def test_weights_multiply_the_losses_of_examples() -> None:
    weighted = compute_average_loss(LOSSES, [1, 0, 0, 0.5], 4)
    assert (weighted, weighted.dtype) == (1, np.float32)
    assert compute_average_loss(LOSSES, 2, 4) == 6
    assert compute_average_loss(np.ones((2, 3)), np.array([1.0, 3.0]), 2) == 6
    with pytest.raises(ValueError, match=r"sample_weight has the shape \(4, 1\), but the losses have \(4,\)"):
        compute_average_loss(LOSSES, np.ones((4, 1)), 4)


def test_the_scaled_regularization_losses_of_all_replicas_are_the_loss() -> None:
    with one_of(4):
        assert scale_regularization_loss(2) == 0.5
        assert scale_regularization_loss([np.float32(2), np.array([1.0, 1.0])]) == 1
        assert scale_regularization_loss([]) == 0


def test_tensors_stay_tensors() -> None:
    losses = Tensor([1.0, 2.0])
    with one_of(2):
        for value, expected in (
            (compute_average_loss(losses), 0.75),
            (compute_average_loss(losses, 2.0), 1.5),
            (compute_average_loss(losses, np.float64(2)), 1.5),
            (compute_average_loss(losses, Tensor([1.0, 0.0])), 0.25),
            (compute_average_loss(Tensor([[1.0], [2.0]]), Tensor([1.0, 0.0])), 0.25),
            (scale_regularization_loss(losses), 1.5),
            (scale_regularization_loss([losses, losses]), 3),
        ):
            assert isinstance(value, Tensor)
            assert value.item() == expected


def test_wrong_arguments() -> None:
    with one_of(2):
        with pytest.raises(ValueError, match="takes the losses of examples, in an array, not a float: or give global"):
            compute_average_loss(3.0)
        with pytest.raises(ValueError, match="global_batch_size is -1; it must be a whole number, 0 or more"):
            compute_average_loss(LOSSES, global_batch_size=-1)
        with pytest.raises(TypeError, match="a loss or weight is a number, an array or a tensor, not a dict"):
            compute_average_loss({})
        with pytest.raises(TypeError, match="not a str"):
            scale_regularization_loss(["a"])
    with pytest.raises(RuntimeError, match="compute_average_loss without global_batch_size works only in a step"):
        compute_average_loss(LOSSES)
    with pytest.raises(RuntimeError, match="scale_regularization_loss works only in a step function"):
        scale_regularization_loss(1.0)
