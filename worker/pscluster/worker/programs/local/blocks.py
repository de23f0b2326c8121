"""A plain function called for each device on its blocks of arrays, and what it returns as blocks of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pscluster.core.dtypes import array_of, is_variable_dtype
from pscluster.core.errors import MisuseError
from pscluster.core.layouts.layout import Layout
from pscluster.core.layouts.mesh import Mesh
from pscluster.core.transport.frames import view
from pscluster.core.values import describe, map_structure
from pscluster.worker.programs.exchange import Exchange
from pscluster.worker.programs.local.calls import LocalCalls
from pscluster.worker.programs.local.rounds import ArrayShape, Ended, named
from pscluster.worker.programs.program import ArrayType
from pscluster.worker.programs.store import Blocks

Array = npt.NDArray[Any]

LocalFunction = tuple[Callable[..., Any], Sequence[Any], Any]
"""A function, its arguments with the numbers of operands in place of arrays, and its result with those of results."""


def called(
    function: LocalFunction,
    mesh: Mesh,
    exchange: Exchange,
    operands: Sequence[Blocks],
    wanted: Sequence[ArrayType | Layout],
    *,
    check: bool,
) -> list[Blocks]:
    """Call a function for each device of this task, and return its results as this task's blocks.

    Args:
        wanted: the types of the results; or their layouts, if shapes and element types follow from the blocks.
        check: whether blocks that are replicas by their layout are compared.

    Raises:
        MisuseError: blocks do not make such arrays, or replicas differ; the same on all tasks.
        any error: see `LocalCalls.run`.
    """
    fn, arguments, structure = function
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    layouts = [of.layout if isinstance(of, ArrayType) else of for of in wanted]
    made: dict[int, list[Array]] = {}

    def run(device: int) -> Ended:
        blocks = [_read_only(operand.of[device]) for operand in operands]
        returned = fn(*map_structure(blocks.__getitem__, list(arguments)))
        leaves = dict(_leaves(structure, returned, "", name))
        made[device] = arrays = [_array(leaves[at], name) for at in range(len(layouts))]
        for nth, (array, of) in enumerate(zip(arrays, wanted, strict=True)):
            if isinstance(of, ArrayType):
                _check(ArrayShape(array.dtype.name, array.shape), of, device, _result(name, nth, len(arrays)))
        digests = [
            xxhash.xxh3_64_intdigest(view(array)) if check and len(layout.owners) < mesh.size else 0
            for array, layout in zip(arrays, layouts, strict=True)
        ]
        return Ended(tuple(ArrayShape(array.dtype.name, array.shape) for array in arrays), tuple(digests))

    devices = mesh.devices_of(exchange.task)
    ended = LocalCalls(mesh, exchange, f"local_map({name})").run(devices, run)
    results = []
    for nth, of in enumerate(wanted):
        what = _result(name, nth, len(wanted))
        known = of if isinstance(of, ArrayType) else _derived(of, nth, ended, what)
        shared = _shared(known, nth, ended, what, check=check)
        results.append(Blocks(known, {device: made[shared.get(device, device)][nth] for device in devices}))
    return results


def type_as_arrays(of: ArrayType) -> list[Array]:
    """Return shape and element type of an array, in arrays, which can be fetched; see `type_of_arrays`."""
    return [np.array(of.shape, np.int64), np.frombuffer(of.dtype.name.encode(), np.uint8)]


def type_of_arrays(shape: Array, dtype: Array, layout: Layout) -> ArrayType:
    """Return what `type_as_arrays` was given."""
    return ArrayType(tuple(shape.tolist()), np.dtype(dtype.tobytes().decode()), layout)


def _result(name: str, nth: int, count: int) -> str:
    return f"the result of {name}" if count == 1 else f"result {nth} of {name}"


def _read_only(block: Array) -> Array:
    """Return a view that can't be written to: blocks are shared, and do not change."""
    seen = block.view()
    seen.flags.writeable = False
    return seen


def _leaves(structure: Any, value: Any, path: str, name: str) -> Iterator[tuple[int, Any]]:
    """Yield what stands in a returned value where the structure has numbers, with these."""
    if isinstance(structure, dict):
        if not isinstance(value, Mapping) or value.keys() != structure.keys():
            raise MisuseError(f"{name} has returned {describe(value)}{path}, where out_layouts has {list(structure)}")
        for key, inner in structure.items():
            yield from _leaves(inner, value[key], f"{path}[{key!r}]", name)
    elif isinstance(structure, list | tuple):
        if not isinstance(value, list | tuple) or len(value) != len(structure):
            count = f"{len(value)} results" if isinstance(value, list | tuple) else describe(value)
            raise MisuseError(f"{name} has returned {count}{path}, where out_layouts has {len(structure)} layouts")
        for at, (inner, item) in enumerate(zip(structure, value, strict=True)):
            yield from _leaves(inner, item, f"{path}[{at}]", name)
    else:
        yield structure, value


def _array(value: Any, name: str) -> Array:
    """Return what a function has returned as an array of its own."""
    try:
        array = array_of(value)
    except (ValueError, TypeError) as error:  # such as a ragged list
        raise MisuseError(f"{name} has returned {describe(value)}, which is not an array: {error}") from None
    if not is_variable_dtype(array.dtype):
        raise MisuseError(f"{name} has returned {describe(value)}, of {array.dtype.name}: return arrays of numbers")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    # Its owner may change what can be written to, as a framework does that uses the memory again.
    return array.copy(order="C") if array.flags.writeable else np.ascontiguousarray(array).reshape(array.shape)


def _check(found: ArrayShape, of: ArrayType, device: int, label: str) -> None:
    """Raise MisuseError if a block is not that of an array."""
    wanted = of.layout.local_shape(of.shape, device)
    if (found.shape, found.dtype) != (wanted, of.dtype.name):
        raise MisuseError(
            f"{label} has shape {found.shape} and type {found.dtype} on {named(of.layout.mesh, device)}, where an "
            f"array of shape {of.shape} and type {of.dtype} in layout [{', '.join(of.layout.specs)}] has a block of "
            f"shape {wanted}"
        )


def _derived(layout: Layout, nth: int, ended: Mapping[int, Ended], label: str) -> ArrayType:
    """Return the type of the array that blocks make. Raise MisuseError if they make none."""
    blocks = [ended[device].results[nth] for device in range(layout.mesh.size)]
    for device, found in enumerate(blocks):
        if len(found.shape) != layout.rank:
            raise MisuseError(
                f"{label} has shape {found.shape} on {named(layout.mesh, device)}, but its layout "
                f"[{', '.join(layout.specs)}] is for arrays with {layout.rank} axes"
            )
    of = ArrayType(layout.whole_shape([found.shape for found in blocks]), np.dtype(blocks[0].dtype), layout)
    for device, found in enumerate(blocks):
        _check(found, of, device, label)
    return of


def _shared(of: ArrayType, nth: int, ended: Mapping[int, Ended], label: str, *, check: bool) -> dict[int, int]:
    """Return for devices of this task that have replicas which is the first to have that block.

    Raise MisuseError if they differ. Without a check none are known to be equal.
    """
    if not check:
        return {}
    mesh = of.layout.mesh
    for device in range(mesh.size):
        owner = of.layout.owners[of.layout.shard_of(device)]
        if ended[device].digests[nth] != ended[owner].digests[nth]:
            raise MisuseError(
                f"{label} differs between {named(mesh, owner)} and {named(mesh, device)}, which are replicas by the "
                f"layout [{', '.join(of.layout.specs)}]: combine it, such as by psum(), or give another layout"
            )
    first: dict[tuple[int, int], int] = {}
    return {
        device: first.setdefault((mesh.task_of[device], of.layout.shard_of(device)), device)
        for device in range(mesh.size)
    }
