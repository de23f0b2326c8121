"""Objects that all functions of a worker share, each made here by a function of the user's: see `PerWorker`.

    UNMADE --get()--> MAKING --returned--> MADE      every get() returns the same object
                             --raised----> UNMADE    its step fails; the next get() calls the function again
    any    --drop()-> DROPPED                        the object is forgotten: its handle, or the job, is gone

The lock is held while the function runs, so that steps that run at the same time wait for one object. It is made by the
thread that first asks for it, where thread-bound things such as SQLite's connections are used. Its updates of variables
are not those of the step, which does not repeat them when it runs again on a worker that has the object.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pscluster.core.errors import MisuseError
from pscluster.core.handles import Handle


class WorkerObject(Handle):
    """This worker's own object, which a step function gets for a `PerWorker`; `get` returns it."""

    handle_kind = "object"

    def __init__(self, key: str, description: str, make: Callable[[], Any]) -> None:
        """Take what makes the object; errors name it by `description`."""
        self._key = key
        self._description = description
        self._make: Callable[[], Any] | None = make
        self._lock = threading.RLock()  # a function that asks for its own object fails, rather than waiting for itself
        self._object: tuple[Any] | None = None  # a tuple, since the object may be None

    @property
    def handle_key(self) -> str:
        return self._key

    def get(self) -> Any:
        """Return the object, made now if this is the first call here. Raises what the function raises."""
        if (made := self._object) is None:
            with self._lock:
                made = self._object or self._made()
        return made[0]

    def _made(self) -> tuple[Any]:
        """Make the object. Under the lock."""
        if self._make is None:
            raise MisuseError(f"{self._description} is gone: its handle was dropped, or the job has ended")
        try:
            made = (self._make(),)
        except BaseException as error:
            error.add_note(f"raised by the function that makes {self._description}")
            raise
        if self._make is not None:  # not dropped meanwhile
            self._object = made
        return made

    def drop(self) -> None:
        """Forget the object, which functions that were sent here may still name. Takes no lock: it may be being made.

        One that is dropped while it is made is returned once, and not kept.
        """
        self._make = self._object = None

    def __repr__(self) -> str:
        return f"<{self._description}>"
