"""A notebook: cells in a real kernel, run, run again and interrupted; what it leaves behind when it ends."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from tests.conftest import is_gone
from tests.waiting import TIMEOUT, until

START = """
import numpy as np
from pscluster.coordinator import *
from pscluster.coordinator import metrics, optimizers
cluster = LocalCluster(1, 2)
strategy = ParameterServerStrategy(cluster)
coordinator = ClusterCoordinator(strategy)
"""
MODEL = """
with strategy.scope():
    w = Variable(np.zeros(SIZE, np.float32), name="<w> & co")
    optimizer = optimizers.SGD(1.0, momentum=0.9, name="sgd")
    loss = metrics.Mean(name="loss")
"""
TRAIN = """
def step():
    optimizer.apply_gradients([(np.ones(w.shape, np.float32), w)])
    loss.update_state(w.numpy())
    return w.numpy().tolist()
coordinator.schedule(step).fetch(60)
"""

NESTED = """
def inner(n):
    return coordinator.schedule(lambda: 1 / n).fetch(60)
def outer(n):
    return inner(n)
outer(0)
"""
ENDLESS = """
import time
def endless():
    while True:
        w.numpy()
        time.sleep(0.01)
value = coordinator.schedule(endless)
print("begun")
"""
FIT = """
def step(batch):
    print("begun", flush=True)
    w.assign_add(np.full(w.shape, 1, np.float32))
    return {"loss": 0.5}
data = coordinator.distribute_dataset(np.arange(EXAMPLES)).batch(1)
coordinator.fit(step, data, epochs=EPOCHS)
"""


@dataclass
class Output:
    """What a cell has shown."""

    result: dict[str, str] = field(default_factory=dict)
    text: str = ""
    error: str = ""
    shown: list[str] = field(default_factory=list)
    updates: list[str] = field(default_factory=list)

    @property
    def value(self) -> str:
        """The last expression's, as text. The cell's error fails the test."""
        assert not self.error, self.error
        return self.result.get("text/plain", "")


class Notebook:
    """A kernel and its client."""

    def __init__(self) -> None:
        """Start it."""
        self.manager = KernelManager(kernel_name="python3")
        # Within a test the kernel would leave alone what other processes print.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self.manager.start_kernel(env=env)
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=TIMEOUT)

    def begin(self, code: str) -> str:
        """Begin to run a cell, and return what names the run."""
        return str(self.client.execute(code))

    def until_printed(self, word: str) -> None:
        """Wait until a cell has printed this."""
        while True:
            message: Any = self.client.get_iopub_msg(timeout=TIMEOUT)
            if message["msg_type"] == "stream" and word in message["content"]["text"]:
                return

    def end(self, run: str) -> Output:
        """Wait until it has run, and return what it has shown."""
        output = Output()
        while True:
            message: Any = self.client.get_iopub_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") != run:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    output.text += content["text"]
                case "execute_result":
                    output.result = content["data"]
                case "display_data":
                    output.shown.append(content["data"].get("text/html", ""))
                case "update_display_data":
                    output.updates.append(content["data"].get("text/plain", ""))
                case "error":
                    output.error = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    return output

    def run(self, code: str) -> Output:
        """Run a cell."""
        return self.end(self.begin(code))

    def pids(self) -> list[int]:
        """The processes of its clusters."""
        value = self.run("[pid for cluster in LocalCluster.running() for pid in cluster.pids.values()]").value
        return [int(number) for number in re.findall(r"\d+", value)]


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    """One kernel with a cluster, for all tests of the module. It is shut down at the end, and leaves no process."""
    notebook = Notebook()
    try:
        assert notebook.run(START).value == ""
        yield notebook
        pids = notebook.pids()
        assert len(pids) == 3
        notebook.manager.shutdown_kernel()
        until(lambda: all(map(is_gone, pids)), "the cluster's processes have ended")
    finally:
        notebook.client.stop_channels()
        notebook.manager.shutdown_kernel(now=True)


def test_cells_run_again(notebook: Notebook) -> None:
    """What an earlier cell has made is made again, of another shape, too; functions of cells use it."""
    notebook.run("SIZE = 2")
    assert notebook.run(MODEL).text == ""
    assert notebook.run(TRAIN).value == "[-1.0, -1.0]"
    assert notebook.run(TRAIN).value == "[-2.9000000953674316, -2.9000000953674316]"  # the momentum goes on
    again = notebook.run("SIZE = 3\n" + MODEL)
    assert "what an earlier one has made, such as variable '<w> & co': earlier values are gone" in again.text
    assert again.text.count("\n") == 1
    assert notebook.run(TRAIN).value == "[-1.0, -1.0, -1.0]"
    assert notebook.run("float(loss.result()), len(strategy.variables)").value == "(-1.0, 3)"
    twice = notebook.run("with strategy.scope():\n  a = Variable(0, name='a')\n  b = Variable(0, name='a')")
    assert "there is already a variable 'a'" in twice.error
    wrong = notebook.run("with strategy.scope():\n  w = Variable(object(), name='<w> & co')")
    assert "MisuseError" in wrong.error
    assert notebook.run("w.numpy().shape").value == "(3,)"


def test_tables(notebook: Notebook) -> None:
    """Clusters, strategies and variables are shown as tables; names are escaped, and of many rows the first shown."""
    notebook.run("SIZE = 3\n" + MODEL)
    html = [notebook.run(name).result["text/html"] for name in ("cluster", "strategy", "w")]
    assert all(text.startswith("<table>") for text in html)
    assert "worker 1" in html[0]
    assert "running" in html[0]
    assert "&lt;w&gt; &amp; co" in html[1]
    assert "/job:ps/task:0" in html[2]
    assert "<w>" not in "".join(html)
    assert notebook.run("display(cluster, strategy)").shown == html[:2]
    cut = "Variable(np.zeros(300), name='big', partitioner=FixedShardsPartitioner(120))"
    assert "... and 20 more" in notebook.run(f"with strategy.scope():\n  big = {cut}\nbig").result["text/html"]


def test_short_errors(notebook: Notebook) -> None:
    """An error shows the user's lines and what it says, of the script and of the function, and no other."""
    told = notebook.run(NESTED).error
    assert "ZeroDivisionError: division by zero" in told
    assert "return inner(n)" in told
    assert re.search(r"Cell In\[\d+\], line \d, in <module>", told)
    assert len(told.splitlines()) < 20, told
    assert re.search(r"Cell In\[\d+\], line \d, in <lambda>\n", told), told
    assert "remote_value.py" not in told
    assert "ZeroDivisionError" in notebook.run("coordinator.join()").error
    assert "ZeroDivisionError" in notebook.run(NESTED).error
    assert notebook.run("coordinator.schedule(lambda: 5).fetch(60)").value == "5"  # the error was shown above
    assert "ZeroDivisionError" in notebook.run(NESTED).error
    data = "data = coordinator.distribute_dataset(np.arange(4)).batch(2)\n"
    assert notebook.run(f"{data}coordinator.fit(lambda batch: 0.5, data, verbose=0)").error == ""
    assert "ZeroDivisionError" in notebook.run(NESTED).error
    assert notebook.run("coordinator.predict(lambda batch: batch, data).tolist()").value == "[0, 1, 2, 3]"
    again = "try:\n  coordinator.schedule(lambda: 1 / 0).fetch()\nexcept Exception:\n  coordinator.schedule(lambda: 5)"
    assert "has raised it before" in notebook.run(again).error  # in one cell, as in a script
    misuse = notebook.run("Variable(1)").error
    assert "MisuseError: a Variable was created outside" in misuse
    assert len(misuse.splitlines()) <= 4, misuse


@pytest.mark.parametrize("wait", ["value.fetch()", "coordinator.join()"])
def test_interrupted(notebook: Notebook, wait: str) -> None:
    """Ctrl-C ends what waits and what runs, and the cluster goes on: the next cell runs at once."""
    pids = notebook.pids()
    run = notebook.begin(f"{ENDLESS}\n{wait}")
    notebook.until_printed("begun")
    notebook.manager.interrupt_kernel()
    told = notebook.end(run).error
    assert "KeyboardInterrupt" in told
    assert "1 function was cancelled. The cluster goes on" in told
    assert len(told.splitlines()) < 7, told
    assert notebook.run("coordinator.join(60)\ncoordinator.schedule(lambda: 5).fetch(60)").value == "5"
    assert notebook.run("value.status.value").value == "'cancelled'"
    assert notebook.pids() == pids


def test_training(notebook: Notebook) -> None:
    """Progress is an output that is updated; Ctrl-C ends a training once the running steps have, not the cluster."""
    notebook.run("SIZE = 1\n" + MODEL)
    told = notebook.run("EXAMPLES, EPOCHS = 6, 2\n" + FIT)
    assert not told.error
    assert re.search(r"epoch 2/2 +6 steps in .* s  loss 0\.5", told.shown.pop())
    assert len(told.shown) == 3, "a line and a summary for each epoch"
    assert re.search(r"epoch 2/2  loss 0\.5000 .*\D6/6\D", told.updates[-1])
    assert told.text.count("begun") == 12
    assert notebook.run("w.numpy().tolist()").value == "[12.0]"
    run = notebook.begin("EXAMPLES, EPOCHS = 100_000, 9\n" + FIT)
    notebook.until_printed("begun")
    notebook.manager.interrupt_kernel()
    told = notebook.end(run)
    assert "KeyboardInterrupt" in told.error
    assert len(told.error.splitlines()) < 12, told.error
    assert notebook.run("coordinator.schedule(lambda: 5).fetch(60)").value == "5"


def test_the_first_cell_runs_again(notebook: Notebook) -> None:
    """A new cluster takes the place of the one that the same cell has started; so does a strategy, on its own."""
    old = notebook.pids()
    told = notebook.run(START)
    assert "stopping the cluster that this cell started before" in told.text
    assert "still running" not in told.text
    assert all(map(is_gone, old))
    assert len(notebook.pids()) == 3
    told = notebook.run(TRAIN)
    assert re.search(r"'(sgd|loss|<w> & co)' in this job: it was deleted, or is of an earlier job; make it", told.error)
    assert notebook.run("SIZE = 1\n" + MODEL).text == ""
    told = notebook.run("strategy = ParameterServerStrategy(cluster)\ncoordinator = ClusterCoordinator(strategy)")
    assert "its variables are gone" in told.text
    assert notebook.run("SIZE = 1\n" + MODEL).text == ""
    assert notebook.run(TRAIN).value == "[-1.0]"


def test_killed(notebook: Notebook) -> None:
    """A kernel that is killed leaves no process, and the next one begins anew."""
    pids = notebook.pids()
    notebook.manager.signal_kernel(signal.SIGKILL)
    until(lambda: all(map(is_gone, pids)), "the cluster's processes have ended")
    notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=TIMEOUT)
    assert notebook.run(START).value == ""
