"""Steps of a Keras model on the torch backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pscluster.keras.copies import Array, Copy, StepOutcome, to_numpy
from pscluster.keras.own_steps import data_of
from pscluster.keras.tables import Rows, fetch
from pscluster.ps.handles.indexing import IndexedSlices
from pscluster.ps.handles.variable import Variable

logger = logging.getLogger(__name__)


class TorchCopy(Copy):
    """A model that computes with autograd, in the memory in which its values were received."""

    def __init__(self, model: Any, tables: Sequence[int] = ()) -> None:
        super().__init__(model, tables)
        self._warned = False

    def load(self, values: Sequence[Array]) -> None:
        for variable, value in zip(self.weights, values, strict=True):
            tensor = _tensor(value)
            parameter = variable.value
            # Without a copy where it can be.
            parameter.data = tensor if parameter.device.type == "cpu" else tensor.to(parameter.device)

    def _train(self, values: Sequence[Array], tables: Sequence[Variable], x: Any, y: Any, weights: Any) -> StepOutcome:
        model = self.model
        before = [np.array(value) for value in values[len(self.trainable) :]]
        self.load(values)
        versions = [variable.value._version for variable in self.non_trainable]
        model.reset_metrics()
        model.zero_grad()
        if self._has_own_step:
            loss, logs, gradients, of_tables = *self._own_step(x, y, weights), []
        else:
            with self._looking_up(tables) as leaves:
                y_pred = self._call(x, training=True)
                loss = model.compute_loss(x, y, y_pred, weights)
            scaled = loss if model.optimizer is None else model.optimizer.scale_loss(loss)
            scaled.backward()
            gradients = [variable.value.grad for variable in self.trainable]
            self._warn_of_missing(gradients)
            logs = {name: to_numpy(value) for name, value in model.compute_metrics(x, y, y_pred, weights).items()}
            loss, of_tables = float(loss.detach()), [_slices(of_table) for of_table in leaves]
        changes = [
            (index, _array(variable.value) - before[index])
            for index, (variable, version) in enumerate(zip(self.non_trainable, versions, strict=True))
            if variable.value._version != version
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

    def _warn_of_missing(self, gradients: Sequence[Any]) -> None:
        """Log once, as Keras does, which weights the loss does not depend on."""
        missing = [v.path for v, gradient in zip(self.trainable, gradients, strict=True) if gradient is None]
        if missing and not self._warned:
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
