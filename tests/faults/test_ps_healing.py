"""A parameter server that dies and comes back: the job continues, with the losses that its durability allows."""

from __future__ import annotations

import gc
import resource
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.faults.counting import Counting
from tests.faults.support import Job, RawClient, ready, running_job, status
from tests.waiting import TIMEOUT, until

from pscluster.coordinator.api import Checkpoint, Variable, optimizers
from pscluster.core.errors import MisuseError, PsClusterError, PSUnavailableError, StaleError, UnavailableError
from pscluster.ps.optim.rules import UpdateRule
from pscluster.v1 import ps_pb2

FUNCTIONS = 500


def kill(job: Job, *servers: int) -> None:
    """Kill these with SIGKILL at once, and wait until they are back."""
    old = {index: job.cluster.kill("ps", index, timeout=TIMEOUT) for index in servers}
    for index, pid in old.items():
        job.cluster.wait_restarted("ps", index, pid, timeout=TIMEOUT)


def failure(call: Callable[[], object]) -> str:
    """The error that it raises, as text."""
    try:
        call()
    except PSUnavailableError as error:
        return str(error)
    return ""


def during(job: Job, step: Any, functions: int, kills: list[tuple[int, ...]]) -> None:
    """Run the functions, and kill servers when a share of them is done."""
    values = [job.coordinator.schedule(step) for _ in range(functions)]
    for nth, servers in enumerate(kills, 1):
        share = functions * nth // (len(kills) + 1)
        job.until_done(values, share)
        kill(job, *servers)
    job.join()


@pytest.mark.timeout(180)
def test_a_log_loses_nothing() -> None:
    """Whichever servers die, one, the other, or both, every function counts once on every element."""
    with running_job(num_ps=2, num_workers=2, shards=2, durability="log") as job:
        counting = Counting(job.strategy)
        during(job, counting.step(), FUNCTIONS, [(0,), (1,), (0, 1)])
        assert counting.counts() == {name: [FUNCTIONS] * 2 for name in ("dense", "sparse", "trained")}
        assert counting.sgd.iterations == FUNCTIONS
        assert job.strategy.lost_updates() == {}


@pytest.mark.timeout(180)
def test_snapshots_lose_what_they_say() -> None:
    """What is missing at the end is what was reported, except for updates in flight at a death."""
    workers = 2
    with running_job(num_ps=2, num_workers=workers, shards=2, durability="snapshot") as job:
        counting = Counting(job.strategy)
        during(job, counting.step(), FUNCTIONS, [(1,), (0, 1)])
        counts, lost = counting.counts(), job.strategy.lost_updates()
        for name, shards in counts.items():
            missing = FUNCTIONS - min(shards)
            assert max(shards) <= FUNCTIONS
            assert abs(missing - lost.get(name, 0)) <= 2 * workers, (counts, lost)


@pytest.mark.timeout(180)
def test_losses_at_rest_are_counted_exactly() -> None:
    """Where no update is under way: also if they are asked for before the server is back."""
    with running_job(num_ps=2, num_workers=2, shards=2, durability="snapshot") as job:
        counting, count = Counting(job.strategy), 0
        for servers in ((0,), (1,), (0, 1)):
            for _ in range(50):
                job.coordinator.schedule(counting.step())
            job.coordinator.join()
            count += 50
            kill(job, *servers)
            lost = job.strategy.lost_updates()
            for name, shards in counting.counts().items():
                assert lost.get(name, 0) == count - min(shards)


@pytest.mark.timeout(120)
def test_calls_outside_of_functions_wait_and_go_on() -> None:
    """A read and an update by the script, begun while the server is down, complete once it has been started by hand."""
    with running_job(durability="log", restart=False) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(3, np.float32), name="count")
        count.assign_add([1, 2, 3])
        job.cluster.kill("ps", 0)
        shapes: list[Any] = []
        threads = [
            threading.Thread(target=lambda: shapes.append(count.numpy().shape)),
            threading.Thread(target=lambda: count.assign_add([1, 1, 1])),
        ]
        for thread in threads:
            thread.start()
        until(lambda: "ps 0 at " in job.coordinator.explain(), "it is said who is waited for", job.coordinator.explain)
        assert "unreachable for" in job.coordinator.explain()
        job.cluster.restart("ps", 0)
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        assert shapes == [(3,)]
        assert count.numpy().tolist() == [2, 3, 4]


@pytest.mark.timeout(180)
def test_checkpoints_wait_and_go_on(tmp_path: Path) -> None:
    """Saving and restoring a checkpoint while the server is down succeed once it has been started by hand.

    Their channel has already found the server unreachable, so that it waits before it dials again.
    """
    with running_job(durability="log", restart=False) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(3, np.float32), name="count")
        checkpoint = Checkpoint(job.strategy)
        count.assign_add([1, 2, 3])
        checkpoint.write(str(tmp_path / "first"))
        calls = [lambda: checkpoint.write(str(tmp_path / "second")), lambda: checkpoint.read(str(tmp_path / "first"))]
        for call in calls:
            count.assign_add([1, 1, 1])
            job.cluster.kill("ps", 0)
            with pytest.raises(UnavailableError):
                job.strategy.client.checkpoint(ps_pb2.CheckpointRequest.DROP, 1)
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(call)
                until(lambda: "unreachable for" in job.coordinator.explain(), "it is missed", job.coordinator.explain)
                job.cluster.restart("ps", 0)
                done.result(TIMEOUT)
        assert count.numpy().tolist() == [1, 2, 3]
        checkpoint.read(str(tmp_path / "second"))
        assert count.numpy().tolist() == [2, 3, 4]


@pytest.mark.timeout(180)
def test_what_was_moved_goes_when_it_is_dropped() -> None:
    """A call that had to wait for a server leaves no reference cycle that keeps its arrays alive."""
    with running_job(num_ps=2, shards=2) as job:
        with job.strategy.scope():
            small = Variable(np.zeros((1 << 10, 4), np.float32), name="small")  # sent on a session
            large = Variable(np.zeros((1 << 20, 4), np.float32), name="large")  # sent on separate streams

        def add(variable: Variable) -> Any:
            variable.assign_add(delta := np.ones(variable.shape, np.float32))
            return delta

        calls = [Variable.numpy, lambda variable: variable.gather(np.arange(len(variable))), add]
        for index, call in enumerate(calls):
            for variable in (small, large):
                call(variable)  # the session that it took is idle now, and will turn out to be broken
                gc.collect()
                gc.disable()
                try:
                    kill(job, index % 2)
                    moved = call(variable)
                    held = [weakref.ref(array) for array in (moved, moved.base) if isinstance(array, np.ndarray)]
                    del moved
                    assert [reference() is None for reference in held] == [True] * len(held), (
                        f"{variable.name}, call {index}"
                    )
                finally:
                    gc.enable()


@pytest.mark.timeout(120)
def test_it_learns_what_was_closed_and_finished_before_it_serves() -> None:
    """A worker or function that ended while the server was down is refused from the first moment on."""
    with running_job(num_workers=2, durability="log", restart=False) as job:
        with job.strategy.scope():
            count = Variable(np.zeros(3, np.float32), name="count")
        job.until_up(2)
        dispatcher = job.coordinator._dispatcher
        connection = dispatcher.state.workers[1].connection
        assert connection is not None
        job.cluster.kill("ps", 0)
        job.coordinator.schedule(lambda: None).fetch(timeout=TIMEOUT)  # function 1, which needs no server
        job.cluster.kill("worker", 1)
        (link,) = dispatcher.state.servers
        until(lambda: list(link._finished), "the coordinator has something to tell: a function")
        until(lambda: link._closed, "and a worker")
        job.cluster.restart("ps", 0)
        assert job.strategy.client.describe_variable("count").name == "count"  # as soon as the server answers
        with RawClient(job, incarnation=connection.incarnation) as raw:
            late = raw.add(count, 1, function=5)
            with pytest.raises(StaleError, match="given up"):
                raw.session(*late)
        with RawClient(job) as raw:
            late = raw.add(count, 1, function=1)
            with pytest.raises(StaleError, match="has ended"):
                raw.session(*late)
        assert count.numpy().tolist() == [0, 0, 0]


@pytest.mark.timeout(120)
def test_a_stop_in_order_loses_nothing_even_with_snapshots() -> None:
    """SIGTERM saves the state last: a server can be replaced while functions run."""
    with running_job(num_ps=2, num_workers=2, shards=2, durability="snapshot") as job:
        counting = Counting(job.strategy)
        values = [job.coordinator.schedule(counting.step()) for _ in range(FUNCTIONS)]
        until(lambda: ready(values) >= FUNCTIONS // 3, "a third is done", job.coordinator.describe)
        job.cluster.kill("ps", 1, signal.SIGTERM)
        job.cluster.restart("ps", 1)
        job.join()
        assert counting.counts() == {name: [FUNCTIONS] * 2 for name in ("dense", "sparse", "trained")}


def own_rule_by_value() -> UpdateRule:
    """A rule whose class is sent by value, like any class defined in a function."""

    @dataclass(frozen=True)
    class Doubling(UpdateRule):
        """p <- p + 2 g."""

        name: ClassVar[str] = "doubling"
        slots: ClassVar[Mapping[str, float]] = {"sum": 0.0}

        def apply(self, param: Any, grad: Any, slots: Any, scalars: Any, scratch: Any) -> None:
            """Add the gradient twice, and keep the sum of all gradients."""
            slots["sum"] += grad
            param += 2 * grad

    return Doubling()


@pytest.mark.timeout(120)
def test_own_rules_and_rates_that_were_changed_are_there_again() -> None:
    """A rule by value is sent again; a learning rate set later, slots and steps are kept."""
    with running_job(durability="snapshot") as job:
        with job.strategy.scope():
            w = Variable(np.zeros(4, np.float32), name="w")
            own = optimizers.Optimizer(own_rule_by_value())
            momentum = optimizers.SGD(learning_rate=1.0, momentum=0.5)
        ones = np.ones(4, np.float32)
        momentum.apply_gradients([(-ones, w)])
        momentum.learning_rate = 2.0
        own.apply_gradients([(ones, w)])
        with job.strategy.scope():
            Variable(0.0, name="last")  # creations are saved with everything before them
        kill(job, 0)
        before = w.numpy().copy()
        momentum.apply_gradients([(-ones, w)])
        assert (w.numpy() - before).tolist() == [2.5] * 4  # Keras: m = 0.5 * 1 + 2 * 1
        assert momentum.iterations == 2
        own.apply_gradients([(ones, w)])
        assert own.slot(w, "sum").numpy().tolist() == [2.0] * 4


@pytest.mark.timeout(120)
def test_without_durability_the_loss_is_an_error_that_says_so() -> None:
    """A server that comes back empty ends the job at once, for every caller, without waiting for the timeout."""
    with running_job(durability="none") as job:
        with job.strategy.scope():
            count = Variable(np.zeros(3, np.float32), name="count")
        job.coordinator.schedule(lambda: count.assign_add([1, 1, 1])).fetch()
        kill(job, 0)
        until(lambda: "has lost its" in failure(job.coordinator.done), "the coordinator has noticed")
        with pytest.raises(PSUnavailableError, match=r"ps 0 at .* has lost its"):
            job.coordinator.schedule(lambda: count.assign_add([1, 1, 1]))
        with pytest.raises(PSUnavailableError, match=r"ps 0 at .* has lost its"):
            count.numpy()


@pytest.mark.timeout(120)
def test_nothing_is_left_of_a_job_that_is_over(tmp_path: Path) -> None:
    """The files are deleted with the job; the next coordinator finds servers that hold nothing."""
    with running_job(durability="log", state_dir=tmp_path) as job:
        with job.strategy.scope():
            Variable(np.zeros(3, np.float32), name="count")
        (folder,) = tmp_path.iterdir()
        assert len(list(folder.iterdir())) > 1
        assert "durability log" in status(job.cluster, "ps", 0).detail
        job.strategy.close()
        until(lambda: [path.name for path in folder.iterdir()] == ["lock"], "the files are gone")


@pytest.mark.timeout(120)
def test_a_rule_by_value_is_refused_where_it_could_not_be_applied_again() -> None:
    """With a log such a rule is refused, and the error says what to do."""
    with running_job(durability="log") as job, job.strategy.scope(), pytest.raises(MisuseError, match="came as a pick"):
        optimizers.Optimizer(own_rule_by_value())


def test_a_learning_rate_that_is_set_while_a_disk_is_full() -> None:
    """Setting it waits for room, like updates, and it survives a death; creating a variable is refused at once."""
    with running_job(num_ps=1, num_workers=1, shards=1, durability="log") as job:
        with job.strategy.scope():
            rule = optimizers.SGD(1.0)
            variable = Variable(np.zeros(3, np.float32), name="variable")
        rule.apply_gradients([(np.ones(3, np.float32), variable)])
        server, (_, hard) = job.cluster.pids["ps", 0], resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.prlimit(server, resource.RLIMIT_FSIZE, (0, hard))
        with ThreadPoolExecutor(1) as pool:
            try:
                with job.strategy.scope(), pytest.raises(PsClusterError, match="File too large"):
                    Variable(np.zeros(3, np.float32), name="refused")
                waiting = pool.submit(setattr, rule, "learning_rate", 10.0)
                before = job.strategy.client.metrics.reconnects[0]
                until(lambda: job.strategy.client.metrics.reconnects[0] > before + 1, "it is tried again")
                assert not waiting.done()
            finally:
                resource.prlimit(server, resource.RLIMIT_FSIZE, (hard, hard))
            waiting.result(TIMEOUT)
        kill(job, 0)
        assert rule.learning_rate == 10.0


def test_what_is_lost_is_counted_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Losses known to the coordinator and workers are counted, though no update follows the death."""
    with running_job(num_ps=1, num_workers=1, shards=1, durability="snapshot") as job:
        with job.strategy.scope():
            variable = Variable(np.zeros(3, np.float32), name="variable")
            by_worker = Variable(np.zeros(3, np.float32), name="by a worker")
        job.strategy.save_progress(epoch=0)
        job.strategy.client.check_saved([])
        resource.prlimit(job.cluster.pids["ps", 0], resource.RLIMIT_FSIZE, (0, -1))  # from now on nothing is saved
        for epoch in range(1, 6):
            job.strategy.save_progress(epoch=epoch)
            variable.assign_add(1.0)
            job.coordinator.schedule(lambda: by_worker.assign_add(1.0))
        job.coordinator.join(TIMEOUT)
        link = job.coordinator._dispatcher.state.servers[0]
        job.cluster.kill("ps", 0, timeout=TIMEOUT)
        until(lambda: link.returns, "the coordinator has it again")
        job.coordinator.join(TIMEOUT)
        told = [record.getMessage() for record in caplog.records]
        (said,) = [text for text in told if "acknowledged updates were lost" in text]
        for name in ("(metadata)", "variable", "by a worker"):
            assert f"5 of '{name}'" in said
        lost = {"(metadata)": 5, "variable": 5, "by a worker": 5}
        assert job.strategy.lost_updates() == lost
        assert job.strategy.progress == {"epoch": 0}
        kill(job, 0)
        assert job.strategy.lost_updates() == lost, "counted once, and kept"
