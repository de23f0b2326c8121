"""Our side for global arrays: programs on the two workers of a cluster, which have a device each.

spmd_side.py [--ps N] [--workers N]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import array_models as models
import numpy as np
from driver import THREADS, Handlers, serve, timed

from pscluster import spmd
from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    __version__,
    replica_context,
)
from pscluster.spmd import Layout

MIB = 1 << 20


@spmd.function
def _train(state: Any, data: Any) -> Any:
    losses = []
    for x, classes in data:
        state, loss = models.train_step(state, x, classes)
        losses.append(loss)
    return state, losses


def _exchange(size: int, n: int) -> float:
    """Seconds for this many exchanges of as many bytes each way, as a collective."""
    replica = replica_context()
    arrays = [np.ones(size, np.uint8) for _ in range(replica.num_replicas)]  # of zeros, all pages would be one
    replica.all_to_all(arrays)
    replica.barrier()
    return timed(lambda: [replica.all_to_all(arrays) for _ in range(n)])


class Bench:
    """The handlers."""

    def __init__(self, stack: contextlib.ExitStack, num_ps: int, num_workers: int) -> None:
        cluster = stack.enter_context(
            LocalCluster(num_ps, num_workers, transport="tcp", env=THREADS, log_level="ERROR")
        )
        strategy = stack.enter_context(ParameterServerStrategy(cluster))
        self._coordinator = ClusterCoordinator(strategy)
        self._mesh = spmd.create_mesh({"x": num_workers}, coordinator=self._coordinator)
        self._on_one = spmd.create_mesh(
            {"x": num_workers}, coordinator=self._coordinator, tasks=[0], devices_per_task=num_workers
        )
        self._made: dict[str, Any] = {}

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _sharded(self, array: Any, mesh: spmd.Mesh | None = None) -> Any:
        return spmd.distribute(array, Layout.batch_sharded(mesh or self._mesh, "x", np.ndim(array)))

    def _timed(self, work: Callable[[], Any], mesh: spmd.Mesh | None = None) -> float:
        """Seconds until everything has ended."""
        spmd.barrier(mesh or self._mesh)

        def whole() -> None:
            work()
            spmd.barrier(mesh or self._mesh)

        return timed(whole)

    def eager(self, n: int, rounds: int) -> dict[str, list[float]]:
        """How many operations on small arrays are sent in a second, and the seconds of one and its fetch."""
        a = self._sharded(np.ones(8))
        rates, seconds = [], []
        for _ in range(rounds + 1):
            spmd.barrier(self._mesh)
            rates.append(5 * n / timed(lambda: [a + a for _ in range(5 * n)]))
            spmd.barrier(self._mesh)
            seconds.append(float(np.median([timed(lambda: (a + a).full()) for _ in range(n)])))
        return {"sent": rates[1:], "waited": seconds[1:]}

    def train(self, n: int, at_once: int, on_one: bool = False) -> float:
        """Seconds for this many steps, of which some are one program. The batches are on the devices.

        `on_one`: on as many devices of one worker.
        """
        mesh = self._on_one if on_one else self._mesh
        data = self._once(
            f"data-{on_one}",
            lambda: [tuple(self._sharded(array, mesh) for array in batch) for batch in models.batches()],
        )
        initial = [
            [spmd.distribute(value, Layout.replicated(mesh, np.ndim(value))) for value in values]
            for values in models.initial_state()
        ]

        def work() -> None:
            state = initial
            for _ in range(n // at_once):
                state, losses = _train(state, data[:at_once])
            float(losses[-1])

        return self._timed(work, mesh)

    def matmul(self, n: int, size: int) -> float:
        """Seconds for this many products of square matrices, the first of which is sharded by rows."""

        def make() -> Any:
            layouts = Layout(["x", None], self._mesh), Layout.replicated(self._mesh, 2)
            return [spmd.ones((size, size), np.float32, layout=layout) for layout in layouts]

        a, b = self._once(f"matrices-{size}", make)
        return self._timed(lambda: [a @ b for _ in range(n)])

    def relayout(self, n: int, mib: int, rounds: int) -> dict[str, float]:
        """Median seconds of a relayout from rows to columns, and of sending the same bytes as a collective."""
        a = spmd.ones((mib << 9, 256), np.float64, layout=Layout(["x", None], self._mesh))
        size = a.nbytes // len(self._mesh.tasks) ** 2
        took: dict[str, list[float]] = {"relayout": [], "collective": []}
        for _ in range(rounds):
            took["relayout"].append(self._timed(lambda: [a.relayout([None, "x"]) for _ in range(n)]) / n)
            values = self._coordinator.schedule_together(_exchange, args=(size, n))
            took["collective"].append(max(value.fetch() for value in values) / n)
        return {what: float(np.median(seconds)) for what, seconds in took.items()}


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start the cluster."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    bench = Bench(stack, options.ps, options.workers)
    names = "eager", "train", "matmul", "relayout"
    return {name: getattr(bench, name) for name in names}, {"pscluster": __version__}


if __name__ == "__main__":
    serve(start)
