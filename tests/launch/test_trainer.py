"""Training functions on real workers: what they report, what is kept, and what dies."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.coordinator.training.test_callbacks import scalars_of
from tests.faults.arming.faults import environment
from tests.waiting import TIMEOUT

from pscluster.coordinator import LocalCluster, Variable, errors, optimizers
from pscluster.launch import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TensorflowTrainer,
    Trainer,
    TrainingFailedError,
    barrier,
    broadcast,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)

pytestmark = pytest.mark.timeout(180)


def first_time(folder: str, name: str) -> bool:
    """Whether nobody has asked this under the name before."""
    try:
        os.close(os.open(Path(folder, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def save(folder: Path, epoch: int) -> Checkpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "epoch.txt").write_text(str(epoch))
    return Checkpoint.from_directory(folder)


def epoch_of(checkpoint: Checkpoint | None) -> int:
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        return int(Path(folder, "epoch.txt").read_text())


def epochs(config: dict[str, Any]) -> list[int]:
    """Report once an epoch, rank 0 with a checkpoint; die where the configuration says, once."""
    context, seen = get_context(), []
    for epoch in range(epoch_of(get_checkpoint()) + 1, config["epochs"] + 1):
        if epoch == config.get("dies_before") and context.world_rank == 1 and first_time(config["folder"], "died"):
            os.kill(os.getpid(), signal.SIGKILL)
        seen.append(epoch)
        checkpoint = None
        if context.world_rank == 0:
            checkpoint = save(Path(config["folder"], f"rank-{context.world_rank}"), epoch)
        report({"epoch": epoch, "loss": np.float32(1 / epoch), "rank": context.world_rank}, checkpoint)
        if epoch == config.get("dies_after") and context.world_rank == 1 and first_time(config["folder"], "died"):
            os.kill(os.getpid(), signal.SIGKILL)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_reports_checkpoints_and_results(tmp_path: Path, workers: int) -> None:
    trainer = Trainer(
        epochs,
        {"epochs": 5, "folder": str(tmp_path)},
        ScalingConfig(workers=workers),
        RunConfig("five", str(tmp_path / "runs"), checkpoint=CheckpointConfig(2, "loss", "max")),
    )
    result = trainer.fit()
    assert result.state == "finished"
    assert result.return_values == [[1, 2, 3, 4, 5]] * max(workers, 1)
    assert [metrics["epoch"] for metrics in result.metrics_history] == [1, 2, 3, 4, 5]
    assert result.metrics == {"epoch": 5, "loss": pytest.approx(0.2), "rank": 0}
    assert epoch_of(result.checkpoint) == 5
    kept = [epoch_of(checkpoint) for checkpoint, _ in result.best_checkpoints]
    assert kept == [1, 2, 5], "the best two, and the newest"
    assert Result.load(result.path) == result
    lines = (Path(result.path) / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 5 * max(workers, 1)
    (events,) = scalars_of(Path(result.path) / "tensorboard").values()
    assert events["epoch"] == [(epoch, epoch) for epoch in range(1, 6)]


@pytest.mark.parametrize("restart", ["worker", "group"])
@pytest.mark.parametrize("dies", ["dies_before", "dies_after"])
def test_a_worker_that_dies(tmp_path: Path, restart: Any, dies: str) -> None:
    """What was reported stays; the member continues after its last checkpoint, alone or with the others."""
    result = Trainer(
        epochs,
        {"epochs": 4, "folder": str(tmp_path), dies: 2},
        run=RunConfig("dies", str(tmp_path / "runs"), failure=FailureConfig(restart=restart)),
    ).fit()
    assert [metrics["epoch"] for metrics in result.metrics_history] == [1, 2, 3, 4]
    assert result.return_values is not None
    again = [2, 3, 4] if dies == "dies_before" else [3, 4]
    assert result.return_values[1] == again
    assert result.return_values[0] == (again if restart == "group" else [1, 2, 3, 4])


def test_a_run_goes_on_and_another_begins_from_its_checkpoint(tmp_path: Path) -> None:
    run, one = RunConfig("goes-on", str(tmp_path / "runs")), ScalingConfig(workers=0)
    config = {"epochs": 2, "folder": str(tmp_path)}
    first = Trainer(epochs, config, one, run).fit()
    second = Trainer(epochs, {**config, "epochs": 4}, one, run).fit()
    assert second.return_values == [[3, 4]]
    assert [metrics["epoch"] for metrics in second.metrics_history] == [1, 2, 3, 4]
    other = RunConfig("other", str(tmp_path / "runs"))
    third = Trainer(epochs, {**config, "epochs": 6}, one, other, resume_from_checkpoint=second.checkpoint).fit()
    assert [metrics["epoch"] for metrics in third.metrics_history] == [5, 6]
    assert first.path == second.path != third.path


def rows(config: dict[str, Any]) -> list[int]:
    """Take two epochs of batches, with a report and a checkpoint of nothing after each; die in the middle, once."""
    get_checkpoint()
    shard, taken = get_dataset_shard("train"), []
    while shard.position.epoch < 2:
        for nth, batch in enumerate(shard.iter_batches(32, shuffle=True)):
            taken += batch["id"].tolist()
            in_the_middle = nth == 1 and shard.position.epoch == 1 and get_context().world_rank == 0
            if in_the_middle and first_time(config["folder"], "died"):
                os.kill(os.getpid(), signal.SIGKILL)
        folder = Path(config["folder"], f"{get_context().world_rank}-{shard.position.epoch}")
        report({"rows": len(taken)}, save(folder, shard.position.epoch))
    return taken


def test_each_row_is_given_out_once_an_epoch(tmp_path: Path) -> None:
    """201 rows for two members; one dies in the second epoch, and begins it again."""
    result = Trainer(
        rows,
        {"folder": str(tmp_path)},
        run=RunConfig("rows", str(tmp_path / "runs")),
        datasets={"train": {"id": np.arange(201), "x": np.zeros((201, 3))}},
        seed=3,
    ).fit()
    assert result.return_values is not None
    restarted, other = result.return_values
    assert (len(other), len(restarted)) == (200, 101)
    assert sorted([*other[100:], *restarted]) == list(range(201))
    assert result.rows_again == 0, "it had reported none of the rows that it was given again"


def test_barriers_and_broadcasts(tmp_path: Path) -> None:
    def meets() -> Any:
        barrier()
        value = broadcast({"seed": 7} if get_context().world_rank == 0 else None)
        report({"x": 1.0})
        return value, broadcast(get_context().world_rank)

    result = Trainer(meets, run=RunConfig("meets", str(tmp_path))).fit()
    assert result.return_values == [({"seed": 7}, 0)] * 2


@pytest.mark.parametrize("resumes", [False, True])
def test_parameters_on_the_servers(tmp_path: Path, resumes: bool) -> None:
    """The function finds the variables that were made for it; the servers keep them while a worker is restarted.

    It begins from its start, or from the newest checkpoint: each update counts once.
    """

    def variables(config: dict[str, Any]) -> dict[str, Any]:
        return {"w": Variable(np.zeros(3), name="w"), "sgd": optimizers.SGD(config["lr"])}

    def train(config: dict[str, Any]) -> list[float]:
        made, first = get_context().variables, 0
        if config["resumes"] and (checkpoint := get_checkpoint()) is not None:
            first = checkpoint.get_metadata()["next"]
        for step in range(first, 10):
            made["sgd"].apply_gradients([(np.ones(3), made["w"])])
            with tempfile.TemporaryDirectory() as folder:
                mine = Checkpoint.from_directory(folder) if get_context().world_rank == 0 and step % 3 == 2 else None
                if mine is not None:
                    mine.set_metadata({"next": step + 1})
                report({"step": step}, mine)
            if step == 4 and get_context().world_rank == 1 and first_time(config["folder"], "died"):
                os.kill(os.getpid(), signal.SIGKILL)
        barrier()
        values: list[float] = made["w"].numpy().tolist()
        return values

    config = {"lr": 1.0, "folder": str(tmp_path), "resumes": resumes}
    result = Trainer(train, config, run=RunConfig("ps", str(tmp_path / "runs")), variables=variables).fit()
    assert len(result.metrics_history) == 10
    assert result.return_values == [[-20.0] * 3] * 2, "updates of both attempts count once"


def test_a_checkpoint_of_the_servers_variables(tmp_path: Path) -> None:
    """A run that goes on, and one that is resumed from a checkpoint, begin with its values and slots."""

    def variables(_: object) -> dict[str, Any]:
        return {"w": Variable(np.zeros(3), name="w"), "adam": optimizers.Adam(0.1)}

    def train(config: dict[str, Any]) -> tuple[int, list[float]]:
        made, rank, first = get_context().variables, get_context().world_rank, 0
        if (checkpoint := get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                first = int(Path(folder, "epoch").read_text())
        for epoch in range(first, config["epochs"]):
            barrier()
            made["adam"].apply_gradients([(np.full(3, 1.0 + epoch), made["w"])])
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "epoch").write_text(str(epoch + 1))
                report({"epoch": epoch}, Checkpoint.from_variables(folder) if rank == 0 else None)
        barrier()
        return made["adam"].iterations, made["w"].numpy().tolist()

    def fit(name: str, epochs: int, **more: Any) -> Result:
        run = RunConfig(name, str(tmp_path), checkpoint=CheckpointConfig(num_to_keep=1))
        return Trainer(train, {"epochs": epochs}, run=run, variables=variables, **more).fit()

    whole = fit("whole", 3)
    fit("parts", 2)
    parts = fit("parts", 3)
    assert parts.return_values == whole.return_values
    assert parts.checkpoint is not None
    assert parts.checkpoint.has_variables
    resumed = fit("resumed", 4, resume_from=parts.checkpoint)
    assert resumed.return_values == fit("parts", 4).return_values
    assert [iterations for iterations, _ in resumed.return_values or []] == [8, 8]

    def without() -> None:
        with pytest.raises(errors.MisuseError, match=r"Trainer\(variables=\)"):
            report({}, Checkpoint.from_variables())

    Trainer(without, scaling=ScalingConfig(workers=0), run=RunConfig("none", str(tmp_path))).fit()


@pytest.mark.parametrize("durability", ["log", "none"])
def test_a_server_that_dies(tmp_path: Path, durability: Any) -> None:
    """While its part of a checkpoint is written. With a log nothing is lost; without, the run fails, and goes on."""

    def variables(_: object) -> Variable:
        return Variable(np.zeros(3), name="w")

    def train() -> list[float]:
        made, first = get_context().variables, 0
        if (checkpoint := get_checkpoint()) is not None:
            first = checkpoint.get_metadata()["next"]
        for step in range(first, 4):
            barrier()
            made.assign_add(np.ones(3))
            with tempfile.TemporaryDirectory() as folder:
                mine = Checkpoint.from_variables(folder) if get_context().world_rank == 0 else None
                if mine is not None:
                    mine.set_metadata({"next": step + 1})
                report({"step": step}, mine)
        barrier()
        values: list[float] = made.numpy().tolist()
        return values

    faults = environment(tmp_path, "ps/ps.part.after=kill@3")
    scaling = ScalingConfig(workers=2, ps=2, env=faults, durability=durability)
    trainer = Trainer(train, scaling=scaling, run=RunConfig("run", str(tmp_path / "runs")), variables=variables)
    if durability == "none":
        with pytest.raises(TrainingFailedError, match=r"ps \d at .* (has lost its|without its) "):
            trainer.fit()
        assert len(Result.load(tmp_path / "runs" / "run").metrics_history) == 2
    result = trainer.fit()
    assert list(tmp_path.glob("struck-*")), "one has died"
    assert [metrics["step"] for metrics in result.metrics_history] == [0, 1, 2, 3]
    assert result.return_values == [[8.0] * 3] * 2


def test_a_function_that_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error is that of its rank, once; the other is stopped while it waits."""

    def raises() -> None:
        report({"x": 1.0})
        if get_context().world_rank == 1:
            raise ValueError("this is wrong")
        report({"x": 2.0})

    run = RunConfig("raises", str(tmp_path))
    with pytest.raises(
        TrainingFailedError, match=r"failed on rank 1: raises failed on worker . .*this is wrong"
    ) as raised:
        Trainer(raises, run=run).fit()
    assert list(raised.value.errors) == [1]
    assert isinstance(raised.value.errors[1], ValueError)
    assert "coordinator.join()" not in caplog.text, "this user has no coordinator"
    assert raised.value.result.metrics == {"x": 1.0}
    assert Result.load(str(tmp_path / "raises")).state == "failed"


def test_a_member_that_never_reports(tmp_path: Path) -> None:
    def silent() -> None:
        if get_context().world_rank == 0:
            report({"x": 1.0})
        time.sleep(TIMEOUT)

    run = RunConfig("silent", str(tmp_path), report_timeout=1.0)
    with pytest.raises(TrainingFailedError, match="report 1 has waited 1 s for rank 1: every rank has to call report"):
        Trainer(silent, run=run).fit()


@pytest.mark.parametrize(("restart", "backend"), [("worker", "numpy"), ("group", "numpy"), ("worker", "torch")])
def test_a_member_that_returns_is_not_awaited(tmp_path: Path, restart: Any, backend: str) -> None:
    def uneven() -> None:
        for _ in range(3 if get_context().world_rank == 0 else 1):
            report({"rank": get_context().world_rank})
        if "RANK" in os.environ:
            sys.exit(0)  # as a script may

    run = RunConfig("uneven", str(tmp_path), failure=FailureConfig(restart=restart))
    result = Trainer(uneven, run=run, backend=backend).fit()
    assert len(result.metrics_history) == 3


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"train_fn": 3}, TypeError, "Trainer takes a function, not an int"),
        ({"backend": "mxnet"}, ValueError, "backend is 'mxnet'; give one of 'numpy', 'torch', 'jax', 'tensorflow'"),
        ({"scaling": 2}, TypeError, "scaling is an int, not a ScalingConfig"),
        ({"run": "name"}, TypeError, "run is a str, not a RunConfig"),
        ({"resume_from": "path"}, TypeError, "resume_from is a str, not a Checkpoint"),
        ({"config": {}, "train_loop_config": {}}, TypeError, "config and train_loop_config are the same argument"),
        ({"variables": dict, "backend": "torch"}, ValueError, "variables are on parameter servers"),
        ({"launcher": "ray"}, TypeError, "launcher is a str; give a callable, such as RayCluster"),
        ({"launcher": print, "scaling": ScalingConfig(workers=0)}, ValueError, "a launcher starts workers, and with"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Trainer(**{"train_fn": print, **arguments})


def test_a_launcher(tmp_path: Path) -> None:
    """It is asked for the cluster that the configuration describes; members learn where they are in it."""
    asked: list[dict[str, Any]] = []

    class Elsewhere(LocalCluster):
        def worker_hosts(self) -> list[str]:
            """Where its workers are, as it says."""
            return ["10.0.0.1", "10.0.0.2", "10.0.0.1"]

    def launcher(**options: Any) -> LocalCluster:
        asked.append(dict(options))
        return Elsewhere(options.pop("ps"), options.pop("workers"), **options)

    def train() -> tuple[int, ...]:
        barrier()  # else one worker may run two members, one after the other
        context = get_context()
        return context.get_node_rank(), context.get_local_rank(), context.get_local_world_size()

    scaling = ScalingConfig(workers=3, ps=2, env={"MINE": "1"}, durability="none")
    run = RunConfig("run", storage=str(tmp_path))
    result = Trainer(train, scaling=scaling, run=run, launcher=launcher).fit()
    assert asked == [{"ps": 2, "workers": 3, "env": {"MINE": "1"}, "log_level": "ERROR", "durability": "none"}]
    assert sorted(map(tuple, result.return_values or ())) == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]


def test_a_chief_with_workers_and_servers_of_its_own(tmp_path: Path) -> None:
    """With TensorFlow's parameter servers, the run is over when the chief is, which alone reports."""

    def train() -> list[str]:
        config = json.loads(os.environ["TF_CONFIG"])
        job, index = config["task"]["type"], config["task"]["index"]
        if job != "chief":
            with pytest.raises(errors.MisuseError) as refused:
                report({"x": 1.0})
            if job == "ps" and get_context().attempt == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            host, port = config["cluster"][job][index].split(":")
            with socket.create_server((host, int(port))) as server:
                while True:
                    with server.accept()[0] as caller:
                        caller.sendall(f"{job} {index}: {refused.value}".encode())
        said: dict[str, str] = {}
        for address in (*config["cluster"]["worker"], *config["cluster"]["ps"]):
            while not said.get(address):
                said[address] = _said_at(address)
        assert sum(len(rows) for rows in get_dataset_shard().iter_batches(4)) == 10
        report({"x": 2.0})
        return list(said.values())

    result = Trainer(
        train,
        scaling=ScalingConfig(workers=1, ps=1),
        run=RunConfig("chief", str(tmp_path)),
        backend="tensorflow",
        datasets={"train": np.arange(10)},
    ).fit()
    assert result.metrics_history == [{"x": 2.0}]
    (said,) = result.return_values or ()
    assert [line.partition(":")[0] for line in said] == ["worker 0", "ps 0"]
    assert all("only the chief of a ParameterServerStrategy reports" in line for line in said)


def _said_at(address: str) -> str:
    """What is said to those that connect there; "" as long as there is no listener."""
    host, port = address.split(":")
    with socket.socket() as caller:
        if caller.connect_ex((host, int(port))):
            time.sleep(0.05)
            return ""
        return caller.makefile().read()


def test_the_names_of_the_guide(tmp_path: Path) -> None:
    """Its quick start's arguments, each under the guide's name."""

    def train_func(config: dict[str, Any]) -> int:
        assert config.get("batch_size", 64) == 32
        context = get_context()
        assert (context.get_world_size(), context.get_local_world_size(), context.get_node_rank()) == (2, 2, 0)
        report({"rank": context.get_world_rank()})
        return int(os.environ["TF_CONFIG"].count("127.0.0.1"))

    result = TensorflowTrainer(
        train_loop_per_worker=train_func,
        train_loop_config={"batch_size": 32, "epochs": 4},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name="guide", storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=-1)),
    ).fit()
    assert result.metrics == {"rank": 0}
    assert result.return_values == [2, 2]


def test_outside_a_training_function() -> None:
    with pytest.raises(errors.MisuseError, match=r"report\(\) is for the function that Trainer.fit\(\) runs"):
        report({"x": 1})
