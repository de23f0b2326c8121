"""`function`: a Python function of global arrays as one program, which is sent in one message a task for each call."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np

from pscluster.core.errors import MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.execution.executors import definition_of
from pscluster.spmd.execution.recording import Ref, Sendable
from pscluster.spmd.meshes import current_mesh, session_of
from pscluster.spmd.placing import distribute
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.trace import Step, check_is_function, is_tracing, rebuilt, structure_of, tracing
from pscluster.spmd.variables.variable import DVariable
from pscluster.worker.programs.program import ArrayType

logger = logging.getLogger(__name__)

Params = ParamSpec("Params")
Returned = TypeVar("Returned")
Known = TypeVar("Known")

MAX_TRACES = 64
"""Of one function, for arguments of different shapes, types, layouts and values: the oldest one is dropped."""

MANY_TRACES = 16
"""After this many, the log says once how to have fewer."""


class _Slot:
    """Stands for an array: an argument, or a result."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class Traced:
    """What a function does, for arguments of certain types."""

    program: Sendable
    definition: Callable[..., Any]  # the program as a function that workers are sent once
    inputs: tuple[int | Ref, ...]  # positions among the arguments' arrays, or arrays that are captured
    types: tuple[ArrayType, ...]  # of what it makes, in the order of the program's outputs
    given: tuple[int | Ref, ...]  # what it returns without having made it
    structure: Any  # of the result: its arrays are slots, those of `types` first
    steps: tuple[Step, ...]

    def arrays_of(self, tensors: Sequence[DTensor]) -> tuple[list[Ref], list[Ref]]:
        """Return `inputs` and `given` of a call with these arrays."""
        refs = [tensor.settled for tensor in tensors]

        def found(places: Sequence[int | Ref]) -> list[Ref]:
            return [refs[of] if isinstance(of, int) else of for of in places]

        return found(self.inputs), found(self.given)


class Traces(Generic[Known]):
    """What is known of a function for each kind of arguments; the oldest is dropped. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Any, Known] = OrderedDict()

    def of(self, key: Any, make: Callable[[], Known]) -> Known:
        """Return what is known for this kind of arguments, or make it."""
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = make()
            with self._lock:
                self._known[key] = known
                while len(self._known) > MAX_TRACES:
                    self._known.popitem(last=False)
        return known

    def __len__(self) -> int:
        return len(self._known)

    def values(self) -> list[Known]:
        """Return what is known for all kinds, the oldest first."""
        return list(self._known.values())


class Function(Generic[Params, Returned]):
    """A function that is traced at its first call for each kind of arguments. See `function`."""

    def __init__(self, fn: Callable[Params, Returned]) -> None:
        check_is_function("function", fn)
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._traces = Traces[Traced]()
        self._made = 0

    def __call__(self, *args: Params.args, **kwargs: Params.kwargs) -> Returned:
        """Run it, without waiting; trace it first if there was no such call."""
        if is_tracing():
            return self._fn(*args, **kwargs)
        tensors, key, arguments = arguments_of(args, kwargs)
        traced = self._traces.of(key, lambda: self._trace(tensors, arguments))
        returned: Returned = _run(traced, tensors, traced.definition)
        return returned

    def _trace(self, tensors: list[DTensor], arguments: tuple[Any, Any]) -> Traced:
        traced = traced_call(self._fn, tensors, arguments)
        self._made += 1
        if self._made == MANY_TRACES:
            logger.warning(
                "%s has been traced %d times, since its arguments were of as many kinds: pass numbers that change from "
                "call to call as arrays, such as np.asarray(number)",
                getattr(self._fn, "__qualname__", self._fn),
                MANY_TRACES,
            )
        return traced

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the method of an object, which is the function with that as its first argument."""
        return self if instance is None else MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<traced function {getattr(self._fn, '__qualname__', self._fn)}: {self.traces} traces>"

    @property
    def plain(self) -> Callable[Params, Returned]:
        """The function itself."""
        return self._fn

    @property
    def traces(self) -> int:
        """How many kinds of arguments it has been traced for."""
        return len(self._traces)


def function(fn: Callable[Params, Returned]) -> Function[Params, Returned]:
    """Make a function of global arrays run as one program: one message a task for each call.

    At its first call with arguments of certain shapes, types and layouts it is called to see which operations it does;
    then, and in all later calls of the kind, these run as a whole. What it does beside is done once, at that first
    call. Numbers and texts among the arguments, and all that it captures, such as global arrays, numbers and an
    object's attributes, are taken as they are then, and another number among the arguments is another kind: pass as an
    array what changes from call to call.

    Variables are read when it runs, and updated when it ends, all of them or none; it can't read one that it has
    updated before.

    It takes and returns global arrays in lists, tuples, dicts and dataclasses. At least one argument has to be one, or
    there is a `default_mesh`. NumPy arrays among the arguments go to all devices. Inside, arrays have no values yet:
    `numpy()`, `if array > 0` and the like raise MisuseError. Inside another traced function it is a plain function.
    """
    return Function(fn)


def call_once(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Trace a function and run it as one program, which is not kept."""
    tensors, _, arguments = arguments_of(args, kwargs)
    return _run(traced_call(fn, tensors, arguments), tensors, None)


def _run(traced: Traced, tensors: list[DTensor], definition: Callable[..., Any] | None) -> Any:
    """Run what was traced with these arrays, without waiting. With a definition, workers keep the program."""
    inputs, given = traced.arrays_of(tensors)
    session = session_of(traced.program.mesh)
    made = session.call(traced.program, definition, inputs, traced.types, traced.definition.__qualname__) + given
    results = [DTensor(ref) for ref in made]
    return rebuilt(traced.structure, lambda leaf: results[leaf.number] if isinstance(leaf, _Slot) else leaf)


def arguments_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[DTensor], Any, tuple[Any, Any]]:
    """Return the arrays among the arguments, what identifies their kind, and arguments with slots for the arrays."""
    meshes: list[Mesh] = []
    rebuilt((args, kwargs), lambda leaf: meshes.append(leaf.mesh) if isinstance(leaf, DTensor) else None)
    kinds: list[Any] = []
    if not meshes and (mesh := current_mesh()) is not None:
        meshes.append(mesh)
        kinds.append(mesh)
    if not meshes:
        raise MisuseError(
            "a traced function is called with at least one global array, on whose devices it runs: make one by "
            "distribute(), or name the devices by `with default_mesh(mesh):`; or compute here by the plain function, "
            "which spmd.function(fn).plain is"
        )
    tensors: list[DTensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            value = distribute(value, Layout.replicated(meshes[0], value.ndim))
        if isinstance(value, DVariable):
            kinds.append(value.stored)  # itself: its value is read, and it may be updated, by each call
            return value
        if isinstance(value, DTensor):
            tensors.append(value)
            kinds.append((value.shape, value.dtype.name, value.layout))
            return _Slot(len(tensors) - 1)
        kinds.append((type(value), value))
        return value

    slots = rebuilt((args, kwargs), leaf)
    key = structure_of(slots), tuple(kinds)
    try:
        hash(key)
    except TypeError as error:
        raise MisuseError(
            "a traced function takes arrays, and numbers, texts and the like, in lists, tuples, dicts and dataclasses: "
            f"{error}"
        ) from None
    return tensors, key, slots


def _mesh_of(tensors: list[DTensor], arguments: tuple[Any, Any]) -> Mesh:
    variables: list[DTensor] = []
    rebuilt(arguments, lambda leaf: variables.append(leaf) if isinstance(leaf, DVariable) else None)
    mesh = tensors[0].mesh if tensors else variables[0].mesh if variables else current_mesh()
    assert mesh is not None, "arguments_of has looked"
    return mesh


def traced_call(fn: Callable[..., Any], tensors: list[DTensor], arguments: tuple[Any, Any]) -> Traced:
    """Call a function to see what it does."""
    with tracing(_mesh_of(tensors, arguments)) as trace:
        refs = [trace.argument(ArrayType(tensor.shape, tensor.dtype, tensor.layout)) for tensor in tensors]
        inside = [DTensor(ref) for ref in refs]
        args, kwargs = rebuilt(arguments, lambda leaf: inside[leaf.number] if isinstance(leaf, _Slot) else leaf)
        returned = fn(*args, **kwargs)
        found: list[DTensor] = []
        returned = rebuilt(returned, lambda leaf: leaf.value() if isinstance(leaf, DVariable) else leaf)
        rebuilt(returned, lambda leaf: found.append(leaf) if isinstance(leaf, DTensor) else None)
        results = {tensor.settled.number: tensor.settled for tensor in found}
    positions = {ref.number: position for position, ref in enumerate(refs)}
    program, read, steps = trace.finish(list(results.values()))
    inputs = tuple(positions.get(number, read[number]) for number in program.inputs)
    types = tuple(results[number].type for number in program.outputs)
    others = [number for number in results if number not in program.outputs]
    given = tuple(positions.get(number, results[number]) for number in others)
    slots = {number: _Slot(place) for place, number in enumerate([*program.outputs, *others])}

    def slot(leaf: Any) -> Any:
        return slots[leaf.settled.number] if isinstance(leaf, DTensor) else leaf

    name = getattr(fn, "__qualname__", "a function")
    return Traced(program, definition_of(name, program), inputs, types, given, rebuilt(returned, slot), steps)
