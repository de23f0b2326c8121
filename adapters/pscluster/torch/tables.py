"""Tables of a served module: the weights of embeddings, of which a step has only the rows that it looks up.

Such a weight is a parameter with a row for each distinct id that the step has looked up, so its gradient is what the
step pushes, and what `clip_grad_norm_` sees. It has no rows when the step begins. `nn.functional.embedding` and
`embedding_bag`, which the modules call, are given ids that count these rows, whichever module calls them. A lookup of
further ids adds a second parameter with their rows, `weight_2`, and so on: each row is in one of them.

Anything that would take the weight for the whole table, such as a product with it, is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from pscluster.core.dtypes import array_of as numbers_of
from pscluster.core.errors import InvalidUpdateError, MisuseError
from pscluster.ps.handles.indexing import Array, Ids, IndexedSlices
from pscluster.ps.handles.parameters import distinct
from pscluster.ps.handles.variable import Variable, distinct_rows
from pscluster.torch.structure import Owner
from pscluster.torch.tensors import array_of, tensor_of

_REFUSED = frozenset(
    [
        *(functional.linear, torch.matmul, torch.mm, torch.mv, torch.bmm, torch.addmm, torch.einsum, torch.tensordot),
        *(torch.nn.functional.cosine_similarity, torch.cdist, torch.index_select, torch.gather, torch.take),
        *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.mv, torch.Tensor.bmm, torch.Tensor.addmm),
        *(torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.Tensor.__getitem__, torch.Tensor.index_select),
        *(torch.t, torch.transpose, torch.Tensor.t, torch.Tensor.transpose, torch.Tensor.T.__get__),
        *(torch.Tensor.mT.__get__, torch.Tensor.permute, torch.permute, torch.Tensor.gather, torch.Tensor.take),
    ]
)


class TableWeight(nn.Parameter):  # type: ignore[misc]  # untyped where torch is not installed
    """The rows of a table that a step has looked up. Lookups by it take ids of the whole table."""

    table: Table

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is functional.embedding or func is functional.embedding_bag:
            ids, weight = args[:2]
            return weight.table.look_up(func, ids, dict(kwargs or {}))
        if func in _REFUSED:
            names = [repr(arg.table.name) for arg in args if isinstance(arg, TableWeight)] or ["the weight of a table"]
            raise MisuseError(
                f"{names[0]} is served as a table, of which a step has only the rows that it looks up: "
                f"{torch.overrides.resolve_name(func)} needs all of it. Leave it out of tables=, and sparse=True out "
                "of its module, to have it served whole"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


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


class Table:
    """One table of one module on this worker; for one step after another."""

    def __init__(self, name: str, owners: Sequence[Owner], like: torch.Tensor) -> None:
        self.name, self._owners = name, owners
        self._device = like.device if like.device.type != "meta" else torch.device("cpu")
        self._is_trained = like.requires_grad
        # In memory of its own: the rows that the module was made with are freed.
        self._none = self._weight(torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=self._device))
        self._place("", self._none)
        for owner in owners:
            owner.module.forward = _not_compiled(owner.module.forward)
        self._variable: Variable | None = None
        self._parts: list[tuple[Ids, nn.Parameter]] = []
        self._last: tuple[Ids, Array] | None = None  # ids that were looked up, and the rows that they are of
        self._paddings: set[int | None] = set()

    def _weight(self, rows: torch.Tensor) -> TableWeight:
        weight = TableWeight(rows, requires_grad=self._is_trained)
        weight.table = self
        return weight

    def _place(self, suffix: str, weight: nn.Parameter) -> None:
        for owner in self._owners:
            owner.module._parameters[owner.attribute + suffix] = weight

    def begin(self, variable: Variable) -> None:
        """Begin a step, without rows."""
        self._variable = variable

    def end(self) -> None:
        """Forget the rows, and the gradient."""
        for number in range(2, len(self._parts) + 1):
            for owner in self._owners:
                owner.module._parameters.pop(f"{owner.attribute}_{number}", None)
        self._place("", self._none)
        self._variable, self._parts, self._last = None, [], None
        self._paddings.clear()

    def wanted(self, ids: Any) -> Ids:
        """Return the distinct ones of ids that the step will look up first. InvalidUpdateError if one is no row."""
        assert self._variable is not None
        flat = self._variable.row_ids(numbers_of(ids)).reshape(-1)
        unique, inverse = distinct(flat)
        self._last = flat, inverse
        return unique

    def add_rows(self, ids: Ids, rows: Array) -> None:
        """Add rows of further distinct ids, ascending."""
        # A new parameter: autograd remembers the shape of one for as long as a loss of an earlier step exists.
        weight = self._weight(tensor_of(rows).to(self._device))
        self._parts.append((ids, weight))
        self._place("" if len(self._parts) == 1 else f"_{len(self._parts)}", weight)

    def look_up(self, function: Any, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Call `embedding` or `embedding_bag` with the rows of these ids."""
        if self._variable is None:
            raise MisuseError(
                f"{self.name!r} is served as a table, and was looked up outside of `with served.step() as module:`"
            )
        if options.get("max_norm") is not None:
            raise MisuseError(f"{self.name!r}: max_norm would change rows here, as they are looked up: leave it out")
        places = self._places(array_of(ids).reshape(-1))
        options["sparse"] = False  # there is a gradient for the rows of this step only
        if (padding := options.get("padding_idx")) is not None:
            padding %= self._variable.shape[0]
            options["padding_idx"] = self._place_of(padding)
        self._paddings.add(padding)
        if options.get("offsets") is not None:
            options["offsets"] = options["offsets"].to(torch.int64)
        local = torch.from_numpy(places.reshape(tuple(ids.shape))).to(ids.device)
        with torch._C.DisableTorchFunctionSubclass():
            weights = [weight for _, weight in self._parts]
            result: torch.Tensor = function(local, weights[0] if len(weights) == 1 else torch.cat(weights), **options)
        return result

    def _places(self, flat: Ids) -> Ids:
        """Return which of the rows here those of these ids are; fetch them first if they are not here."""
        if self._last is not None and np.array_equal(self._last[0], flat):
            return self._last[1]
        assert self._variable is not None
        flat = self._variable.row_ids(flat)
        unique, inverse = distinct(flat)
        if self._parts:
            known = np.concatenate([ids for ids, _ in self._parts])
            new = np.setdiff1d(unique, known, assume_unique=True)
        else:
            known, new = unique[:0], unique
        if len(new) or not self._parts:
            (rows,) = distinct_rows([(self._variable, new)])
            self.add_rows(new, rows)
            known = np.concatenate([known, new])
        if len(self._parts) > 1 or len(known) != len(unique):
            order = np.argsort(known)
            inverse = order[np.searchsorted(known, unique, sorter=order)][inverse]
        self._last = flat.copy(), inverse
        return inverse

    def _place_of(self, row: int) -> int | None:
        start = 0
        for ids, _ in self._parts:
            place = int(np.searchsorted(ids, row))
            if place < len(ids) and ids[place] == row:
                return start + place
            start += len(ids)
        return None

    def gradient(self) -> IndexedSlices | None:
        """Return the gradient by rows, each once; None if there is none. Padding has none."""
        found = [(ids, weight.grad) for ids, weight in self._parts if weight.grad is not None]
        if not found:
            return None
        ids = np.concatenate([ids for ids, _ in found]) if len(found) > 1 else found[0][0]
        values = np.concatenate([array_of(rows) for _, rows in found]) if len(found) > 1 else array_of(found[0][1])
        if values.shape != (len(ids), *self._none.shape[1:]):
            raise InvalidUpdateError(f"the gradient of {self.name!r} has shape {values.shape}: it has {len(ids)} rows")
        if len(self._paddings) == 1 and (padding := next(iter(self._paddings))) is not None:
            kept = ids != padding
            if not kept.all():
                ids, values = ids[kept], values[kept]
        return IndexedSlices(values, ids)
