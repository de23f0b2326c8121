"""The drivers of the update rules: blocks for dense gradients, rows for sparse ones, half precision for both.

A rule makes up to a dozen passes over its arrays, so it runs on blocks that fit in a core's second-level cache.
Sparse gradients gather rows of the parameter and its slots into such blocks and write them back. Rows are moved as
opaque items (a void view): each is a plain copy of bytes, aligned or not.

Half-precision parameters (float16, bfloat16) are computed in float32 and rounded once, when the block is written
back. Their slots should be float32 (`new_slots` makes them so), where the squares of small gradients are not 0.

Nothing here locks: the caller ensures exclusive access to the arrays. Each thread reuses its own buffers, a few MB at
most; temporaries never have the size of the parameter or the gradient, except for a few integers per row. NaN and
infinity follow IEEE arithmetic, without warnings: the caller refuses them beforehand, if it wants to.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pscluster.core.errors import InvalidUpdateError
from pscluster.ps.array_pool import aligned_full
from pscluster.ps.optim.buffers import items_of, workspace
from pscluster.ps.optim.precision import compute_dtype, is_real
from pscluster.ps.optim.row_sums import IN_RANGE, ROW_BLOCK, Groups, Ids, RowSums, add_rows
from pscluster.ps.optim.rule import Array, UpdateRule

# Elements. Measured with Adam and SGD in float32: half the size costs a tenth, twice the size gains nothing.
_BLOCK = 64 << 10

_PARAM = ""  # beside the slots' names


def new_slots(rule: UpdateRule, shape: tuple[int, ...], dtype: npt.DTypeLike) -> dict[str, Array]:
    """Return the slots of a parameter of that shape and dtype before its first gradient, by name."""
    slot_dtype = compute_dtype(dtype)
    return {name: aligned_full(shape, fill, slot_dtype) for name, fill in rule.slots.items()}


def apply_dense(rule: UpdateRule, param: Array, grad: Array, slots: Mapping[str, Array], step: int) -> None:
    """Apply a gradient for every element, to the parameter and its slots in place.

    Args:
        param: any shape, usually flat; C-contiguous, of a dtype that `compute_dtype` takes.
        grad: of the same shape, of any real floating dtype; may be read-only and unaligned.
        slots: one array of the same shape for each slot of the rule, C-contiguous, param's dtype or float32.
        step: the number of gradients the parameter has had, including this one.

    Raises:
        InvalidUpdateError: shapes, dtypes or slots do not fit. Nothing was changed.
    """
    _check(rule, param, slots)
    if grad.shape != param.shape:
        raise InvalidUpdateError(f"a gradient of shape {grad.shape} for a variable of shape {param.shape}")
    _check_gradient(grad)
    if not param.size:
        return
    workspace.begin()
    with np.errstate(all="ignore"):
        kernel = _Kernel(rule, step, min(_BLOCK, param.size), param, grad, slots)
        kernel.whole(param.reshape(-1), grad.reshape(-1), {name: slots[name].reshape(-1) for name in rule.slots})


def apply_rows(
    rule: UpdateRule,
    param: Array,
    ids: Ids,
    grads: Array,
    slots: Mapping[str, Array],
    step: int,
    *,
    distinct: bool = False,
) -> None:
    """Apply a sparse gradient to these rows of the parameter and its slots, in place.

    Rows of equal ids are first summed, in the type of the computation and in the order given: the sums depend on
    nothing else. Slots are lazy: those of other rows are neither decayed nor averaged, but the step counts for all
    rows.

    Args:
        param, slots, step: as for `apply_dense`, with arrays of shape (rows, width). Rows of `param` may lie apart.
        ids: shape (n,), int64, each in 0..rows - 1, which the caller has checked.
        grads: shape (n, width), of any real floating dtype; may be read-only and unaligned.
        distinct: whether the caller knows that no id is there twice; then they are taken in the order given.

    Raises:
        InvalidUpdateError: shapes, dtypes or slots do not fit. Nothing was changed.
    """
    _check(rule, param, slots, rows=True)
    if param.ndim != 2 or ids.ndim != 1 or grads.shape != (len(ids), param.shape[1]):
        raise InvalidUpdateError(
            f"rows of shape {grads.shape} for ids of shape {ids.shape} and a variable of shape {param.shape}"
        )
    _check_gradient(grads)
    if ids.dtype != np.int64:
        raise InvalidUpdateError(f"ids of dtype {ids.dtype}, but they must be int64")
    if not grads.size:
        return
    groups = Groups(ids) if distinct else Groups.of(ids)
    workspace.begin()
    with np.errstate(all="ignore"):
        if param.shape[1] > ROW_BLOCK:
            _apply_wide_rows(rule, param, groups, grads, slots, step)
        else:
            _apply_narrow_rows(rule, param, groups, grads, slots, step)


def _apply_narrow_rows(
    rule: UpdateRule, param: Array, groups: Groups, grads: Array, slots: Mapping[str, Array], step: int
) -> None:
    """Update blocks of several rows each."""
    width = param.shape[1]
    many = min(ROW_BLOCK // width, len(groups.ids))
    kernel = _Kernel(rule, step, many * width, param, grads, slots)
    sums = RowSums(groups, grads, many, kernel.dtype)
    tables = {_PARAM: param} | {name: slots[name] for name in rule.slots}
    blocks = {name: workspace.array((many, width), table.dtype) for name, table in tables.items()}
    moves = [(items_of(table), items_of(blocks[name])) for name, table in tables.items()]
    for start in range(0, len(groups.ids), many):
        touched = groups.ids[start : start + many]
        size = len(touched)
        for table, rows in moves:
            if table.flags.c_contiguous:
                np.take(table, touched, out=rows[:size], mode=IN_RANGE)
            else:  # of which `take` would copy all first
                rows[:size] = table[touched]
        flat = {name: rows[:size].reshape(-1) for name, rows in blocks.items()}
        kernel.block(flat.pop(_PARAM), sums.block(start, start + size).reshape(-1), flat)
        for table, rows in moves:
            table[touched] = rows[:size]


def _apply_wide_rows(
    rule: UpdateRule, param: Array, groups: Groups, grads: Array, slots: Mapping[str, Array], step: int
) -> None:
    """Update rows of several blocks each, in place."""
    kernel = _Kernel(rule, step, _BLOCK, param, grads, slots)
    for index, row in enumerate(groups.ids.tolist()):
        first, *more = groups.positions(index)
        grad = grads[first]
        if more:
            grad = grad.astype(kernel.dtype)
            add_rows(grad, grads, more)
        kernel.whole(param[row], grad, {name: slots[name][row] for name in rule.slots})


def _check(rule: UpdateRule, param: Array, slots: Mapping[str, Array], *, rows: bool = False) -> None:
    """Refuse arrays with which an update would fail halfway, or write to a copy.

    `rows`: those of `param` may lie apart.
    """
    allowed = (param.dtype, compute_dtype(param.dtype))
    for name in rule.slots:
        if name not in slots:
            raise InvalidUpdateError(f"{rule.name} needs a slot {name!r}; given were {sorted(slots)}")
        slot = slots[name]
        if slot.shape != param.shape:
            raise InvalidUpdateError(f"slot {name!r} has shape {slot.shape}, its variable {param.shape}")
        if slot.dtype not in allowed:
            raise InvalidUpdateError(f"slot {name!r} is {slot.dtype}, but must be {allowed[1]} or the variable's dtype")
    apart = rows and param.ndim == 2 and param.strides[1] == param.itemsize
    for array in (param, *(slots[name] for name in rule.slots)):
        if not ((array.flags.c_contiguous or (apart and array is param)) and array.flags.writeable):
            raise InvalidUpdateError("a variable and its slots must be contiguous, writeable arrays")


def _check_gradient(grad: Array) -> None:
    if not is_real(grad.dtype):
        raise InvalidUpdateError(f"a gradient of dtype {grad.dtype}: make it a real floating type")


class _Kernel:
    """A rule at one step, with buffers for its blocks."""

    def __init__(
        self, rule: UpdateRule, step: int, size: int, param: Array, grad: Array, slots: Mapping[str, Array]
    ) -> None:
        self.dtype = compute_dtype(param.dtype)
        self._rule = rule
        self._scalars = rule.scalars(step)
        self._size = size
        self._scratch = [self._buffer() for _ in range(rule.scratch)]
        self._param = None if param.dtype == self.dtype else self._buffer()
        self._slots = {name: self._buffer() for name in rule.slots if slots[name].dtype != self.dtype}
        self._grad = None if self._is_ready(grad) else self._buffer()

    def whole(self, param: Array, grad: Array, slots: Mapping[str, Array]) -> None:
        """Update flat arrays of any size."""
        for start in range(0, param.size, self._size):
            span = slice(start, start + self._size)
            self.block(param[span], grad[span], {name: slot[span] for name, slot in slots.items()})

    def block(self, param: Array, grad: Array, slots: Mapping[str, Array]) -> None:
        """Update flat arrays of a block's size or less."""
        p = _loaded(param, self._param)
        g = grad if self._is_ready(grad) else _loaded(grad, self._grad)
        s = {name: _loaded(slot, self._slots.get(name)) for name, slot in slots.items()}
        self._rule.apply(p, g, s, self._scalars, [buffer[: param.size] for buffer in self._scratch])
        if p is not param:
            np.copyto(param, p, casting="unsafe")
        for name in self._slots:
            np.copyto(slots[name], s[name], casting="unsafe")

    def _buffer(self) -> Array:
        return workspace.array((self._size,), self.dtype)

    def _is_ready(self, grad: Array) -> bool:
        """Return whether a gradient needs no copy. Arithmetic on unaligned numbers is slow, copying them is not."""
        return grad.dtype == self.dtype and grad.flags.aligned


def _loaded(values: Array, buffer: Array | None) -> Array:
    """Return the values themselves, or in the buffer if there is one."""
    if buffer is None:
        return values
    loaded = buffer[: values.size]
    np.copyto(loaded, values, casting="unsafe")
    return loaded
