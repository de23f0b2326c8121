"""Steps of a Keras model on the JAX backend: jitted functions of all values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pscluster.keras.copies import Array, Copy, StepOutcome


class JaxCopy(Copy):
    """A model whose steps are pure functions, as `Model.compute_loss_and_updates` is."""

    def __init__(self, model: Any) -> None:
        import jax

        super().__init__(model)
        by_id = {id(variable): index for index, variable in enumerate(self.non_trainable)}
        # Where each of the model's own order is: among those that were read, or among the local ones.
        self._others = [(by_id.get(id(v)), v) for v in model.non_trainable_variables]
        self._states = [variable.value for variable in self.local]
        self._changed: list[int] = []  # of those that were read; known once the step has been traced
        jit = jax.jit if model.jit_compile and not model.run_eagerly else lambda function: function
        self._train_step, self._test_step = jit(self._trained), jit(self._tested)

    def _train(self, values: Sequence[Array], x: Any, y: Any, weights: Any, size: int) -> StepOutcome:
        del size
        split = len(self.trainable)
        loss, logs, gradients, changes, self._states = self._train_step(
            values[:split], values[split:], self._states, self.initial_metrics, x, y, weights
        )
        return StepOutcome(
            float(loss),
            {name: np.asarray(value) for name, value in logs.items()},
            [np.asarray(gradient) for gradient in gradients],
            [(index, np.asarray(change)) for index, change in zip(self._changed, changes, strict=True)],
        )

    def _evaluate(
        self, values: Sequence[Array], metrics: Sequence[Array], x: Any, y: Any, weights: Any
    ) -> tuple[float, list[Any]]:
        split = len(self.trainable)
        loss, after = self._test_step(values[:split], values[split:], self._states, metrics, x, y, weights)
        return float(loss), [np.asarray(value) for value in after]

    def _trained(
        self, trainable: Any, non_trainable: Any, states: Any, metrics: Any, x: Any, y: Any, weights: Any
    ) -> Any:
        import jax

        before = self._in_order(non_trainable, states)
        of_step = jax.value_and_grad(self.model.compute_loss_and_updates, has_aux=True)
        (_, aux), gradients = of_step(
            list(trainable), before, list(metrics), x, y, weights, training=True, optimizer_variables=self._optimizer()
        )
        loss, y_pred, after, metrics = aux
        logs, _ = self._metrics_after(metrics, x, y, y_pred, weights)
        self._changed, changes, states = [], [], []
        for (index, _), old, new in zip(self._others, before, after, strict=True):
            if index is None:
                states.append(new)
            elif new is not old:
                self._changed.append(index)
                changes.append(new - old)
        return loss, logs, gradients, changes, states

    def _tested(
        self, trainable: Any, non_trainable: Any, states: Any, metrics: Any, x: Any, y: Any, weights: Any
    ) -> Any:
        _, (loss, y_pred, _, metrics) = self.model.compute_loss_and_updates(
            list(trainable), self._in_order(non_trainable, states), list(metrics), x, y, weights, training=False
        )
        return loss, self._metrics_after(metrics, x, y, y_pred, weights)[1]

    def _in_order(self, non_trainable: Any, states: Any) -> list[Any]:
        import jax.numpy as jnp

        local = iter(states)
        return [next(local) if index is None else jnp.asarray(non_trainable[index]) for index, _ in self._others]

    def _optimizer(self) -> list[Any]:
        """Return the values that a scaled loss depends on; the model's own optimizer is never used."""
        optimizer = self.model.optimizer
        return [] if optimizer is None else [variable.value for variable in optimizer.variables]

    def _metrics_after(self, metrics: Any, x: Any, y: Any, y_pred: Any, weights: Any) -> tuple[Any, list[Any]]:
        import keras

        variables = self.model.metrics_variables
        with keras.StatelessScope(state_mapping=list(zip(variables, metrics, strict=True))) as scope:
            logs = self.model.compute_metrics(x, y, y_pred, weights)
        return logs, [scope.get_current_value(variable) for variable in variables]
