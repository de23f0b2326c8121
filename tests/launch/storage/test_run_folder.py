"""The files of a run: all of a report, or none, whatever dies; one writer; what is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pscluster.core.errors import CheckpointError, MisuseError
from pscluster.launch import Checkpoint, Result
from pscluster.launch.answers.session import Report
from pscluster.launch.storage.run_folder import RunFolder, runs
from pscluster.launch.storage.uploads import upload


def directory(folder: Path, text: str) -> Path:
    """A directory with a file, and one in a folder below."""
    (folder / "below").mkdir(parents=True, exist_ok=True)
    (folder / "model.txt").write_text(text)
    (folder / "below" / "more.txt").write_text(text * 2)
    return folder


@pytest.fixture(params=["path", "url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "path" else f"memory://{tmp_path.name}/runs"


def report_of(folder: RunFolder, number: int, source: Path, **metrics: Any) -> str | None:
    """Commit a report of two members, of which the first has a checkpoint."""
    files = upload(folder.path, number, 0, 1, directory(source, str(number)))
    positions = {"train": [number, 5, 0]}
    first = Report({"number": number, **metrics}, files, f"epoch {number}", positions)
    return folder.commit(number, {0: first, 1: Report({"number": -number})})


def test_what_is_committed_is_there(storage: str, tmp_path: Path) -> None:
    with RunFolder(storage, "one").writing(workers=2) as folder:
        assert (folder.committed, folder.latest()) == (0, None)
        for number in (1, 2):
            path = report_of(folder, number, tmp_path / "source")
            assert path is not None
            with Checkpoint(path).as_directory() as here:
                assert Path(here, "below", "more.txt").read_text() == 2 * str(number)
        assert folder.commit(3, {1: Report({"number": 3})}) is None
        folder.finish("finished", return_values=[1, {"a": 2}])
    with RunFolder(storage, "one").writing(workers=3) as folder:
        assert folder.positions(2, 2) == {"train": [2, 0, 0]}, "of another number of members"
    with RunFolder(storage, "one").writing(workers=2) as folder:
        folder.finish("finished", return_values=[1, {"a": 2}])
    read = RunFolder(storage, "one").read()
    assert read.committed == 3
    assert [metrics["number"] for metrics in read.history()] == [1, 2, 3]
    assert read.latest() == read.checkpoints()[-1]
    assert [(saved.number, saved.name) for saved in read.checkpoints()] == [(1, "epoch 1"), (2, "epoch 2")]
    assert read.positions(2, 0) == {"train": [2, 5, 0]}
    assert read.positions(3, 0) == {"train": [2, 5, 0]}, "it has returned since"
    assert read.positions(2, 1) == {}
    result = Result.load(f"{read.storage}/one")
    assert (result.state, result.return_values) == ("finished", [1, {"a": 2}])
    assert [folder.name for folder in runs(storage)] == ["one"]


@pytest.mark.parametrize(("order", "kept"), [("max", [2, 4, 5]), ("min", [1, 3, 5])])
def test_the_best_and_the_newest_are_kept(storage: str, tmp_path: Path, order: str, kept: list[int]) -> None:
    with RunFolder(storage, "kept").writing() as folder:
        for number, loss in enumerate((0.1, 0.9, 0.2, 0.8, 0.5), 1):
            report_of(folder, number, tmp_path / "source", loss=loss)
            folder.retain(2, "loss", order)
        assert [saved.number for saved in folder.checkpoints()] == kept
        assert len(folder.best("loss", order)) == 3
        fs, root = fsspec.core.url_to_fs(folder.path)
        there = {name.rstrip("/").rpartition("/")[2] for name in fs.ls(f"{root}/checkpoints", detail=False)}
        assert there == {f"{number:06d}" for number in kept}
    assert RunFolder(storage, "kept").read().committed == 5, "reports stay"


SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    from pscluster.core import fault_points
    from pscluster.launch.storage import run_files
    from pscluster.launch.storage.run_folder import RunFolder
    from tests.launch.storage.test_run_folder import report_of

    storage, source, name, when = sys.argv[1:]

    def dies(module, function):
        real = getattr(module, function)
        def stand_in(*args, **kwargs):
            if when == f"before {function}":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*args, **kwargs)
            if when == f"after {function}":
                os.kill(os.getpid(), signal.SIGKILL)
            return result
        setattr(module, function, stand_in)

    with RunFolder(storage, name).writing() as folder:
        report_of(folder, 1, Path(source))
        dies(os, "replace")
        dies(run_files, "sync_folder")
        report_of(folder, 2, Path(source))
        if when == "after all":
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("when", "committed"),
    [
        ("before sync_folder", 1),
        ("before replace", 1),
        ("after replace", 2),
        ("after all", 2),
    ],
)
def test_a_report_is_there_as_a_whole_or_not_at_all(tmp_path: Path, when: str, committed: int) -> None:
    """The writer is killed somewhere in its second report; the next one goes on behind what is there."""
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    storage = str(tmp_path / "runs")
    command = [sys.executable, str(tmp_path / "script.py"), storage, str(tmp_path / "source"), "run", when]
    killed = subprocess.run(command, cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONPATH": "."}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    read = RunFolder(storage, "run").read()
    assert (read.committed, read.run["state"]) == (committed, "interrupted")
    with RunFolder(storage, "run").writing() as folder:
        assert folder.committed == committed
        there = sorted(path.name for path in (tmp_path / "runs" / "run" / "checkpoints").iterdir())
        assert there == [f"{number:06d}" for number in range(1, committed + 1)], "half a checkpoint is removed"
        report_of(folder, committed + 1, tmp_path / "source")
    lines = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["report"] for line in lines] == sorted(2 * list(range(1, committed + 2)))


def test_one_process_writes_a_run(tmp_path: Path) -> None:
    with (
        RunFolder(str(tmp_path), "run").writing(),
        pytest.raises(MisuseError, match=rf"is being written by process {os.getpid()} on .*give this run another name"),
        RunFolder(str(tmp_path), "run").writing(),
    ):
        pass
    with RunFolder(str(tmp_path), "run").writing():
        assert RunFolder(str(tmp_path), "run").read().run["state"] == "running"
    assert RunFolder(str(tmp_path), "run").read().run["state"] == "interrupted"


def test_storages_that_can_not_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/run can't be written: Not a directory"):
        RunFolder(str(tmp_path / "file"), "run").writing().__enter__()
    with pytest.raises(CheckpointError, match=r"can't be used: .*nosuch"):
        RunFolder("nosuch://bucket", "run")
    with pytest.raises(CheckpointError, match=f"there is no run in {tmp_path}/none"):
        Result.load(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is not a directory: give report"):
        upload(str(tmp_path), 1, 0, 1, tmp_path / "gone")
    with pytest.raises(CheckpointError, match="is not a directory: write the checkpoint's files into one first"):
        Checkpoint.from_directory(tmp_path / "gone")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that can't be written is not committed, and can be written later."""
    with RunFolder(str(tmp_path), "run").writing() as folder:
        full = Path("/dev/full")
        if not full.exists():
            pytest.skip("there is no /dev/full")
        (tmp_path / "run" / "reports" / "000001.json.new").symlink_to(full)
        with pytest.raises(CheckpointError, match=r"No space left on device; make room there, or give RunConfig"):
            folder.commit(1, {0: Report({"loss": 1.0})})
        assert folder.committed == 0
        (tmp_path / "run" / "reports" / "000001.json.new").unlink()
        folder.commit(1, {0: Report({"loss": 1.0})})
    assert RunFolder(str(tmp_path), "run").read().history() == [{"loss": 1.0}]


def test_a_report_that_failed_is_made_again(storage: str, tmp_path: Path) -> None:
    """Of the directory that it gave first nothing is left."""
    with RunFolder(storage, "again").writing() as folder:
        upload(folder.path, 1, 0, 1, directory(tmp_path / "first", "x"))
        (tmp_path / "second").mkdir()
        (tmp_path / "second" / "other.txt").write_text("y")
        path = folder.commit(1, {0: Report({}, upload(folder.path, 1, 0, 1, tmp_path / "second"))})
        assert path is not None
        with Checkpoint(path).as_directory() as here:
            assert [file.name for file in Path(here).rglob("*")] == ["other.txt"]


def test_a_rank_has_one_name_in_whatever_attempt(storage: str, tmp_path: Path) -> None:
    """Also if it could not be committed at first."""
    path = None
    with RunFolder(storage, "attempts").writing() as folder:
        source = directory(tmp_path / "source", "x")
        gone = {2: Report({}, [{"path": "checkpoints/000001/rank-2/x", "size": 1, "sha256": "x"}])}
        for missing in (gone, gone, {}):
            reports = {rank: Report({}, upload(folder.path, 1, rank, 1 + rank, source)) for rank in range(2)}
            with pytest.raises(CheckpointError, match="is not there") if missing else contextlib.nullcontext():
                path = folder.commit(1, reports | missing)
            upload(folder.path, 1, 1, 1, directory(tmp_path / "other", "y"))  # by an attempt that was frozen
        assert path is not None
        with Checkpoint(path).as_directory() as here:
            assert {"rank-0", "rank-1"} <= set(os.listdir(here))
            assert Path(here, "rank-1", "below", "more.txt").read_text() == "xx"
        fs, root = fsspec.url_to_fs(folder.path)
        record = json.loads(fs.cat_file(f"{root}/reports/000001.json"))
        assert all(fs.exists(f"{root}/{file['path']}") for files in record["files"].values() for file in files)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with RunFolder(str(tmp_path), "run").writing() as folder:
        report_of(folder, 1, tmp_path / "source")
        files = upload(folder.path, 2, 0, 1, tmp_path / "source")
        (tmp_path / "run" / files[0]["path"]).unlink()
        with pytest.raises(CheckpointError, match="a worker has written, is not there: all machines need"):
            folder.commit(2, {0: Report({}, files)})
        assert folder.committed == 1
    report = tmp_path / "run" / "reports" / "000001.json"
    report.write_text(report.read_text()[:-20])
    with pytest.raises(CheckpointError, match=r"reports/000001.json is damaged .*: restore it, or move it away"):
        RunFolder(str(tmp_path), "run").read()
    with pytest.raises(CheckpointError, match=r"reports/000001.json is damaged"):
        RunFolder(str(tmp_path), "run").writing().__enter__()


def test_requests_that_make_no_sense(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each is logged once, not at each look for as long as the run takes; the next one is taken."""
    folder = RunFolder(str(tmp_path), "run")
    with folder.writing(workers=[1, 3]):
        for text in ("[1]", "{", "3", "[" * 100_000, "\xff", '{"workers": true}', "{}"):
            (tmp_path / "run" / "scale.json").write_text(text)
            assert folder.take_request() is folder.take_request() is None
        (tmp_path / "run" / "scale.json").mkdir()
        assert folder.take_request() is folder.take_request() is None
        (tmp_path / "run" / "scale.json.taken").rmdir()
        assert len(caplog.messages) == 6
        folder.request_workers(2)
        assert [folder.take_request(), folder.take_request()] == [2, None]
    assert not list((tmp_path / "run").glob("scale*"))


def test_metadata_and_copies(tmp_path: Path) -> None:
    checkpoint = Checkpoint.from_directory(directory(tmp_path / "source", "x"))
    assert checkpoint.metadata == {}
    checkpoint.set_metadata({"epoch": 1})
    checkpoint.update_metadata({"loss": 0.5})
    assert checkpoint.metadata == {"epoch": 1, "loss": 0.5}
    copied = checkpoint.to_directory(tmp_path / "copy")
    assert Path(copied, "below", "more.txt").read_text() == "xx"
    assert Checkpoint(copied).metadata == checkpoint.metadata
    with pytest.raises(CheckpointError, match="is gone, or is not on this machine"):
        Checkpoint(str(tmp_path / "other")).as_directory().__enter__()


def test_copies_keep_names_like_those_of_members(tmp_path: Path) -> None:
    """Those that a user chose in a directory, or one member below its own, are no attempts of members."""
    storage = fsspec.filesystem("memory")
    names = {"rank-0/model.txt", "rank-0.5/model.txt", "rank-1.2"}
    for path in (f"/{tmp_path.name}/saved", f"/{tmp_path.name}/run/checkpoints/000001/rank-0"):
        for name in names:
            storage.pipe_file(f"{path}/{name}", b"x")
        with Checkpoint(f"memory:/{path}").as_directory() as folder:
            assert {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()} == names


@pytest.mark.parametrize("key", ["../outside.txt", "below/../../outside.txt", "below/../../../outside.txt"])
def test_copies_stay_in_their_directory(tmp_path: Path, key: str) -> None:
    """An object store's keys may have dots, which would lead anywhere on this machine."""
    storage = fsspec.filesystem("memory")
    path = f"/{tmp_path.name}/saved"
    storage.pipe_file(f"{path}/model.txt", b"x")
    storage.store[f"{path}/{key}"] = storage.store[f"{path}/model.txt"]
    checkpoint, target = Checkpoint(f"memory:/{path}"), tmp_path / "a" / "copy"
    with pytest.raises(CheckpointError, match=r"a file that would be written outside .*outside.txt: someone else may"):
        checkpoint.to_directory(target)
    with pytest.raises(CheckpointError, match="outside"):
        checkpoint.as_directory().__enter__()
    assert not list(tmp_path.rglob("*.txt"))
