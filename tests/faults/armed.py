"""A cluster whose roles fail at chosen points while it runs."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faults.arming.faults import environment, parse
from tests.faults.counting import Counting
from tests.faults.steps import note, wait_for
from tests.faults.support import quiet, status
from tests.waiting import TIMEOUT, until

from pscluster import spmd
from pscluster.coordinator import optimizers
from pscluster.coordinator.api import (
    Checkpoint,
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
    replica_context,
)
from pscluster.coordinator.scheduling import server_watch
from pscluster.coordinator.scheduling.calls.questions import Question
from pscluster.coordinator.scheduling.synchronous_run import SynchronousRun
from pscluster.core.context import current_function
from pscluster.core.errors import UnavailableError
from pscluster.ps.client.synchronous.reduction import REDUCED_BYTES
from pscluster.ps.spec import SESSION_BYTES
from pscluster.v1 import worker_pb2

FUNCTIONS = 30
WORKERS = 2
STEPS = 6
FINISH_SECONDS = 0.1  # how often the servers are told which functions have ended
LARGE = 100_000
"""Bytes of an argument or a result that travels beside the stream of functions."""

CUT = "worker/message:/pscluster.v1.Worker/Steps=lose_response@3"
"""The link to a worker is lost, so that it is shut out from the servers."""


@dataclass(frozen=True)
class Armed:
    """A cluster in whose roles faults are armed one after the other."""

    cluster: LocalCluster
    folder: Path

    def arm(self, *faults: str) -> None:
        """Arm these faults and no others; each strikes once."""
        for mark in (*self.folder.glob("struck-*"), *self.folder.glob("ended-*")):
            mark.unlink()
        new = self.folder / "new"
        new.write_text(";".join(faults))
        new.rename(self.folder / "armed")  # a new file, so that a change within one clock tick is noticed

    def has_struck(self, fault: str) -> bool:
        """Return whether the fault has struck."""
        return Path(self.folder, f"struck-{parse(fault)[0].name}").exists()

    def how_it_ended(self, fault: str) -> str:
        """Return how the call that the fault struck ended; empty while it continues."""
        try:
            return Path(self.folder, f"ended-{parse(fault)[0].name}").read_text()
        except FileNotFoundError:
            return ""

    def until_all_live(self) -> None:
        """Wait until every role is up and answers."""
        for role in ("ps", "worker"):
            for index in range(2):
                until(lambda role=role, index=index: self.cluster.is_alive(role, index), "it lives")  # type: ignore[misc]
                status(self.cluster, role, index)

    def until_struck(self, *faults: str, calls: bool = True) -> None:
        """Wait until the faults and all their effects are over: a fault that never strikes tests nothing."""
        for fault in faults:
            until(lambda fault=fault: self.has_struck(fault), f"{fault} strikes")  # type: ignore[misc]
            if calls:
                until(lambda fault=fault: self.how_it_ended(fault), f"{fault} has ended")  # type: ignore[misc]

    def run_until_it_ends(self, script: str, folder: Path, *arguments: str, most: int) -> list[int]:
        """Run a script as the coordinator, with the folder and arguments, and again whenever it was killed.

        Return the exit codes, of which there are at most `most`.
        """
        path = folder / "train.py"
        path.write_text(textwrap.dedent(script))
        cluster = self.cluster
        env = {**os.environ, "TF_CONFIG": cluster.tf_config("chief", 0), "PSCLUSTER_TOKEN": cluster.token or ""}
        env |= environment(self.folder, seconds={f"{server_watch.__name__}.FINISH_SECONDS": FINISH_SECONDS})
        command = [sys.executable, "-m", "pscluster.coordinator", "--log-level", "ERROR"]
        codes: list[int] = []
        while not codes or codes[-1] == -signal.SIGKILL:
            given = [*command, *cluster.hand_over_port("chief", 0), str(path), str(folder), *arguments]
            codes.append(subprocess.run(given, env=env, timeout=TIMEOUT).returncode)
            assert len(codes) <= most, codes
        return codes


@contextmanager
def armed_cluster(
    folder: Path, num_ps: int, num_workers: int, *, revive: bool = False, **options: Any
) -> Iterator[Armed]:
    """Yield a cluster without armed faults. With `revive`, a role that dies is restarted immediately, every time."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for name, level in (("pscluster.coordinator", logging.CRITICAL), ("pscluster.local_cluster", logging.ERROR)):
            stack.enter_context(quiet(name, level))  # these failures are deliberate
        stack.enter_context(pytest.MonkeyPatch.context()).setattr(server_watch, "FINISH_SECONDS", FINISH_SECONDS)
        options.setdefault("log_level", os.environ.get("ARMED_LOG_LEVEL", "ERROR"))
        options["env"] = {**environment(folder), **options.get("env", {})}
        cluster = stack.enter_context(LocalCluster(num_ps, num_workers, restart=False, **options))
        if revive:
            stack.enter_context(
                _reviving(cluster, [("ps", n) for n in range(num_ps)] + [("worker", n) for n in range(num_workers)])
            )
        yield Armed(cluster, folder)


@contextmanager
def _reviving(cluster: LocalCluster, tasks: list[tuple[str, int]]) -> Iterator[None]:
    """Restart without the growing delays of a cluster's own restarts."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for role, index in tasks:
                if not cluster.is_alive(role, index):
                    cluster.restart(role, index, timeout=TIMEOUT)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(TIMEOUT)


class Round:
    """A job that makes every kind of call, and knows its right results."""

    def __init__(self, armed: Armed, fault: str, strategy: ParameterServerStrategy, folder: Path) -> None:
        self.armed = armed
        self.fault = fault
        self.strategy = strategy
        self.folder = folder
        self.refused: list[str] = []
        self.counting = Counting(strategy)
        self.coordinator = ClusterCoordinator(strategy, max_attempts=10)

    def insist(self, call: Callable[[], object]) -> None:
        """Try again where the documentation says that the call ends with an error."""
        for _ in range(3):
            try:
                call()
            except UnavailableError as error:
                self.refused.append(str(error))
                self.until_serving()
            else:
                return
        raise AssertionError(f"three times in vain: {self.refused}")

    def until_serving(self) -> None:
        """Wait until a server that came back has its coordinator, for calls that do not wait for a server."""
        self.armed.until_all_live()
        for index in range(2):
            until(lambda index=index: status(self.armed.cluster, "ps", index).state == "serving", "it is back")  # type: ignore[misc]

    def functions(self, count: int) -> list[Any]:
        """Schedule this many functions that count."""
        step = self.counting.step()
        return [self.coordinator.schedule(step, args=(index,)) for index in range(count)]

    def run(self, *parts: str, exact: bool = True) -> None:
        """Run functions that count, and these parts of the job, with assertions.

        Args:
            exact: nothing may be lost. Otherwise only reported losses and updates in flight at a death may be missing.
        """
        count = 0
        if "directory" in parts:
            self.directory()
        if "recall" in parts:
            count += self.recall()
        if "questions" in parts:
            self.questions()
        if "steps" in parts:
            self.steps()
        if "bounded" in parts:
            self.bounded_steps()
        if "arrays" in parts:
            self.arrays()
        values = self.functions(FUNCTIONS)
        count += FUNCTIONS
        if "saving" in parts:
            self.saving()
        if "stop" in parts:
            self.stop()
        if "checkpoint" in parts:
            middle = self.save()
            if "ps.mark" in self.fault or "ps.part" in self.fault:
                assert not self.refused, "a cut that was lost is made again"
        if "beside" in parts:
            self.beside_the_stream()
        self.join(values)
        if not exact:
            self.armed.until_struck(self.fault, calls=False)
            count += self.tell()
            self.check_lost(count, all_told="snapshot" not in parts)
            return
        assert self.counting.one_count() == self.counting.sgd.iterations == count
        if "checkpoint" in parts:
            self.insist(lambda: Checkpoint(self.strategy).read(middle, partial=True))
            assert self.counting.one_count() <= count  # taken at one moment, between functions
            count = self.counting.one_count()
        self.strategy.save_progress(done=count + 10)
        self.join(self.functions(10))
        if "finish" in parts:
            until(lambda: self.armed.has_struck(self.fault), "the servers are told what has ended")
        assert self.counting.one_count() == self.counting.sgd.iterations == count + 10
        assert self.strategy.progress == {"done": count + 10}
        assert self.strategy.lost_updates() == {}
        if "directory" in parts:
            assert self.made_anew.numpy().tolist() == [1, 1, 1, 1], "a late copy has deleted it"

    def join(self, values: list[Any]) -> None:
        """Wait for all functions, and check their values."""
        self.coordinator.join(TIMEOUT)
        assert self.coordinator.fetch(values, TIMEOUT) == list(range(len(values)))

    def tell(self) -> int:
        """Have every worker update all variables once more, and so report what it was told before a death; return the
        count."""
        add, folder = self.counting.step(), str(self.folder)

        def add_and_wait(index: int) -> int:
            add()
            note(folder, f"told-{index}")
            wait_for(folder, "all-told")  # so that no worker does it twice
            return index

        values = [self.coordinator.schedule(add_and_wait, args=(index,)) for index in range(WORKERS)]
        try:
            for index in range(WORKERS):
                wait_for(folder, f"told-{index}")
        finally:
            note(folder, "all-told")  # otherwise they would keep their workers from the next job
        self.join(values)
        return WORKERS

    def check_lost(self, count: int, *, all_told: bool) -> None:
        """See `run`. If two deaths follow each other closely, not every loss may be reported: a lower bound."""
        counts, lost = self.counting.counts(), self.strategy.lost_updates()
        for name, shards in counts.items():
            assert max(shards) <= count
            untold = count - min(shards) - lost.get(name, 0)
            assert untold >= -2 * WORKERS, (counts, lost)
            assert untold <= 2 * WORKERS or not all_told, (counts, lost)

    def saving(self) -> None:
        """Create variables while functions run: they are saved with everything done until then."""
        with self.strategy.scope():
            for index in range(20):
                if self.armed.has_struck(self.fault):
                    break
                Variable(np.zeros(2), name=f"more-{index}")

    def stop(self) -> None:
        """Ask both roles of a kind to stop while functions run; the one that the fault strikes cannot do so cleanly."""
        role = self.fault.partition("/")[0]
        for index in range(2):
            self.armed.cluster.kill(role, index, signal.SIGTERM, timeout=TIMEOUT)

    def directory(self) -> None:
        """Delete a variable and give its name to another one."""
        with self.strategy.scope():
            first = Variable(np.zeros(3), name="temporary")
            if "kill" in self.fault:
                self.strategy.client.delete_variable(first.name, first.id, retry=True)
            self.strategy.delete_variable(first)
            self.made_anew = Variable(np.ones(4), name="temporary")
        assert self.made_anew.numpy().tolist() == [1, 1, 1, 1]

    def save(self) -> str:
        """Save a checkpoint while functions run, and return its path."""
        path = ""

        def write() -> None:
            nonlocal path
            path = str(self.folder / f"checkpoint-{len(self.refused)}")
            Checkpoint(self.strategy).write(path)

        self.insist(write)
        return path

    def questions(self) -> None:
        """Have functions ask several things: each of them gets its own answers."""

        def asks(base: int) -> list[int]:
            context = current_function()
            assert context is not None
            return [context.ask(base + number) for number in range(3)]

        def answer(question: Question) -> None:
            question.reply(10 * question.value)

        values = [self.coordinator.schedule_with(asks, (100 * index,), answer=answer) for index in range(4)]
        for index, results in enumerate(self.coordinator.fetch(values, TIMEOUT)):
            assert results == [10 * (100 * index + number) for number in range(3)]

    def steps(self) -> None:
        """Take synchronous steps on all workers: each counts once, on both servers, and is seen whole."""
        with self.strategy.scope():
            total = Variable(np.zeros(4), name="total")
            large = Variable(np.zeros(3 * REDUCED_BYTES // 8), name="large")  # its gradient is reduced by the workers
            sgd = optimizers.SGD(1.0)

        def step() -> list[float]:
            seen: list[float] = total.numpy().tolist()
            total.assign_add(np.full(4, 1.0 + replica_context().replica_id))
            sgd.apply_gradients([(np.full(large.shape, 1.0 + replica_context().replica_id), large)])
            return seen

        run, collect = self.coordinator.synchronous_run, worker_pb2.SynchronousSteps.LAST
        for first in (0, STEPS):
            with run.steps(STEPS, collect) as (message, committed):
                values = self.coordinator.schedule_gang(
                    step, (), {}, range(WORKERS), WORKERS, None, 0, None, steps=message
                )
                results = self.coordinator.fetch(values, TIMEOUT)
                committed(results[0][0])
            done = first + STEPS
            assert [steps for steps, _ in results] == [done] * WORKERS
            for _, seen in results:  # the last step is taken again if only its results were lost
                assert seen in ([3.0 * (done - 1)] * 4, [3.0 * done] * 4)
            assert total.numpy().tolist() == [3.0 * done] * 4
            assert (large.numpy() == -3.0 * done).all()

    def bounded_steps(self) -> None:
        """Take steps with bounded staleness on all workers: each of each replica counts once, on both servers."""
        with self.strategy.scope():
            total = Variable(np.zeros(4), name="total")

        def step() -> None:
            total.assign_add(np.full(4, 1.0 + replica_context().replica_id))

        options = worker_pb2.SynchronousSteps(staleness=1)
        run = SynchronousRun(self.strategy.context.client.updater, options)
        for last in (STEPS, 2 * STEPS):
            with run.steps(STEPS, worker_pb2.SynchronousSteps.LAST) as (message, _):
                homes = range(WORKERS)
                values = self.coordinator.schedule_gang(step, (), {}, homes, WORKERS, None, 0, None, steps=message)
                assert [steps for steps, _ in self.coordinator.fetch(values, TIMEOUT)] == [last] * WORKERS
            assert total.numpy().tolist() == [3.0 * last] * 4

    def arrays(self) -> None:
        """Compute with global arrays on all workers: what is lost is said, and can be made again."""
        mesh = spmd.create_mesh({"x": WORKERS}, coordinator=self.coordinator)
        for _ in range(4):
            try:
                rows = spmd.distribute(np.arange(12.0).reshape(4, 3), spmd.Layout(["x", None], mesh))
                assert (rows.sum(axis=0) - 1).full(TIMEOUT).tolist() == [17.0, 21.0, 25.0]
                assert rows.relayout([None, "x"]).full(TIMEOUT).tolist() == np.arange(12.0).reshape(4, 3).tolist()
            except spmd.TensorLostError as error:
                self.refused.append(str(error))
        assert len(self.refused) <= 1

    def recall(self) -> int:
        """Make a checkpoint ask for all functions back while some run and others wait; return how many functions
        count."""
        held = [self.coordinator.schedule(wait_for, args=(str(self.folder), "gate")) for _ in range(WORKERS)]
        waiting = self.functions(10)
        try:
            until(
                lambda: self.coordinator._dispatcher.status.stats().in_flight >= WORKERS,
                "functions are with the workers",
            )
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(Checkpoint(self.strategy).write, str(self.folder / "recalled"))
                until(lambda: self.armed.has_struck(self.fault), "they were asked for")
                note(str(self.folder), "gate")
                done.result(TIMEOUT)
        finally:
            note(str(self.folder), "gate")  # otherwise they would keep their workers from the next job
        assert self.coordinator.fetch([*held, *waiting], TIMEOUT) == [*([""] * WORKERS), *range(10)]
        return len(waiting)

    def beside_the_stream(self) -> None:
        """Use a dataset, large arguments and results, and a large variable."""
        with self.strategy.scope():
            big = Variable(np.zeros(3 * SESSION_BYTES, np.uint8), name="big")  # its shards are too large for a session
        iterator = iter(self.coordinator.create_per_worker_dataset(lambda: range(10_000)))

        def element(iterator: Any) -> int:
            return int(next(iterator))

        def large(values: Any) -> Any:
            big.assign_add(np.ones(big.shape, np.uint8))
            return values + 1

        elements = [self.coordinator.schedule(element, args=(iterator,)) for _ in range(6)]
        values = [self.coordinator.schedule(large, args=(np.full(LARGE, index, np.uint8),)) for index in range(3)]
        for index, value in enumerate(self.coordinator.fetch(values, TIMEOUT)):
            assert value.shape == (LARGE,)
            assert (value == index + 1).all()
        assert (big.numpy() == 3).all()
        self.elements: list[int] = self.coordinator.fetch(elements, TIMEOUT)
        del iterator
        gc.collect()  # tells the workers to drop it
