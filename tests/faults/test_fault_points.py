"""A role dies at each named point, once: the job ends, and the numbers are exact.

Besides durability "log", under which no acknowledged update is lost, the points of updates and of saving are tried
under "snapshot": there the only missing updates are those reported as lost, and those in flight.
"""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tests.faults.armed import CUT, Armed, Round, armed_cluster
from tests.faults.arming.faults import FaultInterceptor, Faults, arm, environment, parse
from tests.faults.test_moves import POINTS_OF_MOVES
from tests.faults.test_resharding import POINTS_OF_RESHARDING
from tests.roles.processes import make_cluster, run, tf_config
from tests.roles.test_returning_servers import MOVING
from tests.waiting import TIMEOUT

from pscluster.coordinator.api import FixedShardsPartitioner, ParameterServerStrategy
from pscluster.core import fault_points
from pscluster.core.errors import ConfigurationError
from pscluster.core.fault_points import POINTS

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_table_and_the_code_agree() -> None:
    """Every point in the table is reached somewhere, and every point that is reached is in the table."""
    reached = {
        name
        for folder in ("core", "ps", "worker", "coordinator")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r'\breach\("([^"]*)"\)', path.read_text())
    }
    assert reached == POINTS.keys()


def test_nothing_is_armed() -> None:
    """Without the variables nothing is armed, and nothing happens at a point."""
    arm({"TF_CONFIG": "{}"})
    assert fault_points.on_reach is None
    fault_points.reach("ps.log.after")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ps.log.after", "'ps.log.after', which is no fault; write .*, or take the variable away"),
        ("ps.log.after=kill@0", "which is no fault"),
        ("ps.log.after=kill:1.2.3", "'1.2.3' where seconds belong"),
        ("ps.log.behind=kill", "names the point 'ps.log.behind', which does not exist; pscluster.core.fault_points"),
        ("ps.log.after=lose_request", "'lose_request' at ps.log.after; give one of kill, stop, delay, abort"),
        ("rpc:/pscluster.v1.Node/Attach=kill", "give one of lose_request, lose_response, duplicate, delay, twice"),
        ("rpc:/pscluster.v1.Node/Detach=delay", "names the call '/pscluster.v1.Node/Detach'; there are /grpc.health"),
        ("message:/pscluster.v1.Node/Hello=delay", "there are .*/pscluster.v1.Worker/Steps"),
    ],
)
def test_what_is_no_fault(text: str, sentence: str) -> None:
    """A malformed value is an error that names it, the valid ones, and what to do."""
    with pytest.raises(ConfigurationError, match=f"PSCLUSTER_FAULTS (has|names) .*{sentence}|{sentence}"):
        Faults("ps", text, "")


def test_a_role_dies_as_the_environment_says() -> None:
    """A role is killed where the variable says, and does not start with a malformed one."""
    config = tf_config(make_cluster(), "ps")
    code, output = run("ps", "--durability", "none", config=config, **environment(text="ps.log.behind=kill"))
    assert code == 1
    assert "PSCLUSTER_FAULTS names the point 'ps.log.behind', which does not exist" in output
    code, output = run("ps", "--durability", "none", config=config, **environment(text="ps/ps.restore.before=kill@1"))
    assert code == -signal.SIGKILL, output


def test_a_message_that_is_read_behind_its_streams_end(tmp_path: Path) -> None:
    """A handler's thread may read on after its answers have ended, and then does not wait for an answer forever."""
    path = "/pscluster.v1.Worker/Steps"
    fault = f"message:{path}=lose_response@2"
    armed = Faults("worker", fault, str(tmp_path))
    read: list[Iterator[bytes]] = []

    def steps(requests: Iterator[bytes], _context: object) -> Iterator[bytes]:
        read.append(requests)
        yield next(requests)

    handler: Any = grpc.stream_stream_rpc_method_handler(steps)
    intercepted: Any = FaultInterceptor(armed).intercept_service(lambda _: handler, SimpleNamespace(method=path))
    assert list(intercepted.stream_stream(iter([b"first", b"second"]), object())) == [b"first"]
    assert next(read[0]) == b"second"
    assert (tmp_path / f"ended-{parse(fault)[0].name}").read_text().startswith("the stream ended")


def test_counts_and_marks(tmp_path: Path) -> None:
    """A fault strikes at the n-th time only; with a directory once among all processes, and again when armed again."""
    alone = Faults("ps", "ps.log.after=delay:0@2;worker/ps.log.before=abort", "")
    assert [alone.due("ps.log.after") is not None for _ in range(4)] == [False, True, False, False]
    assert alone.due("ps.log.before") is None, "it is another role's"
    first, second = (Faults("ps", "", str(tmp_path)) for _ in range(2))
    (tmp_path / "armed").write_text("ps.log.after=delay:0@2")
    assert [faults.due("ps.log.after") is not None for faults in (first, second, second, first)] == [
        False,
        False,
        True,
        False,
    ]
    assert parse((tmp_path / "armed").read_text())[0].nth == 2


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Armed]]:
    """Clusters by durability, created on first use; roles that die are restarted."""

    class Made(dict[str, Armed]):
        def __missing__(self, durability: str) -> Armed:
            folder = tmp_path_factory.mktemp(durability)
            self[durability] = stack.enter_context(armed_cluster(folder, 2, 2, durability=durability, revive=True))
            return self[durability]

    with ExitStack() as stack:
        yield Made()


UPDATE = (
    "ps.update.before",
    "ps.update.after",
    "ps.ledger.after",
    "ps.log.before",
    "ps.log.written",
    "ps.log.after",
    "ps.acknowledge.before",
    "ps.answer.after",
)
SAVING = (
    "ps.segment.before",
    "ps.segment.after",
    "ps.generation.before",
    "ps.manifest.before",
    "ps.manifest.after",
    "ps.generation.after",
)

# The fault, the parts of a job that lead to it, and what must strike before.
DEATHS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    **{point: (f"ps/{point}=kill@30", (), ()) for point in UPDATE},
    **{point: (f"ps/{point}=kill@7", ("saving",), ()) for point in SAVING},
    "node.attach.before": ("ps/node.attach.before=kill@1", (), ()),
    "node.attach.after": ("ps/node.attach.after=kill@1", (), ()),
    "node.end.before": ("ps/node.end.before=kill@1", ("end",), ()),
    "node.end.after": ("ps/node.end.after=kill@1", ("end",), ()),
    "ps.create.before": ("ps/ps.create.before=kill@2", (), ()),
    "ps.create.after": ("ps/ps.create.after=kill@4", (), ()),
    "ps.create.saved": ("ps/ps.create.saved=kill@3", (), ()),
    "ps.delete.after": ("ps/ps.delete.after=kill@1", ("directory",), ()),
    "ps.clear.before": ("ps/ps.clear.before=kill@1", ("end",), ()),
    "ps.clear.after": ("ps/ps.clear.after=kill@1", ("end",), ()),
    "ps.losses.before": ("ps/ps.losses.before=kill@1", ("snapshot",), ("ps/ps.update.before=kill@60",)),
    "ps.losses.after": ("ps/ps.losses.after=kill@1", ("snapshot",), ("ps/ps.update.before=kill@60",)),
    "ps.stop.before": ("ps/ps.stop.before=kill@1", ("stop",), ()),
    "ps.restore.before": ("ps/ps.restore.before=kill@1", (), ("ps/ps.update.after=kill@20",)),
    "ps.restore.after": ("ps/ps.restore.after=kill@1", (), ("ps/ps.update.after=kill@20",)),
    "ps.incarnation.before": ("ps/ps.incarnation.before=kill@1", (), (CUT,)),
    "ps.incarnation.after": ("ps/ps.incarnation.after=kill@1", (), (CUT,)),
    "ps.finish.after": ("ps/ps.finish.after=kill@1", ("finish",), ()),
    "ps.mark.after": ("ps/ps.mark.after=kill@1", ("checkpoint",), ()),
    "ps.part.before": ("ps/ps.part.before=kill@1", ("checkpoint",), ()),
    "ps.part.after": ("ps/ps.part.after=kill@1", ("checkpoint",), ()),
    "ps.stage.after": ("ps/ps.stage.after=kill@1", ("checkpoint",), ()),
    "ps.commit.after": ("ps/ps.commit.after=kill@1", ("checkpoint",), ()),
    "ps.commit.saved": ("ps/ps.commit.saved=kill@1", ("checkpoint",), ()),
    **{
        f"ps.{act}.{when}": (f"ps/ps.{act}.{when}=kill@3", ("steps",), ())
        for act in ("stage_step", "step")
        for when in ("before", "after")
    },
    "client.step.reduced": ("worker/client.step.reduced=kill@5", ("steps",), ()),
    "client.step.staged": ("worker/client.step.staged=kill@5", ("steps",), ()),
    "client.tick.before": ("worker/client.tick.before=kill@5", ("bounded",), ()),
    "client.tick.after": ("worker/client.tick.after=kill@5", ("bounded",), ()),
    "client.update.before": ("worker/client.update.before=kill@20", (), ()),
    "client.exchange.after": ("worker/client.exchange.after=kill@20", (), ()),
    "client.update.after": ("worker/client.update.after=kill@20", (), ()),
    "worker.define.after": ("worker/worker.define.after=kill@2", ("beside",), ()),
    "worker.run.before": ("worker/worker.run.before=kill@5", (), ()),
    "worker.run.after": ("worker/worker.run.after=kill@5", (), ()),
    "worker.result.before": ("worker/worker.result.before=kill@3", (), ()),
    "worker.result.after": ("worker/worker.result.after=kill@3", (), ()),
    "worker.download.after": ("worker/worker.download.after=kill@1", ("beside",), ()),
    "worker.exchange.before": ("worker/worker.exchange.before=kill@2", ("arrays",), ()),
    "worker.exchange.after": ("worker/worker.exchange.after=kill@2", ("arrays",), ()),
    "worker.recall.after": ("worker/worker.recall.after=kill@1", ("recall", "checkpoint"), ()),
    "worker.answer.after": ("worker/worker.answer.after=kill@2", ("questions",), ()),
    "worker.stop.before": ("worker/worker.stop.before=kill@1", ("stop",), ()),
    "worker.stop.after": ("worker/worker.stop.after=kill@1", ("stop",), ()),
}
CASES = [
    *(pytest.param(point, "log", *how, id=point) for point, how in DEATHS.items() if "snapshot" not in how[1]),
    *(
        pytest.param(point, "snapshot", *how, id=f"{point}-snapshot")
        for point, how in DEATHS.items()
        if "snapshot" in how[1] or (point in UPDATE + SAVING and ".log." not in point and ".segment." not in point)
    ),
    pytest.param("node.attach.before", "log", "worker/node.attach.before=kill@1", (), (), id="worker-attach-before"),
    pytest.param("node.attach.after", "log", "worker/node.attach.after=kill@1", (), (), id="worker-attach-after"),
    pytest.param("node.end.after", "log", "worker/node.end.after=kill@1", ("end",), (), id="worker-end-after"),
]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("point", "durability", "fault", "parts", "before"), CASES)
def test_a_death_at_a_point(
    clusters: dict[str, Armed],
    point: str,
    durability: str,
    fault: str,
    parts: tuple[str, ...],
    before: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """A server or a worker is killed there; everything continues once it is back, and each function has counted
    once."""
    assert point in fault
    armed = clusters[durability]
    for again in range(1 + ("end" in parts)):
        armed.arm(*([fault, *before] if not again else []))
        with ParameterServerStrategy(
            armed.cluster, FixedShardsPartitioner(2), ps_timeout=TIMEOUT, connect_timeout=TIMEOUT
        ) as strategy:
            job = Round(armed, fault, strategy, tmp_path)
            job.run(*parts, exact=durability == "log")
            if "end" not in parts:
                armed.until_struck(fault, *before, calls=False)
        if not again:
            armed.until_struck(fault, *before, calls=False)
            armed.until_all_live()


SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        CheckpointManager, ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, TFConfigClusterResolver,
        Variable, metrics,
    )
    from tests.faults.steps import note, wait_for

    folder, total = sys.argv[1], 9
    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        dense = Variable(np.zeros((4, 2)), name="dense")
        other = Variable(np.zeros((6,)), name="other")
    coordinator = ClusterCoordinator(strategy)
    manager = CheckpointManager(folder + "/checkpoints", strategy=strategy, max_to_keep=1)

    def step(number):
        dense.assign_add(np.ones((4, 2)))
        other.assign_add(np.ones(6))
        return number

    begin = strategy.progress.get("done", 0)
    dense.assign(np.full((4, 2), float(begin)))  # what a function of the one before had applied is taken back
    other.assign(np.full(6, float(begin)))
    for done in range(begin, total, 3):
        values = [coordinator.schedule(step, args=(done + each,)) for each in range(3)]
        assert coordinator.fetch(values) == [done, done + 1, done + 2]
        coordinator.join()
        strategy.save_progress(done=done + 3)
        manager.save()
    data = coordinator.distribute_dataset(np.arange(8))
    found = coordinator.evaluate(
        lambda number: (number * dense.numpy(),), data, [metrics.Mean()], shards=2, concurrent=True
    )
    assert found == {"mean": 3.5 * total}, found
    known = {spec.name for each in strategy.client.directory() for spec in each.variables}
    assert known == {"dense", "other"}, known
    if sys.argv[2] == "coordinator.finish.before" and not strategy.resumed:
        wait_for(folder, "never")  # servers are told a moment later
    dense.assign(np.zeros((4, 2)))
    if begin < total:
        manager.restore()
    else:
        dense.assign(np.full((4, 2), float(total)))
    manager.finish()
    manager.close()
    note(folder, "result", " ".join(map(str, sorted({*dense.numpy().reshape(-1), *other.numpy().reshape(-1)}))))
"""

_IN_ONE_JOB = (
    ("coordinator.attach.first", "coordinator.create.before", "coordinator.send.before", "coordinator.mark.after"),
    ("coordinator.attach.after", "coordinator.create.after", "coordinator.send.after", "coordinator.parts.after"),
    ("coordinator.outcome.before", "coordinator.progress.before", "coordinator.index.before", "coordinator.pin.before"),
    ("coordinator.outcome.after", "coordinator.progress.after", "coordinator.index.after", "coordinator.pin.after"),
    ("coordinator.remove.before", "coordinator.stage.after", "coordinator.end.before"),
    ("coordinator.remove.after", "coordinator.commit.after", "coordinator.end.after"),
    ("coordinator.unpin.before", "coordinator.finished.before"),
    ("coordinator.unpin.after", "coordinator.finished.after"),
)
"""The script comes to these one after the other, and dies at each, once."""

_SECOND = ("coordinator.create.before", "coordinator.send.before", "coordinator.send.after")

OF_THE_COORDINATOR: dict[tuple[str, ...], list[str]] = {
    **{points: [f"chief/{point}=kill@{1 + (point in _SECOND)}" for point in points] for points in _IN_ONE_JOB},
    ("coordinator.finish.before",): ["chief/coordinator.finish.before=kill@1"],
    ("coordinator.close.before",): ["chief/coordinator.close.before=kill@1", CUT],
    ("coordinator.close.after",): ["chief/coordinator.close.after=kill@1", CUT],
    ("coordinator.retry.after",): ["chief/coordinator.retry.after=kill@1", CUT],
    ("ps.takeover.before",): ["ps/ps.takeover.before=kill@1", "chief/coordinator.progress.before=kill@2"],
    ("ps.takeover.after",): ["ps/ps.takeover.after=kill@1", "chief/coordinator.progress.after=kill@2"],
    ("client.update.before", "client.exchange.after", "client.update.after"): [
        f"chief/{point}=kill@3" for point in ("client.update.before", "client.exchange.after", "client.update.after")
    ],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("points", OF_THE_COORDINATOR, ids="+".join)
def test_deaths_of_the_coordinator(clusters: dict[str, Armed], points: tuple[str, ...], tmp_path: Path) -> None:
    """A script killed there is restarted until it ends, and then finds everything as if nothing had happened."""
    faults = OF_THE_COORDINATOR[points]
    armed = clusters["log"]
    armed.arm(*faults)
    codes = armed.run_until_it_ends(SCRIPT, tmp_path, points[0], most=2 + len(points))
    assert codes[-1] == 0, codes
    armed.until_struck(*faults, calls=False)
    assert (tmp_path / "result").read_text() == "9.0"


def test_no_point_is_forgotten() -> None:
    """Every point has a test of a death there."""
    elsewhere = {*MOVING, *POINTS_OF_MOVES, *POINTS_OF_RESHARDING}
    assert DEATHS.keys() | set(itertools.chain(*OF_THE_COORDINATOR)) | elsewhere == POINTS.keys()
