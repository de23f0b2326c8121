"""The callbacks, in trainings and in loops of one's own: what they save, stop, change and write."""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    DistributedDataset,
    History,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    callbacks,
    errors,
    metrics,
    optimizers,
)
from pscluster.coordinator.checkpoints.manager import CheckpointManager
from pscluster.coordinator.training.callbacks import CallbackList, Execution, Monitor
from pscluster.coordinator.training.state import TrainingState
from pscluster.ps.optim.schedules import ExponentialDecay
from pscluster.worker.steps.training import logs_of_steps

Step = Callable[[Any], Any]

STEPS = 4

SCALARS = """
import json, sys
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

runs = EventMultiplexer().AddRunsFromDirectory(sys.argv[1]).Reload()
scalars = {
    run: {tag: [(event.step, event.value) for event in runs.Scalars(run, tag)] for tag in found["scalars"]}
    for run, found in runs.Runs().items()
}
print(json.dumps(scalars))
"""


class Counter:
    """A model whose only variable counts its steps, and a step whose loss is how far that is from `best`."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        with strategy.scope():
            self.count = Variable(np.zeros((), np.int64), name="count")

    @property
    def value(self) -> int:
        """The number of steps that were counted."""
        return int(self.count.numpy())

    def step(self, best: int = 0) -> Step:
        """Counts."""
        count = self.count

        def step(_: Any) -> float:
            count.assign_add(1)
            return float(abs(int(count.numpy()) - best))

        return step


@pytest.fixture
def model(strategy: ParameterServerStrategy) -> Counter:
    """Of the test's own."""
    return Counter(strategy)


@pytest.fixture
def data(coordinator: ClusterCoordinator) -> DistributedDataset:
    """One step an epoch."""
    return coordinator.distribute_dataset(np.arange(3)).batch(3)


@pytest.fixture
def optimizer(strategy: ParameterServerStrategy) -> optimizers.Optimizer:
    """Whose learning rate is a number."""
    with strategy.scope():
        return optimizers.SGD(1.0)


def epochs_of(callback: callbacks.Callback, coordinator: ClusterCoordinator, losses: list[float]) -> CallbackList:
    """A loop of one's own, in which epochs come to these losses."""
    callback_list = CallbackList([callback], coordinator, epochs=len(losses))
    callback_list.on_train_begin()
    for epoch, loss in enumerate(losses):
        callback_list.on_epoch_begin(epoch)
        callback_list.on_epoch_end(epoch, {"loss": loss})
        if callback_list.training.stop_training:
            break
    callback_list.on_train_end()
    return callback_list


# Loops of one's own


def test_a_loop_of_ones_own(
    coordinator: ClusterCoordinator, model: Counter, tmp_path: Path, optimizer: optimizers.Optimizer
) -> None:
    """The same pieces, one by one: dataset, steps, evaluation, callbacks, history."""
    data = coordinator.distribute_dataset(np.arange(STEPS)).batch(1)
    rate = callbacks.LearningRateScheduler(optimizer, lambda epoch, rate: rate / 2)
    log, stop = callbacks.CSVLogger(tmp_path / "log.csv"), callbacks.EarlyStopping("loss", patience=1)
    calls = CallbackList([rate, log, stop], coordinator, epochs=9, steps=STEPS)
    history, step = History(), model.step(best=6)

    def run(part: Any) -> Any:
        return logs_of_steps(step, part)

    calls.on_train_begin()
    for epoch in range(9):
        calls.on_epoch_begin(epoch)
        values = [coordinator.schedule(run, args=(part,)) for part in data]
        losses = []
        for batch, value in enumerate(values):
            calls.on_train_batch_begin(batch)
            _, _, _, names, rows = value.fetch(TIMEOUT)
            calls.on_train_batch_end(batch, dict(zip(names, rows[0], strict=True)))
            losses.append(float(rows[0, 0]))
        assert (calls.training.epoch, calls.training.steps) == (epoch, STEPS)
        logs = {"loss": float(np.mean(losses))}
        calls.on_epoch_end(epoch, logs)
        history.add(epoch, logs)
        if calls.training.stop_training:
            break
    calls.on_train_end()
    calls.close()
    coordinator.join(TIMEOUT)
    assert history.epoch == [0, 1, 2]
    assert history.history["learning_rate"] == [0.5, 0.25, 0.125]
    assert history.history["loss"][1] < history.history["loss"][0] < history.history["loss"][2]
    assert [line.split(",")[0] for line in log.filename.read_text().splitlines()] == ["epoch", "0", "1", "2"]
    assert "loss has not become better than" in calls.training.stopped


def test_each_callback_gets_its_own_state(coordinator: ClusterCoordinator, optimizer: optimizers.Optimizer) -> None:
    """Through JSON, which has infinity; those that were not there before begin anew."""

    def made() -> CallbackList:
        plateau = callbacks.ReduceLROnPlateau(optimizer, "loss")
        return CallbackList([callbacks.EarlyStopping("loss"), plateau, callbacks.TensorBoard()], coordinator)

    first = made()
    for callback in first.callbacks[:2]:
        callback.on_train_begin()
        callback.on_epoch_end(0, {"loss": 3.0})
        callback.on_epoch_end(1, {"loss": 4.0})
    states = json.loads(json.dumps(first.states()))
    second = made()
    assert json.loads(json.dumps(second.states()))[0]["state"]["best"] == math.inf
    second.load_states(states)
    assert second.states() == first.states()
    other = CallbackList([callbacks.TerminateOnNaN(), *made().callbacks], coordinator)
    other.load_states(states)
    assert other.states() == first.states()
    last = CallbackList([callbacks.TensorBoard()], coordinator)
    before = last.states()
    last.load_states([state for state in states if state["callback"] != "TensorBoard"])
    assert last.states() == before


def test_closing(coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    """All of them, also where one can't be; what it says is logged."""
    closed = []

    class Closes(callbacks.Callback):
        def close(self) -> None:
            closed.append(self)
            raise OSError("no")

    CallbackList([Closes(), Closes()], coordinator).close()
    assert len(closed) == 2
    assert "the callback Closes failed at the end of training: no" in caplog.text


# What goes by a number


@pytest.mark.parametrize(
    ("name", "mode", "sign"),
    [
        ("loss", "auto", -1),
        ("val_accuracy", "auto", 1),
        ("auc", "auto", 1),
        ("mean_squared_error", "auto", -1),
        ("anything", "max", 1),
        ("accuracy", "min", -1),
    ],
)
def test_which_way_is_better(name: str, mode: Any, sign: int) -> None:
    """By the mode, or the name; by more than so much; what is not finite never is."""
    monitor = Monitor(name, mode, min_delta=0.5)
    assert not monitor.improves(math.nan)
    assert not monitor.improves(sign * math.inf)
    assert monitor.improves(1.0)
    monitor.best = 1.0
    assert monitor.improves(1.0 + sign * 0.6)
    assert not monitor.improves(1.0 + sign * 0.5)
    assert not monitor.improves(1.0 - sign * 0.6)
    assert not monitor.improves(math.nan)
    monitor.reset()
    assert monitor.best == -sign * math.inf


@pytest.mark.parametrize(
    ("arguments", "losses", "epochs", "best"),
    [
        ({}, [3, 2, 2, 1], 3, 2),  # as with Keras: 0 and 1 are the same
        ({"patience": 1}, [3, 2, 2, 1], 3, 2),
        ({"patience": 2}, [3, 2, 2, 1, 5, 5, 0], 6, 1),
        ({"patience": 3}, [3, 4, 4, 4, 4, 0], 4, 3),
        ({"min_delta": 0.5, "patience": 2}, [3, 2.6, 2.4, 2.3, 2.2, 1], 5, 2.4),
        ({"mode": "max"}, [1, 2, 3, 3, 9], 4, 3),
        ({"baseline": 2.0, "patience": 2}, [3, 2.5, 1, 1], 2, 2.5),
        ({"baseline": 2.0, "patience": 2}, [3, 1.5, 2, 1], 4, 1),
        ({"start_from_epoch": 3}, [1, 2, 3, 4, 3, 5, 0], 6, 3),
        ({}, [3, math.nan, 1], 2, 3),
    ],
)
def test_early_stopping(
    coordinator: ClusterCoordinator, arguments: dict[str, Any], losses: list[float], epochs: int, best: float
) -> None:
    """After that many epochs, with that as the best one."""
    stopping = callbacks.EarlyStopping("loss", **arguments)
    for _ in range(2):  # another training begins anew
        training = epochs_of(stopping, coordinator, losses).training
        assert training.epoch == epochs - 1
        assert stopping.best == best
        assert training.stop_training == (epochs < len(losses) or "epochs" in training.stopped)
    if training.stop_training:
        assert f"loss has not become better than {best:g} for" in training.stopped


def test_the_best_variables_come_back(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """They alone: the data stays where it is, and the training is over."""
    stopping = callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True, directory=str(tmp_path))
    history = coordinator.fit(model.step(best=2), data, epochs=9, callbacks=[stopping], verbose=0)
    assert history.history["loss"] == [1, 0, 1, 2]
    assert (stopping.best, stopping.best_epoch) == (0, 1)
    assert model.value == 2
    assert data.epoch == 4
    state = TrainingState(coordinator.context.client, 1)
    state.load()
    assert state.finished
    assert state.epoch == 4
    coordinator.fit(model.step(), data, verbose=0)
    assert (model.value, data.epoch) == (3, 5)


def test_the_best_variables_of_a_whole_training(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """Also where it was not stopped."""
    stopping = callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True, directory=str(tmp_path))
    coordinator.fit(model.step(best=1), data, epochs=3, callbacks=[stopping], verbose=0)
    assert model.value == 1
    with pytest.raises(ValueError, match="restore_best_weights needs directory="):
        callbacks.EarlyStopping("loss", restore_best_weights=True)


@pytest.mark.parametrize(
    ("arguments", "losses", "rates"),
    [
        ({"patience": 1}, [3, 3, 2, 3, 3], [1, 0.1, 0.1, 0.01, 0.001]),
        ({"patience": 2}, [3, 3, 3, 3, 3], [1, 1, 0.1, 0.1, 0.01]),
        ({"patience": 1, "cooldown": 2}, [3, 3, 3, 3, 3, 3], [1, 0.1, 0.1, 0.01, 0.01, 0.001]),
        ({"patience": 1, "min_lr": 0.05}, [3, 3, 3, 3], [1, 0.1, 0.05, 0.05]),
        ({"patience": 1, "min_delta": 1.0}, [3, 2.5, 1.9], [1, 0.1, 0.1]),
        ({"patience": 1, "mode": "max"}, [1, 2, 2], [1, 1, 0.1]),
    ],
)
def test_a_plateau(
    coordinator: ClusterCoordinator,
    optimizer: optimizers.Optimizer,
    arguments: dict[str, Any],
    losses: list[float],
    rates: list[float],
) -> None:
    """Check the rate after each epoch; the logs have the rate during it."""
    seen: list[float] = []
    logged: list[float] = []

    class Looks(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(float(optimizer.learning_rate))  # type: ignore[arg-type]
            logged.append(logs["learning_rate"])

    plateau = callbacks.ReduceLROnPlateau(optimizer, "loss", **arguments)
    calls = CallbackList([plateau, Looks()], coordinator)
    calls.on_train_begin()
    for epoch, loss in enumerate(losses):
        calls.on_epoch_end(epoch, {"loss": loss})
    assert seen == pytest.approx(rates)
    assert logged == pytest.approx([1, *rates[:-1]])


def test_learning_rates_of_epochs(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, optimizer: optimizers.Optimizer
) -> None:
    """Set before an epoch's first step, on the servers; and in the logs."""
    step = model.step()

    def looks(batch: Any) -> dict[str, float]:
        step(batch)
        return {"seen": float(optimizer.learning_rate)}  # type: ignore[arg-type]

    schedule = callbacks.LearningRateScheduler(optimizer, lambda epoch, rate: rate if epoch == 1 else 2 * rate)
    history = coordinator.fit(looks, data, epochs=3, callbacks=[schedule], verbose=0)
    assert history.history["seen"] == history.history["learning_rate"] == [2.0, 2.0, 4.0]


def test_what_is_refused(
    strategy: ParameterServerStrategy,
    coordinator: ClusterCoordinator,
    model: Counter,
    data: DistributedDataset,
    optimizer: optimizers.Optimizer,
    tmp_path: Path,
) -> None:
    """When a callback is made; or when the training begins."""
    with strategy.scope():
        scheduled = optimizers.SGD(ExponentialDecay(0.1, 10, 0.5), name="scheduled")
    directory = str(tmp_path)
    bad: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: callbacks.EarlyStopping("loss", mode="up"), ValueError, "mode is 'up'; it must be"),  # type: ignore[arg-type]
        (
            lambda: callbacks.EarlyStopping("loss", min_delta=-1),
            ValueError,
            "min_delta is -1; it must be a number, 0 or more",
        ),
        (
            lambda: callbacks.ReduceLROnPlateau(optimizer, factor=1),
            ValueError,
            "factor is 1; it must be a number, above 0 and below 1",
        ),
        (lambda: callbacks.ReduceLROnPlateau(scheduled), errors.MisuseError, "rate of 'scheduled' is a schedule: make"),
        (lambda: callbacks.LearningRateScheduler(0.1, max), TypeError, "give the optimizer .*, not a float"),  # type: ignore[arg-type]
        (lambda: callbacks.LearningRateScheduler(optimizer, 0.1), TypeError, "schedule is a float; it must be"),  # type: ignore[arg-type]
        (
            lambda: callbacks.ModelCheckpoint(directory, save_freq=0),
            ValueError,
            "save_freq is 0; it must be a whole number of steps, 1 or more, or 'epoch'",
        ),
        (
            lambda: callbacks.ModelCheckpoint(directory, save_best_only=True, save_freq=3),
            ValueError,
            "save_best_only goes with save_freq='epoch'",
        ),
        (
            lambda: callbacks.BackupAndRestore(directory, every=0),
            ValueError,
            "every is 0; it must be a number of seconds, above 0, or None",
        ),
        (
            lambda: callbacks.EarlyStopping("loss", patience=-1),
            ValueError,
            "patience is -1; it must be a whole number of epochs, 0 or more",
        ),
        (
            lambda: callbacks.ReduceLROnPlateau(optimizer, min_lr=-0.1),
            ValueError,
            r"min_lr is -0.1; it must be a number, 0 or more",
        ),
        (
            lambda: callbacks.TensorBoard(directory, update_freq=-1),
            ValueError,
            "update_freq is -1; it must be a whole number of steps, 0 or more, or 'epoch'",
        ),
    ]
    for make, error, message in bad:
        with pytest.raises(error, match=message):
            make()
    for callback in (
        callbacks.EarlyStopping(),
        callbacks.ReduceLROnPlateau(optimizer),
        callbacks.ModelCheckpoint(directory, save_best_only=True),
    ):
        with pytest.raises(errors.MisuseError, match=r"monitors 'val_loss', but nothing is evaluated: give fit\(\)"):
            coordinator.fit(model.step(), data, callbacks=[callback], verbose=0)
    assert model.value == 0


def test_a_number_that_is_not_there(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, caplog: pytest.LogCaptureFixture
) -> None:
    """A missing number is logged once, with the names of those that exist; training continues."""
    stopping = callbacks.EarlyStopping("lost")
    history = coordinator.fit(model.step(), data, epochs=3, callbacks=[stopping], verbose=0)
    assert history.epoch == [0, 1, 2]
    assert caplog.text.count("a callback monitors 'lost', which is not in the logs: ['loss']") == 1


# What is not finite


def test_terminate_on_nan(
    strategy: ParameterServerStrategy, coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    """Names the step's function, its part of the data, the worker, and each variable; no further epoch is begun."""
    with strategy.scope():
        good = Variable(np.zeros(5, np.float32), name="good")
        bad = Variable(np.zeros((4, 3), np.float32), name="bad")
        half = Variable(np.zeros((), ml_dtypes.bfloat16), name="half")
        whole = Variable(np.zeros(2, np.int64), name="whole")

    def my_step(numbers: Any) -> dict[str, float]:
        whole.assign_add(np.ones(2, np.int64))
        good.assign_add(np.ones(5, np.float32))
        if 5 not in numbers:
            return {"loss": 1.0, "other": 2.0}
        bad.assign_add(np.diag([np.nan, -np.inf, 0, 0]).astype(np.float32)[:, :3])
        half.assign(np.array(np.inf, ml_dtypes.bfloat16))
        return {"loss": math.nan, "other": math.inf}

    data = coordinator.distribute_dataset(np.arange(8)).batch(2)
    history = coordinator.fit(my_step, data, epochs=5, callbacks=[callbacks.TerminateOnNaN()], verbose=0)
    assert history.epoch == [0]
    assert history.stopped.startswith("loss is nan, other is inf in step ")
    for said in (
        " of epoch 1, my_step of data-1/0/4-6 on worker ",
        "'bad' (2 values)",
        "'half' (1 value)",
    ):
        assert said in history.stopped
    assert "good" not in history.stopped
    assert "whole" not in history.stopped
    assert caplog.text.count("training stops: ") == 1


def test_variables_that_are_finite(coordinator: ClusterCoordinator, model: Counter) -> None:
    """That is said, too; in a loop of one's own as well, with what it was run by if that is known."""
    calls = CallbackList([callbacks.TerminateOnNaN()], coordinator)
    calls.on_train_batch_end(0, {"loss": 1.0})
    assert not calls.training.stop_training
    calls.on_train_batch_end(6, {"loss": math.inf})
    assert calls.training.stopped == "loss is inf in step 7 of epoch 1; all variables are finite"
    calls = CallbackList([callbacks.TerminateOnNaN()], coordinator)
    calls.training.execution = Execution("train", "rows 1-2", 3)
    calls.on_train_batch_end(6, {"loss": math.inf})
    assert "in step 7 of epoch 1, train of rows 1-2 on worker 3; " in calls.training.stopped


# Checkpoints


def saved_counts(coordinator: ClusterCoordinator, model: Counter, directory: Path) -> list[int]:
    """What the checkpoints hold, the newest last."""
    with CheckpointManager(str(directory), strategy=coordinator.strategy) as manager:
        return [model.value for path in manager.checkpoints if manager.restore(path, progress=False)]


def test_checkpoints_of_epochs(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """The last ones."""
    keeps = callbacks.ModelCheckpoint(str(tmp_path), max_to_keep=2)
    coordinator.fit(model.step(), data, epochs=4, callbacks=[keeps], verbose=0)
    assert saved_counts(coordinator, model, tmp_path) == [3, 4]


def test_checkpoints_of_the_best(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """Only what is better than all before it, over the trainings of one callback."""
    keeps = callbacks.ModelCheckpoint(str(tmp_path), "loss", save_best_only=True)
    coordinator.fit(model.step(best=3), data, epochs=5, callbacks=[keeps], verbose=0)
    assert saved_counts(coordinator, model, tmp_path) == [1, 2, 3]
    model.count.assign(1)
    coordinator.fit(model.step(best=3), data, epochs=2, callbacks=[keeps], verbose=0)
    assert len(keeps.manager.checkpoints) == 3
    keeps.close()


def test_the_best_by_evaluation(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """The best is chosen by "val_..." of the epochs that have it, from the initial threshold on."""
    count = model.count
    keeps = callbacks.ModelCheckpoint(
        str(tmp_path), "val_count", save_best_only=True, mode="max", initial_value_threshold=2.5
    )
    coordinator.fit(
        model.step(),
        data,
        epochs=6,
        validation_data=data,
        validation_step=lambda batch: (count.numpy(),),
        validation_metrics=[metrics.Mean("count")],
        validation_freq=2,
        callbacks=[keeps],
        verbose=0,
    )
    assert saved_counts(coordinator, model, tmp_path) == [4, 6]


def test_checkpoints_of_steps(coordinator: ClusterCoordinator, model: Counter, tmp_path: Path) -> None:
    """After every `save_freq` steps, across epochs."""
    data = coordinator.distribute_dataset(np.arange(STEPS))
    keeps = callbacks.ModelCheckpoint(str(tmp_path), save_freq=3, max_to_keep=None)
    coordinator.fit(model.step(), data, epochs=2, callbacks=[keeps], verbose=0)
    counts = saved_counts(coordinator, model, tmp_path)
    assert len(counts) == 2
    assert all(least <= count <= 2 * STEPS for least, count in zip((3, 6), counts, strict=True))


def test_no_checkpoint_can_be_made(
    coordinator: ClusterCoordinator,
    model: Counter,
    data: DistributedDataset,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Saving below a regular file fails: that is logged, training continues, and the best value stays as it was."""
    (tmp_path / "file").write_text("no directory")
    directory = str(tmp_path / "file" / "below")
    keeps = callbacks.ModelCheckpoint(directory, "loss", save_best_only=True)
    stopping = callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True, directory=directory)
    backup = callbacks.BackupAndRestore(directory)
    coordinator.fit(model.step(best=9), data, epochs=2, callbacks=[backup, keeps, stopping], verbose=0)
    assert model.value == 2
    assert caplog.text.count("no checkpoint was made; training continues: ") == 4
    assert keeps.state()["best"] == stopping.best == math.inf
    (tmp_path / "file").unlink()
    coordinator.fit(model.step(best=9), data, epochs=2, callbacks=[keeps], verbose=0)
    assert saved_counts(coordinator, model, Path(directory)) == [3, 4]


class Dies(callbacks.Callback):
    """In the middle of an epoch."""

    def __init__(self, epoch: int, batch: int) -> None:
        self.at = epoch, batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self.training.epoch, batch) == self.at:
            raise RuntimeError("power failure")


class DiesWhenAllIsVisited(callbacks.Callback):
    """With a checkpoint of the moment when all steps of the first epoch have ended, and one of them was told of."""

    def __init__(self, strategy: ParameterServerStrategy, data: DistributedDataset, directory: Path) -> None:
        self.strategy, self.data, self.directory = strategy, data, str(directory)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        until(lambda: self.data.epoch >= 1, "all of the first epoch was visited")
        self.training.keep()
        with CheckpointManager(self.directory, strategy=self.strategy) as manager:
            manager.save().result()
        raise RuntimeError("power failure")


@pytest.mark.parametrize(("steps_per_epoch", "steps", "position"), [(None, 6, (2, 0)), (2, 4, (1, 2))])
def test_an_epoch_that_was_visited_and_not_told_of(
    cluster: LocalCluster, tmp_path: Path, steps_per_epoch: int | None, steps: int, position: tuple[int, int]
) -> None:
    """It is not visited again, however the data is cut then."""
    with ParameterServerStrategy(cluster) as strategy:
        model, coordinator = Counter(strategy), ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset(np.arange(4)).batch(2)
        arguments: dict[str, Any] = {"epochs": 2, "steps_per_execution": 1, "verbose": 0}
        dies = DiesWhenAllIsVisited(strategy, data, tmp_path)
        with pytest.raises(RuntimeError, match="power failure"):
            coordinator.fit(model.step(), data, steps_per_epoch=steps_per_epoch, callbacks=[dies], **arguments)
    with ParameterServerStrategy(cluster, resume=False) as strategy:
        model, coordinator = Counter(strategy), ClusterCoordinator(strategy)
        data = coordinator.distribute_dataset(np.arange(4)).batch(1)
        backup = callbacks.BackupAndRestore(str(tmp_path))
        history = coordinator.fit(model.step(), data, steps_per_epoch=steps_per_epoch, callbacks=[backup], **arguments)
        assert history.epoch == [0, 1]
        assert (data.epoch, data.visited) == position
        assert model.value == steps


@pytest.mark.parametrize(("save_freq", "every"), [("epoch", None), (3, None), ("epoch", 1e-6)])
def test_going_on_from_a_backup(cluster: LocalCluster, tmp_path: Path, save_freq: Any, every: float | None) -> None:
    """With the variables and the position in the data of one moment, so that every step counts once; then it goes."""
    epochs: list[list[int]] = []
    for run in range(2):
        with ParameterServerStrategy(cluster) as strategy:
            model, coordinator = Counter(strategy), ClusterCoordinator(strategy)
            data = coordinator.distribute_dataset(np.arange(2 * STEPS))
            backup = callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=save_freq, every=every)
            log = callbacks.CSVLogger(tmp_path / "log.csv")
            calls = [backup, log, Dies(2, 5)][: 3 - run]
            arguments: dict[str, Any] = {"epochs": 4, "steps_per_execution": 1, "callbacks": calls, "verbose": 0}
            if not run:
                with pytest.raises(RuntimeError, match="power failure"):
                    coordinator.fit(model.step(), data, **arguments)
                assert backup.restored is not None
                assert backup.restored.value == "nothing"
                assert list((tmp_path / "backup").iterdir())
                continue
            epochs.append(coordinator.fit(model.step(), data, **arguments).epoch)
            assert backup.restored is not None
            assert backup.restored.value == "checkpoint"
            assert model.value == 4 * 2 * STEPS
            assert (data.epoch, data.visited) == (4, 0)
            assert not [path for path in (tmp_path / "backup").iterdir() if path.name.startswith("ckpt")]
    assert epochs == [[2, 3]]
    lines = [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert lines == ["epoch", "0", "1", "2", "3"]


# Logs


def test_lines_of_csv(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """The file has a line per epoch, in the columns of the first; it is replaced, or appended to."""
    path = tmp_path / "log.csv"
    path.write_text("of before\n")
    coordinator.fit(model.step(), data, epochs=2, callbacks=[callbacks.CSVLogger(path)], verbose=0)
    assert path.read_text() == "epoch,loss\n0,1.0\n1,2.0\n"
    more = callbacks.CSVLogger(path, append=True)
    coordinator.fit(model.step(), data, callbacks=[more], verbose=0)
    assert path.read_text() == "epoch,loss\n0,1.0\n1,2.0\n0,3.0\n"
    for logs in ({"a": 1, "b": 'x"'}, {"b": 2, "c": 3}):
        if "a" in logs:
            other = callbacks.CSVLogger(str(path), separator=";")
            calls = CallbackList([other], coordinator)
            calls.on_train_begin()
        calls.on_epoch_end(0, dict(logs))
    assert path.read_text() == 'epoch;a;b\n0;1;"x"""\n0;nan;2\n'


class Room(callbacks.Callback):
    """So large may the files of this process be, in the middle epochs: as with a full disk, no more can be written."""

    def __init__(self, most: int) -> None:
        self.most = most

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch in (1, 2):
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, resource.RLIM_INFINITY))


def test_a_full_disk(
    coordinator: ClusterCoordinator,
    model: Counter,
    data: DistributedDataset,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Training continues: some epochs are missing in the file, and later ones are there."""
    log, board = callbacks.CSVLogger(tmp_path / "log.csv"), callbacks.TensorBoard(tmp_path / "logs")
    calls = [Room(10), log, board, Room(resource.RLIM_INFINITY)]
    try:
        coordinator.fit(model.step(), data, epochs=5, callbacks=calls, verbose=0)
    finally:
        calls[-1].on_epoch_end(1)
    assert model.value == 5
    for epoch in (1, 2):
        why = "training continues: [Errno 27] File too large"
        assert f"could not write epoch {epoch} to {log.filename}; {why}" in caplog.text
        assert f"could not write step {epoch} to {board.log_dir}; " in caplog.text
    assert log.filename.read_text() == "epoch,loss\n0,1.0\n3,4.0\n4,5.0\n"
    assert scalars_of(tmp_path / "logs")["train"]["epoch_loss"] == [(0, 1.0), (3, 4.0), (4, 5.0)]


def test_places_where_nothing_can_be_written(
    coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path
) -> None:
    """Are found at the begin: nothing was trained by then."""
    (tmp_path / "file").write_text("no directory")
    path = tmp_path / "file" / "below"
    with pytest.raises(NotADirectoryError) as raised:
        coordinator.fit(model.step(), data, callbacks=[callbacks.CSVLogger(path)], verbose=0)
    assert raised.value.__notes__ == ["raised by the callback CSVLogger.on_train_begin"]
    with pytest.raises(errors.ConfigurationError, match=f"{path}.* can't be written: "):
        coordinator.fit(model.step(), data, callbacks=[callbacks.TensorBoard(path)], verbose=0)
    assert model.value == 0


def scalars_of(directory: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """What TensorBoard itself finds there: by run and name, steps and values."""
    command = [sys.executable, "-c", SCALARS, str(directory)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert result.returncode == 0, result.stderr
    runs = json.loads(result.stdout)
    return {run: {tag: [(s, v) for s, v in events] for tag, events in tags.items()} for run, tags in runs.items()}


def test_tensorboard_opens_it(coordinator: ClusterCoordinator, model: Counter, tmp_path: Path) -> None:
    """Epochs of two trainings, steps of one, training and evaluation as runs of the same names."""
    data, count = coordinator.distribute_dataset(np.arange(STEPS)), model.count

    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs |= {"rate": np.float32(0.5), "matrix": np.eye(2)}

    def count_now(_: Any) -> tuple[Any]:
        return (count.numpy(),)

    arguments: dict[str, Any] = {
        "validation_data": data,
        "validation_step": count_now,
        "validation_metrics": {"loss": metrics.Mean()},
    }
    board = callbacks.TensorBoard(tmp_path, update_freq=2)
    for _ in range(2):
        coordinator.fit(model.step(), data, epochs=2, callbacks=[Adds(), board], verbose=0, **arguments)
    runs = scalars_of(tmp_path)
    assert set(runs) == {"train", "validation"}
    assert set(runs["train"]) == {"batch_loss", "epoch_loss", "epoch_rate"}
    assert runs["validation"] == {"epoch_loss": [(0, 4.0), (1, 8.0), (0, 12.0), (1, 16.0)]}
    assert [step for step, _ in runs["train"]["epoch_loss"]] == [0, 1, 0, 1]
    assert [value for _, value in runs["train"]["epoch_rate"]] == [0.5] * 4
    assert [step for step, _ in runs["train"]["batch_loss"]] == [*range(2, 8 + 1, 2)] * 2


# What comes of it


def test_a_picture(coordinator: ClusterCoordinator, model: Counter, data: DistributedDataset, tmp_path: Path) -> None:
    """Of what the epochs came to, evaluation beside training, with gaps where there was none."""
    history = coordinator.fit(
        model.step(),
        data,
        epochs=3,
        validation_data=data,
        validation_step=lambda batch: (batch,),
        validation_metrics={"loss": metrics.Mean(), "sum": metrics.Sum()},
        validation_freq=2,
        verbose=0,
    )
    path = tmp_path / "history.png"
    history.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 5000
    assert repr(history) == "<History 3 epochs: loss 3, val_loss nan, val_sum nan>"


def test_a_history_with_holes(tmp_path: Path) -> None:
    """Names that come later, or go; what is no number is not drawn."""
    history = History(epochs=3)
    with pytest.raises(ValueError, match="nothing to plot: no epoch with logs has ended"):
        history.plot(tmp_path / "nothing.png")
    history.add(0, {"loss": 1.0})
    history.add(1, {"acc": 0.5, "matrix": [[1, 2], [3, 4]]})
    history.add(2, {"loss": 0.5})
    assert history.history["loss"] == pytest.approx([1.0, math.nan, 0.5], nan_ok=True)
    assert history.history["acc"] == pytest.approx([math.nan, 0.5, math.nan], nan_ok=True)
    history.plot(str(tmp_path / "history.png"))
    assert (tmp_path / "history.png").exists()
