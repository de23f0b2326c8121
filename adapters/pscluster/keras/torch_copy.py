"""Steps of a Keras model on the torch backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.keras.copies import Array, Copy, StepOutcome, to_numpy
from pscluster.keras.own_steps import data_of
from pscluster.keras.tables import Rows, fetch
from pscluster.ps.handles.indexing import IndexedSlices
from pscluster.ps.handles.variables.variable import Variable

logger = logging.getLogger(__name__)


class TorchCopy(Copy):
    """A model that computes with autograd, in the memory in which its values were received."""

    def __init__(self, model: Any, tables: Sequence[int] = ()) -> None:
        super().__init__(model, tables)
        self._parameters = [variable.value for variable in self.weights]  # which Keras keeps, and takes long to return
        self._on_cpu = all(parameter.device.type == "cpu" for parameter in self._parameters)
        self._warned = False

    def build(self, x: Any, y: Any, y_pred: Any, weights: Any) -> None:
        x, y, weights = _as_tensors(x, y, weights)
        super().build(x, y, y_pred, weights)

    def load(self, values: Sequence[Array]) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            tensor = _tensor(value)
            # Without a copy where it can be.
            parameter.data = tensor if self._on_cpu else tensor.to(parameter.device)
            parameter.grad = None

    def _train(self, values: Sequence[Array], tables: Sequence[Variable], x: Any, y: Any, weights: Any) -> StepOutcome:
        model, split = self.model, len(self.trainable)
        trainable, others = self._parameters[:split], self._parameters[split:]
        before = [np.array(value) for value in values[split:]]
        self.load(values)
        versions = [parameter._version for parameter in self._parameters]
        for metric in self._metrics:
            metric.reset_state()
        if self._has_own_step:
            loss, logs, gradients, of_tables = *self._own_step(x, y, weights), []
        else:
            x, y, weights = _as_tensors(x, y, weights)
            with self._looking_up(tables) as leaves:
                y_pred = self._call(x, training=True)
                loss = model.compute_loss(x, y, y_pred, weights)
            scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
            scaled.backward()
            self._check_unchanged(versions)
            gradients = [parameter.grad for parameter in trainable]
            self._warn_of_missing(gradients)
            logs = {name: _number(value) for name, value in self._results_of(x, y, y_pred, weights).items()}
            loss, of_tables = float(loss.detach()), [_slices(of_table) for of_table in leaves]
        changes = [
            (index, _array(parameter) - before[index])
            for index, (parameter, version) in enumerate(zip(others, versions[split:], strict=True))
            if parameter._version != version
        ]
        arrays = [None if gradient is None else _array(gradient) for gradient in gradients]
        return StepOutcome(loss, logs, arrays, of_tables, changes)

    def _own_step(self, x: Any, y: Any, weights: Any) -> tuple[float | None, dict[str, Any], list[Any]]:
        """Call the model's own step. Return the loss and logs that it returns, and the gradients that it applies."""
        applied, before = self.applied, [variable.value._version for variable in self.trainable]
        applied.begin()
        logs = {name: to_numpy(value) for name, value in self.model.train_step(data_of(x, y, weights)).items()}
        now = zip(self.trainable, before, strict=True)
        applied.check_unchanged(variable for variable, version in now if variable.value._version != version)
        return (float(logs["loss"]) if "loss" in logs else None), logs, applied.end()

    def _evaluate(
        self,
        values: Sequence[Array],
        tables: Sequence[Variable],
        metrics: Sequence[Array],
        x: Any,
        y: Any,
        weights: Any,
    ) -> tuple[float, list[Any]]:
        import torch

        model = self.model
        x, y, weights = _as_tensors(x, y, weights)
        self.load(values)
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)
        with torch.no_grad(), self._looking_up(tables):
            y_pred = self._call(x, training=False)
            loss = model.compute_loss(x, y, y_pred, weights)
            model.compute_metrics(x, y, y_pred, weights)
        return float(loss), [np.array(to_numpy(variable)) for variable in model.metrics_variables]

    def _predict(self, values: Sequence[Array], tables: Sequence[Variable], x: Any) -> Any:
        import torch

        self.load(values)
        with torch.no_grad(), self._looking_up(tables):
            return self._call(x, training=False)

    @contextlib.contextmanager
    def _looking_up(self, variables: Sequence[Variable]) -> Iterator[list[list[tuple[Rows, Any]]]]:
        """Fetch rows as they are looked up in the block. Yields for each table what was fetched, and the leaf of it."""
        import torch

        leaves: list[list[tuple[Rows, Any]]] = [[] for _ in self.tables]

        def look_up(number: int, ids: Any) -> Any:
            (rows,) = fetch([variables[number]], [[ids.detach().cpu().numpy()]])
            leaf = _tensor(rows.values).to(ids.device).requires_grad_()
            leaves[number].append((rows, leaf))
            return torch.nn.functional.embedding(torch.from_numpy(rows.places[0]).to(ids.device), leaf)

        with contextlib.ExitStack() as stack:
            for number, table in enumerate(self.tables):
                stack.enter_context(table.looking_up(partial(look_up, number)))
            yield leaves

    def _call(self, x: Any, *, training: bool) -> Any:
        return self.model(x, **self._mode(training))

    def _results_of(self, x: Any, y: Any, y_pred: Any, weights: Any) -> dict[str, Any]:
        """Do what `Model.compute_metrics` does, without the mean of losses, which is not that of the batch."""
        model = self.model
        if self._has_own_metrics:
            results: dict[str, Any] = model.compute_metrics(x, y, y_pred, weights)
            return results
        if model._compile_metrics is not None:
            model._compile_metrics.update_state(y, y_pred, weights)
        results = {}
        for metric in self._metrics:
            result = metric.result()
            results.update(result if isinstance(result, dict) else {metric.name: result})
        return results

    def _check_unchanged(self, versions: Sequence[int]) -> None:
        """Raise MisuseError if the model's call has assigned trainable weights, which had these versions."""
        trained = zip(self.trainable, self._parameters, versions, strict=False)  # they come first
        if changed := [variable.path for variable, parameter, version in trained if parameter._version != version]:
            raise MisuseError(
                f"the model assigns {', '.join(changed[:3])} in its call, as SpectralNormalization does, and the "
                "servers take gradients only: compute with a changed copy of it, or use the JAX backend, where Keras "
                "drops what is assigned so"
            )

    def _warn_of_missing(self, gradients: Sequence[Any]) -> None:
        """Log once, as Keras does, which weights the loss does not depend on."""
        if self._warned or not any(gradient is None for gradient in gradients):
            return
        missing = [v.path for v, gradient in zip(self.trainable, gradients, strict=True) if gradient is None]
        logger.warning("the loss does not depend on %s, which keep their values", ", ".join(missing))
        self._warned = True


def _slices(leaves: Sequence[tuple[Rows, Any]]) -> IndexedSlices | None:
    """Return the gradient of a table by rows; None if there is none."""
    parts = [(rows.ids, _array(leaf.grad)) for rows, leaf in leaves if leaf.grad is not None]
    if not parts:
        return None
    if len(parts) > 1:
        return IndexedSlices(np.concatenate([part for _, part in parts]), np.concatenate([ids for ids, _ in parts]))
    return IndexedSlices(parts[0][1], parts[0][0])


def _as_tensors(*parts: Any) -> list[Any]:
    """Return arrays, or nested ones, as Keras' tensors, which a model's own `compute_loss` gets in `Model.fit`, too.

    Keras would convert them for each loss and metric.
    """
    import keras

    if all(part is None or type(part) is np.ndarray for part in parts):  # without the time that trees take
        return [_as_tensor(part) for part in parts]
    return [keras.tree.map_structure(_as_tensor, part) for part in parts]


def _as_tensor(leaf: Any) -> Any:
    import keras

    return keras.ops.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc" else leaf


def _number(value: Any) -> Any:
    """Return the result of a metric as an array."""
    import torch

    return _array(value) if isinstance(value, torch.Tensor) else to_numpy(value)


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
