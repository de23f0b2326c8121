"""A model's own `train_step`, as it would be called by Keras' `fit`, but for the gradients that it applies.

These are taken from the model's optimizer, whose `apply` and `stateless_apply` change nothing in a copy, and are pushed
to the servers. What such a step changes in weights by other means, such as a second optimizer, would be lost; so it is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pscluster.core.errors import MisuseError


def has_own(model: Any, method: str) -> bool:
    """Return whether a model overrides a method of `keras.Model`, such as `train_step`."""
    import keras

    return getattr(type(model), method) is not getattr(keras.Model, method)


def data_of(x: Any, y: Any, weights: Any) -> Any:
    """Return what `train_step` takes as its data: tensors."""
    import keras

    packed = keras.utils.pack_x_y_sample_weight(x, y, weights)
    return keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_tensor(leaf), packed)


class AppliedGradients:
    """What a step applies with the optimizer of its model."""

    def __init__(self, model: Any, trainable: Sequence[Any]) -> None:
        self._name = type(model).__name__
        self._at = {id(variable): index for index, variable in enumerate(trainable)}
        self._gradients: dict[int, Any] = {}
        optimizer = model.optimizer
        kind = type(optimizer)

        def apply(_: Any, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
            if trainable_variables is None:
                self._add(range(len(self._at)), grads)
                return
            places = [self._at.get(id(variable), -1) for variable in trainable_variables]
            if -1 in places:
                raise MisuseError(
                    f"{self._name}.train_step applies gradients to a variable that is not a trainable weight"
                )
            self._add(places, grads)

        def stateless_apply(_: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> tuple[Any, Any]:
            self._add(range(len(self._at)), grads)
            return trainable_variables, optimizer_variables

        of_class = {"apply": apply, "stateless_apply": stateless_apply, "__module__": kind.__module__}
        optimizer.__class__ = type(kind.__name__, (kind,), of_class)

    def begin(self) -> None:
        """Begin a step."""
        self._gradients.clear()

    def end(self) -> list[Any]:
        """Return the gradient of each weight; None: there is none. MisuseError if none was applied."""
        if not self._gradients:
            raise MisuseError(
                f"{self._name}.train_step has applied no gradients with self.optimizer: call self.optimizer.apply, or "
                "on JAX stateless_apply"
            )
        return [self._gradients.get(index) for index in range(len(self._at))]

    def check_unchanged(self, changed: Iterable[Any]) -> None:
        """Raise MisuseError if the step has changed these weights by itself."""
        if names := [variable.path for variable in changed]:
            raise MisuseError(
                f"{self._name}.train_step changes {', '.join(names[:3])} without self.optimizer, which the "
                "servers would not see: apply gradients with it, once a step, or schedule a step of your own "
                "(docs/jax.md)"
            )

    def _add(self, places: Sequence[int], gradients: Iterable[Any]) -> None:
        gradients = list(gradients)
        if len(gradients) != len(places):
            raise MisuseError(
                f"{self._name}.train_step applies {len(gradients)} gradients to {len(places)} weights: give one each"
            )
        if again := self._gradients.keys() & set(places):
            raise MisuseError(
                f"{self._name}.train_step applies gradients to a weight (number {min(again)}) more than once: add them "
                "up, the servers take one step"
            )
        self._gradients.update(zip(places, gradients, strict=True))
