"""What steps of several replicas cost: beside a replica that is slow, and in memory and bytes.

Each question starts a separate cluster, and ends it. It is asked in a new process every time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from costs import MIB, compared, memory
from driver import Handlers, loopback_bytes, serve, timed
from step_models import shapes
from synchronous_side import cluster_of, partitioner, step_of

from pscluster.coordinator import LocalCluster, SynchronousStrategy, optimizers, replica_context

COMPUTE_SECONDS = 0.02
"""What a step computes besides, as on an accelerator: so that two cores are enough for all replicas."""

SLOWER = 5
"""How many times as long the slow replica takes to compute."""

PAUSE_STEPS, PAUSED_OF = 3, 20
"""The other one pauses for the time of 3 steps in every 20."""

HELD = 1
"""The replica that is slow, or pauses."""


def _seconds(cluster: LocalCluster, steps: int, slow: float, pause: float, **options: Any) -> float:
    """Return the seconds of a step of the digits network: of many in one call, after some that don't count."""
    with SynchronousStrategy(cluster, partitioner(2), **options) as strategy:
        train = step_of(strategy, "digits", optimizers.SGD)

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
    with cluster_of(2, replicas) as cluster:
        measured: dict[str, list[float]] = {"undisturbed": [], "in step": [], option: []}
        for _ in range(rounds):
            alone = _seconds(cluster, steps, 1, 0)
            slow, pause = (SLOWER, 0.0) if by == "slow" else (1, PAUSE_STEPS * alone)
            measured["undisturbed"].append(1 / alone)
            measured["in step"].append(1 / _seconds(cluster, steps, slow, pause))
            measured[option].append(1 / _seconds(cluster, steps, slow, pause, **{option: value}))
        return {how: compared(rates, measured["undisturbed"]) for how, rates in measured.items()}


def step_memory(model: str, replicas: int, steps: int) -> dict[str, float]:
    """Return the highest memory of a server, the bytes of its shards, and the bytes that a worker moves in a step.

    The bytes are right only in a network of its own.
    """
    with cluster_of(2, replicas) as cluster, SynchronousStrategy(cluster, partitioner(2)) as strategy:
        step = step_of(strategy, model, optimizers.SGD)
        strategy.run(step, steps=2)
        before = loopback_bytes()
        strategy.run(step, steps=steps)
        moved = (loopback_bytes() - before) / steps / replicas
        peaks = [memory(cluster.pids["ps", index], "VmHWM") for index in range(2)]
        shards = sum(4 * int(np.prod(shape)) for shape in shapes(model)) / 2
        return {"peak": max(peaks) / MIB, "shards": shards / MIB, "moved": moved / MIB}


def main() -> None:
    handlers: Handlers = {"disturbed": disturbed, "step_memory": step_memory}
    serve(lambda _: (handlers, {}))


if __name__ == "__main__":
    main()
