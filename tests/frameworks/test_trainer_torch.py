"""An unchanged script of DistributedDataParallel under the trainer: beside torchrun, and with a rank that is killed."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from tests.frameworks.test_from_ddp import EXAMPLES, losses_and_accuracy, losses_and_accuracy_of_ddp
from tests.roles.processes import run

SCRIPT = """
    import os, runpy, signal, sys
    from pathlib import Path
    from pscluster.launch import RunConfig, ScalingConfig, Trainer, get_context

    script, folder, dies = sys.argv[1:]

    def train():
        if dies == "dies" and get_context().world_rank == 2:
            try:
                os.close(os.open(Path(folder, "died"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:  # when all have begun together, and none has ended an epoch
                import torch.distributed as dist
                begin = dist.init_process_group
                def begin_and_die(*args):
                    begin(*args)
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.init_process_group = begin_and_die
        runpy.run_path(script, run_name="__main__")

    if __name__ == "__main__":
        result = Trainer(
            train, scaling=ScalingConfig(workers=4), run=RunConfig("ddp", folder), backend="torch"
        ).fit()
        print("state", result.state)
"""


@pytest.mark.timeout(300)  # sixteen processes import torch
def test_a_script_of_ddp_runs_unchanged(tmp_path: Path) -> None:
    """It prints what it prints under torchrun; also if all had to begin again."""
    script = str(EXAMPLES / "digits_ddp.py")
    expected = losses_and_accuracy_of_ddp()
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    for how in ("lives", "dies"):
        folder = tmp_path / how
        folder.mkdir()
        command = (sys.executable, str(tmp_path / "train.py"))
        code, output = run(script, str(folder), how, command=command, GLOO_SOCKET_IFNAME="lo")
        assert code == 0, output
        assert "state finished" in output
        assert losses_and_accuracy(output) == expected
        assert (folder / "died").exists() == (how == "dies")
