"""The training loop on a real cluster: every example once an epoch, whatever is packed, fails, stops or dies."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.conftest import NUM_WORKERS
from tests.faults.steps import die_once, first_time, note
from tests.faults.support import running_job
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    ClusterSpec,
    DistributedDataset,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    RemoteValue,
    SimpleClusterResolver,
    Variable,
    errors,
    metrics,
    optimizers,
)
from pscluster.coordinator.training.callbacks import BackupAndRestore, Callback, ModelCheckpoint
from pscluster.worker.steps.training import logs_of_steps

Array = npt.NDArray[Any]

EXAMPLES = 50
SIZE = 7
STEPS = 8

Hook = tuple[str, Any]


class Counted:
    """A model that counts how often each example was trained on, and a step that does so."""

    def __init__(self, strategy: ParameterServerStrategy, examples: int = EXAMPLES) -> None:
        with strategy.scope():
            self.seen = Variable(np.zeros(examples, np.int64), name="seen")

    @property
    def counts(self) -> list[int]:
        """By example."""
        return [int(count) for count in self.seen.numpy()]

    def step(self, action: Callable[[Array], Any] = lambda numbers: None) -> Callable[[Any], Any]:
        """Counts a batch. Its logs are the mean, and twice that; or what `action` gives."""
        seen = self.seen

        def step(numbers: Array) -> Any:
            seen.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))
            mean = float(numbers.mean())
            logs = action(numbers)
            return {"loss": mean, "twice": 2 * mean} if logs is None else logs

        return step


@pytest.fixture
def model(strategy: ParameterServerStrategy) -> Counted:
    """Of the test's own."""
    return Counted(strategy)


@pytest.fixture
def data(coordinator: ClusterCoordinator) -> DistributedDataset:
    """Eight batches, the last of them a single example."""
    return coordinator.distribute_dataset(np.arange(EXAMPLES)).shuffle(seed=1).batch(SIZE)


class Recorder(Callback):
    """Writes down what is called, and what its functions were."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self.logs: list[dict[str, Any]] = []
        self.functions: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.hooks.append(("train_begin", None))

    def on_train_end(self, logs: Any = None) -> None:
        self.hooks.append(("train_end", logs))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.hooks.append(("epoch_begin", epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.hooks.append(("epoch_end", epoch))
        self.logs.append(dict(logs))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.hooks.append(("batch_begin", batch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.hooks.append(("batch_end", batch))
        assert logs["twice"] == 2 * logs["loss"]
        assert self.training.execution is not None
        assert self.training.execution.worker in range(NUM_WORKERS)
        assert self.training.execution.function == "step"
        self.functions.append(self.training.execution.what)

    def on_test_begin(self, logs: Any = None) -> None:
        self.hooks.append(("test_begin", None))

    def on_test_end(self, logs: Any = None) -> None:
        self.hooks.append(("test_end", logs))

    def close(self) -> None:
        self.hooks.append(("close", None))

    def of(self, name: str) -> list[Any]:
        """What came with these hooks."""
        return [value for hook, value in self.hooks if hook == name]


class Raises(Callback):
    """In this hook, once, and with the batches from this one on."""

    def __init__(self, hook: str, error: BaseException, batch: int = 0) -> None:
        self.error: BaseException | None = error
        self.hook, self.batch = hook, batch
        setattr(self, hook, self._raise)

    def _raise(self, index: Any = None, logs: Any = None) -> None:
        if self.error is not None and ("batch" not in self.hook or index >= self.batch):
            error, self.error = self.error, None
            raise error


def mean_loss(batches: Sequence[Array]) -> float:
    """What the logs of an epoch of these say."""
    return float(np.mean([batch.mean() for batch in batches]))


def runs_nothing(coordinator: ClusterCoordinator) -> bool:
    """Whether all that was scheduled has ended."""
    return coordinator.context.dispatcher is not None and coordinator.context.dispatcher._scheduler.idle


# Epochs


@pytest.mark.parametrize("packing", [1, 3, "auto"])
def test_every_example_once_an_epoch(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, packing: Any
) -> None:
    """The logs are means over the steps, and every hook is called as often as it should be, in order."""
    recorder = Recorder()
    history = coordinator.fit(
        model.step(), data, epochs=2, steps_per_execution=packing, callbacks=[recorder], verbose=0
    )
    assert model.counts == [2] * EXAMPLES
    assert (data.epoch, data.visited) == (2, 0)
    losses = [mean_loss(list(data.local(epoch))) for epoch in range(2)]
    assert history.epoch == [0, 1]
    assert history.history["loss"] == pytest.approx(losses)
    assert history.history["twice"] == pytest.approx([2 * loss for loss in losses])
    assert history.params == {"epochs": 2, "steps": STEPS}
    assert history.stopped == ""
    assert [logs["loss"] for logs in recorder.logs] == history.history["loss"]
    assert recorder.of("batch_begin") == recorder.of("batch_end") == [*range(STEPS)] * 2
    frame = [hook for hook in recorder.hooks if "batch" not in hook[0]]
    ends = {"loss": history.history["loss"][-1], "twice": history.history["twice"][-1]}
    assert frame == [
        ("train_begin", None),
        *(("epoch_begin", 0), ("epoch_end", 0), ("epoch_begin", 1), ("epoch_end", 1)),
        ("train_end", ends),
        ("close", None),
    ]
    if packing == 3:
        functions = [f"{data.name}/0/{start}-{min(start + 21, EXAMPLES)}" for start in (0, 21, 42)]
        assert set(recorder.functions[:STEPS]) == set(functions)


def test_without_the_remainder(coordinator: ClusterCoordinator, model: Counted) -> None:
    """The last, smaller batch is none."""
    data = coordinator.distribute_dataset(np.arange(EXAMPLES)).batch(SIZE, drop_remainder=True)
    history = coordinator.fit(model.step(), data, epochs=3, steps_per_execution=2, verbose=0)
    assert model.counts == [3] * 49 + [0]
    assert history.params["steps"] == 7
    assert history.history["loss"] == pytest.approx([24.0] * 3)


def test_epochs_of_a_dataset_that_repeats(coordinator: ClusterCoordinator, model: Counted) -> None:
    """An epoch of the training covers all repetitions of the data."""
    data = coordinator.distribute_dataset(np.arange(EXAMPLES)).shuffle().batch(SIZE).repeat(3)
    history = coordinator.fit(model.step(), data, epochs=2, steps_per_execution=5, verbose=0)
    assert model.counts == [6] * EXAMPLES
    assert history.params["steps"] == 3 * STEPS
    assert history.history["loss"][1] == pytest.approx(
        mean_loss([batch for epoch in (3, 4, 5) for batch in data.local(epoch)])
    )


@pytest.mark.parametrize("packing", [1, 2])
def test_epochs_of_so_many_steps(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, packing: int
) -> None:
    """Epochs continue where the data is, across its epochs, and so does the next training."""
    order = [batch for epoch in range(4) for batch in data.local(epoch)]
    losses: list[float] = []
    for epochs, steps in ((3, 3), (2, 2), (1, 14), (1, 1), (2, 2)):
        arguments: dict[str, Any] = {"epochs": epochs, "steps_per_epoch": steps, "steps_per_execution": packing}
        history = coordinator.fit(model.step(), data, verbose=0, **arguments)
        before = len(losses)
        losses += history.history["loss"]
        expected = [order[start : start + steps] for start in range(0, epochs * steps, steps)]
        assert losses[before:] == pytest.approx([mean_loss(batches) for batches in expected])
        order = order[epochs * steps :]
    assert len(order) == 0
    assert model.counts == [4] * EXAMPLES


def test_a_dataset_without_end(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """Says what is needed; with that, it is like any other."""
    endless = data.repeat()
    with pytest.raises(ValueError, match=r"repeats without end: give steps_per_epoch, or repeat\(n\)"):
        coordinator.fit(model.step(), endless, verbose=0)
    coordinator.fit(model.step(), endless, steps_per_epoch=2 * STEPS, verbose=0)
    assert model.counts == [2] * EXAMPLES


def test_files(coordinator: ClusterCoordinator, model: Counted, tmp_path: Path) -> None:
    """A file is a unit of the data; how many steps it makes is known once it has been read."""
    names: list[str] = []
    for index, numbers in enumerate(np.split(np.arange(EXAMPLES), [3, 20, 21, 40])):
        names.append(str(tmp_path / f"{index}.npy"))
        np.save(names[-1], numbers)
    data = coordinator.distribute_dataset(names, reader=np.load).shuffle().batch(4)
    with pytest.raises(ValueError, match="can't be counted in a dataset of files: omit"):
        coordinator.fit(model.step(), data, steps_per_epoch=2, verbose=0)
    recorder = Recorder()
    history = coordinator.fit(model.step(), data, epochs=2, steps_per_execution=2, callbacks=[recorder], verbose=0)
    assert model.counts == [2] * EXAMPLES
    steps = [len(list(data.local(epoch))) for epoch in range(2)]
    assert recorder.of("batch_end") == [*range(steps[0]), *range(steps[1])]
    assert history.params["steps"] is None
    assert history.history["loss"] == pytest.approx([mean_loss(list(data.local(epoch))) for epoch in range(2)])


def test_per_worker_datasets(coordinator: ClusterCoordinator, model: Counted) -> None:
    """An epoch has the steps asked for, packed, over the elements of whichever worker runs them."""
    data = coordinator.create_per_worker_dataset(lambda: (np.array([index % EXAMPLES]) for index in itertools.count()))
    recorder = Recorder()
    arguments: dict[str, Any] = {"epochs": 2, "steps_per_epoch": 10, "steps_per_execution": 4, "verbose": 0}
    history = coordinator.fit(model.step(), data, callbacks=[recorder], **arguments)
    assert sum(model.counts) == 20
    assert recorder.functions.count("4 steps") == 16
    assert recorder.functions.count("2 steps") == 4
    assert history.params["steps"] == 10
    with pytest.raises(ValueError, match="a per-worker dataset has no length: give steps_per_epoch"):
        coordinator.fit(model.step(), data, verbose=0)


def test_per_worker_datasets_that_end(coordinator: ClusterCoordinator, model: Counted) -> None:
    """In the middle of a function: the error says what to do."""
    data = coordinator.create_per_worker_dataset([np.array([0])] * 3)
    with pytest.raises(errors.EndOfDatasetError, match="ended after 3 elements: "):
        coordinator.fit(model.step(), data, steps_per_epoch=20, steps_per_execution=2, verbose=0)
    assert runs_nothing(coordinator)


def test_what_is_begun_with(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """In a dataset that a loop of one's own has left in mid-epoch the first epoch is the rest of it."""
    step = model.step()

    def own(part: Any) -> None:
        logs_of_steps(step, part)

    for part in itertools.islice(data, 3):
        coordinator.schedule(own, args=(part,))
    coordinator.join(TIMEOUT)
    recorder = Recorder()
    coordinator.fit(step, data, epochs=2, steps_per_execution=2, callbacks=[recorder], verbose=0)
    assert model.counts == [2] * EXAMPLES
    assert recorder.of("batch_end") == [*range(3, STEPS), *range(STEPS)]


def test_evaluation(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """After every other epoch, with the variables as they are then; the logs have it under its names."""
    held = coordinator.distribute_dataset(np.arange(10)).batch(4)
    seen, recorder = model.seen, Recorder()

    def look(numbers: Array) -> Any:
        return (seen.numpy()[numbers],)

    history = coordinator.fit(
        model.step(),
        data,
        epochs=4,
        validation_data=held,
        validation_step=look,
        validation_metrics=[metrics.Mean("times"), metrics.Sum()],
        validation_freq=2,
        callbacks=[recorder],
        verbose=0,
    )
    assert history.history["val_times"] == pytest.approx([np.nan, 2.0, np.nan, 4.0], nan_ok=True)
    assert history.history["val_sum"] == pytest.approx([np.nan, 20.0, np.nan, 40.0], nan_ok=True)
    assert [sorted(logs) for logs in recorder.logs] == [
        ["loss", "twice"],
        ["loss", "twice", "val_sum", "val_times"],
    ] * 2
    assert recorder.of("test_begin") == [None] * 2
    assert recorder.of("test_end") == [{"val_times": 2.0, "val_sum": 20.0}, {"val_times": 4.0, "val_sum": 40.0}]
    assert held.epoch == held.visited == 0


# Several steps a function


@pytest.fixture
def trained(cluster: LocalCluster) -> Callable[[Any], tuple[list[bytes], dict[str, list[float]]]]:
    """Trains on one worker, where steps have an order, that many per function; the variables' bytes, the history."""
    spec = cluster.cluster_spec()
    few = ClusterSpec({"ps": spec.as_dict()["ps"], "worker": [spec.task_address("worker", 0)]})
    rng = np.random.default_rng(0)
    x = rng.normal(size=(99, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)

    def train(packing: Any) -> tuple[list[bytes], dict[str, list[float]]]:
        with ParameterServerStrategy(SimpleClusterResolver(few), token=cluster.token) as strategy:
            with strategy.scope():
                w = Variable(np.zeros(3, np.float32), name="w")
                optimizer = optimizers.Adam(0.05)
            coordinator = ClusterCoordinator(strategy)

            def step(batch: Any) -> float:
                inputs, targets = batch
                residual = inputs @ w.numpy() - targets
                optimizer.apply_gradients([((inputs.T @ residual).astype(np.float32), w)])
                return float((residual**2).mean())

            data = coordinator.distribute_dataset((x, y)).shuffle(seed=2).batch(4)
            history = coordinator.fit(step, data, epochs=3, steps_per_execution=packing, verbose=0)
            variables = [w, optimizer.slot(w, "m"), optimizer.slot(w, "v")]
            return [variable.numpy().tobytes() for variable in variables], history.history

    return train


def test_packing_changes_no_bit(trained: Callable[[Any], tuple[list[bytes], dict[str, list[float]]]]) -> None:
    """However many steps a function takes."""
    variables, history = trained(1)
    assert len(history["loss"]) == 3
    for packing in (7, "auto"):
        values, losses = trained(packing)
        assert values == variables
        assert losses["loss"] == pytest.approx(history["loss"], rel=1e-12)


def test_short_steps_are_packed(coordinator: ClusterCoordinator) -> None:
    """By itself, in the first epoch already: a few are measured, no more are handed out before that."""
    data = coordinator.distribute_dataset(np.arange(400))
    functions: list[set[str]] = []

    class Functions(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            functions.append(set())

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            assert self.training.execution is not None
            functions[-1].add(self.training.execution.what)

    coordinator.fit(lambda example: None, data, epochs=2, callbacks=[Functions()], verbose=0)
    assert len(functions[0]) < 100
    assert len(functions[1]) < 50
    assert len(functions[1]) >= 4 * NUM_WORKERS, "each worker has several, lest some wait for the last one"


def test_parts_are_as_the_dataset_says(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset
) -> None:
    """Unless they are to be others."""
    for packing, functions in (("auto", 2), (3, 3)):
        recorder = Recorder()
        coordinator.fit(model.step(), data.parts(4), steps_per_execution=packing, callbacks=[recorder], verbose=0)  # type: ignore[arg-type]
        assert len(set(recorder.functions)) == functions
    assert model.counts == [2] * EXAMPLES


# What goes wrong


def test_a_step_that_fails(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """Its own error; nothing runs any more, and what was not visited is what the next training takes."""

    def fails(numbers: Array) -> None:
        if 17 in numbers:
            raise KeyError("seventeen")
        time.sleep(0.03)  # lest the other worker have done all others before the error is known

    recorder = Recorder()
    with pytest.raises(KeyError, match="seventeen") as raised:
        coordinator.fit(model.step(fails), data, callbacks=[recorder], verbose=0)
    assert isinstance(raised.value, errors.FunctionError)
    assert raised.value.function == "step"
    assert not any("fetch()" in note for note in getattr(raised.value, "__notes__", ())), "which was not called"
    assert recorder.hooks[-1] == ("close", None)
    assert not recorder.of("epoch_end")
    assert runs_nothing(coordinator)
    assert data.visited < EXAMPLES
    coordinator.fit(model.step(), data, verbose=0)
    assert model.counts == [1] * EXAMPLES, "what the failed step had done is not done again"


def test_a_step_whose_error_is_one_of_waiting(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset
) -> None:
    """It is not taken for ours."""

    def fails(numbers: Array) -> None:
        raise TimeoutError("the database does not answer")

    with pytest.raises(TimeoutError, match="the database does not answer"):
        coordinator.fit(model.step(fails), data, verbose=0)
    assert runs_nothing(coordinator)


def test_a_result_that_comes_as_it_is_no_longer_waited_for(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the end of the wait and the look at the value: it is there, and no error."""
    wait = RemoteValue.wait

    def late(self: RemoteValue, timeout: float | None = None) -> bool:
        wait(self)
        return timeout is None

    monkeypatch.setattr(RemoteValue, "wait", late)
    coordinator.fit(model.step(), data, epochs=2, verbose=0)
    assert model.counts == [2] * EXAMPLES


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            "much",
            r"the step returned a str as 'loss'; it must be a number: return the loss, a dict of numbers, or None",
        ),
        (np.zeros((2, 3)), r"returned an ndarray of shape \(2, 3\) as 'loss'"),
        ({"loss": 1.0, "other": None}, "returned None as 'other'"),
        ((1.0, 2.0), r"returned a tuple of shape \(2,\) as 'loss'"),
    ],
)
def test_steps_that_return_no_numbers(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, returned: Any, message: str
) -> None:
    """What they gave, under which name, and what they may give."""
    with pytest.raises(errors.MisuseError, match=message):
        coordinator.fit(model.step(lambda numbers: returned), data, verbose=0)
    assert runs_nothing(coordinator)


def test_steps_that_return_nothing(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """There are no logs then."""
    history = coordinator.fit(lambda numbers: None, data, epochs=2, verbose=2)
    assert history.epoch == [0, 1]
    assert history.history == {}


def test_names_of_logs_that_change(coordinator: ClusterCoordinator, data: DistributedDataset) -> None:
    """Within a function it is an error."""

    def step(numbers: Array) -> Any:
        return {"small" if len(numbers) < SIZE else "large": 1.0}

    with pytest.raises(errors.MisuseError, match=r"logs named \['large'\] before, and \['small'\] now"):
        coordinator.fit(step, data, steps_per_execution=STEPS, verbose=0)


def bad_arguments() -> list[tuple[dict[str, Any], type[Exception], str]]:
    """Each, and what is said of it."""
    whole = r"{} is {}; it must be a whole number, 1 or more"
    numbers = [
        ({name: value}, ValueError, whole.format(name, re.escape(repr(value))))
        for name in ("epochs", "steps_per_epoch", "steps_per_execution", "validation_freq")
        for value in (0, -1, 1.5, True, "many")
    ]
    return [
        *numbers,
        ({"step": 3}, TypeError, "fit takes a step function, not an int"),
        ({"data": [1, 2]}, TypeError, r"fit takes a dataset, not a list: give coordinator.distribute_dataset\("),
        ({"verbose": 3}, ValueError, "verbose is 3; it must be 0, 1, 2 or 'auto'"),
        ({"validation_data": [1]}, TypeError, "validation_data is a list: give coordinator.distribute_dataset"),
        ({"validation_step": len}, ValueError, "need validation_data: give it, too"),
        ({"validation_metrics": []}, ValueError, "need validation_data: give it, too"),
        ({"callbacks": [3]}, TypeError, "instances of pscluster.coordinator.callbacks.Callback, not 3"),
        ({"callbacks": [Callback]}, TypeError, "instances of .*Callback, not <class"),
        ({"callbacks": Callback()}, TypeError, "a list of instances of .*Callback, not a Callback"),
    ]


def test_bad_arguments(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """Said before anything is done."""
    for arguments, error, message in bad_arguments():
        whole = {"step": model.step(), "data": data, **arguments}
        with pytest.raises(error, match=message):
            coordinator.fit(whole.pop("step"), whole.pop("data"), **whole)
    with pytest.raises(ValueError, match=r"validation_data needs validation_step, .* and validation_metrics"):
        coordinator.fit(model.step(), data, validation_data=data)
    with pytest.raises(TypeError, match="validation_step is an int; it must be a function"):
        coordinator.fit(
            model.step(),
            data,
            validation_data=data,
            validation_step=3,  # type: ignore[arg-type]
            validation_metrics=[metrics.Sum()],
        )
    assert sum(model.counts) == 0


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_train_batch_end",
        "on_test_begin",
        "on_test_end",
        "on_epoch_end",
        "on_train_end",
    ],
)
def test_a_callback_that_raises(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, tmp_path: Path, hook: str
) -> None:
    """Its own error, with its name; nothing runs any more, what is done counts, checkpoints are whole.

    The error is kept, as an interactive session does: nothing of the data is lost with it.
    """
    recorder, keeps = Recorder(), ModelCheckpoint(str(tmp_path), save_freq=2)
    validation: dict[str, Any] = {"validation_data": data, "validation_step": lambda numbers: (numbers,)}
    with pytest.raises(RuntimeError, match="not today") as raised:
        coordinator.fit(
            model.step(),
            data,
            **validation,
            validation_metrics=[metrics.Sum()],
            callbacks=[keeps, Raises(hook, RuntimeError("not today"), 4), recorder],
            verbose=0,
        )
    assert raised.value.__notes__ == [f"raised by the callback Raises.{hook}"]
    assert recorder.hooks[-1] == ("close", None)
    assert runs_nothing(coordinator)
    counts, (epoch, visited) = model.counts, (data.epoch, data.visited)
    assert sum(counts) == epoch * EXAMPLES + visited
    coordinator.fit(model.step(), data, verbose=0)
    assert model.counts == [1 + epoch] * EXAMPLES
    if keeps.manager.checkpoints:
        keeps.manager.restore(progress=False)
        assert set(model.counts) <= {0, 1}
        assert sum(model.counts) >= SIZE + 1


def test_ctrl_c_in_a_callback(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """As any of its errors: what waits is cancelled."""
    with pytest.raises(KeyboardInterrupt):
        coordinator.fit(
            model.step(), data, epochs=3, callbacks=[Raises("on_train_batch_end", KeyboardInterrupt())], verbose=0
        )
    assert runs_nothing(coordinator)
    coordinator.fit(model.step(), data, verbose=0)
    assert model.counts == [1] * EXAMPLES


# Before its time, and again


class Stops(Callback):
    """At the end of the first step, when four are scheduled."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.training.stop_training:
            self.training.stop("enough")


@pytest.mark.parametrize("steps_per_epoch", [None, STEPS])
def test_stopping_in_mid_epoch(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, steps_per_epoch: int | None
) -> None:
    """Running functions end, and are in the logs; the next training continues with what was not visited."""
    recorder = Recorder()
    callbacks = [Stops(), recorder]
    history = coordinator.fit(model.step(), data, epochs=5, steps_per_execution=1, callbacks=callbacks, verbose=0)
    assert history.stopped == "enough"
    assert history.epoch == [0]
    done = len(recorder.of("batch_end"))
    assert 1 <= done <= len(recorder.of("batch_begin")) <= 4
    assert data.epoch == 0
    assert sum(model.counts) == data.visited
    assert recorder.of("train_end") == [recorder.logs[0]]
    assert runs_nothing(coordinator)
    after = Recorder()
    coordinator.fit(model.step(), data, epochs=2, steps_per_epoch=steps_per_epoch, callbacks=[after], verbose=0)
    ends = [2 * STEPS - done, 2 * STEPS]
    assert len(after.of("batch_end")) == ends[steps_per_epoch is not None]
    assert steps_per_epoch is not None or model.counts == [2] * EXAMPLES


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_test_end"])
def test_stopping_at_an_epochs_end(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, hook: str
) -> None:
    """No other one is begun."""

    class Ends(Callback):
        pass

    def stop(self: Callback, *_: Any) -> None:
        self.training.stop_training = True

    setattr(Ends, hook, stop)
    validation: dict[str, Any] = {"validation_data": data, "validation_step": lambda numbers: (numbers,)}
    history = coordinator.fit(
        model.step(),
        data,
        epochs=3,
        **validation,
        validation_metrics=[metrics.Sum()],
        callbacks=[Ends()],
        verbose=0,
    )
    assert history.epoch == [0]
    assert model.counts == [1] * EXAMPLES


def test_two_trainings(coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset) -> None:
    """Train again with the same callbacks and data, then with other data."""
    recorder = Recorder()
    for times in (1, 2):
        history = coordinator.fit(model.step(), data, callbacks=[recorder], verbose=0)
        assert history.epoch == [0]
        assert model.counts == [times] * EXAMPLES
    other = coordinator.distribute_dataset(np.arange(EXAMPLES)).batch(EXAMPLES)
    coordinator.fit(model.step(), other, verbose=0)
    assert model.counts == [3] * EXAMPLES
    assert recorder.of("epoch_begin") == [0, 0]


def test_a_training_that_is_over(cluster: LocalCluster, tmp_path: Path) -> None:
    """A script that is run again learns from the checkpoint that a training has ended, skips it, and runs the next."""
    histories: list[list[int]] = []
    for run in range(2):
        with ParameterServerStrategy(cluster) as strategy:
            model, coordinator = Counted(strategy), ClusterCoordinator(strategy)
            data = coordinator.distribute_dataset(np.arange(EXAMPLES)).batch(SIZE)
            backup = BackupAndRestore(str(tmp_path), delete_checkpoint=False)
            first = coordinator.fit(model.step(), data, epochs=2, callbacks=[backup], verbose=0)
            assert model.counts == [2] * EXAMPLES
            second = coordinator.fit(model.step(), data, verbose=0)
            assert model.counts == [3] * EXAMPLES
            histories += [first.epoch, second.epoch]
            assert len(histories) == 2 * (run + 1)
    assert histories == [[0, 1], [0], [], [0]]


# What dies


def test_workers_that_die_and_freeze() -> None:
    """One in each epoch: every example counts once all the same."""
    with running_job(1, 2, worker_lease=1.0) as job:
        model, folder = Counted(job.strategy), job.folder

        def strike(numbers: Array) -> None:
            if 17 in numbers:
                die_once(folder, "killed")
            if 33 in numbers and first_time(folder, "freezes"):
                note(folder, "frozen", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)

        data = job.coordinator.distribute_dataset(np.arange(EXAMPLES)).shuffle().batch(SIZE)
        history = job.coordinator.fit(model.step(strike), data, epochs=2, steps_per_execution=2, verbose=0)
        assert model.counts == [2] * EXAMPLES
        assert history.history["loss"] == pytest.approx([mean_loss(list(data.local(epoch))) for epoch in range(2)])
        assert Path(folder, "killed").exists()
        os.kill(int(Path(folder, "frozen").read_text()), signal.SIGCONT)  # one that is frozen does not end when asked


# What is shown

LINE = (
    r"epoch 1/1  step 8/8  loss \d+\.\d{4}  twice \d+\.\d{4}  [\d,]+ examples/s  2 workers up  \d+% of the time waiting"
)
END = r"epoch 1/1  8 steps in [\d.]+ s  loss [\d.]+  twice [\d.]+"


def test_plain_lines(
    coordinator: ClusterCoordinator,
    model: Counted,
    data: DistributedDataset,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a pipe: now and then, and one for each epoch; or that one alone, or none."""
    until(lambda: coordinator.workers_up == NUM_WORKERS, "all workers are up")
    coordinator.fit(model.step(), data)
    shown, errs = capsys.readouterr()
    assert errs == ""
    assert re.search(LINE, shown)
    assert re.fullmatch(END, shown.splitlines()[-1])
    coordinator.fit(model.step(), data, verbose=2)
    assert re.fullmatch(END, capsys.readouterr().out.strip())
    coordinator.fit(model.step(), data, verbose=0)
    assert capsys.readouterr() == ("", "")


def test_a_live_line(
    coordinator: ClusterCoordinator, model: Counted, data: DistributedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal: one that changes, on standard error, and what an epoch came to below it."""
    master, slave = os.openpty()
    shown = bytearray()

    def read() -> None:
        try:
            while some := os.read(master, 4096):
                shown.extend(some)
        except OSError:  # its other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    until(lambda: coordinator.workers_up == NUM_WORKERS, "all workers are up")
    with monkeypatch.context() as patch, os.fdopen(slave, "w") as terminal:
        patch.setattr(sys, "stderr", terminal)
        coordinator.fit(model.step(), data)
    reader.join(TIMEOUT)
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "\x1b[?25h" in shown.decode(), "the cursor is there again"
    assert re.search(r"epoch 1/1 +loss \d+\.\d{4} +twice", text)
    assert "8/8" in text
    assert re.fullmatch(END, text.strip().splitlines()[-1].strip())


def test_progress_over_what_is_skipped(
    coordinator: ClusterCoordinator, model: Counted, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be read is done with, too: the line comes to its end."""

    def unreadable(example: Any) -> Any:
        if example == 17:
            raise ValueError("torn")
        return example

    data = coordinator.distribute_dataset(np.arange(EXAMPLES), on_error="skip", retries=0).map(unreadable).batch(SIZE)
    coordinator.fit(model.step(), data)
    assert "step 8/8" in capsys.readouterr().out
    assert data.skipped == SIZE
    assert sum(model.counts) == EXAMPLES - SIZE
