"""Files as distributed datasets on a live cluster: each row once an epoch, also if everything dies."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.csv import write_csv
from tests.conftest import Gate, leave_mark, marks, wait_for_file
from tests.faults.steps import note, wait_for
from tests.faults.test_coordinator_death import started
from tests.waiting import TIMEOUT, until

from pscluster.coordinator import (
    ClusterCoordinator,
    IndexedSlices,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    errors,
    metrics,
    sources,
)

ROWS = 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rows with a number each, in several files of each kind."""
    for file in range(4):
        of = pa.table({"n": np.arange(file, ROWS, 4), "x": np.full(ROWS // 4, file, np.float32)})
        pq.write_table(of, tmp_path / f"{file}.parquet", row_group_size=150)
        write_csv(of, tmp_path / f"{file}.csv")
        (tmp_path / f"{file}.txt").write_text("".join(f"{n}\n" for n in of["n"].to_pylist()))
        np.save(tmp_path / f"{file}.npy", of["n"].to_numpy())
    return tmp_path


KINDS: dict[str, Callable[[Path], Any]] = {
    "parquet": lambda folder: sources.parquet(folder / "*.parquet", block_rows=300),
    "filtered": lambda folder: sources.parquet(folder / "*.parquet", columns=["n"], filters=[("x", ">=", 0)]),
    "csv": lambda folder: sources.csv(f"{folder}/*.csv", block_bytes=1500),
    "text": lambda folder: sources.text([folder / f"{file}.txt" for file in range(4)], block_bytes=900),
    "npy": lambda folder: sources.npy({"n": f"{folder}/*.npy"}),
}


def numbers_of(batch: Any) -> Any:
    """Return the numbers of a batch of any kind."""
    return batch["n"] if isinstance(batch, dict) else batch.astype(np.int64)


def counting(counts: Variable) -> Callable[[Any], int]:
    """A step that counts the visits of each row."""

    def step(part: Any) -> int:
        seen = 0
        for batch in part:
            numbers = numbers_of(batch)
            counts.scatter_add(IndexedSlices(np.ones(len(numbers), np.int64), numbers))
            seen += len(numbers)
        return seen

    return step


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_once_an_epoch(
    coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, folder: Path, kind: str
) -> None:
    """Shuffled and batched, over two epochs; the same order with `local`."""
    with strategy.scope():
        counts = Variable(np.zeros(ROWS, np.int64), name="visits")
    data = coordinator.distribute_dataset(KINDS[kind](folder)).shuffle(seed=1).batch(64)
    values = [coordinator.schedule(counting(counts), args=(part,)) for part in data.repeat(2)]
    coordinator.join(TIMEOUT)
    assert sum(coordinator.fetch(values)) == 2 * ROWS
    assert set(counts.numpy().tolist()) == {2}
    orders = [[n for batch in data.local(epoch) for n in numbers_of(batch).tolist()] for epoch in (0, 1)]
    assert orders[0] != orders[1]
    assert set(orders[0]) == set(range(ROWS))
    if kind in ("parquet", "npy"):
        assert data.examples == ROWS
        assert len(data) == len(list(data.local()))
        assert coordinator.distribute_dataset(KINDS[kind](folder)).batch(64, drop_remainder=True).examples % 64 == 0
    else:
        with pytest.raises(TypeError, match="the number of examples in the files is known only when they are read"):
            len(data)


def test_fit_and_evaluate(coordinator: ClusterCoordinator, strategy: ParameterServerStrategy, folder: Path) -> None:
    """Epochs of `fit` end with those of the files, and metrics count each row once."""
    with strategy.scope():
        counts = Variable(np.zeros(ROWS, np.int64), name="visits")
    data = coordinator.distribute_dataset(KINDS["csv"](folder)).shuffle(seed=1).batch(64)
    count = counting(counts)

    def step(batch: Any) -> dict[str, float]:
        return {"seen": float(count([batch]))}

    coordinator.fit(step, data, epochs=2, verbose=0)
    assert set(counts.numpy().tolist()) == {2}
    total = coordinator.evaluate(lambda batch: (batch["n"],), data, {"total": metrics.Sum()})
    assert total["total"] == ROWS * (ROWS - 1) / 2
    told = []
    for part in data:
        told.append(data.progress)
        coordinator.schedule(count, args=(part,)).fetch(TIMEOUT)
    size = sum(path.stat().st_size for path in folder.glob("*.csv"))
    assert told[0].bytes == 0
    assert {progress.all_bytes for progress in told} == {size}
    assert [progress.share for progress in told] == sorted({progress.share for progress in told})
    assert told[-1].seconds_left is not None
    assert told[-1].examples is None


def test_errors_reach_the_script(
    coordinator: ClusterCoordinator, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the file and the line; bad blocks can be skipped."""
    source = sources.csv(f"{folder}/*.csv", block_bytes=1 << 20)
    with (folder / "2.csv").open("r+") as file:
        file.seek(500)
        file.write("x")
    data = coordinator.distribute_dataset(source, name="mine", on_error="skip", retries=0).batch(100)
    seen = [coordinator.schedule(lambda part: sum(len(b["n"]) for b in part), args=(part,)) for part in data]
    assert coordinator.fetch(seen, TIMEOUT) == [1000, 1000, 0, 1000]
    assert data.skipped == 1
    assert "skipped 1 block: dataset 'mine': the block at bytes 0 to" in caplog.text
    assert "other types=" not in caplog.text  # a value is missing or too many
    (folder / "3.csv").unlink()
    failing = coordinator.distribute_dataset(source, name="strict", retries=0)
    coordinator.schedule(lambda part: list(part), args=(list(failing)[3],))
    with pytest.raises(errors.DatasetError, match=r"'strict': the block at bytes 0 to .* no file '.*3.csv' here"):
        coordinator.join(TIMEOUT)


SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        CheckpointManager, ClusterCoordinator, FixedShardsPartitioner, IndexedSlices, ParameterServerStrategy,
        TFConfigClusterResolver, Variable, sources,
    )
    from tests.faults.steps import note, wait_for

    folder, rows, stop = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        counts = Variable(np.zeros(rows, np.int64), name="visited")
    coordinator = ClusterCoordinator(strategy)
    manager = CheckpointManager(folder + "/checkpoints", strategy=strategy)
    found = manager.restore_or_initialize()

    def step(part):
        for batch in part:
            counts.scatter_add(IndexedSlices(np.ones(len(batch["n"]), np.int64), batch["n"]))

    kinds = [sources.parquet(folder + "/*.parquet", block_rows=100), sources.csv(folder + "/*.csv", block_bytes=500)]
    for number, source in enumerate(kinds):
        data = coordinator.distribute_dataset(source, name=f"kind {number}").shuffle(seed=1).batch(10).repeat(2)
        note(folder, f"begun-{found.value}-{number}", f"{data.epoch} {data.visited}")
        for nth, part in enumerate(data if data.epoch < 2 else ()):
            value = coordinator.schedule(step, args=(part,))
            if number and stop and nth == stop:
                value.fetch()
                manager.save()
                note(folder, "enough")
                wait_for(folder, "never")
        coordinator.join()
    note(folder, "result", " ".join(map(str, sorted(set(counts.numpy().tolist())))))
"""


@pytest.mark.timeout(180)
def test_all_die_in_the_middle(tmp_path: Path, folder: Path) -> None:
    """Everything is killed; a new cluster goes on in the middle of the second dataset's epoch, each row once."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with (
        LocalCluster(1, 2, log_level="ERROR") as cluster,
        started(cluster, script, tmp_path, ROWS, 90) as first,
    ):
        wait_for(str(tmp_path), "enough")
        for role, count in (("worker", 2), ("ps", 1)):
            for index in range(count):
                cluster.kill(role, index)
        first.kill()
    with (
        LocalCluster(1, 1, log_level="ERROR") as cluster,
        started(cluster, script, tmp_path, ROWS, 0) as second,
    ):
        assert second.wait(TIMEOUT) == 0
    epoch, visited = map(int, wait_for(str(tmp_path), "begun-checkpoint-1").split())
    assert epoch or visited
    assert wait_for(str(tmp_path), "begun-checkpoint-0") == "2 0"
    assert wait_for(str(tmp_path), "result") == "4"
    note(str(tmp_path), "never")


def test_workers_die_while_they_read(folder: Path, gate: Gate) -> None:
    """A worker that is killed in the middle of a block: the next one reads it anew, and its rows count once."""
    with (
        LocalCluster(1, 2, log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster) as strategy,
    ):
        with strategy.scope():
            counts = Variable(np.zeros(ROWS, np.int64), name="visits")
        coordinator, path = ClusterCoordinator(strategy), gate.path

        def step(part: Any) -> None:
            for number, batch in enumerate(part):
                counts.scatter_add(IndexedSlices(np.ones(len(batch["n"]), np.int64), batch["n"]))
                if number == 2:
                    leave_mark(path, "half")
                    wait_for_file(path)

        data = coordinator.distribute_dataset(KINDS["parquet"](folder)).shuffle(seed=1).batch(16)
        for part in data:
            coordinator.schedule(step, args=(part,))
        until(lambda: marks(gate), "a worker is in the middle of a block")
        cluster.kill("worker", 0)
        cluster.kill("worker", 1)
        gate.open()
        coordinator.join(TIMEOUT)
        assert set(counts.numpy().tolist()) == {1}


def test_without_pickles(folder: Path) -> None:
    """Sources travel as data to workers that take no pickles, and are read in the folders that these were given."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(WITHOUT))
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(ROWS)] * 5


WITHOUT = """
    import sys
    from pathlib import Path
    from pscluster.coordinator import ClusterCoordinator, LocalCluster, ParameterServerStrategy, sources

    def count(part):
        return sum(len(batch["n"]) if isinstance(batch, dict) else len(batch) for batch in part)

    if __name__ == "__main__":
        folder = sys.argv[1]
        made = [
            sources.parquet(folder + "/*.parquet", block_rows=300),
            sources.parquet(folder + "/*.parquet", filters=[("x", ">=", 0)]),
            sources.csv(folder + "/*.csv"),
            sources.text(folder + "/*.txt"),
            sources.npy({"n": folder + "/*.npy"}),
        ]
        with LocalCluster(1, 1, allow_pickle=False) as cluster, ParameterServerStrategy(cluster) as strategy:
            coordinator = ClusterCoordinator(strategy)
            for source in made:
                data = coordinator.distribute_dataset(source).shuffle(seed=1).batch(64)
                print(sum(coordinator.fetch([coordinator.schedule(count, args=(part,)) for part in data])))
"""
