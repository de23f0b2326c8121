"""Evaluation beside a job: what a checkpoint holds, read without a cluster, and a process that looks for new ones."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tests.coordinator.checkpoints.test_checkpoints import ROWS, Model, flip, flip_value, two_axes
from tests.roles.processes import PSCLUSTER, Process, environ, make_cluster, run, tf_config
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import FixedShardsPartitioner, LocalCluster, ParameterServerStrategy, Variable, features
from pscluster.coordinator.api import Checkpoint, CheckpointManager, SavedVariables, SidecarEvaluator
from pscluster.coordinator.checkpoints import folder, tools
from pscluster.coordinator.checkpoints import sidecar as sidecar_module
from pscluster.coordinator.checkpoints.sidecar import RESULTS, Evaluation, next_of
from pscluster.coordinator.training.events import EventWriter
from pscluster.core.errors import (
    CheckpointError,
    ConfigurationError,
    MisuseError,
    UnknownVariableError,
    WaitTimeoutError,
)


class Job:
    """A variable in three shards that counts, and its checkpoints."""

    def __init__(self, strategy: ParameterServerStrategy, directory: str) -> None:
        self.strategy = strategy
        self.directory = directory
        with strategy.scope():
            self.count = Variable(np.zeros((7, 5)), name="count")
        self.manager = CheckpointManager(directory, strategy=strategy, max_to_keep=None)

    def save(self, times: int = 1) -> str:
        """Count on by one and save, so often: checkpoint n holds n everywhere. The last one."""
        for _ in range(times):
            self.count.assign_add(np.ones((7, 5)))
            path = self.manager.save().result()
        return path


@pytest.fixture
def job(sharding_strategy: ParameterServerStrategy, tmp_path: Path) -> Iterator[Job]:
    """On two servers, with no checkpoint yet."""
    made = Job(sharding_strategy, str(tmp_path / "checkpoints"))
    yield made
    made.manager.close()


def worth(saved: SavedVariables) -> dict[str, float]:
    """The count, which all elements have."""
    values = set(saved["count"].reshape(-1).tolist())
    assert len(values) == 1, f"{saved.path} is torn: {values}"
    return {"count": values.pop()}


def lines(log_dir: str) -> list[dict[str, Any]]:
    """Of the results, as any reader of JSON finds them."""

    def no_json(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = Path(log_dir, RESULTS).read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line, parse_constant=no_json) for line in text.splitlines()]


def counts(evaluations: list[Evaluation]) -> list[tuple[int, float]]:
    """Of each its number and what it was worth."""
    return [(evaluation.number, evaluation.values["count"]) for evaluation in evaluations]


Begin = Callable[[SidecarEvaluator], Future[list[Evaluation]]]


@pytest.fixture
def beside() -> Iterator[Begin]:
    """Runs an evaluator on a thread, which ends with the test."""
    evaluators: list[SidecarEvaluator] = []
    with ThreadPoolExecutor(1, thread_name_prefix="evaluator") as pool:

        def begin(evaluator: SidecarEvaluator) -> Future[list[Evaluation]]:
            evaluators.append(evaluator)
            return pool.submit(evaluator.run)

        yield begin
        for evaluator in evaluators:
            folder.finish(evaluator.directory)


def messages(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """What the evaluator has logged."""
    of_ours = [record for record in caplog.records if record.name == sidecar_module.__name__]
    return [record.getMessage() for record in of_ours if record.levelname == level]


# A checkpoint's variables


@pytest.mark.parametrize("cut", [None, FixedShardsPartitioner(2), two_axes], ids=["whole", "rows", "two axes"])
def test_variables_as_they_were(cluster: LocalCluster, tmp_path: Path, cut: Any) -> None:
    """Of every type, however they were cut, bit for bit; with the progress, and by path, directory or URL."""
    with ParameterServerStrategy(cluster, cut, placement="round_robin") as strategy:
        model = Model(strategy)
        model.train(1)
        strategy.save_progress(epoch=3, state=[1, 2])
        with CheckpointManager(str(tmp_path / "some"), strategy=strategy) as manager:
            manager.save()
            model.train(2)
            path = manager.save().result()
        alone = Checkpoint(strategy).write(str(tmp_path / "alone"))
        values = {variable.name: variable.numpy() for variable in model.variables}
    for location in (path, tmp_path / "some", f"file://{tmp_path}/some/", alone):
        saved = SavedVariables(location)
        assert list(saved) == sorted(values)
        assert len(saved) == len(values)
        for name, value in values.items():
            np.testing.assert_array_equal(saved[name], value, strict=True)
            saved[name][...] = 1  # the caller's own
        assert saved.progress == {"epoch": 3, "state": [1, 2]}
        assert saved.number == (0 if location == alone else 2)
        assert saved.path == (
            str(location).rstrip("/") if location in (path, alone) else f"{str(location).rstrip('/')}/ckpt-000002"
        )
        assert saved.created.endswith("+00:00")
        assert saved.failure is None


def test_what_is_not_there(job: Job) -> None:
    """Nothing was kept as progress; a variable that is not in it, or of our own, is an error which says what is."""
    saved = SavedVariables(job.save())
    assert saved.progress == {}
    job.strategy.save_progress(epoch=1)
    saved = SavedVariables(job.save())
    for name in ("w", "progress"):
        assert name not in saved
        with pytest.raises(UnknownVariableError, match=rf"ckpt-000002 has no variable '{name}'; it has count"):
            saved[name]
        assert saved.get(name) is None
    assert repr(saved) == f"<SavedVariables of {saved.path}: count>"
    for nowhere in (f"{job.directory}/ckpt-000003", f"{job.directory}/none", "/proc/none"):
        with pytest.raises(CheckpointError, match=f"{nowhere} is not a checkpoint: it has no index.json"):
            SavedVariables(nowhere)
    with pytest.raises(CheckpointError, match="ghostly"):
        SavedVariables("ghostly://bucket/run")


def test_only_what_is_asked_for_is_read(sharding_strategy: ParameterServerStrategy, tmp_path: Path) -> None:
    """Damage of one variable is found when that one is read; names, numbers and other variables are there."""
    Model(sharding_strategy).train(1)
    path = Checkpoint(sharding_strategy).write(str(tmp_path / "one"))
    saved = SavedVariables(path)
    dense = saved["dense"]
    file = flip_value(path, "table")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"{file} is damaged: table/part_0") as caught:
            saved["table"]
        assert saved.failure is caught.value
    np.testing.assert_array_equal(saved["dense"], dense)
    for file in Path(path).glob("*.safetensors"):
        file.unlink()
    assert "dense" in saved
    assert dense.shape == (ROWS, 5)
    with pytest.raises(CheckpointError, match=r"part-. -of-2|No such file"):
        saved["dense"]


def test_little_more_than_itself_is_in_memory(cluster: LocalCluster, tmp_path: Path) -> None:
    """To read a variable takes its bytes, those of a shard, and a few MiB."""
    values = np.random.default_rng(1).normal(size=(1024, 2048))
    with ParameterServerStrategy(cluster, lambda _shape, _dtype: [3, 2]) as strategy:
        with strategy.scope():
            Variable(values, name="w")
        saved = SavedVariables(Checkpoint(strategy).write(str(tmp_path / "one")))
    tracemalloc.start()
    try:
        array = saved["w"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(array, values)
    assert peak < values.nbytes * 7 / 6 + (4 << 20), f"{peak:,} bytes for {values.nbytes:,}"


# Which ones


@pytest.mark.parametrize(
    ("there", "passed", "newest", "oldest"),
    [
        ([], set(), None, None),
        ([1, 2, 3], set(), 3, 1),
        ([1, 2, 3], {1}, 3, 2),
        ([1, 2, 3], {3}, None, 1),
        ([1, 2, 3], {1, 2, 3}, None, None),
    ],
)
def test_which_is_next(there: list[int], passed: set[int], newest: int | None, oldest: int | None) -> None:
    """The newest and no other; or, of all that there are, the oldest that was not evaluated."""
    assert next_of(there, passed, every=False) == newest
    assert next_of(there, passed, every=True) == oldest


def test_the_newest(job: Job) -> None:
    """Of those that are there the newest is evaluated; the end comes when it was, and no more will come."""
    job.save(3)
    job.manager.finish()
    evaluator = SidecarEvaluator(worth, job.directory)
    (evaluation,) = evaluator.run()
    assert counts([evaluation]) == [(3, 3.0)]
    assert evaluation.checkpoint == f"{job.directory}/ckpt-000003"
    assert evaluation.created == SavedVariables(evaluation.checkpoint).created
    assert lines(f"{job.directory}/evaluations") == [json.loads(evaluation.to_json())]
    assert evaluator.run() == []


def test_every_one_while_they_are_made(job: Job, beside: Begin, tmp_path: Path) -> None:
    """An evaluator begun before there is a directory evaluates each checkpoint in order, and ends after the last."""
    log_dir = str(tmp_path / "log")
    running = beside(SidecarEvaluator(worth, job.directory, every=True, log_dir=log_dir, poll=0.01))
    for nth in range(1, 6):
        job.save()
        if nth % 2:  # and now and then two at once
            until(lambda n=nth: Path(log_dir, RESULTS).exists() and len(lines(log_dir)) == n, "it was evaluated")  # type: ignore[misc]
    assert not running.done()
    job.manager.finish()
    assert counts(running.result(TIMEOUT)) == [(nth, float(nth)) for nth in range(1, 6)]
    assert [line["number"] for line in lines(log_dir)] == [1, 2, 3, 4, 5]
    assert not Path(job.directory, "evaluations").exists()


def test_max_evaluations(job: Job) -> None:
    """It ends after `max_evaluations`; the next one continues there."""
    job.save(3)
    runs = [SidecarEvaluator(worth, job.directory, every=True, max_evaluations=2).run()]
    job.manager.finish()
    runs.append(SidecarEvaluator(worth, job.directory, every=True, max_evaluations=2).run())
    assert [counts(evaluations) for evaluations in runs] == [[(1, 1.0), (2, 2.0)], [(3, 3.0)]]


def test_an_evaluator_that_is_started_again(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """It does what its predecessor had not: an incomplete line of that is removed, others stay."""
    job.save(3)
    evaluator = SidecarEvaluator(worth, job.directory, every=True, max_evaluations=2)
    evaluator.run()
    file = Path(job.directory, "evaluations", RESULTS)
    whole = file.read_text()
    file.write_text(f'{whole}"of somebody else"\n{{"checkpoint": "/x", "num')
    job.manager.finish()
    assert counts(SidecarEvaluator(worth, job.directory, every=True).run()) == [(3, 3.0)]
    records: list[Any] = [*lines(f"{job.directory}/evaluations")]
    assert records.pop(2) == "of somebody else"
    assert [line["number"] for line in records] == [1, 2, 3]
    assert any("a line that was not written by an evaluator" in message for message in messages(caplog, "WARNING"))
    assert SidecarEvaluator(worth, job.directory).run() == []


def test_another_job_in_the_directory(job: Job, tmp_path: Path) -> None:
    """A checkpoint of a number that was evaluated, but made at another time, is another one."""
    path = Path(job.save())
    evaluator = SidecarEvaluator(worth, job.directory, log_dir=str(tmp_path / "log"))
    job.manager.finish()
    assert counts(evaluator.run()) == [(1, 1.0)]
    assert evaluator.run() == []
    first = SavedVariables(path).created
    shutil.rmtree(path)
    assert evaluator.run() == []
    while True:  # times are in whole seconds
        shutil.rmtree(path, ignore_errors=True)
        job.count.assign(np.full((7, 5), 8.0))
        Checkpoint(job.strategy).mark(1).write(str(path))
        if SavedVariables(path).created != first:
            break
    assert counts(evaluator.run()) == [(1, 8.0)]
    assert [line["values"]["count"] for line in lines(str(tmp_path / "log"))] == [1.0, 8.0]


# The results


def test_numbers_that_json_has_not(job: Job) -> None:
    """NaN and infinities are strings, from which they can be read again; NumPy's numbers are numbers."""
    job.save()
    job.manager.finish()
    values: dict[str, Any] = {
        "nan": math.nan,
        "up": math.inf,
        "down": -np.float32(np.inf),
        "half": np.float16(0.5),
        "whole": np.int64(3),
        "zero": np.zeros(()),
        "yes": True,
    }
    (evaluation,) = SidecarEvaluator(lambda saved: values, job.directory).run()
    (line,) = lines(f"{job.directory}/evaluations")
    assert line["values"] == {
        "nan": "NaN",
        "up": "Infinity",
        "down": "-Infinity",
        "half": 0.5,
        "whole": 3.0,
        "zero": 0.0,
        "yes": 1.0,
    }
    again = Evaluation.from_json(json.dumps(line))
    assert str(again) == str(evaluation)
    assert repr(evaluation.values) == repr({name: float(value) for name, value in values.items()})


def test_a_number_alone(job: Job) -> None:
    """Is named "value"."""
    job.save()
    job.manager.finish()
    (evaluation,) = SidecarEvaluator(lambda saved: saved["count"].sum(), job.directory).run()
    assert evaluation.values == {"value": 35.0}


@pytest.mark.parametrize("given", [None, "0.5", {"loss": "0.5"}, {1: 0.5}, {"loss": [1, 2]}, 1j], ids=repr)
def test_what_is_no_number(job: Job, given: Any) -> None:
    """Is an error of the caller's, and nothing is written."""
    path = job.save()
    with pytest.raises(MisuseError, match="return a number, or a mapping of names to numbers") as caught:
        SidecarEvaluator(lambda saved: given, job.directory).run()
    assert caught.value.__notes__ == [f"This was raised while {path} was evaluated."]
    assert Path(job.directory, "evaluations", RESULTS).read_text() == ""


def events(folder: str) -> dict[tuple[str, int], list[float]]:
    """The scalars of all event files there, by name and step; their checksums are compared."""
    masked = pytest.importorskip("tensorboardX.record_writer").masked_crc32c
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    fs, where = fsspec.core.url_to_fs(folder)
    scalars: dict[tuple[str, int], list[float]] = {}
    for name in fs.ls(where, detail=False):
        if "events.out.tfevents." not in name:
            continue
        data, at = fs.cat_file(name), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            body = data[at + 12 : at + 12 + size]
            sums = data[at + 8 : at + 12] + data[at + 12 + size : at + 16 + size]
            assert sums == b"".join(masked(piece).to_bytes(4, "little") for piece in (data[at : at + 8], body))
            at += 16 + size
            read = event.FromString(body)
            for value in read.summary.value:
                scalars.setdefault((value.tag, read.step), []).append(value.simple_value)
    return scalars


@pytest.mark.parametrize("url", [False, True], ids=["local", "url"])
def test_event_files(job: Job, tmp_path: Path, url: bool) -> None:
    """Every result is an event at the checkpoint's number, also where files are not local; once, over restarts."""
    pytest.importorskip("tensorboardX")
    log_dir = f"memory://{tmp_path.name}" if url else str(tmp_path / "log")
    for _ in range(2):
        job.save(2)
        SidecarEvaluator(
            lambda saved: worth(saved) | {"nan": math.nan},
            job.directory,
            every=True,
            log_dir=log_dir,
            max_evaluations=2,
        ).run()
    scalars = events(log_dir)
    assert {key: value for key, value in scalars.items() if key[0] == "count"} == {
        ("count", n): [n] for n in range(1, 5)
    }
    assert [math.isnan(value[0]) for key, value in scalars.items() if key[0] == "nan"] == [True] * 4
    fs, where = fsspec.core.url_to_fs(log_dir)
    assert [json.loads(line)["number"] for line in fs.cat_file(f"{where}/{RESULTS}").splitlines()] == [1, 2, 3, 4]


def test_events_are_there_at_once(tmp_path: Path) -> None:
    """When `scalars` returns they are in the file; each writer has one of its own; a closed one says so."""
    pytest.importorskip("tensorboardX")
    first, second = EventWriter(tmp_path / "log"), EventWriter(str(tmp_path / "log"))
    with contextlib.closing(first), contextlib.closing(second):
        first.scalars(1, {"loss": 2.0, "a name": 0.5})
        second.scalars(1, {"loss": 3.0})
        assert events(str(tmp_path / "log")) in (
            {("loss", 1): [2.0, 3.0], ("a name", 1): [0.5]},
            {("loss", 1): [3.0, 2.0], ("a name", 1): [0.5]},
        )
        assert len(list((tmp_path / "log").iterdir())) == 2
    first.close()
    with pytest.raises(MisuseError, match="closed: make another one"):
        first.scalars(2, {"loss": 1.0})


def test_without_tensorboardx(job: Job, tmp_path: Path) -> None:
    """There are lines and no event files; who wants to write some is told what to install."""
    job.save()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "sys.modules['tensorboardX'] = None\n"  # as if it were not installed
        "sys.path_importer_cache.clear()\n"
        "from pscluster.coordinator import SidecarEvaluator\n"
        "from pscluster.coordinator.training.events import EventWriter\n"
        "print(SidecarEvaluator(lambda saved: 1, sys.argv[1], max_evaluations=1).run()[0].values)\n"
        "EventWriter(sys.argv[1])\n"
    )
    code, output = run("evaluator", str(script), job.directory)
    assert "no event files are written: tensorboardX is not installed" in output
    assert "{'value': 1.0}" in output
    assert output.rstrip().endswith('pip install "pscluster[tensorboard]"')
    assert code == 2
    assert os.listdir(f"{job.directory}/evaluations") == [RESULTS]


# What may happen to checkpoints


def test_one_that_vanishes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint that is removed while it is read is passed over, and the next one evaluated."""
    job.manager.max_to_keep = 1
    job.save()

    def slow(saved: SavedVariables) -> dict[str, float]:
        if saved.number == 1:
            job.save()
            assert not Path(saved.path).exists()
        return worth(saved)

    assert counts(SidecarEvaluator(slow, job.directory, max_evaluations=1).run()) == [(2, 2.0)]
    assert messages(caplog, "WARNING") == [
        f"skipping {job.directory}/ckpt-000001: it was removed before it could be evaluated"
    ]


def test_one_that_vanishes_where_fn_opens_files(job: Job) -> None:
    """So is one whose files `fn` opens by itself; but a file that is missing elsewhere is its own error."""
    job.manager.max_to_keep = 1
    job.save()

    def opens(saved: SavedVariables) -> dict[str, float]:
        if saved.number == 1:
            job.save()
        elif saved.number == 3:
            Path("/nowhere").read_bytes()
        Path(saved.path, "index.json").read_bytes()
        return worth(saved)

    evaluator = SidecarEvaluator(opens, job.directory, max_evaluations=1)
    assert counts(evaluator.run()) == [(2, 2.0)]
    job.save()
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        evaluator.run()


@pytest.mark.parametrize("damaged", ["index", "value", "file"])
def test_one_that_is_damaged(job: Job, caplog: pytest.LogCaptureFixture, damaged: str) -> None:
    """It is logged as an error and skipped, once; the ones before and after it are evaluated."""
    path = Path([job.save() for _ in range(3)][1])
    if damaged == "index":
        flip(path / "index.json", 200)
    elif damaged == "value":
        flip_value(str(path), "count")
    else:
        next(path.glob("*.safetensors")).unlink()
    job.manager.finish()
    assert counts(SidecarEvaluator(worth, job.directory, every=True).run()) == [(1, 1.0), (3, 3.0)]
    (message,) = messages(caplog, "ERROR")
    assert message.startswith(f"{path} can't be evaluated: {path}")


def test_the_newest_is_damaged(job: Job) -> None:
    """The next newer one is evaluated; the one before it is not, and if there is no other, none is."""
    flip_value(job.save(2), "count")
    job.manager.finish()
    evaluator = SidecarEvaluator(worth, job.directory, poll=0.01, max_evaluations=1)
    assert evaluator.run() == []
    job.save()
    assert counts(evaluator.run()) == [(3, 3.0)]


def test_checkpoints_come_and_go(job: Job, beside: Begin, tmp_path: Path) -> None:
    """While sixty are made and only the newest one is kept, no torn or doubled one is seen, and the last one is."""
    job.manager.max_to_keep = 1
    log_dir = str(tmp_path / "log")
    running = beside(SidecarEvaluator(worth, job.directory, log_dir=log_dir, every=True, poll=0.001))
    job.save(60)
    job.manager.finish()
    evaluated = counts(running.result(TIMEOUT))
    assert evaluated == sorted(set(evaluated))
    assert all(checkpoint_number == value for checkpoint_number, value in evaluated)
    assert evaluated[-1] == (60, 60.0)
    assert [line["number"] for line in lines(log_dir)] == [checkpoint_number for checkpoint_number, _ in evaluated]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, UnknownVariableError])
def test_errors_of_fn(job: Job, error: type[BaseException]) -> None:
    """They are raised, with a note of the checkpoint; and it is evaluated again by the next evaluator."""
    path = job.save()

    def fails(saved: SavedVariables) -> float:
        if error is UnknownVariableError:
            return float(saved["nothing"])
        raise error

    with pytest.raises(error) as caught:
        SidecarEvaluator(fails, job.directory).run()
    notes = getattr(caught.value, "__notes__", [])
    assert notes == ([] if error is KeyboardInterrupt else [f"This was raised while {path} was evaluated."])
    assert counts(SidecarEvaluator(worth, job.directory, max_evaluations=1).run()) == [(1, 1.0)]


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store that does not answer for a while."""

    protocol = "flaky"
    cachable = False
    store: dict[str, Any] = {}  # noqa: RUF012  (as that of its base)
    pseudo_dirs = [""]  # noqa: RUF012
    failures = 0
    error: BaseException = OSError(5, "Input/output error")

    def info(self, path: str, **options: Any) -> Any:
        """An error, so often."""
        if type(self).failures and "ckpt" in path:
            type(self).failures -= 1
            raise type(self).error
        return super().info(path, **options)


def test_a_store_that_does_not_answer(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and asked again; what was evaluated before is not evaluated again."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    Flaky.failures = 0
    there = "flaky://run"
    fs, where = fsspec.core.url_to_fs(there)
    fs.put(f"{job.save()}/", f"{where}/ckpt-000001/", recursive=True)
    evaluator = SidecarEvaluator(worth, there, poll=0.001, max_evaluations=1)
    assert counts(evaluator.run()) == [(1, 1.0)]
    fs.put(f"{job.save()}/", f"{where}/ckpt-000002/", recursive=True)
    Flaky.failures = 3
    assert counts(evaluator.run()) == [(2, 2.0)]
    assert messages(caplog, "WARNING") == [f"{there} can't be read: Input/output error; trying again"]
    Flaky.failures = 1 << 60
    evaluator.timeout = 0.01
    with pytest.raises(WaitTimeoutError, match=r"no new checkpoint in flaky://run for 0\.01 s: .*Input/output error"):
        evaluator.run()
    assert [json.loads(line)["number"] for line in fs.cat_file(f"{where}/evaluations/{RESULTS}").splitlines()] == [1, 2]


def test_a_signal_while_a_store_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not lost in fsspec, whose `exists` takes every exception for a no."""
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    monkeypatch.setattr(Flaky, "error", KeyboardInterrupt())
    for call in (
        lambda: folder.exists("flaky://run/ckpt-000001", folder.INDEX),
        lambda: folder.numbers("flaky://run/ckpt", whole=True),
        lambda: folder.where("flaky://run/ckpt-000001"),
        lambda: SidecarEvaluator(worth, "flaky://ckpt", log_dir="flaky://log", timeout=TIMEOUT).run(),
    ):
        monkeypatch.setattr(Flaky, "failures", 1)
        with pytest.raises(KeyboardInterrupt):
            call()


# The end


def test_finished(job: Job, tmp_path: Path) -> None:
    """The mark names the newest checkpoint; the next save takes it back, also that of another manager."""
    mark = Path(job.directory, "finished.json")
    job.manager.finish()
    assert json.loads(mark.read_text())["newest"] is None
    assert SidecarEvaluator(worth, job.directory).run() == []
    job.save(2)
    assert not mark.exists()
    for _ in range(2):
        job.manager.finish()
        assert json.loads(mark.read_text())["newest"] == "ckpt-000002"
    job.manager.close()
    job.manager.finish()
    with CheckpointManager(f"file://{job.directory}", strategy=job.strategy) as another:
        assert tools.inspect(another.checkpoints[-1])
        another.save()
        assert not mark.exists()
    nowhere = CheckpointManager("/proc/none", strategy=job.strategy)
    with nowhere, pytest.raises(CheckpointError, match="/proc/none can't be written"):
        nowhere.finish()
    assert sorted(os.listdir(job.directory)) == ["ckpt-000001", "ckpt-000002", "ckpt-000003", "evaluations"]


def test_finish_waits_for_the_last_one(job: Job) -> None:
    """A checkpoint that is still being written counts, and no automatic one follows."""
    with CheckpointManager(job.directory, strategy=job.strategy, every=0.01) as manager:
        until(lambda: manager.latest_checkpoint, "one was made")
        manager.save(wait=False)
        manager.finish()
        newest = manager.latest_checkpoint
        assert newest is not None
        assert json.loads(Path(job.directory, "finished.json").read_text())["newest"] == Path(newest).name
        manager.close()
        assert manager.latest_checkpoint == newest
        assert folder.exists(job.directory, folder.FINISHED)


def test_timeout(job: Job) -> None:
    """An evaluator gives up where nothing new comes for as long as it was told; it says how many there were."""
    evaluator = SidecarEvaluator(worth, job.directory, timeout=0.1, poll=0.001)
    for evaluated in range(2):
        with pytest.raises(
            WaitTimeoutError, match=rf"for 0\.1 s; {evaluated} were evaluated\. Is the job still running\?"
        ):
            evaluator.run()
        job.save()


def test_a_long_wait_is_said(
    job: Job, beside: Begin, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nothing new comes, the log says so now and then."""
    caplog.set_level("INFO")
    monkeypatch.setattr(sidecar_module, "LOG_SECONDS", 0.01)
    running = beside(SidecarEvaluator(worth, job.directory, poll=0.001))
    line = f"no new checkpoint in {job.directory} for "
    until(lambda: sum(line in message for message in messages(caplog, "INFO")) >= 2, "it was said twice")
    job.manager.finish()
    assert running.result(TIMEOUT) == []


def test_arguments(tmp_path: Path) -> None:
    """Those out of range are refused, and so are places that can't be reached."""
    for wrong in ({"max_evaluations": 0}, {"poll": 0.0}, {"poll": math.nan}, {"timeout": 0.0}, {"timeout": -1.0}):
        with pytest.raises(ConfigurationError, match=next(iter(wrong))):
            SidecarEvaluator(worth, tmp_path, **wrong)
    with pytest.raises(ConfigurationError, match="fn is 3; give a function"):
        SidecarEvaluator(3, tmp_path)  # type: ignore[arg-type]
    for places in (("ghostly://run",), (tmp_path, "ghostly://run")):
        with pytest.raises(ConfigurationError, match="ghostly://run can't be reached: Protocol not known"):
            SidecarEvaluator(worth, places[0], log_dir=places[-1])
    with pytest.raises(ConfigurationError, match=r"/proc/none/evaluations\.jsonl can't be written"):
        SidecarEvaluator(worth, tmp_path, log_dir="/proc/none").run()


# As a process

SCRIPT = """
import pathlib
import sys
import time

from pscluster.coordinator import SidecarEvaluator, TFConfigClusterResolver


def evaluate(saved):
    print("evaluating", saved.number, flush=True)
    while saved.number == 2 and not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.01)
    return {"count": saved["count"].mean()}


found = SidecarEvaluator(evaluate, sys.argv[1], every=True, poll=0.02).run()
print("found", [each.number for each in found], "as", TFConfigClusterResolver().task_type, flush=True)
"""


@pytest.mark.timeout(180)
def test_a_process_beside_the_job(job: Job, tmp_path: Path) -> None:
    """`pscluster evaluator`: killed, told to stop, and started again, with no cluster there. Each counts once."""
    script, gate = tmp_path / "evaluate.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    config = tf_config(make_cluster(), "evaluator")  # no process listens at its addresses
    command = [*PSCLUSTER, "evaluator", str(script), job.directory, str(gate)]
    job.save()
    with Process(command, environ(config)) as evaluator:
        evaluator.wait_for("ckpt-000001: count 1")
        job.save()
        evaluator.wait_for("evaluating 2")
        evaluator.send(signal.SIGKILL)
        assert evaluator.wait() == -signal.SIGKILL
    for signum in (signal.SIGTERM, signal.SIGINT):
        with Process(command, environ(config)) as evaluator:
            evaluator.wait_for("evaluating 2")
            evaluator.send(signum)
            assert evaluator.wait() == 0
            assert f"stopped by {signum.name} before the script had ended" in evaluator.output
            assert "evaluating 1" not in evaluator.output
    gate.touch()
    with Process(command, environ(config)) as evaluator:
        evaluator.wait_for("ckpt-000002: count 2")  # it waits now, for another one
        evaluator.send(signal.SIGTERM)
        assert evaluator.wait() == 0
    with Process(command, environ("{}")) as evaluator:  # an evaluator needs no TF_CONFIG
        job.save()
        job.manager.finish()
        assert evaluator.wait() == 0, evaluator.output
        assert evaluator.output.splitlines()[-1] == "found [3] as None"
    assert [(line["number"], line["values"]) for line in lines(f"{job.directory}/evaluations")] == [
        (1, {"count": 1.0}),
        (2, {"count": 2.0}),
        (3, {"count": 3.0}),
    ]


@pytest.mark.timeout(180)
def test_exit_codes(job: Job, tmp_path: Path) -> None:
    """The exit code is 0 after the last one, 1 if the script fails or times out, 2 for wrong arguments."""
    script = tmp_path / "evaluate.py"
    script.write_text(
        "import sys\n"
        "from pscluster.coordinator import SidecarEvaluator\n"
        "SidecarEvaluator(lambda saved: 1 / saved['count'].sum(), sys.argv[1], timeout=float(sys.argv[2])).run()\n"
    )
    code, output = run("evaluator", str(script), job.directory, "0.05")
    assert (code, "WaitTimeoutError: no new checkpoint in" in output) == (1, True)
    code, output = run("evaluator", str(script), job.directory, "0")
    refusal = "pscluster: timeout is 0.0; it must be a number of seconds, above 0, or None"
    assert (code, output.splitlines()[-1]) == (2, refusal)
    job.save()
    job.manager.finish()
    code, output = run("evaluator", str(script), job.directory, "60")
    assert (code, "no more checkpoints will come in" in output) == (0, True)
    job.count.assign(np.zeros((7, 5)))
    path = job.manager.save().result()
    script.write_text(script.read_text().replace("1 / saved['count'].sum()", "1 // int(saved['count'].sum())"))
    code, output = run("evaluator", str(script), job.directory, "60")
    assert (code, "ZeroDivisionError" in output, f"while {path} was evaluated" in output) == (1, True, True)


def test_threads(job: Job) -> None:
    """An evaluator starts none."""
    job.save()
    before = set(threading.enumerate())
    SidecarEvaluator(worth, job.directory, max_evaluations=1).run()
    assert set(threading.enumerate()) <= before


# The best checkpoint


def of_numbers(values: dict[int, float]) -> Callable[[SavedVariables], dict[str, float]]:
    """A value by the checkpoint's number."""
    return lambda saved: {"accuracy": values[saved.number], **worth(saved)}


@pytest.mark.parametrize("url", [False, True], ids=["path", "memory"])
def test_the_best_is_copied(job: Job, url: bool) -> None:
    """It stays when the job removes its own, another evaluator goes on from it, and jobs can begin with it."""
    best = f"memory://{job.directory}/best" if url else f"{job.directory}-best"
    values = {1: 0.5, 2: 0.8, 3: 0.7, 4: float("nan"), 5: 0.9, 6: 0.85}
    job.save(4)
    evaluator = SidecarEvaluator(
        of_numbers(values), job.directory, every=True, monitor="accuracy", best_dir=best, max_evaluations=4
    )
    assert len(evaluator.run()) == 4
    assert folder.numbers(best, whole=False) == [2]
    shutil.rmtree(folder.path_of(job.directory, 2))
    assert worth(SavedVariables(folder.where(best))) == {"count": 2}
    if not url:
        Checkpoint(job.strategy).read(folder.path_of(best, 2))
        assert set(job.count.numpy().reshape(-1).tolist()) == {2}
    job.manager.save().result()
    job.save(1)
    again = SidecarEvaluator(
        of_numbers(values), job.directory, every=True, monitor="accuracy", best_dir=best, max_evaluations=2
    )
    assert [evaluation.number for evaluation in again.run()] == [5, 6]
    assert folder.numbers(best, whole=False) == [5]


def test_the_best_with_its_layers(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`fn` has the layers as they were saved; the copy has them, for a process that serves and for the next job."""
    words = features.StringLookup(name="words")
    job.manager.close()
    job.manager = CheckpointManager(job.directory, strategy=job.strategy, features=[words], max_to_keep=None)
    words.adapt(["a", "b", "b"])
    job.save()
    words.adapt(["c"])
    last = job.save(2)
    flip(Path(last, "features.safetensors"))
    job.manager.finish()

    def known(saved: SavedVariables) -> float:
        words = saved.features["words"]
        assert isinstance(words, features.StringLookup)
        return float(words.vocabulary_size())

    best = f"{tmp_path}/best"
    evaluator = SidecarEvaluator(known, job.directory, every=True, monitor="value", mode="max", best_dir=best)
    assert [evaluation.values for evaluation in evaluator.run()] == [{"value": 3}, {"value": 2}]
    (message,) = messages(caplog, "ERROR")
    assert message.startswith(f"{last} can't be evaluated: ")
    served = SavedVariables(best)
    assert served.features["words"](["b", "c"]).tolist() == [1, 0]
    fresh = features.StringLookup(name="words")
    with CheckpointManager(best, strategy=job.strategy, features=[fresh]) as manager:
        manager.restore()
    assert fresh.get_vocabulary() == ["[UNK]", "b", "a"]
    assert set(job.count.numpy().reshape(-1).tolist()) == {1}


def test_a_copy_that_was_broken_off(job: Job) -> None:
    """It is made again by the evaluator that is started next, which has no line of it."""
    job.save(1)
    evaluator = SidecarEvaluator(worth, job.directory, monitor="count", mode="max", max_evaluations=1)
    left = Path(folder.path_of(evaluator.best_dir, 1))
    left.mkdir(parents=True)
    (left / "rubbish").touch()
    evaluator.run()
    assert sorted(os.listdir(left)) == sorted(os.listdir(folder.path_of(job.directory, 1)))
    assert evaluator.best_dir == f"{job.directory}/evaluations/best"
    tools.verify(str(left))


def test_the_best_vanishes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """One that was removed before it is copied is evaluated, and not the best."""
    job.save(2)

    def fn(saved: SavedVariables) -> dict[str, float]:
        found = worth(saved)
        if saved.number == 2:
            shutil.rmtree(saved.path)
        return found

    evaluator = SidecarEvaluator(fn, job.directory, every=True, monitor="count", mode="max", max_evaluations=2)
    assert counts(evaluator.run()) == [(1, 1), (2, 2)]
    assert folder.numbers(evaluator.best_dir, whole=False) == [1]
    assert "was removed before it could be copied" in caplog.text


def test_what_can_not_be_the_best(job: Job) -> None:
    """A name that fn does not return, and arguments that are wrong."""
    job.save(1)
    with pytest.raises(MisuseError, match="monitors 'loss', but fn returned 'count'"):
        SidecarEvaluator(worth, job.directory, monitor="loss").run()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"monitor": "a", "mode": "least"}, "mode is 'least'; it must be 'auto', 'min' or 'max'"),
        ({"monitor": ""}, "monitor is ''; give the name of a number that fn returns"),
        ({"best_dir": "there"}, "best_dir is there, but nothing says what is best: give a monitor"),
        ({"monitor": "a", "best_dir": job.directory}, "that of the checkpoints"),
        ({"monitor": "a", "best_dir": "none://run"}, "none://run can't be reached"),
    ]
    for arguments, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            SidecarEvaluator(worth, job.directory, **arguments)
