"""Who has the devices of a mesh: this process, or workers."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pscluster.core.errors import FunctionError, MisuseError
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.recording import Sendable
from pscluster.worker.programs.exchange import OneProcess
from pscluster.worker.programs.interpreter import run, run_program
from pscluster.worker.programs.program import parse
from pscluster.worker.programs.store import BlockStore

if TYPE_CHECKING:
    from pscluster.coordinator import ClusterCoordinator, RemoteValue
    from pscluster.spmd.session import Fetched


class _Ended:
    """A program that has run."""

    ended = True

    def __init__(self, fetched: Fetched, error: BaseException | None = None) -> None:
        self._fetched, self._error = fetched, error

    def result(self, timeout: float | None = None) -> Fetched:
        """Return what it has fetched, or raise its error."""
        del timeout
        if self._error is not None:
            raise self._error
        return self._fetched


class InProcess:
    """All devices are of this process: programs run where they are started."""

    def __init__(self) -> None:
        self._store = BlockStore()
        self._lock = threading.Lock()

    def start(self, program: Sendable) -> _Ended:
        """Run a program."""
        with self._lock:
            try:
                fetched = run(
                    parse(program.text),
                    self._store,
                    OneProcess(),
                    program.inputs,
                    program.outputs,
                    program.forgotten,
                    program.payloads[0],
                )
            except Exception as error:
                return _Ended([], error)
        return _Ended([fetched])

    def settle(self, error: BaseException) -> None:
        """Do nothing: nobody else knows of it."""

    def __len__(self) -> int:
        """Return how many arrays there are."""
        return len(self._store)


class _OnWorkers:
    """A program that runs on workers."""

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        self._values = values

    @property
    def ended(self) -> bool:
        return all(value.wait(0) for value in self._values)

    def result(self, timeout: float | None = None) -> Fetched:
        """Wait for all workers, and return what they have fetched."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for value in self._values:  # all, before the error of one is raised
            if not value.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                value.fetch(0)  # raises WaitTimeoutError
        return [value.fetch() for value in self._values]


class Workers:
    """Workers of a coordinator's cluster: each program runs on all of the mesh, together, as a gang."""

    def __init__(self, coordinator: ClusterCoordinator, mesh: Mesh) -> None:
        self._coordinator = weakref.ref(coordinator)
        self._workers = [index for _, index in mesh.tasks]
        self._store = BlockStore()  # stands for each worker's own

    def is_of(self, coordinator: ClusterCoordinator) -> bool:
        """Return whether they are workers of this coordinator."""
        return self._coordinator() is coordinator

    def start(self, program: Sendable) -> _OnWorkers:
        """Schedule a program. Raises the error of a function that was scheduled before."""
        from pscluster.coordinator import PerReplica  # what needs no workers should not import it

        if (coordinator := self._coordinator()) is None:
            raise MisuseError("the coordinator that this mesh was created with is gone: create a mesh with another one")
        payloads: list[Any] = [list(payload) for payload in program.payloads]
        args = (self._store, program.text, program.inputs, program.outputs, program.forgotten, PerReplica(payloads))
        return _OnWorkers(coordinator.schedule_together(run_program, args, workers=self._workers))

    def settle(self, error: BaseException) -> None:
        """Keep the coordinator from raising the same error again at the next call."""
        coordinator = self._coordinator()
        if coordinator is None or not isinstance(error, FunctionError):
            return
        with contextlib.suppress(type(error)):
            try:
                coordinator.done()
            except FunctionError as other:
                if other is not error:
                    raise
