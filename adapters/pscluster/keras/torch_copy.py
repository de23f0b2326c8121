"""Steps of a Keras model on the torch backend."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from pscluster.keras.copies import Array, Copy, StepOutcome, to_numpy

logger = logging.getLogger(__name__)


class TorchCopy(Copy):
    """A model that computes with autograd, in the memory in which its values were received."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._warned = False

    def load(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self.weights, values, strict=True):
            tensor = _tensor(value)
            parameter = variable.value
            # Without a copy where it can be.
            parameter.data = tensor if parameter.device.type == "cpu" else tensor.to(parameter.device)

    def _train(self, values: Sequence[Array], x: Any, y: Any, weights: Any, size: int) -> StepOutcome:
        del size
        model = self.model
        before = [np.array(value) for value in values[len(self.trainable) :]]
        self.load(values)
        versions = [variable.value._version for variable in self.non_trainable]
        model.reset_metrics()
        model.zero_grad()
        y_pred = self._call(x, training=True)
        loss = model.compute_loss(x, y, y_pred, weights)
        scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
        scaled.backward()
        gradients = [variable.value.grad for variable in self.trainable]
        self._warn_of_missing(gradients)
        logs = {name: to_numpy(value) for name, value in model.compute_metrics(x, y, y_pred, weights).items()}
        changes = [
            (index, _array(variable.value) - before[index])
            for index, (variable, version) in enumerate(zip(self.non_trainable, versions, strict=True))
            if variable.value._version != version
        ]
        arrays = [None if gradient is None else _array(gradient) for gradient in gradients]
        return StepOutcome(float(loss.detach()), logs, arrays, changes)

    def _evaluate(
        self, values: Sequence[Array], metrics: Sequence[Array], x: Any, y: Any, weights: Any
    ) -> tuple[float, list[Any]]:
        import torch

        model = self.model
        self.load(values)
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)
        with torch.no_grad():
            y_pred = self._call(x, training=False)
            loss = model.compute_loss(x, y, y_pred, weights)
            model.compute_metrics(x, y, y_pred, weights)
        return float(loss), [np.array(to_numpy(variable)) for variable in model.metrics_variables]

    def _call(self, x: Any, *, training: bool) -> Any:
        return self.model(x, training=training) if self._takes_training else self.model(x)

    def _warn_of_missing(self, gradients: Sequence[Any]) -> None:
        """Log once, as Keras does, which weights the loss does not depend on."""
        missing = [v.path for v, gradient in zip(self.trainable, gradients, strict=True) if gradient is None]
        if missing and not self._warned:
            logger.warning("the loss does not depend on %s, which keep their values", ", ".join(missing))
            self._warned = True


def _tensor(value: Any) -> Any:
    import torch

    if value.dtype.name == "bfloat16":  # which NumPy does not know
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(value)


def _array(tensor: Any) -> Any:
    """Return a tensor's values, in its own memory where NumPy can have it."""
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
