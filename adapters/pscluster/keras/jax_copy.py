"""Steps of a Keras model on the JAX backend: jitted functions of all values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.keras.copies import Array, Copy, StepOutcome
from pscluster.keras.own_steps import data_of
from pscluster.keras.tables import LookUp, Rows, fetch
from pscluster.ps.handles.indexing import IndexedSlices
from pscluster.ps.handles.variables.variable import Variable


class JaxCopy(Copy):
    """A model whose steps are pure functions, as `Model.compute_loss_and_updates` is."""

    def __init__(self, model: Any, tables: Sequence[int] = ()) -> None:
        import jax

        super().__init__(model, tables)
        by_id = {id(variable): index for index, variable in enumerate(self.non_trainable)}
        # Where each of the model's own order is: among those that were read, or among the local ones.
        self._others = [(by_id.get(id(v)), v) for v in model.non_trainable_variables]
        self._states = [variable.value for variable in self.local]
        self._start: list[Any] = []  # the initial values of metrics, as JAX has them at once
        self._changed: list[int] = []  # of those that were read; known once the step has been traced
        jit = jax.jit if model.jit_compile and not model.run_eagerly else lambda function: function
        self._train_step, self._test_step, self._outputs = jit(self._trained), jit(self._tested), jit(self._predicted)
        runs: dict[str, Callable[..., Any]] = {
            "train": partial(self._losses, training=True),
            "test": partial(self._losses, training=False),
            "predict": self._called,
        }
        self._runs = runs
        self._ids = {kind: jit(partial(self._looked_up, run)) for kind, run in runs.items()}
        self._checked: set[str] = set()

    def build(self, x: Any, y: Any, y_pred: Any, weights: Any) -> None:
        import jax.numpy as jnp

        super().build(x, y, y_pred, weights)
        self._start = [jnp.asarray(value) for value in self.initial_metrics]

    def _train(self, values: Sequence[Array], tables: Sequence[Variable], x: Any, y: Any, weights: Any) -> StepOutcome:
        split = len(self.trainable)
        trainable, others = values[:split], values[split:]
        fetched = self._fetched(tables, trainable, others, self._start, x, y, weights, call="train")
        rows, places = [of.padded() for of in fetched], [of.places for of in fetched]
        loss, logs, (gradients, of_rows), changes, self._states = self._train_step(
            (trainable, rows), places, others, self._states, self._start, x, y, weights
        )
        return StepOutcome(
            None if loss is None else float(loss),
            {name: np.asarray(value) for name, value in logs.items()},
            [np.asarray(gradient) for gradient in gradients],
            [
                IndexedSlices(np.asarray(gradient)[: len(of.ids)], of.ids) if len(of.ids) else None
                for of, gradient in zip(fetched, of_rows, strict=True)
            ],
            [(index, np.asarray(change)) for index, change in zip(self._changed, changes, strict=True)],
        )

    def _evaluate(
        self,
        values: Sequence[Array],
        tables: Sequence[Variable],
        metrics: Sequence[Array],
        x: Any,
        y: Any,
        weights: Any,
    ) -> tuple[float, list[Any]]:
        split = len(self.trainable)
        trainable, others = values[:split], values[split:]
        fetched = self._fetched(tables, trainable, others, metrics, x, y, weights, call="test")
        rows, places = [of.padded() for of in fetched], [of.places for of in fetched]
        loss, after = self._test_step((trainable, rows), places, others, self._states, metrics, x, y, weights)
        return float(loss), [np.asarray(value) for value in after]

    def _predict(self, values: Sequence[Array], tables: Sequence[Variable], x: Any) -> Any:
        split = len(self.trainable)
        trainable, others = values[:split], values[split:]
        fetched = self._fetched(tables, trainable, others, x, call="predict")
        rows, places = [of.padded() for of in fetched], [of.places for of in fetched]
        return self._outputs((trainable, rows), places, others, self._states, x)

    # Tables

    def _fetched(self, tables: Sequence[Variable], *arguments: Any, call: str) -> list[Rows]:
        """Compute the ids that a step of `call` ("train", "test" or "predict") looks up, and fetch their rows."""
        if not self.tables:
            return []
        zeros = [np.zeros(table.width, table.dtype) for table in self.tables]
        trainable, others, *batch = arguments
        if call not in self._checked:
            self._check_lookups(self._runs[call], zeros, trainable, others, self._states, *batch)
            self._checked.add(call)
        lookups = self._ids[call](zeros, trainable, others, self._states, *batch)
        return fetch(tables, [[np.asarray(ids) for ids in of_table] for of_table in lookups])

    def _looked_up(
        self, run: Callable[..., Any], zeros: Any, trainable: Any, non_trainable: Any, states: Any, *batch: Any
    ) -> list[list[Any]]:
        """Return the ids of each table's lookups, in the order of the calls that `run` makes."""
        found: list[list[Any]] = [[] for _ in self.tables]

        def look_up(number: int, ids: Any) -> Any:
            found[number].append(ids)
            return self.tables[number].zeros(ids) + zeros[number]

        with self._looking_up([partial(look_up, number) for number in range(len(self.tables))]):
            run((trainable, []), self._in_order(non_trainable, states), *batch)
        return found

    def _check_lookups(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Raise MisuseError if ids depend on the rows of tables, or are computed within a loop."""
        import jax

        try:
            traced = jax.make_jaxpr(partial(self._looked_up, run))(*arguments)
        except jax.errors.UnexpectedTracerError as error:
            raise MisuseError(
                f"an embedding of {[table.path for table in self.tables]} is looked up in a loop, a vmap or a remat of "
                "JAX, from which its ids can't be had before the step: leave it out of tables="
            ) from error
        depending = {id(variable) for variable in traced.jaxpr.invars[: len(self.tables)]}
        for equation in traced.jaxpr.eqns:
            if any(id(variable) in depending for variable in equation.invars):
                depending.update(id(variable) for variable in equation.outvars)
        if any(id(variable) in depending for variable in traced.jaxpr.outvars):
            raise MisuseError(
                f"ids that the model looks up depend on rows of the tables {[table.path for table in self.tables]}, "
                "which are fetched for all lookups at once: leave those that come first out of tables="
            )

    @contextlib.contextmanager
    def _looking_up(self, functions: Sequence[LookUp]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for table, function in zip(self.tables, functions, strict=True):
                stack.enter_context(table.looking_up(function))
            yield

    def _taking(self, rows: Any, places: Any) -> contextlib.AbstractContextManager[None]:
        """Look up in the rows that were fetched."""
        import keras

        calls = [iter(of_table) for of_table in places]

        def look_up(number: int, ids: Any) -> Any:
            del ids
            return keras.ops.take(rows[number], next(calls[number]), axis=0)

        return self._looking_up([partial(look_up, number) for number in range(len(calls))])

    # The functions that are traced

    def _losses(
        self, values: Any, others: Any, metrics: Any, x: Any, y: Any, weights: Any, *, training: bool
    ) -> tuple[Any, Any]:
        trainable, _ = values
        loss_and_updates: tuple[Any, Any] = self.model.compute_loss_and_updates(
            list(trainable),
            others,
            list(metrics),
            x,
            y,
            weights,
            training=training,
            optimizer_variables=self._optimizer() if training else None,
        )
        return loss_and_updates

    def _with_rows(self, values: Any, places: Any, *arguments: Any, training: bool) -> tuple[Any, Any]:
        with self._taking(values[1], places):
            return self._losses(values, *arguments, training=training)

    def _trained(
        self, values: Any, places: Any, non_trainable: Any, states: Any, metrics: Any, x: Any, y: Any, weights: Any
    ) -> Any:
        import jax

        before = self._in_order(non_trainable, states)
        if self._has_own_step:
            loss, logs, gradients, after = self._own_step(values[0], before, metrics, x, y, weights)
        else:
            of_step = jax.value_and_grad(partial(self._with_rows, training=True), has_aux=True)
            (_, aux), gradients = of_step(values, places, before, metrics, x, y, weights)
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

    def _own_step(
        self, trainable: Any, others: Any, metrics: Any, x: Any, y: Any, weights: Any
    ) -> tuple[Any, dict[str, Any], Any, Any]:
        """Call the model's own step. Return loss, logs, the gradients that it applies, and non-trainable values."""
        applied, before = self.applied, list(trainable)
        applied.begin()
        state = (list(before), list(others), self._optimizer(), list(metrics))
        logs, (after, others, *_) = self.model.train_step(state, data_of(x, y, weights))
        now = zip(self.trainable, before, after, strict=True)
        applied.check_unchanged(variable for variable, old, new in now if new is not old)
        return logs.get("loss"), logs, (applied.end(), []), others

    def _tested(
        self, values: Any, places: Any, non_trainable: Any, states: Any, metrics: Any, x: Any, y: Any, weights: Any
    ) -> Any:
        before = self._in_order(non_trainable, states)
        _, (loss, y_pred, _, metrics) = self._with_rows(values, places, before, metrics, x, y, weights, training=False)
        return loss, self._metrics_after(metrics, x, y, y_pred, weights)[1]

    def _called(self, values: Any, others: Any, x: Any) -> Any:
        outputs, _ = self.model.stateless_call(list(values[0]), others, x, **self._mode(training=False))
        return outputs

    def _predicted(self, values: Any, places: Any, non_trainable: Any, states: Any, x: Any) -> Any:
        with self._taking(values[1], places):
            return self._called(values, self._in_order(non_trainable, states), x)

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
