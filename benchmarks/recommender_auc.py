"""What the recommender learns on servers, beside one process: the area under the curve after the same epochs.

recommender_auc.py [--steps N] [--epochs N] [--tables N] [--rows N]

Labels come from a planted model. All sides begin with the same values, and take the same steps of Adagrad: with one
worker in the same order, with two each takes every other batch, and applies gradients of values that are a step old.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from typing import Any

import numpy as np
import torch
from driver import THREADS
from recommender import Dense, loss_of
from recommender_data import AT_ONCE, BATCH, LEARNING_RATE, WIDTH, Array, area_under_curve, clicks
from recommender_side import step_by_hand

from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable, optimizers

FIRST_SQUARES = 0.1  # of Adagrad; torch begins with 0
TEST_BATCHES = 200


def initial(tables: int, rows: int) -> list[Array]:
    """The values that the tables begin with."""
    rng = np.random.default_rng(1)
    return [rng.normal(0, 0.05, (rows, WIDTH)).astype(np.float32) for _ in range(tables)]


def auc_of(dense: Dense, tables: list[Array]) -> float:
    """The area under the curve, on examples that were not trained on."""
    scores, labels = [], []
    with torch.no_grad():
        for ids, features, of_batch in clicks(0, len(tables), len(tables[0]), TEST_BATCHES):
            rows = [torch.from_numpy(table[own]) for table, own in zip(tables, ids, strict=True)]
            scores.append(dense(torch.from_numpy(features), rows).numpy())
            labels.append(of_batch)
    return area_under_curve(np.concatenate(scores), np.concatenate(labels))


def alone(tables: int, rows: int, steps: int, epochs: int) -> float:
    """Train in this process, by torch alone."""
    dense = Dense(tables)
    embeddings = [
        torch.nn.Embedding.from_pretrained(torch.from_numpy(values), freeze=False, sparse=True)
        for values in initial(tables, rows)
    ]
    parameters = [*dense.parameters(), *(table.weight for table in embeddings)]
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.remove(here)  # torch imports the library's `profile`, not ours
    adagrad = torch.optim.Adagrad(parameters, LEARNING_RATE, initial_accumulator_value=FIRST_SQUARES)
    sys.path.insert(0, here)
    data = clicks(1, tables, rows, steps)
    for ids, features, labels in itertools.chain.from_iterable(itertools.repeat(data, epochs)):
        looked_up = [table(torch.from_numpy(own)) for table, own in zip(embeddings, ids, strict=True)]
        adagrad.zero_grad()
        loss_of(dense, features, looked_up, labels).backward()
        adagrad.step()
    return auc_of(dense, [table.weight.detach().numpy() for table in embeddings])


def on_servers(ps: int, workers: int, overlap: int, tables: int, rows: int, steps: int, epochs: int) -> float:
    """Train on a cluster."""
    with (
        LocalCluster(ps, workers, env=dict(THREADS), log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            embeddings = [Variable(values) for values in initial(tables, rows)]
            parameters = [Variable(value.detach().numpy()) for value in Dense(tables).parameters()]
            adagrad = optimizers.Adagrad(LEARNING_RATE, initial_accumulator_value=FIRST_SQUARES)

        def own_batches(context: Any) -> Any:
            own = clicks(1, tables, rows, steps)[context.input_pipeline_id :: context.num_input_pipelines]
            return itertools.cycle(own)

        def rows_of(batch: Any) -> Any:
            return [*zip(embeddings, batch[0], strict=True), *parameters]

        coordinator.fit(
            step_by_hand(strategy, embeddings, parameters, adagrad),
            coordinator.create_per_worker_dataset(own_batches),
            epochs=epochs,
            steps_per_epoch=steps,
            steps_per_execution=AT_ONCE,
            lookups=rows_of if overlap else None,
            overlap=overlap,
            verbose=0,
        )
        dense = Dense(tables)
        for parameter, value in zip(dense.parameters(), strategy.read(parameters), strict=True):
            parameter.data = torch.from_numpy(value)
        return auc_of(dense, [table.numpy() for table in embeddings])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = options.tables, options.rows, options.steps, options.epochs
    print(f"{options.epochs} epochs of {options.steps} batches of {BATCH}; tables of {options.rows:,}: AUC")
    print(f"torch, one process: {alone(*size):.4f}", flush=True)
    for ps, workers, overlap in ((1, 1, 0), (2, 1, 0), (2, 1, 1), (2, 2, 0), (2, 2, 1)):
        auc = on_servers(ps, workers, overlap, *size)
        print(f"{ps} servers, {workers} workers{', steps that overlap' * overlap}: {auc:.4f}", flush=True)


if __name__ == "__main__":
    main()
