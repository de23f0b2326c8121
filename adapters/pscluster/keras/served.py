"""Keras models on the parameter servers, for `fit` and `evaluate` of the coordinator, or in steps of one's own.

The servers have the trainable weights, their optimizer's slots, and the floating non-trainable values, such as the
moving statistics of batch normalization. To these each step adds by how much it has changed them, so the batches of all
workers count, once each; where replicas step together it adds the mean of their changes. Integers, such as the states
of random generators, stay in each process: see `copies`.
"""

from __future__ import annotations

import os
import sys
import weakref
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.context import current_function
from pscluster.core.dtypes import dtype_named
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.core.functions.definitions import FunctionHandle, partial_of
from pscluster.keras.callbacks import DrivenCallback, driven
from pscluster.keras.copies import Copy, StepOutcome, Weight, to_numpy
from pscluster.keras.lazy_zeros import zeros_for
from pscluster.keras.making import check_backend, class_of, copy_of, make_model
from pscluster.keras.metrics import ModelMetrics
from pscluster.ps.handles.gradients.parameters import Applied, apply_all, assign_all, is_finite, nonfinite
from pscluster.ps.handles.metric import MetricLike
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.reads import read_variables
from pscluster.ps.handles.variables.variable import Variable

# The functions of the models that this process serves; workers have them in place of their handles.
model_functions: weakref.WeakKeyDictionary[FunctionHandle, Callable[[], Any]] = weakref.WeakKeyDictionary()

# What plain models have, and what does the same here.
_INSTEAD = {
    "fit": "coordinator.fit(served, data)",
    "evaluate": "coordinator.evaluate(served, data)",
    "predict": "coordinator.predict(served, data)",
    "compile": "model.compile(...) in model_fn",
}


@dataclass(frozen=True, eq=False, repr=False)
class ServedModel:
    """A Keras model whose weights are on the parameter servers; `serve` makes it.

    `coordinator.fit`, `evaluate` and `predict` take it in place of a step function. Steps can capture it, as they do
    variables, or get it as an argument.

    Attributes:
        variables: the weights by name, the trainable ones first.
        optimizer: what applies gradients to them.
        tables: the names of those of which a step reads and pushes only rows, and what applies gradients to each.
    """

    name: str
    optimizer: Optimizer
    variables: dict[str, Variable]
    tables: dict[str, Optimizer]
    model_fn: Any  # a FunctionHandle; on a worker the function
    weights: tuple[Weight, ...]
    id: int
    backend: str
    policy: str  # of data types
    own_test_step: str  # the class that has one; "" if none has

    def train_on_batch(self, batch: Any) -> dict[str, float]:
        """Take a training step, on a worker: read the weights, compute, push gradients. Return the loss and metrics.

        Metrics are those of the batch; those that are no numbers are left out.

        Args:
            batch: (x, y) or (x, y, sample_weight), as for `Model.train_on_batch`: NumPy arrays, or nested ones.

        Raises:
            InvalidUpdateError: a gradient has NaN or infinity, unless the optimizer has another policy for that. It is
                named, and nothing was applied.
            MisuseError: `model_fn` makes another model here than where it was served; or a `train_step` of the model's
                own changes weights otherwise than by its optimizer.
            PSUnavailableError: a server is unreachable.
        """
        names, variables, tables = self._read_in_steps()
        split = sum(weight.trainable for weight in self.weights) - len(tables)
        outcome = self._copy.train(read_variables(variables), batch, tables)
        self._check_finite(names, outcome)
        # Replicas that step together: of these the mean counts.
        function = current_function()
        replicas = 1 if function is None or function.replica is None else int(function.replica.num_replicas)
        changes = [(change, variables[split + at]) for at, change in outcome.changes if is_finite(change)]
        pairs: list[tuple[Any, Variable]] = list(zip(outcome.gradients, variables[:split], strict=True))
        applied = {id(self.optimizer): Applied(self.optimizer, pairs)}
        for optimizer, rows, variable in zip(self.tables.values(), outcome.of_tables, tables, strict=True):
            if rows is not None:
                of_optimizer = applied.setdefault(id(optimizer), Applied(optimizer, []))
                cast(list[Any], of_optimizer.pairs).append((rows, variable))
        apply_all(
            list(applied.values()),
            examples=None if replicas == 1 else _size_of(batch),
            add=[(change / change.dtype.type(replicas), variable) for change, variable in changes],
        )
        numbers = {name: float(value) for name, value in outcome.logs.items() if not np.ndim(value) and name != "loss"}
        return numbers if outcome.loss is None else {"loss": outcome.loss, **numbers}

    def _read_in_steps(self) -> tuple[list[str], list[Variable], list[Variable]]:
        """Return the names of the variables that steps read whole, these, and the tables."""
        if not self.tables:
            return list(self.variables), list(self.variables.values()), []
        whole = {name: variable for name, variable in self.variables.items() if name not in self.tables}
        return list(whole), list(whole.values()), [self.variables[name] for name in self.tables]

    def _check_finite(self, names: Sequence[str], outcome: StepOutcome) -> None:
        """Raise InvalidUpdateError if something is not finite, unless its optimizer has a policy for that."""
        checked: dict[str, Any] = {}
        if self.optimizer.preprocessing.nonfinite == "apply":
            split = len(outcome.gradients)
            checked = {f"the gradient of {name}": of for name, of in zip(names, outcome.gradients, strict=False)}
            checked |= {f"the change of {names[split + at]}": change for at, change in outcome.changes}
        for (name, optimizer), rows in zip(self.tables.items(), outcome.of_tables, strict=True):
            if rows is not None and optimizer.preprocessing.nonfinite == "apply":
                checked[f"the gradient of {name}"] = rows.values
        if bad := nonfinite({what: value for what, value in checked.items() if value is not None}):
            loss = "" if outcome.loss is None else f" (the loss is {outcome.loss:g})"
            raise InvalidUpdateError(
                f"NaN or infinity in {', '.join(bad[:3])}{loss}: nothing was applied; lower "
                "the learning rate, clip (global_clipnorm=), or look at the data"
            )

    def test_on_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return what `metric` takes for a batch: a step for `evaluate`, on a worker."""
        _, variables, tables = self._read_in_steps()
        loss, changes, size = self._copy.evaluate(read_variables(variables), batch, tables)
        sums = [np.asarray(change, np.float64).ravel() for change in changes]
        return np.concatenate([[loss * size, size], *sums]), ModelMetrics.form_of(batch)

    def predict_on_batch(self, batch: Any) -> Any:
        """Return the outputs of the model for a batch, as NumPy arrays: a step for `predict`, on a worker.

        Args:
            batch: x, (x, y) or (x, y, sample_weight); x alone is used.

        Raises:
            MisuseError: the model has a `predict_step` of its own.
            PSUnavailableError: a server is unreachable.
        """
        _, variables, tables = self._read_in_steps()
        return self._copy.predict(read_variables(variables), batch, tables)

    # What fit, evaluate and predict use: see `pscluster.worker.steps.training.MakesSteps`

    def training_step(self) -> Callable[[Any], Any]:
        """Return the step of `fit`."""
        return partial_of(f"{self.name}.train_on_batch", train_on_batch, self)

    def evaluation_step(self) -> Callable[[Any], Any]:
        """Return the step of `evaluate`. MisuseError if the model has a `test_step` of its own."""
        if self.own_test_step:
            raise MisuseError(
                f"{self.own_test_step} has a test_step of its own, whose results workers can't add up: override "
                "compute_loss or compute_metrics, which are called, or evaluate served.to_keras()"
            )
        return partial_of(f"{self.name}.test_on_batch", test_on_batch, self)

    def prediction_step(self) -> Callable[[Any], Any]:
        """Return the step of `predict`."""
        return partial_of(f"{self.name}.predict_on_batch", predict_on_batch, self)

    def evaluation_metric(self) -> MetricLike:
        """Return the metric of `evaluate`, whose result has all of the model's, by name."""
        return ModelMetrics(self)

    def drive_callbacks(self, callbacks: Sequence[Any]) -> list[DrivenCallback | None]:
        """Return what drives Keras' own callbacks in `fit`; None for others. MisuseError if one can't work."""
        return driven(self, callbacks)

    # Plain Keras

    def to_keras(self, *, averages: bool = False) -> Any:
        """Return a plain compiled Keras model with the present values of the servers, for `save`, `predict` and so on.

        Its optimizer is new: what ours has in its slots is not in it.

        Args:
            averages: take the averages that an optimizer with `use_ema=True` keeps of the weights that it trains, in
                place of their values, as Keras' `fit` does when it ends.

        Raises:
            MisuseError: `averages` is set, and no optimizer of this model keeps any.
        """
        copy = self.plain_copy()
        values = read_variables(self._averages() if averages else list(self.variables.values()))
        for variable, value in zip(copy.weights, values, strict=True):
            variable.assign(value)
        return copy.model

    def _averages(self) -> list[Variable]:
        """Return each weight's average, or the weight if it has none. MisuseError if none has."""
        trainable = [variable for variable in self.variables.values() if variable.trainable]
        optimizers = {id(self.variables[name]): optimizer for name, optimizer in self.tables.items()}
        averages: dict[int, Variable] = {
            id(variable): optimizer.average(variable)
            for variable in trainable
            if (optimizer := optimizers.get(id(variable), self.optimizer)).use_ema
        }
        if not averages:
            self.optimizer.average(trainable[0])  # says what would keep them
        return [averages.get(id(variable), variable) for variable in self.variables.values()]

    def plain_copy(self) -> Copy:
        """Return a copy whose model can be saved, with the values that `model_fn` gives it; for internal use."""
        copy = self._new_copy()
        if (optimizer := copy.model.optimizer) is not None and not optimizer.built:
            optimizer.build(copy.model.trainable_variables)  # a file without its variables is loaded with a warning
        return copy

    def load_weights(self, source: Any) -> None:
        """Replace the values on the servers by those of a plain model, or of a file of weights or of a whole model.

        Args:
            source: a Keras model like this one; or a path, as for `Model.load_weights` (`.weights.h5`, `.keras`).

        Raises:
            MisuseError: the model has other weights: the first that differs is named. Nothing has changed.
            ValueError: it is no file of Keras, or one of another model's weights.
        """
        model = source
        if isinstance(source, str | os.PathLike):
            model = self._new_copy().model
            model.optimizer = None  # whose slots may be in the file, too
            try:
                model.load_weights(source)
            except FileNotFoundError:
                raise
            except (ValueError, OSError, zipfile.BadZipFile) as error:
                raise ValueError(f"{str(source)!r} has no weights that {self.name!r} can load: {error}") from error
        elif not hasattr(source, "trainable_variables"):
            raise TypeError(f"load_weights takes a Keras model or a path, not {type_of(source)}")
        copy = class_of(self.backend)(model)
        self._check(copy, "this model has", names=False)
        values = [np.asarray(numpy_of(variable)) for variable in copy.weights]
        assign_all(dict(zip(self.variables, values, strict=True)), self.variables)

    @property
    def _copy(self) -> Copy:
        """This process's copy."""
        client = next(iter(self.variables.values())).client
        return copy_of(client, self.id, self._model_without_tables, self.backend, self._places_of_tables)

    def _places_of_tables(self) -> list[int]:
        """Return which of the weights are tables, in their order."""
        at = {name: index for index, name in enumerate(self.variables)}
        return [at[name] for name in self.tables]

    def _model_without_tables(self) -> Any:
        """Return a new model, whose tables take no memory. On one thread at a time."""
        paths = (weight.path for name, weight in zip(self.variables, self.weights, strict=True) if name in self.tables)
        with zeros_for(frozenset(paths)):
            return self._new_copy().model

    def _new_copy(self) -> Copy:
        check_backend(self.backend)
        function = self.model_fn
        if isinstance(function, FunctionHandle):
            function = model_functions[function]
        copy = class_of(self.backend)(make_model(function, self.policy))
        self._check(copy, "model_fn has made another model here than when it was served: here it has")
        return copy

    def _check(self, copy: Copy, label: str, *, names: bool = True) -> None:
        """Raise MisuseError unless a model has the weights that are served."""
        mine, theirs = self.weights, copy.describe()
        for one, other in zip(mine, theirs, strict=False):
            if one[not names :] != other[not names :]:
                raise MisuseError(
                    f"{label} {_shown(other)} where {self.name!r} has {_shown(one)}: give the same layers, in the same "
                    "order"
                )
        if len(mine) != len(theirs):
            raise MisuseError(f"{label} {len(theirs)} weights, and {self.name!r} has {len(mine)}: give the same layers")

    def __getattr__(self, name: str) -> Any:
        """Say what to write for what a plain model has, such as `fit` and `save`. AttributeError."""
        hint = _INSTEAD.get(name, "")
        if not hint and "keras" in sys.modules and hasattr(sys.modules["keras"].Model, name):
            hint = f"served.to_keras().{name}"
        raise AttributeError(f"a ServedModel has no {name!r}{hint and ': write '}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} of {len(self.variables)} weights>"


def train_on_batch(served: ServedModel, batch: Any) -> dict[str, float]:
    """Call the method: functions can be sent without pickles, and methods can't."""
    return served.train_on_batch(batch)


def test_on_batch(served: ServedModel, batch: Any) -> tuple[Any, Any]:
    """Call the method, as above."""
    return served.test_on_batch(batch)


def predict_on_batch(served: ServedModel, batch: Any) -> Any:
    """Call the method, as above."""
    return served.predict_on_batch(batch)


def numpy_of(variable: Any) -> Any:
    """Return a copy of a weight's value, of its own element type."""
    value = to_numpy(variable)
    if str(variable.dtype) == "bfloat16":
        value = value.astype(dtype_named("bfloat16"))
    return np.array(value)  # Keras' own memory may change


def _shown(weight: Weight) -> str:
    return f"{weight.path!r} of shape {weight.shape}{'' if weight.trainable else ', not trainable'}"


def _size_of(batch: Any) -> int:
    import keras

    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    return len(next(leaf for leaf in keras.tree.flatten(x) if leaf is not None))
