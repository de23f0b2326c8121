"""What steps of several replicas cost: beside a replica that is slow, and in memory and bytes.

Each question starts a separate cluster, and ends it. It is asked in a new process every time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from costs import MIB, compared, memory
from driver import THREADS, Handlers, serve, timed
from step_models import BATCH, batch, gradients, shapes

from pscluster.coordinator import (
    LocalCluster,
    MinSizePartitioner,
    SynchronousStrategy,
    Variable,
    optimizers,
    replica_context,
)

COMPUTE_SECONDS = 0.02
"""What a step computes besides, as on an accelerator: so that two cores are enough for all replicas."""

SLOWER = 5
"""How many times as long the slow replica takes to compute."""

PAUSE_STEPS, PAUSED_OF = 3, 20
"""The other one pauses for the time of so many steps in so many."""

HELD = 1
"""The replica that is slow, or pauses."""


@contextlib.contextmanager
def _strategy(cluster: LocalCluster, num_ps: int, **options: Any) -> Iterator[SynchronousStrategy]:
    partitioner = MinSizePartitioner(min_shard_bytes=256 << 10, max_shards=num_ps)
    with SynchronousStrategy(cluster, variable_partitioner=partitioner, **options) as strategy:
        yield strategy


def _cluster(num_ps: int, num_workers: int) -> LocalCluster:
    env = {**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0"}
    return LocalCluster(num_ps, num_workers, transport="tcp", env=env, log_level="ERROR")


def _model(strategy: SynchronousStrategy, model: str) -> Any:
    """Return a step of the model, without arguments."""
    rng = np.random.default_rng(0)
    with strategy.scope():
        variables = [
            Variable(rng.normal(0, 0.05, shape).astype(np.float32), name=f"{model}-{at}")
            for at, shape in enumerate(shapes(model))
        ]
        optimizer = optimizers.SGD(1e-3)
    of_replicas, examples = [batch(model, rank) for rank in range(strategy.num_replicas_in_sync)], BATCH[model]

    def step() -> None:
        x, y = of_replicas[replica_context().replica_id]
        values = strategy.read(variables)
        optimizer.apply_gradients(zip(gradients(x, y, *values), variables, strict=True), examples=examples)

    return step


def _seconds(cluster: LocalCluster, steps: int, slow: float, pause: float, **options: Any) -> float:
    """Return the seconds of a step of the digits network: of so many in one call, after some that don't count."""
    with _strategy(cluster, 2, **options) as strategy:
        train = _model(strategy, "digits")

        def step(numbers: Iterator[int]) -> None:
            number, held = next(numbers), replica_context().replica_id == HELD
            time.sleep(COMPUTE_SECONDS * (slow if held else 1))
            if held and number % PAUSED_OF == 0:
                time.sleep(pause)
            train()

        numbers = iter(strategy.distribute_datasets_from_function(lambda: range(1 << 30)))
        strategy.run(step, (numbers,), steps=PAUSED_OF)
        return timed(lambda: strategy.run(step, (numbers,), steps=steps)) / steps


def disturbed(by: str, option: str, value: int, replicas: int, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Compare rates with one replica disturbed to those with none: with all in step, and with an option.

    In turn, on one cluster; `by` is "slow" or "pauses".
    """
    with _cluster(2, replicas) as cluster:
        measured: dict[str, list[float]] = {"undisturbed": [], "in step": [], option: []}
        for _ in range(rounds):
            alone = _seconds(cluster, steps, 1, 0)
            slow, pause = (SLOWER, 0.0) if by == "slow" else (1, PAUSE_STEPS * alone)
            measured["undisturbed"].append(1 / alone)
            measured["in step"].append(1 / _seconds(cluster, steps, slow, pause))
            measured[option].append(1 / _seconds(cluster, steps, slow, pause, **{option: value}))
        return {how: compared(rates, measured["undisturbed"]) for how, rates in measured.items()}


def _loopback_bytes() -> int:
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "lo":
            return int(value.split()[0])
    raise RuntimeError("there is no loopback")


def step_memory(model: str, replicas: int, steps: int) -> dict[str, float]:
    """Return the highest memory of a server, the bytes of its shards, and the bytes that a worker moves in a step.

    The bytes are right only in a network of its own.
    """
    with _cluster(2, replicas) as cluster, _strategy(cluster, 2) as strategy:
        step = _model(strategy, model)
        strategy.run(step, steps=2)
        before = _loopback_bytes()
        strategy.run(step, steps=steps)
        moved = (_loopback_bytes() - before) / steps / replicas
        peaks = [memory(cluster.pids["ps", index], "VmHWM") for index in range(2)]
        shards = sum(4 * int(np.prod(shape)) for shape in shapes(model)) / 2
        return {"peak": max(peaks) / MIB, "shards": shards / MIB, "moved": moved / MIB}


def main() -> None:
    handlers: Handlers = {"disturbed": disturbed, "step_memory": step_memory}
    serve(lambda _: (handlers, {}))


if __name__ == "__main__":
    main()
