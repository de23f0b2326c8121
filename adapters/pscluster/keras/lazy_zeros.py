"""Tables of a model as it is made on a worker: zeros that take no memory, where Keras would make initial values.

Those that count are on the servers. Keras' initializers would take up to four times the memory of a table, on each
worker, which has no use for it. Code in `model_fn` that writes to such a weight, or reads it, does so as to any other.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np

from pscluster.core.dtypes import dtype_named
from pscluster.ps.handles.indexing import Array

_paths: ContextVar[frozenset[str]] = ContextVar("paths of tables", default=frozenset())


@contextlib.contextmanager
def zeros_for(paths: frozenset[str]) -> Iterator[None]:
    """Have embeddings that the block makes begin with such zeros, if their weights have these paths.

    Only one thread at a time may call it; models that others make meanwhile are made as always.
    """
    import keras

    layer = keras.layers.Embedding
    add_weight = layer.add_weight

    def add(self: Any, *arguments: Any, **options: Any) -> Any:
        if f"{self.path}/{options.get('name')}" in _paths.get():
            options["initializer"] = lazy_zeros
        return add_weight(self, *arguments, **options)

    token = _paths.set(paths)
    layer.add_weight = add
    try:
        yield
    finally:
        layer.add_weight = add_weight
        _paths.reset(token)


def lazy_zeros(shape: tuple[int, ...], dtype: Any = None) -> Any:
    """Return zeros in memory that the system provides page by page, once they are written: an initializer of Keras.

    On another device than a CPU they are there at once.
    """
    import keras

    kind = dtype_named(str(dtype))
    count = math.prod(shape)
    space = mmap.mmap(-1, max(1, count * kind.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros: Array = np.frombuffer(space, kind, count).reshape(shape)
    # Not by Keras' own conversion, which copies.
    if keras.config.backend() == "jax":
        from pscluster.jax.arrays import on_device

        return on_device([zeros])[0]
    from pscluster.torch.tensors import tensor_of

    return tensor_of(zeros)
