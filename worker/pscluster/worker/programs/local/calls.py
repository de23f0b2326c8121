"""Calls of one function, one for each device of a task, which wait for each other in collectives.

One of a task's calls runs at a time, in the order of the devices, each until it waits in a collective or has ended: so
they need not be made for threads, and see the same in every run. With several devices each has a thread, which goes on
when it is told to; a single one runs where it is called. See `rounds` for what is decided between the runs.

Once anything has failed, whatever waits gets an error in its collective, and every later collective raises it again.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

import numpy.typing as npt

from pscluster.core.layouts.mesh import Mesh
from pscluster.worker.programs.exchange import Exchange, gather_bytes
from pscluster.worker.programs.local.rounds import MAX_WHY, Ended, Failed, Status, Waiting, decide, decode, encode
from pscluster.worker.programs.local.transfer import carry_out

Array = npt.NDArray[Any]

Run = Callable[[int], Ended]
"""Makes the call of a device, and returns what is told of its results."""


class Call(Protocol):
    """The call that runs here, for the collectives that it makes."""

    mesh: Mesh
    device: int

    def wait(self, waiting: Waiting, arrays: Sequence[Array]) -> list[Array]:
        """Take part in a collective, and return its result."""


_call: ContextVar[Call | None] = ContextVar("pscluster-local-call", default=None)


def current_call() -> Call | None:
    """Return the call that runs here, if one does."""
    return _call.get()


@contextlib.contextmanager
def _as_current(call: Call) -> Iterator[None]:
    token = _call.set(call)
    try:
        yield
    finally:
        _call.reset(token)


class LocalCalls:
    """Makes the calls of this task's devices, with those of the other tasks."""

    def __init__(self, mesh: Mesh, exchange: Exchange, label: str) -> None:
        self.mesh = mesh
        self.error: BaseException | None = None  # why no collective can be carried out any more
        self._exchange, self._label = exchange, label
        self._rounds = 0
        self._statuses: dict[int, Status] = {}

    def run(self, devices: Sequence[int], run: Run) -> dict[int, Ended]:
        """Make the calls, and return what is told of the results of all devices, those of other tasks, too.

        Raises:
            MisuseError: calls have not made the same collectives.
            MemberUnavailableError: a call of another task has failed, or the task is gone.
            any error: of a call that was made here.
        """
        if len(devices) == 1:
            _Alone(self, devices[0]).run(run)
        else:
            _run_in_turn(self, devices, run)
        return {device: status for device, status in self._statuses.items() if isinstance(status, Ended)}

    @property
    def have_ended(self) -> bool:
        """Whether all calls have, of all tasks."""
        return bool(self._statuses) and all(isinstance(status, Ended) for status in self._statuses.values())

    def round(self, own: Mapping[int, Status], arrays: Mapping[int, Sequence[Array]]) -> dict[int, list[Array]]:
        """Tell the other tasks where this task's calls are, and return the results of those that go on.

        Raises what `rounds.decide` does, also in all later rounds.
        """
        if self.error is not None:
            raise self.error
        self._rounds += 1
        what = f"round {self._rounds} of {self._label}"
        try:
            self._statuses = {}
            for task, data in enumerate(gather_bytes(self._exchange, len(self.mesh.tasks), encode(own), what)):
                self._statuses |= decode(data, self.mesh.devices_of(task), self.mesh)
            groups = decide(self.mesh, self._statuses)
            waiting = {device: status for device, status in self._statuses.items() if isinstance(status, Waiting)}
            return carry_out(self.mesh, self._exchange, groups, waiting, arrays, what)
        except BaseException as error:
            self.error = error
            raise


def _failed(error: BaseException) -> Failed:
    try:
        text = str(error)
    except Exception:  # it is the user's
        text = "without a text"
    return Failed(f"{type(error).__name__}: {text}"[:MAX_WHY])


class _Alone:
    """The call of a task's only device."""

    def __init__(self, calls: LocalCalls, device: int) -> None:
        self.mesh, self.device, self._calls = calls.mesh, device, calls

    def wait(self, waiting: Waiting, arrays: Sequence[Array]) -> list[Array]:
        """Take part in rounds until it is this collective's turn."""
        while True:
            answers = self._calls.round({self.device: waiting}, {self.device: arrays})
            if self.device in answers:
                return answers[self.device]

    def run(self, run: Run) -> None:
        """Make the call, and take part in rounds until all others have ended, too."""
        try:
            with _as_current(self):
                ended = run(self.device)
        except BaseException as error:
            if self._calls.error is None:
                with contextlib.suppress(Exception):  # what it says is known here
                    self._calls.round({self.device: _failed(error)}, {})
            elif self._calls.error is not error:
                raise self._calls.error from error
            raise
        while not self._calls.have_ended or self._calls.error is not None:
            self._calls.round({self.device: ended}, {})


class _InThread:
    """The call of one of several devices: a thread that runs only while `advance` waits for it."""

    def __init__(self, calls: LocalCalls, device: int, run: Run) -> None:
        self.mesh, self.device, self._calls, self._run = calls.mesh, device, calls, run
        self.status: Status | None = None  # None while it runs
        self.error: BaseException | None = None
        self.arrays: Sequence[Array] = ()
        self._answer: list[Array] = []
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=[self._body], name="local-map", daemon=True)

    def advance(self, answer: list[Array] | None = None) -> None:
        """Let it run until it waits or has ended; `answer` is the result of the collective in which it waits."""
        self._answer = answer or []
        self.status = None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._may_go.release()
        self._has_stopped.acquire()
        if not isinstance(self.status, Waiting):
            self._thread.join()

    def wait(self, waiting: Waiting, arrays: Sequence[Array]) -> list[Array]:
        """Wait, in the call's thread, until a collective is carried out."""
        if self._calls.error is None:
            self.status, self.arrays = waiting, arrays
            self._has_stopped.release()
            self._may_go.acquire()
            self.arrays = ()
        if self._calls.error is not None:
            raise self._calls.error
        return self._answer

    def _body(self) -> None:
        try:
            with _as_current(self):
                self.status = self._run(self.device)
        except BaseException as error:
            self.error, self.status = error, _failed(error)
        finally:
            self._has_stopped.release()


def _run_in_turn(calls: LocalCalls, devices: Sequence[int], run: Run) -> None:
    """Make the calls of several devices, one after another between the rounds."""
    threads = {device: _InThread(calls, device, run) for device in devices}
    try:
        for thread in threads.values():
            thread.advance()
        while not calls.have_ended:
            own = {device: thread.status for device, thread in threads.items() if thread.status is not None}
            arrays = {device: thread.arrays for device, thread in threads.items()}
            for device, answer in calls.round(own, arrays).items():
                threads[device].advance(answer)
    except BaseException as error:
        calls.error = calls.error or error
        raise next((thread.error for thread in threads.values() if thread.error is not None), error) from None
    finally:
        for thread in threads.values():
            if isinstance(thread.status, Waiting):
                thread.advance()  # its collective raises the error, and the call ends
