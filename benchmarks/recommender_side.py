"""Our own side of the recommender rows: tables and dense parameters on servers, steps computed by torch in workers.

recommender_side.py [--ps N] [--workers N]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from driver import THREADS, Handlers, serve, timed
from recommender import Dense, loss_of
from recommender_data import AT_ONCE, LEARNING_RATE, WIDTH, batches

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


def step_by_hand(strategy: Any, embeddings: list[Any], parameters: list[Any], adagrad: Any) -> Callable[[Any], None]:
    """A training step with these variables, whose module each worker makes once."""
    tables = len(embeddings)
    modules: list[tuple[Dense, list[torch.nn.Parameter]]] = []  # of this worker

    def step(batch: Any) -> None:
        ids, features, labels = batch
        if not modules:
            torch.set_num_threads(1)
            dense = Dense(tables)
            modules.append((dense, list(dense.parameters())))
        ((dense, own),) = modules
        looked_up = embedding_lookup(embeddings, ids)
        for parameter, value in zip(own, strategy.read(parameters), strict=True):
            parameter.data = torch.from_numpy(value)
        leaves = [torch.from_numpy(values).requires_grad_() for values in looked_up]
        loss = loss_of(dense, features, leaves, labels)
        gradients = [g.numpy() for g in torch.autograd.grad(loss, [*leaves, *own])]
        sparse = [IndexedSlices(*pair) for pair in zip(gradients, ids, strict=False)]
        adagrad.apply_gradients(zip([*sparse, *gradients[tables:]], [*embeddings, *parameters], strict=True))

    return step


class Bench:
    """The handler, and the models by their numbers of tables and rows."""

    def __init__(self, stack: contextlib.ExitStack, num_ps: int, num_workers: int) -> None:
        cluster = stack.enter_context(
            LocalCluster(num_ps, num_workers, transport="tcp", env=dict(THREADS), log_level="ERROR")
        )
        self.strategy = ParameterServerStrategy(cluster)
        stack.callback(self.strategy.close)
        self.coordinator = ClusterCoordinator(self.strategy)
        self._workers = num_workers
        self._made: dict[tuple[int, int], Any] = {}

    def _model(self, tables: int, rows: int) -> tuple[Any, Any, Any]:
        """A training step, the data of each worker, and what names what a step reads of the servers."""
        if (tables, rows) not in self._made:
            strategy = self.strategy
            with strategy.scope():
                initial = initializers.RandomNormal(seed=0)
                embeddings = [Variable(initial, shape=(rows, WIDTH)) for _ in range(tables)]
                parameters = [Variable(value.detach().numpy()) for value in Dense(tables).parameters()]
                adagrad = optimizers.Adagrad(LEARNING_RATE)
            data = self.coordinator.create_per_worker_dataset(
                lambda context: itertools.cycle(batches(context.input_pipeline_id, tables, rows))
            )

            def rows_of(batch: Any) -> Any:
                return [*zip(embeddings, batch[0], strict=True), *parameters]

            step = step_by_hand(strategy, embeddings, parameters, adagrad)
            self._made[tables, rows] = step, data, rows_of
        return self._made[tables, rows]  # type: ignore[no-any-return]

    def recommend(self, n: int, tables: int, rows: int, overlap: int) -> float:
        """Seconds for this many training steps, on all workers together."""
        is_new = (tables, rows) not in self._made
        step, data, rows_of = self._model(tables, rows)
        lookups = rows_of if overlap else None

        def train(steps: int) -> None:
            self.coordinator.fit(
                step,
                data,
                steps_per_epoch=steps,
                steps_per_execution=AT_ONCE,
                lookups=lookups,
                overlap=overlap,
                verbose=0,
            )

        if is_new:  # each worker loads torch, and makes its module
            train(10 * AT_ONCE * self._workers)
        return timed(lambda: train(n))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
        bench = Bench(stack, options.ps, options.workers)
        return {"recommend": bench.recommend}, {"pscluster": __version__, "torch": torch.__version__}

    serve(start)


if __name__ == "__main__":
    main()
