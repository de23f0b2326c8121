"""What `wire_dtype` and `push_top_k` do to a small recommender: bytes and time of a step, area under the ROC curve.

    python benchmarks/wire_dtypes.py [--steps N] [--quick] [--mbit N] [--width N]

Clicks of 4,000 users on 2,000 items are drawn from hidden factors. The model has tables of 32 numbers (--width) a user
and an item, and a layer of 64 units over them and their products; Adam trains all of it on the servers. One worker
takes the steps, two parameter servers hold the variables, and each wire type sees the same batches in the same order.

With --mbit all processes share a loopback of that rate, in a network of their own, over TCP (it takes root and `tc`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from driver import THREADS
from isolate import enter, loopback_up
from recommender_data import area_under_curve

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    embedding_lookup,
    optimizers,
)

USERS, ITEMS, HIDDEN, BATCH = 4000, 2000, 64, 512
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"wire_dtype": "bfloat16"},
    "float16": {"wire_dtype": "float16"},
    "int8": {"wire_dtype": "int8"},
    "int8, and 1 % of the layer": {"wire_dtype": "int8", "push_top_k": 0.01},
}


@dataclass(frozen=True)
class Clicks:
    """Users, items, and whether they have clicked."""

    users: Any
    items: Any
    labels: Any

    @staticmethod
    def drawn(count: int, seed: int) -> Clicks:
        """Draw clicks from hidden factors, which depend on nothing, and this seed."""
        hidden, random = np.random.default_rng(7), np.random.default_rng(seed)
        user_factors, item_factors = hidden.normal(size=(USERS, 4)), hidden.normal(size=(ITEMS, 4))
        users, items = random.integers(0, USERS, count), random.zipf(1.3, count) % ITEMS
        scores = (user_factors[users] * item_factors[items]).sum(1)
        return Clicks(users, items, (random.random(count) < 1 / (1 + np.exp(-scores))).astype(np.float32))


def forward(rows: Any, layer: Any, out: Any) -> tuple[Any, Any]:
    """Return the hidden units and the scores; `rows` are users' and items' numbers and their products."""
    units = np.maximum(rows @ layer, 0)
    return units, units @ out


def features(users: Any, items: Any) -> Any:
    return np.concatenate([users, items, users * items], 1)


def measured(
    strategy: ParameterServerStrategy, options: dict[str, Any], name: str, steps: int, width: int
) -> dict[str, float]:
    """Train with these options of all variables, and return what it took and how good it is."""
    random = np.random.default_rng(0)

    def start(*shape: int, scale: float = 0.1) -> Any:
        return random.normal(0, scale, shape).astype(np.float32)

    with strategy.scope():
        user = Variable(start(USERS, width), name=f"{name}/user", **options)
        item = Variable(start(ITEMS, width), name=f"{name}/item", **options)
        layer = Variable(start(3 * width, HIDDEN), name=f"{name}/layer", **options)
        out = Variable(start(HIDDEN), name=f"{name}/out", **options)
        adam = optimizers.Adam(0.005)

    def train(first: int, last: int) -> Any:
        before, begin = strategy.traffic(), time.perf_counter()
        for step in range(first, last):
            batch = Clicks.drawn(BATCH, 1000 + step)
            users, items = embedding_lookup([user, item], [batch.users, batch.items])
            layer_, out_ = strategy.read([layer, out])
            rows = features(users, items)
            units, scores = forward(rows, layer_, out_)
            errors = (1 / (1 + np.exp(-scores)) - batch.labels) / BATCH
            of_units = np.outer(errors, out_) * (units > 0)
            of_rows = of_units @ layer_.T
            products = of_rows[:, 2 * width :]
            adam.apply_gradients(
                [
                    (IndexedSlices(of_rows[:, :width] + products * items, batch.users), user),
                    (IndexedSlices(of_rows[:, width : 2 * width] + products * users, batch.items), item),
                    (rows.T @ of_units, layer),
                    (units.T @ errors, out),
                ]
            )
        moved = strategy.traffic() - before
        return moved.pulled, moved.pushed, time.perf_counter() - begin

    coordinator = ClusterCoordinator(strategy)
    functions = [coordinator.fetch(coordinator.schedule(train, args=(at, at + 100))) for at in range(0, steps, 100)]
    pulled, pushed, _ = np.sum(functions, axis=0)
    test = Clicks.drawn(50_000, 1)
    rows = features(user.numpy()[test.users], item.numpy()[test.items])
    _, scores = forward(rows, layer.numpy(), out.numpy())
    return {
        "pulled": pulled / steps,
        "pushed": pushed / steps,
        "seconds": statistics.median(seconds for *_, seconds in functions) / 100,
        "auc": area_under_curve(scores, test.labels),
    }


def slow_down(mbit: int) -> None:
    """Leave the machine's network for one with a loopback of this rate. SystemExit if that is not possible."""
    try:
        possible = enter()
        if possible:
            loopback_up()
            limit = ("tbf", "rate", f"{mbit}mbit", "burst", "128kb", "latency", "100ms")
            subprocess.run(("tc", "qdisc", "add", "dev", "lo", "root", *limit), check=True)
    except (OSError, subprocess.CalledProcessError):
        possible = False
    if not possible:
        raise SystemExit("--mbit needs root, network namespaces and `tc`")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="of each wire type")
    parser.add_argument("--quick", action="store_true", help="200 steps")
    parser.add_argument("--mbit", type=int, default=0, help="the rate of the link, in Mbit/s; 0: no limit")
    parser.add_argument("--width", type=int, default=32, help="of the tables' rows")
    arguments = parser.parse_args()
    if arguments.mbit:
        slow_down(arguments.mbit)
    steps = 200 if arguments.quick else arguments.steps
    print("| on the wire | pulled a step | pushed a step | of float32 | a step | AUC |")
    print("| --- | --- | --- | --- | --- | --- |")
    with (
        LocalCluster(
            2,
            1,
            env={**THREADS, "PSCLUSTER_READ_CACHE_MIB": "0"},
            log_level="ERROR",
            transport="tcp" if arguments.mbit else None,
        ) as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy,
    ):
        exact = 0.0
        for number, (shown, options) in enumerate(CASES.items()):
            row = measured(strategy, options, f"case{number}", steps, arguments.width)
            moved = row["pulled"] + row["pushed"]
            exact = exact or moved
            print(
                f"| {shown} | {row['pulled'] / 1024:.1f} KiB | {row['pushed'] / 1024:.1f} KiB | {moved / exact:.2f} "
                f"| {1000 * row['seconds']:.2f} ms | {row['auc']:.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
