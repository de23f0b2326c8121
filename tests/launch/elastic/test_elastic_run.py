"""Elastic runs on real workers, which join, leave and die while it trains: no row is lost, or counted twice."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.launch.test_trainer import first_time
from tests.roles.processes import run as command
from tests.waiting import TIMEOUT, until, write_whole

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    Variable,
    errors,
    experimental_get_current_worker_index,
)
from pscluster.coordinator.local.local_cluster import LocalClusterError
from pscluster.launch import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    Trainer,
    TrainingFailedError,
    barrier,
    broadcast,
    get_checkpoint,
    get_context,
    get_dataset_shard,
    report,
)
from pscluster.launch.storage.run_folder import RunFolder

pytestmark = pytest.mark.timeout(180)

ROWS = 201


def variables(_: object) -> Variable:
    return Variable(np.zeros(ROWS, np.int64), name="seen")


def epochs_of(config: dict[str, Any]) -> int:
    """How many epochs there are: with "ends", what the file with that name says once it is there."""
    if "ends" not in config:
        return int(config["epochs"])
    path = Path(config["ends"])
    return int(path.read_text()) if path.exists() else 1000


def count(config: dict[str, Any]) -> list[int]:
    """Count each row on the servers; report after each epoch, and after every tenth batch."""
    context, shard = get_context(), get_dataset_shard()
    barrier()
    assert broadcast(7 if context.world_rank == 0 else None) == 7
    while shard.epoch < epochs_of(config):
        for nth, rows in enumerate(shard.iter_batches(5, shuffle=True), 1):
            context.variables.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
            if nth % 10 == 0:
                report({"rank": context.world_rank, "size": context.world_size})
        report({"rank": context.world_rank, "size": context.world_size})
    seen: list[int] = context.variables.numpy().tolist()
    return seen


def records(path: Path, after: int = 0) -> list[dict[str, Any]]:
    """The reports of a run, but for the first ones."""
    return [json.loads(file.read_text()) for file in sorted(path.glob("reports/*.json"))[after:]]


def check_rows(result: Result, epochs: int) -> np.ndarray[Any, Any]:
    """Check that all rows of all epochs are done, and return how often each was counted more than that."""
    *_, last = records(Path(result.path))
    assert last["rows"]["train"]["epoch"] == epochs
    assert result.return_values
    seen: np.ndarray[Any, Any] = np.max([seen for seen in result.return_values if seen is not None], axis=0)
    beyond = seen - epochs
    assert beyond.min() >= 0, "no row is lost"
    assert beyond.sum() <= result.rows_again, "what was counted twice, the result tells of"
    return beyond


@contextmanager
def fitting(trainer: Trainer) -> Iterator[list[Any]]:
    """Fit in a thread within the block; yields what becomes its result, or its error."""
    ended: list[Any] = []

    def fit() -> None:
        try:
            ended.append(trainer.fit())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    yield ended
    thread.join(TIMEOUT)
    assert ended, "it has ended"
    if isinstance(ended[0], BaseException):
        raise ended[0]


def reporting(path: Path, ended: list[Any]) -> Callable[..., None]:
    """Return what waits for a new report that fulfils a condition."""

    def wait(condition: Callable[[dict[str, Any]], bool] = lambda _: True) -> None:
        known = len(list(path.glob("reports/*.json")))
        until(lambda: ended or any(map(condition, records(path, known))), "there is such a report")
        assert not ended, ended

    return wait


@pytest.mark.parametrize("seed", range(2))
def test_workers_come_go_and_die_at_random(tmp_path: Path, seed: int) -> None:
    rng, config = random.Random(seed), {"ends": str(tmp_path / "ends")}
    trainer = Trainer(
        count,
        config,
        ScalingConfig(workers=(1, 4)),
        RunConfig("random", str(tmp_path), failure=FailureConfig(-1)),
        datasets={"train": np.arange(ROWS)},
        variables=variables,
        seed=seed,
    )
    with fitting(trainer) as ended:
        wait = reporting(tmp_path / "random", ended)
        wait()
        cluster = LocalCluster.running()[-1]
        for _ in range(6):
            workers = [index for role, index in cluster.pids if role == "worker"]
            if workers and rng.random() < 0.5:
                with suppress(errors.MisuseError):  # it may have just left
                    cluster.kill("worker", rng.choice(workers))
            else:
                trainer.scale(rng.randint(1, 4))
            wait()
        trainer.scale(3)
        wait(lambda record: len(record["metrics"]) == 3)
        last = records(tmp_path / "random")[-1]["rows"]["train"]["epoch"] + 3
        write_whole(tmp_path / "ends", last)
    check_rows(ended[0], last)
    sizes = [[metrics["size"] for metrics in record["metrics"].values()] for record in records(tmp_path / "random")]
    assert {3} in map(set, sizes)
    for record in records(tmp_path / "random"):
        ranks = [metrics["rank"] for metrics in record["metrics"].values()]
        assert ranks == list(map(int, record["metrics"]))


def test_killed_behind_a_report(tmp_path: Path) -> None:
    """What was reported counts; a member that joins in its place goes on with what is left."""

    def train(config: dict[str, Any]) -> list[int]:
        context, shard = get_context(), get_dataset_shard()
        for _ in shard.epochs(3):
            for rows in shard.iter_batches(5):
                context.variables.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
            report({"size": context.world_size})
            if context.world_rank == 1 and first_time(config["folder"], "died"):
                os.kill(os.getpid(), signal.SIGKILL)
        seen: list[int] = context.variables.numpy().tolist()
        return seen

    result = Trainer(
        train,
        {"folder": str(tmp_path)},
        ScalingConfig(workers=(2, 2)),
        RunConfig("behind", str(tmp_path)),
        datasets={"train": np.arange(ROWS)},
        variables=variables,
    ).fit()
    assert (tmp_path / "died").exists()
    assert check_rows(result, 3).sum() == result.rows_again == 0


def test_killed_in_a_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it reports is not committed: others are given its rows, and they are counted."""

    def train(config: dict[str, Any]) -> list[int]:
        context, shard, reports = get_context(), get_dataset_shard(), Path(config["folder"], "reports")
        for _ in shard.epochs(2):
            taken = 0
            if context.world_rank == 0:
                until(reports.exists, "the other one has taken rows, and reports")
            for rows in shard.iter_batches(5):
                context.variables.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
                taken += len(rows)
                if context.world_rank == 1 and taken == 30 and first_time(config["folder"], "first"):
                    write_whole(reports, experimental_get_current_worker_index())
                    report({"taken": taken})
            until(Path(config["folder"], "has-left").exists, "the other one is gone")
            report({"taken": taken})
        seen: list[int] = context.variables.numpy().tolist()
        return seen

    trainer = Trainer(
        train,
        {"folder": str(tmp_path)},
        ScalingConfig(workers=(2, 2)),
        RunConfig("inside", str(tmp_path)),
        datasets={"train": np.arange(ROWS)},
        variables=variables,
    )
    with fitting(trainer) as ended:
        until(lambda: ended or (tmp_path / "reports").exists(), "one reports")
        cluster = LocalCluster.running()[-1]
        cluster.kill("worker", int((tmp_path / "reports").read_text()))
        until(lambda: "rank 1 has left" in caplog.text, "it has left")
        (tmp_path / "has-left").touch()
    beyond = check_rows(ended[0], 2)
    assert beyond.sum() == 30
    assert beyond.max() == 1


def dies_on_worker_1(config: dict[str, Any]) -> int:
    if experimental_get_current_worker_index() == 1 and not Path(config["folder"], "well").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    context = get_context()
    while not Path(config["folder"], "enough").exists():
        report({"size": context.world_size})
        time.sleep(0.05)
    return experimental_get_current_worker_index()


def test_a_worker_that_dies_too_often_is_done_without_until_it_is_started_again(tmp_path: Path) -> None:
    trainer = Trainer(
        dies_on_worker_1,
        {"folder": str(tmp_path)},
        ScalingConfig(workers=(1, 2)),
        RunConfig("without", str(tmp_path), failure=FailureConfig(max_failures=1)),
    )
    with fitting(trainer) as ended:
        wait = reporting(tmp_path / "without", ended)
        wait(lambda record: record["metrics"] == {"0": {"size": 1}})
        cluster = LocalCluster.running()[-1]
        until(lambda: "giving it up" in cluster.why_gone("worker", 1), "it is given up")
        wait(lambda record: record["metrics"] == {"0": {"size": 1}})
        (tmp_path / "well").touch()
        trainer.scale(2)
        wait(lambda record: record["metrics"] == {"0": {"size": 2}, "1": {"size": 2}})
        (tmp_path / "enough").touch()
    assert sorted(ended[0].return_values) == [0, 1]


def test_the_command_scale(tmp_path: Path) -> None:
    """It asks a run that runs for another number of workers; what can't be is refused."""

    def train(config: dict[str, Any]) -> None:
        while not Path(config["folder"], "enough").exists():
            report({"size": get_context().world_size})
            time.sleep(0.05)

    run, path = RunConfig("asked", str(tmp_path)), tmp_path / "asked"
    with fitting(Trainer(train, {"folder": str(tmp_path)}, ScalingConfig(workers=(1, 3)), run)) as ended:
        wait = reporting(path, ended)
        wait()
        code, output = command("scale", str(path), "4")
        assert code == 1
        assert "has 1 to 3 workers, not 4" in output
        assert command("scale", f"{path}/", "3") == (0, "asked asked for 3 workers\n")
        wait(lambda record: len(record["metrics"]) == 3)
        (tmp_path / "enough").touch()
    code, output = command("scale", str(path), "3")
    assert (code, " ".join(output.split())) == (
        1,
        f"Error: the run in {path} is over (finished), so its number of workers can't change",
    )
    assert "there is no run in" in command("scale", str(tmp_path / "none"), "3")[1]
    folder = RunFolder(str(tmp_path), "fixed")
    with folder.writing(workers=2), pytest.raises(errors.MisuseError, match="has 2 workers throughout"):
        RunFolder(str(tmp_path), "fixed").read().request_workers(3)
    with pytest.raises(errors.MisuseError, match=r"call Trainer.scale\(\) in its process"):
        RunFolder("memory://asked", "url").request_workers(3)


def test_too_few_for_too_long(tmp_path: Path) -> None:
    trainer = Trainer(
        dies_on_worker_1,
        {"folder": str(tmp_path)},
        ScalingConfig(workers=(2, 2), join_timeout=1.0),
        RunConfig("few", str(tmp_path), failure=FailureConfig(max_failures=0)),
    )
    why = r"had . members? for 1 s, and needs at least 2, as ScalingConfig\(workers=\(2, 2\)\) says: give it workers"
    with pytest.raises(TrainingFailedError, match=why):
        trainer.fit()
    assert Result.load(tmp_path / "few").state == "failed"


def test_no_worker_is_left(tmp_path: Path) -> None:
    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    run = RunConfig("none", str(tmp_path), failure=FailureConfig(max_failures=0))
    with pytest.raises(TrainingFailedError, match=r"no worker is left: worker . \(pid \d+\) was killed by SIGKILL"):
        Trainer(dies, scaling=ScalingConfig(workers=(1, 2)), run=run).fit()


def test_no_worker_is_left_when_a_member_is_scheduled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster may say so in between, while another member is still being ended."""
    schedule = ClusterCoordinator.schedule_with

    def late(self: ClusterCoordinator, *args: Any, **options: Any) -> Any:
        assert self.context.dispatcher is not None
        self.context.dispatcher.state.abort(LocalClusterError("no worker is left: they have died"), final=False)
        return schedule(self, *args, **options)

    monkeypatch.setattr(ClusterCoordinator, "schedule_with", late)
    run = RunConfig("none", str(tmp_path))
    with pytest.raises(TrainingFailedError, match="no worker is left: they have died"):
        Trainer(print, scaling=ScalingConfig(workers=(1, 1)), run=run).fit()
    assert Result.load(tmp_path / "none").state == "failed"


def test_a_function_that_raises(tmp_path: Path) -> None:
    def raises() -> None:
        if get_context().world_rank == 1:
            raise ValueError("this is wrong")
        report({})

    run = RunConfig("raises", str(tmp_path))
    with pytest.raises(TrainingFailedError, match=r"failed on rank 1: .*this is wrong") as raised:
        Trainer(raises, scaling=ScalingConfig(workers=(2, 2)), run=run).fit()
    assert isinstance(raised.value.errors[1], ValueError)


def test_a_run_goes_on(tmp_path: Path) -> None:
    """Behind its newest checkpoint: rows that were reported later are given out again, and counted."""

    def train(config: dict[str, Any]) -> int:
        saved, context, shard = get_checkpoint(), get_context(), get_dataset_shard()
        for epoch in shard.epochs(config["epochs"]):
            for rows in shard.iter_batches(10):
                context.variables.scatter_add(IndexedSlices(np.ones(len(rows), np.int64), rows))
            mine = Checkpoint.from_variables() if context.world_rank == 0 and epoch < config["saved"] else None
            report({"epoch": epoch, "reports": context.reports, "resumed": saved is not None}, mine)
        barrier()
        total: int = context.variables.numpy().sum()
        return total

    def fit(workers: Any, **config: int) -> Result:
        return Trainer(
            train,
            config,
            ScalingConfig(workers=workers),
            RunConfig("goes-on", str(tmp_path)),
            datasets={"train": np.arange(ROWS)},
            variables=variables,
        ).fit()

    # One member: of two, one that joins late may have reported rows of epoch 2 with the checkpoint of epoch 1.
    assert fit((1, 1), epochs=3, saved=2).rows_again == 0
    more = fit((1, 2), epochs=4, saved=4)
    assert set(more.return_values or ()) == {4 * ROWS}, "the variables of the checkpoint, and two epochs"
    assert more.rows_again == ROWS
    history = [(metrics["epoch"], metrics["reports"]) for metrics in more.metrics_history]
    # Who opens the data after all rows of epoch 2 are given out begins with epoch 3, and both are in one report then.
    assert history in ([(0, 0), (1, 1), (2, 2), (2, 3)], [(0, 0), (1, 1), (2, 2), (2, 3), (3, 4)])
    assert more.metrics["resumed"]
    assert set(fit(2, epochs=5, saved=5).return_values or ()) == {5 * ROWS}, "of a fixed number"
    assert set(fit(3, epochs=6, saved=6).return_values or ()) == {6 * ROWS}, "of another one"
    assert set(fit((1, 2), epochs=7, saved=7).return_values or ()) == {7 * ROWS}


def test_what_is_refused(tmp_path: Path) -> None:
    for arguments, message in (
        ({"backend": "torch"}, "a process group of torch can't lose a rank: give one number, or keep parameters on"),
        ({"run": RunConfig(failure=FailureConfig(restart="group"))}, 'with restart="group" all begin again together'),
        ({"split": "pad"}, 'split="pad" cuts rows for a fixed number: leave it at "all", or give one number'),
    ):
        with pytest.raises(ValueError, match=rf"workers is \(2, 8\), so members may come and go, but .*{message}"):
            Trainer(print, scaling=ScalingConfig(workers=(2, 8)), **arguments)
    fixed = Trainer(print, scaling=ScalingConfig(workers=2))
    with pytest.raises(errors.MisuseError, match="the run has 2 workers throughout"):
        fixed.scale(3)
    trainer = Trainer(print, scaling=ScalingConfig(workers=(2, 3)), run=RunConfig("none", str(tmp_path)))
    with pytest.raises(errors.MisuseError, match=r"fit\(\) is not running"):
        trainer.scale(3)
    with pytest.raises(ValueError, match="workers is 4"):
        trainer.scale(4)
