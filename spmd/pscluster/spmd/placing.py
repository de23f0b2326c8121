"""Arrays from here to the devices, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pscluster.core.checks import type_of
from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import LayoutError, MisuseError, PackError
from pscluster.core.layouts.layout import Layout
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
    blocks = {
        shard: np.array(whole[block.slices], order="C", ndmin=whole.ndim)
        for shard, block in enumerate(layout.partition(whole.shape).blocks)
    }
    return DTensor(session_of(layout.mesh).load(ArrayType(whole.shape, whole.dtype, layout), blocks))


copy_to_mesh = distribute


def pack(components: Any, layout: Layout) -> DTensor:
    """Return the global array whose blocks are these: one for each device, in their order.

    Raises PackError if there are not as many as devices, they differ in rank or element type, their shapes are not
    those of one array (whose axes are cut as `numpy.array_split` does), or replicas differ.
    """
    check_is_layout(layout)
    mesh = layout.mesh
    if isinstance(components, np.ndarray | DTensor) or not isinstance(components, Sequence):
        raise PackError(f"pack takes a list of components, one for each device, not {type_of(components)}")
    if len(components) != mesh.size:
        raise PackError(f"there are {len(components)} components, but the mesh has {mesh.size} devices: give one each")
    arrays = [numeric(component) for component in components]
    first = arrays[0]
    for device, array in enumerate(arrays):
        if array.ndim != layout.rank:
            raise PackError(
                f"component {device} has shape {array.shape}, but the layout [{', '.join(layout.specs)}] is for arrays "
                f"with {layout.rank} axes, as the global array and each of its components have"
            )
        if array.dtype != first.dtype:
            raise PackError(
                f"component {device} is {array.dtype}, but component 0 is {first.dtype}: convert one of them"
            )
    shape = tuple(_length(arrays, layout, axis) for axis in range(layout.rank))
    blocks: dict[int, Array] = {}
    for device, array in enumerate(arrays):
        shard, wanted = layout.shard_of(device), layout.local_shape(shape, device)
        if array.shape != wanted:
            raise PackError(
                f"component {device} has shape {array.shape}, but of an array of shape {shape} in layout "
                f"[{', '.join(layout.specs)}] that device has a block of shape {wanted}"
            )
        if shard not in blocks:
            blocks[shard] = array.copy(order="C")
        elif blocks[shard].tobytes() != array.tobytes():
            owner = layout.owners[shard]
            raise PackError(
                f"components {owner} and {device} are replicas of one block by the layout [{', '.join(layout.specs)}], "
                "but they differ: give equal ones, or another layout"
            )
    return DTensor(session_of(mesh).load(ArrayType(shape, first.dtype, layout), blocks))


def _length(arrays: Sequence[Array], layout: Layout, axis: int) -> int:
    """Return the length of an axis of the whole: of the first device's pieces along the dimension that shards it."""
    mesh, spec = layout.mesh, layout.specs[axis]
    if spec not in mesh:
        return int(arrays[0].shape[axis])
    place = mesh.dim_names.index(spec)
    along = [device for device in range(mesh.size) if sum(mesh.coords(device)) == mesh.coords(device)[place]]
    return sum(int(arrays[device].shape[axis]) for device in along)


def unpack(tensor: DTensor, timeout: float | None = None) -> list[Array]:
    """Fetch the components of a global array: the block of each device, in their order."""
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
