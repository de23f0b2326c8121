"""The weights of a model, whichever way it keeps them, and their paths.

Knows of no framework: arrays are what has a shape and an element type, and Keras' models and weights are recognized by
the attributes that only they have.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of
from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle, StaysHere

_NO_WEIGHTS = (
    *(str, bytes, int, float, complex, type(None), type),
    *(ModuleType, FunctionType, MethodType, BuiltinFunctionType),
    *(Handle, StaysHere),
)
"""Instances of these are not searched."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight, or only its shape, and its path."""

    path: str
    value: Any
    is_shape: bool = False


def weights_of(tree: Any) -> list[Weight]:
    """Return the weights of anything that `LayoutMap.apply` or `report` takes, in order. MisuseError if it is none."""
    tree = _opened(tree)
    if (of_keras := _keras_weights(tree)) is not None:
        return of_keras
    if isinstance(tree, Mapping) and tree and all(_is_shape(value) for value in tree.values()):
        return [Weight(str(path), value, is_shape=True) for path, value in tree.items()]
    return [Weight(path, value) for path, value in _walk(tree, "", ())]


def with_weights(tree: Any, make: Callable[[Weight], Any]) -> Any:
    """Return a tree with each weight replaced: see `LayoutMap.apply`."""
    tree = _opened(tree)
    if (of_keras := _keras_weights(tree)) is not None:
        return {weight.path: make(weight) for weight in of_keras}
    made: dict[int, tuple[Any, Any]] = {}  # by the weight's id, which is kept: one that occurs twice is made once
    for path, value in _walk(tree, "", ()):  # before any attribute is replaced: making one may fail
        if id(value) not in made:
            result = make(Weight(path, value))
            made[id(value)] = value, result
            made[id(result)] = result, result  # an object that occurs twice has it already
    return _rebuilt(tree, {key: result for key, (_, result) in made.items()}, ())


def shape_and_type_of(weight: Weight) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return a weight's shape and element type. Raise MisuseError if it is no array."""
    if weight.is_shape:
        shape, dtype = weight.value if _has_type(weight.value) else (weight.value, np.float32)
        return tuple(shape), np.dtype(dtype)
    value = weight.value
    if isinstance(getattr(value, "dtype", None), np.dtype):
        return tuple(value.shape), value.dtype
    array = value_of(weight)
    return array.shape, array.dtype


def value_of(weight: Weight) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a weight as an array. Raise MisuseError if it is none."""
    try:
        return array_of(weight.value)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"{weight.path!r}, {type_of(weight.value)}, is not an array: {error}") from None


def _is_array(value: Any) -> bool:
    return isinstance(getattr(value, "shape", None), tuple) and hasattr(value, "dtype")


def _is_shape(value: Any) -> bool:
    return _is_lengths(value) or _has_type(value)


def _is_lengths(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(length) is int for length in value)


def _has_type(value: Any) -> bool:
    if not (isinstance(value, tuple) and len(value) == 2 and _is_lengths(value[0])):
        return False
    try:
        np.dtype(value[1])
    except TypeError:
        return False
    return True


def _keras_weights(tree: Any) -> list[Weight] | None:
    """Return the weights of a Keras model, or of a list of its variables; None if it is neither."""
    layers = getattr(tree, "layers", None)
    if isinstance(layers, Sequence) and layers and all(hasattr(layer, "weights") for layer in layers):
        return [Weight(f"{layer.name}.{_attribute_of(weight)}", weight) for layer in layers for weight in layer.weights]
    listed = tree if isinstance(tree, list | tuple) else getattr(tree, "weights", None)
    if isinstance(listed, list | tuple) and listed and all(_is_keras_variable(item) for item in listed):
        return [Weight(_keras_path(item), item) for item in listed]
    return None


def _is_keras_variable(value: Any) -> bool:
    return _is_array(value) and isinstance(getattr(value, "path", None) or getattr(value, "name", None), str)


def _keras_path(variable: Any) -> str:
    """Return `dense.kernel` for a path or name such as "dense/kernel" or "dense/kernel:0"."""
    path: str = getattr(variable, "path", None) or variable.name
    return path.partition(":")[0].replace("/", ".")


def _attribute_of(variable: Any) -> str:
    return _keras_path(variable).rpartition(".")[2]


def _opened(tree: Any) -> Any:
    """Return the weights of what has a `state_dict`, such as a torch module."""
    return tree.state_dict() if callable(getattr(tree, "state_dict", None)) else tree


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object, or a nesting, consists of, with names."""
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from zip(getattr(value, "_fields", map(str, range(len(value)))), value, strict=True)
    elif not isinstance(value, _NO_WEIGHTS):
        if dataclasses.is_dataclass(value) and not hasattr(value, "__dict__"):
            yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        yield from getattr(value, "__dict__", {}).items()


def _walk(value: Any, path: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield paths and arrays. What refers to what it is part of is not entered again."""
    if _is_array(value):
        yield path, value
    elif id(value) not in above:
        for key, item in _items(value):
            yield from _walk(item, f"{path}.{key}" if path else key, (*above, id(value)))


def _rebuilt(value: Any, made: Mapping[int, Any], above: tuple[int, ...]) -> Any:
    """Return a value with its arrays replaced: nestings, and dataclasses that are frozen, are new, objects the same."""
    if _is_array(value):
        return made[id(value)]
    if id(value) in above or isinstance(value, _NO_WEIGHTS):
        return value
    items = [(key, item, _rebuilt(item, made, (*above, id(value)))) for key, item in _items(value)]
    if all(new is old for _, old, new in items):
        return value
    if isinstance(value, Mapping):
        pairs = zip(value, (new for _, _, new in items), strict=True)
        return OrderedDict(pairs) if isinstance(value, OrderedDict) else dict(pairs)
    if isinstance(value, list | tuple):
        news = [new for _, _, new in items]
        return type(value)(*news) if hasattr(value, "_fields") else type(value)(news)
    parameters = getattr(type(value), "__dataclass_params__", None)
    made_of = copy.copy(value) if parameters is not None and parameters.frozen else value
    for key, old, new in items:
        if new is not old:
            object.__setattr__(made_of, key, new) if made_of is not value else setattr(value, key, new)
    return made_of
