"""A function of blocks applied to global arrays: operands relaid out by the rule, the result in the layout it gives."""

from __future__ import annotations

import functools
import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pscluster.core.dtypes import is_variable_dtype
from pscluster.core.errors import LayoutError, MisuseError, UnsupportedFunctionError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.layouts.rule import Label, Operand, resolve
from pscluster.spmd.execution.recording import Ref
from pscluster.spmd.gradients.tape import record
from pscluster.spmd.meshes import session_of
from pscluster.spmd.methods import xp as xp
from pscluster.spmd.placing import distribute, numeric
from pscluster.spmd.tensor import FUNCTIONS, DTensor
from pscluster.worker.programs.operations import COMBINES
from pscluster.worker.programs.program import ArrayType, Placeholder

Array = npt.NDArray[Any]
Handler = TypeVar("Handler", bound=Callable[..., Any])

MAX_OPERAND_BYTES = 64 << 10
"""Of an operand that is not a global array: it goes to all devices."""

_NO_IDENTITY = frozenset(name for name, ufunc in COMBINES.items() if ufunc.identity is None)
"""Ufuncs that can't reduce an empty block."""

_SCALARS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of a result: the labels of its axes, its shape and its element type."""

    labels: tuple[Label, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How a function is applied to operands of certain shapes and layouts."""

    labels: Sequence[Sequence[Label]]  # of the operands' axes
    results: Sequence[Result]
    layouts: Sequence[Layout]  # that the operands must have
    types: Sequence[ArrayType]  # of the results
    work: int  # of the busiest device


@functools.cache
def block(number: int) -> Placeholder:
    """Return what stands for an operand's block in arguments."""
    return Placeholder("in", number)


def local_shape(number: int = 0) -> Placeholder:
    """Return what stands for the shape of a result's block."""
    return Placeholder("shape", number)


def implements(*functions: Any) -> Callable[[Handler], Handler]:
    """Register a function in place of these of NumPy's."""

    def register(handler: Handler) -> Handler:
        for function in functions:
            if function is not None:  # this version of NumPy has it
                FUNCTIONS[function] = handler
        return handler

    return register


def numpys(*names: str) -> list[Any]:
    """Return NumPy's functions of these names, as far as this version has them."""
    found = []
    for name in names:
        at: Any = np
        for part in name.split("."):
            at = getattr(at, part, None)
        if at is not None:
            found.append(at)
    return found


def mesh_of(*values: Any) -> Mesh:
    """Return the mesh of the global arrays among these. Raise LayoutError if there are two."""
    return one_mesh([value.mesh for value in values if isinstance(value, DTensor)])


def one_mesh(meshes: Sequence[Mesh]) -> Mesh:
    """Return the mesh that all operands are on. Raise LayoutError if there are two."""
    for mesh in meshes[1:]:
        if mesh != meshes[0]:
            raise LayoutError(
                f"the operands lie on different meshes, {meshes[0]!r} and {mesh!r}: bring one to the other's by "
                "distribute(array.full(), layout)"
            )
    return meshes[0]


def as_tensor(value: Any, mesh: Mesh) -> DTensor:
    """Return an operand as a global array; a small array goes to all devices. Raise MisuseError if it is too large."""
    if isinstance(value, DTensor):
        return value
    array = numeric(value)
    if array.nbytes > MAX_OPERAND_BYTES:
        raise MisuseError(
            f"an operand is a NumPy array of shape {array.shape}, {array.nbytes:,} bytes; one that is not a global "
            f"array may have {MAX_OPERAND_BYTES:,}, since it goes to all devices: distribute() it first"
        )
    return distribute(array, Layout.replicated(mesh, array.ndim))


def is_scalar(value: Any) -> bool:
    """Return whether it is a number of Python's, whose type does not count where it meets arrays."""
    return type(value) in _SCALARS


def refuse_out(name: str, kwargs: dict[str, Any]) -> None:
    """Remove arguments that say nothing. Raise UnsupportedFunctionError for those that can't be followed."""
    for key in ("order", "subok", "like", "device"):
        kwargs.pop(key, None)
    out, where = kwargs.pop("out", None), kwargs.pop("where", True)
    given = [array for array in (out if isinstance(out, tuple) else (out,)) if not _is_default(array)]
    if where is not True and where is not np._NoValue:
        otherwise = "array" if given else "0"
        raise UnsupportedFunctionError(
            f"{name} is not available for global arrays with where=, which leaves elements of out= as they are, and "
            f"arrays do not change: write result = np.where(mask, np.{name}(...), {otherwise})"
        )
    if any(isinstance(array, np.ndarray) for array in given):
        raise UnsupportedFunctionError(
            f"{name} is not available for global arrays with out= (or, as in array += b, in place) an array of NumPy's"
            f": write array = np.{name}(...), a global array, or array[...] = np.{name}(...).full(), which gathers it"
        )
    if given:
        raise UnsupportedFunctionError(
            f"{name} is not available for global arrays with out=, since arrays do not change: write "
            f"array = np.{name}(...)"
        )


def _is_default(value: Any) -> bool:
    return value is None or value is np._NoValue


def probe(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[np.dtype[Any]]:
    """Return the element types of a function's results; arrays among the arguments become ones of a single element."""
    if isinstance(function, np.ufunc):
        operands = tuple(
            (DTensor, arg.dtype, arg.ndim) if isinstance(arg, DTensor) else (type(arg), arg, 0) for arg in args
        )
        return types_of_ufunc(function, operands, tuple(kwargs.items()))

    def small(value: Any) -> Any:
        if isinstance(value, DTensor):
            return _single(value.dtype, value.ndim)
        if isinstance(value, list):
            return [small(item) for item in value]
        return value

    return _types_of(function, [small(arg) for arg in args], kwargs)


def _single(dtype: np.dtype[Any], ndim: int) -> Array:
    return np.ones((1,) * ndim, dtype)


def _types_of(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[np.dtype[Any]]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        results = function(*args, **kwargs)
    return [np.asarray(result).dtype for result in (results if isinstance(results, tuple | list) else [results])]


@functools.lru_cache(maxsize=1024)
def types_of_ufunc(
    ufunc: np.ufunc, operands: tuple[tuple[type, Any, int], ...], kwargs: tuple[tuple[str, Any], ...]
) -> list[np.dtype[Any]]:
    """Do what `probe` does, given DTensor, type and rank of each array; and type and value of each number, and 0.

    Numbers come with their type: 1, 1.0 and True are equal.
    """
    args = [_single(value, ndim) if kind is DTensor else value for kind, value, ndim in operands]
    return _types_of(ufunc, args, dict(kwargs))


def apply(
    function: str,
    operands: Sequence[DTensor],
    labels: Sequence[Sequence[Label]],
    results: Sequence[Result],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    whole: Collection[Label] = (),
    combine: str = "",
) -> list[DTensor]:
    """Call a function on the blocks of operands, and return its results.

    Args:
        function: its name among the operations of programs.
        operands: global arrays of one mesh.
        labels: of the axes of each, see `core.layouts.rule`; so that a result's block follows from the operands'.
        results: what it returns.
        args, kwargs: its arguments, with `block(n)` and `local_shape(n)` for what differs between devices.
        whole: labels that can't be sharded.
        combine: the ufunc that combines results of blocks, if labels that no result has are sharded. "" if there is
            none: then those are not sharded.
    """
    mesh_of(*operands)
    of_operands = tuple(
        [
            (tuple(of), operand.shape, operand.layout, operand.nbytes)
            for of, operand in zip(labels, operands, strict=True)
        ]
    )
    plan = planned(of_operands, tuple(results), frozenset(whole), combine)
    return apply_planned(function, operands, plan, args, kwargs or {})


def apply_planned(
    function: str, operands: Sequence[DTensor], plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[DTensor]:
    """Do what `apply` does, as planned."""
    known: dict[tuple[int, Layout], Ref] = {}  # an array that occurs twice moves once
    refs: list[Ref] = []
    for operand, layout in zip(operands, plan.layouts, strict=True):
        if layout == operand.layout:
            refs.append(operand.settled)  # which is kept
            continue
        key = id(operand), layout
        if key not in known:
            known[key] = operand.in_layout(layout)
        refs.append(known[key])
    of_args = [encoded(arg) for arg in args]
    of_kwargs = {name: encoded(arg) for name, arg in kwargs.items()}
    made = session_of(operands[0].mesh).compute(plan.types, function, refs, of_args, of_kwargs, plan.work)
    tensors = [DTensor(ref, of.layout) for ref, of in zip(made, plan.types, strict=True)]
    record(function, operands, plan.labels, tensors, [result.labels for result in plan.results], args, kwargs)
    return tensors


@functools.lru_cache(maxsize=1024)
def planned(
    operands: tuple[tuple[tuple[Label, ...], tuple[int, ...], Layout, int], ...],
    results: tuple[Result, ...],
    whole: frozenset[Label] = frozenset(),
    combine: str = "",
) -> Plan:
    """Apply the rule, given labels, shape, layout and bytes of each operand: see `apply`."""
    for result in results:
        if not is_variable_dtype(result.dtype):
            raise MisuseError(f"a global array holds numbers or bools, not {result.dtype}: choose another type")
    mesh = operands[0][2].mesh
    kept = list(dict.fromkeys(label for result in results for label in result.labels if label is not None))
    unsharded = set(whole)
    for of, shape, given, _ in operands:
        for label, length, spec in zip(of, shape, given.specs, strict=True):
            if label in kept and all(label in result.labels for result in results):
                continue
            if not combine or (combine in _NO_IDENTITY and spec in mesh and length < mesh[spec]):
                unsharded.add(label)
    rule = resolve([Operand(of, given.specs, nbytes) for of, _, given, nbytes in operands], kept, unsharded)
    types = [
        ArrayType(
            result.shape,
            result.dtype,
            Layout([rule.dims.get(label) for label in result.labels], mesh),
            rule.partial,
            combine or "add",
        )
        for result in results
    ]
    lengths = {
        label: length
        for of, shape, _, _ in operands
        for label, length in zip(of, shape, strict=True)
        if label is not None
    }
    layouts = [Layout(specs, mesh) for specs in rule.operands]
    return Plan([of for of, *_ in operands], results, layouts, types, rule.work(lengths, dict(mesh.dims)))


def encoded(value: Any) -> Any:
    """Return an argument as in a program. Raise TypeError for what can't be one."""
    if isinstance(value, Placeholder):
        return [value.kind, value.number]
    if value is None or isinstance(value, bool | str) or type(value) in (int, float):
        return value
    if isinstance(value, tuple | list):
        return ["tuple" if isinstance(value, tuple) else "list", *map(encoded, value)]
    if isinstance(value, slice):
        return ["slice", *(None if part is None else operator.index(part) for part in _parts(value))]
    if value is Ellipsis:
        return ["..."]
    if isinstance(value, complex | np.complexfloating):
        return ["complex", float(value.real), float(value.imag)]
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating | float):
        return float(value)
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic | bool | int | float)):
        return np.dtype(value).name
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{value!r:.100} can't be an argument of a function of global arrays") from None


def _parts(index: slice) -> tuple[Any, Any, Any]:
    return index.start, index.stop, index.step


def normal_axis(axis: Any, ndim: int) -> int:
    """Return an axis counted from 0. Raise NumPy's AxisError if there is none."""
    number = operator.index(axis)
    if not -ndim <= number < ndim:
        raise np.exceptions.AxisError(number, ndim)
    return number % ndim


def normal_axes(axis: Any, ndim: int) -> tuple[int, ...]:
    """Return axes, of which None means all, counted from 0."""
    if axis is None:
        return tuple(range(ndim))
    axes = tuple(normal_axis(one, ndim) for one in (axis if isinstance(axis, tuple | list) else (axis,)))
    if len(set(axes)) < len(axes):
        raise ValueError("duplicate value in 'axis'")  # NumPy's words
    return axes


def axes_of(tensor: DTensor) -> tuple[Label, ...]:
    """Return labels that no axis shares with another: the numbers of the axes."""
    return tuple(range(tensor.ndim))
