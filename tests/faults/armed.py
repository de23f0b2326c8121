"""A cluster whose roles fail where they are told to, while it runs."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tests.faults.arming.faults import environment, parse
from tests.faults.counting import Counting
from tests.faults.steps import note, wait_for
from tests.faults.support import quiet, status
from tests.waiting import PATIENCE, until

from pscluster.coordinator.api import (
    Checkpoint,
    ClusterCoordinator,
    LocalCluster,
    ParameterServerStrategy,
    Variable,
)
from pscluster.core.errors import UnavailableError
from pscluster.ps.spec import SESSION_BYTES

FUNCTIONS = 60
WORKERS = 2
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
        """From now on these, and no others; each strikes once."""
        for mark in (*self.folder.glob("struck-*"), *self.folder.glob("ended-*")):
            mark.unlink()
        new = self.folder / "new"
        new.write_text(";".join(faults))
        new.rename(self.folder / "armed")  # another file: even within a clock's tick it is seen

    def has_struck(self, fault: str) -> bool:
        """Has it?"""
        return Path(self.folder, f"struck-{parse(fault)[0].name}").exists()

    def how_it_ended(self, fault: str) -> str:
        """Of a call that it struck; empty: that goes on."""
        try:
            return Path(self.folder, f"ended-{parse(fault)[0].name}").read_text()
        except FileNotFoundError:
            return ""

    def until_all_live(self) -> None:
        """Wait until every role is there, and answers."""
        for role in ("ps", "worker"):
            for index in range(2):
                until(lambda role=role, index=index: self.cluster.is_alive(role, index), "it lives")  # type: ignore[misc]
                status(self.cluster, role, index)

    def until_struck(self, *faults: str, calls: bool = True) -> None:
        """Wait until all that they bring about has happened: what never struck is no test."""
        for fault in faults:
            until(lambda fault=fault: self.has_struck(fault), f"{fault} strikes")  # type: ignore[misc]
            if calls:
                until(lambda fault=fault: self.how_it_ended(fault), f"{fault} has ended")  # type: ignore[misc]


@contextmanager
def armed_cluster(
    folder: Path, num_ps: int, num_workers: int, *, revive: bool = False, **options: Any
) -> Iterator[Armed]:
    """Nothing is armed yet. With `revive`, who has died is started again at once, however often that happens."""
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        for name, level in (("pscluster.coordinator", logging.CRITICAL), ("pscluster.local_cluster", logging.ERROR)):
            stack.enter_context(quiet(name, level))  # what fails here fails on purpose
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
    """A cluster's own restarts come later and later; these do not."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for role, index in tasks:
                if not cluster.is_alive(role, index):
                    cluster.restart(role, index, timeout=PATIENCE)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)


class Round:
    """A job that makes every call there is, and knows what it must come to."""

    def __init__(self, armed: Armed, fault: str, strategy: ParameterServerStrategy, folder: Path) -> None:
        self.armed = armed
        self.fault = fault
        self.strategy = strategy
        self.folder = folder
        self.refused: list[str] = []
        self.counting = Counting(strategy)
        self.coordinator = ClusterCoordinator(strategy, max_attempts=10)

    def insist(self, call: Callable[[], object]) -> None:
        """Again, where the documentation says that an error is what becomes of it."""
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
        """A server is not waited for here, but it may be tried again when it is back with its coordinator."""
        self.armed.until_all_live()
        for index in range(2):
            until(lambda index=index: status(self.armed.cluster, "ps", index).state == "serving", "it is back")  # type: ignore[misc]

    def functions(self, count: int) -> list[Any]:
        """Schedule so many that count."""
        step = self.counting.step()
        return [self.coordinator.schedule(step, args=(number,)) for number in range(count)]

    def run(self, *parts: str, exact: bool = True) -> None:
        """Functions that count, and these parts of it; asserts on the way.

        Args:
            exact: nothing may be lost. Otherwise what is missing is what is said to be lost, and in flight at a death.
        """
        count = 0
        if "directory" in parts:
            self.directory()
        if "recall" in parts:
            count += self.recall()
        values = self.functions(FUNCTIONS)
        count += FUNCTIONS
        if "saving" in parts:
            self.saving()
        if "stop" in parts:
            self.stop()
        if "checkpoint" in parts:
            middle = self.save()
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
            assert self.counting.one_count() <= count  # of one moment, between functions
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
        """All have ended, with their values."""
        self.coordinator.join(PATIENCE)
        assert self.coordinator.fetch(values, PATIENCE) == list(range(len(values)))

    def tell(self) -> int:
        """Every worker updates all variables once more, and so says what it was told before a death; how many count."""
        add, folder = self.counting.step(), str(self.folder)

        def add_and_wait(number: int) -> int:
            add()
            note(folder, f"told-{number}")
            wait_for(folder, "all-told")  # so that no worker does it twice
            return number

        values = [self.coordinator.schedule(add_and_wait, args=(number,)) for number in range(WORKERS)]
        try:
            for number in range(WORKERS):
                wait_for(folder, f"told-{number}")
        finally:
            note(folder, "all-told")  # else they would keep their worker from the next job
        self.join(values)
        return WORKERS

    def check_lost(self, count: int, *, all_told: bool) -> None:
        """See `run`. Of two deaths, one close behind the other, it may be that not all is told: a lower bound."""
        counts, lost = self.counting.counts(), self.strategy.lost_updates()
        for name, shards in counts.items():
            assert max(shards) <= count
            untold = count - min(shards) - lost.get(name, 0)
            assert untold >= -2 * WORKERS, (counts, lost)
            assert untold <= 2 * WORKERS or not all_told, (counts, lost)

    def saving(self) -> None:
        """What is made while functions run is saved with what they have done by then."""
        with self.strategy.scope():
            for number in range(20):
                if self.armed.has_struck(self.fault):
                    break
                Variable(np.zeros(2), name=f"more-{number}")

    def stop(self) -> None:
        """Both of a kind are asked to stop while functions run; the one that the fault strikes has no time for it."""
        role = self.fault.partition("/")[0]
        for index in range(2):
            self.armed.cluster.kill(role, index, signal.SIGTERM, timeout=PATIENCE)

    def directory(self) -> None:
        """A variable that is deleted leaves its name to another one."""
        with self.strategy.scope():
            first = Variable(np.zeros(3), name="temporary")
            if "kill" in self.fault:
                self.strategy.client.delete_variable(first.name, first.number, patient=True)
            self.strategy.delete_variable(first)
            self.made_anew = Variable(np.ones(4), name="temporary")
        assert self.made_anew.numpy().tolist() == [1, 1, 1, 1]

    def save(self) -> str:
        """A checkpoint while functions run: its path."""
        path = ""

        def write() -> None:
            nonlocal path
            path = str(self.folder / f"checkpoint-{len(self.refused)}")
            Checkpoint(self.strategy).write(path)

        self.insist(write)
        return path

    def recall(self) -> int:
        """Functions run, and others wait behind them, when a checkpoint wants all of them back; how many count."""
        held = [self.coordinator.schedule(wait_for, args=(str(self.folder), "gate")) for _ in range(WORKERS)]
        behind = self.functions(10)
        try:
            until(lambda: self.coordinator._dispatcher.counts()[1] >= WORKERS, "functions are with the workers")
            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(Checkpoint(self.strategy).write, str(self.folder / "recalled"))
                until(lambda: self.armed.has_struck(self.fault), "they were asked for")
                note(str(self.folder), "gate")
                done.result(PATIENCE)
        finally:
            note(str(self.folder), "gate")  # else they would keep their worker from the next job
        assert self.coordinator.fetch([*held, *behind], PATIENCE) == [*([""] * WORKERS), *range(10)]
        return len(behind)

    def beside_the_stream(self) -> None:
        """A dataset, large arguments and results, a large variable."""
        with self.strategy.scope():
            big = Variable(np.zeros(3 * SESSION_BYTES, np.uint8), name="big")  # its shards are too large for a session
        iterator = iter(self.coordinator.create_per_worker_dataset(lambda: range(10_000)))

        def element(iterator: Any) -> int:
            return int(next(iterator))

        def large(values: Any) -> Any:
            big.assign_add(np.ones(big.shape, np.uint8))
            return values + 1

        elements = [self.coordinator.schedule(element, args=(iterator,)) for _ in range(6)]
        values = [self.coordinator.schedule(large, args=(np.full(LARGE, number, np.uint8),)) for number in range(3)]
        for number, value in enumerate(self.coordinator.fetch(values, PATIENCE)):
            assert value.shape == (LARGE,)
            assert (value == number + 1).all()
        assert (big.numpy() == 3).all()
        self.elements: list[int] = self.coordinator.fetch(elements, PATIENCE)
        del iterator
        gc.collect()  # the workers are told to drop it
