"""A process's own copy of a served model: what computes with the values that were read.

It is made once a process (or replica, where several run in one), for as long as the job lasts there, and anew after a
death. Its own values count only where no server has them: the states of random generators, and other integers. Those of
worker n begin with the seed of the model plus n, so that workers drop other units.

On the JAX backend a step is one jitted function of all values; on torch the model computes as always, in the memory in
which the values were received. Embeddings that are tables have no value in a copy: see `tables`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import MisuseError
from pscluster.keras.own_steps import AppliedGradients, has_own
from pscluster.keras.tables import Table, embeddings_of
from pscluster.ps.handles.indexing import IndexedSlices
from pscluster.ps.handles.variables.variable import Variable

Array = Any  # of NumPy, or of Keras' backend


class Weight(NamedTuple):
    """What must be the same in all copies of a model."""

    path: str
    shape: tuple[int, ...]
    trainable: bool


class StepOutcome(NamedTuple):
    """What a training step computed: NumPy arrays, in the order of the model's variables."""

    loss: float | None  # None: a step of the model's own has not returned it
    logs: dict[str, Any]
    gradients: list[Any]  # of trainable variables that are no tables; None: the loss does not depend on it
    of_tables: list[IndexedSlices | None]  # None: no row was looked up
    changes: list[tuple[int, Any]]  # of non-trainable ones that have changed: the index among them, and by how much


class Copy(ABC):
    """A model, and the steps that are taken with it.

    Args:
        model: it is this copy's alone.
        tables: which of its trainable weights are tables, by index.
    """

    def __init__(self, model: Any, tables: Sequence[int] = ()) -> None:
        self.model = model
        trainable = list(model.trainable_variables)
        others = list(model.non_trainable_variables)
        self.non_trainable = [variable for variable in others if is_served(variable)]
        self.local = [variable for variable in others if not is_served(variable)]
        weights = [(v, True) for v in trainable] + [(v, False) for v in self.non_trainable]
        self._described = tuple(Weight(v.path, tuple(v.shape), trained) for v, trained in weights)
        layers = embeddings_of(model) if tables else {}
        self.tables = [Table(layers[id(trainable[index])]) for index in tables]
        self.trainable = [variable for index, variable in enumerate(trainable) if index not in tables]
        self._has_own_step = has_own(model, "train_step")
        self._has_own_metrics = has_own(model, "compute_metrics") or has_own(model, "get_metrics_result")
        self._metrics: list[Any] = []  # whose results a training step returns; known once it is built
        self._takes_training = "training" in inspect.signature(model.call).parameters
        self._applied: AppliedGradients | None = None
        self._built = False
        self._additive = False

    @property
    def weights(self) -> list[Any]:
        """The variables whose values are read from the servers as they are, in that order."""
        return [*self.trainable, *self.non_trainable]

    def describe(self) -> tuple[Weight, ...]:
        """Return what must be the same in the copies of other processes, with the tables."""
        return self._described

    def load(self, values: Sequence[Array]) -> None:
        """Set the model's own values."""
        for variable, value in zip(self.weights, values, strict=True):
            variable.assign(value)

    def train(self, values: Sequence[Array], batch: Any, tables: Sequence[Variable] = ()) -> StepOutcome:
        """Take a training step with these values, and with rows of these tables."""
        x, y, weights, _ = self._prepared(values, batch)
        return self._train(values, tables, x, y, weights)

    def evaluate(
        self, values: Sequence[Array], batch: Any, tables: Sequence[Variable] = ()
    ) -> tuple[float, list[Any], int]:
        """Return the loss of a batch, by how much it changes each variable of the metrics, and its size."""
        x, y, weights, size = self._prepared(values, batch)
        start = self.initial_metrics
        loss, after = self._evaluate(values, tables, start, x, y, weights)
        if not self._additive:
            _, twice = self._evaluate(values, tables, after, x, y, weights)
            for variable, one, two, begin in zip(self.model.metrics_variables, after, twice, start, strict=True):
                if not np.allclose(two - one, one - begin, rtol=1e-3, atol=1e-3, equal_nan=True):
                    raise MisuseError(
                        f"the metric of {variable.path!r} can't be computed on several workers: its state is not the "
                        "sum of those of single batches; leave it out, or compute it from predictions"
                    )
            self._additive = True
        return loss, [one - begin for one, begin in zip(after, start, strict=True)], size

    def predict(self, values: Sequence[Array], batch: Any, tables: Sequence[Variable] = ()) -> Any:
        """Return the outputs for a batch, as arrays. MisuseError if the model has a `predict_step` of its own."""
        import keras

        if has_own(self.model, "predict_step"):
            raise MisuseError(
                f"{type(self.model).__name__} has a predict_step of its own, which workers don't call: override call, "
                "or predict with served.to_keras()"
            )
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self._predict(values, tables, keras.tree.map_structure(_as_keras_takes_it, x))
        return keras.tree.map_structure(to_numpy, outputs)

    def _mode(self, training: bool) -> dict[str, bool]:
        """Return what to give to a call of the model, which may not tell training from inference."""
        return {"training": training} if self._takes_training else {}

    def results(self, sums: Sequence[Array]) -> dict[str, Any]:
        """Return the metrics whose variables have been changed by these amounts in all."""
        for variable, start, amount in zip(self.model.metrics_variables, self.initial_metrics, sums, strict=True):
            variable.assign((start + amount.reshape(start.shape)).astype(start.dtype))
        return {name: to_numpy(value) for name, value in self.model.get_metrics_result().items()}

    def build(self, x: Any, y: Any, y_pred: Any, weights: Any) -> None:
        """Make the variables of the metrics, by computing them once."""
        if self._built:
            return
        # With steps of its own a model may have no loss of Keras'.
        if not self._has_own_step or self.model._compile_loss is not None:
            self.model.compute_loss(x, y, y_pred, weights)
        if not self._has_own_step or self.model._compile_metrics is not None:
            self.model.compute_metrics(x, y, y_pred, weights)
        self.model.reset_metrics()
        self.initial_metrics = [to_numpy(variable) for variable in self.model.metrics_variables]
        unused = None if self._has_own_step else self.model._loss_tracker  # the mean of losses, which `fit` computes
        self._metrics = [metric for metric in self.model.metrics if metric is not unused]
        self._built = True

    @property
    def applied(self) -> AppliedGradients:
        """What the model's own `train_step` applies. From now on its optimizer changes nothing."""
        if self._applied is None:
            self._applied = AppliedGradients(self.model, self.trainable)
        return self._applied

    def _prepared(self, values: Sequence[Array], batch: Any) -> tuple[Any, Any, Any, int]:
        import keras

        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        if type(x) is np.ndarray and type(y) is np.ndarray and weights is None:  # without the time that trees take
            x, y, leaves = _as_keras_takes_it(x), _as_keras_takes_it(y), [x]
        else:
            x, y, weights = keras.tree.map_structure(_as_keras_takes_it, (x, y, weights))
            leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
        if not leaves or not np.ndim(leaves[0]):
            raise MisuseError(
                f"an element of the data is {type_of(batch)} without examples: give batches (x, y) or (x, y, weights), "
                "for instance by dataset.batch(64)"
            )
        if y is None:
            self._check_needs_no_labels(batch)
        if not self._built:
            self.load(values)
            self.build(x, y, self.model(x, training=False), weights)
        return x, y, weights, len(leaves[0])

    def _check_needs_no_labels(self, batch: Any) -> None:
        """Raise MisuseError if the loss that the model was compiled with needs labels."""
        if self.model._compile_loss is None or self._has_own_step or has_own(self.model, "compute_loss"):
            return
        raise MisuseError(
            f"an element of the data is {type_of(batch)} without labels, which the loss of {self.model.name!r} needs: "
            "give (x, y), for instance by dataset.map(lambda batch: (batch, batch['label']))"
        )

    @abstractmethod
    def _train(self, values: Sequence[Array], tables: Sequence[Variable], x: Any, y: Any, weights: Any) -> StepOutcome:
        """Do what `train` does."""

    @abstractmethod
    def _predict(self, values: Sequence[Array], tables: Sequence[Variable], x: Any) -> Any:
        """Return the outputs."""

    @abstractmethod
    def _evaluate(
        self,
        values: Sequence[Array],
        tables: Sequence[Variable],
        metrics: Sequence[Array],
        x: Any,
        y: Any,
        weights: Any,
    ) -> tuple[float, list[Any]]:
        """Return the loss, and the variables of the metrics after a batch, which had these values before."""


def is_served(variable: Any) -> bool:
    """Return whether the servers have a variable. Integers, such as the states of random generators, stay here."""
    return bool(variable.trainable) or "float" in str(variable.dtype)


def to_numpy(value: Any) -> Any:
    """Return the values of a variable or a tensor."""
    import keras

    return np.asarray(keras.ops.convert_to_numpy(value.value if isinstance(value, keras.Variable) else value))


def _as_keras_takes_it(leaf: Any) -> Any:
    """Convert as `Model.fit` does: floating arrays to `keras.config.floatx()`."""
    import keras

    if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
        return leaf.astype(dtype_named(keras.config.floatx()), copy=False)
    return leaf
