"""The sizes and the data of the recommender rows, without any framework."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

WIDTH, BATCH, DENSE = 32, 512, 13
LEARNING_RATE = 0.05
AT_ONCE = 20
"""Steps of one function, where functions are handed out."""

Array = np.ndarray[Any, np.dtype[Any]]


@functools.cache  # made once on each side, not for each measurement
def batches(seed: int, tables: int, rows: int, count: int = 16) -> list[tuple[list[Array], Array, Array]]:
    """Ids of each table (uniform), features and labels."""
    rng = np.random.default_rng(seed)
    return [
        (
            list(rng.integers(rows, size=(tables, BATCH))),
            rng.normal(size=(BATCH, DENSE)).astype(np.float32),
            rng.integers(2, size=BATCH).astype(np.float32),
        )
        for _ in range(count)
    ]


def clicks(seed: int, tables: int, rows: int, count: int) -> list[tuple[list[Array], Array, Array]]:
    """The same, with labels that a planted model draws: a weight and a small vector of each row, one weight a feature.

    The model is the same for all seeds; even its own scores do not tell all labels.
    """
    planted, rng = np.random.default_rng(12345), np.random.default_rng(seed)
    weights = planted.normal(size=(tables, rows)).astype(np.float32)
    vectors = planted.normal(size=(tables, rows, 4)).astype(np.float32)
    of_features = planted.normal(size=DENSE).astype(np.float32)
    drawn = []
    for _ in range(count):
        ids = (rows * rng.random((tables, BATCH)) ** 3).astype(np.int64)  # low ones are frequent
        features = rng.normal(size=(BATCH, DENSE)).astype(np.float32)
        found = np.stack([of_table[own] for of_table, own in zip(vectors, ids, strict=True)])
        single = sum(of_table[own] for of_table, own in zip(weights, ids, strict=True)) / tables**0.5
        paired = ((found.sum(0) ** 2).sum(1) - (found**2).sum((0, 2))) / (4 * tables)
        scores = 1.5 * single + paired + features @ of_features / DENSE**0.5
        labels = rng.random(BATCH) < 1 / (1 + np.exp(-scores))
        drawn.append((list(ids), features, labels.astype(np.float32)))
    return drawn


def area_under_curve(scores: Array, labels: Array) -> float:
    """How often a click has a higher score than what is none."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels > 0
    count = np.count_nonzero(positive)
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))
