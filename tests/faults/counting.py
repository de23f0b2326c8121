"""Variables whose right values are known exactly, whatever dies meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np

from pscluster.coordinator.api import IndexedSlices, ParameterServerStrategy, Variable, optimizers


class Counting:
    """Variables that count functions on all servers: dense, by rows, trained."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            self.dense = Variable(np.zeros((6, 3), np.float64), name="dense")
            self.sparse = Variable(np.zeros((8, 2), np.int64), name="sparse")
            self.trained = Variable(np.zeros((4, 5), np.float32), name="trained")
            self.sgd = optimizers.SGD(learning_rate=1.0, name="sgd")
        self.all = [self.dense, self.sparse, self.trained]

    def step(self) -> Any:
        """A function that adds 1 to every element, and returns its argument."""
        dense, sparse, trained, sgd = self.dense, self.sparse, self.trained, self.sgd

        def step(index: int = 0) -> int:
            dense.assign_add(np.ones(dense.shape))
            sparse.scatter_add(IndexedSlices(np.ones(sparse.shape, np.int64), np.arange(len(sparse))))
            sgd.apply_gradients([(-np.ones(trained.shape, np.float32), trained)])
            return index

        return step

    def counts(self) -> dict[str, list[int]]:
        """By variable, what each shard has counted: the same on all of its elements."""
        by_variable: dict[str, list[int]] = {}
        for variable in self.all:
            for shard in variable.variables:
                values = set(shard.numpy().reshape(-1).tolist())
                assert len(values) == 1, f"{shard.name} holds a torn update: {values}"
                by_variable.setdefault(variable.name, []).append(int(values.pop()))
        return by_variable

    def one_count(self) -> int:
        """What all shards of all variables have counted; they agree."""
        counts = self.counts()
        distinct = {count for shards in counts.values() for count in shards}
        assert len(distinct) == 1, counts
        return distinct.pop()
