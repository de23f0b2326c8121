"""Who has the devices of a mesh: this process, or workers."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pscluster.core.errors import MisuseError
from pscluster.core.functions.definitions import partial_of
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.recording import Sendable
from pscluster.worker.programs.exchange import OneProcess
from pscluster.worker.programs.interpreter import run, run_local, run_program
from pscluster.worker.programs.program import parse
from pscluster.worker.programs.store import BlockStore

if TYPE_CHECKING:
    from pscluster.coordinator import ClusterCoordinator, RemoteValue
    from pscluster.spmd.session import Fetched


def definition_of(name: str, program: Sendable) -> Callable[..., Any]:
    """Return a program as a function, which is scheduled with its arrays."""
    if program.functions:
        return partial_of(name, run_local, program.text, list(program.functions))
    return partial_of(name, run_program, program.text)


class Ended:
    """A program that has run."""

    def __init__(self, fetched: Fetched, error: BaseException | None = None) -> None:
        self._fetched, self._error = fetched, error

    def wait(self, timeout: float | None = None) -> bool:
        """Return True."""
        del timeout
        return True

    def result(self) -> Fetched:
        """Return what it has fetched, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._fetched


class InProcess:
    """All devices are of this process: programs run where they are started."""

    def __init__(self) -> None:
        self._store = BlockStore()
        self._lock = threading.Lock()

    def start(self, program: Sendable) -> Ended:
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
                    program.functions,
                )
            except Exception as error:
                return Ended([], error)
        return Ended([fetched])

    def __len__(self) -> int:
        """Return how many arrays there are."""
        return len(self._store)


class _OnWorkers:
    """A program that runs on workers."""

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        self._values = values

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all workers, also if the program has failed on one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        left = (None if deadline is None else max(0.0, deadline - time.monotonic()) for _ in self._values)
        return all(value.wait(seconds) for value, seconds in zip(self._values, left, strict=True))

    def result(self) -> Fetched:
        """Return what all workers have fetched."""
        return [value.fetch(0) for value in self._values]


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
        """Schedule a program. Raises CancelledError while the error of a scheduled function has not been raised."""
        from pscluster.coordinator import PerReplica  # what needs no workers should not import it

        if (coordinator := self._coordinator()) is None:
            raise MisuseError("the coordinator that this mesh was created with is gone: create a mesh with another one")
        payloads: list[Any] = [list(payload) for payload in program.payloads]
        rest = (self._store, program.inputs, program.outputs, program.forgotten, PerReplica(payloads))
        # Under a definition, workers are sent the text once, and then its digest.
        fn, args = (run_program, (program.text, *rest)) if program.definition is None else (program.definition, rest)
        if program.definition is None and program.functions:
            fn, args = definition_of("local_map", program), rest
        homes, size = coordinator.members(self._workers)
        # The session raises its errors: they concern no other function.
        return _OnWorkers(coordinator.schedule_gang(fn, args, None, homes, size, None, 0, None, isolated=True))
