"""Arrays from here to the devices, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import LayoutError, MisuseError, PackError
from pscluster.core.layouts.layout import Layout
from pscluster.core.transport.frames import view
from pscluster.spmd.meshes import session_of
from pscluster.spmd.tensor import DTensor
from pscluster.worker.programs.program import ArrayType

Array = npt.NDArray[Any]


def distribute(array: npt.ArrayLike | DTensor, layout: Layout, *, dtype: npt.DTypeLike | None = None) -> DTensor:
    """Return a global array with these values: each device gets only its own block.

    Args:
        array: anything that NumPy makes an array of numbers of; it may change afterwards. A DTensor is relaid out.
        layout: as many specs as the array has axes.
        dtype: of the result. None: the array's.

    Raises:
        LayoutError: the layout does not fit the array; a DTensor lies on another mesh.
        MisuseError: it is not an array of numbers.
    """
    check_is_layout(layout)
    if isinstance(array, DTensor):
        return array.relayout(layout) if dtype is None else array.relayout(layout).astype(dtype)
    whole = numeric(array, dtype)
    layout.check_shape(whole.shape)
    session = session_of(layout.mesh)
    cut = layout.partition(whole.shape).blocks
    blocks = {
        shard: np.array(whole[cut[shard].slices], order="C", ndmin=whole.ndim)
        for shard in dict.fromkeys(map(layout.shard_of, session.devices))
    }
    return DTensor(session.load(ArrayType(whole.shape, whole.dtype, layout), blocks))


copy_to_mesh = distribute


def pack(components: Any, layout: Layout) -> DTensor:
    """Return the global array whose blocks are these: one for each device, in their order.

    Of several clients, each gives those of its own devices.

    Raises PackError if there are not as many as devices, they differ in rank or element type, their shapes are not
    those of one array (whose axes are cut as `numpy.array_split` does), or replicas differ.
    """
    check_is_layout(layout)
    session = session_of(layout.mesh)
    if isinstance(components, np.ndarray | DTensor) or not isinstance(components, Sequence):
        raise PackError(f"pack takes a list of components, one for each device, not {type_of(components)}")
    if len(components) != len(session.devices):
        raise PackError(
            f"there are {len(components)} components, but the mesh has {len(session.devices)} devices"
            f"{' here' if len(session.devices) < layout.mesh.size else ''}: give one each"
        )
    arrays = [numeric(component) for component in components]
    compared = len(layout.owners) < layout.mesh.size  # else there are no replicas
    every = [_Component(*facts) for facts in session.gather([_facts_of(array, compared) for array in arrays])]
    shape = _check_components(every, layout)
    blocks: dict[int, Array] = {}
    for device, array in zip(session.devices, arrays, strict=True):
        if (shard := layout.shard_of(device)) not in blocks:
            blocks[shard] = array.copy(order="C")
    return DTensor(session.load(ArrayType(shape, arrays[0].dtype, layout), blocks))


class _Component(NamedTuple):
    """What is compared of a component."""

    shape: list[int]
    dtype: str
    digest: str


def _facts_of(array: Array, compared: bool) -> list[Any]:
    digest = xxhash.xxh3_128_hexdigest(view(np.ascontiguousarray(array))) if compared else ""
    return [list(array.shape), array.dtype.name, digest]


def _check_components(every: Sequence[_Component], layout: Layout) -> tuple[int, ...]:
    """Return the shape of the array whose blocks these are, by device. Raise PackError if there is none."""
    first = every[0]
    specs = f"[{', '.join(layout.specs)}]"
    for device, (own, dtype, _) in enumerate(every):
        if len(own) != layout.rank:
            raise PackError(
                f"component {device} has shape {tuple(own)}, but the layout {specs} is for arrays with {layout.rank} "
                "axes, as the global array and each of its components have"
            )
        if dtype != first.dtype:
            raise PackError(f"component {device} is {dtype}, but component 0 is {first.dtype}: convert one of them")
    shape = layout.whole_shape([component.shape for component in every])
    for device, (own, _, digest) in enumerate(every):
        if tuple(own) != (wanted := layout.local_shape(shape, device)):
            raise PackError(
                f"component {device} has shape {tuple(own)}, but of an array of shape {shape} in layout {specs} that "
                f"device has a block of shape {wanted}"
            )
        owner = layout.owners[layout.shard_of(device)]
        if digest != every[owner].digest:
            raise PackError(
                f"components {owner} and {device} are replicas of one block by the layout {specs}, but they differ: "
                "give equal ones, or another layout"
            )
    return shape


def unpack(tensor: DTensor, timeout: float | None = None) -> list[Array]:
    """Fetch the components of a global array: the block of each device, in their order; of a client's own devices."""
    return _checked(tensor, "unpack").components(timeout)


def relayout(tensor: DTensor, layout: Layout | Sequence[Any]) -> DTensor:
    """Return the same array in another layout: see `DTensor.relayout`."""
    return _checked(tensor, "relayout").relayout(layout)


def relayout_like(tensor: DTensor, other: DTensor) -> DTensor:
    """Return the same array in the layout of another one."""
    return _checked(tensor, "relayout_like").relayout_like(_checked(other, "relayout_like"))


def fetch_layout(tensor: DTensor) -> Layout:
    """Return the layout of a global array."""
    return _checked(tensor, "fetch_layout").layout


def check_layout(tensor: DTensor, layout: Layout) -> None:
    """Raise LayoutError if a global array has another layout."""
    if (found := fetch_layout(tensor)) != layout:
        raise LayoutError(f"the layout is {found!r}, not {layout!r}")


def is_dtensor(value: object) -> bool:
    """Return whether a value is a global array."""
    return isinstance(value, DTensor)


def numeric(value: Any, dtype: npt.DTypeLike | None = None) -> Array:
    """Return a user's value as an array of numbers, in native byte order. Raise MisuseError if it is none."""
    try:
        array = array_of(value)
        array = array if dtype is None else array.astype(dtype)
    except (ValueError, TypeError) as error:  # such as a ragged list
        raise MisuseError(f"{type_of(value)} is not an array: {error}") from None
    if not is_variable_dtype(array.dtype):
        raise MisuseError(f"a global array holds numbers or bools, not {array.dtype}: convert it with astype()")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_is_layout(layout: object) -> None:
    """Raise LayoutError if it is none."""
    if not isinstance(layout, Layout):
        raise LayoutError(f"a Layout is needed, not {type_of(layout)}: give Layout(specs, mesh)")


def _checked(tensor: Any, function: str) -> DTensor:
    if not isinstance(tensor, DTensor):
        raise MisuseError(f"{function} takes a global array, not {type_of(tensor)}: make one by distribute()")
    return tensor
