"""torch's side: one process that trains by itself.

torch_side.py [--threads=N] ...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

import torch
from driver import Handlers, serve, timed
from recommender import Dense, loss_of
from recommender_data import LEARNING_RATE, WIDTH, batches

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=1)
threads = parser.parse_known_args()[0].threads


class Trainer:
    """The model with tables of its own, by torch's sparse gradients and Adagrad."""

    def __init__(self, tables: int, rows: int) -> None:
        self.data = batches(0, tables, rows)
        self._dense = Dense(tables)
        self._tables = [torch.nn.Embedding(rows, WIDTH, sparse=True) for _ in range(tables)]
        parameters = [*self._dense.parameters(), *(table.weight for table in self._tables)]
        self._adagrad = torch.optim.Adagrad(parameters, LEARNING_RATE)

    def step(self, nth: int) -> None:
        ids, features, labels = self.data[nth % len(self.data)]
        rows = [table(torch.from_numpy(of_table)) for table, of_table in zip(self._tables, ids, strict=True)]
        loss = loss_of(self._dense, features, rows, labels)
        self._adagrad.zero_grad()
        loss.backward()
        self._adagrad.step()


def start(_: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    torch.set_num_threads(threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    made: dict[tuple[int, int], Trainer] = {}

    def recommend(n: int, tables: int, rows: int, overlap: int) -> float:
        """Seconds for this many training steps."""
        del overlap
        if (tables, rows) not in made:
            made[tables, rows] = Trainer(tables, rows)
        trainer = made[tables, rows]
        return timed(lambda: [trainer.step(nth) for nth in range(n)])

    return {"recommend": recommend}, {"torch": torch.__version__}


if __name__ == "__main__":
    serve(start)
