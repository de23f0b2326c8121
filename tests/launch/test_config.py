"""What a run is configured with, under both names of the guide; and the list of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.roles.processes import run

from pscluster.launch import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, Trainer, report


def test_aliases() -> None:
    assert ScalingConfig(num_workers=3) == ScalingConfig(workers=3)
    assert ScalingConfig(num_workers=(2, 3)) == ScalingConfig(workers=(2, 3))
    assert CheckpointConfig(2, checkpoint_score_attribute="loss", checkpoint_score_order="min") == CheckpointConfig(
        2, "loss", "min"
    )
    mine = RunConfig("a", storage_path="/b", failure_config=FailureConfig(1), checkpoint_config=CheckpointConfig(2))
    assert mine == RunConfig("a", "/b", FailureConfig(1), CheckpointConfig(2))
    assert RunConfig().name != RunConfig().name


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (ScalingConfig, {"workers": -1}, ValueError, "workers is -1"),
        (ScalingConfig, {"workers": 1.5}, ValueError, "workers is 1.5"),
        (ScalingConfig, {"ps": 0}, ValueError, "ps is 0"),
        (ScalingConfig, {"workers": (3, 2)}, ValueError, r"workers is \(3, 2\), whose first number is the larger one"),
        (ScalingConfig, {"workers": (0, 2)}, ValueError, "workers is 0"),
        (ScalingConfig, {"workers": (2, 4, 8)}, ValueError, r"give a number, or \(fewest, most\), such as \(2, 8\)"),
        (ScalingConfig, {"join_timeout": 0}, ValueError, "join_timeout is 0"),
        (ScalingConfig, {"durability": "disk"}, ValueError, "durability is 'disk'; give 'none', 'snapshot' or 'log'"),
        (ScalingConfig, {"use_gpu": True}, ValueError, "CUDA_VISIBLE_DEVICES"),
        (ScalingConfig, {"env": {"A": 1}}, TypeError, "env has 'A'"),
        (FailureConfig, {"max_failures": -2}, ValueError, "max_failures is -2"),
        (FailureConfig, {"restart": "all"}, ValueError, "restart is 'all'; give 'worker' or 'group'"),
        (CheckpointConfig, {"num_to_keep": 0}, ValueError, "num_to_keep is 0"),
        (CheckpointConfig, {"order": "best"}, ValueError, "order is 'best'; give 'max' or 'min'"),
        (RunConfig, {"name": "../up"}, ValueError, "the name of a run is that of its folder"),
        (RunConfig, {"name": "a" * 101}, ValueError, "up to 100 letters"),
        (RunConfig, {"storage": 3}, TypeError, "storage is an int; give a path or a URL"),
        (RunConfig, {"failure": 3}, TypeError, "failure is an int, not a FailureConfig"),
        (RunConfig, {"report_timeout": 0}, ValueError, "report_timeout is 0"),
    ],
)
def test_what_is_refused(kind: type, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(**arguments)


def test_runs_are_listed(tmp_path: Path) -> None:
    def train(config: float) -> None:
        report({"loss": config})
        if config > 1:
            raise ValueError("too large")

    checkpoint = CheckpointConfig(score="loss", order="min")
    for name, loss in (("good", 0.25), ("bad", 2.0)):
        trainer = Trainer(train, loss, ScalingConfig(0), RunConfig(name, str(tmp_path), checkpoint=checkpoint))
        if loss > 1:
            with pytest.raises(Exception, match="too large"):
                trainer.fit()
        else:
            trainer.fit()
    code, output = run("runs", str(tmp_path))
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()]
    assert lines[0] == ["run", "state", "reports", "best", "began", "took"]
    assert [line[:5] for line in lines[1:]] == [
        ["good", "finished", "1", "loss", "0.25"],
        ["bad", "failed", "1", "loss", "2"],
    ]
    code, output = run("runs", str(tmp_path / "none"))
    assert code == 1
    assert "none can't be read: No such file or directory" in output
    assert run("runs", str(tmp_path / "good"))[1].startswith("there are no runs in")
