"""What the workers of a run print: in its folder, a file for each, and here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import fsspec
import pytest
from tests.launch.test_trainer import first_time
from tests.waiting import until

from pscluster.coordinator import LocalCluster
from pscluster.core.errors import ConfigurationError
from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context, report
from pscluster.launch.storage.logs import Follower

pytestmark = pytest.mark.timeout(180)


def prints(folder: str) -> None:
    rank = get_context().world_rank
    print(f"hello from {rank}")
    os.write(2, b"in bytes\n")
    report({})
    if rank == 1 and first_time(folder, "died"):
        print("last words")
        os.kill(os.getpid(), signal.SIGKILL)
    print("unfinished", end="")


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_each_worker_has_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], backend: str) -> None:
    """With all that it printed, also just before it died; and in later fits."""
    run = RunConfig("prints", str(tmp_path))
    for _ in range(2):
        Trainer(prints, str(tmp_path), run=run, backend=backend).fit()
    files = {path.name: path.read_text() for path in (tmp_path / "prints" / "logs").iterdir()}
    assert sorted(files) == ["ps-0.log", "worker-0.log", "worker-1.log"]
    text = files["worker-0.log"] + files["worker-1.log"]
    assert text.count("last words\n") == 1
    assert text.count("hello from 0\n") == text.count("rank 0 of 2 begins, attempt") >= 2
    assert text.count("hello from 1\n") == text.count("in bytes\n") - text.count("hello from 0\n") == 3
    shown = capsys.readouterr().out
    for name in ("worker-0", "worker-1"):
        for line in files[f"{name}.log"].splitlines():
            assert f"{name} | {line}\n" in shown


def test_logs_of_a_run_at_a_url(tmp_path: Path) -> None:
    storage = f"memory://{tmp_path.name}"
    for _ in range(2):
        Trainer(print, "once", ScalingConfig(workers=1), RunConfig("url", storage)).fit()
    text = fsspec.filesystem("memory").cat_file(f"/{tmp_path.name}/url/logs/worker-0.log").decode()
    assert text.count("once\n") == text.count("rank 0 of 1 begins") == 2


def test_lines_are_shown_as_they_are_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "worker-0.log"
    file.write_text("before\n")
    follower = Follower(tmp_path)
    with file.open("ab") as opened:
        for data, shown in (
            (b"one\ntw", "worker-0 | one\n"),
            (b"o\n\n", "worker-0 | two\nworker-0 | \n"),
            (b"\xff", ""),
        ):
            opened.write(data)
            opened.flush()
            follower.show()
            assert capsys.readouterr().out == shown
    (tmp_path / "worker-1.log").write_text("other\n")
    follower.show(to_end=True)
    assert capsys.readouterr().out == "worker-0 | \ufffd\nworker-1 | other\n"


def test_a_cluster_with_logs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"log_dir is .*none', which is not a directory"):
        LocalCluster(1, 1, log_dir=tmp_path / "none")
    with LocalCluster(1, 1, log_dir=tmp_path, log_level="INFO"):
        until(lambda: "serving on" in (tmp_path / "worker-0.log").read_text(), "it logs")
