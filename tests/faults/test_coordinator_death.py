"""A coordinator that dies: servers and workers wait, and the same script, started again, continues where it was."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tests.faults.steps import note, wait_for
from tests.faults.support import stopped
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import ClusterCoordinator, LocalCluster, ParameterServerStrategy, Variable, optimizers
from pscluster.coordinator.job import attach
from pscluster.coordinator.job.live_job import continue_job
from pscluster.core.errors import BusyError, MisuseError, PSUnavailableError, StaleError
from pscluster.v1 import node_pb2

SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, TFConfigClusterResolver, Variable,
        optimizers,
    )
    from tests.faults.steps import note, wait_for

    folder, total = sys.argv[1], int(sys.argv[2])
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        count = Variable(np.zeros((4, 2)), name="count")
        momentum = optimizers.SGD(1.0, momentum=0.5, name="momentum")
        trained = Variable(np.zeros(4, np.float32), name="trained")
    coordinator = ClusterCoordinator(strategy)

    def step():
        count.assign_add(np.ones((4, 2)))
        momentum.apply_gradients([(np.ones(4, np.float32), trained)])

    begin = strategy.progress.get("done", 0)
    note(folder, f"begun-{strategy.resumed}", str(begin))
    for done in range(begin, total):
        coordinator.schedule(step)
        coordinator.join()
        strategy.save_progress(done=done + 1, state=np.random.default_rng(7).bit_generator.state)
        if done + 1 == total // 2 and not strategy.resumed:
            note(folder, "half")
            wait_for(folder, "never")
    note(folder, "result", " ".join(map(str, [*set(count.numpy().reshape(-1)), momentum.iterations])))
"""

FROZEN = """
    import sys
    import time
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, ParameterServerStrategy, TFConfigClusterResolver, Variable
    )
    from tests.faults.steps import first_time, note, wait_for

    folder = sys.argv[1]
    strategy = ParameterServerStrategy(TFConfigClusterResolver())
    with strategy.scope():
        count = Variable(np.zeros(4, np.int64), name="count")
    coordinator = ClusterCoordinator(strategy, worker_lease=1.0)

    def held():
        first = first_time(folder, "held")
        wait_for(folder, "go on")
        count.assign_add(np.ones(4, np.int64))
        return first

    value = coordinator.schedule(held, timeout=3.0)
    while not any(worker.front_since for worker in coordinator._dispatcher._scheduler.workers):
        time.sleep(0.005)
    note(folder, "timed")
    wait_for(folder, "thawed")
    for _ in range(20):
        coordinator.schedule(count.numpy).fetch()
    note(folder, "went on")
    note(folder, "result", f"{value.fetch()} {count.numpy().tolist()}")
"""

HALF_A_STEP = """
    import os
    import signal
    import sys
    import numpy as np
    from pscluster.coordinator import FixedShardsPartitioner, ParameterServerStrategy, TFConfigClusterResolver, Variable
    from pscluster.core.context import FunctionContext, running
    from pscluster.ps.client.synchronous.steps import ReplicaSteps
    from tests.faults.steps import note

    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        count = Variable(np.zeros(4), name="count")
    if strategy.resumed:
        note(sys.argv[1], "result", str(count.numpy().tolist()))
        sys.exit()
    context = FunctionContext(function=1000, attempt=1, worker_index=0, num_workers=1)
    client = strategy.client
    context.steps = ReplicaSteps(
        client.exchanges, client.updater.header(context), run=7, step=0, epoch=1, replica=0, replicas=1, seconds=9.0
    )
    with running(context):
        count.assign_add(np.ones(4))
        context.steps.end(context, {})
    assert count.numpy().tolist() == [1, 1, 0, 0]  # only server 0 knows that the step is committed
    os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def started(
    cluster: LocalCluster, script: Path, *arguments: object, errors: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the script as the cluster's coordinator until the block ends, logging to the file if one is given."""
    env = {**os.environ, "TF_CONFIG": cluster.tf_config("chief", 0), "PSCLUSTER_TOKEN": cluster.token}
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [env.get("PYTHONPATH", "")])])
    command = [sys.executable, "-m", "pscluster.coordinator", *cluster.hand_over_port("chief", 0), str(script)]
    with (
        contextlib.nullcontext() if errors is None else errors.open("wb") as stderr,
        subprocess.Popen([*command, *map(str, arguments)], env=env, stderr=stderr) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The job's script."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.mark.timeout(180)
@pytest.mark.parametrize("servers_die", [False, True], ids=["alone", "with all servers"])
def test_the_script_started_again_goes_on(script: Path, tmp_path: Path, servers_die: bool) -> None:
    """Killed in the middle of the job it finds its variables, slots and progress again, and each step counts once."""
    total = 40
    with LocalCluster(2, 2, log_level="ERROR", durability="log") as cluster:
        with started(cluster, script, tmp_path, total) as first:
            assert wait_for(str(tmp_path), "begun-False") == "0"
            wait_for(str(tmp_path), "half")
            first.send_signal(signal.SIGKILL)
        if servers_die:
            for index in range(2):
                cluster.wait_restarted("ps", index, cluster.kill("ps", index, timeout=TIMEOUT), timeout=TIMEOUT)
        with started(cluster, script, tmp_path, total) as second:
            assert second.wait(TIMEOUT) == 0
        assert wait_for(str(tmp_path), "begun-True") == str(total // 2)
        assert wait_for(str(tmp_path), "result").split() == [f"{total}.0", str(total)]


@pytest.mark.timeout(60)
def test_half_a_synchronous_step_is_made_whole(tmp_path: Path) -> None:
    """A coordinator that goes on with a job first has all servers apply the step that server 0 has committed."""
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(HALF_A_STEP))
    with LocalCluster(2, 1, log_level="ERROR", durability="log") as cluster:
        with started(cluster, path, tmp_path) as first:
            assert first.wait(TIMEOUT) == -signal.SIGKILL
        cluster.wait_restarted("ps", 1, cluster.kill("ps", 1, timeout=TIMEOUT), timeout=TIMEOUT)
        with started(cluster, path, tmp_path) as second:
            assert second.wait(TIMEOUT) == 0
        assert wait_for(str(tmp_path), "result") == "[1.0, 1.0, 1.0, 1.0]"


@pytest.mark.timeout(60)
def test_a_coordinator_that_is_frozen(tmp_path: Path) -> None:
    """When it thaws after its workers' lease nothing is lost by its own silence: functions continue, none times out."""
    script = tmp_path / "frozen.py"
    script.write_text(textwrap.dedent(FROZEN))
    with LocalCluster(1, 2, log_level="ERROR") as cluster, started(cluster, script, tmp_path) as process:
        wait_for(str(tmp_path), "held")
        wait_for(str(tmp_path), "timed")
        process.send_signal(signal.SIGSTOP)
        until(lambda: stopped(process.pid), "it stands still")
        over = time.monotonic() + 3.5  # longer than its lease and its timeout
        until(lambda: time.monotonic() > over, "its workers' lease is over, and the function's timeout")
        process.send_signal(signal.SIGCONT)
        note(str(tmp_path), "thawed")
        wait_for(str(tmp_path), "went on")
        note(str(tmp_path), "go on")
        assert process.wait(TIMEOUT) == 0
        assert wait_for(str(tmp_path), "result") == "True [1, 1, 1, 1]"


@pytest.mark.timeout(180)
def test_two_coordinators() -> None:
    """The second is refused and told of the first; after it takes over, requests from the first are refused."""
    with LocalCluster(2, 1, log_level="ERROR") as cluster:
        first = ParameterServerStrategy(cluster, job_name="job", ps_timeout=10)
        try:
            with first.scope():
                count = Variable(np.zeros(3), name="count")
            coordinator = ClusterCoordinator(first)
            coordinator.schedule(lambda: count.assign_add(np.ones(3))).fetch(timeout=TIMEOUT)
            with pytest.raises(BusyError, match=f"works for chief 0 .*pid {os.getpid()}.*take_over=True"):
                ParameterServerStrategy(cluster, job_name="job")
            with ParameterServerStrategy(cluster, job_name="job", take_over=True) as second:
                assert second.resumed
                with pytest.raises(StaleError, match="another coordinator took it over"):
                    count.assign_add(np.ones(3))
                with second.scope():
                    mine = Variable(np.full(3, 9.0), name="count")
                assert mine.numpy().tolist() == [1, 1, 1]
                until(lambda: refused(coordinator), "the first has noticed")
                with pytest.raises(StaleError, match="another coordinator took it over"):
                    count.assign_add(np.ones(3))
                done = ClusterCoordinator(second).schedule(lambda: mine.assign_add(np.ones(3)))
                done.fetch(timeout=TIMEOUT)
                assert mine.numpy().tolist() == [2, 2, 2]
        finally:
            first.close()


def refused(coordinator: ClusterCoordinator) -> bool:
    """Whether it has been told that another coordinator has its job."""
    try:
        coordinator.done()
    except PSUnavailableError:
        return True
    return False


def left_behind(cluster: LocalCluster, tmp_path: Path, body: str) -> None:
    """Have a coordinator create something, in the job named "job", and die."""
    path = tmp_path / "dies.py"
    path.write_text(
        textwrap.dedent(
            f"""
            import os, signal
            import numpy as np
            from pscluster.coordinator import ParameterServerStrategy, TFConfigClusterResolver, Variable, optimizers

            strategy = ParameterServerStrategy(TFConfigClusterResolver(), job_name="job")
            with strategy.scope():
                {body}
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    with started(cluster, path) as process:
        assert process.wait(TIMEOUT) == -signal.SIGKILL


@pytest.mark.timeout(180)
def test_what_is_not_what_it_was(tmp_path: Path) -> None:
    """Another shape or rule is an error that says what to do; another name, or resume=False, starts anew."""
    with LocalCluster(2, 1, log_level="ERROR") as cluster:
        body = "Variable(np.ones(3), name='w'); optimizers.Adam(0.5, name='rule')"
        left_behind(cluster, tmp_path, body)
        with ParameterServerStrategy(cluster, job_name="job") as strategy, strategy.scope():
            with pytest.raises(MisuseError, match=r"'w' is float64\[4\] here, but float64\[3\].*resume=False"):
                Variable(np.zeros(4), name="w")
            with pytest.raises(MisuseError, match=r"'rule' is sgd here, but adam.*resume=False"):
                optimizers.SGD(name="rule")
            new = Variable(np.zeros(2), name="new")
            assert new.numpy().tolist() == [0, 0]
            assert optimizers.Adam(0.1, name="rule").learning_rate == 0.5
            assert Variable(np.zeros(3), name="w").numpy().tolist() == [1, 1, 1]
        for options in ({"job_name": "another"}, {"job_name": "job", "resume": False}):
            left_behind(cluster, tmp_path, body)
            with ParameterServerStrategy(cluster, **options) as strategy, strategy.scope():
                assert not strategy.resumed
                assert Variable(np.zeros(4), name="w").numpy().tolist() == [0] * 4


@pytest.mark.timeout(180)
def test_a_server_that_dies_before_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has lost its part since it was asked what it holds is named, and the job does not continue."""
    with LocalCluster(2, 1, log_level="ERROR", durability="none") as cluster:

        def late(request: node_pb2.AttachRequest, hellos: Sequence[node_pb2.HelloReply]) -> list[int]:
            cluster.wait_restarted("ps", 1, cluster.kill("ps", 1, timeout=TIMEOUT), timeout=TIMEOUT)
            return continue_job(request, hellos)

        left_behind(cluster, tmp_path, "Variable(np.ones(3), name='w')")
        with monkeypatch.context() as patch:
            patch.setattr(attach, "continue_job", late)
            with pytest.raises(PSUnavailableError, match="has lost its shards of all variables: start a new"):
                ParameterServerStrategy(cluster, job_name="job")
        with ParameterServerStrategy(cluster, job_name="job") as strategy, strategy.scope():
            assert not strategy.resumed
            assert Variable(np.zeros(3), name="w").numpy().tolist() == [0] * 3


def test_progress_is_json(tmp_path: Path) -> None:
    """Values that are not JSON, or too large, are refused; others come back, with NumPy's numbers as Python's."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, ParameterServerStrategy(cluster) as strategy:
        assert strategy.progress == {}
        strategy.save_progress(
            epoch=np.int64(3), order=np.arange(3), state=np.random.default_rng(1).bit_generator.state
        )
        assert strategy.progress["epoch"] == 3
        assert strategy.progress["order"] == [0, 1, 2]
        assert strategy.progress["state"] == np.random.default_rng(1).bit_generator.state
        with pytest.raises(MisuseError, match="Path is not a JSON type"):
            strategy.save_progress(path=tmp_path)
        with pytest.raises(MisuseError, match="at most 65,536 fit"):
            strategy.save_progress(much="x" * (64 << 10))
        assert strategy.progress["epoch"] == 3
    note(str(tmp_path), "end")
