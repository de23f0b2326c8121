"""Who has the devices of a mesh: this process, or workers."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from pscluster.core.errors import CancelledError, MisuseError, PsClusterError
from pscluster.core.functions.definitions import partial_of
from pscluster.core.layouts.mesh import Mesh
from pscluster.spmd.execution.recording import Fetched, Running, Sendable
from pscluster.spmd.execution.sent_programs import ResultsLostError
from pscluster.spmd.variables.held import HeldHere
from pscluster.v1 import worker_pb2
from pscluster.worker.programs.exchange import OneProcess
from pscluster.worker.programs.interpreter import run, run_local, run_program
from pscluster.worker.programs.reading import parse
from pscluster.worker.programs.store import BlockStore

if TYPE_CHECKING:
    from pscluster.coordinator import ClusterCoordinator, RemoteValue
    from pscluster.core.functions.definitions import CapturedFunction

_LAST = worker_pb2.SynchronousSteps.LAST
_OPERATIONS = partial_of("operations on global arrays", run_program)
"""Runs operations outside traced functions; the name is for errors and timelines."""

_NO_NAMED: Mapping[str, Any] = MappingProxyType({})


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
                    program.numbers,
                    program.payloads[0],
                    program.functions,
                    HeldHere(program.variables, program.optimizers),
                )
            except Exception as error:
                return Ended([], error)
        return Ended([fetched])

    def check(self) -> None:
        """Do nothing: programs can always be started."""

    def __len__(self) -> int:
        """Return how many arrays there are."""
        return len(self._store)


def _cause_of(error: CancelledError) -> PsClusterError:
    """Return why a program was cancelled, in words of global arrays: no worker is left, or a function has failed."""
    from pscluster.coordinator.local.monitor import ClusterError  # what needs no cluster should not import it

    if isinstance(first := error.__cause__, ClusterError):
        return type(first)(*first.args)  # which says which workers, and why
    if first is None:
        return error
    cancelled = CancelledError(
        f"a program of global arrays was cancelled, since a scheduled function has failed ({type(first).__name__}): "
        "call it again once that error has been raised, by schedule(), join() or done()"
    )
    cancelled.__cause__ = first
    return cancelled


def _raise_cause(error: CancelledError) -> NoReturn:
    cause = _cause_of(error)
    raise cause from cause.__cause__


class _OnWorkers:
    """A program that runs on workers."""

    def __init__(self, values: Sequence[RemoteValue]) -> None:
        self._values = values
        self._fetched: Fetched | None = None

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for all workers, also if the program has failed on one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        for value in self._values:
            if not value.wait(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return False
        return True

    def result(self) -> Fetched:
        """Return what all workers have fetched."""
        if self._fetched is None:
            try:
                self._fetched = [value.fetch(0) for value in self._values]
            except CancelledError as error:
                _raise_cause(error)
        return self._fetched


class _Step:
    """A program that updates variables: a step of the job's synchronous run, which a thread of its own waits for.

    Only one call takes steps at a time. So one that is started waits for the one before, and so does any program that
    is started after it: see `Workers.start`.
    """

    def __init__(self) -> None:
        self.scheduled, self._ended = threading.Event(), threading.Event()
        self._fetched: Fetched = []
        self._error: BaseException | None = None

    def start(
        self, coordinator: ClusterCoordinator, call: Callable[..., Sequence[RemoteValue]], program: Sendable
    ) -> None:
        """Take the step: `call` schedules it."""
        args = coordinator, call, program
        threading.Thread(target=self._take, args=args, name="global-step", daemon=True).start()

    def _take(
        self, coordinator: ClusterCoordinator, call: Callable[..., Sequence[RemoteValue]], program: Sendable
    ) -> None:
        try:
            with coordinator.synchronous_run.steps(1, _LAST) as (message, committed):
                values = call(steps=message)
                self.scheduled.set()
                for value in values:
                    value.wait()
                returned = [value.fetch() for value in values]
                committed(min(end for end, _ in returned))
            if any(fetched is None for _, fetched in returned) and program.has_results:
                raise ResultsLostError(
                    "a worker died after the updates of a program were applied, and before its results were there: "
                    "only these are lost"
                )
            self._fetched = [fetched or [] for _, fetched in returned]
        except CancelledError as error:
            self._error = _cause_of(error)
        except BaseException as error:
            self._error = error
        finally:
            self.scheduled.set()
            self._ended.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is committed, or has failed."""
        return self._ended.wait(timeout)

    def result(self) -> Fetched:
        """Return what all workers have fetched, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._fetched


class Workers:
    """Workers of a coordinator's cluster: each program runs on all of the mesh, together, as a gang."""

    def __init__(self, coordinator: ClusterCoordinator, mesh: Mesh) -> None:
        self._coordinator = weakref.ref(coordinator)
        self._workers = [index for _, index in mesh.tasks]
        self._store = BlockStore()  # stands for each worker's own
        self._step: _Step | None = None  # the last one
        self._run_program: CapturedFunction | None = None

    @property
    def coordinator(self) -> ClusterCoordinator:
        """The coordinator. MisuseError if it is gone."""
        if (coordinator := self._coordinator()) is None:
            raise MisuseError("the coordinator that this mesh was created with is gone: create a mesh with another one")
        return coordinator

    def is_of(self, coordinator: ClusterCoordinator) -> bool:
        """Return whether they are workers of this coordinator."""
        return self._coordinator() is coordinator

    def check(self) -> None:
        """Raise the error of a scheduled function, if that has not been raised."""
        self.coordinator.check_no_error()

    def start(self, program: Sendable) -> Running:
        """Schedule a program. Raises CancelledError while the error of a scheduled function has not been raised."""
        coordinator = self.coordinator
        definition = program.definition
        if definition is None and program.functions:
            definition = definition_of("local_map", program)
        # Under a definition, workers are sent the text once, and then its digest.
        text = (program.text,) if definition is None else ()
        first = *text, self._store, program.numbers.encoded()
        variables: tuple[Any, ...] = ()
        if program.variables:
            variables = [variable.handle for variable in program.variables], list(program.optimizers)
        args: list[tuple[tuple[Any, ...], Mapping[str, Any]]]
        if any(program.payloads):
            args = [((*first, payloads, *variables), _NO_NAMED) for payloads in program.payloads]
        else:  # the same object for all: it is encoded once
            args = [((*first, (), *variables) if variables else first, _NO_NAMED)] * len(self._workers)
        homes = coordinator.homes_of(self._workers)
        if definition is not None:
            function = coordinator.captured_for_gang(definition)
        else:
            function = self._run_program = self._run_program or coordinator.captured_for_gang(_OPERATIONS)
        if self._step is not None:
            self._step.scheduled.wait()  # programs run in order
            self._step = None
        # The session raises its errors: they concern no other function.
        call = functools.partial(
            coordinator.schedule_members, function, args, homes, isolated=True, waits=program.waits
        )
        if not program.updates:
            try:
                return _OnWorkers(call())
            except CancelledError as error:
                _raise_cause(error)
        self._step = _Step()
        self._step.start(coordinator, call, program)
        return self._step
