"""`local_map`: a plain function, of any framework, that is called for each device on its blocks of global arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from pscluster.core.checks import type_of
from pscluster.core.dtypes import is_variable_dtype
from pscluster.core.errors import LayoutError, MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.gradients.tape import record_local
from pscluster.spmd.meshes import session_of
from pscluster.spmd.placing import distribute
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.function import Function, Traced, Traces, arguments_of, traced_call
from pscluster.spmd.tracing.trace import Trace, check_is_function, is_tracing, leaves_of
from pscluster.worker.programs.program import ArrayType


class LocalMap:
    """A function that is called for each device. See `local_map`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        in_layouts: Any,
        out_layouts: Any,
        out_types: Any,
        check: bool,
        vjp: Callable[..., Any] | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._in_layouts, self._out_layouts, self._out_types = fn, in_layouts, out_layouts, out_types
        self._check, self._vjp = check, vjp
        self._name = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._typed: Function[..., Any] = Function(self._recorded)
        self._untyped = Traces[tuple[Traced, list[Layout]]]()

    def __call__(self, *args: Any) -> Any:
        """Call it for each device, and return its results as global arrays."""
        if is_tracing():
            return self._recorded(*args)
        if self._out_types is not None:
            return self._typed(*args)
        tensors, key, arguments = arguments_of(args, {})

        def trace() -> tuple[Traced, list[Layout]]:
            layouts: list[Layout] = []
            return (
                traced_call(lambda *inside: layouts.extend(self._recorded_untyped(inside)), tensors, arguments),
                layouts,
            )

        traced, layouts = self._untyped.of(key, trace)
        inputs, _ = traced.arrays_of(tensors)
        session = session_of(traced.program.mesh)
        made = [DTensor(ref) for ref in session.call_untyped(traced.program, traced.definition, inputs, layouts)]
        return _rebuilt_layouts(self._out_layouts, iter(made))

    def __repr__(self) -> str:
        return f"<local_map of {self._name}>"

    def _arguments(self, args: tuple[Any, ...]) -> tuple[list[Any], list[DTensor], Trace]:
        """Return arguments with numbers for arrays; those, relaid out; and the trace."""
        mesh = next((leaf.mesh for leaf in leaves_of(args) if isinstance(leaf, DTensor)), None)
        if mesh is None:
            raise MisuseError(f"local_map({self._name}) is called with at least one global array: see distribute()")
        per_argument = self._in_layouts
        if per_argument is None or isinstance(per_argument, Layout):
            per_argument = [per_argument] * len(args)
        if not isinstance(per_argument, list | tuple) or len(per_argument) != len(args):
            count = len(per_argument) if isinstance(per_argument, list | tuple) else type_of(per_argument)
            raise LayoutError(
                f"local_map({self._name}) is called with {len(args)} arguments, and in_layouts is for {count}: give a "
                "list with one entry for each, such as [['x', None], None]"
            )
        tensors: list[DTensor] = []
        numbered = [
            self._numbered(argument, layouts, f"argument {at}", mesh, tensors)
            for at, (argument, layouts) in enumerate(zip(args, per_argument, strict=True))
        ]
        trace = session_of(mesh)
        assert isinstance(trace, Trace), "nothing is recorded otherwise"
        return numbered, tensors, trace

    def _numbered(self, value: Any, layouts: Any, path: str, mesh: Mesh, tensors: list[DTensor]) -> Any:
        """Return an argument with numbers in place of its arrays, which are added in the layouts that are given."""
        if isinstance(value, dict | list | tuple):
            inner: Any = layouts
            if layouts is None or isinstance(layouts, Layout) or _is_specs(layouts):
                inner = _Same(layouts)
            elif not _fits(layouts, value):
                raise LayoutError(
                    f"{path} of local_map({self._name}) is {type_of(value)}, and in_layouts has {layouts!r}"
                )
            if isinstance(value, dict):
                return {
                    key: self._numbered(item, inner[key], f"{path}[{key!r}]", mesh, tensors)
                    for key, item in value.items()
                }
            items = [self._numbered(item, inner[at], f"{path}[{at}]", mesh, tensors) for at, item in enumerate(value)]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return tuple(items) if isinstance(value, tuple) else items
        if isinstance(value, np.ndarray):
            value = distribute(value, Layout.replicated(mesh, value.ndim))
        if not isinstance(value, DTensor):
            raise MisuseError(
                f"{path} of local_map({self._name}) is {type_of(value)}, not an array: give other arguments by "
                "functools.partial(fn, ...)"
            )
        if layouts is not None:
            value = value.relayout(_layout(layouts, mesh, path))
        tensors.append(value)
        return len(tensors) - 1

    def _recorded(self, *args: Any) -> Any:
        """Record a call of it."""
        if self._out_types is None:
            raise MisuseError(
                f"local_map({self._name}) in a traced function needs out_types: for each result its whole shape and "
                "element type, such as out_types=((7, 5), 'float64'), since nothing runs while a function is traced"
            )
        numbered, tensors, trace = self._arguments(args)
        layouts, structure = _flat(self._out_layouts, trace.mesh)
        given = self._out_types(*args) if callable(self._out_types) else self._out_types
        types = [_type(of, layout) for of, layout in zip(_types(self._out_layouts, given), layouts, strict=True)]
        function = self._fn, numbered, structure
        inputs = [tensor.settled for tensor in tensors]
        refs = trace.call_local(f"local_map({self._name})", types, function, inputs, check=self._check)
        results = [DTensor(ref) for ref in refs]
        returned = _rebuilt_layouts(self._out_layouts, iter(results))
        record_local(f"local_map({self._name})", tensors, results, self._vjp, returned, args)
        return returned

    def _recorded_untyped(self, args: tuple[Any, ...]) -> list[Layout]:
        """Record a call of it whose results' types are not known, and return their layouts."""
        numbered, tensors, trace = self._arguments(args)
        layouts, structure = _flat(self._out_layouts, trace.mesh)
        inputs = [tensor.settled for tensor in tensors]
        function = self._fn, numbered, structure
        trace.call_local(f"local_map({self._name})", (), function, inputs, layouts, check=self._check)
        return layouts


def local_map(
    fn: Callable[..., Any],
    in_layouts: Any,
    out_layouts: Any,
    *,
    out_types: Any = None,
    check: bool = True,
    vjp: Callable[..., Any] | None = None,
) -> LocalMap:
    """Return a function of global arrays that calls a plain function for each device, with its blocks.

    `fn` gets the blocks as NumPy arrays that can't be written to, and returns its blocks of the results; it may use any
    framework. In it `psum`, `pmean`, `pmax`, `pmin` and `all_gather` combine values of the devices along a dimension of
    the mesh; `axis_index` and `axis_size` say where the device is. It travels as scheduled functions do, once; where
    pickles are off, by name. The calls of one task's devices take turns: each runs until it waits in a collective.

    Args:
        fn: the function. It is called again if a worker dies.
        in_layouts: a layout, or specs, for each argument; in lists, tuples and dicts if the argument is nested. None:
            arrays are passed as they lie. Arrays that lie otherwise are relaid out. One Layout is for all.
        out_layouts: a layout, or specs, for each result, nested as they are.
        out_types: `(shape, dtype)` of each whole result, nested as `out_layouts`, or a function of the arguments that
            returns these. None: they follow from the blocks; then a call waits until they are there, and can't be part
            of a traced function.
        check: compare blocks that are replicas by `out_layouts`, and raise MisuseError if they differ.
        vjp: makes gradients go through it: called with the gradient with respect to the result, nested as that is (None
            where a result does not matter), with the result, and with the arguments; returns those with respect to the
            arguments, nested as they are, or None. A function of global arrays, such as another `local_map`.

    Errors that `fn` raises are raised by the next fetch, as those of all operations. A collective in which not all
    devices along the dimension take part raises MisuseError, which names them, in all of them.
    """
    check_is_function("local_map", fn)
    return LocalMap(fn, in_layouts, out_layouts, out_types, bool(check), vjp)


class _Same:
    """Stands for a structure whose every item is the same."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: Any) -> Any:
        return self._value


def _is_specs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(item is None or isinstance(item, str) for item in value)


def _fits(layouts: Any, value: Any) -> bool:
    """Return whether layouts are nested as a value is, at its top."""
    if isinstance(value, dict):
        return isinstance(layouts, Mapping) and layouts.keys() == value.keys()
    return isinstance(layouts, list | tuple) and len(layouts) == len(value)


def _layout(given: Any, mesh: Mesh, label: str) -> Layout:
    if isinstance(given, Layout):
        return given
    if not _is_specs(given):
        raise LayoutError(f"{label} of local_map: {given!r:.100} is not a layout: give Layout(specs, mesh), or specs")
    return Layout(given, mesh)


def _flat(out_layouts: Any, mesh: Mesh) -> tuple[list[Layout], Any]:
    """Return the layouts of results, and their structure with numbers in place of these."""
    layouts: list[Layout] = []

    def numbered(given: Any) -> Any:
        if isinstance(given, Layout) or _is_specs(given):
            layouts.append(_layout(given, mesh, "out_layouts"))
            return len(layouts) - 1
        if isinstance(given, dict):
            return {key: numbered(item) for key, item in given.items()}
        if isinstance(given, list | tuple):
            return [numbered(item) for item in given]
        raise LayoutError(
            f"out_layouts of local_map has {given!r:.100}, not a layout: give Layout(specs, mesh), or specs"
        )

    structure = numbered(out_layouts)
    if any(layout.mesh != mesh for layout in layouts):
        raise LayoutError(f"out_layouts of local_map are of another mesh than the arrays', {mesh!r}")
    if not layouts:
        raise LayoutError("out_layouts of local_map has no layout: the function has to return at least one array")
    return layouts, structure


def _rebuilt_layouts(out_layouts: Any, results: Iterator[Any]) -> Any:
    """Return results nested as their layouts are."""
    if isinstance(out_layouts, Layout) or _is_specs(out_layouts):
        return next(results)
    if isinstance(out_layouts, dict):
        return {key: _rebuilt_layouts(item, results) for key, item in out_layouts.items()}
    return type(out_layouts)(_rebuilt_layouts(item, results) for item in out_layouts)


def _types(out_layouts: Any, given: Any) -> list[Any]:
    """Return the types of results, which are nested as their layouts are, in order."""
    if isinstance(out_layouts, Layout) or _is_specs(out_layouts):
        return [given]
    if not isinstance(given, dict | list | tuple) or not _fits(given, out_layouts):
        raise MisuseError(f"out_types of local_map is {given!r:.100}, which is not nested as out_layouts is")
    keys: Any = out_layouts if isinstance(out_layouts, dict) else range(len(out_layouts))
    return [of for key in keys for of in _types(out_layouts[key], given[key])]


def _type(given: Any, layout: Layout) -> ArrayType:
    """Return the type of a result. Raise MisuseError if what is given says none."""
    shape, dtype = (given.shape, given.dtype) if hasattr(given, "shape") and hasattr(given, "dtype") else (None, None)
    if isinstance(given, list | tuple) and len(given) == 2:
        shape, dtype = given
    try:
        lengths, of = tuple(int(length) for length in shape), np.dtype(dtype)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise MisuseError(
            f"out_types of local_map has {given!r:.100}: give (shape, dtype), such as ((7, 5), 'float64')"
        ) from None
    if not is_variable_dtype(of) or min(lengths, default=0) < 0:
        raise MisuseError(
            f"out_types of local_map has {given!r:.100}, and arrays are of numbers, of lengths of at least 0"
        )
    layout.check_shape(lengths, "a result of local_map")
    return ArrayType(lengths, of, layout)
