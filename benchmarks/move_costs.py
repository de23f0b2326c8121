"""What moving shards, or resharding a variable, costs training and readers.

A table of 64 float32 columns is trained by the rows of 512 random ids a function, beside a dense variable, while its
shards move one by one from server 0 to server 1, or its rows into twice as many shards, by hash. A thread reads two of
its rows all the time.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
from driver import THREADS, Handlers, serve

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    optimizers,
)
from pscluster.coordinator.moves.plan import ProposedCut

COLUMNS, IDS = 64, 512
AHEAD = 20
"""Functions that are scheduled at a time."""


class Load:
    """Functions that train, and a thread that reads, until it is closed."""

    def __init__(self, strategy: ParameterServerStrategy, table: Variable, dense: Variable) -> None:
        self.done = 0
        self.waits: list[tuple[float, float]] = []  # when each read began, and how long it took
        self._over = threading.Event()
        optimizer = optimizers.SGD(0.1)
        coordinator = ClusterCoordinator(strategy)

        def step(number: int) -> None:
            ids = np.random.default_rng(number).integers(0, table.shape[0], IDS)
            rows = table.gather(ids)
            hidden = rows @ dense.numpy()
            optimizer.apply_gradients(
                [(IndexedSlices(np.ones_like(rows), ids), table), (hidden[:COLUMNS] * 0 + 1, dense)]
            )

        def train() -> None:
            waiting: list[Any] = []
            while not self._over.is_set():
                waiting.append(coordinator.schedule(step, args=(self.done + len(waiting),)))
                if len(waiting) > AHEAD:
                    waiting.pop(0).fetch()
                    self.done += 1
            coordinator.join()

        def read() -> None:
            while not self._over.wait(0.002):
                begin = time.monotonic()
                table.gather([0, table.shape[0] - 1])
                self.waits.append((begin, time.monotonic() - begin))

        self._threads = [threading.Thread(target=train), threading.Thread(target=read)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def rate(self, seconds: float) -> float:
        """Functions a second for so long."""
        before, begin = self.done, time.monotonic()
        time.sleep(seconds)
        return (self.done - before) / (time.monotonic() - begin)


def move(mib: int, shards: int, durability: str, seconds: float) -> dict[str, float]:
    """Move this much; return the part of its rate that training keeps, and the seconds of the move and of reads."""
    rows = (mib << 20) // (COLUMNS * 4)
    with (
        LocalCluster(2, 1, env=THREADS, log_level="ERROR", durability=durability) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(shards), placement=lambda *_: 0) as strategy,
    ):
        with strategy.scope():
            table = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(rows, COLUMNS), dtype=np.float32)
            dense = Variable(np.zeros((COLUMNS, 256), np.float32), partitioner=FixedShardsPartitioner(1))
            load = Load(strategy, table, dense)
        with load:
            load.rate(1.0)
            rate = load.rate(seconds)
            before, begin = load.done, time.monotonic()
            moved = [strategy.move_shard(shard, 1) for shard in table.variables]
            took = time.monotonic() - begin
            during_it = (load.done - before) / took
            kept = during_it / statistics.mean([rate, load.rate(seconds)])  # the machine's speed may drift
        reads = [wait for at, wait in load.waits if begin - wait <= at <= begin + took]
        return {
            "kept": kept,
            "seconds": took,
            "read": max(reads),
            "frozen": max(each.frozen_seconds for each in moved if each is not None),
        }


def cut(mib: int, shards: int, durability: str, seconds: float) -> dict[str, float]:
    """Reshard this much; return the part of its rate that training keeps, all seconds, and those without functions."""
    rows = (mib << 20) // (COLUMNS * 4)
    with (
        LocalCluster(2, 1, env=THREADS, log_level="ERROR", durability=durability) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(shards)) as strategy,
    ):
        with strategy.scope():
            table = Variable(lambda shape, dtype: np.zeros(shape, dtype), shape=(rows, COLUMNS), dtype=np.float32)
            dense = Variable(np.zeros((COLUMNS, 256), np.float32), partitioner=FixedShardsPartitioner(1))
            load = Load(strategy, table, dense)
        proposed = ProposedCut(table.name, 0, 1.0, shards, 2 * shards, by_rows=True)
        with load:
            load.rate(1.0)
            rate, plan = load.rate(seconds), replace(strategy.plan("bytes"), moves=(), cuts=(proposed,))
            before = load.done
            (made,) = strategy.apply(plan).cuts
            during_it = (load.done - before) / made.seconds
            kept = during_it / statistics.mean([rate, load.rate(seconds)])
        return {"kept": kept, "seconds": made.seconds, "held": made.held_seconds}


def start(_: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Nothing to start: each question does it."""
    return {"move": move, "cut": cut}, {}


if __name__ == "__main__":
    serve(start)
