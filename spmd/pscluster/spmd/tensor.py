"""DTensor: a global array, whose blocks lie on the devices of a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.errors import LayoutError, MisuseError, ShardedGatherError, UnsupportedFunctionError
from pscluster.core.handles import StaysHere
from pscluster.core.layouts.layout import Layout, Spec
from pscluster.core.layouts.mesh import Device, Mesh
from pscluster.spmd.execution.propagation import way_to
from pscluster.spmd.execution.recording import Ref
from pscluster.spmd.gradients.tape import record_relayout
from pscluster.spmd.meshes import session_of
from pscluster.spmd.methods import ArrayMethods

Array = npt.NDArray[Any]

SHOWN_ELEMENTS = 1000
"""The most elements that are fetched to be printed, as NumPy shows them in full."""

UFUNCS: dict[str, Callable[..., Any]] = {}
"""What is called for a method of a ufunc, such as "__call__": with the ufunc and its arguments."""

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""What is called in place of NumPy's functions for arguments that are DTensors; and "getitem" and "astype"."""

LIKE: dict[Any, Callable[..., Any]] = {}
"""What is called in place of NumPy's functions with `like=` a DTensor: with that one first."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's block."""

    device: Device
    index: tuple[slice, ...]  # of it in the whole
    replica: int  # how many devices before this one have the same
    fetch: Callable[[], Array]


class DTensor(ArrayMethods, StaysHere):
    """A global array. It has a shape, a dtype and a layout, and NumPy's functions and operators take it.

    Immutable. Its values are not here: `numpy()` fetches a replicated array, `full()` any. Operations are sent to the
    devices without waiting; their errors are raised by the next fetch, or by an operation that follows.
    """

    instead = "functions on workers can't take it: pass what its full() returns"
    __slots__ = ("_ref", "_settled", "dtype", "layout", "shape")
    __array_priority__ = 1000

    def __init__(self, ref: Ref, layout: Layout | None = None) -> None:
        """Take an array on the devices. It may have terms that are combined at first use, into `layout`."""
        self._ref: Ref = ref
        self._settled: Ref | None = None if ref.type.partial else ref
        self.shape: tuple[int, ...] = ref.type.shape
        self.dtype: np.dtype[Any] = ref.type.dtype
        self.layout: Layout = layout or ref.type.layout

    # What it is

    @property
    def mesh(self) -> Mesh:
        """The mesh that it lies on."""
        return self.layout.mesh

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def settled(self) -> Ref:
        """The array on the devices, without terms; for internal use."""
        if self._settled is not None:
            return self._settled
        settled = moved(self._ref, self.layout)
        if settled.session is self._ref.session:  # else a function is traced that has captured the array
            self._ref = self._settled = settled
        return settled

    @property
    def with_terms(self) -> Ref:
        """The array on the devices, which may have terms; for internal use."""
        return self._ref if self._settled is None else self._settled

    def in_layout(self, layout: Layout) -> Ref:
        """Return the array on the devices in this layout; for internal use."""
        if layout == self.layout:
            return self.settled  # which is kept: terms are combined once
        return moved(self._ref if self._settled is None else self._settled, layout)

    # Moving and fetching

    def relayout(self, layout: Layout | Sequence[Spec]) -> DTensor:
        """Return the same array in another layout of its mesh. MATCH, in a list of specs, keeps that of its axis."""
        if not isinstance(layout, Layout):
            layout = self.layout.matched(layout)
        if layout.mesh != self.mesh:
            raise LayoutError(
                f"the array lies on {self.mesh!r}, and can't be relaid out on {layout.mesh!r}: "
                "use distribute(array.full(), layout)"
            )
        layout.check_shape(self.shape)
        if layout == self.layout:
            return self
        relaid = DTensor(self.in_layout(layout))
        record_relayout(self, relaid)
        return relaid

    def relayout_like(self, other: DTensor) -> DTensor:
        """Return the same array in the layout of another one of equal rank."""
        if not isinstance(other, DTensor):
            raise MisuseError(f"relayout_like takes a global array, not {type_of(other)}: relayout() takes a layout")
        return self.relayout(other.layout)

    def full(self, timeout: float | None = None) -> Array:
        """Fetch the whole array: each block from one device. Of several clients, all have to call it.

        Raises the first error of what was computed so far, or WaitTimeoutError after `timeout` seconds.
        """
        return session_of(self.mesh).whole(self.settled, timeout)

    def numpy(self, timeout: float | None = None) -> Array:
        """Fetch a replicated array. Raise ShardedGatherError for any other: `full()` gathers it."""
        self._check_replicated("numpy()")
        return self.full(timeout)

    def components(self, timeout: float | None = None) -> list[Array]:
        """Fetch the block of every device, in their order; equal ones of replicas, too. Of a client's own devices."""
        return [block.copy() for block in session_of(self.mesh).blocks(self.settled, timeout)]

    @property
    def shards(self) -> list[Shard]:
        """Each device's block: where it is, what it is of the whole, and a function that fetches it."""

        def fetch(at: int) -> Callable[[], Array]:
            return lambda: self.components()[at]

        layout, names = self.layout, self.mesh.devices
        return [
            Shard(names[device], layout.slices(self.shape, device), layout.replica_of(device), fetch(at))
            for at, device in enumerate(session_of(self.mesh).devices)
        ]

    def _check_replicated(self, call: str) -> None:
        if not self.layout.is_replicated:
            raise ShardedGatherError(
                f"{call} of an array of shape {self.shape} that is sharded by [{', '.join(self.layout.specs)}] would "
                "gather it: call full() if that is meant, or relayout() it first"
            )

    # Python's and NumPy's protocols

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        del copy
        self._check_replicated("a conversion to a NumPy array")
        array = self.full()
        return array if dtype is None else array.astype(dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if (handler := UFUNCS.get(method)) is None:
            raise unsupported(f"{ufunc.__name__}.{method}")
        return handler(ufunc, *inputs, **kwargs)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        del types
        if (creator := LIKE.get(function)) is not None:
            return creator(self, *args, **kwargs)
        return _function(function, f"{function.__module__}.{function.__name__}")(*args, **kwargs)

    def __getitem__(self, index: Any) -> DTensor:
        result: DTensor = _function("getitem", "indexing")(self, index)
        return result

    @property
    def at(self) -> Any:
        """Elements to be changed, by an index: `array.at[index].set(value)` is another array; see `Elements`."""
        return FUNCTIONS["at"](self)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise MisuseError(
            "a global array does not change: array.at[index].set(value) makes another one, also .add(value) and so on, "
            "and what has to change is a DVariable"
        )

    def __delitem__(self, index: Any) -> None:
        raise MisuseError("a global array does not change: np.delete(array, index, axis) makes another one")

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __iter__(self) -> Iterator[DTensor]:
        if not self.shape:
            raise TypeError("iteration over an array without axes")
        if self.layout.num_shards(0) > 1:
            raise ShardedGatherError(
                f"iteration over axis 0, which is sharded over {self.layout.specs[0]!r}, would gather it row by row: "
                "relayout() it first, or use functions of the whole array"
            )
        return (self[row] for row in range(self.shape[0]))

    def item(self) -> Any:
        """Fetch the only element, as a Python number."""
        return self.numpy().item()

    def tolist(self) -> Any:
        """Fetch a replicated array as nested lists."""
        return self.numpy().tolist()

    def __bool__(self) -> bool:
        return bool(self.numpy())

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __index__(self) -> int:
        return self.numpy().__index__()

    __hash__ = None  # type: ignore[assignment]  # == compares elements

    def __repr__(self) -> str:
        return f"<DTensor of shape {self.shape}, {self.dtype}, {self.layout!r}>"

    def __str__(self) -> str:
        """Return its value: once if it is replicated, else by device. Fetches it, unless it is large, or traced."""
        if not session_of(self.mesh).has_values:
            value = "<traced>"
        elif self.size > SHOWN_ELEMENTS:
            value = f"<{self.size:,} elements>"
        elif self.layout.is_replicated:
            value = str(self.full())
        else:
            blocks = zip(session_of(self.mesh).devices, self.components(), strict=True)
            shown = (f"{str(self.mesh.devices[device])!r}: {block}" for device, block in blocks)
            value = "{" + ", ".join(shown) + "}"
        return f'DTensor({value}, layout="{self.layout}", shape={self.shape}, dtype={self.dtype})'

    # Methods that NumPy's arrays have, see also `ArrayMethods`

    def copy(self) -> DTensor:
        """Return itself: it does not change."""
        return self

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        del memo
        return self

    def value(self) -> DTensor:
        """Return itself, so that a function takes variables and arrays alike: a gradient is of a variable's value."""
        return self

    read_value = value

    def astype(self, dtype: npt.DTypeLike) -> DTensor:
        """Return it with another element type."""
        result: DTensor = _function("astype", "astype")(self, dtype)
        return result


def moved(ref: Ref, layout: Layout) -> Ref:
    """Return an array on the devices in another layout, its terms combined; itself if there is nothing to do."""
    for of in way_to(layout, ref.type):
        ref = session_of(layout.mesh).move(ref, of)
    return ref


def _function(function: Any, name: str) -> Callable[..., Any]:
    if (handler := FUNCTIONS.get(function)) is None:
        raise unsupported(name)
    return handler


def unsupported(name: str, why: str = "") -> UnsupportedFunctionError:
    """Return the error of a function that is not available for global arrays, with the ways out."""
    here = "array.full()[index]" if name == "indexing" else f"np.{name.removeprefix('numpy.')}(array.full())"
    return UnsupportedFunctionError(
        f"{name} is not available for global arrays{f' {why}' if why else ''}. Either fetch the array and call it here"
        f": {here}; or write it with functions that docs/spmd.md lists"
    )
