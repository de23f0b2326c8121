"""A supervised cluster whose number of workers changes while it runs; a base class.

`scale` is serialized, so the workers are always those with the indices from 0 on. One of them

    none     --more are asked for--> RESERVED   it has room, or an address; if any has not, all is as it was before
    RESERVED ----------------------> as `supervisor.py` says, from `Added` on; `scale` waits until it serves
    any      --fewer are asked for-> jobs are told, then `Removed`; what was reserved is released when it has ended
"""

from __future__ import annotations

import functools
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from pscluster.coordinator.local.supervised import SupervisedCluster
from pscluster.coordinator.local.tasks import Added, Removed, TaskKey, task_name
from pscluster.core import checks
from pscluster.core.checks import configuration_errors
from pscluster.core.errors import MisuseError, UnavailableError, WaitTimeoutError
from pscluster.core.ids import make_identity
from pscluster.core.transport.channels import PeerAddress, wait_for_peers

MAX_WORKERS = 1000
"""The most workers of a cluster."""


class ScalableCluster(SupervisedCluster):
    """Parameter servers and workers of which the workers can become more and fewer.

    Beside what `SupervisedCluster` asks for, subclasses say how a worker gets its place: `_reserve_workers`,
    `_release_worker`, and `_give_up_start`, if a start may take as long as it likes.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._scaling = threading.Lock()

    @abstractmethod
    def _reserve_workers(self, indices: Sequence[int], timeout: float) -> None:
        """Reserve what new workers need. If it raises, nothing is reserved."""

    @abstractmethod
    def _release_worker(self, index: int) -> None:
        """Release what a worker had, which has ended for good."""

    def _give_up_start(self, task: TaskKey) -> None:
        """Have a start of this task fail that has not succeeded."""

    def scale(self, workers: int, *, timeout: float = 60.0) -> None:
        """Start workers, or stop those with the highest indices, until there are `workers`. Return when that is done.

        Those that had ended, or been given up, are started again, with their full number of restarts.

        Jobs on this cluster go on meanwhile: a new worker gets functions at once, and one that is stopped lets the
        function that it runs end within the grace, or gives it back, to run elsewhere. A coordinator in another process
        learns of workers that were started here, and counts one that was there from its start as missing if it is
        stopped.

        Args:
            workers: how many there are afterwards, from 1 to 1,000.
            timeout: seconds for new workers to have their place and to serve, and beyond its grace for each that is
                stopped to end.

        Raises:
            ConfigurationError: `workers` is out of range. Nothing has changed.
            MisuseError: the cluster isn't running.
            ClusterError: there is no room for a worker, and nothing has changed; or one could not be started.
            UnavailableError: a new worker does not serve within `timeout` seconds; it may do so later.
            WaitTimeoutError: a worker does not end.
        """
        with configuration_errors():
            workers = checks.whole("workers", workers, at_least=1, at_most=MAX_WORKERS)
            timeout = checks.real("timeout", timeout, kind="number of seconds", at_least=0)
        with self._scaling:
            with self._changed:
                if self._monitor is None or self._ended.is_set():
                    raise MisuseError("the cluster can't be scaled: it isn't running")
                before = self._counts["worker"]
                there = range(min(before, workers))
                ended = [index for index in there if self._supervisor.state(("worker", index)).phase.is_final]
            if workers > before:
                self._reserve_workers(range(before, workers), timeout)
            for index in ended:
                self.restart("worker", index, timeout=timeout)
            for index in range(before, workers):
                with self._changed:
                    self._counts["worker"] = index + 1
                self._inbox.put(Added(("worker", index)))
            for index in reversed(range(workers, before)):
                self._remove_worker(index, timeout)
            self._wait_until_serving([*ended, *range(before, workers)], timeout)

    def _remove_worker(self, index: int, timeout: float) -> None:
        self._retire_worker(index)
        if self._remove(("worker", index), timeout):
            self._retire_worker(index)  # it may have registered meanwhile, restarted after it had died
            self._release_worker(index)

    def _retire_worker(self, index: int) -> None:
        for job in list(self._jobs):
            job.retire_worker(index)

    def _remove(self, task: TaskKey, timeout: float) -> bool:
        """Stop the last task of a role; False if the whole cluster has ended meanwhile."""
        self._inbox.put(Removed(task))
        self._give_up_start(task)
        with self._changed:
            left = not self._changed.wait_for(
                lambda: self._ended.is_set() or not self._supervisor.has(task), self._grace + timeout
            )
            if left:
                raise WaitTimeoutError(f"{task_name(task)} is still running {self._grace + timeout:g} s after SIGTERM")
            if self._ended.is_set():
                return False
            self._counts[task[0]] = task[1]
        return True

    def _wait_until_serving(self, indices: Sequence[int], timeout: float) -> None:
        """Return when these workers serve. Raises as `scale`."""
        tasks, until = [("worker", index) for index in indices], time.monotonic() + timeout

        def missing() -> list[TaskKey]:
            return [task for task in tasks if not (self._supervisor.has(task) and self._supervisor.state(task).starts)]

        with self._changed:  # then their addresses are known
            self._changed.wait_for(lambda: self._ended.is_set() or self._supervisor.failures or not missing(), timeout)
        self.check()
        if late := missing():
            names = ", ".join(map(task_name, late))
            raise UnavailableError(f"scaling: {names} has not started within {timeout:g} s; it may do so later")
        peers = []
        for task in tasks:
            why_gone = functools.partial(self.why_gone, *task)
            peers.append(PeerAddress(*task, self._address_of(task), self.tls, self.token, why_gone))
        if peers:
            left = max(until - time.monotonic(), 0.0)
            wait_for_peers(peers, make_identity("tool", 0), timeout=left, purpose="scaling")
        self.check()
