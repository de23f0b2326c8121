"""Train a recommender, an ordinary module of PyTorch, whose embeddings are tables on the parameter servers.

    pscluster run --ps 2 --workers 2 examples/torch_recommender.py

Users rate items; the ratings are made up. It needs torch beside pscluster.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pscluster.torch
from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    ParameterServerStrategy,
    SavedVariables,
    TFConfigClusterResolver,
    optimizers,
)

USERS, ITEMS, RATINGS = 2_000, 500, 40_000


class Recommender(nn.Module):
    """Scores an item for a user, who has liked others."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 16)
        self.liked = nn.EmbeddingBag(ITEMS, 16, mode="mean", padding_idx=0)
        self.item = nn.Embedding(ITEMS, 16)
        self.score = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, users: torch.Tensor, others: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        taste = self.user(users) + self.liked(others)
        scores: torch.Tensor = self.score(taste * self.item(items))[:, 0]
        return scores


def ratings() -> tuple[Any, ...]:
    """Users, up to five items that each has liked before, new items, and whether they liked these."""
    rng = np.random.default_rng(0)
    tastes, kinds = rng.normal(size=(USERS, 4)), rng.normal(size=(ITEMS, 4))
    users, items = rng.integers(USERS, size=RATINGS), rng.integers(1, ITEMS, size=RATINGS)
    candidates = rng.integers(1, ITEMS, size=(RATINGS, 5))
    others = np.where((tastes[users][:, None] * kinds[candidates]).sum(2) > 0, candidates, 0)
    return users, others, items, ((tastes[users] * kinds[items]).sum(1) > 0).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a recommender in PyTorch on parameter servers.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder")
    options = parser.parse_args()

    strategy = ParameterServerStrategy(TFConfigClusterResolver())
    with strategy.scope():
        adagrad = optimizers.Adagrad(0.5, initial_accumulator_value=0.0)
        served = pscluster.torch.serve(Recommender, optimizer=optimizers.Adam(0.01), tables={"*": adagrad})
    coordinator = ClusterCoordinator(strategy)

    def step(batch: Any) -> float:  # runs on a worker
        *inputs, liked = map(torch.from_numpy, batch)
        with served.step() as module:
            loss = nn.functional.binary_cross_entropy_with_logits(module(*inputs), liked)
            loss.backward()
        return float(loss.item())

    data = coordinator.distribute_dataset(ratings()).shuffle(seed=1).batch(256)
    coordinator.fit(step, data, epochs=options.epochs, verbose=2)

    with CheckpointManager(options.checkpoints, strategy=strategy) as manager:
        manager.save()
    model = Recommender()
    pscluster.torch.load_checkpoint(model, SavedVariables(Path(options.checkpoints)))
    model.eval()
    with torch.no_grad():
        *inputs, liked = map(torch.from_numpy, ratings())
        right = ((model(*inputs) > 0) == (liked > 0.5)).float().mean()
    print(f"{float(right):.1%} of the ratings are right")


if __name__ == "__main__":
    main()
