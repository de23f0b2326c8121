"""What `pscluster.torch.serve` adds to a step written by hand: of the recommender's model, in torch.

Both have variables of their own on the same servers, and run in turn on the same worker.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from driver import THREADS, Handlers, serve
from recommender import Dense, loss_of
from recommender_data import LEARNING_RATE, WIDTH, batches
from serve_turns import in_turn
from torch import nn

import pscluster.torch
from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    __version__,
    embedding_lookup,
    initializers,
    optimizers,
)


class Recommender(nn.Module):
    """The model with its tables."""

    def __init__(self, tables: int, rows: int) -> None:
        super().__init__()
        self.dense = Dense(tables)
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH, sparse=True, device="meta") for _ in range(tables))

    def loss(self, ids: list[Any], features: Any, labels: Any) -> torch.Tensor:
        rows = [table(torch.from_numpy(of_table)) for table, of_table in zip(self.tables, ids, strict=True)]
        return loss_of(self.dense, features, rows, labels)


def beside(tables: int, rows: int, n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step, in each round, of both ways; and the worker's processor time of it."""
    with (
        LocalCluster(2, 1, transport="tcp", env=dict(THREADS), log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            initial = initializers.RandomNormal(seed=0)
            adagrad = optimizers.Adagrad(LEARNING_RATE)
            embeddings = [Variable(initial, shape=(rows, WIDTH)) for _ in range(tables)]
            parameters = [Variable(value.detach().numpy()) for value in Dense(tables).parameters()]
            served = pscluster.torch.serve(
                lambda: Recommender(tables, rows), optimizer=adagrad, initializers={"tables.*": initial}
            )
        coordinator = ClusterCoordinator(strategy)
        kept: dict[str, Any] = {}  # of the worker

        def prepared() -> Any:
            torch.set_num_threads(1)
            if not kept:
                kept.update(data=batches(0, tables, rows), dense=Dense(tables))
            return kept["data"], {"by hand": by_hand, "served": by_serve}

        def by_hand(ids: Any, features: Any, labels: Any) -> None:
            dense = kept["dense"]
            looked_up = embedding_lookup(embeddings, ids)
            for parameter, value in zip(dense.parameters(), strategy.read(parameters), strict=True):
                parameter.data = torch.from_numpy(value)
                parameter.grad = None
            leaves = [torch.from_numpy(values).requires_grad_() for values in looked_up]
            loss_of(dense, features, leaves, labels).backward()
            sparse = [IndexedSlices(leaf.grad.numpy(), of) for leaf, of in zip(leaves, ids, strict=True)]
            gradients = [parameter.grad.numpy() for parameter in dense.parameters()]
            adagrad.apply_gradients(zip([*sparse, *gradients], [*embeddings, *parameters], strict=True))

        def by_serve(ids: Any, features: Any, labels: Any) -> None:
            with served.step({f"tables.{number}": of_table for number, of_table in enumerate(ids)}) as module:
                module.loss(ids, features, labels).backward()

        return in_turn(coordinator, prepared, n, rounds)


def main() -> None:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    handlers: Handlers = {"beside": beside}
    serve(lambda _: (handlers, {"pscluster": __version__, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
