"""The training that docs/from_ddp.md moves from DistributedDataParallel: both scripts, as a user runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
from tests.roles.processes import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
# What torch 2.13 may say as a process of gloo ends: a thread of gloo's outlives destroy_process_group and asks for
# Python's lock when Python has gone. All results are out by then, since a barrier precedes it.
_ABORTED_AT_ITS_END = "terminate called without an active exception"


def losses_and_accuracy(output: str) -> tuple[list[float], float]:
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", output)]
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", output)
    return losses, float(accuracy)


def losses_and_accuracy_of_ddp(*arguments: str) -> tuple[list[float], float]:
    """What examples/digits_ddp.py prints under torchrun."""
    script = str(EXAMPLES / "digits_ddp.py")
    code, output = run(script, *arguments, command=_TORCHRUN, GLOO_SOCKET_IFNAME="lo")
    assert code == 0 or _ABORTED_AT_ITS_END in output.partition("test accuracy")[2], output
    return losses_and_accuracy(output)


def test_the_losses_are_those_of_ddp() -> None:
    """From the same parameters and batches, the last one of each epoch a partial one, to float32's accuracy."""
    expected, expected_accuracy = losses_and_accuracy_of_ddp("--epochs", "3")
    script = str(EXAMPLES / "digits_synchronous.py")
    code, output = run("run", "--ps", "2", "--workers", "4", script, "--epochs", "3")
    assert code == 0, output
    losses, accuracy = losses_and_accuracy(output)
    assert len(expected) == 3
    assert expected[0] > 1.5
    assert expected[-1] < 0.2
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert accuracy == expected_accuracy > 0.8
