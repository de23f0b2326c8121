"""A function of global arrays called once to see what it does: nothing runs, and what it would run is recorded."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

from pscluster.core.checks import type_of
from pscluster.core.errors import LayoutError, MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.layouts.moving import gathering, moving
from pscluster.spmd.execution.ordering import Recorded
from pscluster.spmd.execution.recording import Array, Ref, Running, Sendable, Stored
from pscluster.spmd.execution.session import Session, T
from pscluster.worker.programs.local.blocks import LocalFunction
from pscluster.worker.programs.program import ArrayType

_trace: ContextVar[Trace | None] = ContextVar("pscluster-trace", default=None)


SENT_HERE_BYTES = 1024
"""Of a replicated result of a traced function, such as a loss, whose value comes here with its program's end."""


def check_is_function(caller: str, fn: object) -> None:
    """Raise MisuseError if it is none."""
    if not callable(fn):
        raise MisuseError(f"{caller} takes a function, not {type_of(fn)}")


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a traced function."""

    name: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    work: int  # elements, or multiplications, on the busiest device
    moved_bytes: int  # from one device to another


class _NoExecutor:
    """Has no devices."""

    def check(self) -> None:
        """Do nothing: nothing is started."""

    def start(self, program: Sendable) -> Running:
        raise AssertionError(f"a traced program was started: {program.text:.80}")


class Trace(Session):
    """Records what a function does with arrays of one mesh, in place of the mesh's session."""

    has_values = False

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, _NoExecutor())
        self._values: dict[Stored, Ref] = {}  # of variables that it reads
        self._made: dict[Stored, Any] = {}  # of these

    def argument(self, of: ArrayType) -> Ref:
        """Return what stands for an array that the function is called with."""
        return self._ref(of, "an argument")

    def finish(self, results: Sequence[Ref]) -> tuple[Sendable, dict[int, Ref], tuple[Step, ...]]:
        """Return the program, the arrays that it reads, by number, and what it does, step by step."""
        recording = self._recording
        inputs, made = recording.inputs, recording.made
        recording.propagate_shardings(made.intersection(ref.number for ref in results))
        steps = tuple([_step(*item) for item in recording.instructions()])
        small = [ref for ref in results if ref.number in made and _is_sent_here(ref.type)]
        for ref in small:
            recording.fetch(ref, every_device=False)
        program = recording.finish(made - {ref.number for ref in results})
        places = [program.outputs.index(ref.number) for ref in small]
        return dataclasses.replace(program, sent_here=places), inputs, steps

    def load(self, of: ArrayType, blocks: Mapping[int, Array]) -> Ref:
        """Record an array that goes with every call."""
        ref = self._ref(of, "distribute")
        self._recording.load(ref, blocks)
        return ref

    def read(self, variable: Stored) -> Ref:
        """Record that a variable is read, once."""
        self._before_read(variable)
        if variable not in self._values:
            self._values[variable] = super().read(variable)
        return self._values[variable]

    def value_of(self, variable: Stored, make: Callable[[Ref], T]) -> T:
        """Return the same object each time: a gradient with respect to a variable finds all that is made of it."""
        ref = self.read(variable)
        if variable not in self._made:
            self._made[variable] = make(ref)
        made: T = self._made[variable]
        return made

    def _before_read(self, variable: Stored) -> None:
        if self._recording.updates(variable):
            raise MisuseError(
                f"a traced function reads a variable, {variable.type}, after it has updated it: read it before, or "
                "call another function"
            )

    def call_local(
        self,
        name: str,
        types: Sequence[ArrayType],
        function: LocalFunction,
        inputs: Sequence[Ref],
        layouts: Sequence[Layout] = (),
        *,
        check: bool,
    ) -> list[Ref]:
        """Record a plain function of blocks. With layouts in place of types, its results are further outputs."""
        refs = [self._ref(of, name) for of in types]
        self._recording.call(refs, function, inputs, layouts, name, check=check)
        return refs

    def _fetch(self, source: Ref, *, every_device: bool, timeout: float | None) -> NoReturn:
        """Refuse: there are no values."""
        del every_device, timeout
        raise MisuseError(
            f"a value of {source.type} is asked for while a function is traced, when there is none yet: return the "
            "array, and look at it outside; numpy.where() chooses between values"
        )

    def flush(self) -> None:
        """Do nothing: what is recorded is sent with each call."""

    def wait(self, timeout: float | None = None) -> None:
        """Do nothing."""

    def _send_soon(self) -> None:
        """Do nothing: what is recorded is sent with each call."""

    def _use(self, ref: Ref) -> None:
        self._check(ref)

    def _check(self, ref: Ref) -> None:
        if ref.session is not self:  # it is captured
            super()._check(ref)


def _step(instruction: Recorded, read: Sequence[ArrayType], written: Sequence[ArrayType]) -> Step:
    """Return what an instruction does, for people."""
    name, work, moved = instruction[0], 0, 0
    match instruction:
        case ("load", *_):
            name = "distribute"
        case ("create", _, maker, _):
            name = maker
        case ("compute", _, function, *_, work):
            name = function
        case ("call", *_, called):
            name = called
        case ("move", *_):
            name = "combine" if read[0].partial else "relayout"
            plan = moving(read[0].layout, written[0].layout, read[0].shape, read[0].partial)
            moved = plan.elements * read[0].dtype.itemsize
        case ("update", _, kind, *_):
            name = "apply" if kind == "gradient" else kind
            plan = gathering(read[0].layout, written[0].layout, read[0].shape, read[0].partial, 0)
            moved = plan.elements * read[0].dtype.itemsize
    return Step(name, tuple(read), tuple(written), work, moved)


def _is_sent_here(of: ArrayType) -> bool:
    return of.layout.is_replicated and not of.partial and of.nbytes <= SENT_HERE_BYTES


def active_trace(mesh: Mesh) -> Trace | None:
    """Return the trace of the function that is being traced here. Raise LayoutError if it is of another mesh."""
    trace = _trace.get()
    if trace is not None and trace.mesh != mesh:
        raise LayoutError(f"a traced function computes on one mesh, {trace.mesh!r}, and not on {mesh!r}, too")
    return trace


@contextlib.contextmanager
def tracing(mesh: Mesh) -> Iterator[Trace]:
    """Trace what the block does with arrays of a mesh. Raise MisuseError in another such block."""
    if _trace.get() is not None:
        raise MisuseError("a function is traced already: call the plain function inside of another one")
    token = _trace.set(trace := Trace(mesh))
    try:
        yield trace
    finally:
        _trace.reset(token)


def is_tracing() -> bool:
    """Return whether a function is being traced here."""
    return _trace.get() is not None


def _set_fields(value: Any) -> list[str]:
    """Return the names of a dataclass' fields that have values."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def rebuilt(value: Any, leaf: Callable[..., Any], name: str | None = None) -> Any:
    """Return nested lists, tuples, dicts and dataclasses with each leaf replaced, in order.

    With a name of the whole, `leaf` is also told that of what it replaces, such as "name[0]['w']".
    """

    def of(item: Any, key: Any) -> Any:
        return rebuilt(item, leaf, None if name is None else f"{name}[{key!r}]")

    if isinstance(value, dict):
        items = {key: of(item, key) for key, item in value.items()}
        if type(value) is dict:
            return items
        (made := copy.copy(value)).update(items)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(of(item, at) for at, item in enumerate(value)))
    if isinstance(value, list | tuple):
        return type(value)(of(item, at) for at, item in enumerate(value))
    if hasattr(type(value), "__dataclass_fields__"):
        made = copy.copy(value)
        for field in _set_fields(value):
            path = None if name is None else f"{name}.{field}"
            object.__setattr__(made, field, rebuilt(getattr(value, field), leaf, path))  # it may be frozen
        return made
    return leaf(value) if name is None else leaf(value, name)


def structure_of(value: Any) -> Any:
    """Return what nested lists, tuples, dicts and dataclasses are without their leaves: equal if these are alike."""
    if isinstance(value, dict):
        return type(value), *((type(key), key, structure_of(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value), *map(structure_of, value)
    if hasattr(type(value), "__dataclass_fields__"):
        return type(value), *(structure_of(getattr(value, field)) for field in _set_fields(value))
    return None


def leaves_of(value: Any) -> list[Any]:
    """Return what is in nested lists, tuples, dicts and dataclasses, in order."""
    leaves: list[Any] = []
    rebuilt(value, leaves.append)
    return leaves
