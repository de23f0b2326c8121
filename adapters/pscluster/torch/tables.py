"""Tables of a served module: the weights of embeddings, of which a step has only the rows that it looks up.

Such a weight has the shape of the table, and no memory. `nn.functional.embedding` and `embedding_bag`, which the
modules call, are given it, and fetch the rows of their ids: a leaf of autograd for each lookup, in the order of its
ids, so that nothing is gathered twice. A lookup of the same ids as one before in the step has the same leaf.

The weight's gradient, which `clip_grad_norm_` and the like ask for, has a row for each distinct id: the leaves' rows of
equal ids are summed when it is asked for, and what is done to it counts. If it never is, the step pushes the leaves'
rows as they are, and the client sums them, as with any `IndexedSlices`.

Whatever would take the weight for the whole table is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pscluster.core.errors import MisuseError
from pscluster.ps.handles.gradients.parameters import distinct
from pscluster.ps.handles.indexing import Array, Ids, IndexedSlices
from pscluster.ps.handles.reads import distinct_rows
from pscluster.ps.handles.variables.variable import Variable
from pscluster.torch.structure import Owner
from pscluster.torch.tensors import array_of, tensor_of

_KNOWN_WITHOUT_VALUES = frozenset(
    [
        *(torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__),
        *(torch.Tensor.requires_grad.__get__, torch.Tensor.requires_grad.__set__, torch.Tensor.requires_grad_),
        *(torch.Tensor.is_leaf.__get__, torch.Tensor.grad_fn.__get__),
        *(torch.Tensor.ndim.__get__, torch.Tensor.layout.__get__, torch.Tensor.is_sparse.__get__),
        *(torch.Tensor.is_cuda.__get__, torch.Tensor.is_meta.__get__),
        *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.__len__),
        *(torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.element_size),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.__hash__),
    ]
)
"""What may be asked of a table's weight, and set."""


class TableWeight(nn.Parameter):  # type: ignore[misc]  # untyped where torch is not installed
    """The weight of a table. Lookups by it take ids of the whole table; nothing else may use its values."""

    table: Table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is functional.embedding or func is functional.embedding_bag:
            ids, weight = args[:2]
            return weight.table.look_up(func, ids, dict(kwargs or {}))
        if func not in _KNOWN_WITHOUT_VALUES:
            names = [repr(arg.table.name) for arg in args if isinstance(arg, TableWeight)] or ["the weight of a table"]
            raise MisuseError(
                f"{names[0]} is served as a table, of which a step has only the rows that it looks up: "
                f"{torch.overrides.resolve_name(func)} needs all of it. Leave it out of tables=, and sparse=True out "
                "of its module, to have it served whole"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the rows that the step has looked up, each once, by ascending id."""
        return self.table.summed_gradient()

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        self.table.replace_gradient(gradient)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        del tensor_contents
        return f"<weight of table {self.table.name!r}>"


def _not_compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiled code calls as it is: it asks servers for rows.

    `torch.compiler.disable` alone would import the compiler, which takes seconds, also where nothing is compiled.
    """
    disabled: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return forward(*args, **kwargs)
            disabled = torch.compiler.disable(forward)
        return disabled(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what `torch.compiler.disable` sets
    return call


class _Lookup(NamedTuple):
    """What a step has looked up."""

    ids: Ids
    rows: Any  # the leaf, (ids, width)
    padding: int | None
    by_frequency: bool

    def gradient(self) -> tuple[Ids, Array] | None:
        """Return its gradient by ids, of which some may be equal; None if it has none."""
        if self.rows.grad is None:
            return None
        ids, gradient = self.ids, array_of(self.rows.grad)
        if self.by_frequency:
            unique, which = distinct(ids)
            counts = np.bincount(which, minlength=len(unique))
            gradient = gradient / counts[which][:, None].astype(gradient.dtype)
        if self.padding is not None and (at := ids != self.padding).sum() < len(ids):
            ids, gradient = ids[at], gradient[at]
        return ids, gradient


class Table:
    """One table of one module on this worker; for one step after another."""

    def __init__(self, name: str, owners: Sequence[Owner], like: torch.Tensor) -> None:
        self.name = name
        self._device = like.device if like.device.type != "meta" else torch.device("cpu")
        none = torch.zeros((1, 1), dtype=like.dtype, device=self._device).expand(like.shape)
        self.weight = weight = TableWeight(none, requires_grad=like.requires_grad)
        weight.table = self
        for owner in owners:
            owner.module._parameters[owner.attribute] = weight
            owner.module.forward = _not_compiled(owner.module.forward)
        self._variable: Variable | None = None
        self._fetched: tuple[Ids, Array] | None = None
        self._lookups: list[_Lookup] = []
        self._summed: tuple[Ids, torch.Tensor] | None = None

    def begin(self, variable: Variable) -> None:
        """Begin a step, without rows."""
        self._variable = variable

    def end(self) -> None:
        """Forget the rows, and the gradient."""
        self._variable = self._fetched = self._summed = None
        self._lookups = []

    def give_rows(self, ids: Ids, rows: Array) -> None:
        """Give the rows, in the order of the ids, for a lookup of exactly these."""
        self._fetched = ids, rows

    def look_up(self, function: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Call `embedding` or `embedding_bag` with the rows of these ids."""
        if self._variable is None:
            raise MisuseError(
                f"{self.name!r} is served as a table, and was looked up outside of `with served.step() as module:`"
            )
        if options.get("max_norm") is not None:
            raise MisuseError(f"{self.name!r}: max_norm would change rows here, as they are looked up: leave it out")
        flat = array_of(ids).reshape(-1)
        padding = options.get("padding_idx")
        if padding is not None:
            padding %= self._variable.shape[0]
        rows = self._rows(flat, padding, bool(options.get("scale_grad_by_freq")))
        if function is functional.embedding:
            result: torch.Tensor = rows.view(*ids.shape, rows.shape[1])
            return result
        places = np.arange(len(flat))
        if padding is not None:
            is_padding = flat == padding
            options["padding_idx"] = int(is_padding.argmax()) if is_padding.any() else None
            places[is_padding] = options["padding_idx"] or 0
        if options.get("offsets") is not None:
            options["offsets"] = options["offsets"].to(torch.int64)
        options["sparse"] = options["scale_grad_by_freq"] = False
        local = torch.from_numpy(places).view(ids.shape).to(ids.device)
        bags: torch.Tensor = functional.embedding_bag(local, rows, **options)
        return bags

    def _rows(self, flat: Ids, padding: int | None, by_frequency: bool) -> Any:
        """Return the leaf with the rows of these ids, in their order. InvalidUpdateError if one is no row."""
        for lookup in self._lookups:
            same = lookup.padding == padding and not by_frequency and not lookup.by_frequency
            if same and np.array_equal(lookup.ids, flat):
                return lookup.rows
        assert self._variable is not None
        if self._fetched is not None and (self._fetched[0] is flat or np.array_equal(self._fetched[0], flat)):
            flat, rows = self._fetched
            self._fetched = None
        else:
            flat = self._variable.row_ids(flat).copy()  # the ids are the step's to change
            (rows,) = distinct_rows([(self._variable, flat)])
        leaf = tensor_of(rows).to(self._device)
        if self.weight.requires_grad:
            leaf.requires_grad_()
        self._lookups.append(_Lookup(flat, leaf, padding, by_frequency))
        return leaf

    # The gradient

    def _taken(self) -> list[tuple[Ids, Array]]:
        """Return the gradients of lookups."""
        return [gradient for lookup in self._lookups if (gradient := lookup.gradient()) is not None]

    def summed_gradient(self) -> torch.Tensor | None:
        """Return the gradient with a row for each distinct id; it is what the step will push. None if there is none."""
        parts = self._taken()
        if not parts:
            return None if self._summed is None else self._summed[1]
        if self._summed is not None:
            parts.append((self._summed[0], array_of(self._summed[1])))
        ids, which = distinct(np.concatenate([ids for ids, _ in parts]))
        rows = torch.cat([tensor_of(rows) for _, rows in parts])
        summed = torch.zeros((len(ids), rows.shape[1]), dtype=rows.dtype).index_add_(0, torch.from_numpy(which), rows)
        self._summed = ids, summed.to(self._device)
        self._drop()
        return self._summed[1]

    def _drop(self) -> None:
        for lookup in self._lookups:
            lookup.rows.grad = None

    def replace_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set what `summed_gradient` returns, with its rows; None: there is none."""
        if gradient is None:
            self._summed = None
            self._drop()
            return
        known = self.summed_gradient()
        if self._summed is None or known is None or known.shape != gradient.shape:
            raise MisuseError(
                f"the gradient of table {self.name!r} can be replaced only by one with as many rows: it has "
                f"{'none' if known is None else len(known)}, and was set to {tuple(gradient.shape)}"
            )
        self._summed = self._summed[0], gradient

    def gradient(self) -> IndexedSlices | None:
        """Return the gradient to push, by rows; None if there is none."""
        parts = self._taken()
        if self._summed is not None:
            parts.append((self._summed[0], array_of(self._summed[1])))
        if not parts:
            return None
        if len(parts) == 1:
            return IndexedSlices(parts[0][1], parts[0][0])
        return IndexedSlices(np.concatenate([rows for _, rows in parts]), np.concatenate([ids for ids, _ in parts]))
