"""Ray Train's side of the trainer's rows: the same functions, on a Ray that runs already, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")

import ray
from driver import Handlers, serve, timed
from ray import train
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer


def _trainer(fn: object, folder: str, config: dict[str, str], workers: int = 2) -> DataParallelTrainer:
    return DataParallelTrainer(
        fn,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=train.RunConfig(name="run", storage_path=folder, failure_config=train.FailureConfig(max_failures=1)),
    )


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "most": max(seconds)}


def fit(workers: int, n: int) -> dict[str, float]:
    """Seconds from the call of fit() to its return, of a function that reports once: median, and the most."""

    def nothing(config: dict[str, str]) -> None:
        train.report({"done": 1})

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return timed(_trainer(nothing, folder, {}, workers).fit)

    return _summary([run() for _ in range(n)])


def restart(n: int) -> dict[str, float]:
    """Seconds from a worker's death to the beginning of its function in the next attempt: median, and the most."""

    def dies(config: dict[str, str]) -> None:
        begun, rank = time.time(), train.get_context().get_world_rank()
        died, again = (Path(config["folder"], name) for name in ("died", "again"))
        if rank == 1 and died.exists():
            again.write_text(str(begun - float(died.read_text())))
        for step in range(4):
            train.report({"step": step})
            if rank == 1 and step == 1 and not died.exists():
                died.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    seconds = []
    for _ in range(n):
        with tempfile.TemporaryDirectory() as folder:
            _trainer(dies, folder, {"folder": folder}).fit()
            seconds.append(float(Path(folder, "again").read_text()))
    return _summary(seconds)


def start(stack: contextlib.ExitStack) -> tuple[Handlers, dict[str, str]]:
    """Start Ray on this machine, for loopback only."""
    ray.init(
        address="local",
        num_cpus=2,
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 << 20,
    )
    stack.callback(ray.shutdown)
    return {"fit": fit, "restart": restart}, {"ray": ray.__version__}


if __name__ == "__main__":
    serve(start)
