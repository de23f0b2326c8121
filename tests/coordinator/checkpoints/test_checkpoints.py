"""Checkpoints of real clusters: consistent, restorable anywhere, and never half of anything. Numbers decide."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from click.testing import CliRunner
from tests.conftest import Gate, leave_mark, marks, wait_for_file
from tests.disks import small_disk
from tests.faults.support import running_job
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    FixedShardsPartitioner,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    optimizers,
)
from pscluster.coordinator.api import Checkpoint, CheckpointManager, RestoredFrom
from pscluster.coordinator.checkpoints import checkpoint as checkpoint_module
from pscluster.coordinator.checkpoints import tools
from pscluster.coordinator.checkpoints.checkpoint import MarkedCheckpoint
from pscluster.coordinator.checkpoints.folder import where
from pscluster.coordinator.checkpoints.index import check_whole, read_index
from pscluster.coordinator.cli.main import cli
from pscluster.coordinator.job import context as job_context
from pscluster.core.errors import CheckpointError, ConfigurationError, MisuseError, PsClusterError, WaitTimeoutError
from pscluster.ps.client.client import PsClient
from pscluster.v1 import ps_pb2

Array = npt.NDArray[Any]

ROWS = 7


@pytest.fixture(scope="module", params=[1, 3], ids=lambda servers: f"{servers} servers")
def elsewhere(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """Another cluster, of another number of servers."""
    with LocalCluster(request.param, 1, log_level="ERROR") as cluster:
        yield cluster


def two_axes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[int]:
    """A partitioner that cuts the first two axes."""
    return [min(pieces, max(length, 1)) for pieces, length in zip((2, 3, 1), shape, strict=False)]


class Model:
    """Variables of several kinds, optimizers with slots and averages, each trained on some shards only."""

    def __init__(self, strategy: ParameterServerStrategy, name: str = "") -> None:
        self.strategy = strategy
        with strategy.scope():
            self.dense = Variable(np.zeros((ROWS, 5), np.float32), name=f"{name}dense")
            self.table = Variable(np.zeros((ROWS, 2), np.float64), name=f"{name}table")
            self.half = Variable(np.zeros((4, 3), ml_dtypes.bfloat16), name=f"{name}half")
            self.whole = Variable(np.zeros((3, 2), np.complex64), name=f"{name}complex")
            self.count = Variable(0, name=f"{name}count")
            self.empty = Variable(np.zeros((0, 3), np.float32), name=f"{name}empty")
            self.adam = optimizers.Adam(0.1, use_ema=True, ema_momentum=0.5, name=f"{name}adam")
            self.adagrad = optimizers.Adagrad(0.1, name=f"{name}adagrad")
        self.variables = [self.dense, self.table, self.half, self.whole, self.count, self.empty]

    def train(self, seed: int) -> None:
        """A step; the rows of the table that it changes are in one shard."""
        generator = np.random.default_rng(seed)

        def normal(variable: Variable) -> Array:
            return generator.normal(size=variable.shape).astype(variable.dtype)

        self.adam.apply_gradients([(normal(self.dense), self.dense), (normal(self.half), self.half)])
        self.adagrad.apply_gradients([(IndexedSlices(generator.normal(size=(2, 2)), [0, 1]), self.table)])
        self.whole.assign_add(normal(self.whole))
        self.count.assign_add(1)

    def facts(self) -> dict[str, tuple[str, bytes]]:
        """All that can be read of it."""
        arrays = {variable.name: variable.numpy() for variable in self.variables}
        for variable in (self.dense, self.half):
            arrays |= {f"{variable.name}/{slot}": self.adam.slot(variable, slot).numpy() for slot in "mv"}
            arrays[f"{variable.name}/average"] = self.adam.average(variable).numpy()
        arrays["table/accumulator"] = self.adagrad.slot(self.table, "accumulator").numpy()
        arrays["steps"] = np.array([self.adam.iterations, self.adagrad.iterations])
        return {key: (array.dtype.name, array.tobytes()) for key, array in arrays.items()}


@pytest.fixture
def model(sharding_strategy: ParameterServerStrategy) -> Model:
    """On two servers, in three shards, after three steps."""
    made = Model(sharding_strategy)
    for seed in range(3):
        made.train(seed)
    return made


@pytest.fixture
def manager(model: Model, tmp_path: Path) -> Iterator[CheckpointManager]:
    """Its checkpoints."""
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=model.strategy) as made:
        yield made


def refused(model: Model, call: Callable[[], object], said: str) -> str:
    """Assert that the call raises a CheckpointError which says this, and that nothing has changed. The message."""
    before = model.facts()
    with pytest.raises(CheckpointError, match=said) as caught:
        call()
    assert model.facts() == before
    return str(caught.value)


def flip(file: Path, at: int = -1) -> None:
    """A bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def flip_value(path: str, variable: str) -> Path:
    """A bit of the values of a variable; the file."""
    tensor = read_index(path).variables[variable].arrays["value"][0]
    file = Path(path, tensor.file)
    flip(file, tensor.offset)
    return file


# There and back


@pytest.mark.parametrize("cut", [None, FixedShardsPartitioner(2), two_axes], ids=["whole", "rows", "two axes"])
def test_to_any_servers_and_cuts(manager: CheckpointManager, model: Model, elsewhere: LocalCluster, cut: Any) -> None:
    """Values, slots, averages, steps and progress come back, and the next step does the same there as here."""
    model.strategy.save_progress(epoch=3, state=[1, 2])
    path = manager.save().result()
    with ParameterServerStrategy(elsewhere, cut, placement="round_robin") as strategy:
        other = Model(strategy)
        other.train(99)
        assert other.facts() != model.facts()
        Checkpoint(strategy).read(path)
        assert other.facts() == model.facts()
        assert strategy.progress == {"epoch": 3, "state": [1, 2]}
        for trained in (other, model):
            trained.train(5)
        assert other.facts() == model.facts()


def test_a_plain_reader(manager: CheckpointManager, model: Model) -> None:
    """The safetensors library finds the shards by name, each server's in its own file, and the map says in which."""
    path = Path(manager.save().result())
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json",
        "part-0-of-2.safetensors",
        "part-1-of-2.safetensors",
    ]
    parts = {file.name: safetensors.numpy.load_file(file) for file in path.glob("*.safetensors") if not half(file)}
    weight_map = read_json(path / "index.json")["weight_map"]
    for variable in (model.dense, model.table, model.count):
        for shard_index, shard in enumerate(variable.variables):
            name = f"{variable.name}/part_{shard_index}"
            assert weight_map[name] == f"part-{shard.device[-1]}-of-2.safetensors"
            if weight_map[name] in parts:
                np.testing.assert_array_equal(parts[weight_map[name]][name], shard.numpy())
    index = read_index(str(path))
    assert index.pause_seconds > 0
    assert index.optimizers.keys() == {"adam", "adagrad"}


def half(file: Path) -> bool:
    """Does it hold what the library's NumPy loader does not know?"""
    return b'"BF16"' in file.read_bytes()


def read_json(file: Path) -> Any:
    """What is in it."""
    return json.loads(file.read_text())


def test_a_url(model: Model, tmp_path: Path) -> None:
    """Directories may be URLs of fsspec."""
    before = model.facts()
    with CheckpointManager(f"file://{tmp_path}/checkpoints/", strategy=model.strategy, max_to_keep=1) as manager:
        manager.save()
        path = manager.save().result()
        assert path == f"file://{tmp_path}/checkpoints/ckpt-000002"
        assert manager.checkpoints == [path]
        model.train(9)
        assert manager.restore() == path
    assert model.facts() == before
    assert where(f"file://{tmp_path}/checkpoints") == path
    tools.verify(path)
    with pytest.raises(CheckpointError, match="ghostly"):
        CheckpointManager("ghostly://bucket/run", strategy=model.strategy).save()


# While functions run


def values_in(path: str, *names: str) -> list[float]:
    """Of variables of one shard whose elements are all the same."""
    index = read_index(path)
    numbers = []
    for name in names:
        (tensor,) = index.variables[name].arrays["value"]
        values = set(safetensors.numpy.load_file(Path(path, tensor.file))[tensor.tensor].reshape(-1).tolist())
        assert len(values) == 1, f"{path} has a torn {name}: {values}"
        numbers.append(values.pop())
    return numbers


@pytest.fixture
def pair(strategy: ParameterServerStrategy) -> tuple[Variable, Variable]:
    """Two variables on two servers."""
    with strategy.scope():
        first = Variable(np.zeros((300, 1000)), name="first")
        second = Variable(np.zeros((300, 1000)), name="second")
    assert {first.device, second.device} == {"/job:ps/task:0", "/job:ps/task:1"}
    return first, second


def both(first: Variable, second: Variable) -> Callable[[], None]:
    """A function that adds 1 to both, one after the other."""

    def step() -> None:
        first.assign_add(np.ones(first.shape))
        second.scatter_add(IndexedSlices(np.ones(second.shape), np.arange(len(second))[::-1].copy()))

    return step


def test_every_checkpoint_is_a_cut(
    strategy: ParameterServerStrategy, pair: tuple[Variable, Variable], tmp_path: Path
) -> None:
    """What every function updates together is equal in each of the checkpoints made while 500 functions run."""
    coordinator = ClusterCoordinator(strategy)
    step = both(*pair)
    values = [coordinator.schedule(step) for _ in range(300)]

    def done() -> int:
        return sum(value.status.value == "ready" for value in values)

    with CheckpointManager(str(tmp_path), strategy=strategy, max_to_keep=None) as manager:
        for index in range(5):
            if index == 3:
                values += [coordinator.schedule(step) for _ in range(200)]
            until(lambda least=index * 80: done() >= least, "some have run", coordinator.describe)  # type: ignore[misc]
            manager.save(wait=index % 2 == 0)
        coordinator.join(TIMEOUT)
        manager.save()
        cuts = [values_in(path, "first", "second") for path in manager.checkpoints]
    assert all(a == b for a, b in cuts)
    counts = [a for a, _ in cuts]
    assert counts == sorted(counts)
    assert counts[-1] == 500
    assert 160 <= counts[2] <= 300


def test_a_restore_is_a_cut(strategy: ParameterServerStrategy, pair: tuple[Variable, Variable], tmp_path: Path) -> None:
    """Variables that every function updates together are equal after restores made while functions ran."""
    coordinator = ClusterCoordinator(strategy)
    with CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        coordinator.schedule(both(*pair)).fetch(TIMEOUT)
        manager.save()
        for _ in range(6):
            values = [coordinator.schedule(both(*pair)) for _ in range(30)]
            until(lambda some=values: some[3].status.value == "ready", "some have run")  # type: ignore[misc]
            manager.restore()
            coordinator.join(TIMEOUT)
            counts = [set(variable.numpy().reshape(-1)) for variable in pair]
            assert counts[0] == counts[1]
            assert len(counts[0]) == 1


def test_functions_run_while_it_is_written(
    strategy: ParameterServerStrategy,
    pair: tuple[Variable, Variable],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pause ends with the mark, and later changes are not in the checkpoint."""
    coordinator = ClusterCoordinator(strategy)
    step = both(*pair)
    coordinator.schedule(step).fetch(TIMEOUT)
    write = MarkedCheckpoint.write

    def late(self: MarkedCheckpoint, path: str) -> str:
        for _ in range(3):
            coordinator.schedule(step).fetch(TIMEOUT)
        return write(self, path)

    monkeypatch.setattr(MarkedCheckpoint, "write", late)
    with CheckpointManager(str(tmp_path), strategy=strategy) as manager:
        assert values_in(manager.save().result(), "first", "second") == [1, 1]
    assert float(pair[0].numpy()[0, 0]) == 4


def test_a_function_that_does_not_end(
    strategy: ParameterServerStrategy,
    pair: tuple[Variable, Variable],
    elsewhere: LocalCluster,
    tmp_path: Path,
    gate: Gate,
) -> None:
    """A save or restore fails after the timeout and names the function; others run on meanwhile and afterwards."""
    coordinator = ClusterCoordinator(strategy)
    path = gate.path

    def hangs() -> None:
        leave_mark(path, "begun")
        wait_for_file(path)

    hanging = coordinator.schedule(hangs)
    until(lambda: marks(gate), "it has begun")
    before = strategy.context.metrics.checkpoints_failed
    with CheckpointManager(str(tmp_path / "checkpoints"), strategy=strategy, barrier_timeout=0.3) as manager:
        for _ in range(2):
            with pytest.raises(WaitTimeoutError, match=r"after 0\.3 s functions still run: .*hangs on worker"):
                manager.save()
        assert manager.checkpoints == []
        assert strategy.context.metrics.checkpoints_failed == before + 2
        coordinator.schedule(both(*pair)).fetch(TIMEOUT)  # on the other worker
        path = f"{tmp_path}/written"
        with ParameterServerStrategy(elsewhere) as other:
            with other.scope():
                for variable in pair:
                    Variable(np.full(variable.shape, 7.0), name=variable.name)
            Checkpoint(other).write(path)
        with pytest.raises(WaitTimeoutError, match=r"functions still run: .*hangs"):
            manager.restore(path)
        assert [set(variable.numpy().reshape(-1)) for variable in pair] == [{1.0}, {1.0}]
        assert hanging.status.value == "not ready"
        gate.open()
        coordinator.join(TIMEOUT)
        assert values_in(manager.save().result(), "first", "second") == [1, 1]


def test_a_server_that_dies_after_the_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save fails with an error, its files are removed, the job continues, and the next save succeeds."""
    with running_job(num_ps=2, num_workers=1, shards=2, durability="log") as job:
        with job.strategy.scope():
            count = Variable(np.zeros((4, 3)), name="count")
        step = counting(count)
        write = MarkedCheckpoint.write

        def kills(self: MarkedCheckpoint, path: str) -> str:
            old = job.cluster.kill("ps", 1, timeout=TIMEOUT)
            job.cluster.wait_restarted("ps", 1, old, timeout=TIMEOUT)
            return write(self, path)

        with CheckpointManager(str(tmp_path), strategy=job.strategy) as manager:
            good = manager.save().result()
            for _ in range(20):
                job.coordinator.schedule(step)
            with monkeypatch.context() as patch:
                patch.setattr(MarkedCheckpoint, "write", kills)
                with pytest.raises(PsClusterError, match="ps 1"):
                    manager.save()
            assert manager.checkpoints == [good]
            assert [path.name for path in tmp_path.iterdir()] == ["ckpt-000001"]
            job.join()
            assert set(count.numpy().reshape(-1)) == {20}
            path = manager.save().result()
            tools.verify(path)
            count.assign(np.zeros((4, 3)))
            assert manager.restore() == path
            assert set(count.numpy().reshape(-1)) == {20}


@pytest.mark.parametrize(("deaths", "durability"), [(1, "log"), (2, "log"), (3, "log"), (1, "none")])
def test_a_single_one_is_written_again_after_a_server_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int, durability: str
) -> None:
    """Twice, in the place of what the others have written; files that are not its own stay."""
    path, write, left = tmp_path / "one", MarkedCheckpoint.write, deaths
    path.mkdir()
    (path / "mine").write_text("stays")
    with running_job(num_ps=2, num_workers=1, shards=2, durability=durability) as job:
        with job.strategy.scope():
            count = Variable(np.full((4, 3), 3.0), name="count")

        def kills(self: MarkedCheckpoint, to: str) -> str:
            nonlocal left
            if left:
                left -= 1
                old = job.cluster.kill("ps", 1, timeout=TIMEOUT)
                job.cluster.wait_restarted("ps", 1, old, timeout=TIMEOUT)
            return write(self, to)

        monkeypatch.setattr(MarkedCheckpoint, "write", kills)
        if deaths > 2 or durability == "none":
            with pytest.raises(PsClusterError, match="ps 1"):
                Checkpoint(job.strategy).write(str(path))
            assert not left
            return
        Checkpoint(job.strategy).write(str(path))
        tools.verify(str(path))
        assert len(list(path.glob("part-*"))) == 2
        assert (path / "mine").exists()
        count.assign(np.zeros((4, 3)))
        Checkpoint(job.strategy).read(str(path))
        assert set(count.numpy().reshape(-1)) == {3}


def counting(count: Variable) -> Callable[[], None]:
    """A function that adds 1."""

    def step() -> None:
        count.assign_add(np.ones(count.shape))

    return step


# A disk that fails


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk(tmp_path / "disk", 1) as folder:
        yield folder


def test_a_full_disk(strategy: ParameterServerStrategy, full_disk: Path) -> None:
    """The error says so, the old checkpoint stands, the next one has space, and the job continues."""
    with strategy.scope():
        w = Variable(np.arange(50_000.0), name="w")
    coordinator = ClusterCoordinator(strategy)
    with CheckpointManager(str(full_disk), strategy=strategy, max_to_keep=1) as manager:
        good = manager.save().result()
        for _ in range(2):
            (full_disk / "filler").write_bytes(bytes(300_000))
            with pytest.raises(CheckpointError, match=r"ckpt-00000\d/.* can't be written: No space left on device"):
                manager.save()
            assert manager.checkpoints == [good]
            assert {path.name for path in full_disk.iterdir()} == {"ckpt-000001", "filler"}
            failing = manager.save(wait=False)
            assert isinstance(failing.exception(TIMEOUT), CheckpointError)
            coordinator.schedule(counting(w)).fetch(TIMEOUT)
            tools.verify(good)
        (full_disk / "filler").unlink()
        path = manager.save().result()
        assert manager.checkpoints == [path]
        w.assign(np.zeros(50_000))
        assert manager.restore() == path
    np.testing.assert_array_equal(w.numpy(), np.arange(50_000) + 2.0)


def test_no_directory_can_be_made(model: Model, tmp_path: Path) -> None:
    """Below a regular file, or in its place: the error names the path, and the job continues."""
    file = tmp_path / "file"
    file.write_text("no directory")
    for directory in (file, file / "below"):
        with (
            CheckpointManager(str(directory), strategy=model.strategy) as manager,
            pytest.raises(CheckpointError, match=rf"{directory}.* can't be written"),
        ):
            manager.save()
        assert manager.checkpoints == []
        assert manager.latest_checkpoint is None
    model.train(1)


def test_a_directory_that_can_t_be_looked_into(
    manager: CheckpointManager, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where listing is not permitted, the error is ours and says why."""
    manager.save()

    def denied(*_: object) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "scandir", denied)
    monkeypatch.setattr(os, "listdir", denied)
    refused(model, manager.save, "Permission denied")
    refused(model, manager.restore, "Permission denied")
    refused(model, manager.restore_or_initialize, "Permission denied")


@pytest.mark.parametrize("when", ["written", "index"])
def test_a_directory_that_goes_away(
    manager: CheckpointManager, model: Model, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A save dies after the servers' files, or before the index. The earlier checkpoint stands."""
    good = manager.save().result()
    checkpoint = PsClient.checkpoint
    lost = Path(manager.directory, "ckpt-000002")

    def removes(self: PsClient, action: Any, *rest: Any) -> Any:
        replies = checkpoint(self, action, *rest)
        if action == ps_pb2.CheckpointRequest.WRITE:
            shutil.rmtree(lost)
        return replies

    def removes_later(*rest: Any) -> None:
        check_whole(*rest)
        shutil.rmtree(lost)

    with monkeypatch.context() as patch:
        if when == "written":
            patch.setattr(PsClient, "checkpoint", removes)
        else:
            patch.setattr(checkpoint_module, "check_whole", removes_later)
        refused(model, manager.save, "ckpt-000002")
    assert manager.checkpoints == [good]
    model.train(1)
    assert manager.save().result() == manager.latest_checkpoint
    assert len(manager.checkpoints) == 2


def test_a_server_elsewhere(manager: CheckpointManager, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that write where the coordinator does not look are reported."""
    checkpoint = PsClient.checkpoint

    def elsewhere(self: PsClient, action: Any, checkpoint_id: int, directory: str = "", *rest: Any) -> Any:
        return checkpoint(self, action, checkpoint_id, f"{directory}-elsewhere" if directory else "", *rest)

    monkeypatch.setattr(PsClient, "checkpoint", elsewhere)
    refused(model, manager.save, "ps 0 has written .* must be the same for all")


# Several


def test_the_newest_are_kept(model: Model, tmp_path: Path) -> None:
    """Old ones go when a new one is whole, half-written ones, too; what is not ours stays."""
    with CheckpointManager(str(tmp_path), strategy=model.strategy, max_to_keep=2) as manager:
        for name in ("ckpt-000004", "ckpt-7", "ckpt-²", "ckpt-x", "other"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "part-0-of-2.safetensors").write_text("half")
        (tmp_path / "ckpt-notes.txt").write_text("mine")
        assert manager.checkpoints == []
        assert manager.restore_or_initialize() is RestoredFrom.NOTHING
        paths = [manager.save().result() for _ in range(3)]
        assert [Path(path).name for path in paths] == ["ckpt-000005", "ckpt-000006", "ckpt-000007"]
        assert manager.checkpoints == paths[1:]
        assert manager.latest_checkpoint == paths[2]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ckpt-000006", "ckpt-000007", "ckpt-7", "ckpt-²", "ckpt-x", "other", "ckpt-notes.txt"}
    with CheckpointManager(str(tmp_path), strategy=model.strategy) as again:
        assert again.checkpoints == paths[1:]
        assert again.save().result().endswith("ckpt-000008")


def test_nothing_is_written_over_a_checkpoint(manager: CheckpointManager, model: Model) -> None:
    """A path that is one already is refused, and is what it was."""
    path = manager.save().result()
    before = model.facts()
    model.train(1)
    refused(model, lambda: Checkpoint(model.strategy).write(path), "never overwritten")
    manager.restore(path)
    assert model.facts() == before


def test_two_managers_in_one_directory(
    manager: CheckpointManager, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    """That is logged, once; one after the other is fine."""
    manager.save()
    with CheckpointManager(manager.directory, strategy=model.strategy) as another:
        another.save()
        assert not caplog.messages
        for _ in range(2):
            manager.save()
            another.save()
    told = [text for text in caplog.messages if "give each its own" in text]
    assert [text.split()[0] for text in told] == [f"{manager.directory}/ckpt-00000{number}" for number in (2, 3)]


def test_now_and_then(model: Model, tmp_path: Path) -> None:
    """With `every=` they are made in the background, until the manager is closed."""
    folder = tmp_path / "checkpoints"
    with CheckpointManager(str(folder), strategy=model.strategy, every=0.02, max_to_keep=2) as manager:
        until(lambda: (manager.latest_checkpoint or "") >= f"{folder}/ckpt-000004", "some were made")
        model.train(1)
    made = manager.checkpoints
    assert 1 <= len(made) <= 2
    for path in made:
        tools.verify(path)
    with pytest.raises(MisuseError, match="closed"):
        manager.save()
    assert manager.checkpoints == made
    manager.close()


def test_in_the_background(manager: CheckpointManager, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """`save(wait=False)` gives a future, of the path or of the failure; one is written after the other."""
    write = MarkedCheckpoint.write
    monkeypatch.setattr(MarkedCheckpoint, "write", lambda self, path: f"{1 // 0}")
    failing = manager.save(wait=False)
    assert isinstance(failing.exception(TIMEOUT), ZeroDivisionError)
    monkeypatch.setattr(MarkedCheckpoint, "write", write)
    futures = [manager.save(wait=False) for _ in range(3)]
    assert [future.result(TIMEOUT) for future in futures] == manager.checkpoints


def hold_writing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on, writes wait until this is set."""
    go_on, write = threading.Event(), MarkedCheckpoint.write

    def late(self: MarkedCheckpoint, path: str) -> str:
        assert go_on.wait(TIMEOUT)
        return write(self, path)

    monkeypatch.setattr(MarkedCheckpoint, "write", late)
    return go_on


@pytest.mark.parametrize("restore", ["restore", "restore_or_initialize"])
def test_restored_while_one_is_written(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore: str
) -> None:
    """That one is the newest, and waited for; the one before it, which it removes, is not looked at."""
    with CheckpointManager(str(tmp_path), strategy=model.strategy, max_to_keep=1) as manager:
        manager.save()
        model.train(1)
        go_on = hold_writing(monkeypatch)
        future = manager.save(wait=False)
        saved = model.facts()
        model.train(1)
        assert model.facts() != saved
        restoring = ThreadPoolExecutor(1)
        restored = restoring.submit(getattr(manager, restore))
        until(lambda: manager._lock.locked(), "it is about to")
        go_on.set()
        assert restored.result(TIMEOUT) in (RestoredFrom.CHECKPOINT, future.result(TIMEOUT))
        restoring.shutdown()
        assert model.facts() == saved
        assert [future.result()] == manager.checkpoints


def test_closed_while_one_is_written(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `wait` the close returns at once, and the pending checkpoint is still completed."""
    go_on = hold_writing(monkeypatch)
    manager = CheckpointManager(str(tmp_path), strategy=model.strategy, every=3600)
    future = manager.save(wait=False)
    manager.close(wait=False)
    assert not future.done()
    go_on.set()
    assert future.result(TIMEOUT) == manager.latest_checkpoint
    with pytest.raises(MisuseError, match="closed"):
        manager.save(wait=False)
    manager.close()


@pytest.mark.parametrize("gone", [False, True], ids=["", "its server is gone"])
def test_the_job_ends_while_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """A save begun by the script's last line is completed without a close, unless a server is down."""
    begun, go_on, write = threading.Event(), threading.Event(), MarkedCheckpoint.write

    def late(self: MarkedCheckpoint, path: str) -> str:
        begun.set()
        assert go_on.wait(TIMEOUT)
        return write(self, path)

    monkeypatch.setattr(MarkedCheckpoint, "write", late)
    monkeypatch.setattr(job_context, "UNREACHABLE_SECONDS", 0.1)
    with running_job(restart=False) as job:
        with job.strategy.scope():
            Variable(np.arange(3), name="x")
        manager = CheckpointManager(str(tmp_path), strategy=job.strategy, every=3600)
        future = manager.save(wait=False)
        assert begun.wait(TIMEOUT)
        if gone:
            job.cluster.kill("ps", 0, timeout=TIMEOUT)
        else:
            threading.Timer(0.7, go_on.set).start()
        job.strategy.close()
        assert future.done() is not gone
        go_on.set()
        if not gone:
            assert future.result() == manager.latest_checkpoint
        with pytest.raises(MisuseError, match="closed"):
            manager.save()


def test_arguments(model: Model, tmp_path: Path) -> None:
    """Those out of range are refused."""
    for wrong in ({"max_to_keep": 0}, {"every": 0.0}, {"every": -1.0}, {"barrier_timeout": 0.0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            CheckpointManager(str(tmp_path), strategy=model.strategy, **wrong)


# Restoring


def test_restore_or_initialize(manager: CheckpointManager, model: Model, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing; the newest; the newest that is whole, and the others are told of; an error if none of them is."""
    assert manager.restore_or_initialize() is RestoredFrom.NOTHING
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        manager.restore()
    facts = []
    for seed in range(3):
        model.train(seed)
        facts.append(model.facts())
        manager.save()
    model.train(9)
    assert manager.restore_or_initialize() is RestoredFrom.CHECKPOINT
    assert model.facts() == facts[2]
    first, second, third = manager.checkpoints
    bad = flip_value(third, "table")
    (Path(second) / "index.json").write_text("{}")
    model.train(9)
    caplog.clear()
    assert model.strategy.restore_or_initialize(manager.directory) is RestoredFrom.CHECKPOINT
    assert model.facts() == facts[0]
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert str(bad) in errors[0]
    assert f"{second}/index.json" in errors[1]
    flip_value(first, "dense")
    refused(model, lambda: manager.restore(first), "damaged")
    refused(model, manager.restore_or_initialize, rf"none of the checkpoints in .*; of the newest, {bad} is damaged")
    assert manager.checkpoints == [first, second, third], "they are not replaced by those of a job that started over"


def test_live_variables_stay(manager: CheckpointManager, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that continues with what the servers hold restores nothing."""
    manager.save()
    model.train(1)
    before = model.facts()
    monkeypatch.setattr(job_context.JobContext, "resumed", True)
    assert manager.restore_or_initialize() is RestoredFrom.LIVE
    assert model.facts() == before


def test_progress_of_a_damaged_checkpoint(manager: CheckpointManager, model: Model) -> None:
    """It is not there after falling back to one without progress; the one before can be restored at any time."""
    before = model.facts()
    old = manager.save().result()
    assert model.strategy.progress == {}
    with CheckpointManager(f"{manager.directory}-of-another", strategy=model.strategy) as another:
        model.strategy.save_progress(epoch=1)
        shutil.copytree(another.save().result(), f"{manager.directory}/ckpt-000002")
    assert manager.restore(f"{manager.directory}/ckpt-000002").endswith("2")
    assert model.strategy.progress == {"epoch": 1}
    flip_value(f"{manager.directory}/ckpt-000002", "dense")
    assert manager.restore_or_initialize() is RestoredFrom.CHECKPOINT
    assert model.strategy.progress == {}
    assert model.facts() == before
    model.strategy.save_progress(epoch=2)
    assert manager.restore(old) == old
    assert model.strategy.progress == {}


def damaged_index(path: Path) -> Path:
    """One of its bits."""
    flip(path / "index.json", 200)
    return path / "index.json"


def missing_index(path: Path) -> Path:
    """It is gone."""
    (path / "index.json").unlink()
    return path


def foreign_index(path: Path) -> Path:
    """As transformers writes it."""
    (path / "index.json").write_text('{"metadata": {"total_size": 0}, "weight_map": {}}')
    return path / "index.json"


def damaged_part(path: Path) -> Path:
    """A bit of a value."""
    return flip_value(str(path), "dense")


def truncated_part(path: Path) -> Path:
    """Without its end."""
    file = path / "part-1-of-2.safetensors"
    os.truncate(file, file.stat().st_size - 5)
    return file


def missing_part(path: Path) -> Path:
    """Gone."""
    (path / "part-0-of-2.safetensors").unlink()
    return path / "part-0-of-2.safetensors"


def swapped_part(path: Path) -> Path:
    """That of the checkpoint before."""
    file = path / "part-0-of-2.safetensors"
    shutil.copy(path.parent / "ckpt-000001" / file.name, file)
    return file


@pytest.mark.parametrize(
    "damage",
    [damaged_index, missing_index, foreign_index, damaged_part, truncated_part, missing_part, swapped_part],
    ids=lambda damage: damage.__name__,
)
def test_damage_is_refused(
    manager: CheckpointManager, model: Model, damage: Callable[[Path], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """The error names the file and the checkpoint before, memory is as it was, and `verify` finds it, too."""
    good = manager.save().result()
    model.train(7)
    bad = manager.save().result()
    model.train(8)
    file = damage(Path(bad))
    message = refused(model, lambda: manager.restore(bad), "The one before it is")
    assert str(file) in message
    assert message.endswith(f"The one before it is {good}")
    refused(model, lambda: Checkpoint(model.strategy).read(bad), str(file))
    with pytest.raises(CheckpointError, match=str(file)):
        tools.verify(bad)
    with CheckpointManager(f"{manager.directory}-of-another", strategy=model.strategy) as another:
        assert "The one before" not in refused(model, lambda: another.restore(bad), str(file))
    assert tools.verify(good).variables.keys() == {variable.name for variable in model.variables}


def test_variables_that_do_not_fit(manager: CheckpointManager, model: Model) -> None:
    """Another shape or type is refused; one that is not in the checkpoint, too, unless `partial` leaves it alone."""
    before = model.facts()
    path = manager.save().result()
    model.train(1)
    with model.strategy.scope():
        new = Variable(np.ones(3), name="new")
    refused(model, lambda: manager.restore(path), "has no 'new': give partial=True")
    assert manager.restore(path, partial=True) == path
    assert model.facts() == before
    assert new.numpy().tolist() == [1, 1, 1]
    model.strategy.delete_variable(new)
    for value, words in (
        (np.zeros((ROWS, 6), np.float32), r"float32\[7, 6\]"),
        (np.zeros((ROWS, 5), np.float64), r"float64\[7, 5\]"),
    ):
        model.strategy.delete_variable(model.dense)
        with model.strategy.scope():
            wrong = Variable(value, name="dense")
        with pytest.raises(CheckpointError, match=rf"'dense' is {words}, but float32\[7, 5\] in {path}"):
            manager.restore(path, partial=True)
        assert not wrong.numpy().any()
        assert int(model.count.numpy()) == 3
        model.dense = wrong
    model.strategy.delete_variable(model.dense)
    manager.restore(path)  # fewer variables than were saved
    assert int(model.count.numpy()) == 3


def test_optimizers_that_do_not_fit(manager: CheckpointManager, model: Model, cluster: LocalCluster) -> None:
    """One that is gone takes its slots along; one with other slots is refused, and both train on."""
    path = manager.save().result()
    model.strategy.close()
    for rule in (optimizers.Lion, optimizers.Adagrad, optimizers.Adam):
        with ParameterServerStrategy(cluster) as strategy:
            with strategy.scope():
                dense = Variable(np.ones((ROWS, 5), np.float32), name="dense")
                optimizer = rule(0.1, name="adam" if rule is not optimizers.Adam else "another")
            optimizer.apply_gradients([(np.ones(dense.shape, np.float32), dense)])
            before = dense.numpy()
            if rule is optimizers.Adam:
                Checkpoint(strategy).read(path)
                assert not optimizer.slot(dense, "m").numpy().any()
                assert optimizer.iterations == 0
            else:
                with pytest.raises(CheckpointError, match=r"slot '.*' of 'dense' that its optimizer does not keep"):
                    Checkpoint(strategy).read(path)
                np.testing.assert_array_equal(dense.numpy(), before)
                assert optimizer.iterations == 1
            optimizer.apply_gradients([(np.ones(dense.shape, np.float32), dense)])


# The command line, and whole variables


def command(*arguments: str) -> tuple[int, str]:
    """The exit code and what `pscluster checkpoint ...` prints, as a program."""
    program = [str(Path(sys.executable).with_name("pscluster")), "checkpoint", *arguments]
    done = subprocess.run(program, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_command_line(manager: CheckpointManager, model: Model, tmp_path: Path) -> None:
    """Of a checkpoint, or the newest of several: what is in it, whether it is whole, and all of it merged."""
    manager.save()
    path, run = manager.save().result(), CliRunner()
    for argument in (path, manager.directory, f"{manager.directory}/"):
        result = run.invoke(cli, ["checkpoint", "inspect", argument])
        assert result.exit_code == 0, result.output
        assert path in result.output.replace("\n", "")
        for word in ("dense", "7x5", "bfloat16", "scalar", "adam (adam)", "adagrad (adagrad)", "2 files"):
            assert word in result.output
        result = run.invoke(cli, ["checkpoint", "verify", argument])
        assert result.exit_code == 0
        assert f"{path} is complete: 6 variables" in result.output
    out = tmp_path / "merged"
    result = run.invoke(cli, ["checkpoint", "merge", path, str(out)])
    assert result.exit_code == 0
    names = ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert result.output.split() == [f"{out}/{name}" for name in names]
    flip_value(path, "dense")
    code, said = command("verify", path)
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith("pscluster: ")
    assert "is damaged: dense/part_0" in said
    for arguments in (
        ("merge", path, str(tmp_path / "other")),
        ("inspect", str(tmp_path)),
        ("verify", str(tmp_path / "nowhere")),
        ("verify", "ghostly://x"),
    ):
        with pytest.raises(CheckpointError):
            run.invoke(cli, ["checkpoint", *arguments], catch_exceptions=False)
    assert not (tmp_path / "other" / "model.safetensors.index.json").exists()


def test_merged_as_others_read_it(
    sharding_strategy: ParameterServerStrategy, model: Model, manager: CheckpointManager, tmp_path: Path
) -> None:
    """Sharded safetensors: every variable whole, slots and averages beside it, where the index says; none of ours."""
    sharding_strategy.save_progress(epoch=1)
    path = manager.save().result()
    assert read_index(path).job_metadata == {"progress": '{"epoch": 1}'}
    assert "progress" not in tools.inspect(path).partition("also")[2]
    files = tools.merge(path, str(tmp_path / "out"), file_bytes=200)
    assert len(files) > 3
    index = read_json(tmp_path / "out" / "model.safetensors.index.json")
    assert sorted(set(index["weight_map"].values())) == files[:-1]
    assert (
        index["metadata"]["total_size"]
        == sum(variable.nbytes for variable in model.variables)
        + 3 * 4 * model.dense.size
        + 3 * 4 * model.half.size
        + model.table.nbytes
    )

    def read(name: str) -> Array:
        with safetensors.safe_open(tmp_path / "out" / index["weight_map"][name], "np") as file:  # type: ignore[no-untyped-call]
            tensor: Array = file.get_tensor(name)
        return tensor

    for variable in (model.dense, model.table, model.count, model.empty):
        np.testing.assert_array_equal(read(variable.name), variable.numpy(), strict=True)
    np.testing.assert_array_equal(read("complex").view(np.complex64)[..., 0], model.whole.numpy())
    np.testing.assert_array_equal(
        read("table/adagrad/accumulator"), model.adagrad.slot(model.table, "accumulator").numpy()
    )
    np.testing.assert_array_equal(read("dense/adam/average"), model.adam.average(model.dense).numpy())
    with pytest.raises(CheckpointError, match=r"already has a .*: give another directory"):
        tools.merge(path, str(tmp_path / "out"))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't be written"):
        tools.merge(path, str(tmp_path / "file" / "below"))


@pytest.mark.parametrize(
    ("shape", "pieces"),
    [
        ((1024, 2048), [2, 3]),
        ((1024, 2048), [1, 8]),
        ((1024, 2048), [1, 1]),
        ((2, 1 << 20), [1, 5]),
        ((1, 2, 1 << 20), [1, 2, 2]),
    ],
)
def test_merge_holds_little_in_memory(
    cluster: LocalCluster, tmp_path: Path, shape: tuple[int, ...], pieces: list[int]
) -> None:
    """However a variable is cut, it comes out bit for bit, and no more than a part of it is held."""
    values = np.random.default_rng(1).normal(size=shape)
    with ParameterServerStrategy(cluster, lambda _shape, _dtype: pieces) as strategy:
        with strategy.scope():
            Variable(values, name="w")
        path = Checkpoint(strategy).write(str(tmp_path / "one"))
    assert values.nbytes == 16 << 20
    tracemalloc.start()
    try:
        tools.merge(path, str(tmp_path / "out"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes * 0.75, f"{peak:,} bytes for {values.nbytes:,}"
    merged = safetensors.numpy.load_file(tmp_path / "out" / "model-00001-of-00001.safetensors")
    np.testing.assert_array_equal(merged["w"], values)
    with contextlib.suppress(OSError):
        shutil.rmtree(tmp_path)
