"""DVariable: an array whose blocks live on the parameter servers, one for each block of its layout.

So it survives workers. On a mesh of this process' own devices the blocks are here.

A variable is an array wherever it is used: of the value that it has when the program that uses it runs. Programs run in
the order in which they were made, so an operation sees all assignments before it, and none after it. What a program
does to variables is done as a whole, at its end: see `worker.programs.variables`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from pscluster.core import checks
from pscluster.core.dtypes import converted
from pscluster.core.errors import InvalidUpdateError, LayoutError, MisuseError
from pscluster.core.functions.policy import SerializationPolicy
from pscluster.core.geometry.row_orders import RANGE
from pscluster.core.layouts.layout import Layout, Spec
from pscluster.ps.handles.scope import VariableRequest
from pscluster.spmd.execution.executors import InProcess, Workers
from pscluster.spmd.execution.recording import Ref, Stored, Updating
from pscluster.spmd.meshes import session_of
from pscluster.spmd.placing import check_is_layout, distribute, numeric
from pscluster.spmd.tensor import DTensor
from pscluster.spmd.tracing.trace import is_tracing, rebuilt
from pscluster.spmd.variables.held import HeldVariable
from pscluster.spmd.variables.scope import current_rules
from pscluster.worker.programs.program import ArrayType

if TYPE_CHECKING:
    from pscluster.coordinator import ClusterCoordinator, ParameterServerStrategy

Array = npt.NDArray[Any]

_unnamed = itertools.count()


def _in_place(sign: str, instead: str = "") -> Callable[[Any, Any], Any]:
    """Return an operator that refuses: Python would put an array in the variable's place."""

    def refuse(self: DVariable, other: Any) -> Any:
        del other
        what = instead or f"assign(v {sign[:-1]} x)"
        raise MisuseError(f"v {sign} x would put an array in the place of variable {self.name!r}: use v.{what}")

    return refuse


class DVariable(DTensor):
    """A global array that can be updated. Its shape, type and layout do not change.

    Args:
        initial_value: a global array, anything that NumPy makes an array of, an initializer, or a function of
            `(shape, dtype)`; with the last two a cluster makes the values on its servers.
        layout: how it lies on its mesh. None: as the initial value; or as the `LayoutMap` says in whose scope this is.
        name: unique in the strategy of a cluster; generated if not given.
        trainable: for the caller.
        dtype, shape: as of `Variable`; a shape is needed for initializers and functions.

    Raises:
        LayoutError: there is no layout, or two, or it does not fit the shape.
        MisuseError: a function is being traced, or the value, name or type is refused: see `Variable`.
    """

    instead = "functions on workers take its `variable`, and programs the array itself"
    __slots__ = ("_handle", "_stored", "name", "trainable")
    name: str
    trainable: bool
    _handle: Any  # a `Variable` on the servers, or a HeldVariable
    _stored: Stored

    def __init__(
        self,
        initial_value: Any,
        layout: Layout | None = None,
        name: str | None = None,
        trainable: bool = True,
        *,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | None = None,
    ) -> None:
        if is_tracing():
            raise MisuseError("a variable can't be made while a function is traced: make it before, outside")
        if name is not None and not isinstance(name, str):
            raise MisuseError(f"the name of a variable is a text, not {checks.type_of(name)}")
        layout = _layout_of(initial_value, layout, name, shape)
        session = session_of(layout.mesh)
        if isinstance(initial_value, DTensor):
            initial_value = initial_value.full()
        if isinstance(session.executor, Workers):
            handle = _on_servers(session.executor.coordinator, initial_value, layout, name, trainable, dtype, shape)
            name = handle.name
        elif not isinstance(session.executor, InProcess):
            raise MisuseError(
                f"variable {name!r} can't be made by a function on workers, whose arrays end with it: make it in the "
                "script"
            )
        else:
            handle = HeldVariable(_value_here(initial_value, name, trainable, dtype, shape), layout)
        layout.check_shape(handle.shape, f"variable {name!r}")
        of = ArrayType(tuple(handle.shape), handle.dtype, layout)
        for attribute, value in {
            "_handle": handle,
            "_stored": Stored(handle, of),
            "_settled": None,
            "name": name or f"dvariable_{next(_unnamed)}",
            "trainable": trainable,
            "shape": of.shape,
            "dtype": of.dtype,
            "layout": layout,
        }.items():
            object.__setattr__(self, attribute, value)

    def __setattr__(self, name: str, value: object) -> None:
        hint = (
            "assign() changes its value" if name != "layout" else "make another variable, of its value in that layout"
        )
        raise AttributeError(f"{name} of variable {self.name!r} does not change: {hint}")

    # Its value

    @property
    def stored(self) -> Stored:
        """The variable, as programs name it; for internal use."""
        return self._stored

    @property
    def variable(self) -> Any:
        """The variable on the parameter servers, whose shards are the blocks. MisuseError if there is no cluster."""
        if isinstance(self._handle, HeldVariable):
            raise MisuseError(f"variable {self.name!r} is in this process: there are no parameter servers")
        return self._handle

    def value(self) -> DTensor:
        """Return its value as it is now."""
        return session_of(self.mesh).value_of(self._stored, DTensor)

    read_value = value

    @property
    def settled(self) -> Ref:
        """Its value on the devices; for internal use."""
        return session_of(self.mesh).read(self._stored)

    @property
    def with_terms(self) -> Ref:
        """The same: it has no terms."""
        return self.settled

    def in_layout(self, layout: Layout) -> Ref:
        """Return its value on the devices in this layout; for internal use."""
        return self.value().in_layout(layout)

    def relayout(self, layout: Layout | Sequence[Spec]) -> DTensor:
        """Return its value, as it is now, in another layout of its mesh."""
        return self.value().relayout(layout)

    def full(self, timeout: float | None = None) -> Array:
        """Return the whole value, after all that was computed so far: from where the blocks are, not from devices."""
        session = session_of(self.mesh)
        if is_tracing():
            return self.value().full()  # raises
        session.wait(timeout)
        whole: Array = self._handle.whole() if isinstance(self._handle, HeldVariable) else self._handle.read_value()
        return whole

    def components(self, timeout: float | None = None) -> list[Array]:
        """Return the block of every device, in their order."""
        whole = self.full(timeout)
        return [whole[self.layout.slices(self.shape, device)].copy() for device in range(self.mesh.size)]

    # Updates

    def assign(self, value: Any) -> DVariable:
        """Replace the value. Returns without waiting.

        Args:
            value: a global array of the same mesh, in any layout, or anything that NumPy makes an array of; of this
                shape, or a number.

        Raises:
            LayoutError: it lies on another mesh.
            InvalidUpdateError: it has another shape, or a type that this one can't hold.
        """
        return self._update("assign", value)

    def assign_add(self, value: Any) -> DVariable:
        """Add to the value; see `assign`."""
        return self._update("add", value)

    def assign_sub(self, value: Any) -> DVariable:
        """Subtract from the value; see `assign`."""
        return self._update("sub", value)

    def _update(self, kind: str, value: Any) -> DVariable:
        update_together(kind, [(self, value)])
        return self

    def fitting(self, value: Any, label: str, *, broadcast: bool = False) -> DTensor:
        """Return a value for it as a global array of its mesh, shape and type; for internal use. Raises as `assign`."""
        if not isinstance(value, DTensor):
            value = numeric(value)
        elif value.mesh != self.mesh:
            raise LayoutError(
                f"variable {self.name!r} lies on {self.mesh!r}, and the {label} on {value.mesh!r}: give an array of "
                "the variable's mesh, such as distribute(array.full(), variable.layout)"
            )
        if value.shape != self.shape and not (broadcast and not value.shape):
            raise InvalidUpdateError(
                f"variable {self.name!r} has shape {self.shape}, but the {label} has shape {value.shape}"
            )
        if isinstance(value, np.ndarray):
            value = converted(value, self.dtype, self.name, label, overflow=not broadcast)
            return distribute(np.broadcast_to(value, self.shape), self.layout)
        if not np.can_cast(value.dtype, self.dtype, "same_kind"):  # it would lose its fraction, or imaginary part
            raise InvalidUpdateError(
                f"variable {self.name!r} is {self.dtype}, but the {label} is {value.dtype}: convert it with astype()"
            )
        if value.dtype != self.dtype:
            value = value.astype(self.dtype)
        if value.shape != self.shape:
            value = np.broadcast_to(value, self.shape)
        return value.value() if isinstance(value, DVariable) else value

    # As an array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return super().__array_ufunc__(ufunc, method, *rebuilt(inputs, _as_value), **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return super().__array_function__(function, types, *rebuilt((args, kwargs), _as_value))

    __iadd__, __isub__ = _in_place("+=", "assign_add(x)"), _in_place("-=", "assign_sub(x)")
    __imul__, __itruediv__, __ifloordiv__ = _in_place("*="), _in_place("/="), _in_place("//=")
    __imod__, __ipow__, __imatmul__ = _in_place("%="), _in_place("**="), _in_place("@=")
    __iand__, __ior__, __ixor__ = _in_place("&="), _in_place("|="), _in_place("^=")
    __ilshift__, __irshift__ = _in_place("<<="), _in_place(">>=")

    def __getitem__(self, index: Any) -> DTensor:
        return self.value()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        raise MisuseError(f"a part of variable {self.name!r} can't be assigned: use v.assign(v.at[index].set(value))")

    @property
    def at(self) -> Any:
        """Elements of its value to be changed: `v.assign(v.at[index].set(value))`."""
        return self.value().at

    def __iter__(self) -> Iterator[DTensor]:
        return iter(self.value())

    def copy(self) -> DTensor:
        """Return its value as it is now."""
        return self.value()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise MisuseError(
            f"variable {self.name!r} can't be copied: value() is the array that it is now, and DVariable(v.value(), "
            "name=...) another variable of that value"
        )

    def astype(self, dtype: npt.DTypeLike) -> DTensor:
        """Return its value as it is now, with another element type."""
        return self.value().astype(dtype)

    def __repr__(self) -> str:
        return f"<DVariable {self.name!r} of shape {self.shape}, {self.dtype}, {self.layout!r}>"

    def __str__(self) -> str:
        return super().__str__().replace("DTensor(", f"DVariable({self.name!r}, ", 1)


def update_together(kind: str, updates: Sequence[tuple[DVariable, Any]]) -> None:
    """Assign, add or subtract values of variables of one mesh, all at once. Raises as `DVariable.assign`."""
    made = []
    for variable, value in updates:
        if kind != "assign" and variable.dtype == bool:
            raise InvalidUpdateError(f"variable {variable.name!r} is bool, and can only be assigned")
        source = variable.fitting(value, "value", broadcast=True).with_terms
        made.append(Updating(kind, source, variable.stored))
    session_of(updates[0][0].mesh).update(made)


def _as_value(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, DVariable) else leaf


def _layout_of(initial: Any, layout: Layout | None, name: str | None, shape: Sequence[int] | None) -> Layout:
    """Return the layout that a variable is to have. LayoutError if there is none, or another one."""
    if layout is not None:
        check_is_layout(layout)
    if isinstance(initial, DTensor):
        if layout is not None and layout != initial.layout:
            raise LayoutError(
                f"variable {name!r}: its layout is {layout!r}, but that of its initial value {initial.layout!r}: give "
                "initial_value.relayout(layout)"
            )
        return initial.layout
    if layout is not None:
        return layout
    if (rules := current_rules()) is None:
        called = "a variable" if name is None else f"variable {name!r}"
        raise LayoutError(f"{called} has no layout: give layout=, or a global array as its initial value")
    if name is None:
        raise LayoutError("a variable without a name has no rule in the LayoutMap: give name=, or layout=")
    return rules.layout_for(name, numeric(initial).ndim if shape is None else len(shape))


def _on_servers(
    coordinator: ClusterCoordinator,
    initial: Any,
    layout: Layout,
    name: str | None,
    trainable: bool,
    dtype: npt.DTypeLike | None,
    shape: Sequence[int] | None,
) -> Any:
    """Make the variable on the parameter servers, with the blocks of the layout as its shards."""
    from pscluster.coordinator import Variable  # what needs no cluster should not import it

    strategy: ParameterServerStrategy = coordinator.strategy
    if strategy.step_options.backup or strategy.step_options.staleness:
        raise MisuseError(
            "programs update variables in steps that all workers take part in: make the strategy without backup= and "
            "staleness="
        )
    with strategy.scope():
        made = Variable(
            initial,
            name=name,
            dtype=dtype,
            shape=shape,
            trainable=trainable,
            partitioner=lambda shape, dtype: _cut(layout, shape, name),  # noqa: ARG005
        )
    blocks = made.partition.blocks if made.partition.order == RANGE else ()
    if any(block.size and block not in blocks for block in layout.partition(made.shape).blocks):
        raise MisuseError(
            f"variable {made.name!r} is on the servers already, in other shards than {layout!r} has: give the "
            "layout that it was made with, or restore a checkpoint into new servers"
        )
    made.laid_out = True
    return made


def _cut(layout: Layout, shape: tuple[int, ...], name: str | None) -> list[int]:
    layout.check_shape(shape, f"variable {name!r}")
    return [layout.num_shards(axis) for axis in range(layout.rank)]


def _value_here(
    initial: Any, name: str | None, trainable: bool, dtype: npt.DTypeLike | None, shape: Sequence[int] | None
) -> Array:
    """Return an initial value, for a variable in this process: as for one on servers."""
    from pscluster.coordinator.variables.initial_values import initial_value_of

    if shape is not None and callable(initial) and not isinstance(initial, np.ndarray | np.generic):
        initial = initial(checks.per_axis("shape", shape), np.dtype(np.float32 if dtype is None else dtype))
    request = VariableRequest(initial, name, dtype, shape, trainable, None)
    value = initial_value_of(request, name or "variable", SerializationPolicy()).value
    assert value is not None, "functions have been called"
    return value
