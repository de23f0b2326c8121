"""NumPy's side: one process, which computes with as many threads as it is told.

numpy_side.py [--threads=N] ...
"""

from __future__ import annotations

import argparse
import contextlib
import os

from driver import THREADS, Handlers, serve, timed

parser = argparse.ArgumentParser()
parser.add_argument("--threads", default="1")
threads = parser.parse_known_args()[0].threads
os.environ.update(dict.fromkeys(THREADS, threads))  # before NumPy is loaded

import array_models as models  # noqa: E402
import numpy as np  # noqa: E402


def train(n: int, at_once: int, on_one: bool = False) -> float:
    """Seconds for this many steps."""
    del at_once, on_one
    state, data = models.initial_state(), models.batches()

    def work() -> None:
        nonlocal state
        for nth in range(n):
            state, _ = models.train_step(state, *data[nth % len(data)])

    return timed(work)


def matmul(n: int, size: int) -> float:
    """Seconds for this many products of square matrices."""
    a = b = np.ones((size, size), np.float32)
    return timed(lambda: [a @ b for _ in range(n)])


def start(_: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    return {"train": train, "matmul": matmul}, {"numpy": np.__version__}


if __name__ == "__main__":
    serve(start)
