"""Our own side of the synchronous rows: replicas that step together.

synchronous_side.py [--ps N] [--workers N] [--torch]
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from driver import THREADS, Handlers, serve, timed
from step_models import BATCH, batch, gradients, shapes, torch_gradients

from pscluster.coordinator import (
    ClusterCoordinator,
    LocalCluster,
    MinSizePartitioner,
    SynchronousStrategy,
    Variable,
    __version__,
    optimizers,
    replica_context,
)


def cluster_of(num_ps: int, num_workers: int) -> LocalCluster:
    """A cluster over TCP whose clients cache nothing."""
    env = {**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0"}
    return LocalCluster(num_ps, num_workers, transport="tcp", env=env, log_level="ERROR")


def partitioner(num_ps: int) -> MinSizePartitioner:
    """How the models' variables are cut."""
    return MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=num_ps)


def step_of(
    strategy: SynchronousStrategy,
    model: str,
    rule: Callable[[float], Any],
    compute: Callable[..., list[Any]] = gradients,
) -> Callable[[], None]:
    """A step of a model, with new variables and an optimizer by this rule."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        variables = [
            Variable(rng.normal(0, 0.05, shape).astype(np.float32), name=f"{model}-{at}")
            for at, shape in enumerate(shapes(model))
        ]
        optimizer = rule(1e-3)
    of_replicas, examples = [batch(model, rank) for rank in range(strategy.num_replicas_in_sync)], BATCH[model]

    def step() -> None:
        x, y = of_replicas[replica_context().replica_id]
        values = strategy.read(variables)
        optimizer.apply_gradients(zip(compute(x, y, *values), variables, strict=True), examples=examples)

    return step


class Bench:
    """The handlers, and the models they share."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        num_ps: int,
        num_workers: int,
        compute: Callable[..., list[Any]] = gradients,
    ) -> None:
        cluster = stack.enter_context(cluster_of(num_ps, num_workers))
        self.strategy = SynchronousStrategy(cluster, partitioner(num_ps))
        stack.callback(self.strategy.close)
        self.workers, self._compute = num_workers, compute
        self._made: dict[str, Any] = {}

    def _step(self, model: str) -> Any:
        """A step function, which is the same at each call."""
        if model not in self._made:
            rule = optimizers.Adam if model == "digits" else optimizers.SGD
            self._made[model] = step_of(self.strategy, model, rule, self._compute)
        return self._made[model]

    def steps(self, n: int, model: str, at_once: int) -> float:
        """Seconds for this many steps of all replicas together, `at_once` of them in a call."""
        step = self._step(model)

        def work() -> None:
            for _ in range(n // at_once):
                self.strategy.run(step, steps=at_once)

        return timed(work)

    def alone(self, n: int, model: str) -> float:
        """Seconds for this many steps of each worker, which do not wait for each other: asynchronous ones."""
        step, coordinator = self._step(model), ClusterCoordinator(self.strategy)
        key = f"alone-{model}"
        if key not in self._made:

            def several(count: int) -> None:
                for _ in range(count):
                    step()

            self._made[key] = several
        several = self._made[key]
        return timed(lambda: coordinator.fetch([coordinator.schedule(several, (n,)) for _ in range(self.workers)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="compute with torch instead of NumPy")
    options = parser.parse_args()

    def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
        compute = torch_gradients if options.torch else gradients
        bench = Bench(stack, options.ps, options.workers, compute)
        return {"steps": bench.steps, "alone": bench.alone}, {"pscluster": __version__, "numpy": np.__version__}

    serve(start)


if __name__ == "__main__":
    main()
