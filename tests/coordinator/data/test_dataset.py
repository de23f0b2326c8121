"""Distributed datasets on a live cluster: each example once an epoch, and what users meet on the way."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import Everywhere, Gate, wait_for_file
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    CheckpointManager,
    ClusterCoordinator,
    DataPart,
    DistributedDataset,
    IndexedSlices,
    ParameterServerStrategy,
    Variable,
    errors,
    experimental_get_current_worker_index,
)

EXAMPLES = 1000


class Visited:
    """A variable that counts how often each example was visited."""

    def __init__(self, strategy: ParameterServerStrategy, examples: int = EXAMPLES) -> None:
        with strategy.scope():
            self.counts = Variable(np.zeros(examples, np.int64), name="visited")

    def step(self) -> Any:
        """Counts the examples of its part, which are numbers."""
        counts = self.counts

        def step(part: Any) -> list[int]:
            sizes = []
            for numbers in part:
                counts.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))
                sizes.append(len(numbers))
            return sizes

        return step

    def all_are(self, times: int) -> bool:
        """Each so often?"""
        return set(self.counts.numpy().tolist()) == {times}


def visit(coordinator: ClusterCoordinator, step: Any, parts: Iterable[DataPart]) -> None:
    """A function for each, and wait."""
    for part in parts:
        coordinator.schedule(step, args=(part,))
    coordinator.join(TIMEOUT)


@pytest.fixture
def visited(strategy: ParameterServerStrategy) -> Visited:
    """Of EXAMPLES examples."""
    return Visited(strategy)


@pytest.fixture
def manager(strategy: ParameterServerStrategy, tmp_path: Path) -> Iterator[CheckpointManager]:
    """Return a manager that is closed after the test."""
    with CheckpointManager(str(tmp_path), strategy=strategy, max_to_keep=None) as manager:
        yield manager


@pytest.fixture
def data(coordinator: ClusterCoordinator) -> DistributedDataset:
    """The numbers of the examples, in batches."""
    return coordinator.distribute_dataset(np.arange(EXAMPLES)).shuffle(seed=1, split=100).batch(64)


def test_each_example_once_an_epoch(
    coordinator: ClusterCoordinator, visited: Visited, data: DistributedDataset
) -> None:
    """The parts of an epoch end by themselves; each iter() is the next epoch."""
    assert (len(data), data.examples, data.epoch, data.visited) == (16, EXAMPLES, 0, 0)
    step = visited.step()
    for epoch in range(1, 4):
        values = [coordinator.schedule(step, args=(part,)) for part in data]
        coordinator.join(TIMEOUT)
        assert [size for sizes in coordinator.fetch(values) for size in sizes] == [64] * 15 + [40]
        assert visited.all_are(epoch)
        assert data.epoch == epoch
    assert 0 <= data.waiting < 1


def test_epochs_and_parts(coordinator: ClusterCoordinator, visited: Visited, data: DistributedDataset) -> None:
    """Several epochs in one pass, several batches a function."""
    step, large = visited.step(), data.repeat(2).parts(5)
    values = [coordinator.schedule(step, args=(part,)) for part in large]
    coordinator.join(TIMEOUT)
    assert [len(value.fetch()) for value in values] == [5, 5, 5, 1] * 2
    assert visited.all_are(2)
    assert large.epoch == 2
    endless = iter(data.repeat().parts(16))
    for _ in range(3):
        coordinator.schedule(step, args=(next(endless),))
    coordinator.join(TIMEOUT)
    assert visited.all_are(5)


def test_a_pass_that_was_left_goes_on(
    coordinator: ClusterCoordinator, visited: Visited, data: DistributedDataset
) -> None:
    """What was given out is not given again; what is left comes first."""
    step = visited.step()
    for index, part in enumerate(data):
        coordinator.schedule(step, args=(part,))
        if index == 4:
            break
    rest = list(data)
    assert len(rest) == 16 - 5
    visit(coordinator, step, rest)
    assert visited.all_are(1)
    assert data.epoch == 1


def test_what_failed_is_given_out_again(
    coordinator: ClusterCoordinator, visited: Visited, data: DistributedDataset
) -> None:
    """A step that raises, and what was cancelled with it, were no visits."""
    step = visited.step()

    def fails(part: Any) -> None:
        step(part)
        raise ValueError("after its update")

    def cancelled() -> None:
        coordinator.schedule(fails, args=(next(parts),))
        visit(coordinator, step, parts)

    parts = iter(data)
    with pytest.raises(ValueError, match="after"):
        cancelled()
    before = data.visited
    again = list(data)
    assert sum(part.stop - part.start for part in again) + before == EXAMPLES
    assert again[0].start == 0
    visit(coordinator, step, again)
    assert data.epoch == 1


def test_sources_of_a_user(coordinator: ClusterCoordinator, tmp_path: Path) -> None:
    """Columns, files with a reader, a function, a mapped file, whatever has a length: they arrive as they are."""
    np.save(tmp_path / "x.npy", np.arange(12.0))
    for index in range(3):
        (tmp_path / f"{index}.txt").write_text(f"{index}a\n{index}b\n")

    def lines(path: Path) -> list[str]:
        return path.read_text().split()

    def collect(part: Any) -> list[Any]:
        return list(part)

    def gathered(data: DistributedDataset) -> list[Any]:
        values = [coordinator.schedule(collect, args=(part,)) for part in data]
        return [element for value in values for element in value.fetch(TIMEOUT)]

    distribute = coordinator.distribute_dataset
    columns = gathered(distribute({"x": np.arange(4), "y": np.ones(4)}).batch(3))
    assert [batch["x"].tolist() for batch in columns] == [[0, 1, 2], [3]]
    files = distribute(sorted(tmp_path.glob("*.txt")), reader=lines)
    assert gathered(files) == ["0a", "0b", "1a", "1b", "2a", "2b"]
    with pytest.raises(TypeError, match="the number of examples in the files is known only to their reader"):
        len(files)

    def endless(path: Path) -> Iterator[str]:
        return (f"{path.name} {index}" for index in itertools.count())

    def some(part: Any) -> list[str]:
        last_lines = [batch[-1] for batch, _ in zip(part, range(2), strict=False)]
        part.skip_rest()
        return last_lines

    (part,) = distribute([tmp_path / "0.txt"], reader=endless).batch(4)
    assert coordinator.schedule(some, args=(part,)).fetch(TIMEOUT) == ["0.txt 3", "0.txt 7"]
    path = str(tmp_path / "x.npy")
    for source in (lambda: np.load(path), np.load(path, mmap_mode="r"), [float(n) for n in range(12)]):
        batches = gathered(distribute(source).map(lambda x: x + 1).batch(5).map(lambda batch: batch * 2))
        assert np.concatenate(batches).tolist() == [2.0 * (n + 1) for n in range(12)]
    assert [np.asarray(x).tolist() for x in distribute(np.arange(3)).local()] == [0, 1, 2]


def test_a_position_is_part_of_a_checkpoint(
    coordinator: ClusterCoordinator,
    visited: Visited,
    data: DistributedDataset,
    manager: CheckpointManager,
    gate: Gate,
) -> None:
    """In the middle of the second epoch: the restored run visits what was left, and nothing else."""
    step = visited.step()
    parts = iter(data.repeat(3))
    for _ in range(16 + 7):
        coordinator.schedule(step, args=(next(parts),))
    coordinator.join(TIMEOUT)
    manager.save()
    seen = visited.counts.numpy().copy()
    namesake = coordinator.distribute_dataset(np.arange(EXAMPLES), name="data-1")
    with pytest.raises(errors.MisuseError, match="another dataset named 'data-1' is in use"):
        next(iter(namesake))
    path = gate.path

    def held(part: Any) -> list[int]:
        wait_for_file(path)
        return step(part)  # type: ignore[no-any-return]

    for part in parts:
        coordinator.schedule(held, args=(part,))
    with pytest.raises(
        errors.MisuseError, match=r"functions with parts of the dataset 'data-1' have not ended: join\(\)"
    ):
        manager.restore()
    gate.open()
    coordinator.join(TIMEOUT)
    assert visited.all_are(3)
    unfinished = iter(data.repeat(3))
    manager.restore()
    np.testing.assert_array_equal(visited.counts.numpy(), seen)
    coordinator.schedule(step, args=(next(unfinished),))
    coordinator.join(TIMEOUT)
    manager.restore()
    with pytest.raises(errors.MisuseError, match="was restored meanwhile"):
        next(unfinished)


def test_a_restored_run_goes_on(
    coordinator: ClusterCoordinator,
    visited: Visited,
    data: DistributedDataset,
    manager: CheckpointManager,
) -> None:
    """With other batches than before, as often as one likes: what was done since counts again."""
    step, data = visited.step(), data.repeat(2)
    parts = iter(data)
    for _ in range(20):
        coordinator.schedule(step, args=(next(parts),))
    coordinator.join(TIMEOUT)
    manager.save()
    for _ in range(2):
        visit(coordinator, step, data)
        assert visited.all_are(2)
        assert data.epoch == 2
        manager.restore()
        assert (data.epoch, data.visited) == (1, 4 * 64)


def test_no_position_is_saved_while_another_takes_its_place(
    coordinator: ClusterCoordinator,
    visited: Visited,
    data: DistributedDataset,
    manager: CheckpointManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of before the restore, saved between its commit and its end, would be taken for the checkpoint's."""
    step, parts = visited.step(), iter(data)
    for _ in range(4):
        coordinator.schedule(step, args=(next(parts),))
    coordinator.join(TIMEOUT)
    manager.save()
    before = data.visited
    visit(coordinator, step, data)
    context = coordinator.strategy.context
    progress, clear = context.dataset_progress, context.partly_applied.clear
    assert progress is not None
    with ThreadPoolExecutor(1) as pool:
        saves: list[Future[None]] = []

        def committed() -> None:
            saves.append(pool.submit(progress.save))
            wait(saves, 1)
            clear()

        monkeypatch.setattr(context.partly_applied, "clear", committed)
        manager.restore()
        saves[0].result(TIMEOUT)
        assert (data.epoch, data.visited) == (0, before)
        progress.restored()
        assert (data.epoch, data.visited) == (0, before), "what was saved since is of the checkpoint, too"


def test_checkpoints_while_functions_run(
    coordinator: ClusterCoordinator,
    visited: Visited,
    data: DistributedDataset,
    manager: CheckpointManager,
) -> None:
    """The position is of the same moment as the variables, whenever a checkpoint is made."""
    step, data = visited.step(), data.repeat(4)
    for index, part in enumerate(data):
        coordinator.schedule(step, args=(part,))
        if index % 16 == 5:
            manager.save()
    coordinator.join(TIMEOUT)
    assert visited.all_are(4)
    for path in manager.checkpoints:
        manager.checkpoint.read(path)
        left = list(data)  # of several epochs: functions of the next one run while some of the last one do
        assert int(visited.counts.numpy().sum()) + sum(part.stop - part.start for part in left) == 4 * EXAMPLES
        visit(coordinator, step, left)
        assert visited.all_are(4)


def test_it_is_read_ahead(coordinator: ClusterCoordinator, everywhere: Everywhere, gate: Gate) -> None:
    """Where it takes long, elements of a worker's next functions are read while one runs: no more than asked for."""
    folder = str(Path(gate.path).parent)

    def read(example: int) -> int:
        (Path(folder) / f"mark-{example}").touch()
        time.sleep(0.01)
        return example

    def step(part: Any) -> int:
        (example,) = part
        if example >= 10:
            wait_for_file(gate.path)
        return int(example)

    data = coordinator.distribute_dataset(list(range(30))).map(read).prefetch(1)
    parts = iter(data)
    everywhere(coordinator, os.getpid)  # a worker gets no two at once before one has ended on it
    values = [coordinator.schedule(step, args=(next(parts),)) for _ in range(10)]
    coordinator.join(TIMEOUT)  # it is known now that functions are short, so that more than one goes to a worker
    for path in Path(folder).glob("mark-*"):
        path.unlink()
    values += [coordinator.schedule(step, args=(part,)) for part in parts]

    def reads() -> int:
        return len(list(Path(folder).glob("mark-*")))

    until(lambda: coordinator.workers_up == 2 and reads() >= 4, "each worker has read for the next function", reads)
    assert reads() <= 2 * 3
    gate.open()
    assert coordinator.fetch(values, TIMEOUT) == list(range(30))


def test_slow_data_can_be_seen(coordinator: ClusterCoordinator) -> None:
    """The share of the time that functions wait."""

    def slow(example: int) -> int:
        time.sleep(0.02)
        return example

    def step(part: Any) -> None:
        for _ in part:
            pass

    data = coordinator.distribute_dataset(np.arange(20)).map(slow).prefetch(0)
    visit(coordinator, step, data)
    assert data.waiting > 0.5


# Bad input


def picky(example: int) -> int:
    """Can't read some."""
    if example % 10 == 3:
        raise OSError(f"no example {example}")
    return int(example)


def collect(part: Any) -> list[int]:
    """A step."""
    return [int(example) for example in part]


def test_what_cannot_be_read_is_named(coordinator: ClusterCoordinator) -> None:
    """After its retries, with the examples, the reason and the remote traceback."""
    data = coordinator.distribute_dataset(np.arange(20), name="mine", retries=1).map(picky)
    coordinator.schedule(collect, args=(list(data)[3],))
    with pytest.raises(errors.DatasetError, match=r"'mine': the examples at 3 to 3 of epoch 0.*no example 3") as it:
        coordinator.join(TIMEOUT)
    assert isinstance(it.value, errors.FunctionError)
    assert "OSError: no example" in it.value.remote_traceback
    assert it.value.attempts == 2


def test_what_cannot_be_read_can_be_skipped(coordinator: ClusterCoordinator, caplog: pytest.LogCaptureFixture) -> None:
    """It is counted and logged; the epoch ends, and the functions have what could be read."""
    data = coordinator.distribute_dataset(np.arange(20), retries=1, on_error="skip").map(picky).parts(4)
    values = [coordinator.schedule(collect, args=(part,)) for part in data]
    coordinator.join(TIMEOUT)
    collected = [example for value in values for example in value.fetch()]
    assert sorted(collected) == [example for example in range(20) if example % 10 != 3]
    assert (data.skipped, data.epoch) == (2, 1)
    assert sum("skipped 1 example: dataset 'data-1'" in record.message for record in caplog.records) == 2

    def first(part: Any) -> int:
        return int(next(part))

    single = coordinator.distribute_dataset(np.arange(5), retries=0, on_error="skip").map(picky)
    values = [coordinator.schedule(first, args=(part,)) for part in single]
    assert coordinator.fetch(values, TIMEOUT) == [0, 1, 2, None, 4]


def test_a_step_that_does_not_read_its_part(coordinator: ClusterCoordinator) -> None:
    """Examples are not lost in silence, but can be left out."""
    data = coordinator.distribute_dataset(np.arange(10)).parts(5)

    def one(part: Any) -> int:
        return int(next(part))

    def one_and_no_more(part: Any) -> int:
        example = next(part)
        part.skip_rest()
        return int(example)

    with pytest.raises(errors.MisuseError, match=r"read 1 elements of its part .*which has more: loop over it"):
        coordinator.schedule(one, args=(next(iter(data)),)).fetch(TIMEOUT)
    with pytest.raises(errors.MisuseError, match="which has more"):
        coordinator.join(TIMEOUT)
    values = [coordinator.schedule(one_and_no_more, args=(part,)) for part in data]
    assert coordinator.fetch(values, TIMEOUT) == [0, 5]
    assert data.epoch == 1

    def too_much(part: Any) -> None:
        while True:
            next(part)

    with pytest.raises(errors.EndOfDatasetError, match="the part of the dataset ended after 5 elements: loop over it"):
        coordinator.schedule(too_much, args=(next(iter(data)),)).fetch(TIMEOUT)


class Column:
    """A column of a frame, or a tensor: no array of NumPy's, but what NumPy can take."""

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape = values.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: int) -> Any:
        return self._values[index]


class Loader:
    """Goes through a dataset in batches."""

    dataset = range(3)
    batch_size = 2

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1], [2]])


def test_columns_of_others(coordinator: ClusterCoordinator) -> None:
    """Tensors and columns of frames are examples by their rows, as arrays are: not one example each."""
    x, y = np.arange(4.0), np.arange(4) % 2
    for source in ((Column(x), Column(y)), {"x": Column(x), "y": y}):
        data = coordinator.distribute_dataset(source).batch(2)
        assert data.examples == 4
        (first, _) = data.local()
        for column, expected in zip(first.values() if isinstance(first, dict) else first, (x, y), strict=True):
            np.testing.assert_array_equal(column, expected[:2])


def test_what_is_refused(coordinator: ClusterCoordinator, data: DistributedDataset, visited: Visited) -> None:
    """With the value, the limit and a hint, before anything has changed."""
    distribute = coordinator.distribute_dataset
    with pytest.raises(ValueError, match="the source has no examples"):
        distribute([])
    with pytest.raises(TypeError, match="has no length"):
        distribute(iter([1]))
    with pytest.raises(TypeError, match="is one file: give a list of files"):
        distribute("file.txt", reader=open)
    with pytest.raises(TypeError, match="reader is an int"):
        distribute(["file.txt"], reader=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_error is 'ignore'; it must be 'raise' or 'skip'"):
        distribute([1], on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="retries is -1; it must be a whole number, 0 or more"):
        distribute([1], retries=-1)
    with pytest.raises(ValueError, match="batch size is 0; it must be a whole number, 1 or more"):
        distribute([1]).batch(0)
    with pytest.raises(ValueError, match=r"batch size is 2\.5; it must be a whole number"):
        distribute([1]).batch(2.5)  # type: ignore[arg-type]
    with pytest.raises(errors.MisuseError, match="the dataset is already batched by 64"):
        data.batch(2)
    with pytest.raises(ValueError, match="seed is -1"):
        data.shuffle(seed=-1)
    with pytest.raises(TypeError, match=r"shuffle\(1000\): the whole dataset is shuffled, without a buffer; write"):
        data.shuffle(1000)
    for source, said in [
        ({"a": np.arange(3), "b": [1, 2, 3]}, "a dict whose 'b' is a list is not a source of examples: give arrays"),
        ({}, "an empty dict is not a source"),
        (Loader(), r"Loader is not a source, as .*: pass loader.dataset, .* \.shuffle\(seed=\.\.\.\)\.batch\(n\)"),
    ]:
        with pytest.raises(TypeError, match=said):
            distribute(source)
    with pytest.raises(TypeError, match=r"shuffle\(blocks=2\): the source is not read in blocks, and all of it is"):
        data.shuffle(blocks=2)
    with pytest.raises(TypeError, match="map takes a function"):
        data.map(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers is -1; it must be a whole number, at least 0 and at most 256"):
        data.map(str, workers=-1)
    with pytest.raises(ValueError, match="timeout is 0; it must be a number, above 0"):
        data.map(str, workers=1, timeout=0)
    with pytest.raises(errors.MisuseError, match=r"already has a map with processes, which calls str: call both"):
        data.map(str, workers=1).map(repr, workers=1)
    with pytest.raises(errors.MisuseError, match="captures what is on the cluster, such as a variable"):
        data.map(lambda example: example + visited.counts.numpy()[0], workers=1)
    with pytest.raises(ValueError, match="epochs is 0"):
        data.repeat(0)
    part = next(iter(data))
    with pytest.raises(errors.MisuseError, match=r"has its elements on the workers: pass it to schedule\(\)"):
        iter(part)
    with pytest.raises(errors.MisuseError, match="captures a part of a dataset: pass it as an argument"):
        coordinator.schedule(lambda: list(part))


def test_nothing_is_left_of_it(coordinator: ClusterCoordinator) -> None:
    """Workers drop a dataset once the script no longer has it."""

    def pipelines() -> int:
        gc.collect()
        things = [thing for thing in gc.get_objects() if type(thing).__name__ == "Pipeline"]
        return sum(pipeline.name == "to be dropped" for pipeline in things)

    def has_any(_: int) -> tuple[int, bool]:
        return experimental_get_current_worker_index(), pipelines() > 0

    def having() -> dict[int, bool]:
        return dict(coordinator.schedule(has_any, args=(index,)).fetch(TIMEOUT) for index in range(8))

    data = coordinator.distribute_dataset(np.arange(10), name="to be dropped").batch(2)
    for part in data:
        coordinator.schedule(lambda part: list(part), args=(part,))
    coordinator.join(TIMEOUT)
    assert any(having().values())
    del part, data
    gc.collect()
    until(lambda: not any(having().values()), "it is gone", having)


def test_a_map_in_processes(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """It yields what a map without them does, each example once, in processes that end with the dataset."""
    visited = Visited(strategy, 400)
    counts = visited.counts

    def doubled(number: Any) -> dict[str, Any]:
        (tmp_path / str(os.getpid())).touch()
        return {"number": number, "doubled": 2.0 * number, "text": f"{number}"}

    def step(part: Any) -> tuple[int, list[Any]]:
        batches = list(part)
        for batch in batches:
            counts.scatter_add(IndexedSlices(np.ones(len(batch["number"]), np.int64), batch["number"]))
        return os.getpid(), [(batch["doubled"], batch["text"].tolist()) for batch in batches]

    plain = coordinator.distribute_dataset(np.arange(400)).shuffle(seed=3)
    mapped = plain.map(doubled, workers=2).batch(32)
    values = [coordinator.schedule(step, args=(part,)) for part in mapped]
    coordinator.join(TIMEOUT)
    done = coordinator.fetch(values)
    for (_, [(numbers, texts)]), wanted in zip(done, plain.map(doubled).batch(32).local(), strict=True):
        np.testing.assert_array_equal(numbers, wanted["doubled"])
        assert texts == wanted["text"].tolist()
    assert visited.all_are(1)
    assert [len(batch["number"]) for batch in mapped.local()] == [32] * 12 + [16]
    pids = {int(path.name) for path in tmp_path.iterdir()} - {os.getpid()}
    assert pids
    assert pids.isdisjoint(pid for pid, _ in done)
    del mapped, values
    gc.collect()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "its processes have ended", lambda: pids)


def test_parts_that_are_not_scheduled(
    coordinator: ClusterCoordinator, visited: Visited, data: DistributedDataset
) -> None:
    """Taken and dropped, or refused by schedule(): they are given out again, and the epoch ends."""
    step, parts = visited.step(), iter(data)
    dropped = [next(parts) for _ in range(3)]

    def fails(part: Any) -> None:
        raise ValueError("on purpose")

    failing = coordinator.schedule(fails, args=(next(parts),))
    with pytest.raises(ValueError, match="on purpose"):
        failing.fetch(TIMEOUT)
    with pytest.raises(ValueError, match="on purpose"):
        coordinator.schedule(step, args=(next(parts),))
    del dropped
    gc.collect()
    visit(coordinator, step, data)
    assert visited.all_are(1)
    assert data.epoch == 1


def test_a_pass_comes_back_to_what_failed(coordinator: ClusterCoordinator) -> None:
    """In an epoch that it has left: nothing stays unvisited forever."""
    data = coordinator.distribute_dataset(np.arange(4)).repeat()
    parts = iter(data)

    def fails_once(part: Any, fail: bool) -> int:
        (example,) = part
        if fail:
            raise ValueError("once")
        return int(example)

    first = [next(parts) for _ in range(6)]
    value = coordinator.schedule(fails_once, args=(first[1], True))
    with pytest.raises(ValueError, match="once"):
        value.fetch(TIMEOUT)
    with pytest.raises(ValueError, match="once"):
        coordinator.join(TIMEOUT)
    again = next(parts)
    assert (again.epoch, again.start) == (0, 1)
    rest = [coordinator.schedule(fails_once, args=(part, False)) for part in (first[0], again, *first[2:])]
    assert coordinator.fetch(rest, TIMEOUT) == [0, 1, 2, 3, 0, 1]
    assert (data.epoch, data.visited) == (1, 2)


def test_threads_share_a_dataset(data: DistributedDataset) -> None:
    """However they begin there is one position, and no part is given out twice."""
    barrier = threading.Barrier(4)

    def go(_: int) -> list[DataPart]:
        barrier.wait()
        return list(data)

    with ThreadPoolExecutor(4) as pool:
        parts = [part for parts in pool.map(go, range(4)) for part in parts]
    places = [(part.epoch, part.start) for part in parts]
    assert len(set(places)) == len(places)
    assert {(0, start) for start in range(0, EXAMPLES, 64)} <= set(places)
    assert data.name == "data-1"


def test_a_loop_that_drops_its_parts_ends(data: DistributedDataset) -> None:
    """The next pass has them again."""
    for _ in range(2):
        assert [part.start for part in data] == list(range(0, EXAMPLES, 64))
        gc.collect()


def test_a_map_function_that_exits(coordinator: ClusterCoordinator) -> None:
    """Nothing after it can be read, so it fails, even if unreadable examples are skipped."""

    def exits(example: int) -> int:
        if example == 2:
            raise SystemExit("no more")
        return int(example)

    data = coordinator.distribute_dataset(np.arange(10), name="mine", on_error="skip", retries=1).map(exits).parts(10)
    coordinator.schedule(collect, args=(next(iter(data)),))
    with pytest.raises(errors.DatasetError, match="'mine', epoch 0, from 0 to 9 can't be read: SystemExit: no more"):
        coordinator.join(TIMEOUT)
    assert (data.visited, data.skipped) == (0, 0)


def test_no_batch_at_all(coordinator: ClusterCoordinator) -> None:
    """An epoch of nothing is refused."""
    with pytest.raises(ValueError, match="3 examples make no batch of 10, and drop_remainder=True drops"):
        coordinator.distribute_dataset(np.arange(3)).batch(10, drop_remainder=True)


def test_parts_of_a_position_that_was(
    coordinator: ClusterCoordinator,
    visited: Visited,
    data: DistributedDataset,
    manager: CheckpointManager,
) -> None:
    """After a checkpoint is restored they are refused, and leave no trace."""
    step = visited.step()
    coordinator.schedule(step, args=(next(iter(data)),)).fetch(TIMEOUT)
    coordinator.join(TIMEOUT)
    manager.save()
    old = next(iter(data))
    manager.restore()
    with pytest.raises(errors.MisuseError, match=r"was restored meanwhile: begin a new iter\(\)"):
        coordinator.schedule(step, args=(old,))
    del old
    gc.collect()
    visit(coordinator, step, data)
    assert visited.all_are(1)
