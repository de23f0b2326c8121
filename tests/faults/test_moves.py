"""Shards that move between servers while functions update them: nothing is lost, nothing is applied twice.

Each fault strikes once amid a move, which is then done or undone. Expected values are those of plain NumPy.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.faults.armed import Armed, armed_cluster
from tests.faults.arming.faults import CALL_KINDS
from tests.faults.counting import Counting
from tests.faults.support import status
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import (
    Checkpoint,
    ClusterCoordinator,
    FixedShardsPartitioner,
    HashPartitioner,
    IndexedSlices,
    LocalCluster,
    ModuloPartitioner,
    ParameterServerStrategy,
    Partitioner,
    SynchronousStrategy,
    Variable,
    optimizers,
    replica_context,
)
from pscluster.coordinator.job.live_job import continue_job
from pscluster.coordinator.moves.balance import PlannedMove
from pscluster.coordinator.moves.mover import Moved
from pscluster.core.errors import BusyError, ConfigurationError, MisuseError, PsClusterError, UnavailableError
from pscluster.ps.client.synchronous.reduction import REDUCED_BYTES
from pscluster.v1 import node_pb2

SERVER = "ps/rpc:/pscluster.v1.ParameterServer"
DEATHS = {
    "ps.freeze.after": "ps/ps.freeze.after=kill@1",  # the source
    "ps.adopt.before": "ps/ps.adopt.before=kill@1",  # the target
    "ps.adopt.saved": "ps/ps.adopt.saved=kill@1",
    "ps.place.after": "ps/ps.place.after=kill@1",  # the source
}
CHIEF_DEATHS = (
    "coordinator.freeze.before",
    "coordinator.commit_move.before",
    "coordinator.commit_move.after",
    "coordinator.serve.before",
    "coordinator.serve.after",
)
POINTS_OF_MOVES = (*DEATHS, *CHIEF_DEATHS)


class Job:
    """Functions that add to variables, and train one with momentum, on a cluster."""

    def __init__(self, cluster: LocalCluster, strategy: ParameterServerStrategy) -> None:
        self.cluster, self.strategy = cluster, strategy
        self.counting = Counting(strategy)
        with strategy.scope():
            self.weights = Variable(np.zeros((6, 400), np.float32), name="weights")
            self.momentum = optimizers.SGD(0.5, momentum=0.5, name="momentum")
        self.coordinator = ClusterCoordinator(strategy)
        self.done = 0
        self.undone: list[str] = []  # moves that were, and why
        count, weights, momentum = self.counting.step(), self.weights, self.momentum

        def step(index: int) -> int:
            momentum.apply_gradients([(np.ones(weights.shape, np.float32), weights)])
            assert np.isfinite(weights[1:3]).all()
            result: int = count(index)
            return result

        self.step = step

    def schedule(self, count: int) -> list[Any]:
        self.done += count
        return [self.coordinator.schedule(self.step, args=(index,)) for index in range(count)]

    def move_all(self) -> None:
        """Move a shard of each variable to the other server; again, if a move is undone."""
        for variable in (*self.counting.all, self.weights):
            shard = variable.variables[0]
            for _ in range(3):
                target = 1 - variable.owners[0]
                try:
                    self.strategy.move_shard(shard, target)
                except PsClusterError as error:
                    assert variable.owners[0] == 1 - target
                    self.undone.append(str(error))
                else:
                    assert variable.owners[0] == target
                    break
            else:
                raise AssertionError(self.undone)

    def check(self, *others: Variable) -> None:
        """All functions have counted once on every element, and each shard, also of others, is on one server."""
        self.coordinator.join(TIMEOUT)
        assert self.counting.one_count() == self.counting.sgd.iterations == self.momentum.iterations == self.done
        velocity = weights = np.float32(0)
        for _ in range(self.done):
            velocity = velocity * np.float32(0.5) - np.float32(0.5)
            weights += velocity
        np.testing.assert_allclose(self.weights.numpy(), np.full(self.weights.shape, weights), rtol=1e-6)
        assert self.strategy.lost_updates() == {}
        held = sum(reply.variables for reply in self.strategy.client.statuses())
        assert held == sum(variable.num_shards for variable in (*self.counting.all, self.weights, *others))


@contextmanager
def job_on(cluster: LocalCluster) -> Iterator[Job]:
    with ParameterServerStrategy(cluster, FixedShardsPartitioner(2), ps_timeout=TIMEOUT) as strategy:
        yield Job(cluster, strategy)


@pytest.fixture(scope="module")
def armed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Armed]:
    """Two servers with logs and two workers; whatever dies is restarted."""
    with armed_cluster(tmp_path_factory.mktemp("moves"), 2, 2, durability="log", revive=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def job(armed: Armed) -> Iterator[Job]:
    with job_on(armed.cluster) as job:
        yield job


@pytest.mark.timeout(120)
@pytest.mark.parametrize("point", DEATHS)
def test_a_server_dies_amid_a_move(armed: Armed, job: Job, point: str) -> None:
    """It is restarted, and has what it should; the move is done, or can be made again."""
    job.undone.clear()
    armed.arm(DEATHS[point])
    job.schedule(40)
    job.move_all()
    armed.until_struck(DEATHS[point], calls=False)
    job.check()
    assert (len(job.undone) == 1) is (point in ("ps.freeze.after", "ps.adopt.before")), job.undone


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", CALL_KINDS)
def test_a_fault_at_a_step_of_a_move(armed: Armed, job: Job, kind: str) -> None:
    """A request or its answer is lost, late, or arrives twice, at each of the steps."""
    job.undone.clear()
    # Of either server: track, stage, freeze, commit, place ...; and the pages.
    faults = [f"{SERVER}/Move={kind}@{nth}" for nth in range(1, 7)]
    for fault in (*faults, f"{SERVER}/Pull={kind}@1", f"{SERVER}/Push={kind}@1"):
        armed.arm(fault)
        job.schedule(10)
        job.move_all()
        armed.until_struck(fault)
    job.check()
    assert bool(job.undone) is kind.startswith("lose"), job.undone


SCRIPT = """
    import sys
    import numpy as np
    from pscluster.coordinator import (
        ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy, TFConfigClusterResolver, Variable,
        optimizers,
    )
    from tests.faults.steps import note

    strategy = ParameterServerStrategy(TFConfigClusterResolver(), FixedShardsPartitioner(2))
    with strategy.scope():
        count = Variable(np.zeros((4, 2)), name="count")
        trained = Variable(np.zeros(4, np.float32), name="trained")
        adagrad = optimizers.Adagrad(1.0, initial_accumulator_value=0.0, name="adagrad")
    coordinator = ClusterCoordinator(strategy)

    def step():
        count.assign_add(np.ones((4, 2)))
        adagrad.apply_gradients([(np.ones(4, np.float32), trained)])
        return count.numpy()

    begin = strategy.progress.get("done", 0)
    for done in range(begin, 8):
        for variable in (count, trained):
            for shard in variable.variables:
                assert strategy.move_shard(shard, 1 - shard.owners[0]) is not None
        assert (coordinator.schedule(step).fetch() == done + 1).all()
        strategy.save_progress(done=done + 1)
    expected = -np.sum(1 / np.sqrt(np.arange(1, 9)))
    np.testing.assert_allclose(trained.numpy(), np.full(4, expected), rtol=1e-5)
    held = [each.variables for each in strategy.client.statuses()]
    note(sys.argv[1], "result", f"{np.unique(count.numpy()).tolist()} {adagrad.iterations} {sum(held)}")
"""


@pytest.mark.timeout(180)
def test_the_coordinator_dies_amid_moves(tmp_path: Path) -> None:
    """At each point, once: the script that goes on finds each shard on one server, as it was."""
    faults = [f"chief/{point}=kill@2" for point in CHIEF_DEATHS]
    with armed_cluster(tmp_path / "cluster", 2, 2, durability="log", revive=True) as armed:
        armed.arm(*faults)
        codes = armed.run_until_it_ends(SCRIPT, tmp_path, most=2 + len(faults))
        assert codes == [-signal.SIGKILL] * len(faults) + [0]
        armed.until_struck(*faults, calls=False)
        assert (tmp_path / "result").read_text() == "[8.0] 8 4"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["log", "snapshot", "none"])
def test_moves_while_training(tmp_path: Path, durability: str) -> None:
    """With checkpoints and evaluations meanwhile; after it all servers restart, or a checkpoint is restored."""
    with (
        LocalCluster(2, 2, durability=durability, restart=False, log_level="ERROR") as cluster,
        job_on(cluster) as job,
        ExitStack() as stack,
    ):
        job.schedule(20)
        job.move_all()
        over = threading.Event()
        seen: list[int] = []

        def read() -> None:
            while not over.is_set():
                seen.append(max(job.counting.counts()["dense"]))

        reader = threading.Thread(target=read)
        reader.start()
        stack.callback(reader.join)
        stack.callback(over.set)
        job.schedule(60)
        job.move_all()
        Checkpoint(job.strategy).write(str(tmp_path / "first"))
        job.move_all()
        over.set()
        reader.join()
        assert seen == sorted(seen)
        job.check()
        if durability != "none":
            for index in range(2):
                cluster.kill("ps", index, signal.SIGKILL if durability == "log" else signal.SIGTERM)
                cluster.restart("ps", index)
        job.check()
        job.schedule(10)
        job.move_all()
        job.check()
        Checkpoint(job.strategy).read(str(tmp_path / "first"))
        job.done = job.counting.one_count()
        job.check()
        assert job.done <= 80


@pytest.mark.timeout(120)
@pytest.mark.parametrize("staleness", [0, 1])
def test_replicas_that_step_together(staleness: int, tmp_path: Path) -> None:
    """Between two functions their shards move; single, joint and reduced steps go on, each counted once."""
    with (
        LocalCluster(2, 2, durability="log", restart=False, log_level="ERROR") as cluster,
        SynchronousStrategy(cluster, FixedShardsPartitioner(2), staleness=staleness, ps_timeout=TIMEOUT) as strategy,
    ):
        with strategy.scope():
            small = Variable(np.zeros(4), name="small")
            large = Variable(np.zeros(3 * REDUCED_BYTES // 8), name="large")  # its gradient is reduced by the workers
            sgd = optimizers.SGD(1.0, name="sgd")
            momentum = optimizers.SGD(1.0, momentum=0.5, name="momentum")

        def dense() -> None:  # such steps are taken together, on copies
            momentum.apply_gradients([(np.full(4, 0.5 + replica_context().replica_id), small)])

        def step() -> None:
            small.numpy()
            sgd.apply_gradients([(np.full(large.shape, 1.0 + replica_context().replica_id), large)])

        def move_all() -> None:
            for shard in (*small.variables, *large.variables):
                moved = strategy.move_shard(shard, 1 - shard.owners[0])
                assert moved is not None

        def come_and_go() -> None:
            index = strategy.add_server()
            there = [strategy.move_shard(shard, index) for shard in (*small.variables, large.variables[0])]
            assert all(there)
            arrived.set()
            rounds_with_three.wait(TIMEOUT)
            strategy.remove_server()

        arrived, rounds_with_three = threading.Event(), threading.Event()
        expected, velocity = 0.0, 0.0

        def take_dense() -> None:
            nonlocal expected, velocity
            strategy.run(dense, steps=5)
            for _ in range(5):
                velocity = 0.5 * velocity - 2.0
                expected += velocity

        for round_number in range(1, 4):
            if not staleness:
                take_dense()
            thread = threading.Thread(target=move_all if round_number != 2 else come_and_go)
            thread.start()
            for number in range(4):
                strategy.run(step, steps=2)
                if round_number == 2 and number == 1:
                    assert arrived.wait(TIMEOUT)
                    if not staleness:
                        take_dense()
            rounds_with_three.set()
            thread.join()
            np.testing.assert_allclose(small.numpy(), np.full(4, expected), rtol=1e-6)
            assert (large.numpy() == -3.0 * 8 * round_number).all()
        Checkpoint(strategy).write(str(tmp_path / "checkpoint"))
        for index in range(2):
            cluster.kill("ps", index)
            cluster.restart("ps", index)
        strategy.run(step, steps=2)
        assert (large.numpy() == -3.0 * 26).all()
        assert strategy.client.num_servers == 2


def test_servers_are_balanced() -> None:
    """By bytes, and by what is read and updated, while functions run; and then it stays so."""
    with (
        LocalCluster(2, 2, durability="none", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, placement=lambda *_: 0) as strategy,
    ):
        with strategy.scope():
            same = [Variable(np.zeros(1000, np.float32), name=f"same-{index}") for index in range(6)]
        coordinator = ClusterCoordinator(strategy)

        def step() -> None:
            for variable in same[:2]:
                variable.assign_add(np.ones(1000, np.float32))

        for _ in range(100):
            coordinator.schedule(step)
        moved = strategy.rebalance()
        assert [(each.source, each.target) for each in moved] == [(0, 1)] * 3
        assert strategy.rebalance() == []
        coordinator.join(TIMEOUT)
        for variable in same:
            strategy.move_shard(variable, 0)
        for _ in range(100):
            coordinator.schedule(step)
        coordinator.join(TIMEOUT)
        (hot,) = strategy.rebalance(by="load")
        assert hot.shard in ("same-0", "same-1")
        assert [set(variable.numpy().tolist()) for variable in same] == [{200.0}] * 2 + [{0.0}] * 4
        assert strategy.plan().moves == (), "the counts went along"
        for call in (strategy.rebalance, strategy.plan):
            with pytest.raises(ValueError, match="by is 'luck'; it must be 'bytes' or 'load'"):
                call(by="luck")  # type: ignore[arg-type]


@pytest.mark.parametrize("partitioner", [HashPartitioner, ModuloPartitioner])
def test_a_table_with_skewed_ids_is_planned_and_balanced(partitioner: Callable[[int], Partitioner]) -> None:
    """Its shards are measured one by one; no server then carries more than 1.3 times the mean.

    A plan that no longer fits is refused.
    """
    rng, rows = np.random.default_rng(3), 20_000
    chances = np.arange(1, rows + 1) ** -1.1
    with (
        LocalCluster(3, 1, durability="none", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, placement=lambda shard, _: min(shard.ordinal // 12, 2)) as strategy,
    ):
        with strategy.scope():
            table = Variable(np.zeros((rows, 8), np.float32), name="t", partitioner=partitioner(24))
            gone = Variable(np.zeros(4, np.float32), name="gone")
        expected = np.zeros(rows)

        def use() -> npt.NDArray[np.float64]:
            """Use the table for a while; return the bytes that each server sent and received."""
            before = strategy.client.statuses()
            for _ in range(30):
                ids = rng.choice(rows, 1024, p=chances / chances.sum())
                table.gather(ids)
                table.scatter_add(IndexedSlices(np.ones((len(ids), 8), np.float32), ids))
                np.add.at(expected, ids, 1)
            return np.array(
                [
                    now.bytes_in + now.bytes_out - then.bytes_in - then.bytes_out
                    for now, then in zip(strategy.client.statuses(), before, strict=True)
                ]
            )

        before = use()
        assert before.max() > 1.3 * before.mean()
        plan = strategy.plan()
        np.testing.assert_allclose(np.array(plan.before) / sum(plan.before), before / before.sum(), atol=0.1)
        assert plan.moves
        assert plan.peak <= 1.3
        moved = strategy.apply(plan).moves
        assert [(each.shard, each.source, each.target) for each in moved] == [
            (f"t/part_{move.shard}", move.source, move.target) for move in plan.moves
        ]
        after = use()
        assert after.max() <= 1.3 * after.mean()
        assert (table.numpy() == expected[:, None]).all()
        again = strategy.plan()
        assert again.peak <= 1.3
        with pytest.raises(MisuseError, match=r"the plan no longer fits: shard \d+ of 't' is now on ps \d,"):
            strategy.apply(plan)
        owners = table.owners
        (move, *_), index = plan.moves, gone.owners[0]
        stale = replace(
            plan, moves=(replace(move, source=move.target, target=0), PlannedMove("gone", 0, index, 0, 1.0))
        )
        strategy.delete_variable(gone)
        with pytest.raises(MisuseError, match="variable 'gone' was deleted; nothing was moved: make a new one"):
            strategy.apply(stale)
        with pytest.raises(MisuseError, match=r"ps 3 was removed, where shard .* was to go"):
            strategy.apply(replace(plan, moves=(replace(move, source=move.target, target=3),)))
        with pytest.raises(TypeError, match="apply takes a plan"):
            strategy.apply([])  # type: ignore[arg-type]
        assert table.owners == owners


def test_a_function_begins_while_a_server_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker looks up optimizers, which the new server has not been told of."""
    with LocalCluster(1, 1, log_level="ERROR") as cluster, job_on(cluster) as job:
        client, results = job.strategy.client, list[Any]()
        declare_all = client.declare_all

        def late(server: int) -> None:
            results.append(job.coordinator.fetch(job.schedule(1), TIMEOUT))
            declare_all(server)

        monkeypatch.setattr(client, "declare_all", late)
        assert job.strategy.add_server() == 1
        assert len(results) == 1
        job.check()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("durability", ["log", "none"])
def test_servers_come_and_go(durability: str, tmp_path: Path) -> None:
    """While functions run, with workers that are there before and after, and that die; all is on the servers left."""
    with (
        LocalCluster(1, 2, durability=durability, state_dir=tmp_path, log_level="ERROR") as cluster,
        job_on(cluster) as job,
    ):
        strategy = job.strategy
        job.schedule(20)
        assert [strategy.add_server(), strategy.add_server()] == [1, 2]
        moved = strategy.rebalance()
        assert {each.target for each in moved} == {1, 2}
        chief = status(cluster, "chief", 0)
        assert [server.index for server in chief.moved_servers] == [1, 2]
        ups = strategy.telemetry.snapshot()["server_up"]
        assert ups == {"0": 1, "1": 1, "2": 1}
        job.schedule(20)
        cluster.kill("worker", 0)
        with strategy.scope():
            later = Variable(np.zeros((3, 50_000)), name="later", partitioner=FixedShardsPartitioner(3))
        assert set(later.owners) == {0, 1, 2}
        value = job.coordinator.schedule(lambda: later.assign_add(np.ones(later.shape)).numpy().sum())
        assert value.fetch(TIMEOUT) == 150_000
        job.check(later)
        marked = Checkpoint(strategy).mark()
        job.schedule(40)
        gone = list[Moved]()
        removing = threading.Thread(target=lambda: gone.extend(strategy.remove_server()))
        removing.start()
        until(lambda: not any(2 in each.owners for each in (*job.counting.all, job.weights, later)), "all has moved")
        assert removing.is_alive(), "the checkpoint has yet to be written"
        marked.write(str(tmp_path / "checkpoint"))
        removing.join()
        assert {each.source for each in gone} == {2}
        assert ("ps", 2) not in cluster.pids
        job.check(later)
        if durability == "log":
            for index in range(2):
                cluster.kill("ps", index)
            job.check(later)
        job.schedule(10)
        frozen = cluster.pids["worker", 1]
        os.kill(frozen, signal.SIGSTOP)  # it learns late that a server is gone, and may be amid an update there
        removing = threading.Thread(target=strategy.remove_server)
        removing.start()
        try:
            until(lambda: strategy.client.num_servers == 1, "the server is removed")
        finally:
            os.kill(frozen, signal.SIGCONT)
        removing.join()
        job.check(later)
        assert strategy.client.num_servers == 1
        with pytest.raises(MisuseError, match="the only parameter server can't be removed"):
            strategy.remove_server()
        Checkpoint(strategy).read(str(tmp_path / "checkpoint"))
        job.done = 40
        job.check(later)
        assert strategy.add_server() == 1
        assert status(cluster, "chief", 0).num_servers == 2
        cluster.kill("worker", 0)  # its TF_CONFIG may name the first server of that index
        job.schedule(10)
        strategy.rebalance()
        job.check(later)


def test_which_servers_can_be_added(tmp_path: Path) -> None:
    """One that answers and has no job; otherwise all is as it was. The next coordinator must list it."""
    with (
        LocalCluster(1, 1, durability="none", log_level="ERROR", transport="tcp") as cluster,
        LocalCluster(2, 1, durability="none", log_level="ERROR", transport="tcp", token=cluster.token) as others,
        ParameterServerStrategy(cluster) as strategy,
    ):
        other = others.cluster_spec().task_address("ps", 1)
        with ParameterServerStrategy(others), pytest.raises(BusyError, match=r"ps 1 at .* already holds a job"):
            strategy.add_server(other)
        with pytest.raises(UnavailableError, match=r"ps 1 at 127\.0\.0\.1:1"):
            strategy.add_server("127.0.0.1:1", timeout=0.1)
        with pytest.raises(ValueError, match="address"):
            strategy.add_server("nowhere")
        assert strategy.client.num_servers == 1
        assert strategy.add_server(other) == 1
        with strategy.scope():
            there = [Variable(np.zeros(3), name=f"v{index}") for index in range(2)]
        assert {variable.owners for variable in there} == {(0,), (1,)}
        (hello, _) = strategy.client.introductions()
        request = node_pb2.AttachRequest(job_name="a job")
        with pytest.raises(ConfigurationError, match=r"now has 2 parameter servers, and .* lists 1: list all"):
            continue_job(request, [node_pb2.HelloReply(job_id=1, job_name="a job", num_servers=2)])
        assert hello.num_servers == 2
        (moved,) = strategy.remove_server()
        assert (moved.source, moved.target) == (1, 0)
        until(lambda: not status(others, "ps", 1).variables, "it has nothing any more")
    del tmp_path


def test_what_can_not_be_moved(tmp_path: Path) -> None:
    """It is said by name, and nothing moves."""
    del tmp_path
    with (
        LocalCluster(2, 1, durability="none", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, FixedShardsPartitioner(2)) as strategy,
    ):
        with strategy.scope():
            cut = Variable(np.zeros((4, 2)), name="cut")
            whole = Variable(np.zeros(()), name="whole")
        with pytest.raises(ConfigurationError, match="there is no ps 2 to move 'whole' to: there are 2"):
            strategy.move_shard(whole, 2)
        with pytest.raises(ValueError, match="server"):
            strategy.move_shard(whole, -1)
        with pytest.raises(MisuseError, match="'cut' has 2 shards: name one of"):
            strategy.move_shard(cut, 0)
        with pytest.raises(TypeError, match="not a str"):
            strategy.move_shard("cut", 0)  # type: ignore[arg-type]
        assert strategy.move_shard(whole, whole.owners[0]) is None
        strategy.delete_variable(whole)
        with pytest.raises(PsClusterError, match="there is no variable 'whole'"):
            strategy.move_shard(whole, 1 - whole.owners[0])
        until(lambda: cut.owners == (0, 1), "nothing has moved")


def test_shards_in_other_orders_of_rows() -> None:
    """Shards move with their rows, and a server that returns has them from its log."""
    cuts = [ModuloPartitioner(2), HashPartitioner(3)]
    start = np.arange(23 * 2, dtype=np.float32).reshape(23, 2)
    with (
        LocalCluster(2, 1, durability="log", log_level="ERROR") as cluster,
        ParameterServerStrategy(cluster, placement="round_robin") as strategy,
    ):
        with strategy.scope():
            tables = [Variable(start, name=f"{number}", partitioner=cut) for number, cut in enumerate(cuts)]
            rule = optimizers.SGD(1.0, momentum=0.5)
        ids, momentum, twin = np.array([1, 4, 22]), np.zeros_like(start), start.copy()

        def train() -> None:
            for table in tables:
                rule.apply_gradients([(IndexedSlices(np.ones((3, 2), np.float32), ids), table)])
            momentum[ids] = momentum[ids] * 0.5 + 1
            twin[ids] -= momentum[ids]
            for table in tables:
                np.testing.assert_array_equal(table.numpy(), twin)
                np.testing.assert_array_equal(table.gather(ids), twin[ids])

        train()
        for table in tables:
            strategy.move_shard(table.variables[0], 1)
        train()
        pid = cluster.pids["ps", 1]
        cluster.kill("ps", 1)
        until(lambda: cluster.pids.get(("ps", 1)) not in (None, pid), "it is started again")
        train()
        assert strategy.add_server() == 2
        strategy.move_shard(tables[0].variables[1], 2)
        train()
        strategy.remove_server()
        train()
