"""Embeddings of a Keras model as tables on the servers, of which a step has only the rows that its batch looks up.

In a copy that takes steps such a layer has no weight. On torch its call fetches the rows. A jitted step of JAX can't,
so there the ids of all lookups are computed first, by a function that runs the same model with zeros for rows, of which
XLA keeps only what leads to ids. The distinct rows are fetched, and are arguments of the step, whose lookups take them
by their places. Shapes must be few, or each step would be compiled anew: the rows are padded to a power of two.

Outside of steps, where only shapes count, rows are zeros.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.errors import MisuseError
from pscluster.ps.handles.gradients.parameters import distinct
from pscluster.ps.handles.indexing import Array, Ids
from pscluster.ps.handles.optimizers import Optimizer
from pscluster.ps.handles.reads import distinct_rows
from pscluster.ps.handles.variables.variable import Variable

logger = logging.getLogger(__name__)

_MIN_ROWS = 8  # of the padded arrays

LookUp = Callable[[Any], Any]
"""Takes a tensor of ids, and returns their rows: one dimension more."""


class Table:
    """A layer of one copy whose weight is a table."""

    def __init__(self, layer: Any) -> None:
        variable = layer._embeddings
        self.path: str = variable.path
        self.width: int = variable.shape[1]
        self.dtype: str = str(variable.dtype)
        self.look_up: LookUp = self.zeros
        layer._untrack_variable(variable)
        as_table(layer, lambda ids: self.look_up(ids), self._refuse)
        object.__setattr__(layer, "_embeddings", None)  # its memory

    def zeros(self, ids: Any) -> Any:
        """Return zeros in the place of rows."""
        import keras

        return keras.ops.zeros((*ids.shape, self.width), self.dtype)

    @contextlib.contextmanager
    def looking_up(self, look_up: LookUp) -> Iterator[None]:
        """Look rows up this way for the block."""
        self.look_up = look_up
        try:
            yield
        finally:
            self.look_up = self.zeros

    def _refuse(self) -> None:
        raise MisuseError(
            f"{self.path!r} is served as a table, of which a step has only the rows that it looks up, and the model "
            "uses all of it: leave it out of tables="
        )


class Rows(NamedTuple):
    """What was fetched for lookups."""

    ids: Ids
    """Each once, ascending."""
    places: list[Any]
    """For each lookup which row each id is; as the ids are shaped."""
    values: Array
    """(ids, width)."""

    def padded(self) -> Array:
        """Return the rows, and zeros up to a power of two."""
        count = len(self.ids)
        padded = np.zeros(
            (max(_MIN_ROWS, 1 << max(count - 1, 0).bit_length()), self.values.shape[1]), self.values.dtype
        )
        padded[:count] = self.values
        return padded


def fetch(tables: Sequence[Variable], lookups: Sequence[Sequence[Array]]) -> list[Rows]:
    """Return for each table the rows of its lookups: one request per server.

    Raises:
        InvalidUpdateError: an id is no row of its table.
    """
    found: list[tuple[Ids, list[Any]]] = []
    for variable, ids in zip(tables, lookups, strict=True):
        flat = [variable.row_ids(one).reshape(-1) for one in ids]
        unique, which = distinct(np.concatenate(flat)) if flat else (np.empty(0, np.int64), np.empty(0, np.int64))
        parts = np.split(which.astype(np.int32), np.cumsum([len(one) for one in flat])[:-1]) if flat else []
        found.append((unique, [part.reshape(one.shape) for part, one in zip(parts, ids, strict=True)]))
    rows = distinct_rows([(variable, unique) for variable, (unique, _) in zip(tables, found, strict=True)])
    return [Rows(unique, places, values) for (unique, places), values in zip(found, rows, strict=True)]


def as_table(layer: Any, look_up: LookUp, refuse: Callable[[], None]) -> None:
    """Make an embedding look its rows up by this function, and call the other when all of its weight is used."""
    import keras

    def call(self: Any, inputs: Any) -> Any:
        if not keras.backend.is_int_dtype(inputs.dtype):
            inputs = keras.ops.cast(inputs, "int32")
        return keras.ops.cast(look_up(inputs), self.compute_dtype)

    kind = type(layer)
    of_class = {"call": call, "embeddings": property(lambda _: refuse()), "__module__": kind.__module__}
    layer.__class__ = type(kind.__name__, (kind,), of_class)


def embeddings_of(model: Any) -> dict[int, Any]:
    """Return the embeddings of a model, by the id of their weight."""
    import keras

    layers = model._flatten_layers()
    return {
        id(layer._embeddings): layer
        for layer in layers
        if isinstance(layer, keras.layers.Embedding) and getattr(layer, "_embeddings", None) is not None
    }


def chosen(model: Any, tables: Mapping[str, Optimizer] | Sequence[str] | None) -> dict[int, Optimizer | None]:
    """Return which of a model's trainable weights become tables, by index, and the optimizers given for them.

    Those that the model uses whole are left out, with a warning.

    Raises:
        TypeError: `tables` is not as `serve` takes it.
        ValueError: a pattern fits no embedding.
        MisuseError: an embedding can't be a table.
    """
    if isinstance(tables, str) or not isinstance(tables, Mapping | Sequence | None):
        raise TypeError(f"tables is {type_of(tables)}: give a dict of patterns and optimizers, or a list of patterns")
    if not tables:
        return {}
    layers = embeddings_of(model)
    names = {key: {layer.name, layer.path, layer._embeddings.path} for key, layer in layers.items()}
    found: dict[int, Optimizer | None] = {}
    for pattern in tables:
        optimizer = tables[pattern] if isinstance(tables, Mapping) else None
        if not isinstance(pattern, str):
            raise TypeError(f"tables has the key {pattern!r:.80}: give patterns such as 'embedding*'")
        if isinstance(tables, Mapping) and not isinstance(optimizer, Optimizer):
            raise TypeError(
                f"tables[{pattern!r}] is {type_of(optimizer)}: give one of pscluster.coordinator.optimizers, or a list "
                "of patterns for the model's own"
            )
        fitting = [key for key, known in names.items() if any(fnmatchcase(name, pattern) for name in known)]
        if not fitting:
            there = ", ".join(repr(layer.name) for layer in list(layers.values())[:10])
            raise ValueError(
                f"tables has {pattern!r}, which fits no keras.layers.Embedding: there are {there or 'none'}"
            )
        for key in fitting:
            found.setdefault(key, optimizer)
    for key in found:
        _check(layers[key])
    whole = _used_whole(model, {key: layers[key] for key in found})
    for key, why in whole.items():
        logger.warning("%s is served whole, not as a table: %s", layers[key]._embeddings.path, why)
    at = {id(variable): index for index, variable in enumerate(model.trainable_variables)}
    return {at[key]: optimizer for key, optimizer in found.items() if key not in whole}


def _check(layer: Any) -> None:
    """Raise MisuseError if an embedding can't be a table."""
    import keras

    hint = "leave it out of tables= to have it served whole"
    if (regularizer := layer.embeddings_regularizer) is not None:
        raise MisuseError(
            f"the embedding {layer.name!r} has embeddings_regularizer={type(regularizer).__name__}, which needs all of "
            f"its rows in each step: make it without, or {hint}"
        )
    if layer.lora_enabled or layer.quantization_mode:
        raise MisuseError(f"the embedding {layer.name!r} has LoRA or is quantized, and can't be a table: {hint}")
    kind = type(layer)
    if kind.call is not keras.layers.Embedding.call and not _is_reversible(layer):
        raise MisuseError(
            f"the embedding {layer.name!r} is a {kind.__name__} with a call of its own, and can't be a table: {hint}"
        )


def _is_reversible(layer: Any) -> bool:
    import keras

    return isinstance(layer, getattr(keras.layers, "ReversibleEmbedding", ()))  # not in every version


def _used_whole(model: Any, layers: Mapping[int, Any]) -> dict[int, str]:
    """Return which of these embeddings the model uses whole, or does not train, and why, as far as it can be known.

    What a subclass does with them shows only in its steps, which refuse it.
    """
    import keras

    whole: dict[int, str] = {}
    everywhere = model._flatten_layers()
    for key, layer in layers.items():
        others = [
            other.name
            for other in everywhere
            if other is not layer and any(id(variable) == key for variable in [*other._trainable_variables])
        ]
        if others:
            whole[key] = f"{others[0]!r} has the same weight, and needs all of it"
        elif _is_reversible(layer):
            whole[key] = "its reverse needs all of it"
        elif not layer._embeddings.trainable:
            whole[key] = "it is not trained, so that values are not sent again"
    kinds = {key: type(layer) for key, layer in layers.items() if key not in whole}
    if not kinds or not getattr(model, "inputs", None):
        return whole

    def note(key: int) -> None:
        whole[key] = "the model uses all of it"
        raise MisuseError(whole[key])

    def zeros(width: int, ids: Any) -> Any:
        return keras.ops.zeros((*ids.shape, width))

    run = type("Run", (keras.Operation,), {"call": lambda _, inputs: model(inputs)})  # with shapes only
    try:
        for key in kinds:
            as_table(layers[key], partial(zeros, layers[key].output_dim), partial(note, key))
        before = -1
        while len(whole) > before:  # each pass ends at the first use
            before = len(whole)
            with contextlib.suppress(Exception):
                run().compute_output_spec(getattr(model, "input", model.inputs[0]))  # a Sequential has one
            for key in whole.keys() & kinds.keys():
                layers[key].__class__ = kinds[key]
    finally:
        for key, kind in kinds.items():
            layers[key].__class__ = kind
    return whole
