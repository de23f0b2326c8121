"""RemoteValue: the result of a scheduled function, once there is one."""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pscluster.coordinator.waiting import Event
from pscluster.core.display.notebook import current_cell
from pscluster.core.errors import FunctionError, WaitTimeoutError
from pscluster.core.handles import StaysHere
from pscluster.core.values import HandleResolver, decode
from pscluster.core.values.arrays import Buffer
from pscluster.v1 import value_pb2

if TYPE_CHECKING:
    from pscluster.coordinator.scheduling.decisions.tasks import Task


class Owner(Protocol):
    """What a RemoteValue needs of its coordinator."""

    def cancel(self, values: Iterable[RemoteValue] | None = None, *, kill_after: float | None = None) -> int:
        """Cancel the functions of these values, and return how many."""

    def interrupted(self, interrupt: KeyboardInterrupt) -> None:
        """Take note that Ctrl-C has ended a wait."""

    def pending(self) -> str:
        """Return which error of another function is to be raised, and what that waits for; or ""."""


class RemoteValueStatus(enum.Enum):
    """Whether a RemoteValue is ready, or why it never will be."""

    NOT_READY = "not ready"
    READY = "ready"
    FAILED = "failed"
    CANCELLED = "cancelled"


_NONE = value_pb2.Value(none=True)
_NOT_DECODED = object()

_events = threading.Lock()  # guards the making of events: few values are waited for individually


class RemoteValue(StaysHere):
    """The result of a scheduled function. Thread-safe.

    There may be a million of them, which Python's garbage collector traverses again and again: objects that it tracks
    are shared, or made only when needed.

    A value that is ready stays so, whatever dies later: it is here, not on the worker.

    Examples:
        >>> value = coordinator.schedule(sorted, args=([3, 1, 2],))
        >>> value.fetch(timeout=60.0)
        [1, 2, 3]
        >>> value.status.name
        'READY'
    """

    instead = "pass it as an argument, `schedule(fn, args=(value,))`, and the function gets its value"
    __slots__ = (
        "__weakref__",
        "_attachments",
        "_decoded",
        "_error",
        "_event",
        "_function",
        "_message",
        "_owner",
        "_resolve_handle",
        "_status",
        "dependents",
    )

    def __init__(self, function: str, resolve_handle: HandleResolver, owner: Owner | None = None) -> None:
        self._function = function
        self._owner = owner
        self._resolve_handle = resolve_handle
        self._status = RemoteValueStatus.NOT_READY
        self._message: value_pb2.Value = _NONE
        self._attachments: Sequence[Buffer] = ()
        self._decoded: Any = _NOT_DECODED
        self._error: Exception | None = None
        self._event: Event | None = None
        self.dependents: list[Task[Any]] | None = None  # tasks that take this as an argument

    # The coordinator's side; it serializes these calls

    def _set_value(self, message: value_pb2.Value, attachments: Sequence[Buffer]) -> None:
        self._message, self._attachments = message, attachments
        self._settle(RemoteValueStatus.READY)

    def _set_error(self, error: Exception, status: RemoteValueStatus) -> None:
        self._error = error
        self._settle(status)

    def _settle(self, status: RemoteValueStatus) -> None:
        with _events:
            self._status = status
            event = self._event
        if event is not None:
            event.set()

    # The user's side

    @property
    def status(self) -> RemoteValueStatus:
        """Return whether it is ready, or why it never will be."""
        return self._status

    @property
    def function(self) -> str:
        """Return the name of the function whose result it is."""
        return self._function

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it; arrays are NumPy arrays.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            FunctionError: the function raised; also an instance of the class it raised. If it is the first error of all
                functions, the next `schedule`, `join` or `done` raises it as well, once, and says so.
            CancelledError: it was cancelled, by `cancel` or because another function failed first.
            WaitTimeoutError: `timeout` seconds have passed.
        """
        return self._fetch(timeout, timeout)

    get = fetch  # TensorFlow has both

    def _fetch(self, left: float | None, timeout: float | None) -> Any:
        """Do what `fetch` does, with `left` of the user's `timeout` seconds left."""
        if not self.wait(left):
            pending = "" if self._owner is None else self._owner.pending()
            raise WaitTimeoutError(
                f"{self._function} has no result after {timeout:g} s; it is still scheduled{pending and f'; {pending}'}"
            )
        if self._error is not None:
            if isinstance(self._error, FunctionError):
                object.__setattr__(self._error, "_fetched", True)  # it may be of a class of the user's, too
                object.__setattr__(self._error, "_shown_in", current_cell())
            raise self._error.with_traceback(None)  # else it would grow with every call
        if self._decoded is _NOT_DECODED:
            # The user may change the arrays; functions that take the value as an argument get it as it came.
            attachments = [memoryview(attachment).toreadonly() for attachment in self._attachments]
            decoded = decode(self._message, attachments=attachments, resolve_handle=self._resolve_handle)
            with _events:
                if self._decoded is _NOT_DECODED:  # else another thread was faster: all get the same object
                    self._decoded = decoded
        return self._decoded

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has a value or an error; return whether it has within `timeout` seconds."""
        return self._status is not RemoteValueStatus.NOT_READY or self._wait(timeout)

    def cancel(self, *, kill_after: float | None = None) -> bool:
        """End the function, as `ClusterCoordinator.cancel` does. Return False if it had ended already.

        Args:
            kill_after: seconds for it to stop, after which its worker's process is ended. None: it may go on forever.
        """
        return self._owner is not None and self._owner.cancel([self], kill_after=kill_after) > 0

    def _wait(self, timeout: float | None) -> bool:
        with _events:
            if self._status is not RemoteValueStatus.NOT_READY:
                return True
            event = self._event = self._event or Event()
        try:
            return event.wait(timeout)
        except KeyboardInterrupt as interrupt:
            if self._owner is not None:
                self._owner.interrupted(interrupt)
            raise

    def __repr__(self) -> str:
        return f"<RemoteValue of {self._function}: {self._status.value}>"
