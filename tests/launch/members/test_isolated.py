"""Functions in a process of their own, as those of frameworks are: environment, errors, deaths, and what is sent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.test_trainer import epochs
from tests.waiting import write_whole

from pscluster.coordinator import LocalCluster, ParameterServerStrategy, Variable, errors
from pscluster.launch import (
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    broadcast,
    get_context,
    get_dataset_shard,
    report,
)

pytestmark = pytest.mark.timeout(180)


def where(names: list[str]) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "main": threading.current_thread() is threading.main_thread(),
        "rank": get_context().world_rank,
        **{name: os.environ.get(name) for name in names},
    }


def test_each_framework_finds_its_variables(tmp_path: Path) -> None:
    """In a process of its own, in the main thread of that."""
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG", "JAX_PROCESS_ID"]
    names += ["JAX_COORDINATOR_ADDRESS", "OMP_NUM_THREADS", "MINE"]
    found: dict[str, list[dict[str, Any]]] = {}
    for backend in ("torch", "jax", "tensorflow"):
        result = Trainer(
            where,
            names,
            ScalingConfig(env={"MINE": "yes", "OMP_NUM_THREADS": "1"}),
            RunConfig(backend, str(tmp_path)),
            backend=backend,
        ).fit()
        assert result.return_values is not None
        found[backend] = list(result.return_values)
        assert len({of["pid"] for of in found[backend]} | {os.getpid()}) == 3
        assert all(of["main"] and of["MINE"] == "yes" and of["OMP_NUM_THREADS"] == "1" for of in found[backend])
    torch, jax, tensorflow = found["torch"], found["jax"], found["tensorflow"]
    assert [(of["RANK"], of["LOCAL_RANK"], of["WORLD_SIZE"]) for of in torch] == [("0", "0", "2"), ("1", "1", "2")]
    assert torch[0]["MASTER_PORT"] == torch[1]["MASTER_PORT"]
    assert [of["JAX_PROCESS_ID"] for of in jax] == ["0", "1"]
    assert jax[0]["JAX_COORDINATOR_ADDRESS"] == jax[1]["JAX_COORDINATOR_ADDRESS"]
    assert '"task": {"type": "worker", "index": 1}' in tensorflow[1]["TF_CONFIG"]
    assert torch[0]["TF_CONFIG"] != tensorflow[0]["TF_CONFIG"]


def test_all_begin_again_if_one_dies(tmp_path: Path) -> None:
    result = Trainer(
        epochs,
        {"epochs": 3, "folder": str(tmp_path), "dies_before": 2},
        run=RunConfig("dies", str(tmp_path / "runs")),
        backend="torch",
    ).fit()
    assert result.return_values == [[2, 3], [2, 3]]
    assert [metrics["epoch"] for metrics in result.metrics_history] == [1, 2, 3]


def test_datasets_broadcasts_and_threads(tmp_path: Path) -> None:
    """Several threads of a function ask at the same time."""

    def train() -> Any:
        total = int(sum(batch.sum() for batch in get_dataset_shard().iter_batches(7)))
        values: list[Any] = []
        thread = threading.Thread(target=lambda: values.append(broadcast(total)))
        thread.start()
        thread.join()
        report({"total": total})
        return total, values[0]

    result = Trainer(
        train, run=RunConfig("data", str(tmp_path)), backend="torch", datasets={"train": np.arange(20)}
    ).fit()
    assert result.return_values == [(45, 45), (145, 45)]


def test_errors_come_with_their_class_and_traceback(tmp_path: Path) -> None:
    def raises() -> None:
        if get_context().world_rank:
            raise KeyError("no such key")
        broadcast()

    with pytest.raises(TrainingFailedError, match="failed on rank 1") as raised:
        Trainer(raises, run=RunConfig("raises", str(tmp_path)), backend="torch").fit()
    assert isinstance(raised.value.errors[1], KeyError)
    assert "test_isolated.py" in str(raised.value.errors[1])


def test_a_process_that_is_killed_too_often(tmp_path: Path) -> None:
    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run = RunConfig("killed", str(tmp_path), failure=FailureConfig(max_failures=1))
    with pytest.raises(TrainingFailedError, match=r"the process of dies, rank ., was killed by SIGKILL"):
        Trainer(dies, run=run, backend="torch").fit()


@pytest.mark.parametrize(("backend", "workers"), [("torch", 1), ("numpy", 1), ("numpy", (1, 1)), ("numpy", 0)])
def test_sys_exit_is_an_end_or_an_error(tmp_path: Path, backend: str, workers: Any) -> None:
    def ends(config: int) -> None:
        sys.exit(config)

    def fit(code: int) -> Result:
        scaling, run = ScalingConfig(workers=workers), RunConfig(f"exits-{code}", str(tmp_path))
        return Trainer(ends, code, scaling, run, backend=backend).fit()

    assert fit(0).return_values == [None]
    with pytest.raises(TrainingFailedError if workers else SystemExit, match="SystemExit: 3" if workers else "3"):
        fit(3)


def test_a_function_that_is_told_to_stop_is_killed(tmp_path: Path) -> None:
    """Also one that is in the middle of something that nothing interrupts."""

    def train(folder: str) -> None:
        write_whole(f"{folder}/pid-{get_context().world_rank}", os.getpid())
        if get_context().world_rank:
            while not Path(folder, "pid-0").exists():
                pass
            raise ValueError("enough")
        signal.pause()

    with pytest.raises(TrainingFailedError, match="enough"):
        Trainer(train, str(tmp_path), run=RunConfig("stops", str(tmp_path / "runs")), backend="torch").fit()
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), 0)


def test_functions_that_hold_the_clusters_variables_are_refused(tmp_path: Path) -> None:
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            w = Variable(np.zeros(3), name="w")

        def train() -> Any:
            return w.numpy()

        with pytest.raises(errors.MisuseError, match=r"train captures variables of the cluster.*use backend=.numpy"):
            Trainer(train, scaling=ScalingConfig(workers=1), run=RunConfig("w", str(tmp_path)), backend="jax").fit()
