"""torch's side: one process that trains by itself, or several that share nothing, each with all tables of its own.

torch_side.py [--threads=N] [--processes=N] ...

The latter are the limit of as many workers: they take part of the steps each, and neither read nor send a byte.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from driver import Handlers, serve, timed
from members import asked_members, time_requests
from recommender import Dense, loss_of
from recommender_data import LEARNING_RATE, WIDTH, batches

parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--processes", type=int, default=1)
parser.add_argument("member", nargs="*", help="rank, number of processes, and where they meet: of one of several")
options = parser.parse_known_args()[0]


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


def train_on() -> Callable[..., object]:
    """Return what trains for some steps, with a model that goes on from call to call."""
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))  # torch imports the library's `profile`, not ours
    torch.set_num_threads(options.threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    trainer_of = functools.cache(Trainer)

    def train(n: int, tables: int, rows: int) -> None:
        trainer = trainer_of(tables, rows)
        for nth in range(n):
            trainer.step(nth)

    return train


def member() -> None:
    """Take a part of the steps, at once with the others."""
    train = train_on()

    def work_of(request: Any) -> Callable[[], object]:
        train(**{**request, "n": 1})  # the tables are made before time counts
        return lambda: train(**request)

    time_requests(work_of, lambda: None)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    if options.processes > 1:
        ask = asked_members(stack, __file__, options.processes)

        def seconds(n: int, **model: int) -> float:
            return ask(n=n // options.processes, **model)
    else:
        train = train_on()

        def seconds(n: int, **model: int) -> float:
            return timed(lambda: train(n, **model))

    def recommend(n: int, tables: int, rows: int, overlap: int) -> float:
        """Seconds for this many training steps, of all processes together."""
        del overlap
        return seconds(n, tables=tables, rows=rows)

    return {"recommend": recommend}, {"torch": torch.__version__}


if __name__ == "__main__":
    if options.member:
        member()
    else:
        serve(start)
