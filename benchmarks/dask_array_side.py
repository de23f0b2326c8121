"""dask.array's side: two workers, each a process of one thread; arrays of two chunks."""

from __future__ import annotations

import contextlib
from typing import Any

import array_models as models
import dask.array
import distributed
import numpy as np
from dask_side import client_of_workers
from driver import Handlers, serve, timed


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the workers."""
    client = client_of_workers(stack)

    def persisted(array: Any, rows: int) -> Any:
        return client.persist(dask.array.from_array(array, chunks=(rows, *array.shape[1:])))

    data = [tuple(persisted(array, models.BATCH // 2) for array in batch) for batch in models.batches()]
    initial = [[persisted(value, len(value)) for value in values] for values in models.initial_state()]

    def train(n: int, at_once: int) -> float:
        def work() -> None:
            state = initial
            for _ in range(n // at_once):
                for x, classes in data[:at_once]:
                    state, loss = models.train_step(state, x, classes)
                flat = client.persist([*(value for values in state for value in values), loss])
                *flat, loss = flat
                state = [flat[nth : nth + 3] for nth in range(0, len(flat), 3)]
                distributed.wait(flat)
            float(loss.compute())

        return timed(work)

    return {"train": train}, {"dask": dask.__version__, "numpy": np.__version__}


if __name__ == "__main__":
    serve(start)
