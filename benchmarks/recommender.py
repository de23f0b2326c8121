"""The model of the recommender rows, in torch: like DLRM (Naumov et al., 2019), with an id of each table per example.

Dense features pass through a small network; its output and the examples' rows interact by products of all pairs, which
a second network takes to one logit.
"""

from __future__ import annotations

import torch
from recommender_data import DENSE, WIDTH, Array
from torch import nn


class Dense(nn.Module):
    """What is not a table."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        vectors = tables + 1
        pairs = vectors * (vectors - 1) // 2
        self.below = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        self.above = nn.Sequential(
            nn.Linear(WIDTH + pairs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)
        )
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, 1))

    def forward(self, features: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        below = self.below(features)
        vectors = torch.stack([below, *rows], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: torch.Tensor = self.above(torch.cat([below, products], 1))[:, 0]
        return logits


def loss_of(dense: Dense, features: Array, rows: list[torch.Tensor], labels: Array) -> torch.Tensor:
    """The mean logistic loss of a batch."""
    logits = dense(torch.from_numpy(features), rows)
    return nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))
